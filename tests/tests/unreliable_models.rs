//! A model server that stalls, lies, cuts streams, rate-limits and refuses, at random: each job still ends with a right result, or
//! with the right code. The seed is printed; `AGENTD_MODEL_SEED` plays one again.

use std::time::{Instant, SystemTime};

use agentd_tests::daemon::Daemon;
use agentd_tests::model_server::{Call, Conversation, Fault, ModelServer, Order, Pace, Quirk, Script, Trouble, Turn};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

/// How many jobs run.
const JOBS: u64 = 40;
/// How often agentd asks one model: with fewer faults than this, a turn gets its answer.
const ATTEMPTS: u64 = 4;

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
}

/// Something that passes. Stalls last longer than the model's time-out, with comments that must not count as data.
fn passing(random: &mut Random) -> Fault {
    let after_events = random.below(4) as usize;
    match random.below(11) {
        0 => Fault::retry_after(Trouble::RateLimit, "1"),
        1 => Fault::status(Trouble::Overloaded),
        2 => Fault::status(Trouble::Server),
        3 => Fault::HangUp,
        4 => Fault::Silence { ms: 20_000 },
        5 => Fault::Stall { after_events, ms: 20_000, heartbeat_ms: Some(200) },
        6 => Fault::Cut { after_events, bytes: random.below(30) as usize },
        7 => Fault::EndsEarly { after_events: 1 },
        8 => Fault::Error { after_events, error: Trouble::Overloaded },
        9 => Fault::Garbage { after_events, text: "{\"choices\": [".to_owned() },
        _ => Fault::NotJson { text: "<html>busy</html>".to_owned() },
    }
}

/// A job's turns, and the code with which it ends; `None` for success.
struct Job {
    turns: Vec<Turn>,
    ends: Option<&'static str>,
}

