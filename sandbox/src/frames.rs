//! Frames of roots that sandboxes have left, for those that come: making one takes a good part of a launch.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use crate::mounts::frame::{Age, Frame, Framing};
use crate::plan::Plan;

/// How many are kept that no sandbox has: enough for as many calls at once of a few programs.
const KEPT: usize = 32;

/// Frames that are kept.
///
/// A frame holds on to what of the host is shown in it. Files and directories that are replaced make another
/// [layout](crate::mounts::frame::Layout); what is mounted and unmounted in between is not seen there, so all frames are let
/// go when anything is.
#[derive(Debug)]
pub struct Frames {
    /// Those used last come last.
    idle: Vec<Frame>,
    /// The table of the host's mounts, which can be polled for changes (proc_pid_mountinfo(5)); without it nothing is kept.
    mounts: Option<OwnedFd>,
    age: Age,
}

impl Frames {
    /// None yet, with an eye on the mounts of the caller's namespace.
    #[must_use]
    pub fn watching_mounts() -> Self {
        let mounts = rustix::fs::open("/proc/thread-self/mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let mounts = mounts.inspect_err(|error| {
            tracing::warn!(%error, "the host's mounts cannot be watched: every call makes a root of its own from nothing");
        });
        Self { idle: Vec::new(), mounts: mounts.ok(), age: Age::default() }
    }

    /// What to poll for [`CHANGED`]. The kernel tells of a change once: [`Self::mounts_changed`] is to be called then.
    #[must_use]
    pub fn mounts(&self) -> Option<BorrowedFd<'_>> {
        self.mounts.as_ref().map(AsFd::as_fd)
    }

    /// Something was mounted or unmounted on the host.
    pub fn mounts_changed(&mut self) {
        self.age.0 += 1;
        self.idle.clear();
    }

    /// Has the sandbox of a plan begin with a frame that is there, or else leave the one that it makes.
    pub fn provide(&mut self, plan: &mut Plan) {
        let Some(mounts) = &self.mounts else { return };
        let mut table = [PollFd::new(mounts, CHANGED)];
        // What cannot be told is taken for a change.
        if !matches!(poll(&mut table, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0)) {
            self.mounts_changed();
        }
        let found = self.idle.iter().rposition(|frame| frame.is_of(plan.layout()));
        plan.begin_with(found.map_or(Framing::Leave(self.age), |found| Framing::Kept(self.idle.remove(found))));
    }

    /// Takes in the frame of a sandbox in which nobody is left.
    pub fn take_back(&mut self, frame: Frame) {
        if frame.age() == self.age {
            self.idle.push(frame);
            if self.idle.len() > KEPT {
                self.idle.remove(0);
            }
        }
    }

    /// Lets all frames go: what they show may be of no use any more.
    pub fn let_go(&mut self) {
        self.idle.clear();
    }
}

/// What the table of mounts is polled for.
pub const CHANGED: PollFlags = PollFlags::PRI;
