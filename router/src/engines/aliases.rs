//! Two names for one block: the hash that its engine gave it, and ours.
//!
//! Engines chain hashes of their own, which mean something to themselves only. Their events carry the tokens, so our hash is made anew
//! from them, behind the chain of the parent; the engine's hash stays as an alias, because removals name nothing else. Blocks of an
//! engine may hold several of ours, or be parts of one of ours, which is there while all of its parts are. What cannot be hashed as a
//! request would be (an image in the prompt, a parent that was never heard of, blocks that end beside ours) is left out and counted: a
//! block that is not listed is computed again, one that is listed wrongly draws requests to where nothing is.
//!
//! A name stays true as long as the process lives, also when nobody knows any more what is resident. An engine does not say again what a
//! request found there; but it stores a block only behind blocks that the request holds, so that all blocks before it are there.
//!
//! Pure. Not here: numbers of messages and gaps (`rank.rs`), payloads (`kvfleet_proto::engine_events`), and how names are found
//! (`aliases/names.rs`).

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use kv_core::id::BlockHash;
use kv_core::index::command::Change;
use kv_core::prefix::Chain;
use kvfleet_proto::engine_events::{EngineEvent, EngineHash, Medium, Removed, Stored, Tokens};
use smallvec::SmallVec;

use block::{Alias, Ours, Part, Place, Whole, WholeId, Wholes};
pub(super) use changes::Changes;
use names::{Names, Slot, Spread, TOGETHER, Tag};

use super::tenants::{Hashers, Tenants};

mod block;
mod changes;
mod names;

/// Blocks that left GPU memory whose alias is kept, at least: one that comes back from the host's memory does so without tokens, and one that
/// was never gone is known by what is stored behind it. As many as were ever resident are kept, if that is more.
const DEPARTED_MIN: usize = if cfg!(test) { 8 } else { 16_384 };

/// Blocks of one rank that are known in all, and blocks of ours in them: thirty million tokens in blocks of sixteen.
const KNOWN_MAX: usize = if cfg!(test) { 512 } else { 2_097_152 };

/// Tokens of an engine's block: far more than any has. It is what one word of two bytes may do to the plane.
const ENGINE_BLOCK_TOKENS_MAX: usize = 8_192;

/// Which blocks of events have no place in the index, by why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// Behind a parent that is not known, or without tokens and never heard of.
    pub(crate) orphans: u64,
    /// Their hash covers what is not told, or what no request can say.
    pub(crate) opaque: u64,
    /// They end where none of ours does, and ours where none of theirs.
    pub(crate) odd_size: u64,
    /// Of layers that do not need the whole prefix.
    pub(crate) other_group: u64,
    /// Of a salt that no tenant has, of an adapter whose name is too long, or of too many of both.
    pub(crate) unknown_salt: u64,
    /// There are as many as are kept.
    pub(crate) over_limit: u64,
}

/// What one rank of one engine has in GPU memory, by both names.
#[derive(Debug)]
pub(super) struct Aliases {
    hashers: Hashers,
    known: Names<Alias>,
    wholes: Wholes,
    /// Of blocks of ours that are parts of engine blocks, in how many that are resident: some begin alike.
    shared: HashMap<BlockHash, u32, Spread>,
    /// In the order in which they left, one for each departure; those that came back are still in it.
    departed: VecDeque<Slot>,
    /// Departures so far: the number of the last in the list.
    departures: u64,
    /// Blocks that are resident, and the most that ever were.
    resident: usize,
    most_resident: usize,
    /// Blocks of ours in all that is known, and parts of ours.
    ours: usize,
    /// The group of layers that counts: the first one that needs the whole prefix and stored something in GPU memory.
    group: Option<Option<u32>>,
    /// Number of the next alias.
    next: u64,
    left_out: LeftOut,
    /// Memory that serves again.
    scratch: Scratch,
}

/// What one step has no use for after it.
#[derive(Default)]
struct Scratch {
    tags: Vec<Tag>,
    tokens: Vec<u32>,
    blocks: Vec<BlockHash>,
    chains: Vec<Chain>,
}

impl fmt::Debug for Scratch {
    /// Leaves out what prompts say.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}

impl Aliases {
    pub(super) fn new(tenants: Arc<Tenants>) -> Aliases {
        Aliases {
            hashers: Hashers::new(tenants),
            known: Names::default(),
            wholes: Wholes::default(),
            shared: HashMap::default(),
            departed: VecDeque::new(),
            departures: 0,
            resident: 0,
            most_resident: 0,
            ours: 0,
            group: None,
            next: 0,
            left_out: LeftOut::default(),
            scratch: Scratch::default(),
        }
    }

