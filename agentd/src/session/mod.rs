//! A job's session: the only mutable state of a job, a fold over its events. No I/O, no clock, no randomness.
//!
//! ```text
//!            ON_NEW_GOAL               ON_PLAN_RECEIVED, with calls
//!   IDLE ───────────────▶ PLANNING ───────────────────────────────▶ EXECUTING ⟲ ON_TOOL_COMPLETED, ON_TOOL_FAILED
//!    ▲                     ▲    │                                        │        (other calls outstanding)
//!    │                     │    │ ON_PLAN_RECEIVED, a final answer       │ the last call's result, ON_INTERRUPTED
//!    │                     │    │ ON_PLAN_REFUSED, ON_PLAN_FAILED,       │
//!    │                     │    ▼ ON_INTERRUPTED                         ▼
//!    │                     └─────────────────────────── OBSERVING ◀──────┘
//!    │     ON_OBSERVATION_VALIDATED, ON_OBSERVATION_REJECTED │
//!    └────────────────────────────────────────────────────────┘ ON_GOAL_CONCLUDED
//! ```
//!
//! - IDLE: before the goal, and after the result.
//! - PLANNING: a model is asked what to do next.
//! - EXECUTING: the calls of one batch run, in waves that keep the model's order.
//! - OBSERVING: what came back is judged: go on, mend, or conclude.
//!
//! Extensions are asked before a turn begins (PLANNING), and before a batch or an answer is judged (OBSERVING).
//!
//! [`Session::apply`] folds one event in, and refuses an event outside its phase. [`decide`] says what should go on now; it
//! is asked again after every event. [`judge`] turns a model's answer into an event.

pub mod apply;
pub mod budget;
pub mod completion;
pub mod conclude;
pub mod context;
mod conversation;
mod dangling;
pub mod decide;
pub mod event;
pub mod extension;
pub mod judge;
pub mod progress;
pub mod question;
#[cfg(test)]
mod simulation;
pub mod summary;
pub mod tool_search;
pub mod wait;
mod waves;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use toolproto::api::Phase;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::CallId;
use toolproto::job::{JobResult, JobUsage, ReceiptsHead};

use crate::agent::Agent;
use crate::model::transcript::Message;
use budget::{Budget, Used};
use event::{CallRecord, Interruption, PlannedCall, Refusal};

/// A job's state. Changed by [`Session::apply`] alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    phase: Phase,
    began: Option<Began>,
    messages: conversation::Conversation,
    asking: bool,
    batch: Vec<BatchCall>,
    observed: Option<Observation>,
    used: Used,
    counted: Option<Counted>,
    elapsed: Duration,
    receipts: ReceiptsHead,
    repairs: u32,
    /// Tools that a search found or that were called, in that order.
    found: Vec<String>,
    /// How many answers in a row held thoughts alone.
    speechless: u32,
    grace: Option<Code>,
    last_answer: Option<String>,
    cancelled: bool,
    /// What people said since the last turn began.
    unheard: Vec<String>,
    evidence: completion::Evidence,
    repetition: progress::Repetition,
    compaction: context::Compaction,
    summaries: summary::Attempts,
    consultation: extension::Consultation,
    result: Option<JobResult>,
    /// The batch that the last event closed, and what stood before it did.
    closed: Option<Box<Closed>>,
}

/// A batch that was closed by its last call, to be opened again if that has failed after all.
#[derive(Clone, Debug, PartialEq)]
struct Closed {
    batch: Vec<BatchCall>,
    messages: usize,
    repairs: u32,
    evidence: completion::Evidence,
    repetition: progress::Repetition,
}

/// With what the job began.
#[derive(Clone, Debug, PartialEq)]
struct Began {
    budget: Budget,
    agent: Digest,
    workspace: Option<PathBuf>,
}

/// What a model's server counted: so many tokens for the first so many messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counted {
    tokens: u64,
    messages: usize,
}

/// A call of the present batch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchCall {
    /// What the model asked for.
    pub planned: PlannedCall,
    /// How far it is.
    pub progress: Progress,
    /// What a person says to it.
    pub approval: Approval,
    /// Until when it waits, once it does.
    pub waiting: Option<wait::Waiting>,
}

/// What a person says to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Approval {
    /// Nobody needs to be asked.
    NotNeeded,
    /// Somebody is to be asked.
    Needed,
    /// Somebody was asked, and may answer until the job has run for so long.
    Asked(Duration),
    /// It may run.
    Given,
    /// It may not.
    Denied(Option<String>),
    /// The question that it is has this answer.
    Answered(String),
}

/// How far a call is.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// Not started.
    Pending,
    /// About to be launched, or launched.
    Started,
    /// Ordered by an agentd that ended before the call did: it may have run, partly or whole.
    Dangling,
    /// Over.
    Done(Box<CallRecord>),
}

/// What OBSERVING has to judge.
#[derive(Clone, Debug, PartialEq)]
enum Observation {
    /// A batch's results.
    Batch,
    /// A proposed final answer.
    Answer(String),
    /// An answer that cannot be followed.
    Refused(Refusal),
    /// No answer at all.
    Failed { code: Code, message: String, details: Value },
    /// An end from outside.
    Interrupted(Interruption),
}

impl Default for Session {
    fn default() -> Self {
        Self::new()
    }
}

