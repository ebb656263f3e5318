//! The id mapping of a workspace's view: the identity, with the owner and the sandbox's uid (and gid) swapped.
//!
//! A mount with this mapping shows the owner's files as the sandbox's, and what the sandbox writes lies on disk as the
//! owner's. Every other id stays what it is, so that foreign groups and ACL entries survive. A smaller map would not do:
//! overlayfs needs id 0 to be mapped, and an unmapped id makes a file unreachable. See mount_setattr(2), "ID-mapped mounts".

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;

use super::Owner;
use crate::sys::idmap::NamespaceHolder;

/// No mapping could be made.
#[derive(Debug, thiserror::Error)]
pub enum IdmapError {
    /// The namespace could not be created.
    #[error("failed to create a user namespace for the id mapping")]
    Namespace(#[source] io::Error),
    /// The mapping could not be written.
    #[error("failed to write {file} of the id mapping's user namespace")]
    Write {
        /// `uid_map` or `gid_map`.
        file: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A user namespace that carries the mapping; no process is left in it.
///
/// # Errors
/// When the kernel refuses user namespaces or the mapping: it takes CAP_SETUID, CAP_SETGID and CAP_SETFCAP.
pub fn swapped(owner: Owner, sandbox_id: u32) -> Result<OwnedFd, IdmapError> {
    let holder = NamespaceHolder::start().map_err(IdmapError::Namespace)?;
    let process = format!("/proc/{}", holder.pid());
    for (file, on_disk) in [("uid_map", owner.uid), ("gid_map", owner.gid)] {
        fs::write(format!("{process}/{file}"), swap_map(on_disk, sandbox_id))
            .map_err(|source| IdmapError::Write { file, source })?;
    }
    File::open(format!("{process}/ns/user")).map(OwnedFd::from).map_err(IdmapError::Namespace)
}

/// The lines of a map over all ids that exchanges `a` and `b`. (The id 4294967295 is none.)
fn swap_map(a: u32, b: u32) -> String {
    let (low, high) = (a.min(b), a.max(b));
    let mut ranges = vec![(0, 0, low)];
    if low == high {
        ranges.push((low, low, u32::MAX - low));
    } else {
        ranges.push((low, high, 1));
        ranges.push((low + 1, low + 1, high - low - 1));
        ranges.push((high, low, 1));
        ranges.push((high.saturating_add(1), high.saturating_add(1), u32::MAX - high - 1));
    }
    let mut map = String::new();
    for (inside, outside, count) in ranges.into_iter().filter(|(_, _, count)| *count > 0) {
        // Writing to a String cannot fail.
        let _ = writeln!(map, "{inside} {outside} {count}");
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(map: &str, id: u32) -> Option<u32> {
        map.lines().find_map(|line| {
            let fields: Vec<u32> = line.split(' ').map(|field| field.parse().unwrap()).collect();
            let offset = id.checked_sub(fields[0]).filter(|offset| *offset < fields[2])?;
            Some(fields[1] + offset)
        })
    }

    #[test]
    fn the_map_is_the_identity_but_for_the_two() {
        for (a, b) in [(0, 70_000), (1000, 70_000), (70_000, 1000), (70_000, 70_001), (5, 5), (0, 0), (0, 1)] {
            let map = swap_map(a, b);
            for id in [0, 1, 4, 5, 6, 999, 1000, 1001, 69_999, 70_000, 70_001, 70_002, u32::MAX - 1] {
                let expected = if id == a {
                    b
                } else if id == b {
                    a
                } else {
                    id
                };
                assert_eq!(apply(&map, id), Some(expected), "{a} and {b}, id {id}:\n{map}");
            }
        }
    }

    #[test]
    fn ids_at_the_edge_do_not_overflow() {
        assert_eq!(swap_map(0, u32::MAX - 1), "0 4294967294 1\n1 1 4294967293\n4294967294 0 1\n");
    }
}
