//! Network interfaces, by ioctl(2) (netdevice(7)), and filters on sockets (socket(7)).
#![expect(unsafe_code, reason = "no safe crate offers SIOCSIFFLAGS and SO_ATTACH_FILTER")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::process::check;

/// Turns on the loopback interface of the caller's network namespace.
///
/// # Errors
/// As netdevice(7).
pub(crate) fn loopback_up() -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut name = [0; libc::IFNAMSIZ];
    for (target, byte) in name.iter_mut().zip(b"lo") {
        *target = *byte as libc::c_char;
    }
    let flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    let request = libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: flags } };
    // SAFETY: SIOCSIFFLAGS reads an ifreq with name and flags set, which outlives the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) })
}

/// One instruction of a classic packet filter: code, jumps if true and if false, and its constant.
pub(crate) type Instruction = (u32, u8, u8, u32);

/// Lets only those packets reach a socket that the filter returns a length for.
///
/// # Errors
/// As socket(7); EINVAL for a filter that the kernel does not take.
pub(crate) fn attach_filter(socket: BorrowedFd<'_>, filter: &[Instruction]) -> io::Result<()> {
    let mut program = Vec::with_capacity(filter.len());
    for (code, jt, jf, k) in filter.iter().copied() {
        let code = u16::try_from(code).map_err(|_| io::ErrorKind::InvalidInput)?;
        program.push(libc::sock_filter { code, jt, jf, k });
    }
    let length = libc::c_ushort::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let argument = libc::sock_fprog { len: length, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies `length` instructions from the pointer, which `program` keeps alive; it checks them itself.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const argument).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    })
}
