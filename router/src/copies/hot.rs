//! Copies hot prefixes to nodes near the instances that read them. Remote reads of decisions are
//! accounted in the background, and prefixes worth a copy are copied, several at once, within a
//! budget.
//!
//! Covers the requests that this router sent; each router orders copies for its own, and a node
//! answers at once for blocks that it holds. Not here: the choice of prefixes
//! (`kv_core::place::hot`), the prices (`kv_core::schedule`), and the call to a node (`mod.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Category, InstanceId, NodeId, TenantId};
use kv_core::index::Holder;
use kv_core::place::copies::CopyOutcome;
use kv_core::place::hot_prefixes::{
    HotPrefixes, Proposal, RemoteUse, ReplicaView, ReplicationLimits, segment_blocks,
};
use kv_core::schedule::{Decision, Fleet, HardwareProfile, LiveNode, ReadPath, RouteRequest, Source};
use kvfleet_proto::frame::{FRAME_BYTES_MAX, PAYLOAD_BYTES_MAX};
use smallvec::SmallVec;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{CopyDispatcher, CopyOrder, CopyResult};
use crate::clock::Clock;
use crate::config::HotCopiesConfig;
use crate::groups::Groups;
use crate::metrics::{HotReadOutcome, Metrics};
use crate::view::fleet::FleetView;

/// Interval between two choices of prefixes to copy.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Limit on decisions queued for accounting. One core keeps up, so the queue fills only if no core
/// is free.
const QUEUE_MAX: usize = 1_024;

/// Accounted blocks of one decision, from the first missing one. With the queue limit this bounds
/// memory to sixteen megabytes.
const READ_BLOCKS_MAX: usize = 1_024;

/// Limit on tracked segments, of about 500 bytes each.
const SEGMENTS_MAX: usize = 8_192;

/// Timeout of a copy: a hot prefix is needed now, and the source gives only idle bandwidth.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);

/// Largest frame overhead beside the payload.
const FRAME_HEAD_BYTES_MAX: u64 = (FRAME_BYTES_MAX - PAYLOAD_BYTES_MAX) as u64;

/// Blocks that a decision reads remotely, or recomputes although nodes hold them.
struct RemoteRead {
    instance: InstanceId,
    destination: NodeId,
    tenant: TenantId,
    category: Category,
    block_tokens: u32,
    parent: Option<BlockHash>,
    /// Range of block offsets in the prompt, from the start of a segment.
    blocks: Range<u32>,
    /// First block that the destination lacks.
    missing_from: u32,
    hashes: Vec<BlockHash>,
    sources: Vec<Source>,
}

impl RemoteRead {
    fn new(
        destination: NodeId,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        missing: Range<u32>,
    ) -> Option<RemoteRead> {
        let head = missing.start - missing.start % segment_blocks(asked.block_tokens);
        let known = hashes.get(head as usize..(missing.end as usize).min(hashes.len()))?;
        let hashes_there = &known[..known.len().min(READ_BLOCKS_MAX)];
        Some(RemoteRead {
            instance: decision.instance,
            destination,
            tenant: asked.tenant,
            category: asked.category,
            block_tokens: asked.block_tokens,
            parent: head.checked_sub(1).and_then(|before| hashes.get(before as usize)).copied(),
            blocks: head..head + u32::try_from(hashes_there.len()).ok()?,
            missing_from: missing.start,
            hashes: hashes_there.to_vec(),
            sources: decision.sources.clone(),
        })
    }

    /// Time saved per block if the destination held it, microseconds.
    fn saved_us(&self, fleet: &Fleet) -> Option<Vec<f64>> {
        let mut saved = fleet.replication_gain_us(
            self.instance,
            self.blocks.clone(),
            self.block_tokens,
            &self.sources,
        )?;
        let there = (self.missing_from - self.blocks.start) as usize;
        saved.iter_mut().take(there).for_each(|saved| *saved = 0.0);
        Some(saved)
    }
}

/// Queue of remote reads to account.
pub(crate) struct RemoteReadQueue {
    fleet: Arc<FleetView>,
    metrics: Metrics,
    sender: mpsc::Sender<RemoteRead>,
}

