//! The launcher: the privileged half of agentd. One thread, one loop, nothing that waits for anything slow.
//!
//! ```text
//!             ┌──────────── Admit ──► grant ──► worker (as the caller)
//!   agentd ───┤                         │
//!             └──────────── Launch ──► call ──► sandbox
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`service`] | the loop, and what each message does |
//! | [`grants`], [`kept`] | who asks, and what belongs to a job; what of it outlives the launcher |
//! | [`calls`] | one call's state machine |
//! | [`program`], [`secrets`] | what a call would run, from the catalogue; what it may know |
//! | [`capture`] | a tool's stdout and stderr |
//! | [`evidence`], [`key`], [`key_history`] | a job's chain of evidence, what signs it, and what signed before |
//! | [`peer`], [`roots`] | who is behind a socket; whether a directory may be a workspace |
//! | [`history`] | which layers are kept so that calls can be taken back |
//! | [`staging_place`], [`recovery`] | where layers lie, and what an earlier run left there |
//! | [`account`], [`uids`] | accounts and the sandboxes' uids |
//! | [`state_dir`], [`socket`], [`activation`], [`mod@credentials`], [`daemon`] | what is set up at start |
//!
//! Start, in this order: configuration and catalogue are read; the host is probed; the state directory is locked, so that
//! what an earlier run left can be swept; the socket is bound, or taken over from the service manager; agentd is started; and the launcher gives up what it does
//! not need. End: agentd has gone, every sandbox is killed, the socket's file and the cgroups are removed.

pub mod account;
pub mod activation;
pub mod aside;
pub mod calls;
pub mod capture;
pub mod credentials;
pub mod daemon;
pub mod evidence;
pub mod grants;
pub mod history;
pub mod kept;
pub mod key;
pub mod key_history;
pub mod peer;
pub mod program;
pub mod recovery;
pub mod roots;
pub mod secrets;
pub mod service;
pub mod socket;
pub mod staging_place;
pub mod starts;
pub mod state_dir;
pub mod uids;
pub mod warm;

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

use rustix::io::Errno;
use rustix::process::DumpableBehavior;
use toolproto::source::FileError;

use self::account::{AccessTable, Account};
use self::activation::ActivationError;
use self::credentials::{Credentials, CredentialsError};
use self::daemon::{Daemon, DaemonEnd, DaemonError, DaemonStart};
use self::key::{KeyError, ReceiptKey};
use self::secrets::Secrets;
use self::service::{Service, ServiceError};
use self::socket::{ApiSocket, SocketError};
use self::state_dir::{StateDir, StateDirError};
use crate::catalog::Catalog;
use crate::cgroup::Tree;
use crate::config::Config;
use crate::host::{Host, LimitsMode};
use crate::listings::Listings;
use crate::privileges;
use crate::protocol::channel::{QueuedChannel, pair};
use crate::sys::process::{block_signals, signalfd};
use crate::trusted::Owners;

/// How the launcher is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// The configuration directory.
    pub config_dir: PathBuf,
    /// The state directory.
    pub state_dir: PathBuf,
    /// agentd's socket.
    pub socket: PathBuf,
    /// What happens when the host cannot enforce what a policy requires.
    pub limits: LimitsMode,
    /// agentd's executable.
    pub daemon: PathBuf,
}

