//! The one global table: block hash to [`Place`].
//!
//! A bucket is one cache line: eleven places, twelve bits of hash each (tags), and what overflowed from
//! it. A lookup reads one line of the table and one page, where the whole hash is compared. The table is
//! cut into segments that grow one at a time, each at another fill, so that no command waits for more
//! than some small rehashes and memory grows evenly. A segment grows without looking at a
//! hash: bucket number and tag together are all the bits of the hash it uses. Not here: the
//! hashes (`pages.rs`).
//!
//! Nothing here shows outside: two replicas may lay out their tables differently.

use std::collections::BTreeMap;

use super::pages::{Pages, Place};
use crate::cpu::{equal_bytes, prefetch};
use crate::id::BlockHash;

/// Segments. Each is 1/4,096 of the table: at ten million blocks 2,400 entries, rehashed in about ten
/// microseconds. Few in tests, so that these reach the sizes of real ones.
const SEGMENTS_LOG2: u32 = if cfg!(test) { 1 } else { 12 };
/// Entries in a bucket of 64 bytes.
const ENTRIES: usize = 11;
/// Bits of a tag.
const TAG_BITS: u32 = 12;
/// Bits of the hash, below those that name the segment, that place an entry within its segment. Sixteen:
/// with a thousand buckets to a segment (forty million blocks) a tag still tells 64 hashes of a bucket
/// apart.
const FRACTION_BITS: u32 = 16;
/// Share of the entries of a segment that may be filled, in percent, from segment to segment, so that
/// they do not grow at the same time. At 93 one entry in twelve lies in a later bucket than its own.
const FILL_PERCENT: std::ops::Range<usize> = 88..94;
/// A segment shrinks to half when it is filled to one part in so many.
const THIN: u32 = 3;
/// Buckets of a segment that holds anything: a kilobyte. From here on bucket number and tag give back the
/// fraction, so that growing never looks at a hash.
const BUCKETS_MIN: usize = 1 << (FRACTION_BITS - TAG_BITS);
/// Most buckets of a segment: at 28 bits of place no more than seven thousand are filled evenly. Hashes that
/// were chosen to meet in one place go to [`Places::strays`] instead of growing it further.
const BUCKETS_MAX: usize = 1 << 15;
/// Farthest an entry may lie from its own bucket.
const REACH_MAX: usize = 200;
/// Entries of one bucket that may lie in others.
const OVERFLOW_MAX: u8 = 200;
/// Bits of a place.
const PLACE_BITS: u32 = 28;
const PLACE: u32 = (1 << PLACE_BITS) - 1;
/// So many buckets from its own, or more: only the hash tells how many.
const STEP_FAR: usize = 15;
/// Odd multiplier that spreads what two halves of a hash have in common (2^64 over the golden ratio).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// Where a hash belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Address {
    segment: usize,
    /// Position within the segment as a fraction of 2^16.
    fraction: u64,
}

impl Address {
    /// Block hashes are uniform already; the multiplication only guards against hashes made up by hand
    /// (counters in tests).
    #[inline]
    fn of(hash: BlockHash) -> Self {
        let whole = u128::from_le_bytes(hash.0);
        let folded = (whole as u64) ^ ((whole >> 64) as u64).rotate_left(32);
        let mixed = folded.wrapping_mul(SPREAD);
        let below = mixed >> (64 - SEGMENTS_LOG2 - FRACTION_BITS);
        Self {
            segment: (mixed >> (64 - SEGMENTS_LOG2)) as usize,
            fraction: below & ((1 << FRACTION_BITS) - 1),
        }
    }

    fn tag(self) -> u16 {
        self.fraction as u16 & ((1 << TAG_BITS) - 1)
    }

    fn bucket(self, buckets: usize) -> usize {
        ((self.fraction * buckets as u64) >> FRACTION_BITS) as usize
    }
}

/// One cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Bucket {
    /// The lowest eight bits of each tag; then see [`LEN`], [`OVERFLOW`], [`REACH`], [`STEPS`].
    head: [u8; 20],
    /// The place of each entry, and above it the highest four bits of its tag.
    places: [u32; ENTRIES],
}

