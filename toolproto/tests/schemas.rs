//! The schemas in `schemas/` say the same as the types: what the types write satisfies them, and of hand-written
//! messages the schema takes exactly those that the reader takes.

use std::path::Path;

use jsonschema::Validator;
use serde_json::{Value, json};
use toolproto::extension::{Opinion, Point};
use toolproto::ids::CallId;
use toolproto::introspection::{Description, Health};
use toolproto::progress::Progress;
use toolproto::reply;
use toolproto::request::{Operation, PROTOCOL, Request};

const CALL: CallId = CallId::from_u128(7);

fn schema(name: &str) -> Validator {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas").join(name);
    let text = std::fs::read(&file).unwrap();
    let schema: Value = serde_json::from_slice(&text).unwrap();
    jsonschema::meta::validate(&schema).unwrap();
    jsonschema::draft202012::new(&schema).unwrap()
}

fn assert_satisfies(schema: &Validator, value: &Value) {
    let violations: Vec<String> = schema.iter_errors(value).map(|error| error.to_string()).collect();
    assert!(violations.is_empty(), "{value}: {violations:?}");
}

/// Without each required member, and with each member of a type it cannot have, the message must be refused.
fn assert_narrow(schema: &Validator, message: &Value, required: &[&str]) {
    for member in required {
        let mut without = message.clone();
        without.as_object_mut().unwrap().remove(*member).unwrap();
        assert!(!schema.is_valid(&without), "the schema takes a message without {member}");
    }
}

#[test]
fn every_schema_is_a_schema() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        schema(entry.unwrap().file_name().to_str().unwrap());
        seen += 1;
    }
    assert!(seen >= 7);
}

#[test]
fn requests_satisfy_their_schema() {
    let schema = schema("tool-request.schema.json");
    let mut request = Request {
        protocol: PROTOCOL,
        operation: Operation::Call,
        call_id: CallId::generate(),
        tool: "csv_stats".to_owned(),
        arguments: json!({"path": "a.csv"}),
        workspace: Some("/workspace".to_owned()),
        deadline: "2026-11-29T12:00:03.000Z".parse().unwrap(),
        timeout_ms: 3000,
        max_response_bytes: 1 << 20,
        idempotency_key: "k".to_owned(),
        traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned()),
    };
    let written = serde_json::to_value(&request).unwrap();
    assert_satisfies(&schema, &written);
    assert_narrow(
        &schema,
        &written,
        &["protocol", "operation", "call_id", "tool", "arguments", "deadline", "timeout_ms", "max_response_bytes"],
    );
    for operation in [Operation::Describe, Operation::Health] {
        request.operation = operation;
        request.workspace = None;
        request.traceparent = None;
        assert_satisfies(&schema, &serde_json::to_value(&request).unwrap());
    }
}

#[test]
fn the_reply_schema_takes_what_the_reader_takes() {
    let schema = schema("tool-reply.schema.json");
    let artifact = |path: &str, media_type: &str| {
        json!({"protocol": 1, "call_id": CALL, "ok": true, "result": 1,
               "artifacts": [{"path": path, "media_type": media_type}]})
    };
    let error = |error: Value| json!({"protocol": 1, "call_id": CALL, "ok": false, "error": error});
    let plain = json!({"code": "A", "message": "b"});
    let many = vec![json!({"path": "a", "media_type": "a/b"}); reply::MAX_ARTIFACTS + 1];
    let replies = [
        json!({"protocol": 1, "call_id": CALL, "ok": true, "result": {"a": u64::MAX}, "more": 1}),
        json!({"protocol": 1, "call_id": CALL, "ok": true, "result": null, "artifacts": []}),
        artifact("out/chart.svg", "image/svg+xml"),
        artifact(".hidden/..a", "text/plain; charset=utf-8"),
        error(plain.clone()),
        error(json!({"code": "a.b-C_9", "message": "", "retryable": true, "retry_after_ms": 0, "details": []})),
        error(json!({"code": "A", "message": "b", "retryable": null, "retry_after_ms": null})),
        json!({"protocol": 2, "call_id": CALL, "ok": true, "result": 1}),
        json!({"call_id": CALL, "ok": true, "result": 1}),
        json!({"protocol": 1, "ok": true, "result": 1}),
        json!({"protocol": 1, "call_id": "x", "ok": true, "result": 1}),
        json!({"protocol": 1, "call_id": CALL, "result": 1}),
        json!({"protocol": 1, "call_id": CALL, "ok": "true", "result": 1}),
        json!({"protocol": 1, "call_id": CALL, "ok": true}),
        json!({"protocol": 1, "call_id": CALL, "ok": true, "result": 1, "error": plain}),
        json!({"protocol": 1, "call_id": CALL, "ok": false}),
        json!({"protocol": 1, "call_id": CALL, "ok": false, "error": plain, "result": 1}),
        json!({"protocol": 1, "call_id": CALL, "ok": true, "result": 1, "artifacts": {}}),
        json!({"protocol": 1, "call_id": CALL, "ok": true, "result": 1, "artifacts": many}),
        artifact("/etc/passwd", "text/plain"),
        artifact("../a", "text/plain"),
        artifact("a/./b", "text/plain"),
        artifact("a/..", "text/plain"),
        artifact("a//b", "text/plain"),
        artifact("a/", "text/plain"),
        artifact("", "text/plain"),
        artifact("a\0b", "text/plain"),
        artifact("a", "text"),
        artifact("a", "/plain"),
        error(json!("bad")),
        error(json!({"code": "", "message": "b"})),
        error(json!({"code": "a b", "message": "b"})),
        error(json!({"code": "x".repeat(65), "message": "b"})),
        error(json!({"code": "A"})),
        error(json!({"message": "b"})),
        error(json!({"code": "A", "message": 1})),
        error(json!({"code": "A", "message": "b", "retryable": 1})),
        error(json!({"code": "A", "message": "b", "retry_after_ms": -1})),
        error(json!({"code": "A", "message": "b", "retry_after_ms": 0.5})),
    ];
    let mut taken = 0;
    for message in replies {
        let status = i32::from(message["ok"] != json!(true));
        let read = reply::read(message.to_string().as_bytes(), CALL, status);
        // An object without `ok` is a plain result to the reader; the schema is about replies.
        let reader_takes = read.is_ok() && message.get("ok").is_some();
        assert_eq!(schema.is_valid(&message), reader_takes, "{message}: {read:?}");
        taken += usize::from(reader_takes);
    }
    assert_eq!(taken, 7);
}

