//! A program and its confinement: what the manifests of tools and extensions have in common.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Span};

/// A host name and a TCP port that a tool may connect to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPort {
    /// The name, in lower case, without a trailing dot.
    pub host: String,
    /// The port, not 0.
    pub port: u16,
}

/// The text is not `host:port`.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a host with a port, such as \"api.example.com:443\"")]
pub struct HostPortError(String);

impl TryFrom<String> for HostPort {
    type Error = HostPortError;

    fn try_from(text: String) -> Result<Self, HostPortError> {
        let parse = || {
            let (host, port) = text.rsplit_once(':')?;
            let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
            let is_label = |label: &str| {
                !label.is_empty()
                    && label.len() <= 63
                    && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            };
            let port = port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse().ok()).flatten()?;
            let is_host = host.len() <= 253 && host.split('.').all(is_label) && !is_odd_address(&host);
            (port != 0 && is_host).then_some(Self { host, port })
        };
        parse().ok_or_else(|| HostPortError(text.clone()))
    }
}

impl HostPort {
    /// The address, where the host is one and not a name.
    #[must_use]
    pub fn address(&self) -> Option<Ipv4Addr> {
        self.host.parse().ok()
    }
}

/// Text such as `127.1`, `0x7f.1` or `2130706433`: no name, but an address to those who read it as inet_aton(3) does.
fn is_odd_address(host: &str) -> bool {
    let last = host.rsplit('.').next().unwrap_or(host);
    let digits = last.strip_prefix("0x").unwrap_or(last);
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit())
        || (last.len() > digits.len() && digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    is_number && host.parse::<Ipv4Addr>().is_err()
}

impl From<HostPort> for String {
    fn from(value: HostPort) -> Self {
        value.to_string()
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// What a connection to a listed host must look like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TlsMode {
    /// TLS that names the host as its server; nothing else passes.
    Required,
    /// Anything; nothing is looked at.
    Off,
    /// Anything, but TLS must name the host as its server, and an HTTP request must name it as its Host.
    #[default]
    Auto,
}

/// How long a call may take: a named tier, or an own time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeout {
    /// A tier that agentd.toml gives its length.
    Tier(Tier),
    /// An own time.
    After(Duration),
}

/// A tier of time-outs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Calls of models; 30 s.
    Model,
    /// HTTP requests; 3 s.
    Http,
    /// Database queries; 5 s.
    Database,
    /// Computation; 60 s.
    Compute,
    /// Compilers and the like; 600 s.
    Build,
}

/// A program in its folder, how it is run, and what it may do.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfinedProgram {
    /// The runtime's name.
    pub runtime: String,
    /// The program, relative to its folder.
    pub entry: PathBuf,
    /// How long a call may take.
    pub timeout: Timeout,
    /// Memory limit, if narrower than the policy's.
    pub memory: Option<Bytes>,
    /// Limit of processes, if narrower than the policy's.
    pub pids: Option<u32>,
    /// Cap of what it may write to stdout.
    pub max_response: Bytes,
    /// The policy's name.
    pub policy: String,
    /// Hosts it may connect to.
    pub hosts: Vec<HostPort>,
    /// What connections to some of them must look like; the others are [`TlsMode::Auto`].
    pub tls: BTreeMap<HostPort, TlsMode>,
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// Names of secrets that it gets.
    pub secrets: Vec<String>,
}

