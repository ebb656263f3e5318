//! The circuit breaker: a tool that keeps failing is left alone for a while, so that nobody waits for what will not work.
//!
//! ```text
//!            enough of the last calls failed, or were slow
//!   ┌────────┐ ────────────────────────────────────────────► ┌──────┐ ◄── opened by hand (stays until reset)
//!   │ closed │                                               │ open │
//!   └────────┘ ◄──────────┐                                  └──────┘
//!        ▲                │ PROBES calls in a row worked       │  ▲
//!        │ reset          │                          time over │  │ a probe failed or was slow
//!        │                │        ┌───────────┐               │  │
//!        └─ (any state)   └─────── │ half-open │ ◄─────────────┘  │
//!                                  └───────────┘ ─────────────────┘
//! ```
//!
//! - *closed*: calls go through; the last `window` of them are remembered.
//! - *open*: calls are refused, for `open_for` and up to a quarter more, so that many agentds do not probe at once.
//! - *half-open*: one call at a time goes through as a probe; the others are refused.
//!
//! Pure: the caller brings the time and the randomness. A call that began before the state last changed says nothing
//! about the present state and is not counted.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use toolproto::code::Code;
pub use toolproto::manifest::Breaker as Settings;

/// Successful probes in a row that close a half-open breaker.
pub const PROBES: u32 = 2;

/// What one call says about its tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observation {
    /// The tool worked.
    Success,
    /// It worked, but used up most of its time.
    Slow,
    /// It did not work.
    Failure,
    /// Nothing: the call was not the tool's to answer.
    Nothing,
}

impl Observation {
    /// Judges an ended call by its code (`None` for success), whether the tool called its own error retryable, and how
    /// much of its time it took.
    ///
    /// Failures are the tool's or its runtime's: time-outs, crashes, answers outside the protocol or the output
    /// schema, a missing runtime, memory or processes used up, and an error that the tool itself calls retryable (what
    /// it depends on is down). Another error of the tool's own is an answer like any. Bad arguments, cancellation, denied
    /// approvals, policy and workspace say nothing about the tool.
    #[must_use]
    pub fn of(code: Option<Code>, retryable: bool, took: Duration, limit: Duration) -> Self {
        match code {
            None => Self::of_time(took, limit),
            Some(Code::ToolFailed) if !retryable => Self::of_time(took, limit),
            Some(
                Code::ToolFailed
                | Code::ToolTimeout
                | Code::ToolCrashed
                | Code::ToolProtocolError
                | Code::ToolUnavailable
                | Code::ResponseInvalid
                | Code::OutOfMemory
                | Code::ProcessLimit,
            ) => Self::Failure,
            Some(_) => Self::Nothing,
        }
    }

    /// Slow is more than four fifths of the time that the call had.
    fn of_time(took: Duration, limit: Duration) -> Self {
        if took > limit.mul_f64(0.8) { Self::Slow } else { Self::Success }
    }
}

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Calls go through.
    Closed,
    /// Calls are refused.
    Open,
    /// One call at a time goes through.
    HalfOpen,
}

impl State {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// A change of state, for the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The state before.
    pub from: State,
    /// The state after.
    pub to: State,
    /// Why.
    pub reason: String,
}

/// A call that may go through; to be given back with [`Breaker::record`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a permit that is not given back keeps a probe's place"]
pub struct Permit {
    /// The number of state changes when it was given.
    epoch: u64,
}

/// A call that may not go through.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    /// When it is worth asking again; absent for a breaker opened by hand.
    pub retry_after: Option<Duration>,
    /// Why it is open.
    pub reason: String,
}

/// One breaker.
#[derive(Debug)]
pub struct Breaker {
    settings: Settings,
    position: Position,
    epoch: u64,
    window: VecDeque<Observation>,
}

#[derive(Clone, Debug)]
enum Position {
    Closed,
    Open { until: Option<Instant>, reason: String },
    HalfOpen { probing: bool, successes: u32 },
}

impl Breaker {
    /// A closed breaker.
    #[must_use]
    pub const fn new(settings: Settings) -> Self {
        Self { settings, position: Position::Closed, epoch: 0, window: VecDeque::new() }
    }

    /// Where it stands at this time.
    #[must_use]
    pub fn state(&self, now: Instant) -> State {
        match &self.position {
            Position::Closed => State::Closed,
            Position::Open { until: Some(until), .. } if *until <= now => State::HalfOpen,
            Position::Open { .. } => State::Open,
            Position::HalfOpen { .. } => State::HalfOpen,
        }
    }

    /// How many remembered calls failed, how many were slow, and how many there are.
    #[must_use]
    pub fn remembered(&self) -> (usize, usize, usize) {
        let count = |wanted| self.window.iter().filter(|seen| **seen == wanted).count();
        (count(Observation::Failure), count(Observation::Slow), self.window.len())
    }

