//! Maps the block hashes of an engine to ours.
//!
//! Engines chain hashes of their own, which are meaningless elsewhere. Their events carry tokens,
//! so our hash is recomputed from them on the parent's chain. The engine's hash stays as an alias,
//! because removals name only that. An engine block may hold several of ours, or be a part of one
//! of ours, which is resident while all its parts are. A block that cannot be hashed as a request
//! would be is left out and counted: images in the prompt, unknown parents, blocks that end between
//! ours. An unlisted block is recomputed, while a wrongly listed one attracts requests in vain.
//!
//! An alias stays valid while the process lives, even when residency is unknown. An engine does not
//! repeat blocks that a request found. But it stores a block only after blocks that the request
//! holds, so all blocks before it are resident.
//!
//! Pure. Not here: message numbers and gaps (`rank.rs`), payloads (`kvfleet_proto::engine_events`),
//! and the alias table (`aliases/names.rs`).

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use kv_core::id::BlockHash;
use kv_core::index::command::Change;
use kv_core::prefix::Chain;
use kvfleet_engine_events::events::{EngineEvent, EngineHash, Medium, RemovedBlocks, StoredBlocks, Tokens};
use smallvec::SmallVec;

use block::{Alias, ChainPosition, EventNumber, OurBlocks, Part, SplitBlock, SplitBlockId, SplitBlocks};
pub(super) use changes::Changes;
use names::{KeyedBuildHasher, LOOKUP_BATCH, NameTable, Slot, Tag};

use super::tenants::{Hashers, Tenants};

mod block;
mod changes;
mod names;

/// Minimum number of departed blocks with a kept alias. A block that returns from host memory has
/// no tokens, and one that never left is proved by its children. If more blocks were ever resident,
/// as many are kept.
const KEPT_DEPARTED_MIN: usize = if cfg!(test) { 8 } else { 16_384 };

/// Limit on known blocks of one rank, and on our blocks in them: thirty million tokens in blocks of
/// sixteen.
const KNOWN_MAX: usize = if cfg!(test) { 512 } else { 2_097_152 };

/// Limit on tokens of an engine block, far above any real one. It bounds the effect of a two-byte
/// number on residency.
const ENGINE_BLOCK_TOKENS_MAX: usize = 8_192;

/// Blocks of events that are not indexed, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnmappedBlocks {
    /// Their parent is unknown, or they have no tokens and are unknown themselves.
    pub(crate) orphans: u64,
    /// Their hash covers data that is not in the event or that no request can name.
    pub(crate) opaque: u64,
    /// Their ends never align with the ends of our blocks.
    pub(crate) odd_size: u64,
    /// They belong to layers that do not need the whole prefix.
    pub(crate) other_group: u64,
    /// Their salt has no tenant, their adapter's name is too long, or there are too many of both.
    pub(crate) unknown_salt: u64,
    /// The limit on known blocks is reached.
    pub(crate) over_limit: u64,
}

/// Blocks of one rank, under both hashes.
#[derive(Debug)]
pub(super) struct Aliases {
    hashers: Hashers,
    known: NameTable<Alias>,
    split_blocks: SplitBlocks,
    /// Number of resident engine blocks that contain each of our blocks, for engine blocks with
    /// several of ours.
    shared: HashMap<BlockHash, u32, KeyedBuildHasher>,
    /// One entry per departure, in order; blocks that returned are still in it.
    departed: VecDeque<Slot>,
    /// Departures so far: the number of the last list entry.
    departures: u64,
    /// Resident blocks, and their maximum so far.
    resident: usize,
    most_resident: usize,
    /// Our blocks in all known engine blocks, parts included.
    our_blocks: usize,
    /// The layer group that counts: the first that needs the whole prefix and stored a block in GPU
    /// memory.
    group: Option<Option<u32>>,
    /// Order number of the next alias.
    next_order: u64,
    unmapped: UnmappedBlocks,
    /// Reused buffers.
    scratch: Scratch,
}

/// Temporary buffers of one step.
#[derive(Default)]
struct Scratch {
    tags: Vec<Tag>,
    tokens: Vec<u32>,
    blocks: Vec<BlockHash>,
    chains: Vec<Chain>,
}

