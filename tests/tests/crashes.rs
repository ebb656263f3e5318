//! Real jobs with real tools, and a daemon that is killed with SIGKILL at random instants until all of them have ended.
//!
//! What each job does follows from a seed, and with it what its workspace must hold at the end. `AGENTD_CRASH_SEED` plays a seed
//! that failed again (the instants are the clock's, so that it may need some tries), `AGENTD_CRASH_JOBS` says how many jobs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, shown, signal_process};
use agentd_tests::far_end::{FarEnd, note};
use agentd_tests::http_client::{self, Response};
use agentd_tests::leftovers::{self, Leftover};
use agentd_tests::model_server::{Call, Conversation, ModelServer, Order, Pace, Reply, Script, Turn};
use agentd_tests::site::{Site, ToolText};
use agentd_tests::{needs, requirement};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// How many jobs run where the environment says nothing.
const JOBS: u64 = 200;
/// How many jobs wait or run at the same time.
const AT_ONCE: usize = 10;
/// After so many crashes the daemon is left alone, so that the test ends.
const MOST_CRASHES: u32 = 400;

/// SplitMix64: small, and the same for ever.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// How a job's tools change its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Each call in a layer that is committed with its receipt.
    Layered,
    /// Each call in the workspace itself, so that a killed one may have done half of its work.
    Direct,
}

/// What a tool is asked to do.
#[derive(Clone, Debug)]
enum Step {
    /// Adds a line to `log`, takes a moment, writes the same into `last`. Python.
    Append { id: String, ms: u64 },
    /// Adds one to `count`. Shell.
    Count,
    /// Writes `file-N` for an N below 3, or removes it if it is there. Python.
    Toggle { file: u64 },
    /// Reads `log`. Python, beside others.
    Look { number: u64 },
    /// Lists the workspace. Shell, beside others.
    List { number: u64 },
    /// Sends its id to a host, which is its effect. Python.
    Send { id: String },
}

impl Step {
    fn tool(&self, way: Way) -> String {
        let way = if way == Way::Layered { "layered" } else { "direct" };
        match self {
            Self::Append { .. } => format!("append_{way}"),
            Self::Count => format!("count_{way}"),
            Self::Toggle { .. } => format!("toggle_{way}"),
            Self::Look { .. } => "look".to_owned(),
            Self::List { .. } => "list".to_owned(),
            Self::Send { .. } => "send".to_owned(),
        }
    }

    fn arguments(&self) -> Value {
        match self {
            Self::Append { id, ms } => json!({"id": id, "ms": ms}),
            Self::Count => json!({}),
            Self::Send { id } => json!({"id": id}),
            Self::Toggle { file } => json!({"file": format!("file-{file}")}),
            Self::Look { number } | Self::List { number } => json!({"number": number}),
        }
    }
}

/// A job as its seed makes it.
struct Job {
    number: u64,
    way: Way,
    turns: Vec<Vec<Step>>,
    /// Whether somebody says something to it, and ends it early.
    is_spoken_to: bool,
    is_cancelled: bool,
    workspace: PathBuf,
}

impl Job {
    fn new(seed: u64, number: u64, site: &Site) -> Self {
        let mut random = Random(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let way = if random.one_in(4) { Way::Direct } else { Way::Layered };
        let turns = (0..2 + random.below(3))
            .map(|turn| (0..1 + random.below(3)).map(|call| step(&mut random, number, turn * 10 + call)).collect())
            .collect();
        let is_cancelled = random.one_in(10);
        let is_spoken_to = random.one_in(5);
        let workspace = site.workspace(&format!("job-{number}"), 0, 0);
        Self { number, way, turns, is_spoken_to, is_cancelled, workspace }
    }

    fn key(&self) -> String {
        format!("job-{}-", self.number)
    }

    fn words(&self) -> String {
        format!("said-to-{}", self.key())
    }

    fn request(&self) -> Value {
        json!({
            "version": 1, "agent": "worker", "goal": {"key": self.key()}, "workspace": self.workspace,
            "idempotency_key": self.key(),
        })
    }

    fn steps(&self) -> impl Iterator<Item = &Step> {
        self.turns.iter().flatten()
    }

    /// The model's side. Whoever is spoken to is asked for an answer once more.
    fn conversation(&self) -> Conversation {
        let pace = Pace { first_ms: self.number % 7, ..Pace::default() };
        let call = |step: &Step| Call::new(step.tool(self.way), step.arguments());
        let calls = self.turns.iter().map(|steps| Turn::calls(steps.iter().map(call).collect()));
        let answer = || Turn::text(json!({"job": self.number}).to_string());
        let turns = calls.chain([answer(), answer(), answer()]).map(|turn| Turn { pace, ..turn }).collect();
        Conversation { when: self.key(), turns }
    }
}

fn step(random: &mut Random, job: u64, number: u64) -> Step {
    match random.below(10) {
        0..=2 => Step::Append { id: format!("{job}-{number}"), ms: random.below(40) },
        3 | 4 => Step::Count,
        5 => Step::Toggle { file: random.below(3) },
        6 => Step::Look { number },
        7 => Step::List { number },
        _ => Step::Send { id: format!("{job}-{number}") },
    }
}

/// What a workspace holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Held {
    log: Vec<String>,
    last: Option<String>,
    count: u64,
    files: BTreeSet<String>,
}

