//! OpenAI Responses: what the provider refuses, and what it sends.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::answer::{Answer, AnswerCall, sign};
use super::refusal::Refusal;
use super::script::{Quirk, Trouble};
use super::{Event, Issued, shape};

const BODY: &[&str] = &[
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "stream",
    "store",
    "include",
    "reasoning",
    "text",
    "max_output_tokens",
    "temperature",
    "top_p",
    "metadata",
    "user",
    "truncation",
    "previous_response_id",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "stream_options",
    "max_tool_calls",
    "background",
];

/// Checks a request as the provider does.
pub(super) fn check(body: &Value, issued: &Issued) -> Result<(), Refusal> {
    let map = shape::object(body, "body")?;
    shape::only_known(map, BODY, "")?;
    shape::text(map, "model", "")?;
    check_tools(map)?;
    if let Some(id) = map.get("previous_response_id").and_then(Value::as_str) {
        return Err(Refusal::at("previous_response_id", format!("Previous response with id '{id}' not found."))
            .with_code("previous_response_not_found"));
    }
    let items = match map.get("input") {
        Some(Value::String(_)) => return Ok(()),
        Some(Value::Array(items)) => items,
        Some(other) => {
            return Err(Refusal::at(
                "input",
                format!(
                    "Invalid type for 'input': expected one of an array of objects or string, but got {} instead.",
                    shape::kind(other)
                ),
            )
            .with_code("invalid_type"));
        }
        None => {
            return Err(
                Refusal::at("input", "Missing required parameter: 'input'.").with_code("missing_required_parameter")
            );
        }
    };
    let mut checked = Items { issued, calls: Vec::new(), answered: HashSet::new(), reasoning: None };
    for (index, item) in items.iter().enumerate() {
        checked.item(item, &format!("input[{index}]"))?;
    }
    checked.finish()
}

fn check_tools(map: &Map<String, Value>) -> Result<(), Refusal> {
    let tools = map.get("tools").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if map.contains_key("tool_choice") && map["tool_choice"] != "auto" && tools.is_empty() {
        return Err(Refusal::at("tool_choice", "Tool choice requires 'tools' to be specified."));
    }
    let mut names = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let place = format!("tools[{index}]");
        let tool = shape::object(tool, &place)?;
        if shape::text(tool, "type", &place)? != "function" {
            continue;
        }
        // Chat completions nests these in `function`; here that is a missing name.
        shape::only_known(tool, &["type", "name", "description", "parameters", "strict"], &place)?;
        let name = shape::text(tool, "name", &place)?;
        shape::tool_name(name, 64, &format!("{place}.name"))?;
        shape::object_schema(tool.get("parameters"), name, &format!("{place}.parameters"))?;
        names.push(name);
    }
    shape::distinct(names)
        .map_err(|name| Refusal::at("tools", format!("Tool names must be unique: '{name}' is declared twice.")))
}

/// The items as far as they have been checked.
struct Items<'a> {
    issued: &'a Issued,
    calls: Vec<String>,
    answered: HashSet<String>,
    /// The id of a reasoning item whose following item has not come yet.
    reasoning: Option<String>,
}

