//! Launch, Stop, and everything a call goes through until it has ended.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::progress::EVENTS_VARIABLE;
use toolproto::receipt::{Change, Outcome, OutcomeKind, Usage};

use super::{Parts, Service};
use crate::config::WhenBusy;
use crate::host::{Host, Mechanism};
use crate::launch::{self, Stdio};
use crate::launcher::calls::{Call, Handover, Output, Passed};
use crate::launcher::capture::{Stderr, Stdout};
use crate::launcher::grants::{Asked, Phase, Workspace, worker_failure};
use crate::launcher::program::{self, Resolved, Sight, failure};
use crate::launcher::staging_place::CallNote;
use crate::launcher::warm::Order;
use crate::netns::{self, Sockets};
use crate::plan::{Inputs, Plan, View};
use crate::policy::Policy;
use crate::protocol::{FromLauncher, LaunchFailure, Narrowing, Program};
use crate::workspace::Owner;
use crate::workspace::staging::StagingError;
use crate::workspace::view;
use crate::workspace::worker::LockKind;

impl Service {
    pub(super) fn launch(
        &mut self,
        job: JobId,
        (id, attempt_of): (CallId, CallId),
        program: &Program,
        time_ms: u64,
        narrow: &Narrowing,
        (mut descriptors, is_gated): (Vec<OwnedFd>, bool),
    ) {
        let now = Instant::now();
        if !self.grants.contains_key(&job) {
            return self.tell_ungranted(id);
        }
        let is_new = !self.calls.contains_key(&id);
        let grant =
            self.grants.get(&job).filter(|grant| is_new && grant.phase == Phase::Live && !grant.chain.has_sealed(id));
        let Some(grant) = grant else {
            return self.misuse("the job has no live grant, or the call is known already", Some(job), Some(id));
        };
        let gate = if is_gated { descriptors.pop() } else { None };
        let mut descriptors = descriptors.into_iter();
        let passed = match (descriptors.next(), descriptors.next(), descriptors.next(), descriptors.next()) {
            (Some(stdin), events, None, None) => (stdin, Passed::Events(events)),
            (Some(stdin), Some(stdout), Some(stderr), None) => (stdin, Passed::Streams(stdout, stderr)),
            _ => {
                let message = "Launch carries stdin, stdin and where progress goes, or all three streams";
                return self.misuse(message, Some(job), Some(id));
            }
        };
        let (has_workspace, holder) = (grant.workspace.is_some(), grant.holder());
        if let Program::Rollback { target } = program {
            let identity = program::identify(&self.parts.catalog, program);
            let deadline = now + Duration::from_millis(time_ms.min(LONGEST_MS));
            let mut call = Call::ordered((job, id), identity, Output::Captured(None), deadline);
            call.sight = Sight::Overlay;
            call.rollback = Some(*target);
            self.calls.insert(id, call);
            return self.hold(id, now);
        }
        let confirmed = program::confirm(&mut self.parts.catalog, program, now);
        let resolved = program::resolve(
            (&self.parts.catalog, &self.parts.config, &self.parts.access, &self.parts.secrets),
            program,
            narrow,
            &grant.limits,
            &grant.peer,
        );
        let identity = program::identify(&self.parts.catalog, program);
        let output = match &passed.1 {
            Passed::Streams(..) => Output::Streams,
            Passed::Events(_) => Output::Captured(None),
        };
        let deadline = now + Duration::from_millis(time_ms.min(LONGEST_MS));
        let mut call = Call::ordered((job, id), identity, output, deadline);
        (call.stdio, call.gate) = (Some(passed), gate);
        call.attempt_of = attempt_of;
        let resolved = confirmed.and(resolved).and_then(|resolved| {
            call.sight = if has_workspace { resolved.sight } else { Sight::Nothing };
            self.has_room_for(&call)?;
            if let Program::Tool { name } = program
                && resolved.prewarm > 0
            {
                call.ahead = Some(Order {
                    holder,
                    tool: name.clone(),
                    narrow: narrow.clone(),
                    sees_workspace: call.sight != Sight::Nothing,
                    is_watched: matches!(call.stdio, Some((_, Passed::Events(Some(_))))),
                });
            }
            Ok(resolved)
        });
        match resolved {
            Ok(resolved) => {
                let needs_reading = call.sight != Sight::Nothing;
                call.resolved = Some(Rc::new(resolved));
                self.calls.insert(id, call);
                if needs_reading { self.hold(id, now) } else { self.start(id) }
            }
            Err(failure) => {
                self.calls.insert(id, call);
                self.fail(id, failure);
            }
        }
    }

