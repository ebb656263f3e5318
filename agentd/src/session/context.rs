//! Room in the model's context: what is superseded becomes a placeholder, and what is old is evicted in whole units, each a
//! model's message with the results of its calls, so that no call is ever without its result. The system prompt, the goal and
//! what people say are never evicted. What was evicted stays known by one line each, and by a [`summary`](super::summary) where
//! the agent wants one.

use std::collections::{BTreeSet, HashMap, HashSet};

use regex::Regex;
use serde_json::{Value, json};

use super::event::Event;
use crate::model::transcript::{Arguments, AskedCall, Message};
use crate::tools::Tools;

/// When and how room is made.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Tokens of the model's context.
    pub limit: u64,
    /// The share of it at which room is made.
    pub compact_at: f64,
    /// Identifiers that must stay known when what they stand in is evicted.
    pub entities: Vec<Regex>,
    /// Whether the model may be asked to sum up what is oldest, before it is evicted.
    pub summary: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { limit: 128_000, compact_at: 0.8, entities: Vec::new(), summary: false }
    }
}

impl PartialEq for Rules {
    fn eq(&self, other: &Self) -> bool {
        let patterns = |rules: &Self| rules.entities.iter().map(|one| one.as_str().to_owned()).collect::<Vec<_>>();
        (self.limit, self.compact_at, self.summary) == (other.limit, other.compact_at, other.summary)
            && patterns(self) == patterns(other)
    }
}

/// What has been done to make room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compaction {
    /// What a model wrote about what left the conversation.
    summary: Option<String>,
    remembered: Vec<String>,
    /// Where in the conversation the memory stands, once there is one.
    memory: bool,
    in_vain: u32,
    /// The turn after which room was made last.
    turn: Option<u32>,
}

/// Room that was made in vain so often in a row is not made again.
const IN_VAIN: u32 = 2;
/// The share of the threshold that is left full when something has to be evicted.
const ENOUGH: f64 = 0.75;
/// The longest line that an evicted unit leaves.
const LINE: usize = 400;
/// The most lines that are kept.
const LINES: usize = 200;

impl Rules {
    /// How many tokens a request may read before room is made.
    #[must_use]
    pub fn threshold(&self) -> u64 {
        (self.limit as f64 * self.compact_at) as u64
    }
}

impl Compaction {
    pub(super) const fn new() -> Self {
        Self { summary: None, remembered: Vec::new(), memory: false, in_vain: 0, turn: None }
    }

    /// Whether making room is worth trying.
    #[must_use]
    pub const fn is_worthwhile(&self) -> bool {
        self.in_vain < IN_VAIN
    }

    /// Whether room was made after the last of so many turns had begun.
    #[must_use]
    pub fn helped_since(&self, turns: u32) -> bool {
        self.turn == Some(turns)
    }

    /// Room was made after so many turns.
    pub(super) const fn at(&mut self, turns: u32) {
        self.turn = Some(turns);
    }

    /// Makes the room that was decided on.
    pub(super) fn applied(
        &mut self,
        messages: &mut Vec<Message>,
        superseded: &[String],
        evicted: usize,
        remembered: &[String],
        effective: bool,
    ) {
        let superseded: HashSet<&str> = superseded.iter().map(String::as_str).collect();
        for message in messages.iter_mut() {
            if let Message::Result(result) = message
                && superseded.contains(result.id.as_str())
            {
                result.content = placeholder();
            }
        }
        self.evict(messages, evicted, remembered);
        self.in_vain = if effective { 0 } else { self.in_vain + 1 };
    }

    /// Puts a summary in the place of the oldest units and of the summary before it.
    pub(super) fn summarised(
        &mut self,
        messages: &mut Vec<Message>,
        evicted: usize,
        summary: &str,
        remembered: &[String],
        effective: bool,
    ) {
        self.summary = Some(summary.to_owned());
        self.evict(messages, evicted, remembered);
        self.in_vain = if effective { 0 } else { self.in_vain + 1 };
    }

    fn evict(&mut self, messages: &mut Vec<Message>, evicted: usize, remembered: &[String]) {
        let gone: HashSet<usize> = units(messages).into_iter().take(evicted).flatten().collect();
        let mut index = 0;
        messages.retain(|_| {
            index += 1;
            !gone.contains(&(index - 1))
        });
        self.remembered.extend(remembered.iter().cloned());
        let drop = self.remembered.len().saturating_sub(LINES);
        self.remembered.drain(..drop);
        if evicted > 0 {
            // Directly after the goal, in place of what was there before.
            if self.memory && messages.len() > 1 {
                messages.remove(1);
            }
            let summary = self.summary.as_ref().map(|summary| format!("{summary}\n")).unwrap_or_default();
            let lines = self.remembered.join("\n");
            let text = format!("Earlier turns left the conversation. What is known of them:\n{summary}{lines}");
            messages.insert(1.min(messages.len()), Message::User(text));
            self.memory = true;
        }
    }

