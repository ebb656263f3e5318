//! The daemon's end of the launcher's protocol.
//!
//! ```text
//!   tasks ──────────────── outbox ─────────────► launcher
//!     ▲                                             │
//!     └── oneshot per question ◄──── reader ◄───────┘
//! ```
//!
//! Tasks send by themselves; the reader is a task, too. Each question leaves a sender under the key of its answer; when the
//! channel closes, all senders are dropped and every waiting task sees [`LinkError::Closed`].

mod outbox;
mod questions;
mod reader;
mod stdio;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandbox::protocol::channel::QueuedChannel;
use sandbox::protocol::{
    Application, Drafted, FromLauncher, Narrowing, Program, SliceLimits, ToLauncher, WorkspaceChoice,
};
use tokio::net::UnixDatagram;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::{Claims, Signature, SignedEvidence};

use self::outbox::Outbox;
use self::questions::{Answer, Expected, Key, Pending, Told};
use self::stdio::{Gate, captured, feed_stdin, is_short, pipe};
use crate::egress::Egress;
use crate::launch::{Admission, Ended, Keep, Launch, LinkError, Order, Rejection, Settled, Stdin};
use crate::progress;
use crate::redaction::Redactor;

/// The launcher behind a channel.
#[derive(Debug)]
pub struct LauncherLink {
    outbox: Outbox,
    pending: Arc<Pending>,
    closed: CancellationToken,
    leftovers: Mutex<Option<oneshot::Receiver<Answer>>>,
    redactor: Redactor,
}

impl LauncherLink {
    /// Starts the reader over the inherited end of the channel. Calls with listed hosts are let out by `egress`.
    ///
    /// # Errors
    /// When the channel cannot be watched, or no descriptor is left.
    ///
    /// # Panics
    /// Outside a runtime.
    pub fn start(socket: OwnedFd, egress: Egress) -> io::Result<Self> {
        let outbox = Outbox::new(socket.try_clone()?);
        // tokio has no sockets of this kind; all that is asked of it is when there is something to read.
        let readiness = std::os::unix::net::UnixDatagram::from(socket.try_clone()?);
        readiness.set_nonblocking(true)?;
        let readiness = UnixDatagram::from_std(readiness)?;
        let channel = QueuedChannel::new(socket);
        let pending = Arc::new(Pending::open());
        // Said without being asked, first of all.
        let (sender, leftovers) = oneshot::channel();
        pending.insert(Key::Leftovers, sender).map_err(io::Error::other)?;
        let closed = CancellationToken::new();
        let redactor = Redactor::default();
        let reader = (Arc::clone(&pending), closed.clone(), redactor.clone());
        tokio::spawn(async move {
            reader::read_all((&channel, &readiness), &reader.0, &reader.2, &egress).await;
            egress.end_all();
            reader.0.close();
            reader.1.cancel();
        });
        Ok(Self { outbox, pending, closed, leftovers: Mutex::new(Some(leftovers)), redactor })
    }

    /// The commits that an earlier run prepared and nobody has decided, each call with its job. To be taken once.
    ///
    /// # Errors
    /// When the launcher is gone.
    pub async fn leftovers(&self) -> Result<Vec<(JobId, CallId)>, LinkError> {
        let told = self.leftovers.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(told) = told else { return Ok(Vec::new()) };
        match told.await.map_err(|_| LinkError::Closed)??.message {
            FromLauncher::Leftovers { undecided } => Ok(undecided),
            other => Err(unexpected(&other)),
        }
    }

    /// Decides one of the leftovers. Yields what became of it.
    ///
    /// # Errors
    /// When the launcher cannot be spoken with.
    pub async fn decide(&self, call: CallId, stored: bool) -> Result<Application, LinkError> {
        let message = ToLauncher::Decide { call, stored };
        applied(self.ask(message, Vec::new(), Key::Application(call)).await?.message)
    }

    /// Has the launcher read its files again. Yields why it does not take them, if it does not.
    ///
    /// # Errors
    /// When the launcher cannot be spoken with.
    pub async fn reload(&self) -> Result<Option<String>, LinkError> {
        match self.ask(ToLauncher::Reload, Vec::new(), Key::Reload).await?.message {
            FromLauncher::Reloaded { refused } => Ok(refused),
            other => Err(unexpected(&other)),
        }
    }

    /// Resolves once the launcher is gone: the daemon cannot go on then.
    pub fn closed(&self) -> impl Future<Output = ()> + Send + use<> {
        self.closed.clone().cancelled_owned()
    }

