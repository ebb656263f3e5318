//! All jobs, as the API sees them. Owns the table of live jobs and the queue; each running job has a task of its own.
//!
//! ```text
//!   submit ─▶ checks ─▶ launcher's grant ─▶ ledger (accepted) ─▶ queue ─▶ runner ─▶ ledger (result) ─▶ grant closed
//! ```

mod direct;
pub mod follow;
pub mod offer;
mod recover;
mod resume;
mod rollback;
mod spilled;
mod submit;
#[cfg(test)]
mod tests;
mod tools;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use sandbox::config::{Retention, Subject};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolproto::api::{API_VERSION, JobFilter, JobPage, JobState, JobView, Phase, PolicyView};
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};
use toolproto::job::{JobResult, JobUsage, Problem, Verdict};
use toolproto::receipt::Envelope;
use toolproto::units::Span;

use self::offer::{Catalogue, Offer};
use crate::agent::Agent;
use crate::call::Origin;
use crate::caller::{Caller, Standing};
use crate::clock::Clock;
use crate::feed::Feed;
use crate::launch::{Keep, Launch, LinkError, Rejection};
use crate::ledger::{Before, JobRow, Ledger, LedgerError};
use crate::model::Model;
use crate::observe::metrics::Load;
use crate::observe::slices::Slices;
use crate::observe::{Observation, Observer, Performer};
use crate::queue::{self, Queue};
use crate::runner::{Answer, Runner, Shared, Steer, Unsteered};
use crate::session::Session;
use crate::session::event::Event;

