//! What a service manager does with agentd: it passes a socket, asks for signs of life, and has files read anew.

use std::fs;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;
use std::time::{Duration, Instant};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, shown, signal_process};
use agentd_tests::http_client;
use agentd_tests::model_server::{ModelServer, Script, Turn};
use agentd_tests::site::{Site, chmod};
use agentd_tests::{leftovers, needs, requirement};
use nix::sys::signal::Signal;
use serde_json::json;

/// Binds the socket as systemd does for a socket unit, then becomes agentd.
const ACTIVATE: &str = "
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
os.umask(0o177)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], int(sys.argv[2], 8))
listener.listen(64)
os.dup2(listener.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')
os.execv(sys.argv[3], sys.argv[3:])
";

/// agentd, started by the one that passes a socket with this mode.
fn activated<'a>(site: &'a Site, mode: &str) -> Daemon<'a> {
    Daemon::start_by(site, &["--limits", "best-effort"], |serve| activating(site, mode, &serve))
}

fn activating(site: &Site, mode: &str, serve: &Command) -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", ACTIVATE]).arg(site.path("run/agentd.sock")).arg(mode);
    command.arg(serve.get_program()).args(serve.get_args());
    command
}

#[test]
fn a_passed_socket_is_served_and_left_where_it_is() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    site.python_tool("quick", "", "reply({'seen': sorted(name for name in os.environ if 'LISTEN' in name)})");
    let mut daemon = activated(&site, "660");
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(site.path("run/agentd.sock")).unwrap());
    let before = inode();
    // The launcher reads from the client's connection who asks: with a socket that another process bound, too.
    let reply = daemon.call("quick", &json!({}));
    assert_eq!((&reply["ok"], &reply["result"]["seen"]), (&json!(true), &json!([])), "{reply}");
    let environment = fs::read(format!("/proc/{}/environ", daemon.agentd_pid())).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("LISTEN_"), "the daemon believes that it was passed it");
    daemon.leave_to_the_test();
    daemon.signal_launcher(Signal::SIGTERM);
    assert!(daemon.wait_for_end(PATIENCE).success(), "{}", daemon.log());
    assert_eq!(inode(), before, "the socket's file is the service manager's");
    fs::remove_file(site.path("run/agentd.sock")).unwrap();
    leftovers::assert_none(&site);
}

#[test]
fn a_passed_socket_that_everybody_may_use_is_refused() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    let output = activating(&site, "666", &Daemon::command(&site, &["--limits", "best-effort"])).output().unwrap();
    assert!(!output.status.success());
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(log.contains("mode 0666") && log.contains("SocketMode=0660"), "{log}");
    fs::remove_file(site.path("run/agentd.sock")).unwrap();
    leftovers::assert_none(&site);
}

#[test]
fn the_watchdog_is_fed_by_a_daemon_that_works_and_by_no_other() {
    needs!(requirement::root());
    let site = Site::new();
    let manager = UnixDatagram::bind(site.path("run/notify")).unwrap();
    chmod(&site.path("run/notify"), 0o666);
    let daemon = Daemon::start_by(&site, &["--limits", "best-effort"], |mut command| {
        command.env("NOTIFY_SOCKET", site.path("run/notify")).env("WATCHDOG_USEC", "900000");
        command
    });
    let told = |within: Duration| {
        manager.set_read_timeout(Some(within)).unwrap();
        let mut bytes = [0; 256];
        let length = manager.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..length]).trim().to_owned())
    };
    assert_eq!(told(PATIENCE).as_deref(), Some("READY=1"));
    for _ in 0..3 {
        assert_eq!(told(PATIENCE).as_deref(), Some("WATCHDOG=1"));
    }
    let agentd = daemon.agentd_pid();
    signal_process(agentd, Signal::SIGSTOP);
    // What it said before is still to be read.
    while told(Duration::from_millis(200)).is_some() {}
    assert_eq!(told(Duration::from_secs(2)), None, "a stopped daemon says that all is well");
    signal_process(agentd, Signal::SIGCONT);
    assert_eq!(told(PATIENCE).as_deref(), Some("WATCHDOG=1"));
    daemon.signal_launcher(Signal::SIGTERM);
    let end = Instant::now() + PATIENCE;
    while told(PATIENCE).is_some_and(|word| word != "STOPPING=1") {
        assert!(Instant::now() < end, "agentd does not say that it stops");
    }
    fs::remove_file(site.path("run/notify")).unwrap();
    daemon.stop();
}

