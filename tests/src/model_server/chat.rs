//! OpenAI chat completions: what the provider refuses, and what it sends.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::answer::Answer;
use super::refusal::Refusal;
use super::script::{Dialect, Quirk, Trouble};
use super::{Event, Issued, shape};

const BODY: &[&str] = &[
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "n",
    "user",
    "response_format",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "store",
    "metadata",
    "reasoning_effort",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "verbosity",
];

/// The longest id that the provider takes.
const LONGEST_ID: usize = 40;

/// Checks a request as the provider does.
pub(super) fn check(body: &Value, dialect: &Dialect, issued: &Issued) -> Result<(), Refusal> {
    let map = shape::object(body, "body")?;
    if let Some(key) = map.keys().find(|key| !BODY.contains(&key.as_str())) {
        return Err(Refusal::bad(format!("Unrecognized request argument supplied: {key}")));
    }
    shape::text(map, "model", "")?;
    let tools = check_tools(map)?;
    check_options(map, tools)?;
    let messages = match map.get("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => messages,
        Some(Value::Array(_)) => {
            return Err(Refusal::at(
                "messages",
                "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array instead.",
            )
            .with_code("empty_array"));
        }
        _ => {
            return Err(Refusal::at("messages", "Missing required parameter: 'messages'.")
                .with_code("missing_required_parameter"));
        }
    };
    let mut pairs = Pairing::default();
    for (index, message) in messages.iter().enumerate() {
        let place = format!("messages[{index}]");
        let message = shape::object(message, &place)?;
        let role = shape::text(message, "role", &place)?;
        if role == "tool" {
            pairs.result(message, index, &place, dialect)?;
            continue;
        }
        pairs.settled()?;
        check_message(role, message, &place)?;
        if dialect.alternate_roles && pairs.repeats(role) {
            return Err(Refusal::bad(
                "After the optional system message, conversation roles must alternate user/assistant/user/assistant/...",
            ));
        }
        if role == "assistant" {
            pairs.calls(message, index, &place, dialect, issued)?;
        }
    }
    pairs.settled()
}

fn check_tools(map: &Map<String, Value>) -> Result<bool, Refusal> {
    let Some(tools) = map.get("tools") else { return Ok(false) };
    let Some(tools) = tools.as_array() else {
        return Err(Refusal::at("tools", "Invalid type for 'tools': expected an array of objects."));
    };
    if tools.is_empty() {
        return Err(Refusal::at(
            "tools",
            "Invalid 'tools': empty array. Expected an array with minimum length 1, but got an empty array instead.",
        )
        .with_code("empty_array"));
    }
    let mut names = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let place = format!("tools[{index}]");
        let tool = shape::object(tool, &place)?;
        shape::only_known(tool, &["type", "function"], &place)?;
        if shape::text(tool, "type", &place)? != "function" {
            return Err(Refusal::at(format!("{place}.type"), "Invalid value. Supported values are: 'function'."));
        }
        let place = format!("{place}.function");
        let function = shape::object(tool.get("function").unwrap_or(&Value::Null), &place)?;
        shape::only_known(function, &["name", "description", "parameters", "strict"], &place)?;
        let name = shape::text(function, "name", &place)?;
        shape::tool_name(name, 64, &format!("{place}.name"))?;
        shape::object_schema(function.get("parameters"), name, &format!("{place}.parameters"))?;
        names.push(name);
    }
    match shape::distinct(names) {
        Ok(()) => Ok(true),
        Err(name) => Err(Refusal::at("tools", format!("Tool names must be unique: '{name}' is declared twice."))),
    }
}

fn check_options(map: &Map<String, Value>, tools: bool) -> Result<(), Refusal> {
    let streams = map.get("stream") == Some(&Value::Bool(true));
    if map.contains_key("stream_options") && !streams {
        return Err(Refusal::at(
            "stream_options",
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
        ));
    }
    for name in ["tool_choice", "parallel_tool_calls"] {
        if map.contains_key(name) && !tools {
            return Err(Refusal::at(
                name,
                format!("Invalid value for '{name}': '{name}' is only allowed when 'tools' are specified."),
            ));
        }
    }
    if map.contains_key("max_tokens") && map.contains_key("max_completion_tokens") {
        return Err(Refusal::at(
            "max_tokens",
            "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
        ));
    }
    Ok(())
}

