//! Lookup of a prefix in index and residency; and waiting until this router has applied a node's
//! announcement.
//!
//! Not here: the search itself (`kv_core::index`), and the merge of both
//! (`crate::view::merged_runs`).

use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, NodeId};
use kv_core::index::{Holder, Index};
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use tonic::Status;

use super::residency::standing_to_pb;
use super::{ServerState, check, fresh};
use crate::groups::Group;
use crate::raft::CONTROL;
use crate::view::residency::ReporterStatus;
use crate::view::{holders, merged_runs};

/// Longest wait for `after`: beyond it a stale answer is better, which costs a miss at worst.
const SEEN_WAIT_MAX: Duration = Duration::from_secs(1);

/// Answers a lookup.
pub(super) async fn lookup(
    shared: &ServerState,
    caller: &Caller,
    request: pb::LookupRequest,
) -> Result<pb::LookupReply, Status> {
    let hashes = check::hashes("hashes", &request.hashes)?;
    fresh::check_allowed(shared, caller, request.fresh)?;
    ready(shared, &hashes, &request.after, request.fresh).await?;
    let control = shared.control().published.read();
    let (matched, applied) = holders::longest_prefix(&shared.groups, &control.index, &hashes);
    let resident = resident(shared, &hashes);
    let runs = merged_runs::merge(&matched, &resident).into_iter().map(|run| pb::HolderRun {
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

/// Instances with the first of these blocks in GPU memory.
pub(super) fn resident(shared: &ServerState, hashes: &[BlockHash]) -> Vec<ReporterStatus> {
    shared.residency.read().resident(holders::lookup_prefix(&shared.groups, hashes), shared.clock.now())
}

/// Freshness of an answer about these blocks.
pub(super) fn freshness(shared: &ServerState, hashes: &[BlockHash], applied: u64) -> pb::Freshness {
    let group = holders::answering_group(&shared.groups, hashes);
    // The control replica answers for an empty prefix.
    let applied = if hashes.is_empty() { group.published.read().applied_index() } else { applied };
    ServerState::freshness(group, applied)
}

/// Waits until this router may answer about these blocks: for the caller's own changes, and for all
/// committed ones if it asked for a fresh read.
pub(super) async fn ready(
    shared: &ServerState,
    hashes: &[BlockHash],
    after: &[pb::AnnouncePosition],
    is_fresh: bool,
) -> Result<(), Status> {
    wait_seen(shared, after).await?;
    fresh::ready(shared, holders::answering_group(&shared.groups, hashes), is_fresh).await
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

/// Data address of a node; empty if unknown.
pub(super) fn data_address(index: &Index, node: NodeId) -> String {
    index.node(node).map(|state| state.record.data_address.clone()).unwrap_or_default()
}

/// Waits, up to [`SEEN_WAIT_MAX`], until this router has applied every position in `after`. After
/// the timeout the answer is given anyway; its freshness shows the applied state.
pub(super) async fn wait_seen(shared: &ServerState, after: &[pb::AnnouncePosition]) -> Result<(), Status> {
    check::seen(after)?;
    if after.is_empty() {
        return Ok(());
    }
    let deadline = tokio::time::Instant::now() + SEEN_WAIT_MAX;
    // Control lists no blocks, so its positions need no wait.
    for point in after.iter().filter(|point| point.shard != u32::from(CONTROL)) {
        let shard = shared.group(point.shard)?;
        if tokio::time::timeout_at(deadline, point_seen(shared.control(), shard, point)).await.is_err() {
            shared.metrics.record_session_timeout();
            return Ok(());
        }
    }
    Ok(())
}

async fn point_seen(control: &Group, shard: &Group, point: &pb::AnnouncePosition) {
    let mut new_stats = (control.published.watch_entries(), shard.published.watch_entries());
    loop {
        new_stats.0.mark_unchanged();
        new_stats.1.mark_unchanged();
        if has_seen(&control.published.read().index, &shard.published.read().index, point) {
            return;
        }
        tokio::select! {
            Ok(()) = new_stats.0.changed() => {}
            Ok(()) = new_stats.1.changed() => {}
            else => return,
        }
    }
}

/// Whether the effect of a stream position is visible: the shard has applied it and the control
/// replica knows the epoch. An epoch that is over counts too, since its announcements are void and
/// no more will come.
fn has_seen(control: &Index, shard: &Index, point: &pb::AnnouncePosition) -> bool {
    let (node, epoch) = (NodeId(point.node), Epoch(point.epoch));
    let applied = || shard.next_seq(node).is_some_and(|(of, next)| of == epoch && next.0 > point.seq);
    control.is_epoch_over(node, epoch) || (holders::is_live(control, node, epoch) && applied())
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
        has_seen(index, index, &pb::AnnouncePosition { node: NODE.0, epoch, seq, shard: 1 })
    }

    #[test]
    fn a_point_is_seen_once_applied_or_once_its_epoch_is_over() {
        let mut index = Index::new(IndexLimits::default());
        assert!(!seen(&index, 1, 1), "the join has not arrived yet");
        join(&mut index);
        assert!(!seen(&index, 1, 1));
        let one = Announcement { node: NODE, epoch: Epoch(1), seq: Seq(1), changes: vec![] };
        index.apply(&Command::Announce(vec![one]));
        assert!(seen(&index, 1, 1) && !seen(&index, 1, 2) && !seen(&index, 2, 1));
        index.apply(&Command::Fence { node: NODE, epoch: Epoch(1) });
        assert!(seen(&index, 1, 2), "batch 2 of a fenced epoch never comes");
        assert!(!seen(&index, 2, 1), "the next epoch has not arrived yet");
        join(&mut index);
        assert!(seen(&index, 1, 99) && !seen(&index, 2, 1));
        index.apply(&Command::Leave { node: NODE, epoch: Epoch(2) });
        assert!(seen(&index, 2, 1) && !seen(&index, 3, 1));
    }
}
