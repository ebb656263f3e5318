//! HTTP towards model servers: timers, and what a refusal means.

use std::time::Duration;

use futures_util::StreamExt as _;
use secrecy::SecretString;
use serde_json::{Value, json};
use toolproto::code::Code;

use super::settings::Endpoint;
use super::{ModelError, Retry, Thinking};
use crate::sse;

/// How long a model server may be silent, at three places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// Until the connection stands.
    pub connect: Duration,
    /// Until the first data.
    pub first_data: Duration,
    /// Between data; comments and pings are none.
    pub idle: Duration,
}

impl Timers {
    /// The timers of a `model` tier of this length.
    #[must_use]
    pub fn of_tier(tier: Duration) -> Self {
        Self { connect: tier.min(Duration::from_secs(10)), first_data: tier, idle: tier }
    }
}

/// HTTP cannot be spoken at all.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client cannot be set up")]
pub struct SetupError(#[from] reqwest::Error);

/// The most bytes of one answer's events.
const MAX_STREAM: usize = 32 << 20;
/// The largest refusal that is read.
const MAX_REFUSAL: usize = 64 << 10;

/// A client that follows no redirect: a key must not travel to another host.
///
/// # Errors
/// When TLS cannot be set up.
pub fn client(timers: Timers) -> Result<reqwest::Client, SetupError> {
    // Already installed is as good as installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Ok(reqwest::Client::builder()
        .connect_timeout(timers.connect)
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("agentd/", env!("CARGO_PKG_VERSION")))
        .build()?)
}

/// Sends a request, and reads a refusal if it is one.
///
/// # Errors
/// When there is no connection, no answer in time, or a refusal.
pub async fn send(request: reqwest::RequestBuilder, timers: Timers) -> Result<reqwest::Response, ModelError> {
    let response = tokio::time::timeout(timers.connect + timers.first_data, request.send())
        .await
        .map_err(|_| ModelError::passing("the model's server did not answer in time"))?
        .map_err(|error| broken(&error))?;
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let after = retry_after(response.headers());
    let refusal = body(response, MAX_REFUSAL, timers).await.unwrap_or_default();
    let refusal = serde_json::from_slice(&refusal)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&refusal).chars().take(500).collect()));
    let mut error = classify(Some(status.as_u16()), refusal.get("error").unwrap_or(&refusal));
    if let (Retry::Backoff, Some(after)) = (error.retry, after) {
        error.retry = Retry::After(after);
    }
    Err(error)
}

/// Sends a request in which thinking may be turned off. There is no one way to say that; a server that refuses the agent's way
/// is asked without it.
///
/// # Errors
/// As [`send`].
pub async fn send_switched(
    thinking: Thinking,
    post: impl Fn(Thinking) -> Result<reqwest::RequestBuilder, ModelError>,
    timers: Timers,
) -> Result<reqwest::Response, ModelError> {
    let refused = match send(post(thinking)?, timers).await {
        Err(error) if thinking == Thinking::Off && error.code == Code::ModelUnavailable => error,
        other => return other,
    };
    if !matches!(refused.details["status"].as_u64(), Some(400 | 422)) {
        return Err(refused);
    }
    tracing::warn!(error = %refused, "the model's server does not know how its thinking is turned off; see `thinking_off`");
    send(post(Thinking::AsConfigured)?, timers).await
}

/// What an event of a stream was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// A part of the answer.
    Data,
    /// A sign of life, which says nothing: a dead stream could send it for ever.
    Nothing,
    /// The answer's end.
    End,
}

/// Reads a stream of server-sent events until `take` has found the end, or the server closes it.
///
/// # Errors
/// When it stalls, breaks off, or `take` refuses an event.
pub async fn stream(
    response: reqwest::Response,
    timers: Timers,
    mut take: impl FnMut(&str) -> Result<Taken, ModelError>,
) -> Result<(), ModelError> {
    let mut bytes = response.bytes_stream();
    let mut parser = sse::Parser::default();
    let mut size = 0;
    let (mut wait, mut silent_since) = (timers.first_data, tokio::time::Instant::now());
    loop {
        let left = wait.saturating_sub(silent_since.elapsed());
        let chunk = match tokio::time::timeout(left, bytes.next()).await {
            Ok(Some(chunk)) => chunk.map_err(|error| broken(&error))?,
            Ok(None) => return Ok(()),
            Err(_) => {
                let words = format!("the model's server sent no data for {} s", wait.as_secs_f32());
                return Err(ModelError::passing(words));
            }
        };
        parser.push(&chunk);
        while let Some(message) = parser.next_message().map_err(|error| ModelError::passing(error.to_string()))? {
            size += message.data.len();
            if size > MAX_STREAM {
                return Err(ModelError::passing("the model's answer outgrew every bound"));
            }
            match take(&message.data)? {
                Taken::Data => (wait, silent_since) = (timers.idle, tokio::time::Instant::now()),
                Taken::Nothing => {}
                Taken::End => return Ok(()),
            }
        }
    }
}

