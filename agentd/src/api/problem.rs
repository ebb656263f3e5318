//! Refusals as RFC 9457 problem details. Handlers return [`Refusal`]; it is printed in one place, with the request's id.

use axum::Json;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use toolproto::code::Code;
use toolproto::ids::RequestId;
use toolproto::job::Problem;

use crate::observe::{Observation, Observer};

/// A refused request.
#[derive(Clone, Debug)]
pub(super) struct Refusal(pub(super) Problem);

impl Refusal {
    pub(super) fn new(code: Code, detail: impl Into<String>) -> Self {
        Self(Problem::new(code, detail))
    }
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// The response as it leaves: a refusal gets its body, a line in the log and one in the audit log.
pub(super) fn printed(
    mut response: Response,
    id: RequestId,
    uid: Option<u32>,
    head: String,
    observer: &Observer,
) -> Response {
    let Some(Refusal(mut problem)) = response.extensions_mut().remove::<Refusal>() else { return response };
    problem.request_id = Some(id);
    if problem.status >= 500 {
        tracing::warn!(request = %id, head, code = %problem.code, detail = problem.detail, "request failed");
    } else {
        tracing::info!(request = %id, head, code = %problem.code, detail = problem.detail, "request refused");
    }
    let (code, detail) = (problem.code, problem.detail.clone());
    observer.tell(Observation::Refused { uid, request: id, head, code, detail });
    let busy = problem.status == 503;
    let mut printed = (response.status(), Json(problem)).into_response();
    printed.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if busy {
        printed.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("5"));
    }
    printed
}

/// Nothing lies under the path.
pub(super) async fn no_such_route(uri: Uri) -> Refusal {
    Refusal::new(Code::NotFound, format!("the API has no {}", uri.path()))
}

/// Something lies under the path, but not for this method.
pub(super) async fn no_such_method(method: Method, uri: Uri) -> Refusal {
    let mut problem = Problem::new(Code::InputInvalid, format!("{} does not take {method}", uri.path()));
    problem.status = StatusCode::METHOD_NOT_ALLOWED.as_u16();
    Refusal(problem)
}
