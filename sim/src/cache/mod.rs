//! Replays a trace on one tier: the production policies of `kv_core::evict` on block numbers alone.
//!
//! The rules match those of the reference figures. A hit counts only while every earlier block of
//! the request hit. Blocks of the running request are never evicted. Inside a request the tail is
//! older than the head. A resident block behind the first miss counts as a miss but as a use too.
//! If a policy filters admissions ([`Policy::admits`]), no block is admitted behind a refused one,
//! because it could not hit. Not here: the offline bound ([`optimal`]), bytes, several tiers,
//! duration.

pub mod optimal;

use crate::ids::{IdMap, mix_bits};
use crate::trace::Request;
use kv_core::evict::reuse_stats::ReuseStats;
use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::Timestamp;
use serde::Serialize;

/// Interval of a policy's background work, in microseconds of virtual time.
const REFIT_INTERVAL_US: u64 = 1_000_000;

/// Counters of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplayOutcome {
    /// Requests replayed.
    pub requests: u64,
    /// Blocks requested.
    pub block_accesses: u64,
    /// Blocks found, counted while every earlier block of the request was found.
    pub block_hits: u64,
    /// Blocks that left to make room.
    pub evictions: u64,
}

impl ReplayOutcome {
    /// Hits over accesses, 0 to 1; 0 without accesses.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        if self.block_accesses == 0 { 0.0 } else { self.block_hits as f64 / self.block_accesses as f64 }
    }

    pub(crate) fn count(&mut self, accesses: usize, hits: usize) {
        self.requests += 1;
        self.block_accesses += accesses as u64;
        self.block_hits += hits as u64;
    }
}

/// A tier of a fixed number of equal blocks under one policy.
pub struct CacheReplay {
    policy: Box<dyn Policy>,
    capacity_blocks: usize,
    keys: IdMap<BlockKey>,
    /// Per key: the block it stands for and the request that last held it.
    slots: Vec<Slot>,
    free: Vec<BlockKey>,
    outcome: ReplayOutcome,
    refitted_us: u64,
    /// Keys of the running request's blocks before and after it; reused to avoid allocations per
    /// request.
    keys_before: Vec<Option<BlockKey>>,
    keys_after: Vec<Option<BlockKey>>,
}

#[derive(Clone, Copy)]
struct Slot {
    block: u64,
    running: u64,
}

impl CacheReplay {
    /// An empty tier with at least one block. A capacity above the range of [`BlockKey`] is
    /// effectively unbounded.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, capacity_blocks: usize) -> Self {
        CacheReplay {
            policy,
            capacity_blocks: capacity_blocks.max(1),
            keys: IdMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            outcome: ReplayOutcome::default(),
            refitted_us: 0,
            keys_before: Vec::new(),
            keys_after: Vec::new(),
        }
    }

    /// Serves one request and keeps its blocks. Returns the number of leading blocks that hit.
    pub fn serve(&mut self, request: &Request) -> usize {
        let now = Timestamp(request.arrival_us);
        if now.0 >= self.refitted_us + REFIT_INTERVAL_US {
            self.refitted_us = now.0;
            self.policy.refit(now);
        }
        let mut held = std::mem::take(&mut self.keys_before);
        held.clear();
        held.extend(request.blocks.iter().map(|block| self.keys.get(block).copied()));
        let hits = held.iter().take_while(|key| key.is_some()).count();
        self.outcome.count(request.blocks.len(), hits);
        // Requests are numbered from 1, so that a new slot belongs to none.
        let running = self.outcome.requests;
        held.iter().flatten().for_each(|key| self.slots[key.0 as usize].running = running);
        let mut placed = std::mem::take(&mut self.keys_after);
        self.admit(request, &held, &mut placed, now);
        for (offset, (&key, was_held)) in placed.iter().zip(&held).enumerate().rev() {
            let traits = traits(request, offset);
            let Some(key) = key else {
                self.policy.note_absent(traits, now);
                continue;
            };
            match was_held {
                Some(_) => self.policy.access(key, traits, now),
                None => self.policy.settle(key, traits, now),
            }
        }
        (self.keys_before, self.keys_after) = (held, placed);
        hits
    }

    /// Makes the blocks of the request resident while space can be freed and the policy admits
    /// them. Fills `placed` with their keys.
    fn admit(
        &mut self,
        request: &Request,
        held: &[Option<BlockKey>],
        placed: &mut Vec<Option<BlockKey>>,
        now: Timestamp,
    ) {
        placed.clear();
        let mut is_open = true;
        for (offset, (&block, held)) in request.blocks.iter().zip(held).enumerate() {
            // A block that appears twice in one request is resident at its second appearance.
            let here = held.or_else(|| self.keys.get(&block).copied());
            let key = here.or_else(|| is_open.then(|| self.take_key(traits(request, offset), now)).flatten());
            is_open &= key.is_some();
            if here.is_none()
                && let Some(key) = key
            {
                self.slots[key.0 as usize] = Slot { block, running: self.outcome.requests };
                self.keys.insert(block, key);
                self.policy.insert(key, traits(request, offset), now);
            }
            placed.push(key);
        }
    }

    /// A free key, evicting a victim if needed. `None` if the running request holds everything, or
    /// the policy refuses the newcomer.
    fn take_key(&mut self, newcomer: BlockTraits, now: Timestamp) -> Option<BlockKey> {
        if self.keys.len() < self.capacity_blocks {
            return self.free.pop().or_else(|| {
                let key = BlockKey(u32::try_from(self.slots.len()).ok().filter(|&raw| raw < u32::MAX - 1)?);
                self.slots.push(Slot { block: 0, running: 0 });
                Some(key)
            });
        }
        let (slots, running) = (&self.slots, self.outcome.requests);
        let victim = self.policy.victim(now, &|key| slots[key.0 as usize].running == running)?;
        if !self.policy.admits(newcomer, victim, now) {
            return None;
        }
        self.policy.remove(victim);
        self.keys.remove(&self.slots[victim.0 as usize].block);
        self.outcome.evictions += 1;
        Some(victim)
    }

    /// Counters so far.
    #[must_use]
    pub fn outcome(&self) -> ReplayOutcome {
        self.outcome
    }

    /// The policy's statistics of each category.
    #[must_use]
    pub fn category_stats(&mut self, now: Timestamp) -> ReuseStats {
        self.policy.reuse_stats(now)
    }

    /// Gives the policy the statistics of the fleet.
    pub fn set_fleet_stats(&mut self, fleet: &ReuseStats, now: Timestamp) {
        self.policy.set_fleet_stats(fleet, now);
    }

    /// Blocks resident now.
    #[must_use]
    pub fn resident_blocks(&self) -> usize {
        self.keys.len()
    }
}

fn traits(request: &Request, offset: usize) -> BlockTraits {
    let offset_blocks = u32::try_from(offset).unwrap_or(u32::MAX);
    let is_last = offset + 1 == request.blocks.len();
    BlockTraits {
        category: request.category,
        offset_blocks,
        bytes: 1,
        is_partial: is_last && !request.input_tokens.is_multiple_of(request.block_tokens.max(1)),
        fingerprint: mix_bits(request.blocks[offset]),
    }
}

/// Replays requests, in the order given, through one tier of `capacity_blocks` blocks.
pub fn simulate<'a>(
    policy: Box<dyn Policy>,
    capacity_blocks: usize,
    requests: impl IntoIterator<Item = &'a Request>,
) -> ReplayOutcome {
    let mut cache = CacheReplay::new(policy, capacity_blocks);
    for request in requests {
        cache.serve(request);
    }
    cache.outcome()
}

#[cfg(test)]
mod tests;
