//! The directories that a workspace's changes pass through, made by the launcher.
//!
//! ```text
//! <root>                         root, 0700: nobody but root gets here by path
//!   <workspace>/                 root, 0700; named by device and inode
//!     files/                     the workspace owner's: what the worker works in, given to it as a descriptor
//!       <layer's number>/        upper/, undo/, journal
//!     work/                      root's: overlayfs's work directories
//!       <layer's number>/
//!     calls/                     root's: which call a layer belongs to
//!     workspace                  root's: whose workspace it is, and where it lies
//! ```
//!
//! The staging root lies on the workspace's file system and is reached through the same mount, so that entries can be
//! renamed between both, and never inside a workspace. Jobs that have the same workspace share its directory; each layer
//! is one call's.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, RenameFlags, Uid};
use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions};

use super::journal;
use super::reach;
use super::remove::remove;
use super::view::LayerPaths;
use super::{Owner, scan::permission_bits};
use crate::sys::worker_process::fork_running;

/// A staging directory that cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("failed to {action} the staging directory `{name}`")]
pub struct StagingError {
    action: &'static str,
    name: String,
    #[source]
    source: io::Error,
}

impl StagingError {
    /// The directory that a staging root lies in cannot be opened.
    #[must_use]
    pub fn from_parent(errno: Errno) -> Self {
        Self { action: "open the directory of", name: ".".to_owned(), source: errno.into() }
    }
}

/// A workspace's staging directory, from the launcher's side.
#[derive(Debug)]
pub struct WorkspaceStaging {
    root: OwnedFd,
    name: String,
    dir: OwnedFd,
    files: OwnedFd,
    owner: Owner,
}

