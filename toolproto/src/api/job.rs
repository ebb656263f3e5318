//! Jobs: how far one is, and what happens in it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::code::Code;
use crate::ids::{CallId, JobId, RequestId};
use crate::job::{JobResult, JobUsage};
use crate::receipt::Usage;

/// Where a job stands, seen from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// Accepted, not begun.
    Queued,
    /// The loop works on it.
    Running,
    /// It waits for a person: an approval or an answer.
    Waiting,
    /// It has a result.
    Done,
}

/// Where a job's loop stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "UPPERCASE")]
pub enum Phase {
    /// Nothing to do: before the goal and after the result.
    Idle,
    /// The model is asked what to do next.
    Planning,
    /// Calls run.
    Executing,
    /// What came back is judged.
    Observing,
}

/// What kind of decision a waiting job wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum WaitKind {
    /// Whether a call may run.
    Approval,
    /// An answer to a question.
    Question,
}

/// What a waiting job waits for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WaitingFor {
    /// Approval or question.
    pub kind: WaitKind,
    /// The outstanding call.
    pub call_id: CallId,
    /// Its tool.
    pub tool: String,
    /// Its arguments.
    pub arguments: Value,
    /// When the wait ends without a decision.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
    pub expires: Option<Timestamp>,
}

/// A job as `GET /jobs/{id}` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobView {
    /// The version of this form: 1.
    pub version: u32,
    /// The job.
    pub job_id: JobId,
    /// Its agent; `call` and `exec` for implicit jobs of one call.
    pub agent: String,
    /// Where it stands.
    pub state: JobState,
    /// Where its loop stands.
    pub phase: Phase,
    /// Who submitted it.
    pub uid: u32,
    /// When it was accepted.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Time"))]
    pub submitted: Timestamp,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
    pub ended: Option<Timestamp>,
    /// Its workspace; absent without one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::AbsolutePath>"))]
    pub workspace: Option<PathBuf>,
    /// Its labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub labels: BTreeMap<String, String>,
    /// What it waits for, when it waits.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub waiting_for: Option<WaitingFor>,
    /// What it used so far.
    pub usage: JobUsage,
    /// Bytes of memory that its tools hold now; absent when none runs, or the host does not count.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub memory_bytes: Option<u64>,
    /// Its result, once it is done.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<JobResult>,
}

/// A page of `GET /jobs`, newest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobPage {
    /// The version of this form: 1.
    pub version: u32,
    /// The jobs.
    pub jobs: Vec<JobView>,
    /// The `before` of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next: Option<JobId>,
}

/// Which jobs `GET /jobs` lists: the query after the question mark.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobFilter {
    /// In this state only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub state: Option<JobState>,
    /// Of this agent only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub agent: Option<String>,
    /// With this label only: `name` or `name=value`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub label: Option<String>,
    /// Older than this job only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub before: Option<JobId>,
    /// At most so many; see [`JobFilter::limit`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub limit: Option<u32>,
}

impl JobFilter {
    /// The page size where the request names none.
    pub const DEFAULT_LIMIT: u32 = 50;
    /// The largest page.
    pub const MAX_LIMIT: u32 = 500;

    /// How many jobs the page may hold.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit.unwrap_or(Self::DEFAULT_LIMIT).clamp(1, Self::MAX_LIMIT)
    }

    /// Whether a job with these labels is wanted.
    #[must_use]
    pub fn takes_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        match self.label.as_deref().map(|label| label.split_once('=').ok_or(label)) {
            None => true,
            Some(Ok((name, value))) => labels.get(name).is_some_and(|have| have == value),
            Some(Err(name)) => labels.contains_key(name),
        }
    }
}

/// One event of `GET /jobs/{id}/events`. As SSE: `id` is the sequence, `event` the name, `data` this object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EventView {
    /// The version of this form: 1.
    pub version: u32,
    /// The event's number within the job, from 1; absent for events that are not kept (`model.delta`, `call.progress`).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sequence: Option<u64>,
    /// The job.
    pub job_id: JobId,
    /// When it happened.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Time"))]
    pub time: Timestamp,
    /// What happened, under its name in `event`.
    #[serde(flatten)]
    pub body: EventBody,
}

