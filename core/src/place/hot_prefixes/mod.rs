//! Replication of hot prefixes: a decayed heat per prefix, from the costs of decisions, and
//! proposals of further copies under a byte budget.
//!
//! Heat is time that requests would have saved if their own node had held the block. It decays with
//! a time constant, so it is the expected saving over the next such span. A copy is proposed if
//! that exceeds the link time of the copy. Not here: prices (the scheduler), the index (the
//! caller), the copying, and whether more valuable blocks would have to leave: the target's tier
//! book knows that and refuses (`kvfleet-node`).

use std::collections::BTreeMap;
use std::time::Duration;

use smallvec::SmallVec;

use super::copies::{BlockRun, CopyOutcome};
use crate::id::{BlockHash, Category, NodeId, TenantId, Timestamp};
use crate::index::Holder;

/// Tokens of a segment: few enough to match a shared prompt closely, and enough for a copy to be
/// worth its call.
const SEGMENT_TOKENS: u32 = 256;

/// Most blocks of a segment, however few tokens each has.
const SEGMENT_BLOCKS_MAX: u32 = 16;

/// Destinations tracked per segment: the hottest ones.
const DESTINATIONS_MAX: usize = 8;

/// Most segments of one proposal.
const RUN_SEGMENTS_MAX: usize = 32;

/// Blocks of a segment; segments begin at multiples of this number.
#[must_use]
pub fn segment_blocks(block_tokens: u32) -> u32 {
    (SEGMENT_TOKENS / block_tokens.max(1)).clamp(1, SEGMENT_BLOCKS_MAX)
}

/// Limits of heat tracking and proposals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplicationLimits {
    /// Time constant of the heat; also the horizon of a proposal's gain.
    pub decay: Duration,
    /// Average copy budget, in bytes a second.
    pub bytes_per_second: u64,
    /// Largest unused budget, in bytes.
    pub burst_bytes: u64,
    /// Most segments that are tracked.
    pub segments_max: usize,
}

/// Blocks that a request read from another node or recomputed, because its own node did not hold
/// them.
#[derive(Clone, Copy, Debug)]
pub struct RemoteUse<'a> {
    /// The own node of the request's instance.
    pub destination: NodeId,
    /// Their tenant.
    pub tenant: TenantId,
    /// Category of the request.
    pub category: Category,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// The block before the first one.
    pub parent: Option<BlockHash>,
    /// Offset of the first block, in blocks.
    pub first_offset_blocks: u32,
    /// Block hashes in prefix order.
    pub hashes: &'a [BlockHash],
    /// How much sooner each block would have been available, in microseconds; 0 for a block that is
    /// there.
    pub saved_us: &'a [f64],
}

/// The fleet data that proposals rest on besides heat.
pub trait ReplicaView {
    /// Whether a node is live, takes new blocks, and has instances on its host.
    fn accepts_blocks(&self, node: NodeId) -> bool;
    /// Live nodes that hold a block.
    fn holders(&self, block: BlockHash) -> SmallVec<[Holder; 4]>;
    /// Size of a block at a node, in bytes.
    fn block_bytes(&self, node: NodeId) -> u64;
    /// Link time of copying this many blocks from a holder, in microseconds.
    fn copy_us(&self, holder: &Holder, blocks: u64, block_tokens: u32) -> f64;
}

/// A copy that saves more than it costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// The source.
    pub source: Holder,
    /// The target node.
    pub destination: NodeId,
    /// The blocks.
    pub run: BlockRun,
    /// Total size in bytes, taken from the budget.
    pub bytes: u64,
    /// Expected saving within the time constant minus the copy cost, in microseconds.
    pub gain_us: f64,
    /// Keys of its segments: their last blocks.
    keys: Vec<BlockHash>,
}

/// Heat towards one destination.
#[derive(Clone, Copy, Debug)]
struct Heat {
    node: NodeId,
    saved_us: f64,
    at: Timestamp,
    /// Earliest next proposal: a copy is in flight, or ended recently.
    retry_after: Timestamp,
}

#[derive(Clone, Debug)]
struct HotSegment {
    tenant: TenantId,
    category: Category,
    block_tokens: u32,
    parent: Option<BlockHash>,
    first_offset_blocks: u32,
    hashes: Box<[BlockHash]>,
    heats: SmallVec<[Heat; 2]>,
}

