//! What a tool sees and can do, asked from inside; each refusal beside something that is allowed.

use crate::harness::{Sandbox, Test, clear_away, host, modest_limits, sh, wait_for_exec};
use std::os::unix::fs::PermissionsExt;

use sandbox::host::Mechanism;
use sandbox::launch::Exit;

pub(crate) const TESTS: &[Test] = &[
    ("confinement::identity_is_unprivileged", identity_is_unprivileged),
    ("confinement::the_same_is_seen_from_outside", the_same_is_seen_from_outside),
    ("confinement::the_root_is_minimal", the_root_is_minimal),
    ("confinement::only_own_processes_are_seen", only_own_processes_are_seen),
    ("confinement::only_loopback_is_there", only_loopback_is_there),
    ("confinement::the_hosts_name_is_not_shown", the_hosts_name_is_not_shown),
    ("confinement::no_descriptor_leaks", no_descriptor_leaks),
    ("confinement::devices_work", devices_work),
    ("confinement::standard_streams_can_be_opened_by_name", standard_streams_can_be_opened_by_name),
    ("confinement::private_places_have_their_sizes", private_places_have_their_sizes),
    ("confinement::places_and_their_parents_can_be_read", places_and_their_parents_can_be_read),
    ("confinement::a_read_only_workspace_refuses", a_read_only_workspace_refuses),
    ("confinement::the_tool_folder_is_read_only", the_tool_folder_is_read_only),
    ("confinement::proc_says_nothing_about_the_host", proc_says_nothing_about_the_host),
    ("confinement::the_own_cgroup_is_the_root", the_own_cgroup_is_the_root),
    ("confinement::init_cannot_be_touched", init_cannot_be_touched),
    ("confinement::landlock_holds_where_the_mounts_would_not", landlock_holds_where_the_mounts_would_not),
    ("confinement::without_loopback_nobody_talks_tcp_to_itself", without_loopback_nobody_talks_tcp_to_itself),
    ("confinement::without_landlock_the_namespaces_hold", without_landlock_the_namespaces_hold),
    ("confinement::rlimits_are_set", rlimits_are_set),
    ("confinement::a_launcher_may_have_more_open_than_a_tool_may", a_launcher_may_have_more_open_than_a_tool_may),
    ("confinement::signals_are_at_their_defaults", signals_are_at_their_defaults),
];

fn status_field(status: &str, name: &str) -> String {
    let line = status.lines().find(|line| line.starts_with(&format!("{name}:")));
    line.unwrap_or_else(|| panic!("no {name} in {status}"))[name.len() + 1..].trim().to_owned()
}

fn assert_confined(status: &str, id: u32) {
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status_field(status, set), "0000000000000000", "{set}");
    }
    assert_eq!(status_field(status, "NoNewPrivs"), "1");
    assert_eq!(status_field(status, "Seccomp"), "2");
    assert_eq!(status_field(status, "Uid"), format!("{id}\t{id}\t{id}\t{id}"));
    assert_eq!(status_field(status, "Gid"), format!("{id}\t{id}\t{id}\t{id}"));
}

fn identity_is_unprivileged() {
    let output = sh("workspace", "cat /proc/self/status").run();
    assert_confined(output.success(), output.sandbox_id);
    assert_eq!(status_field(output.success(), "Groups"), "");
    let output = sh("workspace", "id -un; id -gn").run();
    assert_eq!(output.success(), "agent\nagent");
}

