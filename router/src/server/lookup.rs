//! Who holds which part of a prefix, in both planes; and waiting until this router has seen a node's announcement.
//!
//! Not here: the search itself (`kv_core::index`), and how the planes are put together (`crate::view::planes`).

use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, NodeId};
use kv_core::index::{Holder, Index};
use kvfleet_proto::pb;
use kvfleet_proto::tls::callers::Caller;
use tonic::Status;

use super::residency::standing_to_pb;
use super::{Shared, check, fresh};
use crate::groups::Group;
use crate::raft::CONTROL;
use crate::view::residency::Standing;
use crate::view::{holders, planes};

/// Longest a reader waits for `after`: beyond it a stale answer, which costs a miss at worst, is better.
const SEEN_WAIT_MAX: Duration = Duration::from_secs(1);

/// Answers a lookup.
pub(super) async fn lookup(
    shared: &Shared,
    caller: &Caller,
    request: pb::LookupRequest,
) -> Result<pb::LookupReply, Status> {
    let hashes = check::hashes("hashes", &request.hashes)?;
    fresh::may(shared, caller, request.fresh)?;
    ready(shared, &hashes, &request.after, request.fresh).await?;
    let control = shared.control().published.read();
    let (matched, applied) = holders::longest_prefix(&shared.groups, &control.index, &hashes);
    let resident = resident(shared, &hashes);
    let runs = planes::together(&matched, &resident).into_iter().map(|run| pb::HolderRun {
        start_blocks: run.start_blocks,
        len_blocks: run.len_blocks,
        holders: run.holders.iter().map(|holder| holder_to_pb(&control.index, holder)).collect(),
        instances: run.instances.iter().map(|instance| instance.0).collect(),
    });
    let runs = runs.collect();
    drop(control);
    let residency = resident.iter().map(standing_to_pb).collect();
    Ok(pb::LookupReply { runs, residency, freshness: Some(freshness(shared, &hashes, applied)) })
}

/// Instances that have the first of these blocks in GPU memory.
pub(super) fn resident(shared: &Shared, hashes: &[BlockHash]) -> Vec<Standing> {
    shared.residency.read().resident(holders::looked_up(&shared.groups, hashes), shared.clock.now())
}

/// How fresh an answer about these blocks is.
pub(super) fn freshness(shared: &Shared, hashes: &[BlockHash], applied: u64) -> pb::Freshness {
    let group = holders::answering(&shared.groups, hashes);
    // An empty prefix is answered by the control replica.
    let applied = if hashes.is_empty() { group.published.read().applied_index() } else { applied };
    Shared::freshness(group, applied)
}

/// Waits until this router may answer about these blocks: for what the caller has caused, and for what is
/// committed now if it asked for that.
pub(super) async fn ready(
    shared: &Shared,
    hashes: &[BlockHash],
    after: &[pb::Seen],
    is_fresh: bool,
) -> Result<(), Status> {
    wait_seen(shared, after).await?;
    fresh::ready(shared, holders::answering(&shared.groups, hashes), is_fresh).await
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

/// Waits, up to [`SEEN_WAIT_MAX`], until this router has applied every point in `after`. Then the answer is
/// given from what there is: its freshness says how far that is.
pub(super) async fn wait_seen(shared: &Shared, after: &[pb::Seen]) -> Result<(), Status> {
    check::seen(after)?;
    if after.is_empty() {
        return Ok(());
    }
    let deadline = tokio::time::Instant::now() + SEEN_WAIT_MAX;
    // Control lists no blocks, so there is nothing of it to wait for.
    for point in after.iter().filter(|point| point.shard != u32::from(CONTROL)) {
        let shard = shared.group(point.shard)?;
        if tokio::time::timeout_at(deadline, point_seen(shared.control(), shard, point)).await.is_err() {
            shared.metrics.seen_timeout();
            return Ok(());
        }
    }
    Ok(())
}

async fn point_seen(control: &Group, shard: &Group, point: &pb::Seen) {
    let mut news = (control.published.changes(), shard.published.changes());
    loop {
        news.0.mark_unchanged();
        news.1.mark_unchanged();
        if has_seen(&control.published.read().index, &shard.published.read().index, point) {
            return;
        }
        tokio::select! {
            Ok(()) = news.0.changed() => {}
            Ok(()) = news.1.changed() => {}
            else => return,
        }
    }
}

/// Whether the effect of a point of a node's announce stream can be read: it is in the shard, and the control
/// replica knows the epoch. An epoch that is over (the node joined again, was fenced or left) has it too: what
/// it announced is void, and more will not come.
fn has_seen(control: &Index, shard: &Index, point: &pb::Seen) -> bool {
    let (node, epoch) = (NodeId(point.node), Epoch(point.epoch));
    let applied = || shard.next_seq(node).is_some_and(|(of, next)| of == epoch && next.0 > point.seq);
    control.is_over(node, epoch) || (holders::is_live(control, node, epoch) && applied())
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
        has_seen(index, index, &pb::Seen { node: NODE.0, epoch, seq, shard: 1 })
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
