//! What happens to a job, as it stands in the ledger: the only thing that changes a session.
//!
//! Events are stored as JSON with a version. A reader of this version reads every earlier one, through [`read`]; an event of
//! a later version is an error, so that an older agentd never guesses.

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::extension::{Opinion, Point};
use toolproto::ids::CallId;
use toolproto::job::JobResult;
use toolproto::receipt::Usage;

use super::budget::Budget;
use crate::model::transcript::{Arguments, Message};

/// The version in which this agentd writes events.
///
/// | version | adds |
/// |---|---|
/// | 2 | REOPENED; `conversation` in ON_NEW_GOAL; `question` in calls |
/// | 3 | CONTEXT_SUMMARISED, SUMMARY_DROPPED, WAIT_BEGUN, COMMIT_WITHDRAWN, EXTENSION_STARTED, EXTENSION_ENDED; `only_thought` in plans; `built_in` in calls |
pub const EVENT_VERSION: u32 = 3;

/// A stored event that this agentd cannot read.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// It was written by a later agentd.
    #[error("event version {0} is later than {EVENT_VERSION}, the latest that this agentd reads")]
    Later(u32),
    /// It is not an event.
    #[error("the stored text is no event")]
    Shape(#[from] serde_json::Error),
}

/// What a model's answer cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// Tokens read, cached ones included.
    pub input_tokens: u64,
    /// Tokens written.
    pub output_tokens: u64,
    /// US dollars.
    pub cost_usd: f64,
    /// Whether the tokens were counted by the model's server, not estimated here.
    pub counted: bool,
}

/// One call of a batch, as the model asked for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedCall {
    /// agentd's id for it.
    pub call: CallId,
    /// The id under which the model knows it.
    pub wire_id: String,
    /// The tool's name as the model wrote it.
    pub tool: String,
    /// The arguments as the model wrote them.
    pub arguments: Arguments,
    /// Whether it may run beside its neighbours.
    pub concurrent: bool,
    /// Whether a person must approve it first.
    #[serde(default)]
    pub approval: bool,
    /// Whether it may be run again when it is not known whether it ran: it changes nothing, repeating it does no harm, or
    /// whatever it did was thrown away with its layer.
    #[serde(default)]
    pub repeatable: bool,
    /// Whether it is meant to have effects outside the workspace.
    #[serde(default)]
    pub outside_effects: bool,
    /// Whether it is a question to a person.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub question: bool,
    /// Which of agentd's own tools it is of, other than a question, if it is of one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub built_in: Option<BuiltIn>,
    /// Why it is not run at all.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub refusal: Option<Refusal>,
}

/// A tool of agentd's own: it starts no process, and its calls leave no receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BuiltIn {
    /// Finds tools.
    ToolSearch,
    /// Waits.
    Wait,
}

/// Why a call is refused before anything starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The code.
    pub code: Code,
    /// In words, for the model.
    pub message: String,
}

/// A tool that is blocked for some turns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocked {
    /// Its name.
    pub tool: String,
    /// The last turn in which it is blocked.
    pub until_turn: u32,
}

/// A receipt, by its place in the job's chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiptRef {
    /// Its number within the job, from 1.
    pub sequence: u64,
    /// The digest of its envelope.
    pub digest: Digest,
}

/// How a call ended, as the loop needs to know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallRecord {
    /// The failure's code; absent on success.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub code: Option<Code>,
    /// What the model is given.
    pub content: Value,
    /// The call's receipt; absent when agentd ended before the launcher could give its evidence.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub receipt: Option<ReceiptRef>,
    /// What it used; absent when it never ran.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub usage: Option<Usage>,
    /// The workspace's digest after it; absent without a workspace.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub workspace_after: Option<Digest>,
    /// Paths that it created or modified and that stayed.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub written: Vec<String>,
    /// Paths that it deleted.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub deleted: Vec<String>,
    /// Whether it may have left something in the workspace of which nothing is known.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub unproven: bool,
}

impl CallRecord {
    /// How a call ended that started no process.
    #[must_use]
    pub(super) const fn of_no_tool(code: Option<Code>, content: Value) -> Self {
        Self {
            code,
            content,
            receipt: None,
            usage: None,
            workspace_after: None,
            written: Vec::new(),
            deleted: Vec::new(),
            unproven: false,
        }
    }
}

