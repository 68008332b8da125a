//! Lookups: the longest prefix that live nodes hold, cut into runs of blocks with equal holders.
//!
//! Not here: the block runs that a lookup reads (`store.rs`) and the use that a router makes of the
//! answer (`crate::schedule`).

use smallvec::SmallVec;

use super::Index;
use super::locations::LocationProbe;
use super::run::{PrefixRun, head_bits};
use super::store::{RunPosition, Store};
use crate::id::{BlockHash, Epoch, NodeId, Tier};

/// A live node that holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder {
    /// The node.
    pub node: NodeId,
    /// Its epoch when the lookup was made.
    pub epoch: Epoch,
    /// The fastest tier it holds the block in.
    pub tier: Tier,
}

/// A node that held a block under an epoch that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostHolder {
    /// The node, while it is fenced; `None` if it left or joined again.
    pub node: Option<NodeId>,
}

/// Consecutive blocks with the same holders in the same tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderRun {
    /// Offset of the first block in the request.
    pub start_blocks: u32,
    /// Blocks in the run; at least one.
    pub len_blocks: u32,
    /// Nodes that hold all of these blocks, by ascending node; at least one.
    pub holders: SmallVec<[Holder; 4]>,
}

impl HolderRun {
    /// Offset after the last block of the run.
    #[must_use]
    pub fn end_blocks(&self) -> u32 {
        self.start_blocks + self.len_blocks
    }

    /// The holder entry of one node, if it holds the run.
    #[must_use]
    pub fn holder(&self, node: NodeId) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.node == node)
    }
}

/// The longest prefix of a request with at least one live holder of every block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// In prefix order, without gaps, from block 0; neighbours differ.
    pub runs: Vec<HolderRun>,
}

impl PrefixMatch {
    /// Blocks from the start that one node holds without a gap.
    #[must_use]
    pub fn node_prefix_blocks(&self, node: NodeId) -> u32 {
        self.runs.iter().take_while(|run| run.holder(node).is_some()).last().map_or(0, HolderRun::end_blocks)
    }

    /// Blocks from the start that each have a holder.
    #[must_use]
    pub fn union_blocks(&self) -> u32 {
        self.runs.last().map_or(0, HolderRun::end_blocks)
    }

    /// Nodes that hold block 0, by ascending id: only they can serve a prefix on their own.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.runs.first().into_iter().flat_map(|run| run.holders.iter().map(|holder| holder.node))
    }
}

