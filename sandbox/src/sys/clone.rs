//! clone3(2): processes that are born in their cgroup and namespaces, with a pidfd.
#![expect(unsafe_code, reason = "no safe crate offers clone3")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::process::Pid;

use super::process::exit_now;

/// linux/sched.h; the C library's binding cuts it to 32 bits.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// The status of a child whose code panicked: nothing else in agentd exits with it.
const PANICKED: i32 = 101;

/// A child process and the descriptor that names it for good.
#[derive(Debug)]
pub(crate) struct Child {
    /// Readable when the process has ended.
    pub(crate) pidfd: OwnedFd,
    /// Its number in the caller's PID namespace; for messages, never for signals.
    pub(crate) pid: Pid,
}

/// Where a child is born.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Birth<'a> {
    /// As PID 1 of a new PID namespace.
    pub(crate) new_pid_namespace: bool,
    /// In this cgroup2 directory instead of the parent's.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
}

/// Forks a child that runs `code` and exits with the status it returns, without ever returning here.
///
/// The caller is single-threaded: in a child of a threaded process, a lock that another thread held stays locked.
///
/// # Errors
/// As clone3(2).
pub(crate) fn fork(birth: Birth<'_>, code: impl FnOnce() -> i32) -> io::Result<Child> {
    let mut pidfd: libc::c_int = -1;
    let mut flags = libc::CLONE_PIDFD as u64;
    if birth.new_pid_namespace {
        flags |= libc::CLONE_NEWPID as u64;
    }
    if birth.cgroup.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    let mut args = libc::clone_args {
        flags,
        pidfd: (&raw mut pidfd).addr() as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: birth.cgroup.map_or(0, |cgroup| cgroup.as_raw_fd() as u64),
    };
    // The address above stands in an integer field, which the borrow checker does not see.
    (&raw mut pidfd).expose_provenance();
    // SAFETY: `args` and `pidfd` outlive the call. Without CLONE_VM the child runs on copies of this process's memory and
    // stack, so it can go on here like after fork(2); it never leaves the `0` arm below.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => exit_now(catch_unwind(AssertUnwindSafe(code)).unwrap_or(PANICKED)),
        _ => {
            // SAFETY: CLONE_PIDFD made the kernel store a new descriptor there, which nobody else owns.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
            Ok(Child { pidfd, pid })
        }
    }
}
