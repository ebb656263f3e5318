//! The launch of `true`: plain, by agentd, and by other sandboxes.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use data_encoding::BASE64;
use serde_json::Value;

use super::disk::{self, Disk};
use super::floor::{self, Floor, Meter};
use super::goal::{Goal, OF_FLOOR};
use super::samples::{Samples, milliseconds};
use super::sandboxes::{self, Sandboxes};
use super::{Bench, Row, at_once};
use crate::process;

/// How often a sandbox is started that takes long.
const SLOW_ROUNDS: usize = 25;
/// What a row says that others are compared with.
pub(super) const BASE: &str = "what the others are held against";

/// Measures in turns, so that whatever else the machine does meets all alike.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let daemon = bench.daemon("launch", "")?;
    let mut sandboxes = sandboxes::find(&bench.folder)?;
    let Sandboxes { found, missing, .. } = &mut sandboxes;
    let rounds = bench.effort.rounds;
    let mut meter = Meter::prepare(bench, &daemon);
    eprintln!("launches of `true`, {rounds} rounds");
    let receipt = bench.folder.join("launch.receipt");
    let mut disk = Disk::of(&bench.staged.state(), disk::BLOCK_OF_CALL)?;
    let (mut plain, mut whole, mut inside) = <(Samples, Samples, Samples)>::default();
    let (mut client, mut durable) = <(Samples, Samples)>::default();
    let mut others = vec![Samples::default(); found.len()];
    for round in 0..rounds {
        process::check_interrupt()?;
        if let Ok(meter) = &mut meter {
            meter.sample()?;
        }
        plain.push(timed(&mut Command::new("/usr/bin/true"))?);
        for (sandbox, samples) in found.iter_mut().zip(&mut others) {
            if round < SLOW_ROUNDS || !sandbox.is_slow {
                samples.push(sandbox.launch()?);
            }
        }
        client.push(timed(&mut daemon.agentctl(["--version"])?)?);
        durable.push(disk.append()?);
        let mut exec = daemon.agentctl(["exec", "--policy", "strict", "--receipt"])?;
        whole.push(timed(exec.arg(&receipt).args(["--", "/usr/bin/true"]))?);
        inside.push(Times::of(&serde_json::from_slice(&fs::read(&receipt)?)?)?.span()?);
    }
    let floor = meter.map(|mut meter| meter.floor());
    let bwrap = found.iter().position(|sandbox| sandbox.name == sandboxes::BUBBLEWRAP);
    let bwrap = bwrap.and_then(|index| others.get(index));
    let goals = Goals { plain: &plain, bwrap, floor: floor.as_ref().ok(), client: &client, durable: &durable };
    let mut rows = vec![
        Row::new("plain fork and exec of `true`", plain.text(), BASE),
        floor::row(&floor),
        Row::new(
            "the launch alone: launcher's first step until the program and all that it started have gone",
            inside.text(),
            format!("{}; {}", compared(&inside, &plain, bwrap), goals.of_launch(&inside)),
        ),
        Row::new(
            "`agentctl exec --policy strict -- true`, client and receipt included",
            whole.text(),
            format!("{}; {}", compared(&whole, &plain, bwrap), goals.of_whole(&whole)),
        ),
        Row::new(
            format!("an append of {} KiB and fdatasync, where the ledger lies", disk::BLOCK_OF_CALL >> 10),
            durable.text(),
            format!("in every call: {}", disk::waited_by_call_text(&durable)),
        ),
    ];
    rows.extend(found.iter().zip(&others).map(|(sandbox, samples)| {
        let figures = format!(
            "{:.1} × plain; agentd's launch alone takes {:.2}, `agentctl exec` as a whole {:.2} times as long",
            samples.times(&plain),
            inside.times(samples),
            whole.times(samples)
        );
        Row::new(sandbox.name, samples.text(), figures)
    }));
    rows.extend(missing.iter().map(|missing| Row::new(missing.name, "not measured", missing.reason.as_str())));
    rows.extend(at_once::measure(bench, &daemon, bwrap.is_some())?);
    Ok(rows)
}

/// What a launch's goals depend on.
struct Goals<'a> {
    plain: &'a Samples,
    bwrap: Option<&'a Samples>,
    floor: Option<&'a Floor>,
    /// `agentctl` that only says its version.
    client: &'a Samples,
    durable: &'a Samples,
}

