//! One call, from arguments to receipt.
//!
//! ```text
//! check arguments ──▶ launch ──▶ read the reply ──▶ check the result ──▶ settle ──▶ receipt ──▶ (ledger) ──▶ model
//!        │                                                                  ▲
//!        └── refused: nothing runs, and the launcher records it ────────────┘
//! ```
//!
//! [`run`] is the part that may go on beside other calls, [`seal`] the part that takes the calls of a job one after the other,
//! since each receipt names the one before it. The caller stores the receipt before anybody sees the reply.

mod answer;
mod attestation;
mod named;
mod sealing;

use std::time::Duration;

use jiff::Timestamp;
use sandbox::protocol::{Program, RUNTIME_STEP};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolproto::api::CallError;
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};
use toolproto::manifest::Effects;
use toolproto::receipt::{Denial, OutcomeKind};
use toolproto::reply::Artifact;
use toolproto::request::{Operation, PROTOCOL, Request};

pub(crate) use self::answer::read_reply;
use self::answer::{read, unfinished};
pub use self::sealing::{Origin, SealError, Sealed, Withdrawn, committed, seal, seal_job, seal_last, seal_withdrawal};
use crate::breaker::Observation;
use crate::feed::CallFeed;
use crate::launch::{Ended, Launch, LinkError, Order, Recorded, Stdin};
use crate::model::transcript::Arguments;
use crate::observe::traces::traceparent;
use crate::retry::Failed;
use crate::schema;
use crate::session::event::Refusal;
use crate::spill::Spilling;
use crate::tools::{Tool, Tools};

/// A call to be made.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The job.
    pub job: JobId,
    /// The call's id.
    pub call: CallId,
    /// The call of the job that it is an attempt at: its own id for the first.
    pub attempt_of: CallId,
    /// The tool's name.
    pub tool: String,
    /// The arguments.
    pub arguments: Arguments,
    /// Why it is not to be run at all.
    pub refusal: Option<Refusal>,
    /// The job's remaining time.
    pub time: Duration,
    /// The same for every repetition of the same call.
    pub idempotency_key: String,
    /// Who hears how far it is.
    pub watcher: Option<CallFeed>,
    /// When a process that was started ahead may be given the request.
    pub recorded: Recorded,
}

/// What a call came to.
#[derive(Clone, Debug, PartialEq)]
pub enum Answered {
    /// It worked.
    Success {
        /// The result.
        result: Value,
        /// Files that belong to it.
        artifacts: Vec<Artifact>,
    },
    /// It did not.
    Failure(CallError),
}

/// A call that is over and not yet sealed.
#[derive(Debug)]
pub struct Ran {
    pub(crate) asked: Asked,
    pub(crate) program: Program,
    pub(crate) effects: Effects,
    pub(crate) ended: Option<Ended>,
    pub(crate) answered: Answered,
    pub(crate) commit: bool,
    pub(crate) notes: Vec<String>,
    pub(crate) spilling: Spilling,
    /// Paths that it named itself when it failed, and that its plan keeps from it.
    pub(crate) named: Vec<Denial>,
}

impl Ran {
    /// The call.
    #[must_use]
    pub const fn call(&self) -> CallId {
        self.asked.call
    }

    /// What it came to.
    #[must_use]
    pub const fn answered(&self) -> &Answered {
        &self.answered
    }

    /// How it failed, if it did, as far as trying again is concerned.
    #[must_use]
    pub fn failed(&self) -> Option<Failed> {
        let Answered::Failure(error) = &self.answered else { return None };
        let own = error.details.get("tool_error");
        let retryable = own.and_then(|own| own.get("retryable")?.as_bool()).unwrap_or(false);
        let retry_after = own.and_then(|own| own.get("retry_after_ms")?.as_u64()).map(Duration::from_millis);
        Some(Failed { code: error.code, retryable, retry_after })
    }

    /// Whether it failed because what its tool runs on is missing.
    #[must_use]
    pub fn lacks_runtime(&self) -> bool {
        let failure = self.ended.as_ref().and_then(|ended| ended.failure.as_ref());
        failure.is_some_and(|failure| failure.step == RUNTIME_STEP)
    }

