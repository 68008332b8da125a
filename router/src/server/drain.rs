//! Drain: a draining node offers runs of blocks that it alone holds, and the router has other nodes
//! copy them.
//!
//! The target of a run is a node that holds its parent, otherwise the node for new blocks of its
//! prefix. Not here: the copying (`crate::copies`), and a node's order of offers (`kvfleet-node`).

use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, NodeId};
use kv_core::index::Index;
use kv_core::place::copies::{BlockRun, CopyOutcome};
use kvfleet_proto::{convert, pb};
use tonic::Status;

use super::{ServerState, check, lookup};
use crate::copies::CopyOrder;
use crate::view::holders;

/// Blocks of one call.
const RUN_BLOCKS_MAX: usize = 4_096;

/// Targets tried for one part of a run.
const TARGETS_MAX: usize = 3;

/// Longest time of one call.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// Handles one call of a draining node.
pub(super) async fn drain(
    shared: &ServerState,
    request: &pb::DrainRequest,
) -> Result<pb::DrainReply, Status> {
    let (node, epoch) = (NodeId(request.node), Epoch(request.epoch));
    if !holders::is_live(&shared.control().published.read().index, node, epoch) {
        return Err(Status::failed_precondition(format!(
            "node {node} is not in the cluster under epoch {epoch}, as far as this router knows: join first"
        )));
    }
    if shared.copies.draining.lock().record(node, epoch, shared.clock.now()) {
        shared.fleet.exclude_from_placement(node);
        tracing::info!(%node, %epoch, "a node drains: no new blocks are saved there");
    }
    let Some(run) = &request.run else { return Ok(pb::DrainReply::default()) };
    let run = convert::run_from_pb(run).map_err(check::invalid)?;
    check::at_most("number of blocks in `run`", run.hashes.len(), RUN_BLOCKS_MAX)?;
    let root = convert::hash_field("root", &request.root).map_err(check::invalid)?;
    let within = Duration::from_millis(request.within_ms).min(TIMEOUT_MAX);
    let evacuation = RunEvacuation { shared, node, epoch, root, until: tokio::time::Instant::now() + within };
    Ok(evacuation.evacuate(&run).await)
}

/// Evacuation of one run from a draining node, with its deadline.
struct RunEvacuation<'a> {
    shared: &'a ServerState,
    node: NodeId,
    epoch: Epoch,
    root: BlockHash,
    until: tokio::time::Instant,
}

impl RunEvacuation<'_> {
    /// Evacuates the run from its start, as far as possible.
    async fn evacuate(&self, run: &BlockRun) -> pb::DrainReply {
        let mut reply = pb::DrainReply::default();
        let mut at = 0;
        while at < run.hashes.len() {
            let is_elsewhere = self.has_other_holder(run.hashes[at]);
            let alike = |hash: &&BlockHash| self.has_other_holder(**hash) == is_elsewhere;
            let end = at + run.hashes[at..].iter().take_while(alike).count().max(1);
            if is_elsewhere {
                reply.elsewhere_blocks += count(end - at);
                at = end;
                continue;
            }
            let (result, bytes, last) = self.copy(&run.part(at, end)).await;
            reply.copied_blocks += count(result);
            reply.copied_bytes = reply.copied_bytes.saturating_add(bytes);
            reply.end = last.map_or(0, |end| end as u32);
            at += result;
            if at < end {
                break;
            }
        }
        reply
    }

    /// Whether another node that stays holds a block.
    fn has_other_holder(&self, block: BlockHash) -> bool {
        let control = self.shared.control().published.read();
        self.remaining_holders(&control.index, block).next().is_some()
    }

    fn remaining_holders<'a>(
        &'a self,
        control: &'a Index,
        block: BlockHash,
    ) -> impl Iterator<Item = NodeId> + 'a {
        let holders = self.shared.groups.shard_of(block).published.read().index.holders_of(block);
        let now = self.shared.clock.now();
        let stays = move |node: NodeId, epoch: Epoch| {
            node != self.node
                && holders::is_live(control, node, epoch)
                && !self.shared.copies.draining.lock().is_draining(node, epoch, now)
        };
        holders.into_iter().filter(move |holder| stays(holder.node, holder.epoch)).map(|holder| holder.node)
    }

    /// Tries one target after the other for the rest of the run. Returns the number of leading
    /// blocks now held elsewhere, their bytes, and the end of the last copy.
    async fn copy(&self, run: &BlockRun) -> (usize, u64, Option<CopyOutcome>) {
        let (mut done, mut bytes, mut last) = (0, 0, None);
        for target in self.targets(run) {
            let left = self.until.saturating_duration_since(tokio::time::Instant::now());
            let Some(order) = self.order(run.part(done, run.hashes.len()), target, left) else { break };
            let result = self.shared.copies.copy(&order).await;
            // The reply lets the node delete its copy, so the new holder must be visible first.
            if let Some(seen) = result.visible_at
                && lookup::wait_seen(self.shared, &[seen]).await.is_err()
            {
                tracing::debug!(node = %order.target, "a node reports a copy in an unknown shard");
            }
            // Verified in the index: an unfinished write may be given up, and a fenced node no
            // longer counts.
            let took = &run.hashes[done..][..result.blocks.min(run.hashes.len() - done)];
            let there = took.iter().take_while(|hash| self.has_other_holder(**hash)).count();
            done += there;
            bytes = u64::saturating_add(bytes, result.stored_bytes);
            last = result.end;
            if there < took.len() {
                break;
            }
            if done >= run.hashes.len() || !result.end.is_some_and(CopyOutcome::is_target_refusal) {
                break;
            }
        }
        (done, bytes, last)
    }

    /// Possible targets of a run, best first: a holder of its parent, then the placement order of
    /// its prefix.
    fn targets(&self, run: &BlockRun) -> Vec<NodeId> {
        let control = self.shared.control().published.read();
        let mut nodes: Vec<NodeId> = match run.parent {
            // Only one of them: if all are full, others have room.
            Some(parent) => self.remaining_holders(&control.index, parent).take(1).collect(),
            None => Vec::new(),
        };
        nodes.extend(self.shared.fleet.save_targets(&self.root.0));
        let mut targets: Vec<NodeId> = Vec::new();
        for node in nodes {
            let is_live = control.index.node(node).is_some_and(|state| state.live);
            if is_live && node != self.node && !targets.contains(&node) {
                targets.push(node);
            }
        }
        targets.truncate(TARGETS_MAX);
        targets
    }

    fn order(&self, run: BlockRun, target: NodeId, within: Duration) -> Option<CopyOrder> {
        let control = self.shared.control().published.read();
        CopyOrder::new(&control.index, run, self.node, self.epoch, target, u64::MAX, within)
    }
}

fn count(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
