use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use sandbox::config::Config;
use sandbox::protocol::{Application, Drafted, Narrowing, Program, SliceLimits, WorkspaceChoice};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::StreamExt;
use toolproto::api::{EventBody, JobPage, JobState, JobView, ReceiptList, Steered, ToolList};
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::framing::{EXEC_PROTOCOL, Frame, FrameKind, FrameReader};
use toolproto::ids::{CallId, JobId};
use toolproto::job::{Accepted, JobResult, Problem};
use toolproto::receipt::{Claims, Signature, SignedEvidence};

use super::server::Bounds;
use super::*;
use crate::access::Gate;
use crate::call::Origin;
use crate::client::failure::Failure;
use crate::client::transport::Daemon;
use crate::dispatcher::offer::Catalogue;
use crate::dispatcher::{Settings, Staffed};
use crate::launch::{Admission, Ended, Keep, LinkError, Order, Rejection, Settled, Stdin};
use crate::ledger::Ledger;
use crate::observe::Observer;

use crate::scripted::{Behaviour, ScriptedLaunch, ScriptedModel, agent, calls, says, tools};
use crate::{launch, queue};

/// The scripted launcher; commands copy their stdin to stdout, and `never` does so until it is stopped.
struct Echo(Arc<ScriptedLaunch>);

impl Launch for Echo {
    async fn admit(
        &self,
        job: JobId,
        client: OwnedFd,
        workspace: WorkspaceChoice,
        agent: Option<Digest>,
        limits: SliceLimits,
    ) -> Result<Result<Admission, Rejection>, LinkError> {
        self.0.admit(job, client, workspace, agent, limits).await
    }

    async fn readmit(
        &self,
        job: JobId,
        receipts: u64,
        dangling: Vec<CallId>,
    ) -> Result<Result<Admission, Rejection>, LinkError> {
        self.0.readmit(job, receipts, dangling).await
    }

    fn warm(&self, _: JobId, _: String, _: Narrowing) -> Result<(), LinkError> {
        Ok(())
    }

    async fn probe(&self, runtime: String, time: Duration) -> Result<Ended, LinkError> {
        self.0.probe(runtime, time).await
    }

    async fn launch(&self, mut order: Order, cancel: CancellationToken) -> Result<Ended, LinkError> {
        let Program::Adhoc { command, .. } = &order.program else { return self.0.launch(order, cancel).await };
        let never = command == &["never"];
        let (Stdin::Fd(stdin), Some((stdout, stderr))) =
            (std::mem::replace(&mut order.stdin, Stdin::Bytes(Vec::new())), order.streams.take())
        else {
            panic!("a command without streams");
        };
        if never {
            cancel.cancelled().await;
            return self.0.launch(order, cancel).await;
        }
        tokio::task::spawn_blocking(move || {
            let (mut stdin, mut stdout, mut stderr) = (File::from(stdin), File::from(stdout), File::from(stderr));
            std::io::copy(&mut stdin, &mut stdout).unwrap();
            stderr.write_all(b"that was all").unwrap();
        })
        .await
        .unwrap();
        self.0.launch(order, cancel).await
    }

    async fn settle(&self, call: CallId, commit: bool, claims: Claims, receipt: Drafted) -> Result<Settled, LinkError> {
        self.0.settle(call, commit, claims, receipt).await
    }

    async fn stored(&self, call: CallId) -> Result<Application, LinkError> {
        self.0.stored(call).await
    }

    async fn record(
        &self,
        job: JobId,
        call: CallId,
        what: Program,
        claims: Claims,
    ) -> Result<SignedEvidence, LinkError> {
        self.0.record(job, call, what, claims).await
    }

    async fn sign(&self, job: JobId, call: Option<CallId>, payload: String) -> Result<Option<Signature>, LinkError> {
        launch::Launch::sign(&self.0, job, call, payload).await
    }

    async fn close(&self, job: JobId, keep: Keep) -> Result<(), LinkError> {
        self.0.close(job, keep).await
    }
}

