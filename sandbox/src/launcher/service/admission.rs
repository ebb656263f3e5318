//! Admit, Close, and the worker's first answer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};

use super::Service;
use crate::file_identity::FileIdentity;
use crate::launcher::evidence::Chain;
use crate::launcher::grants::{Grant, Phase, Readmitted, Sharing, Workspace, worker_failure};
use crate::launcher::kept::{Durable, Kept, KeptWorkspace};
use crate::launcher::peer::Peer;
use crate::launcher::roots::Roots;
use crate::launcher::starts;
use crate::launcher::warm::Holder;
use crate::protocol::{FromLauncher, SliceLimits, WorkspaceChoice};

impl Service {
    pub(super) fn admit(
        &mut self,
        job: JobId,
        choice: WorkspaceChoice,
        agent: Option<Digest>,
        limits: SliceLimits,
        mut descriptors: Vec<OwnedFd>,
    ) {
        if self.grants.contains_key(&job) {
            return self.misuse("the job has a grant already", Some(job), None);
        }
        let (Some(client), true) = (descriptors.pop(), descriptors.is_empty()) else {
            return self.misuse("Admit carries one descriptor, the client's socket", Some(job), None);
        };
        let peer = match Peer::of(client.as_fd(), self.parts.socket.identity()) {
            Ok(peer) => peer,
            Err(error) => {
                tracing::warn!(%job, %error, "a grant is refused");
                return self.reject(job, Code::NotPermitted, error.to_string());
            }
        };
        let path = match choice {
            WorkspaceChoice::None => None,
            WorkspaceChoice::Private => match self.parts.state.make_workspace(job, peer.uid, peer.gid) {
                Ok(path) => Some(path),
                Err(error) => return self.reject(job, Code::WorkspaceUnavailable, with_source(&error)),
            },
            WorkspaceChoice::Named(path) if path.is_absolute() => Some(path),
            WorkspaceChoice::Named(path) => {
                let message = format!("the workspace {} is not an absolute path", path.display());
                return self.reject(job, Code::WorkspaceUnavailable, message);
            }
        };
        let opened = path.map(|path| Workspace::open(path, &peer, &self.parts.config.workspace, Instant::now()));
        let workspace = match opened.transpose() {
            Ok(workspace) => workspace,
            Err(error) => {
                let (code, message) = worker_failure(&error);
                return self.reject(job, code, message);
            }
        };
        tracing::debug!(%job, uid = peer.uid, ?agent, "granted");
        let mut grant = Grant::new(job, peer, limits, workspace);
        grant.is_kept = agent.is_some();
        self.take_in(grant);
    }

    /// Goes on with a job whose grant an earlier launcher kept, and says which of some calls were never started.
    pub(super) fn readmit(&mut self, job: JobId, receipts: u64, dangling: &[CallId]) {
        if self.grants.contains_key(&job) {
            return self.misuse("the job has a grant already", Some(job), None);
        }
        let kept = match Kept::read(self.parts.state.launcher().as_fd(), job) {
            Ok(Some(kept)) => kept,
            Ok(None) => return self.reject(job, Code::Interrupted, "no grant of the job was kept".to_owned()),
            Err(error) => {
                tracing::error!(%job, %error, "a kept grant cannot be read");
                return self.reject(job, Code::Interrupted, format!("the job's kept grant cannot be read: {error}"));
            }
        };
        let Some(chain) = Chain::continued(kept.chain.clone(), receipts) else {
            let message = "the job's evidence is shorter than its receipts, as after a power cut".to_owned();
            return self.reject(job, Code::Interrupted, message);
        };
        let peer = Peer { uid: kept.uid, gid: kept.gid, groups: kept.groups.clone(), pidfd: None };
        let opened = kept.workspace.clone().map(|kept| {
            let path = kept.path.clone();
            let mut opened = Workspace::open(path, &peer, &self.parts.config.workspace, Instant::now())?;
            opened.kept = Some(kept);
            Ok(opened)
        });
        let workspace = match opened.transpose() {
            Ok(workspace) => workspace,
            Err(error) => {
                let (code, message) = worker_failure(&error);
                return self.reject(job, code, message);
            }
        };
        tracing::info!(%job, uid = peer.uid, "granted again");
        let mut grant = Grant::new(job, peer, kept.limits.clone(), workspace);
        grant.is_kept = true;
        grant.chain = chain;
        grant.readmitted = Some(Readmitted { kept, never_started: self.never_started(job, dangling) });
        self.take_in(grant);
    }

