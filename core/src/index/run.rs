//! A block run: consecutive blocks of one prefix that were announced in order, with the extents
//! that nodes hold.
//!
//! Offsets count from the start of the block group of the first block. So an offset modulo eight is
//! a block's index in its group and its slot in its page. A run grows and shrinks only at its end.
//! A block in the middle that loses its last holder is unlisted but keeps its position. A position
//! never becomes another block, so equal hashes at two positions mean equal blocks between them.
//! Not here: the hashes (`pages.rs`) and the table (`store.rs`).

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::holders::{TierSet, TierUpdate};
use super::images::Images;
use super::pages::{PAGE_BLOCKS, PageSlot};
use crate::id::BlockHash;
use kvfleet_cpu::prefetch;

/// Offset that no run reaches: 128 Ki tokens at sixteen a block. A longer prefix takes a second
/// run. Small in tests, so that they need one.
pub(super) const RUN_BLOCKS_MAX: u32 = if cfg!(test) { 24 } else { 8_192 };
/// Runs per allocation: 4 KiB.
const CHUNK_RUNS: usize = 64;
/// Marks a page of a run that was released.
const RELEASED: u32 = u32::MAX;

/// Blocks `from..to` of a run that one node holds in the same tiers. Never empty, never without a
/// tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Incarnation of the slot at the announcement.
    pub(super) incarnation: u32,
    /// Slot of the node.
    pub(super) slot: u16,
    pub(super) from: u16,
    pub(super) to: u16,
    pub(super) tiers: TierSet,
}

impl Extent {
    /// Whether the extent still counts: its incarnation is the current one.
    pub(super) fn is_current(&self, incarnations: &[u32]) -> bool {
        incarnations.get(usize::from(self.slot)) == Some(&self.incarnation)
    }

    pub(super) fn blocks(&self) -> u64 {
        u64::from(self.to - self.from)
    }

    pub(super) fn covers(&self, offset: u32) -> bool {
        (u32::from(self.from)..u32::from(self.to)).contains(&offset)
    }
}

/// A range of a run with tiers before and after a node's change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TierChange {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) before: TierSet,
    pub(super) after: TierSet,
}

/// Consecutive blocks and their extents. A run with end zero is absent. Exactly one cache line,
/// because a lookup waits for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[repr(align(64))]
pub(super) struct PrefixRun {
    /// Its pages in order; a page without listed blocks is released.
    pages: SmallVec<[u32; 2]>,
    /// By ascending slot, then offset. Extents of one slot do not overlap; adjacent ones differ in
    /// tiers.
    extents: SmallVec<[Extent; 1]>,
    /// Offset after the last block.
    end: u16,
    /// Offset where the newest run that branches off this one starts: most prompts that leave this
    /// run do so there. Zero if none does.
    fork: u16,
    /// Even: birth number from [`Runs::next_birth`], renewed when a trimmed run grows again. Odd
    /// while its end is trimmed: the next block there may be another one.
    pub(super) birth: u16,
    /// Bits of the first block's hash, from [`head_bits`]; saves a lookup from reading the page.
    pub(super) head_bits: u16,
    /// Position of the block before the first when this run began. It may have moved since.
    pub(super) predecessor: Predecessor,
}

/// A block in a run, valid while the run has this birth number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Predecessor {
    pub(super) run: u32,
    pub(super) offset: u16,
    pub(super) birth: u16,
}

/// The highest thirteen bits of a hash, and below them the block's index in its group.
pub(super) fn head_bits(hash: BlockHash) -> u16 {
    let [.., low, high] = hash.0;
    u16::from_le_bytes([low, high]) & !(PAGE_BLOCKS as u16 - 1) | hash.position_in_group() as u16
}

impl PrefixRun {
    /// Offset of the first block.
    pub(super) fn start(&self) -> u32 {
        u32::from(self.head_bits) % PAGE_BLOCKS
    }

    /// Offset after the last block.
    pub(super) fn end(&self) -> u32 {
        self.end.into()
    }