/// The endpoint's key, if it needs one.
///
/// # Errors
/// When it is not where the agent's file says.
pub fn key(endpoint: &Endpoint) -> Result<Option<SecretString>, ModelError> {
    let revealed = endpoint.api_key.as_ref().map(super::settings::Credential::reveal).transpose();
    revealed.map_err(|error| ModelError::lasting(Code::ModelUnavailable, format!("no API key: {error}")))
}

/// Reads a whole body.
///
/// # Errors
/// When it stalls, breaks off, or is too large.
pub async fn body(response: reqwest::Response, limit: usize, timers: Timers) -> Result<Vec<u8>, ModelError> {
    let mut bytes = response.bytes_stream();
    let mut body = Vec::new();
    loop {
        match tokio::time::timeout(timers.idle, bytes.next()).await {
            Ok(Some(chunk)) => body.extend_from_slice(&chunk.map_err(|error| broken(&error))?),
            Ok(None) => return Ok(body),
            Err(_) => return Err(ModelError::passing("the model's server stopped sending")),
        }
        if body.len() > limit {
            return Err(ModelError::passing("the model's server sent too much"));
        }
    }
}

/// A connection that failed or broke.
#[must_use]
pub fn broken(error: &reqwest::Error) -> ModelError {
    // reqwest's own text names the URL and leaves out the cause.
    let mut words = vec!["the connection to the model's server failed".to_owned()];
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        words.push(cause.to_string());
        source = cause.source();
    }
    ModelError::passing(words.join(": "))
}

/// What a server's refusal means: by HTTP status where there is one, and by what it says.
#[must_use]
pub fn classify(status: Option<u16>, refusal: &Value) -> ModelError {
    let text = |key: &str| refusal.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (kind, code) = (text("type"), text("code"));
    let message = match refusal {
        Value::String(words) => words.clone(),
        other => other.get("message").and_then(Value::as_str).map_or_else(|| other.to_string(), str::to_owned),
    };
    let says = |words: &[&str]| {
        let all = format!("{kind} {code} {message}").to_lowercase();
        words.iter().any(|word| all.contains(word))
    };
    let told: String = message.chars().take(500).collect();
    let words = match status {
        Some(status) => format!("the model's server answered {status}: {told}"),
        None => format!("the model's server reported an error: {told}"),
    };
    let details = json!({"status": status, "type": kind, "code": code});
    let lasting = |code: Code| ModelError { details: details.clone(), ..ModelError::lasting(code, words.clone()) };
    let too_long = ["context_length", "context length", "maximum context", "too many tokens", "prompt is too long"];
    if status == Some(413) || says(&too_long) {
        return lasting(Code::ContextOverflow);
    }
    if says(&["insufficient_quota", "billing", "credit balance", "quota exceeded", "exceeded your current quota"]) {
        return lasting(Code::ModelQuotaExhausted);
    }
    match status {
        None => {}
        Some(408 | 409 | 425 | 429 | 500..=599) => {}
        Some(_) => return lasting(Code::ModelUnavailable),
    }
    ModelError { details, ..ModelError::passing(words) }
}

/// `Retry-After` in seconds or as a date (RFC 9110 section 10.2.3), or in milliseconds as some servers send it.
fn retry_after(headers: &reqwest::header::HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    if let Some(millis) = text("retry-after-ms").and_then(|text| text.parse().ok()) {
        return Some(Duration::from_millis(millis));
    }
    let after = text("retry-after")?;
    if let Ok(seconds) = after.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(after).ok()?.timestamp();
    Some(Duration::try_from(date.duration_since(jiff::Timestamp::now())).unwrap_or(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_is_told_from_rate_limit() {
        let rate = classify(Some(429), &json!({"message": "slow down", "type": "rate_limit_error"}));
        assert_eq!((rate.code, rate.retry), (Code::ModelUnavailable, Retry::Backoff));
        let quota = classify(Some(429), &json!({"message": "x", "code": "insufficient_quota"}));
        assert_eq!((quota.code, quota.retry), (Code::ModelQuotaExhausted, Retry::No));
    }

    #[test]
    fn overflow_and_wrong_keys_are_not_repeated() {
        let overflow = classify(Some(400), &json!({"message": "maximum context length is 8192 tokens"}));
        assert_eq!((overflow.code, overflow.retry), (Code::ContextOverflow, Retry::No));
        assert_eq!(classify(Some(413), &Value::Null).code, Code::ContextOverflow);
        assert_eq!(classify(Some(401), &json!("who are you")).retry, Retry::No);
        assert_eq!(classify(Some(503), &json!("later")).retry, Retry::Backoff);
        assert_eq!(classify(None, &json!({"type": "overloaded_error", "message": "busy"})).retry, Retry::Backoff);
    }

    #[test]
    fn waiting_times_are_read_in_all_their_forms() {
        let header = |name: &'static str, value: &str| {
            let mut headers = reqwest::header::HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            retry_after(&headers)
        };
        assert_eq!(header("retry-after", "7"), Some(Duration::from_secs(7)));
        assert_eq!(header("retry-after-ms", "1500"), Some(Duration::from_millis(1500)));
        assert_eq!(header("retry-after", "Fri, 31 Dec 1999 23:59:59 GMT"), Some(Duration::ZERO));
        assert_eq!(header("retry-after", "soon"), None);
    }
}
