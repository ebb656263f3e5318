//! Processes that are started ahead of their calls: each in its finished sandbox, waiting on stdin, used once.
//!
//! ```text
//!             exec has happened         a call that would get the very same sandbox
//!   Starting ──────────────────► Ready ─────────────────────────────────────────────► serves it
//!      │                           │
//!      │ a step failed, no exec    │ ended by itself, waited too long, its job closed, configuration reloaded
//!      ▼                           ▼
//!    Ending ──────────────────────────► gone (or stuck in the kernel)
//! ```
//!
//! One belongs to a job, or to the direct calls of a user, and is never anybody else's. It has seen neither a call nor a
//! workspace, and what it says to its network is heard only once it serves. A call takes it only if everything that the launcher
//! would make for a cold one is equal; otherwise the call starts cold, as if nothing had been started ahead.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use toolproto::ids::JobId;

use super::capture::{Stderr, Stdout};
use super::program::Resolved;
use crate::cgroup::{CgroupError, Slice, Tree};
use crate::launch::{Exit, Remains, Running, Status};
use crate::netns::Sockets;
use crate::protocol::{Narrowing, SliceLimits};

/// How long a process may take to its exec.
const STARTING: Duration = Duration::from_secs(30);
/// How long a killed process is waited for before it counts as stuck in the kernel.
const STUCK: Duration = Duration::from_secs(2);
/// How soon to look again whether killed processes are gone.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// How long nothing is started after the first process that did not live until its call. Doubled with each further one.
const SETBACK: Duration = Duration::from_secs(1);
/// How long calls that run put off what is to be started ahead: longer than a burst of calls that find theirs takes, and no
/// longer, since somebody always calls on a busy host.
const POSTPONEMENT: Duration = Duration::from_millis(100);
/// How often that time is doubled.
const MAX_DOUBLINGS: u32 = 8;

/// For whose calls a process is started ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// A job's.
    Job(JobId),
    /// The direct calls of a user, each of which is a job of its own.
    DirectCalls(u32),
}

/// What is started ahead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// For whom.
    pub holder: Holder,
    /// The tool's name.
    pub tool: String,
    /// What its calls are narrowed by.
    pub narrow: Narrowing,
    /// Whether its calls see a workspace.
    pub sees_workspace: bool,
    /// Whether somebody hears how far its calls are.
    pub is_watched: bool,
}

/// A process that was started ahead.
#[derive(Debug)]
pub struct Warm {
    /// What it was started for.
    pub order: Order,
    /// What it runs, and under what.
    pub resolved: Resolved,
    /// Its sandbox.
    pub running: Running,
    /// The uid of its sandbox.
    pub uid: u32,
    /// Where its request is to be written.
    pub stdin: OwnedFd,
    /// Where its progress is to be read.
    pub events: Option<OwnedFd>,
    /// Its output.
    pub output: (Stdout, Stderr),
    /// The sockets of its network, if it has listed hosts.
    pub sockets: Option<Sockets>,
    /// What the kernel enforces.
    pub enforced: Vec<String>,
    /// What best effort let go.
    pub not_enforced: Vec<String>,
    /// Names in the workspace that it can only read.
    pub guarded: Vec<PathBuf>,
    /// How far it has come.
    pub state: State,
}

/// How far a process that was started ahead has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its exec has not happened yet.
    Starting {
        /// When that is given up.
        until: Instant,
    },
    /// It waits for its call.
    Ready {
        /// Since when.
        since: Instant,
    },
}

impl State {
    /// Of one that is started now.
    #[must_use]
    pub fn starting(now: Instant) -> Self {
        Self::Starting { until: now + STARTING }
    }
}

/// Why a process that was started ahead serves no call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    /// It did not live until its call.
    Ended(String),
    /// No call came in time.
    Unused,
}

