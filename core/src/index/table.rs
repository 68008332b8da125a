//! The hash table of the index: from a [`TableKey`] to a [`PageSlot`].
//!
//! A bucket is one cache line: twelve page slots, twelve address bits of each key (tags), and a
//! record of entries that spilled because it was full. A lookup reads one bucket and one page,
//! where it compares the whole key. The table consists of segments that resize one at a time, each
//! at another fill, so a command waits for small rehashes only and memory grows evenly. Resizing
//! does not read the pages of entries in their home buckets: bucket number and tag together hold
//! all address bits in use. Not here: the hashes (`pages.rs`), and the choice between a block's two
//! keys (`locations.rs`).
//!
//! Table layout is not visible outside: two replicas may lay out their tables differently.

use std::collections::BTreeMap;

use super::pages::{PageSlot, Pages};
use crate::id::{BlockHash, HashWords};
use kvfleet_cpu::{equal_bytes, prefetch};

/// Segments, as a power of two. More segments would rehash faster, but their headers would leave
/// the nearest caches, and each takes four kilobytes from its first entry on. Few in tests, so that
/// their segments reach realistic sizes.
const SEGMENTS_LOG2: u32 = if cfg!(test) { 1 } else { 8 };
/// Entries in a bucket of 64 bytes.
const ENTRIES: usize = 12;
/// Bits of a tag.
const TAG_BITS: u32 = 12;
/// Address bits, below the segment bits, that place an entry within its segment. With four thousand
/// buckets in a segment (a hundred million blocks), a tag still distinguishes 64 keys of a bucket.
const FRACTION_BITS: u32 = 18;
/// Fill limit in percent; it varies from segment to segment, so that they do not grow at the same
/// time. At 96 percent one entry in ten is outside its home bucket.
const FILL_PERCENT: std::ops::Range<usize> = 94..99;
/// A segment halves when its fill drops below the growth threshold divided by this.
const SHRINK_DIVISOR: u32 = 3;
/// Buckets of the smallest non-empty segment: four kilobytes. From this size on bucket number and
/// tag restore the fraction, so resizing rarely reads a hash.
const BUCKETS_MIN: usize = 1 << (FRACTION_BITS - TAG_BITS);
/// Maximum buckets of a segment. 2^25 pages, each with four entries, need at most 45 thousand if
/// spread evenly. Keys crafted to collide go to [`Table::overflow`] instead of growing it further.
const BUCKETS_MAX: usize = 1 << 16;
/// Buckets that an entry may lie in. With three of four buckets full, one entry in ten thousand
/// finds none of 32 free; then the segment grows early.
const PROBES_MAX: usize = 32;
/// Bits of a page slot.
const PLACE_BITS: u32 = 28;
const PLACE: u32 = (1 << PLACE_BITS) - 1;
/// Odd multiplier (2^64 over the golden ratio) that breaks correlation between the two halves of a
/// hash.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// Key of a table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableKey {
    /// A block group, by its shared bytes. The entry names the first slot of its canonical page.
    Group(u64),
    /// A block of a page that is not canonical. The entry names its slot.
    Block(BlockHash),
}

impl TableKey {
    /// The key of the entry with this page slot.
    fn of(place: PageSlot, pages: &Pages) -> Self {
        if pages.is_canonical(place.page()) {
            TableKey::Group(pages.block_group(place.page()))
        } else {
            TableKey::Block(pages.hash(place))
        }
    }

    /// Whether an entry with this page slot has this key.
    #[inline]
    fn matches(self, place: PageSlot, pages: &Pages) -> bool {
        match self {
            TableKey::Group(octet) => pages.is_canonical_for(place.page(), octet),
            TableKey::Block(hash) => pages.matches(place, hash) && !pages.is_canonical(place.page()),
        }
    }
}

/// Position of a key in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeyAddress {
    segment: usize,
    /// Position within the segment as a fraction of 2^18.
    fraction: u64,
}

impl KeyAddress {
    /// Block hashes are uniform already; the multiplication only guards against hand-made hashes
    /// (counters in tests).
    #[inline]
    fn of(key: TableKey) -> Self {
        let folded = match key {
            TableKey::Group(octet) => octet,
            TableKey::Block(hash) => {
                let HashWords { first, middle, last } = hash.words();
                first ^ middle << 40 ^ last.rotate_left(32)
            }
        };
        let mixed = folded.wrapping_mul(SPREAD);
        let below = mixed >> (64 - SEGMENTS_LOG2 - FRACTION_BITS);
        Self {
            segment: (mixed >> (64 - SEGMENTS_LOG2)) as usize,
            fraction: below & ((1 << FRACTION_BITS) - 1),
        }
    }

