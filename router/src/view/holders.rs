//! Lookups that combine the shard of a prefix with the control group's live nodes.
//!
//! A shard may list blocks of an epoch that is over, because it has not heard of the end or has not
//! swept the blocks. The control replica is authoritative, so one entry in one group removes a
//! fenced node from all shards. Not here: the search inside a shard (`kv_core::index`).

use kv_core::id::{BlockHash, Epoch, NodeId};
use kv_core::index::{Holder, HolderRun, Index, NodeState, PrefixMatch};

use crate::groups::{Group, Groups};

/// The leading hashes that belong to one chain, and so to one shard.
fn same_chain_prefix(hashes: &[BlockHash]) -> &[BlockHash] {
    let Some(first) = hashes.first() else { return hashes };
    let chained = hashes.iter().take_while(|hash| hash.root_tag() == first.root_tag()).count();
    &hashes[..chained]
}

/// The part of `hashes` that a lookup covers. One tag means one shard; with a single shard the tag
/// is irrelevant.
pub(crate) fn lookup_prefix<'a>(groups: &Groups, hashes: &'a [BlockHash]) -> &'a [BlockHash] {
    if groups.shard_count() > 1 { same_chain_prefix(hashes) } else { hashes }
}

/// The group that answers for a prefix: its shard, or control for an empty prefix.
pub(crate) fn answering_group<'a>(groups: &'a Groups, hashes: &[BlockHash]) -> &'a Group {
    hashes.first().map_or(groups.control(), |first| groups.shard_of(*first))
}

/// The longest prefix that live nodes hold, and the shard's last applied entry.
pub(crate) fn longest_prefix(groups: &Groups, control: &Index, hashes: &[BlockHash]) -> (PrefixMatch, u64) {
    let Some(first) = hashes.first() else { return (PrefixMatch::default(), 0) };
    let (matched, applied) = {
        let shard = groups.shard_of(*first).published.read();
        (shard.index.longest_prefix(lookup_prefix(groups, hashes)), shard.applied_index())
    };
    (retain_live_holders(matched, control), applied)
}

/// End of the blocks, from `from` on, that dead nodes held, and one such node if it is certain.
/// `None` if there are none.
pub(crate) fn lost_blocks(
    groups: &Groups,
    control: &Index,
    hashes: &[BlockHash],
    from: u32,
) -> Option<(u32, Option<NodeId>)> {
    let hashes = lookup_prefix(groups, hashes);
    let behind = hashes.get(from as usize..)?;
    let shard = groups.shard_of(*hashes.first()?).published.read();
    let of = |block: &BlockHash| {
        // Either the shard knows, or it has not yet applied what control says.
        let holders = shard.index.holders_of(*block);
        match holders.iter().find(|holder| !is_live(control, holder.node, holder.epoch)) {
            Some(holder) => Some(Some(holder.node)),
            None => shard.index.lost_holder(*block).map(|lost| lost.node),
        }
    };
    let node = of(behind.first()?)?;
    let known = behind.partition_point(|block| of(block).is_some());
    Some((from.saturating_add(u32::try_from(known).unwrap_or(u32::MAX)), node))
}

/// Offset after the last held block.
pub(crate) fn end_blocks(matched: &PrefixMatch) -> u32 {
    matched.runs.last().map_or(0, |run| run.start_blocks.saturating_add(run.len_blocks))
}

/// Whether this epoch of a node is live.
pub(crate) fn is_live(control: &Index, node: NodeId, epoch: Epoch) -> bool {
    control.node(node).is_some_and(|state| state.live && state.epoch == epoch)
}

