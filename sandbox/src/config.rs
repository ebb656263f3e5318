//! `agentd.toml`: read by the launcher and by agentd alike, each using its part.
//!
//! The raw shape is [`crate::config::file`]'s; [`Config`] is what the programs use: defaults filled in, paths absolute,
//! contradictions refused with file and line.

mod access;
mod file;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use toolproto::manifest::{Tier, Timeout};
use toolproto::source::{FileError, parse_toml};
use toolproto::units::{Bytes, Span};

pub use self::access::{Access, Subject, Who};

/// The file's name within the configuration directory.
pub const FILE_NAME: &str = "agentd.toml";
/// Where programs are looked for; never on PATH, where shims lie.
pub const PROGRAM_PATH: [&str; 3] = ["/usr/local/bin", "/usr/bin", "/bin"];

/// A checked `agentd.toml`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The file it was read from.
    pub file: PathBuf,
    /// `[service]`.
    pub service: Service,
    /// `[paths]`.
    pub paths: Paths,
    /// `[workspace]`.
    pub workspace: Workspace,
    /// `[uids]`.
    pub uids: Uids,
    /// `[runtimes.NAME]`: what differs from the built-in runtimes.
    pub runtimes: BTreeMap<String, RuntimeConfig>,
    /// `[timeouts]`.
    pub timeouts: Timeouts,
    /// `[limits]`.
    pub limits: Limits,
    /// `[access]`.
    pub access: Access,
    /// `[model.NAME]`.
    pub models: BTreeMap<String, ModelConfig>,
    /// `[telemetry]`.
    pub telemetry: Telemetry,
    /// `[retention]`.
    pub retention: Retention,
    /// `[audit]`.
    pub audit: Audit,
    /// `[network]`.
    pub network: Network,
}

/// `[network]`: how agentd reaches the hosts that calls list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// Addresses of names that the host's resolver is not asked for.
    pub hosts: BTreeMap<String, Vec<IpAddr>>,
}

/// The account that agentd runs as.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Service {
    /// The service user; where it does not exist, the uid `[uids] service`.
    pub user: String,
    /// The group that may use the socket.
    pub group: String,
    /// The group whose members see everybody's jobs.
    pub admin_group: String,
}

impl Default for Service {
    fn default() -> Self {
        Self { user: "agentd".to_owned(), group: "agentd".to_owned(), admin_group: "agentd-admin".to_owned() }
    }
}

/// A list of directories and whether the file names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directories {
    /// Absolute, in the order they are searched.
    pub list: Vec<PathBuf>,
    /// Named in the file: a missing directory is an error, not skipped.
    pub named: bool,
}

/// Where agents, tools, policies, extensions and secrets lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Agent files.
    pub agents: Directories,
    /// Tool folders.
    pub tools: Directories,
    /// Policy files; a later directory's policy replaces an earlier one's of the same name.
    pub policies: Directories,
    /// Extension folders.
    pub extensions: Directories,
    /// Files with one secret each, by its name; read by the launcher alone.
    pub secrets: Directories,
}

/// Which directories can be workspaces, and their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace {
    /// Directories beneath which a caller may name a workspace; `<state-dir>/workspaces` always counts too.
    pub roots: Vec<PathBuf>,
    /// Staging directories, one per file system, instead of the default place.
    pub staging: Vec<PathBuf>,
    /// What a call does whose workspace another job holds.
    pub busy: WhenBusy,
    /// Most entries of a tree.
    pub max_entries: u64,
    /// Most bytes of a tree's files.
    pub max_bytes: Bytes,
    /// Most bytes that the undo store of one workspace keeps.
    pub undo_bytes: Bytes,
}

/// What a call does whose workspace another job holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhenBusy {
    /// It waits, at most as long as it could run.
    Wait,
    /// It fails with WORKSPACE_BUSY at once.
    Refuse,
}

