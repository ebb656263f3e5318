//! Reading, in blocking threads, over a connection of its own.

use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use rusqlite::{Connection, OptionalExtension as _, Row, params};
use toolproto::api::JobFilter;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::Envelope;

use super::rows::{Inserted, JobKind, JobRow, Stored};
use super::{Ledger, LedgerError, write};
use crate::session::event;

const COLUMNS: &str = "id, kind, uid, agent, request, workspace, priority, labels, submitted, ended, result";

impl Ledger {
    /// A job.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn job(&self, job: JobId) -> Result<Option<JobRow>, LedgerError> {
        self.read(move |connection| {
            let sql = format!("SELECT {COLUMNS} FROM jobs WHERE id = ?1");
            connection.prepare_cached(&sql)?.query_and_then(params![job.to_string()], row_of)?.next().transpose()
        })
        .await
    }

    /// What a user's idempotency key names already, compared with a request's digest.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn by_key(&self, uid: u32, key: String, request: Digest) -> Result<Option<Inserted>, LedgerError> {
        self.read(move |connection| Ok(write::by_key(connection, uid, &key, request)?)).await
    }

    /// The jobs that have not ended, oldest first.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn unfinished(&self) -> Result<Vec<JobRow>, LedgerError> {
        self.read(|connection| {
            let sql = format!("SELECT {COLUMNS} FROM jobs WHERE ended IS NULL ORDER BY id");
            connection.prepare_cached(&sql)?.query_and_then([], row_of)?.collect()
        })
        .await
    }

    /// Jobs, newest first: of `uid` only, if given, and as the filter's agent, label and page say; `wanted` looks at the rest.
    /// One more than the page holds, if there is one, so that the caller knows of the next page.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn jobs(
        &self,
        uid: Option<u32>,
        filter: JobFilter,
        wanted: impl Fn(&JobRow) -> bool + Send + 'static,
    ) -> Result<Vec<JobRow>, LedgerError> {
        self.read(move |connection| {
            let sql = format!(
                "SELECT {COLUMNS} FROM jobs WHERE (?1 IS NULL OR uid = ?1) AND (?2 IS NULL OR agent = ?2) \
                 AND (?3 IS NULL OR id < ?3) ORDER BY id DESC"
            );
            let before = filter.before.map(|id| id.to_string());
            let mut statement = connection.prepare_cached(&sql)?;
            let rows = statement.query_and_then(params![uid, filter.agent, before], row_of)?;
            rows.filter(|row| row.as_ref().map_or(true, |job| filter.takes_labels(&job.labels) && wanted(job)))
                .take(filter.limit() as usize + 1)
                .collect()
        })
        .await
    }

    /// A job's events after this number, in order, at most `limit`.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn events(&self, job: JobId, after: u64, limit: usize) -> Result<Vec<Stored>, LedgerError> {
        self.read(move |connection| {
            let sql = "SELECT sequence, version, time, elapsed_ms, event FROM events \
                       WHERE job = ?1 AND sequence > ?2 ORDER BY sequence LIMIT ?3";
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            connection
                .prepare_cached(sql)?
                .query_and_then(params![job.to_string(), after, limit], |row| {
                    let (version, time, text): (u32, String, String) = (row.get(1)?, row.get(2)?, row.get(4)?);
                    let misfit = |reason: String| LedgerError::Row { what: "event", job: job.to_string(), reason };
                    Ok(Stored {
                        sequence: row.get(0)?,
                        time: time.parse().map_err(|error: jiff::Error| misfit(error.to_string()))?,
                        elapsed_ms: row.get(3)?,
                        event: event::read(version, &text).map_err(|error| misfit(chain_of(&error)))?,
                    })
                })?
                .collect()
        })
        .await
    }

    /// A job's receipts, in order.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn receipts(&self, job: JobId) -> Result<Vec<Envelope>, LedgerError> {
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT envelope FROM receipts WHERE job = ?1 ORDER BY sequence")?
                .query_and_then(params![job.to_string()], |row| envelope_of(job, row))?
                .collect()
        })
        .await
    }

    /// A call's receipt, if it is stored.
    ///
    /// # Errors
    /// When it cannot be looked up.
    pub async fn receipt(&self, job: JobId, call: CallId) -> Result<Option<Envelope>, LedgerError> {
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT envelope FROM receipts WHERE job = ?1 AND call = ?2")?
                .query_and_then(params![job.to_string(), call.to_string()], |row| envelope_of(job, row))?
                .next()
                .transpose()
        })
        .await
    }

    /// A result of a job that is kept apart, by its digest.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn spilled(&self, job: JobId, digest: Digest) -> Result<Option<String>, LedgerError> {
        self.read(move |connection| {
            let sql = "SELECT value FROM spilled WHERE job = ?1 AND digest = ?2";
            let mut statement = connection.prepare_cached(sql)?;
            Ok(statement.query_row(params![job.to_string(), digest.to_string()], |row| row.get(0)).optional()?)
        })
        .await
    }

    /// Checks a job's chain of events: the number of the first row that is not what it was when it was written.
    ///
    /// # Errors
    /// When the rows cannot be read.
    pub async fn verify(&self, job: JobId) -> Result<Option<u64>, LedgerError> {
        self.read(move |connection| {
            let sql =
                "SELECT sequence, version, time, elapsed_ms, event, hash FROM events WHERE job = ?1 ORDER BY sequence";
            let mut statement = connection.prepare_cached(sql)?;
            let mut rows = statement.query(params![job.to_string()])?;
            let (mut previous, mut expected) = (Vec::new(), 1_u64);
            while let Some(row) = rows.next()? {
                let (sequence, version, time): (u64, u32, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
                let (elapsed_ms, event, hash): (u64, String, Vec<u8>) = (row.get(3)?, row.get(4)?, row.get(5)?);
                let right = write::chained(&previous, sequence, version, &time, elapsed_ms, &event);
                if sequence != expected || hash != right {
                    return Ok(Some(sequence));
                }
                (previous, expected) = (hash, expected + 1);
            }
            Ok(None)
        })
        .await
    }

    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, LedgerError> + Send + 'static,
    ) -> Result<T, LedgerError> {
        let reader = std::sync::Arc::clone(&self.reader);
        tokio::task::spawn_blocking(move || {
            let connection = reader.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            work(&connection)
        })
        .await
        .map_err(|error| LedgerError::Read(error.to_string()))?
    }
}