    /// What was left out since the last call.
    pub(super) fn take_left_out(&mut self) -> LeftOut {
        std::mem::take(&mut self.left_out)
    }

    /// Appends what an event changes.
    pub(super) fn take(&mut self, event: &EngineEvent, changes: &mut Changes) {
        match event {
            EngineEvent::Stored(stored) => self.stored(stored, changes),
            EngineEvent::Removed(removed) => self.removed(removed, changes),
            EngineEvent::Cleared => {
                self.forget_resident();
                changes.clear();
            }
        }
    }

    /// It is another process: names and all else it said are void.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.wholes.clear();
        self.shared.clear();
        self.departed.clear();
        self.hashers.forget();
        (self.resident, self.most_resident, self.ours) = (0, 0, 0);
        self.group = None;
    }

    /// What is resident is not known any more; names are.
    pub(super) fn forget_resident(&mut self) {
        // One that is told again and again costs no look at all names.
        if self.resident == 0 {
            return self.bound_departed();
        }
        let resident = self.known.iter().filter(|(_, alias)| alias.is_resident);
        let mut left: Vec<_> = resident.map(|(slot, alias)| (alias.nth, slot)).collect();
        // Children are forgotten before their parents.
        left.sort_unstable_by_key(|(nth, _)| std::cmp::Reverse(*nth));
        let mut unsaid = Changes::default();
        for (_, slot) in left {
            self.set_resident(slot, false, &mut unsaid);
            unsaid.take();
        }
        self.bound_departed();
    }

    /// All that is resident, parents first, as changes from nothing.
    pub(super) fn all(&self) -> Vec<Change> {
        let all = self.known.iter().map(|(_, alias)| alias);
        let mut resident: Vec<&Alias> = all.filter(|alias| alias.is_resident).collect();
        resident.sort_unstable_by_key(|alias| alias.nth);
        let mut changes = Changes::default();
        changes.clear();
        for alias in resident {
            match &alias.ours {
                Ours::One(block) => changes.push(true, alias.before(), &[*block]),
                Ours::Several(blocks) => changes.push(true, alias.before(), blocks),
                // The last part tells of all of them.
                Ours::Part(part) if usize::from(part.filled) == self.hashers.block_tokens() => {
                    let wholes = part.of().iter().filter_map(|whole| self.wholes.get(*whole));
                    wholes
                        .filter(|whole| whole.missing == 0)
                        .for_each(|whole| changes.push(true, whole.before, &[whole.block]));
                }
                Ours::Part(_) => {}
            }
        }
        changes.take()
    }

    fn stored(&mut self, stored: &Stored, changes: &mut Changes) {
        let count = stored.hashes.len() as u64;
        // Word of other memories comes from others too, who know of no groups.
        if stored.medium != Medium::Gpu {
            return;
        }
        if !stored.is_full_attention || self.group.is_some_and(|group| group != stored.group) {
            self.left_out.other_group += count;
            return;
        }
        let Tokens::Ids(tokens) = &stored.tokens else {
            self.left_out.opaque += count;
            return;
        };
        let theirs = stored.block_tokens as usize;
        if tokens.is_empty() {
            self.came_or_went(&stored.hashes, true, changes);
        } else if theirs == 0 || tokens.len() != theirs * stored.hashes.len() {
            // With blocks of the range left out, nothing says which.
            self.left_out.opaque += count;
        } else if theirs > ENGINE_BLOCK_TOKENS_MAX {
            self.left_out.odd_size += count;
        } else if let Some(place) = self.place(stored) {
            self.group.get_or_insert(stored.group);
            self.prove(stored.parent, changes);
            self.hashed(stored, tokens, place, changes);
        }
    }

    /// Where the first block of an event begins.
    fn place(&mut self, stored: &Stored) -> Option<Place> {
        let count = stored.hashes.len() as u64;
        let Some(parent) = stored.parent else {
            let Some(hasher) = self.hashers.of(stored.adapter.as_deref(), stored.extra.salt.as_deref())
            else {
                self.left_out.unknown_salt += count;
                return None;
            };
            let chain = self.hashers.hasher(hasher).start();
            let (before, parent, parent_slot) = (None, None, Slot::NONE);
            return Some(Place { hasher, chain, before, filled: 0, parent, parent_slot });
        };
        let place = self.known.find(parent).and_then(|slot| self.behind(slot));
        self.left_out.orphans += if place.is_none() { count } else { 0 };
        place
    }

