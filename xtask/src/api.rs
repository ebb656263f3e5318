//! `cargo xtask api`: the running daemon held against its own OpenAPI document, by schemathesis: over a thousand requests that fit the
//! document or just miss it, and no answer that the document does not name. Then its figures, which count all that, are read by others.

mod figures;

use std::fs::File;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context as _, Result};

use crate::demo::{self, Daemon};
use crate::example::Staged;
use crate::process;
use crate::project::{self, Profile};

const SCHEMATHESIS: &str = "4.32.5";
/// Its parser is OpenMetrics' reference.
const PROMETHEUS_CLIENT: &str = "0.26.0";

/// What of its checks cannot apply.
const NOT_APPLICABLE: [&str; 2] = [
    // A goal that fits the document may miss the agent's own schema, a workspace may belong to somebody else: 422 is right.
    "positive_data_acceptance",
    // Who asks is a matter of the socket, not of a header.
    "ignored_auth",
];

/// Runs it on a daemon of its own.
pub(crate) fn run() -> Result<()> {
    demo::require_root()?;
    let programs = programs()?;
    let folder = project::target()?.join("api");
    demo::fresh_workspace(&folder)?;
    let staged = Staged::prepare(&folder, None)?;
    let log = folder.join("agentd.log");
    let daemon = Daemon::start(&staged, &log, Profile::Debug)?;
    let address = bridge(staged.socket())?;
    let mut command = Command::new(programs.join("schemathesis"));
    // Its reports and caches go where the command stands.
    command.current_dir(&folder);
    command.arg("run").arg(format!("http://{address}/v1/openapi.json"));
    command.args(["--checks", "all", "--exclude-checks", &NOT_APPLICABLE.join(",")]);
    // The same requests each time.
    command.args(["--seed", "1", "--max-examples", "25", "--request-timeout", "90", "--no-color"]);
    process::run(&mut command).with_context(|| format!("the daemon's log is {}", log.display()))?;
    // After all that it still serves.
    process::output(&mut daemon.agentctl(["tools"])?)?;
    figures::check(&programs.join("python3"), &format!("http://{address}/v1/metrics"), &folder)
}

/// The folder of Python's programs, in an environment of their own.
fn programs() -> Result<PathBuf> {
    let folder = project::target()?.join(format!("tools/schemathesis-{SCHEMATHESIS}-{PROMETHEUS_CLIENT}"));
    // Made last, so that an installation that broke off is made again.
    let complete = folder.join("complete");
    if !complete.exists() {
        eprintln!("installing schemathesis {SCHEMATHESIS} into {}", folder.display());
        process::run(Command::new("python3").args(["-m", "venv"]).arg(&folder))
            .context("python3 makes no virtual environments here: apt-get install python3-venv")?;
        let mut install = Command::new(folder.join("bin/pip"));
        let wanted = [format!("schemathesis=={SCHEMATHESIS}"), format!("prometheus-client=={PROMETHEUS_CLIENT}")];
        process::run(install.args(["install", "--quiet"]).args(wanted))?;
        File::create(&complete).with_context(|| format!("making {}", complete.display()))?;
    }
    Ok(folder.join("bin"))
}

/// A TCP port that leads to the socket: schemathesis knows no Unix sockets. It goes with this process.
fn bridge(socket: PathBuf) -> Result<std::net::SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listening for schemathesis")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let socket = socket.clone();
            thread::spawn(move || join(&client, &socket));
        }
    });
    Ok(address)
}

/// Copies both ways until both have ended. A client or a daemon that hangs up is what is being tested, not an error of this.
fn join(client: &TcpStream, socket: &Path) {
    let Ok(daemon) = UnixStream::connect(socket) else { return };
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(io::copy(&mut &*client, &mut &daemon));
            drop(daemon.shutdown(Shutdown::Write));
        });
        drop(io::copy(&mut &daemon, &mut &*client));
        drop(client.shutdown(Shutdown::Both));
    });
}
