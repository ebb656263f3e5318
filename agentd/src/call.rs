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

mod attestation;

use std::path::Path;
use std::time::Duration;

use crate::ledger::StoredReceipt;
use jiff::Timestamp;
use sandbox::protocol::{ApplyFailure, Program, RUNTIME_STEP, Withdrawal};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolproto::api::CallError;
use toolproto::code::Code;
use toolproto::digest::{CanonicalError, Digest};
use toolproto::ids::{CallId, JobId};
use toolproto::job::ReceiptsHead;
use toolproto::manifest::Effects;
use toolproto::receipt::{
    Change, Claims, Denial, Envelope, EnvelopeError, Outcome, OutcomeKind, Receipt, ResultIdentity,
    SEAL_PREDICATE_TYPE, STATEMENT_TYPE, Seal, Semantics, SignedEvidence, Statement, WorkspaceState,
};
use toolproto::reply::{self, Answer, Artifact, ReplyError, ToolError};
use toolproto::request::{Operation, PROTOCOL, Request};
use toolproto::units::Bytes;

use crate::breaker::Observation;
use crate::feed::CallFeed;
use crate::launch::{Ended, Launch, LinkError, Order, Settled, Stdin};
use crate::model::transcript::Arguments;
use crate::observe::traces::traceparent;
use crate::retry::Failed;
use crate::schema;
use crate::session::event::{CallRecord, ReceiptRef, Refusal};
use crate::spill::Spilling;
use crate::tools::{Tool, Tools};

/// What receipts say of the host, and of who writes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The host's name.
    pub host: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// The id of the key that signs receipts; absent while there is none.
    pub key_id: Option<String>,
}

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

/// A call with its receipt.
#[derive(Clone, Debug, PartialEq)]
pub struct Sealed {
    /// As the loop needs it.
    pub record: CallRecord,
    /// What it came to.
    pub answered: Answered,
    /// Its receipt.
    pub envelope: Envelope,
    /// The digest of the launcher's evidence.
    pub evidence: Digest,
    /// Why a call that had ended well counts as failed: its changes were not taken over, or it is not known what they are.
    pub withheld: Option<CallError>,
    /// How the process ended, with the code that the call got.
    pub outcome: Outcome,
    /// How the launcher ended it; absent when it never ran.
    pub ended: Option<Ended>,
}

impl Sealed {
    /// The call has failed after all.
    pub fn withdraw(&mut self, withdrawn: Withdrawn) {
        let Withdrawn { error, content, receipt, outcome, envelope, evidence, .. } = withdrawn;
        self.record.code = Some(error.code);
        self.record.content = content;
        self.record.receipt = Some(receipt);
        self.answered = Answered::Failure(error.clone());
        self.withheld = Some(error);
        (self.outcome, self.envelope, self.evidence) = (outcome, envelope, evidence);
    }
}

/// A call that cannot be given its receipt.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// The launcher cannot be spoken with.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A value has no canonical form.
    #[error(transparent)]
    Canonical(#[from] CanonicalError),
    /// A receipt that was just made cannot be read.
    #[error(transparent)]
    Envelope(#[from] EnvelopeError),
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
    };
    let ended = launch.launch(order, cancel).await?;
    let (answered, notes) = read(tool, asked.call, &ended);
    Ok(Ran {
        effects: tool.manifest.execution.effects,
        commit: matches!(answered, Answered::Success { .. }),
        program,
        ended: Some(ended),
        answered,
        notes,
        spilling: tool.manifest.spill.map_or(Spilling::Never, Spilling::Over),
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
        asked,
    }
}

/// An ad-hoc command that ended: its status is its answer.
#[must_use]
pub fn ran_adhoc(job: JobId, call: CallId, program: Program, keep: bool, ended: Ended) -> Ran {
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
        },
        program,
        effects: Effects::Undeclared,
        commit: status.is_some_and(|status| status == 0 || keep),
        ended: Some(ended),
        answered,
        notes: Vec::new(),
        spilling: Spilling::Never,
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
        },
        program,
        effects: Effects::Undeclared,
        ended: Some(ended),
        answered,
        notes: Vec::new(),
        spilling: Spilling::Never,
    }
}

