//! What tools run on: tried in a sandbox before its first call, and anew when its program is another one.

use std::fs;

use agentd_tests::daemon::{Daemon, shown};
use agentd_tests::site::{Site, ToolText, chmod};
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

const TOOL: &str =
    "import json, sys\nrequest = json.load(sys.stdin)\nprint(json.dumps({'got': request['arguments']}))\n";

/// Puts another program in the place of the runtime's.
fn install(site: &Site, probe: &str) {
    let new = site.write(
        "runtime/new",
        format!("#!/bin/sh\nif [ \"$1\" = --version ]; then {probe}; fi\nexec /usr/bin/python3 \"$@\"\n").as_bytes(),
    );
    chmod(&new, 0o755);
    fs::rename(&new, site.path("runtime/program")).unwrap();
}

fn site() -> Site {
    let site = Site::new();
    fs::create_dir(site.path("runtime")).unwrap();
    chmod(&site.path("runtime"), 0o755);
    let program = site.path("runtime/program");
    let tables = format!("[runtimes.shaky]\ncommand = {program:?}\nprobe = [\"--version\"]\n");
    site.configure(&tables);
    site.tool(&ToolText { name: "says", runtime: "shaky", entry: "main.py", code: TOOL.as_bytes(), manifest: "" });
    site
}

fn version(daemon: &Daemon<'_>) -> Value {
    daemon.get("/v1/tools").json()["tools"][0]["runtime_version"].clone()
}

#[test]
fn a_broken_runtime_is_told_of_and_its_replacement_found_at_once() {
    needs!(requirements());
    let site = site();
    install(&site, "echo no licence >&2; exit 3");
    let daemon = Daemon::start(&site);
    assert_eq!(version(&daemon), Value::Null, "it was tried before anybody needed it");

    let refused = daemon.call("says", &json!({"n": 1}));
    assert_eq!((&refused["ok"], &refused["error"]["code"]), (&json!(false), &json!("TOOL_UNAVAILABLE")), "{refused}");
    let message = refused["error"]["message"].as_str().unwrap();
    for words in ["runtime `shaky` does not work", "--version` ended with status 3: no licence", "[runtimes.shaky]"] {
        assert!(message.contains(words), "{message}");
    }
    assert_eq!(version(&daemon), Value::Null);
    let receipts = |reply: &Value| {
        let job = reply["job_id"].as_str().unwrap();
        daemon.get(&format!("/v1/jobs/{job}/receipts")).json()["receipts"].as_array().unwrap().len()
    };
    assert_eq!(receipts(&refused), 2, "the call's and the sealing one");

    install(&site, "echo shaky 1.2; exit 0");
    let reply = daemon.call("says", &json!({"n": 2}));
    assert_eq!(reply["result"], json!({"got": {"n": 2}}), "{reply}\n{}", daemon.log());
    assert_eq!(receipts(&reply), 2, "the probe has a receipt");
    assert_eq!(version(&daemon), "shaky 1.2");
    let listed = daemon.agentctl(&["tools"]).output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains("shaky (shaky 1.2)"), "{}", shown(&listed));

    // What worked is tried again, too, when it is another program.
    install(&site, "kill -9 $$");
    let killed = daemon.call("says", &json!({"n": 3}));
    let message = killed["error"]["message"].as_str().unwrap_or_else(|| panic!("{killed}"));
    assert!(message.contains("was ended by signal 9"), "{message}");
    assert_eq!(version(&daemon), Value::Null);
    fs::remove_file(site.path("runtime/program")).unwrap();
    let gone = daemon.call("says", &json!({"n": 4}));
    let message = gone["error"]["message"].as_str().unwrap_or_else(|| panic!("{gone}"));
    assert!(message.contains("could not be executed"), "{message}");
    daemon.stop();
}

#[test]
fn many_first_calls_at_once_have_one_probe() {
    needs!(requirements());
    let site = site();
    install(&site, "echo once; exit 0");
    let daemon = Daemon::start(&site);
    std::thread::scope(|scope| {
        for n in 0..6 {
            let daemon = &daemon;
            scope.spawn(move || {
                let reply = daemon.call("says", &json!({"n": n}));
                assert_eq!(reply["result"], json!({"got": {"n": n}}), "{reply}");
            });
        }
    });
    assert_eq!(daemon.log().matches("the runtime works").count(), 1, "{}", daemon.log());
    daemon.stop();
}
