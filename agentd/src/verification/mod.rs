//! Offline verification of receipts: `agentctl verify`.
//!
//! A bundle is JSON Lines of envelopes, a job's receipts in order and its sealing receipt last. What is checked, per line
//! and across lines:
//!
//! ```text
//! envelope   readable → signed by one of the keys (DSSE)
//! statement  types → subject is the workspace after the call
//! receipt    what it says is what the launcher's evidence says, field by field → the evidence is signed too
//! chain      one job, sequence 1, 2, 3 …, each names its predecessor, in the receipts and in the evidence
//! seal       last, once, counts and names the last receipt
//! ```
//!
//! Nothing is read but the file and the keys; a key inside the file is never trusted. A job that lived through a change of
//! the key is one chain, whose receipts are signed by different ones of the keys that the verifier has. A history of
//! keys, too, is verified here. Every fault is named, not only the
//! first, since a person wants to know how much of a file can be believed.

mod evidence;
mod history;
mod keys;

use std::collections::HashSet;
use std::fmt;

use serde::Serialize;
use toolproto::digest::{Digest, canonical_json};
use toolproto::ids::JobId;
use toolproto::receipt::{
    Envelope, PAYLOAD_TYPE, PREDICATE_TYPE, Receipt, SEAL_PREDICATE_TYPE, STATEMENT_TYPE, Seal, Statement,
    WorkspaceState, evidence_signing_bytes,
};

pub use self::keys::{KeyRing, KeyRingError};

/// What kind of fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The line is no envelope, or its payload no statement of a known type.
    Unreadable,
    /// The envelope has no signature.
    Unsigned,
    /// The signature names another key.
    WrongKey,
    /// The signature does not fit the payload.
    BadSignature,
    /// The statement's subject is not the workspace after the call.
    SubjectMismatch,
    /// The receipt says other than the launcher's evidence.
    EvidenceMismatch,
    /// The evidence has no signature.
    EvidenceUnsigned,
    /// The evidence's signature does not fit it.
    EvidenceBadSignature,
    /// The receipt belongs to another job than the first.
    OtherJob,
    /// The receipt's number is not the next one.
    WrongSequence,
    /// The receipt does not name the envelope before it.
    BrokenChain,
    /// The evidence does not name the record before it.
    BrokenEvidenceChain,
    /// Two receipts of one call.
    DuplicateCall,
    /// The receipt takes one back that is not there, or that left nothing, or leaves something itself.
    BadWithdrawal,
    /// The call ended before it started.
    TimeReversed,
    /// There is no sealing receipt: the end may be missing.
    Unsealed,
    /// The seal's count or head is not that of the receipts before it.
    SealMismatch,
    /// Something follows the seal.
    AfterSeal,
    /// A key's id is not its own, or the key that goes is not the one that came before.
    KeyMismatch,
    /// What a record says of the signature of the key that goes is not so.
    OldSignatureMismatch,
}

/// One fault of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The line, counted from 1.
    pub line: usize,
    /// Its kind.
    pub fault: Fault,
    /// In words.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

/// How much a verification could look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// One receipt without its chain: signature and fields only.
    LoneEnvelope,
    /// A whole job.
    Bundle,
    /// Which keys signed, and since when.
    KeyHistory,
}

/// A key, and how much of a file it has signed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyUse {
    /// The key.
    pub key_id: String,
    /// How many envelopes.
    pub envelopes: usize,
}

/// What a verification found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What was looked at.
    pub scope: Scope,
    /// The job that the first receipt names.
    pub job_id: Option<JobId>,
    /// How many receipts were read, without the seal.
    pub receipts: usize,
    /// The first key that has signed something of it; else the first that was given.
    pub key_id: String,
    /// The keys that have signed something of it, in the order of the file.
    pub keys: Vec<KeyUse>,
    /// Every fault.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether nothing is wrong.
    #[must_use]
    pub const fn is_valid(&self) -> bool {
        self.findings.is_empty()
    }
}

/// Verifies one envelope, a bundle, or a history of keys (JSON Lines; blank lines do not count).
#[must_use]
pub fn verify(text: &str, ring: &KeyRing) -> Report {
    if history::is_one(text) {
        return history::verify(text, ring);
    }
    let lines: Vec<(usize, &str)> = text
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.trim()))
        .filter(|(_, line)| !line.is_empty())
        .collect();
    let mut check = Check::new(ring);
    for (number, line) in &lines {
        check.line(*number, line);
    }
    check.finish(lines.last().map_or(1, |(number, _)| *number))
}

