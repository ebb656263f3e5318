//! Whether a connection is for the host that it was let out to: the server's name in TLS, the Host of HTTP requests.
//!
//! ```text
//!              first byte 0x16                   ClientHello read, its name is right
//!   Undecided ─────────────────► Tls ────────────────────────────────────────────► Done
//!      │ first line ends in HTTP/…                     switched protocols
//!      ├─────────────────────────► Http (each request) ─────────────────────────► Done
//!      └ anything else ──────────────────────────────────────────────────────────► Done
//! ```
//!
//! Nothing is held back: what is not yet complete says nothing to a server either, so all that must not pass is the piece that
//! completes what is wrong. So protocols in which the server speaks first, or in which nobody ever ends a line, pass unhindered.

mod http;
mod tls;

use toolproto::manifest::{HostPort, TlsMode};
use toolproto::receipt::Denial;

use self::http::Requests;
use self::tls::Hello;
use super::tally::{other_host, unchecked};

/// The most bytes that are kept to understand the beginning of something.
const MOST_KEPT: usize = 16 << 10;

/// The check of one connection. It sees what the tool sends, in order.
pub(super) struct Inspection<'a> {
    target: &'a HostPort,
    mode: TlsMode,
    state: State,
}

enum State {
    Undecided(Vec<u8>),
    Tls(Box<Hello>),
    Http(Requests),
    Done,
}

/// Why a connection does not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mismatch {
    /// It is for somebody else: what said so, and who.
    Other(&'static str, String),
    /// For whom it is cannot be told.
    Unclear(String),
}

impl<'a> Inspection<'a> {
    pub(super) fn new(target: &'a HostPort, mode: TlsMode) -> Self {
        let state = if mode == TlsMode::Off { State::Done } else { State::Undecided(Vec::new()) };
        Self { target, mode, state }
    }

    /// Looks at the next piece; it may be passed on unless this fails.
    ///
    /// # Errors
    /// With what to note: the connection must be reset.
    pub(super) fn look(&mut self, piece: &[u8]) -> Result<(), Denial> {
        self.advance(piece).map_err(|mismatch| match mismatch {
            Mismatch::Other(what, named) => other_host(self.target, what, &named),
            Mismatch::Unclear(reason) => unchecked(self.target, &reason),
        })
    }

    /// Whether what comes next depends on the server's answer to a request to switch protocols.
    pub(super) const fn awaits_answer(&self) -> bool {
        matches!(&self.state, State::Http(requests) if requests.awaits_answer())
    }

    /// Whether the server's first answer has switched protocols.
    ///
    /// # Errors
    /// With what to note, when nothing that follows could be checked.
    pub(super) fn answered(&mut self, has_switched: bool) -> Result<(), Denial> {
        if let State::Http(requests) = &mut self.state {
            match requests.answered(has_switched) {
                Ok(true) => self.state = State::Done,
                Ok(false) => {}
                Err(reason) => return Err(unchecked(self.target, reason)),
            }
        }
        Ok(())
    }

    fn advance(&mut self, piece: &[u8]) -> Result<(), Mismatch> {
        match &mut self.state {
            State::Done => Ok(()),
            State::Tls(hello) => {
                if hello.read(piece, self.target)? {
                    self.state = State::Done;
                }
                Ok(())
            }
            State::Http(requests) => requests.read(piece, self.target),
            State::Undecided(kept) => {
                kept.extend_from_slice(piece);
                let kept = std::mem::take(kept);
                self.state = self.decide(kept)?;
                Ok(())
            }
        }
    }

    fn decide(&self, kept: Vec<u8>) -> Result<State, Mismatch> {
        if kept.first() == Some(&tls::HANDSHAKE) {
            let mut hello = Hello::new();
            let is_read = hello.read(&kept, self.target)?;
            return Ok(if is_read { State::Done } else { State::Tls(Box::new(hello)) });
        }
        if self.mode == TlsMode::Required && !kept.is_empty() {
            return Err(Mismatch::Unclear("it does not begin with TLS, which is required".to_owned()));
        }
        match http::first_line(&kept) {
            http::FirstLine::Incomplete if kept.len() > MOST_KEPT => {
                Err(Mismatch::Unclear("its first line is too long to be looked at".to_owned()))
            }
            http::FirstLine::Incomplete => Ok(State::Undecided(kept)),
            http::FirstLine::Other => Ok(State::Done),
            http::FirstLine::Http => {
                let mut requests = Requests::default();
                requests.read(&kept, self.target)?;
                Ok(State::Http(requests))
            }
        }
    }
}

