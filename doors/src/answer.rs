//! Answers of our own, in the shape that OpenAI's clients read: of doors, and of engines that are ours.
//!
//! Not here: answers of engines, which go by as they are (`openai/relay.rs`), and Envoy's words (`picker/words.rs`).

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
    code: Option<&'a str>,
}

/// Something of ours as JSON.
pub fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    with_type(status, serde_json::to_vec(value).unwrap_or_default())
}

fn with_type(status: StatusCode, json: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::from(json));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The body of a refusal.
pub(crate) fn text(status: u16, message: &str, code: Option<&str>) -> Vec<u8> {
    let kind = match status {
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    let error = Problem { message, r#type: kind, param: None, code };
    // Our own types become JSON always; an empty body is still an answer.
    serde_json::to_vec(&Envelope { error }).unwrap_or_default()
}

/// A refusal.
pub fn problem(status: StatusCode, message: &str, code: Option<&'static str>) -> Response<Body> {
    with_type(status, text(status.as_u16(), message, code))
}

/// The same, with when to ask again.
pub fn later(status: StatusCode, message: &str, code: &'static str, after: Duration) -> Response<Body> {
    let mut response = problem(status, message, Some(code));
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds(after)));
    response
}

/// When to ask again, as the header has it: in whole seconds, and never none, or who is told 0 asks again at once.
pub(crate) fn seconds(after: Duration) -> u64 {
    u64::try_from(after.as_millis().div_ceil(1_000)).unwrap_or(u64::MAX).max(1)
}

pub(crate) fn unreadable(error: &Unreadable) -> Response<Body> {
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::BAD_REQUEST);
    problem(status, &error.to_string(), error.code())
}

pub(crate) fn refusal(refusal: &Refusal) -> Response<Body> {
    match refusal {
        Refusal::Busy { reason, retry_after } => {
            later(StatusCode::TOO_MANY_REQUESTS, reason, "rate_limit_exceeded", *retry_after)
        }
        Refusal::Nobody { reason, retry_after } => {
            later(StatusCode::SERVICE_UNAVAILABLE, reason, "service_unavailable", *retry_after)
        }
        Refusal::Invalid(reason) => problem(StatusCode::BAD_REQUEST, reason, None),
        Refusal::Misfit(misfit) => {
            let status = StatusCode::from_u16(misfit.status()).unwrap_or(StatusCode::BAD_REQUEST);
            problem(status, &misfit.to_string(), Some(misfit.code()))
        }
    }
}
