//! `agentd`, the daemon. `serve` becomes the launcher, which starts `daemon` without its privileges.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use agentd::daemon::{self, DaemonArgs};
use agentd::doctor;
use agentd::installation::Installation;
use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use sandbox::trusted::Owners;

/// Where the launcher lies when it does not lie beside this program.
const LIBEXEC: &str = "/usr/libexec/agentd";
const LAUNCHER: &str = "agentd-launcher";
/// Of the manual: daemons and what administrators run.
const MANUAL_SECTION: &str = "8";

#[derive(Debug, Parser)]
#[command(name = "agentd", version, about = "Runs AI agents' tools confined by the kernel")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run in the foreground; begins as root
    Serve(Serve),
    /// Check configuration, agents, tools and policies; starts nothing
    Check {
        /// The configuration directory
        #[arg(long, value_name = "DIR", default_value = "/etc/agentd")]
        config_dir: PathBuf,
    },
    /// Try what this host can enforce; must be root
    Doctor {
        /// The configuration directory; without an agentd.toml in it the defaults count
        #[arg(long, value_name = "DIR", default_value = "/etc/agentd")]
        config_dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Man {
        /// The directory; it must exist
        dir: PathBuf,
    },
    /// What the launcher starts
    #[command(hide = true)]
    Daemon(DaemonArgs),
}

#[derive(Debug, Args)]
struct Serve {
    /// The configuration directory
    #[arg(long, value_name = "DIR", default_value = "/etc/agentd")]
    config_dir: PathBuf,
    /// Where jobs, receipts and private workspaces are kept
    #[arg(long, value_name = "DIR", default_value = "/var/lib/agentd")]
    state_dir: PathBuf,
    /// The socket to listen on
    #[arg(long, value_name = "PATH", default_value = "/run/agentd/agentd.sock")]
    socket: PathBuf,
    /// What becomes of limits that this host cannot enforce
    #[arg(long, value_enum, default_value_t = Limits::Required)]
    limits: Limits,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Limits {
    /// Calls whose limits cannot be enforced are refused
    Required,
    /// They run, and their receipts say what was not enforced
    BestEffort,
}

impl Limits {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::BestEffort => "best-effort",
        }
    }
}

fn main() -> ExitCode {
    let ended = match Cli::parse().command {
        Task::Serve(serve) => become_launcher(&serve),
        Task::Check { config_dir } => Ok(check(&config_dir)),
        Task::Doctor { config_dir, json } => Ok(doctor::run(&config_dir, json)),
        Task::Man { dir } => write_manual(&dir),
        Task::Daemon(args) => Ok(daemon::run(&args)),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("agentd: {error:#}");
        ExitCode::FAILURE
    })
}

/// Executes the launcher, which has no part of what this program links.
fn become_launcher(serve: &Serve) -> anyhow::Result<ExitCode> {
    if !rustix::process::geteuid().is_root() {
        anyhow::bail!("agentd serve begins as root: start it by systemd, or with sudo");
    }
    let executable = std::env::current_exe().context("this program's own path")?;
    let launcher = launcher(&executable)?;
    let error = Command::new(&launcher)
        .arg("--config-dir")
        .arg(std::path::absolute(&serve.config_dir)?)
        .arg("--state-dir")
        .arg(std::path::absolute(&serve.state_dir)?)
        .arg("--socket")
        .arg(std::path::absolute(&serve.socket)?)
        .args(["--limits", serve.limits.as_str()])
        .arg("--daemon")
        .arg(&executable)
        .exec();
    Err(error).with_context(|| format!("failed to execute {}", launcher.display()))
}

fn launcher(executable: &Path) -> anyhow::Result<PathBuf> {
    let beside = executable.with_file_name(LAUNCHER);
    let installed = Path::new(LIBEXEC).join(LAUNCHER);
    [beside, installed]
        .into_iter()
        .find(|path| path.is_file())
        .with_context(|| format!("{LAUNCHER} lies neither beside {} nor in {LIBEXEC}", executable.display()))
}

/// One page for the program and one for each command that people use.
fn write_manual(dir: &Path) -> anyhow::Result<ExitCode> {
    let mut program = Cli::command().disable_help_subcommand(true);
    program.build();
    let commands = program.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    for command in commands.chain([program.clone()]) {
        let page = clap_mangen::Man::new(command).section(MANUAL_SECTION);
        page.generate_to(dir).with_context(|| format!("failed to write into {}", dir.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn check(config_dir: &Path) -> ExitCode {
    match Installation::load(config_dir, Owners::Anybody) {
        Ok(installation) => {
            for hindrance in installation.catalog.hindrances() {
                println!("{hindrance}; until then its calls fail");
            }
            println!(
                "{}: valid; {} agents, {} tools, {} policies",
                config_dir.display(),
                installation.agents.len(),
                installation.catalog.tools.len(),
                installation.catalog.policies.len()
            );
            ExitCode::SUCCESS
        }
        Err(errors) => {
            for error in &errors {
                eprintln!("{error}");
            }
            ExitCode::FAILURE
        }
    }
}
