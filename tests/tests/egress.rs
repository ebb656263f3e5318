//! Calls that list hosts reach those and nobody else: by name, without proxy settings, and with every refusal named.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, shown};
use agentd_tests::far_end::{FarEnd, note};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use data_encoding::BASE64;
use serde_json::Value;

/// A site whose policy `out` lets calls out to these servers, all of which are `web.test`.
fn site(servers: &[&FarEnd]) -> Site {
    let site = Site::new();
    site.configure(
        "[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n\"inner.test\" = [\"10.1.2.3\"]\n\"meta.test\" = [\"169.254.169.254\"]\n",
    );
    let rules: Vec<String> = servers.iter().map(|server| format!("{:?}", server.rule())).collect();
    let policy = format!(
        "version = 1\nname = \"out\"\nextends = \"network\"\nadhoc = true\nnetwork_allow = [\"*:*\", {}]\n",
        rules.join(", ")
    );
    site.write("policies/out.toml", policy.as_bytes());
    site
}

/// What became of a command: its output, and its receipt.
struct Ran {
    output: Output,
    receipt: Value,
}

impl Ran {
    #[track_caller]
    fn stdout(&self) -> String {
        assert!(self.output.status.success(), "{}\n{}", shown(&self.output), self.receipt);
        String::from_utf8_lossy(&self.output.stdout).trim_end().to_owned()
    }

    fn denied(&self) -> Vec<(String, String)> {
        let denied = self.receipt["denied"].as_array().unwrap();
        let text = |denial: &Value, key: &str| denial[key].as_str().unwrap().to_owned();
        denied.iter().map(|denial| (text(denial, "detail"), text(denial, "rule"))).collect()
    }

    /// Whether a refusal says this, with this rule.
    #[track_caller]
    fn assert_denied(&self, detail: &str, rule: &str) {
        let found = self.denied().iter().any(|(said, by)| said.contains(detail) && by.contains(rule));
        assert!(found, "no refusal `{detail}` with rule `{rule}` in {:#?}\n{}", self.denied(), shown(&self.output));
    }
}

/// Runs a command under policy `out` with these hosts.
fn run(daemon: &Daemon<'_>, hosts: &[&str], command: &[&str], input: &[u8]) -> Ran {
    let receipt = daemon.site().path("receipt.json");
    let mut options = vec!["--policy", "out", "--timeout", "60s", "--receipt", receipt.to_str().unwrap()];
    options.extend(hosts.iter().flat_map(|host| ["--network", host]));
    let output = daemon.exec(&options, command, input);
    let text = fs::read_to_string(&receipt).unwrap_or_else(|error| panic!("{error}: {}", shown(&output)));
    let envelope: Value = serde_json::from_str(&text).unwrap();
    let payload = BASE64.decode(envelope["payload"].as_str().unwrap().as_bytes()).unwrap();
    let statement: Value = serde_json::from_slice(&payload).unwrap();
    Ran { output, receipt: statement["predicate"].clone() }
}

fn python(daemon: &Daemon<'_>, hosts: &[&str], code: &str) -> Ran {
    run(daemon, hosts, &["/usr/bin/python3", "-c", code], b"")
}

#[test]
fn a_listed_host_is_reached_by_name_and_counted() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let web = FarEnd::http();
    let site = site(&[&web]);
    let daemon = Daemon::start(&site);
    let host = format!("web.test:{}", web.port());
    let code = format!(
        "import urllib.request as r\nprint(r.urlopen('http://{host}/hello').read().decode())\n\
         print(len(r.urlopen('http://{host}/bytes/1000000', data=b'y' * 300000).read()))"
    );
    let ran = python(&daemon, &[&host], &code);
    assert_eq!(ran.stdout(), format!("{{\"body\":0,\"host\":\"{host}\",\"path\":\"/hello\"}}\n1000000"));
    assert_eq!(ran.denied(), []);
    let used = |what: &str| ran.receipt["usage"][what].as_u64().unwrap();
    assert!((300_000..302_000).contains(&used("net_sent")), "{}", ran.receipt["usage"]);
    assert!((1_000_000..1_002_000).contains(&used("net_received")), "{}", ran.receipt["usage"]);
    let enforced = ran.receipt["enforced"].to_string();
    assert!(enforced.contains("\"egress\""), "{enforced}");

    let without = python(&daemon, &[], "print(1)");
    assert_eq!(without.stdout(), "1");
    assert_eq!(without.receipt["usage"].get("net_sent"), None);
    assert!(!without.receipt["enforced"].to_string().contains("egress"));
    daemon.stop();
}

