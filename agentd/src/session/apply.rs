//! One event folded into the session. The only code that changes a session.

use std::time::Duration;

use serde_json::{Value, json};
use toolproto::api::Phase;
use toolproto::code::Code;
use toolproto::extension::{Opinion, Point};
use toolproto::ids::CallId;
use toolproto::job::{JobResult, ReceiptsHead, Verdict};
use toolproto::receipt::Usage;

use super::event::{BuiltIn, CallRecord, Event, Interruption, Plan, PlannedCall, ReceiptRef, Refusal, Spent};
use super::wait::Waiting;
use super::{
    Approval, BatchCall, Began, Closed, Counted, Observation, Progress, Session, context, extension, tool_search,
};
use crate::model::transcript::{AskedCall, Assistant, CallResult, Message};

/// An event that cannot happen where the session stands. The session is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{event} cannot happen in {phase:?}: {reason}")]
pub struct PhaseError {
    /// The event's name.
    pub event: &'static str,
    /// Where the session stands.
    pub phase: Phase,
    /// Why not.
    pub reason: &'static str,
}

impl Session {
    /// Folds in an event that happened when the job had run for `at`.
    ///
    /// # Errors
    /// When the event cannot happen where the session stands; the session is then unchanged.
    pub fn apply(&mut self, event: &Event, at: Duration) -> Result<(), PhaseError> {
        self.admits(event)?;
        self.elapsed = self.elapsed.max(at);
        let closed = self.closed.take();
        match event {
            Event::NewGoal { goal, agent, budget, workspace, conversation } => {
                self.messages.rewrite(|messages| messages.clone_from(conversation));
                for message in conversation {
                    if let Message::Assistant(said) = message {
                        self.find(said.calls.iter().map(|call| call.tool.as_str()));
                    }
                }
                self.began = Some(Began { budget: budget.clone(), agent: *agent, workspace: workspace.clone() });
                self.messages.push(Message::User(goal_message(goal)));
                self.phase = Phase::Planning;
            }
            Event::TurnBegun { .. } => {
                self.consultation.leave();
                self.asking = true;
                self.messages.extend(self.unheard.drain(..).map(|text| Message::User(said_message(&text))));
                if self.grace.is_none() {
                    self.used.turns += 1;
                }
            }
            Event::PlanReceived { plan } => self.plan_received(plan),
            Event::PlanRefused { plan, refusal, results } => {
                self.speechless += u32::from(plan.only_thought);
                self.account(plan);
                self.say(plan);
                for (call, record) in plan.calls.iter().zip(results) {
                    self.receive(record);
                    self.messages.push(result_message(call, record));
                }
                self.observe(Observation::Refused(refusal.clone()));
            }
            Event::PlanFailed { code, message, details } => {
                let (code, message, details) = (*code, message.clone(), details.clone());
                self.observe(Observation::Failed { code, message, details });
            }
            Event::CallStarted { call } => {
                if let Some(started) = self.batch.iter_mut().find(|one| one.planned.call == *call) {
                    started.progress = Progress::Started;
                }
            }
            Event::ToolCompleted { call, record } | Event::ToolFailed { call, record } => {
                self.finish(*call, record);
                self.close_batch_if_done();
            }
            Event::CommitWithdrawn { call, code, content, receipt } => {
                if let Some(closed) = closed {
                    self.open_again(*closed);
                }
                self.receipts = ReceiptsHead { count: receipt.sequence, head: Some(receipt.digest) };
                let failed = self.batch.iter_mut().find(|one| one.planned.call == *call);
                if let Some(Progress::Done(record)) = failed.map(|failed| &mut failed.progress) {
                    let usage = record.usage.take();
                    **record = CallRecord {
                        code: Some(*code),
                        content: content.clone(),
                        receipt: Some(*receipt),
                        usage,
                        workspace_after: None,
                        written: Vec::new(),
                        deleted: Vec::new(),
                        unproven: false,
                    };
                }
                self.close_batch_if_done();
            }
            Event::CancelRequested {} => self.cancelled = true,
            Event::Interrupted { cause, results } => {
                for (call, record) in results {
                    self.finish(*call, record);
                }
                self.close_batch(Observation::Interrupted(*cause));
            }
            Event::ObservationValidated { feedback, blocked, no_progress } => {
                self.consultation.leave();
                self.observed = None;
                self.repetition.judged(*no_progress, blocked);
                self.messages.extend(feedback.clone().map(Message::User));
                self.phase = Phase::Planning;
            }
            Event::ObservationRejected { feedback, grace } => {
                self.consultation.leave();
                self.observed = None;
                self.grace = *grace;
                if grace.is_none() && feedback.is_some() {
                    self.repairs += 1;
                }
                self.messages.extend(feedback.clone().map(Message::User));
                self.phase = Phase::Planning;
            }
            Event::ContextCompacted { superseded, evicted, remembered, effective } => {
                let compaction = &mut self.compaction;
                self.messages.rewrite(|messages| {
                    compaction.applied(messages, superseded, *evicted, remembered, *effective);
                });
                self.compaction.at(self.used.turns);
                self.counted = None;
            }
            Event::ContextSummarised { evicted, summary, remembered, effective, spent, .. } => {
                self.spend(spent);
                let compaction = &mut self.compaction;
                self.messages.rewrite(|messages| {
                    compaction.summarised(messages, *evicted, summary, remembered, *effective);
                });
                self.compaction.at(self.used.turns);
                self.summaries.succeeded(self.used.turns);
                self.counted = None;
            }
            Event::SummaryDropped { spent, .. } => {
                self.spend(spent);
                self.summaries.failed(self.used.turns);
            }
            Event::MessageReceived { text } => {
                let question = self.asked().find(|(one, _)| one.planned.question).map(|(one, _)| one.planned.call);
                match question {
                    // Whoever is asked answers.
                    Some(call) => self.decide_on(call, Approval::Answered(text.clone())),
                    None => self.unheard.push(text.clone()),
                }
            }
            Event::ApprovalRequested { call, until_ms } => {
                self.decide_on(*call, Approval::Asked(Duration::from_millis(*until_ms)));
            }
            Event::ApprovalDecided { call, approved, reason } => {
                let decided = if *approved { Approval::Given } else { Approval::Denied(reason.clone()) };
                self.decide_on(*call, decided);
            }
            Event::Resumed { never_started } => {
                // A turn that has begun stays counted; the model is asked again in it.
                self.dangle(never_started);
            }
            Event::Reopened { budget } => {
                if let Some(began) = &mut self.began {
                    began.budget = budget.clone();
                }
                if let Some(code) = self.result.take().and_then(|result| resumable(&result)) {
                    self.messages.extend(reopened_message(code).map(Message::User));
                }
                (self.grace, self.repairs) = (None, 0);
                self.phase = Phase::Planning;
            }
            Event::ExtensionStarted { call, extension, point } => self.consultation.started(*call, extension, *point),
            Event::ExtensionEnded { opinion, halt, receipt, usage, .. } => {
                self.count(*receipt, usage.as_ref());
                self.heard(opinion, halt.as_ref());
            }
            Event::CallReset { call } if self.is_consulted_about(*call) => self.consultation.reset(),
            Event::CallReset { call } => {
                if let Some(reset) = self.batch.iter_mut().find(|one| one.planned.call == *call) {
                    reset.progress = Progress::Pending;
                }
            }
            Event::WaitBegun { call, until_ms, due } => {
                if let Some(begun) = self.batch.iter_mut().find(|one| one.planned.call == *call) {
                    begun.waiting = Some(Waiting { until: Duration::from_millis(*until_ms), due: *due });
                }
            }
            Event::GoalConcluded { result } => {
                self.consultation.leave();
                self.observed = None;
                self.batch.clear();
                self.result = Some((**result).clone());
                self.phase = Phase::Idle;
            }
        }
        Ok(())
    }

