//! Starting processes ahead of their calls, and having calls served by them.

use std::mem;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::pipe::{PipeFlags, pipe_with};
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};

use super::Service;
use super::launching::{captured_output, made_network, planned, step};
use crate::cgroup::{CgroupError, Leaf};
use crate::launch::{self, Stdio};
use crate::launcher::calls::{End, Handover, Output};
use crate::launcher::grants::{Grant, Phase};
use crate::launcher::program::{self, Resolved, Sight, failure};
use crate::launcher::warm::{Gone, Holder, Lost, Order, State, Warm, Warming};
use crate::plan::View;
use crate::protocol::{LaunchFailure, Narrowing, Program};

impl Service {
    /// A job begins, and may call this tool.
    pub(super) fn warm(&mut self, job: JobId, tool: String, narrow: Narrowing) {
        let Some(grant) = self.grants.get(&job) else {
            return self.misuse("the job has no grant", Some(job), None);
        };
        let has_workspace = grant.workspace.is_some();
        let order = Order { holder: grant.holder(), tool, narrow, sees_workspace: has_workspace, is_watched: true };
        self.keep_warm(job, order);
    }

    /// Starts as many processes ahead as an order wants and there are not.
    fn keep_warm(&mut self, job: JobId, order: Order) {
        if let Some(warming) = self.resolve_order(job, order) {
            self.follow_order(&warming);
        }
    }

    /// What a job's ended calls leave to be started ahead. Not at once: the launcher does one thing at a time, and an ended call
    /// still waits for its evidence and its signature.
    pub(super) fn take_orders(&mut self, job: JobId) -> Vec<Warming> {
        let orders = self.grants.get_mut(&job).map(|grant| mem::take(&mut grant.orders)).unwrap_or_default();
        orders.into_iter().filter_map(|order| self.resolve_order(job, order)).collect()
    }

    /// What an order asks for, while its job lives.
    fn resolve_order(&mut self, job: JobId, mut order: Order) -> Option<Warming> {
        let grant = self.grants.get(&job).filter(|grant| grant.phase == Phase::Live && !self.is_cut_off)?;
        let program = Program::Tool { name: order.tool.clone() };
        let confirmed = program::confirm(&mut self.parts.catalog, &program, Instant::now());
        let parts = &self.parts;
        let resolved = program::resolve(
            (&parts.catalog, &parts.config, &parts.access, &parts.secrets),
            &program,
            &order.narrow,
            &grant.limits,
            &grant.peer,
        );
        let resolved = confirmed
            .and(resolved)
            // Its calls say so.
            .inspect_err(|failure| tracing::debug!(tool = order.tool, failure.message, "nothing is started ahead"))
            .ok()?;
        order.sees_workspace &= resolved.sight != Sight::Nothing;
        Some(Warming { order, resolved })
    }

    /// Starts all that is missing of an order.
    pub(super) fn follow_order(&mut self, warming: &Warming) {
        while self.start_missing(warming) {}
    }

    /// Starts one process for a postponed order, if one is due. One only: whoever asks for something meanwhile goes first.
    pub(super) fn follow_postponed(&mut self, now: Instant) {
        let Some(warming) = self.waiting.due_order(self.is_at_work(), now).cloned() else { return };
        if !self.start_missing(&warming) {
            self.waiting.drop_first_order();
            self.remove_idle_slices();
        }
    }

    /// Whether somebody waits for a call, or for what is still to be done about it.
    pub(super) fn is_at_work(&self) -> bool {
        let is_open = |grant: &Grant| !grant.is_kept && grant.phase != Phase::Closing;
        !self.calls.is_empty() || self.grants.values().any(is_open)
    }

    /// Starts one process that is missing of an order. Yields whether it did.
    fn start_missing(&mut self, Warming { order, resolved }: &Warming) -> bool {
        let now = Instant::now();
        let most = self.parts.config.limits.warm_processes;
        if self.waiting.missing(order, resolved.prewarm, most, now) == 0 {
            return false;
        }
        let started = self.start_ahead(order, resolved, now);
        if let Err(failure) = &started {
            tracing::warn!(tool = order.tool, step = failure.step, failure.message, "no process is started ahead");
            self.waiting.set_back(order, now);
        }
        started.is_ok()
    }

    fn start_ahead(&mut self, order: &Order, resolved: &Resolved, now: Instant) -> Result<(), LaunchFailure> {
        let uid = self
            .uids
            .take()
            .ok_or_else(|| failure(Code::Overloaded, "every uid of [uids] sandboxes is in use".to_owned()))?;
        match self.started_ahead(order, resolved, uid, now) {
            Ok(warm) => {
                self.waiting.add(warm);
                Ok(())
            }
            Err(failure) => {
                self.uids.give_back(uid);
                Err(failure)
            }
        }
    }

