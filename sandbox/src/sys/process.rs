//! The calling process: descriptors, signals, exit and execve.
#![expect(unsafe_code, reason = "signal dispositions, close_range, unshare, _exit and execve have no safe form")]

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use rustix::thread::UnshareFlags;

/// Ends the process at once: no destructors, no exit handlers, no flushing of buffers shared with a parent.
pub(crate) fn exit_now(status: i32) -> ! {
    // SAFETY: _exit(2) takes any status and does not return.
    unsafe { libc::_exit(status) }
}

/// Leaves namespaces for new ones.
///
/// # Errors
/// As unshare(2).
pub(crate) fn unshare(namespaces: UnshareFlags) -> io::Result<()> {
    // SAFETY: what makes unshare unsafe is CLONE_FILES under other threads; all callers pass CLONE_NEW* flags only.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }.map_err(io::Error::from)
}

/// Gives every signal its default action and unblocks all, as a program expects to find them.
///
/// # Errors
/// As rt_sigprocmask(2).
pub(crate) fn reset_signals() -> io::Result<()> {
    // The kernel's structure (handler, flags, restorer, mask) with every field 0: SIG_DFL. Not by the C library's function,
    // which refuses the two signals that it keeps for itself and that a parent may have left ignored.
    let default = [0_u64; 4];
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: the kernel reads a structure that outlives the call; the size is that of its signal mask. KILL and STOP
        // are refused with EINVAL and have their default action anyway.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), ptr::null_mut::<u64>(), size_of::<u64>())
        };
    }
    set_signal_mask(libc::SIG_UNBLOCK)
}

/// Blocks every signal that can be blocked.
///
/// # Errors
/// As rt_sigprocmask(2).
pub(crate) fn block_signals() -> io::Result<()> {
    set_signal_mask(libc::SIG_BLOCK)
}

fn set_signal_mask(how: libc::c_int) -> io::Result<()> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the set that it is given.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: initialised by sigfillset above.
    let all = unsafe { all.assume_init() };
    // SAFETY: the set is valid and no old mask is asked for.
    check(unsafe { libc::sigprocmask(how, &raw const all, ptr::null_mut()) })
}

/// A descriptor from which blocked signals are read (signalfd(2)); closed at exec.
///
/// # Errors
/// As signalfd(2).
pub(crate) fn signalfd(signals: &[i32]) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set that it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by sigemptyset above.
    let mut set = unsafe { set.assume_init() };
    for signal in signals {
        // SAFETY: the set is initialised; an unknown signal is refused with EINVAL.
        check(unsafe { libc::sigaddset(&raw mut set, *signal) })?;
    }
    // SAFETY: the set is valid; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    check(fd)?;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) })
}

/// Makes `stdin`, `stdout` and `stderr` the descriptors 0, 1 and 2.
///
/// # Errors
/// As dup3(2).
pub(crate) fn set_stdio(stdio: [BorrowedFd<'_>; 3]) -> io::Result<()> {
    // A source may itself be one of 0, 1, 2: copies above them first, so that none is overwritten before it is used.
    let mut copies = Vec::with_capacity(3);
    for fd in stdio {
        copies.push(rustix::io::fcntl_dupfd_cloexec(fd, 3)?);
    }
    for (target, copy) in (0..).zip(&copies) {
        // SAFETY: dup2 onto 0, 1, 2 closes what this process had there, which nobody uses any more: it is about to exec.
        check(unsafe { libc::dup2(copy.as_raw_fd(), target) })?;
    }
    Ok(())
}

/// Closes every descriptor except 0, 1, 2 and those to keep.
///
/// The owners of the closed ones must not use or drop them any more: the process is about to exec or to exit by
/// [`exit_now`].
///
/// # Errors
/// As close_range(2).
pub(crate) fn close_all_except(keep: &[BorrowedFd<'_>]) -> io::Result<()> {
    close_from(3, keep)
}

/// Closes every descriptor, 0, 1 and 2 included, except those to keep. Otherwise as [`close_all_except`].
///
/// # Errors
/// As close_range(2).
pub(crate) fn close_even_stdio_except(keep: &[BorrowedFd<'_>]) -> io::Result<()> {
    close_from(0, keep)
}

fn close_from(first: u32, keep: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut kept: Vec<u32> = keep.iter().map(|fd| fd.as_raw_fd() as u32).filter(|fd| *fd >= first).collect();
    kept.sort_unstable();
    let mut from = first;
    for fd in kept {
        close_range(from, fd.checked_sub(1))?;
        from = fd + 1;
    }
    close_range(from, Some(u32::MAX))
}

fn close_range(first: u32, last: Option<u32>) -> io::Result<()> {
    let Some(last) = last.filter(|last| *last >= first) else { return Ok(()) };
    // SAFETY: closing is what the caller asked for; `close_all_except` passes the duty on.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } as libc::c_int)
}

/// Replaces the program. Returns only on failure.
pub(crate) fn execve(path: &CStr, argv: &[CString], envp: &[CString]) -> io::Error {
    let argv = null_terminated(argv);
    let envp = null_terminated(envp);
    // SAFETY: both arrays end in a null pointer and point to NUL-terminated strings that outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    io::Error::last_os_error()
}

fn null_terminated(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

pub(super) fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Signals every process that the caller may signal, itself excepted: in a PID namespace, all of it. `None` only asks
/// whether there is any.
///
/// # Errors
/// ESRCH when there is no other process.
pub(crate) fn kill_everyone(signal: Option<rustix::process::Signal>) -> io::Result<()> {
    // SAFETY: kill(2) touches no memory of the caller.
    check(unsafe { libc::kill(-1, signal.map_or(0, rustix::process::Signal::as_raw)) })
}
