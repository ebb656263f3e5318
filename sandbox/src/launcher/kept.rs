//! Grants that outlive the launcher: one small file per job of an agent, in a directory that only root reads, so that a job
//! goes on after a crash as the caller that submitted it, in the same workspace, with the same chain of evidence.
//!
//! A file is replaced whole. It is synced when the job is granted, before the submission is acknowledged; the chain's growth is
//! not, so that after a power cut the chain may be shorter than the ledger's, and then the job cannot go on.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use toolproto::digest::Digest;
use toolproto::ids::JobId;

use crate::file_identity::FileIdentity;
use crate::protocol::SliceLimits;

/// The directory below the launcher's own.
pub const DIRECTORY: &str = "grants";
/// The version of the files.
const VERSION: u32 = 1;
/// The largest file that is read.
const MAX_FILE: u64 = 4 << 20;

/// What is kept of a grant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    version: u32,
    /// The caller.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its supplementary groups.
    pub groups: Vec<u32>,
    /// Limits of the job's slice.
    pub limits: SliceLimits,
    /// The workspace.
    pub workspace: Option<KeptWorkspace>,
    /// The digests of the job's evidence so far.
    pub chain: Vec<Digest>,
}

/// A workspace by its path and by what cannot be forged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptWorkspace {
    /// The path.
    pub path: PathBuf,
    /// The file system's device number, which another boot may change.
    pub device: u64,
    /// The file system as statvfs(3) names it, which for most kinds is the same for ever.
    pub file_system: u64,
    /// The inode.
    pub inode: u64,
}

impl KeptWorkspace {
    /// A directory of this identity, at this path.
    ///
    /// # Errors
    /// As statvfs(3).
    pub fn of(path: PathBuf, directory: BorrowedFd<'_>, identity: FileIdentity) -> io::Result<Self> {
        let file_system = rustix::fs::fstatvfs(directory)?.f_fsid;
        Ok(Self { path, device: identity.device, file_system, inode: identity.inode })
    }

    /// Whether a directory is the same.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        self.inode == other.inode && (self.device == other.device || self.file_system == other.file_system)
    }
}

/// Whether a file must be on disk when writing returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durable {
    /// It must.
    Now,
    /// It need only outlive the process.
    Later,
}

impl Kept {
    /// What is kept of a caller's grant.
    #[must_use]
    pub fn new(
        (uid, gid, groups): (u32, u32, Vec<u32>),
        limits: SliceLimits,
        workspace: Option<KeptWorkspace>,
        chain: Vec<Digest>,
    ) -> Self {
        Self { version: VERSION, uid, gid, groups, limits, workspace, chain }
    }

    /// Keeps it, in place of what was kept of the job before.
    ///
    /// # Errors
    /// As open(2), write(2) and rename(2).
    pub fn write(&self, launcher: BorrowedFd<'_>, job: JobId, durable: Durable) -> io::Result<()> {
        let (new, name) = (format!("{DIRECTORY}/{job}.new"), file_of(job));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(launcher, &new, flags, Mode::RUSR | Mode::WUSR)?);
        file.write_all(&serde_json::to_vec(self)?)?;
        if durable == Durable::Now {
            file.sync_all()?;
        }
        rustix::fs::renameat(launcher, &new, launcher, &name)?;
        if durable == Durable::Now {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::fsync(rustix::fs::openat(launcher, DIRECTORY, flags, Mode::empty())?)?;
        }
        Ok(())
    }

    /// What was kept of a job; `None` when nothing was.
    ///
    /// # Errors
    /// When the file cannot be read, or is of another version.
    pub fn read(launcher: BorrowedFd<'_>, job: JobId) -> io::Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(launcher, file_of(job), flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut text = Vec::new();
        file.take(MAX_FILE).read_to_end(&mut text)?;
        let kept: Self = serde_json::from_slice(&text)?;
        if kept.version != VERSION {
            return Err(io::Error::other(format!("a kept grant of version {}", kept.version)));
        }
        Ok(Some(kept))
    }
}

/// Forgets a job.
///
/// # Errors
/// As unlink(2); a job of which nothing was kept is forgotten already.
pub fn forget(launcher: BorrowedFd<'_>, job: JobId) -> io::Result<()> {
    match rustix::fs::unlinkat(launcher, file_of(job), AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn file_of(job: JobId) -> String {
    format!("{DIRECTORY}/{job}")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn what_is_kept_is_read_back_and_forgotten() {
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir(top.path().join(DIRECTORY)).unwrap();
        let launcher = File::open(top.path()).unwrap();
        let job = JobId::from_u128(7);
        assert_eq!(Kept::read(launcher.as_fd(), job).unwrap(), None);
        let workspace = KeptWorkspace { path: "/srv/w".into(), device: 1, file_system: 3, inode: 2 };
        let mut kept =
            Kept::new((1000, 1001, vec![4]), SliceLimits::default(), Some(workspace), vec![Digest::sha256(b"a")]);
        kept.write(launcher.as_fd(), job, Durable::Now).unwrap();
        kept.chain.push(Digest::sha256(b"b"));
        kept.write(launcher.as_fd(), job, Durable::Later).unwrap();
        assert_eq!(Kept::read(launcher.as_fd(), job).unwrap(), Some(kept));
        forget(launcher.as_fd(), job).unwrap();
        forget(launcher.as_fd(), job).unwrap();
        assert_eq!(Kept::read(launcher.as_fd(), job).unwrap(), None);
    }

    #[test]
    fn a_workspace_is_the_same_after_a_boot_that_numbers_devices_anew() {
        let kept = KeptWorkspace { path: "/srv/w".into(), device: 1, file_system: 3, inode: 2 };
        assert!(kept.is(&KeptWorkspace { device: 7, ..kept.clone() }));
        assert!(kept.is(&KeptWorkspace { file_system: 7, ..kept.clone() }));
        assert!(!kept.is(&KeptWorkspace { device: 7, file_system: 7, ..kept.clone() }));
        assert!(!kept.is(&KeptWorkspace { inode: 7, ..kept.clone() }));
    }

    #[test]
    fn a_damaged_file_is_an_error_and_no_grant() {
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir(top.path().join(DIRECTORY)).unwrap();
        let launcher = File::open(top.path()).unwrap();
        let job = JobId::from_u128(7);
        std::fs::write(top.path().join(file_of(job)), "{").unwrap();
        assert!(Kept::read(launcher.as_fd(), job).is_err());
    }
}
