//! Tool protocol 1, what a tool writes: one JSON object on stdout, and exit status 0 or 1.
//!
//! [`read`] judges what was written, in this order:
//!
//! | stdout | status 0 | status 1 |
//! |---|---|---|
//! | an object with `ok` | read as a reply; `ok` must be true | read as a reply; `ok` must be false |
//! | an object without `ok` | is the result | is the error |
//! | lines, then an object with `ok` and the right `call_id` | the reply, with a note | the reply, with a note |
//! | other text | refused, with the byte | is the error's message, unless it begins with `{` |
//! | nothing | refused | refused: the tool crashed |
//!
//! Any other status is a crash, whatever was written.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::code::Code;
use crate::ids::CallId;
use crate::request::PROTOCOL;
use crate::strict_json::{self, JsonError};

/// The most artifacts that one reply may name.
pub const MAX_ARTIFACTS: usize = 64;
/// The longest path of an artifact, in bytes (PATH_MAX of Linux).
pub const MAX_ARTIFACT_PATH: usize = 4096;
/// The code with which a tool answers an operation that it does not know.
pub const UNSUPPORTED: &str = "UNSUPPORTED";
/// The code of a failure whose tool named none: exit status 1 with a plain object or text.
pub const UNSPECIFIED: &str = "UNSPECIFIED";

/// A file in the workspace that belongs to the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Artifact {
    /// Relative to the workspace, without `.`, `..` and empty parts.
    pub path: String,
    /// Its media type, such as `image/svg+xml`.
    pub media_type: String,
}

/// A tool's own error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolError {
    /// The tool's own code: 1 to 64 letters, digits, `_`, `-` and `.`.
    pub code: String,
    /// In words.
    pub message: String,
    /// Whether the same call may work later.
    #[serde(default)]
    pub retryable: bool,
    /// When to try again, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub retry_after_ms: Option<u64>,
    /// Anything else.
    #[serde(skip_serializing_if = "Value::is_null", default)]
    pub details: Value,
}

/// What a tool answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// `ok: true`.
    Success {
        /// The result.
        result: Value,
        /// Files that belong to it.
        artifacts: Vec<Artifact>,
    },
    /// `ok: false`.
    Failure(ToolError),
}

/// A reply that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The answer.
    pub answer: Answer,
    /// Remarks that are no failures, for the receipt.
    pub notes: Vec<String>,
}

/// Why what the tool wrote is no reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// Neither 0 nor 1.
    #[error("the tool exited with status {status}; the protocol knows 0 and, with an error, 1")]
    ExitStatus {
        /// The exit status.
        status: i32,
    },
    /// Nothing was written.
    #[error("the tool wrote nothing to stdout and exited with status {status}")]
    Empty {
        /// The exit status.
        status: i32,
    },
    /// Not JSON, or not one object.
    #[error("the tool's stdout is not one JSON object: {0}")]
    Malformed(#[from] JsonError),
    /// The object misses the protocol's shape.
    #[error("the reply breaks the protocol at {pointer}: {reason}")]
    Shape {
        /// JSON pointer.
        pointer: String,
        /// What is wrong there.
        reason: String,
    },
    /// The reply answers another call.
    #[error("the reply breaks the protocol at /call_id: it answers call {found}, this is call {expected}")]
    WrongCall {
        /// The call that was made.
        expected: CallId,
        /// What the reply names.
        found: String,
    },
    /// `ok` and the exit status disagree.
    #[error("the reply says ok: {ok}, but the tool exited with status {status}")]
    StatusDisagrees {
        /// What the reply says.
        ok: bool,
        /// The exit status.
        status: i32,
    },
}

impl ReplyError {
    /// The code that the call ends with: TOOL_CRASHED where the program died without an answer, else
    /// TOOL_PROTOCOL_ERROR.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::ExitStatus { .. } | Self::Empty { status: 1.. } => Code::ToolCrashed,
            _ => Code::ToolProtocolError,
        }
    }

    /// The byte of stdout where it stops being what it should be, counted from 0.
    #[must_use]
    pub const fn offset(&self) -> Option<usize> {
        match self {
            Self::Malformed(error) => Some(error.offset),
            _ => None,
        }
    }

    /// The JSON pointer to the member that breaks the protocol.
    #[must_use]
    pub fn pointer(&self) -> Option<&str> {
        match self {
            Self::Shape { pointer, .. } => Some(pointer),
            Self::WrongCall { .. } => Some("/call_id"),
            Self::StatusDisagrees { .. } => Some("/ok"),
            _ => None,
        }
    }
}

