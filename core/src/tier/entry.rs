//! One block as the book sees it, and the slab that gives blocks dense numbers.
//!
//! Not here: any decision about a block.

use std::hash::{BuildHasher, Hasher};

use hashbrown::HashMap;

use super::Charge;
use super::queues::MoveQueue;
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, Generation, LeaseId, TenantId, Tier, Timestamp};
use crate::index::command::PinKind;

/// Description of a block, without its location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Hash of the block.
    pub hash: BlockHash,
    /// Hash of the preceding block; `None` at the start of a prefix.
    pub parent: Option<BlockHash>,
    /// Tenant that saved it.
    pub tenant: TenantId,
    /// Traits for the eviction policy.
    pub traits: BlockTraits,
    /// Its size in each tier.
    pub charge: Charge,
}

/// Tiers that hold a copy of the bytes now.
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

    /// Tier to read from if the bytes are not in DRAM.
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

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) meta: Meta,
    /// Distinguishes two blocks that had the same key one after the other.
    pub(super) serial: u64,
    /// Weights generation it was computed with.
    pub(super) generation: Generation,
    /// Tier it should be in and is charged to; `None` once it is being removed.
    pub(super) assigned_tier: Option<Tier>,
    /// Tiers that hold its bytes.
    pub(super) copies: Copies,
    /// Target of the one move in flight.
    pub(super) moving: Option<Tier>,
    /// Tier announced to the index, if any.
    pub(super) announced: Option<Tier>,
    /// A save is still writing the bytes.
    pub(super) writing: bool,
    /// Lease of the save in progress; only this lease holds the block meanwhile.
    pub(super) writer: Option<LeaseId>,
    /// Order of last uses in the book; larger is later.
    pub(super) stamp: u64,
    /// End of the last request that used it; `None` before the first end.
    pub(super) last_use: Option<Timestamp>,
    /// Whether the policy of its tier knows it.
    pub(super) in_policy: bool,
    /// Number of leases that hold it.
    pub(super) leases: u32,
    /// Strongest kind of pin on it.
    pub(super) pin: Option<PinKind>,
    /// Whether a reader waits for its bytes in DRAM.
    pub(super) awaited: bool,
    /// Queue of pending moves that it is in. A copy of its key in another queue is stale.
    pub(super) queued: Option<MoveQueue>,
    /// Tenant charged for it in its tier: its own, or the shared overflow tenant.
    pub(super) charged_tenant: TenantId,
    /// Position among the blocks that queued requests need; smaller is sooner.
    pub(super) queue_position: Option<u32>,
    /// It is moving to DRAM for a queued request, and no reader waits for it yet.
    pub(super) prefetch: bool,
}

impl Entry {
    /// Time since its last use, in microseconds; 0 before the first use.
    pub(super) fn age_us(&self, now: Timestamp) -> u64 {
        self.last_use.map_or(0, |last_use| now.0.saturating_sub(last_use.0))
    }

    pub(super) fn held(&self) -> bool {
        self.leases > 0 || self.pin == Some(PinKind::Hard) || self.writing
    }

    /// Whether it is outside its policy's order.
    pub(super) fn parked(&self) -> bool {
        self.held() || self.order() != EvictionOrder::Policy
    }

    /// Its eviction order while unheld. The queue position takes precedence over a soft pin.
    pub(super) fn order(&self) -> EvictionOrder {
        match (self.queue_position, self.pin) {
            (Some(near), _) => EvictionOrder::Window(near),
            (None, Some(PinKind::Soft)) => EvictionOrder::Pinned(self.stamp),
            (None, Some(PinKind::Hard) | None) => EvictionOrder::Policy,
        }
    }

    /// Whether a queued request needs it and only a hard pin holds it: it may be promoted, but not
    /// evicted.
    pub(super) fn is_promote_only(&self) -> bool {
        self.queue_position.is_some() && self.pin == Some(PinKind::Hard) && self.leases == 0 && !self.writing
    }
}

