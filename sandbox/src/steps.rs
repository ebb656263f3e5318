//! The tool's process between birth and exec: a list of steps in the one order that works.
//!
//! A failing step ends the process and leaves `{step, errno}` on the status pipe, which closes at exec. READY stands
//! before the exec, so end of file after READY means that the program runs, and end of file without it that the process died
//! on its way. Nothing is read from the tool's own output.

use std::convert::Infallible;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use rustix::io::FdFlags;
use rustix::process::{Pid, setsid};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};

use crate::mounts::frame::Framing;
use crate::mounts::{Brought, Scratch};
use crate::plan::{Plan, View};
use crate::seccomp::{Confined, Told};
use crate::sys::process::{close_all_except, execve, reset_signals, set_stdio};
use crate::{landlock, mounts, privileges, rlimits, seccomp};

/// One message on the status pipe: what happened, and an errno (0 when there is none).
pub(crate) const RECORD: usize = 8;
/// The step byte of READY.
const READY: u8 = 255;

macro_rules! steps {
    ($($variant:ident = $text:literal;)*) => {
        /// A step between birth and exec.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Step {
            $(#[doc = $text] $variant,)*
        }

        impl Step {
            const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name, as in [`LaunchFailure`](crate::protocol::LaunchFailure).
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

steps! {
    Session = "session";
    OutOfMemory = "out_of_memory";
    Namespaces = "namespaces";
    Mounts = "mounts";
    Hostname = "hostname";
    Rlimits = "rlimits";
    BoundingSet = "bounding_set";
    Identity = "identity";
    Capabilities = "capabilities";
    DeathSignal = "death_signal";
    NoNewPrivileges = "no_new_privileges";
    Descriptors = "descriptors";
    Directory = "directory";
    Landlock = "landlock";
    Gate = "gate";
    Seccomp = "seccomp";
    Ready = "ready";
    Exec = "exec";
}

/// The tool's descriptors: 0, 1, 2, and one that keeps the number that it has here.
#[derive(Debug)]
pub struct Stdio {
    /// What it reads.
    pub stdin: std::os::fd::OwnedFd,
    /// Its reply.
    pub stdout: std::os::fd::OwnedFd,
    /// Its log.
    pub stderr: std::os::fd::OwnedFd,
    /// Where it may write progress.
    pub events: Option<std::os::fd::OwnedFd>,
    /// A pipe that a byte must come from before the exec. It closes with it.
    pub gate: Option<std::os::fd::OwnedFd>,
}

impl Stdio {
    pub(crate) fn as_fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.stdin.as_fd(), self.stdout.as_fd(), self.stderr.as_fd()]
    }

    /// Lets the events' descriptor live on in the program.
    fn keep_events(&self) -> io::Result<()> {
        match &self.events {
            Some(events) => Ok(rustix::io::fcntl_setfd(events, FdFlags::empty())?),
            None => Ok(()),
        }
    }
}

struct Failed {
    step: Step,
    errno: Option<i32>,
}

/// Confines the calling process and becomes the program. Returns an exit status only when that failed.
///
/// `status` takes the report, `listener` the filter's listener, where refused calls are named, `frame` the frame of the root,
/// where it is left.
pub(crate) fn run(
    plan: &Plan,
    stdio: &Stdio,
    scratch: &[Scratch],
    status: BorrowedFd<'_>,
    (listener, frame): (Option<(BorrowedFd<'_>, Told)>, Option<BorrowedFd<'_>>),
) -> i32 {
    let Err(Failed { step, errno }) = confine_and_exec(plan, stdio, scratch, status, (listener, frame));
    // If the launcher has gone there is nobody to tell.
    let _ = rustix::io::write(status, &encode(step as u8, errno.unwrap_or(0)));
    1
}

/// The order, and why:
/// 1. a session of its own, so that no terminal signal of the host's reaches it; and no inherited protection when the host
///    runs out of memory, while its /proc is there;
/// 2. namespaces, while there is the privilege to make them, and the fresh root in them;
/// 3. the host name, in the new UTS namespace; rlimits, while they may still be raised;
/// 4. the bounding set, which needs a capability; then groups, gid, uid; then what capabilities are left;
/// 5. the death signal, which the change of uid would clear;
/// 6. no_new_privs, without which neither Landlock nor seccomp can be had;
/// 7. descriptors, before the tool's code could use one;
/// 8. the working directory, by the tool's own rights;
/// 9. Landlock, whose system calls the filter need not allow to the tool; the gate, as late as nothing is refused to its
///    reader; and seccomp last.
fn confine_and_exec(
    plan: &Plan,
    stdio: &Stdio,
    scratch: &[Scratch],
    status: BorrowedFd<'_>,
    (listener, frame): (Option<(BorrowedFd<'_>, Told)>, Option<BorrowedFd<'_>>),
) -> Result<Infallible, Failed> {
    let [events, gate] = [&stdio.events, &stdio.gate].map(|one| one.as_ref().map(AsFd::as_fd));
    let kept: Vec<_> = [Some(status), listener.map(|(socket, _)| socket), events, gate].into_iter().flatten().collect();
    let workspace = match &plan.view {
        View::Empty | View::Later => None,
        View::Tree(tree) => Some(tree.as_fd()),
    };
    at(Step::Session, reset_signals().and_then(|()| Ok(setsid()?)))?;
    at(Step::OutOfMemory, rlimits::be_first_to_go())?;
    let brought = at(Step::Mounts, Brought::open(&plan.root, scratch, workspace))?;
    if let Framing::Kept(frame) = &plan.framing {
        at(Step::Namespaces, frame.enter())?;
    }
    at(Step::Namespaces, plan.namespaces.enter(plan.network_ahead()))?;
    at(Step::Mounts, mounts::enter(&plan.root, (&plan.framing, frame), brought))?;
    at(Step::Hostname, plan.namespaces.set_hostname("sandbox"))?;
    at(Step::Rlimits, plan.rlimits.set())?;
    at(Step::BoundingSet, privileges::drop_bounding_set())?;
    at(Step::Identity, privileges::become_user(plan.sandbox_id, plan.sandbox_id))?;
    at(Step::Capabilities, privileges::drop_capabilities())?;
    at(Step::DeathSignal, privileges::die_with_parent())?;
    at(Step::NoNewPrivileges, privileges::forbid_new_privileges())?;
    at(Step::Descriptors, keep_descriptors(stdio, &kept))?;
    at(Step::Directory, mounts::go_to_start(plan.root.layout.place))?;
    at(Step::Landlock, landlock::restrict(plan.landlock, &plan.access))?;
    at(Step::Gate, gate.map_or(Ok(()), pass))?;
    let confined = at(Step::Seccomp, seccomp::install(&plan.program, listener))?;
    at(Step::Ready, rustix::io::write(status, &encode(READY, 0)).map_err(io::Error::from))?;
    at(Step::Exec, exec(plan, confined))
}

/// Waits until the program may be executed.
fn pass(gate: BorrowedFd<'_>) -> io::Result<()> {
    match rustix::io::retry_on_intr(|| rustix::io::read(gate, &mut [0]))? {
        0 => Err(io::Error::other("whoever keeps the gate has gone")),
        _ => Ok(()),
    }
}

/// Attaches the workspace of a tool that was started ahead, in a process of its own that ends then. Returns an exit status, and
/// leaves the same report as [`run`].
pub(crate) fn attach(
    launcher: Pid,
    tool: BorrowedFd<'_>,
    workspace: BorrowedFd<'_>,
    guarded: &[PathBuf],
    status: BorrowedFd<'_>,
) -> i32 {
    let attached = privileges::die_with(launcher)
        // It holds the ends of pipes of others that wait.
        .and_then(|()| close_all_except(&[tool, workspace, status]))
        .and_then(|()| Ok(move_into_thread_name_spaces(tool, ThreadNameSpaceType::MOUNT)?))
        .and_then(|()| mounts::attach_later(workspace, guarded));
    let (record, exit_status) = match attached {
        Ok(()) => (encode(READY, 0), 0),
        Err(error) => (encode(Step::Mounts as u8, errno_of(&error).unwrap_or(0)), 1),
    };
    // If the launcher has gone there is nobody to tell.
    let _ = rustix::io::write(status, &record);
    exit_status
}

/// None but the tool's own, and those to keep until the exec.
fn keep_descriptors(stdio: &Stdio, kept: &[BorrowedFd<'_>]) -> io::Result<()> {
    // First, since the limit of open files is the tool's by now: a copy needs a number below it, and the launcher may have as many open.
    let own: Vec<_> = stdio.as_fds().into_iter().chain(kept.iter().copied()).collect();
    close_all_except(&own)?;
    set_stdio(stdio.as_fds())?;
    stdio.keep_events()?;
    close_all_except(kept)
}

fn at<T>(step: Step, result: io::Result<T>) -> Result<T, Failed> {
    result.map_err(|error| Failed { step, errno: errno_of(&error) })
}

/// The errno of an error, or of the innermost error that it carries.
pub(crate) fn errno_of(error: &io::Error) -> Option<i32> {
    let mut found = error.raw_os_error();
    let mut source = error.get_ref().map(|inner| inner as &dyn std::error::Error);
    while let Some(inner) = source {
        found = inner.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error).or(found);
        source = inner.source();
    }
    found
}

/// Tries the program's places in the order of PATH, as execvp(3) does. Takes the proof that nothing is left to restrict.
fn exec(plan: &Plan, _confined: Confined) -> io::Result<Infallible> {
    let mut verdict = io::Error::from_raw_os_error(libc::ENOENT);
    for place in &plan.places {
        let error = execve(place, &plan.command, &plan.environment);
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            // Somewhere later on PATH may be one that can be executed; if not, this is the reason to give.
            Some(libc::EACCES) => verdict = error,
            _ => return Err(error),
        }
    }
    Err(verdict)
}

/// The candidates for a command on a PATH.
pub(crate) fn places(command: &CString, path: &str) -> Vec<CString> {
    if command.as_bytes().contains(&b'/') {
        return vec![command.clone()];
    }
    let in_directory = |directory: &str| {
        let mut place = directory.as_bytes().to_vec();
        place.push(b'/');
        place.extend_from_slice(command.as_bytes());
        CString::new(place).ok()
    };
    path.split(':').filter(|directory| directory.starts_with('/')).filter_map(in_directory).collect()
}

/// What the status pipe says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// Everything but the exec is done.
    Ready,
    /// A step failed, with this errno if the kernel gave one.
    Failed(Step, Option<i32>),
}

fn encode(step: u8, errno: i32) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[0] = step;
    record[4..].copy_from_slice(&errno.to_le_bytes());
    record
}

