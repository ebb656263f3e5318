//! Calls that agentd had ordered when it, or the launcher, was killed: one that never started is run, and one that may have done
//! something outside is not run twice, and its model is told so.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, signal_process};
use agentd_tests::far_end::{FarEnd, note};
use agentd_tests::leftovers;
use agentd_tests::model_server::{ModelServer, Script, Turn};
use agentd_tests::site::Site;
use agentd_tests::warm::{prewarm, wait_for_reading};
use agentd_tests::{needs, requirement};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

/// Counts what is sent, which is each call's effect, and answers once it is open. What says `never` is never answered.
struct Outside {
    far_end: FarEnd,
    is_open: Arc<AtomicBool>,
}

impl Outside {
    fn new() -> Self {
        let is_open = Arc::new(AtomicBool::new(false));
        let opened = Arc::clone(&is_open);
        let far_end = FarEnd::start(move |mut connection, notes| {
            let mut sent = String::new();
            BufReader::new(connection.try_clone()?).read_line(&mut sent)?;
            note(notes, sent.trim());
            // A caller that is killed is not answered.
            connection.set_nonblocking(true)?;
            while sent.trim() == "never" || !opened.load(Ordering::Relaxed) {
                if matches!(connection.read(&mut [0]), Ok(0)) {
                    return Ok(());
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            connection.write_all(b"seen\n")
        });
        Self { far_end, is_open }
    }

    fn open(&self) {
        self.is_open.store(true, Ordering::Relaxed);
    }

    /// How often this was sent.
    fn count(&self, what: &str) -> usize {
        self.far_end.seen().iter().filter(|sent| *sent == what).count()
    }
}

/// A site with tools that act outside: `send`, and `send_warm`, which is started ahead. `write` acts on the workspace directly.
fn site(server: &ModelServer, outside: &Outside) -> Site {
    let site = Site::new();
    site.configure("[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n");
    let rule = outside.far_end.rule();
    let out = format!("version = 1\nname = \"out\"\nextends = \"network\"\nnetwork_allow = [\"*:*\", {rule:?}]\n");
    site.write("policies/out.toml", out.as_bytes());
    let straight = "version = 1\nname = \"straight\"\nextends = \"workspace\"\nworkspace = \"direct\"\n\n[[example]]\n\
                    run = \"echo x > /workspace/x\"\nexpect = \"allowed\"\nwhy = \"it can be changed\"\n";
    site.write("policies/straight.toml", straight.as_bytes());
    let port = outside.far_end.port();
    let manifest =
        format!("[execution]\nstateful_action = true\n[sandbox]\npolicy = \"out\"\nhosts = [\"web.test:{port}\"]");
    let send = format!(
        "import socket\nend = socket.create_connection(('web.test', {port}))\n\
         end.sendall((arguments['what'] + '\\n').encode())\nreply({{'told': end.makefile().readline().strip()}})"
    );
    for name in ["send", "send_warm"] {
        site.python_tool(name, &manifest, &send);
    }
    prewarm(&site, "send_warm", 1);
    site.python_tool(
        "write",
        "[execution]\nmutates_workspace = true\n[sandbox]\npolicy = \"straight\"",
        "open('/workspace/log', 'a').write(arguments['what'] + '\\n')\n\
         while not os.path.exists('/workspace/open'): time.sleep(0.01)\nreply({'told': 'written'})",
    );
    site.agent("worker", &server.base_url(), &["send", "send_warm", "write"], "[budget]\nwall_seconds = 3600\n");
    site
}

/// Whom a crash kills first.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Agentd,
    Launcher,
}

/// Kills one of the two, and waits until everything has ended.
fn crash(mut daemon: Daemon<'_>, victim: Victim) {
    daemon.leave_to_the_test();
    match victim {
        Victim::Agentd => signal_process(daemon.agentd_pid(), Signal::SIGKILL),
        Victim::Launcher => daemon.signal_launcher(Signal::SIGKILL),
    }
    daemon.wait_for_end(PATIENCE);
    leftovers::await_no_process(daemon.site(), PATIENCE);
}

fn answer() -> Turn {
    Turn::text(json!({"done": true}).to_string())
}

#[test]
fn a_call_that_had_not_started_is_run_once() {
    needs!(requirements());
    for victim in [Victim::Agentd, Victim::Launcher] {
        let turns = [Turn::call("send", json!({"what": "once"})), answer().expecting("\"told\":\"seen\"")];
        let (server, outside) = (ModelServer::start(Script::of(turns)).unwrap(), Outside::new());
        outside.open();
        let site = site(&server, &outside);
        let daemon = Daemon::start(&site);
        let workspace = site.workspace("w", 0, 0);
        // Somebody has the workspace, so that the call is ordered and does not start.
        let holder = fs::File::open(&workspace).unwrap();
        rustix::fs::flock(&holder, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
        daemon.events(&id, None, |events| events.iter().any(|event| event.name == "call.started"));
        crash(daemon, victim);
        assert_eq!(outside.count("once"), 0, "{victim:?}: it had started");
        drop(holder);

        let daemon = Daemon::start(&site);
        let result = daemon.result(&id);
        assert_eq!(result["status"], "success", "{victim:?}: {result}\n{:?}\n{}", server.refusals(), daemon.log());
        assert_eq!(outside.count("once"), 1, "{victim:?}");
        assert_eq!((&result["usage"]["tool_calls"], &result["receipts"]["count"]), (&json!(1), &json!(1)), "{result}");
        daemon.stop();
    }
}

#[test]
fn a_call_that_may_have_acted_outside_is_told_and_not_repeated() {
    needs!(requirements());
    for (tool, victim) in [("send", Victim::Agentd), ("send", Victim::Launcher), ("send_warm", Victim::Launcher)] {
        let turns = [
            Turn::call("send", json!({"what": "first"})),
            Turn::call(tool, json!({"what": "never"})).expecting("\"told\":\"seen\""),
            answer().expecting("INTERRUPTED"),
        ];
        let (server, outside) = (ModelServer::start(Script::of(turns)).unwrap(), Outside::new());
        let site = site(&server, &outside);
        let daemon = Daemon::start(&site);
        let workspace = site.workspace("w", 0, 0);
        let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
        eventually("the first call acts", PATIENCE, || outside.count("first") == 1);
        // What is started ahead is there before the call that it is for.
        wait_for_reading(&site, 1);
        outside.open();
        eventually("the second call acts", PATIENCE, || outside.count("never") == 1);
        crash(daemon, victim);

        let daemon = Daemon::start(&site);
        let result = daemon.result(&id);
        assert_eq!(
            result["status"],
            "success",
            "{tool} {victim:?}: {result}\n{:?}\n{}",
            server.refusals(),
            daemon.log()
        );
        assert_eq!((outside.count("first"), outside.count("never")), (1, 1), "{tool} {victim:?}");
        daemon.stop();
    }
}

#[test]
fn a_call_that_wrote_directly_is_told_and_not_repeated() {
    needs!(requirements());
    let turns = [Turn::call("write", json!({"what": "x"})), answer().expecting("INTERRUPTED")];
    let (server, outside) = (ModelServer::start(Script::of(turns)).unwrap(), Outside::new());
    let site = site(&server, &outside);
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    let written = || fs::read_to_string(workspace.join("log")).unwrap_or_default();
    eventually("the call writes", PATIENCE, || written() == "x\n");
    crash(daemon, Victim::Launcher);
    fs::write(workspace.join("open"), "").unwrap();

    let daemon = Daemon::start(&site);
    let result: Value = daemon.result(&id);
    assert_eq!(result["status"], "success", "{result}\n{:?}\n{}", server.refusals(), daemon.log());
    assert_eq!(written(), "x\n");
    daemon.stop();
}
