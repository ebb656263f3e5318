//! The state directory: what the launcher makes of it while it is root.
//!
//! ```text
//! <state>             root     0711   passable, not listable
//!   ledger/           service  0700   agentd's own
//!   audit/            service  2750   the audit log, readable by the administrators' group
//!   launcher/         root     0700   lock, key, grants and notes of started calls
//!   workspaces/       root     0711   private workspaces, each 0700 and its caller's
//! ```

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use toolproto::ids::JobId;

use super::account::Account;
use crate::trusted::{Owners, TrustError, TrustedDir};

/// The audit log's directory within the state directory.
pub const AUDIT_DIR: &str = "audit";

/// The state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    /// Others can write it or a directory above.
    #[error("the state directory is refused: {0}")]
    Trust(#[from] TrustError),
    /// A part of it could not be made.
    #[error("failed to {action} {}", path.display())]
    Make {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another daemon uses it.
    #[error("another agentd uses the state directory {}; stop it first, or name another one with --state-dir", .0.display())]
    Busy(PathBuf),
}

/// A state directory that this launcher alone uses.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    directory: TrustedDir,
    launcher: TrustedDir,
    workspaces: TrustedDir,
    /// Released by the kernel when the launcher ends, however it ends.
    _lock: OwnedFd,
}

impl StateDir {
    /// Makes what is missing, corrects owners and modes, and takes the lock.
    ///
    /// # Errors
    /// When another daemon uses it, others can write it, or the file system refuses.
    pub fn open(path: &Path, account: Account) -> Result<Self, StateDirError> {
        let made = |action, path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| StateDirError::Make { action, path, source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o711).create(path).map_err(made("create", path))?;
        let directory = TrustedDir::open(path, Owners::RootOnly)?;
        let path = directory.path().to_owned();
        let part = |name: &str, owner: (u32, u32), mode: u32| {
            let part = path.join(name);
            make_directory(directory.as_fd(), name, owner, mode)
                .map_err(|error| made("set up", &part)(error.into()))?;
            Ok::<_, StateDirError>(part)
        };
        rustix::fs::fchmod(&directory, Mode::from_raw_mode(0o711))
            .map_err(|error| made("set the mode of", &path)(error.into()))?;
        let launcher = TrustedDir::open(&part("launcher", (0, 0), 0o700)?, Owners::RootOnly)?;
        part(&format!("launcher/{}", super::kept::DIRECTORY), (0, 0), 0o700)?;
        let lock = take_lock(&launcher).map_err(|error| match error {
            Errno::AGAIN | Errno::ACCESS => StateDirError::Busy(path.clone()),
            error => made("lock", launcher.path())(error.into()),
        })?;
        part("ledger", (account.uid, account.gid), 0o700)?;
        // What agentd makes in it belongs to the administrators' group, too.
        part(AUDIT_DIR, (account.uid, account.admin_group.unwrap_or(account.gid)), 0o2750)?;
        let workspaces = TrustedDir::open(&part("workspaces", (0, 0), 0o711)?, Owners::RootOnly)?;
        Ok(Self { path, directory, launcher, workspaces, _lock: lock })
    }

    /// Its path, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory that only root reads.
    #[must_use]
    pub const fn launcher(&self) -> &TrustedDir {
        &self.launcher
    }

    /// The directory of the private workspaces.
    #[must_use]
    pub const fn workspaces(&self) -> &TrustedDir {
        &self.workspaces
    }

    /// Makes a job's private workspace, empty and the caller's alone, and returns its path.
    ///
    /// # Errors
    /// As mkdir(2); EEXIST when the job has one already.
    pub fn make_workspace(&self, job: JobId, uid: u32, gid: u32) -> Result<PathBuf, StateDirError> {
        let name = job.to_string();
        let path = self.workspaces.path().join(&name);
        let failed =
            |source: Errno| StateDirError::Make { action: "create", path: path.clone(), source: source.into() };
        rustix::fs::mkdirat(&self.workspaces, name.as_str(), Mode::RWXU).map_err(failed)?;
        own(self.workspaces.as_fd(), &name, (uid, gid), 0o700).map_err(failed)?;
        Ok(path)
    }
}

impl AsFd for StateDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

fn make_directory(parent: BorrowedFd<'_>, name: &str, owner: (u32, u32), mode: u32) -> Result<(), Errno> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => own(parent, name, owner, mode),
        Err(error) => Err(error),
    }
}

fn own(parent: BorrowedFd<'_>, name: &str, (uid, gid): (u32, u32), mode: u32) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    rustix::fs::chownat(&directory, "", Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)?;
    rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode))
}

/// A lock of the process (not of the open file), so that no child holds it on.
fn take_lock(launcher: &TrustedDir) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = rustix::fs::openat(launcher, "lock", flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    const ACCOUNT: Account = Account { uid: 69_999, gid: 69_998, socket_group: 69_998, admin_group: None };

    #[test]
    fn owners_and_modes_are_set_and_corrected() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("new/state");
        for _ in 0..2 {
            drop(StateDir::open(&path, ACCOUNT).unwrap());
            let seen = |name: &str| {
                let found = fs::metadata(path.join(name)).unwrap();
                (found.uid(), found.gid(), found.mode() & 0o7777)
            };
            assert_eq!(seen(""), (0, 0, 0o711));
            assert_eq!(seen("ledger"), (69_999, 69_998, 0o700));
            assert_eq!(seen("launcher"), (0, 0, 0o700));
            assert_eq!(seen("workspaces"), (0, 0, 0o711));
            // Spoilt in between, as by a careless restore.
            fs::set_permissions(path.join("ledger"), fs::Permissions::from_mode(0o755)).unwrap();
            std::os::unix::fs::chown(path.join("ledger"), Some(0), Some(0)).unwrap();
        }
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("state");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(StateDir::open(&path, ACCOUNT), Err(StateDirError::Trust(_))));
    }

    #[test]
    fn a_private_workspace_is_its_callers_alone_and_made_once() {
        let top = tempfile::tempdir().unwrap();
        let state = StateDir::open(&top.path().join("state"), ACCOUNT).unwrap();
        let job = JobId::from_u128(7);
        let path = state.make_workspace(job, 1000, 1001).unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (1000, 1001, 0o700));
        assert!(state.make_workspace(job, 1002, 1002).is_err(), "a second time");
        assert_eq!(fs::metadata(&path).unwrap().uid(), 1000);
    }
}