fn check_message(role: &str, message: &Map<String, Value>, place: &str) -> Result<(), Refusal> {
    let known: &[&str] = match role {
        "system" | "developer" | "user" => &["role", "content", "name"],
        "assistant" => &["role", "content", "name", "tool_calls", "refusal", "reasoning_content"],
        _ => {
            return Err(Refusal::at(
                format!("{place}.role"),
                format!("Invalid value: '{role}'. Supported values are: 'system', 'assistant', 'user', 'function', 'tool', and 'developer'."),
            )
            .with_code("invalid_value"));
        }
    };
    shape::only_known(message, known, place)?;
    match message.get("content") {
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(parts)) => check_parts(parts, &format!("{place}.content")),
        Some(Value::Null) | None if role == "assistant" && message.contains_key("tool_calls") => Ok(()),
        Some(Value::Null) | None => {
            Err(Refusal::at(format!("{place}.content"), "Invalid value for 'content': expected a string, got null."))
        }
        Some(other) => Err(Refusal::at(
            format!("{place}.content"),
            format!(
                "Invalid type for '{place}.content': expected one of a string or array of objects, but got {} instead.",
                shape::kind(other)
            ),
        )
        .with_code("invalid_type")),
    }
}

fn check_parts(parts: &[Value], place: &str) -> Result<(), Refusal> {
    for (index, part) in parts.iter().enumerate() {
        let place = format!("{place}[{index}]");
        let part = shape::object(part, &place)?;
        if shape::text(part, "type", &place)? == "text" && !part.get("text").is_some_and(Value::is_string) {
            return Err(Refusal::at(format!("{place}.text"), format!("Missing required parameter: '{place}.text'.")));
        }
    }
    if parts.is_empty() {
        return Err(Refusal::at(place, format!("Invalid '{place}': empty array.")).with_code("empty_array"));
    }
    Ok(())
}

/// Which calls still wait for their results.
#[derive(Default)]
struct Pairing {
    /// The index of the assistant message, and its calls.
    assistant: Option<(usize, Vec<String>)>,
    answered: HashSet<String>,
    last_role: Option<String>,
}

impl Pairing {
    fn repeats(&mut self, role: &str) -> bool {
        let repeats = role != "system" && self.last_role.as_deref() == Some(role);
        self.last_role = Some(role.to_owned());
        repeats
    }

    /// All calls so far have their results.
    fn settled(&self) -> Result<(), Refusal> {
        let Some((index, calls)) = &self.assistant else { return Ok(()) };
        let missing = shape::list(calls.iter().map(String::as_str).filter(|id| !self.answered.contains(*id)));
        if missing.is_empty() {
            return Ok(());
        }
        Err(Refusal::at(
            format!("messages.[{}].role", index + 1),
            format!(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. The following tool_call_ids did not have response messages: {missing}"
            ),
        ))
    }

    fn calls(
        &mut self,
        message: &Map<String, Value>,
        index: usize,
        place: &str,
        dialect: &Dialect,
        issued: &Issued,
    ) -> Result<(), Refusal> {
        self.assistant = None;
        self.answered.clear();
        let Some(calls) = message.get("tool_calls") else { return Ok(()) };
        let place = format!("{place}.tool_calls");
        let calls = calls.as_array().ok_or_else(|| {
            Refusal::at(
                &place,
                format!(
                    "Invalid type for '{place}': expected an array of objects, but got {} instead.",
                    shape::kind(calls)
                ),
            )
            .with_code("invalid_type")
        })?;
        if calls.is_empty() {
            return Err(Refusal::at(&place, format!("Invalid '{place}': empty array. Expected an array with minimum length 1, but got an empty array instead.")).with_code("empty_array"));
        }
        let mut ids: Vec<String> = Vec::new();
        for (number, call) in calls.iter().enumerate() {
            let place = format!("{place}[{number}]");
            let call = shape::object(call, &place)?;
            shape::only_known(call, &["id", "type", "function"], &place)?;
            let id = shape::text(call, "id", &place)?;
            check_id(id, &format!("{place}.id"), dialect)?;
            if shape::text(call, "type", &place)? != "function" {
                return Err(Refusal::at(format!("{place}.type"), "Invalid value. Supported values are: 'function'."));
            }
            let place = format!("{place}.function");
            let function = shape::object(call.get("function").unwrap_or(&Value::Null), &place)?;
            shape::only_known(function, &["name", "arguments"], &place)?;
            shape::tool_name(shape::text(function, "name", &place)?, 64, &format!("{place}.name"))?;
            check_arguments(function, &place, dialect)?;
            if ids.iter().any(|other| other == id) {
                return Err(Refusal::at(
                    &place,
                    format!("Duplicate value for 'tool_call_id' of '{id}' in message[{index}]"),
                ));
            }
            if dialect.reasoning_required
                && let Some(reasoning) = issued.reasoning_of(id)
                && message.get("reasoning_content").and_then(Value::as_str) != Some(reasoning)
            {
                return Err(Refusal::bad(
                    "The `reasoning_content` in the thinking mode must be passed back to the API.",
                ));
            }
            ids.push(id.to_owned());
        }
        self.assistant = Some((index, ids));
        Ok(())
    }

