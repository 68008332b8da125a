//! One tier replayed over a trace: the production policies of `kv_core::evict` on block numbers alone.
//!
//! The rules are the ones the reference figures were made with: a hit counts only while every earlier block
//! of the request hit; blocks of the running request are never victims; inside a request the tail is older
//! than the head; a resident block behind the first miss counts as a miss but is touched. Where a policy weighs
//! newcomers ([`Policy::admits`]), nothing comes in behind a block that it turned away, for nothing could hit there. Not
//! here: the offline bound ([`optimal`]), bytes, several tiers, time spent.

pub mod optimal;

use crate::ids::{IdMap, mixed};
use crate::trace::Request;
use kv_core::evict::statistics::Statistics;
use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::Timestamp;
use serde::Serialize;

/// How often a policy's background work runs, in microseconds of virtual time.
const REFIT_EVERY_US: u64 = 1_000_000;

/// What a replay counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Requests replayed.
    pub requests: u64,
    /// Blocks asked for.
    pub block_accesses: u64,
    /// Blocks found, counted while every earlier block of the request was found.
    pub block_hits: u64,
    /// Blocks that left to make room.
    pub evictions: u64,
}

impl Outcome {
    /// Hits over accesses, 0 to 1; 0 for nothing asked.
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
pub struct Cache {
    policy: Box<dyn Policy>,
    capacity_blocks: usize,
    keys: IdMap<BlockKey>,
    /// Per key: the block it stands for and the request that last held it.
    slots: Vec<Slot>,
    free: Vec<BlockKey>,
    outcome: Outcome,
    refitted_us: u64,
    /// Keys of the running request's blocks before and after it; kept so that nothing is allocated per request.
    held: Vec<Option<BlockKey>>,
    placed: Vec<Option<BlockKey>>,
}

#[derive(Clone, Copy)]
struct Slot {
    block: u64,
    running: u64,
}

impl Cache {
    /// An empty tier. At least one block; more than [`BlockKey`] can number is as good as unbounded.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, capacity_blocks: usize) -> Self {
        Cache {
            policy,
            capacity_blocks: capacity_blocks.max(1),
            keys: IdMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            outcome: Outcome::default(),
            refitted_us: 0,
            held: Vec::new(),
            placed: Vec::new(),
        }
    }

    /// Serves one request and keeps its blocks. Gives the number of leading blocks that hit.
    pub fn serve(&mut self, request: &Request) -> usize {
        let now = Timestamp(request.arrival_us);
        if now.0 >= self.refitted_us + REFIT_EVERY_US {
            self.refitted_us = now.0;
            self.policy.refit(now);
        }
        let mut held = std::mem::take(&mut self.held);
        held.clear();
        held.extend(request.blocks.iter().map(|block| self.keys.get(block).copied()));
        let hits = held.iter().take_while(|key| key.is_some()).count();
        self.outcome.count(request.blocks.len(), hits);
        // Numbers requests from 1, so that a fresh slot belongs to none.
        let running = self.outcome.requests;
        held.iter().flatten().for_each(|key| self.slots[key.0 as usize].running = running);
        let mut placed = std::mem::take(&mut self.placed);
        self.admit(request, &held, &mut placed, now);
        for (offset, (&key, was_held)) in placed.iter().zip(&held).enumerate().rev() {
            let traits = traits(request, offset);
            let Some(key) = key else {
                self.policy.pass(traits, now);
                continue;
            };
            match was_held {
                Some(_) => self.policy.access(key, traits, now),
                None => self.policy.settle(key, traits, now),
            }
        }
        (self.held, self.placed) = (held, placed);
        hits
    }

    /// Makes the blocks of the request resident while there is somebody to make room and the policy lets them in; says
    /// which are.
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
            // The same block twice in one request is resident by its second appearance.
            let here = held.or_else(|| self.keys.get(&block).copied());
            let key = here.or_else(|| is_open.then(|| self.room(traits(request, offset), now)).flatten());
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

    /// A free key, if need be a victim's; nothing when the running request holds everything, or the newcomer is not worth
    /// it.
    fn room(&mut self, newcomer: BlockTraits, now: Timestamp) -> Option<BlockKey> {
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

    /// What was counted so far.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// What its policy saw of each category.
    #[must_use]
    pub fn statistics(&mut self, now: Timestamp) -> Statistics {
        self.policy.statistics(now)
    }

    /// Tells its policy what others saw.
    pub fn inform(&mut self, fleet: &Statistics, now: Timestamp) {
        self.policy.inform(fleet, now);
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
        fingerprint: mixed(request.blocks[offset]),
    }
}

/// Replays requests, in the order given, through one tier of `capacity_blocks` blocks.
pub fn simulate<'a>(
    policy: Box<dyn Policy>,
    capacity_blocks: usize,
    requests: impl IntoIterator<Item = &'a Request>,
) -> Outcome {
    let mut cache = Cache::new(policy, capacity_blocks);
    for request in requests {
        cache.serve(request);
    }
    cache.outcome()
}

#[cfg(test)]
mod tests;
