//! Direct calls and commands: implicit jobs of one call, without a loop.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
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

use super::{Dispatcher, lost, rejected, unlinked, unreadable};
use crate::call::{self, Answered, Asked, SealError, Sealed};
use crate::caller::Caller;
use crate::guards::{self, Attempts};
use crate::launch::{Keep, Launch, Order, Recorded, Stdin};
use crate::ledger::{JobKind, NewJob, StoredReceipt};
use crate::model::transcript::Arguments;
use crate::observe::Observation;
use crate::runner::Shared;
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
        let wish = Wish {
            client,
            kind: JobKind::Call,
            uid: caller.uid,
            tool: request.tool.clone(),
            workspace: request.workspace.clone(),
            request: json!(request),
        };
        let shared = Arc::clone(&self.inner.shared);
        let Done { job, call, sealed } = self
            .ended_with_its_caller(wish, move |job, recorded, cancel| async move {
                let call = CallId::generate();
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
                    recorded,
                };
                let asked = spill::resolve(&shared.ledger, asked).await.map_err(unreadable)?;
                guards::run(&shared.launch, &offer.tools, &offer.guards, asked, cancel).await.map_err(unlinked)
            })
            .await?;
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
        let wish = Wish {
            client,
            kind: JobKind::Exec,
            uid: caller.uid,
            tool: JobKind::Exec.as_str().to_owned(),
            workspace: request.workspace.clone(),
            request: json!(request),
        };
        let (time, keep) = (request.timeout_ms.map_or(LONGEST_COMMAND, Duration::from_millis), request.keep);
        let ExecRequest { policy, runtime, command, network, .. } = request;
        let program = Program::Adhoc { policy, runtime, command, network, keep };
        let [stdin, stdout, stderr] = stdio;
        let dispatcher = self.clone();
        let Done { job, call, sealed } = self
            .ended_with_its_caller(wish, move |job, recorded, cancel| async move {
                let call = CallId::generate();
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
                    recorded,
                };
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

    /// Gets a grant for an implicit job, does its work, gives it its receipts and closes it, all in a task of its own. When the
    /// caller goes away, the work is cancelled, and gets its receipt all the same. Whoever is told of its end finds the workspace
    /// free, if it had one.
    pub(super) async fn ended_with_its_caller<F>(
        &self,
        wish: Wish,
        work: impl FnOnce(JobId, Recorded, CancellationToken) -> F + Send + 'static,
    ) -> Result<Done, Problem>
    where
        F: Future<Output = Result<Attempts, Problem>> + Send + 'static,
    {
        let cancel = self.inner.stop.child_token();
        let leaving = cancel.clone().drop_guard();
        let dispatcher = self.clone();
        let (teller, told) = oneshot::channel();
        self.inner.tasks.spawn(async move {
            let (job, recorded) = (JobId::generate(), Recorded::later());
            let (uid, tool, has_workspace) = (wish.uid, wish.tool.clone(), wish.workspace.is_some());
            let work = work(job, recorded.clone(), cancel.clone());
            let work = dispatcher.begin_with(job, wish, recorded, cancel, work);
            let done = dispatcher.finish(job, work).await;
            let observation = done.as_ref().ok().map(|done| done.observation(uid, tool));
            // The caller may have gone.
            let tell = |done| drop(teller.send(done));
            if has_workspace {
                dispatcher.close(job, Keep::Nothing).await;
                tell(done);
            } else {
                tell(done);
                // Nothing of the job is left that could be waited for: the answer is written first.
                tokio::task::yield_now().await;
                dispatcher.close(job, Keep::Nothing).await;
            }
            observation.into_iter().for_each(|observation| dispatcher.inner.observer.tell(observation));
        });
        let done = told.await.map_err(|_| lost())?;
        drop(leaving.disarm());
        done
    }

    /// Does an implicit job's work while the job gets its grant and its place in the ledger. No program is executed, and none that
    /// is there told what to do, before it has both; what goes on meanwhile are preparations. The opening of a workspace is
    /// waited for.
    async fn begin_with(
        &self,
        job: JobId,
        wish: Wish,
        recorded: Recorded,
        cancel: CancellationToken,
        work: impl Future<Output = Result<Attempts, Problem>>,
    ) -> Result<Attempts, Problem> {
        let Wish { client, kind, uid, workspace, request, .. } = wish;
        let Shared { launch, ledger, .. } = &*self.inner.shared;
        let choice = workspace.map_or(WorkspaceChoice::None, WorkspaceChoice::Named);
        let has_workspace = matches!(choice, WorkspaceChoice::Named(_));
        let admit = launch.admit(job, client, choice, None, SliceLimits::default());
        let admit = async { admit.await.map_err(unlinked)?.map_err(rejected) };
        let (workspace, admit) = if has_workspace { (admit.await?.workspace, None) } else { (None, Some(admit)) };
        let entry = NewJob {
            id: job,
            kind,
            uid,
            agent: kind.as_str().to_owned(),
            request_digest: Digest::sha256(request.to_string().as_bytes()),
            request,
            idempotency_key: None,
            workspace,
            priority: 0,
            labels: std::collections::BTreeMap::new(),
            submitted: Timestamp::now(),
        };
        let begin = async {
            let admit = async { if let Some(admit) = admit { admit.await.map(drop) } else { Ok(()) } };
            let insert = async { ledger.insert(entry).await.map(drop).map_err(unreadable) };
            // The disk takes longest.
            let begun = match tokio::join!(biased; insert, admit) {
                (Ok(()), Err(refused)) => ledger.forget(job).await.map_err(unreadable).and(Err(refused)),
                (stored, admitted) => admitted.and(stored),
            };
            // What could not be begun does not happen.
            begun.map(|()| recorded.tell()).inspect_err(|_| cancel.cancel())
        };
        // The launcher is asked for the grant first.
        let (begun, attempts) = tokio::join!(biased; begin, work);
        begun.and(attempts)
    }

    /// Gives each attempt its receipt, and the job its sealing one. The last attempt is the answer.
    async fn finish(&self, job: JobId, work: impl Future<Output = Result<Attempts, Problem>>) -> Result<Done, Problem> {
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
            receipts.push(sealed.stored(call, chain.count));
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
        receipts.push(StoredReceipt { sequence: chain.count + 1, call: None, envelope: seal, is_promise: false });
        let committed = call::committed(&receipts).map_err(|error| unsealed(error.into()))?;
        let stored = shared.ledger.append(job, Vec::new(), receipts, None);
        if committed.is_empty() {
            // Asked for together and in this order, both go to the disk at once.
            let (stored, closed) = tokio::join!(biased; stored, shared.ledger.close(job));
            stored.and(closed).map_err(unreadable)?;
            return Ok(Done { job, call, sealed });
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
                    let seal = StoredReceipt { sequence: head.count + 1, call: None, envelope, is_promise: false };
                    shared.ledger.amend(job, vec![withdrawn.stored(), seal]).await.map_err(unreadable)?;
                    shared.launch.stored(withdrawn.call).await.map_err(unlinked)?;
                    sealed.withdraw(withdrawn);
                }
            }
        }
        shared.ledger.close(job).await.map_err(unreadable)?;
        Ok(Done { job, call, sealed })
    }
}

/// Who wants an implicit job, and which.
pub(super) struct Wish {
    /// The caller's accepted socket.
    pub(super) client: OwnedFd,
    pub(super) kind: JobKind,
    pub(super) uid: u32,
    /// What those who watch are told that was asked for.
    pub(super) tool: String,
    pub(super) workspace: Option<PathBuf>,
    pub(super) request: Value,
}

/// An implicit job that has ended, with its last attempt.
pub(super) struct Done {
    pub(super) job: JobId,
    pub(super) call: CallId,
    pub(super) sealed: Sealed,
}

impl Done {
    /// What those are told who watch without taking part.
    fn observation(&self, uid: u32, tool: String) -> Observation {
        let usage = self.sealed.ended.as_ref().map(|ended| ended.usage.clone());
        Observation::Direct { uid, job: self.job, call: self.call, tool, code: self.sealed.outcome.code, usage }
    }
}

pub(super) fn known_version(version: u32) -> Result<(), Problem> {
    if version == API_VERSION {
        return Ok(());
    }
    let words = format!("version {version} is unknown; this agentd reads version {API_VERSION}");
    Err(Problem::new(Code::InputInvalid, words))
}
