//! `agentctl show ID`: where a job stands.

use std::process::ExitCode;

use clap::Args;
use toolproto::api::{JobView, WaitKind};
use toolproto::ids::JobId;

use super::jobs::state_text;
use crate::client::Context;
use crate::client::failure::Failure;
use crate::client::output::printable;

/// Show where a job stands.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  agentctl show 06ab3tq4k1vfl2n8o0q1r5s7tg --json")]
pub(crate) struct Show {
    /// The job
    id: JobId,
}

impl Show {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let job: JobView = context.daemon.get(&format!("/jobs/{}", self.id)).await?;
        if context.output.json {
            context.output.value(&job)?;
        } else {
            context.output.line(&description(&job))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn description(job: &JobView) -> String {
    let mut lines = vec![
        ("job", job.job_id.to_string()),
        ("agent", job.agent.clone()),
        ("state", state_text(job)),
        ("user", job.uid.to_string()),
        ("submitted", job.submitted.to_string()),
    ];
    if let Some(ended) = job.ended {
        lines.push(("ended", ended.to_string()));
    }
    if let Some(workspace) = &job.workspace {
        lines.push(("workspace", workspace.display().to_string()));
    }
    for (name, value) in &job.labels {
        lines.push(("label", format!("{name}={value}")));
    }
    let usage = &job.usage;
    lines.push(("turns", usage.turns.to_string()));
    lines.push(("calls", usage.tool_calls.to_string()));
    lines.push(("tokens", format!("{} read, {} written", usage.input_tokens, usage.output_tokens)));
    lines.push(("cost", format!("{:.4} USD", usage.cost_usd)));
    lines.push(("processor", format!("{:.1} s", usage.cpu_seconds)));
    lines.push(("time", format!("{:.1} s", usage.wall_seconds)));
    if let Some(waiting) = &job.waiting_for {
        let what = match waiting.kind {
            WaitKind::Approval => "approval of",
            WaitKind::Question => "an answer to",
        };
        lines.push(("waits for", format!("{what} call {} ({} {})", waiting.call_id, waiting.tool, waiting.arguments)));
    }
    let lines: Vec<String> = lines.into_iter().map(|(name, text)| format!("{name:<10} {}", printable(&text))).collect();
    lines.join("\n")
}
