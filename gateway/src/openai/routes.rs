//! Routes of the OpenAI-compatible API, and admission of requests.
//!
//! Not here: forwarding (`forward.rs`), and connections (`crate::serve`).

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
use kvfleet_net::trace_context;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::Instrument;

use super::forward::{ForwardRequest, Forwarder};
use super::relay::RequestGuard;
use super::{headers, steering};
use crate::answer;
use crate::config::GatewayConfig;
use crate::decide::RequestContext;
use crate::metrics::{OpenAiMetrics, RequestOutcome};
use crate::prompt::{PromptError, RequestReader};

/// State that all connections share.
#[derive(Debug)]
pub(super) struct ApiState {
    pub(super) forwarder: Forwarder,
    pub(super) reader: Arc<RequestReader>,
    pub(super) metrics: OpenAiMetrics,
    models: Vec<ModelCard>,
    /// Start time that models report, in Unix seconds.
    created: u64,
    body_bytes_max: usize,
    idle: Duration,
    body_timeout: Duration,
    request_permits: Arc<Semaphore>,
    body_permits: Arc<Semaphore>,
    next_number: AtomicU64,
    /// Whether callers may set objective and fairness id.
    trusts_callers: bool,
    is_draining: AtomicBool,
}

/// A model in the answer of `/v1/models`.
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
    fn new(id: String, created: u64, max_model_len: Option<u32>) -> ModelCard {
        ModelCard { id, object: "model", created, owned_by: "kvfleet", max_model_len }
    }
}

impl ApiState {
    /// `first_number` is the number of the first request; `created` is the start time that models
    /// report, in Unix seconds.
    pub(super) fn new(
        config: &GatewayConfig,
        forwarder: Forwarder,
        reader: Arc<RequestReader>,
        metrics: OpenAiMetrics,
        first_number: u64,
        created: u64,
    ) -> ApiState {
        let card = |model: &crate::config::ModelConfig| {
            let context = (model.context_tokens > 0).then_some(model.context_tokens);
            ModelCard::new(model.name.clone(), created, context)
        };
        ApiState {
            forwarder,
            reader,
            metrics,
            models: config.models.iter().map(card).collect(),
            created,
            body_bytes_max: config.openai.body_bytes_max,
            idle: config.openai.idle_timeout(),
            body_timeout: Duration::from_millis(config.openai.body_ms),
            request_permits: Arc::new(Semaphore::new(config.openai.requests_max.min(Semaphore::MAX_PERMITS))),
            body_permits: Arc::new(Semaphore::new(
                config.openai.bodies_bytes_max.min(Semaphore::MAX_PERMITS),
            )),
            next_number: AtomicU64::new(first_number),
            is_draining: AtomicBool::new(false),
            trusts_callers: config.openai.trusts_callers,
        }
    }

    /// Configured models, followed by models that only engines list.
    fn models(&self) -> Vec<ModelCard> {
        let mut listed = self.forwarder.decider.endpoints().models();
        let mut all = self.models.clone();
        for card in &mut all {
            let context = listed.remove(&card.id).flatten();
            card.max_model_len = card.max_model_len.or(context);
        }
        let more = listed.into_iter().map(|(id, context)| ModelCard::new(id, self.created, context));
        all.extend(more);
        all
    }

    /// Fails readiness from now on.
    pub(super) fn drain(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }
}

/// Router with all paths.
pub(super) fn router(state: Arc<ApiState>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(handle_inference))
        .route("/v1/completions", post(handle_inference))
        .route("/v1/embeddings", post(handle_inference))
        .route("/v1/models", get(models))
        .route("/health", get(liveness))
        .route("/livez", get(liveness))
        .route("/readyz", get(readiness))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(state)
}

async fn liveness() -> &'static str {
    "ok\n"
}

async fn readiness(State(state): State<Arc<ApiState>>) -> Response<Body> {
    let problem = match state.is_draining.load(Ordering::Relaxed) {
        true => Some("stopping".to_owned()),
        false => state.forwarder.decider.router().ready().err(),
    };
    let (status, text) = match problem {
        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")),
        None => (StatusCode::OK, "ok\n".to_owned()),
    };
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
}

async fn models(State(state): State<Arc<ApiState>>) -> Response<Body> {
    answer::json(StatusCode::OK, &ModelList { object: "list", data: state.models() })
}

async fn not_found(request: Request<Body>) -> Response<Body> {
    let text = format!(
        "no such path: {}; there are /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models",
        request.uri().path()
    );
    answer::error_response(StatusCode::NOT_FOUND, &text, None)
}

async fn method_not_allowed(request: Request<Body>) -> Response<Body> {
    let text = format!("{} does not accept {}", request.uri().path(), request.method());
    answer::error_response(StatusCode::METHOD_NOT_ALLOWED, &text, None)
}

