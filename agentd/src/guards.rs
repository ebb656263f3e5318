//! What stands between a call and its tool: whether its runtime works, a place among those that run, the breakers of tool and
//! runtime, the next attempt after a failure, and the tool that is tried instead.
//!
//! ```text
//!      ┌────────────────────────── wait, again ◀───────────────────────────┐
//!      ▼                                                                   │ may pass, attempts and budget left
//!   runtime ──▶ place ──▶ breakers ──▶ run ──▶ breakers learn ──▶ failed? ─┤
//!      │broken    │full      │open                  │no                    │ else, when the tool names one
//!      │          ▼          │                      ▼                      ▼
//!      │      OVERLOADED     ├─ BREAKER_OPEN      answer               fallback ──▶ answer
//!      ├─ TOOL_UNAVAILABLE   │                                             ▲
//!      └─────────────────────┴─────────────────────────────────────────────┘
//! ```
//!
//! Each attempt is a call of its own for the launcher and gets its own receipt.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use toolproto::api::BreakerView;
use toolproto::code::Code;
use toolproto::ids::CallId;
use toolproto::manifest::{Effects, ToolManifest};

use crate::breaker::{Breaker, Observation, Permit, Refused, Settings, State, Transition};
use crate::call::{self, Asked, Ran};
use crate::launch::{Launch, LinkError};
use crate::observe::{Observation as Observed, Observer};
use crate::retry::{self, Budget, Rules};
use crate::runtimes::Probe;
use crate::tools::{Tool, Tools};

/// The most calls of one tool at the same time.
const PLACES_PER_TOOL: usize = 16;
/// The most calls on one runtime at the same time.
const PLACES_PER_RUNTIME: usize = 64;
/// How long a call waits for a place. Calls of an exclusive tool wait as long as they have time.
const QUEUE: Duration = Duration::from_secs(5);

/// All tools' and runtimes' guards.
#[derive(Debug)]
pub struct Guards {
    tools: HashMap<String, Arc<Guard>>,
    runtimes: HashMap<String, Arc<Guard>>,
    /// Of the runtimes that can be tried.
    probes: HashMap<String, Arc<Probe>>,
    observer: Observer,
}

/// How the breaker of a runtime is named beside those of tools.
const RUNTIME: &str = "runtime:";

#[derive(Debug)]
struct Guard {
    breaker: Mutex<Breaker>,
    budget: Mutex<Budget>,
    places: Semaphore,
    /// How many places there are.
    size: usize,
    queue: Option<Duration>,
}

impl Guard {
    const fn new(settings: Settings, size: usize, queue: Option<Duration>) -> Self {
        Self {
            breaker: Mutex::new(Breaker::new(settings)),
            budget: Mutex::new(Budget::full()),
            places: Semaphore::const_new(size),
            size,
            queue,
        }
    }

    fn of(manifest: &ToolManifest) -> Self {
        match manifest.execution.exclusive {
            true => Self::new(manifest.breaker, 1, None),
            false => Self::new(manifest.breaker, PLACES_PER_TOOL, Some(QUEUE)),
        }
    }

    fn of_runtime() -> Self {
        Self::new(Settings::default(), PLACES_PER_RUNTIME, Some(QUEUE))
    }

    fn view(&self) -> BreakerView {
        let breaker = locked(&self.breaker);
        let (failures, slow, calls) = breaker.remembered();
        let state = breaker.state(Instant::now().into_std()).as_str().to_owned();
        BreakerView { state, failures, slow, calls }
    }
}

/// A call's attempts, in order. There is at least one.
#[derive(Debug)]
pub struct Attempts {
    /// Those that failed and were followed by another.
    pub earlier: Vec<Ran>,
    /// The one that answers the call.
    pub last: Ran,
}

impl From<Ran> for Attempts {
    fn from(last: Ran) -> Self {
        Self { earlier: Vec::new(), last }
    }
}

impl Guards {
    /// Closed breakers and free places for these tools. The observer is told when a breaker changes.
    #[must_use]
    pub fn new(tools: &Tools, observer: Observer) -> Self {
        Self { tools: HashMap::new(), runtimes: HashMap::new(), probes: HashMap::new(), observer }.renewed(tools)
    }