    async fn ask(&self, message: ToLauncher, descriptors: Vec<OwnedFd>, key: Key) -> Answer {
        let (sender, answer) = oneshot::channel();
        self.pending.insert(key, sender)?;
        self.outbox.send(&message, descriptors).inspect_err(|_| self.pending.forget(key))?;
        answer.await.map_err(|_| LinkError::Closed)?
    }

    /// What a call that is over has left, without the values of secrets.
    async fn ended(&self, told: Told) -> Result<Ended, LinkError> {
        let Told { message, descriptors, network } = told;
        let FromLauncher::Ended { outcome, failure, stdout_overflowed, mut usage, mut denied, .. } = message else {
            return Err(unexpected(&message));
        };
        let files: Vec<File> = descriptors.into_iter().map(File::from).collect();
        // Captured output lies in memory.
        let captured = if is_short(&files) {
            captured(files)
        } else {
            let reading = tokio::task::spawn_blocking(move || captured(files));
            reading.await.map_err(|error| LinkError::Exchange(error.to_string()))?
        };
        let (stdout, stderr_tail) =
            captured.map_err(|error| LinkError::Exchange(format!("the call's output could not be read: {error}")))?;
        let (stdout, stderr_tail) = (self.redactor.bytes(stdout), self.redactor.text(stderr_tail));
        let network = match network {
            Some(network) => {
                let mut claims =
                    network.await.map_err(|_| LinkError::Exchange("a call's network is lost".to_owned()))?;
                // A name that was asked for is text that leaves the call.
                for denial in &mut claims.denied {
                    denial.detail = self.redactor.text(std::mem::take(&mut denial.detail));
                    denial.rule = self.redactor.text(std::mem::take(&mut denial.rule));
                }
                Some(claims)
            }
            None => None,
        };
        if let Some(network) = &network {
            usage.net_sent = Some(network.sent);
            usage.net_received = Some(network.received);
            denied.extend(network.denied.iter().cloned());
        }
        Ok(Ended { outcome, failure, stdout, stdout_overflowed, stderr_tail, usage, denied, network })
    }
}

impl Launch for LauncherLink {
    async fn admit(
        &self,
        job: JobId,
        client: OwnedFd,
        workspace: WorkspaceChoice,
        agent: Option<Digest>,
        limits: SliceLimits,
    ) -> Result<Result<Admission, Rejection>, LinkError> {
        let message = ToLauncher::Admit { job, workspace, agent, limits };
        admission(self.ask(message, vec![client], Key::Admission(job)).await?.message)
    }

    async fn readmit(
        &self,
        job: JobId,
        receipts: u64,
        dangling: Vec<CallId>,
    ) -> Result<Result<Admission, Rejection>, LinkError> {
        let message = ToLauncher::Readmit { job, receipts, dangling };
        admission(self.ask(message, Vec::new(), Key::Admission(job)).await?.message)
    }

    fn warm(&self, job: JobId, tool: String, narrow: Narrowing) -> Result<(), LinkError> {
        self.outbox.send(&ToLauncher::Warm { job, tool, narrow }, Vec::new())
    }

    async fn probe(&self, runtime: String, time: Duration) -> Result<Ended, LinkError> {
        let call = CallId::generate();
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let stop = StopOnDrop { outbox: &self.outbox, call, armed: true };
        let told = self.ask(ToLauncher::Probe { call, runtime, time_ms }, Vec::new(), Key::End(call)).await;
        stop.disarm();
        self.ended(told?).await
    }

