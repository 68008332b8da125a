//! W-TinyLFU (ToS '17): a window for what is new, and a main part that takes in only what was used more often
//! than what it would drive out.
//!
//! The window is a hundredth of the blocks, longest unused last. What falls out of it and the coldest block of
//! the main part are compared by a sketch that also counted blocks while they were away; the one used more
//! often stays. The main part has a probation and, for four fifths of it, a protected queue for blocks used
//! again there. Not here: a window whose size adapts (Caffeine has one).
//!
//! The capacity is not told: shares are taken of the blocks resident now, and as long as there are more of them than
//! when a victim was ever asked for, there was room, and nothing is compared.

use super::departed::shortened;
use super::queue::{Links, Queue};
use super::sketch::Sketch;
use super::{BlockKey, BlockTraits, Policy};
use crate::id::Timestamp;

/// One in this many blocks stands in the window.
const WINDOW_ONE_IN: usize = 100;
/// Tenths of the main part that are protected.
const PROTECTED_TENTHS: usize = 8;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Segment {
    #[default]
    Window,
    Probation,
    Protected,
}

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    fingerprint: u32,
    segment: Segment,
}

/// Evicts what was used less often of the oldest new block and the coldest old one.
#[derive(Debug, Default)]
pub struct TinyLfu {
    links: Links<Known>,
    queues: [Queue; 3],
    sketch: Sketch,
    /// Most blocks that were resident when a victim was asked for; there is room while there are more.
    full: usize,
    /// The victim that was named, while nothing has happened since: looking for it moved blocks out of the window, and
    /// another look might find another one.
    named: Option<BlockKey>,
}

impl TinyLfu {
    /// A policy over no block.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn in_segment(&self, segment: Segment) -> usize {
        self.queues[segment as usize].len()
    }

    fn window_max(&self) -> usize {
        (self.len() / WINDOW_ONE_IN).max(1)
    }

    fn enqueue(&mut self, key: BlockKey, known: Known) {
        self.named = None;
        self.links.set_about(key, known);
        self.links.push_warm(&mut self.queues[known.segment as usize], key);
    }

    /// Takes a block out of its queue or from among the parked ones; nothing when it is not resident.
    fn take_out(&mut self, key: BlockKey) -> Option<Known> {
        self.named = None;
        let known = self.links.about(key);
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
    fn shift(&mut self, key: BlockKey, to: Segment) {
        if let Some(known) = self.take_out(key) {
            self.enqueue(key, Known { segment: to, ..known });
        }
    }

    /// Lets the coldest protected blocks go on probation until the share holds.
    fn unprotect(&mut self) {
        let main = self.in_segment(Segment::Probation) + self.in_segment(Segment::Protected);
        while self.in_segment(Segment::Protected) * 10 > main * PROTECTED_TENTHS
            && let Some(key) = self.queues[Segment::Protected as usize].coldest()
        {
            self.shift(key, Segment::Probation);
        }
    }

    fn uses(&self, key: BlockKey) -> u64 {
        self.sketch.estimate(self.links.about(key).fingerprint)
    }

    fn coldest(&self, segment: Segment, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.links.coldest_unspared(&self.queues[segment as usize], spared)
    }
}

impl Policy for TinyLfu {
    fn name(&self) -> &'static str {
        "tinylfu"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, _now: Timestamp) {
        self.take_out(key);
        let fingerprint = shortened(traits.fingerprint);
        self.enqueue(key, Known { fingerprint, segment: Segment::Window });
        self.sketch.reach(self.len());
        self.sketch.count(fingerprint);
        if self.len() > self.full
            && self.in_segment(Segment::Window) > self.window_max()
            && let Some(oldest) = self.queues[Segment::Window as usize].coldest()
        {
            self.shift(oldest, Segment::Probation);
        }
    }

    fn access(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        let Some(known) = self.take_out(key) else { return };
        self.sketch.count(known.fingerprint);
        let segment = match known.segment {
            Segment::Window => Segment::Window,
            Segment::Probation | Segment::Protected => Segment::Protected,
        };
        self.enqueue(key, Known { segment, ..known });
        self.unprotect();
    }

    fn settle(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.take_out(key) {
            self.enqueue(key, known);
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            self.named = None;
            let segment = self.links.about(key).segment;
            self.links.park(&mut self.queues[segment as usize], key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        self.take_out(key);
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        if let Some(named) = self.named.filter(|&named| !spared(named)) {
            return Some(named);
        }
        self.full = self.full.max(self.len());
        self.named = loop {
            let on_probation = self.coldest(Segment::Probation, spared);
            let main = on_probation.or_else(|| self.coldest(Segment::Protected, spared));
            let new = self.coldest(Segment::Window, spared);
            let (Some(settled), Some(new)) = (main, new) else { break main.or(new) };
            if self.in_segment(Segment::Window) < self.window_max() {
                break Some(settled);
            }
            // At a tie the settled block stays: what is new has yet to show that it is used at all.
            if self.uses(new) <= self.uses(settled) {
                break Some(new);
            }
            self.shift(new, Segment::Probation);
            // Alone on probation, who has just won would be the one to leave.
            if on_probation.is_none() {
                break Some(settled);
            }
        };
        self.named
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

    /// Evicts, then lets a block with this fingerprint in. Gives the fingerprint that left.
    fn exchange(policy: &mut TinyLfu, fingerprint: u32) -> u32 {
        let key = policy.victim(Timestamp(2), &|_| false).unwrap_or(BlockKey(0));
        let left = policy.links.about(key).fingerprint;
        policy.remove(key);
        policy.insert(key, traits(fingerprint), Timestamp(2));
        left
    }

    #[test]
    fn a_full_tier_has_its_shares() {
        let policy = full(1000);
        let segments = [Segment::Window, Segment::Probation, Segment::Protected];
        assert_eq!(segments.map(|segment| policy.in_segment(segment)), [10, 198, 792]);
    }

    #[test]
    fn what_is_used_once_drives_out_nothing_but_its_like() {
        let mut policy = full(1000);
        let left: Vec<u32> = (0..200).map(|new| exchange(&mut policy, 5000 + new)).collect();
        let old = left.iter().filter(|&&fingerprint| fingerprint < 1000).count();
        assert!(old <= 30, "{old} blocks used twice left for blocks used once");
    }

    #[test]
    fn who_wins_against_a_protected_block_stays() {
        let mut policy = full(100);
        policy.insert(BlockKey(500), traits(500), Timestamp(2));
        (0..9).for_each(|_| policy.access(BlockKey(500), traits(500), Timestamp(2)));
        // It alone is in the window, and nobody is left on probation.
        for key in (0..100).map(BlockKey) {
            if policy.links.about(key).segment != Segment::Protected {
                policy.remove(key);
            }
        }
        let segments = [Segment::Window, Segment::Probation].map(|segment| policy.in_segment(segment));
        assert_eq!(segments, [1, 0]);
        let first = policy.victim(Timestamp(3), &|_| false);
        assert_ne!(first, Some(BlockKey(500)));
        assert_eq!(policy.victim(Timestamp(3), &|_| false), first, "asking again changes nothing");
    }

    #[test]
    fn what_comes_back_often_gets_in() {
        let mut policy = full(1000);
        for _ in 0..5 {
            for new in 0..50 {
                exchange(&mut policy, 7000 + new);
            }
        }
        let is_in = |fingerprint: u32| {
            (0..1000).any(|key| policy.links.about(BlockKey(key)).fingerprint == fingerprint)
        };
        assert!((0..50).filter(|new| is_in(7000 + new)).count() > 40);
    }
}