    fn result(
        &mut self,
        message: &Map<String, Value>,
        index: usize,
        place: &str,
        dialect: &Dialect,
    ) -> Result<(), Refusal> {
        shape::only_known(message, &["role", "content", "tool_call_id", "name"], place)?;
        self.last_role = Some("tool".to_owned());
        let Some((_, calls)) = &self.assistant else {
            return Err(Refusal::at(
                format!("messages.[{index}].role"),
                "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'.",
            ));
        };
        let id = shape::text(message, "tool_call_id", place)?;
        if !calls.iter().any(|call| call == id) {
            return Err(Refusal::at(
                format!("messages.[{index}].tool_call_id"),
                format!("Invalid parameter: 'tool_call_id' of '{id}' not found in 'tool_calls' of previous message."),
            ));
        }
        if !self.answered.insert(id.to_owned()) {
            return Err(Refusal::at(
                format!("messages.[{index}].tool_call_id"),
                format!("Duplicate value for 'tool_call_id' of '{id}' in message[{index}]"),
            ));
        }
        match message.get("content") {
            Some(Value::String(_)) => Ok(()),
            Some(Value::Array(parts)) if !dialect.string_results => check_parts(parts, &format!("{place}.content")),
            other => Err(Refusal::at(
                format!("{place}.content"),
                format!(
                    "Invalid type for '{place}.content': expected a string, but got {} instead.",
                    shape::kind(other.unwrap_or(&Value::Null))
                ),
            )
            .with_code("invalid_type")),
        }
    }
}

fn check_id(id: &str, place: &str, dialect: &Dialect) -> Result<(), Refusal> {
    if let Some(length) = dialect.id_length
        && (id.len() != length || !id.bytes().all(|byte| byte.is_ascii_alphanumeric()))
    {
        return Err(Refusal::bad(format!(
            "Tool call id was {id} but must be a-z, A-Z, 0-9, with a length of {length}."
        )));
    }
    if id.len() > LONGEST_ID {
        return Err(Refusal::at(
            place,
            format!("Invalid '{place}': string too long. Expected a string with maximum length {LONGEST_ID}, but got a string with length {} instead.", id.len()),
        )
        .with_code("string_above_max_length"));
    }
    Ok(())
}

fn check_arguments(function: &Map<String, Value>, place: &str, dialect: &Dialect) -> Result<(), Refusal> {
    let Some(arguments) = function.get("arguments").and_then(Value::as_str) else {
        return Err(Refusal::at(
            format!("{place}.arguments"),
            format!("Invalid type for '{place}.arguments': expected a string."),
        )
        .with_code("invalid_type"));
    };
    if dialect.json_arguments && !serde_json::from_str::<Value>(arguments).is_ok_and(|value| value.is_object()) {
        return Err(Refusal::bad("Can only get item pairs from a mapping.").with_status(400));
    }
    Ok(())
}

/// The finish reason.
fn finish(answer: &Answer) -> String {
    match &answer.turn.finish {
        Some(reason) => reason.clone(),
        None if answer.calls.is_empty() || answer.has(Quirk::StopWithCalls) => "stop".to_owned(),
        None => "tool_calls".to_owned(),
    }
}

fn usage(answer: &Answer) -> Value {
    let tokens = answer.usage;
    json!({
        "prompt_tokens": tokens.input,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.input + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    })
}

