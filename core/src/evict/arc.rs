//! ARC (FAST '03): one queue for blocks used once, one for blocks used again, and a border between them that
//! learns from blocks that come back too late.
//!
//! A block that left the first queue and comes back says that it was too short, one that left the second says
//! the same of that; the target length of the first moves accordingly. Not here: the one exception of the
//! textbook that looks at the block coming in before it chooses the victim; ours is chosen first.
//!
//! The capacity is not told: it is the number of blocks resident when a victim was last asked for. Both lists of
//! departed blocks together hold at most as many fingerprints as blocks are resident, as in the paper: they
//! stand for a tier of twice the size, and that is what the border can learn from.

use super::departed::{Departed, shortened};
use super::queue::{Links, Queue};
use super::{BlockKey, BlockTraits, Policy};
use crate::id::Timestamp;

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    fingerprint: u32,
    is_again: bool,
}

/// Evicts the longest unused of the blocks used once or of those used again, whichever has more than its part.
#[derive(Debug, Default)]
pub struct Arc {
    links: Links<Known>,
    once: Queue,
    again: Queue,
    departed_once: Departed,
    departed_again: Departed,
    /// How many blocks used once there should be.
    target: usize,
    /// Blocks resident when a victim was last asked for.
    capacity: usize,
}

impl Arc {
    /// A policy over no block.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn enqueue(&mut self, key: BlockKey, known: Known) {
        self.links.set_about(key, known);
        let queue = if known.is_again { &mut self.again } else { &mut self.once };
        self.links.push_warm(queue, key);
    }

    /// Takes a block out of its queue or from among the parked ones; nothing when it is not resident.
    fn take_out(&mut self, key: BlockKey) -> Option<Known> {
        let known = self.links.about(key);
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

    /// Moves the border if the block left too early; whether it did.
    fn learn(&mut self, fingerprint: u32) -> bool {
        let (once, again) = (self.departed_once.len(), self.departed_again.len());
        if self.departed_once.take(fingerprint) {
            self.target = (self.target + (again / once).max(1)).min(self.capacity);
            return true;
        }
        if self.departed_again.take(fingerprint) {
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
        self.take_out(key);
        let fingerprint = shortened(traits.fingerprint);
        let is_again = self.learn(fingerprint);
        self.enqueue(key, Known { fingerprint, is_again });
    }

    fn access(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.take_out(key) {
            self.enqueue(key, Known { is_again: true, ..known });
        }
    }

    fn settle(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.take_out(key) {
            self.enqueue(key, known);
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            let is_again = self.links.about(key).is_again;
            let queue = if is_again { &mut self.again } else { &mut self.once };
            self.links.park(queue, key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        let Some(known) = self.take_out(key) else { return };
        let departed = if known.is_again { &mut self.departed_again } else { &mut self.departed_once };
        departed.push(known.fingerprint);
        self.departed_once.trim(self.capacity.saturating_sub(self.once.len()));
        self.departed_again.trim(self.capacity.saturating_sub(self.departed_once.len()));
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.capacity = self.len();
        let (first, second) = match self.once.len() > self.target {
            true => (&self.once, &self.again),
            false => (&self.again, &self.once),
        };
        let coldest = |queue| self.links.coldest_unspared(queue, spared);
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
    fn what_was_used_once_leaves_before_what_was_used_again() {
        assert_eq!(suite::eviction_order(&mut Arc::new(), "+1 use1 +2 +3 use3 +4"), [2, 4, 1, 3]);
    }

    fn traits(fingerprint: u32) -> BlockTraits {
        BlockTraits { fingerprint: u64::from(fingerprint), ..BlockTraits::default() }
    }

    /// Evicts, then lets a block with this fingerprint in. Gives the fingerprint that left.
    fn exchange(policy: &mut Arc, fingerprint: u32) -> u32 {
        let key = policy.victim(Timestamp(1), &|_| false).unwrap_or(BlockKey(0));
        let left = policy.links.about(key).fingerprint;
        policy.remove(key);
        policy.insert(key, traits(fingerprint), Timestamp(1));
        left
    }

    #[test]
    fn the_border_follows_the_blocks_that_come_back_too_late() {
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
        assert_eq!(policy.again.len(), 6, "it was used again");
        // A block used again is driven out once fewer are on trial than wanted, and comes back.
        policy.target = 10;
        let left = exchange(&mut policy, 101);
        assert_eq!(left, 0);
        exchange(&mut policy, left);
        assert!(policy.target < 10);
    }

    #[test]
    fn fingerprints_are_as_many_as_resident_blocks() {
        let mut policy = Arc::new();
        (0..100).for_each(|key| policy.insert(BlockKey(key), traits(key), Timestamp(0)));
        for fingerprint in 100..3000 {
            exchange(&mut policy, fingerprint);
            if fingerprint % 3 == 0 {
                policy.access(BlockKey(fingerprint % 100), traits(0), Timestamp(2));
            }
        }
        let kept = policy.departed_once.len() + policy.departed_again.len();
        assert!((50..=100).contains(&kept), "{kept}");
    }
}
