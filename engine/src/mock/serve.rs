//! Serves one request as an engine would: fetches the planned blocks, accounts for the prefill of
//! the rest, saves the new blocks, and ends the lease.
//!
//! Not here: generating and checking blocks (`blocks.rs`), parsing requests (`request.rs`), and the
//! transport (`kvfleet-client`). With timed compute, `prefill.rs` and `streamed_save.rs` fetch and
//! save concurrently.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::{BlockHash, Epoch, IdentityDigest, LeaseId, Tier};
use kv_core::schedule::HardwareProfile;
use kvfleet_client::{
    Client, FetchCall, FetchOutcome, HeldLease, RequestContext, RequestOutcome, SAVE_DEADLINE, SaveAnswer,
    SaveCall, SaveDone, SaveError, SaveRefusal, SourceMiss,
};
use kvfleet_proto::pb;

use super::blocks::BlockShape;
use super::config::InstanceConfig;
use super::load::{InFlightRequest, LoadCounters};
use super::prefill::Accelerator;
use super::request::Job;
use super::streamed_save::StreamedSave;

/// Longest fetch, regardless of the modelled recompute time. If a node dies silently, the request
/// must end while its caller still waits.
const FETCH_TIME_MAX: Duration = Duration::from_secs(15);

/// Attempts to save at a busy node; then the blocks stay unsaved.
const SAVE_OFFERS_MAX: u32 = 20;

/// The mock engine.
#[derive(Clone)]
pub(super) struct MockEngine {
    pub(super) client: Client,
    pub(super) digest: IdentityDigest,
    pub(super) blocks: Arc<BlockShape>,
    pub(super) profile: HardwareProfile,
    pub(super) counters: Arc<LoadCounters>,
    pub(super) accelerator: Arc<Accelerator>,
    pub(super) config: InstanceConfig,
}

impl MockEngine {
    /// Serves `job` under `lease`. It never fails as a whole: missing blocks are computed, and
    /// refused saves are dropped.
    pub(super) async fn serve(self: Arc<Self>, job: Job, lease: LeaseId) -> pb::RunReply {
        let mut running = InFlightRequest::start(&self.counters, job.tokens_to_compute())
            .with_kv_tokens(job.input_tokens.into());
        let mut reply =
            pb::RunReply { asked_blocks: blocks_u32(job.hashes.len()), ..pb::RunReply::default() };
        let asker = self.asker(&job, lease);
        let mut misses = Vec::new();
        let (mut leases, saving) = if self.config.time_scale > 0.0 {
            self.prefill(&job, &asker, &mut reply, &mut misses).await
        } else {
            (self.fetch(self.fetch_call(&job, &asker), &mut reply, &mut misses).await, None)
        };
        self.account_compute(&job, &mut reply);
        running.finish_prefill();
        self.report_outcome(&job, &reply, misses);
        if job.wait_save {
            leases.extend(self.save(&job, &asker, saving, &mut reply).await);
            self.release(leases).await;
        } else {
            tokio::spawn(async move {
                let mut ignored = pb::RunReply { hit_blocks: reply.hit_blocks, ..pb::RunReply::default() };
                leases.extend(self.save(&job, &asker, saving, &mut ignored).await);
                self.release(leases).await;
                drop(running);
            });
        }
        reply
    }

    /// Reports the outcome to the routers. Without timed compute, there is no TTFT.
    fn report_outcome(&self, job: &Job, reply: &pb::RunReply, misses: Vec<SourceMiss>) {
        let ttft = reply.timed.as_ref().map(|timed| Duration::from_micros(timed.queue_us + timed.prefill_us));
        let (request, hit_blocks) = (job.request, reply.hit_blocks);
        self.client.record_outcome(&RequestOutcome {
            hit_blocks,
            ttft,
            misses,
            ..RequestOutcome::ended(request, 0, None)
        });
    }

    fn asker(&self, job: &Job, lease: LeaseId) -> RequestContext {
        RequestContext {
            lease,
            request: job.request,
            tenant: job.tenant,
            category: job.category,
            identity: self.digest,
            traceparent: kvfleet_net::trace_context::current_traceparent(),
            class: None,
        }
    }

    /// Fetch call for the planned blocks. The mock engine has no GPU memory, so if the plan relies
    /// on resident blocks, everything is computed.
    pub(super) fn fetch_call(&self, job: &Job, asker: &RequestContext) -> FetchCall {
        let sources = if job.resident_blocks > 0 { Vec::new() } else { job.sources.clone() };
        FetchCall {
            lease: asker.lease,
            request: asker.request,
            tenant: asker.tenant,
            category: asker.category,
            identity: asker.identity,
            hashes: job.hashes.clone(),
            resident_blocks: 0,
            sources,
            deadline: self.deadline(job),
            class: None,
        }
    }

