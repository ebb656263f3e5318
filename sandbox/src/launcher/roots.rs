//! Whether a directory may be a workspace, decided on its descriptor and never on its path.
//!
//! The worker opens the path as the caller and hands the descriptor up; its path may have changed since. So the launcher
//! walks from the descriptor to the root by `..`, and compares device and inode on the way.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::file_identity::FileIdentity;

/// More directories above each other than any path has (PATH_MAX is 4096 bytes).
const DEEPEST: usize = 4096;

/// The directory cannot be a workspace.
#[derive(Debug, thiserror::Error)]
pub enum RootsError {
    /// It is somebody else's.
    #[error("it belongs to uid {owner}, not to the caller (uid {caller})")]
    Owner {
        /// Its owner.
        owner: u32,
        /// Who asks.
        caller: u32,
    },
    /// It lies elsewhere.
    #[error("it is not below one of {}", list(.0))]
    NotBelow(Vec<PathBuf>),
    /// agentd's own files lie in it.
    #[error("agentd's state directory lies in it")]
    HoldsState,
    /// It lies among agentd's own files.
    #[error("it lies in agentd's state directory")]
    InState,
    /// It holds what calls write before it is committed, or lies there.
    #[error("agentd's staging directory lies in it, or it lies there; name a directory beside it")]
    Staging,
    /// The kernel refused.
    #[error("it cannot be looked at: {0}")]
    Look(Errno),
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Where workspaces may lie.
#[derive(Debug)]
pub struct Roots<'a> {
    /// Directories beneath which, or which themselves, may be workspaces.
    pub allowed: &'a [PathBuf],
    /// The directory of private workspaces; always allowed, for the workspaces in it.
    pub private: BorrowedFd<'a>,
    /// agentd's state directory.
    pub state: BorrowedFd<'a>,
    /// Where the layers of calls lie.
    pub staging: &'a [BorrowedFd<'a>],
}

impl Roots<'_> {
    /// Checks a directory for a caller.
    ///
    /// # Errors
    /// When it is not the caller's, lies elsewhere, or holds agentd's own files.
    pub fn check(&self, directory: BorrowedFd<'_>, caller: u32) -> Result<FileIdentity, RootsError> {
        let (own, owner) = look(directory)?;
        if owner != caller {
            return Err(RootsError::Owner { owner, caller });
        }
        let private = look(self.private)?.0;
        let state = look(self.state)?.0;
        let above = chain(directory)?;
        if chain(self.state)?.contains(&own) {
            return Err(RootsError::HoldsState);
        }
        for staging in self.staging {
            if chain(*staging)?.contains(&own) || above.contains(&look(*staging)?.0) {
                return Err(RootsError::Staging);
            }
        }
        // A job's private workspace, and what lies in it.
        if above[1..].contains(&private) {
            return Ok(own);
        }
        if above.contains(&state) {
            return Err(RootsError::InState);
        }
        // A root that does not exist, or not yet, allows nothing.
        let allowed = self.allowed.iter().filter_map(|root| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::open(root, flags, Mode::empty()).ok()?;
            Some(look(root.as_fd()).ok()?.0)
        });
        if allowed.into_iter().any(|root| above.contains(&root)) {
            return Ok(own);
        }
        Err(RootsError::NotBelow(self.allowed.to_vec()))
    }
}

/// The directory and all above it, from within outwards.
pub(super) fn chain(directory: BorrowedFd<'_>) -> Result<Vec<FileIdentity>, RootsError> {
    let mut found = vec![look(directory)?.0];
    let mut at: Option<OwnedFd> = None;
    for _ in 0..DEEPEST {
        let current = at.as_ref().map_or(directory, AsFd::as_fd);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parent = rustix::fs::openat(current, "..", flags, Mode::empty()).map_err(RootsError::Look)?;
        let identity = look(parent.as_fd())?.0;
        if found.last() == Some(&identity) {
            return Ok(found);
        }
        found.push(identity);
        at = Some(parent);
    }
    Err(RootsError::Look(Errno::NAMETOOLONG))
}

