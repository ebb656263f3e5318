//! Each rule can be broken: a history that is right but for one thing, and the rule that must be named.

use serde_json::json;
use toolproto::code::Code;
use toolproto::job::{ReceiptsHead, Verdict};

use super::*;
use crate::model::transcript::{Arguments, AskedCall, Assistant, CallResult, Message};
use crate::scripted;
use crate::session::conclude::{self, Failure};
use crate::session::event::{CallRecord, Interruption, Plan, PlannedCall, Refusal};
use crate::session::simulation::job;

const CALL: CallId = CallId::from_u128(1);
const OTHER: CallId = CallId::from_u128(2);
const SOON: Duration = Duration::from_secs(1);

/// What facts refer to.
struct Props {
    budget: Budget,
    neutral: Event,
    paired: Transcript,
    unpaired: Transcript,
    empty: Session,
    other: Session,
    completed: Event,
    other_completed: Event,
    refused: Event,
    interrupted: Event,
    consulted: Event,
    concluded: Event,
    reopened: Event,
    result: JobResult,
    others: Vec<JobResult>,
}

fn record(code: Option<Code>) -> CallRecord {
    CallRecord {
        code,
        content: json!({"ok": code.is_none()}),
        receipt: None,
        usage: None,
        workspace_after: None,
        written: Vec::new(),
        deleted: Vec::new(),
        unproven: false,
    }
}

fn props() -> Props {
    let budget = Budget { max_turns: 2, max_tool_calls: 2, max_total_tokens: Some(100), ..scripted::agent().budget };
    let arguments = Arguments::Object(json!({}));
    let asked = AskedCall { id: "a".to_owned(), tool: "read".to_owned(), arguments: arguments.clone() };
    let assistant = Assistant { text: String::new(), calls: vec![asked], echo: None };
    let answered = CallResult { id: "a".to_owned(), tool: "read".to_owned(), content: json!({"ok": true}) };
    let (goal, calls) = (Message::User("goal".to_owned()), Message::Assistant(assistant));
    let transcript = |messages| Transcript { system: String::new(), messages };
    let planned = PlannedCall {
        call: CALL,
        wire_id: "a".to_owned(),
        tool: "read".to_owned(),
        arguments,
        concurrent: false,
        approval: false,
        repeatable: false,
        outside_effects: false,
        question: false,
        built_in: None,
        refusal: None,
    };
    let refusal = Refusal { code: Code::ToolUnknown, message: "no".to_owned() };
    let mut other = Session::new();
    let goal_of = |budget: &Budget| Event::NewGoal {
        goal: json!({}),
        agent: scripted::agent().digest,
        budget: budget.clone(),
        workspace: None,
        conversation: Vec::new(),
    };
    other.apply(&goal_of(&budget), Duration::ZERO).unwrap();
    let result = conclude::failed(&other, job(), SOON, Failure::new(Code::Cancelled, "no"));
    let others = vec![
        JobResult { verdict: Verdict::Success { data: json!({}) }, ..result.clone() },
        JobResult { usage: JobUsage { tool_calls: 1, ..result.usage }, ..result.clone() },
        JobResult { receipts: ReceiptsHead { count: 1, head: None }, ..result.clone() },
    ];
    Props {
        neutral: Event::CancelRequested {},
        paired: transcript(vec![goal.clone(), calls.clone(), Message::Result(answered)]),
        unpaired: transcript(vec![goal, calls]),
        empty: Session::new(),
        other,
        completed: Event::ToolCompleted { call: CALL, record: record(None) },
        other_completed: Event::ToolCompleted { call: OTHER, record: record(None) },
        refused: Event::PlanRefused {
            plan: Plan { calls: vec![planned], ..Plan::default() },
            refusal: refusal.clone(),
            results: vec![record(Some(Code::ToolUnknown))],
        },
        interrupted: Event::Interrupted {
            cause: Interruption::Deadline,
            results: vec![(CALL, record(Some(Code::Cancelled)))],
        },
        consulted: Event::ExtensionEnded {
            call: OTHER,
            failure: None,
            opinion: toolproto::extension::Opinion::default(),
            halt: None,
            receipt: None,
            usage: None,
        },
        concluded: Event::GoalConcluded { result: Box::new(result.clone()) },
        reopened: Event::Reopened { budget: budget.clone() },
        budget,
        result,
        others,
    }
}

impl Props {
    fn stored<'a>(&'a self, event: &'a Event) -> Fact<'a> {
        Fact::Stored { event, used: JobUsage::default(), budget: &self.budget }
    }

