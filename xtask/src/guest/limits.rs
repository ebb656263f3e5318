//! Test programs as they were built, in a guest: what only control groups of version 2 can keep, tried where they are; and, by
//! hand since it takes long, what the sandbox refuses on that kernel.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::debian::Suite;
use super::{Guest, System};
use crate::process;
use crate::project::{self, Profile};

/// How long a test may say nothing.
const PATIENCE: Duration = Duration::from_secs(900);

/// A test program and the arguments that select from it.
struct Program {
    name: &'static str,
    arguments: &'static str,
}

/// What needs control groups.
const LIMITS: [Program; 2] = [
    Program { name: "sandbox", arguments: "limits::" },
    // One after the other: each starts a daemon, and the machine is slow.
    Program { name: "limits", arguments: "--test-threads=1" },
];
/// What tools attempt, and each mechanism by itself.
const PROBES: [Program; 2] = [
    Program { name: "sandbox", arguments: "confinement:: lifecycle:: syscalls::" },
    Program { name: "probes", arguments: "--test-threads=1" },
];

/// Runs what needs control groups and hands over each line.
pub(crate) fn run(suite: Suite, each: &mut dyn FnMut(&str)) -> Result<()> {
    run_programs(&LIMITS, suite, each)
}

/// Runs the probe suite and hands over each line.
pub(crate) fn run_probes(suite: Suite, each: &mut dyn FnMut(&str)) -> Result<()> {
    run_programs(&PROBES, suite, each)
}

fn run_programs(programs: &[Program], suite: Suite, each: &mut dyn FnMut(&str)) -> Result<()> {
    let files = build(programs)?;
    let mut guest = Guest::start(suite, System::Bare)?;
    // What this kernel has and lacks, for whoever reads on. The guest's clock and runtimes are nobody's business here.
    let agentd = project::program("agentd", Profile::Debug)?;
    let config = project::root().join("examples/config");
    let doctor = format!("{} doctor --config-dir {}", agentd.display(), config.display());
    guest.stream(&doctor, PATIENCE, &mut *each)?;
    for (program, file) in programs.iter().zip(files) {
        each(&format!("\nin the guest: {} {}", program.name, program.arguments));
        let script = format!(
            "cd {}; export AGENTD_TEST_MUST_RUN=1 RUST_BACKTRACE=0; exec {} {}",
            project::root().display(),
            file.display(),
            program.arguments
        );
        let mut ran = false;
        let status = guest.stream(&script, PATIENCE, |line| {
            // A program that selects nothing passes, and says so.
            ran |= line.starts_with("test result: ok. ") && !line.starts_with("test result: ok. 0 passed");
            each(line);
        })?;
        if status != 0 {
            bail!("{} ended with status {status} in the guest", program.name);
        }
        if !ran {
            bail!("{} ran no test in the guest", program.name);
        }
    }
    Ok(())
}

/// The programs' files, built as all tests are.
fn build(programs: &[Program]) -> Result<Vec<PathBuf>> {
    // What the tests start, too: cargo builds with a test only its own package's programs.
    process::run(&mut project::cargo(["build", "--workspace", "--bins"]))?;
    let mut cargo = project::cargo(["test", "--workspace", "--no-run", "--message-format=json"]);
    cargo.args(programs.iter().flat_map(|program| ["--test", program.name]));
    let mut messages = Vec::new();
    let status = process::lines(&mut cargo, |line| messages.push(line.to_owned()))?;
    if !status.success() {
        bail!("{} ended with {status}", process::line(&cargo));
    }
    let artifacts: Vec<Value> = messages.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let file_of = |name: &str| {
        let found = artifacts.iter().find(|one| one["target"]["name"] == name && one["executable"].is_string())?;
        found["executable"].as_str().map(PathBuf::from)
    };
    programs.iter().map(|one| file_of(one.name).with_context(|| format!("cargo built no {}", one.name))).collect()
}
