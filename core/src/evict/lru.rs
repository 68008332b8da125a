//! Least recently used: the baseline. O(1) except for skipping protected blocks.
//!
//! Not here: frequency, size, category. The caller breaks ties within a request by using the tail
//! of a prefix before its head.

use super::queue::{Links, Queue};
use super::{BlockKey, BlockTraits, Policy};
use crate::id::Timestamp;

/// Evicts the least recently used block.
#[derive(Debug, Default)]
pub struct Lru {
    links: Links,
    queue: Queue,
}

impl Lru {
    /// An empty policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn insert(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        self.remove(key);
        self.links.push_warm(&mut self.queue, key);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        if self.links.contains(key) || self.links.is_parked(key) {
            self.insert(key, traits, now);
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            self.links.park(&mut self.queue, key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        if !self.links.unpark(key) && self.links.contains(key) {
            self.links.unlink(&mut self.queue, key);
        }
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.links.coldest_evictable(&self.queue, spared)
    }

    fn len(&self) -> usize {
        self.queue.len() + self.links.parked_len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite;
    use super::*;

    #[test]
    fn keeps_the_contract() {
        suite::policy_suite(|| Box::new(Lru::new()));
    }

    #[test]
    fn the_longest_unused_block_leaves_first() {
        let order = suite::eviction_order(&mut Lru::new(), "+1 +2 +3 use1 +4 use2");
        assert_eq!(order, [3, 1, 4, 2]);
    }

    #[test]
    fn parked_block_is_skipped_and_returns_as_newest() {
        let mut lru = Lru::new();
        for key in 0..4 {
            lru.insert(BlockKey(key), BlockTraits::default(), Timestamp(0));
        }
        lru.park(BlockKey(0));
        let asked = std::cell::Cell::new(0);
        let spared = |_| {
            asked.set(asked.get() + 1);
            false
        };
        assert_eq!(lru.victim(Timestamp(1), &spared), Some(BlockKey(1)));
        assert_eq!(asked.get(), 1);
        lru.access(BlockKey(0), BlockTraits::default(), Timestamp(2));
        assert_eq!(suite::eviction_order(&mut lru, ""), [1, 2, 3, 0]);
    }

    #[test]
    fn settling_counts_as_the_last_use() {
        let order = suite::eviction_order(&mut Lru::new(), "+1 +2 +3 settle3 settle2 settle1");
        assert_eq!(order, [3, 2, 1]);
    }
}
