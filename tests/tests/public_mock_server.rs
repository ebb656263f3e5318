//! Real jobs against a public mock server of models, `fakellm`: somebody else's idea of what the providers send. It refuses less
//! than the scripted server here, and what it streams was not written by those who read it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agentd_tests::daemon::Daemon;
use agentd_tests::http_client;
use agentd_tests::python::{self, Source};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

/// The server, at the version it was tried with.
const PACKAGE: &str = "fakellm==0.3.5";
/// How long it may take to start.
const START: Duration = Duration::from_secs(120);

/// The server as a process. It ends with this value.
struct FakeLlm {
    process: Child,
    address: SocketAddr,
}

impl FakeLlm {
    /// Starts it with these rules on a port that is free.
    fn start(python: &Path, rules: &Path) -> Self {
        // Between finding a free port and its use somebody else may take it; then the server ends at once.
        for _ in 0..5 {
            let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
            let code = "from fakellm.cli import main; main()";
            let process = Command::new(python)
                .args(["-c", code, "serve", "--port", &address.port().to_string(), "--config"])
                .arg(rules)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let mut server = Self { process, address };
            if server.answers() {
                return server;
            }
        }
        panic!("fakellm does not start; its standard error says why");
    }

    /// Waits until it answers; `false` when it ends before.
    fn answers(&mut self) -> bool {
        let begun = Instant::now();
        while TcpStream::connect(self.address).is_err() {
            if self.process.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(begun.elapsed() < START, "fakellm does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        true
    }

    /// How often each of its rules has answered.
    fn answered(&self) -> Value {
        let stream = TcpStream::connect(self.address).unwrap();
        let response = http_client::send(stream, "GET", "/_fakellm/stats", &[], b"").unwrap().finish().unwrap();
        response.json()["by_rule"].clone()
    }
}

impl Drop for FakeLlm {
    fn drop(&mut self) {
        let ended = self.process.kill().and_then(|()| self.process.wait());
        if let Err(error) = ended {
            eprintln!("fakellm cannot be ended: {error}");
        }
    }
}

#[test]
fn jobs_reach_their_results_with_a_public_mock_server() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let python = match python::with_module(folder, "fakellm", PACKAGE, Source::EnvironmentOnly) {
        Ok(python) => python,
        Err(reason) => return requirement::skip(&format!("no Python with the package {PACKAGE}: {reason}")),
    };
    let site = Site::new();
    let call = |a: u32, b: u32| json!({"name": "add", "arguments": {"a": a, "b": b}});
    // The first rule that fits answers; JSON is YAML.
    let rules = json!({"rules": [
        {"name": "answer", "when": {"tool_result_contains": "\"sum\":9"}, "respond": {"content": "{\"sum\": 9}"}},
        {"name": "second", "when": {"tool_result_contains": "\"sum\":5"}, "respond": {"tool_calls": [call(5, 4)]}},
        {"name": "first", "when": {"tools_include": "add"}, "respond": {"tool_calls": [call(2, 3), call(1, 1)]}},
    ]});
    let server = FakeLlm::start(&python, &site.write("fakellm.yaml", rules.to_string().as_bytes()));
    site.python_tool("add", "[execution]\nread_only = true", "reply({'sum': arguments['a'] + arguments['b']})");
    let providers = ["openai", "anthropic"];
    for provider in providers {
        let base_url = format!("http://{}/v1", server.address);
        let model = format!("[model]\nprovider = \"{provider}\"\nbase_url = \"{base_url}\"\nmodel = \"m\"\n");
        site.agent_with_model(provider, &model, &["add"], "");
    }
    let daemon = Daemon::start(&site);
    for (number, provider) in (1..).zip(providers) {
        // The server tells conversations apart by the first thing that is said in them.
        let id = daemon.submit(&json!({"version": 1, "agent": provider, "goal": {"key": provider}}));
        let result = daemon.result(&id);
        assert_eq!(result["data"], json!({"sum": 9}), "{provider}: {result}");
        assert_eq!(result["usage"]["tool_calls"], 3, "{provider}: {result}");
        assert_eq!(server.answered(), json!({"first": number, "second": number, "answer": number}), "{provider}");
    }
    daemon.stop();
}
