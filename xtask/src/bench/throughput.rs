//! Calls per second by several clients at once: cold, and in bursts on processes that were started ahead.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::floor::Meter;
use super::goal::Goal;
use super::rate::together;
use super::samples::Samples;
use super::{Bench, Row, calls, launch};
use crate::process;

/// How many clients call at once, and how many processes are started ahead: the most that there are.
const CLIENTS: usize = 16;
/// How many bursts are tried.
const BURSTS: usize = 12;
/// Longer than so many processes of the C program need to start.
const REFILL: Duration = Duration::from_secs(1);
/// The tool whose processes are started ahead.
const POOLED: &str = "echo_c_pool";

/// Measures the C program: plain, cold, ahead.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let echo = bench.echoes.first().context("there is no C program")?;
    calls::start_ahead(&bench.staged.config().join("tools"), echo.name(), POOLED, CLIENTS)?;
    let daemon = bench.daemon("throughput", &format!("[limits]\nwarm_processes = {CLIENTS}\n"))?;
    let each = bench.effort.rounds.div_ceil(4);
    eprintln!("{CLIENTS} clients, {each} calls each");
    let plain = together(CLIENTS, each, |_| echo.plain())?;
    let floor = Meter::prepare(bench, &daemon).and_then(|meter| meter.rate(CLIENTS, each));
    let cold = together(CLIENTS, each, |_| calls::call(daemon.socket(), echo.name()))?;

    eprintln!("{BURSTS} bursts of {CLIENTS} calls");
    let (mut bursts, mut plain_bursts) = <(Samples, Samples)>::default();
    let ahead = AtomicUsize::new(0);
    // The first calls have the processes started.
    together(CLIENTS, 1, |_| calls::call(daemon.socket(), POOLED))?;
    for _ in 0..BURSTS {
        process::check_interrupt()?;
        thread::sleep(REFILL);
        plain_bursts.push(together(CLIENTS, 1, |_| echo.plain())?.took);
        let burst = together(CLIENTS, 1, |_| {
            let reply = calls::call(daemon.socket(), POOLED)?;
            ahead.fetch_add(usize::from(calls::was_ahead(&reply)?), Ordering::Relaxed);
            Ok(())
        })?;
        bursts.push(burst.took);
    }
    #[expect(clippy::cast_precision_loss, reason = "sixteen")]
    let rate = |samples: &Samples| CLIENTS as f64 / samples.p50().as_secs_f64();
    let terms = [("0.25 × plain's rate".to_owned(), plain.rate() / 4.0)].into_iter();
    let goal = Goal::at_least(cold.rate(), terms.chain(floor.as_ref().ok().map(of_floor)));
    let half = ("0.5 × plain's rate in such a burst".to_owned(), rate(&plain_bursts) / 2.0);
    let burst_goal = Goal::at_least(rate(&bursts), [half]);
    let (measured_floor, floor_against) = match &floor {
        Ok(rate) => (format!("{rate:.0} per second"), format!("{:.2} × plain's rate", rate / plain.rate())),
        Err(error) => ("not measured".to_owned(), format!("{error:#}")),
    };
    Ok(vec![
        Row::new(
            format!("plain starts of the C tool per second, {CLIENTS} clients"),
            format!("{:.0} per second", plain.rate()),
            launch::BASE,
        ),
        Row::new(
            format!("the kernel's floor: its operations of such a launch from nothing by {CLIENTS} processes"),
            measured_floor,
            floor_against,
        ),
        Row::new(
            format!("sandboxed calls per second, {CLIENTS} clients, C tool"),
            format!("{:.0} per second", cold.rate()),
            format!("{:.2} × plain's rate; each {}; {goal}", cold.rate() / plain.rate(), cold.samples.text()),
        ),
        Row::new(
            format!("a burst of {CLIENTS} calls on {CLIENTS} processes that were started ahead"),
            format!("{:.0} per second", rate(&bursts)),
            format!(
                "{:.2} × plain's rate in such a burst ({:.0} per second); {} of {} calls found one; {burst_goal}",
                rate(&bursts) / rate(&plain_bursts),
                rate(&plain_bursts),
                ahead.into_inner(),
                BURSTS * CLIENTS
            ),
        ),
    ])
}

fn of_floor(rate: &f64) -> (String, f64) {
    ("2/3 × the floor's rate".to_owned(), rate * 2.0 / 3.0)
}
