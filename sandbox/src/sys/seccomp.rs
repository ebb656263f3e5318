//! seccomp(2) and seccomp_unotify(2): installing filters, and answering for them.
#![expect(unsafe_code, reason = "the seccomp crate installs no filter with a listener")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use seccompiler::sock_filter;

use super::process::check;

/// SECCOMP_USER_NOTIF_FLAG_CONTINUE.
const CONTINUE: u32 = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;

/// Installs a filter on the calling thread, and on all that it will start. Needs no_new_privs.
///
/// # Errors
/// As seccomp(2): EINVAL when the program is not valid.
pub(crate) fn install(program: &[sock_filter]) -> io::Result<()> {
    set_filter(program, 0).map(drop)
}

/// Installs a filter and returns the descriptor where its notifications arrive; closed at exec.
///
/// # Errors
/// As seccomp(2): EBUSY when a filter of the process has a listener already.
pub(crate) fn install_with_listener(program: &[sock_filter]) -> io::Result<OwnedFd> {
    // A signal that does not kill leaves a call that is being answered alone (Linux 5.19); before that the call is begun
    // again, which counts it twice.
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    let listener = match set_filter(program, flags | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => set_filter(program, flags)?,
        listener => listener?,
    };
    // SAFETY: with NEW_LISTENER the result is a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(listener) })
}

fn set_filter(program: &[sock_filter], flags: libc::c_ulong) -> io::Result<libc::c_int> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: the program outlives the call and the kernel only reads it; `sock_filter` has the same layout in both crates
    // (four fields, repr(C)).
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    let result = result as libc::c_int;
    check(result)?;
    Ok(result)
}

/// A call that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notification {
    /// Names it in the answer.
    pub(crate) id: u64,
    /// The call's number.
    pub(crate) call: i64,
    /// Its arguments at the time of the call.
    pub(crate) arguments: [u64; 6],
}

/// The kernel's structure with room for what later kernels may append.
#[repr(C)]
struct Received {
    notification: libc::seccomp_notif,
    reserve: [u64; 32],
}

/// Takes the next notification; waits when there is none.
///
/// # Errors
/// As seccomp_unotify(2): ENOENT when the caller was killed meanwhile.
pub(crate) fn receive(listener: BorrowedFd<'_>) -> io::Result<Notification> {
    // SAFETY: all fields are integers, for which zero is valid; the kernel wants zeroed memory.
    let mut received: Received = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes its structure into memory that outlives the call and has room for it.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut received) })?;
    let data = received.notification.data;
    Ok(Notification { id: received.notification.id, call: data.nr.into(), arguments: data.args })
}

/// Lets a call be carried out that waits for its answer. Its arguments in memory may be others by then; those in registers
/// are not, since its thread waits.
///
/// # Errors
/// As seccomp_unotify(2): ENOENT when the caller was killed meanwhile.
pub(crate) fn pass(listener: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    answer(listener, libc::seccomp_notif_resp { id, val: 0, error: 0, flags: CONTINUE })
}

/// Answers a notification with an errno.
///
/// # Errors
/// As seccomp_unotify(2): ENOENT when the caller was killed meanwhile.
pub(crate) fn refuse(listener: BorrowedFd<'_>, id: u64, errno: i32) -> io::Result<()> {
    answer(listener, libc::seccomp_notif_resp { id, val: 0, error: -errno, flags: 0 })
}

fn answer(listener: BorrowedFd<'_>, mut answer: libc::seccomp_notif_resp) -> io::Result<()> {
    // SAFETY: the kernel reads a structure that outlives the call.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) })
}
