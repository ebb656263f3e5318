//! The tools of `examples/tools`, written from the specification alone: run as agentd runs them, but without a sandbox,
//! and read with agentd's reader and schemas.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use toolproto::ids::CallId;
use toolproto::manifest::ToolManifest;
use toolproto::reply::{self, Answer, UNSUPPORTED};

const CALL: CallId = CallId::from_u128(7);

/// A tool's folder, with how its program is started.
struct Tool {
    folder: PathBuf,
    manifest: ToolManifest,
    command: Vec<PathBuf>,
}

impl Tool {
    fn load(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tools").join(name);
        let file = folder.join("tool.toml");
        let manifest = ToolManifest::parse(&file, &std::fs::read_to_string(&file).unwrap()).unwrap();
        let entry = folder.join(&manifest.program.entry);
        let command = match manifest.program.runtime.as_str() {
            "python" => vec!["/usr/bin/python3".into(), entry],
            "exec" => vec![entry],
            other => panic!("{other}: a runtime that these tests do not start"),
        };
        Self { folder, manifest, command }
    }

    fn schema(&self, file: &Path) -> jsonschema::Validator {
        let schema: Value = serde_json::from_slice(&std::fs::read(self.folder.join(file)).unwrap()).unwrap();
        jsonschema::draft202012::new(&schema).unwrap()
    }

    /// Runs one operation in a workspace and checks the answer against the contract.
    fn answer(&self, operation: &str, arguments: Value, workspace: &Path) -> Answer {
        let request = json!({
            "protocol": 1, "operation": operation, "call_id": CALL, "tool": self.manifest.name, "arguments": arguments,
            "workspace": workspace, "deadline": "2026-11-29T12:00:03.000Z", "timeout_ms": 3000,
            "max_response_bytes": 65536, "idempotency_key": "path",
        });
        let mut child = Command::new(&self.command[0])
            .args(&self.command[1..])
            .current_dir(workspace)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(request.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let reply = reply::read(&output.stdout, CALL, output.status.code().unwrap()).unwrap();
        assert_eq!(reply.notes, Vec::<String>::new());
        if let (Answer::Success { result, .. }, "call") = (&reply.answer, operation) {
            assert!(self.schema(self.manifest.input_schema.as_path()).is_valid(&arguments));
            let output = self.schema(self.manifest.output_schema.as_deref().unwrap());
            assert!(output.is_valid(result), "{result}");
        }
        reply.answer
    }

    fn result(&self, arguments: Value, workspace: &Path) -> Value {
        match self.answer("call", arguments, workspace) {
            Answer::Success { result, .. } => result,
            Answer::Failure(error) => panic!("{error:?}"),
        }
    }

    fn error_code(&self, operation: &str, arguments: Value, workspace: &Path) -> String {
        match self.answer(operation, arguments, workspace) {
            Answer::Success { result, .. } => panic!("{operation} succeeded: {result}"),
            Answer::Failure(error) => error.code,
        }
    }

    fn knows_the_protocol(&self, missing: Value, workspace: &Path) {
        assert_eq!(self.error_code("call", missing, workspace), "NO_SUCH_FILE");
        assert_eq!(self.error_code("dance", json!({}), workspace), UNSUPPORTED);
        for (operation, member, expected) in
            [("describe", "name", json!(self.manifest.name)), ("health", "healthy", json!(true))]
        {
            let Answer::Success { result, .. } = self.answer(operation, json!({}), workspace) else {
                panic!("{operation} failed")
            };
            assert_eq!(result[member], expected);
        }
    }
}

fn workspace(name: &str, content: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), content).unwrap();
    folder
}

#[test]
fn shell() {
    let (tool, folder) = (Tool::load("line_count"), workspace("notes.txt", b"hello world\nhello\n"));
    assert_eq!(tool.result(json!({"path": "notes.txt"}), folder.path()), json!({"lines": 2, "words": 3, "bytes": 18}));
    tool.knows_the_protocol(json!({"path": "nowhere"}), folder.path());
}

#[test]
fn c() {
    let mut tool = Tool::load("checksum");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checksum");
    let compiled = Command::new("cc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&program, &tool.folder.join("checksum.c")])
        .status()
        .unwrap();
    assert!(compiled.success());
    tool.command = vec![program];
    let folder = workspace("notes.txt", b"123456789");
    // The check value of CRC-32/ISO-HDLC.
    assert_eq!(tool.result(json!({"path": "notes.txt"}), folder.path()), json!({"crc32": "cbf43926", "bytes": 9}));
    tool.knows_the_protocol(json!({"path": "nowhere"}), folder.path());
}

#[test]
fn perl() {
    let (tool, folder) = (Tool::load("word_frequency"), workspace("é.txt", "Über über a\nb a\n".as_bytes()));
    assert_eq!(
        tool.result(json!({"path": "é.txt", "most": 2}), folder.path()),
        json!({"distinct": 3, "words": [{"word": "a", "count": 2}, {"word": "über", "count": 2}]})
    );
    tool.knows_the_protocol(json!({"path": "nowhere"}), folder.path());
}

#[test]
fn python() {
    let document = br#"{"users":[{"a/b":18446744073709551615}],"bad":NaN}"#;
    let (tool, folder) = (Tool::load("json_pick"), workspace("data.json", document));
    let pick = |pointer: &str| json!({"path": "data.json", "pointer": pointer});
    assert_eq!(tool.result(pick("/users/0/a~1b"), folder.path()), json!({"value": u64::MAX}));
    assert_eq!(tool.error_code("call", pick("/users/1"), folder.path()), "NOTHING_THERE");
    assert_eq!(tool.error_code("call", pick("/bad"), folder.path()), "NOT_JSON");
    tool.knows_the_protocol(json!({"path": "nowhere", "pointer": ""}), folder.path());
}
