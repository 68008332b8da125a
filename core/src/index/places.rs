//! The one global table: block hash to [`Place`].
//!
//! A bucket is one cache line: ten places, sixteen bits of hash each (tags), and what overflowed from it.
//! A lookup reads one line of the table and one of the pages, where the whole hash is compared. The table
//! is cut into segments that grow one at a time, each at another fill, so that no command waits for more
//! than some small rehashes and memory grows evenly. A segment with 16 buckets or more grows
//! without looking at a hash: bucket number and tag together are all the bits of the hash it uses.
//! Not here: the hashes (`pages.rs`).
//!
//! Nothing here shows outside: two replicas may lay out their tables differently.

use std::hint::black_box;

use super::pages::{Pages, Place};
use crate::id::BlockHash;

/// Segments. Each is 1/1,024 of the table: at ten million blocks ten thousand entries, rehashed in about
/// thirty microseconds. Few in tests, so that these reach the sizes of real ones.
const SEGMENTS_LOG2: u32 = if cfg!(test) { 1 } else { 10 };
/// Entries in a bucket of 64 bytes.
const ENTRIES: usize = 10;
/// Bits of the hash, below those that name the segment, that place an entry within its segment.
/// Twenty: with six thousand buckets to a segment (fifty million blocks) a tag still tells 170 hashes of
/// a bucket apart.
const FRACTION_BITS: u32 = 20;
/// Buckets from which on bucket number and tag give back the fraction.
const EXACT_BUCKETS: u64 = 1 << (FRACTION_BITS - 16);
/// Share of the entries of a segment that may be filled, in percent, from segment to segment, so that
/// they do not grow at the same time. At 95 one entry in ten lies in a later bucket than its own; on
/// average over the sizes of a segment one in twenty.
const FILL_PERCENT: std::ops::Range<usize> = 89..96;
/// Share of the entries below which a segment shrinks, in percent.
const THIN_PERCENT: usize = 30;
/// Buckets of a segment that holds anything.
const BUCKETS_MIN: usize = 4;
/// Farthest an entry may lie from its own bucket.
const REACH_MAX: usize = 200;
/// Set in a place that lies in another bucket than its own.
const DISPLACED: u32 = 1 << 31;
/// Odd multiplier that spreads what two halves of a hash have in common (2^64 over the golden ratio).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// Where a hash belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Address {
    segment: usize,
    /// Position within the segment as a fraction of 2^20.
    fraction: u64,
}

impl Address {
    /// Block hashes are uniform already; the multiplication only guards against hashes made up by hand
    /// (counters in tests).
    fn of(hash: BlockHash) -> Self {
        let whole = u128::from_le_bytes(hash.0);
        let folded = (whole as u64) ^ ((whole >> 64) as u64).rotate_left(32);
        let product = u128::from(folded) * u128::from(SPREAD);
        let mixed = (product as u64) ^ (product >> 64) as u64;
        let below = mixed >> (64 - SEGMENTS_LOG2 - FRACTION_BITS);
        Self {
            segment: (mixed >> (64 - SEGMENTS_LOG2)) as usize,
            fraction: below & ((1 << FRACTION_BITS) - 1),
        }
    }

    fn tag(self) -> u16 {
        self.fraction as u16
    }

    fn bucket(self, buckets: usize) -> usize {
        ((self.fraction * buckets as u64) >> FRACTION_BITS) as usize
    }
}

/// One cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    places: [u32; ENTRIES],
    tags: [u16; ENTRIES],
    /// Entries that belong here and lie further on.
    overflow: u16,
    /// Filled entries; they come first.
    len: u8,
    /// How far on the farthest of them ever was.
    reach: u8,
}

impl Bucket {
    /// One bit per filled entry with this tag.
    fn matches(&self, tag: u16) -> u32 {
        let mut found = 0;
        for (entry, own) in self.tags.iter().enumerate() {
            found |= u32::from(*own == tag) << entry;
        }
        found & ((1 << self.len) - 1)
    }

    fn push(&mut self, tag: u16, place: u32) {
        let entry = usize::from(self.len);
        self.tags[entry] = tag;
        self.places[entry] = place;
        self.len += 1;
    }

    fn is_full(&self) -> bool {
        usize::from(self.len) == ENTRIES
    }

    fn swap_remove(&mut self, entry: usize) {
        let last = usize::from(self.len) - 1;
        self.tags[entry] = self.tags[last];
        self.places[entry] = self.places[last];
        self.len -= 1;
    }

    /// The entry with exactly this place.
    fn entry_of(&self, place: u32) -> Option<usize> {
        self.places[..usize::from(self.len)].iter().position(|own| own & !DISPLACED == place)
    }
}

#[derive(Clone, Debug, Default)]
struct Segment {
    buckets: Vec<Bucket>,
    entries: usize,
}

