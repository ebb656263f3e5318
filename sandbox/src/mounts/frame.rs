//! The frame of a root: all of it that the next call of the same program under the same policy would make again.
//!
//! ```text
//!   first call:  new namespace ── frame made ──► left to the launcher ──► copied ── the call's own mounts ──► tool
//!   later call:  the frame's namespace entered ─────────────────────────► copied ── the call's own mounts ──► tool
//! ```
//!
//! No tool is ever in the namespace of a frame, and nothing in a frame can be written by one. One sandbox at a time has a
//! copy of it, and all that ever have are of one user: who keeps a file of it open beyond the call's end, as by sending the
//! descriptor out of the sandbox, can learn of no one else's calls.
//!
//! Every source on the host is opened before the host's root is left, so nothing that is mounted can hide or replace a
//! source, and no path of the host is looked up once the tool's files are in reach.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, chmodat, fstat, makedev, mkdirat, mknodat, openat, symlinkat};
use rustix::io::Errno;
use rustix::mount::{
    MountAttrFlags, MountFlags, MountPropagationFlags, OpenTreeFlags, UnmountFlags, mount_change, mount_remount,
    open_tree, unmount,
};
use rustix::process::{chdir, fchdir, pivot_root};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::{StandIn, attach, cover, tmpfs};
use crate::descriptors;
use crate::file_identity::FileIdentity;
use crate::plan::Place;
use crate::sys::mount::{Attributes, set_attributes};
use crate::sys::process::unshare;

/// Devices that every program may expect: name, major, minor (`Documentation/admin-guide/devices.txt`).
const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

/// Links in /dev, by their targets.
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// What a frame is made of, and for whom. Equal layouts make equal frames, as long as nothing is mounted or unmounted on the
/// host. One thing escapes that: what is mounted in a directory outside that is then moved, with the mount, into one that is
/// shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// In their order.
    pub(crate) entries: Vec<Entry>,
    /// Where the workspace will stand.
    pub(crate) place: Place,
    /// The uid of whose calls it is for.
    pub(crate) user: u32,
}

/// Something at a place in the root, named without the leading slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A file or tree of the host, read-only.
    Bind {
        /// On the host.
        source: PathBuf,
        /// What lies there: another file of this name makes another frame.
        file: FileIdentity,
        /// In the root.
        target: PathBuf,
    },
    /// A symbolic link.
    Link {
        /// In the root.
        target: PathBuf,
        /// What it says.
        to: PathBuf,
    },
    /// A made file, mode 0644, root's.
    File {
        /// In the root.
        target: PathBuf,
        /// What is in it.
        content: String,
    },
    /// An empty, read-only stand-in for a file or directory below a bind.
    Hide {
        /// What lies there on the host.
        file: FileIdentity,
        /// In the root.
        target: PathBuf,
    },
}

impl Entry {
    /// Where it stands.
    pub(crate) fn target(&self) -> &Path {
        match self {
            Self::Bind { target, .. }
            | Self::Link { target, .. }
            | Self::File { target, .. }
            | Self::Hide { target, .. } => target,
        }
    }
}

