//! Extensions: programs that are asked at fixed points of a job, and may answer with feedback and little else.
//!
//! An extension speaks the tool protocol, with its own operations. What it may say at which point:
//!
//! | operation | `feedback` | `disable_tools` | `failure` | `continue_loop` | `replacement_content` |
//! |---|---|---|---|---|---|
//! | `before_turn` | yes | yes | yes | | |
//! | `after_tool_batch` | yes | yes | yes | | |
//! | `before_final_answer` | yes | yes | yes | yes | yes |
//! | `after_run` | | | | | |

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::manifest::{ConfinedProgram, LimitsSection, RunSection, SandboxSection, TimeoutSection, is_name};
use crate::request::Operation;
use crate::source::{FileError, line_of_key, parse_toml};

/// The longest feedback or failure message, in bytes.
pub const MAX_WORDS: usize = 16 << 10;

/// Where an extension is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Point {
    /// Before a model is asked.
    BeforeTurn,
    /// When all calls of a batch have their results.
    AfterToolBatch,
    /// When the model has proposed a final answer, before it is judged.
    BeforeFinalAnswer,
    /// When the job has its result. Nobody waits for it.
    AfterRun,
}

impl Point {
    /// As it stands in manifests and requests.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BeforeTurn => "before_turn",
            Self::AfterToolBatch => "after_tool_batch",
            Self::BeforeFinalAnswer => "before_final_answer",
            Self::AfterRun => "after_run",
        }
    }

    /// The operation of the request.
    #[must_use]
    pub const fn operation(self) -> Operation {
        match self {
            Self::BeforeTurn => Operation::BeforeTurn,
            Self::AfterToolBatch => Operation::AfterToolBatch,
            Self::BeforeFinalAnswer => Operation::BeforeFinalAnswer,
            Self::AfterRun => Operation::AfterRun,
        }
    }

    /// Whether a member of a reply means anything here.
    fn takes(self, member: &str) -> bool {
        match member {
            "feedback" | "disable_tools" | "failure" => self != Self::AfterRun,
            "continue_loop" | "replacement_content" => self == Self::BeforeFinalAnswer,
            _ => false,
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// `extension.toml`: how an extension is run, and where it is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtensionManifest {
    /// The manifest's version: 1.
    pub version: u32,
    /// The extension's name, in lower-case letters, digits and underscores.
    pub name: String,
    /// What it does, for people.
    pub description: String,
    /// Where it is asked.
    pub points: BTreeSet<Point>,
    /// Whether a job ends when it fails. Otherwise it is passed over.
    pub required: bool,
    /// Its program, and what that may do.
    pub program: ConfinedProgram,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExtensionFile {
    version: u32,
    name: String,
    description: String,
    operations: Vec<Point>,
    #[serde(default)]
    required: bool,
    run: RunSection,
    #[serde(default)]
    timeout: TimeoutSection,
    #[serde(default)]
    limits: LimitsSection,
    #[serde(default)]
    sandbox: SandboxSection,
}

impl ExtensionManifest {
    /// Reads an `extension.toml`.
    ///
    /// # Errors
    /// With file, line and reason when the text is not TOML, has unknown or missing fields, or contradicts itself.
    pub fn parse(file: &Path, text: &str) -> Result<Self, FileError> {
        let raw: ExtensionFile = parse_toml(file, text)?;
        let refuse = |table: &str, key: &str, reason: String| FileError {
            file: file.to_owned(),
            line: line_of_key(text, table, key),
            reason,
        };
        if raw.version != 1 {
            let reason = format!("version {} is unknown; this agentd reads version 1", raw.version);
            return Err(refuse("", "version", reason));
        }
        if !is_name(&raw.name) {
            let reason = format!(
                "name `{}` must be 1 to 64 lower-case letters, digits and underscores, starting with a letter",
                raw.name
            );
            return Err(refuse("", "name", reason));
        }
        if raw.description.trim().is_empty() {
            return Err(refuse("", "description", "description is empty".to_owned()));
        }
        if raw.operations.is_empty() {
            let reason = "operations is empty; the extension would never be asked".to_owned();
            return Err(refuse("", "operations", reason));
        }
        if raw.run.prewarm > 0 {
            let reason = "prewarm is for tools; extensions are started when they are asked".to_owned();
            return Err(refuse("run", "prewarm", reason));
        }
        if raw.limits.spill.is_some() {
            let reason = "spill is for tools; nobody refers to what an extension says".to_owned();
            return Err(refuse("limits", "spill", reason));
        }
        let points: BTreeSet<Point> = raw.operations.into_iter().collect();
        if raw.required && points.iter().all(|point| *point == Point::AfterRun) {
            let reason = "required means nothing here: nobody waits for after_run".to_owned();
            return Err(refuse("", "required", reason));
        }
        let program = ConfinedProgram::parse(raw.run, raw.timeout, raw.limits, raw.sandbox)
            .map_err(|misfit| refuse(misfit.table, misfit.key, misfit.reason))?;
        Ok(Self {
            version: raw.version,
            name: raw.name,
            description: raw.description,
            points,
            required: raw.required,
            program,
        })
    }
}

/// Why an extension ends a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stop {
    /// In words.
    pub message: String,
}

/// What an extension says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opinion {
    /// What the model is told.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub feedback: Option<String>,
    /// Whether the job goes on though the model has proposed a final answer.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub continue_loop: bool,
    /// The final answer instead of the model's: an object.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub replacement_content: Option<Map<String, Value>>,
    /// That the job ends, and why.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failure: Option<Stop>,
    /// Tools that the model is not offered any more.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub disable_tools: Vec<String>,
}

