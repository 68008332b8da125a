//! What is answered to calls that name engines: JSON, also where something is wrong.
//!
//! Not here: where they come in (`mod.rs`).

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use kv_core::id::InstanceId;
use kv_core::schedule::{Domain, DomainError};
use serde::Deserialize;
use serde_json::{Value, json};

use super::removals::Removals;
use crate::config::{ENDPOINTS_MAX, role};
use crate::endpoints::address::authority;
use crate::endpoints::{Endpoint, Endpoints, Origin};

/// Longest body.
const BODY_BYTES_MAX: usize = 16 << 10;

/// Longest that a body takes to come.
const BODY_WITHIN: Duration = Duration::from_secs(5);

/// Longest that an engine is waited for, in seconds.
const DRAIN_S_MAX: u64 = 3_600;

/// What answers are made from.
pub(super) struct Door {
    pub(super) endpoints: Endpoints,
    pub(super) removals: Removals,
    pub(super) token: Option<String>,
}

type Answer = Result<Response, Wrong>;

/// What is wrong with a call.
#[derive(Debug, thiserror::Error)]
pub(super) enum Wrong {
    #[error(
        "who calls is not known: give the secret of doors.admin.token_file as `Authorization: Bearer ...`"
    )]
    Stranger,
    #[error(
        "there is nothing here: GET or POST /instances, GET or DELETE /instances/N, POST /instances/N/drain or /resume"
    )]
    Nothing,
    #[error("{0:?} is no instance: give its number, 0 to 4294967295")]
    Number(String),
    #[error("instance {0} is not known")]
    Unknown(u32),
    #[error(
        "the body is no JSON of an engine, such as {{\"instance\": 3, \"url\": \"http://engine-3:8000\"}}: {0}"
    )]
    Body(String),
    #[error("the body has more than {BODY_BYTES_MAX} bytes, or breaks off")]
    Long,
    #[error("the body does not come within {} s", BODY_WITHIN.as_secs())]
    Late,
    #[error("{0:?} is no role; there are both, prefill and decode")]
    Role(String),
    #[error("the place {place:?}: {error}")]
    Place { place: String, error: DomainError },
    #[error("{0}")]
    Url(#[from] crate::endpoints::address::UrlError),
    #[error("{0:?} is not drain_s=N with N from 0 to {DRAIN_S_MAX} seconds")]
    Query(String),
    #[error("instance {0} is named by the configuration: change it there")]
    Configured(u32),
    #[error("instance {0} was found in Kubernetes: delete it there, or let it be not ready")]
    Discovered(u32),
    #[error("{ENDPOINTS_MAX} engines are known, which is the limit: remove one first")]
    Full,
}

impl Wrong {
    fn status(&self) -> StatusCode {
        match self {
            Wrong::Stranger => StatusCode::UNAUTHORIZED,
            Wrong::Nothing | Wrong::Unknown(_) => StatusCode::NOT_FOUND,
            Wrong::Number(_)
            | Wrong::Body(_)
            | Wrong::Role(_)
            | Wrong::Place { .. }
            | Wrong::Url(_)
            | Wrong::Query(_) => StatusCode::BAD_REQUEST,
            Wrong::Long => StatusCode::PAYLOAD_TOO_LARGE,
            Wrong::Late => StatusCode::REQUEST_TIMEOUT,
            Wrong::Configured(_) | Wrong::Discovered(_) => StatusCode::CONFLICT,
            Wrong::Full => StatusCode::INSUFFICIENT_STORAGE,
        }
    }
}

impl IntoResponse for Wrong {
    fn into_response(self) -> Response {
        said(self.status(), &json!({ "error": self.to_string() }))
    }
}

fn said(status: StatusCode, value: &Value) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], format!("{value}\n")).into_response()
}

/// An engine, as a call names it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
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

impl Door {
    /// Whether a caller has the secret, told in as long for every wrong one.
    fn check(&self, headers: &HeaderMap) -> Result<(), Wrong> {
        let Some(token) = &self.token else { return Ok(()) };
        let given = headers.get(AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
        let (scheme, given) = given.split_at_checked("Bearer ".len()).unwrap_or_default();
        let differ =
            given.iter().zip(token.bytes()).fold(0, |differ, (ours, theirs)| differ | (ours ^ theirs));
        let is_same = scheme.eq_ignore_ascii_case(b"Bearer ") && given.len() == token.len() && differ == 0;
        if is_same { Ok(()) } else { Err(Wrong::Stranger) }
    }

    /// The endpoint of a path.
    fn of(&self, number: &str) -> Result<Arc<Endpoint>, Wrong> {
        let number: u32 = number.parse().map_err(|_| Wrong::Number(number.chars().take(32).collect()))?;
        self.endpoints.get(InstanceId(number)).ok_or(Wrong::Unknown(number))
    }

    fn shown(&self, endpoint: &Endpoint) -> Value {
        let standing = self.endpoints.standing(endpoint.instance).unwrap_or_default();
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
            "url": format!("http://{}", endpoint.authority),
            "addresses": standing.addresses,
            "fetches": endpoint.fetches,
            "role": endpoint.role.name(),
            "place": endpoint.place,
            "reports_itself": self.endpoints.reports_itself(endpoint.instance),
            "origin": endpoint.origin.name(),
            "draining": endpoint.draining,
            "open": self.endpoints.is_open(endpoint.instance),
            "problem": standing.problem,
            "load": load,
            "models": standing.models.map(|models| models.by_name.keys().cloned().collect::<Vec<_>>()),
        })
    }
}