/// Where in a bucket's head the number of filled entries is; they come first.
const LEN: usize = ENTRIES;
/// Entries that belong here and lie further on.
const OVERFLOW: usize = LEN + 1;
/// How far on the farthest of them ever was.
const REACH: usize = OVERFLOW + 1;
/// Four bits per entry: how many buckets it lies from its own. Zero where there is no entry. The four bits
/// after the last say which tags, by their lowest two bits, overflowed.
const STEPS: usize = REACH + 1;
/// The byte with these bits, and where in it they are.
const OVERFLOWED: (usize, u32) = (STEPS + ENTRIES / 2, 4);

impl Bucket {
    #[inline]
    fn len(&self) -> usize {
        self.head[LEN].into()
    }

    /// One bit per filled entry whose tag has these lowest eight bits.
    #[inline]
    fn candidates(&self, tag: u16) -> u32 {
        let [tags @ .., _, _, _, _] = self.head;
        equal_bytes(tags, tag as u8) & ((1 << self.head[LEN]) - 1)
    }

    /// The place of the first entry with this tag, of those in `candidates`, and the candidates left.
    #[inline]
    fn next(&self, mut candidates: u32, tag: u16) -> Option<(Place, u32)> {
        while candidates != 0 {
            let entry = self.places[candidates.trailing_zeros() as usize];
            candidates &= candidates - 1;
            if entry >> PLACE_BITS == u32::from(tag >> 8) {
                return Some((Place(entry & PLACE), candidates));
            }
        }
        None
    }

    /// Puts an entry in, if there is room.
    #[inline]
    fn push(&mut self, tag: u16, place: u32) -> bool {
        self.push_word(tag as u8, word(tag, place))
    }

    #[inline]
    fn push_word(&mut self, low: u8, word: u32) -> bool {
        let entry = self.len();
        if entry >= ENTRIES {
            return false;
        }
        self.head[entry] = low;
        self.places[entry] = word;
        self.head[LEN] = entry as u8 + 1;
        true
    }

    fn step(&self, entry: usize) -> usize {
        usize::from(self.head[STEPS + entry / 2] >> (entry % 2 * 4) & 0xF)
    }

    fn set_step(&mut self, entry: usize, step: usize) {
        let (byte, shift) = (&mut self.head[STEPS + entry / 2], entry % 2 * 4);
        *byte = *byte & !(0xF << shift) | (step as u8) << shift;
    }

    /// Whether an entry with this tag that belongs here may lie further on.
    #[inline]
    fn may_overflow(&self, tag: u16) -> bool {
        self.head[OVERFLOWED.0] & 1 << (OVERFLOWED.1 + u32::from(tag & 3)) != 0
    }

    /// An entry that belongs here was put further on.
    fn add_overflow(&mut self, tag: u16, step: usize) {
        self.head[OVERFLOW] += 1;
        self.head[REACH] = self.head[REACH].max(step as u8);
        self.head[OVERFLOWED.0] |= 1 << (OVERFLOWED.1 + u32::from(tag & 3));
    }

    /// It is gone.
    fn end_overflow(&mut self) {
        self.head[OVERFLOW] -= 1;
        if self.head[OVERFLOW] == 0 {
            self.head[REACH] = 0;
            self.head[OVERFLOWED.0] &= 0xF;
        }
    }

    fn swap_remove(&mut self, entry: usize) {
        let last = self.len() - 1;
        self.head[entry] = self.head[last];
        self.places[entry] = self.places[last];
        self.set_step(entry, self.step(last));
        self.set_step(last, 0);
        self.head[LEN] -= 1;
    }

    /// The entry with this tag and exactly this place.
    #[inline]
    fn entry_of(&self, tag: u16, place: u32) -> Option<usize> {
        let word = word(tag, place);
        let mut candidates = self.candidates(tag);
        while candidates != 0 {
            let entry = candidates.trailing_zeros() as usize;
            if self.places[entry] == word {
                return Some(entry);
            }
            candidates &= candidates - 1;
        }
        None
    }

