//! Blocks and their holders: block runs, the pages that hold their hashes, and the table that finds
//! a hash.
//!
//! A block is listed, and found, while some extent covers it, stale extents included. A stale
//! extent is removed when its run changes or when the sweep visits it. Not here: which extents
//! count (`nodes.rs`), and lookups of prompts (`lookup.rs`).

use smallvec::SmallVec;

use super::entry_points::EntryPoints;
use super::holders::{TierSet, TierUpdate};
use super::locations::{BlockLocations, LocationProbe};
use super::pages::{PAGE_BLOCKS, PageOwner, PageSlot, Pages};
use super::run::{Extent, PrefixRun, RUN_BLOCKS_MAX, Runs, TierChange};
use crate::id::{BlockHash, Tier};
use kvfleet_cpu::prefetch;

/// Makes the digests of copies in different tiers differ.
pub(super) const TIERS_SALT: u64 = 0xC2B2_AE3D_27D4_EB4F;

/// A position in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunPosition {
    pub(super) run: u32,
    pub(super) offset: u32,
}

/// The node that makes a change: its slot, with the current incarnation of every slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer<'a> {
    pub(super) slot: u16,
    pub(super) incarnations: &'a [u32],
}

impl Writer<'_> {
    fn incarnation(&self) -> u32 {
        self.incarnations.get(usize::from(self.slot)).copied().unwrap_or_default()
    }
}

/// The blocks of a change.
#[derive(Clone, Copy, Debug)]
pub(super) enum ChangedBlocks<'a> {
    /// Each block follows the previous one; the first follows `parent`.
    Chain { parent: Option<BlockHash>, blocks: &'a [BlockHash] },
    /// In any order.
    Unordered(&'a [BlockHash]),
}

/// Stage of prefetching for a later change; each stage relies on memory that an earlier stage
/// brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefetchStage {
    /// The hashes of the change itself.
    Hashes,
    Buckets,
    Page,
    Run,
    Tail,
    Pages,
}

/// Blocks of one change that are prefetched; more would evict each other from the cache.
const PREFETCH_BLOCKS_MAX: usize = 64;

/// Effect of a change on the counts and the digest of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CopyDelta {
    /// Blocks newly held less blocks no longer held.
    pub(super) blocks: i64,
    /// Like `blocks`, per tier.
    pub(super) tier_blocks: [i64; 3],
    /// Digests of the new extents less digests of the old ones, wrapping.
    pub(super) digest: u128,
    /// Blocks not listed for lack of space.
    pub(super) unlisted: u64,
}

impl CopyDelta {
    /// Adds a changed range, but not its digest.
    fn add_range(&mut self, changed: &TierChange) {
        let TierChange { from, to, before, after } = *changed;
        let count = i64::from(to - from);
        self.blocks += count * (i64::from(!after.is_empty()) - i64::from(!before.is_empty()));
        for (tier, blocks) in Tier::ALL.into_iter().zip(&mut self.tier_blocks) {
            *blocks += count * (i64::from(after.contains(tier)) - i64::from(before.contains(tier)));
        }
    }
}

/// Blocks and their extents, stale extents included until the sweep removes them.
#[derive(Clone, Debug, Default)]
pub(super) struct Store {
    pub(super) pages: Pages,
    pub(super) runs: Runs,
    pub(super) locations: BlockLocations,
    pub(super) entry_points: EntryPoints,
    /// (slot, block) pairs held, stale ones included.
    pub(super) total_copies: u64,
    /// Next run the sweep looks at.
    pub(super) sweep_cursor: u32,
}

impl Store {
    /// (slot, block) pairs held, stale ones included.
    pub(super) fn total_copies(&self) -> u64 {
        self.total_copies
    }

    /// Listed blocks, those with only stale holds included.
    pub(super) fn len(&self) -> u64 {
        self.locations.len()
    }

    pub(super) fn find(&self, hash: BlockHash) -> Option<RunPosition> {
        let (run, offset) = self.pages.locate(self.locations.find(hash, &self.pages)?);
        Some(RunPosition { run, offset })
    }

    /// Position of a hash, from a lookup that has started.
    #[inline]
    pub(super) fn resolve(&self, sought: &LocationProbe<'_>) -> Option<RunPosition> {
        let (run, offset) = self.pages.locate(sought.resolve(&self.pages)?);
        Some(RunPosition { run, offset })
    }

