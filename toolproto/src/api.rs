//! The bodies of the HTTP API beside those of [`crate::job`]: what `/v1` takes and gives.
//!
//! Messages are versioned; a reader ignores fields that it does not know.

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::code::Code;
use crate::digest::Digest;
use crate::extension::Point;
use crate::ids::{CallId, JobId, RequestId};
use crate::job::{JobResult, JobUsage};
use crate::manifest::HostPort;
use crate::receipt::{Envelope, Outcome, Usage};
use crate::reply::Artifact;

/// The version of every body here.
pub const API_VERSION: u32 = 1;

/// Where a job stands, seen from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// Accepted, not begun.
    Queued,
    /// The loop works on it.
    Running,
    /// It waits for a person: an approval or an answer.
    Waiting,
    /// It has a result.
    Done,
}

/// Where a job's loop stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "UPPERCASE")]
pub enum Phase {
    /// Nothing to do: before the goal and after the result.
    Idle,
    /// The model is asked what to do next.
    Planning,
    /// Calls run.
    Executing,
    /// What came back is judged.
    Observing,
}

/// What kind of decision a waiting job wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum WaitKind {
    /// Whether a call may run.
    Approval,
    /// An answer to a question.
    Question,
}

/// What a waiting job waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WaitingFor {
    /// Approval or question.
    pub kind: WaitKind,
    /// The outstanding call.
    pub call_id: CallId,
    /// Its tool.
    pub tool: String,
    /// Its arguments.
    pub arguments: Value,
    /// When the wait ends without a decision.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
    pub expires: Option<Timestamp>,
}

/// A job as `GET /jobs/{id}` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobView {
    /// [`API_VERSION`].
    pub version: u32,
    /// The job.
    pub job_id: JobId,
    /// Its agent; `call` and `exec` for implicit jobs of one call.
    pub agent: String,
    /// Where it stands.
    pub state: JobState,
    /// Where its loop stands.
    pub phase: Phase,
    /// Who submitted it.
    pub uid: u32,
    /// When it was accepted.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Time"))]
    pub submitted: Timestamp,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
    pub ended: Option<Timestamp>,
    /// Its workspace; absent without one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::AbsolutePath>"))]
    pub workspace: Option<PathBuf>,
    /// Its labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub labels: BTreeMap<String, String>,
    /// What it waits for, when it waits.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub waiting_for: Option<WaitingFor>,
    /// What it used so far.
    pub usage: JobUsage,
    /// Bytes of memory that its tools hold now; absent when none runs, or the host does not count.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub memory_bytes: Option<u64>,
    /// Its result, once it is done.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<JobResult>,
}

/// A page of `GET /jobs`, newest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobPage {
    /// [`API_VERSION`].
    pub version: u32,
    /// The jobs.
    pub jobs: Vec<JobView>,
    /// The `before` of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next: Option<JobId>,
}

/// Which jobs `GET /jobs` lists: the query after the question mark.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobFilter {
    /// In this state only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub state: Option<JobState>,
    /// Of this agent only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub agent: Option<String>,
    /// With this label only: `name` or `name=value`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub label: Option<String>,
    /// Older than this job only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub before: Option<JobId>,
    /// At most so many; see [`JobFilter::limit`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub limit: Option<u32>,
}

impl JobFilter {
    /// The page size where the request names none.
    pub const DEFAULT_LIMIT: u32 = 50;
    /// The largest page.
    pub const MAX_LIMIT: u32 = 500;

    /// How many jobs the page may hold.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit.unwrap_or(Self::DEFAULT_LIMIT).clamp(1, Self::MAX_LIMIT)
    }

    /// Whether a job with these labels is wanted.
    #[must_use]
    pub fn takes_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        match self.label.as_deref().map(|label| label.split_once('=').ok_or(label)) {
            None => true,
            Some(Ok((name, value))) => labels.get(name).is_some_and(|have| have == value),
            Some(Err(name)) => labels.contains_key(name),
        }
    }
}

/// One event of `GET /jobs/{id}/events`. As SSE: `id` is the sequence, `event` the name, `data` this object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EventView {
    /// [`API_VERSION`].
    pub version: u32,
    /// The event's number within the job, from 1; absent for events that are not kept (`model.delta`, `call.progress`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sequence: Option<u64>,
    /// The job.
    pub job_id: JobId,
    /// When it happened.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Time"))]
    pub time: Timestamp,
    /// What happened, under its name in `event`.
    #[serde(flatten)]
    pub body: EventBody,
}