impl Held {
    fn after(&self, step: &Step) -> Self {
        let mut held = self.clone();
        match step {
            Step::Append { id, .. } => {
                held.log.push(id.clone());
                held.last = Some(id.clone());
            }
            Step::Count => held.count += 1,
            Step::Toggle { file } => {
                let name = format!("file-{file}");
                if !held.files.remove(&name) {
                    held.files.insert(name);
                }
            }
            Step::Look { .. } | Step::List { .. } | Step::Send { .. } => {}
        }
        held
    }

    fn read(workspace: &Path, way: Way) -> Self {
        let text = |name: &str| fs::read_to_string(workspace.join(name)).ok();
        let count = match text("count") {
            None => 0,
            // Killed between emptying the file and writing it: without a layer nothing holds that back.
            Some(text) if text.is_empty() && matches!(way, Way::Direct) => 0,
            Some(text) => {
                let is_none = |error| panic!("{} has the count {text:?}: {error}", workspace.display());
                text.trim().parse().unwrap_or_else(is_none)
            }
        };
        Self {
            log: text("log").unwrap_or_default().lines().map(str::to_owned).collect(),
            last: text("last"),
            count,
            files: agentd_tests::daemon::listing(workspace)
                .into_iter()
                .filter(|name| name.starts_with("file-"))
                .collect(),
        }
    }
}

/// Notes each line that is sent, and says so.
fn outside() -> FarEnd {
    FarEnd::start(|mut connection, notes| {
        let mut sent = String::new();
        BufReader::new(connection.try_clone()?).read_line(&mut sent)?;
        // One that is killed between its connection and its line has sent nothing.
        if sent.ends_with('\n') {
            note(notes, sent.trim_end());
        }
        // It may be killed before it hears that.
        drop(connection.write_all(b"seen\n"));
        Ok(())
    })
}

