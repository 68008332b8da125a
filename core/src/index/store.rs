//! Blocks and who holds them: runs, the pages their hashes lie in, and the table that finds a hash.
//!
//! A block is listed, and found, while some hold covers it, stale ones included: a stale hold goes when
//! its run is changed, or when the sweep comes past. Not here: what counts (`nodes.rs`), what a lookup
//! makes of it (`lookup.rs`).

use smallvec::SmallVec;

use super::heads::Heads;
use super::holders::{TierSet, Tiers};
use super::pages::{PAGE_BLOCKS, Pages, Place};
use super::places::{Places, Sought};
use super::run::{Changed, Hold, RUN_BLOCKS_MAX, Run, Runs};
use crate::cpu::prefetch;
use crate::id::{BlockHash, Tier};

/// Makes the digests of holds in different tiers differ.
pub(super) const TIERS_SALT: u64 = 0xC2B2_AE3D_27D4_EB4F;

/// A position in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) run: u32,
    pub(super) offset: u32,
}

/// Who changes something: slot and incarnation of a node, with the incarnations of all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who<'a> {
    pub(super) slot: u16,
    pub(super) incarnations: &'a [u32],
}

impl Who<'_> {
    fn incarnation(&self) -> u32 {
        self.incarnations.get(usize::from(self.slot)).copied().unwrap_or_default()
    }
}

/// The blocks of a change.
#[derive(Clone, Copy, Debug)]
pub(super) enum Named<'a> {
    /// Each follows the one before, the first follows `parent`.
    Chain { parent: Option<BlockHash>, blocks: &'a [BlockHash] },
    /// In any order.
    Loose(&'a [BlockHash]),
}

/// How far ahead of its turn the memory of a change is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// The change itself.
    Hashes,
    Buckets,
    Page,
    Run,
    Tail,
    Pages,
}

/// Blocks of one change that are asked for ahead of time; more would drive each other out.
const PREFETCHED: usize = 64;

/// What a change came to, for the books of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Blocks held now and not before, less those held before and not now.
    pub(super) blocks: i64,
    /// The same per tier.
    pub(super) tier_blocks: [i64; 3],
    /// Digests of the holds that are, less those of the holds that were.
    pub(super) digest: u128,
    /// Blocks that found no room.
    pub(super) unlisted: u64,
}

impl Tally {
    /// Books a stretch, but not its digest.
    fn count(&mut self, changed: &Changed) {
        let Changed { from, to, before, after } = *changed;
        let count = i64::from(to - from);
        self.blocks += count * (i64::from(!after.is_empty()) - i64::from(!before.is_empty()));
        for (tier, blocks) in Tier::ALL.into_iter().zip(&mut self.tier_blocks) {
            *blocks += count * (i64::from(after.contains(tier)) - i64::from(before.contains(tier)));
        }
    }
}

/// Blocks and their holds, with the holds that are only waiting for the sweep.
#[derive(Clone, Debug, Default)]
pub(super) struct Store {
    pub(super) pages: Pages,
    pub(super) runs: Runs,
    pub(super) places: Places,
    pub(super) heads: Heads,
    /// (slot, block) pairs held, stale ones included.
    pub(super) held: u64,
    /// Next run the sweep looks at.
    pub(super) sweep_at: u32,
}

impl Store {
    /// (slot, block) pairs held, stale ones included.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    /// Listed blocks, those with only stale holds included.
    pub(super) fn len(&self) -> u64 {
        self.places.len()
    }

    pub(super) fn find(&self, hash: BlockHash) -> Option<At> {
        let (run, offset) = self.pages.locate(self.places.find(hash, &self.pages)?);
        Some(At { run, offset })
    }

    /// Where a hash is that was sought.
    #[inline]
    pub(super) fn at(&self, sought: &Sought<'_>) -> Option<At> {
        let (run, offset) = self.pages.locate(sought.place(&self.pages)?);
        Some(At { run, offset })
    }

    /// Hash at a position, unless it is past the end or its page was given back.
    pub(super) fn hash(&self, run: &Run, offset: u32) -> Option<BlockHash> {
        run.place(offset).map(|place| self.pages.hash(place))
    }

