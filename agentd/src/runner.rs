//! One task per job: performs what the session decides, stores what happens, tells those who watch. Nothing is decided here.
//!
//! ```text
//!        ┌────────────── decide ◀────────────────┐
//!        ▼                                       │
//!   start and stop: the model's request, calls   │
//!        │                                       │
//!        ▼                                       │
//!   wait: an answer · a call's end · a person ───┴──▶ event ──▶ ledger ──▶ session, watchers
//! ```

mod consulting;
mod sealing;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use sandbox::protocol::{Application, ApplyFailure};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::job::JobResult;

pub use self::consulting::Observers;
use crate::agent::Agent;
use crate::call::{self, Asked, Origin, SealError};
use crate::clock::Clock;
use crate::dispatcher::offer::Offer;
use crate::feed::{Change, Feed, Snapshot};
use crate::guards::{self, Attempts};
use crate::launch::{Launch, LinkError, Recorded};
use crate::ledger::{Ledger, LedgerError, Stored, StoredReceipt};
use crate::model::transcript::Transcript;
use crate::model::{Model, ModelError, Reply, Request, Thinking};
use crate::session::Session;
use crate::session::apply::PhaseError;
use crate::session::conclude::{self, Failure};
use crate::session::decide::{Action, decide};
use crate::session::event::{Event, PlannedCall};
use crate::session::judge::{Judged, judge};
use crate::session::{summary, tool_search, wait};
use crate::spill;

/// What all jobs share.
pub struct Shared<L> {
    /// The launcher.
    pub launch: L,
    /// The ledger.
    pub ledger: Ledger,
    /// What receipts say of the host.
    pub origin: Origin,
}

/// Where a person's wish is answered.
pub type Answer = oneshot::Sender<Result<(), Unsteered>>;

/// Why a person's wish is not followed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Unsteered {
    /// It cannot be stored.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// It cannot be followed where the job stands.
    #[error(transparent)]
    Phase(#[from] PhaseError),
}

/// What a person wants of a running job. Answered when it is stored.
#[derive(Debug)]
pub enum Steer {
    /// That it ends.
    Cancel(Answer),
    /// That the model is told something.
    Say {
        /// What.
        text: String,
        /// Whoever waits.
        done: Answer,
    },
    /// That a call may run, or may not.
    Decide {
        /// The call.
        call: CallId,
        /// Whether it may.
        approved: bool,
        /// Why.
        reason: Option<String>,
        /// Whoever waits.
        done: Answer,
    },
}

/// A job's task.
pub struct Runner<L> {
    /// What all jobs share.
    pub shared: Arc<Shared<L>>,
    /// The job.
    pub job: JobId,
    /// Its agent.
    pub agent: Arc<Agent>,
    /// Who is asked.
    pub model: Arc<dyn Model>,
    /// The tools and prices that were in force when it began.
    pub offer: Arc<Offer>,
    /// Its state.
    pub session: Session,
    /// The number of its last stored event.
    pub sequence: u64,
    /// The digest of its last evidence record.
    pub evidence_head: Option<Digest>,
    /// The time that it has run.
    pub clock: Clock,
    /// What people want of it.
    pub steer: mpsc::Receiver<Steer>,
    /// Those who watch it.
    pub feed: Feed,
    /// agentd is about to end: stop without a result, the ledger knows how to go on.
    pub stop: CancellationToken,
}

/// Why a job's task ended without storing a result.
#[derive(Debug, thiserror::Error)]
pub enum Abort {
    /// The ledger cannot be written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The launcher cannot be spoken with, or a receipt cannot be made.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The loop broke its own rules.
    #[error(transparent)]
    Phase(#[from] PhaseError),
    /// A receipt is stored, and the changes that it names did not reach the workspace.
    #[error("the changes of call {call}, whose receipt is stored, did not reach the workspace: {}", failure.message)]
    Unapplied {
        /// The call.
        call: CallId,
        /// Why.
        failure: ApplyFailure,
    },
    /// agentd is about to end.
    #[error("agentd is stopping")]
    Stopping,
}

impl From<LinkError> for Abort {
    fn from(error: LinkError) -> Self {
        Self::Seal(error.into())
    }
}

impl Abort {
    /// Whether agentd ends, so that the job has no result yet and goes on at the next start.
    #[must_use]
    pub const fn leaves_the_job(&self) -> bool {
        matches!(self, Self::Stopping | Self::Seal(SealError::Link(LinkError::Closed)))
    }

