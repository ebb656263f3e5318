//! `cargo ci`: everything that must hold before a change lands, stage by stage, up to the first that fails.
//!
//! ```text
//!   format  lint  programs  runtimes  tests  slow-tests ─────────  documentation  …  demo
//!     └── guest-image ─────────────┤├── guest-limits  guest-package ──┤
//!                                  └─── simulation  fuzz  dependencies ┘
//! ```

mod beside;
mod counts;

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use self::beside::{Beside, Priority};
use self::counts::Counts;
use crate::guest::{self, debian::Suite};
use crate::process;
use crate::project::{self, Profile};
use crate::tools::Tool;

const CARGO_DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", features: &[] };
/// What a second run of the demo may take.
const DEMO_AGAIN: Duration = Duration::from_secs(30);

/// How many whole jobs the simulation plays, each with and without what may happen to it.
const SIMULATION_SEEDS: &str = "100000";

/// What waits for minutes. `tests/Cargo.toml` keeps each of them out of a plain `cargo test`.
const SLOW_TESTS: [&str; 4] = ["crashes", "greedy_clients", "supervision", "transactions"];

/// How long all fuzz targets run together.
const FUZZING: Duration = Duration::from_secs(60);

/// How much is checked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Format, lint, logic and native tests.
    Quick,
    /// Everything.
    Whole,
}

/// What is checked by itself: `cargo xtask stage NAME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stage {
    /// How the code is laid out
    Format,
    /// Clippy, on everything
    Lint,
    /// Build all programs
    Programs,
    /// Fetch the runtimes that this host lacks
    Runtimes,
    /// The tests that run on this host and take seconds
    Tests,
    /// Those that take minutes
    SlowTests,
    /// Make what a guest starts from
    GuestImage,
    /// What the tests leave out where the host has no controllers, in a machine that has them
    GuestLimits,
    /// The Debian package under systemd, in a machine that is installed anew
    GuestPackage,
    /// Whole jobs from seeds
    Simulation,
    /// Coverage-guided fuzzing, for a minute
    Fuzz,
    /// The code's own documentation, and its links
    Documentation,
    /// Licences, duplicates and sources of all dependencies, by deny.toml
    Dependencies,
    /// Every command that the documentation shows
    DocumentedCommands,
    /// The example's tools one by one, and the conformance checks
    ExampleTools,
    /// The running daemon held against its own OpenAPI document
    Api,
    /// The example job, from nothing
    Demo,
    /// The same once more, in little time
    DemoAgain,
}

const QUICK: [Stage; 5] = [Stage::Format, Stage::Lint, Stage::Programs, Stage::Runtimes, Stage::Tests];
const LAST: [Stage; 6] =
    [Stage::Documentation, Stage::DocumentedCommands, Stage::ExampleTools, Stage::Api, Stage::Demo, Stage::DemoAgain];

/// Runs the stages and prints how long each took.
pub(crate) fn run(extent: Extent) -> Result<()> {
    let mut report = Report::start();
    let outcome = match extent {
        Extent::Quick => QUICK.into_iter().try_for_each(|stage| report.stage(stage)),
        Extent::Whole => whole(&mut report),
    };
    report.print();
    outcome?;
    println!("{} passed, 0 failed", report.passed);
    Ok(())
}

fn whole(report: &mut Report) -> Result<()> {
    let image = Beside::start(&[Stage::GuestImage], Priority::Low);
    for stage in [Stage::Format, Stage::Lint, Stage::Programs, Stage::Runtimes] {
        report.stage(stage)?;
    }
    report.join(image)?;
    // Tests wait most of their time, a guest does as well; what computes takes what they leave.
    let guests = Beside::start(&[Stage::GuestLimits, Stage::GuestPackage], Priority::Same);
    let others = Beside::start(&[Stage::Simulation, Stage::Fuzz, Stage::Dependencies], Priority::Low);
    for stage in [Stage::Tests, Stage::SlowTests] {
        report.stage(stage)?;
    }
    report.join(guests)?;
    report.join(others)?;
    LAST.into_iter().try_for_each(|stage| report.stage(stage))
}