    /// First offset that the newest branching run does not share; zero if there is none.
    pub(super) fn fork(&self) -> u32 {
        self.fork.into()
    }

    pub(super) fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Pages in order; `None` for a released one.
    pub(super) fn pages(&self) -> impl ExactSizeIterator<Item = Option<u32>> + '_ {
        self.pages.iter().map(|&page| (page != RELEASED).then_some(page))
    }

    /// Page slot of the block at an offset; `None` if its page was released.
    pub(super) fn page_slot(&self, offset: u32) -> Option<PageSlot> {
        if !(self.start()..self.end()).contains(&offset) {
            return None;
        }
        let page = *self.pages.get((offset / PAGE_BLOCKS) as usize)?;
        (page != RELEASED).then(|| PageSlot::new(page, offset % PAGE_BLOCKS))
    }

    /// Extends the run by `blocks` blocks of one page; `page` is required if they start that page.
    pub(super) fn push(&mut self, page: Option<u32>, blocks: u32) {
        if let Some(page) = page {
            // Grows by a quarter, because page numbers are a noticeable part of all memory.
            if self.pages.len() == self.pages.capacity() && self.pages.spilled() {
                self.pages.reserve_exact(self.pages.len() / 4 + 1);
            }
            self.pages.push(page);
        }
        self.end += blocks as u16;
    }

    /// Number of blocks that can be appended within the last page, or within a new page if it is
    /// full. Zero for a run of maximum length.
    pub(super) fn append_limit(&self) -> u32 {
        let in_page = PAGE_BLOCKS - self.end() % PAGE_BLOCKS;
        in_page.min(RUN_BLOCKS_MAX - self.end())
    }

    /// Page of the last block.
    pub(super) fn last_page(&self) -> Option<u32> {
        self.pages.last().copied().filter(|page| *page != RELEASED)
    }

    /// Marks a page as released.
    pub(super) fn mark_released(&mut self, nth: u32) {
        self.pages[nth as usize] = RELEASED;
    }

    /// A page by position; `None` if it was released.
    pub(super) fn page(&self, nth: u32) -> Option<u32> {
        self.pages.get(nth as usize).copied().filter(|page| *page != RELEASED)
    }

    /// Trims everything after the last block that satisfies `is_live`.
    pub(super) fn trim(&mut self, is_live: impl Fn(PageSlot) -> bool) {
        while self.pages.last() == Some(&RELEASED) {
            self.pages.pop();
            self.end = self.end.min((self.pages.len() as u32 * PAGE_BLOCKS) as u16);
        }
        while self
            .end()
            .checked_sub(1)
            .and_then(|last| self.page_slot(last))
            .is_some_and(|place| !is_live(place))
        {
            self.end -= 1;
        }
        self.birth |= 1;
    }

    /// Prefetches what growing the run or reading its holders needs besides the run itself.
    pub(super) fn prefetch(&self) {
        if let Some(page) = self.pages.last() {
            prefetch(page);
        }
        if let Some(hold) = self.extents.first() {
            prefetch(hold);
        }
    }

    /// Applies `tiers` to `from..to` for one slot and reports each changed range. All extents of
    /// the slot must have this incarnation.
    pub(super) fn change_tiers(
        &mut self,
        slot: u16,
        incarnation: u32,
        from: u32,
        to: u32,
        tiers: TierUpdate,
        mut report: impl FnMut(TierChange),
    ) {
        let is_before = |hold: &Extent| (hold.slot, u32::from(hold.to)) < (slot, from);
        let start = self.extents.partition_point(is_before);
        let touches = |hold: &&Extent| hold.slot == slot && u32::from(hold.from) <= to;
        let count = self.extents[start..].iter().take_while(touches).count();
        let old: SmallVec<[Extent; 4]> = SmallVec::from_slice(&self.extents[start..start + count]);
        let mut new = ExtentBuilder { slot, incarnation, extents: SmallVec::new() };
        let mut at = from;
        for hold in &old {
            let (first, end) = (u32::from(hold.from), u32::from(hold.to));
            new.push(first, end.min(from), hold.tiers);
            for (until, before) in [(first.min(to), TierSet::NONE), (end.min(to), hold.tiers)] {
                if at < until {
                    let after = tiers.apply_to(before);
                    report(TierChange { from: at, to: until, before, after });
                    new.push(at, until, after);
                    at = until;
                }
            }
            new.push(first.max(to), end, hold.tiers);
        }
        if at < to {
            let after = tiers.apply_to(TierSet::NONE);
            report(TierChange { from: at, to, before: TierSet::NONE, after });
            // Only the last old extent can reach past `to`, and then no blocks remain to be added.
            new.push(at, to, after);
        }
        self.splice(start, count, &new.extents);
    }

    /// Fast path of [`PrefixRun::change_tiers`] for nearly every announcement: one extent grows,
    /// shrinks, appears or vanishes. Returns `None` and changes no extent in all other cases.
    pub(super) fn change_tail(
        &mut self,
        slot: u16,
        incarnation: u32,
        from: u32,
        to: u32,
        tiers: TierUpdate,
    ) -> Option<TierChange> {
        let (first, end) = (from as u16, to as u16);
        let start = self.extents.iter().position(|hold| (hold.slot, hold.to) >= (slot, first));
        let start = start.unwrap_or(self.extents.len());
        let own = self.extents.get(start).filter(|hold| hold.slot == slot).copied();
        let is_last = self.extents.get(start + 1).is_none_or(|hold| hold.slot != slot);
        let after = tiers.apply_to(TierSet::NONE);
        match own {
            None if after.is_empty() => {}
            None => {
                self.extents.insert(start, Extent { incarnation, slot, from: first, to: end, tiers: after });
            }
            Some(hold) if hold.to == first && hold.tiers == after && is_last => self.extents[start].to = end,
            Some(hold) if hold.from <= first && hold.to == end && tiers.apply_to(hold.tiers).is_empty() => {
                if hold.from < first {
                    self.extents[start].to = first;
                } else {
                    self.extents.remove(start);
                }
                return Some(TierChange { from, to, before: hold.tiers, after: TierSet::NONE });
            }
            Some(_) => return None,
        }
        Some(TierChange { from, to, before: TierSet::NONE, after })
    }

    fn splice(&mut self, start: usize, count: usize, new: &[Extent]) {
        let same = count.min(new.len());
        self.extents[start..start + same].copy_from_slice(&new[..same]);
        if new.len() > count {
            self.extents.insert_many(start + same, new[same..].iter().copied());
        } else {
            self.extents.drain(start + same..start + count);
        }
    }

    /// Removes every extent that `keep` rejects, and reports each.
    pub(super) fn retain_extents(&mut self, keep: impl Fn(&Extent) -> bool, mut tell: impl FnMut(Extent)) {
        self.extents.retain(|hold| {
            let kept = keep(hold);
            if !kept {
                tell(*hold);
            }
            kept
        });
        if self.extents.len() <= 1 {
            self.extents.shrink_to_fit();
        }
    }

    /// Parts of `from..to` that no extent covers.
    pub(super) fn uncovered(&self, from: u32, to: u32) -> SmallVec<[(u32, u32); 2]> {
        self.uncovered_by(from, to, |_| true)
    }

    /// Parts of `from..to` that no extent accepted by `counts` covers.
    pub(super) fn uncovered_by(
        &self,
        from: u32,
        to: u32,
        counts: impl Fn(&Extent) -> bool,
    ) -> SmallVec<[(u32, u32); 2]> {
        let overlaps =
            |hold: &&Extent| u32::from(hold.from) < to && u32::from(hold.to) > from && counts(hold);
        let holds = self.extents.iter().filter(overlaps);
        let mut covered: SmallVec<[(u32, u32); 8]> =
            holds.map(|hold| (hold.from.into(), hold.to.into())).collect();
        covered.sort_unstable();
        let mut gaps = SmallVec::new();
        let mut at = from;
        for (first, end) in covered {
            if first > at {
                gaps.push((at, first));
            }
            at = at.max(end);
        }
        if at < to {
            gaps.push((at, to));
        }
        gaps
    }

    /// A run from a snapshot; `None` if the description is invalid. The caller lists the blocks.
    pub(super) fn from_snapshot(
        end: u32,
        born: u16,
        head: u16,
        fork: u16,
        before: Predecessor,
        pages: &[Option<u32>],
        holds: &[Extent],
    ) -> Option<PrefixRun> {
        let start = u32::from(head) % PAGE_BLOCKS;
        let fits =
            |hold: &Extent| u32::from(hold.from) >= start && hold.from < hold.to && u32::from(hold.to) <= end;
        let is_whole = start < end
            && end <= RUN_BLOCKS_MAX
            && pages.len() as u32 == end.div_ceil(PAGE_BLOCKS)
            && holds.iter().all(fits);
        let in_order = holds.windows(2).all(|two| {
            let parted =
                two[0].to < two[1].from || (two[0].to == two[1].from && two[0].tiers != two[1].tiers);
            two[0].slot < two[1].slot || (two[0].slot == two[1].slot && parted)
        });
        // The last block of a run has a holder: otherwise the run would have been trimmed.
        let ends_held = holds.iter().any(|hold| u32::from(hold.to) == end);
        let pages = pages.iter().map(|page| page.unwrap_or(RELEASED)).collect();
        let holds = SmallVec::from_slice(holds);
        let run = PrefixRun {
            pages,
            extents: holds,
            end: end as u16,
            fork,
            birth: born,
            head_bits: head,
            predecessor: before,
        };
        (is_whole && in_order && ends_held).then_some(run)
    }
}

