//! Models: what is asked, what is answered, and who answers.
//!
//! | module | what it holds |
//! |---|---|
//! | [`transcript`] | the conversation, free of any provider's format |
//! | [`settings`] | the `[model]` section of an agent |
//! | [`connect`] | from settings to who answers |
//! | [`openai`] | chat completions over HTTP, streamed |
//! | [`responses`], [`anthropic`] | the two other formats |
//! | [`http`] | timers, and what a refusal means |
//! | `server` | where a model is, and what all formats ask alike |
//! | [`retry`] | retries, fallbacks, and the time that they may take |
//! | [`replay`], [`cassette`] | recorded conversations, and recording them |

pub mod anthropic;
pub mod cassette;
pub mod connect;
pub mod http;
pub mod openai;
pub mod replay;
pub mod responses;
pub mod retry;
mod server;
pub mod settings;
pub mod transcript;
#[cfg(test)]
mod wire_tests;

use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolproto::code::Code;

use transcript::Transcript;

/// What a model is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The conversation.
    pub transcript: Transcript,
    /// The tools that it is offered.
    pub tools: Vec<ToolOffer>,
    /// What it is told of the budget, beside the conversation.
    pub note: String,
    /// The most tokens that it may write, if that is limited.
    pub max_output: Option<u64>,
    /// How long it may take, retries and fallbacks included.
    pub time: Duration,
    /// Whether it may think before it answers.
    pub thinking: Thinking,
}

/// Whether a model may think before it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Thinking {
    /// As the server and the agent's settings have it.
    #[default]
    AsConfigured,
    /// Not at all, where its server can be told so.
    Off,
}

impl Thinking {
    /// Whether nothing in particular is asked for.
    #[must_use]
    pub fn is_as_configured(&self) -> bool {
        *self == Self::AsConfigured
    }
}

/// A tool that a model is offered.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolOffer {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: String,
    /// The JSON Schema of its arguments.
    pub parameters: Value,
}

/// What a model answered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    /// In words.
    pub text: String,
    /// The calls that it asks for.
    pub calls: Vec<ReplyCall>,
    /// Why it stopped.
    pub finish: Finish,
    /// What the server counted.
    pub usage: Option<TokenUsage>,
    /// The provider's own items, to be sent back unchanged.
    pub echo: Option<Value>,
    /// Which model answered.
    pub model: String,
    /// Whether it thought and then said nothing: no words, no calls.
    pub only_thought: bool,
}

/// A call as a model wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyCall {
    /// The id that it gave, if it gave one.
    pub id: Option<String>,
    /// The tool.
    pub tool: String,
    /// The arguments' text.
    pub arguments: String,
}

/// Why a model stopped. Calls are run because they are there, not because of this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Finish {
    /// It had said all, or it asked for calls.
    #[default]
    Done,
    /// The token limit cut it off.
    Length,
    /// It refused.
    Refused,
}

/// Tokens as a server counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUsage {
    /// Read, cached ones included.
    pub input_tokens: u64,
    /// Of those, read from a cache.
    #[serde(default)]
    pub cached_tokens: u64,
    /// Written.
    pub output_tokens: u64,
}

/// Why no model answered.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ModelError {
    /// MODEL_UNAVAILABLE, MODEL_QUOTA_EXHAUSTED, CONTEXT_OVERFLOW.
    pub code: Code,
    /// In words.
    pub message: String,
    /// Whether the same request may be answered later.
    pub retry: Retry,
    /// For a program.
    pub details: Value,
}

/// Whether and when a failed request is worth repeating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Never.
    No,
    /// When agentd thinks fit.
    Backoff,
    /// Not before this time has passed.
    After(Duration),
}

impl ModelError {
    /// A failure that no repetition mends.
    #[must_use]
    pub fn lasting(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry: Retry::No, details: Value::Null }
    }

    /// A failure that may pass.
    #[must_use]
    pub fn passing(message: impl Into<String>) -> Self {
        Self { code: Code::ModelUnavailable, message: message.into(), retry: Retry::Backoff, details: Value::Null }
    }
}

/// Takes pieces of the answer as they come, for people who watch. It must not block.
pub type Watch = dyn Fn(&str) + Send + Sync;

/// Someone who answers.
pub trait Model: Send + Sync + 'static {
    /// Answers a request. Dropping the future ends the request.
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>>;
}

impl Model for std::sync::Arc<dyn Model> {
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
        (**self).reply(request, watch)
    }
}
