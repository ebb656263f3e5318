//! Tool protocol 1, what a tool reads: one JSON object on stdin, then end of file.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::CallId;
use crate::units::Bytes;

/// The protocol's version.
pub const PROTOCOL: u32 = 1;
/// The most that arguments may come to once kept results stand where they were referred to.
pub const MAX_ARGUMENTS: Bytes = Bytes::mib(64);

/// What a tool is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Do the work.
    Call,
    /// Say what you are.
    Describe,
    /// Say whether you can work.
    Health,
    /// To an extension: a model is about to be asked.
    BeforeTurn,
    /// To an extension: a batch of calls has its results.
    AfterToolBatch,
    /// To an extension: the model has proposed a final answer.
    BeforeFinalAnswer,
    /// To an extension: the job has its result.
    AfterRun,
}

/// The one object on a tool's stdin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// What to do.
    pub operation: Operation,
    /// The call; the reply names it again.
    pub call_id: CallId,
    /// The tool's or extension's name.
    pub tool: String,
    /// Valid against the tool's input schema; for an extension what there is to know.
    pub arguments: Value,
    /// Where the workspace is; absent without one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub workspace: Option<String>,
    /// When the call is ended from outside.
    pub deadline: Timestamp,
    /// The same as a length of time, in milliseconds from the start.
    pub timeout_ms: u64,
    /// The reply's cap.
    pub max_response_bytes: u64,
    /// The same for every repetition of the same call.
    pub idempotency_key: String,
    /// W3C trace context.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub traceparent: Option<String>,
}