fn furnish(site: &Site, server: &ModelServer, outside: &FarEnd) {
    site.configure("[network.hosts]\n\"web.test\" = [\"127.0.0.1\"]\n");
    let (port, rule) = (outside.port(), outside.rule());
    let out = format!("version = 1\nname = \"out\"\nextends = \"network\"\nnetwork_allow = [\"*:*\", {rule:?}]\n");
    site.write("policies/out.toml", out.as_bytes());
    let manifest =
        format!("[execution]\nstateful_action = true\n[sandbox]\npolicy = \"out\"\nhosts = [\"web.test:{port}\"]");
    let send = format!(
        "import socket\nend = socket.create_connection(('web.test', {port}))\n\
         end.sendall((arguments['id'] + '\\n').encode())\nend.makefile().readline()\nreply({{'sent': arguments['id']}})"
    );
    site.python_tool("send", &manifest, &send);
    let policy = |name: &str, workspace: &str| {
        let text = format!(
            "version = 1\nname = \"{name}\"\nextends = \"workspace\"\nworkspace = \"{workspace}\"\n\n[[example]]\n\
             run = \"echo x > /workspace/x\"\nexpect = \"allowed\"\nwhy = \"the workspace can be changed\"\n"
        );
        site.write(&format!("policies/{name}.toml"), text.as_bytes());
    };
    policy("layered", "overlay");
    policy("direct", "direct");
    for way in ["layered", "direct"] {
        let manifest = format!("[execution]\nmutates_workspace = true\n[sandbox]\npolicy = \"{way}\"");
        site.python_tool(
            &format!("append_{way}"),
            &manifest,
            "with open('/workspace/log', 'a') as log: log.write(arguments['id'] + '\\n')\ntime.sleep(arguments['ms'] / 1000)\n\
             with open('/workspace/last', 'w') as last: last.write(arguments['id'])\nreply({'appended': arguments['id']})",
        );
        site.python_tool(
            &format!("toggle_{way}"),
            &manifest,
            "path = '/workspace/' + arguments['file']\nif os.path.exists(path): os.unlink(path)\nelse: open(path, 'w').close()\nreply({})",
        );
        let count = b"#!/bin/sh\ncat >/dev/null\nn=$(cat /workspace/count 2>/dev/null || echo 0)\n\
            echo $((n + 1)) >/workspace/count\necho '{\"counted\": true}'\n";
        let name = format!("count_{way}");
        site.tool(&ToolText { name: &name, runtime: "exec", entry: "count", code: count, manifest: &manifest });
    }
    site.python_tool(
        "look",
        "[execution]\nread_only = true",
        "path = '/workspace/log'\nreply({'lines': len(open(path).readlines()) if os.path.exists(path) else 0, 'number': arguments['number']})",
    );
    let list = b"#!/bin/sh\ncat >/dev/null\nls /workspace >&2\necho '{\"listed\": true}'\n";
    let manifest = "[execution]\nread_only = true";
    site.tool(&ToolText { name: "list", runtime: "exec", entry: "list", code: list, manifest });
    let tools = [
        "append_layered",
        "append_direct",
        "toggle_layered",
        "toggle_direct",
        "count_layered",
        "count_direct",
        "look",
        "list",
        "send",
    ];
    site.agent("worker", &server.base_url(), &tools, "[budget]\nwall_seconds = 3600\n");
}

/// When a life ends, and by whose death.
#[derive(Clone, Copy)]
struct Fate {
    /// Counted from its start, not from its first answer.
    at_start: bool,
    after: Duration,
    launcher: bool,
}

impl Fate {
    fn of(random: &mut Random) -> Self {
        let at_start = random.one_in(5);
        let after = Duration::from_millis(if at_start { random.below(300) } else { random.below(1200) });
        Self { at_start, after, launcher: random.one_in(3) }
    }
}

/// One life of the daemon. Requests may fail at any time.
struct Life<'a> {
    site: &'a Site,
    launcher: Child,
}

impl<'a> Life<'a> {
    fn begin(site: &'a Site) -> Self {
        let mode = if requirement::cgroup_controllers().is_ok() { "required" } else { "best-effort" };
        let launcher = Daemon::command(site, &["--limits", mode]).spawn().expect("agentd starts");
        Self { site, launcher }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.site.path("agentd.log")).unwrap_or_default()
    }

    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Option<Response> {
        let stream = UnixStream::connect(self.site.path("run/agentd.sock")).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let text = body.map(Value::to_string).unwrap_or_default();
        let headers: &[(&str, &str)] = if body.is_some() { &[("content-type", "application/json")] } else { &[] };
        http_client::send(stream, method, path, headers, text.as_bytes()).ok()?.finish().ok()
    }

    /// Kills agentd, or the launcher, so long after its start or after it has begun to answer. What was killed.
    fn kill(&self, Fate { at_start, after, launcher }: Fate) -> &'static str {
        let end = Instant::now() + PATIENCE;
        while !at_start && self.ask("GET", "/v1/health", None).is_none() {
            assert!(Instant::now() < end, "agentd does not answer:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(after);
        let children = leftovers::processes().into_iter().filter(|process| process.parent == self.launcher.id());
        let agentd = children.filter(|process| process.name == "agentd").map(|process| process.id).next();
        match agentd.filter(|_| !launcher) {
            Some(agentd) => {
                signal_process(agentd, Signal::SIGKILL);
                "agentd"
            }
            None => {
                signal_process(self.launcher.id(), Signal::SIGKILL);
                "the launcher"
            }
        }
    }

    /// Waits for the end, and proves that nothing runs on.
    fn end(mut self) {
        eventually("the launcher ends", PATIENCE, || {
            self.launcher.try_wait().expect("a child can be awaited").is_some()
        });
        leftovers::await_no_process(self.site, PATIENCE);
        let left = leftovers::find(self.site);
        let mounts: Vec<_> = left.iter().filter(|left| matches!(left, Leftover::Mount(_))).collect();
        assert!(mounts.is_empty(), "{mounts:?}");
    }
}

