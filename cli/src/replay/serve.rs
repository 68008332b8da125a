//! Serves one request as a frontend would: routes it, sends the decision to the instance and awaits
//! the reply.
//!
//! A request succeeds by hits or by recomputation, whatever process dies meanwhile: failed attempts
//! are counted and repeated with a fresh decision.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::{IdentityDigest, InstanceId, RequestId, TenantId};
use kvfleet_client::{Client, ClientConfig, RouteAnswer, RouteCall, RouteError, RouterError};
use kvfleet_net::tls::{Identity, Role};
use kvfleet_proto::convert::category_to_pb;
use kvfleet_proto::pb::{self, AnnouncePosition};
use parking_lot::Mutex;
use tonic::transport::Channel;
use tracing::Instrument;

use super::measure::{ModelledSample, RequestSample, TierBlocks, TimedPrefill};
use super::prepare::PreparedRequest;
use super::watch::FailureWatch;
use crate::calls::{channel, run_on_instance};
use crate::cluster::{LAYERS, manifest};

/// How long a request is retried before it counts as failed. A cluster recovers within seconds, so
/// a longer failure points at a permanent problem.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);

/// Delay between two attempts, unless a router asks for a longer one.
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// Everything needed to serve requests.
pub(super) struct RequestDriver {
    pub(super) client: Client,
    pub(super) identity: Identity,
    pub(super) digest: IdentityDigest,
    pub(super) tenant: TenantId,
    pub(super) block_tokens: u32,
    pub(super) watch: Arc<FailureWatch>,
    /// Ratio of the times that routers predict to the hardware profile's time.
    pub(super) time_scale: f64,
    /// Channels by instance address; few, and never removed.
    pub(super) instances: Mutex<HashMap<String, Channel>>,
}

/// A completed request.
#[derive(Debug)]
pub(super) struct EndedRequest {
    pub(super) request: usize,
    /// Since the start of the replay.
    pub(super) at: Duration,
    pub(super) served: RequestResult,
}

/// The outcome of a request.
#[derive(Debug, Default)]
pub(super) struct RequestResult {
    /// Measurements; `None` if every attempt failed.
    pub(super) sample: Option<RequestSample>,
    /// The positions at which the saved blocks become visible.
    pub(super) saved_at: Vec<AnnouncePosition>,
    /// Leading blocks that were hits.
    pub(super) hit_blocks: usize,
    /// Failed attempts.
    pub(super) errors: Vec<String>,
    /// Sources that did not deliver everything.
    pub(super) misses: Vec<String>,
    /// Why no request of this replay can be served, with the remedy.
    pub(super) refused: Option<String>,
    /// Hardware profile with which the instance modelled its compute time.
    pub(super) profile: String,
    /// The decision that served the request.
    pub(super) decision: Option<pb::Decision>,
}

/// Why an attempt failed.
enum AttemptFailure {
    /// A later attempt may succeed.
    Retry { kind: String, after: Duration },
    /// Every further attempt, of any request, would fail too.
    Final(String),
}

impl AttemptFailure {
    fn from_route_error(error: &RouteError, block_tokens: u32) -> Self {
        match error {
            RouteError::Router(RouterError::NoneAnswered { .. }) => AttemptFailure::Retry {
                kind: format!("route failed: {}", kind_of(&error.to_string())),
                after: RETRY_EVERY,
            },
            RouteError::Router(RouterError::Refused { .. }) | RouteError::Empty => {
                AttemptFailure::Final(explain_refusal(&error.to_string(), block_tokens))
            }
        }
    }

    fn from_instance_error(error: &str) -> Self {
        AttemptFailure::Retry { kind: format!("instance failed: {}", kind_of(error)), after: RETRY_EVERY }
    }
}

/// Adds the remedy to a refusal that a user may meet: of the identity of a replay, only the tokens
/// per block can be chosen.
fn explain_refusal(error: &str, block_tokens: u32) -> String {
    if error.contains("identity") {
        return format!(
            "{error}; the trace's blocks have {block_tokens} tokens here: start the cluster with `kvfleet up \
             --block-tokens {block_tokens}`, or give this replay the cluster's --block-tokens"
        );
    }
    error.to_owned()
}