fn the_same_is_seen_from_outside() {
    let (mut running, _stdout, _stderr, id) = sh("workspace", "exec sleep 600").start();
    wait_for_exec(&mut running);
    let pid = running.tool_pid().as_raw_nonzero();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert_confined(&status, id);
    assert_eq!(status_field(&status, "NSpid").split_whitespace().nth(1), Some("2"), "the tool is PID 2 inside");
    for namespace in ["mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/{namespace}")).unwrap();
        assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
    }
    let user = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/user")).unwrap();
    assert_eq!(user(&pid.to_string()), user("self"), "there is no user namespace");
    let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert!(
        cgroup.lines().any(|line| line.starts_with("0::") && line.ends_with(running.cgroup().unwrap())),
        "{cgroup}"
    );

    // PID 1 is a copy of the launcher, so it has to be confined as well.
    let number = std::os::fd::AsRawFd::as_raw_fd(&running.init());
    let described = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap();
    let init = status_field(&described, "Pid");
    let status = std::fs::read_to_string(format!("/proc/{init}/status")).unwrap();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status_field(&status, set), "0000000000000000", "{set} of PID 1");
    }
    assert_eq!(status_field(&status, "Uid"), format!("{id}\t{id}\t{id}\t{id}"));
    assert_eq!(status_field(&status, "NoNewPrivs"), "1");
    for descriptor in std::fs::read_dir(format!("/proc/{init}/fd")).unwrap() {
        let target = std::fs::read_link(descriptor.unwrap().path()).unwrap();
        let target = target.to_string_lossy();
        // The sandbox's own file systems in memory, which it looks at in the end, are shown by their places inside.
        let harmless = ["/tmp", "/dev/shm", "/workspace"].contains(&target.as_ref())
            || ["anon_inode:", "socket:", "/memfd:agentd-denials"].iter().any(|own| target.starts_with(own));
        assert!(harmless, "PID 1 holds {target}");
    }
    running.kill();
    let _ = crate::harness::end(&mut running, std::time::Duration::from_secs(30));
    clear_away(running);
}

fn the_root_is_minimal() {
    let output = sh("workspace", "ls / && ls -d /root /home /srv /boot 2>/dev/null; ls /run /var").run();
    let names: Vec<_> =
        output.stdout.lines().take_while(|line| !line.ends_with(':')).filter(|line| !line.is_empty()).collect();
    for name in &names {
        let known = [
            "bin",
            "dev",
            "etc",
            "lib",
            "lib32",
            "lib64",
            "libx32",
            "proc",
            "run",
            "sbin",
            "sys",
            "tmp",
            "usr",
            "var",
            "workspace",
        ];
        assert!(known.contains(name), "{name} is in the root: {names:?}");
    }
    assert!(names.contains(&"workspace"));
    let output = sh("workspace", "cat /etc/shadow").run();
    assert!(!output.is_success());
    assert!(sh("workspace", "cat /etc/passwd").run().is_success());
    let users = sh("workspace", "cut -d: -f1 /etc/passwd").run();
    assert_eq!(users.success(), "root\nagent");
}

fn only_own_processes_are_seen() {
    let output = sh("workspace", "sleep 60 & cd /proc && ls -d [0-9]*").run();
    let pids: Vec<u32> = output.success().lines().map(|line| line.parse().unwrap()).collect();
    assert!(pids.contains(&2) && pids.iter().all(|pid| *pid < 20), "{pids:?}");
    assert!(!pids.contains(&1), "PID 1 would show the launcher's command line");
    // A process of the host, which certainly exists: this one.
    let own = std::process::id();
    let script = format!("kill -0 {own} || test -e /proc/{own}");
    assert!(!sh("workspace", &script).run().is_success());
    assert!(sh("workspace", "sleep 60 & kill -0 $! && test -e /proc/$!").run().is_success());
}

fn only_loopback_is_there() {
    let output =
        sh("workspace", "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '; cat /sys/class/net/lo/operstate").run();
    assert_eq!(output.stdout.trim(), "lo");
    let up = "import socket\ns = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(s.getsockname())";
    Sandbox::new("workspace", &["python3", "-c", up]).run().success();
    let out = "import socket, sys\ntry: socket.create_connection(('192.0.2.1', 80), 2)\n\
               except OSError as error: sys.exit(0 if error.errno == 101 else 3)\nsys.exit(1)";
    Sandbox::new("workspace", &["python3", "-c", out]).run().success();
}

fn the_hosts_name_is_not_shown() {
    let output = sh("workspace", "uname -n; cat /etc/hostname").run();
    assert_eq!(output.success(), "sandbox\nsandbox");
}

