//! What should go on now, given where a job stands. Pure: asked again after every event, it gives the same answer for the
//! same session and time.
//!
//! The answer describes what ought to be going on, not what to begin: the runner starts what does not go on yet, and stops
//! what is not in the answer any more.

use std::time::Duration;

use serde_json::{Value, json};
use toolproto::api::Phase;
use toolproto::code::Code;
use toolproto::extension::Point;
use toolproto::ids::{CallId, JobId};

use super::budget::Need;
use super::conclude::{self, Failure};
use super::event::{Blocked, Event, Interruption, Refusal};
use super::progress::Judgement;
use super::wait::{Step, Waiting};
use super::{
    Approval, BatchCall, Observation, Progress, Session, context, dangling, extension, question, summary, tool_search,
    wait, waves,
};
use crate::agent::Agent;
use crate::model::Thinking;
use crate::schema;
use crate::tools::Tools;

/// What ought to go on.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Store this event.
    Append(Box<Event>),
    /// Ask a model, with the conversation as it stands.
    Ask {
        /// Whether it is offered tools.
        tools: bool,
        /// What it is told of the budget; not part of the conversation.
        note: String,
        /// The most tokens that it may write.
        max_output: Option<u64>,
        /// Time that is left.
        time: Duration,
        /// Whether it may think first.
        thinking: Thinking,
    },
    /// Ask a model to sum up the oldest part of the conversation.
    Summarise(summary::Wanted),
    /// Run this call.
    Run {
        /// The call.
        call: CallId,
        /// Time that is left.
        time: Duration,
    },
    /// Begin a planned wait of this length: store when it ends, in the job's time and by the host's clock.
    BeginWait {
        /// The call.
        call: CallId,
        /// The length.
        delay: Duration,
    },
    /// End a planned wait: compare the host's clock with the job's time, and store what came of it.
    EndWait {
        /// The call.
        call: CallId,
        /// The wait.
        waiting: Waiting,
    },
    /// Ask this extension.
    Consult {
        /// The extension.
        extension: String,
        /// Where.
        point: Point,
        /// Time that is left.
        time: Duration,
    },
    /// End this running call, of a tool or an extension, early.
    Stop {
        /// The call.
        call: CallId,
    },
    /// Do not run this call: give it a result that says so.
    Refuse {
        /// The call.
        call: CallId,
        /// Why.
        refusal: Refusal,
    },
    /// End the batch: give each of these calls, which never started, a result that says so, and store ON_INTERRUPTED.
    Interrupt {
        /// By what.
        cause: Interruption,
        /// The calls, in the batch's order.
        calls: Vec<CallId>,
    },
}

/// The fewest tokens of an answer that a request is worth.
const MIN_OUTPUT_TOKENS: u64 = 256;

/// Says what ought to go on when the job has run for `now`.
#[must_use]
pub fn decide(session: &Session, agent: &Agent, tools: &Tools, job: JobId, now: Duration) -> Vec<Action> {
    match session.phase {
        Phase::Idle => Vec::new(),
        Phase::Planning => planning(session, agent, tools, now),
        Phase::Executing => executing(session, agent, tools, now),
        Phase::Observing => {
            let first = summary_after_overflow(session, agent, now).map(Action::Summarise);
            let first = first.or_else(|| extension_observing(session, agent, tools, now));
            vec![first.unwrap_or_else(|| append(observing(session, agent, tools, job, now)))]
        }
    }
}

fn append(event: Event) -> Action {
    Action::Append(Box::new(event))
}

/// What ends the job from outside, if anything does.
fn interruption(session: &Session, now: Duration) -> Option<Interruption> {
    if session.cancelled {
        Some(Interruption::Cancelled)
    } else if session.deadline().is_some_and(|deadline| now >= deadline) {
        Some(Interruption::Deadline)
    } else {
        None
    }
}

/// What extensions have to do before a batch or an answer is judged.
fn extension_observing(session: &Session, agent: &Agent, tools: &Tools, now: Duration) -> Option<Action> {
    let (is_interrupted, time) = (interruption(session, now).is_some(), left(session, now));
    if session.consulted().is_some() {
        return extension::going(session, tools, is_interrupted, time);
    }
    // Whoever cannot change the end any more is not asked.
    if is_interrupted || session.is_grace() {
        return None;
    }
    let goes_on = out_of_budget(session, agent).is_none();
    let point = match &session.observed {
        Some(Observation::Batch) if goes_on => Point::AfterToolBatch,
        Some(Observation::Answer(_)) if session.unheard.is_empty() || !goes_on => Point::BeforeFinalAnswer,
        _ => return None,
    };
    extension::next(session, agent, tools, point, time)
}

