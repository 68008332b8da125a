//! One block as the book sees it, and the slab that gives blocks dense numbers.
//!
//! Not here: any decision about a block.

use std::hash::{BuildHasher, Hasher};

use hashbrown::HashMap;

use super::Charge;
use super::moves::Line;
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, Generation, LeaseId, TenantId, Tier, Timestamp};
use crate::index::command::PinKind;

/// What a block is, apart from where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The block.
    pub hash: BlockHash,
    /// Hash before it; `None` at the start of a prefix.
    pub parent: Option<BlockHash>,
    /// Who saved it.
    pub tenant: TenantId,
    /// What the policy knows.
    pub traits: BlockTraits,
    /// What it costs.
    pub charge: Charge,
}

/// Which tiers hold a copy of the bytes right now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Copies {
    pub(super) dram: bool,
    pub(super) ssd: bool,
    pub(super) gpu: bool,
}

impl Copies {
    pub(super) fn any(self) -> bool {
        self.dram || self.ssd || self.gpu
    }

    /// Where bytes that are not in DRAM are read from.
    pub(super) fn fastest(self) -> Tier {
        if self.gpu { Tier::Gpu } else { Tier::Ssd }
    }

    pub(super) fn has(self, tier: Tier) -> bool {
        match tier {
            Tier::Dram => self.dram,
            Tier::Ssd => self.ssd,
            Tier::Gpu => self.gpu,
        }
    }

    pub(super) fn set(&mut self, tier: Tier, present: bool) {
        match tier {
            Tier::Dram => self.dram = present,
            Tier::Ssd => self.ssd = present,
            Tier::Gpu => self.gpu = present,
        }
    }
}

/// One block.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) meta: Meta,
    /// Distinguishes two blocks that had the same key one after the other.
    pub(super) serial: u64,
    /// The weights it was computed with.
    pub(super) generation: Generation,
    /// Where it should be and is charged; `None` once it is on its way out.
    pub(super) place: Option<Tier>,
    /// Where its bytes are.
    pub(super) copies: Copies,
    /// Target of the one move in flight.
    pub(super) moving: Option<Tier>,
    /// The tier the index was told, if it was told.
    pub(super) announced: Option<Tier>,
    /// Bytes are still on their way in.
    pub(super) writing: bool,
    /// The lease whose save brings them; it alone holds the block meanwhile.
    pub(super) writer: Option<LeaseId>,
    /// Order of last uses in the book; larger is later.
    pub(super) stamp: u64,
    /// When the last request that used it ended; nothing before the first end.
    pub(super) last_use: Option<Timestamp>,
    /// The policy of its place knows it.
    pub(super) ranked: bool,
    /// Leases that hold it.
    pub(super) leases: u32,
    /// How firmly pins keep it; the firmest of several.
    pub(super) pin: Option<PinKind>,
    /// A reader waits for its bytes in DRAM.
    pub(super) awaited: bool,
    /// The line of moves to be started in which it stands. A key found in another one is left from before.
    pub(super) queued: Option<Line>,
    /// Who is charged for its place: its tenant, or the row of many.
    pub(super) share: TenantId,
    /// Its place among the blocks that waiting requests need, the next one's first.
    pub(super) near: Option<u32>,
    /// It is on its way to DRAM because a waiting request needs it, and nobody asked for it yet.
    pub(super) prefetch: bool,
}

impl Entry {
    /// Time since its last use, in microseconds; nothing has passed before the first.
    pub(super) fn age_us(&self, now: Timestamp) -> u64 {
        self.last_use.map_or(0, |last_use| now.0.saturating_sub(last_use.0))
    }

    pub(super) fn held(&self) -> bool {
        self.leases > 0 || self.pin == Some(PinKind::Hard) || self.writing
    }

    /// Whether it stands outside its policy's order.
    pub(super) fn parked(&self) -> bool {
        self.held() || self.order() != Order::Policy
    }

    /// What orders it while nothing holds it. A request that waits comes before a pin.
    pub(super) fn order(&self) -> Order {
        match (self.near, self.pin) {
            (Some(near), _) => Order::Window(near),
            (None, Some(PinKind::Soft)) => Order::Pinned(self.stamp),
            (None, Some(PinKind::Hard) | None) => Order::Policy,
        }
    }

    /// A request waits for it, and a pin alone keeps it where it is: it may come up, and not leave.
    pub(super) fn is_wanted(&self) -> bool {
        self.near.is_some() && self.pin == Some(PinKind::Hard) && self.leases == 0 && !self.writing
    }
}

