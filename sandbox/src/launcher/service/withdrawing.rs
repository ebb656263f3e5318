//! A commit or rollback that was decided and cannot be carried out: it is given up, and the call's record is taken back.
//!
//! Its receipt is stored and says that the workspace has the changes. Somebody else changed the same paths, or the disk ran
//! full, in the moment between that and the carrying out. A further record follows in the job's chain of evidence and says
//! what is so: none of the changes are there.

use std::path::PathBuf;

use jiff::Timestamp;
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::{Denial, Evidence, Outcome, Usage, WorkspaceChange, WorkspaceState};

use super::Service;
use crate::launcher::aside::{self, Aside};
use crate::launcher::grants::GivenUp;
use crate::protocol::{Application, ApplyFailure, FromLauncher, Withdrawal};

impl Service {
    /// A stored commit was tried, and the workspace is as it was.
    pub(super) fn given_up(
        &mut self,
        job: JobId,
        call: CallId,
        layer: u64,
        failure: ApplyFailure,
        denied: Vec<Denial>,
    ) {
        tracing::warn!(%call, layer, code = %failure.code, failure.message, "a stored commit is given up");
        let aside = self.place_aside(job, call);
        if let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) {
            workspace.decided.remove(&call);
        }
        self.take_record_back(job, call, failure, denied, GivenUp::Commit(layer, aside));
    }

    fn place_aside(&self, job: JobId, call: CallId) -> Option<Aside> {
        let staging = self.grants.get(&job)?.workspace.as_ref()?.staging.as_ref()?;
        let place = aside::place_for(staging, call);
        place.inspect_err(|error| tracing::error!(%call, %error, "what the call wrote has no place to be kept")).ok()
    }

    /// Keeps what a call wrote that conflicts with what others wrote. Where it lies now.
    pub(super) fn set_aside(&self, job: JobId, call: CallId, layer: u64) -> Option<PathBuf> {
        let aside = self.place_aside(job, call)?;
        self.keep(job, layer, &aside).then_some(aside.path)
    }

    /// Moves a layer to its place. Whether it is there.
    fn keep(&self, job: JobId, layer: u64, aside: &Aside) -> bool {
        let workspace = self.grants.get(&job).and_then(|grant| grant.workspace.as_ref());
        let Some(staging) = workspace.and_then(|workspace| workspace.staging.as_ref()) else { return false };
        match aside.take(staging, layer) {
            Ok(()) => {
                tracing::info!(%job, layer, path = %aside.path.display(), "what the call wrote is kept");
                true
            }
            Err(error) => {
                tracing::error!(%job, layer, %error, "what the call wrote cannot be kept for its owner");
                false
            }
        }
    }

    /// Takes the record of a call back by a further one, and tells agentd.
    pub(super) fn take_record_back(
        &mut self,
        job: JobId,
        call: CallId,
        failure: ApplyFailure,
        denied: Vec<Denial>,
        given_up: GivenUp,
    ) {
        let Some(grant) = self.grants.get_mut(&job) else { return };
        let Some(workspace) = grant.workspace.as_mut() else { return };
        let Some(promised) = workspace.promised.remove(&call) else {
            return self.misuse("nothing is known of the call that is given up", Some(job), Some(call));
        };
        let application = match grant.chain.seal(withdrawing(promised, failure.code, denied), &self.parts.key) {
            Ok(evidence) => {
                let kept = match &given_up {
                    GivenUp::Commit(_, aside) => aside.as_ref().map(|aside| aside.path.clone()),
                    GivenUp::Rollback => None,
                };
                workspace.given_up.insert(evidence.record.call_id, given_up);
                self.keep_chain(job);
                Application::Withdrawn(Withdrawal { failure, kept, evidence: Box::new(evidence) })
            }
            Err(error) => {
                tracing::error!(%call, %error, "the record of a call cannot be taken back");
                Application::Failed(failure)
            }
        };
        self.tell(&FromLauncher::Applied { call, application }, Vec::new());
        self.close_if_done(job);
    }

    /// The receipt that takes a call's back is stored. Whether this is one.
    pub(super) fn give_up(&mut self, withdrawal: CallId) -> bool {
        let found = self.grants.values_mut().find_map(|grant| {
            let given_up = grant.workspace.as_mut()?.given_up.remove(&withdrawal)?;
            Some((grant.job, given_up))
        });
        match found {
            None => return false,
            Some((job, GivenUp::Commit(layer, Some(aside)))) => {
                self.keep(job, layer, &aside);
            }
            // The layer goes with the job.
            Some((_, GivenUp::Commit(_, None))) => {}
            Some((job, GivenUp::Rollback)) => {
                let workspace = self.grants.get(&job).and_then(|grant| grant.workspace.as_ref());
                let staging = workspace.and_then(|workspace| workspace.staging.as_ref());
                // Later commits must not be mistaken for what is to be taken back.
                if let Some(Err(error)) = staging.map(|staging| staging.close_rollback(None)) {
                    tracing::error!(%job, %error, "a rollback that failed stays noted as open");
                }
            }
        }
        self.tell(&FromLauncher::Applied { call: withdrawal, application: Application::Done }, Vec::new());
        true
    }
}

/// Whether a record says that the workspace has changes that it gets only once the receipt is stored.
pub(super) const fn is_promise(record: &Evidence) -> bool {
    matches!(record.workspace.state, WorkspaceState::Committed | WorkspaceState::RolledBack)
}

/// A record without the lists of what was changed, which can be long.
pub(super) fn without_changes(record: &Evidence) -> Evidence {
    let WorkspaceChange { state, before, after, .. } = record.workspace;
    Evidence { workspace: WorkspaceChange { state, before, after, ..WorkspaceChange::none() }, ..record.clone() }
}

/// The record that takes another back: the call ended as it did, and left nothing.
fn withdrawing(promised: Evidence, code: Code, denied: Vec<Denial>) -> Evidence {
    let state = if code == Code::WorkspaceConflict { WorkspaceState::Conflict } else { WorkspaceState::Discarded };
    let before = promised.workspace.before;
    let now = Timestamp::now();
    Evidence {
        call_id: CallId::generate(),
        withdraws: Some(promised.call_id),
        started: now,
        ended: now,
        outcome: Outcome { code: Some(code), ..promised.outcome },
        workspace: WorkspaceChange { state, before, after: before, ..WorkspaceChange::none() },
        denied,
        usage: Usage::default(),
        cgroup: "none".to_owned(),
        claims: toolproto::receipt::Claims {
            arguments_digest: promised.claims.arguments_digest,
            ..toolproto::receipt::Claims::default()
        },
        ..promised
    }
}