/// A result that is no opinion.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reply breaks the protocol at /result{pointer}: {reason}")]
pub struct OpinionError {
    /// JSON pointer within the result.
    pub pointer: String,
    /// What is wrong there.
    pub reason: String,
}

impl Opinion {
    /// Reads the result of a reply.
    ///
    /// # Errors
    /// When it has other members than an extension may give at this point, or one of another type.
    pub fn read(point: Point, result: Value) -> Result<Self, OpinionError> {
        let refuse = |pointer: &str, reason: String| OpinionError { pointer: pointer.to_owned(), reason };
        let Value::Object(members) = result else {
            return Err(refuse("", "is no object".to_owned()));
        };
        if let Some(member) = members.keys().find(|member| !point.takes(member)) {
            return Err(refuse(&format!("/{member}"), format!("an extension cannot say this at {point}")));
        }
        let opinion: Self =
            serde_json::from_value(Value::Object(members)).map_err(|error| refuse("", error.to_string()))?;
        let words = [
            ("/feedback", opinion.feedback.as_ref()),
            ("/failure/message", opinion.failure.as_ref().map(|stop| &stop.message)),
        ];
        for (pointer, words) in words {
            let Some(words) = words else { continue };
            if words.trim().is_empty() {
                return Err(refuse(pointer, "is empty".to_owned()));
            }
            if words.len() > MAX_WORDS {
                return Err(refuse(pointer, format!("has {} bytes; at most {MAX_WORDS} are taken", words.len())));
            }
        }
        if opinion.continue_loop && opinion.feedback.is_none() {
            return Err(refuse(
                "/feedback",
                "is missing beside continue_loop: the model must be told what to do".to_owned(),
            ));
        }
        if point == Point::BeforeFinalAnswer && opinion.feedback.is_some() && !opinion.continue_loop {
            let reason = "stands without continue_loop: true, so that the model would never hear it";
            return Err(refuse("/feedback", reason.to_owned()));
        }
        Ok(opinion)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MINIMAL: &str = "version = 1\nname = \"guard\"\ndescription = \"Guards.\"\noperations = [\"before_turn\"]\n[run]\n\
        runtime = \"python\"\nentry = \"main.py\"\n";

    fn parse(text: &str) -> Result<ExtensionManifest, FileError> {
        ExtensionManifest::parse(Path::new("extensions/guard/extension.toml"), text)
    }

    #[test]
    fn what_is_not_said_is_the_careful_choice() {
        let extension = parse(MINIMAL).unwrap();
        assert_eq!(extension.points, BTreeSet::from([Point::BeforeTurn]));
        assert!(!extension.required && extension.program.hosts.is_empty());
        assert_eq!(extension.program.policy, "workspace");
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_line() {
        for (from, to, line, words) in [
            ("version = 1", "version = 2", 1, "version 2"),
            ("\"guard\"", "\"Guard\"", 2, "lower-case"),
            ("\"Guards.\"", "\"\"", 3, "empty"),
            ("[\"before_turn\"]", "[]", 4, "never be asked"),
            ("[\"before_turn\"]", "[\"before_call\"]", 4, "before_turn"),
            ("[\"before_turn\"]", "[\"after_run\"]\nrequired = true", 5, "nobody waits"),
            ("entry = \"main.py\"", "entry = \"../main.py\"", 7, "inside"),
            ("entry = \"main.py\"", "entry = \"main.py\"\nprewarm = 1", 8, "for tools"),
            ("entry = \"main.py\"", "entry = \"main.py\"\n[limits]\nspill = \"64KiB\"", 9, "for tools"),
            ("entry = \"main.py\"", "entry = \"main.py\"\n[contract]\ninput = \"i.json\"", 8, "contract"),
        ] {
            let error = parse(&MINIMAL.replace(from, to)).unwrap_err();
            assert_eq!(error.line, Some(line), "{error}");
            assert!(error.reason.contains(words), "{error}");
        }
    }

    #[test]
    fn what_an_extension_may_say_depends_on_where_it_is_asked() {
        let answer = json!({"feedback": "f", "disable_tools": ["a"], "failure": {"message": "m"}});
        for point in [Point::BeforeTurn, Point::AfterToolBatch] {
            assert_eq!(Opinion::read(point, json!({})), Ok(Opinion::default()));
            assert!(Opinion::read(point, answer.clone()).is_ok());
        }
        let last = json!({"continue_loop": true, "feedback": "f", "replacement_content": {"done": 1}});
        assert!(Opinion::read(Point::BeforeFinalAnswer, last.clone()).is_ok());
        assert_eq!(Opinion::read(Point::BeforeFinalAnswer, json!({})), Ok(Opinion::default()));
        assert_eq!(Opinion::read(Point::BeforeTurn, last).unwrap_err().pointer, "/continue_loop");
        assert_eq!(Opinion::read(Point::AfterRun, json!({})), Ok(Opinion::default()));
        assert!(Opinion::read(Point::AfterRun, answer).is_err());
    }

    #[test]
    fn nothing_else_is_taken() {
        for (result, pointer) in [
            (json!([]), ""),
            (json!({"call_tool": "x"}), "/call_tool"),
            (json!({"feedback": 1}), ""),
            (json!({"feedback": " "}), "/feedback"),
            (json!({"feedback": "x".repeat(MAX_WORDS + 1)}), "/feedback"),
            (json!({"failure": {"message": ""}}), "/failure/message"),
            (json!({"failure": {"message": "m", "code": "SUCCESS"}}), ""),
            (json!({"continue_loop": true}), "/feedback"),
            (json!({"feedback": "unheard"}), "/feedback"),
            (json!({"replacement_content": "text"}), ""),
        ] {
            let error = Opinion::read(Point::BeforeFinalAnswer, result.clone()).unwrap_err();
            assert_eq!(error.pointer, pointer, "{result}");
        }
    }
}
