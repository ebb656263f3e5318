//! A runtime tried where tools run: inside a sandbox.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::causes;
use crate::catalog::{Catalog, Runtime};
use crate::host::Host;
use crate::launch::{self, Exit, Running, Status, Stdio};
use crate::launcher::capture::{Stderr, Stdout};
use crate::listings::Listings;
use crate::plan::{Inputs, Place, Plan, View};

/// How long a runtime may take to show that it works.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often the sandbox is looked at.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Runs the runtime's own probe in a sandbox under the strictest policy that there is.
pub(super) fn run(host: &Host, catalog: &Catalog, runtime: &Runtime, sandbox_id: u32) -> Result<(), String> {
    let Some(command) = &runtime.command else { return Ok(()) };
    let command: Vec<_> =
        [OsString::from(command)].into_iter().chain(runtime.probe.iter().map(OsString::from)).collect();
    let policy = catalog.strictest().ok_or("there is no policy to try it under")?;
    let plan = Plan::build(
        host,
        &Listings::default(),
        Inputs {
            policy,
            command: &command,
            env: &[],
            tool_folder: None,
            runtime_mounts: &runtime.mounts,
            user: 0,
            sandbox_id,
            view: View::Empty,
            place: Place::Usual,
            workspace_read_only: false,
            limits: policy.limits.clone(),
            network: None,
        },
    )
    .map_err(|failure| failure.message)?;
    let text = |error: std::io::Error| causes(&error);
    let (_stdout, stdout) = Stdout::with_cap(1 << 20).map_err(text)?;
    let (mut log, stderr) = Stderr::for_sandbox(sandbox_id).map_err(text)?;
    let stdin = File::open("/dev/null").map_err(text)?.into();
    let running = launch::start(plan, Stdio { stdin, stdout, stderr, events: None, gate: None }, None)
        .map_err(|failure| failure.message)?;
    let outcome = watch(running, &mut log);
    let mut words = String::new();
    let mut log = File::from(log.into_file().map_err(text)?);
    // What a runtime says need not be text.
    let mut bytes = Vec::new();
    if log.read_to_end(&mut bytes).is_ok() {
        words = String::from_utf8_lossy(&bytes).lines().last().unwrap_or_default().to_owned();
    }
    match outcome {
        Ok(Exit::Status(0)) => Ok(()),
        Ok(Exit::Status(status)) => Err(format!("its probe ended with status {status}: {words}")),
        Ok(Exit::Signal(signal)) => Err(format!("its probe was ended by signal {signal}: {words}")),
        Err(reason) => Err(reason),
    }
}

fn watch(mut running: Running, log: &mut Stderr) -> Result<Exit, String> {
    let until = Instant::now() + PATIENCE;
    let mut verdict = None;
    loop {
        log.drain();
        let exit = running.reap();
        if verdict.is_none() {
            verdict = match (running.read_status(), exit) {
                (Status::Failed(failure), _) => Some(Err(failure.message)),
                (_, Some(exit)) => Some(Ok(exit)),
                _ if Instant::now() >= until => Some(Err(format!("it did not end within {} s", PATIENCE.as_secs()))),
                _ => None,
            };
            if verdict.is_some() {
                running.kill();
            }
        }
        if running.is_gone() {
            let _ = running.into_remains().clear_away();
            return verdict.unwrap_or_else(|| Err("its processes are gone, nobody knows how".to_owned()));
        }
        if Instant::now() >= until + PATIENCE {
            return Err("it cannot be killed".to_owned());
        }
        let mut descriptors = vec![PollFd::from_borrowed_fd(running.init(), PollFlags::IN)];
        if exit.is_none() {
            descriptors.push(PollFd::from_borrowed_fd(running.tool(), PollFlags::IN));
        }
        // Looked at again in any case.
        let _ = poll(&mut descriptors, Some(&LOOK));
    }
}