impl Goals<'_> {
    fn of_launch(&self, launch: &Samples) -> String {
        let bwrap = self.bwrap.map(|bwrap| ("0.5 × bwrap".to_owned(), bwrap.p50().mul_f64(0.5)));
        let floor = self.floor.map(|floor| (format!("{OF_FLOOR} × floor"), floor.launch().mul_f64(OF_FLOOR)));
        let p50 = launch.p50();
        let beside_plain = [("4 × plain".to_owned(), self.plain.p50() * 4)];
        format!(
            "{}; {}; p99: {}",
            Goal::at_most(p50, bwrap.into_iter().chain(floor.clone())),
            Goal::at_most(p50, beside_plain.into_iter().chain(floor)),
            Goal::at_most(launch.quantile(0.99), [("3 × p50".to_owned(), p50 * 3)])
        )
    }

    fn of_whole(&self, whole: &Samples) -> String {
        let bwrap = self.bwrap.map(|bwrap| ("bwrap".to_owned(), bwrap.p50()));
        let floor = self.floor.map(|floor| {
            let started = floor.launch() + self.client.p50();
            let waited = disk::waited_by_call_text(self.durable);
            (
                format!(
                    "{OF_FLOOR} × (floor + `agentctl --version`, {:.2} ms) + {waited}",
                    milliseconds(self.client.p50())
                ),
                started.mul_f64(OF_FLOOR) + disk::waited_by_call(self.durable),
            )
        });
        Goal::at_most(whole.p50(), bwrap.into_iter().chain(floor)).to_string()
    }
}

fn compared(samples: &Samples, plain: &Samples, bwrap: Option<&Samples>) -> String {
    let beside_plain = format!(
        "{:.1} × plain (+{:.2} ms)",
        samples.times(plain),
        milliseconds(samples.p50().saturating_sub(plain.p50()))
    );
    match bwrap {
        Some(bwrap) => format!("{:.2} × bwrap, {beside_plain}", samples.times(bwrap)),
        None => beside_plain,
    }
}

/// How long a program takes from before its start until its status is known.
pub(super) fn timed(command: &mut Command) -> Result<Duration> {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let start = Instant::now();
    let status = command.status().with_context(|| format!("starting {}", process::line(command)))?;
    let took = start.elapsed();
    if !status.success() {
        bail!("{} ended with {status}", process::line(command));
    }
    Ok(took)
}

/// When the launcher began and ended, as times of the day, out of a receipt.
pub(super) struct Times {
    /// Its first step.
    pub(super) started: Duration,
    ended: Duration,
}

impl Times {
    /// Reads a receipt's envelope.
    pub(super) fn of(envelope: &Value) -> Result<Self> {
        let payload = envelope["payload"].as_str().context("the receipt has no payload")?;
        let statement: Value = serde_json::from_slice(&BASE64.decode(payload.as_bytes())?)?;
        let evidence = &statement["predicate"]["evidence"]["record"];
        let at = |name: &str| {
            seconds_of_day(evidence[name].as_str().with_context(|| format!("the receipt has no `{name}`"))?)
        };
        Ok(Self { started: at("started")?, ended: at("ended")? })
    }

    /// From one to the other. A launch across midnight is a sample lost, not a negative one.
    pub(super) fn span(&self) -> Result<Duration> {
        self.ended.checked_sub(self.started).context("the launch went across midnight; measure again")
    }
}

/// The time of day of an RFC 3339 time in UTC, to the nanosecond.
pub(super) fn seconds_of_day(text: &str) -> Result<Duration> {
    let time = text
        .split_once('T')
        .and_then(|(_, time)| time.strip_suffix('Z'))
        .with_context(|| format!("{text} is no UTC time"))?;
    let mut parts = time.splitn(3, ':').map(|part| part.parse::<f64>());
    let mut next = || parts.next().and_then(Result::ok).with_context(|| format!("{text} is no UTC time"));
    Ok(Duration::from_secs_f64(next()? * 3600.0 + next()? * 60.0 + next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_are_read_to_the_microsecond() {
        let read = |text: &str| seconds_of_day(text).unwrap();
        let span = read("2026-11-29T12:00:01.000250Z").checked_sub(read("2026-11-29T11:59:59.999Z")).unwrap();
        assert_eq!(span.as_micros(), 1_001_250);
        assert!(seconds_of_day("12:00").is_err());
    }
}
