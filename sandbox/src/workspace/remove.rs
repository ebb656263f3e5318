//! Removing a tree that a tool wrote: by descriptor, without recursion, whatever its depth and modes.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode};
use rustix::io::{Errno, Result};

use super::reach;

/// A directory on the way down, with what is still to be removed in it.
struct Level {
    name: Arc<[u8]>,
    pending: Vec<Arc<[u8]>>,
}

/// Removes the entry of a directory and everything below it. It is no error if there is none.
///
/// # Errors
/// What unlink(2) says; what could be removed until then is gone.
pub(crate) fn remove(dir: BorrowedFd<'_>, name: &[u8]) -> Result<()> {
    let Some(mut here) = enter_or_unlink(dir, name)? else { return Ok(()) };
    let mut levels = vec![Level { name: name.into(), pending: reach::names(&here)? }];
    while let Some(level) = levels.last_mut() {
        if let Some(name) = level.pending.pop() {
            if let Some(below) = enter_or_unlink(rustix::fd::AsFd::as_fd(&here), &name)? {
                levels.push(Level { name, pending: reach::names(&below)? });
                here = below;
            }
            continue;
        }
        let Some(done) = levels.pop() else { break };
        if levels.is_empty() {
            return rustix::fs::unlinkat(dir, &*done.name, AtFlags::REMOVEDIR);
        }
        here = rustix::fs::openat(&here, "..", reach::DIRECTORY, Mode::empty())?;
        rustix::fs::unlinkat(&here, &*done.name, AtFlags::REMOVEDIR)?;
    }
    Ok(())
}

/// Unlinks an entry, or opens it if it is a directory that holds something.
fn enter_or_unlink(dir: BorrowedFd<'_>, name: &[u8]) -> Result<Option<OwnedFd>> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(None),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(errno) => return Err(errno),
    }
    let handle = reach::handle(dir, name)?;
    reach::set_mode(&handle, 0o700)?;
    rustix::fs::openat2(dir, name, reach::DIRECTORY, Mode::empty(), reach::RESOLVE).map(Some)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, Permissions};
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn deep_locked_and_linked_trees_go_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("kept"), "x").unwrap();
        let mut here = OwnedFd::from(File::open(dir.path()).unwrap());
        for _ in 0..3000 {
            rustix::fs::mkdirat(&here, "deep", Mode::RWXU).unwrap();
            here = rustix::fs::openat(&here, "deep", reach::DIRECTORY, Mode::empty()).unwrap();
        }
        symlink(outside.path(), dir.path().join("deep/link")).unwrap();
        fs::create_dir(dir.path().join("deep/locked")).unwrap();
        fs::write(dir.path().join("deep/locked/file"), "x").unwrap();
        fs::set_permissions(dir.path().join("deep/locked"), Permissions::from_mode(0o000)).unwrap();
        fs::write(dir.path().join("beside"), "x").unwrap();
        let opened = File::open(dir.path()).unwrap();
        remove(opened.as_fd(), b"deep").unwrap();
        remove(opened.as_fd(), b"deep").unwrap();
        assert!(!dir.path().join("deep").exists());
        assert!(dir.path().join("beside").exists());
        assert!(outside.path().join("kept").exists());
    }
}
