//! mount_setattr(2).
#![expect(unsafe_code, reason = "no safe crate offers mount_setattr")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::process::check;

/// Attributes to set on a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attributes {
    /// MOUNT_ATTR_* bits.
    bits: u64,
    /// A type of propagation (mount_namespaces(7)); 0 leaves it as it is.
    propagation: u64,
}

impl Attributes {
    /// Neither setuid bits nor devices count.
    pub(crate) const PLAIN: Self = Self { bits: libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV, propagation: 0 };
    /// [`Self::PLAIN`], and nothing can be written.
    pub(crate) const READ_ONLY: Self = Self { bits: Self::PLAIN.bits | libc::MOUNT_ATTR_RDONLY, ..Self::PLAIN };
    /// [`Self::READ_ONLY`], and nothing that is mounted elsewhere comes along.
    pub(crate) const CUT_OFF: Self = Self { propagation: libc::MS_PRIVATE, ..Self::READ_ONLY };
}

/// Sets attributes on a whole tree of mounts, attached or detached, named by a descriptor of its root.
///
/// # Errors
/// As mount_setattr(2).
pub(crate) fn set_attributes(tree: BorrowedFd<'_>, attributes: Attributes) -> io::Result<()> {
    let Attributes { bits, propagation } = attributes;
    let attr = libc::mount_attr { attr_set: bits, attr_clr: 0, propagation, userns_fd: 0 };
    // SAFETY: the path is an empty NUL-terminated string, as AT_EMPTY_PATH wants; `attr` outlives the call and has the
    // size that is named.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    check(result as libc::c_int)
}
