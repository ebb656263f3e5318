//! The privileged half of agentd: `agentd serve` becomes this program.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use sandbox::host::LimitsMode;
use sandbox::launcher::{self, Options};

/// Starts agentd as the service account and runs its sandboxes. Started by `agentd serve`, not by hand.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The configuration directory.
    #[arg(long, default_value = "/etc/agentd")]
    config_dir: PathBuf,
    /// The state directory.
    #[arg(long, default_value = "/var/lib/agentd")]
    state_dir: PathBuf,
    /// agentd's socket.
    #[arg(long, default_value = "/run/agentd/agentd.sock")]
    socket: PathBuf,
    /// What happens to a call whose policy this host cannot enforce.
    #[arg(long, value_enum, default_value_t = Limits::Required)]
    limits: Limits,
    /// agentd's executable.
    #[arg(long)]
    daemon: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum Limits {
    /// It is refused.
    Required,
    /// It runs, and its receipt lists what was let go.
    BestEffort,
}

fn main() -> ExitCode {
    sandbox::log::start();
    let arguments = Arguments::parse();
    let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
    let options = Options {
        config_dir: absolute(arguments.config_dir),
        state_dir: absolute(arguments.state_dir),
        socket: absolute(arguments.socket),
        limits: match arguments.limits {
            Limits::Required => LimitsMode::Required,
            Limits::BestEffort => LimitsMode::BestEffort,
        },
        daemon: absolute(arguments.daemon),
    };
    match launcher::run(&options) {
        Ok(code) => code,
        Err(error) => {
            let error = anyhow::Error::from(error);
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
