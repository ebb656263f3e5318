//! Direct calls and commands: implicit jobs of one call, without a loop.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use sandbox::config::Subject;
use sandbox::protocol::{Application, Narrowing, Program, SliceLimits, WorkspaceChoice};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use toolproto::api::{API_VERSION, CallError, CallReply, CallRequest, ExecEnd, ExecFailure, ExecRequest};
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::job::{Problem, ReceiptsHead};
use toolproto::source::alternatives;

use super::{Dispatcher, unlinked, unreadable};
use crate::call::{self, Answered, Asked, SealError, Sealed};
use crate::caller::Caller;
use crate::guards::{self, Attempts};
use crate::launch::{Keep, Launch, Order, Recorded, Stdin};
use crate::ledger::{JobKind, NewJob, StoredReceipt};
use crate::model::transcript::Arguments;
use crate::observe::Observation;
use crate::spill;

/// How long the end of a command's stderr is waited for: whoever reads it may be slow.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a command may run that names no time. A command is a person's: it ends when the connection does.
const LONGEST_COMMAND: Duration = Duration::from_secs(24 * 3600);

impl<L: Launch> Dispatcher<L> {
    /// Runs one tool call without a loop. When the caller goes away, the call is ended.
    ///
    /// # Errors
    /// When there is no such tool, the caller may not use it, or the workspace cannot be had. A call that fails is no error.
    pub async fn call(&self, caller: &Caller, client: OwnedFd, request: CallRequest) -> Result<CallReply, Problem> {
        known_version(request.version)?;
        let offer = self.inner.offer();
        let Some(tool) = offer.tools.get(&request.tool) else {
            let names = offer.tools.iter().map(|tool| tool.manifest.name.as_str());
            let names = names.filter(|name| (offer.permits)(caller, Subject::Tool(name)));
            let hint = alternatives(&request.tool, names);
            return Err(Problem::new(Code::ToolUnknown, format!("there is no tool `{}`{hint}", request.tool)));
        };
        if !(offer.permits)(caller, Subject::Tool(&request.tool)) {
            return Err(Problem::new(Code::NotPermitted, format!("tool `{}` is not for this caller", request.tool)));
        }
        let time = request.timeout_ms.map_or(tool.time, |millis| tool.time.min(Duration::from_millis(millis)));
        let has_workspace = request.workspace.is_some();
        // What was started ahead is readied while the call goes into the ledger, and is told what to do only after that.
        let is_readied = tool.manifest.is_prewarmed() && !spill::refers(&request.arguments);
        let admitted = self.admit(client, JobKind::Call, request.workspace.clone(), json!(request)).await?;
        let (job, recorded, unrecorded) = if is_readied {
            (admitted.id, Recorded::later(), Some(admitted))
        } else {
            (self.record(admitted).await?, Recorded::default(), None)
        };
        let call = CallId::generate();
        let asker = Asker { uid: caller.uid, tool: request.tool.clone() };
        let asked = Asked {
            job,
            call,
            attempt_of: call,
            tool: request.tool,
            arguments: Arguments::Object(request.arguments),
            refusal: None,
            time,
            idempotency_key: call.to_string(),
            watcher: None,
            recorded: recorded.clone(),
        };
        let shared = Arc::clone(&self.inner.shared);
        let asked = match spill::resolve(&shared.ledger, asked).await {
            Ok(asked) => asked,
            Err(error) => {
                self.close(job, Keep::Nothing).await;
                return Err(unreadable(error));
            }
        };
        let sealed = self
            .ended_with_its_caller(asker, job, has_workspace, move |cancel| async move {
                let record = async {
                    let Some(job) = unrecorded else { return Ok(()) };
                    let stored = shared.ledger.insert(job).await;
                    // What could not be recorded does not happen.
                    stored.map(|_| recorded.tell()).inspect_err(|_| cancel.cancel())
                };
                let run = guards::run(&shared.launch, &offer.tools, &offer.guards, asked, cancel.clone());
                let (stored, attempts) = tokio::join!(biased; record, run);
                stored.map_err(unreadable)?;
                attempts.map_err(unlinked)
            })
            .await?;
        let (call, sealed) = sealed;
        let (ok, result, artifacts, error) = match sealed.answered {
            Answered::Success { result, artifacts } => (true, Some(result), artifacts, None),
            Answered::Failure(error) => (false, None, Vec::new(), Some(error)),
        };
        Ok(CallReply {
            version: API_VERSION,
            job_id: job,
            call_id: call,
            ok,
            result,
            artifacts,
            error,
            receipt: sealed.envelope,
        })
    }