/// Reads what a tool wrote to stdout before it exited with `status`.
///
/// # Errors
/// When it is no reply of the protocol; see [`ReplyError`].
pub fn read(stdout: &[u8], call: CallId, status: i32) -> Result<Reply, ReplyError> {
    if !matches!(status, 0 | 1) {
        return Err(ReplyError::ExitStatus { status });
    }
    let text = strict_json::decode(stdout)?;
    let start = strict_json::start_of(text);
    let written = text[start..].trim_matches(|c: char| c.is_ascii_whitespace());
    if written.is_empty() {
        return Err(ReplyError::Empty { status });
    }
    let malformed = match strict_json::parse(stdout) {
        Ok(Value::Object(members)) => {
            let answer = object(members, call, status)?;
            return Ok(Reply { answer, notes: Vec::new() });
        }
        Ok(_) => {
            let offset = text.len() - text[start..].trim_start().len();
            JsonError { offset, reason: "expected an object, found another JSON value".to_owned() }
        }
        Err(error) => error,
    };
    if let Some((at, members)) = last_object(text, start) {
        match members.get("call_id") {
            Some(Value::String(found)) if *found == call.to_string() => {
                let answer = object(members, call, status)?;
                return Ok(Reply { answer, notes: vec![stray(&text[start..at])] });
            }
            Some(Value::String(found)) if members.contains_key("ok") => {
                return Err(ReplyError::WrongCall { expected: call, found: clipped(found) });
            }
            _ => {}
        }
    }
    if status == 1 && !written.starts_with('{') {
        return Ok(Reply { answer: Answer::Failure(unspecified(written.to_owned(), Value::Null)), notes: Vec::new() });
    }
    Err(malformed.into())
}

fn stray(before: &str) -> String {
    let lines = before.lines().filter(|line| !line.trim().is_empty()).count();
    format!("the tool wrote {lines} stray line(s) ({} bytes) to stdout before its reply", before.len())
}

/// The object that begins a line and ends the text.
///
/// Each line is a possible beginning, yet the time is bounded: an object that ends early is skipped whole, and so is what
/// was read up to a byte that cannot stand there, since whatever begins in between would end early or stop at the same
/// byte. Only where the text itself ends too soon is the next line tried, and objects that are open there contain each
/// other, so that there are at most [`strict_json::MAX_DEPTH`] of them.
fn last_object(text: &str, start: usize) -> Option<(usize, Map<String, Value>)> {
    let bytes = text.as_bytes();
    let mut line = start;
    while line < bytes.len() {
        let begin = line + bytes[line..].iter().position(|byte| !matches!(byte, b' ' | b'\t' | b'\r'))?;
        let mut passed = begin;
        if bytes[begin] == b'{' {
            match strict_json::parse_prefix(text, begin) {
                Ok((value, end)) if bytes[end..].iter().all(|byte| strict_json::is_space(*byte)) => {
                    return match value {
                        Value::Object(members) => Some((begin, members)),
                        _ => None,
                    };
                }
                Ok((_, end)) => passed = end,
                Err(error) if error.offset < bytes.len() => passed = error.offset,
                Err(_) => {}
            }
        }
        // A byte that may begin an object is itself the next to try when it is the first of its line.
        let begins_line = passed > begin
            && bytes[..passed].iter().rev().find(|byte| !matches!(byte, b' ' | b'\t' | b'\r')) == Some(&b'\n');
        line = if begins_line { passed } else { passed + bytes[passed..].iter().position(|byte| *byte == b'\n')? + 1 };
    }
    None
}

fn object(members: Map<String, Value>, call: CallId, status: i32) -> Result<Answer, ReplyError> {
    if members.contains_key("ok") {
        return envelope(members, call, status);
    }
    if members.contains_key("protocol") && members.contains_key("call_id") {
        return Err(shape("/ok", "is missing; a reply says true or false"));
    }
    Ok(if status == 0 {
        Answer::Success { result: Value::Object(members), artifacts: Vec::new() }
    } else {
        let message = match members.get("message").or_else(|| members.get("error")) {
            Some(Value::String(message)) => message.clone(),
            _ => "the tool exited with status 1 and wrote an object without a message".to_owned(),
        };
        let code = match members.get("code") {
            Some(Value::String(code)) if is_error_code(code) => Some(code.clone()),
            _ => None,
        };
        let mut error = unspecified(message, Value::Object(members));
        error.code = code.unwrap_or(error.code);
        Answer::Failure(error)
    })
}