/// What happened in a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event")]
pub enum EventBody {
    /// The loop went from one phase to another.
    #[serde(rename = "job.phase")]
    Phase {
        /// Left.
        from: Phase,
        /// Entered.
        to: Phase,
        /// Why: the session's event, such as `ON_PLAN_RECEIVED`.
        reason: String,
        /// What the job used so far.
        usage: JobUsage,
    },
    /// A piece of the model's answer. Not replayed.
    #[serde(rename = "model.delta")]
    ModelDelta {
        /// The piece.
        text: String,
    },
    /// A call was launched.
    #[serde(rename = "call.started")]
    CallStarted {
        /// The call.
        call_id: CallId,
        /// Its tool.
        tool: String,
        /// Its arguments.
        arguments: Value,
    },
    /// A tool said how far it is. Not replayed.
    #[serde(rename = "call.progress")]
    CallProgress {
        /// The call.
        call_id: CallId,
        /// From 0 to 1.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        progress: Option<f64>,
        /// In the tool's words.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        message: Option<String>,
    },
    /// A call is over and its receipt is stored.
    #[serde(rename = "call.ended")]
    CallEnded {
        /// The call.
        call_id: CallId,
        /// Its tool.
        tool: String,
        /// Whether it worked.
        ok: bool,
        /// The failure's code.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        code: Option<Code>,
        /// What it used; absent when it never ran.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        usage: Option<Usage>,
    },
    /// A call waits for a person's decision.
    #[serde(rename = "approval.requested")]
    ApprovalRequested {
        /// The call.
        call_id: CallId,
        /// Its tool.
        tool: String,
        /// Its arguments.
        arguments: Value,
        /// When the wait ends.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
        expires: Option<Timestamp>,
    },
    /// The agent asks a person.
    #[serde(rename = "question.asked")]
    QuestionAsked {
        /// The call.
        call_id: CallId,
        /// The question.
        text: String,
        /// When the wait ends.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Time>"))]
        expires: Option<Timestamp>,
    },
    /// The job has a result; the last event.
    #[serde(rename = "job.ended")]
    JobEnded {
        /// The result.
        result: Box<JobResult>,
    },
}

impl EventBody {
    /// The event's name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Phase { .. } => "job.phase",
            Self::ModelDelta { .. } => "model.delta",
            Self::CallStarted { .. } => "call.started",
            Self::CallProgress { .. } => "call.progress",
            Self::CallEnded { .. } => "call.ended",
            Self::ApprovalRequested { .. } => "approval.requested",
            Self::QuestionAsked { .. } => "question.asked",
            Self::JobEnded { .. } => "job.ended",
        }
    }
}

/// The answer to `POST /jobs/{id}/cancel` and the other requests that steer a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Steered {
    /// The version of this form: 1.
    pub version: u32,
    /// The job.
    pub job_id: JobId,
    /// Where it stood when the request was taken.
    pub state: JobState,
    /// The request, for the logs.
    pub request_id: RequestId,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::API_VERSION;

    #[test]
    fn an_event_is_one_flat_object_with_its_name_inside() {
        let event = EventView {
            version: API_VERSION,
            sequence: Some(7),
            job_id: JobId::from_u128(1),
            time: Timestamp::UNIX_EPOCH,
            body: EventBody::CallEnded {
                call_id: CallId::from_u128(2),
                tool: "stats".to_owned(),
                ok: false,
                code: Some(Code::ToolTimeout),
                usage: None,
            },
        };
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["event"], event.body.name());
        assert_eq!(json["sequence"], 7);
        assert_eq!(json["code"], "TOOL_TIMEOUT");
        assert_eq!(serde_json::from_value::<EventView>(json).unwrap(), event);
    }

    #[test]
    fn labels_are_found_by_name_or_by_name_and_value() {
        let labels = BTreeMap::from([("team".to_owned(), "sales".to_owned())]);
        let takes =
            |label: &str| JobFilter { label: Some(label.to_owned()), ..JobFilter::default() }.takes_labels(&labels);
        assert!(takes("team") && takes("team=sales"));
        assert!(!takes("team=ops") && !takes("sales") && !takes("team="));
        assert!(JobFilter::default().takes_labels(&BTreeMap::new()));
    }

    #[test]
    fn pages_are_bounded() {
        let limit = |limit| JobFilter { limit, ..JobFilter::default() }.limit();
        assert_eq!((limit(None), limit(Some(0)), limit(Some(9)), limit(Some(u32::MAX))), (50, 1, 9, 500));
    }
}