#[test]
fn credentials_reach_the_model_and_the_tool_that_they_are_for() {
    needs!(requirement::root());
    let site = Site::new();
    // As systemd does it: for root alone.
    fs::create_dir(site.path("credentials")).unwrap();
    chmod(&site.path("credentials"), 0o500);
    for (name, value) in [("MODEL_KEY", "key-of-the-model"), ("TOOL_TOKEN", "token-of-the-tool")] {
        chmod(&site.write(&format!("credentials/{name}"), value.as_bytes()), 0o400);
    }
    let body = "reply({'length': len(os.environ.get('TOOL_TOKEN', '')), 'model': 'MODEL_KEY' in os.environ})";
    site.python_tool("spends", "[sandbox]\npolicy = \"workspace\"\nsecrets = [\"TOOL_TOKEN\"]", body);
    let script = Script { api_key: Some("key-of-the-model".to_owned()), ..Script::of([Turn::text("{\"done\":true}")]) };
    let server = ModelServer::start(script).unwrap();
    let model = |key: &str| {
        let base_url = server.base_url();
        format!(
            "[model]\nprovider = \"openai\"\nbase_url = \"{base_url}\"\nmodel = \"scripted\"\napi_key = \"credential:{key}\"\n"
        )
    };
    site.agent_with_model("worker", &model("MODEL_KEY"), &[], "");
    site.agent_with_model("thief", &model("TOOL_TOKEN"), &[], "");
    let daemon = Daemon::start_by(&site, &["--limits", "best-effort"], |mut command| {
        command.env("CREDENTIALS_DIRECTORY", site.path("credentials"));
        command
    });
    let reply = daemon.call("spends", &json!({}));
    assert_eq!(reply["result"], json!({"length": 17, "model": false}), "{reply}");
    let result = daemon.run("worker", &json!({}));
    assert_eq!(result["status"], "success", "{result}");
    let result = daemon.run("thief", &json!({}));
    assert_eq!(result["error_code"], "MODEL_UNAVAILABLE", "the daemon has a tool's secret: {result}");
    daemon.stop();
    assert!(!site.path("run/credentials").exists());
}

fn reload(daemon: &Daemon<'_>, words: &str) {
    let before = daemon.log().matches(words).count();
    daemon.signal_launcher(Signal::SIGHUP);
    eventually(words, PATIENCE, || daemon.log().matches(words).count() > before);
}

/// What the daemon says when it has taken the files; the launcher says the same of itself.
const TAKEN: &str = "configuration reloaded agents=";

