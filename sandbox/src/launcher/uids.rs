//! One uid per live sandbox: two calls never share one, so neither can signal or trace the other.

use std::collections::BTreeSet;

use crate::config::Uids;

/// The uids that sandboxes may have.
#[derive(Debug)]
pub struct UidPool {
    range: Uids,
    taken: BTreeSet<u32>,
    /// Where the search goes on, so that a freed uid rests as long as possible.
    next: u32,
}

impl UidPool {
    /// All of the configured range, free.
    #[must_use]
    pub const fn new(range: Uids) -> Self {
        Self { range, taken: BTreeSet::new(), next: range.first_sandbox }
    }

    /// Takes a uid, if one is free.
    pub fn take(&mut self) -> Option<u32> {
        let later = self.next..=self.range.last_sandbox;
        let earlier = self.range.first_sandbox..self.next;
        let uid = later.chain(earlier).find(|uid| !self.taken.contains(uid))?;
        self.taken.insert(uid);
        self.next = if uid == self.range.last_sandbox { self.range.first_sandbox } else { uid + 1 };
        Some(uid)
    }

    /// Gives a uid back. To be called when no process has it any more.
    pub fn give_back(&mut self, uid: u32) {
        self.taken.remove(&uid);
    }

    /// Goes over to another range; uids that are taken stay taken until they are given back.
    pub fn set_range(&mut self, range: Uids) {
        self.range = range;
        self.next = range.first_sandbox;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pool(first: u32, last: u32) -> UidPool {
        UidPool::new(Uids { service: 1, first_sandbox: first, last_sandbox: last })
    }

    #[test]
    fn a_freed_uid_rests() {
        let mut pool = pool(70_000, 70_002);
        assert_eq!(pool.take(), Some(70_000));
        pool.give_back(70_000);
        assert_eq!(
            [pool.take(), pool.take(), pool.take(), pool.take()],
            [Some(70_001), Some(70_002), Some(70_000), None]
        );
    }

    proptest! {
        #[test]
        fn no_uid_is_given_twice(steps in proptest::collection::vec(any::<Option<u8>>(), 0..100)) {
            let mut pool = pool(70_000, 70_009);
            let mut live: Vec<u32> = Vec::new();
            for step in steps {
                match step {
                    None => match pool.take() {
                        Some(uid) => {
                            prop_assert!((70_000..=70_009).contains(&uid) && !live.contains(&uid));
                            live.push(uid);
                        }
                        None => prop_assert_eq!(live.len(), 10),
                    },
                    Some(which) if !live.is_empty() => {
                        pool.give_back(live.swap_remove(usize::from(which) % live.len()));
                    }
                    Some(_) => {}
                }
            }
        }
    }
}