impl Items<'_> {
    fn item(&mut self, item: &Value, place: &str) -> Result<(), Refusal> {
        let map = shape::object(item, place)?;
        let kind = match map.get("type").and_then(Value::as_str) {
            Some(kind) => kind,
            None if map.contains_key("role") => "message",
            None => {
                return Err(Refusal::at(
                    format!("{place}.type"),
                    format!("Missing required parameter: '{place}.type'."),
                )
                .with_code("missing_required_parameter"));
            }
        };
        match kind {
            "message" => self.message(map, place),
            "reasoning" => self.thought(map, place),
            "function_call" => self.call(map, place),
            "function_call_output" => self.output(map, place),
            "item_reference" => Err(not_found(map.get("id").and_then(Value::as_str).unwrap_or_default())),
            other => Err(Refusal::at(
                format!("{place}.type"),
                format!("Invalid value: '{other}'. Supported values are: 'function_call', 'function_call_output', 'item_reference', 'message', and 'reasoning'."),
            )
            .with_code("invalid_value")),
        }
    }

    fn message(&mut self, map: &Map<String, Value>, place: &str) -> Result<(), Refusal> {
        shape::only_known(map, &["type", "role", "content", "id", "status", "phase"], place)?;
        let role = shape::text(map, "role", place)?;
        if !["user", "assistant", "system", "developer"].contains(&role) {
            return Err(Refusal::at(
                format!("{place}.role"),
                format!(
                    "Invalid value: '{role}'. Supported values are: 'assistant', 'system', 'developer', and 'user'."
                ),
            )
            .with_code("invalid_value"));
        }
        check_own_id(map, "msg", place)?;
        if role == "assistant" {
            self.reasoning = None;
        } else {
            self.led_to_nothing()?;
        }
        let wanted = if role == "assistant" { "output_text" } else { "input_text" };
        match map.get("content") {
            Some(Value::String(_)) => Ok(()),
            Some(Value::Array(parts)) => parts.iter().enumerate().try_for_each(|(index, part)| {
                let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
                let fits = kind == wanted
                    || (role == "assistant" && kind == "refusal")
                    || (role == "user" && kind == "input_image");
                if fits {
                    return Ok(());
                }
                Err(Refusal::at(
                    format!("{place}.content[{index}]"),
                    format!("Invalid value: '{kind}'. Supported values are: '{wanted}'."),
                )
                .with_code("invalid_value"))
            }),
            _ => {
                Err(Refusal::at(format!("{place}.content"), format!("Missing required parameter: '{place}.content'."))
                    .with_code("missing_required_parameter"))
            }
        }
    }

    fn thought(&mut self, map: &Map<String, Value>, place: &str) -> Result<(), Refusal> {
        shape::only_known(map, &["type", "id", "summary", "encrypted_content", "content", "status"], place)?;
        self.led_to_nothing()?;
        let id = shape::text(map, "id", place)?;
        check_own_id(map, "rs", place)?;
        if !map.get("summary").is_some_and(Value::is_array) {
            return Err(Refusal::at(
                format!("{place}.summary"),
                format!("Missing required parameter: '{place}.summary'."),
            )
            .with_code("missing_required_parameter"));
        }
        match map.get("encrypted_content").and_then(Value::as_str) {
            None => Err(not_found(id)),
            Some(content) if !is_encrypted(content) => Err(Refusal::bad(format!(
                "The encrypted content for item {id} could not be verified. Reason: Encrypted content could not be decrypted or parsed."
            ))
            .with_code("invalid_encrypted_content")),
            Some(_) => {
                self.reasoning = Some(id.to_owned());
                Ok(())
            }
        }
    }

    fn call(&mut self, map: &Map<String, Value>, place: &str) -> Result<(), Refusal> {
        shape::only_known(map, &["type", "id", "call_id", "name", "arguments", "status"], place)?;
        check_own_id(map, "fc", place)?;
        let id = shape::text(map, "call_id", place)?;
        if id.len() > 64 {
            return Err(Refusal::at(
                format!("{place}.call_id"),
                format!("Invalid '{place}.call_id': string too long. Expected a string with maximum length 64."),
            )
            .with_code("string_above_max_length"));
        }
        shape::tool_name(shape::text(map, "name", place)?, 64, &format!("{place}.name"))?;
        if !map.get("arguments").is_some_and(Value::is_string) {
            return Err(Refusal::at(
                format!("{place}.arguments"),
                format!("Invalid type for '{place}.arguments': expected a string."),
            )
            .with_code("invalid_type"));
        }
        if self.calls.iter().any(|call| call == id) {
            return Err(Refusal::at("input", format!("Duplicate function call with call_id {id}.")));
        }
        if let (Some(own), Some(reasoning), None) =
            (map.get("id").and_then(Value::as_str), self.issued.reasoning_item_of(id), &self.reasoning)
            && !self.calls.iter().any(|call| self.issued.reasoning_item_of(call) == Some(reasoning))
        {
            return Err(Refusal::at(
                "input",
                format!(
                    "Item '{own}' of type 'function_call' was provided without its required 'reasoning' item: '{reasoning}'."
                ),
            ));
        }
        self.reasoning = None;
        self.calls.push(id.to_owned());
        Ok(())
    }

    fn output(&mut self, map: &Map<String, Value>, place: &str) -> Result<(), Refusal> {
        shape::only_known(map, &["type", "id", "call_id", "output", "status"], place)?;
        self.led_to_nothing()?;
        let id = shape::text(map, "call_id", place)?;
        if !self.calls.iter().any(|call| call == id) {
            return Err(Refusal::at(
                "input",
                format!("No tool call found for function call output with call_id {id}."),
            ));
        }
        if !self.answered.insert(id.to_owned()) {
            return Err(Refusal::at("input", format!("Duplicate function call output with call_id {id}.")));
        }
        match map.get("output") {
            Some(Value::String(_) | Value::Array(_)) => Ok(()),
            Some(other) => Err(Refusal::at(
                format!("{place}.output"),
                format!("Invalid type for '{place}.output': expected one of an array of objects or string, but got {} instead.", shape::kind(other)),
            )
            .with_code("invalid_type")),
            None => Err(Refusal::at(format!("{place}.output"), format!("Missing required parameter: '{place}.output'."))
                .with_code("missing_required_parameter")),
        }
    }

    fn led_to_nothing(&self) -> Result<(), Refusal> {
        match &self.reasoning {
            None => Ok(()),
            Some(id) => Err(Refusal::at(
                "input",
                format!("Item '{id}' of type 'reasoning' was provided without its required following item."),
            )),
        }
    }

    fn finish(&self) -> Result<(), Refusal> {
        self.led_to_nothing()?;
        match self.calls.iter().find(|call| !self.answered.contains(*call)) {
            None => Ok(()),
            Some(call) => Err(Refusal::at("input", format!("No tool output found for function call {call}."))),
        }
    }
}

