//! `agentctl rollback ID --to SEQ`: takes a workspace back to where a receipt left it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use toolproto::api::RollbackReply;
use toolproto::ids::JobId;

use super::write_receipt;
use crate::client::Context;
use crate::client::failure::Failure;

/// Take the workspace of an ended job back to where one of its receipts left it, with all that came after.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  agentctl rollback 06ab3tq4k1vfl2n8o0q1r5s7tg --to 2\n\n\
    --to 0 is the state before the job. A rollback is a job of its own, with a receipt; its id is printed, and\n\
    `agentctl rollback THAT-ID --to 0` undoes it, until something else changes the workspace.")]
pub(crate) struct Rollback {
    /// The job
    id: JobId,
    /// The receipt's number; 0 for the state before the job
    #[arg(long, value_name = "SEQ")]
    to: u64,
    /// Write the rollback's receipt to this file
    #[arg(long, value_name = "FILE")]
    receipt: Option<PathBuf>,
}

impl Rollback {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let path = format!("/jobs/{}/rollback", self.id);
        let reply: RollbackReply = context.daemon.post(&path, &json!({"to": self.to})).await?;
        write_receipt(self.receipt.as_deref(), &reply.receipt)?;
        context.output.value(&json!({"version": reply.version, "job_id": reply.job_id, "call_id": reply.call_id}))?;
        Ok(ExitCode::SUCCESS)
    }
}