/// Who may use what, as the configuration says.
pub type Permits = dyn Fn(&Caller, Subject<'_>) -> bool + Send + Sync;

/// What the dispatcher is told at start.
pub struct Settings {
    /// How many jobs may run and wait.
    pub limits: queue::Limits,
    /// Who watches without taking part.
    pub observer: Observer,
    /// Where it is seen what a job's tools hold.
    pub slices: Slices,
}

/// An agent with those who answer for it.
pub struct Staffed {
    /// The agent.
    pub agent: Agent,
    /// Who answers.
    pub model: Arc<dyn Model>,
}

/// All jobs. Cheap to clone.
pub struct Dispatcher<L> {
    inner: Arc<Inner<L>>,
}

impl<L> Clone for Dispatcher<L> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

struct Inner<L> {
    shared: Arc<Shared<L>>,
    offer: RwLock<Arc<Offer>>,
    observer: Observer,
    slices: Slices,
    table: Mutex<Table<L>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// The live jobs: those that wait and those that run.
struct Table<L> {
    queue: Queue<JobId>,
    live: HashMap<JobId, Live<L>>,
    /// Ended jobs that somebody is about to go on with.
    resuming: HashSet<JobId>,
}

struct Live<L> {
    uid: u32,
    feed: Feed,
    steer: mpsc::Sender<Steer>,
    result: watch::Receiver<Option<JobResult>>,
    /// The job's task, until it begins.
    waiting: Option<Waiting<L>>,
}

struct Waiting<L> {
    runner: Runner<L>,
    begin: Option<Event>,
    result: watch::Sender<Option<JobResult>>,
}

/// How many wishes of people wait for a job's task.
const STEER: usize = 16;

impl<L: Launch> Dispatcher<L> {
    /// Opens for business: jobs that an earlier agentd left unfinished go on where they stood.
    ///
    /// # Errors
    /// When the ledger cannot be read or written.
    pub async fn start(
        launch: L,
        ledger: Ledger,
        catalogue: Catalogue,
        origin: Origin,
        settings: Settings,
    ) -> Result<Self, LedgerError> {
        let dispatcher = Self {
            inner: Arc::new(Inner {
                shared: Arc::new(Shared { launch, ledger, origin }),
                offer: RwLock::new(Arc::new(Offer::first(catalogue, settings.observer.clone()))),
                observer: settings.observer,
                slices: settings.slices,
                table: Mutex::new(Table {
                    queue: Queue::new(settings.limits),
                    live: HashMap::new(),
                    resuming: HashSet::new(),
                }),
                tasks: TaskTracker::new(),
                stop: CancellationToken::new(),
            }),
        };
        dispatcher.recover().await?;
        Ok(dispatcher)
    }

    /// Offers something else from now on. Jobs that run keep what they began with.
    pub fn reload(&self, catalogue: Catalogue) {
        let mut offer = self.inner.offer.write().unwrap_or_else(PoisonError::into_inner);
        *offer = Arc::new(offer.followed_by(catalogue));
    }

    /// The launcher.
    #[must_use]
    pub fn launch(&self) -> &L {
        &self.inner.shared.launch
    }

    /// Returns when the table of jobs could be looked at and the ledger has answered, whatever it said: then neither is stuck.
    pub async fn pulse(&self) {
        drop(self.inner.table());
        if let Err(error) = self.inner.shared.ledger.job(JobId::generate()).await {
            tracing::warn!(%error, "the ledger fails");
        }
    }

    /// The policies: what confines a tool is no secret from those who use it.
    #[must_use]
    pub fn policies(&self) -> Vec<PolicyView> {
        self.inner.offer().policies.clone()
    }

    /// Jobs that the caller may see, newest first.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub async fn jobs(&self, caller: &Caller, filter: JobFilter) -> Result<JobPage, Problem> {
        let uid = (caller.standing == Standing::Member).then_some(caller.uid);
        let running: HashSet<JobId> = self.inner.running();
        let wanted_state = filter.state;
        let limit = filter.limit() as usize;
        let wanted =
            move |row: &JobRow| wanted_state.is_none_or(|state| state == state_of(row, running.contains(&row.id)));
        let mut rows = self.inner.shared.ledger.jobs(uid, filter, wanted).await.map_err(unreadable)?;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(|row| row.id);
        Ok(JobPage { version: API_VERSION, jobs: rows.into_iter().map(|row| self.view(row)).collect(), next })
    }

    /// A job.
    ///
    /// # Errors
    /// NOT_FOUND when there is none that the caller may see.
    pub async fn job(&self, caller: &Caller, id: JobId) -> Result<JobView, Problem> {
        Ok(self.view(self.row(caller, id).await?))
    }

    /// A job's result, waiting for it at most so long; `None` when there is none yet.
    ///
    /// # Errors
    /// NOT_FOUND when there is no job that the caller may see.
    pub async fn result(&self, caller: &Caller, id: JobId, wait: Duration) -> Result<Option<JobResult>, Problem> {
        let row = self.row(caller, id).await?;
        if row.result.is_some() {
            return Ok(row.result);
        }
        let receiver = self.inner.table().live.get(&id).map(|live| live.result.clone());
        if let Some(mut receiver) = receiver {
            let told = tokio::time::timeout(wait, receiver.wait_for(Option::is_some)).await;
            if let Ok(Ok(result)) = told {
                return Ok(result.clone());
            }
        }
        let stored = self.row(caller, id).await?.result;
        Ok(stored.or_else(|| self.inner.table().live.get(&id).and_then(|live| live.result.borrow().clone())))
    }

    /// A job's receipts, the sealing one last.
    ///
    /// # Errors
    /// NOT_FOUND when there is no job that the caller may see.
    pub async fn receipts(&self, caller: &Caller, id: JobId) -> Result<Vec<Envelope>, Problem> {
        self.row(caller, id).await?;
        self.inner.shared.ledger.receipts(id).await.map_err(unreadable)
    }

    /// Ends a job. It is done when that is stored; the result follows. A job that has ended stays as it is.
    ///
    /// # Errors
    /// NOT_FOUND when there is no job that the caller may see, LEDGER_UNAVAILABLE when the wish cannot be stored.
    pub async fn cancel(&self, caller: &Caller, id: JobId) -> Result<(), Problem> {
        let row = self.row(caller, id).await?;
        self.inner.observer.tell(Observation::Act { uid: caller.uid, job: id, act: "cancel" });
        // A job that waits begins at once, so that it can end.
        {
            let mut table = self.inner.table();
            if table.queue.begin_now(row.uid, id) {
                self.begin(&mut table, id);
            }
        }
        self.steer(id, Steer::Cancel).await.map(|_| ())
    }

    /// Tells the model something at its next turn. It is kept when this returns.
    ///
    /// # Errors
    /// NOT_FOUND when there is no job that the caller may see, INPUT_INVALID when it has ended.
    pub async fn say(&self, caller: &Caller, id: JobId, text: String) -> Result<(), Problem> {
        self.row(caller, id).await?;
        if text.trim().is_empty() {
            return Err(Problem::new(Code::InputInvalid, "text is empty"));
        }
        self.steer_running(id, |done| Steer::Say { text, done }).await
    }

    /// Lets a call run that waits for that, or not.
    ///
    /// # Errors
    /// NOT_FOUND when there is no job that the caller may see, INPUT_INVALID when the call does not wait.
    pub async fn decide(
        &self,
        caller: &Caller,
        id: JobId,
        call: CallId,
        approved: bool,
        reason: Option<String>,
    ) -> Result<(), Problem> {
        self.row(caller, id).await?;
        self.steer_running(id, |done| Steer::Decide { call, approved, reason, done }).await
    }

    async fn steer_running(&self, id: JobId, wish: impl FnOnce(Answer) -> Steer) -> Result<(), Problem> {
        if self.steer(id, wish).await? {
            return Ok(());
        }
        Err(Problem::new(Code::InputInvalid, format!("job {id} has ended")))
    }

    /// Gives a wish to a job's task, which takes it when the job has begun. False when the job has ended.
    async fn steer(&self, id: JobId, wish: impl FnOnce(Answer) -> Steer) -> Result<bool, Problem> {
        let (done, stored) = oneshot::channel();
        let steer = self.inner.table().live.get(&id).map(|live| live.steer.clone());
        let Some(steer) = steer else { return Ok(false) };
        if steer.send(wish(done)).await.is_err() {
            return Ok(false);
        }
        match stored.await {
            Ok(Ok(())) => Ok(true),
            Ok(Err(Unsteered::Ledger(error))) => Err(unreadable(error)),
            Ok(Err(Unsteered::Phase(error))) => Err(Problem::new(Code::InputInvalid, error.reason)),
            // Without an answer the job ended by itself first.
            Err(_) => Ok(false),
        }
    }

    /// How many jobs run and wait, and where the breakers stand.
    #[must_use]
    pub fn load(&self) -> Load {
        let breakers = self.inner.offer().guards.breakers().collect();
        let table = self.inner.table();
        Load { running: table.queue.running(), queued: table.queue.waiting(), breakers }
    }

    /// Deletes what is older than it is kept, now and once an hour, until agentd stops.
    pub fn keep_tidy(&self, retention: Retention) {
        let (dispatcher, stop) = (self.clone(), self.inner.stop.clone());
        self.inner.tasks.spawn(async move {
            let mut hours = tokio::time::interval(Duration::from_secs(3600));
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    _ = hours.tick() => {}
                }
                let now = jiff::Timestamp::now();
                let ago = |age: Span| now.checked_sub(age.0).unwrap_or(jiff::Timestamp::MIN);
                let Retention { jobs, receipts, artifacts } = retention;
                let before = Before { jobs: ago(jobs), receipts: ago(receipts), artifacts: ago(artifacts) };
                match dispatcher.inner.shared.ledger.expire(before).await {
                    Ok(gone) => {
                        if !gone.is_empty() {
                            tracing::info!(gone = gone.len(), "deleted what was older than it is kept");
                        }
                        // Without its events nobody can go on with a job.
                        for job in gone {
                            dispatcher.close(job, Keep::Nothing).await;
                        }
                    }
                    Err(error) => tracing::error!(%error, "what is older than it is kept stays"),
                }
            }
        });
    }

    /// Stops: running calls are ended, jobs are left in the ledger as they stand.
    pub async fn shutdown(&self, limit: Duration) {
        self.inner.stop.cancel();
        self.inner.table().live.retain(|_, live| live.waiting.is_none());
        self.inner.tasks.close();
        if tokio::time::timeout(limit, self.inner.tasks.wait()).await.is_err() {
            tracing::warn!(left = self.inner.tasks.len(), "jobs did not stop in time");
        }
    }

    /// Makes a change in a task of its own, so that it does not stay half-way when whoever asked for it goes away.
    async fn to_its_end<T: Send + 'static>(
        &self,
        change: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> Result<T, Problem> {
        self.inner.tasks.spawn(change).await.map_err(|_| lost())?
    }

    async fn row(&self, caller: &Caller, id: JobId) -> Result<JobRow, Problem> {
        let row = self.inner.shared.ledger.job(id).await.map_err(unreadable)?;
        // A job of somebody else looks like none.
        row.filter(|row| caller.may_see(row.uid))
            .ok_or_else(|| Problem::new(Code::NotFound, format!("there is no job {id}")))
    }

    fn view(&self, row: JobRow) -> JobView {
        let table = self.inner.table();
        let live = table.live.get(&row.id);
        let result = row.result.clone().or_else(|| live.and_then(|live| live.result.borrow().clone()));
        let snapshot = live.map(|live| live.feed.snapshot());
        let phase = snapshot.as_ref().map_or(Phase::Idle, |snapshot| snapshot.phase);
        let waiting_for = snapshot.as_ref().and_then(|snapshot| snapshot.waiting.clone()).filter(|_| result.is_none());
        let usage = match (&result, snapshot) {
            (Some(result), _) => result.usage,
            (None, Some(snapshot)) => snapshot.usage,
            (None, None) => JobUsage::default(),
        };
        let runs = result.is_none() && live.is_some_and(|live| live.waiting.is_none());
        JobView {
            version: API_VERSION,
            job_id: row.id,
            memory_bytes: runs.then(|| self.inner.slices.memory(row.id)).flatten(),
            state: match &result {
                Some(_) => JobState::Done,
                None if waiting_for.is_some() => JobState::Waiting,
                None => state_of(&row, live.is_some_and(|live| live.waiting.is_none())),
            },
            agent: row.agent,
            phase: if result.is_some() { Phase::Idle } else { phase },
            uid: row.uid,
            submitted: row.submitted,
            ended: row.ended,
            workspace: row.workspace,
            labels: row.labels,
            waiting_for,
            usage,
            result,
        }
    }

    /// Puts a stored job into the queue.
    fn enqueue(&self, row: &JobRow, prepared: Prepared, arrival: Arrival) -> Result<(), queue::Full> {
        let Prepared { agent, model, session, sequence, evidence_head, begin } = prepared;
        let (steer, wishes) = mpsc::channel(STEER);
        let (sender, receiver) = watch::channel(None);
        let (provider, named) = agent.models.first().map(|first| first.provider.names()).unwrap_or_default();
        let performer = Performer { agent: agent.name.clone(), provider, model: named.to_owned() };
        let feed = Feed::new(row.id, row.uid, performer, &session, self.inner.observer.clone());
        let runner = Runner {
            shared: Arc::clone(&self.inner.shared),
            job: row.id,
            agent,
            model,
            offer: self.inner.offer(),
            clock: Clock::continuing(session.elapsed()),
            session,
            sequence,
            evidence_head,
            steer: wishes,
            feed: feed.clone(),
            stop: self.inner.stop.clone(),
        };
        let waiting = Some(Waiting { runner, begin, result: sender });
        let mut table = self.inner.table();
        match arrival {
            Arrival::New => table.queue.push(row.uid, row.priority, row.id)?,
            Arrival::Again => table.queue.push_again(row.uid, row.priority, row.id),
        }
        table.live.insert(row.id, Live { uid: row.uid, feed, steer, result: receiver, waiting });
        self.pump(&mut table);
        Ok(())
    }

    /// Begins as many jobs as may run.
    fn pump(&self, table: &mut Table<L>) {
        while !self.inner.stop.is_cancelled()
            && let Some(job) = table.queue.begin()
        {
            self.begin(table, job);
        }
    }

    /// Has processes of the job's tools started ahead, of those that want it.
    fn warm(&self, runner: &Runner<L>) {
        let tools = runner.agent.tools.iter().filter_map(|name| runner.offer.tools.get(name));
        for tool in tools.filter(|tool| tool.manifest.is_prewarmed()) {
            let name = tool.manifest.name.clone();
            if let Err(error) = self.inner.shared.launch.warm(runner.job, name, tool.narrowing()) {
                tracing::debug!(job = %runner.job, %error, "nothing is started ahead");
            }
        }
    }

    fn begin(&self, table: &mut Table<L>, job: JobId) {
        let Some(live) = table.live.get_mut(&job) else { return };
        let Some(Waiting { mut runner, begin, result }) = live.waiting.take() else { return };
        let (uid, dispatcher) = (live.uid, self.clone());
        self.inner.tasks.spawn(async move {
            runner.clock = Clock::continuing(runner.session.elapsed());
            let observers = runner.observers();
            dispatcher.warm(&runner);
            let (told, stored) = match runner.run(begin).await {
                Ok(told) => (told, true),
                // The ledger knows how to go on; so does the launcher. There is no result to tell: the next agentd makes it.
                Err((abort, _)) if abort.leaves_the_job() => return,
                Err((abort, runner)) => {
                    tracing::error!(%job, error = %abort, "job stopped without a stored result");
                    (runner.apparent_result(&abort), false)
                }
            };
            if stored && !observers.is_empty() {
                // The result is there; who is told of it besides runs under the job's grant.
                result.send_replace(Some(told.clone()));
                observers.tell(&told, &dispatcher.inner.stop).await;
            }
            dispatcher.close(job, keep_of(&told)).await;
            result.send_replace(Some(told));
            let mut table = dispatcher.inner.table();
            // A result that is not stored is known here alone, until agentd starts again.
            if stored {
                table.live.remove(&job);
            }
            table.queue.end(uid);
            dispatcher.pump(&mut table);
        });
    }

    /// Ends the launcher's grant of a job.
    async fn close(&self, job: JobId, keep: Keep) {
        if let Err(error) = self.inner.shared.launch.close(job, keep).await {
            tracing::error!(%job, %error, "the launcher could not close the job");
        }
    }
}

