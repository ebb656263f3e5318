//! PID 1 of each sandbox: forked from the launcher, never executed, confined before the tool exists.
//!
//! ```text
//!            launcher's pidfd readable                 ┌───────────► exit: the kernel kills the namespace
//!   RUNNING ───────────────────────────────────────────┤
//!      │     SIGTERM: TERM and CONT to all              │ no process left, or the launcher gone
//!      └──────────────────────► ENDING ────────────────┘
//! ```
//!
//! RUNNING: reaps orphans and answers for refused system calls. ENDING: everyone has been asked to end; when nobody is left, so does PID 1. It ends by itself in
//! no other way, so the launcher decides how long the grace lasts. The kernel keeps SIGKILL from inside away from it; the
//! launcher sends it one when the grace is over, and when nobody else is left.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Signal, WaitOptions, set_dumpable_behavior, setsid, wait};

use crate::denials::{Channel, Recorder};
use crate::descriptors;
use crate::privileges;
use crate::seccomp::Program;
use crate::sys::process::{block_signals, close_even_stdio_except, kill_everyone, signalfd};

/// How often ENDING looks whether somebody is left: such processes are not children of PID 1 and send no signal.
const LOOK: Duration = Duration::from_millis(2);

const SIGNAL_RECORD: usize = size_of::<libc::signalfd_siginfo>();
const SIGTERM: [u8; 4] = (libc::SIGTERM as u32).to_ne_bytes();
/// Where the sender's process id stands in it.
const SENDER: usize = std::mem::offset_of!(libc::signalfd_siginfo, ssi_pid);
const NOBODY: [u8; 4] = [0; 4];

/// Runs PID 1 and returns its exit status. `launcher` is a pidfd of the launcher, `channel` brings refused calls and takes
/// the records, `program` is the tool's filter.
pub(crate) fn run(launcher: BorrowedFd<'_>, channel: &Channel, program: &Program, (uid, gid): (u32, u32)) -> i32 {
    match confine(uid, gid).and_then(|()| watch(launcher, channel, program)) {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().unwrap_or(1),
    }
}

fn confine(uid: u32, gid: u32) -> io::Result<()> {
    block_signals()?;
    setsid()?;
    rustix::thread::set_name(c"agentd-init")?;
    privileges::drop_bounding_set()?;
    privileges::become_user(uid, gid)?;
    privileges::drop_capabilities()?;
    privileges::forbid_new_privileges()?;
    // After the change of uid, which decides about it anew. Its memory is a copy of the launcher's.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

fn watch(launcher: BorrowedFd<'_>, channel: &Channel, program: &Program) -> io::Result<()> {
    let signals = signalfd(&[libc::SIGTERM, libc::SIGCHLD])?;
    close_even_stdio_except(&[launcher, signals.as_fd(), channel.init.as_fd(), channel.records.as_fd()])?;
    let mut refusals = Refusals::new(channel, program);
    let mut ending = false;
    loop {
        let mut ready = vec![PollFd::new(&launcher, PollFlags::IN), PollFd::new(&signals, PollFlags::IN)];
        let source = refusals.source();
        ready.extend(source.as_ref().map(|source| PollFd::new(source, PollFlags::IN)));
        let timeout = ending.then_some(Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() });
        match poll(&mut ready, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [launcher_gone, signalled, refused] =
            [0, 1, 2].map(|index| ready.get(index).map_or(PollFlags::empty(), PollFd::revents));
        if !launcher_gone.is_empty() {
            return Ok(());
        }
        if !refused.is_empty() {
            refusals.take(refused)?;
        }
        reap_orphans();
        if !signalled.is_empty() && asked_to_end(signals.as_fd())? {
            ending = true;
            for signal in [Signal::TERM, Signal::CONT] {
                // Nobody to signal is what the next lines look for.
                let _ = kill_everyone(Some(signal));
            }
        }
        if ending && matches!(kill_everyone(None), Err(error) if error.raw_os_error() == Some(libc::ESRCH)) {
            return Ok(());
        }
    }
}

/// Refused calls: first the listener is awaited, then its notifications are, until the last process that has the filter is
/// gone.
struct Refusals<'a> {
    from: From<'a>,
    recorder: Recorder<'a>,
}

enum From<'a> {
    Tool(BorrowedFd<'a>),
    Kernel(OwnedFd),
    Nobody,
}

impl<'a> Refusals<'a> {
    fn new(channel: &'a Channel, program: &'a Program) -> Self {
        Self { from: From::Tool(channel.init.as_fd()), recorder: Recorder::new(channel.records.as_fd(), program) }
    }

    fn source(&self) -> Option<BorrowedFd<'_>> {
        match &self.from {
            From::Tool(socket) => Some(*socket),
            From::Kernel(listener) => Some(listener.as_fd()),
            From::Nobody => None,
        }
    }

    fn take(&mut self, ready: PollFlags) -> io::Result<()> {
        match &self.from {
            // None comes when the tool died before it had one.
            From::Tool(socket) => {
                self.from = descriptors::receive(*socket)?.pop().map_or(From::Nobody, From::Kernel);
            }
            From::Kernel(listener) if ready.contains(PollFlags::IN) => self.recorder.answer(listener.as_fd())?,
            From::Kernel(_) => self.from = From::Nobody,
            From::Nobody => {}
        }
        Ok(())
    }
}

/// Reads all pending signals and says whether the launcher's SIGTERM was among them. Where Landlock does not refuse it, the
/// tool can send one, too, being of the same uid. One of the tool's that still waits hides the launcher's: then the grace passes.
fn asked_to_end(signals: BorrowedFd<'_>) -> io::Result<bool> {
    let mut asked = false;
    let mut buffer = [0_u8; 8 * SIGNAL_RECORD];
    loop {
        match rustix::io::read(signals, &mut buffer) {
            Ok(length) => {
                // signalfd(2): a record begins with the signal's number. Who sends from outside the PID namespace has no
                // number in it.
                let from_outside =
                    |record: &[u8]| record.get(SENDER..SENDER + NOBODY.len()).is_some_and(|sender| sender == NOBODY);
                let mut records = buffer[..length].chunks_exact(SIGNAL_RECORD);
                asked |= records.any(|record| record.starts_with(&SIGTERM) && from_outside(record));
            }
            Err(Errno::AGAIN) => return Ok(asked),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn reap_orphans() {
    while matches!(wait(WaitOptions::NOHANG), Ok(Some(_))) {}
}
