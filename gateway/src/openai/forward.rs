//! Forwards a request to the engine that the router chose, and retries on another engine if that
//! one fails before its answer begins.
//!
//! Not here: reading the request (`crate::prompt`), and relaying the answer (`relay.rs`).

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version, response};
use bytes::{Bytes, BytesMut};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::capture_connection;
use kv_core::id::InstanceId;
use kvfleet_proto::pb;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::breaker::{AttemptGuard, CircuitBreakers};
use super::config::OpenAiConfig;
use super::priority::PriorityOrder;
use super::relay::{IdleTimer, RelayBody, RequestGuard, ResponseScan};
use super::upstream::{EngineClient, UpstreamError};
use super::{backoff, headers, pair};
use crate::answer;
use crate::decide::{Decider, Refusal, RequestContext, RouteTarget};
use crate::endpoints::Endpoint;
use crate::in_flight::InFlightGuard;
use crate::metrics::{OpenAiMetrics, RequestOutcome};
use crate::prompt::Prompt;
use crate::usage_scanner::UsageScanner;

/// Statuses after which another engine may succeed.
const RETRYABLE_STATUSES: [u16; 6] = [408, 429, 500, 502, 503, 504];

/// Statuses that count as a failure of the engine. Being busy, or a slow caller, does not. A 500
/// may be caused by the request and would then recur on any engine.
const ENGINE_FAULT_STATUSES: [u16; 3] = [502, 503, 504];

/// Status that a request itself may cause. It is retried once, in case the engine was the cause.
const REQUEST_FAULT_STATUS: u16 = 500;

/// Forwards requests.
#[derive(Debug)]
pub(super) struct Forwarder {
    pub(super) decider: Decider,
    upstream: EngineClient,
    breakers: Arc<CircuitBreakers>,
    config: OpenAiConfig,
    priorities: PriorityOrder,
    metrics: OpenAiMetrics,
    rng: Mutex<StdRng>,
}

/// A request to forward.
#[derive(Debug)]
pub(super) struct ForwardRequest {
    pub(super) method: Method,
    pub(super) path_and_query: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) prompt: Prompt,
    /// Whether the caller may know the models of other callers.
    pub(super) knows_models: bool,
    /// Whether the answer is streamed. Otherwise its first byte arrives only when it is complete.
    pub(super) stream: bool,
    /// Whether the caller set a priority, which is then kept.
    pub(super) has_priority: bool,
    /// Prompt tokens that the engine should report, if known.
    pub(super) expected_prompt_tokens: Option<u32>,
    pub(super) context: RequestContext,
    pub(super) started: Instant,
}

impl ForwardRequest {
    /// Whether it asks for embeddings instead of generated text.
    fn is_embedding(&self) -> bool {
        self.path_and_query.starts_with("/v1/embeddings")
    }
}

/// Largest answer of a prefill engine that is read.
const PREFILL_ANSWER_BYTES_MAX: usize = 4 << 20;

/// A placement with the breaker guards of its engines.
struct ClaimedTarget {
    target: RouteTarget,
    guard: AttemptGuard,
    /// Guard of the decode engine.
    partner_guard: Option<AttemptGuard>,
}

/// Body and form of one attempt.
#[derive(Clone, Copy)]
struct AttemptBody<'a> {
    body: &'a Bytes,
    stream: bool,
    /// Whether this is the prefill of a pair, with an answer that is read here.
    is_prefill: bool,
}

/// Outcome of one attempt, and the engine that caused it.
struct AttemptOutcome {
    response: Result<StartedResponse, UpstreamError>,
    by: Arc<Endpoint>,
    /// Engine that computed the prompt, if another one decodes.
    prefill: Option<Arc<Endpoint>>,
    /// Whether only the prefill of a pair was attempted.
    is_prefill: bool,
}

impl AttemptOutcome {
    /// The outcome of a pair whose prefill was not followed by a decode.
    fn of_prefill(response: Result<StartedResponse, UpstreamError>, by: Arc<Endpoint>) -> Self {
        AttemptOutcome { response, by, prefill: None, is_prefill: true }
    }
}

