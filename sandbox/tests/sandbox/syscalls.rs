//! The system call filter, asked call by call: which errno each attempt gives, and what the record names.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use sandbox::host::Mechanism;
use sandbox::launch::Exit;

use crate::harness::{Output, Sandbox, Test, host, skip};

pub(crate) const TESTS: &[Test] = &[
    ("syscalls::dangerous_calls_are_refused_and_named", dangerous_calls_are_refused_and_named),
    ("syscalls::the_silent_form_refuses_the_same", the_silent_form_refuses_the_same),
    ("syscalls::harmless_twins_are_allowed", harmless_twins_are_allowed),
    ("syscalls::unknown_and_newer_calls_are_not_heard_of", unknown_and_newer_calls_are_not_heard_of),
    ("syscalls::i386_calls_are_killed", i386_calls_are_killed),
    ("syscalls::children_and_threads_have_the_filter_too", children_and_threads_have_the_filter_too),
    ("syscalls::a_flood_of_refusals_is_answered", a_flood_of_refusals_is_answered),
    ("syscalls::quiet_tools_have_nothing_to_report", quiet_tools_have_nothing_to_report),
];

/// A call by number and arguments.
type Attempt = (&'static str, i64, &'static [u64]);

const NEW_USER: u64 = libc::CLONE_NEWUSER as u64;
const NEW_NET: u64 = libc::CLONE_NEWNET as u64;
const NEW_TIME: u64 = 0x80;
const FLOOD: u64 = 0xdead_beef_0000_0000;