/// What happened in a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event")]
pub enum EventBody {
    /// The loop went from one phase to another.
    #[serde(rename = "job.phase")]
    Phase {
        /// Left.
        from: Phase,
        /// Entered.
        to: Phase,
        /// Why: the session's event, such as `ON_PLAN_RECEIVED`.
        reason: String,
        /// What the job used so far.
        usage: JobUsage,
    },
    /// A piece of the model's answer. Not replayed.
    #[serde(rename = "model.delta")]
    ModelDelta {
        /// The piece.
        text: String,
    },
    /// A call was launched.
    #[serde(rename = "call.started")]
    CallStarted {
        /// The call.
        call_id: CallId,
        /// Its tool.
        tool: String,
        /// Its arguments.
        arguments: Value,
    },
    /// A tool said how far it is. Not replayed.
    #[serde(rename = "call.progress")]
    CallProgress {
        /// The call.
        call_id: CallId,
        /// From 0 to 1.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        progress: Option<f64>,
        /// In the tool's words.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        message: Option<String>,
    },
    /// A call is over and its receipt is stored.
    #[serde(rename = "call.ended")]
    CallEnded {
        /// The call.
        call_id: CallId,
        /// Its tool.
        tool: String,
        /// Whether it worked.
        ok: bool,
        /// The failure's code.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        code: Option<Code>,
        /// What it used; absent when it never ran.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        usage: Option<Usage>,
    },
    /// A call waits for a person's decision.
    #[serde(rename = "approval.requested")]
    ApprovalRequested {
        /// The call.
        call_id: CallId,
        /// Its tool.
        tool: String,
        /// Its arguments.
        arguments: Value,
        /// When the wait ends.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
        expires: Option<Timestamp>,
    },
    /// The agent asks a person.
    #[serde(rename = "question.asked")]
    QuestionAsked {
        /// The call.
        call_id: CallId,
        /// The question.
        text: String,
        /// When the wait ends.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
        expires: Option<Timestamp>,
    },
    /// The job has a result; the last event.
    #[serde(rename = "job.ended")]
    JobEnded {
        /// The result.
        result: Box<JobResult>,
    },
}

impl EventBody {
    /// The event's name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Phase { .. } => "job.phase",
            Self::ModelDelta { .. } => "model.delta",
            Self::CallStarted { .. } => "call.started",
            Self::CallProgress { .. } => "call.progress",
            Self::CallEnded { .. } => "call.ended",
            Self::ApprovalRequested { .. } => "approval.requested",
            Self::QuestionAsked { .. } => "question.asked",
            Self::JobEnded { .. } => "job.ended",
        }
    }
}

/// The body of `POST /calls`: one tool call without a loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CallRequest {
    /// [`API_VERSION`].
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1)))]
    pub version: u32,
    /// The tool.
    pub tool: String,
    /// Its arguments; must satisfy its input schema.
    pub arguments: Value,
    /// The workspace's absolute path; absent for an empty one that is thrown away.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::AbsolutePath>"))]
    pub workspace: Option<PathBuf>,
    /// A shorter time than the tool's own, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub timeout_ms: Option<u64>,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CallError {
    /// What went wrong.
    pub code: Code,
    /// The particulars, for a person.
    pub message: String,
    /// What to do about it.
    pub recovery_suggestion: String,
    /// The particulars, for a program: the tool's own error, its stderr, the violated rules.
    #[serde(skip_serializing_if = "Value::is_null", default)]
    pub details: Value,
}

/// What a rollback came to; the workspace is where it was asked to go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RollbackReply {
    /// Always 1.
    pub version: u32,
    /// The rollback's own job: going back to before its receipt undoes it.
    pub job_id: JobId,
    /// Its call.
    pub call_id: CallId,
    /// Its receipt, with the state `rolled_back`.
    pub receipt: Envelope,
}

/// The answer to `POST /calls`. A call that failed is an answer too: `ok` is false then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CallReply {
    /// [`API_VERSION`].
    pub version: u32,
    /// The implicit job of this one call.
    pub job_id: JobId,
    /// The call.
    pub call_id: CallId,
    /// Whether it worked.
    pub ok: bool,
    /// The result, when it worked.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<Value>,
    /// Files in the workspace that belong to the result.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub artifacts: Vec<Artifact>,
    /// What went wrong, when it did not work.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<CallError>,
    /// The call's receipt.
    pub receipt: Envelope,
}

