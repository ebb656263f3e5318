//! What the kernel says about the other end of a Unix socket (unix(7)), where no crate offers it.
#![expect(unsafe_code, reason = "SO_PEERGROUPS, SO_PEERPIDFD and SIOCUNIXFILE have no safe form")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// linux/sockios.h: SIOCPROTOPRIVATE + 0 for Unix sockets.
const SIOCUNIXFILE: libc::Ioctl = 0x89E0;
/// The kernel's NGROUPS_MAX.
const MOST_GROUPS: usize = 65_536;

/// The supplementary groups of whoever connected (SO_PEERGROUPS).
///
/// # Errors
/// As getsockopt(2).
pub fn groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; MOST_GROUPS];
    let mut length = libc::socklen_t::try_from(size_of_val(groups.as_slice())).map_err(io::Error::other)?;
    // SAFETY: the buffer is `length` bytes long and outlives the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(length as usize / size_of::<libc::gid_t>());
    Ok(groups)
}

/// A descriptor of the process that connected (SO_PEERPIDFD, kernel 6.5); absent on older kernels and when it is gone.
///
/// # Errors
/// As getsockopt(2).
pub(crate) fn pidfd(socket: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let mut pidfd: RawFd = -1;
    let mut length = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: the buffer is an int, as the option wants, and outlives the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut pidfd).cast(),
            &raw mut length,
        )
    };
    if result == -1 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENOPROTOOPT | libc::ESRCH | libc::EINVAL | libc::ENODATA) => Ok(None),
            _ => Err(error),
        };
    }
    // SAFETY: the kernel made a new, close-on-exec descriptor for this call, which nobody else owns.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

/// The file that the socket is bound to, as an O_PATH descriptor (SIOCUNIXFILE). An accepted socket is bound to its
/// listener's file; a client's end is usually bound to none (ENOENT).
///
/// # Errors
/// As ioctl(2); it takes CAP_NET_ADMIN.
pub(crate) fn bound_file(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument and returns a new descriptor or -1.
    let file = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE, 0) };
    if file == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: see above; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}
