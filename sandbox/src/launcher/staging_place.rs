//! Where the layers of calls lie: on the workspace's own mount, in directories that only root gets into.
//!
//! ```text
//! <state>/staging/                                    for private workspaces
//! <one of [workspace] staging>/<daemon>/              for workspaces on its mount, if one is named there
//! <one of [workspace] roots>/.agentd-staging/<daemon>/   else, for workspaces beneath that root and on its mount
//! <the mount's root>/.agentd-staging/<daemon>/        else
//! ```
//!
//! Daemons share a place and have a directory of their own in it, named after their state directory. Places that no
//! configuration names are noted in the launcher's directory, so that the next start finds what was left in them.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use serde::{Deserialize, Serialize};
use toolproto::ids::{CallId, JobId};

use super::peer::Peer;
use super::roots;
use super::state_dir::StateDir;
use crate::config;
use crate::file_identity::FileIdentity;
use crate::workspace::Owner;
use crate::workspace::staging::{self, StagingError, WorkspaceStaging};

/// The place's name beneath a root.
const NAME: &str = ".agentd-staging";
/// The place's name in the state directory.
const OF_STATE: &str = "staging";
/// The list of used places, in the launcher's directory.
const NOTED: &str = "staging-places";
/// The longest list that is read.
const MAX_NOTED: u64 = 1 << 20;

/// Whose a workspace is, as it stands in its staging directory for the next start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceNote {
    /// The caller's uid.
    pub uid: u32,
    /// The caller's gid.
    pub gid: u32,
    /// The caller's groups.
    pub groups: Vec<u32>,
    /// The workspace's path.
    pub path: PathBuf,
    /// Which directory it is.
    pub identity: LastingIdentity,
}

/// Which directory a workspace is, seen from its staging place and in words that hold after the next boot: a file system may
/// have another device number then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastingIdentity {
    /// The inode.
    pub inode: u64,
    /// The file system as statvfs(3) names it, where it is not the place's own: a subvolume on the same mount.
    pub subvolume: Option<u64>,
}

impl LastingIdentity {
    /// Of a directory on the mount of a staging place.
    ///
    /// # Errors
    /// As fstat(2) and statvfs(3).
    pub fn of(directory: BorrowedFd<'_>, place: BorrowedFd<'_>) -> std::io::Result<Self> {
        let (own, of_place) = (FileIdentity::of(directory)?, FileIdentity::of(place)?);
        let is_same = own.device == of_place.device;
        let subvolume = if is_same { None } else { Some(rustix::fs::fstatvfs(directory)?.f_fsid) };
        Ok(Self { inode: own.inode, subvolume })
    }

    /// The name of the workspace's directory in the place.
    #[must_use]
    pub fn name(self) -> String {
        match self.subvolume {
            None => self.inode.to_string(),
            Some(subvolume) => format!("{subvolume:x}-{}", self.inode),
        }
    }
}

impl WorkspaceNote {
    /// Whether a directory is the workspace, seen from its staging place.
    #[must_use]
    pub fn is(&self, directory: BorrowedFd<'_>, place: BorrowedFd<'_>) -> bool {
        LastingIdentity::of(directory, place).is_ok_and(|found| found == self.identity)
    }

    /// Whether the workspace is still where it was.
    #[must_use]
    pub fn is_there(&self, place: BorrowedFd<'_>) -> bool {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let found = rustix::fs::open(&self.path, flags, Mode::empty());
        found.is_ok_and(|found| mount_of(found.as_fd()) == mount_of(place) && self.is(found.as_fd(), place))
    }

    /// Whom the workspace's files belong to.
    #[must_use]
    pub const fn owner(&self) -> Owner {
        Owner { uid: self.uid, gid: self.gid }
    }
}

/// Whose a layer is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallNote {
    /// The job.
    pub job: JobId,
    /// The call.
    pub call: CallId,
    /// How many bytes of files it takes to keep what gave way to it.
    #[serde(default)]
    pub bytes: u64,
}

/// A rollback that is prepared or carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackNote {
    /// The job.
    pub job: JobId,
    /// The call.
    pub call: CallId,
    /// The last layer that was carried out before.
    pub from: u64,
    /// The last layer that is carried out afterwards.
    pub to: u64,
}

