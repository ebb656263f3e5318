//! The commands, one file each.

pub(super) mod call;
pub(super) mod cancel;
pub(super) mod check;
pub(super) mod completions;
pub(super) mod digest;
pub(super) mod events;
pub(super) mod exec;
pub(super) mod jobs;
pub(super) mod keys;
pub(super) mod policy;
pub(super) mod receipts;
pub(super) mod result;
pub(super) mod resume;
pub(super) mod rollback;
pub(super) mod run;
pub(super) mod show;
pub(super) mod spilled;
pub(super) mod steer;
pub(super) mod submit;
pub(super) mod tools;
pub(super) mod top;
pub(super) mod verify;

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;
use serde_json::Value;
use tokio_stream::StreamExt;
use toolproto::api::EventBody;
use toolproto::ids::JobId;
use toolproto::job::{JobResult, Verdict};
use toolproto::receipt::Envelope;

use super::Context;
use super::failure::{FAILED, Failure};

/// How long one request waits for a result before it asks again, in seconds.
const WAIT: u64 = 30;

/// A file's bytes, or stdin's for `-`.
fn read_input(file: &Path) -> Result<Vec<u8>, Failure> {
    if file == Path::new("-") {
        let mut bytes = Vec::new();
        io::stdin().lock().read_to_end(&mut bytes).map_err(|error| Failure::file(Path::new("stdin"), error))?;
        return Ok(bytes);
    }
    std::fs::read(file).map_err(|error| Failure::file(file, error))
}

/// JSON from the command line; `@FILE` reads it from a file.
fn json_argument(option: &str, text: &str) -> Result<Value, Failure> {
    let bytes = match text.strip_prefix('@') {
        Some(file) => read_input(Path::new(file))?,
        None => text.as_bytes().to_vec(),
    };
    toolproto::strict_json::parse(&bytes).map_err(|error| Failure::Input(format!("{option} is not JSON: {error}")))
}

/// The absolute path that the daemon needs, without resolving links: whose directory it is, is judged there.
fn absolute(workspace: Option<PathBuf>) -> Result<Option<PathBuf>, Failure> {
    workspace.map(|path| std::path::absolute(&path).map_err(|error| Failure::file(&path, error))).transpose()
}

fn write_json(file: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string(value)
        .map_err(|error| Failure::Conversation(format!("the answer has no JSON form: {error}")))?;
    text.push('\n');
    std::fs::write(file, text).map_err(|error| Failure::file(file, error))
}

/// Writes a receipt where it is wanted.
fn write_receipt(file: Option<&Path>, receipt: &Envelope) -> Result<(), Failure> {
    file.map_or(Ok(()), |file| write_json(file, receipt))
}

/// Waits until the job has a result.
async fn wait(context: &Context, job: JobId) -> Result<JobResult, Failure> {
    loop {
        let path = format!("/jobs/{job}/result?wait={WAIT}");
        let (status, answer) = context.daemon.get_with_status::<Value>(&path).await?;
        if status == hyper::StatusCode::OK {
            return serde_json::from_value(answer)
                .map_err(|error| Failure::Conversation(format!("the result is not as expected: {error}")));
        }
    }
}

/// Prints what happens in the job until it has a result. A broken connection is taken up again where it broke.
async fn follow(context: &Context, job: JobId) -> Result<JobResult, Failure> {
    let mut last = None;
    loop {
        let events = context.daemon.events(&format!("/jobs/{job}/events"), last).await?;
        tokio::pin!(events);
        while let Some(Ok(event)) = events.next().await {
            last = event.sequence.or(last);
            if let Some(line) = context.output.progress(&event) {
                context.output.remark(&line);
            }
            if let EventBody::JobEnded { result } = event.body {
                return Ok(*result);
            }
        }
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

/// 0 for success, 1 for failure.
fn verdict_status(result: &JobResult) -> ExitCode {
    match result.verdict {
        Verdict::Success { .. } => ExitCode::SUCCESS,
        Verdict::Failed { .. } => ExitCode::from(FAILED),
    }
}
