//! The probe, inside a sandbox under each policy: what must be refused is refused, and its allowed twin is allowed.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use agentd_tests::daemon::{Daemon, shown};
use agentd_tests::outside::Outside;
use agentd_tests::site::{Site, ToolText, chmod};
use agentd_tests::{needs, programs, requirement, warm};
use nix::sys::stat::Mode;
use serde_json::{Value, json};

/// A workspace with the probe in it, and a symlink to the host's secret.
fn workspace(site: &Site, name: &str) -> PathBuf {
    let path = site.workspace(name, 0, 0);
    let probe = path.join("probe");
    programs::copy(&programs::find("probe"), &probe);
    fs::write(path.join("readable"), "x").unwrap();
    symlink(site.path("secret"), path.join("planted")).unwrap();
    path
}

/// Whatever may lie in a workspace that somebody else has filled.
fn make_hostile(path: &Path) {
    symlink("/etc/shadow", path.join("shadow")).unwrap();
    symlink("..", path.join("up")).unwrap();
    symlink("loop", path.join("loop")).unwrap();
    nix::unistd::mkfifo(&path.join("fifo"), Mode::from_bits_truncate(0o666)).unwrap();
    drop(UnixListener::bind(path.join("socket")).unwrap());
    fs::File::create(path.join("sparse")).unwrap().set_len(64 << 20).unwrap();
    fs::write(path.join(OsStr::from_bytes(b"not\xffutf8")), "x").unwrap();
    fs::write(path.join("two\nlines"), "x").unwrap();
    fs::write(path.join("-rf"), "x").unwrap();
    fs::create_dir(path.join("closed")).unwrap();
    fs::write(path.join("closed/inside"), "x").unwrap();
    chmod(&path.join("closed"), 0o000);
    fs::write(path.join("setuid"), "#!/bin/sh\nid -u\n").unwrap();
    chmod(&path.join("setuid"), 0o4755);
    let mut deep = path.to_owned();
    for _ in 0..60 {
        deep.push("d");
    }
    fs::create_dir_all(deep).unwrap();
}

/// The table of attempts: name → what is wanted.
fn table() -> BTreeMap<String, Value> {
    let output = Command::new(programs::find("probe")).arg("list").output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["name"].as_str().unwrap().to_owned(), line)).collect()
}

fn outcomes(output: &Output) -> BTreeMap<String, Value> {
    assert!(output.status.success(), "{}", shown(output));
    let text = String::from_utf8_lossy(&output.stdout);
    let lines =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|_| panic!("{}", shown(output))));
    lines.map(|line| (line["name"].as_str().unwrap().to_owned(), line)).collect()
}

/// Whether an outcome is the one that the table wants.
fn is_wanted(wanted: &Value, outcome: &Value) -> bool {
    match (wanted["wanted"].as_str(), outcome["outcome"].as_str()) {
        (Some("allowed"), Some("allowed")) => true,
        (Some("refused"), Some("refused")) => match outcome["errno"].as_i64() {
            Some(errno) => wanted["by"].as_array().unwrap().iter().any(|one| one.as_i64() == Some(errno)),
            None => true,
        },
        _ => false,
    }
}

/// What a policy does not offer, by the prefix of the attempts' names.
fn without(policy: &str) -> &'static [&'static str] {
    match policy {
        "strict" => &["workspace:", "loopback:", "egress:"],
        "out" => &[],
        _ => &["egress:"],
    }
}

fn assert_all_as_wanted(policy: &str, seen: &BTreeMap<String, Value>) {
    let table = table();
    let mut wrong = Vec::new();
    let mut refusals = 0;
    for (name, wanted) in &table {
        if without(policy).iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let outcome = seen.get(name).unwrap_or_else(|| panic!("{name} was not tried"));
        if !is_wanted(wanted, outcome) {
            wrong.push(format!("{name}: wanted {}, got {outcome}", wanted["wanted"]));
        }
        if let Some(twin) = wanted["twin"].as_str() {
            assert!(table.contains_key(twin), "{name} has no twin {twin}");
            refusals += 1;
        }
    }
    assert!(wrong.is_empty(), "under policy {policy}:\n{}", wrong.join("\n"));
    assert!(refusals >= 150, "only {refusals} refusals were tried");
}