    fn tag(self) -> u16 {
        tag_of(self.fraction)
    }

    fn bucket(self, buckets: usize) -> usize {
        ((self.fraction * buckets as u64) >> FRACTION_BITS) as usize
    }
}

/// One cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Bucket {
    /// The lowest eight bits of each tag; the last four bytes are [`Bucket::meta`].
    tags: [u8; 16],
    /// Page slot of each entry, and above it the highest four bits of its tag.
    places: [u32; ENTRIES],
}

/// In a bucket's meta word: number of filled entries; they come first.
const LEN: u32 = 0xF;
/// One bit per entry that is outside its home bucket.
const DISPLACED: u32 = 4;
/// One bit per class of tags with a spilled entry, kept until the last spilled entry is removed.
const SPILL_CLASSES: u32 = DISPLACED + ENTRIES as u32;
/// Number of entries that spilled from this bucket; 255 means unknown.
const SPILL_COUNT: u32 = SPILL_CLASSES + 8;
const SPILL_COUNT_MAX: u32 = 0xFF;

impl Bucket {
    #[inline]
    fn meta(&self) -> u32 {
        let [.., a, b, c, d] = self.tags;
        u32::from_le_bytes([a, b, c, d])
    }

    #[inline]
    fn set_meta(&mut self, meta: u32) {
        self.tags[ENTRIES..].copy_from_slice(&meta.to_le_bytes());
    }

    #[inline]
    fn len(&self) -> usize {
        (self.meta() & LEN) as usize
    }

    /// One bit per filled entry with these lowest eight tag bits.
    #[inline]
    fn candidates(&self, tag: u16) -> u32 {
        equal_bytes(self.tags, tag as u8) & ((1 << (self.meta() & LEN)) - 1)
    }

    /// Page slot of the first entry in `candidates` with this tag, and the remaining candidates.
    #[inline]
    fn next(&self, mut candidates: u32, tag: u16) -> Option<(PageSlot, u32)> {
        while candidates != 0 {
            let entry = *self.places.get(candidates.trailing_zeros() as usize)?;
            candidates &= candidates - 1;
            if entry >> PLACE_BITS == u32::from(tag >> 8) {
                return Some((PageSlot(entry & PLACE), candidates));
            }
        }
        None
    }

    /// Adds an entry if the bucket has space. `away` is one for an entry outside its home bucket,
    /// else zero.
    #[inline]
    fn push(&mut self, low: u8, word: u32, away: u32) -> bool {
        let meta = self.meta();
        let entry = (meta & LEN) as usize;
        let Some(own) = self.places.get_mut(entry) else { return false };
        *own = word;
        self.tags[entry] = low;
        self.set_meta((meta + 1) | away << (DISPLACED + entry as u32));
        true
    }

    /// Whether an entry with this tag may be in a later bucket.
    #[inline]
    fn has_spilled(&self, tag: u16) -> bool {
        self.meta() & spill_bit(tag) != 0
    }

    /// Records that an entry spilled from this full bucket.
    fn record_spill(&mut self, tag: u16) {
        let meta = self.meta() | spill_bit(tag);
        let is_known = meta >> SPILL_COUNT < SPILL_COUNT_MAX;
        self.set_meta(meta + (u32::from(is_known) << SPILL_COUNT));
    }

    /// Records that a spilled entry was removed.
    fn remove_spill(&mut self) {
        let meta = self.meta();
        match meta >> SPILL_COUNT {
            SPILL_COUNT_MAX => {}
            1 => self.set_meta(meta & ((1 << SPILL_CLASSES) - 1)),
            _ => self.set_meta(meta - (1 << SPILL_COUNT)),
        }
    }

    #[inline]
    fn swap_remove(&mut self, entry: usize) {
        let meta = self.meta();
        let last = (meta & LEN) as usize - 1;
        self.tags[entry] = self.tags[last];
        self.places[entry] = self.places[last];
        let away = meta >> DISPLACED >> last & 1;
        let kept = meta & !((1 << entry | 1 << last) << DISPLACED);
        // If the last entry is removed, no other takes its slot.
        let moved = if entry == last { 0 } else { away << entry << DISPLACED };
        self.set_meta((kept | moved) - 1);
    }

