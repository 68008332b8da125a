//! Blocks and who holds them: runs, the pages their hashes lie in, and the table that finds a hash.
//!
//! A block is listed, and found, while some hold covers it, stale ones included: a stale hold goes when
//! its run is changed, or when the sweep comes past. Not here: what counts (`nodes.rs`), what a lookup
//! makes of it (`lookup.rs`).

use smallvec::SmallVec;

use super::holders::{TierSet, Tiers};
use super::pages::{Pages, Place};
use super::places::Places;
use super::run::{Changed, Hold, RUN_BLOCKS_MAX, Run, Runs};
use crate::id::{BlockHash, Tier};

/// Hashes whose buckets are asked for at once: enough to have as many misses under way as a core can.
const TOUCHED: usize = 32;

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
    fn add(&mut self, changed: Changed, hashes: impl Iterator<Item = BlockHash>) {
        let Changed { from, to, before, after } = changed;
        if before == after {
            return;
        }
        let count = i64::from(to - from);
        self.blocks += count * (i64::from(!after.is_empty()) - i64::from(!before.is_empty()));
        for (tier, blocks) in Tier::ALL.into_iter().zip(&mut self.tier_blocks) {
            *blocks += count * (i64::from(after.contains(tier)) - i64::from(before.contains(tier)));
        }
        for hash in hashes {
            let (is, was) = (hold_digest(hash, after), hold_digest(hash, before));
            self.digest = self.digest.wrapping_add(is).wrapping_sub(was);
        }
    }
}

/// Digest of one hold; nothing held is zero, so that sums come out equal. Not keyed: sums of block
/// hashes, which are keyed, meet by accident once in 2^64 or so.
fn hold_digest(hash: BlockHash, tiers: TierSet) -> u128 {
    if tiers.is_empty() {
        return 0;
    }
    const ODD: [u64; 2] = [0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F];
    let whole = u128::from_le_bytes(hash.0);
    let salt = u64::from(tiers.bits()).wrapping_mul(ODD[1]);
    let (low, high) = (whole as u64 ^ salt, (whole >> 64) as u64);
    let product = u128::from(low ^ ODD[0]) * u128::from(high ^ ODD[1]);
    let mixed = (product as u64) ^ ((product >> 64) as u64) ^ salt;
    (u128::from(mixed) * u128::from(ODD[0])) ^ (product.rotate_left(64) ^ whole)
}

/// Blocks and their holds, with the holds that are only waiting for the sweep.
#[derive(Clone, Debug, Default)]
pub(super) struct Store {
    pub(super) pages: Pages,
    pub(super) runs: Runs,
    pub(super) places: Places,
    /// (slot, block) pairs held, stale ones included.
    held: u64,
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

    /// Hash at a position, unless it is past the end or its page was given back.
    pub(super) fn hash(&self, run: &Run, offset: u32) -> Option<BlockHash> {
        run.place(offset).map(|place| self.pages.hash(place))
    }

    /// Whether this block is listed at this position.
    pub(super) fn is_listed(&self, at: At, hash: BlockHash) -> bool {
        let place = self.runs.get(at.run).place(at.offset);
        place.is_some_and(|place| self.pages.hash(place) == hash && self.pages.is_live(place))
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
        for batch in hashes.chunks(TOUCHED) {
            self.places.touch(batch.iter());
            let mut done = 0;
            while done < batch.len() {
                done += if roomy {
                    self.change_some(&mut change, &batch[done..])
                } else {
                    self.change_if_room(&mut change, batch[done], room);
                    1
                };
            }
        }
        self.flush(&mut change);
        change.tally
    }

