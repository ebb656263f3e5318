//! Whole jobs on a scripted model: what a turn costs beside its call, and that calls which only read run at the same time.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::disk::Disk;
use super::goal::{Goal, OF_FLOOR};
use super::samples::{Samples, milliseconds};
use super::{Bench, Row, calls, client, disk, source};
use crate::demo::Daemon;
use crate::example::Staged;
use crate::process::{self, Conversation};
use crate::project::{self, Profile};

/// How many turns the long conversation has, each with one call.
const TURNS: usize = 40;
/// How many calls the wide turn has.
const WIDE: usize = 8;
/// How many turns the conversation has in which each call changes a file.
const EDITS: usize = 21;
/// How often each conversation is held.
const ROUNDS: usize = 7;
/// How long the model's server may take to start, and a job to end.
const PATIENCE: Duration = Duration::from_secs(60);
const LANGGRAPH: [&str; 2] = ["langgraph==1.2.24", "langgraph-checkpoint-sqlite==3.1.2"];

/// The scripted model's server; it goes with this value.
pub(super) struct Model {
    base_url: String,
    _server: Conversation,
}

/// Starts the model and puts the agent that asks it, and its tool, into the staged configuration.
pub(super) fn install(staged: &Staged, folder: &Path, profile: Profile) -> Result<Model> {
    let script = folder.join("model.toml");
    fs::write(&script, conversations()).with_context(|| format!("writing {}", script.display()))?;
    let mut command = Command::new(project::program("scripted-model", profile)?);
    command.arg(&script).stderr(fs::File::create(folder.join("model.log"))?);
    let server = Conversation::start(&mut command)?;
    let base_url = server.hear(PATIENCE)?.context("the scripted model does not start")?;
    for tool in ["edit", "nap"] {
        crate::example::copy_tree(&source("tools").join(tool), &staged.config().join("tools").join(tool))?;
    }
    write_agent(staged, "bench", &base_url)?;
    fs::write(staged.config().join("schemas/bench.json"), "{\"type\":\"object\"}")?;
    Ok(Model { base_url, _server: server })
}

/// Puts an agent that asks this model into the staged configuration.
pub(super) fn write_agent(staged: &Staged, name: &str, base_url: &str) -> Result<()> {
    let agent = format!(
        "version = 1\nname = \"{name}\"\ndescription = \"Measured.\"\nsystem_prompt = \"Do what the goal says.\"\ntools = [\"echo_c\", \"edit\", \"nap\"]\n\n\
         [model]\nprovider = \"openai\"\nbase_url = \"{base_url}\"\nmodel = \"scripted\"\n\n\
         [goal]\nschema = \"../schemas/bench.json\"\n\n[result]\nschema = \"../schemas/bench.json\"\n\n\
         [budget]\nmax_turns = 100\nmax_tool_calls = 200\nwall_seconds = 3600\n"
    );
    let file = staged.config().join(format!("agents/{name}.toml"));
    fs::write(&file, agent).with_context(|| format!("writing {}", file.display()))
}

/// The script: many turns of one call, one turn of one call, one turn of many.
fn conversations() -> String {
    let mut text = "order = \"transcript\"\n".to_owned();
    let mut converse = |when: &str, turns: &[String]| {
        // Writing into a string does not fail.
        let _ = writeln!(text, "[[conversations]]\nwhen = \"{when}\"");
        for calls in turns {
            let _ = writeln!(text, "[[conversations.turns]]\ncalls = [{calls}]");
        }
        text.push_str("[[conversations.turns]]\ntext = '{\"done\":true}'\n");
    };
    let call = |tool: &str, n: usize| format!("{{ name = \"{tool}\", arguments = {{ n = {n} }} }}");
    converse("many-turns", &(0..TURNS).map(|n| call("echo_c", n)).collect::<Vec<_>>());
    converse("many-edits", &(0..EDITS).map(|n| call("edit", n)).collect::<Vec<_>>());
    converse("one-edit", &[call("edit", 0)]);
    converse("one-nap", &[call("nap", 0)]);
    converse("wide-naps", &[(0..WIDE).map(|n| call("nap", n)).collect::<Vec<_>>().join(", ")]);
    text
}

