//! A real job's receipts, and the history of the keys that signed them, verified by `agentctl verify` and by a second implementation, which must say the same: of the good
//! bundle, and of everything that can be done to it without the key.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use agentd_tests::daemon::{Daemon, shown};
use agentd_tests::model_server::{Call, ModelServer, Order, Script, Turn};
use agentd_tests::python::{self, Source};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

/// The one package that the second implementation needs, at the version it was tried with.
const PACKAGE: &str = "cryptography==50.0.2";

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")
}

#[test]
fn two_verifiers_agree_on_a_real_bundle_and_on_what_is_done_to_it() {
    needs!(requirements());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let python = match python::with_module(folder, "cryptography", PACKAGE, Source::SystemToo) {
        Ok(python) => python,
        Err(reason) => return requirement::skip(&format!("no Python with the package {PACKAGE}: {reason}")),
    };
    let write = |name: &str| Call::new("note", json!({"file": name, "text": "text"}));
    let script = Script::of([
        Turn::calls(vec![write("a"), write("b")]),
        // Refused, and named by the tool: what agentd adds to a receipt is for both verifiers, too.
        Turn::calls(vec![write("a"), write("../etc/denied")]),
        Turn::text(json!({"done": true}).to_string()),
    ]);
    let server = ModelServer::start(script).unwrap();
    let site = Site::new();
    site.python_tool(
        "note",
        "[execution]\nmutates_workspace = true",
        "open('/workspace/' + arguments['file'], 'a').write(arguments['text'])\nreply({})",
    );
    site.agent("worker", &server.base_url(), &["note"], "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    assert_eq!(daemon.result(&id)["status"], "success", "{}", daemon.log());
    let bundle = site.path("bundle.jsonl");
    let output = daemon.agentctl(&["receipts", &id, "--bundle", bundle.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let key = site.path("state/receipt.pub");
    let verifiers = Verifiers { python, key };

    let good: Vec<String> = fs::read_to_string(&bundle).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(good.len(), 5, "four receipts and their seal");
    let envelope: Value = serde_json::from_str(&good[3]).unwrap();
    let refused = data_encoding::BASE64.decode(envelope["payload"].as_str().unwrap().as_bytes()).unwrap();
    let refused: Value = serde_json::from_slice(&refused).unwrap();
    assert_eq!(refused["predicate"]["denied"][0]["witness"], "tool", "{refused}");
    assert_eq!(verifiers.faults(&daemon, &bundle), BTreeSet::new());
    for (what, lines) in tampered(&good) {
        fs::write(&bundle, lines.join("\n")).unwrap();
        let faults = verifiers.faults(&daemon, &bundle);
        assert!(!faults.is_empty(), "nobody saw: {what}");
    }
    daemon.stop();
}

/// What somebody without the key can do to a file.
fn tampered(good: &[String]) -> Vec<(&'static str, Vec<String>)> {
    let with = |change: &dyn Fn(&mut Vec<String>)| {
        let mut lines = good.to_vec();
        change(&mut lines);
        lines
    };
    let edit = |line: usize, change: &dyn Fn(&mut Value)| {
        with(&|lines| {
            let mut envelope: Value = serde_json::from_str(&lines[line]).unwrap();
            change(&mut envelope);
            lines[line] = envelope.to_string();
        })
    };
    vec![
        ("two receipts in another order", with(&|lines| lines.swap(1, 2))),
        ("the first left out", with(&|lines| drop(lines.remove(0)))),
        ("one in the middle left out", with(&|lines| drop(lines.remove(2)))),
        ("the last left out", with(&|lines| drop(lines.remove(3)))),
        ("the seal left out", with(&|lines| drop(lines.pop()))),
        ("a receipt twice", with(&|lines| lines.insert(1, lines[1].clone()))),
        ("a receipt after the seal", with(&|lines| lines.push(lines[0].clone()))),
        ("a line that is no envelope", with(&|lines| lines.insert(2, "{}".to_owned()))),
        ("a payload changed", edit(1, &|envelope| rewrite(envelope, "\"note\"", "\"nite\""))),
        (
            "a result's code added",
            edit(1, &|envelope| rewrite(envelope, "\"kind\":\"exited\"", "\"kind\":\"signalled\"")),
        ),
        ("a payload that is no base64", edit(2, &|envelope| envelope["payload"] = json!("*"))),
        ("a signature taken away", edit(1, &|envelope| envelope["signatures"] = json!([]))),
        ("another key named", edit(1, &|envelope| envelope["signatures"][0]["keyid"] = json!("ed25519:00"))),
        ("another receipt's signature", {
            let other: Value = serde_json::from_str(&good[0]).unwrap();
            edit(1, &move |envelope| envelope["signatures"] = other["signatures"].clone())
        }),
        ("another payload type", edit(0, &|envelope| envelope["payloadType"] = json!("text/plain"))),
        ("a seal that counts less", edit(4, &|envelope| rewrite(envelope, "\"count\":4", "\"count\":3"))),
    ]
}

#[test]
fn a_job_that_lives_through_a_change_of_the_key_is_one_chain_and_the_change_is_on_record() {
    needs!(requirements());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let python = match python::with_module(folder, "cryptography", PACKAGE, Source::SystemToo) {
        Ok(python) => python,
        Err(reason) => return requirement::skip(&format!("no Python with the package {PACKAGE}: {reason}")),
    };
    let script = || Script {
        order: Order::Transcript,
        ..Script::of([
            Turn::call("note", json!({"file": "a", "text": "before"})),
            Turn::call("note", json!({"file": "b", "text": "after"})),
            Turn::text(json!({"done": true}).to_string()),
        ])
    };
    let server = ModelServer::start(Script { turns: script().turns[..1].to_vec(), ..script() }).unwrap();
    let address = server.address();
    let site = Site::new();
    site.python_tool(
        "note",
        "[execution]\nmutates_workspace = true",
        "open('/workspace/' + arguments['file'], 'a').write(arguments['text'])\nreply({})",
    );
    site.agent("worker", &server.base_url(), &["note"], "");
    let daemon = Daemon::start(&site);
    let former = fs::read_to_string(site.path("state/receipt.pub")).unwrap();
    let workspace = site.workspace("w", 0, 0);
    let id = daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {}, "workspace": workspace}));
    assert_eq!(daemon.result(&id)["error_code"], "MODEL_UNAVAILABLE", "{}", daemon.log());
    drop(server);
    daemon.stop();

    // As docs/operating.md says.
    fs::rename(site.path("state/launcher/receipt.key"), site.path("state/launcher/receipt.key.old")).unwrap();
    let server = ModelServer::listen(script(), address, None).unwrap();
    let daemon = Daemon::start(&site);
    assert!(!site.path("state/launcher/receipt.key.old").exists(), "it has signed off");
    let output = daemon.agentctl(&["resume", &id, "--wait"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}\n{:?}\n{}", shown(&output), server.refusals(), daemon.log());
    let bundle = site.path("bundle.jsonl");
    let output = daemon.agentctl(&["receipts", &id, "--bundle", bundle.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));

    let verifiers = Verifiers { python: python.clone(), key: site.path("state/receipt.pub") };
    assert_eq!(verifiers.faults(&daemon, &bundle), BTreeSet::new());
    let keys = daemon.get("/v1/keys").json();
    let named = |index: usize, field: &str| keys["keys"][index][field].as_str().unwrap_or("-").to_owned();
    assert_eq!((named(0, "until").as_str(), named(1, "until")), ("-", named(0, "from")), "{keys}");
    let report = daemon.agentctl(&["--json", "verify", bundle.to_str().unwrap()]).output().unwrap();
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    let signed =
        json!([{"key_id": named(1, "key_id"), "envelopes": 1}, {"key_id": named(0, "key_id"), "envelopes": 2}]);
    assert_eq!((&report["keys"], &report["valid"]), (&signed, &json!(true)), "{report}");
    for (what, key) in [("the former key alone", former), ("the new key alone", named(0, "public_key"))] {
        let file = site.write("one.pub", key.as_bytes());
        let faults = Verifiers { python: python.clone(), key: file }.faults(&daemon, &bundle);
        assert!(faults.iter().any(|(_, fault)| fault == "wrong_key"), "{what}: {faults:?}");
    }

    let history = site.path("state/receipt.history");
    assert_eq!(verifiers.faults(&daemon, &history), BTreeSet::new());
    let records: Vec<String> = fs::read_to_string(&history).unwrap().lines().map(str::to_owned).collect();
    let edit = |change: &dyn Fn(&mut Value)| {
        let mut record: Value = serde_json::from_str(&records[1]).unwrap();
        change(&mut record);
        vec![records[0].clone(), record.to_string()]
    };
    let tampered = [
        ("the change left out", records[..1].to_vec()),
        ("what was before left out", records[1..].to_vec()),
        (
            "the former key's signature taken away",
            edit(&|record| drop(record["signatures"].as_array_mut().unwrap().pop())),
        ),
        ("said to be missing", edit(&|record| rewrite(record, "\"present\"", "\"missing\""))),
        ("another time", edit(&|record| rewrite(record, "\"time\":\"2", "\"time\":\"3"))),
        (
            "the signatures changed for each other",
            edit(&|record| {
                let swapped = record["signatures"][0]["sig"].clone();
                record["signatures"][1]["sig"] = swapped;
            }),
        ),
    ];
    for (what, lines) in tampered {
        let file = site.write("history.jsonl", lines.join("\n").as_bytes());
        assert!(!verifiers.faults(&daemon, &file).is_empty(), "nobody saw: {what}");
    }

    let listed = daemon.agentctl(&["keys"]).output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains("in use") && listed.contains("itself and the key before"), "{listed}");
    let file = site.path("keys.pub");
    assert!(daemon.agentctl(&["keys", "--file", file.to_str().unwrap()]).output().unwrap().status.success());
    assert_eq!(fs::read(&file).unwrap(), fs::read(site.path("state/receipt.pub")).unwrap());
    daemon.stop();

    // Without the former key, which is said.
    fs::remove_file(site.path("state/launcher/receipt.key")).unwrap();
    let daemon = Daemon::start(&site);
    let listed = daemon.agentctl(&["keys"]).output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains("itself alone"), "{}", shown(&listed));
    assert_eq!(verifiers.faults(&daemon, &history), BTreeSet::new());
    assert_eq!(verifiers.faults(&daemon, &bundle), BTreeSet::new(), "two keys ago");
    daemon.stop();
    let audit = fs::read_to_string(site.path("state/audit/audit.log")).unwrap();
    let lines = audit.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let changes: Vec<Value> = lines.filter(|line| line["event"] == "key.changed").collect();
    assert_eq!(changes.len(), 2, "{audit}");
    assert_eq!((&changes[0]["from"], &changes[0]["to"]), (&json!(named(1, "key_id")), &json!(named(0, "key_id"))));
    assert!(changes[1]["reason"].as_str().unwrap().contains("not signed"), "{audit}");
}