    /// Changes the first block, and those behind it that are new with it; answers how many.
    fn change_some(&mut self, change: &mut Change<'_>, hashes: &[BlockHash]) -> usize {
        let adds = !change.tiers.added.is_empty();
        let mut found = self.seek(change.cursor, hashes[0], adds);
        // Booking frees stale holds of the run, and with them, perhaps, the block that was found.
        if found.is_some_and(|at| !change.is_next(at)) && self.flush(change) {
            found = self.find(hashes[0]);
        }
        let (at, count) = match found {
            Some(at) => (at, 1),
            None if !adds => return 1,
            None => {
                let chained = change.chained;
                match self.append(change.cursor.filter(|_| chained), &hashes[..if chained { hashes.len() } else { 1 }]) {
                    Some(appended) => appended,
                    None => {
                        change.tally.unlisted += 1;
                        return 1;
                    }
                }
            }
        };
        if !change.extend(at, count) {
            self.flush(change);
            change.pending = Some((at.run, at.offset, at.offset + count));
        }
        change.cursor = Some(At { offset: at.offset + count - 1, ..at });
        count as usize
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
                self.runs.get_mut(at.run).revive();
                (at, 1)
            }
            Some(at) if at.offset == self.runs.get(at.run).len() && at.offset < RUN_BLOCKS_MAX => {
                (at, self.push(at.run, hashes)?)
            }
            _ => {
                let run = self.runs.take();
                let Some(count) = self.push(run, hashes) else {
                    self.runs.free(run);
                    return None;
                };
                (At { run, offset: 0 }, count)
            }
        };
        let first = self.runs.get(at.run).place(at.offset)?;
        let listed = &hashes[..count as usize];
        self.pages.list(first, listed);
        for (step, hash) in (0..).zip(listed) {
            self.places.insert(*hash, Place(first.0 + step), &self.pages);
        }
        Some((at, count))
    }

    /// Makes a run longer by the first block and those behind it that are new and fit into its page.
    fn push(&mut self, number: u32, hashes: &[BlockHash]) -> Option<u32> {
        let run = self.runs.get(number);
        let most = hashes.len().min(run.room() as usize);
        let is_new = |step: &usize| {
            let hash = hashes[*step];
            self.places.find(hash, &self.pages).is_none() && !hashes[..*step].contains(&hash)
        };
        let count = 1 + (1..most).take_while(is_new).count() as u32;
        let page = if run.needs_page() { Some(self.pages.take(number, run.pages().len() as u16)?) } else { None };
        self.runs.get_mut(number).push(page, count);
        Some(count)
    }

    /// Books the stretch that was gathered; answers whether that freed stale holds.
    fn flush(&mut self, change: &mut Change<'_>) -> bool {
        let Some((number, from, to)) = change.pending.take() else { return false };
        let run = self.runs.get_mut(number);
        let mut gone: SmallVec<[Hold; 2]> = SmallVec::new();
        if run.holds().iter().any(|hold| !hold.is_current(change.who.incarnations)) {
            run.retain(|hold| hold.is_current(change.who.incarnations), |hold| gone.push(hold));
        }
        let mut stretches: SmallVec<[Changed; 2]> = SmallVec::new();
        let who = (change.who.slot, change.who.incarnation());
        run.change(who, (from, to), change.tiers, |stretch| stretches.push(stretch));
        let before = change.tally.blocks;
        let run = self.runs.get(number);
        for stretch in &stretches {
            let places = (stretch.from..stretch.to).filter_map(|offset| run.place(offset));
            change.tally.add(*stretch, places.map(|place| self.pages.hash(place)));
        }
        self.held = self.held.wrapping_add_signed(change.tally.blocks - before);
        let unheld = stretches.iter().filter(|stretch| stretch.after.is_empty() && !stretch.before.is_empty());
        let unheld: SmallVec<[(u32, u32); 2]> = unheld.map(|stretch| (stretch.from, stretch.to)).collect();
        for (from, to) in unheld {
            self.bury(number, from, to);
        }
        self.release(number, &gone);
        !gone.is_empty()
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
            for offset in from..to {
                // One that two stale holds covered is buried with the first.
                let place = self.runs.get(number).place(offset).filter(|place| self.pages.is_live(*place));
                let Some(place) = place else { continue };
                self.places.remove(self.pages.hash(place), place, &self.pages);
                let page_is_empty = self.pages.unlist(place);
                if let Some(page) = self.runs.get_mut(number).bury(offset, page_is_empty) {
                    self.pages.free(page);
                }
            }
        }
        let run = self.runs.get(number);
        if run.live() == 0 {
            if run.len() > 0 {
                self.runs.free(number);
            }
            return;
        }
        let ends_dead = run.place(run.len() - 1).is_none_or(|place| !self.pages.is_live(place));
        if ends_dead {
            let pages = &self.pages;
            self.runs.get_mut(number).trim(|place| pages.is_live(place));
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
        gone.iter().map(Hold::blocks).sum()
    }

    /// Blocks that a current hold covers, counted one by one.
    pub(super) fn count_current(&self, incarnations: &[u32]) -> u64 {
        let current = |hold: &Hold| hold.is_current(incarnations);
        let count = |run: &Run| {
            let mut kept = run.clone();
            kept.retain(current, |_| {});
            let gaps: u32 = kept.uncovered(0, run.len()).iter().map(|(from, to)| to - from).sum();
            u64::from(run.len() - gaps)
        };
        (0..self.runs.used()).map(|number| count(self.runs.get(number))).sum()
    }

    /// Takes in a run that a snapshot describes: its pages with their numbers, and the hashes of
    /// those that were not given back. Answers false when it cannot be.
    pub(super) fn restore_run(&mut self, run: Run, hashes: &[BlockHash]) -> bool {
        let number = self.runs.restore(run);
        let run = self.runs.get(number).clone();
        for (nth, page) in run.pages().enumerate() {
            if page.is_some_and(|page| !self.pages.take_exactly(page, number, nth as u16)) {
                return false;
            }
        }
        let gaps = run.uncovered(0, run.len());
        let is_live = |offset: u32| !gaps.iter().any(|(from, to)| (*from..*to).contains(&offset));
        let mut hashes = hashes.iter();
        for offset in 0..run.len() {
            let Some(place) = run.place(offset) else {
                if is_live(offset) {
                    return false;
                }
                continue;
            };
            let Some(&hash) = hashes.next() else { return false };
            self.pages.list(place, &[hash]);
            if !is_live(offset) {
                self.pages.unlist(place);
                continue;
            }
            if self.places.find(hash, &self.pages).is_some() {
                return false;
            }
            self.places.insert(hash, place, &self.pages);
            self.runs.get_mut(number).revive();
        }
        self.held += run.holds().iter().map(Hold::blocks).sum::<u64>();
        hashes.next().is_none()
    }

    /// What the current holds of a slot come to.
    pub(super) fn tally_run(&self, number: u32, tally: &mut impl FnMut(Hold, Tally)) {
        let run = self.runs.get(number);
        for hold in run.holds() {
            let mut one = Tally::default();
            let (from, to) = (u32::from(hold.from), u32::from(hold.to));
            let changed = Changed { from, to, before: TierSet::NONE, after: hold.tiers };
            one.add(changed, (from..to).filter_map(|offset| self.hash(run, offset)));
            tally(*hold, one);
        }
    }
}

