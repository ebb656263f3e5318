//! From a verdict to the workspace: what a call wrote into its layer is prepared, decided, and carried out.
//!
//! ```text
//!             verdict: commit            receipt stored
//!   in layer ────────────────► Prepared ────────────────► Applied
//!      │  verdict: discard        │ agentd or the launcher ends first
//!      ▼                          ▼
//!   Removed                    Undecided: asked at the next start, then applied or removed
//! ```

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::{Denial, WorkspaceChange, WorkspaceState};

use super::Service;
use crate::file_identity::FileIdentity;
use crate::launcher::grants::{Asked, worker_failure};
use crate::launcher::staging_place::CallNote;
use crate::policy::ProtectRule;
use crate::protocol::{Application, ApplyFailure, FromLauncher};
use crate::workspace::changes::Changes;
use crate::workspace::staging::{Standing, WorkspaceStaging};

impl Service {
    /// The verdict about a call whose changes lie in a layer.
    pub(super) fn take_over(&mut self, id: CallId, layer: u64, commit: bool) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let job = call.job;
        if commit {
            let protect = call.resolved.as_ref().map(|resolved| resolved.protect.clone()).unwrap_or_default();
            self.ask_under(job, Asked::Prepare(id, layer), &protect);
        } else {
            call.workspace = Some(call.unchanged());
            self.ask(job, Asked::Remove(layer));
        }
        self.seal_if_done(id);
    }

    pub(super) fn ask(&mut self, job: JobId, asked: Asked) {
        self.ask_under(job, asked, &[]);
    }

    fn ask_under(&mut self, job: JobId, asked: Asked, protect: &[ProtectRule]) {
        let workspace = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut());
        let asked = workspace.map(|workspace| workspace.ask_under(asked, protect, Instant::now()));
        let Some(Err(error)) = asked else { return };
        let (code, message) = worker_failure(&error);
        self.lose_worker(job, code, &message);
    }

    /// A commit is prepared: its evidence can be signed, and it waits for its receipt to be stored.
    pub(super) fn prepared(&mut self, id: CallId, layer: u64, before: Digest, after: Digest, changes: Changes) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        if call.before != Some(before) {
            tracing::error!(call = %id, "the worker prepared above another tree than the one before the call");
        }
        let Changes { created, modified, deleted } = changes;
        let gave_way = modified.iter().chain(&deleted).filter_map(|change| change.old.as_ref()?.bytes);
        let bytes = gave_way.fold(0, u64::saturating_add);
        call.workspace = Some(WorkspaceChange {
            state: WorkspaceState::Committed,
            before: Some(before),
            after: Some(after),
            created,
            modified,
            deleted,
            unattributed: call.unattributed.clone(),
        });
        if let Some(workspace) = self.grants.get_mut(&call.job).and_then(|grant| grant.workspace.as_mut()) {
            workspace.prepared.insert(id, layer);
            let note = serde_json::to_vec(&CallNote { job: call.job, call: id, bytes }).unwrap_or_default();
            if let Some(Err(error)) = workspace.staging.as_ref().map(|staging| staging.note_call(layer, &note)) {
                tracing::warn!(call = %id, %error, "the size of what a commit keeps is not noted");
            }
        }
        self.seal_if_done(id);
    }

    /// A commit cannot be prepared: the workspace stays as it was. After a conflict its owner gets what the call wrote.
    pub(super) fn unprepared(&mut self, id: CallId, layer: u64, (code, message): (Code, &str), denied: Vec<Denial>) {
        tracing::info!(call = %id, %code, message, "the call's changes are not taken over");
        let Some(call) = self.calls.get_mut(&id) else { return };
        call.withhold(code, call.before, denied);
        let job = call.job;
        if code == Code::WorkspaceConflict {
            let kept = self.set_aside(job, id, layer);
            if let Some(call) = self.calls.get_mut(&id) {
                call.kept = kept;
            }
        } else {
            self.ask(job, Asked::Remove(layer));
        }
        self.seal_if_done(id);
    }

    /// A receipt is stored: the commit point has passed.
    pub(super) fn stored(&mut self, id: CallId) {
        let found = self.grants.values_mut().find_map(|grant| {
            let workspace = grant.workspace.as_mut()?;
            let layer = workspace.prepared.remove(&id)?;
            workspace.decided.insert(id, layer);
            if let Some(Err(error)) = workspace.staging.as_ref().map(drop_undone) {
                tracing::error!(%error, "what was taken back stays");
            }
            Some((grant.job, layer))
        });
        match found {
            Some((job, layer)) => self.ask(job, Asked::Apply(id, layer)),
            None if self.roll(id) || self.give_up(id) => {}
            None => self.misuse("the call has no prepared commit", None, Some(id)),
        }
    }

    /// A worker was started again, because the one before was lost with commits that are decided.
    pub(super) fn opened_again(&mut self, job: JobId, directory: &OwnedFd) {
        let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) else { return };
        if FileIdentity::of(directory.as_fd()).ok() != workspace.expected {
            let message = format!("the workspace {} is another directory now", workspace.path.display());
            return self.lose_worker(job, Code::WorkspaceUnavailable, &message);
        }
        let staging = workspace.staging.take();
        let decided: Vec<(CallId, u64)> = workspace.decided.iter().map(|(call, layer)| (*call, *layer)).collect();
        if let Err(error) = workspace.confine(staging) {
            let (code, message) = worker_failure(&error);
            return self.lose_worker(job, code, &message);
        }
        self.ask(job, Asked::LockAgain);
        for (call, layer) in decided {
            self.ask(job, Asked::Apply(call, layer));
        }
        let workspace = self.grants.get(&job).and_then(|grant| grant.workspace.as_ref());
        if let Some(rollback) =
            workspace.and_then(|workspace| workspace.rollback).filter(|rollback| rollback.is_decided)
        {
            self.ask(job, Asked::Roll(rollback.call, rollback.from, rollback.to));
        }
    }

    /// agentd has looked a commit of an earlier run up in its ledger.
    pub(super) fn decide(&mut self, id: CallId, is_stored: bool) {
        let Some(undecided) = self.undecided.remove(&id) else {
            return self.misuse("the call is not undecided", None, Some(id));
        };
        let application = match undecided.decide(&self.places, is_stored) {
            Ok(()) => {
                tracing::info!(call = %id, is_stored, "a commit of an earlier run is settled");
                Application::Done
            }
            Err(failure) => {
                tracing::error!(call = %id, is_stored, failure.message, "a commit of an earlier run is stuck");
                Application::Failed(failure)
            }
        };
        self.tell(&FromLauncher::Applied { call: id, application }, Vec::new());
    }

    /// A commit was carried out, or could not be.
    pub(super) fn applied(&mut self, job: JobId, call: CallId, layer: u64, failure: Option<ApplyFailure>) {
        if let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) {
            workspace.decided.remove(&call);
            workspace.promised.remove(&call);
            // One that failed is tried again at the next start.
            if failure.is_some() {
                workspace.prepared.insert(call, layer);
            }
        }
        if let Some(failure) = &failure {
            tracing::error!(%call, layer, code = %failure.code, failure.message, "a stored commit is not carried out");
        }
        let application = failure.map_or(Application::Done, Application::Failed);
        self.tell(&FromLauncher::Applied { call, application }, Vec::new());
        self.close_if_done(job);
    }
}

/// What a rollback has taken back is gone once something else is committed.
fn drop_undone(staging: &WorkspaceStaging) -> std::io::Result<()> {
    let layers = staging.layers().map_err(std::io::Error::other)?;
    let undone: Vec<u64> =
        layers.iter().filter(|layer| layer.standing == Standing::Undone).map(|layer| layer.number).collect();
    staging.remove_layers(&undone)
}
