//! Resource limits per process (getrlimit(2)). Memory is never limited here: an address space limit breaks WebAssembly, the
//! JVM and JITs, so it is the cgroup's business.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limits of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rlimits {
    /// RLIMIT_NOFILE, soft and hard.
    pub(crate) open_files: u64,
    /// RLIMIT_NPROC for the sandbox's uid, where no cgroup limits processes.
    pub(crate) processes: Option<u64>,
}

impl Rlimits {
    /// Sets them for the calling process and all that it will start.
    pub(crate) fn set(self) -> io::Result<()> {
        // 1, not 0: the kernel starts a core handler that is a pipe for 0 too, but never for 1 (core(5)).
        exactly(Resource::Core, 1)?;
        exactly(Resource::Nofile, self.open_files)?;
        at_most(Resource::Memlock, 8 << 20)?;
        at_most(Resource::Msgqueue, 819_200)?;
        if let Some(processes) = self.processes {
            exactly(Resource::Nproc, processes)?;
        }
        Ok(())
    }
}

/// When the host runs out of memory, sandboxes go first (proc(5), /proc/pid/oom_score_adj): not the launcher, whose own
/// protection a child inherits.
const FIRST_TO_GO: &str = "500";

/// Makes the calling process, and all that it will start, the kernel's first choice when the host runs out of memory. To be
/// called while the host's /proc is there.
pub(crate) fn be_first_to_go() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", FIRST_TO_GO)
}

fn exactly(resource: Resource, value: u64) -> io::Result<()> {
    Ok(setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })?)
}

/// The value, or the lower one that holds already: to raise a hard limit would need a capability that a container may lack.
fn at_most(resource: Resource, value: u64) -> io::Result<()> {
    let value = getrlimit(resource).maximum.map_or(value, |hard| hard.min(value));
    exactly(resource, value)
}
