//! The two processes: who they are, and what happens when either dies.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, listing, shown, signal_process};
use agentd_tests::leftovers;
use agentd_tests::model_server::{ModelServer, Order, Script, Turn};
use agentd_tests::site::{Site, ToolText, chmod};
use agentd_tests::{needs, programs, requirement};
use nix::sys::signal::Signal;
use serde_json::json;

fn status(process: u32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).trim().to_owned()
}

fn ids(process: u32, name: &str) -> Vec<String> {
    status(process, name).split_whitespace().map(str::to_owned).collect()
}

#[test]
fn the_launcher_is_privileged_and_small_the_daemon_is_neither() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let (launcher, agentd) = (daemon.launcher_pid(), daemon.agentd_pid());
    assert!(status(launcher, "Name").starts_with("agentd-launcher"), "{}", status(launcher, "Name"));
    assert_eq!(status(launcher, "Threads"), "1");
    assert_eq!(ids(launcher, "Uid"), ["0"; 4]);
    assert_eq!(status(agentd, "Name"), "agentd");
    assert_ne!(status(agentd, "Threads"), "1", "the twin: the daemon has threads");
    for kind in ["Uid", "Gid"] {
        let numbers = ids(agentd, kind);
        assert!(numbers.iter().all(|number| *number == numbers[0] && number != "0"), "{kind}: {numbers:?}");
    }
    assert!(!ids(agentd, "Groups").contains(&"0".to_owned()), "the daemon is in root's group");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(agentd, set).trim_start_matches('0'), "", "{set}");
    }
    assert_ne!(status(launcher, "CapEff").trim_start_matches('0'), "", "the twin: the launcher has capabilities");
    assert_eq!(status(agentd, "NoNewPrivs"), "1");

    // The privileged program has no network code in it.
    let maps = fs::read(programs::find("agentd-launcher")).unwrap();
    for needle in ["tokio-1.", "rustls-0.", "hyper-1.", "reqwest-0."] {
        assert!(!contains(&maps, needle), "{needle} is linked into the launcher");
    }
    let maps = fs::read(programs::find("agentd")).unwrap();
    assert!(contains(&maps, "tokio-1."), "the twin: the daemon has it");
    daemon.stop();
}

fn contains(bytes: &[u8], needle: &str) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle.as_bytes())
}

#[test]
fn stopping_leaves_nothing_but_state() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let output = daemon.exec(&["--policy", "strict"], &["true"], b"");
    assert!(output.status.success(), "{}", shown(&output));
    daemon.stop();
    assert_eq!(listing(&site.path("run")), Vec::<String>::new());
    let state = ["audit", "launcher", "ledger", "receipt.history", "receipt.pub", "staging", "workspaces"];
    assert_eq!(listing(&site.path("state")), state);
}

/// A daemon in the middle of a job: a tool sleeps, with a child that sleeps too.
fn in_the_middle<'a>(site: &'a Site, server: &ModelServer) -> (Daemon<'a>, String) {
    site.python_tool(
        "sleeper",
        "[execution]\nmutates_workspace = true\n[timeout]\nafter = \"300s\"",
        "import subprocess\nif os.path.exists('/workspace/go'):\n    reply({})\n    sys.exit(0)\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\ntime.sleep(600)",
    );
    site.agent("worker", &server.base_url(), &["sleeper"], "");
    let daemon = Daemon::start(site);
    let workspace = site.workspace("w", 0, 0);
    let job = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    eventually("the tool and its child run", PATIENCE, || {
        leftovers::site_processes(site).iter().filter(|process| site.owns_uid(process.uid)).count() >= 3
    });
    (daemon, job)
}

fn nothing_runs(site: &Site) {
    leftovers::await_no_process(site, Duration::from_secs(20));
    let mounts = leftovers::find(site).into_iter().filter(|left| matches!(left, leftovers::Leftover::Mount(_))).count();
    assert_eq!(mounts, 0);
}

/// After a crash the next start sweeps, goes on with the job, and works.
fn comes_back(site: &Site, job: &str) {
    // Should the call run again, it has no reason to sleep.
    fs::write(site.path("work/w/go"), "").unwrap();
    let daemon = Daemon::start(site);
    let result = daemon.result(job);
    assert_eq!((&result["status"], &result["data"]), (&json!("success"), &json!({"done": true})), "{result}");
    if let Some(root) = leftovers::cgroup_root(site) {
        let slices: Vec<_> =
            leftovers::cgroups_below(&root).into_iter().filter(|path| path.to_string_lossy().contains(job)).collect();
        assert!(slices.is_empty(), "not swept: {slices:?}");
    }
    let output = daemon.exec(&["--policy", "strict"], &["true"], b"");
    assert!(output.status.success(), "{}", shown(&output));
    daemon.stop();
}

