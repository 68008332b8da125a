//! First in, first out: a block leaves in insertion order, however often it is used.
//!
//! Not here: recency. The only reordering is [`Policy::settle`], which orders the blocks of one
//! request (tail before head) when the request ends. A held block keeps its queue position, so a
//! victim search steps over held blocks.

use kv_core::evict::queue::{Links, Queue};
use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::Timestamp;

/// Evicts the block that became resident first.
#[derive(Debug, Default)]
pub struct Fifo {
    links: Links,
    queue: Queue,
}

impl Fifo {
    /// An empty policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn insert(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        self.remove(key);
        self.links.push_warm(&mut self.queue, key);
    }

    fn access(&mut self, _key: BlockKey, _traits: BlockTraits, _now: Timestamp) {}

    fn settle(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        if self.links.contains(key) {
            self.insert(key, traits, now);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            self.links.unlink(&mut self.queue, key);
        }
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.links.coldest_evictable(&self.queue, spared)
    }

    fn len(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite;
    use super::*;

    #[test]
    fn keeps_the_contract() {
        suite::policy_suite(|| Box::new(Fifo::new()));
    }

    #[test]
    fn use_changes_nothing() {
        let order = suite::eviction_order(&mut Fifo::new(), "+1 +2 +3 use1 use1 use2 +4");
        assert_eq!(order, [1, 2, 3, 4]);
    }

    #[test]
    fn a_block_that_comes_back_is_new() {
        let order = suite::eviction_order(&mut Fifo::new(), "+1 +2 -1 +1");
        assert_eq!(order, [2, 1]);
    }

    #[test]
    fn settling_puts_the_tail_of_a_request_first() {
        let order = suite::eviction_order(&mut Fifo::new(), "+1 +2 +3 settle3 settle2 settle1");
        assert_eq!(order, [3, 2, 1]);
    }
}