/// Builds the extents of one slot; merges adjacent ones with equal tiers.
struct ExtentBuilder {
    slot: u16,
    incarnation: u32,
    extents: SmallVec<[Extent; 4]>,
}

impl ExtentBuilder {
    fn push(&mut self, from: u32, to: u32, tiers: TierSet) {
        if from >= to || tiers.is_empty() {
            return;
        }
        let (from, to) = (from as u16, to as u16);
        match self.extents.last_mut() {
            Some(last) if last.to == from && last.tiers == tiers => last.to = to,
            _ => {
                let (incarnation, slot) = (self.incarnation, self.slot);
                self.extents.push(Extent { incarnation, slot, from, to, tiers });
            }
        }
    }
}

/// All runs of one index, by number. The lowest free number is reused first.
#[derive(Clone, Debug, Default)]
pub(super) struct Runs {
    chunks: Vec<Box<[PrefixRun; CHUNK_RUNS]>>,
    free: BTreeSet<u32>,
    /// Last birth number given out. Run numbers are reused and trimmed runs grow again, so a stored
    /// position is valid only together with its birth number.
    pub(super) last_birth: u16,
    /// Returned for a free number.
    absent: PrefixRun,
    used: u32,
    /// Copy-on-write images of changed runs, while a snapshot is being written.
    images: Option<Box<Images<PrefixRun>>>,
}