    /// Where the block behind a known one begins.
    fn behind(&self, slot: Slot) -> Option<Place> {
        let alias = self.known.get(slot)?;
        let (before, filled) = match &alias.ours {
            Ours::One(block) => (Some(*block), 0),
            Ours::Several(blocks) => (blocks.last().copied(), 0),
            Ours::Part(part) if usize::from(part.filled) == self.hashers.block_tokens() => {
                // What it made whole may have been forgotten with another part; then nothing says what is before the next.
                (Some(self.wholes.get(*part.of().first()?)?.block), 0)
            }
            Ours::Part(part) => (alias.before(), part.filled.into()),
        };
        let Alias { hasher, chain, name, .. } = *alias;
        Some(Place { hasher, chain, before, filled, parent: Some(name), parent_slot: slot })
    }

    /// A block is stored behind this one, so this one and all before it are there, whatever was heard of them.
    fn prove(&mut self, parent: Option<EngineHash>, changes: &mut Changes) {
        let mut unheard = Vec::new();
        // A name that was forgotten and told again elsewhere is no parent of those before it, and could be one in a circle.
        let (mut at, mut below) = (parent.and_then(|parent| self.known.find(parent)), u64::MAX);
        while let Some((slot, alias)) = at.and_then(|slot| Some((slot, self.known.get(slot)?)))
            && !alias.is_resident
            && alias.nth < below
        {
            unheard.push(slot);
            (at, below) = (self.parent_of(alias), alias.nth);
        }
        for slot in unheard.into_iter().rev() {
            self.set_resident(slot, true, changes);
        }
    }

    fn parent_of(&self, alias: &Alias) -> Option<Slot> {
        self.named(alias.parent?, alias.parent_slot)
    }

    /// Where a block is that was there before. It may have been forgotten and told again since.
    fn named(&self, name: EngineHash, was: Slot) -> Option<Slot> {
        let is_there = self.known.get(was).is_some_and(|alias| alias.name == name);
        if is_there { Some(was) } else { self.known.find(name) }
    }

    /// Blocks with their tokens, one behind the other.
    fn hashed(&mut self, stored: &Stored, tokens: &[u32], mut place: Place, changes: &mut Changes) {
        let (count, theirs) = (stored.hashes.len(), stored.block_tokens as usize);
        let plain = stored.extra.plain_blocks.unwrap_or(count).min(count);
        self.left_out.opaque += (count - plain) as u64;
        let mut tags = std::mem::take(&mut self.scratch.tags);
        let (names, tokens) = (&stored.hashes[..plain], &tokens[..plain * theirs]);
        let mut left = plain;
        for (names, tokens) in names.chunks(TOGETHER).zip(tokens.chunks(TOGETHER * theirs)) {
            self.known.expect(names, &mut tags);
            match self.hashed_together(names, &tags, tokens, place, changes) {
                Ok(next) => place = next,
                Err((at, why)) => {
                    *why(&mut self.left_out) += (left - at) as u64;
                    break;
                }
            }
            left -= names.len();
        }
        self.scratch.tags = tags;
    }

    /// The same of blocks that were looked up together; or how many of them have a place, and why the next has none.
    fn hashed_together(
        &mut self,
        names: &[EngineHash],
        tags: &[Tag],
        tokens: &[u32],
        mut place: Place,
        changes: &mut Changes,
    ) -> Result<Place, (usize, Why)> {
        let theirs = tokens.len() / names.len().max(1);
        let mut at = 0;
        while at < names.len() {
            // Some say again what is there. The same hash is the same tokens behind the same parent.
            if let Some((slot, next)) = self.heard_of(names[at], tags[at]) {
                self.set_resident(slot, true, changes);
                place = next;
                at += 1;
            } else if place.filled == 0 && theirs == self.hashers.block_tokens() {
                let (learned, next) =
                    self.learn_run(&names[at..], &tags[at..], &tokens[at * theirs..], place, changes);
                at += learned;
                place = next.map_err(|why| (at, why))?;
            } else {
                let tokens = &tokens[at * theirs..][..theirs];
                place = self.learn((names[at], tags[at]), tokens, place, changes).map_err(|why| (at, why))?;
                at += 1;
            }
        }
        Ok(place)
    }

