//! A submission: everything that can be wrong with it is found before there is a job.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use jiff::Timestamp;
use sandbox::config::Subject;
use sandbox::protocol::WorkspaceChoice;
use serde_json::json;
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::ids::{JobId, RequestId};
use toolproto::job::{Accepted, JobRequest, Problem, Violation};
use toolproto::source::alternatives;

use super::resume::Before;
use super::{Arrival, Dispatcher, Prepared, rejected, unlinked, unreadable};
use crate::agent::Agent;
use crate::caller::Caller;
use crate::launch::{Keep, Launch};
use crate::ledger::{Inserted, JobKind, JobRow, NewJob};
use crate::model::Model;
use crate::runner::Shared;
use crate::session::Session;
use crate::session::budget::{Budget, BudgetError};
use crate::session::event::Event;

/// A request in which nothing wrong was found.
struct Fit {
    request: JobRequest,
    digest: Digest,
    agent: Arc<Agent>,
    model: Arc<dyn Model>,
    budget: Budget,
    before: Before,
}

impl<L: Launch> Dispatcher<L> {
    /// Accepts a job: when this returns, it is on disk.
    ///
    /// # Errors
    /// When it misses the goal schema, names an agent, workspace or budget that it cannot have, or too many jobs wait.
    pub async fn submit(&self, caller: &Caller, client: OwnedFd, request: JobRequest) -> Result<Accepted, Problem> {
        let (agent, model) = self.agent_of(caller, &request)?;
        let budget = check(&agent, &request)?;
        let digest = digest_of(&request)?;
        if let Some(known) = self.known(caller, &request, digest).await? {
            return Ok(accepted(known));
        }
        let before = self.before(caller, &request).await?;
        let (dispatcher, fit) = (self.clone(), Fit { request, digest, agent, model, budget, before });
        self.to_its_end(async move { dispatcher.accept(client, fit).await }).await
    }

    /// Gets a request that nothing is wrong with its grant, its place in the ledger and one in the queue.
    async fn accept(&self, client: OwnedFd, fit: Fit) -> Result<Accepted, Problem> {
        let Fit { request, digest, agent, model, budget, before } = fit;
        let Shared { launch, ledger, .. } = &*self.inner.shared;
        let id = JobId::generate();
        let choice =
            request.workspace.clone().or(before.workspace).map_or(WorkspaceChoice::Private, WorkspaceChoice::Named);
        let admitted = launch.admit(id, client, choice, Some(agent.digest), agent.limits.clone()).await;
        let admission = admitted.map_err(unlinked)?.map_err(rejected)?;
        let job = NewJob {
            id,
            kind: JobKind::Agent,
            uid: admission.uid,
            agent: agent.name.clone(),
            request: json!(request),
            idempotency_key: request.idempotency_key.clone(),
            request_digest: digest,
            workspace: admission.workspace.clone(),
            priority: request.priority,
            labels: request.labels.clone(),
            submitted: Timestamp::now(),
        };
        match ledger.insert(job.clone()).await {
            Ok(Inserted::New) => {}
            Ok(Inserted::Known(known)) => {
                self.close(id, Keep::Nothing).await;
                return Ok(accepted(known));
            }
            Ok(Inserted::Conflict(known)) => {
                self.close(id, Keep::Nothing).await;
                return Err(conflict(known));
            }
            Err(error) => {
                self.close(id, Keep::Nothing).await;
                return Err(unreadable(error));
            }
        }
        let begin = Event::NewGoal {
            goal: request.goal,
            agent: agent.digest,
            budget,
            workspace: admission.workspace,
            conversation: before.conversation,
        };
        let prepared =
            Prepared { agent, model, session: Session::new(), sequence: 0, evidence_head: None, begin: Some(begin) };
        if let Err(full) = self.enqueue(&row_of(job), prepared, Arrival::New) {
            self.close(id, Keep::Nothing).await;
            ledger.forget(id).await.map_err(unreadable)?;
            return Err(Problem::new(Code::QueueFull, full.to_string()));
        }
        tracing::info!(job = %id, uid = admission.uid, agent = %request.agent, "job accepted");
        Ok(accepted(id))
    }

