//! The raw shape of `agentd.toml`, and its check.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use toolproto::manifest::{HostPort, is_name};
use toolproto::source::{FileError, line_of_key};
use toolproto::units::{Bytes, Span};

use super::access::AccessSection;
use super::{
    Audit, Config, Directories, Limits, ModelConfig, Network, Paths, Retention, RuntimeConfig, Service, Telemetry,
    Timeouts, Uids, WhenBusy, Workspace,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConfigFile {
    version: u32,
    #[serde(default)]
    service: Service,
    #[serde(default)]
    paths: PathsSection,
    #[serde(default)]
    workspace: WorkspaceSection,
    #[serde(default)]
    uids: UidsSection,
    #[serde(default)]
    runtimes: BTreeMap<String, RuntimeSection>,
    #[serde(default)]
    timeouts: TimeoutsSection,
    #[serde(default)]
    limits: Limits,
    #[serde(default)]
    access: Option<AccessSection>,
    #[serde(default)]
    model: BTreeMap<String, ModelConfig>,
    #[serde(default)]
    telemetry: Telemetry,
    #[serde(default)]
    retention: Retention,
    #[serde(default)]
    audit: Audit,
    #[serde(default)]
    network: Network,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PathsSection {
    agents: Option<Vec<PathBuf>>,
    tools: Option<Vec<PathBuf>>,
    policies: Option<Vec<PathBuf>>,
    extensions: Option<Vec<PathBuf>>,
    secrets: Option<Vec<PathBuf>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WorkspaceSection {
    roots: Vec<PathBuf>,
    staging: Vec<PathBuf>,
    busy: WhenBusy,
    max_entries: u64,
    max_bytes: Bytes,
    undo_bytes: Bytes,
}

impl Default for WorkspaceSection {
    fn default() -> Self {
        Self {
            roots: ["/home", "/srv", "/tmp"].map(PathBuf::from).to_vec(),
            staging: Vec::new(),
            busy: WhenBusy::Wait,
            max_entries: 1_000_000,
            max_bytes: Bytes::gib(64),
            undo_bytes: Bytes::gib(4),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct UidsSection {
    service: u32,
    sandboxes: String,
}

impl Default for UidsSection {
    fn default() -> Self {
        Self { service: 69_999, sandboxes: "70000-79999".to_owned() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuntimeSection {
    command: Option<PathBuf>,
    arguments: Option<Vec<String>>,
    #[serde(default)]
    mounts: Vec<PathBuf>,
    probe: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct TimeoutsSection {
    model: Span,
    http: Span,
    database: Span,
    compute: Span,
    build: Span,
    grace: Span,
    warm: Span,
}

impl Default for TimeoutsSection {
    fn default() -> Self {
        Self {
            model: Span::secs(30),
            http: Span::secs(3),
            database: Span::secs(5),
            compute: Span::secs(60),
            build: Span::secs(600),
            grace: Span::millis(500),
            warm: Span::secs(300),
        }
    }
}

/// Longer than that, ending a call would count as hanging.
const LONGEST_GRACE: Duration = Duration::from_secs(60);
/// Below are the accounts of the distribution.
const FIRST_FREE_UID: u32 = 1000;

/// The text of a file, for errors that name a line.
struct Source<'a> {
    file: &'a Path,
    text: &'a str,
}

impl Source<'_> {
    fn refuse(&self, table: &str, key: &str, reason: impl Into<String>) -> FileError {
        FileError { file: self.file.to_owned(), line: line_of_key(self.text, table, key), reason: reason.into() }
    }

    fn absolute(&self, table: &str, key: &str, paths: &[PathBuf]) -> Result<(), FileError> {
        match paths.iter().find(|path| !path.is_absolute()) {
            Some(path) => Err(self.refuse(table, key, format!("`{}` must be an absolute path", path.display()))),
            None => Ok(()),
        }
    }
}

impl ConfigFile {
    pub(super) fn check(self, file: &Path, text: &str) -> Result<Config, FileError> {
        let source = Source { file, text };
        if self.version != 1 {
            let reason = format!("version {} is unknown; this agentd reads version 1", self.version);
            return Err(source.refuse("", "version", reason));
        }
        for (key, name) in
            [("user", &self.service.user), ("group", &self.service.group), ("admin_group", &self.service.admin_group)]
        {
            if name.is_empty() || name.contains(['\0', ':', '/']) {
                return Err(source.refuse("service", key, format!("`{name}` is no name of an account")));
            }
        }
        Ok(Config {
            paths: self.paths.check(&source),
            workspace: self.workspace.check(&source)?,
            uids: self.uids.check(&source)?,
            runtimes: self
                .runtimes
                .into_iter()
                .map(|(name, section)| section.check(&source, name))
                .collect::<Result<_, _>>()?,
            timeouts: self.timeouts.check(&source)?,
            limits: check_limits(self.limits, &source)?,
            access: match self.access {
                Some(section) => section.check(|key, reason| source.refuse("access", key, reason))?,
                None => super::Access::for_service(&self.service),
            },
            models: check_models(self.model, &source)?,
            telemetry: check_telemetry(self.telemetry, &source)?,
            retention: self.retention,
            audit: self.audit,
            network: check_network(self.network, &source)?,
            service: self.service,
            file: file.to_owned(),
        })
    }
}

impl PathsSection {
    fn check(self, source: &Source<'_>) -> Paths {
        let folder = source.file.parent().unwrap_or(Path::new("/"));
        let directories = |named: Option<Vec<PathBuf>>, default: &[&str]| Directories {
            named: named.is_some(),
            list: named
                .unwrap_or_else(|| default.iter().map(PathBuf::from).collect())
                .into_iter()
                .map(|path| folder.join(path))
                .collect(),
        };
        Paths {
            agents: directories(self.agents, &["agents"]),
            tools: directories(self.tools, &["tools"]),
            policies: directories(self.policies, &["/usr/share/agentd/policies", "policies"]),
            extensions: directories(self.extensions, &["extensions"]),
            secrets: directories(self.secrets, &["secrets"]),
        }
    }
}

impl WorkspaceSection {
    fn check(self, source: &Source<'_>) -> Result<Workspace, FileError> {
        source.absolute("workspace", "roots", &self.roots)?;
        source.absolute("workspace", "staging", &self.staging)?;
        if self.max_entries == 0 {
            return Err(source.refuse("workspace", "max_entries", "max_entries is zero; no workspace could be used"));
        }
        Ok(Workspace {
            roots: self.roots,
            staging: self.staging,
            busy: self.busy,
            max_entries: self.max_entries,
            max_bytes: self.max_bytes,
            undo_bytes: self.undo_bytes,
        })
    }
}

impl UidsSection {
    fn check(self, source: &Source<'_>) -> Result<Uids, FileError> {
        let range = || {
            let (first, last) = self.sandboxes.split_once('-')?;
            let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            // The last number is the kernel's "no uid".
            (first <= last && last < u32::MAX).then_some((first, last))
        };
        let (first_sandbox, last_sandbox) = range().ok_or_else(|| {
            let reason = format!("`{}` is no range of uids such as \"70000-79999\"", self.sandboxes);
            source.refuse("uids", "sandboxes", reason)
        })?;
        if first_sandbox < FIRST_FREE_UID {
            let reason = format!("uids below {FIRST_FREE_UID} belong to the system; choose a range above");
            return Err(source.refuse("uids", "sandboxes", reason));
        }
        if self.service == 0 || self.service == u32::MAX {
            return Err(source.refuse("uids", "service", "the daemon must not run as root"));
        }
        let uids = Uids { service: self.service, first_sandbox, last_sandbox };
        if uids.is_sandbox(uids.service) {
            return Err(source.refuse("uids", "service", "service lies in the range of the sandboxes"));
        }
        Ok(uids)
    }
}

impl RuntimeSection {
    fn check(self, source: &Source<'_>, name: String) -> Result<(String, RuntimeConfig), FileError> {
        let table = format!("runtimes.{name}");
        if !is_name(&name) {
            return Err(source.refuse(&table, "", format!("`{name}` is no name of a runtime")));
        }
        if let Some(command) = &self.command
            && !command.is_absolute()
            && command.components().count() != 1
        {
            let reason = format!("`{}` must be an absolute path, or a program's name alone", command.display());
            return Err(source.refuse(&table, "command", reason));
        }
        source.absolute(&table, "mounts", &self.mounts)?;
        if self.mounts.iter().any(|mount| mount.components().count() < 2) {
            return Err(source.refuse(&table, "mounts", "the whole file system cannot be mounted into a sandbox"));
        }
        let config =
            RuntimeConfig { command: self.command, arguments: self.arguments, mounts: self.mounts, probe: self.probe };
        Ok((name, config))
    }
}

impl TimeoutsSection {
    fn check(self, source: &Source<'_>) -> Result<Timeouts, FileError> {
        let tiers = [
            ("model", self.model),
            ("http", self.http),
            ("database", self.database),
            ("compute", self.compute),
            ("build", self.build),
        ];
        if let Some((key, _)) = tiers.iter().find(|(_, span)| span.0.is_zero()) {
            return Err(source.refuse("timeouts", key, format!("{key} is zero; no call could end in time")));
        }
        if self.grace.0 > LONGEST_GRACE {
            let reason = format!("a grace over {} makes ending a call look like hanging", Span(LONGEST_GRACE));
            return Err(source.refuse("timeouts", "grace", reason));
        }
        if self.warm.0.is_zero() {
            let reason = "warm is zero; to start nothing ahead, set [limits] warm_processes = 0".to_owned();
            return Err(source.refuse("timeouts", "warm", reason));
        }
        Ok(Timeouts {
            model: self.model.0,
            http: self.http.0,
            database: self.database.0,
            compute: self.compute.0,
            build: self.build.0,
            grace: self.grace.0,
            warm: self.warm.0,
        })
    }
}

fn check_limits(limits: Limits, source: &Source<'_>) -> Result<Limits, FileError> {
    let counts = [
        ("running_jobs", limits.running_jobs),
        ("queued_jobs", limits.queued_jobs),
        ("jobs_per_user", limits.jobs_per_user),
        ("max_parallel", limits.max_parallel),
        ("running_calls", limits.running_calls),
    ];
    match counts.iter().find(|(_, count)| *count == 0) {
        Some((key, _)) => Err(source.refuse("limits", key, format!("{key} is zero; no job could run"))),
        None => Ok(limits),
    }
}

fn check_network(network: Network, source: &Source<'_>) -> Result<Network, FileError> {
    for (name, addresses) in &network.hosts {
        // As a tool would list it.
        let listed = HostPort::try_from(format!("{name}:1"));
        if !listed.is_ok_and(|listed| listed.host == *name && listed.address().is_none()) {
            let reason = format!("`{name}` is no name of a host in lower case");
            return Err(source.refuse("network.hosts", &format!("\"{name}\""), reason));
        }
        if addresses.is_empty() {
            let reason = format!("{name} has no address; leave it out to ask the host's resolver");
            return Err(source.refuse("network.hosts", &format!("\"{name}\""), reason));
        }
    }
    Ok(network)
}

fn check_telemetry(telemetry: Telemetry, source: &Source<'_>) -> Result<Telemetry, FileError> {
    let is_address = |endpoint: &str| {
        let host = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
        host.is_some_and(|host| host.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '['))
    };
    match &telemetry.otlp_endpoint {
        Some(endpoint) if !is_address(endpoint) => {
            let reason = format!("`{endpoint}` is no address of a collector, such as \"http://127.0.0.1:4318\"");
            Err(source.refuse("telemetry", "otlp_endpoint", reason))
        }
        _ => Ok(telemetry),
    }
}

fn check_models(
    models: BTreeMap<String, ModelConfig>,
    source: &Source<'_>,
) -> Result<BTreeMap<String, ModelConfig>, FileError> {
    for (name, model) in &models {
        let Some(price) = model.price else { continue };
        let rates =
            [("input", Some(price.input)), ("cached_input", price.cached_input), ("output", Some(price.output))];
        for (key, rate) in rates {
            if rate.is_some_and(|rate| !rate.is_finite() || rate < 0.0) {
                let reason = format!("{key} is negative or no number");
                return Err(source.refuse(&format!("model.{name}.price"), key, reason));
            }
        }
    }
    Ok(models)
}
