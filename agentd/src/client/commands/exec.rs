//! `agentctl exec -- CMD…`: one sandboxed command with stdin, stdout and stderr connected.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc};
use toolproto::api::{API_VERSION, ExecEnd, ExecRequest};
use toolproto::framing::{CHUNK, EXEC_PROTOCOL, Frame, FrameKind, FrameReader, WINDOW};
use toolproto::job::Problem;
use toolproto::manifest::HostPort;
use toolproto::receipt::OutcomeKind;
use toolproto::units::Span;

use super::{absolute, write_receipt};
use crate::client::Context;
use crate::client::failure::Failure;

/// Exit status: the sandbox could not be set up, or anything else of agentd's own failed.
pub(crate) const SANDBOX_FAILED: u8 = 125;
const TIMED_OUT: u8 = 124;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
const BY_SIGNAL: u8 = 128;
const SIGKILL: u8 = 9;
const SIGTERM: u8 = 15;
/// errno(3): no such file.
const ENOENT: i32 = 2;

/// Run one command in a sandbox.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl exec --policy strict -- id\n  \
    agentctl exec --policy workspace --workspace . -- python3 -c 'open(\"a\",\"w\").write(\"b\")'\n\n\
    Exit status: the command's own; 124 timed out; 125 the sandbox could not be set up, or the daemon not be used;\n\
    126 not executable; 127 not found; 128+N killed by signal N; 137 also for out of memory.\n\
    Changes to the workspace are kept on status 0 only, with --keep on any.")]
pub(crate) struct Exec {
    /// The policy that confines the command
    #[arg(long)]
    policy: String,
    /// A runtime, such as python or bun, that runs the command's first word as it would run a tool's entry
    #[arg(long, value_name = "NAME")]
    runtime: Option<String>,
    /// The directory that the command sees as /workspace; an empty one without it
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// A host that it may connect to
    #[arg(long, value_name = "HOST:PORT", value_parser = host_port)]
    network: Vec<HostPort>,
    /// End it after this time, such as 30s
    #[arg(long, value_name = "T")]
    timeout: Option<Span>,
    /// Keep what it changed in the workspace on any exit status
    #[arg(long)]
    keep: bool,
    /// Write the receipt to this file
    #[arg(long, value_name = "FILE")]
    receipt: Option<PathBuf>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

fn host_port(text: &str) -> Result<HostPort, String> {
    HostPort::try_from(text.to_owned()).map_err(|error| error.to_string())
}

impl Exec {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let request = ExecRequest {
            version: API_VERSION,
            policy: self.policy,
            runtime: self.runtime,
            command: self.command,
            workspace: absolute(self.workspace)?,
            network: self.network,
            timeout_ms: self.timeout.map(|time| u64::try_from(time.0.as_millis()).unwrap_or(u64::MAX)),
            keep: self.keep,
        };
        let connection = context.daemon.upgrade("/exec", EXEC_PROTOCOL, &request).await?;
        let (mut receiving, sending) = tokio::io::split(connection);
        let window = Arc::new(Semaphore::new(WINDOW));
        let sender = tokio::spawn(send(sending, Arc::clone(&window)));
        let end = receive(&mut receiving, &window).await;
        sender.abort();
        let end = end?;
        write_receipt(self.receipt.as_deref(), &end.receipt)?;
        if let Some(failure) = &end.failure {
            context.output.remark(&format!(
                "agentctl: {} at step {}: {}\n  what to do: {}",
                failure.code,
                failure.step,
                failure.message,
                failure.code.recovery_suggestion()
            ));
        }
        Ok(ExitCode::from(status(&end)))
    }
}

/// Sends stdin, and a stop when this process is asked to end; the command's own end is waited for all the same.
async fn send(mut connection: impl tokio::io::AsyncWrite + Unpin, window: Arc<Semaphore>) -> io::Result<()> {
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminations = signal(SignalKind::terminate())?;
    let mut stdin = read_stdin(window);
    loop {
        let frame = tokio::select! {
            // The reader's last piece is an empty one: the end of file.
            Some(payload) = stdin.recv() => Frame { kind: FrameKind::Stdin, payload },
            _ = interrupts.recv() => Frame { kind: FrameKind::Stop, payload: Vec::new() },
            _ = terminations.recv() => Frame { kind: FrameKind::Stop, payload: Vec::new() },
        };
        connection.write_all(&frame.encode().map_err(io::Error::other)?).await?;
        connection.flush().await?;
    }
}

/// Reads stdin on a thread of its own, which the process need not wait for: a terminal may never answer.
fn read_stdin(window: Arc<Semaphore>) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(1);
    let (pieces, mut queue) = mpsc::channel::<Vec<u8>>(1);
    // Each piece waits until the daemon has taken enough of those before it.
    tokio::spawn(async move {
        while let Some(piece) = queue.recv().await {
            let Ok(permits) = window.acquire_many(u32::try_from(piece.len()).unwrap_or(u32::MAX)).await else { return };
            permits.forget();
            if sender.send(piece).await.is_err() {
                return;
            }
        }
    });
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        loop {
            let read = match io::stdin().lock().read(&mut buffer) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // A stdin that cannot be read is one that has ended.
                Err(_) => 0,
            };
            let piece = buffer.get(..read).unwrap_or_default().to_vec();
            if pieces.blocking_send(piece).is_err() || read == 0 {
                return;
            }
        }
    });
    receiver
}

