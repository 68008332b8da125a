//! Who compares and asks, and when: the leader of each group, regularly, until the router stops.
//!
//! An audit that finds something wrong asks again about just that, once the index has seen what the node had
//! announced by its first answer; what is still wrong then is neither in transit nor an accident. Not here: what
//! is compared (`digests.rs`) and counted (`audit.rs`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, NodeId};
use kv_core::index::{Holder, Index, NodeState};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::{convert, pb};
use tokio_util::sync::CancellationToken;
use tonic::Request;

use super::Truth;
use super::audit::Score;
use super::digests::Verdict;
use crate::config::TruthConfig;
use crate::groups::{Group, Groups};
use crate::metrics::Metrics;
use crate::raft::network::{Envelope, Peers};
use crate::view::holders;

/// Time for one answer of a node or a router. One that is busy is asked the next time.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Longest an audit waits for the index to see what a node had announced: beyond it, it says nothing.
const SEEN_MAX: Duration = Duration::from_secs(5);

/// What the comparing is done with.
pub(crate) struct Meter {
    pub(crate) groups: Groups,
    pub(crate) peers: Peers,
    pub(crate) envelope: Envelope,
    pub(crate) truth: Arc<Truth>,
    pub(crate) metrics: Metrics,
    pub(crate) config: TruthConfig,
}

/// A live node of a shard.
#[derive(Clone, Debug)]
struct Audited {
    node: NodeId,
    epoch: Epoch,
    address: String,
}