fn left(session: &Session, now: Duration) -> Duration {
    session.deadline().unwrap_or_default().saturating_sub(now)
}

fn planning(session: &Session, agent: &Agent, tools: &Tools, now: Duration) -> Vec<Action> {
    let interruption = interruption(session, now);
    if let Some(action) = extension::going(session, tools, interruption.is_some(), left(session, now)) {
        return vec![action];
    }
    if let Some(cause) = interruption {
        return vec![Action::Interrupt { cause, calls: Vec::new() }];
    }
    let Some(budget) = session.budget() else { return Vec::new() };
    if !session.asking {
        let unaffordable = budget.exhausted(&session.used, &need(session, agent)).filter(|_| !session.is_grace());
        if let Some(code) = unaffordable {
            return vec![Action::Interrupt { cause: Interruption::Budget(code), calls: Vec::new() }];
        }
        if let Some(room) = room(session, agent, tools, now) {
            return vec![room];
        }
        if session.next_input_tokens(&agent.system_prompt) > agent.context.limit {
            let cause = Interruption::Budget(Code::ContextOverflow);
            return vec![Action::Interrupt { cause, calls: Vec::new() }];
        }
        let asked = extension::next(session, agent, tools, Point::BeforeTurn, left(session, now));
        if let Some(action) = asked.filter(|_| !session.is_grace()) {
            return vec![action];
        }
        return vec![append(Event::TurnBegun { turn: session.used.turns + 1 })];
    }
    let input = session.next_input_tokens(&agent.system_prompt);
    vec![Action::Ask {
        tools: !session.is_grace(),
        note: budget.note(&session.used, now),
        max_output: budget.tokens_left(&session.used).map(|left| left.saturating_sub(input)),
        time: budget.wall.saturating_sub(now),
        thinking: if session.speechless > 0 { Thinking::Off } else { Thinking::AsConfigured },
    }]
}

fn executing(session: &Session, agent: &Agent, tools: &Tools, now: Duration) -> Vec<Action> {
    if let Some(cause) = interruption(session, now) {
        let running: Vec<Action> = session
            .batch
            .iter()
            .filter(|one| one.progress == Progress::Started)
            .map(|one| Action::Stop { call: one.planned.call })
            .collect();
        if !running.is_empty() {
            return running;
        }
        if let Some(one) = session.batch.iter().find(|one| one.progress == Progress::Dangling) {
            return vec![dangling::unknown_effects(one)];
        }
        let pending = session.batch.iter().filter(|one| one.progress == Progress::Pending);
        return vec![Action::Interrupt { cause, calls: pending.map(|one| one.planned.call).collect() }];
    }
    let time = left(session, now);
    let waits = |one: &&BatchCall| one.approval == Approval::Needed && one.progress == Progress::Pending;
    if let Some(one) = session.batch.iter().find(waits) {
        let question = agent.ask_user.filter(|_| one.planned.question);
        let until = now.saturating_add(question.unwrap_or(agent.approval.timeout));
        let until_ms = u64::try_from(until.as_millis()).unwrap_or(u64::MAX);
        return vec![append(Event::ApprovalRequested { call: one.planned.call, until_ms })];
    }
    if let Some(one) = session.batch.iter().find(|one| one.progress == Progress::Dangling) {
        return vec![dangling::resolve(one)];
    }
    if let Some(ended) = session.batch.iter().find_map(|one| question::ended(one, now)) {
        return vec![append(ended)];
    }
    if let Some(ended) = session.batch.iter().find_map(|one| tool_search::ended(one, agent, tools)) {
        return vec![append(ended)];
    }
    let refused = session.batch.iter().filter(|one| one.progress == Progress::Pending);
    if let Some(refuse) = refused.filter_map(|one| undecided(one, now)).next() {
        return vec![refuse];
    }
    let running = waves::next(&session.batch, agent.max_parallel).filter_map(|one| {
        let call = one.planned.call;
        match wait::step(one, now, time) {
            None => Some(Action::Run { call, time }),
            Some(Step::Begin(delay)) => Some(Action::BeginWait { call, delay }),
            Some(Step::End(waiting)) => Some(Action::EndWait { call, waiting }),
            Some(Step::Refused(event)) => Some(Action::Append(event)),
            Some(Step::Goes) => None,
        }
    });
    running.collect()
}