    /// Where a known block is, and where the next one behind it begins. A last part whose block of ours went with an earlier part is not
    /// known any more: with its tokens it is made again.
    #[inline]
    fn heard_of(&mut self, name: EngineHash, tag: Tag) -> Option<(Slot, Place)> {
        let slot = self.known.find_tagged(name, tag)?;
        let alias = self.known.get(slot)?;
        let is_last = |part: &Part| usize::from(part.filled) == self.hashers.block_tokens();
        if alias.part().is_some_and(|part| is_last(part) && part.of().is_empty()) {
            self.ours -= alias.weight();
            self.resident -= usize::from(alias.is_resident);
            self.known.remove(slot);
            return None;
        }
        Some((slot, self.behind(slot)?))
    }

    /// Learns of blocks that are as ours, from one that was not heard of up to the next that was, and answers of how many, and where the one
    /// behind them begins; or why it has no place.
    fn learn_run(
        &mut self,
        names: &[EngineHash],
        tags: &[Tag],
        tokens: &[u32],
        mut place: Place,
        changes: &mut Changes,
    ) -> (usize, Result<Place, Why>) {
        let all = names.iter().zip(tags);
        // One that is named twice is known when its turn comes again.
        let is_new = |(before, (name, tag)): &(usize, (&EngineHash, &Tag))| {
            !tags[..=*before].contains(tag) && self.known.find_tagged(**name, **tag).is_none()
        };
        let run = 1 + all.clone().skip(1).enumerate().take_while(is_new).count();
        let mut blocks = std::mem::take(&mut self.scratch.blocks);
        let mut chains = std::mem::take(&mut self.scratch.chains);
        blocks.clear();
        chains.clear();
        let tokens = &tokens[..run * self.hashers.block_tokens()];
        self.hashers.hasher(place.hasher).extend_each(place.chain, tokens, &mut blocks, &mut chains);
        let (before, mut learned, mut why) = (place.before, 0, None);
        for ((name, tag), (block, chain)) in all.zip(blocks.iter().zip(&chains)) {
            if !self.make_room(1) {
                why = Some::<Why>(|left_out| &mut left_out.over_limit);
                break;
            }
            let Some(slot) = self.insert((*name, *tag), place, *chain, Ours::One(*block)) else { break };
            (place.chain, place.before) = (*chain, Some(*block));
            (place.parent, place.parent_slot) = (Some(*name), slot);
            learned += 1;
        }
        changes.push(true, before, &blocks[..learned]);
        (self.scratch.blocks, self.scratch.chains) = (blocks, chains);
        (learned, why.map_or(Ok(place), Err))
    }

    /// Learns of a block that was not heard of, and answers where the next one begins; or why it has no place.
    fn learn(
        &mut self,
        name: (EngineHash, Tag),
        tokens: &[u32],
        place: Place,
        changes: &mut Changes,
    ) -> Result<Place, Why> {
        let ours = self.hashers.block_tokens();
        if !self.make_room((tokens.len() / ours).max(1)) {
            return Err(|left_out| &mut left_out.over_limit);
        }
        if place.filled == 0 && tokens.len().is_multiple_of(ours) {
            Ok(self.learn_several(name, tokens, place, changes))
        } else if place.filled + tokens.len() < ours {
            Ok(self.learn_part(name, tokens, place))
        } else if place.filled + tokens.len() == ours {
            self.learn_last_part(name, tokens, place, changes)
        } else {
            Err(|left_out| &mut left_out.odd_size)
        }
    }

    /// A block of the engine that is several of ours.
    fn learn_several(
        &mut self,
        name: (EngineHash, Tag),
        tokens: &[u32],
        place: Place,
        changes: &mut Changes,
    ) -> Place {
        let mut chain = place.chain;
        let mut blocks = Vec::with_capacity(tokens.len() / self.hashers.block_tokens());
        self.hashers.hasher(place.hasher).extend(&mut chain, tokens, &mut blocks);
        let before = blocks.last().copied();
        share(&mut self.shared, true, (place.before, &blocks), changes);
        let slot = self.insert(name, place, chain, Ours::Several(blocks.into()));
        Place { chain, before, parent: Some(name.0), parent_slot: slot.unwrap_or(Slot::NONE), ..place }
    }

    fn learn_part(&mut self, name: (EngineHash, Tag), tokens: &[u32], place: Place) -> Place {
        let filled = place.filled + tokens.len();
        let slot = self.insert(name, place, place.chain, Ours::Part(Part::early(tokens, filled)));
        Place { filled, parent: Some(name.0), parent_slot: slot.unwrap_or(Slot::NONE), ..place }
    }

