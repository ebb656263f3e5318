//! The writer: takes all requests that wait, stores them in one transaction, and acknowledges them after the sync.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension as _, params};
use sha2::Digest as _;
use tokio::sync::oneshot;
use toolproto::digest::Digest;
use toolproto::ids::JobId;
use toolproto::job::JobResult;
use toolproto::units::Bytes;

use super::LedgerError;
use super::rows::{Before, Inserted, NewJob, Stored, StoredReceipt};
use crate::session::event::EVENT_VERSION;
use crate::spill::Spilled;

/// The most requests of one transaction.
const GROUP: usize = 256;

type Done<T> = oneshot::Sender<Result<T, LedgerError>>;

/// Something to be stored.
pub(super) enum Request {
    Insert {
        job: Box<NewJob>,
        done: Done<Inserted>,
    },
    Append {
        job: JobId,
        events: Vec<Stored>,
        receipts: Vec<StoredReceipt>,
        result: Option<Box<JobResult>>,
        done: Done<()>,
    },
    Amend {
        job: JobId,
        receipts: Vec<StoredReceipt>,
        done: Done<()>,
    },
    Reopen {
        job: JobId,
        event: Box<Stored>,
        done: Done<()>,
    },
    Close {
        job: JobId,
        done: Done<()>,
    },
    Forget {
        job: JobId,
        done: Done<()>,
    },
    Spill {
        job: JobId,
        spilled: Spilled,
        room: Bytes,
        done: Done<bool>,
    },
    Expire {
        before: Before,
        done: Done<Vec<JobId>>,
    },
}

/// A request that was carried out within the transaction; its acknowledgement waits for the sync.
type Acknowledge = Box<dyn FnOnce(Result<(), LedgerError>)>;

/// The one connection that writes, and the requests that wait for it.
pub(super) struct Writer {
    connection: Mutex<Connection>,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<Request>,
    served: bool,
}

impl Writer {
    pub(super) fn new(connection: Connection) -> Self {
        Self { connection: Mutex::new(connection), queue: Mutex::default() }
    }

    /// Adds a request. Whether somebody must now call [`Writer::serve`].
    pub(super) fn enqueue(&self, request: Request) -> bool {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.requests.push_back(request);
        !std::mem::replace(&mut queue.served, true)
    }

    /// Serves requests, each time all that wait in one transaction, until none waits.
    pub(super) fn serve(&self) {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(group) = self.next_group() {
            let mut waiting = Vec::new();
            let stored = store(&mut connection, group, &mut waiting).map_err(|error| {
                tracing::error!(%error, "the ledger cannot be written");
                LedgerError::Write(error.to_string())
            });
            for acknowledge in waiting {
                acknowledge(stored.clone());
            }
        }
    }

    fn next_group(&self) -> Option<Vec<Request>> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let size = queue.requests.len().min(GROUP);
        queue.served = size > 0;
        (size > 0).then(|| queue.requests.drain(..size).collect())
    }
}

/// Stores a group in one transaction. Requests whose answer is not known yet are left in `waiting`; those dropped on the way
/// out of an error, by a database that cannot even begin, are answered by their channel's end.
fn store(connection: &mut Connection, group: Vec<Request>, waiting: &mut Vec<Acknowledge>) -> rusqlite::Result<()> {
    let mut transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    for request in group {
        // A savepoint each, so that one that fails leaves the others of its group unharmed.
        let mut savepoint = transaction.savepoint()?;
        let carried_out = match request {
            Request::Insert { job, done } => settle(insert(&savepoint, &job), done, waiting),
            Request::Append { job, events, receipts, result, done } => {
                settle(append(&savepoint, job, &events, &receipts, result.as_deref()), done, waiting)
            }
            Request::Amend { job, receipts, done } => settle(amend(&savepoint, job, &receipts), done, waiting),
            Request::Reopen { job, event, done } => settle(reopen(&savepoint, job, *event), done, waiting),
            Request::Close { job, done } => settle(close(&savepoint, job), done, waiting),
            Request::Spill { job, spilled, room, done } => {
                settle(spill(&savepoint, job, &spilled, room), done, waiting)
            }
            Request::Expire { before, done } => settle(expire(&savepoint, before), done, waiting),
            Request::Forget { job, done } => settle(forget(&savepoint, job), done, waiting),
        };
        if carried_out {
            savepoint.commit()?;
        } else {
            savepoint.rollback()?;
        }
    }
    transaction.commit()
}

