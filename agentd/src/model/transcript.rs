//! The conversation as agentd keeps it, free of any provider's format.
//!
//! Every call in it has exactly one result, directly after the message that asked for it. [`Transcript::check`] is called
//! before each request: a conversation that breaks this rule is refused by every provider, for ever.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolproto::digest::{CanonicalError, Digest};

/// A conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Transcript {
    /// What the model is told first.
    pub system: String,
    /// The rest, in order; begins with the goal.
    pub messages: Vec<Message>,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// From the user's side: the goal, feedback, what a person said.
    User(String),
    /// From the model.
    Assistant(Assistant),
    /// The result of a call.
    Result(CallResult),
}

/// What a model said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Assistant {
    /// In words.
    pub text: String,
    /// The calls that it asks for.
    pub calls: Vec<AskedCall>,
    /// The provider's own items, to be sent back unchanged.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub echo: Option<Value>,
}

/// A call that a model asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AskedCall {
    /// Its id, unique in the conversation.
    pub id: String,
    /// The tool.
    pub tool: String,
    /// The arguments.
    pub arguments: Arguments,
}

/// What a model wrote as a call's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arguments {
    /// A JSON object.
    Object(Value),
    /// Something else, which is never run.
    Malformed {
        /// As it was written.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The result of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallResult {
    /// The call's id.
    pub id: String,
    /// The tool.
    pub tool: String,
    /// What the model is given.
    pub content: Value,
}

/// Why a conversation must not be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PairingError {
    /// It does not begin with the goal.
    #[error("the conversation does not begin with a user's message")]
    NoGoal,
    /// A result that no call asked for.
    #[error("message {0} is a result without its call")]
    Orphan(usize),
    /// A call without its result.
    #[error("call `{0}` has no result directly after it")]
    Unanswered(String),
    /// Two calls of one id.
    #[error("two calls have the id `{0}`")]
    Duplicate(String),
}

impl Arguments {
    /// Reads what a model wrote. Nothing at all counts as an empty object, as several servers write calls without arguments.
    #[must_use]
    pub fn read(text: &str) -> Self {
        if text.trim().is_empty() {
            return Self::Object(json!({}));
        }
        let malformed = |reason: String| Self::Malformed { text: text.to_owned(), reason };
        match toolproto::strict_json::parse(text.as_bytes()) {
            Ok(value) if value.is_object() => Self::Object(value),
            Ok(_) => malformed("the arguments are not a JSON object".to_owned()),
            Err(error) => malformed(format!("the arguments are not JSON: {error}")),
        }
    }

    /// As a JSON value: what was written, or where it cannot be read, that text as a member of an object. A provider that
    /// parses past arguments must be able to.
    #[must_use]
    pub fn to_value(&self) -> Value {
        match self {
            Self::Object(value) => value.clone(),
            Self::Malformed { text, .. } => json!({"malformed": text}),
        }
    }
}

impl Transcript {
    /// Checks that every call has exactly one result, directly after it and in its order.
    ///
    /// # Errors
    /// With the first place where that is not so.
    pub fn check(&self) -> Result<(), PairingError> {
        if !matches!(self.messages.first(), Some(Message::User(_))) {
            return Err(PairingError::NoGoal);
        }
        let mut seen: HashSet<&str> = HashSet::new();
        let mut open: std::collections::VecDeque<&str> = [].into();
        for (index, message) in self.messages.iter().enumerate() {
            match message {
                Message::Result(result) => match open.pop_front() {
                    Some(id) if id == result.id => {}
                    Some(id) => return Err(PairingError::Unanswered(id.to_owned())),
                    None => return Err(PairingError::Orphan(index)),
                },
                Message::User(_) | Message::Assistant(_) => {
                    if let Some(id) = open.pop_front() {
                        return Err(PairingError::Unanswered(id.to_owned()));
                    }
                }
            }
            if let Message::Assistant(assistant) = message {
                for call in &assistant.calls {
                    if !seen.insert(&call.id) {
                        return Err(PairingError::Duplicate(call.id.clone()));
                    }
                    open.push_back(&call.id);
                }
            }
        }
        match open.pop_front() {
            Some(id) => Err(PairingError::Unanswered(id.to_owned())),
            None => Ok(()),
        }
    }

