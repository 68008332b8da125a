//! Greedy dual, size and frequency (GDSF): frequency per byte, above a floor that rises with what leaves.
//!
//! Rank = floor + uses / bytes. The floor is the rank of the last victim, so that a block once popular is
//! passed by newer ones in the end. Blocks of one size are ranked by uses alone. Not here: a cost of bringing a
//! block back; it is taken to be the same for all, which maximises hits and not bytes.

use super::ranked::{Ranked, Ranking};
use super::{BlockKey, BlockTraits, Policy};
use crate::id::Timestamp;

/// What one use of a one-byte block is worth. At 2^40 blocks of a gigabyte are still ranked to a thousandth, and
/// the floor has room for sixteen million uses of a byte.
const USE_OF_A_BYTE: u64 = 1 << 40;

/// Evicts the block with the lowest floor plus uses per byte.
#[derive(Debug, Default)]
pub struct Gdsf {
    blocks: Ranked,
    floor: u64,
}

impl Gdsf {
    /// A policy over no block.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn put(&mut self, key: BlockKey, uses: u32, traits: BlockTraits) {
        let worth = USE_OF_A_BYTE.saturating_mul(u64::from(uses)) / u64::from(traits.bytes.max(1));
        self.blocks.put(key, Ranking { rank: self.floor.saturating_add(worth), uses });
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

    /// The floor rises here and not when the victim leaves, since a block may leave for other reasons too; it
    /// changes no rank that was given, so that asking again gives the same answer.
    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        let (key, known) = self.blocks.lowest_unspared(spared)?;
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
    fn of_two_used_alike_the_larger_leaves_first() {
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
    fn what_was_popular_is_passed_by_what_comes_later() {
        let mut gdsf = Gdsf::new();
        let one = BlockTraits { bytes: 1, ..BlockTraits::default() };
        gdsf.insert(BlockKey(0), one, Timestamp(0));
        (0..4).for_each(|_| gdsf.access(BlockKey(0), one, Timestamp(0)));
        // Each newcomer stands one above the one that left; the fifth stands as high as five uses, and came later.
        for round in 0..5 {
            gdsf.insert(BlockKey(1), one, Timestamp(1));
            let victim = gdsf.victim(Timestamp(1), &|_| false);
            assert_eq!(victim, Some(BlockKey(u32::from(round < 4))), "round {round}");
            victim.into_iter().for_each(|key| gdsf.remove(key));
        }
    }
}
