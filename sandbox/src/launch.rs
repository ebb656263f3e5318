//! From a plan to a running tool, and to its end.
//!
//! ```text
//!   start ──► Pending ──► Executing ──► tool reaped ──► PID 1 reaped, cgroup empty ──► finish
//!                │                            ▲
//!                └──► Failed{step, errno} ────┘          terminate and kill may come at any time
//! ```
//!
//! Two processes: PID 1 is born first, in a new PID namespace and in the call's cgroup; the tool is the launcher's own child
//! inside that namespace, so its pidfd and its status come straight to the launcher. Nothing here blocks.

use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use rustix::fs::{FileType, Gid, Mode, OFlags, Uid, fchown, fstat, fstatfs};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use rustix::thread::{LinkNameSpaceType, ThreadNameSpaceType, move_into_link_name_space, move_into_thread_name_spaces};
use toolproto::code::Code;
use toolproto::receipt::{Denial, MemorySource, Usage};

use crate::cgroup::{Events, Leaf};
use crate::denials::Channel;
use crate::mounts::frame::{Age, Frame, Framing, Layout};
use crate::mounts::{Scratch, make_scratch};
use crate::netns::bare::Bare;
use crate::plan::Plan;
use crate::protocol::LaunchFailure;
use crate::seccomp::Told;
use crate::steps::{RECORD, Report, decode};
pub use crate::steps::{Stdio, Step};
use crate::sys::clone::{Birth, Child, fork};
use crate::sys::wait::{Ended, Reaped, reap};
use crate::{denials, descriptors, init, steps};

/// The file system of pipes without a name (linux/magic.h).
const PIPEFS: i64 = 0x5049_5045;

/// How far a launch has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Still being set up.
    Pending,
    /// The program runs, or has run.
    Executing,
    /// It never ran.
    Failed(LaunchFailure),
}

/// How the tool's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this status.
    Status(i32),
    /// By this signal.
    Signal(i32),
}

/// A sandbox with processes in it.
#[derive(Debug)]
pub struct Running {
    init: Process,
    tool: Process,
    status: OwnedFd,
    report: Vec<u8>,
    status_at_end: bool,
    /// What brings the workspace to a tool that was started ahead.
    attaching: Option<Process>,
    leaf: Option<Leaf>,
    records: OwnedFd,
    scratch: Vec<Scratch>,
    frame: FrameInUse,
    /// A network that was made ahead, if PID 1 tells whether anybody has used it.
    network: Option<Bare>,
    /// The tool's namespaces that take long to end, from its exec on: its own end does not wait for theirs.
    namespaces: Vec<OwnedFd>,
    started: Instant,
}

#[derive(Debug)]
struct Process {
    child: Child,
    reaped: Option<Reaped>,
}

impl From<Child> for Process {
    fn from(child: Child) -> Self {
        Self { child, reaped: None }
    }
}