    /// The conversation as cassettes compare it: roles, text, tool names, arguments and results, with calls numbered in
    /// their order. Ids, times, usage, budget notes and tool schemas are left out.
    #[must_use]
    pub fn normalised(&self) -> Vec<Value> {
        let mut ordinals: std::collections::HashMap<&str, usize> = [].into();
        let mut normalised = vec![json!({"role": "system", "text": self.system})];
        for message in &self.messages {
            normalised.push(match message {
                Message::User(text) => json!({"role": "user", "text": text}),
                Message::Assistant(assistant) => {
                    let mut calls = Vec::new();
                    for call in &assistant.calls {
                        let next = ordinals.len() + 1;
                        let ordinal = *ordinals.entry(&call.id).or_insert(next);
                        calls.push(json!({"call": ordinal, "tool": call.tool, "arguments": call.arguments.to_value()}));
                    }
                    if calls.is_empty() {
                        json!({"role": "assistant", "text": assistant.text})
                    } else {
                        json!({"role": "assistant", "text": assistant.text, "calls": calls})
                    }
                }
                Message::Result(result) => json!({
                    "role": "tool",
                    "call": ordinals.get(result.id.as_str()),
                    "tool": result.tool,
                    "result": result.content,
                }),
            });
        }
        normalised
    }

    /// The digest of the normalised conversation.
    ///
    /// # Errors
    /// Never in practice: a normalised conversation is JSON.
    pub fn digest(&self) -> Result<Digest, CanonicalError> {
        Digest::of_json(&self.normalised())
    }

    /// Roughly how many tokens the conversation has, from its bytes: for limits before a provider has counted.
    #[must_use]
    pub fn estimated_tokens(&self) -> u64 {
        self.messages.iter().map(Message::estimated_tokens).fold(estimate(self.system.len()), u64::saturating_add)
    }
}

impl Message {
    /// Roughly how many tokens the message has.
    #[must_use]
    pub fn estimated_tokens(&self) -> u64 {
        const FRAME: u64 = 4;
        let bytes = match self {
            Self::User(text) => text.len(),
            Self::Assistant(assistant) => {
                let calls: usize = assistant
                    .calls
                    .iter()
                    .map(|call| call.tool.len() + call.id.len() + call.arguments.to_value().to_string().len())
                    .sum();
                assistant.text.len() + calls + assistant.echo.as_ref().map_or(0, |echo| echo.to_string().len())
            }
            Self::Result(result) => result.id.len() + result.content.to_string().len(),
        };
        FRAME + estimate(bytes)
    }
}

/// Tokens of a text of so many bytes: English has about four bytes per token, JSON and other scripts fewer.
fn estimate(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(ids: &[&str]) -> Message {
        let call = |id: &&str| AskedCall {
            id: (*id).to_owned(),
            tool: "stats".to_owned(),
            arguments: Arguments::Object(json!({"n": 1})),
        };
        Message::Assistant(Assistant { calls: ids.iter().map(call).collect(), ..Assistant::default() })
    }

    fn result(id: &str) -> Message {
        Message::Result(CallResult { id: id.to_owned(), tool: "stats".to_owned(), content: json!({"ok": true}) })
    }

    fn check(messages: Vec<Message>) -> Result<(), PairingError> {
        Transcript { system: "s".to_owned(), messages }.check()
    }

    #[test]
    fn every_call_has_exactly_one_result_after_it() {
        let goal = || Message::User("goal".to_owned());
        assert_eq!(check(vec![goal(), asks(&["a", "b"]), result("a"), result("b"), asks(&["c"]), result("c")]), Ok(()));
        assert_eq!(check(vec![asks(&[])]), Err(PairingError::NoGoal));
        assert_eq!(check(vec![goal(), result("a")]), Err(PairingError::Orphan(1)));
        assert_eq!(check(vec![goal(), asks(&["a"])]), Err(PairingError::Unanswered("a".to_owned())));
        assert_eq!(check(vec![goal(), asks(&["a"]), goal()]), Err(PairingError::Unanswered("a".to_owned())));
        assert_eq!(check(vec![goal(), asks(&["a"]), result("a"), result("a")]), Err(PairingError::Orphan(3)));
        let twice = vec![goal(), asks(&["a"]), result("a"), asks(&["a"]), result("a")];
        assert_eq!(check(twice), Err(PairingError::Duplicate("a".to_owned())));
    }

    #[test]
    fn ids_do_not_matter_to_the_digest_and_results_do() {
        let talk = |id: &str, content: Value| Transcript {
            system: "s".to_owned(),
            messages: vec![
                Message::User("goal".to_owned()),
                asks(&[id]),
                Message::Result(CallResult { id: id.to_owned(), tool: "stats".to_owned(), content }),
            ],
        };
        assert_eq!(talk("x", json!(1)).digest().unwrap(), talk("y", json!(1.0)).digest().unwrap());
        assert_ne!(talk("x", json!(1)).digest().unwrap(), talk("x", json!(2)).digest().unwrap());
    }

    #[test]
    fn malformed_arguments_stay_malformed() {
        assert_eq!(Arguments::read(" "), Arguments::Object(json!({})));
        assert_eq!(Arguments::read("{\"a\":1}"), Arguments::Object(json!({"a": 1})));
        for text in ["{\"a\":", "[1]", "null", "{} {}"] {
            assert!(matches!(Arguments::read(text), Arguments::Malformed { .. }), "{text}");
        }
    }
}
