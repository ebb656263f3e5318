//! `agentctl resume ID`: goes on with an ended job.

use std::process::ExitCode;

use clap::Args;
use toolproto::api::Steered;
use toolproto::ids::JobId;

use super::{follow, verdict_status, wait};
use crate::client::Context;
use crate::client::failure::Failure;

/// Go on with a job that was stopped by something that can be mended: a model that did not answer, a full disk, a conflict in
/// the workspace, a budget. It may then use all that its agent allows.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  agentctl resume 06ab3tq4k1vfl2n8o0q1r5s7tg --wait\n\n\
    Jobs that a crash or a restart of agentd interrupts go on by themselves.")]
pub(crate) struct Resume {
    /// The job
    id: JobId,
    /// Wait for the result and print it
    #[arg(long)]
    wait: bool,
    /// Show progress as it happens, then print the result
    #[arg(long)]
    follow: bool,
}

impl Resume {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let steered: Steered =
            context.daemon.post(&format!("/jobs/{}/resume", self.id), &serde_json::json!({})).await?;
        if !self.wait && !self.follow {
            if context.output.json {
                context.output.value(&steered)?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let result = if self.follow { follow(context, self.id).await? } else { wait(context, self.id).await? };
        context.output.value(&result)?;
        Ok(verdict_status(&result))
    }
}
