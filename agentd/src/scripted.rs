//! A launcher and a model that do what a test says, so that the loop runs without root, processes and servers.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use sandbox::protocol::{Application, Drafted, Narrowing, Program, SliceLimits, WorkspaceChoice};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::extension::ExtensionManifest;
use toolproto::ids::{CallId, JobId};
use toolproto::manifest::ToolManifest;
use toolproto::receipt::{
    Claims, EXTENSION_PREFIX, Evidence, Outcome, OutcomeKind, PolicyIdentity, Signature, SignedEvidence, ToolIdentity,
    Usage, WorkspaceChange,
};

use crate::agent::{Agent, ApprovalRules};
use crate::extension::Extension;
use crate::launch::{Admission, Ended, Keep, Launch, LinkError, Order, Rejection, Settled, Stdin};
use crate::model::{Model, ModelError, Reply, ReplyCall, Request, Watch};
use crate::schema::Schema;
use crate::session::budget::Budget;
use crate::tools::{Tool, Tools};

/// What a scripted tool does with its arguments.
#[derive(Clone)]
pub(crate) enum Behaviour {
    /// Answers with this, after so long.
    Answers(Value, Duration),
    /// Fails with its own error.
    Fails(&'static str),
    /// Never ends by itself.
    Hangs,
}

/// A launcher that runs no process.
#[derive(Default)]
pub(crate) struct ScriptedLaunch {
    pub(crate) tools: HashMap<String, Behaviour>,
    pub(crate) log: Mutex<Log>,
}

/// What a scripted launcher was asked for.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) launched: Vec<String>,
    /// The arguments of each.
    pub(crate) given: Vec<Value>,
    pub(crate) running: usize,
    pub(crate) most_running: usize,
    pub(crate) closed: Vec<JobId>,
    chains: HashMap<JobId, Vec<Digest>>,
    /// What runtimes do when they are tried, and how often they were.
    pub(crate) runtime: Option<Behaviour>,
    pub(crate) probed: usize,
    /// The jobs that were granted, whether or not anybody was told.
    pub(crate) granted: Vec<JobId>,
    /// What the telling of a grant waits for, each of them for one permit.
    pub(crate) telling: Option<Arc<Semaphore>>,
    /// Whether nobody is granted anything.
    pub(crate) refuses: bool,
    /// Whether grants are forgotten.
    pub(crate) forgetful: bool,
    /// Whether no call that had no receipt when agentd ended was ever started.
    pub(crate) took_nothing_up: bool,
    /// What the evidence of calls that ran says of the workspace, and with which code, where that is not nothing.
    pub(crate) attested: Option<(WorkspaceChange, Option<Code>)>,
    calls: HashMap<CallId, (JobId, Program, Ended)>,
}

impl ScriptedLaunch {
    pub(crate) fn new(tools: &[(&str, Behaviour)]) -> Arc<Self> {
        let tools = tools.iter().map(|(name, does)| ((*name).to_owned(), does.clone())).collect();
        Arc::new(Self { tools, log: Mutex::default() })
    }

    async fn grant(&self, job: JobId) {
        let telling = {
            let mut log = self.log.lock().unwrap();
            log.granted.push(job);
            log.telling.clone()
        };
        if let Some(telling) = telling {
            telling.acquire_owned().await.unwrap().forget();
        }
    }

    fn evidence(
        &self,
        job: JobId,
        call: CallId,
        program: &Program,
        ended: Option<&Ended>,
        claims: Claims,
    ) -> SignedEvidence {
        let mut log = self.log.lock().unwrap();
        let attested = log.attested.clone().filter(|_| ended.is_some());
        let chain = log.chains.entry(job).or_default();
        let (name, refused) = match program {
            Program::Tool { name } => (name.clone(), OutcomeKind::Refused),
            Program::Extension { name } => (format!("{EXTENSION_PREFIX}{name}"), OutcomeKind::Refused),
            Program::Adhoc { .. } => ("exec".to_owned(), OutcomeKind::Refused),
            Program::Rollback { .. } => ("rollback".to_owned(), OutcomeKind::Refused),
        };
        let outcome = ended.map_or_else(
            || Outcome { kind: refused, code: claims.code, exit_status: None, signal: None },
            |ended| ended.outcome.clone(),
        );
        let (workspace, code) = attested.unwrap_or((WorkspaceChange::none(), outcome.code));
        let record = Evidence {
            version: 1,
            job_id: job,
            call_id: call,
            sequence: chain.len() as u64 + 1,
            previous: chain.last().copied(),
            uid: 1000,
            tool: ToolIdentity { name, version: 1, digest: None },
            policy: PolicyIdentity { name: "workspace".to_owned(), digest: Digest::sha256(b"policy") },
            enforced: vec!["network_namespace".to_owned()],
            not_enforced: Vec::new(),
            started: Timestamp::UNIX_EPOCH,
            ended: Timestamp::UNIX_EPOCH,
            outcome: Outcome { code, ..outcome },
            workspace,
            denied: Vec::new(),
            usage: ended.map(|ended| ended.usage.clone()).unwrap_or_default(),
            cgroup: "none".to_owned(),
            claims,
            withdraws: None,
        };
        chain.push(Digest::of_json(&record).unwrap());
        SignedEvidence { record, signature: None }
    }

