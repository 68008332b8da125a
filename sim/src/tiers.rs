//! Replays a trace on two tiers of one node: the tier book of `kv_core::tier` with production
//! policies, as a node runs it, and moves that take no time.
//!
//! Only whole blocks are saved, and a request's leading readable blocks are its hits. Writes to the
//! lower tier are counted, because they wear it out. Not here: one tier alone and the bounds
//! ([`crate::cache`]), bytes, queues, devices.

use std::time::Duration;

use kv_core::evict::Policy;
use kv_core::id::{BlockHash, CallerId, LeaseId, TenantId, Tier, Timestamp};
use kv_core::tier::{
    Action, Book, BookLimits, Capacity, Charge, MovePermits, OfferOutcome, Requester, SaveOffer, TierLimits,
};
use serde::Serialize;

use crate::ids::mix_bits;
use crate::trace::Request;

/// Interval of the book's background work, in microseconds of virtual time.
const REFIT_INTERVAL_US: u64 = 1_000_000;

/// A block costs one of each unit.
const CHARGE: Charge = Charge { frame: 1, dram: 1, ssd: 1 };

const ROOM: MovePermits = MovePermits {
    dram: true,
    ssd: true,
    prefetch: true,
    gpu_read: true,
    gpu_read_back: true,
    gpu_promote: true,
};

/// Counters of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TiersOutcome {
    /// Requests replayed.
    pub requests: u64,
    /// Whole blocks requested.
    pub block_accesses: u64,
    /// Requested blocks found in DRAM, while every earlier block of the request was found.
    pub dram_hits: u64,
    /// Requested blocks found on SSD, while every earlier block of the request was found.
    pub ssd_hits: u64,
    /// Blocks written to SSD.
    pub written_blocks: u64,
}

impl TiersOutcome {
    /// Hits of both tiers over accesses, 0 to 1; 0 without accesses.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        if self.block_accesses == 0 {
            return 0.0;
        }
        (self.dram_hits + self.ssd_hits) as f64 / self.block_accesses as f64
    }
}

/// Size and eviction policy of a tier.
pub struct ReplayTier {
    /// Blocks that fit.
    pub blocks: u64,
    /// Chooses victims.
    pub policy: Box<dyn Policy>,
}

/// Two tiers of equal blocks.
pub struct TwoTierReplay {
    book: Book,
    outcome: TiersOutcome,
    refitted_us: u64,
}

impl TwoTierReplay {
    /// Empty tiers, each with its policy. Blocks with a reuse probability on SSD below
    /// `ssd_reuse_min` are not written to it.
    #[must_use]
    pub fn new(dram: ReplayTier, ssd: ReplayTier, ssd_reuse_min: f64) -> Self {
        let limits = BookLimits {
            dram: TierLimits::exact(Capacity::Blocks(dram.blocks)),
            ssd: TierLimits::exact(Capacity::Blocks(ssd.blocks)),
            lease: Duration::MAX,
            leases_max: 1,
            seed: 0,
        };
        let book = Book::new(&limits, dram.policy, ssd.policy).with_ssd_reuse_min(ssd_reuse_min);
        TwoTierReplay { book, outcome: TiersOutcome::default(), refitted_us: 0 }
    }

    /// Serves one request: reads its leading blocks, saves the rest, and ends.
    pub fn serve(&mut self, request: &Request) {
        let now = Timestamp(request.arrival_us);
        if now.0 >= self.refitted_us + REFIT_INTERVAL_US {
            self.refitted_us = now.0;
            self.book.refit(now);
        }
        let whole = (request.input_tokens / request.block_tokens.max(1)) as usize;
        let blocks = &request.blocks[..whole.min(request.blocks.len())];
        let hashes: Vec<BlockHash> = blocks.iter().map(|&block| hash(block)).collect();
        self.outcome.requests += 1;
        self.outcome.block_accesses += hashes.len() as u64;
        let lease = LeaseId(self.outcome.requests);
        let (caller, tenant) = (CallerId(0), TenantId(0));
        let asker = Requester { lease, caller, tenant, category: request.category };
        // Only one lease exists at a time, so its limit is never reached.
        let reached = self.book.fetch(asker, &hashes, now).unwrap_or_default();
        for reach in &reached {
            match reach.tier {
                Tier::Ssd => self.outcome.ssd_hits += 1,
                Tier::Dram | Tier::Gpu => self.outcome.dram_hits += 1,
            }
        }
        self.finish_moves();
        self.save(asker, &hashes, reached.len(), now);
        self.book.release(lease, now);
        self.finish_moves();
        self.book.take_changes();
    }

