//! Addresses and routes of the loopback interface, by rtnetlink(7).

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

/// The first interface of a network namespace is its loopback.
const LOOPBACK_INDEX: u32 = 1;

const REQUEST: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;
const HEADER: usize = 16;

/// A connection to the kernel's tables of the caller's network namespace.
#[derive(Debug)]
pub(super) struct RouteSocket(OwnedFd);

impl RouteSocket {
    pub(super) fn open() -> io::Result<Self> {
        // The protocol of number 0 is NETLINK_ROUTE.
        Ok(Self(socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?))
    }

    /// Gives the loopback interface an address.
    pub(super) fn add_address(&self, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        // struct ifaddrmsg: family, prefix, flags, scope (the whole universe), interface.
        let mut body = vec![libc::AF_INET as u8, prefix, 0, libc::RT_SCOPE_UNIVERSE];
        body.extend(LOOPBACK_INDEX.to_ne_bytes());
        for attribute in [libc::IFA_LOCAL, libc::IFA_ADDRESS] {
            push_attribute(&mut body, attribute, &address.octets());
        }
        self.ask(libc::RTM_NEWADDR, &body)
    }

    /// Makes every IPv4 address one of the namespace's own.
    pub(super) fn own_every_ipv4(&self) -> io::Result<()> {
        self.own_every(libc::AF_INET, &Ipv4Addr::UNSPECIFIED.octets())
    }

    /// Makes every IPv6 address one of the namespace's own.
    pub(super) fn own_every_ipv6(&self) -> io::Result<()> {
        self.own_every(libc::AF_INET6, &Ipv6Addr::UNSPECIFIED.octets())
    }

    fn own_every(&self, family: libc::c_int, everywhere: &[u8]) -> io::Result<()> {
        // struct rtmsg: family, lengths of destination and source prefix, type of service, table, protocol, scope, type, flags.
        let mut body = vec![family as u8, 0, 0, 0];
        body.extend([libc::RT_TABLE_LOCAL, libc::RTPROT_STATIC, libc::RT_SCOPE_HOST, libc::RTN_LOCAL]);
        body.extend(0_u32.to_ne_bytes());
        push_attribute(&mut body, libc::RTA_DST, everywhere);
        push_attribute(&mut body, libc::RTA_OIF, &LOOPBACK_INDEX.to_ne_bytes());
        self.ask(libc::RTM_NEWROUTE, &body)
    }

    /// Sends a request and reads the kernel's acknowledgement.
    fn ask(&self, kind: u16, body: &[u8]) -> io::Result<()> {
        let length = u32::try_from(HEADER + body.len()).map_err(io::Error::other)?;
        // struct nlmsghdr: length, type, flags, sequence, sender.
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend(REQUEST.to_ne_bytes());
        message.extend([0; 8]);
        message.extend(body);
        sendto(&self.0, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let mut answer = [0; 256];
        let (_, received) = recv(&self.0, &mut answer, RecvFlags::empty())?;
        let field = |at: usize| answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
        // After the header, struct nlmsgerr begins with a negated errno; 0 is the acknowledgement.
        let is_verdict =
            received >= HEADER + 4 && u16::from_ne_bytes([answer[4], answer[5]]) == libc::NLMSG_ERROR as u16;
        match field(HEADER).filter(|_| is_verdict) {
            Some(0) => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno.saturating_neg())),
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// struct rtattr: length and type, then the value. All values here are multiples of four bytes, as they must be padded to.
fn push_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
}
