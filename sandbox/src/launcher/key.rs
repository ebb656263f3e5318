//! The receipt key: Ed25519, the launcher's alone.
//!
//! It is a systemd credential named `receipt-key` where there is one, else `<state>/launcher/receipt.key` (PKCS#8 PEM, root,
//! 0600), made at the first start. The public half lies in `<state>/receipt.pub` for everybody to read. In memory the key
//! lies in a page that neither a forked child nor a core file has; each signature expands it on the stack.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use data_encoding::BASE64;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, EncodePrivateKey, EncodePublicKey};
use ed25519_dalek::{Signer, SigningKey, VerifyingKey};
use toolproto::receipt::{
    Evidence, PAYLOAD_TYPE, Signature, evidence_signing_bytes, key_id, pre_authentication_encoding,
};

use super::state_dir::StateDir;
use crate::sys::secret::{SecretPage, overwrite};
use crate::trusted::{Owners, TrustError, TrustedDir};

/// The private key's file within the launcher's directory.
const PRIVATE: &str = "receipt.key";
/// The public key's file within the state directory.
pub const PUBLIC: &str = "receipt.pub";
/// The name of the systemd credential.
pub(super) const CREDENTIAL: &str = "receipt-key";

/// The key cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Its file is not root's alone.
    #[error("the receipt key is refused: {0}")]
    Trust(#[from] TrustError),
    /// It is no key.
    #[error("{} holds no Ed25519 key as PKCS#8 PEM", .0.display())]
    Malformed(PathBuf),
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
    id: String,
}

impl ReceiptKey {
    /// Reads the key, or makes it at the first start, and writes the public half.
    ///
    /// # Errors
    /// When it is not root's alone, is no key, or the file system refuses.
    pub fn open(state: &StateDir) -> Result<Self, KeyError> {
        let credential = std::env::var_os("CREDENTIALS_DIRECTORY").map(|folder| Path::new(&folder).join(CREDENTIAL));
        let mut key = match credential.filter(|file| file.exists()) {
            Some(file) => read(&file)?,
            None => {
                let file = state.launcher().path().join(PRIVATE);
                match read(&file) {
                    Err(KeyError::Trust(error)) if error.is_missing() => make(state.launcher())?,
                    other => other?,
                }
            }
        };
        let public = SigningKey::from_bytes(&key).verifying_key();
        let secret = SecretPage::hold(&mut key).map_err(KeyError::Memory)?;
        publish(state, &public)?;
        let own = Self { secret, id: key_id(public.as_bytes()) };
        tracing::info!(key = own.id, file = %state.path().join(PUBLIC).display(), "receipts are signed");
        Ok(own)
    }

    /// Signs a record of evidence.
    ///
    /// # Errors
    /// Never in practice: a record holds only what has a canonical form.
    pub fn sign_evidence(&self, record: &Evidence) -> Result<String, SignError> {
        Ok(self.sign(&evidence_signing_bytes(record)?))
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

    fn sign(&self, bytes: &[u8]) -> String {
        BASE64.encode(&SigningKey::from_bytes(self.secret.expose()).sign(bytes).to_bytes())
    }
}

fn file_error(action: &'static str, path: &Path) -> impl Fn(io::Error) -> KeyError {
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

fn publish(state: &StateDir, public: &VerifyingKey) -> Result<(), KeyError> {
    let path = state.path().join(PUBLIC);
    let temporary = state.path().join("receipt.pub.new");
    let pem = public.to_public_key_pem(LineEnding::LF).map_err(|_| KeyError::Malformed(path.clone()))?;
    write_durably(&temporary, pem.as_bytes(), 0o644)
        .and_then(|()| fs::rename(&temporary, &path))
        .map_err(file_error("write", &path))
}

fn write_durably(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
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

    use ed25519_dalek::Verifier;
    use ed25519_dalek::pkcs8::DecodePublicKey;

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
}
