//! The public keys that verify this agentd's receipts, the one in use and former ones. The launcher, which holds the private
//! one, writes their history where everybody can read it.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context;
use sandbox::launcher::key_history::HISTORY;
use toolproto::api::KeyView;
use toolproto::key_history::{HistoryError, OldSignature, Period, Recorded, lines, periods};

use crate::observe::Observation;

/// What the history tells; not verified, since it is the launcher's own.
#[derive(Debug)]
pub struct Keys {
    records: Vec<Recorded>,
}

/// Reads the history; none is there while receipts are not signed.
///
/// # Errors
/// When the file cannot be read, or a line of it is no record.
pub fn read(state_dir: &Path) -> anyhow::Result<Keys> {
    let file = state_dir.join(HISTORY);
    let text = match fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("{} cannot be read", file.display())),
    };
    let records = lines(&text).collect::<Result<_, HistoryError>>();
    Ok(Keys { records: records.with_context(|| file.display().to_string())? })
}

impl Keys {
    /// The keys, the one in use first.
    #[must_use]
    pub fn views(&self) -> Vec<KeyView> {
        let view = |Period { key, from, until, record }| KeyView {
            key_id: key.key_id,
            algorithm: "ed25519".to_owned(),
            public_key: key.public_key,
            from,
            until,
            record,
        };
        periods(&self.records).into_iter().map(view).collect()
    }

    /// The last change, as the audit log has it.
    #[must_use]
    pub fn change(&self) -> Option<Observation> {
        let change = &self.records.last()?.change;
        let old = change.old.as_ref()?;
        let reason = match old.signature {
            OldSignature::Present => "the key before has signed the change",
            OldSignature::Missing => "the key before is not there any more, and has not signed the change",
        };
        Some(Observation::KeyChanged { from: old.key.key_id.clone(), to: change.new.key_id.clone(), reason })
    }
}

#[cfg(test)]
mod tests {
    use toolproto::key_history::{KEY_CHANGE_VERSION, KeyChange, OldKey, PublicKey};
    use toolproto::receipt::{Envelope, Statement};

    use super::*;

    #[test]
    fn keys_and_their_last_change_are_read_and_nonsense_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap().views(), []);
        let key = |name: &str| PublicKey { key_id: name.to_owned(), public_key: "PEM".to_owned() };
        let old = OldKey { key: key("a"), signature: OldSignature::Missing };
        let (version, time) = (KEY_CHANGE_VERSION, "2026-11-29T12:00:00Z".parse().unwrap());
        let change = KeyChange { version, sequence: 1, previous: None, time, old: Some(old), new: key("b") };
        let envelope = Envelope::unsigned(&Statement::of_key_change(change)).unwrap();
        let line = serde_json::to_string(&envelope).unwrap();
        fs::write(folder.path().join(HISTORY), &line).unwrap();
        let keys = read(folder.path()).unwrap();
        let told: Vec<_> = keys.views().into_iter().map(|view| (view.key_id, view.from, view.until)).collect();
        assert_eq!(told, [("b".to_owned(), Some(time), None), ("a".to_owned(), None, Some(time))]);
        let Some(Observation::KeyChanged { from, to, reason }) = keys.change() else { panic!("a change") };
        assert_eq!((from.as_str(), to.as_str()), ("a", "b"));
        assert!(reason.contains("not signed"), "{reason}");
        fs::write(folder.path().join(HISTORY), "nonsense").unwrap();
        assert!(format!("{:#}", read(folder.path()).unwrap_err()).contains("line 1"));
    }
}
