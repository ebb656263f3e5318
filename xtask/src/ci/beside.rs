//! Stages that run beside others: each as a program of its own, one after the other. What they print
//! is kept and shown once they are waited for, since two outputs on one terminal are none.

use std::fs::{self, File};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::ValueEnum as _;

use super::Stage;
use crate::process::Running;
use crate::project::{self, Profile};

/// How often it is looked whether they are wanted still.
const LOOK: Duration = Duration::from_millis(100);

/// How much they give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Priority {
    /// Not at all.
    Same,
    /// To everything else.
    Low,
}

impl Priority {
    /// As nice(1) takes it.
    const fn niceness(self) -> &'static str {
        match self {
            Self::Same => "0",
            Self::Low => "10",
        }
    }
}

/// Stages that run; ended with this value.
pub(super) struct Beside {
    worker: Option<JoinHandle<Vec<Ran>>>,
    unwanted: Arc<AtomicBool>,
}

/// A stage that has run.
pub(super) struct Ran {
    pub(super) stage: Stage,
    pub(super) took: Duration,
    /// What it has printed.
    pub(super) said: String,
    pub(super) outcome: Result<()>,
}

impl Beside {
    /// Starts them.
    pub(super) fn start(stages: &'static [Stage], priority: Priority) -> Self {
        let unwanted = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&unwanted);
        let worker = std::thread::spawn(move || run_all(stages, priority, &flag));
        Self { worker: Some(worker), unwanted }
    }

    /// Waits for them.
    pub(super) fn wait(mut self) -> Result<Vec<Ran>> {
        let worker = self.worker.take().context("they were waited for already")?;
        worker.join().map_err(|_| anyhow!("the thread beside has ended by a panic"))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.unwanted.store(true, Ordering::Relaxed);
        // What it ran is of no interest any more.
        let _ = self.worker.take().map(JoinHandle::join);
    }
}

/// Runs them up to the first that fails.
fn run_all(stages: &[Stage], priority: Priority, unwanted: &AtomicBool) -> Vec<Ran> {
    let mut ran = Vec::new();
    for &stage in stages {
        let start = Instant::now();
        let mut said = String::new();
        let outcome = run(stage, priority, unwanted, &mut said);
        let failed = outcome.is_err();
        ran.push(Ran { stage, took: start.elapsed(), said, outcome });
        if failed {
            break;
        }
    }
    ran
}

fn run(stage: Stage, priority: Priority, unwanted: &AtomicBool, said: &mut String) -> Result<()> {
    let value = stage.to_possible_value().context("every stage has a name")?;
    let folder = project::target()?.join("ci");
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let path = folder.join(format!("{}.log", value.get_name()));
    let log = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    let mut command = Command::new("nice");
    command
        .args(["-n", priority.niceness()])
        .arg(project::program("xtask", Profile::Debug)?)
        .args(["stage", value.get_name()]);
    command.stdout(log.try_clone()?).stderr(log);
    let status = wait(&mut Running::start(&mut command)?, unwanted);
    let bytes = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    said.push_str(&String::from_utf8_lossy(&bytes));
    if !status?.success() {
        bail!("it failed");
    }
    Ok(())
}

fn wait(running: &mut Running, unwanted: &AtomicBool) -> Result<std::process::ExitStatus> {
    loop {
        if let Some(status) = running.ended()? {
            return Ok(status);
        }
        if unwanted.load(Ordering::Relaxed) {
            return running.stop();
        }
        crate::process::check_interrupt()?;
        std::thread::sleep(LOOK);
    }
}