/// What in a manifest cannot be.
pub(crate) struct Misfit {
    pub(crate) table: &'static str,
    pub(crate) key: &'static str,
    pub(crate) reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunSection {
    runtime: String,
    entry: PathBuf,
    #[serde(default)]
    pub(crate) prewarm: u32,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TimeoutSection {
    tier: Option<Tier>,
    after: Option<Span>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LimitsSection {
    memory: Option<Bytes>,
    pids: Option<u32>,
    max_response_bytes: Option<Bytes>,
    pub(crate) spill: Option<Bytes>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SandboxSection {
    policy: Option<String>,
    hosts: Vec<HostPort>,
    tls: BTreeMap<HostPort, TlsMode>,
    env: BTreeMap<String, String>,
    secrets: Vec<String>,
}

/// The most hosts that one tool may name.
pub const MAX_HOSTS: usize = 64;
/// The response cap where the manifest names none.
pub const DEFAULT_MAX_RESPONSE: Bytes = Bytes::mib(1);

impl ConfinedProgram {
    /// Builds it from a manifest's tables.
    pub(crate) fn parse(
        run: RunSection,
        timeout: TimeoutSection,
        limits: LimitsSection,
        sandbox: SandboxSection,
    ) -> Result<Self, Misfit> {
        let refuse = |table: &'static str, key: &'static str, reason: String| Misfit { table, key, reason };
        inside_folder("entry", &run.entry).map_err(|reason| refuse("run", "entry", reason))?;
        let timeout = match (timeout.tier, timeout.after) {
            (Some(_), Some(_)) => {
                return Err(refuse("timeout", "after", "tier and after are both given; name one of them".to_owned()));
            }
            (_, Some(after)) if after.0.is_zero() => {
                return Err(refuse("timeout", "after", "after is zero; no call could end in time".to_owned()));
            }
            (_, Some(after)) => Timeout::After(after.0),
            (tier, None) => Timeout::Tier(tier.unwrap_or(Tier::Compute)),
        };
        if sandbox.hosts.len() > MAX_HOSTS {
            let reason = format!("{} hosts are named; at most {MAX_HOSTS} can be", sandbox.hosts.len());
            return Err(refuse("sandbox", "hosts", reason));
        }
        if let Some(name) = sandbox.secrets.iter().find(|name| !is_plain_variable(name)) {
            let reason = format!("`{name}` has other characters than letters, digits and _, or begins with a digit");
            return Err(refuse("sandbox", "secrets", reason));
        }
        if let Some(name) = sandbox.secrets.iter().find(|name| sandbox.env.contains_key(*name)) {
            return Err(refuse("sandbox", "secrets", format!("`{name}` is set in env, too")));
        }
        if let Some(host) = sandbox.tls.keys().find(|host| !sandbox.hosts.contains(host)) {
            return Err(refuse("sandbox", "tls", format!("`{host}` is not among hosts, so nothing connects to it")));
        }
        if let Some(name) = sandbox.env.keys().find(|name| !is_variable(name)) {
            return Err(refuse("sandbox", "env", format!("`{name}` is no name of an environment variable")));
        }
        if limits.pids == Some(0) {
            return Err(refuse("limits", "pids", "pids is zero; not even the program itself could start".to_owned()));
        }
        Ok(Self {
            runtime: run.runtime,
            entry: run.entry,
            timeout,
            memory: limits.memory,
            pids: limits.pids,
            max_response: limits.max_response_bytes.unwrap_or(DEFAULT_MAX_RESPONSE),
            policy: sandbox.policy.unwrap_or_else(|| "workspace".to_owned()),
            hosts: sandbox.hosts,
            tls: sandbox.tls,
            env: sandbox.env,
            secrets: sandbox.secrets,
        })
    }
}

/// Says what is wrong with a path that must lie in the program's folder.
pub(crate) fn inside_folder(key: &str, path: &Path) -> Result<(), String> {
    if is_inside(path) {
        return Ok(());
    }
    Err(format!("{key} `{}` must be a relative path inside the manifest's folder", path.display()))
}

fn is_inside(path: &Path) -> bool {
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// A name that is a file's, too.
fn is_plain_variable(name: &str) -> bool {
    !name.starts_with(|first: char| first.is_ascii_digit())
        && !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn is_variable(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'=')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_with_ports() {
        let host = |text: &str| HostPort::try_from(text.to_owned());
        assert_eq!(host("API.Example.com.:443").unwrap().to_string(), "api.example.com:443");
        for text in ["a", "a:", "a:0", "a:65536", ":1", "a b:1", "a\0b:1", "user@a:1", "http://a:1", "a..b:1", "a:+1"] {
            assert!(host(text).is_err(), "{text:?}");
        }
        assert_eq!(host("10.0.0.1:5432").unwrap().address(), Some(Ipv4Addr::new(10, 0, 0, 1)));
        assert_eq!(host("v1.0x7f.example:1").unwrap().address(), None);
        for text in
            ["127.1:1", "2130706433:1", "0x7f000001:1", "10.0.0.0x1:1", "1.2.3.4.5:1", "010.0.0.1:1", "256.1.1.1:1"]
        {
            assert!(host(text).is_err(), "{text:?}");
        }
    }
}
