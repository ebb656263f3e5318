//! What went through, and what did not: one per call, for its receipt.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use toolproto::manifest::HostPort;
use toolproto::receipt::{Denial, NetworkClaims};

/// The most different refusals that are told apart; later ones are refused all the same.
const MOST: usize = 64;
/// What kind of denial all of these are.
const HOST: &str = "host";

#[derive(Debug, Default)]
pub(super) struct Tally {
    sent: AtomicU64,
    received: AtomicU64,
    denied: Mutex<Vec<Denial>>,
}

impl Tally {
    /// Bytes that a listed host took.
    pub(super) fn sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that the tool took.
    pub(super) fn received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Notes a refusal, once.
    pub(super) fn deny(&self, denial: Denial) {
        let mut denied = self.denied.lock().unwrap_or_else(PoisonError::into_inner);
        if denied.len() < MOST && !denied.contains(&denial) {
            denied.push(denial);
        }
    }

    /// Whether no refusal is noted any more.
    pub(super) fn is_full(&self) -> bool {
        self.denied.lock().unwrap_or_else(PoisonError::into_inner).len() >= MOST
    }

    /// All of it so far.
    pub(super) fn claims(&self) -> NetworkClaims {
        NetworkClaims {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
            denied: self.denied.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// What a tool wrote, as a receipt and a terminal can show it.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(253).flat_map(char::escape_default).collect()
}

/// A name that the resolver did not know.
pub(super) fn unknown_name(name: &str) -> Denial {
    let name = shown(name);
    denial(format!("{name}: no such name is listed"), format!("[sandbox] hosts = [\"{name}:PORT\"]"))
}

/// A connection to where nobody listens.
pub(super) fn unlisted(target: &str) -> Denial {
    denial(target.to_owned(), format!("[sandbox] hosts = [\"{target}\"]"))
}

/// A connection to an IPv6 address.
pub(super) fn unlisted_ipv6(target: SocketAddr) -> Denial {
    denial(target.to_string(), "none: addresses inside are IPv4; list the host by its name".to_owned())
}

/// A datagram.
pub(super) fn datagram(target: SocketAddr) -> Denial {
    denial(format!("{target} (UDP)"), "none: nothing but TCP is let out".to_owned())
}

/// A listed name that leads where the policy lets nobody.
pub(super) fn forbidden_address(target: &HostPort, address: &str, why: &str, policy: &str) -> Denial {
    denial(
        format!("{target}: {address} is not connected to, {why}"),
        format!("network_allow = [\"{address}\"] in policy `{policy}`"),
    )
}

/// A connection that says it wants somebody else.
pub(super) fn other_host(target: &HostPort, what: &str, named: &str) -> Denial {
    denial(format!("{target}: {what} names {named}"), format!("[sandbox] hosts = [\"{named}:{}\"]", target.port))
}

/// A connection that does not say whom it wants.
pub(super) fn unchecked(target: &HostPort, reason: &str) -> Denial {
    denial(format!("{target}: {reason}"), format!("[sandbox] tls = {{ \"{target}\" = \"off\" }}"))
}

/// A listed host that could not be reached.
pub(super) fn unreachable(target: &HostPort, reason: &str) -> Denial {
    denial(format!("{target}: {reason}"), "none: it is allowed, but was not reached".to_owned())
}

fn denial(detail: String, rule: String) -> Denial {
    Denial::seen(HOST, detail, rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_noted_once_and_bounded() {
        let tally = Tally::default();
        for number in 0..1000 {
            tally.deny(unknown_name(&format!("h{}.example", number % 100)));
        }
        assert!(tally.is_full());
        let denied = tally.claims().denied;
        assert_eq!(denied.len(), MOST);
        assert_eq!(denied[1].detail, "h1.example: no such name is listed");
        let escape = unknown_name("\u{1b}[2Jx\n\0");
        assert!(!format!("{}{}", escape.detail, escape.rule).contains(char::is_control), "{escape:?}");
    }
}
