//! The public key that verifies this agentd's receipts. The launcher, which holds the private one, writes it where everybody
//! can read it.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context;
use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::DecodePublicKey;
use sandbox::launcher::key::PUBLIC;
use toolproto::api::KeyView;
use toolproto::receipt::key_id;

/// Reads the key in use; absent while receipts are not signed.
///
/// # Errors
/// When the file cannot be read or holds no key.
pub fn read(state_dir: &Path) -> anyhow::Result<Option<KeyView>> {
    let file = state_dir.join(PUBLIC);
    let public_key = match fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("{} cannot be read", file.display())),
    };
    let key = VerifyingKey::from_public_key_pem(&public_key)
        .map_err(|_| anyhow::anyhow!("{} holds no Ed25519 public key as PEM", file.display()))?;
    Ok(Some(KeyView { key_id: key_id(key.as_bytes()), algorithm: "ed25519".to_owned(), public_key }))
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use ed25519_dalek::pkcs8::EncodePublicKey;
    use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;

    use super::*;

    #[test]
    fn a_key_is_read_and_nonsense_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap(), None);
        let key = SigningKey::from_bytes(&[7; 32]).verifying_key();
        let pem = key.to_public_key_pem(LineEnding::LF).unwrap();
        fs::write(folder.path().join(PUBLIC), &pem).unwrap();
        let view = read(folder.path()).unwrap().unwrap();
        assert_eq!((view.key_id, view.public_key), (key_id(key.as_bytes()), pem));
        fs::write(folder.path().join(PUBLIC), "nonsense").unwrap();
        assert!(read(folder.path()).unwrap_err().to_string().contains(PUBLIC));
    }
}
