//! How long work stood still on this host for want of processor, memory or input and output: the kernel's pressure stall
//! information, read when somebody asks for the figures.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Unit;

const RESOURCES: [&str; 3] = ["cpu", "memory", "io"];

/// Reads `cpu`, `memory` and `io` in a directory.
#[derive(Debug)]
pub(super) struct Pressure {
    directory: PathBuf,
}

impl Pressure {
    /// The whole host's.
    pub(super) fn of_host() -> Self {
        Self { directory: "/proc/pressure".into() }
    }
}

impl Collector for Pressure {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let stalls = RESOURCES.into_iter().flat_map(|resource| {
            // A kernel without it has no figures, which is no reason to withhold the others.
            let text = fs::read_to_string(self.directory.join(resource)).unwrap_or_default();
            stalls(&text).into_iter().map(move |(share, time)| (resource, share, time))
        });
        let stalls: Vec<_> = stalls.collect();
        if stalls.is_empty() {
            return Ok(());
        }
        let help = "How long some or all work of the host waited for a resource";
        let mut family = encoder.encode_descriptor("host_stalled", help, Some(&Unit::Seconds), MetricType::Counter)?;
        for (resource, share, time) in stalls {
            let labels = [("resource", resource), ("share", share)];
            ConstCounter::new(time.as_secs_f64()).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// Whose wait, and how long, of a file such as `some avg10=0.00 avg60=0.00 avg300=0.00 total=12345`, in microseconds.
fn stalls(text: &str) -> Vec<(&'static str, Duration)> {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace();
        let share = match words.next()? {
            "some" => "some",
            "full" => "full",
            _ => return None,
        };
        let total = words.find_map(|word| word.strip_prefix("total="))?.parse().ok()?;
        Some((share, Duration::from_micros(total)))
    };
    text.lines().filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn what_the_kernel_counts_stands_in_the_text() {
        let folder = tempfile::tempdir().unwrap();
        let line = |share: &str, total: u64| format!("{share} avg10=1.25 avg60=0.00 avg300=0.00 total={total}\n");
        fs::write(folder.path().join("memory"), line("some", 2_500_000) + &line("full", 500_000)).unwrap();
        let mut registry = Registry::with_prefix("agentd");
        registry.register_collector(Box::new(Pressure { directory: folder.path().to_owned() }));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "# TYPE agentd_host_stalled_seconds counter",
            "agentd_host_stalled_seconds_total{resource=\"memory\",share=\"some\"} 2.5",
            "agentd_host_stalled_seconds_total{resource=\"memory\",share=\"full\"} 0.5",
        ] {
            assert!(text.contains(line), "{line} is missing from\n{text}");
        }
        assert!(!text.contains("cpu"), "{text}");
    }

    #[test]
    fn a_kernel_without_it_has_no_figures() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Pressure { directory: "/nonexistent".into() }));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        assert_eq!(text, "# EOF\n");
    }
}
