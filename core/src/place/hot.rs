//! Which blocks are worth another copy, and where: a decayed heat of prefixes, kept out of what decisions cost, and proposals under a
//! budget of bytes.
//!
//! Heat is time that requests would have saved, had the destination held the block: as it fades with a time constant, it is what is to
//! be expected of the next such span. A copy is proposed where that is more than the copy takes of the link and than what
//! would leave for it saves. Not here: how long anything takes (the scheduler's prices), what the index says (whoever
//! asks), and copying (`kvfleet-node`).

use std::collections::BTreeMap;
use std::time::Duration;

use smallvec::SmallVec;

use super::copies::{BlockRun, CopyEnd};
use crate::id::{BlockHash, Category, Epoch, NodeId, TenantId, Timestamp};

/// Blocks that are counted together: whole ones of these, from positions that are multiples of it. Few enough that a shared prompt is met
/// closely, and enough that a copy is worth its call.
pub const SEGMENT_BLOCKS: usize = 16;

/// Destinations that are counted of one segment: the hottest.
const DESTINATIONS_MAX: usize = 8;

/// Segments of one proposal.
const RUN_SEGMENTS_MAX: usize = 32;

/// What bounds heat and proposals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HotRules {
    /// Time constant with which heat fades; a proposal is weighed over as long.
    pub decay: Duration,
    /// Bytes that may be proposed a second, in the long run.
    pub bytes_per_second: u64,
    /// Bytes that may be proposed at once.
    pub burst_bytes: u64,
    /// Segments that are remembered.
    pub segments_max: usize,
}

/// Blocks that a request read, or had computed, because the node next to it did not hold them.
#[derive(Clone, Copy, Debug)]
pub struct Use<'a> {
    /// Who held them.
    pub source: (NodeId, Epoch),
    /// Where they would have been nearer.
    pub destination: NodeId,
    /// Whose they are.
    pub tenant: TenantId,
    /// Of the request.
    pub category: Category,
    /// The block before the first.
    pub parent: Option<BlockHash>,
    /// Offset of the first, in blocks.
    pub first_offset_blocks: u32,
    /// In prefix order.
    pub hashes: &'a [BlockHash],
    /// By how much each of them would have been there sooner, in microseconds.
    pub saved_us_per_block: f64,
}

/// What proposals rest on besides heat.
pub trait Places {
    /// Whether a node is live in this epoch.
    fn is_live(&self, node: NodeId, epoch: Epoch) -> bool;
    /// Whether a node is live and takes new blocks.
    fn takes(&self, node: NodeId) -> bool;
    /// Whether a node holds a block.
    fn holds(&self, node: NodeId, block: BlockHash) -> bool;
    /// Size of so many blocks, in bytes.
    fn bytes_of(&self, blocks: usize) -> u64;
    /// What copying so many bytes takes of the link between two nodes, in microseconds.
    fn copy_us(&self, source: NodeId, destination: NodeId, bytes: u64) -> f64;
    /// What so many bytes of what would leave the destination are expected to save within the time constant, in microseconds.
    fn displaced_us(&self, destination: NodeId, bytes: u64) -> f64;
}

/// A copy that is worth more than it costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// Who holds it.
    pub source: (NodeId, Epoch),
    /// Who is to copy it.
    pub destination: NodeId,
    /// The blocks.
    pub run: BlockRun,
    /// Size of all, in bytes; taken from the budget.
    pub bytes: u64,
    /// Time that is expected to be saved within the time constant, less what it costs, in microseconds.
    pub gain_us: f64,
}

/// Heat towards one destination.
#[derive(Clone, Copy, Debug)]
struct Heat {
    node: NodeId,
    us: f64,
    at: Timestamp,
    /// A copy is under way, or failed a short time ago.
    not_before: Timestamp,
}

#[derive(Clone, Debug)]
struct Segment {
    source: (NodeId, Epoch),
    tenant: TenantId,
    category: Category,
    parent: Option<BlockHash>,
    first_offset_blocks: u32,
    hashes: [BlockHash; SEGMENT_BLOCKS],
    heats: SmallVec<[Heat; 2]>,
}

/// The heat that one router knows. Every method takes the time.
#[derive(Clone, Debug)]
pub struct Hot {
    rules: HotRules,
    /// By their last blocks, which name all before them.
    segments: BTreeMap<BlockHash, Segment>,
    budget_bytes: f64,
    budget_at: Timestamp,
}

impl Hot {
    /// Nothing was used yet.
    #[must_use]
    pub fn new(rules: HotRules, now: Timestamp) -> Hot {
        Hot { rules, segments: BTreeMap::new(), budget_bytes: rules.burst_bytes as f64, budget_at: now }
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
        let saved_us = used.saved_us_per_block * SEGMENT_BLOCKS as f64;
        if !(saved_us.is_finite() && saved_us > 0.0) || used.source.0 == used.destination {
            return;
        }
        let first = used.first_offset_blocks as usize;
        let skipped = first.next_multiple_of(SEGMENT_BLOCKS) - first;
        let mut parent = skipped.checked_sub(1).map_or(used.parent, |at| used.hashes.get(at).copied());
        let mut offset = first + skipped;
        let whole = used.hashes.get(skipped..).unwrap_or_default().chunks_exact(SEGMENT_BLOCKS);
        for hashes in whole {
            let Ok(hashes) = <[BlockHash; SEGMENT_BLOCKS]>::try_from(hashes) else { break };
            let key = hashes[SEGMENT_BLOCKS - 1];
            if !self.segments.contains_key(&key) && self.segments.len() >= self.rules.segments_max {
                self.forget_cold(now);
            }
            if self.segments.len() < self.rules.segments_max || self.segments.contains_key(&key) {
                let segment = self.segments.entry(key).or_insert_with(|| Segment {
                    source: used.source,
                    tenant: used.tenant,
                    category: used.category,
                    parent,
                    first_offset_blocks: u32::try_from(offset).unwrap_or(u32::MAX),
                    hashes,
                    heats: SmallVec::new(),
                });
                // The newest word counts: who held it before may be gone.
                (segment.source, segment.category) = (used.source, used.category);
                segment.warm(used.destination, saved_us, self.rules.decay, now);
            }
            (parent, offset) = (Some(key), offset + SEGMENT_BLOCKS);
        }
    }

