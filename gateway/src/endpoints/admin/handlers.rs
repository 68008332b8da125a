//! Handlers of the admin API; all answers are JSON, including errors.
//!
//! Not here: the listener (`mod.rs`).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use kv_core::id::InstanceId;
use kv_core::schedule::{Domain, DomainError};
use serde::Deserialize;
use serde_json::{Value, json};

use super::removals::PendingRemovals;
use crate::config::{ENDPOINTS_MAX, role};
use crate::endpoints::address::EngineUrl;
use crate::endpoints::{Endpoint, EndpointRegistry, Origin};

/// Longest body.
const BODY_BYTES_MAX: usize = 16 << 10;

/// Longest time to receive a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest `drain_s`, in seconds.
const DRAIN_S_MAX: u64 = 3_600;

/// State that all handlers share.
pub(super) struct AdminState {
    pub(super) endpoints: EndpointRegistry,
    pub(super) removals: PendingRemovals,
    pub(super) token: String,
    /// Whether it listens on a loopback address.
    pub(super) is_local: bool,
}

type AdminResult = Result<Response, RequestError>;

/// Why a call is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    #[error("unauthorized: give the secret of gateway.admin.token_file as `Authorization: Bearer ...`")]
    Unauthorized,
    #[error("web pages may not call the admin API: send no Origin")]
    WebPage,
    #[error("this API is reached as localhost or by a loopback address: send that as Host")]
    ForeignHost,
    #[error("the body must be application/json: name that as content-type")]
    NotJson,
    #[error(
        "no such path: use GET or POST /instances, GET or DELETE /instances/N, POST /instances/N/drain or /resume"
    )]
    NoSuchPath,
    #[error("{0:?} is not an instance: give its number, 0 to 4294967295")]
    InvalidInstance(String),
    #[error("instance {0} is not known")]
    UnknownInstance(u32),
    #[error(
        "the body is not JSON of an engine, such as {{\"instance\": 3, \"url\": \"http://engine-3:8000\"}}: {0}"
    )]
    InvalidBody(String),
    #[error("the body is longer than {BODY_BYTES_MAX} bytes, or broke off")]
    BodyTooLong,
    #[error("the body did not arrive within {} s", BODY_TIMEOUT.as_secs())]
    BodyTimeout,
    #[error("{0:?} is not a role; expected both, prefill or decode")]
    InvalidRole(String),
    #[error("the place {place:?}: {error}")]
    InvalidPlace { place: String, error: DomainError },
    #[error("{0}")]
    InvalidUrl(#[from] crate::endpoints::address::UrlError),
    #[error("{0:?} is not drain_s=N with N from 0 to {DRAIN_S_MAX} seconds")]
    InvalidQuery(String),
    #[error("instance {0} comes from the configuration: change it there")]
    Configured(u32),
    #[error("instance {0} was discovered in Kubernetes: delete it there, or make it not ready")]
    Discovered(u32),
    #[error("{ENDPOINTS_MAX} engines are registered, which is the limit: remove one first")]
    TooManyEngines,
}

impl RequestError {
    fn status(&self) -> StatusCode {
        match self {
            RequestError::Unauthorized => StatusCode::UNAUTHORIZED,
            RequestError::WebPage | RequestError::ForeignHost => StatusCode::FORBIDDEN,
            RequestError::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            RequestError::NoSuchPath | RequestError::UnknownInstance(_) => StatusCode::NOT_FOUND,
            RequestError::InvalidInstance(_)
            | RequestError::InvalidBody(_)
            | RequestError::InvalidRole(_)
            | RequestError::InvalidPlace { .. }
            | RequestError::InvalidUrl(_)
            | RequestError::InvalidQuery(_) => StatusCode::BAD_REQUEST,
            RequestError::BodyTooLong => StatusCode::PAYLOAD_TOO_LARGE,
            RequestError::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            RequestError::Configured(_) | RequestError::Discovered(_) => StatusCode::CONFLICT,
            RequestError::TooManyEngines => StatusCode::INSUFFICIENT_STORAGE,
        }
    }
}

impl IntoResponse for RequestError {
    fn into_response(self) -> Response {
        json_response(self.status(), &json!({ "error": self.to_string() }))
    }
}

