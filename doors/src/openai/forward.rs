//! Sends a request to the engine that the router chose, and to another one if that fails before its answer began.
//!
//! Not here: what a request asks for (`crate::prompt`), and its answer once it began (`relay.rs`).

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

use super::breaker::{Breakers, Claim};
use super::config::OpenAiConfig;
use super::priority::Priorities;
use super::relay::{Relay, Running, Seen, Still};
use super::upstream::{Failure, Upstream};
use super::{backoff, headers, pair};
use crate::answer;
use crate::decide::{Decider, Refusal, Terms, Way};
use crate::endpoints::Endpoint;
use crate::metrics::{Metrics, Outcome};
use crate::prompt::Prompt;
use crate::tally::Tally;
use crate::under_way::UnderWay;

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

impl Sending {
    /// Whether it asks for nothing that a model would say.
    fn is_embedding(&self) -> bool {
        self.path_and_query.starts_with("/v1/embeddings")
    }
}

/// Largest answer that is read of an engine that another goes on after.
const FIRST_BYTES_MAX: usize = 4 << 20;

/// Where one goes, and that it may.
struct Place {
    way: Way,
    claim: Claim,
    /// On who goes on.
    partner: Option<Claim>,
}

/// What of a request goes to one engine.
#[derive(Clone, Copy)]
struct Share<'a> {
    body: &'a Bytes,
    stream: bool,
    /// Whether the answer is read here.
    is_read: bool,
}

/// What came of a try, and whose it is.
struct Tried {
    begun: Result<Begun, Failure>,
    by: Arc<Endpoint>,
    /// Who computed the prompt before that, if another did.
    prefill: Option<Arc<Endpoint>>,
    /// Whether it was asked for one token only.
    is_of_pair: bool,
}

/// Who could take a request besides, best first, and its turn wherever it goes.
#[derive(Default)]
struct Others {
    ways: VecDeque<Way>,
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
        let endpoints = decider.endpoints().clone();
        Forward {
            decider,
            upstream: Upstream::new(config.connect()),
            breakers: Arc::new(Breakers::new(config.breaker.clone(), metrics.clone(), endpoints)),
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
        let mut place = match self.choose(&sending, &mut others, false).await {
            Ok(place) => place,
            Err(refusal) => {
                running.ends(match refusal {
                    Refusal::Busy { .. } => Outcome::Busy,
                    Refusal::Nobody { .. } => Outcome::Nobody,
                    Refusal::Invalid(_) | Refusal::Misfit(_) => Outcome::Refused,
                });
                return answer::refusal(&refusal);
            }
        };
        self.metrics.sent(sending.started.elapsed());
        let under_way = UnderWay::new(self.decider.desk(), sending.terms.request);
        let (mut tries, mut faults) = (1, 0);
        loop {
            let tried = self.tried(place, &sending, (&others, tries)).await;
            let cause = match &tried.begun {
                Ok(begun) if !RETRYABLE.contains(&begun.status()) => None,
                Ok(_) => Some("status"),
                Err(failure) => Some(failure.cause()),
            };
            faults += u32::from(matches!(&tried.begun, Ok(begun) if begun.status() == OF_REQUEST));
            let again = match &tried.begun {
                Ok(_) => faults < 2,
                Err(failure) => speaks_against(failure, sending.stream || tried.is_of_pair),
            };
            sending.terms.without.push(tried.by.instance);
            let next = match cause {
                Some(_) if again && tries < self.config.retry.attempts => {
                    self.next(&sending, &mut others, tries).await
                }
                _ => None,
            };
            let (Some(cause), Some(next)) = (cause, next) else {
                match &tried.begun {
                    Err(Failure::Paced { .. }) => running.ends(Outcome::Busy),
                    _ if cause.is_some() => {
                        self.metrics.exhausted();
                        running.ends(Outcome::Failed);
                    }
                    _ => {}
                }
                self.tell(&tried, tries, &sending, &others);
                return self.answer(tried, &sending, (running, under_way));
            };
            // Nobody waits for this one any more.
            tracing::debug!(instance = tried.by.instance.0, cause, "another engine is tried");
            drop(tried);
            self.metrics.retried(cause);
            tries += 1;
            place = next;
        }
    }