impl RemoteReadQueue {
    /// Records a request sent by this decision, with the number of leading blocks that nodes hold.
    /// Neither waits nor computes prices.
    pub(crate) fn record(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        held_blocks: u32,
    ) {
        let missing = decision.remote_blocks(held_blocks);
        if missing.is_empty() {
            return;
        }
        let own = self.fleet.with_fleet(|fleet| fleet.own_node(decision.instance));
        let remote_read = own.and_then(|own| RemoteRead::new(own, asked, hashes, decision, missing));
        if let Some(afar) = remote_read
            && self.sender.try_send(afar).is_err()
        {
            self.metrics.record_hot_read(HotReadOutcome::Dropped);
        }
    }
}

/// Task that accounts remote reads and orders copies.
pub(crate) struct HotCopier {
    pub(crate) groups: Groups,
    pub(crate) fleet: Arc<FleetView>,
    pub(crate) copies: Arc<CopyDispatcher>,
    pub(crate) clock: Clock,
    pub(crate) metrics: Metrics,
}

impl HotCopier {
    /// Starts the task, which runs until cancelled. `None` if there is no budget.
    pub(crate) fn start(self, config: &HotCopiesConfig, stop: CancellationToken) -> Option<RemoteReadQueue> {
        let rules = config.rules(SEGMENTS_MAX)?;
        let (sender, uses) = mpsc::channel(QUEUE_MAX);
        let left = RemoteReadQueue { fleet: Arc::clone(&self.fleet), metrics: self.metrics.clone(), sender };
        tokio::spawn(self.run(rules, config.copies_max as usize, uses, stop));
        Some(left)
    }

    async fn run(
        self,
        rules: ReplicationLimits,
        copies_max: usize,
        mut uses: mpsc::Receiver<RemoteRead>,
        stop: CancellationToken,
    ) {
        let mut tick = tokio::time::interval(CHECK_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut hot = HotPrefixes::new(rules, self.clock.now());
        // Dropping this set cancels the copies in flight.
        let mut in_flight: JoinSet<(Proposal, CopyResult)> = JoinSet::new();
        loop {
            tokio::select! {
                Some(afar) = uses.recv() => self.account(&mut hot, &afar),
                Some(ended) = in_flight.join_next() => {
                    // If the task panicked, the prefix is considered again after its timeout.
                    if let Ok((proposal, copied)) = ended {
                        self.finish_copy(&mut hot, &proposal, &copied);
                    }
                }
                _ = tick.tick() => self.start_copies(&mut hot, copies_max, &mut in_flight),
                () = stop.cancelled() => return,
            }
        }
    }

    fn account(&self, hot: &mut HotPrefixes, remote_read: &RemoteRead) {
        let Some(saved_us) = self.fleet.with_fleet(|fleet| remote_read.saved_us(fleet)) else { return };
        let used = RemoteUse {
            destination: remote_read.destination,
            tenant: remote_read.tenant,
            category: remote_read.category,
            block_tokens: remote_read.block_tokens,
            parent: remote_read.parent,
            first_offset_blocks: remote_read.blocks.start,
            hashes: &remote_read.hashes,
            saved_us: &saved_us,
        };
        hot.record_use(&used, self.clock.now());
        let saves = saved_us.iter().any(|us| *us > 0.0);
        self.metrics.record_hot_read(if saves {
            HotReadOutcome::Counted
        } else {
            HotReadOutcome::SavesNothing
        });
    }

    fn start_copies(
        &self,
        hot: &mut HotPrefixes,
        copies_max: usize,
        in_flight: &mut JoinSet<(Proposal, CopyResult)>,
    ) {
        // Only start as many as this router's limit allows: a full limit must not count as a node's
        // failure.
        let room = copies_max.saturating_sub(in_flight.len()).min(self.copies.available_slots());
        if room > 0 && !hot.is_empty() {
            let places = FleetSnapshot::take(&self.groups, &self.fleet);
            for proposal in hot.propose(&places, room, self.clock.now()) {
                self.metrics.record_hot_proposal();
                self.start_copy(hot, proposal, in_flight);
            }
        }
        self.metrics.show_hot_segments(hot.len());
    }

    fn start_copy(
        &self,
        hot: &mut HotPrefixes,
        proposal: Proposal,
        in_flight: &mut JoinSet<(Proposal, CopyResult)>,
    ) {
        let Proposal { source, destination, ref run, bytes, gain_us, .. } = proposal;
        let blocks = run.hashes.len() as u64;
        let bytes_max = bytes.saturating_add(blocks.saturating_mul(FRAME_HEAD_BYTES_MAX));
        tracing::debug!(from = %source.node, to = %destination, blocks, gain_us, "copying a hot prefix");
        let order = {
            let control = self.groups.control().published.read();
            let (from, epoch, run) = (source.node, source.epoch, run.clone());
            CopyOrder::new(&control.index, run, from, epoch, destination, bytes_max, COPY_TIMEOUT)
        };
        let Some(order) = order else {
            let lost = CopyResult { end: Some(CopyOutcome::SourceLost), ..CopyResult::default() };
            return self.finish_copy(hot, &proposal, &lost);
        };
        let copies = Arc::clone(&self.copies);
        in_flight.spawn(async move {
            let result = copies.copy(&order).await;
            (proposal, result)
        });
    }

    fn finish_copy(&self, hot: &mut HotPrefixes, proposal: &Proposal, result: &CopyResult) {
        let end = result.end.unwrap_or(CopyOutcome::TargetLost);
        self.metrics.record_hot_copy(end, result.stored_bytes);
        hot.finish(proposal, end, result.blocks, result.stored_bytes, self.clock.now());
    }
}

/// Index and fleet at one moment.
struct FleetSnapshot<'a> {
    groups: &'a Groups,
    profile: HardwareProfile,
    nodes: BTreeMap<NodeId, SnapshotNode>,
}

