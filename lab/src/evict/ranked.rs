//! Blocks ordered by a number per block, shared by LFU and GDSF.
//!
//! One queue per distinct number, found by a tree: O(log of the distinct numbers) per operation.
//! With blocks of one size these are few. Not here: the meaning of the number (the policies).

use kv_core::evict::BlockKey;
use kv_core::evict::queue::{Links, Queue};
use std::collections::BTreeMap;

/// Data of a resident block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RankEntry {
    /// The lowest leaves first.
    pub(super) rank: u64,
    /// Uses since it became resident.
    pub(super) uses: u32,
}

/// Resident blocks by rank; among equal ranks the one that got its rank first leaves first.
#[derive(Debug, Default)]
pub(super) struct RankedBlocks {
    links: Links<RankEntry>,
    queues: BTreeMap<u64, Queue>,
    queued: usize,
}

impl RankedBlocks {
    pub(super) fn len(&self) -> usize {
        self.queued + self.links.parked_len()
    }

    /// Data of a resident block, parked or not.
    pub(super) fn get(&self, key: BlockKey) -> Option<RankEntry> {
        let resident = self.links.contains(key) || self.links.is_parked(key);
        resident.then(|| self.links.data(key))
    }

    /// Moves the block behind all blocks of its new rank.
    pub(super) fn put(&mut self, key: BlockKey, ranking: RankEntry) {
        self.remove(key);
        self.links.set_data(key, ranking);
        self.links.push_warm(self.queues.entry(ranking.rank).or_default(), key);
        self.queued += 1;
    }

    /// Removes a block, if it is resident.
    pub(super) fn remove(&mut self, key: BlockKey) {
        if !self.links.unpark(key) {
            self.unqueue(key, Links::unlink);
        }
    }

    /// Parks a queued block.
    pub(super) fn park(&mut self, key: BlockKey) {
        self.unqueue(key, Links::park);
    }

    fn unqueue(&mut self, key: BlockKey, how: fn(&mut Links<RankEntry>, &mut Queue, BlockKey)) {
        if !self.links.contains(key) {
            return;
        }
        let rank = self.links.data(key).rank;
        let Some(queue) = self.queues.get_mut(&rank) else { return };
        how(&mut self.links, queue, key);
        self.queued -= 1;
        if queue.is_empty() {
            self.queues.remove(&rank);
        }
    }

    /// The first block that `spared` does not protect, with its data.
    pub(super) fn lowest_evictable(
        &self,
        spared: &dyn Fn(BlockKey) -> bool,
    ) -> Option<(BlockKey, RankEntry)> {
        let key = self.queues.values().find_map(|queue| self.links.coldest_evictable(queue, spared))?;
        Some((key, self.links.data(key)))
    }
}
