//! Birth, end and failure of sandboxes, looked at from outside.

use std::time::{Duration, Instant};

use sandbox::host::{LimitsMode, Mechanism};
use sandbox::launch::Exit;
use toolproto::code::Code;
use toolproto::receipt::MemorySource;

use crate::harness::{Sandbox, Test, host, modest_limits, sh, tree_of, wait_for_exec};

pub(crate) const TESTS: &[Test] = &[
    ("lifecycle::statuses_and_signals_are_told_apart", statuses_and_signals_are_told_apart),
    ("lifecycle::a_missing_program_is_a_failed_exec", a_missing_program_is_a_failed_exec),
    ("lifecycle::a_failing_step_is_named", a_failing_step_is_named),
    ("lifecycle::daemons_do_not_outlive_the_call", daemons_do_not_outlive_the_call),
    ("lifecycle::stopped_and_deaf_processes_are_killed", stopped_and_deaf_processes_are_killed),
    ("lifecycle::the_deadline_sends_sigterm_first", the_deadline_sends_sigterm_first),
    ("lifecycle::without_a_cgroup_the_pid_namespace_ends_all", without_a_cgroup_the_pid_namespace_ends_all),
    ("lifecycle::fork_storms_are_bounded", fork_storms_are_bounded),
    ("lifecycle::the_death_of_the_launcher_ends_all", the_death_of_the_launcher_ends_all),
    ("lifecycle::usage_is_measured", usage_is_measured),
    ("lifecycle::many_calls_leave_nothing", many_calls_leave_nothing),
    ("lifecycle::required_limits_refuse_a_lesser_host", required_limits_refuse_a_lesser_host),
];

fn statuses_and_signals_are_told_apart() {
    assert_eq!(sh("workspace", "exit 42").run().exit, Ok(Exit::Status(42)));
    assert_eq!(sh("workspace", "kill -SEGV $$").run().exit, Ok(Exit::Signal(libc::SIGSEGV)));
    assert_eq!(sh("workspace", "true").run().exit, Ok(Exit::Status(0)));
}

fn a_missing_program_is_a_failed_exec() {
    for (command, errno) in [("no-such-program", libc::ENOENT), ("/etc/passwd", libc::EACCES), ("/usr", libc::EACCES)] {
        let failure = Sandbox::new("workspace", &[command]).run().exit.unwrap_err();
        assert_eq!(
            (failure.code, failure.step.as_str(), failure.errno),
            (Code::LaunchFailed, "exec", Some(errno)),
            "{command}"
        );
    }
    assert!(Sandbox::new("workspace", &["true"]).run().is_success());
}

fn a_failing_step_is_named() {
    let mut limits = modest_limits();
    limits.open_files = u64::MAX >> 1;
    let failure = sh("workspace", "true").limits(limits).run().exit.unwrap_err();
    assert_eq!((failure.step.as_str(), failure.errno), ("rlimits", Some(libc::EPERM)));

    let failure = sh("workspace", "true").tool_folder("/no/such/folder".as_ref()).run().exit.unwrap_err();
    assert_eq!((failure.step.as_str(), failure.errno), ("mounts", Some(libc::ENOENT)));
    assert!(sh("workspace", "true").tool_folder("/usr/share".as_ref()).run().is_success());
}

/// Every process of the host that has this uid.
fn processes_of(uid: u32) -> Vec<String> {
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("status")).ok())
        .filter(|status| {
            status
                .lines()
                .any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(1) == Some(&uid.to_string()))
        })
        .collect()
}

fn daemons_do_not_outlive_the_call() {
    let script = "setsid sh -c 'sleep 600 & sleep 600 & exec 0<&- 1>&- 2>&-; sleep 600' & sleep 0.2; echo done";
    let output = sh("workspace", script).run();
    assert_eq!(output.success(), "done");
    assert!(!output.timed_out);
    assert_eq!(processes_of(output.sandbox_id), Vec::<String>::new());
}

fn stopped_and_deaf_processes_are_killed() {
    for script in [
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "kill -STOP $$",
        "(trap '' TERM; sleep 600) & exec sleep 600",
    ] {
        let began = Instant::now();
        let output = sh("workspace", script).deadline(Duration::from_millis(500)).run();
        assert!(output.timed_out);
        assert!(matches!(output.exit, Ok(Exit::Signal(libc::SIGKILL | libc::SIGTERM))), "{script}: {:?}", output.exit);
        assert!(began.elapsed() < Duration::from_secs(20));
        assert_eq!(processes_of(output.sandbox_id), Vec::<String>::new());
    }
}

fn the_deadline_sends_sigterm_first() {
    let script = "trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let output = sh("workspace", script).deadline(Duration::from_secs(3)).run();
    assert!(output.timed_out);
    assert_eq!((output.exit, output.stdout.as_str()), (Ok(Exit::Status(3)), "ready\nasked\n"));
}

