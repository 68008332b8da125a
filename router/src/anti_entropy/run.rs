//! Runs comparisons and audits periodically on the leader of each group, until the router stops.
//!
//! An audit that finds a wrong block asks about it again, once the index has applied the
//! announcements that the node had sent before its first answer. A block that is still wrong is
//! then an error and not in transit. Not here: comparison (`digests.rs`) and scores (`audit.rs`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, NodeId};
use kv_core::index::{Holder, Index, NodeState};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::{convert, pb};
use tokio_util::sync::CancellationToken;
use tonic::Request;

use super::AntiEntropy;
use super::audit::AuditScore;
use super::digests::DigestCheck;
use crate::config::AntiEntropyConfig;
use crate::groups::{Group, Groups};
use crate::metrics::Metrics;
use crate::raft::network::{Envelope, Peers};
use crate::view::holders;

/// Timeout of one answer; a busy node or router is asked the next time.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Longest time an audit waits for the index to apply a node's announcements; beyond it the audit
/// is dropped.
const APPLY_WAIT_MAX: Duration = Duration::from_secs(5);

/// Task that runs comparisons and audits.
pub(crate) struct AntiEntropyTask {
    pub(crate) groups: Groups,
    pub(crate) peers: Peers,
    pub(crate) envelope: Envelope,
    pub(crate) anti_entropy: Arc<AntiEntropy>,
    pub(crate) metrics: Metrics,
    pub(crate) config: AntiEntropyConfig,
}

/// A live node of a shard.
#[derive(Clone, Debug)]
struct AuditTarget {
    node: NodeId,
    epoch: Epoch,
    address: String,
}

