//! The unprivileged daemon, as the launcher starts it: with its end of the launcher's channel and the listening socket.
//!
//! It ends when it is told to (SIGTERM, SIGINT), or when the launcher is gone.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use jiff::Timestamp;
use rustix::process::{Resource, Rlimit};
use sandbox::config::Config;
use sandbox::launcher::state_dir::AUDIT_DIR;
use sandbox::protocol::{Application, Withdrawal};
use sandbox::sys::inherited;
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use toolproto::receipt::WorkspaceState;

use crate::access::Gate;
use crate::api::server::{self, Bounds};
use crate::api::{self, Api};
use crate::call::Origin;
use crate::dispatcher::{Dispatcher, Settings};
use crate::egress::Egress;
use crate::installation::Installation;
use crate::launcher_link::LauncherLink;
use crate::ledger::Ledger;
use crate::observe::audit::AuditLog;
use crate::observe::slices::Slices;
use crate::observe::{Observer, otlp};
use crate::reload::{self, Source};
use crate::{keys, queue, watchdog};

/// How long running jobs have to come to a stop.
const STOP_TIME: Duration = Duration::from_secs(20);
/// How long the collector has for what it was not sent before the stop.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// What the launcher starts the daemon with.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The channel to the launcher.
    #[arg(long)]
    launcher_fd: RawFd,
    /// The listening socket.
    #[arg(long)]
    listener_fd: RawFd,
    /// The configuration directory.
    #[arg(long)]
    config_dir: PathBuf,
    /// The state directory.
    #[arg(long)]
    state_dir: PathBuf,
    /// The cgroup that the jobs' slices lie below.
    #[arg(long)]
    cgroup_root: Option<PathBuf>,
    /// Receipts are signed by another key than before this start.
    #[arg(long)]
    key_has_changed: bool,
}

/// Runs the daemon to its end, and says why it could not start.
#[must_use]
pub fn run(args: &DaemonArgs) -> ExitCode {
    // The launcher ends what has closed its channel, and may be faster than the reason can be written.
    let mut held = None;
    let ended = inherit(args).and_then(|(channel, listener)| {
        held = Some(channel.try_clone().context("the launcher's channel")?);
        start(args, channel, listener)
    });
    let status = ended.unwrap_or_else(|error| {
        eprintln!("agentd: {error:#}");
        ExitCode::FAILURE
    });
    drop(held);
    status
}

/// Before anything else is opened: the numbers are the launcher's.
fn inherit(args: &DaemonArgs) -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let channel = inherited::take(args.launcher_fd).context("the launcher's channel")?;
    let listener = inherited::take(args.listener_fd).context("the listening socket")?;
    Ok((channel, listener))
}

fn start(args: &DaemonArgs, channel: OwnedFd, listener: OwnedFd) -> anyhow::Result<ExitCode> {
    sandbox::log::start();
    raise_descriptor_limit();
    let source = Source { config_dir: args.config_dir.clone(), records: reload::records(&args.state_dir) };
    let installation = source.installation()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the runtime")?;
    let status = runtime.block_on(serve(&source, installation, channel, listener, args));
    // Whatever still runs on a blocking thread must not hold up the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    status
}