    /// What a model wrote about what left the conversation.
    #[must_use]
    pub(super) fn summary(&self) -> Option<&str> {
        self.summary.as_deref()
    }
}

/// What makes room when the next request would read `tokens`. `None` when nothing does. Whatever has to be evicted, somewhat
/// more is than the threshold asks for, so that the next turns need no room again.
#[must_use]
pub fn plan(messages: &[Message], tools: &Tools, rules: &Rules, tokens: u64) -> Option<Event> {
    let mut target = rules.threshold();
    let superseded = superseded(messages, tools);
    let freed_by = |index: &usize| messages.get(*index).map_or(0, Message::estimated_tokens);
    let results: HashMap<&str, usize> = messages
        .iter()
        .enumerate()
        .filter_map(|(index, message)| match message {
            Message::Result(result) => Some((result.id.as_str(), index)),
            _ => None,
        })
        .collect();
    let mut left = tokens;
    for id in &superseded {
        left = left.saturating_sub(results.get(id.as_str()).map_or(0, freed_by));
    }
    if left > target {
        target = (target as f64 * ENOUGH) as u64;
    }
    let units = units(messages);
    let (mut evicted, mut remembered) = (0, Vec::new());
    // The last unit is what the model has just asked for: without it, it would ask again.
    for unit in units.iter().take(units.len().saturating_sub(1)) {
        if left <= target {
            break;
        }
        left = left.saturating_sub(unit.iter().map(freed_by).sum());
        remembered.extend(lines(unit.iter().filter_map(|index| messages.get(*index)), rules));
        evicted += 1;
    }
    if superseded.is_empty() && evicted == 0 {
        return None;
    }
    // Less than a tenth is hardly worth the loss of the server's cache.
    let effective = tokens.saturating_sub(left) >= tokens / 10;
    Some(Event::ContextCompacted { superseded, evicted, remembered, effective })
}

/// The units of a conversation, oldest first, each as the indices of its messages.
#[must_use]
pub fn units(messages: &[Message]) -> Vec<Vec<usize>> {
    let mut units: Vec<Vec<usize>> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        match message {
            Message::Assistant(_) => units.push(vec![index]),
            Message::Result(_) => {
                if let Some(unit) = units.last_mut() {
                    unit.push(index);
                }
            }
            Message::User(_) => {}
        }
    }
    units
}

/// Results that a later successful result of the same tool on the same target replaces. A tool says by `[context] target` what
/// its calls are about; calls of other tools are about all of their arguments.
fn superseded(messages: &[Message], tools: &Tools) -> Vec<String> {
    let mut targets: HashMap<&str, String> = HashMap::new();
    for message in messages {
        if let Message::Assistant(assistant) = message {
            for call in &assistant.calls {
                if let Arguments::Object(arguments) = &call.arguments {
                    targets.insert(&call.id, format!("{} {}", call.tool, target(tools, &call.tool, arguments)));
                }
            }
        }
    }
    let mut latest: HashSet<&str> = HashSet::new();
    let mut superseded = Vec::new();
    for message in messages.iter().rev() {
        let Message::Result(result) = message else { continue };
        let Some(target) = targets.get(result.id.as_str()) else { continue };
        if result.content == placeholder() || result.content["ok"] != Value::Bool(true) {
            continue;
        }
        if !latest.insert(target) {
            superseded.push(result.id.clone());
        }
    }
    superseded.reverse();
    superseded
}

fn target(tools: &Tools, tool: &str, arguments: &Value) -> Value {
    match tools.get(tool).map(|tool| &tool.manifest.context_target) {
        Some(pointers) if !pointers.is_empty() => {
            pointers.iter().map(|pointer| arguments.pointer(pointer).cloned().unwrap_or_default()).collect()
        }
        _ => arguments.clone(),
    }
}

fn placeholder() -> Value {
    json!({"ok": true, "superseded": "a later call on the same target has the present result"})
}

/// What stays known of a unit: each call with its arguments and how it ended, and the identifiers that must survive.
fn lines<'a>(unit: impl Iterator<Item = &'a Message>, rules: &Rules) -> Vec<String> {
    let mut lines = Vec::new();
    let mut asked: HashMap<&str, String> = HashMap::new();
    let mut text = String::new();
    for message in unit {
        match message {
            Message::Assistant(assistant) => {
                text.push_str(&assistant.text);
                for call in &assistant.calls {
                    let arguments = call.arguments.to_value().to_string();
                    text.push_str(&arguments);
                    asked.insert(&call.id, format!("{} {}", call.tool, cut(&arguments)));
                }
                if assistant.calls.is_empty() {
                    lines.push(format!("- answered: {}", cut(&assistant.text)));
                }
            }
            Message::Result(result) => {
                let whole = result.content.to_string();
                let end = match result.content["error"]["code"].as_str() {
                    Some(code) => format!("failed with {code}"),
                    None => format!("ok, {}", cut(&whole)),
                };
                lines.push(format!("- {}: {end}", asked.get(result.id.as_str()).map_or("call", String::as_str)));
                text.push_str(&whole);
            }
            Message::User(_) => {}
        }
    }
    let said = lines.join("\n");
    let entities: Vec<&str> = entities(&text, rules).into_iter().filter(|entity| !said.contains(entity)).collect();
    if !entities.is_empty() {
        lines.push(format!("- identifiers: {}", entities.join(", ")));
    }
    lines
}

