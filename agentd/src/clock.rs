//! How long a job has run: time that passes while the machine sleeps counts, time while agentd does not run does not.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

/// The longest sleep in one piece. Timers stand still while the machine sleeps, so a deadline that passed meanwhile is seen
/// after at most this time.
const LONGEST_SLEEP: Duration = Duration::from_secs(10);

/// A job's clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    before: Duration,
    started: Instant,
    asleep: Duration,
}

impl Clock {
    /// The clock of a job that has run for `before` already.
    #[must_use]
    pub fn continuing(before: Duration) -> Self {
        Self { before, started: Instant::now(), asleep: time_asleep() }
    }

    /// How long the job has run.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.before + self.started.elapsed() + time_asleep().saturating_sub(self.asleep)
    }

    /// Waits until the job has run for so long.
    pub async fn until(&self, deadline: Duration) {
        loop {
            let left = deadline.saturating_sub(self.elapsed());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(LONGEST_SLEEP)).await;
        }
    }
}

/// How long this machine has slept since it was booted: what CLOCK_BOOTTIME counts and CLOCK_MONOTONIC does not
/// (clock_gettime(2)).
fn time_asleep() -> Duration {
    let read = |clock| {
        let time = clock_gettime(clock);
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    };
    let monotonic = read(ClockId::Monotonic);
    let difference = read(ClockId::Boottime).saturating_sub(monotonic);
    // The two are read one after the other; what lies below this is that, and no sleep.
    if difference < Duration::from_millis(100) { Duration::ZERO } else { difference }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_goes_on_where_it_stood() {
        let clock = Clock::continuing(Duration::from_secs(60));
        clock.until(Duration::from_secs(100)).await;
        let elapsed = clock.elapsed();
        assert!(elapsed >= Duration::from_secs(100) && elapsed < Duration::from_secs(101), "{elapsed:?}");
        clock.until(Duration::from_secs(5)).await;
    }
}