/// A call that a person refused, or decided nothing about in time.
fn undecided(one: &BatchCall, now: Duration) -> Option<Action> {
    let (code, message) = match &one.approval {
        Approval::Denied(reason) => {
            let reason = reason.as_deref().unwrap_or("no reason was given");
            (Code::ApprovalDenied, format!("a person refused the call: {reason}"))
        }
        Approval::Asked(until) if now >= *until => (Code::ApprovalExpired, Code::ApprovalExpired.meaning().to_owned()),
        _ => return None,
    };
    Some(Action::Refuse { call: one.planned.call, refusal: Refusal { code, message } })
}

/// What makes room in the conversation, if that is needed and worth trying.
fn room(session: &Session, agent: &Agent, tools: &Tools, now: Duration) -> Option<Action> {
    let tokens = session.next_input_tokens(&agent.system_prompt);
    let worthwhile = session.compaction.is_worthwhile();
    // Room that was made in vain is not made again, unless the job would end for want of it.
    if tokens <= agent.context.threshold() || (!worthwhile && tokens <= agent.context.limit) {
        return None;
    }
    let plan = context::plan(&session.messages, tools, &agent.context, tokens)?;
    let summary = summary::wanted(session, agent, now).filter(|_| worthwhile);
    match (plan, summary) {
        // What only says again what a later result says is not worth summing up.
        (Event::ContextCompacted { superseded, evicted: 1.., effective, .. }, Some(wanted)) => {
            if superseded.is_empty() {
                return Some(Action::Summarise(wanted));
            }
            Some(append(Event::ContextCompacted { superseded, evicted: 0, remembered: Vec::new(), effective }))
        }
        (plan, _) => Some(append(plan)),
    }
}

fn observing(session: &Session, agent: &Agent, tools: &Tools, job: JobId, now: Duration) -> Event {
    let fail = |failure: Failure| conclude::failure(session, job, now, failure);
    let interruption = interruption(session, now);
    if session.cancelled {
        return fail(Interruption::Cancelled.into());
    }
    match &session.observed {
        Some(Observation::Answer(text)) if let Some(code) = session.grace => fail(exhausted(code, Some(text))),
        // What a person said is heard before the job ends.
        Some(Observation::Answer(_)) if !session.unheard.is_empty() && out_of_budget(session, agent).is_none() => {
            Event::ObservationRejected { feedback: None, grace: None }
        }
        Some(Observation::Answer(text)) if let Some(words) = session.consultation.objection() => {
            mend(session, agent, now, Misfit::objected(&words, text)).unwrap_or_else(fail)
        }
        Some(Observation::Answer(text)) => match answer(session, agent, text) {
            Ok(data) => conclude::success(session, job, now, data),
            Err(misfit) => mend(session, agent, now, misfit).unwrap_or_else(fail),
        },
        Some(Observation::Refused(_) | Observation::Failed { .. }) if let Some(code) = session.grace => {
            fail(exhausted(code, session.last_answer.as_deref()))
        }
        // The same request again, without thoughts. It helps or it does not, so it is done once, and is no repair.
        Some(Observation::Refused(_)) if session.speechless == 1 && may_go_on(session, agent, now) => {
            Event::ObservationRejected { feedback: None, grace: None }
        }
        Some(Observation::Refused(refusal)) => mend(session, agent, now, Misfit::of(refusal)).unwrap_or_else(fail),
        // A request has no more time than the job, so that its failure may be seen before the job's end is.
        Some(Observation::Failed { details, .. }) if let Some(cause) = interruption => {
            fail(Failure { details: details.clone(), ..cause.into() })
        }
        Some(Observation::Failed { code: Code::ContextOverflow, message, .. }) => overflow(session, agent, tools)
            .unwrap_or_else(|| fail(Failure::new(Code::ContextOverflow, message.clone()))),
        Some(Observation::Failed { code, message, details }) => {
            fail(Failure { details: details.clone(), ..Failure::new(*code, message.clone()) })
        }
        Some(Observation::Interrupted(cause)) => fail((*cause).into()),
        Some(Observation::Batch) => match (interruption, out_of_budget(session, agent)) {
            (Some(cause), _) => fail(cause.into()),
            (None, Some(code)) => last_turn(session, agent, code).unwrap_or_else(fail),
            (None, None) => go_on(session, agent).unwrap_or_else(fail),
        },
        // Nothing enters OBSERVING without something to observe; if it did, the job must still end.
        None => fail(Failure::new(Code::InternalLogicError, "nothing was there to be judged")),
    }
}

