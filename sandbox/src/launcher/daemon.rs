//! The unprivileged daemon: started by the launcher, and its child until one of the two ends.
//!
//! The child's steps, in this order:
//! 1. a session of its own, so that a terminal's signals reach only the launcher, which passes them on;
//! 2. the capability bounding set, which needs a capability; then groups, gid, uid; then what capabilities are left;
//! 3. the death signal, which the change of uid would clear, and whether the launcher is still there;
//! 4. no_new_privs;
//! 5. default signals;
//! 6. the two descriptors under their numbers, everything else closed;
//! 7. exec, by the descriptor that was opened beforehand.

use std::convert::Infallible;
use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::account::Account;
use super::{activation, credentials};
use crate::privileges;
use crate::sys::clone::{Birth, fork};
use crate::sys::{exec_fd, process};

/// The number under which the daemon finds its end of the channel.
pub const LAUNCHER_FD: RawFd = 3;
/// The number under which the daemon finds the listening socket.
pub const LISTENER_FD: RawFd = 4;

/// The daemon could not be started.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Its executable cannot be opened.
    #[error("the daemon's executable {} cannot be opened", path.display())]
    Open {
        /// The executable.
        path: PathBuf,
        /// Why.
        source: Errno,
    },
    /// A path or variable holds a NUL byte.
    #[error("a path or a variable for the daemon holds a NUL byte")]
    Text(#[from] std::ffi::NulError),
    /// No process could be made.
    #[error("failed to fork the daemon")]
    Fork(#[source] io::Error),
    /// A step of the child failed.
    #[error("the daemon could not {step}")]
    Step {
        /// Which.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// How the daemon ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DaemonEnd {
    /// With this status.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
}

/// What the daemon is started with.
#[derive(Debug)]
pub struct DaemonStart<'a> {
    /// agentd's executable.
    pub executable: &'a Path,
    /// Its credentials, if the service manager gave some.
    pub credentials: Option<&'a Path>,
    /// The configuration directory.
    pub config_dir: &'a Path,
    /// The state directory.
    pub state_dir: &'a Path,
    /// The cgroup that the jobs' slices lie below, if there is one.
    pub cgroup_root: Option<&'a Path>,
    /// Whom it runs as.
    pub account: Account,
    /// Its end of the channel.
    pub channel: OwnedFd,
    /// The listening socket.
    pub listener: BorrowedFd<'a>,
    /// Whether receipts are signed by another key than before this start.
    pub key_has_changed: bool,
}

/// The running daemon.
#[derive(Debug)]
pub struct Daemon {
    pidfd: OwnedFd,
}

impl Daemon {
    /// Starts it. Waits until it has executed its program, which no one but the host can delay.
    ///
    /// # Errors
    /// When its executable cannot be opened or a step of the child fails.
    pub fn start(start: &DaemonStart<'_>) -> Result<Self, DaemonError> {
        let executable = rustix::fs::open(start.executable, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(|source| DaemonError::Open { path: start.executable.to_owned(), source })?;
        let path = CString::new(start.executable.as_os_str().as_bytes())?;
        let command = command(start)?;
        let environment = environment(start.credentials)?;
        let (status, report) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|error| DaemonError::Fork(error.into()))?;
        let launcher = rustix::process::getpid();
        let pidfd = fork(Birth::default(), || {
            // Without descriptors there is nobody to be told; the launcher then finds the end of its pipe.
            let Ok(own) = Descriptors::keep(executable.as_fd(), report.as_fd(), start) else { return 1 };
            let Err((step, error)) = become_daemon(start.account, launcher, &own, || {
                let error = exec_fd::execute(own.executable.as_fd(), &command, &environment);
                if error.raw_os_error() != Some(libc::ENOENT) {
                    return error;
                }
                // A script: its interpreter opens it by name.
                process::execve(&path, &command, &environment)
            });
            // If the launcher has ended, it need not know.
            let _ = rustix::io::write(&own.report, &encode(step, &error));
            1
        })
        .map_err(DaemonError::Fork)?
        .pidfd;
        drop(report);
        let mut failed = [0; 5];
        match rustix::io::retry_on_intr(|| rustix::io::read(&status, &mut failed)) {
            Ok(0) => Ok(Self { pidfd }),
            _ => Err(decode(failed)),
        }
    }

    /// Readable when it has ended.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        if let Err(error) = rustix::process::pidfd_send_signal(&self.pidfd, signal)
            && error != Errno::SRCH
        {
            tracing::error!(?signal, %error, "the daemon cannot be signalled");
        }
    }

    /// Reaps it, if it has ended.
    #[must_use]
    pub fn reap(&self) -> Option<DaemonEnd> {
        match rustix::process::waitid(WaitId::PidFd(self.pidfd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(None) => None,
            Ok(Some(status)) => Some(match (status.exit_status(), status.terminating_signal()) {
                (Some(status), _) => DaemonEnd::Exited(status),
                (None, signal) => DaemonEnd::Signalled(signal.unwrap_or_default()),
            }),
            // Reaped already: it has ended, and nothing more is known.
            Err(_) => Some(DaemonEnd::Signalled(0)),
        }
    }
}

fn command(start: &DaemonStart<'_>) -> Result<Vec<CString>, std::ffi::NulError> {
    let mut words: Vec<OsString> = vec![
        start.executable.into(),
        "daemon".into(),
        "--launcher-fd".into(),
        LAUNCHER_FD.to_string().into(),
        "--listener-fd".into(),
        LISTENER_FD.to_string().into(),
        "--config-dir".into(),
        start.config_dir.into(),
        "--state-dir".into(),
        start.state_dir.into(),
    ];
    if start.key_has_changed {
        words.push("--key-has-changed".into());
    }
    if let Some(root) = start.cgroup_root {
        words.extend(["--cgroup-root".into(), root.into()]);
    }
    words.iter().map(|word| CString::new(word.as_bytes())).collect()
}

fn environment(credentials: Option<&Path>) -> Result<Vec<CString>, std::ffi::NulError> {
    let own = |name: &OsString| {
        name == credentials::VARIABLE || activation::VARIABLES.iter().any(|variable| name == variable)
    };
    let handed = credentials.map(|path| (credentials::VARIABLE.into(), path.as_os_str().to_owned()));
    let variables = std::env::vars_os().filter(|(name, _)| !own(name)).chain(handed);
    variables.map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat())).collect()
}

