//! The bodies of the HTTP API beside those of [`crate::job`]: what `/v1` takes and gives.
//!
//! Messages are versioned; a reader ignores fields that it does not know.

mod call;
mod job;
mod offer;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::receipt::Envelope;

pub use self::call::{CallError, CallReply, CallRequest, ExecEnd, ExecFailure, ExecRequest, RollbackReply};
pub use self::job::{
    EventBody, EventView, JobFilter, JobPage, JobState, JobView, Phase, Steered, WaitKind, WaitingFor,
};
pub use self::offer::{
    BreakerAction, BreakerRequest, BreakerView, ExtensionView, PolicyList, PolicyView, ToolList, ToolView,
};

/// The version of every body here.
pub const API_VERSION: u32 = 1;

/// The answer to `GET /jobs/{id}/receipts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReceiptList {
    /// The version of this form: 1.
    pub version: u32,
    /// The job's envelopes in the order of its calls, the sealing receipt last once the job has ended.
    pub receipts: Vec<Envelope>,
}

/// A public key that verifies receipts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KeyView {
    /// The id that envelopes name.
    pub key_id: String,
    /// `ed25519`.
    pub algorithm: String,
    /// SubjectPublicKeyInfo as PEM.
    pub public_key: String,
    /// Since when it signs or signed; absent when that was before changes were recorded.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
    pub from: Option<Timestamp>,
    /// Until when it signed; absent for the one in use.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
    pub until: Option<Timestamp>,
    /// The signed record of how it came into use, if there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub record: Option<Envelope>,
}

/// The answer to `GET /keys`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KeyList {
    /// The version of this form: 1.
    pub version: u32,
    /// The keys, the one in use first, former ones after it, newest first; empty until receipts are signed.
    pub keys: Vec<KeyView>,
}

/// The answer to `GET /health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Health {
    /// The version of this form: 1.
    pub version: u32,
    /// `ok`, or `stopping`.
    pub status: String,
    /// agentd's version.
    pub agentd_version: String,
    /// When the daemon started.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Time"))]
    pub started: Timestamp,
    /// Jobs that run.
    pub jobs_running: u64,
    /// Jobs that wait for their turn.
    pub jobs_queued: u64,
}