/// All of these fail with EPERM. The arguments are such that a call which got through would do no harm.
const REFUSED: &[Attempt] = &[
    ("mount", libc::SYS_mount, &[0, 0, 0, 0, 0]),
    ("umount2", libc::SYS_umount2, &[0, 0]),
    ("pivot_root", libc::SYS_pivot_root, &[0, 0]),
    ("chroot", libc::SYS_chroot, &[0]),
    ("open_tree", libc::SYS_open_tree, &[u64::MAX, 0, 0]),
    ("move_mount", libc::SYS_move_mount, &[u64::MAX, 0, u64::MAX, 0, 0]),
    ("fsopen", libc::SYS_fsopen, &[0, 0]),
    ("fsconfig", libc::SYS_fsconfig, &[u64::MAX, 0, 0, 0, 0]),
    ("fsmount", libc::SYS_fsmount, &[u64::MAX, 0, 0]),
    ("fspick", libc::SYS_fspick, &[u64::MAX, 0, 0]),
    ("mount_setattr", libc::SYS_mount_setattr, &[u64::MAX, 0, 0, 0, 0]),
    ("setns", libc::SYS_setns, &[u64::MAX, 0]),
    ("unshare", libc::SYS_unshare, &[NEW_USER]),
    ("unshare", libc::SYS_unshare, &[NEW_NET | libc::CLONE_FS as u64]),
    ("unshare", libc::SYS_unshare, &[NEW_TIME]),
    ("unshare", libc::SYS_unshare, &[FLOOD | NEW_USER]),
    ("clone", libc::SYS_clone, &[NEW_USER, 0, 0, 0, 0]),
    ("clone", libc::SYS_clone, &[NEW_NET | libc::SIGCHLD as u64, 0, 0, 0, 0]),
    ("ptrace", libc::SYS_ptrace, &[0, 0, 0, 0]),
    ("process_vm_readv", libc::SYS_process_vm_readv, &[1, 0, 0, 0, 0, 0]),
    ("process_vm_writev", libc::SYS_process_vm_writev, &[1, 0, 0, 0, 0, 0]),
    ("process_madvise", libc::SYS_process_madvise, &[u64::MAX, 0, 0, 0, 0]),
    ("kcmp", libc::SYS_kcmp, &[1, 1, 0, 0, 0]),
    ("pidfd_getfd", libc::SYS_pidfd_getfd, &[u64::MAX, 0, 0]),
    ("bpf", libc::SYS_bpf, &[0, 0, 0]),
    ("perf_event_open", libc::SYS_perf_event_open, &[0, 0, 0, u64::MAX, 0]),
    ("userfaultfd", libc::SYS_userfaultfd, &[0]),
    ("io_uring_setup", libc::SYS_io_uring_setup, &[0, 0]),
    ("io_uring_enter", libc::SYS_io_uring_enter, &[u64::MAX, 0, 0, 0, 0, 0]),
    ("io_uring_register", libc::SYS_io_uring_register, &[u64::MAX, 0, 0, 0]),
    ("keyctl", libc::SYS_keyctl, &[0, 0, 0, 0, 0]),
    ("add_key", libc::SYS_add_key, &[0, 0, 0, 0, 0]),
    ("request_key", libc::SYS_request_key, &[0, 0, 0, 0]),
    ("memfd_secret", libc::SYS_memfd_secret, &[0]),
    ("name_to_handle_at", libc::SYS_name_to_handle_at, &[u64::MAX, 0, 0, 0, 0]),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, &[u64::MAX, 0, 0]),
    ("fanotify_init", libc::SYS_fanotify_init, &[0, 0]),
    ("fanotify_mark", libc::SYS_fanotify_mark, &[u64::MAX, 0, 0, u64::MAX, 0]),
    ("quotactl", libc::SYS_quotactl, &[0, 0, 0, 0]),
    ("quotactl_fd", libc::SYS_quotactl_fd, &[u64::MAX, 0, 0, 0]),
    ("acct", libc::SYS_acct, &[1]),
    ("swapon", libc::SYS_swapon, &[0, 0]),
    ("swapoff", libc::SYS_swapoff, &[0]),
    ("reboot", libc::SYS_reboot, &[0, 0, 0, 0]),
    ("kexec_load", libc::SYS_kexec_load, &[0, 0, 0, 0]),
    ("kexec_file_load", libc::SYS_kexec_file_load, &[u64::MAX, u64::MAX, 0, 0, 0]),
    ("init_module", libc::SYS_init_module, &[0, 0, 0]),
    ("finit_module", libc::SYS_finit_module, &[u64::MAX, 0, 0]),
    ("delete_module", libc::SYS_delete_module, &[0, 0]),
    ("iopl", libc::SYS_iopl, &[3]),
    ("ioperm", libc::SYS_ioperm, &[0, 1, 1]),
    ("settimeofday", libc::SYS_settimeofday, &[0, 0]),
    ("clock_settime", libc::SYS_clock_settime, &[0, 0]),
    ("clock_adjtime", libc::SYS_clock_adjtime, &[0, 0]),
    ("adjtimex", libc::SYS_adjtimex, &[0]),
    ("sethostname", libc::SYS_sethostname, &[0, 0]),
    ("setdomainname", libc::SYS_setdomainname, &[0, 0]),
    ("syslog", libc::SYS_syslog, &[10, 0, 0]),
    ("vhangup", libc::SYS_vhangup, &[]),
    ("lookup_dcookie", libc::SYS_lookup_dcookie, &[0, 0, 0]),
    ("modify_ldt", libc::SYS_modify_ldt, &[0, 0, 0]),
    ("uselib", libc::SYS_uselib, &[0]),
    ("ustat", libc::SYS_ustat, &[0, 0]),
    ("sysfs", libc::SYS_sysfs, &[3]),
    ("nfsservctl", libc::SYS_nfsservctl, &[0, 0, 0]),
    ("move_pages", libc::SYS_move_pages, &[0, 0, 0, 0, 0, 0]),
    ("migrate_pages", libc::SYS_migrate_pages, &[0, 0, 0, 0]),
    ("socket", libc::SYS_socket, &[libc::AF_VSOCK as u64, libc::SOCK_STREAM as u64, 0]),
    ("socket", libc::SYS_socket, &[libc::AF_ALG as u64, libc::SOCK_SEQPACKET as u64, 0]),
    ("socket", libc::SYS_socket, &[libc::AF_PACKET as u64, libc::SOCK_RAW as u64, 0]),
    ("socket", libc::SYS_socket, &[libc::AF_INET as u64, libc::SOCK_RAW as u64, 1]),
    ("socket", libc::SYS_socket, &[libc::AF_INET6 as u64, (libc::SOCK_RAW | libc::SOCK_CLOEXEC) as u64, 58]),
    ("socket", libc::SYS_socket, &[libc::AF_NETLINK as u64, libc::SOCK_RAW as u64, libc::NETLINK_AUDIT as u64]),
    ("socket", libc::SYS_socket, &[libc::AF_NETLINK as u64, libc::SOCK_RAW as u64, libc::NETLINK_NETFILTER as u64]),
    ("socket", libc::SYS_socket, &[libc::AF_BLUETOOTH as u64, libc::SOCK_RAW as u64, 1]),
    ("socket", libc::SYS_socket, &[FLOOD | libc::AF_VSOCK as u64, libc::SOCK_STREAM as u64, 0]),
    ("socketpair", libc::SYS_socketpair, &[libc::AF_TIPC as u64, libc::SOCK_STREAM as u64, 0, 0]),
    ("ioctl", libc::SYS_ioctl, &[0, libc::TIOCSTI, 0]),
    ("ioctl", libc::SYS_ioctl, &[0, libc::TIOCLINUX, 0]),
    ("ioctl", libc::SYS_ioctl, &[0, FLOOD | libc::TIOCSTI, 0]),
    ("ioctl", libc::SYS_ioctl, &[0, FLOOD | libc::TIOCLINUX, 0]),
    ("personality", libc::SYS_personality, &[0x0400_0000]),
    ("mknodat", libc::SYS_mknodat, &[u64::MAX, 0, libc::S_IFCHR as u64 | 0o600, 0]),
    ("mknodat", libc::SYS_mknodat, &[u64::MAX, 0, libc::S_IFBLK as u64 | 0o600, 0]),
];

