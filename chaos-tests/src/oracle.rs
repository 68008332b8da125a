//! What must be true because a router acknowledged it, and what the routers were seen to say.
//!
//! Not here: any judgement (`invariants/`). Facts whose acknowledgement was lost on the way are not
//! written down until a later acknowledgement settles them.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::id::BlockHash;

/// How many first blocks of each chain a node holds.
pub type Holdings = BTreeMap<u32, u32>;

/// The last thing a node was told is committed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acknowledged {
    /// Under which epoch.
    pub epoch: u64,
    /// Number of the batch.
    pub seq: u64,
    /// What the node holds after it.
    pub holdings: Holdings,
}

/// What of a chain every reader must be told a node holds: acknowledged, and not being taken back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sure {
    /// First blocks of the chain.
    pub blocks: u32,
    /// How often any of them were taken back; a question during which this grew says nothing.
    pub falls: u64,
}

/// A pin that was acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinFact {
    /// Who may end it.
    pub owner: String,
    /// What it holds.
    pub blocks: Vec<BlockHash>,
}

/// Where a router said it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Which router.
    pub router: u64,
    /// Of which group it speaks.
    pub group: u32,
    /// Last log entry of the group it has applied.
    pub applied: u64,
    /// Digest of its replicated state.
    pub digest: Vec<u8>,
}

/// What a router said of one chain: the first blocks each (node, epoch) holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Which router, by position.
    pub router: usize,
    /// Which chain.
    pub chain: u32,
    /// Holders and their share from the first block.
    pub holders: BTreeMap<(u32, u64), u32>,
}

/// Everything a run has found out.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// Per node, what was acknowledged last.
    pub nodes: BTreeMap<u32, Acknowledged>,
    /// Per node and chain, what readers must be told.
    pub sure: BTreeMap<(u32, u32), Sure>,
    /// How often the whole index was thrown away: nodes then join again, and hold what they held.
    pub losses: u64,
    /// Every epoch given to a node, in the order in which they came.
    pub epochs: BTreeMap<u32, Vec<u64>>,
    /// Pins in force.
    pub pins: BTreeMap<u64, PinFact>,
    /// Pin numbers that were ever used; none is used twice.
    pub pins_used: BTreeSet<u64>,
    /// Every standing that was seen.
    pub standings: Vec<Standing>,
}

impl Oracle {
    /// A node was given an epoch.
    pub fn joined(&mut self, node: u32, epoch: u64) {
        self.epochs.entry(node).or_default().push(epoch);
        self.nodes.insert(node, Acknowledged { epoch, ..Acknowledged::default() });
    }

    /// A node is about to say that it holds only so many first blocks of a chain.
    pub fn falls_to(&mut self, node: u32, chain: u32, blocks: u32) {
        let sure = self.sure.entry((node, chain)).or_default();
        sure.blocks = sure.blocks.min(blocks);
        sure.falls += 1;
    }

    /// A node is about to take another epoch: nothing of the present one counts any more.
    pub fn leaves_epoch(&mut self, node: u32) {
        for ((_, _), sure) in self.sure.range_mut((node, 0)..=(node, u32::MAX)) {
            (sure.blocks, sure.falls) = (0, sure.falls + 1);
        }
    }

    /// A batch was acknowledged, after which the node holds this.
    pub fn acknowledged(&mut self, node: u32, epoch: u64, seq: u64, holdings: &Holdings) {
        for (chain, blocks) in holdings {
            self.sure.entry((node, *chain)).or_default().blocks = *blocks;
        }
        self.nodes.insert(node, Acknowledged { epoch, seq, holdings: holdings.clone() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_acknowledged_and_stays_is_sure() {
        let mut oracle = Oracle::default();
        let sure = |oracle: &Oracle| oracle.sure.get(&(1, 7)).copied().unwrap_or_default();
        oracle.joined(1, 1);
        assert_eq!(sure(&oracle), Sure { blocks: 0, falls: 0 });
        oracle.acknowledged(1, 1, 1, &[(7, 5)].into());
        assert_eq!(sure(&oracle), Sure { blocks: 5, falls: 0 });
        oracle.falls_to(1, 7, 3);
        assert_eq!(sure(&oracle), Sure { blocks: 3, falls: 1 }, "from the order on, not from its answer");
        oracle.acknowledged(1, 1, 2, &[(7, 3)].into());
        oracle.leaves_epoch(2);
        assert_eq!(sure(&oracle), Sure { blocks: 3, falls: 1 }, "another node");
        oracle.leaves_epoch(1);
        assert_eq!(sure(&oracle), Sure { blocks: 0, falls: 2 });
    }
}