    /// Hash at an offset; `None` past the end or if its page was released.
    pub(super) fn hash(&self, run: &PrefixRun, offset: u32) -> Option<BlockHash> {
        run.page_slot(offset).map(|place| self.pages.hash(place))
    }

    /// Adds a changed range of a run to `delta`.
    fn add_to_delta(&self, run: &PrefixRun, changed: &TierChange, delta: &mut CopyDelta) {
        let TierChange { from, to, before, after } = *changed;
        if before == after {
            return;
        }
        delta.add_range(changed);
        for nth in from / PAGE_BLOCKS..to.div_ceil(PAGE_BLOCKS) {
            let Some(page) = run.page(nth) else { continue };
            let first = nth * PAGE_BLOCKS;
            let slots = from.max(first) - first..to.min(first + PAGE_BLOCKS) - first;
            // No tiers give zero, so that added and subtracted digests cancel.
            let digest = |tiers: TierSet| match tiers.bits() {
                0 => 0,
                bits => self.pages.digest(page, slots.clone(), u64::from(bits).wrapping_mul(TIERS_SALT)),
            };
            delta.digest = delta.digest.wrapping_add(digest(after)).wrapping_sub(digest(before));
        }
    }

    /// Whether this block is listed at this position.
    pub(super) fn is_listed(&self, at: RunPosition, hash: BlockHash) -> bool {
        let place = self.runs.try_get(at.run).and_then(|run| run.page_slot(at.offset));
        place.is_some_and(|place| self.pages.lists(place, hash))
    }

    /// Changes the tiers that a node holds blocks in. Adds at most `max_new_blocks` blocks that the
    /// node does not hold yet.
    pub(super) fn apply_change(
        &mut self,
        writer: Writer<'_>,
        named: ChangedBlocks<'_>,
        tiers: TierUpdate,
        max_new_blocks: u64,
    ) -> CopyDelta {
        let (hashes, parent, chained) = match named {
            ChangedBlocks::Chain { parent, blocks } => (blocks, parent, true),
            ChangedBlocks::Unordered(blocks) => (blocks, None, false),
        };
        let cursor = parent.and_then(|parent| self.find(parent));
        let mut change =
            PendingChange { writer, tiers, chained, cursor, queued: None, delta: CopyDelta::default() };
        let roomy = tiers.added.is_empty() || hashes.len() as u64 <= max_new_blocks;
        let mut done = 0;
        while done < hashes.len() {
            done += if roomy {
                self.apply_leading(&mut change, &hashes[done..])
            } else {
                self.apply_within_limit(&mut change, hashes[done], max_new_blocks);
                1
            };
        }
        self.flush(&mut change);
        change.delta
    }

    /// Changes the first block and the blocks after it that share its range. Returns how many.
    fn apply_leading(&mut self, change: &mut PendingChange<'_>, hashes: &[BlockHash]) -> usize {
        let adds = !change.tiers.added.is_empty();
        if adds
            && change.chained
            && let Some(count) = self.extend_run(change, hashes)
        {
            return count as usize;
        }
        let mut found = self.find_near(change.cursor, hashes[0], adds);
        // A flush frees stale extents of the run, and may thereby unlist the block that was found.
        if found.is_some_and(|at| !change.is_adjacent(at)) && self.flush(change) {
            found = self.find(hashes[0]);
        }
        let begins = adds && change.chained && change.cursor.is_none();
        let stretch = match found {
            Some(at) => {
                if begins {
                    self.make_entry_point(at);
                }
                self.matching_range(at, hashes)
            }
            None if !adds => return 1,
            None => {
                let chained = change.chained;
                let new = &hashes[..if chained { hashes.len() } else { 1 }];
                match self.append(change.cursor.filter(|_| chained), new) {
                    Some((at, count)) => RunRange {
                        run: at.run,
                        from: at.offset,
                        to: at.offset + count,
                        last: at.offset + count - 1,
                    },
                    None => {
                        change.delta.unlisted += 1;
                        return 1;
                    }
                }
            }
        };
        self.queue_range(change, stretch);
        (stretch.to - stretch.from) as usize
    }

    /// Queues a range for the next flush.
    fn queue_range(&mut self, change: &mut PendingChange<'_>, stretch: RunRange) {
        if !change.extend(stretch) {
            self.flush(change);
            change.queued = Some((stretch.run, stretch.from, stretch.to));
        }
        change.cursor = Some(RunPosition { run: stretch.run, offset: stretch.last });
    }

