//! A strict scripted model server, by hand: three wire formats, real refusals, faults from a script.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;

use agentd_tests::model_server::{ModelServer, Recorded, Reply, Script};
use anyhow::Context;
use clap::Parser;
use serde_json::json;

/// Answers OpenAI chat completions, OpenAI Responses and Anthropic Messages from a script, and refuses what the real
/// providers refuse.
#[derive(Parser)]
struct Arguments {
    /// The script, JSON or (by its name's ending) TOML.
    script: PathBuf,
    /// Where to listen; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Appends each request and what became of it to this file, as JSON Lines.
    #[arg(long)]
    record: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let script = Script::read(&arguments.script)?;
    let record = match &arguments.record {
        Some(path) => {
            let file = File::options().create(true).append(true).open(path);
            Some(Mutex::new(file.with_context(|| format!("cannot open {}", path.display()))?))
        }
        None => None,
    };
    let observer = move |recorded: &Recorded| {
        let reply = match &recorded.reply {
            Reply::Turn(number) => format!("turn {number}"),
            Reply::Fault(number) => format!("fault before turn {number}"),
            Reply::Refused(refusal) => format!("refused with {}: {}", refusal.status, refusal.message),
        };
        eprintln!("{:?} request: {reply}", recorded.format);
        if let Some(file) = &record
            && let Ok(mut file) = file.lock()
        {
            let line = json!({"at_ms": recorded.at.as_millis(), "format": format!("{:?}", recorded.format), "reply": reply, "body": recorded.body});
            if let Err(error) = writeln!(file, "{line}") {
                eprintln!("cannot record: {error}");
            }
        }
    };
    let server = ModelServer::listen(script, arguments.listen, Some(Box::new(observer)))
        .with_context(|| format!("cannot listen on {}", arguments.listen))?;
    println!("{}", server.base_url());
    server.wait();
    Ok(())
}
