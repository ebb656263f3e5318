//! What an agentd offers: tools, extensions, policies.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::digest::Digest;
use crate::extension::Point;
use crate::manifest::HostPort;

/// A tool's breaker: whether calls go through, and what the last ones came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BreakerView {
    /// `closed`, `open` or `half_open`.
    pub state: String,
    /// How many of the remembered calls failed.
    pub failures: usize,
    /// How many were slow.
    pub slow: usize,
    /// How many are remembered.
    pub calls: usize,
}

/// What an administrator does with a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BreakerAction {
    /// Open it until it is reset: no call is started.
    Open,
    /// Close it and forget what was seen.
    Reset,
}

/// The body of `POST /tools/{name}/breaker`; `name` is a tool, or `runtime:NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BreakerRequest {
    /// The version of this form: 1.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1)))]
    pub version: u32,
    /// What is to be done.
    pub action: BreakerAction,
    /// Why, for the audit log and for those whose calls are refused; needed to open it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
}

/// A tool as `GET /tools` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ToolView {
    /// Its name.
    pub name: String,
    /// Its manifest's version.
    pub version: u32,
    /// What it does.
    pub description: String,
    /// The digest of its folder.
    pub digest: Digest,
    /// What runs it.
    pub runtime: String,
    /// What that said of its version; absent until a call has needed it, and while it does not work.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub runtime_version: Option<String>,
    /// The policy that confines it.
    pub policy: String,
    /// What it declares about its effects.
    pub effects: String,
    /// No two calls of it at the same time.
    pub exclusive: bool,
    /// Safe to repeat with the same idempotency key.
    pub idempotent: bool,
    /// How long a call may take, in milliseconds.
    pub timeout_ms: u64,
    /// The most it may write to stdout.
    pub max_response_bytes: u64,
    /// From how many bytes on a result is kept apart, and a preview stands for it; absent when none is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub spill_bytes: Option<u64>,
    /// Hosts it may connect to.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub hosts: Vec<HostPort>,
    /// The JSON Schema of its arguments.
    pub input_schema: Value,
    /// The JSON Schema of its result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub output_schema: Option<Value>,
    /// Where its breaker stands.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub breaker: Option<BreakerView>,
}

/// An extension as `GET /tools` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExtensionView {
    /// Its name.
    pub name: String,
    /// Its manifest's version.
    pub version: u32,
    /// What it does.
    pub description: String,
    /// The digest of its folder.
    pub digest: Digest,
    /// Where it is asked.
    pub operations: Vec<Point>,
    /// Whether a job ends when it fails.
    pub required: bool,
    /// What runs it.
    pub runtime: String,
    /// The policy that confines it.
    pub policy: String,
    /// How long it may take, in milliseconds.
    pub timeout_ms: u64,
    /// Hosts it may connect to.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub hosts: Vec<HostPort>,
}

/// The answer to `GET /tools`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ToolList {
    /// The version of this form: 1.
    pub version: u32,
    /// The tools that the caller may use, by name.
    pub tools: Vec<ToolView>,
    /// The extensions that agents may name, by name.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub extensions: Vec<ExtensionView>,
}

/// A policy as `GET /policies` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyView {
    /// Its name.
    pub name: String,
    /// The digest of its effective form.
    pub digest: Digest,
    /// Whether commands that are no tools may run under it.
    pub adhoc: bool,
    /// none, read_only, overlay or direct.
    pub workspace: String,
    /// none or listed.
    pub network: String,
    /// The effective policy after `extends`, with the reason for each rule.
    pub effective: Value,
}

/// The answer to `GET /policies`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyList {
    /// The version of this form: 1.
    pub version: u32,
    /// The policies that the caller may use, by name.
    pub policies: Vec<PolicyView>,
}