    /// The entry with exactly this tag and page slot.
    #[inline]
    fn entry_of(&self, tag: u16, place: u32) -> Option<usize> {
        let word = entry_word(tag, place);
        let mut candidates = self.candidates(tag);
        while candidates != 0 {
            let entry = candidates.trailing_zeros() as usize;
            if self.places.get(entry) == Some(&word) {
                return Some(entry);
            }
            candidates &= candidates - 1;
        }
        None
    }
}

/// The spill bit for tags of this class.
#[inline]
fn spill_bit(tag: u16) -> u32 {
    1 << (SPILL_CLASSES + u32::from(tag & 7))
}

/// A page slot, and above it the highest four bits of a tag.
#[inline]
fn entry_word(tag: u16, place: u32) -> u32 {
    place | u32::from(tag >> 8) << PLACE_BITS
}

/// A segment holds only its buckets. Entry counts are apart ([`SegmentFill`]), so that the data of
/// lookups stays in the nearest caches.
#[derive(Clone, Debug, Default)]
struct TableSegment {
    buckets: Box<[Bucket]>,
}

/// Fill of a segment.
#[derive(Clone, Copy, Debug, Default)]
struct SegmentFill {
    entries: u32,
    /// Number of entries at which it grows.
    grow_at: u32,
}

impl TableSegment {
    #[inline]
    fn find(&self, address: KeyAddress, key: TableKey, pages: &Pages) -> Option<PageSlot> {
        let home = address.bucket(self.buckets.len());
        let bucket = self.buckets.get(home)?;
        if let Some(place) = find_in_bucket(bucket, address.tag(), key, pages) {
            return Some(place);
        }
        if !bucket.has_spilled(address.tag()) {
            return None;
        }
        self.find_displaced(home, address.tag(), key, pages)
    }

    #[cold]
    fn find_displaced(&self, home: usize, tag: u16, key: TableKey, pages: &Pages) -> Option<PageSlot> {
        for probe in 1..PROBES_MAX {
            let bucket = &self.buckets[self.probe_bucket(home, tag, probe)];
            if let Some(place) = find_in_bucket(bucket, tag, key, pages) {
                return Some(place);
            }
            if !bucket.has_spilled(tag) {
                return None;
            }
        }
        None
    }

    /// The buckets that an entry may lie in, in probe order: its home, then the neighbour that
    /// processors load with it. Later probes step by a distance that depends on the tag, so that
    /// full buckets do not cluster.
    #[inline]
    fn probe_bucket(&self, home: usize, tag: u16, probe: usize) -> usize {
        match probe {
            0 => home,
            1 => home ^ 1,
            // Odd, while the number of buckets is even, so probing does not return home at once.
            _ => (home + (probe - 1) * (usize::from(tag >> 3) | 1)) % self.buckets.len(),
        }
    }

    /// Adds an entry if a bucket in probe range has space; the caller counts it.
    #[inline]
    fn put(&mut self, home: usize, tag: u16, place: u32) -> bool {
        self.buckets[home].push(tag as u8, entry_word(tag, place), 0) || self.put_displaced(home, tag, place)
    }

    #[cold]
    fn put_displaced(&mut self, home: usize, tag: u16, place: u32) -> bool {
        for probe in 1..PROBES_MAX {
            let at = self.probe_bucket(home, tag, probe);
            if self.buckets[at].push(tag as u8, entry_word(tag, place), 1) {
                (0..probe)
                    .for_each(|passed| self.buckets[self.probe_bucket(home, tag, passed)].record_spill(tag));
                return true;
            }
        }
        false
    }

    /// Removes an entry; returns whether it was present.
    #[inline]
    fn take(&mut self, address: KeyAddress, place: u32) -> bool {
        let (home, tag) = (address.bucket(self.buckets.len()), address.tag());
        let Some(bucket) = self.buckets.get_mut(home) else { return false };
        if let Some(entry) = bucket.entry_of(tag, place) {
            bucket.swap_remove(entry);
            return true;
        }
        bucket.has_spilled(tag) && self.take_displaced(home, tag, place)
    }

