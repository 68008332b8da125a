//! Has hot prefixes copied to where they are asked for: what decisions read from afar is counted beside them, and what is worth a copy is
//! copied, some times at once, under a budget.
//!
//! Of the requests that this router sent; every router has copied what its own say, and a node answers at once for what it has. Not here: what is worth a
//! copy (`kv_core::place::hot`), at what prices (`kv_core::schedule`), and telling a node (`mod.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Category, InstanceId, NodeId, TenantId};
use kv_core::index::Holder;
use kv_core::place::copies::CopyEnd;
use kv_core::place::hot::{Hot, HotRules, Places, Proposal, Use, segment_blocks};
use kv_core::schedule::{Decision, Fleet, HardwareProfile, LiveNode, Reader, RouteRequest, Source};
use kvfleet_proto::frame::{FRAME_BYTES_MAX, PAYLOAD_BYTES_MAX};
use smallvec::SmallVec;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{Copied, Copies, Order};
use crate::clock::Clock;
use crate::config::HotCopiesConfig;
use crate::groups::Groups;
use crate::metrics::{HotUse, Metrics};
use crate::view::fleet::FleetView;

/// Between two looks at what is worth a copy.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Decisions that wait to be counted. They are counted as fast as a core does it: more wait only where none is left for that.
const USES_MAX: usize = 1_024;

/// Blocks of one decision that are counted, from the first that is missing: with those above, sixteen megabytes at most.
const USE_BLOCKS_MAX: usize = 1_024;

/// Segments that are remembered, of some 500 bytes each.
const SEGMENTS_MAX: usize = 8_192;

/// Longest that a copy may take: what is hot is wanted now, and the source gives only what nobody else wants.
const WITHIN: Duration = Duration::from_secs(10);

/// What a frame has beside its payload at most.
const FRAME_HEAD_BYTES_MAX: u64 = (FRAME_BYTES_MAX - PAYLOAD_BYTES_MAX) as u64;

/// What a decision reads from afar, or has computed, though nodes hold it.
struct Afar {
    instance: InstanceId,
    destination: NodeId,
    tenant: TenantId,
    category: Category,
    block_tokens: u32,
    parent: Option<BlockHash>,
    /// Of `hashes`, from the head of a segment on.
    blocks: Range<u32>,
    /// The first that is not at the destination.
    missing_from: u32,
    hashes: Vec<BlockHash>,
    sources: Vec<Source>,
}