/// Only what calls named is changed by them.
fn changeable(endpoint: &Endpoint) -> Result<(), Wrong> {
    match endpoint.origin {
        Origin::Called => Ok(()),
        Origin::Configured => Err(Wrong::Configured(endpoint.instance.0)),
        Origin::Discovered => Err(Wrong::Discovered(endpoint.instance.0)),
    }
}

type Asked = State<Arc<Door>>;

pub(super) async fn nothing(State(door): Asked, headers: HeaderMap) -> Answer {
    door.check(&headers)?;
    Err(Wrong::Nothing)
}

pub(super) async fn list(State(door): Asked, headers: HeaderMap) -> Answer {
    door.check(&headers)?;
    let all: Vec<_> = door.endpoints.list().iter().map(|endpoint| door.shown(endpoint)).collect();
    Ok(said(StatusCode::OK, &json!(all)))
}

pub(super) async fn show(State(door): Asked, Path(number): Path<String>, headers: HeaderMap) -> Answer {
    door.check(&headers)?;
    let endpoint = door.of(&number)?;
    Ok(said(StatusCode::OK, &door.shown(&endpoint)))
}

pub(super) async fn add(State(door): Asked, headers: HeaderMap, body: Body) -> Answer {
    door.check(&headers)?;
    let body = tokio::time::timeout(BODY_WITHIN, to_bytes(body, BODY_BYTES_MAX)).await;
    let body = body.map_err(|_| Wrong::Late)?.map_err(|_| Wrong::Long)?;
    let named: Named = serde_json::from_slice(&body).map_err(|error| Wrong::Body(error.to_string()))?;
    let instance = InstanceId(named.instance);
    let shown = |text: &str| text.chars().take(64).collect::<String>();
    let role = role(&named.role).ok_or_else(|| Wrong::Role(shown(&named.role)))?;
    Domain::parse(&named.place).map_err(|error| Wrong::Place { place: shown(&named.place), error })?;
    let endpoint = Endpoint {
        instance,
        authority: authority(&named.url)?,
        fetches: named.fetches,
        role,
        place: named.place,
        draining: false,
        origin: Origin::Called,
    };
    // One that waited to be removed stays now; what is not a call's never waits.
    door.removals.keep(instance);
    let mut status = StatusCode::CREATED;
    door.endpoints.put_where(endpoint.clone(), named.reports_itself, |known, count| {
        match known {
            Some(known) => {
                changeable(known)?;
                status = StatusCode::OK;
            }
            None if count >= ENDPOINTS_MAX => return Err(Wrong::Full),
            None => {}
        }
        Ok(())
    })?;
    tracing::info!(instance = instance.0, authority = endpoint.authority, "an engine is named by a call");
    Ok(said(status, &door.shown(&endpoint)))
}

pub(super) async fn remove(State(door): Asked, Path(number): Path<String>, request: Request) -> Answer {
    door.check(request.headers())?;
    let endpoint = door.of(&number)?;
    changeable(&endpoint)?;
    let wait = drain_s(request.uri().query())?;
    if wait.is_zero() {
        door.removals.keep(endpoint.instance);
        door.endpoints.remove(endpoint.instance);
        return Ok(said(StatusCode::OK, &json!({ "instance": endpoint.instance.0, "removed": true })));
    }
    door.removals.remove_within(endpoint.instance, wait);
    Ok(said(StatusCode::ACCEPTED, &json!({ "instance": endpoint.instance.0, "removed": false })))
}

/// How long a query asks to wait.
fn drain_s(query: Option<&str>) -> Result<Duration, Wrong> {
    let Some(query) = query.filter(|query| !query.is_empty()) else { return Ok(Duration::ZERO) };
    let seconds = query.strip_prefix("drain_s=").and_then(|text| text.parse().ok());
    match seconds {
        Some(seconds @ 0..=DRAIN_S_MAX) => Ok(Duration::from_secs(seconds)),
        _ => Err(Wrong::Query(query.chars().take(64).collect())),
    }
}

pub(super) async fn drain(State(door): Asked, Path(number): Path<String>, headers: HeaderMap) -> Answer {
    door.check(&headers)?;
    set_draining(&door, &number, true)
}

pub(super) async fn resume(State(door): Asked, Path(number): Path<String>, headers: HeaderMap) -> Answer {
    door.check(&headers)?;
    set_draining(&door, &number, false)
}

fn set_draining(door: &Door, number: &str, draining: bool) -> Answer {
    let endpoint = door.of(number)?;
    if endpoint.origin == Origin::Discovered {
        return Err(Wrong::Discovered(endpoint.instance.0));
    }
    door.removals.keep(endpoint.instance);
    let changed = door.endpoints.update(endpoint.instance, |endpoint| endpoint.draining = draining);
    let endpoint = changed.ok_or(Wrong::Unknown(endpoint.instance.0))?;
    Ok(said(StatusCode::OK, &door.shown(&endpoint)))
}