/// Measures jobs, in turns with what they are compared to.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let python = langgraph()?;
    let daemon = &bench.daemon("jobs", "")?;
    eprintln!("jobs, {ROUNDS} rounds");
    let (mut turn, mut direct, mut graph_turn, mut graph_asked) = <(Samples, Samples, Samples, Samples)>::default();
    let (mut one, mut wide, mut append) = <(Samples, Samples, Samples)>::default();
    let mut disk = Disk::of(&bench.staged.state(), disk::BLOCK_OF_CALL)?;
    for round in 0..ROUNDS {
        process::check_interrupt()?;
        // One more turn says that it is done.
        turn.push(job(daemon, "many-turns", None)? / (u32::try_from(TURNS)? + 1));
        for _ in 0..bench.effort.rounds.min(TURNS) {
            let start = Instant::now();
            calls::call(daemon.socket(), "echo_c")?;
            direct.push(start.elapsed());
            append.push(disk.append()?);
        }
        let (whole, asked) =
            graph(&python, &bench.conversations, &bench.folder.join(format!("langgraph-{round}.sqlite")))?;
        graph_turn.push(whole);
        graph_asked.push(asked);
        one.push(job(daemon, "one-nap", None)?);
        wide.push(job(daemon, "wide-naps", None)?);
    }
    let own = |whole: Duration, others: Duration| whole.saturating_sub(others);
    let overhead = own(turn.p50(), direct.p50() + graph_asked.p50());
    let theirs = own(graph_turn.p50(), graph_asked.p50());
    let durable = append.p50();
    let beside_theirs = Goal::at_most(
        overhead,
        [
            ("0.1 × LangGraph's".to_owned(), theirs / 10),
            (format!("{OF_FLOOR} × a durable write"), durable.mul_f64(OF_FLOOR)),
        ],
    );
    let alone = Goal::at_most(overhead, [("2 ms + a durable write".to_owned(), Duration::from_millis(2) + durable)]);
    Ok(vec![
        Row::new(
            format!("a turn of a job: request to the model, one call, durable ledger; {TURNS} turns"),
            format!("p50 {:.2} ms", milliseconds(turn.p50())),
            format!(
                "less the request ({:.2} ms) and the same call made directly ({:.2} ms): {:.2} ms; LangGraph with its SQLite checkpoints, less the \
                 request, its tool a function: {:.2} ms, {:.1} times as much; {beside_theirs}; {alone}",
                milliseconds(graph_asked.p50()),
                milliseconds(direct.p50()),
                milliseconds(overhead),
                milliseconds(theirs),
                theirs.as_secs_f64() / overhead.as_secs_f64().max(1e-6),
            ),
        ),
        Row::new(
            format!("a job of one turn with {WIDE} read-only calls that sleep 300 ms"),
            wide.text(),
            format!("{:.2} × the job with one such call ({})", wide.times(&one), one.text()),
        ),
    ])
}

/// A turn of a job whose call changes a file of the workspace, after the job's first: that has read the workspace whole.
pub(super) fn later_edit(daemon: &Daemon, workspace: &Path) -> Result<Duration> {
    let (many, one) = (job(daemon, "many-edits", Some(workspace))?, job(daemon, "one-edit", Some(workspace))?);
    Ok(many.saturating_sub(one) / (u32::try_from(EDITS)? - 1))
}

/// From submission to result.
fn job(daemon: &Daemon, what: &str, workspace: Option<&Path>) -> Result<Duration> {
    let start = Instant::now();
    let body = json!({"version": 1, "agent": "bench", "goal": {"do": what}, "workspace": workspace});
    let accepted = client::request(daemon.socket(), "POST", "/v1/jobs", &body)?;
    let id = accepted["job_id"].as_str().context("a job without id")?;
    let path = format!("/v1/jobs/{id}/result?wait=30");
    while start.elapsed() < PATIENCE {
        let result = client::request(daemon.socket(), "GET", &path, &Value::Null)?;
        match result["status"].as_str() {
            Some("success") => return Ok(start.elapsed()),
            Some("failed") => bail!("the job failed: {result}"),
            _ => {}
        }
    }
    bail!("the job {what} did not end")
}

/// A turn of LangGraph's, and its request to the model.
fn graph(python: &Path, model: &Model, database: &Path) -> Result<(Duration, Duration)> {
    let mut command = Command::new(python);
    command.arg(source("langgraph_turns.py")).arg(&model.base_url).arg(database).arg("many-turns");
    let said = process::output(&mut command)?;
    let mut figures = said.split_whitespace().map(str::parse::<f64>);
    let mut next = || figures.next().context("LangGraph said too little")?.context("LangGraph said no number");
    let milliseconds = |figure: f64| Duration::from_secs_f64(figure / 1000.0);
    Ok((milliseconds(next()?), milliseconds(next()?)))
}

/// A Python with LangGraph, in an environment of its own.
fn langgraph() -> Result<PathBuf> {
    let folder = project::target()?.join("tools/langgraph");
    // Made last, so that an installation that broke off is made again.
    let complete = folder.join("complete");
    if !complete.exists() {
        eprintln!("installing LangGraph into {}", folder.display());
        process::run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        process::run(Command::new(folder.join("bin/pip")).args(["install", "--quiet"]).args(LANGGRAPH))?;
        fs::write(&complete, "")?;
    }
    Ok(folder.join("bin/python3"))
}
