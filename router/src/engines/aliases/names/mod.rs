//! Table of entries by engine hash: short buckets that point to entries at fixed slots.
//!
//! The entries of one rank do not fit a cache, and every block of every event is looked up. So a
//! bucket has eight bytes, half of them a tag that excludes most other names. Free slots are reused
//! first in, first out, so entries that arrived together stay adjacent. A caller with many names
//! prefetches them first ([`NameTable::prefetch_names`]), so that their memory accesses overlap.
//! Names come from outside, so a secret of this process enters their hash.
//!
//! Not here: the contents of an entry (`block.rs`).

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};

use kvfleet_cpu::prefetch;
use kvfleet_engine_events::events::EngineHash;

/// Names looked up together: their entries fit the nearest caches.
pub(super) const LOOKUP_BATCH: usize = 64;

/// Entries per allocation, so that growth copies no entries.
const PAGE_ENTRIES_LOG2: u32 = 8;
const PAGE_ENTRIES: usize = 1 << PAGE_ENTRIES_LOG2;

/// Smallest number of buckets of a nonempty table.
const BUCKETS_MIN: usize = 64;

/// Fixed position of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(u32);

impl Slot {
    /// No slot.
    pub(super) const NONE: Slot = Slot(u32::MAX);

    fn page(self) -> usize {
        (self.0 >> PAGE_ENTRIES_LOG2) as usize
    }

    fn at(self) -> usize {
        self.0 as usize % PAGE_ENTRIES
    }
}

/// Hash of a name; its highest bits select the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(u32);

/// An entry with a name.
pub(super) trait NamedEntry {
    /// Its name, which does not change.
    fn name(&self) -> EngineHash;
}

/// Tag and slot of an entry, or [`EMPTY`].
#[derive(Clone, Copy, Debug)]
struct Bucket {
    tag: Tag,
    slot: Slot,
}

const EMPTY: Bucket = Bucket { tag: Tag(0), slot: Slot::NONE };

/// Entries by name.
#[derive(Debug)]
pub(super) struct NameTable<E> {
    hasher: KeyedBuildHasher,
    /// A power of two of them, or none. An entry is in the bucket of its tag, or in the nearest
    /// later one that was empty.
    buckets: Vec<Bucket>,
    /// Number of tag bits that do not select the bucket.
    shift: u32,
    len: usize,
    pages: Vec<Vec<Option<E>>>,
    /// Slots without an entry, oldest first.
    free: VecDeque<Slot>,
}

impl<E> Default for NameTable<E> {
    fn default() -> NameTable<E> {
        let (spread, buckets, pages, free) = Default::default();
        NameTable { hasher: spread, buckets, shift: 0, len: 0, pages, free }
    }
}

impl<E: NamedEntry> NameTable<E> {
    /// Number of entries.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Tag of a name in this table.
    #[inline]
    pub(super) fn tag(&self, name: EngineHash) -> Tag {
        Tag((self.hasher.hash_one(name) >> 32) as u32)
    }

    /// Slot of the entry with this name.
    pub(super) fn find(&self, name: EngineHash) -> Option<Slot> {
        self.find_tagged(name, self.tag(name))
    }

    /// As [`NameTable::find`], with a known tag.
    #[inline]
    pub(super) fn find_tagged(&self, name: EngineHash, tag: Tag) -> Option<Slot> {
        let slot = self.bucket_of(tag, |slot| self.get(slot).is_some_and(|entry| entry.name() == name));
        slot.ok().map(|(_, slot)| slot)
    }

    /// Prefetches the buckets and entries of these names, and fills in their tags.
    pub(super) fn prefetch_names(&self, names: &[EngineHash], tags: &mut Vec<Tag>) {
        tags.clear();
        for name in names {
            let tag = self.tag(*name);
            if let Some(bucket) = self.buckets.get(self.home(tag)) {
                prefetch(bucket);
            }
            tags.push(tag);
        }
        for tag in tags {
            if let Ok((_, slot)) = self.bucket_of(*tag, |_| true) {
                self.prefetch_entry(slot);
            }
        }
    }

    /// Prefetches an entry.
    #[inline]
    pub(super) fn prefetch_entry(&self, slot: Slot) {
        if let Some(entry) = self.pages.get(slot.page()).and_then(|page| page.get(slot.at())) {
            prefetch(entry);
        }
    }

    /// Prefetches the memory that [`NameTable::remove`] needs in addition to the entry.
    #[inline]
    pub(super) fn prefetch_removal(&self, slot: Slot) {
        if let Some(entry) = self.get(slot)
            && let Some(bucket) = self.buckets.get(self.home(self.tag(entry.name())))
        {
            prefetch(bucket);
        }
    }

    #[inline]
    pub(super) fn get(&self, slot: Slot) -> Option<&E> {
        self.pages.get(slot.page())?.get(slot.at())?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut E> {
        self.pages.get_mut(slot.page())?.get_mut(slot.at())?.as_mut()
    }

    /// Inserts an entry with this tag and returns its slot; `Err` holds the slot of an existing
    /// entry with the same name.
    pub(super) fn insert(&mut self, entry: E, tag: Tag) -> Result<Slot, Slot> {
        // At this load a failed lookup ends after about eight buckets, in one or two cache lines.
        if 4 * (self.len + 1) > 3 * self.buckets.len() {
            self.grow();
        }
        let name = entry.name();
        let at = match self.bucket_of(tag, |slot| self.get(slot).is_some_and(|entry| entry.name() == name)) {
            Ok((_, slot)) => return Err(slot),
            Err(at) => at,
        };
        let slot = self.allocate(entry);
        self.buckets[at] = Bucket { tag, slot };
        self.len += 1;
        Ok(slot)
    }

    /// Removes an entry if it exists. It is not returned, since that would read all of it.
    pub(super) fn remove(&mut self, slot: Slot) {
        let Some(tag) = self.get(slot).map(|entry| self.tag(entry.name())) else { return };
        self.remove_tagged(slot, tag);
    }

    fn remove_tagged(&mut self, slot: Slot, tag: Tag) {
        let Ok((at, _)) = self.bucket_of(tag, |other| other == slot) else { return };
        self.remove_bucket(at);
        self.len -= 1;
        self.free.push_back(slot);
        if let Some(entry) = self.pages.get_mut(slot.page()).and_then(|page| page.get_mut(slot.at())) {
            *entry = None;
        }
    }

    /// All entries and their slots.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &E)> {
        let entries = self.pages.iter().flatten().zip(0..);
        entries.filter_map(|(entry, slot)| Some((Slot(slot), entry.as_ref()?)))
    }

