//! One call, from its order to its sealed evidence.
//!
//! ```text
//!                       worker has read the tree        READY and exec            tool ended, or deadline, or Stop
//!   AwaitingWorkspace ───────────────────────► Starting ─────────────► Running ─────────────────────► Terminating
//!          │                                       │                                                   │       │
//!          │ no worker, deadline, Stop             │ a step failed, deadline, Stop          everyone   │       │ grace over
//!          │                                       ▼                                          gone     │       ▼
//!          │                                    Killing ◄──────────────────────────────────────────────┼─── Killing
//!          │                                       │ everyone gone, or stuck in the kernel             │
//!          └───────────────────────────────────────┴─────────────────► Ended ◄─────────────────────────┤
//!                                                                        │ ▲                           │ nobody but PID 1 left
//!                        the tree is read again, the verdict is there    │ └──────── Leaving ◄─────────┘
//!                                                                        ▼  PID 1 gone
//!                                                                     Sealed
//! ```
//!
//! AwaitingWorkspace: the worker reads the tree as it is before. Starting: the sandbox is being set up. Running: the
//! program runs. Terminating: everyone has got SIGTERM. Killing: everyone has got SIGKILL. Ended: no process is left (or
//! what is left is set aside), agentd has been told, and the call waits for two things in any order: agentd's verdict and
//! the worker's second reading. Then it is sealed and forgotten. Leaving: of a sandbox that could not write to a workspace nobody is left
//! but PID 1, which is the launcher's own and is killed. agentd has been told, and reads the reply meanwhile.

mod attestation;
mod ending;
mod gate;

use std::mem;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::{Change, Claims, Denial, Outcome, PolicyIdentity, ToolIdentity, Usage, WorkspaceChange};

use self::gate::{Deferred, Gate};
use super::capture::{Stderr, Stdout};
use super::program::{Resolved, Sight};
use super::warm::Order;
use crate::launch::{Exit, Finished, Remains, Running, Status};
use crate::protocol::{Drafted, LaunchFailure, Target};

/// How long a killed sandbox is waited for before it counts as stuck in the kernel.
const STUCK: Duration = Duration::from_secs(2);
/// How soon to look again when all processes are reaped and the cgroup does not show it yet.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Why a call was ended before it ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// Its time is over.
    Deadline,
    /// agentd asked for it.
    Cancelled,
}

/// Where the tool's output goes.
#[derive(Debug)]
pub enum Output {
    /// To agentd's own descriptors.
    Streams,
    /// To the launcher's, from the start of the sandbox on.
    Captured(Option<(Stdout, Stderr)>),
}

#[derive(Debug)]
enum Phase {
    AwaitingWorkspace,
    Starting(Running),
    Running(Running),
    Terminating { running: Running, until: Instant },
    Killing { running: Running, until: Instant },
    Leaving { running: Running, until: Instant },
    Ended,
}

/// What comes with a call's stdin.
#[derive(Debug)]
pub enum Passed {
    /// Output is captured; progress may go here.
    Events(Option<OwnedFd>),
    /// `exec`'s stdout and stderr.
    Streams(OwnedFd, OwnedFd),
}

/// What agentd needs of a process that was started ahead, once that has its workspace.
#[derive(Debug)]
pub struct Handover {
    /// Where the request is to be written.
    pub stdin: OwnedFd,
    /// Where progress is to be read.
    pub events: Option<OwnedFd>,
}

