//! `agentctl tools`: what there is to call.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use toolproto::api::{API_VERSION, BreakerAction, BreakerRequest, BreakerView, ExtensionView, ToolList, ToolView};
use toolproto::source::alternatives;

use crate::client::Context;
use crate::client::failure::Failure;
use crate::client::output::{millis, table};

/// List tools, or show one.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl tools\n  agentctl tools show csv_stats\n  \
    agentctl tools check ./csv_stats\n  \
    agentctl tools open csv_stats --reason 'the upstream is being moved'\n  agentctl tools reset csv_stats")]
pub(crate) struct Tools {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show one tool with its schemas
    Show {
        /// The tool
        name: String,
    },
    /// Check a tool's folder against the protocol
    Check(super::check::Check),
    /// Open a breaker until it is reset: no call is started; for administrators
    Open {
        /// The tool, or runtime:NAME
        name: String,
        /// Why; callers are told
        #[arg(long)]
        reason: String,
    },
    /// Close a breaker and forget what was seen; for administrators
    Reset {
        /// The tool, or runtime:NAME
        name: String,
    },
}

impl Tools {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let shown = match self.command {
            Some(Command::Check(check)) => return check.run(context).await,
            Some(Command::Open { name, reason }) => {
                return set_breaker(context, &name, BreakerAction::Open, Some(reason)).await;
            }
            Some(Command::Reset { name }) => return set_breaker(context, &name, BreakerAction::Reset, None).await,
            Some(Command::Show { name }) => Some(name),
            None => None,
        };
        let list: ToolList = context.daemon.get("/tools").await?;
        match shown {
            Some(name) => context.output.value(find(&list, &name)?)?,
            None if context.output.json => context.output.value(&list)?,
            None => {
                let rows: Vec<[String; 7]> = list.tools.iter().map(row).collect();
                context
                    .output
                    .line(&table(["TOOL", "RUNTIME", "POLICY", "EFFECTS", "TIME", "BREAKER", "DESCRIPTION"], &rows))?;
                if !list.extensions.is_empty() {
                    let rows: Vec<[String; 7]> = list.extensions.iter().map(extension_row).collect();
                    let head = ["EXTENSION", "RUNTIME", "POLICY", "OPERATIONS", "TIME", "REQUIRED", "DESCRIPTION"];
                    context.output.line("")?;
                    context.output.line(&table(head, &rows))?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn set_breaker(
    context: &Context,
    name: &str,
    action: BreakerAction,
    reason: Option<String>,
) -> Result<ExitCode, Failure> {
    // A name with a slash would be another path.
    if name.contains(['/', '?', '#', '%']) {
        return Err(Failure::Input(format!("there is no tool `{name}`")));
    }
    let request = BreakerRequest { version: API_VERSION, action, reason };
    let view: BreakerView = context.daemon.post(&format!("/tools/{name}/breaker"), &request).await?;
    if context.output.json {
        context.output.value(&view)?;
    } else {
        context.output.line(&format!("{name}: {}", view.state))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn row(tool: &ToolView) -> [String; 7] {
    [
        tool.name.clone(),
        match &tool.runtime_version {
            Some(version) => format!("{} ({version})", tool.runtime),
            None => tool.runtime.clone(),
        },
        tool.policy.clone(),
        tool.effects.clone(),
        millis(tool.timeout_ms),
        tool.breaker.as_ref().map_or_else(String::new, |breaker| breaker.state.clone()),
        tool.description.lines().next().unwrap_or_default().to_owned(),
    ]
}

fn extension_row(extension: &ExtensionView) -> [String; 7] {
    let operations: Vec<&str> = extension.operations.iter().map(|point| point.as_str()).collect();
    [
        extension.name.clone(),
        extension.runtime.clone(),
        extension.policy.clone(),
        operations.join(", "),
        millis(extension.timeout_ms),
        if extension.required { "yes" } else { "no" }.to_owned(),
        extension.description.lines().next().unwrap_or_default().to_owned(),
    ]
}

fn find<'a>(list: &'a ToolList, name: &str) -> Result<&'a ToolView, Failure> {
    list.tools.iter().find(|tool| tool.name == name).ok_or_else(|| {
        let hint = alternatives(name, list.tools.iter().map(|tool| tool.name.as_str()));
        Failure::Input(format!("there is no tool `{name}`{hint}"))
    })
}