    /// The steps of all entries, four bits each, the first lowest.
    #[inline]
    fn steps(&self) -> u64 {
        let [.., a, b, c, d, e, f] = self.head;
        u64::from_le_bytes([a, b, c, d, e, f & 0xF, 0, 0])
    }
}

/// A place, and above it the highest four bits of a tag.
#[inline]
fn word(tag: u16, place: u32) -> u32 {
    place | u32::from(tag >> 8) << PLACE_BITS
}

/// A segment has nothing but its buckets: how many entries they have stands apart ([`Count`]), so that
/// what finds anything stays in the nearest caches.
#[derive(Clone, Debug, Default)]
struct Segment {
    buckets: Box<[Bucket]>,
}

/// How full a segment is.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    entries: u32,
    /// Entries from which on it grows.
    filled: u32,
}

impl Segment {
    #[inline]
    fn find(&self, address: Address, hash: BlockHash, pages: &Pages) -> Option<Place> {
        let home = address.bucket(self.buckets.len());
        let bucket = self.buckets.get(home)?;
        if let Some(place) = found_in(bucket, address.tag(), hash, pages) {
            return Some(place);
        }
        if !bucket.may_overflow(address.tag()) {
            return None;
        }
        self.find_further_on(home, address.tag(), hash, pages)
    }

    #[cold]
    fn find_further_on(&self, home: usize, tag: u16, hash: BlockHash, pages: &Pages) -> Option<Place> {
        let steps = 1..=usize::from(self.buckets[home].head[REACH]);
        let buckets = steps.map(|step| &self.buckets[self.after(home, step)]);
        buckets.filter_map(|bucket| found_in(bucket, tag, hash, pages)).next()
    }

    fn after(&self, home: usize, step: usize) -> usize {
        let bucket = home + step;
        if bucket < self.buckets.len() { bucket } else { bucket - self.buckets.len() }
    }

    /// Puts an entry in, if there is room near enough; the caller counts it.
    #[inline]
    fn put(&mut self, home: usize, tag: u16, place: u32) -> bool {
        self.buckets[home].push(tag, place) || self.put_further_on(home, tag, place)
    }

    #[cold]
    fn put_further_on(&mut self, home: usize, tag: u16, place: u32) -> bool {
        if self.buckets[home].head[OVERFLOW] == OVERFLOW_MAX {
            return false;
        }
        for step in 1..self.buckets.len().min(REACH_MAX) {
            let at = self.after(home, step);
            let bucket = &mut self.buckets[at];
            if bucket.push(tag, place) {
                bucket.set_step(bucket.len() - 1, step.min(STEP_FAR));
                self.buckets[home].add_overflow(tag, step);
                return true;
            }
        }
        false
    }

    /// Takes an entry out; answers whether it was there.
    fn take(&mut self, address: Address, place: u32) -> bool {
        let (home, tag) = (address.bucket(self.buckets.len()), address.tag());
        let Some(bucket) = self.buckets.get_mut(home) else { return false };
        if let Some(entry) = bucket.entry_of(tag, place) {
            bucket.swap_remove(entry);
            return true;
        }
        for step in 1..=usize::from(self.buckets[home].head[REACH]) {
            let at = self.after(home, step);
            if let Some(entry) = self.buckets[at].entry_of(tag, place) {
                self.buckets[at].swap_remove(entry);
                self.buckets[home].end_overflow();
                return true;
            }
        }
        false
    }

    /// The same entries in that many buckets, or in more if they do not fit; with those that fit in none.
    #[cold]
    fn resized(&self, buckets: usize, pages: &Pages) -> (Segment, Vec<Place>) {
        let mut wanted = buckets;
        loop {
            let mut new = Segment { buckets: vec![Bucket::default(); wanted].into() };
            let is_last_try = wanted > 2 * self.buckets.len() || wanted >= BUCKETS_MAX;
            let strays = new.put_all(self, pages, is_last_try);
            if let Some(strays) = strays {
                return (new, strays);
            }
            wanted = grown(wanted);
        }
    }

