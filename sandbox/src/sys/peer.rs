//! What the kernel says about the other end of a Unix socket (unix(7)), where no crate offers it.
#![expect(unsafe_code, reason = "SO_PEERGROUPS, SO_PEERPIDFD and SIOCUNIXFILE have no safe form")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// linux/sockios.h: SIOCPROTOPRIVATE + 0 for Unix sockets.
const SIOCUNIXFILE: libc::Ioctl = 0x89E0;
/// Few have more.
const USUAL_GROUPS: usize = 64;

/// The supplementary groups of whoever connected (SO_PEERGROUPS).
///
/// # Errors
/// As getsockopt(2).
pub fn groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    groups_with_room(socket, USUAL_GROUPS)
}

/// The groups, first asked for with so much room. They are kept for as long as a job lives: what they do not need is given back.
fn groups_with_room(socket: BorrowedFd<'_>, room: usize) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; room];
    loop {
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
        let count = length as usize / size_of::<libc::gid_t>();
        if result == 0 {
            groups.truncate(count);
            groups.shrink_to_fit();
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // With ERANGE the kernel says how many there are.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn groups_are_all_found_and_take_no_more_room_than_they_need() {
        let (end, _other) = UnixStream::pair().unwrap();
        let own: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        for room in [0, own.len(), USUAL_GROUPS + own.len()] {
            let found = groups_with_room(end.as_fd(), room).unwrap();
            assert_eq!((found.len(), found.capacity()), (own.len(), own.len()), "{room}");
            assert!(own.iter().all(|group| found.contains(group)), "{found:?}");
        }
    }
}