/// Eviction order of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictionOrder {
    /// The order of its tier's policy.
    Policy,
    /// Pinned softly: by the stamp of its last use, oldest first.
    Pinned(u64),
    /// Needed by a queued request: by queue position, the furthest first.
    Window(u32),
}

/// Counts of visible pinned blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnedBlocks {
    /// Pinned hard: never evicted.
    pub hard: u64,
    /// Pinned softly: evicted only after unpinned blocks.
    pub soft: u64,
}

impl PinnedBlocks {
    fn count_mut(&mut self, pin: Option<PinKind>) -> Option<&mut u64> {
        Some(match pin? {
            PinKind::Hard => &mut self.hard,
            PinKind::Soft => &mut self.soft,
        })
    }
}

/// Upper bound of a book's memory per block, in bytes, with its two policies and their memory of
/// departed blocks. Vectors and the table grow by doubling, so each may be half empty, and growth
/// by copying briefly needs the old half too.
pub const BLOCK_BYTES_MAX: u64 = {
    let rows = size_of::<Option<Entry>>() + size_of::<BlockKey>();
    let by_hash = (size_of::<(BlockHash, BlockKey)>() + 1) * 8 / 7;
    // `cargo xtask bench evict` limits every policy to 64 bytes a block, half-empty vectors
    // included.
    (3 * (rows + by_hash) + 2 * 64) as u64
};

/// Entries by dense key, and keys by hash.
#[derive(Debug)]
pub(super) struct Slab {
    entries: Vec<Option<Entry>>,
    free: Vec<BlockKey>,
    by_hash: HashMap<BlockHash, BlockKey, SeededHashBuilder>,
    serial: u64,
    /// Stamp of the last use.
    stamp: u64,
    /// Generation of added entries.
    generation: Generation,
    /// Entries up to this serial number belong to earlier weights.
    invalidated_up_to: u64,
    pinned: PinnedBlocks,
}

impl Slab {
    pub(super) fn new(seed: u64) -> Slab {
        let by_hash = HashMap::with_hasher(SeededHashBuilder { seed });
        let (entries, free, serial, stamp, generation, invalidated_up_to, pinned) = Default::default();
        Slab { entries, free, by_hash, serial, stamp, generation, invalidated_up_to, pinned }
    }

    /// The block with this hash and the current weights.
    pub(super) fn find(&self, hash: &BlockHash) -> Option<BlockKey> {
        self.by_hash.get(hash).copied().filter(|key| !self.is_invalidated(*key))
    }

    /// Generation of added entries.
    pub(super) fn generation(&self) -> Generation {
        self.generation
    }

    /// Sets the generation of entries added from now on.
    pub(super) fn set_generation(&mut self, generation: Generation) {
        self.generation = generation;
    }

    /// Invalidates every existing entry: it belongs to earlier weights and is no longer found.
    pub(super) fn invalidate_all(&mut self) {
        self.invalidated_up_to = self.serial;
        self.pinned = PinnedBlocks::default();
    }

    /// Whether no entry was added since the last invalidation.
    pub(super) fn is_all_invalidated(&self) -> bool {
        self.serial == self.invalidated_up_to
    }

