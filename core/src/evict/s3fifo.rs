//! S3-FIFO (SOSP '23): a small queue on trial, a main queue with second chances, and fingerprints of what failed
//! the trial.
//!
//! Whatever is new stands in the small queue, a tenth of the blocks. At its end a block used more than once moves
//! to the main queue, any other leaves and its fingerprint is kept; who comes back while it is known goes
//! straight to the main queue. There a used block is put back with one use less. Not here: recency; a use
//! moves nothing.
//!
//! The capacity is not told: shares are taken of the blocks resident when a victim is asked for or leaves. While the
//! tier fills, everything stands in the small queue and is tried once there is somebody to drive out (of the rules in
//! use the one that hits more). As many fingerprints are kept as blocks have room in the main queue, as in the
//! paper: what would come back later than that would not have stayed either.

use super::departed::{Departed, shortened};
use super::queue::{Links, Queue};
use super::{BlockKey, BlockTraits, Policy};
use crate::id::Timestamp;

/// One in this many blocks stands in the small queue: the paper's share.
const SMALL_ONE_IN: usize = 10;
/// Uses counted; more say nothing that matters.
const USES_MAX: u8 = 3;
/// Uses after its first with which a block passes the trial.
const USES_TO_PASS: u8 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    fingerprint: u32,
    /// Uses after the first, up to [`USES_MAX`].
    uses: u8,
    in_main: bool,
}

/// Evicts what was used at most once more, before what was used twice more.
#[derive(Debug, Default)]
pub struct S3Fifo {
    links: Links<Known>,
    small: Queue,
    main: Queue,
    departed: Departed,
    /// The victim that was named, while nothing has happened since: looking for it moved blocks between the queues,
    /// and another look might find another one.
    named: Option<BlockKey>,
}

impl S3Fifo {
    /// A policy over no block.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many of `blocks` stand in the small queue.
    fn small_of(blocks: usize) -> usize {
        (blocks / SMALL_ONE_IN).max(1)
    }

    fn enqueue(&mut self, key: BlockKey, known: Known) {
        self.named = None;
        self.links.set_about(key, known);
        let queue = if known.in_main { &mut self.main } else { &mut self.small };
        self.links.push_warm(queue, key);
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
        let queue = if known.in_main { &mut self.main } else { &mut self.small };
        self.links.unlink(queue, key);
        Some(known)
    }

    /// Who leaves from the small queue; those that pass the trial on the way move to the main one.
    fn small_victim(&mut self, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        loop {
            let key = self.links.coldest_unspared(&self.small, spared)?;
            let known = self.links.about(key);
            if known.uses < USES_TO_PASS {
                return Some(key);
            }
            self.links.unlink(&mut self.small, key);
            self.enqueue(key, Known { uses: 0, in_main: true, ..known });
        }
    }

    /// Who leaves from the main queue; those used since they came to its end get another round.
    fn main_victim(&mut self, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        loop {
            let key = self.links.coldest_unspared(&self.main, spared)?;
            let known = self.links.about(key);
            if known.uses == 0 {
                return Some(key);
            }
            self.links.unlink(&mut self.main, key);
            self.enqueue(key, Known { uses: known.uses - 1, ..known });
        }
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, _now: Timestamp) {
        self.take_out(key);
        let fingerprint = shortened(traits.fingerprint);
        let in_main = self.departed.take(fingerprint);
        self.enqueue(key, Known { fingerprint, uses: 0, in_main });
    }

    fn access(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        let known = self.links.about(key);
        let known = Known { uses: (known.uses + 1).min(USES_MAX), ..known };
        if self.links.unpark(key) {
            self.enqueue(key, known);
        } else if self.links.contains(key) {
            self.named = None;
            self.links.set_about(key, known);
        }
    }

