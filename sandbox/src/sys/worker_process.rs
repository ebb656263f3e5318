//! A child process that goes on in this program without exec, and the closing of everything that it inherited.
#![expect(unsafe_code, reason = "fork and close_range have no safe wrapper")]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::process::{Pid, PidfdFlags};

/// The status of a child whose body panicked, as BSD's sysexits.h has for a fault in the program itself.
const EXIT_SOFTWARE: i32 = 70;

/// Forks; the child runs `body` and exits with its result, and never returns from here. Yields the child's pidfd.
///
/// # Errors
/// What fork(2) and pidfd_open(2) say.
pub(crate) fn fork_running(body: impl FnOnce() -> i32) -> io::Result<OwnedFd> {
    // SAFETY: the launcher has one thread, so the child's copy of every lock is free. (A test process has more; glibc's
    // fork keeps the allocator usable, and `body` takes no other lock of the parent's.)
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let status = catch_unwind(AssertUnwindSafe(body)).unwrap_or(EXIT_SOFTWARE);
            // SAFETY: takes a number; ends the process without the parent's exit handlers.
            unsafe { libc::_exit(status) }
        }
        pid => {
            let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork gave no process id"))?;
            // The child is this process's own and not reaped yet, so the id is still its.
            Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
        }
    }
}

/// Closes every descriptor of the process but `kept`, and puts /dev/null on 0, 1 and 2, so that no later file gets these
/// numbers. For a process that has just been forked: values that own other descriptors must not be used or dropped.
///
/// # Errors
/// When /dev/null cannot be opened, or what dup(2) and close_range(2) say.
pub(crate) fn keep_only(kept: OwnedFd) -> io::Result<OwnedFd> {
    const PLACE: i32 = 3;
    // All of these are given up by number, and closed or replaced below.
    let first = kept;
    let kept = rustix::io::fcntl_dupfd_cloexec(&first, PLACE)?.into_raw_fd();
    let _ = first.into_raw_fd();
    let null = OwnedFd::from(OpenOptions::new().read(true).write(true).open("/dev/null")?).into_raw_fd();
    for (source, place) in [(null, 0), (null, 1), (null, 2), (kept, PLACE)] {
        // SAFETY: plain numbers; the caller guarantees that nobody uses what these calls replace.
        if unsafe { libc::dup2(source, place) } == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: as above; what lies above PLACE is used by nobody.
    if unsafe { libc::syscall(libc::SYS_close_range, PLACE + 1, libc::c_uint::MAX, 0) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: PLACE was just made by dup2, and nothing else owns it.
    let kept = unsafe { OwnedFd::from_raw_fd(PLACE) };
    rustix::io::fcntl_setfd(&kept, rustix::io::FdFlags::CLOEXEC)?;
    debug_assert_eq!(kept.as_raw_fd(), PLACE);
    Ok(kept)
}
