//! The bound no policy passes: Belady's rule, which knows the future.
//!
//! A block is used by every request that uses one of its children, so its next use is never later than
//! theirs; evicting the farthest next use, deepest first, therefore never breaks a prefix and is optimal
//! under the prefix rule too. Not here: a [`Policy`](kv_core::evict::Policy), for no production code can
//! know what this knows.

use super::Outcome;
use crate::ids::IdMap;
use crate::trace::Request;
use std::collections::BinaryHeap;

/// Next use of a block that is not used again.
const NEVER: u32 = u32::MAX;

/// A block as eviction orders it: farthest next use last, then deepest last.
type Rank = (u32, u32, u64);

/// When each block of a list of requests is used next: worked out once, for any number of capacities.
pub struct Future<'a> {
    requests: &'a [Request],
    /// For every access, in order, the number of the next request that uses the block.
    nexts: Vec<u32>,
}

impl<'a> Future<'a> {
    /// Looks ahead. At most 2^32 − 2 requests are told apart.
    #[must_use]
    pub fn of(requests: &'a [Request]) -> Self {
        let mut latest: IdMap<u32> = IdMap::default();
        let mut nexts = Vec::with_capacity(requests.iter().map(|request| request.blocks.len()).sum());
        for (number, request) in requests.iter().enumerate().rev() {
            let next = |block: &u64| latest.get(block).copied().unwrap_or(NEVER);
            nexts.extend(request.blocks.iter().rev().map(next));
            let number = u32::try_from(number).unwrap_or(NEVER - 1);
            latest.extend(request.blocks.iter().map(|&block| (block, number)));
        }
        nexts.reverse();
        Future { requests, nexts }
    }

    /// Replays the requests, evicting the block used again last. Unlike [`super::simulate`] it may refuse a
    /// block of the running request (a bound must be allowed what helps); all other rules are the same.
    #[must_use]
    pub fn simulate(&self, capacity_blocks: usize) -> Outcome {
        let mut outcome = Outcome::default();
        let mut resident: IdMap<(u32, u32)> = IdMap::default();
        // Holds ranks that blocks had before, too; they are passed over when they come up.
        let mut order: BinaryHeap<Rank> = BinaryHeap::new();
        let mut nexts = self.nexts.iter();
        for request in self.requests {
            let hits = request.blocks.iter().take_while(|block| resident.contains_key(block)).count();
            outcome.count(request.blocks.len(), hits);
            for ((offset, &block), &next) in (0..).zip(&request.blocks).zip(nexts.by_ref()) {
                resident.insert(block, (next, offset));
                order.push((next, offset, block));
            }
            // Trimmed once the request is over: a block that is used again last of all was never kept.
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

/// Replays requests once under the rule of [`Future::simulate`].
#[must_use]
pub fn simulate_optimal(requests: &[Request], capacity_blocks: usize) -> Outcome {
    Future::of(requests).simulate(capacity_blocks)
}