    fn settle(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.take_out(key) {
            self.enqueue(key, known);
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            self.named = None;
            let known = self.links.about(key);
            let queue = if known.in_main { &mut self.main } else { &mut self.small };
            self.links.park(queue, key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        if let Some(known) = self.take_out(key)
            && !known.in_main
        {
            self.departed.push(known.fingerprint);
            // The tier had one block more before this one left.
            let blocks = self.len() + 1;
            self.departed.trim(blocks - blocks / SMALL_ONE_IN);
        }
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        if let Some(named) = self.named.filter(|&named| !spared(named)) {
            return Some(named);
        }
        let from_small =
            if self.small.len() >= Self::small_of(self.len()) { self.small_victim(spared) } else { None };
        self.named = from_small.or_else(|| self.main_victim(spared)).or_else(|| self.small_victim(spared));
        self.named
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len() + self.links.parked_len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite;
    use super::*;

    #[test]
    fn keeps_the_contract() {
        suite::policy_suite(|| Box::new(S3Fifo::new()));
    }

    fn traits(key: u32) -> BlockTraits {
        BlockTraits { fingerprint: u64::from(key), ..BlockTraits::default() }
    }

    /// A tier of a hundred blocks that filled long ago. Of every twenty blocks one is used three times more.
    fn full() -> S3Fifo {
        let mut policy = S3Fifo::new();
        (0..100).for_each(|key| policy.insert(BlockKey(key), traits(key), Timestamp(0)));
        for fingerprint in 100..5000 {
            let key = BlockKey(evict(&mut policy).0);
            policy.insert(key, traits(fingerprint), Timestamp(0));
            let uses = if fingerprint % 20 == 0 { 3 } else { 0 };
            (0..uses).for_each(|_| policy.access(key, traits(fingerprint), Timestamp(0)));
        }
        policy
    }

    /// Evicts; gives the key and the fingerprint that left.
    fn evict(policy: &mut S3Fifo) -> (u32, u32) {
        let key = policy.victim(Timestamp(1), &|_| false).unwrap_or(BlockKey(0));
        let left = policy.links.about(key).fingerprint;
        policy.remove(key);
        (key.0, left)
    }

    #[test]
    fn one_in_ten_is_on_trial_once_the_tier_has_run_for_a_while() {
        let policy = full();
        assert_eq!((policy.small.len(), policy.main.len()), (10, 90));
    }

    #[test]
    fn used_once_leaves_from_the_small_queue_and_used_again_moves_on() {
        assert_eq!(suite::eviction_order(&mut S3Fifo::new(), "+1 +2 +3 use1 use1 use2 +4"), [2, 3, 4, 1]);
    }

    #[test]
    fn a_victim_stays_the_victim_though_others_passed_their_trial_on_the_way() {
        let mut policy = full();
        // Nine of the ten on trial pass it, which leaves fewer there than their share.
        let on_trial: Vec<BlockKey> =
            (0..100).map(BlockKey).filter(|&key| !policy.links.about(key).in_main).collect();
        for &key in &on_trial[..9] {
            (0..3).for_each(|_| policy.access(key, BlockTraits::default(), Timestamp(1)));
        }
        let first = policy.victim(Timestamp(1), &|_| false);
        assert!(policy.small.len() < 10);
        assert_eq!(policy.victim(Timestamp(1), &|_| false), first);
    }

    #[test]
    fn who_comes_back_while_it_is_known_goes_to_the_main_queue() {
        let mut policy = full();
        let (key, left) = evict(&mut policy);
        policy.insert(BlockKey(key), traits(left), Timestamp(2));
        assert!(policy.links.about(BlockKey(key)).in_main);
        let (key, _) = evict(&mut policy);
        policy.insert(BlockKey(key), traits(9999), Timestamp(3));
        assert!(!policy.links.about(BlockKey(key)).in_main);
    }

    #[test]
    fn fingerprints_are_as_many_as_blocks_have_room_in_the_main_queue() {
        let policy = full();
        assert!((80..=90).contains(&policy.departed.len()), "{}", policy.departed.len());
    }
}