/// These get as far as the kernel's own checks: the errno is that of the arguments, or 0.
const ALLOWED: &[(Attempt, i32)] = &[
    (("unshare", libc::SYS_unshare, &[libc::CLONE_FS as u64]), 0),
    (("clone", libc::SYS_clone, &[(libc::CLONE_SIGHAND) as u64, 0, 0, 0, 0]), libc::EINVAL),
    (("socket", libc::SYS_socket, &[libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0]), 0),
    (("socket", libc::SYS_socket, &[libc::AF_UNIX as u64, libc::SOCK_SEQPACKET as u64, 0]), 0),
    (("socket", libc::SYS_socket, &[libc::AF_INET as u64, libc::SOCK_STREAM as u64, 0]), 0),
    (("socket", libc::SYS_socket, &[libc::AF_INET6 as u64, (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64, 0]), 0),
    (("socket", libc::SYS_socket, &[libc::AF_NETLINK as u64, libc::SOCK_RAW as u64, libc::NETLINK_ROUTE as u64]), 0),
    (("socketpair", libc::SYS_socketpair, &[libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0, 0]), libc::EFAULT),
    (("ioctl", libc::SYS_ioctl, &[0, libc::TIOCGWINSZ, 0]), libc::ENOTTY),
    (("ioctl", libc::SYS_ioctl, &[0, libc::FIONREAD, 0]), libc::EFAULT),
    (("personality", libc::SYS_personality, &[0xffff_ffff]), 0),
    (("mknodat", libc::SYS_mknodat, &[u64::MAX, 0, libc::S_IFIFO as u64 | 0o600, 0]), libc::EFAULT),
    (("openat2", libc::SYS_openat2, &[u64::MAX, 0, 0, 0]), libc::EINVAL),
    (("statx", libc::SYS_statx, &[u64::MAX, 0, 0, 0, 0]), libc::EFAULT),
    (("memfd_create", libc::SYS_memfd_create, &[0, 0]), libc::EFAULT),
    (("pidfd_open", libc::SYS_pidfd_open, &[0, 0]), libc::EINVAL),
    (("futex_waitv", libc::SYS_futex_waitv, &[0, 0, 0, 0, 0]), libc::EINVAL),
    (("membarrier", libc::SYS_membarrier, &[0, 0, 0]), 0),
    (("inotify_init1", libc::SYS_inotify_init1, &[0]), 0),
    (("shmget", libc::SYS_shmget, &[0, 4096, 0o600]), 0),
    (("mq_open", libc::SYS_mq_open, &[0, 0, 0, 0]), libc::EFAULT),
    (("close_range", libc::SYS_close_range, &[100, 99, 0]), libc::EINVAL),
    (("getrandom", libc::SYS_getrandom, &[0, 0, 0]), 0),
];

/// A Python program that makes each call and prints its errno. A `clone` that came through would be the child, so that
/// leaves at once.
fn program(attempts: impl Iterator<Item = Attempt>) -> String {
    let mut program = String::from(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nme = os.getpid()\n\
         def attempt(number, *arguments):\n\
         \x20   ctypes.set_errno(0)\n\
         \x20   result = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(a) for a in arguments])\n\
         \x20   if os.getpid() != me: os._exit(0)\n\
         \x20   print(ctypes.get_errno() if result == -1 else 0)\n",
    );
    for (_, number, arguments) in attempts {
        let _ = write!(program, "attempt({number}");
        for argument in arguments {
            let _ = write!(program, ", {argument}");
        }
        program.push_str(")\n");
    }
    program
}

