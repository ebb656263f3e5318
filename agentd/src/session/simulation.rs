//! Whole jobs from a seed: a random model, random tools, people who cancel, talk and decide, and crashes between any two steps,
//! under a virtual clock and without I/O. `AGENTD_SIMULATION_SEEDS` says how many; a seed that fails is printed, and
//! `AGENTD_SIMULATION_SEED` plays it alone.

mod invariants;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::LazyLock;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use regex::Regex;
use serde_json::{Value, json};
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::extension::{Opinion, Point, Stop};
use toolproto::ids::{CallId, JobId};
use toolproto::job::JobResult;
use toolproto::receipt::Usage;

use self::invariants::{Broken, Checker, Fact};
use super::decide::{Action, decide};
use super::event::{self, CallRecord, EVENT_VERSION, Event, Interruption, ReceiptRef, Refusal};
use super::extension::{self, Consulted};
use super::judge::{Judged, judge};
use super::{BatchCall, Progress, Session, summary, tool_search, wait};
use crate::agent::Agent;
use crate::model::transcript::{Message, Transcript};
use crate::model::{Finish, ModelError, Reply, ReplyCall, TokenUsage};
use crate::scripted;
use crate::tools::Tools;

/// SplitMix64: small, and the same for ever.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// What may happen to a job besides its own doing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Anything.
    Hostile,
    /// Crashes alone.
    Crashes,
    /// Nothing.
    Kind,
}

/// An event as the ledger keeps it.
struct Stored {
    text: String,
    at: Duration,
    /// What the text says, once it was read: it says the same each time.
    read: Option<Event>,
}

struct World {
    seed: u64,
    random: Random,
    fate: Fate,
    agent: Agent,
    tools: Tools,
    /// The model asks for the same call again and again.
    stuck: bool,
    session: Session,
    log: Vec<Stored>,
    now: Duration,
    /// Only in this life of agentd.
    asking: Option<u64>,
    summarising: Option<summary::Wanted>,
    running: HashMap<CallId, bool>,
    calls: u64,
    /// The calls whose start the launcher noted.
    noted: BTreeSet<CallId>,
    checker: Checker,
    reopenings: u32,
    summaries: u32,
    /// By how many seconds the host's clock was set.
    set_by: i64,
    /// The waits that ended, and whether they did well.
    waits: Vec<bool>,
    /// How many calls that could not be repeated a crash left, by whether they had started.
    left: BTreeMap<bool, u32>,
}

/// The identifiers that must survive: in the arguments of calls.
static IDENTIFIERS: LazyLock<Regex> = LazyLock::new(|| Regex::new("\"n\":[0-9]+").unwrap());

fn job() -> JobId {
    JobId::from_u128(1)
}

