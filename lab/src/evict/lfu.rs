//! Least frequently used, counted exactly while a block is resident; ties go to the longest unused.
//!
//! Not here: counts across evictions (a block that returns starts at one) and ageing. Blocks that
//! were popular long ago stay until others are used as often, the known weakness of this policy.

use super::ranked::{RankEntry, RankedBlocks};
use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::Timestamp;

/// Evicts the block with the fewest uses since it became resident.
#[derive(Debug, Default)]
pub struct Lfu {
    blocks: RankedBlocks,
}

impl Lfu {
    /// An empty policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn put(&mut self, key: BlockKey, uses: u32) {
        self.blocks.put(key, RankEntry { rank: u64::from(uses), uses });
    }
}

impl Policy for Lfu {
    fn name(&self) -> &'static str {
        "lfu"
    }

    fn insert(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        self.put(key, 1);
    }

    fn access(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.blocks.get(key) {
            self.put(key, known.uses.saturating_add(1));
        }
    }

    fn settle(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.blocks.get(key) {
            self.put(key, known.uses);
        }
    }

    fn park(&mut self, key: BlockKey) {
        self.blocks.park(key);
    }

    fn remove(&mut self, key: BlockKey) {
        self.blocks.remove(key);
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.blocks.lowest_evictable(spared).map(|(key, _)| key)
    }

    fn len(&self) -> usize {
        self.blocks.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite;
    use super::*;

    #[test]
    fn keeps_the_contract() {
        suite::policy_suite(|| Box::new(Lfu::new()));
    }

    #[test]
    fn the_least_used_leaves_first_and_ties_go_to_the_longest_unused() {
        let order = suite::eviction_order(&mut Lfu::new(), "+1 +2 +3 +4 use1 use1 use3 use2");
        assert_eq!(order, [4, 3, 2, 1]);
    }

    #[test]
    fn a_block_that_comes_back_starts_again() {
        let order = suite::eviction_order(&mut Lfu::new(), "+1 use1 use1 +2 use2 -1 +1");
        assert_eq!(order, [1, 2]);
    }

    #[test]
    fn settling_orders_but_counts_no_use() {
        let order = suite::eviction_order(&mut Lfu::new(), "+1 +2 +3 settle3 settle2 settle1 +4 use4");
        assert_eq!(order, [3, 2, 1, 4]);
    }

    #[test]
    fn a_parked_block_keeps_its_count() {
        let mut lfu = Lfu::new();
        for key in [1, 2] {
            lfu.insert(BlockKey(key), BlockTraits::default(), Timestamp(0));
        }
        lfu.access(BlockKey(1), BlockTraits::default(), Timestamp(1));
        lfu.park(BlockKey(1));
        assert_eq!((lfu.len(), lfu.victim(Timestamp(2), &|key| key.0 == 2)), (2, None));
        lfu.settle(BlockKey(1), BlockTraits::default(), Timestamp(3));
        assert_eq!(suite::eviction_order(&mut lfu, ""), [2, 1]);
    }
}