impl Index {
    /// Finds the longest prefix of `hashes` that live nodes hold. The hashes are in prefix order,
    /// each the child of the one before. Costs one probe per run of the answer, not per block: a
    /// hash covers everything before it, so two positions that match also match in between.
    ///
    /// Hashes that are not one prefix may get an answer that is too long or too short. Hashes that
    /// start in the middle of a prefix may get none, unless a node announced the first one without
    /// a parent; look up a single block with [`Index::holders_of`]. Blocks past `u32::MAX` are
    /// ignored.
    #[must_use]
    pub fn longest_prefix(&self, hashes: &[BlockHash]) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        self.longest_prefix_into(hashes, &mut found);
        found
    }

    /// Like [`Index::longest_prefix`], but reuses the memory of `found`.
    pub fn longest_prefix_into(&self, hashes: &[BlockHash], found: &mut PrefixMatch) {
        found.runs.clear();
        let hashes = &hashes[..hashes.len().min(u32::MAX as usize)];
        let (Some(first), Some(last)) = (hashes.first(), hashes.last()) else { return };
        let Store { runs, entry_points: heads, locations: places, .. } = &self.store;
        let Some(first) = heads.find(*first) else { return };
        let mut path = RunPath::new();
        let mut ends_unlisted = false;
        let last = places.seek(*last);
        if !self.diverges_at_fork(first, hashes) {
            match self.find_last(last) {
                Some(last) if self.walk_back(hashes, first, last, &mut path) => {}
                last => {
                    path.clear();
                    ends_unlisted = last.is_none();
                }
            }
        }
        let mut position = 0;
        let mut next = Some(first);
        while let Some(at) = next {
            let run = runs.get(at.run);
            let known = path.pop().filter(|(expected, _)| *expected == at);
            let len = known.map_or_else(
                || self.matching_blocks(run, at.offset, &hashes[position..], ends_unlisted),
                |(_, len)| len,
            );
            let held = self.push_holders(found, run, at.offset, len);
            position += held as usize;
            if (held == 0 && known.is_none()) || position == hashes.len() {
                return;
            }
            // After the end of its run a prefix may continue in another run. So it may in the
            // middle of a run, or at the start of a run found from behind: dropped blocks that come
            // back are listed elsewhere.
            next = match path.last() {
                Some((at, _)) if held == len => Some(*at),
                _ => {
                    path.clear();
                    let next = hashes[position];
                    // A run reached from behind may have left the previous run before its end.
                    if known.is_some() { self.store.find(next) } else { heads.find(next) }
                }
            };
        }
    }

    /// Whether the hashes leave their first run at its fork and continue in no other run. Then the
    /// blocks before the fork are shared and the blocks behind it are new. If they continue,
    /// prefetches that run.
    fn diverges_at_fork(&self, first: RunPosition, hashes: &[BlockHash]) -> bool {
        let Store { runs, pages, entry_points: heads, .. } = &self.store;
        let run = runs.get(first.run);
        let Some(fork) = run.fork().checked_sub(first.offset).filter(|fork| *fork > 0) else { return false };
        let Some(next) = hashes.get(fork as usize) else { return false };
        let [shared, new] = [fork - 1, fork].map(|step| run.page_slot(first.offset + step));
        [shared, new].into_iter().flatten().for_each(|place| pages.prefetch(place));
        if let Some(next) = heads.find(*next) {
            runs.prefetch(next.run);
            return false;
        }
        // Compares the whole hash before the fork. A forged block there would otherwise force a
        // walk from the front, run by run, for all prompts that continue behind it.
        shared.is_some_and(|place| pages.matches(place, hashes[fork as usize - 1]))
            && !new.is_some_and(|place| pages.suffix_matches(place, *next))
    }

    /// Position of the last block of a prompt, from a lookup that has started.
    fn find_last(&self, mut last: LocationProbe<'_>) -> Option<RunPosition> {
        let Store { pages, runs, .. } = &self.store;
        let at = if last.probe_bucket(pages) { self.store.resolve(&last)? } else { return None };
        runs.prefetch(at.run);
        Some(at)
    }

    /// The live nodes that hold a block at any offset of a prefix, by ascending id.
    #[must_use]
    pub fn holders_of(&self, block: BlockHash) -> SmallVec<[Holder; 4]> {
        let Some(at) = self.store.find(block) else { return SmallVec::new() };
        let holds = self.store.runs.get(at.run).extents().iter().filter(|hold| hold.covers(at.offset));
        let mut holders: SmallVec<[Holder; 4]> = holds.filter_map(|hold| self.nodes.holder(hold)).collect();
        holders.sort_unstable();
        holders
    }

    /// A node that held a block under an ended epoch, until the sweep frees its blocks. `None` if
    /// there is none, or if a live node holds the block.
    #[must_use]
    pub fn lost_holder(&self, block: BlockHash) -> Option<LostHolder> {
        let at = self.store.find(block)?;
        let holds = self.store.runs.get(at.run).extents().iter();
        let mut lost = None;
        for hold in holds.filter(|hold| hold.covers(at.offset)) {
            if self.nodes.holder(hold).is_some() {
                return None;
            }
            lost = Some(LostHolder { node: self.nodes.fenced_node(hold.slot) });
        }
        lost
    }

    /// Follows the runs of a prefix from its last block to its first. Returns whether they form one
    /// unbroken path; then only the holders remain to be read.
    fn walk_back(
        &self,
        hashes: &[BlockHash],
        first: RunPosition,
        last: RunPosition,
        path: &mut RunPath,
    ) -> bool {
        let runs = &self.store.runs;
        let (mut at, mut end) = (last, hashes.len());
        loop {
            let run = runs.get(at.run);
            let len = (at.offset + 1 - run.start()) as usize;
            let Some(position) = end.checked_sub(len) else { return false };
            // The last block of the run part matched, and a hash covers all blocks before it, so
            // the whole part matches. Announcements that are not real prefixes are mostly caught
            // here.
            if run.head_bits != head_bits(hashes[position]) {
                return false;
            }
            let head = RunPosition { offset: run.start(), ..at };
            path.push((head, len as u32));
            if position == 0 {
                return head == first;
            }
            let before = match runs.predecessor(run) {
                Some((run, offset)) => Some(RunPosition { run, offset }),
                None => self.store.find(hashes[position - 1]),
            };
            let Some(before) = before else { return false };
            (at, end) = (before, position);
        }
    }

    /// Number of hashes that match the run from an offset on; the first one does. `ends_unlisted`
    /// says that the last hash is known to be unlisted. Compares suffixes and then the whole last
    /// hash: a match there covers all blocks before it.
    fn matching_blocks(
        &self,
        run: &PrefixRun,
        offset: u32,
        hashes: &[BlockHash],
        ends_unlisted: bool,
    ) -> u32 {
        let equal = self.matching_blocks_by_suffix(run, offset, hashes, ends_unlisted);
        let last = run.page_slot(offset + equal - 1);
        if equal == 1 || last.is_some_and(|last| self.store.pages.matches(last, hashes[equal as usize - 1])) {
            return equal;
        }
        self.matching_blocks_exact(run, offset, hashes)
    }

    /// Like [`Index::matching_blocks`], for forged blocks that share a suffix with a block of
    /// another block group.
    #[cold]
    fn matching_blocks_exact(&self, run: &PrefixRun, offset: u32, hashes: &[BlockHash]) -> u32 {
        let len = (run.end() - offset).min(hashes.len() as u32);
        first_mismatch(1, len, |step| {
            let place = run.page_slot(offset + step);
            place.is_some_and(|place| self.store.pages.matches(place, hashes[step as usize]))
        })
    }

    /// Like [`Index::matching_blocks`], by suffixes only. Never too short; too long only if a node
    /// forged hashes.
    #[inline]
    fn matching_blocks_by_suffix(
        &self,
        run: &PrefixRun,
        offset: u32,
        hashes: &[BlockHash],
        ends_unlisted: bool,
    ) -> u32 {
        let pages = &self.store.pages;
        let len = (run.end() - offset).min(hashes.len() as u32);
        // Most prompts that leave a run do so at its fork, and many at its end.
        let fork = run.fork().checked_sub(offset).filter(|fork| (1..len).contains(fork));
        if let Some(fork) = fork {
            for step in [fork - 1, fork] {
                run.page_slot(offset + step).inspect(|place| pages.prefetch(*place));
            }
        }
        let agrees = |step: u32| {
            let place = run
                .page_slot(offset + step)
                .filter(|place| pages.suffix_matches(*place, hashes[step as usize]));
            // This may be the last match, which is compared in full.
            place.inspect(|place| pages.prefetch_group(*place)).is_some()
        };
        let (mut equal, mut differs) = (1, len);
        if !ends_unlisted || (len as usize) < hashes.len() {
            if agrees(len - 1) {
                return len;
            }
            differs = len - 1;
        }
        match fork {
            Some(fork) if agrees(fork) => equal = fork + 1,
            Some(fork) if agrees(fork - 1) => return fork,
            Some(fork) => differs = fork - 1,
            None => {}
        }
        first_mismatch(equal, differs, agrees)
    }

    /// Appends the holders of a part of a run up to the first block without a holder. Returns the
    /// number of blocks appended.
    fn push_holders(&self, found: &mut PrefixMatch, run: &PrefixRun, from: u32, len: u32) -> u32 {
        if run.extents().len() > FEW_EXTENTS {
            return self.push_many_holders(found, run, from, len);
        }
        let to = from + len;
        let mut at = from;
        while at < to {
            let mut end = to;
            let mut holders: SmallVec<[Holder; 4]> = SmallVec::with_capacity(run.extents().len());
            for hold in run.extents() {
                let Some(holder) = self.nodes.holder(hold) else { continue };
                if hold.covers(at) {
                    holders.push(holder);
                    end = end.min(hold.to.into());
                } else if u32::from(hold.from) > at {
                    end = end.min(hold.from.into());
                }
            }
            if holders.is_empty() {
                break;
            }
            found.push(holders, end - at);
            at = end;
        }
        at - from
    }

    /// Like [`Index::push_holders`], for a run with many extents: visits each extent at its start
    /// and its end only.
    #[cold]
    fn push_many_holders(&self, found: &mut PrefixMatch, run: &PrefixRun, from: u32, len: u32) -> u32 {
        let to = from + len;
        let mut upcoming: Vec<(u32, u32, Holder)> = run
            .extents()
            .iter()
            .filter(|hold| u32::from(hold.to) > from && u32::from(hold.from) < to)
            .filter_map(|hold| Some((hold.from.into(), hold.to.into(), self.nodes.holder(hold)?)))
            .collect();
        upcoming.sort_unstable_by_key(|(first, _, _)| *first);
        let mut waiting = upcoming.into_iter().peekable();
        let mut active: Vec<(u32, Holder)> = Vec::new();
        let mut at = from;
        while at < to {
            active.retain(|(end, _)| *end > at);
            while let Some((_, end, holder)) = waiting.next_if(|(first, _, _)| *first <= at) {
                active.push((end, holder));
            }
            let next = waiting.peek().map_or(to, |(first, _, _)| *first);
            let Some(end) = active.iter().map(|(end, _)| *end).min() else { break };
            let end = end.min(next).min(to);
            found.push(active.iter().map(|(_, holder)| *holder).collect(), end - at);
            at = end;
        }
        at - from
    }
}

