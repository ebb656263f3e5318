//! The project's own tasks, so that a fresh machine needs nothing but rustup and what `cargo demo` asks for.
//!
//! | command | does |
//! |---|---|
//! | `cargo demo` | builds agentd, starts it on the example configuration, runs the example job, shows what happened |
//! | `cargo ci` | everything that must hold before a change lands; `--quick` leaves out what is slow |
//! | `cargo xtask stage NAME` | one stage of `cargo ci` |
//! | `cargo xtask cassette` | records the example's conversation anew, after a change of its agent or tools |
//! | `cargo xtask bench [PART…]` | measures agentd beside what people would use instead |
//! | `cargo xtask example-tools` | calls the example's tools one by one, verifies the receipts, and runs the conformance checks |
//! | `cargo xtask guest limits` | the tests of limits in a virtual machine that has control groups of version 2 |
//! | `cargo xtask guest probes` | the probe suite there |
//! | `cargo xtask fuzz [TARGET] [--seconds N]` | coverage-guided fuzzing of what the launcher and agentd read |
//! | `cargo xtask guest package` | the Debian package installed, used, upgraded and removed in a virtual machine with systemd |
//! | `cargo xtask api` | the running daemon held against its own OpenAPI document |
//! | `cargo xtask package` | the Debian package |
//! | `cargo xtask docs` | runs every shell command that the documentation shows |

mod api;
mod bench;
mod cassette;
mod chat;
mod ci;
mod demo;
mod docs;
mod example;
mod example_tools;
mod fuzz;
mod guest;
mod package;
mod process;
mod project;
mod runtimes;
mod scripted_model;
mod tools;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "The project's own tasks")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the example job on a daemon of its own, from nothing
    Demo,
    /// Check everything that must hold before a change lands
    Ci {
        /// Leave out the demo, the licences and the slow tests
        #[arg(long)]
        quick: bool,
    },
    /// Check one part of it
    Stage {
        /// Which
        #[arg(value_enum)]
        stage: ci::Stage,
    },
    /// Measure agentd beside what people would use instead
    Bench {
        /// What is measured; everything when absent
        #[arg(value_enum)]
        parts: Vec<bench::Part>,
        #[command(flatten)]
        effort: bench::Effort,
        /// Measure a debug build, to try the measuring itself: its figures mean nothing
        #[arg(long)]
        debug_build: bool,
    },
    /// Record the example's conversation anew, after a change of its agent or tools
    Cassette,
    /// Call the example's tools one by one, verify the receipts, and run the conformance checks
    ExampleTools,
    /// Test in a virtual machine what this host may not have
    Guest {
        /// What is tested
        #[arg(value_enum)]
        what: GuestTest,
        /// Where its kernel comes from
        #[arg(long, value_enum, default_value = "trixie")]
        kernel: guest::debian::Suite,
    },
    /// Feed what the launcher and agentd read with bytes that libFuzzer thinks of
    Fuzz {
        /// One program below tests/fuzz/targets; all when absent
        target: Option<String>,
        /// How long, in all
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Build the Debian package
    Package {
        /// The package's revision of this version of agentd
        #[arg(long, default_value_t = 1)]
        revision: u32,
        /// Pack a debug build, to try the package itself
        #[arg(long)]
        debug_build: bool,
    },
    /// Hold the running daemon against its own OpenAPI document
    Api,
    /// Run every shell command that the documentation shows
    Docs,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum GuestTest {
    /// Limits of memory, processes and processor time
    Limits,
    /// What tools attempt and the sandbox refuses
    Probes,
    /// The Debian package under systemd: installed, used, restarted, upgraded, removed
    Package,
}

fn main() -> ExitCode {
    match process::watch_interrupts().and_then(|()| perform(Arguments::parse().task)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The causes, and no backtrace: what failed is a step of the task, not this program.
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: Task) -> anyhow::Result<()> {
    match task {
        Task::Demo => demo::run(),
        Task::Bench { parts, effort, debug_build } => bench::run(&parts, effort, profile(debug_build)),
        Task::Cassette => cassette::run(),
        Task::ExampleTools => example_tools::run(),
        Task::Api => api::run(),
        Task::Docs => docs::run(),
        Task::Fuzz { target, seconds } => fuzz::run(target.as_deref(), Duration::from_secs(seconds)),
        Task::Package { revision, debug_build } => {
            let folder = package::build(profile(debug_build), &[revision])?;
            println!("{}", folder.join(format!("agentd-{revision}.deb")).display());
            Ok(())
        }
        Task::Guest { what, kernel } => {
            let mut print = |line: &str| println!("{line}");
            match what {
                GuestTest::Limits => guest::limits::run(kernel, &mut print),
                GuestTest::Probes => guest::limits::run_probes(kernel, &mut print),
                GuestTest::Package => guest::package::run(kernel, &mut print),
            }
        }
        Task::Stage { stage } => ci::perform(stage).map(drop),
        Task::Ci { quick } => ci::run(if quick { ci::Extent::Quick } else { ci::Extent::Whole }),
    }
}

const fn profile(debug_build: bool) -> project::Profile {
    if debug_build { project::Profile::Debug } else { project::Profile::Release }
}
