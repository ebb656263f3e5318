//! `agentctl tools check` against a real daemon: the tools that were written from the specification alone, those that use
//! an SDK, and tools that break the protocol.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use agentd_tests::daemon::{Daemon, listing, shown};
use agentd_tests::far_end::FarEnd;
use agentd_tests::site::{Site, ToolText, chmod};
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

/// Copies are made in the site's workspaces: the only root beneath which its daemon takes workspaces.
fn check(daemon: &Daemon<'_>, folder: &Path) -> (Output, Value) {
    let output = daemon
        .agentctl(&["--json", "tools", "check"])
        .arg(folder)
        .env("TMPDIR", daemon.site().path("work"))
        .output()
        .expect("agentctl runs");
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("no report: {}", shown(&output)));
    (output, report)
}

fn assert_passes(daemon: &Daemon<'_>, folder: &Path) {
    let (output, report) = check(daemon, folder);
    assert_eq!(report["passed"], json!(true), "{}: {report:#}", folder.display());
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    let findings: Vec<&Value> =
        report["probes"].as_array().unwrap().iter().flat_map(|probe| probe["findings"].as_array().unwrap()).collect();
    // A request of another protocol may be answered; nothing else may be remarked upon.
    assert!(findings.len() <= 1, "{}: {findings:?}", folder.display());
    assert!(report["probes"].as_array().unwrap().len() >= 10, "{report:#}");
}

#[test]
fn tools_written_from_the_specification_alone_pass() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"), requirement::program("/usr/bin/perl"));
    let site = Site::new();
    let daemon = Daemon::start(&site);
    for name in ["line_count", "word_frequency", "json_pick"] {
        assert_passes(&daemon, &examples().join("tools").join(name));
    }
    let compiled = site.path("checksum");
    let copied = Command::new("cp").arg("-r").arg(examples().join("tools/checksum")).arg(&compiled).status();
    assert!(copied.expect("cp runs").success());
    let built = Command::new("cc").current_dir(&compiled).args(["-O2", "-o", "checksum", "checksum.c"]).status();
    assert!(built.expect("cc runs").success());
    assert_passes(&daemon, &compiled);
    assert_eq!(listing(&site.path("work")), [".agentd-staging"], "workspaces of checks are left");
    daemon.stop();
}

#[test]
fn a_tool_with_the_python_sdk_passes() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../toolproto/sdk/python/agentd_tool.py");
    let code = b"from agentd_tool import run\nprint('a stray print')\nrun(lambda arguments, context: {'n': 2**60})\n";
    site.tool(&ToolText { name: "sdk", runtime: "python", entry: "main.py", code, manifest: "" });
    site.write("config/tools/sdk/agentd_tool.py", &fs::read(sdk).unwrap());
    let daemon = Daemon::start(&site);
    let (_, report) = check(&daemon, &site.path("config/tools/sdk"));
    // It prints before the library has taken stdout: tolerated, and remarked upon.
    assert_eq!(report["passed"], json!(true), "{report:#}");
    daemon.stop();
}

#[test]
fn a_tool_that_lists_hosts_is_checked_with_them_when_asked() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let web = FarEnd::http();
    let site = Site::new();
    site.configure("[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n");
    let policy = format!(
        "version = 1\nname = \"out\"\nextends = \"network\"\nadhoc = true\nnetwork_allow = [\"{}\"]\n",
        web.rule()
    );
    site.write("policies/out.toml", policy.as_bytes());
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../toolproto/sdk/python/agentd_tool.py");
    let host = format!("web.test:{}", web.port());
    let code = format!(
        "import urllib.request\nfrom agentd_tool import run\n\
         run(lambda arguments, context: {{'n': urllib.request.urlopen('http://{host}/').status}})\n"
    );
    let manifest = format!("[sandbox]\npolicy = \"out\"\nhosts = [\"{host}\"]\n");
    let (name, runtime, entry) = ("asks", "python", "main.py");
    site.tool(&ToolText { name, runtime, entry, code: code.as_bytes(), manifest: &manifest });
    site.write("config/tools/asks/agentd_tool.py", &fs::read(sdk).unwrap());
    let daemon = Daemon::start(&site);
    let check = |options: &[&str]| {
        let mut command = daemon.agentctl(&["tools", "check"]);
        command.arg(site.path("config/tools/asks")).args(options).env("TMPDIR", site.path("work"));
        command.output().unwrap()
    };
    let without = check(&["--policy", "out"]);
    assert!(web.seen().is_empty(), "{}", shown(&without));
    let with = check(&["--policy", "out", "--network"]);
    assert!(!web.seen().is_empty(), "{}", shown(&with));
    let refused = check(&["--network"]);
    assert!(shown(&refused).contains("policy `workspace` lets nobody out"), "{}", shown(&refused));
    daemon.stop();
}

#[test]
fn what_breaks_the_protocol_is_named() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    let tool = |name: &str, manifest: &str, code: &str| {
        site.tool(&ToolText { name, runtime: "exec", entry: "main.sh", code: code.as_bytes(), manifest });
        chmod(&site.path(&format!("config/tools/{name}/main.sh")), 0o755);
    };
    tool(
        "deaf",
        "",
        "#!/bin/sh\necho '{\"protocol\":1,\"call_id\":\"00000000000000000000000000\",\"ok\":true,\"result\":{}}'\n",
    );
    tool("slow", "[timeout]\nafter = \"1s\"\n", "#!/bin/sh\nexec sleep 100\n");
    tool("writes", "[execution]\nread_only = true\n", "#!/bin/sh\ncat >/dev/null\ntouch mark\necho '{}'\n");
    tool("agrees", "", "#!/bin/sh\ncat >/dev/null\necho '{}'\n");
    let daemon = Daemon::start(&site);
    for (name, expected) in [
        ("deaf", "/call_id"),
        ("slow", "did not end within 1s"),
        ("writes", "changed mark in the workspace"),
        ("agrees", "an operation that does not exist"),
    ] {
        let (output, report) = check(&daemon, &site.path("config/tools").join(name));
        assert_eq!(report["passed"], json!(false), "{name}: {report:#}");
        assert!(report.to_string().contains(expected), "{name}: {report:#}");
        assert_eq!(output.status.code(), Some(1), "{name}");
    }
    let missing = daemon.agentctl(&["tools", "check", "/nowhere"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2), "{}", shown(&missing));
    daemon.stop();
}