#[test]
fn plain_tcp_passes_whoever_speaks_first_and_however_it_ends() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let greeter = FarEnd::start(|mut connection, _| {
        connection.write_all(b"220 welcome\r\n")?;
        let mut line = [0; 6];
        connection.read_exact(&mut line)?;
        connection.write_all(&line)
    });
    // Answers once the other direction has ended.
    let summer = FarEnd::start(|mut connection, _| {
        let mut all = Vec::new();
        connection.read_to_end(&mut all)?;
        connection.write_all(all.len().to_string().as_bytes())
    });
    let breaker = FarEnd::start(|mut connection, _| {
        connection.read_exact(&mut [0])?;
        rustix::net::sockopt::set_socket_linger(&connection, Some(Duration::ZERO)).map_err(io::Error::from)
    });
    let mourner = FarEnd::start(|mut connection, notes| {
        let mut all = Vec::new();
        connection.read_to_end(&mut all)?;
        note(notes, &format!("{} bytes", all.len()));
        connection.shutdown(Shutdown::Both)
    });
    let site = site(&[&greeter, &summer, &breaker, &mourner]);
    let daemon = Daemon::start(&site);
    let hosts: Vec<String> =
        [&greeter, &summer, &breaker, &mourner].iter().map(|end| format!("web.test:{}", end.port())).collect();
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let code = format!(
        "import socket\n\
         def to(port): return socket.create_connection(('web.test', port))\n\
         s = to({}); print(s.recv(100)); s.send(b'hello\\n'); print(s.recv(100)); print(s.recv(100))\n\
         s = to({}); s.sendall(b'z' * 2000000); s.shutdown(socket.SHUT_WR); print(s.recv(100))\n\
         s = to({}); s.send(b'x')\n\
         try: print(s.recv(100))\n\
         except ConnectionResetError: print('reset')\n\
         s = to({}); s.sendall(b'last words')",
        greeter.port(),
        summer.port(),
        breaker.port(),
        mourner.port()
    );
    let ran = python(&daemon, &hosts, &code);
    assert_eq!(ran.stdout(), "b'220 welcome\\r\\n'\nb'hello\\n'\nb''\nb'2000000'\nreset");
    ran.assert_denied(&format!("{}: its connection broke", hosts[2]), "none");
    assert_eq!(mourner.seen_all(1), ["10 bytes"], "what was sent last is lost");
    daemon.stop();
}

