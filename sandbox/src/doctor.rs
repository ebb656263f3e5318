//! What this host can enforce, found out by doing it: each finding is the outcome of an attempt, never of a version number.
//!
//! Nothing is left behind: probes run in children that end, on detached mounts, and in a cgroup that is removed.

mod advice;
mod trial;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use self::advice::advice;
use crate::catalog::Catalog;
use crate::cgroup;
use crate::config::Config;
use crate::host::{Host, LimitsMode, Mechanism};
use crate::plan;
use crate::workspace::{Owner, view};

/// Version of the report's JSON.
pub const VERSION: u32 = 1;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// Whether everything is there that the policies require.
    pub ok: bool,
    /// One attempt each.
    pub findings: Vec<Finding>,
    /// One policy each.
    pub policies: Vec<PolicyFinding>,
}

/// One attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was tried, such as `landlock_files`, `runtime:python`, `workspace_overlay:/srv`.
    pub name: String,
    /// Whether it works.
    pub works: bool,
    /// What it is for, in one sentence.
    pub meaning: String,
    /// Why it does not work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What is lost without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// How to get it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// Whether a policy can be enforced here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyFinding {
    /// Its name.
    pub name: String,
    /// Whether its calls run under `--limits required`.
    pub enforceable: bool,
    /// What it requires and the host lacks.
    pub missing: Vec<String>,
}

/// Tries everything. Forks, so the calling process must have one thread; it must be root.
#[must_use]
pub fn examine(config: &Config, catalog: &Catalog) -> Report {
    let host = Host::probe(LimitsMode::BestEffort);
    let policies: Vec<_> = catalog
        .policies
        .values()
        .map(|policy| {
            let missing = plan::unenforceable(&host, policy);
            PolicyFinding { name: policy.name.clone(), enforceable: missing.is_empty(), missing }
        })
        .collect();
    let mut findings: Vec<_> = Mechanism::ALL.iter().map(|mechanism| of_mechanism(&host, *mechanism)).collect();
    findings.push(of_cgroup_place());
    for root in &config.workspace.roots {
        findings.extend(of_root(root, config.uids.first_sandbox));
    }
    findings.push(of_clock());
    let mut runtimes = BTreeMap::new();
    for (name, runtime) in &catalog.runtimes {
        let needed_by = catalog.tools.values().filter(|tool| tool.manifest.program.runtime == *name).count();
        let outcome = runtime.as_ref().map_err(|missing| missing.reason.clone());
        let outcome = outcome.and_then(|runtime| trial::run(&host, catalog, runtime, config.uids.first_sandbox));
        runtimes.insert(name.clone(), (needed_by, outcome));
    }
    let runtimes_work = runtimes.values().all(|(needed_by, outcome)| *needed_by == 0 || outcome.is_ok());
    findings.extend(runtimes.into_iter().map(|(name, (needed_by, outcome))| of_runtime(&name, needed_by, outcome)));
    let ok = runtimes_work && policies.iter().all(|policy| policy.enforceable);
    Report { version: VERSION, ok, findings, policies }
}

fn finding(name: String, meaning: &str, outcome: Result<(), String>) -> Finding {
    let about = name.split_once(':').map_or(name.as_str(), |(kind, _)| kind).to_owned();
    let (cost, remedy) = match &outcome {
        Ok(()) => (None, None),
        Err(_) => {
            let (cost, remedy) = advice(&about);
            (Some(cost.to_owned()), Some(remedy.to_owned()))
        }
    };
    Finding { name, works: outcome.is_ok(), meaning: meaning.to_owned(), reason: outcome.err(), cost, remedy }
}

fn of_mechanism(host: &Host, mechanism: Mechanism) -> Finding {
    let outcome = host.missing(mechanism).map_or(Ok(()), |reason| Err(reason.to_owned()));
    finding(mechanism.as_str().to_owned(), mechanism.meaning(), outcome)
}

fn of_cgroup_place() -> Finding {
    let meaning = "Each call has a cgroup of its own: it is born in it, counted by it, and killed with it.";
    finding(
        "cgroups".to_owned(),
        meaning,
        cgroup::available_controllers().map(|_| ()).map_err(|error| error.to_string()),
    )
}

/// Views of a root itself: mounts that are never attached.
fn of_root(root: &Path, sandbox_id: u32) -> Vec<Finding> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(directory) = rustix::fs::open(root, flags, Mode::empty()) else {
        // A default root that this host does not have.
        return Vec::new();
    };
    let owner = rustix::fs::fstat(&directory).map(|found| Owner { uid: found.st_uid, gid: found.st_gid });
    let shows_the_owner = |mount: std::os::fd::OwnedFd| {
        let seen = rustix::fs::fstat(&mount).map_err(|error| error.to_string())?.st_uid;
        if seen == sandbox_id { Ok(()) } else { Err(format!("the owner is shown as uid {seen}, not as the sandbox's")) }
    };
    let attempt =
        |view: fn(std::os::fd::BorrowedFd<'_>, Owner, u32) -> Result<std::os::fd::OwnedFd, view::ViewError>| {
            let owner = owner.map_err(|error| error.to_string())?;
            view(directory.as_fd(), owner, sandbox_id).map_err(|error| causes(&error)).and_then(shows_the_owner)
        };
    vec![
        finding(
            format!("workspace_idmap:{}", root.display()),
            "Files that a tool makes belong to the workspace's owner on disk.",
            attempt(view::direct),
        ),
        finding(
            format!("workspace_overlay:{}", root.display()),
            "A tool sees a workspace without being able to change it, or to reach sockets in it.",
            attempt(view::read_only),
        ),
    ]
}

fn of_clock() -> Finding {
    let outcome = match crate::sys::clock::is_synchronised() {
        Ok(true) => Ok(()),
        Ok(false) => Err("the kernel says that its clock is not synchronised".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    finding("clock".to_owned(), "Times in receipts are those of the rest of the world.", outcome)
}

fn of_runtime(name: &str, needed_by: usize, outcome: Result<(), String>) -> Finding {
    let meaning = match needed_by {
        0 => format!("Tools in {name} run inside a sandbox; none is configured."),
        1 => format!("Tools in {name} run inside a sandbox; one is configured."),
        count => format!("Tools in {name} run inside a sandbox; {count} are configured."),
    };
    finding(format!("runtime:{name}"), &meaning, outcome)
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
