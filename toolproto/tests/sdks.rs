//! Runs each SDK's own tests with its own runtime, and reads what its fixture writes with agentd's reader.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use toolproto::ids::CallId;
use toolproto::reply::{self, Answer, Reply};

const CALL: CallId = CallId::from_u128(7);

fn sdk(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("sdk").join(path)
}

/// A runtime where agentd looks for it (never on PATH, where shims lie), or Bun where `cargo ci` puts it.
fn runtime(name: &str) -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../tools");
    let versions = std::fs::read_dir(fetched).into_iter().flatten().flatten();
    let mut places: Vec<PathBuf> = versions.map(|entry| entry.path()).collect();
    places.extend(["/usr/local/bin", "/usr/bin", "/bin"].map(PathBuf::from));
    let found = places.into_iter().map(|place| place.join(name)).find(|program| program.is_file());
    if found.is_none() {
        let must_run = std::env::var_os("AGENTD_TEST_MUST_RUN").is_some_and(|value| value == "1");
        assert!(!must_run, "{name} is not installed, and AGENTD_TEST_MUST_RUN=1");
        eprintln!("skipped: {name} is not installed");
    }
    found
}

fn passes(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Starts a fixture with one call and reads its answer as agentd does.
fn call(fixture: &mut Command, arguments: Value) -> Reply {
    let request = json!({
        "protocol": 1, "operation": "call", "call_id": CALL, "tool": "fixture", "arguments": arguments,
        "deadline": "2026-11-29T12:00:03.000Z", "timeout_ms": 3000, "max_response_bytes": 1 << 20,
        "idempotency_key": "key",
    });
    let mut child = fixture.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(request.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    reply::read(&output.stdout, CALL, output.status.code().unwrap()).unwrap()
}

/// What every SDK's fixture answers to the same calls.
fn agrees_with_the_reader(mut fixture: impl FnMut() -> Command) {
    let arguments = json!({"do": "echo", "text": "é\u{2028}😀\"\\\u{1}", "list": [1.5, true, null, {}]});
    let echoed = call(&mut fixture(), arguments.clone());
    assert_eq!(echoed, Reply { answer: Answer::Success { result: arguments, artifacts: vec![] }, notes: vec![] });

    let printed = call(&mut fixture(), json!({"do": "print"}));
    assert_eq!(printed.notes, Vec::<String>::new(), "a stray print got into the reply");

    let Answer::Failure(error) = call(&mut fixture(), json!({"do": "fail"})).answer else { panic!("no failure") };
    assert_eq!((error.code.as_str(), error.retryable, error.retry_after_ms), ("NO_LUCK", true, Some(5)));

    let Answer::Success { result, .. } = call(&mut fixture(), json!({"do": "large", "characters": 300_000})).answer
    else {
        panic!("no success")
    };
    assert_eq!(result["text"].as_str().unwrap().chars().count(), 300_000);

    let Answer::Success { artifacts, .. } = call(&mut fixture(), json!({"do": "artifact"})).answer else {
        panic!("no success")
    };
    assert_eq!(artifacts[0].path, "out/a.csv");
}

#[test]
fn python() {
    let Some(python) = runtime("python3") else { return };
    passes(Command::new(&python).args(["-B", "-m", "unittest", "discover", "-s"]).arg(sdk("python/tests")));
    agrees_with_the_reader(|| {
        let mut command = Command::new(&python);
        command.arg("-B").arg(sdk("python/tests/fixture.py"));
        command
    });
}

#[test]
fn typescript_on_node() {
    let Some(node) = runtime("node") else { return };
    passes(Command::new(&node).arg(sdk("typescript/test/run.js")));
    agrees_with_the_reader(|| {
        let mut command = Command::new(&node);
        command.arg(sdk("typescript/test/fixture.js"));
        command
    });
}

#[test]
fn typescript_on_bun() {
    let Some(bun) = runtime("bun") else { return };
    passes(Command::new(&bun).arg(sdk("typescript/test/run.js")));
    agrees_with_the_reader(|| {
        let mut command = Command::new(&bun);
        command.arg(sdk("typescript/test/fixture.js"));
        command
    });
}

#[test]
fn java() {
    let (Some(java), Some(javac)) = (runtime("java"), runtime("javac")) else { return };
    passes(Command::new("/bin/sh").arg(sdk("java/test.sh")));
    let classes = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sdk-java");
    let mut compile = Command::new(javac);
    compile.args(["-encoding", "UTF-8", "-d"]).arg(&classes);
    for folder in ["java/src/main/java/dev/agentd/tool", "java/src/test/java/dev/agentd/tool"] {
        compile.args(std::fs::read_dir(sdk(folder)).unwrap().map(|entry| entry.unwrap().path()));
    }
    passes(&mut compile);
    agrees_with_the_reader(|| {
        let mut command = Command::new(&java);
        command.arg("-cp").arg(&classes).arg("dev.agentd.tool.Fixture");
        command
    });
}
