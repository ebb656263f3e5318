//! The launcher's loop: one poll over agentd's channel, signals, agentd's pidfd, the workers and the calls.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::Signal;
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};

use super::account::AccessTable;
use super::calls::Call;
use super::daemon::{Daemon, DaemonEnd};
use super::grants::{Grant, Sharing};
use super::key::ReceiptKey;
use super::recovery::{self, Undecided};
use super::secrets::Secrets;
use super::socket::ApiSocket;
use super::staging_place::StagingPlaces;
use super::state_dir::StateDir;
use super::uids::UidPool;
use super::warm::Waiting;
use crate::catalog::Catalog;
use crate::cgroup::{Leaf, Slice, Tree};
use crate::config::Config;
use crate::frames::{self, Frames};
use crate::host::{Host, Mechanism};
use crate::launch::{Remains, Running};
use crate::listings::Listings;
use crate::netns::bare::{Bare, Bares};
use crate::protocol::channel::{QueuedChannel, ReceiveError, Received, SendError};
use crate::protocol::{FromLauncher, ToLauncher};

mod admission;
mod committing;
mod conversation;
mod ending;
mod launching;
mod noting;
mod probing;
mod rolling;
mod warming;
mod withdrawing;

/// The signals that the loop reads.
pub const SIGNALS: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The most messages that are taken from the channel in one turn, so that agentd cannot starve the calls.
const MESSAGES_PER_TURN: usize = 64;
/// How long nobody has asked for anything when networks are made ahead.
const QUIET: Duration = Duration::from_millis(5);
/// How long the sandboxes are waited for at the end.
const FAREWELL: Duration = Duration::from_millis(800);
/// How often what is stuck in the kernel is looked at.
const STUCK_LOOK: Duration = Duration::from_secs(1);

/// The loop cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The kernel refused to poll.
    #[error("failed to wait for events")]
    Poll(#[source] Errno),
}

/// What the launcher has set up.
#[derive(Debug)]
pub struct Parts {
    /// The configuration directory.
    pub config_dir: PathBuf,
    /// The configuration.
    pub config: Config,
    /// Directories of the host that policies look into.
    pub listings: Listings,
    /// Tools, runtimes, policies.
    pub catalog: Catalog,
    /// What tools are given and nobody else.
    pub secrets: Secrets,
    /// Who may use what.
    pub access: AccessTable,
    /// What the host can enforce.
    pub host: Host,
    /// Where cgroups are made.
    pub tree: Option<Tree>,
    /// The state directory.
    pub state: StateDir,
    /// What signs receipts.
    pub key: ReceiptKey,
    /// agentd's socket.
    pub socket: ApiSocket,
    /// Where signals are read.
    pub signals: OwnedFd,
    /// The channel to agentd.
    pub channel: QueuedChannel,
    /// agentd.
    pub daemon: Daemon,
}

/// The launcher at work.
#[derive(Debug)]
pub struct Service {
    parts: Parts,
    uids: UidPool,
    places: StagingPlaces,
    grants: BTreeMap<JobId, Grant>,
    calls: BTreeMap<CallId, Call>,
    /// What was started ahead.
    waiting: Waiting,
    /// Networks that were made ahead.
    networks: Bares,
    /// Parts of roots that sandboxes have left to others.
    frames: Frames,
    /// When something was last asked or heard.
    quiet_since: Instant,
    /// The cgroup of runtimes' probes, while there is one.
    probes: Option<Slice>,
    /// Sandboxes that the kernel does not let go, with their uids.
    stuck: Vec<(Running, Option<u32>)>,
    /// What sandboxes of jobs have left that is cleared away once agentd waits for nothing of theirs.
    remains: Vec<(JobId, Remains)>,
    /// Cgroups that could not be removed yet.
    leaves: Vec<Leaf>,
    /// Commits of an earlier run that agentd is asked about.
    undecided: BTreeMap<CallId, Undecided>,
    /// The channel is of no use any more.
    is_cut_off: bool,
    /// agentd was told to stop, so that it may close the channel.
    is_stopping: bool,
}

/// Whose descriptor is ready.
#[derive(Clone, Copy, Debug)]
enum Source {
    Channel,
    Signals,
    Daemon,
    Worker(JobId),
    Call(CallId),
    Waiting,
    Mounts,
}

