//! What is kept under the names that an engine gives: a table of short buckets over entries that stay where they are.
//!
//! All there is of one rank does not fit a cache, and every block of every event is looked up. So a bucket has eight bytes, of which half are
//! a hash to tell most others by; an entry is where its number says, next to those that came with it, for places that became free are taken
//! again in the order in which they did; and who has many names to look up says so first ([`Names::expect`]), so that all of them are on
//! their way from memory together. Names are somebody else's making: a secret of this process is in the hash that places them.
//!
//! Not here: what an entry is (`block.rs`).

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};

use kv_core::cpu::prefetch;
use kvfleet_proto::engine_events::EngineHash;

/// Names that are looked up together: their entries fit the nearest caches.
pub(super) const TOGETHER: usize = 64;

/// Entries that share an allocation, so that more of them need no copy of all.
const PAGE_ENTRIES_LOG2: u32 = 8;
const PAGE_ENTRIES: usize = 1 << PAGE_ENTRIES_LOG2;

/// Buckets of a table that has any.
const BUCKETS_MIN: usize = 64;

/// Where an entry is; it stays there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(u32);

impl Slot {
    /// None at all.
    pub(super) const NONE: Slot = Slot(u32::MAX);

    fn page(self) -> usize {
        (self.0 >> PAGE_ENTRIES_LOG2) as usize
    }

    fn at(self) -> usize {
        self.0 as usize % PAGE_ENTRIES
    }
}

/// The hash of a name, of which the highest bits say where its bucket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(u32);

/// What has a name.
pub(super) trait Named {
    /// Its name, which does not change.
    fn name(&self) -> EngineHash;
}

/// An entry by its name, or nothing.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    tag: Tag,
    slot: Slot,
}

const EMPTY: Bucket = Bucket { tag: Tag(0), slot: Slot::NONE };

/// Entries by name.
#[derive(Debug)]
pub(super) struct Names<E> {
    spread: Spread,
    /// As many as a power of two, or none. An entry is in the bucket that its tag names, or in the nearest one behind that was empty.
    buckets: Vec<Bucket>,
    /// Bits of a tag that are no part of a bucket's number.
    shift: u32,
    len: usize,
    pages: Vec<Vec<Option<E>>>,
    /// Places without an entry, in the order in which they became so.
    free: VecDeque<Slot>,
}

impl<E> Default for Names<E> {
    fn default() -> Names<E> {
        let (spread, buckets, pages, free) = Default::default();
        Names { spread, buckets, shift: 0, len: 0, pages, free }
    }
}

impl<E: Named> Names<E> {
    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The hash of a name in this table.
    #[inline]
    pub(super) fn tag(&self, name: EngineHash) -> Tag {
        Tag((self.spread.hash_one(name) >> 32) as u32)
    }

    /// Where the entry of this name is.
    pub(super) fn find(&self, name: EngineHash) -> Option<Slot> {
        self.find_tagged(name, self.tag(name))
    }

    /// The same where its tag is known.
    #[inline]
    pub(super) fn find_tagged(&self, name: EngineHash, tag: Tag) -> Option<Slot> {
        let slot = self.bucket_of(tag, |slot| self.get(slot).is_some_and(|entry| entry.name() == name));
        slot.ok().map(|(_, slot)| slot)
    }

