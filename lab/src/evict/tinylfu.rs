//! W-TinyLFU (ToS '17): a window for new blocks, and a main part that admits only blocks used more
//! often than the block they would evict.
//!
//! The window is a hundredth of the blocks, in LRU order. A sketch, which also counts absent
//! blocks, compares the block that falls out of it with the coldest block of the main part. The one
//! used more often stays. The main part has a probation queue and, for four fifths of it, a
//! protected queue for blocks used again there. Not here: an adaptive window size (Caffeine has
//! one).
//!
//! Capacity is inferred: shares refer to the blocks resident now. While more blocks are resident
//! than at any victim search, space was free and blocks enter without comparison.

use super::ghost_list::short_fingerprint;
use super::sketch::Sketch;
use kv_core::evict::queue::{Links, Queue};
use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::Timestamp;

/// One block in this many is in the window.
const WINDOW_ONE_IN: usize = 100;
/// Tenths of the main part that are protected.
const PROTECTED_TENTHS: usize = 8;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TinyLfuSegment {
    #[default]
    Window,
    Probation,
    Protected,
}

#[derive(Clone, Copy, Debug, Default)]
struct TinyLfuEntry {
    fingerprint: u32,
    segment: TinyLfuSegment,
}

/// Evicts the less often used of the oldest window block and the coldest main block.
#[derive(Debug, Default)]
pub struct TinyLfu {
    links: Links<TinyLfuEntry>,
    queues: [Queue; 3],
    sketch: Sketch,
    /// Most blocks resident at a victim search; above it space is free.
    resident_max: usize,
    /// The last victim, while no other call followed: the search moved blocks out of the window, so
    /// a second search might return another.
    last_victim: Option<BlockKey>,
}

impl TinyLfu {
    /// An empty policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn in_segment(&self, segment: TinyLfuSegment) -> usize {
        self.queues[segment as usize].len()
    }

    fn window_max(&self) -> usize {
        (self.len() / WINDOW_ONE_IN).max(1)
    }

    fn enqueue(&mut self, key: BlockKey, known: TinyLfuEntry) {
        self.last_victim = None;
        self.links.set_data(key, known);
        self.links.push_warm(&mut self.queues[known.segment as usize], key);
    }

    /// Removes a block from its queue or from the parked ones; `None` if it is not resident.
    fn detach(&mut self, key: BlockKey) -> Option<TinyLfuEntry> {
        self.last_victim = None;
        let known = self.links.data(key);
        if self.links.unpark(key) {
            return Some(known);
        }
        if !self.links.contains(key) {
            return None;
        }
        self.links.unlink(&mut self.queues[known.segment as usize], key);
        Some(known)
    }

    /// Moves a queued block to the warm end of another segment.
    fn move_to_segment(&mut self, key: BlockKey, to: TinyLfuSegment) {
        if let Some(known) = self.detach(key) {
            self.enqueue(key, TinyLfuEntry { segment: to, ..known });
        }
    }

    /// Moves the coldest protected blocks to probation until the share holds.
    fn demote_protected(&mut self) {
        let main = self.in_segment(TinyLfuSegment::Probation) + self.in_segment(TinyLfuSegment::Protected);
        while self.in_segment(TinyLfuSegment::Protected) * 10 > main * PROTECTED_TENTHS
            && let Some(key) = self.queues[TinyLfuSegment::Protected as usize].coldest()
        {
            self.move_to_segment(key, TinyLfuSegment::Probation);
        }
    }

    fn uses(&self, key: BlockKey) -> u64 {
        self.sketch.estimate(self.links.data(key).fingerprint)
    }

    fn coldest(&self, segment: TinyLfuSegment, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.links.coldest_evictable(&self.queues[segment as usize], spared)
    }
}

