//! One call's commit, from its overlay to the workspace.
//!
//! ```text
//!   layer ──prepare──▶ PREPARED ──apply──▶ APPLIED ──take_back──▶ PREPARED
//!     │                    │
//!     └──────discard───────┘
//! ```
//!
//! - *layer*: the call has ended, its overlay is unmounted, the workspace is as it was.
//! - *PREPARED*: the journal is durable, with the digest and the changes that a receipt names. Whoever stores the receipt
//!   decides: stored, the commit is applied, also after a crash; not stored, it is discarded.
//! - *APPLIED*: the workspace has the changes, the staging directory what gave way to them.
//!
//! A crash in `apply` or `take_back` leaves PREPARED, and either may follow.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::Mode;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::receipt::Denial;

use super::apply::{ApplyError, Direction, Places, carry_out, make_durable};
use super::changes::{Changes, compare};
use super::journal::{Journal, JournalError};
use super::protect::{Veto, veto};
use super::reach;
use super::remove::remove;
use super::scan::TreeLimits;
use super::tree::Tree;
use super::upper::{self, StageError, Staged};
use crate::policy::ProtectRule;

/// A commit that failed. The workspace is as it was before, unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The call's changes cannot be taken over.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The staging directory.
    #[error("failed to open or remove the call's staging directory")]
    Staging(#[source] io::Error),
    /// The call changed what a rule of its policy protects.
    #[error("`{path}` is protected by the rule `{rule}`: {why}")]
    Protected {
        /// Which entry, escaped.
        path: String,
        /// The rule's name.
        rule: String,
        /// The rule's reason.
        why: String,
    },
    /// Nothing was prepared, or nothing applied, for this call.
    #[error("the call has no commit in that state")]
    NoSuchCommit,
    /// A step failed, and those before it were taken back.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A step failed, and so did taking the steps before it back: the workspace is between both states, and the journal
    /// is kept.
    #[error("the commit failed half-way ({first}) and could not be taken back")]
    Stuck {
        /// Why it failed first.
        first: Box<CommitError>,
        /// Why it could not be taken back.
        #[source]
        second: ApplyError,
    },
    /// The changes did not reach the disk, and were taken back.
    #[error("failed to write the changes to disk")]
    Sync(#[source] io::Error),
    /// They are not known to have reached the disk, after they were taken back.
    #[error("failed to write to disk that the changes were taken back")]
    Unsynced(#[source] io::Error),
}

impl CommitError {
    /// The code of a call that fails by it.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Stage(error) => error.code(),
            Self::Apply(ApplyError::Conflict { .. }) => Code::WorkspaceConflict,
            Self::Apply(ApplyError::Io { source, .. })
            | Self::Sync(source)
            | Self::Unsynced(source)
            | Self::Staging(source)
            | Self::Journal(JournalError::File { source, .. })
                if source.kind() == io::ErrorKind::StorageFull =>
            {
                Code::DiskFull
            }
            Self::Apply(_)
            | Self::Sync(_)
            | Self::Unsynced(_)
            | Self::Staging(_)
            | Self::Journal(_)
            | Self::Stuck { .. } => Code::WorkspaceUnavailable,
            Self::Protected { .. } => Code::NotPermitted,
            Self::NoSuchCommit => Code::InternalLogicError,
        }
    }

    /// Whether a commit or rollback that failed by it has left nothing in the workspace, so that it can be given up.
    #[must_use]
    pub const fn leaves_nothing(&self) -> bool {
        matches!(self, Self::Apply(_) | Self::Sync(_))
    }

    /// Which entry is in the way, and by which rule.
    #[must_use]
    pub fn denied(&self) -> Vec<Denial> {
        match self {
            Self::Stage(StageError::Conflict { path }) | Self::Apply(ApplyError::Conflict { path }) => {
                vec![Denial::seen("path", path, "nobody else changes what a call changes while it runs")]
            }
            Self::Stage(StageError::Device { path }) => {
                vec![Denial::seen("path", path, "no device enters a workspace")]
            }
            Self::Protected { path, rule, why } => {
                vec![Denial::seen("protected_name", path, format!("[[protect]] {rule}: {why}"))]
            }
            _ => Vec::new(),
        }
    }
}

/// A commit that only needs to be decided.
#[derive(Debug)]
pub struct Prepared {
    /// The workspace's digest before.
    pub before: Digest,
    /// The workspace's digest once it is applied.
    pub after: Digest,
    /// What differs.
    pub changes: Changes,
    /// The workspace once it is applied.
    pub tree: Tree,
}

