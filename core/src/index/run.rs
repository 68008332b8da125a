//! A run: consecutive blocks of one prefix that were announced one after the other, and who holds which
//! stretch of them.
//!
//! Offsets of a run are counted from the beginning of the octet that its first block is in: a block's offset modulo
//! eight is its position in its octet, and its slot in its page. A run only ever grows and shrinks at its end. A block
//! in the middle that nobody holds any more is unlisted, but keeps its position: what stands at a position never
//! becomes another block, so equal hashes at two positions of a run mean equal blocks between them. Not here: where
//! the hashes lie (`pages.rs`), and what is done to the table (`store.rs`).

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::holders::{TierSet, Tiers};
use super::images::Images;
use super::pages::{PAGE_BLOCKS, Place};
use crate::cpu::prefetch;
use crate::id::BlockHash;

/// Offset that no run reaches: 128 Ki tokens at sixteen a block. Longer prefixes take a second run. Small in
/// tests, so that they do.
pub(super) const RUN_BLOCKS_MAX: u32 = if cfg!(test) { 24 } else { 8_192 };
/// Runs that are allocated together: 4 KiB.
const CHUNK_RUNS: usize = 64;
/// Number of a page of a run that was given back.
const GONE: u32 = u32::MAX;

/// The hold of one node on a stretch of a run: `from..to`, never empty, in tiers that are never none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hold {
    /// Incarnation of the slot when this was announced.
    pub(super) incarnation: u32,
    /// Slot of the node.
    pub(super) slot: u16,
    pub(super) from: u16,
    pub(super) to: u16,
    pub(super) tiers: TierSet,
}

impl Hold {
    /// Whether the node still stands by it.
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

/// A stretch of a run whose tiers were changed by one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Changed {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) before: TierSet,
    pub(super) after: TierSet,
}

/// Consecutive blocks, and who holds them. A run that ends at zero is no run.
/// One cache line, and in one: a lookup waits for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[repr(align(64))]
pub(super) struct Run {
    /// Its pages in order; those that hold no listed block are given back.
    pages: SmallVec<[u32; 2]>,
    /// By ascending slot, then offset. Stretches of one slot neither overlap nor, with equal tiers, touch.
    holds: SmallVec<[Hold; 1]>,
    /// Offset behind the last block.
    end: u16,
    /// Where the run that hangs here and began last goes off: prompts that part from this run do so there, most
    /// often. Zero when none began.
    fork: u16,
    /// When it began, or last grew again after its end was cut off, by [`Runs::next_birth`]: even. Odd while
    /// its end is cut off: what grows there next is another block.
    pub(super) born: u16,
    /// Some of the hash of its first block, by [`head_of`], which a lookup then need not go and see.
    pub(super) head: u16,
    /// Where the block before the first was when this run began. It may be elsewhere by now.
    pub(super) before: Before,
}

/// A block in a run that was born at that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Before {
    pub(super) run: u32,
    pub(super) offset: u16,
    pub(super) born: u16,
}

/// Thirteen bits of a hash, and below them its position in its octet.
pub(super) fn head_of(hash: BlockHash) -> u16 {
    let [.., low, high] = hash.0;
    u16::from_le_bytes([low, high]) & !(PAGE_BLOCKS as u16 - 1) | hash.nth_of_octet() as u16
}

impl Run {
    /// Offset of its first block.
    pub(super) fn start(&self) -> u32 {
        u32::from(self.head) % PAGE_BLOCKS
    }

    /// Offset behind its last block.
    pub(super) fn end(&self) -> u32 {
        self.end.into()
    }

    /// Offset of the first block that the run that went off last does not share; zero when none did.
    pub(super) fn fork(&self) -> u32 {
        self.fork.into()
    }

    pub(super) fn holds(&self) -> &[Hold] {
        &self.holds
    }

