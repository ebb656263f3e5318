//! What the ledger holds, as its users see it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use serde_json::Value;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::job::JobResult;
use toolproto::receipt::Envelope;

use crate::session::event::Event;

/// What kind of job a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// An agent's.
    Agent,
    /// A direct call.
    Call,
    /// An ad-hoc command.
    Exec,
    /// A workspace's way back.
    Rollback,
}

impl JobKind {
    /// The word in the ledger.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Call => "call",
            Self::Exec => "exec",
            Self::Rollback => "rollback",
        }
    }

    /// The kind of this word.
    #[must_use]
    pub fn of(word: &str) -> Option<Self> {
        [Self::Agent, Self::Call, Self::Exec, Self::Rollback].into_iter().find(|kind| kind.as_str() == word)
    }
}

/// A job to be stored.
#[derive(Clone, Debug, PartialEq)]
pub struct NewJob {
    /// Its id.
    pub id: JobId,
    /// Its kind.
    pub kind: JobKind,
    /// Who submitted it.
    pub uid: u32,
    /// Its agent; the kind's word for direct calls and commands.
    pub agent: String,
    /// The request, as JSON.
    pub request: Value,
    /// Its idempotency key.
    pub idempotency_key: Option<String>,
    /// The request's digest: another request with the same key is a conflict.
    pub request_digest: Digest,
    /// Its workspace.
    pub workspace: Option<PathBuf>,
    /// Its priority.
    pub priority: i32,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// When it was submitted.
    pub submitted: Timestamp,
}

/// What became of a job to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// It is stored.
    New,
    /// The same request with the same key was stored before.
    Known(JobId),
    /// Another request with the same key was stored before.
    Conflict(JobId),
}

/// A job of the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct JobRow {
    /// Its id.
    pub id: JobId,
    /// Its kind.
    pub kind: JobKind,
    /// Who submitted it.
    pub uid: u32,
    /// Its agent.
    pub agent: String,
    /// The request.
    pub request: Value,
    /// Its workspace.
    pub workspace: Option<PathBuf>,
    /// Its priority.
    pub priority: i32,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// When it was submitted.
    pub submitted: Timestamp,
    /// When it ended.
    pub ended: Option<Timestamp>,
    /// Its result.
    pub result: Option<JobResult>,
}

/// An event with its place and time.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Its number within the job, from 1.
    pub sequence: u64,
    /// When it happened.
    pub time: Timestamp,
    /// How long the job had run, in milliseconds.
    pub elapsed_ms: u64,
    /// What happened.
    pub event: Event,
}

/// Up to when what belongs to ended jobs is kept no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Before {
    /// Jobs with their events.
    pub jobs: Timestamp,
    /// Receipts.
    pub receipts: Timestamp,
    /// Results that are kept apart. They never outlast the events that name them.
    pub artifacts: Timestamp,
}

/// A receipt with its place.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredReceipt {
    /// Its number within the job, from 1.
    pub sequence: u64,
    /// Its call; absent for the sealing receipt.
    pub call: Option<CallId>,
    /// The receipt.
    pub envelope: Envelope,
    /// Whether it says that the workspace has changes which go there only once it is stored.
    pub is_promise: bool,
}