    /// Books a stretch of a run.
    fn book(&self, run: &Run, changed: &Changed, tally: &mut Tally) {
        let Changed { from, to, before, after } = *changed;
        if before == after {
            return;
        }
        tally.count(changed);
        for nth in from / PAGE_BLOCKS..to.div_ceil(PAGE_BLOCKS) {
            let Some(page) = run.page(nth) else { continue };
            let first = nth * PAGE_BLOCKS;
            let slots = from.max(first) - first..to.min(first + PAGE_BLOCKS) - first;
            // Nothing held is zero, so that sums come out equal.
            let digest = |tiers: TierSet| match tiers.bits() {
                0 => 0,
                bits => self.pages.digest(page, slots.clone(), u64::from(bits).wrapping_mul(TIERS_SALT)),
            };
            tally.digest = tally.digest.wrapping_add(digest(after)).wrapping_sub(digest(before));
        }
    }

    /// Whether this block is listed at this position.
    pub(super) fn is_listed(&self, at: At, hash: BlockHash) -> bool {
        let place = self.runs.try_get(at.run).and_then(|run| run.place(at.offset));
        place.is_some_and(|place| self.pages.lists(place, hash))
    }

    /// Changes the tiers in which a node holds blocks. At most `room` blocks that the node does not hold
    /// yet are added.
    pub(super) fn change(&mut self, who: Who<'_>, named: Named<'_>, tiers: Tiers, room: u64) -> Tally {
        let (hashes, parent, chained) = match named {
            Named::Chain { parent, blocks } => (blocks, parent, true),
            Named::Loose(blocks) => (blocks, None, false),
        };
        let cursor = parent.and_then(|parent| self.find(parent));
        let mut change = Change { who, tiers, chained, cursor, pending: None, tally: Tally::default() };
        let roomy = tiers.added.is_empty() || hashes.len() as u64 <= room;
        let mut done = 0;
        while done < hashes.len() {
            done += if roomy {
                self.change_some(&mut change, &hashes[done..])
            } else {
                self.change_if_room(&mut change, hashes[done], room);
                1
            };
        }
        self.flush(&mut change);
        change.tally
    }

    /// Changes the first block, and those after it that go with it; answers how many.
    fn change_some(&mut self, change: &mut Change<'_>, hashes: &[BlockHash]) -> usize {
        let adds = !change.tiers.added.is_empty();
        if adds
            && change.chained
            && let Some(count) = self.lengthen(change, hashes)
        {
            return count as usize;
        }
        let mut found = self.seek(change.cursor, hashes[0], adds);
        // Booking frees stale holds of the run, and with them, perhaps, the block that was found.
        if found.is_some_and(|at| !change.is_next(at)) && self.flush(change) {
            found = self.find(hashes[0]);
        }
        let begins = adds && change.chained && change.cursor.is_none();
        let stretch = match found {
            Some(at) => {
                if begins {
                    self.make_head(at);
                }
                self.stretch(at, hashes)
            }
            None if !adds => return 1,
            None => {
                let chained = change.chained;
                let new = &hashes[..if chained { hashes.len() } else { 1 }];
                match self.append(change.cursor.filter(|_| chained), new) {
                    Some((at, count)) => Stretch {
                        run: at.run,
                        from: at.offset,
                        to: at.offset + count,
                        last: at.offset + count - 1,
                    },
                    None => {
                        change.tally.unlisted += 1;
                        return 1;
                    }
                }
            }
        };
        self.gather(change, stretch);
        (stretch.to - stretch.from) as usize
    }

    /// Adds a stretch to what will be booked.
    fn gather(&mut self, change: &mut Change<'_>, stretch: Stretch) {
        if !change.extend(stretch) {
            self.flush(change);
            change.pending = Some((stretch.run, stretch.from, stretch.to));
        }
        change.cursor = Some(At { run: stretch.run, offset: stretch.last });
    }

