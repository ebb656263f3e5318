//! HTTP/1.1 over the daemon's Unix socket: one connection per request.

use std::path::PathBuf;

use futures_util::Stream;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use toolproto::api::EventView;
use toolproto::job::Problem;

use super::failure::Failure;
use crate::sse;

/// The daemon behind a socket.
#[derive(Clone, Debug)]
pub struct Daemon {
    socket: PathBuf,
}

impl Daemon {
    /// The daemon that listens on this socket. Nothing is opened yet.
    #[must_use]
    pub const fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// `GET /v1{path}`.
    ///
    /// # Errors
    /// When the daemon cannot be reached or refuses.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.answer(Method::GET, path, Bytes::new()).await.map(|(_, body)| body)
    }

    /// `GET /v1{path}`, with the answer's status.
    ///
    /// # Errors
    /// When the daemon cannot be reached or refuses.
    pub async fn get_with_status<T: DeserializeOwned>(&self, path: &str) -> Result<(StatusCode, T), Failure> {
        self.answer(Method::GET, path, Bytes::new()).await
    }

    /// `POST /v1{path}` with a value as JSON.
    ///
    /// # Errors
    /// When the daemon cannot be reached or refuses.
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, Failure> {
        self.post_bytes(path, to_json(body)?).await
    }

    /// `POST /v1{path}` with these bytes as they are, so that the daemon's offsets are those of the user's file.
    ///
    /// # Errors
    /// When the daemon cannot be reached or refuses.
    pub async fn post_bytes<T: DeserializeOwned>(&self, path: &str, body: Bytes) -> Result<T, Failure> {
        self.answer(Method::POST, path, body).await.map(|(_, body)| body)
    }

    /// `POST /v1{path}` with an upgrade to `protocol`.
    ///
    /// # Errors
    /// When the daemon cannot be reached or refuses.
    pub async fn upgrade(
        &self,
        path: &str,
        protocol: &str,
        body: &impl Serialize,
    ) -> Result<TokioIo<Upgraded>, Failure> {
        let request =
            request(Method::POST, path, to_json(body)?).header(CONNECTION, "Upgrade").header(UPGRADE, protocol);
        let response = self.send(request).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(refusal(response).await);
        }
        hyper::upgrade::on(response).await.map(TokioIo::new).map_err(|error| broken(&error))
    }

    /// `GET /v1{path}` as a stream of events, from the one after `after` on.
    ///
    /// # Errors
    /// When the daemon cannot be reached or refuses; the stream's items when the connection breaks.
    pub async fn events(
        &self,
        path: &str,
        after: Option<u64>,
    ) -> Result<impl Stream<Item = Result<EventView, Failure>> + use<>, Failure> {
        let mut request = request(Method::GET, path, Bytes::new());
        if let Some(after) = after {
            request.0 = request.0.header("last-event-id", after);
        }
        let response = self.send(request).await?;
        if response.status() != StatusCode::OK {
            return Err(refusal(response).await);
        }
        Ok(futures_util::stream::unfold((response.into_body(), sse::Parser::default()), next_event))
    }

    async fn answer<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, T), Failure> {
        let response = self.send(request(method, path, body)).await?;
        let status = response.status();
        if !status.is_success() {
            return Err(refusal(response).await);
        }
        let body = response.into_body().collect().await.map_err(|error| broken(&error))?.to_bytes();
        let body = serde_json::from_slice(&body)
            .map_err(|error| Failure::Conversation(format!("the answer to {path} is not as expected: {error}")))?;
        Ok((status, body))
    }

    async fn send(&self, request: Prepared) -> Result<Response<Incoming>, Failure> {
        let stream =
            UnixStream::connect(&self.socket).await.map_err(|error| Failure::connecting(&self.socket, error))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| broken(&error))?;
        // The task ends with the connection; its error reaches the caller through the request or its body.
        tokio::spawn(connection.with_upgrades());
        let request = request
            .0
            .body(Full::new(request.1))
            .map_err(|error| Failure::Conversation(format!("the request cannot be built: {error}")))?;
        sender.send_request(request).await.map_err(|error| broken(&error))
    }
}

/// A request's head and its body.
struct Prepared(hyper::http::request::Builder, Bytes);

impl Prepared {
    fn header(self, name: hyper::header::HeaderName, value: &str) -> Self {
        Self(self.0.header(name, value), self.1)
    }
}

fn request(method: Method, path: &str, body: Bytes) -> Prepared {
    let builder = Request::builder()
        .method(method)
        .uri(format!("/v1{path}"))
        .header(HOST, "agentd")
        .header(CONTENT_TYPE, "application/json");
    Prepared(builder, body)
}

fn to_json(value: &impl Serialize) -> Result<Bytes, Failure> {
    serde_json::to_vec(value)
        .map(Bytes::from)
        .map_err(|error| Failure::Conversation(format!("the request cannot be written as JSON: {error}")))
}

async fn refusal(response: Response<Incoming>) -> Failure {
    let status = response.status();
    let body = match response.into_body().collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return broken(&error),
    };
    match serde_json::from_slice::<Problem>(&body) {
        Ok(problem) => Failure::Refused(Box::new(problem)),
        Err(_) => Failure::Conversation(format!("the daemon answered {status} without saying why")),
    }
}

fn broken(error: &hyper::Error) -> Failure {
    let cause = std::error::Error::source(error).map(|source| format!(" ({source})")).unwrap_or_default();
    Failure::Conversation(format!("{error}{cause}"))
}

/// One step of the event stream: parsed events first, then more of the body; over at the body's end.
async fn next_event(
    (mut body, mut parser): (Incoming, sse::Parser),
) -> Option<(Result<EventView, Failure>, (Incoming, sse::Parser))> {
    loop {
        match parser.next_message() {
            Ok(Some(message)) => {
                let event = serde_json::from_str(&message.data)
                    .map_err(|error| Failure::Conversation(format!("an event is not as expected: {error}")));
                return Some((event, (body, parser)));
            }
            Ok(None) => {}
            Err(error) => return Some((Err(Failure::Conversation(error.to_string())), (body, parser))),
        }
        match body.frame().await? {
            Ok(frame) => {
                if let Some(bytes) = frame.data_ref() {
                    parser.push(bytes);
                }
            }
            Err(error) => return Some((Err(broken(&error)), (body, parser))),
        }
    }
}
