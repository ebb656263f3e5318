//! Sixteen launches at once: what each takes then, and how long agentd's wait until the launcher begins with them.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};

use super::launch::{self, Times};
use super::rate::{Together, together};
use super::samples::Samples;
use super::sandboxes::BWRAP;
use super::{Bench, Row};
use crate::demo::Daemon;

/// How many at once.
const CLIENTS: usize = 16;

/// Measures plain starts, bubblewrap, and agentd.
pub(super) fn measure(bench: &Bench, daemon: &Daemon, with_bwrap: bool) -> Result<Vec<Row>> {
    let each = bench.effort.rounds.div_ceil(8);
    eprintln!("launches of `true`, {CLIENTS} at once, {each} each");
    let plain = together(CLIENTS, each, |_| launch::timed(&mut Command::new("/usr/bin/true")))?;
    let mut rows =
        vec![Row::new(format!("plain fork and exec of `true`, {CLIENTS} at once"), text(&plain), launch::BASE)];
    if with_bwrap {
        let wrapped = || launch::timed(Command::new("bwrap").args(BWRAP.split_whitespace()));
        let wrapped = together(CLIENTS, each, |_| wrapped())?;
        rows.push(Row::new(
            format!("`bwrap --unshare-all`, {CLIENTS} at once"),
            text(&wrapped),
            format!("{:.2} × plain's rate", wrapped.rate() / plain.rate()),
        ));
    }
    let folder = bench.folder.as_path();
    let parts: Mutex<(Samples, Samples)> = Mutex::default();
    let all = together(CLIENTS, each, |client| {
        let receipt = folder.join(format!("at-once-{client}.receipt"));
        let (queued, inside) = one(daemon, &receipt)?;
        let mut parts = parts.lock().ok().context("another client panicked")?;
        parts.0.push(queued);
        parts.1.push(inside);
        Ok(())
    })?;
    let (queued, inside) = parts.into_inner().ok().context("a client panicked")?;
    rows.push(Row::new(
        format!("`agentctl exec --policy strict -- true`, {CLIENTS} at once"),
        text(&all),
        format!(
            "{:.2} × plain's rate; of each, before the launcher's first step: {}; the launch alone: {}",
            all.rate() / plain.rate(),
            queued.text(),
            inside.text()
        ),
    ));
    Ok(rows)
}

fn text(together: &Together) -> String {
    format!("{}, {:.0} per second", together.samples.text(), together.rate())
}

/// How long a launch waited and how long it took, by the receipt.
fn one(daemon: &Daemon, receipt: &Path) -> Result<(Duration, Duration)> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).context("the clock stands before 1970")?;
    let mut exec = daemon.agentctl(["exec", "--policy", "strict", "--receipt"])?;
    launch::timed(exec.arg(receipt).args(["--", "/usr/bin/true"]))?;
    let times = Times::of(&serde_json::from_slice(&fs::read(receipt)?)?)?;
    let day = Duration::from_secs(since.as_secs() % 86_400) + Duration::from_nanos(since.subsec_nanos().into());
    let queued = times.started.checked_sub(day).context("the launch went across midnight; measure again")?;
    Ok((queued, times.span()?))
}
