//! `agentctl top`: the jobs that run and wait, again and again.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use toolproto::api::{Health, JobPage, JobView};

use super::jobs::state_text;
use crate::client::Context;
use crate::client::failure::Failure;
use crate::client::output::table;

/// Watch the jobs that run and wait.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl top\n  agentctl top --once --json\n\n\
    Where stdout is no terminal, one picture is printed.")]
pub(crate) struct Top {
    /// Seconds between two pictures
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Print one picture
    #[arg(long)]
    once: bool,
}

impl Top {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let live = !self.once && !context.output.json && std::io::stdout().is_terminal();
        loop {
            let health: Health = context.daemon.get("/health").await?;
            let jobs = live_jobs(context).await?;
            if context.output.json {
                context.output.value(&serde_json::json!({"health": health, "jobs": jobs}))?;
            } else {
                // Home, and clear what is below, so that nothing flickers.
                let home = if live { "\x1b[H\x1b[J" } else { "" };
                context.output.line(&format!("{home}{}", picture(&health, &jobs)))?;
            }
            if !live {
                return Ok(ExitCode::SUCCESS);
            }
            tokio::time::sleep(Duration::from_secs(self.interval)).await;
        }
    }
}

async fn live_jobs(context: &Context) -> Result<Vec<JobView>, Failure> {
    let mut jobs = Vec::new();
    for state in ["running", "waiting", "queued"] {
        let page: JobPage = context.daemon.get(&format!("/jobs?state={state}&limit=100")).await?;
        jobs.extend(page.jobs);
    }
    Ok(jobs)
}

fn picture(health: &Health, jobs: &[JobView]) -> String {
    let heading = ["JOB", "AGENT", "UID", "STATE", "TURNS", "CALLS", "TOKENS", "CPU", "MEMORY", "TIME", "USD"];
    let rows: Vec<[String; 11]> = jobs.iter().map(row).collect();
    format!(
        "agentd {} since {}: {} run, {} wait\n\n{}",
        health.agentd_version,
        health.started.strftime("%Y-%m-%d %H:%M:%SZ"),
        health.jobs_running,
        health.jobs_queued,
        table(heading, &rows)
    )
}

fn row(job: &JobView) -> [String; 11] {
    let usage = &job.usage;
    [
        job.job_id.to_string(),
        job.agent.clone(),
        job.uid.to_string(),
        state_text(job),
        usage.turns.to_string(),
        usage.tool_calls.to_string(),
        (usage.input_tokens + usage.output_tokens).to_string(),
        format!("{:.1}s", usage.cpu_seconds),
        job.memory_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{}MiB", bytes.div_ceil(1 << 20))),
        format!("{:.0}s", usage.wall_seconds),
        format!("{:.4}", usage.cost_usd),
    ]
}
