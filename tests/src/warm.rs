//! Processes that are started ahead of their calls, seen from outside.

use std::fs;
use std::path::{Path, PathBuf};

use crate::daemon::{PATIENCE, eventually};
use crate::leftovers;
use crate::site::Site;

/// Makes a tool want so many processes started ahead.
///
/// # Panics
/// When its manifest cannot be changed.
pub fn prewarm(site: &Site, tool: &str, count: u32) {
    let manifest = format!("config/tools/{tool}/tool.toml");
    let text = fs::read_to_string(site.path(&manifest)).expect("a manifest");
    site.write(&manifest, text.replace("\n[run]\n", &format!("\n[run]\nprewarm = {count}\n")).as_bytes());
}

/// The cgroups of those that wait, in their own program already.
pub fn ready(site: &Site) -> Vec<PathBuf> {
    let Some(root) = leftovers::cgroup_root(site) else { return Vec::new() };
    let is_ready = |leaf: &PathBuf| {
        let is_warm = leaf.file_name().is_some_and(|name| name.to_string_lossy().starts_with("warm-"));
        is_warm && processes_in(leaf).into_iter().filter_map(program).any(|name| !name.starts_with("agentd-"))
    };
    leftovers::cgroups_below(&root).into_iter().filter(is_ready).collect()
}

/// Waits until so many are ready.
///
/// # Panics
/// When they do not come.
#[track_caller]
pub fn wait_for_ready(site: &Site, count: usize) {
    eventually(&format!("{count} processes wait"), PATIENCE, || ready(site).len() == count);
}

/// Waits until so many have started as far as their own code goes: they read their standard input, which is empty until
/// their call. An interpreter that has its name already may still be far from that.
///
/// # Panics
/// When they do not come.
#[track_caller]
pub fn wait_for_reading(site: &Site, count: usize) {
    let reading = || ready(site).iter().filter(|leaf| processes_in(leaf).into_iter().any(reads_its_input)).count();
    eventually(&format!("{count} processes read their input"), PATIENCE, || reading() == count);
}

/// Whether a thread of the process is in `read(0, …)`; see proc_pid_syscall(5).
fn reads_its_input(id: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{id}/task")) else { return false };
    let call = format!("{} 0x0 ", nix::libc::SYS_read);
    threads
        .flatten()
        .any(|thread| fs::read_to_string(thread.path().join("syscall")).is_ok_and(|line| line.starts_with(&call)))
}

/// The processes of a cgroup.
#[must_use]
pub fn processes_in(leaf: &Path) -> Vec<u32> {
    let text = fs::read_to_string(leaf.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

fn program(id: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{id}/comm")).ok()
}