    #[cold]
    fn take_displaced(&mut self, home: usize, tag: u16, place: u32) -> bool {
        for probe in 1..PROBES_MAX {
            let at = self.probe_bucket(home, tag, probe);
            if let Some(entry) = self.buckets[at].entry_of(tag, place) {
                self.buckets[at].swap_remove(entry);
                (0..probe)
                    .for_each(|passed| self.buckets[self.probe_bucket(home, tag, passed)].remove_spill());
                return true;
            }
        }
        false
    }

    /// A copy with `buckets` buckets, or up to twice the current number if entries do not fit; with
    /// the entries that still do not. A shrinking segment always shrinks, otherwise every removal
    /// would retry.
    #[cold]
    fn resized(&self, buckets: usize, pages: &Pages) -> (TableSegment, Vec<PageSlot>) {
        let mut wanted = buckets;
        loop {
            let mut new = TableSegment { buckets: vec![Bucket::default(); wanted].into() };
            let now = self.buckets.len();
            let is_last_try = wanted < now || wanted >= 2 * now || wanted >= BUCKETS_MAX;
            let strays = new.insert_all(self, pages, is_last_try);
            if let Some(strays) = strays {
                return (new, strays);
            }
            wanted = next_size(wanted);
        }
    }

    /// Adds all entries of another segment. Returns those that do not fit, or `None` if one does
    /// not fit and `spill` is false.
    fn insert_all(&mut self, old: &TableSegment, pages: &Pages, spill: bool) -> Option<Vec<PageSlot>> {
        let mut late: Vec<(u64, u32)> = Vec::new();
        let mut away: Vec<PageSlot> = Vec::new();
        let (from, to) = (old.buckets.len(), self.buckets.len() as u64);
        for (number, bucket) in old.buckets.iter().enumerate() {
            let first = first_fraction(number, from);
            let is_away = bucket.meta() >> DISPLACED;
            for (entry, word) in bucket.places[..bucket.len().min(ENTRIES)].iter().enumerate() {
                if is_away & 1 << entry != 0 {
                    let place = PageSlot(word & PLACE);
                    pages.prefetch(place);
                    away.push(place);
                    continue;
                }
                let low = bucket.tags[entry];
                let tag = u16::from(low) | (word >> PLACE_BITS << 8) as u16;
                let fraction = fraction_with_tag(first, tag);
                let home = ((fraction * to) >> FRACTION_BITS) as usize;
                if !self.buckets[home].push(low, *word, 0) {
                    late.push((fraction, word & PLACE));
                }
            }
        }
        let far = away.iter().map(|place| (KeyAddress::of(TableKey::of(*place, pages)).fraction, place.0));
        let mut strays = Vec::new();
        for (fraction, place) in far.chain(late) {
            let home = ((fraction * to) >> FRACTION_BITS) as usize;
            if !self.put(home, tag_of(fraction), place) {
                if !spill {
                    return None;
                }
                strays.push(PageSlot(place));
            }
        }
        Some(strays)
    }
}

#[inline]
fn find_in_bucket(bucket: &Bucket, tag: u16, key: TableKey, pages: &Pages) -> Option<PageSlot> {
    let mut candidates = bucket.candidates(tag);
    while let Some((place, left)) = bucket.next(candidates, tag) {
        if key.matches(place, pages) {
            return Some(place);
        }
        candidates = left;
    }
    None
}

/// The lowest fraction that maps to a bucket. A bucket spans at most 2^12 fractions, so the lowest
/// twelve bits identify each.
fn first_fraction(bucket: usize, buckets: usize) -> u64 {
    ((bucket as u64) << FRACTION_BITS).div_ceil(buckets as u64)
}

/// The fraction of a bucket with this tag.
fn fraction_with_tag(first: u64, tag: u16) -> u64 {
    first + u64::from(tag.wrapping_sub(first as u16) & ((1 << TAG_BITS) - 1))
}

#[inline]
fn tag_of(fraction: u64) -> u16 {
    fraction as u16 & ((1 << TAG_BITS) - 1)
}

/// A key lookup in steps, so that several can run interleaved and share the memory latency:
/// [`Table::seek`], then [`BucketProbe::first_candidate`].
#[derive(Clone, Copy)]
pub(super) struct BucketProbe<'a> {
    tag: u16,
    bucket: Option<&'a Bucket>,
    /// Whether the key may be in the overflow map.
    check_overflow: bool,
}

