//! A network of a call's own, in which every listed host has a place, and which nothing leaves but through them.
//!
//! ```text
//!   inside (the call's network namespace)                         outside
//!   lo: 198.18.0.1/15, and every other address is local too
//!     198.18.0.1:53   UDP and TCP, the resolver      ┐
//!     198.18.0.2:443  a listed host                  ├─ sockets that agentd holds, answers and accepts on
//!     packet sockets  refused connections, datagrams ┘
//!     anything else   refused by the kernel at once
//! ```
//!
//! There is no link between inside and outside, no packet filter, and no address that leads out: what agentd does not accept
//! is nobody's. The sockets are made by the launcher, which steps into the new namespace and out again. It has no network
//! socket of its own, so nothing depends on where it is.

pub mod bare;
mod filter;
mod netlink;

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use toolproto::manifest::TlsMode;

use self::netlink::RouteSocket;
use crate::egress::{INSIDE_PREFIX, Passage, RESOLVER};
use crate::host::Mechanism;
use crate::namespaces::try_in_child;
use crate::sys::clone::Birth;
use crate::sys::net::{attach_filter, loopback_up};
use crate::sys::process::unshare;

/// The resolver's port.
pub const DNS_PORT: u16 = 53;
/// How many connections wait to be accepted at each place. More are held off, not refused.
const BACKLOG: i32 = 64;

/// A network namespace that was furnished ahead of its call.
#[derive(Debug)]
pub struct Furnished {
    namespace: OwnedFd,
    ports: BTreeSet<u16>,
}

impl Furnished {
    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }

    /// The TCP ports at which somebody answers, the resolver's among them.
    #[must_use]
    pub const fn ports(&self) -> &BTreeSet<u16> {
        &self.ports
    }
}

/// The sockets inside, for who answers there.
#[derive(Debug)]
pub struct Sockets<S = OwnedFd> {
    /// The resolver's datagrams.
    pub dns_udp: S,
    /// The resolver's connections.
    pub dns_tcp: S,
    /// What was refused over IPv4: packets from their network header on.
    pub refused_ipv4: S,
    /// The same over IPv6.
    pub refused_ipv6: S,
    /// One listener per passage, in their order.
    pub listeners: Vec<S>,
}

impl<S> Sockets<S> {
    /// In the order in which a message carries them.
    #[must_use]
    pub fn into_list(self) -> Vec<S> {
        let mut list = vec![self.dns_udp, self.dns_tcp, self.refused_ipv4, self.refused_ipv6];
        list.extend(self.listeners);
        list
    }

    /// From such a list; absent when it is too short.
    #[must_use]
    pub fn from_list(list: Vec<S>) -> Option<Self> {
        let mut list = list.into_iter();
        Some(Self {
            dns_udp: list.next()?,
            dns_tcp: list.next()?,
            refused_ipv4: list.next()?,
            refused_ipv6: list.next()?,
            listeners: list.collect(),
        })
    }
}

/// Makes a network for these passages. Must be called without other threads, or by one that makes no sockets of its own.
///
/// # Errors
/// When the kernel refuses one of the parts.
pub fn furnish(passages: &[Passage]) -> io::Result<(Furnished, Sockets)> {
    let (namespace, sockets) = inside_new(|| set_up(passages))?;
    let ports = passages.iter().map(|passage| passage.target.port).chain([DNS_PORT]).collect();
    Ok((Furnished { namespace, ports }, sockets))
}

/// Does something inside a new network namespace, and yields the namespace with what came of it.
fn inside_new<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<(OwnedFd, T)> {
    let own = open_current()?;
    unshare(UnshareFlags::NEWNET)?;
    let made = open_current().and_then(|namespace| Ok((namespace, work()?)));
    move_into_link_name_space(own.as_fd(), Some(LinkNameSpaceType::Network))?;
    made
}

fn open_current() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open("/proc/thread-self/ns/net", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

fn set_up(passages: &[Passage]) -> io::Result<Sockets> {
    loopback_up()?;
    let routes = RouteSocket::open()?;
    routes.add_address(RESOLVER, INSIDE_PREFIX)?;
    routes.own_every_ipv4()?;
    if let Err(error) = routes.own_every_ipv6() {
        // A kernel without IPv6, or with it turned off, reaches no IPv6 address at all: refused too, only not by name.
        tracing::debug!(%error, "refused IPv6 addresses will not be named");
    }
    let listeners = passages.iter().map(|passage| listener(passage.inside, passage.target.port));
    Ok(Sockets {
        dns_udp: bound(SocketType::DGRAM, RESOLVER, DNS_PORT)?,
        dns_tcp: listener(RESOLVER, DNS_PORT)?,
        refused_ipv4: refusals(libc::ETH_P_IP, filter::REFUSED_IPV4)?,
        refused_ipv6: refusals(libc::ETH_P_IPV6, filter::REFUSED_IPV6)?,
        listeners: listeners.collect::<io::Result<_>>()?,
    })
}

fn bound(kind: SocketType, address: Ipv4Addr, port: u16) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::INET, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    bind(&socket, &SocketAddrV4::new(address, port))?;
    Ok(socket)
}

fn listener(address: Ipv4Addr, port: u16) -> io::Result<OwnedFd> {
    let socket = bound(SocketType::STREAM, address, port)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A socket that sees what the kernel answers to a refused connection or datagram, and nothing else.
fn refusals(protocol: libc::c_int, filter: &[crate::sys::net::Instruction]) -> io::Result<OwnedFd> {
    // In network byte order, as packet(7) wants it.
    let number = u16::try_from(protocol).map_err(io::Error::other)?.to_be();
    let protocol = NonZeroU32::new(number.into()).map(Protocol::from_raw);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, protocol)?;
    attach_filter(socket.as_fd(), filter)?;
    Ok(socket)
}

/// Makes a network, dials a listed host in it, and looks whether it was reached under its address and nothing else was.
pub(crate) fn probe() -> (Mechanism, Result<(), String>) {
    (Mechanism::Egress, try_in_child(Birth::default(), trial))
}

fn trial() -> io::Result<()> {
    let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
    let place = SocketAddrV4::new(Ipv4Addr::new(198, 18, 0, 2), 443);
    let target = "host.example:443".to_owned().try_into().map_err(io::Error::other)?;
    let passages = [Passage { target, inside: *place.ip(), tls: TlsMode::Auto }];
    let (network, sockets) = furnish(&passages)?;
    move_into_link_name_space(network.namespace(), Some(LinkNameSpaceType::Network))?;
    let elsewhere = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 443);
    let refused = std::net::TcpStream::connect(elsewhere).err().and_then(|error| error.raw_os_error());
    if refused != Some(libc::ECONNREFUSED) {
        return Err(unsupported());
    }
    let mut packet = [0; filter::LENGTH as usize];
    rustix::net::recv(&sockets.refused_ipv4, &mut packet, rustix::net::RecvFlags::DONTWAIT)?;
    let _client = std::net::TcpStream::connect(place)?;
    let listener = sockets.listeners.into_iter().next().ok_or_else(unsupported)?;
    let (accepted, _) = std::net::TcpListener::from(listener).accept()?;
    if accepted.local_addr()? == place.into() { Ok(()) } else { Err(unsupported()) }
}