const _: () = assert!(size_of::<PrefixRun>() == 64);

fn split(run: u32) -> (usize, usize) {
    (run as usize / CHUNK_RUNS, run as usize % CHUNK_RUNS)
}

impl Runs {
    /// Starts to keep images of changed runs; discards earlier images.
    pub(super) fn begin_images(&mut self) {
        self.images = Some(Box::new(Images::new(self.used)));
    }

    /// Stops keeping images and returns them.
    pub(super) fn end_images(&mut self) -> Option<Box<Images<PrefixRun>>> {
        self.images.take()
    }

    /// A run as it was when the current snapshot began.
    pub(super) fn get_at_snapshot(&self, run: u32) -> &PrefixRun {
        let image = self.images.as_ref().and_then(|images| images.get(run));
        image.unwrap_or_else(|| self.get(run))
    }

    /// A run; an empty one for a free number.
    #[inline]
    pub(super) fn get(&self, run: u32) -> &PrefixRun {
        let (chunk, place) = split(run);
        self.chunks.get(chunk).map_or(&self.absent, |chunk| &chunk[place])
    }

    pub(super) fn prefetch(&self, run: u32) {
        prefetch(self.get(run));
    }

    /// A run; `None` for a number beyond all runs.
    pub(super) fn try_get(&self, run: u32) -> Option<&PrefixRun> {
        (run < self.used).then(|| self.get(run))
    }

