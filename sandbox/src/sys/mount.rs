//! mount_setattr(2).
#![expect(unsafe_code, reason = "no safe crate offers mount_setattr")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::process::check;

/// Attributes to set on a mount, as MOUNT_ATTR_* bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attributes(u64);

impl Attributes {
    /// Neither setuid bits nor devices count.
    pub(crate) const PLAIN: Self = Self(libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV);
    /// [`Self::PLAIN`], and nothing can be written.
    pub(crate) const READ_ONLY: Self = Self(Self::PLAIN.0 | libc::MOUNT_ATTR_RDONLY);
}

/// Sets attributes on a whole tree of mounts, attached or detached, named by a descriptor of its root.
///
/// # Errors
/// As mount_setattr(2).
pub(crate) fn set_attributes(tree: BorrowedFd<'_>, attributes: Attributes) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set: attributes.0, attr_clr: 0, propagation: 0, userns_fd: 0 };
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
