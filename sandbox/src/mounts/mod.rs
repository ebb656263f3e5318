//! The tool's root: a fresh tmpfs that holds what the plan names and nothing else (mount_namespaces(7), pivot_root(2)). It
//! consists of a [`frame`], and of what each call has of its own: /proc, terminals, private file systems, the workspace.

pub(crate) mod frame;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_string,
    fsmount, fsopen, move_mount, open_tree,
};
use rustix::process::{chdir, umask};
use toolproto::receipt::Denial;
use toolproto::units::Bytes;

use self::frame::{Accounts, Entry, Framing, Layout, Source};
use crate::plan::Place;
use crate::sys::mount::{Attributes, set_attributes};

/// What of /proc says or does something about the host: directories, and files. The tool may not read most of it anyway. A
/// kernel has some of it, and more when modules are loaded.
const COVERED: [(StandIn, &[&str]); 2] = [
    (StandIn::Directory, &["acpi", "asound", "bus", "irq", "scsi"]),
    (
        StandIn::File,
        &[
            "interrupts",
            "kallsyms",
            "kcore",
            "key-users",
            "keys",
            "latency_stats",
            "sched_debug",
            "sysrq-trigger",
            "timer_list",
        ],
    ),
];

/// The whole root.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    /// What other calls have, too.
    pub(crate) layout: Layout,
    /// The call's user.
    pub(crate) accounts: Accounts,
    /// Private file systems in memory.
    pub(crate) scratch: Vec<ScratchPlace>,
    /// What of the host is shown below those, as a runtime that lies in the host's /tmp.
    pub(crate) within_scratch: Vec<Entry>,
    /// Paths in the workspace, as far as they are there and no link leads to them, that can only be read.
    pub(crate) guarded: Vec<PathBuf>,
    /// Whether there is a cgroup namespace whose tree can be shown.
    pub(crate) show_cgroup: bool,
}

/// A private file system in memory, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScratchPlace {
    /// In the root, without the leading slash. Every frame has a directory there.
    pub(crate) target: PathBuf,
    /// Its size.
    pub(crate) size: Bytes,
    /// The limit in the policy that is its size.
    pub(crate) limit: &'static str,
    /// Whether everyone may write there (sticky), or its owner alone.
    pub(crate) mode: u32,
    /// Its owner.
    pub(crate) owner: (u32, u32),
}

/// A private file system, made by the launcher before anything is born, so that it can look at it after the end.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Detached until the tool attaches it.
    pub(crate) mount: OwnedFd,
    /// The limit in the policy that is its size.
    pub(crate) limit: &'static str,
}

impl Scratch {
    /// What stands in a receipt when not one more page fits in.
    pub(crate) fn denial(&self) -> Option<Denial> {
        let is_full = rustix::fs::fstatvfs(&self.mount).is_ok_and(|space| space.f_bfree == 0);
        let limit = self.limit;
        is_full.then(|| Denial::seen("limit", format!("{limit}: no space was left"), format!("[limits] {limit}")))
    }
}

/// Makes the private file systems of a root, in their order.
pub(crate) fn make_scratch(root: &Root) -> io::Result<Vec<Scratch>> {
    let make = |place: &ScratchPlace| {
        let options = [
            ("mode", format!("{:o}", place.mode)),
            ("size", place.size.0.to_string()),
            ("uid", place.owner.0.to_string()),
            ("gid", place.owner.1.to_string()),
        ];
        let options = options.each_ref().map(|(option, value)| (*option, value.as_str()));
        let mount = tmpfs(&options, MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV)?;
        Ok(Scratch { mount, limit: place.limit })
    };
    root.scratch.iter().map(make).collect()
}

/// What the caller brings from the host's mounts to a root.
pub(crate) struct Brought<'a> {
    scratch: &'a [Scratch],
    within_scratch: Vec<Option<Source>>,
    workspace: Option<BorrowedFd<'a>>,
}

impl<'a> Brought<'a> {
    /// Opens what is shown of the host besides the frame. What must not be bound (MS_UNBINDABLE) is refused there. `scratch` is
    /// what [`make_scratch`] made of the same root, `workspace` a detached mount.
    pub(crate) fn open(root: &Root, scratch: &'a [Scratch], workspace: Option<BorrowedFd<'a>>) -> io::Result<Self> {
        let within_scratch = root.within_scratch.iter().map(Source::open).collect::<io::Result<_>>()?;
        Ok(Self { scratch, within_scratch, workspace })
    }
}