/// Other placements of a request, best first, and its deadline for engines with priorities.
#[derive(Default)]
struct Alternatives {
    targets: VecDeque<RouteTarget>,
    priority_deadline_ms: u64,
    /// Time of the router's last decision.
    decided_at: Option<Instant>,
}

/// An answer that has begun.
struct StartedResponse {
    response: Response<Incoming>,
    first: Option<Frame<Bytes>>,
    guard: Option<AttemptGuard>,
}

impl StartedResponse {
    fn status(&self) -> u16 {
        self.response.status().as_u16()
    }
}

impl Forwarder {
    pub(super) fn new(
        decider: Decider,
        upstream: EngineClient,
        config: OpenAiConfig,
        priorities: PriorityOrder,
        metrics: OpenAiMetrics,
        seed: u64,
    ) -> Forwarder {
        let endpoints = decider.endpoints().clone();
        Forwarder {
            decider,
            upstream,
            breakers: Arc::new(CircuitBreakers::new(config.breaker.clone(), metrics.clone(), endpoints)),
            config,
            priorities,
            metrics,
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
        }
    }

    /// A random number.
    pub(super) fn random(&self) -> u128 {
        self.rng.lock().random()
    }

    /// Sends a request, and retries until an engine answers or the attempts are exhausted.
    pub(super) async fn forward(
        &self,
        mut request: ForwardRequest,
        mut running: RequestGuard,
    ) -> Response<Body> {
        let mut alternatives = Alternatives::default();
        let mut target = match self.choose(&request, &mut alternatives, false).await {
            Ok(place) => place,
            Err(refusal) => {
                running.set_outcome(match refusal {
                    Refusal::Busy { .. } => RequestOutcome::Busy,
                    Refusal::Unavailable { .. } => RequestOutcome::Unavailable,
                    Refusal::Invalid(_) | Refusal::NoFit(_) => RequestOutcome::Refused,
                });
                let refusal = if request.knows_models { refusal } else { refusal.without_other_models() };
                return answer::refusal_response(&refusal);
            }
        };
        self.metrics.request_sent(request.started.elapsed());
        let in_flight = InFlightGuard::new(self.decider.router(), request.context.request);
        let (mut attempts, mut request_faults) = (1, 0);
        loop {
            let outcome = self.try_target(target, &request, &alternatives, attempts).await;
            let cause = match &outcome.response {
                Ok(begun) if !RETRYABLE_STATUSES.contains(&begun.status()) => None,
                Ok(_) => Some("status"),
                Err(failure) => Some(failure.cause()),
            };
            request_faults +=
                u32::from(matches!(&outcome.response, Ok(begun) if begun.status() == REQUEST_FAULT_STATUS));
            let may_retry = match &outcome.response {
                Ok(_) => request_faults < 2,
                Err(failure) => counts_against_engine(failure, request.stream || outcome.is_prefill),
            };
            request.context.excluded.push(outcome.by.instance);
            let next = match cause {
                Some(_) if may_retry && attempts < self.config.retry.attempts => {
                    self.next_target(&request, &mut alternatives, attempts).await
                }
                _ => None,
            };
            let (Some(cause), Some(next)) = (cause, next) else {
                match &outcome.response {
                    Err(UpstreamError::DecodeBusy { .. }) => running.set_outcome(RequestOutcome::Busy),
                    _ if cause.is_some() => {
                        self.metrics.retries_exhausted();
                        running.set_outcome(RequestOutcome::Failed);
                    }
                    _ => {}
                }
                self.report_first_token(&outcome, attempts, &request, &alternatives);
                return self.to_response(outcome, &request, running, in_flight);
            };
            // Drop the failed attempt before the next one.
            tracing::debug!(instance = outcome.by.instance.0, cause, "retrying on another engine");
            drop(outcome);
            self.metrics.request_retried(cause);
            attempts += 1;
            target = next;
        }
    }