impl fmt::Debug for Scratch {
    /// Omits prompt contents.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}

impl Aliases {
    pub(super) fn new(tenants: Arc<Tenants>) -> Aliases {
        Aliases {
            hashers: Hashers::new(tenants),
            known: NameTable::default(),
            split_blocks: SplitBlocks::default(),
            shared: HashMap::default(),
            departed: VecDeque::new(),
            departures: 0,
            resident: 0,
            most_resident: 0,
            our_blocks: 0,
            group: None,
            next_order: 0,
            unmapped: UnmappedBlocks::default(),
            scratch: Scratch::default(),
        }
    }

    /// Takes the counts of unmapped blocks since the last call.
    pub(super) fn take_unmapped(&mut self) -> UnmappedBlocks {
        std::mem::take(&mut self.unmapped)
    }

    /// Appends the changes of an event.
    pub(super) fn apply_event(&mut self, event: &EngineEvent, changes: &mut Changes) {
        match event {
            EngineEvent::Stored(stored) => self.apply_stored(stored, changes),
            EngineEvent::Removed(removed) => self.apply_removed(removed, changes),
            EngineEvent::Cleared => {
                self.forget_resident();
                changes.clear();
            }
        }
    }

    /// Forgets everything, aliases included, since the engine is another process.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.split_blocks.clear();
        self.shared.clear();
        self.departed.clear();
        self.hashers.forget();
        (self.resident, self.most_resident, self.our_blocks) = (0, 0, 0);
        self.group = None;
    }

    /// Forgets residency and keeps aliases.
    pub(super) fn forget_resident(&mut self) {
        // A repeated call does not walk all aliases.
        if self.resident == 0 {
            return self.bound_departed();
        }
        let resident = self.known.iter().filter(|(_, alias)| alias.is_resident);
        let mut left: Vec<_> = resident.map(|(slot, alias)| (alias.order, slot)).collect();
        // Children are forgotten before their parents.
        left.sort_unstable_by_key(|(nth, _)| std::cmp::Reverse(*nth));
        let mut unsaid = Changes::default();
        for (_, slot) in left {
            self.set_resident(slot, false, &mut unsaid);
            unsaid.take();
        }
        self.bound_departed();
    }

    /// All resident blocks, parents first, as changes from an empty state.
    pub(super) fn all(&self) -> Vec<Change> {
        let all = self.known.iter().map(|(_, alias)| alias);
        let mut resident: Vec<&Alias> = all.filter(|alias| alias.is_resident).collect();
        resident.sort_unstable_by_key(|alias| alias.order);
        let mut changes = Changes::default();
        changes.clear();
        for alias in resident {
            match &alias.our_blocks {
                OurBlocks::One(block) => changes.push(true, alias.before(), &[*block]),
                OurBlocks::Several(blocks) => changes.push(true, alias.before(), blocks),
                // The last part stands for all of them.
                OurBlocks::Part(part) if usize::from(part.filled) == self.hashers.block_tokens() => {
                    let wholes = part.split_blocks().iter().filter_map(|whole| self.split_blocks.get(*whole));
                    wholes
                        .filter(|whole| whole.missing == 0)
                        .for_each(|whole| changes.push(true, whole.before, &[whole.block]));
                }
                OurBlocks::Part(_) => {}
            }
        }
        changes.take()
    }

    fn apply_stored(&mut self, stored: &StoredBlocks, changes: &mut Changes) {
        let count = stored.hashes.len() as u64;
        // Other media publish events too, without groups.
        if stored.medium != Medium::Gpu {
            return;
        }
        if !stored.is_full_attention || self.group.is_some_and(|group| group != stored.group) {
            self.unmapped.other_group += count;
            return;
        }
        let Tokens::Ids(tokens) = &stored.tokens else {
            self.unmapped.opaque += count;
            return;
        };
        let theirs = stored.block_tokens as usize;
        if tokens.is_empty() {
            self.set_known_resident(&stored.hashes, true, changes);
        } else if theirs == 0 || tokens.len() != theirs * stored.hashes.len() {
            // With some blocks of the range left out, their tokens cannot be assigned.
            self.unmapped.opaque += count;
        } else if theirs > ENGINE_BLOCK_TOKENS_MAX {
            self.unmapped.odd_size += count;
        } else if let Some(place) = self.start_position(stored) {
            self.group.get_or_insert(stored.group);
            self.mark_ancestors_resident(stored.parent, changes);
            self.store_hashed(stored, tokens, place, changes);
        }
    }