impl Warm {
    /// Looks at it, and says how it ended, if it has.
    fn look(&mut self, now: Instant) -> Option<String> {
        self.output.1.drain();
        if let State::Starting { until } = self.state {
            match self.running.read_status() {
                Status::Executing => self.state = State::Ready { since: now },
                Status::Failed(failure) => return Some(failure.message),
                Status::Pending if now >= until => return Some("its set-up does not end".to_owned()),
                Status::Pending => return None,
            }
        }
        self.running.reap().map(|exit| match exit {
            Exit::Status(status) => format!("it ended with status {status}"),
            Exit::Signal(signal) => format!("it was ended by signal {signal}"),
        })
    }

    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let process = match self.state {
            State::Starting { .. } => self.running.status(),
            State::Ready { .. } => self.running.tool(),
        };
        [process].into_iter().chain(self.output.1.reader())
    }

    fn due(&self, patience: Duration) -> Instant {
        match self.state {
            State::Starting { until } => until,
            State::Ready { since } => since + patience,
        }
    }
}

/// One that was killed.
#[derive(Debug)]
struct Ending {
    holder: Holder,
    running: Running,
    uid: u32,
    until: Instant,
}

/// What has ended, for the launcher to tidy up.
#[derive(Debug)]
pub enum Gone {
    /// All of its processes.
    Whole(Holder, Remains, u32),
    /// Killed, and the kernel does not let them go.
    Stuck(Holder, Running, u32),
}

/// After processes that did not live until their call.
#[derive(Clone, Copy, Debug)]
struct Setback {
    times: u32,
    until: Instant,
}

/// An order, and what it comes to under the configuration of now.
#[derive(Clone, Debug)]
pub struct Warming {
    /// What is wanted.
    pub order: Order,
    /// What is started for it.
    pub resolved: Resolved,
}

/// What is to be started once nothing more urgent is to be done.
#[derive(Debug)]
struct Postponed {
    warming: Warming,
    until: Instant,
}

/// All processes that wait for their calls, or are ended because none came.
#[derive(Debug, Default)]
pub struct Waiting {
    waiting: Vec<Warm>,
    postponed: VecDeque<Postponed>,
    ending: Vec<Ending>,
    setbacks: BTreeMap<(Holder, String), Setback>,
    slices: BTreeMap<u32, Slice>,
    /// The number of the last leaf.
    last: u64,
}

impl Waiting {
    /// How many more may be started for an order, of which so many are wanted, when at most so many may wait in all.
    #[must_use]
    pub fn missing(&self, order: &Order, wanted: u32, most: u32, now: Instant) -> usize {
        let key = (order.holder, order.tool.clone());
        if self.setbacks.get(&key).is_some_and(|setback| now < setback.until) {
            return 0;
        }
        let count = |count: u32| usize::try_from(count).unwrap_or(usize::MAX);
        let there = self.waiting.iter().filter(|warm| warm.order == *order).count();
        count(wanted).saturating_sub(there).min(count(most).saturating_sub(self.waiting.len()))
    }

