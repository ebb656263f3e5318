//! Whole jobs: a model that asks for tools, real tools, receipts, events, and every way in which a job can end.

use std::fs;
use std::time::{Duration, Instant};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, shown};
use agentd_tests::leftovers;
use agentd_tests::model_server::{Call, Dialect, Fault, ModelServer, Order, Pace, Quirk, Script, Trouble, Turn};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

/// A site with a tool that reads and one that writes, and an agent that has both.
fn site_for(server: &ModelServer, tables: &str) -> Site {
    let site = Site::new();
    site.python_tool(
        "count",
        "[execution]\nread_only = true",
        "reply({'count': len(open('/workspace/' + arguments['file']).read().split())})",
    );
    site.python_tool(
        "note",
        "[execution]\nmutates_workspace = true",
        "open('/workspace/' + arguments['file'], 'w').write(arguments['text'])\nreply({'written': arguments['file']})",
    );
    site.agent("worker", &server.base_url(), &["count", "note"], tables);
    site
}

fn answer(value: &Value) -> Turn {
    Turn::text(value.to_string())
}

fn three_turns() -> Script {
    Script::of([
        Turn::calls(vec![Call::new("count", json!({"file": "words"})), Call::new("count", json!({"file": "words"}))]),
        Turn::call("note", json!({"file": "report", "text": "three words"})).expecting("\"count\":3"),
        answer(&json!({"words": 3, "file": "report"})).expecting("\"written\":\"report\""),
    ])
}

#[test]
fn a_job_runs_from_goal_to_result() {
    needs!(requirements());
    let server = ModelServer::start(three_turns()).unwrap();
    let site = site_for(&server, "");
    site.schema(
        "result",
        &json!({"type": "object", "required": ["words", "file"], "properties": {"words": {"type": "integer"}}}),
    );
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("words"), "one two three").unwrap();
    let job = json!({"version": 1, "agent": "worker", "goal": {"what": "count"}, "workspace": workspace, "labels": {"team": "sales"}});
    let id = daemon.submit(&job);
    assert!(id.len() == 26 && id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()), "{id}");
    let result = daemon.result(&id);
    assert_eq!(result["status"], "success", "{result}\n{}", daemon.log());
    assert_eq!(result["data"], json!({"words": 3, "file": "report"}));
    assert_eq!(result["termination_reason"], "completed");
    assert_eq!((&result["usage"]["turns"], &result["usage"]["tool_calls"]), (&json!(3), &json!(3)), "{result}");
    assert_eq!(result["usage"]["input_tokens"], 300);
    assert_eq!(fs::read_to_string(workspace.join("report")).unwrap(), "three words");
    assert_eq!(server.refusals(), []);
    assert_eq!(server.turns_left(), 0);

    let receipts = daemon.get(&format!("/v1/jobs/{id}/receipts")).json();
    let receipts: Vec<Value> = receipts["receipts"].as_array().unwrap().iter().map(predicate).collect();
    assert_eq!(result["receipts"]["count"], 3, "{result}");
    let calls: Vec<&Value> = receipts.iter().filter(|receipt| receipt["tool"].is_object()).collect();
    assert_eq!(calls.len(), 3, "{receipts:?}");
    assert!(calls.iter().all(|receipt| receipt["job_id"] == *id));
    for pair in calls.windows(2) {
        assert_eq!(pair[1]["sequence"].as_u64(), pair[0]["sequence"].as_u64().map(|number| number + 1));
        assert!(pair[1]["previous"].is_string(), "not chained: {}", pair[1]);
    }
    let noted = calls.iter().find(|receipt| receipt["tool"]["name"] == "note").unwrap();
    assert_eq!(noted["workspace"]["created"][0]["path"], "report");

    let shown = daemon.get(&format!("/v1/jobs/{id}")).json();
    assert_eq!(
        (&shown["state"], &shown["labels"]["team"], &shown["agent"]),
        (&json!("done"), &json!("sales"), &json!("worker"))
    );
    let listed = daemon.get("/v1/jobs?label=team%3Dsales&state=done").json();
    assert_eq!(listed["jobs"].as_array().map(Vec::len), Some(1), "{listed}");
    assert_eq!(daemon.get("/v1/jobs?agent=other").json()["jobs"].as_array().map(Vec::len), Some(0));
    daemon.stop();
}

/// A receipt's predicate.
fn predicate(envelope: &Value) -> Value {
    let payload = envelope["payload"].as_str().unwrap_or_else(|| panic!("{envelope}"));
    let bytes = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
    let statement: Value = serde_json::from_slice(&bytes).unwrap();
    statement["predicate"].clone()
}