/// Gives the verdict to the launcher and makes the receipt that follows `chain`.
///
/// # Errors
/// When the launcher cannot be spoken with.
pub async fn seal<L: Launch>(launch: &L, origin: &Origin, chain: ReceiptsHead, ran: Ran) -> Result<Sealed, SealError> {
    let Ran { asked, program, effects, ended, answered, commit, notes, spilling } = ran;
    let content = content(&answered);
    let code = match &answered {
        // The launcher's own view of a command's end stays.
        Answered::Success { .. } => ended.as_ref().and_then(|ended| ended.outcome.code),
        Answered::Failure(error) => Some(error.code),
    };
    let arguments_digest = Digest::of_json(&asked.arguments.to_value())?;
    let result_digest = Digest::of_json(&content)?;
    let claims = Claims {
        arguments_digest: Some(arguments_digest),
        result_digest: Some(result_digest),
        code,
        network: ended.as_ref().and_then(|ended| ended.network.clone()),
    };
    let Settled { evidence, kept } = match &ended {
        Some(_) => launch.settle(asked.call, commit, claims).await?,
        None => Settled { evidence: launch.record(asked.job, asked.call, program, claims).await?, kept: None },
    };
    let mut notes = notes;
    notes.extend(kept.as_deref().map(kept_in));
    // The tool is content, but its changes could not be taken over.
    let is_withheld =
        commit && matches!(evidence.record.workspace.state, WorkspaceState::Conflict | WorkspaceState::Discarded);
    let withheld = is_withheld.then(|| {
        let code = evidence.record.outcome.code.unwrap_or(Code::WorkspaceUnavailable);
        withheld_error(code, &evidence.record.denied, kept.as_deref())
    });
    let unproven = attestation::unproven(&answered, &evidence.record);
    // What nobody knows whether it was done, as after a crash, may have changed the workspace, too.
    let is_unproven = unproven.is_some() || (ended.is_none() && code == Some(Code::Interrupted));
    let withheld = withheld.or(unproven);
    let (code, answered, content) = match &withheld {
        Some(error) => {
            let answered = Answered::Failure(error.clone());
            let content = self::content(&answered);
            (Some(error.code), answered, content)
        }
        None => (code, answered, content),
    };
    let evidence_digest = Digest::of_json(&evidence.record)?;
    let outcome = Outcome { code, ..evidence.record.outcome.clone() };
    let result = ResultIdentity {
        digest: result_digest,
        bytes: ended.as_ref().map_or(0, |ended| ended.stdout.len() as u64),
        completeness: if spilling == Spilling::Done { "partial" } else { "complete" }.to_owned(),
    };
    let receipt = receipt(origin, chain, &asked, effects, evidence, outcome.clone(), arguments_digest, result, notes);
    // A change of which only a part is known counts for nothing.
    let keeps = keeps(receipt.workspace.state) && receipt.workspace.is_attested();
    let written = if keeps {
        paths(&receipt.workspace.created).chain(paths(&receipt.workspace.modified)).collect()
    } else {
        Vec::new()
    };
    let deleted = if keeps { paths(&receipt.workspace.deleted).collect() } else { Vec::new() };
    let (sequence, workspace_after, usage) = (receipt.sequence, receipt.workspace.after, receipt.usage.clone());
    let mut envelope = Envelope::unsigned(&Statement::about(receipt))?;
    let signature = launch.sign(asked.job, Some(asked.call), envelope.payload.clone()).await?;
    envelope.signatures.extend(signature);
    let record = CallRecord {
        code,
        content,
        receipt: Some(ReceiptRef { sequence, digest: envelope.digest()? }),
        usage: ended.as_ref().map(|_| usage),
        workspace_after,
        written,
        deleted,
        unproven: is_unproven,
    };
    Ok(Sealed { record, answered, envelope, evidence: evidence_digest, withheld, outcome, ended })
}

