//! `agentctl completions SHELL` and `agentctl man DIR`: what shells and man(1) read, made from the command line itself.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::client::failure::Failure;
use crate::client::{Cli, Context};

/// Print completions for a shell.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  agentctl completions bash > /etc/bash_completion.d/agentctl")]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "agentctl", &mut script);
        context.output.line(String::from_utf8_lossy(&script).trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Write the manual pages into a directory.
#[derive(Debug, Args)]
pub(crate) struct Man {
    /// The directory; it must exist
    dir: PathBuf,
}

impl Man {
    pub(crate) fn run(self) -> Result<ExitCode, Failure> {
        clap_mangen::generate_to(Cli::command(), &self.dir).map_err(|error| Failure::file(&self.dir, error))?;
        Ok(ExitCode::SUCCESS)
    }
}