/// Runs one stage, and returns how many tests passed in it.
pub(crate) fn perform(stage: Stage) -> Result<u64> {
    match stage {
        Stage::Format => checked(&mut project::cargo(["fmt", "--all", "--check"])),
        Stage::Lint => {
            checked(&mut project::cargo(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
            // All targets are all that a plain `cargo test` runs.
            let mut further = project::cargo(["clippy", "--workspace"]);
            let named = SLOW_TESTS.iter().chain(&["limits"]).flat_map(|name| ["--test", name]);
            checked(further.args(named).args(["--", "-D", "warnings"]))
        }
        Stage::Programs => checked(&mut project::cargo(["build", "--workspace", "--bins"])),
        Stage::Runtimes => crate::runtimes::bun().map(|_| 0),
        // All packages at once: a part of them would be built with other features, and with it most dependencies again.
        // And all of them, whatever fails: one run tells everything that is wrong.
        Stage::Tests => tested(&mut project::cargo(["test", "--workspace", "--no-fail-fast"])),
        Stage::SlowTests => {
            let mut test = project::cargo(["test", "--workspace", "--no-fail-fast"]);
            tested(test.args(SLOW_TESTS.iter().flat_map(|name| ["--test", name])))
        }
        Stage::GuestImage => guest::prepare(Suite::Trixie).map(|()| 0),
        Stage::GuestLimits => in_guest(guest::limits::run),
        Stage::GuestPackage => in_guest(guest::package::run),
        Stage::Simulation => {
            // The same program as before, with more to play: to build it optimised would take longer than it saves.
            let mut test = project::cargo(["test", "--workspace", "--lib", "--", "session::simulation"]);
            tested(test.env("AGENTD_SIMULATION_SEEDS", SIMULATION_SEEDS))
        }
        Stage::Fuzz => crate::fuzz::run(None, FUZZING).map(|()| 0),
        Stage::Documentation => {
            let mut doc = project::cargo(["doc", "--workspace", "--no-deps", "--document-private-items"]);
            // These pages are for developers and hold private items too, so a link to one leads somewhere.
            checked(doc.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links"))
        }
        Stage::Dependencies => dependencies().map(|()| 0),
        Stage::DocumentedCommands => crate::docs::run().map(|()| 0),
        Stage::ExampleTools => task("example-tools"),
        Stage::Api => task("api"),
        Stage::Demo => task("demo"),
        Stage::DemoAgain => {
            let start = Instant::now();
            task("demo")?;
            let took = start.elapsed();
            if took > DEMO_AGAIN {
                bail!("the second run took {:.1} s, more than {} s", took.as_secs_f64(), DEMO_AGAIN.as_secs());
            }
            Ok(0)
        }
    }
}

fn checked(command: &mut Command) -> Result<u64> {
    process::run(command).map(|()| 0)
}

/// Another of these tasks, by name: the build may have replaced this program's own file meanwhile.
fn task(name: &str) -> Result<u64> {
    checked(Command::new(project::program("xtask", Profile::Debug)?).arg(name))
}

/// Runs tests, shows their output and counts them.
fn tested(command: &mut Command) -> Result<u64> {
    let mut counts = Counts::default();
    let status = process::lines(command, |line| {
        println!("{line}");
        counts.read(line);
    })?;
    counts.judge(status.success(), &process::line(command))
}

/// Runs tests in a guest, shows their output and counts them.
fn in_guest(run: impl FnOnce(Suite, &mut dyn FnMut(&str)) -> Result<()>) -> Result<u64> {
    let mut counts = Counts::default();
    let outcome = run(Suite::Trixie, &mut |line| {
        println!("{line}");
        counts.read(line);
    });
    let passed = counts.judge(outcome.is_ok(), "the guest");
    // What went wrong with the guest itself says more than that tests failed.
    outcome.and(passed)
}

fn dependencies() -> Result<()> {
    let installed =
        process::capture(&mut project::cargo(["deny", "--version"])).is_ok_and(|(status, _)| status.success());
    let mut check = if installed {
        project::cargo(["deny"])
    } else {
        let mut command = Command::new(CARGO_DENY.program()?);
        command.current_dir(project::root());
        command
    };
    process::run(check.args(["--all-features", "check", "bans", "licenses", "sources"]))
}

/// What has run so far.
struct Report {
    start: Instant,
    stages: Vec<(String, Duration, &'static str)>,
    passed: u64,
}

impl Report {
    fn start() -> Self {
        Self { start: Instant::now(), stages: Vec::new(), passed: 0 }
    }

    fn stage(&mut self, stage: Stage) -> Result<()> {
        let name = name(stage);
        println!("\n== {name}");
        let start = Instant::now();
        let outcome = process::check_interrupt().and_then(|()| perform(stage));
        self.stages.push((name.clone(), start.elapsed(), if outcome.is_ok() { "ok" } else { "FAILED" }));
        self.passed += outcome.with_context(|| format!("stage `{name}` failed"))?;
        Ok(())
    }

    /// Waits for what runs beside, and shows it.
    fn join(&mut self, beside: Beside) -> Result<()> {
        for ran in beside.wait()? {
            let name = name(ran.stage);
            println!("\n== {name}\n{}", ran.said);
            let mut counts = Counts::default();
            ran.said.lines().for_each(|line| counts.read(line));
            self.passed += counts.passed();
            let state = if ran.outcome.is_ok() { "ok, beside others" } else { "FAILED, beside others" };
            self.stages.push((name.clone(), ran.took, state));
            ran.outcome.with_context(|| format!("stage `{name}` failed"))?;
        }
        Ok(())
    }

    fn print(&self) {
        println!("\n{:<24} {:>8}", "stage", "seconds");
        for (name, took, outcome) in &self.stages {
            println!("{name:<24} {:>8.1}  {outcome}", took.as_secs_f64());
        }
        println!("{:<24} {:>8.1}", "all", self.start.elapsed().as_secs_f64());
    }
}

/// As it is called on the command line.
fn name(stage: Stage) -> String {
    stage.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
