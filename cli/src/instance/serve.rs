//! Serves one request as an engine would: fetch what the decision says, account the prefill of the rest,
//! save the new blocks, end the lease.
//!
//! Not here: making and checking blocks (`blocks.rs`), the wire form of requests (`request.rs`), and
//! what moves the bytes (`kvfleet-client`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::{Epoch, IdentityDigest, LeaseId, Tier};
use kv_core::schedule::HardwareProfile;
use kvfleet_client::{Asker, Client, FetchCall, FetchOutcome, HeldLease, SaveAnswer, SaveCall, SaveDone};
use kvfleet_proto::pb;

use super::blocks::BlockShape;
use super::config::InstanceConfig;
use super::load::{Running, Working};
use super::request::Job;

/// Most time a fetch is given, however long recomputing would take under the profile: behind a node that
/// died without a word, a request must end while somebody still waits for it.
const FETCH_TIME_MAX: Duration = Duration::from_secs(15);

/// How often a save is offered again to a node that says `Busy`; after that the blocks stay unsaved.
const SAVE_OFFERS_MAX: u32 = 20;

/// What an instance serves with.
pub(super) struct Engine {
    pub(super) client: Client,
    pub(super) digest: IdentityDigest,
    pub(super) blocks: Arc<BlockShape>,
    pub(super) profile: HardwareProfile,
    pub(super) working: Arc<Working>,
    pub(super) config: InstanceConfig,
}

impl Engine {
    /// Serves `job` under `lease`. Never fails as a whole: what does not come is computed, what is not
    /// taken stays unsaved.
    pub(super) async fn serve(self: Arc<Self>, job: Job, lease: LeaseId) -> pb::RunReply {
        let mut running = Running::begin(&self.working, job.input_tokens.into());
        let mut reply =
            pb::RunReply { asked_blocks: blocks_u32(job.hashes.len()), ..pb::RunReply::default() };
        let asker = self.asker(&job, lease);
        let mut leases = self.fetch(&job, &asker, &mut reply).await;
        self.account(&job, running.tokens_ahead, &mut reply).await;
        running.prefilled();
        if job.wait_save {
            leases.extend(self.save(&job, &asker, &mut reply).await);
            self.release(leases).await;
        } else {
            tokio::spawn(async move {
                let mut ignored = pb::RunReply { hit_blocks: reply.hit_blocks, ..pb::RunReply::default() };
                leases.extend(self.save(&job, &asker, &mut ignored).await);
                self.release(leases).await;
                drop(running);
            });
        }
        reply
    }

    fn asker(&self, job: &Job, lease: LeaseId) -> Asker {
        Asker {
            lease,
            request: job.request,
            tenant: job.tenant,
            category: job.category,
            identity: self.digest,
            traceparent: kvfleet_proto::trace_context::current_traceparent(),
        }
    }

    /// Fetches what the decision says and compares every byte. Answers where leases may be held now.
    async fn fetch(&self, job: &Job, asker: &Asker, reply: &mut pb::RunReply) -> BTreeSet<HeldLease> {
        if job.sources.is_empty() {
            return BTreeSet::new();
        }
        let begun = Instant::now();
        let call = FetchCall {
            lease: asker.lease,
            request: asker.request,
            tenant: asker.tenant,
            category: asker.category,
            identity: asker.identity,
            hashes: job.hashes.clone(),
            sources: job.sources.clone(),
            deadline: self.deadline(job),
        };
        let outcome = match self.client.fetch(call).await {
            Ok(outcome) => outcome,
            Err(error) => {
                reply.misses.push(error.to_string());
                return BTreeSet::new();
            }
        };
        reply.fetch_us = micros(begun.elapsed());
        self.check(job, &outcome, reply);
        reply.misses = outcome.misses.iter().map(|miss| miss.reason.name().to_owned()).collect();
        outcome.leases.into_iter().collect()
    }

    /// Recomputing what is fetched would take so long; waiting longer for it makes no sense.
    fn deadline(&self, job: &Job) -> Duration {
        let tokens = u64::from(job.block_tokens)
            * job.sources.iter().map(|source| u64::from(source.len_blocks)).sum::<u64>();
        let recompute = Duration::from_nanos(self.profile.prefill_ns(0, tokens.min(job.input_tokens.into())));
        recompute.max(Duration::from_millis(self.config.fetch_floor_ms)).min(FETCH_TIME_MAX)
    }