    /// Asks whether a call may go through now.
    ///
    /// # Errors
    /// When the breaker is open, or half-open with a probe under way.
    pub fn admit(&mut self, now: Instant) -> Result<Permit, Refused> {
        match &mut self.position {
            Position::Closed => Ok(Permit { epoch: self.epoch }),
            Position::Open { until: Some(until), .. } if *until <= now => {
                self.enter(Position::HalfOpen { probing: true, successes: 0 });
                Ok(Permit { epoch: self.epoch })
            }
            Position::Open { until, reason } => {
                Err(Refused { retry_after: until.map(|until| until - now), reason: reason.clone() })
            }
            Position::HalfOpen { probing: probing @ false, .. } => {
                *probing = true;
                Ok(Permit { epoch: self.epoch })
            }
            Position::HalfOpen { .. } => Err(Refused {
                retry_after: Some(Duration::from_secs(1)),
                reason: "a probe is under way to see whether the tool works again".to_owned(),
            }),
        }
    }

    /// Gives a permit back with what the call said. `jitter`, from 0 to 1, spreads the open time.
    #[expect(clippy::needless_pass_by_value, reason = "a permit is used up")]
    pub fn record(&mut self, permit: Permit, seen: Observation, now: Instant, jitter: f64) -> Option<Transition> {
        if permit.epoch != self.epoch {
            return None;
        }
        match &mut self.position {
            Position::Closed => {
                if seen == Observation::Nothing {
                    return None;
                }
                self.window.push_back(seen);
                while self.window.len() > self.settings.window.max(1) as usize {
                    self.window.pop_front();
                }
                let reason = self.reason_to_open(seen)?;
                Some(self.open(Some(self.open_until(now, jitter)), reason))
            }
            Position::HalfOpen { probing, successes } => {
                *probing = false;
                match seen {
                    Observation::Nothing => None,
                    Observation::Success => {
                        *successes += 1;
                        if *successes < PROBES {
                            return None;
                        }
                        Some(self.close(format!("{PROBES} probes in a row worked")))
                    }
                    Observation::Slow | Observation::Failure => {
                        let how = if seen == Observation::Slow { "was slow" } else { "failed" };
                        Some(self.open(Some(self.open_until(now, jitter)), format!("a probe {how}")))
                    }
                }
            }
            // A permit of this epoch cannot exist: opening begins an epoch in which none is given.
            Position::Open { .. } => None,
        }
    }

    /// Opens it by hand, until it is reset.
    pub fn force_open(&mut self, reason: &str) -> Transition {
        self.open(None, format!("opened by hand: {reason}"))
    }

    /// Closes it by hand and forgets what was seen.
    pub fn reset(&mut self) -> Transition {
        self.close("reset by hand".to_owned())
    }

    /// Uses other settings from now on, after a reload; what was seen stays.
    pub const fn configure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    fn open_until(&self, now: Instant, jitter: f64) -> Instant {
        now + self.settings.open_for.0.mul_f64(1.0 + jitter.clamp(0.0, 1.0) / 4.0)
    }

    /// Only a call of the kind that a rate counts can push that rate over its limit.
    fn reason_to_open(&self, seen: Observation) -> Option<String> {
        let (failures, slow, calls) = self.remembered();
        if calls < self.settings.min_calls.max(1) as usize {
            return None;
        }
        #[expect(clippy::cast_precision_loss, reason = "a window holds few calls")]
        let reaches = |count: usize, rate: f64| count as f64 >= rate * calls as f64;
        match seen {
            Observation::Failure if reaches(failures, self.settings.failure_rate) => {
                Some(format!("{failures} of the last {calls} calls failed"))
            }
            Observation::Slow if reaches(slow, self.settings.slow_rate) => {
                Some(format!("{slow} of the last {calls} calls were slow"))
            }
            _ => None,
        }
    }

    fn open(&mut self, until: Option<Instant>, reason: String) -> Transition {
        let from = self.enter(Position::Open { until, reason: reason.clone() });
        Transition { from, to: State::Open, reason }
    }

    fn close(&mut self, reason: String) -> Transition {
        let from = self.enter(Position::Closed);
        Transition { from, to: State::Closed, reason }
    }