    async fn behave(&self, order: &Order, cancel: &CancellationToken) -> Ended {
        let (Program::Tool { name } | Program::Extension { name }) = &order.program else {
            return exited(0, String::new());
        };
        let hang = async {
            tokio::select! {
                () = tokio::time::sleep(order.time) => OutcomeKind::TimedOut,
                () = cancel.cancelled() => OutcomeKind::Cancelled,
            }
        };
        match self.tools.get(name) {
            Some(Behaviour::Answers(result, after)) => {
                tokio::select! {
                    kind = hang => killed(kind),
                    () = tokio::time::sleep(*after) => {
                        let reply = json!({"protocol": 1, "call_id": order.call, "ok": true, "result": result});
                        exited(0, reply.to_string())
                    }
                }
            }
            Some(Behaviour::Fails(code)) => {
                let error = json!({"code": code, "message": "no", "retryable": false});
                let reply = json!({"protocol": 1, "call_id": order.call, "ok": false, "error": error});
                exited(1, reply.to_string())
            }
            Some(Behaviour::Hangs) | None => killed(hang.await),
        }
    }
}

fn granted(job: JobId, workspace: Option<PathBuf>) -> Admission {
    Admission { job, uid: 1000, workspace, never_started: Vec::new() }
}

fn exited(status: i32, stdout: String) -> Ended {
    let outcome = Outcome { kind: OutcomeKind::Exited, code: None, exit_status: Some(status), signal: None };
    Ended {
        outcome,
        failure: None,
        stdout: stdout.into_bytes(),
        stdout_overflowed: false,
        stderr_tail: String::new(),
        usage: Usage { cpu_usec: 1000, ..Usage::default() },
        denied: Vec::new(),
        network: None,
    }
}

fn killed(kind: OutcomeKind) -> Ended {
    let code = if kind == OutcomeKind::Cancelled { Code::Cancelled } else { Code::ToolTimeout };
    let ended = exited(0, String::new());
    Ended { outcome: Outcome { kind, code: Some(code), exit_status: None, signal: Some(15) }, ..ended }
}

impl Launch for Arc<ScriptedLaunch> {
    async fn admit(
        &self,
        job: JobId,
        _client: OwnedFd,
        workspace: WorkspaceChoice,
        _agent: Option<Digest>,
        _limits: SliceLimits,
    ) -> Result<Result<Admission, Rejection>, LinkError> {
        if self.log.lock().unwrap().refuses {
            let message = "not this one".to_owned();
            return Ok(Err(Rejection { code: Code::NotPermitted, message }));
        }
        if matches!(&workspace, WorkspaceChoice::Named(path) if path.starts_with("/missing")) {
            let message = "it does not exist".to_owned();
            return Ok(Err(Rejection { code: Code::WorkspaceUnavailable, message }));
        }
        self.grant(job).await;
        Ok(Ok(match workspace {
            WorkspaceChoice::Named(path) => granted(job, Some(path)),
            WorkspaceChoice::Private => granted(job, Some(PathBuf::from("/private"))),
            WorkspaceChoice::None => granted(job, None),
        }))
    }

