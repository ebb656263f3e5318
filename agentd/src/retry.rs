//! When a failed call is tried again. The only layer that does so: tools and SDKs do not, and the loop sees one answer.
//!
//! Only calls that may be repeated are: of tools that are read-only (enforced) or that declare themselves idempotent.
//! Each wait is random between nothing and a bound that doubles (full jitter), never shorter than what the tool asked for,
//! and never so long that the next attempt would begin after the deadline. A budget keeps retries to a share of all
//! calls, so that a failing dependency is not hit harder than a working one.
//!
//! Pure: the caller brings the time that is left and the randomness.

use std::time::Duration;

use toolproto::code::Code;

const FIRST_BOUND: Duration = Duration::from_millis(200);
const LARGEST_BOUND: Duration = Duration::from_secs(10);

/// A call that failed, as far as trying again is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The code that it got.
    pub code: Code,
    /// Whether the tool calls its own error retryable.
    pub retryable: bool,
    /// When the tool wants to be asked again.
    pub retry_after: Option<Duration>,
}

impl Failed {
    /// Whether another attempt may end otherwise.
    const fn may_pass(self) -> bool {
        match self.code {
            Code::ToolFailed => self.retryable,
            Code::ToolCrashed | Code::ToolTimeout | Code::LaunchFailed | Code::Overloaded => true,
            _ => false,
        }
    }
}

/// What one tool's manifest allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Attempts in all; 0 and 1 mean once.
    pub attempts: u32,
    /// Whether a repetition has no effect of its own: read-only or idempotent.
    pub repeatable: bool,
}

/// A store of retries for one tool, filled by its calls: about one retry for each ten calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    tokens: f64,
}

impl Budget {
    const FULL: f64 = 10.0;
    const PER_CALL: f64 = 0.1;

    /// A full store.
    #[must_use]
    pub const fn full() -> Self {
        Self { tokens: Self::FULL }
    }

    /// A first attempt was made.
    pub fn call(&mut self) {
        self.tokens = (self.tokens + Self::PER_CALL).min(Self::FULL);
    }

    fn take(&mut self) -> bool {
        let enough = self.tokens >= 1.0;
        if enough {
            self.tokens -= 1.0;
        }
        enough
    }
}

/// How long to wait before the next attempt, or nothing when there is none. `attempt` is the number of the one that
/// failed, from 1; `left` what remains of the call's time; `random` is uniform between 0 and 1.
pub fn next(
    rules: Rules,
    attempt: u32,
    failed: Failed,
    left: Duration,
    budget: &mut Budget,
    random: f64,
) -> Option<Duration> {
    if !rules.repeatable || attempt >= rules.attempts || !failed.may_pass() {
        return None;
    }
    let doubled = FIRST_BOUND.saturating_mul(1_u32.checked_shl(attempt - 1).unwrap_or(u32::MAX));
    let wait = doubled.min(LARGEST_BOUND).mul_f64(random.clamp(0.0, 1.0)).max(failed.retry_after.unwrap_or_default());
    (wait < left && budget.take()).then_some(wait)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CRASHED: Failed = Failed { code: Code::ToolCrashed, retryable: false, retry_after: None };
    const RULES: Rules = Rules { attempts: 3, repeatable: true };
    const MINUTE: Duration = Duration::from_secs(60);

    fn decide(rules: Rules, attempt: u32, failed: Failed, left: Duration) -> Option<Duration> {
        next(rules, attempt, failed, left, &mut Budget::full(), 1.0)
    }

    #[test]
    fn only_repeatable_calls_with_attempts_left_are_repeated() {
        assert_eq!(decide(RULES, 1, CRASHED, MINUTE), Some(FIRST_BOUND));
        assert_eq!(decide(RULES, 2, CRASHED, MINUTE), Some(FIRST_BOUND * 2));
        assert_eq!(decide(RULES, 3, CRASHED, MINUTE), None);
        assert_eq!(decide(Rules { repeatable: false, ..RULES }, 1, CRASHED, MINUTE), None);
        assert_eq!(decide(Rules { attempts: 0, ..RULES }, 1, CRASHED, MINUTE), None);
    }

    #[test]
    fn the_code_decides_whether_it_can_help() {
        let with = |code, retryable| decide(RULES, 1, Failed { code, retryable, retry_after: None }, MINUTE).is_some();
        assert!(with(Code::ToolTimeout, false) && with(Code::ToolFailed, true));
        for code in [
            Code::ToolFailed,
            Code::ArgumentsInvalid,
            Code::ToolProtocolError,
            Code::ResponseInvalid,
            Code::ResponseTooLarge,
            Code::Cancelled,
            Code::BreakerOpen,
            Code::PolicyUnenforceable,
            Code::OutOfMemory,
        ] {
            assert!(!with(code, false), "{code}");
        }
    }

    #[test]
    fn the_tool_is_not_asked_before_it_wants_nor_after_the_deadline() {
        let later = Failed { code: Code::ToolFailed, retryable: true, retry_after: Some(Duration::from_secs(5)) };
        assert_eq!(decide(RULES, 1, later, MINUTE), Some(Duration::from_secs(5)));
        assert_eq!(decide(RULES, 1, later, Duration::from_secs(5)), None);
        assert_eq!(decide(RULES, 1, CRASHED, Duration::ZERO), None);
    }

    #[test]
    fn the_budget_runs_dry_and_fills_by_calls() {
        let mut budget = Budget::full();
        let retry = |budget: &mut Budget| next(RULES, 1, CRASHED, MINUTE, budget, 0.0).is_some();
        assert_eq!((0..100).filter(|_| retry(&mut budget)).count(), 10);
        (0..11).for_each(|_| budget.call());
        assert!(retry(&mut budget));
        assert!(!retry(&mut budget));
    }

    proptest! {
        /// However long it goes on, retries stay a tenth of the calls (besides the first ten), and no wait is unbounded.
        #[test]
        fn retries_stay_a_share_of_the_calls(calls in 1..2000_u32, random in 0.0..1.0) {
            let mut budget = Budget::full();
            let mut retries = 0;
            for _ in 0..calls {
                budget.call();
                let mut attempt = 1;
                let rules = Rules { attempts: 50, repeatable: true };
                while let Some(wait) = next(rules, attempt, CRASHED, MINUTE, &mut budget, random) {
                    prop_assert!(wait <= LARGEST_BOUND);
                    attempt += 1;
                    retries += 1;
                }
            }
            prop_assert!(retries <= 10 + calls / 10 + 1);
        }
    }
}
