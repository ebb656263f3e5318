//! The service manager's watchdog (sd_watchdog_enabled(3)), fed by the dispatcher: when the table of jobs or the ledger is
//! stuck, or the runtime runs nothing any more, the service manager hears nothing and restarts agentd.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

use crate::dispatcher::Dispatcher;
use crate::launch::Launch;

/// How often the service manager wants to hear, if at all. It asks the service's main process, which is our parent.
#[must_use]
pub fn period() -> Option<Duration> {
    let parent = rustix::process::getppid().map(rustix::process::Pid::as_raw_nonzero);
    let variable = |name: &str| std::env::var(name).ok();
    let asked = variable("WATCHDOG_PID").and_then(|pid| pid.parse().ok());
    asked_of(asked, parent.map(std::num::NonZeroI32::get), variable("WATCHDOG_USEC").as_deref())
}

fn asked_of(asked: Option<i32>, parent: Option<i32>, microseconds: Option<&str>) -> Option<Duration> {
    if asked.is_some() && asked != parent {
        return None;
    }
    microseconds?.parse().ok().filter(|period| *period > 0).map(Duration::from_micros)
}

/// Tells the service manager three times in each period that all is well, as long as the dispatcher answers, until `stop`.
pub async fn feed<L: Launch>(dispatcher: Dispatcher<L>, period: Duration, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(period / 3);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        dispatcher.pulse().await;
        if let Err(error) = sd_notify::notify(&[NotifyState::Watchdog]) {
            tracing::warn!(%error, "the service manager could not be told that all is well");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_manager_asks_the_launcher_and_the_daemon_answers() {
        assert_eq!(asked_of(Some(7), Some(7), Some("30000000")), Some(Duration::from_secs(30)));
        assert_eq!(asked_of(None, Some(7), Some("1000")), Some(Duration::from_millis(1)));
        assert_eq!(asked_of(Some(8), Some(7), Some("30000000")), None, "another process is asked");
        for none in [None, Some("0"), Some("soon"), Some("")] {
            assert_eq!(asked_of(Some(7), Some(7), none), None);
        }
    }
}
