//! Clients that want too much of the socket: bodies without end, thousands of connections, bytes that come too slowly.
//! Each is refused or bounded, and the daemon serves the others meanwhile.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, shown};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};

/// A group that every Debian has, here the one whose members may use the daemon.
const GROUP: u32 = 100;
const ANNA: u32 = 60_001;
const BERT: u32 = 60_002;

/// Longer than a connection may say nothing, and longer than a body may take.
const LONG: Duration = Duration::from_secs(180);

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

fn site() -> Site {
    let site = Site::new();
    site.configure("[service]\ngroup = \"users\"\n");
    site
}

/// The most memory that the daemon has had, in bytes.
fn peak(daemon: &Daemon<'_>) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.agentd_pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

/// Somebody else is served.
#[track_caller]
fn assert_serves(daemon: &Daemon<'_>, uid: u32) {
    let output = daemon.agentctl_as(uid, GROUP, &["tools"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}\n{}", shown(&output), daemon.log());
}

fn connected(daemon: &Daemon<'_>) -> UnixStream {
    let stream = UnixStream::connect(daemon.socket()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream
}

/// All that the daemon says until it closes the connection, which it may do while bytes are still on their way to it.
fn answer(mut stream: UnixStream) -> String {
    let mut said = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => said.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => panic!("the connection is still open: {error}; {}", String::from_utf8_lossy(&said)),
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn a_body_without_end_is_refused_before_it_is_kept() {
    needs!(requirements());
    const BODY: usize = 1_000_000_000;
    let site = site();
    let daemon = Daemon::start(&site);
    let before = peak(&daemon);
    let zeros = vec![b' '; 1 << 20];
    for (framing, opening) in
        [(format!("Content-Length: {BODY}"), ""), ("Transfer-Encoding: chunked".to_owned(), "100000\r\n")]
    {
        let mut stream = connected(&daemon);
        let head =
            format!("POST /v1/jobs HTTP/1.1\r\nHost: agentd\r\nContent-Type: application/json\r\n{framing}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut sent = 0;
        let broken_off = loop {
            if sent >= BODY {
                break false;
            }
            let piece = [opening.as_bytes(), zeros.as_slice(), if opening.is_empty() { b"" } else { b"\r\n" }].concat();
            match stream.write_all(&piece) {
                Ok(()) => sent += zeros.len(),
                Err(_) => break true,
            }
        };
        let answer = answer(stream);
        assert!(broken_off, "{framing}: all of it was taken; {answer}");
        assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("REQUEST_TOO_LARGE"), "{framing}: {answer}");
    }
    let grown = peak(&daemon).saturating_sub(before);
    assert!(grown < 64 << 20, "the daemon kept {grown} bytes");
    daemon.stop();
}

/// Opens connections as a user and holds them; then says how many of them the daemon has closed.
const OPENS: &str = r#"
import os, resource, select, socket, sys
path, uid, gid, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
os.setgroups([gid]); os.setgid(gid); os.setuid(uid)
connections = []
for _ in range(count):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connections.append(connection)
print("open", flush=True)
closed = 0
for connection in connections:
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    closed += 1
print("closed", closed, flush=True)
"#;

/// The program's next line.
fn line(child: &mut Child) -> String {
    let output = child.stdout.as_mut().unwrap();
    let mut line = String::new();
    let mut byte = [0];
    while output.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
        line.push(char::from(byte[0]));
    }
    line
}

#[test]
fn ten_thousand_idle_connections_are_one_users_trouble() {
    needs!(requirements());
    const CONNECTIONS: usize = 10_000;
    let site = site();
    let daemon = Daemon::start(&site);
    let before = peak(&daemon);
    let [uid, gid, count] = [u64::from(ANNA), u64::from(GROUP), CONNECTIONS as u64].map(|number| number.to_string());
    let mut greedy = Command::new("/usr/bin/python3")
        .args(["-c", OPENS, daemon.socket().to_str().unwrap(), &uid, &gid, &count])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(line(&mut greedy), "open");
    assert_serves(&daemon, BERT);
    assert_serves(&daemon, 0);
    // Those that it was given are closed as well, since nothing is said on them.
    assert_eq!(line(&mut greedy), format!("closed {CONNECTIONS}"));
    assert!(greedy.wait().unwrap().success());
    assert!(daemon.log().contains("the user has too many"), "{}", daemon.log());
    eventually("the user is served again", PATIENCE, || {
        daemon.agentctl_as(ANNA, GROUP, &["tools"]).output().unwrap().status.success()
    });
    let grown = peak(&daemon).saturating_sub(before);
    assert!(grown < 64 << 20, "the daemon kept {grown} bytes");
    daemon.stop();
}

#[test]
fn slow_clients_are_given_up() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let head = "POST /v1/jobs HTTP/1.1\r\nHost: agentd\r\nContent-Type: application/json\r\n";
    let mut half_a_head = connected(&daemon);
    half_a_head.write_all(head.as_bytes()).unwrap();
    let mut half_a_body = connected(&daemon);
    half_a_body.write_all(format!("{head}Content-Length: 100\r\n\r\n{{\"version\":").as_bytes()).unwrap();
    // Asks again and again and never reads an answer.
    let mut reads_nothing = connected(&daemon);
    reads_nothing.set_nonblocking(true).unwrap();
    let request = b"GET /v1/openapi.json HTTP/1.1\r\nHost: agentd\r\n\r\n";
    while reads_nothing.write(request).is_ok() {}
    assert_serves(&daemon, BERT);
    assert_eq!(answer(half_a_head), "", "nothing was asked");
    let answer = answer(half_a_body);
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("to arrive"), "{answer}");
    assert_serves(&daemon, BERT);
    drop(reads_nothing);
    daemon.stop();
}
