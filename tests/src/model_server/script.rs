//! The script of a model server: what it answers, in which order, and what goes wrong on the way.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A whole script, read from JSON or TOML, or built by a test.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Script {
    /// The key that every request must carry (`authorization: Bearer` or `x-api-key`); without it any key will do.
    pub api_key: Option<String>,
    /// How a request finds its turn.
    pub order: Order,
    /// Peculiarities of one provider or local server that the whole script imitates.
    pub dialect: Dialect,
    /// The turns of the only conversation.
    pub turns: Vec<Turn>,
    /// Several conversations at a time, told apart by what their first user message contains. Looked at before `turns`.
    pub conversations: Vec<Conversation>,
}

/// How a request finds its turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Each answered request moves on to the next turn.
    #[default]
    Request,
    /// The turn is the number of assistant turns in the transcript, so that a client that asks again after a crash gets
    /// the same answer again.
    Transcript,
}

/// What one provider or local server does differently from the reference.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dialect {
    /// Call ids must be exactly this many letters and digits (Mistral's templates: 9).
    pub id_length: Option<usize>,
    /// A tool's result must be a string, not a list of parts (many local servers).
    pub string_results: bool,
    /// User and assistant must take turns (many chat templates).
    pub alternate_roles: bool,
    /// The arguments of earlier calls must be JSON objects (templates that parse them).
    pub json_arguments: bool,
    /// Reasoning must come back with the calls it led to (chat completions: DeepSeek's thinking mode).
    pub reasoning_required: bool,
}

/// One of several conversations.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Conversation {
    /// What the first user message must contain.
    pub when: String,
    /// Its turns.
    pub turns: Vec<Turn>,
}

/// One answer of the model, and the failures that precede it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Turn {
    /// Faults that the first attempts meet, one each; the attempt after the last of them gets the answer.
    pub before: Vec<Fault>,
    /// What the request must contain, else it is refused as a mistake of the client.
    pub expect: Expect,
    /// The model's thinking.
    pub reasoning: String,
    /// The model's words.
    pub text: String,
    /// The calls that the model asks for.
    pub calls: Vec<Call>,
    /// The finish or stop reason, in the words of the wire format, instead of the one that fits.
    pub finish: Option<String>,
    /// What the answer cost.
    pub usage: Tokens,
    /// Ways in which this answer deviates from the documented form.
    pub quirks: Vec<Quirk>,
    /// How the bytes are sent.
    pub pace: Pace,
}

impl Turn {
    /// A final answer in words.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// A turn that asks for one call.
    pub fn call(name: impl Into<String>, arguments: Value) -> Self {
        Self { calls: vec![Call::new(name, arguments)], ..Self::default() }
    }

    /// A turn that asks for several calls.
    pub fn calls(calls: Vec<Call>) -> Self {
        Self { calls, ..Self::default() }
    }

    /// The same turn after a fault; more than one may be added.
    #[must_use]
    pub fn after(mut self, fault: Fault) -> Self {
        self.before.push(fault);
        self
    }

    /// The same turn with a quirk.
    #[must_use]
    pub fn with(mut self, quirk: Quirk) -> Self {
        self.quirks.push(quirk);
        self
    }

    /// The same turn, given only when the request contains `text`.
    #[must_use]
    pub fn expecting(mut self, text: impl Into<String>) -> Self {
        self.expect.contains.push(text.into());
        self
    }

    pub(super) fn has(&self, quirk: Quirk) -> bool {
        self.quirks.contains(&quirk)
    }
}

/// What a request must look like, beyond what the wire format wants.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Expect {
    /// Texts that the strings of the transcript must contain (as they are, not as JSON writes them).
    pub contains: Vec<String>,
    /// Texts that they must not contain.
    pub lacks: Vec<String>,
    /// The exact names of the advertised tools, in any order.
    pub tools: Option<Vec<String>>,
}

