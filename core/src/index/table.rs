//! The one global table: a [`Key`] to a [`Place`].
//!
//! A bucket is one cache line: twelve places, twelve bits of each key's address (tags), and what passed it by because
//! it was full. A lookup reads one line of the table and one page, where the whole key is compared. The
//! table is cut into segments that grow one at a time, each at another fill, so that no command waits for
//! more than some small rehashes and memory grows evenly. A segment grows without looking at the pages of
//! entries that lie in their own buckets: bucket number and tag together are all the bits of the address that it
//! uses. Not here: the hashes (`pages.rs`), and which of a block's two keys finds it (`places.rs`).
//!
//! Nothing here shows outside: two replicas may lay out their tables differently.

use std::collections::BTreeMap;

use super::pages::{Pages, Place};
use crate::cpu::{equal_bytes, prefetch};
use crate::id::BlockHash;

/// Segments. Each is 1/256 of the table: at ten million blocks five thousand octets, rehashed in some
/// thirty microseconds. More would be rehashed sooner, but where they lie would not stay in the nearest
/// caches, and every lookup would wait for that first; and each takes four kilobytes as soon as it has an entry.
/// Few in tests, so that these reach the sizes of real ones.
const SEGMENTS_LOG2: u32 = if cfg!(test) { 1 } else { 8 };
/// Entries in a bucket of 64 bytes.
const ENTRIES: usize = 12;
/// Bits of a tag.
const TAG_BITS: u32 = 12;
/// Bits of the address, below those that name the segment, that place an entry within its segment: with four
/// thousand buckets to a segment (a hundred million blocks) a tag still tells 64 keys of a bucket apart.
const FRACTION_BITS: u32 = 18;
/// Share of the entries of a segment that may be filled, in percent, from segment to segment, so that
/// they do not grow at the same time. At 96 one entry in ten lies in a later bucket than its own.
const FILL_PERCENT: std::ops::Range<usize> = 94..99;
/// A segment shrinks to half when it is filled to one part in so many.
const THIN: u32 = 3;
/// Buckets of a segment that holds anything: four kilobytes. From here on bucket number and tag give back the
/// fraction, so that growing hardly looks at a hash.
const BUCKETS_MIN: usize = 1 << (FRACTION_BITS - TAG_BITS);
/// Most buckets of a segment: 2^25 pages, each with four entries, fill no more than 45 thousand evenly. Keys that
/// were chosen to meet in one place go to [`Table::strays`] instead of growing it further.
const BUCKETS_MAX: usize = 1 << 16;
/// Buckets in which an entry may lie. Where three of four are full, one entry in ten thousand finds no room in
/// 32 of them, and the segment grows early.
const PROBES_MAX: usize = 32;
/// Bits of a place.
const PLACE_BITS: u32 = 28;
const PLACE: u32 = (1 << PLACE_BITS) - 1;
/// Odd multiplier that spreads what two halves of a hash have in common (2^64 over the golden ratio).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// What an entry is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// An octet, by what its blocks have in common. The entry names the first slot of one page, its anchor.
    Octet(u64),
    /// A block of a page that is no anchor. The entry names its place.
    Block(BlockHash),
}

impl Key {
    /// By what the entry with this place is found.
    fn of(place: Place, pages: &Pages) -> Self {
        if pages.is_anchor(place.page()) {
            Key::Octet(pages.octet(place.page()))
        } else {
            Key::Block(pages.hash(place))
        }
    }

    /// Whether an entry with this place is found by this key.
    #[inline]
    fn names(self, place: Place, pages: &Pages) -> bool {
        match self {
            Key::Octet(octet) => pages.is_anchor_of(place.page(), octet),
            Key::Block(hash) => pages.holds(place, hash) && !pages.is_anchor(place.page()),
        }
    }
}

/// Where a key belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Address {
    segment: usize,
    /// Position within the segment as a fraction of 2^18.
    fraction: u64,
}