/// The child's copies of what it needs, above the agreed numbers; nothing else is open any more.
struct Descriptors {
    executable: OwnedFd,
    report: OwnedFd,
    channel: OwnedFd,
    listener: OwnedFd,
    null: OwnedFd,
}

impl Descriptors {
    fn keep(executable: BorrowedFd<'_>, report: BorrowedFd<'_>, start: &DaemonStart<'_>) -> io::Result<Self> {
        let copy = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, LISTENER_FD + 1);
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let own = Self {
            executable: copy(executable)?,
            report: copy(report)?,
            channel: copy(start.channel.as_fd())?,
            listener: copy(start.listener)?,
            null: copy(null.as_fd())?,
        };
        // Closed by the next line.
        std::mem::forget(null);
        let all = [&own.executable, &own.report, &own.channel, &own.listener, &own.null];
        process::close_all_except(&all.map(AsFd::as_fd))?;
        Ok(own)
    }
}

const STEPS: [&str; 9] = [
    "leave the launcher's session",
    "drop its capability bounding set",
    "become the service account",
    "drop its capabilities",
    "ask to die with the launcher",
    "give up new privileges",
    "reset its signals",
    "arrange its descriptors",
    "execute its program",
];

fn become_daemon(
    account: Account,
    launcher: Pid,
    own: &Descriptors,
    exec: impl FnOnce() -> io::Error,
) -> Result<Infallible, (usize, io::Error)> {
    let at = |step: usize| move |error: io::Error| (step, error);
    rustix::process::setsid().map_err(|error| at(0)(error.into()))?;
    privileges::drop_bounding_set().map_err(at(1))?;
    privileges::become_user(account.uid, account.gid).map_err(at(2))?;
    privileges::drop_capabilities().map_err(at(3))?;
    privileges::die_with(launcher).map_err(at(4))?;
    privileges::forbid_new_privileges().map_err(at(5))?;
    process::reset_signals().map_err(at(6))?;
    let placed = [(&own.null, 0), (&own.channel, LAUNCHER_FD), (&own.listener, LISTENER_FD)];
    exec_fd::place(&placed.map(|(fd, number)| (fd.as_fd(), number))).map_err(at(7))?;
    Err((8, exec()))
}

fn encode(step: usize, error: &io::Error) -> [u8; 5] {
    let mut record = [0; 5];
    record[0] = u8::try_from(step).unwrap_or(u8::MAX);
    record[1..].copy_from_slice(&error.raw_os_error().unwrap_or(0).to_ne_bytes());
    record
}

fn decode(record: [u8; 5]) -> DaemonError {
    let [step, errno @ ..] = record;
    let step = STEPS.get(usize::from(step)).copied().unwrap_or("start");
    DaemonError::Step { step, source: io::Error::from_raw_os_error(i32::from_ne_bytes(errno)) }
}
