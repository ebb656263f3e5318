//! `agentctl submit FILE|-`: a job, or JSON Lines of jobs.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use hyper::body::Bytes;
use serde_json::Value;
use toolproto::job::Accepted;

use super::{follow, read_input, verdict_status, wait};
use crate::client::Context;
use crate::client::failure::Failure;

/// Submit a job, or JSON Lines of jobs.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl submit job.json --wait\n  agentctl submit - < jobs.jsonl\n  \
    echo '{\"version\":1,\"agent\":\"quarterly-report\",\"goal\":{\"quarter\":\"2000-Q3\"}}' | agentctl submit - --follow")]
pub(crate) struct Submit {
    /// The job as JSON, several as JSON Lines; - for stdin
    file: PathBuf,
    /// Wait for the result and print it
    #[arg(long)]
    wait: bool,
    /// Show progress as it happens, then print the result
    #[arg(long)]
    follow: bool,
}

impl Submit {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let bytes = read_input(&self.file)?;
        let mut status = ExitCode::SUCCESS;
        let documents = documents(&bytes);
        let many = documents.len() > 1;
        for (line, document) in documents {
            let body = Bytes::copy_from_slice(document);
            let accepted: Accepted = match context.daemon.post_bytes("/jobs", body).await {
                Err(failure @ Failure::Refused(_)) if many => {
                    context.output.remark(&format!("line {line}:"));
                    return Err(failure);
                }
                other => other?,
            };
            if !self.wait && !self.follow {
                if context.output.json {
                    context.output.value(&accepted)?;
                } else {
                    context.output.line(&accepted.job_id.to_string())?;
                }
                continue;
            }
            let result = if self.follow {
                context.output.remark(&format!("job {}", accepted.job_id));
                follow(context, accepted.job_id).await?
            } else {
                wait(context, accepted.job_id).await?
            };
            context.output.value(&result)?;
            if verdict_status(&result) != ExitCode::SUCCESS {
                status = verdict_status(&result);
            }
        }
        Ok(status)
    }
}

/// The jobs in a file, each with its line. It is JSON Lines when its first line is a whole JSON value and more follow;
/// else it is one document, sent as it is, so that the daemon's offsets are the file's.
fn documents(bytes: &[u8]) -> Vec<(usize, &[u8])> {
    let lines: Vec<(usize, &[u8])> = bytes
        .split(|byte| *byte == b'\n')
        .enumerate()
        .map(|(index, line)| (index + 1, line))
        .filter(|(_, line)| !line.trim_ascii().is_empty())
        .collect();
    match lines.first() {
        Some((_, first)) if lines.len() > 1 && serde_json::from_slice::<Value>(first).is_ok() => lines,
        _ => vec![(1, bytes)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_one_document_are_told_apart() {
        assert_eq!(documents(b"{\"a\":1}\n"), [(1, b"{\"a\":1}\n".as_slice())]);
        assert_eq!(documents(b"{\n\"a\":1\n}"), [(1, b"{\n\"a\":1\n}".as_slice())]);
        assert_eq!(documents(b"{}\n\n{ ]\n"), [(1, b"{}".as_slice()), (3, b"{ ]".as_slice())]);
        assert_eq!(documents(b""), [(1, b"".as_slice())]);
    }
}