    async fn readmit(
        &self,
        job: JobId,
        receipts: u64,
        dangling: Vec<CallId>,
    ) -> Result<Result<Admission, Rejection>, LinkError> {
        if !self.log.lock().unwrap().forgetful {
            self.grant(job).await;
        }
        let mut log = self.log.lock().unwrap();
        if log.forgetful {
            return Ok(Err(Rejection { code: Code::Interrupted, message: "no grant was kept".to_owned() }));
        }
        let chain = log.chains.entry(job).or_default();
        assert!(chain.len() as u64 >= receipts, "the ledger has receipts that nobody gave");
        chain.truncate(receipts as usize);
        let never_started = if log.took_nothing_up { dangling } else { Vec::new() };
        Ok(Ok(Admission { never_started, ..granted(job, Some(PathBuf::from("/private"))) }))
    }

    fn warm(&self, _: JobId, _: String, _: Narrowing) -> Result<(), LinkError> {
        Ok(())
    }

    async fn probe(&self, _runtime: String, time: Duration) -> Result<Ended, LinkError> {
        let behaviour = {
            let mut log = self.log.lock().unwrap();
            log.probed += 1;
            log.runtime.clone()
        };
        Ok(match behaviour {
            Some(Behaviour::Answers(version, after)) => {
                tokio::time::sleep(after).await;
                exited(0, version.as_str().unwrap_or_default().to_owned())
            }
            Some(Behaviour::Fails(words)) => Ended { stderr_tail: words.to_owned(), ..exited(1, String::new()) },
            Some(Behaviour::Hangs) | None => {
                tokio::time::sleep(time).await;
                killed(OutcomeKind::TimedOut)
            }
        })
    }

    async fn launch(&self, order: Order, cancel: CancellationToken) -> Result<Ended, LinkError> {
        if let (Program::Tool { name } | Program::Extension { name }, Stdin::Bytes(bytes)) =
            (&order.program, &order.stdin)
        {
            tokio::select! {
                () = order.recorded.wait() => {}
                // What was started ahead ends without having been told anything.
                () = cancel.cancelled() => {
                    let ended = killed(OutcomeKind::Cancelled);
                    self.log.lock().unwrap().calls.insert(order.call, (order.job, order.program, ended.clone()));
                    return Ok(ended);
                }
            }
            let mut request = serde_json::from_slice::<Value>(bytes).unwrap();
            assert!(request["call_id"] == order.call.to_string());
            let mut log = self.log.lock().unwrap();
            log.launched.push(name.clone());
            log.given.push(request["arguments"].take());
            log.running += 1;
            log.most_running = log.most_running.max(log.running);
        }
        let ended = self.behave(&order, &cancel).await;
        let mut log = self.log.lock().unwrap();
        log.running = log.running.saturating_sub(1);
        log.calls.insert(order.call, (order.job, order.program, ended.clone()));
        Ok(ended)
    }

    async fn settle(&self, call: CallId, _: bool, claims: Claims, _: Drafted) -> Result<Settled, LinkError> {
        let ran = self.log.lock().unwrap().calls.remove(&call);
        let (job, program, ended) =
            ran.ok_or_else(|| LinkError::Misuse(format!("call {call} is not to be settled")))?;
        Ok(Settled { evidence: self.evidence(job, call, &program, Some(&ended), claims), kept: None, receipt: None })
    }

    async fn stored(&self, call: CallId) -> Result<Application, LinkError> {
        Err(LinkError::Misuse(format!("call {call} has nothing prepared")))
    }

    async fn record(
        &self,
        job: JobId,
        call: CallId,
        program: Program,
        claims: Claims,
    ) -> Result<SignedEvidence, LinkError> {
        Ok(self.evidence(job, call, &program, None, claims))
    }

    async fn sign(&self, _: JobId, _: Option<CallId>, _: String) -> Result<Option<Signature>, LinkError> {
        Ok(None)
    }

    async fn close(&self, job: JobId, keep: Keep) -> Result<(), LinkError> {
        let mut log = self.log.lock().unwrap();
        log.closed.push(job);
        if keep == Keep::Nothing {
            log.chains.remove(&job);
        }
        Ok(())
    }
}

/// A model that says one thing after the other, and keeps what it was asked.
pub(crate) struct ScriptedModel {
    replies: Mutex<Vec<Result<Reply, ModelError>>>,
    pub(crate) asked: Mutex<Vec<Request>>,
}

impl ScriptedModel {
    pub(crate) fn new(replies: Vec<Result<Reply, ModelError>>) -> Arc<Self> {
        Arc::new(Self { replies: Mutex::new(replies), asked: Mutex::default() })
    }
}

