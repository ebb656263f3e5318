//! The requests that a tool under check is given.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use toolproto::ids::CallId;

use super::subject::Subject;

/// What a probe looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aim {
    /// A valid call: any valid reply, a success within the output schema.
    Call,
    /// A valid call for which the folder's `check/` provides what is needed: a success.
    WorkingCall,
    /// `describe` or `health`: their result, or UNSUPPORTED.
    Introspection(&'static str),
    /// An operation that nobody knows: UNSUPPORTED.
    UnknownOperation,
    /// A protocol that nobody speaks yet: an error.
    UnknownProtocol,
    /// No request at all: an exit status that is no success.
    NoRequest,
}

/// One request, and how it is delivered.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Its name, for the report.
    pub name: &'static str,
    /// The call that the reply must name.
    pub call: CallId,
    /// What is written to stdin, piece by piece.
    pub stdin: Vec<Vec<u8>>,
    /// How long to wait between pieces.
    pub pause: Duration,
    pub(super) aim: Aim,
}

/// All probes of a tool. Those that need arguments are left out when none could be made.
#[must_use]
pub fn probes(subject: &Subject) -> Vec<Probe> {
    let mut probes = Vec::new();
    if let Some(arguments) = &subject.arguments {
        let mut valid = call(subject, "a valid call", arguments, |_| {});
        if subject.is_provided {
            valid.aim = Aim::WorkingCall;
        }
        probes.push(valid);
        probes.push(call(subject, "members that it does not know", arguments, |request| {
            request["x_later"] = json!({"protocol": 7, "call_id": "other", "operation": "health"});
        }));
        probes.push(spread(subject, arguments));
        probes.push(slow(subject, arguments));
        if let Some(hostile) = with_strings(arguments, HOSTILE).filter(|made| subject.input.is_valid(made)) {
            probes.push(call(subject, "strings with quotes, controls and other scripts", &hostile, |_| {}));
        }
        if let Some(escaping) =
            with_strings(arguments, "../../../../etc/passwd").filter(|made| subject.input.is_valid(made))
        {
            probes.push(call(subject, "strings that look like paths outside", &escaping, |_| {}));
        }
        let long = "x".repeat(200_000);
        if let Some(huge) = with_strings(arguments, &long).filter(|made| subject.input.is_valid(made)) {
            probes.push(call(subject, "strings of 200,000 characters", &huge, |_| {}));
        }
        let mut protocol = call(subject, "a protocol that it does not speak", arguments, |request| {
            request["protocol"] = json!(1_000_000);
        });
        protocol.aim = Aim::UnknownProtocol;
        probes.push(protocol);
    }
    for operation in ["describe", "health"] {
        probes.push(other(subject, operation, operation, Aim::Introspection(operation)));
    }
    probes.push(other(subject, "an operation that it does not know", "conform", Aim::UnknownOperation));
    for (name, text) in [("an empty stdin", ""), ("a stdin that is no JSON", "{\"protocol\":1,\"operation\":\"call\"")]
    {
        probes.push(Probe {
            name,
            call: CallId::generate(),
            stdin: vec![text.as_bytes().to_vec()],
            pause: Duration::ZERO,
            aim: Aim::NoRequest,
        });
    }
    probes
}

/// Everything that a careless reader or writer of JSON trips over.
const HOSTILE: &str = "a\"b\\c/d\u{8}\u{c}\n\r\t\u{0}\u{1f}\u{7f}\u{2028}é漢😀{}[],: $(id) `id` ; ' %s";

fn request(subject: &Subject, call: CallId, operation: &str, arguments: &Value) -> Value {
    let deadline = Timestamp::now().saturating_add(subject.time).unwrap_or(Timestamp::MAX);
    json!({
        "protocol": toolproto::request::PROTOCOL,
        "operation": operation,
        "call_id": call,
        "tool": subject.manifest.name,
        "arguments": arguments,
        "workspace": "/workspace",
        "deadline": deadline,
        "timeout_ms": u64::try_from(subject.time.as_millis()).unwrap_or(u64::MAX),
        "max_response_bytes": subject.manifest.program.max_response.0,
        "idempotency_key": call,
    })
}

fn probe(name: &'static str, call: CallId, text: String, aim: Aim) -> Probe {
    Probe { name, call, stdin: vec![text.into_bytes()], pause: Duration::ZERO, aim }
}

fn call(subject: &Subject, name: &'static str, arguments: &Value, change: impl FnOnce(&mut Value)) -> Probe {
    let call = CallId::generate();
    let mut request = request(subject, call, "call", arguments);
    change(&mut request);
    probe(name, call, request.to_string(), Aim::Call)
}

fn other(subject: &Subject, name: &'static str, operation: &str, aim: Aim) -> Probe {
    let call = CallId::generate();
    probe(name, call, request(subject, call, operation, &json!({})).to_string(), aim)
}

/// The same request, spread over lines that end like Windows'.
fn spread(subject: &Subject, arguments: &Value) -> Probe {
    let call = CallId::generate();
    let text = format!("{:#}\n", request(subject, call, "call", arguments)).replace('\n', "\r\n");
    probe("a request over several lines", call, text, Aim::Call)
}

/// The same request in pieces with pauses: a tool that reads once sees a part of it.
fn slow(subject: &Subject, arguments: &Value) -> Probe {
    let mut probe = call(subject, "a request that arrives in pieces", arguments, |_| {});
    let text = probe.stdin.concat();
    probe.stdin = text.chunks(text.len().div_ceil(3).max(1)).map(<[u8]>::to_vec).collect();
    probe.pause = Duration::from_millis(150);
    probe
}

/// The arguments with every string replaced; nothing when there is none.
fn with_strings(arguments: &Value, text: &str) -> Option<Value> {
    fn replace(value: &mut Value, text: &str) -> bool {
        match value {
            Value::String(old) => {
                text.clone_into(old);
                true
            }
            Value::Array(items) => items.iter_mut().fold(false, |any, item| any | replace(item, text)),
            Value::Object(members) => members.values_mut().fold(false, |any, member| any | replace(member, text)),
            _ => false,
        }
    }
    let mut replaced = arguments.clone();
    replace(&mut replaced, text).then_some(replaced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_replaced_at_every_depth() {
        let replaced = with_strings(&json!({"a": "x", "b": [{"c": "y"}, 1], "d": null}), "z").unwrap();
        assert_eq!(replaced, json!({"a": "z", "b": [{"c": "z"}, 1], "d": null}));
        assert_eq!(with_strings(&json!({"a": 1}), "z"), None);
    }
}
