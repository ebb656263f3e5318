//! A program's folder as it was read, so that no call runs other files than those that its receipt names.
//!
//! At a call the folder is looked at again: each entry's inode, size and times, and a file's content only where those differ, or are
//! so young that they prove nothing. A folder of many entries is looked at once a second at most. What is edited while a
//! call runs is found at the next one.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use toolproto::digest::Digest;

use crate::workspace::scan::{TreeError, TreeLimits, rescan, scan};
use crate::workspace::tree::Tree;

/// A folder of more entries is not looked at for each call: that takes a microsecond or two for each of them.
const MOST_ENTRIES: usize = 256;
/// How long it is taken for unchanged then.
const TAKEN_FOR_UNCHANGED: Duration = Duration::from_secs(1);

/// The entries of a folder, and when they were looked at.
#[derive(Clone, Debug)]
pub(super) struct FolderAsRead {
    tree: Tree,
    looked_at: Instant,
}

/// Why a folder is not taken for what was read.
#[derive(Debug, thiserror::Error)]
pub enum FolderChanged {
    /// It has another digest.
    #[error("its files are not those that were read at the start or the last reload")]
    Differs,
    /// It cannot be opened.
    #[error("its folder cannot be opened: {0}")]
    Gone(#[source] rustix::io::Errno),
    /// It cannot be read.
    #[error("its folder cannot be read: {0}")]
    Unreadable(#[from] TreeError),
}

impl FolderAsRead {
    pub(super) fn read(folder: std::os::fd::BorrowedFd<'_>, now: Instant) -> Result<Self, TreeError> {
        Ok(Self { tree: scan(folder, &TreeLimits::default())?, looked_at: now })
    }

    pub(super) fn digest(&self) -> Digest {
        self.tree.digest()
    }

    /// Looks whether the folder is still what was read.
    pub(super) fn confirm(&mut self, folder: &Path, now: Instant) -> Result<(), FolderChanged> {
        if self.tree.len() > MOST_ENTRIES && now.duration_since(self.looked_at) < TAKEN_FOR_UNCHANGED {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(folder, flags, Mode::empty()).map_err(FolderChanged::Gone)?;
        let tree = rescan(std::os::fd::AsFd::as_fd(&opened), &TreeLimits::default(), Some(&self.tree))?;
        if tree.digest() != self.tree.digest() {
            return Err(FolderChanged::Differs);
        }
        // Its times may prove more than those of before.
        (self.tree, self.looked_at) = (tree, now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn read(folder: &Path, now: Instant) -> FolderAsRead {
        use std::os::fd::AsFd;
        FolderAsRead::read(fs::File::open(folder).unwrap().as_fd(), now).unwrap()
    }

    #[test]
    fn any_change_of_content_name_or_mode_is_seen_and_a_change_of_times_is_none() {
        let top = tempfile::tempdir().unwrap();
        let (folder, now) = (top.path().join("tool"), Instant::now());
        let main = folder.join("main.py");
        fs::create_dir(&folder).unwrap();
        fs::write(&main, "print(1)").unwrap();
        let known = read(&folder, now);
        let confirm = || known.clone().confirm(&folder, now);
        confirm().unwrap();
        fs::write(&main, "print(1)").unwrap();
        confirm().unwrap();
        fs::write(&main, "print(2)").unwrap();
        assert!(matches!(confirm(), Err(FolderChanged::Differs)), "the same length, within one tick of the clock");
        fs::write(&main, "print(1)").unwrap();
        fs::set_permissions(&main, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(confirm(), Err(FolderChanged::Differs)));
        fs::set_permissions(&main, fs::Permissions::from_mode(0o644)).unwrap();
        confirm().unwrap();
        fs::write(folder.join("json.py"), "").unwrap();
        assert!(matches!(confirm(), Err(FolderChanged::Differs)), "Python would import it");
        fs::rename(&folder, top.path().join("away")).unwrap();
        assert!(matches!(confirm(), Err(FolderChanged::Gone(_))));
    }

    #[test]
    fn a_large_folder_is_looked_at_now_and_then() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..=MOST_ENTRIES {
            fs::write(folder.path().join(number.to_string()), "").unwrap();
        }
        let now = Instant::now();
        let mut known = read(folder.path(), now);
        fs::write(folder.path().join("0"), "other").unwrap();
        known.confirm(folder.path(), now).unwrap();
        let later = now + TAKEN_FOR_UNCHANGED;
        assert!(matches!(known.confirm(folder.path(), later), Err(FolderChanged::Differs)));
        assert!(matches!(known.confirm(folder.path(), later), Err(FolderChanged::Differs)), "it stays refused");
    }
}
