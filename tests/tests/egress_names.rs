//! A listed name is resolved by the host's resolver, and whoever answers for the name is not trusted: what it says is judged, and
//! what was judged is connected to.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agentd_tests::daemon::{Daemon, shown};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};

const A: u16 = 1;
const AAAA: u16 = 28;

/// A name server that says something else each time. It ends with the test's process.
struct NameServer {
    address: SocketAddr,
    questions: Arc<AtomicUsize>,
}

impl NameServer {
    /// Answers questions for IPv4 addresses with these, one after the other, and those for IPv6 with that one, if any.
    fn start(v4: Vec<Ipv4Addr>, v6: Option<IpAddr>) -> Option<Self> {
        // resolv.conf has no ports, and other tests may have name servers of their own.
        let own = u8::try_from(std::process::id() % 200).unwrap();
        let socket = (1..250).find_map(|last| UdpSocket::bind((Ipv4Addr::new(127, 83, own, last), 53)).ok())?;
        let (address, questions) = (socket.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let (count, answers) = (Arc::clone(&questions), Mutex::new(v4.into_iter().cycle()));
        std::thread::spawn(move || {
            let mut packet = [0; 512];
            while let Ok((length, asker)) = socket.recv_from(&mut packet) {
                let question = &packet[..length];
                // Header, name, and its end: then the type.
                let Some(end) = question.iter().skip(12).position(|byte| *byte == 0).map(|end| end + 13) else {
                    continue;
                };
                let kind = u16::from_be_bytes([question[end], question[end + 1]]);
                let data = match (kind, v6) {
                    (A, _) => {
                        count.fetch_add(1, Ordering::Relaxed);
                        answers.lock().unwrap().next().map(|address| address.octets().to_vec())
                    }
                    (AAAA, Some(IpAddr::V6(address))) => Some(address.octets().to_vec()),
                    _ => None,
                };
                let mut answer = question[..end + 4].to_vec();
                answer[2] = 0x81;
                answer[3] = 0x80;
                answer[7] = u8::from(data.is_some());
                answer[8..12].fill(0);
                if let Some(data) = data {
                    answer.extend([0xc0, 12, 0, u8::try_from(kind).unwrap(), 0, 1, 0, 0, 0, 0, 0]);
                    answer.push(u8::try_from(data.len()).unwrap());
                    answer.extend(data);
                }
                let _ = socket.send_to(&answer, asker);
            }
        });
        Some(Self { address, questions })
    }
}

/// A daemon for which this is the host's name server, in a mount namespace of its own.
fn start<'a>(site: &'a Site, server: &NameServer) -> Daemon<'a> {
    let resolver = site.write("resolv.conf", format!("nameserver {}\n", server.address.ip()).as_bytes());
    let sources = site.write("nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n");
    let script =
        "mount --bind \"$1\" /etc/resolv.conf && mount --bind \"$2\" /etc/nsswitch.conf && shift 2 && exec \"$@\"";
    let mode = if requirement::cgroup_controllers().is_ok() { "required" } else { "best-effort" };
    Daemon::start_by(site, &["--limits", mode], |daemon| {
        let mut command = Command::new("/usr/bin/unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        command.arg(resolver).arg(sources).arg(daemon.get_program()).args(daemon.get_args());
        command
    })
}

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")?;
    requirement::program("/usr/bin/unshare")
}

/// What a call gets that connects to a name, and what its receipt says.
fn connect(daemon: &Daemon<'_>, port: u16) -> (String, String) {
    let receipt = daemon.site().path("receipt.json");
    let host = format!("bad.example:{port}");
    let code = format!(
        "import socket\n\
         try: print(socket.create_connection(('bad.example', {port})).recv(9))\n\
         except ConnectionResetError: print('reset')"
    );
    let options = ["--policy", "out", "--timeout", "60s", "--receipt", receipt.to_str().unwrap(), "--network", &host];
    let output = daemon.exec(&options, &["/usr/bin/python3", "-c", &code], b"");
    assert!(output.status.success(), "{}", shown(&output));
    let envelope: serde_json::Value = serde_json::from_slice(&fs::read(&receipt).unwrap()).unwrap();
    let payload = data_encoding::BASE64.decode(envelope["payload"].as_str().unwrap().as_bytes()).unwrap();
    let statement: serde_json::Value = serde_json::from_slice(&payload).unwrap();
    (String::from_utf8(output.stdout).unwrap().trim().to_owned(), statement["predicate"]["denied"].to_string())
}

fn policy(site: &Site, allow: &str) {
    let text = format!("version = 1\nname = \"out\"\nextends = \"network\"\nadhoc = true\nnetwork_allow = [{allow}]\n");
    site.write("policies/out.toml", text.as_bytes());
}

/// The classic: the address that was judged is one, the address that is connected to another.
#[test]
fn a_name_that_changes_between_check_and_use_gains_nothing() {
    needs!(requirements());
    let allowed = TcpListener::bind("127.0.0.2:0").unwrap();
    let port = allowed.local_addr().unwrap().port();
    let forbidden = TcpListener::bind(("127.0.0.3", port)).unwrap();
    for (listener, words) in [(allowed, "allowed"), (forbidden, "forbidden")] {
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let _ = std::io::Write::write_all(&mut connection.unwrap(), words.as_bytes());
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }
    let addresses = vec![Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::new(127, 0, 0, 3)];
    let Some(server) = NameServer::start(addresses, None) else {
        return requirement::skip("no address of 127.0.0.0/8 has port 53 free");
    };
    let site = Site::new();
    policy(&site, &format!("\"*:*\", \"127.0.0.2:{port}\""));
    let daemon = start(&site, &server);
    assert_eq!(connect(&daemon, port), ("b'allowed'".to_owned(), "[]".to_owned()));
    assert_eq!(server.questions.load(Ordering::Relaxed), 1, "it was asked for more than once");
    // The next call asks anew, and judges anew.
    let (got, denied) = connect(&daemon, port);
    assert_eq!(got, "reset");
    assert!(denied.contains(&format!("network_allow = [\\\"127.0.0.3:{port}\\\"]")), "{denied}");
    daemon.stop();
}

#[test]
fn answers_that_point_inwards_are_not_followed() {
    needs!(requirements());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    for (v4, v6, why) in [
        ("127.0.0.1", None, "a loopback address"),
        ("10.0.0.1", None, "a private address"),
        ("169.254.169.254", None, "a cloud's metadata service"),
        ("0.0.0.0", None, "an address of no host"),
        ("100.64.0.1", Some("::ffff:127.0.0.1"), "an IPv4 address in IPv6's clothes"),
    ] {
        let Some(server) = NameServer::start(vec![v4.parse().unwrap()], v6.map(|text| text.parse().unwrap())) else {
            return requirement::skip("no address of 127.0.0.0/8 has port 53 free");
        };
        let site = Site::new();
        policy(&site, "\"*:*\"");
        let daemon = start(&site, &server);
        let (got, denied) = connect(&daemon, port);
        assert_eq!(got, "reset", "{v4}");
        assert!(denied.contains(why), "{v4}: {denied}");
        daemon.stop();
    }
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "somebody came through");
}
