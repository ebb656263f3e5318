//! The daemon's start, with an empty ledger and with one that many jobs have left.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::rate::together;
use super::samples::Samples;
use super::{Bench, Row, waiting};
use crate::process;

/// How often the daemon is started.
const STARTS: usize = 10;
/// How many clients submit jobs at once.
const CLIENTS: usize = 8;
/// So many jobs run at once, and all may wait.
const LIMITS: &str = "[limits]\nrunning_jobs = 64\njobs_per_user = 64\nqueued_jobs = 1000000\n";

/// From exec to the first answer.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    eprintln!("starts of the daemon, {STARTS} rounds");
    let mut empty = Samples::default();
    for _ in 0..STARTS {
        process::check_interrupt()?;
        let start = Instant::now();
        let daemon = bench.daemon("start", LIMITS)?;
        empty.push(start.elapsed());
        drop(daemon);
    }

    let jobs = bench.effort.ledger_jobs;
    let daemon = bench.daemon("start-fill", LIMITS)?;
    let each = jobs.div_ceil(CLIENTS);
    eprintln!("filling the ledger with {} jobs", each * CLIENTS);
    let filled = Instant::now();
    together(CLIENTS, each, |_| waiting::submit(&daemon, false))?;
    waiting::until_all_ended(&daemon, Duration::from_secs(3600))?;
    let made = filled.elapsed();
    drop(daemon);
    let mut full = Samples::default();
    for _ in 0..STARTS {
        process::check_interrupt()?;
        let start = Instant::now();
        let daemon = bench.start_again("start-full")?;
        full.push(start.elapsed());
        drop(daemon);
    }
    Ok(vec![
        Row::new("start of `agentd serve` until it answers", empty.text(), "goal: under a second"),
        Row::new(
            format!("the same with {} ended jobs in the ledger", each * CLIENTS),
            full.text(),
            format!(
                "{:.2} × with an empty one, goal: under a second; the daemon itself made them, on a model that answers at once, in {:.0} s",
                full.times(&empty),
                made.as_secs_f64()
            ),
        ),
    ])
}
