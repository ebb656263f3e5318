//! `/tools`: listing them, and steering their breakers.

use axum::Json;
use axum::extract::{Path, State};
use toolproto::api::{API_VERSION, BreakerRequest, BreakerView, ToolList};

use super::Api;
use super::body::JsonBody;
use super::peer::Connection;
use super::problem::Refusal;
use crate::launch::Launch;

/// `GET /tools`: the tools that the caller may use.
pub(super) async fn list<L: Launch>(State(api): State<Api<L>>, connection: Connection) -> Json<ToolList> {
    let (tools, extensions) = (api.dispatcher.tools(connection.caller()), api.dispatcher.extensions());
    Json(ToolList { version: API_VERSION, tools, extensions })
}

/// `POST /tools/{name}/breaker`: where the breaker stands afterwards.
pub(super) async fn set_breaker<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    Path(name): Path<String>,
    JsonBody(request): JsonBody<BreakerRequest>,
) -> Result<Json<BreakerView>, Refusal> {
    Ok(Json(api.dispatcher.set_breaker(connection.caller(), &name, &request)?))
}
