//! The only unsafe code: system calls that no well-kept library offers safely, each behind a safe function.
//!
//! A file per kind of call. Every `unsafe` block holds one operation and says which invariant it needs and who keeps it.

pub(crate) mod clock;
pub(crate) mod clone;
pub(crate) mod exec_fd;
pub(crate) mod idmap;
pub mod inherited;
pub(crate) mod mount;
pub(crate) mod net;
pub mod peer;
pub(crate) mod process;
pub(crate) mod seccomp;
pub(crate) mod secret;
pub(crate) mod wait;
pub(crate) mod worker_process;
