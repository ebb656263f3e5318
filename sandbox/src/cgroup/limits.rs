//! Limits as the controllers' files take them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use toolproto::units::{Bytes, DiskRates};

use super::files::{entries, write};
use super::{CgroupError, Controller};

/// The period of cpu.max, in microseconds.
const CPU_PERIOD: u64 = 100_000;

/// The host's whole disks (sysfs(5)).
const DISKS: &str = "/sys/block";

/// What one group may use.
pub(super) struct Limits {
    pub(super) cpu_milli: Option<u64>,
    pub(super) memory: Option<Bytes>,
    pub(super) memory_high: Option<Bytes>,
    pub(super) swap: Option<Bytes>,
    pub(super) pids: Option<u32>,
    pub(super) io: DiskRates,
}

impl Limits {
    /// Writes what the controllers at hand can keep; whether the rest may be let go is the plan's decision.
    pub(super) fn write(&self, directory: &Path, controllers: &BTreeSet<Controller>) -> Result<(), CgroupError> {
        let set = |controller, file: &str, value: Option<String>| match value {
            Some(value) if controllers.contains(&controller) => write(&directory.join(file), &value),
            _ => Ok(()),
        };
        set(Controller::Memory, "memory.max", self.memory.map(|bytes| bytes.0.to_string()))?;
        set(Controller::Memory, "memory.high", self.memory_high.map(|bytes| bytes.0.to_string()))?;
        // A kernel without swap accounting has no such file, and then no swap to limit.
        if self.swap.is_some()
            && controllers.contains(&Controller::Memory)
            && directory.join("memory.swap.max").exists()
        {
            set(Controller::Memory, "memory.swap.max", self.swap.map(|bytes| bytes.0.to_string()))?;
        }
        set(Controller::Pids, "pids.max", self.pids.map(|pids| pids.to_string()))?;
        if self.io.is_limited() && controllers.contains(&Controller::Io) {
            limit_disks(directory, self.io)?;
        }
        set(
            Controller::Cpu,
            "cpu.max",
            self.cpu_milli.map(|milli| format!("{} {CPU_PERIOD}", milli * CPU_PERIOD / 1000)),
        )
    }
}

/// Limits what goes from and to each disk: a call may read from one and write to another. `io.max` takes whole disks only, by
/// their numbers.
fn limit_disks(directory: &Path, rates: DiskRates) -> Result<(), CgroupError> {
    let rate = |key: &str, bytes: Option<Bytes>| bytes.map(|bytes| format!(" {key}={}", bytes.0)).unwrap_or_default();
    let rates = rate("rbps", rates.read) + &rate("wbps", rates.write);
    for disk in entries(Path::new(DISKS))? {
        let Ok(numbers) = fs::read_to_string(disk.join("dev")) else { continue };
        match write(&directory.join("io.max"), &format!("{}{rates}", numbers.trim())) {
            // It was taken out meanwhile, or is none to which anything goes, such as a loop device without a file.
            Err(CgroupError::Write { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {}
            written => written?,
        }
    }
    Ok(())
}