#[test]
fn the_progress_schema_takes_what_the_reader_takes() {
    let schema = schema("tool-progress.schema.json");
    for event in [
        json!({"progress": 0}),
        json!({"progress": 1, "message": "x"}),
        json!({"message": ""}),
        json!({"message": "x", "more": []}),
        json!({}),
        json!({"more": 1}),
        json!({"progress": 1.5}),
        json!({"progress": "1"}),
        json!({"message": null}),
        json!([]),
    ] {
        let read = Progress::read(event.to_string().as_bytes());
        assert_eq!(schema.is_valid(&event), read.is_ok(), "{event}: {read:?}");
    }
}

#[test]
fn introspection_satisfies_its_schemas() {
    let description = Description {
        name: "csv_stats".to_owned(),
        version: Some("1.0".to_owned()),
        description: None,
        input: Some(json!({"type": "object"})),
        output: Some(json!(true)),
        sdk: Some("agentd-python/0.1.0".to_owned()),
    };
    let written = serde_json::to_value(&description).unwrap();
    let describe = schema("tool-describe.schema.json");
    assert_satisfies(&describe, &written);
    assert_narrow(&describe, &written, &["name"]);

    let health = Health { healthy: false, message: Some("no database".to_owned()), details: Value::Null };
    let written = serde_json::to_value(&health).unwrap();
    let schema = schema("tool-health.schema.json");
    assert_satisfies(&schema, &written);
    assert_narrow(&schema, &written, &["healthy"]);
}

#[test]
fn extensions_are_asked_by_their_schema() {
    let schema = schema("extension-request.schema.json");
    for point in [Point::BeforeTurn, Point::AfterToolBatch, Point::BeforeFinalAnswer, Point::AfterRun] {
        let request = Request {
            protocol: PROTOCOL,
            operation: point.operation(),
            call_id: CALL,
            tool: "guard".to_owned(),
            arguments: json!({"agent": "worker", "job_id": CALL.to_string()}),
            workspace: Some("/workspace".to_owned()),
            deadline: "2026-11-29T12:00:03.000Z".parse().unwrap(),
            timeout_ms: 3000,
            max_response_bytes: 1 << 20,
            idempotency_key: "k".to_owned(),
            traceparent: None,
        };
        let written = serde_json::to_value(&request).unwrap();
        assert_eq!(written["operation"], point.as_str());
        assert_satisfies(&schema, &written);
        assert_narrow(&schema, &written, &["operation", "call_id", "tool", "arguments", "deadline"]);
    }
}

#[test]
fn the_schema_takes_the_opinions_that_the_reader_takes() {
    let schema = schema("extension-reply.schema.json");
    for (opinion, is_taken) in [
        (json!({}), true),
        (json!({"continue_loop": true, "feedback": "count again"}), true),
        (json!({"replacement_content": {"done": 1}, "disable_tools": ["a"]}), true),
        (json!({"failure": {"message": "no"}}), true),
        (json!({"continue_loop": true}), false),
        (json!({"feedback": " ", "continue_loop": true}), false),
        (json!({"call_tool": "a"}), false),
        (json!({"failure": {"message": "no", "code": "X"}}), false),
        (json!({"replacement_content": "text"}), false),
        (json!({"disable_tools": "a"}), false),
        (json!([]), false),
    ] {
        assert_eq!(schema.is_valid(&opinion), is_taken, "{opinion}");
        assert_eq!(Opinion::read(Point::BeforeFinalAnswer, opinion.clone()).is_ok(), is_taken, "{opinion}");
    }
}
