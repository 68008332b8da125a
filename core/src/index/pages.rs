//! Where the hashes of all blocks lie: pages of eight, handed out one by one.
//!
//! The first byte of a hash names the shard, and is the same along a prefix: it stands once a page.
//! A block's [`Place`] never changes while the block is listed, which is why 28 bits are enough
//! for the table to name it. Pages stand in chunks behind `Arc`, so that a frozen index (a snapshot being
//! written) shares them with the living one until the living one writes. Not here: which page follows
//! which (`run.rs`).

use std::ops::Range;
use std::sync::Arc;

use crate::cpu::prefetch;
use crate::id::BlockHash;

/// Blocks in a page: two cache lines with the page's owner. Less would cost more in page numbers, more would cost
/// more in half-filled pages, because conversations of large blocks are short.
pub(super) const PAGE_BLOCKS: u32 = 8;
/// Pages that are copied together when a frozen index still needs them: 8 KiB with counts, a size that
/// allocators waste nothing on. A command of a thousand blocks that lie here and there copies as many chunks,
/// which is to take a few milliseconds at most.
const CHUNK_PAGES: usize = 63;
/// Numbers of pages per chunk: a power of two, so that nothing is divided; the last ones name no page.
const CHUNK_NUMBERS: usize = 64;
/// Chunks that can be named: places have 28 bits, for 268 million blocks.
const CHUNKS_MAX: usize = (1 << 25) / CHUNK_NUMBERS;
/// A bit for each page of a chunk.
const ALL_FREE: [u64; CHUNK_NUMBERS / 64] = [u64::MAX >> (CHUNK_NUMBERS - CHUNK_PAGES)];

/// Where a block's hash lies: page and slot in the page. Below 2^28.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(pub(super) u32);

impl Place {
    pub(super) fn new(page: u32, slot: u32) -> Self {
        Self(page * PAGE_BLOCKS + slot)
    }

    pub(super) fn page(self) -> u32 {
        self.0 / PAGE_BLOCKS
    }

    pub(super) fn slot(self) -> u32 {
        self.0 % PAGE_BLOCKS
    }
}

/// Whose a page is, and the hashes in it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Page {
    /// Its run, and in the lowest ten bits which page of it. A run has a page of its own: 25 bits are enough.
    owner: u32,
    /// The highest eight bits of that.
    owner_high: u8,
    /// One bit per slot: whether the block there is a head (`heads.rs`); only listed ones are.
    heads: u8,
    /// One bit per slot: whether the block there is listed.
    live: u8,
    /// First byte of every hash in it.
    tag: u8,
    /// The other fifteen bytes of each.
    hashes: [[u8; 15]; PAGE_BLOCKS as usize],
}

/// Bits of [`Page::owner`] that say which page of its run it is.
const NTH_BITS: u32 = 10;

impl Page {
    fn owner(&self) -> u64 {
        u64::from(self.owner) | u64::from(self.owner_high) << 32
    }

    fn run(&self) -> u32 {
        (self.owner() >> NTH_BITS) as u32
    }

    fn nth(&self) -> u32 {
        self.owner & ((1 << NTH_BITS) - 1)
    }

    fn begin(&mut self, run: u32, nth: u32) {
        let owner = u64::from(run) << NTH_BITS | u64::from(nth);
        (self.owner, self.owner_high) = (owner as u32, (owner >> 32) as u8);
        (self.live, self.heads) = (0, 0);
    }

    #[inline]
    fn hash(&self, slot: u32) -> BlockHash {
        let (low, high) = halves(&self.hashes[slot as usize]);
        let low = low << 8 | u64::from(self.tag);
        BlockHash((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
    }

    #[inline]
    fn holds(&self, slot: u32, hash: BlockHash) -> bool {
        let [tag, rest @ ..] = hash.0;
        self.hashes[slot as usize] == rest && self.tag == tag
    }

    #[inline]
    fn lists(&self, slot: u32, hash: BlockHash) -> bool {
        self.holds(slot, hash) && self.live & 1 << slot != 0
    }
}

/// The first and the last eight bytes of fifteen. Put together in registers: what is written byte by byte and read
/// as a whole waits for the writing.
#[inline]
fn halves(rest: &[u8; 15]) -> (u64, u64) {
    let half = |bytes: Option<&[u8; 8]>| bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes));
    (half(rest.first_chunk()), half(rest.last_chunk()))
}

fn new_chunk() -> Arc<[Page]> {
    std::iter::repeat_n(Page::default(), CHUNK_PAGES).collect()
}

