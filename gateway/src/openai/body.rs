//! Bodies of requests: receives one within the limits, and adds a field to its JSON.
//!
//! Not here: reading the JSON (`crate::prompt`), and removing fields (`steering.rs`).

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Response, StatusCode};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::config::OpenAiConfig;
use crate::answer;
use crate::keys::Caller;
use crate::prompt::PromptError;

/// Limits on the bodies of requests.
#[derive(Debug)]
pub(super) struct BodyLimits {
    /// Longest body.
    bytes_max: usize,
    /// Longest pause.
    idle: Duration,
    /// Longest time until its end.
    timeout: Duration,
    /// A permit for each byte of all bodies in flight.
    permits: Arc<Semaphore>,
}

/// Permits for the bytes of one body.
#[derive(Debug, Default)]
pub(super) struct BodyPermits {
    /// Of the limit on all bodies.
    router: Option<OwnedSemaphorePermit>,
    /// Of the limit of the caller's key.
    key: Option<OwnedSemaphorePermit>,
}

impl BodyLimits {
    pub(super) fn new(config: &OpenAiConfig) -> BodyLimits {
        BodyLimits {
            bytes_max: config.body_bytes_max,
            idle: config.idle_timeout(),
            timeout: Duration::from_millis(config.body_ms),
            permits: Arc::new(Semaphore::new(config.bodies_bytes_max.min(Semaphore::MAX_PERMITS))),
        }
    }

    /// Receives a whole body, with permits for its bytes. `declared` is its length, if announced.
    pub(super) async fn receive(
        &self,
        mut body: Body,
        declared: Option<usize>,
        caller: &Caller,
    ) -> Result<(Bytes, BodyPermits), Response<Body>> {
        let too_large = || answer::unreadable_response(&PromptError::TooLarge { limit: self.bytes_max });
        if declared.is_some_and(|length| length > self.bytes_max) {
            return Err(too_large());
        }
        let mut permits = BodyPermits::default();
        let mut all = BytesMut::new();
        let mut single = Bytes::new();
        let deadline = Instant::now() + self.timeout;
        loop {
            let idle_deadline = Instant::now() + self.idle;
            let next = timeout_at(deadline.min(idle_deadline), body.frame()).await;
            let Ok(next) = next else {
                let text = if deadline < idle_deadline {
                    "the body took too long to arrive (gateway.openai.body_ms)"
                } else {
                    "the body stalled"
                };
                return Err(answer::error_response(StatusCode::REQUEST_TIMEOUT, text, None));
            };
            let Some(frame) = next else { break };
            let Ok(frame) = frame else {
                return Err(answer::error_response(StatusCode::BAD_REQUEST, "the body broke off", None));
            };
            let Ok(data) = frame.into_data() else { continue };
            if all.len() + single.len() + data.len() > self.bytes_max {
                return Err(too_large());
            }
            permits.add(self, caller, data.len()).map_err(|refusal| *refusal)?;
            // Most bodies arrive in one frame, which is not copied.
            if single.is_empty() && all.is_empty() {
                single = data;
            } else {
                if all.is_empty() {
                    // Reserve for received bytes only, not for the declared length.
                    all.reserve(single.len() + data.len());
                    all.extend_from_slice(&std::mem::take(&mut single));
                }
                all.extend_from_slice(&data);
            }
        }
        Ok((if all.is_empty() { single } else { all.freeze() }, permits))
    }
}

impl BodyPermits {
    fn add(&mut self, limits: &BodyLimits, caller: &Caller, bytes: usize) -> Result<(), Box<Response<Body>>> {
        let bytes = u32::try_from(bytes).ok();
        let router = bytes.and_then(|bytes| limits.permits.clone().try_acquire_many_owned(bytes).ok());
        let Some((router, bytes)) = router.zip(bytes) else {
            let text = "the requests in flight exhaust this router's memory for bodies \
                (gateway.openai.bodies_bytes_max)";
            let (status, after) = (StatusCode::SERVICE_UNAVAILABLE, Duration::from_secs(1));
            return Err(answer::retry_later(status, text, "service_unavailable", after).into());
        };
        merge(&mut self.router, router);
        let key = caller.key().map_or(Ok(None), |key| key.admit_bytes(bytes));
        if let Some(key) = key.map_err(|busy| Box::new(answer::key_busy_response(&busy)))? {
            merge(&mut self.key, key);
        }
        Ok(())
    }
}

fn merge(held: &mut Option<OwnedSemaphorePermit>, more: OwnedSemaphorePermit) {
    match held {
        Some(held) => held.merge(more),
        None => *held = Some(more),
    }
}

/// Adds the salt of the caller's tenant to a body that was read, and so has none of its own.
pub(super) fn with_salt(body: Bytes, caller: &Caller) -> Result<Bytes, PromptError> {
    let Some(salt) = caller.own_salt() else { return Ok(body) };
    let salt = serde_json::to_string(salt).map_err(|error| PromptError::Json(error.to_string()))?;
    // Without the salt the request would reach the cache of another tenant.
    with_field(&body, "cache_salt", &salt)
        .ok_or_else(|| PromptError::Shape("the request is no JSON object; send one".into()))
}

/// Adds a field in front of a JSON object, with a value in JSON; `None` for any other body.
pub(super) fn with_field(body: &Bytes, name: &str, value: &str) -> Option<Bytes> {
    let begin = body.iter().position(|byte| !byte.is_ascii_whitespace())?;
    if body[begin] != b'{' {
        return None;
    }
    let rest = body.slice(begin + 1..);
    // An empty object takes no comma after the new field.
    let is_empty = rest.iter().find(|byte| !byte.is_ascii_whitespace()).is_none_or(|byte| *byte == b'}');
    let field = format!("{{\"{name}\":{value}{}", if is_empty { "" } else { "," });
    let mut whole = BytesMut::with_capacity(field.len() + rest.len());
    whole.extend_from_slice(field.as_bytes());
    whole.extend_from_slice(&rest);
    Some(whole.freeze())
}
