//! Sends a request to the engine that the router chose, and to another one if that fails before its answer began.
//!
//! Not here: what a request asks for (`crate::prompt`), and its answer once it began (`relay.rs`).

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version};
use bytes::Bytes;
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::capture_connection;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::breaker::{Breakers, Claim};
use super::config::OpenAiConfig;
use super::priority::Priorities;
use super::relay::{Relay, Running, Still};
use super::upstream::{Failure, Upstream};
use super::usage::Usage;
use super::{answer, backoff, headers};
use crate::decide::{Decider, Refusal, Terms};
use crate::endpoints::Endpoint;
use crate::metrics::{Metrics, Outcome};
use crate::prompt::Prompt;

/// Statuses after which another engine may do better.
const RETRYABLE: [u16; 6] = [408, 429, 500, 502, 503, 504];

/// Statuses that speak against an engine. One that is busy, or that a caller was too slow for, is not broken; and 500 is what an engine makes of one
/// request, which others may make of it as well.
const BROKEN: [u16; 3] = [502, 503, 504];

/// The status that speaks against a request. One more engine is asked, in case it was the engine after all.
const OF_REQUEST: u16 = 500;

/// Sends requests on.
#[derive(Debug)]
pub(super) struct Forward {
    pub(super) decider: Decider,
    upstream: Upstream,
    breakers: Arc<Breakers>,
    config: OpenAiConfig,
    priorities: Priorities,
    metrics: Metrics,
    chance: Mutex<StdRng>,
}

/// A request that goes on.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) method: Method,
    pub(super) path_and_query: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) prompt: Prompt,
    /// Whether the answer comes in pieces. Otherwise its first byte comes when all of it is made.
    pub(super) stream: bool,
    /// Whether its caller gave it a priority, which stays.
    pub(super) has_priority: bool,
    /// Tokens that the engine must count in it.
    pub(super) tokens: Option<u32>,
    pub(super) terms: Terms,
    pub(super) started: Instant,
}

/// Where one goes, and that it may.
struct Place {
    endpoint: Arc<Endpoint>,
    claim: Claim,
}

/// Who could take a request besides, best first, and its turn wherever it goes.
#[derive(Default)]
struct Others {
    endpoints: VecDeque<Arc<Endpoint>>,
    turn_ms: u64,
    /// When the router was asked last.
    chosen: Option<Instant>,
}

/// An answer that began.
struct Begun {
    response: Response<Incoming>,
    first: Option<Frame<Bytes>>,
    claim: Option<Claim>,
}

impl Begun {
    fn status(&self) -> u16 {
        self.response.status().as_u16()
    }
}

impl Forward {
    pub(super) fn new(
        decider: Decider,
        (config, priorities): (OpenAiConfig, Priorities),
        metrics: Metrics,
        seed: u64,
    ) -> Forward {
        Forward {
            decider,
            upstream: Upstream::new(config.connect()),
            breakers: Arc::new(Breakers::new(config.breaker.clone(), metrics.clone())),
            config,
            priorities,
            metrics,
            chance: Mutex::new(StdRng::seed_from_u64(seed)),
        }
    }

    /// A number by chance.
    pub(super) fn random(&self) -> u128 {
        self.chance.lock().random()
    }

