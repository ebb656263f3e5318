//! One rule of `network_allow` or `network_deny`.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use toolproto::manifest::HostPort;

/// Hosts and ports: `api.example.com:443`, `*.example.com:443`, `10.0.0.0/8:5432`, `[2001:db8::/32]:*`, `*:*`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NetworkRule {
    hosts: Hosts,
    /// Every port when absent.
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Hosts {
    /// Every name, and every public address.
    Any,
    /// This name.
    Name(String),
    /// Every name below this one.
    Below(String),
    /// These addresses.
    Addresses(IpNet),
}

/// The text is no rule.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{0}` is no rule for hosts: it takes `HOST:PORT`, where HOST is a name, `*.NAME`, `*`, an address, or a network such as \
     10.0.0.0/8 or [fd00::/8], and PORT a number or `*`"
)]
pub struct NetworkRuleError(String);

impl TryFrom<String> for NetworkRule {
    type Error = NetworkRuleError;

    fn try_from(text: String) -> Result<Self, NetworkRuleError> {
        parse(&text).ok_or(NetworkRuleError(text))
    }
}

fn parse(text: &str) -> Option<NetworkRule> {
    let (host, port) = text.rsplit_once(':')?;
    let port = match port {
        "*" => None,
        number => Some(number.parse().ok().filter(|port| *port != 0 && number.bytes().all(|b| b.is_ascii_digit()))?),
    };
    // What is left is judged as a host that a tool could list.
    let name = |host: &str| {
        let listed = HostPort::try_from(format!("{host}:1")).ok()?;
        listed.address().is_none().then_some(listed.host)
    };
    let network = |text: &str| {
        let network = text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?;
        // Bits beyond the prefix are a mistake in one or the other.
        (network.trunc() == network).then_some(network)
    };
    let hosts = if host == "*" {
        Hosts::Any
    } else if let Some(parent) = host.strip_prefix("*.") {
        Hosts::Below(name(parent)?)
    } else if let Some(inner) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Hosts::Addresses(network(inner).filter(|network: &IpNet| network.addr().is_ipv6())?)
    } else if let Some(network) = network(host) {
        // Without brackets nobody could tell where an IPv6 address ends.
        if network.addr().is_ipv6() {
            return None;
        }
        Hosts::Addresses(network)
    } else {
        Hosts::Name(name(host)?)
    };
    Some(NetworkRule { hosts, port })
}

impl NetworkRule {
    /// Whether it names this host.
    #[must_use]
    pub fn names(&self, target: &HostPort) -> bool {
        self.has_port(target.port)
            && match &self.hosts {
                Hosts::Any => true,
                Hosts::Name(name) => *name == target.host,
                Hosts::Below(parent) => {
                    target.host.strip_suffix(parent.as_str()).is_some_and(|below| below.ends_with('.'))
                }
                Hosts::Addresses(_) => false,
            }
    }

    /// Whether it names this address.
    #[must_use]
    pub fn holds(&self, address: IpAddr, port: u16) -> bool {
        self.has_port(port) && matches!(&self.hosts, Hosts::Addresses(network) if network.contains(&address))
    }

    /// Whether it names any address with this port.
    #[must_use]
    pub fn could_hold(&self, port: u16) -> bool {
        self.has_port(port) && matches!(self.hosts, Hosts::Addresses(_))
    }

    fn has_port(&self, port: u16) -> bool {
        self.port.is_none_or(|own| own == port)
    }
}

impl fmt::Display for NetworkRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.hosts {
            Hosts::Any => f.write_str("*")?,
            Hosts::Name(name) => f.write_str(name)?,
            Hosts::Below(parent) => write!(f, "*.{parent}")?,
            Hosts::Addresses(network) => {
                let is_one = network.prefix_len() == network.max_prefix_len();
                let text = if is_one { network.addr().to_string() } else { network.to_string() };
                if network.addr().is_ipv6() { write!(f, "[{text}]")? } else { f.write_str(&text)? }
            }
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => f.write_str(":*"),
        }
    }
}

impl From<NetworkRule> for String {
    fn from(rule: NetworkRule) -> Self {
        rule.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> NetworkRule {
        NetworkRule::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn rules_are_read_and_written_alike() {
        for text in [
            "api.example.com:443",
            "*.example.com:*",
            "*:25",
            "*:*",
            "10.0.0.0/8:5432",
            "10.0.0.5:*",
            "[fd00::/8]:443",
            "[::1]:80",
        ] {
            assert_eq!(rule(text).to_string(), text);
        }
        assert_eq!(rule("API.Example.COM.:443").to_string(), "api.example.com:443");
        for text in [
            "",
            "a",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            ":1",
            "*.:1",
            "**:1",
            "a.*:1",
            "10.0.0.1/8:1",
            "10.0.0.0/33:1",
            "fd00::1:1",
            "[10.0.0.1]:1",
            "[fd00::1]",
            "a b:1",
            "127.1:1",
        ] {
            assert!(NetworkRule::try_from(text.to_owned()).is_err(), "{text:?}");
        }
    }

    #[test]
    fn names_and_addresses_are_kept_apart() {
        let target = |text: &str| HostPort::try_from(text.to_owned()).unwrap();
        assert!(rule("*.example.com:443").names(&target("a.b.example.com:443")));
        for text in ["example.com:443", "notexample.com:443", "a.example.com:80", "a.example.com.evil.org:443"] {
            assert!(!rule("*.example.com:443").names(&target(text)), "{text}");
        }
        assert!(!rule("10.0.0.5:443").names(&target("10.0.0.5:443")));
        assert!(rule("10.0.0.0/8:443").holds("10.9.9.9".parse().unwrap(), 443));
        assert!(!rule("10.0.0.0/8:443").holds("::ffff:10.9.9.9".parse().unwrap(), 443));
        assert!(!rule("*:443").holds("10.9.9.9".parse().unwrap(), 443));
    }
}