/// Identity and owner, as the kernel has them at hand: a caller's own file server (FUSE) is not asked, which could hold
/// the launcher up.
fn look(fd: BorrowedFd<'_>) -> Result<(FileIdentity, u32), RootsError> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC as u32);
    let found = rustix::fs::statx(fd, "", flags, StatxFlags::BASIC_STATS).map_err(RootsError::Look)?;
    let device = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor);
    Ok((FileIdentity { device, inode: found.stx_ino }, found.stx_uid))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::chown;
    use std::path::Path;

    use super::*;

    struct Place {
        top: tempfile::TempDir,
        state: File,
        private: File,
        allowed: Vec<PathBuf>,
    }

    impl Place {
        fn new() -> Self {
            let top = tempfile::tempdir().unwrap();
            let make = |path: &str| {
                fs::create_dir_all(top.path().join(path)).unwrap();
                File::open(top.path().join(path)).unwrap()
            };
            let (private, state) = (make("var/state/workspaces"), make("var/state"));
            make("srv/a/b");
            make("other");
            let allowed = vec![top.path().join("srv"), top.path().join("missing")];
            Self { top, state, private, allowed }
        }

        fn check(&self, path: impl AsRef<Path>, caller: u32) -> Result<FileIdentity, RootsError> {
            let directory = File::open(self.top.path().join(path)).unwrap();
            let roots = Roots {
                allowed: &self.allowed,
                private: self.private.as_fd(),
                state: self.state.as_fd(),
                staging: &[],
            };
            roots.check(directory.as_fd(), caller)
        }

        fn make(&self, path: &str, uid: u32) {
            fs::create_dir_all(self.top.path().join(path)).unwrap();
            chown(self.top.path().join(path), Some(uid), None).unwrap();
        }
    }

    #[test]
    fn below_a_root_and_the_root_itself_are_allowed_and_others_are_not() {
        let place = Place::new();
        assert!(place.check("srv/a/b", 0).is_ok());
        assert!(place.check("srv", 0).is_ok());
        assert!(matches!(place.check("other", 0), Err(RootsError::NotBelow(_))));
        assert!(matches!(place.check("", 0), Err(RootsError::HoldsState)));
    }

    #[test]
    fn only_the_owner_may_and_not_even_root_anothers() {
        let place = Place::new();
        place.make("srv/mine", 1000);
        assert!(place.check("srv/mine", 1000).is_ok());
        assert!(matches!(place.check("srv/mine", 1001), Err(RootsError::Owner { owner: 1000, caller: 1001 })));
        assert!(matches!(place.check("srv/mine", 0), Err(RootsError::Owner { .. })));
    }

    #[test]
    fn agentds_own_files_are_never_a_workspace() {
        let mut place = Place::new();
        place.allowed.push(place.top.path().to_owned());
        assert!(matches!(place.check("var", 0), Err(RootsError::HoldsState)));
        assert!(matches!(place.check("var/state", 0), Err(RootsError::HoldsState)));
        assert!(matches!(place.check("var/state/workspaces", 0), Err(RootsError::InState)));
        place.make("var/state/ledger", 69_999);
        assert!(matches!(place.check("var/state/ledger", 69_999), Err(RootsError::InState)));
        place.make("var/state/workspaces/job", 1000);
        assert!(place.check("var/state/workspaces/job", 1000).is_ok());
    }

    #[test]
    fn where_layers_lie_is_never_in_a_workspace_nor_one() {
        let place = Place::new();
        fs::create_dir_all(place.top.path().join("srv/.agentd-staging/daemon")).unwrap();
        let staging = File::open(place.top.path().join("srv/.agentd-staging")).unwrap();
        let check = |path: &str| {
            let directory = File::open(place.top.path().join(path)).unwrap();
            let (private, state) = (place.private.as_fd(), place.state.as_fd());
            let staging = &[staging.as_fd()];
            Roots { allowed: &place.allowed, private, state, staging }.check(directory.as_fd(), 0)
        };
        for path in ["srv", "srv/.agentd-staging", "srv/.agentd-staging/daemon"] {
            assert!(matches!(check(path), Err(RootsError::Staging)), "{path}");
        }
        assert!(check("srv/a").is_ok());
    }

    #[test]
    fn a_renamed_directory_is_judged_by_where_it_is() {
        let place = Place::new();
        let directory = File::open(place.top.path().join("srv/a/b")).unwrap();
        fs::rename(place.top.path().join("srv/a/b"), place.top.path().join("other/b")).unwrap();
        let roots =
            Roots { allowed: &place.allowed, private: place.private.as_fd(), state: place.state.as_fd(), staging: &[] };
        assert!(matches!(roots.check(directory.as_fd(), 0), Err(RootsError::NotBelow(_))));
    }
}
