//! A model's answer, judged: a plan that can be followed, a final answer, or neither.

use std::collections::HashSet;

use serde_json::json;
use toolproto::code::Code;
use toolproto::ids::CallId;
use toolproto::manifest::Effects;
use toolproto::source::nearest;

use super::event::{BuiltIn, Event, Plan, PlannedCall, Refusal, Spent};
use super::{Session, question, tool_search, wait};
use crate::agent::{Agent, Price};
use crate::model::transcript::{Arguments, Message};
use crate::model::{Finish, Reply};
use crate::tools::Tools;

/// What a model's answer amounts to.
#[derive(Clone, Debug, PartialEq)]
pub enum Judged {
    /// This event.
    Event(Event),
    /// An answer that cannot be followed: ON_PLAN_REFUSED, once each call in it has a receipt that says why.
    Refused {
        /// The answer; each of its calls carries its refusal.
        plan: Plan,
        /// Why, for the model.
        refusal: Refusal,
    },
}

/// Judges a model's answer. `new_id` makes the calls' ids.
#[must_use]
pub fn judge(
    session: &Session,
    agent: &Agent,
    tools: &Tools,
    reply: Reply,
    price: Option<Price>,
    mut new_id: impl FnMut() -> CallId,
) -> Judged {
    let spent = spent_on(session.next_input_tokens(&agent.system_prompt), &reply, price);
    if reply.finish == Finish::Refused {
        return Judged::Event(Event::PlanFailed {
            code: Code::ModelRefused,
            message: "the model refused to go on".to_owned(),
            details: json!({"text": reply.text, "model": reply.model}),
        });
    }
    // The last turn is for words; calls that a model makes all the same are not run and not remembered.
    let asked = if session.is_grace() { Vec::new() } else { reply.calls };
    let mut ids = WireIds::of(session);
    let last = asked.len().saturating_sub(1);
    let calls: Vec<PlannedCall> = asked
        .into_iter()
        .enumerate()
        .map(|(index, call)| {
            let cut_off = reply.finish == Finish::Length && index == last;
            let arguments = match Arguments::read(&call.arguments) {
                Arguments::Object(_) if cut_off => Arguments::Malformed {
                    text: call.arguments,
                    reason: "the answer was cut off at the token limit".to_owned(),
                },
                read => read,
            };
            let execution = tools.get(&call.tool).map(|tool| &tool.manifest.execution);
            let question = call.tool == question::NAME && agent.ask_user.is_some();
            let built_in = built_in(agent, &call.tool);
            PlannedCall {
                call: new_id(),
                wire_id: ids.take(call.id),
                refusal: refusal(session, agent, tools, &call.tool, &arguments),
                concurrent: built_in == Some(BuiltIn::ToolSearch)
                    || execution.is_some_and(|execution| execution.concurrent),
                approval: question || agent.approval.tools.contains(&call.tool),
                question,
                built_in,
                repeatable: tools.is_repeatable(&call.tool),
                outside_effects: execution.is_some_and(|execution| execution.effects == Effects::StatefulAction),
                tool: call.tool,
                arguments,
            }
        })
        .collect();
    let Reply { text, echo, model, only_thought, .. } = reply;
    let mut plan = Plan { text, calls, echo, model, spent, only_thought };
    match why_unusable(session, &plan) {
        None => Judged::Event(Event::PlanReceived { plan }),
        Some(refusal) => {
            for call in &mut plan.calls {
                call.refusal.get_or_insert_with(|| refusal.clone());
            }
            Judged::Refused { plan, refusal }
        }
    }
}

fn why_unusable(session: &Session, plan: &Plan) -> Option<Refusal> {
    let refuse = |code: Code, message: String| Some(Refusal { code, message });
    if plan.calls.is_empty() {
        let empty = plan.text.trim().is_empty();
        let was = if plan.only_thought { "held thoughts alone" } else { "was empty" };
        let words = format!("The answer {was}. Call a tool, or give the final answer.");
        return if empty { refuse(Code::ResultInvalid, words) } else { None };
    }
    let left = session.budget().map_or(0, |budget| budget.calls_left(&session.used));
    if plan.calls.len() > left as usize {
        let message = format!(
            "{} calls were asked for and {left} are left, so none of them ran. Ask for fewer, or give the final answer.",
            plan.calls.len()
        );
        return refuse(Code::ToolCallBudgetExhausted, message);
    }
    let refusals: Vec<&Refusal> = plan.calls.iter().filter_map(|call| call.refusal.as_ref()).collect();
    match refusals.first() {
        Some(first) if refusals.len() == plan.calls.len() => {
            refuse(first.code, format!("No call could be run: {}", first.message))
        }
        _ => None,
    }
}