fn attempt(sandbox: impl FnOnce(Sandbox) -> Sandbox, attempts: impl Iterator<Item = Attempt>) -> (Vec<i32>, Output) {
    let output = sandbox(Sandbox::new("workspace", &["python3", "-c", &program(attempts)])).run();
    (output.success().lines().map(|line| line.parse().unwrap()).collect(), output)
}

fn assert_all_refused(errnos: &[i32]) {
    assert_eq!(errnos.len(), REFUSED.len());
    for ((name, _, arguments), errno) in REFUSED.iter().zip(errnos) {
        assert_eq!(*errno, libc::EPERM, "{name} {arguments:x?}");
    }
}

fn dangerous_calls_are_refused_and_named() {
    if !host().has(Mechanism::SeccompNotify) {
        return skip("this kernel has no seccomp notifications");
    }
    // More than are told apart in one call.
    let mut named: BTreeMap<String, String> = BTreeMap::new();
    let mut errnos = Vec::new();
    for part in REFUSED.chunks(40) {
        let (of_part, output) = attempt(|sandbox| sandbox, part.iter().copied());
        errnos.extend(of_part);
        named.extend(output.finished.denied.into_iter().map(|denial| (denial.detail, denial.rule)));
    }
    assert_all_refused(&errnos);
    for (name, _, _) in REFUSED {
        // By its name it was the filter that refused, and not the kernel for want of a capability.
        let rule = format!("[[syscall]] allow = [\"{name}\"]");
        assert!(named.values().any(|known| *known == rule), "{name} is not among {named:?}");
    }
    assert!(named.contains_key("mount"), "{named:?}");
    assert!(named.contains_key(&format!("socket({:#x}, 0x1, 0x0)", libc::AF_VSOCK)), "{named:?}");
}

fn the_silent_form_refuses_the_same() {
    let silent = host().clone().without(Mechanism::SeccompNotify);
    let (errnos, output) = attempt(|sandbox| sandbox.host(silent), REFUSED.iter().copied());
    assert_all_refused(&errnos);
    assert_eq!(output.finished.denied, []);
}

fn harmless_twins_are_allowed() {
    for host in [host().clone(), host().clone().without(Mechanism::SeccompNotify)] {
        let (errnos, output) = attempt(|sandbox| sandbox.host(host), ALLOWED.iter().map(|(attempt, _)| *attempt));
        for (((name, _, arguments), expected), errno) in ALLOWED.iter().zip(&errnos) {
            assert_eq!(errno, expected, "{name} {arguments:x?}");
        }
        assert_eq!(output.finished.denied, []);
    }
}