/// A call's staging directory, from the worker's side: the descriptors of its parts.
#[derive(Debug)]
pub struct CallStaging {
    dir: OwnedFd,
    upper: OwnedFd,
    undo: OwnedFd,
}

impl CallStaging {
    /// Opens the directory of a call's number below the job's.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(files: BorrowedFd<'_>, number: u64) -> Result<Self, CommitError> {
        let open = |parent: BorrowedFd<'_>, name: &str| {
            rustix::fs::openat2(parent, name, reach::DIRECTORY, Mode::empty(), reach::RESOLVE)
                .map_err(|errno| CommitError::Staging(errno.into()))
        };
        let dir = open(files, &number.to_string())?;
        // The call may have left its layer's root without read permission.
        let handle = reach::handle(&dir, b"upper").map_err(|errno| CommitError::Staging(errno.into()))?;
        let upper = match open(dir.as_fd(), "upper") {
            Ok(upper) => upper,
            Err(_) => {
                let stat = rustix::fs::fstat(&handle).map_err(|errno| CommitError::Staging(errno.into()))?;
                let mode = super::scan::permission_bits(&stat);
                reach::set_mode(&handle, mode | 0o700).map_err(|errno| CommitError::Staging(errno.into()))?;
                let upper = open(dir.as_fd(), "upper")?;
                rustix::fs::fchmod(&upper, Mode::from_raw_mode(mode.into()))
                    .map_err(|errno| CommitError::Staging(errno.into()))?;
                upper
            }
        };
        let undo = open(dir.as_fd(), "undo")?;
        Ok(Self { dir, upper, undo })
    }

    /// Removes a call's directory with everything in it: its changes if it was not applied, else what it could be taken
    /// back with.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn remove(files: BorrowedFd<'_>, number: u64) -> Result<(), CommitError> {
        remove(files, number.to_string().as_bytes()).map_err(|errno| CommitError::Staging(errno.into()))
    }

    fn places<'a>(&'a self, workspace: BorrowedFd<'a>) -> Places<'a> {
        Places { workspace, upper: self.upper.as_fd(), undo: self.undo.as_fd() }
    }

    /// Reads what the call wrote above `base`, and makes the commit durable but for its decision.
    ///
    /// # Errors
    /// When the changes cannot be taken over; the workspace is as it was.
    pub fn prepare(
        &self,
        workspace: BorrowedFd<'_>,
        base: &Tree,
        limits: &TreeLimits,
        protect: &[ProtectRule],
    ) -> Result<Prepared, CommitError> {
        let Staged { after: tree, steps } = upper::read(workspace, self.upper.as_fd(), base, limits)?;
        let (before, after, changes) = (base.digest(), tree.digest(), compare(base, &tree));
        let read_link = |path: &[u8]| {
            let (directory, name) = reach::split(path);
            let directory = reach::directory(workspace, directory).ok()?;
            rustix::fs::readlinkat(directory, name, Vec::new()).ok().map(std::ffi::CString::into_bytes)
        };
        if let Some(Veto { path, rule, why }) = veto(protect, base, &changes, read_link) {
            return Err(CommitError::Protected { path, rule, why });
        }
        Journal::new(before, after, changes.clone(), steps).write(self.dir.as_fd())?;
        Ok(Prepared { before, after, changes, tree })
    }

    /// Carries a prepared commit out, from wherever a crash left it. When a step fails, those before it are taken back.
    ///
    /// # Errors
    /// See [`CommitError`].
    pub fn apply(&self, workspace: BorrowedFd<'_>, before_step: impl FnMut(usize)) -> Result<(), CommitError> {
        let journal = Journal::prepared(self.dir.as_fd())?.ok_or(CommitError::NoSuchCommit)?;
        let places = self.places(workspace);
        let carried_out = carry_out(places, &journal.steps, Direction::Forward, before_step);
        let (done, first) = match carried_out {
            Err((index, error)) => (index, CommitError::Apply(error)),
            Ok(()) => match make_durable(places, &journal.steps) {
                Ok(()) => return Ok(Journal::mark_applied(self.dir.as_fd())?),
                Err(error) => (journal.steps.len(), CommitError::Sync(error)),
            },
        };
        match carry_out(places, &journal.steps[..done], Direction::Backward, |_| ()) {
            Ok(()) => {
                // Whoever gives the commit up for it must find the old state after a crash as well.
                make_durable(places, &journal.steps[..done]).map_err(CommitError::Unsynced)?;
                Err(first)
            }
            Err((_, second)) => Err(CommitError::Stuck { first: Box::new(first), second }),
        }
    }

    /// The journal, wherever the commit stands.
    pub(crate) fn journal(&self) -> Result<Option<Journal>, CommitError> {
        let dir = self.dir.as_fd();
        let found = Journal::prepared(dir)?.map_or_else(|| Journal::applied(dir), |journal| Ok(Some(journal)))?;
        Ok(found.map_or_else(|| Journal::undone(dir), |journal| Ok(Some(journal)))?)
    }

    /// Whether the commit can be taken back, as far as its paths are `of_interest`.
    pub(crate) fn is_due_backward(
        &self,
        workspace: BorrowedFd<'_>,
        journal: &Journal,
        of_interest: impl Fn(&[u8]) -> bool,
    ) -> Result<(), CommitError> {
        self.is_due(workspace, journal, Direction::Backward, of_interest)
    }

    /// Whether the commit can be carried out again, as far as its paths are `of_interest`.
    pub(crate) fn is_due_forward(
        &self,
        workspace: BorrowedFd<'_>,
        journal: &Journal,
        of_interest: impl Fn(&[u8]) -> bool,
    ) -> Result<(), CommitError> {
        self.is_due(workspace, journal, Direction::Forward, of_interest)
    }

    fn is_due(
        &self,
        workspace: BorrowedFd<'_>,
        journal: &Journal,
        direction: Direction,
        of_interest: impl Fn(&[u8]) -> bool,
    ) -> Result<(), CommitError> {
        let places = self.places(workspace);
        let steps = journal.steps.iter().filter(|step| step.path().is_some_and(&of_interest));
        steps.map(|step| places.check(step, direction)).try_for_each(|checked| Ok(checked?))
    }

    /// Takes a carried out commit back and keeps it, so that it can be carried out again. When something is in the way, it stays
    /// carried out.
    ///
    /// # Errors
    /// See [`CommitError`].
    pub(crate) fn undo(&self, workspace: BorrowedFd<'_>) -> Result<(), CommitError> {
        match self.take_back(workspace, |_| ()) {
            Ok(()) => Ok(Journal::mark_undone(self.dir.as_fd())?),
            // Every step is carried out again, but for the one that somebody else's file is in the way of. Carrying that one out
            // is not tried at the next start: it is done, and what it brought is replaced.
            Err(CommitError::Apply(error)) => {
                let journal = Journal::prepared(self.dir.as_fd())?.ok_or(CommitError::NoSuchCommit)?;
                make_durable(self.places(workspace), &journal.steps).map_err(CommitError::Unsynced)?;
                Journal::mark_applied(self.dir.as_fd())?;
                Err(error.into())
            }
            Err(other) => Err(other),
        }
    }

    /// Carries a commit out that was taken back.
    ///
    /// # Errors
    /// See [`CommitError`].
    pub(crate) fn redo(&self, workspace: BorrowedFd<'_>) -> Result<(), CommitError> {
        if Journal::undone(self.dir.as_fd())?.is_some() {
            Journal::mark_wanted(self.dir.as_fd())?;
        }
        match self.apply(workspace, |_| ()) {
            Err(error) if error.leaves_nothing() => {
                Journal::mark_undone(self.dir.as_fd())?;
                Err(error)
            }
            other => other,
        }
    }

    /// Takes a commit back: an applied one, or one that a crash left between.
    ///
    /// # Errors
    /// See [`CommitError`]; when a step fails, those after it are carried out again.
    pub fn take_back(&self, workspace: BorrowedFd<'_>, before_step: impl FnMut(usize)) -> Result<(), CommitError> {
        if Journal::applied(self.dir.as_fd())?.is_some() {
            Journal::mark_reopened(self.dir.as_fd())?;
        }
        let journal = Journal::prepared(self.dir.as_fd())?.ok_or(CommitError::NoSuchCommit)?;
        let places = self.places(workspace);
        if let Err((index, first)) = carry_out(places, &journal.steps, Direction::Backward, before_step) {
            return match carry_out(places, &journal.steps[index + 1..], Direction::Forward, |_| ()) {
                Ok(()) => Err(first.into()),
                Err((_, second)) => Err(CommitError::Stuck { first: Box::new(first.into()), second }),
            };
        }
        make_durable(places, &journal.steps).map_err(CommitError::Unsynced)
    }
}

#[cfg(test)]
pub(crate) mod tests;
