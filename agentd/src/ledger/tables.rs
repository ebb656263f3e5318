//! The tables, and the way from an earlier layout to this one.

use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;

/// The layout that this agentd writes.
const LAYOUT: i64 = 2;

const TABLES: &str = "
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    uid INTEGER NOT NULL,
    agent TEXT NOT NULL,
    request TEXT NOT NULL,
    request_digest TEXT NOT NULL,
    idempotency_key TEXT,
    workspace BLOB,
    priority INTEGER NOT NULL,
    labels TEXT NOT NULL,
    submitted TEXT NOT NULL,
    ended TEXT,
    result TEXT
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX jobs_by_key ON jobs (uid, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_unfinished ON jobs (id) WHERE ended IS NULL;
CREATE TABLE events (
    job TEXT NOT NULL REFERENCES jobs (id),
    sequence INTEGER NOT NULL,
    version INTEGER NOT NULL,
    time TEXT NOT NULL,
    elapsed_ms INTEGER NOT NULL,
    event TEXT NOT NULL,
    hash BLOB NOT NULL,
    PRIMARY KEY (job, sequence)
) STRICT, WITHOUT ROWID;
CREATE TABLE receipts (
    job TEXT NOT NULL REFERENCES jobs (id),
    sequence INTEGER NOT NULL,
    call TEXT,
    envelope TEXT NOT NULL,
    PRIMARY KEY (job, sequence)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX receipts_by_call ON receipts (job, call) WHERE call IS NOT NULL;
";

/// Since layout 2. With row ids, since the values are large.
const SPILLED: &str = "
CREATE TABLE spilled (
    job TEXT NOT NULL REFERENCES jobs (id),
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (job, digest)
) STRICT;
";

/// The tables cannot be brought up to date.
pub(super) enum MigrateError {
    /// They are of a later agentd.
    Later(i64),
    /// The database refused.
    Sqlite(rusqlite::Error),
}

impl From<rusqlite::Error> for MigrateError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// A connection with the settings that durability needs.
pub(super) fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(10))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // In WAL mode NORMAL loses acknowledged transactions with the power.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    Ok(connection)
}

/// Makes the tables, or brings them up to date.
pub(super) fn migrate(connection: &mut Connection) -> Result<(), MigrateError> {
    let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    let layout: i64 = transaction.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    match layout {
        0 => {
            transaction.execute_batch(TABLES)?;
            transaction.execute_batch(SPILLED)?;
        }
        1 => transaction.execute_batch(SPILLED)?,
        LAYOUT => {}
        later => return Err(MigrateError::Later(later)),
    }
    transaction.pragma_update(None, "user_version", LAYOUT)?;
    transaction.commit()?;
    Ok(())
}
