//! `tool.toml`: how a tool is run, what it accepts and returns, what it may do.
//!
//! The raw shape is what stands in the file; [`ToolManifest`] is what the program uses, built from it once, at load.

mod confined;

use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::confined::inside_folder;
pub use self::confined::{
    ConfinedProgram, DEFAULT_MAX_RESPONSE, HostPort, HostPortError, MAX_HOSTS, Tier, Timeout, TlsMode,
};
pub(crate) use self::confined::{LimitsSection, RunSection, SandboxSection, TimeoutSection};

use crate::source::{FileError, line_of_key, parse_toml};
use crate::units::{Bytes, Span};

/// What a tool's manifest declares about its effects. Undeclared means stateful and serial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effects {
    /// Nothing declared.
    Undeclared,
    /// It changes nothing: it sees the workspace read-only, so this is enforced.
    ReadOnly,
    /// It changes the workspace.
    MutatesWorkspace,
    /// It has effects outside the workspace.
    StatefulAction,
}

impl Effects {
    /// The word in receipts.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Undeclared => "undeclared",
            Self::ReadOnly => "read_only",
            Self::MutatesWorkspace => "mutates_workspace",
            Self::StatefulAction => "stateful_action",
        }
    }
}

/// How the program runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Execution {
    /// What it declares about its effects.
    pub effects: Effects,
    /// No other call of any job that uses this tool at the same time.
    pub exclusive: bool,
    /// Safe to repeat with the same idempotency key.
    pub idempotent: bool,
    /// May run beside others: declared read-only and nothing against it.
    pub concurrent: bool,
}

/// When the breaker opens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Breaker {
    /// How many calls are looked at.
    pub window: u32,
    /// Fewest calls before it may open.
    pub min_calls: u32,
    /// Share of failures that opens it.
    pub failure_rate: f64,
    /// Share of slow calls that opens it.
    pub slow_rate: f64,
    /// How long it stays open.
    pub open_for: Span,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { window: 20, min_calls: 5, failure_rate: 0.5, slow_rate: 0.8, open_for: Span::secs(30) }
    }
}

/// When a failed call is tried again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retry {
    /// How often in all; 0 and 1 mean once.
    pub attempts: u32,
    /// The tool that is tried instead when the breaker is open or attempts are used up.
    pub fallback: Option<String>,
}

/// Where the workspace stands inside a sandbox.
pub const WORKSPACE: &str = "/workspace";
/// Where it stands for a tool whose processes are started ahead: the directory above holds nothing else, so that what a
/// process may reach is settled before its workspace is there.
pub const LATE_WORKSPACE: &str = "/job/workspace";
/// The most processes of one tool that are started ahead for one job.
pub const MAX_PREWARM: u32 = 16;

/// The least that `spill` may say: what stands for a spilled result must be smaller than the result.
pub const MIN_SPILL: Bytes = Bytes::kib(8);

