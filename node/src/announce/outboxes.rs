//! One outbox per shard of the index: a change goes to the shard that lists its blocks, and each
//! shard numbers its own batches. Pure.
//!
//! Not here: queueing within a shard (`outbox`) and sending (`link`).

use kv_core::id::{BlockHash, Epoch, Seq};
use kv_core::index::command::Change;

use super::outbox::Outbox;

/// A position in the streams of all shards: one batch number per shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardPositions {
    /// The epoch.
    pub epoch: Epoch,
    /// Number by shard; the first entry is shard 1.
    pub seqs: Vec<Seq>,
}

/// The outboxes of all shards; see the module.
#[derive(Debug, Default)]
pub struct Outboxes {
    epoch: Option<Epoch>,
    /// Shard 1 first; empty before the first join.
    shards: Vec<Outbox>,
}

impl Outboxes {
    /// Starts a new epoch with `shards` shards: announces all held blocks, in each shard from
    /// number 1 on.
    pub fn joined(&mut self, epoch: Epoch, shards: u16, everything: Vec<Change>) {
        self.epoch = Some(epoch);
        self.shards.resize_with(usize::from(shards.max(1)), Outbox::default);
        let parts = self.split_by_shard(everything);
        for (outbox, part) in self.shards.iter_mut().zip(parts) {
            outbox.joined(epoch, part);
        }
    }

    /// Ends the epoch. Changes are dropped, because the next epoch starts with a full announcement.
    pub fn fenced(&mut self) {
        self.shards.iter_mut().for_each(Outbox::fenced);
    }

    /// Adds changes in order.
    pub fn push(&mut self, changes: Vec<Change>) {
        let parts = self.split_by_shard(changes);
        for (outbox, part) in self.shards.iter_mut().zip(parts) {
            if !part.is_empty() {
                outbox.push(part);
            }
        }
    }

    /// The outbox of a shard, counted from 1; `None` before the first join.
    pub fn shard(&mut self, shard: u16) -> Option<&mut Outbox> {
        self.shards.get_mut(usize::from(shard).checked_sub(1)?)
    }

    /// The part of `everything` that one shard lists.
    #[must_use]
    pub fn part(&self, shard: u16, everything: Vec<Change>) -> Vec<Change> {
        let mut parts = self.split_by_shard(everything);
        let at = usize::from(shard).saturating_sub(1);
        if at < parts.len() { parts.swap_remove(at) } else { Vec::new() }
    }

    /// The shard that lists a block, and the number that makes all changes pushed so far visible
    /// there.
    pub fn position(&mut self, block: BlockHash) -> Option<(u16, Epoch, Seq)> {
        let shard = block.shard(self.count());
        let (epoch, seq) = self.shard(shard)?.position()?;
        Some((shard, epoch, seq))
    }

    /// The numbers that make all changes pushed so far visible, by shard; `None` before the first
    /// join.
    pub fn positions(&mut self) -> Option<ShardPositions> {
        let epoch = self.epoch?;
        let last = |outbox: &mut Outbox| outbox.position().map_or(Seq(0), |(_, seq)| seq);
        Some(ShardPositions { epoch, seqs: self.shards.iter_mut().map(last).collect() })
    }

    /// Acknowledged numbers, by shard.
    #[must_use]
    pub fn acked(&self) -> ShardPositions {
        let epoch = self.epoch.unwrap_or_default();
        ShardPositions { epoch, seqs: self.shards.iter().map(Outbox::acked).collect() }
    }

    /// Total of batch numbers in use, over all shards.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.shards.iter().map(|outbox| outbox.last().0).sum()
    }

    /// Number of shards; 0 before the first join.
    #[must_use]
    pub fn count(&self) -> u16 {
        u16::try_from(self.shards.len()).unwrap_or(u16::MAX)
    }

    fn split_by_shard(&self, changes: Vec<Change>) -> Vec<Vec<Change>> {
        let shards = self.count();
        if shards <= 1 {
            return vec![changes];
        }
        let mut parts = vec![Vec::new(); usize::from(shards)];
        for change in changes {
            split_change(change, shards, &mut parts);
        }
        parts
    }
}

