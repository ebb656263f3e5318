//! Tool protocol 1, progress: lines of JSON that a tool may write to the descriptor named in `AGENTD_EVENTS_FD`.
//!
//! Progress is a courtesy. A line that is no event is skipped and counted by whoever reads them; it never fails a call.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::strict_json::{self, JsonError};

/// The environment variable that names the descriptor.
pub const EVENTS_VARIABLE: &str = "AGENTD_EVENTS_FD";
/// The longest line that is read, in bytes, without its end.
pub const MAX_LINE: usize = 4096;

/// How far a call is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The share that is done, between 0 and 1.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub progress: Option<f64>,
    /// What is being done.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub message: Option<String>,
}

/// Why a line is no event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgressError {
    /// Longer than [`MAX_LINE`].
    #[error("the line has {0} bytes; at most {MAX_LINE} are read")]
    TooLong(usize),
    /// No JSON.
    #[error("the line is no JSON object: {0}")]
    Malformed(#[from] JsonError),
    /// JSON of another shape.
    #[error("the event breaks the protocol at {pointer}: {reason}")]
    Shape {
        /// JSON pointer.
        pointer: &'static str,
        /// What is wrong there.
        reason: &'static str,
    },
}

impl Progress {
    /// Reads one line.
    ///
    /// # Errors
    /// When it is no event of the protocol.
    pub fn read(line: &[u8]) -> Result<Self, ProgressError> {
        if line.len() > MAX_LINE {
            return Err(ProgressError::TooLong(line.len()));
        }
        let Value::Object(mut members) = strict_json::parse(line)? else {
            return Err(ProgressError::Shape { pointer: "", reason: "is no object" });
        };
        let progress = match members.get("progress") {
            None => None,
            Some(number) => Some(
                number
                    .as_f64()
                    .filter(|share| (0.0..=1.0).contains(share))
                    .ok_or(ProgressError::Shape { pointer: "/progress", reason: "is no number between 0 and 1" })?,
            ),
        };
        let message = match members.remove("message") {
            None => None,
            Some(Value::String(text)) => Some(text),
            Some(_) => return Err(ProgressError::Shape { pointer: "/message", reason: "is no string" }),
        };
        if progress.is_none() && message.is_none() {
            return Err(ProgressError::Shape { pointer: "", reason: "has neither progress nor message" });
        }
        Ok(Self { progress, message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_and_others_are_named() {
        let event = Progress::read(b"{\"progress\":0.4,\"message\":\"reading\",\"more\":1}\r\n").unwrap();
        assert_eq!(event, Progress { progress: Some(0.4), message: Some("reading".to_owned()) });
        assert_eq!(Progress::read(b"{\"progress\":1}").unwrap().progress, Some(1.0));
        for (line, expected) in [
            ("", "no JSON object"),
            ("40%", "at byte 2"),
            ("[0.4]", "is no object"),
            ("{\"progress\":40}", "at /progress"),
            ("{\"progress\":\"0.4\"}", "at /progress"),
            ("{\"message\":4}", "at /message"),
            ("{}", "neither progress nor message"),
            (&format!("{{\"message\":\"{}\"}}", "x".repeat(MAX_LINE)), "at most 4096"),
        ] {
            let error = Progress::read(line.as_bytes()).expect_err(line).to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
