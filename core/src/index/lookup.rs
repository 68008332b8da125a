//! What a lookup answers: the longest prefix that live nodes hold, cut into runs of equal holders.
//!
//! Not here: the runs that are asked (`store.rs`) and what a router makes of the answer
//! (`crate::schedule`).

use smallvec::SmallVec;

use super::Index;
use super::places::Sought;
use super::run::{Run, head_of};
use super::store::{At, Store};
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

/// A node that held a block under an epoch that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Which, while it is fenced; one that has left or joined again is not told.
    pub node: Option<NodeId>,
}

/// Consecutive blocks with the same holders in the same tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderRun {
    /// Offset of the first block in the request.
    pub start_blocks: u32,
    /// Blocks in the run; at least one.
    pub len_blocks: u32,
    /// Who holds all of them, by ascending node; at least one.
    pub holders: SmallVec<[Holder; 4]>,
}

impl HolderRun {
    /// Offset after the last block of the run.
    #[must_use]
    pub fn end_blocks(&self) -> u32 {
        self.start_blocks + self.len_blocks
    }

    /// The hold of one node, if it holds the run.
    #[must_use]
    pub fn holder(&self, node: NodeId) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.node == node)
    }
}

/// The longest prefix of a request of which every block has at least one live holder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// In prefix order, without gaps, from block 0; neighbours differ.
    pub runs: Vec<HolderRun>,
}

impl PrefixMatch {
    /// Blocks from the start that one node holds without a gap.
    #[must_use]
    pub fn per_node(&self, node: NodeId) -> u32 {
        self.runs.iter().take_while(|run| run.holder(node).is_some()).last().map_or(0, HolderRun::end_blocks)
    }