/// The body of `POST /exec`: one command in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecRequest {
    /// [`API_VERSION`].
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1)))]
    pub version: u32,
    /// The policy; it must say `adhoc = true`.
    pub policy: String,
    /// A runtime that runs the command's first word, as it would run a tool's entry; absent for a program.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub runtime: Option<String>,
    /// The command and its arguments.
    pub command: Vec<String>,
    /// The workspace's absolute path; absent for an empty one that is thrown away.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::AbsolutePath>"))]
    pub workspace: Option<PathBuf>,
    /// Hosts it may connect to, below the policy's ceiling.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub network: Vec<HostPort>,
    /// Milliseconds until it is ended; the policy's own time without it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub timeout_ms: Option<u64>,
    /// Keep what it changed in the workspace on any exit status.
    #[serde(default)]
    pub keep: bool,
}

/// Why a command never ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecFailure {
    /// LAUNCH_FAILED, POLICY_UNENFORCEABLE and the like.
    pub code: Code,
    /// The step that failed; `exec` when the program could not be executed.
    pub step: String,
    /// The kernel's errno, if the kernel refused.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub errno: Option<i32>,
    /// In words, with what to do.
    pub message: String,
}

/// The last frame of an `exec`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecEnd {
    /// [`API_VERSION`].
    pub version: u32,
    /// The implicit job of this one command.
    pub job_id: JobId,
    /// The call.
    pub call_id: CallId,
    /// How the command ended.
    pub outcome: Outcome,
    /// Why it never ran, if it never ran.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failure: Option<ExecFailure>,
    /// What it used.
    pub usage: Usage,
    /// Its receipt.
    pub receipt: Envelope,
}

/// The answer to `GET /jobs/{id}/receipts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReceiptList {
    /// [`API_VERSION`].
    pub version: u32,
    /// The job's envelopes in the order of its calls, the sealing receipt last once the job has ended.
    pub receipts: Vec<Envelope>,
}

/// A tool's breaker: whether calls go through, and what the last ones came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BreakerView {
    /// `closed`, `open` or `half_open`.
    pub state: String,
    /// How many of the remembered calls failed.
    pub failures: usize,
    /// How many were slow.
    pub slow: usize,
    /// How many are remembered.
    pub calls: usize,
}

/// What an administrator does with a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BreakerAction {
    /// Open it until it is reset: no call is started.
    Open,
    /// Close it and forget what was seen.
    Reset,
}

/// The body of `POST /tools/{name}/breaker`; `name` is a tool, or `runtime:NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BreakerRequest {
    /// [`API_VERSION`].
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1)))]
    pub version: u32,
    /// What is to be done.
    pub action: BreakerAction,
    /// Why, for the audit log and for those whose calls are refused; needed to open it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
}

/// A tool as `GET /tools` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ToolView {
    /// Its name.
    pub name: String,
    /// Its manifest's version.
    pub version: u32,
    /// What it does.
    pub description: String,
    /// The digest of its folder.
    pub digest: Digest,
    /// What runs it.
    pub runtime: String,
    /// What that said of its version; absent until a call has needed it, and while it does not work.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub runtime_version: Option<String>,
    /// The policy that confines it.
    pub policy: String,
    /// What it declares about its effects.
    pub effects: String,
    /// No two calls of it at the same time.
    pub exclusive: bool,
    /// Safe to repeat with the same idempotency key.
    pub idempotent: bool,
    /// How long a call may take, in milliseconds.
    pub timeout_ms: u64,
    /// The most it may write to stdout.
    pub max_response_bytes: u64,
    /// From how many bytes on a result is kept apart, and a preview stands for it; absent when none is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub spill_bytes: Option<u64>,
    /// Hosts it may connect to.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub hosts: Vec<HostPort>,
    /// The JSON Schema of its arguments.
    pub input_schema: Value,
    /// The JSON Schema of its result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub output_schema: Option<Value>,
    /// Where its breaker stands.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub breaker: Option<BreakerView>,
}