    /// Makes the run of the block before longer, if that block is its last and the next is new: what nearly
    /// every announcement comes to.
    fn lengthen(&mut self, change: &mut Change<'_>, hashes: &[BlockHash]) -> Option<u32> {
        let before = change.cursor?;
        let at = At { offset: before.offset + 1, ..before };
        if !self.may_push(at, hashes[0]) {
            return None;
        }
        let count = self.push(at.run, hashes).filter(|count| *count > 0)?;
        let to = at.offset + count;
        self.gather(change, Stretch { run: at.run, from: at.offset, to, last: to - 1 });
        Some(count)
    }

    /// The stretch from a listed block on, up or down its run, that the hashes name one by one.
    fn stretch(&self, at: At, hashes: &[BlockHash]) -> Stretch {
        let run = self.runs.get(at.run);
        let up = self.agree_up(run, at.offset + 1, &hashes[1..]);
        if up > 0 {
            let last = at.offset + up;
            return Stretch { run: at.run, from: at.offset, to: last + 1, last };
        }
        let from = at.offset - self.agree_down(run, at.offset, &hashes[1..]);
        Stretch { run: at.run, from, to: at.offset + 1, last: from }
    }

    /// How many listed blocks from an offset on have these hashes one by one.
    fn agree_up(&self, run: &Run, from: u32, hashes: &[BlockHash]) -> u32 {
        let mut at = from;
        while let Some(place) = run.place(at) {
            let agree = self.pages.agree_up(place, &hashes[(at - from) as usize..]);
            at += agree;
            if place.slot() + agree < PAGE_BLOCKS || (at - from) as usize == hashes.len() {
                break;
            }
        }
        at - from
    }

    /// How many listed blocks before an offset, the nearest first, have these hashes one by one.
    fn agree_down(&self, run: &Run, from: u32, hashes: &[BlockHash]) -> u32 {
        let mut at = from;
        while let Some(place) = at.checked_sub(1).and_then(|before| run.place(before)) {
            let agree = self.pages.agree_down(place, &hashes[(from - at) as usize..]);
            at -= agree;
            if agree <= place.slot() || (from - at) as usize == hashes.len() {
                break;
            }
        }
        from - at
    }

    /// The same, block by block, for an index that is nearly full.
    fn change_if_room(&mut self, change: &mut Change<'_>, hash: BlockHash, room: u64) {
        self.flush(change);
        let found = self.find(hash);
        let holds = |at: At| {
            let Who { slot, incarnations } = change.who;
            let current = |hold: &&Hold| hold.slot == slot && hold.is_current(incarnations);
            self.runs.get(at.run).holds().iter().filter(current).any(|hold| hold.covers(at.offset))
        };
        let is_held = found.is_some_and(holds);
        if !is_held && change.tally.blocks >= i64::try_from(room).unwrap_or(i64::MAX) {
            change.tally.unlisted += 1;
            change.cursor = found;
            return;
        }
        self.change_some(change, &[hash]);
    }

    /// Where a block is: most often next to the one before.
    fn seek(&self, cursor: Option<At>, hash: BlockHash, adds: bool) -> Option<At> {
        if let Some(At { run, offset }) = cursor {
            let before = if adds { None } else { offset.checked_sub(1) };
            let near = [Some(offset + 1), before].into_iter().flatten().map(|offset| At { run, offset });
            if let Some(at) = near.into_iter().find(|at| self.is_listed(*at, hash)) {
                return Some(at);
            }
        }
        self.find(hash)
    }

    /// Lists the first block, which is not listed, behind the one before: at the end of its run, or where
    /// it was before it was unlisted, or in a run of its own. Those that follow go with it as long as they
    /// are new and their page has room. Answers where the first is and how many were listed; nothing when
    /// all places are taken.
    fn append(&mut self, cursor: Option<At>, hashes: &[BlockHash]) -> Option<(At, u32)> {
        let follows = cursor.map(|at| At { offset: at.offset + 1, ..at });
        let (at, count) = match follows {
            Some(at) if self.hash(self.runs.get(at.run), at.offset) == Some(hashes[0]) => {
                let place = self.runs.get(at.run).place(at.offset)?;
                (at, self.places.list(place, &hashes[..1], &mut self.pages))
            }
            Some(at) if self.may_push(at, hashes[0]) => (at, self.push(at.run, hashes)?),
            _ => {
                let run = self.runs.begin(hashes[0], cursor.map(|at| (at.run, at.offset)));
                let Some(count) = self.push(run, hashes) else {
                    self.runs.free(run);
                    return None;
                };
                let at = At { run, offset: self.runs.get(run).start() };
                self.make_head(at);
                (at, count)
            }
        };
        Some((at, count))
    }