fn no_descriptor_leaks() {
    // The listing itself holds one.
    let script = "import os\nfds = sorted(int(fd) for fd in os.listdir('/proc/self/fd'))\nprint(fds)";
    assert_eq!(Sandbox::new("workspace", &["python3", "-c", script]).run().success(), "[0, 1, 2, 3]");
}

fn devices_work() {
    let script = "set -e; echo x > /dev/null; test $(head -c 3 /dev/zero | wc -c) = 3; test $(head -c 3 /dev/urandom | wc -c) = 3\n\
                  if echo x > /dev/full; then exit 1; fi; test -c /dev/tty; test -L /dev/fd; echo x > /dev/shm/x\n\
                  for device in mem kmsg kvm fuse vda sda loop0 net/tun input; do test ! -e /dev/$device || exit 2; done\n\
                  if touch /dev/x; then exit 3; fi";
    let output = sh("workspace", script).run();
    assert!(output.is_success(), "{output:?}");
    let terminal = "import os, pty\nmaster, slave = pty.openpty()\nos.write(slave, b'x')\nassert os.read(master, 1) == b'x'\n\
                    assert os.ttyname(slave).startswith('/dev/pts/')";
    Sandbox::new("workspace", &["python3", "-c", terminal]).run().success();
}

fn standard_streams_can_be_opened_by_name() {
    let output =
        sh("workspace", "cat /dev/stdin; echo out >> /dev/stdout; echo err >> /dev/stderr").stdin(b"in\n").run();
    assert_eq!(output.success(), "in\nout");
    assert_eq!(output.stderr, "err\n");
}

fn private_places_have_their_sizes() {
    let mut limits = modest_limits();
    limits.shm = toolproto::units::Bytes::mib(1);
    for place in ["/tmp", "/workspace"] {
        let fill = |mib: u32| format!("dd if=/dev/zero of={place}/x bs=1M count={mib} 2>&1");
        let output = sh("workspace", &fill(15)).limits(limits.clone()).run();
        assert!(output.is_success() && output.finished.denied.is_empty(), "{place}: {output:?}");
        let output = sh("workspace", &fill(17)).limits(limits.clone()).run();
        assert!(!output.is_success() && output.stdout.contains("No space left"), "{place}: {output:?}");
        let named: Vec<_> = output.finished.denied.iter().map(|denial| denial.rule.as_str()).collect();
        assert_eq!(named, [if place == "/tmp" { "[limits] tmp" } else { "[limits] empty_workspace" }]);
    }
    let output = sh("workspace", "dd if=/dev/zero of=/dev/shm/x bs=1M count=2 2>&1").limits(limits).run();
    assert!(output.stdout.contains("No space left"), "{output:?}");
}

fn places_and_their_parents_can_be_read() {
    // A runtime's directory deep in a place whose parents on the host are closed to everyone but root.
    let closed = tempfile::tempdir().unwrap();
    let runtime = closed.path().join("a/b/runtime");
    std::fs::create_dir_all(&runtime).unwrap();
    std::fs::write(runtime.join("x"), "content").unwrap();
    let below_tmp = runtime.starts_with("/tmp");
    let path = runtime.to_string_lossy().into_owned();
    let script =
        format!("p={path}; while [ $p != / ]; do ls $p >/dev/null || exit 1; p=$(dirname $p); done; cat {path}/x");
    let output = sh("workspace", &script).runtime_mount(&runtime).run();
    assert!(below_tmp, "the test wants a temporary directory in /tmp");
    assert_eq!(output.success(), "content");
    let output = sh("workspace", &format!("echo y > {path}/x")).runtime_mount(&runtime).run();
    assert!(!output.is_success());
    assert_eq!(std::fs::read_to_string(runtime.join("x")).unwrap(), "content");
}

fn a_read_only_workspace_refuses() {
    assert!(sh("workspace", "echo x > /workspace/x").run().is_success());
    let output = sh("workspace", "echo x > /workspace/x").read_only().run();
    assert!(!output.is_success());
    assert!(sh("workspace", "ls /workspace && pwd").read_only().run().success().contains("/workspace"));
}

