//! `agentctl result ID`: the result, or that there is none yet.

use std::process::ExitCode;

use clap::Args;
use serde_json::Value;
use toolproto::ids::JobId;
use toolproto::job::JobResult;

use super::{verdict_status, wait};
use crate::client::Context;
use crate::client::failure::Failure;

/// Print a job's result.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  agentctl result 06ab3tq4k1vfl2n8o0q1r5s7tg --wait\n\n\
    Exit status 1 when the job failed, 2 when it has no result yet.")]
pub(crate) struct ResultOf {
    /// The job
    id: JobId,
    /// Wait until there is one
    #[arg(long)]
    wait: bool,
}

impl ResultOf {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let result = if self.wait { wait(context, self.id).await? } else { now(context, self.id).await? };
        context.output.value(&result)?;
        Ok(verdict_status(&result))
    }
}

async fn now(context: &Context, job: JobId) -> Result<JobResult, Failure> {
    let (status, answer) = context.daemon.get_with_status::<Value>(&format!("/jobs/{job}/result?wait=0")).await?;
    if status != hyper::StatusCode::OK {
        return Err(Failure::Input(format!("job {job} has no result yet; --wait waits for it")));
    }
    serde_json::from_value(answer)
        .map_err(|error| Failure::Conversation(format!("the result is not as expected: {error}")))
}
