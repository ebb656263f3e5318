//! The one list of failure codes. Every call result, job result and refused request carries one of them.
//!
//! A code is data, not an error type: it says what happened in words that programs compare, whose fault it is, and what
//! a person should do next. The suggestion is fixed per code; the particulars are in the message beside it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// Who asked: a person, a client program, or the model that wrote the call.
    Caller,
    /// The tool's program.
    Tool,
    /// The model or its server.
    Model,
    /// The machine agentd runs on, or its configuration.
    Host,
    /// agentd itself.
    Agentd,
}

macro_rules! codes {
    ($($variant:ident = $text:literal, $fault:ident, $meaning:literal, $suggestion:literal;)*) => {
        /// What went wrong, by name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[non_exhaustive]
        pub enum Code {
            $(#[doc = $meaning] #[serde(rename = $text)] $variant,)*
        }

        impl Code {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The code as it stands in JSON.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// What the code means, in one sentence.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }

            /// What to do about it: the `recovery_suggestion` of a result.
            #[must_use]
            pub const fn recovery_suggestion(self) -> &'static str {
                match self { $(Self::$variant => $suggestion,)* }
            }

            /// Whose fault it is.
            #[must_use]
            pub const fn fault(self) -> Fault {
                match self { $(Self::$variant => Fault::$fault,)* }
            }
        }
    };
}