/// A call.
#[derive(Debug)]
pub struct Call {
    /// Its job.
    pub job: JobId,
    /// Its id.
    pub id: CallId,
    /// The call that it is an attempt at: itself, unless it is not the first.
    pub attempt_of: CallId,
    /// Whether it is a runtime's probe: of no job, and forgotten once it has ended.
    pub is_probe: bool,
    /// The program, for receipts.
    pub tool: ToolIdentity,
    /// The policy, for receipts.
    pub policy: PolicyIdentity,
    /// What would run; absent when it could not be resolved.
    pub resolved: Option<Rc<Resolved>>,
    /// How it sees the workspace.
    pub sight: Sight,
    /// Where its output goes.
    pub output: Output,
    /// Whether another job had the workspace when it was last asked for.
    pub is_held_up: bool,
    /// Its stdin and what else came with it, until they are the sandbox's.
    pub stdio: Option<(OwnedFd, Passed)>,
    /// What its program waits for before it is executed, until it has a process.
    pub gate: Option<OwnedFd>,
    /// What is started ahead for calls like this one, if its tool wants that.
    pub ahead: Option<Order>,
    /// The ends of what it was started ahead with, until agentd is given them.
    pub handover: Option<Handover>,
    /// The uid of its sandbox, while it has one.
    pub sandbox_uid: Option<u32>,
    /// What the kernel enforces.
    pub enforced: Vec<String>,
    /// What best effort let go.
    pub not_enforced: Vec<String>,
    /// The tree before.
    pub before: Option<Digest>,
    /// Where the workspace goes, when nothing is to be run.
    pub rollback: Option<Target>,
    /// What nobody known has changed since the job's last call.
    pub unattributed: Vec<Change>,
    /// The number of its layer above the workspace, while what it wrote lies there.
    pub layer: Option<u64>,
    /// Where what it wrote is kept for the workspace's owner, after a conflict.
    pub kept: Option<PathBuf>,
    /// What became of the workspace; absent until the worker has read it again.
    pub workspace: Option<WorkspaceChange>,
    /// agentd's verdict.
    pub verdict: Option<Claims>,
    /// The receipt that agentd drafted with it.
    pub drafted: Option<Box<Drafted>>,
    /// Why it never ran.
    pub failure: Option<LaunchFailure>,
    /// Whether its program was executed.
    pub has_run: bool,
    phase: Phase,
    /// Its gate from when it has a process, while it may be closed.
    closed: Option<Gate>,
    deadline: Instant,
    stopped: Option<Stopped>,
    exit: Option<Exit>,
    is_init_gone: bool,
    started: Timestamp,
    ended: Option<Record>,
}

/// What is known once a call has ended.
#[derive(Clone, Debug)]
pub struct Record {
    /// When.
    pub ended: Timestamp,
    /// How.
    pub outcome: Outcome,
    /// What it used.
    pub usage: Usage,
    /// What was refused.
    pub denied: Vec<Denial>,
    /// Its cgroup below the root.
    pub cgroup: String,
}

/// What a look at a call found.
#[derive(Debug, Default)]
pub struct Progress {
    /// The program has just been executed.
    pub has_started: bool,
    /// It has just ended.
    pub end: Option<End>,
    /// It had ended, and PID 1 has just gone.
    pub left: Option<Left>,
}

/// How the sandbox's processes went.
#[derive(Debug)]
pub enum End {
    /// All gone.
    Gone(Finished, Remains),
    /// All gone but PID 1.
    Leaving(Finished),
    /// Killed, and the kernel does not let them go.
    Stuck(Running),
}

/// How PID 1 went after everyone else.
#[derive(Debug)]
pub enum Left {
    /// It is gone.
    Gone(Remains),
    /// The kernel does not let it go.
    Stuck(Running),
}

impl Call {
    /// A call that has been ordered.
    #[must_use]
    pub fn ordered(
        (job, id): (JobId, CallId),
        (tool, policy): (ToolIdentity, PolicyIdentity),
        output: Output,
        deadline: Instant,
    ) -> Self {
        Self {
            job,
            id,
            attempt_of: id,
            is_probe: false,
            tool,
            policy,
            resolved: None,
            sight: Sight::Nothing,
            is_held_up: false,
            output,
            stdio: None,
            gate: None,
            ahead: None,
            handover: None,
            sandbox_uid: None,
            enforced: Vec::new(),
            not_enforced: Vec::new(),
            before: None,
            rollback: None,
            unattributed: Vec::new(),
            layer: None,
            kept: None,
            workspace: None,
            verdict: None,
            drafted: None,
            failure: None,
            has_run: false,
            phase: Phase::AwaitingWorkspace,
            closed: None,
            deadline,
            stopped: None,
            exit: None,
            is_init_gone: false,
            started: Timestamp::now(),
            ended: None,
        }
    }

    /// Whether it waits for the worker's first reading.
    #[must_use]
    pub const fn is_awaiting_workspace(&self) -> bool {
        matches!(self.phase, Phase::AwaitingWorkspace)
    }

    /// Whether its time went by while another job had its workspace.
    #[must_use]
    pub fn has_waited_in_vain(&self) -> bool {
        self.is_awaiting_workspace() && self.is_held_up && self.stopped == Some(Stopped::Deadline)
    }

