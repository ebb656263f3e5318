//! What a call wrote and its workspace did not get, because somebody else had changed the same: kept for the workspace's owner.
//!
//! ```text
//! <beside the staging place>/.agentd-kept/    root, 0711
//!   <uid>/                                    the owner's, 0700: to be looked at, moved and removed as it likes
//!     <call>/                                 the call's layer: `upper` holds what it wrote
//! ```
//!
//! A deletion is a character device 0/0 in `upper`, or an empty file with the attribute `user.overlay.whiteout`.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use toolproto::ids::CallId;

use crate::workspace::Owner;
use crate::workspace::scan::permission_bits;
use crate::workspace::staging::WorkspaceStaging;

/// The directory's name.
const NAME: &str = ".agentd-kept";
/// Everybody may pass, nobody look around.
const PASSAGE: u16 = 0o711;

/// A place for what one call wrote.
#[derive(Debug)]
pub struct Aside {
    own: OwnedFd,
    call: CallId,
    /// Where it will lie.
    pub path: PathBuf,
}

impl Aside {
    /// Moves the call's layer there.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn take(&self, staging: &WorkspaceStaging, layer: u64) -> std::io::Result<()> {
        staging.give_away(layer, self.own.as_fd(), &self.call.to_string())
    }
}

/// Makes the place for what a call wrote, where the workspace's owner gets at it.
///
/// # Errors
/// When the file system refuses, or somebody else's directory has the place's name.
pub fn place_for(staging: &WorkspaceStaging, call: CallId) -> std::io::Result<Aside> {
    let mut place = rustix::fs::openat(staging.root(), "..", DIRECTORY, Mode::empty())?;
    // Daemons that share a place have directories of their own in it.
    if permission_bits(&rustix::fs::fstat(&place)?) & 0o001 == 0 {
        place = rustix::fs::openat(&place, "..", DIRECTORY, Mode::empty())?;
    }
    let all = directory(place.as_fd(), NAME, Owner { uid: 0, gid: 0 }, PASSAGE)?;
    let owner = staging.owner();
    let own = directory(all.as_fd(), &owner.uid.to_string(), owner, 0o700)?;
    let path = rustix::fs::readlink(format!("/proc/self/fd/{}", own.as_raw_fd()), Vec::new())?;
    let path = PathBuf::from(std::ffi::OsString::from_vec(path.into_bytes())).join(call.to_string());
    Ok(Aside { own, call, path })
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Makes or opens a directory; one that is there already must be that owner's and no wider.
fn directory(parent: BorrowedFd<'_>, name: &str, owner: Owner, mode: u16) -> std::io::Result<OwnedFd> {
    let is_new = match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno.into()),
    };
    let dir = rustix::fs::openat(parent, name, DIRECTORY, Mode::empty())?;
    if is_new {
        let (uid, gid) = (Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)));
        rustix::fs::chownat(&dir, "", uid, gid, AtFlags::EMPTY_PATH)?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode.into()))?;
        rustix::fs::fsync(parent)?;
    }
    let stat = rustix::fs::fstat(&dir)?;
    if stat.st_uid != owner.uid || permission_bits(&stat) & !mode & 0o022 != 0 {
        return Err(std::io::Error::other(format!("`{name}` is there already and is somebody else's")));
    }
    Ok(dir)
}
