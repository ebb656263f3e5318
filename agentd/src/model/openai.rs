//! Chat completions over HTTP, streamed: the format that nearly every model server speaks, each with deviations of its own.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};

use super::http::{self, Taken, Timers};
use super::server::{KeyHeader, MAX_ANSWER, Server};
use super::settings::Endpoint;
use super::transcript::{Arguments, Message};
use super::{Finish, Model, ModelError, Reply, ReplyCall, Request, Thinking, TokenUsage, Watch};

/// A server that speaks chat completions.
pub struct OpenAi {
    server: Server,
}

/// The most calls of one answer; a server that sends more is out of order.
const MAX_CALLS: usize = 1024;

impl OpenAi {
    /// A client of this endpoint.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(endpoint: Endpoint, timers: Timers) -> Result<Self, http::SetupError> {
        Ok(Self { server: Server::new(endpoint, timers, KeyHeader::Bearer, &[])? })
    }

    async fn ask(&self, request: &Request, watch: &Watch) -> Result<Reply, ModelError> {
        let address = format!("{}/chat/completions", self.server.endpoint.base_url);
        let response = self.server.ask(&address, request, |thinking| self.body(request, thinking)).await?;
        let mut answer = Answer::default();
        if response.headers().get("content-type").is_some_and(|kind| kind.as_bytes().starts_with(b"application/json")) {
            // The server does not stream though it was asked to.
            let body = self.server.whole(response).await?;
            answer.take(&String::from_utf8_lossy(&body), watch)?;
            return answer.finish(&self.server.endpoint.model);
        }
        self.server
            .stream(response, |data| match data.trim() {
                "[DONE]" => Ok(Taken::End),
                data => answer.take(data, watch).map(|()| Taken::Data),
            })
            .await?;
        answer.finish(&self.server.endpoint.model)
    }

    fn body(&self, request: &Request, thinking: Thinking) -> Value {
        let mut body = json!({
            "model": self.server.endpoint.model,
            "messages": messages(request),
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if !request.tools.is_empty() {
            let tool = |tool: &super::ToolOffer| {
                json!({"type": "function", "function":
                    {"name": tool.name, "description": tool.description, "parameters": tool.parameters}})
            };
            body["tools"] = request.tools.iter().map(tool).collect();
        }
        if let Some(limit) = self.server.max_output(request) {
            body["max_tokens"] = limit.into();
        }
        self.server.set(thinking, &mut body);
        body
    }
}

impl Model for OpenAi {
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
        self.ask(request, watch).boxed()
    }
}

/// The conversation as chat completions want it: neighbouring user messages joined, results as strings.
fn messages(request: &Request) -> Vec<Value> {
    let mut out = vec![json!({"role": "system", "content": request.transcript.system})];
    let user = |out: &mut Vec<Value>, text: &str| match out.last_mut() {
        Some(last) if last["role"] == "user" => {
            let joined = format!("{}\n\n{text}", last["content"].as_str().unwrap_or_default());
            last["content"] = joined.into();
        }
        _ => out.push(json!({"role": "user", "content": text})),
    };
    for message in &request.transcript.messages {
        match message {
            Message::User(text) => user(&mut out, text),
            Message::Assistant(assistant) => {
                let mut said = json!({"role": "assistant"});
                said["content"] = if assistant.text.is_empty() { Value::Null } else { assistant.text.clone().into() };
                if !assistant.calls.is_empty() {
                    let call = |call: &super::transcript::AskedCall| {
                        json!({"id": call.id, "type": "function",
                            "function": {"name": call.tool, "arguments": written(&call.arguments)}})
                    };
                    said["tool_calls"] = assistant.calls.iter().map(call).collect();
                }
                if let Some(reasoning) = assistant.echo.as_ref().and_then(|echo| echo.get("reasoning_content")) {
                    said["reasoning_content"] = reasoning.clone();
                }
                out.push(said);
            }
            Message::Result(result) => out.push(json!({
                "role": "tool",
                "tool_call_id": result.id,
                "content": result.content.to_string(),
            })),
        }
    }
    if !request.note.is_empty() {
        user(&mut out, &request.note);
    }
    out
}

fn written(arguments: &Arguments) -> String {
    arguments.to_value().to_string()
}

/// An answer as it comes together.
#[derive(Default)]
struct Answer {
    text: String,
    reasoning: String,
    /// Whether it thought in a way that does not go back.
    thought_apart: bool,
    refusal: String,
    calls: Vec<Part>,
    usage: Option<TokenUsage>,
    finish_reason: Option<String>,
}

/// A call as it comes together.
#[derive(Default)]
struct Part {
    index: Option<u64>,
    id: String,
    tool: String,
    arguments: String,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default, alias = "message")]
    delta: Option<Delta>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    /// As other servers name it; some send both.
    #[serde(default)]
    reasoning: Option<Value>,
    #[serde(default)]
    refusal: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    #[serde(default)]
    index: Option<u64>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    function: Option<FunctionDelta>,
}