    /// Extends the run of the previous block, if that block is the run's last and the next is new.
    /// Nearly every announcement takes this path.
    fn extend_run(&mut self, change: &mut PendingChange<'_>, hashes: &[BlockHash]) -> Option<u32> {
        let before = change.cursor?;
        let at = RunPosition { offset: before.offset + 1, ..before };
        if !self.can_append(at, hashes[0]) {
            return None;
        }
        let count = self.append_to_run(at.run, hashes).filter(|count| *count > 0)?;
        let to = at.offset + count;
        self.queue_range(change, RunRange { run: at.run, from: at.offset, to, last: to - 1 });
        Some(count)
    }

    /// The range from a listed block on, up or down its run, that matches the hashes one by one.
    fn matching_range(&self, at: RunPosition, hashes: &[BlockHash]) -> RunRange {
        let run = self.runs.get(at.run);
        let up = self.matches_forward(run, at.offset + 1, &hashes[1..]);
        if up > 0 {
            let last = at.offset + up;
            return RunRange { run: at.run, from: at.offset, to: last + 1, last };
        }
        let from = at.offset - self.matches_backward(run, at.offset, &hashes[1..]);
        RunRange { run: at.run, from, to: at.offset + 1, last: from }
    }

    /// Number of listed blocks from an offset upwards that match these hashes.
    fn matches_forward(&self, run: &PrefixRun, from: u32, hashes: &[BlockHash]) -> u32 {
        let mut at = from;
        while let Some(place) = run.page_slot(at) {
            let agree = self.pages.matches_forward(place, &hashes[(at - from) as usize..]);
            at += agree;
            if place.slot() + agree < PAGE_BLOCKS || (at - from) as usize == hashes.len() {
                break;
            }
        }
        at - from
    }

    /// Number of listed blocks below an offset, nearest first, that match these hashes.
    fn matches_backward(&self, run: &PrefixRun, from: u32, hashes: &[BlockHash]) -> u32 {
        let mut at = from;
        while let Some(place) = at.checked_sub(1).and_then(|before| run.page_slot(before)) {
            let agree = self.pages.matches_backward(place, &hashes[(from - at) as usize..]);
            at -= agree;
            if agree <= place.slot() || (from - at) as usize == hashes.len() {
                break;
            }
        }
        from - at
    }

    /// Changes one block; for an index that is nearly full.
    fn apply_within_limit(&mut self, change: &mut PendingChange<'_>, hash: BlockHash, max_new_blocks: u64) {
        self.flush(change);
        let found = self.find(hash);
        let holds = |at: RunPosition| {
            let Writer { slot, incarnations } = change.writer;
            let current = |hold: &&Extent| hold.slot == slot && hold.is_current(incarnations);
            self.runs.get(at.run).extents().iter().filter(current).any(|hold| hold.covers(at.offset))
        };
        let is_held = found.is_some_and(holds);
        if !is_held && change.delta.blocks >= i64::try_from(max_new_blocks).unwrap_or(i64::MAX) {
            change.delta.unlisted += 1;
            change.cursor = found;
            return;
        }
        self.apply_leading(change, &[hash]);
    }

    /// Position of a block: mostly next to the previous one.
    fn find_near(&self, cursor: Option<RunPosition>, hash: BlockHash, adds: bool) -> Option<RunPosition> {
        if let Some(RunPosition { run, offset }) = cursor {
            let before = if adds { None } else { offset.checked_sub(1) };
            let near =
                [Some(offset + 1), before].into_iter().flatten().map(|offset| RunPosition { run, offset });
            if let Some(at) = near.into_iter().find(|at| self.is_listed(*at, hash)) {
                return Some(at);
            }
        }
        self.find(hash)
    }

    /// Lists the first block, which is unlisted, behind the previous block: at the end of its run,
    /// at the position it had before, or in a new run. Later blocks follow while they are new and
    /// fit its page. Returns the position of the first and the number listed; `None` if all pages
    /// are taken.
    fn append(&mut self, cursor: Option<RunPosition>, hashes: &[BlockHash]) -> Option<(RunPosition, u32)> {
        let follows = cursor.map(|at| RunPosition { offset: at.offset + 1, ..at });
        let (at, count) = match follows {
            Some(at) if self.hash(self.runs.get(at.run), at.offset) == Some(hashes[0]) => {
                let place = self.runs.get(at.run).page_slot(at.offset)?;
                (at, self.locations.list(place, &hashes[..1], &mut self.pages))
            }
            Some(at) if self.can_append(at, hashes[0]) => (at, self.append_to_run(at.run, hashes)?),
            _ => {
                let run = self.runs.begin_run(hashes[0], cursor.map(|at| (at.run, at.offset)));
                let Some(count) = self.append_to_run(run, hashes) else {
                    self.runs.free(run);
                    return None;
                };
                let at = RunPosition { run, offset: self.runs.get(run).start() };
                self.make_entry_point(at);
                (at, count)
            }
        };
        Some((at, count))
    }