/// A segment that is worth a copy to one destination.
#[derive(Clone, Debug)]
struct CopyCandidate {
    gain_us: f64,
    bytes: u64,
    parent: Option<BlockHash>,
    /// Fastest first.
    holders: SmallVec<[Holder; 4]>,
}

/// By destination and segment key.
type CopyCandidates = BTreeMap<(NodeId, BlockHash), CopyCandidate>;

/// Heat of one router. Every method takes the current time.
#[derive(Clone, Debug)]
pub struct HotPrefixes {
    limits: ReplicationLimits,
    /// By key: the hash of the last block, which covers all blocks before it.
    segments: BTreeMap<BlockHash, HotSegment>,
    /// Nodes that could not take any copy, with the time until which they get no proposals.
    cooldowns: BTreeMap<NodeId, Timestamp>,
    budget_bytes: f64,
    budget_at: Timestamp,
}

impl HotPrefixes {
    /// An empty tracker with a full budget.
    #[must_use]
    pub fn new(limits: ReplicationLimits, now: Timestamp) -> HotPrefixes {
        let budget_bytes = limits.burst_bytes as f64;
        HotPrefixes {
            limits,
            segments: BTreeMap::new(),
            cooldowns: BTreeMap::new(),
            budget_bytes,
            budget_at: now,
        }
    }

    /// Number of tracked segments.
    #[must_use]
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether no segment is tracked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Records a remote use. Blocks outside whole segments, and segments without a saving, are
    /// ignored.
    pub fn record_use(&mut self, used: &RemoteUse<'_>, now: Timestamp) {
        let size = segment_blocks(used.block_tokens) as usize;
        let first = used.first_offset_blocks as usize;
        let skipped = first.next_multiple_of(size) - first;
        let mut parent = skipped.checked_sub(1).map_or(used.parent, |at| used.hashes.get(at).copied());
        let mut offset = first + skipped;
        let hashes = used.hashes.get(skipped..).unwrap_or_default().chunks_exact(size);
        let saved = used.saved_us.get(skipped..).unwrap_or_default().chunks_exact(size);
        for (hashes, saved) in hashes.zip(saved) {
            let Some(&key) = hashes.last() else { break };
            let saved_us: f64 = saved.iter().sum();
            if saved_us.is_finite() && saved_us > 0.0 {
                self.add_heat(used, parent, offset, hashes, saved_us, now);
            }
            (parent, offset) = (Some(key), offset + size);
        }
    }

    fn add_heat(
        &mut self,
        used: &RemoteUse<'_>,
        parent: Option<BlockHash>,
        offset: usize,
        hashes: &[BlockHash],
        saved_us: f64,
        now: Timestamp,
    ) {
        let Some(&key) = hashes.last() else { return };
        if !self.segments.contains_key(&key) && self.segments.len() >= self.limits.segments_max {
            self.forget_coldest_half(now);
            if self.segments.len() >= self.limits.segments_max {
                return;
            }
        }
        let segment = self.segments.entry(key).or_insert_with(|| HotSegment {
            tenant: used.tenant,
            category: used.category,
            block_tokens: used.block_tokens,
            parent,
            first_offset_blocks: u32::try_from(offset).unwrap_or(u32::MAX),
            hashes: hashes.into(),
            heats: SmallVec::new(),
        });
        // A caller that cuts the same prompt into other blocks is wrong, and its use is ignored.
        if segment.hashes.as_ref() == hashes {
            (segment.tenant, segment.category) = (used.tenant, used.category);
            segment.add_heat(used.destination, saved_us, self.limits.decay, now);
        }
    }

    /// Up to `limit` copies that save more than they cost and fit the budget, each time the one
    /// with the largest gain. A proposal counts as in flight until [`Self::finish`], for at most
    /// twice the time constant.
    pub fn propose(&mut self, places: &impl ReplicaView, limit: usize, now: Timestamp) -> Vec<Proposal> {
        self.refill(now);
        self.cooldowns.retain(|_, until| *until > now);
        let mut proposals = Vec::new();
        if limit == 0 || self.budget_bytes < 1.0 {
            return proposals;
        }
        let mut chances = self.copy_candidates(places, now);
        let mut known = BTreeMap::new();
        // Without its predecessor at the node, a copy would never be read.
        let mut holds = |node: NodeId, parent: BlockHash| {
            let ask = || places.holders(parent).iter().any(|holder| holder.node == node);
            *known.entry((node, parent)).or_insert_with(ask)
        };
        while proposals.len() < limit
            && let Some((destination, keys)) = self.best_run(&chances, &mut holds)
        {
            let taken: Vec<CopyCandidate> =
                keys.iter().filter_map(|key| chances.remove(&(destination, *key))).collect();
            proposals.extend(self.make_proposal(destination, keys, &taken, now));
        }
        proposals
    }