    /// Pages by position; none for one that was given back.
    pub(super) fn pages(&self) -> impl ExactSizeIterator<Item = Option<u32>> + '_ {
        self.pages.iter().map(|&page| (page != GONE).then_some(page))
    }

    /// Where the block at an offset lies, unless its page was given back.
    pub(super) fn place(&self, offset: u32) -> Option<Place> {
        if !(self.start()..self.end()).contains(&offset) {
            return None;
        }
        let page = *self.pages.get((offset / PAGE_BLOCKS) as usize)?;
        (page != GONE).then(|| Place::new(page, offset % PAGE_BLOCKS))
    }

    /// Makes the run some blocks longer, all in one page; `page` must be given when they start it.
    pub(super) fn push(&mut self, page: Option<u32>, blocks: u32) {
        if let Some(page) = page {
            // A quarter at a time: the numbers of pages are a noticeable part of all memory.
            if self.pages.len() == self.pages.capacity() && self.pages.spilled() {
                self.pages.reserve_exact(self.pages.len() / 4 + 1);
            }
            self.pages.push(page);
        }
        self.end += blocks as u16;
    }

    /// Blocks that fit behind the last one without another page, or in the next page when that is full;
    /// none in a run that is as long as runs get.
    pub(super) fn room(&self) -> u32 {
        let in_page = PAGE_BLOCKS - self.end() % PAGE_BLOCKS;
        in_page.min(RUN_BLOCKS_MAX - self.end())
    }

    /// The page that the last block is in.
    pub(super) fn last_page(&self) -> Option<u32> {
        self.pages.last().copied().filter(|page| *page != GONE)
    }

    /// One of its pages was given back.
    pub(super) fn give_back(&mut self, nth: u32) {
        self.pages[nth as usize] = GONE;
    }

    /// A page of it, unless it was given back.
    pub(super) fn page(&self, nth: u32) -> Option<u32> {
        self.pages.get(nth as usize).copied().filter(|page| *page != GONE)
    }

    /// Cuts off what follows the last block for which `is_live` says so.
    pub(super) fn trim(&mut self, is_live: impl Fn(Place) -> bool) {
        while self.pages.last() == Some(&GONE) {
            self.pages.pop();
            self.end = self.end.min((self.pages.len() as u32 * PAGE_BLOCKS) as u16);
        }
        while self.end().checked_sub(1).and_then(|last| self.place(last)).is_some_and(|place| !is_live(place))
        {
            self.end -= 1;
        }
        self.born |= 1;
    }

    /// Asks the memory for what growing it, or telling its holders, takes besides itself.
    pub(super) fn prefetch(&self) {
        if let Some(page) = self.pages.last() {
            prefetch(page);
        }
        if let Some(hold) = self.holds.first() {
            prefetch(hold);
        }
    }

    /// Takes tiers from the hold of a slot on `from..to` and adds others; tells each stretch with what it
    /// was. All holds of the slot must be of this incarnation.
    pub(super) fn change(
        &mut self,
        (slot, incarnation): (u16, u32),
        (from, to): (u32, u32),
        tiers: Tiers,
        mut tell: impl FnMut(Changed),
    ) {
        let is_before = |hold: &Hold| (hold.slot, u32::from(hold.to)) < (slot, from);
        let start = self.holds.partition_point(is_before);
        let touches = |hold: &&Hold| hold.slot == slot && u32::from(hold.from) <= to;
        let count = self.holds[start..].iter().take_while(touches).count();
        let old: SmallVec<[Hold; 4]> = SmallVec::from_slice(&self.holds[start..start + count]);
        let mut new = Stretches { slot, incarnation, holds: SmallVec::new() };
        let mut at = from;
        for hold in &old {
            let (first, end) = (u32::from(hold.from), u32::from(hold.to));
            new.push(first, end.min(from), hold.tiers);
            for (until, before) in [(first.min(to), TierSet::NONE), (end.min(to), hold.tiers)] {
                if at < until {
                    let after = tiers.after(before);
                    tell(Changed { from: at, to: until, before, after });
                    new.push(at, until, after);
                    at = until;
                }
            }
            new.push(first.max(to), end, hold.tiers);
        }
        if at < to {
            let after = tiers.after(TierSet::NONE);
            tell(Changed { from: at, to, before: TierSet::NONE, after });
            // Only the last old stretch can reach past `to`, and then nothing is left to add.
            new.push(at, to, after);
        }
        self.splice(start, count, &new.holds);
    }

    /// The same where nothing but the end of one hold changes, or one hold comes or goes, as it is with
    /// nearly every announcement; nothing is done, and nothing answered, where it is not so.
    pub(super) fn change_at_end(
        &mut self,
        (slot, incarnation): (u16, u32),
        (from, to): (u32, u32),
        tiers: Tiers,
    ) -> Option<Changed> {
        let (first, end) = (from as u16, to as u16);
        let start = self.holds.iter().position(|hold| (hold.slot, hold.to) >= (slot, first));
        let start = start.unwrap_or(self.holds.len());
        let own = self.holds.get(start).filter(|hold| hold.slot == slot).copied();
        let is_last = self.holds.get(start + 1).is_none_or(|hold| hold.slot != slot);
        let after = tiers.after(TierSet::NONE);
        match own {
            None if after.is_empty() => {}
            None => self.holds.insert(start, Hold { incarnation, slot, from: first, to: end, tiers: after }),
            Some(hold) if hold.to == first && hold.tiers == after && is_last => self.holds[start].to = end,
            Some(hold) if hold.from <= first && hold.to == end && tiers.after(hold.tiers).is_empty() => {
                if hold.from < first {
                    self.holds[start].to = first;
                } else {
                    self.holds.remove(start);
                }
                return Some(Changed { from, to, before: hold.tiers, after: TierSet::NONE });
            }
            Some(_) => return None,
        }
        Some(Changed { from, to, before: TierSet::NONE, after })
    }

    fn splice(&mut self, start: usize, count: usize, new: &[Hold]) {
        let same = count.min(new.len());
        self.holds[start..start + same].copy_from_slice(&new[..same]);
        if new.len() > count {
            self.holds.insert_many(start + same, new[same..].iter().copied());
        } else {
            self.holds.drain(start + same..start + count);
        }
    }

    /// Forgets every hold that `keep` refuses; tells each.
    pub(super) fn retain(&mut self, keep: impl Fn(&Hold) -> bool, mut tell: impl FnMut(Hold)) {
        self.holds.retain(|hold| {
            let kept = keep(hold);
            if !kept {
                tell(*hold);
            }
            kept
        });
        if self.holds.len() <= 1 {
            self.holds.shrink_to_fit();
        }
    }

    /// Parts of `from..to` that no hold covers.
    pub(super) fn uncovered(&self, from: u32, to: u32) -> SmallVec<[(u32, u32); 2]> {
        self.uncovered_by(from, to, |_| true)
    }

    /// Parts of `from..to` that no hold covers of those that count.
    pub(super) fn uncovered_by(
        &self,
        from: u32,
        to: u32,
        counts: impl Fn(&Hold) -> bool,
    ) -> SmallVec<[(u32, u32); 2]> {
        let overlaps = |hold: &&Hold| u32::from(hold.from) < to && u32::from(hold.to) > from && counts(hold);
        let holds = self.holds.iter().filter(overlaps);
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

    /// A run as a snapshot describes it; none when it describes none. The caller lists the blocks.
    pub(super) fn restored(
        end: u32,
        (born, head, fork, before): (u16, u16, u16, Before),
        pages: &[Option<u32>],
        holds: &[Hold],
    ) -> Option<Run> {
        let start = u32::from(head) % PAGE_BLOCKS;
        let fits =
            |hold: &Hold| u32::from(hold.from) >= start && hold.from < hold.to && u32::from(hold.to) <= end;
        let is_whole = start < end
            && end <= RUN_BLOCKS_MAX
            && pages.len() as u32 == end.div_ceil(PAGE_BLOCKS)
            && holds.iter().all(fits);
        let in_order = holds.windows(2).all(|two| {
            let parted =
                two[0].to < two[1].from || (two[0].to == two[1].from && two[0].tiers != two[1].tiers);
            two[0].slot < two[1].slot || (two[0].slot == two[1].slot && parted)
        });
        // The last block of a run is held: the end is cut off as soon as it is not.
        let ends_held = holds.iter().any(|hold| u32::from(hold.to) == end);
        let pages = pages.iter().map(|page| page.unwrap_or(GONE)).collect();
        let holds = SmallVec::from_slice(holds);
        let run = Run { pages, holds, end: end as u16, fork, born, head, before };
        (is_whole && in_order && ends_held).then_some(run)
    }
}