/// The places of one daemon.
#[derive(Debug)]
pub struct StagingPlaces {
    daemon: String,
    places: Vec<Place>,
}

#[derive(Debug)]
struct Place {
    /// Shared by all daemons.
    shared: OwnedFd,
    /// This daemon's directory in it.
    own: OwnedFd,
}

impl StagingPlaces {
    /// Opens every place that the configuration names or an earlier run has used. One that cannot be used is logged.
    #[must_use]
    pub fn open(state: &StateDir, config: &config::Workspace) -> Self {
        let hash = blake3::hash(state.path().as_os_str().as_encoded_bytes()).to_hex();
        let mut places = Self { daemon: hash[..16].to_owned(), places: Vec::new() };
        match staging::root(state.as_fd(), OF_STATE).and_then(|own| Ok((duplicate(&own)?, own))) {
            Ok((shared, own)) => places.places.push(Place { shared, own }),
            Err(error) => tracing::error!(%error, "the state directory has no staging directory"),
        }
        for path in &config.staging {
            if let Err(error) = parent(path).and_then(|(parent, name)| places.add(parent.as_fd(), &name)) {
                tracing::error!(%error, path = %path.display(), "a staging directory cannot be used");
            }
        }
        let of_roots = config.roots.iter().map(|root| root.join(NAME));
        for path in of_roots.chain(noted(state)) {
            // Not made before it is needed.
            if path.symlink_metadata().is_ok()
                && let Err(error) = parent(&path).and_then(|(parent, name)| places.add(parent.as_fd(), &name))
            {
                tracing::error!(%error, path = %path.display(), "a staging directory cannot be used");
            }
        }
        places
    }

    /// This daemon's directories.
    pub fn own(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.places.iter().map(|place| place.own.as_fd())
    }

    /// The directories that no workspace may hold or lie in.
    #[must_use]
    pub fn shared(&self) -> Vec<BorrowedFd<'_>> {
        self.places.iter().map(|place| place.shared.as_fd()).collect()
    }

    fn add(&mut self, parent: BorrowedFd<'_>, name: &str) -> Result<usize, StagingError> {
        let shared = staging::root(parent, name)?;
        let own = staging::root(shared.as_fd(), &self.daemon)?;
        let known = |place: &Place| FileIdentity::of(place.own.as_fd()).ok() == FileIdentity::of(own.as_fd()).ok();
        match self.places.iter().position(known) {
            Some(index) => Ok(index),
            None => {
                self.places.push(Place { shared, own });
                Ok(self.places.len() - 1)
            }
        }
    }

    /// Makes or opens a workspace's staging directory; none if there is no place on its mount.
    pub fn of_workspace(
        &mut self,
        (state, config): (&StateDir, &config::Workspace),
        peer: &Peer,
        path: &Path,
        workspace: BorrowedFd<'_>,
    ) -> Option<WorkspaceStaging> {
        let root = self.place_for((state, config), workspace)?;
        let identity = LastingIdentity::of(workspace, root).ok()?;
        let note = WorkspaceNote {
            uid: peer.uid,
            gid: peer.gid,
            groups: peer.groups.clone(),
            path: path.to_owned(),
            identity,
        };
        let noted = serde_json::to_vec(&note).ok()?;
        let made = WorkspaceStaging::open(root, &identity.name(), Owner { uid: peer.uid, gid: peer.gid })
            .and_then(|staging| staging.note_workspace(&noted).map(|()| staging));
        match made {
            Ok(staging) => Some(staging),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "no staging directory for the workspace");
                None
            }
        }
    }

    fn place_for(
        &mut self,
        (state, config): (&StateDir, &config::Workspace),
        workspace: BorrowedFd<'_>,
    ) -> Option<BorrowedFd<'_>> {
        let mount = mount_of(workspace)?;
        let is_there = |place: &Place| mount_of(place.own.as_fd()) == Some(mount);
        let above = roots::chain(workspace).ok()?;
        let of_state = FileIdentity::of(state.as_fd()).is_ok_and(|state| above.contains(&state));
        if of_state && self.places.first().is_some_and(is_there) {
            return self.own().next();
        }
        let configured = 1..(1 + config.staging.len()).min(self.places.len());
        if let Some(index) = configured.into_iter().find(|index| self.places.get(*index).is_some_and(is_there)) {
            return Some(self.places[index].own.as_fd());
        }
        let known = self.places.len();
        let mut made = None;
        for parent in parents_of(workspace, mount, &config.roots) {
            match self.add(parent.as_fd(), NAME) {
                Ok(index) => {
                    made = Some(index);
                    break;
                }
                Err(error) => tracing::warn!(%error, "a staging directory cannot be made"),
            }
        }
        if self.places.len() > known
            && let Some(place) = self.places.last()
            && let Err(error) = note(state, place)
        {
            tracing::error!(%error, "a staging directory is not noted; the next start may not find what is left in it");
        }
        Some(self.places[made?].own.as_fd())
    }
}

