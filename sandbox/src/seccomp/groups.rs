//! Named groups of system calls, so that a policy reads as reasons and not as a list of three hundred names.
//!
//! What no group lists is refused. Where a call is only harmless with certain arguments, the group says which.

use super::rules::{Allow, Compare, Condition};

/// A group's members: calls that are allowed whatever their arguments, and calls with conditions.
pub(super) struct Group {
    pub(super) name: &'static str,
    pub(super) plain: &'static [&'static str],
    pub(super) conditional: fn() -> Vec<Allow>,
}

/// All groups.
pub(super) const GROUPS: &[Group] = &[
    Group { name: "@base", plain: BASE, conditional: base_with_conditions },
    Group { name: "@files", plain: FILES, conditional: files_with_conditions },
    Group { name: "@processes", plain: PROCESSES, conditional: processes_with_conditions },
    Group { name: "@ipc", plain: IPC, conditional: Vec::new },
    Group { name: "@sockets", plain: SOCKETS, conditional: sockets_with_conditions },
];

/// Memory, time, signals, waiting, identity: nothing that reaches beyond the process.
const BASE: &[&str] = &[
    "alarm",
    "arch_prctl",
    "brk",
    "capget",
    "capset",
    "clock_getres",
    "clock_gettime",
    "clock_nanosleep",
    "epoll_create",
    "epoll_create1",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_pwait2",
    "epoll_wait",
    "eventfd",
    "eventfd2",
    "futex",
    "futex_waitv",
    "get_mempolicy",
    "get_robust_list",
    "get_thread_area",
    "getcpu",
    "getegid",
    "geteuid",
    "getgid",
    "getgroups",
    "getitimer",
    "getpgid",
    "getpgrp",
    "getpid",
    "getppid",
    "getpriority",
    "getrandom",
    "getresgid",
    "getresuid",
    "getrlimit",
    "getrusage",
    "getsid",
    "gettid",
    "gettimeofday",
    "getuid",
    "landlock_add_rule",
    "landlock_create_ruleset",
    "landlock_restrict_self",
    "madvise",
    "mbind",
    "membarrier",
    "memfd_create",
    "mincore",
    "mlock",
    "mlock2",
    "mlockall",
    "mmap",
    "mprotect",
    "mremap",
    "mseal",
    "msync",
    "munlock",
    "munlockall",
    "munmap",
    "nanosleep",
    "pause",
    "pkey_alloc",
    "pkey_free",
    "pkey_mprotect",
    "poll",
    "ppoll",
    "prctl",
    "prlimit64",
    "pselect6",
    "remap_file_pages",
    "restart_syscall",
    "rseq",
    "rt_sigaction",
    "rt_sigpending",
    "rt_sigprocmask",
    "rt_sigqueueinfo",
    "rt_sigreturn",
    "rt_sigsuspend",
    "rt_sigtimedwait",
    "rt_tgsigqueueinfo",
    "sched_get_priority_max",
    "sched_get_priority_min",
    "sched_getaffinity",
    "sched_getattr",
    "sched_getparam",
    "sched_getscheduler",
    "sched_rr_get_interval",
    "sched_setaffinity",
    "sched_setattr",
    "sched_setparam",
    "sched_setscheduler",
    "sched_yield",
    "seccomp",
    "select",
    "set_mempolicy",
    "set_robust_list",
    "set_thread_area",
    "set_tid_address",
    "setfsgid",
    "setfsuid",
    "setgid",
    "setgroups",
    "setitimer",
    "setpgid",
    "setpriority",
    "setregid",
    "setresgid",
    "setresuid",
    "setreuid",
    "setrlimit",
    "setsid",
    "setuid",
    "sigaltstack",
    "signalfd",
    "signalfd4",
    "sysinfo",
    "time",
    "timer_create",
    "timer_delete",
    "timer_getoverrun",
    "timer_gettime",
    "timer_settime",
    "timerfd_create",
    "timerfd_gettime",
    "timerfd_settime",
    "times",
    "umask",
    "uname",
];

/// Files, directories, pipes and what watches them.
const FILES: &[&str] = &[
    "access",
    "chdir",
    "chmod",
    "chown",
    "close",
    "close_range",
    "copy_file_range",
    "creat",
    "dup",
    "dup2",
    "dup3",
    "faccessat",
    "faccessat2",
    "fadvise64",
    "fallocate",
    "fchdir",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "fchown",
    "fchownat",
    "fcntl",
    "fdatasync",
    "fgetxattr",
    "flistxattr",
    "flock",
    "fremovexattr",
    "fsetxattr",
    "fstat",
    "fstatfs",
    "fsync",
    "ftruncate",
    "futimesat",
    "getcwd",
    "getdents",
    "getdents64",
    "getxattr",
    "inotify_add_watch",
    "inotify_init",
    "inotify_init1",
    "inotify_rm_watch",
    "io_cancel",
    "io_destroy",
    "io_getevents",
    "io_setup",
    "io_submit",
    "ioprio_get",
    "ioprio_set",
    "lchown",
    "lgetxattr",
    "link",
    "linkat",
    "listxattr",
    "llistxattr",
    "lremovexattr",
    "lseek",
    "lsetxattr",
    "lstat",
    "mkdir",
    "mkdirat",
    "newfstatat",
    "open",
    "openat",
    "openat2",
    "pipe",
    "pipe2",
    "pread64",
    "preadv",
    "preadv2",
    "pwrite64",
    "pwritev",
    "pwritev2",
    "read",
    "readahead",
    "readlink",
    "readlinkat",
    "readv",
    "removexattr",
    "rename",
    "renameat",
    "renameat2",
    "rmdir",
    "sendfile",
    "setxattr",
    "splice",
    "stat",
    "statfs",
    "statx",
    "symlink",
    "symlinkat",
    "sync",
    "sync_file_range",
    "syncfs",
    "tee",
    "truncate",
    "unlink",
    "unlinkat",
    "utime",
    "utimensat",
    "utimes",
    "vmsplice",
    "write",
    "writev",
];

