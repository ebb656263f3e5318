//! Extensions: real programs in their sandboxes, that watch over real jobs.

use std::fs;

use agentd_tests::daemon::{Daemon, PATIENCE, eventually};
use agentd_tests::model_server::{ModelServer, Script, Turn};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

/// Says something at each point, tries to write and to reach the network, and refuses answers without a `checked`.
const WATCHER: &str = r#"
def attempt(what):
    try:
        what()
        return "allowed"
    except OSError:
        return "refused"

import socket
tried = {
    "write": attempt(lambda: open("/workspace/by_extension", "w")),
    "connect": attempt(lambda: socket.create_connection(("192.0.2.1", 80), 1)),
    "read": open("/workspace/words").read(),
}
operation = request["operation"]
if operation == "before_turn":
    reply({"feedback": "turn %d: %s" % (arguments["turn"], json.dumps(tried, sort_keys=True))} if arguments["turn"] == 1 else {})
elif operation == "after_tool_batch":
    (call,) = arguments["calls"]
    reply({"feedback": "seen " + call["tool"] + " of " + call["arguments"]["file"], "disable_tools": ["note"]})
elif operation == "before_final_answer":
    answer = json.loads(arguments["answer"])
    if "checked" not in answer:
        reply({"continue_loop": True, "feedback": "say whether it was checked"})
    else:
        reply({"replacement_content": dict(answer, signed="watcher")})
else:
    sys.exit(1)
"#;

fn site_for(server: &ModelServer, extensions: &str) -> Site {
    let site = Site::new();
    site.python_tool(
        "note",
        "[execution]\nmutates_workspace = true",
        "open('/workspace/' + arguments['file'], 'w').write(arguments['text'])\nreply({'written': arguments['file']})",
    );
    // A key of the agent's own stands before its tables.
    site.agent("worker", &server.base_url(), &["note"], "");
    let file = site.path("config/agents/worker.toml");
    let text = fs::read_to_string(&file).unwrap();
    site.write(
        "config/agents/worker.toml",
        text.replace("tools = ", &format!("extensions = {extensions}\ntools = ")).as_bytes(),
    );
    site
}

const POINTS: &str = "operations = [\"before_turn\", \"after_tool_batch\", \"before_final_answer\"]";

fn run(daemon: &Daemon<'_>, site: &Site) -> (String, Value) {
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("words"), "one two").unwrap();
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    let result = daemon.result(&id);
    (id, result)
}

#[test]
fn an_extension_speaks_where_it_may_and_can_do_nothing_else() {
    needs!(requirements());
    let tried = r#"turn 1: {"connect": "refused", "read": "one two", "write": "refused"}"#;
    let server = ModelServer::start(Script::of([
        Turn::call("note", json!({"file": "a", "text": "x"})).expecting(tried),
        Turn::call("note", json!({"file": "b", "text": "x"})).expecting("seen note of a"),
        Turn::text(json!({"done": true}).to_string()).expecting("switched off"),
        Turn::text(json!({"done": true, "checked": 1}).to_string()).expecting("say whether it was checked"),
    ]))
    .unwrap();
    let site = site_for(&server, "[\"watcher\"]");
    site.python_extension("watcher", &format!("{POINTS}\nrequired = true"), "", WATCHER);
    let daemon = Daemon::start(&site);
    let (id, result) = run(&daemon, &site);
    assert_eq!(result["status"], "success", "{result}\n{:?}\n{}", server.refusals(), daemon.log());
    assert_eq!(result["data"], json!({"done": true, "checked": 1, "signed": "watcher"}));
    assert_eq!(agentd_tests::daemon::listing(&site.path("work/w")), ["a", "words"]);
    let bundle = site.path("bundle.jsonl");
    let receipts = daemon.get(&format!("/v1/jobs/{id}/receipts")).json();
    let lines: Vec<String> = receipts["receipts"].as_array().unwrap().iter().map(Value::to_string).collect();
    fs::write(&bundle, lines.join("\n")).unwrap();
    let verified = daemon.agentctl(&["verify", &bundle.display().to_string()]).output().unwrap();
    assert!(verified.status.success(), "{verified:?}");
    let listed = daemon.get("/v1/tools").json();
    assert_eq!(listed["extensions"][0]["name"], "watcher", "{listed}");
    assert_eq!(listed["extensions"][0]["required"], true, "{listed}");
    let shown = daemon.agentctl(&["tools"]).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("before_turn, after_tool_batch"), "{shown:?}");
    daemon.stop();
}

#[test]
fn a_required_extension_that_fails_ends_the_job_and_another_is_passed_over() {
    needs!(requirements());
    for (keys, code) in [("", None), ("required = true", Some("EXTENSION_FAILED"))] {
        let server = ModelServer::start(Script::of([Turn::text(json!({"done": true}).to_string())])).unwrap();
        let site = site_for(&server, "[\"watcher\"]");
        site.python_extension("watcher", &format!("{POINTS}\n{keys}"), "", "os.abort()");
        let daemon = Daemon::start(&site);
        let (_, result) = run(&daemon, &site);
        match code {
            None => assert_eq!(result["status"], "success", "{result}"),
            Some(code) => assert_eq!(result["error_code"], code, "{result}"),
        }
        daemon.stop();
    }
}

#[test]
fn an_observer_is_told_of_the_end_and_delays_nobody() {
    needs!(requirements());
    let server = ModelServer::start(Script::of([Turn::text(json!({"done": true}).to_string())])).unwrap();
    let site = site_for(&server, "[\"observer\"]");
    let body = "print(arguments[\"result\"][\"status\"], file=sys.stderr)\nreply({})";
    site.python_extension("observer", "operations = [\"after_run\"]", "", body);
    let daemon = Daemon::start(&site);
    let (_, result) = run(&daemon, &site);
    assert_eq!(result["status"], "success", "{result}");
    eventually("the observer has been told", PATIENCE, || daemon.log().contains("told of the job's end"));
    daemon.stop();
}
