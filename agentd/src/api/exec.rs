//! `POST /exec`: one command, its streams carried by the frames of [`toolproto::framing`].
//!
//! ```text
//! client ── stdin, stop ──► incoming ──► pipe ──► command
//! client ◄── stdout, stderr ── outgoing ◄── pipes ◄── command
//! client ◄── credit ─────────┘   then status or problem
//! ```
//!
//! The client may have [`WINDOW`] bytes of stdin under way; each credit gives back what the command has taken. So the
//! daemon can always read, and sees a stop or a hang-up also while the command does not read.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequest, Request, State};
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use rustix::pipe::PipeFlags;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use toolproto::api::{ExecEnd, ExecRequest};
use toolproto::code::Code;
use toolproto::framing::{CHUNK, EXEC_PROTOCOL, Frame, FrameKind, FrameReader, WINDOW};
use toolproto::job::Problem;

use super::Api;
use super::body::JsonBody;
use super::peer::Connection;
use super::problem::Refusal;
use crate::launch::Launch;

/// How long the command's pipes may stay open once its processes are gone.
const DRAIN_TIME: Duration = Duration::from_secs(5);
/// How much of the end of a command's stderr is kept.
const TAIL: usize = 8 << 10;

/// Answers 101 and runs the command on the upgraded connection.
pub(super) async fn exec<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    mut request: Request,
) -> Result<Response, Refusal> {
    let upgrade = request.extensions_mut().remove::<OnUpgrade>().filter(|_| wants_upgrade(request.headers()));
    let JsonBody(command) = JsonBody::<ExecRequest>::from_request(request, &api).await?;
    let upgrade = upgrade.ok_or_else(|| {
        Refusal::new(Code::InputInvalid, format!("exec needs `Connection: Upgrade` and `Upgrade: {EXEC_PROTOCOL}`"))
    })?;
    let socket = connection.socket()?;
    tokio::spawn(async move {
        match upgrade.await {
            Ok(upgraded) => converse(&api, &connection, socket, command, upgraded).await,
            Err(error) => tracing::info!(%error, "the client hung up before its command began"),
        }
    });
    let headers = [(CONNECTION, "Upgrade"), (UPGRADE, EXEC_PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

fn wants_upgrade(headers: &HeaderMap) -> bool {
    headers
        .get(UPGRADE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.split(',').any(|name| name.trim().eq_ignore_ascii_case(EXEC_PROTOCOL)))
}

/// The command's three pipes: the ends that it gets and the ends that stay here.
struct Pipes {
    theirs: [OwnedFd; 3],
    stdin: pipe::Sender,
    stdout: pipe::Receiver,
    stderr: pipe::Receiver,
}

impl Pipes {
    fn open() -> io::Result<Self> {
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC);
        let ((stdin, feed), (out, stdout), (err, stderr)) = (pipe()?, pipe()?, pipe()?);
        Ok(Self {
            theirs: [stdin, stdout, stderr],
            stdin: pipe::Sender::from_owned_fd(feed)?,
            stdout: pipe::Receiver::from_owned_fd(out)?,
            stderr: pipe::Receiver::from_owned_fd(err)?,
        })
    }
}

async fn converse<L: Launch>(
    api: &Api<L>,
    connection: &Connection,
    socket: OwnedFd,
    command: ExecRequest,
    upgraded: Upgraded,
) {
    let (receiving, sending) = tokio::io::split(TokioIo::new(upgraded));
    let (frames, queue) = mpsc::channel(8);
    let writer = tokio::spawn(write_frames(sending, queue));
    let last = match Pipes::open() {
        Ok(pipes) => run(api, connection, socket, command, pipes, receiving, &frames).await,
        Err(error) => Err(Problem::new(Code::Overloaded, format!("no pipes for the command: {error}"))),
    };
    let last = match &last {
        Ok(end) => json_frame(FrameKind::Status, end),
        Err(problem) => json_frame(FrameKind::Problem, problem),
    };
    // A client that is gone needs no last word.
    drop(frames.send(last).await);
    drop(frames);
    drop(writer.await);
}

async fn run<L: Launch>(
    api: &Api<L>,
    connection: &Connection,
    socket: OwnedFd,
    command: ExecRequest,
    pipes: Pipes,
    receiving: impl AsyncRead + Unpin + Send + 'static,
    frames: &mpsc::Sender<Frame>,
) -> Result<ExecEnd, Problem> {
    let cancel = CancellationToken::new();
    let (stdin, stdin_queue) = mpsc::unbounded_channel();
    let window = Arc::new(Semaphore::new(WINDOW));
    let incoming = tokio::spawn(read_frames(receiving, stdin, Arc::clone(&window), cancel.clone()));
    let feeding = tokio::spawn(feed(pipes.stdin, stdin_queue, window, frames.clone()));
    let (tell, said) = oneshot::channel();
    let stdout = tokio::spawn(copy(pipes.stdout, FrameKind::Stdout, frames.clone()));
    let stderr = copy(pipes.stderr, FrameKind::Stderr, frames.clone());
    let stderr = tokio::spawn(async move { drop(tell.send(stderr.await.0)) });
    let end = api.dispatcher.exec(connection.caller(), socket, command, pipes.theirs, said, cancel).await;
    feeding.abort();
    incoming.abort();
    let drained = async { drop((stdout.await, stderr.await)) };
    if tokio::time::timeout(DRAIN_TIME, drained).await.is_err() {
        tracing::warn!("a command's output stayed open after its end");
    }
    end
}

/// Passes on what the client sends. Its hanging up, and anything but the protocol, ends the command.
async fn read_frames(
    mut receiving: impl AsyncRead + Unpin,
    stdin: mpsc::UnboundedSender<Vec<u8>>,
    window: Arc<Semaphore>,
    cancel: CancellationToken,
) {
    let _hung_up = cancel.clone().drop_guard();
    let mut frames = FrameReader::default();
    let mut buffer = vec![0; CHUNK];
    loop {
        loop {
            match frames.next_frame() {
                Ok(Some(Frame { kind: FrameKind::Stdin, payload })) => {
                    let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
                    let Ok(permits) = window.try_acquire_many(size) else { return };
                    permits.forget();
                    // The feeding task has gone when the command takes no more.
                    drop(stdin.send(payload));
                }
                Ok(Some(Frame { kind: FrameKind::Stop, .. })) => cancel.cancel(),
                Ok(Some(_)) | Err(_) => return,
                Ok(None) => break,
            }
        }
        match receiving.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(read) => frames.push(buffer.get(..read).unwrap_or_default()),
        }
    }
}

/// Writes stdin into the command's pipe and gives credit for what it took; an empty piece closes the pipe.
async fn feed(
    mut pipe: pipe::Sender,
    mut queue: mpsc::UnboundedReceiver<Vec<u8>>,
    window: Arc<Semaphore>,
    frames: mpsc::Sender<Frame>,
) {
    while let Some(piece) = queue.recv().await {
        if piece.is_empty() || pipe.write_all(&piece).await.is_err() {
            return;
        }
        window.add_permits(piece.len());
        let taken = u32::try_from(piece.len()).unwrap_or(u32::MAX);
        if frames.send(Frame { kind: FrameKind::Credit, payload: taken.to_be_bytes().to_vec() }).await.is_err() {
            return;
        }
    }
}

/// The end of what a command wrote.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    fn push(&mut self, piece: &[u8]) {
        self.0.extend_from_slice(piece);
        let excess = self.0.len().saturating_sub(TAIL);
        self.0.drain(..excess);
    }
}

