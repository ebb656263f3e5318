//! `cargo xtask example-tools`: the example's tools, one by one: a call of each with its receipt verified, then the
//! conformance checks.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::demo::{self, Daemon};
use crate::example::Staged;
use crate::process;
use crate::project::{self, Profile};

/// Runs all calls and checks on a daemon of their own.
pub(crate) fn run() -> Result<()> {
    demo::require_root()?;
    let folder = project::target()?.join("example-tools");
    let workspace = demo::fresh_workspace(&folder)?;
    let staged = Staged::prepare(&folder, None)?;
    fs::copy(staged.input(), workspace.join("birdstrikes.csv")).context("putting the records into the workspace")?;
    let daemon = Daemon::start(&staged, &folder.join("agentd.log"), Profile::Debug)?;
    let tools = Tools { daemon: &daemon, staged: &staged, workspace };

    let quarter = staged.goal()?["quarter"].as_str().context("the goal names no quarter")?.to_owned();
    let source = "birdstrikes.csv";
    let figures = tools.call("quarter_figures", &json!({"quarter": quarter, "source": source}))?;
    let earlier = tools.call("quarter_figures", &json!({"quarter": year_before(&quarter)?, "source": source}))?;
    let summary = "Made by calling the tools one by one, without a model.";
    tools.call("render_report", &json!({"figures": figures, "earlier": earlier, "summary": summary}))?;
    let archive = format!("bird-strikes-{quarter}.zip");
    tools.call("pack_report", &json!({"folder": "report", "archive": archive}))?;
    let verdict = tools.call("check_report", &json!({"quarter": quarter, "source": source, "archive": archive}))?;
    if verdict["passed"] != true {
        bail!("check_report found faults: {verdict}");
    }
    for tool in ["quarter_figures", "render_report", "pack_report", "check_report"] {
        tools.check(tool, &folder)?;
    }
    Ok(())
}

struct Tools<'a> {
    daemon: &'a Daemon,
    staged: &'a Staged,
    workspace: PathBuf,
}

impl Tools<'_> {
    /// Calls a tool and verifies the receipt; the tool's result.
    fn call(&self, tool: &str, arguments: &Value) -> Result<Value> {
        let receipt = self.staged.path("receipt.json");
        let mut call = self.daemon.agentctl(["--json", "call", tool, "--args"])?;
        call.arg(arguments.to_string()).arg("--workspace").arg(&self.workspace).arg("--receipt").arg(&receipt);
        let (status, reply) = process::capture(&mut call)?;
        let mut reply: Value = serde_json::from_str(&reply).with_context(|| format!("{tool} printed no reply"))?;
        if !status.success() || reply["ok"] != true {
            bail!("the call of {tool} ended with {status}: {reply}");
        }
        let (status, report) = process::capture(self.daemon.agentctl(["--json", "verify"])?.arg(&receipt))?;
        let report: Value = serde_json::from_str(&report).context("verify printed no report")?;
        if !status.success() || report["valid"] != true || report["receipts"] != 1 {
            bail!("the receipt of {tool} does not verify: {report}");
        }
        println!("call {tool}: ok, its receipt is valid");
        Ok(reply["result"].take())
    }

    /// Runs the conformance checks on a tool's folder.
    fn check(&self, tool: &str, root: &Path) -> Result<()> {
        let mut check = self.daemon.agentctl(["--json", "tools", "check"])?;
        // The only root beneath which this daemon takes workspaces.
        check.arg(self.staged.config().join("tools").join(tool)).env("TMPDIR", root);
        let (status, report) = process::capture(&mut check)?;
        let report: Value = serde_json::from_str(&report).with_context(|| format!("no report on {tool}"))?;
        let probes = report["probes"].as_array().map_or(0, Vec::len);
        // With fewer there were no valid arguments to call it with.
        if !status.success() || report["passed"] != true || probes < 10 {
            bail!("tools check {tool} ended with {status}: {report:#}");
        }
        println!("tools check {tool}: passed, {probes} probes");
        Ok(())
    }
}

fn year_before(quarter: &str) -> Result<String> {
    let (year, number) = quarter.split_once('-').with_context(|| format!("`{quarter}` is no quarter"))?;
    let year: u32 = year.parse().with_context(|| format!("`{quarter}` is no quarter"))?;
    Ok(format!("{}-{number}", year - 1))
}
