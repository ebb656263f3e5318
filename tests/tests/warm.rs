//! Processes that are started ahead: they serve calls as cold ones would, belong to one job or user, and go when they should.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, kill_process, runs, shown, signal_process};
use agentd_tests::far_end::FarEnd;
use agentd_tests::leftovers;
use agentd_tests::model_server::{ModelServer, Recorded, Script, Turn};
use agentd_tests::site::{Site, ToolText};
use agentd_tests::warm::{prewarm, processes_in, ready, wait_for_reading, wait_for_ready};
use agentd_tests::{needs, requirement};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

/// Says what it saw before it read its request, and what it sees of the workspace then.
const TELLS: &str = r#"
import json, os, sys
before = {"token": os.urandom(8).hex(), "at": os.getcwd(), "seen": sorted(os.listdir("/workspace"))}
request = json.load(sys.stdin)
arguments = request["arguments"]
os.chdir(request["workspace"])
if "write" in arguments:
    open(arguments["write"], "w").write("written")
if "AGENTD_EVENTS_FD" in os.environ:
    os.write(int(os.environ["AGENTD_EVENTS_FD"]), b'{"progress":0.5,"message":"half"}\n')
result = {"before": before, "workspace": request["workspace"], "at": os.getcwd(), "sees": sorted(os.listdir(".")),
          "same": sorted(os.listdir("/workspace")), "uid": os.getuid(), "env": os.environ.get("COLOUR")}
print(json.dumps({"protocol": 1, "call_id": request["call_id"], "ok": True, "result": result}))
"#;

fn tells(site: &Site, name: &str, count: u32, tables: &str) {
    let code = TELLS.as_bytes();
    site.tool(&ToolText { name, runtime: "python", entry: "main.py", code, manifest: tables });
    prewarm(site, name, count);
}

/// A receipt's predicate, and with it what only the launcher's own record says.
fn predicate(envelope: &Value) -> Value {
    let payload = envelope["payload"].as_str().unwrap_or_else(|| panic!("{envelope}"));
    let bytes = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
    let statement: Value = serde_json::from_slice(&bytes).unwrap();
    let mut predicate = statement["predicate"].clone();
    for what in ["cgroup", "uid"] {
        predicate[what] = predicate["evidence"]["record"][what].clone();
    }
    predicate
}

/// A direct call: its result and the evidence of its receipt.
fn call(daemon: &Daemon<'_>, tool: &str, arguments: &Value, workspace: Option<&Path>) -> (Value, Value) {
    let body = json!({"version": 1, "tool": tool, "arguments": arguments, "workspace": workspace});
    let response = daemon.post("/v1/calls", &body);
    assert_eq!(response.status, 200, "{}\n{}", response.text(), daemon.log());
    let reply = response.json();
    assert_eq!(reply["ok"], true, "{reply}\n{}", daemon.log());
    (reply["result"].clone(), predicate(&reply["receipt"]))
}

