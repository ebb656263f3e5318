//! What the kernel refused inside: it answers such packets, and the answers are seen here (`sandbox::netns`). Those of
//! connections that are let in are not, so they cost nothing.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use sandbox::egress::RESOLVER;
use sandbox::netns::DNS_PORT;
use tokio::net::UdpSocket;
use tokio_util::sync::CancellationToken;
use toolproto::receipt::Denial;

use super::names::Names;
use super::tally::{Tally, datagram, unlisted, unlisted_ipv6};

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
/// The length of an ICMP error's own header, in both versions.
const ICMP_HEADER: usize = 8;
const IPV6_HEADER: usize = 40;

/// A packet that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    Connection(SocketAddr),
    Datagram(SocketAddr),
}

/// Which version of IP a socket sees.
#[derive(Clone, Copy, Debug)]
pub(super) enum Version {
    V4,
    V6,
}

/// Notes what is refused until the call ends, or nothing more can be noted.
///
/// # Errors
/// When the socket cannot be awaited or read.
pub(super) async fn watch(
    socket: OwnedFd,
    version: Version,
    names: Arc<Names>,
    tally: Arc<Tally>,
    ending: CancellationToken,
) -> io::Result<()> {
    // A socket for packets is no UDP socket, but both yield datagrams, and who sent them is not asked for.
    let socket = UdpSocket::from_std(std::net::UdpSocket::from(socket))?;
    let mut packet = [0; 256];
    while !tally.is_full() {
        tokio::select! {
            biased;
            received = socket.recv(&mut packet) => note(&packet[..received?], version, &names, &tally),
            // What was refused before is noted: the first branch goes first.
            () = ending.cancelled() => return Ok(()),
        }
    }
    Ok(())
}

fn note(packet: &[u8], version: Version, names: &Names, tally: &Tally) {
    let refused = match version {
        Version::V4 => parse_v4(packet),
        Version::V6 => parse_v6(packet),
    };
    if let Some(denial) = refused.and_then(|refused| describe(refused, names)) {
        tally.deny(denial);
    }
}

/// Absent for what never meant to leave: loopback, and the call's own address.
fn describe(refused: Refused, names: &Names) -> Option<Denial> {
    let (Refused::Connection(target) | Refused::Datagram(target)) = refused;
    if target.ip().is_loopback() || target.ip() == RESOLVER {
        return None;
    }
    Some(match (refused, target.ip()) {
        (Refused::Datagram(_), _) => datagram(target),
        (_, IpAddr::V4(address)) => match names.at(address) {
            Some(name) => unlisted(&format!("{name}:{}", target.port())),
            None => unlisted(&target.to_string()),
        },
        (_, IpAddr::V6(_)) => unlisted_ipv6(target),
    })
}

fn parse_v4(packet: &[u8]) -> Option<Refused> {
    let (protocol, rest) = open_v4(packet)?;
    match protocol {
        TCP => Some(Refused::Connection(SocketAddr::new(v4(packet, 12)?.into(), number(rest, 0)?))),
        ICMP => {
            let inner = rest.get(ICMP_HEADER..)?;
            let (protocol, datagram) = open_v4(inner)?;
            let is_answer = v4(inner, 12)? == RESOLVER && number(datagram, 0)? == DNS_PORT;
            (protocol == UDP && !is_answer)
                .then_some(Refused::Datagram(SocketAddr::new(v4(inner, 16)?.into(), number(datagram, 2)?)))
        }
        _ => None,
    }
}

/// The protocol, and what follows the header.
fn open_v4(packet: &[u8]) -> Option<(u8, &[u8])> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    Some((*packet.get(9)?, packet.get(header..)?))
}

fn parse_v6(packet: &[u8]) -> Option<Refused> {
    let rest = packet.get(IPV6_HEADER..)?;
    match *packet.get(6)? {
        TCP => Some(Refused::Connection(SocketAddr::new(v6(packet, 8)?.into(), number(rest, 0)?))),
        ICMPV6 => {
            let inner = rest.get(ICMP_HEADER..)?;
            let datagram = inner.get(IPV6_HEADER..)?;
            (*inner.get(6)? == UDP)
                .then_some(Refused::Datagram(SocketAddr::new(v6(inner, 24)?.into(), number(datagram, 2)?)))
        }
        _ => None,
    }
}

fn v4(packet: &[u8], at: usize) -> Option<Ipv4Addr> {
    packet.get(at..)?.first_chunk::<4>().map(|bytes| Ipv4Addr::from(*bytes))
}

fn v6(packet: &[u8], at: usize) -> Option<Ipv6Addr> {
    packet.get(at..)?.first_chunk::<16>().map(|bytes| Ipv6Addr::from(*bytes))
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk::<2>().map(|bytes| u16::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header_v4(protocol: u8, source: [u8; 4], destination: [u8; 4]) -> Vec<u8> {
        let mut header = vec![0x46, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0];
        header.extend(source);
        header.extend(destination);
        // An option, so that the header is longer than most.
        header.extend([1; 4]);
        header
    }

    #[test]
    fn a_reset_names_who_was_called_and_an_error_who_was_written_to() {
        let mut reset = header_v4(TCP, [192, 0, 2, 1], [198, 18, 0, 1]);
        reset.extend([0x01, 0xbb, 0xc0, 0x00, 0, 0, 0, 0]);
        assert_eq!(parse_v4(&reset), Some(Refused::Connection("192.0.2.1:443".parse().unwrap())));

        let mut error = header_v4(ICMP, [8, 8, 8, 8], [198, 18, 0, 1]);
        error.extend([3, 3, 0, 0, 0, 0, 0, 0]);
        error.extend(header_v4(UDP, [198, 18, 0, 1], [8, 8, 8, 8]));
        error.extend([0xc0, 0x00, 0, 53]);
        assert_eq!(parse_v4(&error), Some(Refused::Datagram("8.8.8.8:53".parse().unwrap())));

        let mut answer = header_v4(ICMP, [198, 18, 0, 1], [198, 18, 0, 1]);
        answer.extend([3, 3, 0, 0, 0, 0, 0, 0]);
        answer.extend(header_v4(UDP, [198, 18, 0, 1], [198, 18, 0, 1]));
        answer.extend([0, 53, 0xc0, 0x00]);
        assert_eq!(parse_v4(&answer), None, "the resolver's own answer, which came too late");
    }

    #[test]
    fn what_stays_inside_is_no_refusal() {
        let names = Names::of(&[]);
        for address in ["127.0.0.1:80", "198.18.0.1:80", "[::1]:80"] {
            assert_eq!(describe(Refused::Connection(address.parse().unwrap()), &names), None, "{address}");
        }
        let denial = describe(Refused::Connection("192.0.2.1:443".parse().unwrap()), &names).unwrap();
        assert_eq!(denial.rule, "[sandbox] hosts = [\"192.0.2.1:443\"]");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_fail(bytes in proptest::collection::vec(any::<u8>(), 0..140)) {
            let _ = (parse_v4(&bytes), parse_v6(&bytes));
        }
    }
}