impl RequestDriver {
    /// Serves requests of `tenant` with blocks of `block_tokens` tokens.
    pub(super) fn new(
        routers: Vec<String>,
        identity: Identity,
        seed: u64,
        tenant: TenantId,
        block_tokens: u32,
        watch: Arc<FailureWatch>,
        time_scale: f64,
    ) -> anyhow::Result<RequestDriver> {
        // This client only routes, so settings for block transfers do not matter.
        let config = ClientConfig { seed, ..ClientConfig::new(routers, identity.clone()) };
        Ok(RequestDriver {
            client: Client::new(config)?,
            identity,
            digest: manifest(block_tokens, LAYERS).digest(),
            tenant,
            block_tokens,
            watch,
            time_scale,
            instances: Mutex::default(),
        })
    }

    /// Serves request `number`, routed by a router that has seen the positions in `after`.
    pub(super) async fn serve(
        &self,
        number: usize,
        request: &PreparedRequest,
        after: Vec<AnnouncePosition>,
    ) -> RequestResult {
        let started_at = Instant::now();
        let mut served = RequestResult::default();
        while started_at.elapsed() < GIVE_UP_AFTER {
            let span = tracing::info_span!("request", number);
            match self.attempt(number, request, after.clone()).instrument(span).await {
                Ok((mut sample, reply, decision)) => {
                    sample.total_us = micros(started_at.elapsed());
                    served.hit_blocks = reply.hit_blocks as usize;
                    served.saved_at = reply.saved_at;
                    served.misses = reply.misses;
                    served.profile = reply.modelled_profile;
                    served.decision = Some(decision);
                    served.sample = Some(sample);
                    return served;
                }
                Err(AttemptFailure::Retry { kind, after }) => {
                    served.errors.push(kind);
                    tokio::time::sleep(after).await;
                }
                Err(AttemptFailure::Final(why)) => {
                    served.refused = Some(why);
                    return served;
                }
            }
        }
        served
    }

    async fn attempt(
        &self,
        number: usize,
        request: &PreparedRequest,
        after: Vec<AnnouncePosition>,
    ) -> Result<(RequestSample, pb::RunReply, pb::Decision), AttemptFailure> {
        let started_at = Instant::now();
        let decision = self.route(number, request, after).await?;
        let route_us = micros(started_at.elapsed());
        self.watch.record_decision(&decision);
        let predicted = decision.predicted.unwrap_or_default();
        let transfer_us = in_profile_time(predicted.transfer_us, self.time_scale);
        let predicted_ttft_us =
            predicted.queue_us.saturating_add(predicted.transfer_us).saturating_add(predicted.prefill_us);
        let instance = decision.instance;
        let handover = decision.handover.clone();
        let mut reply = self.run(number, request, decision.clone()).await?;
        if let Some(handover) = handover {
            let decode_reply = self.run_handover(number, request, &handover, &reply).await?;
            reply.fetched_bytes += decode_reply.fetched_bytes;
            reply.verified_bytes += decode_reply.verified_bytes;
            reply.wrong_bytes += decode_reply.wrong_bytes;
            reply.unused_bytes += decode_reply.unused_bytes;
            reply.wrong_blocks += decode_reply.wrong_blocks;
        }
        let sample = sample(&reply, &RouteTiming { route_us, transfer_us, predicted_ttft_us, instance });
        Ok((sample, reply, decision))
    }

    fn call(&self, number: usize, request: &PreparedRequest, after: Vec<AnnouncePosition>) -> RouteCall {
        RouteCall {
            request: RequestId(number as u64),
            tenant: self.tenant,
            category: request.category,
            hashes: request.hashes.clone(),
            block_tokens: self.block_tokens,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            tbt_max_us: 0,
            identity: self.digest,
            after,
            fresh: false,
        }
    }

