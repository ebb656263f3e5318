//! Durable events per second, against the disk's own rate.
//!
//! The event is a person's message to a running job: it is acknowledged once it is on disk, and needs neither model nor tool.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::client::Client;
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
        let disk_before = disk_rate(&bench.staged.state())?;
        let sent = together(jobs, EVENTS.div_ceil(jobs), |client| {
            let (path, client) = clients.get(client).context("there is no such client")?;
            let mut client = client.lock().ok().context("another client panicked")?;
            client.request("POST", path, &json!({"text": "go on"}))
        })?;
        let disk = f64::midpoint(disk_before, disk_rate(&bench.staged.state())?);
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

/// How often per second a block is appended to a file of that directory's file system and durable.
fn disk_rate(directory: &Path) -> Result<f64> {
    let path = directory.join("disk");
    let mut file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    let (block, start) = (vec![1; BLOCK], Instant::now());
    let mut count = 0_u32;
    while start.elapsed() < DISK {
        file.write_all(&block)?;
        file.sync_data()?;
        count += 1;
    }
    let took = start.elapsed();
    fs::remove_file(&path)?;
    Ok(f64::from(count) / took.as_secs_f64())
}