struct SnapshotNode {
    live: LiveNode,
    /// Whether instances use it as their own node. A draining node has no weight and accepts none.
    accepts_copies: bool,
    block_bytes: u64,
}

impl FleetSnapshot<'_> {
    fn take<'a>(groups: &'a Groups, fleet: &FleetView) -> FleetSnapshot<'a> {
        let (profile, nodes) = fleet.with_fleet(|fleet| {
            let own: BTreeSet<NodeId> =
                fleet.instances().iter().filter_map(|one| fleet.own_node(one.id)).collect();
            let seen = |live: &LiveNode| {
                let takes = own.contains(&live.node);
                (live.node, SnapshotNode { live: live.clone(), accepts_copies: takes, block_bytes: 0 })
            };
            (fleet.profile, fleet.nodes().iter().map(seen).collect::<BTreeMap<_, _>>())
        });
        let mut seen = FleetSnapshot { groups, profile, nodes };
        let control = groups.control().published.read();
        seen.nodes.retain(|node, seen| {
            let state =
                control.index.node(*node).filter(|state| state.live && state.epoch == seen.live.epoch);
            seen.block_bytes = state.map_or(0, |state| state.record.block_bytes);
            state.is_some()
        });
        drop(control);
        seen
    }
}

impl ReplicaView for FleetSnapshot<'_> {
    fn accepts_blocks(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|seen| seen.accepts_copies)
    }

    fn holders(&self, block: BlockHash) -> SmallVec<[Holder; 4]> {
        let mut holders = self.groups.shard_of(block).published.read().index.holders_of(block);
        let is_live = |holder: &Holder| {
            self.nodes.get(&holder.node).is_some_and(|seen| seen.live.epoch == holder.epoch)
        };
        holders.retain(|holder| is_live(holder));
        holders
    }

    fn block_bytes(&self, node: NodeId) -> u64 {
        self.nodes.get(&node).map_or(0, |seen| seen.block_bytes)
    }

    fn copy_us(&self, holder: &Holder, blocks: u64, block_tokens: u32) -> f64 {
        let Some(seen) = self.nodes.get(&holder.node) else { return f64::INFINITY };
        let lane =
            seen.live.price(holder.tier, ReadPath { is_local: false, path: None }, &self.profile).speed;
        let ns = lane.latency_ns.saturating_add(seen.live.stream_ns(
            lane,
            blocks.saturating_mul(block_tokens.into()),
            block_tokens,
            &self.profile,
        ));
        ns as f64 / 1_000.0
    }
}