    /// Makes a listed block an entry point.
    fn make_entry_point(&mut self, at: RunPosition) {
        let place = self.runs.get(at.run).page_slot(at.offset);
        if let Some(place) = place.filter(|place| self.pages.make_entry_point(*place)) {
            self.entry_points.insert(self.pages.hash(place), at);
        }
    }

    /// Whether `at` is the end of its run and `hash` can be the next block there: same block group,
    /// or the first of a group with the same root tag. A hash from another scheme fails this and
    /// gets its own run.
    fn can_append(&self, at: RunPosition, hash: BlockHash) -> bool {
        let run = self.runs.get(at.run);
        let slot = hash.position_in_group() as u32;
        let is_kin = |octet: u64| match slot {
            0 => octet as u8 == hash.root_tag(),
            _ => octet == hash.block_group(),
        };
        let before = at.offset.checked_sub(1).and_then(|before| run.page_slot(before));
        at.offset == run.end()
            && at.offset < RUN_BLOCKS_MAX
            && at.offset % PAGE_BLOCKS == slot
            && before.is_some_and(|before| is_kin(self.pages.block_group(before.page())))
    }

    /// Appends the first block, and the new blocks of its group that follow, to a run. Returns how
    /// many: zero if the first is listed already, `None` if all pages are taken.
    fn append_to_run(&mut self, number: u32, hashes: &[BlockHash]) -> Option<u32> {
        let run = self.runs.get(number);
        let kin = group_run(&hashes[..hashes.len().min(run.append_limit() as usize)]);
        let (slot, nth) = (run.end() % PAGE_BLOCKS, run.pages().len() as u32);
        let (new_page, count) = match run.last_page() {
            Some(page) if slot > 0 => {
                (None, self.locations.list(PageSlot::new(page, slot), kin, &mut self.pages))
            }
            _ => self.locations.list_in_new_page(kin, PageOwner { run: number, nth }, &mut self.pages)?,
        };
        if count > 0 {
            self.runs.grow_mut(number).push(new_page, count);
        }
        Some(count)
    }

    /// Applies the queued range. Returns whether that freed stale extents.
    fn flush(&mut self, change: &mut PendingChange<'_>) -> bool {
        let Some((number, from, to)) = change.queued.take() else { return false };
        // A change that drops a block twice finds it again before the first drop is applied.
        if self.runs.get(number).end() == 0 {
            return false;
        }
        let run = self.runs.get_mut(number);
        let is_stale = |hold: &Extent| !hold.is_current(change.writer.incarnations);
        let (slot, incarnation) = (change.writer.slot, change.writer.incarnation());
        if !run.extents().iter().any(is_stale)
            && let Some(changed) = run.change_tail(slot, incarnation, from, to, change.tiers)
        {
            if self.record_changes(number, &[changed], &mut change.delta) {
                self.trim_or_free(number);
            }
            return false;
        }
        let run = self.runs.get_mut(number);
        let mut gone: SmallVec<[Extent; 2]> = SmallVec::new();
        run.retain_extents(|hold| !is_stale(hold), |hold| gone.push(hold));
        let mut stretches: SmallVec<[TierChange; 2]> = SmallVec::new();
        run.change_tiers(slot, incarnation, from, to, change.tiers, |stretch| stretches.push(stretch));
        let buried = self.record_changes(number, &stretches, &mut change.delta);
        self.release_extents(number, &gone);
        if buried || !gone.is_empty() {
            self.trim_or_free(number);
        }
        !gone.is_empty()
    }

    /// Records changed ranges of a run and unlists blocks without extents. Returns whether there
    /// may be such blocks.
    fn record_changes(&mut self, number: u32, stretches: &[TierChange], delta: &mut CopyDelta) -> bool {
        let before = delta.blocks;
        let run = self.runs.get(number);
        for stretch in stretches {
            self.add_to_delta(run, stretch, delta);
        }
        self.total_copies = self.total_copies.wrapping_add_signed(delta.blocks - before);
        let mut buried = false;
        for stretch in stretches {
            if stretch.after.is_empty() && !stretch.before.is_empty() {
                self.unlist_uncovered(number, stretch.from, stretch.to);
                buried = true;
            }
        }
        buried
    }