fn the_tool_folder_is_read_only() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("main.sh"), "echo from the tool\n").unwrap();
    // A folder that only root can read is of no use to the tool: it is not root.
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let output = Sandbox::new("workspace", &["/bin/sh", "/tool/main.sh"]).tool_folder(folder.path()).run();
    assert!(!output.is_success());
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = Sandbox::new("workspace", &["/bin/sh", "/tool/main.sh"]).tool_folder(folder.path()).run();
    assert_eq!(output.success(), "from the tool");
    let output = sh("workspace", "echo x > /tool/x").tool_folder(folder.path()).run();
    assert!(!output.is_success() && !folder.path().join("x").exists());
}

fn proc_says_nothing_about_the_host() {
    let script = "for name in kcore keys key-users timer_list kallsyms sysrq-trigger interrupts; do\n\
                  test $(head -c 1 /proc/$name 2>/dev/null | wc -c) = 0 || { echo $name; exit 1; }; done\n\
                  if echo 1 > /proc/sys/kernel/core_pattern; then exit 2; fi\n\
                  if echo b > /proc/sysrq-trigger && test ! -c /proc/sysrq-trigger; then exit 3; fi\n\
                  test $(wc -c < /proc/meminfo) -gt 0 && test $(wc -c < /proc/cpuinfo) -gt 0";
    let output = sh("workspace", script).run();
    assert!(output.is_success(), "{output:?}");
}

fn the_own_cgroup_is_the_root() {
    let output =
        sh("workspace", "grep ^0:: /proc/self/cgroup; ls /sys/fs/cgroup/cgroup.procs; cat /sys/fs/cgroup/cgroup.procs")
            .run();
    let lines: Vec<_> = output.success().lines().collect();
    assert_eq!(lines[..2], ["0::/", "/sys/fs/cgroup/cgroup.procs"]);
    assert!(lines[2..].iter().all(|line| line.parse::<u32>().is_ok_and(|pid| pid < 20)), "{lines:?}");
    let output = sh("workspace", "echo 0 > /sys/fs/cgroup/cgroup.procs || mkdir /sys/fs/cgroup/x").run();
    assert!(!output.is_success());
}

fn init_cannot_be_touched() {
    for host in [host().clone(), host().clone().without(Mechanism::LandlockSignals)] {
        // Landlock refuses to send a signal; without it, one that PID 1 does not heed.
        let sent = if host.has(Mechanism::LandlockSignals) { "alive" } else { "done\nalive" };
        for (attempt, expected) in [
            ("kill -9 1", sent),
            ("kill -TERM 1", sent),
            ("kill -CHLD 1", sent),
            ("kill -STOP 1", sent),
            ("cat /proc/1/environ", "alive"),
            ("cat /proc/1/cmdline | grep .", "alive"),
            ("ls /proc/1/fd", "alive"),
        ] {
            // PID 1 becomes the sandbox's user beside the tool: on a busy machine root's is what cannot be touched at first.
            let script = format!("sleep 0.2; {attempt} && echo done; sleep 0.1; echo alive");
            let output = sh("workspace", &script).host(host.clone()).run();
            assert_eq!(output.stdout.trim(), expected, "{attempt}: {}", output.stderr);
        }
    }
    assert_eq!(sh("workspace", "sleep 60 & kill -9 $! && echo done").run().success(), "done");
}

fn landlock_holds_where_the_mounts_would_not() {
    if !host().has(Mechanism::LandlockFiles) {
        return crate::harness::skip("this kernel has no Landlock");
    }
    // The directory of PID namespaces' own files is mounted but not writable by any rule, though the mode would allow it:
    // a process may write its own comm.
    let script =
        "import errno\ntry: open('/proc/self/comm', 'w')\nexcept OSError as error: print(errno.errorcode[error.errno])";
    let output = Sandbox::new("workspace", &["python3", "-c", script]).run();
    assert!(["EACCES", "EROFS"].contains(&output.success()), "{output:?}");
    if host().has(Mechanism::LandlockTcp) {
        let bind = "import socket\nsocket.socket().bind(('127.0.0.1', 0))";
        let strict = Sandbox::new("strict", &["python3", "-c", bind]).run();
        assert!(strict.stderr.contains("PermissionError"), "{strict:?}");
        Sandbox::new("workspace", &["python3", "-c", bind]).run().success();
    }
}

