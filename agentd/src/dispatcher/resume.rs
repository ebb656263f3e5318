//! Jobs that have ended and go on: by `resume`, towards the same goal; by `continues`, as another job with a new one.

use std::path::PathBuf;

use jiff::Timestamp;
use toolproto::code::Code;
use toolproto::ids::JobId;
use toolproto::job::{JobRequest, JobResult, Problem, Verdict};

use super::{Arrival, Dispatcher, Prepared, rejected, unlinked, unreadable};
use crate::agent::Agent;
use crate::caller::Caller;
use crate::launch::{Keep, Launch};
use crate::ledger::{JobKind, JobRow, Stored};
use crate::model::transcript::Message;
use crate::observe::Observation;
use crate::session::Session;
use crate::session::budget::Budget;
use crate::session::event::Event;

/// What a follow-up job begins with.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// The earlier job's conversation.
    pub(super) conversation: Vec<Message>,
    /// Its workspace.
    pub(super) workspace: Option<PathBuf>,
}

impl<L: Launch> Dispatcher<L> {
    /// Goes on with a job that ended by something that can be mended: a model that did not answer, a ledger that could not be
    /// written, a conflict in the workspace, a budget. It may use what its agent allows, less what it has used. When this
    /// returns, that it goes on is on disk.
    ///
    /// # Errors
    /// NOT_FOUND when there is no job that the caller may see, INPUT_INVALID when it cannot go on.
    pub async fn resume(&self, caller: &Caller, id: JobId) -> Result<(), Problem> {
        let row = self.row(caller, id).await?;
        if row.kind != JobKind::Agent {
            return Err(Problem::new(Code::InputInvalid, "a direct call cannot be gone on with: call again"));
        }
        self.inner.observer.tell(Observation::Act { uid: caller.uid, job: id, act: "resume" });
        let dispatcher = self.clone();
        self.to_its_end(async move { dispatcher.go_on(&row).await }).await
    }

    async fn go_on(&self, row: &JobRow) -> Result<(), Problem> {
        let id = row.id;
        self.until_closed(row).await;
        let told = self.take_ended(row)?;
        let resumed = self.resume_ended(row, told.is_some()).await;
        let mut table = self.inner.table();
        table.resuming.remove(&id);
        if resumed.is_err()
            && let Some(live) = told
        {
            // Its result is known here alone.
            table.live.entry(id).or_insert(live);
        }
        resumed
    }

    /// Waits until the task of a job whose result is stored has ended, so that its grant is given back.
    async fn until_closed(&self, row: &JobRow) {
        let live = self.inner.table().live.get(&row.id).map(|live| live.result.clone());
        let Some(mut result) = live.filter(|_| row.result.is_some()) else { return };
        // The task holds the sender until its end, and has a bounded time for that.
        while result.changed().await.is_ok() {}
    }

    /// Makes sure that the job has ended and that nobody else goes on with it. What is known of it here alone: a result that
    /// could not be stored.
    fn take_ended(&self, row: &JobRow) -> Result<Option<super::Live<L>>, Problem> {
        let mut table = self.inner.table();
        let told = table.live.get(&row.id).and_then(|live| live.result.borrow().clone());
        let Some(result) = row.result.as_ref().or(told.as_ref()) else {
            return Err(Problem::new(Code::InputInvalid, format!("job {} has not ended", row.id)));
        };
        check_resumable(result)?;
        if !table.resuming.insert(row.id) {
            return Err(Problem::new(Code::InputInvalid, format!("job {} is being resumed", row.id)));
        }
        Ok(if told.is_some() { table.live.remove(&row.id) } else { None })
    }