    /// Fetches all planned blocks and compares every byte. Returns possible leases.
    async fn fetch(
        &self,
        call: FetchCall,
        reply: &mut pb::RunReply,
        misses: &mut Vec<SourceMiss>,
    ) -> BTreeSet<HeldLease> {
        if call.sources.is_empty() {
            return BTreeSet::new();
        }
        let begun = Instant::now();
        let (request, hashes) = (call.request, call.hashes.clone());
        let outcome = self.client.fetch(call).await;
        reply.fetch_us = micros(begun.elapsed());
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                reply.misses.push(error.to_string());
                return BTreeSet::new();
            }
        };
        count_fetched(&self.blocks, &hashes, &outcome, reply);
        if reply.wrong_bytes > 0 {
            tracing::error!(%request, bytes = reply.wrong_bytes, "fetched bytes are wrong");
        }
        reply.misses = outcome.misses.iter().map(|miss| miss.reason.name().to_owned()).collect();
        *misses = outcome.misses;
        outcome.leases.into_iter().collect()
    }

    /// Deadline of a fetch: the modelled time to recompute the same blocks. With timed compute, the
    /// prefill itself decides when to stop waiting.
    fn deadline(&self, job: &Job) -> Duration {
        if self.config.time_scale > 0.0 {
            return FETCH_TIME_MAX;
        }
        let tokens = u64::from(job.block_tokens)
            * job.sources.iter().map(|source| u64::from(source.len_blocks)).sum::<u64>();
        let recompute = Duration::from_nanos(self.profile.prefill_ns(0, tokens.min(job.input_tokens.into())));
        recompute.max(Duration::from_millis(self.config.fetch_floor_ms)).min(FETCH_TIME_MAX)
    }

    /// Accounts for the modelled compute of the rest, and of the whole prompt.
    fn account_compute(&self, job: &Job, reply: &mut pb::RunReply) {
        let prefill = modelled_prefill(&self.profile, job, reply.hit_blocks);
        reply.modelled_profile = self.profile.name.to_owned();
        reply.modelled_prefill_us = micros(prefill);
        reply.modelled_prefill_uncached_us = micros(modelled_prefill(&self.profile, job, 0));
    }

    /// Saves the computed blocks that are not yet being saved. Returns a possible lease.
    async fn save(
        &self,
        job: &Job,
        asker: &RequestContext,
        saving: Option<StreamedSave>,
        reply: &mut pb::RunReply,
    ) -> Option<HeldLease> {
        let hits = (reply.hit_blocks as usize).min(job.hashes.len());
        let streamed_from = saving.as_ref().map_or(job.hashes.len(), |saving| saving.first_block as usize);
        let new = hits..streamed_from.max(hits);
        if new.is_empty() && saving.is_none() {
            return None;
        }
        let Some(node) = &job.save_to else {
            reply.refused_blocks += blocks_u32(new.len());
            return None;
        };
        let begun = Instant::now();
        let lease = HeldLease { address: node.address.clone(), lease: asker.lease };
        let streamed = saving.map(|saving| (job.hashes.len() - streamed_from, saving.finish()));
        if !new.is_empty() {
            let call = self.frame_save_call(job, asker, node, new.clone());
            self.count_save(self.offer(&call).await, new.len(), reply);
        }
        if let Some((blocks, saved)) = streamed {
            let saved = match saved {
                Some(saved) => saved.answer().await,
                None => Err(SaveError::Stopped),
            };
            if let (Ok(saved), Some(timed)) = (&saved, &mut reply.timed) {
                timed.streamed_blocks += saved.streamed_blocks;
            }
            self.count_save(stored_or_log(saved.map(|saved| saved.answer), &node.address), blocks, reply);
        }
        reply.save_us = micros(begun.elapsed());
        Some(lease)
    }

    /// Save call of these blocks as whole frames.
    fn frame_save_call(
        &self,
        job: &Job,
        asker: &RequestContext,
        node: &pb::Holder,
        new: Range<usize>,
    ) -> SaveCall {
        let (known, hashes) = (&job.hashes[..new.start], job.hashes[new].to_vec());
        SaveCall {
            asker: asker.clone(),
            address: node.address.clone(),
            epoch: Epoch(node.epoch),
            parent: known.last().copied(),
            first_offset_blocks: blocks_u32(known.len()),
            hashes: hashes.clone(),
            frame_bytes: self.blocks.frame_bytes(),
            frame: {
                let blocks = Arc::clone(&self.blocks);
                Arc::new(move |position| blocks.make(hashes[position]))
            },
            deadline: SAVE_DEADLINE,
        }
    }

    /// Counts the outcome of a save of `blocks` blocks.
    fn count_save(&self, saved: Option<SaveDone>, blocks: usize, reply: &mut pb::RunReply) {
        match saved {
            Some(done) => count_saved(&done, self.blocks.payload_bytes(), reply),
            None => reply.refused_blocks += blocks_u32(blocks),
        }
    }

    /// Offers a save until the node accepts or refuses it, or stays busy for too long.
    async fn offer(&self, call: &SaveCall) -> Option<SaveDone> {
        for _ in 0..SAVE_OFFERS_MAX {
            match self.client.save(call).await {
                Ok(SaveAnswer::Busy { retry_after }) => tokio::time::sleep(retry_after).await,
                answered => return stored_or_log(answered, &call.address),
            }
        }
        tracing::warn!(node = call.address, "a node stayed busy; the blocks stay unsaved");
        None
    }

    async fn release(&self, leases: BTreeSet<HeldLease>) {
        let leases: Vec<HeldLease> = leases.into_iter().collect();
        for (held, error) in self.client.release(&leases).await {
            tracing::debug!(%error, address = held.address, "a lease is left to expire");
        }
    }
}