impl World {
    fn new(seed: u64, fate: Fate) -> Self {
        let mut random = Random(seed);
        // Schemas are dear to compile, and the same in every world.
        static SCHEMAS: LazyLock<(Agent, Tools)> =
            LazyLock::new(|| (scripted::agent(), scripted::tools().with_extensions(scripted::extensions())));
        let (mut agent, tools) = SCHEMAS.clone();
        agent.budget.max_turns = 1 + random.below(8) as u32;
        let stuck = fate == Fate::Hostile && random.one_in(10);
        agent.budget.max_tool_calls = 1 + random.below(12) as u32;
        agent.max_parallel = 1 + random.below(4) as usize;
        agent.grace_call = random.one_in(2);
        agent.max_repairs = random.below(3) as u32;
        agent.completion.mutation = random.one_in(4);
        if random.one_in(3) {
            agent.budget.max_total_tokens = Some(200 + random.below(8000));
        }
        if random.one_in(3) {
            agent.context.limit = 600 + random.below(2000);
            agent.context.summary = random.one_in(2);
        }
        agent.context.entities = vec![IDENTIFIERS.clone()];
        if random.one_in(4) {
            // Long enough for a summary to be worth it.
            (agent.budget.max_turns, agent.budget.max_tool_calls) = (20, 50);
            agent.context.limit = 1200 + random.below(1000);
            agent.context.summary = true;
        }
        if random.one_in(3) {
            agent.tool_search = Some(tool_search::Rules { always: Vec::new(), results: 1 });
        }
        agent.wait = random.one_in(3).then(|| Duration::from_secs(20 + random.below(60)));
        if random.one_in(4) {
            agent.budget.max_cpu = Some(Duration::from_millis(1 + random.below(40)));
        }
        if stuck {
            // Nothing else ends it first.
            (agent.budget.max_turns, agent.budget.max_tool_calls, agent.max_repairs) = (12, 12, 3);
            (agent.budget.max_total_tokens, agent.budget.max_cpu) = (None, None);
        }
        if random.one_in(3) {
            agent.extensions.push("guard".to_owned());
        }
        match fate {
            Fate::Hostile => {
                if random.one_in(6) {
                    agent.extensions.push("strict".to_owned());
                }
                agent.budget.wall = Duration::from_secs(1 + random.below(600));
                agent.ask_user = random.one_in(3).then(|| Duration::from_secs(1 + random.below(60)));
                if random.one_in(3) {
                    agent.approval.tools = vec!["write".to_owned()];
                }
            }
            // What depends on time or cannot be repeated would differ.
            Fate::Crashes | Fate::Kind => {
                agent.budget.wall = Duration::from_secs(1_000_000);
                agent.tools = vec!["read".to_owned()];
                agent.completion.mutation = false;
            }
        }
        Self {
            seed,
            random,
            fate,
            agent,
            tools,
            stuck,
            session: Session::new(),
            log: Vec::new(),
            now: Duration::ZERO,
            asking: None,
            summarising: None,
            running: HashMap::new(),
            calls: 0,
            noted: BTreeSet::new(),
            checker: Checker::default(),
            reopenings: 0,
            summaries: 0,
            set_by: 0,
            waits: Vec::new(),
            left: BTreeMap::new(),
        }
    }

    /// Stores an event as the ledger does, as text, and lets it happen.
    fn append(&mut self, event: Event) {
        self.session.apply(&event, self.now).unwrap();
        self.log.push(Stored { text: serde_json::to_string(&event).unwrap(), at: self.now, read: None });
        let (used, budget) = (self.session.usage(self.now), &self.agent.budget);
        holds(self.checker.see(&Fact::Stored { event: &event, used, budget }));
    }

    fn see(&mut self, fact: &Fact<'_>) {
        holds(self.checker.see(fact));
    }

    fn run(&mut self) -> JobResult {
        let goal = Event::NewGoal {
            goal: json!({"task": "t"}),
            agent: self.agent.digest,
            budget: self.agent.budget.clone(),
            workspace: None,
            conversation: Vec::new(),
        };
        self.append(goal);
        loop {
            self.see(&Fact::Stepped);
            if let Some(result) = self.session.result().cloned() {
                self.check_end();
                if !self.reopen() {
                    return result;
                }
            }
            if self.fate != Fate::Kind && self.random.one_in(8) {
                self.crash();
            }
            self.intrude();
            let actions = decide(&self.session, &self.agent, &self.tools, job(), self.now);
            if !actions.iter().any(|action| matches!(action, Action::Ask { .. })) {
                self.asking = None;
            }
            if !actions.iter().any(|action| matches!(action, Action::Summarise(_))) {
                self.summarising = None;
            }
            let mut acted = false;
            for action in actions {
                acted |= self.perform(action);
            }
            if !acted {
                self.wait();
            }
        }
    }

    /// Somebody goes on with the ended job, if they may, want to, and have not done so too often.
    fn reopen(&mut self) -> bool {
        let event = Event::Reopened { budget: self.agent.budget.clone() };
        let wanted = self.fate == Fate::Hostile && self.reopenings < 3 && self.random.one_in(2);
        let allowed = self.session.admits(&event).is_ok();
        let affordable = self.session.affords_a_turn(&self.agent, &self.agent.budget).is_ok();
        if !(wanted && allowed && affordable) {
            return false;
        }
        self.reopenings += 1;
        self.append(event);
        true
    }

