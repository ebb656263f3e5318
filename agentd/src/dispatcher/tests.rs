mod attestation;
mod departures;
mod extensions;
mod spilling;

use std::os::fd::OwnedFd;
use std::task::{Context, Waker};

use serde_json::{Value, json};
use tokio_stream::StreamExt as _;
use toolproto::api::{CallRequest, EventBody, EventView, ExecRequest, WaitKind};
use toolproto::job::{BudgetRequest, JobRequest, TerminationReason, Verdict};

use super::follow::Until;
use super::*;
use crate::model::{Finish, Reply, ReplyCall, Thinking};
use crate::scripted::{self, Behaviour, ScriptedLaunch, ScriptedModel, agent, calls, says, tools};
use crate::session::tool_search;

type Reply1 = Result<Reply, crate::model::ModelError>;

struct Office {
    dispatcher: Dispatcher<Arc<ScriptedLaunch>>,
    launch: Arc<ScriptedLaunch>,
    model: Arc<ScriptedModel>,
    folder: tempfile::TempDir,
}

const LONG: Duration = Duration::from_secs(3600);

impl Office {
    async fn open(behaviours: &[(&str, Behaviour)], replies: Vec<Reply1>) -> Self {
        Self::with(agent(), behaviours, replies).await
    }

    async fn with(agent: Agent, behaviours: &[(&str, Behaviour)], replies: Vec<Reply1>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (launch, model) = (ScriptedLaunch::new(behaviours), ScriptedModel::new(replies));
        let dispatcher = start(folder.path(), agent, &launch, &model).await;
        Self { dispatcher, launch, model, folder }
    }

    async fn submit(&self, request: JobRequest) -> Result<JobId, Problem> {
        self.dispatcher.submit(&caller(), client(), request).await.map(|accepted| accepted.job_id)
    }

    async fn result(&self, job: JobId) -> JobResult {
        self.dispatcher.result(&caller(), job, LONG).await.unwrap().expect("the job has no result")
    }

    async fn run(&self) -> JobResult {
        let job = self.submit(request()).await.unwrap();
        self.result(job).await
    }
}

async fn start(
    folder: &std::path::Path,
    agent: Agent,
    launch: &Arc<ScriptedLaunch>,
    model: &Arc<ScriptedModel>,
) -> Dispatcher<Arc<ScriptedLaunch>> {
    let origin = Origin { host: "host".to_owned(), boot_id: "boot".to_owned(), key_id: None };
    let settings = Settings {
        limits: queue::Limits { running: 4, per_user: 4, waiting: 4 },
        observer: Observer::blind(),
        slices: Slices::default(),
    };
    let ledger = Ledger::open(folder).unwrap();
    Dispatcher::start(launch.clone(), ledger, catalogue(agent, model), origin, settings).await.unwrap()
}

fn catalogue(agent: Agent, model: &Arc<ScriptedModel>) -> Catalogue {
    let agents = vec![Staffed { agent, model: model.clone() }];
    let tools = tools().with_extensions(scripted::extensions());
    Catalogue { tools, agents, policies: Vec::new(), prices: HashMap::new(), permits: Box::new(|_, _| true) }
}

fn caller() -> Caller {
    Caller { uid: 1000, groups: vec![1000], standing: Standing::Member }
}

fn client() -> OwnedFd {
    std::os::unix::net::UnixStream::pair().unwrap().0.into()
}

fn request() -> JobRequest {
    serde_json::from_value(json!({"version": 1, "agent": "worker", "goal": {"task": "t"}, "workspace": "/srv/w"}))
        .unwrap()
}

fn answers(value: Value) -> Behaviour {
    Behaviour::Answers(value, Duration::from_secs(1))
}

