//! `cargo demo`: the example job on a daemon of its own, from nothing to the report.
//!
//! The result JSON goes to stdout; everything else to stderr.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::example::{AGENT, ModelServer, Staged};
use crate::process::{self, Running};
use crate::project::{self, Profile};
use crate::runtimes;

/// How long the daemon may take to answer for the first time.
const START: Duration = Duration::from_secs(30);
/// How much of the daemon's log is shown when something went wrong.
const LOG_LINES: usize = 30;

/// Runs the demo.
pub(crate) fn run() -> Result<()> {
    let start = Instant::now();
    require_root()?;
    runtimes::check_host()?;
    let server = ModelServer::from_environment()?;
    build(Profile::Debug)?;
    let folder = project::target()?.join("demo");
    let workspace = fresh_workspace(&folder)?;
    let staged = Staged::prepare(&folder, server.as_ref())?;
    fs::copy(staged.input(), workspace.join("birdstrikes.csv")).context("putting the records into the workspace")?;

    let log = folder.join("agentd.log");
    let outcome = Daemon::start(&staged, &log, Profile::Debug)
        .and_then(|daemon| show(&daemon, &staged, &workspace, server.as_ref()));
    if outcome.is_err() && process::check_interrupt().is_ok() {
        show_log(&log);
    }
    outcome?;
    eprintln!("\nDone in {:.1} s. The daemon's log: {}", start.elapsed().as_secs_f64(), log.display());
    Ok(())
}

/// Fails, and says what to do, when this program does not run as root.
pub(crate) fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "agentd must start as root, since it makes namespaces, mounts and cgroups, and then gives that up.\n\
             Run this as root, for instance: sudo env PATH=\"$PATH\" cargo demo"
        );
    }
    Ok(())
}

/// Builds the programs.
pub(crate) fn build(profile: Profile) -> Result<()> {
    eprintln!("building agentd, agentd-launcher and agentctl");
    let mut build = project::cargo(["build", "--workspace", "--bins"]);
    if profile == Profile::Release {
        build.arg("--release");
    }
    process::run(&mut build)
}

/// An empty directory for the job to work in. What an earlier run left there goes.
pub(crate) fn fresh_workspace(folder: &Path) -> Result<PathBuf> {
    let workspace = folder.join("work");
    if workspace.exists() {
        fs::remove_dir_all(&workspace).with_context(|| format!("removing {}", workspace.display()))?;
    }
    fs::create_dir_all(&workspace).with_context(|| format!("making {}", workspace.display()))?;
    Ok(workspace)
}

/// Runs the job and shows what it did.
fn show(daemon: &Daemon, staged: &Staged, workspace: &Path, server: Option<&ModelServer>) -> Result<()> {
    match server {
        Some(server) => eprintln!("model: {} at {}", server.model, server.base_url),
        None => eprintln!("model: a recorded conversation (provider `replay`); the tools run for real"),
    }
    let job = json!({"version": 1, "agent": AGENT, "goal": staged.goal()?, "workspace": workspace});
    let file = staged.path("job.json");
    fs::write(&file, job.to_string())?;
    eprintln!("\n$ agentctl submit job.json --wait --follow    # {job}");
    let (status, text) = process::capture(daemon.agentctl(["submit", "--wait", "--follow"])?.arg(&file))?;
    print!("{text}");
    std::io::stdout().flush()?;
    let result: Value = serde_json::from_str(&text).context("agentctl printed no result")?;
    let id = result["job_id"].as_str().context("the result names no job")?;

    eprintln!("\n$ agentctl receipts {id}");
    eprint!("{}", process::output(&mut daemon.agentctl(["receipts", id])?)?);
    if !status.success() || result["status"] != "success" {
        bail!("the job ended with status {} and code {}", result["status"], result["error_code"]);
    }
    let report = workspace.join(result["data"]["files"]["report"].as_str().context("the result names no report")?);
    if !report.is_file() {
        bail!("the job says that it wrote {}, but it is not there", report.display());
    }
    eprintln!("\nOpen the report: file://{}", report.display());
    Ok(())
}

/// A daemon of the demo's own; stopped when this value goes.
pub(crate) struct Daemon {
    process: Running,
    socket: PathBuf,
    profile: Profile,
}

impl Daemon {
    /// Starts a daemon on the staged example and waits until it answers.
    pub(crate) fn start(staged: &Staged, log: &Path, profile: Profile) -> Result<Self> {
        let mut command = Command::new(project::program("agentd", profile)?);
        command.arg("serve").arg("--config-dir").arg(staged.config());
        command.arg("--state-dir").arg(staged.state()).arg("--socket").arg(staged.socket());
        let missing = missing_controllers();
        if !missing.is_empty() {
            eprintln!(
                "This host has no cgroup v2 controller for {}: going on with --limits best-effort; the receipts say what was not enforced.",
                missing.join(", ")
            );
            command.args(["--limits", "best-effort"]);
        }
        let file = File::create(log).with_context(|| format!("making {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let mut daemon = Self { process: Running::start(&mut command)?, socket: staged.socket(), profile };
        daemon.await_answer()?;
        Ok(daemon)
    }

    /// `agentctl` for this daemon.
    pub(crate) fn agentctl<const N: usize>(&self, arguments: [&str; N]) -> Result<Command> {
        let mut command = Command::new(project::program("agentctl", self.profile)?);
        command.arg("--socket").arg(&self.socket).args(arguments);
        Ok(command)
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The launcher's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn await_answer(&mut self) -> Result<()> {
        let deadline = Instant::now() + START;
        while !answers(&self.socket) {
            if let Some(status) = self.process.ended()? {
                bail!("agentd ended at its start with {status}");
            }
            if Instant::now() > deadline {
                bail!("agentd did not answer within {} s", START.as_secs());
            }
            process::check_interrupt()?;
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// Whether a daemon says 200 to GET /v1/health. The socket exists before anyone serves it, so connecting proves nothing.
pub(crate) fn answers(socket: &Path) -> bool {
    let ask = || -> std::io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"GET /v1/health HTTP/1.1\r\nHost: agentd\r\nConnection: close\r\n\r\n")?;
        let mut start = vec![0; 12];
        stream.read_exact(&mut start)?;
        Ok(start)
    };
    ask().is_ok_and(|start| start == b"HTTP/1.1 200")
}

/// The file that every directory of cgroup v2 has, and none of version 1.
const CONTROLLERS: &str = "cgroup.controllers";

/// Where cgroup v2 is mounted, alone or beside version 1.
pub(crate) fn cgroup_root() -> Option<&'static Path> {
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .map(Path::new)
        .into_iter()
        .find(|root| root.join(CONTROLLERS).is_file())
}

/// Which of the controllers that limits need this host does not offer through cgroup v2.
fn missing_controllers() -> Vec<&'static str> {
    let offered = cgroup_root().and_then(|root| fs::read_to_string(root.join(CONTROLLERS)).ok()).unwrap_or_default();
    ["cpu", "memory", "pids"].into_iter().filter(|name| !offered.split_whitespace().any(|one| one == *name)).collect()
}

fn show_log(log: &Path) {
    let Ok(text) = fs::read_to_string(log) else { return };
    let lines: Vec<_> = text.lines().collect();
    eprintln!("\nthe end of agentd's log ({}):", log.display());
    for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
        eprintln!("  {line}");
    }
}
