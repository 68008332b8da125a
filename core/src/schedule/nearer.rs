//! What it would save if an instance's own node held what others hold: by how much sooner each block of a request would be there, at the
//! prices that the decision was made with.
//!
//! Not here: how often that is so, and what is made of it (`crate::place::hot`).

use std::ops::Range;

use smallvec::SmallVec;

use super::decision::{Decision, Source};
use super::fleet::{Fleet, LiveNode};
use super::lanes::Reader;
use crate::id::{InstanceId, NodeId, Tier};

impl Decision {
    /// Blocks that the own node of its instance holds, from the first that is not in GPU memory on.
    #[must_use]
    pub fn overlap_blocks(&self) -> u32 {
        let chosen = self.candidates.iter().find(|candidate| candidate.instance == self.instance);
        chosen.map_or(0, |candidate| candidate.overlap_blocks)
    }

    /// Blocks that the own node of its instance does not hold, of the `held_blocks` leading ones that nodes do: they come from afar or are
    /// computed. Those in GPU memory are left out.
    #[must_use]
    pub fn afar_blocks(&self, held_blocks: u32) -> Range<u32> {
        self.resident_blocks.saturating_add(self.overlap_blocks())..held_blocks
    }
}

impl Fleet {
    /// The node next to an instance, where that is live, takes new blocks, and the instance reads from nodes at all.
    #[must_use]
    pub fn own_node(&self, instance: InstanceId) -> Option<NodeId> {
        let node = self.instance(instance).filter(|instance| instance.fetches)?.node?;
        self.live(node).filter(|live| live.weight > 0).map(|live| live.node)
    }

    /// By how much sooner each of these blocks would be there if the instance's own node held it, in microseconds. What no source covers is computed.
    /// Nothing of an instance that has no such node.
    #[must_use]
    pub fn nearer_us(
        &self,
        instance: InstanceId,
        blocks: Range<u32>,
        block_tokens: u32,
        sources: &[Source],
    ) -> Option<Vec<f64>> {
        let own = self.live(self.own_node(instance)?)?;
        let (_, paths) = self.with_paths(instance)?;
        let stream_us = |live: &LiveNode, tier, is_own| {
            let price = live.price(tier, Reader { is_own, path: paths.to(live.node) }, &self.profile);
            us(live.stream_ns(price.lane, block_tokens.into(), block_tokens, &self.profile))
        };
        let (near_us, speeds) = (stream_us(own, Tier::Dram, true), self.speeds());
        // Once for each source: this is asked beside decisions. What the own node has behind a gap is as near as it gets, and of a node that has gone
        // meanwhile nothing is known.
        let far_us = |source: &Source| match self.live(source.node).filter(|live| live.node != own.node) {
            Some(live) => stream_us(live, source.tier, false),
            None => 0.0,
        };
        let priced: SmallVec<[(&Source, f64); 8]> =
            sources.iter().map(|source| (source, far_us(source))).collect();
        let far_us = |block: u32| {
            let covers = |source: &Source| {
                block.checked_sub(source.start_blocks).is_some_and(|at| at < source.len_blocks)
            };
            match priced.iter().find(|(source, _)| covers(source)) {
                Some((_, us)) => *us,
                None => {
                    let context = u64::from(block) * u64::from(block_tokens);
                    us(speeds.prefill_ns(context, block_tokens.into()))
                }
            }
        };
        Some(blocks.map(|block| (far_us(block) - near_us).max(0.0)).collect())
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1_000.0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::id::{Epoch, Timestamp};
    use crate::schedule::{HardwareProfile, Instance, Load};

    const TOKENS: u32 = 256;

    fn fleet(weight: u32, fetches: bool, node: Option<NodeId>) -> Fleet {
        let mut fleet = Fleet::new(HardwareProfile::by_name("h100-8b").unwrap());
        let live = |node: u32, weight| LiveNode {
            node: NodeId(node),
            epoch: Epoch(1),
            weight,
            blocks: 0,
            block_bytes: 0,
            afar: None,
            near: None,
        };
        fleet.set_nodes(vec![live(1, 1), live(2, weight)]);
        fleet.put_instance(Instance {
            id: InstanceId(7),
            node,
            fetches,
            orders: false,
            load: Load::reported(0, 0, 0),
            reported_at: Timestamp(0),
            joined_at: None,
        });
        fleet
    }

    fn source(node: u32, start_blocks: u32, len_blocks: u32) -> Source {
        Source { node: NodeId(node), epoch: Epoch(1), tier: Tier::Dram, start_blocks, len_blocks }
    }

    #[test]
    fn what_is_read_from_afar_saves_the_network_and_what_is_computed_the_computing() {
        let own = fleet(1, true, Some(NodeId(2)));
        let sources = [source(1, 1, 2), source(9, 3, 1), source(2, 5, 1)];
        let saved = own.nearer_us(InstanceId(7), 1..6, TOKENS, &sources).unwrap();
        let bytes = 131_072.0 * f64::from(TOKENS);
        let (near_us, far_us) = (bytes / 55e9 * 1e6, bytes / 45e9 * 1e6);
        let is_near = |got: f64, expected: f64| (got - expected).abs() < 0.01;
        assert!(is_near(saved[0], far_us - near_us) && is_near(saved[1], far_us - near_us), "{saved:?}");
        assert_eq!(saved[2], 0.0, "nobody knows its source any more");
        let computed_us = own.profile.prefill_ns(4 * 256, 256) as f64 / 1e3;
        assert!(is_near(saved[3], computed_us - near_us) && saved[3] > 10_000.0 - near_us, "{saved:?}");
        assert_eq!(saved[4], 0.0, "it holds that one itself, behind a gap");
    }

    #[test]
    fn nothing_is_nearer_where_no_node_is_or_may_be_read_or_saved_to() {
        let asked = |fleet: Fleet| fleet.nearer_us(InstanceId(7), 0..2, TOKENS, &[]);
        assert_eq!(asked(fleet(1, true, Some(NodeId(2)))).map(|saved| saved.len()), Some(2));
        for none in [
            fleet(1, true, None),
            fleet(1, true, Some(NodeId(5))),
            fleet(1, false, Some(NodeId(2))),
            fleet(0, true, Some(NodeId(2))),
        ] {
            assert_eq!(asked(none), None);
        }
        assert_eq!(fleet(1, true, Some(NodeId(2))).nearer_us(InstanceId(8), 0..2, TOKENS, &[]), None);
    }
}