/// A call that the model asks for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Call {
    /// Its id; one is made up in the format's style when absent.
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// The arguments.
    pub arguments: Value,
    /// The arguments as raw text instead, for what is not JSON.
    pub arguments_text: Option<String>,
}

impl Call {
    /// A call with a made-up id.
    pub fn new(name: impl Into<String>, arguments: Value) -> Self {
        Self { name: name.into(), arguments, ..Self::default() }
    }

    /// A call whose arguments are this text, JSON or not.
    pub fn raw(name: impl Into<String>, arguments: impl Into<String>) -> Self {
        Self { name: name.into(), arguments_text: Some(arguments.into()), ..Self::default() }
    }

    pub(super) fn argument_text(&self) -> String {
        match &self.arguments_text {
            Some(text) => text.clone(),
            None if self.arguments.is_null() => "{}".to_owned(),
            None => self.arguments.to_string(),
        }
    }
}

/// The tokens that an answer reports.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tokens {
    /// All input, cached or not.
    pub input: u64,
    /// The part of the input that came from a cache.
    pub cached: u64,
    /// Output, thinking included.
    pub output: u64,
}

impl Default for Tokens {
    fn default() -> Self {
        Self { input: 100, cached: 0, output: 20 }
    }
}

/// How the bytes of a stream are sent.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Pace {
    /// Milliseconds before the first byte of the body.
    pub first_ms: u64,
    /// Milliseconds between writes.
    pub between_ms: u64,
    /// Bytes in a write, whatever they cut in two; 0 writes whole events.
    pub write_bytes: usize,
    /// A comment (`: ping`, or Anthropic's ping event besides) before each event.
    pub heartbeats: bool,
    /// Characters in each fragment of text or arguments; 0 means 7.
    pub fragment: usize,
}

/// A failure instead of an answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// An error status with the provider's error body.
    Status {
        /// Which kind of error; it decides the body and, without `status`, the status.
        error: Trouble,
        /// The status instead.
        #[serde(default)]
        status: Option<u16>,
        /// The Retry-After header, as it is: seconds or a date.
        #[serde(default)]
        retry_after: Option<String>,
        /// A body instead of the provider's, for instance a proxy's page.
        #[serde(default)]
        body: Option<String>,
    },
    /// The connection is closed without a byte.
    HangUp,
    /// Nothing is sent for so long, not even headers; then the connection is closed.
    Silence {
        /// Milliseconds.
        ms: u64,
    },
    /// Headers and some events come, then nothing but comments for so long; then the connection is cut.
    Stall {
        /// Events before.
        after_events: usize,
        /// Milliseconds.
        ms: u64,
        /// Milliseconds between the comments; none without.
        #[serde(default)]
        heartbeat_ms: Option<u64>,
    },
    /// The connection is cut after some events and some bytes of the next one.
    Cut {
        /// Whole events before.
        after_events: usize,
        /// Bytes of the next event.
        #[serde(default)]
        bytes: usize,
    },
    /// The stream ends properly after some events, as if it were complete.
    EndsEarly {
        /// Events before.
        after_events: usize,
    },
    /// An error event inside a stream that began with status 200.
    Error {
        /// Events before.
        after_events: usize,
        /// Which.
        error: Trouble,
    },
    /// An event whose data is this text, then the rest of the stream.
    Garbage {
        /// Events before.
        after_events: usize,
        /// The text.
        text: String,
    },
    /// Status 200 with this text for a body.
    NotJson {
        /// The text.
        text: String,
    },
}

impl Fault {
    /// An error status.
    pub fn status(error: Trouble) -> Self {
        Self::Status { error, status: None, retry_after: None, body: None }
    }

    /// An error status with a Retry-After header.
    pub fn retry_after(error: Trouble, value: impl Into<String>) -> Self {
        Self::Status { error, status: None, retry_after: Some(value.into()), body: None }
    }
}