fn probe_under(policy: &str) {
    needs!(requirement::root());
    let site = Site::new();
    let outside = Outside::new(&site);
    let workspace = workspace(&site, "probed");
    let daemon = Daemon::start(&site);
    let options = ["--policy", policy, "--workspace", workspace.to_str().unwrap(), "--timeout", "120s"];
    let leave = daemon.exec(&options, &["/workspace/probe", "run", "{}", "leave_files_for_the_next_call"], b"");
    assert!(shown(&leave).contains("allowed"), "{}", shown(&leave));
    let output = daemon.exec(&options, &["/workspace/probe", "run", &outside.json()], b"");
    assert_all_as_wanted(policy, &outcomes(&output));
    daemon.stop();
}

#[test]
fn strict_refuses_and_allows_what_it_should() {
    probe_under("strict");
}

#[test]
fn workspace_refuses_and_allows_what_it_should() {
    probe_under("workspace");
}

#[test]
fn build_refuses_and_allows_what_it_should() {
    probe_under("build");
}

/// With listed hosts everything else is refused as without, and the ways around lead nowhere.
#[test]
fn listed_hosts_open_nothing_else() {
    needs!(requirement::root());
    let site = Site::new();
    let outside = Outside::new(&site);
    site.configure(
        "[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n\"inner.test\" = [\"10.1.2.3\"]\n\"meta.test\" = [\"169.254.169.254\"]\n",
    );
    let policy = format!(
        "version = 1\nname = \"out\"\nextends = \"network\"\nadhoc = true\nnetwork_allow = [\"*:*\", \"{}\"]\n",
        outside.listed.rule()
    );
    site.write("policies/out.toml", policy.as_bytes());
    let workspace = workspace(&site, "probed");
    let daemon = Daemon::start(&site);
    let hosts = ["web.test", "inner.test", "meta.test"].map(|name| format!("{name}:{}", outside.listed.port()));
    let mut options = vec!["--policy", "out", "--workspace", workspace.to_str().unwrap(), "--timeout", "120s"];
    options.extend(hosts.iter().flat_map(|host| ["--network", host]));
    let leave = daemon.exec(&options, &["/workspace/probe", "run", "{}", "leave_files_for_the_next_call"], b"");
    assert!(shown(&leave).contains("allowed"), "{}", shown(&leave));
    let output = daemon.exec(&options, &["/workspace/probe", "run", &outside.json()], b"");
    assert_all_as_wanted("out", &outcomes(&output));
    // A connection that was cut off is seen as such.
    let asked: Vec<String> = outside.listed.seen().into_iter().filter(|line| !line.starts_with("error:")).collect();
    assert_eq!(asked, ["GET / HTTP/1.1 web.test"], "nothing but the allowed request gets out");
    daemon.stop();
}

/// The probe as a tool whose process is started before its call, and with it before its workspace is there.
fn probe_ahead(policy: &str, configuration: &str, sandbox: &str) {
    needs!(requirement::root());
    let site = Site::new();
    let outside = Outside::new(&site);
    site.configure(configuration);
    let ceiling = format!(
        "version = 1\nname = \"out\"\nextends = \"network\"\nnetwork_allow = [\"*:*\", \"{}\"]\n",
        outside.listed.rule()
    );
    site.write("policies/out.toml", ceiling.as_bytes());
    let hosts = sandbox.replace("PORT", &outside.listed.port().to_string());
    let manifest = format!("[timeout]\nafter = \"300s\"\n\n[sandbox]\npolicy = \"{policy}\"\n{hosts}\n");
    let code = b"#!/bin/sh\nexec /tool/probe serve\n";
    site.tool(&ToolText { name: "probe", runtime: "exec", entry: "run", code, manifest: &manifest });
    programs::copy(&programs::find("probe"), &site.path("config/tools/probe/probe"));
    warm::prewarm(&site, "probe", 1);
    let workspace = workspace(&site, "probed");
    let daemon = Daemon::start(&site);
    let call = |arguments: Value| -> (Value, String) {
        let body = json!({"version": 1, "tool": "probe", "arguments": arguments, "workspace": workspace});
        let reply = daemon.post("/v1/calls", &body).json();
        let payload = data_encoding::BASE64.decode(reply["receipt"]["payload"].as_str().unwrap().as_bytes()).unwrap();
        let statement: Value = serde_json::from_slice(&payload).unwrap();
        let cgroup = statement["predicate"]["evidence"]["record"]["cgroup"].to_string();
        (reply, cgroup)
    };
    let (left, _) = call(json!({"facts": {}, "names": ["leave_files_for_the_next_call"]}));
    assert_eq!(left["result"]["lines"][0]["outcome"], "allowed", "{left}\n{}", daemon.log());
    warm::wait_for_ready(&site, 1);
    let (reply, cgroup) = call(json!({"facts": outside.facts}));
    assert!(cgroup.contains("direct-0.slice/warm-"), "{cgroup}\n{}", daemon.log());
    let lines = reply["result"]["lines"].as_array().unwrap_or_else(|| panic!("{reply}\n{}", daemon.log()));
    let seen = lines.iter().map(|line| (line["name"].as_str().unwrap().to_owned(), line.clone())).collect();
    assert_all_as_wanted(policy, &seen);
    daemon.stop();
}