impl BucketProbe<'_> {
    /// Reads the bucket. Returns whether the key may have an entry, and the first page slot with a
    /// matching tag.
    #[inline]
    pub(super) fn first_candidate(&self) -> (bool, Option<PageSlot>) {
        let Some(bucket) = self.bucket else { return (self.check_overflow, None) };
        match bucket.next(bucket.candidates(self.tag), self.tag) {
            Some((place, _)) => (true, Some(place)),
            None => (self.check_overflow || bucket.has_spilled(self.tag), None),
        }
    }
}

/// Page slot of each entry.
#[derive(Clone, Debug)]
pub(super) struct Table {
    segments: Vec<TableSegment>,
    /// One per segment.
    fills: Vec<SegmentFill>,
    /// Entries without space near their home bucket. Only crafted keys get here, from about two
    /// hundred at one address on. They must stay cheap, and none may be lost.
    overflow: BTreeMap<TableKey, PageSlot>,
    len: u64,
    /// Expected entries per segment; zero if unknown.
    expected: u32,
}

impl Default for Table {
    fn default() -> Self {
        let segments = 1 << SEGMENTS_LOG2;
        Self {
            segments: vec![TableSegment::default(); segments],
            fills: vec![SegmentFill::default(); segments],
            overflow: BTreeMap::new(),
            len: 0,
            expected: 0,
        }
    }
}

impl Table {
    /// Announces the total number of entries, so that segments grow in larger steps: by less than
    /// four times, which bounds the effect of a wrong number. Zero ends that.
    pub(super) fn expect_entries(&mut self, entries: u64) {
        let each = entries >> SEGMENTS_LOG2;
        // Adds two standard deviations: keys spread evenly, so then only a small part of the
        // segments grows once more.
        let expected = if entries == 0 { 0 } else { each + 2 * each.isqrt() };
        self.expected = u32::try_from(expected).unwrap_or(u32::MAX);
    }

    /// Entries.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    #[inline]
    pub(super) fn find(&self, key: TableKey, pages: &Pages) -> Option<PageSlot> {
        let address = KeyAddress::of(key);
        let found = self.segments[address.segment].find(address, key, pages);
        if found.is_none() && !self.overflow.is_empty() {
            return self.overflow.get(&key).copied();
        }
        found
    }

