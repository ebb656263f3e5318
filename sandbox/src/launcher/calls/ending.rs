//! How a call ended, and the evidence of it.

use jiff::Timestamp;
use toolproto::code::Code;
use toolproto::receipt::{Evidence, Outcome, OutcomeKind, Usage};

use super::{Call, End, Phase, Record, Stopped};
use crate::cgroup::Events;
use crate::launch::Exit;
use crate::launcher::evidence;

impl Call {
    /// Notes its end. Without an `end` it never had a sandbox.
    pub fn end(&mut self, end: Option<&End>) -> &Record {
        if !matches!(end, Some(End::Leaving(_))) {
            self.phase = Phase::Ended;
        }
        // Whoever reads the streams waits until nobody can write to them.
        (self.stdio, self.gate, self.closed) = (None, None, None);
        self.handover = None;
        let (usage, events, denied, cgroup) = match end {
            Some(End::Gone(finished, _) | End::Leaving(finished)) => {
                (finished.usage.clone(), finished.events, finished.denied.clone(), finished.cgroup.clone())
            }
            Some(End::Stuck(running)) => {
                (Usage::default(), Events::default(), Vec::new(), running.cgroup().map(str::to_owned))
            }
            None => (Usage::default(), Events::default(), Vec::new(), None),
        };
        let record = Record {
            ended: Timestamp::now(),
            outcome: self.outcome(&events),
            usage,
            denied,
            cgroup: cgroup.unwrap_or_else(|| "none".to_owned()),
        };
        self.ended.insert(record)
    }

    /// Notes the end of a call that was never launched.
    pub fn refuse(&mut self, outcome: Outcome, usage: Usage) {
        self.phase = Phase::Ended;
        let cgroup = "none".to_owned();
        self.ended = Some(Record { ended: Timestamp::now(), outcome, usage, denied: Vec::new(), cgroup });
    }

    fn outcome(&self, events: &Events) -> Outcome {
        let (kind, code) = match (&self.failure, self.stopped, self.exit) {
            (Some(failure), _, _) => (OutcomeKind::LaunchFailed, Some(failure.code)),
            _ if events.oom_kills > 0 => (OutcomeKind::OutOfMemory, Some(Code::OutOfMemory)),
            (None, Some(Stopped::Deadline), _) => (OutcomeKind::TimedOut, Some(Code::ToolTimeout)),
            (None, Some(Stopped::Cancelled), _) => (OutcomeKind::Cancelled, Some(Code::Cancelled)),
            (None, None, Some(Exit::Status(0))) => (OutcomeKind::Exited, None),
            (None, None, Some(Exit::Status(_))) if events.forks_refused > 0 => {
                (OutcomeKind::Exited, Some(Code::ProcessLimit))
            }
            (None, None, Some(Exit::Status(_))) => (OutcomeKind::Exited, events.no_space.then_some(Code::DiskFull)),
            (None, None, Some(Exit::Signal(_)) | None) => (OutcomeKind::Signalled, Some(Code::ToolCrashed)),
        };
        let has_exit = self.failure.is_none();
        Outcome {
            kind,
            code,
            exit_status: match self.exit {
                Some(Exit::Status(status)) if has_exit => Some(status),
                _ => None,
            },
            signal: match self.exit {
                Some(Exit::Signal(signal)) if has_exit => Some(signal),
                _ => None,
            },
        }
    }

    /// The evidence, once the call has ended, the workspace is read and the verdict is there.
    #[must_use]
    pub fn evidence(&self, uid: u32) -> Option<Evidence> {
        let (record, workspace, claims) = (self.ended.as_ref()?, self.workspace.as_ref()?, self.verdict.as_ref()?);
        Some(Evidence {
            version: evidence::VERSION,
            job_id: self.job,
            call_id: self.id,
            sequence: 0,
            previous: None,
            uid,
            tool: self.tool.clone(),
            policy: self.policy.clone(),
            enforced: self.enforced.clone(),
            not_enforced: self.not_enforced.clone(),
            started: self.started,
            ended: record.ended,
            outcome: record.outcome.clone(),
            workspace: workspace.clone(),
            denied: record.denied.clone(),
            usage: record.usage.clone(),
            cgroup: record.cgroup.clone(),
            claims: claims.clone(),
            withdraws: None,
        })
    }
}
