//! The three formats against the strict scripted server, which refuses what the providers refuse and breaks as they do.

use std::sync::Arc;
use std::time::Duration;

use agentd_tests::model_server::{Call, Fault, ModelServer, Quirk, Script, Trouble, Turn};
use serde_json::{Value, json};
use toolproto::code::Code;

use super::anthropic::Anthropic;
use super::http::Timers;
use super::openai::OpenAi;
use super::responses::Responses;
use super::retry::Chain;
use super::settings::Endpoint;
use super::transcript::{Arguments, AskedCall, Assistant, CallResult, Message, Transcript};
use super::{Finish, Model, ModelError, Reply, Request, Thinking, ToolOffer};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Chat,
    Responses,
    Messages,
}

fn timers() -> Timers {
    let short = Duration::from_millis(700);
    Timers { connect: Duration::from_secs(5), first_data: short, idle: short }
}

fn model(format: Format, server: &ModelServer) -> Arc<dyn Model> {
    model_with(format, server, serde_json::Map::new())
}

fn model_with(format: Format, server: &ModelServer, switch: serde_json::Map<String, Value>) -> Arc<dyn Model> {
    let endpoint = Endpoint {
        base_url: server.base_url(),
        model: "m".to_owned(),
        api_key: None,
        temperature: None,
        top_p: None,
        max_output_tokens: Some(500),
        thinking_off: switch,
    };
    let model: Arc<dyn Model> = match format {
        Format::Chat => Arc::new(OpenAi::new(endpoint, timers()).unwrap()),
        Format::Responses => Arc::new(Responses::new(endpoint, timers()).unwrap()),
        Format::Messages => Arc::new(Anthropic::new(endpoint, timers()).unwrap()),
    };
    Arc::new(Chain::new(vec![("m".to_owned(), model)]))
}

fn request(messages: Vec<Message>, tools: bool) -> Request {
    let offer = ToolOffer {
        name: "stats".to_owned(),
        description: "Counts.".to_owned(),
        parameters: json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
    };
    Request {
        transcript: Transcript { system: "You count.".to_owned(), messages },
        tools: if tools { vec![offer] } else { Vec::new() },
        note: "[budget left: 3 turns]".to_owned(),
        max_output: None,
        time: Duration::from_secs(60),
        thinking: Thinking::AsConfigured,
    }
}

fn goal() -> Vec<Message> {
    vec![Message::User("the goal".to_owned())]
}

/// The conversation after a reply and the results of its calls. Ids that are of no use are made here, as the loop does.
fn after(mut messages: Vec<Message>, reply: &Reply) -> Vec<Message> {
    let id = |index: usize, given: &Option<String>| match given {
        Some(id) if reply.calls[..index].iter().all(|earlier| earlier.id.as_ref() != Some(id)) => id.clone(),
        _ => format!("c{index:08}"),
    };
    let calls: Vec<AskedCall> = reply
        .calls
        .iter()
        .enumerate()
        .map(|(index, call)| AskedCall {
            id: id(index, &call.id),
            tool: call.tool.clone(),
            arguments: Arguments::read(&call.arguments),
        })
        .collect();
    let results = calls.iter().map(|call| {
        let content = json!({"ok": true, "result": {"n": 1}});
        Message::Result(CallResult { id: call.id.clone(), tool: call.tool.clone(), content })
    });
    let results: Vec<Message> = results.collect();
    messages.push(Message::Assistant(Assistant { text: reply.text.clone(), calls, echo: reply.echo.clone() }));
    messages.extend(results);
    messages
}

fn two_calls() -> Turn {
    let mut turn = Turn::calls(vec![Call::new("stats", json!({"n": 1})), Call::new("stats", json!({"n": 2}))]);
    turn.text = "Let me see.".to_owned();
    turn
}

/// Asks for two calls, answers them, and gets the last word.
async fn converses(format: Format, first: Turn) -> Vec<Value> {
    let server = ModelServer::start(Script::of([first, Turn::text("done").expecting("\"n\":1")])).unwrap();
    let model = model(format, &server);
    let reply = model.reply(&request(goal(), true), &|_| ()).await.unwrap();
    let arguments = reply.calls.iter().map(|call| Arguments::read(&call.arguments).to_value()).collect();
    let second = model.reply(&request(after(goal(), &reply), true), &|_| ()).await.unwrap();
    assert_eq!(second.text, "done");
    assert!(server.refusals().is_empty(), "{:?}", server.refusals());
    arguments
}