/// Removes holders with an ended epoch. The match stops at the first run without holders.
fn retain_live_holders(mut matched: PrefixMatch, control: &Index) -> PrefixMatch {
    let dead = |holder: &Holder| !is_live(control, holder.node, holder.epoch);
    if !matched.runs.iter().any(|run| run.holders.iter().any(dead)) {
        return matched;
    }
    let mut runs: Vec<HolderRun> = Vec::with_capacity(matched.runs.len());
    for mut run in matched.runs.drain(..) {
        run.holders.retain(|holder| !dead(holder));
        match runs.last_mut() {
            _ if run.holders.is_empty() => break,
            Some(before) if before.holders == run.holders => before.len_blocks += run.len_blocks,
            _ => runs.push(run),
        }
    }
    PrefixMatch { runs }
}

/// Blocks of a live node over all shards, announced under its current epoch.
pub(crate) fn node_blocks(groups: &Groups, state: &NodeState) -> u64 {
    let in_shard = |group: &std::sync::Arc<Group>| {
        let shard = group.published.read();
        let known = shard.index.node(state.record.node);
        known.filter(|known| known.live && known.epoch == state.epoch).map_or(0, |known| known.blocks)
    };
    if state.live { groups.shards().iter().map(in_shard).sum() } else { 0 }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use kv_core::id::{IdentityDigest, Seq, Tier};
    use kv_core::index::IndexLimits;
    use kv_core::index::command::{Announcement, Change, Command, NodeRecord};

    fn block(number: u8) -> BlockHash {
        let mut bytes = [7; _];
        bytes[1] = number;
        BlockHash(bytes)
    }

    pub(crate) fn record(node: u32) -> NodeRecord {
        NodeRecord {
            node: NodeId(node),
            data_address: "n:1".into(),
            control_address: "n:2".into(),
            host: "n".into(),
            instance: None,
            identity: IdentityDigest([7; 16]),
            block_bytes: 64,
        }
    }

    fn runs(matched: &PrefixMatch) -> Vec<(u32, u32, Vec<u32>)> {
        let nodes = |run: &HolderRun| run.holders.iter().map(|holder| holder.node.0).collect();
        matched.runs.iter().map(|run| (run.start_blocks, run.len_blocks, nodes(run))).collect()
    }

    #[test]
    fn epochs_that_control_ended_are_left_out() {
        let (mut control, mut shard) =
            (Index::new(IndexLimits::default()), Index::new(IndexLimits::default()));
        let blocks: Vec<_> = (0..6).map(block).collect();
        for (node, len) in [(1, 6), (2, 4), (3, 2)] {
            control.apply(&Command::Join(record(node)));
            shard.apply(&Command::Admit { record: record(node), epoch: Epoch(1) });
            let stored = Change::Stored { parent: None, blocks: blocks[..len].to_vec(), tier: Tier::Dram };
            let one =
                Announcement { node: NodeId(node), epoch: Epoch(1), seq: Seq(1), changes: vec![stored] };
            shard.apply(&Command::Announce(vec![one]));
        }
        let seen = |control: &Index| runs(&retain_live_holders(shard.longest_prefix(&blocks), control));
        assert_eq!(seen(&control), [(0, 2, vec![1, 2, 3]), (2, 2, vec![1, 2]), (4, 2, vec![1])]);
        control.apply(&Command::Fence { node: NodeId(3), epoch: Epoch(1) });
        assert_eq!(
            seen(&control),
            [(0, 4, vec![1, 2]), (4, 2, vec![1])],
            "adjacent runs with equal holders merge"
        );
        control.apply(&Command::Join(record(1)));
        assert_eq!(seen(&control), [(0, 4, vec![2])], "the epoch before the join is over");
        control.apply(&Command::Leave { node: NodeId(2), epoch: Epoch(1) });
        assert_eq!(seen(&control), []);
    }

    #[test]
    fn a_prefix_ends_where_another_chain_begins() {
        let mut hashes = vec![block(1), block(2), block(3)];
        assert_eq!(same_chain_prefix(&hashes).len(), 3);
        hashes[2].0[0] = 9;
        assert_eq!(same_chain_prefix(&hashes).len(), 2);
        assert!(same_chain_prefix(&[]).is_empty());
    }
}
