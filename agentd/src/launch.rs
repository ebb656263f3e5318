//! What the loop needs of the launcher: admit a job, run a call, settle it, record a refusal, close the job.
//!
//! The real implementation speaks the launcher's protocol; tests use a scripted one, so that the loop runs without root.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use sandbox::protocol::{
    Application, Drafted, LaunchFailure, Narrowing, Program, Receipted, SliceLimits, WorkspaceChoice,
};
use tokio_util::sync::CancellationToken;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::{Claims, Denial, NetworkClaims, Outcome, Signature, SignedEvidence, Usage};

use crate::feed::CallFeed;

/// A job that the launcher granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The job.
    pub job: JobId,
    /// The caller's uid as the launcher read it from the socket.
    pub uid: u32,
    /// The workspace's path; absent without one.
    pub workspace: Option<PathBuf>,
    /// Those among the calls that a readmission asked about of which nothing was ever started.
    pub never_started: Vec<CallId>,
}

/// Why the launcher did not grant a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// WORKSPACE_UNAVAILABLE, NOT_PERMITTED and the like.
    pub code: Code,
    /// In words.
    pub message: String,
}

/// What becomes of the grant of a job that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// It is forgotten, also when it was kept before.
    Nothing,
    /// It is kept, since the job may be gone on with.
    ForLater,
}

/// What a call reads.
#[derive(Debug)]
pub enum Stdin {
    /// These bytes, then end of file.
    Bytes(Vec<u8>),
    /// A client's own descriptor.
    Fd(OwnedFd),
}

/// Whether what a call is part of is in the ledger. Only then is its program executed, or a process that is there already told
/// what to do.
///
/// By default it is.
#[derive(Clone, Debug, Default)]
pub struct Recorded(Option<CancellationToken>);

impl Recorded {
    /// One that is told later.
    #[must_use]
    pub fn later() -> Self {
        Self(Some(CancellationToken::new()))
    }

    /// Says that it is.
    pub fn tell(&self) {
        if let Some(token) = &self.0 {
            token.cancel();
        }
    }

    /// Whether it is.
    #[must_use]
    pub fn is_told(&self) -> bool {
        self.0.as_ref().is_none_or(CancellationToken::is_cancelled)
    }

    /// Resolves once it is.
    pub async fn wait(&self) {
        if let Some(token) = &self.0 {
            token.cancelled().await;
        }
    }
}

/// One call to run.
#[derive(Debug)]
pub struct Order {
    /// The job; it has a live grant.
    pub job: JobId,
    /// The call's new id.
    pub call: CallId,
    /// The call of the job that it is an attempt at: its own id for the first.
    pub attempt_of: CallId,
    /// What to run.
    pub program: Program,
    /// What it reads.
    pub stdin: Stdin,
    /// For `exec`: where stdout and stderr go.
    pub streams: Option<(OwnedFd, OwnedFd)>,
    /// Until SIGTERM.
    pub time: Duration,
    /// Narrower limits.
    pub narrow: Narrowing,
    /// Who hears how far it is.
    pub watcher: Option<CallFeed>,
    /// When it may do anything.
    pub recorded: Recorded,
}

/// A call that is over: its processes are gone.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// How the process ended.
    pub outcome: Outcome,
    /// Why it never ran, if it never ran.
    pub failure: Option<LaunchFailure>,
    /// What it wrote to stdout, at most its cap.
    pub stdout: Vec<u8>,
    /// Whether there was more.
    pub stdout_overflowed: bool,
    /// The end of what it wrote to stderr.
    pub stderr_tail: String,
    /// What it used.
    pub usage: Usage,
    /// What was refused.
    pub denied: Vec<Denial>,
    /// What went through to listed hosts, and what did not; absent when none were listed. `usage` and `denied` hold it too.
    pub network: Option<NetworkClaims>,
}

/// What a verdict came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    /// The launcher's record.
    pub evidence: SignedEvidence,
    /// Where what the call wrote is kept for the workspace's owner, if it conflicts with what somebody else wrote.
    pub kept: Option<PathBuf>,
    /// The drafted receipt around it; absent where another one must be made.
    pub receipt: Option<Receipted>,
}

/// The launcher cannot be spoken with: agentd cannot go on running calls.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LinkError {
    /// The connection is gone.
    #[error("the connection to the launcher is closed")]
    Closed,
    /// The launcher refused a message as wrong.
    #[error("the launcher could not follow: {0}")]
    Misuse(String),
    /// A message could not be sent or its descriptors not be read.
    #[error("the launcher's message could not be exchanged: {0}")]
    Exchange(String),
}

/// The launcher, as the loop sees it.
pub trait Launch: Send + Sync + 'static {
    /// Asks for a grant for a new job of the client whose accepted socket this is.
    fn admit(
        &self,
        job: JobId,
        client: OwnedFd,
        workspace: WorkspaceChoice,
        agent: Option<Digest>,
        limits: SliceLimits,
    ) -> impl Future<Output = Result<Result<Admission, Rejection>, LinkError>> + Send;

    /// Asks for the grant of a job of an earlier agentd, whose ledger holds so many receipts, and which of its calls that have none
    /// never started.
    fn readmit(
        &self,
        job: JobId,
        receipts: u64,
        dangling: Vec<CallId>,
    ) -> impl Future<Output = Result<Result<Admission, Rejection>, LinkError>> + Send;

    /// Says that a job begins that may call this tool, so that its processes are started ahead. Nothing depends on it.
    ///
    /// # Errors
    /// When the launcher is gone.
    fn warm(&self, job: JobId, tool: String, narrow: Narrowing) -> Result<(), LinkError>;

    /// Has a runtime show in a sandbox that it works, for no job and without a receipt. Dropping the future ends it early.
    fn probe(&self, runtime: String, time: Duration) -> impl Future<Output = Result<Ended, LinkError>> + Send;

    /// Runs a call to its end. Cancelling stops it early; the future still resolves with how it ended.
    fn launch(&self, order: Order, cancel: CancellationToken) -> impl Future<Output = Result<Ended, LinkError>> + Send;

    /// Gives the verdict about an ended call: whether its effect on the workspace is wanted. And the receipt that it gets unless the
    /// evidence calls for another.
    fn settle(
        &self,
        call: CallId,
        commit: bool,
        claims: Claims,
        receipt: Drafted,
    ) -> impl Future<Output = Result<Settled, LinkError>> + Send;

    /// Says that the receipt of a call whose changes are prepared is stored: they go into the workspace now. Yields what became
    /// of that.
    fn stored(&self, call: CallId) -> impl Future<Output = Result<Application, LinkError>> + Send;

    /// Records a call that was refused without a launch.
    fn record(
        &self,
        job: JobId,
        call: CallId,
        program: Program,
        claims: Claims,
    ) -> impl Future<Output = Result<SignedEvidence, LinkError>> + Send;

    /// Signs a receipt's payload (base64, as in the envelope): of a sealed call, or without one the job's sealing receipt. No
    /// signature while the launcher holds no key.
    fn sign(
        &self,
        job: JobId,
        call: Option<CallId>,
        payload: String,
    ) -> impl Future<Output = Result<Option<Signature>, LinkError>> + Send;

    /// Ends the job's grant, its processes and its slice. With `Keep::ForLater` a readmission brings the grant back.
    fn close(&self, job: JobId, keep: Keep) -> impl Future<Output = Result<(), LinkError>> + Send;
}