fn unspecified(message: String, details: Value) -> ToolError {
    ToolError { code: UNSPECIFIED.to_owned(), message, retryable: false, retry_after_ms: None, details }
}

fn envelope(mut members: Map<String, Value>, call: CallId, status: i32) -> Result<Answer, ReplyError> {
    match members.get("protocol") {
        Some(version) if version.as_u64() == Some(PROTOCOL.into()) => {}
        Some(other) => {
            return Err(shape(
                "/protocol",
                format!("is {}; this agentd speaks {PROTOCOL}", clipped(&other.to_string())),
            ));
        }
        None => return Err(shape("/protocol", format!("is missing; write {PROTOCOL}"))),
    }
    match members.get("call_id") {
        Some(Value::String(found)) if *found == call.to_string() => {}
        Some(Value::String(found)) => return Err(ReplyError::WrongCall { expected: call, found: clipped(found) }),
        Some(_) => return Err(shape("/call_id", "is no string")),
        None => return Err(shape("/call_id", "is missing; repeat the request's")),
    }
    let Some(Value::Bool(ok)) = members.get("ok") else {
        return Err(shape("/ok", "is neither true nor false"));
    };
    let ok = *ok;
    if ok != (status == 0) {
        return Err(ReplyError::StatusDisagrees { ok, status });
    }
    let (result, error) = (members.remove("result"), members.remove("error"));
    match (ok, result, error) {
        (true, Some(result), None) => {
            Ok(Answer::Success { result, artifacts: artifacts(members.remove("artifacts"))? })
        }
        (false, None, Some(error)) => tool_error(error).map(Answer::Failure),
        (true, _, Some(_)) => Err(shape("/error", "stands beside ok: true")),
        (false, Some(_), _) => Err(shape("/result", "stands beside ok: false")),
        (true, None, None) => Err(shape("/result", "is missing beside ok: true")),
        (false, None, None) => Err(shape("/error", "is missing beside ok: false")),
    }
}

fn artifacts(value: Option<Value>) -> Result<Vec<Artifact>, ReplyError> {
    let items = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(shape("/artifacts", "is no array")),
    };
    if items.len() > MAX_ARTIFACTS {
        return Err(shape("/artifacts", format!("names {} files; at most {MAX_ARTIFACTS} can be", items.len())));
    }
    let mut read: Vec<Artifact> = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let text = |member: &str| match item.get(member) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(_) => Err(shape(format!("/artifacts/{index}/{member}"), "is no string")),
            None => Err(shape(format!("/artifacts/{index}/{member}"), "is missing")),
        };
        let artifact = Artifact { path: text("path")?, media_type: text("media_type")? };
        check_path(&artifact.path).map_err(|reason| shape(format!("/artifacts/{index}/path"), reason))?;
        if !is_media_type(&artifact.media_type) {
            return Err(shape(format!("/artifacts/{index}/media_type"), "is no media type, such as `text/csv`"));
        }
        if read.iter().any(|earlier| earlier.path == artifact.path) {
            return Err(shape(format!("/artifacts/{index}/path"), "is named twice"));
        }
        read.push(artifact);
    }
    Ok(read)
}

fn check_path(path: &str) -> Result<(), String> {
    if path.len() > MAX_ARTIFACT_PATH {
        return Err(format!("has {} bytes; at most {MAX_ARTIFACT_PATH} are taken", path.len()));
    }
    if path.starts_with('/') {
        return Err("is absolute; write it relative to the workspace".to_owned());
    }
    if path.contains('\0') {
        return Err("holds a NUL character".to_owned());
    }
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err("has an empty, `.` or `..` part; write the plain path inside the workspace".to_owned());
    }
    Ok(())
}

fn is_media_type(text: &str) -> bool {
    let is_token = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    let essence = text.split(';').next().unwrap_or_default().trim_end();
    text.len() <= 255
        && !text.chars().any(char::is_control)
        && essence.split_once('/').is_some_and(|(kind, subtype)| is_token(kind) && is_token(subtype))
}

fn is_error_code(code: &str) -> bool {
    (1..=64).contains(&code.len())
        && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
}