    /// The part that makes one of our blocks whole.
    fn learn_last_part(
        &mut self,
        name: (EngineHash, Tag),
        tokens: &[u32],
        place: Place,
        changes: &mut Changes,
    ) -> Result<Place, Why> {
        let ours = self.hashers.block_tokens();
        let mut all = std::mem::take(&mut self.scratch.tokens);
        all.resize(ours, 0);
        all[place.filled..].copy_from_slice(tokens);
        let (mut end, mut missing) = (place.filled, 0);
        let mut earlier = SmallVec::<[Slot; 32]>::new();
        for (slot, alias, part) in self.parts_up_to(self.parent_at(&place), place.filled) {
            let start = end - part.tokens().len();
            all[start..end].copy_from_slice(part.tokens());
            missing += u32::from(!alias.is_resident);
            earlier.push(slot);
            end = start;
        }
        let mut chain = place.chain;
        let mut blocks = std::mem::take(&mut self.scratch.blocks);
        blocks.clear();
        if end == 0 {
            self.hashers.hasher(place.hasher).extend(&mut chain, &all, &mut blocks);
        }
        let made = blocks.first().copied();
        (self.scratch.tokens, self.scratch.blocks) = (all, blocks);
        let Some(block) = made else { return Err(|left_out| &mut left_out.orphans) };
        if missing == 0 {
            changes.push(true, place.before, &[block]);
        }
        let whole = Whole { block, before: place.before, last: Slot::NONE, missing };
        let whole = self.wholes.insert(whole);
        for part in earlier {
            if let Some(part) = self.known.get_mut(part).and_then(Alias::part_mut) {
                part.push(whole);
            }
        }
        let part = Part::last(tokens.len(), ours, whole);
        let slot = self.insert(name, place, chain, Ours::Part(part)).unwrap_or(Slot::NONE);
        if let Some(whole) = self.wholes.get_mut(whole) {
            whole.last = slot;
        }
        Ok(Place { chain, before: made, filled: 0, parent: Some(name.0), parent_slot: slot, ..place })
    }

    fn parent_at(&self, place: &Place) -> Option<Slot> {
        self.named(place.parent?, place.parent_slot)
    }

    /// The parts of one of our blocks, from the one that ends with so many tokens back to the first; fewer where one is forgotten.
    fn parts_up_to(&self, last: Option<Slot>, filled: usize) -> impl Iterator<Item = (Slot, &Alias, &Part)> {
        let (mut at, mut end) = (last, filled);
        std::iter::from_fn(move || {
            let slot = at.filter(|_| end > 0)?;
            let alias = self.known.get(slot)?;
            // One that was forgotten and told again, of another length, is no part of this.
            let part = alias.part().filter(|part| usize::from(part.filled) == end)?;
            let start = end.checked_sub(part.count.into())?;
            (at, end) = (self.parent_of(alias), start);
            Some((slot, alias, part))
        })
    }

    /// Keeps a block that is there from now on, and answers where; not if its name is known.
    #[inline]
    fn insert(
        &mut self,
        (name, tag): (EngineHash, Tag),
        place: Place,
        chain: Chain,
        ours: Ours,
    ) -> Option<Slot> {
        let alias = Alias::new(name, self.next, place, chain, ours);
        let weight = alias.weight();
        let slot = self.known.insert(alias, tag).ok()?;
        self.next += 1;
        self.ours += weight;
        self.resident += 1;
        self.most_resident = self.most_resident.max(self.resident);
        Some(slot)
    }

    /// Notes that a block came or went.
    #[inline]
    fn set_resident(&mut self, slot: Slot, to: bool, changes: &mut Changes) {
        let Some(alias) = self.known.get_mut(slot) else { return };
        if std::mem::replace(&mut alias.is_resident, to) == to {
            return;
        }
        if to {
            self.resident += 1;
            self.most_resident = self.most_resident.max(self.resident);
        } else {
            self.resident -= 1;
            self.departures += 1;
            alias.left = self.departures;
            self.departed.push_back(slot);
        }
        match &alias.ours {
            // Where it was is of no interest when it goes, and in the other half of what is kept.
            Ours::One(block) => changes.push(to, if to { alias.before() } else { None }, &[*block]),
            Ours::Several(blocks) => share(&mut self.shared, to, (alias.before(), blocks), changes),
            Ours::Part(part) => {
                for whole in part.of() {
                    let Some(whole) = self.wholes.get_mut(*whole) else { continue };
                    let was_there = whole.missing == 0;
                    whole.missing = if to { whole.missing.saturating_sub(1) } else { whole.missing + 1 };
                    if was_there != (whole.missing == 0) {
                        changes.push(to, whole.before, &[whole.block]);
                    }
                }
            }
        }
    }