    /// Puts in all entries of another segment; none when one does not fit and that is not to be borne, else
    /// those that did not.
    fn put_all(&mut self, old: &Segment, pages: &Pages, spill: bool) -> Option<Vec<Place>> {
        let mut strays = Vec::new();
        let (from, to) = (old.buckets.len(), self.buckets.len() as u64);
        for (number, bucket) in old.buckets.iter().enumerate() {
            let first = first_fraction(number, from);
            let mut steps = bucket.steps();
            for entry in 0..bucket.len().min(ENTRIES) {
                let (low, word) = (bucket.head[entry], bucket.places[entry]);
                let tag = u16::from(low) | (word >> PLACE_BITS << 8) as u16;
                let fraction = match (steps & 0xF) as usize {
                    0 => with_tag(first, tag),
                    step => fraction_of(step, number, from, tag, Place(word & PLACE), pages),
                };
                steps >>= 4;
                let home = ((fraction * to) >> FRACTION_BITS) as usize;
                let is_home = self.buckets.get_mut(home).is_some_and(|bucket| bucket.push_word(low, word));
                if !is_home && !self.put_further_on(home, tag, word & PLACE) {
                    if !spill {
                        return None;
                    }
                    strays.push(Place(word & PLACE));
                }
            }
        }
        Some(strays)
    }
}

/// The fraction of an entry that lies that many buckets from its own.
#[cold]
fn fraction_of(step: usize, number: usize, buckets: usize, tag: u16, place: Place, pages: &Pages) -> u64 {
    if step == STEP_FAR {
        return Address::of(pages.hash(place)).fraction;
    }
    let home = if number < step { number + buckets - step } else { number - step };
    with_tag(first_fraction(home, buckets), tag)
}

#[inline]
fn found_in(bucket: &Bucket, tag: u16, hash: BlockHash, pages: &Pages) -> Option<Place> {
    let mut candidates = bucket.candidates(tag);
    while let Some((place, left)) = bucket.next(candidates, tag) {
        if pages.holds(place, hash) {
            return Some(place);
        }
        candidates = left;
    }
    None
}

/// The first of the fractions that fall into a bucket: no more than 2^12,
/// so that the lowest twelve bits tell them apart.
fn first_fraction(bucket: usize, buckets: usize) -> u64 {
    // In 32 bits the division takes half as long, and no segment has 2^16 buckets.
    ((bucket as u32) << FRACTION_BITS).div_ceil(buckets as u32).into()
}

/// The fraction of a bucket with this tag.
fn with_tag(first: u64, tag: u16) -> u64 {
    first + u64::from(tag.wrapping_sub(first as u16) & ((1 << TAG_BITS) - 1))
}

/// Place of every listed block.
#[derive(Clone, Debug)]
pub(super) struct Places {
    segments: Vec<Segment>,
    /// One per segment.
    counts: Vec<Count>,
    /// Blocks that found no room near their bucket. Only hashes that were chosen for it come here, two
    /// hundred at one address and more: they must cost little more than others, and nothing be lost.
    strays: BTreeMap<BlockHash, Place>,
    len: u64,
}

impl Default for Places {
    fn default() -> Self {
        let segments = 1 << SEGMENTS_LOG2;
        Self {
            segments: vec![Segment::default(); segments],
            counts: vec![Count::default(); segments],
            strays: BTreeMap::new(),
            len: 0,
        }
    }
}

impl Places {
    /// Listed blocks.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    #[inline]
    pub(super) fn find(&self, hash: BlockHash, pages: &Pages) -> Option<Place> {
        let address = Address::of(hash);
        let found = self.segments[address.segment].find(address, hash, pages);
        if found.is_none() && !self.strays.is_empty() {
            return self.strays.get(&hash).copied();
        }
        found
    }

    #[inline]
    fn bucket(&self, address: Address) -> Option<&Bucket> {
        let buckets = &self.segments[address.segment].buckets;
        buckets.get(address.bucket(buckets.len()))
    }

    /// Asks the memory for the bucket of a hash.
    #[inline]
    pub(super) fn prefetch(&self, hash: BlockHash) {
        if let Some(bucket) = self.bucket(Address::of(hash)) {
            prefetch(bucket);
        }
    }