fn tool_error(value: Value) -> Result<ToolError, ReplyError> {
    let Value::Object(mut members) = value else { return Err(shape("/error", "is no object")) };
    let mut text = |member: &str| match members.remove(member) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(shape(format!("/error/{member}"), "is no string")),
        None => Err(shape(format!("/error/{member}"), "is missing")),
    };
    let (code, message) = (text("code")?, text("message")?);
    if !is_error_code(&code) {
        return Err(shape("/error/code", "must be 1 to 64 letters, digits, `_`, `-` and `.`"));
    }
    let retryable = match members.get("retryable") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(retryable)) => *retryable,
        Some(_) => return Err(shape("/error/retryable", "is neither true nor false")),
    };
    let retry_after_ms = match members.get("retry_after_ms") {
        None | Some(Value::Null) => None,
        Some(millis) => {
            Some(millis.as_u64().ok_or_else(|| shape("/error/retry_after_ms", "is no whole number of milliseconds"))?)
        }
    };
    let details = members.remove("details").unwrap_or_default();
    Ok(ToolError { code, message, retryable, retry_after_ms, details })
}

fn shape(pointer: impl Into<String>, reason: impl Into<String>) -> ReplyError {
    ReplyError::Shape { pointer: pointer.into(), reason: reason.into() }
}

