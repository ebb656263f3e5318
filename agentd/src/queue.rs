//! Whose job runs next: fair between users, by priority within each, within limits. Pure.
//!
//! Users take turns (stride scheduling with equal weights): the one whose jobs have begun least often, counted from when it
//! came to the queue, is next. A user who was idle gains nothing by that.

use std::collections::{BTreeMap, BTreeSet};

/// How many jobs may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In all.
    pub running: usize,
    /// Of one user.
    pub per_user: usize,
    /// How many may wait.
    pub waiting: usize,
}

/// Too many jobs wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} jobs wait already")]
pub struct Full(usize);

/// Jobs that wait for their turn, and how many run.
#[derive(Debug)]
pub struct Queue<Id> {
    limits: Limits,
    users: BTreeMap<u32, User<Id>>,
    running: usize,
    waiting: usize,
    /// Counts submissions, so that a user's jobs of one priority begin in their order.
    arrivals: u64,
    /// The turn of the job that began last.
    now: u64,
}

#[derive(Debug)]
struct User<Id> {
    /// Highest priority first, then the earliest.
    waiting: BTreeSet<(std::cmp::Reverse<i32>, u64, Id)>,
    running: usize,
    turn: u64,
}

impl<Id: Copy + Ord> Queue<Id> {
    /// An empty queue.
    #[must_use]
    pub const fn new(limits: Limits) -> Self {
        Self { limits, users: BTreeMap::new(), running: 0, waiting: 0, arrivals: 0, now: 0 }
    }

    /// How many jobs wait.
    #[must_use]
    pub const fn waiting(&self) -> usize {
        self.waiting
    }

    /// How many jobs run.
    #[must_use]
    pub const fn running(&self) -> usize {
        self.running
    }

    /// Adds a job.
    ///
    /// # Errors
    /// When too many wait.
    pub fn push(&mut self, uid: u32, priority: i32, job: Id) -> Result<(), Full> {
        if self.waiting >= self.limits.waiting {
            return Err(Full(self.waiting));
        }
        self.push_again(uid, priority, job);
        Ok(())
    }

    /// Adds a job that was accepted before, however many wait.
    pub fn push_again(&mut self, uid: u32, priority: i32, job: Id) {
        let now = self.now;
        let user = self.users.entry(uid).or_insert_with(|| User { waiting: BTreeSet::new(), running: 0, turn: now });
        if user.waiting.is_empty() && user.running == 0 {
            user.turn = user.turn.max(now);
        }
        user.waiting.insert((std::cmp::Reverse(priority), self.arrivals, job));
        self.arrivals += 1;
        self.waiting += 1;
    }

    /// Takes the job that begins now, if one may.
    pub fn begin(&mut self) -> Option<Id> {
        if self.running >= self.limits.running {
            return None;
        }
        let per_user = self.limits.per_user;
        let (_, user) = self
            .users
            .iter_mut()
            .filter(|(_, user)| user.running < per_user && !user.waiting.is_empty())
            .min_by_key(|(uid, user)| (user.turn, **uid))?;
        let (_, _, job) = user.waiting.pop_first()?;
        self.now = user.turn;
        user.turn += 1;
        user.running += 1;
        self.running += 1;
        self.waiting -= 1;
        Some(job)
    }

    /// Takes a job that waits out of its turn; it counts as running. Whether it waited.
    pub fn begin_now(&mut self, uid: u32, job: Id) -> bool {
        let Some(user) = self.users.get_mut(&uid) else { return false };
        let Some(entry) = user.waiting.iter().find(|(_, _, waiting)| *waiting == job).copied() else { return false };
        user.waiting.remove(&entry);
        user.running += 1;
        self.running += 1;
        self.waiting -= 1;
        true
    }

    /// A job of this user has ended.
    pub fn end(&mut self, uid: u32) {
        if let Some(user) = self.users.get_mut(&uid) {
            user.running = user.running.saturating_sub(1);
            self.running = self.running.saturating_sub(1);
            if user.running == 0 && user.waiting.is_empty() && user.turn <= self.now {
                self.users.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn queue(running: usize, per_user: usize) -> Queue<u32> {
        Queue::new(Limits { running, per_user, waiting: 1000 })
    }

    #[test]
    fn users_take_turns_however_many_jobs_they_have() {
        let mut queue = queue(1, 1);
        for job in 0..5 {
            queue.push(1000, 0, job).unwrap();
        }
        queue.push(1001, 0, 100).unwrap();
        queue.push(1001, 0, 101).unwrap();
        let mut order = Vec::new();
        while let Some(job) = queue.begin() {
            order.push(job);
            queue.end(if job < 100 { 1000 } else { 1001 });
        }
        assert_eq!(order, [0, 100, 1, 101, 2, 3, 4]);
    }

    #[test]
    fn priority_orders_the_jobs_of_one_user_only() {
        let mut queue = queue(10, 10);
        queue.push(1000, 0, 1).unwrap();
        queue.push(1000, 9, 2).unwrap();
        queue.push(1001, -5, 3).unwrap();
        assert_eq!([queue.begin(), queue.begin(), queue.begin()], [Some(2), Some(3), Some(1)]);
    }

    #[test]
    fn idle_time_earns_nothing() {
        let mut queue = queue(1, 1);
        for job in 0..10 {
            queue.push(1000, 0, job).unwrap();
        }
        for _ in 0..5 {
            queue.begin().unwrap();
            queue.end(1000);
        }
        for job in 100..105 {
            queue.push(1001, 0, job).unwrap();
        }
        let mut order = Vec::new();
        for _ in 0..4 {
            let job = queue.begin().unwrap();
            order.push(job >= 100);
            queue.end(if job < 100 { 1000 } else { 1001 });
        }
        assert_eq!(order.iter().filter(|late| **late).count(), 2, "{order:?}");
    }

    #[test]
    fn a_full_queue_refuses() {
        let mut queue = Queue::new(Limits { running: 1, per_user: 1, waiting: 2 });
        queue.push(1, 0, 1).unwrap();
        queue.push(1, 0, 2).unwrap();
        assert!(queue.push(2, 0, 3).is_err());
        queue.begin().unwrap();
        queue.push(2, 0, 3).unwrap();
    }

    proptest! {
        #[test]
        fn limits_hold_and_no_job_is_lost(steps in prop::collection::vec((0_u8..4, 0_u32..4, -2_i32..3), 0..200)) {
            let mut queue = queue(5, 2);
            let (mut next, mut begun) = (0, BTreeMap::<u32, u32>::new());
            let mut owners = BTreeMap::new();
            for (what, uid, priority) in steps {
                match what {
                    0 | 1 => {
                        queue.push(uid, priority, next).unwrap();
                        owners.insert(next, uid);
                        next += 1;
                    }
                    2 => if let Some(job) = queue.begin() { begun.insert(job, owners[&job]); },
                    _ => if let Some((&job, &uid)) = begun.iter().next() { begun.remove(&job); owners.remove(&job); queue.end(uid); },
                }
                prop_assert!(begun.len() <= 5);
                for uid in 0..4 {
                    prop_assert!(begun.values().filter(|owner| **owner == uid).count() <= 2);
                }
                prop_assert_eq!(queue.running(), begun.len());
                prop_assert_eq!(queue.waiting() + begun.len(), owners.len());
            }
            while queue.waiting() > 0 {
                while let Some(job) = queue.begin() { begun.insert(job, owners[&job]); }
                let (&job, &uid) = begun.iter().next().unwrap();
                begun.remove(&job);
                queue.end(uid);
            }
        }
    }
}
