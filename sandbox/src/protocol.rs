//! The messages between agentd and the launcher, over one SOCK_SEQPACKET pair.
//!
//! ```text
//! agentd                                   launcher
//!           ←  Secrets                        (at start and after a reload) what must not be shown to anybody
//!           ←  Leftovers                      what an earlier run left prepared; each is answered by a Decide
//!   Decide                              →    carries it out or takes it back
//!           ←  Applied
//!   Admit   + client's accepted socket  →    reads the peer itself, opens the workspace through a worker
//!           ←  Admitted | Rejected
//!   Readmit                             →    (at start) reads the grant that an earlier launcher kept
//!           ←  Admitted | Rejected
//!   Warm                                →    (a tool that wants it) starts processes ahead of the job's calls
//!   Probe                               →    (before a runtime's first call) has it show that it works; Ended is all there is
//!   Launch  + stdin (+ stdout, stderr)  →    plans, starts; one without a workspace may follow its Admit at once
//!           ←  Network + sockets              (with listed hosts) what agentd answers and accepts on until Ended
//!           ←  Started                        the tool's exec has happened
//!           ←  Handover + stdin (+ progress)  (started ahead) the request goes here, not into the `Launch`'s stdin
//!   Stop                                →    (any time) SIGTERM, grace, cgroup.kill
//!           ←  Ended   + stdout, stderr       no process of the tool's is left; PID 1 may still be going
//!   Settle                              →    the reply's verdict and digests: commit or discard; and the receipt's draft
//!           ←  Sealed                         the evidence, chained and signed, mostly with the receipt around it; a commit is
//!                                             prepared by then
//!   Stored                              →    the receipt is in the ledger: a prepared commit is decided
//!           ←  Applied                        the workspace has the changes; or why not, with the evidence that takes them back
//!   Record                              →    a call that agentd refused without a launch
//!           ←  Sealed
//!   Sign    + the envelope's payload    →    (every other receipt)
//!           ←  Signed                         the receipt's signature
//!   Close                               →    the grant ends, the worker and the slice go
//!           ←  Closed
//! ```
//!
//! Every `Launch` and `Probe` is answered by exactly one `Ended`, every `Settle` and `Record` by one `Sealed`, also when something
//! fails: then the outcome says so. The `Launch` of a job whose grant was refused is nothing that could be settled. No message after `Admit` carries a uid or a path of the host; all of them name a job
//! with a live grant. The messages are internal: both ends are always of one version.

pub mod channel;

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::manifest::HostPort;
use toolproto::receipt::{Claims, Denial, Draft, Envelope, Outcome, Seal, Signature, SignedEvidence, Usage};
use toolproto::units::{Bytes, DiskRates};

use crate::egress::{Ceiling, Passage};
use crate::steps::Step;

/// Which workspace a job wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceChoice {
    /// An empty, size-limited tmpfs per call that is thrown away.
    None,
    /// A fresh directory of the caller's below the state directory.
    Private,
    /// A directory of the caller's, by absolute path.
    Named(PathBuf),
}

/// Limits for all calls of a job together: its cgroup slice. From the agent's `[limits]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SliceLimits {
    /// Processors, in thousandths: 2000 is two whole ones.
    pub cpu_milli: Option<u64>,
    /// `memory.max`.
    pub memory: Option<Bytes>,
    /// `memory.high`: from there on they are slowed down and their memory is reclaimed, and nothing is killed.
    #[serde(default)]
    pub memory_high: Option<Bytes>,
    /// `memory.swap.max`.
    pub swap: Option<Bytes>,
    /// `pids.max`.
    pub pids: Option<u32>,
    /// `io.max`, for each disk.
    #[serde(default)]
    pub io: DiskRates,
    /// RLIMIT_NOFILE, exact.
    pub open_files: Option<u64>,
}

