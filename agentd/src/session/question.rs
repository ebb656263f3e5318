//! `ask_user`: the tool by which a model asks a person. It runs nothing and leaves no receipt: question and answer are events.

use std::time::Duration;

use serde_json::json;
use toolproto::code::Code;

use super::event::{CallRecord, Event, Refusal};
use super::{Approval, BatchCall, Progress};
use crate::model::ToolOffer;
use crate::model::transcript::Arguments;

/// The tool's name. No tool of the catalogue that an agent uses may have it.
pub const NAME: &str = "ask_user";

/// As a model is told of it.
#[must_use]
pub fn offer() -> ToolOffer {
    ToolOffer {
        name: NAME.to_owned(),
        description:
            "Asks the person for whom you work, and waits for the answer in words. Ask only what you cannot find out \
                      and must not guess."
                .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {"question": {"type": "string", "minLength": 1}},
            "required": ["question"],
            "additionalProperties": false,
        }),
    }
}

/// The question in a call's arguments.
#[must_use]
pub fn text(arguments: &Arguments) -> Option<&str> {
    let Arguments::Object(arguments) = arguments else { return None };
    arguments.get("question")?.as_str().filter(|text| !text.trim().is_empty())
}

/// Why a question cannot be asked.
#[must_use]
pub fn refusal(arguments: &Arguments) -> Option<Refusal> {
    let message = match (text(arguments), arguments) {
        (Some(_), _) => return None,
        (None, Arguments::Malformed { reason, .. }) => reason.clone(),
        (None, Arguments::Object(_)) => "/question: it must be text that is not empty".to_owned(),
    };
    Some(Refusal { code: Code::ArgumentsInvalid, message })
}

/// What ends a question at `now`: its answer, that nobody wants to answer it, or that nobody did in time.
#[must_use]
pub fn ended(one: &BatchCall, now: Duration) -> Option<Event> {
    if !one.planned.question || one.progress != Progress::Pending {
        return None;
    }
    let call = one.planned.call;
    let (code, message) = match &one.approval {
        Approval::Answered(answer) => {
            let record = CallRecord::of_no_tool(None, json!({"ok": true, "result": {"answer": answer}}));
            return Some(Event::ToolCompleted { call, record });
        }
        Approval::Denied(reason) => {
            let reason = reason.as_deref().unwrap_or("no reason was given");
            (Code::ApprovalDenied, format!("the person does not answer: {reason}"))
        }
        Approval::Asked(until) if now >= *until => {
            (Code::ApprovalExpired, "nobody answered in time; go on without the answer".to_owned())
        }
        _ => return None,
    };
    let told = json!({"ok": false, "error": {"code": code, "message": message}});
    Some(Event::ToolFailed { call, record: CallRecord::of_no_tool(Some(code), told) })
}
