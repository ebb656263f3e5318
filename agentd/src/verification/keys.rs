//! The keys that a verifier trusts, from outside the file that it verifies.

use std::fmt;

use data_encoding::BASE64;
use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::DecodePublicKey;
use toolproto::receipt::key_id;

const LABEL: &str = "PUBLIC KEY";

/// Public keys, the one in use first.
#[derive(Clone, Debug)]
pub struct KeyRing {
    keys: Vec<(String, VerifyingKey)>,
}

/// A text that is no ring of keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyRingError {
    /// No key in it.
    #[error("holds no public key as PEM")]
    Empty,
    /// A block of another kind.
    #[error("line {line}: `{label}` is no public key")]
    Label {
        /// Where it begins.
        line: usize,
        /// What it is.
        label: String,
    },
    /// A block that is no Ed25519 key.
    #[error("line {line}: no Ed25519 public key: {reason}")]
    Malformed {
        /// Where it begins.
        line: usize,
        /// Why not.
        reason: String,
    },
}

impl KeyRing {
    /// Reads PEM blocks one after the other; text around them is not looked at.
    ///
    /// # Errors
    /// When there is none, or one is no Ed25519 public key.
    pub fn from_pem(text: &str) -> Result<Self, KeyRingError> {
        let mut keys: Vec<(String, VerifyingKey)> = Vec::new();
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        while let Some((line, begin)) = lines.next() {
            let Some(label) = begin.strip_prefix("-----BEGIN ").and_then(|rest| rest.strip_suffix("-----")) else {
                continue;
            };
            if label != LABEL {
                return Err(KeyRingError::Label { line, label: label.to_owned() });
            }
            let end = format!("-----END {LABEL}-----");
            let mut block = format!("{begin}\n");
            for (_, text) in lines.by_ref() {
                block += text;
                block.push('\n');
                if text == end {
                    break;
                }
            }
            let key = VerifyingKey::from_public_key_pem(&block)
                .map_err(|error| KeyRingError::Malformed { line, reason: error.to_string() })?;
            let id = key_id(key.as_bytes());
            if keys.iter().all(|(known, _)| *known != id) {
                keys.push((id, key));
            }
        }
        if keys.is_empty() { Err(KeyRingError::Empty) } else { Ok(Self { keys }) }
    }

    /// The id of the key in use.
    #[must_use]
    pub fn in_use(&self) -> &str {
        self.keys.first().map_or("", |(id, _)| id)
    }

    /// Whether the key of this id, which is trusted, has signed.
    pub(super) fn has_signed(&self, id: &str, bytes: &[u8], signature: &str) -> bool {
        self.keys.iter().any(|(known, key)| known == id && is_signed(key, bytes, signature))
    }

    /// Whether any of the keys has signed.
    pub(super) fn any_has_signed(&self, bytes: &[u8], signature: &str) -> bool {
        self.keys.iter().any(|(_, key)| is_signed(key, bytes, signature))
    }

    /// Whether a key of this id is trusted.
    pub(super) fn holds(&self, id: &str) -> bool {
        self.keys.iter().any(|(known, _)| known == id)
    }
}

impl From<VerifyingKey> for KeyRing {
    fn from(key: VerifyingKey) -> Self {
        Self { keys: vec![(key_id(key.as_bytes()), key)] }
    }
}

impl fmt::Display for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (id, _)) in self.keys.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { " or " })?;
            f.write_str(id)?;
        }
        Ok(())
    }
}

/// Whether a key has signed.
pub(super) fn is_signed(key: &VerifyingKey, bytes: &[u8], signature: &str) -> bool {
    let Ok(raw) = BASE64.decode(signature.as_bytes()) else { return false };
    let Ok(signature) = ed25519_dalek::Signature::from_slice(&raw) else { return false };
    key.verify_strict(bytes, &signature).is_ok()
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use ed25519_dalek::pkcs8::EncodePublicKey;
    use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;

    use super::*;

    fn pem(seed: u8) -> String {
        SigningKey::from_bytes(&[seed; 32]).verifying_key().to_public_key_pem(LineEnding::LF).unwrap()
    }

    #[test]
    fn a_file_holds_one_key_or_several_and_what_is_none_is_named() {
        let both = KeyRing::from_pem(&format!("in use:\n{}\nformer:\r\n{}{}", pem(1), pem(2), pem(1))).unwrap();
        let id = |seed: u8| key_id(SigningKey::from_bytes(&[seed; 32]).verifying_key().as_bytes());
        assert_eq!(both.to_string(), format!("{} or {}", id(1), id(2)));
        assert_eq!(both.in_use(), id(1));
        assert!(both.holds(&id(2)) && !both.holds(&id(3)));
        let error = |text: &str| KeyRing::from_pem(text).unwrap_err();
        assert_eq!(error("nothing"), KeyRingError::Empty);
        let private = "-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n";
        assert_eq!(error(private), KeyRingError::Label { line: 1, label: "PRIVATE KEY".to_owned() });
        let cut = format!("{}{}", pem(1), &pem(2)[..40]);
        assert!(matches!(error(&cut), KeyRingError::Malformed { line: 4, .. }), "{}", error(&cut));
    }
}
