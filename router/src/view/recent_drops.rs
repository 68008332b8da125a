//! Recent drops of blocks by nodes, from the applied log: node, cause and time.
//!
//! A table of fixed size: a colliding block replaces the older one. A hint for people and counters
//! only. Not here: the blocks that are held (`kv_core::index`).

use std::time::Duration;

use kv_core::id::{BlockHash, NodeId, Timestamp};
use kv_core::index::command::{AnnounceOutcome, Announcement, Change, DropCause};

/// Slots of one shard's table: a quarter of a million blocks, six megabytes once the first is
/// dropped.
const SLOTS: usize = 1 << 18;

#[derive(Clone, Copy)]
struct DropSlot {
    /// The part of the hash that does not select the slot.
    tag: u64,
    at: Timestamp,
    node: NodeId,
    cause: DropCause,
}

/// Blocks dropped by one announcement of a batch.
pub(crate) struct DroppedBlocks {
    nth: usize,
    node: NodeId,
    cause: DropCause,
    blocks: Vec<BlockHash>,
}

/// Table of dropped blocks.
#[derive(Default)]
pub(crate) struct RecentDrops {
    /// Allocated with the first drop.
    slots: Vec<Option<DropSlot>>,
}

impl RecentDrops {
    /// Collects the drops of a batch of announcements.
    pub(crate) fn from_batch(batch: &[Announcement]) -> Vec<DroppedBlocks> {
        let mut all = Vec::new();
        for (nth, Announcement { node, changes, .. }) in batch.iter().enumerate() {
            for change in changes {
                if let Change::Dropped { blocks, cause, .. } = change {
                    all.push(DroppedBlocks { nth, node: *node, cause: *cause, blocks: blocks.clone() });
                }
            }
        }
        all
    }

    /// Records the drops of those announcements that were applied.
    pub(crate) fn record_applied(
        &mut self,
        dropped: &[DroppedBlocks],
        outcomes: &[AnnounceOutcome],
        now: Timestamp,
    ) {
        let is_applied =
            |drops: &&DroppedBlocks| matches!(outcomes.get(drops.nth), Some(AnnounceOutcome::Applied { .. }));
        for DroppedBlocks { node, cause, blocks, .. } in dropped.iter().filter(is_applied) {
            blocks.iter().for_each(|block| self.insert(*block, *node, *cause, now));
        }
    }

    fn insert(&mut self, block: BlockHash, node: NodeId, cause: DropCause, at: Timestamp) {
        if self.slots.is_empty() {
            self.slots = vec![None; SLOTS];
        }
        let (place, mark) = slot_of(block);
        self.slots[place] = Some(DropSlot { tag: mark, at, node, cause });
    }

    /// The node that last dropped a block, the cause, and the time since.
    pub(crate) fn get(&self, block: BlockHash, now: Timestamp) -> Option<(NodeId, DropCause, Duration)> {
        let (place, mark) = slot_of(block);
        let known = self.slots.get(place).copied().flatten().filter(|known| known.tag == mark)?;
        Some((known.node, known.cause, now.since(known.at)))
    }
}

fn slot_of(block: BlockHash) -> (usize, u64) {
    let half = |from: usize| u64::from_le_bytes(std::array::from_fn(|at| block.0[from + at]));
    // Hashes are uniform already; mixing is cheap insurance.
    let mixed = (half(0) ^ half(8).rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as usize % SLOTS, half(0) ^ half(8).rotate_left(17))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::id::{Epoch, Seq, Tier};

    fn block(number: u64) -> BlockHash {
        BlockHash::from_words(number, number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn dropped(node: u32, numbers: std::ops::Range<u64>, cause: DropCause) -> Announcement {
        let blocks = numbers.map(block).collect();
        let changes = vec![Change::Dropped { blocks, tier: Tier::Dram, cause }];
        Announcement { node: NodeId(node), epoch: Epoch(1), seq: Seq(1), changes }
    }

    fn record(departed: &mut RecentDrops, batch: &[Announcement], at: Timestamp) {
        let outcomes = vec![AnnounceOutcome::Applied { next: Seq(2), unlisted: 0 }; batch.len()];
        departed.record_applied(&RecentDrops::from_batch(batch), &outcomes, at);
    }

    #[test]
    fn the_last_drop_of_a_block_is_returned() {
        let mut departed = RecentDrops::default();
        assert_eq!(departed.get(block(1), Timestamp(5)), None);
        record(
            &mut departed,
            &[dropped(1, 0..4, DropCause::Capacity), dropped(2, 1..2, DropCause::Ttl)],
            Timestamp(1_000_000),
        );
        let at = Timestamp(3_000_000);
        assert_eq!(
            departed.get(block(0), at),
            Some((NodeId(1), DropCause::Capacity, Duration::from_secs(2)))
        );
        assert_eq!(departed.get(block(1), at), Some((NodeId(2), DropCause::Ttl, Duration::from_secs(2))));
        assert_eq!(departed.get(block(4), at), None);
    }

    #[test]
    fn memory_is_bounded_and_blocks_are_not_confused() {
        let mut departed = RecentDrops::default();
        record(&mut departed, &[dropped(1, 0..1 << 20, DropCause::Capacity)], Timestamp(1));
        assert_eq!(departed.slots.len(), SLOTS);
        let known = |numbers: std::ops::Range<u64>| {
            numbers.filter(|number| departed.get(block(*number), Timestamp(1)).is_some()).count()
        };
        assert_eq!(known(1 << 21..1 << 22), 0);
        assert!(known(0..1 << 20) > SLOTS / 2);
    }
}
