//! Anthropic Messages: what the provider refuses, and what it sends.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::answer::{Answer, sign};
use super::refusal::Refusal;
use super::script::{Dialect, Quirk, Trouble};
use super::{Event, Issued, shape};

const BODY: &[&str] = &[
    "model",
    "messages",
    "max_tokens",
    "system",
    "tools",
    "tool_choice",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "metadata",
    "thinking",
    "service_tier",
    "container",
    "context_management",
    "output_config",
];

/// Checks a request as the provider does.
pub(super) fn check(body: &Value, dialect: &Dialect, issued: &Issued) -> Result<(), Refusal> {
    let map = shape::object(body, "body")?;
    if let Some(key) = map.keys().find(|key| !BODY.contains(&key.as_str())) {
        return Err(Refusal::at(key.clone(), "Extra inputs are not permitted"));
    }
    for name in ["model", "messages", "max_tokens"] {
        if !map.contains_key(name) {
            return Err(Refusal::at(name, "Field required"));
        }
    }
    if !map["model"].is_string() {
        return Err(Refusal::at("model", "Input should be a valid string"));
    }
    let Some(most) = map["max_tokens"].as_u64().filter(|most| *most > 0) else {
        return Err(Refusal::at("max_tokens", "Input should be greater than or equal to 1"));
    };
    let tools = check_tools(map)?;
    let thinks = check_thinking(map, most)?;
    check_system(map)?;
    let messages = map["messages"].as_array().ok_or_else(|| Refusal::at("messages", "Input should be a valid list"))?;
    if messages.is_empty() {
        return Err(Refusal::at("messages", "at least one message is required"));
    }
    let mut transcript = Transcript { issued, tools, open: Vec::new(), seen: HashSet::new() };
    let mut previous = "";
    let last_assistant = messages.iter().rposition(|message| message["role"] == "assistant");
    for (index, message) in messages.iter().enumerate() {
        let place = format!("messages.{index}");
        let message = message.as_object().ok_or_else(|| {
            Refusal::at(&place, "Input should be a valid dictionary or object to extract fields from")
        })?;
        let role = check_role(message, index, &place)?;
        if dialect.alternate_roles && role == previous {
            return Err(Refusal::at(
                "messages",
                format!(
                    "roles must alternate between \"user\" and \"assistant\", but found multiple \"{role}\" roles in a row"
                ),
            ));
        }
        let blocks = content(message, &place)?;
        if blocks.is_empty() && !(role == "assistant" && index + 1 == messages.len()) {
            return Err(Refusal::at(
                &place,
                "all messages must have non-empty content except for the optional final assistant message",
            ));
        }
        if role == "user" {
            transcript.user(&blocks, index, &place)?;
        } else {
            transcript.unanswered(index)?;
            transcript.assistant(&blocks, &place, thinks && last_assistant == Some(index))?;
        }
        previous = role;
    }
    if previous == "assistant" && thinks {
        return Err(Refusal::bad(
            "This model does not support assistant message prefill. The conversation must end with a user message.",
        ));
    }
    transcript.unanswered(messages.len())
}

fn check_role<'a>(message: &'a Map<String, Value>, index: usize, place: &str) -> Result<&'a str, Refusal> {
    if let Some(key) = message.keys().find(|key| *key != "role" && *key != "content") {
        return Err(Refusal::at(format!("{place}.{key}"), "Extra inputs are not permitted"));
    }
    match message.get("role").and_then(Value::as_str) {
        Some("user") => Ok("user"),
        Some("assistant") if index == 0 => Err(Refusal::at("messages", "first message must use the \"user\" role")),
        Some("assistant") => Ok("assistant"),
        Some("system") => Err(Refusal::at(
            "messages",
            "Unexpected role \"system\". The Messages API accepts a top-level `system` parameter, not \"system\" as an input message role.",
        )),
        Some(other) => Err(Refusal::at(
            "messages",
            format!("Unexpected role \"{other}\". Allowed roles are \"user\" or \"assistant\"."),
        )),
        None => Err(Refusal::at(format!("{place}.role"), "Field required")),
    }
}

