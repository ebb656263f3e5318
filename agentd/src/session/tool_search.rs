//! `tool_search`: the tool by which a model finds the tools that it is not told of from the start (`[tool_search]` in an agent).
//!
//! What is found, and what was called, is offered from the next turn on, after what was offered before; the system prompt says
//! nothing of tools and stays the same bytes. The search compares words, asks no model and runs nothing: the same words find
//! the same tools. Like a question to a person it leaves no receipt; words and finds are events.

use std::collections::{BTreeSet, HashMap};

use serde_json::json;
use toolproto::code::Code;

use super::event::{BuiltIn, CallRecord, Event, Refusal};
use super::{BatchCall, Progress, Session, question, wait};
use crate::agent::Agent;
use crate::model::ToolOffer;
use crate::model::transcript::Arguments;
use crate::tools::{Tool, Tools};

/// The tool's name. No tool of the catalogue that an agent uses may have it where it is offered.
pub const NAME: &str = "tool_search";

/// How an agent's model finds its tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The tools that are offered from the start.
    pub always: Vec<String>,
    /// How many tools one search finds at most.
    pub results: usize,
}

/// The most names that are told to a model that finds nothing.
const NAMES: usize = 50;
/// Words that say nothing of what a tool does.
const EMPTY: [&str; 26] = [
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "for", "from", "how", "i", "in", "is", "it", "of",
    "on", "or", "that", "the", "to", "what", "which", "with",
];
/// The fewest letters of a word that may stand for a longer one.
const STEM: usize = 4;

/// What a model is offered in the next request, in an order in which what is new comes last.
#[must_use]
pub fn offered(session: &Session, agent: &Agent, tools: &Tools) -> Vec<ToolOffer> {
    let blocked: BTreeSet<&str> = session.blocked().collect();
    let open = |name: &&str| !blocked.contains(name);
    let known = |name: &&str| agent.tools.iter().any(|tool| tool == name);
    let names: Vec<&str> = match &agent.tool_search {
        None => agent.tools.iter().map(String::as_str).collect(),
        Some(rules) => rules.always.iter().map(String::as_str).collect(),
    };
    let found = session.found.iter().map(String::as_str).filter(|name| known(name) && !names.contains(name));
    let found: Vec<&str> = found.collect();
    let first = names.into_iter().filter(open).filter_map(|name| tools.get(name)).map(|tool| tool.offer());
    let search = agent.tool_search.as_ref().filter(|_| open(&NAME)).map(|_| offer(agent.tools.len()));
    let ask = agent.ask_user.filter(|_| open(&question::NAME)).map(|_| question::offer());
    let pause = agent.wait.filter(|_| open(&wait::NAME)).map(wait::offer);
    let later = found.into_iter().filter(open).filter_map(|name| tools.get(name)).map(|tool| tool.offer());
    first.chain(ask).chain(pause).chain(search).chain(later).collect()
}

/// As a model is told of it.
fn offer(count: usize) -> ToolOffer {
    ToolOffer {
        name: NAME.to_owned(),
        description: format!(
            "Finds tools by words that say what they do. There are {count} tools, and most of them are not listed here: search \
             before you conclude that something cannot be done. What is found can be called from the next turn on."
        ),
        parameters: json!({
            "type": "object",
            "properties": {"query": {"type": "string", "minLength": 1}},
            "required": ["query"],
            "additionalProperties": false,
        }),
    }
}

fn query(arguments: &Arguments) -> Option<&str> {
    let Arguments::Object(arguments) = arguments else { return None };
    arguments.get("query")?.as_str().filter(|text| !words(text).is_empty())
}

/// Why a search cannot be made.
#[must_use]
pub fn refusal(arguments: &Arguments) -> Option<Refusal> {
    let message = match (query(arguments), arguments) {
        (Some(_), _) => return None,
        (None, Arguments::Malformed { reason, .. }) => reason.clone(),
        (None, Arguments::Object(_)) => "/query: it must be text with words in it".to_owned(),
    };
    Some(Refusal { code: Code::ArgumentsInvalid, message })
}

/// What ends a search: what it finds.
#[must_use]
pub fn ended(one: &BatchCall, agent: &Agent, tools: &Tools) -> Option<Event> {
    let is_open = one.planned.built_in == Some(BuiltIn::ToolSearch) && one.progress == Progress::Pending;
    let rules = agent.tool_search.as_ref().filter(|_| is_open && one.planned.refusal.is_none())?;
    let query = query(&one.planned.arguments)?;
    let of_agent = || agent.tools.iter().filter_map(|name| tools.get(name)).map(|tool| &**tool);
    let found = find(query, of_agent(), rules.results);
    let mut result = json!({"tools": found.iter().map(|tool| {
        json!({"name": tool.manifest.name, "description": tool.manifest.description})
    }).collect::<Vec<_>>()});
    if found.is_empty() {
        let names: Vec<&str> = of_agent().map(|tool| tool.manifest.name.as_str()).take(NAMES).collect();
        result["nothing_found"] = json!({"some_names": names});
    }
    let record = CallRecord::of_no_tool(None, json!({"ok": true, "result": result}));
    Some(Event::ToolCompleted { call: one.planned.call, record })
}

/// The tools that a search found, as its record says.
pub(super) fn found_by(record: &CallRecord) -> impl Iterator<Item = &str> {
    record.content["result"]["tools"].as_array().into_iter().flatten().filter_map(|tool| tool["name"].as_str())
}