/// Result of a successful save; logs the reason otherwise.
fn stored_or_log(answered: Result<SaveAnswer, SaveError>, node: &str) -> Option<SaveDone> {
    match answered {
        Ok(SaveAnswer::Done(done)) => return Some(done),
        // The node prefers to keep other blocks.
        Ok(SaveAnswer::Refused(SaveRefusal::LowValue)) => {}
        Ok(SaveAnswer::Refused(why)) => tracing::warn!(node, ?why, "a node refused a save"),
        Ok(SaveAnswer::Busy { .. }) => tracing::warn!(node, "a node stayed busy; the blocks stay unsaved"),
        Err(cause) => tracing::warn!(node, %cause, "a save failed"),
    }
    None
}

/// Counts arrived bytes by outcome, and leading correct blocks as hits. A wrong block ends the
/// hits, because an engine would compute it again.
fn count_fetched(shape: &BlockShape, hashes: &[BlockHash], outcome: &FetchOutcome, reply: &mut pb::RunReply) {
    let mut is_prefix_right = true;
    let mut handed_out_bytes = 0;
    for (hash, block) in hashes.iter().zip(&outcome.blocks) {
        let checked = shape.check(*hash, &block.frame);
        handed_out_bytes += checked.verified_bytes + checked.wrong_bytes;
        reply.verified_bytes += checked.verified_bytes;
        reply.wrong_bytes += checked.wrong_bytes;
        if checked.wrong_bytes > 0 {
            reply.wrong_blocks += 1;
            is_prefix_right = false;
        }
        if is_prefix_right {
            reply.hit_blocks += 1;
            match block.tier {
                Tier::Gpu => reply.hit_gpu_blocks += 1,
                Tier::Dram => reply.hit_dram_blocks += 1,
                Tier::Ssd => reply.hit_ssd_blocks += 1,
            }
        }
    }
    // Only the encoded size of discarded blocks is known; without headers it gives their payload.
    let kept_back_bytes = shape.payload_of(outcome.received_bytes.saturating_sub(outcome.bytes));
    let refused_bytes = kept_back_bytes.min(u64::from(outcome.wrong_blocks) * shape.payload_bytes());
    reply.wrong_blocks += outcome.wrong_blocks;
    reply.wrong_bytes += refused_bytes;
    reply.unused_bytes += kept_back_bytes - refused_bytes;
    reply.fetched_bytes += handed_out_bytes + kept_back_bytes;
}

/// Modelled compute time of a prompt with `hit_blocks` leading hits.
fn modelled_prefill(profile: &HardwareProfile, job: &Job, hit_blocks: u32) -> Duration {
    let input = u64::from(job.input_tokens);
    let cached = (u64::from(hit_blocks) * u64::from(job.block_tokens)).min(input);
    Duration::from_nanos(profile.step_ns.saturating_add(profile.prefill_ns(cached, input - cached)))
}

fn count_saved(done: &SaveDone, block_bytes: u64, reply: &mut pb::RunReply) {
    reply.saved_blocks += done.stored_blocks;
    reply.saved_bytes += u64::from(done.stored_blocks) * block_bytes;
    reply.present_blocks += done.present_blocks;
    reply.refused_blocks += done.refused_blocks;
    reply.saved_at.extend(done.visible_at.map(|at| pb::AnnouncePosition {
        node: at.node.0,
        epoch: at.epoch.0,
        seq: at.seq.0,
        shard: at.shard.into(),
    }));
}