    /// Asks the router, and stores the alternatives. `is_retry`: an earlier decision did not lead
    /// to a run.
    async fn choose(
        &self,
        request: &ForwardRequest,
        alternatives: &mut Alternatives,
        is_retry: bool,
    ) -> Result<ClaimedTarget, Refusal> {
        let now = Instant::now();
        let asked = RequestContext { is_retry, ..request.context.clone() };
        let mut terms = asked.clone();
        let blocked = self.breakers.blocked_instances(now);
        // Scan the endpoints only if a breaker blocks any, which is rare.
        let open = if blocked.is_empty() { Vec::new() } else { self.decider.eligible(&request.context) };
        terms.excluded.extend(blocked);
        let open_instances: Vec<_> = open.iter().map(|endpoint| endpoint.instance).collect();
        if !open.is_empty() && open_instances.iter().all(|instance| terms.excluded.contains(instance)) {
            // If breakers block every open engine, try the one that is blocked longest instead of
            // failing the request.
            terms = asked.clone();
            terms.candidates = self.breakers.longest_open(&open_instances).map(|first| vec![first]);
        }
        let chosen = match self.decider.decide(&request.prompt, &terms).await {
            // Breakers may block all engines of one role, without which the others are of no use.
            Err(Refusal::Unavailable { .. }) if terms.excluded.len() > request.context.excluded.len() => {
                self.decider.decide(&request.prompt, &asked).await?
            }
            chosen => chosen?,
        };
        *alternatives = Alternatives {
            targets: chosen.fallbacks.into(),
            priority_deadline_ms: chosen.priority_deadline_ms,
            decided_at: Some(Instant::now()),
        };
        alternatives.targets.push_front(chosen.target.clone());
        // A concurrent request may have become the trial of the only engine.
        let place = self.first_available(alternatives, &request.context, now);
        if let Some(other) = place.as_ref().filter(|place| place.target != chosen.target) {
            self.decider.report_reroute(&request.prompt, &request.context, &other.target);
        }
        Ok(place.unwrap_or_else(|| {
            let claim = self.breakers.enter_anyway(chosen.target.endpoint.instance);
            let partner = chosen.target.partner.as_ref();
            let partner = partner.map(|partner| self.breakers.enter_anyway(partner.instance));
            ClaimedTarget { target: chosen.target, guard: claim, partner_guard: partner }
        }))
    }

    /// Next placement after a backoff: an alternative, or a new decision of the router. It is
    /// chosen after the delay, since engines may start to drain or fail meanwhile.
    async fn next_target(
        &self,
        sending: &ForwardRequest,
        alternatives: &mut Alternatives,
        tries: u32,
    ) -> Option<ClaimedTarget> {
        if self.decider.eligible(&sending.context).is_empty() {
            return None;
        }
        let chance = self.rng.lock().random();
        tokio::time::sleep(backoff::wait(&self.config.retry, tries - 1, chance)).await;
        if let Some(place) = self.first_available(alternatives, &sending.context, Instant::now()) {
            // Tell the router that the load moved.
            self.decider.report_reroute(&sending.prompt, &sending.context, &place.target);
            return Some(place);
        }
        self.choose(sending, alternatives, true).await.ok()
    }

    fn first_available(
        &self,
        alternatives: &mut Alternatives,
        terms: &RequestContext,
        now: Instant,
    ) -> Option<ClaimedTarget> {
        let endpoints = self.decider.endpoints();
        // The endpoint may have been removed or drained since the decision.
        let current = |named: &Endpoint| {
            endpoints.get(named.instance).filter(|current| endpoints.is_open(current.instance))
        };
        while let Some(named) = alternatives.targets.pop_front() {
            let Some(endpoint) = current(&named.endpoint) else { continue };
            let partner = named.partner.as_deref().map(current);
            if partner.as_ref().is_some_and(Option::is_none) {
                continue;
            }
            let way = RouteTarget { endpoint, partner: partner.flatten() };
            if way.uses_any(&terms.excluded) {
                continue;
            }
            let Some(claim) = self.breakers.try_enter(way.endpoint.instance, now) else { continue };
            let Some(partner) = &way.partner else {
                return Some(ClaimedTarget { target: way, guard: claim, partner_guard: None });
            };
            // Both engines of a pair must be available before either is asked.
            if let Some(partner) = self.breakers.try_enter(partner.instance, now) {
                return Some(ClaimedTarget { target: way, guard: claim, partner_guard: Some(partner) });
            }
        }
        None
    }

