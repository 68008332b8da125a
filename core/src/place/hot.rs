//! Which blocks are worth another copy, and where: a decayed heat of prefixes, kept out of what decisions cost, and proposals under a
//! budget of bytes.
//!
//! Heat is time that requests would have saved, had the node next to them held the block: as it fades with a time constant, it is what is to
//! be expected of the next such span. A copy is proposed where that is more than the copy takes of the link. Not here: how long anything takes
//! (the scheduler's prices), what the index says (whoever asks), copying, and whether what would have to leave is worth more: the
//! target's own book knows, and refuses (`kvfleet-node`).

use std::collections::BTreeMap;
use std::time::Duration;

use smallvec::SmallVec;

use super::copies::{BlockRun, CopyEnd};
use crate::id::{BlockHash, Category, NodeId, TenantId, Timestamp};
use crate::index::Holder;

/// Tokens that are counted together: few enough that a shared prompt is met closely, and enough that a copy is worth its call.
const SEGMENT_TOKENS: u32 = 256;

/// Blocks of a segment at most, however few tokens each has.
const SEGMENT_BLOCKS_MAX: u32 = 16;

/// Destinations that are counted of one segment: the hottest.
const DESTINATIONS_MAX: usize = 8;

/// Segments of one proposal.
const RUN_SEGMENTS_MAX: usize = 32;

/// Blocks that are counted together: whole ones of these, from positions that are multiples of it.
#[must_use]
pub fn segment_blocks(block_tokens: u32) -> u32 {
    (SEGMENT_TOKENS / block_tokens.max(1)).clamp(1, SEGMENT_BLOCKS_MAX)
}

/// What bounds heat and proposals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HotRules {
    /// Time constant with which heat fades; a proposal is weighed over as long.
    pub decay: Duration,
    /// Bytes that may be copied a second, in the long run.
    pub bytes_per_second: u64,
    /// Bytes that may be copied at once.
    pub burst_bytes: u64,
    /// Segments that are remembered.
    pub segments_max: usize,
}

/// Blocks that a request read from afar, or had computed, because the node next to it did not hold them.
#[derive(Clone, Copy, Debug)]
pub struct Use<'a> {
    /// Where they would have been nearer.
    pub destination: NodeId,
    /// Whose they are.
    pub tenant: TenantId,
    /// Of the request.
    pub category: Category,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// The block before the first.
    pub parent: Option<BlockHash>,
    /// Offset of the first, in blocks.
    pub first_offset_blocks: u32,
    /// In prefix order.
    pub hashes: &'a [BlockHash],
    /// By how much each of them would have been there sooner, in microseconds; 0 of one that is there.
    pub saved_us: &'a [f64],
}

/// What proposals rest on besides heat.
pub trait Places {
    /// Whether a node is live, takes new blocks, and has instances next to it.
    fn takes(&self, node: NodeId) -> bool;
    /// Live nodes that hold a block.
    fn holders(&self, block: BlockHash) -> SmallVec<[Holder; 4]>;
    /// Size of a block at a node, in bytes.
    fn block_bytes(&self, node: NodeId) -> u64;
    /// What copying so many blocks of so many tokens takes of the link from a holder, in microseconds.
    fn copy_us(&self, holder: &Holder, blocks: u64, block_tokens: u32) -> f64;
}

/// A copy that is worth more than it costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// Who holds it.
    pub source: Holder,
    /// Who is to copy it.
    pub destination: NodeId,
    /// The blocks.
    pub run: BlockRun,
    /// Size of all, in bytes; taken from the budget.
    pub bytes: u64,
    /// Time that is expected to be saved within the time constant, less what it costs, in microseconds.
    pub gain_us: f64,
    /// The last blocks of its segments.
    keys: Vec<BlockHash>,
}

/// Heat towards one destination.
#[derive(Clone, Copy, Debug)]
struct Heat {
    node: NodeId,
    us: f64,
    at: Timestamp,
    /// A copy is under way, or ended a short time ago.
    not_before: Timestamp,
}

#[derive(Clone, Debug)]
struct Segment {
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
struct Chance {
    gain_us: f64,
    bytes: u64,
    parent: Option<BlockHash>,
    /// The nearest first.
    holders: SmallVec<[Holder; 4]>,
}

/// By destination and key of the segment.
type Chances = BTreeMap<(NodeId, BlockHash), Chance>;

/// The heat that one router knows. Every method takes the time.
#[derive(Clone, Debug)]
pub struct Hot {
    rules: HotRules,
    /// By their last blocks, which name all before them.
    segments: BTreeMap<BlockHash, Segment>,
    /// Nodes that could not take a copy, whatever it was, until when they are not asked.
    resting: BTreeMap<NodeId, Timestamp>,
    budget_bytes: f64,
    budget_at: Timestamp,
}

impl Hot {
    /// Nothing was used yet.
    #[must_use]
    pub fn new(rules: HotRules, now: Timestamp) -> Hot {
        let budget_bytes = rules.burst_bytes as f64;
        Hot { rules, segments: BTreeMap::new(), resting: BTreeMap::new(), budget_bytes, budget_at: now }
    }