/// The user of a sandbox, as programs look it up. Each call has one of its own.
#[derive(Clone, Debug)]
pub(crate) struct Accounts([(&'static str, String); 2]);

impl Accounts {
    /// Of a user and group of this number.
    pub(crate) fn of(id: u32) -> Self {
        Self([
            ("etc/passwd", format!("root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:{id}:{id}:agent:/tmp:/bin/sh\n")),
            ("etc/group", format!("root:x:0:\nagent:x:{id}:\n")),
        ])
    }

    /// The files that name it, from the root, without the leading slash.
    #[cfg(test)]
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(path, _)| *path)
    }

    fn write(&self, root: BorrowedFd<'_>) -> io::Result<()> {
        for (path, content) in &self.0 {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = openat(root, *path, flags, Mode::from_raw_mode(0o644))?;
            io::Write::write_all(&mut std::fs::File::from(file), content.as_bytes())?;
        }
        Ok(())
    }
}

/// How a sandbox comes by the frame of its root.
#[derive(Debug)]
pub(crate) enum Framing {
    /// It makes one, which ends with it.
    Own,
    /// It makes one, which it leaves to others.
    Leave(Age),
    /// Another one has left it.
    Kept(Frame),
}

/// How often the mounts of the host had changed before a frame was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Age(pub(crate) u64);

/// A frame that a sandbox has left.
#[derive(Debug)]
pub struct Frame {
    layout: Layout,
    age: Age,
    namespace: OwnedFd,
    /// The root of it, which can be written here.
    root: OwnedFd,
}

impl Frame {
    #[cfg(test)]
    pub(crate) fn new(layout: Layout, age: Age, namespace: OwnedFd, root: OwnedFd) -> Self {
        Self { layout, age, namespace, root }
    }

    #[cfg(test)]
    pub(crate) fn user(&self) -> u32 {
        self.layout.user
    }

    /// Takes in what [`make`] has left; absent when there is nothing.
    pub(crate) fn receive(from: BorrowedFd<'_>, layout: Layout, age: Age) -> io::Result<Option<Self>> {
        let mut received = descriptors::receive(from)?.into_iter();
        Ok(match (received.next(), received.next()) {
            (Some(namespace), Some(root)) => Some(Self { layout, age, namespace, root }),
            _ => None,
        })
    }

    /// Whether it is one of this layout.
    pub(crate) fn is_of(&self, layout: &Layout) -> bool {
        self.layout == *layout
    }

    /// When it was made.
    pub(crate) const fn age(&self) -> Age {
        self.age
    }

    /// Names the user of the sandbox that is to enter it.
    pub(crate) fn name(&self, accounts: &Accounts) -> io::Result<()> {
        accounts.write(self.root.as_fd())
    }

    /// Goes there. The caller leaves it for a copy before it changes anything.
    pub(crate) fn enter(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Mount))?)
    }
}

