//! The resolver inside: listed names have an address, all others do not exist. It asks nobody, so no name leaves the host by it.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use sandbox::egress::{Passage, is_localhost};
use simple_dns::rdata::{A, RData};
use simple_dns::{CLASS, OPCODE, Packet, PacketFlag, QTYPE, RCODE, ResourceRecord, TYPE};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::tally::{Tally, unknown_name};

/// The longest question that is read. One without extensions is at most 12 + 255 + 4 bytes.
const LONGEST: usize = 1232;
/// How long answers count, in seconds: as long as any call, since they never change.
const TTL: u32 = 3600;
/// Connections at once; more wait.
const CONNECTIONS: usize = 8;
/// How long a connection may say nothing.
const IDLE: Duration = Duration::from_secs(5);

/// The names that have an address inside.
#[derive(Debug)]
pub(super) struct Names(BTreeMap<String, Ipv4Addr>);

/// What comes of a question.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    reply: Vec<u8>,
    /// The name, if it is not listed.
    refused: Option<String>,
}

impl Names {
    pub(super) fn of(passages: &[Passage]) -> Self {
        Self(passages.iter().map(|passage| (passage.target.host.clone(), passage.inside)).collect())
    }

    /// The name that has this address.
    pub(super) fn at(&self, inside: Ipv4Addr) -> Option<&str> {
        self.0.iter().find(|(_, address)| **address == inside).map(|(name, _)| name.as_str())
    }

    /// The answer to a question; absent for what is none.
    fn answer(&self, question: &[u8]) -> Option<Answer> {
        let asked = Packet::parse(question).ok()?;
        if asked.has_flags(PacketFlag::RESPONSE) {
            return None;
        }
        let mut reply = Packet::new_reply(asked.id());
        reply.set_flags(PacketFlag::RECURSION_AVAILABLE | PacketFlag::AUTHORITATIVE_ANSWER);
        if asked.has_flags(PacketFlag::RECURSION_DESIRED) {
            reply.set_flags(PacketFlag::RECURSION_DESIRED);
        }
        let mut refused = None;
        match asked.questions.as_slice() {
            _ if asked.opcode() != OPCODE::StandardQuery => *reply.rcode_mut() = RCODE::NotImplemented,
            [one] => {
                let name = one.qname.to_string().to_ascii_lowercase();
                let wants_address = matches!(one.qtype, QTYPE::TYPE(TYPE::A) | QTYPE::ANY);
                let local = is_localhost(&name).then_some(Ipv4Addr::LOCALHOST);
                match self.0.get(&name).copied().or(local) {
                    Some(address) if wants_address => {
                        let data = RData::A(A { address: address.into() });
                        reply.answers.push(ResourceRecord::new(one.qname.clone(), CLASS::IN, TTL, data));
                    }
                    // The name is there, and has nothing of that kind.
                    Some(_) => {}
                    None => {
                        *reply.rcode_mut() = RCODE::NameError;
                        // To ask for the name of an address is not to want to go there.
                        refused = (!name.ends_with(".arpa")).then_some(name);
                    }
                }
                reply.questions.push(one.clone());
            }
            _ => *reply.rcode_mut() = RCODE::FormatError,
        }
        Some(Answer { reply: reply.build_bytes_vec().ok()?, refused })
    }

    /// The answer, its refusal noted.
    fn reply(&self, question: &[u8], tally: &Tally) -> Option<Vec<u8>> {
        let answer = self.answer(question)?;
        if let Some(name) = answer.refused {
            tally.deny(unknown_name(&name));
        }
        Some(answer.reply)
    }
}

/// Answers datagrams until the call ends.
pub(super) async fn answer_datagrams(
    socket: UdpSocket,
    names: Arc<Names>,
    tally: Arc<Tally>,
    ending: CancellationToken,
) {
    let mut buffer = [0; LONGEST];
    loop {
        let received = tokio::select! {
            biased;
            received = socket.recv_from(&mut buffer) => received,
            // What was asked before is noted: the first branch goes first.
            () = ending.cancelled() => return,
        };
        let (length, asker) = match received {
            Ok(received) => received,
            Err(error) => {
                super::after_failed_accept(&error).await;
                continue;
            }
        };
        if let Some(reply) = names.reply(&buffer[..length], &tally) {
            // Where it cannot be sent, the tool's buffer is full, and it asks again.
            let _ = socket.try_send_to(&reply, asker);
        }
    }
}

/// Answers connections until the call ends.
pub(super) async fn answer_connections(
    listener: TcpListener,
    names: Arc<Names>,
    tally: Arc<Tally>,
    ending: CancellationToken,
) {
    let mut connections = JoinSet::new();
    loop {
        let has_room = connections.len() < CONNECTIONS;
        tokio::select! {
            () = ending.cancelled() => return,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            accepted = listener.accept(), if has_room => match accepted {
                Ok((connection, _)) => {
                    connections.spawn(answer_connection(connection, Arc::clone(&names), Arc::clone(&tally)));
                }
                Err(error) => super::after_failed_accept(&error).await,
            },
        }
    }
}

