//! What is answered at which path.
//!
//! Not here: sending requests on (`forward.rs`), connections (`crate::serve`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderValue, Request, Response, StatusCode};
use axum::routing::{get, post};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use kvfleet_proto::trace_context;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::Instrument;

use super::forward::{Forward, Sending};
use super::headers;
use super::relay::Running;
use crate::answer;
use crate::config::DoorsConfig;
use crate::decide::Terms;
use crate::metrics::{Metrics, Outcome};
use crate::prompt::{Reader, Unreadable};

/// The door, as all its connections share it.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) forward: Forward,
    pub(super) reader: Arc<Reader>,
    pub(super) metrics: Metrics,
    models: Vec<ModelCard>,
    /// Since when models are there, in seconds.
    created: u64,
    body_bytes_max: usize,
    idle: Duration,
    body_within: Duration,
    places: Arc<Semaphore>,
    room: Arc<Semaphore>,
    numbers: AtomicU64,
    /// Whether callers may say for whom a request is.
    trusts_callers: bool,
    is_draining: AtomicBool,
}

/// A model as `/v1/models` shows it.
#[derive(Clone, Debug, Serialize)]
struct ModelCard {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u32>,
}

#[derive(Serialize)]
struct ModelList {
    object: &'static str,
    data: Vec<ModelCard>,
}

impl ModelCard {
    fn of(id: String, created: u64, max_model_len: Option<u32>) -> ModelCard {
        ModelCard { id, object: "model", created, owned_by: "kvfleet", max_model_len }
    }
}

impl Door {
    /// `first_number` is the first request's; `created` is since when models are there, in seconds.
    pub(super) fn new(
        config: &DoorsConfig,
        forward: Forward,
        reader: Arc<Reader>,
        metrics: Metrics,
        first_number: u64,
        created: u64,
    ) -> Door {
        let card = |model: &crate::config::ModelConfig| {
            let context = (model.context_tokens > 0).then_some(model.context_tokens);
            ModelCard::of(model.name.clone(), created, context)
        };
        Door {
            forward,
            reader,
            metrics,
            models: config.models.iter().map(card).collect(),
            created,
            body_bytes_max: config.openai.body_bytes_max,
            idle: config.openai.idle(),
            body_within: Duration::from_millis(config.openai.body_ms),
            places: Arc::new(Semaphore::new(config.openai.requests_max.min(Semaphore::MAX_PERMITS))),
            room: Arc::new(Semaphore::new(config.openai.bodies_bytes_max.min(Semaphore::MAX_PERMITS))),
            numbers: AtomicU64::new(first_number),
            is_draining: AtomicBool::new(false),
            trusts_callers: config.openai.trusts_callers,
        }
    }

    /// Models that the configuration names, and behind them those that engines list besides.
    fn models(&self) -> Vec<ModelCard> {
        let mut learnt = self.forward.decider.endpoints().models();
        let mut all = self.models.clone();
        for card in &mut all {
            let context = learnt.remove(&card.id).flatten();
            card.max_model_len = card.max_model_len.or(context);
        }
        let more = learnt.into_iter().map(|(id, context)| ModelCard::of(id, self.created, context));
        all.extend(more);
        all
    }

    /// From now on it is not ready.
    pub(super) fn drain(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }
}

/// All paths.
pub(super) fn router(door: Arc<Door>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(ask))
        .route("/v1/completions", post(ask))
        .route("/v1/embeddings", post(ask))
        .route("/v1/models", get(models))
        .route("/health", get(alive))
        .route("/livez", get(alive))
        .route("/readyz", get(ready))
        .fallback(nowhere)
        .method_not_allowed_fallback(other_method)
        .with_state(door)
}

async fn alive() -> &'static str {
    "ok\n"
}

async fn ready(State(door): State<Arc<Door>>) -> Response<Body> {
    let problem = match door.is_draining.load(Ordering::Relaxed) {
        true => Some("stopping".to_owned()),
        false => door.forward.decider.desk().ready().err(),
    };
    let (status, text) = match problem {
        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")),
        None => (StatusCode::OK, "ok\n".to_owned()),
    };
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
}

async fn models(State(door): State<Arc<Door>>) -> Response<Body> {
    answer::json(StatusCode::OK, &ModelList { object: "list", data: door.models() })
}

async fn nowhere(request: Request<Body>) -> Response<Body> {
    let text = format!(
        "nothing is at {}; there are /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models",
        request.uri().path()
    );
    answer::problem(StatusCode::NOT_FOUND, &text, None)
}

async fn other_method(request: Request<Body>) -> Response<Body> {
    let text = format!("{} takes no {}", request.uri().path(), request.method());
    answer::problem(StatusCode::METHOD_NOT_ALLOWED, &text, None)
}