    /// Runs the decode part of a prefill/decode pair, which fetches the blocks computed for it.
    /// Hits are counted for the prefill instance, because those blocks were not computed.
    async fn run_handover(
        &self,
        number: usize,
        request: &PreparedRequest,
        handover: &pb::Handover,
        before: &pb::RunReply,
    ) -> Result<pb::RunReply, AttemptFailure> {
        let call = self.call(number, request, before.saved_at.clone());
        let mut decision = match self.client.plan(call, InstanceId(handover.instance), true).await {
            Ok(RouteAnswer::Decided(decision)) => decision,
            Ok(RouteAnswer::Rejected { reason, retry_after }) => {
                let kind = format!("route rejected: {}", kind_of(&reason));
                return Err(AttemptFailure::Retry { kind, after: retry_after.max(RETRY_EVERY) });
            }
            Err(error) => return Err(AttemptFailure::from_route_error(&error, self.block_tokens)),
        };
        decision.instance_address.clone_from(&handover.address);
        self.run(number, request, decision).await
    }

    async fn route(
        &self,
        number: usize,
        request: &PreparedRequest,
        after: Vec<AnnouncePosition>,
    ) -> Result<pb::Decision, AttemptFailure> {
        match self.client.route(self.call(number, request, after)).await {
            Ok(RouteAnswer::Decided(decision)) => Ok(decision),
            Ok(RouteAnswer::Rejected { reason, retry_after }) => Err(AttemptFailure::Retry {
                kind: format!("route rejected: {}", kind_of(&reason)),
                after: retry_after.max(RETRY_EVERY),
            }),
            Err(error) => Err(AttemptFailure::from_route_error(&error, self.block_tokens)),
        }
    }

    async fn run(
        &self,
        number: usize,
        request: &PreparedRequest,
        decision: pb::Decision,
    ) -> Result<pb::RunReply, AttemptFailure> {
        let address = decision.instance_address.clone();
        let channel = self
            .instance(&address)
            .map_err(|error| AttemptFailure::from_instance_error(&error.to_string()))?;
        let run = pb::RunRequest {
            request: number as u64,
            tenant: self.tenant.0,
            category: Some(category_to_pb(request.category)),
            hashes: request.hashes.iter().flat_map(|hash| hash.0).collect(),
            block_tokens: self.block_tokens,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            decision: Some(decision),
            wait_save: true,
            traceparent: kvfleet_net::trace_context::current_traceparent(),
        };
        let ran = run_on_instance(channel, run).await;
        ran.map_err(|status| AttemptFailure::from_instance_error(&format!("{:?}", status.code())))
    }

    fn instance(&self, address: &str) -> anyhow::Result<Channel> {
        let mut known = self.instances.lock();
        if let Some(channel) = known.get(address) {
            return Ok(channel.clone());
        }
        let new = channel(address, &self.identity, Role::Instance(None))?;
        known.insert(address.to_owned(), new.clone());
        Ok(new)
    }
}

fn sample(reply: &pb::RunReply, timing: &RouteTiming) -> RequestSample {
    // An instance reports 0 for a step that it did not attempt; a failed attempt has a duration
    // too.
    let attempted = |us: u64| (us > 0).then_some(us);
    RequestSample {
        at: Duration::ZERO,
        asked_blocks: reply.asked_blocks,
        hit_blocks: TierBlocks {
            gpu: reply.hit_gpu_blocks,
            dram: reply.hit_dram_blocks,
            ssd: reply.hit_ssd_blocks,
        },
        fetched_bytes: reply.fetched_bytes,
        verified_bytes: reply.verified_bytes,
        wrong_bytes: reply.wrong_bytes,
        wrong_blocks: reply.wrong_blocks,
        unused_bytes: reply.unused_bytes,
        saved_bytes: reply.saved_bytes,
        saved_blocks: reply.saved_blocks,
        present_blocks: reply.present_blocks,
        refused_blocks: reply.refused_blocks,
        route_us: timing.route_us,
        fetch_us: attempted(reply.fetch_us),
        save_us: attempted(reply.save_us),
        total_us: 0,
        instance: timing.instance,
        predicted_ttft_us: timing.predicted_ttft_us,
        timed: reply.timed.map(|timed| TimedPrefill {
            queue_us: timed.queue_us,
            prefill_us: timed.prefill_us,
            idle_us: timed.idle_us,
            recompute_us: timed.recompute_us,
            computed_blocks: timed.computed_blocks,
            read_buffer_bytes: timed.read_buffer_bytes,
            streamed_blocks: timed.streamed_blocks,
        }),
        modelled: ModelledSample {
            transfer_us: timing.transfer_us,
            prefill_us: reply.modelled_prefill_us,
            prefill_uncached_us: reply.modelled_prefill_uncached_us,
        },
    }
}