/// Whether a name that a client gave is the host's.
fn is_same_host(named: &str, target: &HostPort) -> bool {
    named.strip_suffix('.').unwrap_or(named).eq_ignore_ascii_case(&target.host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> HostPort {
        HostPort::try_from("api.example.com:80".to_owned()).unwrap()
    }

    /// Sends it at once, and byte by byte: both must end alike.
    fn look(mode: TlsMode, bytes: &[u8]) -> Result<(), Denial> {
        let target = target();
        let at_once = Inspection::new(&target, mode).look(bytes);
        let mut inspection = Inspection::new(&target, mode);
        let in_pieces = bytes.iter().try_for_each(|byte| inspection.look(&[*byte]));
        assert_eq!(at_once, in_pieces, "{:?}", String::from_utf8_lossy(bytes));
        at_once
    }

    fn refused(bytes: &str) -> String {
        look(TlsMode::Auto, bytes.as_bytes()).unwrap_err().detail
    }

    #[test]
    fn other_protocols_pass() {
        for text in [
            &b"EHLO mail.example.com\r\n"[..],
            b"PING\r\n",
            b"hello",
            b"A",
            b"\0\0\0\x08\x04\xd2\x16\x2f",
            b"SSH-2.0-OpenSSH_9.2\r\n",
            b"*1\r\n$4\r\nPING\r\n",
            b"a1 LOGIN user password\r\n",
        ] {
            assert_eq!(look(TlsMode::Auto, text), Ok(()));
            assert!(look(TlsMode::Required, text).is_err());
            assert_eq!(look(TlsMode::Off, text), Ok(()));
        }
    }

    #[test]
    fn requests_for_the_host_pass() {
        for text in [
            "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "\r\nGET / HTTP/1.1\r\nhost:API.example.com.:80\r\n\r\n",
            "GET http://api.example.com/x?y=http://other.com HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "OPTIONS * HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "GET / HTTP/1.0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 33\r\n\r\nGET / HTTP/1.1\r\nHost: other.com\r\nGET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nA: b\r\n\r\nGET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        ] {
            assert_eq!(look(TlsMode::Auto, text.as_bytes()), Ok(()), "{text}");
        }
    }

    #[test]
    fn requests_for_others_do_not_pass() {
        for text in [
            "GET / HTTP/1.1\r\nHost: other.com\r\n\r\n",
            "GET / HTTP/1.1\nHost: other.com\n\n",
            "get / HTTP/1.1\r\nHost: other.com\r\n\r\n",
            "GET http://other.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "CONNECT other.com:443 HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\nGET / HTTP/1.1\r\nHost: other.com\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 2\r\n\r\nxxGET / HTTP/1.1\r\nHost: other.com\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: other.com\r\n\r\n",
        ] {
            assert!(refused(text).contains("names other.com"), "{text}");
        }
    }

    #[test]
    fn what_can_be_read_in_two_ways_does_not_pass() {
        for text in [
            "GET / HTTP/1.1\r\nHost: api.example.com\r\nHost: other.com\r\n\r\n",
            "GET http://api.example.com@other.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "GET / HTTP/1.1\r\n\r\n",
            "GET\t/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "GET / HTTP/1.1\r\nHost : api.example.com\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: +2\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: gzip\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\nwhatever\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        ] {
            let denial = look(TlsMode::Auto, text.as_bytes()).unwrap_err();
            assert!(denial.rule.contains("tls"), "{text}: {denial:?}");
        }
        let endless = format!("GET / HTTP/1.1\r\nHost: api.example.com\r\nA: {}", "x".repeat(MOST_KEPT));
        assert!(refused(&endless).contains("too long"));
    }

    #[test]
    fn after_a_switch_anything_passes_and_without_one_nothing_else() {
        let request = b"GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
        let target = target();
        let begun = || {
            let mut inspection = Inspection::new(&target, TlsMode::Auto);
            inspection.look(request).unwrap();
            assert!(inspection.awaits_answer());
            inspection
        };
        let other = b"GET / HTTP/1.1\r\nHost: other.com\r\n\r\n";
        let mut switched = begun();
        switched.answered(true).unwrap();
        assert!(!switched.awaits_answer());
        assert_eq!(switched.look(other), Ok(()), "it is no HTTP any more");
        let mut ignored = begun();
        ignored.answered(false).unwrap();
        assert!(ignored.look(other).is_err());
        let mut hasty = Inspection::new(&target, TlsMode::Auto);
        assert!(hasty.look(&[&request[..], other].concat()).is_err());
        // Each stream of HTTP/2 could name another host.
        let mut http2 = Inspection::new(&target, TlsMode::Auto);
        http2.look(&String::from_utf8_lossy(request).replace("websocket", "h2c").into_bytes()).unwrap();
        assert!(http2.answered(true).is_err());
    }
}
