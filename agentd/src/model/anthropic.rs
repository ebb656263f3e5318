//! Anthropic Messages over HTTP, streamed.

use std::collections::BTreeMap;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::http::{self, Taken, Timers};
use super::server::{KeyHeader, Server};
use super::settings::Endpoint;
use super::transcript::{Assistant, Message};
use super::{Finish, Model, ModelError, Reply, ReplyCall, Request, Thinking, TokenUsage, ToolOffer, Watch};

/// A server that speaks Anthropic Messages.
pub struct Anthropic {
    server: Server,
}

/// The version of the format that is spoken.
const VERSION: &str = "2023-06-01";
/// The most tokens of an answer where nothing says how many: the format wants a number.
const DEFAULT_OUTPUT: u64 = 8192;

impl Anthropic {
    /// A client of this endpoint.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(endpoint: Endpoint, timers: Timers) -> Result<Self, http::SetupError> {
        let headers = &[("anthropic-version", VERSION)];
        Ok(Self { server: Server::new(endpoint, timers, KeyHeader::ApiKey, headers)? })
    }

    async fn ask(&self, request: &Request, watch: &Watch) -> Result<Reply, ModelError> {
        let address = format!("{}/v1/messages", self.server.endpoint.base_url.trim_end_matches("/v1"));
        let response = self.server.ask(&address, request, |thinking| self.body(request, thinking)).await?;
        let mut answer = Answer::default();
        self.server.stream(response, |data| answer.take(data, watch)).await?;
        answer.finish(&self.server.endpoint.model)
    }

    fn body(&self, request: &Request, thinking: Thinking) -> Value {
        let most = self.server.max_output(request);
        let mut body = json!({
            "model": self.server.endpoint.model,
            "max_tokens": most.unwrap_or(DEFAULT_OUTPUT).max(1),
            "system": request.transcript.system,
            "messages": messages(request),
            "stream": true,
        });
        // A conversation that holds calls needs their tools declared, also when none may be called any more.
        if !request.tools.is_empty() {
            body["tools"] = request.tools.iter().map(tool).collect();
        } else if request.transcript.messages.iter().any(|message| matches!(message, Message::Result(_))) {
            body["tools"] = used(request)
                .into_iter()
                .map(|name| {
                    tool(&ToolOffer { name, description: String::new(), parameters: json!({"type": "object"}) })
                })
                .collect();
            body["tool_choice"] = json!({"type": "none"});
        }
        self.server.set(thinking, &mut body);
        body
    }
}

impl Model for Anthropic {
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
        self.ask(request, watch).boxed()
    }
}

fn tool(offer: &ToolOffer) -> Value {
    let mut schema = offer.parameters.clone();
    if schema.get("type").is_none() && schema.is_object() {
        schema["type"] = "object".into();
    }
    json!({"name": offer.name, "description": offer.description, "input_schema": schema})
}

/// The tools whose calls stand in the conversation.
fn used(request: &Request) -> std::collections::BTreeSet<String> {
    let results = request.transcript.messages.iter().filter_map(|message| match message {
        Message::Result(result) => Some(result.tool.clone()),
        _ => None,
    });
    results.collect()
}

/// The conversation as the format wants it: user and assistant in turns, all results of a turn first in the next user message.
fn messages(request: &Request) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::new();
    for message in &request.transcript.messages {
        match message {
            Message::User(text) => user(&mut out, json!({"type": "text", "text": text})),
            Message::Assistant(said) => out.push(json!({"role": "assistant", "content": blocks(said)})),
            Message::Result(result) => {
                let text = json!([{"type": "text", "text": result.content.to_string()}]);
                user(&mut out, json!({"type": "tool_result", "tool_use_id": result.id, "content": text}));
            }
        }
    }
    if !request.note.is_empty() {
        let note = json!({"type": "text", "text": request.note});
        // Words after results invite an empty answer; so the note is the end of the last result.
        let last = out.last_mut().and_then(|message| message["content"].as_array_mut()?.last_mut());
        match last.filter(|block| block["type"] == "tool_result").and_then(|block| block["content"].as_array_mut()) {
            Some(content) => content.push(note),
            None => user(&mut out, note),
        }
    }
    out
}

fn user(out: &mut Vec<Value>, block: Value) {
    let last = out.last_mut().filter(|message| message["role"] == "user");
    match last.and_then(|message| message["content"].as_array_mut()) {
        Some(blocks) => blocks.push(block),
        None => out.push(json!({"role": "user", "content": [block]})),
    }
}

fn blocks(said: &Assistant) -> Vec<Value> {
    // What the model thought goes back byte for byte, or the provider refuses the conversation.
    let thought = said.echo.as_ref().and_then(|echo| echo["thinking"].as_array()).cloned().unwrap_or_default();
    let text = (!said.text.trim().is_empty()).then(|| json!({"type": "text", "text": said.text}));
    let calls = said
        .calls
        .iter()
        .map(|call| json!({"type": "tool_use", "id": call.id, "name": call.tool, "input": call.arguments.to_value()}));
    thought.into_iter().chain(text).chain(calls).collect()
}