async fn receive(connection: &mut (impl tokio::io::AsyncRead + Unpin), window: &Semaphore) -> Result<ExecEnd, Failure> {
    let mut frames = FrameReader::default();
    let mut buffer = vec![0; CHUNK];
    loop {
        while let Some(frame) = frames.next_frame().map_err(|error| Failure::Conversation(error.to_string()))? {
            match frame.kind {
                FrameKind::Stdout => pass_on(&mut io::stdout().lock(), &frame.payload, "stdout")?,
                FrameKind::Stderr => pass_on(&mut io::stderr().lock(), &frame.payload, "stderr")?,
                FrameKind::Status => return read(&frame.payload),
                FrameKind::Problem => return Err(Failure::Refused(Box::new(read::<Problem>(&frame.payload)?))),
                FrameKind::Credit => window.add_permits(credit(&frame.payload)?),
                FrameKind::Stdin | FrameKind::Stop => {
                    return Err(Failure::Conversation("the daemon sent a frame that only clients send".to_owned()));
                }
            }
        }
        let read = connection
            .read(&mut buffer)
            .await
            .map_err(|error| Failure::Conversation(format!("the connection broke: {error}")))?;
        if read == 0 {
            return Err(Failure::Conversation("the daemon hung up before the command's end was known".to_owned()));
        }
        frames.push(buffer.get(..read).unwrap_or_default());
    }
}

/// Writes on what the command wrote. A reader that has gone ends this process as it would have ended the command.
fn pass_on(stream: &mut impl Write, bytes: &[u8], name: &str) -> Result<(), Failure> {
    stream.write_all(bytes).and_then(|()| stream.flush()).map_err(|error| Failure::file(Path::new(name), error))
}

/// How many bytes of stdin may follow those that were taken.
pub(super) fn credit(payload: &[u8]) -> Result<usize, Failure> {
    let bytes = payload.try_into().map_err(|_| Failure::Conversation("a credit that is no number".to_owned()))?;
    let bytes = usize::try_from(u32::from_be_bytes(bytes)).unwrap_or(WINDOW);
    // More than was on its way cannot have been taken.
    Ok(bytes.min(WINDOW))
}

pub(super) fn read<T: serde::de::DeserializeOwned>(payload: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(payload)
        .map_err(|error| Failure::Conversation(format!("the last frame is not as expected: {error}")))
}

/// The exit status that stands for how the command ended.
fn status(end: &ExecEnd) -> u8 {
    let signal = |otherwise: u8| end.outcome.signal.and_then(|signal| u8::try_from(signal).ok()).unwrap_or(otherwise);
    match end.outcome.kind {
        // It ended well, and what it changed could not be taken over.
        OutcomeKind::Exited if end.failure.is_some() => SANDBOX_FAILED,
        OutcomeKind::Exited => {
            end.outcome.exit_status.and_then(|status| u8::try_from(status).ok()).unwrap_or(SANDBOX_FAILED)
        }
        OutcomeKind::Signalled => BY_SIGNAL.saturating_add(signal(SIGKILL)),
        OutcomeKind::Cancelled => BY_SIGNAL.saturating_add(signal(SIGTERM)),
        OutcomeKind::TimedOut => TIMED_OUT,
        OutcomeKind::OutOfMemory => BY_SIGNAL + SIGKILL,
        OutcomeKind::LaunchFailed => match &end.failure {
            Some(failure) if failure.step == "exec" && failure.errno == Some(ENOENT) => NOT_FOUND,
            Some(failure) if failure.step == "exec" && failure.errno.is_some() => NOT_EXECUTABLE,
            _ => SANDBOX_FAILED,
        },
        OutcomeKind::Refused | OutcomeKind::Interrupted => SANDBOX_FAILED,
    }
}

#[cfg(test)]
mod tests {
    use toolproto::api::ExecFailure;
    use toolproto::code::Code;
    use toolproto::ids::{CallId, JobId};
    use toolproto::receipt::{Envelope, Outcome, Usage};

    use super::*;

    fn end(kind: OutcomeKind, exit_status: Option<i32>, signal: Option<i32>) -> ExecEnd {
        ExecEnd {
            version: API_VERSION,
            job_id: JobId::from_u128(1),
            call_id: CallId::from_u128(2),
            outcome: Outcome { kind, code: None, exit_status, signal },
            failure: None,
            usage: Usage::default(),
            receipt: Envelope { payload: String::new(), payload_type: String::new(), signatures: Vec::new() },
        }
    }

    #[test]
    fn exit_statuses_are_the_documented_ones() {
        assert_eq!(status(&end(OutcomeKind::Exited, Some(0), None)), 0);
        assert_eq!(status(&end(OutcomeKind::Exited, Some(77), None)), 77);
        assert_eq!(status(&end(OutcomeKind::TimedOut, None, Some(15))), 124);
        assert_eq!(status(&end(OutcomeKind::Signalled, None, Some(11))), 139);
        assert_eq!(status(&end(OutcomeKind::OutOfMemory, None, Some(9))), 137);
        assert_eq!(status(&end(OutcomeKind::Cancelled, None, None)), 143);
        assert_eq!(status(&end(OutcomeKind::Refused, None, None)), 125);
    }

    #[test]
    fn commands_that_cannot_be_executed_are_told_from_sandboxes_that_cannot_be_set_up() {
        let failed = |step: &str, errno| ExecEnd {
            failure: Some(ExecFailure {
                code: Code::LaunchFailed,
                step: step.to_owned(),
                errno,
                message: String::new(),
            }),
            ..end(OutcomeKind::LaunchFailed, None, None)
        };
        assert_eq!(status(&failed("exec", Some(2))), 127);
        assert_eq!(status(&failed("exec", Some(13))), 126);
        assert_eq!(status(&failed("mounts", Some(2))), 125);
        assert_eq!(status(&failed("plan", None)), 125);
    }
}
