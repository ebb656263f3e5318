//! Receipts: of a call, of one that is taken back, and the one that closes a job's chain.

use std::path::Path;

use jiff::Timestamp;
use sandbox::protocol::{ApplyFailure, Drafted, Receipted, Withdrawal};
use serde_json::{Value, json};
use toolproto::api::CallError;
use toolproto::code::Code;
use toolproto::digest::{CanonicalError, Digest};
use toolproto::ids::{CallId, JobId};
use toolproto::job::ReceiptsHead;
use toolproto::receipt::{
    Change, Claims, Denial, Draft, Envelope, EnvelopeError, Outcome, Receipt, ResultIdentity, Seal, Statement,
    WorkspaceState,
};

use super::{Answered, Ran, attestation, failure};
use crate::launch::{Ended, Launch, LinkError, Settled};
use crate::ledger::StoredReceipt;
use crate::session::event::{CallRecord, ReceiptRef};
use crate::spill::Spilling;

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
    /// Whether it says that the workspace has changes which go there only once it is stored.
    pub is_promise: bool,
}

impl Sealed {
    /// Its receipt as the ledger stores it.
    #[must_use]
    pub fn stored(&self, call: CallId, sequence: u64) -> StoredReceipt {
        let (envelope, is_promise) = (self.envelope.clone(), self.is_promise);
        StoredReceipt { sequence, call: Some(call), envelope, is_promise }
    }

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

/// Gives the verdict to the launcher and makes the receipt that follows `chain`.
///
/// # Errors
/// When the launcher cannot be spoken with.
pub async fn seal<L: Launch>(launch: &L, origin: &Origin, chain: ReceiptsHead, ran: Ran) -> Result<Sealed, SealError> {
    Ok(seal_and(launch, origin, chain, ran, false).await?.0)
}

/// The same for the last call of a job, with the receipt that closes the job's chain.
///
/// # Errors
/// When the launcher cannot be spoken with.
pub async fn seal_last<L: Launch>(
    launch: &L,
    origin: &Origin,
    chain: ReceiptsHead,
    ran: Ran,
) -> Result<(Sealed, Envelope), SealError> {
    let (sealed, seal) = seal_and(launch, origin, chain, ran, true).await?;
    let seal = seal.ok_or_else(|| LinkError::Misuse("it signed no seal".to_owned()))?;
    Ok((sealed, seal))
}

async fn seal_and<L: Launch>(
    launch: &L,
    origin: &Origin,
    chain: ReceiptsHead,
    ran: Ran,
    is_last: bool,
) -> Result<(Sealed, Option<Envelope>), SealError> {
    let Ran { asked, program, effects, ended, answered, commit, notes, spilling, named } = ran;
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
        named,
    };
    let result = ResultIdentity {
        digest: result_digest,
        bytes: ended.as_ref().map_or(0, |ended| ended.stdout.len() as u64),
        completeness: if spilling == Spilling::Done { "partial" } else { "complete" }.to_owned(),
    };
    let draft = Draft { code, result: Some(result), notes, ..draft(origin, chain, arguments_digest, effects.as_str()) };
    let seal = is_last.then(|| closing(origin, asked.job, chain.count + 1, None, None));
    let Settled { evidence, kept, receipt } = match &ended {
        Some(_) => {
            let drafted = Drafted { draft: draft.clone(), seal: seal.clone() };
            launch.settle(asked.call, commit, claims, drafted).await?
        }
        None => {
            let evidence = launch.record(asked.job, asked.call, program, claims).await?;
            Settled { evidence, kept: None, receipt: None }
        }
    };
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
    let workspace = &evidence.record.workspace;
    // A change of which only a part is known counts for nothing.
    let keeps = keeps(workspace.state) && workspace.is_attested();
    let written =
        if keeps { paths(&workspace.created).chain(paths(&workspace.modified)).collect() } else { Vec::new() };
    let deleted = if keeps { paths(&workspace.deleted).collect() } else { Vec::new() };
    let is_promise = matches!(workspace.state, WorkspaceState::Committed | WorkspaceState::RolledBack);
    let (sequence, workspace_after, usage) = (chain.count + 1, workspace.after, evidence.record.all_usage());
    let Receipted { envelope, seal } = match receipt {
        Some(receipt) => receipt,
        None => {
            let draft =
                Draft { code, notes: draft.notes.into_iter().chain(kept.as_deref().map(kept_in)).collect(), ..draft };
            let mut envelope = Envelope::unsigned(&Statement::about(draft.around(evidence)))?;
            envelope.signatures.extend(launch.sign(asked.job, Some(asked.call), envelope.payload.clone()).await?);
            let seal = match seal {
                Some(_) => {
                    let chain = ReceiptsHead { count: sequence, head: Some(envelope.digest()?) };
                    Some(seal_job(launch, origin, asked.job, chain, Some(evidence_digest)).await?)
                }
                None => None,
            };
            Receipted { envelope, seal }
        }
    };
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
    let sealed = Sealed { record, answered, envelope, evidence: evidence_digest, withheld, outcome, ended, is_promise };
    Ok((sealed, seal))
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
    let draft =
        Draft { code: outcome.code, notes: note.into_iter().collect(), ..draft(origin, chain, arguments, declared) };
    let receipt = draft.around(*evidence);
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
        let envelope = self.envelope.clone();
        StoredReceipt { sequence: self.receipt.sequence, call: Some(self.call), envelope, is_promise: false }
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
    for stored in receipts.into_iter().filter(|stored| stored.is_promise) {
        committed.push(stored.envelope.receipt()?);
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
    let seal = closing(origin, job, chain.count, chain.head, evidence_head);
    let mut envelope = Envelope::unsigned(&Statement::sealing(seal))?;
    envelope.signatures.extend(launch.sign(job, None, envelope.payload.clone()).await?);
    Ok(envelope)
}

fn closing(origin: &Origin, job: JobId, count: u64, previous: Option<Digest>, evidence_head: Option<Digest>) -> Seal {
    let key_id = origin.key_id.clone();
    Seal { version: 1, job_id: job, count, previous, evidence_head, sealed: Timestamp::now(), key_id }
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

/// A receipt's draft with what it takes from its place in the chain, and from where it is written.
fn draft(origin: &Origin, chain: ReceiptsHead, arguments_digest: Digest, declared: &str) -> Draft {
    Draft {
        chain,
        arguments_digest,
        declared: declared.to_owned(),
        code: None,
        result: None,
        notes: Vec::new(),
        host: origin.host.clone(),
        boot_id: origin.boot_id.clone(),
        agentd_version: env!("CARGO_PKG_VERSION").to_owned(),
        key_id: origin.key_id.clone(),
    }
}