fn json_response(status: StatusCode, value: &Value) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], format!("{value}\n")).into_response()
}

/// An engine in the body of a call.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineDescription {
    instance: u32,
    url: String,
    #[serde(default)]
    fetches: bool,
    #[serde(default)]
    reports_itself: bool,
    #[serde(default)]
    role: String,
    #[serde(default)]
    place: String,
}

impl AdminState {
    fn check_caller(&self, headers: &HeaderMap) -> Result<(), RequestError> {
        if headers.contains_key(ORIGIN) {
            return Err(RequestError::WebPage);
        }
        // A name that a web page's owner points at this host reaches only the loopback address.
        if self.is_local && !headers.get(HOST).is_some_and(names_this_host) {
            return Err(RequestError::ForeignHost);
        }
        self.check_secret(headers)
    }

    /// Checks the caller's secret, in constant time for secrets of equal length.
    fn check_secret(&self, headers: &HeaderMap) -> Result<(), RequestError> {
        let token = &self.token;
        let given = headers.get(AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
        let (scheme, given) = given.split_at_checked("Bearer ".len()).unwrap_or_default();
        let differ =
            given.iter().zip(token.bytes()).fold(0, |differ, (ours, theirs)| differ | (ours ^ theirs));
        let is_same = scheme.eq_ignore_ascii_case(b"Bearer ") && given.len() == token.len() && differ == 0;
        if is_same { Ok(()) } else { Err(RequestError::Unauthorized) }
    }

    /// Endpoint of the instance in a path.
    fn endpoint(&self, number: &str) -> Result<Arc<Endpoint>, RequestError> {
        let number: u32 =
            number.parse().map_err(|_| RequestError::InvalidInstance(number.chars().take(32).collect()))?;
        self.endpoints.get(InstanceId(number)).ok_or(RequestError::UnknownInstance(number))
    }

    fn describe(&self, endpoint: &Endpoint) -> Value {
        let standing = self.endpoints.status(endpoint.instance).unwrap_or_default();
        let load = standing.load.map(|(heard, at)| {
            json!({
                "running": heard.running,
                "waiting": heard.waiting,
                "queue_tokens": heard.queue_tokens,
                "kv_usage": heard.usage,
                "age_ms": u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
            })
        });
        json!({
            "instance": endpoint.instance.0,
            "url": endpoint.url(),
            "addresses": standing.addresses,
            "fetches": endpoint.fetches,
            "role": endpoint.role.name(),
            "place": endpoint.place,
            "reports_itself": self.endpoints.reports_itself(endpoint.instance),
            "origin": endpoint.origin.name(),
            "draining": endpoint.is_draining,
            "open": self.endpoints.is_open(endpoint.instance),
            "problem": standing.problem,
            "load": load,
            "models": standing.models.map(|models| models.by_name.keys().cloned().collect::<Vec<_>>()),
        })
    }
}

/// Whether a `Host` is a loopback address or `localhost`, with or without a port.
fn names_this_host(host: &HeaderValue) -> bool {
    let Ok(host) = host.to_str() else { return false };
    let name =
        host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()).map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// The API only changes endpoints that it added.
fn check_changeable(endpoint: &Endpoint) -> Result<(), RequestError> {
    match endpoint.origin {
        Origin::Admin => Ok(()),
        Origin::Configured => Err(RequestError::Configured(endpoint.instance.0)),
        Origin::Discovered => Err(RequestError::Discovered(endpoint.instance.0)),
    }
}

type SharedState = State<Arc<AdminState>>;

/// Passes calls that have the secret and come from no web page.
pub(super) async fn authorize(
    State(state): SharedState,
    request: Request,
    next: Next,
) -> Result<Response, RequestError> {
    state.check_caller(request.headers())?;
    Ok(next.run(request).await)
}

pub(super) async fn not_found() -> AdminResult {
    Err(RequestError::NoSuchPath)
}

pub(super) async fn list(State(state): SharedState) -> AdminResult {
    let all: Vec<_> = state.endpoints.list().iter().map(|endpoint| state.describe(endpoint)).collect();
    Ok(json_response(StatusCode::OK, &json!(all)))
}

pub(super) async fn show(State(state): SharedState, Path(number): Path<String>) -> AdminResult {
    let endpoint = state.endpoint(&number)?;
    Ok(json_response(StatusCode::OK, &state.describe(&endpoint)))
}

pub(super) async fn add(State(state): SharedState, headers: HeaderMap, body: Body) -> AdminResult {
    // A web page can send other types to any address without asking it first.
    if !is_json(&headers) {
        return Err(RequestError::NotJson);
    }
    let body = tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, BODY_BYTES_MAX)).await;
    let body = body.map_err(|_| RequestError::BodyTimeout)?.map_err(|_| RequestError::BodyTooLong)?;
    let named: EngineDescription =
        serde_json::from_slice(&body).map_err(|error| RequestError::InvalidBody(error.to_string()))?;
    let instance = InstanceId(named.instance);
    let shown = |text: &str| text.chars().take(64).collect::<String>();
    let role = role(&named.role).ok_or_else(|| RequestError::InvalidRole(shown(&named.role)))?;
    Domain::parse(&named.place)
        .map_err(|error| RequestError::InvalidPlace { place: shown(&named.place), error })?;
    let EngineUrl { authority, is_tls } = EngineUrl::parse(&named.url)?;
    let endpoint = Endpoint {
        instance,
        authority,
        is_tls,
        fetches: named.fetches,
        role,
        place: named.place,
        is_draining: false,
        origin: Origin::Admin,
    };
    // Cancel a pending removal; only endpoints of this API have one.
    state.removals.keep(instance);
    let mut status = StatusCode::CREATED;
    state.endpoints.put_if(endpoint.clone(), named.reports_itself, |known, count| {
        match known {
            Some(known) => {
                check_changeable(known)?;
                status = StatusCode::OK;
            }
            None if count >= ENDPOINTS_MAX => return Err(RequestError::TooManyEngines),
            None => {}
        }
        Ok(())
    })?;
    tracing::info!(
        instance = instance.0,
        authority = endpoint.authority,
        "the admin API registered an engine"
    );
    Ok(json_response(status, &state.describe(&endpoint)))
}