    /// Asks the memory for the page of a hash whose bucket is there. Answers false when the hash is surely
    /// not listed.
    #[inline]
    pub(super) fn prefetch_page(&self, hash: BlockHash, pages: &Pages) -> bool {
        let address = Address::of(hash);
        let Some(bucket) = self.bucket(address) else { return !self.strays.is_empty() };
        let candidates = bucket.candidates(address.tag());
        match bucket.next(candidates, address.tag()) {
            Some((place, _)) => pages.prefetch(place),
            None => return bucket.may_overflow(address.tag()) || !self.strays.is_empty(),
        }
        true
    }

    /// Lists a block, unless it is listed; answers whether it was not. Its hash lies at its place already.
    #[inline]
    pub(super) fn insert(&mut self, hash: BlockHash, place: Place, pages: &Pages) -> bool {
        let address = Address::of(hash);
        let segment = &mut self.segments[address.segment];
        let count = &mut self.counts[address.segment];
        // Most often the one look that says that it is new also finds room for it.
        let (home, tag) = (address.bucket(segment.buckets.len()), address.tag());
        if let Some(bucket) = segment.buckets.get_mut(home)
            && count.entries < count.filled
            && self.strays.is_empty()
            && bucket.next(bucket.candidates(tag), tag).is_none()
            && (!bucket.may_overflow(tag) || segment.find_further_on(home, tag, hash, pages).is_none())
            && segment.put(home, tag, place.0)
        {
            count.entries += 1;
            self.len += 1;
            return true;
        }
        self.insert_slowly(address, hash, place, pages)
    }

    #[cold]
    fn insert_slowly(&mut self, address: Address, hash: BlockHash, place: Place, pages: &Pages) -> bool {
        if self.find(hash, pages).is_some() {
            return false;
        }
        self.len += 1;
        loop {
            let segment = &mut self.segments[address.segment];
            let count = &mut self.counts[address.segment];
            let buckets = segment.buckets.len();
            let may_grow = buckets < BUCKETS_MAX;
            let fits = count.entries < count.filled || !may_grow;
            if fits && segment.put(address.bucket(buckets), address.tag(), place.0) {
                count.entries += 1;
                return true;
            }
            // More buckets help when there are many entries, not when they all belong together.
            let is_sparse = fits && count.entries < count.filled / 2;
            if !may_grow || is_sparse {
                self.strays.insert(hash, place);
                return true;
            }
            self.resize(address.segment, grown(buckets), pages);
        }
    }

    fn resize(&mut self, number: usize, buckets: usize, pages: &Pages) {
        let (segment, strays) = self.segments[number].resized(buckets, pages);
        let count = &mut self.counts[number];
        count.entries -= strays.len() as u32;
        count.filled = filled(segment.buckets.len(), number);
        self.segments[number] = segment;
        self.strays.extend(strays.into_iter().map(|place| (pages.hash(place), place)));
    }

