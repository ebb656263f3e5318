//! The receipt key: Ed25519, the launcher's alone.
//!
//! It is a systemd credential named `receipt-key` where there is one, else `<state>/launcher/receipt.key` (PKCS#8 PEM, root,
//! 0600), made at the first start. The public half lies in `<state>/receipt.pub` for everybody to read, before those of the keys
//! that signed earlier. In memory the key lies in a page that neither a forked child nor a core file has; each signature
//! expands it on the stack. Its public half is kept beside it, since to derive it anew takes as long as to sign: a signature
//! with another public key than the secret's own would give the secret away, and nobody can bring another.
//!
//! Another key than at the last start is recorded in the [history](super::key_history). The one that goes signs that too, if it
//! is found: as the credential `receipt-key-old`, as `receipt.key.old` beside the key, or as the key's file when a
//! credential takes its place. A `receipt.key.old` that has done so is removed.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use data_encoding::BASE64;
use ed25519_dalek::hazmat::{ExpandedSecretKey, raw_sign};
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, EncodePrivateKey, EncodePublicKey};
use ed25519_dalek::{SigningKey, VerifyingKey};
use sha2::Sha512;
use toolproto::key_history::{HistoryError, KeyChange, OldKey, OldSignature, PublicKey};
use toolproto::receipt::{
    Envelope, PAYLOAD_TYPE, Seal, Signature, Statement, evidence_signing_bytes, key_id, pre_authentication_encoding,
};

use super::key_history::{HISTORY, KeyHistory};
use super::state_dir::StateDir;
use crate::sys::secret::{SecretPage, overwrite};
use crate::trusted::{Owners, TrustError, TrustedDir};

/// The private key's file within the launcher's directory.
const PRIVATE: &str = "receipt.key";
/// The file beside it of the key that goes.
const OLD: &str = "receipt.key.old";
/// The public keys' file within the state directory.
pub const PUBLIC: &str = "receipt.pub";
/// The name of the systemd credential.
pub(super) const CREDENTIAL: &str = "receipt-key";
/// The name of the systemd credential of the key that goes.
pub(super) const OLD_CREDENTIAL: &str = "receipt-key-old";

