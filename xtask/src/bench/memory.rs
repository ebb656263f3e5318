//! The memory of launcher and daemon after many calls.

use anyhow::Result;

use super::processes::Processes;
use super::rate::together;
use super::{Bench, Row, calls};

/// How many clients call at once.
const CLIENTS: usize = 8;
/// After how many calls everything that is made once has been made.
const FIRST: usize = 1_000;
/// In how many steps the rest is called.
const STEPS: usize = 10;

/// Calls a C program over and over, and looks now and then.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let daemon = bench.daemon("memory", "")?;
    let (all, first) = (bench.effort.calls, bench.effort.calls.min(FIRST));
    let call = |count: usize| together(CLIENTS, count / CLIENTS, |_| calls::call(daemon.socket(), "echo_c"));
    call(first)?;
    let early = Processes::of(&daemon)?;
    let mut seen = vec![early];
    let mut called = first;
    for _ in 0..STEPS {
        let step = (all - first) / STEPS;
        call(step)?;
        called += step;
        let now = Processes::of(&daemon)?;
        eprintln!("after {called} calls: launcher {} KiB, daemon {} KiB", now.launcher, now.daemon);
        seen.push(now);
    }
    let late = seen.last().copied().unwrap_or(early);
    let middle = seen.get(STEPS / 2).copied().unwrap_or(early);
    let grown = |from: u64, to: u64| format!("{} from {from} to {to} KiB", sign(from, to));
    let both = |one: &Processes| one.launcher + one.daemon;
    Ok(vec![Row::new(
        format!("memory of launcher and daemon from call {first} to call {called}, C tool, {CLIENTS} clients"),
        format!("{} KiB", sign(both(&early), both(&late))),
        format!(
            "goal: at most +2048 KiB; launcher {}; daemon {}; in the second half of them {} KiB",
            grown(early.launcher, late.launcher),
            grown(early.daemon, late.daemon),
            sign(both(&middle), both(&late))
        ),
    )])
}

fn sign(from: u64, to: u64) -> String {
    if to >= from { format!("+{}", to - from) } else { format!("-{}", from - to) }
}
