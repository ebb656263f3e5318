//! What follows when a call has ended: agentd is told, what the sandbox had is given back, the tree is read again.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::WorkspaceChange;

use super::{Service, empty_file};
use crate::launch::{Remains, Reusable, Running};
use crate::launcher::calls::{End, Left, Output};
use crate::launcher::grants::{Asked, worker_failure};
use crate::launcher::program::Sight;
use crate::protocol::{FromLauncher, LaunchFailure};
use crate::workspace::changes::Changes;

impl Service {
    /// Nobody is left of a call's sandbox whose end agentd knows already.
    pub(super) fn left(&mut self, id: CallId, left: Left) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let (job, uid) = (call.job, call.sandbox_uid.take());
        match left {
            Left::Gone(remains) => {
                self.remains.push((job, remains));
                uid.into_iter().for_each(|uid| self.uids.give_back(uid));
            }
            Left::Stuck(running) => self.leave_stuck(id, running, uid),
        }
        self.seal_if_done(id);
        self.close_if_done(job);
    }

    fn leave_stuck(&mut self, id: CallId, running: Running, uid: Option<u32>) {
        tracing::error!(call = %id, "a process is stuck in the kernel; its cgroup is set aside");
        self.stuck.push((running, uid));
    }

    /// Ends a call that never had a sandbox.
    pub(super) fn fail(&mut self, id: CallId, failure: LaunchFailure) {
        if let Some(call) = self.calls.get_mut(&id)
            && call.record().is_none()
        {
            tracing::info!(call = %id, code = %failure.code, step = failure.step, "not launched: {}", failure.message);
            call.failure = Some(failure);
            self.ended(id, None);
        }
    }

    /// No process is left, or what is left is set aside: agentd is told, and the tree is read again.
    pub(super) fn ended(&mut self, id: CallId, end: Option<End>) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let mut record = call.end(end.as_ref()).clone();
        let (has_written, is_layered) = (call.has_run && call.sight == Sight::Direct, call.layer.is_some());
        if (has_written || is_layered) && matches!(end, Some(End::Stuck(_))) {
            // What the kernel does not let go may still write, whenever the workspace or the layer is read.
            call.leave_unproven(Code::WorkspaceUnavailable);
            record.outcome = call.record().map_or(record.outcome, |record| record.outcome.clone());
        }
        if !call.is_leaving() {
            let uid = call.sandbox_uid.take();
            self.release(id, end, uid);
        }
        let Some(call) = self.calls.get_mut(&id) else { return };
        let (descriptors, stdout_overflowed) = match captured(&mut call.output) {
            Ok(captured) => captured,
            Err(error) => {
                tracing::error!(call = %id, %error, "what the tool wrote is lost");
                (Vec::new(), true)
            }
        };
        let message = FromLauncher::Ended {
            call: id,
            outcome: record.outcome,
            failure: call.failure.clone(),
            stdout_overflowed,
            usage: record.usage,
            denied: record.denied,
        };
        if call.is_probe {
            self.tell(&message, descriptors);
            return self.forget_probe(id);
        }
        let (job, ahead) = (call.job, call.ahead.take());
        // What lies in a layer waits for the verdict.
        if call.workspace.is_none() && (!call.has_run || !(has_written || is_layered)) {
            call.workspace = Some(call.unchanged());
        }
        let is_to_be_read = has_written && call.workspace.is_none();
        self.tell(&message, descriptors);
        if is_to_be_read {
            self.read_after(job, id);
        }
        self.let_go(job);
        if let Some(order) = ahead
            && let Some(grant) = self.grants.get_mut(&job)
            && !grant.orders.contains(&order)
        {
            grant.orders.push(order);
        }
        self.close_if_done(job);
    }

    /// Gives back what a sandbox had.
    pub(super) fn release(&mut self, id: CallId, end: Option<End>, uid: Option<u32>) {
        match end {
            Some(End::Stuck(running)) => self.leave_stuck(id, running, uid),
            // What could write to a workspace is cleared away at once: a mount of that would stand in the way of what is done to it next.
            Some(End::Gone(_, remains)) => {
                self.clear(remains);
                uid.into_iter().for_each(|uid| self.uids.give_back(uid));
            }
            Some(End::Leaving(_)) | None => uid.into_iter().for_each(|uid| self.uids.give_back(uid)),
        }
    }

    /// Clears away what a sandbox has left, but for what is of use to the next.
    pub(super) fn clear(&mut self, remains: Remains) {
        let (leaf, Reusable { frame, network }) = remains.clear_away();
        self.leaves.extend(leaf);
        let now = Instant::now();
        frame.into_iter().for_each(|frame| self.frames.take_back(frame, now));
        network.into_iter().for_each(|network| self.networks.take_back(network));
    }

    /// Clears away what the sandboxes of a job have left.
    pub(super) fn clear_away(&mut self, job: JobId) {
        let of_job: Vec<_> = self.remains.extract_if(.., |(of, _)| *of == job).collect();
        of_job.into_iter().for_each(|(_, remains)| self.clear(remains));
    }

    fn read_after(&mut self, job: JobId, id: CallId) {
        let now = Instant::now();
        let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) else { return };
        let asked = workspace.ask(Asked::After(id), now).and_then(|()| workspace.ask(Asked::Compare(id), now));
        if let Err(error) = asked {
            let (code, message) = worker_failure(&error);
            self.lose_worker(job, code, &message);
        }
    }

    /// The worker has compared the trees before and after a call.
    pub(super) fn compared(&mut self, id: CallId, before: Digest, after: Digest, changes: Changes) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        if call.before != Some(before) {
            tracing::error!(call = %id, "the worker compared with another tree than the one before the call");
            call.leave_unproven(Code::WorkspaceUnavailable);
            return self.seal_if_done(id);
        }
        let Changes { created, modified, deleted } = changes;
        call.workspace = Some(WorkspaceChange {
            before: Some(before),
            after: Some(after),
            created,
            modified,
            deleted,
            ..call.unchanged()
        });
        self.seal_if_done(id);
    }
}

/// What a tool wrote, as descriptors for agentd, and whether stdout was over its cap.
fn captured(output: &mut Output) -> io::Result<(Vec<OwnedFd>, bool)> {
    match output {
        Output::Streams => Ok((Vec::new(), false)),
        Output::Captured(captured) => match captured.take() {
            None => Ok((vec![empty_file()?, empty_file()?], false)),
            Some((stdout, stderr)) => {
                let has_overflowed = stdout.has_overflowed();
                Ok((vec![stdout.into_reader(), stderr.into_file()?], has_overflowed))
            }
        },
    }
}
