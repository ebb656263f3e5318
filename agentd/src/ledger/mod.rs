//! The ledger: what was acknowledged is in here, on disk. SQLite in WAL mode with synchronous FULL.
//!
//! ```text
//!  many tasks ──▶ queue ──▶ one writer: one transaction for all that wait ──▶ fsync ──▶ acknowledgements
//!  readers    ──▶ a connection of their own; both in blocking threads
//! ```
//!
//! Events are append-only and chained per job: each row's hash covers the hash before it, so that a row that was changed or
//! taken away afterwards is found by [`Ledger::verify`]. A failing write is reported to whoever asked for it, and later writes
//! are tried again: the ledger recovers as soon as the disk does.

mod read;
mod rows;
mod tables;
mod write;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rusqlite::Connection;
use tokio::sync::oneshot;
use toolproto::ids::JobId;
use toolproto::job::JobResult;
use toolproto::units::Bytes;

pub use rows::{Before, Inserted, JobKind, JobRow, NewJob, Stored, StoredReceipt};

use crate::spill::Spilled;

/// The file in the ledger's directory.
pub const FILE: &str = "ledger.sqlite";

/// The ledger did not do what it was asked to. Nothing of the request is stored.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LedgerError {
    /// The directory or the file cannot be used.
    #[error("the ledger {path} cannot be opened: {reason}", path = .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// It was made by a later agentd.
    #[error("the ledger has layout {0}, later than this agentd knows; start the agentd that made it")]
    Later(i64),
    /// The database refused: no space, an I/O error.
    #[error("the ledger cannot be written: {0}")]
    Write(String),
    /// The database cannot be read.
    #[error("the ledger cannot be read: {0}")]
    Read(String),
    /// A row is not what this agentd writes.
    #[error("the ledger's {what} of job {job} cannot be read: {reason}")]
    Row {
        /// What it is.
        what: &'static str,
        /// The job.
        job: String,
        /// What is wrong with it.
        reason: String,
    },
    /// agentd is ending.
    #[error("the ledger is closed")]
    Closed,
}

/// The ledger. Cheap to clone.
#[derive(Clone)]
pub struct Ledger {
    writer: Arc<write::Writer>,
    reader: Arc<Mutex<Connection>>,
}

impl Ledger {
    /// Opens the ledger in this directory, makes it if there is none, and brings an earlier layout up to date.
    ///
    /// # Errors
    /// When the file cannot be used.
    pub fn open(directory: &Path) -> Result<Self, LedgerError> {
        let path = directory.join(FILE);
        let failed = |reason: String| LedgerError::Open { path: path.clone(), reason };
        let mut connection = tables::connect(&path).map_err(|error| failed(error.to_string()))?;
        tables::migrate(&mut connection).map_err(|error| match error {
            tables::MigrateError::Later(version) => LedgerError::Later(version),
            tables::MigrateError::Sqlite(error) => failed(error.to_string()),
        })?;
        let reader = tables::connect(&path).map_err(|error| failed(error.to_string()))?;
        Ok(Self { writer: Arc::new(write::Writer::new(connection)), reader: Arc::new(Mutex::new(reader)) })
    }

    /// Stores a new job, unless its user has used the idempotency key before.
    ///
    /// # Errors
    /// When it cannot be stored.
    pub async fn insert(&self, job: NewJob) -> Result<Inserted, LedgerError> {
        self.write(|done| write::Request::Insert { job: Box::new(job), done }).await
    }

    /// Stores events and receipts of a job, all or none. With a result, the job is done.
    ///
    /// # Errors
    /// When they cannot be stored.
    pub async fn append(
        &self,
        job: JobId,
        events: Vec<Stored>,
        receipts: Vec<StoredReceipt>,
        result: Option<JobResult>,
    ) -> Result<(), LedgerError> {
        self.write(|done| write::Request::Append { job, events, receipts, result: result.map(Box::new), done }).await
    }

    /// Stores further receipts of a direct call, the sealing one last, in place of the sealing one that there is.
    ///
    /// # Errors
    /// When that cannot be stored.
    pub async fn amend(&self, job: JobId, receipts: Vec<StoredReceipt>) -> Result<(), LedgerError> {
        self.write(|done| write::Request::Amend { job, receipts, done }).await
    }

    /// Stores that a job which had ended goes on. Its result and its sealing receipt are no more: it gets others.
    ///
    /// # Errors
    /// When that cannot be stored.
    pub async fn reopen(&self, job: JobId, event: Stored) -> Result<(), LedgerError> {
        self.write(|done| write::Request::Reopen { job, event: Box::new(event), done }).await
    }

    /// Marks a job as done that has no result: a direct call's.
    ///
    /// # Errors
    /// When that cannot be stored.
    pub async fn close(&self, job: JobId) -> Result<(), LedgerError> {
        self.write(|done| write::Request::Close { job, done }).await
    }

    /// Takes a job back that was never begun.
    ///
    /// # Errors
    /// When that cannot be stored.
    pub async fn forget(&self, job: JobId) -> Result<(), LedgerError> {
        self.write(|done| write::Request::Forget { job, done }).await
    }

    /// Keeps a result of a job apart from its events, unless the job's results together would then be larger than `room`.
    /// Whether it is kept.
    ///
    /// # Errors
    /// When it cannot be stored.
    pub async fn spill(&self, job: JobId, spilled: Spilled, room: Bytes) -> Result<bool, LedgerError> {
        self.write(|done| write::Request::Spill { job, spilled, room, done }).await
    }

    /// Deletes what ended before these times. A job's row goes when none of its receipts is left. Which jobs' events were
    /// deleted.
    ///
    /// # Errors
    /// When that cannot be stored.
    pub async fn expire(&self, before: Before) -> Result<Vec<JobId>, LedgerError> {
        self.write(|done| write::Request::Expire { before, done }).await
    }

    async fn write<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, LedgerError>>) -> write::Request,
    ) -> Result<T, LedgerError> {
        let (done, answer) = oneshot::channel();
        if self.writer.enqueue(request(done)) {
            let writer = Arc::clone(&self.writer);
            // Nobody waits for the writer itself: each request has its own acknowledgement.
            drop(tokio::task::spawn_blocking(move || writer.serve()));
        }
        answer.await.map_err(|_| LedgerError::Closed)?
    }
}

#[cfg(test)]
mod tests;
