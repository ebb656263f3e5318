//! The log: lines on stderr, which under systemd is the journal.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging. `AGENTD_LOG` chooses what is logged, such as `info,agentd::model=debug`.
pub fn start() {
    let filter = EnvFilter::try_from_env("AGENTD_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    // The journal puts its own time before each line.
    if std::env::var_os("JOURNAL_STREAM").is_some() { log.without_time().init() } else { log.init() }
}