/// Where a place may lie for a workspace: in the configured root above it, or in the root of its mount.
fn parents_of(workspace: BorrowedFd<'_>, mount: Mount, roots: &[PathBuf]) -> Vec<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let roots: Vec<FileIdentity> = roots
        .iter()
        .filter_map(|root| FileIdentity::of(rustix::fs::open(root, flags, Mode::empty()).ok()?.as_fd()).ok())
        .collect();
    let mut parents = Vec::new();
    let mut highest: Option<(OwnedFd, FileIdentity)> = None;
    loop {
        let here = highest.as_ref().map_or(workspace, |(dir, _)| dir.as_fd());
        let Ok(above) = rustix::fs::openat(here, "..", flags | OFlags::NOFOLLOW, Mode::empty()) else { break };
        let Ok(identity) = FileIdentity::of(above.as_fd()) else { break };
        // The root of all is its own parent.
        let is_end =
            mount_of(above.as_fd()) != Some(mount) || highest.as_ref().is_some_and(|(_, own)| *own == identity);
        if is_end {
            break;
        }
        if roots.contains(&identity)
            && parents.is_empty()
            && let Ok(root) = above.try_clone()
        {
            parents.push(root);
        }
        highest = Some((above, identity));
    }
    parents.extend(highest.map(|(dir, _)| dir));
    parents
}

fn parent(path: &Path) -> Result<(OwnedFd, String), StagingError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = rustix::fs::open(path.parent().unwrap_or(Path::new("/")), flags, Mode::empty());
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok((parent.map_err(StagingError::from_parent)?, name))
}

fn duplicate(fd: &OwnedFd) -> Result<OwnedFd, StagingError> {
    rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(StagingError::from_parent)
}

/// The places that earlier runs have used.
fn noted(state: &StateDir) -> Vec<PathBuf> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut text = Vec::new();
    let read = rustix::fs::openat(state.launcher(), NOTED, flags, Mode::empty())
        .map_err(std::io::Error::from)
        .and_then(|file| File::from(file).take(MAX_NOTED).read_to_end(&mut text));
    match read {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            tracing::error!(%error, "the list of used staging directories cannot be read");
            return Vec::new();
        }
    }
    let paths = text.split(|byte| *byte == b'\0').filter(|path| !path.is_empty());
    paths.map(|path| PathBuf::from(std::ffi::OsString::from_vec(path.to_vec()))).collect()
}

fn note(state: &StateDir, place: &Place) -> std::io::Result<()> {
    let path = rustix::fs::readlink(format!("/proc/self/fd/{}", place.shared.as_raw_fd()), Vec::new())?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let list = rustix::fs::openat(state.launcher(), NOTED, flags, Mode::RUSR | Mode::WUSR)?;
    let mut list = File::from(list);
    list.write_all(path.to_bytes_with_nul())?;
    list.sync_all()?;
    Ok(rustix::fs::fsync(state.launcher())?)
}

/// Device and mount: what entries can be renamed within.
type Mount = (u32, u32, u64);

fn mount_of(fd: BorrowedFd<'_>) -> Option<Mount> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC as u32);
    let found = rustix::fs::statx(fd, "", flags, StatxFlags::MNT_ID).ok()?;
    Some((found.stx_dev_major, found.stx_dev_minor, found.stx_mnt_id))
}