/// Answers a request that failed at once, and one that did not after the sync.
fn settle<T: 'static>(outcome: rusqlite::Result<T>, done: Done<T>, waiting: &mut Vec<Acknowledge>) -> bool {
    // In both cases, whoever asked may have gone; then nobody needs the answer.
    match outcome {
        Ok(value) => {
            waiting.push(Box::new(move |stored: Result<(), LedgerError>| drop(done.send(stored.map(|()| value)))));
            true
        }
        Err(error) => {
            tracing::error!(%error, "the ledger refused a write");
            drop(done.send(Err(LedgerError::Write(error.to_string()))));
            false
        }
    }
}

/// What a user's idempotency key names already.
pub(super) fn by_key(
    connection: &Connection,
    uid: u32,
    key: &str,
    request: Digest,
) -> rusqlite::Result<Option<Inserted>> {
    let known: Option<(String, String)> = connection
        .prepare_cached("SELECT id, request_digest FROM jobs WHERE uid = ?1 AND idempotency_key = ?2")?
        .query_row(params![uid, key], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((id, digest)) = known else { return Ok(None) };
    let id: JobId = id.parse().map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
    Ok(Some(if digest == request.to_string() { Inserted::Known(id) } else { Inserted::Conflict(id) }))
}

fn spill(connection: &Connection, job: JobId, spilled: &Spilled, room: Bytes) -> rusqlite::Result<bool> {
    let (id, digest) = (job.to_string(), spilled.digest.to_string());
    let known = connection
        .prepare_cached("SELECT 1 FROM spilled WHERE job = ?1 AND digest = ?2")?
        .exists(params![id, digest])?;
    if known {
        return Ok(true);
    }
    let kept: u64 = connection
        .prepare_cached("SELECT coalesce(sum(bytes), 0) FROM spilled WHERE job = ?1")?
        .query_row(params![id], |row| row.get(0))?;
    let bytes = spilled.text.len() as u64;
    if kept.saturating_add(bytes) > room.0 {
        return Ok(false);
    }
    connection
        .prepare_cached("INSERT INTO spilled (job, digest, bytes, value) VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![id, digest, bytes, spilled.text])?;
    Ok(true)
}

fn expire(connection: &Connection, before: Before) -> rusqlite::Result<Vec<JobId>> {
    let Before { jobs, receipts, artifacts } = before;
    // Times of one precision and zone compare as text up to their fraction, which is close enough for days.
    let ended = "SELECT id FROM jobs WHERE ended IS NOT NULL AND ended < ?1";
    let delete = |table: &str, before: Timestamp| {
        let sql = format!("DELETE FROM {table} WHERE job IN ({ended})");
        connection.prepare_cached(&sql)?.execute(params![before.to_string()])
    };
    let gone = connection
        .prepare_cached(&format!("SELECT DISTINCT job FROM events WHERE job IN ({ended})"))?
        .query_map(params![jobs.to_string()], |row| {
            let id: String = row.get(0)?;
            id.parse().map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(error)))
        })?
        .collect::<rusqlite::Result<Vec<JobId>>>()?;
    delete("events", jobs)?;
    delete("receipts", receipts)?;
    delete("spilled", artifacts.max(jobs))?;
    // A job of which receipts are kept keeps its row: they belong to somebody.
    connection
        .prepare_cached(
            "DELETE FROM jobs WHERE ended IS NOT NULL AND ended < ?1 \
             AND NOT EXISTS (SELECT 1 FROM receipts WHERE job = id)",
        )?
        .execute(params![jobs.to_string()])?;
    Ok(gone)
}

fn forget(connection: &Connection, job: JobId) -> rusqlite::Result<()> {
    connection.prepare_cached("DELETE FROM jobs WHERE id = ?1")?.execute(params![job.to_string()])?;
    Ok(())
}