    fn perform(&mut self, action: Action) -> bool {
        match action {
            Action::Append(event) => self.append(*event),
            Action::Ask { tools, max_output, time, .. } => {
                let (transcript, is_last) = (self.transcript(), self.session.is_grace());
                self.see(&Fact::Asked { transcript: &transcript, time, tools, is_last });
                if let Some(rules) = &self.agent.tool_search {
                    let offered = tool_search::offered(&self.session, &self.agent, &self.tools);
                    let names = offered.into_iter().map(|tool| tool.name);
                    let tools = names.filter(|name| self.agent.tools.contains(name)).collect();
                    let known = rules.always.iter().chain(&self.session.found).cloned().collect();
                    self.see(&Fact::Offered { tools, known });
                }
                self.asking = Some(max_output.unwrap_or(u64::MAX));
                return false;
            }
            Action::Summarise(wanted) => {
                self.see(&Fact::SummaryAsked {
                    transcript: &summary::transcript(&self.session, &self.agent, wanted.units),
                    max_output: wanted.max_output,
                    limit: self.agent.context.limit,
                    time: wanted.time,
                    is_wanted: self.agent.context.summary && !self.session.is_grace(),
                });
                self.summarising = Some(wanted);
                return false;
            }
            Action::Run { call, time } => {
                if self.running.contains_key(&call) {
                    return false;
                }
                let planned = self.session.call(call).unwrap().planned.clone();
                if let Some(refusal) = &planned.refusal {
                    let record = self.record(Some(refusal.code), &planned.tool);
                    self.append(Event::ToolFailed { call, record });
                    return true;
                }
                self.append(Event::CallStarted { call });
                self.see(&Fact::Ordered { call, may_run_beside: planned.concurrent, time });
                self.running.insert(call, false);
            }
            Action::BeginWait { call, delay } => {
                let until = self.now + delay;
                let due = self.wall() + delay;
                self.append(Event::WaitBegun { call, until_ms: u64::try_from(until.as_millis()).unwrap(), due });
            }
            Action::EndWait { call, waiting } => {
                self.see(&Fact::WaitEnded { now: self.now, until: waiting.until });
                let event = wait::ended(call, waiting, self.now, self.wall());
                self.waits.push(matches!(event, Event::ToolCompleted { .. }));
                self.append(event);
            }
            Action::Consult { extension, point, time } => {
                if let Some(call) = self.session.consulted().map(|asked| asked.call) {
                    self.see(&Fact::ConsultationGoesOn { call });
                    return false;
                }
                let call = self.new_call();
                self.see(&Fact::Consulted { call, time });
                self.append(Event::ExtensionStarted { call, extension, point });
                self.running.insert(call, false);
            }
            Action::Stop { call } => {
                if let Some(stopped) = self.running.get_mut(&call) {
                    *stopped = true;
                }
                return false;
            }
            Action::Refuse { call, refusal } => {
                let tool = self.session.call(call).unwrap().planned.tool.clone();
                let record = self.record(Some(refusal.code), &tool);
                self.append(Event::ToolFailed { call, record });
            }
            Action::Interrupt { cause, calls } => {
                let results = calls.into_iter().map(|call| (call, self.record(Some(Code::Cancelled), ""))).collect();
                self.append(Event::Interrupted { cause, results });
            }
        }
        true
    }

    /// Something that goes on ends, or time passes.
    fn wait(&mut self) {
        let decided = self.now;
        if self.fate == Fate::Hostile {
            self.now += Duration::from_millis(self.random.below(20_000));
        }
        let mut running: Vec<CallId> = self.running.keys().copied().collect();
        running.sort();
        if let Some(max_output) = self.asking.filter(|_| !(self.fate == Fate::Hostile && self.random.one_in(4))) {
            self.asking = None;
            self.answer(max_output);
        } else if let Some(wanted) = self.summarising.take_if(|_| self.fate != Fate::Hostile || !self.random.one_in(4))
        {
            self.sum_up(wanted);
        } else if let Some(call) = running.first().copied() {
            let stopped = self.running.remove(&call).unwrap();
            if let Some(asked) = self.session.consulted().cloned() {
                return self.heard(&asked, stopped);
            }
            self.run_tool(call);
            let planned = self.session.call(call).unwrap().planned.clone();
            let code = match () {
                () if stopped => Some(Code::Cancelled),
                () if planned.tool == "hang" => Some(Code::ToolTimeout),
                () if noise(&planned.arguments.to_value(), 5) => Some(Code::ToolFailed),
                () => None,
            };
            let record = self.record(code, &planned.tool);
            self.append(match code {
                None => Event::ToolCompleted { call, record },
                Some(_) => Event::ToolFailed { call, record },
            });
        } else if self.asking.is_none() && self.summarising.is_none() {
            // Only a person or the clock can go on.
            let until = self.session.next_deadline(decided);
            self.see(&Fact::Waited { now: decided, until });
            self.now = self.now.max(until.unwrap_or_default());
        }
    }

