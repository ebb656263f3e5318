//! What a figure is to be, and whether it is.
//!
//! A goal is a ratio to something that is measured in the same run, but nobody can be faster than the kernel: so a time is to be at
//! most the largest of several terms, one of which stands on the kernel's floor, and a rate at least the smallest.

use std::fmt;
use std::time::Duration;

use super::samples::milliseconds;

/// How much longer than the kernel's floor a launch may take.
pub(super) const OF_FLOOR: f64 = 1.5;

/// A goal beside what was measured.
pub(super) struct Goal {
    /// The bound and what it is made of; absent when nothing could be measured that it could be made of.
    bound: Option<String>,
    /// How far the figure is on the wrong side of the bound, as a share of it.
    missed_by: f64,
}

impl Goal {
    /// A time that is to be at most the largest of these.
    pub(super) fn at_most(measured: Duration, terms: impl IntoIterator<Item = (String, Duration)>) -> Self {
        let terms = terms.into_iter().map(|(name, time)| (name, milliseconds(time))).collect();
        let show = |value: f64| format!("{value:.2} ms");
        Self::new(terms, f64::max, "larger", |bound| milliseconds(measured) / bound - 1.0, "at most", show)
    }

    /// A rate per second that is to be at least the smallest of these.
    pub(super) fn at_least(measured: f64, terms: impl IntoIterator<Item = (String, f64)>) -> Self {
        let show = |value: f64| format!("{value:.0} per second");
        let terms = terms.into_iter().collect();
        Self::new(terms, f64::min, "smaller", |bound| 1.0 - measured / bound, "at least", show)
    }

    fn new(
        terms: Vec<(String, f64)>,
        choose: fn(f64, f64) -> f64,
        chosen: &str,
        missed_by: impl Fn(f64) -> f64,
        side: &str,
        show: impl Fn(f64) -> String,
    ) -> Self {
        let Some(bound) = terms.iter().map(|(_, value)| *value).reduce(choose) else {
            return Self { bound: None, missed_by: 0.0 };
        };
        let reason = match terms.as_slice() {
            [(name, _)] => name.clone(),
            terms => {
                let terms: Vec<_> = terms.iter().map(|(name, value)| format!("{name}: {}", show(*value))).collect();
                format!("the {chosen} of {}", terms.join(" and "))
            }
        };
        Self { bound: Some(format!("{side} {} ({reason})", show(bound))), missed_by: missed_by(bound) }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.bound {
            None => write!(f, "goal: unknown, since nothing could be measured that it depends on"),
            Some(bound) if self.missed_by <= 0.0 => write!(f, "goal: {bound}, reached"),
            // A goal that is just missed is not missed by nothing.
            Some(bound) => write!(f, "goal: {bound}, missed by {:.0} %", (self.missed_by * 100.0).ceil()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn a_time_is_held_against_the_largest_term() {
        let terms = || [("0.5 × bwrap".to_owned(), ms(2)), ("1.5 × floor".to_owned(), ms(4))];
        let text = "goal: at most 4.00 ms (the larger of 0.5 × bwrap: 2.00 ms and 1.5 × floor: 4.00 ms)";
        assert_eq!(Goal::at_most(ms(4), terms()).to_string(), format!("{text}, reached"));
        assert_eq!(Goal::at_most(ms(5), terms()).to_string(), format!("{text}, missed by 25 %"));
        let single = Goal::at_most(ms(9), [("3 × p50".to_owned(), ms(9))]).to_string();
        assert_eq!(single, "goal: at most 9.00 ms (3 × p50), reached");
    }

    #[test]
    fn a_rate_is_held_against_the_smallest_term() {
        let terms = || [("0.25 × plain's rate".to_owned(), 300.0), ("2/3 × the floor's rate".to_owned(), 200.0)];
        let text = "goal: at least 200 per second (the smaller of 0.25 × plain's rate: 300 per second and 2/3 × the floor's rate: 200 per \
                    second)";
        assert_eq!(Goal::at_least(200.0, terms()).to_string(), format!("{text}, reached"));
        assert_eq!(Goal::at_least(150.0, terms()).to_string(), format!("{text}, missed by 25 %"));
    }

    #[test]
    fn a_goal_just_missed_is_not_called_reached() {
        let near = Goal::at_most(Duration::from_micros(4001), [("x".to_owned(), ms(4))]);
        assert!(near.to_string().ends_with("missed by 1 %"), "{near}");
        assert!(Goal::at_most(ms(1), []).to_string().contains("unknown"));
    }
}