    /// The agent of a request, with those who answer for it.
    fn agent_of(&self, caller: &Caller, request: &JobRequest) -> Result<(Arc<Agent>, Arc<dyn Model>), Problem> {
        if request.version != 1 {
            let words = format!("version {} is unknown; this agentd reads version 1", request.version);
            return Err(Problem::new(Code::InputInvalid, words));
        }
        let name = request.agent.as_str();
        let staffed = self.staff_of(name)?;
        if !(self.inner.offer().permits)(caller, Subject::Agent(name)) {
            return Err(Problem::new(Code::NotPermitted, format!("agent `{name}` is not for this caller")));
        }
        Ok(staffed)
    }

    /// An agent by its name, with those who answer for it.
    pub(super) fn staff_of(&self, name: &str) -> Result<(Arc<Agent>, Arc<dyn Model>), Problem> {
        let offer = self.inner.offer();
        offer.agents.get(name).cloned().ok_or_else(|| {
            let hint = alternatives(name, offer.agents.keys().map(String::as_str));
            Problem::new(Code::AgentUnknown, format!("there is no agent `{name}`{hint}"))
        })
    }

    /// The job that the caller's idempotency key names already.
    async fn known(&self, caller: &Caller, request: &JobRequest, digest: Digest) -> Result<Option<JobId>, Problem> {
        let Some(key) = request.idempotency_key.clone() else { return Ok(None) };
        match self.inner.shared.ledger.by_key(caller.uid, key, digest).await.map_err(unreadable)? {
            None | Some(Inserted::New) => Ok(None),
            Some(Inserted::Known(known)) => Ok(Some(known)),
            Some(Inserted::Conflict(known)) => Err(conflict(known)),
        }
    }
}

pub(super) fn check(agent: &Agent, request: &JobRequest) -> Result<Budget, Problem> {
    agent.goal.check(&request.goal).map_err(|mut violations| {
        for violation in &mut violations {
            violation.pointer.insert_str(0, "/goal");
        }
        let words = format!("the goal does not satisfy the goal schema: {}", crate::schema::in_words(&violations));
        Problem::new(Code::InputInvalid, words).with_violations(violations)
    })?;
    if request.idempotency_key.as_ref().is_some_and(|key| key.is_empty() || key.len() > MAX_KEY) {
        return Err(Problem::new(Code::InputInvalid, format!("idempotency_key must have 1 to {MAX_KEY} bytes")));
    }
    let asked = request.budget.clone().unwrap_or_default();
    agent.budget.narrowed(&asked).map_err(|error: BudgetError| {
        let violation = Violation {
            pointer: format!("/budget/{}", error.field),
            rule: "/budget".to_owned(),
            message: error.reason.clone(),
        };
        Problem::new(Code::InputInvalid, error.to_string()).with_violations(vec![violation])
    })
}

/// The longest idempotency key.
const MAX_KEY: usize = 256;

/// What makes two requests with one key the same: everything in them.
fn digest_of(request: &JobRequest) -> Result<Digest, Problem> {
    Digest::of_json(request).map_err(|error| Problem::new(Code::InputInvalid, error.to_string()))
}

fn conflict(known: JobId) -> Problem {
    Problem::new(Code::IdempotencyConflict, format!("the key belongs to job {known}, whose request was another"))
}

fn accepted(job: JobId) -> Accepted {
    Accepted { version: 1, status: "accepted".to_owned(), job_id: job, request_id: RequestId::generate() }
}

fn row_of(job: NewJob) -> JobRow {
    JobRow {
        id: job.id,
        kind: job.kind,
        uid: job.uid,
        agent: job.agent,
        request: job.request,
        workspace: job.workspace,
        priority: job.priority,
        labels: job.labels,
        submitted: job.submitted,
        ended: None,
        result: None,
    }
}