    /// The copy that saves the most for its bytes, if there is one that saves more than it costs and the budget has room for. It counts as
    /// under way until [`Self::ended`] says otherwise, or twice the time constant is over.
    pub fn propose(&mut self, places: &impl Places, now: Timestamp) -> Option<Proposal> {
        self.refill(now);
        let bytes = places.bytes_of(SEGMENT_BLOCKS);
        if bytes as f64 > self.budget_bytes {
            return None;
        }
        let (first, destination, _) = self.best(places, bytes, now)?;
        let source = self.segments.get(&first)?.source;
        let mut keys = vec![first];
        let mut gain_us = 0.0;
        gain_us += self.gain(&first, destination, places, bytes, now)?;
        // What follows in the same prefix goes along, while it is worth it by itself.
        while keys.len() < RUN_SEGMENTS_MAX && ((keys.len() + 1) as u64 * bytes) as f64 <= self.budget_bytes {
            let last = keys[keys.len() - 1];
            let next =
                self.segments.iter().filter(|(_, one)| one.parent == Some(last) && one.source == source);
            let next =
                next.filter_map(|(key, _)| Some((self.gain(key, destination, places, bytes, now)?, *key)));
            let Some((gain, key)) = next.max_by(|left, right| left.0.total_cmp(&right.0)) else { break };
            keys.push(key);
            gain_us += gain;
        }
        Some(self.take(&keys, destination, bytes, gain_us, now))
    }

    fn take(
        &mut self,
        keys: &[BlockHash],
        destination: NodeId,
        bytes: u64,
        gain_us: f64,
        now: Timestamp,
    ) -> Proposal {
        let mut run = BlockRun::default();
        let mut source = (NodeId(0), Epoch(0));
        for (position, key) in keys.iter().enumerate() {
            let Some(segment) = self.segments.get_mut(key) else { continue };
            if position == 0 {
                source = segment.source;
                (run.parent, run.first_offset_blocks) = (segment.parent, segment.first_offset_blocks);
                (run.tenant, run.category) = (segment.tenant, segment.category);
            }
            run.hashes.extend_from_slice(&segment.hashes);
            if let Some(heat) = segment.heats.iter_mut().find(|heat| heat.node == destination) {
                heat.not_before = now.after(2 * self.rules.decay);
            }
        }
        let bytes = bytes * keys.len() as u64;
        self.budget_bytes -= bytes as f64;
        Proposal { source, destination, run, bytes, gain_us }
    }

    /// A proposal ended after so many of its bytes. What was not copied is not looked at again for half the time constant, and what was
    /// costs nothing any more: there is nothing to save there.
    pub fn ended(&mut self, proposal: &Proposal, end: CopyEnd, bytes: u64, now: Timestamp) {
        let unused = proposal.bytes.saturating_sub(bytes);
        self.budget_bytes = (self.budget_bytes + unused as f64).min(self.rules.burst_bytes as f64);
        for key in proposal.run.hashes.chunks_exact(SEGMENT_BLOCKS).map(|hashes| hashes[SEGMENT_BLOCKS - 1]) {
            let Some(segment) = self.segments.get_mut(&key) else { continue };
            if end == CopyEnd::Copied {
                segment.heats.retain(|heat| heat.node != proposal.destination);
            } else if let Some(heat) = segment.heats.iter_mut().find(|heat| heat.node == proposal.destination)
            {
                heat.not_before = now.after(self.rules.decay / 2);
            }
        }
    }

    /// The segment and destination with the highest gain, of those that may begin a run there.
    fn best(&self, places: &impl Places, bytes: u64, now: Timestamp) -> Option<(BlockHash, NodeId, f64)> {
        let mut best: Option<(BlockHash, NodeId, f64)> = None;
        for (key, segment) in &self.segments {
            for heat in &segment.heats {
                let Some(gain) = self.gain(key, heat.node, places, bytes, now) else { continue };
                if best.is_some_and(|(.., most)| most >= gain) {
                    continue;
                }
                // Behind a gap nobody reads it.
                if segment.parent.is_none_or(|parent| places.holds(heat.node, parent)) {
                    best = Some((*key, heat.node, gain));
                }
            }
        }
        best
    }

    /// What a copy of one segment saves more than it costs, if it does and may be made.
    fn gain(
        &self,
        key: &BlockHash,
        destination: NodeId,
        places: &impl Places,
        bytes: u64,
        now: Timestamp,
    ) -> Option<f64> {
        let segment = self.segments.get(key)?;
        let (source, epoch) = segment.source;
        let heat = segment.heats.iter().find(|heat| heat.node == destination)?;
        if heat.not_before > now || source == destination {
            return None;
        }
        let costs = places.copy_us(source, destination, bytes) + places.displaced_us(destination, bytes);
        let gain = faded(heat, self.rules.decay, now) - costs;
        let is_possible =
            || places.is_live(source, epoch) && places.takes(destination) && !places.holds(destination, *key);
        (gain > 0.0 && is_possible()).then_some(gain)
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
            (heat.us, heat.at) = (faded(heat, decay, now) + us, now);
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