async fn deviations(format: Format, quirks: &[Quirk]) {
    let both = [json!({"n": 1}), json!({"n": 2})];
    assert_eq!(converses(format, two_calls()).await, both);
    for quirk in quirks {
        assert_eq!(converses(format, two_calls().with(*quirk)).await, both, "{format:?} {quirk:?}");
    }
    // Bytes cut anywhere, comments in between, and thoughts that must come back.
    let mut torn = two_calls();
    torn.reasoning = "I think that é is a letter.".to_owned();
    torn.pace.write_bytes = 3;
    torn.pace.fragment = 1;
    torn.pace.heartbeats = true;
    assert_eq!(converses(format, torn).await, both, "{format:?} torn");
}

#[tokio::test]
async fn chat_completions_are_read_in_all_their_dialects() {
    use Quirk::{
        EarlyUsage, EmptyIds, Interleaved, NoEnd, NoIds, NoSpace, NoType, NoUsage, RepeatNames, SameIds, StopWithCalls,
        WholeCalls,
    };
    let quirks = [
        NoUsage,
        EarlyUsage,
        NoIds,
        EmptyIds,
        NoType,
        RepeatNames,
        WholeCalls,
        Interleaved,
        NoEnd,
        Quirk::Crlf,
        NoSpace,
        StopWithCalls,
        SameIds,
    ];
    deviations(Format::Chat, &quirks).await;
}

#[tokio::test]
async fn messages_are_read_and_thoughts_come_back() {
    deviations(Format::Messages, &[Quirk::NoUsage, Quirk::Crlf, Quirk::NoSpace]).await;
}

#[tokio::test]
async fn responses_are_read_and_thoughts_come_back() {
    deviations(Format::Responses, &[Quirk::NoUsage, Quirk::Crlf, Quirk::NoSpace]).await;
}

#[tokio::test]
async fn a_last_turn_without_tools_is_accepted_everywhere() {
    for format in [Format::Chat, Format::Responses, Format::Messages] {
        let server = ModelServer::start(Script::of([two_calls(), Turn::text("{}")])).unwrap();
        let model = model(format, &server);
        let reply = model.reply(&request(goal(), true), &|_| ()).await.unwrap();
        let mut messages = after(goal(), &reply);
        messages.push(Message::User("no tool can be called any more".to_owned()));
        let last = model.reply(&request(messages, false), &|_| ()).await;
        assert_eq!(last.unwrap().text, "{}", "{format:?}: {:?}", server.refusals());
    }
}

#[tokio::test]
async fn tokens_are_counted_alike() {
    for format in [Format::Chat, Format::Responses, Format::Messages] {
        let mut turn = Turn::text("done");
        (turn.usage.input, turn.usage.cached, turn.usage.output) = (100, 40, 7);
        let server = ModelServer::start(Script::of([turn])).unwrap();
        let usage = model(format, &server).reply(&request(goal(), true), &|_| ()).await.unwrap().usage.unwrap();
        assert_eq!((usage.input_tokens, usage.cached_tokens, usage.output_tokens), (100, 40, 7), "{format:?}");
    }
}

async fn survives(format: Format) {
    let faults = [
        Fault::status(Trouble::Server),
        Fault::retry_after(Trouble::RateLimit, "1"),
        Fault::status(Trouble::Overloaded),
        Fault::HangUp,
        Fault::Silence { ms: 3000 },
        Fault::Stall { after_events: 2, ms: 3000, heartbeat_ms: Some(100) },
        Fault::Cut { after_events: 2, bytes: 5 },
        Fault::EndsEarly { after_events: 2 },
        Fault::Error { after_events: 1, error: Trouble::Overloaded },
        Fault::Garbage { after_events: 1, text: "{not json".to_owned() },
    ];
    for fault in faults {
        let name = format!("{format:?} {fault:?}");
        let server = ModelServer::start(Script::of([Turn::text("whole").after(fault)])).unwrap();
        let started = std::time::Instant::now();
        let reply = model(format, &server).reply(&request(goal(), true), &|_| ()).await;
        assert_eq!(reply.map(|reply| reply.text), Ok("whole".to_owned()), "{name}");
        assert_eq!(server.requests().len(), 2, "{name}");
        if name.contains("RateLimit") {
            assert!(started.elapsed() >= Duration::from_secs(1), "{name}: Retry-After was not waited for");
        }
    }
}