/// Makes or opens a staging root in a directory; it must be root's, and nobody else's.
///
/// # Errors
/// When it cannot be made, or what is there is not root's alone.
pub fn root(parent: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, StagingError> {
    let dir = make(parent, name)?;
    let stat = rustix::fs::fstat(&dir).map_err(on("examine", name))?;
    if stat.st_uid != 0 || permission_bits(&stat) & 0o077 != 0 {
        let source = io::Error::new(io::ErrorKind::PermissionDenied, "it does not belong to root alone");
        return Err(StagingError { action: "use", name: name.to_owned(), source });
    }
    Ok(dir)
}

impl WorkspaceStaging {
    /// Makes or opens the workspace's directory below a staging root.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn open(root: BorrowedFd<'_>, workspace: &str, owner: Owner) -> Result<Self, StagingError> {
        let dir = make(root, workspace)?;
        let files = make(dir.as_fd(), "files")?;
        give(&files, owner, "files")?;
        for part in ["work", "calls"] {
            make(dir.as_fd(), part)?;
        }
        let root = root.try_clone_to_owned().map_err(|source| StagingError {
            action: "keep",
            name: workspace.to_owned(),
            source,
        })?;
        Ok(Self { root, name: workspace.to_owned(), dir, files, owner })
    }

    /// The staging root that it lies in.
    #[must_use]
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// What the worker works in.
    #[must_use]
    pub fn files(&self) -> BorrowedFd<'_> {
        self.files.as_fd()
    }

    /// The directory below which [`LayerPaths`] lie.
    #[must_use]
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// Opens the workspace's directory if it is there.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn find(root: BorrowedFd<'_>, workspace: &str, owner: Owner) -> Result<Option<Self>, StagingError> {
        match rustix::fs::statat(root, workspace, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Self::open(root, workspace, owner).map(Some),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(on("examine", workspace)(errno)),
        }
    }

    /// Notes durably whose workspace this is, for whoever finds the directory after a crash.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn note_workspace(&self, note: &[u8]) -> Result<(), StagingError> {
        if read(self.dir.as_fd(), WORKSPACE_NOTE).is_ok_and(|noted| noted == note) {
            return Ok(());
        }
        write(self.dir.as_fd(), WORKSPACE_NOTE, note)
    }

    /// Notes durably which call a layer belongs to.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn note_call(&self, number: u64, note: &[u8]) -> Result<(), StagingError> {
        write(open(self.dir.as_fd(), "calls")?.as_fd(), &number.to_string(), note)
    }

    /// What a layer's or a rollback's call was noted with; none if nothing was.
    #[must_use]
    pub fn noted(&self, name: &str) -> Option<Vec<u8>> {
        read(open(self.dir.as_fd(), "calls").ok()?.as_fd(), name).ok()
    }

    /// Notes durably the highest layer that was dropped from the undo store: no state before its end can be gone to.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn note_floor(&self, layer: u64) -> Result<(), StagingError> {
        write(self.dir.as_fd(), FLOOR_NOTE, layer.to_string().as_bytes())
    }

    /// The highest layer that was dropped from the undo store; 0 if none was.
    #[must_use]
    pub fn floor(&self) -> u64 {
        read(self.dir.as_fd(), FLOOR_NOTE).ok().and_then(|noted| number_of(&noted)).unwrap_or(0)
    }

    /// Notes durably that a rollback is prepared.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn note_rollback(&self, note: &[u8]) -> Result<(), StagingError> {
        write(self.dir.as_fd(), ROLLBACK_NOTE, note)
    }

    /// A rollback is carried out, and stays known under its call; or, without one, is not wanted.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn close_rollback(&self, call: Option<&str>) -> Result<(), StagingError> {
        let closed = match call {
            Some(call) => rustix::fs::renameat(&self.dir, ROLLBACK_NOTE, open(self.dir.as_fd(), "calls")?, call),
            None => rustix::fs::unlinkat(&self.dir, ROLLBACK_NOTE, AtFlags::empty()),
        };
        match closed {
            Ok(()) | Err(Errno::NOENT) => rustix::fs::fsync(&self.dir).map_err(on("close", ROLLBACK_NOTE)),
            Err(errno) => Err(on("close", ROLLBACK_NOTE)(errno)),
        }
    }

    /// A number above those of all layers of which anything is left: overlayfs refuses a work directory that was used.
    ///
    /// # Errors
    /// When the layers cannot be listed.
    pub fn next_number(&self) -> Result<u64, StagingError> {
        let mut highest = 0;
        for part in ["files", "work", "calls"] {
            let names = reach::names(open(self.dir.as_fd(), part)?).map_err(on("list", part))?;
            let numbers = names.iter().filter_map(|name| number_of(name.split(|byte| *byte == b'.').next()?));
            highest = numbers.max().unwrap_or(0).max(highest);
        }
        Ok(highest + 1)
    }

    /// The layers that lie here.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn layers(&self) -> Result<Vec<LeftLayer>, StagingError> {
        layers_in(self.dir.as_fd(), &self.name)
    }

    /// Removes layers, in a process of its own that nobody waits for: what tools wrote as the owner.
    ///
    /// # Errors
    /// When no process can be made.
    pub fn remove_layers(&self, numbers: &[u64]) -> io::Result<()> {
        if numbers.is_empty() {
            return Ok(());
        }
        // What is not there any more is not found at the next start.
        for number in numbers {
            let (name, gone) = (number.to_string(), format!("{number}.gone"));
            match rustix::fs::renameat(&self.files, &*name, &self.files, &*gone) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        in_the_background(|| {
            let is_removed = as_owner(self.owner, || {
                numbers.iter().all(|number| remove(self.files.as_fd(), format!("{number}.gone").as_bytes()).is_ok())
            });
            i32::from(!(is_removed && numbers.iter().all(|number| self.remove_roots_part(*number).is_ok())))
        })
    }

    /// Moves a layer away, with everything that its call wrote, to a new name in another directory of the same mount.
    ///
    /// # Errors
    /// When the file system refuses, or there is such a name already.
    pub fn give_away(&self, number: u64, to: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        rustix::fs::renameat_with(&self.files, number.to_string(), to, name, RenameFlags::NOREPLACE)?;
        rustix::fs::fsync(to)?;
        self.remove_layers(&[number])
    }

    /// Whom the workspace's files belong to.
    #[must_use]
    pub const fn owner(&self) -> Owner {
        self.owner
    }

    fn remove_roots_part(&self, number: u64) -> Result<(), StagingError> {
        for part in ["work", "calls"] {
            let dir = open(self.dir.as_fd(), part)?;
            remove(dir.as_fd(), number.to_string().as_bytes()).map_err(on("remove", part))?;
        }
        Ok(())
    }

    /// Removes the whole directory, in a process of its own that nobody waits for.
    ///
    /// # Errors
    /// When no process can be made.
    pub fn remove(mut self) -> io::Result<()> {
        // The workspace may be used again at once, and then gets a directory of the same name.
        if !self.name.contains(GONE) {
            let gone = format!("{}{GONE}{}-{}", self.name, std::process::id(), self.dir.as_raw_fd());
            rustix::fs::renameat(&self.root, &*self.name, &self.root, &*gone)?;
            self.name = gone;
        }
        in_the_background(|| {
            let is_removed = as_owner(self.owner, || {
                let names = reach::names(&self.files).unwrap_or_default();
                names.iter().all(|name| remove(self.files.as_fd(), name).is_ok())
            });
            i32::from(!(is_removed && remove(self.root.as_fd(), self.name.as_bytes()).is_ok()))
        })
    }

    /// Makes the empty layer of one call; its root looks like the workspace's, since a sandbox sees the layer's.
    ///
    /// # Errors
    /// When the file system refuses, or the number was used before.
    pub fn make_layer(&self, number: u64, workspace: BorrowedFd<'_>) -> Result<LayerPaths, StagingError> {
        let name = number.to_string();
        rustix::fs::mkdirat(&self.files, &*name, Mode::RWXU).map_err(on("make", &name))?;
        let call = open(self.files.as_fd(), &name)?;
        for part in ["upper", "undo"] {
            give(&make(call.as_fd(), part)?, self.owner, part)?;
        }
        give(&call, self.owner, &name)?;
        let upper = open(call.as_fd(), "upper")?;
        let stat = rustix::fs::fstat(workspace).map_err(on("examine", &name))?;
        let owners = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        rustix::fs::fchown(&upper, Some(owners.0), Some(owners.1)).map_err(on("give away", &name))?;
        rustix::fs::fchmod(&upper, Mode::from_raw_mode(stat.st_mode)).map_err(on("set the mode of", &name))?;
        let work = open(self.dir.as_fd(), "work")?;
        make(work.as_fd(), &name)?;
        Ok(LayerPaths { upper: format!("files/{name}/upper"), work: format!("work/{name}") })
    }
}

