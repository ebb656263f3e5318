//! `agentctl cancel ID`: ends a job; its running calls are stopped and recorded first.

use std::process::ExitCode;

use clap::Args;
use toolproto::api::{JobState, Steered};
use toolproto::ids::JobId;

use crate::client::Context;
use crate::client::failure::Failure;

/// Cancel a job.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  agentctl cancel 06ab3tq4k1vfl2n8o0q1r5s7tg && agentctl result 06ab3tq4k1vfl2n8o0q1r5s7tg --wait"
)]
pub(crate) struct Cancel {
    /// The job
    id: JobId,
}

impl Cancel {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let steered: Steered =
            context.daemon.post(&format!("/jobs/{}/cancel", self.id), &serde_json::json!({})).await?;
        if context.output.json {
            context.output.value(&steered)?;
        } else if steered.state == JobState::Done {
            context.output.remark("the job had ended already");
        }
        Ok(ExitCode::SUCCESS)
    }
}