codes! {
    // Calls.
    ArgumentsInvalid = "ARGUMENTS_INVALID", Caller, "The arguments do not satisfy the tool's input schema.", "Correct the arguments at the named pointer and call again.";
    ToolUnknown = "TOOL_UNKNOWN", Caller, "No tool of that name is available to this caller.", "Use a name from `agentctl tools`.";
    ToolBlocked = "TOOL_BLOCKED", Caller, "The tool is blocked for some turns because its calls made no progress.", "Use another tool or other arguments until the block ends.";
    ToolUnavailable = "TOOL_UNAVAILABLE", Host, "The tool's runtime or program is missing or does not work.", "Install what the message names, then call again.";
    ToolChanged = "TOOL_CHANGED", Host, "The tool's files were changed since agentd read them.", "Reload agentd (`systemctl reload agentd`), then call again.";
    BreakerOpen = "BREAKER_OPEN", Tool, "The tool failed too often lately and is not started for a while.", "Wait until the breaker closes, or use the tool's fallback.";
    Overloaded = "OVERLOADED", Host, "Too many calls are running.", "Try again later, or raise the limits in agentd.toml.";
    ApprovalDenied = "APPROVAL_DENIED", Caller, "A person refused the call.", "Ask for the reason, or reach the goal without this call.";
    ApprovalExpired = "APPROVAL_EXPIRED", Caller, "Nobody decided about the call in time.", "Approve sooner, or raise the approval time-out.";
    ClockDrift = "CLOCK_DRIFT", Host, "The host's clock and the job's time went apart during a planned wait.", "Look at what is so now and plan again; keep the host's clock synchronised.";
    ToolFailed = "TOOL_FAILED", Tool, "The tool reported an error of its own.", "Read the tool's error inside; retry only when it says retryable.";
    ToolCrashed = "TOOL_CRASHED", Tool, "The tool ended by a signal, or without a valid answer and status 0 or 1.", "Look at the tool's stderr in the details and mend the tool.";
    ToolTimeout = "TOOL_TIMEOUT", Tool, "The tool did not end within its time.", "Give the tool less to do per call, or a longer time-out.";
    ToolProtocolError = "TOOL_PROTOCOL_ERROR", Tool, "What the tool wrote is not one JSON object of the protocol.", "Mend the tool at the named offset; `agentctl tools check` shows more.";
    ResponseTooLarge = "RESPONSE_TOO_LARGE", Tool, "The tool's answer is larger than its cap.", "Let the tool write large results to a file in the workspace, or raise max_response_bytes.";
    ResponseInvalid = "RESPONSE_INVALID", Tool, "The tool's result does not satisfy its output schema.", "Mend the tool or its output schema at the named pointer.";
    OutOfMemory = "OUT_OF_MEMORY", Tool, "The call reached its memory limit and was killed.", "Raise the memory limit, or give the tool less to do per call.";
    ProcessLimit = "PROCESS_LIMIT", Tool, "The call reached its limit of processes.", "Raise the pids limit, or start fewer processes.";
    DiskFull = "DISK_FULL", Host, "No space was left where the call wrote.", "Free space, or raise the limit that the message names.";
    PolicyUnenforceable = "POLICY_UNENFORCEABLE", Host, "The policy requires what this host cannot enforce.", "Run `agentd doctor`, mend what it names, or start agentd with --limits best-effort.";
    LaunchFailed = "LAUNCH_FAILED", Agentd, "The sandbox could not be set up.", "Look at the step and the reason in the details; run `agentd doctor`.";
    WorkspaceConflict = "WORKSPACE_CONFLICT", Caller, "The workspace was changed from outside where the call changed it too.", "Compare both versions, keep one, and resume.";
    WorkspaceUnavailable = "WORKSPACE_UNAVAILABLE", Caller, "The workspace does not exist, is not below a configured root, or does not belong to the caller.", "Name a directory that you own, below one of the configured roots.";
    WorkspaceBusy = "WORKSPACE_BUSY", Caller, "Another job holds the workspace.", "Wait for the other job, or use another workspace.";
    WorkspaceTooLarge = "WORKSPACE_TOO_LARGE", Caller, "The workspace has more entries or bytes than the limit.", "Use a smaller workspace, or raise the limits in agentd.toml.";
    Cancelled = "CANCELLED", Caller, "The job or call was cancelled.", "Submit again if it is still wanted.";
    Interrupted = "INTERRUPTED", Agentd, "agentd ended while the job or call was running.", "Submit again; look at the receipts for what was done.";
    // Jobs, besides a call's code that ended them.
    ResultInvalid = "RESULT_INVALID", Model, "The model's final answer does not satisfy the result schema.", "Look at the violations in the details; make the system prompt state the schema.";
    CompletionUnverified = "COMPLETION_UNVERIFIED", Model, "The model's final answer does not meet the completion contract.", "Look at the unmet conditions in the details.";
    ObservationInvalidAfterRetry = "OBSERVATION_INVALID_AFTER_RETRY", Model, "The model's answers stayed unusable after every repair attempt.", "Look at the last feedback in the details; try another model.";
    TurnBudgetExhausted = "TURN_BUDGET_EXHAUSTED", Caller, "The job used all its turns.", "Raise budget.max_turns, or give a smaller goal.";
    ToolCallBudgetExhausted = "TOOL_CALL_BUDGET_EXHAUSTED", Caller, "The job used all its tool calls.", "Raise budget.max_tool_calls, or give a smaller goal.";
    TokenBudgetExhausted = "TOKEN_BUDGET_EXHAUSTED", Caller, "The job used all its tokens.", "Raise budget.max_total_tokens, or give a smaller goal.";
    CostBudgetExhausted = "COST_BUDGET_EXHAUSTED", Caller, "The job used all its money.", "Raise budget.max_cost_usd, or use a cheaper model.";
    CpuBudgetExhausted = "CPU_BUDGET_EXHAUSTED", Caller, "The job used all its processor time.", "Raise budget.max_cpu_seconds, or give a smaller goal.";
    DeadlineExceeded = "DEADLINE_EXCEEDED", Caller, "The job did not end within its wall-clock time.", "Raise budget.wall_seconds, or give a smaller goal.";
    NoProgress = "NO_PROGRESS", Model, "The job repeated itself without changing anything.", "Look at the repeated calls in the details; give a clearer goal.";
    ExtensionRefused = "EXTENSION_REFUSED", Caller, "An extension of the agent ended the job.", "Read the extension's words in the message; change the goal, or the extension.";
    ExtensionFailed = "EXTENSION_FAILED", Host, "An extension that the agent requires failed.", "Look at the extension's receipt and error, mend it, then submit again.";
    ModelUnavailable = "MODEL_UNAVAILABLE", Model, "No configured model answered.", "Look at the cause in the details; check the endpoint, then `agentctl resume`.";
    ModelQuotaExhausted = "MODEL_QUOTA_EXHAUSTED", Model, "The model's quota is used up.", "Raise the quota with the provider, or wait for its renewal.";
    ModelRefused = "MODEL_REFUSED", Model, "The model refused to go on.", "Read the model's words in the details and change the goal.";
    ContextOverflow = "CONTEXT_OVERFLOW", Model, "The conversation does not fit the model's context.", "Use a model with a larger context, or smaller tool results.";
    LedgerUnavailable = "LEDGER_UNAVAILABLE", Host, "The ledger cannot be written.", "Free space on the state directory's file system, then `agentctl resume`.";
    InternalLogicError = "INTERNAL_LOGIC_ERROR", Agentd, "agentd broke a rule of its own.", "Report this with the job's events (`agentctl events ID`).";
    // Requests.
    InputInvalid = "INPUT_INVALID", Caller, "The request is malformed or misses its schema.", "Correct the request at the named offset or pointer.";
    AgentUnknown = "AGENT_UNKNOWN", Caller, "No agent of that name exists.", "Use a name that agentd has configured.";
    PolicyUnknown = "POLICY_UNKNOWN", Caller, "No policy of that name exists.", "Use a name from `agentctl policy`.";
    NotPermitted = "NOT_PERMITTED", Caller, "The caller may not do this.", "Ask an administrator for access ([access] in agentd.toml).";
    NotFound = "NOT_FOUND", Caller, "There is no such thing, or it is not the caller's.", "Check the id with `agentctl jobs`.";
    RequestTooLarge = "REQUEST_TOO_LARGE", Caller, "The request's body is larger than the limit.", "Put large data into the workspace.";
    IdempotencyConflict = "IDEMPOTENCY_CONFLICT", Caller, "The idempotency key was used for another request.", "Use a new key, or send the first request's body.";
    QueueFull = "QUEUE_FULL", Host, "Too many jobs are waiting.", "Try again later.";
    UndoUnavailable = "UNDO_UNAVAILABLE", Host, "The undo store no longer holds that state.", "Choose a later receipt.";
    ConfigInvalid = "CONFIG_INVALID", Host, "The configuration is not valid.", "Run `agentd check` and mend what it names.";
}

impl Code {
    /// Whether a job that ended with it can be gone on with: by `agentctl resume`, once its cause is mended.
    #[must_use]
    pub const fn is_resumable(self) -> bool {
        matches!(
            self,
            Self::ModelUnavailable
                | Self::LedgerUnavailable
                | Self::WorkspaceConflict
                | Self::TurnBudgetExhausted
                | Self::ToolCallBudgetExhausted
                | Self::TokenBudgetExhausted
                | Self::CostBudgetExhausted
                | Self::CpuBudgetExhausted
                | Self::DeadlineExceeded
        )
    }
}

/// The text names no code.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no code of agentd")]
pub struct CodeError(String);

impl FromStr for Code {
    type Err = CodeError;

    fn from_str(text: &str) -> Result<Self, CodeError> {
        Self::ALL.iter().copied().find(|code| code.as_str() == text).ok_or_else(|| CodeError(text.to_owned()))
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_the_same_everywhere() {
        for (index, code) in Code::ALL.iter().enumerate() {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
            assert_eq!(code.as_str().parse::<Code>().unwrap(), *code);
            assert!(Code::ALL[..index].iter().all(|earlier| earlier.as_str() != code.as_str()), "{code} twice");
        }
    }
}