    /// Makes a block a head, if it is listed.
    fn make_head(&mut self, at: At) {
        let place = self.runs.get(at.run).place(at.offset);
        if let Some(place) = place.filter(|place| self.pages.make_head(*place)) {
            self.heads.insert(self.pages.hash(place), at);
        }
    }

    /// Whether a position is behind the end of its run, and a hash that of the next block of the prefix of the run:
    /// of the same octet, or the first of any with the same root. One that is not was made by other means than
    /// ours; it gets a run of its own.
    fn may_push(&self, at: At, hash: BlockHash) -> bool {
        let run = self.runs.get(at.run);
        let slot = hash.nth_of_octet() as u32;
        let is_kin = |octet: u64| match slot {
            0 => octet as u8 == hash.root_tag(),
            _ => octet == hash.octet(),
        };
        let before = at.offset.checked_sub(1).and_then(|before| run.place(before));
        at.offset == run.end()
            && at.offset < RUN_BLOCKS_MAX
            && at.offset % PAGE_BLOCKS == slot
            && before.is_some_and(|before| is_kin(self.pages.octet(before.page())))
    }

    /// Makes a run longer by the first block and those behind it that are new and of its octet.
    /// Answers how many: none if the first is listed; nothing when all places are taken.
    fn push(&mut self, number: u32, hashes: &[BlockHash]) -> Option<u32> {
        let run = self.runs.get(number);
        let kin = kin(&hashes[..hashes.len().min(run.room() as usize)]);
        let (slot, nth) = (run.end() % PAGE_BLOCKS, run.pages().len() as u32);
        let (new_page, count) = match run.last_page() {
            Some(page) if slot > 0 => (None, self.places.list(Place::new(page, slot), kin, &mut self.pages)),
            _ => self.places.list_in_new(kin, (number, nth), &mut self.pages)?,
        };
        if count > 0 {
            self.runs.growing(number).push(new_page, count);
        }
        Some(count)
    }

    /// Books the stretch that was gathered; answers whether that freed stale holds.
    fn flush(&mut self, change: &mut Change<'_>) -> bool {
        let Some((number, from, to)) = change.pending.take() else { return false };
        // A block that is dropped twice in one change is found the second time before the first is booked.
        if self.runs.get(number).end() == 0 {
            return false;
        }
        let run = self.runs.get_mut(number);
        let is_stale = |hold: &Hold| !hold.is_current(change.who.incarnations);
        let who = (change.who.slot, change.who.incarnation());
        if !run.holds().iter().any(is_stale)
            && let Some(changed) = run.change_at_end(who, (from, to), change.tiers)
        {
            if self.settle(number, &[changed], &mut change.tally) {
                self.tidy(number);
            }
            return false;
        }
        let run = self.runs.get_mut(number);
        let mut gone: SmallVec<[Hold; 2]> = SmallVec::new();
        run.retain(|hold| !is_stale(hold), |hold| gone.push(hold));
        let mut stretches: SmallVec<[Changed; 2]> = SmallVec::new();
        run.change(who, (from, to), change.tiers, |stretch| stretches.push(stretch));
        let buried = self.settle(number, &stretches, &mut change.tally);
        self.release(number, &gone);
        if buried || !gone.is_empty() {
            self.tidy(number);
        }
        !gone.is_empty()
    }

    /// Books stretches of a run, and unlists what nobody holds any more; answers whether there may be such.
    fn settle(&mut self, number: u32, stretches: &[Changed], tally: &mut Tally) -> bool {
        let before = tally.blocks;
        let run = self.runs.get(number);
        for stretch in stretches {
            self.book(run, stretch, tally);
        }
        self.held = self.held.wrapping_add_signed(tally.blocks - before);
        let mut buried = false;
        for stretch in stretches {
            if stretch.after.is_empty() && !stretch.before.is_empty() {
                self.bury(number, stretch.from, stretch.to);
                buried = true;
            }
        }
        buried
    }

