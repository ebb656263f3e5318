//! The completion contract: what must have been seen before a final answer counts. Looked for in receipts, not in the
//! model's words.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::event::{CallRecord, PlannedCall};

/// What an agent wants to be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contract {
    /// A call must have changed the workspace.
    pub mutation: bool,
    /// A call must have had an effect: changed the workspace, or been a successful call of a tool with effects outside.
    pub effects: bool,
    /// Each of these tools must have passed, after the last change.
    pub verification: Vec<String>,
    /// Files that calls of this job must have written and not deleted.
    pub files: Vec<String>,
    /// Whether an unmet contract fails the job once its repairs are used up.
    pub strict: bool,
}

/// What was seen of a job's calls so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    calls: u64,
    last_mutation: Option<u64>,
    /// The last call of which it is not known what it did to the workspace.
    last_unproven: Option<u64>,
    effects: bool,
    passed: BTreeMap<String, u64>,
    files: BTreeSet<String>,
}

impl Evidence {
    pub(super) const fn new() -> Self {
        Self {
            calls: 0,
            last_mutation: None,
            last_unproven: None,
            effects: false,
            passed: BTreeMap::new(),
            files: BTreeSet::new(),
        }
    }

    /// Looks at a call that ended.
    pub(super) fn saw(&mut self, planned: &PlannedCall, record: &CallRecord) {
        self.calls += 1;
        if !(record.written.is_empty() && record.deleted.is_empty()) {
            self.last_mutation = Some(self.calls);
            self.effects = true;
        }
        // It counts as no change that is wanted, and yet as one after which everything is to be verified again.
        if record.unproven {
            self.last_unproven = Some(self.calls);
        }
        for path in &record.deleted {
            self.files.remove(path);
        }
        self.files.extend(record.written.iter().cloned());
        if record.code.is_some() {
            self.passed.remove(&planned.tool);
            return;
        }
        self.effects |= planned.outside_effects;
        let result = &record.content["result"];
        let checked = result["checked"].as_f64().is_some_and(|checked| checked > 0.0);
        if result["passed"] == Value::Bool(true) && checked {
            self.passed.insert(planned.tool.clone(), self.calls);
        } else {
            self.passed.remove(&planned.tool);
        }
    }

    /// What the contract wants and was not seen, in words.
    #[must_use]
    pub fn unmet(&self, contract: &Contract) -> Vec<String> {
        let mut unmet = Vec::new();
        if contract.mutation && self.last_mutation.is_none() {
            unmet.push("no call has changed the workspace".to_owned());
        }
        if contract.effects && !self.effects {
            unmet.push("no call has had an effect".to_owned());
        }
        for tool in &contract.verification {
            match self.passed.get(tool) {
                None => unmet.push(format!(
                    "`{tool}` has not passed: its last result must say passed = true and checked more than 0"
                )),
                Some(passed) if self.last_mutation.is_some_and(|mutation| mutation > *passed) => {
                    unmet.push(format!("`{tool}` passed before the last change of the workspace; call it again"));
                }
                Some(passed) if self.last_unproven.is_some_and(|unproven| unproven > *passed) => unmet.push(format!(
                    "`{tool}` passed before a call of which it is not known what it did to the workspace; call it again"
                )),
                Some(_) => {}
            }
        }
        for file in contract.files.iter().filter(|file| !self.files.contains(*file)) {
            unmet.push(format!("no call of this job has written the file `{file}`"));
        }
        unmet
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use toolproto::code::Code;
    use toolproto::ids::CallId;

    use super::*;
    use crate::model::transcript::Arguments;

    fn planned(tool: &str) -> PlannedCall {
        PlannedCall {
            call: CallId::from_u128(1),
            wire_id: "x".to_owned(),
            tool: tool.to_owned(),
            arguments: Arguments::Object(json!({})),
            concurrent: false,
            approval: false,
            repeatable: false,
            outside_effects: false,
            question: false,
            built_in: None,
            refusal: None,
        }
    }

    fn record(code: Option<Code>, result: Value, written: &[&str]) -> CallRecord {
        CallRecord {
            code,
            content: json!({"ok": code.is_none(), "result": result}),
            receipt: None,
            usage: None,
            workspace_after: None,
            written: written.iter().map(|path| (*path).to_owned()).collect(),
            deleted: Vec::new(),
            unproven: false,
        }
    }

    fn contract() -> Contract {
        Contract {
            mutation: true,
            effects: true,
            verification: vec!["check".to_owned()],
            files: vec!["report.html".to_owned()],
            strict: true,
        }
    }

    #[test]
    fn everything_must_have_been_seen() {
        let mut evidence = Evidence::new();
        assert_eq!(evidence.unmet(&contract()).len(), 4);
        evidence.saw(&planned("write"), &record(None, json!({}), &["report.html"]));
        evidence.saw(&planned("check"), &record(None, json!({"passed": true, "checked": 3}), &[]));
        assert_eq!(evidence.unmet(&contract()), Vec::<String>::new());
        assert!(Evidence::new().unmet(&Contract::default()).is_empty());
    }

    #[test]
    fn a_call_of_unknown_effect_is_no_change_and_no_check_and_asks_for_another_check() {
        let passed = json!({"passed": true, "checked": 3});
        let unproven = |result: &Value| CallRecord {
            unproven: true,
            ..record(Some(Code::WorkspaceTooLarge), result.clone(), &[])
        };
        let mut evidence = Evidence::new();
        evidence.saw(&planned("check"), &unproven(&passed));
        assert_eq!(evidence.unmet(&contract()).len(), 4, "it counts as something");
        evidence.saw(&planned("write"), &record(None, json!({}), &["report.html"]));
        evidence.saw(&planned("check"), &record(None, passed.clone(), &[]));
        assert!(evidence.unmet(&contract()).is_empty());
        evidence.saw(&planned("write"), &unproven(&json!({})));
        assert!(evidence.unmet(&contract())[0].contains("not known"), "{:?}", evidence.unmet(&contract()));
        evidence.saw(&planned("check"), &record(None, passed, &[]));
        assert!(evidence.unmet(&contract()).is_empty());
    }

    #[test]
    fn a_check_before_the_last_change_or_of_nothing_does_not_count() {
        let passed = json!({"passed": true, "checked": 3});
        for (check, change_after) in [
            (record(None, passed.clone(), &[]), true),
            (record(None, json!({"passed": true, "checked": 0}), &[]), false),
            (record(None, json!({"passed": "true", "checked": 1}), &[]), false),
            (record(Some(Code::ToolFailed), passed, &[]), false),
        ] {
            let mut evidence = Evidence::new();
            evidence.saw(&planned("write"), &record(None, json!({}), &["report.html"]));
            evidence.saw(&planned("check"), &check);
            if change_after {
                evidence.saw(&planned("write"), &record(None, json!({}), &["report.html"]));
            }
            assert_eq!(evidence.unmet(&contract()).len(), 1, "{check:?}");
        }
    }
}
