//! At start: jobs that an earlier agentd left unfinished.

use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use jiff::Timestamp;
use serde_json::{Value, json};
use toolproto::api::Phase;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::job::{JobRequest, Problem};

use super::{Arrival, Dispatcher, Prepared, submit, unlinked, unreadable};
use crate::agent::Agent;
use crate::launch::{Launch, LinkError};
use crate::ledger::{JobKind, JobRow, LedgerError, Stored};
use crate::session::Progress;
use crate::session::Session;
use crate::session::conclude::{self, Failure};
use crate::session::event::{CallRecord, Event, Interruption};

/// How many jobs are prepared at once.
const AT_ONCE: usize = 32;

impl<L: Launch> Dispatcher<L> {
    /// Goes on with each unfinished job; what cannot go on ends with INTERRUPTED.
    pub(super) async fn recover(&self) -> Result<(), LedgerError> {
        let rows = self.inner.shared.ledger.unfinished().await?;
        // Several at once, since each waits for the ledger, the launcher and its worker in turn; begun in their order all the same.
        let mut prepared = stream::iter(&rows)
            .map(|row| async move {
                let prepared = match row.kind {
                    JobKind::Agent => Some(self.prepared(row).await),
                    JobKind::Call | JobKind::Exec | JobKind::Rollback => None,
                };
                (row, prepared)
            })
            .buffered(AT_ONCE);
        while let Some((row, prepared)) = prepared.next().await {
            let Some(prepared) = prepared else {
                tracing::warn!(job = %row.id, "agentd ended while this direct call ran");
                self.inner.shared.ledger.close(row.id).await?;
                continue;
            };
            let enqueued = prepared.and_then(|prepared| {
                let enqueued = self.enqueue(row, prepared, Arrival::Again);
                enqueued.map_err(|full| Hindrance::Reason(full.to_string()))
            });
            match enqueued {
                Ok(()) => tracing::info!(job = %row.id, "job goes on"),
                Err(Hindrance::Reason(reason)) => {
                    tracing::warn!(job = %row.id, reason, "job cannot go on");
                    self.end_interrupted(row, &reason).await?;
                }
                // One job that cannot be read does not keep the others from going on.
                Err(Hindrance::Ledger(error)) => tracing::error!(job = %row.id, %error, "job cannot be read"),
                Err(Hindrance::Link(error)) => {
                    tracing::error!(job = %row.id, %error, "job is left to the next start");
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// A job as an earlier agentd left it, with its grant.
    async fn prepared(&self, row: &JobRow) -> Result<Prepared, Hindrance> {
        let (session, sequence) = self.restored(row).await?;
        let offer = self.inner.offer();
        let (agent, model) = offer
            .agents
            .get(&row.agent)
            .ok_or_else(|| Hindrance::Reason(format!("there is no agent `{}` any more", row.agent)))?;
        if session.agent().is_some_and(|digest| digest != agent.digest) {
            return Err(Hindrance::Reason(format!("agent `{}` is another one now", row.agent)));
        }
        let (receipts, dangling) = (session.receipts().count, session.without_end());
        let admitted = self.inner.shared.launch.readmit(row.id, receipts, dangling).await;
        let admission = match admitted {
            Ok(Ok(admission)) => admission,
            Ok(Err(rejection)) => return Err(Hindrance::Reason(rejection.message)),
            Err(error) => return Err(Hindrance::Link(error)),
        };
        let begin = match session.agent() {
            Some(_) => Event::Resumed { never_started: admission.never_started },
            None => self.begin_of(agent, row, admission.workspace).await?,
        };
        let evidence_head = self.evidence_head(row, &session).await?;
        let (agent, model) = (agent.clone(), model.clone());
        Ok(Prepared { agent, model, session, sequence, evidence_head, begin: Some(begin) })
    }

    /// How a job begins that was accepted and never did.
    async fn begin_of(&self, agent: &Agent, row: &JobRow, workspace: Option<PathBuf>) -> Result<Event, Hindrance> {
        let request: JobRequest =
            serde_json::from_value(row.request.clone()).map_err(|error| misfit(row, error.to_string()))?;
        let budget = submit::check(agent, &request).map_err(|problem| Hindrance::Reason(problem.detail))?;
        let conversation = match request.continues {
            None => Vec::new(),
            Some(earlier) => {
                let earlier = self.inner.shared.ledger.job(earlier).await?;
                let earlier =
                    earlier.ok_or_else(|| Hindrance::Reason("the job that it continues has gone".to_owned()))?;
                let before = self.continued(&earlier, &request).await;
                before.map_err(|problem| Hindrance::Reason(problem.detail))?.conversation
            }
        };
        Ok(Event::NewGoal { goal: request.goal, agent: agent.digest, budget, workspace, conversation })
    }

    /// The digest of a job's last evidence record.
    pub(super) async fn evidence_head(&self, row: &JobRow, session: &Session) -> Result<Option<Digest>, Hindrance> {
        let receipts = self.inner.shared.ledger.receipts(row.id).await?;
        // After them may stand the seal of a job that had ended.
        let calls = usize::try_from(session.receipts().count).unwrap_or(usize::MAX);
        let Some(last) = receipts.into_iter().take(calls).next_back() else { return Ok(None) };
        let receipt = last.receipt().map_err(|error| misfit(row, error.to_string()))?;
        let digest = Digest::of_json(&receipt.evidence.record).map_err(|error| misfit(row, error.to_string()))?;
        Ok(Some(digest))
    }

    async fn end_interrupted(&self, row: &JobRow, reason: &str) -> Result<(), LedgerError> {
        let (mut session, mut sequence) = self.restored(row).await?;
        if session.phase() == Phase::Idle && session.deadline().is_none() {
            // It never began, so there is nothing to fold: the result alone says what became of it.
            let failure = Failure::new(Code::Interrupted, reason);
            let result = conclude::failed(&session, row.id, Duration::ZERO, failure);
            return self.inner.shared.ledger.append(row.id, Vec::new(), Vec::new(), Some(result)).await;
        }
        if matches!(session.phase(), Phase::Planning | Phase::Executing) {
            let open = session.batch().iter().filter(|one| !matches!(one.progress, Progress::Done(_)));
            let results = open.map(|one| (one.planned.call, interrupted())).collect();
            let event = Event::Interrupted { cause: Interruption::Restart, results };
            self.store(row, &mut session, &mut sequence, event).await?;
        }
        let failure = Failure::new(Code::Interrupted, reason);
        let event = conclude::failure(&session, row.id, session.elapsed(), failure);
        self.store(row, &mut session, &mut sequence, event).await
    }

    /// A job's session, folded from its events, and the number of the last.
    pub(super) async fn restored(&self, row: &JobRow) -> Result<(Session, u64), LedgerError> {
        let mut session = Session::new();
        let mut sequence = 0;
        for stored in self.inner.shared.ledger.events(row.id, 0, usize::MAX).await? {
            let at = Duration::from_millis(stored.elapsed_ms);
            session.apply(&stored.event, at).map_err(|error| misfit(row, error.to_string()))?;
            sequence = stored.sequence;
        }
        Ok((session, sequence))
    }

    async fn store(
        &self,
        row: &JobRow,
        session: &mut Session,
        sequence: &mut u64,
        event: Event,
    ) -> Result<(), LedgerError> {
        session.apply(&event, session.elapsed()).map_err(|error| misfit(row, error.to_string()))?;
        *sequence += 1;
        let result = session.result().cloned();
        let elapsed_ms = u64::try_from(session.elapsed().as_millis()).unwrap_or(u64::MAX);
        let stored = Stored { sequence: *sequence, time: Timestamp::now(), elapsed_ms, event };
        self.inner.shared.ledger.append(row.id, vec![stored], Vec::new(), result).await
    }
}

/// Why a job does not go on.
pub(super) enum Hindrance {
    /// It cannot; it ends.
    Reason(String),
    /// It cannot be read; it stays as it is.
    Ledger(LedgerError),
    /// The launcher is gone, and agentd with it in a moment; the next one goes on.
    Link(LinkError),
}

impl Hindrance {
    /// As whoever asked is told of it.
    pub(super) fn problem(self) -> Problem {
        match self {
            Self::Reason(reason) => Problem::new(Code::Interrupted, reason),
            Self::Ledger(error) => unreadable(error),
            Self::Link(error) => unlinked(error),
        }
    }
}

impl From<LedgerError> for Hindrance {
    fn from(error: LedgerError) -> Self {
        Self::Ledger(error)
    }
}

fn misfit(row: &JobRow, reason: String) -> LedgerError {
    LedgerError::Row { what: "event", job: row.id.to_string(), reason }
}

fn interrupted() -> CallRecord {
    let told = json!({"code": Code::Interrupted, "message": Code::Interrupted.meaning()});
    CallRecord {
        code: Some(Code::Interrupted),
        content: json!({"ok": false, "error": Value::Object(told.as_object().cloned().unwrap_or_default())}),
        receipt: None,
        usage: None,
        workspace_after: None,
        written: Vec::new(),
        deleted: Vec::new(),
        unproven: true,
    }
}
