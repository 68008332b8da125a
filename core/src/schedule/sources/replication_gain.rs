//! Gain from replication: how much sooner each block of a request would be available if the
//! instance's own node held it, at the prices of the decision.
//!
//! Not here: how often that happens, and the proposals that follow (`crate::place::hot_prefixes`).

use std::ops::Range;

use smallvec::SmallVec;

use crate::id::{InstanceId, NodeId, Tier};
use crate::schedule::explain::decision::{Decision, Source};
use crate::schedule::fleet::{Fleet, LiveNode};
use crate::schedule::sources::link_stats::ReadPath;

impl Decision {
    /// Blocks that the instance's own node holds, from the first one that is not in GPU memory.
    #[must_use]
    pub fn overlap_blocks(&self) -> u32 {
        let chosen = self.candidates.iter().find(|candidate| candidate.instance == self.instance);
        chosen.map_or(0, |candidate| candidate.overlap_blocks)
    }

    /// Those of the `held_blocks` leading held blocks that the instance's own node lacks: they are
    /// fetched from other nodes or computed. Blocks in GPU memory are left out.
    #[must_use]
    pub fn remote_blocks(&self, held_blocks: u32) -> Range<u32> {
        self.resident_blocks.saturating_add(self.overlap_blocks())..held_blocks
    }
}

impl Fleet {
    /// The instance's own node, if it is live and takes new blocks, and the instance can fetch.
    #[must_use]
    pub fn own_node(&self, instance: InstanceId) -> Option<NodeId> {
        let node = self.instance(instance).filter(|instance| instance.can_fetch)?.node?;
        self.live(node).filter(|live| live.weight > 0).map(|live| live.node)
    }

    /// How much sooner each of these blocks would be available if the instance's own node held it,
    /// in microseconds. A block without a source counts as computed. `None` for an instance without
    /// such a node.
    #[must_use]
    pub fn replication_gain_us(
        &self,
        instance: InstanceId,
        blocks: Range<u32>,
        block_tokens: u32,
        sources: &[Source],
    ) -> Option<Vec<f64>> {
        let own = self.live(self.own_node(instance)?)?;
        let (_, paths) = self.with_paths(instance)?;
        let stream_us = |live: &LiveNode, tier, is_own| {
            let price =
                live.price(tier, ReadPath { is_local: is_own, path: paths.to(live.node) }, &self.profile);
            us(live.stream_ns(price.speed, block_tokens.into(), block_tokens, &self.profile))
        };
        let (near_us, speeds) = (stream_us(own, Tier::Dram, true), self.corrected_profile());
        // Once per source, since this runs beside decisions. A block that the own node holds after
        // a gap cannot get nearer; a node that has gone meanwhile has no known price.
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
            remote_stats: None,
            local_stats: None,
        };
        fleet.set_nodes(vec![live(1, 1), live(2, weight)]);
        fleet.put_instance(Instance {
            id: InstanceId(7),
            node,
            can_fetch: fetches,
            orders_by_deadline: false,
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
    fn gain_is_saved_network_or_prefill_time() {
        let own = fleet(1, true, Some(NodeId(2)));
        let sources = [source(1, 1, 2), source(9, 3, 1), source(2, 5, 1)];
        let saved = own.replication_gain_us(InstanceId(7), 1..6, TOKENS, &sources).unwrap();
        let bytes = 131_072.0 * f64::from(TOKENS);
        let (near_us, far_us) = (bytes / 55e9 * 1e6, bytes / 45e9 * 1e6);
        let is_near = |got: f64, expected: f64| (got - expected).abs() < 0.01;
        assert!(is_near(saved[0], far_us - near_us) && is_near(saved[1], far_us - near_us), "{saved:?}");
        assert_eq!(saved[2], 0.0, "its source is gone, so its price is unknown");
        let computed_us = own.profile.prefill_ns(4 * 256, 256) as f64 / 1e3;
        assert!(is_near(saved[3], computed_us - near_us) && saved[3] > 10_000.0 - near_us, "{saved:?}");
        assert_eq!(saved[4], 0.0, "the own node holds that one, after a gap");
    }

    #[test]
    fn no_gain_without_a_readable_and_writable_own_node() {
        let asked = |fleet: Fleet| fleet.replication_gain_us(InstanceId(7), 0..2, TOKENS, &[]);
        assert_eq!(asked(fleet(1, true, Some(NodeId(2)))).map(|saved| saved.len()), Some(2));
        for none in [
            fleet(1, true, None),
            fleet(1, true, Some(NodeId(5))),
            fleet(1, false, Some(NodeId(2))),
            fleet(0, true, Some(NodeId(2))),
        ] {
            assert_eq!(asked(none), None);
        }
        assert_eq!(
            fleet(1, true, Some(NodeId(2))).replication_gain_us(InstanceId(8), 0..2, TOKENS, &[]),
            None
        );
    }
}