    /// The guards of these tools after a reload: what was seen of a tool stays, and so do the places that running calls hold.
    #[must_use]
    pub fn renewed(&self, tools: &Tools) -> Self {
        let guard = |manifest: &ToolManifest| {
            let fresh = Guard::of(manifest);
            match self.tools.get(&manifest.name).filter(|known| known.size == fresh.size) {
                Some(known) => {
                    locked(&known.breaker).configure(manifest.breaker);
                    Arc::clone(known)
                }
                None => Arc::new(fresh),
            }
        };
        let runtime = |name: &str| self.runtimes.get(name).cloned().unwrap_or_else(|| Arc::new(Guard::of_runtime()));
        let probe = |name: &str| {
            let runtime = tools.runtime(name)?;
            let known = self.probes.get(name).filter(|known| known.runtime() == runtime);
            Some(known.cloned().unwrap_or_else(|| Arc::new(Probe::new(runtime.clone()))))
        };
        let names = || tools.iter().map(|tool| tool.manifest.program.runtime.clone());
        Self {
            probes: names().filter_map(|name| Some((name.clone(), probe(&name)?))).collect(),
            tools: tools.iter().map(|tool| (tool.manifest.name.clone(), guard(&tool.manifest))).collect(),
            runtimes: names().map(|name| (name.clone(), runtime(&name))).collect(),
            observer: self.observer.clone(),
        }
    }

    /// Where a tool's breaker stands.
    #[must_use]
    pub fn breaker(&self, tool: &str) -> Option<BreakerView> {
        self.tools.get(tool).map(|guard| guard.view())
    }

    /// Where a runtime's breaker stands.
    #[must_use]
    pub fn runtime_breaker(&self, runtime: &str) -> Option<BreakerView> {
        self.runtimes.get(runtime).map(|guard| guard.view())
    }

    /// What a runtime said of its version, once it is known to work.
    #[must_use]
    pub fn runtime_version(&self, runtime: &str) -> Option<String> {
        self.probes.get(runtime)?.version()
    }

    /// All breakers by name, `runtime:NAME` for those of runtimes.
    pub fn breakers(&self) -> impl Iterator<Item = (String, State)> + '_ {
        let now = Instant::now().into_std();
        let state = move |guard: &Guard| locked(&guard.breaker).state(now);
        let tools = self.tools.iter().map(move |(name, guard)| (name.clone(), state(guard)));
        tools.chain(self.runtimes.iter().map(move |(name, guard)| (format!("{RUNTIME}{name}"), state(guard))))
    }

    /// Opens a breaker by hand, until it is reset. Nothing when there is none of that name.
    pub fn open(&self, name: &str, reason: &str, uid: u32) -> Option<BreakerView> {
        self.by_hand(name, uid, |breaker| breaker.force_open(reason))
    }

    /// Closes a breaker by hand and forgets what was seen. Nothing when there is none of that name.
    pub fn reset(&self, name: &str, uid: u32) -> Option<BreakerView> {
        self.by_hand(name, uid, Breaker::reset)
    }

    fn by_hand(&self, name: &str, uid: u32, act: impl FnOnce(&mut Breaker) -> Transition) -> Option<BreakerView> {
        let guard = match name.strip_prefix(RUNTIME) {
            Some(runtime) => self.runtimes.get(runtime),
            None => self.tools.get(name),
        }?;
        let transition = act(&mut locked(&guard.breaker));
        self.report(name, transition, Some(uid));
        Some(guard.view())
    }

    fn report(&self, breaker: &str, transition: Transition, uid: Option<u32>) {
        let Transition { from, to, reason } = transition;
        tracing::warn!(breaker, from = from.as_str(), to = to.as_str(), reason, "breaker");
        self.observer.tell(Observed::Breaker { uid, breaker: breaker.to_owned(), from, to, reason });
    }
}