impl Process {
    /// Reaps it if it has ended.
    fn look(&mut self) {
        if self.reaped.is_none() {
            match reap(self.child.pidfd.as_fd()) {
                Ok(reaped) => self.reaped = reaped,
                Err(error) => tracing::error!(pid = self.child.pid.as_raw_nonzero(), %error, "cannot reap"),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        if self.reaped.is_none()
            && let Err(error) = pidfd_send_signal(&self.child.pidfd, signal)
            && error != Errno::SRCH
        {
            tracing::error!(pid = self.child.pid.as_raw_nonzero(), %error, "cannot signal");
        }
    }
}

/// Starts a sandbox. Must be called without other threads, and returns before the tool's own steps are done.
///
/// # Errors
/// LAUNCH_FAILED with the step `init`, `pid_namespace` or `clone` when a process cannot be made; nothing is left then.
pub fn start(plan: Plan, stdio: Stdio, leaf: Option<Leaf>) -> Result<Running, LaunchFailure> {
    let fail = |step: &str, error: io::Error| failure(step, error.raw_os_error(), &error.to_string());
    for fd in [&stdio.stdin, &stdio.stdout, &stdio.stderr].into_iter().chain(&stdio.events) {
        hand_over(fd, plan.sandbox_id).map_err(|error| fail("stdio", error))?;
    }
    let (status, status_of_tool) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| fail("status", error.into()))?;
    rustix::io::ioctl_fionbio(&status, true).map_err(|error| fail("status", error.into()))?;
    let launcher = pidfd_open(getpid(), PidfdFlags::empty()).map_err(|error| fail("init", error.into()))?;
    let own = rustix::fs::open("/proc/self/ns/pid", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| fail("pid_namespace", error.into()))?;

    let channel = Channel::new().map_err(|error| fail("denials", error))?;
    let scratch = make_scratch(&plan.root).map_err(|error| fail("mounts", error))?;
    let (frame, frame_of_tool) = match &plan.framing {
        Framing::Own => (None, None),
        Framing::Leave(_) => {
            let pair = descriptors::pair().and_then(|(ours, tools)| {
                rustix::io::ioctl_fionbio(&ours, true)?;
                Ok((Some(ours), Some(tools)))
            });
            pair.map_err(|error| fail("frame", error))?
        }
        Framing::Kept(frame) => {
            frame.name(&plan.root.accounts).map_err(|error| fail("frame", error))?;
            (None, None)
        }
    };
    let cgroup = leaf.as_ref().map(AsFd::as_fd);
    let started = Instant::now();
    let first = Birth { new_pid_namespace: true, cgroup };
    let init = fork(first, || init::run(launcher.as_fd(), &channel, &plan.program, (plan.sandbox_id, plan.sandbox_id)))
        .map_err(|error| fail("init", error))?;
    let tool = born_beside(&init, own.as_fd(), Birth { new_pid_namespace: false, cgroup }, || {
        let listener = plan.told().map(|told| (channel.tool.as_fd(), told));
        let frame = frame_of_tool.as_ref().map(AsFd::as_fd);
        steps::run(&plan, &stdio, &scratch, status_of_tool.as_fd(), (listener, frame))
    });
    // The tool's process has much to do, and the launcher nothing that cannot wait.
    rustix::thread::sched_yield();
    let mut init = Process::from(init);
    let told = plan.told();
    match tool {
        Ok(tool) => Ok(Running {
            init,
            tool: tool.into(),
            status,
            report: Vec::new(),
            status_at_end: false,
            attaching: None,
            leaf,
            records: channel.records,
            scratch,
            frame: FrameInUse::of(plan.framing, frame.map(|frame| (frame, plan.root.layout))),
            network: plan.bare.filter(|_| told == Some(Told::Sockets)),
            namespaces: Vec::new(),
            started,
        }),
        Err((step, error)) => {
            init.signal(Signal::KILL);
            wait_for(&mut init);
            if let Some(leaf) = leaf
                && let Err(error) = leaf.remove()
            {
                tracing::error!(%error, "leaf left behind");
            }
            Err(fail(step, error))
        }
    }
}

impl Running {
    /// Readable when [`Self::read_status`] has something to read.
    #[must_use]
    pub fn status(&self) -> BorrowedFd<'_> {
        self.status.as_fd()
    }