/// Uids that agentd uses, as gids too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uids {
    /// Of agentd, where the service account does not exist.
    pub service: u32,
    /// First uid of the sandboxes.
    pub first_sandbox: u32,
    /// Last uid of the sandboxes, inclusive.
    pub last_sandbox: u32,
}

impl Uids {
    /// Whether a uid belongs to the sandboxes.
    #[must_use]
    pub const fn is_sandbox(&self, uid: u32) -> bool {
        self.first_sandbox <= uid && uid <= self.last_sandbox
    }
}

/// One `[runtimes.NAME]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// The program, by absolute path, or by name for [`PROGRAM_PATH`].
    pub command: Option<PathBuf>,
    /// Arguments before the tool's entry, instead of the built-in ones.
    pub arguments: Option<Vec<String>>,
    /// Host directories that the sandbox sees read-only besides the policy's.
    pub mounts: Vec<PathBuf>,
    /// Arguments with which the program shows that it works; an empty list when it is not to be tried.
    pub probe: Option<Vec<String>>,
}

/// `[timeouts]`: the tiers' lengths and the grace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Calls of models.
    pub model: Duration,
    /// HTTP requests.
    pub http: Duration,
    /// Database queries.
    pub database: Duration,
    /// Computation.
    pub compute: Duration,
    /// Compilers and the like.
    pub build: Duration,
    /// Between SIGTERM and the kill.
    pub grace: Duration,
    /// How long a process that was started ahead waits for its call.
    pub warm: Duration,
}

impl Timeouts {
    /// How long a time-out lasts.
    #[must_use]
    pub const fn of(&self, timeout: Timeout) -> Duration {
        match timeout {
            Timeout::After(time) => time,
            Timeout::Tier(Tier::Model) => self.model,
            Timeout::Tier(Tier::Http) => self.http,
            Timeout::Tier(Tier::Database) => self.database,
            Timeout::Tier(Tier::Compute) => self.compute,
            Timeout::Tier(Tier::Build) => self.build,
        }
    }
}

/// `[limits]` of the whole daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Jobs that run at once.
    pub running_jobs: u32,
    /// Jobs that wait.
    pub queued_jobs: u32,
    /// Jobs of one user that run at once.
    pub jobs_per_user: u32,
    /// Calls of one job that run at once.
    pub max_parallel: u32,
    /// Calls of all jobs that run at once.
    pub running_calls: u32,
    /// Processes of all jobs together that wait for their calls.
    pub warm_processes: u32,
    /// Memory of all calls together.
    pub memory: Option<Bytes>,
    /// Longest request body.
    pub request_bytes: Bytes,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            running_jobs: 16,
            queued_jobs: 1000,
            jobs_per_user: 8,
            max_parallel: 8,
            running_calls: 64,
            warm_processes: 16,
            memory: None,
            request_bytes: Bytes::mib(4),
        }
    }
}

/// One `[model.NAME]`: what agents refer to by `provider` and `model`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The server's base URL.
    pub endpoint: Option<String>,
    /// Longest context, in tokens.
    pub context: Option<u64>,
    /// Requests at once.
    pub max_parallel: Option<u32>,
    /// Requests per minute.
    pub requests_per_minute: Option<u32>,
    /// What it costs.
    pub price: Option<Price>,
}

/// USD per million tokens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// Input.
    pub input: f64,
    /// Input that the server had cached; like `input` where absent.
    pub cached_input: Option<f64>,
    /// Output.
    pub output: f64,
}

/// `[telemetry]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Telemetry {
    /// The collector that traces go to, by OTLP over HTTP, as `http://HOST:PORT`; none without it.
    pub otlp_endpoint: Option<String>,
    /// The service's name in traces.
    pub service_name: String,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { otlp_endpoint: None, service_name: "agentd".to_owned() }
    }
}