fn rewrite(envelope: &mut Value, from: &str, to: &str) {
    let payload = data_encoding::BASE64.decode(envelope["payload"].as_str().unwrap().as_bytes()).unwrap();
    let text = String::from_utf8(payload).unwrap();
    assert!(text.contains(from), "{from} is not in {text}");
    envelope["payload"] = json!(data_encoding::BASE64.encode(text.replace(from, to).as_bytes()));
}

struct Verifiers {
    python: PathBuf,
    key: PathBuf,
}

impl Verifiers {
    /// The faults that both name, by line.
    fn faults(&self, daemon: &Daemon<'_>, bundle: &Path) -> BTreeSet<(u64, String)> {
        let file = bundle.to_str().unwrap();
        let ours = daemon.agentctl(&["--json", "verify", file, "--key", self.key.to_str().unwrap()]).output().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("second_opinion/verify_receipts.py");
        let theirs = Command::new(&self.python).arg(script).arg(file).arg(&self.key).output().unwrap();
        let (first, second) = (told_in_json(&ours), told_in_lines(&theirs));
        assert_eq!(first, second, "agentctl: {}\nthe second opinion: {}", shown(&ours), shown(&theirs));
        let expected = Some(i32::from(!first.is_empty()));
        assert_eq!((ours.status.code(), theirs.status.code()), (expected, expected), "{}", shown(&ours));
        first
    }
}

fn told_in_json(output: &Output) -> BTreeSet<(u64, String)> {
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", shown(output)));
    let finding = |finding: &Value| Some((finding["line"].as_u64()?, finding["fault"].as_str()?.to_owned()));
    report["findings"].as_array().unwrap().iter().map(|it| finding(it).unwrap()).collect()
}

fn told_in_lines(output: &Output) -> BTreeSet<(u64, String)> {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!text.is_empty(), "{}", shown(output));
    let fault = |line: &str| line.split_once(' ').map(|(number, name)| (number.parse().unwrap(), name.to_owned()));
    text.lines().filter_map(fault).collect()
}