/// Makes a frame in the caller's new mount namespace, and goes there; the host's files are out of reach afterwards. If it is
/// to be left to somebody, the caller is in a copy of it then.
pub(super) fn make(layout: &Layout, accounts: &Accounts, left_to: Option<BorrowedFd<'_>>) -> io::Result<()> {
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    let namespace = left_to.map(|to| Ok::<_, io::Error>((to, open_own_namespace()?))).transpose()?;
    let sources = layout.entries.iter().map(Source::open).collect::<io::Result<Vec<_>>>()?;
    let is_as_planned = sources.iter().flatten().all(|source| source.is_as_planned);
    let base = tmpfs(&[("mode", "0755"), ("size", "16m"), ("nr_inodes", "4096")], MountAttrFlags::MOUNT_ATTR_NOSUID)?;
    // Any directory that every host has will do: it is hidden until the pivot, in this mount namespace only.
    attach(&base, Path::new("/proc"))?;
    fchdir(&base)?;
    pivot_root(".", ".")?;
    // The old root now lies on top of the new one.
    unmount(".", UnmountFlags::DETACH)?;
    // From here on no link leads out.
    chdir("/")?;
    for directory in ["proc", "sys/fs/cgroup", "run", "var", "tmp"] {
        make_directories(Path::new(directory))?;
    }
    let place_of_workspace = layout.place.in_root();
    make_directories(&place_of_workspace)?;
    if layout.place == Place::Late {
        symlinkat(&place_of_workspace, CWD, Place::Usual.in_root())?;
    }
    symlinkat("/tmp", CWD, "var/tmp")?;
    symlinkat("/run", CWD, "var/run")?;
    make_dev()?;
    for (entry, source) in layout.entries.iter().zip(sources) {
        place(entry, source)?;
    }
    accounts.write(CWD)?;
    // A frame whose sources have changed meanwhile would be taken for another one.
    let left = namespace.filter(|_| is_as_planned).map(|(to, namespace)| {
        let root = open_tree(CWD, ".", OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
        Ok::<_, io::Error>((to, [namespace, root]))
    });
    let left = left.transpose()?;
    make_read_only("/dev")?;
    make_read_only("/")?;
    if let Some((to, descriptors)) = left {
        descriptors::send(to, &descriptors.each_ref().map(AsFd::as_fd))?;
        unshare(UnshareFlags::NEWNS)?;
    }
    Ok(())
}

/// Hides again, in the caller's copy of a frame, what has come to light: the host has put another file in its place, which
/// took the cover away in every mount namespace (rename(2), unlink(2)).
pub(super) fn cover_anew(layout: &Layout) -> io::Result<()> {
    if !layout.entries.iter().any(|entry| matches!(entry, Entry::Hide { .. })) {
        return Ok(());
    }
    // That something is mounted there says nothing: it may be the host's.
    let stand_in = |stand_in: StandIn| file_at(Path::new(stand_in.path()));
    let stand_ins = [stand_in(StandIn::Directory)?, stand_in(StandIn::File)?];
    for entry in &layout.entries {
        let Entry::Hide { target, .. } = entry else { continue };
        if !stand_ins.contains(&file_at(target)?) {
            cover(target)?;
        }
    }
    Ok(())
}

fn file_at(path: &Path) -> io::Result<FileIdentity> {
    Ok(FileIdentity::from(&rustix::fs::lstat(path)?))
}

fn open_own_namespace() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open("/proc/thread-self/ns/mnt", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A detached copy of the mounts at a bind's source, read-only, and cut off from the host's.
pub(crate) struct Source {
    tree: OwnedFd,
    is_directory: bool,
    is_as_planned: bool,
}

impl Source {
    /// Opens what an entry shows of the host, if it shows anything.
    pub(crate) fn open(entry: &Entry) -> io::Result<Option<Self>> {
        let Entry::Bind { source, file, .. } = entry else { return Ok(None) };
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
        let tree = open_tree(CWD, source, flags | OpenTreeFlags::AT_SYMLINK_NOFOLLOW)?;
        set_attributes(tree.as_fd(), Attributes::CUT_OFF)?;
        let found = fstat(&tree)?;
        let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let is_as_planned = *file == FileIdentity::from(&found);
        Ok(Some(Self { tree, is_directory, is_as_planned }))
    }
}

/// Puts an entry into the root that is the working directory.
pub(super) fn place(entry: &Entry, source: Option<Source>) -> io::Result<()> {
    match entry {
        Entry::Bind { target, .. } => {
            let Some(source) = source else { return Ok(()) };
            make_place(target, source.is_directory)?;
            attach(&source.tree, target)?;
        }
        Entry::Link { target, to } => {
            make_parent(target)?;
            symlinkat(to, CWD, target)?;
        }
        Entry::File { target, content } => {
            make_parent(target)?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let file = openat(CWD, target, flags, Mode::from_raw_mode(0o644))?;
            io::Write::write_all(&mut std::fs::File::from(file), content.as_bytes())?;
        }
        Entry::Hide { target, .. } => cover(target)?,
    }
    Ok(())
}

/// Devices, and places for terminals and shared memory, which each call has of its own.
fn make_dev() -> io::Result<()> {
    make_place(Path::new("dev"), true)?;
    let devices = tmpfs(&[("mode", "0755"), ("size", "64k"), ("nr_inodes", "64")], MountAttrFlags::MOUNT_ATTR_NOSUID)?;
    attach(&devices, Path::new("dev"))?;
    for (name, major, minor) in DEVICES {
        mknodat(&devices, name, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor))?;
        // The creation mask applies to device nodes too.
        chmodat(&devices, name, Mode::from_raw_mode(0o666), AtFlags::empty())?;
    }
    for (name, target) in DEVICE_LINKS {
        symlinkat(target, &devices, name)?;
    }
    for name in ["pts", "shm"] {
        mkdirat(&devices, name, Mode::from_raw_mode(0o755))?;
    }
    Ok(())
}

fn make_read_only(own: &str) -> io::Result<()> {
    Ok(mount_remount(own, MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NOEXEC, "")?)
}

/// A directory or an empty file to mount on; what a bind has put there already will do.
fn make_place(target: &Path, directory: bool) -> io::Result<()> {
    if directory {
        return make_directories(target);
    }
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    made_below(target, || openat(CWD, target, flags, Mode::from_raw_mode(0o444)).map(drop))
}

fn make_parent(target: &Path) -> io::Result<()> {
    target.parent().map_or(Ok(()), make_directories)
}

fn make_directories(path: &Path) -> io::Result<()> {
    if path.as_os_str().is_empty() {
        return Ok(());
    }
    made_below(path, || mkdirat(CWD, path, Mode::from_raw_mode(0o755)))
}

/// Makes something, and the directories above it where they are missing, which is mostly not so. What is there already will do.
fn made_below(path: &Path, make: impl Fn() -> Result<(), Errno>) -> io::Result<()> {
    let made = match make() {
        Err(Errno::NOENT) => {
            make_parent(path)?;
            make()
        }
        made => made,
    };
    match made {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
