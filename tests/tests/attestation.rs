//! Calls that write to the workspace directly, and of which nobody can say afterwards what they did: they have failed.

use std::fs;
use std::path::Path;

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, shown, signal_process};
use agentd_tests::leftovers;
use agentd_tests::model_server::{ModelServer, Script, Turn};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// The most entries that a workspace may have here.
const MAX_ENTRIES: u64 = 20;

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

/// A site with a policy `straight` that lets calls write directly, and a tool under it that makes files, and may fail then.
fn site() -> Site {
    let site = Site::new();
    let policy = "version = 1\nname = \"straight\"\nextends = \"workspace\"\nworkspace = \"direct\"\nadhoc = true\n\n\
                  [[example]]\nrun = \"echo x > /workspace/x\"\nexpect = \"allowed\"\nwhy = \"it can be changed\"\n";
    site.write("policies/straight.toml", policy.as_bytes());
    let configuration = fs::read_to_string(site.path("config/agentd.toml")).unwrap();
    let bounded = configuration.replace("[workspace]\n", &format!("[workspace]\nmax_entries = {MAX_ENTRIES}\n"));
    assert_ne!(configuration, bounded);
    site.write("config/agentd.toml", bounded.as_bytes());
    site.python_tool(
        "fill",
        "[execution]\nmutates_workspace = true\n[sandbox]\npolicy = \"straight\"",
        "for number in range(arguments['files']): open(f'/workspace/file-{number}', 'w').close()\n\
         if arguments.get('fail'): sys.exit(3)\nreply({'passed': True, 'checked': 1})",
    );
    site
}

fn predicate(envelope: &Value) -> Value {
    let payload = envelope["payload"].as_str().unwrap_or_else(|| panic!("{envelope}"));
    let bytes = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
    serde_json::from_slice::<Value>(&bytes).unwrap()["predicate"].clone()
}

/// A direct call of `fill`: its reply and its receipt.
fn fill(daemon: &Daemon<'_>, workspace: &Path, arguments: &Value) -> (Value, Value) {
    let body = json!({"version": 1, "tool": "fill", "arguments": arguments, "workspace": workspace});
    let reply = daemon.post("/v1/calls", &body).json();
    let receipt = predicate(&reply["receipt"]);
    (reply, receipt)
}

#[test]
fn a_call_after_which_the_workspace_is_too_large_has_failed() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);

    let (reply, receipt) = fill(&daemon, &workspace, &json!({"files": 3}));
    assert_eq!(reply["ok"], true, "{reply}\n{}", daemon.log());
    assert!(receipt["workspace"]["after"].is_string(), "{receipt}");
    assert_eq!(receipt["workspace"]["created"].as_array().unwrap().len(), 3);

    let (reply, receipt) = fill(&daemon, &workspace, &json!({"files": 2 * MAX_ENTRIES}));
    assert_eq!((&reply["ok"], &reply["error"]["code"]), (&json!(false), &json!("WORKSPACE_TOO_LARGE")), "{reply}");
    assert!(reply["error"]["message"].as_str().unwrap().contains("not known"), "{reply}");
    assert_eq!(receipt["outcome"]["code"], "WORKSPACE_TOO_LARGE");
    let record = &receipt["evidence"]["record"];
    assert_eq!(record["outcome"]["code"], "WORKSPACE_TOO_LARGE", "the launcher says so itself: {record}");
    assert_eq!(receipt["workspace"]["state"], "direct");
    assert!(receipt["workspace"]["before"].is_string() && receipt["workspace"]["after"].is_null(), "{receipt}");
    assert!(workspace.join(format!("file-{}", 2 * MAX_ENTRIES - 1)).exists(), "what it wrote is there");

    // The call's own failure stays, and what is not known is told beside it.
    let other = site.workspace("other", 0, 0);
    let (reply, receipt) = fill(&daemon, &other, &json!({"files": 2 * MAX_ENTRIES, "fail": true}));
    assert_eq!(reply["error"]["code"], "TOOL_CRASHED", "{reply}");
    assert!(reply["error"]["message"].as_str().unwrap().contains("not known"), "{reply}");
    assert!(receipt["workspace"]["after"].is_null(), "{receipt}");

    // A command is told so, too.
    let third = site.workspace("third", 0, 0);
    let options = ["--policy", "straight", "--workspace", third.to_str().unwrap()];
    let script = format!("for n in $(seq {}); do : >file-$n; done", 2 * MAX_ENTRIES);
    let output = daemon.exec(&options, &["/bin/sh", "-c", &script], b"");
    assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
    assert!(shown(&output).contains("WORKSPACE_TOO_LARGE"), "{}", shown(&output));
    daemon.stop();
}

#[test]
fn a_completion_contract_counts_no_change_that_nobody_can_attest() {
    needs!(requirements());
    let answer = || Turn::text(json!({"done": true}).to_string());
    let call = Turn::call("fill", json!({"files": 2 * MAX_ENTRIES}));
    let server = ModelServer::start(Script::of([call, answer().expecting("WORKSPACE_TOO_LARGE")])).unwrap();
    let site = site();
    let contract = "[completion]\nrequire_mutation = true\nrequire_verification = [\"fill\"]\nmode = \"strict\"\nmax_repairs = 0\n";
    site.agent("worker", &server.base_url(), &["fill"], contract);
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    let job = json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace});
    let result = daemon.result(&daemon.submit(&job));
    assert_eq!(result["error_code"], "COMPLETION_UNVERIFIED", "{result}\n{}", daemon.log());
    let unmet = result["details"]["unmet"].to_string();
    assert!(unmet.contains("changed the workspace") && unmet.contains("has not passed"), "{result}");
    assert_eq!(server.refusals(), []);
    daemon.stop();
}

#[test]
fn a_direct_call_whose_worker_is_lost_has_failed() {
    needs!(requirement::root());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    // What runs in a sandbox has a uid of its own, and so has agentd.
    let worker = || {
        let own = leftovers::processes().into_iter();
        own.filter(|process| process.parent == daemon.launcher_pid() && process.uid == 0).map(|one| one.id).next()
    };
    let options = ["--policy", "straight", "--workspace", workspace.to_str().unwrap()];
    let script = "echo x >begun; until test -e end; do sleep 0.05; done";
    std::thread::scope(|scope| {
        let running = scope.spawn(|| daemon.exec(&options, &["/bin/sh", "-c", script], b""));
        eventually("the call writes", PATIENCE, || workspace.join("begun").exists());
        signal_process(worker().expect("a worker"), Signal::SIGKILL);
        eventually("the worker's end", PATIENCE, || worker().is_none());
        fs::write(workspace.join("end"), "").unwrap();
        let output = running.join().unwrap();
        assert_eq!(output.status.code(), Some(125), "{}\n{}", shown(&output), daemon.log());
        assert!(shown(&output).contains("WORKSPACE_UNAVAILABLE"), "{}", shown(&output));
    });
    daemon.stop();
}