async fn serve(
    source: &Source,
    installation: Installation,
    channel: OwnedFd,
    listener: OwnedFd,
    args: &DaemonArgs,
) -> anyhow::Result<ExitCode> {
    let state_dir = args.state_dir.as_path();
    let started = Timestamp::now();
    let signals = Signals::watch().context("the signals")?;
    let link = LauncherLink::start(channel, Egress::new(installation.config.network.hosts.clone()))
        .context("the launcher's channel")?;
    let launcher_gone = link.closed();
    let listener = listen(listener).context("the listening socket")?;
    let ledger = Ledger::open(&state_dir.join("ledger")).context("the ledger")?;
    settle_leftovers(&link, &ledger).await.context("the commits that an earlier run left")?;
    let gate = Arc::new(Gate::look_up(&installation.config).context("the accounts")?);
    let request_limit = usize::try_from(installation.config.limits.request_bytes.0).unwrap_or(usize::MAX);
    let telemetry = &installation.config.telemetry;
    let exporting = telemetry.otlp_endpoint.as_ref().map(|to| otlp::start(to, &telemetry.service_name)).transpose()?;
    let (spans, exporting) = exporting.unzip();
    let observer = Observer::start(audit_log(&installation.config, state_dir), spans);
    let keys = keys::read(state_dir).context("the receipt key")?;
    if args.key_has_changed {
        keys.change().into_iter().for_each(|change| observer.tell(change));
    }
    let keys = keys.views();
    let origin = origin(keys.first().map(|key| key.key_id.clone())).context("the host's names")?;
    let slices = Slices::below(args.cgroup_root.clone());
    let settings = Settings { limits: limits(&installation.config), observer: observer.clone(), slices };
    let retention = installation.config.retention;
    let catalogue = source.catalogue(installation, Arc::clone(&gate))?;
    let dispatcher = Dispatcher::start(link, ledger, catalogue, origin, settings)
        .await
        .context("the jobs that an earlier agentd left")?;
    dispatcher.keep_tidy(retention);

    let stopping = CancellationToken::new();
    let api =
        Api { dispatcher: dispatcher.clone(), observer, request_limit, keys, started, stopping: stopping.clone() };
    let serving = tokio::spawn(server::serve(listener, api::router(api), gate, Bounds::default(), stopping.clone()));
    // Watched until the end of the end: what does not stop in time is ended by the service manager, too.
    let watched = CancellationToken::new();
    let watchdog =
        watchdog::period().map(|period| tokio::spawn(watchdog::feed(dispatcher.clone(), period, watched.clone())));
    notify(&[NotifyState::Ready]);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "ready");

    let status = tokio::select! {
        signal = signals.until_stop(source, &dispatcher) => {
            tracing::info!(signal, "stopping");
            ExitCode::SUCCESS
        }
        () = launcher_gone => {
            tracing::error!("the launcher is gone; stopping");
            ExitCode::FAILURE
        }
    };
    notify(&[NotifyState::Stopping]);
    stopping.cancel();
    dispatcher.shutdown(STOP_TIME).await;
    serving.await.context("the API's task")?;
    watched.cancel();
    if let Some(watchdog) = watchdog {
        watchdog.await.context("the watchdog's task")?;
    }
    drop(dispatcher);
    if let Some(exporting) = exporting
        && tokio::time::timeout(LAST_SPANS, exporting).await.is_err()
    {
        tracing::info!("the collector did not take the last traces in time");
    }
    tracing::info!("stopped");
    Ok(status)
}

/// What an earlier run prepared goes into the workspace if its receipt was stored, and is thrown away if not. Before any job
/// goes on, since that may use the same workspace.
async fn settle_leftovers(link: &LauncherLink, ledger: &Ledger) -> anyhow::Result<()> {
    for (job, call) in link.leftovers().await? {
        // A receipt that says otherwise than committed, because the launcher lost its worker, is no commit.
        let is_promised = match ledger.receipt(job, call).await? {
            Some(envelope) => {
                matches!(envelope.receipt()?.workspace.state, WorkspaceState::Committed | WorkspaceState::RolledBack)
            }
            None => false,
        };
        // Behind the last receipt may stand the seal.
        let is_withdrawn = ledger
            .receipts(job)
            .await?
            .iter()
            .filter_map(|envelope| envelope.receipt().ok())
            .any(|receipt| receipt.withdraws == Some(call));
        let stored = is_promised && !is_withdrawn;
        match link.decide(call, stored).await? {
            Application::Done => tracing::info!(%job, %call, stored, "a commit of an earlier run is settled"),
            Application::Failed(failure) | Application::Withdrawn(Withdrawal { failure, .. }) => {
                tracing::error!(%job, %call, stored, code = %failure.code, failure.message, "a commit is stuck");
            }
        }
    }
    Ok(())
}

fn limits(config: &Config) -> queue::Limits {
    queue::Limits {
        running: config.limits.running_jobs as usize,
        per_user: config.limits.jobs_per_user as usize,
        waiting: config.limits.queued_jobs as usize,
    }
}

/// The audit log, if it is wanted and can be written. The daemon runs without it otherwise, as it does when it fails later.
fn audit_log(config: &Config, state_dir: &Path) -> Option<AuditLog> {
    let audit = &config.audit;
    if !audit.enabled {
        return None;
    }
    AuditLog::open(&state_dir.join(AUDIT_DIR), audit.max_bytes.0, audit.keep)
        .inspect_err(|error| tracing::error!(%error, "the audit log cannot be opened"))
        .ok()
}

fn origin(key_id: Option<String>) -> io::Result<Origin> {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(Origin { host, boot_id, key_id })
}

fn listen(socket: OwnedFd) -> io::Result<tokio::net::UnixListener> {
    let listener = UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}

/// Each connection takes two descriptors and each call some more; the soft limit of 1024 is for programs that use select.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
}

/// The signals that mean something to agentd. Watched before anybody can know that it runs: one that came earlier would
/// end it as a failure.
struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn watch() -> io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Reloads when asked to, until agentd is asked to stop: by the signal of this name.
    async fn until_stop(mut self, source: &Source, dispatcher: &Dispatcher<LauncherLink>) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                // Another SIGHUP meanwhile is not lost: the stream keeps it.
                _ = self.hangup.recv() => reload::reload(source, dispatcher).await,
            }
        }
    }
}

/// Tells the service manager, if there is one.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager could not be told");
    }
}
