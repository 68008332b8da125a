//! S3-FIFO (SOSP '23): a small probationary queue, a main queue with second chances, and a ghost
//! list of blocks that failed probation.
//!
//! New blocks enter the small queue, a tenth of all blocks. At its end a block used more than once
//! moves to the main queue; any other is evicted and its fingerprint kept. A block that returns
//! while its fingerprint is known enters the main queue. There a used block is reinserted with one
//! use less. Not here: recency; a use moves no block.
//!
//! Capacity is inferred from the blocks resident at a victim search or a removal. While the tier
//! fills, every block is in the small queue and is tested once evictions begin. The ghost list
//! holds as many fingerprints as the main queue has blocks, as in the paper.

use super::ghost_list::{GhostList, short_fingerprint};
use kv_core::evict::queue::{Links, Queue};
use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::Timestamp;

/// One block in this many is in the small queue: the paper's share.
const SMALL_ONE_IN: usize = 10;
/// Highest use count; higher counts make no difference.
const USES_MAX: u8 = 3;
/// Uses after the first that a block needs to pass probation.
const USES_TO_PASS: u8 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct S3FifoEntry {
    fingerprint: u32,
    /// Uses after the first, up to [`USES_MAX`].
    uses: u8,
    in_main: bool,
}

/// Evicts blocks used at most once more before blocks used twice more.
#[derive(Debug, Default)]
pub struct S3Fifo {
    links: Links<S3FifoEntry>,
    small: Queue,
    main: Queue,
    ghosts: GhostList,
    /// The last victim, while no other call followed: the search moved blocks between the queues,
    /// so a second search might return another.
    last_victim: Option<BlockKey>,
}

impl S3Fifo {
    /// An empty policy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Target size of the small queue for `blocks` resident blocks.
    fn small_target(blocks: usize) -> usize {
        (blocks / SMALL_ONE_IN).max(1)
    }

    fn enqueue(&mut self, key: BlockKey, known: S3FifoEntry) {
        self.last_victim = None;
        self.links.set_data(key, known);
        let queue = if known.in_main { &mut self.main } else { &mut self.small };
        self.links.push_warm(queue, key);
    }

    /// Removes a block from its queue or from the parked ones; `None` if it is not resident.
    fn detach(&mut self, key: BlockKey) -> Option<S3FifoEntry> {
        self.last_victim = None;
        let known = self.links.data(key);
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

    /// Victim of the small queue; blocks that pass probation move to the main queue.
    fn small_victim(&mut self, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        loop {
            let key = self.links.coldest_evictable(&self.small, spared)?;
            let known = self.links.data(key);
            if known.uses < USES_TO_PASS {
                return Some(key);
            }
            self.links.unlink(&mut self.small, key);
            self.enqueue(key, S3FifoEntry { uses: 0, in_main: true, ..known });
        }
    }

    /// Victim of the main queue; blocks used since they reached its end get another round.
    fn main_victim(&mut self, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        loop {
            let key = self.links.coldest_evictable(&self.main, spared)?;
            let known = self.links.data(key);
            if known.uses == 0 {
                return Some(key);
            }
            self.links.unlink(&mut self.main, key);
            self.enqueue(key, S3FifoEntry { uses: known.uses - 1, ..known });
        }
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, _now: Timestamp) {
        self.detach(key);
        let fingerprint = short_fingerprint(traits.fingerprint);
        let in_main = self.ghosts.take(fingerprint);
        self.enqueue(key, S3FifoEntry { fingerprint, uses: 0, in_main });
    }

    fn access(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        let known = self.links.data(key);
        let known = S3FifoEntry { uses: (known.uses + 1).min(USES_MAX), ..known };
        if self.links.unpark(key) {
            self.enqueue(key, known);
        } else if self.links.contains(key) {
            self.last_victim = None;
            self.links.set_data(key, known);
        }
    }

    fn settle(&mut self, key: BlockKey, _traits: BlockTraits, _now: Timestamp) {
        if let Some(known) = self.detach(key) {
            self.enqueue(key, known);
        }
    }

    fn park(&mut self, key: BlockKey) {
        if self.links.contains(key) {
            self.last_victim = None;
            let known = self.links.data(key);
            let queue = if known.in_main { &mut self.main } else { &mut self.small };
            self.links.park(queue, key);
        }
    }

    fn remove(&mut self, key: BlockKey) {
        if let Some(known) = self.detach(key)
            && !known.in_main
        {
            self.ghosts.push(known.fingerprint);
            // The tier had one block more before this removal.
            let blocks = self.len() + 1;
            self.ghosts.trim(blocks - blocks / SMALL_ONE_IN);
        }
    }

    fn victim(&mut self, _now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        if let Some(named) = self.last_victim.filter(|&named| !spared(named)) {
            return Some(named);
        }
        let from_small =
            if self.small.len() >= Self::small_target(self.len()) { self.small_victim(spared) } else { None };
        self.last_victim =
            from_small.or_else(|| self.main_victim(spared)).or_else(|| self.small_victim(spared));
        self.last_victim
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

    /// A full tier of a hundred blocks in steady state. One block in twenty is used three times
    /// more.
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

    /// Evicts a block; returns its key and fingerprint.
    fn evict(policy: &mut S3Fifo) -> (u32, u32) {
        let key = policy.victim(Timestamp(1), &|_| false).unwrap_or(BlockKey(0));
        let left = policy.links.data(key).fingerprint;
        policy.remove(key);
        (key.0, left)
    }

    #[test]
    fn small_queue_reaches_its_share() {
        let policy = full();
        assert_eq!((policy.small.len(), policy.main.len()), (10, 90));
    }

    #[test]
    fn reused_blocks_move_to_the_main_queue() {
        assert_eq!(suite::eviction_order(&mut S3Fifo::new(), "+1 +2 +3 use1 use1 use2 +4"), [2, 3, 4, 1]);
    }

    #[test]
    fn repeated_search_returns_the_same_victim() {
        let mut policy = full();
        // Nine of the ten probationary blocks pass, which leaves the small queue below its share.
        let on_trial: Vec<BlockKey> =
            (0..100).map(BlockKey).filter(|&key| !policy.links.data(key).in_main).collect();
        for &key in &on_trial[..9] {
            (0..3).for_each(|_| policy.access(key, BlockTraits::default(), Timestamp(1)));
        }
        let first = policy.victim(Timestamp(1), &|_| false);
        assert!(policy.small.len() < 10);
        assert_eq!(policy.victim(Timestamp(1), &|_| false), first);
    }

    #[test]
    fn returning_block_enters_the_main_queue() {
        let mut policy = full();
        let (key, left) = evict(&mut policy);
        policy.insert(BlockKey(key), traits(left), Timestamp(2));
        assert!(policy.links.data(BlockKey(key)).in_main);
        let (key, _) = evict(&mut policy);
        policy.insert(BlockKey(key), traits(9999), Timestamp(3));
        assert!(!policy.links.data(BlockKey(key)).in_main);
    }

    #[test]
    fn ghosts_are_bounded_by_the_main_queue() {
        let policy = full();
        assert!((80..=90).contains(&policy.ghosts.len()), "{}", policy.ghosts.len());
    }
}
