//! A job's grant: who asks, which workspace, and what belongs to the job while it lives.
//!
//! ```text
//!              worker opened a directory that is the caller's and allowed
//!   Opening ──────────────────────────────────────────────────────────────► Live ──Close──► Closing ──► gone
//!      │                                                                      (when the last call has gone)
//!      └─ refused, or no answer in time ──► gone
//! ```
//!
//! A job without a workspace is Live at once. The worker answers in order, so what was asked of it is a queue.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::Evidence;

use super::aside::Aside;
use super::evidence::Chain;
use super::history;
use super::kept::{Kept, KeptWorkspace};
use super::peer::Peer;
use super::warm::{Holder, Order};
use crate::cgroup::{CgroupError, Slice, Tree};
use crate::file_identity::FileIdentity;
use crate::policy::ProtectRule;
use crate::protocol::SliceLimits;
use crate::workspace::Owner;
use crate::workspace::scan::{TreeLimits, Unreadable};
use crate::workspace::staging::WorkspaceStaging;
use crate::workspace::worker::{Credentials, LockKind, Request, Worker, WorkerError};

/// How long opening a directory may take.
const OPEN_TIME: Duration = Duration::from_secs(10);
/// How often a worker is replaced that its user stops or kills while it carries a commit out.
const MAX_RESTARTS: u32 = 3;
/// How long reading a tree may take.
const SCAN_TIME: Duration = Duration::from_secs(120);

/// How far a grant has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The worker is opening the workspace.
    Opening,
    /// Calls may be launched.
    Live,
    /// No more calls; gone when the last one is.
    Closing,
}

/// What a worker was asked, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// To open the workspace.
    Open,
    /// To hold the workspace for a call.
    Lock(CallId, LockKind),
    /// To hold it again, after the worker was lost with a decided commit.
    LockAgain,
    /// To give it back.
    Unlock,
    /// To read the tree before a call, as far as it may have changed.
    Before(CallId),
    /// To read all of it before a call.
    WholeBefore(CallId),
    /// To read it after.
    After(CallId),
    /// To compare both.
    Compare(CallId),
    /// To prepare the commit of what a call wrote into its layer.
    Prepare(CallId, u64),
    /// To carry a stored call's commit out.
    Apply(CallId, u64),
    /// To throw a layer away.
    Remove(u64),
    /// To say what going to a layer would make of the workspace.
    Foresee(CallId, u64),
    /// To go from one layer to another.
    Roll(CallId, u64, u64),
}

/// A rollback of a job's workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollback {
    /// Its call.
    pub call: CallId,
    /// The last layer that is carried out now.
    pub from: u64,
    /// The last layer that is to be carried out.
    pub to: u64,
    /// Whether its receipt is stored.
    pub is_decided: bool,
}

/// What is given up, until the receipt that says so is stored. A crash before finds it decided, and it is tried again.
#[derive(Debug)]
pub enum GivenUp {
    /// A commit: its layer, and where that is kept for the workspace's owner.
    Commit(u64, Option<Aside>),
    /// A rollback.
    Rollback,
}

/// Whether a job has its workspace alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// No other job of this daemon has it.
    Alone,
    /// Another job has it, too.
    WithOthers,
}

/// A job's workspace.
#[derive(Debug)]
pub struct Workspace {
    /// Its path, as agentd is told.
    pub path: PathBuf,
    /// The directory, once the worker has opened it.
    pub directory: Option<OwnedFd>,
    /// The worker; absent once it has failed, and then the workspace is unusable.
    pub worker: Option<Worker>,
    /// The directory that it is, once it is open.
    pub expected: Option<FileIdentity>,
    /// The directory that it must be, if an earlier launcher had it open.
    pub kept: Option<KeptWorkspace>,
    /// Where the layers of its calls lie; absent when no place for them was found.
    pub staging: Option<WorkspaceStaging>,
    /// Layers that are prepared and not decided, or that could not be carried out: the next start looks after them.
    pub prepared: BTreeMap<CallId, u64>,
    /// Layers that are decided and not yet carried out.
    pub decided: BTreeMap<CallId, u64>,
    /// A rollback that is prepared, and whether it is decided: its call, from where, to where.
    pub rollback: Option<Rollback>,
    /// What is given up and not yet told by a stored receipt, by the id of the record that tells it.
    pub given_up: BTreeMap<CallId, GivenUp>,
    /// What was sealed of the calls whose changes are not in the workspace yet, but for the lists of changes.
    pub promised: BTreeMap<CallId, Evidence>,
    /// How the job holds the workspace, if it does.
    pub held: Option<LockKind>,
    /// Calls to ask for it again for, since another job had it.
    pub waiting: Vec<CallId>,
    /// When to ask for it again.
    pub ask_again: Option<Instant>,
    /// All layers of the job's calls.
    pub layers: Vec<u64>,
    credentials: Credentials,
    limits: TreeLimits,
    /// How often the worker was started again.
    restarts: u32,
    asked: VecDeque<Asked>,
    /// When the answer at the head of the queue is due.
    due: Instant,
}

