//! Routes of the OpenAI-compatible API, and admission of requests.
//!
//! Not here: forwarding (`forward.rs`), and connections (`crate::serve`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH};
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use axum::routing::{get, post};
use bytes::Bytes;
use kvfleet_net::trace_context;
use serde::Serialize;
use tokio::sync::Semaphore;
use tracing::Instrument;

use super::body::{BodyLimits, with_salt};
use super::forward::{ForwardRequest, Forwarder};
use super::relay::RequestGuard;
use super::{headers, steering};
use crate::answer;
use crate::config::GatewayConfig;
use crate::decide::RequestContext;
use crate::keys::{ApiKey, AuthError, Caller, KeyRing};
use crate::metrics::{OpenAiMetrics, RequestOutcome};
use crate::prompt::{ParsedRequest, PromptError, RequestReader};

/// State that all connections share.
#[derive(Debug)]
pub(super) struct ApiState {
    pub(super) forwarder: Forwarder,
    pub(super) reader: Arc<RequestReader>,
    pub(super) metrics: OpenAiMetrics,
    models: Vec<ModelCard>,
    /// Start time that models report, in Unix seconds.
    created: u64,
    /// Keys of callers; `None` if none are needed.
    keys: Option<Arc<KeyRing>>,
    bodies: BodyLimits,
    request_permits: Arc<Semaphore>,
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
        keys: Option<Arc<KeyRing>>,
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
            keys,
            bodies: BodyLimits::new(&config.openai),
            request_permits: Arc::new(Semaphore::new(config.openai.requests_max.min(Semaphore::MAX_PERMITS))),
            next_number: AtomicU64::new(first_number),
            is_draining: AtomicBool::new(false),
            trusts_callers: config.openai.trusts_callers,
        }
    }

    /// The caller of a request with these headers.
    fn caller(&self, headers: &HeaderMap) -> Result<Caller, AuthError> {
        match &self.keys {
            Some(keys) => keys.authenticate(headers).map(Caller::Key),
            None => Ok(Caller::Anyone),
        }
    }

    /// Models that a caller may use: configured ones, followed by those that only engines list.
    fn models(&self, caller: &Caller) -> Vec<ModelCard> {
        let mut listed = self.forwarder.decider.endpoints().models();
        let mut all = self.models.clone();
        for card in &mut all {
            let context = listed.remove(&card.id).flatten();
            card.max_model_len = card.max_model_len.or(context);
        }
        let more = listed.into_iter().map(|(id, context)| ModelCard::new(id, self.created, context));
        all.extend(more);
        all.retain(|card| caller.may_use(&card.id));
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

async fn models(State(state): State<Arc<ApiState>>, headers: HeaderMap) -> Response<Body> {
    match state.caller(&headers) {
        Ok(caller) => {
            answer::json(StatusCode::OK, &ModelList { object: "list", data: state.models(&caller) })
        }
        Err(error) => answer::unauthenticated_response(error),
    }
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

/// Identifies the caller of a request, and admits it within the limits of its key and of the router.
fn admit(state: &ApiState, headers: &HeaderMap) -> Result<(Caller, RequestGuard), Box<Response<Body>>> {
    let rejected = |outcome, response| {
        state.metrics.request_rejected(outcome);
        Box::new(response)
    };
    let caller = state.caller(headers).map_err(|error| {
        rejected(RequestOutcome::Unauthenticated, answer::unauthenticated_response(error))
    })?;
    let of_key = caller.key().map_or(Ok(None), ApiKey::admit);
    let of_key = of_key.map_err(|busy| rejected(RequestOutcome::Busy, answer::key_busy_response(&busy)))?;
    let place = state.request_permits.clone().try_acquire_owned().map_err(|_| {
        let text = "too many requests in flight at this router (gateway.openai.requests_max)";
        let (status, after) = (StatusCode::SERVICE_UNAVAILABLE, Duration::from_secs(1));
        let response = answer::retry_later(status, text, "service_unavailable", after);
        rejected(RequestOutcome::Unavailable, response)
    })?;
    Ok((caller, RequestGuard::new(state.metrics.clone(), place, of_key)))
}

/// Reads a request, and adds the salt of the caller's tenant to its body.
async fn read(
    state: &ApiState,
    path: &str,
    body: Bytes,
    caller: &Caller,
) -> Result<(ParsedRequest, Bytes), PromptError> {
    let (path, whole, by) = (path.to_owned(), body.clone(), caller.clone());
    let reading = state.reader.read_async(body.len(), move |reader| reader.read_of(&by, &path, &whole));
    Ok((reading.await?, with_salt(body, caller)?))
}

async fn process(
    state: &Arc<ApiState>,
    request: Request<Body>,
    number: u64,
    id: &HeaderValue,
    caller_trace: String,
) -> Response<Body> {
    let (mut parts, body) = request.into_parts();
    let (caller, mut running) = match admit(state, &parts.headers) {
        Ok(admitted) => admitted,
        Err(refusal) => return *refusal,
    };
    let declared = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let (body, room) = match state.bodies.receive(body, declared, &caller).await {
        Ok(received) => received,
        Err(response) => {
            running.set_outcome(match response.status() {
                StatusCode::SERVICE_UNAVAILABLE => RequestOutcome::Unavailable,
                StatusCode::TOO_MANY_REQUESTS => RequestOutcome::Busy,
                _ => RequestOutcome::Refused,
            });
            return response;
        }
    };
    let started = Instant::now();
    let (asked, body) = match read(state, parts.uri.path(), body, &caller).await {
        Ok(read) => read,
        Err(error) => {
            running.set_outcome(RequestOutcome::Refused);
            return answer::unreadable_response(&error);
        }
    };
    // An engine gets no key of the gateway.
    if caller.key().is_some() {
        parts.headers.remove(AUTHORIZATION);
    }
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
        knows_models: !caller.has_models(),
        stream: asked.stream,
        has_priority: asked.has_priority,
        prompt: asked.prompt,
        context: RequestContext {
            request: number,
            tenant: caller.tenant().0,
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
