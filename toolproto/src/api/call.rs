//! Direct calls, commands and rollbacks.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::code::Code;
use crate::ids::{CallId, JobId};
use crate::manifest::HostPort;
use crate::receipt::{Envelope, Outcome, Usage};
use crate::reply::Artifact;

/// The body of `POST /calls`: one tool call without a loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CallRequest {
    /// The version of this form: 1.
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
    /// The version of this form: 1.
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
    /// The version of this form: 1.
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
    /// The version of this form: 1.
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
