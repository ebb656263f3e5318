use jiff::Timestamp;
use serde_json::json;
use toolproto::digest::Digest;

use super::*;
use crate::session::event::Event;

fn job(key: Option<&str>, body: &str) -> NewJob {
    NewJob {
        id: JobId::generate(),
        kind: JobKind::Agent,
        uid: 1000,
        agent: "reporter".to_owned(),
        request: json!({"body": body}),
        idempotency_key: key.map(str::to_owned),
        request_digest: Digest::sha256(body.as_bytes()),
        workspace: Some("/srv/w".into()),
        priority: 0,
        labels: [("team".to_owned(), "sales".to_owned())].into(),
        submitted: Timestamp::now(),
    }
}

fn turn(sequence: u64) -> Stored {
    let event = Event::TurnBegun { turn: u32::try_from(sequence).unwrap() };
    Stored { sequence, time: Timestamp::now(), elapsed_ms: sequence * 10, event }
}

/// So many hours from now.
fn before(jobs: i64, receipts: i64, artifacts: i64) -> Before {
    let hours = |n: i64| Timestamp::now() + jiff::SignedDuration::from_hours(n);
    Before { jobs: hours(jobs), receipts: hours(receipts), artifacts: hours(artifacts) }
}

fn spilled(text: &str) -> Spilled {
    Spilled { digest: Digest::sha256(text.as_bytes()), text: text.to_owned() }
}

#[tokio::test]
async fn what_was_acknowledged_is_there_after_reopening() {
    let folder = tempfile::tempdir().unwrap();
    let stored = job(None, "a");
    {
        let ledger = Ledger::open(folder.path()).unwrap();
        assert_eq!(ledger.insert(stored.clone()).await.unwrap(), Inserted::New);
        ledger.append(stored.id, vec![turn(1), turn(2)], Vec::new(), None).await.unwrap();
    }
    let ledger = Ledger::open(folder.path()).unwrap();
    let row = ledger.job(stored.id).await.unwrap().unwrap();
    assert_eq!((row.uid, row.workspace, row.labels), (1000, stored.workspace, stored.labels));
    assert_eq!(ledger.unfinished().await.unwrap().len(), 1);
    let events = ledger.events(stored.id, 1, 10).await.unwrap();
    assert_eq!(events.iter().map(|event| event.sequence).collect::<Vec<_>>(), [2]);
    ledger.append(stored.id, vec![turn(3)], Vec::new(), None).await.unwrap();
    assert_eq!(ledger.verify(stored.id).await.unwrap(), None);
}

#[tokio::test]
async fn a_key_names_one_job_per_user() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path()).unwrap();
    let first = job(Some("k"), "a");
    assert_eq!(ledger.insert(first.clone()).await.unwrap(), Inserted::New);
    assert_eq!(ledger.insert(job(Some("k"), "a")).await.unwrap(), Inserted::Known(first.id));
    assert_eq!(ledger.insert(job(Some("k"), "b")).await.unwrap(), Inserted::Conflict(first.id));
    assert_eq!(ledger.insert(NewJob { uid: 1001, ..job(Some("k"), "b") }).await.unwrap(), Inserted::New);
}

#[tokio::test]
async fn a_refused_write_stores_nothing_and_harms_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path()).unwrap();
    let (one, other) = (job(None, "a"), job(None, "b"));
    ledger.insert(one.clone()).await.unwrap();
    ledger.insert(other.clone()).await.unwrap();
    ledger.append(one.id, vec![turn(1)], Vec::new(), None).await.unwrap();
    let (refused, stored) = tokio::join!(
        ledger.append(one.id, vec![turn(2), turn(1)], Vec::new(), None),
        ledger.append(other.id, vec![turn(1)], Vec::new(), None),
    );
    assert!(matches!(refused, Err(LedgerError::Write(_))));
    stored.unwrap();
    assert_eq!(ledger.events(one.id, 0, 10).await.unwrap().len(), 1);
    assert_eq!(ledger.events(other.id, 0, 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_row_that_was_changed_afterwards_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path()).unwrap();
    let stored = job(None, "a");
    ledger.insert(stored.clone()).await.unwrap();
    ledger.append(stored.id, vec![turn(1), turn(2), turn(3)], Vec::new(), None).await.unwrap();
    assert_eq!(ledger.verify(stored.id).await.unwrap(), None);
    let outside = Connection::open(folder.path().join(FILE)).unwrap();
    outside.execute("UPDATE events SET elapsed_ms = 7 WHERE sequence = 2", []).unwrap();
    assert_eq!(ledger.verify(stored.id).await.unwrap(), Some(2));
}