    /// What is known of its end; absent before.
    #[must_use]
    pub const fn record(&self) -> Option<&Record> {
        self.ended.as_ref()
    }

    /// Goes on with a sandbox that was started; its own time-out counts from now.
    pub fn start(&mut self, running: Running, now: Instant) {
        self.started = Timestamp::now();
        if let Some(time) = self.resolved.as_ref().and_then(|resolved| resolved.time) {
            self.deadline = self.deadline.min(now + time);
        }
        self.closed = self.gate.take().map(|pipe| Gate::new(pipe, self.deadline, now));
        self.phase = Phase::Starting(running);
    }

    /// Whether the process that was to serve it was lost before it was given anything, so that nothing has happened yet.
    #[must_use]
    pub const fn has_lost_its_process(&self) -> bool {
        self.handover.is_some() && self.failure.is_some() && self.stopped.is_none()
    }

    /// Goes back to where it was before it had a process.
    pub fn start_again(&mut self) {
        self.phase = Phase::AwaitingWorkspace;
        self.gate = self.closed.take().map(|closed| closed.pipe);
        (self.exit, self.is_init_gone, self.failure, self.handover) = (None, false, None, None);
        self.output = Output::Captured(None);
    }

    /// Notes that nothing needed to run, and all went well.
    pub const fn complete(&mut self) {
        self.exit = Some(Exit::Status(0));
    }

