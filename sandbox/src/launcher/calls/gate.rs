//! The gate of a call that is being recorded: how long that takes is not the call's time.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long the recording may take beyond the call's time. agentd ends a call that cannot be recorded itself.
const PATIENCE: Duration = Duration::from_secs(60);
/// How soon a gate is looked at again that was closed when the call's time was over.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A call's gate that may still be closed.
#[derive(Debug)]
pub(super) struct Gate {
    /// The pipe that says it.
    pub(super) pipe: OwnedFd,
    /// The call's time, from when it opens.
    time: Duration,
    until: Instant,
}

impl Gate {
    /// The gate of a call that has to end at `deadline` if it is open by now.
    pub(super) fn new(pipe: OwnedFd, deadline: Instant, now: Instant) -> Self {
        Self { pipe, time: deadline.saturating_duration_since(now), until: deadline + PATIENCE }
    }

    /// The deadline of a call whose gate has just opened.
    pub(super) fn opened(&self, now: Instant) -> Instant {
        now + self.time
    }

    /// What the deadline is put off to that has passed; `None` when nobody keeps the call from ending.
    pub(super) fn put_off(&self, now: Instant) -> Option<Deferred> {
        if now >= self.until {
            return None;
        }
        let mut pipe = [PollFd::new(&self.pipe, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // A pipe that was closed has been decided about, too.
        Some(match poll(&mut pipe, Some(&at_once)) {
            Ok(0) => Deferred::Closed(now + LOOK_AGAIN),
            _ => Deferred::Open(self.opened(now)),
        })
    }
}

/// A deadline that has been put off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deferred {
    /// The gate is closed: it is to be looked at again then.
    Closed(Instant),
    /// It opened at some time until now.
    Open(Instant),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_waits_for_the_gate_but_not_for_ever() {
        let (pipe, keeper) = std::io::pipe().unwrap();
        let start = Instant::now();
        let time = Duration::from_secs(3);
        let gate = Gate::new(pipe.into(), start + time, start);
        assert_eq!(gate.put_off(start + time), Some(Deferred::Closed(start + time + LOOK_AGAIN)));
        assert_eq!(gate.put_off(start + time + PATIENCE), None);
        rustix::io::write(&keeper, &[1]).unwrap();
        let later = start + Duration::from_secs(10);
        assert_eq!(gate.put_off(later), Some(Deferred::Open(later + time)));
    }

    #[test]
    fn a_gate_that_nobody_keeps_is_open() {
        let (pipe, keeper) = std::io::pipe().unwrap();
        let start = Instant::now();
        let gate = Gate::new(pipe.into(), start, start);
        drop(keeper);
        assert_eq!(gate.put_off(start), Some(Deferred::Open(start)));
    }
}