    async fn launch(&self, order: Order, cancel: CancellationToken) -> Result<Ended, LinkError> {
        let Order { job, call, attempt_of, program, stdin, streams, time, narrow, watcher, recorded } = order;
        let (stdin, bytes, feed) = match stdin {
            Stdin::Fd(descriptor) => (descriptor, Arc::default(), None),
            Stdin::Bytes(bytes) => {
                let (read_end, write_end) = pipe()?;
                let bytes: Arc<[u8]> = bytes.into();
                (read_end, Arc::clone(&bytes), Some((write_end, bytes)))
            }
        };
        let mut descriptors = vec![stdin];
        let watcher = watcher.filter(|_| streams.is_none());
        let no_pipe = |error| LinkError::Exchange(format!("no pipe for the call's progress: {error}"));
        let mut reader = match watcher.clone() {
            Some(watcher) => {
                let (reader, writer) = progress::Reader::new(watcher, self.redactor.clone()).map_err(no_pipe)?;
                descriptors.push(writer);
                Some(reader)
            }
            None => None,
        };
        descriptors.extend(streams.into_iter().flat_map(|(stdout, stderr)| [stdout, stderr]));
        let mut gate = if recorded.is_told() { None } else { Some(Gate::new(&mut descriptors)?) };
        let gated = gate.is_some();
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let message = ToLauncher::Launch { job, call, attempt_of, program, time_ms, narrow, gated };

        // A caller that goes away must not leave its call running.
        let stop = StopOnDrop { outbox: &self.outbox, call, armed: true };
        let mut feeder = feed.map(|(pipe, bytes)| AbortOnDrop(tokio::spawn(feed_stdin(pipe, bytes, recorded.clone()))));
        let mut handover = Expected::new(&self.pending, Key::Handover(call))?;
        let ended = self.ask(message, descriptors, Key::End(call));
        tokio::pin!(ended);
        let (mut is_awaiting_handover, mut is_stopping) = (true, false);
        let answer = loop {
            tokio::select! {
                answer = &mut ended => break answer,
                told = &mut handover.answer, if is_awaiting_handover => {
                    is_awaiting_handover = false;
                    let Ok(Ok(Told { descriptors, .. })) = told else { continue };
                    let mut descriptors = descriptors.into_iter();
                    let Some(stdin) = descriptors.next() else { continue };
                    let feeding = feed_stdin(stdin, Arc::clone(&bytes), recorded.clone());
                    feeder = Some(AbortOnDrop(tokio::spawn(feeding)));
                    if let (Some(watcher), Some(pipe)) = (watcher.clone(), descriptors.next()) {
                        let other = progress::Reader::of(pipe, watcher, self.redactor.clone()).map_err(no_pipe)?;
                        reader = Some(other);
                    }
                }
                () = recorded.wait(), if gate.is_some() => gate.take().into_iter().for_each(Gate::open),
                () = cancel.cancelled(), if !is_stopping => {
                    is_stopping = true;
                    stop.stop();
                }
            }
        };
        stop.disarm();
        drop(feeder);
        if let Some(reader) = reader {
            reader.finish().await;
        }
        self.ended(answer?).await
    }

    async fn settle(&self, call: CallId, commit: bool, claims: Claims, receipt: Drafted) -> Result<Settled, LinkError> {
        let message = ToLauncher::Settle { call, commit, claims, receipt: Box::new(receipt) };
        sealed(self.ask(message, Vec::new(), Key::Evidence(call)).await?.message)
    }

    async fn stored(&self, call: CallId) -> Result<Application, LinkError> {
        applied(self.ask(ToLauncher::Stored { call }, Vec::new(), Key::Application(call)).await?.message)
    }

    async fn record(
        &self,
        job: JobId,
        call: CallId,
        program: Program,
        claims: Claims,
    ) -> Result<SignedEvidence, LinkError> {
        let message = ToLauncher::Record { job, call, program, claims };
        Ok(sealed(self.ask(message, Vec::new(), Key::Evidence(call)).await?.message)?.evidence)
    }

    async fn sign(&self, job: JobId, call: Option<CallId>, payload: String) -> Result<Option<Signature>, LinkError> {
        let message = ToLauncher::Sign { call, job, payload };
        match self.ask(message, Vec::new(), Key::Signature(job, call)).await?.message {
            FromLauncher::Signed { signature, .. } => Ok(signature),
            other => Err(unexpected(&other)),
        }
    }

    async fn close(&self, job: JobId, keep: Keep) -> Result<(), LinkError> {
        let keep = keep == Keep::ForLater;
        match self.ask(ToLauncher::Close { job, keep }, Vec::new(), Key::Close(job)).await?.message {
            FromLauncher::Closed { .. } => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}

fn admission(answer: FromLauncher) -> Result<Result<Admission, Rejection>, LinkError> {
    match answer {
        FromLauncher::Admitted { job, uid, workspace, never_started } => {
            Ok(Ok(Admission { job, uid, workspace, never_started }))
        }
        FromLauncher::Rejected { code, message, .. } => Ok(Err(Rejection { code, message })),
        other => Err(unexpected(&other)),
    }
}

/// Sends a `Stop` when the task that waits for a call is dropped.
struct StopOnDrop<'a> {
    outbox: &'a Outbox,
    call: CallId,
    armed: bool,
}

impl StopOnDrop<'_> {
    fn stop(&self) {
        match self.outbox.send(&ToLauncher::Stop { call: self.call }, Vec::new()) {
            // A launcher that has gone has taken the call with it.
            Ok(()) | Err(LinkError::Closed) => {}
            Err(error) => tracing::error!(call = %self.call, %error, "a call runs on until its deadline"),
        }
    }

