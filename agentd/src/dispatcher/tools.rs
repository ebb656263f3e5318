//! The tools as callers see them, and what administrators do with their breakers.

use std::sync::Arc;

use sandbox::config::Subject;
use toolproto::api::{BreakerAction, BreakerRequest, BreakerView, ExtensionView, ToolView};
use toolproto::code::Code;
use toolproto::job::Problem;

use super::Dispatcher;
use super::direct::known_version;
use super::offer::Offer;
use crate::caller::{Caller, Standing};
use crate::launch::Launch;
use crate::tools::Tool;

impl<L: Launch> Dispatcher<L> {
    /// The tools that the caller may use.
    #[must_use]
    pub fn tools(&self, caller: &Caller) -> Vec<ToolView> {
        let offer = self.inner.offer();
        let Offer { tools, guards, permits, .. } = &*offer;
        let permitted = |name: &str| permits(caller, Subject::Tool(name));
        let permitted = tools.iter().filter(|tool| permitted(&tool.manifest.name));
        let view = |tool: &Arc<Tool>| ToolView {
            breaker: guards.breaker(&tool.manifest.name),
            runtime_version: guards.runtime_version(&tool.manifest.program.runtime),
            ..tool.view()
        };
        permitted.map(view).collect()
    }

    /// The extensions that agents may name.
    #[must_use]
    pub fn extensions(&self) -> Vec<ExtensionView> {
        self.inner.offer().tools.extensions().map(|extension| extension.view()).collect()
    }

    /// Opens or resets the breaker of a tool, or of a runtime as `runtime:NAME`.
    ///
    /// # Errors
    /// NOT_PERMITTED to those who are no administrators, TOOL_UNKNOWN, INPUT_INVALID without a reason to open it.
    pub fn set_breaker(&self, caller: &Caller, name: &str, request: &BreakerRequest) -> Result<BreakerView, Problem> {
        known_version(request.version)?;
        if caller.standing != Standing::Admin {
            return Err(Problem::new(Code::NotPermitted, "breakers are opened and reset by administrators"));
        }
        let offer = self.inner.offer();
        let guards = &offer.guards;
        let reason = request.reason.as_deref().map(str::trim).filter(|reason| !reason.is_empty());
        let view = match (request.action, reason) {
            (BreakerAction::Open, None) => return Err(Problem::new(Code::InputInvalid, "reason is missing")),
            (BreakerAction::Open, Some(reason)) => guards.open(name, reason, caller.uid),
            (BreakerAction::Reset, _) => guards.reset(name, caller.uid),
        };
        view.ok_or_else(|| Problem::new(Code::ToolUnknown, format!("there is no tool or runtime `{name}`")))
    }
}
