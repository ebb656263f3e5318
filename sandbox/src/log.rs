//! The log of launcher and agentd: lines on stderr, or entries of the journal with their fields where stderr leads there.

use std::io::IsTerminal as _;
use std::os::fd::AsFd as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Chooses what is logged, such as `info,agentd::model=debug`.
const FILTER: &str = "AGENTD_LOG";
/// The device and inode of the journal's stream; see systemd.exec(5).
const STREAM: &str = "JOURNAL_STREAM";
/// Stands before the names of our fields in the journal: a job's id is in `AGENTD_JOB`.
const PREFIX: &str = "AGENTD";

/// Starts logging.
pub fn start() {
    let filter = EnvFilter::try_from_env(FILTER).unwrap_or_else(|_| EnvFilter::new("info"));
    let journal = is_journal().then(tracing_journald::layer).and_then(Result::ok);
    let lines = journal.is_none().then(|| {
        let stderr = std::io::stderr();
        tracing_subscriber::fmt::layer().with_ansi(stderr.is_terminal()).with_writer(std::io::stderr).with_target(false)
    });
    let journal = journal.map(|layer| layer.with_field_prefix(Some(PREFIX.to_owned())));
    tracing_subscriber::registry().with(filter).with(lines).with(journal).init();
}

/// Whether stderr is the stream that the service manager made for the journal; it may have been redirected since.
fn is_journal() -> bool {
    let Ok(stream) = std::env::var(STREAM) else { return false };
    rustix::fs::fstat(std::io::stderr().as_fd()).is_ok_and(|stat| is_same(&stream, stat.st_dev, stat.st_ino))
}

/// Whether a stream's name is that of a file.
fn is_same(stream: &str, device: u64, inode: u64) -> bool {
    stream.split_once(':').is_some_and(|(named, of)| {
        named.parse::<u64>().is_ok_and(|named| named == device) && of.parse::<u64>().is_ok_and(|of| of == inode)
    })
}

#[cfg(test)]
mod tests {
    use super::is_same;

    #[test]
    fn a_stream_is_named_by_device_and_inode() {
        assert!(is_same("8:1234", 8, 1234));
        for other in ["8:1235", "9:1234", "8", "", "8:", "a:b", "8:1234:5"] {
            assert!(!is_same(other, 8, 1234), "{other}");
        }
    }
}
