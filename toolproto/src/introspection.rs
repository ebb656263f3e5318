//! Tool protocol 1, the results of the operations `describe` and `health`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What a tool says it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// Its name; the request's `tool` where the program has none of its own.
    pub name: String,
    /// The program's version.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub version: Option<String>,
    /// What it does.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub description: Option<String>,
    /// JSON Schema of the arguments.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub input: Option<Value>,
    /// JSON Schema of the result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub output: Option<Value>,
    /// The library that speaks the protocol for it, such as `agentd-python/0.1.0`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sdk: Option<String>,
}

/// Whether a tool can work now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Health {
    /// Whether a call could work.
    pub healthy: bool,
    /// Why not, and what to do.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub message: Option<String>,
    /// Anything else.
    #[serde(skip_serializing_if = "Value::is_null", default)]
    pub details: Value,
}