    fn disarm(mut self) {
        self.armed = false;
    }
}

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.stop();
        }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn sealed(message: FromLauncher) -> Result<Settled, LinkError> {
    match message {
        FromLauncher::Sealed { evidence, kept, receipt, .. } => {
            Ok(Settled { evidence: *evidence, kept, receipt: receipt.map(|receipt| *receipt) })
        }
        other => Err(unexpected(&other)),
    }
}

fn applied(message: FromLauncher) -> Result<Application, LinkError> {
    match message {
        FromLauncher::Applied { application, .. } => Ok(application),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(message: &FromLauncher) -> LinkError {
    LinkError::Misuse(format!("its answer is of another kind: {message:?}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use sandbox::protocol::channel::{Channel, Received, pair};
    use toolproto::code::Code;
    use toolproto::receipt::{Outcome, OutcomeKind, Usage};

    use super::*;
    use crate::launch::Recorded;

    fn ends() -> (LauncherLink, Channel) {
        let (ours, theirs) = pair().unwrap();
        (LauncherLink::start(ours, Egress::new(BTreeMap::new())).unwrap(), Channel::new(theirs))
    }

    fn next(launcher: &Channel) -> (ToLauncher, Vec<OwnedFd>) {
        match launcher.receive().unwrap() {
            Received::Message(message, descriptors) => (message, descriptors),
            other => panic!("{other:?}"),
        }
    }

    fn order(call: CallId, stdin: Vec<u8>) -> Order {
        Order {
            job: JobId::from_u128(1),
            call,
            attempt_of: call,
            program: Program::Tool { name: "t".to_owned() },
            stdin: Stdin::Bytes(stdin),
            streams: None,
            time: Duration::from_secs(5),
            narrow: Narrowing::default(),
            watcher: None,
            recorded: Recorded::default(),
        }
    }

    fn ended(call: CallId, kind: OutcomeKind) -> FromLauncher {
        FromLauncher::Ended {
            call,
            outcome: Outcome { kind, code: None, exit_status: Some(0), signal: None },
            failure: None,
            stdout_overflowed: false,
            usage: Usage::default(),
            denied: Vec::new(),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_call_is_fed_and_its_output_read() {
        let (link, launcher) = ends();
        let call = CallId::from_u128(2);
        let stdin: Vec<u8> = (0..300_000_u32).map(|byte| u8::try_from(byte % 251).unwrap()).collect();
        let expected = stdin.clone();
        let thread = std::thread::spawn(move || {
            let (message, mut descriptors) = next(&launcher);
            assert!(matches!(message, ToLauncher::Launch { time_ms: 5000, .. }), "{message:?}");
            let mut read = Vec::new();
            File::from(descriptors.remove(0)).read_to_end(&mut read).unwrap();
            assert!(read == expected, "stdin arrived with {} bytes", read.len());
            let mut stdout = tempfile::tempfile().unwrap();
            stdout.write_all(b"{\"ok\":true}").unwrap();
            let mut stderr = tempfile::tempfile().unwrap();
            stderr.write_all(&[b'x'; 10_000]).unwrap();
            stderr.write_all(b"the end").unwrap();
            launcher.send(&ended(call, OutcomeKind::Exited), &[stdout.as_fd(), stderr.as_fd()]).unwrap();
            launcher
        });
        let ended = link.launch(order(call, stdin), CancellationToken::new()).await.unwrap();
        assert_eq!(ended.stdout, b"{\"ok\":true}");
        assert_eq!(ended.stderr_tail.len(), 8192);
        assert!(ended.stderr_tail.ends_with("xthe end"));
        drop(thread.join().unwrap());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_call_that_is_served_by_what_was_started_ahead_is_fed_there() {
        let (link, launcher) = ends();
        let call = CallId::from_u128(2);
        let stdin: Vec<u8> = (0..300_000_u32).map(|byte| u8::try_from(byte % 251).unwrap()).collect();
        let expected = stdin.clone();
        let thread = std::thread::spawn(move || {
            // What came with the order is closed unread, as the launcher does it.
            let (message, descriptors) = next(&launcher);
            assert!(matches!(message, ToLauncher::Launch { .. }), "{message:?}");
            let (reader, writer) = std::io::pipe().unwrap();
            launcher.send(&FromLauncher::Handover { call }, &[writer.as_fd()]).unwrap();
            drop((descriptors, writer));
            let mut read = Vec::new();
            File::from(OwnedFd::from(reader)).read_to_end(&mut read).unwrap();
            assert!(read == expected, "stdin arrived with {} bytes", read.len());
            launcher.send(&ended(call, OutcomeKind::Exited), &[]).unwrap();
            launcher
        });
        let ended = link.launch(order(call, stdin), CancellationToken::new()).await.unwrap();
        assert_eq!(ended.outcome.kind, OutcomeKind::Exited);
        drop(thread.join().unwrap());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_request_is_given_only_once_its_call_is_recorded() {
        let (link, launcher) = ends();
        let call = CallId::from_u128(2);
        let recorded = Recorded::later();
        let thread = std::thread::spawn({
            let recorded = recorded.clone();
            move || {
                let (message, mut descriptors) = next(&launcher);
                assert!(matches!(message, ToLauncher::Launch { gated: true, .. }), "{message:?}");
                let (reader, writer) = std::io::pipe().unwrap();
                launcher.send(&FromLauncher::Handover { call }, &[writer.as_fd()]).unwrap();
                drop(writer);
                let gate = descriptors.pop().unwrap();
                let mut ready = [
                    rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN),
                    rustix::event::PollFd::new(&gate, rustix::event::PollFlags::IN),
                ];
                let long = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
                assert_eq!(rustix::event::poll(&mut ready, Some(&long)).unwrap(), 0, "it is told too early");
                recorded.tell();
                let mut opened = Vec::new();
                File::from(gate).read_to_end(&mut opened).unwrap();
                assert_eq!(opened, [1]);
                let mut read = Vec::new();
                File::from(OwnedFd::from(reader)).read_to_end(&mut read).unwrap();
                assert_eq!(read, b"request");
                launcher.send(&ended(call, OutcomeKind::Exited), &[]).unwrap();
                launcher
            }
        });
        let order = Order { recorded, ..order(call, b"request".to_vec()) };
        assert_eq!(link.launch(order, CancellationToken::new()).await.unwrap().outcome.kind, OutcomeKind::Exited);
        drop(thread.join().unwrap());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn cancelled_and_abandoned_calls_are_stopped() {
        let (link, launcher) = ends();
        let call = CallId::from_u128(2);
        let cancel = CancellationToken::new();
        let thread = std::thread::spawn({
            let cancel = cancel.clone();
            move || {
                assert!(matches!(next(&launcher).0, ToLauncher::Launch { .. }));
                cancel.cancel();
                assert_eq!(next(&launcher).0, ToLauncher::Stop { call });
                launcher.send(&ended(call, OutcomeKind::Cancelled), &[]).unwrap();
                launcher
            }
        });
        let ended = link.launch(order(call, Vec::new()), cancel).await.unwrap();
        assert_eq!(ended.outcome.kind, OutcomeKind::Cancelled);
        let launcher = thread.join().unwrap();

        let abandoned = link.launch(order(call, Vec::new()), CancellationToken::new());
        assert!(tokio::time::timeout(Duration::from_millis(20), abandoned).await.is_err());
        assert!(matches!(next(&launcher).0, ToLauncher::Launch { .. }));
        assert_eq!(next(&launcher).0, ToLauncher::Stop { call });
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn refusals_misuse_and_a_dead_launcher_reach_who_asked() {
        let (link, launcher) = ends();
        let job = JobId::from_u128(7);
        let client = || OwnedFd::from(tempfile::tempfile().unwrap());
        let admit = || link.admit(job, client(), WorkspaceChoice::None, None, SliceLimits::default());
        let thread = std::thread::spawn(move || {
            let (message, descriptors) = next(&launcher);
            assert!(matches!(message, ToLauncher::Admit { .. }) && descriptors.len() == 1);
            let code = Code::WorkspaceUnavailable;
            launcher.send(&FromLauncher::Rejected { job, code, message: "no".to_owned() }, &[]).unwrap();
            next(&launcher);
            let misuse = FromLauncher::Misuse { message: "twice".to_owned(), job: Some(job), call: None };
            launcher.send(&misuse, &[]).unwrap();
            next(&launcher);
        });
        assert_eq!(admit().await.unwrap().unwrap_err().code, Code::WorkspaceUnavailable);
        assert!(matches!(admit().await.unwrap_err(), LinkError::Misuse(reason) if reason == "twice"));
        assert!(matches!(admit().await.unwrap_err(), LinkError::Closed));
        thread.join().unwrap();
        link.closed().await;
        assert!(matches!(admit().await.unwrap_err(), LinkError::Closed));
    }
}
