//! Verification of a history of keys: that no record was changed, taken out or put in, and that each of the keys that it names is
//! one that the verifier has.

use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::DecodePublicKey;
use toolproto::key_history::{KeyChange, OldSignature, PublicKey, Recorded, change_in, lines};
use toolproto::receipt::{Envelope, key_id};

use super::keys::{KeyRing, is_signed};
use super::{Fault, Finding, Report, Scope};

/// Whether the first line of a file is a record of a history.
pub(super) fn is_one(text: &str) -> bool {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty());
    first.and_then(|line| serde_json::from_str::<Envelope>(line).ok()).is_some_and(|first| change_in(&first).is_ok())
}

pub(super) fn verify(text: &str, ring: &KeyRing) -> Report {
    let mut check = Check { ring, findings: Vec::new() };
    let mut before: Option<Recorded> = None;
    let (mut count, mut last_line) = (0, 1);
    for line in lines(text) {
        count += 1;
        match line {
            Ok(recorded) => {
                last_line = recorded.line;
                check.record(count, &recorded, before.as_ref());
                before = Some(recorded);
            }
            Err(error) => {
                last_line = error.line;
                check.fault(error.line, Fault::Unreadable, error.reason);
            }
        }
    }
    if before.is_some_and(|last| last.change.new.key_id != ring.in_use()) {
        let message = format!("the last key is not the one in use, {}: records may be missing", ring.in_use());
        check.fault(last_line, Fault::Unsealed, message);
    }
    Report {
        scope: Scope::KeyHistory,
        job_id: None,
        receipts: 0,
        key_id: ring.in_use().to_owned(),
        keys: Vec::new(),
        findings: check.findings,
    }
}

struct Check<'r> {
    ring: &'r KeyRing,
    findings: Vec<Finding>,
}

impl Check<'_> {
    fn fault(&mut self, line: usize, fault: Fault, message: impl Into<String>) {
        self.findings.push(Finding { line, fault, message: message.into() });
    }

    fn record(&mut self, number: u64, recorded: &Recorded, before: Option<&Recorded>) {
        let Recorded { line, envelope, change } = recorded;
        self.new_signature(*line, envelope, &change.new);
        self.old_signature(*line, envelope, change);
        if change.sequence != number {
            let message = format!("record number {} stands where number {number} belongs", change.sequence);
            self.fault(*line, Fault::WrongSequence, message);
        }
        if change.previous != before.and_then(|before| before.envelope.digest().ok()) {
            self.fault(*line, Fault::BrokenChain, "the record does not name the one before it");
        }
        let expected = before.map(|before| &before.change.new.key_id);
        let named = change.old.as_ref().map(|old| &old.key.key_id);
        if expected.is_some() && named != expected {
            self.fault(*line, Fault::KeyMismatch, "the key that goes is not the one that came before");
        }
    }

    /// The key that comes must be one that the verifier has, and must have signed.
    fn new_signature(&mut self, line: usize, envelope: &Envelope, new: &PublicKey) {
        if read(new).is_none() {
            self.fault(line, Fault::KeyMismatch, format!("the key that comes is not {}", new.key_id));
        }
        let Some(signature) = envelope.signatures.iter().find(|signature| signature.keyid == new.key_id) else {
            return self.fault(line, Fault::Unsigned, format!("the key that comes, {}, has not signed", new.key_id));
        };
        if !self.ring.holds(&new.key_id) {
            let message = format!("key {} came into use, which is none of {}", new.key_id, self.ring);
            return self.fault(line, Fault::WrongKey, message);
        }
        let bytes = envelope.signing_bytes().unwrap_or_default();
        if !self.ring.has_signed(&new.key_id, &bytes, &signature.sig) {
            self.fault(line, Fault::BadSignature, "the signature of the key that comes does not fit the record");
        }
    }

    /// The key that goes is vouched for by the signature of the one that comes; its own must be there exactly if the record says so.
    fn old_signature(&mut self, line: usize, envelope: &Envelope, change: &KeyChange) {
        let others: Vec<_> =
            envelope.signatures.iter().filter(|signature| signature.keyid != change.new.key_id).collect();
        let signer = change.old.as_ref().filter(|old| old.signature == OldSignature::Present);
        let is_so = match (signer, &others[..]) {
            (None, []) => true,
            (Some(old), [signature]) => {
                let bytes = envelope.signing_bytes().unwrap_or_default();
                signature.keyid == old.key.key_id
                    && read(&old.key).is_some_and(|key| is_signed(&key, &bytes, &signature.sig))
            }
            _ => false,
        };
        if !is_so {
            let message = "what the record says of the signature of the key that goes is not so";
            self.fault(line, Fault::OldSignatureMismatch, message);
        }
    }
}

/// A key whose id is its own.
fn read(key: &PublicKey) -> Option<VerifyingKey> {
    let public = VerifyingKey::from_public_key_pem(&key.public_key).ok()?;
    (key_id(public.as_bytes()) == key.key_id).then_some(public)
}
