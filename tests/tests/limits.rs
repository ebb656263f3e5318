//! Limits that only cgroup v2 controllers can keep. `cargo xtask guest` runs these in a virtual machine that has them, so
//! that they need not be skipped anywhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, shown};
use agentd_tests::leftovers;
use agentd_tests::site::Site;
use serde_json::{Value, json};

/// # Panics
/// Where the host cannot keep the limits: these tests are only run where it can.
fn started(site: &Site) -> Daemon<'_> {
    agentd_tests::requirement::cgroup_controllers().unwrap();
    Daemon::start_with(site, &["--limits", "required"])
}

fn predicate(reply: &Value) -> Value {
    let payload = reply["receipt"]["payload"].as_str().unwrap_or_else(|| panic!("{reply}"));
    let bytes = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
    let statement: Value = serde_json::from_slice(&bytes).unwrap();
    statement["predicate"].clone()
}

#[test]
fn memory_over_the_limit_is_named_and_below_it_allowed() {
    let site = Site::new();
    let body =
        "x = bytearray(arguments['mib'] << 20)\nfor at in range(0, len(x), 4096): x[at] = 1\nreply({'kept': len(x)})";
    site.python_tool("hoards", "[limits]\nmemory = \"96MiB\"\n[timeout]\ntier = \"build\"", body);
    let daemon = started(&site);
    let reply = daemon.call("hoards", &json!({"mib": 300}));
    assert_eq!(reply["error"]["code"], "OUT_OF_MEMORY", "{reply}");
    let receipt = predicate(&reply);
    assert_eq!(receipt["outcome"]["code"], "OUT_OF_MEMORY", "{receipt}");
    assert_eq!(receipt["not_enforced"], json!([]), "{receipt}");
    let reply = daemon.call("hoards", &json!({"mib": 40}));
    assert_eq!(reply["ok"], true, "the twin: {reply}");
    let peak = predicate(&reply)["usage"]["memory_peak"].as_u64().unwrap();
    assert!((40 << 20..=96 << 20).contains(&peak), "{peak}");
    // A shell whose child is killed would go on; the whole call must not.
    site.write("policies/small.toml", b"version = 1\nname = \"small\"\nextends = \"strict\"\nadhoc = true\n[limits]\nwhy = \"a test\"\nmemory = \"64MiB\"\n");
    daemon.stop();
    let daemon = started(&site);
    let output = daemon.exec(&["--policy", "small"], &["cat", "/sys/fs/cgroup/memory.max"], b"");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), (64 << 20).to_string(), "{}", shown(&output));
    let hoard = "python3 -c 'x = bytearray(300 << 20)'; echo survived";
    let output = daemon.exec(&["--policy", "small", "--timeout", "120s"], &["sh", "-c", hoard], b"");
    assert_eq!(output.status.code(), Some(137), "{}", shown(&output));
    assert!(!shown(&output).contains("survived"));
    daemon.stop();
}

#[test]
fn processes_over_the_limit_are_named_and_below_it_allowed() {
    let site = Site::new();
    let body = "import subprocess\nchildren = [subprocess.Popen(['sleep', '60']) for _ in range(arguments['children'])]\nreply({'children': len(children)})";
    site.python_tool("forks", "[limits]\npids = 12\n[timeout]\ntier = \"build\"", body);
    let daemon = started(&site);
    let reply = daemon.call("forks", &json!({"children": 40}));
    assert_eq!(reply["error"]["code"], "PROCESS_LIMIT", "{reply}");
    let reply = daemon.call("forks", &json!({"children": 5}));
    assert_eq!(reply["ok"], true, "the twin: {reply}");
    let peak = predicate(&reply)["usage"]["pids_peak"].as_u64();
    assert!(peak.is_none_or(|peak| (6..=12).contains(&peak)), "{peak:?}");
    daemon.stop();
}

