//! `/jobs/{id}/spilled/{reference}`: results that were kept apart.

use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use toolproto::code::Code;

use super::Api;
use super::peer::Connection;
use super::problem::Refusal;
use crate::launch::Launch;

/// `GET /jobs/{id}/spilled/{reference}`: the bytes whose digest the reference is.
pub(super) async fn show<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    Path((id, reference)): Path<(String, String)>,
) -> Result<impl IntoResponse, Refusal> {
    // What is no id names no job, and what is no reference no result.
    let none = |what: &str, text: &str| Refusal::new(Code::NotFound, format!("there is no {what} `{text}`"));
    let job = id.parse().map_err(|_| none("job", &id))?;
    let digest = reference.parse().map_err(|_| none("result", &reference))?;
    let text = api.dispatcher.spilled(connection.caller(), job, digest).await?;
    Ok(([(CONTENT_TYPE, "application/json")], text))
}