struct Office {
    daemon: Daemon,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Office {
    async fn open() -> Self {
        Self::bounded(Bounds::default()).await
    }

    async fn bounded(bounds: Bounds) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at_once = Duration::ZERO;
        let behaviours = [
            ("read", Behaviour::Answers(json!({"n": 1}), at_once)),
            ("write", Behaviour::Fails("BROKEN")),
            ("hang", Behaviour::Hangs),
        ];
        let model = ScriptedModel::new(vec![calls(&[("read", json!({}))]), says("{\"done\":true}")]);
        let settings = Settings {
            limits: queue::Limits { running: 4, per_user: 4, waiting: 4 },
            observer: Observer::blind(),
            slices: crate::observe::slices::Slices::default(),
        };
        let catalogue = Catalogue {
            tools: tools(),
            agents: vec![Staffed { agent: agent(), model }],
            policies: Vec::new(),
            prices: HashMap::new(),
            permits: Box::new(|_, _| true),
        };
        let origin = Origin { host: "host".to_owned(), boot_id: "boot".to_owned(), key_id: None };
        let launch = Echo(ScriptedLaunch::new(&behaviours));
        let ledger = Ledger::open(folder.path()).unwrap();
        let dispatcher = Dispatcher::start(launch, ledger, catalogue, origin, settings).await.unwrap();
        let config = Config::parse(Path::new("/e/agentd.toml"), "version = 1\n").unwrap();
        let socket = folder.path().join("s");
        let stopping = CancellationToken::new();
        let key = KeyView {
            key_id: "k".to_owned(),
            algorithm: "ed25519".to_owned(),
            public_key: "PEM".to_owned(),
            from: None,
            until: None,
            record: None,
        };
        let api = Api {
            dispatcher,
            observer: Observer::start(None, None),
            request_limit: 10_000,
            keys: vec![key],
            started: Timestamp::now(),
            stopping: stopping.clone(),
        };
        let listener = UnixListener::bind(&socket).unwrap();
        let gate = Arc::new(Gate::look_up(&config).unwrap());
        tokio::spawn(server::serve(listener, router(api), gate, bounds, stopping));
        Self { daemon: Daemon::at(socket.clone()), socket, _folder: folder }
    }

