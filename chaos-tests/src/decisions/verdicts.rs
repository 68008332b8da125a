//! Evaluates one answer against the facts that were certain during the query. Pure.
//!
//! Not here: the queries (`deciders.rs`) and the recording of facts (`crate::oracle`).

use std::collections::BTreeMap;

use kvfleet_proto::pb;

use crate::oracle::{CertainHolding, Oracle};

/// Known facts about one chain at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Blocks that each node certainly holds.
    pub certain: BTreeMap<u32, CertainHolding>,
    /// Last epoch of each node.
    pub epochs: BTreeMap<u32, u64>,
}

impl Facts {
    /// Reads the facts of a chain.
    #[must_use]
    pub fn of(oracle: &Oracle, chain: u32) -> Facts {
        let of_chain = oracle.certain.iter().filter(|((_, of), _)| *of == chain);
        Facts {
            certain: of_chain.map(|((node, _), sure)| (*node, *sure)).collect(),
            epochs: oracle.nodes.iter().map(|(node, fact)| (*node, fact.epoch)).collect(),
        }
    }

    /// Number of leading blocks that some node certainly held from `self` until `after`.
    #[must_use]
    pub fn held_until(&self, after: &Facts) -> u32 {
        let stayed = |node: &u32, sure: &CertainHolding| {
            after.certain.get(node).is_some_and(|later| later.reductions == sure.reductions)
        };
        let held = self.certain.iter().filter(|(node, sure)| stayed(node, sure));
        held.map(|(_, sure)| sure.blocks).max().unwrap_or(0)
    }

    /// Whether a holder's epoch ended before the query.
    #[must_use]
    pub fn is_stale(&self, node: u32, epoch: u64) -> bool {
        self.epochs.get(&node).is_some_and(|known| epoch < *known)
    }
}

/// Blocks named by an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamedBlocks {
    /// Leading blocks of the chain that have a candidate.
    pub blocks: u32,
    /// Candidates with an ended epoch.
    pub stale: u64,
}

/// Blocks named by a lookup.
#[must_use]
pub fn of_lookup(facts: &Facts, runs: &[pb::HolderRun]) -> NamedBlocks {
    let mut named = NamedBlocks::default();
    for run in runs {
        let stale = run.holders.iter().filter(|holder| facts.is_stale(holder.node, holder.epoch)).count();
        named.stale += stale as u64;
        if run.start_blocks == named.blocks && stale < run.holders.len() {
            named.blocks += run.len_blocks;
        }
    }
    named
}

/// Blocks named by a decision. It fetches blocks only if that is faster than computing, so one
/// candidate for the first block counts as `all` blocks.
#[must_use]
pub fn of_decision(facts: &Facts, decision: &pb::Decision, all: u32) -> NamedBlocks {
    let stale = decision.sources.iter().filter(|source| facts.is_stale(source.node, source.epoch)).count();
    let has_candidate = decision.sources.len() > stale
        || decision.candidates.iter().any(|candidate| candidate.overlap_blocks > 0);
    NamedBlocks { blocks: if has_candidate { all } else { 0 }, stale: stale as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(sure: &[(u32, u32, u64)], epochs: &[(u32, u64)]) -> Facts {
        Facts {
            certain: sure
                .iter()
                .map(|&(node, blocks, falls)| (node, CertainHolding { blocks, reductions: falls }))
                .collect(),
            epochs: epochs.iter().copied().collect(),
        }
    }

    #[test]
    fn only_blocks_held_throughout_the_query_must_be_named() {
        let before = facts(&[(1, 9, 0), (2, 5, 3), (3, 7, 1)], &[]);
        assert_eq!(before.held_until(&before), 9);
        let after = facts(&[(1, 9, 1), (2, 24, 3), (3, 7, 1)], &[]);
        assert_eq!(before.held_until(&after), 7, "node 1 was reduced meanwhile, node 2 had only five blocks");
        assert_eq!(before.held_until(&Facts::default()), 0);
    }

    #[test]
    fn holders_of_ended_epochs_are_not_candidates() {
        let holder = |node, epoch| pb::Holder { node, epoch, ..pb::Holder::default() };
        let run = |start_blocks, len_blocks, holders| pb::HolderRun {
            start_blocks,
            len_blocks,
            holders,
            ..Default::default()
        };
        let facts = facts(&[], &[(1, 2), (2, 1)]);
        let runs = [run(0, 4, vec![holder(1, 1), holder(2, 1)]), run(4, 2, vec![holder(1, 1)])];
        assert_eq!(of_lookup(&facts, &runs), NamedBlocks { blocks: 4, stale: 2 });
        assert_eq!(of_lookup(&facts, &[run(0, 4, vec![holder(1, 3)])]), NamedBlocks { blocks: 4, stale: 0 });
        assert_eq!(of_lookup(&facts, &[]), NamedBlocks::default());
    }

    #[test]
    fn a_decision_without_sources_or_overlap_is_blind() {
        let facts = facts(&[], &[(1, 2)]);
        let source = |epoch| pb::Source { node: 1, epoch, len_blocks: 2, ..pb::Source::default() };
        let from = |sources| pb::Decision { sources, ..pb::Decision::default() };
        assert_eq!(of_decision(&facts, &from(vec![]), 8), NamedBlocks::default());
        assert_eq!(of_decision(&facts, &from(vec![source(2)]), 8), NamedBlocks { blocks: 8, stale: 0 });
        assert_eq!(of_decision(&facts, &from(vec![source(1)]), 8), NamedBlocks { blocks: 0, stale: 1 });
        let own = pb::Candidate { overlap_blocks: 3, ..pb::Candidate::default() };
        let local = pb::Decision { candidates: vec![own], ..pb::Decision::default() };
        assert_eq!(of_decision(&facts, &local, 8), NamedBlocks { blocks: 8, stale: 0 });
    }
}