    /// Position of the first block of an event.
    fn start_position(&mut self, stored: &StoredBlocks) -> Option<ChainPosition> {
        let count = stored.hashes.len() as u64;
        let Some(parent) = stored.parent else {
            let Some(hasher) =
                self.hashers.get_or_create(stored.adapter.as_deref(), stored.extra.salt.as_deref())
            else {
                self.unmapped.unknown_salt += count;
                return None;
            };
            let chain = self.hashers.hasher(hasher).start();
            let (before, parent, parent_slot) = (None, None, Slot::NONE);
            return Some(ChainPosition { hasher, chain, before, filled: 0, parent, parent_slot });
        };
        let place = self.known.find(parent).and_then(|slot| self.position_after(slot));
        self.unmapped.orphans += if place.is_none() { count } else { 0 };
        place
    }

    /// Position of the block after a known one.
    fn position_after(&self, slot: Slot) -> Option<ChainPosition> {
        let alias = self.known.get(slot)?;
        let (before, filled) = match &alias.our_blocks {
            OurBlocks::One(block) => (Some(*block), 0),
            OurBlocks::Several(blocks) => (blocks.last().copied(), 0),
            OurBlocks::Part(part) if usize::from(part.filled) == self.hashers.block_tokens() => {
                // The complete block may be gone with another part; then the position of the next
                // block is unknown.
                (Some(self.split_blocks.get(*part.split_blocks().first()?)?.block), 0)
            }
            OurBlocks::Part(part) => (alias.before(), part.filled.into()),
        };
        let Alias { hasher, name, .. } = *alias;
        let chain = Chain::resume(alias.chain, before);
        Some(ChainPosition { hasher, chain, before, filled, parent: Some(name), parent_slot: slot })
    }

    /// Marks a block and its ancestors as resident, since a block was stored after it.
    fn mark_ancestors_resident(&mut self, parent: Option<EngineHash>, changes: &mut Changes) {
        let mut unheard = Vec::new();
        // A forgotten alias that was learned again elsewhere is no ancestor of those before it, and
        // could form a cycle.
        let (mut at, mut below) = (parent.and_then(|parent| self.known.find(parent)), EventNumber::MAX);
        while let Some((slot, alias)) = at.and_then(|slot| Some((slot, self.known.get(slot)?)))
            && !alias.is_resident
            && alias.order < below
        {
            unheard.push(slot);
            (at, below) = (self.parent_of(alias), alias.order);
        }
        for slot in unheard.into_iter().rev() {
            self.set_resident(slot, true, changes);
        }
    }

    fn parent_of(&self, alias: &Alias) -> Option<Slot> {
        self.resolve(alias.parent?, alias.parent_slot)
    }

    /// Current slot of a block that was at `was`; it may have been forgotten and learned again
    /// since.
    fn resolve(&self, name: EngineHash, was: Slot) -> Option<Slot> {
        let is_there = self.known.get(was).is_some_and(|alias| alias.name == name);
        if is_there { Some(was) } else { self.known.find(name) }
    }

    /// Stores consecutive blocks with their tokens.
    fn store_hashed(
        &mut self,
        stored: &StoredBlocks,
        tokens: &[u32],
        mut place: ChainPosition,
        changes: &mut Changes,
    ) {
        let (count, theirs) = (stored.hashes.len(), stored.block_tokens as usize);
        let plain = stored.extra.first_opaque_block.unwrap_or(count).min(count);
        self.unmapped.opaque += (count - plain) as u64;
        let mut tags = std::mem::take(&mut self.scratch.tags);
        let (names, tokens) = (&stored.hashes[..plain], &tokens[..plain * theirs]);
        let mut left = plain;
        for (names, tokens) in names.chunks(LOOKUP_BATCH).zip(tokens.chunks(LOOKUP_BATCH * theirs)) {
            self.known.prefetch_names(names, &mut tags);
            match self.store_chunk(names, &tags, tokens, place, changes) {
                Ok(next) => place = next,
                Err((at, why)) => {
                    *why(&mut self.unmapped) += (left - at) as u64;
                    break;
                }
            }
            left -= names.len();
        }
        self.scratch.tags = tags;
    }

