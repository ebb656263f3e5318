//! A model's server: where it is, how it is asked, and what all formats put into a request.

use secrecy::ExposeSecret as _;
use serde_json::Value;

use super::http::{self, SetupError, Taken, Timers};
use super::settings::Endpoint;
use super::{ModelError, Request, Thinking};

/// The largest answer that is taken in.
pub(super) const MAX_ANSWER: usize = 8 << 20;

/// How a key is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyHeader {
    /// `authorization: Bearer` (RFC 6750, section 2.1).
    Bearer,
    /// `x-api-key`.
    ApiKey,
}

/// A model's server.
pub(super) struct Server {
    pub(super) endpoint: Endpoint,
    client: reqwest::Client,
    timers: Timers,
    key: KeyHeader,
    headers: &'static [(&'static str, &'static str)],
}

impl Server {
    /// A server that shows keys, and gets these headers with each request.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub(super) fn new(
        endpoint: Endpoint,
        timers: Timers,
        key: KeyHeader,
        headers: &'static [(&'static str, &'static str)],
    ) -> Result<Self, SetupError> {
        Ok(Self { client: http::client(timers)?, endpoint, timers, key, headers })
    }

    /// Asks for an answer as a stream; the body depends on whether the model is to think.
    ///
    /// # Errors
    /// When there is no key, no connection, no answer in time, or a refusal.
    pub(super) async fn ask(
        &self,
        address: &str,
        request: &Request,
        body: impl Fn(Thinking) -> Value,
    ) -> Result<reqwest::Response, ModelError> {
        let post = |thinking| {
            let post = self.client.post(address).header("accept", "text/event-stream").json(&body(thinking));
            let post = self.headers.iter().fold(post, |post, (name, value)| post.header(*name, *value));
            Ok(match (http::key(&self.endpoint)?, self.key) {
                (Some(key), KeyHeader::Bearer) => post.bearer_auth(key.expose_secret()),
                (Some(key), KeyHeader::ApiKey) => post.header("x-api-key", key.expose_secret()),
                (None, _) => post,
            })
        };
        http::send_switched(request.thinking, post, self.timers).await
    }

    /// Reads a stream to its end.
    ///
    /// # Errors
    /// When it stalls, breaks off, or `take` refuses an event.
    pub(super) async fn stream(
        &self,
        response: reqwest::Response,
        take: impl FnMut(&str) -> Result<Taken, ModelError>,
    ) -> Result<(), ModelError> {
        http::stream(response, self.timers, take).await
    }

    /// Reads an answer that is no stream.
    ///
    /// # Errors
    /// When it stalls, breaks off, or is too large.
    pub(super) async fn whole(&self, response: reqwest::Response) -> Result<Vec<u8>, ModelError> {
        http::body(response, MAX_ANSWER, self.timers).await
    }

    /// The most tokens that an answer may have, if anything says so.
    pub(super) fn max_output(&self, request: &Request) -> Option<u64> {
        [self.endpoint.max_output_tokens, request.max_output].into_iter().flatten().min()
    }

    /// Puts into a body what all formats name alike.
    pub(super) fn set(&self, thinking: Thinking, body: &mut Value) {
        if let Some(temperature) = self.endpoint.temperature {
            body["temperature"] = temperature.into();
        }
        if let Some(top_p) = self.endpoint.top_p {
            body["top_p"] = top_p.into();
        }
        self.endpoint.switch(thinking, body);
    }
}
