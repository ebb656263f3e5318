//! What a call wrote, read from its overlay's upper directory: the tree that results, and the steps that lead there.
//!
//! The upper directory holds what changed and nothing else (Documentation/filesystems/overlayfs.rst): files and new
//! directories as they are; directories that are only changed inside, with just what is changed; and for what was deleted
//! a *whiteout*, a character device 0/0, or a file with an attribute of that name. A directory that was deleted and made
//! again is *opaque*: whatever it had before is gone without a whiteout.
//!
//! Before anything is moved into the workspace it is cleaned here: overlayfs's own attributes go, and set-user-id and
//! set-group-id bits of files; a device is an error.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags, Stat, XattrFlags};
use rustix::io::Errno;
use toolproto::code::Code;
use toolproto::receipt::{EntryKind, escape_path};

use super::journal::{FileId, RawPath, Root, Seen, Step};
use super::reach;
use super::scan::{TreeError, TreeLimits, kind_of, permission_bits, read_entry};
use super::tree::{Node, Stamp, Tree};

/// Overlayfs's attributes under the `userxattr` option.
const OVERLAY_PREFIX: &[u8] = b"user.overlay.";
const OPAQUE: &str = "user.overlay.opaque";
const WHITEOUT: &str = "user.overlay.whiteout";
/// What an owner needs to move and remove what lies in a directory.
const FULL_ACCESS: u16 = 0o700;
/// Set-user-id and set-group-id.
const SET_ID: u16 = 0o6000;

/// What a call did to its workspace.
pub(crate) struct Staged {
    pub(crate) after: Tree,
    pub(crate) steps: Vec<Step>,
}

/// A call's changes that cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// A tree could not be read.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A path that the call changed was changed from outside as well.
    #[error("`{path}` was changed from outside while the call ran")]
    Conflict {
        /// Which, escaped.
        path: String,
    },
    /// Something that must not enter a workspace.
    #[error("`{path}` is a device")]
    Device {
        /// Which, escaped.
        path: String,
    },
    /// Another failure.
    #[error("failed to {action} `{path}`")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which entry, escaped.
        path: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl StageError {
    /// The code of a call that fails by it.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Tree(error) => error.code(),
            Self::Conflict { .. } => Code::WorkspaceConflict,
            Self::Device { .. } => Code::WorkspaceUnavailable,
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => Code::DiskFull,
            Self::Io { .. } => Code::WorkspaceUnavailable,
        }
    }
}

/// Reads and cleans what a call wrote above `base`, whose overlay is unmounted.
///
/// # Errors
/// See [`StageError`]; the workspace is as it was.
pub(crate) fn read(
    workspace: BorrowedFd<'_>,
    upper: BorrowedFd<'_>,
    base: &Tree,
    limits: &TreeLimits,
) -> Result<Staged, StageError> {
    let mut reader = Reader { limits, steps: Vec::new(), deleted: 0, path: Vec::new() };
    let root = reader.merge_readable(workspace, upper, &base.root)?;
    Ok(Staged { after: Tree::new(root), steps: reader.steps })
}

struct Reader<'a> {
    limits: &'a TreeLimits,
    steps: Vec<Step>,
    deleted: u32,
    /// Where the reader stands.
    path: Vec<u8>,
}

