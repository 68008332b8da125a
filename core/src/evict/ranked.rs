//! Blocks in the order of a number each of them has: what LFU and GDSF share.
//!
//! One queue per number that is in use, found by a tree: O(log of the different numbers) per operation, and
//! those are few where blocks have one size. Not here: what the number says (the policies beside this file).

use super::BlockKey;
use super::queue::{Links, Queue};
use std::collections::BTreeMap;

/// What is remembered of a resident block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ranking {
    /// The lowest leaves first.
    pub(super) rank: u64,
    /// Uses since it became resident.
    pub(super) uses: u32,
}

/// Resident blocks by rank; among equals, who got its rank first leaves first.
#[derive(Debug, Default)]
pub(super) struct Ranked {
    links: Links<Ranking>,
    queues: BTreeMap<u64, Queue>,
    queued: usize,
}

impl Ranked {
    pub(super) fn len(&self) -> usize {
        self.queued + self.links.parked_len()
    }

    /// What is known of a resident block, parked or not.
    pub(super) fn get(&self, key: BlockKey) -> Option<Ranking> {
        let resident = self.links.contains(key) || self.links.is_parked(key);
        resident.then(|| self.links.about(key))
    }

    /// Gives the block its place behind all of its rank, whatever place it had.
    pub(super) fn put(&mut self, key: BlockKey, ranking: Ranking) {
        self.remove(key);
        self.links.set_about(key, ranking);
        self.links.push_warm(self.queues.entry(ranking.rank).or_default(), key);
        self.queued += 1;
    }

    /// Takes a block out, if it is resident.
    pub(super) fn remove(&mut self, key: BlockKey) {
        if !self.links.unpark(key) {
            self.unqueue(key, Links::unlink);
        }
    }

    /// Takes a resident block out of its order.
    pub(super) fn park(&mut self, key: BlockKey) {
        self.unqueue(key, Links::park);
    }

    fn unqueue(&mut self, key: BlockKey, how: fn(&mut Links<Ranking>, &mut Queue, BlockKey)) {
        if !self.links.contains(key) {
            return;
        }
        let rank = self.links.about(key).rank;
        let Some(queue) = self.queues.get_mut(&rank) else { return };
        how(&mut self.links, queue, key);
        self.queued -= 1;
        if queue.len() == 0 {
            self.queues.remove(&rank);
        }
    }

    /// The first block that `spared` does not hold, with what is known of it.
    pub(super) fn lowest_unspared(&self, spared: &dyn Fn(BlockKey) -> bool) -> Option<(BlockKey, Ranking)> {
        let key = self.queues.values().find_map(|queue| self.links.coldest_unspared(queue, spared))?;
        Some((key, self.links.about(key)))
    }
}