#[derive(Deserialize)]
struct FunctionDelta {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    arguments: Option<Value>,
}

#[derive(Clone, Copy, Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Answer {
    fn take(&mut self, data: &str, watch: &Watch) -> Result<(), ModelError> {
        let chunk: Chunk = serde_json::from_str(data)
            .map_err(|error| ModelError::passing(format!("the model's server sent what is no chunk: {error}")))?;
        if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
            return Err(http::classify(None, &error));
        }
        if let Some(usage) = chunk.usage {
            self.usage = Some(TokenUsage {
                input_tokens: usage.prompt_tokens,
                cached_tokens: usage.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0),
                output_tokens: usage.completion_tokens,
            });
        }
        let Some(choice) = chunk.choices.and_then(|choices| choices.into_iter().next()) else { return Ok(()) };
        if let Some(delta) = choice.delta {
            if let Some(text) = delta.content.filter(|text| !text.is_empty()) {
                watch(&text);
                self.text.push_str(&text);
            }
            self.reasoning.push_str(delta.reasoning_content.as_deref().unwrap_or_default());
            self.thought_apart |= delta.reasoning.is_some_and(|thought| !matches!(thought, Value::Null));
            self.refusal.push_str(delta.refusal.as_deref().unwrap_or_default());
            for call in delta.tool_calls.unwrap_or_default() {
                self.call(call)?;
            }
        }
        if let Some(reason) = choice.finish_reason {
            self.finish_reason = Some(reason);
        }
        let size =
            self.text.len() + self.reasoning.len() + self.calls.iter().map(|call| call.arguments.len()).sum::<usize>();
        if size > MAX_ANSWER {
            return Err(ModelError::passing("the model's answer outgrew every bound"));
        }
        Ok(())
    }

    /// Adds a piece of a call. It belongs to the call of its index; without one, or where a server gives every call the
    /// same, a new id or a new name begins a new call.
    fn call(&mut self, delta: CallDelta) -> Result<(), ModelError> {
        let id = delta.id.unwrap_or_default();
        let (name, arguments) = delta
            .function
            .map(|function| (function.name.unwrap_or_default(), function.arguments.map(text_of).unwrap_or_default()))
            .unwrap_or_default();
        if self.calls.len() >= MAX_CALLS {
            return Err(ModelError::passing("the model asks for too many calls at once"));
        }
        let known = match delta.index {
            Some(index) => self.calls.iter_mut().rev().find(|part| part.index == Some(index)),
            None => self.calls.last_mut(),
        };
        let continues = |part: &Part| {
            let other_id = !id.is_empty() && !part.id.is_empty() && part.id != id;
            let unindexed_start = delta.index.is_none() && !name.is_empty() && !part.arguments.is_empty();
            !other_id && !(unindexed_start && (id.is_empty() || part.id != id))
        };
        match known {
            Some(part) if continues(part) => {
                if part.id.is_empty() {
                    part.id = id;
                }
                // Some servers repeat the name in every piece.
                if part.tool.is_empty() {
                    part.tool = name;
                }
                part.arguments.push_str(&arguments);
            }
            _ => self.calls.push(Part { index: delta.index, id, tool: name, arguments }),
        }
        Ok(())
    }

    fn finish(self, model: &str) -> Result<Reply, ModelError> {
        let ended = self.finish_reason.as_deref();
        if ended.is_none() {
            return Err(ModelError::passing("the model's stream ended before its answer did"));
        }
        let (in_words, text) = apart(&self.text);
        let thought = in_words || self.thought_apart || !self.reasoning.is_empty();
        let text = text.to_owned();
        let refused = !self.refusal.is_empty() || ended == Some("content_filter");
        let call = |part: Part| ReplyCall {
            id: Some(part.id).filter(|id| !id.is_empty()),
            tool: part.tool,
            arguments: part.arguments,
        };
        Ok(Reply {
            only_thought: thought && !refused && self.calls.is_empty() && text.trim().is_empty(),
            text: if refused && text.is_empty() { self.refusal } else { text },
            calls: self.calls.into_iter().map(call).collect(),
            finish: match ended {
                _ if refused => Finish::Refused,
                Some("length") => Finish::Length,
                _ => Finish::Done,
            },
            usage: self.usage.filter(|usage| usage.input_tokens > 0),
            echo: (!self.reasoning.is_empty()).then(|| json!({"reasoning_content": self.reasoning})),
            model: model.to_owned(),
        })
    }
}

/// Tells thoughts that a model wrote into its text from what it says after them, and whether there were any.
fn apart(text: &str) -> (bool, &str) {
    match text.trim_start().strip_prefix("<think>") {
        Some(thought) => (true, thought.split_once("</think>").map_or("", |(_, said)| said.trim_start())),
        None => (false, text),
    }
}

/// Arguments come as text; a few servers send the object itself.
fn text_of(arguments: Value) -> String {
    match arguments {
        Value::String(text) => text,
        Value::Null => String::new(),
        other => other.to_string(),
    }
}
