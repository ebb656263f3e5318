//! What a job gets receipts for: calls that ended, calls that never ran, and the job itself.

use std::time::Duration;

use sandbox::protocol::{Application, Withdrawal};
use toolproto::code::Code;
use toolproto::ids::CallId;
use toolproto::job::ReceiptsHead;
use toolproto::receipt::Receipt;

use super::{Abort, Runner, Shared};
use crate::call::{self, Ran, Withdrawn};
use crate::guards::Attempts;
use crate::launch::Launch;
use crate::ledger::StoredReceipt;
use crate::session::event::{CallRecord, Event, Interruption, Plan, PlannedCall, Refusal};
use crate::spill;

impl<L: Launch> Runner<L> {
    /// Gives each call of an answer that cannot be followed its receipt.
    pub(super) async fn refuse(&mut self, plan: Plan, refusal: Refusal) -> Result<(), Abort> {
        let (mut results, mut receipts, mut chain) = (Vec::new(), Vec::new(), self.session.receipts());
        for planned in &plan.calls {
            let why = planned.refusal.as_ref().unwrap_or(&refusal);
            let (record, receipt) = self.record_refused(planned, why, chain).await?;
            (chain.count, chain.head) = (receipt.sequence, record.receipt.map(|receipt| receipt.digest));
            results.push(record);
            receipts.push(receipt);
        }
        self.append(Event::PlanRefused { plan, refusal, results }, receipts).await
    }

    pub(super) async fn interrupt(&mut self, cause: Interruption, calls: &[CallId]) -> Result<(), Abort> {
        let (mut results, mut receipts, mut chain) = (Vec::new(), Vec::new(), self.session.receipts());
        let planned: Vec<PlannedCall> =
            calls.iter().filter_map(|call| self.session.call(*call)).map(|one| one.planned.clone()).collect();
        let why = Refusal { code: Code::Cancelled, message: format!("not started: {}", cause.code().meaning()) };
        for planned in &planned {
            let (record, receipt) = self.record_refused(planned, &why, chain).await?;
            (chain.count, chain.head) = (receipt.sequence, record.receipt.map(|receipt| receipt.digest));
            results.push((planned.call, record));
            receipts.push(receipt);
        }
        self.append(Event::Interrupted { cause, results }, receipts).await
    }

    async fn record_refused(
        &mut self,
        planned: &PlannedCall,
        why: &Refusal,
        chain: ReceiptsHead,
    ) -> Result<(CallRecord, StoredReceipt), Abort> {
        let error = call::failure(why.code, why.message.clone(), serde_json::Value::Null);
        let ran = call::refused(&self.offer.tools, self.asked(planned, Duration::ZERO), error);
        let sealed = call::seal(&self.shared.launch, &self.shared.origin, chain, ran).await?;
        self.evidence_head = Some(sealed.evidence);
        let receipt = sealed.stored(planned.call, chain.count + 1);
        Ok((sealed.record, receipt))
    }

    /// Gives each attempt its receipt; the last one answers the call.
    pub(super) async fn call_ended(&mut self, call: CallId, attempts: Attempts) -> Result<(), Abort> {
        let (mut receipts, mut chain) = (Vec::new(), self.session.receipts());
        let (mut earlier_cpu, mut is_unproven) = (0, false);
        for ran in attempts.earlier {
            let record = self.seal_attempt(ran, &mut chain, &mut receipts).await?;
            earlier_cpu += record.usage.map_or(0, |usage| usage.cpu_usec);
            is_unproven |= record.unproven;
        }
        let mut record = self.seal_attempt(attempts.last, &mut chain, &mut receipts).await?;
        if let Some(usage) = &mut record.usage {
            usage.cpu_usec = usage.cpu_usec.saturating_add(earlier_cpu);
        }
        record.unproven |= is_unproven;
        let event = match record.code {
            None => Event::ToolCompleted { call, record },
            Some(_) => Event::ToolFailed { call, record },
        };
        self.append(event, receipts).await
    }

    pub(super) async fn seal_attempt(
        &mut self,
        ran: Ran,
        chain: &mut ReceiptsHead,
        receipts: &mut Vec<StoredReceipt>,
    ) -> Result<CallRecord, Abort> {
        let call = ran.call();
        let ran = spill::keep(&self.shared.ledger, ran).await?;
        let sealed = call::seal(&self.shared.launch, &self.shared.origin, *chain, ran).await?;
        self.evidence_head = Some(sealed.evidence);
        (chain.count, chain.head) = (chain.count + 1, sealed.record.receipt.map(|receipt| receipt.digest));
        receipts.push(sealed.stored(call, chain.count));
        Ok(sealed.record)
    }

    /// The changes of a call that had ended well did not reach the workspace: it has failed, and a further receipt says so.
    pub(super) async fn withdraw(
        &mut self,
        ended: &Event,
        promised: &Receipt,
        withdrawal: Withdrawal,
    ) -> Result<(), Abort> {
        let Shared { launch, origin, .. } = &*self.shared;
        let withdrawn = call::seal_withdrawal(launch, origin, self.session.receipts(), promised, withdrawal).await?;
        self.evidence_head = Some(withdrawn.evidence);
        let receipts = vec![withdrawn.stored()];
        // An attempt that was not the first has an id of its own.
        let call = if let Event::ToolCompleted { call, .. } = ended { *call } else { promised.call_id };
        let Withdrawn { call: withdrawal_id, error, content, receipt, .. } = withdrawn;
        let event = Event::CommitWithdrawn { call, code: error.code, content, receipt };
        Box::pin(self.append(event, receipts)).await?;
        match self.shared.launch.stored(withdrawal_id).await? {
            Application::Failed(failure) => Err(Abort::Unapplied { call, failure }),
            Application::Done | Application::Withdrawn(_) => Ok(()),
        }
    }

    pub(super) async fn seal_job(&self) -> Result<StoredReceipt, Abort> {
        let chain = self.session.receipts();
        let Shared { launch, origin, .. } = &*self.shared;
        let envelope = call::seal_job(launch, origin, self.job, chain, self.evidence_head).await?;
        Ok(StoredReceipt { sequence: chain.count + 1, call: None, envelope, is_promise: false })
    }
}