fn check_tools(map: &Map<String, Value>) -> Result<bool, Refusal> {
    let Some(tools) = map.get("tools").and_then(Value::as_array) else {
        if map.contains_key("tool_choice") {
            return Err(Refusal::at("tool_choice", "tool_choice may only be specified while providing tools"));
        }
        return Ok(false);
    };
    let mut names = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let place = format!("tools.{index}.custom");
        let tool = tool.as_object().ok_or_else(|| Refusal::at(&place, "Input should be a valid dictionary"))?;
        if let Some(key) = tool.keys().find(|key| {
            !["name", "description", "input_schema", "type", "cache_control", "strict"].contains(&key.as_str())
        }) {
            return Err(Refusal::at(format!("{place}.{key}"), "Extra inputs are not permitted"));
        }
        let Some(name) = tool.get("name").and_then(Value::as_str) else {
            return Err(Refusal::at(format!("{place}.name"), "Field required"));
        };
        if shape::tool_name(name, 128, &place).is_err() {
            return Err(Refusal::at(format!("{place}.name"), "String should match pattern '^[a-zA-Z0-9_-]{1,128}$'"));
        }
        let Some(schema) = tool.get("input_schema") else {
            return Err(Refusal::at(format!("{place}.input_schema"), "Field required"));
        };
        match schema.get("type").and_then(Value::as_str) {
            Some("object") => {}
            Some(_) => {
                return Err(Refusal::at(format!("{place}.input_schema.type"), "Input should be 'object'"));
            }
            None => return Err(Refusal::at(format!("{place}.input_schema.type"), "Field required")),
        }
        names.push(name);
    }
    shape::distinct(names).map_err(|_| Refusal::at("tools", "Tool names must be unique."))?;
    Ok(!tools.is_empty())
}

fn check_thinking(map: &Map<String, Value>, most: u64) -> Result<bool, Refusal> {
    let Some(thinking) = map.get("thinking") else { return Ok(false) };
    match thinking.get("type").and_then(Value::as_str) {
        Some("disabled") => return Ok(false),
        Some("enabled") => {}
        Some("adaptive") => return Ok(true),
        _ => return Err(Refusal::at("thinking.type", "Input should be 'enabled', 'disabled' or 'adaptive'")),
    }
    let budget = thinking.get("budget_tokens").and_then(Value::as_u64);
    match budget {
        Some(budget) if budget < 1024 => {
            return Err(Refusal::at("thinking.enabled.budget_tokens", "Input should be greater than or equal to 1024"));
        }
        Some(budget) if budget >= most => {
            return Err(Refusal::bad("`max_tokens` must be greater than `thinking.budget_tokens`."));
        }
        Some(_) => {}
        None => return Err(Refusal::at("thinking.enabled.budget_tokens", "Field required")),
    }
    if map.get("temperature").is_some_and(|temperature| temperature.as_f64() != Some(1.0)) {
        return Err(Refusal::bad("`temperature` may only be set to 1 when thinking is enabled."));
    }
    Ok(true)
}

fn check_system(map: &Map<String, Value>) -> Result<(), Refusal> {
    match map.get("system") {
        None | Some(Value::String(_)) => Ok(()),
        Some(Value::Array(blocks)) => {
            for (index, block) in blocks.iter().enumerate() {
                if block["type"] != "text" || !block["text"].is_string() {
                    return Err(Refusal::at(format!("system.{index}.type"), "Input should be 'text'"));
                }
            }
            Ok(())
        }
        Some(_) => Err(Refusal::at("system", "Input should be a valid string or list")),
    }
}