/// Makes the receipt that takes another back, whose call's changes did not reach the workspace. It follows `chain`.
///
/// # Errors
/// When the launcher cannot be spoken with.
pub async fn seal_withdrawal<L: Launch>(
    launch: &L,
    origin: &Origin,
    chain: ReceiptsHead,
    promised: &Receipt,
    withdrawal: Withdrawal,
) -> Result<Withdrawn, SealError> {
    let Withdrawal { failure: ApplyFailure { code, message }, kept, evidence } = withdrawal;
    let note = kept.as_deref().map(kept_in);
    let message = [Some(format!("the call's changes did not reach the workspace: {message}")), note.clone()];
    let message = message.into_iter().flatten().collect::<Vec<_>>().join("; ");
    let details = kept.map_or(Value::Null, |kept| json!({"kept": kept}));
    let error = failure(code, message, details);
    let evidence_digest = Digest::of_json(&evidence.record)?;
    let (job, call) = (evidence.record.job_id, evidence.record.call_id);
    let outcome = evidence.record.outcome.clone();
    let (arguments, declared) = (promised.arguments_digest, &promised.semantics.declared);
    let receipt =
        Receipt { notes: note.into_iter().collect(), ..around(origin, chain, *evidence, arguments, declared) };
    let sequence = receipt.sequence;
    let mut envelope = Envelope::unsigned(&Statement::about(receipt))?;
    envelope.signatures.extend(launch.sign(job, Some(call), envelope.payload.clone()).await?);
    let content = content(&Answered::Failure(error.clone()));
    let receipt = ReceiptRef { sequence, digest: envelope.digest()? };
    Ok(Withdrawn { call, error, content, receipt, outcome, envelope, evidence: evidence_digest })
}

/// A receipt that takes another back.
#[derive(Clone, Debug, PartialEq)]
pub struct Withdrawn {
    /// Its own id.
    pub call: CallId,
    /// How the call ends now.
    pub error: CallError,
    /// The same as the model is given it.
    pub content: Value,
    /// Its place in the chain.
    pub receipt: ReceiptRef,
    /// How the process ended, with the code that the call has now.
    pub outcome: Outcome,
    /// The receipt.
    pub envelope: Envelope,
    /// The digest of the launcher's evidence.
    pub evidence: Digest,
}

impl Withdrawn {
    /// As the ledger stores it.
    #[must_use]
    pub fn stored(&self) -> StoredReceipt {
        StoredReceipt { sequence: self.receipt.sequence, call: Some(self.call), envelope: self.envelope.clone() }
    }
}

/// What a receipt says of the other version of a workspace's files.
fn kept_in(path: &Path) -> String {
    format!("what the call wrote is kept for the workspace's owner in {}", path.display())
}

/// The calls among these receipts whose changes are prepared, and go into the workspace once the receipts are stored.
///
/// # Errors
/// When a receipt cannot be read back.
pub fn committed<'a>(receipts: impl IntoIterator<Item = &'a StoredReceipt>) -> Result<Vec<Receipt>, EnvelopeError> {
    let mut committed = Vec::new();
    for stored in receipts.into_iter().filter(|stored| stored.call.is_some()) {
        let receipt = stored.envelope.receipt()?;
        if matches!(receipt.workspace.state, WorkspaceState::Committed | WorkspaceState::RolledBack) {
            committed.push(receipt);
        }
    }
    Ok(committed)
}

/// Makes the receipt that closes a job's chain: how many there are, and the last one.
///
/// # Errors
/// When the launcher cannot be spoken with.
pub async fn seal_job<L: Launch>(
    launch: &L,
    origin: &Origin,
    job: JobId,
    chain: ReceiptsHead,
    evidence_head: Option<Digest>,
) -> Result<Envelope, SealError> {
    let seal = Seal {
        version: 1,
        job_id: job,
        count: chain.count,
        previous: chain.head,
        evidence_head,
        sealed: Timestamp::now(),
        key_id: origin.key_id.clone(),
    };
    let mut envelope = Envelope::unsigned(&Statement {
        kind: STATEMENT_TYPE.to_owned(),
        subject: Vec::new(),
        predicate_type: SEAL_PREDICATE_TYPE.to_owned(),
        predicate: seal,
    })?;
    envelope.signatures.extend(launch.sign(job, None, envelope.payload.clone()).await?);
    Ok(envelope)
}

