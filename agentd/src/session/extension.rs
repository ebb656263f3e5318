//! Extensions, as the loop knows them: who is asked where, how far that is, and what becomes of what they say.
//!
//! They are asked one after the other, in the agent's order. What one says is an event; what follows from it is decided here and
//! in [`decide`](super::decide), never by the extension: the answer that it puts in place of the model's is judged as the
//! model's would be, and an objection to an answer is one of the bounded repairs.

use std::collections::BTreeSet;
use std::time::Duration;

use toolproto::code::Code;
use toolproto::extension::{Opinion, Point};
use toolproto::ids::CallId;
use toolproto::receipt::Usage;

use super::Session;
use super::decide::Action;
use super::event::{Event, ReceiptRef, Refusal};
use crate::agent::Agent;
use crate::extension::Extension;
use crate::tools::Tools;

/// How far the extensions are at the point where the session stands, and what they have brought about for good.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Consultation {
    /// Those that have been asked at this point.
    asked: Vec<String>,
    running: Option<Consulted>,
    /// Why the proposed final answer is not to be taken.
    objections: Vec<String>,
    /// Tools that are not offered any more.
    disabled: BTreeSet<String>,
}

/// An extension that is being asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consulted {
    /// The call.
    pub call: CallId,
    /// The extension.
    pub extension: String,
    /// Where.
    pub point: Point,
    /// Asked by an agentd that ended before the extension had answered.
    pub(super) is_dangling: bool,
}

impl Consultation {
    pub(super) const fn new() -> Self {
        Self { asked: Vec::new(), running: None, objections: Vec::new(), disabled: BTreeSet::new() }
    }

    pub(super) const fn running(&self) -> Option<&Consulted> {
        self.running.as_ref()
    }

    pub(super) fn is_disabled(&self, tool: &str) -> bool {
        self.disabled.contains(tool)
    }

    pub(super) fn disabled(&self) -> impl Iterator<Item = &str> {
        self.disabled.iter().map(String::as_str)
    }

    /// Why the answer is not to be taken, if it is not.
    pub(super) fn objection(&self) -> Option<String> {
        (!self.objections.is_empty()).then(|| self.objections.join("\n"))
    }

    pub(super) fn has_asked(&self, extension: &str) -> bool {
        self.asked.iter().any(|asked| asked == extension)
    }

    pub(super) fn started(&mut self, call: CallId, extension: &str, point: Point) {
        self.running = Some(Consulted { call, extension: extension.to_owned(), point, is_dangling: false });
    }

    /// Whoever was asked has answered, or failed.
    pub(super) fn ended(&mut self, disabled: &[String]) -> Option<Consulted> {
        let ended = self.running.take()?;
        self.asked.push(ended.extension.clone());
        self.disabled.extend(disabled.iter().cloned());
        Some(ended)
    }

    pub(super) fn object(&mut self, words: String) {
        self.objections.push(words);
    }

    /// agentd ended while somebody was asked. Whoever never started has not been asked at all.
    pub(super) fn dangle(&mut self, never_started: &[CallId]) {
        self.running.take_if(|running| never_started.contains(&running.call));
        if let Some(running) = &mut self.running {
            running.is_dangling = true;
        }
    }

    /// Nobody has been asked, as far as is known.
    pub(super) fn reset(&mut self) {
        self.running = None;
    }

    /// The session leaves the point.
    pub(super) fn leave(&mut self) {
        self.running = None;
        self.asked.clear();
        self.objections.clear();
    }
}

/// What goes on with the extension that is being asked, if one is.
pub(super) fn going(session: &Session, tools: &Tools, is_interrupted: bool, time: Duration) -> Option<Action> {
    let Consulted { call, extension, point, is_dangling } = session.consultation.running()?;
    let (call, point) = (*call, *point);
    match (is_dangling, is_interrupted) {
        // The job's end is all that is left to be told.
        (true, true) => None,
        (true, false) => Some(Action::Append(Box::new(dangling(tools, call, extension)))),
        (false, true) => Some(Action::Stop { call }),
        (false, false) => Some(Action::Consult { extension: extension.clone(), point, time }),
    }
}

/// An extension that may have run when an earlier agentd ended: asked again where that does no harm.
fn dangling(tools: &Tools, call: CallId, name: &str) -> Event {
    let Some(extension) = tools.extension(name).filter(|extension| !extension.is_repeatable()) else {
        return Event::CallReset { call };
    };
    let message = "agentd ended while the extension ran. It may have reached its hosts, and was not asked again";
    let failure = Refusal { code: Code::Interrupted, message: message.to_owned() };
    ended(extension, call, Err(failure), None, None)
}

/// The extension that is to be asked next at a point.
pub(super) fn next(session: &Session, agent: &Agent, tools: &Tools, point: Point, time: Duration) -> Option<Action> {
    let extension = agent.extensions.iter().find(|name| {
        let extension = tools.extension(name);
        extension.is_some_and(|extension| extension.manifest.points.contains(&point))
            && !session.consultation.has_asked(name)
    })?;
    Some(Action::Consult { extension: extension.clone(), point, time })
}

/// What an extension's answer, or its failure, amounts to.
#[must_use]
pub fn ended(
    extension: &Extension,
    call: CallId,
    said: Result<Opinion, Refusal>,
    receipt: Option<ReceiptRef>,
    usage: Option<Usage>,
) -> Event {
    let name = &extension.manifest.name;
    let (mut opinion, failure) = match said {
        Ok(opinion) => (opinion, None),
        Err(failure) => (Opinion::default(), Some(failure)),
    };
    let halt = match (opinion.failure.take(), &failure) {
        (Some(stop), _) => Some(Refusal {
            code: Code::ExtensionRefused,
            message: format!("extension `{name}` ended the job: {}", stop.message),
        }),
        (None, Some(failure)) if extension.manifest.required => Some(Refusal {
            code: Code::ExtensionFailed,
            message: format!(
                "extension `{name}`, which is required, failed with {}: {}",
                failure.code, failure.message
            ),
        }),
        (None, _) => None,
    };
    Event::ExtensionEnded { call, failure, opinion, halt, receipt, usage }
}

/// What the model is told of an extension's feedback.
pub(super) fn told(extension: &str, words: &str) -> String {
    format!("`{extension}`, which watches over this job, says:\n{words}")
}
