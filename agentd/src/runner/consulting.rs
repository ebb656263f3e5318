//! Asking a job's extensions.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use toolproto::extension::{Opinion, Point};
use toolproto::ids::CallId;
use toolproto::job::JobResult;

use super::{Abort, Going, Runner, Shared};
use crate::agent::Agent;
use crate::call::{Answered, Ran};
use crate::dispatcher::offer::Offer;
use crate::extension::{self, Extension, Question};
use crate::launch::Launch;
use crate::session;
use crate::session::event::{Event, Refusal};

/// How long all observers of a job's end may take together.
const AFTER_RUN: Duration = Duration::from_secs(60);

impl<L: Launch> Runner<L> {
    /// Asks an extension unless it is being asked already. Whether the session changed by that.
    pub(super) async fn consult(
        &mut self,
        name: &str,
        point: Point,
        time: Duration,
        going: &mut Going,
    ) -> Result<bool, Abort> {
        if self.session.consulted().is_some() {
            return Ok(false);
        }
        let Some(extension) = self.offer.tools.extension(name).cloned() else { return Ok(false) };
        let arguments = extension::arguments(&self.session, &self.agent, self.job, point);
        let call = CallId::generate();
        self.append(Event::ExtensionStarted { call, extension: name.to_owned(), point }, Vec::new()).await?;
        let watcher = Some(self.feed.of_call(call));
        let question = Question { job: self.job, call, point, arguments, time, watcher };
        let cancel = CancellationToken::new();
        going.cancels.insert(call, cancel.clone());
        let shared = Arc::clone(&self.shared);
        going.calls.spawn(async move {
            Ok((call, extension::ask(&shared.launch, &extension, question, cancel).await?.into()))
        });
        Ok(true)
    }

    /// Gives an extension's call its receipt, and takes what it said.
    pub(super) async fn consulted(&mut self, ran: Ran) -> Result<(), Abort> {
        let Some(asked) = self.session.consulted().cloned() else { return Ok(()) };
        let Some(extension) = self.offer.tools.extension(&asked.extension).cloned() else { return Ok(()) };
        let said = said(asked.point, &ran);
        let (mut receipts, mut chain) = (Vec::new(), self.session.receipts());
        let record = self.seal_attempt(ran, &mut chain, &mut receipts).await?;
        if let Err(failure) = &said {
            tracing::warn!(job = %self.job, extension = asked.extension, code = %failure.code, failure.message, "extension failed");
        }
        let event = session::extension::ended(&extension, asked.call, said, record.receipt, record.usage);
        self.append(event, receipts).await
    }

    /// Those who are told of the job's end.
    #[must_use]
    pub fn observers(&self) -> Observers<L> {
        Observers { shared: Arc::clone(&self.shared), agent: Arc::clone(&self.agent), offer: Arc::clone(&self.offer) }
    }
}

fn said(point: Point, ran: &Ran) -> Result<Opinion, Refusal> {
    match ran.answered() {
        Answered::Success { result, .. } => Opinion::read(point, result.clone())
            .map_err(|error| Refusal { code: toolproto::code::Code::ResponseInvalid, message: error.to_string() }),
        Answered::Failure(error) => Err(Refusal { code: error.code, message: error.message.clone() }),
    }
}

/// The extensions that are told of a job's end. Best effort: nobody waits for them, what they say is not heard, and they leave
/// no receipt, since the job is sealed.
pub struct Observers<L> {
    shared: Arc<Shared<L>>,
    agent: Arc<Agent>,
    offer: Arc<Offer>,
}

impl<L: Launch> Observers<L> {
    /// Whether there are any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extensions().next().is_none()
    }

    fn extensions(&self) -> impl Iterator<Item = &Arc<Extension>> {
        let named = self.agent.extensions.iter().filter_map(|name| self.offer.tools.extension(name));
        named.filter(|extension| extension.manifest.points.contains(&Point::AfterRun))
    }

    /// Tells them one after the other, until all have been told, their time is over, or agentd stops.
    pub async fn tell(&self, result: &JobResult, stop: &CancellationToken) {
        let until = tokio::time::Instant::now() + AFTER_RUN;
        for extension in self.extensions() {
            let (job, name) = (result.job_id, &extension.manifest.name);
            let time = until.saturating_duration_since(tokio::time::Instant::now());
            if time.is_zero() {
                tracing::warn!(%job, extension = name, "not told of the job's end: no time is left");
                continue;
            }
            let arguments = extension::arguments_after_run(&self.agent, result);
            let (call, watcher) = (CallId::generate(), None);
            let question = Question { job, call, point: Point::AfterRun, arguments, time, watcher };
            let asked = extension::ask(&self.shared.launch, extension, question, CancellationToken::new());
            let ran = tokio::select! {
                () = stop.cancelled() => return,
                ran = asked => ran,
            };
            match ran.as_ref().map(Ran::answered) {
                Ok(Answered::Success { .. }) => tracing::info!(%job, extension = name, "told of the job's end"),
                Ok(Answered::Failure(error)) => {
                    tracing::warn!(%job, extension = name, code = %error.code, error.message, "extension failed");
                }
                Err(error) => return tracing::warn!(%job, extension = name, %error, "not told of the job's end"),
            }
        }
    }
}