#[test]
fn everything_else_is_refused_at_once_and_named() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let web = FarEnd::http();
    let site = site(&[&web]);
    let daemon = Daemon::start(&site);
    let host = format!("web.test:{}", web.port());
    let code = format!(
        "import socket, time\n\
         began = time.monotonic()\n\
         def attempt(what, call):\n\
         \x20   try: call(); print(what, 'came through')\n\
         \x20   except OSError as error: print(what, type(error).__name__, getattr(error, 'errno', None))\n\
         def udp(family, place):\n\
         \x20   s = socket.socket(family, socket.SOCK_DGRAM); s.connect(place); s.send(b'x'); time.sleep(0.05); s.send(b'x')\n\
         attempt('name', lambda: socket.create_connection(('other.test', 443)))\n\
         attempt('name6', lambda: socket.getaddrinfo('web.test', 80, socket.AF_INET6))\n\
         attempt('port', lambda: socket.create_connection(('web.test', 1)))\n\
         attempt('address', lambda: socket.create_connection(('192.0.2.7', 443)))\n\
         attempt('address6', lambda: socket.create_connection(('2001:db8::7', 443)))\n\
         attempt('datagram', lambda: udp(socket.AF_INET, ('192.0.2.8', 53)))\n\
         attempt('datagram6', lambda: udp(socket.AF_INET6, ('2001:db8::8', 53)))\n\
         attempt('host', lambda: socket.create_connection(('127.0.0.1', {})))\n\
         attempt('listed', lambda: socket.create_connection(('web.test', {})))\n\
         print('slow' if time.monotonic() - began > 20 else 'at once')",
        web.port(),
        web.port()
    );
    let ran = python(&daemon, &[&host], &code);
    assert_eq!(
        ran.stdout(),
        "name gaierror -2\nname6 gaierror -5\nport ConnectionRefusedError 111\naddress ConnectionRefusedError 111\n\
         address6 ConnectionRefusedError 111\ndatagram ConnectionRefusedError 111\ndatagram6 ConnectionRefusedError 111\n\
         host ConnectionRefusedError 111\nlisted came through\nat once"
    );
    ran.assert_denied("other.test", "hosts = [\"other.test:PORT\"]");
    ran.assert_denied("web.test:1", "hosts = [\"web.test:1\"]");
    ran.assert_denied("192.0.2.7:443", "hosts = [\"192.0.2.7:443\"]");
    ran.assert_denied("[2001:db8::7]:443", "none");
    ran.assert_denied("192.0.2.8:53 (UDP)", "none");
    ran.assert_denied("[2001:db8::8]:53 (UDP)", "none");
    assert_eq!(ran.denied().len(), 6, "{:?}", ran.denied());
    assert!(web.seen().is_empty());
    daemon.stop();
}

/// Makes a certificate for web.test, and its key.
fn certificate(site: &Site) -> (PathBuf, PathBuf) {
    let (certificate, key) = (site.path("certificate.pem"), site.path("key.pem"));
    let mut command = Command::new("/usr/bin/openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]);
    command.args(["-subj", "/CN=web.test", "-addext", "subjectAltName=DNS:web.test,DNS:other.test", "-out"]);
    let output = command.arg(&certificate).arg("-keyout").arg(&key).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    (certificate, key)
}

#[test]
fn what_is_for_another_host_is_cut_off_and_named() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"), requirement::program("/usr/bin/openssl"));
    let plain = FarEnd::http();
    let keys = Site::new();
    let (certificate, key) = certificate(&keys);
    let secure = FarEnd::https(&certificate, &key);
    let site = site(&[&plain, &secure]);
    let daemon = Daemon::start(&site);
    let hosts = [format!("web.test:{}", plain.port()), format!("web.test:{}", secure.port())];
    let code = format!(
        "import http.client, socket, ssl, sys\n\
         trust = ssl.create_default_context(cadata=sys.stdin.read())\n\
         def attempt(what, call):\n\
         \x20   try: print(what, call())\n\
         \x20   except (OSError, http.client.HTTPException) as error: print(what, type(error).__name__)\n\
         def tls(name):\n\
         \x20   with trust.wrap_socket(socket.create_connection(('web.test', {secure})), server_hostname=name) as s:\n\
         \x20       s.sendall(b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); return s.makefile('rb').readline()\n\
         def nameless():\n\
         \x20   trust.check_hostname = False; return tls(None)\n\
         def plain(host, times=1):\n\
         \x20   c = http.client.HTTPConnection('web.test', {plain})\n\
         \x20   for number in range(times):\n\
         \x20       c.request('GET', '/', headers={{'Host': host if number == times - 1 else 'web.test'}}); status = c.getresponse(); status.read()\n\
         \x20   return status.status\n\
         attempt('right', lambda: tls('web.test'))\n\
         attempt('wrong', lambda: tls('other.test'))\n\
         attempt('none', nameless)\n\
         attempt('host', lambda: plain('web.test'))\n\
         attempt('other', lambda: plain('other.test'))\n\
         attempt('later', lambda: plain('third.test', 3))",
        secure = secure.port(),
        plain = plain.port()
    );
    let pem = fs::read(&certificate).unwrap();
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let ran = run(&daemon, &hosts, &["/usr/bin/python3", "-c", &code], &pem);
    assert_eq!(
        ran.stdout(),
        "right b'HTTP/1.1 200 OK\\r\\n'\nwrong ConnectionResetError\nnone ConnectionResetError\nhost 200\n\
         other ConnectionResetError\nlater ConnectionResetError"
    );
    ran.assert_denied("its TLS names other.test", &format!("hosts = [\"other.test:{}\"]", secure.port()));
    ran.assert_denied("it names no server", "tls = { ");
    ran.assert_denied("its Host names other.test", &format!("hosts = [\"other.test:{}\"]", plain.port()));
    ran.assert_denied("its Host names third.test", "hosts");
    let hosts_seen: Vec<_> = plain
        .seen()
        .iter()
        .filter(|line| line.starts_with("GET"))
        .map(|line| line.rsplit(' ').next().unwrap().to_owned())
        .collect();
    assert_eq!(hosts_seen, ["web.test"; 3], "a request for another host went out");
    daemon.stop();
}