    /// What it says about its tool, which had so much time.
    #[must_use]
    pub fn observation(&self, limit: Duration) -> Observation {
        // What the launcher never heard of says nothing.
        let Some(ended) = &self.ended else { return Observation::Nothing };
        let failed = self.failed();
        let retryable = failed.is_some_and(|failed| failed.retryable);
        Observation::of(failed.map(|failed| failed.code), retryable, Duration::from_millis(ended.usage.wall_ms), limit)
    }

    /// Adds a remark for the receipt.
    pub fn note(&mut self, remark: String) {
        self.notes.push(remark);
    }
}

/// A failure of a call with its code's advice.
#[must_use]
pub fn failure(code: Code, message: impl Into<String>, details: Value) -> CallError {
    CallError { code, message: message.into(), recovery_suggestion: code.recovery_suggestion().to_owned(), details }
}

/// Checks a call without running it.
///
/// # Errors
/// With the failure that the call ends with.
pub fn preflight(tools: &Tools, asked: &Asked) -> Result<(), CallError> {
    check(tools, asked).map(|_| ())
}

/// Checks a call and runs it to its end. Cancelling ends it early.
///
/// # Errors
/// When the launcher cannot be spoken with.
pub async fn run<L: Launch>(
    launch: &L,
    tools: &Tools,
    asked: Asked,
    cancel: CancellationToken,
) -> Result<Ran, LinkError> {
    let (tool, arguments) = match check(tools, &asked) {
        Ok(checked) => checked,
        Err(error) => return Ok(refused(tools, asked, error)),
    };
    let time = tool.time.min(asked.time);
    let request = Request {
        protocol: PROTOCOL,
        operation: Operation::Call,
        call_id: asked.call,
        tool: asked.tool.clone(),
        arguments: arguments.clone(),
        workspace: Some(tool.manifest.workspace().to_owned()),
        deadline: Timestamp::now().saturating_add(time).unwrap_or(Timestamp::MAX),
        timeout_ms: u64::try_from(time.as_millis()).unwrap_or(u64::MAX),
        max_response_bytes: tool.manifest.program.max_response.0,
        idempotency_key: asked.idempotency_key.clone(),
        traceparent: Some(traceparent(asked.job, asked.attempt_of)),
    };
    let mut stdin = match serde_json::to_vec(&request) {
        Ok(stdin) => stdin,
        Err(error) => {
            let error = failure(Code::InternalLogicError, format!("the request is no JSON: {error}"), Value::Null);
            return Ok(refused(tools, asked, error));
        }
    };
    stdin.push(b'\n');
    let program = Program::Tool { name: asked.tool.clone() };
    let order = Order {
        job: asked.job,
        call: asked.call,
        attempt_of: asked.attempt_of,
        program: program.clone(),
        stdin: Stdin::Bytes(stdin),
        streams: None,
        time,
        narrow: tool.narrowing(),
        watcher: asked.watcher.clone(),
        recorded: asked.recorded.clone(),
    };
    let ended = launch.launch(order, cancel).await?;
    let (mut answered, notes) = read(tool, asked.call, &ended);
    let named = match &answered {
        Answered::Success { .. } => Vec::new(),
        Answered::Failure(_) => {
            let outline = tools.outlines().of_tool(&tool.manifest);
            outline.map(|outline| named::denied(&outline, &ended, &answered, &ended.stderr_tail)).unwrap_or_default()
        }
    };
    named::tell(&mut answered, &named);
    Ok(Ran {
        effects: tool.manifest.execution.effects,
        commit: matches!(answered, Answered::Success { .. }),
        program,
        ended: Some(ended),
        answered,
        notes,
        spilling: tool.manifest.spill.map_or(Spilling::Never, Spilling::Over),
        named,
        asked,
    })
}