impl Meter {
    /// Runs until cancelled.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let both = async { tokio::join!(self.compare_regularly(), self.audit_regularly()) };
        // Ends only so.
        let _ = stop.run_until_cancelled(both).await;
    }

    async fn compare_regularly(&self) {
        let Some(mut tick) = ticks(self.config.digests_ms) else { return };
        loop {
            tick.tick().await;
            for group in self.groups.all().iter().filter(|group| group.consensus.holds_office()) {
                self.compare_replicas(group).await;
                self.compare_nodes(group);
            }
        }
    }

    /// Compares every node's digest of itself with the one that the index keeps.
    fn compare_nodes(&self, group: &Group) {
        let shard = group.number();
        let mut found = Vec::new();
        {
            let mut state = self.truth.state.lock();
            let replica = group.published.read();
            // What found no room is not listed, and no digest can agree.
            let index = &replica.index;
            if index.copies() >= index.limits().copies_max {
                return;
            }
            // Of nodes that left, nothing is to be said.
            let super::State { told, claims, .. } = &mut *state;
            told.retain(|(of, node), _| *of != shard || index.node(*node).is_some());
            claims.retain(|(of, node), _| *of != shard || index.node(*node).is_some());
            for ((of, node), told) in told {
                let Some(known) = index.node(*node).filter(|known| *of == shard && known.live) else {
                    continue;
                };
                let seq = known.next_seq.0.saturating_sub(1);
                match told.compare(known.epoch, seq, known.digest()) {
                    Verdict::Unknown | Verdict::Agrees => {}
                    verdict => found.push((*node, seq, verdict == Verdict::Drifts)),
                }
            }
        }
        for (node, seq, is_new) in found {
            if is_new {
                tracing::error!(
                    %node,
                    shard,
                    seq,
                    "what the index lists of a node is not what the node announced: it is asked to announce all anew; \
                     if this comes again, compare the versions of node and routers"
                );
                self.drifted(shard);
                self.metrics.node_drift(node);
                self.truth.state.lock().scores.entry(node).or_default().drifts += 1;
            }
            self.want(shard, node);
        }
    }

    pub(super) fn drifted(&self, group: u16) {
        *self.truth.state.lock().drifts.entry(group).or_default() += 1;
    }

    fn want(&self, shard: u16, node: NodeId) {
        self.metrics.resync_asked();
        self.truth.state.lock().wanted.insert((shard, node));
    }

    async fn audit_regularly(&self) {
        let Some(mut tick) = ticks(self.config.audit_ms) else { return };
        loop {
            tick.tick().await;
            for group in self.groups.shards().iter().filter(|group| group.consensus.holds_office()) {
                let Some(audited) = self.choose(group) else { continue };
                let Some(score) = self.audit(group, &audited).await else { continue };
                self.count(group.number(), &audited, &score);
            }
        }
    }

    /// A live node at random.
    fn choose(&self, group: &Group) -> Option<Audited> {
        let mut live = self.live(group);
        let at = self.truth.state.lock().chance.below(live.len());
        (at < live.len()).then(|| live.swap_remove(at))
    }

    fn live(&self, group: &Group) -> Vec<Audited> {
        let control = self.groups.control().published.read();
        let shard = group.published.read();
        let counts = |known: &&NodeState| holders::is_live(&control.index, known.record.node, known.epoch);
        let audited = |known: &NodeState| Audited {
            node: known.record.node,
            epoch: known.epoch,
            address: known.record.control_address.clone(),
        };
        shard.index.nodes().filter(counts).map(audited).collect()
    }

    /// Asks a node about blocks that the index attributes to it, and looks up blocks that it names. None when it
    /// cannot be said.
    async fn audit(&self, group: &Group, audited: &Audited) -> Option<Score> {
        let claims = self.claims(group, audited);
        let first = self.ask(group, audited, &claims, self.config.audit_blocks).await?;
        let held = convert::hashes_from_bytes("sample", &first.sample).ok()?;
        let unknown: Vec<_> =
            held.iter().copied().filter(|block| !self.lists(group, audited, *block)).collect();
        let wrong = told_not_held(&claims, &first);
        let score = Score { claimed: claims.len() as u64, held: held.len() as u64, ..Score::default() };
        if wrong.is_empty() && unknown.is_empty() {
            return Some(score);
        }
        self.seen(group, audited, first.seq).await?;
        let wrong = wrong.into_iter().filter(|block| self.lists(group, audited, *block));
        let unknown = unknown.into_iter().filter(|block| !self.lists(group, audited, *block));
        let doubted: Vec<BlockHash> = wrong.chain(unknown).collect();
        let second = self.ask(group, audited, &doubted, 0).await?;
        self.seen(group, audited, second.seq).await?;
        let mut score = score;
        for (block, is_held) in doubted.iter().zip(&second.held) {
            match (self.lists(group, audited, *block), is_held) {
                (true, false) => score.claimed_wrong += 1,
                (false, true) => score.held_unknown += 1,
                _ => {}
            }
        }
        Some(score)
    }

    fn claims(&self, group: &Group, audited: &Audited) -> Vec<BlockHash> {
        let mut state = self.truth.state.lock();
        let super::State { claims, chance, .. } = &mut *state;
        let Some(claims) = claims.get_mut(&(group.number(), audited.node)) else { return Vec::new() };
        let replica = group.published.read();
        let is_listed = |block| lists(&replica.index, audited, block);
        claims.sample(usize::try_from(self.config.audit_blocks).unwrap_or(0), chance, is_listed)
    }

    fn lists(&self, group: &Group, audited: &Audited, block: BlockHash) -> bool {
        lists(&group.published.read().index, audited, block)
    }

    async fn ask(
        &self,
        group: &Group,
        audited: &Audited,
        blocks: &[BlockHash],
        sample: u32,
    ) -> Option<pb::AuditReply> {
        let seed = self.truth.state.lock().chance.next();
        let channel = self.peers.channel(&audited.address).ok()?;
        let mut request = Request::new(pb::AuditRequest {
            shard: group.number().into(),
            blocks: convert::hashes_to_bytes(blocks),
            sample,
            seed,
        });
        request.set_timeout(ANSWER_MAX);
        let reply = NodeControlClient::new(channel).audit(request).await.ok()?.into_inner();
        (reply.epoch == audited.epoch.0 && reply.held.len() == blocks.len()).then_some(reply)
    }

    /// Waits until the index has applied a batch of the node; none when it takes too long, or the epoch ends.
    async fn seen(&self, group: &Group, audited: &Audited, seq: u64) -> Option<()> {
        let mut changes = group.published.changes();
        let applied = async {
            loop {
                changes.mark_unchanged();
                let at = group.published.read().index.next_seq(audited.node);
                match at {
                    Some((epoch, next)) if epoch == audited.epoch && next.0 > seq => return Some(()),
                    Some((epoch, _)) if epoch == audited.epoch => changes.changed().await.ok()?,
                    _ => return None,
                }
            }
        };
        tokio::time::timeout(SEEN_MAX, applied).await.ok()?
    }

    fn count(&self, shard: u16, audited: &Audited, found: &Score) {
        let node = audited.node;
        let score = {
            let mut state = self.truth.state.lock();
            let score = state.scores.entry(node).or_default();
            score.add(found);
            *score
        };
        self.metrics.audited(node, found, &score);
        if found.is_wrong() {
            tracing::error!(
                %node,
                shard,
                claimed_wrong = found.claimed_wrong,
                held_unknown = found.held_unknown,
                "the index and a node differ about blocks, also when asked again: the node is asked to announce all \
                 anew; if this comes again, look at its disk and its version"
            );
            self.want(shard, node);
        }
    }
}

/// Blocks that a node says it does not hold.
fn told_not_held(blocks: &[BlockHash], reply: &pb::AuditReply) -> Vec<BlockHash> {
    blocks.iter().zip(&reply.held).filter(|(_, held)| !**held).map(|(block, _)| *block).collect()
}

/// Whether the index attributes a block to a node under its epoch.
fn lists(index: &Index, audited: &Audited, block: BlockHash) -> bool {
    let is_audited = |holder: &Holder| (holder.node, holder.epoch) == (audited.node, audited.epoch);
    index.holders_of(block).iter().any(is_audited)
}

fn ticks(every_ms: u64) -> Option<tokio::time::Interval> {
    let mut tick = (every_ms > 0).then(|| tokio::time::interval(Duration::from_millis(every_ms)))?;
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    Some(tick)
}