    /// Runs one command in a sandbox, with the caller's stdin, stdout and stderr. When `stop` is cancelled or the caller
    /// goes away, it is ended. `said` yields the end of its stderr, once that is read to its end.
    ///
    /// # Errors
    /// When the caller may not do so, or the workspace cannot be had. A command that fails or cannot be started is no error.
    pub async fn exec(
        &self,
        caller: &Caller,
        client: OwnedFd,
        request: ExecRequest,
        stdio: [OwnedFd; 3],
        said: oneshot::Receiver<Vec<u8>>,
        stop: CancellationToken,
    ) -> Result<ExecEnd, Problem> {
        known_version(request.version)?;
        if request.command.is_empty() {
            return Err(Problem::new(Code::InputInvalid, "command is empty"));
        }
        if !(self.inner.offer().permits)(caller, Subject::Adhoc { policy: &request.policy }) {
            let words = format!("commands under policy `{}` are not for this caller", request.policy);
            return Err(Problem::new(Code::NotPermitted, words));
        }
        let has_workspace = request.workspace.is_some();
        let admitted = self.admit(client, JobKind::Exec, request.workspace.clone(), json!(request)).await?;
        let job = self.record(admitted).await?;
        let call = CallId::generate();
        let (time, keep) = (request.timeout_ms.map_or(LONGEST_COMMAND, Duration::from_millis), request.keep);
        let ExecRequest { policy, runtime, command, network, .. } = request;
        let program = Program::Adhoc { policy, runtime, command, network, keep };
        let asker = Asker { uid: caller.uid, tool: JobKind::Exec.as_str().to_owned() };
        let [stdin, stdout, stderr] = stdio;
        let order = Order {
            job,
            call,
            attempt_of: call,
            program: program.clone(),
            stdin: Stdin::Fd(stdin),
            streams: Some((stdout, stderr)),
            time,
            narrow: Narrowing::default(),
            watcher: None,
            recorded: Recorded::default(),
        };
        let dispatcher = self.clone();
        let sealed = self
            .ended_with_its_caller(asker, job, has_workspace, move |cancel| async move {
                let launched = dispatcher.inner.shared.launch.launch(order, cancel.clone());
                tokio::pin!(launched);
                let ended = tokio::select! {
                    ended = launched.as_mut() => ended,
                    () = stop.cancelled() => {
                        cancel.cancel();
                        launched.await
                    }
                };
                let ended = ended.map_err(unlinked)?;
                // One that ended well waits for nothing.
                let said = match ended.outcome.exit_status {
                    Some(0) => Vec::new(),
                    _ => tokio::time::timeout(LAST_WORDS, said).await.ok().and_then(Result::ok).unwrap_or_default(),
                };
                let tools = &dispatcher.inner.offer().tools;
                let said = String::from_utf8_lossy(&said);
                Ok(call::ran_adhoc(tools, (job, call), program, keep, ended, &said).into())
            })
            .await?;
        let (_, sealed) = sealed;
        let (failure, usage) = match sealed.ended {
            Some(ended) => (ended.failure, ended.usage),
            None => (None, toolproto::receipt::Usage::default()),
        };
        Ok(ExecEnd {
            version: API_VERSION,
            job_id: job,
            call_id: call,
            outcome: sealed.outcome,
            failure: failure
                .map(|failed| ExecFailure {
                    code: failed.code,
                    step: failed.step,
                    errno: failed.errno,
                    message: failed.message,
                })
                .or_else(|| {
                    let CallError { code, message, .. } = sealed.withheld?;
                    let step = if sealed.record.unproven { "attestation" } else { "commit" };
                    Some(ExecFailure { code, step: step.to_owned(), errno: None, message })
                }),
            usage,
            receipt: sealed.envelope,
        })
    }

