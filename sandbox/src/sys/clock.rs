//! The kernel's view of its own clock (adjtimex(2)).
#![expect(unsafe_code, reason = "no safe crate of the workspace offers adjtimex")]

use std::io;
use std::mem::MaybeUninit;

/// Whether the kernel's clock is kept synchronised with another one.
///
/// # Errors
/// As adjtimex(2).
pub(crate) fn is_synchronised() -> io::Result<bool> {
    // SAFETY: all fields are integers, for which zero is valid; with `modes` zero nothing is set.
    let mut state = unsafe { MaybeUninit::<libc::timex>::zeroed().assume_init() };
    // SAFETY: the structure outlives the call.
    match unsafe { libc::adjtimex(&raw mut state) } {
        -1 => Err(io::Error::last_os_error()),
        verdict => Ok(verdict != libc::TIME_ERROR),
    }
}