/// What a call may be narrowed by, below what its tool and policy allow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Narrowing {
    /// See the workspace read-only though the policy would allow writing.
    pub read_only: bool,
    /// Leave no trace unless it is committed: no hosts, and what it writes goes into a layer though the policy would allow
    /// writing directly. The caller counts on it when it runs the call again after a crash.
    #[serde(default)]
    pub discardable: bool,
    /// A lower memory limit.
    pub memory: Option<Bytes>,
    /// A lower limit of processes.
    pub pids: Option<u32>,
}

/// The step of a [`LaunchFailure`] that says that what a tool runs on is missing: so is every other tool's on it.
pub const RUNTIME_STEP: &str = "runtime";

/// The step of a [`LaunchFailure`] that says that the program could not be executed.
pub const EXEC_STEP: &str = Step::Exec.as_str();

/// The program of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Program {
    /// A tool of the catalogue, with everything that its manifest says.
    Tool {
        /// Its name.
        name: String,
    },
    /// An extension of the catalogue, which sees the workspace read-only whatever its policy says.
    Extension {
        /// Its name.
        name: String,
    },
    /// A command, under a policy that allows such (`adhoc = true`).
    Adhoc {
        /// The policy's name.
        policy: String,
        /// A runtime of the catalogue that runs the command's first word; absent for a program.
        runtime: Option<String>,
        /// The command and its arguments; a program is looked for on the sandbox's PATH.
        command: Vec<String>,
        /// Hosts it may connect to, below the policy's ceiling.
        network: Vec<HostPort>,
        /// Commit the workspace on any exit status.
        keep: bool,
    },
    /// No process: the workspace goes back to an earlier state, or forth again.
    Rollback {
        /// Which.
        target: Target,
    },
}

/// An earlier state of a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// As this call left it.
    After(CallId),
    /// As this call found it.
    Before(CallId),
}

/// A receipt that is to be put around the evidence and signed at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Drafted {
    /// All but the evidence.
    pub draft: Draft,
    /// What closes the job's chain after it, to be signed with it. What names the receipt and the evidence in it is filled in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Seal>,
}

/// A receipt that the launcher has put around its evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipted {
    /// The signed receipt.
    pub envelope: Envelope,
    /// The signed seal, if one was drafted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Envelope>,
}

