//! `agentctl spilled ID REFERENCE`: a result that was too large for the conversation.

use std::process::ExitCode;

use clap::Args;
use serde_json::value::RawValue;
use toolproto::digest::Digest;
use toolproto::ids::JobId;

use crate::client::Context;
use crate::client::failure::Failure;

/// Print a result that was kept apart.
#[derive(Debug, Args)]
#[command(
    after_help = "Prints the whole result, as one line of JSON. The reference stands in what the call answered, as `$spilled`."
)]
pub(crate) struct Spilled {
    /// The job of the call
    id: JobId,
    /// The reference, sha256:…
    reference: Digest,
}

impl Spilled {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let path = format!("/jobs/{}/spilled/{}", self.id, self.reference);
        let result: Box<RawValue> = context.daemon.get(&path).await?;
        context.output.line(result.get())?;
        Ok(ExitCode::SUCCESS)
    }
}