#[test]
fn a_reload_takes_agents_tools_and_policies_or_nothing_at_all() {
    needs!(requirement::root());
    let site = Site::new();
    site.python_tool("old", "", "reply({'is': 'old'})");
    let server = ModelServer::start(Script::of([Turn::call("new", json!({})), Turn::text("{\"done\":true}")])).unwrap();
    let daemon = Daemon::start(&site);
    let policies = |name: &str| daemon.get("/v1/policies").text().contains(name);
    let call = |tool: &str| {
        let body = json!({"version": 1, "tool": tool, "arguments": {}});
        let response = daemon.post("/v1/calls", &body);
        if response.status == 200 { response.json()["ok"] == true } else { false }
    };
    let exec = |policy: &str| daemon.exec(&["--policy", policy], &["true"], b"");
    assert!(call("old") && !call("new") && !policies("fresh"));

    // A new tool, an agent that uses it, a policy, and one fault in a file that only the daemon reads.
    site.python_tool("new", "", "reply({'is': 'new'})");
    site.write("policies/fresh.toml", b"version = 1\nname = \"fresh\"\nextends = \"strict\"\nadhoc = true\n");
    site.agent("worker", &server.base_url(), &["new"], "[budget]\nmax_turn = 3");
    reload(&daemon, "not reloaded, what was in force stays");
    assert!(daemon.log().contains("worker.toml") && daemon.log().contains("max_turn"), "{}", daemon.log());
    assert!(call("old") && !call("new") && !policies("fresh"), "{}", daemon.log());
    assert!(!exec("fresh").status.success(), "the launcher took what the daemon refused");

    site.agent("worker", &server.base_url(), &["new"], "[budget]\nmax_turns = 3");
    reload(&daemon, TAKEN);
    assert!(call("old") && call("new") && policies("fresh"), "{}", daemon.log());
    assert!(exec("fresh").status.success(), "{}", shown(&exec("fresh")));
    let result = daemon.run("worker", &json!({}));
    assert_eq!(result["status"], "success", "{result}");

    // What is taken away is gone.
    fs::remove_dir_all(site.path("config/tools/old")).unwrap();
    fs::remove_file(site.path("policies/fresh.toml")).unwrap();
    reload(&daemon, TAKEN);
    assert!(!call("old") && call("new") && !policies("fresh"));
    assert!(!exec("fresh").status.success());
    daemon.stop();
}

#[test]
fn a_job_goes_on_with_what_it_began_with() {
    needs!(requirement::root());
    let site = Site::new();
    site.python_tool("waits", "", "deadline = time.monotonic() + 50\nwhile not os.path.exists('/workspace/go') and time.monotonic() < deadline: time.sleep(0.1)\nreply({})");
    let turns = [Turn::call("waits", json!({})), Turn::call("waits", json!({})), Turn::text("{\"done\":true}")];
    let server = ModelServer::start(Script::of(turns)).unwrap();
    site.agent("worker", &server.base_url(), &["waits"], "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    let job = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    eventually("the tool runs", PATIENCE, || {
        leftovers::site_processes(&site).iter().any(|process| site.owns_uid(process.uid))
    });
    fs::remove_file(site.path("config/agents/worker.toml")).unwrap();
    reload(&daemon, TAKEN);
    let body = json!({"version": 1, "agent": "worker", "goal": {}});
    assert_eq!(daemon.post("/v1/jobs", &body).json()["code"], "AGENT_UNKNOWN", "no new job gets the agent");
    fs::write(workspace.join("go"), "").unwrap();
    let result = daemon.result(&job);
    assert_eq!((&result["status"], &result["usage"]["tool_calls"]), (&json!("success"), &json!(2)), "{result}");
    daemon.stop();
}

#[test]
fn clients_wait_while_agentd_is_between_two_lives() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    // The service manager listens before agentd runs: a request that came too early is answered all the same.
    let site = Site::new();
    let mut daemon = None;
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let mut stream = None;
            eventually("a socket", PATIENCE, || {
                stream = UnixStream::connect(site.path("run/agentd.sock")).ok();
                stream.is_some()
            });
            let stream = stream.unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            http_client::send(stream, "GET", "/v1/health", &[], b"").unwrap().status
        });
        daemon = Some(activated(&site, "660"));
        assert_eq!(asked.join().unwrap(), 200);
    });
    let mut daemon = daemon.unwrap();
    daemon.leave_to_the_test();
    daemon.signal_launcher(Signal::SIGTERM);
    assert!(daemon.wait_for_end(PATIENCE).success(), "{}", daemon.log());
    fs::remove_file(site.path("run/agentd.sock")).unwrap();
    leftovers::assert_none(&site);
}
