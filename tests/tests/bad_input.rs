//! Bad input of every kind: each gets its code, within its time, and the daemon goes on.

use std::time::{Duration, Instant};

use agentd_tests::daemon::Daemon;
use agentd_tests::site::{Site, ToolText};
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

/// Asserts a refused request: its status, its code, and that it is a problem document with a suggestion.
fn refused(response: &agentd_tests::http_client::Response, status: u16, code: &str) -> Value {
    let problem = response.json();
    assert_eq!((response.status, problem["code"].as_str()), (status, Some(code)), "{problem}");
    assert_eq!(response.header("content-type"), Some("application/problem+json"));
    assert!(problem["recovery_suggestion"].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
    problem
}

#[test]
fn refused_submissions_make_no_job() {
    needs!(requirement::root());
    let site = Site::new();
    site.agent("worker", "http://127.0.0.1:9/v1", &[], "");
    site.schema(
        "goal",
        &json!({
            "type": "object", "required": ["quarter"], "additionalProperties": false,
            "properties": {"quarter": {"type": "string", "pattern": "^[0-9]{4}-Q[1-4]$"}},
        }),
    );
    let daemon = Daemon::start(&site);
    let job = |agent: &str, goal: Value| json!({"version": 1, "agent": agent, "goal": goal});
    let good = json!({"quarter": "2000-Q3"});

    let problem = refused(&daemon.post("/v1/jobs", &job("worker", json!({"quarter": 3}))), 422, "INPUT_INVALID");
    let text = problem.to_string();
    assert!(text.contains("/quarter") && text.contains("type"), "neither pointer nor rule: {text}");
    refused(&daemon.post("/v1/jobs", &job("worker", json!({}))), 422, "INPUT_INVALID");
    refused(&daemon.post("/v1/jobs", &job("nobody", good.clone())), 404, "AGENT_UNKNOWN");

    let malformed = daemon
        .open("POST", "/v1/jobs", &[("content-type", "application/json")], b"{\"version\": 1,}")
        .finish()
        .unwrap();
    let problem = refused(&malformed, 400, "INPUT_INVALID");
    assert_eq!(problem["offset"], 14, "{problem}");
    let twice = daemon
        .open("POST", "/v1/jobs", &[("content-type", "application/json")], b"{\"version\":1,\"version\":1}")
        .finish()
        .unwrap();
    refused(&twice, 400, "INPUT_INVALID");
    let utf8 = daemon
        .open("POST", "/v1/jobs", &[("content-type", "application/json")], b"{\"agent\":\"\xff\"}")
        .finish()
        .unwrap();
    refused(&utf8, 400, "INPUT_INVALID");
    let empty = daemon.open("POST", "/v1/jobs", &[("content-type", "application/json")], b"").finish().unwrap();
    refused(&empty, 400, "INPUT_INVALID");
    let mut other_version = job("worker", good.clone());
    other_version["version"] = json!(99);
    let response = daemon.post("/v1/jobs", &other_version);
    assert!((400..500).contains(&response.status), "{}", response.text());

    let with_workspace = |path: &str| {
        let mut job = job("worker", good.clone());
        job["workspace"] = json!(path);
        daemon.post("/v1/jobs", &job)
    };
    let missing = site.path("work/missing");
    for path in [missing.to_str().unwrap(), "/etc", "relative/path", "/"] {
        let response = with_workspace(path);
        let problem = response.json();
        assert!((400..500).contains(&response.status), "{path}: {problem}");
        assert!(
            ["WORKSPACE_UNAVAILABLE", "INPUT_INVALID"].contains(&problem["code"].as_str().unwrap()),
            "{path}: {problem}"
        );
    }
    let of_another = site.workspace("of-another", 60_001, 60_001);
    let problem = with_workspace(of_another.to_str().unwrap()).json();
    assert_eq!(problem["code"], "WORKSPACE_UNAVAILABLE", "{problem}");
    let file = site.write("work/file", b"x");
    assert_eq!(with_workspace(file.to_str().unwrap()).json()["code"], "WORKSPACE_UNAVAILABLE");

    refused(&daemon.get("/v1/jobs/00000000000000000000000000"), 404, "NOT_FOUND");
    refused(&daemon.get("/v1/no-such-thing"), 404, "NOT_FOUND");
    let response = daemon.request("DELETE", "/v1/jobs", None);
    assert_eq!(response.status, 405);
    let huge = format!("{{\"version\":1,\"agent\":\"worker\",\"goal\":{{\"quarter\":\"{}\"}}}}", "x".repeat(40 << 20));
    let response =
        daemon.open("POST", "/v1/jobs", &[("content-type", "application/json")], huge.as_bytes()).finish().unwrap();
    refused(&response, 413, "REQUEST_TOO_LARGE");

    let jobs = daemon.get("/v1/jobs").json();
    assert_eq!(jobs["jobs"].as_array().map(Vec::len), Some(0), "a refused submission made a job: {jobs}");
    assert_eq!(daemon.post("/v1/jobs", &job("worker", good)).status, 202, "the twin: a good one is accepted");
    daemon.stop();
}

#[test]
fn agentctl_says_the_same_with_its_exit_status() {
    needs!(requirement::root());
    let site = Site::new();
    site.agent("worker", "http://127.0.0.1:9/v1", &[], "");
    let daemon = Daemon::start(&site);
    let run = |arguments: &[&str]| {
        let output = daemon.agentctl(arguments).output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (code, stdout, stderr) = run(&["run", "nobody", "--goal", "{}"]);
    assert_eq!((code, stdout.as_str()), (Some(2), ""), "{stderr}");
    assert!(stderr.contains("nobody"), "{stderr}");
    let (code, stdout, _) = run(&["--json", "run", "nobody", "--goal", "{}"]);
    assert_eq!(code, Some(2));
    assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap()["code"], "AGENT_UNKNOWN");
    assert_eq!(run(&["run", "worker", "--goal", "{not json"]).0, Some(2));
    assert_eq!(run(&["no-such-command"]).0, Some(2));
    assert_eq!(run(&["show", "not-an-id"]).0, Some(2));
    assert_eq!(run(&["tools"]).0, Some(0));
    daemon.stop();
}

/// A tool that does something wrong, and the code that this must get.
struct Misbehaving {
    name: &'static str,
    code: &'static str,
    body: &'static str,
    manifest: &'static str,
}

const fn wrong(name: &'static str, code: &'static str, body: &'static str) -> Misbehaving {
    Misbehaving { name, code, body, manifest: "[timeout]\ntier = \"compute\"" }
}

const ZOO: &[Misbehaving] = &[
    wrong("prints_garbage", "TOOL_PROTOCOL_ERROR", "print('\\x00\\x01 garbage {')"),
    wrong("prints_nothing", "TOOL_PROTOCOL_ERROR", "pass"),
    wrong(
        "prints_nan",
        "TOOL_PROTOCOL_ERROR",
        "print('{\"protocol\":1,\"call_id\":\"%s\",\"ok\":true,\"result\":{\"x\":NaN}}' % request['call_id'])",
    ),
    wrong(
        "prints_duplicate_keys",
        "TOOL_PROTOCOL_ERROR",
        "print('{\"protocol\":1,\"call_id\":\"%s\",\"ok\":true,\"ok\":true,\"result\":{}}' % request['call_id'])",
    ),
    wrong("prints_deep_nesting", "TOOL_PROTOCOL_ERROR", "print('[' * 100000 + ']' * 100000)"),
    wrong(
        "prints_invalid_utf8",
        "TOOL_PROTOCOL_ERROR",
        "sys.stdout.buffer.write(b'{\"protocol\":1,\"ok\":true,\"result\":{\"x\":\"\\xff\\xfe\"}}')",
    ),
    wrong(
        "answers_another_call",
        "TOOL_PROTOCOL_ERROR",
        "print(json.dumps({'protocol': 1, 'call_id': 'a' * 26, 'ok': True, 'result': {}}))",
    ),
    wrong("says_ok_but_exits_1", "TOOL_PROTOCOL_ERROR", "reply({})\nsys.stdout.flush()\nos._exit(1)"),
    wrong("prints_too_much", "RESPONSE_TOO_LARGE", "reply({'x': 'y' * (4 << 20)})"),
    wrong("prints_for_ever", "RESPONSE_TOO_LARGE", "while True: sys.stdout.write('x' * 65536)"),
    wrong("crashes", "TOOL_CRASHED", "import ctypes\nctypes.string_at(0)"),
    wrong("kills_itself", "TOOL_CRASHED", "os.kill(os.getpid(), 9)"),
    wrong("fails_with_text", "TOOL_FAILED", "print('it did not work')\nsys.stdout.flush()\nos._exit(1)"),
    wrong("raises", "TOOL_CRASHED", "raise ValueError('no')"),
    wrong(
        "fails_properly",
        "TOOL_FAILED",
        "print(json.dumps({'protocol': 1, 'call_id': request['call_id'], 'ok': False, 'error': {'code': 'UPSTREAM_DOWN', 'message': 'no', 'retryable': False}}))\nsys.stdout.flush()\nos._exit(1)",
    ),
    Misbehaving {
        name: "never_ends",
        code: "TOOL_TIMEOUT",
        body: "time.sleep(3600)",
        manifest: "[timeout]\nafter = \"500ms\"",
    },
    Misbehaving {
        name: "ignores_sigterm",
        code: "TOOL_TIMEOUT",
        body: "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)",
        manifest: "[timeout]\nafter = \"500ms\"",
    },
    Misbehaving {
        name: "leaves_a_child_with_the_pipes",
        code: "TOOL_TIMEOUT",
        body: "os.fork() or os.setsid()\ntime.sleep(3600)",
        manifest: "[timeout]\nafter = \"500ms\"",
    },
    Misbehaving {
        name: "stops_itself",
        code: "TOOL_TIMEOUT",
        body: "os.kill(os.getpid(), 19)",
        manifest: "[timeout]\nafter = \"500ms\"",
    },
    Misbehaving {
        name: "spins",
        code: "TOOL_TIMEOUT",
        body: "while True: pass",
        manifest: "[timeout]\nafter = \"500ms\"",
    },
];

#[test]
fn misbehaving_tools_get_their_codes_and_the_daemon_goes_on() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    site.python_tool("behaves", "", "reply({'given': arguments})");
    for tool in ZOO {
        site.python_tool(tool.name, tool.manifest, tool.body);
    }
    site.python_tool("misfits_its_schema", "", "reply({'count': 'three'})");
    site.write(
        "config/tools/misfits_its_schema/output.json",
        b"{\"type\":\"object\",\"properties\":{\"count\":{\"type\":\"integer\"}}}",
    );
    site.python_tool("wants_a_number", "", "reply({})");
    site.write(
        "config/tools/wants_a_number/input.json",
        b"{\"type\":\"object\",\"required\":[\"n\"],\"properties\":{\"n\":{\"type\":\"integer\"}}}",
    );
    site.tool(&ToolText {
        name: "no_interpreter",
        runtime: "exec",
        entry: "run",
        code: b"#!/no/such/interpreter\n",
        manifest: "",
    });
    site.tool(&ToolText { name: "no_runtime", runtime: "absent", entry: "main.x", code: b"", manifest: "" });
    site.configure("[runtimes.absent]\ncommand = \"/usr/bin/agentd-no-such-runtime\"\n");
    let daemon = Daemon::start(&site);
    let behaves = |after: &str| {
        let reply = daemon.call("behaves", &json!({"x": 1}));
        assert_eq!(
            (&reply["ok"], &reply["result"]["given"]),
            (&json!(true), &json!({"x": 1})),
            "after {after}: {reply}"
        );
    };
    behaves("the start");
    let gets = |tool: &str, arguments: Value, code: &str| {
        let begun = Instant::now();
        let reply = daemon.call(tool, &arguments);
        assert_eq!((&reply["ok"], reply["error"]["code"].as_str()), (&json!(false), Some(code)), "{tool}: {reply}");
        assert!(reply["error"]["recovery_suggestion"].as_str().is_some_and(|text| !text.is_empty()), "{reply}");
        assert!(reply["receipt"]["payload"].is_string(), "{tool} left no receipt: {reply}");
        assert!(begun.elapsed() < Duration::from_secs(60), "{tool} took {:?}", begun.elapsed());
        reply
    };
    let mut wrong = Vec::new();
    for tool in ZOO {
        let reply = daemon.call(tool.name, &json!({}));
        if reply["ok"] != false || reply["error"]["code"] != tool.code {
            wrong.push(format!("{}: wanted {}, got {} {}", tool.name, tool.code, reply["ok"], reply["error"]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    behaves("the zoo");
    gets("misfits_its_schema", json!({}), "RESPONSE_INVALID");
    gets("wants_a_number", json!({"n": "x"}), "ARGUMENTS_INVALID");
    gets("no_runtime", json!({}), "TOOL_UNAVAILABLE");
    let reply = daemon.call("no_interpreter", &json!({}));
    assert!(["TOOL_UNAVAILABLE", "LAUNCH_FAILED"].contains(&reply["error"]["code"].as_str().unwrap()), "{reply}");
    let reply = gets("fails_properly", json!({}), "TOOL_FAILED");
    assert!(reply["error"].to_string().contains("UPSTREAM_DOWN"), "the tool's own code is lost: {reply}");
    let unknown = daemon.post("/v1/calls", &json!({"version": 1, "tool": "no_such_tool", "arguments": {}}));
    assert!(unknown.text().contains("TOOL_UNKNOWN"), "{}", unknown.text());
    behaves("everything");
    daemon.stop();
}

#[test]
fn what_all_tools_on_a_runtime_lack_is_found_out_once() {
    needs!(requirement::root());
    let site = Site::new();
    site.configure("[runtimes.abacus]\ncommand = \"no-such-program\"\n");
    for name in ["one", "two"] {
        site.tool(&ToolText { name, runtime: "abacus", entry: "main", code: b"", manifest: "" });
    }
    let daemon = Daemon::start(&site);
    let call = |tool: &str| {
        let reply = daemon.post("/v1/calls", &json!({"version": 1, "tool": tool, "arguments": {}})).json();
        reply["error"]["code"].as_str().unwrap_or_default().to_owned()
    };
    for _ in 0..5 {
        assert_eq!(call("one"), "TOOL_UNAVAILABLE");
    }
    assert_eq!(call("two"), "BREAKER_OPEN", "the runtime's breaker is open");
    daemon.stop();
}