fn check_own_id(map: &Map<String, Value>, prefix: &str, place: &str) -> Result<(), Refusal> {
    match map.get("id").and_then(Value::as_str) {
        Some(id) if !id.starts_with(prefix) => Err(Refusal::at(
            format!("{place}.id"),
            format!("Invalid '{place}.id': '{id}'. Expected an ID that begins with '{prefix}'."),
        )
        .with_code("invalid_value")),
        _ => Ok(()),
    }
}

fn not_found(id: &str) -> Refusal {
    Refusal::at("input", format!("Item with id '{id}' not found. Items are not persisted when `store` is set to false. Try again with `store` set to true, or remove this item from your input."))
        .with_status(404)
}

/// Opaque to the client, checkable by the server.
fn encrypt(reasoning: &str) -> String {
    let hidden: String = reasoning.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("gAAAAA{hidden}.{}", sign(&hidden))
}

fn is_encrypted(content: &str) -> bool {
    content
        .strip_prefix("gAAAAA")
        .and_then(|rest| rest.rsplit_once('.'))
        .is_some_and(|(hidden, signature)| signature == sign(hidden))
}

/// The id of the item that holds an answer's reasoning.
pub(super) fn reasoning_id(answer: &Answer) -> String {
    format!("rs_{}", answer.id)
}

fn usage(answer: &Answer) -> Value {
    let tokens = answer.usage;
    json!({
        "input_tokens": tokens.input,
        "input_tokens_details": {"cached_tokens": tokens.cached},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens.input + tokens.output,
    })
}

fn call_item(answer: &Answer, index: usize, call: &AnswerCall, arguments: &str, status: &str) -> Value {
    let mut item = json!({
        "type": "function_call", "id": format!("fc_{}{index}", answer.id), "name": call.name, "arguments": arguments,
        "status": status,
    });
    if let Some(id) = &call.id {
        item["call_id"] = json!(id);
    }
    item
}

fn message_item(answer: &Answer, parts: &Value, status: &str) -> Value {
    json!({"type": "message", "id": format!("msg_{}", answer.id), "role": "assistant", "status": status, "content": parts})
}

fn output_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn reasoning_item(answer: &Answer, encrypted: bool) -> Value {
    let mut item = json!({"type": "reasoning", "id": reasoning_id(answer), "summary": []});
    if encrypted {
        item["encrypted_content"] = json!(encrypt(&answer.reasoning));
    }
    item
}

fn wants_encrypted(body: &Value) -> bool {
    body.get("include")
        .and_then(Value::as_array)
        .is_some_and(|wanted| wanted.iter().any(|name| name == "reasoning.encrypted_content"))
}

fn output(answer: &Answer, body: &Value) -> Vec<Value> {
    let mut items = Vec::new();
    if !answer.reasoning.is_empty() {
        items.push(reasoning_item(answer, wants_encrypted(body)));
    }
    if !answer.text.is_empty() {
        items.push(message_item(answer, &json!([output_part(&answer.text)]), "completed"));
    }
    for (index, call) in answer.calls.iter().enumerate() {
        items.push(call_item(answer, index, call, &call.arguments, "completed"));
    }
    items
}