    async fn resume_ended(&self, row: &JobRow, unstored: bool) -> Result<(), Problem> {
        let (session, sequence) = self.restored(row).await.map_err(unreadable)?;
        let (agent, model) = self.staff_of(&row.agent)?;
        if session.agent() != Some(agent.digest) {
            let words = format!("agent `{}` is another one now, or the job's events are kept no longer", row.agent);
            return Err(Problem::new(Code::InputInvalid, words));
        }
        let budget = resumed_budget(&session, &agent)?;
        let shared = &self.inner.shared;
        let (receipts, dangling) = (session.receipts().count, session.without_end());
        let admitted = shared.launch.readmit(row.id, receipts, dangling).await.map_err(unlinked)?;
        let admission = admitted.map_err(rejected)?;
        let prepared = async {
            let evidence_head = self.evidence_head(row, &session).await.map_err(|hindrance| hindrance.problem())?;
            let mut prepared = Prepared { agent, model, session, sequence, evidence_head, begin: None };
            if unstored {
                prepared.begin = Some(Event::Resumed { never_started: admission.never_started });
            } else {
                self.reopen(row, &mut prepared, budget).await?;
            }
            Ok(prepared)
        };
        match prepared.await {
            Ok(prepared) => self
                .enqueue(row, prepared, Arrival::Again)
                .map_err(|full| Problem::new(Code::QueueFull, full.to_string())),
            Err(problem) => {
                self.close(row.id, Keep::ForLater).await;
                Err(problem)
            }
        }
    }

    async fn reopen(&self, row: &JobRow, prepared: &mut Prepared, budget: Budget) -> Result<(), Problem> {
        let at = prepared.session.elapsed();
        let elapsed_ms = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
        let event = Event::Reopened { budget };
        prepared.session.apply(&event, at).map_err(|error| Problem::new(Code::InputInvalid, error.reason))?;
        prepared.sequence += 1;
        let stored = Stored { sequence: prepared.sequence, time: Timestamp::now(), elapsed_ms, event };
        self.inner.shared.ledger.reopen(row.id, stored).await.map_err(unreadable)
    }

    /// With what a job begins whose request names an earlier one.
    pub(super) async fn before(&self, caller: &Caller, request: &JobRequest) -> Result<Before, Problem> {
        let Some(earlier) = request.continues else { return Ok(Before::default()) };
        let at = |problem: Problem| Problem { detail: format!("/continues: {}", problem.detail), ..problem };
        let row = self.row(caller, earlier).await.map_err(at)?;
        self.continued(&row, request).await.map_err(at)
    }

    /// The conversation and the workspace of an ended job.
    pub(super) async fn continued(&self, row: &JobRow, request: &JobRequest) -> Result<Before, Problem> {
        let refuse = |words: String| Err(Problem::new(Code::InputInvalid, words));
        if row.kind != JobKind::Agent || row.agent != request.agent {
            return refuse(format!("job {} was not one of agent `{}`", row.id, request.agent));
        }
        if row.result.is_none() {
            return refuse(format!("job {} has not ended", row.id));
        }
        let (session, _) = self.restored(row).await.map_err(unreadable)?;
        let Some(agent) = session.agent() else {
            return refuse(format!("job {} never began, or its events are kept no longer", row.id));
        };
        let mut conversation = session.messages().to_vec();
        if self.staff_of(&row.agent)?.0.digest != agent {
            // Another model may answer now, to whom the provider's own items mean nothing.
            for message in &mut conversation {
                if let Message::Assistant(assistant) = message {
                    assistant.echo = None;
                }
            }
        }
        Ok(Before { conversation, workspace: row.workspace.clone() })
    }
}

fn check_resumable(result: &JobResult) -> Result<(), Problem> {
    match &result.verdict {
        Verdict::Failed { error_code, .. } if error_code.is_resumable() => Ok(()),
        Verdict::Failed { error_code, .. } => {
            let words = format!(
                "a job that ended with {error_code} cannot be gone on with; `continues` takes up where it stood"
            );
            Err(Problem::new(Code::InputInvalid, words))
        }
        Verdict::Success { .. } => {
            Err(Problem::new(Code::InputInvalid, "the job has reached its goal; `continues` gives it another"))
        }
    }
}

/// What a resumed job may use: all that its agent allows.
fn resumed_budget(session: &Session, agent: &Agent) -> Result<Budget, Problem> {
    session.affords_a_turn(agent, &agent.budget).map_err(|code| {
        let words = format!("the agent allows no more: {}", code.meaning());
        Problem::new(code, words)
    })?;
    Ok(agent.budget.clone())
}