    fn enter(&mut self, position: Position) -> State {
        let from = match self.position {
            Position::Closed => State::Closed,
            Position::Open { .. } => State::Open,
            Position::HalfOpen { .. } => State::HalfOpen,
        };
        self.position = position;
        self.epoch += 1;
        self.window.clear();
        from
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use toolproto::units::Span;

    use super::*;

    const OPEN_FOR: Duration = Duration::from_secs(30);

    fn settings() -> Settings {
        Settings { window: 10, min_calls: 4, failure_rate: 0.5, slow_rate: 0.8, open_for: Span(OPEN_FOR) }
    }

    fn call(breaker: &mut Breaker, seen: Observation, now: Instant) -> Option<Transition> {
        let permit = breaker.admit(now).unwrap();
        breaker.record(permit, seen, now, 0.0)
    }

    #[test]
    fn it_opens_at_the_rate_and_not_before_the_fewest_calls() {
        let now = Instant::now();
        let mut breaker = Breaker::new(settings());
        for _ in 0..3 {
            assert_eq!(call(&mut breaker, Observation::Failure, now), None);
        }
        let opened = call(&mut breaker, Observation::Failure, now).unwrap();
        assert_eq!((opened.from, opened.to), (State::Closed, State::Open));
        assert_eq!(opened.reason, "4 of the last 4 calls failed");
        let refused = breaker.admit(now).unwrap_err();
        assert_eq!(refused.retry_after, Some(OPEN_FOR));

        let mut below = Breaker::new(settings());
        for index in 0..100 {
            let seen = if index % 5 >= 3 { Observation::Failure } else { Observation::Success };
            assert_eq!(call(&mut below, seen, now), None, "4 of 10 are below the rate");
        }
    }

    #[test]
    fn slow_calls_open_it_too() {
        let now = Instant::now();
        let mut breaker = Breaker::new(settings());
        let opened = (0..4).find_map(|_| call(&mut breaker, Observation::Slow, now)).unwrap();
        assert_eq!(opened.reason, "4 of the last 4 calls were slow");
    }

    #[test]
    fn old_calls_are_forgotten() {
        let now = Instant::now();
        let mut breaker = Breaker::new(settings());
        for _ in 0..3 {
            call(&mut breaker, Observation::Failure, now);
        }
        for _ in 0..10 {
            call(&mut breaker, Observation::Success, now);
        }
        assert_eq!(breaker.remembered(), (0, 0, 10));
    }

    #[test]
    fn probes_go_one_at_a_time_and_close_it() {
        let start = Instant::now();
        let mut breaker = Breaker::new(settings());
        (0..4).find_map(|_| call(&mut breaker, Observation::Failure, start)).unwrap();
        assert!(breaker.admit(start + OPEN_FOR - Duration::from_millis(1)).is_err());
        let later = start + OPEN_FOR;
        assert_eq!(breaker.state(later), State::HalfOpen);
        let probe = breaker.admit(later).unwrap();
        assert!(breaker.admit(later).unwrap_err().reason.contains("probe"));
        assert_eq!(breaker.record(probe, Observation::Success, later, 0.0), None);
        let closed = call(&mut breaker, Observation::Success, later).unwrap();
        assert_eq!((closed.from, closed.to), (State::HalfOpen, State::Closed));
        assert_eq!(breaker.remembered(), (0, 0, 0), "old failures must not open it again");
    }

    #[test]
    fn a_failed_or_slow_probe_opens_it_again_and_a_silent_one_frees_its_place() {
        for bad in [Observation::Failure, Observation::Slow] {
            let start = Instant::now();
            let mut breaker = Breaker::new(settings());
            (0..4).find_map(|_| call(&mut breaker, Observation::Failure, start)).unwrap();
            let later = start + OPEN_FOR;
            assert_eq!(call(&mut breaker, Observation::Nothing, later), None);
            assert_eq!(call(&mut breaker, bad, later).unwrap().to, State::Open);
            assert_eq!(breaker.admit(later).unwrap_err().retry_after, Some(OPEN_FOR));
        }
    }

    #[test]
    fn calls_from_before_the_change_do_not_count() {
        let now = Instant::now();
        let mut breaker = Breaker::new(settings());
        let late: Vec<Permit> = (0..9).map(|_| breaker.admit(now).unwrap()).collect();
        (0..4).find_map(|_| call(&mut breaker, Observation::Failure, now)).unwrap();
        breaker.reset();
        for permit in late {
            assert_eq!(breaker.record(permit, Observation::Failure, now, 0.0), None);
        }
        assert_eq!(breaker.state(now), State::Closed);
    }

    #[test]
    fn by_hand_it_stays_open_until_reset() {
        let now = Instant::now();
        let mut breaker = Breaker::new(settings());
        assert_eq!(breaker.force_open("upgrade").reason, "opened by hand: upgrade");
        assert_eq!(breaker.admit(now + OPEN_FOR * 1000).unwrap_err().retry_after, None);
        breaker.reset();
        assert!(breaker.admit(now).is_ok());
    }

    #[test]
    fn whose_fault_decides_what_counts() {
        let limit = Duration::from_secs(10);
        let of = |code, retryable| Observation::of(code, retryable, Duration::from_secs(1), limit);
        for code in [
            Code::ToolTimeout,
            Code::ToolCrashed,
            Code::ToolProtocolError,
            Code::ToolUnavailable,
            Code::ResponseInvalid,
            Code::OutOfMemory,
        ] {
            assert_eq!(of(Some(code), false), Observation::Failure, "{code}");
        }
        for code in [
            Code::ArgumentsInvalid,
            Code::Cancelled,
            Code::ApprovalDenied,
            Code::PolicyUnenforceable,
            Code::WorkspaceBusy,
            Code::Interrupted,
            Code::Overloaded,
            Code::BreakerOpen,
        ] {
            assert_eq!(of(Some(code), false), Observation::Nothing, "{code}");
        }
        assert_eq!(of(Some(Code::ToolFailed), true), Observation::Failure);
        assert_eq!(of(Some(Code::ToolFailed), false), Observation::Success);
        assert_eq!(Observation::of(None, false, Duration::from_secs(9), limit), Observation::Slow);
        assert_eq!(Observation::of(None, false, Duration::from_secs(8), limit), Observation::Success);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Admit,
        Finish { which: usize, seen: u8, jitter: f64 },
        Wait { seconds: u64 },
        ForceOpen,
        Reset,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            5 => Just(Step::Admit),
            5 => (any::<usize>(), 0..4_u8, 0.0..1.0).prop_map(|(which, seen, jitter)| Step::Finish { which, seen, jitter }),
            1 => (0..60_u64).prop_map(|seconds| Step::Wait { seconds }),
            1 => Just(Step::Reset),
            1 => Just(Step::ForceOpen),
        ];
        proptest::collection::vec(step, 0..200)
    }