    /// Whether the event can happen here.
    ///
    /// # Errors
    /// As [`Session::apply`].
    pub fn admits(&self, event: &Event) -> Result<(), PhaseError> {
        self.row_of(event).map_err(|reason| PhaseError { event: event.name(), phase: self.phase, reason })
    }

    /// The table of the module's diagram, in code.
    fn row_of(&self, event: &Event) -> Result<(), &'static str> {
        let in_phase = |phase: Phase| if self.phase == phase { Ok(()) } else { Err("it belongs to another phase") };
        match event {
            Event::NewGoal { .. } => {
                in_phase(Phase::Idle)?;
                ensure(self.began.is_none(), "the job has its goal already")
            }
            Event::TurnBegun { turn } => {
                in_phase(Phase::Planning)?;
                ensure(!self.asking, "the turn has begun already")?;
                self.nobody_is_asked()?;
                ensure(*turn == self.used.turns + 1, "it is another turn's")
            }
            Event::PlanReceived { plan } => {
                in_phase(Phase::Planning)?;
                ensure(self.asking, "no model was asked")?;
                self.admits_ids(plan)?;
                ensure(
                    !(plan.calls.is_empty() && plan.text.trim().is_empty()),
                    "an answer without words and calls is no plan",
                )?;
                let left = self.budget().map_or(0, |budget| budget.calls_left(&self.used));
                ensure(plan.calls.len() <= left as usize, "the batch is larger than what is left of the budget")?;
                ensure(self.grace.is_none() || plan.calls.is_empty(), "the last turn has no calls")
            }
            Event::PlanRefused { plan, results, .. } => {
                in_phase(Phase::Planning)?;
                ensure(self.asking, "no model was asked")?;
                self.admits_ids(plan)?;
                ensure(plan.calls.len() == results.len(), "each call needs one result")
            }
            Event::PlanFailed { .. } => {
                in_phase(Phase::Planning)?;
                ensure(self.asking, "no model was asked")
            }
            Event::CallStarted { call } => {
                in_phase(Phase::Executing)?;
                let pending = self.call(*call).is_some_and(|one| {
                    one.progress == Progress::Pending && matches!(one.approval, Approval::NotNeeded | Approval::Given)
                });
                ensure(pending, "the call is not waiting for its start")
            }
            Event::ToolCompleted { call, record } => {
                in_phase(Phase::Executing)?;
                ensure(record.code.is_none(), "its record has a failure's code")?;
                let started = self.call(*call).is_some_and(|one| match one.progress {
                    Progress::Started => true,
                    Progress::Pending => match one.planned.built_in {
                        Some(BuiltIn::ToolSearch) => true,
                        Some(BuiltIn::Wait) => one.waiting.is_some(),
                        None => matches!(one.approval, Approval::Answered(_)),
                    },
                    _ => false,
                });
                ensure(started, "the call does not run")
            }
            Event::ToolFailed { call, record } => {
                in_phase(Phase::Executing)?;
                ensure(record.code.is_some(), "its record has no code")?;
                let open = self.call(*call).is_some_and(|one| !matches!(one.progress, Progress::Done(_)));
                ensure(open, "the call is not outstanding")
            }
            Event::CommitWithdrawn { call, .. } => {
                let batch = self.closed.as_ref().map_or(&self.batch, |closed| &closed.batch);
                let succeeded = batch.iter().any(|one| {
                    let record = if let Progress::Done(record) = &one.progress { Some(record) } else { None };
                    one.planned.call == *call && record.is_some_and(|record| record.code.is_none())
                });
                ensure(succeeded, "the call has not just ended well")
            }
            Event::CancelRequested {} => ensure(self.began.is_some() && self.result.is_none(), "the job does not run"),
            Event::Interrupted { results, cause } => {
                ensure(
                    matches!(self.phase, Phase::Planning | Phase::Executing),
                    "nothing goes on that could be interrupted",
                )?;
                let open: Vec<_> = self
                    .batch
                    .iter()
                    .filter(|one| !matches!(one.progress, Progress::Done(_)))
                    .map(|one| (one.planned.call, matches!(one.progress, Progress::Pending)))
                    .collect();
                let consulting = self.consultation.running().is_some_and(|running| !running.is_dangling);
                let stopped =
                    *cause == Interruption::Restart || (!consulting && open.iter().all(|(_, pending)| *pending));
                ensure(stopped, "calls are still running")?;
                ensure(
                    open.iter().map(|(call, _)| call).eq(results.iter().map(|(call, _)| call)),
                    "each call needs one result",
                )
            }
            Event::SummaryDropped { .. } => self.conversation_rests(),
            Event::ContextSummarised { evicted, .. } => {
                self.conversation_rests()?;
                ensure(*evicted > 0, "nothing is summed up")?;
                ensure(*evicted < context::units(&self.messages).len(), "the last unit stays")
            }
            Event::ContextCompacted { superseded, evicted, .. } => {
                self.conversation_rests()?;
                ensure(!superseded.is_empty() || *evicted > 0, "nothing makes room")?;
                ensure(*evicted <= context::units(&self.messages).len(), "there is not so much to evict")
            }
            Event::MessageReceived { .. } | Event::Resumed { .. } => self.runs(),
            Event::Reopened { .. } => {
                in_phase(Phase::Idle)?;
                let code = self.result.as_ref().and_then(resumable);
                ensure(code.is_some(), "it has not ended, or by something that going on does not mend")
            }
            Event::ApprovalRequested { call, .. } => {
                in_phase(Phase::Executing)?;
                let needed = self.call(*call).is_some_and(|one| one.approval == Approval::Needed);
                ensure(needed, "nobody needs to be asked")
            }
            Event::ApprovalDecided { call, approved, .. } => {
                in_phase(Phase::Executing)?;
                let question = self.call(*call).is_some_and(|one| one.planned.question);
                ensure(!(*approved && question), "it is a question: answer it in words")?;
                let asked = self.asked().any(|(one, _)| one.planned.call == *call);
                ensure(asked, "the call does not wait for a decision")
            }
            Event::ExtensionStarted { extension, point, .. } => {
                self.nobody_is_asked()?;
                ensure(self.point() == Some(*point), "the job stands elsewhere")?;
                ensure(!self.consultation.has_asked(extension), "it has been asked already")
            }
            Event::ExtensionEnded { call, .. } => ensure(self.is_consulted_about(*call), "no extension is asked so"),
            Event::CallReset { call } if self.is_consulted_about(*call) => {
                let dangling = self.consultation.running().is_some_and(|running| running.is_dangling);
                ensure(dangling, "the extension is being asked")
            }
            Event::CallReset { call } => {
                in_phase(Phase::Executing)?;
                let dangling = self.call(*call).is_some_and(|one| one.progress == Progress::Dangling);
                ensure(dangling, "it is known how far the call is")
            }
            Event::WaitBegun { call, .. } => {
                in_phase(Phase::Executing)?;
                let is_next = self.call(*call).is_some_and(|one| {
                    let is_open = one.progress == Progress::Pending && one.waiting.is_none();
                    is_open && one.planned.built_in == Some(BuiltIn::Wait) && one.planned.refusal.is_none()
                });
                ensure(is_next, "it is no wait that could begin")
            }
            Event::ObservationValidated { .. } => {
                in_phase(Phase::Observing)?;
                self.nobody_is_asked()?;
                ensure(matches!(self.observed, Some(Observation::Batch)), "only results of calls are gone on with")
            }
            Event::ObservationRejected { grace, .. } => {
                in_phase(Phase::Observing)?;
                self.nobody_is_asked()?;
                ensure(grace.is_none() || self.grace.is_none(), "there is one last turn, not two")
            }
            Event::GoalConcluded { result } => {
                let broken = matches!(&result.verdict, Verdict::Failed { error_code: Code::InternalLogicError, .. });
                if broken { self.runs() } else { in_phase(Phase::Observing) }
            }
        }
    }

    fn conversation_rests(&self) -> Result<(), &'static str> {
        let rests = matches!(self.phase, Phase::Planning | Phase::Observing) && !self.asking;
        ensure(rests, "the conversation is in use")
    }

    fn runs(&self) -> Result<(), &'static str> {
        ensure(self.began.is_some() && self.result.is_none(), "the job does not run")
    }

    /// Where extensions can be asked now.
    fn point(&self) -> Option<Point> {
        match (self.phase, &self.observed) {
            (Phase::Planning, _) if !self.asking => Some(Point::BeforeTurn),
            (Phase::Observing, Some(Observation::Batch)) => Some(Point::AfterToolBatch),
            (Phase::Observing, Some(Observation::Answer(_))) => Some(Point::BeforeFinalAnswer),
            _ => None,
        }
    }

    fn nobody_is_asked(&self) -> Result<(), &'static str> {
        ensure(self.consultation.running().is_none(), "an extension is being asked")
    }

    fn is_consulted_about(&self, call: CallId) -> bool {
        self.consultation.running().is_some_and(|running| running.call == call)
    }

    /// Does what an extension's answer brings about at once.
    fn heard(&mut self, opinion: &Opinion, halt: Option<&Refusal>) {
        let Some(asked) = self.consultation.ended(&opinion.disable_tools) else { return };
        if let Some(Refusal { code, message }) = halt {
            let details = json!({"extension": asked.extension});
            return self.observe(Observation::Failed { code: *code, message: message.clone(), details });
        }
        let told = opinion.feedback.as_deref().map(|words| extension::told(&asked.extension, words));
        if asked.point == Point::BeforeFinalAnswer {
            told.into_iter().for_each(|words| self.consultation.object(words));
        } else {
            self.messages.extend(told.map(Message::User));
        }
        if let Some(answer) = &opinion.replacement_content {
            let text = Value::Object(answer.clone()).to_string();
            self.last_answer = Some(text.clone());
            self.observed = Some(Observation::Answer(text));
        }
    }

    fn decide_on(&mut self, call: CallId, approval: Approval) {
        if let Some(one) = self.batch.iter_mut().find(|one| one.planned.call == call) {
            one.approval = approval;
        }
    }

    fn admits_ids(&self, plan: &Plan) -> Result<(), &'static str> {
        let known = self.messages.iter().filter_map(|message| match message {
            Message::Assistant(assistant) => Some(assistant.calls.iter().map(|call| call.id.as_str())),
            _ => None,
        });
        let mut seen: std::collections::HashSet<&str> = known.flatten().collect();
        ensure(plan.calls.iter().all(|call| seen.insert(&call.wire_id)), "two calls have one id")
    }

    fn plan_received(&mut self, plan: &Plan) {
        self.speechless = 0;
        self.account(plan);
        self.say(plan);
        if plan.calls.is_empty() {
            self.last_answer = Some(plan.text.clone());
            self.observe(Observation::Answer(plan.text.clone()));
            return;
        }
        self.asking = false;
        self.used.tool_calls += u32::try_from(plan.calls.len()).unwrap_or(u32::MAX);
        let pending = |planned: &PlannedCall| BatchCall {
            planned: planned.clone(),
            progress: Progress::Pending,
            approval: if planned.approval && planned.refusal.is_none() {
                Approval::Needed
            } else {
                Approval::NotNeeded
            },
            waiting: None,
        };
        self.batch = plan.calls.iter().map(pending).collect();
        self.phase = Phase::Executing;
    }

    fn account(&mut self, plan: &Plan) {
        let spent = &plan.spent;
        self.spend(spent);
        // The answer is the next message; its tokens are those that were written.
        self.counted = spent.counted.then(|| Counted {
            tokens: spent.input_tokens.saturating_add(spent.output_tokens),
            messages: self.messages.len() + 1,
        });
    }

    fn spend(&mut self, spent: &Spent) {
        self.used.input_tokens = self.used.input_tokens.saturating_add(spent.input_tokens);
        self.used.output_tokens = self.used.output_tokens.saturating_add(spent.output_tokens);
        self.used.cost_usd += spent.cost_usd;
    }

    fn say(&mut self, plan: &Plan) {
        if plan.text.trim().is_empty() && plan.calls.is_empty() {
            // Providers refuse empty messages; there is nothing to remember either.
            self.counted = None;
            return;
        }
        let asked = |call: &PlannedCall| AskedCall {
            id: call.wire_id.clone(),
            tool: call.tool.clone(),
            arguments: call.arguments.clone(),
        };
        self.messages.push(Message::Assistant(Assistant {
            text: plan.text.clone(),
            calls: plan.calls.iter().map(asked).collect(),
            echo: plan.echo.clone(),
        }));
    }

    fn finish(&mut self, call: CallId, record: &CallRecord) {
        self.receive(record);
        if never_ran_for_others_reasons(record) {
            self.used.tool_calls = self.used.tool_calls.saturating_sub(1);
        }
        if let Some(done) = self.batch.iter_mut().find(|one| one.planned.call == call) {
            done.progress = Progress::Done(Box::new(record.clone()));
        }
    }

    fn receive(&mut self, record: &CallRecord) {
        self.count(record.receipt, record.usage.as_ref());
    }

    fn count(&mut self, receipt: Option<ReceiptRef>, usage: Option<&Usage>) {
        if let Some(receipt) = receipt {
            self.receipts = ReceiptsHead { count: receipt.sequence, head: Some(receipt.digest) };
        }
        if let Some(usage) = usage {
            self.used.cpu = self.used.cpu.saturating_add(Duration::from_micros(usage.cpu_usec));
        }
    }

    fn close_batch_if_done(&mut self) {
        if self.batch.iter().all(|call| matches!(call.progress, Progress::Done(_))) {
            self.closed = Some(Box::new(Closed {
                batch: self.batch.clone(),
                messages: self.messages.len(),
                repairs: self.repairs,
                evidence: self.evidence.clone(),
                repetition: self.repetition.clone(),
            }));
            self.close_batch(Observation::Batch);
        }
    }

    /// The batch is as it was before it was closed.
    fn open_again(&mut self, closed: Closed) {
        let Closed { batch, messages, repairs, evidence, repetition } = closed;
        self.messages.truncate(messages);
        (self.batch, self.repairs, self.evidence, self.repetition) = (batch, repairs, evidence, repetition);
        (self.observed, self.phase) = (None, Phase::Executing);
    }

    /// All results of a batch go into the conversation together, in the order of the calls.
    fn close_batch(&mut self, observation: Observation) {
        for call in std::mem::take(&mut self.batch) {
            if let Progress::Done(record) = call.progress {
                if record.code.is_none() {
                    self.repairs = 0;
                }
                match call.planned.built_in {
                    Some(BuiltIn::ToolSearch) => self.find(tool_search::found_by(&record)),
                    Some(BuiltIn::Wait) => {}
                    None => self.find(call.planned.refusal.is_none().then_some(call.planned.tool.as_str())),
                }
                self.evidence.saw(&call.planned, &record);
                // Whoever polls waits in between; it is by what is polled that one sees whether anything goes on.
                if call.planned.built_in != Some(BuiltIn::Wait) {
                    self.repetition.saw(&call.planned, &record);
                }
                self.messages.push(result_message(&call.planned, &record));
            }
        }
        self.observe(observation);
    }

    /// These tools are known to the model.
    fn find<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        for name in names {
            if !self.found.iter().any(|known| known == name) {
                self.found.push(name.to_owned());
            }
        }
    }

    fn observe(&mut self, observation: Observation) {
        self.consultation.leave();
        self.asking = false;
        self.observed = Some(observation);
        self.phase = Phase::Observing;
    }
}