#[test]
fn what_the_model_server_does_wrong_does_not_end_a_job() {
    needs!(requirements());
    let script = Script::of([
        Turn::call("note", json!({"file": "a", "text": "x"}))
            .after(Fault::retry_after(Trouble::RateLimit, "1"))
            .after(Fault::status(Trouble::Overloaded))
            .after(Fault::HangUp),
        Turn::call("note", json!({"file": "b", "text": "x"}))
            .after(Fault::Cut { after_events: 2, bytes: 5 })
            .with(Quirk::NoIds)
            .with(Quirk::NoIndex),
        Turn::calls(vec![Call::raw("note", "{\"file\": \"c\", \"te")]),
        Turn::calls(vec![Call::new("no_such_tool", json!({})), Call::new("note", json!({"file": "d", "text": "x"}))])
            .with(Quirk::SameIds),
        answer(&json!({"done": true})).with(Quirk::NoUsage).with(Quirk::NoEnd),
    ]);
    let server = ModelServer::start(script).unwrap();
    let site = site_for(&server, "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    let result =
        daemon.result(&daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace})));
    assert_eq!(result["status"], "success", "{result}\n{:?}\n{}", server.refusals(), daemon.log());
    assert_eq!(
        agentd_tests::daemon::listing(&workspace),
        ["a", "b", "d"],
        "a call with broken arguments was run, or a good one was not"
    );
    assert_eq!(server.refusals(), []);
    let gaps: Vec<Duration> = server.requests().windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    assert!(gaps[0] >= Duration::from_secs(1), "Retry-After is a floor: {gaps:?}");
    daemon.stop();
}

#[test]
fn local_servers_with_odd_rules_are_served() {
    needs!(requirements());
    for dialect in [
        Dialect { id_length: Some(9), ..Dialect::default() },
        Dialect { string_results: true, json_arguments: true, ..Dialect::default() },
    ] {
        let server = ModelServer::start(Script { dialect, ..three_turns() }).unwrap();
        let site = site_for(&server, "");
        let daemon = Daemon::start(&site);
        let workspace = site.workspace("w", 0, 0);
        fs::write(workspace.join("words"), "one two three").unwrap();
        let result = daemon
            .result(&daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace})));
        assert_eq!(result["status"], "success", "{result}\n{:?}", server.refusals());
        assert_eq!(server.refusals(), []);
        daemon.stop();
    }
}

#[test]
fn a_job_that_cannot_succeed_ends_with_its_code() {
    needs!(requirements());
    let cases: Vec<(&str, Script, &str, &str, &str)> = vec![
        (
            "wrong key",
            Script { api_key: Some("another".to_owned()), ..three_turns() },
            "",
            "MODEL_UNAVAILABLE",
            "error",
        ),
        (
            "quota",
            Script::of([Turn::text("").after(Fault::status(Trouble::Quota))]),
            "",
            "MODEL_QUOTA_EXHAUSTED",
            "error",
        ),
        (
            "answer that is no JSON",
            Script::of((0..5).map(|_| Turn::text("I have done it."))),
            "",
            "RESULT_INVALID",
            "error",
        ),
        (
            "turns",
            Script::of((0..9).map(|number| Turn::call("note", json!({"file": "x", "text": number.to_string()})))),
            "[budget]\nmax_turns = 3\ngrace_call = false\n",
            "TURN_BUDGET_EXHAUSTED",
            "budget",
        ),
        (
            "tool calls",
            Script::of((0..9).map(|number| Turn::call("note", json!({"file": "x", "text": number.to_string()})))),
            "[budget]\nmax_tool_calls = 2\ngrace_call = false\n",
            "TOOL_CALL_BUDGET_EXHAUSTED",
            "budget",
        ),
        (
            "time",
            Script::of([Turn::text("").after(Fault::Silence { ms: 600_000 })]),
            "[budget]\nwall_seconds = 2\ngrace_call = false\n",
            "DEADLINE_EXCEEDED",
            "deadline",
        ),
    ];
    for (name, script, tables, code, reason) in cases {
        let server = ModelServer::start(script).unwrap();
        let site = site_for(&server, tables);
        let daemon = Daemon::start(&site);
        let begun = Instant::now();
        let result = daemon.run("worker", &json!({}));
        assert_eq!(
            (&result["status"], result["error_code"].as_str()),
            (&json!("failed"), Some(code)),
            "{name}: {result}"
        );
        assert_eq!(result["termination_reason"], reason, "{name}: {result}");
        for field in ["message", "recovery_suggestion"] {
            assert!(result[field].as_str().is_some_and(|text| !text.is_empty()), "{name}: {result}");
        }
        assert!(begun.elapsed() < Duration::from_secs(90), "{name} took {:?}", begun.elapsed());
        assert!(server.refusals().iter().all(|refusal| refusal.status == 401), "{name}: {:?}", server.refusals());
        daemon.stop();
    }
}