struct Check<'k> {
    ring: &'k KeyRing,
    keys: Vec<KeyUse>,
    findings: Vec<Finding>,
    job: Option<JobId>,
    calls: HashSet<String>,
    receipts: Vec<(usize, Receipt, Option<Digest>)>,
    envelopes: usize,
    previous: Option<Digest>,
    previous_evidence: Option<Digest>,
    seal: Option<(usize, Seal)>,
}

enum Content {
    Receipt(Box<Statement<Receipt>>),
    Seal(Box<Statement<Seal>>),
}

impl<'k> Check<'k> {
    fn new(ring: &'k KeyRing) -> Self {
        Self {
            ring,
            keys: Vec::new(),
            findings: Vec::new(),
            job: None,
            calls: HashSet::new(),
            receipts: Vec::new(),
            envelopes: 0,
            previous: None,
            previous_evidence: None,
            seal: None,
        }
    }

    fn fault(&mut self, line: usize, fault: Fault, message: impl Into<String>) {
        self.findings.push(Finding { line, fault, message: message.into() });
    }

    fn line(&mut self, number: usize, line: &str) {
        self.envelopes += 1;
        if self.seal.is_some() {
            self.fault(number, Fault::AfterSeal, "something follows the sealing receipt");
        }
        let envelope: Envelope = match serde_json::from_str(line) {
            Ok(envelope) => envelope,
            Err(error) => return self.fault(number, Fault::Unreadable, format!("not an envelope: {error}")),
        };
        // Of what is no receipt, a signature says nothing.
        let content = match read(&envelope) {
            Ok(content) => content,
            Err(reason) => return self.fault(number, Fault::Unreadable, reason),
        };
        self.signature(number, &envelope);
        match content {
            Content::Receipt(statement) => self.receipt(number, *statement, &envelope),
            Content::Seal(statement) => {
                self.same_job(number, statement.predicate.job_id);
                self.seal = Some((number, statement.predicate));
            }
        }
    }

    fn signature(&mut self, line: usize, envelope: &Envelope) {
        let [signature] = envelope.signatures.as_slice() else {
            let message = format!("the envelope has {} signatures, expected one", envelope.signatures.len());
            return self.fault(line, Fault::Unsigned, message);
        };
        if !self.ring.holds(&signature.keyid) {
            let message = format!("signed by key {}, not by {}", signature.keyid, self.ring);
            return self.fault(line, Fault::WrongKey, message);
        }
        let Ok(bytes) = envelope.signing_bytes() else { return };
        if !self.ring.has_signed(&signature.keyid, &bytes, &signature.sig) {
            return self.fault(line, Fault::BadSignature, "the envelope's signature does not fit its payload");
        }
        match self.keys.iter_mut().find(|key| key.key_id == signature.keyid) {
            Some(key) => key.envelopes += 1,
            None => self.keys.push(KeyUse { key_id: signature.keyid.clone(), envelopes: 1 }),
        }
    }

    fn same_job(&mut self, line: usize, job: JobId) {
        match self.job {
            None => self.job = Some(job),
            Some(first) if first != job => {
                self.fault(line, Fault::OtherJob, format!("belongs to job {job}, the file is about {first}"));
            }
            Some(_) => {}
        }
    }

    fn receipt(&mut self, line: usize, statement: Statement<Receipt>, envelope: &Envelope) {
        let expected = Statement::about(statement.predicate.clone()).subject;
        if statement.subject != expected {
            self.fault(line, Fault::SubjectMismatch, "the subject is not the workspace's digest after the call");
        }
        let receipt = statement.predicate;
        self.same_job(line, receipt.job_id);
        if !self.calls.insert(receipt.call_id.to_string()) {
            self.fault(line, Fault::DuplicateCall, format!("call {} has a receipt already", receipt.call_id));
        }
        if receipt.ended < receipt.started {
            self.fault(line, Fault::TimeReversed, "the call ended before it started");
        }
        for field in evidence::mismatches(&receipt) {
            let message = format!("the receipt's {field} is not what the launcher's evidence says");
            self.fault(line, Fault::EvidenceMismatch, message);
        }
        self.evidence_signature(line, &receipt);
        let digest = envelope.digest().ok();
        self.receipts.push((line, receipt, digest));
    }