/// Whether a reserved call goes back to the budget: it never ran, and that was not the model's doing.
fn never_ran_for_others_reasons(record: &CallRecord) -> bool {
    let others = [
        Code::ApprovalDenied,
        Code::ApprovalExpired,
        Code::BreakerOpen,
        Code::Overloaded,
        Code::ToolUnavailable,
        Code::ToolChanged,
        Code::PolicyUnenforceable,
    ];
    record.usage.is_none() && record.code.is_some_and(|code| others.contains(&code))
}

fn ensure(condition: bool, reason: &'static str) -> Result<(), &'static str> {
    if condition { Ok(()) } else { Err(reason) }
}

fn result_message(call: &PlannedCall, record: &CallRecord) -> Message {
    Message::Result(CallResult { id: call.wire_id.clone(), tool: call.tool.clone(), content: record.content.clone() })
}

/// The code of a job that has ended and can be gone on with.
fn resumable(result: &JobResult) -> Option<Code> {
    match &result.verdict {
        Verdict::Failed { error_code, .. } if error_code.is_resumable() => Some(*error_code),
        _ => None,
    }
}

/// What the model is told when a job goes on. Of what it never saw it is told nothing.
fn reopened_message(code: Code) -> Option<String> {
    match code {
        Code::ModelUnavailable | Code::LedgerUnavailable => None,
        code => Some(format!("The job had been stopped: {} It goes on now, towards the same goal.", code.meaning())),
    }
}

/// What the model is told of the goal. The words stay the same for ever: cassettes depend on them.
fn goal_message(goal: &Value) -> String {
    format!("The goal, as JSON:\n{goal}")
}

/// What the model is told of a person's words during the run.
fn said_message(text: &str) -> String {
    format!("The user says:\n{text}")
}
