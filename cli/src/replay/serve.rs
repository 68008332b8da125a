//! Serves one request as a frontend would: route, hand the decision to the instance, take its answer.
//!
//! A request ends well by hit or by recompute, whatever died on the way: failed attempts are counted and
//! repeated with a fresh decision. Not here: what the instance does with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::{IdentityDigest, InstanceId, RequestId, TenantId};
use kvfleet_client::{Client, ClientConfig, RouteAnswer, RouteCall, RouteError, RouterError};
use kvfleet_proto::convert::category_to_pb;
use kvfleet_proto::pb::{self, Seen};
use kvfleet_proto::tls::Identity;
use parking_lot::Mutex;
use tonic::transport::Channel;
use tracing::Instrument;

use super::measure::{ModelledSample, Sample, TierBlocks, TimedPrefill};
use super::prepare::Prepared;
use super::watch::Watch;
use crate::calls::{channel, run_on_instance};
use crate::cluster::{LAYERS, manifest};

/// How long a request is tried before it counts as failed. A cluster heals within seconds; a request
/// that cannot be served for this long points at something that will not heal.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);

/// Time between two attempts, unless a router says otherwise.
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// What a request is served with.
pub(super) struct Server {
    pub(super) client: Client,
    pub(super) identity: Identity,
    pub(super) digest: IdentityDigest,
    pub(super) tenant: TenantId,
    pub(super) block_tokens: u32,
    pub(super) watch: Arc<Watch>,
    /// How much of the profile's time everything takes that routers predict.
    pub(super) time_scale: f64,
    /// Channels by instance address; few, and never removed.
    pub(super) instances: Mutex<HashMap<String, Channel>>,
}

/// A request that ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) request: usize,
    /// Since the start of the replay.
    pub(super) at: Duration,
    pub(super) served: Served,
}

/// How it ended.
#[derive(Debug, Default)]
pub(super) struct Served {
    /// What was measured; nothing when every attempt failed.
    pub(super) sample: Option<Sample>,
    /// Where what it saved becomes visible.
    pub(super) saved_at: Vec<Seen>,
    /// Leading blocks that were hits.
    pub(super) hit_blocks: usize,
    /// Failed attempts.
    pub(super) errors: Vec<String>,
    /// Sources that fell short.
    pub(super) misses: Vec<String>,
    /// Why no request of this replay can be served, with what to do about it.
    pub(super) refused: Option<String>,
    /// Profile under which the instance modelled its compute.
    pub(super) profile: String,
    /// By which decision it was served in the end.
    pub(super) decision: Option<pb::Decision>,
}

/// Why an attempt failed.
enum Failed {
    /// The next one may go better, after a while.
    Once { kind: String, after: Duration },
    /// No other attempt and no other request will do better.
    Finally(String),
}

impl Failed {
    fn of_route(error: &RouteError, block_tokens: u32) -> Self {
        match error {
            RouteError::Router(RouterError::NoneAnswered { .. }) => Failed::Once {
                kind: format!("route failed: {}", kind_of(&error.to_string())),
                after: RETRY_EVERY,
            },
            RouteError::Router(RouterError::Refused { .. }) | RouteError::Empty => {
                Failed::Finally(explain_refusal(&error.to_string(), block_tokens))
            }
        }
    }

    fn on_instance(error: &str) -> Self {
        Failed::Once { kind: format!("instance failed: {}", kind_of(error)), after: RETRY_EVERY }
    }
}

/// A router's refusal, with the flag that cures the one a person meets: of the identity a replay uses, the
/// tokens of a block are all that can be chosen.
fn explain_refusal(error: &str, block_tokens: u32) -> String {
    if error.contains("identity") {
        return format!(
            "{error}; the trace's blocks have {block_tokens} tokens here: start the cluster with `kvfleet up --block-tokens {block_tokens}`, or give this replay the cluster's --block-tokens"
        );
    }
    error.to_owned()
}