    /// Segments that are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether nothing is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Counts a use. What fills no whole segment, or saves nothing, is not counted.
    pub fn used(&mut self, used: &Use<'_>, now: Timestamp) {
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
                self.warm(used, (parent, offset, hashes), saved_us, now);
            }
            (parent, offset) = (Some(key), offset + size);
        }
    }

    fn warm(
        &mut self,
        used: &Use<'_>,
        (parent, offset, hashes): (Option<BlockHash>, usize, &[BlockHash]),
        saved_us: f64,
        now: Timestamp,
    ) {
        let Some(&key) = hashes.last() else { return };
        if !self.segments.contains_key(&key) && self.segments.len() >= self.rules.segments_max {
            self.forget_cold(now);
            if self.segments.len() >= self.rules.segments_max {
                return;
            }
        }
        let segment = self.segments.entry(key).or_insert_with(|| Segment {
            tenant: used.tenant,
            category: used.category,
            block_tokens: used.block_tokens,
            parent,
            first_offset_blocks: u32::try_from(offset).unwrap_or(u32::MAX),
            hashes: hashes.into(),
            heats: SmallVec::new(),
        });
        // Who cuts the same prompt in other blocks is mistaken, and says nothing of these.
        if segment.hashes.as_ref() == hashes {
            (segment.tenant, segment.category) = (used.tenant, used.category);
            segment.warm(used.destination, saved_us, self.rules.decay, now);
        }
    }

    /// Up to so many copies, of those that save more than they cost and for which the budget has room: each time the one that saves the most.
    /// It counts as under way until [`Self::ended`] says otherwise, or twice the time constant is over.
    pub fn propose(&mut self, places: &impl Places, most: usize, now: Timestamp) -> Vec<Proposal> {
        self.refill(now);
        self.resting.retain(|_, until| *until > now);
        let mut proposals = Vec::new();
        if most == 0 || self.budget_bytes < 1.0 {
            return proposals;
        }
        let mut chances = self.chances(places, now);
        let mut known = BTreeMap::new();
        // Behind a gap nobody reads it.
        let mut holds = |node: NodeId, parent: BlockHash| {
            let ask = || places.holders(parent).iter().any(|holder| holder.node == node);
            *known.entry((node, parent)).or_insert_with(ask)
        };
        while proposals.len() < most
            && let Some((destination, keys)) = self.best_run(&chances, &mut holds)
        {
            let taken: Vec<Chance> =
                keys.iter().filter_map(|key| chances.remove(&(destination, *key))).collect();
            proposals.extend(self.take(destination, keys, &taken, now));
        }
        proposals
    }

    /// Every segment with every destination where a copy of it saves more than it costs and may be made.
    fn chances(&self, places: &impl Places, now: Timestamp) -> Chances {
        let mut chances = Chances::new();
        for (key, segment) in &self.segments {
            let is_due = |heat: &&Heat| heat.not_before <= now && !self.resting.contains_key(&heat.node);
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
                let gain_us = faded(heat, self.rules.decay, now) - copy_us;
                let is_there = holders.iter().any(|holder| holder.node == heat.node);
                if gain_us > 0.0 && !is_there && places.takes(heat.node) {
                    let bytes = places.block_bytes(heat.node).saturating_mul(segment.hashes.len() as u64);
                    let (parent, holders) = (segment.parent, holders.clone());
                    chances.insert((heat.node, *key), Chance { gain_us, bytes, parent, holders });
                }
            }
        }
        chances
    }

    /// The segment and destination with the highest gain, of those that may begin a run there, and what follows it in the same prefix as far as
    /// that is worth it by itself. Of equal ones, what a single node holds: it is lost with that node.
    fn best_run(
        &self,
        chances: &Chances,
        holds: &mut impl FnMut(NodeId, BlockHash) -> bool,
    ) -> Option<(NodeId, Vec<BlockHash>)> {
        let rank = |chance: &Chance| (chance.gain_us, chance.holders.len() == 1);
        let mut best: Option<(&(NodeId, BlockHash), &Chance)> = None;
        for (place, chance) in chances {
            let is_better = best.is_none_or(|(_, most)| rank(chance) > rank(most));
            let may_begin = |parent| holds(place.0, parent);
            if is_better && self.affords(chance.bytes) && chance.parent.is_none_or(may_begin) {
                best = Some((place, chance));
            }
        }
        let (&(destination, first), chance) = best?;
        let source = *chance.holders.first()?;
        let holds = |chance: &Chance| {
            chance.holders.iter().any(|holder| (holder.node, holder.epoch) == (source.node, source.epoch))
        };
        let mut following: BTreeMap<BlockHash, (f64, BlockHash, u64)> = BTreeMap::new();
        let there = (destination, BlockHash([0; 16]))..=(destination, BlockHash([u8::MAX; 16]));
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
            && self.affords(bytes.saturating_add(*more))
            && !keys.contains(key)
        {
            keys.push(*key);
            bytes = bytes.saturating_add(*more);
        }
        Some((destination, keys))
    }

    fn affords(&self, bytes: u64) -> bool {
        bytes as f64 <= self.budget_bytes
    }

    fn take(
        &mut self,
        destination: NodeId,
        keys: Vec<BlockHash>,
        chances: &[Chance],
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
                heat.not_before = now.after(self.rules.decay.saturating_mul(2));
            }
        }
        let bytes = chances.iter().map(|chance| chance.bytes).fold(0, u64::saturating_add);
        let gain_us = chances.iter().map(|chance| chance.gain_us).sum();
        self.budget_bytes -= bytes as f64;
        Some(Proposal { source, destination, run, bytes, gain_us, keys })
    }

    /// A proposal ended with so many of its first blocks at the destination, of which so many bytes came. Nothing of it is looked at again for half the
    /// time constant: what was copied by then is in the index, and what was not may be possible.
    pub fn ended(
        &mut self,
        proposal: &Proposal,
        end: CopyEnd,
        (blocks, bytes): (usize, u64),
        now: Timestamp,
    ) {
        let left = self.budget_bytes + proposal.bytes as f64 - bytes as f64;
        self.budget_bytes = left.min(self.rules.burst_bytes as f64);
        let not_before = now.after(self.rules.decay / 2);
        // These are of the node, and not of what it was to take.
        if matches!(end, CopyEnd::Full | CopyEnd::Queue | CopyEnd::TargetLost) {
            self.resting.insert(proposal.destination, not_before);
        }
        let mut last = 0;
        for key in &proposal.keys {
            let Some(segment) = self.segments.get_mut(key) else { continue };
            last += segment.hashes.len();
            if let Some(heat) = segment.heats.iter_mut().find(|heat| heat.node == proposal.destination) {
                heat.not_before = not_before;
                if last <= blocks {
                    heat.us = 0.0;
                }
            }
        }
    }

    fn refill(&mut self, now: Timestamp) {
        let since = now.since(self.budget_at).as_secs_f64();
        let more = self.budget_bytes + since * self.rules.bytes_per_second as f64;
        self.budget_bytes = more.min(self.rules.burst_bytes as f64);
        self.budget_at = self.budget_at.max(now);
    }

    /// Makes room for as many again: forgets the colder half.
    fn forget_cold(&mut self, now: Timestamp) {
        let decay = self.rules.decay;
        let heat = |segment: &Segment| segment.heats.iter().map(|heat| faded(heat, decay, now)).sum::<f64>();
        let mut by_heat: Vec<(f64, BlockHash)> =
            self.segments.iter().map(|(key, segment)| (heat(segment), *key)).collect();
        by_heat.sort_unstable_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
        for (_, key) in by_heat.iter().take(by_heat.len().div_ceil(2)) {
            self.segments.remove(key);
        }
    }
}

impl Segment {
    fn warm(&mut self, node: NodeId, us: f64, decay: Duration, now: Timestamp) {
        if let Some(heat) = self.heats.iter_mut().find(|heat| heat.node == node) {
            let sum = (faded(heat, decay, now) + us).min(f64::MAX);
            (heat.us, heat.at) = (sum, heat.at.max(now));
            return;
        }
        let fresh = Heat { node, us, at: now, not_before: Timestamp(0) };
        if self.heats.len() < DESTINATIONS_MAX {
            self.heats.push(fresh);
            return;
        }
        let coldest = self
            .heats
            .iter_mut()
            // Or what is under way, or was refused, would be tried again at once.
            .filter(|heat| heat.not_before <= now)
            .min_by(|left, right| faded(left, decay, now).total_cmp(&faded(right, decay, now)));
        if let Some(coldest) = coldest.filter(|coldest| faded(coldest, decay, now) < us) {
            *coldest = fresh;
        }
    }
}

fn faded(heat: &Heat, decay: Duration, now: Timestamp) -> f64 {
    let age = now.since(heat.at).as_secs_f64() / decay.as_secs_f64().max(f64::MIN_POSITIVE);
    heat.us * (-age).exp()
}

#[cfg(test)]
mod tests;
