//! What a sandbox sees at `/workspace`: detached mounts, made by the launcher, attached by the sandbox's child.
//!
//! All views lie over an id-mapped clone of the workspace's mount (see [`super::idmap`]), so that owners on disk stay the
//! caller's. Mounts inside the workspace are not part of a view.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree,
};
use rustix::thread::UnshareFlags;

use super::Owner;
use super::idmap::{self, IdmapError};
use crate::sys::idmap::{Attributes, set_idmap};
use crate::sys::process::unshare;

/// A view that could not be made: the host's fault, or the workspace's file system cannot be id-mapped.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// The id mapping.
    #[error(transparent)]
    Idmap(#[from] IdmapError),
    /// A mount call.
    #[error("failed to {action}")]
    Mount {
        /// What was tried.
        action: &'static str,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// The workspace, unchangeable. Sockets and FIFOs that lie in it are shown but lead nowhere: they are the overlay's own
/// inodes. (A read-only bind mount would let a tool connect and write to them.)
///
/// # Errors
/// When the file system cannot be id-mapped, or a mount call fails.
pub fn read_only(dir: BorrowedFd<'_>, owner: Owner, sandbox_id: u32) -> Result<OwnedFd, ViewError> {
    let workspace = mapped_clone(dir, owner, sandbox_id)?;
    let empty = empty_directory()?;
    // An overlay without an upper layer needs two lower ones; the first is the uppermost.
    let layers = format!("{}:{}", descriptor_path(&workspace), descriptor_path(&empty));
    Layers { mounts: &[&workspace, &empty], paths: &[("lowerdir", layers)], flags: &[] }
        .mount(MountAttrFlags::MOUNT_ATTR_RDONLY)
}

/// The workspace itself: what the sandbox writes is there at once and stays. Files made by `sandbox_id` belong to `owner`
/// on disk.
///
/// # Errors
/// When the file system cannot be id-mapped, or a mount call fails.
pub fn direct(dir: BorrowedFd<'_>, owner: Owner, sandbox_id: u32) -> Result<OwnedFd, ViewError> {
    mapped_clone(dir, owner, sandbox_id)
}

/// The workspace with a layer above it that takes everything the sandbox writes; the workspace itself stays as it is.
///
/// `staging` is on the workspace's file system and holds the layer and overlayfs's work directory, both empty, at these
/// paths below it. A layer is used for one view only.
///
/// # Errors
/// When the file system cannot be id-mapped or carry an upper layer, or a mount call fails.
pub fn overlay(
    dir: BorrowedFd<'_>,
    staging: BorrowedFd<'_>,
    layer: &LayerPaths,
    owner: Owner,
    sandbox_id: u32,
) -> Result<OwnedFd, ViewError> {
    let workspace = mapped_clone(dir, owner, sandbox_id)?;
    // One clone for both: overlayfs wants them on one mount.
    let staging = mapped_clone(staging, owner, sandbox_id)?;
    let below_staging = |path: &str| format!("{}/{path}", descriptor_path(&staging));
    let paths = [
        ("lowerdir", descriptor_path(&workspace)),
        ("upperdir", below_staging(&layer.upper)),
        ("workdir", below_staging(&layer.work)),
    ];
    Layers { mounts: &[&workspace, &staging], paths: &paths, flags: &["userxattr", "volatile"] }
        .mount(MountAttrFlags::empty())
}

/// Where a layer lies below its staging directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPaths {
    /// The upper directory.
    pub upper: String,
    /// Overlayfs's work directory.
    pub work: String,
}

/// Kernels before 6.15 take no detached mount as a layer. Known once one was refused and then taken attached.
static ATTACHED_ONLY: AtomicBool = AtomicBool::new(false);

/// What an overlay is made of.
struct Layers<'a> {
    /// The detached mounts that the paths lead into.
    mounts: &'a [&'a OwnedFd],
    /// Options that name layers, by paths through descriptors.
    paths: &'a [(&'static str, String)],
    /// Options without a value.
    flags: &'a [&'static str],
}

