//! `POST /calls`: one tool call without a loop.

use axum::Json;
use axum::extract::State;
use toolproto::api::{CallReply, CallRequest};

use super::Api;
use super::body::JsonBody;
use super::peer::Connection;
use super::problem::Refusal;
use crate::launch::Launch;

/// Runs the call to its end. A client that hangs up drops this future, which ends the call; it is recorded all the same.
pub(super) async fn call<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    JsonBody(request): JsonBody<CallRequest>,
) -> Result<Json<CallReply>, Refusal> {
    let socket = connection.socket()?;
    Ok(Json(api.dispatcher.call(connection.caller(), socket, request).await?))
}
