//! What one call's commit does to the workspace, step by step, and the file that survives a crash in between.
//!
//! A step is one system call, and can be told done from not done, and undone, by looking at which file lies where. So a
//! commit is carried on or taken back after a crash at any instant, without a record per step; and the files that were
//! replaced, lying where their successors came from, are the undo store.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::BorrowedFd;

use rustix::fs::{Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use toolproto::digest::Digest;

use super::changes::Changes;
use super::tree::Stamp;

/// The journal's name in a call's staging directory.
pub(crate) const NAME: &str = "journal";
/// The journal's name once its commit is carried out: the undo store's table of contents.
pub(crate) const APPLIED: &str = "journal.applied";
/// The journal's name once its commit was taken back by a rollback, so that it can be carried out again.
pub(crate) const UNDONE: &str = "journal.undone";
/// Its name until it is whole.
const UNFINISHED: &str = "journal.new";
/// The layout's version.
const VERSION: u32 = 1;

/// A path below the workspace, in raw bytes; hexadecimal in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct RawPath(pub(crate) Vec<u8>);

impl TryFrom<String> for RawPath {
    type Error = data_encoding::DecodeError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        data_encoding::HEXLOWER.decode(text.as_bytes()).map(Self)
    }
}

impl From<RawPath> for String {
    fn from(path: RawPath) -> Self {
        data_encoding::HEXLOWER.encode(&path.0)
    }
}

/// Which file of the workspace's file system. No device number: a file keeps its inode for ever, and a file system gets
/// another number with the next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileId {
    inode: u64,
}

impl From<&Stamp> for FileId {
    fn from(stamp: &Stamp) -> Self {
        Self { inode: stamp.inode }
    }
}

/// How the file that gives way looked when the commit was prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    pub(crate) size: i64,
    pub(crate) mtime: (i64, u64),
}

impl From<&Stamp> for Seen {
    fn from(stamp: &Stamp) -> Self {
        Self { size: stamp.size, mtime: stamp.mtime }
    }
}

/// In which of the three directories a path lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Root {
    /// The workspace itself.
    Workspace,
    /// What the call wrote; after the commit, what gave way to it.
    Upper,
    /// What the call deleted.
    Undo,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Step {
    /// The entry comes from the upper directory to a free place.
    Create { path: RawPath, file: FileId },
    /// The entry goes to the undo directory, under a number.
    Delete { path: RawPath, file: FileId, number: u32, seen: Seen },
    /// The entries in workspace and upper directory change places.
    Replace { path: RawPath, old: FileId, new: FileId, seen: Seen },
    /// A mode is set: the call's wish, or lifted for other steps and set back after them.
    SetMode { root: Root, path: RawPath, file: FileId, from: u16, to: u16 },
}

impl Step {
    /// The path of an entry of the workspace that is moved; none of a mode that is set.
    pub(crate) fn path(&self) -> Option<&[u8]> {
        match self {
            Self::Create { path, .. } | Self::Delete { path, .. } | Self::Replace { path, .. } => Some(&path.0),
            Self::SetMode { .. } => None,
        }
    }
}

/// A prepared commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Journal {
    version: u32,
    /// The workspace's digest before.
    pub(crate) before: Digest,
    /// The workspace's digest after.
    pub(crate) after: Digest,
    /// What differs.
    pub(crate) changes: Changes,
    /// In this order.
    pub(crate) steps: Vec<Step>,
}

/// A journal that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file.
    #[error("failed to {action} the journal")]
    File {
        /// What was tried.
        action: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Its content.
    #[error("the journal is not readable")]
    Content(#[source] serde_json::Error),
    /// It was written by a later version.
    #[error("the journal has version {0}, which this program does not know")]
    Version(u32),
}

impl Journal {
    pub(crate) const fn new(before: Digest, after: Digest, changes: Changes, steps: Vec<Step>) -> Self {
        Self { version: VERSION, before, after, changes, steps }
    }

    /// Writes the journal, durably: when this returns, the commit is prepared.
    pub(crate) fn write(&self, staging: BorrowedFd<'_>) -> Result<(), JournalError> {
        let bytes = serde_json::to_vec(self).map_err(JournalError::Content)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(staging, UNFINISHED, flags, Mode::RUSR | Mode::WUSR);
        let mut file = File::from(opened.map_err(on("create"))?);
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(on("write"))?;
        rustix::fs::renameat_with(staging, UNFINISHED, staging, NAME, RenameFlags::empty()).map_err(on("finish"))?;
        rustix::fs::fsync(staging).map_err(on("finish"))
    }

    /// The journal of a commit that is prepared, and perhaps carried out in part.
    pub(crate) fn prepared(staging: BorrowedFd<'_>) -> Result<Option<Self>, JournalError> {
        Self::read(staging, NAME)
    }

    /// The journal of a commit that is carried out.
    pub(crate) fn applied(staging: BorrowedFd<'_>) -> Result<Option<Self>, JournalError> {
        Self::read(staging, APPLIED)
    }

    /// The journal of a commit that a rollback has taken back.
    pub(crate) fn undone(staging: BorrowedFd<'_>) -> Result<Option<Self>, JournalError> {
        Self::read(staging, UNDONE)
    }

    /// Records durably that the commit was taken back by a rollback.
    pub(crate) fn mark_undone(staging: BorrowedFd<'_>) -> Result<(), JournalError> {
        rustix::fs::renameat_with(staging, NAME, staging, UNDONE, RenameFlags::empty()).map_err(on("put aside"))?;
        rustix::fs::fsync(staging).map_err(on("put aside"))
    }

    /// Records durably that a commit that was taken back is about to be carried out again.
    pub(crate) fn mark_wanted(staging: BorrowedFd<'_>) -> Result<(), JournalError> {
        rustix::fs::renameat_with(staging, UNDONE, staging, NAME, RenameFlags::empty()).map_err(on("reopen"))?;
        rustix::fs::fsync(staging).map_err(on("reopen"))
    }

    /// Records durably that the commit is carried out.
    pub(crate) fn mark_applied(staging: BorrowedFd<'_>) -> Result<(), JournalError> {
        rustix::fs::renameat_with(staging, NAME, staging, APPLIED, RenameFlags::empty()).map_err(on("close"))?;
        rustix::fs::fsync(staging).map_err(on("close"))
    }

    /// Records durably that a commit that was carried out is about to be taken back, or was taken back in part.
    pub(crate) fn mark_reopened(staging: BorrowedFd<'_>) -> Result<(), JournalError> {
        rustix::fs::renameat_with(staging, APPLIED, staging, NAME, RenameFlags::empty()).map_err(on("reopen"))?;
        rustix::fs::fsync(staging).map_err(on("reopen"))
    }

    fn read(staging: BorrowedFd<'_>, name: &str) -> Result<Option<Self>, JournalError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = match rustix::fs::openat(staging, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(on("open")(errno)),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(on("read"))?;
        let journal: Self = serde_json::from_slice(&bytes).map_err(JournalError::Content)?;
        if journal.version == VERSION { Ok(Some(journal)) } else { Err(JournalError::Version(journal.version)) }
    }
}

fn on<E: Into<io::Error>>(action: &'static str) -> impl Fn(E) -> JournalError {
    move |error| JournalError::File { action, source: error.into() }
}