    /// What an extension says follows from where the job stands, so that it says the same again after a crash.
    fn heard(&mut self, asked: &Consulted, stopped: bool) {
        let messages = self.session.messages().to_vec();
        let digest = Transcript { system: asked.extension.clone(), messages }.digest().unwrap();
        let mut says = Random(u64::from_be_bytes(digest.as_bytes()[..8].try_into().unwrap()) ^ self.seed);
        let no = |code| Err(Refusal { code, message: "no".to_owned() });
        let said = match says.below(16) {
            _ if stopped => no(Code::Cancelled),
            0 => no(Code::ToolTimeout),
            1 if self.fate == Fate::Hostile => {
                Ok(Opinion { failure: Some(Stop { message: "enough".to_owned() }), ..Opinion::default() })
            }
            2 => Ok(Opinion { disable_tools: vec!["read".to_owned()], ..Opinion::default() }),
            3..6 if asked.point == Point::BeforeFinalAnswer => {
                let answer = json!({"done": "said by an extension"}).as_object().cloned();
                Ok(Opinion { replacement_content: answer, ..Opinion::default() })
            }
            3..8 => Ok(Opinion {
                feedback: Some("look again".to_owned()),
                continue_loop: asked.point == Point::BeforeFinalAnswer,
                ..Opinion::default()
            }),
            _ => Ok(Opinion::default()),
        };
        let extension = self.tools.extension(&asked.extension).unwrap().clone();
        let record = self.record(None, &asked.extension);
        self.append(extension::ended(&extension, asked.call, said, record.receipt, record.usage));
    }

    fn new_call(&mut self) -> CallId {
        self.calls += 1;
        call_id(self.seed, self.calls)
    }

    /// What a model says follows from the conversation, so that it says the same again after a crash.
    fn answer(&mut self, max_output: u64) {
        let digest = self.transcript().digest().unwrap();
        let mut says = Random(u64::from_be_bytes(digest.as_bytes()[..8].try_into().unwrap()) ^ self.seed);
        let usage = says.one_in(2).then(|| TokenUsage {
            input_tokens: self.session.next_input_tokens(&self.agent.system_prompt),
            cached_tokens: 0,
            output_tokens: says.below(300).min(max_output),
        });
        let mut reply = Reply { usage, ..Reply::default() };
        match says.below(12) {
            _ if self.stuck => {
                let arguments = json!({"n": 1}).to_string();
                reply.calls = vec![ReplyCall { id: None, tool: "read".to_owned(), arguments }];
            }
            0 => reply.only_thought = says.one_in(2),
            1 => reply.text = "not JSON".to_owned(),
            2 => reply.text = json!({"done": says.below(3)}).to_string(),
            3 => {
                let code = says.pick(&[Code::ModelUnavailable, Code::ContextOverflow]);
                self.append(Event::PlanFailed { code, message: "no".to_owned(), details: Value::Null });
                return;
            }
            _ => {
                let count = 1 + says.below(4);
                reply.calls = (0..count).map(|_| call(&mut says)).collect();
                if says.one_in(10) {
                    reply.finish = Finish::Length;
                }
            }
        }
        if reply.usage.is_none() && self.agent.budget.max_total_tokens.is_some() {
            // An estimate of the answer is bounded by the answer; this one is short.
            reply.text.truncate(max_output.saturating_mul(3) as usize);
            if reply.calls.iter().map(|call| call.tool.len() + call.arguments.len()).sum::<usize>() as u64 > max_output
            {
                reply.calls.clear();
            }
        }
        let (seed, mut count) = (self.seed, self.calls);
        let ids = || {
            count += 1;
            call_id(seed, count)
        };
        let judged = judge(&self.session, &self.agent, &self.tools, reply, None, ids);
        self.calls = count;
        match judged {
            Judged::Event(event) => self.append(event),
            Judged::Refused { plan, refusal } => {
                let results = plan.calls.iter().map(|_| self.record(Some(refusal.code), "")).collect();
                self.append(Event::PlanRefused { plan, refusal, results });
            }
        }
    }

