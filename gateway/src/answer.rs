//! Answers that kvfleet itself writes, in the shape of OpenAI's API. The gateway and kvfleet's own
//! engines use them.
//!
//! Not here: answers of engines, which are relayed unchanged (`openai/relay.rs`), and Envoy's
//! messages (`picker/messages.rs`).

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

use crate::decide::Refusal;
use crate::keys::{AuthError, KeyBusy};
use crate::prompt::PromptError;

#[derive(Serialize)]
struct ErrorEnvelope<'a> {
    error: ErrorObject<'a>,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

/// JSON response with `value` as its body.
pub fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    json_response(status, serde_json::to_vec(value).unwrap_or_default())
}

fn json_response(status: StatusCode, json: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::from(json));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// JSON body of an error.
pub(crate) fn error_json(status: u16, message: &str, code: Option<&str>) -> Vec<u8> {
    let kind = match status {
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    let error = ErrorObject { message, r#type: kind, param: None, code };
    // These types always serialise; an empty body would still be an answer.
    serde_json::to_vec(&ErrorEnvelope { error }).unwrap_or_default()
}

/// Error response.
pub fn error_response(status: StatusCode, message: &str, code: Option<&'static str>) -> Response<Body> {
    json_response(status, error_json(status.as_u16(), message, code))
}

/// Error response with a `Retry-After` header.
pub fn retry_later(status: StatusCode, message: &str, code: &'static str, after: Duration) -> Response<Body> {
    let mut response = error_response(status, message, Some(code));
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(retry_after_seconds(after)));
    response
}

/// Value of `Retry-After`: whole seconds, rounded up, at least 1. A client that reads 0 retries at
/// once.
pub(crate) fn retry_after_seconds(after: Duration) -> u64 {
    u64::try_from(after.as_millis().div_ceil(1_000)).unwrap_or(u64::MAX).max(1)
}

/// Response to a request without a valid API key.
pub(crate) fn unauthenticated_response(error: AuthError) -> Response<Body> {
    let mut response = error_response(StatusCode::UNAUTHORIZED, &error.to_string(), Some("invalid_api_key"));
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Response to a request beyond a limit of its API key.
pub(crate) fn key_busy_response(busy: &KeyBusy) -> Response<Body> {
    let (status, after) = (StatusCode::TOO_MANY_REQUESTS, Duration::from_secs(1));
    retry_later(status, &busy.to_string(), "rate_limit_exceeded", after)
}

pub(crate) fn unreadable_response(error: &PromptError) -> Response<Body> {
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::BAD_REQUEST);
    error_response(status, &error.to_string(), error.code())
}

pub(crate) fn refusal_response(refusal: &Refusal) -> Response<Body> {
    match refusal {
        Refusal::Busy { reason, retry_after } => {
            retry_later(StatusCode::TOO_MANY_REQUESTS, reason, "rate_limit_exceeded", *retry_after)
        }
        Refusal::Unavailable { reason, retry_after } => {
            retry_later(StatusCode::SERVICE_UNAVAILABLE, reason, "service_unavailable", *retry_after)
        }
        Refusal::Invalid(reason) => error_response(StatusCode::BAD_REQUEST, reason, None),
        Refusal::NoFit(misfit) => {
            let status = StatusCode::from_u16(misfit.status()).unwrap_or(StatusCode::BAD_REQUEST);
            error_response(status, &misfit.to_string(), Some(misfit.code()))
        }
    }
}
