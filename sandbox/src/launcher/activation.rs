//! The socket that the service manager bound for agentd (systemd.socket(5)) and passed on, as sd_listen_fds(3) says.

use std::os::fd::{OwnedFd, RawFd};

use crate::sys::inherited::{self, InheritedError};

/// The first passed descriptor's number.
const FIRST: RawFd = 3;

/// The variables that say what was passed. They are about this process and nobody else's business.
pub const VARIABLES: [&str; 4] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"];

/// What was passed cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ActivationError {
    /// agentd has one socket.
    #[error("the service manager passed {0} sockets; agentd serves one: leave one ListenStream= in agentd.socket")]
    Count(i32),
    /// It is not there.
    #[error("the service manager says that it passed a socket, and did not")]
    Missing(#[from] InheritedError),
}

/// The passed socket, if one was passed. To be asked before anything else is opened.
///
/// # Errors
/// When more than one was passed, or none in spite of the variables.
pub fn passed() -> Result<Option<OwnedFd>, ActivationError> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<i32>().ok();
    let own = rustix::process::getpid().as_raw_nonzero().get();
    match count(number("LISTEN_PID"), own, number("LISTEN_FDS")) {
        0 => Ok(None),
        1 => Ok(Some(inherited::take(FIRST)?)),
        more => Err(ActivationError::Count(more)),
    }
}

/// How many descriptors were passed to this process.
fn count(addressee: Option<i32>, own: i32, count: Option<i32>) -> i32 {
    if addressee == Some(own) { count.unwrap_or(0) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_passed_to_this_process_counts() {
        assert_eq!(count(Some(7), 7, Some(1)), 1);
        assert_eq!(count(Some(7), 7, Some(2)), 2);
        assert_eq!(count(Some(8), 7, Some(1)), 0, "another process's, from an environment that was handed down");
        assert_eq!(count(None, 7, Some(1)), 0);
        assert_eq!(count(Some(7), 7, None), 0);
    }
}
