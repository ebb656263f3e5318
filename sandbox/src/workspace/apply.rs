//! Carrying a journal's steps out, or taking them back.
//!
//! ```text
//!              forward                       backward
//! Create       upper → workspace             workspace → upper
//! Delete       workspace → undo              undo → workspace
//! Replace      workspace ⇄ upper             the same
//! SetMode      from → to                     to → from
//! ```
//!
//! Both directions look at each step first: one that is done already is passed over, so either direction can start from
//! wherever a crash, or a failing step, has left the workspace.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, RenameFlags};
use rustix::io::Errno;
use toolproto::receipt::escape_path;

use super::journal::{FileId, RawPath, Root, Seen, Step};
use super::reach;
use super::scan::permission_bits;
use super::tree::Stamp;

/// The three directories that a commit works in, on one mount.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places<'a> {
    pub(crate) workspace: BorrowedFd<'a>,
    pub(crate) upper: BorrowedFd<'a>,
    pub(crate) undo: BorrowedFd<'a>,
}

/// A step that could not be done. The steps before it are done.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// Something else lies at the path than what the journal says: it was changed from outside.
    #[error("`{path}` was changed from outside")]
    Conflict {
        /// Which entry, escaped.
        path: String,
    },
    /// The file system refused.
    #[error("failed to move `{path}`")]
    Io {
        /// Which entry, escaped.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Which way a journal is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

/// Where a step stands, seen from one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    ToDo,
    Done,
    Other,
}

/// Carries all steps out in one direction. `before_step` is called with each step's number before it is looked at. An
/// error comes with the number of the step that failed.
pub(crate) fn carry_out(
    places: Places<'_>,
    steps: &[Step],
    direction: Direction,
    mut before_step: impl FnMut(usize),
) -> Result<(), (usize, ApplyError)> {
    let mut each = |index: usize| {
        before_step(index);
        places.carry_out(&steps[index], direction).map_err(|error| (index, error))
    };
    match direction {
        Direction::Forward => (0..steps.len()).try_for_each(&mut each),
        Direction::Backward => (0..steps.len()).rev().try_for_each(&mut each),
    }
}

/// Makes what was carried out durable: the directories of the workspace that entries came to or left, and set modes.
pub(crate) fn make_durable(places: Places<'_>, steps: &[Step]) -> io::Result<()> {
    let directories = steps.iter().filter_map(|step| match step {
        Step::Create { path, .. } | Step::Delete { path, .. } | Step::Replace { path, .. } => {
            Some(reach::split(&path.0).0)
        }
        Step::SetMode { root: Root::Workspace, path, .. } => Some(&*path.0),
        Step::SetMode { .. } => None,
    });
    for path in directories.collect::<BTreeSet<_>>() {
        let opened = reach::directory(places.workspace, path)
            .and_then(|dir| rustix::fs::openat2(&dir, ".", reach::DIRECTORY, Mode::empty(), reach::RESOLVE));
        match opened {
            Ok(dir) => rustix::fs::fsync(&dir)?,
            // One that has gone again needs nothing. One that its owner may not read is written with everything else.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
            Err(Errno::ACCESS) => rustix::fs::syncfs(places.workspace)?,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

impl Places<'_> {
    /// Whether a step that moves something can be done now: everything lies where the journal says.
    pub(crate) fn check(self, step: &Step, direction: Direction) -> Result<(), ApplyError> {
        let forward = direction == Direction::Forward;
        let lies = |entry: &Entry<'_>, file: FileId| -> Result<bool, ApplyError> {
            Ok(entry.stamp()?.is_some_and(|stamp| FileId::from(&stamp) == file))
        };
        let path = match step {
            Step::Create { path, .. } | Step::Delete { path, .. } | Step::Replace { path, .. } => path,
            Step::SetMode { .. } => return Ok(()),
        };
        let place = self.at(Root::Workspace, path)?;
        let is_due = match step {
            Step::Create { file, .. } => {
                if forward {
                    place.stamp()?.is_none()
                } else {
                    lies(&place, *file)?
                }
            }
            Step::Delete { file, .. } => {
                if forward {
                    lies(&place, *file)?
                } else {
                    place.stamp()?.is_none()
                }
            }
            Step::Replace { old, new, .. } => lies(&place, if forward { *old } else { *new })?,
            Step::SetMode { .. } => true,
        };
        if is_due { Ok(()) } else { Err(place.conflict()) }
    }

    fn carry_out(self, step: &Step, direction: Direction) -> Result<(), ApplyError> {
        let forward = direction == Direction::Forward;
        match step {
            Step::Create { path, file } => {
                let (upper, workspace) = (self.at(Root::Upper, path)?, self.at(Root::Workspace, path)?);
                let (from, to) = if forward { (upper, workspace) } else { (workspace, upper) };
                move_entry(&from, &to, *file, None)
            }
            Step::Delete { path, file, number, seen } => {
                let place = RawPath(number.to_string().into_bytes());
                let (workspace, undo) = (self.at(Root::Workspace, path)?, self.at(Root::Undo, &place)?);
                if forward {
                    move_entry(&workspace, &undo, *file, Some(seen))
                } else {
                    move_entry(&undo, &workspace, *file, None)
                }
            }
            Step::Replace { path, old, new, seen } => {
                let (workspace, upper) = (self.at(Root::Workspace, path)?, self.at(Root::Upper, path)?);
                if forward {
                    exchange(&workspace, &upper, *old, *new, Some(seen))
                } else {
                    exchange(&workspace, &upper, *new, *old, None)
                }
            }
            Step::SetMode { root, path, file, from, to } => {
                self.set_mode(*root, path, *file, if forward { *to } else { *from })
            }
        }
    }

    fn at<'p>(self, root: Root, path: &'p RawPath) -> Result<Entry<'p>, ApplyError> {
        let (directory, name) = reach::split(&path.0);
        let root = match root {
            Root::Workspace => self.workspace,
            Root::Upper => self.upper,
            Root::Undo => self.undo,
        };
        match reach::directory(root, directory) {
            Ok(dir) => Ok(Entry { dir: Some(dir), name, path }),
            // The directory may itself have been moved by a step that is done.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(Entry { dir: None, name, path }),
            Err(errno) => Err(io_error(path, errno)),
        }
    }

    /// An entry that has gone, or is another, is passed over: it lies elsewhere by a step that is done, or is not the
    /// call's any more.
    fn set_mode(self, root: Root, path: &RawPath, file: FileId, mode: u16) -> Result<(), ApplyError> {
        let entry = self.at(root, path)?;
        let Some(dir) = &entry.dir else { return Ok(()) };
        let handle = match reach::handle(dir, entry.name) {
            Ok(handle) => handle,
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(io_error(path, errno)),
        };
        let stat = rustix::fs::fstat(&handle).map_err(|errno| io_error(path, errno))?;
        if FileId::from(&Stamp::of(&stat)) != file || permission_bits(&stat) == mode {
            return Ok(());
        }
        reach::set_mode(&handle, mode).map_err(|errno| io_error(path, errno))
    }
}

