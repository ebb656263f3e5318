//! `agentctl say`, `approve` and `deny`: what a person tells a running job.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use toolproto::api::Steered;
use toolproto::ids::{CallId, JobId};

use crate::client::Context;
use crate::client::failure::Failure;

/// Tell a running job something; the model hears it at its next turn.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  agentctl say 06ab3tq4k1vfl2n8o0q1r5s7tg 'leave the tests alone'")]
pub(crate) struct Say {
    /// The job
    id: JobId,
    /// What
    text: String,
}

/// Let a call run that waits for that.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  agentctl approve 06ab3tq4k1vfl2n8o0q1r5s7tg 06ab3tq4k1vfl2n8o0q1r5s7u0\n\nThe calls that wait stand in `agentctl show ID`."
)]
pub(crate) struct Approve {
    /// The job
    id: JobId,
    /// The call
    call: CallId,
}

/// Refuse a call that waits for a decision.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  agentctl deny 06ab3tq4k1vfl2n8o0q1r5s7tg 06ab3tq4k1vfl2n8o0q1r5s7u0 --reason 'not on a Friday'"
)]
pub(crate) struct Deny {
    /// The job
    id: JobId,
    /// The call
    call: CallId,
    /// Why; the model is told
    #[arg(long)]
    reason: Option<String>,
}

impl Say {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        steer(context, &format!("/jobs/{}/messages", self.id), &json!({"text": self.text})).await
    }
}

impl Approve {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let body = json!({"call_id": self.call, "decision": "approve"});
        steer(context, &format!("/jobs/{}/approvals", self.id), &body).await
    }
}

impl Deny {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let body = json!({"call_id": self.call, "decision": "deny", "reason": self.reason});
        steer(context, &format!("/jobs/{}/approvals", self.id), &body).await
    }
}

async fn steer(context: &Context, path: &str, body: &serde_json::Value) -> Result<ExitCode, Failure> {
    let steered: Steered = context.daemon.post(path, body).await?;
    if context.output.json {
        context.output.value(&steered)?;
    }
    Ok(ExitCode::SUCCESS)
}
