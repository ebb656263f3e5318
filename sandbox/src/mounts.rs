//! The tool's root: a fresh tmpfs that holds what the plan names and nothing else (mount_namespaces(7), pivot_root(2)).
//!
//! Every source on the host is opened before the first mount is made, so nothing that is mounted can hide or replace a
//! source, and no path of the host is looked up once the tool's files are in reach.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, chmodat, makedev, mkdirat, mknodat, openat, openat2, symlinkat,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, mount_remount, move_mount,
    open_tree, unmount,
};
use rustix::process::{chdir, fchdir, pivot_root, umask};
use toolproto::receipt::Denial;
use toolproto::units::Bytes;

use crate::plan::Place;
use crate::sys::mount::{Attributes, set_attributes};

/// Files of /proc that say or do something about the host. The tool may not read most of them anyway.
const COVERED: [&str; 14] = [
    "acpi",
    "asound",
    "bus",
    "interrupts",
    "irq",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "latency_stats",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "timer_list",
];

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

/// Something at a place in the root, named without the leading slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A file or tree of the host, read-only.
    Bind {
        /// On the host.
        source: PathBuf,
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
        content: Vec<u8>,
    },
    /// An empty, read-only stand-in for a file or directory below a bind.
    Hide {
        /// In the root.
        target: PathBuf,
    },
    /// A private file system in memory.
    Scratch {
        /// In the root.
        target: PathBuf,
        /// Its size.
        size: Bytes,
        /// The limit in the policy that is its size.
        limit: &'static str,
        /// Whether everyone may write there (sticky), or its owner alone.
        mode: u32,
        /// Its owner.
        owner: (u32, u32),
    },
}

/// The whole root.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    /// In their order.
    pub(crate) entries: Vec<Entry>,
    /// Where the workspace stands.
    pub(crate) place: Place,
    /// Paths in the workspace, as far as they are there and no link leads to them, that can only be read.
    pub(crate) guarded: Vec<PathBuf>,
    /// Whether there is a cgroup namespace whose tree can be shown.
    pub(crate) show_cgroup: bool,
}

/// A file system of an [`Entry::Scratch`], made by the launcher before anything is born, so that it can look at it after the
/// end.
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

/// Makes the private file systems of a root, in the order of its entries.
pub(crate) fn make_scratch(root: &Root) -> io::Result<Vec<Scratch>> {
    let mut made = Vec::new();
    for entry in &root.entries {
        let Entry::Scratch { size, mode, owner, limit, .. } = entry else { continue };
        let options = [
            ("mode", format!("{mode:o}")),
            ("size", size.0.to_string()),
            ("uid", owner.0.to_string()),
            ("gid", owner.1.to_string()),
        ];
        let mount = tmpfs(&options.each_ref().map(|(option, value)| (*option, value.as_str())))?;
        set_attributes(mount.as_fd(), Attributes::PLAIN)?;
        made.push(Scratch { mount, limit });
    }
    Ok(made)
}