    fn used(&self, used: JobUsage) -> Fact<'_> {
        Fact::Stored { event: &self.neutral, used, budget: &self.budget }
    }

    fn asked<'a>(&self, transcript: &'a Transcript) -> Fact<'a> {
        Fact::Asked { transcript, time: SOON, tools: true, is_last: false }
    }

    fn summary_asked<'a>(&self, transcript: &'a Transcript) -> Fact<'a> {
        Fact::SummaryAsked { transcript, max_output: 100, limit: 1000, time: SOON, is_wanted: true }
    }

    fn ended(&self) -> Fact<'_> {
        let transcript = &self.paired;
        Fact::Ended { phase: Phase::Idle, actions: 0, open_calls: 0, is_consulting: false, transcript }
    }

    /// A job to its end, with one fact of each kind, and some twice: all is well.
    fn sound(&self) -> Vec<Fact<'_>> {
        vec![
            Fact::Stepped,
            self.asked(&self.paired),
            Fact::Asked { transcript: &self.paired, time: SOON, tools: false, is_last: true },
            Fact::Offered { tools: vec!["read".to_owned()], known: vec!["read".to_owned(), "write".to_owned()] },
            self.summary_asked(&self.paired),
            Fact::Summarised { summary: "n:1, n:2", identifiers: vec!["n:1", "n:2"] },
            Fact::Waited { now: Duration::ZERO, until: Some(SOON) },
            ordered(CALL, false),
            Fact::Ran { call: CALL, may_run_again: false },
            self.used(JobUsage { turns: 2, tool_calls: 2, input_tokens: 60, output_tokens: 40, ..JobUsage::default() }),
            self.stored(&self.completed),
            Fact::Consulted { call: OTHER, time: SOON },
            Fact::ConsultationGoesOn { call: OTHER },
            self.stored(&self.consulted),
            // Two that may run beside each other, both again after a crash.
            ordered(OTHER, true),
            ordered(CallId::from_u128(3), true),
            Fact::Ran { call: OTHER, may_run_again: true },
            Fact::Restored { before: &self.other, after: &self.other },
            ordered(OTHER, true),
            Fact::Ran { call: OTHER, may_run_again: true },
            self.stored(&self.other_completed),
            Fact::WaitEnded { now: SOON, until: SOON },
            Fact::Refused { event: "X", before: &self.empty, after: &self.empty },
            self.stored(&self.concluded),
            Fact::PlayedTwice { calm: &self.result, crashed: &self.result },
        ]
    }

    /// Histories that break a rule with their last fact, and no other before.
    fn breaking(&self, rule: Rule) -> Vec<Vec<Fact<'_>>> {
        let none = Duration::ZERO;
        let stored = |event| self.stored(event);
        match rule {
            Rule::Ends => vec![vec![Fact::Stepped; MOST_STEPS as usize + 1]],
            Rule::Wakes => {
                vec![vec![Fact::Waited { now: none, until: None }], vec![Fact::Waited { now: SOON, until: Some(SOON) }]]
            }
            Rule::Budget => vec![
                vec![self.used(JobUsage { turns: 3, ..JobUsage::default() })],
                vec![self.used(JobUsage { tool_calls: 3, ..JobUsage::default() })],
                vec![self.used(JobUsage { input_tokens: 60, output_tokens: 41, ..JobUsage::default() })],
            ],
            Rule::Pairing => {
                let ended = Fact::Ended {
                    phase: Phase::Idle,
                    actions: 0,
                    open_calls: 0,
                    is_consulting: false,
                    transcript: &self.unpaired,
                };
                vec![
                    vec![self.asked(&self.unpaired)],
                    vec![self.summary_asked(&self.unpaired)],
                    vec![stored(&self.concluded), ended],
                ]
            }
            Rule::Deadline => vec![
                vec![Fact::Asked { transcript: &self.paired, time: none, tools: true, is_last: false }],
                vec![Fact::SummaryAsked {
                    transcript: &self.paired,
                    max_output: 1,
                    limit: 1000,
                    time: none,
                    is_wanted: true,
                }],
                vec![Fact::Ordered { call: CALL, may_run_beside: true, time: none }],
                vec![Fact::Consulted { call: CALL, time: none }],
            ],
            Rule::Offered => vec![
                vec![Fact::Asked { transcript: &self.paired, time: SOON, tools: true, is_last: true }],
                vec![Fact::Asked { transcript: &self.paired, time: SOON, tools: false, is_last: false }],
            ],
            Rule::Found => {
                vec![vec![Fact::Offered { tools: vec!["read".to_owned()], known: vec!["write".to_owned()] }]]
            }
            Rule::SummaryWanted => vec![vec![Fact::SummaryAsked {
                transcript: &self.paired,
                max_output: 1,
                limit: 1000,
                time: SOON,
                is_wanted: false,
            }]],
            Rule::SummaryFits => vec![vec![Fact::SummaryAsked {
                transcript: &self.paired,
                max_output: 1000,
                limit: 1000,
                time: SOON,
                is_wanted: true,
            }]],
            Rule::Identifiers => vec![vec![Fact::Summarised { summary: "n:1", identifiers: vec!["n:1", "n:2"] }]],
            Rule::Alone => {
                vec![vec![ordered(CALL, false), ordered(OTHER, true)], vec![ordered(OTHER, true), ordered(CALL, false)]]
            }
            Rule::Once => {
                let ran = Fact::Ran { call: CALL, may_run_again: false };
                let crash = Fact::Restored { before: &self.other, after: &self.other };
                vec![vec![ordered(CALL, false), ran.clone(), crash, ordered(CALL, false), ran]]
            }
            Rule::WaitsOut => vec![vec![Fact::WaitEnded { now: none, until: SOON }]],
            Rule::Consultation => {
                let consulted = || Fact::Consulted { call: OTHER, time: SOON };
                vec![
                    vec![ordered(CALL, false), consulted()],
                    vec![consulted(), Fact::Consulted { call: CALL, time: SOON }],
                    vec![consulted(), ordered(CALL, true)],
                    vec![Fact::ConsultationGoesOn { call: OTHER }],
                    vec![consulted(), stored(&self.consulted), Fact::ConsultationGoesOn { call: OTHER }],
                ]
            }
            Rule::Refusal => vec![vec![Fact::Refused { event: "X", before: &self.empty, after: &self.other }]],
            Rule::Events => vec![vec![Fact::Restored { before: &self.empty, after: &self.other }]],
            Rule::OneResult => vec![
                vec![ordered(CALL, false), stored(&self.completed), stored(&self.completed)],
                vec![ordered(CALL, false), stored(&self.completed), stored(&self.interrupted)],
                vec![stored(&self.refused), stored(&self.completed)],
            ],
            Rule::Result => {
                // What ran before a crash does not run after it.
                let crash = Fact::Restored { before: &self.other, after: &self.other };
                vec![vec![ordered(CALL, false), crash, stored(&self.concluded), self.ended()]]
            }
            Rule::OneConclusion => vec![
                vec![stored(&self.concluded), stored(&self.concluded)],
                vec![self.ended()],
                vec![stored(&self.concluded), stored(&self.reopened), self.ended()],
            ],
            Rule::Rest => {
                let ended = |phase, actions, open_calls, is_consulting| {
                    let transcript = &self.paired;
                    let ended = Fact::Ended { phase, actions, open_calls, is_consulting, transcript };
                    vec![stored(&self.concluded), ended]
                };
                let consulted = Fact::Consulted { call: OTHER, time: SOON };
                vec![
                    ended(Phase::Planning, 0, 0, false),
                    ended(Phase::Idle, 1, 0, false),
                    ended(Phase::Idle, 0, 1, false),
                    ended(Phase::Idle, 0, 0, true),
                    vec![ordered(CALL, false), stored(&self.concluded), self.ended()],
                    vec![consulted, stored(&self.concluded), self.ended()],
                ]
            }
            Rule::CrashesChangeNothing => {
                let twice = |crashed| vec![Fact::PlayedTwice { calm: &self.result, crashed }];
                self.others.iter().map(twice).collect()
            }
        }
    }
}

