//! `agents/NAME.toml`: an agent, immutable once loaded.
//!
//! The raw shape is what stands in the file; [`Agent`] is what the program uses, built from it once, at load. Its digest is
//! stored with each job.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sandbox::protocol::SliceLimits;
use serde::Deserialize;
use serde_json::{Value, json};
use toolproto::digest::Digest;
use toolproto::manifest::is_name;
use toolproto::source::{FileError, alternatives, line_of_key, parse_toml};
use toolproto::units::{Bytes, DiskRates, Span, thousandths};

use crate::model::settings::{ModelFile, ModelSettings};
use crate::schema::Schema;
use crate::session::budget::Budget;
use crate::session::completion::Contract;
use crate::session::{context, progress, question, tool_search, wait};

/// An agent: what it is told, what it may use, what it must answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Agent {
    /// Its name; also the file's.
    pub name: String,
    /// What it is for, for people.
    pub description: String,
    /// What the model is told first: the file's text, then how to answer. The same bytes in each request.
    pub system_prompt: String,
    /// Digest of the file and its schemas.
    pub digest: Digest,
    /// The models, in the order in which they are asked.
    pub models: Vec<ModelSettings>,
    /// The tools it may use.
    pub tools: Vec<String>,
    /// How the model finds tools that it is not told of from the start; absent where it is told of all.
    pub tool_search: Option<tool_search::Rules>,
    /// The extensions that watch over its jobs, in the order in which they are asked.
    pub extensions: Vec<String>,
    /// What a goal must satisfy.
    pub goal: Schema,
    /// What its final answer must satisfy.
    pub result: Schema,
    /// What a job may use.
    pub budget: Budget,
    /// When room is made in the conversation.
    pub context: context::Rules,
    /// When it counts as repeating itself.
    pub progress: progress::Rules,
    /// What must have been seen before its answer counts.
    pub completion: Contract,
    /// How often an unusable final answer may be mended.
    pub max_repairs: u32,
    /// Which calls a person must approve.
    pub approval: ApprovalRules,
    /// How long a person may take to answer a question; absent where the model cannot ask.
    pub ask_user: Option<Duration>,
    /// The longest time for which a plan may wait; absent where it cannot.
    pub wait: Option<Duration>,
    /// Whether a job whose budget is used up gets one last turn to sum up.
    pub grace_call: bool,
    /// What its models cost: the dearest one, for what is asked before it is known who answers.
    pub price: Option<Price>,
    /// The most calls of a job at the same time.
    pub max_parallel: usize,
    /// Limits of all calls of a job together.
    pub limits: SliceLimits,
}

/// Which calls a person must approve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRules {
    /// Calls of these tools.
    pub tools: Vec<String>,
    /// How long a person may think.
    pub timeout: Duration,
}

/// What a model costs, in US dollars per million tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    /// For tokens that it reads.
    pub input: f64,
    /// For tokens that it reads from its cache.
    pub cached_input: f64,
    /// For tokens that it writes.
    pub output: f64,
}