    /// A summary follows from what is summed up; some are right, and some are of no use.
    fn sum_up(&mut self, wanted: summary::Wanted) {
        let transcript = summary::transcript(&self.session, &self.agent, wanted.units);
        let digest = transcript.digest().unwrap();
        let mut says = Random(u64::from_be_bytes(digest.as_bytes()[..8].try_into().unwrap()) ^ self.seed);
        let Message::User(asked) = &transcript.messages[0] else { panic!("a summary is asked for otherwise") };
        let known: BTreeSet<&str> = IDENTIFIERS.find_iter(asked).map(|found| found.as_str()).collect();
        let known: Vec<&str> = known.into_iter().collect();
        let answer = match says.below(8) {
            0 => Err(ModelError::passing("no")),
            1 => Ok(Reply::default()),
            2 => Ok(Reply { text: "All was well.".to_owned(), ..Reply::default() }),
            3 => Ok(Reply { text: asked.repeat(3), ..Reply::default() }),
            4 => Ok(Reply { calls: vec![call(&mut says)], ..Reply::default() }),
            5 => Ok(Reply {
                text: known.join(" "),
                finish: says.pick(&[Finish::Length, Finish::Refused]),
                ..Reply::default()
            }),
            _ => Ok(Reply { text: format!("There were {}.", known.join(", ")), ..Reply::default() }),
        };
        let usage = TokenUsage {
            input_tokens: transcript.estimated_tokens(),
            cached_tokens: 0,
            output_tokens: says.below(wanted.max_output + 1),
        };
        let answer = answer.map(|reply| Reply { usage: Some(usage), ..reply });
        let event = summary::judge(&self.session, &self.agent, wanted.units, answer, |_| None);
        if let Event::ContextSummarised { summary, .. } = &event {
            self.see(&Fact::Summarised { summary, identifiers: known });
        }
        self.summaries += 1;
        self.append(event);
    }

    /// What the host's clock shows.
    fn wall(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH + self.now + SignedDuration::from_secs(self.set_by)
    }

    /// People and the clock, at any moment; and events that belong elsewhere, which must change nothing.
    fn intrude(&mut self) {
        if self.fate != Fate::Hostile {
            return;
        }
        if self.random.one_in(6) {
            self.set_by += self.random.below(200) as i64 - 100;
        }
        let stray = match self.random.below(60) {
            0 => Event::CancelRequested {},
            1 | 2 => Event::MessageReceived { text: "hurry".to_owned() },
            3..=9 => {
                let asked = self.session.asked().next().map(|(one, _)| (one.planned.call, one.planned.question));
                let Some((call, question)) = asked else { return };
                // A question is not approved: it is answered, by what somebody says, or refused.
                Event::ApprovalDecided { call, approved: !question && self.random.one_in(2), reason: None }
            }
            10 => Event::ObservationValidated { feedback: None, blocked: Vec::new(), no_progress: 0 },
            11 => Event::TurnBegun { turn: 3 },
            12 => Event::Interrupted { cause: Interruption::Cancelled, results: Vec::new() },
            13 => Event::CallStarted { call: CallId::from_u128(7) },
            14 => {
                Event::ContextCompacted { superseded: Vec::new(), evicted: 9, remembered: Vec::new(), effective: true }
            }
            16 => Event::ContextSummarised {
                evicted: 9,
                summary: String::new(),
                remembered: Vec::new(),
                effective: true,
                model: String::new(),
                spent: event::Spent::default(),
            },
            17 => Event::ExtensionStarted {
                call: CallId::from_u128(8),
                extension: "nobody".to_owned(),
                point: Point::AfterRun,
            },
            15 => Event::PlanFailed { code: Code::ModelUnavailable, message: String::new(), details: Value::Null },
            _ => return,
        };
        let person =
            matches!(stray, Event::CancelRequested {} | Event::MessageReceived { .. } | Event::ApprovalDecided { .. });
        if person {
            self.append(stray);
        } else {
            let mut copy = self.session.clone();
            if copy.apply(&stray, self.now).is_err() {
                holds(self.checker.see(&Fact::Refused { event: stray.name(), before: &self.session, after: &copy }));
            }
        }
    }