/// A message's blocks; a plain string is one block of text.
fn content(message: &Map<String, Value>, place: &str) -> Result<Vec<Value>, Refusal> {
    match message.get("content") {
        Some(Value::String(text)) if text.is_empty() => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![json!({"type": "text", "text": text})]),
        Some(Value::Array(blocks)) => Ok(blocks.clone()),
        Some(_) => Err(Refusal::at(format!("{place}.content"), "Input should be a valid list")),
        None => Err(Refusal::at(format!("{place}.content"), "Field required")),
    }
}

/// The conversation as far as it has been checked.
struct Transcript<'a> {
    issued: &'a Issued,
    /// Whether the request advertises tools.
    tools: bool,
    /// The calls of the message before.
    open: Vec<String>,
    /// All calls so far.
    seen: HashSet<String>,
}

impl Transcript<'_> {
    /// Refuses a message that is not the one with the results.
    fn unanswered(&self, index: usize) -> Result<(), Refusal> {
        if self.open.is_empty() {
            return Ok(());
        }
        let missing = shape::list(self.open.iter().map(String::as_str));
        Err(Refusal::at(
            format!("messages.{}", index.saturating_sub(1)),
            format!(
                "`tool_use` ids were found without `tool_result` blocks immediately after: {missing}. Each `tool_use` block must have a corresponding `tool_result` block in the next message."
            ),
        ))
    }

    fn user(&mut self, blocks: &[Value], index: usize, place: &str) -> Result<(), Refusal> {
        let mut answered: HashSet<&str> = HashSet::new();
        let mut other_before = false;
        for (number, block) in blocks.iter().enumerate() {
            let here = format!("{place}.content.{number}");
            match block.get("type").and_then(Value::as_str) {
                Some("text") => {
                    check_text(block, &here)?;
                    other_before = true;
                }
                Some("image" | "document") => other_before = true,
                Some("tool_result") => {
                    self.need_tools()?;
                    let id = block
                        .get("tool_use_id")
                        .and_then(Value::as_str)
                        .ok_or_else(|| Refusal::at(format!("{here}.tool_result.tool_use_id"), "Field required"))?;
                    if !self.open.iter().any(|call| call == id) {
                        return Err(Refusal::at(
                            &here,
                            format!(
                                "unexpected `tool_use_id` found in `tool_result` blocks: {id}. Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
                            ),
                        ));
                    }
                    if !answered.insert(id) {
                        return Err(Refusal::at(
                            &here,
                            format!(
                                "each tool_use must have a single result. Found multiple `tool_result` blocks with id: {id}"
                            ),
                        ));
                    }
                    // Results that come after other content do not count as immediately after.
                    if other_before {
                        return self.unanswered(index);
                    }
                    check_result(block, &here)?;
                }
                other => return Err(wrong_block(&here, other)),
            }
        }
        self.open.retain(|call| !answered.contains(call.as_str()));
        self.unanswered(index)
    }

    fn assistant(&mut self, blocks: &[Value], place: &str, thinks: bool) -> Result<(), Refusal> {
        let first = blocks.first().and_then(|block| block["type"].as_str());
        for (number, block) in blocks.iter().enumerate() {
            let here = format!("{place}.content.{number}");
            match block.get("type").and_then(Value::as_str) {
                Some("text") => check_text(block, &here)?,
                Some("thinking") => self.check_thought(block, &here)?,
                Some("redacted_thinking") => {}
                Some("tool_use") => {
                    self.need_tools()?;
                    let id = self.check_use(block, &here)?;
                    if thinks && self.issued.reasoning_of(&id).is_some() && first != Some("thinking") {
                        return Err(Refusal::at(
                            format!("{place}.content.0.type"),
                            format!(
                                "Expected `thinking` or `redacted_thinking`, but found `{}`. When `thinking` is enabled, a final `assistant` message must start with a thinking block (preceeding the lastmost set of `tool_use` and `tool_result` blocks).",
                                first.unwrap_or("nothing")
                            ),
                        ));
                    }
                    if let (true, Some(reasoning)) = (thinks, self.issued.reasoning_of(&id))
                        && blocks[0]["thinking"] != reasoning
                    {
                        return Err(Refusal::at(
                            format!("{place}.content.0"),
                            "`thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. These blocks must remain as they were in the original response.",
                        ));
                    }
                    self.open.push(id);
                }
                other => return Err(wrong_block(&here, other)),
            }
        }
        Ok(())
    }

    fn check_thought(&self, block: &Value, here: &str) -> Result<(), Refusal> {
        let Some(thought) = block.get("thinking").and_then(Value::as_str) else {
            return Err(Refusal::at(format!("{here}.thinking.thinking"), "Field required"));
        };
        let Some(signature) = block.get("signature").and_then(Value::as_str) else {
            return Err(Refusal::at(format!("{here}.thinking.signature"), "Field required"));
        };
        if signature != sign(thought) {
            return Err(Refusal::at(here, "Invalid `signature` in `thinking` block"));
        }
        Ok(())
    }

    fn check_use(&mut self, block: &Value, here: &str) -> Result<String, Refusal> {
        for name in ["id", "name", "input"] {
            if block.get(name).is_none() {
                return Err(Refusal::at(format!("{here}.tool_use.{name}"), "Field required"));
            }
        }
        let id = block["id"].as_str().unwrap_or_default();
        if shape::tool_name(id, 256, here).is_err() {
            return Err(Refusal::at(format!("{here}.tool_use.id"), "String should match pattern '^[a-zA-Z0-9_-]+$'"));
        }
        if shape::tool_name(block["name"].as_str().unwrap_or_default(), 200, here).is_err() {
            return Err(Refusal::at(
                format!("{here}.tool_use.name"),
                "String should match pattern '^[a-zA-Z0-9_-]{1,200}$'",
            ));
        }
        if !block["input"].is_object() {
            return Err(Refusal::at(format!("{here}.tool_use.input"), "Input should be a valid dictionary"));
        }
        if !self.seen.insert(id.to_owned()) {
            return Err(Refusal::at(here, "`tool_use` ids must be unique"));
        }
        Ok(id.to_owned())
    }

    fn need_tools(&self) -> Result<(), Refusal> {
        if self.tools {
            return Ok(());
        }
        Err(Refusal::bad("Requests which include `tool_use` or `tool_result` blocks must define tools"))
    }
}