/// The order in which a block may leave, the first to go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// That of its tier's policy.
    Policy,
    /// Pinned softly: by the stamp of its last use.
    Pinned(u64),
    /// Needed by a waiting request: by its place, the furthest first.
    Window(u32),
}

/// Blocks that can be found and are pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnedBlocks {
    /// Kept whatever comes.
    pub hard: u64,
    /// Kept until everything else is gone.
    pub soft: u64,
}

impl PinnedBlocks {
    fn of(&mut self, pin: Option<PinKind>) -> Option<&mut u64> {
        Some(match pin? {
            PinKind::Hard => &mut self.hard,
            PinKind::Soft => &mut self.soft,
        })
    }
}

/// Memory that a book takes for one block at most, in bytes, its two policies and what they remember of departed blocks
/// included. Rows and the table grow by doubling, so each may be half empty; where memory is copied as it grows, the old
/// half counts too.
pub const BLOCK_BYTES_MAX: u64 = {
    let rows = size_of::<Option<Entry>>() + size_of::<BlockKey>();
    let by_hash = (size_of::<(BlockHash, BlockKey)>() + 1) * 8 / 7;
    // `cargo xtask bench evict` holds every policy to 64 bytes a block, half empty rows included.
    (3 * (rows + by_hash) + 2 * 64) as u64
};

/// Entries by dense key, and keys by hash.
#[derive(Debug)]
pub(super) struct Slab {
    entries: Vec<Option<Entry>>,
    free: Vec<BlockKey>,
    by_hash: HashMap<BlockHash, BlockKey, Fold>,
    serial: u64,
    /// That of entries which are added.
    generation: Generation,
    /// Entries with no higher serial number are of earlier weights.
    void_until: u64,
    pinned: PinnedBlocks,
}

impl Slab {
    pub(super) fn new(seed: u64) -> Slab {
        let by_hash = HashMap::with_hasher(Fold { seed });
        let (entries, free, serial, generation, void_until, pinned) = Default::default();
        Slab { entries, free, by_hash, serial, generation, void_until, pinned }
    }

    /// The block of this hash, under the weights of now.
    pub(super) fn find(&self, hash: &BlockHash) -> Option<BlockKey> {
        self.by_hash.get(hash).copied().filter(|key| !self.is_void(*key))
    }

    /// That of entries which are added.
    pub(super) fn generation(&self) -> Generation {
        self.generation
    }

    /// Entries that are added from now on are of this generation.
    pub(super) fn set_generation(&mut self, generation: Generation) {
        self.generation = generation;
    }

    /// Every entry that is there is of earlier weights from now on, and found no more.
    pub(super) fn void_all(&mut self) {
        self.void_until = self.serial;
        self.pinned = PinnedBlocks::default();
    }

    /// Whether nothing was added since everything became void.
    pub(super) fn is_all_void(&self) -> bool {
        self.serial == self.void_until
    }

    /// Whether an entry is of earlier weights.
    pub(super) fn is_void(&self, key: BlockKey) -> bool {
        self.void_until > 0 && self.get(key).is_some_and(|entry| entry.serial <= self.void_until)
    }

