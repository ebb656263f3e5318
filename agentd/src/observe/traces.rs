//! Traces: what a job did, as spans with the names and attributes of OpenTelemetry's conventions for generative AI.
//!
//! ```text
//!   invoke_agent AGENT ──┬── chat MODEL            one request to the model, as long as the job was planning
//!                        └── execute_tool TOOL     one call
//! ```
//!
//! A job's id is its trace's, a call's id gives its span's: a job that goes on after a restart stays one trace, and a tool that is
//! given its `traceparent` can add to it. Spans hold names, codes, times and counts; never what was said, asked or answered.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use toolproto::api::{EventBody, EventView, Phase};
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};
use toolproto::job::{JobUsage, Verdict};

use super::{Observation, Performer};

/// How many unfinished jobs are followed. One that ends unseen is never taken off, so there is an end to it.
const MOST_JOBS: usize = 10_000;

/// The trace context that a tool may go on with (W3C Trace Context, section 3.2).
#[must_use]
pub fn traceparent(job: JobId, call: CallId) -> String {
    format!("00-{:032x}-{:016x}-01", job.as_u128(), low(call.as_u128()))
}

/// A span's id: the random half of another id.
const fn low(bits: u128) -> u64 {
    (bits & u64::MAX as u128) as u64
}

/// Jobs that have begun and not ended.
#[derive(Debug, Default)]
pub struct Traces {
    jobs: HashMap<JobId, Open>,
}

/// A job that has not ended, as far as it was seen.
#[derive(Debug)]
struct Open {
    began: Timestamp,
    /// Since when it is in its phase, and what it had used then.
    phase: Option<(Timestamp, JobUsage)>,
    calls: HashMap<CallId, Timestamp>,
}

impl Traces {
    /// The spans that end with this.
    pub fn follow(&mut self, observation: &Observation) -> Vec<SpanData> {
        match observation {
            Observation::Job { performer, event, .. } => self.follow_job(performer, event),
            Observation::Direct { job, call, tool, code, usage, .. } => {
                let end = Timestamp::now();
                let took = usage.as_ref().map_or(Duration::ZERO, |usage| Duration::from_millis(usage.wall_ms));
                let span = Span {
                    trace: *job,
                    id: low(call.as_u128()),
                    parent: None,
                    name: format!("execute_tool {tool}"),
                    kind: SpanKind::Internal,
                    start: end.saturating_sub(took).unwrap_or(end),
                    end,
                    code: *code,
                };
                vec![span.with(of_call(*call, tool))]
            }
            Observation::Refused { .. }
            | Observation::Breaker { .. }
            | Observation::KeyChanged { .. }
            | Observation::Act { .. } => Vec::new(),
        }
    }

    fn follow_job(&mut self, performer: &Arc<Performer>, event: &EventView) -> Vec<SpanData> {
        let job = event.job_id;
        if !self.jobs.contains_key(&job) && self.jobs.len() >= MOST_JOBS {
            return Vec::new();
        }
        let open =
            self.jobs.entry(job).or_insert_with(|| Open { began: event.time, phase: None, calls: HashMap::new() });
        let root = low(job.as_u128());
        let span = |id, name, kind, start, code| Span {
            trace: job,
            id,
            parent: Some(root),
            name,
            kind,
            start,
            end: event.time,
            code,
        };
        match &event.body {
            EventBody::Phase { from, usage, .. } => {
                let before = open.phase.replace((event.time, *usage));
                let (Phase::Planning, Some((start, used))) = (*from, before) else { return Vec::new() };
                let id = low(CallId::generate().as_u128());
                let chat = span(id, format!("chat {}", performer.model), SpanKind::Client, start, None);
                vec![chat.with([of_model("chat", performer), spent(&used, usage)].concat())]
            }
            EventBody::CallStarted { call_id, .. } => {
                open.calls.insert(*call_id, event.time);
                Vec::new()
            }
            EventBody::CallEnded { call_id, tool, code, .. } => {
                let start = open.calls.remove(call_id).unwrap_or(event.time);
                let name = format!("execute_tool {tool}");
                let call = span(low(call_id.as_u128()), name, SpanKind::Internal, start, *code);
                vec![call.with(of_call(*call_id, tool))]
            }
            EventBody::JobEnded { result } => {
                let code = match &result.verdict {
                    Verdict::Success { .. } => None,
                    Verdict::Failed { error_code, .. } => Some(*error_code),
                };
                let name = format!("invoke_agent {}", performer.agent);
                let whole = Span { parent: None, ..span(root, name, SpanKind::Internal, open.began, code) };
                let mut attributes = of_model("invoke_agent", performer);
                attributes.push(KeyValue::new("gen_ai.agent.name", performer.agent.clone()));
                attributes.push(KeyValue::new("gen_ai.conversation.id", job.to_string()));
                attributes.extend(spent(&JobUsage::default(), &result.usage));
                self.jobs.remove(&job);
                vec![whole.with(attributes)]
            }
            EventBody::ModelDelta { .. }
            | EventBody::CallProgress { .. }
            | EventBody::ApprovalRequested { .. }
            | EventBody::QuestionAsked { .. } => Vec::new(),
        }
    }
}

