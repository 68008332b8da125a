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
//! Pure. Not here: numbers of messages and gaps (`rank.rs`), payloads (`kvfleet_proto::engine_events`).

use std::collections::hash_map::{Entry, RandomState};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use kv_core::id::{BlockHash, Tier};
use kv_core::index::command::Change;
use kv_core::prefix::Chain;
use kvfleet_proto::engine_events::{EngineEvent, EngineHash, Medium, Removed, Stored, Tokens};

use smallvec::SmallVec;

use super::tenants::{Hashers, Tenants};

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
    known: HashMap<EngineHash, Alias, Spread>,
    /// Blocks of ours that engine blocks are parts of.
    wholes: HashMap<BlockHash, Whole>,
    /// Of blocks of ours that are parts of engine blocks, in how many that are resident: some begin alike.
    shared: HashMap<BlockHash, u32>,
    /// In the order in which they left, with the number of their departure; those that came back are still in it.
    departed: VecDeque<(EngineHash, u64)>,
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
}

/// What changes for the plane.
#[derive(Debug, Default)]
pub(super) struct Changes {
    list: Vec<Change>,
    /// Blocks in it.
    blocks: usize,
}

impl Changes {
    /// Blocks in it.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Hands out what was collected.
    pub(super) fn take(&mut self) -> Vec<Change> {
        self.blocks = 0;
        std::mem::take(&mut self.list)
    }

    fn push(&mut self, is_stored: bool, before: Option<BlockHash>, new: &[BlockHash]) {
        self.blocks += new.len();
        match self.list.last_mut() {
            _ if new.is_empty() => {}
            Some(Change::Stored { blocks, .. })
                if is_stored && before.is_some() && blocks.last().copied() == before =>
            {
                blocks.extend_from_slice(new);
            }
            Some(Change::Dropped { blocks, .. }) if !is_stored => blocks.extend_from_slice(new),
            _ if is_stored => {
                self.list.push(Change::Stored { parent: before, blocks: new.into(), tier: Tier::Gpu });
            }
            _ => self.list.push(Change::Dropped {
                blocks: new.into(),
                tier: Tier::Gpu,
                cause: Default::default(),
            }),
        }
    }

    /// Nothing before it matters.
    fn clear(&mut self) {
        (self.list, self.blocks) = (vec![Change::Cleared], 1);
    }
}

/// Spreads hashes of engines over a table. They are hashes already, but of somebody else's making: a secret of this process is mixed in.
#[derive(Clone, Debug)]
struct Spread {
    secret: [u64; 2],
}

impl Default for Spread {
    fn default() -> Self {
        let drawn = RandomState::new();
        Spread { secret: [drawn.hash_one(0), drawn.hash_one(1)] }
    }
}

impl BuildHasher for Spread {
    type Hasher = Spreader;

    fn build_hasher(&self) -> Spreader {
        Spreader { secret: self.secret, spread: 0 }
    }
}

/// See [`Spread`].
struct Spreader {
    secret: [u64; 2],
    spread: u64,
}

impl Hasher for Spreader {
    fn write(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(16) {
            let mut padded = [0; 16];
            padded[..word.len()].copy_from_slice(word);
            self.write_u128(u128::from_le_bytes(padded));
        }
    }

