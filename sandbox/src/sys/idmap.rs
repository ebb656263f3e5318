//! What idmapped mounts need: `mount_setattr` (mount_setattr(2)) and a process in a user namespace of its own.
#![expect(unsafe_code, reason = "mount_setattr and clone3 have no safe wrapper")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `struct mount_attr` of linux/mount.h.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Mount attributes that restrict a view, as `mount_setattr` knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes(u64);

impl Attributes {
    /// Set-user-id bits and file capabilities have no effect.
    pub(crate) const NOSUID: Self = Self(0x2);
    /// Device files cannot be opened.
    pub(crate) const NODEV: Self = Self(0x4);

    /// Both.
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;

/// Gives a detached mount these attributes, an id mapping, and private propagation.
///
/// # Errors
/// EINVAL when the file system cannot be idmapped, EPERM without CAP_SYS_ADMIN.
pub(crate) fn set_idmap(mount: BorrowedFd<'_>, map: BorrowedFd<'_>, attributes: Attributes) -> io::Result<()> {
    let namespace = u64::try_from(map.as_raw_fd()).map_err(io::Error::other)?;
    let attr = MountAttr {
        set: MOUNT_ATTR_IDMAP | attributes.0,
        clear: 0,
        propagation: libc::MS_PRIVATE,
        user_namespace: namespace,
    };
    // SAFETY: the path is a NUL-terminated literal and `attr` a live struct of the size that is passed; the kernel only
    // reads both. The descriptors are borrowed for the whole call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A child process that only waits, in a user namespace of its own without any mapping. Killed and reaped when dropped.
#[derive(Debug)]
pub(crate) struct NamespaceHolder {
    pidfd: OwnedFd,
    pid: i32,
}

impl NamespaceHolder {
    /// Starts the process.
    ///
    /// # Errors
    /// What clone3(2) says: ENOSPC at the limit of user namespaces, EPERM where they are forbidden.
    pub(crate) fn start() -> io::Result<Self> {
        let mut pidfd: i32 = -1;
        let mut args = libc::clone_args {
            flags: (libc::CLONE_NEWUSER | libc::CLONE_PIDFD) as u64,
            pidfd: (&raw mut pidfd) as u64,
            child_tid: 0,
            parent_tid: 0,
            // No signal at its end: the launcher's handling of SIGCHLD never sees this process.
            exit_signal: 0,
            stack: 0,
            stack_size: 0,
            tls: 0,
            set_tid: 0,
            set_tid_size: 0,
            cgroup: 0,
        };
        // SAFETY: getpid takes nothing and cannot fail.
        let parent = unsafe { libc::getpid() };
        // SAFETY: without CLONE_VM the child gets a copy of the memory and, with no stack given, goes on on the copy of
        // this one; `args` and `pidfd` live through the call. The child calls nothing but async-signal-safe functions.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
        match pid {
            0 => wait_for_the_end_of(parent),
            -1 => Err(io::Error::last_os_error()),
            pid => {
                // SAFETY: clone3 succeeded with CLONE_PIDFD, so `pidfd` is a new descriptor that nobody else owns.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                Ok(Self { pidfd, pid: i32::try_from(pid).map_err(io::Error::other)? })
            }
        }
    }

    /// Its process id; stays its own until this value is dropped.
    pub(crate) const fn pid(&self) -> i32 {
        self.pid
    }
}

impl Drop for NamespaceHolder {
    fn drop(&mut self) {
        // Neither call can fail: the process is this one's own child and only this value reaps it.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
        let id = self.pidfd.as_fd().as_raw_fd().unsigned_abs();
        loop {
            // SAFETY: P_PIDFD with an owned descriptor; a null siginfo is allowed. __WALL, since the child's exit signal
            // is none, which waitid(2) otherwise leaves out.
            let result = unsafe { libc::waitid(libc::P_PIDFD, id, std::ptr::null_mut(), libc::WEXITED | libc::__WALL) };
            if result == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
    }
}

/// Waits to be killed, by `parent` or by its end.
fn wait_for_the_end_of(parent: libc::pid_t) -> ! {
    // SAFETY: prctl with PR_SET_PDEATHSIG takes plain numbers and is async-signal-safe.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: getppid takes nothing, and is async-signal-safe. A parent that ended before the line above sends no signal, and
    // a new user namespace leaves the parent its number.
    if unsafe { libc::getppid() } != parent {
        super::process::exit_now(1);
    }
    loop {
        // SAFETY: pause takes nothing, and is async-signal-safe.
        unsafe { libc::pause() };
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitId, WaitIdOptions};

    use super::*;
    use crate::sys::clone::{Birth, fork};

    #[test]
    fn a_holder_whose_parent_has_ended_before_it_began_ends() {
        let nobodys = libc::pid_t::MAX;
        let holder = fork(Birth::default(), || wait_for_the_end_of(nobodys)).unwrap();
        let ended = rustix::process::waitid(WaitId::PidFd(holder.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
        assert_eq!(ended.and_then(|ended| ended.exit_status()), Some(1));
    }
}