    /// Whether an entry belongs to earlier weights.
    pub(super) fn is_invalidated(&self, key: BlockKey) -> bool {
        self.invalidated_up_to > 0
            && self.get(key).is_some_and(|entry| entry.serial <= self.invalidated_up_to)
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
            assigned_tier: Some(place),
            copies: Copies::default(),
            moving: None,
            announced: None,
            writing: false,
            writer: None,
            stamp: 0,
            last_use: None,
            in_policy: false,
            leases: 0,
            pin,
            awaited: false,
            queued: None,
            charged_tenant: meta.tenant,
            queue_position: None,
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

    /// A stamp that is larger than all before it.
    pub(super) fn next_stamp(&mut self) -> u64 {
        self.stamp += 1;
        self.stamp
    }

    /// Counts of visible pinned blocks.
    pub(super) fn pinned(&self) -> PinnedBlocks {
        self.pinned
    }

    /// Changes the pin kind of a visible block.
    pub(super) fn set_pin(&mut self, key: BlockKey, pin: Option<PinKind>) {
        let Some(entry) = self.get_mut(key) else { return };
        let before = std::mem::replace(&mut entry.pin, pin);
        self.count_pinned(before, -1);
        self.count_pinned(pin, 1);
    }

    fn count_pinned(&mut self, pin: Option<PinKind>, more: i64) {
        if let Some(count) = self.pinned.count_mut(pin) {
            *count = count.saturating_add_signed(more);
        }
    }

    /// Number of visible blocks.
    #[cfg(test)]
    pub(super) fn visible_len(&self) -> usize {
        self.by_hash.values().filter(|key| !self.is_invalidated(**key)).count()
    }

    /// Makes the hash unknown. The entry stays until its bytes are gone.
    pub(super) fn forget_hash(&mut self, key: BlockKey) {
        let Some((hash, pin)) = self.get(key).map(|entry| (entry.meta.hash, entry.pin)) else { return };
        if self.by_hash.get(&hash) == Some(&key) {
            let is_counted = !self.is_invalidated(key);
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

    /// Number of slots, used or free.
    pub(super) fn slot_count(&self) -> usize {
        self.entries.len()
    }

    /// Every entry once, starting at a slot derived from `seed`.
    pub(super) fn iter_from(&self, seed: u64) -> impl Iterator<Item = &Entry> {
        let start = seed.checked_rem(self.entries.len() as u64).unwrap_or(0) as usize;
        let (before, after) = self.entries.split_at(start);
        after.iter().chain(before).flatten()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockKey, &Entry)> {
        (0u32..).zip(&self.entries).filter_map(|(number, entry)| Some((BlockKey(number), entry.as_ref()?)))
    }
}

/// Hashes block hashes, which are uniform already. The seed keeps a caller from aiming at one
/// bucket.
#[derive(Clone, Debug)]
pub(super) struct SeededHashBuilder {
    pub(super) seed: u64,
}

pub(super) struct SeededHasher(u64);

impl BuildHasher for SeededHashBuilder {
    type Hasher = SeededHasher;

    fn build_hasher(&self) -> SeededHasher {
        SeededHasher(self.seed | 1)
    }
}

impl Hasher for SeededHasher {
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
            hash: BlockHash([number; _]),
            parent: None,
            tenant: TenantId(0),
            traits: BlockTraits::default(),
            charge: Charge::default(),
        }
    }

    #[test]
    fn removed_keys_are_reused_with_a_new_serial() {
        let mut slab = Slab::new(7);
        let first = slab.add(meta(1), Tier::Dram, None);
        let second = slab.add(meta(2), Tier::Dram, None);
        assert_eq!((first, second), (BlockKey(0), BlockKey(1)));
        let serial = slab.get(first).unwrap().serial;
        slab.remove(first);
        assert_eq!(slab.find(&BlockHash([1; _])), None);
        assert_eq!(slab.add(meta(3), Tier::Ssd, None), first);
        assert_ne!(slab.get(first).unwrap().serial, serial);
    }

    #[test]
    fn forgetting_a_hash_keeps_a_newer_block_with_that_hash() {
        let mut slab = Slab::new(7);
        let old = slab.add(meta(1), Tier::Dram, None);
        slab.forget_hash(old);
        let new = slab.add(meta(1), Tier::Dram, None);
        slab.remove(old);
        assert_eq!(slab.find(&BlockHash([1; _])), Some(new));
    }

    #[test]
    fn hash_spreads_over_low_bits() {
        let fold = SeededHashBuilder { seed: 99 };
        let low: std::collections::BTreeSet<u64> =
            (0..=255u8).map(|n| fold.hash_one(BlockHash([n; _])) & 0xff).collect();
        assert!(low.len() > 120, "only {} of 256 buckets used", low.len());
    }
}