fn insert(connection: &Connection, job: &NewJob) -> rusqlite::Result<Inserted> {
    if let Some(key) = &job.idempotency_key
        && let Some(known) = by_key(connection, job.uid, key, job.request_digest)?
    {
        return Ok(known);
    }
    let workspace = job.workspace.as_ref().map(|path| std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()));
    connection
        .prepare_cached(
            "INSERT INTO jobs (id, kind, uid, agent, request, request_digest, idempotency_key, workspace, priority, \
             labels, submitted) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .execute(params![
            job.id.to_string(),
            job.kind.as_str(),
            job.uid,
            job.agent,
            job.request.to_string(),
            job.request_digest.to_string(),
            job.idempotency_key,
            workspace,
            job.priority,
            serde_json::to_string(&job.labels).map_err(not_json)?,
            job.submitted.to_string(),
        ])?;
    Ok(Inserted::New)
}

fn append(
    connection: &Connection,
    job: JobId,
    events: &[Stored],
    receipts: &[StoredReceipt],
    result: Option<&JobResult>,
) -> rusqlite::Result<()> {
    let id = job.to_string();
    let mut hash: Vec<u8> = connection
        .prepare_cached("SELECT hash FROM events WHERE job = ?1 ORDER BY sequence DESC LIMIT 1")?
        .query_row(params![id], |row| row.get(0))
        .optional()?
        .unwrap_or_default();
    for stored in events {
        let event = serde_json::to_string(&stored.event).map_err(not_json)?;
        let time = stored.time.to_string();
        hash = chained(&hash, stored.sequence, EVENT_VERSION, &time, stored.elapsed_ms, &event);
        connection
            .prepare_cached(
                "INSERT INTO events (job, sequence, version, time, elapsed_ms, event, hash) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?
            .execute(params![id, stored.sequence, EVENT_VERSION, time, stored.elapsed_ms, event, hash])?;
    }
    for receipt in receipts {
        let envelope = serde_json::to_string(&receipt.envelope).map_err(not_json)?;
        connection
            .prepare_cached("INSERT INTO receipts (job, sequence, call, envelope) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![id, receipt.sequence, receipt.call.map(|call| call.to_string()), envelope])?;
    }
    if let Some(result) = result {
        connection.prepare_cached("UPDATE jobs SET result = ?2, ended = ?3 WHERE id = ?1")?.execute(params![
            id,
            serde_json::to_string(result).map_err(not_json)?,
            jiff::Timestamp::now().to_string()
        ])?;
    }
    Ok(())
}

/// The job's chain of receipts goes on behind its last call, and is closed anew.
fn amend(connection: &Connection, job: JobId, receipts: &[StoredReceipt]) -> rusqlite::Result<()> {
    unseal(connection, job)?;
    append(connection, job, &[], receipts, None)
}

fn unseal(connection: &Connection, job: JobId) -> rusqlite::Result<()> {
    let delete = "DELETE FROM receipts WHERE job = ?1 AND call IS NULL";
    connection.prepare_cached(delete)?.execute(params![job.to_string()])?;
    Ok(())
}

/// The job has no result any more, and its chain of receipts no end: it gets another when the job ends again.
fn reopen(connection: &Connection, job: JobId, event: Stored) -> rusqlite::Result<()> {
    let id = job.to_string();
    unseal(connection, job)?;
    connection.prepare_cached("UPDATE jobs SET ended = NULL, result = NULL WHERE id = ?1")?.execute(params![id])?;
    append(connection, job, &[event], &[], None)
}

fn close(connection: &Connection, job: JobId) -> rusqlite::Result<()> {
    connection
        .prepare_cached("UPDATE jobs SET ended = ?2 WHERE id = ?1 AND ended IS NULL")?
        .execute(params![job.to_string(), jiff::Timestamp::now().to_string()])?;
    Ok(())
}

fn not_json(error: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(Box::new(error))
}

/// The hash of a row: SHA-256 over the hash before it (nothing for the first) and the row, each part with its length.
pub(super) fn chained(
    previous: &[u8],
    sequence: u64,
    version: u32,
    time: &str,
    elapsed_ms: u64,
    event: &str,
) -> Vec<u8> {
    let mut hasher = sha2::Sha256::new();
    let (sequence, version, elapsed) = (sequence.to_be_bytes(), version.to_be_bytes(), elapsed_ms.to_be_bytes());
    for part in [previous, &sequence, &version, time.as_bytes(), &elapsed, event.as_bytes()] {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().to_vec()
}
