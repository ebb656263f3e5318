//! What watches agentd's work without taking part in it: the audit log, the metrics and the traces. Best effort and bounded: what
//! does not fit into a queue is counted and dropped, and no job ever waits for it.
//!
//! ```text
//!   jobs, direct calls, API ── try_send ──► queue ──► one task ──┬──► audit.log, metrics
//!                                                       └──► spans ──► queue ──► one task ──► collector
//! ```

pub mod audit;
pub mod metrics;
pub mod otlp;
mod pressure;
pub mod slices;
pub mod traces;

use std::sync::Arc;

use tokio::sync::mpsc;
use toolproto::api::EventView;
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId, RequestId};
use toolproto::receipt::Usage;

use self::audit::AuditLog;
use self::metrics::Metrics;
use self::otlp::Spans;
use self::traces::Traces;
use crate::breaker::State;

/// How many observations wait.
const QUEUE: usize = 4096;

/// Who works at a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Performer {
    /// The agent.
    pub agent: String,
    /// Who makes its first model, by the names of OpenTelemetry's conventions.
    pub provider: &'static str,
    /// Its first model.
    pub model: String,
}

/// One thing that happened.
#[derive(Clone, Debug)]
pub enum Observation {
    /// An event of a job.
    Job {
        /// The job's owner.
        uid: u32,
        /// Who works at it.
        performer: Arc<Performer>,
        /// The event.
        event: EventView,
    },
    /// A direct call or a command is over.
    Direct {
        /// Who asked.
        uid: u32,
        /// The implicit job.
        job: JobId,
        /// The call.
        call: CallId,
        /// The tool; `exec` for commands.
        tool: String,
        /// The failure's code.
        code: Option<Code>,
        /// What it used.
        usage: Option<Usage>,
    },
    /// A request was refused.
    Refused {
        /// Who asked; unknown when the connection itself is.
        uid: Option<u32>,
        /// The request.
        request: RequestId,
        /// Method and path.
        head: String,
        /// Why.
        code: Code,
        /// In words.
        detail: String,
    },
    /// A breaker changed its state.
    Breaker {
        /// Who did it; nobody when the calls did.
        uid: Option<u32>,
        /// The tool, or `runtime:NAME`.
        breaker: String,
        /// The state before.
        from: State,
        /// The state after.
        to: State,
        /// Why.
        reason: String,
    },
    /// Receipts are signed by another key.
    KeyChanged {
        /// The key before.
        from: String,
        /// The key that signs now.
        to: String,
        /// What the key before has to say to it.
        reason: &'static str,
    },
    /// A person steered a job.
    Act {
        /// Who.
        uid: u32,
        /// The job.
        job: JobId,
        /// What: `cancel`.
        act: &'static str,
    },
}

/// Where observations go. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Observer {
    queue: Option<mpsc::Sender<Observation>>,
    metrics: Arc<Metrics>,
}

impl Observer {
    /// An observer that counts nothing and writes nothing.
    #[must_use]
    pub fn blind() -> Self {
        Self { queue: None, metrics: Arc::new(Metrics::new()) }
    }

    /// Starts the task that writes and counts. It ends when the last observer is dropped.
    #[must_use]
    pub fn start(mut audit: Option<AuditLog>, spans: Option<Spans>) -> Self {
        let metrics = Arc::new(Metrics::new());
        let (sender, mut queue) = mpsc::channel(QUEUE);
        let counted = Arc::clone(&metrics);
        let mut traces = Traces::default();
        tokio::task::spawn_blocking(move || {
            while let Some(observation) = queue.blocking_recv() {
                counted.count(&observation);
                if let Some(audit) = &mut audit {
                    audit.record(&observation);
                }
                if let Some(spans) = &spans {
                    for span in traces.follow(&observation) {
                        if !spans.offer(span) {
                            counted.count_dropped();
                        }
                    }
                }
            }
        });
        Self { queue: Some(sender), metrics }
    }

    /// Passes an observation on, or drops it when the queue is full.
    pub fn tell(&self, observation: Observation) {
        if let Some(queue) = &self.queue
            && queue.try_send(observation).is_err()
        {
            self.metrics.count_dropped();
        }
    }

    /// The figures so far.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }
}
