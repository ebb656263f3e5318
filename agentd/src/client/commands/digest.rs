//! `agentctl digest DIR`: the tree digest that receipts name, computed here.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use sandbox::workspace::scan::{TreeLimits, scan};

use crate::client::Context;
use crate::client::failure::Failure;

/// Print the digest of a directory as receipts name it.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  agentctl digest ./work\n\nNeeds no daemon. Compare it with `after` in the last receipt."
)]
pub(crate) struct Digest {
    /// The directory
    dir: PathBuf,
}

impl Digest {
    pub(crate) fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let dir = std::fs::File::open(&self.dir).map_err(|error| Failure::file(&self.dir, error))?;
        let tree = scan(dir.as_fd(), &TreeLimits::default())
            .map_err(|error| Failure::Input(format!("{}: {error}", self.dir.display())))?;
        let digest = tree.digest();
        if context.output.json {
            context.output.value(&serde_json::json!({"digest": digest}))?;
        } else {
            context.output.line(&digest.to_string())?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