/// A model's answer, as the transcript keeps it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What it said.
    pub text: String,
    /// What it asked for.
    pub calls: Vec<PlannedCall>,
    /// The provider's own items, to be sent back unchanged.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub echo: Option<Value>,
    /// Which model answered.
    pub model: String,
    /// What it cost.
    pub spent: Spent,
    /// Whether the model thought, and said nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub only_thought: bool,
}

/// What ended a job from outside the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interruption {
    /// Its user cancelled it.
    Cancelled,
    /// Its wall-clock time is over.
    Deadline,
    /// What is left of a budget does not suffice for a request.
    Budget(Code),
    /// agentd ended while the job ran.
    Restart,
}

impl Interruption {
    /// The code of calls and jobs that it ends.
    #[must_use]
    pub const fn code(self) -> Code {
        match self {
            Self::Cancelled => Code::Cancelled,
            Self::Deadline => Code::DeadlineExceeded,
            Self::Budget(code) => code,
            Self::Restart => Code::Interrupted,
        }
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum Event {
    /// The job begins: its goal satisfies the goal schema.
    #[serde(rename = "ON_NEW_GOAL")]
    NewGoal {
        /// The goal.
        goal: Value,
        /// The agent's digest.
        agent: Digest,
        /// What the job may use: the agent's budget, narrowed.
        budget: Budget,
        /// The workspace.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        workspace: Option<PathBuf>,
        /// The conversation of the job that this one goes on with.
        #[serde(skip_serializing_if = "Vec::is_empty", default)]
        conversation: Vec<Message>,
    },
    /// A model is about to be asked. Counted before it answers, so that no crash gives a turn back.
    #[serde(rename = "TURN_BEGUN")]
    TurnBegun {
        /// The turn, from 1.
        turn: u32,
    },
    /// A model answered: with calls, or with a proposed final answer.
    #[serde(rename = "ON_PLAN_RECEIVED")]
    PlanReceived {
        /// The answer.
        plan: Plan,
    },
    /// A model's answer cannot be followed. Each call in it has its result already.
    #[serde(rename = "ON_PLAN_REFUSED")]
    PlanRefused {
        /// The answer.
        plan: Plan,
        /// Why, for the model.
        refusal: Refusal,
        /// One per call, in the answer's order.
        results: Vec<CallRecord>,
    },
    /// No model answered.
    #[serde(rename = "ON_PLAN_FAILED")]
    PlanFailed {
        /// MODEL_UNAVAILABLE and the like.
        code: Code,
        /// In words.
        message: String,
        /// For a program.
        #[serde(skip_serializing_if = "Value::is_null", default)]
        details: Value,
    },
    /// A call is about to run. Stored before its program is executed, so that after a crash one knows which calls may have run.
    #[serde(rename = "CALL_STARTED")]
    CallStarted {
        /// The call.
        call: CallId,
    },
    /// A call ended well.
    #[serde(rename = "ON_TOOL_COMPLETED")]
    ToolCompleted {
        /// The call.
        call: CallId,
        /// How.
        record: CallRecord,
    },
    /// A call ended badly, or was refused.
    #[serde(rename = "ON_TOOL_FAILED")]
    ToolFailed {
        /// The call.
        call: CallId,
        /// How.
        record: CallRecord,
    },
    /// The changes of the call whose ON_TOOL_COMPLETED is the event before did not reach the workspace: it has failed after
    /// all.
    #[serde(rename = "COMMIT_WITHDRAWN")]
    CommitWithdrawn {
        /// The call.
        call: CallId,
        /// Why.
        code: Code,
        /// What the model is given instead.
        content: Value,
        /// The receipt that takes the call's back.
        receipt: ReceiptRef,
    },
    /// The user wants the job to end.
    #[serde(rename = "CANCEL_REQUESTED")]
    CancelRequested {},
    /// The job is ended from outside. Running calls have ended before.
    #[serde(rename = "ON_INTERRUPTED")]
    Interrupted {
        /// By what.
        cause: Interruption,
        /// The results of calls that were never started, in the batch's order.
        results: Vec<(CallId, CallRecord)>,
    },
    /// What came back is usable, and there is more to do.
    #[serde(rename = "ON_OBSERVATION_VALIDATED")]
    ObservationValidated {
        /// What the model is told beside the results, because it repeats itself.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        feedback: Option<String>,
        /// Tools that are blocked from now on.
        #[serde(skip_serializing_if = "Vec::is_empty", default)]
        blocked: Vec<Blocked>,
        /// How many batches in a row made no progress.
        #[serde(default)]
        no_progress: u32,
    },
    /// What came back is not usable; the model is told why.
    #[serde(rename = "ON_OBSERVATION_REJECTED")]
    ObservationRejected {
        /// What the model is told; absent when it is told something else already.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        feedback: Option<String>,
        /// The budget that has run out, when the model gets one last turn to sum up.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        grace: Option<Code>,
    },
    /// Parts of the conversation make room.
    #[serde(rename = "CONTEXT_COMPACTED")]
    ContextCompacted {
        /// Results, by their calls' ids towards the model, that a later result replaces.
        superseded: Vec<String>,
        /// How many of the oldest units, each a model's message with the results of its calls, are evicted.
        evicted: usize,
        /// What stays known of the evicted ones, one line each.
        remembered: Vec<String>,
        /// Whether it helped.
        effective: bool,
    },
    /// A summary by the model takes the place of the oldest units of the conversation.
    #[serde(rename = "CONTEXT_SUMMARISED")]
    ContextSummarised {
        /// How many of the oldest units leave the conversation.
        evicted: usize,
        /// The summary, of them and of what the summary before it held.
        summary: String,
        /// What stays known of their calls, one line each.
        remembered: Vec<String>,
        /// Whether it helped.
        effective: bool,
        /// Which model wrote it.
        model: String,
        /// What it cost.
        spent: Spent,
    },
    /// A summary by the model cannot be used. The conversation stays as it is.
    #[serde(rename = "SUMMARY_DROPPED")]
    SummaryDropped {
        /// Why not.
        reason: String,
        /// Which model wrote it; empty when none answered.
        model: String,
        /// What it cost.
        spent: Spent,
    },
    /// A person said something. It is part of the conversation from the next turn on.
    #[serde(rename = "MESSAGE_RECEIVED")]
    MessageReceived {
        /// What.
        text: String,
    },
    /// A call waits for a person's decision.
    #[serde(rename = "APPROVAL_REQUESTED")]
    ApprovalRequested {
        /// The call.
        call: CallId,
        /// When the wait ends, in milliseconds of the job's time.
        until_ms: u64,
    },
    /// A person decided.
    #[serde(rename = "APPROVAL_DECIDED")]
    ApprovalDecided {
        /// The call.
        call: CallId,
        /// Whether it may run.
        approved: bool,
        /// Why, in the person's words.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        reason: Option<String>,
    },
    /// Another agentd goes on with the job. What went on when the earlier one ended does not go on any more.
    #[serde(rename = "RESUMED")]
    Resumed {
        /// Calls that had been ordered and never started, as the launcher noted. Every other call that has no end may have run.
        #[serde(skip_serializing_if = "Vec::is_empty", default)]
        never_started: Vec<CallId>,
    },
    /// A job that had ended, because of something that can be mended, goes on.
    #[serde(rename = "REOPENED")]
    Reopened {
        /// What the job may use from now on, with what it has used already.
        budget: Budget,
    },
    /// An extension is about to be asked. Stored before it is.
    #[serde(rename = "EXTENSION_STARTED")]
    ExtensionStarted {
        /// The call.
        call: CallId,
        /// The extension.
        extension: String,
        /// Where.
        point: Point,
    },
    /// An extension has answered, or failed.
    #[serde(rename = "EXTENSION_ENDED")]
    ExtensionEnded {
        /// The call.
        call: CallId,
        /// How it failed, if it did.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        failure: Option<Refusal>,
        /// What it says; nothing when it failed.
        opinion: Opinion,
        /// Why the job ends now, if it does.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        halt: Option<Refusal>,
        /// Its receipt; absent when agentd ended before the launcher could give its evidence.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        receipt: Option<ReceiptRef>,
        /// What it used; absent when it never ran.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        usage: Option<Usage>,
    },
    /// A call that may have run when an earlier agentd ended can be run again without harm, and is.
    #[serde(rename = "CALL_RESET")]
    CallReset {
        /// The call.
        call: CallId,
    },
    /// A planned wait begins: its turn has come.
    #[serde(rename = "WAIT_BEGUN")]
    WaitBegun {
        /// The call.
        call: CallId,
        /// When it ends, in milliseconds of the job's time.
        until_ms: u64,
        /// When it ends by the host's clock, as that stands now.
        due: Timestamp,
    },
    /// The job has its result.
    #[serde(rename = "ON_GOAL_CONCLUDED")]
    GoalConcluded {
        /// The result.
        result: Box<JobResult>,
    },
}

impl Event {
    /// The event's name, as in the ledger and in reasons.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::NewGoal { .. } => "ON_NEW_GOAL",
            Self::TurnBegun { .. } => "TURN_BEGUN",
            Self::PlanReceived { .. } => "ON_PLAN_RECEIVED",
            Self::PlanRefused { .. } => "ON_PLAN_REFUSED",
            Self::PlanFailed { .. } => "ON_PLAN_FAILED",
            Self::CallStarted { .. } => "CALL_STARTED",
            Self::ToolCompleted { .. } => "ON_TOOL_COMPLETED",
            Self::ToolFailed { .. } => "ON_TOOL_FAILED",
            Self::CommitWithdrawn { .. } => "COMMIT_WITHDRAWN",
            Self::CancelRequested {} => "CANCEL_REQUESTED",
            Self::Interrupted { .. } => "ON_INTERRUPTED",
            Self::ContextCompacted { .. } => "CONTEXT_COMPACTED",
            Self::ContextSummarised { .. } => "CONTEXT_SUMMARISED",
            Self::SummaryDropped { .. } => "SUMMARY_DROPPED",
            Self::MessageReceived { .. } => "MESSAGE_RECEIVED",
            Self::ApprovalRequested { .. } => "APPROVAL_REQUESTED",
            Self::ApprovalDecided { .. } => "APPROVAL_DECIDED",
            Self::Resumed { .. } => "RESUMED",
            Self::Reopened { .. } => "REOPENED",
            Self::ExtensionStarted { .. } => "EXTENSION_STARTED",
            Self::ExtensionEnded { .. } => "EXTENSION_ENDED",
            Self::CallReset { .. } => "CALL_RESET",
            Self::WaitBegun { .. } => "WAIT_BEGUN",
            Self::ObservationValidated { .. } => "ON_OBSERVATION_VALIDATED",
            Self::ObservationRejected { .. } => "ON_OBSERVATION_REJECTED",
            Self::GoalConcluded { .. } => "ON_GOAL_CONCLUDED",
        }
    }
}

