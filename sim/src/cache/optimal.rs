//! The upper bound of all policies: Belady's rule, which knows the future.
//!
//! A block is used by every request that uses one of its children, so its next use is never later
//! than theirs. Evicting the farthest next use, deepest first, therefore never breaks a prefix and
//! is optimal under the prefix rule too. Not here: a [`Policy`](kv_core::evict::Policy), because
//! production code cannot know the future.

use super::ReplayOutcome;
use crate::ids::IdMap;
use crate::trace::Request;
use std::collections::BinaryHeap;

/// Next use of a block that is not used again.
const NEVER: u32 = u32::MAX;

/// A block's rank in eviction order: farthest next use, then deepest.
type EvictionRank = (u32, u32, u64);

/// The next use of each block in a list of requests: computed once, for any number of capacities.
pub struct FutureUses<'a> {
    requests: &'a [Request],
    /// For every access, in order, the number of the next request that uses the block.
    next_uses: Vec<u32>,
}

impl<'a> FutureUses<'a> {
    /// Computes the next uses. At most 2^32 − 2 requests are distinguished.
    #[must_use]
    pub fn new(requests: &'a [Request]) -> Self {
        let mut latest: IdMap<u32> = IdMap::default();
        let mut next_uses = Vec::with_capacity(requests.iter().map(|request| request.blocks.len()).sum());
        for (number, request) in requests.iter().enumerate().rev() {
            let next = |block: &u64| latest.get(block).copied().unwrap_or(NEVER);
            next_uses.extend(request.blocks.iter().rev().map(next));
            let number = u32::try_from(number).unwrap_or(NEVER - 1);
            latest.extend(request.blocks.iter().map(|&block| (block, number)));
        }
        next_uses.reverse();
        FutureUses { requests, next_uses }
    }

    /// Replays the requests, evicting the block with the farthest next use. Unlike
    /// [`super::simulate`] it may refuse a block of the running request, because that can only
    /// raise the bound; all other rules are the same.
    #[must_use]
    pub fn simulate(&self, capacity_blocks: usize) -> ReplayOutcome {
        let mut outcome = ReplayOutcome::default();
        let mut resident: IdMap<(u32, u32)> = IdMap::default();
        // Contains stale ranks too; they are skipped when popped.
        let mut order: BinaryHeap<EvictionRank> = BinaryHeap::new();
        let mut nexts = self.next_uses.iter();
        for request in self.requests {
            let hits = request.blocks.iter().take_while(|block| resident.contains_key(block)).count();
            outcome.count(request.blocks.len(), hits);
            for ((offset, &block), &next) in (0..).zip(&request.blocks).zip(nexts.by_ref()) {
                resident.insert(block, (next, offset));
                order.push((next, offset, block));
            }
            // Trimmed after the request: a block with the farthest next use is thereby never kept.
            while resident.len() > capacity_blocks
                && let Some((next, offset, victim)) = order.pop()
            {
                if resident.get(&victim) == Some(&(next, offset)) {
                    resident.remove(&victim);
                    outcome.evictions += 1;
                }
            }
        }
        outcome
    }
}

/// Replays requests once under the rule of [`FutureUses::simulate`].
#[must_use]
pub fn simulate_optimal(requests: &[Request], capacity_blocks: usize) -> ReplayOutcome {
    FutureUses::new(requests).simulate(capacity_blocks)
}
