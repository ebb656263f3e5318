//! `cargo xtask bench`: agentd beside what people would use instead, in one run on one machine.
//!
//! Seconds differ from machine to machine and from hour to hour, so what counts is the ratio of two medians whose samples
//! were taken in turns. The table goes to stdout in Markdown, ready for docs/performance.md; progress goes to stderr.
//!
//! Each part has a daemon of its own with an empty ledger.

mod at_once;
mod calls;
mod client;
mod disk;
mod egress;
mod far_end;
mod floor;
mod goal;
mod jobs;
mod launch;
mod ledger;
mod memory;
mod model;
mod processes;
mod rate;
mod samples;
mod sandboxes;
mod start;
mod throughput;
mod trees;
mod users;
mod waiting;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use self::calls::Echo;
use self::model::GoalModel;
use crate::demo::{self, Daemon};
use crate::example::Staged;
use crate::process;
use crate::project::{self, Profile};

/// How much is measured.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Effort {
    /// How many launches and calls of each kind
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// The largest workspace that is measured has at most so many files; up to a million
    #[arg(long, default_value_t = 100_000)]
    files: usize,
    /// How many calls the daemon's memory is watched over
    #[arg(long, default_value_t = 20_000)]
    calls: usize,
    /// How many jobs lie in the ledger that the daemon starts with
    #[arg(long, default_value_t = 10_000)]
    ledger_jobs: usize,
    /// How many jobs wait for a slow model at once
    #[arg(long, default_value_t = 1_000)]
    waiting_jobs: usize,
}

/// What can be measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// The launch of `true`, alone and sixteen at once, beside other sandboxes
    Launch,
    /// One call of a tool in each language, cold and started ahead
    Calls,
    /// Jobs on a scripted model, beside LangGraph
    Jobs,
    /// Receipts of large workspaces, beside sha256sum and git
    Trees,
    /// Calls per second by sixteen clients
    Throughput,
    /// What a tool gets from a host that it may reach, beside a direct connection and a CONNECT proxy
    Egress,
    /// Durable events per second, beside what the disk can do
    Ledger,
    /// Many jobs that wait for a slow model
    Waiting,
    /// Two users' jobs at once
    Users,
    /// Starts of the daemon, also with many jobs in its ledger
    Start,
    /// The memory that many calls leave behind
    Memory,
}

/// One line of the table.
pub(crate) struct Row {
    what: String,
    measured: String,
    against: String,
}

impl Row {
    fn new(what: impl Into<String>, measured: impl Into<String>, against: impl Into<String>) -> Self {
        Self { what: what.into(), measured: measured.into(), against: against.into() }
    }
}

/// What all parts work with.
struct Bench {
    staged: Staged,
    /// The configuration that a part may add to.
    config: toml::Table,
    folder: PathBuf,
    echoes: Vec<Echo>,
    conversations: jobs::Model,
    model: GoalModel,
    effort: Effort,
    profile: Profile,
}

/// Measures these parts, all when none is named, and prints.
pub(crate) fn run(parts: &[Part], effort: Effort, profile: Profile) -> Result<()> {
    demo::require_root()?;
    let bench = Bench::prepare(effort, profile)?;
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for part in <Part as clap::ValueEnum>::value_variants() {
        if parts.is_empty() || parts.contains(part) {
            process::check_interrupt()?;
            // What was measured before and can be after is worth its minutes.
            match bench.measure(*part) {
                Ok(more) => rows.extend(more),
                Err(error) => failed.push(format!("{part:?}: {error:#}")),
            }
        }
    }
    process::check_interrupt()?;
    print(&rows, profile)?;
    if failed.is_empty() { Ok(()) } else { bail!("could not measure {}", failed.join("; ")) }
}

impl Bench {
    fn prepare(effort: Effort, profile: Profile) -> Result<Self> {
        let folder = project::target()?.join("bench");
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
        }
        fs::create_dir_all(&folder)?;
        demo::build(profile)?;
        let staged = Staged::prepare(&folder, None)?;
        let echoes = calls::install(&staged)?;
        let conversations = jobs::install(&staged, &folder, profile)?;
        let model = GoalModel::start()?;
        jobs::write_agent(&staged, GOAL_AGENT, model.base_url())?;
        let config = fs::read_to_string(staged.config().join("agentd.toml"))?.parse()?;
        Ok(Self { staged, config, folder, echoes, conversations, model, effort, profile })
    }

    fn measure(&self, part: Part) -> Result<Vec<Row>> {
        // A part that failed may have left the model closed.
        self.model.set_open(true);
        waiting::until(|| Ok(self.model.held() == 0), "no answer is held back")?;
        match part {
            Part::Launch => launch::measure(self),
            Part::Calls => calls::measure(self),
            Part::Jobs => jobs::measure(self),
            Part::Trees => trees::measure(self),
            Part::Throughput => throughput::measure(self),
            Part::Egress => egress::measure(self),
            Part::Ledger => ledger::measure(self),
            Part::Waiting => waiting::measure(self),
            Part::Users => users::measure(self),
            Part::Start => start::measure(self),
            Part::Memory => memory::measure(self),
        }
    }

    /// A daemon with an empty ledger; the configuration's tables get these keys besides.
    fn daemon(&self, name: &str, additions: &str) -> Result<Daemon> {
        let mut config = self.config.clone();
        for (table, keys) in additions.parse::<toml::Table>().context("reading what a part configures")? {
            match (config.get_mut(&table).and_then(toml::Value::as_table_mut), keys) {
                (Some(known), toml::Value::Table(keys)) => known.extend(keys),
                (_, keys) => drop(config.insert(table, keys)),
            }
        }
        let file = self.staged.config().join("agentd.toml");
        fs::write(&file, config.to_string()).with_context(|| format!("writing {}", file.display()))?;
        let state = self.staged.state();
        if state.exists() {
            fs::remove_dir_all(&state).with_context(|| format!("removing {}", state.display()))?;
        }
        self.start_again(name)
    }

    /// A daemon that finds what the one before has left.
    fn start_again(&self, name: &str) -> Result<Daemon> {
        Daemon::start(&self.staged, &self.folder.join(format!("{name}.log")), self.profile)
    }
}

/// The agent whose model does what a goal says.
const GOAL_AGENT: &str = "goals";

fn print(rows: &[Row], profile: Profile) -> Result<()> {
    let build = if profile == Profile::Release { "" } else { "A debug build, so the figures mean nothing. " };
    println!("{build}{}\n", machine()?);
    println!("| what | measured | against |\n|---|---|---|");
    for row in rows {
        println!("| {} | {} | {} |", row.what, row.measured, row.against);
    }
    Ok(())
}

/// The machine in one line.
fn machine() -> Result<String> {
    let cpus = fs::read_to_string("/proc/cpuinfo").context("reading /proc/cpuinfo")?;
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("\t: unknown processor");
    let model = model.trim_start_matches(['\t', ' ', ':']);
    let count = std::thread::available_parallelism()?;
    let kernel = rustix::system::uname();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    Ok(format!(
        "{count} × {model}, Linux {}, load at the end {}",
        kernel.release().to_string_lossy(),
        load.split(' ').next().unwrap_or("unknown")
    ))
}

/// A folder of the bench's own files in the checkout.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("bench").join(name)
}

/// Compiles a program in C.
fn compile(source: &Path, program: &Path) -> Result<()> {
    process::run(Command::new("cc").args(["-O2", "-Wall", "-Werror", "-o"]).arg(program).arg(source))
}
