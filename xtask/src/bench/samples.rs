//! Samples of durations, and what is said about them.

use std::time::Duration;

/// Durations of one thing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    /// Adds one.
    pub(crate) fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    /// Adds another's.
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The sample below which a share of all lie; zero without samples.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index"
        )]
        let rank = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// The median.
    pub(crate) fn p50(&self) -> Duration {
        self.quantile(0.5)
    }

    /// Median and tail in milliseconds.
    pub(crate) fn text(&self) -> String {
        format!("p50 {:.2} ms, p99 {:.2} ms", milliseconds(self.p50()), milliseconds(self.quantile(0.99)))
    }

    /// How many times longer the median is than another's.
    pub(crate) fn times(&self, other: &Self) -> f64 {
        self.p50().as_secs_f64() / other.p50().as_secs_f64()
    }
}

/// A duration in milliseconds.
pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let mut samples = Samples::default();
        assert_eq!(samples.p50(), Duration::ZERO);
        for millis in [5, 1, 4, 2, 3] {
            samples.push(Duration::from_millis(millis));
        }
        assert_eq!(samples.p50(), Duration::from_millis(3));
        assert_eq!(samples.quantile(0.99), Duration::from_millis(5));
        assert_eq!(samples.quantile(0.2), Duration::from_millis(1));
    }
}
