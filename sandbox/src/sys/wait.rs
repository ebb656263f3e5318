//! waitid(2) on a pidfd, with resource usage.
#![expect(unsafe_code, reason = "no safe crate offers waitid's fifth argument, the resource usage")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By exit(2), with this status.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
}

/// A reaped child.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reaped {
    /// How it ended.
    pub(crate) ended: Ended,
    /// User and system time of it and the children it waited for, in microseconds.
    pub(crate) cpu_usec: u64,
    /// The largest resident set of it or of a child it waited for, in bytes.
    pub(crate) maxrss: u64,
}

/// Reaps the child if it has ended. Never blocks.
///
/// # Errors
/// As waitid(2): ECHILD when it was reaped before or is not the caller's child.
pub(crate) fn reap(pidfd: BorrowedFd<'_>) -> io::Result<Option<Reaped>> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: both structures outlive the call and have the kernel's layout.
    let result = unsafe {
        libc::syscall(
            libc::SYS_waitid,
            libc::P_PIDFD,
            pidfd.as_raw_fd(),
            info.as_mut_ptr(),
            libc::WEXITED | libc::WNOHANG,
            ptr::from_mut(&mut usage),
        )
    };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed before the call, and every bit pattern is a valid siginfo_t.
    let info = unsafe { info.assume_init() };
    // SAFETY: likewise for rusage.
    let usage = unsafe { usage.assume_init() };
    // SAFETY: after waitid the kernel has filled the SIGCHLD fields, or left them zero when nothing has ended.
    let pid = unsafe { info.si_pid() };
    if pid == 0 {
        return Ok(None);
    }
    // SAFETY: as above.
    let status = unsafe { info.si_status() };
    let ended = if info.si_code == libc::CLD_EXITED { Ended::Exited(status) } else { Ended::Signalled(status) };
    let micros = |time: libc::timeval| (time.tv_sec as u64) * 1_000_000 + time.tv_usec as u64;
    Ok(Some(Reaped {
        ended,
        cpu_usec: micros(usage.ru_utime) + micros(usage.ru_stime),
        maxrss: (usage.ru_maxrss as u64) * 1024,
    }))
}
