//! What those who watch a job see. Best effort and bounded: a watcher that is too slow reads the ledger instead, and never
//! slows the job.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::{broadcast, watch};
use toolproto::api::{API_VERSION, EventBody, EventView, Phase, WaitKind, WaitingFor};
use toolproto::ids::{CallId, JobId};
use toolproto::job::JobUsage;
use toolproto::progress::Progress;
use toolproto::receipt::EXTENSION_PREFIX;

use crate::ledger::Stored;
use crate::observe::{Observation, Observer, Performer};
use crate::session::event::{CallRecord, Event, PlannedCall};
use crate::session::{BatchCall, Session, question};

/// How many events wait for a slow watcher.
const BACKLOG: usize = 256;

/// Where a running job stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Its phase.
    pub phase: Phase,
    /// What it used so far.
    pub usage: JobUsage,
    /// What it waits for a person for.
    pub waiting: Option<WaitingFor>,
}

impl Snapshot {
    /// Where a session stands when its job has run for `now`.
    #[must_use]
    pub fn of(session: &Session, now: Duration) -> Self {
        let waiting = session.asked().next().map(|(one, until)| waiting(one, until, now));
        Self { phase: session.phase(), usage: session.usage(now), waiting }
    }
}

/// A call that waits for a person's decision until the job has run for so long, seen when it has run for `now`.
fn waiting(one: &BatchCall, until: Duration, now: Duration) -> WaitingFor {
    WaitingFor {
        kind: if one.planned.question { WaitKind::Question } else { WaitKind::Approval },
        call_id: one.planned.call,
        tool: one.planned.tool.clone(),
        arguments: one.planned.arguments.to_value(),
        expires: jiff::Timestamp::now().checked_add(until.saturating_sub(now)).ok(),
    }
}

/// A piece of an event, with the number of the event that it belongs to, if that is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// The event's number.
    pub of: Option<u64>,
    /// The piece.
    pub view: EventView,
}

/// A job's watchers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Feed {
    job: JobId,
    events: broadcast::Sender<Seen>,
    snapshot: watch::Sender<Snapshot>,
    uid: u32,
    performer: Arc<Performer>,
    observer: Observer,
}

impl Feed {
    /// A feed of a job of this user's that only the observer watches yet.
    #[must_use]
    pub fn new(job: JobId, uid: u32, performer: Performer, session: &Session, observer: Observer) -> Self {
        let snapshot = Snapshot::of(session, session.elapsed());
        let (events, snapshot) = (broadcast::channel(BACKLOG).0, watch::channel(snapshot).0);
        Self { job, events, snapshot, uid, performer: Arc::new(performer), observer }
    }

    /// The events from now on.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<Seen> {
        self.events.subscribe()
    }

    /// Where the job stands.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.snapshot.borrow().clone()
    }

    /// A piece of a model's answer.
    pub fn delta(&self, text: &str) {
        self.tell_watchers(EventBody::ModelDelta { text: text.to_owned() });
    }

    /// The watchers of a call, by the id that the job knows it by.
    #[must_use]
    pub fn of_call(&self, call: CallId) -> CallFeed {
        CallFeed { feed: self.clone(), call }
    }

    /// What is not kept: only those who watch now see it.
    fn tell_watchers(&self, body: EventBody) {
        let time = jiff::Timestamp::now();
        // An error says that nobody watches.
        let view = EventView { version: API_VERSION, sequence: None, job_id: self.job, time, body };
        drop(self.events.send(Seen { of: None, view }));
    }

    /// What a stored event means to those who watch.
    pub fn publish(&self, views: Vec<Seen>, snapshot: Snapshot) {
        self.snapshot.send_replace(snapshot);
        for view in views {
            let performer = Arc::clone(&self.performer);
            self.observer.tell(Observation::Job { uid: self.uid, performer, event: view.view.clone() });
            drop(self.events.send(view));
        }
    }
}

/// The watchers of one call.
#[derive(Clone, Debug)]
pub struct CallFeed {
    feed: Feed,
    call: CallId,
}

impl CallFeed {
    /// How far the call is, in its tool's words.
    pub fn progress(&self, progress: Progress) {
        let Progress { progress, message } = progress;
        self.feed.tell_watchers(EventBody::CallProgress { call_id: self.call, progress, message });
    }
}