    /// Whether it has ended, with PID 1.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.ended.is_some() && !self.is_leaving()
    }

    /// Whether agentd may be told of its end before PID 1 and the mounts have gone. What it could write to is to be read next, or to
    /// be changed by others; a probe is forgotten at once.
    const fn may_leave(&self) -> bool {
        matches!(self.sight, Sight::Nothing | Sight::ReadOnly) && !self.is_probe
    }

    /// Whether PID 1 of its sandbox is waited for.
    #[must_use]
    pub const fn is_leaving(&self) -> bool {
        matches!(self.phase, Phase::Leaving { .. })
    }

    /// Asks for its end.
    pub fn stop(&mut self) {
        if self.ended.is_none() && self.stopped.is_none() && self.exit.is_none() {
            self.stopped = Some(Stopped::Cancelled);
        }
    }

    /// Whether it has to end now, by its deadline or because it was asked to.
    pub fn must_end(&mut self, now: Instant) -> bool {
        if self.stopped.is_none() && now >= self.deadline && !self.is_put_off(now) {
            self.stopped = Some(Stopped::Deadline);
        }
        self.stopped.is_some()
    }

    /// Whether its deadline has not really passed, since it could do nothing yet.
    fn is_put_off(&mut self, now: Instant) -> bool {
        match self.closed.as_ref().and_then(|closed| closed.put_off(now)) {
            Some(Deferred::Closed(deadline)) => self.deadline = deadline,
            Some(Deferred::Open(deadline)) => (self.deadline, self.closed) = (deadline, None),
            None => return false,
        }
        now < self.deadline
    }

    /// Kills everyone, without waiting.
    pub fn kill(&self) {
        match &self.phase {
            Phase::Starting(running)
            | Phase::Running(running)
            | Phase::Terminating { running, .. }
            | Phase::Killing { running, .. }
            | Phase::Leaving { running, .. } => running.kill(),
            Phase::AwaitingWorkspace | Phase::Ended => {}
        }
    }

    /// What to poll for reading.
    #[must_use]
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut descriptors = Vec::new();
        match &self.phase {
            Phase::AwaitingWorkspace | Phase::Ended => {}
            Phase::Starting(running) => descriptors.push(running.status()),
            Phase::Running(running) => descriptors.push(running.tool()),
            Phase::Terminating { running, .. } | Phase::Killing { running, .. } => {
                descriptors.extend(self.exit.is_none().then(|| running.tool()));
                descriptors.extend((!self.is_init_gone).then(|| running.init()));
            }
            Phase::Leaving { running, .. } => descriptors.extend((!self.is_init_gone).then(|| running.init())),
        }
        if let Output::Captured(Some((_, stderr))) = &self.output {
            descriptors.extend(stderr.reader());
        }
        descriptors
    }

    /// When to look at it again at the latest.
    #[must_use]
    pub fn wake(&self, now: Instant) -> Option<Instant> {
        match &self.phase {
            Phase::AwaitingWorkspace | Phase::Starting(_) | Phase::Running(_) => Some(self.deadline),
            Phase::Terminating { until, .. } | Phase::Killing { until, .. } | Phase::Leaving { until, .. } => {
                let all_reaped = self.is_init_gone && self.exit.is_some();
                Some(if all_reaped { (now + LOOK_AGAIN).min(*until) } else { *until })
            }
            Phase::Ended => None,
        }
    }

    /// Looks at its processes and takes every transition that is due. (Leaving AwaitingWorkspace is not among them.)
    pub fn advance(&mut self, now: Instant, grace: Duration) -> Progress {
        if let Output::Captured(Some((_, stderr))) = &mut self.output {
            stderr.drain();
        }
        let mut progress = Progress::default();
        loop {
            let (phase, is_settled) = match mem::replace(&mut self.phase, Phase::Ended) {
                Phase::Starting(mut running) => match running.read_status() {
                    Status::Executing => {
                        progress.has_started = true;
                        self.has_run = true;
                        // One that was started ahead is kept from its request instead.
                        if let Some(closed) = self.closed.take_if(|_| self.handover.is_none()) {
                            self.deadline = closed.opened(now);
                        }
                        (Phase::Running(running), false)
                    }
                    Status::Failed(failure) => {
                        self.failure = Some(failure);
                        (Self::killing(running, now), false)
                    }
                    Status::Pending if self.must_end(now) => (Self::killing(running, now), false),
                    Status::Pending => (Phase::Starting(running), true),
                },
                Phase::Running(mut running) => {
                    self.exit = running.reap();
                    if self.exit.is_some() && self.may_leave() && running.is_deserted() {
                        running.dismiss();
                        progress.end = Some(End::Leaving(running.finished()));
                        (Phase::Leaving { running, until: now + STUCK }, true)
                    } else if self.exit.is_some() || self.must_end(now) {
                        running.terminate();
                        (Phase::Terminating { running, until: now + grace }, false)
                    } else {
                        (Phase::Running(running), true)
                    }
                }
                Phase::Terminating { mut running, until } => {
                    if self.is_gone(&mut running) {
                        progress.end = Some(End::Gone(running.finished(), running.into_remains()));
                        return progress;
                    }
                    if now >= until {
                        (Self::killing(running, now), false)
                    } else {
                        (Phase::Terminating { running, until }, true)
                    }
                }
                Phase::Killing { mut running, until } => {
                    let is_gone = self.is_gone(&mut running);
                    if is_gone || now >= until {
                        self.has_run |= self.may_have_run(&mut running);
                    }
                    if is_gone {
                        progress.end = Some(End::Gone(running.finished(), running.into_remains()));
                        return progress;
                    }
                    if now >= until {
                        progress.end = Some(End::Stuck(running));
                        return progress;
                    }
                    (Phase::Killing { running, until }, true)
                }
                Phase::Leaving { mut running, until } => {
                    if self.is_gone(&mut running) {
                        progress.left = Some(Left::Gone(running.into_remains()));
                        return progress;
                    }
                    if now >= until {
                        progress.left = Some(Left::Stuck(running));
                        return progress;
                    }
                    (Phase::Leaving { running, until }, true)
                }
                phase @ (Phase::AwaitingWorkspace | Phase::Ended) => (phase, true),
            };
            self.phase = phase;
            if is_settled {
                return progress;
            }
        }
    }

    fn killing(running: Running, now: Instant) -> Phase {
        running.kill();
        Phase::Killing { running, until: now + STUCK }
    }

    /// Whether its program may have been executed between the last look at its status and its end.
    fn may_have_run(&self, running: &mut Running) -> bool {
        // One that was started ahead runs already, and is brought the workspace at some moment of this time.
        self.failure.is_none() && (self.handover.is_some() || !matches!(running.read_status(), Status::Failed(_)))
    }

    fn is_gone(&mut self, running: &mut Running) -> bool {
        let exit = running.reap();
        self.exit = self.exit.or(exit);
        let mut init = [PollFd::from_borrowed_fd(running.init(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.is_init_gone = matches!(poll(&mut init, Some(&now)), Ok(1));
        running.is_gone()
    }
}