/// The key cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Its file is not root's alone.
    #[error("the receipt key is refused: {0}")]
    Trust(#[from] TrustError),
    /// It is no key.
    #[error("{} holds no Ed25519 key as PKCS#8 PEM", .0.display())]
    Malformed(PathBuf),
    /// What lies in the public key's place is none.
    #[error("{} holds no Ed25519 public key as PEM; move it away to have it made anew", .0.display())]
    Public(PathBuf),
    /// The history of the keys is damaged.
    #[error("{}, {source}; take it from a backup, or move it away to begin a new history", path.display())]
    History {
        /// Its file.
        path: PathBuf,
        /// Where, and how.
        source: HistoryError,
    },
    /// The file system refused.
    #[error("failed to {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The kernel has no page for it.
    #[error("no memory for the receipt key")]
    Memory(#[source] io::Error),
}

/// What cannot be signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The payload is not base64.
    #[error("the envelope's payload is not base64")]
    Payload(#[from] data_encoding::DecodeError),
    /// The record has no canonical form.
    #[error(transparent)]
    Record(#[from] toolproto::digest::CanonicalError),
}

/// The receipt key.
#[derive(Debug)]
pub struct ReceiptKey {
    secret: SecretPage,
    /// The secret's own.
    public: VerifyingKey,
    id: String,
    has_changed: bool,
}

impl ReceiptKey {
    /// Reads the key, or makes it at the first start, records it if it is another one than before, and writes the public
    /// half.
    ///
    /// # Errors
    /// When it is not root's alone, is no key, or the file system refuses.
    pub fn open(state: &StateDir) -> Result<Self, KeyError> {
        Self::with_credentials(state, std::env::var_os(super::credentials::VARIABLE).map(PathBuf::from).as_deref())
    }

    fn with_credentials(state: &StateDir, credentials: Option<&Path>) -> Result<Self, KeyError> {
        let credential = |name: &str| credentials.map(|folder| folder.join(name)).filter(|file| file.exists());
        let own_file = state.launcher().path().join(PRIVATE);
        let mut own = match credential(CREDENTIAL) {
            Some(file) => Self::hold(read(&file)?)?,
            None => match read(&own_file) {
                Err(KeyError::Trust(error)) if error.is_missing() => Self::hold(make(state.launcher())?)?,
                other => Self::hold(other?)?,
            },
        };
        let old_file = state.launcher().path().join(OLD);
        let places = credential(OLD_CREDENTIAL).into_iter().chain([old_file.clone(), own_file]);
        let mut history = KeyHistory::read(state)?;
        own.come_into_use(&mut history, places)?;
        history.publish()?;
        own.retire(&history, &old_file);
        tracing::info!(key = own.id, file = %state.path().join(PUBLIC).display(), "receipts are signed");
        Ok(own)
    }

    fn hold(mut key: [u8; 32]) -> Result<Self, KeyError> {
        let public = SigningKey::from_bytes(&key).verifying_key();
        let secret = SecretPage::hold(&mut key).map_err(KeyError::Memory)?;
        Ok(Self { secret, id: key_id(public.as_bytes()), public, has_changed: false })
    }

    /// Records the key if it is another one than before.
    fn come_into_use(
        &mut self,
        history: &mut KeyHistory,
        old_places: impl Iterator<Item = PathBuf>,
    ) -> Result<(), KeyError> {
        let new = self.public_key()?;
        if history.ends_with(&new) {
            return Ok(());
        }
        let last = history.last()?.filter(|last| last.key_id != self.id);
        let signs_off = last.as_ref().map(|last| Self::find(&last.key_id, old_places)).transpose()?.flatten();
        let signature = if signs_off.is_some() { OldSignature::Present } else { OldSignature::Missing };
        let old = last.map(|key| OldKey { key, signature });
        let change = history.record(old, new, |payload| {
            let signers = [Some(&*self), signs_off.as_ref()];
            let signed = signers.into_iter().flatten().map(|key| key.sign_payload(payload));
            signed
                .collect::<Result<_, _>>()
                .map_err(|error| file_error("sign", Path::new(HISTORY))(io::Error::other(error)))
        })?;
        if let KeyChange { old: Some(old), .. } = change {
            let (from, signature) = (&old.key.key_id, old.signature);
            tracing::warn!(from, to = self.id, old_signature = ?signature, "the receipt key is another one than before");
            self.has_changed = true;
        }
        Ok(())
    }

    /// The key of this id, if it lies in one of these places.
    fn find(id: &str, places: impl Iterator<Item = PathBuf>) -> Result<Option<Self>, KeyError> {
        for file in places {
            match read(&file) {
                Ok(key) => {
                    let found = Self::hold(key)?;
                    if found.id == id {
                        return Ok(Some(found));
                    }
                }
                Err(KeyError::Trust(error)) if error.is_missing() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Removes the file of a key that has gone and said so. Any other file of that name stays, since it may be the only copy.
    fn retire(&self, history: &KeyHistory, file: &Path) {
        let Ok(old) = read(file).and_then(Self::hold) else { return };
        if old.id == self.id || !history.has_signed_off(&old.id) {
            tracing::warn!(file = %file.display(), key = old.id, "it is not the key that signed last; it is left alone");
        } else if let Err(error) = fs::remove_file(file) {
            tracing::warn!(%error, file = %file.display(), "a key that is out of use could not be removed");
        }
    }

    fn public_key(&self) -> Result<PublicKey, KeyError> {
        let public_key =
            self.public.to_public_key_pem(LineEnding::LF).map_err(|_| KeyError::Malformed(PathBuf::from(PUBLIC)))?;
        Ok(PublicKey { key_id: self.id.clone(), public_key })
    }

    /// Whether it took another one's place at this start.
    #[must_use]
    pub const fn has_changed(&self) -> bool {
        self.has_changed
    }

    /// Signs a record of evidence by its canonical JSON.
    #[must_use]
    pub fn sign_evidence(&self, canonical: &[u8]) -> String {
        self.sign(&evidence_signing_bytes(canonical))
    }

    /// Signs an envelope by its payload.
    ///
    /// # Errors
    /// When the payload is not base64.
    pub fn sign_payload(&self, payload: &str) -> Result<Signature, SignError> {
        let payload = BASE64.decode(payload.as_bytes())?;
        let sig = self.sign(&pre_authentication_encoding(PAYLOAD_TYPE, &payload));
        Ok(Signature { keyid: self.id.clone(), sig })
    }

    /// Signs what closes a chain after an envelope, which it names.
    ///
    /// # Errors
    /// Never in practice: a seal holds only what has a canonical form.
    pub fn sign_seal(&self, last: &Envelope, seal: Seal) -> Result<Envelope, SignError> {
        let seal = Seal { previous: Some(last.digest()?), ..seal };
        let mut envelope = Envelope::unsigned(&Statement::sealing(seal))?;
        envelope.signatures.push(self.sign_payload(&envelope.payload)?);
        Ok(envelope)
    }

    fn sign(&self, bytes: &[u8]) -> String {
        let secret = ExpandedSecretKey::from(self.secret.expose());
        BASE64.encode(&raw_sign::<Sha512>(&secret, bytes, &self.public).to_bytes())
    }
}

pub(super) fn file_error(action: &'static str, path: &Path) -> impl Fn(io::Error) -> KeyError {
    let path = path.to_owned();
    move |source| KeyError::File { action, path: path.clone(), source }
}

fn read(file: &Path) -> Result<[u8; 32], KeyError> {
    let (Some(folder), Some(name)) = (file.parent(), file.file_name()) else {
        return Err(KeyError::Malformed(file.to_owned()));
    };
    let folder = TrustedDir::open(folder, Owners::RootOnly)?;
    let text = folder.read(name)?;
    let key = SigningKey::from_pkcs8_pem(&text).map(|key| key.to_bytes());
    forget(text);
    key.map_err(|_| KeyError::Malformed(file.to_owned()))
}

/// Makes a key, durable before it is used: a receipt must never outlive the only key that verifies it.
fn make(folder: &TrustedDir) -> Result<[u8; 32], KeyError> {
    let path = folder.path().join(PRIVATE);
    let temporary = folder.path().join("receipt.key.new");
    let mut key = [0; 32];
    let random = Path::new("/dev/urandom");
    File::open(random).and_then(|mut random| random.read_exact(&mut key)).map_err(file_error("read", random))?;
    let pem =
        SigningKey::from_bytes(&key).to_pkcs8_pem(LineEnding::LF).map_err(|_| KeyError::Malformed(path.clone()))?;
    let written = write_durably(&temporary, pem.as_bytes(), 0o600).and_then(|()| fs::rename(&temporary, &path));
    if let Err(source) = written.and_then(|()| File::open(folder.path())?.sync_all()) {
        overwrite(&mut key);
        return Err(file_error("write", &path)(source));
    }
    tracing::info!(file = %path.display(), "a receipt key is made");
    Ok(key)
}

pub(super) fn write_durably(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = File::options().write(true).create(true).truncate(true).mode(mode).open(path)?;
    // Whatever the umask, and whoever made the file before.
    rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Overwrites text that holds the key.
fn forget(text: String) {
    for chunk in text.into_bytes().chunks_mut(32) {
        let mut whole = [0; 32];
        overwrite(&mut whole);
        chunk.copy_from_slice(&whole[..chunk.len()]);
        std::hint::black_box(&chunk);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use ed25519_dalek::pkcs8::DecodePublicKey;
    use ed25519_dalek::{Signer, Verifier};

    use super::*;
    use crate::launcher::account::Account;

    const ACCOUNT: Account = Account { uid: 69_999, gid: 69_999, socket_group: 69_999, admin_group: None };

    fn verify(state: &StateDir, bytes: &[u8], signature: &str) -> bool {
        let pem = fs::read_to_string(state.path().join(PUBLIC)).unwrap();
        let key = VerifyingKey::from_public_key_pem(&pem).unwrap();
        let signature = BASE64.decode(signature.as_bytes()).unwrap();
        key.verify(bytes, &ed25519_dalek::Signature::from_slice(&signature).unwrap()).is_ok()
    }

    #[test]
    fn the_key_is_made_once_and_its_public_half_verifies_what_it_signs() {
        let top = tempfile::tempdir().unwrap();
        let state = StateDir::open(&top.path().join("state"), ACCOUNT).unwrap();
        let first = ReceiptKey::open(&state).unwrap();
        let again = ReceiptKey::open(&state).unwrap();
        assert_eq!(first.id, again.id);
        let signature = again.sign_payload(&BASE64.encode(b"{}")).unwrap();
        assert_eq!(signature.keyid, first.id);
        assert!(verify(&state, &pre_authentication_encoding(PAYLOAD_TYPE, b"{}"), &signature.sig));
        assert!(!verify(&state, b"{}", &signature.sig), "never the bare payload");
        let whole =
            SigningKey::from_bytes(first.secret.expose()).sign(&pre_authentication_encoding(PAYLOAD_TYPE, b"{}"));
        assert_eq!(signature.sig, BASE64.encode(&whole.to_bytes()), "RFC 8032 leaves no choice");
        assert!(first.sign_payload("no base64!").is_err());

        let mode = |path: PathBuf| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(mode(state.launcher().path().join(PRIVATE)), 0o600);
        assert_eq!(mode(state.path().join(PUBLIC)), 0o644);
    }

    #[test]
    fn a_key_that_others_can_write_or_that_is_none_is_refused() {
        let top = tempfile::tempdir().unwrap();
        let state = StateDir::open(&top.path().join("state"), ACCOUNT).unwrap();
        ReceiptKey::open(&state).unwrap();
        let file = state.launcher().path().join(PRIVATE);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o622)).unwrap();
        assert!(matches!(ReceiptKey::open(&state), Err(KeyError::Trust(_))));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, "nonsense").unwrap();
        assert!(matches!(ReceiptKey::open(&state), Err(KeyError::Malformed(_))));
        assert_eq!(fs::read_to_string(&file).unwrap(), "nonsense", "a damaged key is not replaced by a new one");
    }

    /// The envelopes of the history, each with its record, and whether its first signature and the second fit.
    fn history(state: &StateDir) -> Vec<(KeyChange, Vec<bool>)> {
        let text = fs::read_to_string(state.path().join(HISTORY)).unwrap();
        let told = toolproto::key_history::lines(&text).map(Result::unwrap).map(|one| {
            let bytes = one.envelope.signing_bytes().unwrap();
            let keys = [Some(&one.change.new), one.change.old.as_ref().map(|old| &old.key)];
            let fits = |(signature, key): (&Signature, Option<&PublicKey>)| {
                let key = VerifyingKey::from_public_key_pem(&key.unwrap().public_key).unwrap();
                let raw = BASE64.decode(signature.sig.as_bytes()).unwrap();
                key.verify(&bytes, &ed25519_dalek::Signature::from_slice(&raw).unwrap()).is_ok()
            };
            let signed = one.envelope.signatures.iter().zip(keys).map(fits).collect();
            (one.change, signed)
        });
        told.collect()
    }

    #[test]
    fn a_change_is_recorded_once_and_signed_by_both_keys_where_the_old_one_is_left() {
        let top = tempfile::tempdir().unwrap();
        let state = StateDir::open(&top.path().join("state"), ACCOUNT).unwrap();
        let (key, old) = (state.launcher().path().join(PRIVATE), state.launcher().path().join(OLD));
        let first = ReceiptKey::open(&state).unwrap();
        assert!(!first.has_changed(), "the first key takes nobody's place");
        assert_eq!(history(&state).len(), 1);

        fs::rename(&key, &old).unwrap();
        let second = ReceiptKey::open(&state).unwrap();
        assert!(second.has_changed() && second.id != first.id);
        assert!(!old.exists(), "a key that has signed off goes");
        assert!(!ReceiptKey::open(&state).unwrap().has_changed(), "it is the same from then on");

        fs::remove_file(&key).unwrap();
        fs::write(&old, SigningKey::from_bytes(&[7; 32]).to_pkcs8_pem(LineEnding::LF).unwrap().as_bytes()).unwrap();
        fs::set_permissions(&old, fs::Permissions::from_mode(0o600)).unwrap();
        let third = ReceiptKey::open(&state).unwrap();
        assert!(old.exists(), "a key that nobody knows is left alone");

        let records = history(&state);
        let told: Vec<_> = records
            .iter()
            .map(|(change, signed)| (change.sequence, change.old.as_ref().map(|old| old.signature), signed.clone()))
            .collect();
        assert_eq!(
            told,
            [
                (1, None, vec![true]),
                (2, Some(OldSignature::Present), vec![true, true]),
                (3, Some(OldSignature::Missing), vec![true]),
            ]
        );
        let names: Vec<_> = records.iter().map(|(change, _)| change.new.key_id.clone()).collect();
        assert_eq!(names, [first.id.clone(), second.id, third.id]);
        assert_eq!(records[2].0.old.as_ref().unwrap().key.key_id, names[1]);
        let published = fs::read_to_string(state.path().join(PUBLIC)).unwrap();
        let newest_first: String = records.iter().rev().map(|(change, _)| change.new.public_key.clone()).collect();
        assert_eq!(published, newest_first);
    }

    #[test]
    fn a_credential_takes_the_files_place_and_an_old_credential_signs_off() {
        let top = tempfile::tempdir().unwrap();
        let state = StateDir::open(&top.path().join("state"), ACCOUNT).unwrap();
        ReceiptKey::open(&state).unwrap();
        let folder = top.path().join("credentials");
        fs::create_dir(&folder).unwrap();
        let give = |name: &str, seed: u8| {
            let pem = SigningKey::from_bytes(&[seed; 32]).to_pkcs8_pem(LineEnding::LF).unwrap();
            write_durably(&folder.join(name), pem.as_bytes(), 0o400).unwrap();
        };
        give(CREDENTIAL, 1);
        assert!(ReceiptKey::with_credentials(&state, Some(&folder)).unwrap().has_changed());
        assert!(state.launcher().path().join(PRIVATE).exists(), "the file stays");
        give(CREDENTIAL, 2);
        give(OLD_CREDENTIAL, 1);
        ReceiptKey::with_credentials(&state, Some(&folder)).unwrap();
        let signed: Vec<_> = history(&state).into_iter().map(|(_, signed)| signed).collect();
        assert_eq!(signed, [vec![true], vec![true, true], vec![true, true]]);
    }

    #[test]
    fn a_state_directory_without_history_begins_one_with_the_key_that_it_published() {
        let top = tempfile::tempdir().unwrap();
        let state = StateDir::open(&top.path().join("state"), ACCOUNT).unwrap();
        let before = ReceiptKey::open(&state).unwrap();
        fs::remove_file(state.path().join(HISTORY)).unwrap();
        fs::remove_file(state.launcher().path().join(PRIVATE)).unwrap();
        assert!(ReceiptKey::open(&state).unwrap().has_changed());
        let [(change, _)] = &history(&state)[..] else { panic!("one record") };
        assert_eq!(change.old.as_ref().unwrap().key.key_id, before.id);
    }

    #[test]
    fn a_damaged_history_is_named_and_kept() {
        let top = tempfile::tempdir().unwrap();
        let state = StateDir::open(&top.path().join("state"), ACCOUNT).unwrap();
        ReceiptKey::open(&state).unwrap();
        let file = state.path().join(HISTORY);
        let text = fs::read_to_string(&file).unwrap() + "nonsense\n";
        fs::write(&file, &text).unwrap();
        let error = ReceiptKey::open(&state).unwrap_err();
        assert!(error.to_string().contains("line 2"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
}