    /// Gets a grant for an implicit job, which is to be recorded next.
    pub(super) async fn admit(
        &self,
        client: OwnedFd,
        kind: JobKind,
        workspace: Option<std::path::PathBuf>,
        request: Value,
    ) -> Result<NewJob, Problem> {
        let shared = &self.inner.shared;
        let job = JobId::generate();
        let choice = workspace.map_or(WorkspaceChoice::None, WorkspaceChoice::Named);
        let limits = SliceLimits::default();
        let admitted = shared.launch.admit(job, client, choice, None, limits).await.map_err(unlinked)?;
        let admission = admitted.map_err(|rejection| Problem::new(rejection.code, rejection.message))?;
        Ok(NewJob {
            id: job,
            kind,
            uid: admission.uid,
            agent: kind.as_str().to_owned(),
            request_digest: Digest::sha256(request.to_string().as_bytes()),
            request,
            idempotency_key: None,
            workspace: admission.workspace,
            priority: 0,
            labels: std::collections::BTreeMap::new(),
            submitted: Timestamp::now(),
        })
    }

    /// Stores a job that has its grant.
    pub(super) async fn record(&self, job: NewJob) -> Result<JobId, Problem> {
        let id = job.id;
        if let Err(error) = self.inner.shared.ledger.insert(job).await {
            self.close(id, Keep::Nothing).await;
            return Err(unreadable(error));
        }
        Ok(id)
    }

    /// Runs a call to its receipt in a task of its own. When the caller goes away, the call is cancelled, and gets its
    /// receipt all the same. Whoever is told of its end finds the workspace free, if it had one; without one nothing of the
    /// job is left that could be waited for.
    pub(super) async fn ended_with_its_caller<F>(
        &self,
        asker: Asker,
        job: JobId,
        has_workspace: bool,
        work: impl FnOnce(CancellationToken) -> F,
    ) -> Result<(CallId, Sealed), Problem>
    where
        F: Future<Output = Result<Attempts, Problem>> + Send + 'static,
    {
        let cancel = self.inner.stop.child_token();
        let leaving = cancel.clone().drop_guard();
        let (dispatcher, work) = (self.clone(), work(cancel));
        let (teller, told) = oneshot::channel();
        self.inner.tasks.spawn(async move {
            let sealed = dispatcher.finish(job, work).await;
            if let Ok((call, sealed)) = &sealed {
                dispatcher.inner.observer.tell(asker.observation(job, *call, sealed));
            }
            let closed = dispatcher.close(job, Keep::Nothing);
            // The caller may have gone.
            let tell = async move { drop(teller.send(sealed)) };
            if has_workspace {
                closed.await;
                tell.await;
            } else {
                // The launcher is asked first, so that it follows whatever the caller asks next after it.
                tokio::join!(biased; closed, tell);
            }
        });
        let lost = |_| Problem::new(Code::InternalLogicError, "the call's task has ended without an answer");
        let sealed = told.await.map_err(lost)?;
        drop(leaving.disarm());
        sealed
    }

