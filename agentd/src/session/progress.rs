//! Whether a job makes progress: judged by evidence, not by likeness.
//!
//! A call repeats itself when the same tool with the same arguments gave the same result while the workspace was in the same
//! state. A test that fails the same way after an edit is no repetition, since the workspace is another; nor is polling whose
//! result changes; short cycles of several calls are. The first batch that repeats itself too often is answered with words, the
//! next one with a block of its tools, and then the job ends with NO_PROGRESS.

use std::collections::{BTreeMap, VecDeque};

use serde_json::json;
use toolproto::digest::Digest;

use super::event::{Blocked, CallRecord, PlannedCall};

/// When an agent counts as repeating itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// How often the same call may give the same result in the same state.
    pub max_same_result: u32,
    /// For how many turns a tool is blocked.
    pub block_turns: u32,
    /// How many batches in a row may make no progress.
    pub max_no_progress: u32,
    /// Whether it ends the job; otherwise words are all.
    pub stop: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { max_same_result: 3, block_turns: 2, max_no_progress: 2, stop: true }
    }
}

/// How many calls are remembered.
const WINDOW: usize = 64;

/// What was seen of a job's calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repetition {
    seen: VecDeque<Seen>,
    /// How many of the last ones belong to the batch that is being judged.
    fresh: usize,
    workspace: Option<Digest>,
    no_progress: u32,
    blocked: BTreeMap<String, u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    tool: String,
    /// Of tool, arguments, result and the workspace's state.
    signature: Digest,
}

/// What is to be done about a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Nothing.
    Progress,
    /// Words, and maybe a block.
    Warn {
        /// How many batches in a row made no progress.
        no_progress: u32,
        /// The tools that repeat themselves.
        tools: Vec<String>,
        /// Whether they are blocked.
        block: bool,
    },
    /// The end.
    Stop {
        /// The tools that repeat themselves.
        tools: Vec<String>,
    },
}

impl Repetition {
    pub(super) const fn new() -> Self {
        Self { seen: VecDeque::new(), fresh: 0, workspace: None, no_progress: 0, blocked: BTreeMap::new() }
    }

    /// Looks at a call that ended.
    pub(super) fn saw(&mut self, planned: &PlannedCall, record: &CallRecord) {
        self.workspace = record.workspace_after.or(self.workspace);
        // A failure is known by its codes: its words may hold times and addresses.
        let result = match record.code {
            None => record.content.clone(),
            Some(code) => json!([code, record.content["error"]["details"]["tool_error"]["code"]]),
        };
        let whole = json!([planned.tool, planned.arguments.to_value(), result, self.workspace]);
        self.seen
            .push_back(Seen { tool: planned.tool.clone(), signature: Digest::sha256(whole.to_string().as_bytes()) });
        self.fresh += 1;
        while self.seen.len() > WINDOW.max(self.fresh) {
            self.seen.pop_front();
        }
    }

    /// Judges the last batch.
    #[must_use]
    pub fn judge(&self, rules: &Rules) -> Judgement {
        let fresh = self.seen.iter().skip(self.seen.len().saturating_sub(self.fresh));
        let often = |one: &Seen| self.seen.iter().filter(|seen| seen.signature == one.signature).count();
        let mut tools: Vec<String> = fresh
            .filter(|one| often(one) >= rules.max_same_result.max(1) as usize)
            .map(|one| one.tool.clone())
            .collect();
        tools.sort();
        tools.dedup();
        if tools.is_empty() {
            return Judgement::Progress;
        }
        let no_progress = self.no_progress + 1;
        if rules.stop && no_progress > rules.max_no_progress {
            return Judgement::Stop { tools };
        }
        Judgement::Warn { no_progress, tools, block: rules.stop && no_progress > 1 }
    }

    /// Takes over what was decided about the last batch.
    pub(super) fn judged(&mut self, no_progress: u32, blocked: &[Blocked]) {
        self.fresh = 0;
        self.no_progress = no_progress;
        self.blocked.extend(blocked.iter().map(|one| (one.tool.clone(), one.until_turn)));
    }

    /// The tools that are blocked after so many turns.
    pub(super) fn blocked(&self, turns: u32) -> impl Iterator<Item = &str> {
        self.blocked.iter().filter(move |(_, until)| **until >= turns).map(|(tool, _)| tool.as_str())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use toolproto::code::Code;
    use toolproto::ids::CallId;

    use super::*;
    use crate::model::transcript::Arguments;

    fn saw(repetition: &mut Repetition, tool: &str, n: u32, result: Result<Value, Code>, state: &str) {
        let planned = PlannedCall {
            call: CallId::from_u128(1),
            wire_id: "x".to_owned(),
            tool: tool.to_owned(),
            arguments: Arguments::Object(json!({"n": n})),
            concurrent: false,
            approval: false,
            repeatable: false,
            outside_effects: false,
            question: false,
            built_in: None,
            refusal: None,
        };
        let (code, content) = match result {
            Ok(result) => (None, json!({"ok": true, "result": result})),
            Err(code) => {
                (Some(code), json!({"ok": false, "error": {"code": code, "message": format!("at {n}:{state}")}}))
            }
        };
        let record = CallRecord {
            code,
            content,
            receipt: None,
            usage: None,
            workspace_after: Some(Digest::sha256(state.as_bytes())),
            written: Vec::new(),
            deleted: Vec::new(),
            unproven: false,
        };
        repetition.saw(&planned, &record);
    }

    /// Judges a batch as the loop does, and takes the judgement over.
    fn judge(repetition: &mut Repetition) -> Judgement {
        let judgement = repetition.judge(&Rules::default());
        match &judgement {
            Judgement::Progress => repetition.judged(0, &[]),
            Judgement::Warn { no_progress, .. } => repetition.judged(*no_progress, &[]),
            Judgement::Stop { .. } => {}
        }
        judgement
    }

    #[test]
    fn words_then_a_block_then_the_end() {
        let mut repetition = Repetition::new();
        let mut judgements = Vec::new();
        for _ in 0..5 {
            saw(&mut repetition, "read", 1, Ok(json!({})), "a");
            judgements.push(judge(&mut repetition));
        }
        let tools = || vec!["read".to_owned()];
        assert_eq!(
            judgements,
            [
                Judgement::Progress,
                Judgement::Progress,
                Judgement::Warn { no_progress: 1, tools: tools(), block: false },
                Judgement::Warn { no_progress: 2, tools: tools(), block: true },
                Judgement::Stop { tools: tools() },
            ]
        );
    }

    #[test]
    fn edit_and_test_cycles_and_polling_are_left_alone() {
        let mut repetition = Repetition::new();
        for round in 0..20 {
            let state = format!("state {round}");
            saw(&mut repetition, "edit", 1, Ok(json!({})), &state);
            assert_eq!(judge(&mut repetition), Judgement::Progress);
            saw(&mut repetition, "test", 1, Err(Code::ToolFailed), &state);
            assert_eq!(judge(&mut repetition), Judgement::Progress);
            saw(&mut repetition, "poll", 1, Ok(json!({"progress": round})), &state);
            assert_eq!(judge(&mut repetition), Judgement::Progress);
        }
    }

    #[test]
    fn short_cycles_and_failures_with_changing_words_are_seen() {
        let mut repetition = Repetition::new();
        let mut warned = false;
        for _ in 0..3 {
            for (n, code) in [(1, Code::ToolFailed), (2, Code::ToolTimeout)] {
                saw(&mut repetition, "read", n, Err(code), "a");
                warned |= judge(&mut repetition) != Judgement::Progress;
            }
        }
        assert!(warned);
    }
}
