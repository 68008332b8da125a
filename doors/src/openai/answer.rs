//! Answers of the door's own, in the shape that OpenAI's clients read.
//!
//! Not here: answers of engines, which go by as they are (`relay.rs`).

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

use crate::decide::Refusal;
use crate::prompt::Unreadable;

#[derive(Serialize)]
struct Envelope<'a> {
    error: Problem<'a>,
}

#[derive(Serialize)]
struct Problem<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

/// Something of ours as JSON.
pub(super) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    // Our own types become JSON always; an empty body is still an answer.
    let mut response = Response::new(Body::from(serde_json::to_vec(value).unwrap_or_default()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A refusal.
pub(super) fn problem(status: StatusCode, message: &str, code: Option<&'static str>) -> Response<Body> {
    let kind = match status.as_u16() {
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    json(status, &Envelope { error: Problem { message, r#type: kind, param: None, code } })
}

/// The same, with when to ask again: in whole seconds, as the header has it.
pub(super) fn later(
    status: StatusCode,
    message: &str,
    code: &'static str,
    after: Duration,
) -> Response<Body> {
    let mut response = problem(status, message, Some(code));
    let seconds = after.as_millis().div_ceil(1_000).max(1);
    if let Ok(value) = HeaderValue::from_str(&seconds.to_string()) {
        response.headers_mut().insert(RETRY_AFTER, value);
    }
    response
}

pub(super) fn unreadable(error: &Unreadable) -> Response<Body> {
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::BAD_REQUEST);
    problem(status, &error.to_string(), error.code())
}

pub(super) fn refusal(refusal: &Refusal) -> Response<Body> {
    match refusal {
        Refusal::Busy { reason, retry_after } => {
            later(StatusCode::TOO_MANY_REQUESTS, reason, "rate_limit_exceeded", *retry_after)
        }
        Refusal::Nobody { reason, retry_after } => {
            later(StatusCode::SERVICE_UNAVAILABLE, reason, "service_unavailable", *retry_after)
        }
        Refusal::Invalid(reason) => problem(StatusCode::BAD_REQUEST, reason, None),
    }
}
