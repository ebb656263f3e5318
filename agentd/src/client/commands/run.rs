//! `agentctl run AGENT --goal JSON`: a job without a file, and its result.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use toolproto::job::{Accepted, JobRequest};

use super::{absolute, follow, json_argument, verdict_status};
use crate::client::Context;
use crate::client::failure::Failure;

/// Run an agent on a goal and wait for the result.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  agentctl run quarterly-report --goal '{\"quarter\":\"2000-Q3\"}' --workspace ./work\n\n\
    Progress goes to stderr, the result to stdout."
)]
pub(crate) struct Run {
    /// The agent
    agent: String,
    /// The goal as JSON; @FILE reads it from a file
    #[arg(long, value_name = "JSON")]
    goal: String,
    /// The directory that the agent works in; a fresh one without it
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
}

impl Run {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let request = JobRequest {
            version: 1,
            agent: self.agent,
            goal: json_argument("--goal", &self.goal)?,
            workspace: absolute(self.workspace)?,
            budget: None,
            idempotency_key: None,
            priority: 0,
            continues: None,
            labels: BTreeMap::new(),
        };
        let accepted: Accepted = context.daemon.post("/jobs", &request).await?;
        context.output.remark(&format!("job {}", accepted.job_id));
        let result = follow(context, accepted.job_id).await?;
        context.output.value(&result)?;
        Ok(verdict_status(&result))
    }
}