    fn evidence_signature(&mut self, line: usize, receipt: &Receipt) {
        let Some(signature) = &receipt.evidence.signature else {
            return self.fault(line, Fault::EvidenceUnsigned, "the launcher's evidence has no signature");
        };
        // It names no key: agentd may have been started with another one between evidence and envelope.
        let fits = canonical_json(&receipt.evidence.record)
            .is_ok_and(|record| self.ring.any_has_signed(&evidence_signing_bytes(&record), signature));
        if !fits {
            self.fault(line, Fault::EvidenceBadSignature, "the evidence's signature does not fit the evidence");
        }
    }

    fn chain(&mut self) {
        for (index, (line, receipt, digest)) in std::mem::take(&mut self.receipts).into_iter().enumerate() {
            let expected = index as u64 + 1;
            if receipt.sequence != expected {
                let message = format!("receipt number {} stands where number {expected} belongs", receipt.sequence);
                self.fault(line, Fault::WrongSequence, message);
            }
            if receipt.previous != self.previous {
                self.fault(line, Fault::BrokenChain, "the receipt does not name the one before it");
            }
            if receipt.evidence.record.previous != self.previous_evidence {
                self.fault(line, Fault::BrokenEvidenceChain, "the evidence does not name the record before it");
            }
            if let Some(withdrawn) = receipt.withdraws {
                let state = receipt.workspace.state;
                let leaves_nothing = matches!(state, WorkspaceState::Conflict | WorkspaceState::Discarded)
                    && !receipt.workspace.is_changed();
                let before = index.checked_sub(1).and_then(|index| self.receipts.get(index));
                let is_next = before.is_some_and(|(_, before, _)| {
                    let is_promise =
                        matches!(before.workspace.state, WorkspaceState::Committed | WorkspaceState::RolledBack);
                    before.call_id == withdrawn && is_promise && before.workspace.before == receipt.workspace.after
                });
                if !(leaves_nothing && is_next) {
                    let message = format!("takes back call {withdrawn}, which the receipt before it does not allow");
                    self.fault(line, Fault::BadWithdrawal, message);
                }
            }
            self.previous = digest;
            self.previous_evidence = Digest::of_json(&receipt.evidence.record).ok();
            self.receipts.push((line, receipt, digest));
        }
    }

    fn sealed(&mut self, last_line: usize) {
        let Some((line, seal)) = self.seal.take() else {
            return self.fault(last_line, Fault::Unsealed, "no sealing receipt: receipts may be missing at the end");
        };
        let count = self.receipts.len() as u64;
        if seal.count != count {
            let message = format!("the seal counts {} receipts, the file holds {count}", seal.count);
            self.fault(line, Fault::SealMismatch, message);
        }
        if seal.previous != self.previous {
            self.fault(line, Fault::SealMismatch, "the seal does not name the last receipt");
        }
        if seal.evidence_head != self.previous_evidence {
            self.fault(line, Fault::SealMismatch, "the seal does not name the last evidence record");
        }
    }

    fn finish(mut self, last_line: usize) -> Report {
        let scope = if self.envelopes == 1 && self.receipts.len() == 1 { Scope::LoneEnvelope } else { Scope::Bundle };
        if scope == Scope::Bundle {
            self.chain();
            self.sealed(last_line);
        }
        self.findings.sort_by_key(|finding| finding.line);
        let key_id = self.keys.first().map_or(self.ring.in_use(), |key| &key.key_id).to_owned();
        let (job_id, receipts) = (self.job, self.receipts.len());
        Report { scope, job_id, receipts, key_id, keys: self.keys, findings: self.findings }
    }
}

fn read(envelope: &Envelope) -> Result<Content, String> {
    if envelope.payload_type != PAYLOAD_TYPE {
        return Err(format!("payload type `{}` is not `{PAYLOAD_TYPE}`", envelope.payload_type));
    }
    let payload = envelope.payload_bytes().map_err(|error| error.to_string())?;
    let statement: Statement<serde_json::Value> =
        serde_json::from_slice(&payload).map_err(|error| format!("the payload is not a statement: {error}"))?;
    if statement.kind != STATEMENT_TYPE {
        return Err(format!("statement type `{}` is not `{STATEMENT_TYPE}`", statement.kind));
    }
    let not_a = |what: &str, error: &serde_json::Error| format!("the payload is not a {what}: {error}");
    match statement.predicate_type.as_str() {
        PREDICATE_TYPE => serde_json::from_slice(&payload).map(Content::Receipt).map_err(|e| not_a("receipt", &e)),
        SEAL_PREDICATE_TYPE => serde_json::from_slice(&payload).map(Content::Seal).map_err(|e| not_a("seal", &e)),
        other => Err(format!("predicate type `{other}` is unknown")),
    }
}

#[cfg(test)]
mod tests;
