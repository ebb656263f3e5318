//! `agentctl exec`: one sandboxed command, seen as its user sees it.

use std::fs;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use agentd_tests::daemon::{Daemon, listing, shown};
use agentd_tests::leftovers;
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::Value;

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_sandbox_looks_as_promised() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let script = "id; echo --; ls /; echo --; cat /etc/shadow; echo --; ps ax; echo --; ip link; echo --; grep -c : /etc/passwd; hostname";
    let output = daemon.exec(&["--policy", "workspace"], &["sh", "-c", script], b"");
    let text = out(&output);
    let parts: Vec<&str> = text.split("--\n").collect();
    let [id, root, shadow, processes, network, rest] = parts.as_slice() else { panic!("{}", shown(&output)) };
    assert!(id.starts_with("uid=") && !id.contains("uid=0("), "{id}");
    let number: u32 = id["uid=".len()..].chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap();
    assert!(site.owns_uid(number), "{id}");
    for name in root.split_whitespace() {
        const MINIMAL: [&str; 15] = [
            "bin",
            "dev",
            "etc",
            "lib",
            "lib32",
            "lib64",
            "libx32",
            "proc",
            "run",
            "sbin",
            "sys",
            "tmp",
            "usr",
            "var",
            "workspace",
        ];
        assert!(MINIMAL.contains(&name), "{name} is in the root: {root}");
    }
    assert!(root.contains("workspace"));
    assert_eq!(*shadow, "");
    assert!(err(&output).contains("shadow"), "{}", err(&output));
    if requirement::program("/usr/bin/ps").is_ok() {
        // The heading, the shell, ps, and the sandbox's PID 1 where it shows itself.
        let lines: Vec<&str> = processes.lines().collect();
        assert!((3..=4).contains(&lines.len()) && !processes.contains("agentd-launcher"), "{processes}");
    }
    if requirement::program("/usr/bin/ip").is_ok() || requirement::program("/usr/sbin/ip").is_ok() {
        let interfaces: Vec<&str> = network.lines().filter(|line| !line.starts_with(' ')).collect();
        assert!(interfaces.len() <= 1 && interfaces.iter().all(|line| line.contains(" lo:")), "{network}");
    }
    assert!(rest.ends_with("sandbox\n"), "{rest}");
    daemon.stop();
}

#[test]
fn a_runtime_runs_the_first_word_as_it_runs_a_tools_entry() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("say.py"), "import sys; print(sys.argv[1], sys.executable)").unwrap();
    let with = |runtime: &str| {
        let options = ["--policy", "strict", "--runtime", runtime, "--workspace", workspace.to_str().unwrap()];
        daemon.exec(&options, &["say.py", "hello"], b"")
    };
    assert_eq!(out(&with("python")), "hello /usr/bin/python3\n");
    let unknown = with("abacus");
    assert_eq!(unknown.status.code(), Some(125), "{}", shown(&unknown));
    assert!(err(&unknown).contains("TOOL_UNAVAILABLE") && err(&unknown).contains("abacus"), "{}", err(&unknown));
    daemon.stop();
}

#[test]
fn exit_statuses_tell_what_happened() {
    needs!(requirement::root());
    let site = Site::new();
    site.write("work/not-executable", b"");
    let daemon = Daemon::start(&site);
    let status = |options: &[&str], command: &[&str]| {
        let output = daemon.exec(options, command, b"");
        (output.status.code(), shown(&output))
    };
    let strict: &[&str] = &["--policy", "strict"];
    for (command, wanted) in [
        (&["true"][..], 0),
        (&["sh", "-c", "exit 7"], 7),
        (&["sh", "-c", "exit 255"], 255),
        (&["/usr/share"], 126),
        (&["no-such-program"], 127),
        (&["/etc/passwd"], 126),
        (&["sh", "-c", "kill -SEGV $$"], 139),
        (&["sh", "-c", "kill -KILL $$"], 137),
        (&["sh", "-c", "kill -TERM $$"], 143),
    ] {
        let (code, shown) = status(strict, command);
        assert_eq!(code, Some(wanted), "{command:?}: {shown}");
    }
    let begun = Instant::now();
    let (code, text) = status(&["--policy", "strict", "--timeout", "400ms"], &["sleep", "600"]);
    assert_eq!(code, Some(124), "{text}");
    let (code, text) =
        status(&["--policy", "strict", "--timeout", "400ms"], &["sh", "-c", "trap '' TERM; sleep 600 & sleep 600"]);
    assert_eq!(code, Some(124), "what ignores SIGTERM is killed: {text}");
    assert!(begun.elapsed() < Duration::from_secs(60));
    let (code, text) = status(&["--policy", "no-such-policy"], &["true"]);
    assert_eq!(code, Some(125), "{text}");
    assert!(text.contains("POLICY_UNKNOWN") || text.contains("no-such-policy"), "{text}");
    let mut nowhere = Command::new(agentd_tests::programs::find("agentctl"));
    nowhere.args(["--socket", "/nonexistent/agentd.sock", "exec", "--policy", "strict", "--", "true"]);
    assert_eq!(nowhere.output().unwrap().status.code(), Some(125));
    daemon.stop();
}

