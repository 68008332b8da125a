//! Announce positions of saved blocks, so that a route call can ask for a replica that has seen
//! them.
//!
//! Otherwise a replica that has not applied the save could route a request and miss a block that is
//! stored. Free of I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kv_core::id::BlockHash;
use kvfleet_proto::pb::AnnouncePosition;

/// The announce position of every block saved in this replay.
#[derive(Debug, Default)]
pub(super) struct SavePositions {
    positions: HashMap<BlockHash, AnnouncePosition>,
    ended_epochs: BTreeSet<(u32, u64)>,
}

impl SavePositions {
    /// Records that `blocks` were saved and are visible from the last position of `seen` on.
    pub(super) fn record(&mut self, blocks: &[BlockHash], seen: &[AnnouncePosition]) {
        if let Some(seen) = seen.last() {
            self.positions.extend(blocks.iter().map(|block| (*block, *seen)));
        }
    }

    /// Marks an epoch as ended: its unannounced blocks never become visible, so requests must not
    /// wait for them.
    pub(super) fn end_epoch(&mut self, node: u32, epoch: u64) {
        self.ended_epochs.insert((node, epoch));
    }

    /// The positions a replica must have seen to know every saved block of `blocks`: one per node
    /// and shard.
    pub(super) fn needed(&self, blocks: &[BlockHash]) -> Vec<AnnouncePosition> {
        let mut needed: BTreeMap<(u32, u32), AnnouncePosition> = BTreeMap::new();
        let live = |seen: &&AnnouncePosition| !self.ended_epochs.contains(&(seen.node, seen.epoch));
        for seen in blocks.iter().filter_map(|block| self.positions.get(block)).filter(live) {
            let latest = needed.entry((seen.node, seen.shard)).or_insert(*seen);
            if (seen.epoch, seen.seq) > (latest.epoch, latest.seq) {
                *latest = *seen;
            }
        }
        needed.into_values().collect()
    }

    /// A block last saved on this node, if any.
    pub(super) fn block_on(&self, node: u32) -> Option<BlockHash> {
        self.positions.iter().find(|(_, seen)| seen.node == node).map(|(block, _)| *block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u8) -> BlockHash {
        BlockHash([number; _])
    }

    fn position(node: u32, epoch: u64, seq: u64) -> AnnouncePosition {
        AnnouncePosition { node, epoch, seq, shard: 1 }
    }

    #[test]
    fn needs_the_latest_position_of_each_node() {
        let mut visible = SavePositions::default();
        visible.record(&[block(1)], &[position(1, 1, 5)]);
        visible.record(&[block(2)], &[position(1, 1, 9)]);
        visible.record(&[block(3)], &[position(2, 1, 3)]);
        let all = [block(1), block(2), block(3), block(4)];
        assert_eq!(visible.needed(&all), vec![position(1, 1, 9), position(2, 1, 3)]);
        assert_eq!(visible.needed(&all[..1]), vec![position(1, 1, 5)]);
        assert_eq!(visible.needed(&all[3..]), vec![]);
    }

    #[test]
    fn later_epochs_win() {
        let mut visible = SavePositions::default();
        visible.record(&[block(1)], &[position(1, 1, 500)]);
        visible.record(&[block(2)], &[position(1, 2, 1)]);
        assert_eq!(visible.needed(&[block(1), block(2)]), vec![position(1, 2, 1)]);
    }

    #[test]
    fn ended_epochs_are_not_waited_for() {
        let mut visible = SavePositions::default();
        visible.record(&[block(1)], &[position(1, 1, 5)]);
        visible.end_epoch(1, 1);
        assert_eq!(visible.needed(&[block(1)]), vec![]);
        visible.record(&[block(1)], &[position(1, 2, 1)]);
        assert_eq!(visible.needed(&[block(1)]), vec![position(1, 2, 1)]);
    }
}