    /// Sends the request to one placement.
    async fn try_target(
        &self,
        place: ClaimedTarget,
        sending: &ForwardRequest,
        others: &Alternatives,
        tries: u32,
    ) -> AttemptOutcome {
        let ClaimedTarget {
            target: RouteTarget { endpoint, partner },
            guard: claim,
            partner_guard: partner_claim,
        } = place;
        // Embeddings have no decode step.
        let partner = partner.filter(|_| !sending.is_embedding());
        let whole = AttemptBody { body: &sending.body, stream: sending.stream, is_prefill: false };
        let Some((partner, partner_claim)) = partner.zip(partner_claim) else {
            let begun = self.attempt(&endpoint, claim, sending, others.priority_deadline_ms, whole).await;
            return AttemptOutcome { response: begun, by: endpoint, prefill: None, is_prefill: false };
        };
        let is_chat = sending.path_and_query.starts_with("/v1/chat/");
        // The engine answers a body that is not an object with an error.
        let first = pair::prefill_body(&sending.body, is_chat).unwrap_or_else(|_| sending.body.clone());
        let first = AttemptBody { body: &first, stream: true, is_prefill: true };
        // One token takes as long as the first token of a stream, so silence counts as a failure.
        let begun = self.attempt(&endpoint, claim, sending, others.priority_deadline_ms, first).await;
        let begun = match begun {
            Ok(begun) if begun.response.status().is_success() => begun,
            other => return AttemptOutcome::of_prefill(other, endpoint),
        };
        let second = match self.read_all(begun).await.map(|answer| pair::second(&sending.body, &answer)) {
            Ok(Ok(second)) => second,
            Ok(Err(pair::NotAnObject)) => {
                let failure = UpstreamError::Broken("its answer is not a JSON object".to_owned());
                return AttemptOutcome::of_prefill(Err(failure), endpoint);
            }
            Err(failure) => return AttemptOutcome::of_prefill(Err(failure), endpoint),
        };
        // The prefill's one token is the first token of the request; the decode engine produces the
        // rest.
        if let Some(chosen) = others.decided_at.filter(|_| tries == 1) {
            self.decider.router().record_first_token(
                sending.context.request,
                endpoint.instance,
                chosen.elapsed(),
            );
        }
        // Other requests may have begun to decode there during the prefill. Retrying on another
        // pair would compute the prompt again, so the caller gets a retry hint.
        if let Some(failure) = self.decode_busy(sending, partner.instance) {
            return AttemptOutcome {
                response: Err(failure),
                by: partner,
                prefill: Some(endpoint),
                is_prefill: false,
            };
        }
        let second = AttemptBody { body: &second, ..whole };
        let begun = self.attempt(&partner, partner_claim, sending, others.priority_deadline_ms, second).await;
        AttemptOutcome { response: begun, by: partner, prefill: Some(endpoint), is_prefill: false }
    }

    /// Checks whether the instance can decode one more request within the limits; the error has a
    /// retry hint.
    fn decode_busy(&self, sending: &ForwardRequest, instance: InstanceId) -> Option<UpstreamError> {
        let pb::AdmitDecodeReply { admitted: may, reason, retry_after_ms, .. } =
            self.decider.router().admit_decode(sending.context.request, instance);
        (!may)
            .then(|| UpstreamError::DecodeBusy { reason, retry_after: Duration::from_millis(retry_after_ms) })
    }