fn unknown_and_newer_calls_are_not_heard_of() {
    const X32: i64 = 0x4000_0000;
    let attempts: &[Attempt] = &[
        ("clone3", libc::SYS_clone3, &[0, 0]),
        ("a call of the far future", 4000, &[0]),
        ("getpid of the x32 interface", X32 + libc::SYS_getpid, &[]),
        ("mount of the x32 interface", X32 + libc::SYS_mount, &[0, 0, 0, 0, 0]),
        ("ioctl of the x32 interface", X32 + 514, &[0, libc::TIOCSTI, 0]),
    ];
    for host in [host().clone(), host().clone().without(Mechanism::SeccompNotify)] {
        let (errnos, output) = attempt(|sandbox| sandbox.host(host), attempts.iter().copied());
        for ((name, _, _), errno) in attempts.iter().zip(&errnos) {
            assert_eq!(*errno, libc::ENOSYS, "{name}");
        }
        assert!(!output.finished.denied.iter().any(|denial| denial.detail.contains("clone3")), "{output:?}");
    }
}

fn i386_calls_are_killed() {
    // mov eax, 20 (getpid); int 0x80; ret
    let script = "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\ncode.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n\
                  ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()";
    let output = Sandbox::new("workspace", &["python3", "-c", script]).run();
    assert_eq!(output.exit, Ok(Exit::Signal(libc::SIGSYS)), "{output:?}");
    // mov eax, 39 (getpid); syscall; ret
    let twin = script.replace("\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3", "\\xb8\\x27\\0\\0\\0\\x0f\\x05\\xc3");
    Sandbox::new("workspace", &["python3", "-c", &twin]).run().success();
}

fn children_and_threads_have_the_filter_too() {
    let script = "import ctypes, os, subprocess, sys, threading\n\
        libc = ctypes.CDLL(None, use_errno=True)\n\
        seen = []\n\
        def attempt():\n\
        \x20   libc.mount(None, None, None, 0, None); seen.append(ctypes.get_errno())\n\
        thread = threading.Thread(target=attempt); thread.start(); thread.join()\n\
        if os.fork() == 0: attempt(); os._exit(seen[-1])\n\
        seen.append(os.waitstatus_to_exitcode(os.wait()[1]))\n\
        seen.append(subprocess.run([sys.executable, '-c', 'import ctypes, sys; libc = ctypes.CDLL(None, use_errno=True); \
        libc.mount(None, None, None, 0, None); sys.exit(ctypes.get_errno())']).returncode)\n\
        print(seen)";
    let output = Sandbox::new("workspace", &["python3", "-c", script]).run();
    assert_eq!(output.success(), "[1, 1, 1]");
}

fn a_flood_of_refusals_is_answered() {
    let script = "import ctypes, os, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n\
        signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n\
        for _ in range(4):\n\
        \x20   if os.fork() == 0:\n\
        \x20       for n in range(2000):\n\
        \x20           libc.syscall(41, 38, n, 0)\n\
        \x20           if ctypes.get_errno() != 1: os._exit(1)\n\
        \x20       os._exit(0)\n\
        done = 0\n\
        while done < 4:\n\
        \x20   try: assert os.wait()[1] == 0; done += 1\n\
        \x20   except InterruptedError: pass\n\
        signal.setitimer(signal.ITIMER_REAL, 0)";
    let output = Sandbox::new("workspace", &["python3", "-c", script]).run();
    output.success();
    assert!(output.finished.denied.len() <= 64);
}

fn quiet_tools_have_nothing_to_report() {
    let output = Sandbox::new("workspace", &["/bin/sh", "-c", "ls / | cat; echo $(id -u)"]).run();
    output.success();
    assert_eq!(output.finished.denied, []);
    let output =
        Sandbox::new("workspace", &["python3", "-c", "import threading, ssl, subprocess; subprocess.run('true')"])
            .run();
    output.success();
    assert_eq!(output.finished.denied, []);
}