    /// Every segment and destination with a positive gain that may be proposed now.
    fn copy_candidates(&self, places: &impl ReplicaView, now: Timestamp) -> CopyCandidates {
        let mut chances = CopyCandidates::new();
        for (key, segment) in &self.segments {
            let is_due = |heat: &&Heat| heat.retry_after <= now && !self.cooldowns.contains_key(&heat.node);
            let mut due = segment.heats.iter().filter(is_due).peekable();
            if due.peek().is_none() {
                continue;
            }
            let copy_us =
                |from: &Holder| places.copy_us(from, segment.hashes.len() as u64, segment.block_tokens);
            let mut holders = places.holders(*key);
            holders.sort_by(|left, right| copy_us(left).total_cmp(&copy_us(right)).then(left.cmp(right)));
            let Some(nearest) = holders.first() else { continue };
            let copy_us = copy_us(nearest);
            for heat in due {
                let gain_us = decayed_heat(heat, self.limits.decay, now) - copy_us;
                let is_there = holders.iter().any(|holder| holder.node == heat.node);
                if gain_us > 0.0 && !is_there && places.accepts_blocks(heat.node) {
                    let bytes = places.block_bytes(heat.node).saturating_mul(segment.hashes.len() as u64);
                    let (parent, holders) = (segment.parent, holders.clone());
                    chances.insert((heat.node, *key), CopyCandidate { gain_us, bytes, parent, holders });
                }
            }
        }
        chances
    }

    /// The segment and destination with the largest gain that may begin a run there, extended by
    /// following segments of the same prefix with a gain of their own. Ties prefer a segment with a
    /// single holder: it is lost with that node.
    fn best_run(
        &self,
        chances: &CopyCandidates,
        holds: &mut impl FnMut(NodeId, BlockHash) -> bool,
    ) -> Option<(NodeId, Vec<BlockHash>)> {
        let rank = |chance: &CopyCandidate| (chance.gain_us, chance.holders.len() == 1);
        let mut best: Option<(&(NodeId, BlockHash), &CopyCandidate)> = None;
        for (place, chance) in chances {
            let is_better = best.is_none_or(|(_, most)| rank(chance) > rank(most));
            let may_begin = |parent| holds(place.0, parent);
            if is_better && self.fits_budget(chance.bytes) && chance.parent.is_none_or(may_begin) {
                best = Some((place, chance));
            }
        }
        let (&(destination, first), chance) = best?;
        let source = *chance.holders.first()?;
        let holds = |chance: &CopyCandidate| {
            chance.holders.iter().any(|holder| (holder.node, holder.epoch) == (source.node, source.epoch))
        };
        let mut following: BTreeMap<BlockHash, (f64, BlockHash, u64)> = BTreeMap::new();
        let there = (destination, BlockHash([0; _]))..=(destination, BlockHash([u8::MAX; _]));
        for ((_, key), chance) in chances.range(there).filter(|(_, chance)| holds(chance)) {
            let Some(parent) = chance.parent else { continue };
            let next = (chance.gain_us, *key, chance.bytes);
            let known = following.entry(parent).or_insert(next);
            if next.0 > known.0 {
                *known = next;
            }
        }
        let (mut keys, mut bytes) = (vec![first], chance.bytes);
        while keys.len() < RUN_SEGMENTS_MAX
            && let Some((_, key, more)) = keys.last().and_then(|last| following.get(last))
            && self.fits_budget(bytes.saturating_add(*more))
            && !keys.contains(key)
        {
            keys.push(*key);
            bytes = bytes.saturating_add(*more);
        }
        Some((destination, keys))
    }

    fn fits_budget(&self, bytes: u64) -> bool {
        bytes as f64 <= self.budget_bytes
    }