    proptest! {
        /// Whatever happens: an open breaker lets nothing through and opens its door in time, a half-open one lets
        /// through one at a time, and it opens only with the calls and the rate that its settings name.
        #[test]
        fn its_promises_hold(steps in steps()) {
            let mut now = Instant::now();
            let mut breaker = Breaker::new(settings());
            let mut permits: Vec<(Permit, u64)> = Vec::new();
            let mut epoch = 0;
            let mut opened_at = None;
            let mut by_hand = false;
            for step in steps {
                let before = breaker.state(now);
                match step {
                    Step::Admit => {
                        let probing = permits.iter().any(|(_, of)| *of == epoch);
                        let was_open = opened_at.is_some();
                        match breaker.admit(now) {
                            Ok(permit) => {
                                prop_assert!(before != State::Open);
                                if was_open {
                                    // The first probe begins the half-open epoch.
                                    epoch += 1;
                                    opened_at = None;
                                } else {
                                    prop_assert!(before == State::Closed || !probing, "two probes at once");
                                }
                                permits.push((permit, epoch));
                            }
                            Err(refused) => {
                                prop_assert!(before != State::Closed);
                                prop_assert_eq!(refused.retry_after.is_none(), by_hand);
                                prop_assert!(refused.retry_after.is_none_or(|wait| wait <= OPEN_FOR.mul_f64(1.25)));
                            }
                        }
                    }
                    Step::Finish { which, seen, jitter } => {
                        if permits.is_empty() {
                            continue;
                        }
                        let (permit, of) = permits.swap_remove(which % permits.len());
                        let seen = [Observation::Success, Observation::Slow, Observation::Failure, Observation::Nothing]
                            [usize::from(seen)];
                        let (failures, slow, calls) = breaker.remembered();
                        let transition = breaker.record(permit, seen, now, jitter);
                        if of != epoch {
                            prop_assert_eq!(transition, None);
                            continue;
                        }
                        if let Some(transition) = transition {
                            epoch += 1;
                            if transition.to == State::Open {
                                opened_at = Some(now);
                                prop_assert!(matches!(seen, Observation::Failure | Observation::Slow));
                                if transition.from == State::Closed {
                                    let counted = calls.min(9) + 1;
                                    prop_assert!(counted >= 4);
                                    prop_assert!(2 * (failures + 1) >= counted || 5 * (slow + 1) >= 4 * counted);
                                }
                            }
                        }
                    }
                    Step::Wait { seconds } => now += Duration::from_secs(seconds),
                    Step::ForceOpen => {
                        breaker.force_open("test");
                        (epoch, by_hand, opened_at) = (epoch + 1, true, Some(now));
                    }
                    Step::Reset => {
                        breaker.reset();
                        (epoch, by_hand, opened_at) = (epoch + 1, false, None);
                        prop_assert_eq!(breaker.state(now), State::Closed);
                    }
                }
                if let Some(at) = opened_at.filter(|_| !by_hand) {
                    let waited = now - at;
                    prop_assert!(waited >= OPEN_FOR || breaker.state(now) == State::Open);
                    prop_assert!(waited < OPEN_FOR.mul_f64(1.25) || breaker.state(now) == State::HalfOpen);
                }
                prop_assert!(breaker.remembered().2 <= 10);
            }
        }
    }
}