impl Reader<'_> {
    /// As [`Self::merge`]; the workspace's own directory is lifted meanwhile if its owner cannot look into it.
    fn merge_readable(
        &mut self,
        workspace: BorrowedFd<'_>,
        upper: BorrowedFd<'_>,
        base: &Node,
    ) -> Result<Node, StageError> {
        if base.mode & FULL_ACCESS == FULL_ACCESS {
            return self.merge(workspace, upper, base);
        }
        reach::set_mode(workspace, base.mode | FULL_ACCESS).map_err(self.on("lift the mode of"))?;
        let merged = self.merge(workspace, upper, base);
        reach::set_mode(workspace, base.mode).map_err(self.on("set back the mode of"))?;
        merged
    }

    /// Reads a directory that lies above the base's. `upper` is open for reading.
    fn merge(&mut self, workspace: BorrowedFd<'_>, upper: BorrowedFd<'_>, base: &Node) -> Result<Node, StageError> {
        let stat = rustix::fs::fstat(upper).map_err(self.on("examine"))?;
        let mode = permission_bits(&stat);
        if mode & FULL_ACCESS != FULL_ACCESS {
            // Only the call's own directory; what the workspace gets is decided below.
            rustix::fs::fchmod(upper, Mode::from_raw_mode((mode | FULL_ACCESS).into())).map_err(self.on("open up"))?;
        }
        let outer = std::mem::take(&mut self.steps);
        let mut changed: BTreeMap<Arc<[u8]>, Option<Node>> = BTreeMap::new();
        for name in reach::names(upper).map_err(self.on("list"))? {
            let length = self.enter(&name);
            if let Some(entry) = self.entry(workspace, upper, base, &name)? {
                changed.insert(name, entry);
            }
            self.path.truncate(length);
        }
        let inner = std::mem::replace(&mut self.steps, outer);
        self.within(base, mode, inner);
        let kept = base.entries().iter().filter(|entry| !changed.contains_key(&entry.name)).cloned();
        let entries = kept.chain(changed.values().flatten().cloned()).collect();
        // It stays the directory that it is, and its watch stays on it.
        Ok(Node::directory(base.name.clone(), mode, base.stamp, entries).watched(base.watch()))
    }

    /// Adds the steps inside a directory, its mode lifted around them if need be, and its new mode.
    fn within(&mut self, base: &Node, mode: u16, inner: Vec<Step>) {
        let mut current = base.mode;
        if !inner.is_empty() && current & FULL_ACCESS != FULL_ACCESS {
            self.set_mode(Root::Workspace, &self.path.clone(), base, current, current | FULL_ACCESS);
            current |= FULL_ACCESS;
        }
        self.steps.extend(inner);
        if current != mode {
            self.set_mode(Root::Workspace, &self.path.clone(), base, current, mode);
        }
    }

    fn set_mode(&mut self, root: Root, path: &[u8], node: &Node, from: u16, to: u16) {
        self.steps.push(Step::SetMode {
            root,
            path: RawPath(path.to_vec()),
            file: FileId::from(&node.stamp),
            from,
            to,
        });
    }

    /// One entry of an upper directory: none if it changes nothing, else what lies there afterwards.
    fn entry(
        &mut self,
        workspace: BorrowedFd<'_>,
        upper: BorrowedFd<'_>,
        base: &Node,
        name: &Arc<[u8]>,
    ) -> Result<Option<Option<Node>>, StageError> {
        let stat = rustix::fs::statat(upper, &**name, AtFlags::SYMLINK_NOFOLLOW).map_err(self.on("examine"))?;
        let old = base.entry(name);
        if self.is_whiteout(upper, name, &stat)? {
            let Some(old) = old else { return Ok(None) };
            let old = self.as_it_is(workspace, base, old)?;
            self.delete(&old);
            return Ok(Some(None));
        }
        if kind_of(&stat) == EntryKind::Directory
            && let Some(old) = old.filter(|old| old.is_directory())
        {
            let opened = self.open_up(upper, name, permission_bits(&stat))?;
            let is_opaque = has_attribute(&opened, OPAQUE).map_err(self.on("examine"))?;
            // Its own mode as the call left it, before it was opened up.
            rustix::fs::fchmod(&opened, Mode::from_raw_mode(stat.st_mode)).map_err(self.on("set back the mode of"))?;
            if !is_opaque {
                let below = self.open_below(workspace, name, old)?;
                return self.merge_readable(below.as_fd(), opened.as_fd(), old).map(|node| Some(Some(node)));
            }
        }
        let replaced = old.filter(|old| old.kind == EntryKind::File && kind_of(&stat) == EntryKind::File);
        let attributes = match replaced {
            Some(_) => self.attributes_of(workspace, name)?,
            None => Vec::new(),
        };
        self.clean(upper, name, &stat, &attributes)?;
        let new = read_entry(upper, name, self.limits, None)?;
        match old {
            None => {
                if reach::stat(workspace, name).map_err(self.on("examine"))?.is_some() {
                    return Err(self.conflict());
                }
                self.create(&new);
            }
            Some(old) => {
                if is_untouched(old, &new) {
                    return Ok(None);
                }
                let old = self.as_it_is(workspace, base, old)?;
                self.replace(&old, &new);
            }
        }
        Ok(Some(Some(new)))
    }

    fn create(&mut self, new: &Node) {
        let path = self.path.clone();
        self.lift(Root::Upper, &path, new);
        self.steps.push(Step::Create { path: RawPath(path.clone()), file: FileId::from(&new.stamp) });
        self.set_back(Root::Workspace, &path, new);
    }

    fn delete(&mut self, old: &Node) {
        let path = self.path.clone();
        let (file, seen, number) = (FileId::from(&old.stamp), Seen::from(&old.stamp), self.deleted);
        self.deleted += 1;
        self.lift(Root::Workspace, &path, old);
        self.steps.push(Step::Delete { path: RawPath(path), file, number, seen });
        self.set_back(Root::Undo, number.to_string().as_bytes(), old);
    }

    fn replace(&mut self, old: &Node, new: &Node) {
        let path = self.path.clone();
        self.lift(Root::Workspace, &path, old);
        self.lift(Root::Upper, &path, new);
        let (old_file, new_file) = (FileId::from(&old.stamp), FileId::from(&new.stamp));
        let seen = Seen::from(&old.stamp);
        self.steps.push(Step::Replace { path: RawPath(path.clone()), old: old_file, new: new_file, seen });
        self.set_back(Root::Workspace, &path, new);
        self.set_back(Root::Upper, &path, old);
    }

    /// A directory without write permission cannot be moved by its owner.
    fn lift(&mut self, root: Root, path: &[u8], node: &Node) {
        if node.is_directory() && node.mode & FULL_ACCESS != FULL_ACCESS {
            self.set_mode(root, path, node, node.mode, node.mode | FULL_ACCESS);
        }
    }

    fn set_back(&mut self, root: Root, path: &[u8], node: &Node) {
        if node.is_directory() && node.mode & FULL_ACCESS != FULL_ACCESS {
            self.set_mode(root, path, node, node.mode | FULL_ACCESS, node.mode);
        }
    }

    /// What the call replaced or deleted, read again: it must be what the call saw.
    fn as_it_is(&self, workspace: BorrowedFd<'_>, base: &Node, old: &Node) -> Result<Node, StageError> {
        match read_entry(workspace, &old.name, self.limits, Some(base)) {
            Ok(now) if now.is_same_tree(old) && now.stamp.is_same_file(&old.stamp) => Ok(now),
            Ok(_) | Err(TreeError::Changed { .. }) => Err(self.conflict()),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a directory of the workspace that stays where it is.
    fn open_below(&self, workspace: BorrowedFd<'_>, name: &[u8], old: &Node) -> Result<OwnedFd, StageError> {
        let handle = match reach::handle(workspace, name) {
            Ok(handle) => handle,
            Err(Errno::NOENT) => return Err(self.conflict()),
            Err(errno) => return Err(self.on("open")(errno)),
        };
        let stat = rustix::fs::fstat(&handle).map_err(self.on("examine"))?;
        if !Stamp::of(&stat).is_same_file(&old.stamp) || permission_bits(&stat) != old.mode {
            return Err(self.conflict());
        }
        Ok(handle)
    }

    /// Opens a directory of the call's for reading, whatever its mode; its mode is lifted.
    fn open_up(&self, dir: BorrowedFd<'_>, name: &[u8], mode: u16) -> Result<OwnedFd, StageError> {
        if mode & FULL_ACCESS != FULL_ACCESS {
            let handle = reach::handle(dir, name).map_err(self.on("open"))?;
            reach::set_mode(&handle, mode | FULL_ACCESS).map_err(self.on("open up"))?;
        }
        rustix::fs::openat2(dir, name, reach::DIRECTORY, Mode::empty(), reach::RESOLVE).map_err(self.on("open"))
    }

    /// Cleans an entry of the call's and all below it, and makes it durable. It gets exactly these attributes.
    fn clean(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        stat: &Stat,
        attributes: &[Attribute],
    ) -> Result<(), StageError> {
        let mode = permission_bits(stat);
        match kind_of(stat) {
            EntryKind::Directory => {
                let opened = self.open_up(dir, name, mode)?;
                set_attributes(&opened, &[]).map_err(self.on("clean"))?;
                for name in reach::names(&opened).map_err(self.on("list"))? {
                    let length = self.enter(&name);
                    let stat =
                        rustix::fs::statat(&opened, &*name, AtFlags::SYMLINK_NOFOLLOW).map_err(self.on("examine"))?;
                    if self.is_whiteout(opened.as_fd(), &name, &stat)? {
                        rustix::fs::unlinkat(&opened, &*name, AtFlags::empty()).map_err(self.on("clean"))?;
                    } else {
                        self.clean(opened.as_fd(), &name, &stat, &[])?;
                    }
                    self.path.truncate(length);
                }
                rustix::fs::fchmod(&opened, Mode::from_raw_mode(mode.into()))
                    .map_err(self.on("set back the mode of"))?;
                rustix::fs::fsync(&opened).map_err(self.on("write"))
            }
            EntryKind::File => {
                if mode & 0o600 != 0o600 {
                    let handle = reach::handle(dir, name).map_err(self.on("open"))?;
                    reach::set_mode(&handle, mode | 0o600).map_err(self.on("open up"))?;
                }
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let opened = rustix::fs::openat2(dir, name, flags, Mode::empty(), reach::RESOLVE);
                let opened = opened.map_err(self.on("open"))?;
                set_attributes(&opened, attributes).map_err(self.on("clean"))?;
                // After the attributes: an access control list changes the group's permission bits.
                let clean = Mode::from_raw_mode((mode & !SET_ID).into());
                rustix::fs::fchmod(&opened, clean).map_err(self.on("clean"))?;
                rustix::fs::fsync(&opened).map_err(self.on("write"))
            }
            EntryKind::CharDevice | EntryKind::BlockDevice => Err(StageError::Device { path: escape_path(&self.path) }),
            EntryKind::Symlink | EntryKind::Fifo | EntryKind::Socket => Ok(()),
        }
    }

    /// The extended attributes of a file that gives way, which its successor gets.
    fn attributes_of(&self, workspace: BorrowedFd<'_>, name: &[u8]) -> Result<Vec<Attribute>, StageError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat2(workspace, name, flags, Mode::empty(), reach::RESOLVE) {
            Ok(file) => own_attributes(&file).map_err(self.on("examine")),
            // One that even its owner cannot read keeps nothing; one that has gone is found to be a conflict below.
            Err(Errno::ACCESS | Errno::NOENT | Errno::LOOP | Errno::NXIO) => Ok(Vec::new()),
            Err(errno) => Err(self.on("open")(errno)),
        }
    }

    fn is_whiteout(&self, dir: BorrowedFd<'_>, name: &[u8], stat: &Stat) -> Result<bool, StageError> {
        match kind_of(stat) {
            EntryKind::CharDevice => Ok(stat.st_rdev == 0),
            EntryKind::File if stat.st_size == 0 && permission_bits(stat) & 0o400 != 0 => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = rustix::fs::openat2(dir, name, flags, Mode::empty(), reach::RESOLVE);
                has_attribute(&file.map_err(self.on("open"))?, WHITEOUT).map_err(self.on("examine"))
            }
            _ => Ok(false),
        }
    }

    /// Goes to an entry; yields the length to go back to.
    fn enter(&mut self, name: &[u8]) -> usize {
        let length = self.path.len();
        if length > 0 {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
        length
    }

    fn conflict(&self) -> StageError {
        StageError::Conflict { path: escape_path(&self.path) }
    }

    fn on(&self, action: &'static str) -> impl Fn(Errno) -> StageError + use<> {
        let path = if self.path.is_empty() { ".".to_owned() } else { escape_path(&self.path) };
        move |errno| StageError::Io { action, path: path.clone(), source: errno.into() }
    }
}

