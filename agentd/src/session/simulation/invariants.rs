//! What must hold of every job, whatever happens to it. A [`Checker`] is told what happens, one [`Fact`] after the other, and says
//! which [`Rule`] is broken. It keeps its own books, and knows nothing of how a session decides.

mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use toolproto::api::Phase;
use toolproto::ids::CallId;
use toolproto::job::{JobResult, JobUsage};

use crate::model::transcript::Transcript;
use crate::session::Session;
use crate::session::budget::Budget;
use crate::session::event::Event;

/// After so many steps a job goes on for ever.
const MOST_STEPS: u32 = 5000;

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    /// Every job ends.
    Ends,
    /// Where nothing goes on, something will, by itself and later.
    Wakes,
    /// Turns, calls and tokens stay within the budget.
    Budget,
    /// What a model is sent has each call with its result, right behind it, and nothing else twice.
    Pairing,
    /// Nothing is begun when no time is left.
    Deadline,
    /// A model is offered tools, except in the last turn.
    Offered,
    /// Under tool search a model is offered only what it found, used, or has always.
    Found,
    /// A summary is asked for only where that is configured, and not in the last turn.
    SummaryWanted,
    /// The request for a summary, with its answer, fits into the context.
    SummaryFits,
    /// A summary that is taken holds every identifier that must survive.
    Identifiers,
    /// Beside a call that may not run beside others none runs.
    Alone,
    /// What may not be repeated has its effect at most once.
    Once,
    /// A wait ends no earlier than planned.
    WaitsOut,
    /// While an extension is asked, no tool runs, and no other extension.
    Consultation,
    /// An event that is refused changes nothing.
    Refusal,
    /// The events say all there is to say.
    Events,
    /// A call has one result.
    OneResult,
    /// A call that was ordered has a result in the end.
    Result,
    /// Each run of a job has one conclusion.
    OneConclusion,
    /// When a job has ended, nothing goes on, and nothing is to be done.
    Rest,
    /// Crashes change nothing that a job says of itself, where its tools are deterministic and may be repeated.
    CrashesChangeNothing,
}

/// A rule that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Broken {
    pub(super) rule: Rule,
    pub(super) what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is broken: {}", self.rule, self.what)
    }
}

/// Something that happens.
#[derive(Clone, Debug)]
pub(super) enum Fact<'a> {
    /// It is decided once more what ought to go on.
    Stepped,
    /// Nothing happens until this moment, if there is one.
    Waited { now: Duration, until: Option<Duration> },
    /// An event is stored, and the job has used so much.
    Stored { event: &'a Event, used: JobUsage, budget: &'a Budget },
    /// A model is asked for the next step.
    Asked { transcript: &'a Transcript, time: Duration, tools: bool, is_last: bool },
    /// Tools of its agent that it is offered, and those that it may know.
    Offered { tools: Vec<String>, known: Vec<String> },
    /// A model is asked for a summary.
    SummaryAsked { transcript: &'a Transcript, max_output: u64, limit: u64, time: Duration, is_wanted: bool },
    /// A summary of text with these identifiers is taken.
    Summarised { summary: &'a str, identifiers: Vec<&'a str> },
    /// A call is ordered.
    Ordered { call: CallId, may_run_beside: bool, time: Duration },
    /// A call's tool runs, wholly or in part.
    Ran { call: CallId, may_run_again: bool },
    /// A planned wait ends.
    WaitEnded { now: Duration, until: Duration },
    /// An extension is asked.
    Consulted { call: CallId, time: Duration },
    /// An extension is thought to be asked.
    ConsultationGoesOn { call: CallId },
    /// An event was refused.
    Refused { event: &'static str, before: &'a Session, after: &'a Session },
    /// After a crash the session was folded again from its events.
    Restored { before: &'a Session, after: &'a Session },
    /// The job has a result.
    Ended { phase: Phase, actions: usize, open_calls: usize, is_consulting: bool, transcript: &'a Transcript },
    /// A job was played without a crash and with some.
    PlayedTwice { calm: &'a JobResult, crashed: &'a JobResult },
}

impl Fact<'_> {
    /// What kinds there are.
    pub(super) const KINDS: [&'static str; 16] = [
        "asked",
        "consultation goes on",
        "consulted",
        "ended",
        "offered",
        "ordered",
        "played twice",
        "ran",
        "refused",
        "restored",
        "stepped",
        "stored",
        "summarised",
        "summary asked",
        "wait ended",
        "waited",
    ];

    /// Of which kind it is.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Stepped => "stepped",
            Self::Waited { .. } => "waited",
            Self::Stored { .. } => "stored",
            Self::Asked { .. } => "asked",
            Self::Offered { .. } => "offered",
            Self::SummaryAsked { .. } => "summary asked",
            Self::Summarised { .. } => "summarised",
            Self::Ordered { .. } => "ordered",
            Self::Ran { .. } => "ran",
            Self::WaitEnded { .. } => "wait ended",
            Self::Consulted { .. } => "consulted",
            Self::ConsultationGoesOn { .. } => "consultation goes on",
            Self::Refused { .. } => "refused",
            Self::Restored { .. } => "restored",
            Self::Ended { .. } => "ended",
            Self::PlayedTwice { .. } => "played twice",
        }
    }
}