fn sleeper_script() -> Script {
    let turns = [Turn::call("sleeper", json!({})), Turn::text("{\"done\":true}")];
    Script { order: Order::Transcript, ..Script::of(turns) }
}

#[test]
fn a_killed_daemon_takes_everything_with_it() {
    needs!(requirement::root());
    let site = Site::new();
    let server = ModelServer::start(sleeper_script()).unwrap();
    let (mut daemon, job) = in_the_middle(&site, &server);
    daemon.leave_to_the_test();
    signal_process(daemon.agentd_pid(), Signal::SIGKILL);
    daemon.wait_for_end(Duration::from_secs(20));
    nothing_runs(&site);
    drop(daemon);
    comes_back(&site, &job);
}

#[test]
fn a_killed_launcher_takes_everything_with_it() {
    needs!(requirement::root());
    let site = Site::new();
    let server = ModelServer::start(sleeper_script()).unwrap();
    let (mut daemon, job) = in_the_middle(&site, &server);
    daemon.leave_to_the_test();
    daemon.signal_launcher(Signal::SIGKILL);
    daemon.wait_for_end(Duration::from_secs(20));
    nothing_runs(&site);
    // Not dropped before: that would remove what the next start has to sweep.
    comes_back(&site, &job);
}

#[test]
fn a_second_daemon_on_one_state_directory_is_refused() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let mut second = Command::new(programs::find("agentd"));
    second.arg("serve").arg("--config-dir").arg(site.path("config")).arg("--state-dir").arg(site.path("state"));
    second.arg("--socket").arg(site.path("run/second.sock")).args(["--limits", "best-effort"]).stdin(Stdio::null());
    let output = second.output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("another agentd") && said.contains("state"), "{said}");
    assert_eq!(daemon.get("/v1/health").status, 200, "the first one goes on");
    daemon.stop();
}

/// `serve` and `check` on a faulty configuration: both must say the same, and neither may start.
fn refuses(site: &Site, words: &[&str]) {
    let mut check = Command::new(programs::find("agentd"));
    check.arg("check").arg("--config-dir").arg(site.path("config"));
    let checked = check.output().unwrap();
    let served = Daemon::command(site, &["--limits", "best-effort"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    for output in [checked, served] {
        assert!(!output.status.success(), "accepted: {}", shown(&output));
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        for word in words {
            assert!(said.contains(word), "{said:?} does not say {word:?}");
        }
    }
    leftovers::assert_none(site);
}

#[test]
fn faulty_files_are_named_with_line_and_reason() {
    needs!(requirement::root());
    let site = Site::new();
    site.write("config/agentd.toml", b"version = 1\n\n[limits]\nmax_paralel = 4\n");
    refuses(&site, &["agentd.toml", "4", "max_paralel", "max_parallel"]);
    site.write("config/agentd.toml", b"version = 1\nthis is not TOML\n");
    refuses(&site, &["agentd.toml", "2"]);
    site.configure("");
    site.python_tool("fine", "", "reply({})");
    site.write("config/tools/fine/tool.toml", b"version = 1\nname = \"fine\"\ndescription = \"x\"\n[run]\nruntime = \"python\"\nentry = \"main.py\"\nworkers = 3\n[contract]\ninput = \"input.json\"\n");
    refuses(&site, &["tools/fine/tool.toml", "7", "workers"]);
    fs::remove_dir_all(site.path("config/tools/fine")).unwrap();
    site.tool(&ToolText { name: "shut", runtime: "exec", entry: "main.sh", code: b"#!/bin/sh\n", manifest: "" });
    chmod(&site.path("config/tools/shut/main.sh"), 0o644);
    refuses(&site, &["tools/shut/tool.toml", "entry", "main.sh", "chmod a+x"]);
    fs::remove_dir_all(site.path("config/tools/shut")).unwrap();
    site.agent("asks", "http://127.0.0.1:9/v1", &["missing_tool"], "");
    refuses(&site, &["agents/asks.toml", "missing_tool"]);
    fs::remove_file(site.path("config/agents/asks.toml")).unwrap();
    Daemon::start(&site).stop();
}

#[test]
fn what_others_can_write_is_refused() {
    needs!(requirement::root());
    let site = Site::new();
    site.python_tool("fine", "", "reply({})");
    let entry = site.path("config/tools/fine/main.py");
    for (path, mode, was) in [
        (&entry, 0o666, 0o644),
        (&site.path("config/tools"), 0o777, 0o755),
        (&site.path("policies/strict.toml"), 0o664, 0o644),
    ] {
        chmod(path, mode);
        let output = Daemon::command(&site, &["--limits", "best-effort"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert!(!output.status.success(), "{} with mode {mode:o} was accepted", path.display());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(path.to_str().unwrap()), "{said}");
        chmod(path, was);
    }
    Daemon::start(&site).stop();
}