impl AntiEntropyTask {
    /// Runs until cancelled.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let both = async { tokio::join!(self.compare_periodically(), self.audit_periodically()) };
        // Ends only by cancellation.
        let _ = stop.run_until_cancelled(both).await;
    }

    async fn compare_periodically(&self) {
        let Some(mut tick) = ticks(self.config.digests_ms) else { return };
        loop {
            tick.tick().await;
            for group in self.groups.all().iter().filter(|group| group.consensus.holds_leader_lease()) {
                self.compare_replicas(group).await;
                self.compare_nodes(group);
            }
        }
    }

    /// Compares every node's digest of itself with the index's.
    fn compare_nodes(&self, group: &Group) {
        let shard = group.number();
        let mut found = Vec::new();
        {
            let mut state = self.anti_entropy.state.lock();
            let replica = group.published.read();
            // A full index does not list all blocks, so digests cannot agree.
            let index = &replica.index;
            if index.copies() >= index.limits().copies_max {
                return;
            }
            // Forgets nodes that left.
            let super::AntiEntropyState { digests: told, claims, .. } = &mut *state;
            told.retain(|(of, node), _| *of != shard || index.node(*node).is_some());
            claims.retain(|(of, node), _| *of != shard || index.node(*node).is_some());
            for ((of, node), told) in told {
                let Some(known) = index.node(*node).filter(|known| *of == shard && known.live) else {
                    continue;
                };
                let seq = known.next_seq.0.saturating_sub(1);
                match told.compare(known.epoch, seq, known.digest()) {
                    DigestCheck::Unknown | DigestCheck::Agrees => {}
                    verdict => found.push((*node, seq, verdict == DigestCheck::Differs)),
                }
            }
        }
        for (node, seq, is_new) in found {
            if is_new {
                tracing::error!(
                    %node,
                    shard,
                    seq,
                    "the index of a node differs from its announcements: it is asked to announce everything \
                     again; if this recurs, compare the versions of node and routers"
                );
                self.count_drift(shard);
                self.metrics.record_node_drift(node);
                self.anti_entropy.state.lock().scores.entry(node).or_default().drifts += 1;
            }
            self.request_resync(shard, node);
        }
    }

    pub(super) fn count_drift(&self, group: u16) {
        *self.anti_entropy.state.lock().drifts.entry(group).or_default() += 1;
    }

    fn request_resync(&self, shard: u16, node: NodeId) {
        self.metrics.record_resync_request();
        self.anti_entropy.state.lock().resyncs.insert((shard, node));
    }

    async fn audit_periodically(&self) {
        let Some(mut tick) = ticks(self.config.audit_ms) else { return };
        loop {
            tick.tick().await;
            for group in self.groups.shards().iter().filter(|group| group.consensus.holds_leader_lease()) {
                let Some(audited) = self.choose_target(group) else { continue };
                let Some(score) = self.audit(group, &audited).await else { continue };
                self.record_score(group.number(), &audited, &score);
            }
        }
    }

    /// A random live node.
    fn choose_target(&self, group: &Group) -> Option<AuditTarget> {
        let mut live = self.live_targets(group);
        let at = self.anti_entropy.state.lock().random.below(live.len());
        (at < live.len()).then(|| live.swap_remove(at))
    }

    fn live_targets(&self, group: &Group) -> Vec<AuditTarget> {
        let control = self.groups.control().published.read();
        let shard = group.published.read();
        let counts = |known: &&NodeState| holders::is_live(&control.index, known.record.node, known.epoch);
        let target = |known: &NodeState| AuditTarget {
            node: known.record.node,
            epoch: known.epoch,
            address: known.record.control_address.clone(),
        };
        shard.index.nodes().filter(counts).map(target).collect()
    }

    /// Asks a node about blocks that the index attributes to it, and looks up blocks that it lists.
    /// `None` if inconclusive.
    async fn audit(&self, group: &Group, target: &AuditTarget) -> Option<AuditScore> {
        let claims = self.sample_claims(group, target);
        let first = self.ask(group, target, &claims, self.config.audit_blocks).await?;
        let held = convert::hashes_from_bytes("sample", &first.sample).ok()?;
        let unknown: Vec<_> =
            held.iter().copied().filter(|block| !self.lists(group, target, *block)).collect();
        let wrong = not_held(&claims, &first);
        let score =
            AuditScore { claimed: claims.len() as u64, held: held.len() as u64, ..AuditScore::default() };
        if wrong.is_empty() && unknown.is_empty() {
            return Some(score);
        }
        self.wait_applied(group, target, first.seq).await?;
        let wrong = wrong.into_iter().filter(|block| self.lists(group, target, *block));
        let unknown = unknown.into_iter().filter(|block| !self.lists(group, target, *block));
        let suspects: Vec<BlockHash> = wrong.chain(unknown).collect();
        let second = self.ask(group, target, &suspects, 0).await?;
        self.wait_applied(group, target, second.seq).await?;
        let mut score = score;
        for (block, is_held) in suspects.iter().zip(&second.held) {
            match (self.lists(group, target, *block), is_held) {
                (true, false) => score.claimed_wrong += 1,
                (false, true) => score.held_unknown += 1,
                _ => {}
            }
        }
        Some(score)
    }

    fn sample_claims(&self, group: &Group, target: &AuditTarget) -> Vec<BlockHash> {
        let mut state = self.anti_entropy.state.lock();
        let super::AntiEntropyState { claims, random: chance, .. } = &mut *state;
        let Some(claims) = claims.get_mut(&(group.number(), target.node)) else { return Vec::new() };
        let replica = group.published.read();
        let is_listed = |block| lists(&replica.index, target, block);
        claims.sample(usize::try_from(self.config.audit_blocks).unwrap_or(0), chance, is_listed)
    }

    fn lists(&self, group: &Group, target: &AuditTarget, block: BlockHash) -> bool {
        lists(&group.published.read().index, target, block)
    }

    async fn ask(
        &self,
        group: &Group,
        target: &AuditTarget,
        blocks: &[BlockHash],
        sample: u32,
    ) -> Option<pb::AuditReply> {
        let seed = self.anti_entropy.state.lock().random.next();
        let channel = self.peers.node_channel(&target.address).ok()?;
        let mut request = Request::new(pb::AuditRequest {
            shard: group.number().into(),
            blocks: convert::hashes_to_bytes(blocks),
            sample,
            seed,
        });
        request.set_timeout(ANSWER_TIMEOUT);
        let reply = NodeControlClient::new(channel).audit(request).await.ok()?.into_inner();
        (reply.epoch == target.epoch.0 && reply.held.len() == blocks.len()).then_some(reply)
    }

    /// Waits until the index has applied a batch of the node; `None` on timeout or if the epoch
    /// ends.
    async fn wait_applied(&self, group: &Group, target: &AuditTarget, seq: u64) -> Option<()> {
        let mut changes = group.published.watch_entries();
        let applied = async {
            loop {
                changes.mark_unchanged();
                let at = group.published.read().index.next_seq(target.node);
                match at {
                    Some((epoch, next)) if epoch == target.epoch && next.0 > seq => return Some(()),
                    Some((epoch, _)) if epoch == target.epoch => changes.changed().await.ok()?,
                    _ => return None,
                }
            }
        };
        tokio::time::timeout(APPLY_WAIT_MAX, applied).await.ok()?
    }

    fn record_score(&self, shard: u16, target: &AuditTarget, found: &AuditScore) {
        let node = target.node;
        let score = {
            let mut state = self.anti_entropy.state.lock();
            let score = state.scores.entry(node).or_default();
            score.add(found);
            *score
        };
        self.metrics.record_audit(node, found, &score);
        if found.is_wrong() {
            tracing::error!(
                %node,
                shard,
                claimed_wrong = found.claimed_wrong,
                held_unknown = found.held_unknown,
                "the index and a node differ about blocks, confirmed by a second query: the node is asked to announce \
                 everything again; if this recurs, check its disk and its version"
            );
            self.request_resync(shard, node);
        }
    }
}

/// Blocks that a node reports as not held.
fn not_held(blocks: &[BlockHash], reply: &pb::AuditReply) -> Vec<BlockHash> {
    blocks.iter().zip(&reply.held).filter(|(_, held)| !**held).map(|(block, _)| *block).collect()
}

/// Whether the index attributes a block to a node under its epoch.
fn lists(index: &Index, target: &AuditTarget, block: BlockHash) -> bool {
    let is_audited = |holder: &Holder| (holder.node, holder.epoch) == (target.node, target.epoch);
    index.holders_of(block).iter().any(is_audited)
}

fn ticks(every_ms: u64) -> Option<tokio::time::Interval> {
    let mut tick = (every_ms > 0).then(|| tokio::time::interval(Duration::from_millis(every_ms)))?;
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    Some(tick)
}
