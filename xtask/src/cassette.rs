//! `cargo xtask cassette`: records the example's conversation anew.
//!
//! To be run after a change of the example's agent or tools: the recorded conversation holds what the tools returned, and
//! the `replay` provider refuses to answer a conversation that differs. The model here is a scripted one that agentd asks
//! over HTTP like any other; the calls and their results are real.

use std::fs;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::demo::{self, Daemon};
use crate::example::{self, AGENT, ModelServer, Staged};
use crate::process;
use crate::project::{self, Profile};
use crate::scripted_model::ScriptedModel;

/// The file that the daemon records into.
const RECORDED: &str = "recorded.jsonl";

/// Records and puts the cassette into its place in the checkout.
pub(crate) fn run() -> Result<()> {
    demo::require_root()?;
    demo::build(Profile::Debug)?;
    let folder = project::target()?.join("cassette");
    let workspace = demo::fresh_workspace(&folder)?;
    let model = ScriptedModel::listen()?;
    let server = ModelServer { base_url: model.base_url()?, model: "scripted".to_owned(), api_key: None };
    model.serve();
    let staged = Staged::prepare(&folder, Some(&server))?;
    staged.record_into(RECORDED)?;
    fs::copy(staged.input(), workspace.join("birdstrikes.csv"))?;

    let daemon = Daemon::start(&staged, &folder.join("agentd.log"), Profile::Debug)?;
    let goal = staged.goal()?.to_string();
    let mut command = daemon.agentctl(["run", AGENT, "--goal", &goal, "--workspace"])?;
    let result: Value = serde_json::from_str(&process::capture(command.arg(&workspace))?.1).context("no result")?;
    if result["status"] != "success" {
        bail!("the job that was to be recorded failed: {result:#}");
    }
    let place = project::root().join("examples/config/cassettes/quarterly-report.jsonl");
    fs::create_dir_all(place.parent().unwrap_or(&place))?;
    example::copy_file(&staged.state().join("ledger").join(RECORDED), &place, 0o644)?;
    eprintln!("recorded {}", place.display());
    Ok(())
}