    /// The grant that a launch did not wait for was refused.
    fn tell_ungranted(&mut self, call: CallId) {
        let failure = failure(Code::NotPermitted, "the job has no grant".to_owned());
        let kind = OutcomeKind::LaunchFailed;
        let message = FromLauncher::Ended {
            call,
            outcome: Outcome { kind, code: Some(failure.code), exit_status: None, signal: None },
            failure: Some(failure),
            stdout_overflowed: false,
            usage: Usage::default(),
            denied: Vec::new(),
        };
        self.tell(&message, Vec::new());
    }

    /// Whether a call may run beside those that are there.
    pub(super) fn has_room_for(&self, call: &Call) -> Result<(), LaunchFailure> {
        let running = self.calls.values().filter(|other| other.record().is_none()).count();
        let most = self.parts.config.limits.running_calls;
        if u32::try_from(running).unwrap_or(u32::MAX) >= most {
            let message = format!("{most} calls are running already ([limits] running_calls)");
            return Err(failure(Code::Overloaded, message));
        }
        // What a call changed is told by the trees before and after it, so nobody else may have the workspace meanwhile.
        let writes = |sight| matches!(sight, Sight::Direct | Sight::Overlay);
        let shares =
            // What an ended call has in its layer changes nothing until it is wanted.
            |other: &&Call| {
                let lies_in_layer = other.layer.is_some() && other.record().is_some();
                other.job == call.job && other.sight != Sight::Nothing && other.workspace.is_none() && !lies_in_layer
            };
        let is_shared = self
            .calls
            .values()
            .filter(shares)
            .any(|other| writes(call.sight) || (call.sight == Sight::ReadOnly && writes(other.sight)));
        if is_shared {
            let message = "another call of the job is changing the workspace, or would see it change".to_owned();
            return Err(failure(Code::WorkspaceBusy, message));
        }
        Ok(())
    }

