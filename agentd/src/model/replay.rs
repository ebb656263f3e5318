//! The `replay` provider: a recorded conversation answers, as long as the conversation is the recorded one.

use std::path::PathBuf;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use toolproto::code::Code;

use super::cassette::{self, Asked, CassetteError, Exchange};
use super::{Model, ModelError, Reply, Request, Watch};

/// A recorded conversation. It holds no position: the answer follows from how often the model has spoken already, so that a
/// resumed job goes on at the right place and many jobs share one cassette.
#[derive(Clone, Debug)]
pub struct Replay {
    file: PathBuf,
    exchanges: Vec<Exchange>,
    scripts: bool,
}

impl Replay {
    /// Opens a cassette. A script is accepted only if `recording`.
    ///
    /// # Errors
    /// When it cannot be read, is empty, or is a script that is not being recorded.
    pub fn open(file: PathBuf, recording: bool) -> Result<Self, CassetteError> {
        let exchanges = cassette::read(&file)?;
        let refused =
            |line: usize, reason: &str| CassetteError::Line { file: file.clone(), line, reason: reason.to_owned() };
        if exchanges.is_empty() {
            return Err(refused(1, "the cassette is empty"));
        }
        if let Some(index) = exchanges.iter().position(|exchange| exchange.request.is_none())
            && !recording
        {
            return Err(refused(index + 1, "a line without `request` is a script, played only together with `record`"));
        }
        Ok(Self { file, exchanges, scripts: recording })
    }

    fn answer(&self, request: &Request) -> Result<Reply, ModelError> {
        let asked = Asked::of(request)?;
        let same = |recorded: &Asked| recorded.digest == asked.digest && recorded.thinking == asked.thinking;
        let matching = self.exchanges.iter().find(|exchange| exchange.request.as_ref().is_some_and(same));
        if let Some(exchange) = matching {
            return Ok(exchange.response.reply());
        }
        let spoken = asked.messages.iter().filter(|message| message["role"] == "assistant").count();
        match self.exchanges.get(spoken) {
            Some(Exchange { request: None, response, .. }) if self.scripts => Ok(response.reply()),
            Some(Exchange { request: Some(recorded), .. }) => Err(self.diverged(spoken, recorded, &asked)),
            _ => Err(self.ended(spoken, &asked)),
        }
    }

    fn diverged(&self, line: usize, recorded: &Asked, asked: &Asked) -> ModelError {
        let (place, recorded, now) = first_difference(&recorded.messages, &asked.messages);
        ModelError {
            details: json!({"line": line + 1, "pointer": place, "recorded": recorded, "now": now}),
            ..ModelError::lasting(
                Code::ModelUnavailable,
                format!(
                    "the conversation differs from {} line {}, first at {place}: recorded {}, now {}",
                    self.file.display(),
                    line + 1,
                    excerpt(&recorded),
                    excerpt(&now)
                ),
            )
        }
    }

    fn ended(&self, spoken: usize, asked: &Asked) -> ModelError {
        let message = format!(
            "{} has {} exchanges, and the conversation goes on after {spoken} answers",
            self.file.display(),
            self.exchanges.len()
        );
        let now = asked.messages.last().cloned().unwrap_or_default();
        ModelError { details: json!({"now": now}), ..ModelError::lasting(Code::ModelUnavailable, message) }
    }
}

impl Model for Replay {
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
        async move {
            let reply = self.answer(request)?;
            if !reply.text.is_empty() {
                watch(&reply.text);
            }
            Ok(reply)
        }
        .boxed()
    }
}

/// The first place where two conversations differ: a JSON pointer into the messages, and what stands there in each.
fn first_difference(recorded: &[Value], now: &[Value]) -> (String, Value, Value) {
    for index in 0..recorded.len().max(now.len()) {
        let missing = Value::Null;
        let (left, right) = (recorded.get(index).unwrap_or(&missing), now.get(index).unwrap_or(&missing));
        if let Some((pointer, left, right)) = difference(left, right) {
            return (format!("/{index}{pointer}"), left, right);
        }
    }
    (String::new(), Value::Null, Value::Null)
}

fn difference(left: &Value, right: &Value) -> Option<(String, Value, Value)> {
    let inner = |key: String, left: Option<&Value>, right: Option<&Value>| {
        let missing = Value::Null;
        let (pointer, left, right) = difference(left.unwrap_or(&missing), right.unwrap_or(&missing))?;
        Some((format!("/{}{pointer}", key.replace('~', "~0").replace('/', "~1")), left, right))
    };
    match (left, right) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            keys.into_iter().find_map(|key| inner(key.clone(), a.get(key), b.get(key)))
        }
        (Value::Array(a), Value::Array(b)) => {
            (0..a.len().max(b.len())).find_map(|index| inner(index.to_string(), a.get(index), b.get(index)))
        }
        // As numbers, not as they are written: 1 and 1.0 have one canonical form.
        (Value::Number(a), Value::Number(b)) if a == b || a.as_f64() == b.as_f64() => None,
        (a, b) if a == b => None,
        (a, b) => Some((String::new(), a.clone(), b.clone())),
    }
}

