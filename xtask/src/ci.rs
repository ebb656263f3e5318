//! `cargo ci`: everything that must hold before a change lands, stage by stage, up to the first that fails.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::guest::{self, debian::Suite};
use crate::process;
use crate::project::{self, Profile};
use crate::tools::Tool;

const CARGO_DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", features: &[] };
/// What a second run of the demo may take.
const DEMO_AGAIN: Duration = Duration::from_secs(30);

/// How many whole jobs the simulation plays, each with and without what may happen to it.
const SIMULATION_SEEDS: &str = "100000";

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

/// Runs the stages and prints how long each took.
pub(crate) fn run(extent: Extent) -> Result<()> {
    let mut report = Report::default();
    let outcome = stages(extent, &mut report);
    report.print();
    outcome?;
    println!("{} passed, 0 failed", report.passed);
    Ok(())
}

fn stages(extent: Extent, report: &mut Report) -> Result<()> {
    report.stage("format", |_| process::run(&mut project::cargo(["fmt", "--all", "--check"])))?;
    report.stage("lint", |_| {
        process::run(&mut project::cargo(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
    })?;
    report.stage("programs", |_| process::run(&mut project::cargo(["build", "--workspace", "--bins"])))?;
    report.stage("runtimes", |_| crate::runtimes::bun().map(drop))?;
    // All packages at once: a part of them would be built with other features, and with it most dependencies again.
    // And all of them, whatever fails: one run tells everything that is wrong.
    report.stage("tests", |tests| tests.run(&mut project::cargo(["test", "--workspace", "--no-fail-fast"])))?;
    if extent == Extent::Quick {
        return Ok(());
    }
    // What the tests above leave out where the host has no controllers, in a machine that has them.
    report.stage("guest: limits", |tests| tests.in_guest(guest::limits::run))?;
    report.stage("simulation", |tests| {
        // The same program as before, with more to play: to build it optimised would take longer than it saves.
        let test = ["test", "--workspace", "--lib", "--", "session::simulation"];
        tests.run(project::cargo(test).env("AGENTD_SIMULATION_SEEDS", SIMULATION_SEEDS))
    })?;
    report.stage("fuzz", |_| crate::fuzz::run(None, FUZZING))?;
    report.stage("documentation", |_| {
        let mut doc = project::cargo(["doc", "--workspace", "--no-deps", "--document-private-items"]);
        // These pages are for developers and hold private items too, so a link to one leads somewhere.
        process::run(doc.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links"))
    })?;
    report.stage("dependencies", |_| dependencies())?;
    report.stage("documented commands", |_| crate::docs::run())?;
    report.stage("example tools", |_| {
        process::run(Command::new(project::program("xtask", Profile::Debug)?).arg("example-tools"))
    })?;
    report.stage("API", |_| process::run(Command::new(project::program("xtask", Profile::Debug)?).arg("api")))?;
    report.stage("demo", |_| demo())?;
    report.stage("demo, again", |_| {
        let start = Instant::now();
        demo()?;
        let took = start.elapsed();
        if took > DEMO_AGAIN {
            bail!("the second run took {:.1} s, more than {} s", took.as_secs_f64(), DEMO_AGAIN.as_secs());
        }
        Ok(())
    })
}

fn demo() -> Result<()> {
    // By name: the build may have replaced this program's own file meanwhile.
    process::run(Command::new(project::program("xtask", Profile::Debug)?).arg("demo"))
}

/// Licences, duplicates and sources of all dependencies, by deny.toml.
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

/// What the tests said.
#[derive(Default)]
struct Tests {
    passed: u64,
}

impl Tests {
    /// Runs tests, shows their output and counts them.
    fn run(&mut self, command: &mut Command) -> Result<()> {
        let mut counts = Counts::default();
        let status = process::lines(command, |line| {
            println!("{line}");
            counts.read(line);
        })?;
        self.count(counts, status.success(), &process::line(command))
    }

    /// Runs tests in a guest, shows their output and counts them.
    fn in_guest(&mut self, run: impl FnOnce(Suite, &mut dyn FnMut(&str)) -> Result<()>) -> Result<()> {
        let mut counts = Counts::default();
        run(Suite::Trixie, &mut |line| {
            println!("{line}");
            counts.read(line);
        })?;
        self.count(counts, true, "the guest")
    }

    fn count(&mut self, counts: Counts, succeeded: bool, what: &str) -> Result<()> {
        self.passed += counts.passed;
        if !counts.failed.is_empty() {
            bail!("failed: {}", counts.failed.join(", "));
        }
        if !succeeded {
            bail!("{what} failed");
        }
        if counts.passed == 0 {
            bail!("{what} ran no test");
        }
        Ok(())
    }
}

/// Test results, read from the test harness's lines.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    passed: u64,
    failed: Vec<String>,
}

impl Counts {
    fn read(&mut self, line: &str) {
        if let Some(summary) = line.strip_prefix("test result: ") {
            let passed =
                summary.split("; ").next().and_then(|part| part.split_whitespace().rev().nth(1)?.parse::<u64>().ok());
            self.passed += passed.unwrap_or(0);
        } else if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failed.push(name.to_owned());
        }
    }
}

#[derive(Default)]
struct Report {
    stages: Vec<(&'static str, Duration, &'static str)>,
    passed: u64,
}

impl Report {
    fn stage(&mut self, name: &'static str, run: impl FnOnce(&mut Tests) -> Result<()>) -> Result<()> {
        println!("\n== {name}");
        let start = Instant::now();
        let mut tests = Tests::default();
        let outcome = process::check_interrupt().and_then(|()| run(&mut tests));
        self.passed += tests.passed;
        self.stages.push((name, start.elapsed(), if outcome.is_ok() { "ok" } else { "FAILED" }));
        outcome.with_context(|| format!("stage `{name}` failed"))
    }

    fn print(&self) {
        println!("\n{:<24} {:>8}", "stage", "seconds");
        for (name, took, outcome) in &self.stages {
            println!("{name:<24} {:>8.1}  {outcome}", took.as_secs_f64());
        }
        let total: Duration = self.stages.iter().map(|(_, took, _)| *took).sum();
        println!("{:<24} {:>8.1}", "all", total.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(lines: &[&str]) -> Counts {
        let mut counts = Counts::default();
        lines.iter().for_each(|line| counts.read(line));
        counts
    }

    #[test]
    fn results_of_several_test_programs_are_added_up() {
        let read = counts(&[
            "running 2 tests",
            "test ids::tests::a ... ok",
            "test result: ok. 41 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.03s",
            "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ]);
        assert_eq!(read, Counts { passed: 42, failed: vec![] });
    }

    #[test]
    fn failed_tests_are_named() {
        let read = counts(&[
            "test a::b ... FAILED",
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.03s",
        ]);
        assert_eq!(read, Counts { passed: 3, failed: vec!["a::b".to_owned()] });
    }
}
