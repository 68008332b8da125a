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

    /// A batch was acknowledged, after which the node holds this.
    pub fn acknowledged(&mut self, node: u32, epoch: u64, seq: u64, holdings: &Holdings) {
        self.nodes.insert(node, Acknowledged { epoch, seq, holdings: holdings.clone() });
    }
}
