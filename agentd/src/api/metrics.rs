//! `GET /metrics`.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use toolproto::code::Code;

use super::Api;
use super::problem::Refusal;
use crate::launch::Launch;
use crate::observe::metrics;

/// The figures as OpenMetrics text.
pub(super) async fn show<L: Launch>(State(api): State<Api<L>>) -> Result<Response, Refusal> {
    let text =
        api.observer.metrics().text(&api.dispatcher.load()).map_err(|error| {
            Refusal::new(Code::InternalLogicError, format!("the figures cannot be written: {error}"))
        })?;
    Ok(([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}
