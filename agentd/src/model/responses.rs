//! OpenAI Responses over HTTP, streamed: items instead of messages, and nothing kept at the server.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::http::{self, Taken, Timers};
use super::server::{KeyHeader, Server};
use super::settings::Endpoint;
use super::transcript::Message;
use super::{Finish, Model, ModelError, Reply, ReplyCall, Request, Thinking, TokenUsage, ToolOffer, Watch};

/// A server that speaks Responses.
pub struct Responses {
    server: Server,
}

impl Responses {
    /// A client of this endpoint.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(endpoint: Endpoint, timers: Timers) -> Result<Self, http::SetupError> {
        Ok(Self { server: Server::new(endpoint, timers, KeyHeader::Bearer, &[])? })
    }

    async fn ask(&self, request: &Request, watch: &Watch) -> Result<Reply, ModelError> {
        let address = format!("{}/responses", self.server.endpoint.base_url);
        let response = self.server.ask(&address, request, |thinking| self.body(request, thinking)).await?;
        let mut answer = Answer::default();
        self.server.stream(response, |data| answer.take(data, watch)).await?;
        answer.finish(&self.server.endpoint.model)
    }

    fn body(&self, request: &Request, thinking: Thinking) -> Value {
        let mut body = json!({
            "model": self.server.endpoint.model,
            "instructions": request.transcript.system,
            "input": items(request),
            "stream": true,
            "store": false,
            // Since nothing is kept at the server, its reasoning travels with the conversation.
            "include": ["reasoning.encrypted_content"],
        });
        if !request.tools.is_empty() {
            let tool = |tool: &ToolOffer| {
                json!({"type": "function", "name": tool.name, "description": tool.description,
                    "parameters": tool.parameters, "strict": false})
            };
            body["tools"] = request.tools.iter().map(tool).collect();
        }
        if let Some(limit) = self.server.max_output(request) {
            body["max_output_tokens"] = limit.into();
        }
        self.server.set(thinking, &mut body);
        body
    }
}

impl Model for Responses {
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
        self.ask(request, watch).boxed()
    }
}

fn items(request: &Request) -> Vec<Value> {
    let user = |text: &str| json!({"type": "message", "role": "user", "content": text});
    let mut items = Vec::new();
    for message in &request.transcript.messages {
        match message {
            Message::User(text) => items.push(user(text)),
            Message::Assistant(said) => {
                // Reasoning goes back directly before what it led to.
                items.extend(
                    said.echo.iter().flat_map(|echo| echo["reasoning"].as_array().cloned().unwrap_or_default()),
                );
                if !said.text.trim().is_empty() {
                    let content = json!([{"type": "output_text", "text": said.text}]);
                    items.push(json!({"type": "message", "role": "assistant", "content": content}));
                }
                items.extend(said.calls.iter().map(|call| {
                    json!({"type": "function_call", "call_id": call.id, "name": call.tool,
                        "arguments": call.arguments.to_value().to_string()})
                }));
            }
            Message::Result(result) => items.push(json!({
                "type": "function_call_output",
                "call_id": result.id,
                "output": result.content.to_string(),
            })),
        }
    }
    if !request.note.is_empty() {
        items.push(user(&request.note));
    }
    items
}

/// An answer as it comes together.
#[derive(Default)]
struct Answer {
    items: Vec<Value>,
    ended: Option<Value>,
}

impl Answer {
    fn take(&mut self, data: &str, watch: &Watch) -> Result<Taken, ModelError> {
        let event: Value = serde_json::from_str(data)
            .map_err(|error| ModelError::passing(format!("the model's server sent what is no event: {error}")))?;
        match event["type"].as_str().unwrap_or_default() {
            "response.output_text.delta" => watch(event["delta"].as_str().unwrap_or_default()),
            "response.output_item.done" => self.items.push(event["item"].clone()),
            "response.completed" | "response.incomplete" => {
                self.ended = Some(event["response"].clone());
                return Ok(Taken::End);
            }
            "response.failed" => return Err(http::classify(None, &event["response"]["error"])),
            "error" => return Err(http::classify(None, event.get("error").unwrap_or(&event))),
            _ => {}
        }
        Ok(Taken::Data)
    }

    fn finish(self, model: &str) -> Result<Reply, ModelError> {
        let Some(response) = self.ended else {
            return Err(ModelError::passing("the model's stream ended before its answer did"));
        };
        let items = match response["output"].as_array() {
            Some(output) if self.items.is_empty() => output.clone(),
            _ => self.items,
        };
        let mut reply = Reply { model: model.to_owned(), ..Reply::default() };
        let (mut reasoning, mut refusal, mut thought) = (Vec::new(), String::new(), false);
        for item in items {
            thought |= item["type"] == "reasoning";
            let text = |key: &str| item[key].as_str().unwrap_or_default().to_owned();
            match item["type"].as_str().unwrap_or_default() {
                "message" => {
                    for part in item["content"].as_array().into_iter().flatten() {
                        reply.text.push_str(part["text"].as_str().unwrap_or_default());
                        refusal.push_str(part["refusal"].as_str().unwrap_or_default());
                    }
                }
                "function_call" => reply.calls.push(ReplyCall {
                    id: Some(text("call_id")).filter(|id| !id.is_empty()),
                    tool: text("name"),
                    arguments: text("arguments"),
                }),
                // Without its content it would be a mere reference to what the server has not kept.
                "reasoning" if item["encrypted_content"].is_string() => reasoning.push(echoed(&item)),
                _ => {}
            }
        }
        let why = response["incomplete_details"]["reason"].as_str();
        reply.finish = match why {
            _ if !refusal.is_empty() => Finish::Refused,
            Some("content_filter") => Finish::Refused,
            Some(_) => Finish::Length,
            None => Finish::Done,
        };
        if reply.text.is_empty() {
            reply.text = refusal;
        }
        let usage = &response["usage"];
        reply.usage = usage["input_tokens"].as_u64().map(|input_tokens| TokenUsage {
            input_tokens,
            cached_tokens: usage["input_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0),
            output_tokens: usage["output_tokens"].as_u64().unwrap_or(0),
        });
        // Reasoning that led to nothing may not go back alone.
        let led_somewhere = !(reply.calls.is_empty() && reply.text.trim().is_empty());
        reply.only_thought = thought && !led_somewhere && reply.finish != Finish::Refused;
        reply.echo = (led_somewhere && !reasoning.is_empty()).then(|| json!({"reasoning": reasoning}));
        Ok(reply)
    }
}

/// A reasoning item as it may be sent back.
fn echoed(item: &Value) -> Value {
    let summary = item["summary"].as_array().cloned().unwrap_or_default();
    json!({"type": "reasoning", "id": item["id"], "summary": summary, "encrypted_content": item["encrypted_content"]})
}
