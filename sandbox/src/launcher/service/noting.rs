//! Noting that a call is about to start, so that after a crash it is known which calls never did.

use std::os::fd::AsFd as _;

use toolproto::ids::{CallId, JobId};

use super::Service;
use super::launching::step;
use crate::launcher::grants::Grant;
use crate::launcher::kept::{self, Durable};
use crate::launcher::program::Sight;
use crate::launcher::starts;
use crate::protocol::LaunchFailure;

impl Service {
    /// Notes that a call starts now, if its job outlives the launcher.
    pub(super) fn note_start(&self, id: CallId) -> Result<(), LaunchFailure> {
        let Some(call) = self.calls.get(&id) else { return Ok(()) };
        if self.grants.get(&call.job).is_none_or(|grant| !grant.is_kept) {
            return Ok(());
        }
        let reaches_hosts = call.resolved.as_ref().is_some_and(|resolved| !resolved.passages.is_empty());
        let durable = if reaches_hosts || call.sight == Sight::Direct { Durable::Now } else { Durable::Later };
        let launcher = self.parts.state.launcher().as_fd();
        starts::note(launcher, call.job, call.attempt_of, durable).map_err(|error| step("note", &error))
    }

    /// Those among the calls of a kept job that never started. What cannot be read is no proof of that.
    pub(super) fn never_started(&self, job: JobId, calls: &[CallId]) -> Vec<CallId> {
        let never = starts::never_started(self.parts.state.launcher().as_fd(), job, calls);
        never.unwrap_or_else(|error| {
            tracing::error!(%job, %error, "which calls were started cannot be read: all may have been");
            Vec::new()
        })
    }

    /// Forgets what outlives the launcher of a grant that it kept.
    pub(super) fn forget(&self, grant: &Grant) {
        if grant.is_kept {
            self.forget_job(grant.job);
        }
    }

    pub(super) fn forget_job(&self, job: JobId) {
        let launcher = self.parts.state.launcher().as_fd();
        if let Err(error) = kept::forget(launcher, job).and_then(|()| starts::forget(launcher, job)) {
            tracing::warn!(%job, %error, "a kept grant stays");
        }
    }
}