/// Starting, awaiting and ending processes and threads.
const PROCESSES: &[&str] = &[
    "execve",
    "execveat",
    "exit",
    "exit_group",
    "fork",
    "kill",
    "pidfd_open",
    "pidfd_send_signal",
    "tgkill",
    "tkill",
    "vfork",
    "wait4",
    "waitid",
];

/// System V IPC and POSIX message queues, private to the call by its IPC namespace.
const IPC: &[&str] = &[
    "mq_getsetattr",
    "mq_notify",
    "mq_open",
    "mq_timedreceive",
    "mq_timedsend",
    "mq_unlink",
    "msgctl",
    "msgget",
    "msgrcv",
    "msgsnd",
    "semctl",
    "semget",
    "semop",
    "semtimedop",
    "shmat",
    "shmctl",
    "shmdt",
    "shmget",
];

/// What is done with sockets once they exist.
const SOCKETS: &[&str] = &[
    "accept",
    "accept4",
    "bind",
    "connect",
    "getpeername",
    "getsockname",
    "getsockopt",
    "listen",
    "recvfrom",
    "recvmmsg",
    "recvmsg",
    "sendmmsg",
    "sendmsg",
    "sendto",
    "setsockopt",
    "shutdown",
];

/// unshare(2) and clone(2) flags that make namespaces. CLONE_NEWTIME shares its bit with clone's exit signal, where it
/// means nothing.
const NEW_NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32 as u64;
const NEW_TIME_NAMESPACE: u64 = 0x80;

fn base_with_conditions() -> Vec<Allow> {
    // personality(2): asking, the default, and a layout without randomisation, which debuggers and some build tools want.
    [0, 0xffff_ffff, libc::ADDR_NO_RANDOMIZE as u64]
        .into_iter()
        .map(|persona| Allow::when("personality", [Condition::low_bits(0, Compare::Equals(persona))]))
        .collect()
}

fn files_with_conditions() -> Vec<Allow> {
    // Pushing input to a terminal (TIOCSTI) and pasting on a console (TIOCLINUX) would act on whoever owns the terminal.
    // The kernel looks at 32 bits of the request only.
    let differs = |request: u64| Condition::low_bits(1, Compare::Differs(request));
    let mut allowed = vec![Allow::when("ioctl", [differs(libc::TIOCSTI), differs(libc::TIOCLINUX)])];
    // Pipes and sockets in the file system, not devices: a 0/0 character device is an overlay whiteout.
    for (call, argument) in [("mknod", 1), ("mknodat", 2)] {
        for kind in [0, libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK] {
            let is_kind =
                Condition::low_bits(argument, Compare::MaskedEquals(u64::from(libc::S_IFMT), u64::from(kind)));
            allowed.push(Allow::when(call, [is_kind]));
        }
    }
    allowed
}

fn processes_with_conditions() -> Vec<Allow> {
    let none_of = |bits: u64| Condition::low_bits(0, Compare::MaskedEquals(bits, 0));
    vec![
        Allow::when("clone", [none_of(NEW_NAMESPACES)]),
        Allow::when("unshare", [none_of(NEW_NAMESPACES | NEW_TIME_NAMESPACE)]),
    ]
}

fn sockets_with_conditions() -> Vec<Allow> {
    let is = |argument: u8, value: libc::c_int| Condition::low_bits(argument, Compare::Equals(value as u64));
    // The type's upper bits are flags.
    let of_type = |value: libc::c_int| Condition::low_bits(1, Compare::MaskedEquals(0xf, value as u64));
    let mut allowed = vec![
        Allow::when("socket", [is(0, libc::AF_UNIX)]),
        // getifaddrs and AI_ADDRCONFIG ask for the interfaces of the tool's own network namespace.
        Allow::when("socket", [is(0, libc::AF_NETLINK), is(2, libc::NETLINK_ROUTE)]),
        Allow::when("socketpair", [is(0, libc::AF_UNIX)]),
    ];
    for family in [libc::AF_INET, libc::AF_INET6] {
        for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM] {
            allowed.push(Allow::when("socket", [is(0, family), of_type(kind)]));
        }
    }
    allowed
}