/// The books on one job.
#[derive(Debug, Default)]
pub(super) struct Checker {
    /// The kinds of facts that it was told.
    pub(super) seen: BTreeSet<&'static str>,
    steps: u32,
    ordered: BTreeSet<CallId>,
    /// What goes on in this life of agentd, and whether it may run beside others.
    running: BTreeMap<CallId, bool>,
    /// The extension that is asked in this life of agentd.
    consulted: Option<CallId>,
    ran: BTreeSet<CallId>,
    answered: BTreeSet<CallId>,
    conclusions: u32,
    reopenings: u32,
}

fn ensure(holds: bool, rule: Rule, what: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken { rule, what: what() }) }
}

fn paired(transcript: &Transcript) -> Result<(), Broken> {
    transcript.check().map_err(|error| Broken { rule: Rule::Pairing, what: error.to_string() })
}

fn in_time(time: Duration, what: &str) -> Result<(), Broken> {
    ensure(!time.is_zero(), Rule::Deadline, || format!("{what} after the deadline"))
}

impl Checker {
    /// Takes a fact in.
    ///
    /// # Errors
    /// With the first rule that it breaks.
    pub(super) fn see(&mut self, fact: &Fact<'_>) -> Result<(), Broken> {
        self.seen.insert(fact.kind());
        match fact {
            Fact::Stepped => {
                self.steps += 1;
                ensure(self.steps <= MOST_STEPS, Rule::Ends, || format!("it goes on after {MOST_STEPS} steps"))
            }
            Fact::Waited { now, until } => ensure(until.is_some_and(|until| until > *now), Rule::Wakes, || {
                format!("nothing goes on at {now:?}, and nothing will: {until:?}")
            }),
            Fact::Stored { event, used, budget } => {
                self.stored(event)?;
                let tokens = used.input_tokens + used.output_tokens;
                let within = used.turns <= budget.max_turns
                    && used.tool_calls <= budget.max_tool_calls
                    && budget.max_total_tokens.is_none_or(|most| tokens <= most);
                ensure(within, Rule::Budget, || format!("{used:?} of {budget:?}"))
            }
            Fact::Asked { transcript, time, tools, is_last } => {
                paired(transcript)?;
                in_time(*time, "a model is asked")?;
                ensure(*tools != *is_last, Rule::Offered, || format!("tools: {tools}, in the last turn: {is_last}"))
            }
            Fact::Offered { tools, known } => {
                let unknown: Vec<&String> = tools.iter().filter(|tool| !known.contains(tool)).collect();
                ensure(unknown.is_empty(), Rule::Found, || format!("{unknown:?} were not found"))
            }
            Fact::SummaryAsked { transcript, max_output, limit, time, is_wanted } => {
                ensure(*is_wanted, Rule::SummaryWanted, || "nobody wants a summary now".to_owned())?;
                in_time(*time, "a summary is asked for")?;
                paired(transcript)?;
                let tokens = transcript.estimated_tokens() + max_output;
                ensure(tokens <= *limit, Rule::SummaryFits, || {
                    format!("{tokens} tokens, and there is room for {limit}")
                })
            }
            Fact::Summarised { summary, identifiers } => {
                let lost: Vec<&&str> = identifiers.iter().filter(|one| !summary.contains(**one)).collect();
                ensure(lost.is_empty(), Rule::Identifiers, || format!("{lost:?} are lost in `{summary}`"))
            }
            Fact::Ordered { call, may_run_beside, time } => {
                in_time(*time, "a call is ordered")?;
                ensure(self.consulted.is_none(), Rule::Consultation, || format!("{call} runs beside an extension"))?;
                self.ordered.insert(*call);
                self.running.insert(*call, *may_run_beside);
                let alone = self.running.len() == 1 || self.running.values().all(|beside| *beside);
                ensure(alone, Rule::Alone, || format!("{:?} run together", self.running))
            }
            Fact::Ran { call, may_run_again } => {
                let is_first = self.ran.insert(*call);
                ensure(is_first || *may_run_again, Rule::Once, || format!("{call} was run again"))
            }
            Fact::WaitEnded { now, until } => {
                ensure(now >= until, Rule::WaitsOut, || format!("it ended at {now:?} instead of {until:?}"))
            }
            Fact::Consulted { call, time } => {
                in_time(*time, "an extension is asked")?;
                let alone = self.running.is_empty() && self.consulted.is_none();
                ensure(alone, Rule::Consultation, || format!("{call} is asked beside {:?}", self.running))?;
                self.consulted = Some(*call);
                Ok(())
            }
            Fact::ConsultationGoesOn { call } => {
                let goes_on = self.consulted == Some(*call);
                ensure(goes_on, Rule::Consultation, || {
                    format!("{call} is thought to be asked, not {:?}", self.consulted)
                })
            }
            Fact::Refused { event, before, after } => {
                ensure(before == after, Rule::Refusal, || format!("a refused {event} changed the session"))
            }
            Fact::Restored { before, after } => {
                (self.running, self.consulted) = (BTreeMap::new(), None);
                ensure(before == after, Rule::Events, || "the events make another session".to_owned())
            }
            Fact::Ended { phase, actions, open_calls, is_consulting, transcript } => {
                let concluded = self.conclusions == self.reopenings + 1;
                ensure(concluded, Rule::OneConclusion, || format!("{} conclusions", self.conclusions))?;
                let rests = *phase == Phase::Idle && *actions == 0 && *open_calls == 0 && !is_consulting;
                ensure(rests, Rule::Rest, || format!("{fact:?}"))?;
                let gone = self.running.is_empty() && self.consulted.is_none();
                ensure(gone, Rule::Rest, || format!("{:?} and {:?} run on", self.running, self.consulted))?;
                let unanswered: Vec<&CallId> = self.ordered.difference(&self.answered).collect();
                ensure(unanswered.is_empty(), Rule::Result, || format!("{unanswered:?} have no result"))?;
                paired(transcript)
            }
            Fact::PlayedTwice { calm, crashed } => {
                let same =
                    calm.verdict == crashed.verdict && calm.usage == crashed.usage && calm.receipts == crashed.receipts;
                ensure(same, Rule::CrashesChangeNothing, || format!("{calm:?} became {crashed:?}"))
            }
        }
    }

    fn stored(&mut self, event: &Event) -> Result<(), Broken> {
        for call in answered_by(event) {
            self.running.remove(&call);
            ensure(self.answered.insert(call), Rule::OneResult, || format!("{call} has another result"))?;
        }
        match event {
            Event::ExtensionEnded { call, .. } => drop(self.consulted.take_if(|asked| asked == call)),
            Event::Reopened { .. } => self.reopenings += 1,
            Event::GoalConcluded { .. } => {
                self.conclusions += 1;
                let is_one = self.conclusions == self.reopenings + 1;
                ensure(is_one, Rule::OneConclusion, || format!("{} conclusions", self.conclusions))?;
            }
            _ => {}
        }
        Ok(())
    }
}

/// The calls to which an event gives a result.
fn answered_by(event: &Event) -> Vec<CallId> {
    match event {
        Event::ToolCompleted { call, .. } | Event::ToolFailed { call, .. } => vec![*call],
        Event::Interrupted { results, .. } => results.iter().map(|(call, _)| *call).collect(),
        Event::PlanRefused { plan, .. } => plan.calls.iter().map(|call| call.call).collect(),
        _ => Vec::new(),
    }
}
