//! `agentctl jobs`: a page of jobs, newest first.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use toolproto::api::{JobFilter, JobPage, JobState, JobView};
use toolproto::ids::JobId;
use toolproto::job::Verdict;

use crate::client::Context;
use crate::client::failure::Failure;
use crate::client::output::{phase_name, table};

/// List jobs, newest first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl jobs\n  agentctl jobs --state running --label team=sales --json")]
pub(crate) struct Jobs {
    /// Only jobs in this state
    #[arg(long, value_enum)]
    state: Option<State>,
    /// Only jobs of this agent
    #[arg(long)]
    agent: Option<String>,
    /// Only jobs with this label
    #[arg(long, value_name = "NAME[=VALUE]")]
    label: Option<String>,
    /// Only jobs older than this one: the next page
    #[arg(long, value_name = "ID")]
    before: Option<JobId>,
    /// How many, at most 500
    #[arg(long, default_value_t = JobFilter::DEFAULT_LIMIT)]
    limit: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum State {
    Queued,
    Running,
    Waiting,
    Done,
}

impl From<State> for JobState {
    fn from(state: State) -> Self {
        match state {
            State::Queued => Self::Queued,
            State::Running => Self::Running,
            State::Waiting => Self::Waiting,
            State::Done => Self::Done,
        }
    }
}

impl Jobs {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let filter = JobFilter {
            state: self.state.map(JobState::from),
            agent: self.agent,
            label: self.label,
            before: self.before,
            limit: Some(self.limit),
        };
        let page: JobPage = context.daemon.get(&format!("/jobs?{}", query(&filter))).await?;
        if context.output.json {
            context.output.value(&page)?;
            return Ok(ExitCode::SUCCESS);
        }
        let rows: Vec<[String; 7]> = page.jobs.iter().map(row).collect();
        context.output.line(&table(["JOB", "AGENT", "STATE", "TURNS", "CALLS", "TOKENS", "SUBMITTED"], &rows))?;
        if let Some(next) = page.next {
            context.output.remark(&format!("more: --before {next}"));
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn row(job: &JobView) -> [String; 7] {
    [
        job.job_id.to_string(),
        job.agent.clone(),
        state_text(job),
        job.usage.turns.to_string(),
        job.usage.tool_calls.to_string(),
        (job.usage.input_tokens + job.usage.output_tokens).to_string(),
        job.submitted.strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
    ]
}

/// The state, or for ended jobs how they ended.
pub(super) fn state_text(job: &JobView) -> String {
    match (job.state, job.result.as_ref().map(|result| &result.verdict)) {
        (JobState::Queued, _) => "queued".to_owned(),
        (JobState::Running, _) => phase_name(job.phase).to_owned(),
        (JobState::Waiting, _) => "waiting".to_owned(),
        (JobState::Done, Some(Verdict::Success { .. })) => "success".to_owned(),
        (JobState::Done, Some(Verdict::Failed { error_code, .. })) => error_code.to_string(),
        (JobState::Done, None) => "done".to_owned(),
    }
}

/// The filter as the part of a URL behind the question mark.
fn query(filter: &JobFilter) -> String {
    let state = filter.state.map(|state| {
        match state {
            JobState::Queued => "queued",
            JobState::Running => "running",
            JobState::Waiting => "waiting",
            JobState::Done => "done",
        }
        .to_owned()
    });
    let fields = [
        ("state", state),
        ("agent", filter.agent.clone()),
        ("label", filter.label.clone()),
        ("before", filter.before.map(|id| id.to_string())),
        ("limit", filter.limit.map(|limit| limit.to_string())),
    ];
    let pairs = fields.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", escaped(&value?))));
    pairs.collect::<Vec<_>>().join("&")
}

/// Percent-encoding (RFC 3986) of everything but unreserved characters.
fn escaped(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_become_queries_that_cannot_be_mistaken() {
        let filter = JobFilter {
            state: Some(JobState::Running),
            agent: Some("a&b=c".to_owned()),
            label: Some("team=é".to_owned()),
            before: None,
            limit: Some(5),
        };
        assert_eq!(query(&filter), "state=running&agent=a%26b%3Dc&label=team%3D%C3%A9&limit=5");
    }
}