fn wrong_block(here: &str, kind: Option<&str>) -> Refusal {
    let kind = kind.unwrap_or("nothing");
    Refusal::at(here, format!("Input tag '{kind}' found using 'type' does not match any of the expected tags"))
}

fn check_text(block: &Value, here: &str) -> Result<(), Refusal> {
    match block.get("text").and_then(Value::as_str) {
        None => Err(Refusal::at(format!("{here}.text.text"), "Field required")),
        Some("") => Err(Refusal::at("messages", "text content blocks must be non-empty")),
        Some(text) if text.trim().is_empty() => {
            Err(Refusal::at("messages", "text content blocks must contain non-whitespace text"))
        }
        Some(_) => Ok(()),
    }
}

fn check_result(block: &Value, here: &str) -> Result<(), Refusal> {
    match block.get("content") {
        None | Some(Value::String(_)) => Ok(()),
        Some(Value::Array(parts)) => {
            for (index, part) in parts.iter().enumerate() {
                if part["type"] == "text" {
                    check_text(part, &format!("{here}.tool_result.content.{index}"))?;
                }
            }
            Ok(())
        }
        Some(_) => Err(Refusal::at(format!("{here}.tool_result.content"), "Input should be a valid string or list")),
    }
}

fn stop_reason(answer: &Answer) -> String {
    match &answer.turn.finish {
        Some(reason) => reason.clone(),
        None if answer.calls.is_empty() || answer.has(Quirk::StopWithCalls) => "end_turn".to_owned(),
        None => "tool_use".to_owned(),
    }
}

/// The input's share of usage: what came from the cache is not part of `input_tokens` here.
fn input_usage(answer: &Answer) -> Value {
    json!({
        "input_tokens": answer.usage.input - answer.usage.cached.min(answer.usage.input),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.usage.cached,
        "output_tokens": 1,
    })
}