    /// Sends it, until somebody answers or nobody is left.
    pub(super) async fn forward(&self, mut sending: Sending, mut running: Running) -> Response<Body> {
        let mut others = Others::default();
        let mut place = match self.choose(&sending, &mut others).await {
            Ok(place) => place,
            Err(refusal) => {
                running.ends(match refusal {
                    Refusal::Busy { .. } => Outcome::Busy,
                    Refusal::Nobody { .. } => Outcome::Nobody,
                    Refusal::Invalid(_) => Outcome::Refused,
                });
                return answer::refusal(&refusal);
            }
        };
        self.metrics.sent(sending.started.elapsed());
        let (mut tries, mut faults) = (1, 0);
        loop {
            let Place { endpoint, claim } = place;
            let tried = self.attempt(&endpoint, claim, (&sending, others.turn_ms)).await;
            let cause = match &tried {
                Ok(begun) if !RETRYABLE.contains(&begun.status()) => None,
                Ok(_) => Some("status"),
                Err(failure) => Some(failure.cause()),
            };
            faults += u32::from(matches!(&tried, Ok(begun) if begun.status() == OF_REQUEST));
            let again = match &tried {
                Ok(_) => faults < 2,
                Err(failure) => speaks_against(failure, sending.stream),
            };
            sending.terms.without.push(endpoint.instance);
            let next = match cause {
                Some(_) if again && tries < self.config.retry.attempts => {
                    self.next(&sending, &mut others, tries).await
                }
                _ => None,
            };
            let (Some(cause), Some(next)) = (cause, next) else {
                if cause.is_some() {
                    self.metrics.exhausted();
                    running.ends(Outcome::Failed);
                }
                self.tell(&tried, (&endpoint, tries), &sending, &others);
                return self.answer(tried, &endpoint, &sending, running);
            };
            // Nobody waits for this one any more.
            drop(tried);
            self.metrics.retried(cause);
            tracing::debug!(instance = endpoint.instance.0, cause, "another engine is tried");
            tries += 1;
            place = next;
        }
    }

    /// Asks the router, and notes who else could take it.
    async fn choose(&self, sending: &Sending, others: &mut Others) -> Result<Place, Refusal> {
        let now = Instant::now();
        let mut terms = sending.terms.clone();
        terms.without.extend(self.breakers.closed_to(now));
        let open = self.decider.open(&sending.terms);
        let left_alone: Vec<_> = open.iter().map(|endpoint| endpoint.instance).collect();
        if !open.is_empty() && left_alone.iter().all(|instance| terms.without.contains(instance)) {
            // They cannot all be broken for long: one is asked, rather than that nobody is answered.
            terms = sending.terms.clone();
            terms.among = self.breakers.first_opened(&left_alone).map(|first| vec![first]);
        }
        let chosen = self.decider.decide(&sending.prompt, &terms).await?;
        *others = Others {
            endpoints: chosen.fallbacks.into(),
            turn_ms: chosen.turn_ms,
            chosen: Some(Instant::now()),
        };
        others.endpoints.push_front(chosen.endpoint.clone());
        // Another request may have begun to try the only one meanwhile.
        let place = self.first_free(others, &sending.terms, now);
        Ok(place.unwrap_or_else(|| {
            let claim = self.breakers.claim_closed(chosen.endpoint.instance);
            Place { endpoint: chosen.endpoint, claim }
        }))
    }

    /// Another one, after a while: of those that were named before, or else the router is asked again. Chosen when it is needed: it may have been
    /// told to drain, or have failed, in that while.
    async fn next(&self, sending: &Sending, others: &mut Others, tries: u32) -> Option<Place> {
        if self.decider.open(&sending.terms).is_empty() {
            return None;
        }
        let chance = self.chance.lock().random();
        tokio::time::sleep(backoff::wait(&self.config.retry, tries - 1, chance)).await;
        if let Some(place) = self.first_free(others, &sending.terms, Instant::now()) {
            return Some(place);
        }
        self.choose(sending, others).await.ok()
    }

    fn first_free(&self, others: &mut Others, terms: &Terms, now: Instant) -> Option<Place> {
        while let Some(endpoint) = others.endpoints.pop_front() {
            // It may have been told to drain since it was named, or be gone.
            let endpoints = self.decider.endpoints();
            let current = endpoints.get(endpoint.instance);
            let Some(current) = current.filter(|current| endpoints.is_open(current.instance)) else {
                continue;
            };
            if terms.without.contains(&current.instance) {
                continue;
            }
            if let Some(claim) = self.breakers.claim(current.instance, now) {
                return Some(Place { endpoint: current, claim });
            }
        }
        None
    }

    /// Sends it to one engine, and waits for the first byte of the answer's body.
    async fn attempt(
        &self,
        endpoint: &Endpoint,
        claim: Claim,
        (sending, turn_ms): (&Sending, u64),
    ) -> Result<Begun, Failure> {
        let (response, first) = match self.sent(endpoint, sending, turn_ms).await {
            Ok(begun) => begun,
            Err(failure) => {
                tracing::debug!(instance = endpoint.instance.0, %failure, "an engine failed before it answered");
                if speaks_against(&failure, sending.stream) {
                    claim.failed(Instant::now());
                }
                return Err(failure);
            }
        };
        let status = response.status().as_u16();
        let claim = if BROKEN.contains(&status) {
            claim.failed(Instant::now());
            None
        } else if RETRYABLE.contains(&status) {
            None
        } else {
            claim.began();
            Some(claim)
        };
        Ok(Begun { response, first, claim })
    }