impl Server {
    /// What requests of this tenant are served with that have blocks of so many tokens. `time_scale` as in the field.
    pub(super) fn new(
        (routers, identity): (Vec<String>, Identity),
        (seed, tenant, block_tokens): (u64, TenantId, u32),
        watch: Arc<Watch>,
        time_scale: f64,
    ) -> anyhow::Result<Server> {
        // It only routes: settings of the block path do not matter here.
        let config = ClientConfig { seed, ..ClientConfig::new(routers, identity.clone()) };
        Ok(Server {
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

    /// Serves request `number`, visible saves of which `after` lists.
    pub(super) async fn serve(&self, number: usize, request: &Prepared, after: Vec<Seen>) -> Served {
        let begun = Instant::now();
        let mut served = Served::default();
        while begun.elapsed() < GIVE_UP_AFTER {
            let span = tracing::info_span!("request", number);
            match self.attempt(number, request, after.clone()).instrument(span).await {
                Ok((mut sample, reply, decision)) => {
                    sample.total_us = micros(begun.elapsed());
                    served.hit_blocks = reply.hit_blocks as usize;
                    served.saved_at = reply.saved_at;
                    served.misses = reply.misses;
                    served.profile = reply.modelled_profile;
                    served.decision = Some(decision);
                    served.sample = Some(sample);
                    return served;
                }
                Err(Failed::Once { kind, after }) => {
                    served.errors.push(kind);
                    tokio::time::sleep(after).await;
                }
                Err(Failed::Finally(why)) => {
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
        request: &Prepared,
        after: Vec<Seen>,
    ) -> Result<(Sample, pb::RunReply, pb::Decision), Failed> {
        let begun = Instant::now();
        let decision = self.route(number, request, after).await?;
        let route_us = micros(begun.elapsed());
        self.watch.decided(&decision);
        let predicted = decision.predicted.unwrap_or_default();
        let transfer_us = in_profile_time(predicted.transfer_us, self.time_scale);
        let predicted_ttft_us =
            predicted.queue_us.saturating_add(predicted.transfer_us).saturating_add(predicted.prefill_us);
        let instance = decision.instance;
        let handover = decision.handover.clone();
        let mut reply = self.run(number, request, decision.clone()).await?;
        if let Some(handover) = handover {
            let went_on = self.go_on(number, request, (&handover, &reply)).await?;
            reply.fetched_bytes += went_on.fetched_bytes;
            reply.verified_bytes += went_on.verified_bytes;
            reply.wrong_bytes += went_on.wrong_bytes;
            reply.unused_bytes += went_on.unused_bytes;
            reply.wrong_blocks += went_on.wrong_blocks;
        }
        let sample = sample(&reply, &Routed { route_us, transfer_us, predicted_ttft_us, instance });
        Ok((sample, reply, decision))
    }

    fn call(&self, number: usize, request: &Prepared, after: Vec<Seen>) -> RouteCall {
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

    /// The other of a pair fetches what was computed for it. Hits are those of the first, which are what was not computed.
    async fn go_on(
        &self,
        number: usize,
        request: &Prepared,
        (handover, before): (&pb::Handover, &pb::RunReply),
    ) -> Result<pb::RunReply, Failed> {
        let call = self.call(number, request, before.saved_at.clone());
        let there = (InstanceId(handover.instance), true);
        let mut decision = match self.client.plan(call, there).await {
            Ok(RouteAnswer::Decided(decision)) => decision,
            Ok(RouteAnswer::Rejected { reason, retry_after }) => {
                let kind = format!("route rejected: {}", kind_of(&reason));
                return Err(Failed::Once { kind, after: retry_after.max(RETRY_EVERY) });
            }
            Err(error) => return Err(Failed::of_route(&error, self.block_tokens)),
        };
        decision.instance_address.clone_from(&handover.address);
        self.run(number, request, decision).await
    }

    async fn route(
        &self,
        number: usize,
        request: &Prepared,
        after: Vec<Seen>,
    ) -> Result<pb::Decision, Failed> {
        match self.client.route(self.call(number, request, after)).await {
            Ok(RouteAnswer::Decided(decision)) => Ok(decision),
            Ok(RouteAnswer::Rejected { reason, retry_after }) => Err(Failed::Once {
                kind: format!("route rejected: {}", kind_of(&reason)),
                after: retry_after.max(RETRY_EVERY),
            }),
            Err(error) => Err(Failed::of_route(&error, self.block_tokens)),
        }
    }

    async fn run(
        &self,
        number: usize,
        request: &Prepared,
        decision: pb::Decision,
    ) -> Result<pb::RunReply, Failed> {
        let address = decision.instance_address.clone();
        let channel = self.instance(&address).map_err(|error| Failed::on_instance(&error.to_string()))?;
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
            traceparent: kvfleet_proto::trace_context::current_traceparent(),
        };
        let ran = run_on_instance(channel, run).await;
        ran.map_err(|status| Failed::on_instance(&format!("{:?}", status.code())))
    }

    fn instance(&self, address: &str) -> anyhow::Result<Channel> {
        let mut known = self.instances.lock();
        if let Some(channel) = known.get(address) {
            return Ok(channel.clone());
        }
        let new = channel(address, &self.identity)?;
        known.insert(address.to_owned(), new.clone());
        Ok(new)
    }
}

fn sample(reply: &pb::RunReply, routed: &Routed) -> Sample {
    // An instance leaves out the time of what it did not try; what it tried counts however it ended.
    let tried = |us: u64| (us > 0).then_some(us);
    Sample {
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
        route_us: routed.route_us,
        fetch_us: tried(reply.fetch_us),
        save_us: tried(reply.save_us),
        total_us: 0,
        instance: routed.instance,
        predicted_ttft_us: routed.predicted_ttft_us,
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
            transfer_us: routed.transfer_us,
            prefill_us: reply.modelled_prefill_us,
            prefill_uncached_us: reply.modelled_prefill_uncached_us,
        },
    }
}

/// What routing said and how long it took.
struct Routed {
    route_us: u64,
    transfer_us: u64,
    predicted_ttft_us: u64,
    instance: u32,
}

/// What is called modelled is in the profile's own time.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
fn in_profile_time(us: u64, time_scale: f64) -> u64 {
    (us as f64 / time_scale).round() as u64
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Texts without the numbers in them, so that equal failures are counted together.
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
    fn a_fetch_or_a_save_that_brought_nothing_took_its_time_all_the_same() {
        let routed = Routed { route_us: 1, transfer_us: 2, predicted_ttft_us: 0, instance: 3 };
        let slow = pb::RunReply { fetch_us: 9_000_000, save_us: 7_000_000, ..pb::RunReply::default() };
        let sampled = sample(&slow, &routed);
        assert_eq!((sampled.fetch_us, sampled.save_us), (Some(9_000_000), Some(7_000_000)));
        let idle = sample(&pb::RunReply::default(), &routed);
        assert_eq!((idle.fetch_us, idle.save_us), (None, None), "nothing was tried");
    }

    #[test]
    fn what_is_modelled_is_in_the_time_of_the_profile() {
        assert_eq!(
            [in_profile_time(30, 1.0), in_profile_time(30, 0.02), in_profile_time(0, 0.5)],
            [30, 1500, 0]
        );
    }

    #[test]
    fn the_modelled_numbers_are_the_instances_own() {
        let reply = pb::RunReply {
            modelled_prefill_us: 40,
            modelled_prefill_uncached_us: 100,
            ..pb::RunReply::default()
        };
        let modelled =
            sample(&reply, &Routed { route_us: 1, transfer_us: 2, predicted_ttft_us: 0, instance: 3 })
                .modelled;
        assert_eq!((modelled.prefill_us, modelled.prefill_uncached_us, modelled.ttft_us()), (40, 100, 42));
    }

    #[test]
    fn a_refusal_is_final_and_silence_is_not() {
        let status = tonic::Status::invalid_argument("identity A differs from the cluster's B");
        let refused = RouterError::Refused { address: "127.0.0.1:1".into(), status: status.clone() };
        let Failed::Finally(why) = Failed::of_route(&refused.into(), 16) else { panic!("not final") };
        assert!(why.contains("differs from the cluster's B"), "{why}");
        assert!(why.contains("kvfleet up --block-tokens 16"), "{why}");
        assert!(matches!(Failed::of_route(&RouteError::Empty, 16), Failed::Finally(_)));
        let silent = RouterError::NoneAnswered { addresses: vec![], status };
        assert!(matches!(Failed::of_route(&silent.into(), 16), Failed::Once { .. }));
    }

    #[test]
    fn equal_failures_are_counted_together() {
        assert_eq!(kind_of("no report for 812 ms"), "no report for N ms");
        assert_eq!(kind_of("127.0.0.1:20031 refused"), kind_of("127.0.0.1:29 refused"));
    }
}
