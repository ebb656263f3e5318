//! What the kernel says of the daemon's processes.

use std::fs;

use anyhow::{Context as _, Result};

use crate::demo::Daemon;

/// Launcher and daemon, at one time.
#[derive(Clone, Copy)]
pub(super) struct Processes {
    /// Resident memory of the launcher, in KiB.
    pub(super) launcher: u64,
    /// Resident memory of the daemon, in KiB.
    pub(super) daemon: u64,
    /// The daemon's threads.
    pub(super) threads: u64,
    /// How many processes the launcher has started and that run: the daemon, workers, sandboxes.
    pub(super) children: usize,
}

impl Processes {
    /// Looks now.
    pub(super) fn of(daemon: &Daemon) -> Result<Self> {
        let launcher = daemon.pid();
        let children = read(&launcher.to_string(), &format!("task/{launcher}/children"))?;
        let status = daemon_status(&children)?;
        Ok(Self {
            launcher: figure(&read(&launcher.to_string(), "status")?, "VmRSS")?,
            daemon: figure(&status, "VmRSS")?,
            threads: figure(&status, "Threads")?,
            children: children.split_whitespace().count(),
        })
    }
}

/// The status of that child of the launcher's which speaks to clients.
fn daemon_status(children: &str) -> Result<String> {
    let mut daemons = children.split_whitespace().filter(|pid| {
        // Others may end meanwhile.
        let command = read(pid, "cmdline").unwrap_or_default();
        command.split('\0').any(|argument| argument == "--listener-fd")
    });
    let daemon = daemons.next_back().context("the launcher has no daemon")?;
    read(daemon, "status")
}

fn read(pid: &str, file: &str) -> Result<String> {
    let path = format!("/proc/{pid}/{file}");
    fs::read_to_string(&path).with_context(|| format!("reading {path}"))
}

fn figure(status: &str, name: &str) -> Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("a process without {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_their_whole_name() {
        let status = "VmRSSx:\t1 kB\nVmRSS:\t  120 kB\nThreads:\t3\n";
        assert_eq!((figure(status, "VmRSS").unwrap(), figure(status, "Threads").unwrap()), (120, 3));
        assert!(figure(status, "Vm").is_err());
    }
}
