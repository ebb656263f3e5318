//! Rollbacks: implicit jobs of one call that runs nothing and takes a workspace back to where a receipt left it.

use std::os::fd::OwnedFd;
use std::time::Duration;

use sandbox::protocol::{Narrowing, Program, Target};
use serde_json::json;
use toolproto::api::{API_VERSION, RollbackReply};
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId};
use toolproto::job::Problem;
use toolproto::receipt::{Receipt, WorkspaceState};

use super::direct::{Done, Wish};
use super::{Dispatcher, unlinked, unreadable};
use crate::call::{self, Answered};
use crate::caller::Caller;
use crate::launch::{Launch, Order, Stdin};
use crate::ledger::JobKind;
use crate::runner::Shared;

/// How long a rollback may take, waiting for the workspace included.
const LONGEST: Duration = Duration::from_secs(120);

impl<L: Launch> Dispatcher<L> {
    /// Takes the workspace of an ended job to where its receipt `to` left it; 0 is where the job found it. That is a job of its own,
    /// with a receipt, and can be undone in the same way.
    ///
    /// # Errors
    /// NOT_FOUND without such a job, INPUT_INVALID without such a receipt, WORKSPACE_BUSY while a job has the workspace,
    /// WORKSPACE_CONFLICT when somebody else has changed what would be moved, UNDO_UNAVAILABLE when the way back is not kept.
    pub async fn rollback(
        &self,
        caller: &Caller,
        client: OwnedFd,
        id: JobId,
        to: u64,
    ) -> Result<RollbackReply, Problem> {
        let row = self.row(caller, id).await?;
        if row.ended.is_none() {
            return Err(Problem::new(Code::WorkspaceBusy, format!("job {id} has not ended; cancel it, or wait")));
        }
        let workspace = row
            .workspace
            .ok_or_else(|| Problem::new(Code::UndoUnavailable, format!("job {id} had no workspace that is kept")))?;
        let target = target(&self.receipts_of(id).await?, id, to)?;
        let request = json!({"version": API_VERSION, "job_id": id, "to": to});
        let wish = Wish {
            client,
            kind: JobKind::Rollback,
            uid: caller.uid,
            tool: JobKind::Rollback.as_str().to_owned(),
            workspace: Some(workspace),
            request: request.clone(),
        };
        let dispatcher = self.clone();
        let Done { job, call, sealed } = self
            .ended_with_its_caller(wish, move |job, recorded, cancel| async move {
                let call = CallId::generate();
                let Shared { launch, .. } = &*dispatcher.inner.shared;
                let program = Program::Rollback { target };
                let order = Order {
                    job,
                    call,
                    attempt_of: call,
                    program: program.clone(),
                    stdin: Stdin::Bytes(Vec::new()),
                    streams: None,
                    time: LONGEST,
                    narrow: Narrowing::default(),
                    watcher: None,
                    recorded,
                };
                let ended = launch.launch(order, cancel).await.map_err(unlinked)?;
                Ok(call::rolled_back(job, call, program, request, ended).into())
            })
            .await?;
        match sealed.answered {
            Answered::Success { .. } => {
                Ok(RollbackReply { version: API_VERSION, job_id: job, call_id: call, receipt: sealed.envelope })
            }
            Answered::Failure(error) => Err(Problem::new(error.code, error.message)),
        }
    }

    /// A job's receipts, without the sealing one.
    async fn receipts_of(&self, id: JobId) -> Result<Vec<Receipt>, Problem> {
        let envelopes = self.inner.shared.ledger.receipts(id).await.map_err(unreadable)?;
        let mut receipts = Vec::new();
        for (index, envelope) in envelopes.iter().enumerate() {
            match envelope.receipt() {
                Ok(receipt) => receipts.push(receipt),
                // The sealing one.
                Err(_) if index + 1 == envelopes.len() => {}
                Err(error) => return Err(Problem::new(Code::InternalLogicError, error.to_string())),
            }
        }
        Ok(receipts)
    }
}

/// Which call's end or beginning is the state that a receipt left.
fn target(receipts: &[Receipt], id: JobId, to: u64) -> Result<Target, Problem> {
    if to > receipts.len() as u64 {
        let words = format!("job {id} has {} receipts, so there is no receipt {to}", receipts.len());
        return Err(Problem::new(Code::InputInvalid, words));
    }
    let changes =
        |receipt: &&Receipt| matches!(receipt.workspace.state, WorkspaceState::Committed | WorkspaceState::RolledBack);
    if let Some(direct) = receipts.iter().find(|receipt| receipt.workspace.state == WorkspaceState::Direct) {
        let words = format!(
            "receipt {} of job {id} wrote to the workspace directly, of which nothing is kept",
            direct.sequence
        );
        return Err(Problem::new(Code::UndoUnavailable, words));
    }
    let last = receipts.iter().filter(changes).rfind(|receipt| receipt.sequence <= to);
    let next = receipts.iter().filter(changes).find(|receipt| receipt.sequence > to);
    match (last, next) {
        (Some(last), _) => Ok(Target::After(last.call_id)),
        (None, Some(next)) => Ok(Target::Before(next.call_id)),
        (None, None) => Err(Problem::new(
            Code::UndoUnavailable,
            format!("no call of job {id} changed the workspace, so nothing is kept"),
        )),
    }
}
