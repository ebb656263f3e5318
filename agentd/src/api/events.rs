//! `GET /jobs/{id}/events`: what happens in a job, as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::{Stream, StreamExt};
use schemars::JsonSchema;
use serde::Deserialize;
use toolproto::api::EventView;
use toolproto::code::Code;

use super::Api;
use super::body::{Job, Query};
use super::peer::Connection;
use super::problem::Refusal;
use crate::dispatcher::follow::Until;
use crate::launch::Launch;

/// How often a comment shows that the connection lives.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct Follow {
    /// Whether to go on with what happens, after what has happened.
    #[serde(default = "yes")]
    follow: bool,
}

const fn yes() -> bool {
    true
}

/// The events from the one after `Last-Event-ID` on, until the job has ended.
pub(super) async fn stream<L: Launch>(
    State(api): State<Api<L>>,
    connection: Connection,
    Job(id): Job,
    Query(Follow { follow }): Query<Follow>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>> + use<L>>, Refusal> {
    let after = last_event_id(&headers)?;
    let until = if follow { Until::End } else { Until::Now };
    let events = api.dispatcher.events(connection.caller(), id, after, until).await?;
    let stopping = api.stopping.clone();
    let events = events.take_until(async move { stopping.cancelled().await }).map(|event| Ok(message(&event)));
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE).text("alive")))
}

fn last_event_id(headers: &HeaderMap) -> Result<u64, Refusal> {
    let Some(value) = headers.get("last-event-id") else { return Ok(0) };
    value
        .to_str()
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| Refusal::new(Code::InputInvalid, "Last-Event-ID is no event's sequence"))
}

fn message(event: &EventView) -> Event {
    let message = Event::default().event(event.body.name());
    let message = match event.sequence {
        Some(sequence) => message.id(sequence.to_string()),
        None => message,
    };
    match message.clone().json_data(event) {
        Ok(message) => message,
        Err(error) => {
            tracing::error!(%error, "an event has no JSON form");
            message.data("{}")
        }
    }
}