/// The prediction of a decision and the duration of the route call.
struct RouteTiming {
    route_us: u64,
    transfer_us: u64,
    predicted_ttft_us: u64,
    instance: u32,
}

/// Converts to the time of the hardware profile, the unit of all modelled values.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
fn in_profile_time(us: u64, time_scale: f64) -> u64 {
    (us as f64 / time_scale).round() as u64
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Replaces numbers in a text, so that equal failures are counted together.
fn kind_of(text: &str) -> String {
    let mut kind = String::new();
    for character in text.chars() {
        match character {
            '0'..='9' if kind.ends_with('N') => {}
            '0'..='9' => kind.push('N'),
            other => kind.push(other),
        }
    }
    kind
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_transfers_still_report_their_time() {
        let routed = RouteTiming { route_us: 1, transfer_us: 2, predicted_ttft_us: 0, instance: 3 };
        let slow = pb::RunReply { fetch_us: 9_000_000, save_us: 7_000_000, ..pb::RunReply::default() };
        let sampled = sample(&slow, &routed);
        assert_eq!((sampled.fetch_us, sampled.save_us), (Some(9_000_000), Some(7_000_000)));
        let idle = sample(&pb::RunReply::default(), &routed);
        assert_eq!((idle.fetch_us, idle.save_us), (None, None), "nothing was tried");
    }

    #[test]
    fn modelled_times_are_in_profile_time() {
        assert_eq!(
            [in_profile_time(30, 1.0), in_profile_time(30, 0.02), in_profile_time(0, 0.5)],
            [30, 1500, 0]
        );
    }

    #[test]
    fn modelled_numbers_come_from_the_instance() {
        let reply = pb::RunReply {
            modelled_prefill_us: 40,
            modelled_prefill_uncached_us: 100,
            ..pb::RunReply::default()
        };
        let modelled =
            sample(&reply, &RouteTiming { route_us: 1, transfer_us: 2, predicted_ttft_us: 0, instance: 3 })
                .modelled;
        assert_eq!((modelled.prefill_us, modelled.prefill_uncached_us, modelled.ttft_us()), (40, 100, 42));
    }

    #[test]
    fn refusals_are_final_and_silence_is_retried() {
        let status = tonic::Status::invalid_argument("identity A differs from the cluster's B");
        let refused = RouterError::Refused { address: "127.0.0.1:1".into(), status: status.clone() };
        let AttemptFailure::Final(why) = AttemptFailure::from_route_error(&refused.into(), 16) else {
            panic!("not final")
        };
        assert!(why.contains("differs from the cluster's B"), "{why}");
        assert!(why.contains("kvfleet up --block-tokens 16"), "{why}");
        assert!(matches!(AttemptFailure::from_route_error(&RouteError::Empty, 16), AttemptFailure::Final(_)));
        let silent = RouterError::NoneAnswered { addresses: vec![], status };
        assert!(matches!(AttemptFailure::from_route_error(&silent.into(), 16), AttemptFailure::Retry { .. }));
    }

    #[test]
    fn failure_kinds_ignore_numbers() {
        assert_eq!(kind_of("no report for 812 ms"), "no report for N ms");
        assert_eq!(kind_of("127.0.0.1:20031 refused"), kind_of("127.0.0.1:29 refused"));
    }
}