/// What is wrong with an answer, and how the job ends if it stays so.
struct Misfit {
    feedback: String,
    failure: Failure,
}

impl Misfit {
    /// An extension does not let the answer pass.
    fn objected(words: &str, answer: &str) -> Self {
        Self {
            feedback: words.to_owned(),
            failure: Failure {
                details: json!({"feedback": words}),
                partial: Some(partial(answer)),
                ..Failure::new(Code::CompletionUnverified, words)
            },
        }
    }

    fn of(refusal: &Refusal) -> Self {
        let code = match refusal.code {
            Code::ToolCallBudgetExhausted => Code::ToolCallBudgetExhausted,
            _ => Code::ObservationInvalidAfterRetry,
        };
        Self {
            feedback: refusal.message.clone(),
            failure: Failure {
                details: json!({"code": refusal.code, "feedback": refusal.message}),
                ..Failure::new(code, refusal.message.clone())
            },
        }
    }
}

/// Reads a proposed final answer.
fn answer(session: &Session, agent: &Agent, text: &str) -> Result<Value, Misfit> {
    let misfit = |feedback: String, details: Value| Misfit {
        failure: Failure {
            details,
            partial: Some(partial(text)),
            ..Failure::new(Code::ResultInvalid, feedback.clone())
        },
        feedback,
    };
    let data = read_answer(text).map_err(|error| {
        misfit(
            format!("The final answer is not one JSON object: {error}. Answer again with the JSON object alone."),
            json!({"reason": error}),
        )
    })?;
    if let Err(violations) = agent.result.check(&data) {
        return Err(misfit(
            format!(
                "The final answer does not satisfy the result schema: {}. Answer again with a JSON object that does.",
                schema::in_words(&violations)
            ),
            json!({"violations": violations}),
        ));
    }
    let unmet = session.evidence.unmet(&agent.completion);
    // An advisory contract is told once for each repair, and then let go.
    if unmet.is_empty() || (!agent.completion.strict && session.repairs >= agent.max_repairs) {
        return Ok(data);
    }
    let feedback = format!("The goal is not reached yet: {}. Go on, then answer again.", unmet.join("; "));
    Err(Misfit {
        failure: Failure {
            details: json!({"unmet": unmet}),
            partial: Some(data),
            ..Failure::new(Code::CompletionUnverified, unmet.join("; "))
        },
        feedback,
    })
}

/// What comes after a batch: the next turn, with words if the job repeats itself, or the end.
fn go_on(session: &Session, agent: &Agent) -> Result<Event, Failure> {
    match session.repetition.judge(&agent.progress) {
        Judgement::Progress => Ok(Event::ObservationValidated { feedback: None, blocked: Vec::new(), no_progress: 0 }),
        Judgement::Warn { no_progress, tools, block } => {
            let until_turn = session.used.turns.saturating_add(agent.progress.block_turns);
            let block_of = |tool: &String| Blocked { tool: tool.clone(), until_turn };
            let blocked: Vec<Blocked> = if block { tools.iter().map(block_of).collect() } else { Vec::new() };
            Ok(Event::ObservationValidated { feedback: Some(warning(&tools, block)), blocked, no_progress })
        }
        Judgement::Stop { tools } => Err(Failure {
            details: json!({"tools": tools}),
            partial: session.last_answer.as_deref().map(partial),
            ..Failure::new(Code::NoProgress, format!("calls of {} were repeated without effect", tools.join(", ")))
        }),
    }
}

fn warning(tools: &[String], block: bool) -> String {
    let tools = tools.join(", ");
    let blocked = if block { format!(" {tools} cannot be called for some turns.") } else { String::new() };
    format!(
        "The same calls of {tools} gave the same results again, and nothing has changed in between.{blocked} Do something else, \
         or give the final answer."
    )
}