/// Reads a stored event.
///
/// # Errors
/// When it was written by a later agentd, or is no event.
pub fn read(version: u32, json: &str) -> Result<Event, EventError> {
    if version > EVENT_VERSION {
        return Err(EventError::Later(version));
    }
    Ok(serde_json::from_str(json)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_in_json_is_the_name() {
        for event in [
            Event::TurnBegun { turn: 1 },
            Event::CancelRequested {},
            Event::ObservationRejected { feedback: Some("no".to_owned()), grace: None },
        ] {
            let json = serde_json::to_string(&event).unwrap();
            assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["type"], event.name());
            assert_eq!(read(EVENT_VERSION, &json).unwrap(), event);
        }
    }

    #[test]
    fn later_versions_are_not_guessed() {
        assert!(matches!(read(EVENT_VERSION + 1, "{\"type\":\"CANCEL_REQUESTED\"}"), Err(EventError::Later(_))));
    }

    #[test]
    fn the_first_versions_ledger_is_read_for_ever() {
        let mut session = crate::session::Session::new();
        for line in include_str!("events-v1.jsonl").lines() {
            let event = read(1, line).unwrap_or_else(|error| panic!("{line}: {error:?}"));
            session.apply(&event, std::time::Duration::from_secs(1)).unwrap();
        }
        let usage = session.usage(std::time::Duration::ZERO);
        assert_eq!((usage.turns, usage.tool_calls, usage.input_tokens, usage.output_tokens), (3, 1, 30, 6));
        assert_eq!((usage.cost_usd, usage.cpu_seconds), (0.5, 0.002));
        assert_eq!(session.receipts().count, 1);
        assert_eq!(session.phase(), toolproto::api::Phase::Observing);
        assert_eq!(session.messages().len(), 6);
    }
}
