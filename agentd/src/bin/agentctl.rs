//! `agentctl`, the client of agentd.

use std::process::ExitCode;

use agentd::client::Cli;
use anyhow::Context;
use clap::Parser;

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start the runtime")?;
    Ok(runtime.block_on(cli.run()))
}