    /// Blocks from the start that somebody holds.
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
    /// Finds the longest prefix of `hashes` (in prefix order, each the child of the one before) that live
    /// nodes hold. Costs one probe per run of the answer, not one per block: a hash stands for everything
    /// before it, so two positions that agree agree in between. Hashes that are not one prefix may get an
    /// answer that is too long or too short. Those that begin in the middle of one may get none, unless somebody
    /// announced the first without a block before it: a single block is asked for with [`Index::holders_of`].
    /// Blocks past `u32::MAX` are not looked at.
    #[must_use]
    pub fn longest_prefix(&self, hashes: &[BlockHash]) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        self.longest_prefix_into(hashes, &mut found);
        found
    }

    /// The same, into an answer whose memory is used again.
    pub fn longest_prefix_into(&self, hashes: &[BlockHash], found: &mut PrefixMatch) {
        found.runs.clear();
        let hashes = &hashes[..hashes.len().min(u32::MAX as usize)];
        let (Some(first), Some(last)) = (hashes.first(), hashes.last()) else { return };
        let Store { runs, heads, places, .. } = &self.store;
        let Some(first) = heads.find(*first) else { return };
        let mut whole = Whole::new();
        let mut ends_unlisted = false;
        let last = places.seek(*last);
        if !self.parts_at_fork(first, hashes) {
            match self.find_last(last) {
                Some(last) if self.walk_back(hashes, (first, last), &mut whole) => {}
                last => {
                    whole.clear();
                    ends_unlisted = last.is_none();
                }
            }
        }
        let mut position = 0;
        let mut next = Some(first);
        while let Some(at) = next {
            let run = runs.get(at.run);
            let known = whole.pop().filter(|(expected, _)| *expected == at);
            let len = known.map_or_else(
                || self.agreement(run, at.offset, (&hashes[position..], ends_unlisted)),
                |(_, len)| len,
            );
            let held = self.push_holders(found, run, at.offset, len);
            position += held as usize;
            if (held == 0 && known.is_none()) || position == hashes.len() {
                return;
            }
            // Past the end of the run the prefix may go on in another one; in its middle, and at the head of
            // one that was reached from behind, too, where blocks that were dropped and came back have moved.
            next = match whole.last() {
                Some((at, _)) if held == len => Some(*at),
                _ => {
                    whole.clear();
                    let next = hashes[position];
                    // What came from behind need not have left the run before where it ends.
                    if known.is_some() { self.store.find(next) } else { heads.find(next) }
                }
            };
        }
    }

    /// Whether the hashes leave the run they begin in where another run went off, and go on in none: the blocks
    /// before are shared with many others, and near, and those behind are new. Where they go on, asks the memory
    /// for the run.
    fn parts_at_fork(&self, first: At, hashes: &[BlockHash]) -> bool {
        let Store { runs, pages, heads, .. } = &self.store;
        let run = runs.get(first.run);
        let Some(fork) = run.fork().checked_sub(first.offset).filter(|fork| *fork > 0) else { return false };
        let Some(next) = hashes.get(fork as usize) else { return false };
        let [shared, new] = [fork - 1, fork].map(|step| run.place(first.offset + step));
        [shared, new].into_iter().flatten().for_each(|place| pages.prefetch(place));
        if let Some(next) = heads.find(*next) {
            runs.prefetch(next.run);
            return false;
        }
        // In front of the fork all of the hash is compared: by a lie there, prompts that go on behind it would be
        // followed from the front, run by run.
        shared.is_some_and(|place| pages.holds(place, hashes[fork as usize - 1]))
            && !new.is_some_and(|place| pages.holds_own(place, *next))
    }

    /// Where the last block of a prompt is, which was sought.
    fn find_last(&self, mut last: Sought<'_>) -> Option<At> {
        let Store { pages, runs, .. } = &self.store;
        let at = if last.look(pages) { self.store.at(&last)? } else { return None };
        runs.prefetch(at.run);
        Some(at)
    }

    /// The live nodes that hold a block, by ascending id, wherever in a prefix it is.
    #[must_use]
    pub fn holders_of(&self, block: BlockHash) -> SmallVec<[Holder; 4]> {
        let Some(at) = self.store.find(block) else { return SmallVec::new() };
        let holds = self.store.runs.get(at.run).holds().iter().filter(|hold| hold.covers(at.offset));
        let mut holders: SmallVec<[Holder; 4]> = holds.filter_map(|hold| self.nodes.holder(hold)).collect();
        holders.sort_unstable();
        holders
    }

    /// Somebody who held a block under an epoch that is over, until its blocks are swept: nobody where there is none, or a live node holds it.
    #[must_use]
    pub fn lost_holder(&self, block: BlockHash) -> Option<Lost> {
        let at = self.store.find(block)?;
        let holds = self.store.runs.get(at.run).holds().iter();
        let mut lost = None;
        for hold in holds.filter(|hold| hold.covers(at.offset)) {
            if self.nodes.holder(hold).is_some() {
                return None;
            }
            lost = Some(Lost { node: self.nodes.fenced(hold.slot) });
        }
        lost
    }

    /// Follows the runs of a prefix from its last block to its first. Answers whether they are one
    /// unbroken way; then nothing but holders is left to be looked at.
    fn walk_back(&self, hashes: &[BlockHash], (first, last): (At, At), whole: &mut Whole) -> bool {
        let runs = &self.store.runs;
        let (mut at, mut end) = (last, hashes.len());
        loop {
            let run = runs.get(at.run);
            let len = (at.offset + 1 - run.start()) as usize;
            let Some(position) = end.checked_sub(len) else { return false };
            // The last of the stretch is the block that was asked for, so all of it is: a hash stands for those
            // before it. Who announces what is no prefix is most often seen here.
            if run.head != head_of(hashes[position]) {
                return false;
            }
            let head = At { offset: run.start(), ..at };
            whole.push((head, len as u32));
            if position == 0 {
                return head == first;
            }
            let before = match runs.before(run) {
                Some((run, offset)) => Some(At { run, offset }),
                None => self.store.find(hashes[position - 1]),
            };
            let Some(before) = before else { return false };
            (at, end) = (before, position);
        }
    }

    /// How many of the hashes stand in the run from an offset on; the first does. `ends_unlisted` says that the
    /// last is known not to be listed. Goes by the blocks' own bytes and then compares all of the last hash only:
    /// what stands for that block stands for all before it.
    fn agreement(&self, run: &Run, offset: u32, hashes: (&[BlockHash], bool)) -> u32 {
        let (equal, (hashes, _)) = (self.own_agreement(run, offset, hashes), hashes);
        let last = run.place(offset + equal - 1);
        if equal == 1 || last.is_some_and(|last| self.store.pages.holds(last, hashes[equal as usize - 1])) {
            return equal;
        }
        self.full_agreement(run, offset, hashes)
    }

    /// The same where somebody announced a block with the own bytes of another one, in another octet.
    #[cold]
    fn full_agreement(&self, run: &Run, offset: u32, hashes: &[BlockHash]) -> u32 {
        let len = (run.end() - offset).min(hashes.len() as u32);
        halve(1, len, |step| {
            let place = run.place(offset + step);
            place.is_some_and(|place| self.store.pages.holds(place, hashes[step as usize]))
        })
    }

    /// The same by the blocks' own bytes: never less, and more only where somebody lied.
    #[inline]
    fn own_agreement(&self, run: &Run, offset: u32, (hashes, ends_unlisted): (&[BlockHash], bool)) -> u32 {
        let pages = &self.store.pages;
        let len = (run.end() - offset).min(hashes.len() as u32);
        // Most prompts that part from a run do so where another one did, and many at its end.
        let fork = run.fork().checked_sub(offset).filter(|fork| (1..len).contains(fork));
        if let Some(fork) = fork {
            for step in [fork - 1, fork] {
                run.place(offset + step).inspect(|place| pages.prefetch(*place));
            }
        }
        let agrees = |step: u32| {
            let place =
                run.place(offset + step).filter(|place| pages.holds_own(*place, hashes[step as usize]));
            // It may be the last, of which all is compared.
            place.inspect(|place| pages.prefetch_octet(*place)).is_some()
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
        halve(equal, differs, agrees)
    }

    /// Appends the holders of a stretch up to the first block nobody holds; answers how many are held.
    fn push_holders(&self, found: &mut PrefixMatch, run: &Run, from: u32, len: u32) -> u32 {
        if run.holds().len() > FEW_HOLDS {
            return self.push_many_holders(found, run, from, len);
        }
        let to = from + len;
        let mut at = from;
        while at < to {
            let mut end = to;
            let mut holders: SmallVec<[Holder; 4]> = SmallVec::with_capacity(run.holds().len());
            for hold in run.holds() {
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

    /// The same for a run whose holders come and go all along it: each hold is looked at where it begins
    /// and where it ends, not at every place between.
    #[cold]
    fn push_many_holders(&self, found: &mut PrefixMatch, run: &Run, from: u32, len: u32) -> u32 {
        let to = from + len;
        let mut waiting: Vec<(u32, u32, Holder)> = run
            .holds()
            .iter()
            .filter(|hold| u32::from(hold.to) > from && u32::from(hold.from) < to)
            .filter_map(|hold| Some((hold.from.into(), hold.to.into(), self.nodes.holder(hold)?)))
            .collect();
        waiting.sort_unstable_by_key(|(first, _, _)| *first);
        let mut waiting = waiting.into_iter().peekable();
        let mut here: Vec<(u32, Holder)> = Vec::new();
        let mut at = from;
        while at < to {
            here.retain(|(end, _)| *end > at);
            while let Some((_, end, holder)) = waiting.next_if(|(first, _, _)| *first <= at) {
                here.push((end, holder));
            }
            let next = waiting.peek().map_or(to, |(first, _, _)| *first);
            let Some(end) = here.iter().map(|(end, _)| *end).min() else { break };
            let end = end.min(next).min(to);
            found.push(here.iter().map(|(_, holder)| *holder).collect(), end - at);
            at = end;
        }
        at - from
    }
}

impl PrefixMatch {
    /// Appends blocks; their holders come in any order.
    fn push(&mut self, mut holders: SmallVec<[Holder; 4]>, blocks: u32) {
        // By ascending node: the order of slots tells of who joined first and must not show. It is most
        // often the order of nodes.
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

/// The first step that does not agree, of those from `equal` on, or `differs`. Equal hashes mean equal prefixes, so it
/// is found by halving. A page that was given back differs: nobody holds its blocks here.
#[inline]
fn halve(mut equal: u32, mut differs: u32, agrees: impl Fn(u32) -> bool) -> u32 {
    while equal < differs {
        let middle = equal + (differs - equal) / 2;
        if agrees(middle) {
            equal = middle + 1;
        } else {
            differs = middle;
        }
    }
    equal
}

/// Holds of a run that are looked through at every place where one of them begins or ends.
const FEW_HOLDS: usize = if cfg!(test) { 3 } else { 64 };

/// Stretches of runs that make up a request, the first of them last.
type Whole = SmallVec<[(At, u32); 8]>;