    /// Asks the router, and notes who else could take it. `again`: it does not run where it was sent.
    async fn choose(&self, sending: &Sending, others: &mut Others, again: bool) -> Result<Place, Refusal> {
        let now = Instant::now();
        let asked = Terms { again, ..sending.terms.clone() };
        let mut terms = asked.clone();
        let closed_to = self.breakers.closed_to(now);
        // Rarely is there one: the fleet is looked through only then.
        let open = if closed_to.is_empty() { Vec::new() } else { self.decider.open(&sending.terms) };
        terms.without.extend(closed_to);
        let left_alone: Vec<_> = open.iter().map(|endpoint| endpoint.instance).collect();
        if !open.is_empty() && left_alone.iter().all(|instance| terms.without.contains(instance)) {
            // They cannot all be broken for long: one is asked, rather than that nobody is answered.
            terms = asked.clone();
            terms.among = self.breakers.first_opened(&left_alone).map(|first| vec![first]);
        }
        let chosen = match self.decider.decide(&sending.prompt, &terms).await {
            // Those of one kind may all be left alone, and the others are of no use without.
            Err(Refusal::Nobody { .. }) if terms.without.len() > sending.terms.without.len() => {
                self.decider.decide(&sending.prompt, &asked).await?
            }
            chosen => chosen?,
        };
        *others =
            Others { ways: chosen.fallbacks.into(), turn_ms: chosen.turn_ms, chosen: Some(Instant::now()) };
        others.ways.push_front(chosen.way.clone());
        // Another request may have begun to try the only one meanwhile.
        let place = self.first_free(others, &sending.terms, now);
        if let Some(other) = place.as_ref().filter(|place| place.way != chosen.way) {
            self.decider.goes(&sending.prompt, &sending.terms, &other.way);
        }
        Ok(place.unwrap_or_else(|| {
            let claim = self.breakers.claim_closed(chosen.way.endpoint.instance);
            let partner = chosen.way.partner.as_ref();
            let partner = partner.map(|partner| self.breakers.claim_closed(partner.instance));
            Place { way: chosen.way, claim, partner }
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
            // Where it was sent it is not, and the router counts it there.
            self.decider.goes(&sending.prompt, &sending.terms, &place.way);
            return Some(place);
        }
        self.choose(sending, others, true).await.ok()
    }

    fn first_free(&self, others: &mut Others, terms: &Terms, now: Instant) -> Option<Place> {
        let endpoints = self.decider.endpoints();
        // It may have been told to drain since it was named, or be gone.
        let current = |named: &Endpoint| {
            endpoints.get(named.instance).filter(|current| endpoints.is_open(current.instance))
        };
        while let Some(named) = others.ways.pop_front() {
            let Some(endpoint) = current(&named.endpoint) else { continue };
            let partner = named.partner.as_deref().map(current);
            if partner.as_ref().is_some_and(Option::is_none) {
                continue;
            }
            let way = Way { endpoint, partner: partner.flatten() };
            if way.is_by(&terms.without) {
                continue;
            }
            let Some(claim) = self.breakers.claim(way.endpoint.instance, now) else { continue };
            let Some(partner) = &way.partner else { return Some(Place { way, claim, partner: None }) };
            // Both, before either is asked: nobody computes for one that is left alone.
            if let Some(partner) = self.breakers.claim(partner.instance, now) {
                return Some(Place { way, claim, partner: Some(partner) });
            }
        }
        None
    }

    /// Sends it one way.
    async fn tried(&self, place: Place, sending: &Sending, (others, tries): (&Others, u32)) -> Tried {
        let Place { way: Way { endpoint, partner }, claim, partner: partner_claim } = place;
        // Embeddings are the prompt's own: nobody goes on.
        let partner = partner.filter(|_| !sending.is_embedding());
        let whole = Share { body: &sending.body, stream: sending.stream, is_read: false };
        let Some((partner, partner_claim)) = partner.zip(partner_claim) else {
            let begun = self.attempt(&endpoint, claim, (sending, others.turn_ms, whole)).await;
            return Tried { begun, by: endpoint, prefill: None, is_of_pair: false };
        };
        let is_chat = sending.path_and_query.starts_with("/v1/chat/");
        // A body that is no object has no prompt, and no way; the engine says so.
        let first = pair::first(&sending.body, is_chat).unwrap_or_else(|_| sending.body.clone());
        let first = Share { body: &first, stream: true, is_read: true };
        // One token takes no longer than the first of a stream: silence is a failure of its own.
        let begun = self.attempt(&endpoint, claim, (sending, others.turn_ms, first)).await;
        let begun = match begun {
            Ok(begun) if begun.response.status().is_success() => begun,
            other => return Tried { begun: other, by: endpoint, prefill: None, is_of_pair: true },
        };
        let second = match self.read(begun).await.map(|answer| pair::second(&sending.body, &answer)) {
            Ok(Ok(second)) => second,
            Ok(Err(pair::NoObject)) => {
                let failure = Failure::Broken("its answer is no JSON object".to_owned());
                return Tried { begun: Err(failure), by: endpoint, prefill: None, is_of_pair: true };
            }
            Err(failure) => {
                return Tried { begun: Err(failure), by: endpoint, prefill: None, is_of_pair: true };
            }
        };
        // Its one token is the first of them; what follows is the other's.
        if let Some(chosen) = others.chosen.filter(|_| tries == 1) {
            self.decider.desk().first_token(sending.terms.request, endpoint.instance, chosen.elapsed());
        }
        // While the prompt was computed others began to decode there. To compute it once more for another pair would take longer than to come again.
        if let Some(failure) = self.paced(sending, partner.instance) {
            return Tried { begun: Err(failure), by: partner, prefill: Some(endpoint), is_of_pair: false };
        }
        let second = Share { body: &second, ..whole };
        let begun = self.attempt(&partner, partner_claim, (sending, others.turn_ms, second)).await;
        Tried { begun, by: partner, prefill: Some(endpoint), is_of_pair: false }
    }

    /// Why a request should not begin to decode there now, if it should not.
    fn paced(&self, sending: &Sending, instance: InstanceId) -> Option<Failure> {
        let pb::MayDecodeReply { may, reason, retry_after_ms, .. } =
            self.decider.desk().may_decode(sending.terms.request, instance);
        (!may).then(|| Failure::Paced { reason, retry_after: Duration::from_millis(retry_after_ms) })
    }

    /// All of an answer that another goes on after.
    async fn read(&self, begun: Begun) -> Result<Bytes, Failure> {
        let Begun { response, first, claim } = begun;
        let mut all = BytesMut::from(&first.and_then(|frame| frame.into_data().ok()).unwrap_or_default()[..]);
        let mut body = response.into_body();
        let read = rest(&mut all, &mut body, self.config.idle()).await;
        // How that ended is its engine's, as with an answer that goes to a caller.
        if let Some(claim) = claim {
            match &read {
                Ok(()) => claim.ended(),
                Err(_) => claim.failed(Instant::now()),
            }
        }
        read.map(|()| all.freeze())
    }

    /// Sends it to one engine, and waits for the first byte of the answer's body.
    async fn attempt(
        &self,
        endpoint: &Endpoint,
        claim: Claim,
        (sending, turn_ms, share): (&Sending, u64, Share<'_>),
    ) -> Result<Begun, Failure> {
        let (response, first) = match self.sent(endpoint, (sending, share), turn_ms).await {
            Ok(begun) => begun,
            Err(failure) => {
                tracing::debug!(instance = endpoint.instance.0, %failure, "an engine failed before it answered");
                if speaks_against(&failure, share.stream) {
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
        (sending, share): (&Sending, Share<'_>),
        turn_ms: u64,
    ) -> Result<(Response<Incoming>, Option<Frame<Bytes>>), Failure> {
        let body = match sending.has_priority {
            true => share.body.clone(),
            false => self.priorities.put(share.body, turn_ms),
        };
        let mut headers = sending.headers.clone();
        if share.is_read {
            headers.remove(ACCEPT_ENCODING);
        }
        let mut request = Upstream::request(
            sending.method.clone(),
            &endpoint.authority,
            &sending.path_and_query,
            headers,
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
    fn tell(&self, tried: &Tried, tries: u32, sending: &Sending, others: &Others) {
        // That of a pair was told when the prompt was computed.
        let is_first = tries == 1 && sending.stream && tried.prefill.is_none();
        let began = tried.begun.as_ref().is_ok_and(|begun| begun.first.is_some());
        if let Some(chosen) = others.chosen.filter(|_| is_first && began) {
            self.decider.desk().first_token(sending.terms.request, tried.by.instance, chosen.elapsed());
        }
    }

    /// What the caller gets of the last try.
    fn answer(
        &self,
        tried: Tried,
        sending: &Sending,
        (running, under_way): (Running, UnderWay),
    ) -> Response<Body> {
        let Tried { begun, by, prefill, .. } = tried;
        self.breakers.keep_known();
        let mut response = match begun {
            Ok(Begun { response, first, claim }) => {
                self.metrics.first_byte(sending.started.elapsed());
                let (mut parts, rest) = response.into_parts();
                headers::back(&mut parts.headers);
                parts.version = Version::HTTP_11;
                let seen = seen(&parts, sending, (under_way, by.instance));
                let still = Still::new(self.config.idle());
                let relay = Relay { first, rest, still, seen, claim, running, broken: None };
                Response::from_parts(parts, Body::new(relay.begun()))
            }
            Err(Failure::Paced { reason, retry_after }) => {
                answer::refusal(&Refusal::Busy { reason, retry_after })
            }
            Err(failure) => {
                let status = match failure {
                    Failure::Late { .. } => StatusCode::GATEWAY_TIMEOUT,
                    Failure::Connect(_) | Failure::Broken(_) | Failure::Paced { .. } => {
                        StatusCode::BAD_GATEWAY
                    }
                };
                let text =
                    format!("instance {} did not answer, and no other is left: {failure}", by.instance.0);
                answer::problem(status, &text, Some("engine_failed"))
            }
        };
        response.headers_mut().insert(headers::INSTANCE, HeaderValue::from(by.instance.0));
        if let Some(prefill) = prefill {
            response.headers_mut().insert(headers::PREFILL_INSTANCE, HeaderValue::from(prefill.instance.0));
        }
        response
    }
}

/// What is looked at of an answer with this head. One that is none says nothing, and its request is over.
fn seen(head: &response::Parts, sending: &Sending, sent: (UnderWay, InstanceId)) -> Seen {
    if !head.status.is_success() {
        return Seen { tally: None, is_awaited: false, tokens: None, under_way: None };
    }
    // Of embeddings nothing else is told.
    let is_told = sending.tokens.is_some() || !sending.is_embedding();
    let is_text = !head.headers.contains_key(CONTENT_ENCODING);
    let kind = head.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let tally = (is_told && is_text).then(|| Tally::of(kind));
    // Its first piece was waited for.
    Seen { tally, is_awaited: true, tokens: sending.tokens, under_way: Some(sent) }
}

/// Reads what is left of the answer of the first of a pair.
async fn rest(all: &mut BytesMut, body: &mut Incoming, after: Duration) -> Result<(), Failure> {
    loop {
        let next = tokio::time::timeout(after, body.frame()).await;
        let next = next.map_err(|_| Failure::Late { after, had_it: true })?;
        let Some(frame) = next else { return Ok(()) };
        let frame = frame.map_err(|error| Failure::Broken(super::upstream::causes(&error)))?;
        all.extend_from_slice(&frame.into_data().unwrap_or_default());
        if all.len() > FIRST_BYTES_MAX {
            let text = format!("its answer with one token has more than {FIRST_BYTES_MAX} bytes");
            return Err(Failure::Broken(text));
        }
    }
}

/// Whether a failure is the engine's. One that makes an answer in one piece is silent for as long as that takes, which is no failure of its own, and another
/// one takes as long.
fn speaks_against(failure: &Failure, stream: bool) -> bool {
    if matches!(failure, Failure::Paced { .. }) {
        return false;
    }
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