/// A tool, ready to be planned.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolManifest {
    /// The manifest's version: 1.
    pub version: u32,
    /// The tool's name: lower-case letters, digits and underscores.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// Its program, and what that may do.
    pub program: ConfinedProgram,
    /// Processes started ahead.
    pub prewarm: u32,
    /// From which size on a result is kept apart, and a preview stands for it; absent when none is.
    pub spill: Option<Bytes>,
    /// The input schema's file, relative to the tool's folder.
    pub input_schema: PathBuf,
    /// The output schema's file.
    pub output_schema: Option<PathBuf>,
    /// How it runs.
    pub execution: Execution,
    /// JSON pointers into the arguments that say what a call is about.
    pub context_target: Vec<String>,
    /// When its breaker opens.
    pub breaker: Breaker,
    /// When it is tried again.
    pub retry: Retry,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolFile {
    version: u32,
    name: String,
    description: String,
    run: RunSection,
    contract: ContractSection,
    #[serde(default)]
    execution: ExecutionSection,
    #[serde(default)]
    timeout: TimeoutSection,
    #[serde(default)]
    limits: LimitsSection,
    #[serde(default)]
    sandbox: SandboxSection,
    #[serde(default)]
    context: ContextSection,
    #[serde(default)]
    breaker: Breaker,
    #[serde(default)]
    retry: Retry,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContractSection {
    input: PathBuf,
    output: Option<PathBuf>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ExecutionSection {
    read_only: bool,
    mutates_workspace: bool,
    exclusive: bool,
    stateful_action: bool,
    idempotent: bool,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ContextSection {
    target: Vec<String>,
}

impl ToolManifest {
    /// Reads a `tool.toml`.
    ///
    /// # Errors
    /// With file, line and reason when the text is not TOML, has unknown or missing fields, or contradicts itself.
    pub fn parse(file: &Path, text: &str) -> Result<Self, FileError> {
        let raw: ToolFile = parse_toml(file, text)?;
        let refuse = |table: &str, key: &str, reason: String| FileError {
            file: file.to_owned(),
            line: line_of_key(text, table, key),
            reason,
        };
        if raw.version != 1 {
            return Err(refuse(
                "",
                "version",
                format!("version {} is unknown; this agentd reads version 1", raw.version),
            ));
        }
        if !is_name(&raw.name) {
            let reason = format!(
                "name `{}` must be 1 to 64 lower-case letters, digits and underscores, starting with a letter",
                raw.name
            );
            return Err(refuse("", "name", reason));
        }
        if raw.description.trim().is_empty() {
            return Err(refuse("", "description", "description is empty; the model chooses tools by it".to_owned()));
        }
        let inside =
            |key: &str, path: &Path| inside_folder(key, path).map_err(|reason| refuse("contract", key, reason));
        inside("input", &raw.contract.input)?;
        if let Some(output) = &raw.contract.output {
            inside("output", output)?;
        }
        let (prewarm, spill) = (raw.run.prewarm, raw.limits.spill);
        let program = ConfinedProgram::parse(raw.run, raw.timeout, raw.limits, raw.sandbox)
            .map_err(|misfit| refuse(misfit.table, misfit.key, misfit.reason))?;
        if let Some(pointer) = raw.context.target.iter().find(|pointer| !pointer.starts_with('/')) {
            return Err(refuse("context", "target", format!("`{pointer}` is no JSON pointer: it must start with /")));
        }
        let in_unit = |rate: f64| (0.0..=1.0).contains(&rate);
        if !in_unit(raw.breaker.failure_rate) || !in_unit(raw.breaker.slow_rate) {
            return Err(refuse("breaker", "failure_rate", "failure_rate and slow_rate lie between 0 and 1".to_owned()));
        }
        if prewarm > MAX_PREWARM {
            let reason = format!("prewarm is {prewarm}; at most {MAX_PREWARM} processes are started ahead");
            return Err(refuse("run", "prewarm", reason));
        }
        if let Some(spill) = spill.filter(|spill| *spill < MIN_SPILL || *spill >= program.max_response) {
            let reason = format!(
                "spill is {spill}; it lies between {MIN_SPILL} and max_response_bytes ({}), which bounds every result",
                program.max_response
            );
            return Err(refuse("limits", "spill", reason));
        }
        let execution = execution(&raw.execution).map_err(|reason| refuse("execution", "read_only", reason))?;
        Ok(Self {
            version: raw.version,
            name: raw.name,
            description: raw.description,
            program,
            prewarm,
            spill,
            input_schema: raw.contract.input,
            output_schema: raw.contract.output,
            execution,
            context_target: raw.context.target,
            breaker: raw.breaker,
            retry: raw.retry,
        })
    }
}

impl ToolManifest {
    /// Whether its processes are started ahead of their calls.
    #[must_use]
    pub const fn is_prewarmed(&self) -> bool {
        self.prewarm > 0
    }

    /// Where its calls find the workspace, whether or not their process was started ahead.
    #[must_use]
    pub const fn workspace(&self) -> &'static str {
        if self.is_prewarmed() { LATE_WORKSPACE } else { WORKSPACE }
    }
}

fn execution(raw: &ExecutionSection) -> Result<Execution, String> {
    if raw.read_only && raw.mutates_workspace {
        return Err("read_only and mutates_workspace contradict each other; keep one".to_owned());
    }
    // A read-only tool with outside effects sees the workspace read-only all the same, but runs alone.
    let effects = match (raw.read_only, raw.mutates_workspace, raw.stateful_action) {
        (true, _, _) => Effects::ReadOnly,
        (_, true, _) => Effects::MutatesWorkspace,
        (_, _, true) => Effects::StatefulAction,
        _ => Effects::Undeclared,
    };
    Ok(Execution {
        effects,
        exclusive: raw.exclusive,
        idempotent: raw.idempotent,
        concurrent: raw.read_only && !raw.stateful_action,
    })
}

/// Whether the text can name a tool, an agent, a policy or a runtime.
#[must_use]
pub fn is_name(text: &str) -> bool {
    text.len() <= 64
        && text.starts_with(|first: char| first.is_ascii_lowercase())
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = r#"version = 1
name = "csv_stats"
description = "Counts."
[run]
runtime = "python"
entry = "main.py"
[contract]
input = "input.schema.json"
"#;

    fn parse(text: &str) -> Result<ToolManifest, FileError> {
        ToolManifest::parse(Path::new("tools/t/tool.toml"), text)
    }

    #[test]
    fn what_is_not_said_is_the_careful_choice() {
        let tool = parse(MINIMAL).unwrap();
        assert_eq!(tool.execution.effects, Effects::Undeclared);
        assert!(!tool.execution.concurrent && !tool.execution.idempotent);
        assert_eq!(tool.program.timeout, Timeout::Tier(Tier::Compute));
        assert_eq!(tool.program.max_response, crate::units::Bytes::mib(1));
        assert_eq!(tool.program.policy, "workspace");
        assert!(tool.program.hosts.is_empty());
        assert_eq!(tool.spill, None);
    }

    #[test]
    fn contradictions_are_refused_with_their_line() {
        let cases = [
            ("[execution]\nread_only = true\nmutates_workspace = true\n", 10, "contradict"),
            ("[timeout]\ntier = \"http\"\nafter = \"1s\"\n", 11, "both given"),
            ("[limits]\npids = 0\n", 10, "zero"),
            ("[limits]\nmemory = \"512MB\"\n", 10, "512MiB"),
            ("[limits]\nspill = \"4KiB\"\n", 10, "between 8KiB and max_response_bytes (1MiB)"),
            ("[limits]\nmax_response_bytes = \"64KiB\"\nspill = \"64KiB\"\n", 11, "(64KiB), which bounds"),
            ("[sandbox]\nhosts = [\"example.com\"]\n", 10, "port"),
            ("[sandbox]\nhost = []\n", 10, "did you mean `hosts`"),
            ("[sandbox]\nsecrets = [\"../key\"]\n", 10, "letters, digits"),
            ("[sandbox]\nsecrets = [\"A\"]\nenv = { A = \"b\" }\n", 10, "set in env, too"),
            ("[sandbox]\nhosts = [\"a.b:1\"]\ntls = { \"a.b:2\" = \"off\" }\n", 11, "not among hosts"),
            ("[sandbox]\nhosts = [\"a.b:1\"]\ntls = { \"a.b:1\" = \"on\" }\n", 11, "required"),
        ];
        for (addition, line, words) in cases {
            let error = parse(&format!("{MINIMAL}{addition}")).unwrap_err();
            assert_eq!(error.line, Some(line), "{error}");
            assert!(error.reason.contains(words), "{error}");
        }
    }

    #[test]
    fn what_is_started_ahead_is_bounded_and_finds_its_workspace_elsewhere() {
        let ahead = |count: u32| parse(&MINIMAL.replace("[run]\n", &format!("[run]\nprewarm = {count}\n")));
        assert_eq!(parse(MINIMAL).unwrap().workspace(), WORKSPACE);
        assert_eq!(ahead(MAX_PREWARM).unwrap().workspace(), LATE_WORKSPACE);
        let error = ahead(MAX_PREWARM + 1).unwrap_err();
        assert_eq!(error.line, Some(5), "{error}");
        assert!(error.reason.contains("at most 16"), "{error}");
    }

    #[test]
    fn entries_outside_the_folder_are_refused() {
        for entry in ["../main.py", "/usr/bin/python3", "a/../../b", ""] {
            assert!(parse(&MINIMAL.replace("main.py", entry)).is_err(), "{entry}");
        }
    }
}
