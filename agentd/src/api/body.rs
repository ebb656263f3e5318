//! Reading bodies, queries and ids, each refused with what exactly is wrong where.

use std::time::Duration;

use axum::extract::{FromRef, FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use toolproto::code::Code;
use toolproto::ids::JobId;
use toolproto::job::{Problem, Violation};
use toolproto::strict_json;

use super::problem::Refusal;

/// How long a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(30);

/// The longest body.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit(pub(super) usize);

/// A JSON body of this shape, strictly read.
#[derive(Debug)]
pub(super) struct JsonBody<T>(pub(super) T);

impl<S, T> FromRequest<S> for JsonBody<T>
where
    S: Send + Sync,
    Limit: FromRef<S>,
    T: DeserializeOwned,
{
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let Limit(limit) = Limit::from_ref(state);
        let body = Limited::new(request.into_body(), limit).collect();
        let body = tokio::time::timeout(BODY_TIME, body)
            .await
            .map_err(|_| Refusal::new(Code::InputInvalid, format!("the body took over {BODY_TIME:?} to arrive")))?
            .map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => Refusal::new(Code::RequestTooLarge, format!("the body is larger than {limit} bytes")),
                None => Refusal::new(Code::InputInvalid, format!("the body could not be read: {error}")),
            })?;
        read(&body.to_bytes()).map(Self)
    }
}

/// Reads a body: JSON first, then its shape.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    let value = strict_json::parse(bytes).map_err(|error| {
        let problem = Problem::new(Code::InputInvalid, format!("the body is not JSON: {error}"));
        Refusal(problem.at_offset(error.offset))
    })?;
    // Small bodies such as a message's have no version; those that need one miss it as any other field.
    if let Some(version) = value.get("version")
        && version.as_u64() != Some(1)
    {
        return Err(misfit("/version", "const", &format!("version {version} is unknown; this API reads version 1")));
    }
    serde_path_to_error::deserialize(value).map_err(|error| {
        let pointer = pointer(error.path());
        misfit(&pointer, "type", &error.into_inner().to_string())
    })
}

fn misfit(pointer: &str, rule: &str, message: &str) -> Refusal {
    let violation = Violation { pointer: pointer.to_owned(), rule: rule.to_owned(), message: message.to_owned() };
    let at = if pointer.is_empty() { String::new() } else { format!(" at {pointer}") };
    Refusal(
        Problem::new(Code::InputInvalid, format!("the body does not fit{at}: {message}"))
            .with_violations(vec![violation]),
    )
}

/// Serde's path as a JSON pointer (RFC 6901).
fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    path.iter()
        .filter_map(|segment| match segment {
            Segment::Seq { index } => Some(format!("/{index}")),
            Segment::Map { key } => Some(format!("/{}", key.replace('~', "~0").replace('/', "~1"))),
            Segment::Enum { .. } | Segment::Unknown => None,
        })
        .collect()
}

/// A query of this shape.
#[derive(Debug)]
pub(super) struct Query<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Refusal> {
        axum::extract::Query::try_from_uri(&parts.uri)
            .map(|axum::extract::Query(query)| Self(query))
            .map_err(|error| Refusal::new(Code::InputInvalid, format!("the query does not fit: {}", error.body_text())))
    }
}

/// The job that the path names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job(pub(super) JobId);

impl<S: Send + Sync> FromRequestParts<S> for Job {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|error| Refusal::new(Code::NotFound, error.body_text()))?;
        // What is no id names no job.
        text.parse().map(Self).map_err(|_| Refusal::new(Code::NotFound, format!("there is no job `{text}`")))
    }
}

#[cfg(test)]
mod tests {
    use toolproto::job::JobRequest;

    use super::*;

    fn refusal(text: &str) -> Problem {
        read::<JobRequest>(text.as_bytes()).unwrap_err().0
    }

    #[test]
    fn malformed_json_is_refused_with_its_offset() {
        let problem = refusal("{\"version\":1,}");
        assert_eq!((problem.code, problem.status), (Code::InputInvalid, 400));
        assert!(problem.offset.is_some_and(|offset| (12..=14).contains(&offset)), "{problem:?}");
    }

    #[test]
    fn a_misfit_names_pointer_and_rule() {
        let problem = refusal(r#"{"version":1,"agent":"a","goal":{},"budget":{"max_turns":"many"}}"#);
        assert_eq!(problem.status, 422);
        assert_eq!(problem.violations[0].pointer, "/budget/max_turns");
        let problem = refusal(r#"{"version":2,"agent":"a","goal":{}}"#);
        assert_eq!(problem.violations[0].pointer, "/version");
        assert!(refusal(r#"{"agent":"a"}"#).detail.contains("version"));
    }

    #[test]
    fn a_job_is_read_and_unknown_fields_are_let_be() {
        let job: JobRequest = read(br#"{"version":1,"agent":"a","goal":{},"later":true}"#).unwrap();
        assert_eq!(job.agent, "a");
    }
}
