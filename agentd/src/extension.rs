//! Extensions: programs that watch over jobs and may say a little. This is how one is asked; what its answer does is decided in
//! [`session::extension`](crate::session::extension).
//!
//! It runs as a tool does: in a sandbox of its own, with a deadline and a receipt. It sees the workspace read-only.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use sandbox::protocol::{Narrowing, Program};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolproto::api::ExtensionView;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::extension::{ExtensionManifest, Opinion, Point};
use toolproto::ids::{CallId, JobId};
use toolproto::job::JobResult;
use toolproto::manifest::{Effects, WORKSPACE};
use toolproto::request::{PROTOCOL, Request};

use crate::agent::Agent;
use crate::call::{self, Answered, Asked, Ran};
use crate::feed::CallFeed;
use crate::launch::{Launch, LinkError, Order, Recorded, Stdin};
use crate::model::transcript::{Arguments, Message};
use crate::observe::traces::traceparent;
use crate::session::Session;
use crate::spill::Spilling;

/// An extension, ready to be asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Extension {
    /// Its manifest.
    pub manifest: ExtensionManifest,
    /// The digest of its folder.
    pub digest: Digest,
    /// How long it may take.
    pub time: Duration,
}

impl Extension {
    /// Whether it can be asked again when it is not known whether it ran: it changes nothing, unless it reaches a host.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        self.manifest.program.hosts.is_empty()
    }

    /// As `GET /tools` shows it.
    #[must_use]
    pub fn view(&self) -> ExtensionView {
        let ExtensionManifest { version, name, description, points, required, program } = &self.manifest;
        ExtensionView {
            name: name.clone(),
            version: *version,
            description: description.clone(),
            digest: self.digest,
            operations: points.iter().copied().collect(),
            required: *required,
            runtime: program.runtime.clone(),
            policy: program.policy.clone(),
            timeout_ms: millis(self.time),
            hosts: program.hosts.clone(),
        }
    }
}

/// A question to an extension.
#[derive(Clone, Debug)]
pub struct Question {
    /// The job.
    pub job: JobId,
    /// The call's id.
    pub call: CallId,
    /// Where the job stands.
    pub point: Point,
    /// What there is to know.
    pub arguments: Value,
    /// The job's remaining time.
    pub time: Duration,
    /// Who hears how far it is.
    pub watcher: Option<CallFeed>,
}

/// What an extension is told while the job runs.
#[must_use]
pub fn arguments(session: &Session, agent: &Agent, job: JobId, point: Point) -> Value {
    let usage = session.usage(session.elapsed());
    let turn = usage.turns + u32::from(point == Point::BeforeTurn);
    let conversation: Vec<Value> = session.messages().iter().map(shown).collect();
    let mut told = json!({
        "agent": agent.name, "job_id": job, "turn": turn, "usage": usage, "conversation": conversation,
    });
    match point {
        Point::AfterToolBatch => told["calls"] = last_batch(session.messages()).into(),
        Point::BeforeFinalAnswer => told["answer"] = session.proposed_answer().into(),
        Point::BeforeTurn | Point::AfterRun => {}
    }
    told
}

/// What an extension is told when the job has its result.
#[must_use]
pub fn arguments_after_run(agent: &Agent, result: &JobResult) -> Value {
    json!({"agent": agent.name, "job_id": result.job_id, "result": result})
}

/// A message of the conversation, without what only its provider understands.
fn shown(message: &Message) -> Value {
    match message {
        Message::User(text) => json!({"role": "user", "text": text}),
        Message::Assistant(assistant) => {
            let call = |call: &crate::model::transcript::AskedCall| json!({"id": call.id, "tool": call.tool, "arguments": call.arguments.to_value()});
            let calls: Vec<Value> = assistant.calls.iter().map(call).collect();
            json!({"role": "assistant", "text": assistant.text, "calls": calls})
        }
        Message::Result(result) => {
            json!({"role": "tool", "id": result.id, "tool": result.tool, "result": result.content})
        }
    }
}