    /// Reads the whole answer of a prefill engine.
    async fn read_all(&self, begun: StartedResponse) -> Result<Bytes, UpstreamError> {
        let StartedResponse { response, first, guard: claim } = begun;
        let mut all = BytesMut::from(&first.and_then(|frame| frame.into_data().ok()).unwrap_or_default()[..]);
        let mut body = response.into_body();
        let read = read_rest(&mut all, &mut body, self.config.idle_timeout()).await;
        // The outcome counts for the engine, as for a relayed answer.
        if let Some(claim) = claim {
            match &read {
                Ok(()) => claim.record_success(),
                Err(_) => claim.record_failure(Instant::now()),
            }
        }
        read.map(|()| all.freeze())
    }

    /// Sends the request to one engine, and waits for the first byte of the answer's body.
    async fn attempt(
        &self,
        endpoint: &Endpoint,
        claim: AttemptGuard,
        sending: &ForwardRequest,
        priority_deadline_ms: u64,
        share: AttemptBody<'_>,
    ) -> Result<StartedResponse, UpstreamError> {
        let (response, first) = match self.send_once(endpoint, sending, share, priority_deadline_ms).await {
            Ok(begun) => begun,
            Err(failure) => {
                tracing::debug!(instance = endpoint.instance.0, %failure, "an engine failed before its answer began");
                if counts_against_engine(&failure, share.stream) {
                    claim.record_failure(Instant::now());
                }
                return Err(failure);
            }
        };
        let status = response.status().as_u16();
        let claim = if ENGINE_FAULT_STATUSES.contains(&status) {
            claim.record_failure(Instant::now());
            None
        } else if RETRYABLE_STATUSES.contains(&status) {
            None
        } else {
            claim.record_start();
            Some(claim)
        };
        Ok(StartedResponse { response, first, guard: claim })
    }

    async fn send_once(
        &self,
        endpoint: &Endpoint,
        sending: &ForwardRequest,
        share: AttemptBody<'_>,
        priority_deadline_ms: u64,
    ) -> Result<(Response<Incoming>, Option<Frame<Bytes>>), UpstreamError> {
        let body = match sending.has_priority {
            true => share.body.clone(),
            false => self.priorities.apply(share.body, priority_deadline_ms),
        };
        let mut headers = sending.headers.clone();
        if share.is_prefill {
            headers.remove(ACCEPT_ENCODING);
        }
        let mut request = self.upstream.request(
            sending.method.clone(),
            endpoint,
            &sending.path_and_query,
            headers,
            body,
        )?;
        let connection = capture_connection(&mut request);
        let sent = async { await_first_frame(self.upstream.send(request).await?).await };
        let after = self.config.first_byte_timeout();
        let late = || UpstreamError::Timeout { after, connected: connection.connection_metadata().is_some() };
        tokio::time::timeout(after, pin!(sent)).await.unwrap_or_else(|_| Err(late()))
    }

    /// Reports the time of the first token to the router. Only a stream shows this time, and only
    /// the first attempt is comparable with the prediction.
    fn report_first_token(
        &self,
        tried: &AttemptOutcome,
        tries: u32,
        sending: &ForwardRequest,
        others: &Alternatives,
    ) {
        // For a pair it was reported after the prefill.
        let is_first = tries == 1 && sending.stream && tried.prefill.is_none();
        let began = tried.response.as_ref().is_ok_and(|begun| begun.first.is_some());
        if let Some(chosen) = others.decided_at.filter(|_| is_first && began) {
            self.decider.router().record_first_token(
                sending.context.request,
                tried.by.instance,
                chosen.elapsed(),
            );
        }
    }