impl PrefixMatch {
    /// Appends blocks; their holders come in any order.
    fn push(&mut self, mut holders: SmallVec<[Holder; 4]>, blocks: u32) {
        // Sorts by node, because slot order reveals the order of joins and must not show. Slots
        // mostly are in node order already.
        if !holders.is_sorted_by_key(|holder| holder.node) {
            holders.sort_unstable();
        }
        match self.runs.last_mut() {
            Some(last) if last.holders == holders => last.len_blocks += blocks,
            last => {
                let start_blocks = last.map_or(0, |last| last.end_blocks());
                self.runs.push(HolderRun { start_blocks, len_blocks: blocks, holders });
            }
        }
    }
}

/// The first step from `equal` on that does not match, or `differs` if all do. Equal hashes mean
/// equal prefixes, so a binary search finds it. A page that was released does not match: its blocks
/// have no holder here.
#[inline]
fn first_mismatch(mut first: u32, mut differs: u32, agrees: impl Fn(u32) -> bool) -> u32 {
    while first < differs {
        let middle = first + (differs - first) / 2;
        if agrees(middle) {
            first = middle + 1;
        } else {
            differs = middle;
        }
    }
    first
}

/// Up to this number of extents, all are scanned wherever one of them begins or ends.
const FEW_EXTENTS: usize = if cfg!(test) { 3 } else { 64 };

/// Parts of runs that make up a request, the first part last.
type RunPath = SmallVec<[(RunPosition, u32); 8]>;