/// Makes the root and goes there; the host's files are out of reach afterwards. `scratch` is what [`make_scratch`] made of
/// the same root, `workspace` a detached mount.
pub(crate) fn enter(root: &Root, scratch: &[Scratch], workspace: Option<BorrowedFd<'_>>) -> io::Result<()> {
    umask(Mode::WGRP | Mode::WOTH);
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    let sources = root.entries.iter().map(open_source).collect::<io::Result<Vec<_>>>()?;
    let base = tmpfs(&[("mode", "0755"), ("size", "16m"), ("nr_inodes", "4096")])?;
    // Any directory that every host has will do: it is hidden until the pivot, in this mount namespace only.
    attach(&base, Path::new("/proc"))?;
    fchdir(&base)?;
    for directory in ["proc", "sys/fs/cgroup", "run", "var", "tmp"] {
        make_directories(Path::new(directory))?;
    }
    let place_of_workspace = root.place.in_root();
    make_directories(&place_of_workspace)?;
    if root.place == Place::Late {
        symlinkat(&place_of_workspace, CWD, Place::Usual.in_root())?;
    }
    symlinkat("/tmp", CWD, "var/tmp")?;
    symlinkat("/run", CWD, "var/run")?;
    make_dev()?;
    let mut scratch = scratch.iter();
    for (entry, source) in root.entries.iter().zip(sources) {
        place(entry, source, &mut scratch)?;
    }
    if let Some(workspace) = workspace {
        attach(workspace, &place_of_workspace)?;
        guard(&place_of_workspace, &root.guarded)?;
    }
    pivot_root(".", ".")?;
    // The old root now lies on top of the new one.
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")?;
    make_proc()?;
    if root.show_cgroup {
        let file_system = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
        attach(create(&file_system, DATA_ONLY | MountAttrFlags::MOUNT_ATTR_RDONLY)?, Path::new("sys/fs/cgroup"))?;
    }
    for own in ["/dev", "/"] {
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NOEXEC;
        mount_remount(own, flags, "")?;
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

/// A detached copy of the mounts at a bind's source, read-only, and cut off from the host's as all mounts of this namespace are.
fn open_source(entry: &Entry) -> io::Result<Option<OwnedFd>> {
    let Entry::Bind { source, .. } = entry else { return Ok(None) };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, source, flags | OpenTreeFlags::AT_SYMLINK_NOFOLLOW)?;
    set_attributes(tree.as_fd(), Attributes::READ_ONLY)?;
    Ok(Some(tree))
}

fn place<'a>(
    entry: &Entry,
    source: Option<OwnedFd>,
    scratch: &mut impl Iterator<Item = &'a Scratch>,
) -> io::Result<()> {
    match entry {
        Entry::Bind { target, .. } => {
            let Some(tree) = source else { return Ok(()) };
            let is_directory = FileType::from_raw_mode(rustix::fs::fstat(&tree)?.st_mode) == FileType::Directory;
            make_place(target, is_directory)?;
            attach(&tree, target)?;
        }
        Entry::Link { target, to } => {
            make_parent(target)?;
            symlinkat(to, CWD, target)?;
        }
        Entry::File { target, content } => {
            make_parent(target)?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let file = openat(CWD, target, flags, Mode::from_raw_mode(0o644))?;
            io::Write::write_all(&mut std::fs::File::from(file), content)?;
        }
        Entry::Hide { target } => cover(target)?,
        Entry::Scratch { target, .. } => {
            make_place(target, true)?;
            attach(&scratch.next().ok_or(Errno::NOENT)?.mount, target)?;
        }
    }
    Ok(())
}

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

/// Covers a path with an empty directory, or a file with the null device.
fn cover(target: &Path) -> io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::lstat(target)?.st_mode);
    let stand_in = match kind {
        // A link is no way in: what it leads to is covered or not by its own name.
        FileType::Symlink => return Ok(()),
        FileType::Directory => {
            let empty = tmpfs(&[("mode", "0755"), ("size", "4k"), ("nr_inodes", "2")])?;
            set_attributes(empty.as_fd(), Attributes::READ_ONLY)?;
            empty
        }
        _ => open_tree(CWD, "dev/null", OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?,
    };
    attach(&stand_in, target)
}

fn make_dev() -> io::Result<()> {
    make_place(Path::new("dev"), true)?;
    let devices = tmpfs(&[("mode", "0755"), ("size", "64k"), ("nr_inodes", "64")])?;
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
    let terminals = fsopen("devpts", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (option, value) in [("ptmxmode", "0666"), ("mode", "0600")] {
        fsconfig_set_string(&terminals, option, value)?;
    }
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    attach(&create(&terminals, attributes)?, Path::new("dev/pts"))
}

fn make_proc() -> io::Result<()> {
    let processes = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Processes that the tool may not trace, so also PID 1 with the launcher's command line, are not shown at all.
    fsconfig_set_string(&processes, "hidepid", "2")?;
    attach(&create(&processes, DATA_ONLY | MountAttrFlags::MOUNT_ATTR_RDONLY)?, Path::new("proc"))?;
    for name in COVERED {
        match cover(&Path::new("proc").join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            covered => covered?,
        }
    }
    Ok(())
}

fn tmpfs(options: &[(&str, &str)]) -> io::Result<OwnedFd> {
    let file_system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (option, value) in options {
        fsconfig_set_string(&file_system, *option, *value)?;
    }
    create(&file_system, MountAttrFlags::MOUNT_ATTR_NOSUID)
}

fn create(file_system: &OwnedFd, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    fsconfig_create(file_system)?;
    Ok(fsmount(file_system, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

fn attach(mount: impl AsFd, target: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
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