    /// Removes all entries.
    pub(super) fn clear(&mut self) {
        *self = NameTable { hasher: self.hasher.clone(), ..NameTable::default() };
    }

    #[inline]
    fn home(&self, tag: Tag) -> usize {
        // An empty table has no buckets, so this is out of range.
        (tag.0 >> self.shift) as usize
    }

    /// Bucket and slot of the entry with this tag that satisfies `is_the_one`; otherwise the empty
    /// bucket for it.
    #[inline]
    fn bucket_of(&self, tag: Tag, is_the_one: impl Fn(Slot) -> bool) -> Result<(usize, Slot), usize> {
        let mask = self.buckets.len().wrapping_sub(1);
        let mut at = self.home(tag);
        while let Some(bucket) = self.buckets.get(at) {
            if bucket.slot == Slot::NONE {
                break;
            }
            if bucket.tag == tag && is_the_one(bucket.slot) {
                return Ok((at, bucket.slot));
            }
            at = (at + 1) & mask;
        }
        Err(at)
    }

    /// Stores an entry in a free slot.
    #[inline]
    fn allocate(&mut self, entry: E) -> Slot {
        if let Some(slot) = self.free.pop_front() {
            if let Some(own) = self.pages.get_mut(slot.page()).and_then(|page| page.get_mut(slot.at())) {
                *own = Some(entry);
            }
            return slot;
        }
        if self.pages.last().is_none_or(|page| page.len() == PAGE_ENTRIES) {
            self.pages.push(Vec::with_capacity(PAGE_ENTRIES));
        }
        let page = self.pages.len() - 1;
        let at = self.pages[page].len();
        self.pages[page].push(Some(entry));
        Slot((page * PAGE_ENTRIES + at) as u32)
    }

    /// Empties a bucket and moves up later ones that would otherwise be unreachable.
    fn remove_bucket(&mut self, mut at: usize) {
        let mask = self.buckets.len() - 1;
        let mut next = at;
        loop {
            next = (next + 1) & mask;
            let bucket = self.buckets[next];
            if bucket.slot == Slot::NONE {
                break;
            }
            // A bucket at most as far from its home as from the empty one is still reachable.
            let from_home = next.wrapping_sub(self.home(bucket.tag)) & mask;
            if from_home >= next.wrapping_sub(at) & mask {
                self.buckets[at] = bucket;
                at = next;
            }
        }
        self.buckets[at] = EMPTY;
    }

    /// Doubles the buckets; tags determine the positions, so no entry is read.
    #[cold]
    fn grow(&mut self) {
        let count = (2 * self.buckets.len()).max(BUCKETS_MIN);
        let old = std::mem::replace(&mut self.buckets, vec![EMPTY; count]);
        self.shift = 32 - count.trailing_zeros();
        for bucket in old.into_iter().filter(|bucket| bucket.slot != Slot::NONE) {
            if let Err(at) = self.bucket_of(bucket.tag, |_| false) {
                self.buckets[at] = bucket;
            }
        }
    }
}

/// Hashes names with a secret of this process, since they are hashes chosen elsewhere.
#[derive(Clone)]
pub(super) struct KeyedBuildHasher {
    secret: [u64; 2],
}

impl Default for KeyedBuildHasher {
    fn default() -> Self {
        let drawn = RandomState::new();
        KeyedBuildHasher { secret: [drawn.hash_one(0), drawn.hash_one(1)] }
    }
}

impl fmt::Debug for KeyedBuildHasher {
    /// Omits the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spread").finish_non_exhaustive()
    }
}

impl BuildHasher for KeyedBuildHasher {
    type Hasher = KeyedHasher;

    #[inline]
    fn build_hasher(&self) -> KeyedHasher {
        KeyedHasher { secret: self.secret, hash: 0 }
    }
}

/// Hasher of [`KeyedBuildHasher`].
pub(super) struct KeyedHasher {
    secret: [u64; 2],
    hash: u64,
}

impl Hasher for KeyedHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(16) {
            let mut padded = [0; 16];
            padded[..word.len()].copy_from_slice(word);
            self.write_u128(u128::from_le_bytes(padded));
        }
    }

    #[inline]
    fn write_u128(&mut self, number: u128) {
        let [low, high] =
            [number as u64 ^ self.secret[0], (number >> 64) as u64 ^ self.secret[1] ^ self.hash];
        // Two rounds, since in one product the low bits depend only on the low bits of the number.
        let product = u128::from(low) * u128::from(high | 1);
        let folded = product as u64 ^ (product >> 64) as u64;
        let product = u128::from(folded ^ self.secret[1]) * u128::from(self.secret[0] | 1);
        self.hash = product as u64 ^ (product >> 64) as u64;
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.hash
    }
}

#[cfg(test)]
mod tests;