/// Makes the root in the caller's new mount namespace, and goes there. Of a frame that was kept, the caller has a copy already;
/// one that is made now is left to `left_to`, if that is somebody.
pub(crate) fn enter(
    root: &Root,
    (framing, left_to): (&Framing, Option<BorrowedFd<'_>>),
    brought: Brought<'_>,
) -> io::Result<()> {
    umask(Mode::WGRP | Mode::WOTH);
    match framing {
        Framing::Own | Framing::Leave(_) => frame::make(&root.layout, &root.accounts, left_to)?,
        Framing::Kept(_) => frame::cover_anew(&root.layout)?,
    }
    for (place, scratch) in root.scratch.iter().zip(brought.scratch) {
        attach(&scratch.mount, &place.target)?;
    }
    for (entry, source) in root.within_scratch.iter().zip(brought.within_scratch) {
        frame::place(entry, source)?;
    }
    if let Some(workspace) = brought.workspace {
        let place = root.layout.place.in_root();
        attach(workspace, &place)?;
        guard(&place, &root.guarded)?;
    }
    make_proc()?;
    make_terminals()?;
    if root.show_cgroup {
        let file_system = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
        attach(create(&file_system, DATA_ONLY | MountAttrFlags::MOUNT_ATTR_RDONLY)?, Path::new("sys/fs/cgroup"))?;
    }
    Ok(())
}

/// Attaches the workspace in the mount namespace of a program that runs already, which the caller has entered. The root is
/// root's and read-only: nothing that the program did can lead elsewhere.
pub(crate) fn attach_later(workspace: BorrowedFd<'_>, guarded: &[PathBuf]) -> io::Result<()> {
    let place = Place::Late.in_root();
    chdir("/")?;
    attach(workspace, &place)?;
    guard(&place, guarded)
}

/// Where the tool starts.
pub(crate) fn go_to_start(place: Place) -> io::Result<()> {
    match place {
        Place::Usual => Ok(chdir(place.path())?),
        Place::Late => Ok(chdir("/")?),
    }
}

const DATA_ONLY: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV).union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// Lays what is at these paths in the workspace over itself, read-only. Tools have written the workspace: no link is
/// followed, and what is not there stays so.
fn guard(place: &Path, paths: &[PathBuf]) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let workspace = openat(CWD, place, flags | OFlags::DIRECTORY, Mode::empty())?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    for path in paths {
        let place = match openat2(&workspace, path, flags, Mode::empty(), resolve) {
            Ok(place) => place,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
            Err(errno) => return Err(errno.into()),
        };
        if FileType::from_raw_mode(rustix::fs::fstat(&place)?.st_mode) == FileType::Symlink {
            continue;
        }
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = open_tree(&place, "", clone)?;
        set_attributes(tree.as_fd(), Attributes::READ_ONLY)?;
        let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&tree, "", &place, "", both)?;
    }
    Ok(())
}

/// What something is covered with: parts of the root, before anything is mounted on them.
#[derive(Clone, Copy)]
enum StandIn {
    /// An empty directory.
    Directory,
    /// The null device.
    File,
}

impl StandIn {
    fn path(self) -> &'static str {
        match self {
            Self::Directory => TERMINALS,
            Self::File => "dev/null",
        }
    }

    fn copy(self) -> io::Result<OwnedFd> {
        Ok(open_tree(CWD, self.path(), OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?)
    }
}

/// Covers a directory or a file.
fn cover(target: &Path) -> io::Result<()> {
    let stand_in = match FileType::from_raw_mode(rustix::fs::lstat(target)?.st_mode) {
        // A link is no way in: what it leads to is covered or not by its own name.
        FileType::Symlink => return Ok(()),
        FileType::Directory => StandIn::Directory,
        _ => StandIn::File,
    };
    let copy = stand_in.copy()?;
    if matches!(stand_in, StandIn::Directory) {
        set_attributes(copy.as_fd(), Attributes::READ_ONLY)?;
    }
    attach(copy, target)
}

/// Covers what is there of [`COVERED`].
fn cover_host() -> io::Result<()> {
    for (stand_in, names) in COVERED {
        let mut copy = stand_in.copy()?;
        for name in names {
            match attach(&copy, &Path::new("proc").join(name)) {
                Ok(()) => copy = stand_in.copy()?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// Where terminals are mounted; empty until then.
const TERMINALS: &str = "dev/pts";

fn make_terminals() -> io::Result<()> {
    let terminals = fsopen("devpts", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (option, value) in [("ptmxmode", "0666"), ("mode", "0600")] {
        fsconfig_set_string(&terminals, option, value)?;
    }
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    attach(&create(&terminals, attributes)?, Path::new(TERMINALS))
}

fn make_proc() -> io::Result<()> {
    let processes = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Processes that the tool may not trace, so also PID 1 with the launcher's command line, are not shown at all.
    fsconfig_set_string(&processes, "hidepid", "2")?;
    attach(&create(&processes, DATA_ONLY | MountAttrFlags::MOUNT_ATTR_RDONLY)?, Path::new("proc"))?;
    cover_host()
}

fn tmpfs(options: &[(&str, &str)], attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let file_system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (option, value) in options {
        fsconfig_set_string(&file_system, *option, *value)?;
    }
    create(&file_system, attributes)
}

fn create(file_system: &OwnedFd, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    fsconfig_create(file_system)?;
    Ok(fsmount(file_system, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

fn attach(mount: impl AsFd, target: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}
