//! `agentctl policy`: what confines calls.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use toolproto::api::{PolicyList, PolicyView};
use toolproto::source::alternatives;

use crate::client::Context;
use crate::client::failure::Failure;
use crate::client::output::table;

/// List policies, or show one.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl policy\n  agentctl policy show workspace")]
pub(crate) struct Policy {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the effective policy with the reason for each rule
    Show {
        /// The policy
        name: String,
    },
}

impl Policy {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let list: PolicyList = context.daemon.get("/policies").await?;
        match self.command {
            Some(Command::Show { name }) => context.output.value(&find(&list, &name)?.effective)?,
            None if context.output.json => context.output.value(&list)?,
            None => {
                let rows: Vec<[String; 5]> = list.policies.iter().map(row).collect();
                context.output.line(&table(["POLICY", "WORKSPACE", "NETWORK", "COMMANDS", "DIGEST"], &rows))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn row(policy: &PolicyView) -> [String; 5] {
    let commands = if policy.adhoc { "yes" } else { "no" };
    [
        policy.name.clone(),
        policy.workspace.clone(),
        policy.network.clone(),
        commands.to_owned(),
        policy.digest.to_string(),
    ]
}

fn find<'a>(list: &'a PolicyList, name: &str) -> Result<&'a PolicyView, Failure> {
    list.policies.iter().find(|policy| policy.name == name).ok_or_else(|| {
        let hint = alternatives(name, list.policies.iter().map(|policy| policy.name.as_str()));
        Failure::Input(format!("there is no policy `{name}`{hint}"))
    })
}
