//! Whether a receipt, which the unprivileged daemon composed, says what the launcher's evidence inside it says.

use toolproto::receipt::{Evidence, Receipt};

/// The receipt's fields that differ from the evidence.
pub(super) fn mismatches(receipt: &Receipt) -> Vec<&'static str> {
    let Receipt { evidence, .. } = receipt;
    let record = &evidence.record;
    let fields = [
        ("job_id", receipt.job_id == record.job_id),
        ("call_id", receipt.call_id == record.call_id),
        ("sequence", receipt.sequence == record.sequence),
        ("tool", receipt.tool == record.tool),
        ("policy", receipt.policy == record.policy),
        ("enforced", receipt.enforced == record.enforced),
        ("not_enforced", receipt.not_enforced == record.not_enforced),
        ("started", receipt.started == record.started),
        ("ended", receipt.ended == record.ended),
        ("outcome", is_outcome_told(receipt, record)),
        ("workspace", receipt.workspace == record.workspace),
        ("semantics.observed", receipt.semantics.observed == observed(record)),
        ("denied", receipt.denied == record.all_denied()),
        ("usage", receipt.usage == record.all_usage()),
        ("arguments_digest", Some(receipt.arguments_digest) == record.claims.arguments_digest),
        ("withdraws", receipt.withdraws == record.withdraws),
        ("result", receipt.result.as_ref().map(|result| result.digest) == record.claims.result_digest),
    ];
    fields.into_iter().filter(|(_, agrees)| !agrees).map(|(name, _)| name).collect()
}

/// The process's end is the launcher's to tell. The code may be finer than the launcher's, since agentd has read the
/// reply, but then it is the one that agentd claimed before the evidence was sealed, and a failure that the launcher saw
/// stays one.
fn is_outcome_told(receipt: &Receipt, record: &Evidence) -> bool {
    let (said, seen) = (&receipt.outcome, &record.outcome);
    said.kind == seen.kind
        && said.exit_status == seen.exit_status
        && said.signal == seen.signal
        && said.code == record.claims.code.or(seen.code)
        && (seen.code.is_none() || said.code.is_some())
}

fn observed(record: &Evidence) -> &'static str {
    if record.workspace.is_changed() { "changed" } else { "unchanged" }
}