    /// Accounts for removed extents of a run.
    fn release_extents(&mut self, number: u32, gone: &[Extent]) {
        for hold in gone {
            self.total_copies -= hold.blocks();
            self.unlist_uncovered(number, hold.from.into(), hold.to.into());
        }
    }

    /// Unlists the blocks of a range that no extent covers.
    fn unlist_uncovered(&mut self, number: u32, from: u32, to: u32) {
        for (from, to) in self.runs.get(number).uncovered(from, to) {
            for nth in from / PAGE_BLOCKS..to.div_ceil(PAGE_BLOCKS) {
                let slots = from.max(nth * PAGE_BLOCKS)..to.min((nth + 1) * PAGE_BLOCKS);
                self.unlist_in_page(number, nth, slots.start % PAGE_BLOCKS, slots.len() as u32);
            }
            // The previous block no longer leads to this one, so it becomes an entry point.
            self.make_entry_point(RunPosition { run: number, offset: to });
        }
    }

    /// After blocks were unlisted: trims the end of the run, or frees the run if it has no extents.
    fn trim_or_free(&mut self, number: u32) {
        let run = self.runs.get(number);
        if run.extents().is_empty() {
            if run.end() > 0 {
                self.runs.free(number);
            }
            return;
        }
        let ends_dead = run.page_slot(run.end() - 1).is_none_or(|place| !self.pages.is_listed(place));
        if ends_dead {
            let pages = &self.pages;
            self.runs.get_mut(number).trim(|place| pages.is_listed(place));
        }
    }

    fn unlist_in_page(&mut self, number: u32, nth: u32, slot: u32, blocks: u32) {
        let Some(page) = self.runs.get(number).page(nth) else { return };
        // If two stale extents covered a block, the first removal unlisted it already.
        let bits = (((1u32 << blocks) - 1) << slot) as u8 & self.pages.listed(page);
        let heads = self.pages.entry_points(page) & bits;
        for slot in (0..PAGE_BLOCKS).filter(|slot| heads & 1 << slot != 0) {
            self.entry_points.remove(self.pages.hash(PageSlot::new(page, slot)));
        }
        if self.locations.unlist(page, bits, &mut self.pages) {
            self.runs.get_mut(number).mark_released(nth);
        }
    }

    /// Frees stale extents, visiting about `blocks` blocks in whole runs. A run costs one, plus one
    /// per block of the extents that it loses.
    pub(super) fn sweep(&mut self, blocks: u64, incarnations: &[u32]) {
        let mut left = blocks;
        for _ in 0..self.runs.number_limit() {
            if left == 0 {
                return;
            }
            if self.sweep_cursor >= self.runs.number_limit() {
                self.sweep_cursor = 0;
            }
            let number = self.sweep_cursor;
            self.sweep_cursor += 1;
            let lost = self.retain_extents(number, |hold| hold.is_current(incarnations));
            left = left.saturating_sub(1 + lost);
        }
    }

    /// Frees all extents of a slot, stale or not. Needed once in 2^32 incarnations of the slot.
    pub(super) fn forget_slot(&mut self, slot: u16) {
        for number in 0..self.runs.number_limit() {
            self.retain_extents(number, |hold| hold.slot != slot);
        }
    }

    /// Removes the extents of a run that `keep` rejects. Returns the sum of their blocks.
    fn retain_extents(&mut self, number: u32, keep: impl Fn(&Extent) -> bool) -> u64 {
        if self.runs.get(number).extents().iter().all(&keep) {
            return 0;
        }
        let mut gone: SmallVec<[Extent; 2]> = SmallVec::new();
        self.runs.get_mut(number).retain_extents(keep, |hold| gone.push(hold));
        self.release_extents(number, &gone);
        self.trim_or_free(number);
        gone.iter().map(Extent::blocks).sum()
    }

    /// Counts the blocks that a current extent covers, run by run.
    pub(super) fn count_current(&self, incarnations: &[u32]) -> u64 {
        let current = |hold: &Extent| hold.is_current(incarnations);
        let count = |run: &PrefixRun| {
            let gaps = run.uncovered_by(run.start(), run.end(), current);
            u64::from(run.end() - run.start() - gaps.iter().map(|(from, to)| to - from).sum::<u32>())
        };
        (0..self.runs.number_limit()).map(|number| count(self.runs.get(number))).sum()
    }