/// A job's grant.
#[derive(Debug)]
pub struct Grant {
    /// The job.
    pub job: JobId,
    /// Who asks.
    pub peer: Peer,
    /// How far it has come.
    pub phase: Phase,
    /// Limits of its slice.
    pub limits: SliceLimits,
    /// Its workspace.
    pub workspace: Option<Workspace>,
    /// Its evidence.
    pub chain: Chain,
    /// Whether it outlives the launcher: an agent's does.
    pub is_kept: bool,
    /// Of a job of an earlier launcher, until agentd is told.
    pub readmitted: Option<Readmitted>,
    /// What its ended calls leave to be started ahead: once a call of a job has its signature, or a direct call closes.
    pub orders: Vec<Order>,
    slice: Option<Slice>,
}

impl Workspace {
    /// Starts a worker that opens a path as the caller.
    ///
    /// # Errors
    /// When no process can be made.
    pub fn open(
        path: PathBuf,
        peer: &Peer,
        limits: &crate::config::Workspace,
        now: Instant,
    ) -> Result<Self, WorkerError> {
        let credentials = Credentials { uid: peer.uid, gid: peer.gid, groups: peer.groups.clone() };
        let limits = TreeLimits {
            entries: limits.max_entries,
            bytes: limits.max_bytes.0,
            // The caller's own files, which its tools may have locked; they are set back.
            unreadable: Unreadable::Lift,
            ..TreeLimits::default()
        };
        let worker = Worker::start(&credentials, &path, limits)?;
        Ok(Self {
            credentials,
            limits,
            restarts: 0,
            decided: BTreeMap::new(),
            rollback: None,
            given_up: BTreeMap::new(),
            promised: BTreeMap::new(),
            held: None,
            waiting: Vec::new(),
            ask_again: None,
            layers: Vec::new(),
            path,
            directory: None,
            worker: Some(worker),
            expected: None,
            kept: None,
            staging: None,
            prepared: BTreeMap::new(),
            asked: VecDeque::from([Asked::Open]),
            due: now + OPEN_TIME,
        })
    }

    /// Asks the worker for something.
    ///
    /// # Errors
    /// When it has ended or does not read; it is gone then.
    pub fn ask(&mut self, asked: Asked, now: Instant) -> Result<(), WorkerError> {
        self.ask_under(asked, &[], now)
    }

    /// As [`Workspace::ask`]; what is prepared must leave these names alone.
    ///
    /// # Errors
    /// When it has ended or does not read; it is gone then.
    pub fn ask_under(&mut self, asked: Asked, protect: &[ProtectRule], now: Instant) -> Result<(), WorkerError> {
        let request = match asked {
            Asked::Open | Asked::Before(_) => Request::Scan,
            Asked::WholeBefore(_) | Asked::After(_) => Request::ScanWhole,
            Asked::Lock(_, kind) => Request::Lock(kind),
            Asked::LockAgain => Request::Lock(LockKind::Exclusive),
            Asked::Unlock => Request::Unlock,
            Asked::Compare(_) => Request::Compare,
            Asked::Prepare(_, layer) => Request::Prepare { layer, protect: protect.to_vec() },
            Asked::Apply(_, layer) => Request::Apply { layer },
            Asked::Remove(layer) => Request::Remove { layer },
            Asked::Foresee(_, to) => Request::Foresee { to },
            Asked::Roll(_, from, to) => Request::Roll { from, to },
        };
        let worker = self.worker.as_mut().ok_or(WorkerError::Gone)?;
        worker.send(&request)?;
        if self.asked.is_empty() {
            self.due = now + SCAN_TIME;
        }
        self.asked.push_back(asked);
        Ok(())
    }

    /// Confines the worker to the workspace and, if there is a place for layers, to that.
    ///
    /// # Errors
    /// When it has ended or does not read.
    pub fn confine(&mut self, staging: Option<WorkspaceStaging>) -> Result<(), WorkerError> {
        let worker = self.worker.as_mut().ok_or(WorkerError::Gone)?;
        worker.confine(staging.as_ref().map(WorkspaceStaging::files))?;
        self.staging = staging;
        Ok(())
    }

    /// Whether a commit is being carried out.
    #[must_use]
    pub fn is_applying(&self) -> bool {
        let is_rolling = self.rollback.is_some_and(|rollback| rollback.is_decided);
        self.worker.is_some() && (!self.decided.is_empty() || is_rolling)
    }

