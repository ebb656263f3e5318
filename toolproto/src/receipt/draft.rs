//! What agentd knows of a receipt before there is evidence to put it around.

use serde::{Deserialize, Serialize};

use super::{Outcome, Receipt, ResultIdentity, Semantics, SignedEvidence, WorkspaceState};
use crate::code::Code;
use crate::digest::Digest;
use crate::job::ReceiptsHead;

/// What a receipt says of a call whose writes could not be held back.
const WRITTEN_DIRECTLY: &str =
    "the policy lets the call write to the workspace directly: what it wrote stays, whether it ended well or not";

/// A receipt without its evidence, and without all that follows from that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draft {
    /// The job's receipts before it.
    pub chain: ReceiptsHead,
    /// sha256 of the arguments as canonical JSON.
    pub arguments_digest: Digest,
    /// The effects that the tool's manifest declares.
    pub declared: String,
    /// The call's code, the reply's content included; absent on success.
    pub code: Option<Code>,
    /// What the model was given; absent where it was given nothing.
    pub result: Option<ResultIdentity>,
    /// Remarks.
    pub notes: Vec<String>,
    /// The host's name.
    pub host: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// agentd's version.
    pub agentd_version: String,
    /// The key that signs it; absent while there is none.
    pub key_id: Option<String>,
}

impl Draft {
    /// The receipt.
    #[must_use]
    pub fn around(self, evidence: SignedEvidence) -> Receipt {
        let record = &evidence.record;
        let observed = if record.workspace.is_changed() { "changed" } else { "unchanged" };
        let mut notes = self.notes;
        if record.workspace.state == WorkspaceState::Direct {
            notes.push(WRITTEN_DIRECTLY.to_owned());
        }
        Receipt {
            version: 1,
            job_id: record.job_id,
            call_id: record.call_id,
            sequence: self.chain.count + 1,
            previous: self.chain.head,
            tool: record.tool.clone(),
            arguments_digest: self.arguments_digest,
            semantics: Semantics { declared: self.declared, observed: observed.to_owned() },
            policy: record.policy.clone(),
            enforced: record.enforced.clone(),
            not_enforced: record.not_enforced.clone(),
            started: record.started,
            ended: record.ended,
            outcome: Outcome { code: self.code, ..record.outcome.clone() },
            result: self.result,
            workspace: record.workspace.clone(),
            withdraws: record.withdraws,
            denied: record.all_denied(),
            usage: record.all_usage(),
            host: self.host,
            boot_id: self.boot_id,
            agentd_version: self.agentd_version,
            key_id: self.key_id,
            notes,
            evidence,
        }
    }
}