    /// A run for writing. The only mutable access, because a running snapshot needs the old
    /// contents.
    #[inline]
    pub(super) fn get_mut(&mut self, run: u32) -> &mut PrefixRun {
        let (chunk, place) = split(run);
        let place = &mut self.chunks[chunk][place];
        if let Some(images) = &mut self.images {
            images.preserve(run, place);
        }
        place
    }

    /// Creates an empty run for this first block, behind `before` if given.
    pub(super) fn begin_run(&mut self, head: BlockHash, before: Option<(u32, u32)>) -> u32 {
        let born = self.next_birth();
        let before = before.map_or(Predecessor::default(), |(run, offset)| {
            let parent = self.get_mut(run);
            parent.fork = offset as u16 + 1;
            Predecessor { run, offset: offset as u16, birth: parent.birth & !1 }
        });
        let number = self.allocate();
        let run = self.get_mut(number);
        (run.birth, run.head_bits, run.predecessor) = (born, head_bits(head), before);
        run.end = run.start() as u16;
        number
    }

    /// Even numbers that wrap around and skip zero, the birth of an absent run.
    fn next_birth(&mut self) -> u16 {
        self.last_birth = self.last_birth.checked_add(2).unwrap_or(2);
        self.last_birth
    }

    /// A run for appending. A trimmed run gets a new birth number, which invalidates stored
    /// positions in it.
    pub(super) fn grow_mut(&mut self, number: u32) -> &mut PrefixRun {
        if self.get(number).birth & 1 == 1 {
            let born = self.next_birth();
            self.get_mut(number).birth = born;
        }
        self.get_mut(number)
    }

    /// Position of the block before a run, if it is still valid.
    pub(super) fn predecessor(&self, run: &PrefixRun) -> Option<(u32, u32)> {
        let Predecessor { run, offset, birth: born } = run.predecessor;
        let before = self.get(run);
        let offset = u32::from(offset);
        // A snapshot may contain any values here, including an offset before the first block.
        let is_in = (before.start()..before.end()).contains(&offset);
        (before.birth & !1 == born && is_in).then_some((run, offset))
    }

    /// An unused run number.
    fn allocate(&mut self) -> u32 {
        if let Some(run) = self.free.pop_first() {
            return run;
        }
        self.used += 1;
        self.ensure_chunks(self.used);
        self.used - 1
    }

    fn ensure_chunks(&mut self, used: u32) {
        while self.chunks.len() * CHUNK_RUNS < used as usize {
            self.chunks.push(Box::new(std::array::from_fn(|_| PrefixRun::default())));
        }
    }

    /// Frees a run. Free numbers at the end are dropped together with their memory.
    pub(super) fn free(&mut self, run: u32) {
        *self.get_mut(run) = PrefixRun::default();
        self.free.insert(run);
        while let Some(last) = self.used.checked_sub(1).filter(|last| self.free.remove(last)) {
            self.used = last;
        }
        self.chunks.truncate((self.used as usize).div_ceil(CHUNK_RUNS));
    }

    /// Whether the last number is free, which only a forged snapshot can cause.
    pub(super) fn last_is_free(&self) -> bool {
        self.used.checked_sub(1).is_some_and(|last| self.free.contains(&last))
    }

    /// One past the highest number in use; free numbers in between count.
    pub(super) fn number_limit(&self) -> u32 {
        self.used
    }

    /// Appends the next run of a snapshot; a run with end zero is a free number.
    pub(super) fn restore_run(&mut self, run: PrefixRun) -> u32 {
        let number = self.used;
        self.used += 1;
        self.ensure_chunks(self.used);
        if run.end() == 0 {
            self.free.insert(number);
        }
        *self.get_mut(number) = run;
        number
    }
}