    /// Starts a worker again in place of one that was lost while it had a decided commit to carry out. Its first answer is
    /// to [`Asked::Open`]. Whether it was.
    pub fn start_again(&mut self, now: Instant) -> bool {
        let is_rolling = self.rollback.is_some_and(|rollback| rollback.is_decided);
        if (self.decided.is_empty() && !is_rolling) || self.restarts >= MAX_RESTARTS {
            return false;
        }
        self.restarts += 1;
        match Worker::start(&self.credentials, &self.path, self.limits) {
            Ok(worker) => {
                self.worker = Some(worker);
                self.held = None;
                self.asked = VecDeque::from([Asked::Open]);
                self.due = now + OPEN_TIME;
                true
            }
            Err(error) => {
                tracing::error!(%error, "a lost worker cannot be replaced");
                false
            }
        }
    }

    /// What the next answer is to.
    pub fn answered(&mut self, now: Instant) -> Option<Asked> {
        self.due = now + SCAN_TIME;
        self.asked.pop_front()
    }

    /// When an answer is due.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        (self.worker.is_some() && !self.asked.is_empty()).then_some(self.due)
    }

    /// Gives the worker up and returns what it was still asked.
    pub fn give_up(&mut self) -> VecDeque<Asked> {
        self.held = None;
        if let Some(worker) = self.worker.take() {
            worker.kill();
        }
        std::mem::take(&mut self.asked)
    }
}

/// What an earlier launcher left of a job.
#[derive(Debug)]
pub struct Readmitted {
    /// Its grant.
    pub kept: Kept,
    /// Which of the calls that agentd asked about never started.
    pub never_started: Vec<CallId>,
}

impl Grant {
    /// A grant for a job.
    #[must_use]
    pub fn new(job: JobId, peer: Peer, limits: SliceLimits, workspace: Option<Workspace>) -> Self {
        let phase = if workspace.is_some() { Phase::Opening } else { Phase::Live };
        Self {
            job,
            peer,
            phase,
            limits,
            workspace,
            chain: Chain::default(),
            is_kept: false,
            readmitted: None,
            orders: Vec::new(),
            slice: None,
        }
    }

    /// What of the grant outlives the launcher.
    #[must_use]
    pub fn kept(&self) -> Kept {
        let workspace = self.workspace.as_ref().and_then(|workspace| {
            let (directory, path) = (workspace.directory.as_ref()?, workspace.path.clone());
            KeptWorkspace::of(path, directory.as_fd(), workspace.expected?).ok()
        });
        let caller = (self.peer.uid, self.peer.gid, self.peer.groups.clone());
        Kept::new(caller, self.limits.clone(), workspace, self.chain.heads().to_vec())
    }

    /// For whose calls processes are started ahead: a direct call is over when they would be up, so they serve the user's next.
    #[must_use]
    pub const fn holder(&self) -> Holder {
        // Only a direct call's grant goes with the launcher.
        if self.is_kept { Holder::Job(self.job) } else { Holder::DirectCalls(self.peer.uid) }
    }

    /// Whom the workspace's files belong to.
    #[must_use]
    pub const fn owner(&self) -> Owner {
        Owner { uid: self.peer.uid, gid: self.peer.gid }
    }

    /// The job's cgroup, made when it is first needed.
    ///
    /// # Errors
    /// When it cannot be made or a limit is refused.
    pub fn slice(&mut self, tree: &Tree) -> Result<&Slice, CgroupError> {
        let slice = match self.slice.take() {
            Some(slice) => slice,
            None => tree.slice(&format!("agent-{}.slice", self.job), &self.limits)?,
        };
        Ok(self.slice.insert(slice))
    }

    /// Removes what belongs to the job, when its last call has gone.
    pub fn dismantle(mut self, sharing: Sharing, undo_bytes: u64) {
        if let Some(mut workspace) = self.workspace.take() {
            workspace.give_up();
            // What is undecided, or decided and not carried out, is looked after at the next start.
            let is_needed = |layer: &u64| {
                workspace.prepared.values().chain(workspace.decided.values()).any(|one| one == layer)
                    || workspace.given_up.values().any(|one| matches!(one, GivenUp::Commit(given, _) if given == layer))
            };
            let loose: Vec<u64> = workspace.layers.iter().copied().filter(|layer| !is_needed(layer)).collect();
            let staging = workspace.staging.take();
            let removed = staging.map_or(Ok(()), |staging| history::tidy(staging, &loose, sharing, undo_bytes));
            if let Err(error) = removed {
                tracing::warn!(job = %self.job, %error, "the job's layers stay until the next start");
            }
        }
        if let Some(slice) = self.slice.take()
            && let Err(error) = slice.remove()
        {
            tracing::warn!(job = %self.job, %error, "the job's cgroup stays until the next start");
        }
    }
}

/// What a worker's failure means for the caller.
#[must_use]
pub fn worker_failure(error: &WorkerError) -> (Code, String) {
    match error {
        WorkerError::Gone | WorkerError::Stuck | WorkerError::Malformed(_) => {
            (Code::WorkspaceUnavailable, format!("the workspace cannot be read: {error}"))
        }
        WorkerError::Start(_) | WorkerError::Socket(_) => (Code::InternalLogicError, error.to_string()),
    }
}
