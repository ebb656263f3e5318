//! Checks that the three formats share.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::refusal::Refusal;

/// The fields of an object, or the provider's words for its absence.
pub(super) fn object<'a>(value: &'a Value, place: &str) -> Result<&'a Map<String, Value>, Refusal> {
    value.as_object().ok_or_else(|| {
        Refusal::at(place, format!("Invalid type for '{place}': expected an object, but got {} instead.", kind(value)))
    })
}

/// A field that must be a non-empty string.
pub(super) fn text<'a>(map: &'a Map<String, Value>, name: &str, place: &str) -> Result<&'a str, Refusal> {
    let place = if place.is_empty() { name.to_owned() } else { format!("{place}.{name}") };
    match map.get(name) {
        None => Err(Refusal::at(&place, format!("Missing required parameter: '{place}'."))
            .with_code("missing_required_parameter")),
        Some(Value::String(text)) if text.is_empty() => Err(Refusal::at(
            &place,
            format!(
                "Invalid '{place}': empty string. Expected a string with minimum length 1, but got an empty string instead."
            ),
        )
        .with_code("empty_string")),
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(Refusal::at(
            &place,
            format!("Invalid type for '{place}': expected a string, but got {} instead.", kind(other)),
        )
        .with_code("invalid_type")),
    }
}

/// Refuses fields that the provider does not know.
pub(super) fn only_known(map: &Map<String, Value>, known: &[&str], place: &str) -> Result<(), Refusal> {
    match map.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let full = if place.is_empty() { key.clone() } else { format!("{place}.{key}") };
            Err(Refusal::at(&full, format!("Unknown parameter: '{full}'.")).with_code("unknown_parameter"))
        }
    }
}

/// A name of a tool, as all providers want it.
pub(super) fn tool_name(name: &str, longest: usize, place: &str) -> Result<(), Refusal> {
    let fits = !name.is_empty()
        && name.len() <= longest
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    if fits {
        return Ok(());
    }
    let pattern = format!("^[a-zA-Z0-9_-]{{1,{longest}}}$");
    Err(Refusal::at(
        place,
        format!(
            "Invalid '{place}': string does not match pattern. Expected a string that matches the pattern '{pattern}'."
        ),
    )
    .with_code("invalid_value"))
}

/// A tool's parameters: a JSON Schema of an object.
pub(super) fn object_schema(schema: Option<&Value>, tool: &str, place: &str) -> Result<(), Refusal> {
    let Some(schema) = schema else { return Ok(()) };
    if schema.get("type").and_then(Value::as_str) == Some("object") {
        return Ok(());
    }
    Err(Refusal::at(
        place,
        format!("Invalid schema for function '{tool}': schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{}\"'.",
            schema.get("type").and_then(Value::as_str).unwrap_or("None")),
    )
    .with_code("invalid_function_parameters"))
}

/// Names that must differ.
pub(super) fn distinct<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<(), &'a str> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(name);
        }
    }
    Ok(())
}

/// What a value is, in a provider's words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The wanted strings in one list, for messages.
pub(super) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().collect::<Vec<_>>().join(", ")
}
