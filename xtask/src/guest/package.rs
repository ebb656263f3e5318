//! What people do with the package, on a Debian with systemd: install it, use it, restart, reboot, upgrade, purge.

use std::time::Duration;

use anyhow::{Result, bail};

use super::debian::Suite;
use super::{Guest, System};
use crate::package;
use crate::project::{self, Profile};

/// How long a step may say nothing.
const PATIENCE: Duration = Duration::from_secs(600);

enum Step {
    /// A function of package.sh, and what it shows.
    Run { function: &'static str, shows: &'static str },
    /// The guest starts anew.
    Reboot,
}

const STEPS: [Step; 14] = [
    Step::Run { function: "install", shows: "apt installs the package, and the socket listens" },
    Step::Run { function: "exposure", shows: "systemd counts an exposure of at most 6.0" },
    Step::Run { function: "socket", shows: "the first client starts the service" },
    Step::Run { function: "result", shows: "an ordinary user in the group gets a result and its receipts" },
    Step::Run { function: "refused", shows: "who is not in the group is refused, and what is another user's" },
    Step::Run { function: "limits", shows: "limits of memory, processes and processor time are kept" },
    Step::Run { function: "reload", shows: "a reload with an invalid file fails with its line, and changes nothing" },
    Step::Run {
        function: "restart",
        shows: "a job goes on after a restart in its middle, and systemd shows its slice",
    },
    Step::Run { function: "before_reboot", shows: "a job runs when the machine is rebooted" },
    Step::Reboot,
    Step::Run { function: "after_reboot", shows: "the job goes on after the reboot" },
    Step::Run { function: "upgrade", shows: "a job goes on after an upgrade in its middle" },
    Step::Run { function: "purge", shows: "purge leaves the receipts" },
    Step::Run { function: "again", shows: "a new installation has them, and purge removes them when asked" },
];

/// Packs the programs, runs the steps and hands over a line for each, and the whole output of one that fails.
pub(crate) fn run(suite: Suite, each: &mut dyn FnMut(&str)) -> Result<()> {
    let packages = package::build(Profile::Debug, &[1, 2])?;
    let mut guest = Guest::start(suite, System::Systemd)?;
    let mut passed = 0;
    for step in &STEPS {
        match step {
            Step::Run { function, shows } => {
                let script = format!(
                    "set -eu; packages={} programs={}; . {}/xtask/src/guest/package.sh; set -x; step_{function}",
                    packages.display(),
                    project::program("", Profile::Debug)?.display(),
                    project::root().display(),
                );
                let mut said = Vec::new();
                let status = guest.stream(&script, PATIENCE, |line| said.push(line.to_owned()));
                if !matches!(status, Ok(0)) {
                    said.iter().for_each(|line| each(line));
                    each(&format!("test {shows} ... FAILED"));
                    bail!("the step `{function}` ended with status {}", status?);
                }
                each(&format!("test {shows} ... ok"));
                passed += 1;
            }
            Step::Reboot => guest.reboot()?,
        }
    }
    each(&format!("test result: ok. {passed} passed; 0 failed"));
    Ok(())
}
