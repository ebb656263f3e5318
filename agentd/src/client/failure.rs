//! What can go wrong for `agentctl`, the exit status of each, and what to do next.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use toolproto::code::Code;
use toolproto::job::Problem;

/// Exit status: the job or call ended in failure.
pub const FAILED: u8 = 1;
/// Exit status: bad usage or invalid input.
pub const INVALID: u8 = 2;
/// Exit status: the daemon cannot be reached.
pub const UNREACHABLE: u8 = 3;
/// Exit status: not permitted.
pub const NOT_PERMITTED: u8 = 4;

/// Why a command did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Nothing answers on the socket.
    #[error("no daemon answers on {}: {source}", socket.display())]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The socket's permissions keep this user out.
    #[error("this user may not use {}", socket.display())]
    SocketDenied {
        /// The socket.
        socket: PathBuf,
    },
    /// The connection broke, or what came was not what the API gives.
    #[error("the conversation with the daemon failed: {0}")]
    Conversation(String),
    /// The daemon refused.
    #[error("{}", .0.detail)]
    Refused(Box<Problem>),
    /// What was typed or given as a file is of no use.
    #[error("{0}")]
    Input(String),
    /// A file of this command could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Failure {
    /// A failure to connect, told apart by its cause.
    #[must_use]
    pub fn connecting(socket: &Path, source: io::Error) -> Self {
        let socket = socket.to_owned();
        if source.kind() == io::ErrorKind::PermissionDenied {
            Self::SocketDenied { socket }
        } else {
            Self::Unreachable { socket, source }
        }
    }

    /// A failure with a file of the command's.
    #[must_use]
    pub fn file(path: &Path, source: io::Error) -> Self {
        Self::File { path: path.to_owned(), source }
    }

    /// The exit status.
    #[must_use]
    pub fn status(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Unreachable { .. } | Self::Conversation(_) => UNREACHABLE,
            Self::SocketDenied { .. } => NOT_PERMITTED,
            Self::Refused(problem) if problem.code == Code::NotPermitted => NOT_PERMITTED,
            Self::Refused(problem) if problem.status >= 500 => FAILED,
            Self::Refused(_) | Self::Input(_) | Self::File { .. } => INVALID,
        })
    }

    /// What a person can do about it.
    #[must_use]
    pub fn next_step(&self) -> Option<String> {
        match self {
            Self::Unreachable { source, .. } if source.kind() == io::ErrorKind::NotFound => Some(
                "is agentd running? `systemctl start agentd`, or name its socket with --socket or AGENTD_SOCKET"
                    .to_owned(),
            ),
            Self::Unreachable { .. } => {
                Some("the socket is there, but nobody listens: `systemctl restart agentd`".to_owned())
            }
            Self::SocketDenied { .. } => {
                Some("ask an administrator: `usermod -aG agentd USER`, then log in again".to_owned())
            }
            Self::Refused(problem) => Some(problem.recovery_suggestion.clone()),
            Self::Conversation(_) => Some("look at agentd's log: `journalctl -u agentd`".to_owned()),
            Self::Input(_) | Self::File { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: Code, status: u16) -> Failure {
        Failure::Refused(Box::new(Problem {
            kind: "about:blank".to_owned(),
            title: code.meaning().to_owned(),
            status,
            detail: "x".to_owned(),
            code,
            recovery_suggestion: code.recovery_suggestion().to_owned(),
            request_id: None,
            offset: None,
            violations: Vec::new(),
        }))
    }

    #[test]
    fn exit_statuses_are_the_documented_ones() {
        let socket = Path::new("/s");
        let cases = [
            (Failure::connecting(socket, io::ErrorKind::NotFound.into()), 3),
            (Failure::connecting(socket, io::ErrorKind::ConnectionRefused.into()), 3),
            (Failure::connecting(socket, io::ErrorKind::PermissionDenied.into()), 4),
            (refused(Code::NotPermitted, 403), 4),
            (refused(Code::AgentUnknown, 404), 2),
            (refused(Code::InputInvalid, 400), 2),
            (refused(Code::LedgerUnavailable, 503), 1),
            (Failure::Input("x".to_owned()), 2),
        ];
        for (failure, status) in cases {
            assert_eq!(format!("{:?}", failure.status()), format!("{:?}", ExitCode::from(status)), "{failure}");
        }
    }

    #[test]
    fn those_who_cannot_connect_are_told_what_to_do() {
        let socket = Path::new("/run/agentd/agentd.sock");
        let next = |kind: io::ErrorKind| Failure::connecting(socket, kind.into()).next_step().unwrap();
        assert!(next(io::ErrorKind::NotFound).contains("systemctl start"));
        assert!(next(io::ErrorKind::PermissionDenied).contains("usermod -aG agentd"));
    }
}