fn without_a_cgroup_the_pid_namespace_ends_all() {
    let output = sh("workspace", "setsid sleep 600 & echo done").without_cgroup().run();
    assert_eq!(output.success(), "done");
    assert_eq!(output.finished.cgroup, None);
    let output = sh("workspace", "trap '' TERM; sleep 600 & while :; do sleep 1; done").without_cgroup();
    let output = output.deadline(Duration::from_millis(300)).run();
    assert_eq!(output.exit, Ok(Exit::Signal(libc::SIGKILL)));
    assert_eq!(processes_of(output.sandbox_id), Vec::<String>::new());
}

fn fork_storms_are_bounded() {
    let mut limits = modest_limits();
    limits.pids = Some(20);
    let script = "import os, time\nn = 0\ntry:\n  while n < 200:\n    if os.fork() == 0: time.sleep(600); os._exit(0)\n    n += 1\n\
                  except OSError as error: print(n, error.errno)";
    let output = Sandbox::new("workspace", &["python3", "-c", script]).limits(limits).run();
    assert_eq!(output.success(), format!("19 {}", libc::EAGAIN));
    assert_eq!(processes_of(output.sandbox_id), Vec::<String>::new());
}

fn the_death_of_the_launcher_ends_all() {
    // This program once more, as the launcher of one sandbox.
    let this = std::env::current_exe().unwrap();
    let mut launcher =
        std::process::Command::new(this).arg(PLAY_LAUNCHER).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(launcher.stdout.take().unwrap()), &mut line).unwrap();
    let uid: u32 = line.trim().parse().unwrap();
    assert!(processes_of(uid).len() >= 4, "PID 1, the shell and its two children run");
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let longest = Instant::now() + Duration::from_secs(20);
    while !processes_of(uid).is_empty() {
        assert!(Instant::now() < longest, "{:?}", processes_of(uid));
        std::thread::sleep(Duration::from_millis(5));
    }
    let tree = tree_of(launcher.id());
    assert_eq!(tree.sweep().unwrap(), ["agent-test.slice"]);
    tree.remove().unwrap();
}

/// Makes this program start one sandbox, print its uid, and wait to be killed.
pub(crate) const PLAY_LAUNCHER: &str = "--play-launcher";

pub(crate) fn play_launcher() -> ! {
    let (mut running, _stdout, _stderr, id) = sh("workspace", "sleep 600 & sleep 600; true").start();
    wait_for_exec(&mut running);
    while processes_of(id).len() < 4 {
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("{id}");
    loop {
        std::thread::park();
    }
}

fn usage_is_measured() {
    let script = "x = bytearray(64 << 20)\nn = 0\nwhile n < 3000000: n += 1";
    let usage = Sandbox::new("workspace", &["python3", "-c", script]).run().finished.usage;
    assert!(usage.cpu_usec > 20_000, "{usage:?}");
    assert!(usage.memory_peak.unwrap() > 64 << 20, "{usage:?}");
    let by_cgroup = host().has(Mechanism::CgroupMemory);
    assert_eq!(usage.memory_source, Some(if by_cgroup { MemorySource::Cgroup } else { MemorySource::Rusage }));
}

fn many_calls_leave_nothing() {
    let count = || {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count();
        (descriptors, mounts)
    };
    assert!(sh("workspace", "true").run().is_success());
    let before = count();
    for _ in 0..50 {
        assert!(sh("workspace", "true").run().is_success());
    }
    assert_eq!(count(), before);
}

fn required_limits_refuse_a_lesser_host() {
    let lesser = host().clone().without(Mechanism::CgroupMemory);
    let required = lesser.clone().with_mode(LimitsMode::Required);
    let failure = sh("workspace", "true").host(required).plan(78_999).unwrap_err();
    assert_eq!(failure.code, Code::PolicyUnenforceable);
    assert!(failure.message.contains("cgroup_memory"), "{}", failure.message);
    let plan = sh("workspace", "true").host(lesser).plan(78_999).unwrap();
    assert!(plan.not_enforced.iter().any(|item| item.contains("cgroup_memory")), "{:?}", plan.not_enforced);

    // A property with an alternative is kept by that.
    let without = host().clone().without(Mechanism::LandlockSignals).without(Mechanism::LandlockAbstractSockets);
    let plan = sh("workspace", "true").host(without).plan(78_999).unwrap();
    assert!(!plan.not_enforced.iter().any(|item| item.contains("landlock")), "{:?}", plan.not_enforced);
    assert!(!plan.enforced.iter().any(|item| item == "landlock_signals"), "{:?}", plan.enforced);

    // Without these there is no sandbox, whatever the mode.
    let without = host().clone().without(Mechanism::MountNamespace);
    let failure = sh("workspace", "true").host(without).plan(78_999).unwrap_err();
    assert_eq!(failure.code, Code::PolicyUnenforceable);
}