    fn write_u128(&mut self, number: u128) {
        let [low, high] =
            [number as u64 ^ self.secret[0], (number >> 64) as u64 ^ self.secret[1] ^ self.spread];
        // Twice, for a product alone leaves its low bits to the low bits of the number.
        let product = u128::from(low) * u128::from(high | 1);
        let folded = product as u64 ^ (product >> 64) as u64;
        let product = u128::from(folded ^ self.secret[1]) * u128::from(self.secret[0] | 1);
        self.spread = product as u64 ^ (product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.spread
    }
}

/// A block of an engine.
#[derive(Debug)]
struct Alias {
    /// The block before it.
    parent: Option<EngineHash>,
    /// A parent's is below its children's.
    nth: u64,
    hasher: u32,
    is_resident: bool,
    /// Which departure its last one was.
    left: u64,
    /// Behind the last block of ours that ends in it or before it.
    chain: Chain,
    /// The block of ours before the first that it has a part of.
    before: Option<BlockHash>,
    ours: Ours,
}

/// Which of our blocks an engine's block is.
#[derive(Debug)]
enum Ours {
    One(BlockHash),
    Several(Box<[BlockHash]>),
    Part(Box<Part>),
}

/// A block of an engine that is smaller than ours.
#[derive(Debug)]
struct Part {
    tokens: Box<[u32]>,
    /// Tokens of our block up to the end of this part.
    filled: usize,
    /// Our blocks that it is a part of: one for each way to go on from here to the end of ours, one alone for the last part.
    of: Vec<BlockHash>,
}

/// A block of ours in parts.
#[derive(Debug)]
struct Whole {
    before: Option<BlockHash>,
    /// The part that made it whole.
    last: EngineHash,
    /// Parts that are not resident.
    missing: u32,
}

/// Where a block of an engine begins.
#[derive(Clone, Copy)]
struct Place {
    hasher: u32,
    chain: Chain,
    /// The block of ours before it.
    before: Option<BlockHash>,
    /// Tokens between that one's end and here.
    filled: usize,
    /// The engine's block before it.
    parent: Option<EngineHash>,
}

impl Alias {
    /// Where the block behind it begins, in a fleet whose blocks have so many tokens.
    fn behind(&self, hash: EngineHash, block_tokens: usize) -> Place {
        let (before, filled) = match &self.ours {
            Ours::One(block) => (Some(*block), 0),
            Ours::Several(blocks) => (blocks.last().copied(), 0),
            Ours::Part(part) if part.filled == block_tokens => (part.of.first().copied(), 0),
            Ours::Part(part) => (self.before, part.filled),
        };
        Place { hasher: self.hasher, chain: self.chain, before, filled, parent: Some(hash) }
    }

    fn part(&self) -> Option<&Part> {
        match &self.ours {
            Ours::Part(part) => Some(part),
            Ours::One(_) | Ours::Several(_) => None,
        }
    }