impl Model for ScriptedModel {
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
        request.transcript.check().unwrap();
        self.asked.lock().unwrap().push(request.clone());
        let mut replies = self.replies.lock().unwrap();
        // A model that has said everything says no more.
        let reply = if replies.is_empty() { None } else { Some(replies.remove(0)) };
        async move {
            match reply {
                Some(reply) => {
                    watch("…");
                    reply
                }
                None => std::future::pending().await,
            }
        }
        .boxed()
    }
}

/// A reply that asks for calls.
pub(crate) fn calls(calls: &[(&str, Value)]) -> Result<Reply, ModelError> {
    let call = |(tool, arguments): &(&str, Value)| ReplyCall {
        id: None,
        tool: (*tool).to_owned(),
        arguments: arguments.to_string(),
    };
    Ok(Reply { calls: calls.iter().map(call).collect(), ..Reply::default() })
}

/// A reply in words.
pub(crate) fn says(text: &str) -> Result<Reply, ModelError> {
    Ok(Reply { text: text.to_owned(), ..Reply::default() })
}

/// Tools `read` (read-only, spills what is large), `write` (changes the workspace) and `hang`.
pub(crate) fn tools() -> Tools {
    let tool = |name: &str, run: &str, execution: &str| {
        let text = format!(
            "version = 1\nname = \"{name}\"\ndescription = \"Does it.\"\n[run]\nruntime = \"python\"\nentry = \"main.py\"\n\
             {run}\n[contract]\ninput = \"i.json\"\n[execution]\n{execution}\n"
        );
        Tool {
            manifest: ToolManifest::parse(std::path::Path::new("tool.toml"), &text).unwrap(),
            digest: Digest::blake3(name.as_bytes()),
            input: Schema::compile(json!({"type": "object", "properties": {"n": {"type": "integer"}}})).unwrap(),
            output: Some(Schema::compile(json!({"type": "object"})).unwrap()),
            time: Duration::from_secs(60),
            discardable: false,
        }
    };
    [
        tool("read", "", "read_only = true\n[limits]\nspill = \"8KiB\""),
        tool("write", "", "mutates_workspace = true"),
        tool("hang", "", ""),
        tool("ahead", "prewarm = 1", "read_only = true"),
    ]
    .into_iter()
    .collect()
}

/// Extensions: `guard`, which may fail, and `strict`, which may not and reaches a host, so that it is not asked twice.
pub(crate) fn extensions() -> Vec<Extension> {
    let extension = |name: &str, keys: &str, tables: &str| {
        let text = format!(
            "version = 1\nname = \"{name}\"\ndescription = \"Watches.\"\n{keys}\n\
             operations = [\"before_turn\", \"after_tool_batch\", \"before_final_answer\", \"after_run\"]\n\
             [run]\nruntime = \"python\"\nentry = \"main.py\"\n{tables}\n"
        );
        Extension {
            manifest: ExtensionManifest::parse(std::path::Path::new("extension.toml"), &text).unwrap(),
            digest: Digest::blake3(name.as_bytes()),
            time: Duration::from_secs(60),
        }
    };
    vec![
        extension("guard", "", ""),
        extension("strict", "required = true", "[sandbox]\npolicy = \"network\"\nhosts = [\"a.example:443\"]"),
    ]
}

/// An agent with all of them, whose goal and result are objects, the result with a `done`.
pub(crate) fn agent() -> Agent {
    Agent {
        name: "worker".to_owned(),
        description: "Works.".to_owned(),
        system_prompt: "You work.".to_owned(),
        digest: Digest::sha256(b"agent"),
        models: Vec::new(),
        tools: ["read", "write", "hang"].map(str::to_owned).to_vec(),
        extensions: Vec::new(),
        goal: Schema::compile(json!({"type": "object", "required": ["task"]})).unwrap(),
        result: Schema::compile(json!({"type": "object", "required": ["done"]})).unwrap(),
        budget: Budget {
            max_turns: 10,
            max_tool_calls: 10,
            wall: Duration::from_secs(600),
            max_total_tokens: None,
            max_cost_usd: None,
            max_cpu: None,
        },
        context: crate::session::context::Rules::default(),
        progress: crate::session::progress::Rules::default(),
        completion: crate::session::completion::Contract::default(),
        approval: ApprovalRules { tools: Vec::new(), timeout: Duration::from_secs(60) },
        max_repairs: 2,
        ask_user: None,
        tool_search: None,
        wait: None,
        grace_call: false,
        price: None,
        max_parallel: 8,
        limits: SliceLimits::default(),
    }
}
