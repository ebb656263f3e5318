//! HTTP/1 requests, one after the other on a connection: each must be for the host.
//!
//! Where one request ends and the next begins must be as clear to the server as it is here, so what can be read in two ways
//! (RFC 9112, 11.2) does not pass.

use httparse::{EMPTY_HEADER, Header, Request, Status};
use toolproto::manifest::HostPort;

use super::{MOST_KEPT, Mismatch, is_same_host};
use crate::egress::tally::shown;

const MOST_HEADERS: usize = 128;
/// The longest method; those that are registered are shorter.
const LONGEST_METHOD: usize = 32;

/// What the first line of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstLine {
    /// Not all there, and it may still become a request's.
    Incomplete,
    /// A request's.
    Http,
    /// Something else's.
    Other,
}

/// Looks at the beginning of a connection. Servers skip empty lines before a request.
pub(super) fn first_line(bytes: &[u8]) -> FirstLine {
    let start = bytes.iter().position(|byte| !b"\r\n".contains(byte)).unwrap_or(bytes.len());
    let line = bytes.get(start..).unwrap_or_default();
    let method = line.iter().take_while(|byte| is_token(**byte)).count();
    if method > LONGEST_METHOD || line.get(method).is_some_and(|byte| method == 0 || !b" \t".contains(byte)) {
        return FirstLine::Other;
    }
    let Some(end) = line.iter().position(|byte| *byte == b'\n') else { return FirstLine::Incomplete };
    let last_word = line[..end].rsplit(|byte| b" \t".contains(byte)).find(|word| !word.trim_ascii().is_empty());
    if last_word.is_some_and(|word| word.starts_with(b"HTTP/")) { FirstLine::Http } else { FirstLine::Other }
}

const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'!' | b'#'..=b'\'' | b'*' | b'+' | b'-' | b'.' | b'^'..=b'`' | b'|' | b'~')
}

/// The requests of a connection.
#[derive(Debug, Default)]
pub(super) struct Requests {
    part: Part,
    /// What was read of a head, a chunk's size or a trailer.
    kept: Vec<u8>,
    has_begun: bool,
    switch: Option<Switch>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Head,
    /// So many bytes of a body, then a head.
    Body(u64),
    ChunkSize,
    /// So many bytes of a chunk and its line end, then another chunk.
    Chunk(u64),
    Trailer,
    /// The server's answer decides.
    Switching,
}

/// A protocol that a request wants to go on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Switch {
    Http2,
    Other,
}

/// How long what follows a head is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length(u64),
    Chunked,
}

impl Requests {
    pub(super) const fn awaits_answer(&self) -> bool {
        matches!(self.part, Part::Switching)
    }

    /// Whether the connection is of another protocol from here on.
    pub(super) fn answered(&mut self, has_switched: bool) -> Result<bool, &'static str> {
        self.part = Part::Head;
        match (has_switched, self.switch.take()) {
            (true, Some(Switch::Http2)) => Err("it goes on with HTTP/2, each stream of which names its own host"),
            (true, Some(Switch::Other)) => Ok(true),
            _ => Ok(false),
        }
    }

    /// Reads on.
    pub(super) fn read(&mut self, mut piece: &[u8], target: &HostPort) -> Result<(), Mismatch> {
        while !piece.is_empty() {
            match self.part {
                Part::Body(left) => {
                    let (skipped, rest) = skip(piece, left);
                    self.part = if left > skipped { Part::Body(left - skipped) } else { self.after_body() };
                    piece = rest;
                }
                Part::Chunk(left) => {
                    let (skipped, rest) = skip(piece, left);
                    self.part = if left > skipped { Part::Chunk(left - skipped) } else { Part::ChunkSize };
                    piece = rest;
                }
                Part::Switching => return Err(unclear("it goes on before its switch of protocols is answered")),
                Part::Head => {
                    let Some(rest) = self.keep_until(piece, ends_head)? else { return Ok(()) };
                    piece = rest;
                    let head = std::mem::take(&mut self.kept);
                    self.head(&head, target)?;
                }
                Part::ChunkSize => {
                    let Some(rest) = self.keep_until(piece, ends_line)? else { return Ok(()) };
                    piece = rest;
                    let line = std::mem::take(&mut self.kept);
                    let Ok(Status::Complete((_, size))) = httparse::parse_chunk_size(&line) else {
                        return Err(unclear("a chunk has no size"));
                    };
                    self.part = if size == 0 { Part::Trailer } else { Part::Chunk(size.saturating_add(2)) };
                }
                Part::Trailer => {
                    let Some(rest) = self.keep_until(piece, ends_line)? else { return Ok(()) };
                    piece = rest;
                    let line = std::mem::take(&mut self.kept);
                    if line.trim_ascii().is_empty() {
                        self.part = self.after_body();
                    }
                }
            }
        }
        Ok(())
    }

    /// Keeps bytes up to the end of something, and yields what follows it; nothing when the end is not there yet.
    fn keep_until<'a>(&mut self, piece: &'a [u8], is_end: fn(&[u8]) -> bool) -> Result<Option<&'a [u8]>, Mismatch> {
        for (index, byte) in piece.iter().enumerate() {
            self.kept.push(*byte);
            if *byte == b'\n' && is_end(&self.kept) {
                return Ok(piece.get(index + 1..));
            }
            if self.kept.len() > MOST_KEPT {
                return Err(unclear("a request's head is too long to be looked at"));
            }
        }
        Ok(None)
    }

    fn after_body(&self) -> Part {
        if self.switch.is_some() { Part::Switching } else { Part::Head }
    }

    fn head(&mut self, head: &[u8], target: &HostPort) -> Result<(), Mismatch> {
        let mut headers = [EMPTY_HEADER; MOST_HEADERS];
        let mut request = Request::new(&mut headers);
        match request.parse(head) {
            Ok(Status::Complete(length)) if length == head.len() => {}
            Ok(_) => return Err(unclear("a request ends elsewhere than it seems to")),
            Err(error) => return Err(unclear(&format!("a request cannot be read: {error}"))),
        }
        check_host(&request, target)?;
        let framing = framing(request.headers)?;
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        // Of a later request nobody could tell which answer is its own; it stays HTTP then.
        self.switch = switch(&request).filter(|_| is_first);
        self.part = match framing {
            Framing::Chunked => Part::ChunkSize,
            Framing::Length(0) => self.after_body(),
            Framing::Length(length) => Part::Body(length),
        };
        Ok(())
    }
}