/// Runs a call, again where that may help, and its tool's fallback where it does not.
///
/// # Errors
/// When the launcher cannot be spoken with.
pub async fn run<L: Launch>(
    launch: &L,
    tools: &Tools,
    guards: &Guards,
    asked: Asked,
    cancel: CancellationToken,
) -> Result<Attempts, LinkError> {
    let deadline = Instant::now() + asked.time;
    let mut earlier = Vec::new();
    let mut next = asked.clone();
    let mut number = 1;
    loop {
        next.time = deadline - Instant::now();
        let mut last = attempt(launch, tools, guards, next.clone(), &cancel).await?;
        if let Some(before) = earlier.last().and_then(Ran::failed) {
            last.note(format!("attempt {} of `{}`; the one before ended with {}", number, asked.tool, before.code));
        }
        let left = deadline - Instant::now();
        let step = match tools.get(&asked.tool) {
            Some(tool) if next.tool == asked.tool && !cancel.is_cancelled() => after(guards, tool, &last, number, left),
            _ => None,
        };
        match step {
            None => return Ok(Attempts { earlier, last }),
            Some(Step::Again(wait)) => {
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    () = cancel.cancelled() => return Ok(Attempts { earlier, last }),
                }
            }
            Some(Step::Instead(fallback)) => next.tool = fallback,
        }
        earlier.push(last);
        next.call = CallId::generate();
        number += 1;
    }
}

enum Step {
    Again(Duration),
    Instead(String),
}

fn after(guards: &Guards, tool: &Tool, last: &Ran, number: u32, left: Duration) -> Option<Step> {
    let failed = last.failed()?;
    let execution = &tool.manifest.execution;
    let rules = Rules {
        attempts: tool.manifest.retry.attempts,
        repeatable: execution.effects == Effects::ReadOnly || execution.idempotent,
    };
    if let Some(guard) = guards.tools.get(&tool.manifest.name) {
        let random = chance(last.call());
        if let Some(wait) = retry::next(rules, number, failed, left, &mut locked(&guard.budget), random) {
            return Some(Step::Again(wait));
        }
    }
    // Instead of a tool that has run, only where nothing of it can be left.
    let never_ran = matches!(failed.code, Code::BreakerOpen | Code::ToolChanged)
        || (failed.code == Code::ToolUnavailable && last.ended.is_none());
    let gave_up = rules.repeatable && last.observation(tool.time) == Observation::Failure;
    let fallback = tool.manifest.retry.fallback.as_ref().filter(|_| never_ran || gave_up)?;
    Some(Step::Instead(fallback.clone()))
}

/// One attempt. Whether the breakers let it through is asked when its place is free.
async fn attempt<L: Launch>(
    launch: &L,
    tools: &Tools,
    guards: &Guards,
    mut asked: Asked,
    cancel: &CancellationToken,
) -> Result<Ran, LinkError> {
    let guarded = tools.get(&asked.tool).and_then(|tool| {
        Some((tool, guards.tools.get(&tool.manifest.name)?, guards.runtimes.get(&tool.manifest.program.runtime)?))
    });
    // What is not to be run at all takes nobody's place.
    let (Some((tool, own, runtime)), Ok(())) = (guarded, call::preflight(tools, &asked)) else {
        return call::run(launch, tools, asked, cancel.clone()).await;
    };
    // Before the call takes anybody's place, and out of nobody's time: the first call on a runtime is tried like any other.
    if let Some(probe) = guards.probes.get(&tool.manifest.program.runtime) {
        let works = tokio::select! {
            works = probe.check(launch) => works?,
            () = cancel.cancelled() => {
                let error = call::failure(Code::Cancelled, "cancelled while its runtime was tried", Value::Null);
                return Ok(call::refused(tools, asked, error));
            }
        };
        if let Err(error) = works {
            return Ok(call::refused(tools, asked, error));
        }
    }
    let waiting = Instant::now();
    let places = tokio::select! {
        places = async { (place(own, asked.time).await, place(runtime, asked.time).await) } => places,
        () = cancel.cancelled() => {
            let error = call::failure(Code::Cancelled, "cancelled while it waited for its turn", Value::Null);
            return Ok(call::refused(tools, asked, error));
        }
    };
    let (Some(_own_place), Some(_runtime_place)) = places else {
        let message = format!("too many calls of `{}` or on {} are running", asked.tool, tool.manifest.program.runtime);
        return Ok(call::refused(tools, asked, call::failure(Code::Overloaded, message, Value::Null)));
    };
    asked.time = asked.time.saturating_sub(waiting.elapsed());
    let permits = match admit(own, runtime) {
        Ok(permits) => permits,
        Err(refused) => {
            let retry_after = refused.retry_after.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
            let message = format!("`{}` is not started: {}", asked.tool, refused.reason);
            let error = call::failure(Code::BreakerOpen, message, json!({"retry_after_ms": retry_after}));
            return Ok(call::refused(tools, asked, error));
        }
    };
    locked(&own.budget).call();
    let limit = tool.time.min(asked.time);
    // A call that is dropped here gives its permits back as saying nothing: see `Admitted`.
    let mut admitted = Admitted { guards, own, runtime, permits: Some(permits) };
    let ran = call::run(launch, tools, asked, cancel.clone()).await?;
    let seen = ran.observation(limit);
    let runtime_seen = match ran.failed() {
        Some(_) if ran.lacks_runtime() => Observation::Failure,
        _ if seen == Observation::Nothing => Observation::Nothing,
        _ => Observation::Success,
    };
    admitted.learn(&tool.manifest, seen, runtime_seen, chance(ran.call()));
    Ok(ran)
}