/// An extended attribute.
struct Attribute {
    name: Vec<u8>,
    value: Vec<u8>,
}

/// Whether a file was copied up and then left as it was: the same to the last byte, and never written.
fn is_untouched(old: &Node, new: &Node) -> bool {
    old.is_same_tree(new) && (old.is_directory() || old.stamp.mtime == new.stamp.mtime)
}

fn has_attribute(file: &OwnedFd, name: &str) -> Result<bool, Errno> {
    match rustix::fs::fgetxattr(file, name, &mut [0_u8; 0][..]) {
        Ok(_) | Err(Errno::RANGE) => Ok(true),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// The attributes that an owner sets: the `user.` ones but overlayfs's, and access control lists.
fn own_attributes(file: &OwnedFd) -> Result<Vec<Attribute>, Errno> {
    let mut attributes = Vec::new();
    for name in attribute_names(file)? {
        let is_own = name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_");
        if is_own && !name.starts_with(OVERLAY_PREFIX) {
            // The kernel's limit of an attribute's value is 64 KiB (xattr(7)).
            let mut value = vec![0; 64 << 10];
            let length = rustix::fs::fgetxattr(file, &*name, &mut value[..])?;
            value.truncate(length);
            attributes.push(Attribute { name, value });
        }
    }
    Ok(attributes)
}

fn attribute_names(file: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut list = vec![0; 64 << 10];
    let length = match rustix::fs::flistxattr(file, &mut list[..]) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => 0,
        Err(errno) => return Err(errno),
    };
    Ok(list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect())
}

/// Removes every attribute of a file that an owner or overlayfs sets, and sets these.
fn set_attributes(file: &OwnedFd, attributes: &[Attribute]) -> Result<(), Errno> {
    for name in attribute_names(file)? {
        if (name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_"))
            && !attributes.iter().any(|kept| kept.name == name)
        {
            rustix::fs::fremovexattr(file, &*name)?;
        }
    }
    for Attribute { name, value } in attributes {
        rustix::fs::fsetxattr(file, &**name, value, XattrFlags::empty())?;
    }
    Ok(())
}
