//! What agentd says, and what the workers answer.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Instant;

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::{
    Claims, Envelope, Outcome, OutcomeKind, Seal, SignedEvidence, Statement, Usage, WorkspaceChange, WorkspaceState,
};

use super::Service;
use super::withdrawing::{is_promise, without_changes};
use crate::launcher::calls::{Call, Output};
use crate::launcher::grants::{Asked, Phase, worker_failure};
use crate::launcher::kept::Durable;
use crate::launcher::key::{ReceiptKey, SignError};
use crate::launcher::program;
use crate::protocol::{Application, ApplyFailure, Drafted, FromLauncher, Program, Receipted, ToLauncher};
use crate::workspace::worker::{Answer, LockKind};

/// How many entries evidence may name that travels with the receipt around it.
const MOST_CHANGES: usize = 1000;

/// Whether the receipt that was drafted before can stand around this: nothing was withheld, and nothing is unproven.
fn stands(workspace: &WorkspaceChange) -> bool {
    let is_withheld = matches!(workspace.state, WorkspaceState::Conflict | WorkspaceState::Discarded);
    !is_withheld && workspace.is_attested() && workspace.entries() <= MOST_CHANGES
}

/// Puts a receipt around evidence and signs it, and what follows it.
fn receipt_around(
    key: &ReceiptKey,
    drafted: Drafted,
    evidence: &SignedEvidence,
    evidence_head: Option<Digest>,
) -> Result<Receipted, SignError> {
    let Drafted { draft, seal } = drafted;
    let mut envelope = Envelope::unsigned(&Statement::about(draft.around(evidence.clone())))?;
    envelope.signatures.push(key.sign_payload(&envelope.payload)?);
    let seal = match seal {
        Some(seal) => Some(key.sign_seal(&envelope, Seal { evidence_head, ..seal })?),
        None => None,
    };
    Ok(Receipted { envelope, seal })
}

impl Service {
    pub(super) fn take_message(&mut self, message: ToLauncher, descriptors: Vec<OwnedFd>) {
        match message {
            ToLauncher::Admit { job, workspace, agent, limits } => {
                self.admit(job, workspace, agent, limits, descriptors);
            }
            ToLauncher::Readmit { job, receipts, dangling } => self.readmit(job, receipts, &dangling),
            ToLauncher::Warm { job, tool, narrow } => self.warm(job, tool, narrow),
            ToLauncher::Probe { call, runtime, time_ms } => self.probe(call, &runtime, time_ms),
            ToLauncher::Launch { job, call, attempt_of, program, time_ms, narrow, gated } => {
                self.launch(job, (call, attempt_of), &program, time_ms, &narrow, (descriptors, gated));
            }
            ToLauncher::Stop { call } => self.stop(call),
            ToLauncher::Settle { call, commit, claims, receipt } => self.settle(call, commit, claims, receipt),
            ToLauncher::Stored { call } => self.stored(call),
            ToLauncher::Decide { call, stored } => self.decide(call, stored),
            ToLauncher::Reload => {
                let refused = self.reload().err();
                self.tell(&FromLauncher::Reloaded { refused }, Vec::new());
            }
            ToLauncher::Record { job, call, program, claims } => self.record(job, call, &program, claims),
            ToLauncher::Sign { job, call, payload } => self.sign(job, call, &payload),
            ToLauncher::Close { job, keep } => self.close(job, keep),
        }
    }

    fn settle(&mut self, id: CallId, commit: bool, claims: Claims, drafted: Box<Drafted>) {
        match self.calls.get_mut(&id) {
            Some(call) if call.record().is_some() && call.verdict.is_none() => {
                (call.verdict, call.drafted) = (Some(claims), Some(drafted));
                match call.layer.filter(|_| call.workspace.is_none()) {
                    Some(layer) => self.take_over(id, layer, commit),
                    None => self.seal_if_done(id),
                }
            }
            Some(_) => self.misuse("the call has not ended, or has its verdict already", None, Some(id)),
            None => self.misuse("there is no such call", None, Some(id)),
        }
    }

    fn record(&mut self, job: JobId, id: CallId, program: &Program, claims: Claims) {
        let is_known = |grant: &&mut crate::launcher::grants::Grant| {
            grant.phase == Phase::Live && !grant.chain.has_sealed(id) && !self.calls.contains_key(&id)
        };
        let Some(uid) = self.grants.get_mut(&job).filter(is_known).map(|grant| grant.peer.uid) else {
            return self.misuse("the job has no live grant, or the call is known already", Some(job), Some(id));
        };
        let identity = program::identify(&self.parts.catalog, program);
        let mut call = Call::ordered((job, id), identity, Output::Streams, Instant::now());
        let outcome = Outcome { kind: OutcomeKind::Refused, code: claims.code, exit_status: None, signal: None };
        call.refuse(outcome, Usage::default());
        call.workspace = Some(WorkspaceChange::none());
        call.verdict = Some(claims);
        self.seal(&mut call, uid);
    }

