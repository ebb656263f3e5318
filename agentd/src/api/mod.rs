//! The HTTP API on the Unix socket: parses requests into types, asks the dispatcher, prints its answers.
//!
//! | module | what it holds |
//! |---|---|
//! | [`server`] | connections: accepting, bounds, time-outs |
//! | `peer` | who is on the other end |
//! | `problem` | refusals as RFC 9457 problem details |
//! | `openapi` | what describes each route, and the document that is made of it |
//! | `body` | reading bodies and queries |
//! | `jobs`, `events`, `spilled`, `calls`, `exec`, `tools`, `policies`, `keys`, `health`, `metrics` | one resource each |

mod body;
mod calls;
mod events;
mod exec;
mod health;
mod jobs;
mod keys;
mod metrics;
mod openapi;
mod peer;
mod policies;
mod problem;
pub mod server;
mod spilled;
mod tools;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{FromRef, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::get;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use toolproto::api::{
    BreakerRequest, BreakerView, CallReply, CallRequest, ExecRequest, Health, JobFilter, JobPage, JobView, KeyList,
    KeyView, PolicyList, ReceiptList, RollbackReply, Steered, ToolList,
};
use toolproto::ids::RequestId;
use toolproto::job::{Accepted, JobRequest, JobResult};

use self::openapi::{Operation, Routes};
use crate::dispatcher::Dispatcher;
use crate::launch::Launch;
use crate::observe::Observer;
use crate::observe::metrics::CONTENT_TYPE as OPENMETRICS;

/// What every handler works with.
pub struct Api<L> {
    /// Where jobs, calls and commands go.
    pub dispatcher: Dispatcher<L>,
    /// Who watches without taking part.
    pub observer: Observer,
    /// Longest request body, in bytes.
    pub request_limit: usize,
    /// The keys that verify receipts, the one in use first.
    pub keys: Vec<KeyView>,
    /// When the daemon started.
    pub started: Timestamp,
    /// Cancelled when the daemon stops; streams end then.
    pub stopping: CancellationToken,
}

impl<L> Clone for Api<L> {
    fn clone(&self) -> Self {
        Self {
            dispatcher: self.dispatcher.clone(),
            observer: self.observer.clone(),
            request_limit: self.request_limit,
            keys: self.keys.clone(),
            started: self.started,
            stopping: self.stopping.clone(),
        }
    }
}

impl<L> FromRef<Api<L>> for body::Limit {
    fn from_ref(api: &Api<L>) -> Self {
        Self(api.request_limit)
    }
}

/// The routes. Connections are served by [`server::serve`], which says who asks.
pub fn router<L: Launch>(api: Api<L>) -> Router {
    let (v1, document) = described().finish();
    let document = Bytes::from(document.to_string());
    let v1 = v1.route("/openapi.json", get(async || ([(CONTENT_TYPE, "application/json")], document)));
    Router::new()
        .nest("/v1", v1)
        .fallback(problem::no_such_route)
        .method_not_allowed_fallback(problem::no_such_method)
        .layer(middleware::from_fn_with_state(api.observer.clone(), identified))
        .with_state(api)
}

/// Every route with its description, in the order of the documentation.
fn described<L: Launch>() -> Routes<Api<L>> {
    use StatusCode as S;
    let job = "A job's state, and its result once it has one";
    Routes::new()
        .route(
            &Operation::post::<JobRequest>("/jobs", "submit", "Submit a job")
                .answers::<Accepted>(S::ACCEPTED, "It will run, whatever happens to this connection")
                .refused(&[S::NOT_FOUND, S::CONFLICT]),
            jobs::submit::<L>,
        )
        .route(
            &Operation::get("/jobs", "jobs", "List jobs, newest first")
                .query::<JobFilter>()
                .answers::<JobPage>(S::OK, "A page; `next` is the `before` of the one that follows"),
            jobs::list::<L>,
        )
        .route(&Operation::get("/jobs/{id}", "job", job).answers::<JobView>(S::OK, "The job"), jobs::show::<L>)
        .route(
            &Operation::get("/jobs/{id}/result", "result", "A job's result, waited for")
                .query::<jobs::Wait>()
                .answers::<JobResult>(S::OK, "The result")
                .answers::<jobs::Unfinished>(S::ACCEPTED, "The job has none yet"),
            jobs::result::<L>,
        )
        .route(
            &Operation::get("/jobs/{id}/events", "events", "What happened and happens in a job, as server-sent events")
                .query::<events::Follow>()
                .header("Last-Event-ID", "The `id` of the last event that was seen; later ones are sent")
                .answers_text("text/event-stream", "Events until the job ends; `data` is an EventView"),
            events::stream::<L>,
        )
        .route(
            &Operation::get("/jobs/{id}/receipts", "receipts", "A job's receipts")
                .answers::<ReceiptList>(S::OK, "Envelopes in the order of the calls"),
            jobs::receipts::<L>,
        )
        .route(
            &Operation::get("/jobs/{id}/spilled/{reference}", "spilled", "A result that was kept apart")
                .answers::<serde_json::Value>(S::OK, "The whole result, whose SHA-256 the reference is"),
            spilled::show::<L>,
        )
        .route(
            &Operation::bare_post("/jobs/{id}/cancel", "cancel", "Cancel a job")
                .answers::<Steered>(S::OK, "It ends, or has ended"),
            jobs::cancel::<L>,
        )
        .route(
            &Operation::bare_post(
                "/jobs/{id}/resume",
                "resume",
                "Go on with a job that something mendable has stopped",
            )
            .answers::<Steered>(S::ACCEPTED, "It goes on")
            .refused(&[S::BAD_REQUEST, S::CONFLICT, S::UNPROCESSABLE_ENTITY]),
            jobs::resume::<L>,
        )
        .route(
            &Operation::post::<jobs::Back>("/jobs/{id}/rollback", "rollback", "Take a workspace back to a receipt")
                .answers::<RollbackReply>(S::OK, "It is there")
                .refused(&[S::CONFLICT]),
            jobs::rollback::<L>,
        )
        .route(
            &Operation::post::<jobs::Said>(
                "/jobs/{id}/messages",
                "say",
                "Tell a job something, or answer its question",
            )
            .answers::<Steered>(S::OK, "The model reads it with its next turn")
            .refused(&[S::CONFLICT]),
            jobs::say::<L>,
        )
        .route(
            &Operation::post::<jobs::Approval>(
                "/jobs/{id}/approvals",
                "decide",
                "Let a call run that waits, or refuse it",
            )
            .answers::<Steered>(S::OK, "Decided")
            .refused(&[S::CONFLICT]),
            jobs::decide::<L>,
        )
        .route(
            &Operation::post::<CallRequest>("/calls", "call", "Call one tool, without an agent")
                .answers::<CallReply>(S::OK, "The call is over; `ok` says whether it worked")
                .refused(&[S::NOT_FOUND, S::CONFLICT]),
            calls::call::<L>,
        )
        .route(
            &Operation::post::<ExecRequest>("/exec", "exec", "Run one command in a sandbox")
                .upgrades("Frames of stdin, stdout, stderr and status follow")
                .refused(&[S::NOT_FOUND, S::CONFLICT]),
            exec::exec::<L>,
        )
        .route(
            &Operation::get("/tools", "tools", "The tools that the caller may use")
                .answers::<ToolList>(S::OK, "By name"),
            tools::list::<L>,
        )
        .route(
            &Operation::post::<BreakerRequest>("/tools/{name}/breaker", "breaker", "Open or reset a tool's breaker")
                .answers::<BreakerView>(S::OK, "Where it stands now"),
            tools::set_breaker::<L>,
        )
        .route(
            &Operation::get("/policies", "policies", "The policies that the caller may use")
                .answers::<PolicyList>(S::OK, "By name"),
            policies::list::<L>,
        )
        .route(
            &Operation::get("/keys", "keys", "The keys that verify receipts")
                .answers::<KeyList>(S::OK, "The one in use first"),
            keys::list::<L>,
        )
        .route(
            &Operation::get("/health", "health", "Whether agentd takes jobs").answers::<Health>(S::OK, "It answers"),
            health::show::<L>,
        )
        .route(
            &Operation::get("/metrics", "metrics", "Figures as OpenMetrics text")
                .answers_text(OPENMETRICS, "OpenMetrics 1.0"),
            metrics::show::<L>,
        )
}

/// Gives each request its id, puts it on the answer, and prints refusals with it.
async fn identified(State(observer): State<Observer>, mut request: Request, next: Next) -> Response {
    let id = RequestId::generate();
    request.extensions_mut().insert(id);
    let head = format!("{} {}", request.method(), request.uri().path());
    let uid = request.extensions().get::<peer::Connection>().map(|connection| connection.caller().uid);
    let response = next.run(request).await;
    let mut response = problem::printed(response, id, uid, head, &observer);
    if let Ok(value) = HeaderValue::from_str(&id.to_string()) {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

#[cfg(test)]
mod tests;
