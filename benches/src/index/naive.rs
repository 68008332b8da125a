//! A naive index: block hash to the list of its nodes, in the standard hash map.
//!
//! Not here: epochs, fencing, tiers, snapshots. It does less than kvfleet's index and gives the
//! same answers to this bench's lookups.

use std::collections::HashMap;

use kv_core::id::{BlockHash, Epoch, NodeId, Tier};
use kv_core::index::{Holder, HolderRun, PrefixMatch};

use super::workload::Workload;

#[derive(Default)]
pub(super) struct NaiveIndex {
    nodes: HashMap<BlockHash, Vec<NodeId>>,
}

impl NaiveIndex {
    pub(super) fn filled(workload: &Workload) -> Self {
        let mut index = Self::default();
        for (node, run) in workload.runs() {
            run.iter().for_each(|&hash| index.store(node, hash));
        }
        index
    }

    fn store(&mut self, node: NodeId, hash: BlockHash) {
        let nodes = self.nodes.entry(hash).or_default();
        if let Err(place) = nodes.binary_search(&node) {
            nodes.insert(place, node);
        }
    }

    pub(super) fn longest_prefix(&self, hashes: &[BlockHash]) -> PrefixMatch {
        let mut runs: Vec<HolderRun> = Vec::new();
        let mut before: &[NodeId] = &[];
        for (start_blocks, hash) in (0u32..).zip(hashes) {
            let Some(nodes) = self.nodes.get(hash) else { break };
            match runs.last_mut() {
                Some(run) if nodes == before => run.len_blocks += 1,
                _ => runs.push(HolderRun {
                    start_blocks,
                    len_blocks: 1,
                    holders: nodes.iter().map(|&node| holder(node)).collect(),
                }),
            }
            before = nodes;
        }
        PrefixMatch { runs }
    }
}

fn holder(node: NodeId) -> Holder {
    Holder { node, epoch: Epoch(1), tier: Tier::Dram }
}