/// A place where an entry may lie; without a directory, where none can.
struct Entry<'a> {
    dir: Option<OwnedFd>,
    name: &'a [u8],
    path: &'a RawPath,
}

impl Entry<'_> {
    fn stamp(&self) -> Result<Option<Stamp>, ApplyError> {
        let Some(dir) = &self.dir else { return Ok(None) };
        let stat = reach::stat(dir, self.name).map_err(|errno| io_error(self.path, errno))?;
        Ok(stat.as_ref().map(Stamp::of))
    }

    fn conflict(&self) -> ApplyError {
        ApplyError::Conflict { path: escape_path(&self.path.0) }
    }

    fn rename_to(&self, other: &Self, flags: RenameFlags) -> Result<(), ApplyError> {
        let (Some(from), Some(to)) = (&self.dir, &other.dir) else { return Err(self.conflict()) };
        match rustix::fs::renameat_with(from.as_fd(), self.name, to.as_fd(), other.name, flags) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST | Errno::NOENT) => Err(self.conflict()),
            Err(errno) => Err(io_error(self.path, errno)),
        }
    }
}

fn move_entry(from: &Entry<'_>, to: &Entry<'_>, file: FileId, seen: Option<&Seen>) -> Result<(), ApplyError> {
    let is = |stamp: &Option<Stamp>| stamp.as_ref().is_some_and(|stamp| FileId::from(stamp) == file);
    let (there, here) = (from.stamp()?, to.stamp()?);
    let standing = match (is(&there), is(&here)) {
        (true, false) if is_unchanged(there.as_ref(), seen) => Standing::ToDo,
        (false, true) => Standing::Done,
        _ => Standing::Other,
    };
    match standing {
        Standing::ToDo => from.rename_to(to, RenameFlags::NOREPLACE),
        Standing::Done => Ok(()),
        Standing::Other => Err(from.conflict()),
    }
}

/// Afterwards `new` lies at `place` and `old` at `other`.
fn exchange(
    place: &Entry<'_>,
    other: &Entry<'_>,
    old: FileId,
    new: FileId,
    seen: Option<&Seen>,
) -> Result<(), ApplyError> {
    let (here, there) = (place.stamp()?, other.stamp()?);
    let ids = (here.as_ref().map(FileId::from), there.as_ref().map(FileId::from));
    let standing = if ids == (Some(old), Some(new)) && is_unchanged(here.as_ref(), seen) {
        Standing::ToDo
    } else if ids == (Some(new), Some(old)) {
        Standing::Done
    } else {
        Standing::Other
    };
    match standing {
        Standing::ToDo => place.rename_to(other, RenameFlags::EXCHANGE),
        Standing::Done => Ok(()),
        Standing::Other => Err(place.conflict()),
    }
}

/// Change times are left out: lifting a mode, and a rename on some file systems, moves them.
fn is_unchanged(stamp: Option<&Stamp>, seen: Option<&Seen>) -> bool {
    seen.is_none_or(|seen| stamp.is_some_and(|stamp| Seen::from(stamp) == *seen))
}

fn io_error(path: &RawPath, errno: Errno) -> ApplyError {
    ApplyError::Io { path: escape_path(&path.0), source: errno.into() }
}