    /// Holds the workspace for a call, and reads it.
    pub(super) fn hold(&mut self, id: CallId, now: Instant) {
        let Some((job, sight)) = self.calls.get(&id).map(|call| (call.job, call.sight)) else { return };
        let workspace = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut());
        let Some(workspace) = workspace else { return self.fail(id, no_workspace()) };
        let kind = if sight == Sight::ReadOnly { LockKind::Shared } else { LockKind::Exclusive };
        if workspace.held == Some(LockKind::Exclusive) || workspace.held == Some(kind) {
            return self.read_before(job, id, now);
        }
        if let Err(error) = workspace.ask(Asked::Lock(id, kind), now) {
            let (code, message) = worker_failure(&error);
            self.fail(id, failure(code, message));
        }
    }

    /// Another job holds the workspace.
    pub(super) fn busy(&mut self, job: JobId, id: CallId) {
        let is_refused = self.parts.config.workspace.busy == WhenBusy::Refuse;
        let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) else { return };
        workspace.held = None;
        if is_refused {
            return self.fail(id, failure(Code::WorkspaceBusy, BUSY.to_owned()));
        }
        workspace.waiting.push(id);
        workspace.ask_again = Some(Instant::now() + ASK_AGAIN);
        if let Some(call) = self.calls.get_mut(&id)
            && !mem::replace(&mut call.is_held_up, true)
        {
            tracing::info!(%job, call = %id, "a call waits for its workspace, which another job holds");
        }
    }

    /// Calls that wait for their workspace ask for it again.
    pub(super) fn ask_again(&mut self, now: Instant) {
        let mut waiting = Vec::new();
        for workspace in self.grants.values_mut().filter_map(|grant| grant.workspace.as_mut()) {
            if workspace.ask_again.is_some_and(|due| due <= now) {
                workspace.ask_again = None;
                waiting.append(&mut workspace.waiting);
            }
        }
        for id in waiting {
            if self.calls.get(&id).is_some_and(|call| call.is_awaiting_workspace()) {
                self.hold(id, now);
            }
        }
    }

    /// A job that only reads gives the workspace back with the last call that does.
    pub(super) fn let_go(&mut self, job: JobId) {
        let reads = |call: &Call| call.job == job && call.sight != Sight::Nothing && call.record().is_none();
        if self.calls.values().any(reads) {
            return;
        }
        let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) else { return };
        if workspace.held == Some(LockKind::Shared) && workspace.ask(Asked::Unlock, Instant::now()).is_ok() {
            workspace.held = None;
        }
    }

    fn read_before(&mut self, job: JobId, id: CallId, now: Instant) {
        if let Some(call) = self.calls.get_mut(&id) {
            call.is_held_up = false;
        }
        let workspace = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut());
        let Some(workspace) = workspace else { return self.fail(id, no_workspace()) };
        // What everybody has done until now must be known, where what differs afterwards is the call's, or nothing is compared.
        let all = self.calls.get(&id).is_some_and(|call| call.sight == Sight::Direct || call.rollback.is_some());
        let asked = if all { Asked::WholeBefore(id) } else { Asked::Before(id) };
        if let Err(error) = workspace.ask(asked, now) {
            let (code, message) = worker_failure(&error);
            self.fail(id, failure(code, message));
        }
    }

    /// The tree before is known: the call can start, unless it has been stopped meanwhile.
    pub(super) fn start_over(&mut self, id: CallId, before: Digest, unattributed: Vec<Change>) {
        if let Some(call) = self.calls.get_mut(&id)
            && call.is_awaiting_workspace()
        {
            call.before = Some(before);
            call.unattributed = unattributed;
            match call.rollback {
                Some(target) => self.foresee(id, target),
                None => self.start(id),
            }
        }
    }

    pub(super) fn start(&mut self, id: CallId) {
        if let Err(failure) = self.try_start(id) {
            self.fail(id, failure);
        }
    }

    fn try_start(&mut self, id: CallId) -> Result<(), LaunchFailure> {
        if let Some(warm) = self.take_warm(id) {
            return self.serve(id, warm);
        }
        let Some(call) = self.calls.get_mut(&id) else { return Ok(()) };
        let uid = self
            .uids
            .take()
            .ok_or_else(|| failure(Code::Overloaded, "every uid of [uids] sandboxes is in use".to_owned()))?;
        call.sandbox_uid = Some(uid);
        let view = self.view(id, uid)?;
        self.start_with(id, view, uid)
    }

    /// The workspace as a call sees it.
    pub(super) fn view(&mut self, id: CallId, uid: u32) -> Result<View, LaunchFailure> {
        let Some(call) = self.calls.get_mut(&id) else { return Ok(View::Empty) };
        let Some(grant) = self.grants.get_mut(&call.job) else { return Ok(View::Empty) };
        let owner = grant.owner();
        if call.sight == Sight::Overlay
            && let Some(workspace) = grant.workspace.as_mut()
        {
            return layered_view(workspace, (call.job, call.id, &mut call.layer), owner, uid).map(View::Tree);
        }
        let directory = grant.workspace.as_ref().and_then(|workspace| workspace.directory.as_ref());
        match (call.sight, directory) {
            (Sight::Nothing | Sight::Overlay, _) | (_, None) => Ok(View::Empty),
            (Sight::ReadOnly, Some(dir)) => {
                view::read_only(dir.as_fd(), owner, uid).map(View::Tree).map_err(|error| step("view", &error))
            }
            (Sight::Direct, Some(dir)) => {
                view::direct(dir.as_fd(), owner, uid).map(View::Tree).map_err(|error| step("view", &error))
            }
        }
    }

    /// Starts the sandbox of a call that has its view and its uid.
    fn start_with(&mut self, id: CallId, view: View, uid: u32) -> Result<(), LaunchFailure> {
        let Some(call) = self.calls.get_mut(&id) else { return Ok(()) };
        let (job, Some(resolved)) = (call.job, call.resolved.clone()) else { return Ok(()) };
        let Some(user) = self.grants.get(&job).map(|grant| grant.peer.uid) else { return Ok(()) };
        let events = match &call.stdio {
            Some((_, Passed::Events(events))) => events.as_ref(),
            _ => None,
        };
        let (network, sockets) = made_network(&self.parts.host, &resolved)?.unzip();
        let mut plan = planned(&self.parts, (&resolved, events), (user, uid), view, network)?;
        self.provide(&mut plan);
        let (Some(call), Some(grant)) = (self.calls.get_mut(&id), self.grants.get_mut(&job)) else { return Ok(()) };
        call.enforced = mem::take(&mut plan.enforced);
        call.not_enforced = mem::take(&mut plan.not_enforced);
        let leaf = match &self.parts.tree {
            Some(tree) => {
                let name = format!("call-{}", grant.chain.next_launch());
                let slice = grant.slice(tree).map_err(|error| step("cgroup", &error))?;
                Some(slice.leaf(&name, &resolved.limits).map_err(|error| step("cgroup", &error))?)
            }
            None => None,
        };
        let Some((stdin, passed)) = call.stdio.take() else { return Ok(()) };
        let gate = call.gate.as_ref().map(OwnedFd::try_clone).transpose().map_err(|error| step("gate", &error))?;
        let (stdout, stderr, events) = match passed {
            Passed::Streams(stdout, stderr) => (stdout, stderr, None),
            Passed::Events(events) => {
                let (output, (stdout, stderr)) = captured_output(&resolved, uid)?;
                call.output = Output::Captured(Some(output));
                (stdout, stderr, events)
            }
        };
        self.note_start(id)?;
        // Before the sandbox is born, so that it inherits none of the sockets.
        if let Some(sockets) = sockets {
            self.tell_network(id, &resolved, sockets);
        }
        let running = launch::start(plan, Stdio { stdin, stdout, stderr, events, gate }, leaf)?;
        if let Some(call) = self.calls.get_mut(&id) {
            call.start(running, Instant::now());
        }
        Ok(())
    }

    /// Gives a sandbox to be what others have left, or what was made ahead.
    pub(super) fn provide(&mut self, plan: &mut Plan) {
        self.frames.provide(plan);
        if plan.makes_bare_network()
            && let Some(bare) = self.networks.take(plan.user(), Instant::now())
        {
            plan.enter_network(bare);
        }
    }

    /// Hands the sockets of a call's network to agentd.
    pub(super) fn tell_network(&mut self, call: CallId, resolved: &Resolved, sockets: Sockets) {
        let policy = self.parts.catalog.policies.get(&resolved.policy);
        let message = FromLauncher::Network {
            call,
            policy: resolved.policy.clone(),
            passages: resolved.passages.clone(),
            // A policy that was taken away lets nobody out.
            ceiling: policy.map(Policy::ceiling).unwrap_or_default(),
        };
        self.tell(&message, sockets.into_list());
    }

    pub(super) fn stop(&mut self, id: CallId) {
        // A call that has just ended, or was never there, needs no stopping.
        if let Some(call) = self.calls.get_mut(&id) {
            call.stop();
            self.look_at_call(id);
        }
    }

    /// Looks at a call and does what has become due.
    pub(super) fn look_at_call(&mut self, id: CallId) {
        let now = Instant::now();
        let grace = self.parts.config.timeouts.grace;
        let Some(call) = self.calls.get_mut(&id) else { return };
        if call.is_awaiting_workspace() {
            if call.must_end(now) {
                // What the workspace is waited for, is waited for no longer than the call could run.
                if call.has_waited_in_vain() {
                    self.fail(id, failure(Code::WorkspaceBusy, BUSY.to_owned()));
                } else {
                    self.ended(id, None);
                }
            }
            return;
        }
        let progress = call.advance(now, grace);
        let is_lost = call.has_lost_its_process();
        if progress.has_started {
            let message = FromLauncher::Started { call: id, not_enforced: call.not_enforced.clone() };
            let handover = call.handover.take();
            if handover.is_some() {
                // What came with the order goes unused: agentd is given the ends of what the process has already.
                call.stdio = None;
            }
            self.tell(&message, Vec::new());
            if let Some(Handover { stdin, events }) = handover {
                self.tell(&FromLauncher::Handover { call: id }, [stdin].into_iter().chain(events).collect());
            }
        }
        match progress.end {
            Some(end) if is_lost && !self.is_cut_off => self.start_again(id, end),
            Some(end) => self.ended(id, Some(end)),
            None => {}
        }
        if let Some(left) = progress.left {
            self.left(id, left);
        }
    }
}

