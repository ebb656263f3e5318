//! The launch of `true`: plain, by bubblewrap, and by agentd.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use data_encoding::BASE64;
use serde_json::Value;

use super::samples::{Samples, milliseconds};
use super::{Effort, Row};
use crate::demo::Daemon;
use crate::process;

/// What bubblewrap shows of the host: as much as agentd's `strict` does.
const BWRAP: &str = "--unshare-all --die-with-parent --new-session --ro-bind /usr /usr --symlink usr/bin /bin \
                     --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp /usr/bin/true";

/// Measures in turns, so that whatever else the machine does meets all alike.
pub(super) fn measure(daemon: &Daemon, effort: Effort) -> Result<Vec<Row>> {
    let bwrap = bubblewrap()?;
    eprintln!("launches of `true`, {} rounds", effort.rounds);
    let receipt = std::env::temp_dir().join(format!("agentd-bench-{}.receipt", std::process::id()));
    let (mut plain, mut wrapped, mut whole, mut inside) = <(Samples, Samples, Samples, Samples)>::default();
    for _ in 0..effort.rounds {
        process::check_interrupt()?;
        plain.push(timed(&mut Command::new("/usr/bin/true"))?);
        if bwrap {
            wrapped.push(timed(Command::new("bwrap").args(BWRAP.split_whitespace()))?);
        }
        let mut exec = daemon.agentctl(["exec", "--policy", "strict", "--receipt"])?;
        whole.push(timed(exec.arg(&receipt).args(["--", "/usr/bin/true"]))?);
        inside.push(launch_time(&receipt)?);
    }
    fs::remove_file(&receipt)?;
    let mut rows = vec![
        Row::new("plain fork and exec of `true`", plain.text(), "the floor"),
        Row::new(
            "the launch alone: launcher's first step until the cgroup is empty",
            inside.text(),
            compared(&inside, &plain, &wrapped),
        ),
        Row::new(
            "`agentctl exec --policy strict -- true`, client and receipt included",
            whole.text(),
            compared(&whole, &plain, &wrapped),
        ),
    ];
    if bwrap {
        rows.insert(
            1,
            Row::new(
                "`bwrap --unshare-all` with the same view",
                wrapped.text(),
                format!("{:.1} × plain", wrapped.times(&plain)),
            ),
        );
    }
    Ok(rows)
}

fn compared(samples: &Samples, plain: &Samples, wrapped: &Samples) -> String {
    let floor = format!(
        "{:.1} × plain (+{:.2} ms)",
        samples.times(plain),
        milliseconds(samples.p50().saturating_sub(plain.p50()))
    );
    if wrapped.p50().is_zero() { floor } else { format!("{:.2} × bwrap, {floor}", samples.times(wrapped)) }
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

/// The launcher's own times, out of a receipt.
fn launch_time(file: &Path) -> Result<Duration> {
    let envelope: Value = serde_json::from_slice(&fs::read(file)?)?;
    span(&envelope)
}

/// From a receipt's `started` to its `ended`.
pub(super) fn span(envelope: &Value) -> Result<Duration> {
    let payload = envelope["payload"].as_str().context("the receipt has no payload")?;
    let statement: Value = serde_json::from_slice(&BASE64.decode(payload.as_bytes())?)?;
    let evidence = &statement["predicate"]["evidence"]["record"];
    let at =
        |name: &str| seconds_of_day(evidence[name].as_str().with_context(|| format!("the receipt has no `{name}`"))?);
    let took = at("ended")?.checked_sub(at("started")?);
    // A launch across midnight is a sample lost, not a negative one.
    took.context("the launch went across midnight; measure again")
}

/// The time of day of an RFC 3339 time in UTC, to the nanosecond.
fn seconds_of_day(text: &str) -> Result<Duration> {
    let time = text
        .split_once('T')
        .and_then(|(_, time)| time.strip_suffix('Z'))
        .with_context(|| format!("{text} is no UTC time"))?;
    let mut parts = time.splitn(3, ':').map(|part| part.parse::<f64>());
    let mut next = || parts.next().and_then(Result::ok).with_context(|| format!("{text} is no UTC time"));
    Ok(Duration::from_secs_f64(next()? * 3600.0 + next()? * 60.0 + next()?))
}

/// Whether bubblewrap is there; installed where apt can.
fn bubblewrap() -> Result<bool> {
    let there =
        || Command::new("bwrap").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success());
    if !there() && Path::new("/usr/bin/apt-get").exists() {
        eprintln!("installing bubblewrap");
        process::run(
            Command::new("apt-get").args(["install", "--yes", "--quiet", "bubblewrap"]).stdout(Stdio::null()),
        )?;
    }
    if !there() {
        eprintln!("bubblewrap is not there: install it to compare with it");
    }
    Ok(there())
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
