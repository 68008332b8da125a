//! What one answer counts as, given what was sure while it was asked for. Pure.
//!
//! Not here: asking (`ask.rs`), and how facts become sure (`crate::oracle`).

use std::collections::BTreeMap;

use kvfleet_proto::pb;

use crate::oracle::{Oracle, Sure};

/// What was known of one chain at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// What each node surely holds of it.
    pub sure: BTreeMap<u32, Sure>,
    /// The epoch that each node was last given.
    pub epochs: BTreeMap<u32, u64>,
}

impl Facts {
    /// Reads them.
    #[must_use]
    pub fn of(oracle: &Oracle, chain: u32) -> Facts {
        let of_chain = oracle.sure.iter().filter(|((_, of), _)| *of == chain);
        Facts {
            sure: of_chain.map(|((node, _), sure)| (*node, *sure)).collect(),
            epochs: oracle.nodes.iter().map(|(node, fact)| (*node, fact.epoch)).collect(),
        }
    }

    /// First blocks of the chain that someone held for sure from `self` until `after`.
    #[must_use]
    pub fn held_until(&self, after: &Facts) -> u32 {
        let stayed =
            |node: &u32, sure: &Sure| after.sure.get(node).is_some_and(|later| later.falls == sure.falls);
        let held = self.sure.iter().filter(|(node, sure)| stayed(node, sure));
        held.map(|(_, sure)| sure.blocks).max().unwrap_or(0)
    }

    /// Whether what a holder is said to hold is of an epoch that was over before the question.
    #[must_use]
    pub fn is_stale(&self, node: u32, epoch: u64) -> bool {
        self.epochs.get(&node).is_some_and(|known| epoch < *known)
    }
}

/// What an answer named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// First blocks of the chain for which there is a candidate.
    pub blocks: u32,
    /// Candidates of epochs that were over.
    pub stale: u64,
}

/// What a lookup named.
#[must_use]
pub fn of_lookup(facts: &Facts, runs: &[pb::HolderRun]) -> Named {
    let mut named = Named::default();
    for run in runs {
        let stale = run.holders.iter().filter(|holder| facts.is_stale(holder.node, holder.epoch)).count();
        named.stale += stale as u64;
        if run.start_blocks == named.blocks && stale < run.holders.len() {
            named.blocks += run.len_blocks;
        }
    }
    named
}

/// What a decision named. It takes blocks from their holders only where that is sooner than computing, so one
/// candidate for the first block is as good as all: `all` blocks count then.
#[must_use]
pub fn of_decision(facts: &Facts, decision: &pb::Decision, all: u32) -> Named {
    let stale = decision.sources.iter().filter(|source| facts.is_stale(source.node, source.epoch)).count();
    let has_candidate = decision.sources.len() > stale
        || decision.candidates.iter().any(|candidate| candidate.overlap_blocks > 0);
    Named { blocks: if has_candidate { all } else { 0 }, stale: stale as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(sure: &[(u32, u32, u64)], epochs: &[(u32, u64)]) -> Facts {
        Facts {
            sure: sure.iter().map(|&(node, blocks, falls)| (node, Sure { blocks, falls })).collect(),
            epochs: epochs.iter().copied().collect(),
        }
    }

    #[test]
    fn only_what_stayed_during_the_question_must_be_named() {
        let before = facts(&[(1, 9, 0), (2, 5, 3), (3, 7, 1)], &[]);
        assert_eq!(before.held_until(&before), 9);
        let after = facts(&[(1, 9, 1), (2, 24, 3), (3, 7, 1)], &[]);
        assert_eq!(before.held_until(&after), 7, "node 1 took some back meanwhile, node 2 had only five");
        assert_eq!(before.held_until(&Facts::default()), 0);
    }

    #[test]
    fn holders_of_epochs_that_are_over_are_no_candidates() {
        let holder = |node, epoch| pb::Holder { node, epoch, ..pb::Holder::default() };
        let run = |start_blocks, len_blocks, holders| pb::HolderRun {
            start_blocks,
            len_blocks,
            holders,
            ..Default::default()
        };
        let facts = facts(&[], &[(1, 2), (2, 1)]);
        let runs = [run(0, 4, vec![holder(1, 1), holder(2, 1)]), run(4, 2, vec![holder(1, 1)])];
        assert_eq!(of_lookup(&facts, &runs), Named { blocks: 4, stale: 2 });
        assert_eq!(of_lookup(&facts, &[run(0, 4, vec![holder(1, 3)])]), Named { blocks: 4, stale: 0 });
        assert_eq!(of_lookup(&facts, &[]), Named::default());
    }

    #[test]
    fn a_decision_without_sources_or_overlap_is_blind() {
        let facts = facts(&[], &[(1, 2)]);
        let source = |epoch| pb::Source { node: 1, epoch, len_blocks: 2, ..pb::Source::default() };
        let from = |sources| pb::Decision { sources, ..pb::Decision::default() };
        assert_eq!(of_decision(&facts, &from(vec![]), 8), Named::default());
        assert_eq!(of_decision(&facts, &from(vec![source(2)]), 8), Named { blocks: 8, stale: 0 });
        assert_eq!(of_decision(&facts, &from(vec![source(1)]), 8), Named { blocks: 0, stale: 1 });
        let own = pb::Candidate { overlap_blocks: 3, ..pb::Candidate::default() };
        let local = pb::Decision { candidates: vec![own], ..pb::Decision::default() };
        assert_eq!(of_decision(&facts, &local, 8), Named { blocks: 8, stale: 0 });
    }
}
