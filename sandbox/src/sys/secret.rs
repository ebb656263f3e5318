//! Memory for a secret: a page that children do not inherit and core files do not show.
#![expect(unsafe_code, reason = "mmap and madvise have no safe form")]

use std::io;
use std::ptr::{self, NonNull};

use super::process::check;

/// How much is mapped: a page on every architecture that agentd runs on.
const PAGE: usize = 4096;

/// 32 secret bytes in a page of their own, which is zero in every forked child (MADV_WIPEONFORK), is left out of core files
/// (MADV_DONTDUMP), and is overwritten when dropped.
#[derive(Debug)]
pub(crate) struct SecretPage {
    page: NonNull<[u8; 32]>,
}

impl SecretPage {
    /// Moves a secret there; the source is overwritten.
    ///
    /// # Errors
    /// As mmap(2) and madvise(2).
    pub(crate) fn hold(secret: &mut [u8; 32]) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let page = NonNull::new(page.cast::<[u8; 32]>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let held = Self { page };
        for advice in [libc::MADV_WIPEONFORK, libc::MADV_DONTDUMP] {
            // SAFETY: the range is exactly the mapping made above, which `held` owns.
            check(unsafe { libc::madvise(page.as_ptr().cast(), PAGE, advice) })?;
        }
        // SAFETY: the mapping is writable, aligned, larger than 32 bytes, and nobody else's.
        unsafe { page.as_ptr().write(*secret) };
        overwrite(secret);
        Ok(held)
    }

    /// The secret; zeros in a forked child.
    pub(crate) const fn expose(&self) -> &[u8; 32] {
        // SAFETY: the mapping lives as long as `self`, is initialised, and changes only through `drop`.
        unsafe { self.page.as_ref() }
    }
}

impl Drop for SecretPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone.
        overwrite(unsafe { self.page.as_mut() });
        // SAFETY: nobody can have a reference any more; the address and length are those of the mapping.
        if unsafe { libc::munmap(self.page.as_ptr().cast(), PAGE) } == -1 {
            tracing::error!("a page of secrets stays mapped");
        }
    }
}

/// Overwrites a secret in a way that no optimiser leaves out.
pub(crate) fn overwrite(secret: &mut [u8; 32]) {
    for byte in secret {
        // SAFETY: a valid, exclusive reference.
        unsafe { ptr::write_volatile(byte, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clone::{Birth, fork};
    use crate::sys::wait::{Ended, reap};
    use std::os::fd::AsFd;

    #[test]
    fn a_child_finds_zeros_where_the_parent_has_the_secret() {
        let mut secret = [7; 32];
        let page = SecretPage::hold(&mut secret).unwrap();
        assert_eq!(secret, [0; 32], "the source is overwritten");
        assert_eq!(page.expose(), &[7; 32]);
        let child = fork(Birth::default(), || i32::from(page.expose() != &[0; 32])).unwrap();
        let reaped = loop {
            if let Some(reaped) = reap(child.pidfd.as_fd()).unwrap() {
                break reaped;
            }
            std::thread::yield_now();
        };
        assert_eq!(reaped.ended, Ended::Exited(0));
        assert_eq!(page.expose(), &[7; 32]);
    }

    #[test]
    fn the_page_is_left_out_of_core_files() {
        let page = SecretPage::hold(&mut [7; 32]).unwrap();
        let address = format!("{:x}", page.page.as_ptr().addr());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.split("VmFlags:").collect::<Vec<_>>();
        let index = own.iter().position(|part| part.contains(&address)).unwrap();
        let flags = own[index + 1].lines().next().unwrap();
        assert!(flags.contains(" dd") && flags.contains(" wf"), "{flags}");
    }
}