#[test]
fn a_share_of_a_processor_is_a_share() {
    let site = Site::new();
    let policy = |name: &str, cpu: &str| {
        let text = format!(
            "version = 1\nname = \"{name}\"\nextends = \"strict\"\nadhoc = true\n[limits]\nwhy = \"a test\"\ncpu = \"{cpu}\"\n"
        );
        site.write(&format!("policies/{name}.toml"), text.as_bytes());
    };
    policy("slow", "0.25");
    policy("fast", "1");
    let daemon = started(&site);
    // Processor time by wall time, as the command itself sees both: of a busy machine it gets less, never more.
    let share = |policy: &str| -> f64 {
        let spin = "import time\nw, c = time.monotonic(), time.process_time()\nwhile time.monotonic() - w < 4: pass\nprint((time.process_time() - c) / (time.monotonic() - w))";
        let output = daemon.exec(&["--policy", policy, "--timeout", "120s"], &["python3", "-c", spin], b"");
        assert!(output.status.success(), "{}", shown(&output));
        String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
    };
    let (slow, fast) = (share("slow"), share("fast"));
    assert!(slow <= 0.35, "a quarter of a processor came to {slow}");
    assert!(fast >= 1.5 * slow, "{fast} against {slow}");
    daemon.stop();
}

/// A policy that extends `workspace` with limits of its own.
fn limited(site: &Site, name: &str, limits: &str) {
    let text = format!(
        "version = 1\nname = \"{name}\"\nextends = \"workspace\"\nadhoc = true\n[limits]\nwhy = \"a test\"\n{limits}\n"
    );
    site.write(&format!("policies/{name}.toml"), text.as_bytes());
}

#[test]
fn over_the_soft_limit_a_call_is_slowed_down_and_not_killed() {
    let site = Site::new();
    limited(&site, "soft", "memory = \"256MiB\"\nmemory_high = \"48MiB\"");
    let daemon = started(&site);
    let receipt = site.path("receipt.json");
    // Files that were read can be reclaimed: that is what the limit is for. Held memory could only be waited for.
    let run = |mib: u32| {
        let script = format!("dd if=/dev/zero of=/workspace/big bs=1M count={mib} 2>/dev/null && cat big > /dev/null");
        let options = ["--policy", "soft", "--timeout", "300s", "--receipt", receipt.to_str().unwrap()];
        let workspace = site.workspace(&format!("soft-{mib}"), 0, 0);
        let options = [&options[..], &["--workspace", workspace.to_str().unwrap()]].concat();
        let output = daemon.exec(&options, &["sh", "-c", &script], b"");
        assert!(output.status.success(), "nothing is killed: {}", shown(&output));
        let envelope: Value = serde_json::from_slice(&fs::read(&receipt).unwrap()).unwrap();
        predicate(&json!({ "receipt": envelope }))
    };
    let named = |receipt: &Value| receipt["denied"].to_string().contains("memory_high: processes were slowed down");
    let over = run(160);
    assert!(named(&over), "{over}");
    assert!(over["usage"]["memory_peak"].as_u64().unwrap() < 160 << 20, "{over}");
    let below = run(4);
    assert!(!named(&below), "the twin: {below}");
    daemon.stop();
}

#[test]
fn what_goes_to_a_disk_keeps_to_its_rate() {
    let site = Site::new();
    limited(&site, "slow", "io = { write = \"2MiB\", read = \"3MiB\" }");
    limited(&site, "free", "");
    let daemon = started(&site);
    let workspace = site.workspace("disk", 0, 0);
    // MiB per second as the call sees it, past the page cache: of a busy machine it gets less, never more.
    let rates = |policy: &str| -> Vec<f64> {
        let script = "import os, mmap, time\n\
                      block = mmap.mmap(-1, 1 << 20)\n\
                      def rate(flags, move):\n\
                      \x20   file = os.open('/workspace/data', flags | os.O_DIRECT, 0o600)\n\
                      \x20   began = time.monotonic()\n\
                      \x20   for _ in range(12): move(file)\n\
                      \x20   os.fsync(file)\n\
                      \x20   os.close(file)\n\
                      \x20   return 12 / (time.monotonic() - began)\n\
                      print(rate(os.O_WRONLY | os.O_CREAT, lambda file: os.write(file, block)))\n\
                      print(rate(os.O_RDONLY, lambda file: os.readv(file, [block])))";
        let options = ["--policy", policy, "--timeout", "300s", "--workspace", workspace.to_str().unwrap()];
        let output = daemon.exec(&options, &["python3", "-c", script], b"");
        assert!(output.status.success(), "{}", shown(&output));
        String::from_utf8_lossy(&output.stdout).lines().map(|line| line.parse().unwrap()).collect()
    };
    let (slow, free) = (rates("slow"), rates("free"));
    assert!(slow[0] <= 3.0, "2 MiB a second came to {} written", slow[0]);
    assert!(slow[1] <= 4.5, "3 MiB a second came to {} read", slow[1]);
    assert!(free[0] > 1.5 * slow[0] && free[1] > 1.5 * slow[1], "the twin: {free:?} against {slow:?}");
    daemon.stop();
}