#[test]
fn a_tool_says_what_its_connections_look_like() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let plain = FarEnd::http();
    let site = site(&[&plain]);
    let host = format!("web.test:{}", plain.port());
    let body = format!(
        "import http.client\n\
         def ask(host):\n\
         \x20   try:\n\
         \x20       c = http.client.HTTPConnection('web.test', {}); c.request('GET', '/', headers={{'Host': host}}); return c.getresponse().status\n\
         \x20   except (OSError, http.client.HTTPException) as error: return type(error).__name__\n\
         reply({{'right': ask('web.test'), 'other': ask('other.test')}})",
        plain.port()
    );
    for (name, tls) in [("as_it_is", String::new()), ("off", "off".to_owned()), ("required", "required".to_owned())] {
        let tls = if tls.is_empty() { tls } else { format!("tls = {{ \"{host}\" = \"{tls}\" }}\n") };
        let manifest = format!("[sandbox]\npolicy = \"out\"\nhosts = [\"{host}\"]\n{tls}[timeout]\nafter = \"30s\"\n");
        site.python_tool(name, &manifest, &body);
    }
    let daemon = Daemon::start(&site);
    let result = |tool: &str| daemon.call(tool, &serde_json::json!({}))["result"].clone();
    assert_eq!(result("as_it_is"), serde_json::json!({"right": 200, "other": "ConnectionResetError"}));
    assert_eq!(result("off"), serde_json::json!({"right": 200, "other": 200}));
    let reset = "ConnectionResetError";
    assert_eq!(result("required"), serde_json::json!({"right": reset, "other": reset}));
    daemon.stop();
}