#[test]
fn started_ahead_strict_refuses_and_allows_what_it_should() {
    probe_ahead("strict", "", "");
}

#[test]
fn started_ahead_workspace_refuses_and_allows_what_it_should() {
    probe_ahead("workspace", "", "");
}

#[test]
fn started_ahead_listed_hosts_open_nothing_else() {
    let names = "[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n\"inner.test\" = [\"10.1.2.3\"]\n\"meta.test\" = [\"169.254.169.254\"]\n";
    probe_ahead("out", names, "hosts = [\"web.test:PORT\", \"inner.test:PORT\", \"meta.test:PORT\"]");
}

#[test]
fn a_hostile_workspace_opens_nothing() {
    needs!(requirement::root());
    let site = Site::new();
    let outside = Outside::new(&site);
    for policy in ["strict", "workspace"] {
        let workspace = workspace(&site, policy);
        make_hostile(&workspace);
        let daemon = Daemon::start(&site);
        let path = workspace.to_str().unwrap();
        let options = ["--policy", policy, "--workspace", path, "--timeout", "120s"];
        let output = daemon.exec(&options, &["/workspace/probe", "run", &outside.json()], b"");
        assert_all_as_wanted(policy, &outcomes(&output));
        let look = "cat /workspace/shadow /workspace/up/etc/shadow && exit 9; cat /workspace/readable && test $(/workspace/setuid) = $(id -u)";
        let output = daemon.exec(&options, &["sh", "-c", look], b"");
        assert!(output.status.success(), "{}", shown(&output));
        daemon.stop();
    }
}

/// The attempts are worth something only if they come through where nothing stands in their way.
#[test]
fn outside_a_sandbox_the_same_attempts_come_through() {
    needs!(requirement::root(), requirement::program("/usr/bin/setpriv"), requirement::program("/usr/bin/unshare"));
    let site = Site::new();
    let outside = Outside::new(&site);
    let probe = site.path("probe");
    programs::copy(&programs::find("probe"), &probe);
    // Its own places for what the attempts write.
    let script = "mount -t tmpfs none /dev/shm && cp \"$1\" /dev/shm/probe && cp \"$2\" /dev/shm/secret && mount -t tmpfs -o mode=1777 none /tmp && cd /tmp && \
                  exec setpriv --reuid 65534 --regid 65534 --clear-groups /dev/shm/probe run \"$3\"";
    let mut facts = outside.facts.clone();
    facts.insert("secret".to_owned(), "/dev/shm/secret".to_owned());
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
    command.arg(&probe).arg(site.path("secret")).arg(json!(facts).to_string());
    let seen = outcomes(&command.output().unwrap());
    let wanted = table();
    let through: Vec<&String> = seen
        .iter()
        .filter(|(name, outcome)| wanted[*name]["wanted"] == "refused" && !is_wanted(&wanted[*name], outcome))
        .map(|(name, _)| name)
        .collect();
    for name in [
        "read_host_secret",
        "signal_host_process",
        "see_host_processes",
        "clone3",
        "reach_a_port_of_the_host",
        "reach_an_abstract_socket_of_the_host",
        "find_shared_memory_of_the_host",
        "find_message_queue_of_the_host",
        "share_a_namespace_with_the_host",
        "use_the_keyring",
        "push_terminal_input_with_high_bits",
        "run_unfiltered",
        "call_by_the_old_gate",
    ] {
        // The kernel itself lets nobody signal root's processes.
        if name != "signal_host_process" {
            assert!(through.iter().any(|one| *one == name), "{name} is refused outside too: {:?}", seen.get(name));
        }
    }
    assert!(through.len() >= 50, "only {} come through outside: {through:?}", through.len());
}
