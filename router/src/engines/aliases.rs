//! Two names for one block: the hash that its engine gave it, and ours.
//!
//! Engines chain hashes of their own, which mean something to themselves only. Their events carry the tokens, so our hash is made anew
//! from them, behind the chain of the parent; the engine's hash stays as an alias, because removals name nothing else. Blocks of an
//! engine may hold several of ours, or be parts of one of ours, which is there while all of its parts are. What cannot be hashed as a
//! request would be (an image in the prompt, a parent that was never heard of, blocks that end beside ours) is left out and counted: a
//! block that is not listed is computed again, one that is listed wrongly draws requests to where nothing is.
//!
//! Pure. Not here: numbers of messages and gaps (`rank.rs`), payloads (`kvfleet_proto::engine_events`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kv_core::id::{BlockHash, Tier};
use kv_core::index::command::Change;
use kv_core::prefix::Chain;
use kvfleet_proto::engine_events::{EngineEvent, EngineHash, Medium, Removed, Stored, Tokens};

use super::tenants::{Hashers, Tenants};

/// Blocks that left GPU memory whose alias is kept: one that comes back from the host's memory does so without tokens.
const DEPARTED_MAX: usize = 262_144;

/// Blocks of one rank that are known in all: thirty million tokens in blocks of sixteen.
const KNOWN_MAX: usize = 2_097_152;

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
    /// Of a salt that no tenant has, or of too many salts and adapters.
    pub(crate) unknown_salt: u64,
    /// There are as many as are kept.
    pub(crate) over_limit: u64,
}

/// What one rank of one engine has in GPU memory, by both names.
#[derive(Debug)]
pub(super) struct Aliases {
    hashers: Hashers,
    known: HashMap<EngineHash, Alias>,
    /// Blocks of ours that engine blocks are parts of.
    wholes: HashMap<BlockHash, Whole>,
    /// Of blocks of ours that are parts of engine blocks, in how many that are resident: some begin alike.
    shared: HashMap<BlockHash, u32>,
    /// In the order in which they left; those that came back are still in it.
    departed: VecDeque<EngineHash>,
    /// The group of layers that counts: the first one heard of that needs the whole prefix.
    group: Option<Option<u32>>,
    /// Number of the next alias.
    next: u64,
    left_out: LeftOut,
}

/// A block of an engine.
#[derive(Debug)]
struct Alias {
    /// A parent's is below its children's.
    nth: u64,
    hasher: u32,
    is_resident: bool,
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
    /// The part before it; nothing where ours begins.
    earlier: Option<EngineHash>,
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
    /// Tokens between that one's end and here, and the part that they end with.
    filled: usize,
    earlier: Option<EngineHash>,
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
        let earlier = (filled > 0).then_some(hash);
        Place { hasher: self.hasher, chain: self.chain, before, filled, earlier }
    }

    fn part(&self) -> Option<&Part> {
        match &self.ours {
            Ours::Part(part) => Some(part),
            Ours::One(_) | Ours::Several(_) => None,
        }
    }
}

