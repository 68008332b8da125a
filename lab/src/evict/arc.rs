//! ARC (FAST '03): one queue for blocks used once, one for blocks used again. The border between
//! them adapts to blocks that return after eviction.
//!
//! A returning block shows that the queue it left was too short, so the target length of the first
//! queue moves. Not here: the exception of the paper that looks at the incoming block before it
//! chooses the victim; here the victim is chosen first.
//!
//! Capacity is inferred: the number of blocks resident at the last victim search. Both ghost lists
//! together hold at most as many fingerprints as blocks are resident, as in the paper.

use super::ghost_list::{GhostList, short_fingerprint};
use kv_core::evict::queue::{Links, Queue};
use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::Timestamp;

#[derive(Clone, Copy, Debug, Default)]
struct ArcEntry {
    fingerprint: u32,
    is_again: bool,
}

/// Evicts the longest unused block from the queue that exceeds its target.
#[derive(Debug, Default)]
pub struct Arc {
    links: Links<ArcEntry>,
    once: Queue,
    again: Queue,
    ghosts_once: GhostList,
    ghosts_again: GhostList,
    /// Target number of blocks used once.
    target: usize,
    /// Blocks resident at the last victim search.
    capacity: usize,
}

impl Arc {
    /// An empty policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn enqueue(&mut self, key: BlockKey, known: ArcEntry) {
        self.links.set_data(key, known);
        let queue = if known.is_again { &mut self.again } else { &mut self.once };
        self.links.push_warm(queue, key);
    }

    /// Removes a block from its queue or from the parked ones; `None` if it is not resident.
    fn detach(&mut self, key: BlockKey) -> Option<ArcEntry> {
        let known = self.links.data(key);
        if self.links.unpark(key) {
            return Some(known);
        }
        if !self.links.contains(key) {
            return None;
        }
        let queue = if known.is_again { &mut self.again } else { &mut self.once };
        self.links.unlink(queue, key);
        Some(known)
    }

    /// Moves the border if the block is in a ghost list; returns whether it was.
    fn learn(&mut self, fingerprint: u32) -> bool {
        let (once, again) = (self.ghosts_once.len(), self.ghosts_again.len());
        if self.ghosts_once.take(fingerprint) {
            self.target = (self.target + (again / once).max(1)).min(self.capacity);
            return true;
        }
        if self.ghosts_again.take(fingerprint) {
            self.target = self.target.saturating_sub((once / again).max(1));
            return true;
        }
        false
    }
}

impl Policy for Arc {
    fn name(&self) -> &'static str {
        "arc"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, _now: Timestamp) {
        self.detach(key);
        let fingerprint = short_fingerprint(traits.fingerprint);
        let is_again = self.learn(fingerprint);
        self.enqueue(key, ArcEntry { fingerprint, is_again });
    }

    fn access(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.detach(key) {
            self.enqueue(key, ArcEntry { is_again: true, ..known });
        }
    }

    fn settle(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.detach(key) {
            self.enqueue(key, known);
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            let is_again = self.links.data(key).is_again;
            let queue = if is_again { &mut self.again } else { &mut self.once };
            self.links.park(queue, key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        let Some(known) = self.detach(key) else { return };
        let departed = if known.is_again { &mut self.ghosts_again } else { &mut self.ghosts_once };
        departed.push(known.fingerprint);
        self.ghosts_once.trim(self.capacity.saturating_sub(self.once.len()));
        self.ghosts_again.trim(self.capacity.saturating_sub(self.ghosts_once.len()));
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.capacity = self.len();
        let (first, second) = match self.once.len() > self.target {
            true => (&self.once, &self.again),
            false => (&self.again, &self.once),
        };
        let coldest = |queue| self.links.coldest_evictable(queue, spared);
        coldest(first).or_else(|| coldest(second))
    }

    fn len(&self) -> usize {
        self.once.len() + self.again.len() + self.links.parked_len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite;
    use super::*;

    #[test]
    fn keeps_the_contract() {
        suite::policy_suite(|| Box::new(Arc::new()));
    }

    #[test]
    fn blocks_used_once_leave_before_blocks_used_again() {
        assert_eq!(suite::eviction_order(&mut Arc::new(), "+1 use1 +2 +3 use3 +4"), [2, 4, 1, 3]);
    }

    fn traits(fingerprint: u32) -> BlockTraits {
        BlockTraits { fingerprint: u64::from(fingerprint), ..BlockTraits::default() }
    }

    /// Evicts a block, inserts one with this fingerprint, and returns the evicted fingerprint.
    fn exchange(policy: &mut Arc, fingerprint: u32) -> u32 {
        let key = policy.victim(Timestamp(1), &|_| false).unwrap_or(BlockKey(0));
        let left = policy.links.data(key).fingerprint;
        policy.remove(key);
        policy.insert(key, traits(fingerprint), Timestamp(1));
        left
    }

    #[test]
    fn border_follows_returning_blocks() {
        let mut policy = Arc::new();
        for key in 0..10 {
            policy.insert(BlockKey(key), traits(key), Timestamp(0));
            if key < 5 {
                policy.access(BlockKey(key), traits(key), Timestamp(0));
            }
        }
        let left = exchange(&mut policy, 100);
        assert_eq!((left, policy.target), (5, 0));
        exchange(&mut policy, left);
        assert_eq!(policy.target, 1);
        assert_eq!(policy.again.len(), 6, "a returning block counts as used again");
        // With fewer blocks used once than the target, a block used again is evicted, and returns.
        policy.target = 10;
        let left = exchange(&mut policy, 101);
        assert_eq!(left, 0);
        exchange(&mut policy, left);
        assert!(policy.target < 10);
    }

    #[test]
    fn ghosts_are_bounded_by_resident_blocks() {
        let mut policy = Arc::new();
        (0..100).for_each(|key| policy.insert(BlockKey(key), traits(key), Timestamp(0)));
        for fingerprint in 100..3000 {
            exchange(&mut policy, fingerprint);
            if fingerprint % 3 == 0 {
                policy.access(BlockKey(fingerprint % 100), traits(0), Timestamp(2));
            }
        }
        let kept = policy.ghosts_once.len() + policy.ghosts_again.len();
        assert!((50..=100).contains(&kept), "{kept}");
    }
}