    pub(super) fn get(&self, key: BlockKey) -> Option<&Entry> {
        self.entries.get(key.0 as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, key: BlockKey) -> Option<&mut Entry> {
        self.entries.get_mut(key.0 as usize)?.as_mut()
    }

    /// Adds a block that is not in the map yet.
    pub(super) fn add(&mut self, meta: Meta, place: Tier, pin: Option<PinKind>) -> BlockKey {
        self.serial += 1;
        let entry = Entry {
            meta,
            serial: self.serial,
            generation: self.generation,
            place: Some(place),
            copies: Copies::default(),
            moving: None,
            announced: None,
            writing: false,
            writer: None,
            stamp: 0,
            last_use: None,
            ranked: false,
            leases: 0,
            pin,
            awaited: false,
            queued: None,
            share: meta.tenant,
            near: None,
            prefetch: false,
        };
        let key = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            BlockKey(u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX))
        });
        self.entries[key.0 as usize] = Some(entry);
        self.by_hash.insert(meta.hash, key);
        self.count_pinned(pin, 1);
        key
    }

    /// Blocks that can be found and are pinned.
    pub(super) fn pinned(&self) -> PinnedBlocks {
        self.pinned
    }

    /// Changes how firmly a block that can be found is kept.
    pub(super) fn set_pin(&mut self, key: BlockKey, pin: Option<PinKind>) {
        let Some(entry) = self.get_mut(key) else { return };
        let before = std::mem::replace(&mut entry.pin, pin);
        self.count_pinned(before, -1);
        self.count_pinned(pin, 1);
    }

    fn count_pinned(&mut self, pin: Option<PinKind>, more: i64) {
        if let Some(count) = self.pinned.of(pin) {
            *count = count.saturating_add_signed(more);
        }
    }

    /// Blocks that can be found.
    #[cfg(test)]
    pub(super) fn found_len(&self) -> usize {
        self.by_hash.values().filter(|key| !self.is_void(**key)).count()
    }

    /// Makes the hash unknown; the entry stays until its bytes are gone.
    pub(super) fn forget_hash(&mut self, key: BlockKey) {
        let Some((hash, pin)) = self.get(key).map(|entry| (entry.meta.hash, entry.pin)) else { return };
        if self.by_hash.get(&hash) == Some(&key) {
            let is_counted = !self.is_void(key);
            self.by_hash.remove(&hash);
            self.count_pinned(pin, if is_counted { -1 } else { 0 });
        }
    }

    pub(super) fn remove(&mut self, key: BlockKey) {
        self.forget_hash(key);
        if let Some(entry) = self.entries.get_mut(key.0 as usize)
            && entry.take().is_some()
        {
            self.free.push(key);
        }
    }

    /// Places of entries, used or not.
    pub(super) fn places(&self) -> usize {
        self.entries.len()
    }

    /// Every entry once, from a place that `seed` chooses.
    pub(super) fn from(&self, seed: u64) -> impl Iterator<Item = &Entry> {
        let start = seed.checked_rem(self.entries.len() as u64).unwrap_or(0) as usize;
        let (before, after) = self.entries.split_at(start);
        after.iter().chain(before).flatten()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockKey, &Entry)> {
        (0u32..).zip(&self.entries).filter_map(|(number, entry)| Some((BlockKey(number), entry.as_ref()?)))
    }
}

/// Hashes block hashes, which are uniform already; the seed keeps a caller from aiming at one bucket.
#[derive(Clone, Debug)]
pub(super) struct Fold {
    pub(super) seed: u64,
}

pub(super) struct FoldState(u64);

impl BuildHasher for Fold {
    type Hasher = FoldState;

    fn build_hasher(&self) -> FoldState {
        FoldState(self.seed | 1)
    }
}

impl Hasher for FoldState {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..part.len()].copy_from_slice(part);
            let product = u128::from(self.0 ^ u64::from_le_bytes(word)) * 0x9E37_79B9_7F4A_7C15_u128;
            self.0 = (product as u64) ^ ((product >> 64) as u64);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn meta(number: u8) -> Meta {
        Meta {
            hash: BlockHash([number; 16]),
            parent: None,
            tenant: TenantId(0),
            traits: BlockTraits::default(),
            charge: Charge::default(),
        }
    }

    #[test]
    fn keys_are_dense_and_reused_with_another_serial() {
        let mut slab = Slab::new(7);
        let first = slab.add(meta(1), Tier::Dram, None);
        let second = slab.add(meta(2), Tier::Dram, None);
        assert_eq!((first, second), (BlockKey(0), BlockKey(1)));
        let serial = slab.get(first).unwrap().serial;
        slab.remove(first);
        assert_eq!(slab.find(&BlockHash([1; 16])), None);
        assert_eq!(slab.add(meta(3), Tier::Ssd, None), first);
        assert_ne!(slab.get(first).unwrap().serial, serial);
    }

    #[test]
    fn forgetting_a_hash_leaves_a_newer_block_of_that_hash_alone() {
        let mut slab = Slab::new(7);
        let old = slab.add(meta(1), Tier::Dram, None);
        slab.forget_hash(old);
        let new = slab.add(meta(1), Tier::Dram, None);
        slab.remove(old);
        assert_eq!(slab.find(&BlockHash([1; 16])), Some(new));
    }

    #[test]
    fn the_hash_spreads_over_low_bits() {
        let fold = Fold { seed: 99 };
        let low: std::collections::BTreeSet<u64> =
            (0..=255u8).map(|n| fold.hash_one(BlockHash([n; 16])) & 0xff).collect();
        assert!(low.len() > 120, "only {} of 256 buckets used", low.len());
    }
}