/// What the tool wrote, as it may stand in a message.
fn clipped(text: &str) -> String {
    let clean: String = text.chars().take(80).flat_map(char::escape_debug).collect();
    if text.chars().nth(80).is_some() { format!("{clean}…") } else { clean }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const CALL: CallId = CallId::from_u128(7);

    /// Writes the call's id where the text says `ID`.
    fn answered(stdout: &str, status: i32) -> Result<Reply, ReplyError> {
        read(stdout.replace("ID", &CALL.to_string()).as_bytes(), CALL, status)
    }

    #[test]
    fn a_success_is_read() {
        let reply = answered(
            r#"{"protocol":1,"call_id":"ID","ok":true,"result":{"n":18446744073709551615},"later":1,
                "artifacts":[{"path":"out/chart.svg","media_type":"image/svg+xml"}]}"#,
            0,
        )
        .unwrap();
        let artifacts = vec![Artifact { path: "out/chart.svg".to_owned(), media_type: "image/svg+xml".to_owned() }];
        assert_eq!(reply.answer, Answer::Success { result: json!({"n": u64::MAX}), artifacts });
        assert!(reply.notes.is_empty());
    }

    #[test]
    fn a_failure_is_read() {
        let reply = answered(
            r#"{"protocol":1,"call_id":"ID","ok":false,"error":{"code":"UPSTREAM_DOWN","message":"no route",
                "retryable":true,"retry_after_ms":500,"details":{"host":"h"}}}"#,
            1,
        )
        .unwrap();
        let expected = ToolError {
            code: "UPSTREAM_DOWN".to_owned(),
            message: "no route".to_owned(),
            retryable: true,
            retry_after_ms: Some(500),
            details: json!({"host": "h"}),
        };
        assert_eq!(reply.answer, Answer::Failure(expected));
    }

    #[test]
    fn tools_that_know_no_envelope_are_understood() {
        let result = |text, status| answered(text, status).unwrap().answer;
        assert_eq!(
            result("\u{feff}{\"count\":3}\r\n", 0),
            Answer::Success { result: json!({"count": 3}), artifacts: Vec::new() }
        );
        assert_eq!(result("{}", 0), Answer::Success { result: json!({}), artifacts: Vec::new() });
        assert_eq!(
            result("no such column: price\n", 1),
            Answer::Failure(unspecified("no such column: price".to_owned(), Value::Null))
        );
        let Answer::Failure(error) = result(r#"{"code":"E42","message":"bad","line":3}"#, 1) else { panic!() };
        assert_eq!((error.code.as_str(), error.message.as_str()), ("E42", "bad"));
        assert_eq!(error.details["line"], 3);
        let Answer::Failure(error) = result(r#"{"error":"bad"}"#, 1) else { panic!() };
        assert_eq!((error.code.as_str(), error.message.as_str()), (UNSPECIFIED, "bad"));
        let Answer::Failure(error) = result("[1,2]", 1) else { panic!() };
        assert_eq!(error.message, "[1,2]");
    }

    #[test]
    fn stray_lines_before_the_right_object_are_noted() {
        let envelope = r#"{"protocol":1,"call_id":"ID","ok":true,"result":{"a":1}}"#;
        for before in
            ["loading…\n", "{\"progress\":1}\n{\"x\":[\n{}]}\n", "\u{feff}\r\nwarning: {\r\n\r\n", "{\n", "[\n"]
        {
            let reply = answered(&format!("{before}{envelope}\r\n"), 0).unwrap();
            assert_eq!(reply.answer, Answer::Success { result: json!({"a": 1}), artifacts: Vec::new() }, "{before}");
            assert_eq!(reply.notes.len(), 1, "{before}");
        }
        let pretty = "hello\n{\n  \"protocol\": 1,\n  \"call_id\": \"ID\",\n  \"ok\": true,\n  \"result\": {\n    \"x\": 1\n  }\n}\n";
        let reply = answered(pretty, 0).unwrap();
        assert!(reply.notes[0].contains("1 stray line(s) (6 bytes)"), "{:?}", reply.notes);
        let failed = answered(
            "oops\n{\"protocol\":1,\"call_id\":\"ID\",\"ok\":false,\"error\":{\"code\":\"A\",\"message\":\"b\"}}",
            1,
        );
        assert!(matches!(failed.unwrap().answer, Answer::Failure(ToolError { code, .. }) if code == "A"));
    }

    #[test]
    fn each_breach_is_named() {
        let other = CallId::from_u128(8).to_string();
        let wrong = format!(r#"{{"protocol":1,"call_id":"{other}","ok":true,"result":1}}"#);
        let artifact =
            |item: &str| format!(r#"{{"protocol":1,"call_id":"ID","ok":true,"result":1,"artifacts":{item}}}"#);
        let path = |path: &str| artifact(&format!(r#"[{{"path":"{path}","media_type":"a/b"}}]"#));
        let error = |error: &str| format!(r#"{{"protocol":1,"call_id":"ID","ok":false,"error":{error}}}"#);
        let many = vec![r#"{"path":"a","media_type":"a/b"}"#; MAX_ARTIFACTS + 1].join(",");
        let cases: &[(&str, i32, &str)] = &[
            ("", 0, "wrote nothing"),
            (" \r\n", 0, "wrote nothing"),
            ("", 1, "wrote nothing"),
            (r#"{"protocol":1,"call_id":"ID","ok":true,"result":1}"#, 2, "status 2"),
            ("done", 0, "at byte 0"),
            ("[1]", 0, "expected an object, found another JSON value at byte 0"),
            ("{\"a\":1}\n{\"b\":2}\n", 0, "at byte 8"),
            ("starting\n{\"count\":3}\n", 0, "at byte 0"),
            (r#"{"a":NaN}"#, 1, "at byte 5"),
            (r#"{"protocol":1,"call_id":"ID","ok":true,"result":1}trailing"#, 0, "after the JSON value"),
            (r#"{"protocol":1,"call_id":"ID","result":1}"#, 0, "/ok"),
            (r#"{"protocol":1,"call_id":"ID","ok":1,"result":1}"#, 0, "/ok"),
            (r#"{"protocol":2,"call_id":"ID","ok":true,"result":1}"#, 0, "/protocol"),
            (r#"{"protocol":"1","call_id":"ID","ok":true,"result":1}"#, 0, "/protocol"),
            (r#"{"call_id":"ID","ok":true,"result":1}"#, 0, "/protocol"),
            (r#"{"protocol":1,"ok":true,"result":1}"#, 0, "/call_id"),
            (r#"{"protocol":1,"call_id":7,"ok":true,"result":1}"#, 0, "/call_id"),
            (&wrong, 0, "it answers call"),
            (&format!("hello\n{wrong}"), 0, "it answers call"),
            (r#"{"protocol":1,"call_id":"ID","ok":true,"result":1}"#, 1, "ok: true, but"),
            (r#"{"protocol":1,"call_id":"ID","ok":false,"error":{"code":"A","message":"b"}}"#, 0, "ok: false, but"),
            (r#"{"protocol":1,"call_id":"ID","ok":true}"#, 0, "/result"),
            (r#"{"protocol":1,"call_id":"ID","ok":true,"result":1,"error":{}}"#, 0, "/error"),
            (r#"{"protocol":1,"call_id":"ID","ok":false}"#, 1, "/error"),
            (r#"{"protocol":1,"call_id":"ID","ok":false,"result":1,"error":{}}"#, 1, "/result"),
            (&error("\"bad\""), 1, "/error:"),
            (&error(r#"{"message":"b"}"#), 1, "/error/code"),
            (&error(r#"{"code":"","message":"b"}"#), 1, "/error/code"),
            (&error(r#"{"code":"a b","message":"b"}"#), 1, "/error/code"),
            (&error(r#"{"code":"A"}"#), 1, "/error/message"),
            (&error(r#"{"code":"A","message":{}}"#), 1, "/error/message"),
            (&error(r#"{"code":"A","message":"b","retryable":"yes"}"#), 1, "/error/retryable"),
            (&error(r#"{"code":"A","message":"b","retry_after_ms":-5}"#), 1, "/error/retry_after_ms"),
            (&error(r#"{"code":"A","message":"b","retry_after_ms":0.5}"#), 1, "/error/retry_after_ms"),
            (&artifact("{}"), 0, "/artifacts:"),
            (&artifact(&format!("[{many}]")), 0, "at most 64"),
            (&artifact("[{\"path\":\"a\"}]"), 0, "/artifacts/0/media_type"),
            (&artifact("[{\"path\":1,\"media_type\":\"a/b\"}]"), 0, "/artifacts/0/path"),
            (&artifact("[{\"path\":\"a\",\"media_type\":\"csv\"}]"), 0, "/artifacts/0/media_type"),
            (&artifact("[7]"), 0, "/artifacts/0/path"),
            (&artifact(r#"[{"path":"a","media_type":"a/b"},{"path":"a","media_type":"a/b"}]"#), 0, "named twice"),
            (&path("/etc/passwd"), 0, "absolute"),
            (&path("a/../../b"), 0, "/artifacts/0/path"),
            (&path(".."), 0, "/artifacts/0/path"),
            (&path("a//b"), 0, "/artifacts/0/path"),
            (&path(""), 0, "/artifacts/0/path"),
            (&path("a\\u0000b"), 0, "NUL"),
            (&path(&"x".repeat(MAX_ARTIFACT_PATH + 1)), 0, "bytes"),
        ];
        for (stdout, status, expected) in cases {
            let error = answered(stdout, *status).expect_err(stdout);
            assert!(error.to_string().contains(expected), "{stdout}: {error}");
            let crashed = matches!((stdout.trim(), status), ("", 1) | (_, 2));
            let code = if crashed { Code::ToolCrashed } else { Code::ToolProtocolError };
            assert_eq!(error.code(), code, "{stdout}: {error}");
        }
    }

    #[test]
    fn where_it_breaks_can_be_asked() {
        assert_eq!(answered("{\"a\":1,\"a\":2}", 0).unwrap_err().offset(), Some(7));
        assert_eq!(read(b"{\"a\":\"\xff\"}", CALL, 1).unwrap_err().offset(), Some(6));
        assert_eq!(answered(r#"{"ok":true}"#, 0).unwrap_err().pointer(), Some("/protocol"));
    }

    #[test]
    fn hostile_lines_cost_linear_time() {
        // Each line begins an object that goes on to the end; reading from every line anew would never come back.
        let nested = "{\"a\":[\n".repeat(30) + &"{},\n".repeat(200_000);
        let open = "{\"a\":\n".repeat(150_000);
        let flat = "{\"a\":1}\n".repeat(150_000);
        for text in [nested, open, flat] {
            assert_eq!(answered(&text, 0).unwrap_err().code(), Code::ToolProtocolError);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..256),
            text in "[{}\\[\\]\":,\n a-c0-1]{0,64}",
            status in -1..3,
        ) {
            let _ = read(&bytes, CALL, status);
            let _ = read(text.as_bytes(), CALL, status);
            let _ = answered(&format!(r#"{text}{{"protocol":1,"call_id":"ID","ok":true,"result":1}}{text}"#), status);
        }

        #[test]
        fn errors_round_trip(code in "[A-Z_]{1,64}", message: String, retryable: bool, after: Option<u64>) {
            let error = ToolError { code, message, retryable, retry_after_ms: after, details: json!({"a": [1]}) };
            let stdout = json!({"protocol": 1, "call_id": CALL, "ok": false, "error": &error}).to_string();
            prop_assert_eq!(read(stdout.as_bytes(), CALL, 1).unwrap().answer, Answer::Failure(error));
        }

        #[test]
        fn stray_text_never_changes_the_answer(before in "([^{\n]*\n){0,4}") {
            let envelope = r#"{"protocol":1,"call_id":"ID","ok":true,"result":{"a":1}}"#;
            let reply = answered(&format!("{before}{envelope}"), 0);
            prop_assert_eq!(reply.unwrap().answer, Answer::Success { result: json!({"a": 1}), artifacts: Vec::new() });
        }
    }
}