impl From<rusqlite::Error> for LedgerError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Read(error.to_string())
    }
}

fn row_of(row: &Row<'_>) -> Result<JobRow, LedgerError> {
    let (id, kind, request, labels): (String, String, String, String) =
        (row.get(0)?, row.get(1)?, row.get(4)?, row.get(7)?);
    let (submitted, ended, result): (String, Option<String>, Option<String>) = (row.get(8)?, row.get(9)?, row.get(10)?);
    let workspace: Option<Vec<u8>> = row.get(5)?;
    let (uid, agent, priority) = (row.get(2)?, row.get(3)?, row.get(6)?);
    let parse = || -> Result<JobRow, String> {
        Ok(JobRow {
            id: id.parse().map_err(|error| format!("{error}"))?,
            kind: JobKind::of(&kind).ok_or_else(|| format!("unknown kind `{kind}`"))?,
            uid,
            agent,
            request: serde_json::from_str(&request).map_err(|error| error.to_string())?,
            workspace: workspace.map(|bytes| PathBuf::from(std::ffi::OsString::from_vec(bytes))),
            priority,
            labels: serde_json::from_str(&labels).map_err(|error| error.to_string())?,
            submitted: submitted.parse().map_err(|error: jiff::Error| error.to_string())?,
            ended: ended.map(|text| text.parse()).transpose().map_err(|error: jiff::Error| error.to_string())?,
            result: result
                .map(|text| serde_json::from_str(&text))
                .transpose()
                .map_err(|error: serde_json::Error| error.to_string())?,
        })
    };
    parse().map_err(|reason| LedgerError::Row { what: "row", job: id.clone(), reason })
}

fn chain_of(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain_of(source)),
        None => error.to_string(),
    }
}

fn envelope_of(job: JobId, row: &Row<'_>) -> Result<Envelope, LedgerError> {
    let text: String = row.get(0)?;
    let misfit = |error: serde_json::Error| LedgerError::Row {
        what: "receipt",
        job: job.to_string(),
        reason: error.to_string(),
    };
    serde_json::from_str(&text).map_err(misfit)
}
