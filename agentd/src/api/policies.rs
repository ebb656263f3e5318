//! `GET /policies`.

use axum::Json;
use axum::extract::State;
use toolproto::api::{API_VERSION, PolicyList};

use super::Api;
use crate::launch::Launch;

/// All policies: what confines a tool is no secret from those who use it.
pub(super) async fn list<L: Launch>(State(api): State<Api<L>>) -> Json<PolicyList> {
    Json(PolicyList { version: API_VERSION, policies: api.dispatcher.policies() })
}