fn ordered<'a>(call: CallId, may_run_beside: bool) -> Fact<'a> {
    Fact::Ordered { call, may_run_beside, time: SOON }
}

const RULES: [Rule; 21] = [
    Rule::Ends,
    Rule::Wakes,
    Rule::Budget,
    Rule::Pairing,
    Rule::Deadline,
    Rule::Offered,
    Rule::Found,
    Rule::SummaryWanted,
    Rule::SummaryFits,
    Rule::Identifiers,
    Rule::Alone,
    Rule::Once,
    Rule::WaitsOut,
    Rule::Consultation,
    Rule::Refusal,
    Rule::Events,
    Rule::OneResult,
    Rule::Result,
    Rule::OneConclusion,
    Rule::Rest,
    Rule::CrashesChangeNothing,
];

#[test]
fn a_sound_history_breaks_no_rule() {
    let props = props();
    let mut checker = Checker::default();
    for fact in props.sound() {
        checker.see(&fact).unwrap_or_else(|broken| panic!("{broken}, by {fact:?}"));
    }
    // A call that ran beside it is still there, and then it is not: the end is sound, too.
    checker.see(&props.ended()).unwrap_err();
    let third = Event::ToolCompleted { call: CallId::from_u128(3), record: record(None) };
    checker.see(&props.stored(&third)).unwrap();
    checker.see(&props.ended()).unwrap();
    assert_eq!(checker.seen, BTreeSet::from(Fact::KINDS), "a kind of fact is in no history");
}

#[test]
fn each_rule_can_be_broken_and_is_named_then() {
    let props = props();
    assert!(RULES.is_sorted_by(|one, next| one < next), "a rule stands twice, or in another order");
    assert_eq!(RULES.len(), Rule::CrashesChangeNothing as usize + 1, "a rule is not broken by any history");
    for rule in RULES {
        let histories = props.breaking(rule);
        assert!(!histories.is_empty(), "{rule:?}");
        for history in histories {
            let mut checker = Checker::default();
            let (last, before) = history.split_last().unwrap();
            for fact in before {
                checker.see(fact).unwrap_or_else(|broken| panic!("{broken} before {rule:?}, by {fact:?}"));
            }
            let broken = checker.see(last).expect_err(&format!("{rule:?} is not broken by {last:?}"));
            assert_eq!(broken.rule, rule, "{broken}");
        }
    }
}