    /// Blocks of ours in it, for the limit.
    fn weight(&self) -> usize {
        match &self.ours {
            Ours::Several(blocks) => blocks.len(),
            Ours::One(_) | Ours::Part(_) => 1,
        }
    }
}

impl Aliases {
    pub(super) fn new(tenants: Arc<Tenants>) -> Aliases {
        Aliases {
            hashers: Hashers::new(tenants),
            known: HashMap::default(),
            wholes: HashMap::new(),
            shared: HashMap::new(),
            departed: VecDeque::new(),
            departures: 0,
            resident: 0,
            most_resident: 0,
            ours: 0,
            group: None,
            next: 0,
            left_out: LeftOut::default(),
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
        let mut left: Vec<_> = self.known.iter().filter(|(_, alias)| alias.is_resident).collect();
        // Children are forgotten before their parents.
        left.sort_unstable_by_key(|(_, alias)| std::cmp::Reverse(alias.nth));
        let left: Vec<EngineHash> = left.into_iter().map(|(hash, _)| *hash).collect();
        let mut unsaid = Changes::default();
        for hash in left {
            self.set_resident(hash, false, &mut unsaid);
            unsaid.take();
        }
        self.bound_departed();
    }

    /// All that is resident, parents first, as changes from nothing.
    pub(super) fn all(&self) -> Vec<Change> {
        let mut resident: Vec<&Alias> = self.known.values().filter(|alias| alias.is_resident).collect();
        resident.sort_unstable_by_key(|alias| alias.nth);
        let mut changes = Changes::default();
        changes.clear();
        for alias in resident {
            match &alias.ours {
                Ours::One(block) => changes.push(true, alias.before, &[*block]),
                Ours::Several(blocks) => changes.push(true, alias.before, blocks),
                // The last part tells of all of them.
                Ours::Part(part) if part.filled == self.hashers.block_tokens() => {
                    let is_there =
                        |block: &&BlockHash| self.wholes.get(*block).is_some_and(|whole| whole.missing == 0);
                    part.of
                        .iter()
                        .filter(is_there)
                        .for_each(|block| changes.push(true, alias.before, &[*block]));
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
            for hash in &stored.hashes {
                if !self.set_resident(*hash, true, changes) {
                    self.left_out.orphans += 1;
                }
            }
        } else if theirs == 0 || tokens.len() != theirs * stored.hashes.len() {
            // With blocks of the range left out, nothing says which.
            self.left_out.opaque += count;
        } else if theirs > ENGINE_BLOCK_TOKENS_MAX {
            self.left_out.odd_size += count;
        } else if let Some(place) = self.place(stored) {
            self.group.get_or_insert(stored.group);
            self.prove(stored.parent, changes);
            self.hashed(stored, tokens.chunks_exact(theirs), place, changes);
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
            return Some(Place { hasher, chain, before: None, filled: 0, parent: None });
        };
        let place = self.behind(parent);
        self.left_out.orphans += if place.is_none() { count } else { 0 };
        place
    }

    fn behind(&self, hash: EngineHash) -> Option<Place> {
        Some(self.known.get(&hash)?.behind(hash, self.hashers.block_tokens()))
    }

    /// A block is stored behind this one, so this one and all before it are there, whatever was heard of them.
    fn prove(&mut self, parent: Option<EngineHash>, changes: &mut Changes) {
        let mut unheard = Vec::new();
        // A name that was forgotten and told again elsewhere is no parent of those before it, and could be one in a circle.
        let (mut at, mut below) = (parent, u64::MAX);
        while let Some((hash, alias)) = at.and_then(|hash| Some((hash, self.known.get(&hash)?)))
            && !alias.is_resident
            && alias.nth < below
        {
            unheard.push(hash);
            (at, below) = (alias.parent, alias.nth);
        }
        for hash in unheard.into_iter().rev() {
            self.set_resident(hash, true, changes);
        }
    }

    /// Blocks with their tokens, one behind the other.
    fn hashed<'a>(
        &mut self,
        stored: &Stored,
        blocks: impl Iterator<Item = &'a [u32]>,
        mut place: Place,
        changes: &mut Changes,
    ) {
        let count = stored.hashes.len();
        let plain = stored.extra.plain_blocks.unwrap_or(count).min(count);
        self.left_out.opaque += (count - plain) as u64;
        for (at, (hash, tokens)) in stored.hashes.iter().zip(blocks).take(plain).enumerate() {
            // Some say again what is there. The same hash is the same tokens behind the same parent.
            let next = match self.heard_of(*hash) {
                Some((next, true)) => Ok(next),
                Some((next, false)) => {
                    self.set_resident(*hash, true, changes);
                    Ok(next)
                }
                None => self.learn(*hash, tokens, place, changes),
            };
            match next {
                Ok(next) => place = next,
                Err(why) => {
                    *why(&mut self.left_out) += (plain - at) as u64;
                    return;
                }
            }
        }
    }

    /// Where the next block behind a known one begins, and whether that one is resident. A last part whose block of ours went with an
    /// earlier part is not known any more: with its tokens it is made again.
    fn heard_of(&mut self, hash: EngineHash) -> Option<(Place, bool)> {
        let ours = self.hashers.block_tokens();
        let alias = self.known.get(&hash)?;
        if alias.part().is_some_and(|part| part.filled == ours && part.of.is_empty()) {
            self.ours -= alias.weight();
            self.resident -= usize::from(alias.is_resident);
            self.known.remove(&hash);
            return None;
        }
        Some((alias.behind(hash, ours), alias.is_resident))
    }

    /// Learns of a block that was not heard of, and answers where the next one begins; or why it has no place.
    fn learn(
        &mut self,
        hash: EngineHash,
        tokens: &[u32],
        place: Place,
        changes: &mut Changes,
    ) -> Result<Place, Why> {
        let ours = self.hashers.block_tokens();
        if !self.make_room((tokens.len() / ours).max(1)) {
            return Err(|left_out| &mut left_out.over_limit);
        }
        if place.filled == 0 && tokens.len().is_multiple_of(ours) {
            Ok(self.learn_whole(hash, tokens, place, changes))
        } else if place.filled + tokens.len() < ours {
            Ok(self.learn_part(hash, tokens, place))
        } else if place.filled + tokens.len() == ours {
            self.learn_last_part(hash, tokens, place, changes)
        } else {
            Err(|left_out| &mut left_out.odd_size)
        }
    }

    /// A block of the engine that is one of ours, or several.
    fn learn_whole(
        &mut self,
        hash: EngineHash,
        tokens: &[u32],
        place: Place,
        changes: &mut Changes,
    ) -> Place {
        let mut chain = place.chain;
        let mut blocks = Vec::with_capacity(tokens.len() / self.hashers.block_tokens());
        self.hashers.hasher(place.hasher).extend(&mut chain, tokens, &mut blocks);
        let before = blocks.last().copied();
        let ours = match blocks[..] {
            [block] => {
                changes.push(true, place.before, &blocks);
                Ours::One(block)
            }
            _ => {
                share(&mut self.shared, true, (place.before, &blocks), changes);
                Ours::Several(blocks.into())
            }
        };
        self.insert(hash, place, chain, ours);
        Place { chain, before, parent: Some(hash), ..place }
    }

    fn learn_part(&mut self, hash: EngineHash, tokens: &[u32], place: Place) -> Place {
        let filled = place.filled + tokens.len();
        let part = Part { tokens: tokens.into(), filled, of: Vec::new() };
        self.insert(hash, place, place.chain, Ours::Part(Box::new(part)));
        Place { filled, parent: Some(hash), ..place }
    }

    /// The part that makes one of our blocks whole.
    fn learn_last_part(
        &mut self,
        hash: EngineHash,
        tokens: &[u32],
        place: Place,
        changes: &mut Changes,
    ) -> Result<Place, Why> {
        let ours = self.hashers.block_tokens();
        let mut all = vec![0; ours];
        all[place.filled..].copy_from_slice(tokens);
        let (mut end, mut missing) = (place.filled, 0);
        let mut earlier = SmallVec::<[EngineHash; 32]>::new();
        for (hash, alias, part) in self.parts_up_to(place.parent, place.filled) {
            let start = end - part.tokens.len();
            all[start..end].copy_from_slice(&part.tokens);
            missing += u32::from(!alias.is_resident);
            earlier.push(hash);
            end = start;
        }
        if end > 0 {
            return Err(|left_out| &mut left_out.orphans);
        }
        let mut chain = place.chain;
        let mut block = Vec::with_capacity(1);
        self.hashers.hasher(place.hasher).extend(&mut chain, &all, &mut block);
        if missing == 0 {
            changes.push(true, place.before, &block);
        }
        for part in earlier {
            if let Some(Ours::Part(part)) = self.known.get_mut(&part).map(|alias| &mut alias.ours) {
                part.of.extend_from_slice(&block);
            }
        }
        let before = block.first().copied();
        self.wholes.extend(before.map(|block| (block, Whole { before: place.before, last: hash, missing })));
        let part = Part { tokens: tokens.into(), filled: ours, of: block };
        self.insert(hash, place, chain, Ours::Part(Box::new(part)));
        Ok(Place { chain, before, filled: 0, parent: Some(hash), ..place })
    }

    /// The parts of one of our blocks, from the one that ends with so many tokens back to the first; fewer where one is forgotten.
    fn parts_up_to(
        &self,
        last: Option<EngineHash>,
        filled: usize,
    ) -> impl Iterator<Item = (EngineHash, &Alias, &Part)> {
        let (mut at, mut end) = (last, filled);
        std::iter::from_fn(move || {
            let hash = at.filter(|_| end > 0)?;
            let alias = self.known.get(&hash)?;
            // One that was forgotten and told again, of another length, is no part of this.
            let part = alias.part().filter(|part| part.filled == end && part.tokens.len() <= end)?;
            (at, end) = (alias.parent, end - part.tokens.len());
            Some((hash, alias, part))
        })
    }

    fn insert(&mut self, hash: EngineHash, place: Place, chain: Chain, ours: Ours) {
        let Place { hasher, before, parent, .. } = place;
        let alias = Alias { parent, nth: self.next, hasher, is_resident: true, left: 0, chain, before, ours };
        self.next += 1;
        self.ours += alias.weight();
        self.resident += 1;
        self.most_resident = self.most_resident.max(self.resident);
        self.known.insert(hash, alias);
    }

    /// Notes that a block came or went; whether it is known.
    fn set_resident(&mut self, hash: EngineHash, to: bool, changes: &mut Changes) -> bool {
        let Some(alias) = self.known.get_mut(&hash) else { return false };
        if std::mem::replace(&mut alias.is_resident, to) == to {
            return true;
        }
        if to {
            self.resident += 1;
            self.most_resident = self.most_resident.max(self.resident);
        } else {
            self.resident -= 1;
            self.departures += 1;
            alias.left = self.departures;
            self.departed.push_back((hash, alias.left));
        }
        match &alias.ours {
            Ours::One(block) => changes.push(to, alias.before, &[*block]),
            Ours::Several(blocks) => share(&mut self.shared, to, (alias.before, blocks), changes),
            Ours::Part(part) => {
                for block in &part.of {
                    let Some(whole) = self.wholes.get_mut(block) else { continue };
                    let was_there = whole.missing == 0;
                    whole.missing = if to { whole.missing.saturating_sub(1) } else { whole.missing + 1 };
                    if was_there != (whole.missing == 0) {
                        changes.push(to, whole.before, &[*block]);
                    }
                }
            }
        }
        true
    }

    fn removed(&mut self, removed: &Removed, changes: &mut Changes) {
        // Who does not say which group it is of may mean ours.
        let of_another =
            matches!((self.group, removed.group), (Some(Some(ours)), Some(theirs)) if ours != theirs);
        if removed.medium != Medium::Gpu || of_another {
            return;
        }
        for hash in &removed.hashes {
            self.set_resident(*hash, false, changes);
        }
        self.bound_departed();
    }

    /// Forgets the names of blocks that left longest ago.
    fn bound_departed(&mut self) {
        while self.departed.len() > DEPARTED_MIN.max(self.most_resident) {
            let Some(oldest) = self.departed.pop_front() else { break };
            self.forget_departed(oldest);
        }
    }

    /// Forgets names of blocks that left, until so many blocks of ours have a place; whether they have.
    fn make_room(&mut self, wanted: usize) -> bool {
        while self.ours + wanted > KNOWN_MAX {
            let Some(oldest) = self.departed.pop_front() else { return false };
            self.forget_departed(oldest);
        }
        true
    }

    fn forget_departed(&mut self, (hash, left): (EngineHash, u64)) {
        // One that came back has left again since, or not.
        let has_left = |alias: &&Alias| !alias.is_resident && alias.left == left;
        let Entry::Occupied(entry) = self.known.entry(hash) else { return };
        if !has_left(&entry.get()) {
            return;
        }
        self.ours -= entry.get().weight();
        let of = match entry.get().part() {
            Some(part) if !part.of.is_empty() => part.of.clone(),
            _ => {
                entry.remove();
                return;
            }
        };
        // They are not whole, and without this part will not be.
        of.into_iter().for_each(|block| self.forget_whole(block));
        self.known.remove(&hash);
    }

    /// Forgets that parts make one of our blocks.
    fn forget_whole(&mut self, block: BlockHash) {
        let Some(whole) = self.wholes.remove(&block) else { return };
        let parts = self.parts_up_to(Some(whole.last), self.hashers.block_tokens());
        let parts: SmallVec<[EngineHash; 32]> = parts.map(|(hash, ..)| hash).collect();
        for hash in parts {
            if let Some(Ours::Part(part)) = self.known.get_mut(&hash).map(|alias| &mut alias.ours)
                && let Some(at) = part.of.iter().position(|of| *of == block)
            {
                part.of.swap_remove(at);
            }
        }
    }
}

/// Counts blocks that another block of the engine may have too, and appends what that changes.
fn share(
    shared: &mut HashMap<BlockHash, u32>,
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
