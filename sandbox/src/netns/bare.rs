//! Networks with nothing in them but loopback, made while nobody waits: making one takes a good tenth of a launch. Each is for
//! one call.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::inside_new;
use crate::sys::net::loopback_up;

/// How many are kept.
const KEPT: usize = 4;
/// How long none is made after one could not be.
const PAUSE: Duration = Duration::from_secs(60);

/// A network namespace that nobody has been in.
#[derive(Debug)]
pub struct Bare(OwnedFd);

impl Bare {
    /// Makes one. Must be called as [`furnish`](super::furnish) must.
    ///
    /// # Errors
    /// When the kernel refuses, as where the host's limit of namespaces is reached.
    pub fn make() -> io::Result<Self> {
        inside_new(loopback_up).map(|(namespace, ())| Self(namespace))
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Those that were made ahead.
#[derive(Debug, Default)]
pub struct Bares {
    made: Vec<Bare>,
    pause: Option<Instant>,
}

impl Bares {
    /// One for a call, if there is one.
    pub fn take(&mut self) -> Option<Bare> {
        self.made.pop()
    }

    /// Whether another one is to be made.
    #[must_use]
    pub fn is_short(&self, now: Instant) -> bool {
        self.made.len() < KEPT && self.pause.is_none_or(|until| until <= now)
    }

    /// Takes in another one. One that cannot be made is made by its call, which tells why.
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

    #[test]
    fn so_many_are_kept_and_one_that_fails_makes_a_pause() {
        let (mut bares, now) = (Bares::default(), Instant::now());
        let some = || Ok(Bare(tempfile::tempfile().unwrap().into()));
        for _ in 0..KEPT {
            assert!(bares.is_short(now));
            bares.add(some(), now);
        }
        assert!(!bares.is_short(now));
        assert!(bares.take().is_some() && bares.is_short(now));
        bares.add(Err(io::ErrorKind::StorageFull.into()), now);
        assert!(!bares.is_short(now) && bares.is_short(now + PAUSE));
    }
}
