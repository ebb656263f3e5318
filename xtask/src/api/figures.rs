//! The daemon's figures, read by others: the reference parser of OpenMetrics, and Prometheus' own linter.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use crate::guest::debian::{Archive, Suite};
use crate::process;
use crate::project;

/// Asks as a scraper does that reads OpenMetrics, keeps the text, and says how many samples it holds.
const READ: &str = "
import sys, urllib.request
from prometheus_client.openmetrics.parser import text_string_to_metric_families
text = urllib.request.urlopen(sys.argv[1]).read().decode()
open(sys.argv[2], 'w').write(text)
print(sum(len(family.samples) for family in text_string_to_metric_families(text)))
";

/// Checks the figures at an address; they are kept in the folder.
pub(super) fn check(python: &Path, address: &str, folder: &Path) -> Result<()> {
    let figures = folder.join("figures.openmetrics");
    let samples = process::output(Command::new(python).args(["-c", READ, address]).arg(&figures))
        .context("the reference parser does not read the figures")?;
    let samples: usize = samples.trim().parse().context("the number of samples")?;
    ensure!(samples > 20, "there are only {samples} samples");
    let text = fs::read_to_string(&figures).with_context(|| format!("reading {}", figures.display()))?;
    let classic = figures.with_extension("txt");
    fs::write(&classic, in_the_classic_format(&text)).with_context(|| format!("writing {}", classic.display()))?;
    let linted = fs::File::open(&classic)?;
    process::run(Command::new(promtool()?).args(["check", "metrics"]).stdin(Stdio::from(linted)))
        .context("Prometheus' linter finds fault with the figures")?;
    println!("{samples} samples read by the reference parser and passed by promtool");
    Ok(())
}

/// The linter reads the format from before OpenMetrics only: there a counter's family has its sample's name, and nothing has a
/// unit or an end.
fn in_the_classic_format(text: &str) -> String {
    let counters: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut lines = String::new();
    for line in text.lines().filter(|line| !line.starts_with("# UNIT ") && *line != "# EOF") {
        let mut words = line.splitn(4, ' ');
        let renamed = match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(what), Some(family), rest) if counters.contains(&family) => {
                format!("# {what} {family}_total {}", rest.unwrap_or_default())
            }
            _ => line.to_owned(),
        };
        lines.push_str(&renamed);
        lines.push('\n');
    }
    lines
}

/// Prometheus' tool, out of Debian's package.
fn promtool() -> Result<PathBuf> {
    let folder = project::target()?.join("tools/prometheus");
    let program = folder.join("usr/bin/promtool");
    if !program.exists() {
        eprintln!("fetching promtool into {}", folder.display());
        // An old release's program runs on newer ones as well.
        Archive::open(Suite::Bookworm)?.unpack("prometheus", &folder)?;
    }
    if !program.exists() {
        bail!("Debian's package prometheus has no {}", program.display());
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::in_the_classic_format;

    #[test]
    fn counters_are_named_as_their_samples_are() {
        let text = "# HELP a_calls Calls so far.\n# TYPE a_calls counter\na_calls_total 3\n# TYPE a_load gauge\n# UNIT a_load seconds\na_load 1\n# EOF\n";
        let classic = "# HELP a_calls_total Calls so far.\n# TYPE a_calls_total counter\na_calls_total 3\n# TYPE a_load gauge\na_load 1\n";
        assert_eq!(in_the_classic_format(text), classic);
    }
}