/// Runs in a process that is nobody's child to reap: forked twice.
fn in_the_background(action: impl FnOnce() -> i32) -> io::Result<()> {
    let helper = fork_running(|| match fork_running(action) {
        Ok(_) => 0,
        Err(_) => 1,
    })?;
    let status = rustix::process::waitid(WaitId::PidFd(helper.as_fd()), WaitIdOptions::EXITED)?;
    match status.and_then(|status| status.exit_status()) {
        Some(0) => Ok(()),
        _ => Err(io::Error::other("the removing process could not be made")),
    }
}

/// Runs in a process that has the owner's rights only, and waits for it. Whether it could all be done.
fn as_owner(owner: Owner, action: impl FnOnce() -> bool) -> bool {
    let child = fork_running(|| {
        let (uid, gid) = (owner.uid.into(), owner.gid.into());
        let dropped = nix::unistd::setgroups(&[])
            .and_then(|()| nix::unistd::setresgid(gid, gid, gid))
            .and_then(|()| nix::unistd::setresuid(uid, uid, uid));
        i32::from(!(dropped.is_ok() && action()))
    });
    let waited =
        child.and_then(|child| Ok(rustix::process::waitid(WaitId::PidFd(child.as_fd()), WaitIdOptions::EXITED)?));
    matches!(waited.map(|status| status.and_then(|status| status.exit_status())), Ok(Some(0)))
}

/// A workspace's directory that an earlier run left.
#[derive(Debug)]
pub struct Leftover {
    /// Its name.
    pub name: String,
    /// What [`WorkspaceStaging::note_workspace`] noted; empty if the launcher ended before.
    pub note: Vec<u8>,
    /// Its layers.
    pub layers: Vec<LeftLayer>,
    /// What [`WorkspaceStaging::note_rollback`] noted, if a rollback is prepared.
    pub rollback: Option<Vec<u8>>,
}

/// A layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftLayer {
    /// Its number.
    pub number: u64,
    /// What [`WorkspaceStaging::note_call`] noted; empty if the launcher ended before.
    pub note: Vec<u8>,
    /// How far its commit has come.
    pub standing: Standing,
}

/// How far a layer's commit has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// There is none.
    Loose,
    /// It is prepared, and perhaps carried out in part.
    Prepared,
    /// It is carried out.
    Applied,
    /// A rollback has taken it back.
    Undone,
}

