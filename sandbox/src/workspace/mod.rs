//! A workspace: the directory of the caller's that a job's tools work in.
//!
//! | module | what it holds |
//! |---|---|
//! | [`tree`] | a tree as it was at one moment, and its digest |
//! | [`scan`] | reading a tree from the file system, by descriptor |
//! | `watch` | where a tree may have changed since it was read |
//! | `attention` | what is examined before a call, and how thoroughly |
//! | [`changes`] | what differs between two trees |
//! | [`upper`] | what a call wrote, read from its overlay's upper directory |
//! | [`journal`] | the steps of a commit, and the file that survives a crash |
//! | [`staging`] | the directories that changes pass through |
//! | [`commit`] | one call's commit: prepare, apply, take back |
//! | [`apply`] | carrying the steps out, or taking them back |
//! | `protect` | names that no call may change |
//! | `rollback` | going back over the layers of earlier commits |
//! | `remove` | removing a tree that a tool wrote |
//! | `reach` | reaching an entry by its path, by descriptor |
//! | [`view`] | what a sandbox sees at `/workspace` |
//! | [`idmap`] | the id mapping below the views |
//! | [`worker`] | the process that touches a workspace's files, as the caller |

pub mod apply;
mod attention;
pub mod changes;
pub mod commit;
pub mod idmap;
pub mod journal;
pub(crate) mod protect;
mod reach;
mod remove;
pub(crate) mod rollback;
pub mod scan;
pub mod staging;
pub mod tree;
pub mod upper;
pub mod view;
mod watch;
pub mod worker;

/// Whom a workspace's files belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Owner {
    /// The owner's uid.
    pub uid: u32,
    /// The group that new files get.
    pub gid: u32,
}
