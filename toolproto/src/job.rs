//! What a client submits and what it gets back.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::code::{Code, Fault};
use crate::digest::Digest;
use crate::ids::{JobId, RequestId};

/// The body of `POST /v1/jobs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobRequest {
    /// The format's version: 1.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1)))]
    pub version: u32,
    /// The agent's name.
    pub agent: String,
    /// The goal; must satisfy the agent's goal schema.
    pub goal: Value,
    /// The workspace's absolute path; absent for a fresh private one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::AbsolutePath>"))]
    pub workspace: Option<PathBuf>,
    /// Narrower budgets than the agent's.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub budget: Option<BudgetRequest>,
    /// The same key from the same user names the same job.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub idempotency_key: Option<String>,
    /// Higher runs earlier.
    #[serde(default)]
    pub priority: i32,
    /// An ended job whose session this goal goes on with.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub continues: Option<JobId>,
    /// Free labels, for finding jobs again.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub labels: BTreeMap<String, String>,
}

/// Budgets that a job narrows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BudgetRequest {
    /// Model turns.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub max_turns: Option<u32>,
    /// Tool calls.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub max_tool_calls: Option<u32>,
    /// Wall-clock seconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub wall_seconds: Option<u64>,
    /// Input and output tokens together.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub max_total_tokens: Option<u64>,
    /// US dollars.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub max_cost_usd: Option<f64>,
    /// Processor seconds of the tools.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub max_cpu_seconds: Option<u64>,
}

/// The answer to an accepted job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Accepted {
    /// The format's version: 1.
    pub version: u32,
    /// `accepted`.
    pub status: String,
    /// The job.
    pub job_id: JobId,
    /// The request, for the logs.
    pub request_id: RequestId,
}

/// Why a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TerminationReason {
    /// With an accepted final answer.
    Completed,
    /// By a failure.
    Error,
    /// By its user.
    Cancelled,
    /// At its wall-clock limit.
    Deadline,
    /// At another budget's limit.
    Budget,
    /// Because it repeated itself.
    NoProgress,
    /// Because the model refused.
    Refused,
}

/// What a job has used so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobUsage {
    /// Model turns.
    pub turns: u32,
    /// Tool calls.
    pub tool_calls: u32,
    /// Tokens read by models.
    pub input_tokens: u64,
    /// Tokens written by models.
    pub output_tokens: u64,
    /// US dollars, by the configured prices.
    pub cost_usd: f64,
    /// Processor seconds of the tools.
    pub cpu_seconds: f64,
    /// Wall-clock seconds.
    pub wall_seconds: f64,
}

/// A job's receipts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReceiptsHead {
    /// How many there are.
    pub count: u64,
    /// The last one's digest; absent without any.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub head: Option<Digest>,
}

/// How a job ended: success with data, or a failure with what to do about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "status", rename_all = "lowercase")]
pub enum Verdict {
    /// The final answer, satisfying the agent's result schema.
    Success {
        /// The answer.
        data: Value,
    },
    /// A structured failure.
    Failed {
        /// What went wrong.
        error_code: Code,
        /// The particulars, for a person.
        message: String,
        /// What to do about it.
        recovery_suggestion: String,
        /// The particulars, for a program.
        #[serde(default)]
        details: Value,
        /// What there is of an answer.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        partial: Option<Value>,
    },
}

/// A job's result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobResult {
    /// The format's version: 1.
    pub version: u32,
    /// The job.
    pub job_id: JobId,
    /// Success or failure.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Why it ended.
    pub termination_reason: TerminationReason,
    /// What it used.
    pub usage: JobUsage,
    /// Its receipts.
    pub receipts: ReceiptsHead,
}

/// RFC 9457 problem details: the body of every refused request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Problem {
    /// `about:blank`: the code says it all.
    #[serde(rename = "type")]
    pub kind: String,
    /// The code's meaning.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The particulars.
    pub detail: String,
    /// The code.
    pub code: Code,
    /// What to do about it.
    pub recovery_suggestion: String,
    /// The request, for the logs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub request_id: Option<RequestId>,
    /// Where malformed JSON stops being JSON: a byte offset.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub offset: Option<usize>,
    /// Which schema rules are violated, and where.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub violations: Vec<Violation>,
}

impl Problem {
    /// A problem with this code. The HTTP status follows from the code.
    #[must_use]
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self {
            kind: "about:blank".to_owned(),
            title: code.meaning().to_owned(),
            status: status_of(code),
            detail: detail.into(),
            code,
            recovery_suggestion: code.recovery_suggestion().to_owned(),
            request_id: None,
            offset: None,
            violations: Vec::new(),
        }
    }

    /// Names the byte where malformed JSON stops being JSON.
    #[must_use]
    pub const fn at_offset(mut self, offset: usize) -> Self {
        self.offset = Some(offset);
        self
    }

    /// Names the violated schema rules: the request could be read, but does not fit (RFC 9110 section 15.5.21).
    #[must_use]
    pub fn with_violations(mut self, violations: Vec<Violation>) -> Self {
        self.status = 422;
        self.violations = violations;
        self
    }
}

/// The HTTP status of a refused request (RFC 9110 section 15).
const fn status_of(code: Code) -> u16 {
    match code {
        Code::InputInvalid => 400,
        Code::NotPermitted => 403,
        Code::AgentUnknown | Code::ToolUnknown | Code::PolicyUnknown | Code::NotFound => 404,
        Code::IdempotencyConflict | Code::WorkspaceBusy | Code::WorkspaceConflict | Code::UndoUnavailable => 409,
        Code::RequestTooLarge => 413,
        _ => match code.fault() {
            Fault::Caller => 422,
            Fault::Host => 503,
            Fault::Tool | Fault::Model => 502,
            Fault::Agentd => 500,
        },
    }
}

/// One violated schema rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Violation {
    /// JSON pointer into the value.
    pub pointer: String,
    /// JSON pointer into the schema.
    pub rule: String,
    /// In words.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_the_documented_statuses() {
        let status = |code| Problem::new(code, "x").status;
        assert_eq!(status(Code::InputInvalid), 400);
        assert_eq!(status(Code::NotPermitted), 403);
        assert_eq!(status(Code::AgentUnknown), 404);
        assert_eq!(status(Code::IdempotencyConflict), 409);
        assert_eq!(status(Code::RequestTooLarge), 413);
        assert_eq!(status(Code::WorkspaceUnavailable), 422);
        assert_eq!(status(Code::QueueFull), 503);
        assert_eq!(status(Code::InternalLogicError), 500);
        assert_eq!(Problem::new(Code::InputInvalid, "x").with_violations(Vec::new()).status, 422);
        assert!(Code::ALL.iter().all(|code| (400..600).contains(&status(*code))));
    }
}