    /// A grant without a workspace is live at once.
    fn take_in(&mut self, grant: Grant) {
        let (job, uid, is_live) = (grant.job, grant.peer.uid, grant.phase == Phase::Live);
        self.grants.insert(job, grant);
        if is_live {
            self.admitted(job, uid, None);
        }
    }

    /// Keeps the grant, if it is to be kept, and says that it is live.
    fn admitted(&mut self, job: JobId, uid: u32, workspace: Option<PathBuf>) {
        let Some(grant) = self.grants.get_mut(&job) else { return };
        let readmitted = grant.readmitted.take();
        let launcher = self.parts.state.launcher().as_fd();
        let keep = |grant: &Grant| {
            let kept = grant.kept();
            match &readmitted {
                // It lies there already. A start with many jobs would wait for the disk once for each.
                Some(before) if before.kept == kept => return Ok(()),
                Some(_) => {}
                None => starts::begin(launcher, job)?,
            }
            kept.write(launcher, job, Durable::Now)
        };
        if grant.is_kept
            && let Err(error) = keep(grant)
        {
            return self.withdraw(job, Code::LedgerUnavailable, format!("the grant cannot be kept: {error}"));
        }
        let never_started = readmitted.map(|before| before.never_started).unwrap_or_default();
        self.tell(&FromLauncher::Admitted { job, uid, workspace, never_started }, Vec::new());
    }

    /// The worker has opened the workspace: whether it may be one is decided on the descriptor.
    pub(super) fn opened(&mut self, job: JobId, directory: OwnedFd) {
        let Some(grant) = self.grants.get_mut(&job) else { return };
        if grant.phase != Phase::Opening {
            return self.opened_again(job, &directory);
        }
        let uid = grant.peer.uid;
        let Some(workspace) = grant.workspace.as_mut() else { return };
        let roots = Roots {
            allowed: &self.parts.config.workspace.roots,
            private: self.parts.state.workspaces().as_fd(),
            state: self.parts.state.as_fd(),
            staging: &self.places.shared(),
        };
        match roots.check(directory.as_fd(), uid) {
            Ok(own) if workspace.kept.as_ref().is_some_and(|kept| !is_still(kept, directory.as_fd(), own)) => {
                let message = format!("the workspace {} is another directory now", workspace.path.display());
                self.withdraw(job, Code::WorkspaceUnavailable, message);
            }
            Ok(own) => {
                let place = (&self.parts.state, &self.parts.config.workspace);
                let staging = self.places.of_workspace(place, &grant.peer, &workspace.path, directory.as_fd());
                if let Err(error) = workspace.confine(staging) {
                    let (code, message) = worker_failure(&error);
                    return self.withdraw(job, code, message);
                }
                workspace.directory = Some(directory);
                workspace.expected = Some(own);
                let path = workspace.path.clone();
                grant.phase = Phase::Live;
                self.admitted(job, uid, Some(path));
            }
            Err(error) => {
                let message = format!("the workspace {} is refused: {error}", workspace.path.display());
                self.withdraw(job, Code::WorkspaceUnavailable, message);
            }
        }
    }

