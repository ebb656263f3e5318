//! Cassettes: recorded conversations, one exchange per line of JSON.
//!
//! A line is `{"version":1,"request":{"digest":…,"messages":[…]},"response":{…}}`; see
//! [`Transcript::normalised`](super::transcript::Transcript::normalised) for the messages. A *script* is a cassette whose
//! lines lack `request`: it is what a model should say, not what one said, and is played only while it is being recorded.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolproto::code::Code;
use toolproto::digest::Digest;

use super::{Finish, Model, ModelError, Reply, ReplyCall, Request, Thinking, TokenUsage, Watch};

/// The version in which cassettes are written.
pub const CASSETTE_VERSION: u32 = 1;

/// One exchange.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// [`CASSETTE_VERSION`].
    pub version: u32,
    /// What was asked; absent in a script.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub request: Option<Asked>,
    /// What was answered.
    pub response: Answered,
}

/// What was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// Of the messages, as canonical JSON.
    pub digest: Digest,
    /// The conversation, normalised.
    pub messages: Vec<Value>,
    /// Whether the model might think.
    #[serde(skip_serializing_if = "Thinking::is_as_configured", default)]
    pub thinking: Thinking,
}

/// What was answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Answered {
    /// In words.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// The calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<AnsweredCall>,
    /// Whether the token limit cut the answer off.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub cut_off: bool,
    /// Whether the model refused.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub refused: bool,
    /// Whether the model thought, and said nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub only_thought: bool,
    /// What the server counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<TokenUsage>,
}

/// A call in an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnsweredCall {
    /// The tool.
    pub tool: String,
    /// The arguments: JSON, or a string that holds what the model wrote instead.
    pub arguments: Value,
}

/// A cassette that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CassetteError {
    /// It cannot be read.
    #[error("{}: cannot be read", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// A line is no exchange.
    #[error("{}:{line}: no exchange of a cassette: {reason}", .file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
}

/// Reads a cassette.
///
/// # Errors
/// When it cannot be read, or a line is no exchange.
pub fn read(file: &Path) -> Result<Vec<Exchange>, CassetteError> {
    let text = std::fs::read_to_string(file).map_err(|error| CassetteError::Read(file.to_owned(), error))?;
    let mut exchanges = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let misfit = |reason: String| CassetteError::Line { file: file.to_owned(), line: index + 1, reason };
        let exchange: Exchange = serde_json::from_str(line).map_err(|error| misfit(error.to_string()))?;
        if exchange.version != CASSETTE_VERSION {
            return Err(misfit(format!("version {} is unknown", exchange.version)));
        }
        exchanges.push(exchange);
    }
    Ok(exchanges)
}

impl Asked {
    /// What is asked with this request.
    ///
    /// # Errors
    /// Never in practice: a conversation is JSON.
    pub fn of(request: &Request) -> Result<Self, ModelError> {
        let messages = request.transcript.normalised();
        let digest = Digest::of_json(&messages).map_err(|error| {
            ModelError::lasting(Code::InternalLogicError, format!("the conversation has no canonical form: {error}"))
        })?;
        Ok(Self { digest, messages, thinking: request.thinking })
    }
}

impl Answered {
    /// As a model's reply.
    #[must_use]
    pub fn reply(&self) -> Reply {
        let call = |call: &AnsweredCall| ReplyCall {
            id: None,
            tool: call.tool.clone(),
            arguments: call.arguments.as_str().map_or_else(|| call.arguments.to_string(), str::to_owned),
        };
        Reply {
            text: self.text.clone(),
            calls: self.calls.iter().map(call).collect(),
            finish: match (self.refused, self.cut_off) {
                (true, _) => Finish::Refused,
                (_, true) => Finish::Length,
                _ => Finish::Done,
            },
            usage: self.usage,
            echo: None,
            model: "replay".to_owned(),
            only_thought: self.only_thought,
        }
    }

    /// From a model's reply.
    #[must_use]
    pub fn of(reply: &Reply) -> Self {
        let call = |call: &ReplyCall| AnsweredCall {
            tool: call.tool.clone(),
            arguments: toolproto::strict_json::parse(call.arguments.as_bytes())
                .ok()
                .filter(Value::is_object)
                .unwrap_or_else(|| Value::String(call.arguments.clone())),
        };
        Self {
            text: reply.text.clone(),
            calls: reply.calls.iter().map(call).collect(),
            cut_off: reply.finish == Finish::Length,
            refused: reply.finish == Finish::Refused,
            only_thought: reply.only_thought,
            usage: reply.usage,
        }
    }
}

/// A model whose exchanges are added to a cassette.
pub struct Recorder<M> {
    model: M,
    file: PathBuf,
    writing: Mutex<()>,
}

impl<M> Recorder<M> {
    /// Adds what `model` is asked and answers to `file`.
    #[must_use]
    pub const fn new(model: M, file: PathBuf) -> Self {
        Self { model, file, writing: Mutex::new(()) }
    }

    fn add(&self, exchange: &Exchange) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(exchange)?;
        line.push(b'\n');
        let _turn = self.writing.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&self.file)?;
        file.write_all(&line)
    }
}

impl<M: Model> Model for Recorder<M> {
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
        async move {
            let reply = self.model.reply(request, watch).await?;
            let exchange = Exchange {
                version: CASSETTE_VERSION,
                request: Some(Asked::of(request)?),
                response: Answered::of(&reply),
            };
            self.add(&exchange).map_err(|error| {
                let message = format!("the conversation cannot be recorded in {}: {error}", self.file.display());
                ModelError::lasting(Code::ModelUnavailable, message)
            })?;
            Ok(reply)
        }
        .boxed()
    }
}