/// `[retention]`: how long ended jobs and what belongs to them are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retention {
    /// Ended jobs with their events and private workspaces.
    pub jobs: Span,
    /// Receipts.
    pub receipts: Span,
    /// Artifacts of large results.
    pub artifacts: Span,
}

impl Default for Retention {
    fn default() -> Self {
        let days = |n: u64| Span::secs(n * 24 * 3600);
        Self { jobs: days(30), receipts: days(365), artifacts: days(30) }
    }
}

/// `[audit]`: audit.log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Audit {
    /// Whether it is written.
    pub enabled: bool,
    /// Its size when it is rotated.
    pub max_bytes: Bytes,
    /// Rotated files that are kept.
    pub keep: u32,
}

impl Default for Audit {
    fn default() -> Self {
        Self { enabled: true, max_bytes: Bytes::mib(64), keep: 8 }
    }
}

impl Config {
    /// Reads `agentd.toml` in a configuration directory.
    ///
    /// # Errors
    /// With file, line and reason when it cannot be read or does not fit.
    pub fn load(config_dir: &Path) -> Result<Self, FileError> {
        let config_dir = std::path::absolute(config_dir)
            .map_err(|error| FileError::whole(config_dir, format!("the path cannot be made absolute: {error}")))?;
        let file = config_dir.join(FILE_NAME);
        let text = std::fs::read_to_string(&file)
            .map_err(|error| FileError::whole(&file, format!("the configuration cannot be read: {error}")))?;
        Self::parse(&file, &text)
    }