pub(super) async fn remove(
    State(state): SharedState,
    Path(number): Path<String>,
    request: Request,
) -> AdminResult {
    let endpoint = state.endpoint(&number)?;
    check_changeable(&endpoint)?;
    let wait = parse_drain_s(request.uri().query())?;
    if wait.is_zero() {
        state.removals.keep(endpoint.instance);
        state.endpoints.remove(endpoint.instance);
        return Ok(json_response(
            StatusCode::OK,
            &json!({ "instance": endpoint.instance.0, "removed": true }),
        ));
    }
    state.removals.remove_within(endpoint.instance, wait);
    Ok(json_response(StatusCode::ACCEPTED, &json!({ "instance": endpoint.instance.0, "removed": false })))
}

/// Parses the query of a removal.
fn parse_drain_s(query: Option<&str>) -> Result<Duration, RequestError> {
    let Some(query) = query.filter(|query| !query.is_empty()) else { return Ok(Duration::ZERO) };
    let seconds = query.strip_prefix("drain_s=").and_then(|text| text.parse().ok());
    match seconds {
        Some(seconds @ 0..=DRAIN_S_MAX) => Ok(Duration::from_secs(seconds)),
        _ => Err(RequestError::InvalidQuery(query.chars().take(64).collect())),
    }
}

pub(super) async fn drain(State(state): SharedState, Path(number): Path<String>) -> AdminResult {
    set_draining(&state, &number, true)
}

pub(super) async fn resume(State(state): SharedState, Path(number): Path<String>) -> AdminResult {
    set_draining(&state, &number, false)
}

fn set_draining(state: &AdminState, number: &str, draining: bool) -> AdminResult {
    let endpoint = state.endpoint(number)?;
    if endpoint.origin == Origin::Discovered {
        return Err(RequestError::Discovered(endpoint.instance.0));
    }
    state.removals.keep(endpoint.instance);
    let changed = state.endpoints.update(endpoint.instance, |endpoint| endpoint.is_draining = draining);
    let endpoint = changed.ok_or(RequestError::UnknownInstance(endpoint.instance.0))?;
    Ok(json_response(StatusCode::OK, &state.describe(&endpoint)))
}
