//! Results that were kept apart, for the people whose jobs they are of.

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::JobId;
use toolproto::job::Problem;

use super::{Dispatcher, unreadable};
use crate::caller::Caller;
use crate::launch::Launch;

impl<L: Launch> Dispatcher<L> {
    /// A result of a job's call that was kept apart, as JSON text: byte for byte what its reference is the digest of.
    ///
    /// # Errors
    /// NOT_FOUND when there is no job that the caller may see, or it keeps no such result.
    pub async fn spilled(&self, caller: &Caller, id: JobId, reference: Digest) -> Result<String, Problem> {
        self.row(caller, id).await?;
        let kept = self.inner.shared.ledger.spilled(id, reference).await.map_err(unreadable)?;
        kept.ok_or_else(|| {
            Problem::new(Code::NotFound, format!("job {id} keeps no result as {reference}, or keeps it no longer"))
        })
    }
}