    fn sign(&mut self, job: JobId, call: Option<CallId>, payload: &str) {
        let is_sealed = self.grants.get(&job).is_some_and(|grant| call.is_none_or(|call| grant.chain.has_sealed(call)));
        if !is_sealed {
            return self.misuse("the job has no grant, or the call is not sealed", Some(job), call);
        }
        match self.parts.key.sign_payload(payload) {
            Ok(signature) => {
                self.tell(&FromLauncher::Signed { job, call, signature: Some(signature) }, Vec::new());
                self.receipted(job);
            }
            Err(error) => self.misuse(error.to_string(), Some(job), call),
        }
    }

    /// A call has its receipt. agentd goes to the disk now, and the launcher does what waited for that. A direct call's job closes
    /// next, and is not kept from it.
    fn receipted(&mut self, job: JobId) {
        if self.grants.get(&job).is_some_and(|grant| grant.is_kept) {
            self.clear_away(job);
            let orders = self.take_orders(job);
            orders.iter().for_each(|order| self.follow_order(order));
        }
    }

    /// Seals a call that has everything: its end, the workspace's part, the verdict.
    pub(super) fn seal_if_done(&mut self, id: CallId) {
        let Some(call) = self.calls.get(&id) else { return };
        if !call.is_over() || call.workspace.is_none() || call.verdict.is_none() {
            return;
        }
        let Some(mut call) = self.calls.remove(&id) else { return };
        if let Some(uid) = self.grants.get(&call.job).map(|grant| grant.peer.uid) {
            self.seal(&mut call, uid);
        }
        self.close_if_done(call.job);
    }

    fn seal(&mut self, call: &mut Call, uid: u32) {
        let Some(evidence) = call.evidence(uid) else { return };
        let Some(grant) = self.grants.get_mut(&call.job) else { return };
        match grant.chain.seal(evidence, &self.parts.key) {
            Ok(evidence) => {
                if let Some(workspace) = grant.workspace.as_mut().filter(|_| is_promise(&evidence.record)) {
                    workspace.promised.insert(call.id, without_changes(&evidence.record));
                }
                let evidence_head = grant.chain.heads().last().copied();
                self.keep_chain(call.job);
                let kept = call.kept.clone();
                let drafted = call.drafted.take().filter(|_| stands(&evidence.record.workspace));
                let receipt = match drafted
                    .map(|drafted| receipt_around(&self.parts.key, *drafted, &evidence, evidence_head))
                    .transpose()
                {
                    Ok(receipt) => receipt,
                    Err(error) => return self.misuse(error.to_string(), Some(call.job), Some(call.id)),
                };
                let is_receipted = receipt.is_some();
                let receipt = receipt.map(Box::new);
                let message = FromLauncher::Sealed { call: call.id, evidence: Box::new(evidence), kept, receipt };
                self.tell(&message, Vec::new());
                if is_receipted {
                    self.receipted(call.job);
                }
            }
            Err(error) => self.misuse(error.to_string(), Some(call.job), Some(call.id)),
        }
    }

    /// The chain of evidence of a job that outlives the launcher has grown.
    pub(super) fn keep_chain(&self, job: JobId) {
        let Some(grant) = self.grants.get(&job).filter(|grant| grant.is_kept) else { return };
        let launcher = self.parts.state.launcher().as_fd();
        if let Err(error) = grant.kept().write(launcher, job, Durable::Later) {
            // The call has its evidence; it is the job that cannot go on after a crash.
            tracing::error!(%job, %error, "the grown chain of evidence is not kept");
        }
    }