fn of_model(operation: &'static str, performer: &Performer) -> Vec<KeyValue> {
    vec![
        KeyValue::new("gen_ai.operation.name", operation),
        KeyValue::new("gen_ai.provider.name", performer.provider),
        KeyValue::new("gen_ai.request.model", performer.model.clone()),
    ]
}

fn of_call(call: CallId, tool: &str) -> Vec<KeyValue> {
    vec![
        KeyValue::new("gen_ai.operation.name", "execute_tool"),
        KeyValue::new("gen_ai.tool.name", tool.to_owned()),
        KeyValue::new("gen_ai.tool.call.id", call.to_string()),
        KeyValue::new("gen_ai.tool.type", "function"),
    ]
}

/// The tokens that were used between two moments.
fn spent(before: &JobUsage, after: &JobUsage) -> Vec<KeyValue> {
    let tokens = |before: u64, after: u64| i64::try_from(after.saturating_sub(before)).unwrap_or(i64::MAX);
    vec![
        KeyValue::new("gen_ai.usage.input_tokens", tokens(before.input_tokens, after.input_tokens)),
        KeyValue::new("gen_ai.usage.output_tokens", tokens(before.output_tokens, after.output_tokens)),
    ]
}

/// What all spans have.
struct Span {
    trace: JobId,
    id: u64,
    parent: Option<u64>,
    name: String,
    kind: SpanKind,
    start: Timestamp,
    end: Timestamp,
    code: Option<Code>,
}

impl Span {
    fn with(self, mut attributes: Vec<KeyValue>) -> SpanData {
        if let Some(code) = self.code {
            attributes.push(KeyValue::new("error.type", code.as_str()));
        }
        let context = SpanContext::new(
            TraceId::from_bytes(self.trace.as_u128().to_be_bytes()),
            SpanId::from_bytes(self.id.to_be_bytes()),
            TraceFlags::SAMPLED,
            false,
            TraceState::NONE,
        );
        SpanData {
            span_context: context,
            parent_span_id: self.parent.map_or(SpanId::INVALID, |id| SpanId::from_bytes(id.to_be_bytes())),
            parent_span_is_remote: false,
            span_kind: self.kind,
            name: self.name.into(),
            start_time: system_time(self.start),
            end_time: system_time(self.end),
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: self.code.map_or(Status::Unset, |code| Status::error(code.as_str())),
            instrumentation_scope: InstrumentationScope::builder("agentd")
                .with_version(env!("CARGO_PKG_VERSION"))
                .build(),
        }
    }
}