/// All pages of one index. A chunk whose pages are all free takes no memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    chunks: Vec<Option<Arc<[Page]>>>,
    /// Per chunk, one bit per page that is free.
    free: Vec<[u64; CHUNK_NUMBERS / 64]>,
    /// One bit per chunk that has a free page.
    open: Vec<u64>,
    /// Words of `open` below this one are zero.
    open_from: usize,
}

fn split(page: u32) -> (usize, usize) {
    (page as usize / CHUNK_NUMBERS, page as usize % CHUNK_NUMBERS)
}

impl Pages {
    fn page(&self, number: u32) -> Option<&Page> {
        let (chunk, page) = split(number);
        Some(&self.chunks[chunk].as_deref()?[page])
    }

    fn page_mut(&mut self, number: u32) -> &mut Page {
        let (chunk, page) = split(number);
        &mut Arc::make_mut(self.chunks[chunk].get_or_insert_with(new_chunk))[page]
    }

    pub(super) fn hash(&self, place: Place) -> BlockHash {
        self.page(place.page()).map_or_else(BlockHash::default, |page| page.hash(place.slot()))
    }

    /// Whether this hash lies at a place.
    #[inline]
    pub(super) fn holds(&self, place: Place, hash: BlockHash) -> bool {
        self.page(place.page()).is_some_and(|page| page.holds(place.slot(), hash))
    }

    /// How many listed blocks of a page, from a place on, have these hashes one by one.
    #[inline]
    pub(super) fn agree_up(&self, place: Place, hashes: &[BlockHash]) -> u32 {
        let Some(page) = self.page(place.page()) else { return 0 };
        let slots = place.slot()..PAGE_BLOCKS;
        slots.zip(hashes).take_while(|(slot, hash)| page.lists(*slot, **hash)).count() as u32
    }

    /// The same from a place down.
    #[inline]
    pub(super) fn agree_down(&self, place: Place, hashes: &[BlockHash]) -> u32 {
        let Some(page) = self.page(place.page()) else { return 0 };
        let slots = (0..=place.slot()).rev();
        slots.zip(hashes).take_while(|(slot, hash)| page.lists(*slot, **hash)).count() as u32
    }

    /// All hashes of a page; those of blocks that are not listed may be anything.
    #[inline]
    pub(super) fn hashes(&self, number: u32) -> [BlockHash; PAGE_BLOCKS as usize] {
        let Some(page) = self.page(number) else { return Default::default() };
        std::array::from_fn(|slot| page.hash(slot as u32))
    }

    /// Whether a place that is known to have this first byte has the rest of a hash, too: one cache line.
    #[inline]
    pub(super) fn holds_rest(&self, place: Place, hash: BlockHash) -> bool {
        let [_, rest @ ..] = hash.0;
        self.page(place.page()).is_some_and(|page| page.hashes[place.slot() as usize] == rest)
    }

    /// Asks the memory for a hash and for whose page it is in.
    pub(super) fn prefetch(&self, place: Place) {
        if let Some(page) = self.page(place.page()) {
            prefetch(page);
            prefetch(&page.hashes[place.slot() as usize]);
        }
    }

    /// Asks the memory for all hashes of a page.
    pub(super) fn prefetch_whole(&self, number: u32) {
        if let Some(page) = self.page(number) {
            prefetch(page);
            prefetch(&page.hashes[PAGE_BLOCKS as usize - 1]);
        }
    }

    /// Run and offset of the block at a place.
    pub(super) fn locate(&self, place: Place) -> (u32, u32) {
        self.page(place.page()).map_or((0, 0), |page| (page.run(), page.nth() * PAGE_BLOCKS + place.slot()))
    }

    pub(super) fn is_live(&self, place: Place) -> bool {
        self.live(place.page()) & 1 << place.slot() != 0
    }

    /// Writes hashes from a place on, all in one page and with one first byte, as listed blocks; a new page
    /// is told its run, and which page of it it is.
    #[inline]
    pub(super) fn write(&mut self, place: Place, hashes: &[BlockHash], whose: Option<(u32, u32)>) {
        let page = self.page_mut(place.page());
        if let Some((run, nth)) = whose {
            page.begin(run, nth);
        }
        let slot = place.slot() as usize;
        for (own, hash) in page.hashes[slot..].iter_mut().zip(hashes) {
            let [tag, rest @ ..] = hash.0;
            page.tag = tag;
            *own = rest;
        }
        page.live |= (((1u32 << hashes.len()) - 1) << slot) as u8;
    }

    /// One bit per slot of a page: whether the block there is a head.
    pub(super) fn heads(&self, page: u32) -> u8 {
        self.page(page).map_or(0, |page| page.heads)
    }

