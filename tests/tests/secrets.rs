//! A secret reaches the tools that name it, and nobody else: not the model, not the receipts, not the logs, not other tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use agentd_tests::daemon::{Daemon, PATIENCE};
use agentd_tests::model_server::{Call, ModelServer, Script, Turn};
use agentd_tests::site::{Site, chmod};
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

const SECRET: &str = "sesame/\"ôpen\"-7531";

/// Shows it everywhere a tool can.
const SHOWS: &str = r#"
import hashlib
token = os.environ["TOKEN"]
print("log:", token, file=sys.stderr)
events = os.environ.get("AGENTD_EVENTS_FD")
if events:
    os.write(int(events), (json.dumps({"message": "with " + token}) + "\n").encode())
if arguments.get("fail"):
    print(json.dumps({"protocol": 1, "call_id": request["call_id"], "ok": False,
        "error": {"code": "NO", "message": "bad token " + token, "details": {"token": token}}}))
    sys.exit(1)
reply({"digest": hashlib.sha256(token.encode()).hexdigest(), "said": "it is " + token, token: [token]})
"#;

/// What another tool finds of it.
const SEARCHES: &str = r#"
found = [name for name, value in os.environ.items() if "sesame" in value]
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        environment = open(f"/proc/{process}/environ", "rb").read()
    except OSError:
        continue
    if b"sesame" in environment:
        found.append(process)
for place in ["/etc/agentd", "/run/credentials", "/var/lib/agentd"]:
    if os.path.exists(place):
        found.append(place)
reply({"found": found})
"#;

fn site(server: &ModelServer) -> Site {
    let site = Site::new();
    fs::create_dir(site.path("config/secrets")).unwrap();
    site.write("config/secrets/TOKEN", format!("{SECRET}\n").as_bytes());
    chmod(&site.path("config/secrets/TOKEN"), 0o600);
    // A breaker that never opens: a call without its secret fails until the reload is done.
    let manifest = "[sandbox]\nsecrets = [\"TOKEN\"]\n[breaker]\nmin_calls = 1000\nwindow = 1000\n";
    site.python_tool("shows", manifest, SHOWS);
    site.python_tool("searches", "", SEARCHES);
    site.agent("worker", &server.base_url(), &["shows", "searches"], "");
    site
}

/// Every regular file below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn a_secret_is_for_its_tool_alone() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let script = Script::of([
        Turn::calls(vec![Call::new("shows", json!({})), Call::new("searches", json!({}))]),
        Turn::calls(vec![Call::new("shows", json!({"fail": true}))]),
        Turn::text(json!({"done": true}).to_string()),
    ]);
    let server = ModelServer::start(script).unwrap();
    let site = site(&server);
    let daemon = Daemon::start(&site);
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}}));
    let live = daemon.events(&id, None, |events| events.last().is_some_and(|event| event.name == "job.ended"));
    assert_eq!(daemon.result(&id)["status"], "success", "{}", daemon.log());
    assert!(live.iter().any(|event| event.name == "call.progress"), "progress was watched");

    let requests: Vec<Value> = server.requests().into_iter().map(|request| request.body).collect();
    let told: Vec<Value> = requests.last().unwrap()["messages"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|message| message["role"] == "tool")
        .map(|message| serde_json::from_str(message["content"].as_str().unwrap()).unwrap())
        .collect();
    let digest = toolproto::digest::Digest::sha256(SECRET.as_bytes()).to_string();
    assert_eq!(format!("sha256:{}", told[0]["result"]["digest"].as_str().unwrap()), digest, "the tool was given it");
    assert_eq!(told[0]["result"]["said"], json!("it is [secret TOKEN]"));
    assert_eq!(told[1]["result"]["found"], json!([]), "another tool found something");
    assert_eq!(told[2]["error"]["message"], json!("bad token [secret TOKEN]"));

    let direct = daemon.post("/v1/calls", &json!({"version": 1, "tool": "shows", "arguments": {"fail": true}}));
    let shown = [
        direct.text(),
        daemon.get(&format!("/v1/jobs/{id}")).text(),
        daemon.get(&format!("/v1/jobs/{id}/receipts")).text(),
        daemon.get("/v1/metrics").text(),
        live.iter().map(|event| event.data.clone()).collect(),
        requests.iter().map(Value::to_string).collect(),
    ];
    daemon.stop();
    assert!(shown.iter().all(|text| !text.contains("sesame")), "{shown:#?}");
    for file in files(&site.path("state")).into_iter().chain([site.path("agentd.log")]) {
        let bytes = fs::read(&file).unwrap();
        assert!(!bytes.windows(6).any(|part| part == b"sesame"), "it stands in {}", file.display());
    }
}

#[test]
fn a_secret_that_others_can_read_is_not_given_and_a_reload_takes_the_new_value() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let server = ModelServer::start(Script::of([])).unwrap();
    let site = site(&server);
    let file = site.path("config/secrets/TOKEN");
    chmod(&file, 0o644);
    let daemon = Daemon::start(&site);
    let call = || daemon.post("/v1/calls", &json!({"version": 1, "tool": "shows", "arguments": {}})).json();
    let refused = call();
    assert_eq!(refused["error"]["code"], json!("TOOL_UNAVAILABLE"), "{refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("TOKEN") && message.contains("read by others") && message.contains("chmod"), "{message}");

    for _ in 0..6 {
        assert_eq!(call()["error"]["code"], json!("TOOL_UNAVAILABLE"));
    }
    // What one tool lacks says nothing about the others on its runtime.
    let other = daemon.post("/v1/calls", &json!({"version": 1, "tool": "searches", "arguments": {}})).json();
    assert_eq!(other["ok"], json!(true), "{other}");

    for value in ["another-value", "yet-another-value"] {
        fs::write(&file, value).unwrap();
        chmod(&file, 0o600);
        let launcher = rustix::process::Pid::from_raw(daemon.launcher_pid().cast_signed()).unwrap();
        rustix::process::kill_process(launcher, rustix::process::Signal::HUP).unwrap();
        let digest = toolproto::digest::Digest::sha256(value.as_bytes()).to_string();
        let until = Instant::now() + PATIENCE;
        let result = loop {
            let reply = call();
            let given = format!("sha256:{}", reply["result"]["digest"].as_str().unwrap_or_default());
            if given == digest {
                break reply;
            }
            assert!(Instant::now() < until, "{reply}");
        };
        assert!(!result.to_string().contains("another-value"), "{result}");
    }
    daemon.stop();
}