impl Policy for TinyLfu {
    fn name(&self) -> &'static str {
        "tinylfu"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, _now: Timestamp) {
        self.detach(key);
        let fingerprint = short_fingerprint(traits.fingerprint);
        self.enqueue(key, TinyLfuEntry { fingerprint, segment: TinyLfuSegment::Window });
        self.sketch.grow_for(self.len());
        self.sketch.count(fingerprint);
        if self.len() > self.resident_max
            && self.in_segment(TinyLfuSegment::Window) > self.window_max()
            && let Some(oldest) = self.queues[TinyLfuSegment::Window as usize].coldest()
        {
            self.move_to_segment(oldest, TinyLfuSegment::Probation);
        }
    }

    fn access(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        let Some(known) = self.detach(key) else { return };
        self.sketch.count(known.fingerprint);
        let segment = match known.segment {
            TinyLfuSegment::Window => TinyLfuSegment::Window,
            TinyLfuSegment::Probation | TinyLfuSegment::Protected => TinyLfuSegment::Protected,
        };
        self.enqueue(key, TinyLfuEntry { segment, ..known });
        self.demote_protected();
    }

    fn settle(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.detach(key) {
            self.enqueue(key, known);
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            self.last_victim = None;
            let segment = self.links.data(key).segment;
            self.links.park(&mut self.queues[segment as usize], key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        self.detach(key);
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        if let Some(named) = self.last_victim.filter(|&named| !spared(named)) {
            return Some(named);
        }
        self.resident_max = self.resident_max.max(self.len());
        self.last_victim = loop {
            let on_probation = self.coldest(TinyLfuSegment::Probation, spared);
            let main = on_probation.or_else(|| self.coldest(TinyLfuSegment::Protected, spared));
            let new = self.coldest(TinyLfuSegment::Window, spared);
            let (Some(settled), Some(new)) = (main, new) else { break main.or(new) };
            if self.in_segment(TinyLfuSegment::Window) < self.window_max() {
                break Some(settled);
            }
            // A tie keeps the main block: the new one has not shown reuse yet.
            if self.uses(new) <= self.uses(settled) {
                break Some(new);
            }
            self.move_to_segment(new, TinyLfuSegment::Probation);
            // If probation was empty, the winner would be its only block and the next victim.
            if on_probation.is_none() {
                break Some(settled);
            }
        };
        self.last_victim
    }

    fn len(&self) -> usize {
        self.queues.iter().map(Queue::len).sum::<usize>() + self.links.parked_len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite;
    use super::*;

    #[test]
    fn keeps_the_contract() {
        suite::policy_suite(|| Box::new(TinyLfu::new()));
    }

    fn traits(fingerprint: u32) -> BlockTraits {
        BlockTraits { fingerprint: u64::from(fingerprint), ..BlockTraits::default() }
    }

    /// A full tier of blocks `0..count`, each used twice.
    fn full(count: u32) -> TinyLfu {
        let mut policy = TinyLfu::new();
        (0..count).for_each(|key| policy.insert(BlockKey(key), traits(key), Timestamp(0)));
        (0..count).for_each(|key| policy.access(BlockKey(key), traits(key), Timestamp(1)));
        assert!(policy.victim(Timestamp(1), &|_| false).is_some());
        policy
    }

    /// Evicts a block, inserts one with this fingerprint, and returns the evicted fingerprint.
    fn exchange(policy: &mut TinyLfu, fingerprint: u32) -> u32 {
        let key = policy.victim(Timestamp(2), &|_| false).unwrap_or(BlockKey(0));
        let left = policy.links.data(key).fingerprint;
        policy.remove(key);
        policy.insert(key, traits(fingerprint), Timestamp(2));
        left
    }

    #[test]
    fn a_full_tier_has_its_shares() {
        let policy = full(1000);
        let segments = [TinyLfuSegment::Window, TinyLfuSegment::Probation, TinyLfuSegment::Protected];
        assert_eq!(segments.map(|segment| policy.in_segment(segment)), [10, 198, 792]);
    }

    #[test]
    fn blocks_used_once_evict_only_each_other() {
        let mut policy = full(1000);
        let left: Vec<u32> = (0..200).map(|new| exchange(&mut policy, 5000 + new)).collect();
        let old = left.iter().filter(|&&fingerprint| fingerprint < 1000).count();
        assert!(old <= 30, "{old} blocks used twice left for blocks used once");
    }

    #[test]
    fn winner_over_a_protected_block_stays() {
        let mut policy = full(100);
        policy.insert(BlockKey(500), traits(500), Timestamp(2));
        (0..9).for_each(|_| policy.access(BlockKey(500), traits(500), Timestamp(2)));
        // It is alone in the window, and probation is empty.
        for key in (0..100).map(BlockKey) {
            if policy.links.data(key).segment != TinyLfuSegment::Protected {
                policy.remove(key);
            }
        }
        let segments =
            [TinyLfuSegment::Window, TinyLfuSegment::Probation].map(|segment| policy.in_segment(segment));
        assert_eq!(segments, [1, 0]);
        let first = policy.victim(Timestamp(3), &|_| false);
        assert_ne!(first, Some(BlockKey(500)));
        assert_eq!(policy.victim(Timestamp(3), &|_| false), first, "a second search returns the same victim");
    }

    #[test]
    fn frequently_returning_blocks_are_admitted() {
        let mut policy = full(1000);
        for _ in 0..5 {
            for new in 0..50 {
                exchange(&mut policy, 7000 + new);
            }
        }
        let is_in = |fingerprint: u32| {
            (0..1000).any(|key| policy.links.data(BlockKey(key)).fingerprint == fingerprint)
        };
        assert!((0..50).filter(|new| is_in(7000 + new)).count() > 40);
    }
}