impl Layers<'_> {
    /// The overlay, detached.
    fn mount(&self, attributes: MountAttrFlags) -> Result<OwnedFd, ViewError> {
        if ATTACHED_ONLY.load(Ordering::Relaxed) {
            return self.mount_attached(attributes);
        }
        match self.mount_here(attributes) {
            Err(ViewError::Mount { source, .. }) if source.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                let overlay = self.mount_attached(attributes)?;
                ATTACHED_ONLY.store(true, Ordering::Relaxed);
                Ok(overlay)
            }
            made => made,
        }
    }

    fn mount_here(&self, attributes: MountAttrFlags) -> Result<OwnedFd, ViewError> {
        let overlay = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).map_err(on("open overlayfs"))?;
        for (option, path) in self.paths {
            fsconfig_set_string(overlay.as_fd(), *option, path).map_err(on("add an overlay's layer"))?;
        }
        for flag in self.flags {
            fsconfig_set_flag(overlay.as_fd(), *flag).map_err(on("configure the overlay"))?;
        }
        fsconfig_create(overlay.as_fd()).map_err(on("create an overlay over the workspace"))?;
        let attributes = attributes | MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        fsmount(overlay.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(on("mount the overlay"))
    }

    /// In a mount namespace of its own, which goes with the thread: the layers are attached there, where nobody else sees
    /// them. The overlay keeps what it needs of them.
    fn mount_attached(&self, attributes: MountAttrFlags) -> Result<OwnedFd, ViewError> {
        let attach_and_mount = || {
            unshare(UnshareFlags::NEWNS)
                .map_err(|source| ViewError::Mount { action: "leave the mount namespace", source })?;
            mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
                .map_err(on("keep mounts private"))?;
            for mount in self.mounts {
                // On top of the root: paths that begin there do not notice, and the layers are named by descriptors.
                move_mount(mount, "", CWD, "/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
                    .map_err(on("attach an overlay's layer"))?;
            }
            self.mount_here(attributes)
        };
        thread::scope(|scope| {
            let made = thread::Builder::new()
                .spawn_scoped(scope, attach_and_mount)
                .map_err(|source| ViewError::Mount { action: "start a thread for mounting", source })?;
            made.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }
}

fn mapped_clone(dir: BorrowedFd<'_>, owner: Owner, sandbox_id: u32) -> Result<OwnedFd, ViewError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let clone = open_tree(dir, "", flags).map_err(on("clone the workspace's mount"))?;
    let map = idmap::swapped(owner, sandbox_id)?;
    set_idmap(clone.as_fd(), map.as_fd(), Attributes::NOSUID.and(Attributes::NODEV))
        .map_err(|source| ViewError::Mount { action: "map the owners of the workspace's mount", source })?;
    Ok(clone)
}

fn empty_directory() -> Result<OwnedFd, ViewError> {
    let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(on("open tmpfs"))?;
    fsconfig_set_string(tmpfs.as_fd(), "mode", "0755").map_err(on("configure tmpfs"))?;
    fsconfig_create(tmpfs.as_fd()).map_err(on("create a tmpfs"))?;
    fsmount(tmpfs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_RDONLY)
        .map_err(on("mount a tmpfs"))
}

fn descriptor_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

fn on(action: &'static str) -> impl Fn(rustix::io::Errno) -> ViewError {
    move |errno| ViewError::Mount { action, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;

    use rustix::mount::{UnmountFlags, unmount};
    use rustix::process::{Gid, Uid};

    use super::*;

    const SANDBOX: u32 = 77_777;

    /// A mount that goes when the test ends.
    struct Attached(tempfile::TempDir);

    impl Attached {
        fn new(mount: &OwnedFd) -> Self {
            let place = tempfile::tempdir().unwrap();
            fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
            move_mount(mount, "", rustix::fs::CWD, place.path(), MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).unwrap();
            Self(place)
        }

        fn path(&self) -> &Path {
            self.0.path()
        }
    }

    impl Drop for Attached {
        fn drop(&mut self) {
            unmount(self.0.path(), UnmountFlags::DETACH).unwrap();
        }
    }

    fn workspace_of(owner: Owner) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "content").unwrap();
        fs::set_permissions(dir.path().join("file"), fs::Permissions::from_mode(0o600)).unwrap();
        for path in [dir.path().to_owned(), dir.path().join("file")] {
            std::os::unix::fs::chown(path, Some(owner.uid), Some(owner.gid)).unwrap();
        }
        dir
    }

    /// Runs `action` in a thread with the sandbox's file-system ids and no override of permissions.
    fn as_sandbox<T: Send>(action: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    rustix::thread::set_thread_groups(&[]).unwrap();
                    rustix::thread::set_thread_gid(Gid::from_raw(SANDBOX)).unwrap();
                    rustix::thread::set_thread_uid(Uid::from_raw(SANDBOX)).unwrap();
                    action()
                })
                .join()
                .unwrap()
        })
    }

    fn open(dir: &Path) -> OwnedFd {
        fs::File::open(dir).unwrap().into()
    }

    const OWNERS: [Owner; 3] =
        [Owner { uid: 61_234, gid: 61_235 }, Owner { uid: 0, gid: 0 }, Owner { uid: SANDBOX, gid: 61_235 }];

    #[test]
    fn what_the_sandbox_writes_directly_belongs_to_the_owner() {
        for owner in OWNERS {
            let workspace = workspace_of(owner);
            let view = Attached::new(&direct(open(workspace.path()).as_fd(), owner, SANDBOX).unwrap());
            as_sandbox(|| {
                assert_eq!(fs::read(view.path().join("file")).unwrap(), b"content", "{owner:?}");
                fs::write(view.path().join("file"), "changed").unwrap();
                fs::create_dir(view.path().join("made")).unwrap();
                fs::write(view.path().join("made/inside"), "new").unwrap();
                assert_eq!(fs::metadata(view.path().join("made/inside")).unwrap().uid(), SANDBOX);
            });
            for name in ["file", "made", "made/inside"] {
                let metadata = fs::metadata(workspace.path().join(name)).unwrap();
                assert_eq!((metadata.uid(), metadata.gid()), (owner.uid, owner.gid), "{name} of {owner:?}");
            }
            assert_eq!(fs::read(workspace.path().join("file")).unwrap(), b"changed");
        }
    }

    #[test]
    fn foreign_files_keep_their_owner() {
        let owner = OWNERS[0];
        let workspace = workspace_of(owner);
        let foreign = workspace.path().join("foreign");
        fs::write(&foreign, "secret").unwrap();
        fs::set_permissions(&foreign, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(&foreign, Some(61_300), Some(61_301)).unwrap();
        for view in [direct, read_only] {
            let view = Attached::new(&view(open(workspace.path()).as_fd(), owner, SANDBOX).unwrap());
            let refused = as_sandbox(|| fs::read(view.path().join("foreign")).unwrap_err());
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            assert_eq!(fs::metadata(view.path().join("foreign")).unwrap().uid(), 61_300);
        }
    }

    #[test]
    fn a_read_only_view_refuses_every_write() {
        for owner in OWNERS {
            let workspace = workspace_of(owner);
            let view = Attached::new(&read_only(open(workspace.path()).as_fd(), owner, SANDBOX).unwrap());
            as_sandbox(|| {
                assert_eq!(fs::read(view.path().join("file")).unwrap(), b"content", "{owner:?}");
                let errors = [
                    fs::write(view.path().join("file"), "x").unwrap_err(),
                    fs::write(view.path().join("new"), "x").unwrap_err(),
                    fs::remove_file(view.path().join("file")).unwrap_err(),
                    fs::create_dir(view.path().join("dir")).unwrap_err(),
                    fs::set_permissions(view.path().join("file"), fs::Permissions::from_mode(0o777)).unwrap_err(),
                ];
                for error in errors {
                    assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
                }
            });
            assert_eq!(fs::read_dir(workspace.path()).unwrap().count(), 1);
        }
    }

    /// What kernels before 6.15 need works on newer ones too.
    #[test]
    fn layers_may_be_attached_and_nobody_sees_them() {
        let owner = OWNERS[0];
        let workspace = workspace_of(owner);
        let clone = mapped_clone(open(workspace.path()).as_fd(), owner, SANDBOX).unwrap();
        let empty = empty_directory().unwrap();
        let layers = format!("{}:{}", descriptor_path(&clone), descriptor_path(&empty));
        let layers = Layers { mounts: &[&clone, &empty], paths: &[("lowerdir", layers)], flags: &[] };
        let on_root = || {
            let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
            mounts.lines().filter(|line| line.split(' ').nth(4) == Some("/")).count()
        };
        let before = on_root();
        let overlay = layers.mount_attached(MountAttrFlags::MOUNT_ATTR_RDONLY).unwrap();
        assert_eq!(on_root(), before);
        let view = Attached::new(&overlay);
        as_sandbox(|| assert_eq!(fs::read(view.path().join("file")).unwrap(), b"content"));
    }

    #[test]
    fn sockets_and_fifos_of_the_host_lead_nowhere_in_a_read_only_view() {
        let owner = OWNERS[0];
        let workspace = workspace_of(owner);
        let _listener = UnixListener::bind(workspace.path().join("socket")).unwrap();
        fs::set_permissions(workspace.path().join("socket"), fs::Permissions::from_mode(0o666)).unwrap();
        let fifo = workspace.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o666.into(), 0).unwrap();
        fs::set_permissions(&fifo, fs::Permissions::from_mode(0o666)).unwrap();
        let _reader = rustix::fs::open(
            &fifo,
            rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK,
            rustix::fs::Mode::empty(),
        )
        .unwrap();
        let write_to_fifo = |path: &Path| {
            let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
            let opened = rustix::fs::open(path.join("fifo"), flags, rustix::fs::Mode::empty());
            opened.map(|fifo| fs::File::from(fifo).write_all(b"x").unwrap())
        };

        let view = Attached::new(&read_only(open(workspace.path()).as_fd(), owner, SANDBOX).unwrap());
        as_sandbox(|| {
            let error = UnixStream::connect(view.path().join("socket")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
            // No reader: the FIFO that the sandbox opens is another one than the host's.
            assert_eq!(write_to_fifo(view.path()), Err(rustix::io::Errno::NXIO));
        });
        // The twin: in the direct view both are the host's.
        let view = Attached::new(&direct(open(workspace.path()).as_fd(), owner, SANDBOX).unwrap());
        as_sandbox(|| {
            UnixStream::connect(view.path().join("socket")).unwrap();
            assert_eq!(write_to_fifo(view.path()), Ok(()));
        });
    }
}