impl Job {
    fn new(seed: u64, number: u64) -> Self {
        let mut random = Random(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let quirks = [Quirk::NoUsage, Quirk::Crlf, Quirk::NoEnd, Quirk::WholeCalls, Quirk::NoIds, Quirk::RepeatNames];
        let mut turns: Vec<Turn> = (0..1 + random.below(2))
            .map(|turn| match random.below(5) {
                // Lies: calls that cannot be run are told to the model, and end nothing.
                0 => Turn::calls(vec![Call::raw("add", "{\"a\": 1, "), Call::new("add", json!({"a": turn, "b": 1}))]),
                1 => Turn::calls(vec![Call::new("multiply", json!({})), Call::new("add", json!({"a": turn, "b": 2}))]),
                _ => Turn::call("add", json!({"a": turn, "b": 3})),
            })
            .collect();
        turns.push(Turn::text(json!({"job": number}).to_string()));
        let mut turns: Vec<Turn> = turns
            .into_iter()
            .map(|turn| {
                let faults = random.below(ATTEMPTS - 1);
                let turn = (0..faults).fold(turn, |turn, _| turn.after(passing(&mut random)));
                let quirk = quirks[random.below(quirks.len() as u64) as usize];
                let pace = Pace {
                    write_bytes: random.below(40) as usize,
                    heartbeats: random.below(2) == 0,
                    ..Pace::default()
                };
                Turn { pace, ..turn.with(quirk) }
            })
            .collect();
        let last = turns.len() - 1;
        let ends = match random.below(8) {
            0 => {
                turns[last].before = vec![Fault::status(Trouble::Quota)];
                Some("MODEL_QUOTA_EXHAUSTED")
            }
            1 => {
                turns[last].before = (0..ATTEMPTS).map(|_| Fault::HangUp).collect();
                Some("MODEL_UNAVAILABLE")
            }
            2 => {
                turns[last].text = "All done!".to_owned();
                turns.extend((0..3).map(|_| Turn::text("Really, all done!")));
                Some("RESULT_INVALID")
            }
            _ => None,
        };
        Self { turns, ends }
    }
}

#[test]
fn a_job_with_a_model_that_does_everything_wrong_ends_right() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let seed = std::env::var("AGENTD_MODEL_SEED").map_or(clock.as_secs(), |text| text.parse().unwrap());
    println!("seed {seed}; play it again with AGENTD_MODEL_SEED={seed}");
    let jobs: Vec<Job> = (0..JOBS).map(|number| Job::new(seed, number)).collect();
    let conversation =
        |(number, job): (usize, &Job)| Conversation { when: format!("job-{number}-"), turns: job.turns.clone() };
    let conversations = jobs.iter().enumerate().map(conversation).collect();
    let script = Script { order: Order::Transcript, conversations, ..Script::default() };
    let server = ModelServer::start(script).unwrap();
    let site = Site::new();
    site.configure("[timeouts]\nmodel = \"3s\"\n\n[limits]\nrunning_jobs = 40\njobs_per_user = 40\n");
    site.python_tool("add", "[execution]\nread_only = true", "reply({'sum': arguments['a'] + arguments['b']})");
    site.agent("worker", &server.base_url(), &["add"], "");
    let daemon = Daemon::start(&site);
    let begun = Instant::now();
    let ids: Vec<String> = (0..jobs.len())
        .map(|number| {
            daemon.submit(&json!({"version": 1, "agent": "worker", "goal": {"key": format!("job-{number}-")}}))
        })
        .collect();
    let mut ends = std::collections::BTreeMap::<String, u32>::new();
    for (number, (job, id)) in jobs.iter().zip(&ids).enumerate() {
        let result = daemon.result(id);
        let about = || format!("job {number} {id} of seed {seed}: {result}\n{:#?}", job.turns);
        assert_eq!(result["error_code"].as_str(), job.ends, "{}", about());
        match job.ends {
            None => assert_eq!(result["data"], json!({"job": number}), "{}", about()),
            Some(_) => {
                assert!(result["recovery_suggestion"].is_string() && result["data"] == Value::Null, "{}", about())
            }
        }
        *ends.entry(job.ends.unwrap_or("success").to_owned()).or_default() += 1;
    }
    println!("{ends:?} in {:?}, {} requests", begun.elapsed(), server.requests().len());
    assert_eq!(server.refusals(), [], "the strict server refused a request");
    daemon.stop();
}

#[test]
fn jobs_are_submitted_line_by_line() {
    needs!(requirement::root(), requirement::program("/usr/bin/python3"));
    let conversation = |number: usize| Conversation {
        when: format!("job-{number}-"),
        turns: vec![Turn::text(json!({"job": number}).to_string())],
    };
    let conversations = (0..5).map(conversation).collect();
    let server = ModelServer::start(Script { conversations, ..Script::default() }).unwrap();
    let site = Site::new();
    site.agent("worker", &server.base_url(), &[], "");
    let daemon = Daemon::start(&site);
    let line =
        |number: usize| json!({"version": 1, "agent": "worker", "goal": {"key": format!("job-{number}-")}}).to_string();
    let file = site.write("jobs.jsonl", [line(0), String::new(), line(1), line(2)].join("\n").as_bytes());
    let output = daemon.agentctl(&["submit", file.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", agentd_tests::daemon::shown(&output));
    let ids: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(ids.len(), 3);
    for (number, id) in ids.iter().enumerate() {
        assert_eq!(daemon.result(id)["data"], json!({"job": number}));
    }
    // The line that is wrong is named; what stood before it is submitted, and its ids are printed.
    let bad = json!({"version": 1, "agent": "nobody", "goal": {}}).to_string();
    let file = site.write("bad.jsonl", [line(3), bad, line(4)].join("\n").as_bytes());
    let output = daemon.agentctl(&["submit", file.to_str().unwrap()]).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{stdout}{stderr}");
    assert!(stderr.contains("line 2") && stderr.contains("AGENT_UNKNOWN"), "{stderr}");
    assert_eq!(stdout.lines().count(), 1);
    assert_eq!(daemon.result(stdout.trim())["data"], json!({"job": 3}));
    daemon.stop();
}