/// An extension as `GET /tools` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExtensionView {
    /// Its name.
    pub name: String,
    /// Its manifest's version.
    pub version: u32,
    /// What it does.
    pub description: String,
    /// The digest of its folder.
    pub digest: Digest,
    /// Where it is asked.
    pub operations: Vec<Point>,
    /// Whether a job ends when it fails.
    pub required: bool,
    /// What runs it.
    pub runtime: String,
    /// The policy that confines it.
    pub policy: String,
    /// How long it may take, in milliseconds.
    pub timeout_ms: u64,
    /// Hosts it may connect to.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub hosts: Vec<HostPort>,
}

/// The answer to `GET /tools`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ToolList {
    /// [`API_VERSION`].
    pub version: u32,
    /// The tools that the caller may use, by name.
    pub tools: Vec<ToolView>,
    /// The extensions that agents may name, by name.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub extensions: Vec<ExtensionView>,
}

/// A policy as `GET /policies` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyView {
    /// Its name.
    pub name: String,
    /// The digest of its effective form.
    pub digest: Digest,
    /// Whether commands that are no tools may run under it.
    pub adhoc: bool,
    /// none, read_only, overlay or direct.
    pub workspace: String,
    /// none or listed.
    pub network: String,
    /// The effective policy after `extends`, with the reason for each rule.
    pub effective: Value,
}

/// The answer to `GET /policies`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyList {
    /// [`API_VERSION`].
    pub version: u32,
    /// The policies that the caller may use, by name.
    pub policies: Vec<PolicyView>,
}

/// A public key that verifies receipts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KeyView {
    /// The id that envelopes name.
    pub key_id: String,
    /// `ed25519`.
    pub algorithm: String,
    /// SubjectPublicKeyInfo as PEM.
    pub public_key: String,
    /// Since when it signs or signed; absent when that was before changes were recorded.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
    pub from: Option<Timestamp>,
    /// Until when it signed; absent for the one in use.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
    pub until: Option<Timestamp>,
    /// The signed record of how it came into use, if there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub record: Option<Envelope>,
}

/// The answer to `GET /keys`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KeyList {
    /// [`API_VERSION`].
    pub version: u32,
    /// The keys, the one in use first, former ones after it, newest first; empty until receipts are signed.
    pub keys: Vec<KeyView>,
}

/// The answer to `GET /health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Health {
    /// [`API_VERSION`].
    pub version: u32,
    /// `ok`, or `stopping`.
    pub status: String,
    /// agentd's version.
    pub agentd_version: String,
    /// When the daemon started.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Time"))]
    pub started: Timestamp,
    /// Jobs that run.
    pub jobs_running: u64,
    /// Jobs that wait for their turn.
    pub jobs_queued: u64,
}

/// The answer to `POST /jobs/{id}/cancel` and the other requests that steer a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Steered {
    /// [`API_VERSION`].
    pub version: u32,
    /// The job.
    pub job_id: JobId,
    /// Where it stood when the request was taken.
    pub state: JobState,
    /// The request, for the logs.
    pub request_id: RequestId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_flat_object_with_its_name_inside() {
        let event = EventView {
            version: API_VERSION,
            sequence: Some(7),
            job_id: JobId::from_u128(1),
            time: Timestamp::UNIX_EPOCH,
            body: EventBody::CallEnded {
                call_id: CallId::from_u128(2),
                tool: "stats".to_owned(),
                ok: false,
                code: Some(Code::ToolTimeout),
                usage: None,
            },
        };
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["event"], event.body.name());
        assert_eq!(json["sequence"], 7);
        assert_eq!(json["code"], "TOOL_TIMEOUT");
        assert_eq!(serde_json::from_value::<EventView>(json).unwrap(), event);
    }

    #[test]
    fn labels_are_found_by_name_or_by_name_and_value() {
        let labels = BTreeMap::from([("team".to_owned(), "sales".to_owned())]);
        let takes =
            |label: &str| JobFilter { label: Some(label.to_owned()), ..JobFilter::default() }.takes_labels(&labels);
        assert!(takes("team") && takes("team=sales"));
        assert!(!takes("team=ops") && !takes("sales") && !takes("team="));
        assert!(JobFilter::default().takes_labels(&BTreeMap::new()));
    }

    #[test]
    fn pages_are_bounded() {
        let limit = |limit| JobFilter { limit, ..JobFilter::default() }.limit();
        assert_eq!((limit(None), limit(Some(0)), limit(Some(9)), limit(Some(u32::MAX))), (50, 1, 9, 500));
    }
}
