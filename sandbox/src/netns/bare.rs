//! Networks with nothing in them but loopback. Making and ending one takes the kernel as long as a sixth of a call, so some
//! are made while nobody waits, and one in which nobody has made a socket serves the next call: without a socket nothing can
//! be sent, counted, bound or set in a network, so it is as it was when it was new. Each is for one call at a time, and for
//! calls of one user: files of /proc/net that were sent out of a sandbox go on to tell of their network.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::inside_new;
use crate::sys::net::loopback_up;

/// How many are made ahead.
const MADE_AHEAD: usize = 4;
/// How many are kept of those that calls have left.
const KEPT: usize = 32;
/// How long none is made after one could not be.
const PAUSE: Duration = Duration::from_secs(60);

/// A network namespace in which nobody has made a socket but for its making.
#[derive(Debug)]
pub struct Bare {
    namespace: OwnedFd,
    /// The uid of whose calls it is for, once it has served one.
    user: Option<u32>,
}

impl Bare {
    /// Makes one. Must be called as [`furnish`](super::furnish) must.
    ///
    /// # Errors
    /// When the kernel refuses, as where the host's limit of namespaces is reached.
    pub fn make() -> io::Result<Self> {
        inside_new(loopback_up).map(|(namespace, ())| Self { namespace, user: None })
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }
}

/// Those that were made ahead, and those that calls have left.
#[derive(Debug, Default)]
pub struct Bares {
    made: Vec<Bare>,
    /// Those that calls have left; the last ones last.
    left: Vec<Bare>,
    pause: Option<Instant>,
}

impl Bares {
    /// One for a call of this user: one that another has left, else a new one. One that cannot be made is made by its call, which
    /// tells why.
    pub fn take(&mut self, user: u32, now: Instant) -> Option<Bare> {
        if let Some(found) = self.left.iter().rposition(|bare| bare.user == Some(user)) {
            return Some(self.left.remove(found));
        }
        if self.made.is_empty() && !self.is_paused(now) {
            self.add(Bare::make(), now);
        }
        let made = self.made.pop()?;
        Some(Bare { user: Some(user), ..made })
    }

    /// Takes in one that a call has left.
    pub fn take_back(&mut self, bare: Bare) {
        self.left.push(bare);
        if self.left.len() > KEPT {
            self.left.remove(0);
        }
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.pause.is_some_and(|until| now < until)
    }

    /// Whether another one is to be made.
    #[must_use]
    pub fn is_short(&self, now: Instant) -> bool {
        self.made.len() < MADE_AHEAD && !self.is_paused(now)
    }

    /// Takes in another one, or makes a pause.
    pub fn add(&mut self, made: io::Result<Bare>, now: Instant) {
        match made {
            Ok(bare) => self.made.push(bare),
            Err(error) => {
                tracing::debug!(%error, "no network is made ahead for a while");
                self.pause = Some(now + PAUSE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(user: Option<u32>) -> Bare {
        Bare { namespace: tempfile::tempfile().unwrap().into(), user }
    }

    #[test]
    fn so_many_are_made_and_one_that_fails_makes_a_pause() {
        let (mut bares, now) = (Bares::default(), Instant::now());
        for _ in 0..MADE_AHEAD {
            assert!(bares.is_short(now));
            bares.add(Ok(some(None)), now);
        }
        assert!(!bares.is_short(now));
        assert!(bares.take(1, now).is_some() && bares.is_short(now));
        bares.add(Err(io::ErrorKind::StorageFull.into()), now);
        assert!(!bares.is_short(now) && bares.is_short(now + PAUSE));
        (0..MADE_AHEAD - 1).for_each(|_| assert!(bares.take(1, now).is_some()));
        assert!(bares.take(1, now).is_none(), "none is made in the pause");
    }

    #[test]
    fn so_many_are_kept_that_calls_have_left_and_each_for_its_user() {
        let (mut bares, now) = (Bares::default(), Instant::now());
        bares.take_back(some(Some(1)));
        (0..KEPT).for_each(|_| bares.take_back(some(Some(2))));
        assert_eq!(bares.left.len(), KEPT);
        bares.pause = Some(now + PAUSE);
        assert!(bares.take(1, now).is_none(), "the oldest is gone, and no other user's is had");
        assert_eq!(bares.take(2, now).unwrap().user, Some(2));
        bares.add(Ok(some(None)), now);
        assert_eq!(bares.take(1, now).unwrap().user, Some(1), "from now on it is this user's");
    }
}