#[test]
fn a_model_that_nobody_serves_is_unavailable() {
    needs!(requirements());
    let site = Site::new();
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    site.agent("worker", &format!("http://127.0.0.1:{port}/v1"), &[], "[budget]\nwall_seconds = 60\n");
    let daemon = Daemon::start(&site);
    let result = daemon.run("worker", &json!({}));
    assert_eq!(result["error_code"], "MODEL_UNAVAILABLE", "{result}");
    daemon.stop();
}

#[test]
fn a_cancelled_job_stops_at_once_and_stays_cancelled() {
    needs!(requirements());
    let script =
        Script { order: Order::Transcript, ..Script::of([Turn::call("sleeper", json!({})), answer(&json!({}))]) };
    let server = ModelServer::start(script).unwrap();
    let site = Site::new();
    site.python_tool("sleeper", "[timeout]\nafter = \"300s\"", "time.sleep(300)\nreply({})");
    site.agent("worker", &server.base_url(), &["sleeper"], "");
    let daemon = Daemon::start(&site);
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}}));
    let runs = || {
        leftovers::site_processes(&site)
            .iter()
            .any(|process| site.owns_uid(process.uid) && process.name.starts_with("python"))
    };
    eventually("the tool runs", PATIENCE, runs);
    let waiting = daemon.get(&format!("/v1/jobs/{id}/result?wait=1"));
    assert_eq!(waiting.status, 202, "{}", waiting.text());
    let response = daemon.post(&format!("/v1/jobs/{id}/cancel"), &json!({}));
    assert!((200..300).contains(&response.status), "{}", response.text());
    let result = daemon.result(&id);
    assert_eq!(
        (&result["error_code"], &result["termination_reason"]),
        (&json!("CANCELLED"), &json!("cancelled")),
        "{result}"
    );
    eventually("the tool is gone", PATIENCE, || !runs());
    let again = daemon.post(&format!("/v1/jobs/{id}/cancel"), &json!({}));
    assert!(again.status < 500, "{}", again.text());
    daemon.stop();
    let daemon = Daemon::start(&site);
    assert_eq!(daemon.result(&id)["error_code"], "CANCELLED", "it came back after a restart");
    daemon.stop();
}

