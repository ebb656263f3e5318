//! `agentctl call TOOL`: one tool call without a loop.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::Value;
use toolproto::api::{API_VERSION, CallReply, CallRequest};
use toolproto::units::Span;

use super::{absolute, json_argument, write_receipt};
use crate::client::Context;
use crate::client::failure::{FAILED, Failure};

/// Call one tool, without an agent.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  agentctl call csv_stats --args '{\"file\":\"data.csv\"}' --workspace . --receipt receipt.json\n\n\
    Prints the reply; exit status 1 when the call failed."
)]
pub(crate) struct Call {
    /// The tool
    tool: String,
    /// Its arguments as JSON; @FILE reads them from a file
    #[arg(long, value_name = "JSON", default_value = "{}")]
    args: String,
    /// The directory that the tool sees as /workspace; an empty one without it
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// A shorter time than the tool's own, such as 1500ms
    #[arg(long, value_name = "T")]
    timeout: Option<Span>,
    /// Write the receipt to this file
    #[arg(long, value_name = "FILE")]
    receipt: Option<PathBuf>,
}

impl Call {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let request = CallRequest {
            version: API_VERSION,
            tool: self.tool,
            arguments: json_argument("--args", &self.args)?,
            workspace: absolute(self.workspace)?,
            timeout_ms: self.timeout.map(|time| u64::try_from(time.0.as_millis()).unwrap_or(u64::MAX)),
        };
        let reply: CallReply = context.daemon.post("/calls", &request).await?;
        write_receipt(self.receipt.as_deref(), &reply.receipt)?;
        context.output.value(&printed(&reply)?)?;
        Ok(if reply.ok { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
    }
}

/// The reply without its receipt, which is long and has a file of its own.
fn printed(reply: &CallReply) -> Result<Value, Failure> {
    let mut value = serde_json::to_value(reply)
        .map_err(|error| Failure::Conversation(format!("the reply has no JSON form: {error}")))?;
    if let Some(fields) = value.as_object_mut() {
        fields.remove("receipt");
    }
    Ok(value)
}
