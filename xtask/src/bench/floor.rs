//! The floor: what the kernel alone takes for a launch of `true` under `strict`, as a program in C finds it that does each operation
//! with the fewest system calls.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::samples::{Samples, milliseconds};
use super::{Bench, Row, compile, source};
use crate::demo::{self, Daemon};
use crate::process;

/// The start of a program without anything else, as the program in C calls it.
const PLAIN: &str = "plain";
/// The operations that together are a launch: as the program in C calls them, and in the table.
const OPERATIONS: [(&str, &str); 8] = [
    (PLAIN, "plain start"),
    ("namespaces", "namespaces"),
    ("pid_namespace", "PID namespace"),
    ("cgroup", "cgroup"),
    ("mounts", "mounts"),
    ("identity", "ids and capabilities"),
    ("landlock", "Landlock"),
    ("seccomp", "seccomp"),
];
/// How often each is done in one batch. A program that has just started pays for its own memory first.
const ROUNDS: usize = 3;
/// Places of a sandbox that show nothing of the host.
const MADE: [&str; 6] = ["/proc", "/dev", "/tmp", "/sys", "/run", "/workspace"];
/// How long a cgroup's last process may take to be gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// Takes samples of the floor, in turns with whatever is held against it.
pub(super) struct Meter {
    program: PathBuf,
    cgroup: Cgroup,
    binds: Vec<PathBuf>,
    batches: Vec<Batch>,
}

impl Meter {
    /// Makes the program ready and tries it: a host that cannot do one of the operations has no floor.
    pub(super) fn prepare(bench: &Bench, daemon: &Daemon) -> Result<Self> {
        let program = bench.folder.join("floor");
        compile(&source("floor.c"), &program)?;
        // What a call really sees: the plan is the launcher's to make.
        let mounts = ["exec", "--policy", "strict", "--", "cat", "/proc/self/mountinfo"];
        let mounts = process::output(&mut daemon.agentctl(mounts)?)?;
        let binds = binds(&mounts).into_iter().map(Path::to_owned).collect();
        let meter = Self { program, cgroup: Cgroup::make()?, binds, batches: Vec::new() };
        meter.run("alone", &[1])?;
        Ok(meter)
    }

    /// Takes one batch of samples.
    pub(super) fn sample(&mut self) -> Result<()> {
        self.batches.push(Batch::parse(&self.run("alone", &[ROUNDS])?)?);
        Ok(())
    }

    /// The floor by all samples since it was last asked for.
    pub(super) fn floor(&mut self) -> Floor {
        Floor::of(&std::mem::take(&mut self.batches))
    }

    /// Launches per second, by so many processes at once.
    pub(super) fn rate(&self, processes: usize, each: usize) -> Result<f64> {
        rate_in(&self.run("together", &[processes, each])?)
    }

    fn run(&self, what: &str, numbers: &[usize]) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.arg(what).arg(&self.cgroup.0).args(numbers.iter().map(usize::to_string)).args(&self.binds);
        process::output(&mut command)
    }
}

/// Nanoseconds of each operation, without what it has in common with another: of what takes next to nothing, now and then less than
/// none.
struct Batch {
    operations: [i64; OPERATIONS.len()],
    together: i64,
    bare_child: i64,
}

impl Batch {
    fn parse(text: &str) -> Result<Self> {
        let found: Value = serde_json::from_str(text).context("reading what the floor's program found")?;
        let time = |name: &str| found[name].as_i64().with_context(|| format!("the floor's program found no `{name}`"));
        let mut operations = [0; OPERATIONS.len()];
        for (operation, (name, _)) in operations.iter_mut().zip(OPERATIONS) {
            *operation = time(name)?;
        }
        Ok(Self { operations, together: time("together")?, bare_child: time("bare_child")? })
    }
}

/// What each operation takes, p50.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Floor {
    operations: [Duration; OPERATIONS.len()],
    /// All of them as one launch, whose child is forked.
    together: Duration,
    /// A child that only ends.
    bare_child: Duration,
}

impl Floor {
    fn of(batches: &[Batch]) -> Self {
        let median = |time: &dyn Fn(&Batch) -> i64| {
            let mut samples = Samples::default();
            for batch in batches {
                samples.push(Duration::from_nanos(time(batch).try_into().unwrap_or(0)));
            }
            samples.p50()
        };
        Self {
            operations: std::array::from_fn(|index| median(&|batch| batch.operations.get(index).copied().unwrap_or(0))),
            together: median(&|batch| batch.together),
            bare_child: median(&|batch| batch.bare_child),
        }
    }

    /// The whole launch: the sum.
    pub(super) fn launch(&self) -> Duration {
        self.operations.iter().sum()
    }

    /// What the sandbox adds to a plain start.
    pub(super) fn beyond_plain(&self) -> Duration {
        let others = self.operations.iter().zip(OPERATIONS).filter(|(_, (name, _))| *name != PLAIN);
        others.map(|(operation, _)| operation).sum()
    }