    /// Starts a lookup: prefetches the key's bucket.
    #[inline]
    pub(super) fn seek(&self, key: TableKey) -> BucketProbe<'_> {
        let address = KeyAddress::of(key);
        let buckets = &self.segments[address.segment].buckets;
        let bucket = buckets.get(address.bucket(buckets.len()));
        if let Some(bucket) = bucket {
            prefetch(bucket);
        }
        BucketProbe { tag: address.tag(), bucket, check_overflow: !self.overflow.is_empty() }
    }

    /// Adds an entry unless its key has one; returns whether it was added. The page must already
    /// contain the key.
    #[inline]
    pub(super) fn insert(&mut self, key: TableKey, place: PageSlot, pages: &Pages) -> bool {
        let address = KeyAddress::of(key);
        let segment = &mut self.segments[address.segment];
        let count = &mut self.fills[address.segment];
        // Mostly the one probe that shows the key is new also finds a free entry.
        let (home, tag) = (address.bucket(segment.buckets.len()), address.tag());
        if let Some(bucket) = segment.buckets.get_mut(home)
            && count.entries < count.grow_at
            && self.overflow.is_empty()
            && bucket.next(bucket.candidates(tag), tag).is_none()
            && (!bucket.has_spilled(tag) || segment.find_displaced(home, tag, key, pages).is_none())
            && segment.put(home, tag, place.0)
        {
            count.entries += 1;
            self.len += 1;
            return true;
        }
        self.insert_slowly(address, key, place, pages)
    }

    #[cold]
    fn insert_slowly(&mut self, address: KeyAddress, key: TableKey, place: PageSlot, pages: &Pages) -> bool {
        if self.find(key, pages).is_some() {
            return false;
        }
        self.len += 1;
        loop {
            let segment = &mut self.segments[address.segment];
            let count = &mut self.fills[address.segment];
            let buckets = segment.buckets.len();
            let may_grow = buckets < BUCKETS_MAX;
            let fits = count.entries < count.grow_at || !may_grow;
            if fits && segment.put(address.bucket(buckets), address.tag(), place.0) {
                count.entries += 1;
                return true;
            }
            // More buckets help against many entries, but not against colliding ones. A grown
            // segment is at least three eighths full and a shrunk one at most two thirds, so
            // resizes do not alternate.
            let is_sparse = fits && count.entries < count.grow_at / 4 * 3;
            if !may_grow || is_sparse {
                self.overflow.insert(key, place);
                return true;
            }
            self.resize(address.segment, self.next_segment_size(address.segment, buckets), pages);
        }
    }

    /// The next larger size of a segment.
    fn next_segment_size(&self, number: usize, buckets: usize) -> usize {
        let mut next = next_size(buckets);
        while next < BUCKETS_MAX.min(3 * buckets) && grow_threshold(next, number) < self.expected {
            next = next_size(next);
        }
        next
    }

    fn resize(&mut self, number: usize, buckets: usize, pages: &Pages) {
        let (segment, strays) = self.segments[number].resized(buckets, pages);
        let count = &mut self.fills[number];
        count.entries -= strays.len() as u32;
        count.grow_at = grow_threshold(segment.buckets.len(), number);
        self.segments[number] = segment;
        self.overflow.extend(strays.into_iter().map(|place| (TableKey::of(place, pages), place)));
    }

    /// Removes the entry with this key and page slot.
    #[inline]
    pub(super) fn remove(&mut self, key: TableKey, place: PageSlot, pages: &Pages) {
        let address = KeyAddress::of(key);
        self.len -= 1;
        if !self.segments[address.segment].take(address, place.0) {
            let stray = self.overflow.remove(&key);
            debug_assert_eq!(stray, Some(place), "an entry must be in the table or in the overflow map");
            return;
        }
        let count = &mut self.fills[address.segment];
        count.entries -= 1;
        let buckets = self.segments[address.segment].buckets.len();
        if count.entries * SHRINK_DIVISOR < count.grow_at && buckets > BUCKETS_MIN {
            self.resize(address.segment, next_size(buckets / 2 - 1), pages);
        }
    }
}

#[cfg(test)]
impl Table {
    /// Entries that found no room near their bucket.
    pub(super) fn overflow(&self) -> usize {
        self.overflow.len()
    }

    /// Buckets of all segments.
    pub(super) fn buckets(&self) -> usize {
        self.segments.iter().map(|one| one.buckets.len()).sum()
    }
}

/// The next segment size: two or three times a power of two, a half or a third more. Smaller steps
/// would save little memory and move every entry twice as often.
fn next_size(buckets: usize) -> usize {
    let next = buckets + 1;
    if next <= BUCKETS_MIN {
        return BUCKETS_MIN;
    }
    let step = 1usize << (next.ilog2() - 1);
    next.div_ceil(step) * step
}