    /// A request as it is: status, headers, body.
    async fn raw(&self, method: &str, path: &str, body: impl Into<Bytes>) -> (u16, hyper::HeaderMap, Value) {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = hyper::Request::builder().method(method).uri(path).header("host", "agentd");
        let response = sender.send_request(request.body(Full::new(body.into())).unwrap()).await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, headers, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    async fn refusal(&self, body: &str) -> Problem {
        let (status, headers, body) = self.raw("POST", "/v1/jobs", body.to_owned()).await;
        assert_eq!(headers["content-type"], "application/problem+json");
        let problem: Problem = serde_json::from_value(body).unwrap();
        assert_eq!(problem.status, status);
        assert_eq!(problem.request_id.unwrap().to_string(), headers["x-request-id"].to_str().unwrap());
        problem
    }

    async fn submit(&self) -> JobId {
        let accepted: Accepted = self.daemon.post("/jobs", &job()).await.unwrap();
        accepted.job_id
    }
}

fn job() -> Value {
    json!({"version": 1, "agent": "worker", "goal": {"task": "t"}, "labels": {"team": "sales"}})
}

#[tokio::test]
async fn a_job_goes_from_submission_to_result_events_and_receipts() {
    let office = Office::open().await;
    let (status, headers, body) = office.raw("POST", "/v1/jobs", job().to_string()).await;
    assert_eq!((status, body["status"].as_str()), (202, Some("accepted")));
    let id: JobId = body["job_id"].as_str().unwrap().parse().unwrap();
    assert_eq!(headers["location"], format!("/v1/jobs/{id}"));
    assert_eq!(body["request_id"], headers["x-request-id"].to_str().unwrap());

    let result: JobResult = office.daemon.get(&format!("/jobs/{id}/result?wait=30")).await.unwrap();
    assert_eq!((result.job_id, result.usage.tool_calls), (id, 1));
    let view: JobView = office.daemon.get(&format!("/jobs/{id}")).await.unwrap();
    assert_eq!((view.state, view.result), (JobState::Done, Some(result)));
    let receipts: ReceiptList = office.daemon.get(&format!("/jobs/{id}/receipts")).await.unwrap();
    assert_eq!(receipts.receipts.len(), 2, "one call and the seal");

    let page: JobPage = office.daemon.get("/jobs?label=team%3Dsales&limit=1").await.unwrap();
    assert_eq!(page.jobs.len(), 1);
    let none: JobPage = office.daemon.get("/jobs?agent=other").await.unwrap();
    assert!(none.jobs.is_empty());
    let steered: Steered = office.daemon.post(&format!("/jobs/{id}/cancel"), &json!({})).await.unwrap();
    assert_eq!(steered.state, JobState::Done, "a job that has ended stays as it is");
}

#[tokio::test]
async fn events_are_named_numbered_and_resumable() {
    let office = Office::open().await;
    let id = office.submit().await;
    let events = office.daemon.events(&format!("/jobs/{id}/events"), None).await.unwrap();
    let events: Vec<_> = events.map(Result::unwrap).collect().await;
    assert!(matches!(events.last().unwrap().body, EventBody::JobEnded { .. }));
    let kept: Vec<u64> = events.iter().filter_map(|event| event.sequence).collect();
    assert!(kept.is_sorted_by(|a, b| a < b), "{kept:?}");

    let middle = kept[kept.len() / 2];
    let rest = office.daemon.events(&format!("/jobs/{id}/events"), Some(middle)).await.unwrap();
    let rest: Vec<u64> = rest.filter_map(|event| event.unwrap().sequence).collect().await;
    assert_eq!(rest, kept.iter().copied().filter(|sequence| *sequence > middle).collect::<Vec<_>>());
    let refused = office.raw("GET", "/v1/jobs/x/events", "").await;
    assert_eq!(refused.0, 404);
}

#[tokio::test]
async fn a_running_job_shows_what_has_happened_and_can_be_cancelled() {
    let office = Office::open().await;
    // The scripted model says only two things; the second job waits for it for ever.
    let first = office.submit().await;
    let _: JobResult = office.daemon.get(&format!("/jobs/{first}/result?wait=30")).await.unwrap();
    let id = office.submit().await;
    let (status, _, body) = office.raw("GET", &format!("/v1/jobs/{id}/result?wait=0"), "").await;
    assert_eq!((status, body["job_id"].as_str()), (202, Some(id.to_string().as_str())));
    let so_far = office.daemon.events(&format!("/jobs/{id}/events?follow=false"), None).await.unwrap();
    let so_far: Vec<_> = so_far.map(Result::unwrap).collect().await;
    assert!(!so_far.iter().any(|event| matches!(event.body, EventBody::JobEnded { .. })), "{so_far:?}");
    let steered: Steered = office.daemon.post(&format!("/jobs/{id}/cancel"), &json!({})).await.unwrap();
    assert_ne!(steered.state, JobState::Done);
    let result: Value = office.daemon.get(&format!("/jobs/{id}/result?wait=30")).await.unwrap();
    assert_eq!(result["error_code"], "CANCELLED");
}

#[tokio::test]
async fn refusals_say_what_is_wrong_and_where() {
    let office = Office::open().await;
    let problem = office.refusal("{\"version\":1,").await;
    assert_eq!((problem.status, problem.code), (400, Code::InputInvalid));
    assert!(problem.offset.is_some());

    let problem = office.refusal(&json!({"version": 1, "agent": "worker", "goal": {}}).to_string()).await;
    assert_eq!((problem.status, problem.code), (422, Code::InputInvalid));
    assert_eq!(problem.violations[0].pointer, "/goal");
    assert!(problem.violations[0].rule.contains("required"), "{problem:?}");

    let problem = office.refusal(&json!({"version": 1, "agent": "worke", "goal": {"task": "t"}}).to_string()).await;
    assert_eq!((problem.status, problem.code), (404, Code::AgentUnknown));
    assert!(problem.detail.contains("did you mean `worker`?"), "{}", problem.detail);

    let workspace = json!({"version": 1, "agent": "worker", "goal": {"task": "t"}, "workspace": "/missing"});
    assert_eq!(office.refusal(&workspace.to_string()).await.code, Code::WorkspaceUnavailable);

    let problem = office.refusal(&format!("\"{}\"", "x".repeat(10_001))).await;
    assert_eq!((problem.status, problem.code), (413, Code::RequestTooLarge));
    // The daemon goes on.
    office.submit().await;
}

#[tokio::test]
async fn what_the_api_does_not_have_is_refused_in_its_own_words() {
    let office = Office::open().await;
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/jobs", 405),
        ("GET", "/v1/jobs/06ab3tq4k1vfl2n8o0q1r5s7tg", 404),
        ("GET", "/v1/jobs/..%2f..%2fetc", 404),
        ("GET", "/v1/jobs?limit=many", 400),
        ("GET", "/v1/jobs?state=odd", 400),
    ] {
        let (answered, headers, body) = office.raw(method, path, "").await;
        assert_eq!(answered, status, "{method} {path}: {body}");
        assert_eq!(headers["content-type"], "application/problem+json");
        assert!(body["recovery_suggestion"].is_string());
    }
}

#[tokio::test]
async fn the_keys_are_for_everybody() {
    let office = Office::open().await;
    let (status, _, body) = office.raw("GET", "/v1/keys", "").await;
    assert_eq!(status, 200);
    assert_eq!(body["keys"], json!([{"key_id": "k", "algorithm": "ed25519", "public_key": "PEM"}]));
}