    /// Builds the caller's response from the last attempt.
    fn to_response(
        &self,
        tried: AttemptOutcome,
        sending: &ForwardRequest,
        running: RequestGuard,
        under_way: InFlightGuard,
    ) -> Response<Body> {
        let AttemptOutcome { response: begun, by, prefill, .. } = tried;
        self.breakers.forget_unknown();
        let mut response = match begun {
            Ok(StartedResponse { response, first, guard: claim }) => {
                self.metrics.first_byte(sending.started.elapsed());
                let (mut parts, rest) = response.into_parts();
                headers::strip_answer_headers(&mut parts.headers);
                parts.version = Version::HTTP_11;
                let seen = response_scan(&parts, sending, under_way, by.instance);
                let still = IdleTimer::new(self.config.idle_timeout());
                let relay = RelayBody {
                    first,
                    rest,
                    idle: still,
                    scan: seen,
                    guard: claim,
                    request: running,
                    pending_error: None,
                };
                Response::from_parts(parts, Body::new(relay.finished_if_empty()))
            }
            Err(UpstreamError::DecodeBusy { reason, retry_after }) => {
                answer::refusal_response(&Refusal::Busy { reason, retry_after })
            }
            Err(failure) => {
                let status = match failure {
                    UpstreamError::Timeout { .. } => StatusCode::GATEWAY_TIMEOUT,
                    UpstreamError::Connect(_)
                    | UpstreamError::Broken(_)
                    | UpstreamError::DecodeBusy { .. } => StatusCode::BAD_GATEWAY,
                };
                let text = format!(
                    "instance {} did not answer, and no other engine is left: {failure}",
                    by.instance.0
                );
                answer::error_response(status, &text, Some("engine_failed"))
            }
        };
        response.headers_mut().insert(headers::INSTANCE, HeaderValue::from(by.instance.0));
        if let Some(prefill) = prefill {
            response.headers_mut().insert(headers::PREFILL_INSTANCE, HeaderValue::from(prefill.instance.0));
        }
        response
    }
}

/// Selects the scanning of an answer with these headers. An error has no usage, and ends its
/// request at the router.
fn response_scan(
    head: &response::Parts,
    sending: &ForwardRequest,
    under_way: InFlightGuard,
    instance: InstanceId,
) -> ResponseScan {
    if !head.status.is_success() {
        return ResponseScan {
            scanner: None,
            is_awaited: false,
            expected_prompt_tokens: None,
            in_flight: None,
        };
    }
    // Answers to embeddings report prompt tokens only.
    let is_told = sending.expected_prompt_tokens.is_some() || !sending.is_embedding();
    let is_text = !head.headers.contains_key(CONTENT_ENCODING);
    let kind = head.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let tally = (is_told && is_text).then(|| UsageScanner::new(kind));
    // Its first frame was awaited.
    ResponseScan {
        scanner: tally,
        is_awaited: true,
        expected_prompt_tokens: sending.expected_prompt_tokens,
        in_flight: Some((under_way, instance)),
    }
}

/// Reads the rest of a prefill engine's answer.
async fn read_rest(all: &mut BytesMut, body: &mut Incoming, after: Duration) -> Result<(), UpstreamError> {
    loop {
        let next = tokio::time::timeout(after, body.frame()).await;
        let next = next.map_err(|_| UpstreamError::Timeout { after, connected: true })?;
        let Some(frame) = next else { return Ok(()) };
        let frame = frame.map_err(|error| UpstreamError::Broken(super::upstream::error_chain(&error)))?;
        all.extend_from_slice(&frame.into_data().unwrap_or_default());
        if all.len() > PREFILL_ANSWER_BYTES_MAX {
            let text = format!("its answer with one token has more than {PREFILL_ANSWER_BYTES_MAX} bytes");
            return Err(UpstreamError::Broken(text));
        }
    }
}

/// Whether a failure counts against the engine. An answer that is not streamed is silent until it
/// is complete; a timeout of it would recur on any engine.
fn counts_against_engine(failure: &UpstreamError, stream: bool) -> bool {
    if matches!(failure, UpstreamError::DecodeBusy { .. }) {
        return false;
    }
    stream || !matches!(failure, UpstreamError::Timeout { connected: true, .. })
}

/// Waits for the first frame of the body.
async fn await_first_frame(
    mut response: Response<Incoming>,
) -> Result<(Response<Incoming>, Option<Frame<Bytes>>), UpstreamError> {
    if !response.status().is_success() || response.body().is_end_stream() {
        return Ok((response, None));
    }
    match response.body_mut().frame().await {
        Some(Ok(frame)) => Ok((response, Some(frame))),
        Some(Err(error)) => Err(UpstreamError::Broken(super::upstream::error_chain(&error))),
        None => Ok((response, None)),
    }
}