    fn started_ahead(
        &mut self,
        order: &Order,
        resolved: &Resolved,
        uid: u32,
        now: Instant,
    ) -> Result<Warm, LaunchFailure> {
        let pipe =
            |flags| pipe_with(PipeFlags::CLOEXEC | flags).map_err(|errno| step("output", &std::io::Error::from(errno)));
        let (stdin_of_tool, stdin) = pipe(PipeFlags::empty())?;
        // The tool's end does not block: nobody reads before the call.
        let events = order.is_watched.then(|| pipe(PipeFlags::NONBLOCK)).transpose()?;
        let (events, events_of_tool) = events.unzip();
        let user = match order.holder {
            Holder::DirectCalls(user) => Some(user),
            Holder::Job(job) => self.grants.get(&job).map(|grant| grant.peer.uid),
        };
        let user = user.ok_or_else(|| failure(Code::InternalLogicError, "the job has ended".to_owned()))?;
        let (network, sockets) = made_network(&self.parts.host, resolved)?.unzip();
        let view = if order.sees_workspace { View::Later } else { View::Empty };
        let mut plan = planned(&self.parts, (resolved, events_of_tool.as_ref()), (user, uid), view, network)?;
        self.provide(&mut plan);
        let (enforced, not_enforced) = (mem::take(&mut plan.enforced), mem::take(&mut plan.not_enforced));
        let guarded = plan.guarded().to_vec();
        let leaf = self.leaf_ahead(order.holder, resolved)?;
        let (output, (stdout, stderr)) = captured_output(resolved, uid)?;
        let stdio = Stdio { stdin: stdin_of_tool, stdout, stderr, events: events_of_tool, gate: None };
        let running = launch::start(plan, stdio, leaf)?;
        Ok(Warm {
            order: order.clone(),
            resolved: resolved.clone(),
            running,
            uid,
            stdin,
            events,
            output,
            sockets,
            enforced,
            not_enforced,
            guarded,
            state: State::starting(now),
        })
    }

    fn leaf_ahead(&mut self, holder: Holder, resolved: &Resolved) -> Result<Option<Leaf>, LaunchFailure> {
        let Some(tree) = &self.parts.tree else { return Ok(None) };
        let name = format!("warm-{}", self.waiting.next_number());
        let made = |error: CgroupError| step("cgroup", &error);
        let slice = match holder {
            Holder::Job(job) => match self.grants.get_mut(&job) {
                Some(grant) => grant.slice(tree).map_err(made)?,
                None => return Ok(None),
            },
            Holder::DirectCalls(uid) => self.waiting.slice_of(uid, tree).map_err(made)?,
        };
        slice.leaf(&name, &resolved.limits).map(Some).map_err(made)
    }

    /// A process that was started ahead for calls like this one.
    pub(super) fn take_warm(&mut self, id: CallId) -> Option<Warm> {
        let call = self.calls.get(&id)?;
        self.waiting.take(call.ahead.as_ref()?, call.resolved.as_ref()?, Instant::now())
    }

    /// Has a call served by a process that was started ahead.
    pub(super) fn serve(&mut self, id: CallId, mut warm: Warm) -> Result<(), LaunchFailure> {
        let now = Instant::now();
        // It runs already, and may write as soon as it is brought the workspace.
        let attached = self.note_start(id).and_then(|()| self.view(id, warm.uid)).and_then(|view| {
            let tree = match &view {
                View::Tree(tree) => Some((tree.as_fd(), warm.guarded.as_slice())),
                View::Empty | View::Later => None,
            };
            warm.running.serve(tree)
        });
        if let Err(failure) = attached {
            self.waiting.end(warm, now);
            return Err(failure);
        }
        let Some(call) = self.calls.get_mut(&id) else {
            self.waiting.end(warm, now);
            return Ok(());
        };
        let Warm { resolved, running, uid, stdin, events, output, sockets, enforced, not_enforced, .. } = warm;
        call.handover = Some(Handover { stdin, events });
        call.sandbox_uid = Some(uid);
        call.output = Output::Captured(Some(output));
        (call.enforced, call.not_enforced) = (enforced, not_enforced);
        call.start(running, now);
        if let Some(sockets) = sockets {
            self.tell_network(id, &resolved, sockets);
        }
        self.look_at_call(id);
        Ok(())
    }

    /// Starts a call anew whose process was lost before it was given anything.
    pub(super) fn start_again(&mut self, id: CallId, end: End) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let uid = call.sandbox_uid.take();
        tracing::info!(call = %id, failure = ?call.failure, "what was started ahead is lost; the call starts anew");
        call.start_again();
        self.release(id, Some(end), uid);
        self.start(id);
    }

    /// Looks at what was started ahead, and ends what is of no use any more.
    pub(super) fn look_at_waiting(&mut self, now: Instant) {
        for (order, lost) in self.waiting.look(now, self.parts.config.timeouts.warm) {
            match lost {
                Lost::Ended(how) => {
                    tracing::warn!(
                        tool = order.tool,
                        how,
                        "a process that was started ahead did not live until its call"
                    );
                    self.waiting.set_back(&order, now);
                }
                Lost::Unused => tracing::debug!(tool = order.tool, "no call came for a process that was started ahead"),
            }
        }
        let gone = self.waiting.gone(now);
        if gone.is_empty() {
            return;
        }
        for gone in gone {
            let holder = match gone {
                Gone::Whole(holder, remains, uid) => {
                    self.clear(remains);
                    self.uids.give_back(uid);
                    holder
                }
                Gone::Stuck(holder, running, uid) => {
                    tracing::error!("a process that was started ahead is stuck in the kernel; its cgroup is set aside");
                    self.stuck.push((running, Some(uid)));
                    holder
                }
            };
            if let Holder::Job(job) = holder {
                self.close_if_done(job);
            }
        }
        self.remove_idle_slices();
    }

    /// Removes the cgroups of what was started ahead for direct calls of users that have none.
    pub(super) fn remove_idle_slices(&mut self) {
        let calls_directly = |uid| self.grants.values().any(|grant| grant.holder() == Holder::DirectCalls(uid));
        self.waiting.remove_idle_slices(calls_directly);
    }
}
