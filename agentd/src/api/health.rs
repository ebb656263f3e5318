//! `GET /health`.

use axum::Json;
use axum::extract::State;
use toolproto::api::{API_VERSION, Health};

use super::Api;
use crate::launch::Launch;

/// Whether the daemon takes jobs, and how many it has.
pub(super) async fn show<L: Launch>(State(api): State<Api<L>>) -> Json<Health> {
    let load = api.dispatcher.load();
    let status = if api.stopping.is_cancelled() { "stopping" } else { "ok" };
    Json(Health {
        version: API_VERSION,
        status: status.to_owned(),
        agentd_version: env!("CARGO_PKG_VERSION").to_owned(),
        started: api.started,
        jobs_running: load.running as u64,
        jobs_queued: load.queued as u64,
    })
}
