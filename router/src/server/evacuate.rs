//! Evacuate: a node drains, and what it alone holds goes to other nodes.
//!
//! Where a run goes: to a node that has what comes before it, else where new blocks of its prefix go. Not here: the copying
//! (`crate::copies`), and in which order a node offers what it holds (`kvfleet-node`).

use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, NodeId};
use kv_core::index::Index;
use kv_core::place::copies::{BlockRun, CopyEnd};
use kvfleet_proto::{convert, pb};
use tonic::Status;

use super::{Shared, check, lookup};
use crate::copies::Order;
use crate::view::holders;

/// Blocks of one call.
const RUN_BLOCKS_MAX: usize = 4_096;

/// Nodes that are asked to take one part of a run.
const TARGETS_MAX: usize = 3;

/// Longest that one call may take.
const WITHIN_MAX: Duration = Duration::from_secs(60);

/// Answers a node that drains.
pub(super) async fn evacuate(
    shared: &Shared,
    request: &pb::EvacuateRequest,
) -> Result<pb::EvacuateReply, Status> {
    let (node, epoch) = (NodeId(request.node), Epoch(request.epoch));
    if !holders::is_live(&shared.control().published.read().index, node, epoch) {
        return Err(Status::failed_precondition(format!(
            "node {node} is not in the cluster under epoch {epoch}, as far as this router knows: join first"
        )));
    }
    if shared.copies.draining.lock().say(node, epoch, shared.clock.now()) {
        shared.fleet.stop_saving(node);
        tracing::info!(%node, %epoch, "a node drains: nothing new is saved there");
    }
    let Some(run) = &request.run else { return Ok(pb::EvacuateReply::default()) };
    let run = convert::run_from_pb(run).map_err(check::invalid)?;
    check::at_most("number of blocks in `run`", run.hashes.len(), RUN_BLOCKS_MAX)?;
    let root = convert::hash_field("root", &request.root).map_err(check::invalid)?;
    let within = Duration::from_millis(request.within_ms).min(WITHIN_MAX);
    let leaver = Leaver { shared, node, epoch, root, until: tokio::time::Instant::now() + within };
    Ok(leaver.give(&run).await)
}

/// Who leaves, and until when its run must be somewhere.
struct Leaver<'a> {
    shared: &'a Shared,
    node: NodeId,
    epoch: Epoch,
    root: BlockHash,
    until: tokio::time::Instant,
}

impl Leaver<'_> {
    /// Gives the run away from its head on, as far as that goes.
    async fn give(&self, run: &BlockRun) -> pb::EvacuateReply {
        let mut reply = pb::EvacuateReply::default();
        let mut at = 0;
        while at < run.hashes.len() {
            let is_elsewhere = self.is_elsewhere(run.hashes[at]);
            let alike = |hash: &&BlockHash| self.is_elsewhere(**hash) == is_elsewhere;
            let end = at + run.hashes[at..].iter().take_while(alike).count().max(1);
            if is_elsewhere {
                reply.elsewhere_blocks += count(end - at);
                at = end;
                continue;
            }
            let (copied, bytes, last) = self.copy(&run.part(at, end)).await;
            reply.copied_blocks += count(copied);
            reply.copied_bytes = reply.copied_bytes.saturating_add(bytes);
            reply.end = last.map_or(0, |end| end as u32);
            at += copied;
            if at < end {
                break;
            }
        }
        reply
    }

    /// Whether somebody holds a block who stays.
    fn is_elsewhere(&self, block: BlockHash) -> bool {
        let control = self.shared.control().published.read();
        self.stayers(&control.index, block).next().is_some()
    }

    fn stayers<'a>(&'a self, control: &'a Index, block: BlockHash) -> impl Iterator<Item = NodeId> + 'a {
        let holders = self.shared.groups.of_block(block).published.read().index.holders_of(block);
        let now = self.shared.clock.now();
        let stays = move |node: NodeId, epoch: Epoch| {
            node != self.node
                && holders::is_live(control, node, epoch)
                && !self.shared.copies.draining.lock().has(node, epoch, now)
        };
        holders.into_iter().filter(move |holder| stays(holder.node, holder.epoch)).map(|holder| holder.node)
    }

    /// Has one target after the other take what the one before did not; how many of its first blocks are somewhere now, their bytes, and
    /// how the last copy ended.
    async fn copy(&self, run: &BlockRun) -> (usize, u64, Option<CopyEnd>) {
        let (mut done, mut bytes, mut last) = (0, 0, None);
        for target in self.targets(run) {
            let left = self.until.saturating_duration_since(tokio::time::Instant::now());
            let Some(order) = self.order(run.part(done, run.hashes.len()), target, left) else { break };
            let copied = self.shared.copies.copy(&order).await;
            // What the node hears to be elsewhere can be found there: it leaves upon it.
            if let Some(seen) = copied.visible_at
                && lookup::wait_seen(self.shared, &[seen]).await.is_err()
            {
                tracing::debug!(node = %order.target, "a node says of a copy that it is in no shard that there is");
            }
            // Nobody is believed on a word: what is only being written may be given up, and a node that was left out meanwhile has nothing.
            let took = &run.hashes[done..][..copied.blocks.min(run.hashes.len() - done)];
            let there = took.iter().take_while(|hash| self.is_elsewhere(**hash)).count();
            done += there;
            bytes = u64::saturating_add(bytes, copied.stored_bytes);
            last = copied.end;
            if there < took.len() {
                break;
            }
            if done >= run.hashes.len() || !copied.end.is_some_and(CopyEnd::is_of_target) {
                break;
            }
        }
        (done, bytes, last)
    }

    /// Who may take a run, the best first: whoever has the block before it, then where new blocks of the prefix would go.
    fn targets(&self, run: &BlockRun) -> Vec<NodeId> {
        let control = self.shared.control().published.read();
        let mut nodes: Vec<NodeId> = match run.parent {
            // One of them: where all are full, others have room.
            Some(parent) => self.stayers(&control.index, parent).take(1).collect(),
            None => Vec::new(),
        };
        nodes.extend(self.shared.fleet.places(&self.root.0));
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

    fn order(&self, run: BlockRun, target: NodeId, within: Duration) -> Option<Order> {
        let control = self.shared.control().published.read();
        Order::new(&control.index, run, (self.node, self.epoch), target, (u64::MAX, within))
    }
}

fn count(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