    /// How the job seems to have failed to those who wait for it now.
    #[must_use]
    pub fn failure(&self) -> Failure {
        let code = match self {
            Self::Ledger(_) => Code::LedgerUnavailable,
            Self::Seal(SealError::Link(_)) | Self::Stopping => Code::Interrupted,
            Self::Seal(SealError::Canonical(_) | SealError::Envelope(_)) | Self::Phase(_) => Code::InternalLogicError,
            Self::Unapplied { failure, .. } => failure.code,
        };
        Failure::new(code, self.to_string())
    }
}

/// What goes on beside the loop.
#[derive(Default)]
struct Going {
    asking: Option<Asking>,
    calls: JoinSet<Result<(CallId, Attempts), LinkError>>,
    cancels: HashMap<CallId, CancellationToken>,
}

/// A request that a model has not answered yet.
struct Asking {
    /// The summary that is asked for, if it is not the next step.
    summary: Option<summary::Wanted>,
    reply: BoxFuture<'static, Result<Reply, ModelError>>,
}

impl<L: Launch> Runner<L> {
    /// Runs the job to its result. A job that has not begun needs the event with which it does.
    ///
    /// # Errors
    /// When the result cannot be stored; all that goes on has ended then.
    pub async fn run(mut self, begin: Option<Event>) -> Result<JobResult, (Abort, Self)> {
        let mut going = Going::default();
        if let Some(event) = begin
            && let Err(abort) = self.append(event, Vec::new()).await
        {
            return Err((abort, self));
        }
        let ended = self.turn_until_concluded(&mut going).await;
        going.asking = None;
        for cancel in going.cancels.values() {
            cancel.cancel();
        }
        while going.calls.join_next().await.is_some() {}
        let ended = match ended {
            Err(abort @ (Abort::Phase(_) | Abort::Seal(SealError::Canonical(_)))) => self.broken(abort).await,
            other => other,
        };
        ended.map_err(|abort| (abort, self))
    }

    /// Ends a job whose loop broke a rule of its own.
    async fn broken(&mut self, abort: Abort) -> Result<JobResult, Abort> {
        tracing::error!(job = %self.job, error = %abort, critical = true, "INTERNAL_LOGIC_ERROR");
        let result = self.apparent_result(&abort);
        self.append(Event::GoalConcluded { result: Box::new(result.clone()) }, Vec::new()).await?;
        Ok(result)
    }

    async fn turn_until_concluded(&mut self, going: &mut Going) -> Result<JobResult, Abort> {
        loop {
            if let Some(result) = self.session.result() {
                return Ok(result.clone());
            }
            let now = self.clock.elapsed();
            let actions = decide(&self.session, &self.agent, &self.offer.tools, self.job, now);
            if !actions.iter().any(|action| matches!(action, Action::Ask { .. } | Action::Summarise(_))) {
                going.asking = None;
            }
            let mut acted = false;
            for action in actions {
                acted |= self.perform(action, going).await?;
            }
            if !acted {
                self.wait(going, now).await?;
            }
        }
    }

    /// Performs an action unless it goes on already. Whether the session changed by that.
    async fn perform(&mut self, action: Action, going: &mut Going) -> Result<bool, Abort> {
        match action {
            Action::Append(event) => self.append(*event, Vec::new()).await?,
            Action::Ask { tools, note, max_output, time, thinking } => {
                if going.asking.is_none() {
                    let reply = self.ask(tools, note, max_output, time, thinking)?;
                    going.asking = Some(Asking { summary: None, reply });
                }
                return Ok(false);
            }
            Action::Summarise(wanted) => {
                if going.asking.is_none() {
                    going.asking = Some(Asking { summary: Some(wanted), reply: self.summarise(wanted) });
                }
                return Ok(false);
            }
            Action::Run { call, time } => {
                if going.cancels.contains_key(&call) {
                    return Ok(false);
                }
                let Some(asked) = self.session.call(call).map(|one| self.asked(&one.planned, time)) else {
                    return Ok(false);
                };
                let asked = spill::resolve(&self.shared.ledger, asked).await?;
                match call::preflight(&self.offer.tools, &asked) {
                    Err(error) => {
                        let ran = call::refused(&self.offer.tools, asked, error);
                        self.call_ended(call, ran.into()).await?;
                    }
                    Ok(()) => {
                        // Its sandbox is prepared meanwhile. If it cannot be recorded, it is ended before it did anything.
                        let recorded = Recorded::later();
                        self.start(Asked { recorded: recorded.clone(), ..asked }, going);
                        self.append(Event::CallStarted { call }, Vec::new()).await?;
                        recorded.tell();
                    }
                }
            }
            Action::BeginWait { call, delay } => {
                let until = self.clock.elapsed().saturating_add(delay);
                let until_ms = u64::try_from(until.as_millis()).unwrap_or(u64::MAX);
                let due = jiff::Timestamp::now().saturating_add(delay).unwrap_or(jiff::Timestamp::MAX);
                self.append(Event::WaitBegun { call, until_ms, due }, Vec::new()).await?;
            }
            Action::EndWait { call, waiting } => {
                let event = wait::ended(call, waiting, self.clock.elapsed(), jiff::Timestamp::now());
                self.append(event, Vec::new()).await?;
            }
            Action::Consult { extension, point, time } => return self.consult(&extension, point, time, going).await,
            Action::Stop { call } => {
                if let Some(cancel) = going.cancels.get(&call) {
                    cancel.cancel();
                }
                return Ok(false);
            }
            Action::Refuse { call, refusal } => {
                let Some(asked) = self.session.call(call).map(|one| self.asked(&one.planned, Duration::ZERO)) else {
                    return Ok(false);
                };
                let error = call::failure(refusal.code, refusal.message, serde_json::Value::Null);
                let ran = call::refused(&self.offer.tools, asked, error);
                self.call_ended(call, ran.into()).await?;
            }
            Action::Interrupt { cause, calls } => self.interrupt(cause, &calls).await?,
        }
        Ok(true)
    }