/// As the spans' type has it; what is before 1970 is not.
fn system_time(time: Timestamp) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(time.as_microsecond()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use toolproto::api::API_VERSION;
    use toolproto::receipt::Usage;

    use super::*;

    const JOB: JobId = JobId::from_u128(0x0190_0000_0000_7000_8000_0000_0000_00aa);
    const CALL: CallId = CallId::from_u128(0x0190_0000_0000_7000_8000_0000_0000_00bb);

    fn seen(second: i64, body: EventBody) -> Observation {
        let time = Timestamp::from_second(second).unwrap();
        let event = EventView { version: API_VERSION, sequence: None, job_id: JOB, time, body };
        let performer = Performer { agent: "clerk".to_owned(), provider: "openai", model: "small".to_owned() };
        Observation::Job { uid: 1000, performer: Arc::new(performer), event }
    }

    fn phase(second: i64, from: Phase, to: Phase, tokens: u64) -> Observation {
        let usage = JobUsage { input_tokens: tokens, output_tokens: tokens / 10, ..JobUsage::default() };
        seen(second, EventBody::Phase { from, to, reason: "ON_X".to_owned(), usage })
    }

    fn attribute(span: &SpanData, key: &str) -> Option<String> {
        span.attributes.iter().find(|one| one.key.as_str() == key).map(|one| one.value.to_string())
    }

    fn seconds(span: &SpanData) -> (u64, u64) {
        let since = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        (since(span.start_time), since(span.end_time))
    }

    #[test]
    fn a_job_is_a_trace_of_its_requests_and_calls() {
        let mut traces = Traces::default();
        let mut spans = Vec::new();
        let secret = json!({"password": "hush"});
        for observation in [
            phase(10, Phase::Idle, Phase::Planning, 0),
            phase(13, Phase::Planning, Phase::Executing, 500),
            seen(14, EventBody::CallStarted { call_id: CALL, tool: "read".to_owned(), arguments: secret }),
            seen(
                16,
                EventBody::CallEnded {
                    call_id: CALL,
                    tool: "read".to_owned(),
                    ok: false,
                    code: Some(Code::ToolTimeout),
                    usage: None,
                },
            ),
            phase(16, Phase::Executing, Phase::Observing, 500),
            phase(16, Phase::Observing, Phase::Planning, 500),
            phase(18, Phase::Planning, Phase::Observing, 1300),
        ] {
            spans.extend(traces.follow(&observation));
        }
        let names: Vec<&str> = spans.iter().map(|span| span.name.as_ref()).collect();
        assert_eq!(names, ["chat small", "execute_tool read", "chat small"]);
        assert_eq!(spans.iter().map(seconds).collect::<Vec<_>>(), [(10, 13), (14, 16), (16, 18)]);
        let tokens: Vec<_> = spans.iter().map(|span| attribute(span, "gen_ai.usage.input_tokens")).collect();
        assert_eq!(tokens, [Some("500".to_owned()), None, Some("800".to_owned())]);
        assert_eq!(attribute(&spans[1], "error.type").as_deref(), Some("TOOL_TIMEOUT"));
        assert_eq!(spans[1].status, Status::error("TOOL_TIMEOUT"));
        for span in &spans {
            assert_eq!(span.span_context.trace_id().to_string(), format!("{:032x}", JOB.as_u128()));
            assert_eq!(span.parent_span_id.to_string(), "80000000000000aa");
            assert!(!format!("{span:?}").contains("hush"), "arguments are nobody's business: {span:?}");
        }
        assert_eq!(
            traceparent(JOB, CALL),
            format!("00-{}-{}-01", spans[1].span_context.trace_id(), spans[1].span_context.span_id())
        );
    }

    #[test]
    fn a_direct_call_is_a_trace_of_its_own() {
        let usage = Usage { wall_ms: 3000, ..Usage::default() };
        let observation = Observation::Direct {
            uid: 0,
            job: JOB,
            call: CALL,
            tool: "read".to_owned(),
            code: None,
            usage: Some(usage),
        };
        let spans = Traces::default().follow(&observation);
        assert_eq!(spans.len(), 1);
        assert_eq!((spans[0].parent_span_id, spans[0].status.clone()), (SpanId::INVALID, Status::Unset));
        assert_eq!(spans[0].end_time.duration_since(spans[0].start_time).unwrap(), Duration::from_secs(3));
    }

    #[test]
    fn jobs_that_never_end_are_not_collected_without_bound() {
        let mut traces = Traces::default();
        for number in 0..MOST_JOBS + 10 {
            let Observation::Job { uid, performer, mut event } = phase(1, Phase::Idle, Phase::Planning, 0) else {
                unreachable!()
            };
            event.job_id = JobId::from_u128(number as u128);
            traces.follow(&Observation::Job { uid, performer, event });
        }
        assert_eq!(traces.jobs.len(), MOST_JOBS);
    }
}