/// Builds the stretches of one slot; neighbours of equal tiers become one.
struct Stretches {
    slot: u16,
    incarnation: u32,
    holds: SmallVec<[Hold; 4]>,
}

impl Stretches {
    fn push(&mut self, from: u32, to: u32, tiers: TierSet) {
        if from >= to || tiers.is_empty() {
            return;
        }
        let (from, to) = (from as u16, to as u16);
        match self.holds.last_mut() {
            Some(last) if last.to == from && last.tiers == tiers => last.to = to,
            _ => {
                let (incarnation, slot) = (self.incarnation, self.slot);
                self.holds.push(Hold { incarnation, slot, from, to, tiers });
            }
        }
    }
}

/// All runs of one index, by number. A number is used again when its run is gone, the lowest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Runs {
    chunks: Vec<Box<[Run; CHUNK_RUNS]>>,
    free: BTreeSet<u32>,
    /// Birth of the run that was born last. Numbers of runs are used again, and ends of runs grow again: who
    /// remembers a place in a run remembers the birth with it.
    pub(super) births: u16,
    /// What a free number stands for.
    none: Run,
    used: u32,
    /// While a snapshot is being made: what the runs were that were written since it began.
    images: Option<Box<Images<Run>>>,
}

const _: () = assert!(size_of::<Run>() == 64);

fn split(run: u32) -> (usize, usize) {
    (run as usize / CHUNK_RUNS, run as usize % CHUNK_RUNS)
}