    /// Holds of a run went.
    fn release(&mut self, number: u32, gone: &[Hold]) {
        for hold in gone {
            self.held -= hold.blocks();
            self.bury(number, hold.from.into(), hold.to.into());
        }
    }

    /// Unlists the blocks of a stretch that nobody holds any more.
    fn bury(&mut self, number: u32, from: u32, to: u32) {
        for (from, to) in self.runs.get(number).uncovered(from, to) {
            for nth in from / PAGE_BLOCKS..to.div_ceil(PAGE_BLOCKS) {
                let slots = from.max(nth * PAGE_BLOCKS)..to.min((nth + 1) * PAGE_BLOCKS);
                self.bury_in_page(number, nth, slots.start % PAGE_BLOCKS, slots.len() as u32);
            }
            // Nothing leads there any more from the blocks before.
            self.make_head(At { run: number, offset: to });
        }
    }

    /// Blocks of a run were unlisted: cuts its end off, or frees it when nobody holds any of it.
    fn tidy(&mut self, number: u32) {
        let run = self.runs.get(number);
        if run.holds().is_empty() {
            if run.end() > 0 {
                self.runs.free(number);
            }
            return;
        }
        let ends_dead = run.place(run.end() - 1).is_none_or(|place| !self.pages.is_live(place));
        if ends_dead {
            let pages = &self.pages;
            self.runs.get_mut(number).trim(|place| pages.is_live(place));
        }
    }

    fn bury_in_page(&mut self, number: u32, nth: u32, slot: u32, blocks: u32) {
        let Some(page) = self.runs.get(number).page(nth) else { return };
        // A block that two stale holds covered was buried with the first.
        let bits = (((1u32 << blocks) - 1) << slot) as u8 & self.pages.live(page);
        let heads = self.pages.heads(page) & bits;
        for slot in (0..PAGE_BLOCKS).filter(|slot| heads & 1 << slot != 0) {
            self.heads.remove(self.pages.hash(Place::new(page, slot)));
        }
        if self.places.unlist(page, bits, &mut self.pages) {
            self.runs.get_mut(number).give_back(nth);
        }
    }

    /// Frees stale holds, looking at about `blocks` blocks: runs are looked at whole. A run costs one
    /// block, and one more for each that it loses.
    pub(super) fn sweep(&mut self, blocks: u64, incarnations: &[u32]) {
        let mut left = blocks;
        for _ in 0..self.runs.used() {
            if left == 0 {
                return;
            }
            if self.sweep_at >= self.runs.used() {
                self.sweep_at = 0;
            }
            let number = self.sweep_at;
            self.sweep_at += 1;
            let lost = self.retain(number, |hold| hold.is_current(incarnations));
            left = left.saturating_sub(1 + lost);
        }
    }

    /// Frees every hold of a slot, stale or not: needed once in 2^32 incarnations of the slot.
    pub(super) fn forget_slot(&mut self, slot: u16) {
        for number in 0..self.runs.used() {
            self.retain(number, |hold| hold.slot != slot);
        }
    }

    /// Frees the holds of a run that `keep` refuses; answers over how many blocks they went.
    fn retain(&mut self, number: u32, keep: impl Fn(&Hold) -> bool) -> u64 {
        if self.runs.get(number).holds().iter().all(&keep) {
            return 0;
        }
        let mut gone: SmallVec<[Hold; 2]> = SmallVec::new();
        self.runs.get_mut(number).retain(keep, |hold| gone.push(hold));
        self.release(number, &gone);
        self.tidy(number);
        gone.iter().map(Hold::blocks).sum()
    }

    /// Blocks that a current hold covers, counted one by one.
    pub(super) fn count_current(&self, incarnations: &[u32]) -> u64 {
        let current = |hold: &Hold| hold.is_current(incarnations);
        let count = |run: &Run| {
            let gaps = run.uncovered_by(run.start(), run.end(), current);
            u64::from(run.end() - run.start() - gaps.iter().map(|(from, to)| to - from).sum::<u32>())
        };
        (0..self.runs.used()).map(|number| count(self.runs.get(number))).sum()
    }

