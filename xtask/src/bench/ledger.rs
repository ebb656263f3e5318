//! Durable events per second, against the disk's own rate.
//!
//! The event is a person's message to a running job: it is acknowledged once it is on disk, and needs neither model nor tool.

use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::client::Client;
use super::disk::Disk;
use super::rate::together;
use super::{Bench, Row, waiting};

/// How many jobs get events at once.
const JOBS: [usize; 3] = [1, 16, 256];
/// How many events are sent in all, of each number of jobs.
const EVENTS: usize = 2_048;
/// How long the disk alone is measured, before and after each.
const DISK: Duration = Duration::from_secs(1);
/// What the disk is given at a time: about what an event makes the ledger write.
const BLOCK: usize = 8 << 10;
/// All jobs run at once.
const LIMITS: &str =
    "[limits]\nrunning_jobs = 300\njobs_per_user = 300\nqueued_jobs = 300\n\n[timeouts]\nmodel = \"1h\"\n";

/// Measures each number of jobs between two measurements of the disk.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for jobs in JOBS {
        eprintln!("durable events of {jobs} jobs");
        let daemon = bench.daemon("ledger", LIMITS)?;
        bench.model.set_open(false);
        let ids: Vec<_> = (0..jobs).map(|_| waiting::submit(&daemon, true)).collect::<Result<_>>()?;
        waiting::until(|| Ok(bench.model.held() == jobs), "all jobs have asked")?;
        // Only now: a user has at most 256 connections.
        let mut clients = Vec::new();
        for job in ids {
            clients.push((format!("/v1/jobs/{job}/messages"), Mutex::new(Client::connect(daemon.socket())?)));
        }
        let mut disk = Disk::of(&bench.staged.state(), BLOCK)?;
        let disk_before = disk.rate(DISK)?;
        let sent = together(jobs, EVENTS.div_ceil(jobs), |client| {
            let (path, client) = clients.get(client).context("there is no such client")?;
            let mut client = client.lock().ok().context("another client panicked")?;
            client.request("POST", path, &json!({"text": "go on"}))
        })?;
        let disk = f64::midpoint(disk_before, disk.rate(DISK)?);
        drop(clients);
        drop(daemon);
        bench.model.set_open(true);
        waiting::until(|| Ok(bench.model.held() == 0), "nothing is held back")?;
        rows.push(Row::new(
            format!("durable events per second, {jobs} {}", if jobs == 1 { "job" } else { "jobs at once" }),
            format!("{:.0} per second", sent.rate()),
            format!(
                "{:.2} × the disk's rate of append and fdatasync of {} KiB ({disk:.0} per second); each {}",
                sent.rate() / disk,
                BLOCK >> 10,
                sent.samples.text()
            ),
        ));
    }
    Ok(rows)
}
