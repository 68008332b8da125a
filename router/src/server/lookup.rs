//! Who holds which part of a prefix; and waiting until this replica has seen a node's announcement.
//!
//! Not here: the search itself (`kv_core::index`).

use std::time::Duration;

use kv_core::id::{Epoch, NodeId};
use kv_core::index::{Holder, Index};
use kvfleet_proto::pb;
use tonic::Status;

use super::{Shared, check};

/// Longest a reader waits for `after`: beyond it a stale answer, which costs a miss at worst, is better.
const SEEN_WAIT_MAX: Duration = Duration::from_secs(1);

/// Answers a lookup.
pub(super) async fn lookup(shared: &Shared, request: pb::LookupRequest) -> Result<pb::LookupReply, Status> {
    let hashes = check::hashes("hashes", &request.hashes)?;
    wait_seen(shared, &request.after).await?;
    let replica = shared.published.read();
    let matched = replica.index.longest_prefix(&hashes);
    let runs = matched.runs.iter().map(|run| pb::HolderRun {
        start_blocks: run.start_blocks,
        len_blocks: run.len_blocks,
        holders: run.holders.iter().map(|holder| holder_to_pb(&replica.index, holder)).collect(),
    });
    Ok(pb::LookupReply { runs: runs.collect(), freshness: Some(shared.freshness(&replica)) })
}

/// A holder with the address its blocks are read from.
pub(super) fn holder_to_pb(index: &Index, holder: &Holder) -> pb::Holder {
    pb::Holder {
        node: holder.node.0,
        epoch: holder.epoch.0,
        address: data_address(index, holder.node),
        tier: holder.tier as u32,
    }
}

/// Where a node serves block bytes; empty when it is not known.
pub(super) fn data_address(index: &Index, node: NodeId) -> String {
    index.node(node).map(|state| state.record.data_address.clone()).unwrap_or_default()
}

/// Waits, up to [`SEEN_WAIT_MAX`], until this replica has applied every point in `after`. Then the answer
/// is given from what there is: its freshness says how far that is.
pub(super) async fn wait_seen(shared: &Shared, after: &[pb::Seen]) -> Result<(), Status> {
    check::seen(after)?;
    if after.is_empty() {
        return Ok(());
    }
    let mut changes = shared.published.changes();
    let all_seen = async {
        loop {
            changes.mark_unchanged();
            if after.iter().all(|point| has_seen(&shared.published.read().index, point)) {
                return;
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    if tokio::time::timeout(SEEN_WAIT_MAX, all_seen).await.is_err() {
        shared.metrics.seen_timeout();
    }
    Ok(())
}

/// Whether the effect of a point of a node's announce stream is in the index. An epoch that is over (the
/// node joined again, was fenced or left) has it too: what it announced is void, and more will not come.
fn has_seen(index: &Index, point: &pb::Seen) -> bool {
    let (node, epoch) = (NodeId(point.node), Epoch(point.epoch));
    let applied = index.next_seq(node).is_some_and(|(of, next)| of == epoch && next.0 > point.seq);
    applied || index.is_over(node, epoch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::id::{IdentityDigest, Seq};
    use kv_core::index::IndexLimits;
    use kv_core::index::command::{Announcement, Applied, Command, NodeRecord};

    const NODE: NodeId = NodeId(1);

    fn join(index: &mut Index) {
        let record = NodeRecord {
            node: NODE,
            data_address: "n:1".into(),
            control_address: "n:2".into(),
            host: "n".into(),
            instance: None,
            identity: IdentityDigest([7; 16]),
            block_bytes: 64,
        };
        assert!(matches!(index.apply(&Command::Join(record)), Applied::Joined(_)));
    }

    fn seen(index: &Index, epoch: u64, seq: u64) -> bool {
        has_seen(index, &pb::Seen { node: NODE.0, epoch, seq })
    }

    #[test]
    fn a_point_is_seen_once_applied_or_once_its_epoch_is_over() {
        let mut index = Index::new(IndexLimits::default());
        assert!(!seen(&index, 1, 1), "the join has not come here yet");
        join(&mut index);
        assert!(!seen(&index, 1, 1));
        let one = Announcement { node: NODE, epoch: Epoch(1), seq: Seq(1), changes: vec![] };
        index.apply(&Command::Announce(vec![one]));
        assert!(seen(&index, 1, 1) && !seen(&index, 1, 2) && !seen(&index, 2, 1));
        index.apply(&Command::Fence { node: NODE, epoch: Epoch(1) });
        assert!(seen(&index, 1, 2), "batch 2 of a fenced epoch never comes");
        assert!(!seen(&index, 2, 1), "the next epoch has not come here yet");
        join(&mut index);
        assert!(seen(&index, 1, 99) && !seen(&index, 2, 1));
        index.apply(&Command::Leave { node: NODE, epoch: Epoch(2) });
        assert!(seen(&index, 2, 1) && !seen(&index, 3, 1));
    }
}
