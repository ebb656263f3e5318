//! Denied paths, named by the tool that failed and judged by its plan: in the error, in the receipt, and for both verifiers.

use std::fs;
use std::path::Path;

use agentd_tests::daemon::{Daemon, shown};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

/// A tool that does what it is told, and lets Python say what went wrong.
const WRITES: &str = "for path in arguments.get(\"read\", []):\n    open(path).read()\n\
                      for path in arguments.get(\"write\", []):\n    open(path, \"w\").write(\"x\")\nreply({})";
/// One that says itself what went wrong, in its reply.
const REPLIES: &str = "try:\n    open(arguments[\"path\"]).read()\n    reply({})\nexcept OSError as error:\n    \
                       print(json.dumps({\"protocol\": 1, \"call_id\": request[\"call_id\"], \"ok\": False, \"error\": {\"code\": \
                       \"READ\", \"message\": str(error.strerror), \"details\": {\"path\": arguments[\"path\"]}}}))\n    sys.exit(1)";

fn statement(envelope: &Value) -> Value {
    let payload = data_encoding::BASE64.decode(envelope["payload"].as_str().unwrap().as_bytes()).unwrap();
    serde_json::from_slice::<Value>(&payload).unwrap()["predicate"].take()
}

fn call(daemon: &Daemon<'_>, tool: &str, arguments: &Value, workspace: &Path) -> (Value, Value) {
    let body = json!({"version": 1, "tool": tool, "arguments": arguments, "workspace": workspace});
    let reply = daemon.post("/v1/calls", &body).json();
    let receipt = statement(&reply["receipt"]);
    (reply, receipt)
}

fn denial(what: &str, detail: &str, rule: &str) -> Value {
    json!([{"what": what, "detail": detail, "rule": rule, "witness": "tool"}])
}

#[test]
fn a_failed_call_names_the_paths_that_its_policy_keeps_from_it() {
    needs!(requirement::root());
    let site = Site::new();
    site.write("policies/covered.toml", COVERED.as_bytes());
    for (name, tables) in [
        ("changes", "[execution]\nmutates_workspace = true\n[sandbox]\npolicy = \"workspace\""),
        ("reads", "[execution]\nread_only = true\n[sandbox]\npolicy = \"workspace\""),
        ("strictly", "[sandbox]\npolicy = \"strict\""),
        ("covered", "[sandbox]\npolicy = \"covered\""),
    ] {
        site.python_tool(name, &format!("{tables}\n[breaker]\nmin_calls = 1000\nwindow = 1000"), WRITES);
    }
    site.python_tool("replies", "[sandbox]\npolicy = \"strict\"", REPLIES);
    let workspace = site.workspace("w", 0, 0);
    fs::create_dir_all(workspace.join(".git/hooks")).unwrap();
    let daemon = Daemon::start(&site);

    let shown_by =
        |path: &str, policy: &str| format!("[[path]] path = \"{path}\", access = \"read\" in policy `{policy}`");
    let only = "none: only the workspace, /tmp and /dev/shm can be written";
    // A path that the host has and one that it does not are told of alike.
    let hidden = ["/root", "/etc/shadow", "/srv/agentd-has-no-such-path"].map(|path| {
        (
            "changes",
            json!({"read": [path]}),
            denial("path", &format!("{path}: not shown"), &shown_by(path, "workspace")),
        )
    });
    let read_only_by = |path: &str, rule: &str| denial("path", &format!("{path}: read-only"), rule);
    let others = [
        ("changes", json!({"write": ["/usr/x"]}), read_only_by("/usr/x", only)),
        ("changes", json!({"write": ["/etc/x/../passwd"]}), json!([])),
        (
            "reads",
            json!({"write": ["/workspace/x"]}),
            read_only_by("/workspace/x", "[execution] read_only = false in tool.toml"),
        ),
        (
            "strictly",
            json!({"write": ["/workspace/x"]}),
            read_only_by("/workspace/x", "workspace = \"overlay\" in policy `strict`"),
        ),
        (
            "changes",
            json!({"write": [".git/hooks/pre-commit"]}),
            denial(
                "protected_name",
                ".git/hooks/pre-commit: protected",
                "no [[protect]] name = \".git/hooks\" in policy `workspace`",
            ),
        ),
        (
            "covered",
            json!({"read": ["/usr/share/doc/x"]}),
            denial(
                "path",
                "/usr/share/doc/x: not shown",
                "no [[path]] path = \"/usr/share/doc\", access = \"hide\" in policy `covered`",
            ),
        ),
        (
            "replies",
            json!({"path": "/etc/shadow"}),
            denial("path", "/etc/shadow: not shown", &shown_by("/etc/shadow", "strict")),
        ),
        // Failures that the plan does not explain.
        ("changes", json!({"read": ["/workspace/missing"]}), json!([])),
        ("changes", json!({"read": ["/usr/missing"]}), json!([])),
    ];
    for (tool, arguments, expected) in hidden.into_iter().chain(others) {
        let (reply, receipt) = call(&daemon, tool, &arguments, &workspace);
        assert_eq!(reply["ok"], false, "{tool} {arguments}: {reply}");
        assert_eq!(receipt["denied"], expected, "{tool} {arguments}: {reply}\n{receipt}");
        // What the launcher saw stays apart from what the tool said.
        let record = &receipt["evidence"]["record"];
        assert_eq!(record["denied"], json!([]), "{record}");
        let told = |value: &Value| value.as_array().cloned().unwrap_or_default();
        assert_eq!(told(&record["claims"]["named"]), told(&expected), "{record}");
        assert_eq!(told(&reply["error"]["details"]["denied"]), told(&expected), "{reply}");
    }
    daemon.stop();
}

const COVERED: &str = "version = 1\nname = \"covered\"\nextends = \"strict\"\n[[path]]\npath = \"/usr/share/doc\"\naccess = \"hide\"\n\
                       why = \"a test\"\n";

#[test]
fn a_call_that_ends_well_names_none_and_a_command_is_told_of_too() {
    needs!(requirement::root());
    let site = Site::new();
    let caught =
        "try:\n    open(\"/etc/shadow\")\nexcept OSError as error:\n    print(error, file=sys.stderr)\nreply({})";
    site.python_tool("catches", "[sandbox]\npolicy = \"strict\"", caught);
    let workspace = site.workspace("w", 0, 0);
    let daemon = Daemon::start(&site);
    let (reply, receipt) = call(&daemon, "catches", &json!({}), &workspace);
    assert_eq!((&reply["ok"], &receipt["denied"]), (&json!(true), &json!([])), "{reply}\n{receipt}");
    assert!(receipt["evidence"]["record"]["claims"].get("named").is_none(), "{receipt}");

    let file = site.path("receipt.json");
    let run = |script: &str| {
        let options =
            ["--policy", "workspace", "--workspace", workspace.to_str().unwrap(), "--receipt", file.to_str().unwrap()];
        let output = daemon.exec(&options, &["sh", "-c", script], b"");
        let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{error}: {}", shown(&output)));
        statement(&serde_json::from_str(&text).unwrap())
    };
    let receipt = run("cat /etc/shadow");
    let rule = "[[path]] path = \"/etc/shadow\", access = \"read\" in policy `workspace`";
    assert_eq!(receipt["denied"], denial("path", "/etc/shadow: not shown", rule), "{receipt}");
    let receipt = run("cat /etc/shadow; true");
    assert_eq!(receipt["denied"], json!([]), "{receipt}");
    daemon.stop();
}