impl<L> Inner<L> {
    fn offer(&self) -> Arc<Offer> {
        Arc::clone(&self.offer.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn table(&self) -> MutexGuard<'_, Table<L>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> HashSet<JobId> {
        self.table().live.iter().filter(|(_, live)| live.waiting.is_none()).map(|(id, _)| *id).collect()
    }
}

/// How a job comes to the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    /// It was just submitted.
    New,
    /// An earlier agentd accepted it.
    Again,
}

/// A job's task before it is in the queue.
struct Prepared {
    agent: Arc<Agent>,
    model: Arc<dyn Model>,
    session: Session,
    sequence: u64,
    evidence_head: Option<toolproto::digest::Digest>,
    begin: Option<Event>,
}

/// The grant of a job that can be gone on with is kept.
fn keep_of(result: &JobResult) -> Keep {
    match &result.verdict {
        Verdict::Failed { error_code, .. } if error_code.is_resumable() => Keep::ForLater,
        _ => Keep::Nothing,
    }
}

fn state_of(row: &JobRow, running: bool) -> JobState {
    match (row.ended, running) {
        (Some(_), _) => JobState::Done,
        (None, true) => JobState::Running,
        (None, false) => JobState::Queued,
    }
}

fn unreadable(error: LedgerError) -> Problem {
    tracing::error!(%error, "the ledger failed a request");
    Problem::new(Code::LedgerUnavailable, error.to_string())
}

fn unlinked(error: LinkError) -> Problem {
    tracing::error!(%error, "the launcher failed a request");
    Problem::new(Code::Interrupted, error.to_string())
}

fn rejected(rejection: Rejection) -> Problem {
    Problem::new(rejection.code, rejection.message)
}

fn lost() -> Problem {
    Problem::new(Code::InternalLogicError, "the request's task has ended without an answer")
}