/// The launcher cannot start, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    /// It was not started as root.
    #[error("agentd-launcher must be started as root; it makes the sandboxes and gives everything else up")]
    NotRoot,
    /// Files of the configuration are wrong.
    #[error("the configuration is not valid:{}", .0.iter().map(|error| format!("\n  {error}")).collect::<String>())]
    Config(Vec<FileError>),
    /// The account database cannot be asked.
    #[error("the account database cannot be asked")]
    Accounts(#[source] nix::Error),
    /// The state directory cannot be used.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// The receipt key cannot be had.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The socket cannot be bound.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The socket that the service manager passed cannot be used.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// The daemon cannot have its credentials.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The daemon cannot be started.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// The kernel refused.
    #[error("failed to {action}")]
    Kernel {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The loop cannot go on.
    #[error(transparent)]
    Service(#[from] ServiceError),
}

/// Runs the launcher until agentd has gone. The process must have one thread.
///
/// # Errors
/// When it cannot start. What happens to agentd later is no error but the exit status.
pub fn run(options: &Options) -> Result<ExitCode, LauncherError> {
    if !rustix::process::geteuid().is_root() {
        return Err(LauncherError::NotRoot);
    }
    let kernel = |action: &'static str| move |source: io::Error| LauncherError::Kernel { action, source };
    let passed = activation::passed()?;
    harden().map_err(|error| kernel("harden its own process")(error.into()))?;
    let config_dir = std::path::absolute(&options.config_dir).map_err(kernel("name the configuration directory"))?;
    let (config, catalog) = load(&config_dir).map_err(LauncherError::Config)?;
    let account = Account::look_up(&config).map_err(LauncherError::Accounts)?;
    let access = AccessTable::look_up(&config.access).map_err(LauncherError::Accounts)?;
    let host = Host::probe(options.limits);
    let state = StateDir::open(&options.state_dir, account)?;
    let key = ReceiptKey::open(&state)?;
    let socket = match passed {
        Some(listener) => ApiSocket::adopt(listener, &options.socket)?,
        None => ApiSocket::bind(&options.socket, account.socket_group)?,
    };
    let credentials = credentials(&catalog, &socket, account)?;
    block_signals().map_err(kernel("block signals"))?;
    let signals = signalfd(&service::SIGNALS).map_err(kernel("watch for signals"))?;
    let (own, theirs) = pair().map_err(|error| kernel("make the channel to agentd")(error.into()))?;
    // The last thing that is made: what fails before leaves no cgroup.
    let tree = sweep(&state);
    let daemon = Daemon::start(&DaemonStart {
        executable: &options.daemon,
        credentials: credentials.as_ref().map(Credentials::path),
        config_dir: &config_dir,
        state_dir: state.path(),
        cgroup_root: tree.as_ref().map(Tree::path),
        account,
        channel: theirs,
        listener: socket.as_fd(),
        key_has_changed: key.has_changed(),
    });
    let (daemon, tree) = match daemon {
        Ok(daemon) => (daemon, tree),
        Err(error) => {
            socket.remove();
            if let Some(Err(error)) = tree.map(Tree::remove) {
                tracing::warn!(%error, "cgroups stay until the next start");
            }
            return Err(error.into());
        }
    };
    privileges::keep_only_the_launchers().map_err(kernel("give up what it does not need"))?;
    tracing::info!(
        socket = %socket.path().display(),
        state_dir = %state.path().display(),
        uid = account.uid,
        tools = catalog.tools.len(),
        extensions = catalog.extensions.len(),
        policies = catalog.policies.len(),
        "agentd is started"
    );
    let channel = QueuedChannel::new(own);
    let service = Service::new(service::Parts {
        listings: Listings::default(),
        secrets: Secrets::read(&catalog, &config.paths.secrets),
        config_dir,
        config,
        catalog,
        access,
        host,
        tree,
        state,
        key,
        socket,
        signals,
        channel,
        daemon,
    });
    let end = service.run()?;
    drop(credentials);
    Ok(match end {
        DaemonEnd::Exited(0) => ExitCode::SUCCESS,
        DaemonEnd::Exited(_) | DaemonEnd::Signalled(_) => ExitCode::FAILURE,
    })
}

/// What the service manager gave, but for the receipt key and what a tool names as its own.
fn credentials(
    catalog: &Catalog,
    socket: &ApiSocket,
    account: Account,
) -> Result<Option<Credentials>, CredentialsError> {
    let Some(given) = std::env::var_os(credentials::VARIABLE) else { return Ok(None) };
    let secrets = catalog.programs().flat_map(|program| program.secrets.iter().map(String::as_str));
    let kept = secrets.chain([key::CREDENTIAL, key::OLD_CREDENTIAL]).collect();
    Credentials::hand_on(given.as_ref(), socket.path(), &kept, account.gid).map(Some)
}

/// Reads agentd.toml and everything that it names, from files that only root can write.
fn load(config_dir: &std::path::Path) -> Result<(Config, Catalog), Vec<FileError>> {
    let file = config_dir.join(crate::config::FILE_NAME);
    let directory = crate::trusted::TrustedDir::open(config_dir, Owners::RootOnly)
        .map_err(|error| vec![error.about(config_dir)])?;
    let text = directory.read(crate::config::FILE_NAME.as_ref()).map_err(|error| vec![error.about(&file)])?;
    let config = Config::parse(&file, &text).map_err(|error| vec![error])?;
    let catalog = Catalog::load(&config, Owners::RootOnly)?;
    for hindrance in catalog.hindrances() {
        tracing::warn!(%hindrance, "calls that need it fail");
    }
    Ok((config, catalog))
}

/// Neither a core file nor another process shall show this one's memory, and nothing that it executes gains privileges.
fn harden() -> Result<(), Errno> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::thread::set_no_new_privs(true)?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    rustix::process::chdir("/")
}

/// Finds the place for cgroups, and removes what an earlier run left there: nobody else can use this state directory now.
/// Mounts and namespaces went with their processes.
fn sweep(state: &StateDir) -> Option<Tree> {
    let tree = match Tree::open(state.path()) {
        Ok(tree) => tree,
        Err(error) => {
            tracing::warn!(%error, "no cgroups: calls are not limited or counted by them");
            return None;
        }
    };
    match tree.sweep() {
        Ok(swept) if swept.is_empty() => {}
        Ok(swept) => tracing::info!(slices = swept.len(), "swept what an earlier run left"),
        Err(error) => tracing::error!(%error, "something of an earlier run cannot be swept"),
    }
    Some(tree)
}