fn blocks(answer: &Answer) -> Vec<Value> {
    let mut blocks = Vec::new();
    if !answer.reasoning.is_empty() {
        blocks.push(json!({"type": "thinking", "thinking": answer.reasoning, "signature": answer.signature()}));
    }
    if !answer.text.is_empty() {
        blocks.push(json!({"type": "text", "text": answer.text}));
    }
    for call in &answer.calls {
        let input: Value =
            serde_json::from_str(&call.arguments).unwrap_or_else(|_| Value::String(call.arguments.clone()));
        let mut block = json!({"type": "tool_use", "name": call.name, "input": input});
        if let Some(id) = &call.id {
            block["id"] = json!(id);
        }
        blocks.push(block);
    }
    blocks
}

/// The answer in one piece.
pub(super) fn whole(answer: &Answer) -> Value {
    let mut value = json!({
        "id": format!("msg_{}", answer.id),
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": blocks(answer),
        "stop_reason": stop_reason(answer),
        "stop_sequence": null,
    });
    if !answer.has(Quirk::NoUsage) {
        let mut usage = input_usage(answer);
        usage["output_tokens"] = json!(answer.usage.output);
        value["usage"] = usage;
    }
    value
}

/// The answer as a stream.
pub(super) fn stream(answer: &Answer) -> Vec<Event> {
    let mut events = Vec::new();
    let mut push = |value: Value| {
        let name = value["type"].as_str().unwrap_or_default().to_owned();
        events.push(Event { name: Some(name), data: value.to_string() });
    };
    let mut start = json!({
        "id": format!("msg_{}", answer.id), "type": "message", "role": "assistant", "model": answer.model,
        "content": [], "stop_reason": null, "stop_sequence": null,
    });
    if !answer.has(Quirk::NoUsage) {
        start["usage"] = input_usage(answer);
    }
    push(json!({"type": "message_start", "message": start}));
    push(json!({"type": "ping"}));
    let mut calls = answer.calls.iter();
    for (index, block) in blocks(answer).into_iter().enumerate() {
        let delta = |delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
        let mut opening = block.clone();
        let mut deltas = Vec::new();
        match block["type"].as_str().unwrap_or_default() {
            "thinking" => {
                opening["thinking"] = json!("");
                opening["signature"] = json!("");
                for part in answer.fragments(&answer.reasoning) {
                    deltas.push(delta(json!({"type": "thinking_delta", "thinking": part})));
                }
                deltas.push(delta(json!({"type": "signature_delta", "signature": answer.signature()})));
            }
            "text" => {
                opening["text"] = json!("");
                for part in answer.fragments(&answer.text) {
                    deltas.push(delta(json!({"type": "text_delta", "text": part})));
                }
            }
            _ => {
                opening["input"] = json!({});
                let parts = calls.next().map(|call| answer.argument_fragments(call)).unwrap_or_default();
                for part in std::iter::once(String::new()).chain(parts) {
                    deltas.push(delta(json!({"type": "input_json_delta", "partial_json": part})));
                }
            }
        }
        push(json!({"type": "content_block_start", "index": index, "content_block": opening}));
        deltas.into_iter().for_each(&mut push);
        push(json!({"type": "content_block_stop", "index": index}));
    }
    let mut last = json!({
        "type": "message_delta",
        "delta": {"stop_reason": stop_reason(answer), "stop_sequence": null},
    });
    if !answer.has(Quirk::NoUsage) {
        last["usage"] = json!({"output_tokens": answer.usage.output});
    }
    push(last);
    if !answer.has(Quirk::NoEnd) {
        push(json!({"type": "message_stop"}));
    }
    events
}

/// An error in the middle of a stream.
pub(super) fn error_events(trouble: Trouble) -> Vec<Event> {
    vec![Event { name: Some("error".to_owned()), data: trouble.body(super::Format::Messages).to_string() }]
}
