//! Facts that must hold because a router acknowledged them, and observed answers of routers.
//!
//! Not here: checks (`invariants/`). A fact with a lost acknowledgement is recorded only when a
//! later acknowledgement confirms it.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::id::BlockHash;

/// Number of leading blocks that a node holds, by chain.
pub type Holdings = BTreeMap<u32, u32>;

/// The last state that was acknowledged to a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcknowledgedState {
    /// Epoch of the acknowledgement.
    pub epoch: u64,
    /// Number of the batch.
    pub seq: u64,
    /// Holdings of the node after it.
    pub holdings: Holdings,
}

/// A node's part of a chain that every router must report: acknowledged, and not being reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CertainHolding {
    /// Number of leading blocks of the chain.
    pub blocks: u32,
    /// Number of reductions; a query during which this grew is not evaluated.
    pub reductions: u64,
}

/// An acknowledged pin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinFact {
    /// Owner that may end it.
    pub owner: String,
    /// Pinned blocks.
    pub blocks: Vec<BlockHash>,
}

/// Observed state of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// The router.
    pub router: u64,
    /// The Raft group.
    pub group: u32,
    /// Last applied log entry of the group.
    pub applied: u64,
    /// Digest of its replicated state.
    pub digest: Vec<u8>,
}

/// A router's answer for one chain: leading blocks by (node, epoch).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderAnswer {
    /// Position of the router.
    pub router: usize,
    /// The chain.
    pub chain: u32,
    /// Holders with their number of leading blocks.
    pub holders: BTreeMap<(u32, u64), u32>,
}

/// All facts of a run.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// Last acknowledged state, by node.
    pub nodes: BTreeMap<u32, AcknowledgedState>,
    /// Blocks that routers must report, by node and chain.
    pub certain: BTreeMap<(u32, u32), CertainHolding>,
    /// Number of losses of the whole index; nodes then join again with the same holdings.
    pub index_losses: u64,
    /// All epochs of each node, in the order of assignment.
    pub epochs: BTreeMap<u32, Vec<u64>>,
    /// Pins in force.
    pub pins: BTreeMap<u64, PinFact>,
    /// Pin numbers ever used; none is used twice.
    pub pins_used: BTreeSet<u64>,
    /// All observed replica states.
    pub statuses: Vec<ReplicaStatus>,
}

impl Oracle {
    /// Records that a node received an epoch.
    pub fn joined(&mut self, node: u32, epoch: u64) {
        self.epochs.entry(node).or_default().push(epoch);
        self.nodes.insert(node, AcknowledgedState { epoch, ..AcknowledgedState::default() });
    }

    /// Records that a node is about to reduce its part of a chain to `blocks`.
    pub fn reduces_to(&mut self, node: u32, chain: u32, blocks: u32) {
        let sure = self.certain.entry((node, chain)).or_default();
        sure.blocks = sure.blocks.min(blocks);
        sure.reductions += 1;
    }

    /// Records that a node is about to take another epoch: its current holdings no longer count.
    pub fn leaves_epoch(&mut self, node: u32) {
        for ((_, _), sure) in self.certain.range_mut((node, 0)..=(node, u32::MAX)) {
            (sure.blocks, sure.reductions) = (0, sure.reductions + 1);
        }
    }

    /// Records an acknowledged batch, with the holdings after it.
    pub fn acknowledged(&mut self, node: u32, epoch: u64, seq: u64, holdings: &Holdings) {
        for (chain, blocks) in holdings {
            self.certain.entry((node, *chain)).or_default().blocks = *blocks;
        }
        self.nodes.insert(node, AcknowledgedState { epoch, seq, holdings: holdings.clone() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_acknowledged_and_kept_blocks_are_certain() {
        let mut oracle = Oracle::default();
        let sure = |oracle: &Oracle| oracle.certain.get(&(1, 7)).copied().unwrap_or_default();
        oracle.joined(1, 1);
        assert_eq!(sure(&oracle), CertainHolding { blocks: 0, reductions: 0 });
        oracle.acknowledged(1, 1, 1, &[(7, 5)].into());
        assert_eq!(sure(&oracle), CertainHolding { blocks: 5, reductions: 0 });
        oracle.reduces_to(1, 7, 3);
        assert_eq!(
            sure(&oracle),
            CertainHolding { blocks: 3, reductions: 1 },
            "a reduction counts from the command on, not from its acknowledgement"
        );
        oracle.acknowledged(1, 1, 2, &[(7, 3)].into());
        oracle.leaves_epoch(2);
        assert_eq!(sure(&oracle), CertainHolding { blocks: 3, reductions: 1 }, "another node");
        oracle.leaves_epoch(1);
        assert_eq!(sure(&oracle), CertainHolding { blocks: 0, reductions: 2 });
    }
}
