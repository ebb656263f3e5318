//! One tool call through `POST /v1/calls`, cold and served by a process that was started ahead, against the same program as a
//! plain process, started for its request or waiting for it.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::disk::{self, Disk};
use super::floor::{Floor, Meter};
use super::goal::{Goal, OF_FLOOR};
use super::samples::{Samples, milliseconds};
use super::{Bench, Row, client, compile, source};
use crate::demo::Daemon;
use crate::example::Staged;
use crate::{process, project, runtimes};

/// A tool that answers at once, and how to start it without agentd.
pub(super) struct Echo {
    name: &'static str,
    program: Vec<PathBuf>,
}

/// Puts the tools into the staged configuration: with agentd's libraries, as users write them, but for the one in C.
pub(super) fn install(staged: &Staged) -> Result<Vec<Echo>> {
    let tools = staged.config().join("tools");
    let mut echoes = Vec::new();
    for name in ["echo_c", "echo_bun", "echo_python", "echo_java"] {
        let folder = tools.join(name);
        crate::example::copy_tree(&source("tools").join(name), &folder)?;
        let sdk = project::root().join("toolproto/sdk");
        let program = match name {
            "echo_c" => {
                let program = folder.join("echo");
                compile(&folder.join("echo.c"), &program)?;
                vec![program]
            }
            "echo_java" => {
                let jar = folder.join("echo.jar");
                crate::example::copy_file(
                    &runtimes::jar(&[&runtimes::java_library(), &folder.join("src")], "Echo")?,
                    &jar,
                    0o644,
                )?;
                vec!["java".into(), "-jar".into(), jar]
            }
            "echo_bun" => {
                crate::example::copy_file(&sdk.join("typescript/index.js"), &folder.join("index.js"), 0o644)?;
                vec![staged.path("runtimes/bun"), folder.join("main.ts")]
            }
            _ => {
                let library = "agentd_tool.py";
                crate::example::copy_file(&sdk.join("python").join(library), &folder.join(library), 0o644)?;
                vec!["/usr/bin/python3".into(), folder.join("main.py")]
            }
        };
        start_ahead(&tools, name, &warm(name), 1)?;
        echoes.push(Echo { name, program });
    }
    Ok(echoes)
}

/// Puts a second tool beside one, the same but that so many of its processes are started ahead.
pub(super) fn start_ahead(tools: &Path, name: &str, other: &str, count: usize) -> Result<()> {
    let folder = tools.join(other);
    crate::example::copy_tree(&tools.join(name), &folder)?;
    let manifest = folder.join("tool.toml");
    let text = fs::read_to_string(&manifest).with_context(|| format!("reading {}", manifest.display()))?;
    let text = text.replace(&format!("\"{name}\""), &format!("{other:?}"));
    let text = text.replace("[run]\n", &format!("[run]\nprewarm = {count}\n"));
    fs::write(&manifest, text).with_context(|| format!("writing {}", manifest.display()))
}

fn warm(name: &str) -> String {
    format!("{name}_warm")
}

/// Measures each tool in turns with its plain twins.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let daemon = bench.daemon("calls", "")?;
    let meter = Meter::prepare(bench, &daemon);
    let mut meter = meter.inspect_err(|error| eprintln!("without the kernel's floor: {error:#}")).ok();
    let mut disk = Disk::of(&bench.staged.state(), disk::BLOCK_OF_CALL)?;
    let mut rows = Vec::new();
    for echo in &bench.echoes {
        rows.extend(one(&daemon, echo, bench.effort.rounds, &mut disk, meter.as_mut())?);
    }
    Ok(rows)
}

fn one(
    daemon: &Daemon,
    echo: &Echo,
    rounds: usize,
    disk: &mut Disk,
    mut meter: Option<&mut Meter>,
) -> Result<[Row; 2]> {
    eprintln!("calls of {}, {rounds} rounds", echo.name);
    let (mut plain, mut called, mut served, mut unconfined) = <(Samples, Samples, Samples, Samples)>::default();
    let mut durable = Samples::default();
    for _ in 0..rounds {
        process::check_interrupt()?;
        if let Some(meter) = &mut meter {
            meter.sample()?;
        }
        durable.push(disk.append()?);
        plain.push(echo.plain()?);
        let start = Instant::now();
        call(daemon.socket(), echo.name)?;
        called.push(start.elapsed());
        // It gets as much time to start as the process that the daemon starts ahead.
        let waiting = echo.start()?;
        served.push(warm_call(daemon.socket(), &warm(echo.name))?);
        unconfined.push(waiting.serve()?);
    }
    let more = |samples: &Samples, than: &Samples| samples.p50().saturating_sub(than.p50());
    let floor = meter.map(Meter::floor);
    let cold_goal = cold_goal(echo.name, &called, &plain, &durable, floor.as_ref());
    let cold = Row::new(
        format!("`POST /v1/calls`, cold, `{}`", echo.name),
        called.text(),
        format!(
            "{:.2} × plain ({}), +{:.2} ms{}",
            called.times(&plain),
            plain.text(),
            milliseconds(more(&called, &plain)),
            cold_goal.map(|goal| format!("; {goal}")).unwrap_or_default()
        ),
    );
    let own = more(&served, &unconfined);
    let warm_goal = (
        format!("{} ms + {}", OVER_OWN_WORK.as_millis(), disk::waited_by_call_text(&durable)),
        OVER_OWN_WORK + disk::waited_by_call(&durable),
    );
    let beside = warm_goals(echo.name, &served, &called, &plain, &durable);
    let warm = Row::new(
        format!("`POST /v1/calls`, warm, `{}`", echo.name),
        served.text(),
        format!(
            "{:.2} × cold, {:.2} × plain{beside}; +{:.2} ms over the same program waiting without a sandbox, request to exit ({}), {}",
            served.times(&called),
            served.times(&plain),
            milliseconds(own),
            unconfined.text(),
            Goal::at_most(own, [warm_goal])
        ),
    );
    Ok([cold, warm])
}