fn admit(own: &Guard, runtime: &Guard) -> Result<(Permit, Permit), Refused> {
    let now = Instant::now().into_std();
    let of_runtime = locked(&runtime.breaker).admit(now)?;
    let of_own = locked(&own.breaker).admit(now);
    match of_own {
        Ok(of_own) => Ok((of_own, of_runtime)),
        Err(refused) => {
            locked(&runtime.breaker).record(of_runtime, Observation::Nothing, now, 0.0);
            Err(refused)
        }
    }
}

/// The permits of a call that runs. Given back as saying nothing when the call is dropped.
struct Admitted<'a> {
    guards: &'a Guards,
    own: &'a Guard,
    runtime: &'a Guard,
    permits: Option<(Permit, Permit)>,
}

impl Admitted<'_> {
    fn learn(&mut self, manifest: &ToolManifest, own: Observation, runtime: Observation, jitter: f64) {
        let Some((of_own, of_runtime)) = self.permits.take() else { return };
        let now = Instant::now().into_std();
        if let Some(transition) = locked(&self.own.breaker).record(of_own, own, now, jitter) {
            self.guards.report(&manifest.name, transition, None);
        }
        if let Some(transition) = locked(&self.runtime.breaker).record(of_runtime, runtime, now, jitter) {
            self.guards.report(&format!("{RUNTIME}{}", manifest.program.runtime), transition, None);
        }
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        let Some((of_own, of_runtime)) = self.permits.take() else { return };
        let now = Instant::now().into_std();
        locked(&self.own.breaker).record(of_own, Observation::Nothing, now, 0.0);
        locked(&self.runtime.breaker).record(of_runtime, Observation::Nothing, now, 0.0);
    }
}

async fn place(guard: &Guard, time: Duration) -> Option<SemaphorePermit<'_>> {
    let longest = guard.queue.map_or(time, |queue| queue.min(time));
    // The semaphore is never closed: only the time can run out.
    tokio::time::timeout(longest, guard.places.acquire()).await.ok()?.ok()
}