/// An event on its way into a session: what is seen of it depends on the session before and after.
#[derive(Debug)]
pub struct Change {
    /// The phase before.
    pub from: Phase,
    bodies: Vec<EventBody>,
}

impl Change {
    /// Looks at the session before the event.
    #[must_use]
    pub fn before(session: &Session, stored: &Stored) -> Self {
        let planned = |call| session.call(call).map(|one| &one.planned);
        let ended = |call, record: &CallRecord| EventBody::CallEnded {
            call_id: call,
            tool: planned(call).map(|planned| planned.tool.clone()).unwrap_or_default(),
            ok: record.code.is_none(),
            code: record.code,
            usage: record.usage.clone(),
        };
        let bodies = match &stored.event {
            Event::CallStarted { call } => planned(*call)
                .map(|planned| EventBody::CallStarted {
                    call_id: *call,
                    tool: planned.tool.clone(),
                    arguments: planned.arguments.to_value(),
                })
                .into_iter()
                .collect(),
            Event::ApprovalRequested { call, until_ms } => {
                let wait = Duration::from_millis(until_ms.saturating_sub(stored.elapsed_ms));
                let expires = stored.time.checked_add(wait).ok();
                let body = |planned: &PlannedCall| match question::text(&planned.arguments) {
                    Some(text) if planned.question => {
                        EventBody::QuestionAsked { call_id: *call, text: text.to_owned(), expires }
                    }
                    _ => EventBody::ApprovalRequested {
                        call_id: *call,
                        tool: planned.tool.clone(),
                        arguments: planned.arguments.to_value(),
                        expires,
                    },
                };
                planned(*call).map(body).into_iter().collect()
            }
            Event::ExtensionStarted { call, extension, point } => vec![EventBody::CallStarted {
                call_id: *call,
                tool: format!("{EXTENSION_PREFIX}{extension}"),
                arguments: json!({"operation": point}),
            }],
            Event::ExtensionEnded { call, failure, usage, .. } => {
                let extension = session.consulted().map(|asked| asked.extension.as_str()).unwrap_or_default();
                vec![EventBody::CallEnded {
                    call_id: *call,
                    tool: format!("{EXTENSION_PREFIX}{extension}"),
                    ok: failure.is_none(),
                    code: failure.as_ref().map(|failure| failure.code),
                    usage: usage.clone(),
                }]
            }
            Event::ToolCompleted { call, record } | Event::ToolFailed { call, record } => vec![ended(*call, record)],
            Event::CommitWithdrawn { call, code, .. } => session
                .latest_call(*call)
                .map(|one| EventBody::CallEnded {
                    call_id: *call,
                    tool: one.planned.tool.clone(),
                    ok: false,
                    code: Some(*code),
                    usage: None,
                })
                .into_iter()
                .collect(),
            Event::Interrupted { results, .. } => results.iter().map(|(call, record)| ended(*call, record)).collect(),
            Event::PlanRefused { plan, results, .. } => plan
                .calls
                .iter()
                .zip(results)
                .map(|(planned, record)| EventBody::CallEnded {
                    call_id: planned.call,
                    tool: planned.tool.clone(),
                    ok: false,
                    code: record.code,
                    usage: None,
                })
                .collect(),
            _ => Vec::new(),
        };
        Self { from: session.phase(), bodies }
    }

    /// Looks at the session after the event, and gives what is to be seen. Only the last piece carries the event's number, so
    /// that whoever breaks off in between and asks again gets the whole event.
    #[must_use]
    pub fn after(self, job: JobId, session: &Session, stored: &Stored) -> Vec<Seen> {
        let mut bodies = self.bodies;
        let to = session.phase();
        if self.from != to {
            let usage = session.usage(session.elapsed());
            bodies.push(EventBody::Phase { from: self.from, to, reason: stored.event.name().to_owned(), usage });
        }
        if let Event::GoalConcluded { result } = &stored.event {
            bodies.push(EventBody::JobEnded { result: result.clone() });
        }
        let last = bodies.len().saturating_sub(1);
        let view = |(index, body)| Seen {
            of: Some(stored.sequence),
            view: EventView {
                version: API_VERSION,
                sequence: (index == last).then_some(stored.sequence),
                job_id: job,
                time: stored.time,
                body,
            },
        };
        bodies.into_iter().enumerate().map(view).collect()
    }
}