/// What agentd tells the launcher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToLauncher {
    /// A new job. Descriptor: the client's accepted socket, from which the launcher reads who asks.
    Admit {
        /// The job's new id.
        job: JobId,
        /// Which workspace.
        workspace: WorkspaceChoice,
        /// The agent's digest; absent for direct calls and `exec`.
        agent: Option<Digest>,
        /// The job's slice.
        limits: SliceLimits,
    },
    /// A job of an earlier agentd and launcher goes on, under the grant that was kept.
    Readmit {
        /// The job.
        job: JobId,
        /// How many receipts of the job the ledger holds. Evidence beyond them was never acknowledged and is given anew.
        receipts: u64,
        /// The calls that were ordered, or about to be, and have no receipt.
        dangling: Vec<CallId>,
    },
    /// A granted job begins, and may call this tool: processes are started ahead, as many as the tool's manifest wants. There is
    /// no answer; a call that finds none starts cold.
    Warm {
        /// The job.
        job: JobId,
        /// The tool's name.
        tool: String,
        /// What its calls will be narrowed by.
        narrow: Narrowing,
    },
    /// A runtime shows that it works: its own probe runs in a sandbox, for no job and without any evidence. There is nothing to be
    /// settled about it; `Stop` ends it early.
    Probe {
        /// An id of its own.
        call: CallId,
        /// The runtime's name.
        runtime: String,
        /// Milliseconds until SIGTERM.
        time_ms: u64,
    },
    /// A call of a granted job. Descriptors: stdin; for a tool also where it may write progress, if anybody reads that; for
    /// `exec` stdout and stderr; for a gated one the gate.
    Launch {
        /// The job.
        job: JobId,
        /// The call's new id.
        call: CallId,
        /// The call of the job that it is an attempt at, which a later `Readmit` may ask about: its own id for the first.
        attempt_of: CallId,
        /// What to run.
        program: Program,
        /// Milliseconds until SIGTERM; the tool's own time-out applies too.
        time_ms: u64,
        /// Narrower limits.
        narrow: Narrowing,
        /// Whether one more descriptor comes last: a pipe. The program is executed once a byte can be read from it, and never
        /// when it closes without one. A process that was started ahead is told nothing before by whoever feeds it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        gated: bool,
    },
    /// Ends a running call early.
    Stop {
        /// The call.
        call: CallId,
    },
    /// The verdict about an ended call.
    Settle {
        /// The call.
        call: CallId,
        /// Whether its effect on the workspace is wanted.
        commit: bool,
        /// What agentd read and computed.
        claims: Claims,
        /// The call's receipt, as it will be if the evidence says nothing that agentd would have to answer for otherwise.
        receipt: Box<Drafted>,
    },
    /// The receipt of a call whose evidence says `committed` is durably stored: its changes go into the workspace now. Or the
    /// receipt of a withdrawal is: what it gives up is not tried again.
    Stored {
        /// The call.
        call: CallId,
    },
    /// The answer about one of the `Leftovers`: whether the call's receipt is stored.
    Decide {
        /// The call.
        call: CallId,
        /// Stored: its changes go into the workspace; not stored: they are thrown away.
        stored: bool,
    },
    /// agentd has read the configuration anew and found it right; the launcher shall do the same.
    Reload,
    /// A call that agentd refused without a launch, for the chain of evidence.
    Record {
        /// The job.
        job: JobId,
        /// The call's new id.
        call: CallId,
        /// What would have run.
        program: Program,
        /// What agentd knows; its code says why.
        claims: Claims,
    },
    /// Signs a receipt's envelope: bytes that agentd composed around sealed evidence. The launcher does not read them; what
    /// it vouches for is the evidence inside, which carries a signature of its own.
    Sign {
        /// The call, which must have been sealed; for a job's sealing receipt none.
        call: Option<CallId>,
        /// The job.
        job: JobId,
        /// The envelope's payload, base64 as in the envelope.
        payload: String,
    },
    /// The job has ended.
    Close {
        /// The job.
        job: JobId,
        /// Whether its grant stays on disk, since the job may be gone on with. A later `Close` without it forgets that.
        keep: bool,
    },
}

/// What stopped a call before or at its exec.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchFailure {
    /// LAUNCH_FAILED, POLICY_UNENFORCEABLE, TOOL_UNAVAILABLE, WORKSPACE_UNAVAILABLE and the like.
    pub code: Code,
    /// The step that failed, by its name in `steps`; `exec` when the program could not be executed.
    pub step: String,
    /// The kernel's errno, if the kernel refused.
    pub errno: Option<i32>,
    /// In words, with what to do.
    pub message: String,
}

/// Why a commit that was decided could not be carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplyFailure {
    /// WORKSPACE_CONFLICT, DISK_FULL, WORKSPACE_UNAVAILABLE.
    pub code: Code,
    /// In words.
    pub message: String,
}

/// A decided commit or rollback that was given up: the workspace has nothing of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Withdrawal {
    /// Why.
    pub failure: ApplyFailure,
    /// Where what the call wrote is kept for the workspace's owner; absent for a rollback, and where there is no such place.
    pub kept: Option<PathBuf>,
    /// The record that takes the call's record back, next in the job's chain of evidence.
    pub evidence: Box<SignedEvidence>,
}

/// What became of a commit or rollback that was decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Application {
    /// The workspace has the changes.
    Done,
    /// The workspace has none of them, and never will.
    Withdrawn(Withdrawal),
    /// It is not known how far it is. The next start goes on with it.
    Failed(ApplyFailure),
}

/// A secret's value. Never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretText(String);

impl SecretText {
    /// Takes a value.
    #[must_use]
    pub const fn new(value: String) -> Self {
        Self(value)
    }