/// Sends what the command writes, piece by piece, and yields the end of it. A client that does not read holds the command up,
/// as a pipe would.
async fn copy(mut pipe: pipe::Receiver, kind: FrameKind, frames: mpsc::Sender<Frame>) -> Tail {
    let (mut tail, mut buffer) = (Tail::default(), vec![0; CHUNK]);
    loop {
        match pipe.read(&mut buffer).await {
            Ok(0) | Err(_) => return tail,
            Ok(read) => {
                let piece = buffer.get(..read).unwrap_or_default();
                tail.push(piece);
                if frames.send(Frame { kind, payload: piece.to_vec() }).await.is_err() {
                    return tail;
                }
            }
        }
    }
}

async fn write_frames(mut sending: impl AsyncWrite + Unpin, mut queue: mpsc::Receiver<Frame>) {
    while let Some(frame) = queue.recv().await {
        let written = async {
            sending.write_all(&frame.encode().map_err(io::Error::other)?).await?;
            sending.flush().await
        };
        if written.await.is_err() {
            return;
        }
    }
    drop(sending.shutdown().await);
}

fn json_frame(kind: FrameKind, value: &impl Serialize) -> Frame {
    // Both bodies are plain data and always have a JSON form; an empty payload would be refused by the client.
    Frame { kind, payload: serde_json::to_vec(value).unwrap_or_default() }
}