/// Whether Landlock keeps a call off its loopback or the network namespace has to.
fn without_loopback_nobody_talks_tcp_to_itself() {
    let talk = "import socket, sys\nserver = socket.socket()\n\
                try: server.bind((sys.argv[1], 0)); server.listen(); socket.create_connection(('127.0.0.1', server.getsockname()[1]), 5)\n\
                except OSError: sys.exit(3)";
    for host in [host().clone(), host().clone().without(Mechanism::LandlockTcp)] {
        for address in ["127.0.0.1", "0.0.0.0"] {
            let with = |policy| Sandbox::new(policy, &["python3", "-c", talk, address]).host(host.clone()).run();
            assert_eq!(
                with("strict").exit,
                Ok(Exit::Status(3)),
                "{address}: {:?}",
                host.missing(Mechanism::LandlockTcp)
            );
            with("workspace").success();
        }
    }
}

fn without_landlock_the_namespaces_hold() {
    // An older kernel: the properties that have an alternative are kept by it.
    let older = [
        Mechanism::LandlockFiles,
        Mechanism::LandlockTcp,
        Mechanism::LandlockAbstractSockets,
        Mechanism::LandlockSignals,
    ]
    .into_iter()
    .fold(host().clone(), sandbox::host::Host::without);
    let older = |script: &str| sh("workspace", script).host(older.clone());

    let own = std::process::id();
    assert!(!older(&format!("kill -0 {own}")).run().is_success());
    assert!(older("sleep 60 & kill -0 $!").run().is_success());
    assert_eq!(older("kill -9 1; sleep 0.1; echo alive").run().stdout, "alive\n");
    assert!(!older("cat /etc/shadow || ls /root || ls /home").run().is_success());
    assert!(older("cat /etc/passwd").run().is_success());
    assert!(
        !older("echo 1 > /proc/sys/kernel/printk || echo x > /usr/x || touch /dev/x || mkdir /x").run().is_success()
    );

    // The host's abstract sockets are out of reach with the host's network.
    let listener = std::os::unix::net::UnixListener::bind_addr(
        &<std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(format!(
            "agentd-{own}"
        ))
        .unwrap(),
    )
    .unwrap();
    let connect = format!("python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"\\0agentd-{own}\")'");
    assert!(older(&connect).run().stderr.contains("ConnectionRefused"));
    let output = sh("workspace", &connect).run();
    assert!(output.stderr.contains("ConnectionRefused") || output.stderr.contains("PermissionError"), "{output:?}");
    drop(listener);
    let twin = "python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.bind(\"\\0x\"); s.listen(); \
                socket.socket(socket.AF_UNIX).connect(\"\\0x\")'";
    sh("workspace", twin).run().success();
}

fn rlimits_are_set() {
    let mut limits = modest_limits();
    limits.open_files = 77;
    let output = sh(
        "workspace",
        "ulimit -Sn; ulimit -Hn; ulimit -v; grep 'core file' /proc/self/limits; cat /proc/self/oom_score_adj",
    )
    .limits(limits)
    .run();
    let lines: Vec<_> = output.success().lines().collect();
    assert_eq!(lines[..3], ["77", "77", "unlimited"]);
    assert_eq!(lines[3].split_whitespace().collect::<Vec<_>>()[4..6], ["1", "1"]);
    assert_eq!(lines[4], "500", "a sandbox is the first to go when the host runs out of memory");
}

fn a_launcher_may_have_more_open_than_a_tool_may() {
    let mut limits = modest_limits();
    limits.open_files = 77;
    let null = || std::fs::File::open("/dev/null").unwrap();
    let held: Vec<_> = std::iter::repeat_with(null).take(200).collect();
    sh("workspace", "true").limits(limits).run().success();
    drop(held);
}

fn signals_are_at_their_defaults() {
    let output = sh("workspace", "grep -E '^Sig(Blk|Ign)' /proc/self/status").run();
    assert_eq!(output.success(), "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000");
}