/// Makes room after a model said that the conversation is too long for it.
fn overflow(session: &Session, agent: &Agent, tools: &Tools) -> Option<Event> {
    if !session.compaction.is_worthwhile() || out_of_budget(session, agent).is_some() {
        return None;
    }
    let tokens = session.next_input_tokens(&agent.system_prompt);
    if session.compaction.helped_since(session.used.turns) {
        return Some(Event::ObservationRejected { feedback: None, grace: None });
    }
    // The server knows its limit better than the configuration: half of what was sent is the aim.
    let rules = context::Rules { limit: tokens / 2, compact_at: 1.0, ..agent.context.clone() };
    context::plan(&session.messages, tools, &rules, tokens)
}

/// The summary that makes room after a model said that the conversation is too long for it.
fn summary_after_overflow(session: &Session, agent: &Agent, now: Duration) -> Option<summary::Wanted> {
    let overflowed = matches!(&session.observed, Some(Observation::Failed { code: Code::ContextOverflow, .. }));
    let goes_on = overflowed
        && session.compaction.is_worthwhile()
        && !session.compaction.helped_since(session.used.turns)
        && may_go_on(session, agent, now);
    summary::wanted(session, agent, now).filter(|_| goes_on)
}

/// One JSON value, as it is or in a fenced code block, as many models write it.
fn read_answer(text: &str) -> Result<Value, String> {
    let text = text.trim();
    let fenced = || {
        let inner = text.strip_prefix("```")?.strip_suffix("```")?;
        Some(inner.split_once('\n').map_or(inner, |(_language, body)| body))
    };
    toolproto::strict_json::parse(fenced().unwrap_or(text).as_bytes()).map_err(|error| error.to_string())
}

/// What there is of an answer: the JSON if it is JSON, else the words.
fn partial(text: &str) -> Value {
    read_answer(text).unwrap_or_else(|_| json!({"summary": text}))
}

/// Tells the model what to mend, or says how the job ends.
fn mend(session: &Session, agent: &Agent, now: Duration, misfit: Misfit) -> Result<Event, Failure> {
    if let Some(cause) = interruption(session, now) {
        return Err(Failure { partial: misfit.failure.partial, ..cause.into() });
    }
    if session.repairs >= agent.max_repairs {
        return Err(misfit.failure);
    }
    match out_of_budget(session, agent) {
        Some(code) => last_turn(session, agent, code),
        None => Ok(Event::ObservationRejected { feedback: Some(misfit.feedback), grace: None }),
    }
}

/// Whether nothing from outside and no budget ends the job before another turn.
fn may_go_on(session: &Session, agent: &Agent, now: Duration) -> bool {
    interruption(session, now).is_none() && out_of_budget(session, agent).is_none()
}

/// The budget, other than time, that allows no further turn.
fn out_of_budget(session: &Session, agent: &Agent) -> Option<Code> {
    let budget = session.budget()?;
    let one = need(session, agent);
    // A turn that would leave nothing for the summing up is not begun.
    let reserve = u64::from(agent.grace_call) + 1;
    let need = Need { tokens: one.tokens.saturating_mul(reserve), cost_usd: one.cost_usd * reserve as f64 };
    budget.exhausted(&session.used, &need)
}

/// What the next request needs at least.
pub(super) fn need(session: &Session, agent: &Agent) -> Need {
    let input = session.next_input_tokens(&agent.system_prompt);
    Need {
        tokens: input.saturating_add(MIN_OUTPUT_TOKENS),
        cost_usd: agent.price.map_or(0.0, |price| price.cost(input, 0, MIN_OUTPUT_TOKENS)),
    }
}

/// Gives the model one last turn to sum up, if that is wanted and can be afforded.
fn last_turn(session: &Session, agent: &Agent, code: Code) -> Result<Event, Failure> {
    let need = need(session, agent);
    let affordable = session
        .budget()
        .is_some_and(|budget| budget.affords_tokens(&session.used, &need) && budget.affords_cost(&session.used, &need));
    if !agent.grace_call || session.grace.is_some() || !affordable {
        return Err(exhausted(code, session.last_answer.as_deref()));
    }
    let feedback = format!(
        "A budget of this job is used up: {} No tool can be called any more. Answer now with the JSON object, as far as the \
         goal has been reached.",
        code.meaning()
    );
    Ok(Event::ObservationRejected { feedback: Some(feedback), grace: Some(code) })
}

/// How a job fails whose budget is used up.
fn exhausted(code: Code, last_words: Option<&str>) -> Failure {
    Failure { partial: last_words.map(partial), ..Failure::new(code, code.meaning()) }
}
