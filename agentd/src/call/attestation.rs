//! Whether a call's evidence says what it did to the workspace. A call that ended well and whose evidence does not say it has
//! failed: nobody is told that something was done that nobody saw.

use serde_json::Value;
use toolproto::api::CallError;
use toolproto::code::Code;
use toolproto::receipt::Evidence;

use super::{Answered, failure};

/// What everybody is told of such a call.
const UNKNOWN: &str = "it is not known what the call left in the workspace, which it could write to directly: what it wrote is \
                       there. Look before you go on";

/// How a call ends whose evidence leaves open what it did to the workspace; `None` when the evidence says it.
pub(super) fn unproven(answered: &Answered, evidence: &Evidence) -> Option<CallError> {
    if evidence.workspace.is_attested() {
        return None;
    }
    Some(match (answered, evidence.outcome.code) {
        (Answered::Failure(error), _) => {
            CallError { message: format!("{}; {UNKNOWN}", error.message), ..error.clone() }
        }
        (Answered::Success { .. }, Some(code)) => {
            let why = match code {
                Code::WorkspaceTooLarge => code.meaning(),
                _ => "The workspace could not be read after the call.",
            };
            failure(code, format!("{why} So {UNKNOWN}"), Value::Null)
        }
        // The launcher ends every such call with a code. If it did not, one of its rules is broken.
        (Answered::Success { .. }, None) => {
            let (job, call) = (evidence.job_id, evidence.call_id);
            tracing::error!(%job, %call, critical = true, "INTERNAL_LOGIC_ERROR: the evidence of a call is incomplete");
            let why = "the launcher's evidence lacks the workspace before and after, or what differs";
            failure(Code::InternalLogicError, format!("{why}: {UNKNOWN}"), Value::Null)
        }
    })
}
