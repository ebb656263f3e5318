//! Running other programs so that none outlives this one, also when a person presses Ctrl-C.
//!
//! Each child leads its own process group: an interrupt reaches this program alone, which then ends what it started,
//! last first, and removes what it made.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// How often a wait looks whether a person pressed Ctrl-C.
const LOOK: Duration = Duration::from_millis(20);
/// How long a program may take to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(10);

/// From now on SIGINT, SIGTERM and SIGHUP end the present task in order rather than this program at once.
pub(crate) fn watch_interrupts() -> Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag)).context("watching for interrupts")?;
    }
    Ok(())
}

/// Fails once the task was interrupted.
pub(crate) fn check_interrupt() -> Result<()> {
    if INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed)) {
        bail!("interrupted");
    }
    Ok(())
}

/// A program that runs; ended with its whole process group when this value goes.
pub(crate) struct Running {
    child: Child,
    name: String,
}

impl Running {
    /// Starts a program in a process group of its own.
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.process_group(0).spawn().with_context(|| format!("starting {name}"))?;
        Ok(Self { child, name })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its status, if it has ended.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("waiting for {}", self.name))
    }

    /// Waits for its end, or fails on an interrupt.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            check_interrupt()?;
            std::thread::sleep(LOOK);
        }
    }

    /// Asks it to end and waits for that; kills it when it does not.
    pub(crate) fn stop(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM);
        let patience = Instant::now() + PATIENCE;
        while Instant::now() < patience {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            std::thread::sleep(LOOK);
        }
        self.signal(Signal::KILL);
        self.child.wait().with_context(|| format!("waiting for {}", self.name))
    }

    /// A group that has gone already is as good as signalled.
    fn signal(&self, signal: Signal) {
        let _ = kill_process_group(Pid::from_child(&self.child), signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) && self.stop().is_err() {
            eprintln!("{} did not end", self.name);
        }
    }
}

/// A program that is spoken to over its stdin and stdout; ended with this value.
pub(crate) struct Conversation {
    running: Running,
    stdin: std::process::ChildStdin,
    heard: mpsc::Receiver<std::io::Result<String>>,
}

impl Conversation {
    /// Starts it.
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut running = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let stdin = running.child.stdin.take().context("stdin was not kept")?;
        let stdout = running.child.stdout.take().context("stdout was not kept")?;
        let (sender, heard) = mpsc::channel();
        std::thread::spawn(move || read_lines(stdout, &sender));
        Ok(Self { running, stdin, heard })
    }

    /// Writes a line to it.
    pub(crate) fn say(&mut self, line: &str) -> Result<()> {
        writeln!(self.stdin, "{line}").with_context(|| format!("writing to {}", self.running.name))
    }

    /// Its next line; nothing when it has said none for so long, or has ended.
    pub(crate) fn hear(&self, patience: Duration) -> Result<Option<String>> {
        let until = Instant::now() + patience;
        loop {
            match self.heard.recv_timeout(LOOK) {
                Ok(line) => return Ok(Some(line?)),
                Err(mpsc::RecvTimeoutError::Timeout) if Instant::now() < until => check_interrupt()?,
                Err(_) => return Ok(None),
            }
        }
    }
}

/// Runs a program to its end with this program's own streams; anything but status 0 is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = Running::start(command)?.wait()?;
    if !status.success() {
        bail!("{} ended with {status}", line(command));
    }
    Ok(())
}

/// Runs a program to its end; its stdout as text. Anything but status 0 is an error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let (status, stdout) = capture(command)?;
    if !status.success() {
        bail!("{} ended with {status}", line(command));
    }
    Ok(stdout)
}

/// Runs a program to its end; its status and stdout as text.
pub(crate) fn capture(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut text = String::new();
    let status = lines(command, |line| {
        text.push_str(line);
        text.push('\n');
    })?;
    Ok((status, text))
}

/// Runs a program to its end and hands over each line of its stdout as it comes.
pub(crate) fn lines(command: &mut Command, mut each: impl FnMut(&str)) -> Result<ExitStatus> {
    let mut running = Running::start(command.stdout(Stdio::piped()))?;
    let stdout = running.child.stdout.take().context("stdout was not kept")?;
    let (sender, receiver) = mpsc::channel();
    // A reader of its own, since a blocked read would not notice an interrupt. It ends with the pipe.
    std::thread::spawn(move || read_lines(stdout, &sender));
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(line) => each(&line?),
            Err(mpsc::RecvTimeoutError::Timeout) => check_interrupt()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => return running.wait(),
        }
    }
}

fn read_lines(stream: impl Read, sender: &mpsc::Sender<std::io::Result<String>>) {
    for line in BufReader::new(stream).split(b'\n') {
        let line = line.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        if sender.send(line).is_err() {
            return;
        }
    }
}

/// A command as a person would type it.
pub(crate) fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
