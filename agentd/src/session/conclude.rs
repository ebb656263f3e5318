//! The result of a job, from its session.

use std::sync::LazyLock;
use std::time::Duration;

use serde_json::{Value, json};
use toolproto::code::Code;
use toolproto::ids::JobId;
use toolproto::job::{JobResult, JobUsage, TerminationReason, Verdict};

use super::Session;
use super::event::{Event, Interruption};
use crate::schema::Schema;

/// How a job fails.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The code.
    pub code: Code,
    /// In words.
    pub message: String,
    /// For a program.
    pub details: Value,
    /// What there is of an answer.
    pub partial: Option<Value>,
}

impl Failure {
    /// A failure without particulars.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Value::Null, partial: None }
    }
}

impl From<Interruption> for Failure {
    fn from(cause: Interruption) -> Self {
        Self::new(cause.code(), cause.code().meaning())
    }
}

/// The event that ends a job well.
#[must_use]
pub fn success(session: &Session, job: JobId, now: Duration, data: Value) -> Event {
    let result = conclude(session, job, now, Verdict::Success { data }, TerminationReason::Completed);
    Event::GoalConcluded { result: Box::new(result) }
}

/// The event that ends a job badly.
#[must_use]
pub fn failure(session: &Session, job: JobId, now: Duration, failure: Failure) -> Event {
    Event::GoalConcluded { result: Box::new(failed(session, job, now, failure)) }
}

/// The result of a job that ends badly.
#[must_use]
pub fn failed(session: &Session, job: JobId, now: Duration, failure: Failure) -> JobResult {
    let reason = termination(failure.code);
    conclude(session, job, now, verdict(failure), reason)
}

/// A result that satisfies its contract: this one, or one that says that it did not.
#[must_use]
pub fn checked(result: JobResult) -> JobResult {
    let written = serde_json::to_value(&result).unwrap_or_default();
    let violations = match CONTRACT.as_ref().map(|contract| contract.check(&written)) {
        Some(Ok(())) => return result,
        Some(Err(violations)) => violations,
        None => Vec::new(),
    };
    tracing::error!(job = %result.job_id, ?violations, critical = true, "INTERNAL_LOGIC_ERROR");
    let broken = Failure {
        details: json!({"violations": violations}),
        ..Failure::new(Code::InternalLogicError, "the job's own result misses its contract")
    };
    JobResult {
        verdict: verdict(broken),
        termination_reason: TerminationReason::Error,
        usage: JobUsage::default(),
        ..result
    }
}

/// What every result satisfies.
static CONTRACT: LazyLock<Option<Schema>> = LazyLock::new(|| {
    let count = || json!({"type": "integer", "minimum": 0});
    let amount = || json!({"type": "number", "minimum": 0});
    let contract = json!({
        "type": "object",
        "required": ["version", "job_id", "status", "termination_reason", "usage", "receipts"],
        "properties": {
            "version": {"const": 1},
            "status": {"enum": ["success", "failed"]},
            "termination_reason":
                {"enum": ["completed", "error", "cancelled", "deadline", "budget", "no_progress", "refused"]},
            "usage": {
                "type": "object",
                "properties": {
                    "turns": count(), "tool_calls": count(), "input_tokens": count(), "output_tokens": count(),
                    "cost_usd": amount(), "cpu_seconds": amount(), "wall_seconds": amount(),
                },
            },
            "receipts": {"type": "object", "required": ["count"]},
        },
        "if": {"properties": {"status": {"const": "success"}}},
        "then": {"required": ["data"], "properties": {"termination_reason": {"const": "completed"}}},
        "else": {
            "required": ["error_code", "message", "recovery_suggestion"],
            "properties": {
                "termination_reason": {"not": {"const": "completed"}},
                "message": {"type": "string", "minLength": 1},
                "recovery_suggestion": {"type": "string", "minLength": 1},
            },
        },
    });
    Schema::compile(contract).ok()
});

/// The verdict of a failure.
#[must_use]
pub fn verdict(failure: Failure) -> Verdict {
    Verdict::Failed {
        error_code: failure.code,
        message: failure.message,
        recovery_suggestion: failure.code.recovery_suggestion().to_owned(),
        details: failure.details,
        partial: failure.partial,
    }
}

/// Why a job with this code ended.
#[must_use]
pub const fn termination(code: Code) -> TerminationReason {
    match code {
        Code::Cancelled => TerminationReason::Cancelled,
        Code::DeadlineExceeded => TerminationReason::Deadline,
        Code::TurnBudgetExhausted
        | Code::ToolCallBudgetExhausted
        | Code::TokenBudgetExhausted
        | Code::CostBudgetExhausted
        | Code::CpuBudgetExhausted => TerminationReason::Budget,
        Code::NoProgress => TerminationReason::NoProgress,
        Code::ModelRefused => TerminationReason::Refused,
        _ => TerminationReason::Error,
    }
}

fn conclude(session: &Session, job: JobId, now: Duration, verdict: Verdict, reason: TerminationReason) -> JobResult {
    JobResult {
        version: 1,
        job_id: job,
        verdict,
        termination_reason: reason,
        usage: session.usage(now),
        receipts: session.receipts(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_misses_its_contract_is_replaced_by_one_that_says_so() {
        let session = Session::new();
        let failure = Failure::new(Code::NoProgress, "no progress");
        let fine = failed(&session, JobId::from_u128(1), Duration::ZERO, failure);
        assert_eq!(checked(fine.clone()), fine);
        let usage = JobUsage { cost_usd: f64::NAN, ..JobUsage::default() };
        for broken in [
            JobResult { usage, ..fine.clone() },
            JobResult { termination_reason: TerminationReason::Completed, ..fine.clone() },
            JobResult { version: 2, ..fine },
        ] {
            let told = checked(broken);
            assert!(matches!(&told.verdict, Verdict::Failed { error_code: Code::InternalLogicError, .. }));
            assert_eq!(checked(told.clone()).termination_reason, TerminationReason::Error);
        }
    }
}