    async fn sent(
        &self,
        endpoint: &Endpoint,
        sending: &Sending,
        turn_ms: u64,
    ) -> Result<(Response<Incoming>, Option<Frame<Bytes>>), Failure> {
        let body = match sending.has_priority {
            true => sending.body.clone(),
            false => self.priorities.put(&sending.body, turn_ms),
        };
        let mut request = Upstream::request(
            sending.method.clone(),
            &endpoint.authority,
            &sending.path_and_query,
            sending.headers.clone(),
            body,
        )?;
        let connection = capture_connection(&mut request);
        let sent = async { first(self.upstream.send(request).await?).await };
        let after = self.config.first_byte();
        let late = || Failure::Late { after, had_it: connection.connection_metadata().is_some() };
        tokio::time::timeout(after, pin!(sent)).await.unwrap_or_else(|_| Err(late()))
    }

    /// Tells the router when the first piece of an answer came from the engine that it chose. An answer in one piece says nothing of its first token, and
    /// one behind a failure little of the engine.
    fn tell(
        &self,
        tried: &Result<Begun, Failure>,
        (endpoint, tries): (&Endpoint, u32),
        sending: &Sending,
        others: &Others,
    ) {
        let is_first = tries == 1 && sending.stream;
        let began = tried.as_ref().is_ok_and(|begun| begun.first.is_some());
        if let Some(chosen) = others.chosen.filter(|_| is_first && began) {
            self.decider.desk().first_token(sending.terms.request, endpoint.instance, chosen.elapsed());
        }
    }

    /// What the caller gets of the last try.
    fn answer(
        &self,
        tried: Result<Begun, Failure>,
        endpoint: &Endpoint,
        sending: &Sending,
        running: Running,
    ) -> Response<Body> {
        self.breakers
            .keep(&self.decider.endpoints().list().iter().map(|known| known.instance).collect::<Vec<_>>());
        let mut response = match tried {
            Ok(Begun { response, first, claim }) => {
                self.metrics.first_byte(sending.started.elapsed());
                let (mut parts, rest) = response.into_parts();
                headers::back(&mut parts.headers);
                parts.version = Version::HTTP_11;
                let tokens = sending.tokens.filter(|_| parts.status.is_success());
                let (still, usage) = (Still::new(self.config.idle()), Usage::default());
                let relay = Relay { first, rest, still, usage, tokens, claim, running };
                Response::from_parts(parts, Body::new(relay.begun()))
            }
            Err(failure) => {
                let status = match failure {
                    Failure::Late { .. } => StatusCode::GATEWAY_TIMEOUT,
                    Failure::Connect(_) | Failure::Broken(_) => StatusCode::BAD_GATEWAY,
                };
                let text = format!(
                    "instance {} did not answer, and no other is left: {failure}",
                    endpoint.instance.0
                );
                answer::problem(status, &text, Some("engine_failed"))
            }
        };
        response.headers_mut().insert(headers::INSTANCE, HeaderValue::from(endpoint.instance.0));
        response
    }
}

/// Whether a failure is the engine's. One that makes an answer in one piece is silent for as long as that takes, which is no failure of its own, and another
/// one takes as long.
fn speaks_against(failure: &Failure, stream: bool) -> bool {
    stream || !matches!(failure, Failure::Late { had_it: true, .. })
}

/// Waits for the first piece of a body that is to come.
async fn first(
    mut response: Response<Incoming>,
) -> Result<(Response<Incoming>, Option<Frame<Bytes>>), Failure> {
    if !response.status().is_success() || response.body().is_end_stream() {
        return Ok((response, None));
    }
    match response.body_mut().frame().await {
        Some(Ok(frame)) => Ok((response, Some(frame))),
        Some(Err(error)) => Err(Failure::Broken(super::upstream::causes(&error))),
        None => Ok((response, None)),
    }
}
