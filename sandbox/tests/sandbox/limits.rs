//! Limits that only cgroup version 2 controllers keep. A host without them leaves these to a guest that has them and runs
//! the same program.

use sandbox::host::Mechanism;
use sandbox::launch::Exit;
use sandbox::policy::CallLimits;
use toolproto::units::Bytes;

use crate::harness::{Sandbox, Test, host, modest_limits, sh, tree_of};

const TESTS: &[Test] = &[
    ("limits::memory_is_limited_and_the_cause_is_named", memory_is_limited_and_the_cause_is_named),
    ("limits::a_full_call_dies_as_a_whole", a_full_call_dies_as_a_whole),
    ("limits::files_in_memory_count", files_in_memory_count),
    ("limits::processes_are_limited_and_the_cause_is_named", processes_are_limited_and_the_cause_is_named),
    ("limits::processor_time_is_shared_out", processor_time_is_shared_out),
    ("limits::runtimes_see_their_limits", runtimes_see_their_limits),
    ("limits::figures_come_from_the_cgroup", figures_come_from_the_cgroup),
    ("limits::no_dying_cgroups_pile_up", no_dying_cgroups_pile_up),
];

/// These tests where the host can keep limits, none elsewhere: a test that did nothing would count as passed.
pub(crate) fn selected() -> &'static [Test] {
    let needed = [Mechanism::CgroupMemory, Mechanism::CgroupPids, Mechanism::CgroupCpu];
    let Some(reason) = needed.into_iter().find_map(|mechanism| host().missing(mechanism)) else { return TESTS };
    println!("not selected, for want of controllers: {} tests of limits ({reason})", TESTS.len());
    &[]
}

fn with_memory(mib: u64) -> CallLimits {
    CallLimits { memory: Some(Bytes::mib(mib)), swap: Some(Bytes(0)), ..modest_limits() }
}

fn fill(mib: u64) -> String {
    format!("x = bytearray({mib} << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint(\"filled\", flush=True)")
}

fn memory_is_limited_and_the_cause_is_named() {
    let python = |mib| Sandbox::new("workspace", &["/usr/bin/python3", "-c", &fill(mib)]).limits(with_memory(96)).run();
    let output = python(32);
    assert_eq!(output.success(), "filled");
    assert_eq!(output.finished.events.oom_kills, 0);
    let output = python(256);
    assert_eq!(output.exit, Ok(Exit::Signal(libc::SIGKILL)));
    assert!(output.finished.events.oom_kills > 0, "{output:?}");
    let named =
        output.finished.denied.iter().any(|denial| denial.what == "limit" && denial.detail.starts_with("memory"));
    assert!(named, "{output:?}");
}

fn a_full_call_dies_as_a_whole() {
    // The shell does nothing wrong, but half a call is worth nothing.
    let script = format!("/usr/bin/python3 -c '{}'; echo survived", fill(256));
    let output = sh("workspace", &script).limits(with_memory(96)).run();
    assert_eq!((output.exit, output.stdout.as_str()), (Ok(Exit::Signal(libc::SIGKILL)), ""));
}

fn files_in_memory_count() {
    let mut limits = with_memory(64);
    limits.tmp = Bytes::mib(512);
    let write = |mib: u32| {
        sh("workspace", &format!("dd if=/dev/zero of=/tmp/x bs=1M count={mib}")).limits(limits.clone()).run()
    };
    assert!(write(16).is_success());
    let output = write(256);
    assert!(!output.is_success() && output.finished.events.oom_kills > 0, "{output:?}");
}

fn processes_are_limited_and_the_cause_is_named() {
    let limits = CallLimits { pids: Some(10), ..modest_limits() };
    let fork = |count: u32| {
        let script =
            format!("import os, time\nfor _ in range({count}):\n  if os.fork() == 0: time.sleep(600)\nprint('done')");
        Sandbox::new("workspace", &["/usr/bin/python3", "-c", &script]).limits(limits.clone()).run()
    };
    assert_eq!(fork(9).success(), "done");
    let output = fork(10);
    assert!(output.stderr.contains("BlockingIOError"), "{output:?}");
    assert!(output.finished.events.forks_refused > 0, "{output:?}");
    assert!(output.finished.denied.iter().any(|denial| denial.rule == "[limits] pids"), "{output:?}");
}

fn processor_time_is_shared_out() {
    let spin = "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass";
    let share = |cpu_milli| {
        let limits = CallLimits { cpu_milli: Some(cpu_milli), ..modest_limits() };
        let usage = Sandbox::new("workspace", &["/usr/bin/python3", "-c", spin]).limits(limits).run().finished.usage;
        usage.cpu_usec as f64 / (usage.wall_ms as f64 * 1000.0)
    };
    let (whole, fifth) = (share(1000), share(200));
    assert!(fifth < 0.3, "a fifth of a processor came out as {fifth}");
    assert!(whole > 1.5 * fifth, "a whole one as {whole}, a fifth as {fifth}");
}

fn runtimes_see_their_limits() {
    let limits = |mib| CallLimits { memory: Some(Bytes::mib(mib)), ..modest_limits() };
    let java = |mib| {
        let flags = sh("workspace", "java -XX:+PrintFlagsFinal -version 2>/dev/null | grep -w MaxHeapSize")
            .limits(limits(mib))
            .run();
        flags.success().split_whitespace().nth(3).unwrap().parse::<u64>().unwrap()
    };
    if std::path::Path::new("/usr/bin/java").exists() {
        assert_eq!(
            (java(512), java(1024)),
            (128 << 20, 256 << 20),
            "a quarter of the call's memory, whatever the host has"
        );
    }
    let seen = sh("workspace", "cat /sys/fs/cgroup/memory.max").limits(limits(512)).run();
    assert_eq!(seen.success(), (512 << 20).to_string());
    if std::path::Path::new("/usr/bin/node").exists() {
        let output = sh("workspace", "node -p 'process.constrainedMemory()'").limits(limits(512)).run();
        assert_eq!(output.success(), (512 << 20).to_string());
    }
}

fn figures_come_from_the_cgroup() {
    // Children that nobody waited for count as well, which rusage would not show.
    let script = format!(
        "setsid /usr/bin/python3 -c '{}; import time; time.sleep(600)' > /tmp/out & sleep 60 & sleep 60 &\n\
         until grep -q filled /tmp/out; do sleep 0.1; done",
        fill(48)
    );
    let usage = sh("workspace", &script).run().finished.usage;
    assert!(usage.memory_peak.unwrap() > 48 << 20, "{usage:?}");
    if let Some(peak) = usage.pids_peak {
        assert!((4..=8).contains(&peak), "{usage:?}");
    }
}

fn no_dying_cgroups_pile_up() {
    let tree = tree_of(std::process::id());
    let dying = || -> u64 {
        let stat = std::fs::read_to_string(tree.path().join("cgroup.stat")).unwrap();
        stat.lines().find_map(|line| line.strip_prefix("nr_dying_descendants ")).unwrap().parse().unwrap()
    };
    let run = |count| {
        (0..count).for_each(|_| assert!(sh("workspace", "echo x > /tmp/x").limits(with_memory(64)).run().is_success()))
    };
    run(10);
    let before = dying();
    for hundred in 1..=10 {
        run(100);
        // An emulated machine needs minutes for all; whoever waits sees that it goes on.
        println!("{hundred}00 calls, {} dying cgroups", dying());
    }
    let after = dying();
    assert!(after < before + 30, "{before} dying cgroups before, {after} after 1,000 more calls");
}