#[tokio::test]
async fn direct_calls_answer_also_when_they_fail() {
    let office = Office::open().await;
    let call = |tool: &str| json!({"version": 1, "tool": tool, "arguments": {}});
    let reply: Value = office.daemon.post("/calls", &call("read")).await.unwrap();
    assert_eq!((&reply["ok"], &reply["result"]), (&json!(true), &json!({"n": 1})));
    assert!(reply["receipt"]["payload"].is_string());
    let reply: Value = office.daemon.post("/calls", &call("write")).await.unwrap();
    assert_eq!((&reply["ok"], &reply["error"]["code"]), (&json!(false), &json!("TOOL_FAILED")));
    let refused = office.daemon.post::<Value>("/calls", &call("raed")).await.unwrap_err();
    assert!(matches!(refused, Failure::Refused(problem) if problem.code == Code::ToolUnknown));
    let tools: ToolList = office.daemon.get("/tools").await.unwrap();
    assert_eq!(tools.tools.len(), 4);
    let health: Value = office.daemon.get("/health").await.unwrap();
    assert_eq!(health["status"], "ok");
    let (status, headers, _) = office.raw("GET", "/v1/metrics", "").await;
    assert_eq!((status, headers["content-type"].to_str().unwrap()), (200, crate::observe::metrics::CONTENT_TYPE));
}

fn command(command: &str) -> Value {
    json!({"version": 1, "policy": "workspace", "command": [command]})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_s_streams_and_end_come_back_in_frames() {
    let office = Office::open().await;
    let connection = office.daemon.upgrade("/exec", EXEC_PROTOCOL, &command("cat")).await.unwrap();
    let (mut receiving, mut sending) = tokio::io::split(connection);
    let sent: Vec<u8> = (0..100_000_u32).map(|byte| u8::try_from(byte % 251).unwrap()).collect();
    for piece in sent.chunks(30_000).chain([[].as_slice()]) {
        let frame = Frame { kind: FrameKind::Stdin, payload: piece.to_vec() };
        sending.write_all(&frame.encode().unwrap()).await.unwrap();
    }
    let mut frames = FrameReader::default();
    let (mut stdout, mut stderr, mut credit, mut buffer) = (Vec::new(), Vec::new(), 0, vec![0; 1000]);
    let end: Value = 'frames: loop {
        while let Some(frame) = frames.next_frame().unwrap() {
            match frame.kind {
                FrameKind::Stdout => stdout.extend(frame.payload),
                FrameKind::Stderr => stderr.extend(frame.payload),
                FrameKind::Credit => credit += u32::from_be_bytes(frame.payload.try_into().unwrap()),
                FrameKind::Status => break 'frames serde_json::from_slice(&frame.payload).unwrap(),
                other => panic!("{other:?}"),
            }
        }
        let read = receiving.read(&mut buffer).await.unwrap();
        assert_ne!(read, 0, "hung up before the status");
        frames.push(&buffer[..read]);
    };
    assert!(stdout == sent, "{} bytes came back", stdout.len());
    assert_eq!((stderr.as_slice(), credit), (b"that was all".as_slice(), 100_000));
    assert_eq!(end["outcome"]["kind"], "exited");
    assert!(end["receipt"]["payload"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_does_not_read_can_be_stopped() {
    let office = Office::open().await;
    let mut connection = office.daemon.upgrade("/exec", EXEC_PROTOCOL, &command("never")).await.unwrap();
    for (kind, payload) in [(FrameKind::Stdin, vec![0; 200_000]), (FrameKind::Stop, Vec::new())] {
        connection.write_all(&Frame { kind, payload }.encode().unwrap()).await.unwrap();
    }
    let mut bytes = Vec::new();
    connection.read_to_end(&mut bytes).await.unwrap();
    let mut frames = FrameReader::default();
    frames.push(&bytes);
    let mut last = None;
    while let Some(frame) = frames.next_frame().unwrap() {
        last = Some(frame);
    }
    assert_eq!(last.unwrap().kind, FrameKind::Status);
}

#[tokio::test]
async fn commands_without_an_upgrade_are_refused() {
    let office = Office::open().await;
    let (status, _, body) = office.raw("POST", "/v1/exec", command("true").to_string()).await;
    assert_eq!((status, body["code"].as_str()), (400, Some("INPUT_INVALID")));
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_and_surplus_connections_are_closed_and_others_served() {
    let bounds = Bounds { per_user: 3, head_time: Duration::from_millis(300), ..Bounds::default() };
    let office = Office::bounded(bounds).await;
    let connect = || std::os::unix::net::UnixStream::connect(&office.socket).unwrap();
    let mut silent: Vec<_> = (0..3).map(|_| connect()).collect();
    silent[1].write_all(b"GET /v1/health HT").unwrap();
    // The fourth of this user is closed at once.
    let mut surplus = connect();
    surplus.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    tokio::task::spawn_blocking(move || assert_eq!(surplus.read(&mut [0; 64]).unwrap_or(0), 0)).await.unwrap();
    // The silent ones are closed in time.
    let closed = tokio::task::spawn_blocking(move || {
        for stream in &mut silent {
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).unwrap();
        }
    });
    closed.await.unwrap();
    let health: Value = office.daemon.get("/health").await.unwrap();
    assert_eq!(health["status"], "ok");
}
