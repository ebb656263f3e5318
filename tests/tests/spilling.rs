//! Results that are too large for a conversation: a preview for the model, the whole for the tool that it is passed on to.

use std::fs;

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, shown};
use agentd_tests::model_server::{ModelServer, Script, Turn};
use agentd_tests::site::{Site, chmod};
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};
use toolproto::digest::Digest;

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

const ROWS: u32 = 20_000;

/// What `dump` answers, as agentd writes it.
fn whole() -> String {
    json!({"rows": (0..ROWS).collect::<Vec<_>>()}).to_string()
}

fn reference() -> Value {
    json!({"$spilled": Digest::sha256(whole().as_bytes())})
}

/// A tool whose results are large, and one that takes nothing but a table.
fn site_for(server: &ModelServer) -> Site {
    let site = Site::new();
    site.python_tool(
        "dump",
        "[execution]\nread_only = true\n[limits]\nspill = \"16KiB\"",
        &format!("reply({{'rows': list(range({ROWS}))}})"),
    );
    site.python_tool(
        "total",
        "[execution]\nread_only = true",
        "rows = arguments['table']['rows']\nreply({'rows': len(rows), 'sum': sum(rows)})",
    );
    let table = json!({"type": "object", "required": ["rows"], "properties": {"rows": {"type": "array"}}});
    let schema = json!({"type": "object", "required": ["table"], "properties": {"table": table}});
    site.write("config/tools/total/input.json", schema.to_string().as_bytes());
    site.agent("adder", &server.base_url(), &["dump", "total"], "[approval]\ntools = [\"total\"]\n");
    site.agent("other", &server.base_url(), &["dump", "total"], "");
    site
}

#[test]
fn a_large_result_outlives_the_daemon_and_reaches_the_next_tool_of_its_job_alone() {
    needs!(requirements());
    let sum = format!("\"sum\":{}", u64::from(ROWS) * u64::from(ROWS - 1) / 2);
    let mut asked_for = Turn::call("total", json!({"table": reference()})).expecting("[0,1,2,3,4,5,6,7");
    asked_for.expect.lacks.push("19999".to_owned());
    let server = ModelServer::start(Script::of([
        Turn::call("dump", json!({})),
        asked_for,
        Turn::text(json!({"done": true}).to_string()).expecting(sum),
        Turn::call("total", json!({"table": reference()})),
        Turn::text(json!({"done": true}).to_string()).expecting("/table: no result of this job is kept"),
    ]))
    .unwrap();
    let site = site_for(&server);
    let daemon = Daemon::start(&site);
    let job = daemon.submit(&json!({"version": 1, "agent": "adder", "goal": {}}));
    let waiting = |daemon: &Daemon<'_>| daemon.get(&format!("/v1/jobs/{job}")).json()["waiting_for"].clone();
    eventually("a call that waits", PATIENCE, || waiting(&daemon)["call_id"].is_string());
    assert_eq!(waiting(&daemon)["arguments"], json!({"table": reference()}));
    daemon.stop();

    let daemon = Daemon::start(&site);
    eventually("the job goes on", PATIENCE, || waiting(&daemon)["call_id"].is_string());
    let approval = json!({"call_id": waiting(&daemon)["call_id"], "decision": "approve"});
    let answer = daemon.post(&format!("/v1/jobs/{job}/approvals"), &approval);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let result = daemon.result(&job);
    assert_eq!(result["status"], "success", "{result}\n{:?}\n{}", server.refusals(), daemon.log());

    let key = reference()["$spilled"].as_str().unwrap().to_owned();
    let kept = daemon.get(&format!("/v1/jobs/{job}/spilled/{key}"));
    assert_eq!((kept.status, kept.text()), (200, whole()));
    let printed = daemon.agentctl(&["spilled", &job, &key]).output().unwrap();
    assert!(printed.status.success(), "{}", shown(&printed));
    assert_eq!(String::from_utf8_lossy(&printed.stdout).trim_end(), whole());
    for missing in [format!("{job}/spilled/sha256:{}", "0".repeat(64)), format!("{job}/spilled/x")] {
        assert_eq!(daemon.get(&format!("/v1/jobs/{missing}")).status, 404, "{missing}");
    }

    let other = daemon.run("other", &json!({}));
    assert_eq!(other["status"], "success", "{other}\n{:?}\n{}", server.refusals(), daemon.log());

    // A direct caller is given the same, and its receipt says so.
    let reply = daemon.call("dump", &json!({}));
    assert_eq!((&reply["ok"], &reply["result"]["$spilled"]), (&json!(true), &json!(key)));
    assert_eq!(reply["result"]["bytes"], whole().len());
    let own = reply["job_id"].as_str().unwrap();
    assert_eq!(daemon.get(&format!("/v1/jobs/{own}/spilled/{key}")).text(), whole());
    let bundle = site.path("receipts");
    let lines: Vec<String> = [own, &job]
        .map(|job| daemon.get(&format!("/v1/jobs/{job}/receipts")).json())
        .iter()
        .map(|listed| listed["receipts"].as_array().unwrap().iter().map(|one| format!("{one}\n")).collect())
        .collect();
    for bundled in lines {
        fs::write(&bundle, bundled).unwrap();
        let verified = daemon.agentctl(&["verify", &bundle.display().to_string()]).output().unwrap();
        assert!(verified.status.success(), "{}", shown(&verified));
    }
    daemon.stop();
}

#[test]
fn what_is_kept_holds_no_secret() {
    needs!(requirements());
    let site = Site::new();
    fs::create_dir(site.path("config/secrets")).unwrap();
    chmod(&site.write("config/secrets/TOKEN", b"sesame-7531\n"), 0o600);
    site.python_tool(
        "shows",
        "[limits]\nspill = \"8KiB\"\n[sandbox]\nsecrets = [\"TOKEN\"]\n",
        "reply({'said': ['x' * 9000, os.environ['TOKEN']]})",
    );
    let daemon = Daemon::start(&site);
    let reply = daemon.call("shows", &json!({}));
    let key = reply["result"]["$spilled"].as_str().unwrap_or_else(|| panic!("{reply}"));
    let kept = daemon.get(&format!("/v1/jobs/{}/spilled/{key}", reply["job_id"].as_str().unwrap()));
    assert_eq!(kept.json()["said"][1], "[secret TOKEN]");
    assert!(!kept.text().contains("sesame"));
    daemon.stop();
}

#[test]
fn a_verification_must_not_spill() {
    needs!(requirements());
    let server = ModelServer::start(Script::default()).unwrap();
    let site = site_for(&server);
    site.agent("strict", &server.base_url(), &["dump"], "[completion]\nrequire_verification = [\"dump\"]\n");
    let checked = std::process::Command::new(agentd_tests::programs::find("agentd"))
        .args(["check", "--config-dir"])
        .arg(site.path("config"))
        .output()
        .unwrap();
    assert!(!checked.status.success(), "{}", shown(&checked));
    let said = format!("{}{}", String::from_utf8_lossy(&checked.stdout), String::from_utf8_lossy(&checked.stderr));
    assert!(said.contains("strict.toml") && said.contains("`dump`, which spills them"), "{said}");
}
