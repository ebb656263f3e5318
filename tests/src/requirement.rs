//! What a test needs of its host. A test that cannot run says why; where all must run (AGENTD_TEST_MUST_RUN=1), that is a failure.

use std::path::Path;

/// The variable that turns skips into failures.
pub const MUST_RUN: &str = "AGENTD_TEST_MUST_RUN";

/// Returns from the test unless everything that it needs is there.
#[macro_export]
macro_rules! needs {
    ($($requirement:expr),+ $(,)?) => {
        $(if let Err(reason) = $requirement {
            $crate::requirement::skip(&reason);
            return;
        })+
    };
}

/// Notes that a test did not run.
///
/// # Panics
/// Where all tests must run.
pub fn skip(reason: &str) {
    assert!(std::env::var_os(MUST_RUN).is_none_or(|value| value != "1"), "cannot run, but must: {reason}");
    eprintln!("skipped: {reason}");
}

/// The test runs as root: agentd starts as root.
///
/// # Errors
/// With the reason to skip.
pub fn root() -> Result<(), String> {
    if rustix::process::geteuid().is_root() {
        Ok(())
    } else {
        Err("agentd starts as root; this test does not run as root".to_owned())
    }
}

/// A program lies at this path.
///
/// # Errors
/// With the reason to skip.
pub fn program(path: &str) -> Result<(), String> {
    if Path::new(path).exists() { Ok(()) } else { Err(format!("{path} is not installed")) }
}

/// The controllers that limits need are offered by cgroup v2.
///
/// # Errors
/// With those that are missing.
pub fn cgroup_controllers() -> Result<(), String> {
    let offered = ["/sys/fs/cgroup/cgroup.controllers", "/sys/fs/cgroup/unified/cgroup.controllers"]
        .iter()
        .find_map(|file| std::fs::read_to_string(file).ok())
        .unwrap_or_default();
    let missing: Vec<&str> = ["cpu", "memory", "pids"]
        .into_iter()
        .filter(|name| !offered.split_whitespace().any(|one| one == *name))
        .collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("no cgroup v2 controller for {}", missing.join(", "))) }
}
