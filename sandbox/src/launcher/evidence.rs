//! The chain of evidence of one job.

use std::collections::BTreeSet;

use toolproto::digest::{Digest, canonical_json};
use toolproto::ids::CallId;
use toolproto::receipt::{Evidence, SignedEvidence};

use super::key::{ReceiptKey, SignError};

/// The version of the record's layout.
pub const VERSION: u32 = 1;

/// Where a job's chain stands.
#[derive(Debug, Default)]
pub struct Chain {
    /// The digest of each record so far.
    heads: Vec<Digest>,
    sealed: BTreeSet<CallId>,
    /// The highest number that a call's cgroup has.
    launches: u64,
}

impl Chain {
    /// The chain of an earlier launcher, cut to so many records; `None` when it does not have as many.
    #[must_use]
    pub fn continued(mut heads: Vec<Digest>, records: u64) -> Option<Self> {
        let records = usize::try_from(records).ok().filter(|records| *records <= heads.len())?;
        heads.truncate(records);
        Some(Self { heads, ..Self::default() })
    }

    /// The digest of each record so far.
    #[must_use]
    pub fn heads(&self) -> &[Digest] {
        &self.heads
    }

    fn sequence(&self) -> u64 {
        self.heads.len() as u64
    }

    /// The number of the call's cgroup that is launched now. While calls run one after the other it is the sequence that
    /// the call is sealed under.
    pub fn next_launch(&mut self) -> u64 {
        self.launches = self.launches.max(self.sequence()) + 1;
        self.launches
    }

    /// Whether the call is sealed.
    #[must_use]
    pub fn has_sealed(&self, call: CallId) -> bool {
        self.sealed.contains(&call)
    }

    /// Gives a record its place in the chain and signs it.
    ///
    /// # Errors
    /// Never in practice: a record holds only what has a canonical form.
    pub fn seal(&mut self, mut record: Evidence, key: &ReceiptKey) -> Result<SignedEvidence, SignError> {
        record.sequence = self.sequence() + 1;
        record.previous = self.heads.last().copied();
        let canonical = canonical_json(&record)?;
        let signature = key.sign_evidence(&canonical);
        self.heads.push(Digest::sha256(&canonical));
        self.sealed.insert(record.call_id);
        Ok(SignedEvidence { record, signature: Some(signature) })
    }
}
