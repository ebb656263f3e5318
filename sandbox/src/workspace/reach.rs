//! Reaching an entry below a directory by its path in raw bytes: by descriptor, through no symlink and no mount, however
//! long the path is.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags, RawDir, ResolveFlags, Stat};
use rustix::io::{Errno, Result};

/// How the kernel resolves every name here.
pub(crate) const RESOLVE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// A directory, for reading its entries.
pub(crate) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Anything, without opening it.
const HANDLE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The longest path that is given to the kernel at once, below its PATH_MAX.
const MAX_PATH: usize = 4000;

/// Splits a path into the directory's path and the entry's name.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

/// A handle of the directory at `path`; the empty path is `root` itself.
pub(crate) fn directory(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd> {
    let mut here = rustix::fs::openat2(root, ".", HANDLE | OFlags::DIRECTORY, Mode::empty(), RESOLVE)?;
    let mut rest = path;
    while !rest.is_empty() {
        let end = if rest.len() <= MAX_PATH {
            rest.len()
        } else {
            rest[..MAX_PATH].iter().rposition(|byte| *byte == b'/').ok_or(Errno::NAMETOOLONG)?
        };
        here = rustix::fs::openat2(&here, &rest[..end], HANDLE | OFlags::DIRECTORY, Mode::empty(), RESOLVE)?;
        rest = rest.get(end + 1..).unwrap_or_default();
    }
    Ok(here)
}

/// What lies at `name` in a directory, if anything does.
pub(crate) fn stat(dir: impl AsFd, name: &[u8]) -> Result<Option<Stat>> {
    let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
    match rustix::fs::statat(dir, name, flags) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// A handle of an entry, whatever its type and mode.
pub(crate) fn handle(dir: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    let name = if name.is_empty() { b"." } else { name };
    rustix::fs::openat2(dir, name, HANDLE, Mode::empty(), RESOLVE)
}

/// Sets the mode of what a handle stands for; fchmod does not take handles.
pub(crate) fn set_mode(handle: impl AsFd, mode: u16) -> Result<()> {
    rustix::fs::chmod(format!("/proc/self/fd/{}", handle.as_fd().as_raw_fd()), Mode::from_raw_mode(mode.into()))
}

/// The names in a directory that was opened for reading.
pub(crate) fn names(dir: impl AsFd) -> Result<Vec<Arc<[u8]>>> {
    let mut buffer = [MaybeUninit::uninit(); 32 << 10];
    let mut listing = RawDir::new(dir.as_fd(), &mut buffer);
    let mut names = Vec::new();
    while let Some(entry) = listing.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(Arc::from(name));
        }
    }
    Ok(names)
}
