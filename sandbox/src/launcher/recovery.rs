//! What an earlier run left in staging: commits that were prepared, and perhaps carried out in part.
//!
//! agentd's ledger knows which of them were decided, so each is asked for; the answer carries it out or takes it back.
//! Directories without such a commit are removed.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};

use super::staging_place::{CallNote, RollbackNote, StagingPlaces, WorkspaceNote};
use crate::protocol::ApplyFailure;
use crate::workspace::Owner;
use crate::workspace::scan::{TreeLimits, Unreadable};
use crate::workspace::staging::{Leftover, Standing, WorkspaceStaging, leftovers};
use crate::workspace::worker::{Answer, Credentials, LockKind, Request, Worker};

/// How long a worker's answer is waited for; only at the start, before any job of the workspace can run.
const ANSWER: Duration = Duration::from_secs(20);

/// A commit that was prepared by an earlier run.
#[derive(Debug)]
pub struct Undecided {
    /// Its job.
    pub job: JobId,
    /// Its call.
    pub call: CallId,
    what: What,
    name: String,
    note: WorkspaceNote,
}

/// What is undecided.
#[derive(Clone, Debug)]
enum What {
    /// The commit of this layer.
    Commit(u64),
    /// A rollback.
    Rollback(RollbackNote),
}

/// Finds the undecided commits, and removes what holds none.
#[must_use]
pub fn look(places: &StagingPlaces) -> Vec<Undecided> {
    let mut found = Vec::new();
    for root in places.own() {
        let left = match leftovers(root) {
            Ok(left) => left,
            Err(error) => {
                tracing::error!(%error, "a staging directory cannot be looked through");
                continue;
            }
        };
        for Leftover { name, note, layers, rollback } in left {
            let note = serde_json::from_slice::<WorkspaceNote>(&note).ok();
            let owner = note.as_ref().map_or(Owner { uid: 0, gid: 0 }, WorkspaceNote::owner);
            let mut loose = Vec::new();
            let rollback = rollback.and_then(|note| serde_json::from_slice::<RollbackNote>(&note).ok());
            let mut is_needed = rollback.is_some();
            if let (Some(rollback), Some(note)) = (&rollback, &note) {
                let (what, name, note) = (What::Rollback(rollback.clone()), name.clone(), note.clone());
                found.push(Undecided { job: rollback.job, call: rollback.call, what, name, note });
            }
            for layer in &layers {
                let call = serde_json::from_slice::<CallNote>(&layer.note);
                match (layer.standing, call, &note) {
                    // A rollback has left it between, and goes on with it.
                    (Standing::Prepared, _, _)
                        if rollback.as_ref().is_some_and(|rollback| layer.number <= rollback.from.max(rollback.to)) => {
                    }
                    (Standing::Prepared, Ok(CallNote { job, call, .. }), Some(note)) => {
                        is_needed = true;
                        let (what, name, note) = (What::Commit(layer.number), name.clone(), note.clone());
                        found.push(Undecided { job, call, what, name, note });
                    }
                    (Standing::Prepared, call, _) => {
                        is_needed = true;
                        tracing::error!(name, layer = layer.number, ?call, "a prepared layer's notes cannot be read");
                    }
                    (Standing::Loose, _, _) => loose.push(layer.number),
                    // The undo store of a workspace that is still there.
                    (Standing::Applied | Standing::Undone, _, note) => {
                        if note.as_ref().is_some_and(|note| note.is_there(root)) {
                            is_needed = true
                        } else {
                            loose.push(layer.number)
                        }
                    }
                }
            }
            let staging = WorkspaceStaging::find(root, &name, owner).map_err(std::io::Error::other);
            let removed = staging.and_then(|staging| match staging {
                Some(staging) if is_needed => staging.remove_layers(&loose),
                Some(staging) => staging.remove(),
                None => Ok(()),
            });
            if let Err(error) = removed {
                tracing::warn!(name, %error, "what an earlier run left in staging stays");
            }
        }
    }
    found
}