/// The errors that providers answer with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trouble {
    /// Too many requests; worth waiting.
    RateLimit,
    /// The account's money or daily allowance is used up; not worth waiting.
    Quota,
    /// The provider is overloaded: 529 at Anthropic, 503 elsewhere.
    Overloaded,
    /// A failure of the provider's own.
    Server,
    /// The transcript does not fit into the model's context.
    ContextLength,
    /// The key is wrong.
    Authentication,
    /// The prompt was refused by the provider's filter.
    ContentFilter,
    /// The model does not exist.
    ModelUnknown,
}

/// Ways in which real servers deviate from the documented form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quirk {
    /// No usage, though it was asked for.
    NoUsage,
    /// Usage in the last chunk that has a choice, instead of one of its own.
    EarlyUsage,
    /// Calls without ids.
    NoIds,
    /// Calls with empty ids.
    EmptyIds,
    /// All calls of the turn carry one id.
    SameIds,
    /// Call fragments without an index.
    NoIndex,
    /// Call fragments without `"type":"function"`.
    NoType,
    /// Name and id repeated in every fragment of a call.
    RepeatNames,
    /// Each call whole in one chunk.
    WholeCalls,
    /// The fragments of several calls interleaved.
    Interleaved,
    /// No `[DONE]`, or no last event of the format.
    NoEnd,
    /// Lines that end in CRLF.
    Crlf,
    /// `data:` without a space after it.
    NoSpace,
    /// One event's data split over two `data:` lines. Only where a line break in JSON is allowed.
    SplitData,
    /// A finish reason that says "stop" though there are calls.
    StopWithCalls,
    /// An empty answer: no text and no calls, whatever the turn holds.
    Empty,
}

/// Why a script cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is not the JSON of a script.
    #[error("{path} is not a script")]
    Json {
        /// The file.
        path: String,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// It is not the TOML of a script.
    #[error("{path} is not a script")]
    Toml {
        /// The file.
        path: String,
        /// Where and why.
        #[source]
        source: Box<toml::de::Error>,
    },
}

impl Script {
    /// A script of one conversation.
    pub fn of(turns: impl IntoIterator<Item = Turn>) -> Self {
        Self { turns: turns.into_iter().collect(), ..Self::default() }
    }

    /// Reads a script; a name that ends in `.toml` is TOML, all others are JSON.
    pub fn read(path: &Path) -> Result<Self, ScriptError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|source| ScriptError::Read { path: name.clone(), source })?;
        if path.extension().is_some_and(|extension| extension == "toml") {
            toml::from_str(&text).map_err(|source| ScriptError::Toml { path: name, source: Box::new(source) })
        } else {
            serde_json::from_str(&text).map_err(|source| ScriptError::Json { path: name, source })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_toml_and_json_alike() {
        let directory = tempfile::tempdir().unwrap();
        let toml = directory.path().join("script.toml");
        let text = r#"
            order = "transcript"
            [[turns]]
            calls = [{ name = "stats", arguments = { quarter = "2000-Q3" } }]
            before = [{ kind = "status", error = "rate_limit", retry_after = "1" }, { kind = "cut", after_events = 2 }]
            quirks = ["no_ids"]
            [[turns]]
            text = "done"
        "#;
        std::fs::write(&toml, text).unwrap();
        let first = Script::read(&toml).unwrap();
        let json = directory.path().join("script.json");
        std::fs::write(&json, serde_json::to_string(&first).unwrap()).unwrap();
        let second = Script::read(&json).unwrap();
        assert_eq!(first.turns.len(), 2);
        assert_eq!(serde_json::to_value(&first).unwrap(), serde_json::to_value(&second).unwrap());
    }

    #[test]
    fn unknown_fields_are_named_with_their_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("script.toml");
        std::fs::write(&path, "[[turns]]\ntexd = \"x\"\n").unwrap();
        let error = Script::read(&path).unwrap_err();
        let reason = std::error::Error::source(&error).unwrap().to_string();
        assert!(reason.contains("texd") && reason.contains("line 2"), "{reason}");
    }
}