#[test]
fn a_name_leads_where_the_policy_says_and_nowhere_else() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let web = FarEnd::http();
    let site = site(&[&web]);
    let own = format!("127.0.0.1:{}", web.port());
    site.write(
        "policies/narrow.toml",
        format!(
            "version = 1\nname = \"narrow\"\nextends = \"out\"\nadhoc = true\nnetwork_allow = [\"*.example.com:443\", \"{own}\"]\n\
             network_deny = [\"bad.example.com:*\"]\n"
        )
        .as_bytes(),
    );
    let daemon = Daemon::start(&site);
    let refused = |policy: &str, host: &str| {
        let output = daemon.exec(&["--policy", policy, "--network", host], &["true"], b"");
        assert_eq!(output.status.code(), Some(125), "{host}: {}", shown(&output));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused("narrow", "other.com:443").contains("network_allow does not name it"));
    assert!(refused("narrow", "api.example.com:80").contains("network_allow does not name it"));
    assert!(refused("narrow", "bad.example.com:443").contains("network_deny = [\"bad.example.com:*\"] forbids it"));
    assert!(refused("out", "10.0.0.1:80").contains("a private address"));
    assert!(refused("workspace", "api.example.com:443").contains("NOT_PERMITTED"));
    for host in ["api.example.com:443", &own, &format!("web.test:{}", web.port())] {
        let output = daemon.exec(&["--policy", "narrow", "--network", host], &["true"], b"");
        assert!(output.status.success(), "{host}: {}", shown(&output));
    }
    // An address can be listed too, and is dialled as it is.
    let code = format!("import urllib.request as r; print(r.urlopen('http://{own}/').status)");
    assert_eq!(python(&daemon, &[&own], &code).stdout(), "200");

    let (inner, meta) = (format!("inner.test:{}", web.port()), format!("meta.test:{}", web.port()));
    let code = format!(
        "import socket\n\
         for name in ['inner.test', 'meta.test']:\n\
         \x20   s = socket.create_connection((name, {}))\n\
         \x20   try: print(s.recv(1))\n\
         \x20   except ConnectionResetError: print('reset')",
        web.port()
    );
    let ran = python(&daemon, &[&inner, &meta], &code);
    assert_eq!(ran.stdout(), "reset\nreset");
    let rule = |address: &str| format!("network_allow = [\"{address}:{}\"] in policy `out`", web.port());
    ran.assert_denied("10.1.2.3", &rule("10.1.2.3"));
    ran.assert_denied("a cloud's metadata service", &rule("169.254.169.254"));
    daemon.stop();
}

/// How many descriptors and threads agentd has.
fn footprint(daemon: &Daemon<'_>) -> (usize, usize) {
    let count = |what: &str| fs::read_dir(format!("/proc/{}/{what}", daemon.agentd_pid())).unwrap().count();
    (count("fd"), count("task"))
}

/// agentd's resident memory, in bytes.
fn memory(daemon: &Daemon<'_>) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.agentd_pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn connections_are_bounded_and_end_with_their_call() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    // Greets, and holds what it has.
    let holder = FarEnd::start(|mut connection, notes| {
        note(notes, "opened");
        let held = connection.write_all(b"y").and_then(|()| io::copy(&mut connection, &mut io::sink()));
        note(notes, "ended");
        // Who leaves a greeting unread hangs up with an error.
        held.map(|_| ())
            .or_else(|error| if error.kind() == io::ErrorKind::ConnectionReset { Ok(()) } else { Err(error) })
    });
    let site = site(&[&holder]);
    let daemon = Daemon::start(&site);
    let host = format!("web.test:{}", holder.port());
    assert_eq!(python(&daemon, &[&host], "print(1)").stdout(), "1");
    let (descriptors, _) = footprint(&daemon);
    let code = format!(
        "import select, socket, time\n\
         kept = [socket.create_connection(('web.test', {})) for _ in range(300)]\n\
         def greeted(): return sum(one.recv(1, socket.MSG_PEEK) == b'y' for one in select.select(kept, [], [], 1)[0])\n\
         end = time.monotonic() + 40\n\
         while greeted() < 256 and time.monotonic() < end: time.sleep(0.05)\n\
         time.sleep(1) # for one too many to come\n\
         print(greeted(), flush=True)",
        holder.port()
    );
    let ran = python(&daemon, &[&host], &code);
    assert_eq!(ran.stdout(), "256", "so many connections of one call were let out at once");
    let count = |what: &str| holder.seen().iter().filter(|line| *line == what).count();
    eventually("all connections end", PATIENCE, || count("opened") == count("ended"));
    eventually("no descriptor is left", PATIENCE, || footprint(&daemon).0 <= descriptors);
    daemon.stop();
}