    /// Prefetches memory that a later change will read, one stage per call.
    pub(super) fn prefetch(&self, named: ChangedBlocks<'_>, depth: PrefetchStage) {
        let (first, blocks) = match named {
            ChangedBlocks::Chain { parent, blocks } => (parent.or(blocks.first().copied()), blocks),
            ChangedBlocks::Unordered(blocks) => (blocks.first().copied(), blocks),
        };
        let Some(first) = first else { return };
        match depth {
            PrefetchStage::Hashes => blocks.iter().take(PREFETCH_BLOCKS_MAX).step_by(4).for_each(prefetch),
            PrefetchStage::Buckets => {
                let mut octet = first.block_group();
                self.locations.prefetch(first);
                for hash in blocks.iter().take(PREFETCH_BLOCKS_MAX) {
                    if hash.block_group() != octet {
                        octet = hash.block_group();
                        self.locations.prefetch(*hash);
                    }
                }
            }
            PrefetchStage::Page => {
                self.locations.seek(first).probe_bucket(&self.pages);
            }
            PrefetchStage::Run => {
                if let Some(at) = self.find(first) {
                    self.runs.prefetch(at.run);
                }
            }
            PrefetchStage::Pages => {
                // Drops mostly name their blocks from the end of the prefix backwards.
                if let ChangedBlocks::Unordered(_) = named
                    && let Some(at) = self.find(first)
                {
                    let from = (at.offset + 1).saturating_sub(blocks.len().min(PREFETCH_BLOCKS_MAX) as u32);
                    let run = self.runs.get(at.run);
                    let pages =
                        (from / PAGE_BLOCKS..=at.offset / PAGE_BLOCKS).filter_map(|nth| run.page(nth));
                    pages.for_each(|page| self.pages.prefetch_whole(page));
                }
            }
            PrefetchStage::Tail => {
                if let Some(at) = self.find(first) {
                    self.runs.get(at.run).prefetch();
                }
            }
        }
    }

    /// Reports each extent of a run with its counts and digest.
    pub(super) fn run_deltas(&self, number: u32, tally: &mut impl FnMut(Extent, CopyDelta)) {
        let run = self.runs.get(number);
        for hold in run.extents() {
            let mut one = CopyDelta::default();
            let (from, to) = (u32::from(hold.from), u32::from(hold.to));
            let changed = TierChange { from, to, before: TierSet::NONE, after: hold.tiers };
            self.add_to_delta(run, &changed, &mut one);
            tally(*hold, one);
        }
    }
}

/// The longest start of `hashes` that is consecutive within one block group; at least one hash.
#[inline]
fn group_run(hashes: &[BlockHash]) -> &[BlockHash] {
    let first = hashes[0];
    let follows = |(nth, hash): &(usize, &BlockHash)| {
        hash.block_group() == first.block_group()
            && hash.position_in_group() == first.position_in_group() + nth
    };
    let count = hashes.iter().enumerate().take_while(follows).count();
    &hashes[..count]
}

/// A change in progress: adjacent blocks of a run are queued and applied together.
struct PendingChange<'a> {
    writer: Writer<'a>,
    tiers: TierUpdate,
    /// Whether each block follows the previous one.
    chained: bool,
    /// Position of the previous block.
    cursor: Option<RunPosition>,
    /// Queued range of a run: run, start, end.
    queued: Option<(u32, u32, u32)>,
    delta: CopyDelta,
}

impl PendingChange<'_> {
    /// Whether a position is adjacent to the queued range.
    fn is_adjacent(&self, at: RunPosition) -> bool {
        self.queued.is_some_and(|(run, from, to)| run == at.run && (to == at.offset || from == at.offset + 1))
    }

    /// Extends the queued range by an adjacent one; false if it is not adjacent.
    fn extend(&mut self, more: RunRange) -> bool {
        match &mut self.queued {
            Some((run, _, to)) if *run == more.run && *to == more.from => *to = more.to,
            Some((run, from, _)) if *run == more.run && *from == more.to => *from = more.from,
            _ => return false,
        }
        true
    }
}

/// Consecutive positions of a run, and the position of the last named block.
#[derive(Clone, Copy, Debug)]
struct RunRange {
    run: u32,
    from: u32,
    to: u32,
    last: u32,
}