impl Standing {
    /// Where the layer of this number stands.
    pub(crate) fn of(files: BorrowedFd<'_>, number: u64) -> Self {
        let holds =
            |journal| rustix::fs::statat(files, format!("{number}/{journal}"), AtFlags::SYMLINK_NOFOLLOW).is_ok();
        if holds(journal::NAME) {
            Self::Prepared
        } else if holds(journal::APPLIED) {
            Self::Applied
        } else if holds(journal::UNDONE) {
            Self::Undone
        } else {
            Self::Loose
        }
    }
}

/// What earlier runs left below a staging root.
///
/// # Errors
/// When the root cannot be read.
pub fn leftovers(root: BorrowedFd<'_>) -> Result<Vec<Leftover>, StagingError> {
    let mut found = Vec::new();
    for name in reach::names(root).map_err(on("list", "."))? {
        let Ok(name) = String::from_utf8(name.to_vec()) else { continue };
        let dir = match open(root, &name) {
            Ok(dir) => dir,
            // Somebody was still removing it.
            Err(error) if error.source.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let note = read(dir.as_fd(), WORKSPACE_NOTE).unwrap_or_default();
        // One that is being removed has nothing to tell.
        let layers = if name.contains(GONE) { Vec::new() } else { layers_in(dir.as_fd(), &name)? };
        let rollback = read(dir.as_fd(), ROLLBACK_NOTE).ok();
        found.push(Leftover { name, note, layers, rollback });
    }
    Ok(found)
}

fn layers_in(dir: BorrowedFd<'_>, name: &str) -> Result<Vec<LeftLayer>, StagingError> {
    let (Ok(calls), Ok(files)) = (open(dir, "calls"), open(dir, "files")) else { return Ok(Vec::new()) };
    let mut layers = Vec::new();
    for number in reach::names(&files).map_err(on("list", name))?.iter().filter_map(|name| number_of(name)) {
        let standing = Standing::of(files.as_fd(), number);
        let note = read(calls.as_fd(), &number.to_string()).unwrap_or_default();
        layers.push(LeftLayer { number, note, standing });
    }
    layers.sort_unstable_by_key(|layer| layer.number);
    Ok(layers)
}

fn number_of(name: &[u8]) -> Option<u64> {
    std::str::from_utf8(name).ok()?.parse().ok()
}

/// The name of the note about a workspace.
const WORKSPACE_NOTE: &str = "workspace";
/// The name of the note about what was dropped.
const FLOOR_NOTE: &str = "floor";
/// The name of the note about a prepared rollback.
const ROLLBACK_NOTE: &str = "rollback";
/// What the name of a directory that is being removed has in it.
const GONE: &str = ".gone-";
/// Longer than any note.
const MAX_NOTE: u64 = 1 << 20;

/// The name of what is not written to its end yet.
const UNFINISHED: &str = "unfinished";

/// Writes a note durably, and whole or not at all: the launcher may be killed at any instant, and the note before this one counts
/// until then.
fn write(dir: BorrowedFd<'_>, name: &str, content: &[u8]) -> Result<(), StagingError> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(dir, UNFINISHED, flags, Mode::RUSR | Mode::WUSR).map_err(on("note in", name))?;
    let mut file = File::from(opened);
    file.write_all(content).and_then(|()| file.sync_all()).map_err(|source| StagingError {
        action: "note in",
        name: name.to_owned(),
        source,
    })?;
    rustix::fs::renameat(dir, UNFINISHED, dir, name).map_err(on("note in", name))?;
    rustix::fs::fsync(dir).map_err(on("note in", name))
}

fn read(dir: BorrowedFd<'_>, name: &str) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut content = Vec::new();
    File::from(rustix::fs::openat(dir, name, flags, Mode::empty())?).take(MAX_NOTE).read_to_end(&mut content)?;
    Ok(content)
}

fn make(parent: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, StagingError> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => open(parent, name),
        Err(errno) => Err(on("make", name)(errno)),
    }
}

fn open(parent: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, StagingError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), reach::RESOLVE).map_err(on("open", name))
}

fn give(dir: &OwnedFd, owner: Owner, name: &str) -> Result<(), StagingError> {
    let owners = (Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)));
    rustix::fs::chownat(dir, "", owners.0, owners.1, AtFlags::EMPTY_PATH).map_err(on("give away", name))
}

fn on(action: &'static str, name: &str) -> impl Fn(Errno) -> StagingError {
    move |errno| StagingError { action, name: name.to_owned(), source: errno.into() }
}
