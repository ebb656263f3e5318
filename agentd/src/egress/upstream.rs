//! The way out: from a listed name to a connection with an address that was checked.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use sandbox::egress::Ceiling;
use tokio::net::TcpStream;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;
use toolproto::manifest::HostPort;
use toolproto::receipt::Denial;

use super::tally::{forbidden_address, unreachable};

/// Questions to the host's resolver at once, of all calls: each takes a thread until it is answered.
const LOOKUPS: usize = 32;
/// How long the host's resolver is waited for.
const LOOKUP_TIME: Duration = Duration::from_secs(10);
/// How long an answer counts within a call.
const FRESH: Duration = Duration::from_secs(30);
/// How long one address is tried.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// How many addresses of a name are tried.
const MOST_ADDRESSES: usize = 4;

/// Who is asked for addresses.
#[derive(Debug)]
pub(super) struct Resolver {
    hosts: BTreeMap<String, Vec<IpAddr>>,
    lookups: Arc<Semaphore>,
}

impl Resolver {
    /// With names for which the host is not asked.
    pub(super) fn new(hosts: BTreeMap<String, Vec<IpAddr>>) -> Self {
        Self { hosts, lookups: Arc::new(Semaphore::new(LOOKUPS)) }
    }

    async fn look_up(&self, target: &HostPort) -> Result<Vec<IpAddr>, String> {
        if let Some(address) = target.address() {
            return Ok(vec![address.into()]);
        }
        if let Some(addresses) = self.hosts.get(&target.host) {
            return Ok(addresses.clone());
        }
        let question = (target.host.clone(), target.port);
        let lookup = async {
            let permit = Arc::clone(&self.lookups).acquire_owned().await.map_err(io::Error::other)?;
            // The thread keeps its place until the host's resolver gives up, however long we wait.
            let asked = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                question.to_socket_addrs().map(|found| found.map(|address| address.ip()).collect())
            });
            asked.await.map_err(io::Error::other)?
        };
        match timeout(LOOKUP_TIME, lookup).await {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(error)) => Err(format!("its name has no address: {error}")),
            Err(_) => Err(format!("its name was not resolved within {} s", LOOKUP_TIME.as_secs())),
        }
    }
}

/// One listed host of one call.
#[derive(Debug)]
pub(super) struct Upstream {
    target: HostPort,
    policy: String,
    ceiling: Arc<Ceiling>,
    resolver: Arc<Resolver>,
    /// The last answer. Who comes while it is sought waits for it, so a flood of connections asks once.
    answer: Mutex<Option<(Instant, Vec<IpAddr>)>>,
}

impl Upstream {
    pub(super) fn new(target: HostPort, policy: String, ceiling: Arc<Ceiling>, resolver: Arc<Resolver>) -> Self {
        Self { target, policy, ceiling, resolver, answer: Mutex::new(None) }
    }

    /// The host.
    pub(super) const fn target(&self) -> &HostPort {
        &self.target
    }

    /// A connection. The name is resolved before its addresses are judged, and not again after.
    ///
    /// # Errors
    /// With what to note: no address, none that is allowed, or none that answers.
    pub(super) async fn connect(&self) -> Result<TcpStream, Vec<Denial>> {
        let failed = |reason: &str| vec![unreachable(&self.target, reason)];
        let addresses = self.addresses().await.map_err(|reason| failed(&reason))?;
        let own = own_addresses().map_err(|error| failed(&format!("this host's addresses are unknown: {error}")))?;
        let mut denied = Vec::new();
        let mut last = None;
        for address in addresses.into_iter().take(MOST_ADDRESSES) {
            let place = SocketAddr::new(address, self.target.port);
            if let Err(refusal) = self.ceiling.judge(&self.target, address, own.contains(&address)) {
                denied.push(forbidden_address(&self.target, &place.to_string(), &refusal.to_string(), &self.policy));
                continue;
            }
            match timeout(CONNECT_TIME, TcpStream::connect(place)).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(error)) => last = Some(format!("{place} is not reached: {error}")),
                Err(_) => last = Some(format!("{place} did not answer within {} s", CONNECT_TIME.as_secs())),
            }
        }
        denied.extend(last.map(|reason| unreachable(&self.target, &reason)));
        if denied.is_empty() {
            denied = failed("its name has no address");
        }
        Err(denied)
    }

    async fn addresses(&self) -> Result<Vec<IpAddr>, String> {
        let mut answer = self.answer.lock().await;
        if let Some((when, addresses)) = &*answer
            && when.elapsed() < FRESH
        {
            return Ok(addresses.clone());
        }
        let addresses = self.resolver.look_up(&self.target).await?;
        *answer = Some((Instant::now(), addresses.clone()));
        Ok(addresses)
    }
}

/// The addresses of this host's interfaces.
fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let of = |address: &nix::sys::socket::SockaddrStorage| {
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::from(address.ip())))
    };
    Ok(getifaddrs()?.filter_map(|interface| of(&interface.address?)).collect())
}

#[cfg(test)]
mod tests {
    use sandbox::egress::NetworkRule;

    use super::*;

    fn upstream(target: &str, allow: &[&str], hosts: &[(&str, &str)]) -> Upstream {
        let rules = allow.iter().map(|rule| NetworkRule::try_from((*rule).to_owned()).unwrap());
        let ceiling = Ceiling { allow: rules.collect(), deny: Vec::new() };
        let hosts = hosts.iter().map(|(name, address)| ((*name).to_owned(), vec![address.parse().unwrap()]));
        let resolver = Resolver::new(hosts.collect());
        let target = HostPort::try_from(target.to_owned()).unwrap();
        Upstream::new(target, "network".to_owned(), Arc::new(ceiling), Arc::new(resolver))
    }

    #[tokio::test]
    async fn only_an_address_that_the_policy_names_is_connected_to() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (target, hosts) = (format!("web.test:{port}"), [("web.test", "127.0.0.1")]);
        let denied = upstream(&target, &[], &hosts).connect().await.unwrap_err();
        assert_eq!(denied[0].rule, format!("network_allow = [\"127.0.0.1:{port}\"] in policy `network`"));
        assert!(denied[0].detail.contains("a loopback address"), "{denied:?}");
        let allowed = upstream(&target, &[&format!("127.0.0.1:{port}")], &hosts).connect().await.unwrap();
        assert_eq!(allowed.peer_addr().unwrap(), listener.local_addr().unwrap());
    }

    #[tokio::test]
    async fn what_does_not_answer_is_told() {
        let port = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let target = format!("127.0.0.1:{port}");
        let denied = upstream(&target, &[&target], &[]).connect().await.unwrap_err();
        assert!(denied[0].detail.contains("refused"), "{denied:?}");
        let denied = upstream("nowhere.invalid:80", &[], &[]).connect().await.unwrap_err();
        assert!(denied[0].detail.contains("no address"), "{denied:?}");
    }

    #[test]
    fn loopback_is_among_the_own_addresses() {
        assert!(own_addresses().unwrap().contains(&"127.0.0.1".parse().unwrap()));
    }
}