/// The plan of a sandbox for what was resolved, with the descriptor of its progress.
pub(super) fn planned(
    parts: &Parts,
    (resolved, events): (&Resolved, Option<&OwnedFd>),
    (user, uid): (u32, u32),
    view: View,
    network: Option<netns::Furnished>,
) -> Result<Plan, LaunchFailure> {
    // The sandbox's processes are forked: the number is theirs, too.
    let events = events.map(|events| (EVENTS_VARIABLE.into(), events.as_raw_fd().to_string().into()));
    let environment: Vec<_> = resolved.environment.iter().cloned().chain(events).collect();
    let policy = parts.catalog.policies.get(&resolved.policy);
    let policy = policy.ok_or_else(|| failure(Code::PolicyUnknown, "the policy was taken away".to_owned()))?;
    Plan::build(
        &parts.host,
        &parts.listings,
        Inputs {
            policy,
            command: &resolved.command,
            env: &environment,
            tool_folder: resolved.folder.as_deref(),
            runtime_mounts: &resolved.mounts,
            user,
            sandbox_id: uid,
            view,
            place: resolved.place,
            workspace_read_only: resolved.sight == Sight::ReadOnly,
            limits: resolved.limits.clone(),
            network,
        },
    )
}

/// Where a tool's output goes: the launcher's ends of stdout and stderr, and the tool's.
type Captured = ((Stdout, Stderr), (OwnedFd, OwnedFd));

