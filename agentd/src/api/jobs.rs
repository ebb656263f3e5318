//! `/jobs`: submitting, listing, showing, waiting for and steering jobs, and their receipts.

use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use axum::http::header::LOCATION;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toolproto::api::{API_VERSION, JobFilter, JobPage, JobState, JobView, ReceiptList, RollbackReply, Steered};
use toolproto::ids::{CallId, JobId, RequestId};
use toolproto::job::{Accepted, JobRequest};

use super::Api;
use super::body::{Job, JsonBody, Query};
use super::peer::Connection;
use super::problem::Refusal;
use crate::launch::Launch;

/// The longest that one request waits for a result.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// `POST /jobs`.
pub(super) async fn submit<L: Launch>(
    State(api): State<Api<L>>,
    Extension(request_id): Extension<RequestId>,
    connection: Connection,
    JsonBody(request): JsonBody<JobRequest>,
) -> Result<Response, Refusal> {
    let socket = connection.socket()?;
    let accepted = Accepted { request_id, ..api.dispatcher.submit(connection.caller(), socket, request).await? };
    let location = format!("/v1/jobs/{}", accepted.job_id);
    Ok((StatusCode::ACCEPTED, [(LOCATION, location)], Json(accepted)).into_response())
}

/// `GET /jobs`.
pub(super) async fn list<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    Query(filter): Query<JobFilter>,
) -> Result<Json<JobPage>, Refusal> {
    Ok(Json(api.dispatcher.jobs(connection.caller(), filter).await?))
}

/// `GET /jobs/{id}`.
pub(super) async fn show<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    Job(id): Job,
) -> Result<Json<JobView>, Refusal> {
    Ok(Json(api.dispatcher.job(connection.caller(), id).await?))
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct Wait {
    /// Seconds.
    #[serde(default)]
    wait: u64,
}

/// The answer to the question for a result that is not there yet.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Unfinished {
    version: u32,
    job_id: JobId,
    state: JobState,
}

/// `GET /jobs/{id}/result?wait=SECONDS`: 200 with the result, or 202 while the job runs.
pub(super) async fn result<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    Job(id): Job,
    Query(Wait { wait }): Query<Wait>,
) -> Result<Response, Refusal> {
    let wait = Duration::from_secs(wait).min(LONGEST_WAIT);
    let answer = tokio::select! {
        answer = api.dispatcher.result(connection.caller(), id, wait) => answer?,
        () = api.stopping.cancelled() => None,
    };
    Ok(match answer {
        Some(result) => Json(result).into_response(),
        None => {
            let state = api.dispatcher.job(connection.caller(), id).await?.state;
            let unfinished = Unfinished { version: API_VERSION, job_id: id, state };
            (StatusCode::ACCEPTED, Json(unfinished)).into_response()
        }
    })
}

/// `GET /jobs/{id}/receipts`.
pub(super) async fn receipts<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    Job(id): Job,
) -> Result<Json<ReceiptList>, Refusal> {
    let receipts = api.dispatcher.receipts(connection.caller(), id).await?;
    Ok(Json(ReceiptList { version: API_VERSION, receipts }))
}

/// `POST /jobs/{id}/cancel`.
pub(super) async fn cancel<L: Launch>(
    State(api): State<Api<L>>,
    Extension(request_id): Extension<RequestId>,
    connection: Connection,
    Job(id): Job,
) -> Result<Json<Steered>, Refusal> {
    let state = api.dispatcher.job(connection.caller(), id).await?.state;
    api.dispatcher.cancel(connection.caller(), id).await?;
    Ok(Json(Steered { version: API_VERSION, job_id: id, state, request_id }))
}

/// `POST /jobs/{id}/resume`: 202, and the job runs on.
pub(super) async fn resume<L: Launch>(
    State(api): State<Api<L>>,
    Extension(request_id): Extension<RequestId>,
    connection: Connection,
    Job(id): Job,
) -> Result<Response, Refusal> {
    api.dispatcher.resume(connection.caller(), id).await?;
    let state = api.dispatcher.job(connection.caller(), id).await?.state;
    let steered = Steered { version: API_VERSION, job_id: id, state, request_id };
    Ok((StatusCode::ACCEPTED, Json(steered)).into_response())
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct Back {
    to: u64,
}

/// `POST /jobs/{id}/rollback`.
pub(super) async fn rollback<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    Job(id): Job,
    JsonBody(back): JsonBody<Back>,
) -> Result<Json<RollbackReply>, Refusal> {
    let socket = connection.socket()?;
    Ok(Json(api.dispatcher.rollback(connection.caller(), socket, id, back.to).await?))
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct Said {
    text: String,
}

/// `POST /jobs/{id}/messages`.
pub(super) async fn say<L: Launch>(
    State(api): State<Api<L>>,
    Extension(request_id): Extension<RequestId>,
    connection: Connection,
    Job(id): Job,
    JsonBody(said): JsonBody<Said>,
) -> Result<Json<Steered>, Refusal> {
    let state = api.dispatcher.job(connection.caller(), id).await?.state;
    api.dispatcher.say(connection.caller(), id, said.text).await?;
    Ok(Json(Steered { version: API_VERSION, job_id: id, state, request_id }))
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct Approval {
    call_id: CallId,
    decision: Decision,
    #[serde(default)]
    reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Decision {
    Approve,
    Deny,
}

/// `POST /jobs/{id}/approvals`.
pub(super) async fn decide<L: Launch>(
    State(api): State<Api<L>>,
    Extension(request_id): Extension<RequestId>,
    connection: Connection,
    Job(id): Job,
    JsonBody(approval): JsonBody<Approval>,
) -> Result<Json<Steered>, Refusal> {
    let state = api.dispatcher.job(connection.caller(), id).await?.state;
    let approved = approval.decision == Decision::Approve;
    api.dispatcher.decide(connection.caller(), id, approval.call_id, approved, approval.reason).await?;
    Ok(Json(Steered { version: API_VERSION, job_id: id, state, request_id }))
}