    fn removed(&mut self, removed: &Removed, changes: &mut Changes) {
        // Who does not say which group it is of may mean ours.
        let of_another =
            matches!((self.group, removed.group), (Some(Some(ours)), Some(theirs)) if ours != theirs);
        if removed.medium != Medium::Gpu || of_another {
            return;
        }
        self.came_or_went(&removed.hashes, false, changes);
        self.bound_departed();
    }

    /// Blocks that are known, if they are.
    fn came_or_went(&mut self, names: &[EngineHash], to: bool, changes: &mut Changes) {
        let mut tags = std::mem::take(&mut self.scratch.tags);
        for names in names.chunks(TOGETHER) {
            self.known.expect(names, &mut tags);
            for (name, tag) in names.iter().zip(&tags) {
                match self.known.find_tagged(*name, *tag) {
                    Some(slot) => self.set_resident(slot, to, changes),
                    None => self.left_out.orphans += u64::from(to),
                }
            }
        }
        self.scratch.tags = tags;
    }

    /// Forgets the names of blocks that left longest ago.
    fn bound_departed(&mut self) {
        let most = DEPARTED_MIN.max(self.most_resident);
        while let over @ 1.. = self.departed.len().saturating_sub(most) {
            let over = over.min(TOGETHER);
            self.departed.range(..over).for_each(|slot| self.known.expect_at(*slot));
            self.departed.range(..over).for_each(|slot| self.known.expect_removal(*slot));
            for _ in 0..over {
                self.forget_oldest();
            }
        }
    }

    /// Forgets names of blocks that left, until so many blocks of ours have a place; whether they have.
    #[inline]
    fn make_room(&mut self, wanted: usize) -> bool {
        while self.ours + wanted > KNOWN_MAX {
            if !self.forget_oldest() {
                return false;
            }
        }
        true
    }

    /// Forgets the block that left longest ago, unless it came back; whether there is one.
    fn forget_oldest(&mut self) -> bool {
        // Each departure is one in the list, so the last ones are as many as are in it.
        let left = self.departures + 1 - self.departed.len() as u64;
        let Some(slot) = self.departed.pop_front() else { return false };
        // One that came back has left again since, or not; and where it was another one may be.
        if let Some(alias) = self.known.get(slot)
            && !alias.is_resident
            && alias.left == left
        {
            self.ours -= alias.weight();
            // They are not whole, and without this part will not be.
            let of: SmallVec<[WholeId; 4]> = alias.part().map_or(&[][..], Part::of).into();
            // The last one first: each is then the last that this part has.
            of.into_iter().rev().for_each(|whole| self.forget_whole(whole));
            self.known.remove(slot);
        }
        true
    }

    /// Forgets that parts make one of our blocks.
    fn forget_whole(&mut self, id: WholeId) {
        let Some(whole) = self.wholes.remove(id) else { return };
        let parts = self.parts_up_to(Some(whole.last), self.hashers.block_tokens());
        let parts: SmallVec<[Slot; 32]> = parts.map(|(slot, ..)| slot).collect();
        for part in parts {
            if let Some(part) = self.known.get_mut(part).and_then(Alias::part_mut) {
                part.forget(id);
            }
        }
    }
}

/// Counts blocks that another block of the engine may have too, and appends what that changes.
fn share(
    shared: &mut HashMap<BlockHash, u32, Spread>,
    is_stored: bool,
    (mut before, blocks): (Option<BlockHash>, &[BlockHash]),
    changes: &mut Changes,
) {
    for block in blocks {
        let holders = shared.entry(*block).or_default();
        let was_there = *holders > 0;
        *holders = if is_stored { *holders + 1 } else { holders.saturating_sub(1) };
        let is_there = *holders > 0;
        if !is_there {
            shared.remove(block);
        }
        if was_there != is_there {
            changes.push(is_stored, before, &[*block]);
        }
        before = Some(*block);
    }
}

/// Where something left out is counted.
type Why = fn(&mut LeftOut) -> &mut u64;

#[cfg(test)]
mod tests;
