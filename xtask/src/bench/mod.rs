//! `cargo xtask bench`: agentd beside what people would use instead, in one run on one machine.
//!
//! Seconds differ from machine to machine and from hour to hour, so what counts is the ratio of two medians whose samples
//! were taken in turns. The table goes to stdout in Markdown, ready for docs/performance.md; progress goes to stderr.

mod calls;
mod client;
mod jobs;
mod launch;
mod samples;
mod service;
mod trees;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::demo::{self, Daemon};
use crate::example::Staged;
use crate::project::{self, Profile};

/// How many samples are taken.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// Of launches and calls.
    pub(crate) rounds: usize,
    /// How many files the largest measured workspace has at most.
    pub(crate) files: usize,
    /// How the measured programs are built.
    pub(crate) profile: Profile,
}

/// One line of the table.
pub(crate) struct Row {
    what: String,
    measured: String,
    against: String,
}

impl Row {
    fn new(what: impl Into<String>, measured: impl Into<String>, against: impl Into<String>) -> Self {
        Self { what: what.into(), measured: measured.into(), against: against.into() }
    }
}

/// Measures and prints.
pub(crate) fn run(effort: Effort) -> Result<()> {
    demo::require_root()?;
    let folder = project::target()?.join("bench");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    fs::create_dir_all(&folder)?;
    demo::build(effort.profile)?;
    let staged = Staged::prepare(&folder, None)?;
    let echoes = calls::install(&staged)?;
    let model = jobs::install(&staged, &folder, effort.profile)?;

    let mut rows = service::start(&staged, &folder, effort)?;
    {
        let daemon = Daemon::start(&staged, &folder.join("agentd.log"), effort.profile)?;
        rows.extend(launch::measure(&daemon, effort)?);
        rows.extend(calls::measure(&daemon, &echoes, effort)?);
        rows.extend(jobs::measure(&daemon, &model, &folder, effort)?);
        rows.extend(trees::measure(&daemon, &folder, effort)?);
        rows.extend(service::throughput(&daemon, effort)?);
    }
    print(&rows, effort.profile)
}

fn print(rows: &[Row], profile: Profile) -> Result<()> {
    let build = if profile == Profile::Release { "" } else { "A debug build, so the figures mean nothing. " };
    println!("{build}{}\n", machine()?);
    println!("| what | measured | against |\n|---|---|---|");
    for row in rows {
        println!("| {} | {} | {} |", row.what, row.measured, row.against);
    }
    Ok(())
}

/// The machine in one line.
fn machine() -> Result<String> {
    let cpus = fs::read_to_string("/proc/cpuinfo").context("reading /proc/cpuinfo")?;
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("\t: unknown processor");
    let model = model.trim_start_matches(['\t', ' ', ':']);
    let count = std::thread::available_parallelism()?;
    let kernel = rustix::system::uname();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    Ok(format!(
        "{count} × {model}, Linux {}, load at the end {}",
        kernel.release().to_string_lossy(),
        load.split(' ').next().unwrap_or("unknown")
    ))
}

/// A folder of the bench's own files in the checkout.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("bench").join(name)
}
