//! The history of a receipt key: one signed record for each key that came into use, JSON Lines of DSSE envelopes.
//!
//! A record is signed by the key that comes, and by the one that goes where that is still there; it says which. Each names
//! the record before it, so that none can be taken out unnoticed.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::receipt::{Envelope, PAYLOAD_TYPE, STATEMENT_TYPE, Statement};

/// The `predicateType` of a change of the key.
pub const KEY_CHANGE_PREDICATE_TYPE: &str = "https://agentd.dev/key-change/v1";
/// The version of a record's layout.
pub const KEY_CHANGE_VERSION: u32 = 1;

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublicKey {
    /// The id that envelopes name.
    pub key_id: String,
    /// SubjectPublicKeyInfo as PEM.
    pub public_key: String,
}

/// Whether the key that goes has signed the record as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldSignature {
    /// It has.
    Present,
    /// It was not there any more.
    Missing,
}

/// The key that goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OldKey {
    /// The key.
    #[serde(flatten)]
    pub key: PublicKey,
    /// Whether it has signed.
    pub signature: OldSignature,
}

/// The predicate of a change of the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyChange {
    /// [`KEY_CHANGE_VERSION`].
    pub version: u32,
    /// Which record of the history, from 1.
    pub sequence: u64,
    /// sha256 of the previous record's envelope; absent in the first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub previous: Option<Digest>,
    /// Since when the new key signs.
    pub time: Timestamp,
    /// The key that goes; absent when none is known before.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub old: Option<OldKey>,
    /// The key that comes.
    pub new: PublicKey,
}

impl Statement<KeyChange> {
    /// The statement around a record.
    #[must_use]
    pub fn of_key_change(change: KeyChange) -> Self {
        Self {
            kind: STATEMENT_TYPE.to_owned(),
            subject: Vec::new(),
            predicate_type: KEY_CHANGE_PREDICATE_TYPE.to_owned(),
            predicate: change,
        }
    }
}

/// A record with the envelope that it lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Its line, from 1.
    pub line: usize,
    /// The envelope.
    pub envelope: Envelope,
    /// The record.
    pub change: KeyChange,
}

/// A line that is no record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct HistoryError {
    /// Which, from 1.
    pub line: usize,
    /// In words.
    pub reason: String,
}

/// The record in an envelope, not verified.
///
/// # Errors
/// When it holds none; in words.
pub fn change_in(envelope: &Envelope) -> Result<KeyChange, String> {
    if envelope.payload_type != PAYLOAD_TYPE {
        return Err(format!("payload type `{}` is not `{PAYLOAD_TYPE}`", envelope.payload_type));
    }
    let payload = envelope.payload_bytes().map_err(|error| error.to_string())?;
    let statement: Statement<serde_json::Value> =
        serde_json::from_slice(&payload).map_err(|error| format!("the payload is not a statement: {error}"))?;
    if statement.kind != STATEMENT_TYPE || statement.predicate_type != KEY_CHANGE_PREDICATE_TYPE {
        return Err(format!("predicate type `{}` is not `{KEY_CHANGE_PREDICATE_TYPE}`", statement.predicate_type));
    }
    serde_json::from_value(statement.predicate)
        .map_err(|error| format!("the payload is not a change of the key: {error}"))
}

/// Reads a history line by line, without verifying it; blank lines do not count.
pub fn lines(text: &str) -> impl Iterator<Item = Result<Recorded, HistoryError>> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    lines.filter(|(_, line)| !line.is_empty()).map(|(line, text)| {
        let envelope: Envelope = serde_json::from_str(text)
            .map_err(|error| HistoryError { line, reason: format!("not an envelope: {error}") })?;
        let change = change_in(&envelope).map_err(|reason| HistoryError { line, reason })?;
        Ok(Recorded { line, envelope, change })
    })
}

/// A key and the time in which it signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Period {
    /// The key.
    pub key: PublicKey,
    /// Since when; unknown for one that came before the history begins.
    pub from: Option<Timestamp>,
    /// Until when; absent for the one in use.
    pub until: Option<Timestamp>,
    /// The record by which it came.
    pub record: Option<Envelope>,
}

/// The keys of a history, the one in use first.
#[must_use]
pub fn periods(history: &[Recorded]) -> Vec<Period> {
    let mut until = None;
    let mut periods = Vec::new();
    for Recorded { envelope, change, .. } in history.iter().rev() {
        let (key, record) = (change.new.clone(), Some(envelope.clone()));
        periods.push(Period { key, from: Some(change.time), until, record });
        until = Some(change.time);
    }
    let before = history.first().and_then(|first| first.change.old.as_ref());
    periods.extend(before.map(|old| Period { key: old.key.clone(), from: None, until, record: None }));
    periods
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> PublicKey {
        PublicKey { key_id: name.to_owned(), public_key: "PEM".to_owned() }
    }

    fn change(sequence: u64, old: Option<&str>, new: &str) -> String {
        let old = old.map(|old| OldKey { key: key(old), signature: OldSignature::Missing });
        let time = Timestamp::from_second(i64::try_from(sequence).unwrap()).unwrap();
        let (version, new) = (KEY_CHANGE_VERSION, key(new));
        let change = KeyChange { version, sequence, previous: None, time, old, new };
        serde_json::to_string(&Envelope::unsigned(&Statement::of_key_change(change)).unwrap()).unwrap()
    }

    #[test]
    fn a_history_tells_since_when_and_until_when_each_key_signed() {
        let text = format!("{}\n\n{}\n", change(1, Some("a"), "b"), change(2, Some("b"), "c"));
        let history: Vec<Recorded> = lines(&text).map(Result::unwrap).collect();
        assert_eq!(history.iter().map(|recorded| recorded.line).collect::<Vec<_>>(), [1, 3]);
        let told: Vec<_> = periods(&history)
            .into_iter()
            .map(|one| (one.key.key_id, one.from.map(Timestamp::as_second), one.until.map(Timestamp::as_second)))
            .collect();
        let expected = [("c", Some(2), None), ("b", Some(1), Some(2)), ("a", None, Some(1))];
        assert_eq!(told, expected.map(|(id, from, until)| (id.to_owned(), from, until)));
        assert_eq!(periods(&[]), []);
    }

    #[test]
    fn what_is_no_record_is_named_with_its_line() {
        let text = format!("{}\n{{}}\n", change(1, None, "a"));
        let error = lines(&text).find_map(Result::err).unwrap();
        assert_eq!(error.line, 2);
        let receipt = change(1, None, "a");
        let mut envelope: Envelope = serde_json::from_str(&receipt).unwrap();
        envelope.payload_type = "text/plain".to_owned();
        assert!(change_in(&envelope).unwrap_err().contains("text/plain"));
    }
}
