//! Which hosts a call may be let out to: what a tool lists, below what its policy allows. Decisions only, without any network.
//!
//! ```text
//!   hosts of the tool ──► Ceiling::admit (launcher, at launch: names) ──► Passage, an address and a port inside
//!   a connection      ──► Ceiling::judge (agentd, per connection: the address that the name resolved to)
//! ```
//!
//! Names are what is allowed; addresses are what must not be reached by a name that its owner points elsewhere. So an
//! address that is not public counts only where a rule of the policy names that address itself.

mod address;
mod rule;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};
use toolproto::manifest::{HostPort, MAX_HOSTS, TlsMode};

pub use self::address::special;
pub use self::rule::{NetworkRule, NetworkRuleError};

/// The resolver's address inside, and the loopback interface's own.
pub const RESOLVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The network from which names get their addresses inside: for measuring devices (RFC 2544), so nobody's.
pub const INSIDE_PREFIX: u8 = 15;

/// What a policy allows at most.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ceiling {
    /// `network_allow`; empty means public addresses on any port.
    pub allow: Vec<NetworkRule>,
    /// `network_deny`, which goes first.
    pub deny: Vec<NetworkRule>,
}

/// Why a host may not be listed, or an address not be connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A rule of `network_deny` names it.
    Denied(NetworkRule),
    /// No rule of `network_allow` names it.
    NotAllowed,
    /// It is no public address; the text says what it is.
    Special(&'static str),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(rule) => write!(f, "network_deny = [\"{rule}\"] forbids it"),
            Self::NotAllowed => f.write_str("network_allow does not name it"),
            Self::Special(what) => write!(f, "it is {what}"),
        }
    }
}

impl Ceiling {
    /// Whether a tool may list this host. What a name resolves to is judged at each connection.
    ///
    /// # Errors
    /// With what stands against it.
    pub fn admit(&self, target: &HostPort) -> Result<(), Refusal> {
        if let Some(address) = target.address() {
            return self.judge(target, address.into(), false);
        }
        if let Some(rule) = self.deny.iter().find(|rule| rule.names(target)) {
            return Err(Refusal::Denied(rule.clone()));
        }
        let may_match = |rule: &NetworkRule| rule.names(target) || rule.could_hold(target.port);
        if self.allow.is_empty() || self.allow.iter().any(may_match) { Ok(()) } else { Err(Refusal::NotAllowed) }
    }

    /// Whether a connection to a listed host may go to this address, which `is_own` of the host that agentd runs on.
    ///
    /// # Errors
    /// With what stands against it.
    pub fn judge(&self, target: &HostPort, address: IpAddr, is_own: bool) -> Result<(), Refusal> {
        if let Some(rule) = self.deny.iter().find(|rule| rule.names(target) || rule.holds(address, target.port)) {
            return Err(Refusal::Denied(rule.clone()));
        }
        if self.allow.iter().any(|rule| rule.holds(address, target.port)) {
            return Ok(());
        }
        if let Some(what) = special(address) {
            return Err(Refusal::Special(what));
        }
        if is_own {
            return Err(Refusal::Special("an address of this host"));
        }
        if self.allow.is_empty() || self.allow.iter().any(|rule| rule.names(target)) {
            Ok(())
        } else {
            Err(Refusal::NotAllowed)
        }
    }
}

/// A listed host with its place inside the call's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passage {
    /// The host outside.
    pub target: HostPort,
    /// Its address inside.
    pub inside: Ipv4Addr,
    /// What connections to it must look like.
    pub tls: TlsMode,
}

/// A host cannot have a place inside.
#[derive(Debug, thiserror::Error)]
pub enum PassageError {
    /// Too many.
    #[error("{0} hosts are listed; at most {MAX_HOSTS} can be")]
    TooMany(usize),
    /// No host has such an address.
    #[error("{0} is no address that a host can have")]
    NoHost(Ipv4Addr),
}

/// Gives each listed host an address inside: a name gets one of its own, an address stays what it is.
///
/// # Errors
/// When there are too many, or one can have no place.
pub fn passages(hosts: &[HostPort], tls: impl Fn(&HostPort) -> TlsMode) -> Result<Vec<Passage>, PassageError> {
    if hosts.len() > MAX_HOSTS {
        return Err(PassageError::TooMany(hosts.len()));
    }
    let mut names: Vec<&str> = Vec::new();
    let mut passages: Vec<Passage> = Vec::new();
    for target in hosts {
        if passages.iter().any(|passage| passage.target == *target) {
            continue;
        }
        let inside = match target.address() {
            Some(address) if has_place(address) => address,
            Some(address) => return Err(PassageError::NoHost(address)),
            // Every resolver answers for these without asking anybody (RFC 6761).
            None if is_localhost(&target.host) => Ipv4Addr::LOCALHOST,
            None => {
                let index = names.iter().position(|name| *name == target.host).unwrap_or_else(|| {
                    names.push(&target.host);
                    names.len() - 1
                });
                nth_inside(index)
            }
        };
        passages.push(Passage { target: target.clone(), inside, tls: tls(target) });
    }
    Ok(passages)
}

/// Whether a name stands for the machine itself.
#[must_use]
pub fn is_localhost(name: &str) -> bool {
    name == "localhost" || name.ends_with(".localhost")
}

