//! What a control group has seen: kills for want of memory, refused forks.

use std::collections::BTreeSet;
use std::path::Path;

use toolproto::receipt::Denial;

use super::Controller;
use super::files::keyed;

/// Which limits were hit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Processes killed because memory.max was reached.
    pub oom_kills: u64,
    /// How often it was slowed down and its memory reclaimed because memory.high was exceeded.
    pub slowed: u64,
    /// Forks refused because pids.max was reached.
    pub forks_refused: u64,
    /// Whether a private file system was full at the end.
    pub no_space: bool,
}

impl Events {
    /// The limits that were hit, with the rules that would raise them.
    #[must_use]
    pub fn denials(&self) -> Vec<Denial> {
        let limit = |hit: u64, detail: &str, key: &str| {
            (hit > 0).then(|| Denial::seen("limit", format!("{detail} ({hit} times)"), format!("[limits] {key}")))
        };
        let memory = limit(self.oom_kills, "memory: processes were killed", "memory");
        let high = limit(self.slowed, "memory_high: processes were slowed down and memory reclaimed", "memory_high");
        let pids = limit(self.forks_refused, "pids: processes could not be started", "pids");
        memory.into_iter().chain(high).chain(pids).collect()
    }

    pub(super) fn read(directory: &Path, controllers: &BTreeSet<Controller>) -> Self {
        let keyed = |controller, file: &str, key: &str| {
            controllers.contains(&controller).then(|| keyed(&directory.join(file), key)).flatten()
        };
        // memory.events counts the whole subtree, .local only what this cgroup's own limit did.
        let oom_kills = keyed(Controller::Memory, "memory.events.local", "oom_kill").unwrap_or(0);
        let slowed = keyed(Controller::Memory, "memory.events.local", "high").unwrap_or(0);
        let forks_refused = keyed(Controller::Pids, "pids.events.local", "max")
            .or_else(|| keyed(Controller::Pids, "pids.events", "max"))
            .unwrap_or(0);
        Self { oom_kills, slowed, forks_refused, no_space: false }
    }
}
