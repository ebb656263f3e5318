//! Letting calls out to the hosts that they list, and to nobody else.
//!
//! ```text
//!   the call's own network (`sandbox::netns`)      │  agentd                              │  the host's network
//!   tool: api.example.com? ──► 198.18.0.1:53 ──────┼► names: 198.18.0.2, or no such name  │
//!   tool: connect 198.18.0.2:443 ──► listener ─────┼► upstream: resolve, judge, connect ──┼──► api.example.com:443
//!                                                  │  relay: inspect, copy, count         │
//!   tool: connect anywhere else ──► refused ───────┼► refused: its address is noted       │
//! ```
//!
//! The launcher makes the sockets inside and hands them over; here they are answered and accepted on from outside, so the tool
//! needs no proxy settings and cannot go around. Everything of a call ends with it.

mod inspect;
mod names;
mod refused;
mod relay;
mod tally;
mod upstream;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandbox::egress::{Ceiling, Passage};
use sandbox::netns::Sockets;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use toolproto::ids::CallId;
use toolproto::receipt::NetworkClaims;

use self::names::Names;
use self::refused::Version;
use self::tally::Tally;
use self::upstream::{Resolver, Upstream};

/// Connections of one call at once; more wait to be accepted.
const CALL_CONNECTIONS: usize = 256;
/// Connections of all calls at once: each has two descriptors and two buffers.
const ALL_CONNECTIONS: usize = 1024;
/// How long to wait when a connection cannot be accepted for want of descriptors or memory.
const SHORTAGE: Duration = Duration::from_millis(100);

/// What a call's network is opened with.
#[derive(Debug)]
pub struct Opening {
    /// Its policy's name.
    pub policy: String,
    /// The listed hosts, in the order of their listeners.
    pub passages: Vec<Passage>,
    /// What addresses they may lead to.
    pub ceiling: Ceiling,
}

/// The networks of all calls that have listed hosts.
#[derive(Debug)]
pub struct Egress {
    runtime: Handle,
    resolver: Arc<Resolver>,
    connections: Arc<Semaphore>,
    calls: Mutex<HashMap<CallId, Open>>,
}

#[derive(Debug)]
struct Open {
    ending: CancellationToken,
    ended: oneshot::Receiver<NetworkClaims>,
}

impl Egress {
    /// With names for which the host's resolver is not asked. Its tasks run on the runtime that this is called in.
    #[must_use]
    pub fn new(hosts: BTreeMap<String, Vec<IpAddr>>) -> Self {
        Self {
            runtime: Handle::current(),
            resolver: Arc::new(Resolver::new(hosts)),
            connections: Arc::new(Semaphore::new(ALL_CONNECTIONS)),
            calls: Mutex::default(),
        }
    }

    /// Answers and accepts on a call's sockets until its end. May be called outside the runtime.
    pub fn open(&self, call: CallId, opening: Opening, sockets: Sockets) {
        let network = Network {
            passages: opening.passages,
            policy: opening.policy,
            ceiling: Arc::new(opening.ceiling),
            resolver: Arc::clone(&self.resolver),
            of_all: Arc::clone(&self.connections),
            of_call: Arc::new(Semaphore::new(CALL_CONNECTIONS)),
            tally: Arc::default(),
            ending: CancellationToken::new(),
        };
        let (sender, ended) = oneshot::channel();
        let ending = network.ending.clone();
        self.runtime.spawn(async move {
            let claims = network.serve(sockets).await;
            // Whoever waited may have gone; the sockets are closed all the same.
            drop(sender.send(claims));
        });
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.insert(call, Open { ending, ended });
    }

    /// Ends a call's network. What it came to follows soon: what the tool had sent last is still passed on. Absent for a call
    /// without listed hosts.
    pub fn end(&self, call: CallId) -> Option<oneshot::Receiver<NetworkClaims>> {
        let open = self.calls.lock().unwrap_or_else(PoisonError::into_inner).remove(&call)?;
        open.ending.cancel();
        Some(open.ended)
    }

    /// Ends all networks: the launcher is gone, and every call with it.
    pub fn end_all(&self) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.drain().for_each(|(_, open)| open.ending.cancel());
    }
}

/// One call's network.
struct Network {
    passages: Vec<Passage>,
    policy: String,
    ceiling: Arc<Ceiling>,
    resolver: Arc<Resolver>,
    of_all: Arc<Semaphore>,
    of_call: Arc<Semaphore>,
    tally: Arc<Tally>,
    ending: CancellationToken,
}