    /// The number of the next leaf.
    pub const fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The cgroup of what is started ahead for a user's direct calls, made when it is first needed.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn slice_of(&mut self, uid: u32, tree: &Tree) -> Result<&Slice, CgroupError> {
        Ok(match self.slices.entry(uid) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => place.insert(tree.slice(&format!("direct-{uid}.slice"), &SliceLimits::default())?),
        })
    }

    /// Removes the cgroups of users for whom nothing is there any more, and who have no direct call that will leave something to
    /// be started. One that serves a call keeps its cgroup busy.
    pub fn remove_idle_slices(&mut self, calls_directly: impl Fn(u32) -> bool) {
        let is_ordered = |holder| self.postponed.iter().any(|postponed| postponed.warming.order.holder == holder);
        let is_needed = |uid: u32| {
            let holder = Holder::DirectCalls(uid);
            self.has_any_of(holder) || is_ordered(holder) || calls_directly(uid)
        };
        let idle: Vec<u32> = self.slices.keys().copied().filter(|uid| !is_needed(*uid)).collect();
        for uid in idle {
            if self.slices.get(&uid).is_some_and(|slice| slice.remove().is_ok()) {
                self.slices.remove(&uid);
            }
        }
    }

    /// Has an order followed when no call runs any more, or after [`POSTPONEMENT`]. The same order a second time is the same
    /// order: what it wants is looked at when it is followed.
    pub fn postpone(&mut self, warming: Warming, now: Instant) {
        match self.postponed.iter_mut().find(|postponed| postponed.warming.order == warming.order) {
            Some(postponed) => postponed.warming = warming,
            None => self.postponed.push_back(Postponed { warming, until: now + POSTPONEMENT }),
        }
    }

    /// When the first of the postponed orders is due.
    #[must_use]
    pub fn postponed_until(&self, is_busy: bool, now: Instant) -> Option<Instant> {
        let first = self.postponed.front()?;
        Some(if is_busy { first.until } else { now })
    }

    /// The first of the postponed orders, if it is due.
    #[must_use]
    pub fn due_order(&self, is_busy: bool, now: Instant) -> Option<&Warming> {
        let first = self.postponed.front()?;
        (!is_busy || first.until <= now).then_some(&first.warming)
    }

    /// The first of the postponed orders is followed.
    pub fn drop_first_order(&mut self) {
        self.postponed.pop_front();
    }

    /// Takes in one that was started.
    pub fn add(&mut self, warm: Warm) {
        self.waiting.push(warm);
    }

    /// Notes that one did not live until its call, or could not be started.
    pub fn set_back(&mut self, order: &Order, now: Instant) {
        let longest = SETBACK * (1 << MAX_DOUBLINGS);
        self.setbacks.retain(|_, setback| now < setback.until + longest);
        let setback =
            self.setbacks.entry((order.holder, order.tool.clone())).or_insert(Setback { times: 0, until: now });
        setback.until = now + SETBACK * (1 << setback.times.min(MAX_DOUBLINGS));
        setback.times += 1;
    }

    /// Takes one that is ready and would serve a call exactly as a cold one: the oldest.
    pub fn take(&mut self, order: &Order, resolved: &Resolved, now: Instant) -> Option<Warm> {
        let fits = |warm: &mut Warm| {
            warm.order == *order
                && warm.resolved == *resolved
                && warm.look(now).is_none()
                && matches!(warm.state, State::Ready { .. })
        };
        let place = self.waiting.iter_mut().position(fits)?;
        self.setbacks.remove(&(order.holder, order.tool.clone()));
        Some(self.waiting.remove(place))
    }

    /// Ends one that was taken and cannot serve.
    pub fn end(&mut self, warm: Warm, now: Instant) {
        warm.running.kill();
        let (holder, running, uid) = (warm.order.holder, warm.running, warm.uid);
        self.ending.push(Ending { holder, running, uid, until: now + STUCK });
    }

    /// Ends all of a holder's, and forgets its setbacks.
    pub fn end_of(&mut self, holder: Holder, now: Instant) {
        self.setbacks.retain(|(of, _), _| *of != holder);
        self.postponed.retain(|postponed| postponed.warming.order.holder != holder);
        for warm in self.waiting.extract_if(.., |warm| warm.order.holder == holder).collect::<Vec<_>>() {
            self.end(warm, now);
        }
    }

    /// Ends all.
    pub fn end_all(&mut self, now: Instant) {
        self.setbacks.clear();
        self.postponed.clear();
        for warm in std::mem::take(&mut self.waiting) {
            self.end(warm, now);
        }
    }

    /// Whether some of a holder's are there, waiting or ending.
    #[must_use]
    pub fn has_any_of(&self, holder: Holder) -> bool {
        self.waiting.iter().any(|warm| warm.order.holder == holder)
            || self.ending.iter().any(|ending| ending.holder == holder)
    }

    /// Whether some are still ending.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        !self.ending.is_empty()
    }

    /// What to poll for reading.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.waiting.iter().flat_map(Warm::descriptors)
    }

    /// When to look at them again at the latest, when each waits so long for its call.
    #[must_use]
    pub fn due(&self, now: Instant, patience: Duration) -> Option<Instant> {
        let ending = (!self.ending.is_empty()).then(|| now + LOOK_AGAIN);
        self.waiting.iter().map(|warm| warm.due(patience)).chain(ending).min()
    }

    /// Ends those that are of no use any more, each of which waits so long for its call, and yields them with the reason.
    pub fn look(&mut self, now: Instant, patience: Duration) -> Vec<(Order, Lost)> {
        let mut lost = Vec::new();
        let mut place = 0;
        while let Some(warm) = self.waiting.get_mut(place) {
            let ended = warm.look(now).map(Lost::Ended);
            match ended.or_else(|| (now >= warm.due(patience)).then_some(Lost::Unused)) {
                Some(why) => {
                    let warm = self.waiting.remove(place);
                    lost.push((warm.order.clone(), why));
                    self.end(warm, now);
                }
                None => place += 1,
            }
        }
        lost
    }

    /// Those whose processes are gone, or will not go.
    pub fn gone(&mut self, now: Instant) -> Vec<Gone> {
        let mut gone = Vec::new();
        for mut ending in std::mem::take(&mut self.ending) {
            ending.running.reap();
            if ending.running.is_gone() {
                gone.push(Gone::Whole(ending.holder, ending.running.into_remains(), ending.uid));
            } else if now >= ending.until {
                gone.push(Gone::Stuck(ending.holder, ending.running, ending.uid));
            } else {
                self.ending.push(ending);
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use toolproto::units::Bytes;

    use super::*;
    use crate::launcher::program::Sight;
    use crate::plan::Place;
    use crate::policy::CallLimits;

    fn order(tool: &str) -> Order {
        Order {
            holder: Holder::DirectCalls(1000),
            tool: tool.to_owned(),
            narrow: Narrowing::default(),
            sees_workspace: true,
            is_watched: false,
        }
    }

    fn warming(tool: &str, prewarm: u32) -> Warming {
        let resolved = Resolved {
            policy: "strict".to_owned(),
            command: Vec::new(),
            environment: Vec::new(),
            folder: None,
            mounts: Vec::new(),
            limits: CallLimits::default(),
            protect: Arc::default(),
            sight: Sight::Nothing,
            time: None,
            max_response: Bytes(1),
            place: Place::Late,
            prewarm,
            passages: Vec::new(),
        };
        Warming { order: order(tool), resolved }
    }

    #[test]
    fn an_order_waits_for_calls_that_run_and_not_for_ever() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        assert_eq!(waiting.postponed_until(false, now), None);
        waiting.postpone(warming("t", 1), now);
        waiting.postpone(warming("u", 1), now + POSTPONEMENT / 2);
        // The same again: it is due no later, and wants what is wanted now.
        waiting.postpone(warming("t", 2), now + POSTPONEMENT / 2);
        assert!(waiting.due_order(true, now).is_none());
        assert_eq!(waiting.postponed_until(true, now), Some(now + POSTPONEMENT));
        assert_eq!(waiting.postponed_until(false, now), Some(now));
        let first = waiting.due_order(false, now).unwrap();
        assert_eq!((first.order.tool.as_str(), first.resolved.prewarm), ("t", 2));
        assert!(waiting.due_order(true, now + POSTPONEMENT).is_some());
        waiting.drop_first_order();
        assert!(waiting.due_order(true, now + POSTPONEMENT).is_none(), "the other came later");
        waiting.end_of(Holder::DirectCalls(1000), now);
        assert!(waiting.due_order(false, now).is_none(), "forgotten with its holder");
    }

    #[test]
    fn no_more_are_started_than_are_wanted_or_may_wait() {
        let (waiting, now) = (Waiting::default(), Instant::now());
        assert_eq!(waiting.missing(&order("t"), 3, 16, now), 3);
        assert_eq!(waiting.missing(&order("t"), 3, 2, now), 2);
        assert_eq!(waiting.missing(&order("t"), 3, 0, now), 0);
    }

    #[test]
    fn what_does_not_live_is_started_less_and_less_often() {
        let (mut waiting, mut now) = (Waiting::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..12 {
            waiting.set_back(&order("t"), now);
            assert_eq!(waiting.missing(&order("u"), 1, 16, now), 1, "another tool's are not concerned");
            let mut pause = Duration::ZERO;
            while waiting.missing(&order("t"), 1, 16, now + pause) == 0 {
                pause += Duration::from_millis(500);
            }
            pauses.push(pause.as_secs());
            now += pause;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256, 256]);
        waiting.end_of(Holder::DirectCalls(1000), now);
        waiting.set_back(&order("t"), now);
        assert_eq!(waiting.missing(&order("t"), 1, 16, now + SETBACK), 1, "forgotten with its holder");
    }
}