pub(super) fn captured_output(resolved: &Resolved, uid: u32) -> Result<Captured, LaunchFailure> {
    let io = |error: io::Error| step("output", &error);
    let (stdout, stdout_writer) = Stdout::with_cap(resolved.max_response.0).map_err(io)?;
    let (stderr, stderr_writer) = Stderr::for_sandbox(uid).map_err(io)?;
    Ok(((stdout, stderr), (stdout_writer, stderr_writer)))
}

/// The network of a call with listed hosts.
pub(super) fn made_network(
    host: &Host,
    resolved: &Resolved,
) -> Result<Option<(netns::Furnished, Sockets)>, LaunchFailure> {
    if resolved.passages.is_empty() {
        return Ok(None);
    }
    if let Some(reason) = host.missing(Mechanism::Egress) {
        let message = format!("this host cannot let a call out to listed hosts: {reason}");
        return Err(failure(Code::PolicyUnenforceable, message));
    }
    netns::furnish(&resolved.passages).map(Some).map_err(|error| step("network", &error))
}

/// A view with a fresh layer; the layer's number becomes the call's.
fn layered_view(
    workspace: &mut Workspace,
    (job, call, number): (JobId, CallId, &mut Option<u64>),
    owner: Owner,
    uid: u32,
) -> Result<OwnedFd, LaunchFailure> {
    let (Some(staging), Some(dir)) = (&workspace.staging, &workspace.directory) else {
        let message = "no staging directory lies on the workspace's mount; name one in [workspace] staging, or use a \
                       policy that writes directly";
        return Err(failure(Code::PolicyUnenforceable, message.to_owned()));
    };
    let made = |error: &StagingError| step("layer", error);
    let layer = staging.next_number().map_err(|error| made(&error))?;
    workspace.layers.push(layer);
    let paths = staging.make_layer(layer, dir.as_fd()).map_err(|error| made(&error))?;
    let note = serde_json::to_vec(&CallNote { job, call, bytes: 0 }).map_err(|error| step("layer", &error))?;
    staging.note_call(layer, &note).map_err(|error| made(&error))?;
    *number = Some(layer);
    view::overlay(dir.as_fd(), staging.dir(), &paths, owner, uid).map_err(|error| step("view", &error))
}

/// How soon a workspace is asked for again that another job holds.
const ASK_AGAIN: Duration = Duration::from_millis(40);
/// What a call is told whose workspace another job holds.
const BUSY: &str = "another job holds the workspace: one that changes it has it alone until it ends";
/// A call that was to see a workspace is not started without one: what it did could not be said.
fn no_workspace() -> LaunchFailure {
    failure(Code::WorkspaceUnavailable, "the job has no workspace".to_owned())
}

/// A day is longer than any call; more would only overflow.
pub(super) const LONGEST_MS: u64 = 24 * 3600 * 1000;

pub(super) fn step(step: &str, error: &dyn std::error::Error) -> LaunchFailure {
    let mut message = error.to_string();
    let mut source = error.source();
    let mut errno = None;
    while let Some(error) = source {
        message = format!("{message}: {error}");
        errno = errno.or_else(|| error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error));
        source = error.source();
    }
    LaunchFailure { code: Code::LaunchFailed, step: step.to_owned(), errno, message }
}