fn skip(piece: &[u8], left: u64) -> (u64, &[u8]) {
    let skipped = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
    (skipped as u64, &piece[skipped..])
}

/// Of lines that all end in a line feed: whether the last one is empty, and one before it is not.
fn ends_head(kept: &[u8]) -> bool {
    let is_empty_line = kept.ends_with(b"\n\n") || kept.ends_with(b"\n\r\n");
    is_empty_line && kept.iter().any(|byte| !b"\r\n".contains(byte))
}

const fn ends_line(_: &[u8]) -> bool {
    true
}

fn unclear(reason: &str) -> Mismatch {
    Mismatch::Unclear(format!("its HTTP cannot be looked at: {reason}"))
}

fn check_host(request: &Request<'_, '_>, target: &HostPort) -> Result<(), Mismatch> {
    let path = request.path.unwrap_or_default();
    let authority = match request.method {
        Some("CONNECT") => Some(path),
        _ if path.starts_with('/') || path == "*" => None,
        _ => match path.split_once("://") {
            Some((_, rest)) => rest.split(['/', '?', '#']).next(),
            None => return Err(unclear("a request's target has no known form")),
        },
    };
    let mut hosts = values(request.headers, "host");
    let host = hosts.next().transpose()?;
    if hosts.next().is_some() {
        return Err(unclear("a request has several Hosts"));
    }
    if host.is_none() && request.version != Some(0) {
        return Err(unclear("a request has no Host"));
    }
    for (what, named) in [("its request", authority), ("its Host", host)] {
        let Some(named) = named else { continue };
        if named.contains('@') {
            return Err(unclear("a request's target has a user before its host"));
        }
        let name = named.rsplit_once(':').map_or(named, |(name, _)| name);
        if !is_same_host(name, target) {
            return Err(Mismatch::Other(what, shown(name)));
        }
    }
    Ok(())
}

fn values<'a>(headers: &'a [Header<'a>], name: &'static str) -> impl Iterator<Item = Result<&'a str, Mismatch>> {
    headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name)).map(|header| {
        let text = std::str::from_utf8(header.value).map_err(|_| unclear("a header is no text"))?;
        Ok(text.trim_ascii())
    })
}

fn framing(headers: &[Header<'_>]) -> Result<Framing, Mismatch> {
    let encodings = values(headers, "transfer-encoding").collect::<Result<Vec<_>, _>>()?;
    let lengths = values(headers, "content-length").collect::<Result<Vec<_>, _>>()?;
    match (encodings.as_slice(), lengths.as_slice()) {
        ([], []) => Ok(Framing::Length(0)),
        ([], [length]) if !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit()) => {
            length.parse().map(Framing::Length).map_err(|_| unclear("a request is too long"))
        }
        ([coding], []) if coding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked),
        _ => Err(unclear("where a request ends can be read in two ways")),
    }
}

fn switch(request: &Request<'_, '_>) -> Option<Switch> {
    if request.method == Some("CONNECT") {
        return Some(Switch::Other);
    }
    let mut protocols = values(request.headers, "upgrade").filter_map(Result::ok).peekable();
    protocols.peek()?;
    let is_http2 = protocols.flat_map(|list| list.split(',')).any(|one| one.trim().eq_ignore_ascii_case("h2c"));
    Some(if is_http2 { Switch::Http2 } else { Switch::Other })
}