    /// As [`Aliases::store_hashed`], for blocks that are looked up together. The error holds the
    /// number of stored blocks and the counter of the next one's reason.
    fn store_chunk(
        &mut self,
        names: &[EngineHash],
        tags: &[Tag],
        tokens: &[u32],
        mut place: ChainPosition,
        changes: &mut Changes,
    ) -> Result<ChainPosition, (usize, UnmappedCounter)> {
        let theirs = tokens.len() / names.len().max(1);
        let mut at = 0;
        while at < names.len() {
            // Some engines repeat known blocks. The same hash means the same tokens after the same
            // parent.
            if let Some((slot, next)) = self.find_known(names[at], tags[at]) {
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
                place = self.learn(names[at], tags[at], tokens, place, changes).map_err(|why| (at, why))?;
                at += 1;
            }
        }
        Ok(place)
    }

    /// Slot of a known block and the position after it. If the complete block of a last part is
    /// gone with an earlier part, the last part is forgotten too; its tokens rebuild it.
    #[inline]
    fn find_known(&mut self, name: EngineHash, tag: Tag) -> Option<(Slot, ChainPosition)> {
        let slot = self.known.find_tagged(name, tag)?;
        let alias = self.known.get(slot)?;
        let is_last = |part: &Part| usize::from(part.filled) == self.hashers.block_tokens();
        if alias.part().is_some_and(|part| is_last(part) && part.split_blocks().is_empty()) {
            self.our_blocks -= alias.weight();
            self.resident -= usize::from(alias.is_resident);
            self.known.remove(slot);
            return None;
        }
        Some((slot, self.position_after(slot)?))
    }

