//! The tool under check: its manifest and schemas, how it is started, and arguments that it must take.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jsonschema::Validator;
use serde_json::{Map, Value, json};
use toolproto::manifest::{Tier, Timeout, ToolManifest};
use toolproto::source::FileError;
use toolproto::strict_json;

/// Where the tool's folder lies in the workspace of a check.
pub const WORKSPACE_FOLDER: &str = ".tool";
/// The longest that a probe waits for a tool.
const LONGEST: Duration = Duration::from_secs(60);

/// A tool, ready to be probed.
#[derive(Debug)]
pub struct Subject {
    /// Its manifest.
    pub manifest: ToolManifest,
    /// What its arguments must satisfy.
    pub input: Validator,
    /// What its result must satisfy.
    pub output: Option<Validator>,
    /// Arguments that satisfy the input schema; absent when none could be made.
    pub arguments: Option<Value>,
    /// Whether the folder has `check/`, with what valid calls work on.
    pub is_provided: bool,
    /// Its entry, by its path in the sandbox.
    pub entry: String,
    /// Its time, at most a minute.
    pub time: Duration,
}

impl Subject {
    /// Reads a tool's folder.
    ///
    /// # Errors
    /// When the manifest or a schema is not valid.
    pub fn load(folder: &Path) -> Result<Self, FileError> {
        let file = folder.join("tool.toml");
        let text = std::fs::read_to_string(&file).map_err(|error| unreadable(&file, &error))?;
        let manifest = ToolManifest::parse(&file, &text)?;
        let (input_schema, input) = schema(&folder.join(&manifest.input_schema))?;
        let output = manifest.output_schema.as_deref().map(|name| schema(&folder.join(name))).transpose()?;
        let entry = folder.join(&manifest.program.entry);
        if !entry.is_file() {
            return Err(FileError::whole(&entry, "the entry that tool.toml names is not there"));
        }
        let arguments = Some(example(&input_schema)).filter(|made| input.is_valid(made));
        let time = match manifest.program.timeout {
            Timeout::After(time) => time,
            Timeout::Tier(Tier::Http) => Duration::from_secs(3),
            Timeout::Tier(Tier::Database) => Duration::from_secs(5),
            Timeout::Tier(Tier::Model) => Duration::from_secs(30),
            Timeout::Tier(Tier::Compute | Tier::Build) => LONGEST,
        };
        let entry =
            PathBuf::from("/workspace").join(WORKSPACE_FOLDER).join(&manifest.program.entry).display().to_string();
        let is_provided = folder.join("check").is_dir();
        Ok(Self {
            entry,
            is_provided,
            input,
            output: output.map(|(_, validator)| validator),
            arguments,
            time: time.min(LONGEST),
            manifest,
        })
    }
}

fn unreadable(file: &Path, error: &std::io::Error) -> FileError {
    FileError::whole(file, format!("cannot be read: {error}"))
}

fn schema(file: &Path) -> Result<(Value, Validator), FileError> {
    let bytes = std::fs::read(file).map_err(|error| unreadable(file, &error))?;
    let schema = strict_json::parse(&bytes).map_err(|error| FileError::whole(file, error.to_string()))?;
    let validator = jsonschema::draft202012::new(&schema)
        .map_err(|error| FileError::whole(file, format!("is no JSON Schema 2020-12: {error}")))?;
    Ok((schema, validator))
}

/// Arguments as the schema suggests them: its examples and defaults, else the smallest value of each required member.
fn example(schema: &Value) -> Value {
    let given = ["const", "default"].iter().find_map(|word| schema.get(*word));
    let listed = ["examples", "enum"].iter().find_map(|word| schema.get(*word)?.get(0));
    if let Some(value) = given.or(listed) {
        return value.clone();
    }
    match schema.get("type").and_then(|kind| kind.as_str().or_else(|| kind.get(0)?.as_str())) {
        Some("string") => {
            let least = schema.get("minLength").and_then(Value::as_u64).unwrap_or(1).clamp(1, 4096);
            json!("x".repeat(usize::try_from(least).unwrap_or(1)))
        }
        Some("integer" | "number") => schema.get("minimum").cloned().unwrap_or_else(|| json!(1)),
        Some("boolean") => json!(false),
        Some("null") => Value::Null,
        Some("array") => {
            let least = schema.get("minItems").and_then(Value::as_u64).unwrap_or(0).min(64);
            let item = schema.get("items").map_or(Value::Null, example);
            (0..least).map(|_| item.clone()).collect()
        }
        _ => {
            let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
            let member = |name: &Value| {
                let name = name.as_str()?;
                let schema = schema.get("properties")?.get(name)?;
                Some((name.to_owned(), example(schema)))
            };
            Value::Object(required.filter_map(member).collect::<Map<_, _>>())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_come_from_the_schema() {
        let made = example(&json!({
            "type": "object",
            "required": ["path", "mode", "count", "tags", "deep"],
            "properties": {
                "path": {"type": "string", "examples": ["notes.txt"]},
                "mode": {"enum": ["a", "b"]},
                "count": {"type": "integer", "minimum": 3},
                "tags": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 2}},
                "deep": {"type": "object", "required": ["on"], "properties": {"on": {"type": "boolean"}}},
                "unneeded": {"type": "string"}
            }
        }));
        assert_eq!(made, json!({"path": "notes.txt", "mode": "a", "count": 3, "tags": ["xx"], "deep": {"on": false}}));
        assert_eq!(example(&json!({"examples": [{"a": 1}]})), json!({"a": 1}));
        assert_eq!(example(&json!(true)), json!({}));
    }

    #[test]
    fn the_examples_of_the_project_can_be_checked() {
        for name in ["line_count", "checksum", "word_frequency", "json_pick"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tools").join(name);
            match Subject::load(&folder) {
                Ok(subject) => {
                    assert!(subject.arguments.is_some(), "{name}");
                    assert!(subject.entry.starts_with("/workspace/.tool/"), "{name}");
                }
                // The C program is compiled by whoever wants it.
                Err(error) => assert!(name == "checksum" && error.to_string().contains("not there"), "{error}"),
            }
        }
    }
}