/// What the daemon has acknowledged of a job.
#[derive(Default)]
struct Known {
    id: Option<String>,
    said: bool,
    cancelled: bool,
    turns: u64,
    result: Option<Value>,
}

/// All jobs, seen by their user.
struct User {
    jobs: Vec<Job>,
    known: Vec<Known>,
}

impl User {
    fn is_done(&self) -> bool {
        self.known.iter().all(|known| known.result.is_some())
    }

    /// One look at each job; `None` when a request fails.
    fn round(&mut self, life: &Life<'_>) -> Option<()> {
        let mut open = 0;
        for (job, known) in self.jobs.iter().zip(&mut self.known) {
            if known.result.is_some() {
                continue;
            }
            open += 1;
            if open > AT_ONCE {
                break;
            }
            let Some(id) = known.id.clone() else {
                let response = life.ask("POST", "/v1/jobs", Some(&job.request()))?;
                if response.status >= 500 {
                    // The daemon lives a moment longer than the launcher, and says that it can accept nothing.
                    return None;
                }
                assert_eq!(response.status, 202, "{}", response.text());
                known.id = Some(response.json()["job_id"].as_str().unwrap().to_owned());
                continue;
            };
            let response = life.ask("GET", &format!("/v1/jobs/{id}"), None)?;
            assert_eq!(response.status, 200, "job {id} was accepted and is lost: {}", response.text());
            let turns = response.json()["usage"]["turns"].as_u64().unwrap();
            assert!(turns >= known.turns, "{} turns of job {id} were seen, now {turns}", known.turns);
            known.turns = turns;
            if job.is_spoken_to && !known.said && turns > 0 {
                let said = life.ask("POST", &format!("/v1/jobs/{id}/messages"), Some(&json!({"text": job.words()})))?;
                known.said |= said.status < 300;
            }
            if job.is_cancelled && !known.cancelled && turns > 1 {
                let cancelled = life.ask("POST", &format!("/v1/jobs/{id}/cancel"), Some(&json!({})))?;
                known.cancelled |= cancelled.status < 300;
            }
            let response = life.ask("GET", &format!("/v1/jobs/{id}/result"), None)?;
            if response.status == 200 {
                known.result = Some(response.json());
            }
        }
        std::thread::sleep(Duration::from_millis(10));
        Some(())
    }
}

#[test]
fn whatever_is_killed_whenever_nothing_is_lost_and_nothing_happens_twice() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let seed = number("AGENTD_CRASH_SEED").unwrap_or(clock.as_secs());
    println!("seed {seed}; play it again with AGENTD_CRASH_SEED={seed}");
    let site = Site::new();
    let jobs: Vec<Job> =
        (0..number("AGENTD_CRASH_JOBS").unwrap_or(JOBS)).map(|number| Job::new(seed, number, &site)).collect();
    let conversations = jobs.iter().map(Job::conversation).collect();
    let script = Script { order: Order::Transcript, conversations, ..Script::default() };
    let server = ModelServer::start(script).unwrap();
    let outside = outside();
    furnish(&site, &server, &outside);
    let known = jobs.iter().map(|_| Known::default()).collect();
    let mut user = User { jobs, known };

    let mut random = Random(seed);
    let (begun, mut crashes) = (Instant::now(), BTreeMap::<&str, u32>::new());
    while !user.is_done() && crashes.values().sum::<u32>() < MOST_CRASHES {
        let life = Life::begin(&site);
        let fate = Fate::of(&mut random);
        let killed = std::thread::scope(|scope| {
            let killer = scope.spawn(|| life.kill(fate));
            while !killer.is_finished() {
                if user.round(&life).is_none() || user.is_done() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            killer.join().unwrap()
        });
        *crashes.entry(killed).or_default() += 1;
        life.end();
    }
    println!("{} jobs, killed: {crashes:?}, in {:?}", user.jobs.len(), begun.elapsed());
    let daemon = Daemon::start(&site);
    let at_the_end = check(&user, &daemon, &server, &outside);
    println!("{at_the_end:?}");
    assert!(crashes.len() == 2 || user.jobs.len() < 50, "only {crashes:?} were killed");
    daemon.stop();
}