    fn row(&self) -> Row {
        let operations = self.operations.iter().zip(OPERATIONS);
        let listed: Vec<_> =
            operations.map(|(time, (_, name))| format!("{name} {:.3} ms", milliseconds(*time))).collect();
        Row::new(
            ROW,
            format!("{:.2} ms", milliseconds(self.launch())),
            format!(
                "the sum of {}; all of it as one launch: {:.2} ms, of which {:.3} ms are a fork and an exit",
                listed.join(", "),
                milliseconds(self.together),
                milliseconds(self.bare_child)
            ),
        )
    }
}

const ROW: &str = "the kernel's floor of such a launch from nothing: each operation alone, p50";

/// The line of the table.
pub(super) fn row(floor: &Result<Floor>) -> Row {
    match floor {
        Ok(floor) => floor.row(),
        Err(error) => Row::new(ROW, "not measured", format!("{error:#}")),
    }
}

fn rate_in(text: &str) -> Result<f64> {
    let found: Value = serde_json::from_str(text).context("reading what the floor's program found")?;
    let number = |name: &str| found[name].as_f64().with_context(|| format!("the floor's program found no `{name}`"));
    Ok(number("launches")? * 1e9 / number("nanoseconds")?)
}

/// What a sandbox sees of the host, by its list of mounts (proc(5), mountinfo). A mount below another comes with that.
fn binds(mountinfo: &str) -> Vec<&Path> {
    let mut binds: Vec<&Path> = Vec::new();
    for point in mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new) {
        let is_made = point == Path::new("/") || MADE.iter().any(|made| point.starts_with(made));
        if !is_made && !binds.iter().any(|bind| point.starts_with(bind)) {
            binds.push(point);
        }
    }
    binds
}

/// A cgroup to make others in; gone with this value, and with what is left in it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn make() -> Result<Self> {
        let root = demo::cgroup_root().context("this host has no cgroup v2")?;
        let path = root.join(format!("floor-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // An interrupted run leaves launches behind; without any there is nothing to kill.
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let patience = Instant::now() + PATIENCE;
        while let Err(error) = remove(&self.0) {
            if Instant::now() > patience {
                eprintln!("{} is left behind: {error}", self.0.display());
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Removes a cgroup and those below it. Its files go with it, and cannot be removed before.
fn remove(cgroup: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(cgroup)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUND: &str = r#"{"plain":600000,"bare_child":150000,"mount_namespace":60000,"namespaces":500000,"pid_namespace":10000,
        "cgroup":120000,"mounts":610000,"identity":20000,"landlock":90000,"seccomp":50000,"together":2500000}"#;

    #[test]
    fn a_launch_is_the_sum_of_its_operations() {
        let floor = Floor::of(&[Batch::parse(FOUND).unwrap()]);
        assert_eq!(floor.launch(), Duration::from_micros(2000));
        assert_eq!(floor.beyond_plain(), Duration::from_micros(1400));
        assert_eq!(floor.together, Duration::from_micros(2500));
        let row = floor.row();
        assert_eq!(row.measured, "2.00 ms");
        assert!(row.against.contains("namespaces 0.500 ms, PID namespace 0.010 ms"), "{}", row.against);
    }

    #[test]
    fn what_costs_nothing_is_not_less_than_nothing() {
        let batch = |nanoseconds: i64| {
            let found = FOUND.replace("\"pid_namespace\":10000", &format!("\"pid_namespace\":{nanoseconds}"));
            Batch::parse(&found).unwrap()
        };
        let launch = |batches: &[Batch]| Floor::of(batches).launch();
        assert_eq!(launch(&[batch(-3000), batch(4000), batch(9000)]), Duration::from_micros(1994));
        assert_eq!(launch(&[batch(-3000)]), Duration::from_micros(1990));
    }

    #[test]
    fn an_operation_that_is_missing_is_named() {
        let error = Batch::parse(&FOUND.replace("landlock", "other")).err().unwrap();
        assert!(error.to_string().contains("`landlock`"), "{error}");
        assert_eq!(row(&Err(error)).measured, "not measured");
    }

    #[test]
    fn launches_are_counted_per_second() {
        assert!((rate_in(r#"{"launches":480,"nanoseconds":800000000}"#).unwrap() - 600.0).abs() < 1e-9);
        assert!(rate_in("{}").is_err());
    }

    #[test]
    fn binds_are_what_shows_the_host() {
        let mountinfo = "50 1 0:40 / / ro - tmpfs tmpfs ro\n51 50 0:41 / /dev rw - tmpfs tmpfs rw\n\
                         52 51 0:42 / /dev/pts rw - devpts devpts rw\n53 50 8:1 /usr /usr ro - ext4 /dev/vda ro\n\
                         54 53 8:2 / /usr/local ro - ext4 /dev/vdb ro\n55 50 8:1 /etc/magic /etc/magic ro - ext4 /dev/vda ro\n\
                         56 50 0:43 / /proc ro - proc proc ro\n57 50 0:44 / /workspace rw - tmpfs tmpfs rw\n";
        assert_eq!(binds(mountinfo), [Path::new("/usr"), Path::new("/etc/magic")]);
    }
}
