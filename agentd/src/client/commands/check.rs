//! `agentctl tools check DIR`: runs a tool's program in a sandbox against the conformance probes.
//!
//! The folder is copied into a temporary workspace, so that a tool can be checked before anybody installs it. What its
//! folder holds below `check/` lies in the workspace beside it, for the calls to work on.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep_until};
use toolproto::api::{API_VERSION, ExecEnd, ExecRequest};
use toolproto::framing::{CHUNK, EXEC_PROTOCOL, Frame, FrameKind, FrameReader, WINDOW};
use toolproto::receipt::Change;

use super::exec::{credit, read};
use crate::client::Context;
use crate::client::failure::{FAILED, Failure};
use crate::client::output::{Colour, printable};
use crate::conformance::{Checked, Gravity, Probe, Report, Seen, Subject, WORKSPACE_FOLDER, judge, probes};

/// The end of stderr that is kept.
const STDERR_TAIL: usize = 8 << 10;

/// Check a tool's folder against the protocol.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl tools check ./csv_stats\n\n\
    The folder is copied to a temporary workspace (in TMPDIR) and run under a policy for ad-hoc commands.\n\
    Files below check/ in the folder are put into the workspace.\n\n\
    Exit status: 0 nothing is violated; 1 something is.")]
pub(crate) struct Check {
    /// The tool's folder, with its tool.toml
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// The policy that confines the program
    #[arg(long, default_value = "workspace")]
    policy: String,
    /// Let the program out to the hosts that its manifest lists, as far as the policy does
    #[arg(long)]
    network: bool,
}