    /// The value itself.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

/// A secret with its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownSecret {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: SecretText,
}

/// What the launcher tells agentd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromLauncher {
    /// The job is granted.
    Admitted {
        /// The job.
        job: JobId,
        /// The caller's uid, as the launcher read it.
        uid: u32,
        /// The workspace's path, made for the job when it is private; absent without one.
        workspace: Option<PathBuf>,
        /// Those among the calls of a `Readmit` of which nothing was ever started. Of every other one it is not known.
        never_started: Vec<CallId>,
    },
    /// The job is not granted.
    Rejected {
        /// The job.
        job: JobId,
        /// WORKSPACE_UNAVAILABLE, NOT_PERMITTED and the like.
        code: Code,
        /// In words.
        message: String,
    },
    /// The call has listed hosts. Descriptors: [`Sockets`](crate::netns::Sockets) of its network, on which agentd answers and
    /// accepts until the call has ended.
    Network {
        /// The call.
        call: CallId,
        /// Its policy's name, for what refusals say.
        policy: String,
        /// The listed hosts; their listeners are in the same order.
        passages: Vec<Passage>,
        /// What addresses they may lead to.
        ceiling: Ceiling,
    },
    /// The tool's program runs.
    Started {
        /// The call.
        call: CallId,
        /// What of the policy the host could not enforce (best effort only).
        not_enforced: Vec<String>,
    },
    /// A process that was started ahead serves the call: the descriptors of its `Launch` are closed. Descriptors: where the request
    /// is to be written and, if the `Launch` had a place for progress, where that is to be read.
    Handover {
        /// The call.
        call: CallId,
    },
    /// The call is over and its processes are gone. Descriptors, unless the call is an `exec`: captured stdout, stderr.
    Ended {
        /// The call.
        call: CallId,
        /// How the process ended.
        outcome: Outcome,
        /// Why it never ran, if it never ran.
        failure: Option<LaunchFailure>,
        /// Whether stdout outgrew its cap (what lies in the file is cut).
        stdout_overflowed: bool,
        /// What it used.
        usage: Usage,
        /// What was refused.
        denied: Vec<Denial>,
    },
    /// The evidence of a settled or recorded call.
    Sealed {
        /// The call.
        call: CallId,
        /// The record.
        evidence: Box<SignedEvidence>,
        /// Where what the call wrote is kept for the workspace's owner, if it conflicts with what somebody else wrote.
        kept: Option<PathBuf>,
        /// The drafted receipt; absent where the evidence says that it must be another one, or names very many entries.
        receipt: Option<Box<Receipted>>,
    },
    /// A signature over an envelope (DSSE, Ed25519).
    Signed {
        /// The job.
        job: JobId,
        /// The call; none for the sealing receipt.
        call: Option<CallId>,
        /// The signature and the key's id; absent while the launcher holds no key.
        signature: Option<Signature>,
    },
    /// What agentd must take out of all text that leaves a call. Said before any call could know it.
    Secrets {
        /// Every secret that a tool may be given.
        known: Vec<KnownSecret>,
    },
    /// The first question: the commits that an earlier run prepared, of which the launcher does not know whether their
    /// receipts were stored.
    Leftovers {
        /// Each call with its job.
        undecided: Vec<(JobId, CallId)>,
    },
    /// The answer to `Reload`.
    Reloaded {
        /// Why everything stays as it was, if it does.
        refused: Option<String>,
    },
    /// A stored call's changes are in the workspace, or not.
    Applied {
        /// The call.
        call: CallId,
        /// What became of them.
        application: Application,
    },
    /// The job's grant has ended, its processes and its slice are gone.
    Closed {
        /// The job.
        job: JobId,
    },
    /// A message that the launcher could not follow: an unknown job or call, a missing descriptor, a second `Settle`.
    Misuse {
        /// What was wrong.
        message: String,
        /// The job it named.
        job: Option<JobId>,
        /// The call it named.
        call: Option<CallId>,
    },
}