/// A length of two bytes before each message (RFC 1035, 4.2.2). What is no question ends the connection.
async fn answer_connection(mut connection: TcpStream, names: Arc<Names>, tally: Arc<Tally>) {
    let mut exchange = async || -> io::Result<bool> {
        let length = usize::from(connection.read_u16().await?);
        let mut question = [0; LONGEST];
        let Some(question) = question.get_mut(..length) else { return Ok(false) };
        connection.read_exact(question).await?;
        let Some(reply) = names.reply(question, &tally) else { return Ok(false) };
        connection.write_u16(u16::try_from(reply.len()).map_err(io::Error::other)?).await?;
        connection.write_all(&reply).await?;
        Ok(true)
    };
    while let Ok(Ok(true)) = tokio::time::timeout(IDLE, exchange()).await {}
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sandbox::egress::passages;
    use simple_dns::{Name, QCLASS, Question};
    use toolproto::manifest::{HostPort, TlsMode};

    use super::*;

    fn names() -> Names {
        let listed = ["api.example.com:443", "api.example.com:80", "db.example.com:5432", "10.0.0.1:22"];
        let hosts = listed.map(|host| HostPort::try_from(host.to_owned()).unwrap());
        Names::of(&passages(&hosts, |_| TlsMode::Auto).unwrap())
    }

    fn question(name: &str, kind: QTYPE) -> Vec<u8> {
        let mut packet = Packet::new_query(7);
        packet.set_flags(PacketFlag::RECURSION_DESIRED);
        let name = Name::new(name).unwrap();
        packet.questions.push(Question::new(name, kind, QCLASS::CLASS(CLASS::IN), false));
        packet.build_bytes_vec().unwrap()
    }

    fn ask(name: &str, kind: TYPE) -> (RCODE, Vec<Ipv4Addr>, Option<String>) {
        let answer = names().answer(&question(name, QTYPE::TYPE(kind))).unwrap();
        let reply = Packet::parse(&answer.reply).unwrap();
        assert_eq!(reply.id(), 7);
        assert_eq!(reply.questions[0].qname.to_string(), name.trim_end_matches('.'));
        let addresses = reply.answers.iter().map(|record| match &record.rdata {
            RData::A(found) => Ipv4Addr::from(found.address),
            other => panic!("{other:?}"),
        });
        (reply.rcode(), addresses.collect(), answer.refused)
    }

    #[test]
    fn listed_names_have_an_ipv4_address_and_nothing_else() {
        let first = Ipv4Addr::new(198, 18, 0, 2);
        assert_eq!(ask("api.example.com", TYPE::A), (RCODE::NoError, vec![first], None));
        assert_eq!(ask("API.eXample.com.", TYPE::A), (RCODE::NoError, vec![first], None));
        assert_eq!(ask("db.example.com", TYPE::A).1, [Ipv4Addr::new(198, 18, 0, 3)]);
        for kind in [TYPE::AAAA, TYPE::MX, TYPE::TXT, TYPE::HTTPS] {
            assert_eq!(ask("api.example.com", kind), (RCODE::NoError, Vec::new(), None), "{kind:?}");
        }
        assert_eq!(ask("localhost", TYPE::A).1, [Ipv4Addr::LOCALHOST]);
    }

    #[test]
    fn other_names_do_not_exist_and_are_told() {
        for name in ["example.com", "x.api.example.com", "api.example.com.evil.org", "com", r"api\.example.com"] {
            let (code, addresses, refused) = ask(name, TYPE::A);
            assert_eq!((code, addresses), (RCODE::NameError, Vec::new()), "{name}");
            assert!(refused.is_some(), "{name}");
        }
        assert_eq!(ask("1.0.0.127.in-addr.arpa", TYPE::PTR), (RCODE::NameError, Vec::new(), None));
    }

    #[test]
    fn what_is_no_question_gets_no_answer_or_an_error() {
        assert_eq!(names().answer(b""), None);
        assert_eq!(names().answer(b"GET / HTTP/1.1\r\n\r\n"), None);
        let reply = names().answer(&question("api.example.com", QTYPE::TYPE(TYPE::A))).unwrap().reply;
        assert_eq!(names().answer(&reply), None, "answers are not answered, or two resolvers could talk for ever");
        let none = Packet::new_query(7).build_bytes_vec().unwrap();
        let reply = names().answer(&none).unwrap().reply;
        assert_eq!(Packet::parse(&reply).unwrap().rcode(), RCODE::FormatError);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_fail(bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in 0_usize..40, at in 0_usize..40, byte: u8) {
            let _ = names().answer(&bytes);
            let mut bent = question("api.example.com", QTYPE::TYPE(TYPE::A));
            if let Some(target) = bent.get_mut(at) {
                *target = byte;
            }
            bent.truncate(bent.len().saturating_sub(cut));
            let _ = names().answer(&bent);
        }
    }
}