/// A request for a model.
async fn ask(State(door): State<Arc<Door>>, request: Request<Body>) -> Response<Body> {
    let number = door.numbers.fetch_add(1, Ordering::Relaxed);
    let id = headers::request_id(request.headers(), door.forward.random());
    let came = headers::traceparent(request.headers()).to_owned();
    let span = tracing::info_span!("openai", request = number);
    trace_context::set_parent(&span, &came);
    // Behind a pointer: the whole way of a request is in this future.
    let mut response = Box::pin(asked(&door, request, number, &id, came).instrument(span)).await;
    let headers = response.headers_mut();
    headers.insert(headers::REQUEST, HeaderValue::from(number));
    headers.entry(headers::REQUEST_ID).or_insert(id);
    response
}

async fn asked(
    door: &Arc<Door>,
    request: Request<Body>,
    number: u64,
    id: &HeaderValue,
    came: String,
) -> Response<Body> {
    let Ok(place) = door.places.clone().try_acquire_owned() else {
        door.metrics.turned_away();
        let text = "as many requests are under way as this router takes (doors.openai.requests_max)";
        return answer::later(
            StatusCode::SERVICE_UNAVAILABLE,
            text,
            "service_unavailable",
            Duration::from_secs(1),
        );
    };
    let mut running = Running::new(door.metrics.clone(), place);
    let (parts, body) = request.into_parts();
    let declared = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let (body, room) = match door.collect(body, declared).await {
        Ok(collected) => collected,
        Err(response) => {
            let is_full = response.status() == StatusCode::SERVICE_UNAVAILABLE;
            running.ends(if is_full { Outcome::Nobody } else { Outcome::Refused });
            return response;
        }
    };
    let started = Instant::now();
    let (path, read) = (parts.uri.path().to_owned(), body.clone());
    let asked = match door.reader.read_in_turn(body.len(), move |reader| reader.read(&path, &read)).await {
        Ok(asked) => asked,
        Err(error) => {
            running.ends(Outcome::Refused);
            return answer::unreadable(&error);
        }
    };
    let own = trace_context::current_traceparent();
    let traceparent = if own.is_empty() { came } else { own };
    let wishes = headers::wishes(&parts.headers, door.trusts_callers);
    let need = asked.need(parts.uri.path());
    let sending = Sending {
        headers: headers::onward(parts.headers, (id, number), &traceparent),
        method: parts.method,
        path_and_query: parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        body,
        tokens: asked.countable(),
        stream: asked.stream,
        has_priority: asked.has_priority,
        prompt: asked.prompt,
        terms: Terms { request: number, traceparent, wishes, need, ..Terms::default() },
        started,
    };
    let response = door.forward.forward(sending, running).await;
    // The body is needed no more once an answer began.
    drop(room);
    response
}

impl Door {
    /// The whole body, and its room.
    async fn collect(
        &self,
        mut body: Body,
        declared: Option<usize>,
    ) -> Result<(Bytes, Option<OwnedSemaphorePermit>), Response<Body>> {
        let too_large = || answer::unreadable(&Unreadable::TooLarge { limit: self.body_bytes_max });
        if declared.is_some_and(|length| length > self.body_bytes_max) {
            return Err(too_large());
        }
        let mut room: Option<OwnedSemaphorePermit> = None;
        let mut all = BytesMut::new();
        let mut only = Bytes::new();
        let until = tokio::time::Instant::now() + self.body_within;
        loop {
            let still = tokio::time::Instant::now() + self.idle;
            let next = tokio::time::timeout_at(until.min(still), body.frame()).await;
            let Ok(next) = next else {
                let text = if until < still {
                    "the body takes longer to come than it may (doors.openai.body_ms)"
                } else {
                    "the body stands still"
                };
                return Err(answer::problem(StatusCode::REQUEST_TIMEOUT, text, None));
            };
            let Some(frame) = next else { break };
            let Ok(frame) = frame else {
                return Err(answer::problem(StatusCode::BAD_REQUEST, "the body broke off", None));
            };
            let Ok(data) = frame.into_data() else { continue };
            if all.len() + only.len() + data.len() > self.body_bytes_max {
                return Err(too_large());
            }
            let more = u32::try_from(data.len())
                .ok()
                .and_then(|bytes| self.room.clone().try_acquire_many_owned(bytes).ok());
            let Some(more) = more else {
                let text = "the requests under way have as many bytes as this router takes (doors.openai.bodies_bytes_max)";
                return Err(answer::later(
                    StatusCode::SERVICE_UNAVAILABLE,
                    text,
                    "service_unavailable",
                    Duration::from_secs(1),
                ));
            };
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
            }
            // Most come in one piece, which is then not copied.
            if only.is_empty() && all.is_empty() {
                only = data;
            } else {
                if all.is_empty() {
                    // Room is there for what came, and not for what was said to come.
                    all.reserve(only.len() + data.len());
                    all.extend_from_slice(&std::mem::take(&mut only));
                }
                all.extend_from_slice(&data);
            }
        }
        Ok((if all.is_empty() { only } else { all.freeze() }, room))
    }
}