/// The calls of the last batch, with their results.
fn last_batch(messages: &[Message]) -> Vec<Value> {
    let batch = messages.iter().enumerate().rev().find_map(|(at, message)| match message {
        Message::Assistant(assistant) if !assistant.calls.is_empty() => Some((at, assistant)),
        _ => None,
    });
    let Some((at, assistant)) = batch else { return Vec::new() };
    let results = messages[at + 1..].iter().filter_map(|message| match message {
        Message::Result(result) => Some(&result.content),
        _ => None,
    });
    let with_result = |(call, result): (&crate::model::transcript::AskedCall, &Value)| json!({"tool": call.tool, "arguments": call.arguments.to_value(), "result": result});
    assistant.calls.iter().zip(results).map(with_result).collect()
}

/// Asks an extension and waits for its end. Cancelling ends it early. An answer that is no [`Opinion`] is a failure.
///
/// # Errors
/// When the launcher cannot be spoken with.
pub async fn ask<L: Launch>(
    launch: &L,
    extension: &Arc<Extension>,
    question: Question,
    cancel: CancellationToken,
) -> Result<Ran, LinkError> {
    let Question { job, call, point, arguments, time, watcher } = question;
    let name = extension.manifest.name.clone();
    let time = extension.time.min(time);
    let max_response = extension.manifest.program.max_response;
    let request = Request {
        protocol: PROTOCOL,
        operation: point.operation(),
        call_id: call,
        tool: name.clone(),
        arguments: arguments.clone(),
        workspace: Some(WORKSPACE.to_owned()),
        deadline: Timestamp::now().saturating_add(time).unwrap_or(Timestamp::MAX),
        timeout_ms: millis(time),
        max_response_bytes: max_response.0,
        idempotency_key: call.to_string(),
        traceparent: Some(traceparent(job, call)),
    };
    let mut ran = Ran {
        asked: Asked {
            job,
            call,
            attempt_of: call,
            tool: name.clone(),
            arguments: Arguments::Object(arguments),
            refusal: None,
            time,
            idempotency_key: call.to_string(),
            watcher: watcher.clone(),
            recorded: Recorded::default(),
        },
        program: Program::Extension { name },
        effects: Effects::ReadOnly,
        ended: None,
        answered: Answered::Success { result: json!({}), artifacts: Vec::new() },
        commit: false,
        notes: vec![format!("operation {point}")],
        spilling: Spilling::Never,
        named: Vec::new(),
    };
    let mut stdin = match serde_json::to_vec(&request) {
        Ok(stdin) => stdin,
        Err(error) => {
            let message = format!("the request is no JSON: {error}");
            ran.answered = Answered::Failure(call::failure(Code::InternalLogicError, message, Value::Null));
            return Ok(ran);
        }
    };
    stdin.push(b'\n');
    let order = Order {
        job,
        call,
        attempt_of: call,
        program: ran.program.clone(),
        stdin: Stdin::Bytes(stdin),
        streams: None,
        time,
        narrow: Narrowing { read_only: true, discardable: extension.is_repeatable(), ..Narrowing::default() },
        watcher,
        recorded: Recorded::default(),
    };
    let ended = launch.launch(order, cancel).await?;
    let (answered, notes) = call::read_reply(max_response, call, &ended);
    ran.answered = checked(point, answered);
    ran.notes.extend(notes);
    ran.ended = Some(ended);
    Ok(ran)
}

fn checked(point: Point, answered: Answered) -> Answered {
    let refuse = |message: String| Answered::Failure(call::failure(Code::ResponseInvalid, message, Value::Null));
    match answered {
        Answered::Success { artifacts, .. } if !artifacts.is_empty() => {
            refuse("the reply breaks the protocol at /artifacts: an extension has none".to_owned())
        }
        Answered::Success { result, artifacts } => match Opinion::read(point, result.clone()) {
            Ok(_) => Answered::Success { result, artifacts },
            Err(error) => refuse(error.to_string()),
        },
        failure @ Answered::Failure(_) => failure,
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