/// `completed`, or `incomplete` with the reason that the script names.
fn status(answer: &Answer) -> (&str, Value) {
    match answer.turn.finish.as_deref() {
        None | Some("completed" | "stop") => ("completed", Value::Null),
        Some(reason) => ("incomplete", json!({"reason": reason})),
    }
}

fn envelope(answer: &Answer, status: &str, output: &[Value]) -> Value {
    json!({
        "id": format!("resp_{}", answer.id), "object": "response", "created_at": 1_700_000_000, "status": status,
        "error": null, "incomplete_details": null, "model": answer.model, "output": output, "store": false,
        "parallel_tool_calls": true, "usage": null,
    })
}

/// The answer in one piece.
pub(super) fn whole(answer: &Answer, body: &Value) -> Value {
    let (status, details) = status(answer);
    let mut value = envelope(answer, status, &output(answer, body));
    value["incomplete_details"] = details;
    if !answer.has(Quirk::NoUsage) {
        value["usage"] = usage(answer);
    }
    value
}

/// The answer as a stream.
pub(super) fn stream(answer: &Answer, body: &Value) -> Vec<Event> {
    let mut numbered = Numbered { events: Vec::new() };
    numbered.push("response.created", json!({"response": envelope(answer, "in_progress", &[])}));
    numbered.push("response.in_progress", json!({"response": envelope(answer, "in_progress", &[])}));
    let mut calls = answer.calls.iter().enumerate();
    for (place, item) in output(answer, body).into_iter().enumerate() {
        match item["type"].as_str().unwrap_or_default() {
            "reasoning" => {
                let opening = reasoning_item(answer, false);
                numbered.push("response.output_item.added", json!({"output_index": place, "item": opening}));
            }
            "message" => {
                let opening = message_item(answer, &json!([]), "in_progress");
                let at = json!({"item_id": item["id"], "output_index": place, "content_index": 0});
                numbered.push("response.output_item.added", json!({"output_index": place, "item": opening}));
                numbered.push_at("response.content_part.added", &at, "part", output_part(""));
                for part in answer.fragments(&answer.text) {
                    numbered.push_at("response.output_text.delta", &at, "delta", json!(part));
                }
                numbered.push_at("response.output_text.done", &at, "text", json!(answer.text));
                numbered.push_at("response.content_part.done", &at, "part", output_part(&answer.text));
            }
            _ => {
                let Some((index, call)) = calls.next() else { continue };
                let opening = call_item(answer, index, call, "", "in_progress");
                let at = json!({"item_id": item["id"], "output_index": place});
                numbered.push("response.output_item.added", json!({"output_index": place, "item": opening}));
                for part in answer.argument_fragments(call) {
                    numbered.push_at("response.function_call_arguments.delta", &at, "delta", json!(part));
                }
                numbered.push_at("response.function_call_arguments.done", &at, "arguments", json!(call.arguments));
            }
        }
        numbered.push("response.output_item.done", json!({"output_index": place, "item": item}));
    }
    if !answer.has(Quirk::NoEnd) {
        let (status, _) = status(answer);
        numbered.push(&format!("response.{status}"), json!({"response": whole(answer, body)}));
    }
    numbered.events
}

/// Events with their sequence numbers.
struct Numbered {
    events: Vec<Event>,
}

impl Numbered {
    fn push(&mut self, name: &str, mut data: Value) {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.events.len());
        self.events.push(Event { name: Some(name.to_owned()), data: data.to_string() });
    }

    fn push_at(&mut self, name: &str, at: &Value, key: &str, value: Value) {
        let mut data = at.clone();
        data[key] = value;
        self.push(name, data);
    }
}

/// An error in the middle of a stream.
pub(super) fn error_events(trouble: Trouble) -> Vec<Event> {
    let (code, message) = trouble.code_and_message();
    let data = json!({"type": "error", "code": code, "message": message, "param": null, "sequence_number": 99});
    vec![Event { name: Some("error".to_owned()), data: data.to_string() }]
}

/// How many turns the assistant has had: runs of items that only a model writes.
pub(super) fn assistant_turns(body: &Value) -> usize {
    let Some(items) = body.get("input").and_then(Value::as_array) else { return 0 };
    let mut turns = 0;
    let mut inside = false;
    for item in items {
        let kind = item["type"].as_str().unwrap_or_default();
        let own = matches!(kind, "reasoning" | "function_call") || item["role"] == "assistant";
        if own && !inside {
            turns += 1;
        }
        inside = own;
    }
    turns
}
