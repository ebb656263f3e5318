//! Which keys have signed receipts: `<state>/receipt.history`, for everybody to read, only for root to write.
//!
//! At each start the key is compared with the last one of the history. Another one is recorded, before anything is signed
//! with it: signed by itself, and by the one that goes if that is still there.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::DecodePublicKey;
use jiff::Timestamp;
use toolproto::key_history::{
    HistoryError, KEY_CHANGE_VERSION, KeyChange, OldKey, OldSignature, PublicKey, Recorded, lines, periods,
};
use toolproto::receipt::{Envelope, Signature, Statement, key_id};

use super::key::{KeyError, PUBLIC, file_error, write_durably};
use super::state_dir::StateDir;

/// The history's file within the state directory.
pub const HISTORY: &str = "receipt.history";

/// The history of a state directory.
#[derive(Debug)]
pub(super) struct KeyHistory {
    state: PathBuf,
    records: Vec<Recorded>,
}

impl KeyHistory {
    /// Reads what is there.
    ///
    /// # Errors
    /// When it cannot be read, or a line is no record.
    pub(super) fn read(state: &StateDir) -> Result<Self, KeyError> {
        let path = state.path().join(HISTORY);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(file_error("read", &path)(error)),
        };
        let records = lines(&text).collect::<Result<_, HistoryError>>();
        let records = records.map_err(|source| KeyError::History { path, source })?;
        Ok(Self { state: state.path().to_owned(), records })
    }

    /// The key that signed last: that of the history, or without one the public key that lies there.
    ///
    /// # Errors
    /// When that public key cannot be read.
    pub(super) fn last(&self) -> Result<Option<PublicKey>, KeyError> {
        if let Some(last) = self.records.last() {
            return Ok(Some(last.change.new.clone()));
        }
        let path = self.state.join(PUBLIC);
        let public_key = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(file_error("read", &path)(error)),
        };
        let key = VerifyingKey::from_public_key_pem(&public_key).map_err(|_| KeyError::Public(path))?;
        Ok(Some(PublicKey { key_id: key_id(key.as_bytes()), public_key }))
    }

    /// Whether the history's last record is about this key.
    pub(super) fn ends_with(&self, key: &PublicKey) -> bool {
        self.records.last().is_some_and(|last| last.change.new.key_id == key.key_id)
    }

    /// Whether a key has signed the record of its end.
    pub(super) fn has_signed_off(&self, key_id: &str) -> bool {
        let ends = self.records.iter().filter_map(|one| one.change.old.as_ref());
        ends.filter(|old| old.key.key_id == key_id).any(|old| old.signature == OldSignature::Present)
    }

    /// Records a change of the key, durably.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn record(
        &mut self,
        old: Option<OldKey>,
        new: PublicKey,
        sign: impl FnOnce(&str) -> Result<Vec<Signature>, KeyError>,
    ) -> Result<&KeyChange, KeyError> {
        let path = self.state.join(HISTORY);
        let unwritable =
            |source: toolproto::digest::CanonicalError| file_error("write", &path)(io::Error::other(source));
        let previous = self.records.last().map(|last| last.envelope.digest()).transpose().map_err(unwritable)?;
        let (sequence, time) = (self.records.len() as u64 + 1, Timestamp::now());
        let change = KeyChange { version: KEY_CHANGE_VERSION, sequence, previous, time, old, new };
        let mut envelope = Envelope::unsigned(&Statement::of_key_change(change.clone())).map_err(unwritable)?;
        envelope.signatures = sign(&envelope.payload)?;
        self.records.push(Recorded { line: self.records.len() + 1, envelope, change });
        let mut text = String::new();
        for Recorded { envelope, .. } in &self.records {
            text += &serde_json::to_string(envelope).map_err(|error| file_error("write", &path)(error.into()))?;
            text.push('\n');
        }
        replace(&self.state, HISTORY, &text)?;
        self.records.last().map(|last| &last.change).ok_or(KeyError::Public(path))
    }

    /// Writes the public halves for everybody: the one in use first, then the former ones, newest first.
    ///
    /// # Errors
    /// When they cannot be written.
    pub(super) fn publish(&self) -> Result<(), KeyError> {
        let mut written: Vec<String> = Vec::new();
        let mut text = String::new();
        for period in periods(&self.records) {
            if !written.contains(&period.key.key_id) {
                text += period.key.public_key.trim_end();
                text.push('\n');
                written.push(period.key.key_id);
            }
        }
        replace(&self.state, PUBLIC, &text)
    }
}

/// Replaces a public file of the state directory, whole or not at all.
fn replace(state: &Path, name: &str, text: &str) -> Result<(), KeyError> {
    let (path, temporary) = (state.join(name), state.join(format!("{name}.new")));
    write_durably(&temporary, text.as_bytes(), 0o644)
        .and_then(|()| fs::rename(&temporary, &path))
        .and_then(|()| fs::File::open(state)?.sync_all())
        .map_err(file_error("write", &path))
}