impl Aliases {
    pub(super) fn new(tenants: Arc<Tenants>) -> Aliases {
        Aliases {
            hashers: Hashers::new(tenants),
            known: HashMap::new(),
            wholes: HashMap::new(),
            shared: HashMap::new(),
            departed: VecDeque::new(),
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
    pub(super) fn take(&mut self, event: &EngineEvent, changes: &mut Vec<Change>) {
        match event {
            EngineEvent::Stored(stored) => self.stored(stored, changes),
            EngineEvent::Removed(removed) => self.removed(removed, changes),
            EngineEvent::Cleared => {
                self.forget();
                changes.push(Change::Cleared);
            }
        }
    }

    /// Everything the engine said is void.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.wholes.clear();
        self.shared.clear();
        self.departed.clear();
        self.group = None;
    }

    /// All that is resident, parents first, as changes from nothing.
    pub(super) fn all(&self) -> Vec<Change> {
        let mut resident: Vec<&Alias> = self.known.values().filter(|alias| alias.is_resident).collect();
        resident.sort_unstable_by_key(|alias| alias.nth);
        let mut changes = vec![Change::Cleared];
        for alias in resident {
            match &alias.ours {
                Ours::One(block) => push_stored(&mut changes, alias.before, &[*block]),
                Ours::Several(blocks) => push_stored(&mut changes, alias.before, blocks),
                // The last part tells of all of them.
                Ours::Part(part) if part.filled == self.hashers.block_tokens() => {
                    let is_there =
                        |block: &&BlockHash| self.wholes.get(*block).is_some_and(|whole| whole.missing == 0);
                    part.of
                        .iter()
                        .filter(is_there)
                        .for_each(|block| push_stored(&mut changes, alias.before, &[*block]));
                }
                Ours::Part(_) => {}
            }
        }
        changes
    }

    fn stored(&mut self, stored: &Stored, changes: &mut Vec<Change>) {
        let count = stored.hashes.len() as u64;
        if !stored.is_full_attention || *self.group.get_or_insert(stored.group) != stored.group {
            self.left_out.other_group += count;
            return;
        }
        if stored.medium != Medium::Gpu {
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
        } else if let Some(place) = self.place(stored) {
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
            return Some(Place { hasher, chain, before: None, filled: 0, earlier: None });
        };
        let place = self.behind(parent);
        self.left_out.orphans += if place.is_none() { count } else { 0 };
        place
    }

    fn behind(&self, hash: EngineHash) -> Option<Place> {
        Some(self.known.get(&hash)?.behind(hash, self.hashers.block_tokens()))
    }

    /// Blocks with their tokens, one behind the other.
    fn hashed<'a>(
        &mut self,
        stored: &Stored,
        blocks: impl Iterator<Item = &'a [u32]>,
        mut place: Place,
        changes: &mut Vec<Change>,
    ) {
        let count = stored.hashes.len();
        let plain = stored.extra.plain_blocks.unwrap_or(count).min(count);
        self.left_out.opaque += (count - plain) as u64;
        for (at, (hash, tokens)) in stored.hashes.iter().zip(blocks).take(plain).enumerate() {
            // A hit says again what is there. The same hash is the same tokens behind the same parent.
            let is_known = self.set_resident(*hash, true, changes);
            let next = match self.behind(*hash) {
                Some(next) if is_known => Ok(next),
                _ => self.learn(*hash, tokens, place, changes),
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

    /// Learns of a block that was not heard of, and answers where the next one begins; or why it has no place.
    fn learn(
        &mut self,
        hash: EngineHash,
        tokens: &[u32],
        place: Place,
        changes: &mut Vec<Change>,
    ) -> Result<Place, Why> {
        let ours = self.hashers.block_tokens();
        if self.known.len() >= KNOWN_MAX {
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
        changes: &mut Vec<Change>,
    ) -> Place {
        let mut chain = place.chain;
        let mut blocks = Vec::with_capacity(tokens.len() / self.hashers.block_tokens());
        self.hashers.hasher(place.hasher).extend(&mut chain, tokens, &mut blocks);
        let before = blocks.last().copied();
        let ours = match blocks[..] {
            [block] => {
                push_stored(changes, place.before, &blocks);
                Ours::One(block)
            }
            _ => {
                share(&mut self.shared, true, (place.before, &blocks), changes);
                Ours::Several(blocks.into())
            }
        };
        self.insert(hash, place, chain, ours);
        Place { chain, before, ..place }
    }

    fn learn_part(&mut self, hash: EngineHash, tokens: &[u32], place: Place) -> Place {
        let filled = place.filled + tokens.len();
        let part = Part { earlier: place.earlier, tokens: tokens.into(), filled, of: Vec::new() };
        self.insert(hash, place, place.chain, Ours::Part(Box::new(part)));
        Place { filled, earlier: Some(hash), ..place }
    }

    /// The part that makes one of our blocks whole.
    fn learn_last_part(
        &mut self,
        hash: EngineHash,
        tokens: &[u32],
        place: Place,
        changes: &mut Vec<Change>,
    ) -> Result<Place, Why> {
        let ours = self.hashers.block_tokens();
        let mut all = vec![0; ours];
        all[place.filled..].copy_from_slice(tokens);
        let mut earlier = Vec::new();
        let (mut at, mut end, mut missing) = (place.earlier, place.filled, 0);
        while end > 0 {
            let part = at.and_then(|at| self.known.get(&at));
            let part = part.and_then(|alias| Some((alias.is_resident, alias.part()?)));
            // One that was forgotten and told again, of another length, is no part of this.
            let part = part.filter(|(_, part)| part.filled == end && part.tokens.len() <= end);
            let Some((is_resident, part)) = part else { return Err(|left_out| &mut left_out.orphans) };
            let start = end - part.tokens.len();
            all[start..end].copy_from_slice(&part.tokens);
            missing += u32::from(!is_resident);
            earlier.extend(at);
            (at, end) = (part.earlier, start);
        }
        let mut chain = place.chain;
        let mut block = Vec::with_capacity(1);
        self.hashers.hasher(place.hasher).extend(&mut chain, &all, &mut block);
        if missing == 0 {
            push_stored(changes, place.before, &block);
        }
        for part in earlier {
            if let Some(Ours::Part(part)) = self.known.get_mut(&part).map(|alias| &mut alias.ours) {
                part.of.extend_from_slice(&block);
            }
        }
        let before = block.first().copied();
        self.wholes.extend(before.map(|block| (block, Whole { before: place.before, missing })));
        let part = Part { earlier: place.earlier, tokens: tokens.into(), filled: ours, of: block };
        self.insert(hash, place, chain, Ours::Part(Box::new(part)));
        Ok(Place { chain, before, filled: 0, earlier: None, ..place })
    }

    fn insert(&mut self, hash: EngineHash, place: Place, chain: Chain, ours: Ours) {
        let Place { hasher, before, .. } = place;
        self.known.insert(hash, Alias { nth: self.next, hasher, is_resident: true, chain, before, ours });
        self.next += 1;
    }

    /// Notes that a block came or went; whether it is known.
    fn set_resident(&mut self, hash: EngineHash, to: bool, changes: &mut Vec<Change>) -> bool {
        let Some(alias) = self.known.get_mut(&hash) else { return false };
        if std::mem::replace(&mut alias.is_resident, to) == to {
            return true;
        }
        if !to {
            self.departed.push_back(hash);
        }
        match &alias.ours {
            Ours::One(block) => push(changes, to, alias.before, &[*block]),
            Ours::Several(blocks) => share(&mut self.shared, to, (alias.before, blocks), changes),
            Ours::Part(part) => {
                for block in &part.of {
                    let Some(whole) = self.wholes.get_mut(block) else { continue };
                    let was_there = whole.missing == 0;
                    whole.missing = if to { whole.missing.saturating_sub(1) } else { whole.missing + 1 };
                    if was_there != (whole.missing == 0) {
                        push(changes, to, whole.before, &[*block]);
                    }
                }
            }
        }
        true
    }

    fn removed(&mut self, removed: &Removed, changes: &mut Vec<Change>) {
        if removed.medium != Medium::Gpu || self.group.is_some_and(|group| group != removed.group) {
            return;
        }
        for hash in &removed.hashes {
            self.set_resident(*hash, false, changes);
        }
        while self.departed.len() > DEPARTED_MAX {
            let Some(oldest) = self.departed.pop_front() else { break };
            if self.known.get(&oldest).is_some_and(|alias| !alias.is_resident) {
                let forgotten = self.known.remove(&oldest);
                // They are not whole, and without this part will not be.
                for block in forgotten.as_ref().and_then(Alias::part).into_iter().flat_map(|part| &part.of) {
                    self.wholes.remove(block);
                }
            }
        }
    }
}

/// Counts blocks that another block of the engine may have too, and appends what that changes.
fn share(
    shared: &mut HashMap<BlockHash, u32>,
    is_stored: bool,
    (mut before, blocks): (Option<BlockHash>, &[BlockHash]),
    changes: &mut Vec<Change>,
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
            push(changes, is_stored, before, &[*block]);
        }
        before = Some(*block);
    }
}

/// Where something left out is counted.
type Why = fn(&mut LeftOut) -> &mut u64;

fn push(changes: &mut Vec<Change>, is_stored: bool, before: Option<BlockHash>, blocks: &[BlockHash]) {
    match changes.last_mut() {
        _ if is_stored => push_stored(changes, before, blocks),
        Some(Change::Dropped { blocks: gone, .. }) => gone.extend_from_slice(blocks),
        _ => changes.push(Change::Dropped { blocks: blocks.into(), tier: Tier::Gpu }),
    }
}

/// Appends blocks that are there, to the change before if they go on where it ends.
fn push_stored(changes: &mut Vec<Change>, before: Option<BlockHash>, new: &[BlockHash]) {
    match changes.last_mut() {
        Some(Change::Stored { blocks, .. }) if before.is_some() && blocks.last().copied() == before => {
            blocks.extend_from_slice(new);
        }
        _ if new.is_empty() => {}
        _ => changes.push(Change::Stored { parent: before, blocks: new.into(), tier: Tier::Gpu }),
    }
}

#[cfg(test)]
mod tests;