#[tokio::test]
async fn a_full_disk_is_reported_and_passes() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path()).unwrap();
    let stored = job(None, "a");
    ledger.insert(stored.clone()).await.unwrap();
    // A trigger stands for a disk that takes nothing.
    let outside = Connection::open(folder.path().join(FILE)).unwrap();
    outside
        .execute_batch("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(FAIL, 'disk full'); END")
        .unwrap();
    let error = ledger.append(stored.id, vec![turn(1)], Vec::new(), None).await.unwrap_err();
    assert!(error.to_string().contains("disk full"), "{error}");
    outside.execute_batch("DROP TRIGGER full").unwrap();
    ledger.append(stored.id, vec![turn(1)], Vec::new(), None).await.unwrap();
}

#[tokio::test]
async fn a_later_layout_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    drop(Ledger::open(folder.path()).unwrap());
    let outside = Connection::open(folder.path().join(FILE)).unwrap();
    outside.pragma_update(None, "user_version", 99).unwrap();
    assert!(matches!(Ledger::open(folder.path()), Err(LedgerError::Later(99))));
}

#[tokio::test]
async fn what_is_older_than_it_is_kept_goes_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(folder.path()).unwrap();
    let (ended, unfinished) = (job(None, "a"), job(None, "b"));
    let receipt = |sequence| StoredReceipt {
        sequence,
        call: None,
        envelope: toolproto::receipt::Envelope {
            payload: String::new(),
            payload_type: String::new(),
            signatures: Vec::new(),
        },
        is_promise: false,
    };
    for one in [&ended, &unfinished] {
        ledger.insert(one.clone()).await.unwrap();
        ledger.append(one.id, vec![turn(1)], vec![receipt(1)], None).await.unwrap();
    }
    ledger.close(ended.id).await.unwrap();
    ledger.expire(before(-1, -1, -1)).await.unwrap();
    assert_eq!(ledger.events(ended.id, 0, 10).await.unwrap().len(), 1);
    ledger.expire(before(1, -1, -1)).await.unwrap();
    assert!(ledger.events(ended.id, 0, 10).await.unwrap().is_empty());
    assert_eq!(ledger.receipts(ended.id).await.unwrap().len(), 1, "a receipt that is kept for longer is gone");
    assert!(ledger.job(ended.id).await.unwrap().is_some());
    ledger.expire(before(1, 1, 1)).await.unwrap();
    assert_eq!(ledger.job(ended.id).await.unwrap(), None);
    assert_eq!(ledger.events(unfinished.id, 0, 10).await.unwrap().len(), 1, "an unfinished job lost its events");
    assert_eq!(ledger.receipts(unfinished.id).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_result_that_is_kept_apart_is_its_jobs_alone_and_goes_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (job(None, "a"), job(None, "b"));
    let (value, room) = (spilled("[1,2,3]"), Bytes(10));
    {
        let ledger = Ledger::open(folder.path()).unwrap();
        ledger.insert(one.clone()).await.unwrap();
        ledger.insert(other.clone()).await.unwrap();
        assert!(ledger.spill(one.id, value.clone(), room).await.unwrap());
        assert!(ledger.spill(one.id, value.clone(), room).await.unwrap(), "the same again takes no room");
        assert!(!ledger.spill(one.id, spilled("[4,5]"), room).await.unwrap());
        assert!(ledger.spill(other.id, spilled("[4,5]"), room).await.unwrap());
    }
    let ledger = Ledger::open(folder.path()).unwrap();
    assert_eq!(ledger.spilled(one.id, value.digest).await.unwrap().as_deref(), Some("[1,2,3]"));
    assert_eq!(ledger.spilled(other.id, value.digest).await.unwrap(), None);
    assert_eq!(ledger.spilled(one.id, spilled("[4,5]").digest).await.unwrap(), None);
    // Both ways: by its own time, and at the latest with the job, whose row could not go otherwise.
    ledger.close(one.id).await.unwrap();
    ledger.expire(before(-1, -1, -1)).await.unwrap();
    assert!(ledger.spilled(one.id, value.digest).await.unwrap().is_some());
    ledger.expire(before(-1, -1, 1)).await.unwrap();
    assert_eq!(ledger.spilled(one.id, value.digest).await.unwrap(), None);
    ledger.close(other.id).await.unwrap();
    ledger.expire(before(1, 1, -1)).await.unwrap();
    assert_eq!(ledger.job(other.id).await.unwrap(), None);
}

#[tokio::test]
async fn an_earlier_layout_is_brought_up_to_date() {
    let folder = tempfile::tempdir().unwrap();
    let stored = job(None, "a");
    Ledger::open(folder.path()).unwrap().insert(stored.clone()).await.unwrap();
    let outside = Connection::open(folder.path().join(FILE)).unwrap();
    outside.execute_batch("DROP TABLE spilled; PRAGMA user_version = 1").unwrap();
    let ledger = Ledger::open(folder.path()).unwrap();
    assert!(ledger.job(stored.id).await.unwrap().is_some());
    assert!(ledger.spill(stored.id, spilled("[1]"), Bytes(10)).await.unwrap());
}