/// Number of entries at which a segment grows.
fn grow_threshold(buckets: usize, segment: usize) -> u32 {
    let percent = FILL_PERCENT.start + segment % FILL_PERCENT.len();
    (buckets * ENTRIES * percent / 100) as u32
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::pages::PageOwner;
    use super::*;

    #[test]
    fn bucket_and_tag_restore_the_fraction() {
        for buckets in [64, 96, 300, 1_000, 4_098, 32_768] {
            for step in 0..300_000u64 {
                let fraction = step.wrapping_mul(SPREAD) >> (64 - FRACTION_BITS);
                let address = KeyAddress { segment: 0, fraction };
                let first = first_fraction(address.bucket(buckets), buckets);
                assert_eq!(fraction_with_tag(first, address.tag()), fraction, "{buckets} buckets");
            }
        }
    }

    #[test]
    fn sizes_grow_by_halves_and_thirds() {
        let sizes: Vec<usize> =
            std::iter::successors(Some(0), |size| Some(next_size(*size))).take(10).collect();
        assert_eq!(sizes, [0, 64, 96, 128, 192, 256, 384, 512, 768, 1_024]);
    }

    /// A table with the pages of its entries.
    #[derive(Default)]
    struct TableFixture {
        pages: Pages,
        table: Table,
    }

    impl TableFixture {
        /// Creates a page for a key and adds its entry.
        fn insert_page(&mut self, key: TableKey) -> PageSlot {
            let page = self.pages.allocate().unwrap();
            let place = match key {
                TableKey::Group(octet) => {
                    self.pages.init_page(page, octet, PageOwner::default(), true);
                    // A block with another address for its own key.
                    let mut first = BlockHash([0xC3; _]);
                    first.0[..5].copy_from_slice(&octet.to_le_bytes()[..5]);
                    self.pages.write(PageSlot::new(page, 0), &[first]);
                    PageSlot::new(page, 0)
                }
                TableKey::Block(hash) => {
                    self.pages.init_page(page, hash.block_group(), PageOwner::default(), false);
                    self.pages.write(PageSlot::of_hash(page, hash), &[hash]);
                    PageSlot::of_hash(page, hash)
                }
            };
            assert!(self.table.insert(key, place, &self.pages));
            assert!(!self.table.insert(key, place, &self.pages), "the key has an entry already");
            place
        }

        fn find(&self, key: TableKey) -> Option<PageSlot> {
            self.table.find(key, &self.pages)
        }

        fn remove(&mut self, key: TableKey, place: PageSlot) {
            self.table.remove(key, place, &self.pages);
        }
    }

    /// Keys of both kinds, alternating.
    fn key(number: u64) -> TableKey {
        let product = u128::from(number) * 0x100_0000_0100_0300;
        let hash = BlockHash::from_words(product as u64, (product >> 64) as u64);
        let octet = (number.wrapping_mul(SPREAD) % (1 << 29)) << 11 | 7;
        if number.is_multiple_of(2) { TableKey::Group(octet) } else { TableKey::Block(hash) }
    }

    #[test]
    fn segment_keeps_entries_while_it_resizes() {
        let mut both = TableFixture::default();
        let listed: Vec<PageSlot> = (0..40_000).map(|number| both.insert_page(key(number))).collect();
        let passed = |bucket: &Bucket| bucket.meta() >> SPILL_COUNT > 0;
        assert!(both.table.segments.iter().any(|one| one.buckets.iter().any(passed)));
        let most = both.table.buckets();
        assert!(most * ENTRIES < 40_000 * 100 / 70, "{most} buckets");
        for (number, place) in (0..).zip(&listed) {
            assert_eq!(both.find(key(number)), Some(*place));
        }
        assert_eq!((both.find(key(40_000)), both.find(key(40_001))), (None, None));
        for (number, place) in (0..).zip(&listed).filter(|(number, _)| number % 65 != 0) {
            both.remove(key(number), *place);
        }
        assert_eq!(both.table.len(), 616);
        assert!(both.table.buckets() * 12 < most, "the table did not shrink");
        for (number, place) in (0..).zip(&listed) {
            assert_eq!(both.find(key(number)), (number % 65 == 0).then_some(*place));
        }
    }

    /// Adds keys, finds each, removes every second, finds the rest.
    fn insert_and_remove_half(keys: &[TableKey]) -> TableFixture {
        let mut both = TableFixture::default();
        let listed: Vec<(TableKey, PageSlot)> =
            keys.iter().map(|key| (*key, both.insert_page(*key))).collect();
        assert!(listed.iter().all(|(key, place)| both.find(*key) == Some(*place)));
        assert!(listed.iter().all(|(key, _)| both.table.seek(*key).first_candidate().0));
        for (key, place) in listed.iter().step_by(2) {
            both.remove(*key, *place);
        }
        for (number, (key, place)) in listed.iter().enumerate() {
            assert_eq!(both.find(*key), (number % 2 == 1).then_some(*place));
        }
        assert_eq!(both.table.len(), listed.len() as u64 / 2);
        both
    }

    #[test]
    fn colliding_blocks_do_not_exhaust_memory() {
        // Both halves cancel in the address, so all these hashes share one address.
        let hash = |number: u64| {
            let low = number.rotate_left(32) ^ 7;
            BlockHash::from_words(low, number)
        };
        let keys: Vec<TableKey> = (0..4_000).map(|number| TableKey::Block(hash(number))).collect();
        assert!(keys.iter().all(|key| KeyAddress::of(*key) == KeyAddress::of(keys[0])));
        let both = insert_and_remove_half(&keys);
        assert!(!both.table.overflow.is_empty());
        assert!(both.table.segments.iter().all(|segment| segment.buckets.len() < 100));
    }

    /// Number of resizes during `times` calls of `change`.
    fn resizes(both: &mut TableFixture, times: u64, mut change: impl FnMut(&mut TableFixture, u64)) -> usize {
        let lies = |both: &TableFixture| -> Vec<_> {
            both.table.segments.iter().map(|one| (one.buckets.as_ptr(), one.buckets.len())).collect()
        };
        let mut count = 0;
        for number in 0..times {
            let before = lies(both);
            change(both, number);
            let after = lies(both);
            count += before.iter().zip(&after).filter(|(before, after)| before != after).count();
        }
        count
    }

    /// A key at an address that all these keys share.
    fn colliding_key(number: u64) -> TableKey {
        let low = number.rotate_left(32) ^ 7;
        TableKey::Block(BlockHash::from_words(low, number))
    }

    #[test]
    fn segment_does_not_alternate_between_sizes() {
        let mut both = TableFixture::default();
        let segment = KeyAddress::of(colliding_key(0)).segment;
        let mut ordinary = (0..).map(key).filter(|key| KeyAddress::of(*key).segment == segment);
        let mut chosen = (0..).map(colliding_key);
        let mut listed: Vec<(TableKey, PageSlot)> = Vec::new();
        for key in ordinary.by_ref().take(10_000) {
            listed.push((key, both.insert_page(key)));
        }
        // Enough keys of one address that no more of them fit.
        for key in chosen.by_ref().take(500) {
            both.insert_page(key);
        }
        let mut shrunk = 0;
        while both.table.segments[segment].buckets.len() > BUCKETS_MIN {
            let (key, place) = listed.pop().unwrap();
            if resizes(&mut both, 1, |both, _| both.remove(key, place)) == 0 {
                continue;
            }
            // Right after a shrink: adds entries that could make it grow, and removes them again.
            shrunk += 1;
            let count = resizes(&mut both, 800, |both, number| match number % 8 {
                0 | 4 => {
                    both.insert_page(chosen.next().unwrap());
                }
                1..4 => {
                    let key = ordinary.next().unwrap();
                    listed.push((key, both.insert_page(key)));
                }
                _ => {
                    let (key, place) = listed.pop().unwrap();
                    both.remove(key, place);
                }
            });
            assert!(count <= 2, "{count} resizes after {shrunk} shrinks");
        }
        assert!(shrunk >= 4, "{shrunk}");
    }

    #[test]
    fn shrinking_segment_shrinks_despite_overflow() {
        for room in [300, 340, 384] {
            let mut both = TableFixture::default();
            let listed: Vec<PageSlot> = (0..30_000).map(|number| both.insert_page(key(number))).collect();
            for number in 0..room {
                both.insert_page(colliding_key(number));
            }
            let count = resizes(&mut both, 30_000, |both, number| {
                both.remove(key(number), listed[number as usize]);
            });
            // Each segment halves a few times; it starts with about 1,500 buckets.
            assert!(count <= 2 * 6, "{room}: {count}");
            assert!((0..room).all(|number| both.find(colliding_key(number)).is_some()));
        }
    }

    /// Block groups that share one address, found by trial.
    fn colliding_groups(count: usize) -> Vec<TableKey> {
        let octets = (0..1u64 << 37).map(|number| TableKey::Group((number >> 3 << 8 | number & 7) << 3));
        let first = KeyAddress::of(TableKey::Group(0));
        octets.filter(|octet| KeyAddress::of(*octet) == first).take(count).collect()
    }

    #[test]
    fn colliding_groups_do_not_exhaust_memory() {
        let both = insert_and_remove_half(&colliding_groups(500));
        assert!(!both.table.overflow.is_empty());
        assert!(both.table.segments.iter().all(|segment| segment.buckets.len() < 100));
    }

    #[test]
    fn keys_crafted_for_one_segment_are_kept() {
        // Few addresses with many keys each, mixed with ordinary keys: growing meets entries that
        // do not fit.
        let hash = |number: u64| {
            let high = number / 8;
            let low = high.rotate_left(32) ^ (number % 8) << 8 ^ 7;
            BlockHash::from_words(low, high)
        };
        let keys: Vec<TableKey> =
            (1..6_000).flat_map(|number| [TableKey::Block(hash(number)), key(number + 7_000)]).collect();
        let both = insert_and_remove_half(&keys);
        assert!(both.table.segments.iter().all(|segment| segment.buckets.len() < 4_000));
    }
}