impl Network {
    async fn serve(self, sockets: Sockets) -> NetworkClaims {
        let mut tasks = JoinSet::new();
        if let Err(error) = self.start(&mut tasks, sockets) {
            // What nobody answers is refused once the sockets are closed: the call is let out to nobody.
            tracing::error!(%error, "a call's network cannot be served");
            tasks.abort_all();
        }
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended
                && error.is_panic()
            {
                tracing::error!(%error, "a part of a call's network has failed");
            }
        }
        // The tasks end at once where there is nothing to answer any more, but the call's network lasts as long as the call.
        self.ending.cancelled().await;
        self.tally.claims()
    }

    fn start(&self, tasks: &mut JoinSet<()>, sockets: Sockets) -> io::Result<()> {
        let names = Arc::new(Names::of(&self.passages));
        let shared = || (Arc::clone(&names), Arc::clone(&self.tally), self.ending.clone());
        let (named, tally, ending) = shared();
        let datagrams = UdpSocket::from_std(std::net::UdpSocket::from(sockets.dns_udp))?;
        tasks.spawn(names::answer_datagrams(datagrams, named, tally, ending));
        let (named, tally, ending) = shared();
        tasks.spawn(names::answer_connections(listener(sockets.dns_tcp)?, named, tally, ending));
        for (socket, version) in [(sockets.refused_ipv4, Version::V4), (sockets.refused_ipv6, Version::V6)] {
            let (named, tally, ending) = shared();
            tasks.spawn(async move {
                if let Err(error) = refused::watch(socket, version, named, tally, ending).await {
                    tracing::error!(%error, "what a call is refused cannot be named");
                }
            });
        }
        for (passage, socket) in self.passages.iter().zip(sockets.listeners) {
            let acceptor = Acceptor {
                listener: listener(socket)?,
                place: SocketAddr::new(passage.inside.into(), passage.target.port),
                connection: Arc::new(Way {
                    tls: passage.tls,
                    upstream: Upstream::new(
                        passage.target.clone(),
                        self.policy.clone(),
                        Arc::clone(&self.ceiling),
                        Arc::clone(&self.resolver),
                    ),
                    tally: Arc::clone(&self.tally),
                    ending: self.ending.clone(),
                }),
                of_all: Arc::clone(&self.of_all),
                of_call: Arc::clone(&self.of_call),
            };
            tasks.spawn(acceptor.run());
        }
        Ok(())
    }
}

fn listener(socket: OwnedFd) -> io::Result<TcpListener> {
    TcpListener::from_std(std::net::TcpListener::from(socket))
}

/// Accepts the connections to one listed host.
struct Acceptor {
    listener: TcpListener,
    place: SocketAddr,
    connection: Arc<Way>,
    of_all: Arc<Semaphore>,
    of_call: Arc<Semaphore>,
}

impl Acceptor {
    async fn run(self) {
        let mut connections = JoinSet::new();
        let ending = &self.connection.ending;
        loop {
            tokio::select! {
                biased;
                () = ending.cancelled() => break,
                accepted = self.listener.accept() => {
                    let Some((tool, permits)) = self.take(accepted).await else { continue };
                    let way = Arc::clone(&self.connection);
                    connections.spawn(async move {
                        way.go(tool).await;
                        drop(permits);
                    });
                }
                Some(_) = connections.join_next(), if !connections.is_empty() => {}
            }
        }
        let finish = async { while connections.join_next().await.is_some() {} };
        // What does not end by itself ends here: dropping the set aborts its tasks.
        let _ = tokio::time::timeout(relay::LINGER, finish).await;
    }

    /// A connection with its place among the others, once there is one; absent when it cannot be had, or the call ends.
    async fn take(
        &self,
        accepted: io::Result<(TcpStream, SocketAddr)>,
    ) -> Option<(TcpStream, [OwnedSemaphorePermit; 2])> {
        let tool = match accepted {
            Ok((tool, _)) => tool,
            Err(error) => {
                after_failed_accept(&error).await;
                return None;
            }
        };
        // The listener has this address and no other, so the kernel can say nothing else.
        if !tool.local_addr().is_ok_and(|dialled| dialled == self.place) {
            tracing::error!(place = %self.place, "a connection is for another address than its listener's");
            relay::reset(tool);
            return None;
        }
        let permits = async {
            let of_call = Arc::clone(&self.of_call).acquire_owned().await.ok()?;
            Some([of_call, Arc::clone(&self.of_all).acquire_owned().await.ok()?])
        };
        tokio::select! {
            permits = permits => permits.map(|permits| (tool, permits)),
            () = self.connection.ending.cancelled() => None,
        }
    }
}

/// From one listener to one listed host.
#[derive(Debug)]
struct Way {
    tls: toolproto::manifest::TlsMode,
    upstream: Upstream,
    tally: Arc<Tally>,
    ending: CancellationToken,
}

impl Way {
    async fn go(&self, tool: TcpStream) {
        match self.upstream.connect().await {
            Ok(upstream) => {
                relay::relay(tool, upstream, (self.upstream.target(), self.tls), &self.tally, &self.ending).await;
            }
            Err(denied) => {
                denied.into_iter().for_each(|denial| self.tally.deny(denial));
                relay::reset(tool);
            }
        }
    }
}

/// Waits a moment: what is missing does not come back by asking again at once.
async fn after_failed_accept(error: &io::Error) {
    tracing::warn!(%error, "a call's connection is not accepted yet");
    tokio::time::sleep(SHORTAGE).await;
}