#[test]
fn a_direct_call_is_served_by_what_the_one_before_left() {
    needs!(requirements());
    let site = Site::new();
    tells(&site, "tells", 2, "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("there"), "x").unwrap();
    let (cold, cold_receipt) = call(&daemon, "tells", &json!({}), Some(&workspace));
    let cgroup = cold_receipt["cgroup"].as_str().unwrap();
    assert!(cgroup.starts_with("agent-") && cgroup.contains("/call-"), "{cgroup}");
    wait_for_reading(&site, 2);

    let (warm, receipt) = call(&daemon, "tells", &json!({"write": "new"}), Some(&workspace));
    let cgroup = receipt["cgroup"].as_str().unwrap();
    assert!(cgroup.starts_with("direct-0.slice/warm-"), "{cgroup}");
    for (result, sees) in [(&cold, json!(["there"])), (&warm, json!(["new", "there"]))] {
        assert_eq!(result["before"]["at"], "/", "cold and warm alike: {result}");
        assert_eq!((&result["at"], &result["workspace"]), (&json!("/job/workspace"), &json!("/job/workspace")));
        assert_eq!((&result["sees"], &result["same"]), (&sees, &sees), "{result}");
    }
    assert_eq!(warm["before"]["seen"], json!([]), "nothing of the workspace is seen before the call");
    assert_eq!(fs::read_to_string(workspace.join("new")).unwrap(), "written");
    assert_eq!(receipt["workspace"]["created"][0]["path"], "new");
    for what in ["enforced", "policy", "tool", "uid"] {
        assert_eq!(receipt[what], cold_receipt[what], "{what}");
    }

    // Used once: no two calls meet one process, or one uid.
    let mut tokens = vec![cold["before"]["token"].clone(), warm["before"]["token"].clone()];
    let mut uids = vec![cold["uid"].clone(), warm["uid"].clone()];
    for _ in 0..3 {
        wait_for_reading(&site, 2);
        let (next, receipt) = call(&daemon, "tells", &json!({}), Some(&workspace));
        assert!(receipt["cgroup"].as_str().unwrap().contains("/warm-"), "{receipt}");
        assert!(!tokens.contains(&next["before"]["token"]), "{tokens:?}");
        assert!(!uids.contains(&next["uid"]), "{uids:?}");
        tokens.push(next["before"]["token"].clone());
        uids.push(next["uid"].clone());
    }
    // One that shows a workspace is not for a call that has none.
    wait_for_reading(&site, 2);
    let (without, receipt) = call(&daemon, "tells", &json!({"write": "passing"}), None);
    assert!(receipt["cgroup"].as_str().unwrap().contains("/call-"), "{receipt}");
    assert_eq!(without["sees"], json!(["passing"]));
    assert_eq!(receipt["workspace"]["state"], "none");
    wait_for_reading(&site, 4);
    let (without, receipt) = call(&daemon, "tells", &json!({}), None);
    assert!(receipt["cgroup"].as_str().unwrap().contains("/warm-"), "{receipt}");
    assert_eq!(without["sees"], json!([]));
    daemon.stop();
    leftovers::assert_none(&site);
}

#[test]
fn a_call_that_runs_long_puts_off_no_start_for_ever() {
    needs!(requirements());
    let site = Site::new();
    tells(&site, "tells", 3, "");
    let daemon = Daemon::start(&site);
    let mut long = daemon.exec_held(&["--policy", "strict"], &["sh", "-c", "echo runs; read held; true"]);
    assert_eq!(long.line(), "runs");
    call(&daemon, "tells", &json!({}), None);
    wait_for_reading(&site, 3);
    let (_, receipt) = call(&daemon, "tells", &json!({}), None);
    assert!(receipt["cgroup"].as_str().unwrap().contains("/warm-"), "{receipt}");
    wait_for_reading(&site, 3);
    assert_eq!(long.let_go().status.code(), Some(0));
    daemon.stop();
    leftovers::assert_none(&site);
}

#[test]
fn a_jobs_processes_start_with_it_and_end_with_it() {
    needs!(requirements());
    let (open, opened) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    // The model says nothing before it is let.
    let observer = Box::new(move |_: &Recorded| {
        // When the test has failed nobody lets it any more.
        let _ = opened.lock().unwrap().recv_timeout(PATIENCE);
    });
    let script = Script::of([Turn::call("tells", json!({})), Turn::text(json!({"done": true}).to_string())]);
    let server = ModelServer::listen(script, "127.0.0.1:0".parse().unwrap(), Some(observer)).unwrap();
    let site = Site::new();
    tells(&site, "tells", 1, "[execution]\nread_only = true\n");
    site.agent("worker", &server.base_url(), &["tells"], "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("there"), "x").unwrap();
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    // Before the model has said anything.
    wait_for_ready(&site, 1);
    let slice = format!("agent-{id}.slice");
    assert!(ready(&site)[0].parent().is_some_and(|parent| parent.ends_with(&slice)), "{:?}", ready(&site));
    let events = std::thread::scope(|scope| {
        let (watching, is_watched) = mpsc::channel::<()>();
        let watcher = scope.spawn(|| {
            let watching = watching;
            daemon.events(&id, None, |events| {
                // Progress is told to those who watch already.
                let _ = events.first().map(|_| watching.send(()));
                events.last().is_some_and(|event| event.name == "job.ended")
            })
        });
        is_watched.recv_timeout(PATIENCE).unwrap();
        open.send(()).unwrap();
        eventually("the next one waits", PATIENCE, || ready(&site).iter().any(|leaf| leaf.ends_with("warm-2")));
        open.send(()).unwrap();
        watcher.join().unwrap()
    });
    let result = daemon.result(&id);
    assert_eq!(result["status"], "success", "{result}\n{}", daemon.log());
    let receipts = daemon.get(&format!("/v1/jobs/{id}/receipts")).json();
    let receipt = predicate(&receipts["receipts"][0]);
    assert_eq!(receipt["cgroup"], format!("{slice}/warm-1"));
    assert_eq!(receipt["workspace"]["state"], "read_only");
    let told = server.requests().pop().unwrap().body.to_string();
    assert!(told.contains("there") && told.contains("/job/workspace"), "{told}");
    let progress: Vec<&str> =
        events.iter().filter(|event| event.name == "call.progress").map(|event| event.data.as_str()).collect();
    assert!(progress.len() == 1 && progress[0].contains("half"), "{progress:?}");
    eventually("the job's cgroup goes", PATIENCE, || {
        let root = leftovers::cgroup_root(&site).unwrap();
        leftovers::cgroups_below(&root).iter().all(|path| !path.display().to_string().contains(&slice))
    });
    daemon.stop();
    leftovers::assert_none(&site);
}

#[test]
fn what_does_not_live_until_its_call_costs_no_call() {
    needs!(requirements());
    let site = Site::new();
    // Ends when nobody has asked anything for a while, as it would for a call that is there from the beginning.
    let code =
        "import select, sys\nif not select.select([sys.stdin], [], [], 3)[0]:\n    sys.exit(3)\n".to_owned() + TELLS;
    site.tool(&ToolText { name: "hasty", runtime: "python", entry: "main.py", code: code.as_bytes(), manifest: "" });
    prewarm(&site, "hasty", 1);
    let daemon = Daemon::start(&site);
    call(&daemon, "hasty", &json!({}), None);
    eventually("its end is noted", PATIENCE, || daemon.log().contains("did not live until its call"));
    assert!(daemon.log().contains("it ended with status 3"), "{}", daemon.log());
    // One that is killed while it waits is no loss either.
    call(&daemon, "hasty", &json!({}), None);
    tells(&site, "tells", 1, "");
    daemon.signal_launcher(Signal::SIGHUP);
    eventually("the new tool is there", PATIENCE, || daemon.get("/v1/tools").text().contains("\"tells\""));
    call(&daemon, "tells", &json!({}), None);
    let of_tells = || {
        let root = leftovers::cgroup_root(&site).unwrap();
        let leaves = leftovers::cgroups_below(&root);
        leaves.into_iter().filter(|leaf| ready(&site).contains(leaf)).flat_map(|leaf| processes_in(&leaf)).max()
    };
    eventually("one waits", PATIENCE, || of_tells().is_some());
    kill_process(of_tells().unwrap());
    let (_, receipt) = call(&daemon, "tells", &json!({}), None);
    assert_eq!(receipt["outcome"]["kind"], "exited", "{receipt}");
    daemon.stop();
    leftovers::assert_none(&site);
}

/// Whatever keeps a workspace from being brought to a process that waits, the call has not begun yet.
#[test]
fn a_call_starts_cold_when_its_process_cannot_be_given_the_workspace() {
    needs!(requirements(), requirement::program("/usr/bin/nsenter"), requirement::program("/usr/bin/mount"));
    let site = Site::new();
    tells(&site, "tells", 1, "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    call(&daemon, "tells", &json!({}), Some(&workspace));
    wait_for_ready(&site, 1);
    let tool = processes_in(&ready(&site)[0]).into_iter().max().unwrap();
    // The place for the workspace is gone.
    let hidden = Command::new("/usr/bin/nsenter")
        .args(["-t", &tool.to_string(), "-m", "/usr/bin/mount", "-t", "tmpfs", "none", "/job"])
        .output()
        .unwrap();
    assert!(hidden.status.success(), "{}", shown(&hidden));
    let (told, receipt) = call(&daemon, "tells", &json!({"write": "new"}), Some(&workspace));
    assert_eq!(told["sees"], json!(["new"]));
    assert!(receipt["cgroup"].as_str().unwrap().contains("/call-"), "{receipt}");
    assert_eq!(fs::read_to_string(workspace.join("new")).unwrap(), "written");
    daemon.stop();
    leftovers::assert_none(&site);
}

#[test]
fn one_users_are_not_anothers() {
    needs!(requirements());
    let site = Site::new();
    site.configure("[access]\ntools = { \"*\" = [\"*\"] }\n");
    tells(&site, "tells", 1, "");
    let daemon = Daemon::start(&site);
    std::os::unix::fs::chown(daemon.socket(), None, Some(1000)).unwrap();
    let call_as = |uid: u32| -> Value {
        let receipt = site.path(&format!("work/receipt-{uid}"));
        let output: Output = daemon
            .agentctl_as(uid, 1000, &["call", "tells", "--args", "{}", "--receipt", receipt.to_str().unwrap()])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}\n{}", shown(&output), daemon.log());
        let envelope = serde_json::from_slice(&fs::read(&receipt).unwrap()).unwrap();
        fs::remove_file(&receipt).unwrap();
        predicate(&envelope)["cgroup"].clone()
    };
    agentd_tests::site::chmod(&site.path("work"), 0o1777);
    assert!(call_as(1000).as_str().unwrap().contains("/call-"));
    wait_for_ready(&site, 1);
    // There is one, and it is not this user's.
    assert!(call_as(1001).as_str().unwrap().contains("/call-"));
    wait_for_ready(&site, 2);
    for uid in [1000, 1001] {
        let cgroup = call_as(uid);
        assert!(cgroup.as_str().unwrap().starts_with(&format!("direct-{uid}.slice/warm-")), "{uid}: {cgroup}");
    }
    daemon.stop();
}

#[test]
fn a_reload_ends_what_knows_the_old_configuration() {
    needs!(requirements());
    let site = Site::new();
    tells(&site, "tells", 1, "[sandbox]\nenv = { COLOUR = \"red\" }\n");
    let daemon = Daemon::start(&site);
    assert_eq!(call(&daemon, "tells", &json!({}), None).0["env"], "red");
    wait_for_ready(&site, 1);
    let before = ready(&site);
    let manifest = site.path("config/tools/tells/tool.toml");
    let text = fs::read_to_string(&manifest).unwrap();
    site.write("config/tools/tells/tool.toml", text.replace("red", "blue").as_bytes());
    daemon.signal_launcher(Signal::SIGHUP);
    eventually("what waits is ended", PATIENCE, || !ready(&site).contains(&before[0]));
    let (told, receipt) = call(&daemon, "tells", &json!({}), None);
    assert_eq!(told["env"], "blue", "{receipt}");
    daemon.stop();
}

#[test]
fn nobody_waits_for_ever_and_no_more_than_may() {
    needs!(requirements());
    let site = Site::new();
    site.configure("[timeouts]\nwarm = \"2s\"\n\n[limits]\nwarm_processes = 2\n");
    tells(&site, "tells", 5, "");
    let daemon = Daemon::start(&site);
    call(&daemon, "tells", &json!({}), None);
    let mut most = 0;
    eventually("they came and went, with their cgroup", Duration::from_secs(120), || {
        most = most.max(ready(&site).len());
        let root = leftovers::cgroup_root(&site).unwrap();
        most > 0 && leftovers::cgroups_below(&root).iter().all(|path| !path.display().to_string().contains("direct-"))
    });
    assert!(most <= 2, "{most} waited at once");
    daemon.stop();
    leftovers::assert_none(&site);
}

#[test]
fn they_die_with_the_daemon() {
    needs!(requirements());
    for is_launchers in [false, true] {
        let site = Site::new();
        tells(&site, "tells", 2, "");
        let mut daemon = Daemon::start(&site);
        call(&daemon, "tells", &json!({}), None);
        wait_for_ready(&site, 2);
        let processes: Vec<u32> = ready(&site).iter().flat_map(|leaf| processes_in(leaf)).collect();
        assert!(processes.len() >= 4, "{processes:?}");
        let victim = if is_launchers { daemon.launcher_pid() } else { daemon.agentd_pid() };
        signal_process(victim, Signal::SIGKILL);
        daemon.wait_for_end(PATIENCE);
        eventually("all are dead", PATIENCE, || !processes.iter().any(|id| runs(*id)));
        leftovers::clear(&site);
    }
}

#[test]
fn what_it_says_to_its_hosts_is_heard_with_its_call() {
    needs!(requirements());
    let site = Site::new();
    let server = FarEnd::http();
    site.configure("[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n");
    let policy = format!(
        "version = 1\nname = \"out\"\nextends = \"network\"\nnetwork_allow = [\"*:*\", \"{}\"]\n",
        server.rule()
    );
    site.write("policies/out.toml", policy.as_bytes());
    let code = format!(
        "import json, os, socket, sys\n\
         connection = socket.create_connection(('web.test', {port}))\n\
         connection.sendall(b'GET / HTTP/1.1\\r\\nHost: web.test\\r\\nConnection: close\\r\\n\\r\\n')\n\
         request = json.load(sys.stdin)\n\
         print(json.dumps({{'protocol': 1, 'call_id': request['call_id'], 'ok': True, 'result': {{'said': connection.recv(15, socket.MSG_WAITALL).decode()}}}}))\n",
        port = server.port()
    );
    let manifest = format!("[sandbox]\npolicy = \"out\"\nhosts = [\"web.test:{}\"]\n", server.port());
    site.tool(&ToolText {
        name: "early",
        runtime: "python",
        entry: "main.py",
        code: code.as_bytes(),
        manifest: &manifest,
    });
    prewarm(&site, "early", 1);
    let daemon = Daemon::start(&site);
    let (_, receipt) = call(&daemon, "early", &json!({}), None);
    assert!(receipt["usage"]["net_received"].as_u64().unwrap() > 0, "{receipt}");
    let heard = || server.seen().into_iter().filter(|line| line.starts_with("GET")).count();
    assert_eq!(heard(), 1);
    wait_for_ready(&site, 1);
    // Its question for the name is not answered before its call, so it waits there, and nothing is heard.
    let (told, receipt) = call(&daemon, "early", &json!({}), None);
    assert!(receipt["cgroup"].as_str().unwrap().contains("/warm-"), "{receipt}");
    assert_eq!(told["said"], "HTTP/1.1 200 OK", "{told}");
    assert!(receipt["usage"]["net_received"].as_u64().unwrap() > 0, "{receipt}");
    assert_eq!(heard(), 2, "{:?}", server.seen());
    wait_for_ready(&site, 1);
    assert_eq!(heard(), 2, "what waits is not heard: {:?}", server.seen());
    daemon.stop();
}