/// What the model is given.
fn content(answered: &Answered) -> Value {
    match answered {
        Answered::Success { result, artifacts } if artifacts.is_empty() => json!({"ok": true, "result": result}),
        Answered::Success { result, artifacts } => json!({"ok": true, "result": result, "artifacts": artifacts}),
        Answered::Failure(error) => {
            let mut told = json!({"code": error.code, "message": error.message});
            if !error.details.is_null() {
                told["details"] = error.details.clone();
            }
            json!({"ok": false, "error": told})
        }
    }
}

/// What a receipt says of a call whose writes could not be held back.
const WRITTEN_DIRECTLY: &str =
    "the policy lets the call write to the workspace directly: what it wrote stays, whether it ended well or not";

/// Why a call's changes were not taken over: the entries in the way, with the rule of each.
fn withheld_error(code: Code, denied: &[Denial], kept: Option<&Path>) -> CallError {
    let paths: Vec<&Denial> =
        denied.iter().filter(|one| matches!(one.what.as_str(), "path" | "protected_name")).collect();
    let words = paths.iter().map(|one| format!("`{}` ({})", one.detail, one.rule)).collect::<Vec<_>>().join(", ");
    let mut error = match paths.as_slice() {
        [] => failure(code, code.meaning(), json!({})),
        _ => failure(code, format!("the call's changes are not taken over: {words}"), json!({"denied": paths})),
    };
    match kept {
        Some(path) => {
            error.message = format!("{}; {}", error.message, kept_in(path));
            error.details["kept"] = json!(path);
        }
        None if paths.is_empty() => error.details = Value::Null,
        None => {}
    }
    error
}

/// Whether what a call changed is in the workspace.
const fn keeps(state: WorkspaceState) -> bool {
    matches!(state, WorkspaceState::Committed | WorkspaceState::Direct | WorkspaceState::RolledBack)
}

fn paths(changes: &[Change]) -> impl Iterator<Item = String> + '_ {
    changes.iter().map(|change| change.path.clone())
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

/// What the end of the process says, if it says that there is no answer to read.
fn unfinished(ended: &Ended) -> Option<CallError> {
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

fn read(tool: &Tool, call: CallId, ended: &Ended) -> (Answered, Vec<String>) {
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
    failure(ended.outcome.code.unwrap_or(Code::ToolFailed), error.message.clone(), json!({"tool_error": own}))
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

#[expect(clippy::too_many_arguments, reason = "a receipt has that many independent parts")]
fn receipt(
    origin: &Origin,
    chain: ReceiptsHead,
    asked: &Asked,
    effects: Effects,
    evidence: SignedEvidence,
    outcome: Outcome,
    arguments_digest: Digest,
    result: ResultIdentity,
    notes: Vec<String>,
) -> Receipt {
    let mut notes = notes;
    if evidence.record.workspace.state == WorkspaceState::Direct {
        notes.push(WRITTEN_DIRECTLY.to_owned());
    }
    Receipt {
        job_id: asked.job,
        call_id: asked.call,
        outcome,
        result: Some(result),
        notes,
        ..around(origin, chain, evidence, arguments_digest, effects.as_str())
    }
}

/// What a receipt takes from the evidence, from its place in the chain, and from where it is written.
fn around(
    origin: &Origin,
    chain: ReceiptsHead,
    evidence: SignedEvidence,
    arguments_digest: Digest,
    declared: &str,
) -> Receipt {
    let record = &evidence.record;
    let observed = if record.workspace.is_changed() { "changed" } else { "unchanged" };
    Receipt {
        version: 1,
        job_id: record.job_id,
        call_id: record.call_id,
        sequence: chain.count + 1,
        previous: chain.head,
        tool: record.tool.clone(),
        arguments_digest,
        semantics: Semantics { declared: declared.to_owned(), observed: observed.to_owned() },
        policy: record.policy.clone(),
        enforced: record.enforced.clone(),
        not_enforced: record.not_enforced.clone(),
        started: record.started,
        ended: record.ended,
        outcome: record.outcome.clone(),
        result: None,
        workspace: record.workspace.clone(),
        denied: record.all_denied(),
        usage: record.all_usage(),
        host: origin.host.clone(),
        boot_id: origin.boot_id.clone(),
        agentd_version: env!("CARGO_PKG_VERSION").to_owned(),
        key_id: origin.key_id.clone(),
        notes: Vec::new(),
        withdraws: record.withdraws,
        evidence,
    }
}
