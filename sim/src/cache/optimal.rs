//! The bound no policy passes: Belady's rule, which knows the future.
//!
//! A block is used by every request that uses one of its children, so its next use is never later than
//! theirs; evicting the farthest next use, deepest first, therefore never breaks a prefix and is optimal
//! under the prefix rule too. Not here: a [`Policy`](kv_core::evict::Policy), for no production code can
//! know what this knows.

use super::Outcome;
use crate::trace::Request;
use std::collections::{BTreeSet, HashMap};

/// Next use of a block that is not used again.
const NEVER: usize = usize::MAX;

/// A resident block as eviction orders it: farthest next use last, then deepest last.
type Rank = (usize, usize, u64);

/// Replays requests, evicting the block used again last. Unlike [`super::simulate`] it may refuse a block of
/// the running request (a bound must be allowed what helps); all other rules are the same.
#[must_use]
pub fn simulate_optimal(requests: &[Request], capacity_blocks: usize) -> Outcome {
    let next_uses = next_uses(requests);
    let mut outcome = Outcome::default();
    let mut resident: HashMap<u64, Rank> = HashMap::new();
    let mut order: BTreeSet<Rank> = BTreeSet::new();
    for (request, nexts) in requests.iter().zip(&next_uses) {
        let hits = request.blocks.iter().take_while(|block| resident.contains_key(block)).count();
        outcome.count(request.blocks.len(), hits);
        for (offset, (&block, &next)) in request.blocks.iter().zip(nexts).enumerate() {
            let rank = (next, offset, block);
            if let Some(before) = resident.insert(block, rank) {
                order.remove(&before);
            }
            order.insert(rank);
        }
        // Trimmed once the request is over: a block that is used again last of all was never kept.
        while resident.len() > capacity_blocks
            && let Some((_, _, victim)) = order.pop_last()
        {
            resident.remove(&victim);
            outcome.evictions += 1;
        }
    }
    outcome
}

/// For every access the number of the next request that uses the block.
fn next_uses(requests: &[Request]) -> Vec<Vec<usize>> {
    let mut latest: HashMap<u64, usize> = HashMap::new();
    let mut nexts: Vec<Vec<usize>> = Vec::with_capacity(requests.len());
    for (number, request) in requests.iter().enumerate().rev() {
        let own = request.blocks.iter().map(|block| latest.get(block).copied().unwrap_or(NEVER)).collect();
        nexts.push(own);
        latest.extend(request.blocks.iter().map(|&block| (block, number)));
    }
    nexts.reverse();
    nexts
}