/// How jobs ended, for the log.
fn check(user: &User, daemon: &Daemon<'_>, server: &ModelServer, outside: &FarEnd) -> BTreeMap<String, u32> {
    let refusals = server.refusals();
    assert!(refusals.is_empty(), "{refusals:?}");
    let requests: Vec<String> = server
        .requests()
        .iter()
        .filter(|request| matches!(request.reply, Reply::Turn(_)))
        // A result stands in a string, so that its quotes are escaped.
        .map(|request| request.body["messages"].to_string().replace('\\', ""))
        .collect();
    let sent = outside.seen();
    let mut ends = BTreeMap::new();
    let mut ids = BTreeSet::new();
    for (job, known) in user.jobs.iter().zip(&user.known) {
        let id = daemon.submit(&job.request());
        assert!(known.id.as_ref().is_none_or(|known| *known == id), "job {} was accepted twice", job.number);
        let result = daemon.result(&id);
        let about = || format!("job {} {id}: {result}\n{:?}", job.number, job.turns);
        assert!(known.result.as_ref().is_none_or(|known| *known == result), "it was {:?}; {}", known.result, about());
        let held = Held::read(&job.workspace, job.way);
        let states: Vec<Held> = job
            .steps()
            .scan(Held::default(), |held, step| {
                *held = held.after(step);
                Some(held.clone())
            })
            .collect();
        let end = result["error_code"].as_str().unwrap_or("success").to_owned();
        if known.cancelled {
            // It may have ended before it was told to.
            assert!(["CANCELLED", "success"].contains(&end.as_str()), "{}", about());
        } else {
            assert_eq!(end, "success", "{}\n{}", about(), daemon.log());
            assert_eq!(result["data"], json!({"job": job.number}), "{}", about());
        }
        match (job.way, end.as_str()) {
            (Way::Layered, "success") => assert_eq!(Some(&held), states.last(), "{}", about()),
            (Way::Layered, _) => {
                assert!(held == Held::default() || states.contains(&held), "{held:?} is between calls; {}", about());
            }
            (Way::Direct, _) => {
                let distinct: BTreeSet<&String> = held.log.iter().collect();
                assert_eq!(distinct.len(), held.log.len(), "{held:?} has something twice; {}", about());
                let counts = job.steps().filter(|step| matches!(step, Step::Count)).count() as u64;
                assert!(held.count <= counts, "{held:?} has something twice; {}", about());
            }
        }
        let own: Vec<&String> = requests.iter().filter(|request| request.contains(&job.key())).collect();
        for step in job.steps() {
            let Step::Send { id } = step else { continue };
            let happened = sent.iter().filter(|one| *one == id).count();
            let is_told = own.iter().any(|request| request.contains(&format!("\"sent\":\"{id}\"")));
            let is_unknown = own.iter().any(|request| request.contains("INTERRUPTED"));
            assert!(happened <= 1, "{id} was sent {happened} times; {}", about());
            assert!(happened == 1 || !is_told, "{id} is told and did not happen; {}", about());
            assert!(is_told || is_unknown || end != "success", "nobody was told of {id}; {}", about());
            let what = if is_told { "told" } else { "not told" };
            *ends.entry(format!("sent {happened} times, {what}")).or_default() += 1;
        }
        if known.said && end == "success" {
            let heard = requests.iter().any(|request| request.contains(&job.words()));
            assert!(heard, "what was said to it was kept and is lost; {}", about());
        }
        *ends.entry(format!("{:?}: {end}", job.way)).or_default() += 1;
        ids.insert(id);
    }
    assert_eq!(ids.len(), user.jobs.len(), "two jobs have one id");
    let mut listed = 0;
    let mut path = "/v1/jobs?limit=100".to_owned();
    loop {
        let page = daemon.get(&path).json();
        listed += page["jobs"].as_array().unwrap().len();
        match page["next"].as_str() {
            Some(next) => path = format!("/v1/jobs?limit=100&before={next}"),
            None => break,
        }
    }
    assert_eq!(listed, user.jobs.len(), "there are jobs that nobody submitted");
    for id in ids {
        let bundle = daemon.site().path("bundle.jsonl");
        let output = daemon.agentctl(&["receipts", &id, "--bundle", bundle.to_str().unwrap()]).output().unwrap();
        assert!(output.status.success(), "{}", shown(&output));
        let key = daemon.site().path("state/receipt.pub");
        let mut verify: Command =
            daemon.agentctl(&["verify", bundle.to_str().unwrap(), "--key", key.to_str().unwrap()]);
        let output = verify.output().unwrap();
        assert!(output.status.success(), "the receipts of job {id}: {}", shown(&output));
    }
    ends
}