#[cfg(test)]
impl Store {
    /// Panics unless every part agrees with every other.
    pub(super) fn check(&self) {
        let mut listed = 0;
        let mut held = 0;
        for number in 0..self.runs.used() {
            let run = self.runs.get(number);
            let gaps = run.uncovered(0, run.len());
            let mut live = 0;
            for offset in 0..run.len() {
                let is_held = !gaps.iter().any(|(from, to)| (*from..*to).contains(&offset));
                let Some(place) = run.place(offset) else {
                    assert!(!is_held, "{offset} of run {number} is held and has no page");
                    continue;
                };
                assert_eq!(self.pages.locate(place), (number, offset));
                assert_eq!(self.pages.is_live(place), is_held, "{offset} of run {number}: {run:?}");
                let found = self.places.find(self.pages.hash(place), &self.pages);
                assert_eq!(found == Some(place), is_held, "{offset} of run {number}: {found:?}");
                live += u32::from(is_held);
            }
            assert_eq!(run.live(), live);
            assert!(run.len() == 0 || gaps.iter().all(|(_, to)| *to < run.len()), "the end is held");
            listed += u64::from(live);
            held += run.holds().iter().map(Hold::blocks).sum::<u64>();
        }
        assert_eq!((self.places.len(), self.held), (listed, held));
    }
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
        self.pending.is_some_and(|(run, from, to)| run == at.run && (to == at.offset || from == at.offset + 1))
    }

    /// Adds positions to the stretch that is being gathered, if they are next to it.
    fn extend(&mut self, at: At, count: u32) -> bool {
        match &mut self.pending {
            Some((run, _, to)) if *run == at.run && *to == at.offset => *to += count,
            Some((run, from, _)) if *run == at.run && *from == at.offset + count => *from -= count,
            _ => return false,
        }
        true
    }
}