impl Service {
    /// Takes over what was set up.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self {
            uids: UidPool::new(parts.config.uids),
            places: StagingPlaces::open(&parts.state, &parts.config.workspace),
            parts,
            grants: BTreeMap::new(),
            calls: BTreeMap::new(),
            waiting: Waiting::default(),
            networks: Bares::default(),
            frames: Frames::watching_mounts(),
            quiet_since: Instant::now(),
            probes: None,
            stuck: Vec::new(),
            remains: Vec::new(),
            leaves: Vec::new(),
            undecided: BTreeMap::new(),
            is_cut_off: false,
            is_stopping: false,
        }
    }

    /// Serves agentd until it has gone, then ends everything that it had running.
    ///
    /// # Errors
    /// When the kernel refuses to poll.
    pub fn run(mut self) -> Result<DaemonEnd, ServiceError> {
        self.tell_secrets();
        self.undecided = recovery::look(&self.places).into_iter().map(|left| (left.call, left)).collect();
        let undecided = self.undecided.values().map(|left| (left.job, left.call)).collect();
        self.tell(&FromLauncher::Leftovers { undecided }, Vec::new());
        let end = loop {
            for source in self.wait()? {
                if matches!(source, Source::Channel | Source::Worker(_) | Source::Call(_)) {
                    self.quiet_since = Instant::now();
                }
                match source {
                    Source::Channel => self.take_messages(),
                    Source::Signals => self.take_signals(),
                    Source::Worker(job) => self.take_answers(job),
                    Source::Call(call) => self.look_at_call(call),
                    Source::Mounts => self.frames.mounts_changed(),
                    // What was started ahead is looked at with all that is due.
                    Source::Daemon | Source::Waiting => {}
                }
            }
            self.take_what_is_due();
            if let Err(error) = self.parts.channel.flush() {
                self.cut_off(&error);
            }
            if let Some(end) = self.parts.daemon.reap() {
                break end;
            }
        };
        self.farewell(end);
        Ok(end)
    }

    /// Waits for the next thing to do.
    fn wait(&self) -> Result<Vec<Source>, ServiceError> {
        let now = Instant::now();
        // The kernel tells of each change of the mounts once: it is heard before anything is started.
        let (mut sources, mut descriptors): (Vec<_>, Vec<_>) = self
            .frames
            .mounts()
            .map(|mounts| (Source::Mounts, PollFd::from_borrowed_fd(mounts, frames::CHANGED)))
            .into_iter()
            .unzip();
        sources.extend([Source::Signals, Source::Daemon]);
        descriptors.extend([
            PollFd::new(&self.parts.signals, PollFlags::IN),
            PollFd::from_borrowed_fd(self.parts.daemon.pidfd(), PollFlags::IN),
        ]);
        if !self.is_cut_off {
            let writing = if self.parts.channel.has_queued() { PollFlags::OUT } else { PollFlags::empty() };
            sources.push(Source::Channel);
            descriptors.push(PollFd::new(&self.parts.channel, PollFlags::IN | writing));
        }
        let mut add = |source, fd| {
            sources.push(source);
            descriptors.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        };
        for grant in self.grants.values() {
            if let Some(worker) = grant.workspace.as_ref().and_then(|workspace| workspace.worker.as_ref()) {
                add(Source::Worker(grant.job), worker.fd());
            }
        }
        for call in self.calls.values() {
            call.descriptors().into_iter().for_each(|fd: BorrowedFd<'_>| add(Source::Call(call.id), fd));
        }
        self.waiting.descriptors().for_each(|fd| add(Source::Waiting, fd));
        let left = self.next_due(now).map(|due| due.saturating_duration_since(now));
        // A nanosecond early is a turn for nothing; a nanosecond late is not noticed.
        let left = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(&mut descriptors, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(ServiceError::Poll(error)),
        }
        let ready = descriptors.iter().zip(sources).filter(|(descriptor, _)| !descriptor.revents().is_empty());
        let mut ready: Vec<_> = ready.map(|(_, source)| source).collect();
        ready.dedup_by(|one, other| matches!((one, other), (Source::Call(one), Source::Call(other)) if one == other));
        Ok(ready)
    }

    fn next_due(&self, now: Instant) -> Option<Instant> {
        let calls = self.calls.values().filter_map(|call| call.wake(now));
        let workers = self.grants.values().filter_map(|grant| grant.workspace.as_ref()?.due());
        let waiting = self.grants.values().filter_map(|grant| grant.workspace.as_ref()?.ask_again);
        let stuck = (!self.stuck.is_empty() || !self.leaves.is_empty()).then(|| now + STUCK_LOOK);
        let ahead = self.waiting.due(now, self.parts.config.timeouts.warm);
        let postponed = self.waiting.postponed_until(self.is_at_work(), now);
        let network = self.makes_networks(now).then_some(self.quiet_since + QUIET);
        let frame = self.frames.due();
        let kept = [postponed, network, frame].into_iter().flatten();
        calls.chain(workers).chain(waiting).chain(ahead).chain(kept).chain(stuck).min()
    }

    /// Whether networks are made ahead, once there is time.
    fn makes_networks(&self, now: Instant) -> bool {
        self.networks.is_short(now) && !self.is_cut_off && self.parts.host.has(Mechanism::NetNamespace)
    }

    fn take_what_is_due(&mut self) {
        let now = Instant::now();
        self.ask_again(now);
        let calls: Vec<_> = self
            .calls
            .values()
            .filter(|call| call.wake(now).is_some_and(|due| due <= now))
            .map(|call| call.id)
            .collect();
        calls.into_iter().for_each(|call| self.look_at_call(call));
        let late: Vec<_> = self
            .grants
            .values()
            .filter(|grant| {
                grant.workspace.as_ref().and_then(|workspace| workspace.due()).is_some_and(|due| due <= now)
            })
            .map(|grant| grant.job)
            .collect();
        for job in late {
            let message = "the workspace's worker does not answer: its user stopped it, or the file system hangs";
            self.lose_worker(job, Code::WorkspaceUnavailable, message);
        }
        self.look_at_waiting(now);
        self.follow_postponed(now);
        if self.quiet_since + QUIET <= now && self.makes_networks(now) {
            self.networks.add(Bare::make(), now);
        }
        self.frames.let_rested_go(now);
        for (mut running, uid) in std::mem::take(&mut self.stuck) {
            running.reap();
            if running.is_gone() {
                self.clear(running.into_remains());
                uid.into_iter().for_each(|uid| self.uids.give_back(uid));
            } else {
                self.stuck.push((running, uid));
            }
        }
        self.leaves.retain(|leaf| leaf.remove().is_err());
    }

    fn take_signals(&mut self) {
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        while let Ok(length) = rustix::io::read(&self.parts.signals, &mut record) {
            let number = record.first_chunk().map_or(0, |number| u32::from_ne_bytes(*number));
            if length != record.len() {
                return;
            }
            match i32::try_from(number) {
                // The daemon reads more files than the launcher, and asks for `Reload` when all are right.
                Ok(libc::SIGHUP) => self.parts.daemon.signal(Signal::HUP),
                Ok(libc::SIGINT) => self.stop_daemon(Signal::INT),
                _ => self.stop_daemon(Signal::TERM),
            }
        }
    }

    fn stop_daemon(&mut self, signal: Signal) {
        self.is_stopping = true;
        self.parts.daemon.signal(signal);
    }

    /// Reads the configuration again, and takes it whole. What is wrong is logged and told, and everything stays as it was.
    fn reload(&mut self) -> Result<(), String> {
        let refused = |reason: String| {
            tracing::error!(reason, "the configuration is not reloaded");
            reason
        };
        let (config, catalog) = super::load(&self.parts.config_dir)
            .map_err(|errors| refused(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")))?;
        let access = AccessTable::look_up(&config.access)
            .map_err(|error| refused(format!("the account database cannot be asked: {error}")))?;
        self.uids.set_range(config.uids);
        tracing::info!(tools = catalog.tools.len(), policies = catalog.policies.len(), "configuration reloaded");
        // What was started ahead knows the tools, policies and secrets of before.
        self.waiting.end_all(Instant::now());
        self.frames.let_go();
        self.parts.secrets = Secrets::read(&catalog, &config.paths.secrets);
        self.parts.access = access;
        self.parts.config = config;
        self.parts.catalog = catalog;
        self.tell_secrets();
        Ok(())
    }

    fn tell_secrets(&mut self) {
        let known = self.parts.secrets.known();
        self.tell(&FromLauncher::Secrets { known }, Vec::new());
    }

    fn take_messages(&mut self) {
        for _ in 0..MESSAGES_PER_TURN {
            if self.is_cut_off {
                return;
            }
            match self.parts.channel.receive::<ToLauncher>() {
                Ok(Received::Message(message, descriptors)) => self.take_message(message, descriptors),
                Ok(Received::Nothing) => return,
                Ok(Received::Closed) => {
                    // agentd is ending, or has closed the channel on purpose; without it no call has an owner.
                    self.cut_off(&SendError::Closed);
                    return;
                }
                Err(ReceiveError::Malformed(reason)) => {
                    self.tell(&FromLauncher::Misuse { message: reason, job: None, call: None }, Vec::new());
                }
                Err(ReceiveError::Io(error)) => {
                    self.cut_off(&SendError::Io { call: "recvmsg", source: error });
                    return;
                }
            }
        }
    }

    fn tell(&mut self, message: &FromLauncher, descriptors: Vec<OwnedFd>) {
        if let Err(error) = self.parts.channel.send(message, descriptors) {
            self.cut_off(&error);
        }
    }

    /// Without a channel nobody can say what becomes of the calls: all are killed, and agentd is ended.
    fn cut_off(&mut self, why: &dyn std::error::Error) {
        if !self.is_cut_off {
            self.is_cut_off = true;
            if self.is_stopping {
                tracing::info!("agentd has closed its channel");
            } else {
                tracing::error!(reason = %why, "the channel to agentd is lost; every call is ended");
            }
            self.calls.values().for_each(Call::kill);
            self.waiting.end_all(Instant::now());
            self.parts.daemon.signal(Signal::TERM);
        }
    }

    /// Ends everything that agentd had running.
    fn farewell(mut self, end: DaemonEnd) {
        match end {
            DaemonEnd::Exited(0) => tracing::info!("agentd has ended"),
            DaemonEnd::Exited(status) => {
                tracing::error!(status, calls = self.calls.len(), "agentd has ended with a failure")
            }
            DaemonEnd::Signalled(signal) => {
                tracing::error!(signal, calls = self.calls.len(), "agentd was killed; all its calls are killed");
            }
        }
        self.is_cut_off = true;
        self.calls.values_mut().for_each(Call::stop);
        self.calls.values().for_each(Call::kill);
        self.waiting.end_all(Instant::now());
        let until = Instant::now() + FAREWELL;
        let is_over = |service: &Self| !service.waiting.is_ending() && service.calls.values().all(Call::is_over);
        while !is_over(&self) && Instant::now() < until {
            let ids: Vec<_> = self.calls.keys().copied().collect();
            ids.into_iter().for_each(|call| self.look_at_call(call));
            self.calls.values().for_each(Call::kill);
            self.look_at_waiting(Instant::now());
            let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 });
        }
        self.calls.clear();
        for (_, remains) in std::mem::take(&mut self.remains) {
            self.clear(remains);
        }
        self.waiting.remove_idle_slices(|_| false);
        self.remove_idle_probes();
        let undo_bytes = self.parts.config.workspace.undo_bytes.0;
        std::mem::take(&mut self.grants).into_values().for_each(|grant| grant.dismantle(Sharing::Alone, undo_bytes));
        self.parts.socket.remove();
        if let Some(tree) = self.parts.tree.take()
            && let Err(error) = tree.remove()
        {
            tracing::warn!(%error, "cgroups stay until the next start");
        }
    }

    fn misuse(&mut self, message: impl Into<String>, job: Option<JobId>, call: Option<CallId>) {
        let message = message.into();
        tracing::warn!(message, ?job, ?call, "agentd sent what cannot be followed");
        self.tell(&FromLauncher::Misuse { message, job, call }, Vec::new());
    }
}

/// Opens nothing, for descriptors that a message must carry.
fn empty_file() -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create("agentd-empty", rustix::fs::MemfdFlags::CLOEXEC)?)
}