impl Undecided {
    /// Carries the commit out, or takes it back and removes it.
    ///
    /// # Errors
    /// With the reason, and everything is kept for the next start, or for a person.
    pub fn decide(&self, places: &StagingPlaces, is_stored: bool) -> Result<(), ApplyFailure> {
        let found =
            places.own().find_map(|root| WorkspaceStaging::find(root, &self.name, self.note.owner()).transpose());
        let staging = found
            .transpose()
            .map_err(|error| unavailable(error.to_string()))?
            .ok_or_else(|| unavailable("its staging directory has gone".to_owned()))?;
        let mut worker = self.open(&staging)?;
        let decided = match (&self.what, is_stored) {
            (What::Commit(layer), true) => Request::Apply { layer: *layer },
            (What::Commit(layer), false) => Request::TakeBack { layer: *layer },
            (What::Rollback(RollbackNote { from, to, .. }), true) => Request::Roll { from: *from, to: *to },
            // Nothing of it is done before its receipt is stored.
            (What::Rollback(_), false) => {
                return staging.close_rollback(None).map_err(|error| unavailable(error.to_string()));
            }
        };
        for request in [Request::Lock(LockKind::Exclusive), decided] {
            worker.send(&request).map_err(|error| unavailable(error.to_string()))?;
            match answer(&mut worker)? {
                Answer::Done | Answer::Locked => {}
                Answer::Busy => {
                    let message = "another daemon's job holds the workspace".to_owned();
                    return Err(ApplyFailure { code: Code::WorkspaceBusy, message });
                }
                Answer::Failed { code, message, .. } | Answer::GivenUp { code, message, .. } => {
                    return Err(ApplyFailure { code, message });
                }
                other => return Err(unavailable(format!("its worker answered {other:?}"))),
            }
        }
        worker.kill();
        let settled = match &self.what {
            What::Commit(_) if is_stored => Ok(()),
            What::Commit(layer) => staging.remove_layers(&[*layer]),
            What::Rollback(note) => staging.close_rollback(Some(&note.call.to_string())).map_err(std::io::Error::other),
        };
        if let Err(error) = settled {
            tracing::warn!(job = %self.job, %error, "what is settled is still noted as open");
        }
        Ok(())
    }

    /// A worker in the same workspace as then.
    fn open(&self, staging: &WorkspaceStaging) -> Result<Worker, ApplyFailure> {
        let WorkspaceNote { uid, gid, groups, path, .. } = &self.note;
        let credentials = Credentials { uid: *uid, gid: *gid, groups: groups.clone() };
        let limits = TreeLimits { unreadable: Unreadable::Lift, ..TreeLimits::default() };
        let mut worker = Worker::start(&credentials, path, limits).map_err(|error| unavailable(error.to_string()))?;
        let dir = match answer(&mut worker)? {
            Answer::Opened { dir } => dir,
            Answer::Refused { code, message } => return Err(ApplyFailure { code, message }),
            other => return Err(unavailable(format!("its worker answered {other:?}"))),
        };
        if !self.note.is(dir.as_fd(), staging.root()) {
            return Err(unavailable(format!("{} is another directory than then", path.display())));
        }
        worker.confine(Some(staging.files())).map_err(|error| unavailable(error.to_string()))?;
        Ok(worker)
    }
}

fn answer(worker: &mut Worker) -> Result<Answer, ApplyFailure> {
    let until = Instant::now() + ANSWER;
    loop {
        if let Some(answer) = worker.receive().map_err(|error| unavailable(error.to_string()))? {
            return Ok(answer);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(unavailable("its worker does not answer".to_owned()));
        }
        let left = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(1), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&worker.fd(), PollFlags::IN)], Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(unavailable(errno.to_string())),
        }
    }
}

fn unavailable(message: String) -> ApplyFailure {
    ApplyFailure { code: Code::WorkspaceUnavailable, message: format!("a commit from before the start: {message}") }
}
