//! The daemon as a whole: its start, and how many calls it gets done.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use super::samples::Samples;
use super::{Effort, Row, calls};
use crate::demo::Daemon;
use crate::example::Staged;
use crate::process;

/// How often the daemon is started.
const STARTS: usize = 10;
/// How many clients call at once.
const CLIENTS: usize = 16;

/// From exec to the first answer, with an empty ledger.
pub(super) fn start(staged: &Staged, folder: &Path, effort: Effort) -> Result<Vec<Row>> {
    eprintln!("starts of the daemon, {STARTS} rounds");
    let mut starts = Samples::default();
    for _ in 0..STARTS {
        process::check_interrupt()?;
        let start = Instant::now();
        let daemon = Daemon::start(staged, &folder.join("agentd.log"), effort.profile)?;
        starts.push(start.elapsed());
        drop(daemon);
    }
    Ok(vec![Row::new("start of `agentd serve` until it answers", starts.text(), "goal: under a second")])
}

/// Calls of a C program by several clients at once, and what memory they leave behind.
pub(super) fn throughput(daemon: &Daemon, effort: Effort) -> Result<Vec<Row>> {
    let each = effort.rounds.div_ceil(4);
    eprintln!("{CLIENTS} clients, {each} calls each");
    let before = resident(daemon)?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    (0..each).try_for_each(|_| {
                        process::check_interrupt()?;
                        calls::call(daemon.socket(), "echo_c").map(drop)
                    })
                })
            })
            .collect();
        clients.into_iter().try_for_each(|client| match client.join() {
            Ok(outcome) => outcome,
            Err(_) => bail!("a client panicked"),
        })
    })?;
    let took = start.elapsed();
    let after = resident(daemon)?;
    #[expect(clippy::cast_precision_loss, reason = "a few thousand calls")]
    let rate = (CLIENTS * each) as f64 / took.as_secs_f64();
    let grown = after.saturating_sub(before) / 1024;
    Ok(vec![Row::new(
        format!("sandboxed calls per second, {CLIENTS} clients, C tool"),
        format!("{rate:.0} per second"),
        format!("memory of both processes grew by {grown} MiB over {} calls, to {} MiB", CLIENTS * each, after / 1024),
    )])
}

/// Resident memory of launcher and daemon together, in KiB.
fn resident(daemon: &Daemon) -> Result<u64> {
    let launcher = daemon.pid();
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"))
        .context("reading the launcher's children")?;
    let mut all = vec![launcher.to_string()];
    all.extend(children.split_whitespace().map(str::to_owned));
    let mut total = 0;
    for pid in all {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0");
        total += line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(total)
}