impl Price {
    /// US dollars for so many tokens; `cached` of the `input` came from the cache.
    #[must_use]
    pub fn cost(&self, input: u64, cached: u64, output: u64) -> f64 {
        let fresh = input.saturating_sub(cached);
        (fresh as f64 * self.input + cached.min(input) as f64 * self.cached_input + output as f64 * self.output) / 1e6
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AgentFile {
    version: u32,
    name: String,
    description: String,
    system_prompt: String,
    model: ModelFile,
    tools: Vec<String>,
    #[serde(default)]
    extensions: Vec<String>,
    goal: SchemaSection,
    result: SchemaSection,
    #[serde(default)]
    budget: BudgetSection,
    #[serde(default)]
    context: ContextSection,
    #[serde(default, rename = "loop")]
    looping: LoopSection,
    #[serde(default)]
    completion: CompletionSection,
    #[serde(default)]
    approval: ApprovalSection,
    #[serde(default)]
    interaction: InteractionSection,
    tool_search: Option<ToolSearchSection>,
    wait: Option<WaitSection>,
    #[serde(default)]
    limits: LimitsSection,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SchemaSection {
    schema: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct BudgetSection {
    max_turns: u32,
    max_tool_calls: u32,
    wall_seconds: u64,
    max_total_tokens: Option<u64>,
    max_cost_usd: Option<f64>,
    max_cpu_seconds: Option<u64>,
    max_no_progress: Option<u32>,
    grace_call: Option<bool>,
}

impl Default for BudgetSection {
    fn default() -> Self {
        Self {
            max_turns: 30,
            max_tool_calls: 100,
            wall_seconds: 900,
            max_total_tokens: None,
            max_cost_usd: None,
            max_cpu_seconds: None,
            max_no_progress: None,
            grace_call: None,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ContextSection {
    limit: Option<u64>,
    compact_at: Option<f64>,
    entities: Option<Vec<String>>,
    summary: bool,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LoopSection {
    max_same_result: Option<u32>,
    block_turns: Option<u32>,
    mode: LoopMode,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum LoopMode {
    #[default]
    Stop,
    Warn,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct CompletionSection {
    require_mutation: bool,
    require_effects: bool,
    require_verification: Vec<String>,
    require_files: Vec<String>,
    mode: CompletionMode,
    max_repairs: Option<u32>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CompletionMode {
    #[default]
    Strict,
    Advisory,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ApprovalSection {
    tools: Vec<String>,
    timeout: Option<Span>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct InteractionSection {
    ask_user: bool,
    timeout: Option<Span>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolSearchSection {
    #[serde(default)]
    always: Vec<String>,
    #[serde(default = "default_results")]
    results: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WaitSection {
    longest: Span,
}

/// How many tools a search finds at most where the file says nothing.
const fn default_results() -> usize {
    5
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LimitsSection {
    cpu: String,
    memory: Bytes,
    swap: SwapLimit,
    pids: u32,
    memory_high: Option<Bytes>,
    io: DiskRates,
    open_files: u64,
}

impl Default for LimitsSection {
    fn default() -> Self {
        Self {
            cpu: "2".to_owned(),
            memory: Bytes::gib(4),
            swap: SwapLimit(Bytes(0)),
            pids: 100,
            memory_high: None,
            io: DiskRates::default(),
            open_files: 1024,
        }
    }
}

/// Swap is written `0` or as a size.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "toml::Value")]
struct SwapLimit(Bytes);

impl TryFrom<toml::Value> for SwapLimit {
    type Error = String;

    fn try_from(value: toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Integer(0) => Ok(Self(Bytes(0))),
            toml::Value::String(text) => text.parse().map(Self).map_err(|error| format!("{error}")),
            other => Err(format!("`{other}` is not a size: write 0 or text such as \"512MiB\"")),
        }
    }
}

/// How often an unusable final answer may be mended where the file says nothing.
const DEFAULT_REPAIRS: u32 = 2;
/// How long a person may think about a call or a question where the file says nothing.
const DEFAULT_APPROVAL: Duration = Duration::from_secs(600);
/// The smallest context that a conversation can be held in.
const MIN_CONTEXT: u64 = 1000;
/// The most calls of a job at the same time where agentd.toml says nothing.
const DEFAULT_PARALLEL: usize = 8;

impl Agent {
    /// Reads an agent from its file, with the schemas that it names beside it.
    ///
    /// # Errors
    /// With file, line and reason.
    pub fn load(file: &Path) -> Result<Self, FileError> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| FileError::whole(file, format!("cannot be read: {error}")))?;
        Self::parse(file, &text)
    }

    /// Reads an agent from its file's text.
    ///
    /// # Errors
    /// With file, line and reason when the text is not TOML, has unknown or missing fields, contradicts itself, asks for
    /// what this agentd cannot do, or names a schema that cannot be used.
    pub fn parse(file: &Path, text: &str) -> Result<Self, FileError> {
        let raw: AgentFile = parse_toml(file, text)?;
        let refuse = |table: &str, key: &str, reason: String| FileError {
            file: file.to_owned(),
            line: line_of_key(text, table, key),
            reason,
        };
        if raw.version != 1 {
            let reason = format!("version {} is unknown; this agentd reads version 1", raw.version);
            return Err(refuse("", "version", reason));
        }
        if !is_name(&raw.name) || file.file_stem().is_none_or(|stem| stem != raw.name.as_str()) {
            let reason = format!("name `{}` must be the file's name without .toml, in lower-case letters", raw.name);
            return Err(refuse("", "name", reason));
        }
        if raw.system_prompt.trim().is_empty() {
            return Err(refuse("", "system_prompt", "system_prompt is empty".to_owned()));
        }
        for (key, names) in [("tools", &raw.tools), ("extensions", &raw.extensions)] {
            if let Some(name) = names.iter().enumerate().find_map(|(n, name)| names[..n].contains(name).then_some(name))
            {
                return Err(refuse("", key, format!("`{name}` is named twice")));
            }
        }
        for (table, key, named) in [
            ("completion", "require_verification", &raw.completion.require_verification),
            ("approval", "tools", &raw.approval.tools),
            ("tool_search", "always", raw.tool_search.as_ref().map_or(&Vec::new(), |search| &search.always)),
        ] {
            if let Some(tool) = named.iter().find(|tool| !raw.tools.contains(tool)) {
                let hint = alternatives(tool, raw.tools.iter().map(String::as_str));
                return Err(refuse(table, key, format!("`{tool}` is not among the agent's tools{hint}")));
            }
        }
        for (wanted, section, name) in [
            (raw.interaction.ask_user, "interaction", question::NAME),
            (raw.tool_search.is_some(), "tool_search", tool_search::NAME),
            (raw.wait.is_some(), "wait", wait::NAME),
        ] {
            if wanted && raw.tools.iter().any(|tool| tool == name) {
                let reason = format!("`{name}` is the built-in tool that [{section}] asks for; name yours otherwise");
                return Err(refuse("", "tools", reason));
            }
        }
        if raw.tool_search.as_ref().is_some_and(|search| search.results == 0) {
            return Err(refuse("tool_search", "results", "results must be at least 1".to_owned()));
        }
        let schema = |table: &str, section: &SchemaSection| {
            let path = file.parent().unwrap_or(Path::new("")).join(&section.schema);
            load_schema(&path).map_err(|reason| refuse(table, "schema", format!("{}: {reason}", path.display())))
        };
        let (goal, result) = (schema("goal", &raw.goal)?, schema("result", &raw.result)?);
        let progress =
            progress(&raw).map_err(|(table, key)| refuse(table, key, format!("{key} must be at least 1")))?;
        let models = raw
            .model
            .checked(file.parent().unwrap_or(Path::new("")))
            .map_err(|misfit| refuse(misfit.table, misfit.key, misfit.reason))?;
        let digest = Digest::of_json(&json!({"file": text, "goal": goal.source(), "result": result.source()}))
            .map_err(|error| FileError::whole(file, error.to_string()))?;
        Ok(Self {
            system_prompt: system_prompt(&raw.system_prompt, &result),
            budget: budget(&raw.budget).map_err(|(key, reason)| refuse("budget", key, reason))?,
            limits: limits(&raw.limits).map_err(|(key, reason)| refuse("limits", key, reason))?,
            context: context(&raw.context).map_err(|(key, reason)| refuse("context", key, reason))?,
            progress,
            max_repairs: raw.completion.max_repairs.unwrap_or(DEFAULT_REPAIRS),
            completion: Contract {
                mutation: raw.completion.require_mutation,
                effects: raw.completion.require_effects,
                verification: raw.completion.require_verification,
                files: raw.completion.require_files,
                strict: raw.completion.mode == CompletionMode::Strict,
            },
            approval: ApprovalRules {
                tools: raw.approval.tools,
                timeout: raw.approval.timeout.map_or(DEFAULT_APPROVAL, |span| span.0),
            },
            ask_user: raw.interaction.ask_user.then(|| raw.interaction.timeout.map_or(DEFAULT_APPROVAL, |span| span.0)),
            tool_search: raw
                .tool_search
                .map(|search| tool_search::Rules { always: search.always, results: search.results }),
            wait: raw.wait.map(|wait| wait.longest.0),
            grace_call: raw.budget.grace_call.unwrap_or(true),
            price: None,
            max_parallel: DEFAULT_PARALLEL,
            name: raw.name,
            description: raw.description,
            digest,
            models,
            tools: raw.tools,
            extensions: raw.extensions,
            goal,
            result,
        })
    }
}

fn context(raw: &ContextSection) -> Result<context::Rules, (&'static str, String)> {
    let defaults = context::Rules::default();
    let compact_at = raw.compact_at.unwrap_or(defaults.compact_at);
    if !(compact_at > 0.0 && compact_at <= 1.0) {
        return Err(("compact_at", "compact_at must be more than 0 and at most 1".to_owned()));
    }
    let limit = raw.limit.unwrap_or(defaults.limit);
    if limit < MIN_CONTEXT {
        return Err(("limit", format!("limit must be at least {MIN_CONTEXT} tokens")));
    }
    let patterns = raw.entities.iter().flatten().map(|text| regex::Regex::new(text));
    let entities =
        patterns.collect::<Result<_, _>>().map_err(|error| ("entities", error.to_string().replace('\n', " ")))?;
    Ok(context::Rules { limit, compact_at, entities, summary: raw.summary })
}

fn progress(raw: &AgentFile) -> Result<progress::Rules, (&'static str, &'static str)> {
    let defaults = progress::Rules::default();
    let positive = |table, key, given: Option<u32>, default| match given {
        Some(0) => Err((table, key)),
        given => Ok(given.unwrap_or(default)),
    };
    Ok(progress::Rules {
        max_same_result: positive("loop", "max_same_result", raw.looping.max_same_result, defaults.max_same_result)?,
        block_turns: positive("loop", "block_turns", raw.looping.block_turns, defaults.block_turns)?,
        max_no_progress: positive("budget", "max_no_progress", raw.budget.max_no_progress, defaults.max_no_progress)?,
        stop: raw.looping.mode == LoopMode::Stop,
    })
}

fn load_schema(path: &Path) -> Result<Schema, String> {
    let bytes = std::fs::read(path).map_err(|error| format!("cannot be read: {error}"))?;
    let value: Value = toolproto::strict_json::parse(&bytes).map_err(|error| format!("not JSON: {error}"))?;
    Schema::compile(value).map_err(|error| error.to_string())
}

/// The model must know the shape of the answer, so the schema is part of what it is told.
fn system_prompt(text: &str, result: &Schema) -> String {
    format!(
        "{}\n\nWhen the goal is reached, answer without calling a tool, with one JSON object and nothing around it. It must \
         satisfy this JSON Schema:\n{}",
        text.trim_end(),
        result.source()
    )
}

fn budget(raw: &BudgetSection) -> Result<Budget, (&'static str, String)> {
    let positive = |key: &'static str, value: u64| {
        if value > 0 { Ok(value) } else { Err((key, format!("{key} must be at least 1"))) }
    };
    positive("max_turns", raw.max_turns.into())?;
    positive("max_tool_calls", raw.max_tool_calls.into())?;
    positive("max_total_tokens", raw.max_total_tokens.unwrap_or(1))?;
    positive("max_cpu_seconds", raw.max_cpu_seconds.unwrap_or(1))?;
    if raw.max_cost_usd.is_some_and(|cost| !(cost.is_finite() && cost > 0.0)) {
        return Err(("max_cost_usd", "max_cost_usd must be more than 0".to_owned()));
    }
    Ok(Budget {
        max_turns: raw.max_turns,
        max_tool_calls: raw.max_tool_calls,
        max_total_tokens: raw.max_total_tokens,
        max_cost_usd: raw.max_cost_usd,
        max_cpu: raw.max_cpu_seconds.map(Duration::from_secs),
        wall: Duration::from_secs(positive("wall_seconds", raw.wall_seconds)?),
    })
}

fn limits(raw: &LimitsSection) -> Result<SliceLimits, (&'static str, String)> {
    let cpu_milli = thousandths(&raw.cpu)
        .ok_or_else(|| ("cpu", format!("cpu `{}` must be a number of processors, such as \"1.5\"", raw.cpu)))?;
    if raw.pids == 0 || raw.memory.0 == 0 || raw.open_files < 3 {
        let key = if raw.pids == 0 {
            "pids"
        } else if raw.memory.0 == 0 {
            "memory"
        } else {
            "open_files"
        };
        return Err((key, format!("{key} is too low to run anything")));
    }
    if raw.memory_high.is_some_and(|high| high.0 == 0 || high >= raw.memory) {
        return Err((
            "memory_high",
            "memory_high must be more than 0 and less than memory, which ends the call".to_owned(),
        ));
    }
    if let Some(direction) = raw.io.zero() {
        return Err(("io", format!("io.{direction} is zero: nothing could ever go from or to a disk")));
    }
    Ok(SliceLimits {
        cpu_milli: Some(cpu_milli),
        memory: Some(raw.memory),
        memory_high: raw.memory_high,
        swap: Some(raw.swap.0),
        pids: Some(raw.pids),
        io: raw.io,
        open_files: Some(raw.open_files),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = r#"version = 1
name = "reporter"
description = "Writes reports."
system_prompt = "You write reports."
tools = ["stats"]
[model]
provider = "replay"
cassette = "c.jsonl"
[goal]
schema = "any.json"
[result]
schema = "any.json"
"#;

    fn parse(text: &str) -> Result<Agent, FileError> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("any.json"), "{\"type\":\"object\"}").unwrap();
        std::fs::write(folder.path().join("broken.json"), "{\"type\":\"objct\"}").unwrap();
        Agent::parse(&folder.path().join("reporter.toml"), text)
    }

    #[test]
    fn what_is_not_said_has_the_documented_value() {
        let agent = parse(MINIMAL).unwrap();
        assert_eq!((agent.budget.max_turns, agent.budget.max_tool_calls), (30, 100));
        assert_eq!(agent.budget.wall, Duration::from_secs(900));
        assert_eq!(agent.limits.cpu_milli, Some(2000));
        assert_eq!(agent.limits.memory, Some(Bytes::gib(4)));
        assert_eq!((agent.limits.pids, agent.limits.open_files), (Some(100), Some(1024)));
    }

    #[test]
    fn the_model_is_told_the_schema_of_the_answer() {
        assert!(parse(MINIMAL).unwrap().system_prompt.ends_with("{\"type\":\"object\"}"));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_with_its_line() {
        let cases = [
            ("[limits]\ncpu = \"two\"\n", 14, "processors"),
            ("[limits]\npids = 0\n", 14, "too low"),
            ("[budget]\nmax_turns = 0\n", 14, "at least 1"),
            ("[tool_search]\nalways = [\"other\"]\n", 14, "not among the agent's tools"),
            ("[tool_search]\nresults = 0\n", 14, "at least 1"),
            ("[context]\nsummary = 1\n", 14, "boolean"),
            ("[budget]\nmax_turn = 3\n", 14, "did you mean `max_turns`"),
            ("[limits]\nio = { write = \"0B\" }\n", 14, "io.write is zero"),
            ("[limits]\nmemory_high = \"4GiB\"\n", 14, "less than memory"),
        ];
        for (addition, line, words) in cases {
            let error = parse(&format!("{MINIMAL}{addition}")).unwrap_err();
            assert_eq!(error.line, Some(line), "{error}");
            assert!(error.reason.contains(words), "{error}");
        }
        let broken = parse(&MINIMAL.replace("[result]\nschema = \"any.json\"", "[result]\nschema = \"broken.json\""));
        assert_eq!(broken.unwrap_err().line, Some(12));
    }

    #[test]
    fn processors_are_counted_in_thousandths() {
        assert_eq!(thousandths("2"), Some(2000));
        assert_eq!(thousandths("0.25"), Some(250));
        for text in ["", ".", "1.", "1.2345", "-1", "1e3", " 1"] {
            assert_eq!(thousandths(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_digest_follows_the_file_and_its_schemas() {
        let first = parse(MINIMAL).unwrap().digest;
        assert_eq!(parse(MINIMAL).unwrap().digest, first);
        assert_ne!(parse(&MINIMAL.replace("Writes", "Draws")).unwrap().digest, first);
    }
}