/// Reads one record; absent when it is none.
pub(crate) fn decode(record: [u8; RECORD]) -> Option<Report> {
    if record[0] == READY {
        return Some(Report::Ready);
    }
    let step = Step::ALL.get(usize::from(record[0])).copied()?;
    let errno = i32::from_le_bytes([record[4], record[5], record[6], record[7]]);
    Some(Report::Failed(step, (errno != 0).then_some(errno)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_were_written() {
        for step in Step::ALL {
            assert_eq!(decode(encode(*step as u8, 13)), Some(Report::Failed(*step, Some(13))));
        }
        assert_eq!(decode(encode(Step::Mounts as u8, 0)), Some(Report::Failed(Step::Mounts, None)));
        assert_eq!(decode(encode(READY, 0)), Some(Report::Ready));
        assert_eq!(decode(encode(200, 0)), None);
    }

    #[test]
    fn commands_are_looked_for_on_absolute_directories_only() {
        let command = |text: &str| CString::new(text).unwrap();
        assert_eq!(places(&command("/bin/sh"), "/usr/bin"), [command("/bin/sh")]);
        assert_eq!(places(&command("./a"), "/usr/bin"), [command("./a")]);
        assert_eq!(places(&command("sh"), "/usr/bin:.::/bin"), [command("/usr/bin/sh"), command("/bin/sh")]);
    }
}
