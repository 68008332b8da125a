//! Greedy dual, size and frequency (GDSF): frequency per byte, above a floor that rises with each
//! eviction.
//!
//! Rank = floor + uses / bytes. The floor is the rank of the last victim, so newer blocks
//! eventually outrank once-popular ones. Blocks of one size are ranked by uses alone. Not here: a
//! cost of reloading a block; it counts as equal for all, which maximises hits, not bytes.

use super::ranked::{RankEntry, RankedBlocks};
use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::Timestamp;

/// Value of one use of a one-byte block. At 2^40, gigabyte blocks are still ranked to a thousandth,
/// and the floor can absorb sixteen million uses of a byte.
const VALUE_OF_BYTE_USE: u64 = 1 << 40;

/// Evicts the block with the lowest floor plus uses per byte.
#[derive(Debug, Default)]
pub struct Gdsf {
    blocks: RankedBlocks,
    floor: u64,
}

impl Gdsf {
    /// An empty policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn put(&mut self, key: BlockKey, uses: u32, traits: BlockTraits) {
        let worth = VALUE_OF_BYTE_USE.saturating_mul(u64::from(uses)) / u64::from(traits.bytes.max(1));
        self.blocks.put(key, RankEntry { rank: self.floor.saturating_add(worth), uses });
    }
}

impl Policy for Gdsf {
    fn name(&self) -> &'static str {
        "gdsf"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, _now: Timestamp) {
        self.put(key, 1, traits);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.blocks.get(key) {
            self.put(key, known.uses.saturating_add(1), traits);
        }
    }

    fn settle(&mut self, key: BlockKey, traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.blocks.get(key) {
            self.put(key, known.uses, traits);
        }
    }

    fn park(&mut self, key: BlockKey) {
        self.blocks.park(key);
    }

    fn remove(&mut self, key: BlockKey) {
        self.blocks.remove(key);
    }

    /// The floor rises here and not in `remove`, since a block may leave for other reasons too. It
    /// changes no assigned rank, so a repeated call returns the same block.
    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        let (key, known) = self.blocks.lowest_evictable(spared)?;
        self.floor = self.floor.max(known.rank);
        Some(key)
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
        suite::policy_suite(|| Box::new(Gdsf::new()));
    }

    #[test]
    fn the_least_used_leaves_first() {
        assert_eq!(suite::eviction_order(&mut Gdsf::new(), "+1 +2 +3 use1 use1 use2"), [3, 2, 1]);
    }

    #[test]
    fn larger_of_equally_used_blocks_leaves_first() {
        let mut gdsf = Gdsf::new();
        let sized = |bytes| BlockTraits { bytes, ..BlockTraits::default() };
        gdsf.insert(BlockKey(1), sized(100), Timestamp(0));
        gdsf.insert(BlockKey(2), sized(300), Timestamp(1));
        gdsf.access(BlockKey(2), sized(300), Timestamp(2));
        assert_eq!(gdsf.victim(Timestamp(3), &|_| false), Some(BlockKey(2)));
        gdsf.access(BlockKey(2), sized(300), Timestamp(4));
        gdsf.access(BlockKey(2), sized(300), Timestamp(5));
        assert_eq!(gdsf.victim(Timestamp(6), &|_| false), Some(BlockKey(1)));
    }

    #[test]
    fn newer_blocks_outrank_once_popular_ones() {
        let mut gdsf = Gdsf::new();
        let one = BlockTraits { bytes: 1, ..BlockTraits::default() };
        gdsf.insert(BlockKey(0), one, Timestamp(0));
        (0..4).for_each(|_| gdsf.access(BlockKey(0), one, Timestamp(0)));
        // Each new block ranks one above the evicted one; the fifth ties with five uses but is
        // newer.
        for round in 0..5 {
            gdsf.insert(BlockKey(1), one, Timestamp(1));
            let victim = gdsf.victim(Timestamp(1), &|_| false);
            assert_eq!(victim, Some(BlockKey(u32::from(round < 4))), "round {round}");
            victim.into_iter().for_each(|key| gdsf.remove(key));
        }
    }
}