fn failed(result: &JobResult) -> (Code, &str, &Value, Option<&Value>) {
    match &result.verdict {
        Verdict::Failed { error_code, message, details, partial, .. } => {
            (*error_code, message, details, partial.as_ref())
        }
        Verdict::Success { data } => panic!("success with {data}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_runs_its_calls_and_ends_with_data_and_a_chain_of_receipts() {
    let office = Office::open(
        &[("read", answers(json!({"n": 1}))), ("write", answers(json!({})))],
        vec![
            calls(&[("read", json!({})), ("read", json!({})), ("write", json!({}))]),
            says("```json\n{\"done\":true}\n```"),
        ],
    )
    .await;
    let job = office.submit(request()).await.unwrap();
    let result = office.result(job).await;
    assert_eq!(result.verdict, Verdict::Success { data: json!({"done": true}) });
    assert_eq!((result.usage.turns, result.usage.tool_calls, result.receipts.count), (2, 3, 3));
    assert_eq!(office.launch.log.lock().unwrap().most_running, 2, "the two reads did not run together");
    assert_eq!(office.launch.log.lock().unwrap().launched, ["read", "read", "write"]);
    assert_eq!(office.launch.log.lock().unwrap().closed, [job]);

    let receipts = office.dispatcher.receipts(&caller(), job).await.unwrap();
    assert_eq!(receipts.len(), 4, "three receipts and the seal");
    for (previous, next) in receipts.iter().zip(&receipts[1..3]) {
        assert_eq!(next.receipt().unwrap().previous, Some(previous.digest().unwrap()));
    }
    let view = office.dispatcher.job(&caller(), job).await.unwrap();
    assert_eq!((view.state, view.result), (JobState::Done, Some(result)));
}

#[tokio::test(start_paused = true)]
async fn the_model_sees_the_receipted_reply_and_the_budget_but_the_prompt_stays() {
    let office =
        Office::open(&[("read", answers(json!({"n": 1})))], vec![calls(&[("read", json!({}))]), says("{\"done\":1}")])
            .await;
    office.run().await;
    let asked = office.model.asked.lock().unwrap();
    assert_eq!(asked[0].transcript.system, asked[1].transcript.system);
    assert_eq!(asked[0].tools.len(), 3);
    assert!(asked[0].note.contains("9 turns, 10 tool calls"), "{}", asked[0].note);
    assert!(asked[1].note.contains("8 turns, 9 tool calls"), "{}", asked[1].note);
    let last = asked[1].transcript.normalised().pop().unwrap();
    assert_eq!(last, json!({"role": "tool", "call": 1, "tool": "read", "result": {"ok": true, "result": {"n": 1}}}));
}

#[tokio::test(start_paused = true)]
async fn failing_calls_are_told_to_the_model_and_end_nothing() {
    let office = Office::open(
        &[("read", Behaviour::Fails("UPSTREAM_DOWN")), ("hang", Behaviour::Hangs)],
        vec![
            calls(&[("read", json!({})), ("hang", json!({})), ("read", json!({"n": "x"})), ("raed", json!({}))]),
            says("{\"done\":false}"),
        ],
    )
    .await;
    let result = office.run().await;
    assert!(matches!(result.verdict, Verdict::Success { .. }));
    let asked = office.model.asked.lock().unwrap();
    let codes: Vec<Value> =
        asked[1].transcript.normalised()[3..].iter().map(|m| m["result"]["error"]["code"].clone()).collect();
    assert_eq!(codes, ["TOOL_FAILED", "TOOL_TIMEOUT", "ARGUMENTS_INVALID", "TOOL_UNKNOWN"]);
    assert_eq!(result.receipts.count, 4, "a refused call has its receipt too");
    assert_eq!(office.launch.log.lock().unwrap().launched, ["read", "hang"]);
}

#[tokio::test(start_paused = true)]
async fn malformed_and_cut_off_arguments_are_never_run() {
    let malformed = |finish, arguments: &str| {
        let call = ReplyCall { id: Some("x".to_owned()), tool: "write".to_owned(), arguments: arguments.to_owned() };
        Ok(Reply { calls: vec![call], finish, ..Reply::default() })
    };
    let office = Office::open(
        &[("write", answers(json!({})))],
        vec![malformed(Finish::Done, "{\"n\":"), malformed(Finish::Length, "{}"), says("{\"done\":1}")],
    )
    .await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
    assert!(office.launch.log.lock().unwrap().launched.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_batch_over_budget_runs_not_at_all() {
    let eleven: Vec<(&str, Value)> = (0..11).map(|_| ("read", json!({}))).collect();
    let office =
        Office::open(&[("read", answers(json!({})))], vec![calls(&eleven), calls(&eleven), calls(&eleven)]).await;
    let result = office.run().await;
    assert_eq!(failed(&result).0, Code::ToolCallBudgetExhausted);
    assert_eq!(result.termination_reason, TerminationReason::Budget);
    assert_eq!((result.usage.tool_calls, result.receipts.count), (0, 33));
    assert!(office.launch.log.lock().unwrap().launched.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_wrong_answer_is_mended_a_bounded_number_of_times() {
    let office = Office::open(&[], vec![says("done!"), says("{}"), says("{\"done\":1}")]).await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
    let office = Office::open(&[], vec![says("a"), says("b"), says("{\"x\":1}"), says("{\"done\":1}")]).await;
    let result = office.run().await;
    let (code, message, _, partial) = failed(&result);
    assert_eq!((code, partial), (Code::ResultInvalid, Some(&json!({"x": 1}))), "{message}");
    let office = Office::open(&[], vec![says(""), says(" "), says("")]).await;
    assert_eq!(failed(&office.run().await).0, Code::ObservationInvalidAfterRetry);
}

#[tokio::test(start_paused = true)]
async fn a_model_that_only_thought_is_asked_again_without_thinking() {
    let thought = || Ok(Reply { only_thought: true, ..Reply::default() });
    let frugal = || Agent { max_repairs: 0, ..agent() };
    let office = Office::with(frugal(), &[], vec![thought(), says("{\"done\":1}")]).await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }), "it counted as a repair");
    let asked = office.model.asked.lock().unwrap().clone();
    assert_eq!((asked[0].thinking, asked[1].thinking), (Thinking::AsConfigured, Thinking::Off));
    assert_eq!(asked[0].transcript, asked[1].transcript);

    // If that does not help, it is told in words, within the repairs.
    let office = Office::with(frugal(), &[], vec![thought(), thought()]).await;
    assert_eq!(failed(&office.run().await).0, Code::ObservationInvalidAfterRetry);
    let replies = vec![thought(), thought(), calls(&[("read", json!({}))]), says("{\"done\":1}")];
    let office = Office::with(agent(), &[("read", answers(json!({})))], replies).await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
    let asked = office.model.asked.lock().unwrap().clone();
    assert!(asked[2].transcript.normalised()[2]["text"].as_str().unwrap().contains("thoughts alone"));
    assert_eq!((asked[2].thinking, asked[3].thinking), (Thinking::Off, Thinking::AsConfigured));
}

#[tokio::test(start_paused = true)]
async fn the_last_turn_ends_a_job_that_goes_on_and_on() {
    let endless = || (0..20).map(|_| calls(&[("read", json!({}))])).collect::<Vec<_>>();
    let behaviours = [("read", answers(json!({})))];
    let office = Office::with(Agent { budget: budget(3), ..agent() }, &behaviours, endless()).await;
    let result = office.run().await;
    assert_eq!(failed(&result).0, Code::TurnBudgetExhausted);
    assert_eq!((result.usage.turns, result.usage.tool_calls), (3, 3));

    let mut replies = endless();
    replies[3] = says("{\"done\":\"half\"}");
    let office = Office::with(Agent { budget: budget(3), grace_call: true, ..agent() }, &behaviours, replies).await;
    let result = office.run().await;
    let (code, _, _, partial) = failed(&result);
    assert_eq!((code, partial), (Code::TurnBudgetExhausted, Some(&json!({"done": "half"}))));
    assert_eq!(result.usage.turns, 3);
    assert!(office.model.asked.lock().unwrap()[3].tools.is_empty(), "the last turn was offered tools");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_table_of_jobs_stops_the_pulse() {
    let office = Office::open(&[], vec![]).await;
    office.dispatcher.pulse().await;
    let (dispatcher, runtime) = (office.dispatcher.clone(), tokio::runtime::Handle::current());
    let (name, named) = std::sync::mpsc::channel();
    let (went_by, has_gone_by) = std::sync::mpsc::channel();
    let held = office.dispatcher.inner.table();
    let pulse = std::thread::spawn(move || {
        name.send(rustix::thread::gettid()).unwrap();
        let _entered = runtime.enter();
        let mut pulse = Box::pin(dispatcher.pulse());
        let first = pulse.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        went_by.send(()).unwrap();
        if first.is_pending() {
            runtime.block_on(pulse);
        }
    });
    // What waits for the table sleeps within its first poll; what waits for the ledger alone comes back from it.
    let thread = format!("/proc/self/task/{}/stat", named.recv().unwrap());
    let sleeps = || std::fs::read_to_string(&thread).unwrap().rsplit(')').next().unwrap().starts_with(" S");
    let has_waited = loop {
        if has_gone_by.try_recv().is_ok() {
            break false;
        }
        if sleeps() {
            break has_gone_by.try_recv().is_err();
        }
        std::thread::yield_now();
    };
    assert!(has_waited, "the dispatcher says that it is well while nobody can look at its jobs");
    drop(held);
    let ended = tokio::task::spawn_blocking(move || pulse.join());
    tokio::time::timeout(Duration::from_secs(60), ended).await.unwrap().unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_reload_changes_what_is_offered_and_keeps_what_breakers_have_seen() {
    let office = Office::open(&[("read", answers(json!({})))], vec![]).await;
    let known = office.dispatcher.inner.offer();
    assert!(known.guards.open("read", "a test", 0).is_some());
    let other = Agent { name: "other".to_owned(), ..agent() };
    office.dispatcher.reload(catalogue(other, &office.model));
    assert_eq!(office.submit(request()).await.unwrap_err().code, Code::AgentUnknown);
    let renamed = JobRequest { agent: "other".to_owned(), ..request() };
    assert!(office.submit(renamed).await.is_ok());
    assert_eq!(office.dispatcher.inner.offer().guards.breaker("read").unwrap().state, "open");
    assert_eq!(office.dispatcher.inner.offer().guards.breaker("write").unwrap().state, "closed", "the twin");
}

fn budget(max_turns: u32) -> crate::session::budget::Budget {
    crate::session::budget::Budget { max_turns, ..agent().budget }
}

#[tokio::test(start_paused = true)]
async fn the_deadline_ends_a_stalled_model_and_a_hanging_call() {
    let office = Office::open(&[], vec![]).await;
    let result = office.run().await;
    assert_eq!((failed(&result).0, result.termination_reason), (Code::DeadlineExceeded, TerminationReason::Deadline));
    assert!(result.usage.wall_seconds < 601.0, "{}", result.usage.wall_seconds);

    let hang = [calls(&[("hang", json!({})), ("hang", json!({}))])];
    let narrow = BudgetRequest { wall_seconds: Some(30), ..BudgetRequest::default() };
    let office = Office::open(&[("hang", Behaviour::Hangs)], hang.into()).await;
    let job = office.submit(JobRequest { budget: Some(narrow), ..request() }).await.unwrap();
    let result = office.result(job).await;
    assert_eq!(failed(&result).0, Code::DeadlineExceeded);
    assert_eq!(result.receipts.count, 2, "the call that never started has its receipt too");
    assert!(result.usage.wall_seconds < 31.0, "{}", result.usage.wall_seconds);
}

#[tokio::test(start_paused = true)]
async fn cancelling_ends_the_running_call_and_starts_no_other() {
    let replies = vec![calls(&[("hang", json!({})), ("write", json!({}))])];
    let office = Office::open(&[("hang", Behaviour::Hangs), ("write", answers(json!({})))], replies).await;
    let job = office.submit(request()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(office.dispatcher.job(&caller(), job).await.unwrap().phase, Phase::Executing);
    office.dispatcher.cancel(&caller(), job).await.unwrap();
    let result = office.result(job).await;
    assert_eq!((failed(&result).0, result.termination_reason), (Code::Cancelled, TerminationReason::Cancelled));
    assert_eq!((result.receipts.count, result.usage.wall_seconds < 6.0), (2, true));
    assert_eq!(office.launch.log.lock().unwrap().launched, ["hang"]);
    office.dispatcher.cancel(&caller(), job).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_model_that_fails_ends_the_job_with_its_code() {
    let error = crate::model::ModelError::lasting(Code::ModelQuotaExhausted, "no money");
    let office = Office::open(&[], vec![Err(error)]).await;
    let result = office.run().await;
    assert_eq!((failed(&result).0, failed(&result).1), (Code::ModelQuotaExhausted, "no money"));
}

#[tokio::test(start_paused = true)]
async fn bad_submissions_make_no_job() {
    let office = Office::open(&[], vec![]).await;
    let refused = async |change: Value| {
        let mut body = json!(request());
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let problem = office.submit(serde_json::from_value(body).unwrap()).await.unwrap_err();
        (problem.code, problem.status, problem.violations.first().map(|first| first.pointer.clone()))
    };
    let goal = Some("/goal".to_owned());
    assert_eq!(refused(json!({"goal": {}})).await, (Code::InputInvalid, 422, goal));
    assert_eq!(refused(json!({"agent": "workr"})).await, (Code::AgentUnknown, 404, None));
    assert_eq!(refused(json!({"workspace": "/missing"})).await, (Code::WorkspaceUnavailable, 422, None));
    let wider = refused(json!({"budget": {"max_turns": 11}})).await;
    assert_eq!(wider, (Code::InputInvalid, 422, Some("/budget/max_turns".to_owned())));
    assert!(office.dispatcher.jobs(&caller(), JobFilter::default()).await.unwrap().jobs.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_key_names_one_job_and_a_full_queue_refuses() {
    let office = Office::open(&[], vec![]).await;
    let keyed = JobRequest { idempotency_key: Some("k".to_owned()), ..request() };
    let job = office.submit(keyed.clone()).await.unwrap();
    assert_eq!(office.submit(keyed.clone()).await.unwrap(), job);
    let other = JobRequest { priority: 1, ..keyed };
    assert_eq!(office.submit(other).await.unwrap_err().code, Code::IdempotencyConflict);
    for _ in 0..7 {
        office.submit(request()).await.unwrap();
    }
    assert_eq!(office.submit(request()).await.unwrap_err().code, Code::QueueFull);
    let listed = office.dispatcher.jobs(&caller(), JobFilter::default()).await.unwrap().jobs;
    let count = |state| listed.iter().filter(|job| job.state == state).count();
    assert_eq!((count(JobState::Running), count(JobState::Queued)), (4, 4));
    // A job that waits can be cancelled; it ends without having asked a model.
    let waiting = listed.iter().find(|job| job.state == JobState::Queued).unwrap().job_id;
    office.dispatcher.cancel(&caller(), waiting).await.unwrap();
    assert_eq!(failed(&office.result(waiting).await).0, Code::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn jobs_of_others_look_like_none() {
    let office = Office::open(&[], vec![says("{\"done\":1}")]).await;
    let job = office.submit(request()).await.unwrap();
    let stranger = Caller { uid: 1001, ..caller() };
    assert_eq!(office.dispatcher.job(&stranger, job).await.unwrap_err().code, Code::NotFound);
    assert_eq!(office.dispatcher.cancel(&stranger, job).await.unwrap_err().code, Code::NotFound);
    assert!(office.dispatcher.events(&stranger, job, 0, Until::End).await.is_err());
    assert!(office.dispatcher.jobs(&stranger, JobFilter::default()).await.unwrap().jobs.is_empty());
    let admin = Caller { standing: Standing::Admin, ..stranger };
    assert_eq!(office.dispatcher.job(&admin, job).await.unwrap().job_id, job);
}

#[tokio::test(start_paused = true)]
async fn events_are_the_same_live_replayed_and_resumed() {
    let office =
        Office::open(&[("read", answers(json!({})))], vec![calls(&[("read", json!({}))]), says("{\"done\":1}")]).await;
    let job = office.submit(request()).await.unwrap();
    let kept = |event: &EventView| !matches!(event.body, EventBody::ModelDelta { .. });
    let live: Vec<EventView> =
        office.dispatcher.events(&caller(), job, 0, Until::End).await.unwrap().filter(kept).collect().await;
    let replayed: Vec<EventView> =
        office.dispatcher.events(&caller(), job, 0, Until::End).await.unwrap().collect().await;
    assert_eq!(live, replayed);
    let names: Vec<&str> = replayed.iter().map(|event| event.body.name()).collect();
    let expected = [
        "job.phase",
        "job.phase",
        "call.started",
        "call.ended",
        "job.phase",
        "job.phase",
        "job.phase",
        "job.phase",
        "job.ended",
    ];
    assert_eq!(names, expected);
    let middle = replayed[3..].iter().find_map(|event| event.sequence).unwrap();
    let resumed: Vec<EventView> =
        office.dispatcher.events(&caller(), job, middle, Until::End).await.unwrap().collect().await;
    let rest = replayed.iter().position(|event| event.sequence == Some(middle)).unwrap() + 1;
    assert_eq!(resumed, replayed[rest..]);
}

/// A job is stopped in the middle of its first call, and another agentd finds it.
async fn restarted(
    behaviours: &[(&str, Behaviour)],
    replies: Vec<Reply1>,
    between: impl AsyncFnOnce(&Dispatcher<Arc<ScriptedLaunch>>, JobId),
    launcher: impl FnOnce(&mut crate::scripted::Log),
) -> (Office, JobId) {
    let folder = tempfile::tempdir().unwrap();
    let (launch, model) = (ScriptedLaunch::new(behaviours), ScriptedModel::new(replies));
    let dispatcher = start(folder.path(), agent(), &launch, &model).await;
    let job = dispatcher.submit(&caller(), client(), request()).await.unwrap().job_id;
    tokio::time::sleep(Duration::from_millis(500)).await;
    between(&dispatcher, job).await;
    dispatcher.shutdown(LONG).await;
    drop(dispatcher);
    launcher(&mut launch.log.lock().unwrap());
    let dispatcher = start(folder.path(), agent(), &launch, &model).await;
    (Office { dispatcher, launch, model, folder }, job)
}

#[tokio::test(start_paused = true)]
async fn a_job_goes_on_where_it_stood_and_repeats_only_what_does_no_harm() {
    let behaviours = [("read", answers(json!({"n": 1}))), ("write", answers(json!({})))];
    for (tool, launched, code) in [("read", 2, Value::Null), ("write", 1, json!("INTERRUPTED"))] {
        let replies = vec![calls(&[(tool, json!({}))]), says("{\"done\":1}")];
        let (office, job) = restarted(&behaviours, replies, async |_, _| (), |_| ()).await;
        let result = office.result(job).await;
        assert_eq!(result.verdict, Verdict::Success { data: json!({"done": 1}) });
        assert_eq!((result.usage.turns, result.usage.tool_calls, result.receipts.count), (2, 1, 1));
        assert_eq!(office.launch.log.lock().unwrap().launched.len(), launched, "{tool}");
        let told = office.model.asked.lock().unwrap()[1].transcript.normalised().pop().unwrap();
        assert_eq!(told["result"]["error"]["code"], code);
        let events = office.dispatcher.events(&caller(), job, 0, Until::End).await.unwrap();
        let last = events.collect::<Vec<EventView>>().await.pop().unwrap();
        assert!(matches!(last.body, EventBody::JobEnded { .. }));
        assert_eq!(office.dispatcher.inner.shared.ledger.verify(job).await.unwrap(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_never_started_is_run_by_the_next_agentd() {
    let replies = vec![calls(&[("write", json!({}))]), says("{\"done\":1}")];
    let behaviours = [("write", answers(json!({})))];
    let (office, job) = restarted(&behaviours, replies, async |_, _| (), |log| log.took_nothing_up = true).await;
    let result = office.result(job).await;
    assert_eq!(result.verdict, Verdict::Success { data: json!({"done": 1}) });
    assert_eq!((result.usage.turns, result.usage.tool_calls, result.receipts.count), (2, 1, 1));
    let told = office.model.asked.lock().unwrap()[1].transcript.normalised().pop().unwrap();
    assert_eq!(told["result"]["ok"], true, "{told}");
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_job_stays_cancelled() {
    // The launcher takes its time to end the call, so that the wish is stored and the result is not.
    let replies = vec![calls(&[("hang", json!({})), ("write", json!({}))]), says("{\"done\":1}")];
    let cancel = async |dispatcher: &Dispatcher<Arc<ScriptedLaunch>>, job: JobId| {
        let steer = dispatcher.inner.table().live[&job].steer.clone();
        let (done, stored) = oneshot::channel();
        steer.send(Steer::Cancel(done)).await.unwrap();
        stored.await.unwrap().unwrap();
    };
    let (office, job) = restarted(&[("hang", Behaviour::Hangs)], replies, cancel, |_| ()).await;
    let result = office.result(job).await;
    assert_eq!(failed(&result).0, Code::Cancelled);
    assert_eq!(office.model.asked.lock().unwrap().len(), 1, "the model was asked again");
}

#[tokio::test(start_paused = true)]
async fn a_job_whose_grant_is_gone_ends_interrupted() {
    let replies = vec![calls(&[("hang", json!({})), ("write", json!({}))])];
    let (office, job) =
        restarted(&[("hang", Behaviour::Hangs)], replies, async |_, _| (), |log| log.forgetful = true).await;
    let result = office.dispatcher.result(&caller(), job, Duration::ZERO).await.unwrap().unwrap();
    assert_eq!(failed(&result).0, Code::Interrupted);
    let events = office.dispatcher.events(&caller(), job, 0, Until::End).await.unwrap();
    let last = events.collect::<Vec<EventView>>().await.pop().unwrap();
    assert!(matches!(last.body, EventBody::JobEnded { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_direct_call_is_a_job_of_one_call() {
    let office = Office::open(&[("read", answers(json!({"n": 7}))), ("hang", Behaviour::Hangs)], vec![]).await;
    let call = async |tool: &str, arguments: Value| {
        let request =
            CallRequest { version: 1, tool: tool.to_owned(), arguments, workspace: None, timeout_ms: Some(2000) };
        office.dispatcher.call(&caller(), client(), request).await
    };
    let reply = call("read", json!({})).await.unwrap();
    assert_eq!((reply.ok, reply.result), (true, Some(json!({"n": 7}))));
    assert_eq!(reply.receipt.receipt().unwrap().job_id, reply.job_id);
    let view = office.dispatcher.job(&caller(), reply.job_id).await.unwrap();
    assert_eq!((view.agent.as_str(), view.state), ("call", JobState::Done));
    assert_eq!(office.dispatcher.receipts(&caller(), reply.job_id).await.unwrap().len(), 2);

    let reply = call("hang", json!({})).await.unwrap();
    assert_eq!(reply.error.unwrap().code, Code::ToolTimeout);
    let reply = call("read", json!({"n": "x"})).await.unwrap();
    assert_eq!(reply.error.unwrap().code, Code::ArgumentsInvalid);
    assert_eq!(call("raed", json!({})).await.unwrap_err().code, Code::ToolUnknown);
}

#[tokio::test(start_paused = true)]
async fn no_tool_is_told_anything_of_a_call_that_is_not_in_the_ledger() {
    let office = Office::open(&[("ahead", answers(json!({"n": 7}))), ("read", answers(json!({"n": 7})))], vec![]).await;
    let call = async |tool: &str| {
        let (tool, arguments) = (tool.to_owned(), json!({"n": 1}));
        let request = CallRequest { version: 1, tool, arguments, workspace: None, timeout_ms: None };
        office.dispatcher.call(&caller(), client(), request).await
    };
    let given = || office.launch.log.lock().unwrap().given.len();
    for tool in ["ahead", "read"] {
        assert!(call(tool).await.unwrap().ok);
    }
    assert_eq!(given(), 2);
    let ledger = rusqlite::Connection::open(office.folder.path().join(crate::ledger::FILE)).unwrap();
    ledger.execute_batch("ALTER TABLE jobs RENAME TO lost").unwrap();
    for tool in ["ahead", "read"] {
        assert_eq!(call(tool).await.unwrap_err().code, Code::LedgerUnavailable);
    }
    assert_eq!(given(), 2, "a tool was told of a call that nobody has on record");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(office.launch.log.lock().unwrap().closed.len(), 4, "a grant is left");
}

#[tokio::test(start_paused = true)]
async fn no_tool_is_told_anything_of_a_jobs_call_whose_start_is_not_in_the_ledger() {
    let office = Office::open(&[("write", answers(json!({})))], vec![calls(&[("write", json!({}))])]).await;
    let ledger = rusqlite::Connection::open(office.folder.path().join(crate::ledger::FILE)).unwrap();
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON events WHEN instr(NEW.event, 'CALL_STARTED') BEGIN \
                  SELECT RAISE(ABORT, 'no room'); END";
    ledger.execute_batch(refuse).unwrap();
    let result = office.run().await;
    let (code, message, ..) = failed(&result);
    assert_eq!(code, Code::LedgerUnavailable);
    assert!(message.contains("no room"), "{message}");
    assert!(office.launch.log.lock().unwrap().given.is_empty(), "it was told of a call that nobody has on record");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_granted_nothing_is_told_nothing_and_leaves_no_job() {
    let office = Office::open(&[("read", answers(json!({"n": 7})))], vec![]).await;
    office.launch.log.lock().unwrap().refuses = true;
    let (tool, arguments) = ("read".to_owned(), json!({}));
    let request = CallRequest { version: 1, tool, arguments, workspace: None, timeout_ms: None };
    let refused = office.dispatcher.call(&caller(), client(), request).await.unwrap_err();
    assert_eq!((refused.code, refused.detail.as_str()), (Code::NotPermitted, "not this one"));
    assert!(office.launch.log.lock().unwrap().given.is_empty(), "the tool was told of it");
    assert!(office.dispatcher.jobs(&caller(), JobFilter::default()).await.unwrap().jobs.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_direct_call_whose_caller_goes_away_is_ended_and_receipted() {
    let office = Office::open(&[("hang", Behaviour::Hangs)], vec![]).await;
    let request =
        CallRequest { version: 1, tool: "hang".to_owned(), arguments: json!({}), workspace: None, timeout_ms: None };
    let caller = caller();
    let call = office.dispatcher.call(&caller, client(), request);
    assert!(tokio::time::timeout(Duration::from_secs(1), call).await.is_err());
    tokio::time::sleep(Duration::from_secs(1)).await;
    let jobs = office.dispatcher.jobs(&caller, JobFilter::default()).await.unwrap().jobs;
    assert_eq!(jobs[0].state, JobState::Done);
    let receipts = office.dispatcher.receipts(&caller, jobs[0].job_id).await.unwrap();
    assert_eq!(receipts[0].receipt().unwrap().outcome.code, Some(Code::Cancelled));
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_for_a_person_and_not_for_ever() {
    let guarded = || {
        let mut agent = agent();
        agent.approval.tools = vec!["write".to_owned()];
        agent
    };
    let replies = || vec![calls(&[("write", json!({"n": 1}))]), says("{\"done\":1}")];
    let behaviours = [("write", answers(json!({})))];
    for (approved, launched, code) in
        [(Some(true), 1, Value::Null), (Some(false), 0, json!("APPROVAL_DENIED")), (None, 0, json!("APPROVAL_EXPIRED"))]
    {
        let office = Office::with(guarded(), &behaviours, replies()).await;
        let job = office.submit(request()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let view = office.dispatcher.job(&caller(), job).await.unwrap();
        let waiting = view.waiting_for.expect("nobody is asked");
        assert_eq!((view.state, waiting.tool.as_str()), (JobState::Waiting, "write"));
        if let Some(approved) = approved {
            let reason = Some("because".to_owned());
            office.dispatcher.decide(&caller(), job, waiting.call_id, approved, reason).await.unwrap();
        }
        let result = office.result(job).await;
        assert!(matches!(result.verdict, Verdict::Success { .. }));
        assert_eq!(office.launch.log.lock().unwrap().launched.len(), launched);
        assert_eq!(result.receipts.count, 1);
        assert_eq!(result.usage.tool_calls, launched as u32, "a call that a person refused was not given back");
        let told = office.model.asked.lock().unwrap()[1].transcript.normalised().pop().unwrap();
        assert_eq!(told["result"]["error"]["code"], code);
        // What was decided is decided.
        let late = office.dispatcher.decide(&caller(), job, waiting.call_id, true, None).await.unwrap_err();
        assert_eq!(late.code, Code::InputInvalid);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_person_says_is_heard_at_the_next_turn_and_never_lost() {
    let slow = Behaviour::Answers(json!({}), Duration::from_secs(30));
    let replies = vec![calls(&[("read", json!({}))]), says("{\"done\":1}"), says("{\"done\":2}")];
    let office = Office::open(&[("read", slow)], replies).await;
    let job = office.submit(request()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    office.dispatcher.say(&caller(), job, "make it blue".to_owned()).await.unwrap();
    assert!(matches!(office.result(job).await.verdict, Verdict::Success { .. }));
    let told = office.model.asked.lock().unwrap()[1].transcript.normalised().pop().unwrap();
    assert_eq!(told, json!({"role": "user", "text": "The user says:\nmake it blue"}));
    assert_eq!(office.dispatcher.say(&caller(), job, "late".to_owned()).await.unwrap_err().code, Code::InputInvalid);
}

#[tokio::test(start_paused = true)]
async fn a_job_that_repeats_itself_is_warned_then_blocked_then_ended() {
    let same = (0..9).map(|_| calls(&[("read", json!({"n": 1}))])).collect();
    let office = Office::open(&[("read", answers(json!({})))], same).await;
    let result = office.run().await;
    assert_eq!((failed(&result).0, result.termination_reason), (Code::NoProgress, TerminationReason::NoProgress));
    let asked = office.model.asked.lock().unwrap();
    let offered: Vec<bool> = asked.iter().map(|one| one.tools.iter().any(|tool| tool.name == "read")).collect();
    assert_eq!(offered, [true, true, true, true, false, false, true]);
    assert_eq!(office.launch.log.lock().unwrap().launched.len(), 5, "blocked calls were run");
}

#[tokio::test(start_paused = true)]
async fn an_answer_before_the_contract_is_met_is_sent_back() {
    let mut strict = agent();
    strict.completion.verification = vec!["read".to_owned()];
    strict.completion.strict = true;
    let replies = || {
        let done = || says("{\"done\":1}");
        vec![done(), calls(&[("read", json!({}))]), done(), done(), done()]
    };
    let office =
        Office::with(strict.clone(), &[("read", answers(json!({"passed": true, "checked": 2})))], replies()).await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
    let failing = [("read", answers(json!({"passed": true, "checked": 0})))];
    let office = Office::with(strict.clone(), &failing, replies()).await;
    let result = office.run().await;
    let (code, _, details, partial) = failed(&result);
    assert_eq!((code, partial), (Code::CompletionUnverified, Some(&json!({"done": 1}))));
    assert_eq!(details["unmet"].as_array().unwrap().len(), 1);
    strict.completion.strict = false;
    let office = Office::with(strict, &failing, replies()).await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_conversation_that_grows_too_long_makes_room_and_goes_on() {
    let mut small = agent();
    small.context.limit = 1500;
    let long = json!({"text": "x".repeat(1500)});
    let mut replies: Vec<Reply1> = (0..6).map(|n| calls(&[("read", json!({"n": n}))])).collect();
    replies.push(says("{\"done\":1}"));
    let office = Office::with(small.clone(), &[("read", answers(long.clone()))], replies).await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
    let last = office.model.asked.lock().unwrap().pop().unwrap();
    assert!(last.transcript.estimated_tokens() <= 1500, "{}", last.transcript.estimated_tokens());
    assert_eq!(last.transcript.normalised()[1]["role"], "user", "the goal was evicted");

    // A server that says that it is too much is believed once.
    let overflow = || Err(crate::model::ModelError::lasting(Code::ContextOverflow, "too long"));
    let two = || [calls(&[("read", json!({"n": 1}))]), calls(&[("read", json!({"n": 2}))])].into_iter();
    let office =
        Office::open(&[("read", answers(long.clone()))], two().chain([overflow(), says("{\"done\":1}")]).collect())
            .await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
    let replies = two().chain([overflow(), overflow(), overflow(), overflow()]).collect();
    let office = Office::open(&[("read", answers(long))], replies).await;
    assert_eq!(failed(&office.run().await).0, Code::ContextOverflow);
}

#[tokio::test(start_paused = true)]
async fn a_summary_by_the_model_makes_room_and_is_paid_for() {
    let mut small = agent();
    (small.context.limit, small.context.compact_at, small.context.summary) = (3000, 0.7, true);
    let long = json!({"text": "x".repeat(1500)});
    let mut replies: Vec<Reply1> = (0..4).map(|n| calls(&[("read", json!({"n": n}))])).collect();
    let usage = crate::model::TokenUsage { input_tokens: 7000, cached_tokens: 0, output_tokens: 20 };
    replies.push(Ok(Reply {
        usage: Some(usage),
        text: "Nothing was found in the first.".to_owned(),
        ..Reply::default()
    }));
    replies.push(says("{\"done\":1}"));
    let office = Office::with(small.clone(), &[("read", answers(long.clone()))], replies).await;
    let result = office.run().await;
    assert!(matches!(result.verdict, Verdict::Success { .. }));
    assert_eq!(result.usage.turns, 5, "a summary is no turn");
    assert!(result.usage.input_tokens > 7000);
    let asked = office.model.asked.lock().unwrap().clone();
    assert!(asked[4].tools.is_empty() && asked[4].transcript.messages.len() == 1 && asked[4].max_output.is_some());
    let last = asked[5].transcript.normalised();
    assert_eq!(last[0]["text"], small.system_prompt);
    assert!(last[1]["text"].as_str().unwrap().starts_with("The goal"), "{last:?}");
    assert!(last[2]["text"].as_str().unwrap().contains("Nothing was found in the first."), "{last:?}");

    // Without a usable summary the job goes on as well.
    let mut replies: Vec<Reply1> = (0..4).map(|n| calls(&[("read", json!({"n": n}))])).collect();
    replies.extend([Err(crate::model::ModelError::passing("gone")), says("{\"done\":1}")]);
    let office = Office::with(small, &[("read", answers(long))], replies).await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_job_that_was_stopped_by_something_mendable_goes_on() {
    let gone = crate::model::ModelError::lasting(Code::ModelUnavailable, "no answer");
    let replies = vec![calls(&[("write", json!({}))]), Err(gone), says("{\"done\":1}")];
    let office = Office::open(&[("write", answers(json!({})))], replies).await;
    let job = office.submit(request()).await.unwrap();
    assert_eq!(failed(&office.result(job).await).0, Code::ModelUnavailable);
    let other = Caller { uid: 7, ..caller() };
    assert_eq!(office.dispatcher.resume(&other, job).await.unwrap_err().code, Code::NotFound);
    let own = caller();
    let both = tokio::join!(office.dispatcher.resume(&own, job), office.dispatcher.resume(&own, job));
    assert!(both.0.is_ok() != both.1.is_ok(), "{both:?}");
    let result = office.result(job).await;
    assert_eq!(result.verdict, Verdict::Success { data: json!({"done": 1}) });
    assert_eq!((result.usage.turns, result.usage.tool_calls, result.receipts.count), (3, 1, 1));
    assert_eq!(office.launch.log.lock().unwrap().launched, ["write"], "a finished call was repeated");
    let receipts = office.dispatcher.receipts(&caller(), job).await.unwrap();
    assert_eq!(receipts.len(), 2, "one call, and one seal");
    let events = office.dispatcher.events(&caller(), job, 0, Until::End).await.unwrap();
    let ends = events.filter(|event| matches!(event.body, EventBody::JobEnded { .. })).collect::<Vec<_>>().await;
    assert!(matches!(&ends[..], [EventView { body: EventBody::JobEnded { result: told }, .. }] if **told == result));
    assert_eq!(office.dispatcher.inner.shared.ledger.verify(job).await.unwrap(), None);
    let again = office.dispatcher.resume(&caller(), job).await.unwrap_err();
    assert_eq!(again.code, Code::InputInvalid, "it has reached its goal");
}

#[tokio::test(start_paused = true)]
async fn a_narrowed_budget_is_widened_to_the_agents_and_no_further() {
    let again = || calls(&[("read", json!({}))]);
    let replies = vec![again(), again(), again(), again()];
    let agent = Agent { budget: budget(3), max_repairs: 0, ..agent() };
    let office = Office::with(agent, &[("read", answers(json!({})))], replies).await;
    let narrow = BudgetRequest { max_turns: Some(1), ..BudgetRequest::default() };
    let job = office.submit(JobRequest { budget: Some(narrow), ..request() }).await.unwrap();
    assert_eq!(failed(&office.result(job).await).0, Code::TurnBudgetExhausted);
    office.dispatcher.resume(&caller(), job).await.unwrap();
    let result = office.result(job).await;
    assert_eq!((failed(&result).0, result.usage.turns), (Code::TurnBudgetExhausted, 3));
    let refused = office.dispatcher.resume(&caller(), job).await.unwrap_err();
    assert_eq!(refused.code, Code::TurnBudgetExhausted, "{refused:?}");
    assert_eq!(office.result(job).await, result, "a refused resumption changed the result");
}

#[tokio::test(start_paused = true)]
async fn a_follow_up_goal_goes_on_with_the_conversation() {
    let replies = vec![calls(&[("read", json!({}))]), says("{\"done\":1}"), says("{\"done\":2}")];
    let office = Office::open(&[("read", answers(json!({"n": 41})))], replies).await;
    let first = office.submit(request()).await.unwrap();
    let early = office.submit(JobRequest { continues: Some(first), ..request() }).await.unwrap_err();
    assert!(early.detail.contains("/continues") && early.detail.contains("has not ended"), "{early:?}");
    office.result(first).await;
    let second = JobRequest { continues: Some(first), goal: json!({"task": "more"}), ..request() };
    let second = office.submit(second).await.unwrap();
    let result = office.result(second).await;
    assert_eq!(result.verdict, Verdict::Success { data: json!({"done": 2}) });
    assert_eq!((result.usage.turns, result.receipts.count), (1, 0), "a new job has a budget and a chain of its own");
    let asked = office.model.asked.lock().unwrap().last().unwrap().transcript.messages.clone();
    assert_eq!(asked.len(), 5, "{asked:?}");
    assert!(format!("{asked:?}").contains("41"), "{asked:?}");
    let nobodys = JobRequest { continues: Some(JobId::generate()), ..request() };
    assert_eq!(office.submit(nobodys).await.unwrap_err().code, Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_is_searched_for_is_offered_from_then_on() {
    let searching = Agent {
        tool_search: Some(tool_search::Rules { always: vec!["write".to_owned()], results: 1 }),
        system_prompt: "You work.".to_owned(),
        ..agent()
    };
    let search = |query: &str| calls(&[("tool_search", json!({"query": query}))]);
    let replies = vec![
        search("read"),
        calls(&[("read", json!({}))]),
        // Nobody forbids to call what was not searched for.
        calls(&[("hang", json!({"n": 1})), ("tool_search", json!({}))]),
        search("moon"),
        says("{\"done\":1}"),
    ];
    let office = Office::with(searching, &[("read", answers(json!({}))), ("hang", answers(json!({})))], replies).await;
    let result = office.run().await;
    assert!(matches!(result.verdict, Verdict::Success { .. }));
    assert_eq!(office.launch.log.lock().unwrap().launched, ["read", "hang"]);
    assert_eq!((result.usage.tool_calls, result.receipts.count), (5, 3), "a search that works runs nothing");
    let asked = office.model.asked.lock().unwrap().clone();
    let offered = |turn: usize| asked[turn].tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>();
    assert_eq!(offered(0), ["write", "tool_search"]);
    assert_eq!(offered(1), ["write", "tool_search", "read"]);
    assert_eq!(offered(3), ["write", "tool_search", "read", "hang"]);
    assert!(asked.iter().all(|request| request.transcript.system == asked[0].transcript.system));
    let results = asked[4].transcript.normalised();
    let of = |index: usize| &results[index]["result"];
    assert_eq!(of(3), &json!({"ok": true, "result": {"tools": [{"name": "read", "description": "Does it."}]}}));
    assert_eq!(of(8)["error"]["code"], "ARGUMENTS_INVALID");
    assert_eq!(of(10)["result"]["nothing_found"]["some_names"], json!(["read", "write", "hang"]));
}

#[tokio::test(start_paused = true)]
async fn a_plan_waits_before_what_follows_and_no_longer_than_the_job() {
    let patient = || Agent { wait: Some(Duration::from_secs(3600)), budget: budget(10), ..agent() };
    let wait = |seconds: f64| ("wait", json!({"delay_seconds": seconds}));
    // Several waits are no loop; one that would end the job is refused.
    let replies = vec![
        calls(&[wait(0.2), ("read", json!({})), wait(0.2), wait(0.2)]),
        calls(&[wait(3000.0), wait(0.0)]),
        says("{\"done\":1}"),
    ];
    let office = Office::with(patient(), &[("read", answers(json!({})))], replies).await;
    let job = office.submit(request()).await.unwrap();
    let result = office.result(job).await;
    assert!(matches!(result.verdict, Verdict::Success { .. }));
    let asked = office.model.asked.lock().unwrap().clone();
    let told = asked[2].transcript.normalised();
    let of = |index: usize| &told[index]["result"];
    assert_eq!(asked[0].tools.last().unwrap().name, "wait");
    // The host's clock goes on while the tests' time stands still; less than thirty seconds do no harm.
    for index in [3, 5, 6] {
        assert_eq!(of(index), &json!({"ok": true, "result": {"waited": true}}));
    }
    let refused = of(8)["error"]["message"].as_str().unwrap();
    assert!(refused.contains("a wait of 3000 s would end it"), "{refused}");
    assert_eq!(of(9)["error"]["code"], "ARGUMENTS_INVALID");

    // A wait of which the host's clock knows nothing: the tests' time runs ahead.
    let replies = vec![calls(&[wait(300.0), ("read", json!({}))]), says("{\"done\":1}")];
    let office = Office::with(patient(), &[("read", answers(json!({})))], replies).await;
    assert!(matches!(office.run().await.verdict, Verdict::Success { .. }));
    let asked = office.model.asked.lock().unwrap().clone();
    assert_eq!(asked[1].transcript.normalised()[3]["result"]["error"]["code"], "CLOCK_DRIFT");

    // Cancelling ends it.
    let office = Office::with(patient(), &[], vec![calls(&[wait(500.0)])]).await;
    let job = office.submit(request()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    office.dispatcher.cancel(&caller(), job).await.unwrap();
    let result = office.result(job).await;
    assert_eq!(failed(&result).0, Code::Cancelled);
    assert!(result.usage.wall_seconds < 499.0, "{}", result.usage.wall_seconds);
}

#[tokio::test(start_paused = true)]
async fn a_question_waits_for_its_answer_and_not_for_ever() {
    let ask = || calls(&[("ask_user", json!({"question": "which quarter?"})), ("write", json!({}))]);
    let asking = || Agent { ask_user: Some(Duration::from_secs(90)), ..agent() };
    for (act, told) in [
        ("answer", json!({"ok": true, "result": {"answer": "the third"}})),
        ("decline", json!("APPROVAL_DENIED")),
        ("nothing", json!("APPROVAL_EXPIRED")),
    ] {
        let replies = vec![ask(), says("{\"done\":1}")];
        let office = Office::with(asking(), &[("write", answers(json!({})))], replies).await;
        let job = office.submit(request()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let view = office.dispatcher.job(&caller(), job).await.unwrap();
        let waiting = view.waiting_for.expect("nobody is asked");
        assert_eq!((view.state, waiting.kind), (JobState::Waiting, WaitKind::Question));
        assert!(office.launch.log.lock().unwrap().launched.is_empty(), "a later call overtook the question");
        let approved = office.dispatcher.decide(&caller(), job, waiting.call_id, true, None).await.unwrap_err();
        assert!(approved.detail.contains("in words"), "{approved:?}");
        match act {
            "answer" => office.dispatcher.say(&caller(), job, "the third".to_owned()).await.unwrap(),
            "decline" => office.dispatcher.decide(&caller(), job, waiting.call_id, false, None).await.unwrap(),
            _ => {}
        }
        let result = office.result(job).await;
        assert!(matches!(result.verdict, Verdict::Success { .. }), "{result:?}");
        // One that nobody answers goes back to the budget.
        let counted = if act == "answer" { 2 } else { 1 };
        assert_eq!((result.receipts.count, result.usage.tool_calls), (1, counted), "{act}");
        let heard = office.model.asked.lock().unwrap()[1].transcript.normalised();
        let answer = heard.iter().find(|one| one["tool"] == "ask_user" && !one["result"].is_null()).unwrap();
        assert!(answer["result"] == told || answer["result"]["error"]["code"] == told, "{act}: {answer}");
        let offered = office.model.asked.lock().unwrap()[0].tools.iter().any(|tool| tool.name == "ask_user");
        assert!(offered);
        let events = office.dispatcher.events(&caller(), job, 0, Until::End).await.unwrap();
        let asked =
            events.filter(|event| matches!(event.body, EventBody::QuestionAsked { .. })).collect::<Vec<_>>().await;
        assert_eq!(asked.len(), 1);
    }
    // The twin: who may not ask does not.
    let office = Office::open(&[("write", answers(json!({})))], vec![ask(), says("{\"done\":1}")]).await;
    let result = office.run().await;
    assert_eq!(result.receipts.count, 2, "a refused call has a receipt");
}
