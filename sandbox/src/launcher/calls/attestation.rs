//! What a call's evidence says of the workspace.
//!
//! | the call sees it | what it did is known by | where that cannot be had |
//! |---|---|---|
//! | not, or read-only | that it could do nothing | |
//! | through a layer | the preparation of its commit | the layer is thrown away: it did nothing |
//! | directly | a second reading, compared with the first | the call has failed, and its effect is unproven |
//!
//! So no call that can change the workspace ends well without the trees before and after it. It is not even started before the
//! first of them is known.

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::receipt::{Denial, WorkspaceChange, WorkspaceState};

use super::{Call, Sight};

impl Call {
    /// The workspace's part when nothing can have changed since [`Call::before`] was read.
    #[must_use]
    pub fn unchanged(&self) -> WorkspaceChange {
        let state = match self.sight {
            Sight::Nothing => return WorkspaceChange::none(),
            Sight::ReadOnly => WorkspaceState::ReadOnly,
            Sight::Overlay => WorkspaceState::Discarded,
            Sight::Direct => WorkspaceState::Direct,
        };
        let unattributed = self.unattributed.clone();
        WorkspaceChange { state, before: self.before, after: self.before, unattributed, ..WorkspaceChange::none() }
    }

    /// Notes why its changes do not go into the workspace.
    pub fn withhold(&mut self, code: Code, before: Option<Digest>, denied: Vec<Denial>) {
        if let Some(record) = &mut self.ended {
            record.outcome.code = record.outcome.code.or(Some(code));
            record.denied.extend(denied);
        }
        let state = if code == Code::WorkspaceConflict { WorkspaceState::Conflict } else { WorkspaceState::Discarded };
        let unattributed = self.unattributed.clone();
        self.workspace =
            Some(WorkspaceChange { state, before, after: before, unattributed, ..WorkspaceChange::none() });
    }

    /// Notes why it cannot be said what it left in the workspace: it has failed. Of what lies in a layer nothing is taken over, so
    /// that it is known after all. What was written directly is there, whatever it is.
    pub fn leave_unproven(&mut self, code: Code) {
        if self.layer.is_some() {
            return self.withhold(code, self.before, Vec::new());
        }
        if let Some(record) = &mut self.ended {
            record.outcome.code = record.outcome.code.or(Some(code));
        }
        self.workspace = Some(WorkspaceChange { after: None, ..self.unchanged() });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use toolproto::ids::{CallId, JobId};
    use toolproto::receipt::{Claims, Outcome, OutcomeKind, PolicyIdentity, ToolIdentity, Usage};

    use super::*;
    use crate::launcher::calls::Output;

    /// A call that ended well and had seen the workspace so.
    fn ended(sight: Sight, layer: Option<u64>, code: Option<Code>) -> Call {
        let tool = ToolIdentity { name: "write".to_owned(), version: 1, digest: None };
        let policy = PolicyIdentity { name: "p".to_owned(), digest: Digest::sha256(b"p") };
        let ids = (JobId::from_u128(1), CallId::from_u128(2));
        let mut call = Call::ordered(ids, (tool, policy), Output::Streams, Instant::now());
        (call.sight, call.layer, call.before) = (sight, layer, Some(Digest::sha256(b"before")));
        call.refuse(Outcome { kind: OutcomeKind::Exited, code, exit_status: Some(0), signal: None }, Usage::default());
        call.verdict = Some(Claims::default());
        call
    }

    #[test]
    fn a_call_that_wrote_directly_and_cannot_be_attested_has_failed() {
        let mut call = ended(Sight::Direct, None, None);
        assert_eq!(call.evidence(0), None, "sealed without what it did");
        call.leave_unproven(Code::WorkspaceTooLarge);
        let record = call.evidence(0).unwrap();
        assert_eq!(record.outcome.code, Some(Code::WorkspaceTooLarge));
        assert_eq!((record.workspace.state, record.workspace.before), (WorkspaceState::Direct, call.before));
        assert_eq!(record.workspace.after, None);
        assert!(!record.workspace.is_attested());
    }

    #[test]
    fn a_layer_that_cannot_be_attested_is_thrown_away() {
        let mut call = ended(Sight::Overlay, Some(3), None);
        call.leave_unproven(Code::WorkspaceUnavailable);
        let record = call.evidence(0).unwrap();
        assert_eq!(record.outcome.code, Some(Code::WorkspaceUnavailable));
        assert_eq!((record.workspace.state, record.workspace.after), (WorkspaceState::Discarded, call.before));
        assert!(record.workspace.is_attested());
    }

    #[test]
    fn a_call_keeps_the_failure_that_it_had_before() {
        for (sight, layer) in [(Sight::Direct, None), (Sight::Overlay, Some(3))] {
            let mut call = ended(sight, layer, Some(Code::ToolTimeout));
            call.leave_unproven(Code::WorkspaceTooLarge);
            assert_eq!(call.evidence(0).unwrap().outcome.code, Some(Code::ToolTimeout));
        }
    }
}
