//! Two users' jobs at once: how the daemon's places are shared between them. All users weigh the same.

use std::fs;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{Bench, GOAL_AGENT, Row, client, launch, model, waiting};
use crate::demo::Daemon;
use crate::example;
use crate::project;

/// Ids that nobody has; no account is needed.
const USERS: [u32; 2] = [60_001, 60_002];
/// The group that may use the daemon: one that every Debian has.
const GROUP: (&str, u32) = ("users", 100);
/// How many calls each job makes.
const CALLS: usize = 3;
/// How long all jobs may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// How many jobs each user has, and how many of them run at once.
struct Case {
    jobs: [usize; 2],
    running: usize,
    /// How many jobs have their places before the second user comes, and do not count.
    before: usize,
    what: &'static str,
}

/// The first user comes first, and takes every place that there is.
const CASES: [Case; 2] = [
    Case { jobs: [140, 60], running: 16, before: 16, what: "that share 16 places" },
    Case { jobs: [100, 100], running: 200, before: 0, what: "that all run at once" },
];

/// Measures jobs that wait for their turn, and jobs that all run.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    if !groups.lines().any(|line| line.starts_with(&format!("{}:x:{}:", GROUP.0, GROUP.1))) {
        let reason = format!("this host has no group `{}` with the id {}", GROUP.0, GROUP.1);
        return Ok(vec![Row::new("200 jobs of two users", "not measured", reason)]);
    }
    CASES.iter().map(|case| one(bench, case)).collect()
}

fn one(bench: &Bench, case: &Case) -> Result<Row> {
    let Case { jobs, running, before, what } = case;
    eprintln!("{} jobs of two users {what}", jobs.iter().sum::<usize>());
    let all = format!("{{ \"*\" = [\"group:{}\"] }}", GROUP.0);
    let daemon = bench.daemon(
        "users",
        &format!(
            "[service]\ngroup = \"{}\"\n\n[access]\nagents = {all}\ntools = {all}\npolicies = {all}\n\n\
             [limits]\nrunning_jobs = {running}\njobs_per_user = {running}\n\n[timeouts]\nmodel = \"1h\"\n",
            GROUP.0
        ),
    )?;
    // The build lies where others cannot look.
    let agentctl = bench.staged.path("agentctl");
    example::copy_file(&project::program("agentctl", bench.profile)?, &agentctl, 0o755)?;
    bench.model.take_failed();
    bench.model.set_open(false);
    for (uid, count) in USERS.into_iter().zip(*jobs) {
        submit(&agentctl, &daemon, uid, count)?;
    }
    waiting::until(|| Ok(bench.model.held() == *running), "all places are taken")?;
    bench.model.set_open(true);
    let start = Instant::now();
    waiting::until_all_ended(&daemon, PATIENCE)?;
    let took = start.elapsed();

    let mut ended = Vec::new();
    let mut unsuccessful = 0;
    // The newest comes first.
    for job in all_jobs(&daemon)?.iter().rev().skip(*before) {
        let uid = job["uid"].as_u64().context("a job without uid")?;
        unsuccessful += usize::from(job["result"]["status"] != "success");
        ended.push((launch::seconds_of_day(job["ended"].as_str().context("a job that has not ended")?)?, uid));
    }
    let failed: Vec<_> = bench.model.take_failed().iter().map(|(code, count)| format!("{count} {code}")).collect();
    let [first, second] = shares(&mut ended);
    #[expect(clippy::cast_precision_loss, reason = "hundreds of jobs")]
    let (ratio, rate) = (first as f64 / second as f64, ended.len() as f64 / took.as_secs_f64());
    Ok(Row::new(
        format!("{} and {} jobs of two users {what}, each of {CALLS} calls", jobs[0], jobs[1]),
        format!("{first} to {second}"),
        format!(
            "jobs of each that had ended when all of one's had, without those that began before both were there: {ratio:.2} to one, goal: within 20 % (all users weigh the same; a weight \
             cannot be configured); {rate:.0} jobs per second, {unsuccessful} without success; calls that failed: {}",
            if failed.is_empty() { "none".to_owned() } else { failed.join(", ") }
        ),
    ))
}

/// How many jobs of each user had ended when the last job of either had.
fn shares(ended: &mut [(Duration, u64)]) -> [usize; 2] {
    ended.sort_unstable();
    let of = |ended: &[(Duration, u64)], uid: u32| ended.iter().filter(|(_, owner)| *owner == u64::from(uid)).count();
    let total = USERS.map(|uid| of(ended, uid));
    let until = (1..=ended.len()).find(|&until| {
        let seen = ended.get(..until).unwrap_or_default();
        USERS.iter().zip(total).any(|(uid, total)| of(seen, *uid) == total)
    });
    let seen = until.and_then(|until| ended.get(..until)).unwrap_or_default();
    USERS.map(|uid| of(seen, uid))
}

/// Submits jobs as another user.
fn submit(agentctl: &Path, daemon: &Daemon, uid: u32, count: usize) -> Result<()> {
    let job = json!({"version": 1, "agent": GOAL_AGENT, "goal": model::goal(CALLS, true)});
    let mut command = Command::new(agentctl);
    command.arg("--socket").arg(daemon.socket()).args(["submit", "-"]).uid(uid).gid(GROUP.1).current_dir("/");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().context("starting agentctl")?;
    let mut stdin = child.stdin.take().context("stdin was not kept")?;
    stdin.write_all(format!("{job}\n").repeat(count).as_bytes())?;
    drop(stdin);
    let status = child.wait()?;
    if !status.success() {
        bail!("agentctl submit ended with {status}");
    }
    Ok(())
}

/// All jobs, by pages.
fn all_jobs(daemon: &Daemon) -> Result<Vec<Value>> {
    let mut jobs = Vec::new();
    let mut before = String::new();
    loop {
        let page = client::request(daemon.socket(), "GET", &format!("/v1/jobs?limit=500{before}"), &Value::Null)?;
        jobs.extend(page["jobs"].as_array().context("a page without jobs")?.iter().cloned());
        match page["next"].as_str() {
            Some(next) => before = format!("&before={next}"),
            None => return Ok(jobs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_counted_until_one_user_has_nothing_left() {
        let at = Duration::from_secs;
        let [anna, bert] = USERS.map(u64::from);
        let mut ended = [(at(9), anna), (at(1), anna), (at(2), bert), (at(3), anna), (at(4), bert), (at(8), anna)];
        assert_eq!(shares(&mut ended), [2, 2]);
    }
}