impl Segment {
    fn find(&self, address: Address, hash: BlockHash, pages: &Pages) -> Option<Place> {
        if self.buckets.is_empty() {
            return None;
        }
        let home = address.bucket(self.buckets.len());
        let bucket = &self.buckets[home];
        if let Some(place) = found_in(bucket, address.tag(), hash, pages) {
            return Some(place);
        }
        if bucket.overflow == 0 {
            return None;
        }
        let next = (1..=usize::from(bucket.reach)).map(|step| &self.buckets[self.after(home, step)]);
        next.filter_map(|bucket| found_in(bucket, address.tag(), hash, pages)).next()
    }

    fn after(&self, home: usize, step: usize) -> usize {
        let bucket = home + step;
        if bucket < self.buckets.len() { bucket } else { bucket - self.buckets.len() }
    }

    /// Puts an entry in, if there is room near enough.
    fn put(&mut self, address: Address, place: u32) -> bool {
        let buckets = self.buckets.len();
        let home = address.bucket(buckets);
        if !self.buckets[home].is_full() {
            self.buckets[home].push(address.tag(), place);
            self.entries += 1;
            return true;
        }
        for step in 1..buckets.min(REACH_MAX) {
            let at = self.after(home, step);
            if !self.buckets[at].is_full() {
                self.buckets[at].push(address.tag(), place | DISPLACED);
                let bucket = &mut self.buckets[home];
                bucket.overflow += 1;
                bucket.reach = bucket.reach.max(step as u8);
                self.entries += 1;
                return true;
            }
        }
        false
    }

    /// Takes an entry out. It must be there.
    fn take(&mut self, address: Address, place: u32) {
        let home = address.bucket(self.buckets.len());
        for step in 0..=usize::from(self.buckets[home].reach) {
            let at = self.after(home, step);
            let Some(entry) = self.buckets[at].entry_of(place) else { continue };
            self.buckets[at].swap_remove(entry);
            self.entries -= 1;
            if step > 0 {
                let bucket = &mut self.buckets[home];
                bucket.overflow -= 1;
                bucket.reach = if bucket.overflow == 0 { 0 } else { bucket.reach };
            }
            return;
        }
        debug_assert!(false, "a listed block is in the table");
    }

    /// Moves every entry into that many buckets, or more if they do not fit.
    fn resize(&mut self, buckets: usize, pages: &Pages) {
        let old = std::mem::take(self);
        let mut wanted = buckets;
        'again: loop {
            *self = Segment { buckets: vec![Bucket::default(); wanted], entries: 0 };
            for (number, bucket) in old.buckets.iter().enumerate() {
                let fractions = Fractions::of(number as u64, old.buckets.len() as u64);
                for entry in 0..usize::from(bucket.len) {
                    let place = bucket.places[entry] & !DISPLACED;
                    let fraction = fractions.filter(|_| bucket.places[entry] & DISPLACED == 0);
                    let fraction = fraction.map(|from| from.with_tag(bucket.tags[entry]));
                    let address = match fraction {
                        Some(fraction) => Address { segment: 0, fraction },
                        None => Address::of(pages.hash(Place(place))),
                    };
                    if !self.put(address, place) {
                        wanted = grown(wanted);
                        continue 'again;
                    }
                }
            }
            return;
        }
    }
}

fn found_in(bucket: &Bucket, tag: u16, hash: BlockHash, pages: &Pages) -> Option<Place> {
    let mut found = bucket.matches(tag);
    while found != 0 {
        let place = Place(bucket.places[found.trailing_zeros() as usize] & !DISPLACED);
        if pages.hash(place) == hash {
            return Some(place);
        }
        found &= found - 1;
    }
    None
}

/// The fractions that fall into one bucket: fewer than 2^16, so that the lowest 16 bits tell them apart.
#[derive(Clone, Copy, Debug)]
struct Fractions {
    first: u64,
}

impl Fractions {
    /// Nothing for segments so small that the tag does not tell them apart.
    fn of(bucket: u64, buckets: u64) -> Option<Self> {
        let first = (bucket << FRACTION_BITS).div_ceil(buckets.max(1));
        (buckets >= EXACT_BUCKETS).then_some(Self { first })
    }

    fn with_tag(self, tag: u16) -> u64 {
        let fraction = self.first & !0xFFFF | u64::from(tag);
        if fraction < self.first { fraction + 0x1_0000 } else { fraction }
    }
}

/// Place of every listed block.
#[derive(Clone, Debug)]
pub(super) struct Places {
    segments: Vec<Segment>,
    len: u64,
}

impl Default for Places {
    fn default() -> Self {
        Self { segments: vec![Segment::default(); 1 << SEGMENTS_LOG2], len: 0 }
    }
}

