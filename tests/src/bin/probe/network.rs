//! Networks, sockets and other ways to talk to somebody outside.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixDatagram, UnixListener, UnixStream};
use std::time::Duration;

use crate::raw::{Argument, call};
use crate::{Attempt, Outcome, Refused, allowed, refused};

const NO_SUCH_SOCKET: &[i32] =
    &[libc::EPERM, libc::EACCES, libc::ENOSYS, libc::EAFNOSUPPORT, libc::EPROTONOSUPPORT, libc::ESOCKTNOSUPPORT];
const NOT_REACHED: &[i32] =
    &[libc::ECONNREFUSED, libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EPERM, libc::EACCES, libc::ENETDOWN];
const NOBODY_LISTENS: &[i32] = &[libc::ECONNREFUSED, libc::EPERM, libc::EACCES, libc::ENOENT];
const NOT_THERE: &[i32] = &[libc::ENOENT, libc::EACCES, libc::EPERM];

pub(crate) const ALL: &[Attempt] = &[
    refused("vsock", NO_SUCH_SOCKET, "unix_socket_pair", |_| socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
    refused("kernel_crypto_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0)
    }),
    refused("packet_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| socket(libc::AF_PACKET, libc::SOCK_RAW, 0x300)),
    refused("packet_datagram_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0x300)
    }),
    refused("raw_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP)
    }),
    refused("raw_socket_with_flags", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, libc::IPPROTO_RAW)
    }),
    refused("raw_socket_6", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_ICMPV6)
    }),
    refused("netfilter_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER)
    }),
    refused("audit_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_AUDIT)
    }),
    refused("device_event_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_KOBJECT_UEVENT)
    }),
    refused("key_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| socket(libc::AF_KEY, libc::SOCK_RAW, 2)),
    refused("bluetooth_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| socket(libc::AF_BLUETOOTH, libc::SOCK_RAW, 1)),
    refused("can_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| socket(libc::AF_CAN, libc::SOCK_RAW, 1)),
    refused("tipc_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| socket(libc::AF_TIPC, libc::SOCK_SEQPACKET, 0)),
    refused("rds_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| socket(libc::AF_RDS, libc::SOCK_SEQPACKET, 0)),
    refused("xdp_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| socket(libc::AF_XDP, libc::SOCK_RAW, 0)),
    refused("sctp_socket", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        socket(libc::AF_INET, libc::SOCK_SEQPACKET, libc::IPPROTO_SCTP)
    }),
    refused("socket_family_with_high_bits", NO_SUCH_SOCKET, "unix_socket_pair", |_| {
        call(libc::SYS_socket, vec![(i64::from(libc::AF_VSOCK) | 1 << 32).into(), libc::SOCK_STREAM.into(), 0.into()])?;
        Ok(())
    }),
    refused("reach_a_port_of_the_host", NOT_REACHED, "use_own_files_only", |facts| {
        connect(&format!("127.0.0.1:{}", facts.get("tcp_port")?))
    }),
    refused("reach_the_internet", NOT_REACHED, "use_own_files_only", |_| connect("192.0.2.1:443")),
    refused("reach_the_internet_6", NOT_REACHED, "use_own_files_only", |_| {
        connect("[2001:db8::1]:443").map_err(cannot_assign)
    }),
    refused("reach_cloud_metadata", NOT_REACHED, "use_own_files_only", |_| connect("169.254.169.254:80")),
    refused("send_a_datagram_out", NOT_REACHED, "use_own_files_only", |_| {
        crate::egress::datagram(SocketAddr::from(([192, 0, 2, 1], 53)))
    }),
    refused("reach_an_abstract_socket_of_the_host", NOBODY_LISTENS, "reach_own_abstract_socket", |facts| {
        UnixStream::connect_addr(&UnixAddress::from_abstract_name(facts.get("abstract")?)?)?;
        Ok(())
    }),
    // What a container manager's socket would be.
    refused("reach_a_socket_file_of_the_host", NOT_THERE, "reach_own_socket_file", |facts| {
        UnixStream::connect(facts.get("socket_file")?)?;
        Ok(())
    }),
    refused("send_to_an_abstract_socket_of_the_host", NOBODY_LISTENS, "reach_own_abstract_socket", |facts| {
        UnixDatagram::unbound()?.connect_addr(&UnixAddress::from_abstract_name(facts.get("abstract_datagram")?)?)?;
        Ok(())
    }),
    refused("see_abstract_sockets_of_the_host", &[], "reach_own_abstract_socket", |facts| {
        let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
        if table.contains(facts.get("abstract")?) { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("see_interfaces_of_the_host", &[], "see_loopback", |_| {
        let table = fs::read_to_string("/proc/net/dev")?;
        let others = table.lines().skip(2).filter(|line| !line.trim_start().starts_with("lo:")).count();
        if others > 0 { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("take_loopback_down", &[libc::EPERM, libc::EACCES], "see_loopback", |_| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        let mut request = [0u8; 40];
        request[..2].copy_from_slice(b"lo");
        // SIOCSIFFLAGS
        call(
            libc::SYS_ioctl,
            vec![std::os::fd::AsRawFd::as_raw_fd(&socket).into(), 0x8914.into(), Argument::Buffer(&mut request)],
        )?;
        Ok(())
    }),
    refused("find_shared_memory_of_the_host", NOT_THERE, "use_own_system_v_memory", |facts| {
        call(libc::SYS_shmget, vec![facts.number::<i32>("shm_key")?.into(), 0.into(), 0.into()])?;
        Ok(())
    }),
    refused("find_message_queue_of_the_host", NOT_THERE, "use_own_system_v_memory", |facts| {
        let name = std::ffi::CString::new(facts.get("queue")?).map_err(|error| Refused::Odd(error.to_string()))?;
        call(libc::SYS_mq_open, vec![name.as_c_str().into(), libc::O_RDONLY.into(), 0.into(), 0.into()])?;
        Ok(())
    }),
    allowed("unix_socket_pair", |_| {
        let (mut one, mut other) = UnixStream::pair()?;
        one.write_all(b"x")?;
        let mut byte = [0];
        Ok(other.read_exact(&mut byte)?)
    }),
    allowed("reach_own_abstract_socket", |_| {
        let address = UnixAddress::from_abstract_name("agentd-probe-own")?;
        let _listener = UnixListener::bind_addr(&address)?;
        UnixStream::connect_addr(&address)?;
        Ok(())
    }),
    allowed("reach_own_socket_file", |_| {
        let _ = fs::remove_file("/tmp/own.sock");
        let _listener = UnixListener::bind("/tmp/own.sock")?;
        UnixStream::connect("/tmp/own.sock")?;
        Ok(())
    }),
    allowed("see_loopback", |_| {
        if fs::read_to_string("/proc/net/dev")?.contains("lo:") { Ok(()) } else { Err(Refused::Absent) }
    }),
    // The twin of reaching somebody: a policy without loopback allows no more than this.
    allowed("use_own_files_only", |_| Ok(fs::write("/tmp/no-network", "x")?)),
    allowed("use_own_system_v_memory", |_| {
        let segment =
            call(libc::SYS_shmget, vec![libc::IPC_PRIVATE.into(), 4096.into(), (libc::IPC_CREAT | 0o600).into()])?;
        call(libc::SYS_shmctl, vec![segment.into(), libc::IPC_RMID.into(), 0.into()])?;
        Ok(())
    }),
    allowed("ask_for_interfaces", |_| socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE)),
    allowed("loopback:serve_and_connect", |_| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut client = TcpStream::connect(listener.local_addr()?)?;
        let (mut server, _) = listener.accept()?;
        client.write_all(b"x")?;
        let mut byte = [0];
        Ok(server.read_exact(&mut byte)?)
    }),
    allowed("loopback:datagrams", |_| {
        let receiver = UdpSocket::bind("127.0.0.1:0")?;
        UdpSocket::bind("127.0.0.1:0")?.send_to(b"x", receiver.local_addr()?)?;
        receiver.set_read_timeout(Some(Duration::from_secs(5)))?;
        receiver.recv(&mut [0])?;
        Ok(())
    }),
];

fn socket(family: i32, kind: i32, protocol: i32) -> Outcome {
    call(libc::SYS_socket, vec![family.into(), kind.into(), protocol.into()])?;
    Ok(())
}

fn connect(address: &str) -> Outcome {
    let address: SocketAddr = address.parse().map_err(|_| Refused::Odd(format!("{address} is no address")))?;
    TcpStream::connect_timeout(&address, Duration::from_secs(3))?;
    Ok(())
}

/// Without IPv6 in the namespace there is no address to call from.
fn cannot_assign(refused: Refused) -> Refused {
    match refused {
        Refused::Errno(libc::EADDRNOTAVAIL) => Refused::Errno(libc::ENETUNREACH),
        other => other,
    }
}
