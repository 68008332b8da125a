//! Where each saved block becomes visible, so that a route call can ask for a replica that has it.
//!
//! Without this a request could be routed by a replica that has not applied the save before it, and
//! would miss a block that is there. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kv_core::id::BlockHash;
use kvfleet_proto::pb::Seen;

/// The announce batch of every block saved in this replay.
#[derive(Debug, Default)]
pub(super) struct Visible {
    at: HashMap<BlockHash, Seen>,
    over: BTreeSet<(u32, u64)>,
}

impl Visible {
    /// `blocks` were saved and are visible from `seen` on.
    pub(super) fn saved(&mut self, blocks: &[BlockHash], seen: &[Seen]) {
        if let Some(seen) = seen.last() {
            self.at.extend(blocks.iter().map(|block| (*block, *seen)));
        }
    }

    /// An epoch is over: what it had not announced nobody will ever see, so nobody may wait for it.
    pub(super) fn epoch_over(&mut self, node: u32, epoch: u64) {
        self.over.insert((node, epoch));
    }

    /// What a replica must have seen to know all that is saved of `blocks`: one point per node and shard.
    pub(super) fn needed(&self, blocks: &[BlockHash]) -> Vec<Seen> {
        let mut needed: BTreeMap<(u32, u32), Seen> = BTreeMap::new();
        let live = |seen: &&Seen| !self.over.contains(&(seen.node, seen.epoch));
        for seen in blocks.iter().filter_map(|block| self.at.get(block)).filter(live) {
            let latest = needed.entry((seen.node, seen.shard)).or_insert(*seen);
            if (seen.epoch, seen.seq) > (latest.epoch, latest.seq) {
                *latest = *seen;
            }
        }
        needed.into_values().collect()
    }

    /// A block that was last saved on this node, if any.
    pub(super) fn block_on(&self, node: u32) -> Option<BlockHash> {
        self.at.iter().find(|(_, seen)| seen.node == node).map(|(block, _)| *block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u8) -> BlockHash {
        BlockHash([number; 16])
    }

    fn seen(node: u32, epoch: u64, seq: u64) -> Seen {
        Seen { node, epoch, seq, shard: 1 }
    }

    #[test]
    fn the_latest_point_of_each_node_is_needed() {
        let mut visible = Visible::default();
        visible.saved(&[block(1)], &[seen(1, 1, 5)]);
        visible.saved(&[block(2)], &[seen(1, 1, 9)]);
        visible.saved(&[block(3)], &[seen(2, 1, 3)]);
        let all = [block(1), block(2), block(3), block(4)];
        assert_eq!(visible.needed(&all), vec![seen(1, 1, 9), seen(2, 1, 3)]);
        assert_eq!(visible.needed(&all[..1]), vec![seen(1, 1, 5)]);
        assert_eq!(visible.needed(&all[3..]), vec![]);
    }

    #[test]
    fn a_later_epoch_is_later() {
        let mut visible = Visible::default();
        visible.saved(&[block(1)], &[seen(1, 1, 500)]);
        visible.saved(&[block(2)], &[seen(1, 2, 1)]);
        assert_eq!(visible.needed(&[block(1), block(2)]), vec![seen(1, 2, 1)]);
    }

    #[test]
    fn nobody_waits_for_a_dead_epoch() {
        let mut visible = Visible::default();
        visible.saved(&[block(1)], &[seen(1, 1, 5)]);
        visible.epoch_over(1, 1);
        assert_eq!(visible.needed(&[block(1)]), vec![]);
        visible.saved(&[block(1)], &[seen(1, 2, 1)]);
        assert_eq!(visible.needed(&[block(1)]), vec![seen(1, 2, 1)]);
    }
}