impl Places {
    /// Listed blocks.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn find(&self, hash: BlockHash, pages: &Pages) -> Option<Place> {
        let address = Address::of(hash);
        self.segments[address.segment].find(address, hash, pages)
    }

    /// Asks the memory for the buckets of these hashes, all at once: what a later probe of each would
    /// wait for one after the other.
    pub(super) fn touch<'a>(&self, hashes: impl Iterator<Item = &'a BlockHash>) {
        let mut lines = 0;
        for hash in hashes {
            let address = Address::of(*hash);
            let buckets = &self.segments[address.segment].buckets;
            lines ^= buckets.get(address.bucket(buckets.len())).map_or(0, |bucket| bucket.len);
        }
        black_box(lines);
    }

    /// Lists a block that is not listed.
    pub(super) fn insert(&mut self, hash: BlockHash, place: Place, pages: &Pages) {
        let address = Address::of(hash);
        let segment = &mut self.segments[address.segment];
        if segment.entries >= filled(segment.buckets.len(), address.segment) {
            segment.resize(grown(segment.buckets.len()), pages);
        }
        while !segment.put(address, place.0) {
            segment.resize(grown(segment.buckets.len()), pages);
        }
        self.len += 1;
    }

    /// Unlists a block that is listed at this place.
    pub(super) fn remove(&mut self, hash: BlockHash, place: Place, pages: &Pages) {
        let address = Address::of(hash);
        let segment = &mut self.segments[address.segment];
        segment.take(address, place.0);
        self.len -= 1;
        let buckets = segment.buckets.len();
        if segment.entries * 100 < buckets * ENTRIES * THIN_PERCENT && buckets > BUCKETS_MIN {
            segment.resize(grown(buckets / 2 - 1), pages);
        }
    }
}

/// The next size of a segment: 4, 5, 6 or 7 times a power of two, a seventh to a quarter more. These are
/// the sizes in which allocators hand out memory, so that nothing of it is lost.
fn grown(buckets: usize) -> usize {
    let next = buckets + 1;
    if next <= BUCKETS_MIN {
        return BUCKETS_MIN;
    }
    let step = 1 << (next.ilog2() - 2);
    next.div_ceil(step) * step
}

/// Entries from which on a segment grows.
fn filled(buckets: usize, segment: usize) -> usize {
    let percent = FILL_PERCENT.start + segment % FILL_PERCENT.len();
    buckets * ENTRIES * percent / 100
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn bucket_and_tag_give_back_the_fraction() {
        for buckets in [16, 17, 20, 300, 1_000, 4_099, 65_536] {
            for step in 0..100_000u64 {
                let fraction = step.wrapping_mul(SPREAD) >> (64 - FRACTION_BITS);
                let address = Address { segment: 0, fraction };
                let bucket = address.bucket(buckets) as u64;
                let fractions = Fractions::of(bucket, buckets as u64).unwrap();
                assert_eq!(fractions.with_tag(address.tag()), fraction, "{buckets} buckets");
            }
        }
        assert!(Fractions::of(0, 15).is_none());
    }

    #[test]
    fn sizes_are_those_of_allocators() {
        let sizes: Vec<usize> = std::iter::successors(Some(0), |size| Some(grown(*size))).take(14).collect();
        assert_eq!(sizes, [0, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]);
    }

    #[test]
    fn a_segment_keeps_what_it_has_while_it_grows_and_shrinks() {
        let mut pages = Pages::default();
        let mut places = Places::default();
        let hash = |number: u64| BlockHash((u128::from(number) * 0x1_0000_0001_0003).to_le_bytes());
        let mut listed = Vec::new();
        let mut page = 0;
        for number in 0..40_000u64 {
            let slot = number as u32 % 8;
            if slot == 0 {
                page = pages.take(0, 0).unwrap();
            }
            let place = Place::new(page, slot);
            pages.list(place, &[hash(number)]);
            places.insert(hash(number), place, &pages);
            listed.push(place);
        }
        let buckets = |places: &Places| places.segments.iter().map(|one| one.buckets.len()).sum::<usize>();
        assert!(places.segments.iter().all(|one| one.buckets.len() > EXACT_BUCKETS as usize));
        assert!(places.segments.iter().any(|one| one.buckets.iter().any(|bucket| bucket.overflow > 0)));
        let most = buckets(&places);
        assert!(most * ENTRIES < 40_000 * 100 / 70, "{most} buckets");
        for (number, place) in listed.iter().enumerate() {
            assert_eq!(places.find(hash(number as u64), &pages), Some(*place));
        }
        assert_eq!(places.find(hash(40_000), &pages), None);
        for (number, place) in listed.iter().enumerate().filter(|(number, _)| number % 64 != 0) {
            places.remove(hash(number as u64), *place, &pages);
        }
        assert_eq!(places.len(), 625);
        assert!(buckets(&places) * 12 < most, "it shrank");
        for (number, place) in listed.iter().enumerate() {
            let expected = (number % 64 == 0).then_some(*place);
            assert_eq!(places.find(hash(number as u64), &pages), expected);
        }
    }
}