    /// Checks the text of an `agentd.toml`; paths in it are relative to the folder of `file`, which must be absolute.
    ///
    /// # Errors
    /// With file, line and reason.
    pub fn parse(file: &Path, text: &str) -> Result<Self, FileError> {
        parse_toml::<file::ConfigFile>(file, text)?.check(file, text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Config, FileError> {
        Config::parse(Path::new("/etc/agentd/agentd.toml"), text)
    }

    #[test]
    fn defaults_are_those_of_the_documentation() {
        let config = parse("version = 1\n").unwrap();
        assert_eq!(config.service.admin_group, "agentd-admin");
        let policies = ["/usr/share/agentd/policies", "/etc/agentd/policies"].map(PathBuf::from).to_vec();
        assert_eq!(config.paths.policies, Directories { list: policies, named: false });
        assert_eq!(config.workspace.roots, ["/home", "/srv", "/tmp"].map(PathBuf::from));
        assert_eq!((config.uids.service, config.uids.first_sandbox, config.uids.last_sandbox), (69999, 70000, 79999));
        assert_eq!(config.timeouts.of(Timeout::Tier(Tier::Http)), Duration::from_secs(3));
        assert_eq!(config.timeouts.grace, Duration::from_millis(500));
        assert_eq!(config.limits.max_parallel, 8);
    }

    #[test]
    fn paths_are_relative_to_the_file() {
        let config =
            parse("version = 1\n[paths]\npolicies = [\"../../policies\"]\ntools = [\"/opt/tools\"]\n").unwrap();
        assert_eq!(config.paths.policies.list, [PathBuf::from("/etc/agentd/../../policies")]);
        assert!(config.paths.policies.named && !config.paths.agents.named);
        assert_eq!(config.paths.tools.list, [PathBuf::from("/opt/tools")]);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_line() {
        let cases = [
            ("version = 2\n", 1, "version 2"),
            ("version = 1\nservice = 3\n", 2, "invalid type"),
            ("version = 1\n[servce]\n", 2, "did you mean `service`"),
            ("version = 1\n[uids]\nsandboxes = \"70000\"\n", 3, "range"),
            ("version = 1\n[uids]\nsandboxes = \"80000-70000\"\n", 3, "range"),
            ("version = 1\n[uids]\nsandboxes = \"0-70000\"\n", 3, "1000"),
            ("version = 1\n[uids]\nservice = 70001\n", 3, "sandboxes"),
            ("version = 1\n[uids]\nservice = 0\n", 3, "root"),
            ("version = 1\n[timeouts]\nhttp = \"3\"\n", 3, "duration"),
            ("version = 1\n[timeouts]\nhttp = \"0s\"\n", 3, "zero"),
            ("version = 1\n[timeouts]\ngrace = \"2m\"\n", 3, "grace"),
            ("version = 1\n[timeouts]\nwarm = \"0s\"\n", 3, "warm_processes = 0"),
            ("version = 1\n[limits]\nmax_parallel = 0\n", 3, "zero"),
            ("version = 1\n[workspace]\nroots = [\"srv\"]\n", 3, "absolute"),
            ("version = 1\n[runtimes.Bun]\ncommand = \"/opt/bun\"\n", 2, "name"),
            ("version = 1\n[runtimes.bun]\ncommand = \"opt/bun\"\n", 3, "absolute"),
            ("version = 1\n[runtimes.bun]\nmounts = [\"opt\"]\n", 3, "absolute"),
            ("version = 1\n[runtimes.bun]\nmounts = [\"/\"]\n", 3, "whole"),
            ("version = 1\n[access]\nagents = { \"x\" = [\"bob\"] }\n", 3, "user:NAME"),
            ("version = 1\n[model.gpt.price]\ninput = -1.0\noutput = 1.0\n", 3, "negative"),
        ];
        for (text, line, words) in cases {
            let error = parse(text).unwrap_err();
            assert_eq!(error.line, Some(line), "{text}{error}");
            assert!(error.reason.contains(words), "{text}{error}");
        }
        assert_eq!(parse("[service]\n").unwrap_err().line, Some(1), "a missing version");
    }

    #[test]
    fn a_full_file_is_read() {
        let config = parse(
            r#"version = 1
[service]
user = "svc"
[workspace]
roots = ["/data", "work"]
undo_bytes = "2GiB"
[runtimes.bun]
command = "/opt/bun/bun"
arguments = ["run"]
mounts = ["/opt/bun"]
probe = ["--version"]
[timeouts]
compute = "2m"
grace = "1s"
[limits]
running_jobs = 4
memory = "8GiB"
[access]
agents = { "*" = ["group:agentd"], payroll = ["user:alice", "user:1000"] }
adhoc = ["group:agentd-admin"]
[model.gpt]
endpoint = "http://127.0.0.1:8000/v1"
[model.gpt.price]
input = 1.5
output = 6.0
[telemetry]
otlp_endpoint = "http://127.0.0.1:4318"
[retention]
jobs = "720h"
[audit]
keep = 3
"#
            .replace("\"work\"", "\"/work\"")
            .as_str(),
        )
        .unwrap();
        assert_eq!(config.timeouts.compute, Duration::from_secs(120));
        assert_eq!(config.runtimes["bun"].arguments.as_deref(), Some(&["run".to_owned()][..]));
        assert_eq!(config.models["gpt"].price.unwrap().output, 6.0);
        assert_eq!(config.limits.memory, Some(Bytes::gib(8)));
        assert_eq!(config.retention.jobs, Span::secs(30 * 24 * 3600));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(version = 1\n)?(\\[[a-z.]{1,12}\\]\n)?([a-z_]{1,10} = (\"[ -~]{0,12}\"|[0-9-]{1,12})\n){0,3}") {
            let _ = parse(&text);
        }

        #[test]
        fn a_range_of_uids_holds_what_lies_in_it(first in 1000u32..100_000, length in 1u32..50_000, uid in any::<u32>()) {
            let last = first + length - 1;
            let service = last + 1;
            let text = format!("version = 1\n[uids]\nservice = {service}\nsandboxes = \"{first}-{last}\"\n");
            let uids = parse(&text).unwrap().uids;
            prop_assert_eq!(uids.is_sandbox(uid), (first..=last).contains(&uid));
        }
    }
}