/// Handles an inference request.
async fn handle_inference(State(state): State<Arc<ApiState>>, request: Request<Body>) -> Response<Body> {
    let number = state.next_number.fetch_add(1, Ordering::Relaxed);
    let id = headers::request_id(request.headers(), state.forwarder.random());
    let caller_trace = headers::traceparent(request.headers()).to_owned();
    let span = tracing::info_span!("openai", request = number);
    trace_context::set_parent(&span, &caller_trace);
    // Boxed, because this future holds the state of all steps of a request.
    let mut response = Box::pin(process(&state, request, number, &id, caller_trace).instrument(span)).await;
    let headers = response.headers_mut();
    headers.insert(headers::REQUEST, HeaderValue::from(number));
    headers.entry(headers::REQUEST_ID).or_insert(id);
    response
}

async fn process(
    state: &Arc<ApiState>,
    request: Request<Body>,
    number: u64,
    id: &HeaderValue,
    caller_trace: String,
) -> Response<Body> {
    let Ok(place) = state.request_permits.clone().try_acquire_owned() else {
        state.metrics.request_shed();
        let text = "too many requests in flight at this router (gateway.openai.requests_max)";
        return answer::retry_later(
            StatusCode::SERVICE_UNAVAILABLE,
            text,
            "service_unavailable",
            Duration::from_secs(1),
        );
    };
    let mut running = RequestGuard::new(state.metrics.clone(), place);
    let (parts, body) = request.into_parts();
    let declared = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let (body, room) = match state.read_body(body, declared).await {
        Ok(collected) => collected,
        Err(response) => {
            let is_full = response.status() == StatusCode::SERVICE_UNAVAILABLE;
            running.set_outcome(if is_full { RequestOutcome::Unavailable } else { RequestOutcome::Refused });
            return response;
        }
    };
    let started = Instant::now();
    let (path, read) = (parts.uri.path().to_owned(), body.clone());
    let asked = match state.reader.read_async(body.len(), move |reader| reader.read(&path, &read)).await {
        Ok(asked) => asked,
        Err(error) => {
            running.set_outcome(RequestOutcome::Refused);
            return answer::unreadable_response(&error);
        }
    };
    let own = trace_context::current_traceparent();
    let traceparent = if own.is_empty() { caller_trace } else { own };
    let wishes = headers::request_slo(&parts.headers, state.trusts_callers);
    let need = asked.requirements(parts.uri.path());
    let mut sending = ForwardRequest {
        headers: headers::engine_headers(parts.headers, id, number, &traceparent),
        method: parts.method,
        path_and_query: parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        body,
        expected_prompt_tokens: asked.expected_prompt_tokens(),
        stream: asked.stream,
        has_priority: asked.has_priority,
        prompt: asked.prompt,
        context: RequestContext {
            request: number,
            traceparent,
            slo: wishes,
            requirements: need,
            ..RequestContext::default()
        },
        started,
    };
    if !state.trusts_callers {
        steering::strip(&mut sending, asked.steers_engine);
    }
    let response = state.forwarder.forward(sending, running).await;
    // The body is no longer needed after the answer began.
    drop(room);
    response
}

impl ApiState {
    /// Reads the whole body, and the permits for its bytes.
    async fn read_body(
        &self,
        mut body: Body,
        declared: Option<usize>,
    ) -> Result<(Bytes, Option<OwnedSemaphorePermit>), Response<Body>> {
        let too_large = || answer::unreadable_response(&PromptError::TooLarge { limit: self.body_bytes_max });
        if declared.is_some_and(|length| length > self.body_bytes_max) {
            return Err(too_large());
        }
        let mut permits: Option<OwnedSemaphorePermit> = None;
        let mut all = BytesMut::new();
        let mut single = Bytes::new();
        let deadline = tokio::time::Instant::now() + self.body_timeout;
        loop {
            let idle_deadline = tokio::time::Instant::now() + self.idle;
            let next = tokio::time::timeout_at(deadline.min(idle_deadline), body.frame()).await;
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
            if all.len() + single.len() + data.len() > self.body_bytes_max {
                return Err(too_large());
            }
            let more = u32::try_from(data.len())
                .ok()
                .and_then(|bytes| self.body_permits.clone().try_acquire_many_owned(bytes).ok());
            let Some(more) = more else {
                let text = "the requests in flight exhaust this router's memory for bodies \
                    (gateway.openai.bodies_bytes_max)";
                return Err(answer::retry_later(
                    StatusCode::SERVICE_UNAVAILABLE,
                    text,
                    "service_unavailable",
                    Duration::from_secs(1),
                ));
            };
            match &mut permits {
                Some(room) => room.merge(more),
                None => permits = Some(more),
            }
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