/// The network from which names get their addresses.
#[must_use]
pub fn is_inside(address: Ipv4Addr) -> bool {
    address.octets()[0] == RESOLVER.octets()[0] && address.octets()[1] & 0xfe == RESOLVER.octets()[1]
}

fn has_place(address: Ipv4Addr) -> bool {
    !(address.octets()[0] == 0 || address.is_multicast() || address.octets()[0] >= 240 || is_inside(address))
}

/// After the resolver's. The index is below [`MAX_HOSTS`].
fn nth_inside(index: usize) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(RESOLVER) + 1 + u32::try_from(index).unwrap_or(u32::MAX - u32::from(RESOLVER) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> HostPort {
        HostPort::try_from(text.to_owned()).unwrap()
    }

    fn rules(texts: &[&str]) -> Vec<NetworkRule> {
        texts.iter().map(|text| NetworkRule::try_from((*text).to_owned()).unwrap()).collect()
    }

    fn ceiling(allow: &[&str], deny: &[&str]) -> Ceiling {
        Ceiling { allow: rules(allow), deny: rules(deny) }
    }

    #[test]
    fn without_rules_names_lead_to_public_addresses() {
        let open = Ceiling::default();
        let target = host("api.example.com:443");
        assert_eq!(open.admit(&target), Ok(()));
        assert_eq!(open.judge(&target, "93.184.216.34".parse().unwrap(), false), Ok(()));
        assert_eq!(
            open.judge(&target, "93.184.216.34".parse().unwrap(), true),
            Err(Refusal::Special("an address of this host"))
        );
        for address in ["10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "::ffff:93.184.216.34", "fd00::1"] {
            let verdict = open.judge(&target, address.parse().unwrap(), false);
            assert!(matches!(verdict, Err(Refusal::Special(_))), "{address}: {verdict:?}");
        }
        assert!(matches!(open.admit(&host("10.0.0.1:80")), Err(Refusal::Special(_))));
        assert_eq!(open.admit(&host("93.184.216.34:80")), Ok(()));
    }

    #[test]
    fn a_name_opens_no_private_address_and_an_address_no_other_name() {
        let by_name = ceiling(&["db.internal:5432"], &[]);
        let target = host("db.internal:5432");
        assert_eq!(by_name.admit(&target), Ok(()));
        assert!(matches!(by_name.judge(&target, "10.0.0.5".parse().unwrap(), false), Err(Refusal::Special(_))));
        assert_eq!(by_name.judge(&target, "93.184.216.34".parse().unwrap(), false), Ok(()));
        assert_eq!(by_name.admit(&host("db.internal:5433")), Err(Refusal::NotAllowed));

        let by_address = ceiling(&["10.0.0.0/8:5432"], &[]);
        assert_eq!(by_address.admit(&target), Ok(()));
        assert_eq!(by_address.judge(&target, "10.0.0.5".parse().unwrap(), true), Ok(()));
        assert_eq!(by_address.judge(&target, "93.184.216.34".parse().unwrap(), false), Err(Refusal::NotAllowed));
        assert!(matches!(by_address.judge(&target, "192.168.0.5".parse().unwrap(), false), Err(Refusal::Special(_))));
        assert_eq!(by_address.admit(&host("db.internal:22")), Err(Refusal::NotAllowed));
    }

    #[test]
    fn a_denial_goes_first() {
        let both = ceiling(&["*:*", "10.0.0.0/8:*"], &["*.example.com:*", "10.0.0.5:*", "*:25"]);
        assert!(matches!(both.admit(&host("api.example.com:443")), Err(Refusal::Denied(_))));
        assert!(matches!(both.admit(&host("mail.example.org:25")), Err(Refusal::Denied(_))));
        let target = host("example.org:443");
        assert_eq!(both.admit(&target), Ok(()));
        assert!(matches!(both.judge(&target, "10.0.0.5".parse().unwrap(), false), Err(Refusal::Denied(_))));
        assert_eq!(both.judge(&target, "10.0.0.6".parse().unwrap(), false), Ok(()));
        assert_eq!(both.judge(&target, "93.184.216.34".parse().unwrap(), false), Ok(()));
    }

    #[test]
    fn each_name_has_one_address_inside() {
        let listed = ["a.example:80", "b.example:80", "a.example:443", "10.0.0.9:22", "localhost:8080", "a.example:80"];
        let passages = passages(&listed.map(host), |_| TlsMode::Auto).unwrap();
        let inside: Vec<_> = passages.iter().map(|passage| passage.inside.to_string()).collect();
        assert_eq!(inside, ["198.18.0.2", "198.18.0.3", "198.18.0.2", "10.0.0.9", "127.0.0.1"]);
        assert!(passages.iter().take(3).all(|passage| is_inside(passage.inside)));
    }

    #[test]
    fn what_can_have_no_place_is_refused() {
        for text in ["0.0.0.0:80", "224.0.0.1:80", "255.255.255.255:80", "198.19.0.1:80"] {
            assert!(passages(&[host(text)], |_| TlsMode::Auto).is_err(), "{text}");
        }
        let many: Vec<_> = (0..=MAX_HOSTS).map(|number| host(&format!("h{number}:80"))).collect();
        assert!(matches!(passages(&many, |_| TlsMode::Auto), Err(PassageError::TooMany(65))));
        assert_eq!(passages(&many[1..], |_| TlsMode::Auto).unwrap().len(), MAX_HOSTS);
    }
}
