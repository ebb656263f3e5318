//! `agentctl`: the client of agentd's API. It needs no privilege and holds no state.
//!
//! | module | what it holds |
//! |---|---|
//! | [`transport`] | HTTP over the Unix socket: requests, event streams, upgraded connections |
//! | `commands` | one file per command |
//! | `output` | tables, progress lines, colours |
//! | [`failure`] | what can go wrong, its exit status, and what to do next |

mod commands;
pub mod failure;
mod output;
pub mod transport;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::failure::Failure;
use self::output::Output;
use self::transport::Daemon;

/// Where the daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/agentd/agentd.sock";

/// The command line of `agentctl`.
#[derive(Debug, Parser)]
#[command(
    name = "agentctl",
    version,
    about = "Submits agent jobs to agentd, follows them, and reads what they did",
    after_help = "Exit status: 0 done; 1 the job or call ended in failure; 2 bad usage or invalid input; \
                  3 the daemon cannot be reached; 4 not permitted. `exec` has its own, see `agentctl exec --help`."
)]
pub struct Cli {
    /// The daemon's socket
    #[arg(long, global = true, env = "AGENTD_SOCKET", default_value = DEFAULT_SOCKET, value_name = "PATH")]
    socket: PathBuf,
    /// Print JSON for programs
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Submit a job, or JSON Lines of jobs
    Submit(commands::submit::Submit),
    /// Run an agent on a goal and wait for the result
    Run(commands::run::Run),
    /// List jobs, newest first
    Jobs(commands::jobs::Jobs),
    /// Show where a job stands
    Show(commands::show::Show),
    /// Show what happened in a job
    Events(commands::events::Events),
    /// Print a job's result
    Result(commands::result::ResultOf),
    /// Cancel a job
    Cancel(commands::cancel::Cancel),
    /// Tell a running job something
    Say(commands::steer::Say),
    /// Go on with a job that was stopped by something that can be mended
    Resume(commands::resume::Resume),
    /// Take a workspace back to where a receipt left it
    Rollback(commands::rollback::Rollback),
    /// Let a call run that waits for that
    Approve(commands::steer::Approve),
    /// Refuse a call that waits for a decision
    Deny(commands::steer::Deny),
    /// Call one tool, without an agent
    Call(commands::call::Call),
    /// Run one command in a sandbox
    Exec(commands::exec::Exec),
    /// List tools, or show one
    Tools(commands::tools::Tools),
    /// List policies, or show one
    Policy(commands::policy::Policy),
    /// List a job's receipts, or write them to a file
    Receipts(commands::receipts::Receipts),
    /// Print a result that was kept apart from the conversation
    Spilled(commands::spilled::Spilled),
    /// List the keys that sign or signed receipts, or write them to a file
    Keys(commands::keys::Keys),
    /// Check a receipt, a bundle of receipts, or the history of keys
    Verify(commands::verify::Verify),
    /// Print the digest of a directory as receipts name it
    Digest(commands::digest::Digest),
    /// Watch the jobs that run and wait
    Top(commands::top::Top),
    /// Print completions for a shell
    Completions(commands::completions::Completions),
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Man(commands::completions::Man),
}

/// What every command is given.
struct Context {
    daemon: Daemon,
    output: Output,
}

impl Cli {
    /// Runs the command to its end, prints what it has to say, and gives the exit status.
    pub async fn run(self) -> ExitCode {
        let context = Context { daemon: Daemon::at(self.socket), output: Output::new(self.json) };
        let is_exec = matches!(self.command, Command::Exec(_));
        match self.command.run(&context).await {
            Ok(status) => status,
            Err(failure) => {
                context.output.failure(&failure);
                if is_exec { ExitCode::from(commands::exec::SANDBOX_FAILED) } else { failure.status() }
            }
        }
    }
}

impl Command {
    async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        match self {
            Self::Submit(command) => command.run(context).await,
            Self::Run(command) => command.run(context).await,
            Self::Jobs(command) => command.run(context).await,
            Self::Show(command) => command.run(context).await,
            Self::Events(command) => command.run(context).await,
            Self::Result(command) => command.run(context).await,
            Self::Cancel(command) => command.run(context).await,
            Self::Say(command) => command.run(context).await,
            Self::Resume(command) => command.run(context).await,
            Self::Rollback(command) => command.run(context).await,
            Self::Approve(command) => command.run(context).await,
            Self::Deny(command) => command.run(context).await,
            Self::Call(command) => command.run(context).await,
            Self::Exec(command) => command.run(context).await,
            Self::Tools(command) => command.run(context).await,
            Self::Policy(command) => command.run(context).await,
            Self::Receipts(command) => command.run(context).await,
            Self::Keys(command) => command.run(context).await,
            Self::Spilled(command) => command.run(context).await,
            Self::Verify(command) => command.run(context).await,
            Self::Digest(command) => command.run(context),
            Self::Top(command) => command.run(context).await,
            Self::Completions(command) => command.run(context),
            Self::Man(command) => command.run(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