/// A message cannot name more blocks than fit into u32.
pub(super) fn blocks_u32(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

/// At least 1, since 0 in a reply means that it was not timed.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::{Category, NodeId, RequestId, TenantId};
    use kvfleet_client::FetchedBlock;
    use kvfleet_proto::frame::KeyForm;

    use super::*;

    /// Payload of the test blocks; their frames are longer by a header.
    const PAYLOAD: u64 = 4099;

    fn shape() -> BlockShape {
        BlockShape::new(IdentityDigest([1; 16]), KeyForm::default(), PAYLOAD, 4).unwrap()
    }

    fn hash(number: u8) -> BlockHash {
        BlockHash([number; _])
    }

    /// Blocks 1 to `handed_out`, and `kept_back` further frames that arrived and were discarded.
    fn outcome(handed_out: u8, kept_back: u64) -> FetchOutcome {
        let block =
            |number| FetchedBlock { frame: shape().make(hash(number)), tier: Tier::Dram, node: NodeId(1) };
        let blocks: Vec<_> = (1..=handed_out).map(block).collect();
        let bytes = blocks.iter().map(|block| block.frame.bytes.len() as u64).sum();
        let frame_bytes = shape().make(hash(1)).bytes.len() as u64;
        assert!(frame_bytes > PAYLOAD, "frames have headers, so payload and frame sizes differ");
        FetchOutcome {
            blocks,
            bytes,
            received_bytes: bytes + kept_back * frame_bytes,
            ..FetchOutcome::default()
        }
    }

    fn counted(outcome: &FetchOutcome) -> pb::RunReply {
        let mut reply = pb::RunReply::default();
        count_fetched(&shape(), &[1, 2, 3, 4].map(hash), outcome, &mut reply);
        let sum = reply.verified_bytes + reply.wrong_bytes + reply.unused_bytes;
        assert_eq!(reply.fetched_bytes, sum, "every arrived byte is counted: {reply:?}");
        reply
    }

    #[test]
    fn verifies_every_fetched_byte() {
        let reply = counted(&outcome(3, 0));
        assert_eq!((reply.fetched_bytes, reply.verified_bytes), (3 * PAYLOAD, 3 * PAYLOAD));
        assert_eq!((reply.hit_blocks, reply.wrong_blocks, reply.unused_bytes), (3, 0, 0));
    }

    #[test]
    fn frames_with_failed_checks_count_as_wrong() {
        let reply = counted(&FetchOutcome { wrong_blocks: 1, ..outcome(2, 1) });
        assert_eq!((reply.fetched_bytes, reply.verified_bytes), (3 * PAYLOAD, 2 * PAYLOAD));
        assert_eq!((reply.wrong_bytes, reply.wrong_blocks, reply.hit_blocks), (PAYLOAD, 1, 2));
    }

    #[test]
    fn differing_bytes_with_a_valid_checksum_are_wrong() {
        let mut outcome = outcome(3, 0);
        outcome.blocks[1].frame = shape().make(hash(9));
        let reply = counted(&outcome);
        assert_eq!((reply.fetched_bytes, reply.verified_bytes), (3 * PAYLOAD, 2 * PAYLOAD));
        assert_eq!((reply.wrong_bytes, reply.wrong_blocks, reply.hit_blocks), (PAYLOAD, 1, 1));
    }

    #[test]
    fn bytes_after_a_gap_count_as_unused() {
        let reply = counted(&outcome(1, 2));
        assert_eq!((reply.fetched_bytes, reply.verified_bytes), (3 * PAYLOAD, PAYLOAD));
        assert_eq!((reply.unused_bytes, reply.wrong_bytes), (2 * PAYLOAD, 0));
    }

    #[test]
    fn full_hits_and_misses_share_one_model() {
        let profile = HardwareProfile::default();
        let job = Job {
            request: RequestId(1),
            tenant: TenantId(0),
            category: Category::default(),
            hashes: vec![],
            block_tokens: 512,
            input_tokens: 1000,
            resident_blocks: 0,
            priority_deadline_ms: 0,
            sources: vec![],
            save_to: None,
            wait_save: true,
            permit: None,
        };
        let step = Duration::from_nanos(profile.step_ns);
        assert_eq!(modelled_prefill(&profile, &job, 2), step);
        let whole = step + Duration::from_nanos(profile.prefill_ns(0, 1000));
        assert_eq!(modelled_prefill(&profile, &job, 0), whole);
    }
}