    /// Asks the memory for what a later change will look at: first the buckets of its blocks, then the
    /// page of the first, then its run.
    pub(super) fn prefetch(&self, named: Named<'_>, depth: Depth) {
        let (first, blocks) = match named {
            Named::Chain { parent, blocks } => (parent.or(blocks.first().copied()), blocks),
            Named::Loose(blocks) => (blocks.first().copied(), blocks),
        };
        let Some(first) = first else { return };
        match depth {
            Depth::Hashes => blocks.iter().take(PREFETCHED).step_by(4).for_each(prefetch),
            Depth::Buckets => {
                let mut octet = first.octet();
                self.places.prefetch(first);
                for hash in blocks.iter().take(PREFETCHED) {
                    if hash.octet() != octet {
                        octet = hash.octet();
                        self.places.prefetch(*hash);
                    }
                }
            }
            Depth::Page => {
                self.places.seek(first).look(&self.pages);
            }
            Depth::Run => {
                if let Some(at) = self.find(first) {
                    self.runs.prefetch(at.run);
                }
            }
            Depth::Pages => {
                // What is dropped is named from the end, most often.
                if let Named::Loose(_) = named
                    && let Some(at) = self.find(first)
                {
                    let from = (at.offset + 1).saturating_sub(blocks.len().min(PREFETCHED) as u32);
                    let run = self.runs.get(at.run);
                    let pages =
                        (from / PAGE_BLOCKS..=at.offset / PAGE_BLOCKS).filter_map(|nth| run.page(nth));
                    pages.for_each(|page| self.pages.prefetch_whole(page));
                }
            }
            Depth::Tail => {
                if let Some(at) = self.find(first) {
                    self.runs.get(at.run).prefetch();
                }
            }
        }
    }

    /// What the current holds of a slot come to.
    pub(super) fn tally_run(&self, number: u32, tally: &mut impl FnMut(Hold, Tally)) {
        let run = self.runs.get(number);
        for hold in run.holds() {
            let mut one = Tally::default();
            let (from, to) = (u32::from(hold.from), u32::from(hold.to));
            let changed = Changed { from, to, before: TierSet::NONE, after: hold.tiers };
            self.book(run, &changed, &mut one);
            tally(*hold, one);
        }
    }
}

/// The first hashes of some that are of one octet, one after the other; at least one.
#[inline]
fn kin(hashes: &[BlockHash]) -> &[BlockHash] {
    let first = hashes[0];
    let follows = |(nth, hash): &(usize, &BlockHash)| {
        hash.octet() == first.octet() && hash.nth_of_octet() == first.nth_of_octet() + nth
    };
    let count = hashes.iter().enumerate().take_while(follows).count();
    &hashes[..count]
}

/// A change under way: blocks that follow each other in a run are booked together.
struct Change<'a> {
    who: Who<'a>,
    tiers: Tiers,
    /// Whether each block follows the one before it.
    chained: bool,
    /// Where the block before is.
    cursor: Option<At>,
    /// Stretch of a run that was gathered and not booked.
    pending: Option<(u32, u32, u32)>,
    tally: Tally,
}

impl Change<'_> {
    /// Whether a position is next to the stretch that is being gathered.
    fn is_next(&self, at: At) -> bool {
        self.pending
            .is_some_and(|(run, from, to)| run == at.run && (to == at.offset || from == at.offset + 1))
    }

    /// Adds positions to the stretch that is being gathered, if they are next to it.
    fn extend(&mut self, more: Stretch) -> bool {
        match &mut self.pending {
            Some((run, _, to)) if *run == more.run && *to == more.from => *to = more.to,
            Some((run, from, _)) if *run == more.run && *from == more.to => *from = more.from,
            _ => return false,
        }
        true
    }
}

/// Some positions of a run in a row, and the one that was named last.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    run: u32,
    from: u32,
    to: u32,
    last: u32,
}