/// The identifiers in a text that must stay known.
#[must_use]
pub fn entities<'a>(text: &'a str, rules: &Rules) -> BTreeSet<&'a str> {
    rules.entities.iter().flat_map(|pattern| pattern.find_iter(text)).map(|found| found.as_str()).collect()
}

/// What stays known of the oldest units beside a summary of them: each call and how it ended.
#[must_use]
pub fn evidence(messages: &[Message], oldest: usize) -> Vec<String> {
    let mut asked: HashMap<&str, String> = HashMap::new();
    let mut lines = Vec::new();
    for index in units(messages).into_iter().take(oldest).flatten() {
        match messages.get(index) {
            Some(Message::Assistant(said)) => {
                let call = |call: &AskedCall| format!("{} {}", call.tool, cut(&call.arguments.to_value().to_string()));
                asked.extend(said.calls.iter().map(|one| (one.id.as_str(), call(one))));
            }
            Some(Message::Result(result)) => {
                let call = asked.get(result.id.as_str()).map_or(result.tool.as_str(), String::as_str);
                let end = result.content["error"]["code"].as_str();
                lines.push(format!("- {call}: {}", end.map_or("ok".to_owned(), |code| format!("failed with {code}"))));
            }
            Some(Message::User(_)) | None => {}
        }
    }
    lines
}

fn cut(text: &str) -> String {
    if text.len() <= LINE { text.to_owned() } else { format!("{}…", text.chars().take(LINE / 4).collect::<String>()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::transcript::{Assistant, CallResult, Transcript};

    fn talk(results: &[(&str, Value, &str)]) -> Vec<Message> {
        let mut messages = vec![Message::User("goal".to_owned())];
        for (index, (tool, arguments, result)) in results.iter().enumerate() {
            let id = format!("c{index}");
            let call =
                AskedCall { id: id.clone(), tool: (*tool).to_owned(), arguments: Arguments::Object(arguments.clone()) };
            messages.push(Message::Assistant(Assistant { calls: vec![call], ..Assistant::default() }));
            let content = json!({"ok": true, "result": result});
            messages.push(Message::Result(CallResult { id, tool: (*tool).to_owned(), content }));
        }
        messages
    }

    fn compacted(mut messages: Vec<Message>, event: &Event) -> Vec<Message> {
        let Event::ContextCompacted { superseded, evicted, remembered, effective } = event else { panic!("{event:?}") };
        Compaction::new().applied(&mut messages, superseded, *evicted, remembered, *effective);
        Transcript { system: String::new(), messages: messages.clone() }.check().unwrap();
        messages
    }

    fn rules(limit: u64) -> Rules {
        let entities = vec![Regex::new("ORDER-[0-9]+").unwrap()];
        Rules { limit, compact_at: 1.0, entities, summary: false }
    }

    #[test]
    fn the_older_of_two_results_on_one_target_makes_room_first() {
        let long = "x".repeat(3000);
        let messages =
            talk(&[("read", json!({"p": 1}), &long), ("read", json!({"p": 2}), "b"), ("read", json!({"p": 1}), "c")]);
        let event = plan(&messages, &Tools::default(), &rules(500), 1100).unwrap();
        let Event::ContextCompacted { superseded, evicted, effective, .. } = &event else { panic!() };
        assert_eq!((superseded.as_slice(), *evicted, *effective), (&["c0".to_owned()][..], 0, true));
        assert_eq!(compacted(messages, &event).len(), 7);
    }

    #[test]
    fn whole_units_are_evicted_and_identifiers_survive() {
        let long = format!("{} ORDER-4711 {}", "x".repeat(3000), "y".repeat(3000));
        let messages =
            talk(&[("read", json!({"p": 1}), &long), ("read", json!({"p": 2}), "b"), ("read", json!({"p": 3}), "c")]);
        let event = plan(&messages, &Tools::default(), &rules(500), 2200).unwrap();
        let after = compacted(messages, &event);
        assert_eq!(after[0], Message::User("goal".to_owned()));
        let Message::User(memory) = &after[1] else { panic!() };
        assert!(memory.contains("read {\"p\":1}") && memory.contains("ORDER-4711"), "{memory}");
        assert_eq!(after.len(), 6);
    }

    #[test]
    fn the_last_unit_stays_whatever_its_size() {
        let messages = talk(&[("read", json!({}), &"x".repeat(9000))]);
        assert_eq!(plan(&messages, &Tools::default(), &rules(100), 4000), None);
    }
}
