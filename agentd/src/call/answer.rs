//! Reading what a program answered: how its process ended, then its reply by the protocol, then the tool's own schema.

use serde_json::{Value, json};
use toolproto::api::CallError;
use toolproto::code::Code;
use toolproto::ids::CallId;
use toolproto::receipt::OutcomeKind;
use toolproto::reply::{self, Answer, ReplyError, ToolError};
use toolproto::units::Bytes;

use super::{Answered, failure};
use crate::launch::Ended;
use crate::schema;
use crate::tools::Tool;

/// What the end of the process says, if it says that there is no answer to read.
pub(super) fn unfinished(ended: &Ended) -> Option<CallError> {
    let fail = |code: Code, message: String| Some(failure(code, message, stderr_details(ended)));
    if let Some(failed) = &ended.failure {
        let details = json!({"step": failed.step, "errno": failed.errno});
        return Some(failure(failed.code, failed.message.clone(), details));
    }
    match ended.outcome.kind {
        OutcomeKind::Exited => None,
        OutcomeKind::Signalled => {
            let signal =
                ended.outcome.signal.map_or_else(|| "a signal".to_owned(), |signal| format!("signal {signal}"));
            fail(ended.outcome.code.unwrap_or(Code::ToolCrashed), format!("the tool was ended by {signal}"))
        }
        OutcomeKind::TimedOut => fail(Code::ToolTimeout, "the tool did not end within its time".to_owned()),
        OutcomeKind::OutOfMemory => fail(Code::OutOfMemory, "the tool reached its memory limit".to_owned()),
        OutcomeKind::Cancelled => fail(Code::Cancelled, "the call was cancelled".to_owned()),
        OutcomeKind::Interrupted => fail(Code::Interrupted, "agentd ended while the call ran".to_owned()),
        OutcomeKind::LaunchFailed | OutcomeKind::Refused => {
            fail(ended.outcome.code.unwrap_or(Code::LaunchFailed), "the call could not be started".to_owned())
        }
    }
}

/// Reads what a tool answered, and holds a result against the tool's output schema. Also remarks for the receipt.
pub(super) fn read(tool: &Tool, call: CallId, ended: &Ended) -> (Answered, Vec<String>) {
    let (answered, notes) = read_reply(tool.manifest.program.max_response, call, ended);
    let Answered::Success { result, .. } = &answered else { return (answered, notes) };
    match tool.output.as_ref().map(|output| output.check(result)) {
        Some(Err(violations)) => {
            let message = format!("the result does not satisfy the output schema: {}", schema::in_words(&violations));
            let error = failure(Code::ResponseInvalid, message, json!({"violations": violations}));
            (Answered::Failure(error), notes)
        }
        _ => (answered, notes),
    }
}

/// Reads what a program answered by the protocol, and remarks for the receipt.
pub(crate) fn read_reply(max_response: Bytes, call: CallId, ended: &Ended) -> (Answered, Vec<String>) {
    let fail = |error: CallError| (Answered::Failure(error), Vec::new());
    if let Some(error) = unfinished(ended) {
        return fail(error);
    }
    if ended.stdout_overflowed || ended.stdout.len() as u64 > max_response.0 {
        let message = format!("the tool wrote more than its cap of {max_response}");
        return fail(failure(Code::ResponseTooLarge, message, Value::Null));
    }
    let status = ended.outcome.exit_status.unwrap_or(-1);
    let reply = match reply::read(&ended.stdout, call, status) {
        Ok(reply) => reply,
        Err(error) => return fail(unreadable(&error, ended)),
    };
    match reply.answer {
        Answer::Failure(error) => (Answered::Failure(own_error(&error, ended)), reply.notes),
        Answer::Success { .. } if let Some(code) = ended.outcome.code => {
            (Answered::Failure(failure(code, code.meaning(), stderr_details(ended))), reply.notes)
        }
        Answer::Success { result, artifacts } => (Answered::Success { result, artifacts }, reply.notes),
    }
}

fn unreadable(error: &ReplyError, ended: &Ended) -> CallError {
    let code = ended.outcome.code.unwrap_or_else(|| error.code());
    let mut details = stderr_details(ended);
    if let Some(offset) = error.offset() {
        details["offset"] = offset.into();
    }
    if let Some(pointer) = error.pointer() {
        details["pointer"] = pointer.into();
    }
    failure(code, error.to_string(), details)
}

/// A tool's own error: its code, its words, its details.
fn own_error(error: &ToolError, ended: &Ended) -> CallError {
    let mut own = json!({"code": error.code, "retryable": error.retryable});
    if let Some(after) = error.retry_after_ms {
        own["retry_after_ms"] = after.into();
    }
    if !error.details.is_null() {
        own["details"] = error.details.clone();
    }
    let mut details = json!({"tool_error": own});
    if !ended.denied.is_empty() {
        details["denied"] = json!(ended.denied);
    }
    failure(ended.outcome.code.unwrap_or(Code::ToolFailed), error.message.clone(), details)
}

fn stderr_details(ended: &Ended) -> Value {
    let mut details = json!({});
    if !ended.stderr_tail.is_empty() {
        details["stderr"] = ended.stderr_tail.clone().into();
    }
    if !ended.denied.is_empty() {
        details["denied"] = json!(ended.denied);
    }
    if let Some(status) = ended.outcome.exit_status {
        details["exit_status"] = status.into();
    }
    details
}