/// The tools that fit the words best: each word counts by how rare it is, and more in a name than in a description, and there more
/// than among the arguments.
fn find<'a>(query: &str, tools: impl Iterator<Item = &'a Tool>, most: usize) -> Vec<&'a Tool> {
    let tools: Vec<(&Tool, HashMap<String, f64>)> = tools.map(|tool| (tool, weights(tool))).collect();
    let telling = words(query).into_iter().filter(|word| !EMPTY.contains(&word.as_str()));
    let asked: BTreeSet<String> = telling.collect();
    let mut scores = vec![0.0; tools.len()];
    for word in &asked {
        let fits: Vec<f64> = tools.iter().map(|(_, weights)| fit(word, weights)).collect();
        let common = fits.iter().filter(|fit| **fit > 0.0).count();
        let rarity = (1.0 + (1 + tools.len()) as f64 / (1 + common) as f64).ln();
        for (score, fit) in scores.iter_mut().zip(fits) {
            *score += rarity * fit;
        }
    }
    let mut ranked: Vec<(f64, &Tool)> = scores
        .into_iter()
        .zip(&tools)
        .map(|(score, (tool, _))| (score, *tool))
        .filter(|(score, _)| *score > 0.0)
        .collect();
    ranked.sort_by(|(a, x), (b, y)| b.total_cmp(a).then_with(|| x.manifest.name.cmp(&y.manifest.name)));
    ranked.into_iter().map(|(_, tool)| tool).take(most).collect()
}

/// How well a word fits a tool: as it stands, or as the stem of one of its words or the other way round.
fn fit(word: &str, weights: &HashMap<String, f64>) -> f64 {
    let akin = |other: &str| {
        let shorter = word.len().min(other.len());
        shorter >= STEM && (word.starts_with(other) || other.starts_with(word))
    };
    match weights.get(word) {
        Some(weight) => *weight,
        None => weights.iter().filter(|(other, _)| akin(other)).map(|(_, weight)| weight / 2.0).fold(0.0, f64::max),
    }
}

/// The words that a tool is known by, with their weights.
fn weights(tool: &Tool) -> HashMap<String, f64> {
    let mut weights: HashMap<String, f64> = HashMap::new();
    let mut arguments = String::new();
    for (name, property) in tool.input.source()["properties"].as_object().into_iter().flatten() {
        arguments.push_str(&format!("{name} {} ", property["description"].as_str().unwrap_or_default()));
    }
    let manifest = &tool.manifest;
    for (text, weight) in
        [(manifest.name.as_str(), 4.0), (manifest.description.as_str(), 2.0), (arguments.as_str(), 1.0)]
    {
        for word in words(text) {
            let known = weights.entry(word).or_insert(0.0);
            *known = known.max(weight);
        }
    }
    weights
}

/// The words of a text, in lower case.
fn words(text: &str) -> Vec<String> {
    let parts = text.split(|letter: char| !letter.is_alphanumeric()).filter(|part| !part.is_empty());
    parts.map(str::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use serde_json::Value;
    use toolproto::digest::Digest;
    use toolproto::manifest::ToolManifest;

    use super::*;
    use crate::schema::Schema;

    fn tool(name: &str, description: &str, argument: &str) -> Tool {
        let text = format!(
            "version = 1\nname = \"{name}\"\ndescription = \"{description}\"\n[run]\nruntime = \"python\"\nentry = \"main.py\"\n\
             [contract]\ninput = \"i.json\"\n[execution]\n"
        );
        let input = json!({"type": "object", "properties": {argument: {"type": "string", "description": "of a kind"}}});
        Tool {
            manifest: ToolManifest::parse(Path::new("tool.toml"), &text).unwrap(),
            digest: Digest::blake3(name.as_bytes()),
            input: Schema::compile(input).unwrap(),
            output: None,
            time: Duration::from_secs(60),
            discardable: false,
        }
    }

    fn found(query: &str) -> Vec<String> {
        let tools = [
            tool("csv_stats", "Counts the rows of a table.", "path"),
            tool("send_mail", "Sends a message to somebody.", "recipient"),
            tool("read_mail", "Reads the messages of a mailbox.", "folder"),
            tool("draw_chart", "Draws a table as a picture.", "table"),
            tool("convert", "Converts a picture.", "format"),
        ];
        find(query, tools.iter(), 3).into_iter().map(|tool| tool.manifest.name.clone()).collect()
    }

    #[test]
    fn names_count_more_than_descriptions_and_rare_words_more_than_common_ones() {
        assert_eq!(found("csv_stats"), ["csv_stats"]);
        assert_eq!(found("mail")[..2], ["read_mail", "send_mail"]);
        assert_eq!(found("send a message")[0], "send_mail");
        assert_eq!(found("which is for the recipient"), ["send_mail"]);
        assert_eq!(found("picture of a table")[0], "draw_chart");
        assert_eq!(found("Messages")[..2], ["read_mail", "send_mail"], "stems are akin");
        assert_eq!(found("quantum"), Vec::<String>::new());
        assert_eq!(found("table").len(), 2);
    }

    #[test]
    fn a_search_without_words_is_refused() {
        let refused = |arguments: Value| refusal(&Arguments::Object(arguments)).is_some();
        assert!(refused(json!({})) && refused(json!({"query": 1})) && refused(json!({"query": " ,-"})));
        assert!(!refused(json!({"query": "mail"})));
        let malformed = Arguments::Malformed { text: "{".to_owned(), reason: "cut off".to_owned() };
        assert_eq!(refusal(&malformed).unwrap().message, "cut off");
    }
}
