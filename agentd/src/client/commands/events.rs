//! `agentctl events ID`: what happened in a job, and with `--follow` what happens.

use std::process::ExitCode;

use clap::Args;
use tokio_stream::StreamExt;
use toolproto::ids::JobId;

use crate::client::Context;
use crate::client::failure::Failure;

/// Show what happened in a job.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl events 06ab3tq4k1vfl2n8o0q1r5s7tg\n  \
    agentctl events 06ab3tq4k1vfl2n8o0q1r5s7tg --follow --json")]
pub(crate) struct Events {
    /// The job
    id: JobId,
    /// Go on until the job has ended
    #[arg(long)]
    follow: bool,
}

impl Events {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let path = format!("/jobs/{}/events?follow={}", self.id, self.follow);
        let events = context.daemon.events(&path, None).await?;
        tokio::pin!(events);
        while let Some(event) = events.next().await {
            let event = event?;
            if context.output.json {
                context.output.value(&event)?;
            } else if let Some(line) = context.output.progress(&event) {
                context.output.line(&format!("{} {line}", event.time.strftime("%H:%M:%S%.3f")))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