#[tokio::test]
async fn chat_completions_survive_what_servers_do() {
    survives(Format::Chat).await;
}

#[tokio::test]
async fn responses_survive_what_servers_do() {
    survives(Format::Responses).await;
}

#[tokio::test]
async fn messages_survive_what_servers_do() {
    survives(Format::Messages).await;
}

#[tokio::test]
async fn what_waiting_does_not_mend_is_asked_for_once() {
    for format in [Format::Chat, Format::Responses, Format::Messages] {
        for (trouble, code) in [
            (Trouble::Quota, Code::ModelQuotaExhausted),
            (Trouble::ContextLength, Code::ContextOverflow),
            (Trouble::Authentication, Code::ModelUnavailable),
            (Trouble::ModelUnknown, Code::ModelUnavailable),
        ] {
            let server = ModelServer::start(Script::of([Turn::text("x").after(Fault::status(trouble))])).unwrap();
            let error: ModelError = model(format, &server).reply(&request(goal(), true), &|_| ()).await.unwrap_err();
            assert_eq!(error.code, code, "{format:?} {trouble:?}: {error}");
            assert_eq!(server.requests().len(), 1, "{format:?} {trouble:?}");
        }
    }
}

#[tokio::test]
async fn an_answer_that_was_cut_off_says_so() {
    for (format, reason) in
        [(Format::Chat, "length"), (Format::Responses, "max_output_tokens"), (Format::Messages, "max_tokens")]
    {
        let mut turn = two_calls();
        turn.finish = Some(reason.to_owned());
        let server = ModelServer::start(Script::of([turn])).unwrap();
        let reply = model(format, &server).reply(&request(goal(), true), &|_| ()).await.unwrap();
        assert_eq!(reply.finish, Finish::Length, "{format:?}");
    }
}

#[tokio::test]
async fn thoughts_alone_are_known_as_such_and_thinking_can_be_turned_off() {
    for format in [Format::Chat, Format::Responses, Format::Messages] {
        let thinks = Turn { reasoning: "Hm.".to_owned(), ..Turn::default() };
        let script = Script::of([thinks.clone(), Turn::text("done"), Turn { text: "said".to_owned(), ..thinks }]);
        let server = ModelServer::start(script).unwrap();
        let known = match format {
            Format::Chat => json!({"reasoning_effort": "none"}),
            Format::Responses => json!({"reasoning": {"effort": "none"}}),
            Format::Messages => json!({"thinking": {"type": "disabled"}}),
        };
        let switch = known.as_object().unwrap().clone();
        let model = model_with(format, &server, switch.clone());
        let reply = model.reply(&request(goal(), true), &|_| ()).await.unwrap();
        assert!(reply.only_thought && reply.text.is_empty() && reply.calls.is_empty(), "{format:?} {reply:?}");
        let off = Request { thinking: Thinking::Off, ..request(goal(), true) };
        assert_eq!(model.reply(&off, &|_| ()).await.unwrap().text, "done");
        assert!(!model.reply(&request(goal(), true), &|_| ()).await.unwrap().only_thought);
        let seen = server.requests();
        for (key, value) in &switch {
            assert_eq!((&seen[0].body[key], &seen[1].body[key]), (&Value::Null, value), "{format:?}");
        }
        assert!(server.refusals().is_empty(), "{:?}", server.refusals());
    }
}

#[tokio::test]
async fn a_server_that_refuses_the_switch_is_asked_without_it() {
    let server = ModelServer::start(Script::of([Turn::text("done")])).unwrap();
    let switch = json!({"chat_template_kwargs": {"enable_thinking": false}});
    let model = model_with(Format::Chat, &server, switch.as_object().unwrap().clone());
    let off = Request { thinking: Thinking::Off, ..request(goal(), true) };
    assert_eq!(model.reply(&off, &|_| ()).await.unwrap().text, "done");
    assert_eq!(server.refusals().len(), 1, "{:?}", server.refusals());
}
