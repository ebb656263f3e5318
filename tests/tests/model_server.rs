//! The scripted model server is as strict as the providers, and breaks as they do.

use std::io::{self, BufReader, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use agentd_tests::http_client::{self, Response, SseEvent};
use agentd_tests::model_server::{
    Call, Conversation, Dialect, Fault, ModelServer, Order, Quirk, Reply, Script, Trouble, Turn,
};
use serde_json::{Value, json};

fn post(server: &ModelServer, path: &str, body: &Value) -> io::Result<Response> {
    post_raw(server, path, body.to_string().as_bytes())?.finish()
}

fn post_raw(server: &ModelServer, path: &str, body: &[u8]) -> io::Result<http_client::Incoming<TcpStream>> {
    let stream = TcpStream::connect(server.address())?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let headers =
        [("content-type", "application/json"), ("anthropic-version", "2023-06-01"), ("authorization", "Bearer k")];
    http_client::send(stream, "POST", path, &headers, body)
}

fn events(server: &ModelServer, path: &str, body: &Value) -> io::Result<Vec<SseEvent>> {
    let mut reader = BufReader::new(post_raw(server, path, body.to_string().as_bytes())?);
    let mut events = Vec::new();
    while let Some(event) = http_client::next_event(&mut reader)? {
        events.push(event);
    }
    Ok(events)
}

fn server(turns: impl IntoIterator<Item = Turn>) -> ModelServer {
    ModelServer::start(Script::of(turns)).unwrap()
}

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

fn chat_tool() -> Value {
    json!({"type": "function", "function": {"name": "stats", "parameters": {"type": "object"}}})
}

fn chat(messages: Value) -> Value {
    json!({"model": "m", "messages": messages, "tools": [chat_tool()]})
}

fn call(id: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": "stats", "arguments": "{}"}})
}

fn result(id: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": "{}"})
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn asks(ids: &[&str]) -> Value {
    json!({"role": "assistant", "content": null, "tool_calls": ids.iter().map(|id| call(id)).collect::<Vec<_>>()})
}

/// A request that must be accepted, and requests near it that must be refused, each with a part of the reason.
fn two_sided(path: &str, good: &Value, dialect: &Dialect, bad: &[(Value, &str)]) {
    for (body, reason) in bad {
        let script = Script { dialect: dialect.clone(), ..Script::of([Turn::text("ok")]) };
        let server = ModelServer::start(script).unwrap();
        let response = post(&server, path, body).unwrap();
        assert!((400..500).contains(&response.status), "accepted: {body}");
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(reason), "{message:?} lacks {reason:?} for {body}");
        assert_eq!(server.refusals().len(), 1);
        assert_eq!(server.turns_left(), 1, "a refused request used a turn");
        let response = post(&server, path, good).unwrap();
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(server.turns_left(), 0);
    }
}

#[test]
fn chat_refuses_what_openai_refuses() {
    let good = chat(json!([user("q"), asks(&["a", "b"]), result("b"), result("a"), user("and?")]));
    let odd_tool =
        json!({"model": "m", "messages": [user("q")], "tools": [{"type": "function", "function": {"name": "a b"}}]});
    let twice = json!({"model": "m", "messages": [user("q")], "tools": [chat_tool(), chat_tool()]});
    two_sided(
        CHAT,
        &good,
        &Dialect::default(),
        &[
            (chat(json!([user("q"), result("a")])), "must be a response to a preceeding message"),
            (chat(json!([user("q"), asks(&["a", "b"]), result("a")])), "did not have response messages: b"),
            (
                chat(json!([user("q"), asks(&["a", "b"]), result("a"), user("x"), result("b")])),
                "did not have response messages: b",
            ),
            (chat(json!([user("q"), asks(&["a"]), user("x"), result("a")])), "did not have response messages: a"),
            (chat(json!([user("q"), asks(&["a"]), result("c")])), "'tool_call_id' of 'c' not found"),
            (chat(json!([user("q"), asks(&["a"]), result("a"), result("a")])), "Duplicate value for 'tool_call_id'"),
            (chat(json!([user("q"), asks(&["a", "a"]), result("a")])), "Duplicate value for 'tool_call_id'"),
            (chat(json!([user("q"), asks(&[])])), "empty array"),
            (chat(json!([user("q"), asks(&["a"])])), "did not have response messages: a"),
            (chat(json!([user("q"), asks(&[&"x".repeat(41)]), result(&"x".repeat(41))])), "string too long"),
            (chat(json!([{"role": "model", "content": "q"}])), "Supported values are"),
            (chat(json!([{"role": "user", "content": null}])), "expected a string, got null"),
            (chat(json!([{"role": "user", "content": "q", "note": 1}])), "Unknown parameter: 'messages[0].note'"),
            (chat(json!([])), "empty array"),
            (json!({"model": "m", "messages": [user("q")], "tools": []}), "empty array"),
            (json!({"model": "m", "messages": [user("q")], "tool_choice": "auto"}), "only allowed when 'tools'"),
            (
                json!({"model": "m", "messages": [user("q")], "stream_options": {"include_usage": true}}),
                "only allowed when 'stream'",
            ),
            (
                json!({"model": "m", "messages": [user("q")], "max_token": 5}),
                "Unrecognized request argument supplied: max_token",
            ),
            (json!({"messages": [user("q")]}), "Missing required parameter: 'model'"),
            (odd_tool, "does not match pattern"),
            (twice, "must be unique"),
        ],
    );
}

#[test]
fn chat_imitates_local_servers() {
    let nine = Dialect { id_length: Some(9), ..Dialect::default() };
    let id = "abcdefgh1";
    two_sided(
        CHAT,
        &chat(json!([user("q"), asks(&[id]), result(id)])),
        &nine,
        &[(chat(json!([user("q"), asks(&["call_1"]), result("call_1")])), "with a length of 9")],
    );
    let strings = Dialect { string_results: true, ..Dialect::default() };
    let parts = json!({"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "{}"}]});
    two_sided(
        CHAT,
        &chat(json!([user("q"), asks(&["a"]), result("a")])),
        &strings,
        &[(chat(json!([user("q"), asks(&["a"]), parts])), "expected a string")],
    );
    let alternate = Dialect { alternate_roles: true, ..Dialect::default() };
    two_sided(
        CHAT,
        &chat(json!([user("q"), asks(&["a"]), result("a"), user("x")])),
        &alternate,
        &[(chat(json!([user("q"), user("x")])), "must alternate")],
    );
    let parsed = Dialect { json_arguments: true, ..Dialect::default() };
    let mut broken = asks(&["a"]);
    broken["tool_calls"][0]["function"]["arguments"] = json!("{\"q\":");
    two_sided(
        CHAT,
        &chat(json!([user("q"), asks(&["a"]), result("a")])),
        &parsed,
        &[(chat(json!([user("q"), broken, result("a")])), "from a mapping")],
    );
}

#[test]
fn chat_wants_reasoning_back_where_the_dialect_says_so() {
    let mut thinking = Turn::calls(vec![Call::new("stats", json!({}))]);
    thinking.reasoning = "let me see".to_owned();
    let script = Script {
        dialect: Dialect { reasoning_required: true, ..Dialect::default() },
        ..Script::of([thinking, Turn::text("ok")])
    };
    let server = ModelServer::start(script).unwrap();
    let first = post(&server, CHAT, &chat(json!([user("q")]))).unwrap().json();
    let message = first["choices"][0]["message"].clone();
    assert_eq!(message["reasoning_content"], "let me see");
    let id = message["tool_calls"][0]["id"].as_str().unwrap().to_owned();
    let mut forgotten = message.clone();
    forgotten.as_object_mut().unwrap().remove("reasoning_content");
    assert_eq!(post(&server, CHAT, &chat(json!([user("q"), forgotten, result(&id)]))).unwrap().status, 400);
    assert_eq!(post(&server, CHAT, &chat(json!([user("q"), message, result(&id)]))).unwrap().status, 200);
}

fn messages_body(messages: Value) -> Value {
    json!({"model": "m", "max_tokens": 4096, "messages": messages,
        "tools": [{"name": "stats", "input_schema": {"type": "object"}}]})
}

fn tool_use(id: &str) -> Value {
    json!({"type": "tool_use", "id": id, "name": "stats", "input": {}})
}

fn tool_result(id: &str) -> Value {
    json!({"type": "tool_result", "tool_use_id": id, "content": "{}"})
}

fn assistant(blocks: Value) -> Value {
    json!({"role": "assistant", "content": blocks})
}

#[test]
fn messages_refuses_what_anthropic_refuses() {
    let text = json!({"type": "text", "text": "and?"});
    let two = assistant(json!([tool_use("a"), tool_use("b")]));
    let good = messages_body(json!([user("q"), two, user_blocks(json!([tool_result("a"), tool_result("b"), text]))]));
    fn user_blocks(blocks: Value) -> Value {
        json!({"role": "user", "content": blocks})
    }
    let no_tools = {
        let mut body = good.clone();
        body.as_object_mut().unwrap().remove("tools");
        body
    };
    let no_limit = {
        let mut body = good.clone();
        body.as_object_mut().unwrap().remove("max_tokens");
        body
    };
    let one = assistant(json!([tool_use("a")]));
    two_sided(
        MESSAGES,
        &good,
        &Dialect::default(),
        &[
            (messages_body(json!([user("q"), user_blocks(json!([tool_result("a")]))])), "unexpected `tool_use_id`"),
            (messages_body(json!([user("q"), two, user_blocks(json!([tool_result("a")]))])), "immediately after: b"),
            (
                messages_body(json!([
                    user("q"),
                    two,
                    user_blocks(json!([tool_result("a")])),
                    user_blocks(json!([tool_result("b")]))
                ])),
                "immediately after: b",
            ),
            (
                messages_body(json!([user("q"), one, user_blocks(json!([text, tool_result("a")]))])),
                "immediately after: a",
            ),
            (
                messages_body(json!([user("q"), one, user("x"), user_blocks(json!([tool_result("a")]))])),
                "immediately after: a",
            ),
            (
                messages_body(json!([user("q"), one, user_blocks(json!([tool_result("a"), tool_result("a")]))])),
                "must have a single result",
            ),
            (messages_body(json!([user("q"), one])), "immediately after: a"),
            (
                messages_body(json!([
                    user("q"),
                    assistant(json!([tool_use("a"), tool_use("a")])),
                    user_blocks(json!([tool_result("a")]))
                ])),
                "must be unique",
            ),
            (messages_body(json!([one, user_blocks(json!([tool_result("a")]))])), "first message must use"),
            (messages_body(json!([{"role": "system", "content": "s"}, user("q")])), "top-level `system`"),
            (messages_body(json!([user("")])), "non-empty content"),
            (messages_body(json!([user(" \n")])), "non-whitespace"),
            (
                messages_body(json!([
                    user("q"),
                    assistant(json!([{"type": "tool_use", "id": "a", "name": "stats", "input": "{}"}])),
                    user_blocks(json!([tool_result("a")]))
                ])),
                "valid dictionary",
            ),
            (no_tools, "must define tools"),
            (no_limit, "max_tokens: Field required"),
            (json!({"model": "m", "max_tokens": 10, "messages": [user("q")], "n": 1}), "Extra inputs"),
        ],
    );
}

#[test]
fn messages_knows_its_own_thinking() {
    let mut turn = Turn::call("stats", json!({"q": 1}));
    turn.reasoning = "first the figures".to_owned();
    let server = server([turn, Turn::text("done")]);
    let with_thinking = |messages: Value| {
        let mut body = messages_body(messages);
        body["thinking"] = json!({"type": "enabled", "budget_tokens": 1024});
        body
    };
    let reply = post(&server, MESSAGES, &with_thinking(json!([user("q")]))).unwrap().json();
    let blocks = reply["content"].clone();
    let id = blocks[1]["id"].as_str().unwrap().to_owned();
    let answer = json!({"role": "user", "content": [tool_result(&id)]});
    let mut changed = blocks.clone();
    changed[0]["thinking"] = json!("First the figures");
    let without = json!([blocks[1]]);
    for (blocks, reason) in [(changed, "Invalid `signature`"), (without, "Expected `thinking`")] {
        let response = post(&server, MESSAGES, &with_thinking(json!([user("q"), assistant(blocks), answer]))).unwrap();
        assert_eq!(response.status, 400);
        assert!(response.text().contains(reason), "{}", response.text());
    }
    let response = post(&server, MESSAGES, &with_thinking(json!([user("q"), assistant(blocks), answer]))).unwrap();
    assert_eq!(response.status, 200, "{}", response.text());
}

fn responses_body(input: Value) -> Value {
    json!({"model": "m", "input": input, "store": false, "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "name": "stats", "parameters": {"type": "object"}}]})
}

fn function_call(id: &str) -> Value {
    json!({"type": "function_call", "call_id": id, "name": "stats", "arguments": "{}"})
}

fn function_output(id: &str) -> Value {
    json!({"type": "function_call_output", "call_id": id, "output": "{}"})
}

#[test]
fn responses_refuses_what_openai_refuses() {
    let good = responses_body(json!([
        user("q"),
        function_call("a"),
        function_call("b"),
        function_output("b"),
        function_output("a")
    ]));
    let mut nested = good.clone();
    nested["tools"] = json!([chat_tool()]);
    let mut wrong_id = function_call("a");
    wrong_id["id"] = json!("call_a");
    two_sided(
        RESPONSES,
        &good,
        &Dialect::default(),
        &[
            (
                responses_body(json!([user("q"), function_output("a")])),
                "No tool call found for function call output with call_id a",
            ),
            (responses_body(json!([user("q"), function_output("a"), function_call("a")])), "No tool call found"),
            (
                responses_body(json!([user("q"), function_call("a"), function_call("b"), function_output("a")])),
                "No tool output found for function call b",
            ),
            (
                responses_body(json!([user("q"), function_call("a"), function_output("a"), function_output("a")])),
                "Duplicate function call output",
            ),
            (responses_body(json!([user("q"), wrong_id, function_output("a")])), "begins with 'fc'"),
            (responses_body(json!([user("q"), {"type": "reasoning", "id": "rs_1", "summary": []}])), "not found"),
            (
                responses_body(
                    json!([user("q"), {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAA00.11"}, function_call("a"), function_output("a")]),
                ),
                "could not be verified",
            ),
            (
                responses_body(
                    json!([user("q"), {"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}]),
                ),
                "Supported values are: 'output_text'",
            ),
            (responses_body(json!([user("q"), {"type": "item_reference", "id": "fc_1"}])), "not found"),
            (responses_body(json!([user("q"), {"role": "tool", "content": "x"}])), "Supported values are"),
            (nested, "Unknown parameter: 'tools[0].function'"),
            (json!({"model": "m", "messages": [user("q")]}), "Unknown parameter: 'messages'"),
        ],
    );
}

#[test]
fn responses_wants_reasoning_with_its_item() {
    let mut turn = Turn::call("stats", json!({"q": 1}));
    turn.reasoning = "first the figures".to_owned();
    let server = server([turn, Turn::text("done")]);
    let reply = post(&server, RESPONSES, &responses_body(json!([user("q")]))).unwrap().json();
    let (thought, call) = (reply["output"][0].clone(), reply["output"][1].clone());
    assert_eq!(thought["type"], "reasoning");
    let output = function_output(call["call_id"].as_str().unwrap());
    for input in [
        json!([user("q"), call, output]),
        json!([user("q"), thought]),
        json!([user("q"), thought, user("x"), call, output]),
    ] {
        assert_eq!(post(&server, RESPONSES, &responses_body(input)).unwrap().status, 400);
    }
    let response = post(&server, RESPONSES, &responses_body(json!([user("q"), thought, call, output]))).unwrap();
    assert_eq!(response.status, 200, "{}", response.text());
}

/// The text and the calls (name, arguments) that a client gathers from a stream.
fn gather(path: &str, events: &[SseEvent]) -> (String, Vec<(String, String)>) {
    let mut text = String::new();
    let mut calls: Vec<(String, String)> = Vec::new();
    for event in events.iter().filter(|event| event.data != "[DONE]") {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        match path {
            CHAT => {
                let delta = &data["choices"][0]["delta"];
                text.push_str(delta["content"].as_str().unwrap_or_default());
                for call in delta["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default() {
                    if let Some(name) = call["function"]["name"].as_str() {
                        calls.push((name.to_owned(), String::new()));
                    }
                    let index = call["index"].as_u64().map_or(calls.len() - 1, |index| index as usize);
                    calls[index].1.push_str(call["function"]["arguments"].as_str().unwrap_or_default());
                }
            }
            RESPONSES => match event.name.as_str() {
                "response.output_text.delta" => text.push_str(data["delta"].as_str().unwrap()),
                "response.output_item.added" if data["item"]["type"] == "function_call" => {
                    calls.push((data["item"]["name"].as_str().unwrap().to_owned(), String::new()));
                }
                "response.function_call_arguments.delta" => {
                    calls.last_mut().unwrap().1.push_str(data["delta"].as_str().unwrap());
                }
                _ => {}
            },
            _ => match event.name.as_str() {
                "content_block_start" if data["content_block"]["type"] == "tool_use" => {
                    calls.push((data["content_block"]["name"].as_str().unwrap().to_owned(), String::new()));
                }
                "content_block_delta" => {
                    text.push_str(data["delta"]["text"].as_str().unwrap_or_default());
                    if let Some(part) = data["delta"]["partial_json"].as_str() {
                        calls.last_mut().unwrap().1.push_str(part);
                    }
                }
                _ => {}
            },
        }
    }
    (text, calls)
}

fn streaming(path: &str) -> Value {
    let mut body = match path {
        CHAT => chat(json!([user("q")])),
        RESPONSES => responses_body(json!([user("q")])),
        _ => messages_body(json!([user("q")])),
    };
    body["stream"] = json!(true);
    if path == CHAT {
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}

fn busy_turn() -> Turn {
    let mut turn = Turn::calls(vec![
        Call::new("stats", json!({"quarter": "2000-Q3", "city": "Zürich"})),
        Call::new("chart", json!({"width": 640})),
    ]);
    turn.text = "I look at the figures — größer als gedacht.".to_owned();
    turn
}

#[test]
fn streams_add_up_in_all_formats_and_paces() {
    for path in [CHAT, RESPONSES, MESSAGES] {
        for (write_bytes, heartbeats, quirks) in [
            (0, false, vec![]),
            (1, true, vec![]),
            (3, false, vec![Quirk::Crlf, Quirk::NoSpace]),
            (5, true, vec![Quirk::SplitData, Quirk::Interleaved]),
            (0, false, vec![Quirk::WholeCalls]),
        ] {
            let mut turn = busy_turn();
            turn.pace.write_bytes = write_bytes;
            turn.pace.heartbeats = heartbeats;
            turn.quirks = quirks;
            let wanted: Vec<(String, String)> =
                turn.calls.iter().map(|call| (call.name.clone(), call.arguments.to_string())).collect();
            let text = turn.text.clone();
            let server = server([turn]);
            let events = events(&server, path, &streaming(path)).unwrap();
            assert_eq!(gather(path, &events), (text, wanted), "{path}");
        }
    }
}

#[test]
fn usage_is_reported_in_each_formats_way() {
    for path in [CHAT, RESPONSES, MESSAGES] {
        let mut turn = Turn::text("x");
        turn.usage.cached = 40;
        let server = server([turn.clone(), turn.clone(), turn.with(Quirk::NoUsage)]);
        let mut plain = streaming(path);
        plain.as_object_mut().unwrap().remove("stream");
        plain.as_object_mut().unwrap().remove("stream_options");
        let usage = post(&server, path, &plain).unwrap().json()["usage"].clone();
        let all = events(&server, path, &streaming(path)).unwrap();
        let streamed = all.iter().any(|event| event.data.contains("40") && event.data.contains("usage"));
        assert!(streamed, "{all:?}");
        match path {
            CHAT => assert_eq!(
                (&usage["prompt_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]),
                (&json!(100), &json!(40))
            ),
            RESPONSES => assert_eq!(usage["input_tokens"], 100),
            _ => assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&json!(60), &json!(40))),
        }
        let none = events(&server, path, &streaming(path)).unwrap();
        assert!(!none.iter().any(|event| event.data.contains("\"usage\":{")), "{none:?}");
    }
}

#[test]
fn faults_come_once_each_and_then_the_answer() {
    for path in [CHAT, RESPONSES, MESSAGES] {
        let turn = Turn::text("here it is at last")
            .after(Fault::retry_after(Trouble::RateLimit, "2"))
            .after(Fault::status(Trouble::Overloaded))
            .after(Fault::HangUp)
            .after(Fault::Cut { after_events: 2, bytes: 9 })
            .after(Fault::Stall { after_events: 1, ms: 60, heartbeat_ms: Some(20) })
            .after(Fault::Error { after_events: 2, error: Trouble::Overloaded })
            .after(Fault::EndsEarly { after_events: 2 });
        let server = server([turn]);
        let body = streaming(path);
        let limited = post(&server, path, &body).unwrap();
        assert_eq!((limited.status, limited.header("retry-after")), (429, Some("2")));
        let overloaded = post(&server, path, &body).unwrap();
        assert_eq!(overloaded.status, if path == MESSAGES { 529 } else { 503 });
        assert_eq!(post(&server, path, &body).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(post(&server, path, &body).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let mut beats = Vec::new();
        let cut = post_raw(&server, path, body.to_string().as_bytes()).unwrap().read_to_end(&mut beats);
        assert_eq!(cut.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(String::from_utf8_lossy(&beats).contains(": keep-alive"));
        let broken = events(&server, path, &body).unwrap();
        assert!(broken.last().unwrap().data.contains("error"), "{broken:?}");
        assert_eq!(events(&server, path, &body).unwrap().len(), 2);
        assert_eq!(gather(path, &events(&server, path, &body).unwrap()).0, "here it is at last");
        let replies: Vec<Reply> = server.requests().into_iter().map(|recorded| recorded.reply).collect();
        assert_eq!(replies[..7], vec![Reply::Fault(0); 7]);
        assert_eq!(replies[7], Reply::Turn(0));
        assert!(server.refusals().is_empty());
    }
}

#[test]
fn quota_differs_from_rate_limit() {
    let server = server([Turn::text("").after(Fault::status(Trouble::Quota))]);
    let reply = post(&server, CHAT, &chat(json!([user("q")]))).unwrap();
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (429, &json!("insufficient_quota")));
}

#[test]
fn quirks_change_what_they_say() {
    let turn = busy_turn().with(Quirk::NoIds).with(Quirk::NoIndex).with(Quirk::StopWithCalls).with(Quirk::NoEnd);
    let server = server([turn, busy_turn().with(Quirk::SameIds), Turn::calls(vec![Call::raw("stats", "{\"q\": ")])]);
    let all = events(&server, CHAT, &streaming(CHAT)).unwrap();
    let text: String = all.iter().map(|event| event.data.as_str()).collect();
    assert!(
        !text.contains("call_") && !text.contains("[DONE]") && text.contains("\"finish_reason\":\"stop\""),
        "{text}"
    );
    let calls =
        post(&server, CHAT, &chat(json!([user("q")]))).unwrap().json()["choices"][0]["message"]["tool_calls"].clone();
    assert_eq!(calls[0]["id"], calls[1]["id"]);
    let calls =
        post(&server, CHAT, &chat(json!([user("q")]))).unwrap().json()["choices"][0]["message"]["tool_calls"].clone();
    assert_eq!(calls[0]["function"]["arguments"], "{\"q\": ");
}

#[test]
fn the_transcript_decides_when_the_script_says_so() {
    let script = Script { order: Order::Transcript, ..Script::of([Turn::call("stats", json!({})), Turn::text("end")]) };
    let server = ModelServer::start(script).unwrap();
    let body = chat(json!([user("q")]));
    let first = post(&server, CHAT, &body).unwrap().json();
    assert_eq!(post(&server, CHAT, &body).unwrap().json()["choices"][0]["finish_reason"], "tool_calls");
    let message = first["choices"][0]["message"].clone();
    let id = message["tool_calls"][0]["id"].as_str().unwrap().to_owned();
    let next = post(&server, CHAT, &chat(json!([user("q"), message, result(&id)]))).unwrap().json();
    assert_eq!(next["choices"][0]["message"]["content"], "end");
}

#[test]
fn conversations_keep_apart_and_an_exhausted_script_says_so() {
    let of = |when: &str| Conversation { when: when.to_owned(), turns: vec![Turn::text(when).expecting(when)] };
    let script = Script { conversations: vec![of("apple"), of("pear")], ..Script::default() };
    let server = ModelServer::start(script).unwrap();
    let ask = |text: &str| post(&server, CHAT, &chat(json!([user(text)]))).unwrap();
    assert_eq!(ask("a pear?").json()["choices"][0]["message"]["content"], "pear");
    assert_eq!(ask("an apple?").json()["choices"][0]["message"]["content"], "apple");
    assert_eq!(ask("a pear?").json()["error"]["code"], "script_exhausted");
}

#[test]
fn wrong_keys_paths_and_bytes_are_refused() {
    let script = Script { api_key: Some("right".to_owned()), ..Script::of([Turn::text("x")]) };
    let server = ModelServer::start(script).unwrap();
    assert_eq!(post(&server, CHAT, &chat(json!([user("q")]))).unwrap().status, 401);
    assert_eq!(post(&server, "/v1/completions", &json!({})).unwrap().status, 404);
    let server = self::server([Turn::text("x")]);
    let broken = post_raw(&server, CHAT, b"{\"model\": \"m\",").unwrap().finish().unwrap();
    assert_eq!(broken.status, 400);
    assert!(broken.text().contains("could not parse"));
}

#[test]
fn stops_at_once_in_the_middle_of_a_stall() {
    let server = server([Turn::text("x").after(Fault::Silence { ms: 600_000 })]);
    let address = server.address();
    let client = std::thread::spawn(move || {
        let stream = TcpStream::connect(address).unwrap();
        let body = chat(json!([user("q")])).to_string();
        http_client::send(stream, "POST", CHAT, &[("content-type", "application/json")], body.as_bytes())
            .err()
            .map(|error| error.kind())
    });
    while server.requests().is_empty() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let begun = Instant::now();
    drop(server);
    assert_eq!(client.join().unwrap(), Some(io::ErrorKind::UnexpectedEof));
    assert!(begun.elapsed() < Duration::from_secs(30));
}