    /// Unlists a block that is listed at this place.
    #[inline]
    pub(super) fn remove(&mut self, hash: BlockHash, place: Place, pages: &Pages) {
        let address = Address::of(hash);
        self.len -= 1;
        if !self.segments[address.segment].take(address, place.0) {
            let stray = self.strays.remove(&hash);
            debug_assert_eq!(stray, Some(place), "a listed block is in the table or beside it");
            return;
        }
        let count = &mut self.counts[address.segment];
        count.entries -= 1;
        let buckets = self.segments[address.segment].buckets.len();
        if count.entries * THIN < count.filled && buckets > BUCKETS_MIN {
            self.resize(address.segment, grown(buckets / 2 - 1), pages);
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
    let step = 1usize << (next.ilog2() - 2);
    next.div_ceil(step) * step
}

/// Entries from which on a segment grows.
fn filled(buckets: usize, segment: usize) -> u32 {
    let percent = FILL_PERCENT.start + segment % FILL_PERCENT.len();
    (buckets * ENTRIES * percent / 100) as u32
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn bucket_and_tag_give_back_the_fraction() {
        for buckets in [16, 17, 20, 300, 1_000, 4_099] {
            for step in 0..70_000u64 {
                let fraction = step.wrapping_mul(SPREAD) >> (64 - FRACTION_BITS);
                let address = Address { segment: 0, fraction };
                let first = first_fraction(address.bucket(buckets), buckets);
                assert_eq!(with_tag(first, address.tag()), fraction, "{buckets} buckets");
            }
        }
    }

    #[test]
    fn sizes_are_those_of_allocators() {
        let sizes: Vec<usize> = std::iter::successors(Some(0), |size| Some(grown(*size))).take(14).collect();
        assert_eq!(sizes, [0, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]);
    }

    #[test]
    fn a_segment_keeps_what_it_has_while_it_grows_and_shrinks() {
        let mut pages = Pages::default();
        let mut places = Places::default();
        let hash = |number: u64| BlockHash((u128::from(number) * 0x100_0000_0100_0300).to_le_bytes());
        let mut listed = Vec::new();
        let mut page = 0;
        for number in 0..40_000u64 {
            let slot = number as u32 % 8;
            if slot == 0 {
                page = pages.take().unwrap();
            }
            let place = Place::new(page, slot);
            pages.write(place, &[hash(number)], Some((0, 0)));
            assert!(places.insert(hash(number), place, &pages));
            listed.push(place);
        }
        let buckets = |places: &Places| places.segments.iter().map(|one| one.buckets.len()).sum::<usize>();
        assert!(places.segments.iter().any(|one| one.buckets.iter().any(|bucket| bucket.head[OVERFLOW] > 0)));
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

    /// Lists hashes, finds each, removes every second, finds the rest.
    fn live(hashes: &[BlockHash]) -> Places {
        let (mut pages, mut places) = (Pages::default(), Places::default());
        let mut listed = Vec::new();
        let mut page = 0;
        for (slot, hash) in (0..8).cycle().zip(hashes) {
            if slot == 0 {
                page = pages.take().unwrap();
            }
            let place = Place::new(page, slot);
            pages.write(place, &[*hash], Some((0, 0)));
            assert!(places.insert(*hash, place, &pages));
            assert!(!places.insert(*hash, place, &pages), "it is listed already");
            listed.push((*hash, place));
        }
        assert!(listed.iter().all(|(hash, place)| places.find(*hash, &pages) == Some(*place)));
        assert!(listed.iter().all(|(hash, _)| places.prefetch_page(*hash, &pages)));
        for (hash, place) in listed.iter().step_by(2) {
            places.remove(*hash, *place, &pages);
        }
        for (number, (hash, place)) in listed.iter().enumerate() {
            assert_eq!(places.find(*hash, &pages), (number % 2 == 1).then_some(*place));
        }
        assert_eq!(places.len(), listed.len() as u64 / 2);
        places
    }

    #[test]
    fn hashes_that_were_chosen_to_meet_are_kept_without_end_of_memory() {
        // Both halves cancel in the address: all of these have the same one.
        let hash = |number: u64| {
            let low = number.rotate_left(32) ^ 7;
            BlockHash((u128::from(number) << 64 | u128::from(low)).to_le_bytes())
        };
        let hashes: Vec<BlockHash> = (0..4_000).map(hash).collect();
        assert!(hashes.iter().all(|hash| Address::of(*hash) == Address::of(hashes[0])));
        let places = live(&hashes);
        assert!(!places.strays.is_empty());
        assert!(places.segments.iter().all(|segment| segment.buckets.len() < 100));
    }

    #[test]
    fn hashes_that_were_chosen_for_one_segment_are_kept() {
        // Few addresses, each often, beside ordinary ones: growing meets what does not fit.
        let hash = |number: u64| {
            let high = number / 8;
            let low = high.rotate_left(32) ^ (number % 8) << 8 ^ 7;
            BlockHash((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
        };
        let ordinary = |number: u64| BlockHash((u128::from(number) * 0x100_0000_0100_0300 + 7).to_le_bytes());
        let hashes: Vec<BlockHash> =
            (1..6_000).flat_map(|number| [hash(number), ordinary(number << 20)]).collect();
        let places = live(&hashes);
        assert!(places.segments.iter().all(|segment| segment.buckets.len() < 4_000));
    }
}