    /// The tool of a call runs, wholly or in part.
    fn run_tool(&mut self, call: CallId) {
        self.noted.insert(call);
        let may_run_again = self.session.call(call).is_none_or(|one| one.planned.repeatable);
        self.see(&Fact::Ran { call, may_run_again });
    }

    /// agentd ends and another one goes on from the ledger. Of the calls that had been ordered some had started, which the launcher
    /// noted, and some had not.
    fn crash(&mut self) {
        let mut session = Session::new();
        for Stored { text, at, read } in &mut self.log {
            let event = read.get_or_insert_with(|| event::read(EVENT_VERSION, text).unwrap());
            session.apply(event, *at).unwrap();
        }
        holds(self.checker.see(&Fact::Restored { before: &self.session, after: &session }));
        self.session = session;
        (self.asking, self.summarising) = (None, None);
        let mut ordered: Vec<CallId> = self.running.drain().map(|(call, _)| call).collect();
        ordered.sort();
        for call in ordered {
            if self.random.one_in(2) {
                self.run_tool(call);
            }
        }
        let mut never_started = self.session.without_end();
        for one in self.session.batch().iter().filter(|one| never_started.contains(&one.planned.call)) {
            if !one.planned.repeatable {
                *self.left.entry(self.noted.contains(&one.planned.call)).or_default() += 1;
            }
        }
        never_started.retain(|call| !self.noted.contains(call));
        self.append(Event::Resumed { never_started });
    }

    fn record(&mut self, code: Option<Code>, tool: &str) -> CallRecord {
        let sequence = self.session.receipts().count + 1;
        let content = match code {
            None => json!({"ok": true, "result": {"tool": tool, "text": "x".repeat(200)}}),
            Some(code) => json!({"ok": false, "error": {"code": code, "message": "no"}}),
        };
        CallRecord {
            code,
            content,
            receipt: Some(ReceiptRef { sequence, digest: Digest::sha256(&sequence.to_be_bytes()) }),
            usage: Some(Usage { cpu_usec: 3000, ..Usage::default() }),
            workspace_after: Some(Digest::sha256(tool.as_bytes())),
            written: if tool == "write" && code.is_none() { vec!["file".to_owned()] } else { Vec::new() },
            deleted: Vec::new(),
            unproven: false,
        }
    }

    fn transcript(&self) -> Transcript {
        Transcript { system: self.agent.system_prompt.clone(), messages: self.session.messages().to_vec() }
    }

    fn check_end(&mut self) {
        let is_open = |one: &&BatchCall| !matches!(one.progress, Progress::Done(_));
        let (transcript, open_calls) = (self.transcript(), self.session.batch().iter().filter(is_open).count());
        self.see(&Fact::Ended {
            phase: self.session.phase(),
            actions: decide(&self.session, &self.agent, &self.tools, job(), self.now).len(),
            open_calls,
            is_consulting: self.session.consulted().is_some(),
            transcript: &transcript,
        });
    }
}

/// Ends a world in which a rule does not hold.
#[track_caller]
fn holds(seen: Result<(), Broken>) {
    seen.unwrap_or_else(|broken| panic!("{broken}"));
}

fn call_id(seed: u64, number: u64) -> CallId {
    CallId::from_u128(u128::from(seed) << 64 | u128::from(number))
}

fn call(says: &mut Random) -> ReplyCall {
    let tool = says.pick(&["read", "read", "read", "write", "hang", "raed", "ask_user", "tool_search", "wait"]);
    let arguments = match says.below(8) {
        1..5 if tool == "tool_search" => json!({"query": says.pick(&["read", "write", "does", "moon"])}).to_string(),
        n @ 1..6 if tool == "wait" => json!({"delay_seconds": n * 10}).to_string(),
        1 | 2 if tool == "ask_user" => json!({"question": "which?"}).to_string(),
        0 => "{\"n\":".to_owned(),
        _ => json!({"n": says.below(12)}).to_string(),
    };
    let id = says.pick(&[None, Some("same"), Some("")]).map(str::to_owned);
    ReplyCall { id, tool: tool.to_owned(), arguments }
}

