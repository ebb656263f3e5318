//! Rollbacks: a call that runs nothing, whose effect is foreseen, recorded, and carried out like a commit's.
//!
//! ```text
//!   Foresee ──► note (durable) ──► evidence, receipt stored ──► Roll ──► note kept under its call
//!                  │ agentd or the launcher ends first
//!                  ▼
//!               asked about at the next start, then carried out or forgotten
//! ```

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::{Denial, WorkspaceChange, WorkspaceState};

use super::Service;
use crate::launcher::grants::{Asked, GivenUp, Rollback};
use crate::launcher::history;
use crate::launcher::program::failure;
use crate::launcher::staging_place::RollbackNote;
use crate::protocol::{Application, ApplyFailure, FromLauncher, Target};
use crate::workspace::changes::Changes;

impl Service {
    /// The workspace is held and read: what would the rollback make of it?
    pub(super) fn foresee(&mut self, id: CallId, target: Target) {
        let Some(job) = self.calls.get(&id).map(|call| call.job) else { return };
        let staging = self.grants.get(&job).and_then(|grant| grant.workspace.as_ref()?.staging.as_ref());
        let found = staging.map(|staging| history::layer_of(staging, target));
        match found {
            Some(Ok(Some(layer))) => self.ask(job, Asked::Foresee(id, layer)),
            Some(Ok(None)) | None => {
                let (Target::After(call) | Target::Before(call)) = target;
                let message = format!(
                    "the undo store does not hold what call {call} changed: it was dropped for newer \
                                       changes ([workspace] undo_bytes), or never kept"
                );
                self.fail(id, failure(Code::UndoUnavailable, message));
            }
            Some(Err(error)) => self.fail(id, failure(Code::UndoUnavailable, error.to_string())),
        }
    }

    pub(super) fn foreseen(&mut self, id: CallId, to: u64, before: Digest, after: Digest, changes: Changes) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let job = call.job;
        let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) else { return };
        let Some(staging) = &workspace.staging else { return };
        let from = staging.layers().map(|layers| history::top(&layers));
        let noted = from.and_then(|from| {
            let note = serde_json::to_vec(&RollbackNote { job, call: id, from, to }).unwrap_or_default();
            staging.note_rollback(&note).map(|()| from)
        });
        match noted {
            Ok(from) => workspace.rollback = Some(Rollback { call: id, from, to, is_decided: false }),
            Err(error) => return self.fail(id, failure(Code::WorkspaceUnavailable, error.to_string())),
        }
        let Changes { created, modified, deleted } = changes;
        call.workspace = Some(WorkspaceChange {
            state: WorkspaceState::RolledBack,
            before: Some(before),
            after: Some(after),
            created,
            modified,
            deleted,
            unattributed: call.unattributed.clone(),
        });
        call.complete();
        self.ended(id, None);
    }

    /// The rollback's receipt is stored. Whether the call is one.
    pub(super) fn roll(&mut self, id: CallId) -> bool {
        let found = self.grants.values_mut().find_map(|grant| {
            let rollback = grant.workspace.as_mut()?.rollback.as_mut().filter(|rollback| rollback.call == id)?;
            rollback.is_decided = true;
            Some((grant.job, *rollback))
        });
        let Some((job, Rollback { from, to, .. })) = found else { return false };
        self.ask(job, Asked::Roll(id, from, to));
        true
    }

    pub(super) fn rolled(&mut self, job: JobId, call: CallId, failure: Option<ApplyFailure>) {
        if let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) {
            workspace.rollback = None;
            workspace.promised.remove(&call);
            match (&failure, &workspace.staging) {
                (None, Some(staging)) => {
                    if let Err(error) = staging.close_rollback(Some(&call.to_string())) {
                        tracing::error!(%job, %error, "a rollback that is done stays noted as open");
                    }
                }
                (Some(failure), _) => {
                    tracing::error!(%call, code = %failure.code, failure.message, "a stored rollback is not carried out");
                }
                (None, None) => {}
            }
        }
        let application = failure.map_or(Application::Done, Application::Failed);
        self.tell(&FromLauncher::Applied { call, application }, Vec::new());
        self.close_if_done(job);
    }

    /// A stored rollback was tried, and what was moved is back where it was.
    pub(super) fn not_rolled(&mut self, job: JobId, call: CallId, failure: ApplyFailure, denied: Vec<Denial>) {
        tracing::warn!(%call, code = %failure.code, failure.message, "a stored rollback is given up");
        let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) else { return };
        workspace.rollback = None;
        self.take_record_back(job, call, failure, denied, GivenUp::Rollback);
    }
}
