//! Runtimes that show in a sandbox that they work.
//!
//! A probe is a call of no job: it has no grant, no workspace and no verdict, and is forgotten once it has ended. It gets no evidence, so
//! that no chain of receipts can name it.

use std::fs::File;
use std::time::{Duration, Instant};

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::{PolicyIdentity, ToolIdentity};

use super::Service;
use super::launching::{LONGEST_MS, captured_output, planned, step};
use crate::cgroup::Leaf;
use crate::launch::{self, Stdio};
use crate::launcher::calls::{Call, Output};
use crate::launcher::program::{self, Resolved, failure};
use crate::plan::View;
use crate::policy::Policy;
use crate::protocol::{LaunchFailure, SliceLimits};

/// The job of what belongs to none. No id that is generated is this one.
const NO_JOB: JobId = JobId::from_u128(0);
/// Whose calls probes are.
const ROOT: u32 = 0;

impl Service {
    /// Runs a runtime's own probe. It is answered by `Ended`, as a call is.
    pub(super) fn probe(&mut self, id: CallId, runtime: &str, time_ms: u64) {
        if self.calls.contains_key(&id) {
            return self.misuse("the call is known already", None, Some(id));
        }
        let tool = ToolIdentity { name: format!("probe:{runtime}"), version: 1, digest: None };
        let unknown = || PolicyIdentity { name: "none".to_owned(), digest: Digest::sha256(b"") };
        let policy = self.parts.catalog.strictest().map_or_else(unknown, Policy::identity);
        let deadline = Instant::now() + Duration::from_millis(time_ms.min(LONGEST_MS));
        let mut call = Call::ordered((NO_JOB, id), (tool, policy), Output::Captured(None), deadline);
        call.is_probe = true;
        let resolved = program::probe(&self.parts.catalog, runtime).and_then(|resolved| {
            self.has_room_for(&call)?;
            Ok(resolved)
        });
        self.calls.insert(id, call);
        if let Err(failure) = resolved.and_then(|resolved| self.start_probe(id, &resolved)) {
            self.fail(id, failure);
        }
    }

    fn start_probe(&mut self, id: CallId, resolved: &Resolved) -> Result<(), LaunchFailure> {
        let uid = self
            .uids
            .take()
            .ok_or_else(|| failure(Code::Overloaded, "every uid of [uids] sandboxes is in use".to_owned()))?;
        if let Some(call) = self.calls.get_mut(&id) {
            call.sandbox_uid = Some(uid);
        }
        let mut plan = planned(&self.parts, (resolved, None), (ROOT, uid), View::Empty, None)?;
        self.provide(&mut plan);
        let leaf = self.leaf_of_probe(id, resolved)?;
        let (output, (stdout, stderr)) = captured_output(resolved, uid)?;
        let stdin = File::open("/dev/null").map_err(|error| step("output", &error))?.into();
        let running = launch::start(plan, Stdio { stdin, stdout, stderr, events: None, gate: None }, leaf)?;
        if let Some(call) = self.calls.get_mut(&id) {
            call.output = Output::Captured(Some(output));
            call.start(running, Instant::now());
        }
        Ok(())
    }

    fn leaf_of_probe(&mut self, id: CallId, resolved: &Resolved) -> Result<Option<Leaf>, LaunchFailure> {
        let Some(tree) = &self.parts.tree else { return Ok(None) };
        let slice = match &mut self.probes {
            Some(slice) => slice,
            none => {
                let made = tree.slice("probes.slice", &SliceLimits::default());
                none.insert(made.map_err(|error| step("cgroup", &error))?)
            }
        };
        slice.leaf(&format!("probe-{id}"), &resolved.limits).map(Some).map_err(|error| step("cgroup", &error))
    }

    /// A probe has ended, and agentd knows of it.
    pub(super) fn forget_probe(&mut self, id: CallId) {
        self.calls.remove(&id);
        self.remove_idle_probes();
    }

    /// Removes the cgroup of probes, unless there is one.
    pub(super) fn remove_idle_probes(&mut self) {
        if self.probes.as_ref().is_some_and(|slice| slice.remove().is_ok()) {
            self.probes = None;
        }
    }
}