    /// The tool's pidfd: readable when it has ended.
    #[must_use]
    pub fn tool(&self) -> BorrowedFd<'_> {
        self.tool.child.pidfd.as_fd()
    }

    /// The pidfd of the sandbox's PID 1: readable when it has ended, and with it every other process.
    #[must_use]
    pub fn init(&self) -> BorrowedFd<'_> {
        self.init.child.pidfd.as_fd()
    }

    /// The tool's number on the host, for messages only.
    #[must_use]
    pub fn tool_pid(&self) -> Pid {
        self.tool.child.pid
    }

    /// The call's cgroup below the root, if it has one.
    #[must_use]
    pub fn cgroup(&self) -> Option<&str> {
        self.leaf.as_ref().map(Leaf::relative_path)
    }

    /// Reads the status pipe as far as it goes.
    pub fn read_status(&mut self) -> Status {
        while !self.status_at_end {
            let mut buffer = [0; 4 * RECORD];
            match rustix::io::read(&self.status, &mut buffer) {
                Ok(0) => self.status_at_end = true,
                Ok(length) => self.report.extend_from_slice(&buffer[..length]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Status::Pending,
                Err(error) => {
                    return Status::Failed(failure(
                        "status",
                        Some(error.raw_os_error()),
                        "cannot read the status pipe",
                    ));
                }
            }
        }
        let records: Vec<_> =
            self.report.chunks(RECORD).map(|record| record.try_into().ok().and_then(decode)).collect();
        match records.as_slice() {
            [Some(Report::Ready)] => {
                self.keep_namespaces();
                self.frame.take_in();
                Status::Executing
            }
            [.., Some(Report::Failed(step, errno))] => Status::Failed(failed_step(*step, *errno)),
            _ => Status::Failed(failure("died", None, "the process died while it was set up")),
        }
    }

    /// One that cannot be had is not needed: the tool's end takes longer then.
    fn keep_namespaces(&mut self) {
        if self.namespaces.is_empty() {
            let own = format!("/proc/{}/ns", self.tool.child.pid.as_raw_nonzero());
            let open =
                |name| rustix::fs::open(format!("{own}/{name}"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
            self.namespaces = ["mnt", "net"].into_iter().filter_map(|name| open(name).ok()).collect();
        }
    }

    /// What was started ahead serves its call from now on: it is brought the workspace, if the call has one, and its time counts.
    /// [`Self::read_status`] says when the workspace is there.
    ///
    /// # Errors
    /// LAUNCH_FAILED when no process can be made.
    pub fn serve(&mut self, workspace: Option<(BorrowedFd<'_>, &[PathBuf])>) -> Result<(), LaunchFailure> {
        self.started = Instant::now();
        let Some((workspace, guarded)) = workspace else { return Ok(()) };
        let fail = |error: io::Error| failure("attach", error.raw_os_error(), &error.to_string());
        let (status, status_of_child) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| fail(error.into()))?;
        rustix::io::ioctl_fionbio(&status, true).map_err(|error| fail(error.into()))?;
        let tool = self.tool.child.pidfd.as_fd();
        let launcher = getpid();
        let attach = || steps::attach(launcher, tool, workspace, guarded, status_of_child.as_fd());
        let child = fork(Birth::default(), attach);
        self.attaching = Some(child.map_err(fail)?.into());
        (self.status, self.report, self.status_at_end) = (status, Vec::new(), false);
        Ok(())
    }

    /// Asks every process of the sandbox to end: SIGTERM, and SIGCONT for the stopped.
    pub fn terminate(&self) {
        self.init.signal(Signal::TERM);
    }

    /// Whether the tool and all that it started have gone, so that PID 1 has nobody left. Without a cgroup nobody but PID 1 can say
    /// that.
    #[must_use]
    pub fn is_deserted(&self) -> bool {
        self.tool.reaped.is_some()
            && self.attaching.as_ref().is_none_or(|process| process.reaped.is_some())
            && self.leaf.as_ref().is_some_and(Leaf::has_one_process)
    }

    /// Kills PID 1 of a sandbox that [is deserted](Self::is_deserted).
    pub fn dismiss(&self) {
        self.init.signal(Signal::KILL);
    }

    /// Kills every process of the sandbox.
    pub fn kill(&self) {
        if let Some(leaf) = &self.leaf
            && let Err(error) = leaf.kill()
        {
            tracing::error!(%error, "cannot kill by cgroup");
        }
        // The end of its PID 1 is the end of a PID namespace, with or without a cgroup.
        self.init.signal(Signal::KILL);
        self.attaching.iter().for_each(|process| process.signal(Signal::KILL));
    }

    /// Reaps what has ended, and says how the tool ended once it has.
    pub fn reap(&mut self) -> Option<Exit> {
        self.tool.look();
        self.init.look();
        self.attaching.iter_mut().for_each(Process::look);
        self.tool.reaped.map(|reaped| match reaped.ended {
            Ended::Exited(status) => Exit::Status(status),
            Ended::Signalled(signal) => Exit::Signal(signal),
        })
    }

    /// Whether no process is left. All of the launcher's children must have been reaped.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.attaching.as_ref().is_none_or(|process| process.reaped.is_some())
            && self.tool.reaped.is_some()
            && self.init.reaped.is_some()
            && self.leaf.as_ref().is_none_or(Leaf::is_empty)
    }

    /// Adds up. To be called when the sandbox [is gone](Self::is_gone), or [deserted](Self::is_deserted).
    #[must_use]
    pub fn finished(&self) -> Finished {
        let figures = self.leaf.as_ref().map(Leaf::usage).unwrap_or_default();
        let mut events = self.leaf.as_ref().map(Leaf::events).unwrap_or_default();
        let by_rusage = self.tool.reaped;
        let (memory_peak, memory_source) = match (figures.memory_peak, by_rusage) {
            (Some(peak), _) => (Some(peak), Some(MemorySource::Cgroup)),
            (None, Some(reaped)) => (Some(reaped.maxrss), Some(MemorySource::Rusage)),
            (None, None) => (None, None),
        };
        let usage = Usage {
            wall_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            cpu_usec: figures.cpu_usec.or(by_rusage.map(|reaped| reaped.cpu_usec)).unwrap_or(0),
            memory_peak,
            memory_source,
            pids_peak: figures.pids_peak,
            io_read: figures.io_read,
            io_write: figures.io_write,
            ..Usage::default()
        };
        let full: Vec<_> = self.scratch.iter().filter_map(Scratch::denial).collect();
        events.no_space = !full.is_empty();
        let mut denied = denials::read(self.records.as_fd());
        denied.extend(full);
        denied.extend(events.denials());
        let cgroup = self.leaf.as_ref().map(|leaf| leaf.relative_path().to_owned());
        Finished { usage, events, denied, cgroup }
    }

    /// What is left of it once it [is gone](Self::is_gone).
    #[must_use]
    pub fn into_remains(self) -> Remains {
        let network = self.network.filter(|_| !denials::is_socket_made(self.records.as_fd()));
        Remains {
            leaf: self.leaf,
            reusable: Reusable { frame: self.frame.into_frame(), network },
            _namespaces: self.namespaces,
            _scratch: self.scratch,
        }
    }
}

/// What a sandbox leaves in which no process is left: its cgroup, its mounts, its network, its private file systems. The
/// kernel takes as long for their end as for that of the processes, and nobody who waits for those need wait for it.
#[derive(Debug)]
pub struct Remains {
    leaf: Option<Leaf>,
    reusable: Reusable,
    _namespaces: Vec<OwnedFd>,
    _scratch: Vec<Scratch>,
}

impl Remains {
    /// Clears it away. Yields the cgroup when that could not be removed, as when a process is stuck in the kernel, and what
    /// is as new.
    #[must_use]
    pub fn clear_away(self) -> (Option<Leaf>, Reusable) {
        let leaf = self.leaf.filter(|leaf| {
            let removed = leaf.remove();
            removed.inspect_err(|error| tracing::warn!(%error, "leaf set aside")).is_err()
        });
        (leaf, self.reusable)
    }
}

/// What of a sandbox in which no process is left another one may have.
#[derive(Debug)]
pub struct Reusable {
    /// The frame of its root: nobody was in it.
    pub frame: Option<Frame>,
    /// Its network: nobody has made a socket in it.
    pub network: Option<Bare>,
}

/// The frame of a sandbox's root.
#[derive(Debug)]
enum FrameInUse {
    /// The tool's process leaves it here, before its exec.
    Coming(OwnedFd, Layout, Age),
    /// It was entered, and nothing has been executed in its copy yet: if that fails, it may be the frame's fault.
    Untried(Frame),
    There(Frame),
    Nobodys,
}

impl FrameInUse {
    fn of(framing: Framing, coming: Option<(OwnedFd, Layout)>) -> Self {
        match (framing, coming) {
            (Framing::Kept(frame), _) => Self::Untried(frame),
            (Framing::Leave(age), Some((from, layout))) => Self::Coming(from, layout, age),
            (Framing::Leave(_) | Framing::Own, _) => Self::Nobodys,
        }
    }

    /// The program has been executed: what was left is taken in, and what was entered has proved of use.
    fn take_in(&mut self) {
        *self = match mem::replace(self, Self::Nobodys) {
            // One that cannot be had is made anew.
            Self::Coming(from, layout, age) => {
                Frame::receive(from.as_fd(), layout, age).ok().flatten().map_or(Self::Nobodys, Self::There)
            }
            Self::Untried(frame) => Self::There(frame),
            taken => taken,
        };
    }

    fn into_frame(self) -> Option<Frame> {
        match self {
            Self::There(frame) => Some(frame),
            Self::Coming(..) | Self::Untried(_) | Self::Nobodys => None,
        }
    }
}

/// A sandbox that is over.
#[derive(Debug)]
pub struct Finished {
    /// What it used: the cgroup's figures where there are any, else those of the tool's process.
    pub usage: Usage,
    /// Which limits were hit.
    pub events: Events,
    /// What was refused, as far as the kernel tells: system calls and limits.
    pub denied: Vec<Denial>,
    /// The call's cgroup below the root, if it had one.
    pub cgroup: Option<String>,
}

/// Gives the tool what has no name in any file system: a file of the launcher's own that captures output, or a pipe. It can
/// then open `/dev/stdin` and its like, which asks for permission anew. A caller's files stay as they are.
fn hand_over(fd: &OwnedFd, sandbox_id: u32) -> io::Result<()> {
    let stat = fstat(fd)?;
    let nameless = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => stat.st_nlink == 0 && stat.st_uid == 0,
        FileType::Fifo => fstatfs(fd)?.f_type == PIPEFS,
        _ => false,
    };
    if nameless {
        fchown(fd, Some(Uid::from_raw(sandbox_id)), Some(Gid::from_raw(sandbox_id)))?;
    }
    Ok(())
}