    /// Makes the block at a place a head, if it is listed; answers whether it was none.
    pub(super) fn make_head(&mut self, place: Place) -> bool {
        let bit = 1 << place.slot();
        let is_new = self.heads(place.page()) & bit == 0 && self.is_live(place);
        if is_new {
            self.page_mut(place.page()).heads |= bit;
        }
        is_new
    }

    /// Says which blocks of a page are listed.
    pub(super) fn list(&mut self, number: u32, live: u8) {
        self.page_mut(number).live = live;
    }

    /// Sum of a digest of each hash in some slots of a page. Not keyed: sums over block hashes, which are
    /// keyed, meet by accident once in 2^64 or so.
    pub(super) fn digest(&self, number: u32, slots: Range<u32>, salt: u64) -> u128 {
        let Some(page) = self.page(number) else { return 0 };
        let salt = salt ^ u64::from(page.tag) << 56;
        let own = &page.hashes[slots.start as usize..slots.end as usize];
        own.iter().fold(0u128, |sum, hash| {
            let (low, high) = halves(hash);
            let product = u128::from(low ^ salt) * u128::from(high ^ 0x9E37_79B9_7F4A_7C15);
            sum.wrapping_add(product ^ u128::from(low) << 64 ^ u128::from(high))
        })
    }

    /// One bit per slot of a page: whether the block there is listed.
    pub(super) fn live(&self, page: u32) -> u8 {
        self.page(page).map_or(0, |page| page.live)
    }

    /// Unlists the blocks of a page whose bits are set; their hashes stay legible. A page without listed
    /// blocks is given back; answers whether that was so.
    pub(super) fn unlist(&mut self, number: u32, bits: u8) -> bool {
        let page = self.page_mut(number);
        page.live &= !bits;
        page.heads &= !bits;
        let is_empty = page.live == 0;
        if is_empty {
            self.free(number);
        }
        is_empty
    }

    /// The lowest free page; none when all places are taken. The lowest, so that the order in which pages
    /// were freed does not matter.
    pub(super) fn take(&mut self) -> Option<u32> {
        while self.open.get(self.open_from) == Some(&0) {
            self.open_from += 1;
        }
        let chunk = match self.open.get(self.open_from) {
            Some(word) => self.open_from * 64 + word.trailing_zeros() as usize,
            None if self.chunks.len() >= CHUNKS_MAX => return None,
            None => self.chunks.len(),
        };
        self.reach(chunk);
        let free = &self.free[chunk];
        let word = free.iter().position(|word| *word != 0)?;
        let page = word * 64 + free[word].trailing_zeros() as usize;
        self.own(chunk, page);
        Some((chunk * CHUNK_NUMBERS + page) as u32)
    }

    /// Makes room for the names of chunks up to this one; those in between are free.
    fn reach(&mut self, chunk: usize) {
        while self.chunks.len() <= chunk {
            self.set_open(self.chunks.len(), true);
            self.chunks.push(None);
            self.free.push(ALL_FREE);
        }
    }

    fn set_open(&mut self, chunk: usize, is_open: bool) {
        let word = chunk / 64;
        if self.open.len() <= word {
            self.open.resize(word + 1, 0);
        }
        let bit = 1 << (chunk % 64);
        if is_open {
            self.open[word] |= bit;
            self.open_from = self.open_from.min(word);
        } else {
            self.open[word] &= !bit;
        }
    }

    fn own(&mut self, chunk: usize, page: usize) {
        let free = &mut self.free[chunk];
        free[page / 64] &= !(1 << (page % 64));
        if *free == [0; CHUNK_NUMBERS / 64] {
            self.set_open(chunk, false);
        }
    }

    /// Gives a page back.
    pub(super) fn free(&mut self, number: u32) {
        let (chunk, page) = split(number);
        self.free[chunk][page / 64] |= 1 << (page % 64);
        self.set_open(chunk, true);
        if self.free[chunk] == ALL_FREE {
            self.chunks[chunk] = None;
        }
        while matches!(self.chunks.last(), Some(None)) {
            self.chunks.pop();
            self.free.pop();
            self.set_open(self.chunks.len(), false);
        }
    }

    /// Takes a page with this very number, as a snapshot names it, if it is free.
    pub(super) fn take_exactly(&mut self, number: u32) -> bool {
        let (chunk, page) = split(number);
        if chunk >= CHUNKS_MAX || page >= CHUNK_PAGES {
            return false;
        }
        self.reach(chunk);
        if self.free[chunk][page / 64] & 1 << (page % 64) == 0 {
            return false;
        }
        self.own(chunk, page);
        true
    }
}