#[test]
fn who_does_not_answer_holds_up_no_call() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    site.configure("[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n");
    // Nobody accepts: once two wait, further requests are dropped.
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let listener = std::net::TcpListener::from(socket);
    let address = listener.local_addr().unwrap();
    let _waiting: Vec<_> =
        (0..3).map(|_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(300))).collect();
    site.write(
        "policies/out.toml",
        format!("version = 1\nname = \"out\"\nextends = \"network\"\nadhoc = true\nnetwork_allow = [\"{address}\"]\n")
            .as_bytes(),
    );
    let daemon = Daemon::start(&site);
    let host = format!("web.test:{}", address.port());
    let code = format!("import socket; print(socket.create_connection(('web.test', {})).recv(1))", address.port());
    let began = Instant::now();
    let output = daemon.exec(
        &["--policy", "out", "--timeout", "2s", "--network", &host],
        &["/usr/bin/python3", "-c", &code],
        b"",
    );
    assert_eq!(output.status.code(), Some(124), "{}", shown(&output));
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    // With more time it is told what the matter is.
    let ran = python(
        &daemon,
        &[&host],
        &code
            .replace("print(", "import sys\ntry: print(")
            .replace("recv(1))", "recv(1))\nexcept ConnectionResetError: print('reset')"),
    );
    assert_eq!(ran.stdout(), "reset");
    ran.assert_denied("did not answer within 5 s", "none");
    daemon.stop();
}

#[test]
fn a_flood_fills_neither_memory_nor_receipt() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let web = FarEnd::http();
    let site = site(&[&web]);
    let daemon = Daemon::start(&site);
    let host = format!("web.test:{}", web.port());
    assert_eq!(python(&daemon, &[&host], "print(1)").stdout(), "1");
    let before = memory(&daemon);
    let code = format!(
        "import socket, struct, urllib.request as r\n\
         s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
         for number in range(30000):\n\
         \x20   name = b'n%d' % number\n\
         \x20   s.sendto(struct.pack('>6H', 7, 256, 1, 0, 0, 0) + bytes([len(name)]) + name + b'\\x04test\\0\\0\\1\\0\\1', ('198.18.0.1', 53))\n\
         for port in range(1, 2000):\n\
         \x20   try: socket.create_connection(('192.0.2.1', port))\n\
         \x20   except OSError: pass\n\
         print(r.urlopen('http://{host}/').status)"
    );
    let ran = python(&daemon, &[&host], &code);
    assert_eq!(ran.stdout(), "200");
    assert_eq!(ran.denied().len(), 64);
    let grown = memory(&daemon).saturating_sub(before);
    assert!(grown < 64 << 20, "agentd grew by {grown} bytes");
    daemon.stop();
}

/// Where a policy allows no loopback, Landlock lets a call connect to the listed ports and to the resolver's only. A host that
/// lacks that says so.
#[test]
fn without_loopback_only_listed_ports_are_dialled() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let web = FarEnd::http();
    let site = site(&[&web]);
    site.write(
        "policies/out.toml",
        format!(
            "version = 1\nname = \"out\"\nextends = \"network\"\nadhoc = true\nloopback = false\nnetwork_allow = [\"{}\"]\n",
            web.rule()
        )
        .as_bytes(),
    );
    let daemon = Daemon::start_with(&site, &["--limits", "best-effort"]);
    let host = format!("web.test:{}", web.port());
    let code = format!(
        "import socket, urllib.request as r\n\
         print(r.urlopen('http://{host}/').status)\n\
         for call in [lambda: socket.create_connection(('192.0.2.1', 1)), lambda: socket.socket().bind(('127.0.0.1', 0))]:\n\
         \x20   try: call(); print('came through')\n\
         \x20   except OSError as error: print(error.errno)"
    );
    let ran = python(&daemon, &[&host], &code);
    // Without Landlock's network rules the namespace refuses the first, and nobody the second.
    let by_landlock = ran.receipt["enforced"].to_string().contains("landlock_tcp");
    assert_ne!(ran.receipt["not_enforced"].to_string().contains("loopback = false"), by_landlock, "{}", ran.receipt);
    assert_eq!(ran.stdout(), if by_landlock { "200\n13\n13" } else { "200\n111\ncame through" });
    daemon.stop();
}