/// Makes a child that is born in the PID namespace of `init` and is the caller's own.
fn born_beside(
    init: &Child,
    own: BorrowedFd<'_>,
    birth: Birth<'_>,
    code: impl FnOnce() -> i32,
) -> Result<Child, (&'static str, io::Error)> {
    // setns(2) with CLONE_NEWPID moves only the children that are yet to come.
    move_into_thread_name_spaces(init.pidfd.as_fd(), ThreadNameSpaceType::PROCESS_ID)
        .map_err(|error| ("pid_namespace", error.into()))?;
    let child = fork(birth, code).map_err(|error| ("clone", error));
    move_into_link_name_space(own, Some(LinkNameSpaceType::ProcessID))
        .map_err(|error| ("pid_namespace", error.into()))?;
    child
}

/// Waits for a process that was killed before it did anything.
fn wait_for(process: &mut Process) {
    while process.reaped.is_none() {
        let mut ended = [rustix::event::PollFd::new(&process.child.pidfd, rustix::event::PollFlags::IN)];
        if let Err(error) = rustix::event::poll(&mut ended, None)
            && error != Errno::INTR
        {
            return;
        }
        process.look();
    }
}

fn failed_step(step: Step, errno: Option<i32>) -> LaunchFailure {
    let reason =
        errno.map_or_else(|| "no reason given".to_owned(), |errno| io::Error::from_raw_os_error(errno).to_string());
    let message = match step {
        Step::Exec => format!("the program cannot be executed: {reason}"),
        step => format!("the sandbox's step `{}` failed: {reason}", step.as_str()),
    };
    failure(step.as_str(), errno, &message)
}

fn failure(step: &str, errno: Option<i32>, message: &str) -> LaunchFailure {
    LaunchFailure { code: Code::LaunchFailed, step: step.to_owned(), errno, message: message.to_owned() }
}
