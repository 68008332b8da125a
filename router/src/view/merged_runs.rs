//! Merges holders and residency into one answer: runs that nodes hold, split where an instance's
//! resident prefix ends, and extended where only instances have the prefix.
//!
//! Not here: the two lookups (`holders.rs`, `residency/`).

use kv_core::id::InstanceId;
use kv_core::index::{Holder, PrefixMatch};

use super::residency::ReporterStatus;

/// Consecutive blocks with the same holders and the same instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MergedRun<'a> {
    pub(crate) start_blocks: u32,
    pub(crate) len_blocks: u32,
    /// Nodes that hold the whole run.
    pub(crate) holders: &'a [Holder],
    /// Instances that have the run and everything before it. Not empty if `holders` is empty.
    pub(crate) instances: Vec<InstanceId>,
}

/// Merges both into runs in prefix order without gaps.
pub(crate) fn merge<'a>(matched: &'a PrefixMatch, resident: &[ReporterStatus]) -> Vec<MergedRun<'a>> {
    let blocks_of = |status: &ReporterStatus| u32::try_from(status.blocks).unwrap_or(u32::MAX);
    let mut ends: Vec<u32> = matched.runs.iter().map(|run| run.end_blocks()).collect();
    ends.extend(resident.iter().map(blocks_of));
    ends.sort_unstable();
    ends.dedup();
    let mut held = matched.runs.iter().peekable();
    let mut start_blocks = 0;
    let mut runs = Vec::with_capacity(ends.len());
    for end in ends.into_iter().filter(|end| *end > 0) {
        while held.next_if(|run| run.end_blocks() <= start_blocks).is_some() {}
        let holders = held.peek().map_or(&[][..], |run| &run.holders[..]);
        let instances = resident.iter().filter(|one| blocks_of(one) >= end).map(|one| one.instance);
        runs.push(MergedRun {
            start_blocks,
            len_blocks: end - start_blocks,
            holders,
            instances: instances.collect(),
        });
        start_blocks = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use kv_core::id::{Epoch, NodeId, Tier};
    use kv_core::index::HolderRun;

    fn holder(node: u32) -> Holder {
        Holder { node: NodeId(node), epoch: Epoch(1), tier: Tier::Dram }
    }

    /// (length, node) of each run.
    fn matched(runs: &[(u32, u32)]) -> PrefixMatch {
        let mut start_blocks = 0;
        let run = |&(len_blocks, node): &(u32, u32)| {
            let run = HolderRun { start_blocks, len_blocks, holders: [holder(node)].into_iter().collect() };
            start_blocks += len_blocks;
            run
        };
        PrefixMatch { runs: runs.iter().map(run).collect() }
    }

    fn resident(all: &[(u32, u64)]) -> Vec<ReporterStatus> {
        let status = |&(instance, blocks): &(u32, u64)| ReporterStatus {
            instance: InstanceId(instance),
            epoch: 1,
            seq: 1,
            age: Duration::ZERO,
            uncertain: false,
            blocks,
        };
        all.iter().map(status).collect()
    }

    /// Start, length, node if any, and instances.
    type Row = (u32, u32, Option<u32>, Vec<u32>);

    fn rows(matched: &PrefixMatch, resident: &[ReporterStatus]) -> Vec<Row> {
        let row = |run: MergedRun<'_>| {
            let instances = run.instances.iter().map(|instance| instance.0).collect();
            (run.start_blocks, run.len_blocks, run.holders.first().map(|one| one.node.0), instances)
        };
        merge(matched, resident).into_iter().map(row).collect()
    }

    #[test]
    fn runs_are_split_at_resident_ends_and_extend_past_nodes() {
        let nodes = matched(&[(4, 1), (2, 2)]);
        let both = rows(&nodes, &resident(&[(7, 3), (8, 4), (9, 8)]));
        let expected: [Row; 4] = [
            (0, 3, Some(1), vec![7, 8, 9]),
            (3, 1, Some(1), vec![8, 9]),
            (4, 2, Some(2), vec![9]),
            (6, 2, None, vec![9]),
        ];
        assert_eq!(both, expected);
    }

    #[test]
    fn one_empty_input_leaves_the_other_unchanged() {
        assert_eq!(
            rows(&matched(&[(4, 1), (2, 2)]), &[]),
            [(0, 4, Some(1), vec![]), (4, 2, Some(2), vec![])]
        );
        assert_eq!(rows(&matched(&[]), &resident(&[(7, 3)])), [(0, 3, None, vec![7])]);
        assert_eq!(rows(&matched(&[]), &[]), []);
    }
}