#[test]
fn events_can_be_followed_and_taken_up_again() {
    needs!(requirements());
    let server = ModelServer::start(three_turns()).unwrap();
    let site = site_for(&server, "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("words"), "one two three").unwrap();
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    let live = daemon.events(&id, None, |events| events.last().is_some_and(|event| event.name == "job.ended"));
    daemon.result(&id);
    // One stored event may show as several, of which the last carries the number.
    let passing = ["model.delta", "call.progress"];
    let kept: Vec<_> = live.iter().filter(|event| !passing.contains(&event.name.as_str())).cloned().collect();
    let names: Vec<&str> = kept.iter().map(|event| event.name.as_str()).collect();
    for name in ["job.phase", "call.started", "call.ended", "job.ended"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert_eq!(names.iter().filter(|name| **name == "call.ended").count(), 3);
    let numbers: Vec<u64> = kept.iter().filter_map(|event| event.id.as_ref()?.parse().ok()).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
    for event in &live {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        assert_eq!((&data["version"], &data["job_id"]), (&json!(1), &json!(id)), "{data}");
        assert!(data["time"].is_string(), "{data}");
    }
    // The whole again, and the rest from any place.
    let ended =
        |events: &[agentd_tests::http_client::SseEvent]| events.last().is_some_and(|event| event.name == "job.ended");
    assert_eq!(daemon.events(&id, None, ended), kept);
    let numbered: Vec<usize> = (0..kept.len() - 1).filter(|index| kept[*index].id.is_some()).collect();
    assert!(numbered.len() >= 3, "{kept:?}");
    for cut in numbered {
        assert_eq!(daemon.events(&id, kept[cut].id.as_deref(), ended), kept[cut + 1..], "from {cut}");
    }
    daemon.stop();
    // What was acknowledged is on disk.
    let daemon = Daemon::start(&site);
    assert_eq!(daemon.events(&id, None, ended), kept);
    daemon.stop();
}

#[test]
fn the_same_key_is_the_same_job() {
    needs!(requirements());
    let server = ModelServer::start(Script::of([answer(&json!({})), answer(&json!({}))])).unwrap();
    let site = site_for(&server, "");
    let daemon = Daemon::start(&site);
    let job = |key: &str, goal: Value| json!({"version": 1, "agent": "worker", "goal": goal, "idempotency_key": key});
    let first = daemon.submit(&job("k1", json!({"a": 1})));
    assert_eq!(daemon.submit(&job("k1", json!({"a": 1}))), first);
    let other = daemon.post("/v1/jobs", &job("k1", json!({"a": 2})));
    assert_eq!((other.status, &other.json()["code"]), (409, &json!("IDEMPOTENCY_CONFLICT")));
    assert_ne!(daemon.submit(&job("k2", json!({"a": 1}))), first);
    assert_eq!(daemon.get("/v1/jobs").json()["jobs"].as_array().map(Vec::len), Some(2));
    daemon.stop();
}

#[test]
fn agentctl_submits_follows_and_shows() {
    needs!(requirements());
    let server = ModelServer::start(three_turns()).unwrap();
    let site = site_for(&server, "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("words"), "one two three").unwrap();
    let job = json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace});
    let file = site.write("job.json", job.to_string().as_bytes());
    let output = daemon.agentctl(&["submit", file.to_str().unwrap(), "--wait", "--follow"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    let result: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", shown(&output)));
    assert_eq!(result["data"]["words"], 3);
    let id = result["job_id"].as_str().unwrap();
    for arguments in [
        &["jobs"][..],
        &["show", id],
        &["events", id],
        &["result", id],
        &["receipts", id],
        &["receipts", id, "--show"],
        &["tools"],
        &["tools", "show", "count"],
    ] {
        let output = daemon.agentctl(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", shown(&output));
        assert!(!output.stdout.is_empty(), "{arguments:?} says nothing");
    }
    let output = daemon.agentctl(&["--json", "receipts", id, "--show=1"]).output().unwrap();
    let statement: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", shown(&output)));
    assert_eq!((&statement["predicate"]["sequence"], &statement["predicate"]["job_id"]), (&json!(1), &json!(id)));
    let output = daemon.agentctl(&["receipts", id, "--show=99"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", shown(&output));
    let arguments = ["call", "count", "--args", "{\"file\":\"words\"}", "--workspace", workspace.to_str().unwrap()];
    let output = daemon.agentctl(&arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"count\":"), "{}", shown(&output));
    let output = daemon.agentctl(&["call", "count", "--args", "{\"file\":\"missing\"}"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    daemon.stop();
}

/// The receipts of a job, verified offline.
fn verified(daemon: &Daemon<'_>, id: &str) {
    let (bundle, key) = (daemon.site().path("bundle.jsonl"), daemon.site().path("state/receipt.pub"));
    let output = daemon.agentctl(&["receipts", id, "--bundle", bundle.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let arguments = ["--json", "verify", bundle.to_str().unwrap(), "--key", key.to_str().unwrap(), "--show"];
    let output = daemon.agentctl(&arguments).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let statements = report["statements"].as_array().unwrap();
    assert_eq!(json!(statements.len()), json!(report["receipts"].as_u64().unwrap() + 1), "the seal, too: {report}");
    assert!(statements.iter().all(|statement| statement["predicate"]["job_id"] == json!(id)), "{report}");
}

#[test]
fn a_job_whose_model_went_away_goes_on_when_it_is_back_also_after_a_restart() {
    needs!(requirements());
    let script = || Script { order: Order::Transcript, ..three_turns() };
    let server = ModelServer::start(Script { turns: script().turns[..1].to_vec(), ..script() }).unwrap();
    let address = server.address();
    let site = site_for(&server, "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("words"), "one two three").unwrap();
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    let result = daemon.result(&id);
    assert_eq!(result["error_code"], "MODEL_UNAVAILABLE", "{result}");
    drop(server);
    daemon.stop();

    let server = ModelServer::listen(script(), address, None).unwrap();
    let daemon = Daemon::start(&site);
    assert_eq!(daemon.result(&id), result, "it went on by itself");
    let output = daemon.agentctl(&["resume", &id, "--wait"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}\n{:?}\n{}", shown(&output), server.refusals(), daemon.log());
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["data"]["words"], &told["receipts"]["count"]), (&json!(3), &json!(3)), "{told}");
    assert_eq!(daemon.result(&id), told);
    assert_eq!(server.refusals(), []);
    verified(&daemon, &id);
    let again = daemon.post(&format!("/v1/jobs/{id}/resume"), &json!({}));
    assert_eq!((again.status, &again.json()["code"]), (400, &json!("INPUT_INVALID")), "{}", again.text());
    daemon.stop();
}

#[test]
fn a_follow_up_goal_has_the_conversation_and_the_workspace() {
    needs!(requirements());
    let server = ModelServer::start(Script::of([
        Turn::call("note", json!({"file": "kept", "text": "one two"})),
        answer(&json!({"stage": 1})),
        Turn::call("count", json!({"file": "kept"})).expecting("\"stage\":1").expecting("\"written\":\"kept\""),
        answer(&json!({"stage": 2})).expecting("\"count\":2"),
    ]))
    .unwrap();
    let site = site_for(&server, "");
    let daemon = Daemon::start(&site);
    // Without a workspace of its own: it is the first job's private one.
    let first = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {"n": 1}}));
    assert_eq!(daemon.result(&first)["data"], json!({"stage": 1}), "{}", daemon.log());
    let second = json!({"version": 1, "agent": "worker", "goal": {"n": 2}, "continues": first});
    let second = daemon.submit(&second);
    let result = daemon.result(&second);
    assert_eq!(result["data"], json!({"stage": 2}), "{result}\n{:?}\n{}", server.refusals(), daemon.log());
    verified(&daemon, &second);
    let missing = json!({"version": 1, "agent": "worker", "goal": {}, "continues": "00000000000000000000000000"});
    assert_eq!(daemon.post("/v1/jobs", &missing).status, 404);
    daemon.stop();
}

/// A small file system for a daemon's state, unmounted when this goes.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    fn mount(site: &Site) -> Self {
        let path = site.path("state");
        fs::create_dir(&path).unwrap();
        let options = Some(c"size=6m,mode=0711");
        rustix::mount::mount("none", &path, "tmpfs", rustix::mount::MountFlags::empty(), options).unwrap();
        Self(path)
    }

    /// Takes all of the space that is left.
    fn fill(&self) -> std::path::PathBuf {
        let file = self.0.join("filler");
        let error = std::io::copy(&mut std::io::repeat(0), &mut fs::File::create(&file).unwrap()).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        file
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn a_job_on_a_full_disk_stops_with_ledger_unavailable_and_goes_on_when_there_is_room() {
    needs!(requirements());
    for restart in [false, true] {
        let pause = Turn { pace: Pace { first_ms: 1500, ..Pace::default() }, ..three_turns().turns[0].clone() };
        let turns = [pause].into_iter().chain(three_turns().turns[1..].to_vec());
        let server = ModelServer::start(Script { order: Order::Transcript, ..Script::of(turns) }).unwrap();
        let site = site_for(&server, "");
        let disk = SmallDisk::mount(&site);
        let mut daemon = Daemon::start(&site);
        daemon.leave_to_the_test();
        let workspace = site.workspace("w", 0, 0);
        fs::write(workspace.join("words"), "one two three").unwrap();
        let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
        eventually("the model is asked", PATIENCE, || !server.requests().is_empty());
        let filler = disk.fill();
        let result = daemon.result(&id);
        assert_eq!(result["error_code"], "LEDGER_UNAVAILABLE", "{result}\n{}", daemon.log());
        let health = daemon.get("/v1/health");
        assert_eq!(health.status, 200, "the daemon is gone: {}", health.text());
        let refused = daemon.post("/v1/jobs", &json!({"version": 1, "agent": "worker", "goal": {}}));
        assert_eq!(refused.status, 503, "{}", refused.text());
        fs::remove_file(filler).unwrap();
        if restart {
            daemon.signal_launcher(nix::sys::signal::Signal::SIGTERM);
            daemon.wait_for_end(PATIENCE);
            drop(daemon);
            daemon = Daemon::start(&site);
            daemon.leave_to_the_test();
        } else {
            let output = daemon.agentctl(&["resume", &id]).output().unwrap();
            assert!(output.status.success(), "{}\n{}", shown(&output), daemon.log());
        }
        let result = daemon.result(&id);
        assert_eq!(result["data"], json!({"words": 3, "file": "report"}), "{restart}: {result}\n{}", daemon.log());
        assert_eq!(fs::read_to_string(workspace.join("report")).unwrap(), "three words");
        verified(&daemon, &id);
        daemon.signal_launcher(nix::sys::signal::Signal::SIGTERM);
        daemon.wait_for_end(PATIENCE);
        drop(disk);
        leftovers::assert_none(&site);
    }
}