/// Splits one change by shard. All blocks of a chain belong to one shard, so a run stays whole.
fn split_change(change: Change, shards: u16, parts: &mut [Vec<Change>]) {
    let (blocks, parent) = match &change {
        Change::Cleared => return parts.iter_mut().for_each(|part| part.push(Change::Cleared)),
        Change::Stored { blocks, parent, .. } => (blocks, *parent),
        Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => (blocks, None),
    };
    let Some(first) = blocks.first().map(|block| block.shard(shards)) else { return };
    if blocks.iter().all(|block| block.shard(shards) == first) {
        return parts[usize::from(first) - 1].push(change);
    }
    let mut before = parent;
    for run in blocks.chunk_by(|one, next| one.shard(shards) == next.shard(shards)) {
        let (blocks, parent) = (run.to_vec(), before);
        before = run.last().copied();
        let change = match &change {
            Change::Stored { tier, .. } => Change::Stored { parent, blocks, tier: *tier },
            Change::Moved { from, to, .. } => Change::Moved { blocks, from: *from, to: *to },
            Change::Dropped { tier, cause, .. } => Change::Dropped { blocks, tier: *tier, cause: *cause },
            Change::Cleared => Change::Cleared,
        };
        parts[usize::from(run[0].shard(shards)) - 1].push(change);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kv_core::id::Tier;

    fn block(tag: u8, number: u8) -> BlockHash {
        let mut bytes = [number; _];
        bytes[0] = tag;
        BlockHash(bytes)
    }

    fn stored(blocks: Vec<BlockHash>) -> Change {
        Change::Stored { parent: None, blocks, tier: Tier::Dram }
    }

    #[test]
    fn changes_go_to_the_shard_of_their_blocks() {
        let mut outboxes = Outboxes::default();
        outboxes.joined(Epoch(1), 4, vec![stored(vec![block(0, 1), block(0, 2)])]);
        outboxes.push(vec![
            stored(vec![block(200, 1)]),
            Change::Dropped {
                blocks: vec![block(0, 1), block(200, 1), block(0, 2)],
                tier: Tier::Dram,
                cause: Default::default(),
            },
        ]);
        let batch = outboxes.shard(1).unwrap().next_batch().unwrap();
        let dropped = |blocks| Change::Dropped { blocks, tier: Tier::Dram, cause: Default::default() };
        let first = vec![
            stored(vec![block(0, 1), block(0, 2)]),
            dropped(vec![block(0, 1)]),
            dropped(vec![block(0, 2)]),
        ];
        assert_eq!((batch.seq, batch.changes), (Seq(1), first));
        let batch = outboxes.shard(4).unwrap().next_batch().unwrap();
        assert_eq!(batch.changes, [stored(vec![block(200, 1)]), dropped(vec![block(200, 1)])]);
        assert_eq!(outboxes.shard(2).unwrap().next_batch(), None);
        assert!(outboxes.shard(0).is_none() && outboxes.shard(5).is_none());
    }

    #[test]
    fn positions_are_counted_per_shard() {
        let mut outboxes = Outboxes::default();
        assert_eq!((outboxes.position(block(0, 1)), outboxes.positions()), (None, None));
        outboxes.joined(Epoch(3), 2, Vec::new());
        for number in 0..3 {
            outboxes.push(vec![stored(vec![block(255, number)])]);
            outboxes.shard(2).unwrap().next_batch();
        }
        outboxes.push(vec![stored(vec![block(1, 1)])]);
        assert_eq!(outboxes.position(block(255, 9)), Some((2, Epoch(3), Seq(3))));
        assert_eq!(outboxes.position(block(1, 9)), Some((1, Epoch(3), Seq(1))));
        assert_eq!(
            outboxes.positions(),
            Some(ShardPositions { epoch: Epoch(3), seqs: vec![Seq(1), Seq(3)] })
        );
    }
}