/// An answer as it comes together.
#[derive(Default)]
struct Answer {
    blocks: BTreeMap<u64, Block>,
    usage: TokenUsage,
    stop_reason: Option<String>,
    ended: bool,
}

enum Block {
    Text(String),
    Call(ReplyCall),
    /// Goes back as it came.
    Thought(Value),
    Other,
}

impl Answer {
    fn take(&mut self, data: &str, watch: &Watch) -> Result<Taken, ModelError> {
        let event: Value = serde_json::from_str(data)
            .map_err(|error| ModelError::passing(format!("the model's server sent what is no event: {error}")))?;
        let index = event["index"].as_u64().unwrap_or(0);
        match event["type"].as_str().unwrap_or_default() {
            "ping" => return Ok(Taken::Nothing),
            "error" => return Err(http::classify(None, &event["error"])),
            "message_start" => self.count(&event["message"]["usage"]),
            "content_block_start" => {
                let block = started(&event["content_block"]);
                self.blocks.insert(index, block);
            }
            "content_block_delta" => self.grow(index, &event["delta"], watch),
            "message_delta" => {
                self.count(&event["usage"]);
                if let Some(reason) = event["delta"]["stop_reason"].as_str() {
                    self.stop_reason = Some(reason.to_owned());
                }
            }
            "message_stop" => {
                self.ended = true;
                return Ok(Taken::End);
            }
            _ => {}
        }
        Ok(Taken::Data)
    }

    /// Input is told at the start, cached input apart from it; output is told again and again, always the whole.
    fn count(&mut self, usage: &Value) {
        let number = |key: &str| usage[key].as_u64();
        if let Some(input) = number("input_tokens") {
            let cached = number("cache_read_input_tokens").unwrap_or(0);
            let written = number("cache_creation_input_tokens").unwrap_or(0);
            self.usage.input_tokens = input.saturating_add(cached).saturating_add(written);
            self.usage.cached_tokens = cached;
        }
        if let Some(output) = number("output_tokens") {
            self.usage.output_tokens = output;
        }
    }

    fn grow(&mut self, index: u64, delta: &Value, watch: &Watch) {
        let text = |key: &str| delta[key].as_str().unwrap_or_default();
        match (self.blocks.get_mut(&index), delta["type"].as_str().unwrap_or_default()) {
            (Some(Block::Text(so_far)), "text_delta") => {
                watch(text("text"));
                so_far.push_str(text("text"));
            }
            (Some(Block::Call(call)), "input_json_delta") => call.arguments.push_str(text("partial_json")),
            (Some(Block::Thought(block)), "thinking_delta") => extend(block, "thinking", text("thinking")),
            (Some(Block::Thought(block)), "signature_delta") => extend(block, "signature", text("signature")),
            _ => {}
        }
    }

    fn finish(self, model: &str) -> Result<Reply, ModelError> {
        if !self.ended && self.stop_reason.is_none() {
            return Err(ModelError::passing("the model's stream ended before its answer did"));
        }
        let mut reply = Reply { model: model.to_owned(), ..Reply::default() };
        let mut thought = Vec::new();
        for block in self.blocks.into_values() {
            match block {
                Block::Text(text) => reply.text.push_str(&text),
                Block::Call(call) => reply.calls.push(call),
                Block::Thought(block) => thought.push(block),
                Block::Other => {}
            }
        }
        reply.finish = match self.stop_reason.as_deref() {
            Some("refusal") => Finish::Refused,
            Some("max_tokens" | "model_context_window_exceeded") => Finish::Length,
            _ => Finish::Done,
        };
        let silent = reply.calls.is_empty() && reply.text.trim().is_empty() && reply.finish != Finish::Refused;
        reply.only_thought = silent && !thought.is_empty();
        reply.usage = Some(self.usage).filter(|usage| usage.input_tokens > 0);
        reply.echo = (!thought.is_empty()).then(|| json!({"thinking": thought}));
        Ok(reply)
    }
}

fn started(block: &Value) -> Block {
    let text = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
    match block["type"].as_str().unwrap_or_default() {
        "text" => Block::Text(text("text")),
        "tool_use" => {
            // Whoever does not stream the arguments sends them here.
            let whole = block["input"].as_object().filter(|input| !input.is_empty());
            let arguments = whole.map(|_| block["input"].to_string()).unwrap_or_default();
            Block::Call(ReplyCall { id: Some(text("id")), tool: text("name"), arguments })
        }
        "thinking" | "redacted_thinking" => Block::Thought(block.clone()),
        _ => Block::Other,
    }
}

fn extend(block: &mut Value, key: &str, more: &str) {
    let whole = format!("{}{more}", block[key].as_str().unwrap_or_default());
    block[key] = whole.into();
}
