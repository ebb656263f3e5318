//! What the tools of a running job hold at this moment, read from the job's slice. The files are everybody's to read; where the
//! host has no memory controller there is none.

use std::path::PathBuf;

use toolproto::ids::JobId;

/// Where the jobs' slices lie, if the launcher makes any.
#[derive(Clone, Debug, Default)]
pub struct Slices(Option<PathBuf>);

impl Slices {
    /// Below this cgroup.
    #[must_use]
    pub const fn below(root: Option<PathBuf>) -> Self {
        Self(root)
    }

    /// Bytes of memory that the job's tools hold; `None` when none runs, or nobody counts.
    #[must_use]
    pub fn memory(&self, job: JobId) -> Option<u64> {
        let file = self.0.as_ref()?.join(format!("agent-{job}.slice/memory.current"));
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jobs_memory_is_its_slices() {
        let folder = tempfile::tempdir().unwrap();
        let (job, other) = (JobId::from_u128(1), JobId::from_u128(2));
        let slice = folder.path().join(format!("agent-{job}.slice"));
        std::fs::create_dir(&slice).unwrap();
        let slices = Slices::below(Some(folder.path().to_owned()));
        assert_eq!(slices.memory(job), None, "the controller is missing");
        std::fs::write(slice.join("memory.current"), "1048576\n").unwrap();
        assert_eq!((slices.memory(job), slices.memory(other)), (Some(1 << 20), None));
        assert_eq!(Slices::default().memory(job), None);
    }
}
