//! What a receipt travels in: a DSSE envelope (<https://github.com/secure-systems-lab/dsse>).

use data_encoding::BASE64;
use serde::{Deserialize, Serialize};

use super::{Receipt, Statement};
use crate::digest::{CanonicalError, Digest, canonical_json};

/// The DSSE `payloadType` of in-toto statements.
pub const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

/// The bytes that a DSSE signature covers: the pre-authentication encoding of the DSSE specification, version 1.
#[must_use]
pub fn pre_authentication_encoding(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut encoded = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len()).into_bytes();
    encoded.extend_from_slice(payload);
    encoded
}

/// The id of an Ed25519 public key: `ed25519:` and the first 16 bytes of the sha256 of its 32 bytes, in hexadecimal.
#[must_use]
pub fn key_id(public_key: &[u8; 32]) -> String {
    let digest = Digest::sha256(public_key);
    format!("ed25519:{}", data_encoding::HEXLOWER.encode(&digest.as_bytes()[..16]))
}

/// One signature of an envelope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Signature {
    /// The key's id.
    pub keyid: String,
    /// base64.
    pub sig: String,
}

/// A DSSE envelope (<https://github.com/secure-systems-lab/dsse>).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Envelope {
    /// The statement, base64.
    pub payload: String,
    /// [`PAYLOAD_TYPE`].
    #[serde(rename = "payloadType")]
    pub payload_type: String,
    /// Empty until receipts are signed.
    pub signatures: Vec<Signature>,
}

/// An envelope that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    /// The payload is not base64.
    #[error("the envelope's payload is not base64")]
    Payload(#[source] data_encoding::DecodeError),
    /// The payload is not a statement.
    #[error("the envelope's payload is not a receipt statement")]
    Statement(#[source] serde_json::Error),
}

impl Envelope {
    /// An unsigned envelope around a statement's canonical JSON.
    ///
    /// # Errors
    /// When the statement has no canonical form.
    pub fn unsigned<P: Serialize>(statement: &Statement<P>) -> Result<Self, CanonicalError> {
        let payload = canonical_json(statement)?;
        Ok(Self { payload: BASE64.encode(&payload), payload_type: PAYLOAD_TYPE.to_owned(), signatures: Vec::new() })
    }

    /// The payload's bytes.
    ///
    /// # Errors
    /// When they are not base64.
    pub fn payload_bytes(&self) -> Result<Vec<u8>, EnvelopeError> {
        BASE64.decode(self.payload.as_bytes()).map_err(EnvelopeError::Payload)
    }

    /// The receipt inside.
    ///
    /// # Errors
    /// When the payload is not a receipt's statement.
    pub fn receipt(&self) -> Result<Receipt, EnvelopeError> {
        let statement: Statement<Receipt> =
            serde_json::from_slice(&self.payload_bytes()?).map_err(EnvelopeError::Statement)?;
        Ok(statement.predicate)
    }

    /// The statement inside, whatever its predicate.
    ///
    /// # Errors
    /// When the payload is not JSON.
    pub fn statement(&self) -> Result<serde_json::Value, EnvelopeError> {
        serde_json::from_slice(&self.payload_bytes()?).map_err(EnvelopeError::Statement)
    }

    /// The bytes that a signature of this envelope covers.
    ///
    /// # Errors
    /// When the payload is not base64.
    pub fn signing_bytes(&self) -> Result<Vec<u8>, EnvelopeError> {
        Ok(pre_authentication_encoding(&self.payload_type, &self.payload_bytes()?))
    }

    /// The digest that the next receipt of the job names as `previous`: sha256 of the envelope's canonical JSON.
    ///
    /// # Errors
    /// Never in practice: an envelope holds only strings.
    pub fn digest(&self) -> Result<Digest, CanonicalError> {
        Digest::of_json(self)
    }
}