impl Check {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let subject = Subject::load(&self.folder).map_err(|error| Failure::Input(error.to_string()))?;
        let mut checked = Vec::new();
        for probe in probes(&subject) {
            // A workspace for each: no probe finds what another left.
            let workspace = Workspace::new(&self.folder)?;
            let seen = self.run_probe(context, &subject, &probe, workspace.path()).await?;
            let one = Checked { probe: probe.name, findings: judge(&subject, &probe, &seen) };
            if !context.output.json {
                show(context, &one)?;
            }
            checked.push(one);
        }
        let report = Report::new(subject.manifest.name, checked);
        if context.output.json {
            context.output.value(&report)?;
        } else {
            let verdict = if report.passed { "passed" } else { "FAILED" };
            let cannot = if subject.arguments.is_none() {
                "; no arguments could be made: add `examples` to the input schema"
            } else {
                ""
            };
            context.output.line(&format!("{}: {verdict}, {} probes{cannot}", report.tool, report.probes.len()))?;
        }
        Ok(if report.passed { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
    }

    async fn run_probe(
        &self,
        context: &Context,
        subject: &Subject,
        probe: &Probe,
        workspace: &Path,
    ) -> Result<Seen, Failure> {
        let request = ExecRequest {
            version: API_VERSION,
            policy: self.policy.clone(),
            runtime: Some(subject.manifest.program.runtime.clone()),
            command: vec![subject.entry.clone()],
            workspace: Some(workspace.to_owned()),
            network: if self.network { subject.manifest.program.hosts.clone() } else { Vec::new() },
            timeout_ms: Some(u64::try_from(subject.time.as_millis()).unwrap_or(u64::MAX)),
            keep: false,
        };
        let connection = context.daemon.upgrade("/exec", EXEC_PROTOCOL, &request).await?;
        let most = usize::try_from(subject.manifest.program.max_response.0).unwrap_or(usize::MAX).saturating_add(1);
        let (end, stdout, stderr) = converse(connection, &probe.stdin, probe.pause, most).await?;
        if let Some(failure) = end.failure.as_ref().filter(|failure| failure.step != "exec") {
            return Err(Failure::Conversation(format!(
                "the sandbox could not be set up: {} at step {}: {}",
                failure.code, failure.step, failure.message
            )));
        }
        let receipt = end
            .receipt
            .receipt()
            .map_err(|error| Failure::Conversation(format!("the receipt is not as expected: {error}")))?;
        let paths = |changes: Vec<Change>| changes.into_iter().map(|change| change.path);
        let changes = receipt.workspace;
        Ok(Seen {
            kind: end.outcome.kind,
            status: end.outcome.exit_status,
            failure: end.failure.map(|failure| failure.message),
            stdout,
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
            changed: paths(changes.created).chain(paths(changes.modified)).chain(paths(changes.deleted)).collect(),
        })
    }
}

fn show(context: &Context, checked: &Checked) -> Result<(), Failure> {
    let worst = checked.findings.iter().map(|finding| finding.gravity).find(|gravity| *gravity == Gravity::Violation);
    let mark = match worst {
        Some(_) => context.output.paint("FAIL", Colour::Bad),
        None => context.output.paint("ok  ", Colour::Good),
    };
    context.output.line(&format!("{mark} {}", checked.probe))?;
    for finding in &checked.findings {
        let kind = if finding.gravity == Gravity::Violation { "violates" } else { "advice" };
        context.output.line(&format!("       {kind}: {}", printable(&finding.what)))?;
    }
    Ok(())
}

/// Sends the pieces with pauses between them, and collects what the command writes until its end.
async fn converse(
    connection: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    pieces: &[Vec<u8>],
    pause: Duration,
    most: usize,
) -> Result<(ExecEnd, Vec<u8>, Vec<u8>), Failure> {
    let broke = |error: std::io::Error| Failure::Conversation(format!("the connection broke: {error}"));
    let (mut receiving, mut sending) = tokio::io::split(connection);
    // An empty piece is the end of file.
    let mut queue: VecDeque<(Duration, Vec<u8>)> = pieces
        .iter()
        .enumerate()
        .flat_map(|(index, piece)| {
            let wait = if index == 0 { Duration::ZERO } else { pause };
            piece
                .chunks(CHUNK)
                .enumerate()
                .map(move |(chunk, bytes)| (if chunk == 0 { wait } else { Duration::ZERO }, bytes.to_vec()))
        })
        .chain([(Duration::ZERO, Vec::new())])
        .collect();
    let (mut window, mut last) = (WINDOW, Instant::now());
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut frames = FrameReader::default();
    let mut buffer = vec![0; CHUNK];
    loop {
        let due = queue.front().filter(|(_, bytes)| bytes.len() <= window).map(|(wait, _)| last + *wait);
        tokio::select! {
            () = async { if let Some(due) = due { sleep_until(due).await } }, if due.is_some() => {
                let Some((_, payload)) = queue.pop_front() else { continue };
                window -= payload.len();
                last = Instant::now();
                let frame = Frame { kind: FrameKind::Stdin, payload }.encode();
                let frame = frame.map_err(|error| Failure::Conversation(error.to_string()))?;
                // The command may have ended without reading; its end says so.
                if sending.write_all(&frame).await.is_err() || sending.flush().await.is_err() {
                    queue.clear();
                }
            }
            read_bytes = receiving.read(&mut buffer) => {
                let length = read_bytes.map_err(broke)?;
                if length == 0 {
                    return Err(Failure::Conversation("the daemon hung up before the command's end was known".to_owned()));
                }
                frames.push(buffer.get(..length).unwrap_or_default());
            }
        }
        while let Some(frame) = frames.next_frame().map_err(|error| Failure::Conversation(error.to_string()))? {
            match frame.kind {
                FrameKind::Stdout => {
                    let room = most.saturating_sub(stdout.len()).min(frame.payload.len());
                    stdout.extend_from_slice(frame.payload.get(..room).unwrap_or_default());
                }
                FrameKind::Stderr => {
                    stderr.extend_from_slice(&frame.payload);
                    let surplus = stderr.len().saturating_sub(STDERR_TAIL);
                    stderr.drain(..surplus);
                }
                FrameKind::Status => return Ok((read(&frame.payload)?, stdout, stderr)),
                FrameKind::Problem => return Err(Failure::Refused(Box::new(read(&frame.payload)?))),
                FrameKind::Credit => window = (window + credit(&frame.payload)?).min(WINDOW),
                FrameKind::Stdin | FrameKind::Stop => {
                    return Err(Failure::Conversation("the daemon sent a frame that only clients send".to_owned()));
                }
            }
        }
    }
}

/// A temporary workspace with the tool's folder in it. It goes with this value.
struct Workspace(tempfile::TempDir);

impl Workspace {
    fn new(folder: &Path) -> Result<Self, Failure> {
        let place = std::env::temp_dir();
        let made = tempfile::Builder::new().prefix("agentd-check-").tempdir_in(&place);
        let made = Self(made.map_err(|error| Failure::file(&place, error))?);
        copy(folder, &made.path().join(WORKSPACE_FOLDER))?;
        let files = folder.join("check");
        if files.is_dir() {
            copy(&files, made.path())?;
        }
        Ok(made)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Copies a folder with its files, their modes included; other kinds of entries are left out.
fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    if !to.is_dir() {
        std::fs::create_dir(to).map_err(|error| Failure::file(to, error))?;
    }
    for entry in std::fs::read_dir(from).map_err(|error| Failure::file(from, error))? {
        let entry = entry.map_err(|error| Failure::file(from, error))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().map_err(|error| Failure::file(&source, error))?;
        if kind.is_dir() {
            copy(&source, &target)?;
        } else if kind.is_file() {
            std::fs::copy(&source, &target).map_err(|error| Failure::file(&source, error))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_holds_the_tool_and_its_files_and_goes_away() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("check/data")).unwrap();
        std::fs::write(folder.path().join("main.sh"), "#!/bin/sh\n").unwrap();
        std::fs::write(folder.path().join("check/data/a.txt"), "a").unwrap();
        let workspace = Workspace::new(folder.path()).unwrap();
        let path = workspace.path().to_owned();
        assert!(path.join(".tool/main.sh").is_file());
        assert_eq!(std::fs::read_to_string(path.join("data/a.txt")).unwrap(), "a");
        drop(workspace);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn pieces_arrive_in_order_within_the_window() {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let pieces = vec![vec![b'a'; WINDOW], b"b".to_vec()];
        let server = tokio::spawn(async move {
            let (mut receiving, mut sending) = tokio::io::split(theirs);
            let mut frames = FrameReader::default();
            let mut buffer = vec![0; CHUNK];
            let mut stdin = Vec::new();
            loop {
                let length = receiving.read(&mut buffer).await.unwrap();
                frames.push(&buffer[..length]);
                while let Some(frame) = frames.next_frame().unwrap() {
                    assert_eq!(frame.kind, FrameKind::Stdin);
                    if frame.payload.is_empty() {
                        let problem = Frame { kind: FrameKind::Status, payload: b"{}".to_vec() };
                        sending.write_all(&problem.encode().unwrap()).await.unwrap();
                        return stdin;
                    }
                    stdin.extend(frame.payload);
                    if stdin.len() == WINDOW {
                        let credit = Frame { kind: FrameKind::Credit, payload: 1_u32.to_be_bytes().to_vec() };
                        sending.write_all(&credit.encode().unwrap()).await.unwrap();
                    }
                }
            }
        });
        // `{}` is no end of a command: what matters here is what was sent before it.
        assert!(converse(ours, &pieces, Duration::ZERO, 10).await.is_err());
        assert_eq!(server.await.unwrap(), pieces.concat());
    }
}
