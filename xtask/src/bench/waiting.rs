//! Many jobs that wait for a slow model: what each costs the daemon, and how soon a daemon goes on with them that is started again.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::processes::Processes;
use super::rate::together;
use super::{Bench, GOAL_AGENT, Row, client, model};
use crate::demo::Daemon;
use crate::process;

/// How many clients submit jobs at once.
const CLIENTS: usize = 8;
/// How long all jobs may take to come where they are waited for.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often is looked.
const LOOK: Duration = Duration::from_millis(20);

/// Measures them.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let each = bench.effort.waiting_jobs.div_ceil(CLIENTS);
    let jobs = each * CLIENTS;
    eprintln!("{jobs} jobs wait for a slow model");
    let limits = format!(
        "[limits]\nrunning_jobs = {jobs}\njobs_per_user = {jobs}\nqueued_jobs = {jobs}\n\n[timeouts]\nmodel = \"1h\"\n"
    );
    let daemon = bench.daemon("waiting", &limits)?;
    // What is made once, some job makes.
    submit(&daemon, false)?;
    until_all_ended(&daemon, PATIENCE)?;
    let before = Processes::of(&daemon)?;

    bench.model.set_open(false);
    let submitted = together(CLIENTS, each, |_| submit(&daemon, true))?;
    until(|| Ok(bench.model.held() == jobs), "all jobs have asked")?;
    let during = Processes::of(&daemon)?;

    drop(daemon);
    let start = Instant::now();
    let daemon = bench.start_again("waiting-again")?;
    let started = start.elapsed();
    // Those whose clients have gone are held back as well until then.
    bench.model.set_open(true);
    until_all_ended(&daemon, PATIENCE)?;
    let ended = start.elapsed();

    let more = during.daemon.saturating_sub(before.daemon);
    #[expect(clippy::cast_precision_loss, reason = "thousands of jobs and KiB")]
    let per_job = more as f64 / jobs as f64;
    let launcher = during.launcher.saturating_sub(before.launcher);
    Ok(vec![
        Row::new(
            format!("{jobs} jobs that wait for a slow model: memory of the daemon per job"),
            format!("{per_job:.0} KiB"),
            format!(
                "goal: at most 200 KiB; the daemon went from {} to {} KiB, the launcher, with {} processes, grew by {launcher} KiB; the \
                 daemon's threads: {} before, {} then; submitted at {:.0} per second",
                before.daemon,
                during.daemon,
                during.children,
                before.threads,
                during.threads,
                submitted.rate()
            ),
        ),
        Row::new(
            format!("start of `agentd serve` that goes on with {jobs} jobs which were waiting for their model"),
            format!("{:.2} s", started.as_secs_f64()),
            format!("{:.2} s until all of them have ended, once the model answers", ended.as_secs_f64()),
        ),
    ])
}

/// Submits a job without calls, whose model answers at once or is held back.
pub(super) fn submit(daemon: &Daemon, held: bool) -> Result<String> {
    let body = json!({"version": 1, "agent": GOAL_AGENT, "goal": model::goal(0, held)});
    let accepted = client::request(daemon.socket(), "POST", "/v1/jobs", &body)?;
    Ok(accepted["job_id"].as_str().context("a job without id")?.to_owned())
}

/// Waits until no job waits or runs any more.
pub(super) fn until_all_ended(daemon: &Daemon, patience: Duration) -> Result<()> {
    let end = Instant::now() + patience;
    for state in ["queued", "running"] {
        let path = format!("/v1/jobs?state={state}&limit=1");
        loop {
            let page = client::request(daemon.socket(), "GET", &path, &Value::Null)?;
            if page["jobs"].as_array().is_some_and(Vec::is_empty) {
                break;
            }
            look_again(end, "all jobs have ended")?;
        }
    }
    Ok(())
}

/// Waits until something is so.
pub(super) fn until(mut is_so: impl FnMut() -> Result<bool>, what: &str) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !is_so()? {
        look_again(end, what)?;
    }
    Ok(())
}

fn look_again(end: Instant, what: &str) -> Result<()> {
    if Instant::now() > end {
        bail!("it took too long until {what}");
    }
    process::check_interrupt()?;
    thread::sleep(LOOK);
    Ok(())
}