/// What a panic under the lock leaves is still a breaker.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number between 0 and 1 out of an id's random bits.
fn chance(call: CallId) -> f64 {
    #[expect(clippy::cast_possible_truncation, reason = "the lowest 32 bits are random")]
    let bits = call.as_u128() as u32;
    f64::from(bits) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use toolproto::digest::Digest;
    use toolproto::ids::JobId;

    use super::*;
    use crate::call::Answered;
    use crate::model::transcript::Arguments;
    use crate::runtimes::Runtime;
    use crate::schema::Schema;
    use crate::scripted::{Behaviour, ScriptedLaunch};

    fn tool(name: &str, tables: &str) -> Tool {
        let text = format!(
            "version = 1\nname = \"{name}\"\ndescription = \"d\"\n[run]\nruntime = \"python\"\nentry = \"m.py\"\n\
             [contract]\ninput = \"i.json\"\n{tables}"
        );
        Tool {
            manifest: ToolManifest::parse(Path::new("tool.toml"), &text).unwrap(),
            digest: Digest::sha256(b"tool"),
            input: Schema::compile(json!({"type": "object"})).unwrap(),
            output: None,
            time: Duration::from_secs(10),
            discardable: false,
        }
    }

    struct Stage {
        launch: Arc<ScriptedLaunch>,
        tools: Tools,
        guards: Guards,
    }

    impl Stage {
        fn new(tools: Vec<Tool>, behaviours: &[(&str, Behaviour)]) -> Self {
            let tools: Tools = tools.into_iter().collect();
            Self { launch: ScriptedLaunch::new(behaviours), guards: Guards::new(&tools, Observer::blind()), tools }
        }

        async fn call(&self, tool: &str) -> Attempts {
            self.call_with(tool, json!({}), CancellationToken::new()).await
        }

        async fn call_with(&self, tool: &str, arguments: Value, cancel: CancellationToken) -> Attempts {
            let call = CallId::generate();
            let asked = Asked {
                job: JobId::generate(),
                call,
                attempt_of: call,
                tool: tool.to_owned(),
                arguments: Arguments::Object(arguments),
                refusal: None,
                time: Duration::from_secs(60),
                idempotency_key: call.to_string(),
                watcher: None,
                recorded: crate::launch::Recorded::default(),
            };
            run(&self.launch, &self.tools, &self.guards, asked, cancel).await.unwrap()
        }

        fn launched(&self) -> usize {
            self.launch.log.lock().unwrap().launched.len()
        }

        fn state(&self, tool: &str) -> String {
            self.guards.breaker(tool).unwrap().state
        }
    }

    fn code(attempts: &Attempts) -> Option<Code> {
        attempts.last.failed().map(|failed| failed.code)
    }

    fn works() -> Behaviour {
        Behaviour::Answers(json!({"a": 1}), Duration::from_secs(1))
    }

    #[tokio::test(start_paused = true)]
    async fn a_tool_that_times_out_is_left_alone_for_a_while() {
        let stage =
            Stage::new(vec![tool("slow", ""), tool("good", "")], &[("slow", Behaviour::Hangs), ("good", works())]);
        for _ in 0..5 {
            assert_eq!(code(&stage.call("slow").await), Some(Code::ToolTimeout));
        }
        assert_eq!(stage.state("slow"), "open");
        let refused = stage.call("slow").await;
        assert_eq!(code(&refused), Some(Code::BreakerOpen));
        assert_eq!(stage.launched(), 5, "an open breaker starts nothing");
        assert_eq!(code(&stage.call("good").await), None, "another tool on the same runtime goes on");
        assert_eq!(stage.guards.runtime_breaker("python").unwrap().state, "closed");
        tokio::time::advance(Duration::from_secs(38)).await;
        assert_eq!(code(&stage.call("slow").await), Some(Code::ToolTimeout), "a probe is let through");
        assert_eq!(stage.state("slow"), "open");
    }

    #[tokio::test(start_paused = true)]
    async fn bad_arguments_and_cancellation_do_not_open_it() {
        let stage = Stage::new(vec![tool("slow", "")], &[("slow", Behaviour::Hangs)]);
        for _ in 0..10 {
            assert_eq!(
                code(&stage.call_with("slow", json!([]), CancellationToken::new()).await),
                Some(Code::ArgumentsInvalid)
            );
            let cancelled = CancellationToken::new();
            cancelled.cancel();
            assert_eq!(code(&stage.call_with("slow", json!({}), cancelled).await), Some(Code::Cancelled));
        }
        assert_eq!(stage.state("slow"), "closed");
    }

    #[tokio::test(start_paused = true)]
    async fn only_repeatable_tools_are_tried_again_each_time_as_a_call_of_its_own() {
        let retried = "[execution]\nread_only = true\n[retry]\nattempts = 3\n";
        let stage = Stage::new(
            vec![tool("reads", retried), tool("writes", "[retry]\nattempts = 3\n")],
            &[("reads", Behaviour::Hangs), ("writes", Behaviour::Hangs)],
        );
        let attempts = stage.call("reads").await;
        assert_eq!((attempts.earlier.len(), stage.launched()), (2, 3));
        let mut ids: Vec<CallId> = attempts.earlier.iter().map(Ran::call).chain([attempts.last.call()]).collect();
        ids.dedup();
        assert_eq!(ids.len(), 3);
        assert_eq!(stage.call("writes").await.earlier.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fallback_answers_when_attempts_are_used_up_or_the_breaker_is_open() {
        let stage = Stage::new(
            vec![tool("fresh", "[execution]\nread_only = true\n[retry]\nfallback = \"cached\"\n"), tool("cached", "")],
            &[("fresh", Behaviour::Hangs), ("cached", works())],
        );
        for round in 0..7 {
            let attempts = stage.call("fresh").await;
            assert!(matches!(attempts.last.answered(), Answered::Success { .. }), "round {round}");
            let first = attempts.earlier.first().and_then(Ran::failed).unwrap().code;
            assert_eq!(first, if round < 5 { Code::ToolTimeout } else { Code::BreakerOpen });
        }
        assert_eq!(stage.launched(), 5 + 7);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_started_on_a_runtime_that_does_not_work() {
        let tools = [tool("good", ""), tool("backed", "[retry]\nfallback = \"other\"\n")];
        let mut other = tool("other", "");
        other.manifest.program.runtime = "exec".to_owned();
        let runtime = Runtime {
            name: "python".to_owned(),
            program: "/nowhere/python3".into(),
            probe: vec!["--version".to_owned()],
            advice: "install it".to_owned(),
        };
        let tools: Tools = tools.into_iter().chain([other]).collect();
        let tools = tools.with_runtimes([runtime]);
        let launch = ScriptedLaunch::new(&[("good", works()), ("other", works())]);
        launch.log.lock().unwrap().runtime = Some(Behaviour::Fails("broken"));
        let stage = Stage { launch, guards: Guards::new(&tools, Observer::blind()), tools };
        assert_eq!(code(&stage.call("good").await), Some(Code::ToolUnavailable));
        assert_eq!(stage.launched(), 0);
        assert_eq!(code(&stage.call("backed").await), None, "its fallback runs on something else");
        assert_eq!((stage.launched(), stage.state("good").as_str()), (1, "closed"));
        stage.launch.log.lock().unwrap().runtime = Some(Behaviour::Answers("3.13".into(), Duration::ZERO));
        // A reload forgets nothing of a runtime that stays what it was.
        let stage = Stage { guards: stage.guards.renewed(&stage.tools), ..stage };
        assert_eq!(code(&stage.call("good").await), Some(Code::ToolUnavailable));
        assert_eq!(stage.launch.log.lock().unwrap().probed, 1);
        tokio::time::advance(Duration::from_secs(30)).await;
        assert_eq!(code(&stage.call("good").await), None);
        assert_eq!(stage.guards.runtime_version("python").as_deref(), Some("3.13"));
    }

    #[tokio::test(start_paused = true)]
    async fn exclusive_calls_take_turns_and_full_places_are_told() {
        let stage = Arc::new(Stage::new(
            vec![tool("alone", "[execution]\nexclusive = true\n"), tool("many", "")],
            &[("alone", works()), ("many", Behaviour::Answers(json!({}), Duration::from_secs(8)))],
        ));
        let all = |name: &'static str, count: usize| {
            let calls = (0..count).map(|_| {
                let stage = Arc::clone(&stage);
                tokio::spawn(async move { code(&stage.call(name).await) })
            });
            futures_util::future::join_all(calls.collect::<Vec<_>>())
        };
        assert!(all("alone", 4).await.into_iter().all(|ended| ended.unwrap().is_none()));
        assert_eq!(stage.launch.log.lock().unwrap().most_running, 1);
        let ended = all("many", PLACES_PER_TOOL + 2).await;
        let overloaded = ended.into_iter().filter(|one| *one.as_ref().unwrap() == Some(Code::Overloaded)).count();
        assert_eq!(overloaded, 2);
        assert_eq!(stage.launch.log.lock().unwrap().most_running, PLACES_PER_TOOL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_breaker_can_be_opened_and_reset_by_hand() {
        let stage = Stage::new(vec![tool("good", "")], &[("good", works())]);
        for name in ["good", "runtime:python"] {
            assert_eq!(stage.guards.open(name, "upgrade", 0).unwrap().state, "open");
            assert!(stage.guards.breakers().any(|one| one == (name.to_owned(), State::Open)));
            assert_eq!(code(&stage.call("good").await), Some(Code::BreakerOpen));
            assert_eq!(stage.guards.reset(name, 0).unwrap().state, "closed");
            assert_eq!(code(&stage.call("good").await), None);
        }
        assert!(stage.guards.open("none", "", 0).is_none() && stage.guards.reset("runtime:none", 0).is_none());
    }
}