impl Session {
    /// A session without any event.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            phase: Phase::Idle,
            began: None,
            messages: conversation::Conversation::new(),
            asking: false,
            batch: Vec::new(),
            observed: None,
            used: Used {
                turns: 0,
                tool_calls: 0,
                input_tokens: 0,
                output_tokens: 0,
                cost_usd: 0.0,
                cpu: Duration::ZERO,
            },
            counted: None,
            elapsed: Duration::ZERO,
            receipts: ReceiptsHead { count: 0, head: None },
            repairs: 0,
            found: Vec::new(),
            speechless: 0,
            grace: None,
            last_answer: None,
            cancelled: false,
            unheard: Vec::new(),
            evidence: completion::Evidence::new(),
            repetition: progress::Repetition::new(),
            compaction: context::Compaction::new(),
            summaries: summary::Attempts::new(),
            consultation: extension::Consultation::new(),
            result: None,
            closed: None,
        }
    }

    /// Where the loop stands.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// The result, once there is one.
    #[must_use]
    pub const fn result(&self) -> Option<&JobResult> {
        self.result.as_ref()
    }

    /// The calls of the present batch; empty outside EXECUTING.
    #[must_use]
    pub fn batch(&self) -> &[BatchCall] {
        &self.batch
    }

    /// A call of the present batch.
    #[must_use]
    pub fn call(&self, call: CallId) -> Option<&BatchCall> {
        self.batch.iter().find(|one| one.planned.call == call)
    }

    /// A call of the present batch, or of the one that the last event closed.
    #[must_use]
    pub fn latest_call(&self, call: CallId) -> Option<&BatchCall> {
        let closed = self.closed.iter().flat_map(|closed| &closed.batch);
        self.batch.iter().chain(closed).find(|one| one.planned.call == call)
    }

    /// The conversation so far, without the system prompt.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// How many receipts the job has, and the last one's digest.
    #[must_use]
    pub const fn receipts(&self) -> ReceiptsHead {
        self.receipts
    }

    /// How long the job had run at its last event.
    #[must_use]
    pub const fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// When the job's time is over, from its begin; `None` before it began.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        self.began.as_ref().map(|began| began.budget.wall)
    }

    /// The digest of the agent with which the job began.
    #[must_use]
    pub fn agent(&self) -> Option<Digest> {
        self.began.as_ref().map(|began| began.agent)
    }

    /// The workspace with which the job began.
    #[must_use]
    pub fn workspace(&self) -> Option<&PathBuf> {
        self.began.as_ref().and_then(|began| began.workspace.as_ref())
    }

    /// What the job has used at `now`.
    #[must_use]
    pub fn usage(&self, now: Duration) -> JobUsage {
        JobUsage {
            turns: self.used.turns,
            tool_calls: self.used.tool_calls,
            input_tokens: self.used.input_tokens,
            output_tokens: self.used.output_tokens,
            cost_usd: self.used.cost_usd,
            cpu_seconds: self.used.cpu.as_secs_f64(),
            wall_seconds: now.max(self.elapsed).as_secs_f64(),
        }
    }

    /// The calls that wait for a person, questions among them, and until when.
    pub fn asked(&self) -> impl Iterator<Item = (&BatchCall, Duration)> {
        self.batch.iter().filter_map(|one| match one.approval {
            Approval::Asked(until) if one.progress == Progress::Pending => Some((one, until)),
            _ => None,
        })
    }

    /// The next moment at which something is to be decided though nothing happens.
    #[must_use]
    pub fn next_deadline(&self, now: Duration) -> Option<Duration> {
        let pending = self.batch.iter().filter(|one| one.progress == Progress::Pending);
        let waits = pending.filter_map(|one| one.waiting).map(|waiting| waiting.until);
        let moments = self.asked().map(|(_, until)| until).chain(waits).chain(self.deadline());
        moments.filter(|moment| *moment > now).min()
    }

    /// The tools that are blocked in the next turn, and those that an extension has switched off.
    pub fn blocked(&self) -> impl Iterator<Item = &str> {
        self.repetition.blocked(self.used.turns).chain(self.consultation.disabled())
    }

    /// The extension that is being asked.
    #[must_use]
    pub const fn consulted(&self) -> Option<&extension::Consulted> {
        self.consultation.running()
    }

    /// The final answer that is to be judged.
    #[must_use]
    pub fn proposed_answer(&self) -> Option<&str> {
        match &self.observed {
            Some(Observation::Answer(text)) => Some(text),
            _ => None,
        }
    }

    /// Whether this is the last turn, in which the model sums up.
    #[must_use]
    pub const fn is_grace(&self) -> bool {
        self.grace.is_some()
    }

    /// How many tokens the next request will read: what the server counted, and an estimate of what came since.
    #[must_use]
    pub fn next_input_tokens(&self, system: &str) -> u64 {
        let (counted, from) = match self.counted {
            Some(counted) => (counted.tokens, counted.messages),
            None => ((system.len() as u64).div_ceil(3), 0),
        };
        counted.saturating_add(self.messages.tokens_from(from))
    }

    /// Whether a budget, this one instead of its own, allows the job another turn now.
    ///
    /// # Errors
    /// With the code of what is used up.
    pub fn affords_a_turn(&self, agent: &Agent, budget: &Budget) -> Result<(), Code> {
        match budget.exhausted(&self.used, &decide::need(self, agent)) {
            Some(code) => Err(code),
            None if budget.calls_left(&self.used) == 0 => Err(Code::ToolCallBudgetExhausted),
            None if self.elapsed >= budget.wall => Err(Code::DeadlineExceeded),
            None => Ok(()),
        }
    }

    fn budget(&self) -> Option<&Budget> {
        self.began.as_ref().map(|began| &began.budget)
    }
}
