//! Tries, from inside a sandbox, what a hostile program would try, and what an honest one needs.
//!
//! `probe list` prints the table, `probe run` one JSON line per attempt. Each attempt runs in a process of its own, so that
//! a killed one, or one that changed its process, disturbs no other. An attempt is either *refused* (and says by which errors)
//! or *allowed*; every refused one names an allowed twin, so that a sandbox that refuses everything passes as little as one
//! that refuses nothing.

mod egress;
mod everyday;
mod files;
mod identity;
mod kernel;
mod network;
mod processes;
mod raw;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// What came of an attempt: it succeeded, or why not.
type Outcome = Result<(), Refused>;

/// Why an attempt did not succeed.
#[derive(Debug)]
enum Refused {
    /// The kernel's errno.
    Errno(i32),
    /// What was looked for is not there.
    Absent,
    /// Something else than the attempt wanted to find out.
    Odd(String),
}

impl From<std::io::Error> for Refused {
    fn from(error: std::io::Error) -> Self {
        error.raw_os_error().map_or_else(|| Self::Odd(error.to_string()), Self::Errno)
    }
}

impl From<i32> for Refused {
    fn from(errno: i32) -> Self {
        Self::Errno(errno)
    }
}

/// One attempt.
struct Attempt {
    name: &'static str,
    wanted: Wanted,
    run: fn(&Facts) -> Outcome,
}

/// What should come of it.
enum Wanted {
    /// Success.
    Allowed,
    /// One of these errnos, or that it is not there; while the twin succeeds.
    Refused { by: &'static [i32], twin: &'static str },
}

const fn allowed(name: &'static str, run: fn(&Facts) -> Outcome) -> Attempt {
    Attempt { name, wanted: Wanted::Allowed, run }
}

const fn refused(name: &'static str, by: &'static [i32], twin: &'static str, run: fn(&Facts) -> Outcome) -> Attempt {
    Attempt { name, wanted: Wanted::Refused { by, twin }, run }
}

/// The host's side of some attempts: paths, ports and names that exist outside.
struct Facts(BTreeMap<String, String>);

impl Facts {
    fn get(&self, name: &str) -> Result<&str, Refused> {
        self.0.get(name).map(String::as_str).ok_or_else(|| Refused::Odd(format!("the fact `{name}` was not given")))
    }

    fn number<N: std::str::FromStr>(&self, name: &str) -> Result<N, Refused> {
        self.get(name)?.parse().map_err(|_| Refused::Odd(format!("the fact `{name}` is no number")))
    }
}

/// Refused by a filter of system calls or for want of a capability.
const FILTERED: &[i32] = &[libc::EPERM, libc::ENOSYS];
/// Refused as a file that may not be touched, or is not there.
const CLOSED: &[i32] = &[libc::EPERM, libc::EACCES, libc::EROFS, libc::ENOENT];

fn attempts() -> impl Iterator<Item = &'static Attempt> {
    [files::ALL, processes::ALL, kernel::ALL, network::ALL, egress::ALL, identity::ALL, everyday::ALL]
        .into_iter()
        .flatten()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["list"] => list(),
        ["run", facts, names @ ..] => run_all(facts, names),
        ["one", facts, name] => run_one(facts, name),
        ["serve"] => serve(),
        _ => {
            eprintln!("usage: probe list | probe run FACTS [NAME…] | probe serve");
            ExitCode::from(2)
        }
    }
}

fn list() -> ExitCode {
    for attempt in attempts() {
        let line = match &attempt.wanted {
            Wanted::Allowed => json!({"name": attempt.name, "wanted": "allowed"}),
            Wanted::Refused { by, twin } => {
                json!({"name": attempt.name, "wanted": "refused", "by": by, "twin": twin})
            }
        };
        println!("{line}");
    }
    ExitCode::SUCCESS
}

/// Runs one attempt in this process and prints what came of it.
fn run_one(facts: &str, name: &str) -> ExitCode {
    let (Ok(facts), Some(attempt)) = (serde_json::from_str(facts), attempts().find(|attempt| attempt.name == name))
    else {
        eprintln!("no such attempt, or facts that are no JSON object of strings");
        return ExitCode::from(2);
    };
    let outcome = (attempt.run)(&Facts(facts));
    // Written at once and by one call: some attempts leave this process in a state in which little works.
    let mut stdout = std::io::stdout();
    let written = stdout.write_all(describe(&outcome).to_string().as_bytes()).and_then(|()| stdout.flush());
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn describe(outcome: &Outcome) -> Value {
    match outcome {
        Ok(()) => json!({"outcome": "allowed"}),
        Err(Refused::Errno(errno)) => {
            json!({"outcome": "refused", "errno": errno, "text": std::io::Error::from_raw_os_error(*errno).to_string()})
        }
        Err(Refused::Absent) => json!({"outcome": "refused", "text": "not there"}),
        Err(Refused::Odd(text)) => json!({"outcome": "odd", "text": text}),
    }
}

fn run_all(facts: &str, names: &[&str]) -> ExitCode {
    // Some attempts would do harm if nothing stood in the way of a privileged process.
    if raw::call(libc::SYS_geteuid, Vec::new()) == Ok(0) {
        eprintln!("this program is for the inside of a sandbox and does not run as root");
        return ExitCode::from(2);
    }
    for line in lines(facts, names) {
        println!("{line}");
    }
    ExitCode::SUCCESS
}

/// What comes of these attempts, or of all.
fn lines(facts: &str, names: &[&str]) -> impl Iterator<Item = Value> {
    attempts().filter(|attempt| names.is_empty() || names.contains(&attempt.name)).map(|attempt| {
        let mut line = match in_its_own_process(facts, attempt.name) {
            Ok(line) => line,
            Err(error) => json!({"outcome": "odd", "text": format!("cannot run it: {error}")}),
        };
        line["name"] = json!(attempt.name);
        line
    })
}

/// A tool: its arguments hold facts and names, its result what came of the attempts.
fn serve() -> ExitCode {
    let request: Value = match serde_json::from_reader(std::io::stdin()) {
        Ok(request) => request,
        Err(error) => {
            eprintln!("no request: {error}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = std::env::set_current_dir(request["workspace"].as_str().unwrap_or("/")) {
        eprintln!("no workspace: {error}");
        return ExitCode::from(2);
    }
    let arguments = &request["arguments"];
    let names: Vec<&str> = arguments["names"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let lines: Vec<Value> = lines(&arguments["facts"].to_string(), &names).collect();
    let reply = json!({"protocol": 1, "call_id": request["call_id"], "ok": true, "result": {"lines": lines}});
    println!("{reply}");
    ExitCode::SUCCESS
}

fn in_its_own_process(facts: &str, name: &str) -> std::io::Result<Value> {
    let mut child = Command::new("/proc/self/exe")
        .args(["one", facts, name])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let end = Instant::now() + Duration::from_secs(10);
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() > end => {
                child.kill()?;
                child.wait()?;
                return Ok(json!({"outcome": "odd", "text": "it did not end"}));
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let mut text = String::new();
    if let Some(stdout) = &mut child.stdout {
        stdout.read_to_string(&mut text)?;
    }
    Ok(match (status.signal(), serde_json::from_str(&text)) {
        (Some(signal), _) => json!({"outcome": "refused", "signal": signal}),
        (None, Ok(line)) => line,
        (None, Err(_)) => json!({"outcome": "odd", "text": format!("it said {text:?} and ended with {status}")}),
    })
}