/// A call that is not run.
#[must_use]
pub fn refused(tools: &Tools, asked: Asked, error: CallError) -> Ran {
    Ran {
        effects: tools.get(&asked.tool).map_or(Effects::Undeclared, |tool| tool.manifest.execution.effects),
        program: Program::Tool { name: asked.tool.clone() },
        ended: None,
        answered: Answered::Failure(error),
        commit: false,
        notes: Vec::new(),
        spilling: Spilling::Never,
        named: Vec::new(),
        asked,
    }
}

/// An ad-hoc command that ended: its status is its answer. `said` is the end of what it wrote to stderr.
#[must_use]
pub fn ran_adhoc(
    tools: &Tools,
    (job, call): (JobId, CallId),
    program: Program,
    keep: bool,
    ended: Ended,
    said: &str,
) -> Ran {
    let command = match &program {
        Program::Adhoc { command, .. } => json!({"command": command}),
        Program::Tool { name } => json!({"tool": name}),
        Program::Extension { name } => json!({"extension": name}),
        Program::Rollback { .. } => json!({}),
    };
    let status = ended.outcome.exit_status.filter(|_| ended.outcome.kind == OutcomeKind::Exited);
    let answered = match (status, unfinished(&ended)) {
        (_, Some(error)) => Answered::Failure(error),
        (status, None) => Answered::Success { result: json!({"exit_status": status}), artifacts: Vec::new() },
    };
    let outline = match &program {
        Program::Adhoc { policy, runtime, .. } => tools.outlines().under(policy, runtime.as_deref()),
        _ => None,
    };
    let named = outline.map(|outline| named::denied(&outline, &ended, &answered, said)).unwrap_or_default();
    Ran {
        asked: Asked {
            job,
            call,
            attempt_of: call,
            tool: "exec".to_owned(),
            arguments: Arguments::Object(command),
            refusal: None,
            time: Duration::ZERO,
            idempotency_key: call.to_string(),
            watcher: None,
            recorded: Recorded::default(),
        },
        program,
        effects: Effects::Undeclared,
        commit: status.is_some_and(|status| status == 0 || keep),
        ended: Some(ended),
        answered,
        notes: Vec::new(),
        spilling: Spilling::Never,
        named,
    }
}

/// A rollback that is foreseen: nothing ran, and the workspace is where it was until its receipt is stored.
#[must_use]
pub fn rolled_back(job: JobId, call: CallId, program: Program, request: Value, ended: Ended) -> Ran {
    let answered = match unfinished(&ended) {
        Some(error) => Answered::Failure(error),
        None => Answered::Success { result: json!({}), artifacts: Vec::new() },
    };
    Ran {
        commit: matches!(answered, Answered::Success { .. }),
        asked: Asked {
            job,
            call,
            attempt_of: call,
            tool: "rollback".to_owned(),
            arguments: Arguments::Object(request),
            refusal: None,
            time: Duration::ZERO,
            idempotency_key: call.to_string(),
            watcher: None,
            recorded: Recorded::default(),
        },
        program,
        effects: Effects::Undeclared,
        ended: Some(ended),
        answered,
        notes: Vec::new(),
        spilling: Spilling::Never,
        named: Vec::new(),
    }
}

fn check<'a>(tools: &'a Tools, asked: &'a Asked) -> Result<(&'a Tool, &'a Value), CallError> {
    if let Some(refusal) = &asked.refusal {
        return Err(failure(refusal.code, refusal.message.clone(), Value::Null));
    }
    let tool = tools
        .get(&asked.tool)
        .ok_or_else(|| failure(Code::ToolUnknown, format!("there is no tool `{}`", asked.tool), Value::Null))?;
    let arguments = match &asked.arguments {
        Arguments::Object(arguments) => arguments,
        Arguments::Malformed { reason, .. } => {
            return Err(failure(Code::ArgumentsInvalid, reason.clone(), Value::Null));
        }
    };
    tool.input.check(arguments).map_err(|violations| {
        let message = format!("the arguments do not satisfy the input schema: {}", schema::in_words(&violations));
        failure(Code::ArgumentsInvalid, message, json!({"violations": violations}))
    })?;
    if asked.time.is_zero() {
        return Err(failure(Code::Cancelled, "no time is left", Value::Null));
    }
    Ok((tool, arguments))
}
