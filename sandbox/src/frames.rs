//! Frames of roots that sandboxes have left, for those that come: making one takes a good part of a launch.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use crate::mounts::frame::{Age, Frame, Framing};
use crate::plan::Plan;

/// How many are kept that no sandbox has: enough for as many calls at once of a few programs.
const KEPT: usize = 32;
/// How long one is kept that nobody asks for: as long as it lives, so does what it shows.
const REST: Duration = Duration::from_secs(60);

/// Frames that are kept.
///
/// A frame holds on to what of the host is shown in it. A file or directory that another one has taken the place of makes
/// another [layout](crate::mounts::frame::Layout); what is mounted and unmounted in between is not seen there, so all frames
/// are let go when anything is.
#[derive(Debug)]
pub struct Frames {
    /// Those used last come last, with the time of their return.
    idle: Vec<(Instant, Frame)>,
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
        let found = self.idle.iter().rposition(|(_, frame)| frame.is_of(plan.layout()));
        plan.begin_with(found.map_or(Framing::Leave(self.age), |found| Framing::Kept(self.idle.remove(found).1)));
    }

    /// Takes in the frame of a sandbox in which nobody is left.
    pub fn take_back(&mut self, frame: Frame, now: Instant) {
        if frame.age() == self.age {
            self.idle.push((now, frame));
            if self.idle.len() > KEPT {
                self.idle.remove(0);
            }
        }
    }

    /// When the next one is to be let go.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.idle.first().map(|(since, _)| *since + REST)
    }

    /// Lets one go that nobody has had for a while. One only: its end takes time that others wait.
    pub fn let_rested_go(&mut self, now: Instant) {
        if self.due().is_some_and(|due| due <= now) {
            self.idle.remove(0);
        }
    }

    /// Lets all frames go: what they show may be of no use any more.
    pub fn let_go(&mut self) {
        self.idle.clear();
    }
}

/// What the table of mounts is polled for.
pub const CHANGED: PollFlags = PollFlags::PRI;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounts::frame::Layout;
    use crate::plan::Place;

    fn frame(user: u32) -> Frame {
        let some = || tempfile::tempfile().unwrap().into();
        Frame::new(Layout { entries: Vec::new(), place: Place::Usual, user }, Age::default(), some(), some())
    }

    fn users(frames: &Frames) -> Vec<u32> {
        frames.idle.iter().map(|(_, frame)| frame.user()).collect()
    }

    #[test]
    fn so_many_are_kept_and_those_that_rest_go_one_by_one() {
        let (mut frames, now) = (Frames::watching_mounts(), Instant::now());
        for user in 0..=u32::try_from(KEPT).unwrap() {
            frames.take_back(frame(user), now);
        }
        assert_eq!(users(&frames).len(), KEPT);
        assert_eq!(users(&frames)[0], 1, "the one that was used longest ago is gone");
        frames.let_rested_go(now);
        assert_eq!(users(&frames).len(), KEPT);
        assert_eq!(frames.due(), Some(now + REST));
        frames.let_rested_go(now + REST);
        assert_eq!(users(&frames)[0], 2);
        assert_eq!(users(&frames).len(), KEPT - 1);
    }

    #[test]
    fn what_was_made_before_a_change_of_the_mounts_is_not_taken_back() {
        let (mut frames, now) = (Frames::watching_mounts(), Instant::now());
        frames.take_back(frame(1), now);
        frames.mounts_changed();
        assert!(users(&frames).is_empty());
        frames.take_back(frame(2), now);
        assert!(users(&frames).is_empty(), "a sandbox had it meanwhile");
    }
}