/// The leaf of the only running call.
fn leaf(site: &Site) -> Option<PathBuf> {
    let root = leftovers::cgroup_root(site)?;
    leftovers::cgroups_below(&root)
        .into_iter()
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("call-")))
}

#[test]
fn the_kernel_holds_what_the_tool_and_the_agent_say() {
    let site = Site::new();
    site.python_tool(
        "waits",
        "[limits]\nmemory = \"128MiB\"\npids = 17\n[timeout]\ntier = \"build\"",
        "time.sleep(6)\nreply({})",
    );
    let daemon = started(&site);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| daemon.call("waits", &json!({})));
        eventually("the call has a cgroup", PATIENCE, || {
            leaf(&site).is_some_and(|leaf| !read(&leaf, "cgroup.procs").is_empty())
        });
        let leaf = leaf(&site).unwrap();
        assert_eq!(read(&leaf, "memory.max"), (128u64 << 20).to_string());
        assert_eq!(read(&leaf, "memory.swap.max"), "0");
        assert_eq!(read(&leaf, "memory.oom.group"), "1");
        let pids: u64 = read(&leaf, "pids.max").parse().unwrap();
        assert!((17..=18).contains(&pids), "{pids}");
        // A second reader agrees.
        let mount = Path::new("/sys/fs/cgroup");
        let relative = leaf.strip_prefix(mount).unwrap();
        let group = cgroups_rs::fs::Cgroup::load(cgroups_rs::fs::hierarchies::auto(), relative);
        let memory: &cgroups_rs::fs::memory::MemController = group.controller_of().unwrap();
        assert_eq!(memory.memory_stat().limit_in_bytes, 128 << 20);
        assert_eq!(call.join().unwrap()["ok"], true);
    });
    eventually("the call's cgroup goes", PATIENCE, || leaf(&site).is_none());
    daemon.stop();
}

fn read(leaf: &Path, file: &str) -> String {
    fs::read_to_string(leaf.join(file)).unwrap_or_default().trim().to_owned()
}

#[test]
fn many_calls_leave_the_host_as_it_was() {
    let site = Site::new();
    site.python_tool("quick", "", "reply({})");
    let daemon = started(&site);
    let root = leftovers::cgroup_root(&site).unwrap();
    let dying = || {
        let text = fs::read_to_string(root.join("cgroup.stat")).unwrap();
        text.lines().find_map(|line| line.strip_prefix("nr_dying_descendants ")?.parse::<u64>().ok()).unwrap()
    };
    let held = || fs::read_dir(format!("/proc/{}/fd", daemon.launcher_pid())).unwrap().count();
    // Whoever calls has the answer before the launcher has cleared away what the call's sandbox was, and when it is not asked
    // for anything it makes networks ahead.
    let descriptors = || {
        let mut before = held();
        eventually("the launcher comes to rest", PATIENCE, || {
            std::thread::sleep(Duration::from_millis(200));
            std::mem::replace(&mut before, held()) == before
        });
        before
    };
    let round = || {
        for _ in 0..25 {
            assert_eq!(daemon.call("quick", &json!({}))["ok"], true);
        }
    };
    let calls = || {
        let below = leftovers::cgroups_below(&root);
        below.into_iter().filter(|path| path.to_string_lossy().contains("call-")).count()
    };
    round();
    let (dying_before, descriptors_before) = (dying(), descriptors());
    let processes = leftovers::site_processes(&site).len();
    for _ in 0..2 {
        round();
    }
    let descriptors_after = descriptors();
    assert!(descriptors_after <= descriptors_before + 2, "{descriptors_before} became {descriptors_after}");
    assert!(leftovers::site_processes(&site).len() <= processes + 1);
    assert_eq!(calls(), 0);
    // Dying cgroups go when the kernel gets to it; that they pile up with the number of calls would be the fault.
    eventually("the dying cgroups go", PATIENCE, || dying() <= dying_before + 30);
    daemon.stop();
}