impl Afar {
    fn of(
        destination: NodeId,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        missing: Range<u32>,
    ) -> Option<Afar> {
        let head = missing.start - missing.start % segment_blocks(asked.block_tokens);
        let known = hashes.get(head as usize..(missing.end as usize).min(hashes.len()))?;
        let hashes_there = &known[..known.len().min(USE_BLOCKS_MAX)];
        Some(Afar {
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

    /// By how much sooner each block would be there.
    fn saved_us(&self, fleet: &Fleet) -> Option<Vec<f64>> {
        let mut saved =
            fleet.nearer_us(self.instance, self.blocks.clone(), self.block_tokens, &self.sources)?;
        let there = (self.missing_from - self.blocks.start) as usize;
        saved.iter_mut().take(there).for_each(|saved| *saved = 0.0);
        Some(saved)
    }
}

/// Where decisions leave what they read from afar.
pub(crate) struct Uses {
    fleet: Arc<FleetView>,
    metrics: Metrics,
    sender: mpsc::Sender<Afar>,
}

impl Uses {
    /// A request was sent by this decision, and nodes hold so many of its leading blocks. This neither waits nor prices anything.
    pub(crate) fn sent(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        held_blocks: u32,
    ) {
        let missing = decision.afar_blocks(held_blocks);
        if missing.is_empty() {
            return;
        }
        let own = self.fleet.ask(|fleet| fleet.own_node(decision.instance));
        let afar = own.and_then(|own| Afar::of(own, asked, hashes, decision, missing));
        if let Some(afar) = afar
            && self.sender.try_send(afar).is_err()
        {
            self.metrics.hot_use(HotUse::Dropped);
        }
    }
}

/// What the copying is done with.
pub(crate) struct HotCopier {
    pub(crate) groups: Groups,
    pub(crate) fleet: Arc<FleetView>,
    pub(crate) copies: Arc<Copies>,
    pub(crate) clock: Clock,
    pub(crate) metrics: Metrics,
}

impl HotCopier {
    /// Counts and copies until cancelled; nothing of it where there is no budget.
    pub(crate) fn start(self, config: &HotCopiesConfig, stop: CancellationToken) -> Option<Uses> {
        let rules = config.rules(SEGMENTS_MAX)?;
        let (sender, uses) = mpsc::channel(USES_MAX);
        let left = Uses { fleet: Arc::clone(&self.fleet), metrics: self.metrics.clone(), sender };
        tokio::spawn(self.run(rules, config.copies_max as usize, uses, stop));
        Some(left)
    }

    async fn run(
        self,
        rules: HotRules,
        copies_max: usize,
        mut uses: mpsc::Receiver<Afar>,
        stop: CancellationToken,
    ) {
        let mut tick = tokio::time::interval(LOOK_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut hot = Hot::new(rules, self.clock.now());
        // Who does not wait for a copy ends it: what is under way at the end goes with this set.
        let mut under_way: JoinSet<(Proposal, Copied)> = JoinSet::new();
        loop {
            tokio::select! {
                Some(afar) = uses.recv() => self.count(&mut hot, &afar),
                Some(ended) = under_way.join_next() => {
                    // One that broke down is looked at again when its time is over.
                    if let Ok((proposal, copied)) = ended {
                        self.ended(&mut hot, &proposal, &copied);
                    }
                }
                _ = tick.tick() => self.look(&mut hot, copies_max, &mut under_way),
                () = stop.cancelled() => return,
            }
        }
    }

    fn count(&self, hot: &mut Hot, afar: &Afar) {
        let Some(saved_us) = self.fleet.ask(|fleet| afar.saved_us(fleet)) else { return };
        let used = Use {
            destination: afar.destination,
            tenant: afar.tenant,
            category: afar.category,
            block_tokens: afar.block_tokens,
            parent: afar.parent,
            first_offset_blocks: afar.blocks.start,
            hashes: &afar.hashes,
            saved_us: &saved_us,
        };
        hot.used(&used, self.clock.now());
        let saves = saved_us.iter().any(|us| *us > 0.0);
        self.metrics.hot_use(if saves { HotUse::Counted } else { HotUse::SavesNothing });
    }

    fn look(&self, hot: &mut Hot, copies_max: usize, under_way: &mut JoinSet<(Proposal, Copied)>) {
        // What is full at this router is no node's fault.
        let room = copies_max.saturating_sub(under_way.len()).min(self.copies.places_left());
        if room > 0 && !hot.is_empty() {
            let places = Seen::of(&self.groups, &self.fleet);
            for proposal in hot.propose(&places, room, self.clock.now()) {
                self.metrics.hot_proposed();
                self.begin(hot, proposal, under_way);
            }
        }
        self.metrics.hot_segments(hot.len());
    }

    fn begin(&self, hot: &mut Hot, proposal: Proposal, under_way: &mut JoinSet<(Proposal, Copied)>) {
        let Proposal { source, destination, ref run, bytes, gain_us, .. } = proposal;
        let blocks = run.hashes.len() as u64;
        let bytes_max = bytes.saturating_add(blocks.saturating_mul(FRAME_HEAD_BYTES_MAX));
        tracing::debug!(from = %source.node, to = %destination, blocks, gain_us, "a hot prefix is copied");
        let order = {
            let control = self.groups.control().published.read();
            let from = (source.node, source.epoch);
            Order::new(&control.index, run.clone(), from, destination, (bytes_max, WITHIN))
        };
        let Some(order) = order else {
            let lost = Copied { end: Some(CopyEnd::SourceLost), ..Copied::default() };
            return self.ended(hot, &proposal, &lost);
        };
        let copies = Arc::clone(&self.copies);
        under_way.spawn(async move {
            let copied = copies.copy(&order).await;
            (proposal, copied)
        });
    }

    fn ended(&self, hot: &mut Hot, proposal: &Proposal, copied: &Copied) {
        let end = copied.end.unwrap_or(CopyEnd::TargetLost);
        self.metrics.hot_copied(end, copied.stored_bytes);
        hot.ended(proposal, end, (copied.blocks, copied.stored_bytes), self.clock.now());
    }
}

/// What index and fleet say at one moment.
struct Seen<'a> {
    groups: &'a Groups,
    profile: HardwareProfile,
    nodes: BTreeMap<NodeId, SeenNode>,
}

struct SeenNode {
    live: LiveNode,
    /// Whether instances read from it as their own. One that drains has no weight and takes nothing.
    takes: bool,
    block_bytes: u64,
}

impl Seen<'_> {
    fn of<'a>(groups: &'a Groups, fleet: &FleetView) -> Seen<'a> {
        let (profile, nodes) = fleet.ask(|fleet| {
            let own: BTreeSet<NodeId> =
                fleet.instances().iter().filter_map(|one| fleet.own_node(one.id)).collect();
            let seen = |live: &LiveNode| {
                let takes = own.contains(&live.node);
                (live.node, SeenNode { live: live.clone(), takes, block_bytes: 0 })
            };
            (fleet.profile, fleet.nodes().iter().map(seen).collect::<BTreeMap<_, _>>())
        });
        let mut seen = Seen { groups, profile, nodes };
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

impl Places for Seen<'_> {
    fn takes(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|seen| seen.takes)
    }

    fn holders(&self, block: BlockHash) -> SmallVec<[Holder; 4]> {
        let mut holders = self.groups.of_block(block).published.read().index.holders_of(block);
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
        let lane = seen.live.price(holder.tier, Reader { is_own: false, path: None }, &self.profile).lane;
        let ns = lane.latency_ns.saturating_add(seen.live.stream_ns(
            lane,
            blocks.saturating_mul(block_tokens.into()),
            block_tokens,
            &self.profile,
        ));
        ns as f64 / 1_000.0
    }
}