    /// Has what belongs to these names brought near, and answers their tags.
    pub(super) fn expect(&self, names: &[EngineHash], tags: &mut Vec<Tag>) {
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
                self.expect_at(slot);
            }
        }
    }

    /// Has an entry brought near.
    #[inline]
    pub(super) fn expect_at(&self, slot: Slot) {
        if let Some(entry) = self.pages.get(slot.page()).and_then(|page| page.get(slot.at())) {
            prefetch(entry);
        }
    }

    /// Has brought near what [`Names::remove`] needs besides the entry.
    #[inline]
    pub(super) fn expect_removal(&self, slot: Slot) {
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

    /// Puts an entry in, whose tag is this, and answers where it is; or where one of the same name is, which stays.
    pub(super) fn insert(&mut self, entry: E, tag: Tag) -> Result<Slot, Slot> {
        // At three quarters a name that is not there is known to be none after some eight buckets, in one or two lines of a cache.
        if 4 * (self.len + 1) > 3 * self.buckets.len() {
            self.grow();
        }
        let name = entry.name();
        let at = match self.bucket_of(tag, |slot| self.get(slot).is_some_and(|entry| entry.name() == name)) {
            Ok((_, slot)) => return Err(slot),
            Err(at) => at,
        };
        let slot = self.place(entry);
        self.buckets[at] = Bucket { tag, slot };
        self.len += 1;
        Ok(slot)
    }

    /// Takes an entry out, if it is there. It is not handed out, as that would read all of it.
    pub(super) fn remove(&mut self, slot: Slot) {
        let Some(tag) = self.get(slot).map(|entry| self.tag(entry.name())) else { return };
        self.remove_tagged(slot, tag);
    }

    fn remove_tagged(&mut self, slot: Slot, tag: Tag) {
        let Ok((at, _)) = self.bucket_of(tag, |other| other == slot) else { return };
        self.empty(at);
        self.len -= 1;
        self.free.push_back(slot);
        if let Some(entry) = self.pages.get_mut(slot.page()).and_then(|page| page.get_mut(slot.at())) {
            *entry = None;
        }
    }

    /// All entries, and where they are.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &E)> {
        let entries = self.pages.iter().flatten().zip(0..);
        entries.filter_map(|(entry, slot)| Some((Slot(slot), entry.as_ref()?)))
    }

    /// Takes all of them out.
    pub(super) fn clear(&mut self) {
        *self = Names { spread: self.spread.clone(), ..Names::default() };
    }

    #[inline]
    fn home(&self, tag: Tag) -> usize {
        // Where there are no buckets this is none of them.
        (tag.0 >> self.shift) as usize
    }

    /// The bucket of the entry with this tag that is the one, and the entry's place; or else the empty bucket where it would be.
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

    /// Gives an entry a place.
    #[inline]
    fn place(&mut self, entry: E) -> Slot {
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

    /// Empties a bucket, and moves up those behind it that would not be found over it.
    fn empty(&mut self, mut at: usize) {
        let mask = self.buckets.len() - 1;
        let mut next = at;
        loop {
            next = (next + 1) & mask;
            let bucket = self.buckets[next];
            if bucket.slot == Slot::NONE {
                break;
            }
            // One that lies no farther from its home than from the empty one is found where it is.
            let from_home = next.wrapping_sub(self.home(bucket.tag)) & mask;
            if from_home >= next.wrapping_sub(at) & mask {
                self.buckets[at] = bucket;
                at = next;
            }
        }
        self.buckets[at] = EMPTY;
    }

    /// Doubles the buckets; tags say where each entry goes, so that none is looked at.
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

/// Spreads hashes over a table. They are hashes already, but of somebody else's making: a secret of this process is mixed in.
#[derive(Clone)]
pub(super) struct Spread {
    secret: [u64; 2],
}

impl Default for Spread {
    fn default() -> Self {
        let drawn = RandomState::new();
        Spread { secret: [drawn.hash_one(0), drawn.hash_one(1)] }
    }
}

impl fmt::Debug for Spread {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spread").finish_non_exhaustive()
    }
}

impl BuildHasher for Spread {
    type Hasher = Spreader;

    #[inline]
    fn build_hasher(&self) -> Spreader {
        Spreader { secret: self.secret, spread: 0 }
    }
}

/// See [`Spread`].
pub(super) struct Spreader {
    secret: [u64; 2],
    spread: u64,
}

impl Hasher for Spreader {
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
            [number as u64 ^ self.secret[0], (number >> 64) as u64 ^ self.secret[1] ^ self.spread];
        // Twice, for a product alone leaves its low bits to the low bits of the number.
        let product = u128::from(low) * u128::from(high | 1);
        let folded = product as u64 ^ (product >> 64) as u64;
        let product = u128::from(folded ^ self.secret[1]) * u128::from(self.secret[0] | 1);
        self.spread = product as u64 ^ (product >> 64) as u64;
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.spread
    }
}

#[cfg(test)]
mod tests;
