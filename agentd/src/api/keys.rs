//! `GET /keys`.

use axum::Json;
use axum::extract::State;
use toolproto::api::{API_VERSION, KeyList};

use super::Api;
use crate::launch::Launch;

/// The keys that verify receipts.
pub(super) async fn list<L: Launch>(State(api): State<Api<L>>) -> Json<KeyList> {
    Json(KeyList { version: API_VERSION, keys: api.keys })
}