    /// Learns blocks of our size, from an unknown one up to the next known one. Returns their
    /// number, and the next position or the reason of a failure.
    fn learn_run(
        &mut self,
        names: &[EngineHash],
        tags: &[Tag],
        tokens: &[u32],
        mut place: ChainPosition,
        changes: &mut Changes,
    ) -> (usize, Result<ChainPosition, UnmappedCounter>) {
        let all = names.iter().zip(tags);
        // A name that occurs twice is known at its second occurrence.
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
                why = Some::<UnmappedCounter>(|unmapped| &mut unmapped.over_limit);
                break;
            }
            let Some(slot) = self.insert(*name, *tag, place, *chain, OurBlocks::One(*block)) else { break };
            (place.chain, place.before) = (*chain, Some(*block));
            (place.parent, place.parent_slot) = (Some(*name), slot);
            learned += 1;
        }
        changes.push(true, before, &blocks[..learned]);
        (self.scratch.blocks, self.scratch.chains) = (blocks, chains);
        (learned, why.map_or(Ok(place), Err))
    }

    /// Learns an unknown block. Returns the next position or the reason of a failure.
    fn learn(
        &mut self,
        name: EngineHash,
        tag: Tag,
        tokens: &[u32],
        place: ChainPosition,
        changes: &mut Changes,
    ) -> Result<ChainPosition, UnmappedCounter> {
        let ours = self.hashers.block_tokens();
        if !self.make_room((tokens.len() / ours).max(1)) {
            return Err(|unmapped| &mut unmapped.over_limit);
        }
        if place.filled == 0 && tokens.len().is_multiple_of(ours) {
            Ok(self.learn_several(name, tag, tokens, place, changes))
        } else if place.filled + tokens.len() < ours {
            Ok(self.learn_part(name, tag, tokens, place))
        } else if place.filled + tokens.len() == ours {
            self.learn_last_part(name, tag, tokens, place, changes)
        } else {
            Err(|unmapped| &mut unmapped.odd_size)
        }
    }

    /// Learns an engine block that holds several of ours.
    fn learn_several(
        &mut self,
        name: EngineHash,
        tag: Tag,
        tokens: &[u32],
        place: ChainPosition,
        changes: &mut Changes,
    ) -> ChainPosition {
        let mut chain = place.chain;
        let mut blocks = Vec::with_capacity(tokens.len() / self.hashers.block_tokens());
        self.hashers.hasher(place.hasher).extend(&mut chain, tokens, &mut blocks);
        let before = blocks.last().copied();
        count_shared(&mut self.shared, true, place.before, &blocks, changes);
        let slot = self.insert(name, tag, place, chain, OurBlocks::Several(blocks.into()));
        ChainPosition { chain, before, parent: Some(name), parent_slot: slot.unwrap_or(Slot::NONE), ..place }
    }

    fn learn_part(
        &mut self,
        name: EngineHash,
        tag: Tag,
        tokens: &[u32],
        place: ChainPosition,
    ) -> ChainPosition {
        let filled = place.filled + tokens.len();
        let slot = self.insert(name, tag, place, place.chain, OurBlocks::Part(Part::early(tokens, filled)));
        ChainPosition { filled, parent: Some(name), parent_slot: slot.unwrap_or(Slot::NONE), ..place }
    }

    /// Learns the part that completes one of our blocks.
    fn learn_last_part(
        &mut self,
        name: EngineHash,
        tag: Tag,
        tokens: &[u32],
        place: ChainPosition,
        changes: &mut Changes,
    ) -> Result<ChainPosition, UnmappedCounter> {
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
        let Some(block) = made else { return Err(|unmapped| &mut unmapped.orphans) };
        if missing == 0 {
            changes.push(true, place.before, &[block]);
        }
        let whole = SplitBlock { block, before: place.before, last_part: Slot::NONE, missing };
        let whole = self.split_blocks.insert(whole);
        for part in earlier {
            if let Some(part) = self.known.get_mut(part).and_then(Alias::part_mut) {
                part.push(whole);
            }
        }
        let part = Part::last(tokens.len(), ours, whole);
        let slot = self.insert(name, tag, place, chain, OurBlocks::Part(part)).unwrap_or(Slot::NONE);
        if let Some(whole) = self.split_blocks.get_mut(whole) {
            whole.last_part = slot;
        }
        Ok(ChainPosition { chain, before: made, filled: 0, parent: Some(name), parent_slot: slot, ..place })
    }

    fn parent_at(&self, place: &ChainPosition) -> Option<Slot> {
        self.resolve(place.parent?, place.parent_slot)
    }

    /// The parts of one of our blocks, from the one that ends at `filled` tokens back to the first;
    /// fewer if one is forgotten.
    fn parts_up_to(&self, last: Option<Slot>, filled: usize) -> impl Iterator<Item = (Slot, &Alias, &Part)> {
        let (mut at, mut end) = (last, filled);
        std::iter::from_fn(move || {
            let slot = at.filter(|_| end > 0)?;
            let alias = self.known.get(slot)?;
            // A part that was forgotten and learned again with another length does not belong here.
            let part = alias.part().filter(|part| usize::from(part.filled) == end)?;
            let start = end.checked_sub(part.count.into())?;
            (at, end) = (self.parent_of(alias), start);
            Some((slot, alias, part))
        })
    }

    /// Adds a resident block and returns its slot; `None` if its name is known.
    #[inline]
    fn insert(
        &mut self,
        name: EngineHash,
        tag: Tag,
        place: ChainPosition,
        chain: Chain,
        ours: OurBlocks,
    ) -> Option<Slot> {
        let alias = Alias::new(name, self.next_order, place, chain, ours);
        let weight = alias.weight();
        let slot = self.known.insert(alias, tag).ok()?;
        self.next_order += 1;
        self.our_blocks += weight;
        self.resident += 1;
        self.most_resident = self.most_resident.max(self.resident);
        Some(slot)
    }

    /// Records that a block became resident or left.
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
            alias.departure = EventNumber::new(self.departures);
            self.departed.push_back(slot);
        }
        match &alias.our_blocks {
            // The parent matters only for arrivals, and is on the other cache line.
            OurBlocks::One(block) => changes.push(to, if to { alias.before() } else { None }, &[*block]),
            OurBlocks::Several(blocks) => {
                count_shared(&mut self.shared, to, alias.before(), blocks, changes);
            }
            OurBlocks::Part(part) => {
                for whole in part.split_blocks() {
                    let Some(whole) = self.split_blocks.get_mut(*whole) else { continue };
                    let was_there = whole.missing == 0;
                    whole.missing = if to { whole.missing.saturating_sub(1) } else { whole.missing + 1 };
                    if was_there != (whole.missing == 0) {
                        changes.push(to, whole.before, &[whole.block]);
                    }
                }
            }
        }
    }

    fn apply_removed(&mut self, removed: &RemovedBlocks, changes: &mut Changes) {
        // Without a group, a removal may mean ours.
        let of_another =
            matches!((self.group, removed.group), (Some(Some(ours)), Some(theirs)) if ours != theirs);
        if removed.medium != Medium::Gpu || of_another {
            return;
        }
        self.set_known_resident(&removed.hashes, false, changes);
        self.bound_departed();
    }

    /// Sets residency of the known blocks among these names.
    fn set_known_resident(&mut self, names: &[EngineHash], to: bool, changes: &mut Changes) {
        let mut tags = std::mem::take(&mut self.scratch.tags);
        for names in names.chunks(LOOKUP_BATCH) {
            self.known.prefetch_names(names, &mut tags);
            for (name, tag) in names.iter().zip(&tags) {
                match self.known.find_tagged(*name, *tag) {
                    Some(slot) => self.set_resident(slot, to, changes),
                    None => self.unmapped.orphans += u64::from(to),
                }
            }
        }
        self.scratch.tags = tags;
    }

    /// Forgets the aliases of the blocks that left longest ago.
    fn bound_departed(&mut self) {
        let most = KEPT_DEPARTED_MIN.max(self.most_resident);
        while let over @ 1.. = self.departed.len().saturating_sub(most) {
            let over = over.min(LOOKUP_BATCH);
            self.departed.range(..over).for_each(|slot| self.known.prefetch_entry(*slot));
            self.departed.range(..over).for_each(|slot| self.known.prefetch_removal(*slot));
            for _ in 0..over {
                self.forget_oldest();
            }
        }
    }

    /// Forgets aliases of departed blocks until `wanted` more fit; returns whether they fit.
    #[inline]
    fn make_room(&mut self, wanted: usize) -> bool {
        while self.our_blocks + wanted > KNOWN_MAX {
            if !self.forget_oldest() {
                return false;
            }
        }
        true
    }

    /// Forgets the block that left longest ago, unless it returned; returns whether there was one.
    fn forget_oldest(&mut self) -> bool {
        // Each departure has one entry, so the entries hold the last departure numbers.
        let left = EventNumber::new(self.departures + 1 - self.departed.len() as u64);
        let Some(slot) = self.departed.pop_front() else { return false };
        // Skips a block that returned or lost its slot to another one.
        if let Some(alias) = self.known.get(slot)
            && !alias.is_resident
            && alias.departure == left
        {
            self.our_blocks -= alias.weight();
            // These blocks are incomplete and stay so without this part.
            let of: SmallVec<[SplitBlockId; 4]> = alias.part().map_or(&[][..], Part::split_blocks).into();
            // From the last, so that each is at the end of this part's list.
            of.into_iter().rev().for_each(|whole| self.forget_split_block(whole));
            self.known.remove(slot);
        }
        true
    }

    /// Forgets that parts form one of our blocks.
    fn forget_split_block(&mut self, id: SplitBlockId) {
        let Some(whole) = self.split_blocks.remove(id) else { return };
        let parts = self.parts_up_to(Some(whole.last_part), self.hashers.block_tokens());
        let parts: SmallVec<[Slot; 32]> = parts.map(|(slot, ..)| slot).collect();
        for part in parts {
            if let Some(part) = self.known.get_mut(part).and_then(Alias::part_mut) {
                part.forget(id);
            }
        }
    }
}

/// Counts blocks that several engine blocks may contain, and appends the resulting changes.
fn count_shared(
    shared: &mut HashMap<BlockHash, u32, KeyedBuildHasher>,
    is_stored: bool,
    mut before: Option<BlockHash>,
    blocks: &[BlockHash],
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

/// Selects the counter of a reason.
type UnmappedCounter = fn(&mut UnmappedBlocks) -> &mut u64;

#[cfg(test)]
mod tests;
