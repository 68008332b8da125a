//! What a lookup answers: the longest prefix that live nodes hold, cut into runs of equal holders.
//!
//! Not here: the table that is asked (`table.rs`) and what a router makes of the answer
//! (`crate::schedule`).

use smallvec::SmallVec;

use super::Index;
use super::holders::Held;
use crate::id::{BlockHash, Epoch, NodeId, Tier};

/// A live node that holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder {
    /// The node.
    pub node: NodeId,
    /// Its epoch when the lookup was made.
    pub epoch: Epoch,
    /// The fastest tier it holds the block in.
    pub tier: Tier,
}

/// Consecutive blocks with the same holders in the same tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderRun {
    /// Offset of the first block in the request.
    pub start_blocks: u32,
    /// Blocks in the run; at least one.
    pub len_blocks: u32,
    /// Who holds all of them, by ascending node; at least one.
    pub holders: SmallVec<[Holder; 4]>,
}

impl HolderRun {
    /// Offset after the last block of the run.
    #[must_use]
    pub fn end_blocks(&self) -> u32 {
        self.start_blocks + self.len_blocks
    }

    /// The hold of one node, if it holds the run.
    #[must_use]
    pub fn holder(&self, node: NodeId) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.node == node)
    }
}

/// The longest prefix of a request of which every block has at least one live holder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// In prefix order, without gaps, from block 0; neighbours differ.
    pub runs: Vec<HolderRun>,
}

impl PrefixMatch {
    /// Blocks from the start that one node holds without a gap.
    #[must_use]
    pub fn per_node(&self, node: NodeId) -> u32 {
        self.runs.iter().take_while(|run| run.holder(node).is_some()).last().map_or(0, HolderRun::end_blocks)
    }

    /// Blocks from the start that somebody holds.
    #[must_use]
    pub fn union_blocks(&self) -> u32 {
        self.runs.last().map_or(0, HolderRun::end_blocks)
    }

    /// Nodes that hold block 0, by ascending id: only they can serve a prefix on their own.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.runs.first().into_iter().flat_map(|run| run.holders.iter().map(|holder| holder.node))
    }
}

impl Index {
    /// Finds the longest prefix of `hashes` (in prefix order) that live nodes hold: one probe per
    /// block, stopping at the first block nobody holds. Blocks past `u32::MAX` are not looked at.
    #[must_use]
    pub fn longest_prefix(&self, hashes: &[BlockHash]) -> PrefixMatch {
        let mut runs: Vec<HolderRun> = Vec::new();
        let mut before: &[Held] = &[];
        for (&hash, offset) in hashes.iter().zip(0u32..u32::MAX) {
            let Some(holds) = self.table.find(hash) else { break };
            // Equal holds mean equal holders; only a change is looked into.
            if let Some(run) = runs.last_mut()
                && holds == before
            {
                run.len_blocks += 1;
                continue;
            }
            before = holds;
            let holders = self.live_holders(holds);
            match runs.last_mut() {
                _ if holders.is_empty() => break,
                Some(run) if run.holders == holders => run.len_blocks += 1,
                _ => runs.push(HolderRun { start_blocks: offset, len_blocks: 1, holders }),
            }
        }
        PrefixMatch { runs }
    }

    /// Live nodes among these holds, by ascending id: the order of slots tells of the past of one
    /// replica and must not show.
    fn live_holders(&self, holds: &[Held]) -> SmallVec<[Holder; 4]> {
        let mut holders: SmallVec<[Holder; 4]> =
            holds.iter().filter_map(|held| self.nodes.holder(held)).collect();
        holders.sort_unstable();
        holders
    }
}
