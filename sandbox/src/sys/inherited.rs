//! Descriptors that a process gets from the one that executed it, by number.
#![expect(unsafe_code, reason = "a descriptor number from the command line becomes an owned descriptor")]

use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

use rustix::io::{Errno, FdFlags};

static TAKEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// An inherited descriptor that cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum InheritedError {
    /// The process was not given it.
    #[error("descriptor {0} was not inherited")]
    NotOpen(RawFd, #[source] Errno),
    /// It was opened by this process itself, or taken before.
    #[error("descriptor {0} is not an inherited one, or was taken before")]
    NotInherited(RawFd),
}

/// Takes a descriptor that this process inherited; it is close-on-exec from then on. Each number can be taken once, best
/// before anything else is opened.
///
/// # Errors
/// When there is none of that number, or it is already this process's own.
pub fn take(number: RawFd) -> Result<OwnedFd, InheritedError> {
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    if number <= 2 || taken.contains(&number) {
        return Err(InheritedError::NotInherited(number));
    }
    // SAFETY: the number is not -1, and the borrow ends before this function does; should nothing be open under it, the
    // kernel answers EBADF.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = rustix::io::fcntl_getfd(borrowed).map_err(|error| InheritedError::NotOpen(number, error))?;
    // Every descriptor that Rust code opens is close-on-exec; one that survived an exec is not.
    if flags.contains(FdFlags::CLOEXEC) {
        return Err(InheritedError::NotInherited(number));
    }
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|error| InheritedError::NotOpen(number, error))?;
    taken.insert(number);
    // SAFETY: it is open, came through exec (so no owner in this process knows it), and `TAKEN` hands it out only once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn an_inherited_descriptor_is_taken_once_and_own_ones_never() {
        let own = rustix::io::dup(std::io::stdin()).unwrap();
        rustix::io::fcntl_setfd(&own, FdFlags::CLOEXEC).unwrap();
        assert!(matches!(take(own.as_raw_fd()), Err(InheritedError::NotInherited(_))));
        assert!(matches!(take(100_000), Err(InheritedError::NotOpen(..))));
        assert!(matches!(take(0), Err(InheritedError::NotInherited(0))));

        // Without the flag it is as if it had come through an exec; the test gives it away.
        rustix::io::fcntl_setfd(&own, FdFlags::empty()).unwrap();
        let number = std::os::fd::IntoRawFd::into_raw_fd(own);
        let taken = take(number).unwrap();
        assert!(rustix::io::fcntl_getfd(&taken).unwrap().contains(FdFlags::CLOEXEC));
        assert!(matches!(take(number), Err(InheritedError::NotInherited(_))));
    }
}