/// One in `n` values, always the same ones.
fn noise(value: &Value, n: u8) -> bool {
    Digest::sha256(value.to_string().as_bytes()).as_bytes()[0].is_multiple_of(n)
}

/// How many seeds are played where the environment says nothing: enough to find what is plainly wrong.
const SEEDS: u64 = 500;

fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    match number("AGENTD_SIMULATION_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("AGENTD_SIMULATION_SEEDS").unwrap_or(SEEDS),
    }
}

/// Names the seed of a world that breaks a rule.
fn named<T>(seed: u64, play: impl FnOnce() -> T) -> T {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(play)) {
        Ok(value) => value,
        Err(broken) => {
            eprintln!("seed {seed} breaks a rule; play it alone with AGENTD_SIMULATION_SEED={seed}");
            std::panic::resume_unwind(broken)
        }
    }
}

/// What comes of the world of each seed, played on all processors.
fn play_all<T: Send>(play: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let play = &play;
        let part =
            |first| move || seeds().skip(first).step_by(threads).map(|seed| named(seed, || play(seed))).collect();
        let parts: Vec<_> = (0..threads).map(|first| scope.spawn(part(first))).collect();
        let played =
            parts.into_iter().map(|part| part.join().unwrap_or_else(|broken| std::panic::resume_unwind(broken)));
        played.collect::<Vec<Vec<T>>>().into_iter().flatten().collect()
    })
}

#[test]
fn every_job_ends_once_within_its_budgets_whatever_happens() {
    let mut codes: HashMap<String, u32> = HashMap::new();
    let (mut summaries, mut waits) = (0, Vec::new());
    let played = play_all(|seed| {
        let mut world = World::new(seed, Fate::Hostile);
        (world.run(), world.summaries, world.waits, world.left, world.checker.seen)
    });
    let (mut left, mut kinds) = (BTreeSet::new(), BTreeSet::from(["played twice"]));
    for (result, summarised, waited, left_by_crashes, seen) in played {
        kinds.extend(seen);
        summaries += summarised;
        waits.extend(waited);
        left.extend(left_by_crashes.into_keys());
        let end = match result.verdict {
            toolproto::job::Verdict::Success { .. } => "success".to_owned(),
            toolproto::job::Verdict::Failed { error_code, .. } => error_code.to_string(),
        };
        *codes.entry(end).or_default() += 1;
    }
    if seeds().end - seeds().start >= SEEDS {
        // A simulation that never gets anywhere would find nothing.
        assert!(summaries > 0, "no summary was asked for");
        assert_eq!(kinds, BTreeSet::from(Fact::KINDS), "a rule is never put to the test");
        assert!(left == BTreeSet::from([false, true]), "no crash before a start, or none after one: {left:?}");
        assert!(waits.contains(&true) && waits.contains(&false), "no wait, or none over which the clock was set");
        for end in [
            "success",
            "CANCELLED",
            "DEADLINE_EXCEEDED",
            "TURN_BUDGET_EXHAUSTED",
            "TOKEN_BUDGET_EXHAUSTED",
            "CPU_BUDGET_EXHAUSTED",
            "MODEL_UNAVAILABLE",
            "RESULT_INVALID",
            "NO_PROGRESS",
            "CONTEXT_OVERFLOW",
            "EXTENSION_REFUSED",
            "EXTENSION_FAILED",
        ] {
            assert!(codes.contains_key(end), "no job ended with {end}: {codes:?}");
        }
    }
}

#[test]
fn crashes_change_no_result_where_tools_are_deterministic() {
    play_all(|seed| {
        let calm = World::new(seed, Fate::Kind).run();
        let crashed = World::new(seed, Fate::Crashes).run();
        holds(Checker::default().see(&Fact::PlayedTwice { calm: &calm, crashed: &crashed }));
    });
}
