//! What one call may use.

use serde::Serialize;
use toolproto::units::{Bytes, DiskRates};

/// Limits of one call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CallLimits {
    /// Processors, in thousandths: 2000 is two whole ones.
    pub cpu_milli: Option<u64>,
    /// Memory of all its processes, files in its tmpfs included.
    pub memory: Option<Bytes>,
    /// From there on its memory is reclaimed and it is slowed down, before anything is killed.
    pub memory_high: Option<Bytes>,
    /// Swap.
    pub swap: Option<Bytes>,
    /// Processes and threads at once.
    pub pids: Option<u32>,
    /// What may go from and to each disk per second.
    pub io: DiskRates,
    /// RLIMIT_NOFILE, exact.
    pub open_files: u64,
    /// Size of the private /tmp.
    pub tmp: Bytes,
    /// Size of the private /dev/shm.
    pub shm: Bytes,
    /// Size of /workspace when no workspace is given.
    pub empty_workspace: Bytes,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self {
            cpu_milli: None,
            memory: None,
            memory_high: None,
            swap: None,
            pids: None,
            io: DiskRates::default(),
            open_files: 1024,
            tmp: Bytes::mib(256),
            shm: Bytes::mib(64),
            empty_workspace: Bytes::mib(256),
        }
    }
}

impl CallLimits {
    /// These limits, or lower ones where lower ones are given. Nothing can raise them.
    #[must_use]
    pub fn narrowed(mut self, memory: Option<Bytes>, pids: Option<u32>) -> Self {
        self.memory = lower(self.memory, memory);
        self.pids = lower(self.pids, pids);
        self
    }
}

fn lower<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
