//! What a provider refuses, and the errors it has of its own, in the three formats' words.

use serde_json::{Value, json};

use super::Format;
use super::script::Trouble;

/// A request that a real provider would have answered with an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The HTTP status.
    pub status: u16,
    /// The provider's words.
    pub message: String,
    /// The place in the body, if the provider names one.
    pub parameter: Option<String>,
    /// The provider's short code, if it has one.
    pub code: Option<String>,
}

impl Refusal {
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self { status: 400, message: message.into(), parameter: None, code: None }
    }

    pub(super) fn at(parameter: impl Into<String>, message: impl Into<String>) -> Self {
        Self { parameter: Some(parameter.into()), ..Self::bad(message) }
    }

    pub(super) fn with_code(mut self, code: &str) -> Self {
        self.code = Some(code.to_owned());
        self
    }

    pub(super) fn with_status(mut self, status: u16) -> Self {
        self.status = status;
        self
    }

    /// The body that the provider would send.
    pub(super) fn body(&self, format: Format) -> Value {
        match format {
            Format::Chat | Format::Responses => {
                let kind = if self.status == 401 { "authentication_error" } else { "invalid_request_error" };
                json!({"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}})
            }
            Format::Messages => {
                let kind = match self.status {
                    401 => "authentication_error",
                    404 => "not_found_error",
                    413 => "request_too_large",
                    _ => "invalid_request_error",
                };
                let message = match &self.parameter {
                    Some(place) => format!("{place}: {}", self.message),
                    None => self.message.clone(),
                };
                json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_scripted"})
            }
        }
    }
}

impl Trouble {
    /// The status that the provider gives.
    pub(super) fn status(self, format: Format) -> u16 {
        match (self, format) {
            (Trouble::RateLimit, _) | (Trouble::Quota, Format::Chat | Format::Responses) => 429,
            (Trouble::Quota, Format::Messages) => 400,
            (Trouble::Overloaded, Format::Messages) => 529,
            (Trouble::Overloaded, _) => 503,
            (Trouble::Server, _) => 500,
            (Trouble::ContextLength | Trouble::ContentFilter, _) => 400,
            (Trouble::Authentication, _) => 401,
            (Trouble::ModelUnknown, _) => 404,
        }
    }

    /// The error's type, code and words.
    fn words(self, format: Format) -> (&'static str, Option<&'static str>, &'static str) {
        let anthropic = format == Format::Messages;
        match self {
            Trouble::RateLimit if anthropic => {
                ("rate_limit_error", None, "Number of request tokens has exceeded your per-minute rate limit")
            }
            Trouble::RateLimit => {
                ("requests", Some("rate_limit_exceeded"), "Rate limit reached for requests. Please try again in 1s.")
            }
            Trouble::Quota if anthropic => (
                "invalid_request_error",
                None,
                "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing.",
            ),
            Trouble::Quota => (
                "insufficient_quota",
                Some("insufficient_quota"),
                "You exceeded your current quota, please check your plan and billing details.",
            ),
            Trouble::Overloaded if anthropic => ("overloaded_error", None, "Overloaded"),
            Trouble::Overloaded => (
                "server_error",
                Some("server_is_overloaded"),
                "The engine is currently overloaded, please try again later",
            ),
            Trouble::Server if anthropic => ("api_error", None, "Internal server error"),
            Trouble::Server => ("server_error", None, "The server had an error while processing your request."),
            Trouble::ContextLength if anthropic => {
                ("invalid_request_error", None, "prompt is too long: 210000 tokens > 200000 maximum")
            }
            Trouble::ContextLength => (
                "invalid_request_error",
                Some("context_length_exceeded"),
                "This model's maximum context length is 128000 tokens. However, your messages resulted in 140000 tokens.",
            ),
            Trouble::Authentication if anthropic => ("authentication_error", None, "invalid x-api-key"),
            Trouble::Authentication => {
                ("invalid_request_error", Some("invalid_api_key"), "Incorrect API key provided: sk-*****.")
            }
            Trouble::ContentFilter if anthropic => {
                ("invalid_request_error", None, "Output blocked by content filtering policy")
            }
            Trouble::ContentFilter => (
                "invalid_request_error",
                Some("content_filter"),
                "The response was filtered due to the prompt triggering the content management policy.",
            ),
            Trouble::ModelUnknown if anthropic => ("not_found_error", None, "model: scripted"),
            Trouble::ModelUnknown => {
                ("invalid_request_error", Some("model_not_found"), "The model `scripted` does not exist.")
            }
        }
    }

    /// The body of an error status, and of chat completions' error inside a stream.
    pub(super) fn body(self, format: Format) -> Value {
        let (kind, code, message) = self.words(format);
        match format {
            Format::Chat | Format::Responses => {
                json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
            }
            Format::Messages => {
                json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_scripted"})
            }
        }
    }

    /// The code and the words, for the `error` and `response.failed` events of Responses.
    pub(super) fn code_and_message(self) -> (&'static str, &'static str) {
        let (kind, code, message) = self.words(Format::Responses);
        (code.unwrap_or(kind), message)
    }
}
