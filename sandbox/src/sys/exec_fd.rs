//! Executing a program by descriptor, with descriptors under agreed numbers.
#![expect(unsafe_code, reason = "execveat and dup2 onto a plain number have no safe form")]

use std::ffi::{CString, c_char};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr;

/// Above every number that [`place`] is asked for.
const OUT_OF_THE_WAY: RawFd = 100;

/// Puts descriptors under these numbers, open across exec. For a process that was just forked and is about to exec: what
/// was open under the numbers is closed, and its owners must not use it any more.
///
/// # Errors
/// As dup2(2).
pub(crate) fn place(descriptors: &[(BorrowedFd<'_>, RawFd)]) -> io::Result<()> {
    // One's source may be another's target: copies first.
    let mut copies = Vec::with_capacity(descriptors.len());
    for (source, target) in descriptors {
        copies.push((rustix::io::fcntl_dupfd_cloexec(source, OUT_OF_THE_WAY)?, *target));
    }
    for (copy, target) in &copies {
        // SAFETY: takes plain numbers; the caller guarantees that nobody uses what it closes.
        if unsafe { libc::dup2(copy.as_raw_fd(), *target) } == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Replaces the program by an opened executable. Returns only on failure: ENOENT for a script, whose interpreter cannot
/// open a close-on-exec descriptor.
pub(crate) fn execute(executable: BorrowedFd<'_>, argv: &[CString], envp: &[CString]) -> io::Error {
    let (argv, envp) = (null_terminated(argv), null_terminated(envp));
    // SAFETY: the path is an empty NUL-terminated string, as AT_EMPTY_PATH wants; both arrays end in a null pointer and
    // point to NUL-terminated strings that outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            executable.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    io::Error::last_os_error()
}

fn null_terminated(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}
