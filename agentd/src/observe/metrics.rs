//! The figures of `GET /metrics`, as OpenMetrics text. Labels are names from the configuration and codes, so their number is
//! bounded.

use std::fmt;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use toolproto::api::EventBody;
use toolproto::code::Code;
use toolproto::job::{JobResult, Verdict};
use toolproto::receipt::Usage;

use super::Observation;
use super::pressure::Pressure;
use crate::breaker::State;

/// The media type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Upper bounds of the duration buckets, in seconds: from a warm tool to a build.
const SECONDS: [f64; 12] = [0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0, 10.0, 30.0, 120.0, 600.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTool {
    tool: String,
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Tool {
    tool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCode {
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Direction {
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByBreaker {
    breaker: String,
    state: &'static str,
}

/// What the figures show of this moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Jobs that run.
    pub running: usize,
    /// Jobs that wait.
    pub queued: usize,
    /// Where each breaker stands.
    pub breakers: Vec<(String, State)>,
}

/// All figures.
pub struct Metrics {
    registry: Registry,
    jobs: Family<ByCode, Counter>,
    job_seconds: Histogram,
    calls: Family<ByTool, Counter>,
    call_seconds: Family<Tool, Histogram>,
    cpu_seconds: Counter<f64, std::sync::atomic::AtomicU64>,
    tokens: Family<Direction, Counter>,
    cost: Counter<f64, std::sync::atomic::AtomicU64>,
    receipts: Counter,
    refusals: Family<ByCode, Counter>,
    breakers: Family<ByBreaker, Gauge>,
    breaker_changes: Family<ByBreaker, Counter>,
    dropped: Counter,
    running: Gauge,
    queued: Gauge,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All figures at zero.
    #[must_use]
    pub fn new() -> Self {
        let seconds = || Histogram::new(SECONDS);
        let mut metrics = Self {
            registry: Registry::with_prefix("agentd"),
            jobs: Family::default(),
            job_seconds: seconds(),
            calls: Family::default(),
            call_seconds: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            cpu_seconds: Counter::default(),
            tokens: Family::default(),
            cost: Counter::default(),
            receipts: Counter::default(),
            refusals: Family::default(),
            breakers: Family::default(),
            breaker_changes: Family::default(),
            dropped: Counter::default(),
            running: Gauge::default(),
            queued: Gauge::default(),
        };
        let registry = &mut metrics.registry;
        registry.register("jobs", "Jobs that ended, by code (OK for success)", metrics.jobs.clone());
        registry.register_with_unit("job_duration", "How long jobs ran", Unit::Seconds, metrics.job_seconds.clone());
        registry.register("calls", "Calls that ended, by tool and code (OK for success)", metrics.calls.clone());
        let call_seconds = metrics.call_seconds.clone();
        registry.register_with_unit("call_duration", "How long calls ran, by tool", Unit::Seconds, call_seconds);
        let cpu = metrics.cpu_seconds.clone();
        registry.register_with_unit("tool_cpu", "Processor time of tools", Unit::Seconds, cpu);
        registry.register("model_tokens", "Tokens of ended jobs, read and written by models", metrics.tokens.clone());
        registry.register("model_cost_usd", "US dollars of ended jobs, by the configured prices", metrics.cost.clone());
        registry.register("receipts", "Receipts of calls that were stored", metrics.receipts.clone());
        registry.register("refused_requests", "Requests that were refused, by code", metrics.refusals.clone());
        let breakers = metrics.breakers.clone();
        registry.register("breaker", "1 for the state in which a breaker is, by tool or runtime", breakers);
        let changes = metrics.breaker_changes.clone();
        registry.register("breaker_changes", "How often a breaker came into a state", changes);
        let dropped = metrics.dropped.clone();
        registry.register("dropped_observations", "Observations that did not fit into the queue", dropped);
        registry.register_collector(Box::new(Pressure::of_host()));
        registry.register("jobs_running", "Jobs that run now", metrics.running.clone());
        registry.register("jobs_queued", "Jobs that wait for their turn now", metrics.queued.clone());
        metrics
    }

    /// Counts one thing that happened.
    pub fn count(&self, observation: &Observation) {
        match observation {
            Observation::Job { event, .. } => match &event.body {
                EventBody::CallEnded { tool, code, usage, .. } => self.count_call(tool, *code, usage.as_ref()),
                EventBody::JobEnded { result } => self.count_job(result),
                _ => {}
            },
            Observation::Direct { tool, code, usage, .. } => self.count_call(tool, *code, usage.as_ref()),
            Observation::Refused { code, .. } => {
                self.refusals.get_or_create(&ByCode { code: code.as_str() }).inc();
            }
            Observation::Breaker { breaker, to, .. } => {
                let changed = ByBreaker { breaker: breaker.clone(), state: to.as_str() };
                self.breaker_changes.get_or_create(&changed).inc();
            }
            Observation::KeyChanged { .. } | Observation::Act { .. } => {}
        }
    }

    /// Counts one thing that could not be counted otherwise.
    pub fn count_dropped(&self) {
        self.dropped.inc();
    }

    /// The figures as OpenMetrics text.
    ///
    /// # Errors
    /// Never in practice: a string takes all that is written to it.
    pub fn text(&self, load: &Load) -> Result<String, fmt::Error> {
        self.running.set(i64::try_from(load.running).unwrap_or(i64::MAX));
        self.queued.set(i64::try_from(load.queued).unwrap_or(i64::MAX));
        for (breaker, now) in &load.breakers {
            for state in [State::Closed, State::Open, State::HalfOpen] {
                let labels = ByBreaker { breaker: breaker.clone(), state: state.as_str() };
                self.breakers.get_or_create(&labels).set(i64::from(state == *now));
            }
        }
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    fn count_call(&self, tool: &str, code: Option<Code>, usage: Option<&Usage>) {
        self.calls.get_or_create(&ByTool { tool: tool.to_owned(), code: word(code) }).inc();
        self.receipts.inc();
        if let Some(usage) = usage {
            let tool = Tool { tool: tool.to_owned() };
            self.call_seconds
                .get_or_create(&tool)
                .observe(std::time::Duration::from_millis(usage.wall_ms).as_secs_f64());
            self.cpu_seconds.inc_by(std::time::Duration::from_micros(usage.cpu_usec).as_secs_f64());
        }
    }

    fn count_job(&self, result: &JobResult) {
        let code = match &result.verdict {
            Verdict::Success { .. } => None,
            Verdict::Failed { error_code, .. } => Some(*error_code),
        };
        self.jobs.get_or_create(&ByCode { code: word(code) }).inc();
        self.job_seconds.observe(result.usage.wall_seconds);
        self.tokens.get_or_create(&Direction { direction: "input" }).inc_by(result.usage.input_tokens);
        self.tokens.get_or_create(&Direction { direction: "output" }).inc_by(result.usage.output_tokens);
        self.cost.inc_by(result.usage.cost_usd);
    }
}

const fn word(code: Option<Code>) -> &'static str {
    match code {
        Some(code) => code.as_str(),
        None => "OK",
    }
}

#[cfg(test)]
mod tests {
    use toolproto::ids::{CallId, JobId};

    use super::*;

    #[test]
    fn what_was_counted_stands_in_the_text() {
        let metrics = Metrics::new();
        metrics.count(&Observation::Direct {
            uid: 1000,
            job: JobId::from_u128(1),
            call: CallId::from_u128(2),
            tool: "stats".to_owned(),
            code: Some(Code::ToolTimeout),
            usage: Some(Usage { wall_ms: 40, cpu_usec: 500_000, ..Usage::default() }),
        });
        metrics.count(&Observation::Breaker {
            uid: None,
            breaker: "stats".to_owned(),
            from: State::Closed,
            to: State::Open,
            reason: "4 of the last 4 calls failed".to_owned(),
        });
        let breakers = vec![("stats".to_owned(), State::Open)];
        let text = metrics.text(&Load { running: 2, queued: 1, breakers }).unwrap();
        for line in [
            "agentd_calls_total{tool=\"stats\",code=\"TOOL_TIMEOUT\"} 1",
            "agentd_call_duration_seconds_bucket{le=\"0.05\",tool=\"stats\"} 1",
            "agentd_tool_cpu_seconds_total 0.5",
            "agentd_jobs_running 2",
            "agentd_jobs_queued 1",
            "agentd_breaker{breaker=\"stats\",state=\"open\"} 1",
            "agentd_breaker{breaker=\"stats\",state=\"closed\"} 0",
            "agentd_breaker_changes_total{breaker=\"stats\",state=\"open\"} 1",
        ] {
            assert!(text.contains(line), "{line} is missing from\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