/// Which of agentd's own tools, other than a question, has this name for the agent.
fn built_in(agent: &Agent, tool: &str) -> Option<BuiltIn> {
    match tool {
        tool_search::NAME if agent.tool_search.is_some() => Some(BuiltIn::ToolSearch),
        wait::NAME if agent.wait.is_some() => Some(BuiltIn::Wait),
        _ => None,
    }
}

fn refusal(session: &Session, agent: &Agent, tools: &Tools, tool: &str, arguments: &Arguments) -> Option<Refusal> {
    if session.consultation.is_disabled(tool) {
        let message = format!("`{tool}` is switched off for the rest of this job; do something else");
        return Some(Refusal { code: Code::ToolBlocked, message });
    }
    if session.blocked().any(|blocked| blocked == tool) {
        let message = format!("`{tool}` is blocked for now, since its calls changed nothing; do something else");
        return Some(Refusal { code: Code::ToolBlocked, message });
    }
    if tool == question::NAME && agent.ask_user.is_some() {
        return question::refusal(arguments);
    }
    match (built_in(agent, tool), agent.wait) {
        (Some(BuiltIn::ToolSearch), _) => return tool_search::refusal(arguments),
        (Some(BuiltIn::Wait), Some(longest)) => return wait::refusal(arguments, longest),
        _ => {}
    }
    if !agent.tools.iter().any(|known| known == tool) || tools.get(tool).is_none() {
        let known = || agent.tools.iter().map(String::as_str);
        let hint = match nearest(tool, known()) {
            Some(name) => format!("did you mean `{name}`?"),
            None if agent.tool_search.is_some() => format!("look for one with `{}`", tool_search::NAME),
            None => format!("the tools are: {}", known().collect::<Vec<_>>().join(", ")),
        };
        return Some(Refusal { code: Code::ToolUnknown, message: format!("there is no tool `{tool}`; {hint}") });
    }
    match arguments {
        Arguments::Object(_) => None,
        Arguments::Malformed { reason, .. } => Some(Refusal { code: Code::ArgumentsInvalid, message: reason.clone() }),
    }
}

/// What an answer cost, `estimate` being the tokens that were read where the server has not counted them.
pub(super) fn spent_on(estimate: u64, reply: &Reply, price: Option<Price>) -> Spent {
    let (input, cached, output, counted) = match reply.usage {
        Some(usage) => (usage.input_tokens, usage.cached_tokens, usage.output_tokens, true),
        None => {
            let calls: usize = reply.calls.iter().map(|call| call.tool.len() + call.arguments.len()).sum();
            let written = (reply.text.len() + calls) as u64;
            (estimate, 0, written.div_ceil(3), false)
        }
    };
    Spent {
        input_tokens: input,
        output_tokens: output,
        cost_usd: price.map_or(0.0, |price| price.cost(input, cached, output)),
        counted,
    }
}

/// The calls' ids towards the model: its own where they are usable, else made here, of nine letters and digits, as the
/// strictest templates want them.
struct WireIds {
    used: HashSet<String>,
    next: usize,
}

impl WireIds {
    fn of(session: &Session) -> Self {
        let used: HashSet<String> = session
            .messages
            .iter()
            .filter_map(|message| match message {
                Message::Assistant(assistant) => Some(assistant.calls.iter().map(|call| call.id.clone())),
                _ => None,
            })
            .flatten()
            .collect();
        Self { next: used.len() + 1, used }
    }

    fn take(&mut self, given: Option<String>) -> String {
        const LONGEST: usize = 128;
        if let Some(given) = given.filter(|id| !id.is_empty() && id.len() <= LONGEST)
            && self.used.insert(given.clone())
        {
            return given;
        }
        loop {
            let made = format!("c{:08}", self.next);
            self.next += 1;
            if self.used.insert(made.clone()) {
                return made;
            }
        }
    }
}