    /// Ends a grant that never became one.
    pub(super) fn withdraw(&mut self, job: JobId, code: Code, message: String) {
        if let Some(grant) = self.grants.remove(&job) {
            self.forget(&grant);
            let sharing = self.sharing(&grant);
            grant.dismantle(sharing, self.parts.config.workspace.undo_bytes.0);
        }
        self.reject(job, code, message);
    }

    /// Whether another job has the workspace of one that is no more.
    fn sharing(&self, grant: &Grant) -> Sharing {
        let Some(workspace) = grant.workspace.as_ref().and_then(|workspace| workspace.expected) else {
            return Sharing::Alone;
        };
        let has_it = |other: &Grant| other.workspace.as_ref().is_some_and(|other| other.expected == Some(workspace));
        if self.grants.values().any(has_it) { Sharing::WithOthers } else { Sharing::Alone }
    }

    fn reject(&mut self, job: JobId, code: Code, message: String) {
        self.tell(&FromLauncher::Rejected { job, code, message }, Vec::new());
    }

    /// Ends a grant. What was kept of one that has ended before is forgotten, unless it is to be kept.
    pub(super) fn close(&mut self, job: JobId, keep: bool) {
        let Some(grant) = self.grants.get_mut(&job) else {
            if !keep {
                self.forget_job(job);
            }
            return self.tell(&FromLauncher::Closed { job }, Vec::new());
        };
        // What is started ahead for a job ends with it.
        let is_direct = !grant.is_kept;
        let orders = if is_direct { self.take_orders(job) } else { Vec::new() };
        let Some(grant) = self.grants.get_mut(&job) else { return };
        if keep {
            // Nobody forgets it then.
            grant.is_kept = false;
        }
        let was = std::mem::replace(&mut grant.phase, Phase::Closing);
        if was == Phase::Opening {
            self.reject(job, Code::Cancelled, "the job was closed before it was granted".to_owned());
        }
        let calls: Vec<_> = self.calls.values_mut().filter(|call| call.job == job).map(|call| call.id).collect();
        for id in calls {
            self.stop(id);
        }
        self.waiting.end_of(Holder::Job(job), Instant::now());
        self.close_if_done(job);
        let now = Instant::now();
        orders.into_iter().for_each(|order| self.waiting.postpone(order, now));
        if is_direct {
            self.remove_idle_slices();
        }
    }

    /// The last call of a closing job has gone.
    pub(super) fn close_if_done(&mut self, job: JobId) {
        if self.grants.get(&job).is_none_or(|grant| grant.phase != Phase::Closing) {
            return;
        }
        // What has ended without a verdict will get none.
        self.calls.retain(|_, call| call.job != job || !call.is_over());
        let is_applying = self
            .grants
            .get(&job)
            .and_then(|grant| grant.workspace.as_ref())
            .is_some_and(|workspace| workspace.is_applying());
        if is_applying || self.waiting.has_any_of(Holder::Job(job)) || self.calls.values().any(|call| call.job == job) {
            return;
        }
        self.clear_away(job);
        if let Some(grant) = self.grants.remove(&job) {
            self.forget(&grant);
            // agentd closes a job whose receipts are stored, or will not be.
            let workspace = grant.workspace.as_ref();
            if let Some(staging) = workspace.filter(|one| one.rollback.is_some_and(|one| !one.is_decided))
                && let Some(Err(error)) = staging.staging.as_ref().map(|staging| staging.close_rollback(None))
            {
                tracing::error!(%job, %error, "a rollback that is not wanted stays noted");
            }
            let sharing = self.sharing(&grant);
            grant.dismantle(sharing, self.parts.config.workspace.undo_bytes.0);
        }
        self.tell(&FromLauncher::Closed { job }, Vec::new());
    }
}

/// Whether a directory that was opened anew is the one that was kept.
fn is_still(kept: &KeptWorkspace, directory: BorrowedFd<'_>, own: FileIdentity) -> bool {
    KeptWorkspace::of(kept.path.clone(), directory, own).is_ok_and(|found| found.is(kept))
}

fn with_source(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
