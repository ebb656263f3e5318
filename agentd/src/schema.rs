//! JSON Schemas (2020-12), compiled once: goals, results, tools' arguments and replies are checked against them.
//!
//! Schemas come from files of people who configure agents and tools. They are closed worlds: a reference to another file
//! or host is an error, and patterns run in an engine whose time is linear in the text.

use std::fmt;

use jsonschema::{Draft, PatternOptions, Validator};
use serde_json::Value;
use toolproto::job::Violation;

/// The most violations that one check reports.
pub const MAX_VIOLATIONS: usize = 16;

/// A value that is no usable JSON Schema.
#[derive(Debug, thiserror::Error)]
#[error("not a JSON Schema (2020-12) that can be used: {reason} at {pointer}")]
pub struct SchemaError {
    /// JSON pointer into the schema.
    pub pointer: String,
    /// What is wrong there.
    pub reason: String,
}

/// A schema, ready to check values.
#[derive(Clone)]
pub struct Schema {
    source: Value,
    validator: std::sync::Arc<Validator>,
}

impl Schema {
    /// Compiles a schema.
    ///
    /// # Errors
    /// When the value is no schema of draft 2020-12, refers outside itself, names an unknown format, or has a pattern
    /// with look-around or back-references.
    pub fn compile(source: Value) -> Result<Self, SchemaError> {
        let validator = jsonschema::options()
            .with_draft(Draft::Draft202012)
            .should_validate_formats(true)
            .should_ignore_unknown_formats(false)
            .with_pattern_options(PatternOptions::regex())
            .build(&source)
            .map_err(|error| SchemaError {
                pointer: format!("/{}", error.instance_path().as_str().trim_start_matches('/')),
                reason: error.to_string(),
            })?;
        Ok(Self { source, validator: std::sync::Arc::new(validator) })
    }

    /// The schema as it stands in its file.
    #[must_use]
    pub const fn source(&self) -> &Value {
        &self.source
    }

    /// Checks a value.
    ///
    /// # Errors
    /// With the first violations, each with a pointer into the value and into the schema.
    pub fn check(&self, value: &Value) -> Result<(), Vec<Violation>> {
        let violations: Vec<Violation> = self
            .validator
            .iter_errors(value)
            .take(MAX_VIOLATIONS)
            .map(|error| Violation {
                pointer: error.instance_path().as_str().to_owned(),
                rule: error.schema_path().as_str().to_owned(),
                message: shorten(&error.to_string()),
            })
            .collect();
        if violations.is_empty() { Ok(()) } else { Err(violations) }
    }
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Schema").field(&self.source).finish()
    }
}

impl PartialEq for Schema {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

/// Violations in one line of words, for messages to people and models.
#[must_use]
pub fn in_words(violations: &[Violation]) -> String {
    let words: Vec<String> = violations
        .iter()
        .map(|violation| match violation.pointer.as_str() {
            "" => format!("the whole value: {}", violation.message),
            pointer => format!("{pointer}: {}", violation.message),
        })
        .collect();
    words.join("; ")
}

/// A violation quotes the value that it is about, which may be large.
fn shorten(message: &str) -> String {
    const LIMIT: usize = 300;
    if message.chars().count() <= LIMIT {
        return message.to_owned();
    }
    let half = LIMIT / 2;
    let head: String = message.chars().take(half).collect();
    let tail: String = message.chars().skip(message.chars().count() - half).collect();
    format!("{head} … {tail}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_misfit_names_pointer_and_rule() {
        let schema = Schema::compile(json!({
            "type": "object",
            "properties": {"quarter": {"type": "string", "pattern": "^[0-9]{4}-Q[1-4]$"}},
            "required": ["quarter"],
            "additionalProperties": false,
        }))
        .unwrap();
        assert!(schema.check(&json!({"quarter": "2000-Q3"})).is_ok());
        let violations = schema.check(&json!({"quarter": "2000-Q5"})).unwrap_err();
        assert_eq!(violations[0].pointer, "/quarter");
        assert_eq!(violations[0].rule, "/properties/quarter/pattern");
        assert_eq!(schema.check(&json!({})).unwrap_err()[0].rule, "/required");
    }

    #[test]
    fn references_outside_look_around_and_nonsense_are_refused() {
        for source in [
            json!({"$ref": "file:///etc/passwd"}),
            json!({"$ref": "http://127.0.0.1/schema.json"}),
            json!({"pattern": "^(?=a)b"}),
            json!({"type": "strnig"}),
            json!({"format": "no-such-format"}),
            json!([]),
        ] {
            assert!(Schema::compile(source.clone()).is_err(), "{source} was compiled");
        }
        assert!(Schema::compile(json!({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"})).is_ok());
    }

    #[test]
    fn huge_values_are_not_quoted_whole() {
        let schema = Schema::compile(json!({"type": "integer"})).unwrap();
        let violations = schema.check(&Value::String("x".repeat(1 << 20))).unwrap_err();
        assert!(violations[0].message.len() < 1000);
    }
}