impl Address {
    /// Block hashes are uniform already; the multiplication only guards against hashes made up by hand
    /// (counters in tests).
    #[inline]
    fn of(key: Key) -> Self {
        let folded = match key {
            Key::Octet(octet) => octet,
            Key::Block(hash) => {
                let whole = u128::from_le_bytes(hash.0);
                (whole as u64) ^ ((whole >> 64) as u64).rotate_left(32)
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
    head: [u8; 16],
    /// The place of each entry, and above it the highest four bits of its tag.
    places: [u32; ENTRIES],
}

/// In a bucket's meta word: how many entries are filled, the first ones.
const LEN: u32 = 0xF;
/// A bit for each entry that belongs to another bucket.
const AWAY: u32 = 4;
/// A bit for each class of tags of which an entry passed by, since the last time none had.
const PASSED: u32 = AWAY + ENTRIES as u32;
/// Entries that found this bucket full and lie further on; from 255 on nobody knows how many.
const PASSERS: u32 = PASSED + 8;
const PASSERS_MAX: u32 = 0xFF;

impl Bucket {
    #[inline]
    fn meta(&self) -> u32 {
        let [.., a, b, c, d] = self.head;
        u32::from_le_bytes([a, b, c, d])
    }

    #[inline]
    fn set_meta(&mut self, meta: u32) {
        self.head[ENTRIES..].copy_from_slice(&meta.to_le_bytes());
    }

    #[inline]
    fn len(&self) -> usize {
        (self.meta() & LEN) as usize
    }

    /// One bit per filled entry whose tag has these lowest eight bits.
    #[inline]
    fn candidates(&self, tag: u16) -> u32 {
        equal_bytes(self.head, tag as u8) & ((1 << (self.meta() & LEN)) - 1)
    }

    /// The place of the first entry with this tag, of those in `candidates`, and the candidates left.
    #[inline]
    fn next(&self, mut candidates: u32, tag: u16) -> Option<(Place, u32)> {
        while candidates != 0 {
            let entry = *self.places.get(candidates.trailing_zeros() as usize)?;
            candidates &= candidates - 1;
            if entry >> PLACE_BITS == u32::from(tag >> 8) {
                return Some((Place(entry & PLACE), candidates));
            }
        }
        None
    }

    /// Puts an entry in, if there is room; `away` is one if it belongs to another bucket, else zero.
    #[inline]
    fn push(&mut self, low: u8, word: u32, away: u32) -> bool {
        let meta = self.meta();
        let entry = (meta & LEN) as usize;
        let Some(own) = self.places.get_mut(entry) else { return false };
        *own = word;
        self.head[entry] = low;
        self.set_meta((meta + 1) | away << (AWAY + entry as u32));
        true
    }

    /// Whether an entry with this tag may lie further on.
    #[inline]
    fn was_passed(&self, tag: u16) -> bool {
        self.meta() & class(tag) != 0
    }

    /// An entry found this bucket full.
    fn pass(&mut self, tag: u16) {
        let meta = self.meta() | class(tag);
        let is_known = meta >> PASSERS < PASSERS_MAX;
        self.set_meta(meta + (u32::from(is_known) << PASSERS));
    }

    /// It is gone.
    fn unpass(&mut self) {
        let meta = self.meta();
        match meta >> PASSERS {
            PASSERS_MAX => {}
            1 => self.set_meta(meta & ((1 << PASSED) - 1)),
            _ => self.set_meta(meta - (1 << PASSERS)),
        }
    }

    #[inline]
    fn swap_remove(&mut self, entry: usize) {
        let meta = self.meta();
        let last = (meta & LEN) as usize - 1;
        self.head[entry] = self.head[last];
        self.places[entry] = self.places[last];
        let away = meta >> AWAY >> last & 1;
        let kept = meta & !((1 << entry | 1 << last) << AWAY);
        // Where the last one is taken out, nothing comes in its place.
        let moved = if entry == last { 0 } else { away << entry << AWAY };
        self.set_meta((kept | moved) - 1);
    }

    /// The entry with this tag and exactly this place.
    #[inline]
    fn entry_of(&self, tag: u16, place: u32) -> Option<usize> {
        let word = word(tag, place);
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

/// The bit that says that tags like this one passed by.
#[inline]
fn class(tag: u16) -> u32 {
    1 << (PASSED + u32::from(tag & 7))
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
    fn find(&self, address: Address, key: Key, pages: &Pages) -> Option<Place> {
        let home = address.bucket(self.buckets.len());
        let bucket = self.buckets.get(home)?;
        if let Some(place) = found_in(bucket, address.tag(), key, pages) {
            return Some(place);
        }
        if !bucket.was_passed(address.tag()) {
            return None;
        }
        self.find_further_on(home, address.tag(), key, pages)
    }

    #[cold]
    fn find_further_on(&self, home: usize, tag: u16, key: Key, pages: &Pages) -> Option<Place> {
        for probe in 1..PROBES_MAX {
            let bucket = &self.buckets[self.nth(home, tag, probe)];
            if let Some(place) = found_in(bucket, tag, key, pages) {
                return Some(place);
            }
            if !bucket.was_passed(tag) {
                return None;
            }
        }
        None
    }

    /// The buckets where an entry may lie, in turn: its own, the other one of the pair that processors load
    /// together, then others at a distance that differs from tag to tag, so that full ones do not gather.
    #[inline]
    fn nth(&self, home: usize, tag: u16, probe: usize) -> usize {
        match probe {
            0 => home,
            1 => home ^ 1,
            // Odd, and the number of buckets is even: it does not come back to its own at once.
            _ => (home + (probe - 1) * (usize::from(tag >> 3) | 1)) % self.buckets.len(),
        }
    }

    /// Puts an entry in, if there is room near enough; the caller counts it.
    #[inline]
    fn put(&mut self, home: usize, tag: u16, place: u32) -> bool {
        self.buckets[home].push(tag as u8, word(tag, place), 0) || self.put_further_on(home, tag, place)
    }

    #[cold]
    fn put_further_on(&mut self, home: usize, tag: u16, place: u32) -> bool {
        for probe in 1..PROBES_MAX {
            let at = self.nth(home, tag, probe);
            if self.buckets[at].push(tag as u8, word(tag, place), 1) {
                (0..probe).for_each(|passed| self.buckets[self.nth(home, tag, passed)].pass(tag));
                return true;
            }
        }
        false
    }

    /// Takes an entry out; answers whether it was there.
    #[inline]
    fn take(&mut self, address: Address, place: u32) -> bool {
        let (home, tag) = (address.bucket(self.buckets.len()), address.tag());
        let Some(bucket) = self.buckets.get_mut(home) else { return false };
        if let Some(entry) = bucket.entry_of(tag, place) {
            bucket.swap_remove(entry);
            return true;
        }
        bucket.was_passed(tag) && self.take_further_on(home, tag, place)
    }

    #[cold]
    fn take_further_on(&mut self, home: usize, tag: u16, place: u32) -> bool {
        for probe in 1..PROBES_MAX {
            let at = self.nth(home, tag, probe);
            if let Some(entry) = self.buckets[at].entry_of(tag, place) {
                self.buckets[at].swap_remove(entry);
                (0..probe).for_each(|passed| self.buckets[self.nth(home, tag, passed)].unpass());
                return true;
            }
        }
        false
    }

    /// The same entries in that many buckets, or in up to twice as many as now if they do not fit; with those that
    /// still do not. One that is to be smaller gets smaller: else its next entry that goes would try that again.
    #[cold]
    fn resized(&self, buckets: usize, pages: &Pages) -> (Segment, Vec<Place>) {
        let mut wanted = buckets;
        loop {
            let mut new = Segment { buckets: vec![Bucket::default(); wanted].into() };
            let now = self.buckets.len();
            let is_last_try = wanted < now || wanted >= 2 * now || wanted >= BUCKETS_MAX;
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
        let mut late: Vec<(u64, u32)> = Vec::new();
        let mut away: Vec<Place> = Vec::new();
        let (from, to) = (old.buckets.len(), self.buckets.len() as u64);
        for (number, bucket) in old.buckets.iter().enumerate() {
            let first = first_fraction(number, from);
            let is_away = bucket.meta() >> AWAY;
            for (entry, word) in bucket.places[..bucket.len().min(ENTRIES)].iter().enumerate() {
                if is_away & 1 << entry != 0 {
                    let place = Place(word & PLACE);
                    pages.prefetch(place);
                    away.push(place);
                    continue;
                }
                let low = bucket.head[entry];
                let tag = u16::from(low) | (word >> PLACE_BITS << 8) as u16;
                let fraction = with_tag(first, tag);
                let home = ((fraction * to) >> FRACTION_BITS) as usize;
                if !self.buckets[home].push(low, *word, 0) {
                    late.push((fraction, word & PLACE));
                }
            }
        }
        let far = away.iter().map(|place| (Address::of(Key::of(*place, pages)).fraction, place.0));
        let mut strays = Vec::new();
        for (fraction, place) in far.chain(late) {
            let home = ((fraction * to) >> FRACTION_BITS) as usize;
            if !self.put(home, tag_of(fraction), place) {
                if !spill {
                    return None;
                }
                strays.push(Place(place));
            }
        }
        Some(strays)
    }
}

#[inline]
fn found_in(bucket: &Bucket, tag: u16, key: Key, pages: &Pages) -> Option<Place> {
    let mut candidates = bucket.candidates(tag);
    while let Some((place, left)) = bucket.next(candidates, tag) {
        if key.names(place, pages) {
            return Some(place);
        }
        candidates = left;
    }
    None
}

/// The first of the fractions that fall into a bucket: no more than 2^12,
/// so that the lowest twelve bits tell them apart.
fn first_fraction(bucket: usize, buckets: usize) -> u64 {
    ((bucket as u64) << FRACTION_BITS).div_ceil(buckets as u64)
}

/// The fraction of a bucket with this tag.
fn with_tag(first: u64, tag: u16) -> u64 {
    first + u64::from(tag.wrapping_sub(first as u16) & ((1 << TAG_BITS) - 1))
}

#[inline]
fn tag_of(fraction: u64) -> u16 {
    fraction as u16 & ((1 << TAG_BITS) - 1)
}

/// A key on the way to its place, step by step, so that several can be on their way at once and wait for
/// the memory together: [`Table::seek`], then [`Sought::guess`].
#[derive(Clone, Copy)]
pub(super) struct Sought<'a> {
    tag: u16,
    bucket: Option<&'a Bucket>,
    /// Whether it may be none of the bucket's business.
    may_stray: bool,
}

impl Sought<'_> {
    /// Looks into the bucket. Answers whether the key may have an entry, and the place of the first that looks like
    /// it.
    #[inline]
    pub(super) fn guess(&self) -> (bool, Option<Place>) {
        let Some(bucket) = self.bucket else { return (self.may_stray, None) };
        match bucket.next(bucket.candidates(self.tag), self.tag) {
            Some((place, _)) => (true, Some(place)),
            None => (self.may_stray || bucket.was_passed(self.tag), None),
        }
    }
}

/// Place of each entry.
#[derive(Clone, Debug)]
pub(super) struct Table {
    segments: Vec<Segment>,
    /// One per segment.
    counts: Vec<Count>,
    /// Entries that found no room near their bucket. Only keys that were chosen for it come here, two
    /// hundred at one address and more: they must cost little more than others, and nothing be lost.
    strays: BTreeMap<Key, Place>,
    len: u64,
    /// Entries that each segment is expected to have soon; zero when nobody knows.
    expected: u32,
}

impl Default for Table {
    fn default() -> Self {
        let segments = 1 << SEGMENTS_LOG2;
        Self {
            segments: vec![Segment::default(); segments],
            counts: vec![Count::default(); segments],
            strays: BTreeMap::new(),
            len: 0,
            expected: 0,
        }
    }
}

impl Table {
    /// So many entries there will be in all, somebody says: segments grow in larger steps then. By less than four
    /// times, so that who says too much gets little for it. Zero ends that.
    pub(super) fn expect(&mut self, entries: u64) {
        let each = entries >> SEGMENTS_LOG2;
        // Two standard deviations more: keys spread evenly, and few segments then grow once more.
        let expected = if entries == 0 { 0 } else { each + 2 * each.isqrt() };
        self.expected = u32::try_from(expected).unwrap_or(u32::MAX);
    }

    /// Entries.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    #[inline]
    pub(super) fn find(&self, key: Key, pages: &Pages) -> Option<Place> {
        let address = Address::of(key);
        let found = self.segments[address.segment].find(address, key, pages);
        if found.is_none() && !self.strays.is_empty() {
            return self.strays.get(&key).copied();
        }
        found
    }

    /// Begins to find a key: asks the memory for its bucket.
    #[inline]
    pub(super) fn seek(&self, key: Key) -> Sought<'_> {
        let address = Address::of(key);
        let buckets = &self.segments[address.segment].buckets;
        let bucket = buckets.get(address.bucket(buckets.len()));
        if let Some(bucket) = bucket {
            prefetch(bucket);
        }
        Sought { tag: address.tag(), bucket, may_stray: !self.strays.is_empty() }
    }

    /// Puts an entry in, unless its key has one; answers whether it had none. Its page says what the key is already.
    #[inline]
    pub(super) fn insert(&mut self, key: Key, place: Place, pages: &Pages) -> bool {
        let address = Address::of(key);
        let segment = &mut self.segments[address.segment];
        let count = &mut self.counts[address.segment];
        // Most often the one look that says that it is new also finds room for it.
        let (home, tag) = (address.bucket(segment.buckets.len()), address.tag());
        if let Some(bucket) = segment.buckets.get_mut(home)
            && count.entries < count.filled
            && self.strays.is_empty()
            && bucket.next(bucket.candidates(tag), tag).is_none()
            && (!bucket.was_passed(tag) || segment.find_further_on(home, tag, key, pages).is_none())
            && segment.put(home, tag, place.0)
        {
            count.entries += 1;
            self.len += 1;
            return true;
        }
        self.insert_slowly(address, key, place, pages)
    }

    #[cold]
    fn insert_slowly(&mut self, address: Address, key: Key, place: Place, pages: &Pages) -> bool {
        if self.find(key, pages).is_some() {
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
            // More buckets help when there are many entries, not when they all belong together. A segment that grew is
            // three eighths full at least, and one that shrank two thirds at most: some come or go before it changes
            // again.
            let is_sparse = fits && count.entries < count.filled / 4 * 3;
            if !may_grow || is_sparse {
                self.strays.insert(key, place);
                return true;
            }
            self.resize(address.segment, self.grown(address.segment, buckets), pages);
        }
    }

    /// The next size of a segment that has so many buckets.
    fn grown(&self, number: usize, buckets: usize) -> usize {
        let mut next = grown(buckets);
        while next < BUCKETS_MAX.min(3 * buckets) && filled(next, number) < self.expected {
            next = grown(next);
        }
        next
    }

    fn resize(&mut self, number: usize, buckets: usize, pages: &Pages) {
        let (segment, strays) = self.segments[number].resized(buckets, pages);
        let count = &mut self.counts[number];
        count.entries -= strays.len() as u32;
        count.filled = filled(segment.buckets.len(), number);
        self.segments[number] = segment;
        self.strays.extend(strays.into_iter().map(|place| (Key::of(place, pages), place)));
    }

    /// Takes the entry of a key out, which has this place.
    #[inline]
    pub(super) fn remove(&mut self, key: Key, place: Place, pages: &Pages) {
        let address = Address::of(key);
        self.len -= 1;
        if !self.segments[address.segment].take(address, place.0) {
            let stray = self.strays.remove(&key);
            debug_assert_eq!(stray, Some(place), "an entry is in the table or beside it");
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

#[cfg(test)]
impl Table {
    /// Entries that found no room near their bucket.
    pub(super) fn strays(&self) -> usize {
        self.strays.len()
    }

    /// Buckets of all segments.
    pub(super) fn buckets(&self) -> usize {
        self.segments.iter().map(|one| one.buckets.len()).sum()
    }
}

/// The next size of a segment: two or three times a power of two, a half or a third more. Smaller steps would
/// keep memory a little lower, and move every entry twice as often.
fn grown(buckets: usize) -> usize {
    let next = buckets + 1;
    if next <= BUCKETS_MIN {
        return BUCKETS_MIN;
    }
    let step = 1usize << (next.ilog2() - 1);
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
        for buckets in [64, 96, 300, 1_000, 4_098, 32_768] {
            for step in 0..300_000u64 {
                let fraction = step.wrapping_mul(SPREAD) >> (64 - FRACTION_BITS);
                let address = Address { segment: 0, fraction };
                let first = first_fraction(address.bucket(buckets), buckets);
                assert_eq!(with_tag(first, address.tag()), fraction, "{buckets} buckets");
            }
        }
    }

    #[test]
    fn sizes_grow_by_halves_and_thirds() {
        let sizes: Vec<usize> = std::iter::successors(Some(0), |size| Some(grown(*size))).take(10).collect();
        assert_eq!(sizes, [0, 64, 96, 128, 192, 256, 384, 512, 768, 1_024]);
    }

    /// A table, with the pages that its entries are in.
    #[derive(Default)]
    struct Both {
        pages: Pages,
        table: Table,
    }

    impl Both {
        /// Makes a page for a key and puts its entry in.
        fn enter(&mut self, key: Key) -> Place {
            let page = self.pages.take().unwrap();
            let place = match key {
                Key::Octet(octet) => {
                    self.pages.begin(page, octet, (0, 0), true);
                    // A block whose own key has another address.
                    let mut first = BlockHash([0xC3; 16]);
                    first.0[..5].copy_from_slice(&octet.to_le_bytes()[..5]);
                    self.pages.write(Place::new(page, 0), &[first]);
                    Place::new(page, 0)
                }
                Key::Block(hash) => {
                    self.pages.begin(page, hash.octet(), (0, 0), false);
                    self.pages.write(Place::of(page, hash), &[hash]);
                    Place::of(page, hash)
                }
            };
            assert!(self.table.insert(key, place, &self.pages));
            assert!(!self.table.insert(key, place, &self.pages), "it has an entry already");
            place
        }

        fn find(&self, key: Key) -> Option<Place> {
            self.table.find(key, &self.pages)
        }

        fn remove(&mut self, key: Key, place: Place) {
            self.table.remove(key, place, &self.pages);
        }
    }

    /// Keys of both kinds in turn.
    fn key(number: u64) -> Key {
        let hash = BlockHash((u128::from(number) * 0x100_0000_0100_0300).to_le_bytes());
        let octet = (number.wrapping_mul(SPREAD) % (1 << 29)) << 11 | 7;
        if number.is_multiple_of(2) { Key::Octet(octet) } else { Key::Block(hash) }
    }

    #[test]
    fn a_segment_keeps_what_it_has_while_it_grows_and_shrinks() {
        let mut both = Both::default();
        let listed: Vec<Place> = (0..40_000).map(|number| both.enter(key(number))).collect();
        let passed = |bucket: &Bucket| bucket.meta() >> PASSERS > 0;
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
        assert!(both.table.buckets() * 12 < most, "it shrank");
        for (number, place) in (0..).zip(&listed) {
            assert_eq!(both.find(key(number)), (number % 65 == 0).then_some(*place));
        }
    }

    /// Puts keys in, finds each, removes every second, finds the rest.
    fn live(keys: &[Key]) -> Both {
        let mut both = Both::default();
        let listed: Vec<(Key, Place)> = keys.iter().map(|key| (*key, both.enter(*key))).collect();
        assert!(listed.iter().all(|(key, place)| both.find(*key) == Some(*place)));
        assert!(listed.iter().all(|(key, _)| both.table.seek(*key).guess().0));
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
    fn blocks_that_were_chosen_to_meet_are_kept_without_end_of_memory() {
        // Both halves cancel in the address: all of these have the same one.
        let hash = |number: u64| {
            let low = number.rotate_left(32) ^ 7;
            BlockHash((u128::from(number) << 64 | u128::from(low)).to_le_bytes())
        };
        let keys: Vec<Key> = (0..4_000).map(|number| Key::Block(hash(number))).collect();
        assert!(keys.iter().all(|key| Address::of(*key) == Address::of(keys[0])));
        let both = live(&keys);
        assert!(!both.table.strays.is_empty());
        assert!(both.table.segments.iter().all(|segment| segment.buckets.len() < 100));
    }

    /// How often a segment is laid out anew while `change` is called so many times.
    fn resizes(both: &mut Both, times: u64, mut change: impl FnMut(&mut Both, u64)) -> usize {
        let lies = |both: &Both| -> Vec<_> {
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

    /// A key at the same address as all others of these.
    fn at_one_address(number: u64) -> Key {
        let low = number.rotate_left(32) ^ 7;
        Key::Block(BlockHash((u128::from(number) << 64 | u128::from(low)).to_le_bytes()))
    }

    #[test]
    fn few_blocks_that_come_and_go_do_not_make_a_segment_grow_and_shrink_again_and_again() {
        let mut both = Both::default();
        let segment = Address::of(at_one_address(0)).segment;
        let mut ordinary = (0..).map(key).filter(|key| Address::of(*key).segment == segment);
        let mut chosen = (0..).map(at_one_address);
        let mut listed: Vec<(Key, Place)> = Vec::new();
        for key in ordinary.by_ref().take(10_000) {
            listed.push((key, both.enter(key)));
        }
        // Enough of one address that no more of it fit.
        for key in chosen.by_ref().take(500) {
            both.enter(key);
        }
        let mut shrunk = 0;
        while both.table.segments[segment].buckets.len() > BUCKETS_MIN {
            let (key, place) = listed.pop().unwrap();
            if resizes(&mut both, 1, |both, _| both.remove(key, place)) == 0 {
                continue;
            }
            // Where it has just shrunk: some come, for which it might grow, and go again.
            shrunk += 1;
            let count = resizes(&mut both, 800, |both, number| match number % 8 {
                0 | 4 => {
                    both.enter(chosen.next().unwrap());
                }
                1..4 => {
                    let key = ordinary.next().unwrap();
                    listed.push((key, both.enter(key)));
                }
                _ => {
                    let (key, place) = listed.pop().unwrap();
                    both.remove(key, place);
                }
            });
            assert!(count <= 2, "{count} after it shrank {shrunk} times");
        }
        assert!(shrunk >= 4, "{shrunk}");
    }

    #[test]
    fn a_segment_that_shrinks_gets_smaller_whatever_does_not_fit() {
        for room in [300, 340, 384] {
            let mut both = Both::default();
            let listed: Vec<Place> = (0..30_000).map(|number| both.enter(key(number))).collect();
            for number in 0..room {
                both.enter(at_one_address(number));
            }
            let count = resizes(&mut both, 30_000, |both, number| {
                both.remove(key(number), listed[number as usize]);
            });
            // Each of both segments halves some times; it had a thousand and a half buckets.
            assert!(count <= 2 * 6, "{room}: {count}");
            assert!((0..room).all(|number| both.find(at_one_address(number)).is_some()));
        }
    }

    /// Octets at the same address as all others of these, by trying.
    fn octets_that_meet(count: usize) -> Vec<Key> {
        let octets = (0..1u64 << 37).map(|number| Key::Octet((number >> 3 << 8 | number & 7) << 3));
        let first = Address::of(Key::Octet(0));
        octets.filter(|octet| Address::of(*octet) == first).take(count).collect()
    }

    #[test]
    fn octets_that_were_chosen_to_meet_are_kept_without_end_of_memory() {
        let both = live(&octets_that_meet(500));
        assert!(!both.table.strays.is_empty());
        assert!(both.table.segments.iter().all(|segment| segment.buckets.len() < 100));
    }

    #[test]
    fn keys_that_were_chosen_for_one_segment_are_kept() {
        // Few addresses, each often, beside ordinary ones: growing meets what does not fit.
        let hash = |number: u64| {
            let high = number / 8;
            let low = high.rotate_left(32) ^ (number % 8) << 8 ^ 7;
            BlockHash((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
        };
        let keys: Vec<Key> =
            (1..6_000).flat_map(|number| [Key::Block(hash(number)), key(number + 7_000)]).collect();
        let both = live(&keys);
        assert!(both.table.segments.iter().all(|segment| segment.buckets.len() < 4_000));
    }
}