    fn save(&mut self, asker: Requester, hashes: &[BlockHash], from: usize, now: Timestamp) {
        let (known, new) = hashes.split_at(from);
        if new.is_empty() {
            return;
        }
        let first_offset_blocks = u32::try_from(from).unwrap_or(u32::MAX);
        let offer =
            SaveOffer { parent: known.last().copied(), first_offset_blocks, hashes: new, charge: CHARGE };
        let offered = self.book.offer(asker, offer, now).unwrap_or_default();
        self.finish_moves();
        for answer in offered {
            if let OfferOutcome::Wanted(key) = answer {
                self.book.commit(key, CHARGE, now);
            }
        }
    }

    /// Completes every move at once.
    fn finish_moves(&mut self) {
        while let Some(action) = self.book.next_action(ROOM) {
            match action {
                Action::Demote { key, .. } => {
                    self.outcome.written_blocks += 1;
                    self.book.on_moved(key, Tier::Ssd);
                }
                Action::Promote { key, .. } | Action::ReadBackFromGpu { key, .. } => {
                    self.book.on_moved(key, Tier::Dram);
                }
                Action::PromoteToGpu { key, .. } => self.book.on_moved(key, Tier::Gpu),
                Action::DropDram { .. } | Action::DropSsd { .. } | Action::DropGpu { .. } => {}
            }
        }
    }

    /// Counters so far.
    #[must_use]
    pub fn outcome(&self) -> TiersOutcome {
        self.outcome
    }
}

fn hash(block: u64) -> BlockHash {
    BlockHash::from_words(block, mix_bits(block))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::generate::{TraceGenerator, TraceSpec, TrafficKind};
    use kv_core::evict::by_name;

    fn requests(kind: TrafficKind, seed: u64) -> Vec<Request> {
        println!("seed {seed}");
        TraceGenerator::new(TraceSpec { block_tokens: 64, ..TraceSpec::new(kind, seed, 3_000) }).collect()
    }

    fn replay(requests: &[Request], dram: u64, ssd: (u64, &str), reuse_min: f64) -> TiersOutcome {
        let policy = |name| by_name(name, 0).unwrap();
        let above = if ssd.1 == "lru" && reuse_min > 0.0 { "lru" } else { "density" };
        let mut tiers = TwoTierReplay::new(
            ReplayTier { blocks: dram, policy: policy(above) },
            ReplayTier { blocks: ssd.0, policy: policy(ssd.1) },
            reuse_min,
        );
        requests.iter().for_each(|request| tiers.serve(request));
        tiers.outcome()
    }

    #[test]
    fn two_lru_tiers_hit_like_one_of_their_total_size() {
        let requests = requests(TrafficKind::Agent, 5);
        // LRU predicts no reuse probability, so the threshold excludes no block.
        let (two, one) =
            (replay(&requests, 300, (700, "lru"), 0.5), replay(&requests, 1000, (0, "lru"), 0.5));
        assert_eq!(two.dram_hits + two.ssd_hits, one.dram_hits);
        assert!(two.ssd_hits > 0 && two.written_blocks > 0 && one.written_blocks == 0);
    }

    #[test]
    fn the_lower_tier_hits_nearly_as_well_as_one_large_tier() {
        for (kind, seed) in [(TrafficKind::Business, 6), (TrafficKind::Consumer, 7), (TrafficKind::Agent, 8)]
        {
            let requests = requests(kind, seed);
            let two = replay(&requests, 400, (1_600, "density"), 0.0);
            let one = replay(&requests, 2_000, (0, "density"), 0.0);
            let (rate, alone) = (100.0 * two.hit_rate(), 100.0 * one.hit_rate());
            assert!(rate > alone - 1.0, "{kind:?}: {rate} of {alone}");
        }
    }

    #[test]
    fn density_hits_more_and_writes_less_than_lru_on_business_traffic() {
        let requests = requests(TrafficKind::Business, 9);
        let by_arrival = replay(&requests, 400, (1_600, "lru"), 0.0);
        let (all, likely) = (
            replay(&requests, 400, (1_600, "density"), 0.0),
            replay(&requests, 400, (1_600, "density"), 0.05),
        );
        assert!(100.0 * all.hit_rate() > 100.0 * by_arrival.hit_rate() + 2.0);
        assert!(all.written_blocks < by_arrival.written_blocks);
        assert!(likely.written_blocks < all.written_blocks * 9 / 10);
        assert!(100.0 * likely.hit_rate() > 100.0 * all.hit_rate() - 0.5);
    }
}