    fn make_proposal(
        &mut self,
        destination: NodeId,
        keys: Vec<BlockHash>,
        chances: &[CopyCandidate],
        now: Timestamp,
    ) -> Option<Proposal> {
        let source = *chances.first()?.holders.first()?;
        let mut run = BlockRun::default();
        for key in &keys {
            let segment = self.segments.get_mut(key)?;
            if run.hashes.is_empty() {
                (run.parent, run.first_offset_blocks) = (segment.parent, segment.first_offset_blocks);
                (run.tenant, run.category) = (segment.tenant, segment.category);
            }
            run.hashes.extend_from_slice(&segment.hashes);
            if let Some(heat) = segment.heats.iter_mut().find(|heat| heat.node == destination) {
                heat.retry_after = now.after(self.limits.decay.saturating_mul(2));
            }
        }
        let bytes = chances.iter().map(|chance| chance.bytes).fold(0, u64::saturating_add);
        let gain_us = chances.iter().map(|chance| chance.gain_us).sum();
        self.budget_bytes -= bytes as f64;
        Some(Proposal { source, destination, run, bytes, gain_us, keys })
    }

    /// Records the end of a proposal with its first `blocks` blocks at the destination and `bytes`
    /// bytes copied. Its segments get no new proposal for half the time constant: copied blocks are
    /// in the index by then, and failed ones may work.
    pub fn finish(
        &mut self,
        proposal: &Proposal,
        end: CopyOutcome,
        blocks: usize,
        bytes: u64,
        now: Timestamp,
    ) {
        let left = self.budget_bytes + proposal.bytes as f64 - bytes as f64;
        self.budget_bytes = left.min(self.limits.burst_bytes as f64);
        let not_before = now.after(self.limits.decay / 2);
        // These outcomes concern the node, not the blocks.
        if matches!(end, CopyOutcome::Full | CopyOutcome::Queue | CopyOutcome::TargetLost) {
            self.cooldowns.insert(proposal.destination, not_before);
        }
        let mut last = 0;
        for key in &proposal.keys {
            let Some(segment) = self.segments.get_mut(key) else { continue };
            last += segment.hashes.len();
            if let Some(heat) = segment.heats.iter_mut().find(|heat| heat.node == proposal.destination) {
                heat.retry_after = not_before;
                if last <= blocks {
                    heat.saved_us = 0.0;
                }
            }
        }
    }

    fn refill(&mut self, now: Timestamp) {
        let since = now.since(self.budget_at).as_secs_f64();
        let more = self.budget_bytes + since * self.limits.bytes_per_second as f64;
        self.budget_bytes = more.min(self.limits.burst_bytes as f64);
        self.budget_at = self.budget_at.max(now);
    }

    /// Frees half of the entries: forgets the colder segments.
    fn forget_coldest_half(&mut self, now: Timestamp) {
        let decay = self.limits.decay;
        let heat = |segment: &HotSegment| {
            segment.heats.iter().map(|heat| decayed_heat(heat, decay, now)).sum::<f64>()
        };
        let mut by_heat: Vec<(f64, BlockHash)> =
            self.segments.iter().map(|(key, segment)| (heat(segment), *key)).collect();
        by_heat.sort_unstable_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
        for (_, key) in by_heat.iter().take(by_heat.len().div_ceil(2)) {
            self.segments.remove(key);
        }
    }
}

impl HotSegment {
    fn add_heat(&mut self, node: NodeId, us: f64, decay: Duration, now: Timestamp) {
        if let Some(heat) = self.heats.iter_mut().find(|heat| heat.node == node) {
            let sum = (decayed_heat(heat, decay, now) + us).min(f64::MAX);
            (heat.saved_us, heat.at) = (sum, heat.at.max(now));
            return;
        }
        let fresh = Heat { node, saved_us: us, at: now, retry_after: Timestamp(0) };
        if self.heats.len() < DESTINATIONS_MAX {
            self.heats.push(fresh);
            return;
        }
        let coldest = self
            .heats
            .iter_mut()
            // Otherwise a segment in flight or refused would be proposed again at once.
            .filter(|heat| heat.retry_after <= now)
            .min_by(|left, right| decayed_heat(left, decay, now).total_cmp(&decayed_heat(right, decay, now)));
        if let Some(coldest) = coldest.filter(|coldest| decayed_heat(coldest, decay, now) < us) {
            *coldest = fresh;
        }
    }
}

fn decayed_heat(heat: &Heat, decay: Duration, now: Timestamp) -> f64 {
    let age = now.since(heat.at).as_secs_f64() / decay.as_secs_f64().max(f64::MIN_POSITIVE);
    heat.saved_us * (-age).exp()
}

#[cfg(test)]
mod tests;
