//! A job's events: the stored ones first, then live ones, without a gap and without repetition.

use std::time::Duration;

use tokio::sync::{broadcast, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use toolproto::api::{EventBody, EventView};
use toolproto::ids::JobId;
use toolproto::job::Problem;

use super::Dispatcher;
use crate::caller::Caller;
use crate::feed::{Change, Seen};
use crate::launch::Launch;
use crate::ledger::{Ledger, LedgerError};
use crate::session::Session;
use crate::session::event::Event;

/// How many events wait for a slow reader before the job's events are read from the ledger again.
const AHEAD: usize = 64;
/// How many events are read from the ledger at once.
const PAGE: usize = 256;

/// How far a job's events are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// What has happened so far.
    Now,
    /// What happens until the job has ended.
    End,
}

impl<L: Launch> Dispatcher<L> {
    /// A job's events after this number: stored ones, then live ones. Ends after `job.ended`, or when agentd stops.
    ///
    /// # Errors
    /// NOT_FOUND when there is no job that the caller may see.
    pub async fn events(
        &self,
        caller: &Caller,
        id: JobId,
        after: u64,
        until: Until,
    ) -> Result<impl Stream<Item = EventView> + Send + use<L>, Problem> {
        self.row(caller, id).await?;
        let live = match until {
            Until::Now => None,
            Until::End => self.inner.table().live.get(&id).map(|live| live.feed.subscribe()),
        };
        let (sender, receiver) = mpsc::channel(AHEAD);
        let (ledger, stop) = (self.inner.shared.ledger.clone(), self.inner.stop.clone());
        self.inner.tasks.spawn(async move {
            let mut follower = Follower { job: id, ledger, session: Session::new(), folded: 0, shown: after, sender };
            tokio::select! {
                () = stop.cancelled() => {}
                () = follower.follow(live) => {}
            }
        });
        Ok(ReceiverStream::new(receiver))
    }
}

struct Follower {
    job: JobId,
    ledger: Ledger,
    /// Folded from the stored events, to know what each means.
    session: Session,
    folded: u64,
    /// The last event that was shown whole.
    shown: u64,
    sender: mpsc::Sender<EventView>,
}

/// The reader has gone.
struct Gone;

impl Follower {
    async fn follow(&mut self, live: Option<broadcast::Receiver<Seen>>) {
        let Some(mut live) = live else {
            self.replay().await;
            return;
        };
        loop {
            if !self.replay().await {
                return;
            }
            // Ends when events were missed: those that are kept are in the ledger.
            loop {
                match live.recv().await {
                    Ok(seen) => match self.show(seen).await {
                        Ok(false) => {}
                        Ok(true) | Err(Gone) => return,
                    },
                    Err(broadcast::error::RecvError::Lagged(_)) => break,
                    Err(broadcast::error::RecvError::Closed) => {
                        self.replay().await;
                        return;
                    }
                }
            }
        }
    }

    /// Shows what is stored and was not shown yet. Whether there may be more.
    async fn replay(&mut self) -> bool {
        loop {
            match self.page().await {
                Ok(Some(true)) => {}
                Ok(Some(false)) => return true,
                Ok(None) => return false,
                Err(error) => {
                    tracing::error!(job = %self.job, %error, "a job's events cannot be read");
                    return false;
                }
            }
        }
    }

    /// Shows one page: whether there may be another, or `None` when this was the end.
    async fn page(&mut self) -> Result<Option<bool>, LedgerError> {
        // One more than a page, to know what follows its last.
        let mut events = self.ledger.events(self.job, self.folded, PAGE + 1).await?;
        let following = if events.len() > PAGE { events.pop() } else { None };
        let full = following.is_some();
        let mut events = events.into_iter().peekable();
        while let Some(stored) = events.next() {
            let next = events.peek().or(following.as_ref());
            // An end that was taken back is none.
            let goes_on = next.is_some_and(|next| matches!(next.event, Event::Reopened { .. }));
            let change = Change::before(&self.session, &stored);
            let at = Duration::from_millis(stored.elapsed_ms);
            self.session.apply(&stored.event, at).map_err(|error| LedgerError::Row {
                what: "event",
                job: self.job.to_string(),
                reason: error.to_string(),
            })?;
            self.folded = stored.sequence;
            let is_end = |seen: &Seen| matches!(seen.view.body, EventBody::JobEnded { .. });
            let pieces = change.after(self.job, &self.session, &stored);
            for seen in pieces.into_iter().filter(|seen| !(goes_on && is_end(seen))) {
                match self.show(seen).await {
                    Ok(false) => {}
                    Ok(true) | Err(Gone) => return Ok(None),
                }
            }
        }
        Ok(Some(full))
    }

    /// Shows a piece of an event, unless it was shown before. Whether it was the job's last.
    async fn show(&mut self, Seen { of, view }: Seen) -> Result<bool, Gone> {
        if of.is_some_and(|of| of <= self.shown) {
            return Ok(matches!(view.body, EventBody::JobEnded { .. }));
        }
        let last = matches!(view.body, EventBody::JobEnded { .. });
        if let Some(sequence) = view.sequence {
            self.shown = sequence;
        }
        self.sender.send(view).await.map_err(|_| Gone)?;
        Ok(last)
    }
}