    /// Waits for whatever changes what was decided when the job had run for `decided`.
    async fn wait(&mut self, going: &mut Going, decided: Duration) -> Result<(), Abort> {
        // A deadline that had passed then has been seen by `decide`; it wakes nobody again. One that has passed since has not.
        let deadline = self.session.next_deadline(decided);
        let reply = async {
            match going.asking.as_mut() {
                Some(asking) => (asking.summary, asking.reply.as_mut().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.stop.cancelled() => return Err(Abort::Stopping),
            Some(steer) = self.steer.recv() => self.steered(steer).await?,
            (summary, reply) = reply => {
                going.asking = None;
                match summary {
                    None => self.answered(reply).await?,
                    Some(wanted) => self.summarised(wanted, reply).await?,
                }
            }
            Some(ended) = going.calls.join_next() => {
                let (call, attempts) = ended.map_err(|_| LinkError::Closed)??;
                going.cancels.remove(&call);
                match self.session.consulted() {
                    Some(consulted) if consulted.call == call => self.consulted(attempts.last).await?,
                    _ => self.call_ended(call, attempts).await?,
                }
            }
            () = self.clock.until(deadline.unwrap_or(Duration::MAX)) => {}
        }
        Ok(())
    }

    async fn steered(&mut self, steer: Steer) -> Result<(), Abort> {
        let (event, done) = match steer {
            Steer::Cancel(done) => (Event::CancelRequested {}, done),
            Steer::Say { text, done } => (Event::MessageReceived { text }, done),
            Steer::Decide { call, approved, reason, done } => (Event::ApprovalDecided { call, approved, reason }, done),
        };
        // Whoever asked may have gone; then nobody needs the answer.
        match self.append(event, Vec::new()).await {
            Ok(()) => drop(done.send(Ok(()))),
            Err(Abort::Phase(error)) => drop(done.send(Err(error.into()))),
            Err(Abort::Ledger(error)) => {
                drop(done.send(Err(error.clone().into())));
                return Err(error.into());
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }

    fn ask(
        &self,
        tools: bool,
        note: String,
        max_output: Option<u64>,
        time: Duration,
        thinking: Thinking,
    ) -> Result<BoxFuture<'static, Result<Reply, ModelError>>, Abort> {
        let transcript =
            Transcript { system: self.agent.system_prompt.clone(), messages: self.session.messages().to_vec() };
        if let Err(error) = transcript.check() {
            let message = format!("the conversation must not be sent: {error}");
            let failed = ModelError::lasting(Code::InternalLogicError, message);
            return Ok(std::future::ready(Err(failed)).boxed());
        }
        let offered = || tool_search::offered(&self.session, &self.agent, &self.offer.tools);
        let tools = if tools { offered() } else { Vec::new() };
        let request = Request { transcript, tools, note, max_output, time, thinking };
        let (model, feed) = (Arc::clone(&self.model), self.feed.clone());
        Ok(async move { model.reply(&request, &move |text| feed.delta(text)).await }.boxed())
    }

    /// Asks for a summary. Nobody watches it come.
    fn summarise(&self, wanted: summary::Wanted) -> BoxFuture<'static, Result<Reply, ModelError>> {
        let request = Request {
            transcript: summary::transcript(&self.session, &self.agent, wanted.units),
            tools: Vec::new(),
            note: String::new(),
            max_output: Some(wanted.max_output),
            time: wanted.time,
            thinking: Thinking::AsConfigured,
        };
        let model = Arc::clone(&self.model);
        async move { model.reply(&request, &|_| ()).await }.boxed()
    }

    async fn summarised(&mut self, wanted: summary::Wanted, reply: Result<Reply, ModelError>) -> Result<(), Abort> {
        let prices = &self.offer.prices;
        let price = |model: &str| prices.get(model).copied();
        let event = summary::judge(&self.session, &self.agent, wanted.units, reply, price);
        if let Event::SummaryDropped { reason, .. } = &event {
            tracing::warn!(job = %self.job, reason, "a summary was dropped");
        }
        self.append(event, Vec::new()).await
    }

    async fn answered(&mut self, reply: Result<Reply, ModelError>) -> Result<(), Abort> {
        let reply = match reply {
            Ok(reply) => reply,
            Err(ModelError { code, message, details, .. }) => {
                return self.append(Event::PlanFailed { code, message, details }, Vec::new()).await;
            }
        };
        let price = self.offer.prices.get(&reply.model).copied();
        match judge(&self.session, &self.agent, &self.offer.tools, reply, price, CallId::generate) {
            Judged::Event(event) => self.append(event, Vec::new()).await,
            Judged::Refused { plan, refusal } => self.refuse(plan, refusal).await,
        }
    }

    fn asked(&self, planned: &PlannedCall, time: Duration) -> Asked {
        Asked {
            job: self.job,
            call: planned.call,
            attempt_of: planned.call,
            tool: planned.tool.clone(),
            arguments: planned.arguments.clone(),
            refusal: planned.refusal.clone(),
            time,
            idempotency_key: planned.call.to_string(),
            watcher: Some(self.feed.of_call(planned.call)),
            recorded: Recorded::default(),
        }
    }

    fn start(&self, asked: Asked, going: &mut Going) {
        let cancel = CancellationToken::new();
        going.cancels.insert(asked.call, cancel.clone());
        let (shared, offer) = (Arc::clone(&self.shared), Arc::clone(&self.offer));
        going.calls.spawn(async move {
            let (launch, tools, guards) = (&shared.launch, &offer.tools, &offer.guards);
            let call = asked.call;
            Ok((call, guards::run(launch, tools, guards, asked, cancel).await?))
        });
    }

    /// Stores an event, then lets it happen. An event that cannot happen is not stored.
    async fn append(&mut self, event: Event, mut receipts: Vec<StoredReceipt>) -> Result<(), Abort> {
        let event = match event {
            Event::GoalConcluded { result } => Event::GoalConcluded { result: Box::new(conclude::checked(*result)) },
            other => other,
        };
        self.session.admits(&event)?;
        if matches!(event, Event::GoalConcluded { .. }) {
            receipts.push(self.seal_job().await?);
        }
        let elapsed = self.clock.elapsed();
        let stored = Stored {
            sequence: self.sequence + 1,
            time: jiff::Timestamp::now(),
            elapsed_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
            event,
        };
        let result = match &stored.event {
            Event::GoalConcluded { result } => Some((**result).clone()),
            _ => None,
        };
        let committed = call::committed(&receipts).map_err(SealError::from)?;
        self.shared.ledger.append(self.job, vec![stored.clone()], receipts, result).await?;
        self.sequence = stored.sequence;
        let change = Change::before(&self.session, &stored);
        self.session.apply(&stored.event, Duration::from_millis(stored.elapsed_ms))?;
        let (from, to) = (change.from, self.session.phase());
        tracing::info!(job = %self.job, event = stored.event.name(), ?from, ?to, "event");
        let snapshot = Snapshot::of(&self.session, elapsed);
        self.feed.publish(change.after(self.job, &self.session, &stored), snapshot);
        for promised in committed {
            match self.shared.launch.stored(promised.call_id).await? {
                Application::Done => {}
                Application::Failed(failure) => return Err(Abort::Unapplied { call: promised.call_id, failure }),
                Application::Withdrawn(withdrawal) => self.withdraw(&stored.event, &promised, withdrawal).await?,
            }
        }
        Ok(())
    }

    /// What those who wait are told when no result could be stored.
    #[must_use]
    pub fn apparent_result(&self, abort: &Abort) -> JobResult {
        conclude::failed(&self.session, self.job, self.clock.elapsed(), abort.failure())
    }
}