/// The answer in one piece.
pub(super) fn whole(answer: &Answer) -> Value {
    let mut message = json!({"role": "assistant", "content": null, "refusal": null});
    if !answer.text.is_empty() || answer.calls.is_empty() {
        message["content"] = json!(answer.text);
    }
    if !answer.reasoning.is_empty() {
        message["reasoning_content"] = json!(answer.reasoning);
    }
    if !answer.calls.is_empty() {
        let calls: Vec<Value> = answer
            .calls
            .iter()
            .map(|call| {
                let mut value = json!({"function": {"name": call.name, "arguments": call.arguments}});
                if let Some(id) = &call.id {
                    value["id"] = json!(id);
                }
                if !answer.has(Quirk::NoType) {
                    value["type"] = json!("function");
                }
                value
            })
            .collect();
        message["tool_calls"] = json!(calls);
    }
    let mut value = json!({
        "id": format!("chatcmpl-{}", answer.id),
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": answer.model,
        "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": finish(answer)}],
        "system_fingerprint": "fp_scripted",
    });
    if !answer.has(Quirk::NoUsage) {
        value["usage"] = usage(answer);
    }
    value
}

/// The answer as a stream.
pub(super) fn stream(answer: &Answer, body: &Value) -> Vec<Event> {
    let wants_usage = body.pointer("/stream_options/include_usage") == Some(&Value::Bool(true));
    let chunk = |delta: Value, reason: Value| {
        let mut value = json!({
            "id": format!("chatcmpl-{}", answer.id),
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": answer.model,
            "system_fingerprint": "fp_scripted",
            "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason}],
        });
        if wants_usage && !answer.has(Quirk::NoUsage) {
            value["usage"] = Value::Null;
        }
        value
    };
    let mut chunks = vec![chunk(json!({"role": "assistant", "content": ""}), Value::Null)];
    for part in answer.fragments(&answer.reasoning) {
        chunks.push(chunk(json!({"reasoning_content": part}), Value::Null));
    }
    for part in answer.fragments(&answer.text) {
        chunks.push(chunk(json!({"content": part}), Value::Null));
    }
    for delta in call_deltas(answer) {
        chunks.push(chunk(json!({"tool_calls": [delta]}), Value::Null));
    }
    let mut last = chunk(json!({}), json!(finish(answer)));
    let reports = wants_usage && !answer.has(Quirk::NoUsage);
    if reports && answer.has(Quirk::EarlyUsage) {
        last["usage"] = usage(answer);
    }
    chunks.push(last);
    if reports && !answer.has(Quirk::EarlyUsage) {
        let mut value = chunk(json!({}), Value::Null);
        value["choices"] = json!([]);
        value["usage"] = usage(answer);
        chunks.push(value);
    }
    let mut events: Vec<Event> = chunks.into_iter().map(|value| Event::unnamed(value.to_string())).collect();
    if !answer.has(Quirk::NoEnd) {
        events.push(Event::unnamed("[DONE]".to_owned()));
    }
    events
}

/// The fragments of the calls in the order in which they are sent.
fn call_deltas(answer: &Answer) -> Vec<Value> {
    let mut queues: Vec<Vec<Value>> = Vec::new();
    for (index, call) in answer.calls.iter().enumerate() {
        let mut deltas = Vec::new();
        let mut parts = answer.argument_fragments(call);
        let opening = if answer.has(Quirk::WholeCalls) && !parts.is_empty() { parts.remove(0) } else { String::new() };
        for (number, part) in std::iter::once(opening).chain(parts).enumerate() {
            let mut function = json!({"arguments": part});
            let mut delta = Map::new();
            if number == 0 || answer.has(Quirk::RepeatNames) {
                function["name"] = json!(call.name);
                if let Some(id) = &call.id {
                    delta.insert("id".to_owned(), json!(id));
                }
                if !answer.has(Quirk::NoType) {
                    delta.insert("type".to_owned(), json!("function"));
                }
            }
            if !answer.has(Quirk::NoIndex) {
                delta.insert("index".to_owned(), json!(index));
            }
            delta.insert("function".to_owned(), function);
            deltas.push(Value::Object(delta));
        }
        queues.push(deltas);
    }
    if answer.has(Quirk::Interleaved) { interleave(queues) } else { queues.concat() }
}

fn interleave(queues: Vec<Vec<Value>>) -> Vec<Value> {
    let longest = queues.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|place| queues.iter().filter_map(move |queue| queue.get(place).cloned())).collect()
}

/// An error in the middle of a stream.
pub(super) fn error_events(trouble: Trouble) -> Vec<Event> {
    vec![Event::unnamed(trouble.body(super::Format::Chat).to_string())]
}

/// How many turns the assistant has had.
pub(super) fn assistant_turns(body: &Value) -> usize {
    let messages = body.get("messages").and_then(Value::as_array);
    messages.map_or(0, |messages| messages.iter().filter(|message| message["role"] == "assistant").count())
}