    /// Gives each attempt its receipt, and the job its sealing one. The last attempt is the answer.
    async fn finish(
        &self,
        job: JobId,
        work: impl Future<Output = Result<Attempts, Problem>>,
    ) -> Result<(CallId, Sealed), Problem> {
        let shared = &self.inner.shared;
        let Attempts { earlier, last } = work.await?;
        let unsealed = |error: SealError| match error {
            SealError::Link(error) => unlinked(error),
            SealError::Canonical(error) => Problem::new(Code::InternalLogicError, error.to_string()),
            SealError::Envelope(error) => Problem::new(Code::InternalLogicError, error.to_string()),
        };
        let mut chain = ReceiptsHead { count: 0, head: None };
        let mut receipts = Vec::new();
        let mut store = |chain: &mut ReceiptsHead, call: CallId, sealed: &Sealed| {
            *chain = ReceiptsHead { count: chain.count + 1, head: sealed.record.receipt.map(|receipt| receipt.digest) };
            receipts.push(StoredReceipt { sequence: chain.count, call: Some(call), envelope: sealed.envelope.clone() });
        };
        for ran in earlier {
            let call = ran.call();
            let sealed = call::seal(&shared.launch, &shared.origin, chain, ran).await.map_err(unsealed)?;
            store(&mut chain, call, &sealed);
        }
        let call = last.call();
        let last = spill::keep(&shared.ledger, last).await.map_err(unreadable)?;
        let (mut sealed, seal) =
            call::seal_last(&shared.launch, &shared.origin, chain, last).await.map_err(unsealed)?;
        store(&mut chain, call, &sealed);
        receipts.push(StoredReceipt { sequence: chain.count + 1, call: None, envelope: seal });
        let committed = call::committed(&receipts).map_err(|error| unsealed(error.into()))?;
        let stored = shared.ledger.append(job, Vec::new(), receipts, None);
        if committed.is_empty() {
            // Asked for together and in this order, both go to the disk at once.
            let (stored, closed) = tokio::join!(biased; stored, shared.ledger.close(job));
            stored.and(closed).map_err(unreadable)?;
            return Ok((call, sealed));
        }
        stored.await.map_err(unreadable)?;
        for promised in committed {
            match shared.launch.stored(promised.call_id).await.map_err(unlinked)? {
                Application::Done => {}
                Application::Failed(failure) => return Err(Problem::new(failure.code, failure.message)),
                Application::Withdrawn(withdrawal) => {
                    let withdrawn =
                        call::seal_withdrawal(&shared.launch, &shared.origin, chain, &promised, withdrawal).await;
                    let withdrawn = withdrawn.map_err(unsealed)?;
                    let head = ReceiptsHead { count: chain.count + 1, head: Some(withdrawn.receipt.digest) };
                    let seal =
                        call::seal_job(&shared.launch, &shared.origin, job, head, Some(withdrawn.evidence)).await;
                    let envelope = seal.map_err(unsealed)?;
                    let seal = StoredReceipt { sequence: head.count + 1, call: None, envelope };
                    shared.ledger.amend(job, vec![withdrawn.stored(), seal]).await.map_err(unreadable)?;
                    shared.launch.stored(withdrawn.call).await.map_err(unlinked)?;
                    sealed.withdraw(withdrawn);
                }
            }
        }
        shared.ledger.close(job).await.map_err(unreadable)?;
        Ok((call, sealed))
    }
}

/// Who asked for what, for those who watch without taking part.
pub(super) struct Asker {
    pub(super) uid: u32,
    pub(super) tool: String,
}

impl Asker {
    fn observation(self, job: JobId, call: CallId, sealed: &Sealed) -> Observation {
        let usage = sealed.ended.as_ref().map(|ended| ended.usage.clone());
        Observation::Direct { uid: self.uid, job, call, tool: self.tool, code: sealed.outcome.code, usage }
    }
}

pub(super) fn known_version(version: u32) -> Result<(), Problem> {
    if version == API_VERSION {
        return Ok(());
    }
    let words = format!("version {version} is unknown; this agentd reads version {API_VERSION}");
    Err(Problem::new(Code::InputInvalid, words))
}