    /// Counts leading right blocks as hits, by tier. A wrong block ends them: it would be computed anew.
    fn check(&self, job: &Job, outcome: &FetchOutcome, reply: &mut pb::RunReply) {
        let mut is_prefix_right = true;
        for (hash, block) in job.hashes.iter().zip(&outcome.blocks) {
            let checked = self.blocks.check(*hash, &block.frame);
            reply.fetched_bytes += block.frame.payload().len() as u64;
            reply.verified_bytes += checked.verified_bytes;
            reply.wrong_bytes += checked.wrong_bytes;
            is_prefix_right &= checked.wrong_bytes == 0;
            if is_prefix_right {
                reply.hit_blocks += 1;
                match block.tier {
                    Tier::Gpu => reply.hit_gpu_blocks += 1,
                    Tier::Dram => reply.hit_dram_blocks += 1,
                    Tier::Ssd => reply.hit_ssd_blocks += 1,
                }
            }
        }
        if reply.wrong_bytes > 0 {
            tracing::error!(request = %job.request, bytes = reply.wrong_bytes, "fetched bytes are not what they must be");
        }
    }

    /// What the profile says the rest takes; waited for only as far as the configuration says.
    async fn account(&self, job: &Job, tokens_ahead: u64, reply: &mut pb::RunReply) {
        let cached = (u64::from(reply.hit_blocks) * u64::from(job.block_tokens)).min(job.input_tokens.into());
        let new = u64::from(job.input_tokens) - cached;
        let prefill_ns = self.profile.step_ns.saturating_add(self.profile.prefill_ns(cached, new));
        reply.modelled_prefill_us = prefill_ns / 1_000;
        reply.modelled_queue_us = self.profile.prefill_ns(0, tokens_ahead) / 1_000;
        if self.config.time_scale > 0.0 {
            let modelled = Duration::from_nanos(prefill_ns);
            tokio::time::sleep(modelled.mul_f64(self.config.time_scale)).await;
        }
    }

    /// Saves what was not a hit. Answers where a lease may be held now.
    async fn save(&self, job: &Job, asker: &Asker, reply: &mut pb::RunReply) -> Option<HeldLease> {
        let hits = (reply.hit_blocks as usize).min(job.hashes.len());
        let (known, new) = job.hashes.split_at(hits);
        if new.is_empty() {
            return None;
        }
        let Some(node) = &job.save_to else {
            reply.refused_blocks += blocks_u32(new.len());
            return None;
        };
        let call = SaveCall {
            asker: asker.clone(),
            address: node.address.clone(),
            epoch: Epoch(node.epoch),
            parent: known.last().copied(),
            first_offset_blocks: blocks_u32(known.len()),
            hashes: new.to_vec(),
            frame_bytes: self.blocks.frame_bytes(),
            frame: {
                let (blocks, hashes) = (Arc::clone(&self.blocks), new.to_vec());
                Arc::new(move |position| blocks.make(hashes[position]))
            },
        };
        let begun = Instant::now();
        match self.offer(&call).await {
            Some(done) => count_saved(&done, self.blocks.payload_bytes(), reply),
            None => reply.refused_blocks += blocks_u32(new.len()),
        }
        reply.save_us = micros(begun.elapsed());
        Some(call.lease())
    }

    /// Offers until the node takes or refuses it, or has been busy too often.
    async fn offer(&self, call: &SaveCall) -> Option<SaveDone> {
        for _ in 0..SAVE_OFFERS_MAX {
            match self.client.save(call).await {
                Ok(SaveAnswer::Done(done)) => return Some(done),
                Ok(SaveAnswer::Busy { retry_after }) => tokio::time::sleep(retry_after).await,
                Ok(SaveAnswer::Refused(why)) => {
                    tracing::warn!(node = call.address, ?why, "a node refused a save");
                    return None;
                }
                Err(cause) => {
                    tracing::warn!(node = call.address, %cause, "a save failed");
                    return None;
                }
            }
        }
        tracing::warn!(node = call.address, "a node stayed busy: blocks stay unsaved");
        None
    }

    async fn release(&self, leases: BTreeSet<HeldLease>) {
        let leases: Vec<HeldLease> = leases.into_iter().collect();
        for (held, error) in self.client.release(&leases).await {
            tracing::debug!(%error, address = held.address, "lease left to expire");
        }
    }
}

fn count_saved(done: &SaveDone, block_bytes: u64, reply: &mut pb::RunReply) {
    reply.saved_blocks += done.stored_blocks;
    reply.saved_bytes += u64::from(done.stored_blocks) * block_bytes;
    reply.present_blocks += done.present_blocks;
    reply.refused_blocks += done.refused_blocks;
    reply.saved_at.extend(done.visible_at.map(|at| pb::Seen {
        node: at.node.0,
        epoch: at.epoch.0,
        seq: at.seq.0,
    }));
}

/// A prompt never has more blocks than its message could name.
fn blocks_u32(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