    /// Takes what a worker has answered.
    pub(super) fn take_answers(&mut self, job: JobId) {
        loop {
            let now = Instant::now();
            let Some(workspace) = self.grants.get_mut(&job).and_then(|grant| grant.workspace.as_mut()) else { return };
            let Some(worker) = workspace.worker.as_mut() else { return };
            let answer = match worker.receive() {
                Ok(Some(answer)) => answer,
                Ok(None) => return,
                Err(error) => {
                    let (code, message) = worker_failure(&error);
                    return self.lose_worker(job, code, &message);
                }
            };
            match (workspace.answered(now), answer) {
                (Some(Asked::Open), Answer::Opened { dir }) => self.opened(job, dir),
                (Some(Asked::Open), Answer::Refused { code, message } | Answer::Failed { code, message, .. }) => {
                    return self.lose_worker(job, code, &message);
                }
                (Some(Asked::Lock(call, kind)), Answer::Locked) => {
                    workspace.held = Some(kind);
                    self.hold(call, now);
                }
                (Some(Asked::Lock(call, _)), Answer::Busy) => self.busy(job, call),
                (Some(Asked::Lock(call, _)), Answer::Failed { code, message, .. }) => {
                    self.fail(call, program::failure(code, message));
                }
                (Some(Asked::LockAgain), Answer::Locked) => workspace.held = Some(LockKind::Exclusive),
                (Some(Asked::Unlock), Answer::Done) => {}
                (
                    Some(Asked::Before(call) | Asked::WholeBefore(call)),
                    Answer::Scanned { digest, unattributed, .. },
                ) => {
                    self.start_over(call, digest, unattributed);
                }
                (Some(Asked::Before(call) | Asked::WholeBefore(call)), Answer::Failed { code, message, .. }) => {
                    self.fail(call, program::failure(code, message));
                }
                (Some(Asked::After(_)), Answer::Scanned { .. }) => {}
                (Some(Asked::Compare(call)), Answer::Compared { before, after, changes }) => {
                    self.compared(call, before, after, changes);
                }
                (Some(Asked::Prepare(call, layer)), Answer::Prepared { before, after, changes }) => {
                    self.prepared(call, layer, before, after, changes);
                }
                (Some(Asked::Prepare(call, layer)), Answer::Failed { code, message, denied }) => {
                    self.unprepared(call, layer, (code, &message), denied);
                }
                (Some(Asked::Apply(call, layer)), Answer::Done) => self.applied(job, call, layer, None),
                (Some(Asked::Apply(call, layer)), Answer::GivenUp { code, message, denied }) => {
                    self.given_up(job, call, layer, ApplyFailure { code, message }, denied);
                }
                (Some(Asked::Apply(call, layer)), Answer::Failed { code, message, .. }) => {
                    self.applied(job, call, layer, Some(ApplyFailure { code, message }));
                }
                (Some(Asked::Foresee(call, to)), Answer::Prepared { before, after, changes }) => {
                    self.foreseen(call, to, before, after, changes);
                }
                (Some(Asked::Foresee(call, _)), Answer::Failed { code, message, .. }) => {
                    self.fail(call, program::failure(code, message));
                }
                (Some(Asked::Roll(call, ..)), Answer::Done) => self.rolled(job, call, None),
                (Some(Asked::Roll(call, ..)), Answer::GivenUp { code, message, denied }) => {
                    self.not_rolled(job, call, ApplyFailure { code, message }, denied);
                }
                (Some(Asked::Roll(call, ..)), Answer::Failed { code, message, .. }) => {
                    self.rolled(job, call, Some(ApplyFailure { code, message }));
                }
                (Some(Asked::Remove(_)), Answer::Done) => {}
                (Some(Asked::Remove(layer)), Answer::Failed { message, .. }) => {
                    tracing::warn!(%job, layer, message, "a layer stays until the job's end");
                }
                // Without a second reading there is nothing to compare; the answer to Compare says so once more.
                (Some(Asked::After(_) | Asked::Compare(_)), Answer::Failed { code, message, .. }) => {
                    tracing::warn!(%job, %code, message, "the workspace cannot be read after a call");
                    self.unread(job, code);
                }
                (asked, answer) => {
                    tracing::error!(%job, ?asked, ?answer, "a worker's answer does not fit");
                    return self.lose_worker(
                        job,
                        Code::WorkspaceUnavailable,
                        "the workspace's worker broke its protocol",
                    );
                }
            }
        }
    }

    /// A worker is of no use any more: what waits for it goes on without.
    pub(super) fn lose_worker(&mut self, job: JobId, code: Code, message: &str) {
        let Some(grant) = self.grants.get_mut(&job) else { return };
        let phase = grant.phase;
        let Some(workspace) = grant.workspace.as_mut() else { return };
        tracing::warn!(%job, message, "the workspace's worker is lost");
        let asked = workspace.give_up();
        if phase == Phase::Opening {
            return self.withdraw(job, code, message.to_owned());
        }
        // A decided commit is carried out by the next worker; nobody may see the workspace without it.
        let is_replaced = workspace.start_again(Instant::now());
        let unapplied = if is_replaced { BTreeMap::new() } else { std::mem::take(&mut workspace.decided) };
        workspace.prepared.extend(unapplied.iter().map(|(call, layer)| (*call, *layer)));
        let rolling = workspace.rollback.filter(|rollback| rollback.is_decided && !is_replaced);
        for call in unapplied.into_keys().chain(rolling.map(|rollback| rollback.call)) {
            let application = Application::Failed(ApplyFailure { code, message: message.to_owned() });
            self.tell(&FromLauncher::Applied { call, application }, Vec::new());
        }
        for asked in asked {
            if let Asked::Before(call) | Asked::WholeBefore(call) | Asked::Lock(call, _) | Asked::Foresee(call, _) =
                asked
            {
                self.fail(call, program::failure(code, message.to_owned()));
            }
        }
        self.unread(job, code);
        self.close_if_done(job);
    }

    /// Calls of the job whose second reading failed, or whose commit cannot be prepared any more.
    fn unread(&mut self, job: JobId, code: Code) {
        let waiting = self
            .calls
            .values_mut()
            .filter(|call| call.job == job && call.record().is_some() && call.workspace.is_none());
        let mut ids = Vec::new();
        for call in waiting {
            call.leave_unproven(code);
            ids.push(call.id);
        }
        ids.into_iter().for_each(|id| self.seal_if_done(id));
    }
}