fn excerpt(value: &Value) -> String {
    const LIMIT: usize = 120;
    let text = value.to_string();
    if text.chars().count() <= LIMIT { text } else { format!("{}…", text.chars().take(LIMIT).collect::<String>()) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Thinking;
    use super::super::cassette::Recorder;
    use super::super::transcript::{Arguments, AskedCall, Assistant, CallResult, Message, Transcript};
    use super::*;

    fn request(messages: Vec<Message>) -> Request {
        Request {
            transcript: Transcript { system: "s".to_owned(), messages },
            tools: Vec::new(),
            note: String::new(),
            max_output: None,
            time: Duration::from_secs(1),
            thinking: Thinking::AsConfigured,
        }
    }

    fn goal() -> Message {
        Message::User("goal".to_owned())
    }

    fn exchanged(result: Value) -> Vec<Message> {
        let call = AskedCall {
            id: "x".to_owned(),
            tool: "stats".to_owned(),
            arguments: Arguments::Object(json!({"quarter": "2000-Q3"})),
        };
        vec![
            goal(),
            Message::Assistant(Assistant { calls: vec![call], ..Assistant::default() }),
            Message::Result(CallResult { id: "x".to_owned(), tool: "stats".to_owned(), content: result }),
        ]
    }

    #[tokio::test]
    async fn a_recorded_script_replays_and_names_the_first_difference() {
        let folder = tempfile::tempdir().unwrap();
        let (script, cassette) = (folder.path().join("script.jsonl"), folder.path().join("cassette.jsonl"));
        let lines = [
            json!({"version": 1, "response": {"calls": [{"tool": "stats", "arguments": {"quarter": "2000-Q3"}}]}}),
            json!({"version": 1, "response": {"text": "{\"done\":true}"}}),
        ];
        std::fs::write(&script, lines.map(|line| line.to_string()).join("\n")).unwrap();
        assert!(Replay::open(script.clone(), false).is_err(), "a script was taken for a cassette");

        let recorder = Recorder::new(Replay::open(script, true).unwrap(), cassette.clone());
        let (first, second) = (request(vec![goal()]), request(exchanged(json!({"ok": true, "result": {"n": 1}}))));
        assert_eq!(recorder.reply(&first, &|_| ()).await.unwrap().calls[0].tool, "stats");
        recorder.reply(&second, &|_| ()).await.unwrap();

        let replay = Replay::open(cassette, false).unwrap();
        assert_eq!(replay.reply(&second, &|_| ()).await.unwrap().text, "{\"done\":true}");
        assert_eq!(replay.reply(&first, &|_| ()).await.unwrap().calls[0].tool, "stats");
        let other = request(exchanged(json!({"ok": true, "result": {"n": 2}})));
        let error = replay.reply(&other, &|_| ()).await.unwrap_err();
        assert_eq!(error.code, Code::ModelUnavailable);
        assert_eq!(error.details["pointer"], "/3/result/result/n", "{error}");
        assert!(error.message.contains("recorded 1, now 2"), "{error}");
    }

    #[tokio::test]
    async fn the_same_question_with_and_without_thoughts_has_two_answers() {
        let folder = tempfile::tempdir().unwrap();
        let (script, cassette) = (folder.path().join("script.jsonl"), folder.path().join("cassette.jsonl"));
        let free = request(vec![goal()]);
        let off = Request { thinking: Thinking::Off, ..free.clone() };
        for (response, asked) in [(json!({"only_thought": true}), &free), (json!({"text": "said"}), &off)] {
            std::fs::write(&script, json!({"version": 1, "response": response}).to_string()).unwrap();
            let recorder = Recorder::new(Replay::open(script.clone(), true).unwrap(), cassette.clone());
            recorder.reply(asked, &|_| ()).await.unwrap();
        }
        let replay = Replay::open(cassette, false).unwrap();
        assert!(replay.reply(&free, &|_| ()).await.unwrap().only_thought);
        assert_eq!(replay.reply(&off, &|_| ()).await.unwrap().text, "said");
    }

    #[test]
    fn broken_cassettes_name_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.jsonl");
        for (text, words) in [("", "empty"), ("{}", ":1:"), ("\n{\"version\":2,\"response\":{}}", ":2: ")] {
            std::fs::write(&file, text).unwrap();
            let error = Replay::open(file.clone(), false).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