/// The goal of a tool's cold calls; there is none for a program that is over in a millisecond.
fn cold_goal(name: &str, called: &Samples, plain: &Samples, durable: &Samples, floor: Option<&Floor>) -> Option<Goal> {
    let ratio = match name {
        "echo_python" | "echo_java" => 1.3,
        "echo_bun" => 1.5,
        _ => return None,
    };
    let beside_plain = [(format!("{ratio} × plain"), plain.p50().mul_f64(ratio))];
    let floor = floor.map(|floor| {
        (
            format!(
                "{OF_FLOOR} × (plain + the sandbox's floor, {:.2} ms) + {}",
                milliseconds(floor.beyond_plain()),
                disk::waited_by_call_text(durable)
            ),
            (plain.p50() + floor.beyond_plain()).mul_f64(OF_FLOOR) + disk::waited_by_call(durable),
        )
    });
    Some(Goal::at_most(called.p50(), beside_plain.into_iter().chain(floor)))
}

/// The goals of a tool's warm calls beside its cold ones and its plain process; there is none for a program that is over in a
/// millisecond.
fn warm_goals(name: &str, served: &Samples, called: &Samples, plain: &Samples, durable: &Samples) -> String {
    let (of_cold, of_plain) = match name {
        "echo_python" => (1.0 / 5.0, 0.2),
        "echo_java" => (1.0 / 5.0, 0.15),
        "echo_bun" => (1.0 / 3.0, 0.3),
        _ => return String::new(),
    };
    let beside_cold = Goal::at_most(served.p50(), [(format!("{of_cold:.2} × cold"), called.p50().mul_f64(of_cold))]);
    let disk = disk::waited_by_call(durable);
    let text = format!("{of_plain} × plain + {}", disk::waited_by_call_text(durable));
    let beside_plain = Goal::at_most(served.p50(), [(text, plain.p50().mul_f64(of_plain) + disk)]);
    format!("; {beside_cold}; {beside_plain}")
}

/// How long a call takes that finds a process started ahead. Those that find none yet are no samples.
fn warm_call(socket: &Path, tool: &str) -> Result<Duration> {
    for _ in 0..TRIES {
        process::check_interrupt()?;
        // What the call before has left starts meanwhile, and is not measured.
        std::thread::sleep(PAUSE);
        let start = Instant::now();
        let reply = call(socket, tool)?;
        let took = start.elapsed();
        if was_ahead(&reply)? {
            return Ok(took);
        }
    }
    bail!("none of {TRIES} calls of {tool} found a process that was started ahead")
}

/// Whether a reply's receipt says that a process served it which had been started ahead.
pub(super) fn was_ahead(reply: &Value) -> Result<bool> {
    let payload = reply["receipt"]["payload"].as_str().context("a reply without receipt")?;
    let statement: Value = serde_json::from_slice(&data_encoding::BASE64.decode(payload.as_bytes())?)?;
    let cgroup = statement["predicate"]["evidence"]["record"]["cgroup"].as_str();
    Ok(cgroup.context("a receipt without cgroup")?.contains("/warm-"))
}

/// How much longer a warm call may take than the tool's own work, besides what it waits for the disk.
const OVER_OWN_WORK: Duration = Duration::from_millis(2);
/// How often a call is tried until it finds a process started ahead.
const TRIES: usize = 20;
/// Longer than any of the runtimes needs to start on a machine that does nothing else.
const PAUSE: Duration = Duration::from_millis(400);

/// One call, receipt and all; anything but `ok` is an error.
pub(super) fn call(socket: &Path, tool: &str) -> Result<Value> {
    let reply =
        client::request(socket, "POST", "/v1/calls", &json!({"version": 1, "tool": tool, "arguments": {"n": 1}}))?;
    if reply["ok"] != true {
        bail!("the call failed: {reply}");
    }
    Ok(reply)
}

impl Echo {
    /// Its name as a tool.
    pub(super) const fn name(&self) -> &'static str {
        self.name
    }

    /// One request to a process that is started for it.
    pub(super) fn plain(&self) -> Result<Duration> {
        let start = Instant::now();
        self.start()?.serve()?;
        Ok(start.elapsed())
    }

    fn start(&self) -> Result<Waiting> {
        let [program, arguments @ ..] = self.program.as_slice() else { bail!("{} has no program", self.name) };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn().with_context(|| format!("starting {}", program.display()))?;
        Ok(Waiting { child, name: self.name })
    }
}

/// A plain process that waits for its request.
struct Waiting {
    child: Child,
    name: &'static str,
}

impl Waiting {
    /// From the request to the process's exit.
    fn serve(mut self) -> Result<Duration> {
        let request =
            json!({"protocol": 1, "operation": "call", "call_id": "x", "tool": self.name, "arguments": {"n": 1}});
        let start = Instant::now();
        self.child.stdin.take().context("stdin was not kept")?.write_all(request.to_string().as_bytes())?;
        let output = self.child.wait_with_output()?;
        let took = start.elapsed();
        if !output.status.success() || serde_json::from_slice::<Value>(&output.stdout).is_err() {
            bail!("{} ended with {} and wrote {:?}", self.name, output.status, String::from_utf8_lossy(&output.stdout));
        }
        Ok(took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_echo_has_its_manifest() {
        for name in ["echo_c", "echo_bun", "echo_python", "echo_java"] {
            assert!(fs::read_to_string(source("tools").join(name).join("tool.toml")).unwrap().contains(name));
        }
    }
}