impl Runs {
    /// From here on, keeps what runs were before they are written; what was kept before is forgotten.
    pub(super) fn begin_images(&mut self) {
        self.images = Some(Box::new(Images::new(self.used)));
    }

    /// Keeps no more; gives what was kept.
    pub(super) fn end_images(&mut self) -> Option<Box<Images<Run>>> {
        self.images.take()
    }

    /// A run as it was when the snapshot began that is being made.
    pub(super) fn then(&self, run: u32) -> &Run {
        let image = self.images.as_ref().and_then(|images| images.get(run));
        image.unwrap_or_else(|| self.get(run))
    }

    /// A run; an empty one for a number that is free.
    #[inline]
    pub(super) fn get(&self, run: u32) -> &Run {
        let (chunk, place) = split(run);
        self.chunks.get(chunk).map_or(&self.none, |chunk| &chunk[place])
    }

    /// Asks the memory for a run.
    pub(super) fn prefetch(&self, run: u32) {
        prefetch(self.get(run));
    }

    /// A run, unless there never was one of this number.
    pub(super) fn try_get(&self, run: u32) -> Option<&Run> {
        (run < self.used).then(|| self.get(run))
    }

    /// A run, about to be written. Nothing else gives one to write: a snapshot that is being made needs what it was.
    #[inline]
    pub(super) fn get_mut(&mut self, run: u32) -> &mut Run {
        let (chunk, place) = split(run);
        let place = &mut self.chunks[chunk][place];
        if let Some(images) = &mut self.images {
            images.keep(run, place);
        }
        place
    }

    /// Begins a run with this block behind another one; it is still empty, and ends where it starts.
    pub(super) fn begin(&mut self, head: BlockHash, before: Option<(u32, u32)>) -> u32 {
        let born = self.next_birth();
        let before = before.map_or(Before::default(), |(run, offset)| {
            let parent = self.get_mut(run);
            parent.fork = offset as u16 + 1;
            Before { run, offset: offset as u16, born: parent.born & !1 }
        });
        let number = self.take();
        let run = self.get_mut(number);
        (run.born, run.head, run.before) = (born, head_of(head), before);
        run.end = run.start() as u16;
        number
    }

    /// Even numbers, again and again; never zero, which is the birth of a run that is none.
    fn next_birth(&mut self) -> u16 {
        self.births = self.births.checked_add(2).unwrap_or(2);
        self.births
    }

    /// The run, about to grow: what was remembered of it counts no more if its end was cut off.
    pub(super) fn growing(&mut self, number: u32) -> &mut Run {
        if self.get(number).born & 1 == 1 {
            let born = self.next_birth();
            self.get_mut(number).born = born;
        }
        self.get_mut(number)
    }

    /// Where the block before the first of a run is, if it is known to be there still.
    pub(super) fn before(&self, run: &Run) -> Option<(u32, u32)> {
        let Before { run, offset, born } = run.before;
        let before = self.get(run);
        let offset = u32::from(offset);
        // A snapshot may say anything, also what is in front of the first block.
        let is_in = (before.start()..before.end()).contains(&offset);
        (before.born & !1 == born && is_in).then_some((run, offset))
    }

    /// The number of a run that is not used.
    fn take(&mut self) -> u32 {
        if let Some(run) = self.free.pop_first() {
            return run;
        }
        self.used += 1;
        self.reach(self.used);
        self.used - 1
    }

    fn reach(&mut self, used: u32) {
        while self.chunks.len() * CHUNK_RUNS < used as usize {
            self.chunks.push(Box::new(std::array::from_fn(|_| Run::default())));
        }
    }

    /// The run is gone. Numbers that are free up to the end are forgotten, with their memory.
    pub(super) fn free(&mut self, run: u32) {
        *self.get_mut(run) = Run::default();
        self.free.insert(run);
        while let Some(last) = self.used.checked_sub(1).filter(|last| self.free.remove(last)) {
            self.used = last;
        }
        self.chunks.truncate((self.used as usize).div_ceil(CHUNK_RUNS));
    }

    /// Whether the last number is free, which it never is.
    pub(super) fn ends_free(&self) -> bool {
        self.used.checked_sub(1).is_some_and(|last| self.free.contains(&last))
    }

    /// Numbers in use, with the free ones between them.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// The next run of a snapshot; one that ends at zero is a number that is free.
    pub(super) fn restore(&mut self, run: Run) -> u32 {
        let number = self.used;
        self.used += 1;
        self.reach(self.used);
        if run.end() == 0 {
            self.free.insert(number);
        }
        *self.get_mut(number) = run;
        number
    }
}