#[test]
fn streams_are_connected_and_kept_apart() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let output = daemon.exec(&["--policy", "strict"], &["sh", "-c", "cat; echo done >&2"], b"hello\n\xff\x00 bytes");
    assert_eq!(output.stdout, b"hello\n\xff\x00 bytes");
    assert_eq!(err(&output).trim(), "done");
    let much: Vec<u8> = (0..3_000_000u32).map(|number| (number % 251) as u8).collect();
    let output = daemon.exec(&["--policy", "strict"], &["cat"], &much);
    assert!(output.stdout == much, "{} of {} bytes came back: {}", output.stdout.len(), much.len(), err(&output));
    // Who does not read its input, and who closes its output, ends all the same.
    let output = daemon.exec(&["--policy", "strict"], &["true"], &much);
    assert_eq!(output.status.code(), Some(0));
    let output = daemon.exec(&["--policy", "strict"], &["sh", "-c", "exec >&- 2>&-; exit 3"], b"");
    assert_eq!(output.status.code(), Some(3));
    let output = daemon.exec(&["--policy", "strict"], &["sh", "-c", "sleep 600 & echo started"], b"");
    assert_eq!(
        (output.status.code(), out(&output).as_str()),
        (Some(0), "started\n"),
        "a child left behind holds nobody up"
    );
    daemon.stop();
}

#[test]
fn a_call_is_gone_when_its_client_is() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let mut client = daemon.agentctl(&["exec", "--policy", "strict", "--", "sleep", "600"]).spawn().unwrap();
    let inside =
        || leftovers::site_processes(&site).iter().any(|process| site.owns_uid(process.uid) && process.name == "sleep");
    agentd_tests::daemon::eventually("the command runs", agentd_tests::daemon::PATIENCE, inside);
    client.kill().unwrap();
    client.wait().unwrap();
    agentd_tests::daemon::eventually("the command is gone", agentd_tests::daemon::PATIENCE, || !inside());
    daemon.stop();
}

#[test]
fn the_workspace_changes_by_policy_and_the_receipt_says_so() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("kept"), "old").unwrap();
    let path = workspace.to_str().unwrap();
    let receipt = site.path("receipt.json");
    let predicate = |policy: &str, command: &str| {
        let options = ["--policy", policy, "--workspace", path, "--receipt", receipt.to_str().unwrap()];
        let output = daemon.exec(&options, &["sh", "-c", command], b"");
        let envelope: Value = serde_json::from_slice(&fs::read(&receipt).unwrap()).unwrap();
        let payload = envelope["payload"].as_str().unwrap_or_else(|| panic!("{envelope}"));
        (output, decode(payload)["predicate"].clone())
    };
    let (output, first) = predicate("workspace", "echo new > made && echo changed > kept");
    assert!(output.status.success(), "{}", shown(&output));
    assert_eq!(fs::read_to_string(workspace.join("made")).unwrap(), "new\n");
    assert_eq!(first["workspace"]["created"][0]["path"], "made", "{first}");
    assert_eq!(first["workspace"]["modified"][0]["path"], "kept", "{first}");
    assert_ne!(first["workspace"]["before"], first["workspace"]["after"]);
    assert!(!first["enforced"].as_array().unwrap().is_empty());
    let (output, second) = predicate("strict", "echo no > made");
    assert!(!output.status.success(), "{}", shown(&output));
    assert_eq!(fs::read_to_string(workspace.join("made")).unwrap(), "new\n");
    assert_eq!(second["workspace"]["state"], "read_only", "{second}");
    assert_eq!(second["workspace"]["before"], first["workspace"]["after"], "nothing changed in between");
    assert_eq!(listing(&workspace), ["kept", "made"], "nothing else was made there");
    daemon.stop();
}

/// Base64, as DSSE has it.
fn decode(payload: &str) -> Value {
    let bytes = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

#[test]
fn every_command_has_a_network_that_nobody_has_used() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    // What a network keeps of those who were in it: how much went over its loopback.
    let script = "import socket; read = lambda: open('/proc/net/dev').read().split('lo:')[1].split()[0]; before = read(); \
                  socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x' * 100, ('127.0.0.1', 9)); \
                  print(before, read())";
    // More than are made ahead, one after the other, so that some are made ahead and some are not.
    for _ in 0..8 {
        let output = daemon.exec(&["--policy", "workspace"], &["python3", "-c", script], b"");
        assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
        let text = out(&output);
        let (before, after) = text.trim_end().split_once(' ').expect("two numbers");
        assert_eq!(before, "0", "somebody was here before");
        assert!(after.parse::<u64>().unwrap() > 100, "{text}");
    }
    daemon.stop();
}
