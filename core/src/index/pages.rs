//! Where the hashes of all blocks lie: pages of one octet each, handed out one by one.
//!
//! The blocks of an octet have five bytes of their hashes in common, with the block's position in it (`id.rs`): these
//! stand once a page, and a block's slot is its position. Hashes that were made by other means have such five bytes,
//! too, only not in common; their pages have one block each. A block's [`Place`] never changes while the block is
//! listed, which is why 28 bits are enough for the table to name it. While a snapshot is being made, whoever writes a
//! page first keeps what it was (`images.rs`). Not here: which page follows which (`run.rs`), and which page of an octet
//! is found by it (`places.rs`).

use std::ops::Range;

use super::images::Images;
use crate::cpu::prefetch;
use crate::id::{BlockHash, OCTET_BLOCKS};

/// Blocks in a page: those of an octet, in two cache lines with the page's owner.
pub(super) const PAGE_BLOCKS: u32 = OCTET_BLOCKS as u32;
/// Pages that are allocated together: 4 KiB, a size that allocators waste little on, with a bit for each in a word.
const CHUNK_PAGES: usize = u32::BITS as usize;
/// Chunks that can be named: places have 28 bits, for 268 million blocks.
const CHUNKS_MAX: usize = (1 << 25) / CHUNK_PAGES;
/// A bit for each page of a chunk.
const ALL_FREE: u32 = u32::MAX;
/// Bytes of a hash that are its block's own.
const OWN_BYTES: usize = 11;
/// Bits of a hash that its octet has in common, with the position in it.
const COMMON_BITS: u32 = 40;

/// Where a block's hash lies: page and slot in the page. Below 2^28.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(pub(super) u32);

impl Place {
    pub(super) fn new(page: u32, slot: u32) -> Self {
        Self(page * PAGE_BLOCKS + slot)
    }

    /// Where a block lies that is in this page.
    pub(super) fn of(page: u32, hash: BlockHash) -> Self {
        Self::new(page, hash.nth_of_octet() as u32)
    }

    pub(super) fn page(self) -> u32 {
        self.0 / PAGE_BLOCKS
    }

    pub(super) fn slot(self) -> u32 {
        self.0 % PAGE_BLOCKS
    }
}

/// Whose a page is, and the hashes in it. One that is free lists nothing and is no anchor.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Page {
    /// Its run, and in the lowest ten bits which page of it. A run has a page of its own: 25 bits are enough.
    owner: u32,
    /// Of an anchor: how many other pages have its octet.
    others: u32,
    /// Bytes 1 to 4 of the octet.
    octet: u32,
    /// Byte 0 of the octet.
    tag: u8,
    /// The highest three bits of the owner, and [`ANCHOR`].
    owner_high: u8,
    /// One bit per slot: whether the block there is a head (`heads.rs`); only listed ones are.
    heads: u8,
    /// One bit per slot: whether the block there is listed.
    live: u8,
    /// The own bytes of each hash.
    own: [[u8; OWN_BYTES]; PAGE_BLOCKS as usize],
}

/// Bits of [`Page::owner`] that say which page of its run it is.
const NTH_BITS: u32 = 10;
/// In [`Page::owner_high`]: the octet's entry in the table names this page.
const ANCHOR: u8 = 0x80;

impl Page {
    fn owner(&self) -> u64 {
        u64::from(self.owner) | u64::from(self.owner_high & !ANCHOR) << 32
    }

    fn run(&self) -> u32 {
        (self.owner() >> NTH_BITS) as u32
    }

    fn nth(&self) -> u32 {
        self.owner & ((1 << NTH_BITS) - 1)
    }

    /// Whether the octet's entry in the table names this page.
    pub(super) fn is_anchor(&self) -> bool {
        self.owner_high & ANCHOR != 0
    }

    /// Whether it is an anchor that lists nothing, and is there because other pages still need it.
    pub(super) fn is_stub(&self) -> bool {
        self.is_anchor() && self.live == 0
    }

    /// One bit per slot: whether the block there is a head.
    pub(super) fn heads(&self) -> u8 {
        self.heads
    }

    /// The own bytes of the hashes in some slots, one after the other.
    pub(super) fn own_bytes(&self, slots: Range<u32>) -> &[u8] {
        self.own[slots.start as usize..slots.end as usize].as_flattened()
    }

    /// Asks the memory for all of it.
    pub(super) fn prefetch(&self) {
        prefetch(self);
        prefetch(&self.own[PAGE_BLOCKS as usize - 1]);
    }

    /// What its blocks have in common.
    #[inline]
    pub(super) fn octet(&self) -> u64 {
        u64::from(self.tag) | u64::from(self.octet) << 8
    }

    /// Tells the page its run, and which page of it it is.
    fn own(&mut self, run: u32, nth: u32) {
        let owner = u64::from(run) << NTH_BITS | u64::from(nth);
        self.owner = owner as u32;
        self.owner_high = self.owner_high & ANCHOR | (owner >> 32) as u8;
    }

    /// The first and the last eight bytes of a hash. Put together in registers: what is written byte by byte and
    /// read as a whole waits for the writing.
    #[inline]
    fn halves(&self, slot: u32) -> (u64, u64) {
        let own = &self.own[slot as usize];
        let half = |bytes: Option<&[u8; 8]>| bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let (low, high) = (half(own.first_chunk()), half(own.last_chunk()));
        (self.octet() | u64::from(slot) << 8 | low << COMMON_BITS, high)
    }

    #[inline]
    fn hash(&self, slot: u32) -> BlockHash {
        let (low, high) = self.halves(slot);
        BlockHash((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
    }

    #[inline]
    fn holds(&self, slot: u32, hash: BlockHash) -> bool {
        let whole = u128::from_le_bytes(hash.0);
        self.halves(slot) == (whole as u64, (whole >> 64) as u64)
    }

    #[inline]
    fn lists(&self, slot: u32, hash: BlockHash) -> bool {
        self.holds(slot, hash) && self.live & 1 << slot != 0
    }
}

type Chunk = [Page; CHUNK_PAGES];

fn new_chunk() -> Box<Chunk> {
    Box::new([Page::default(); CHUNK_PAGES])
}

/// All pages of one index. A chunk whose pages are all free takes no memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    chunks: Vec<Option<Box<Chunk>>>,
    /// Per chunk, one bit per page that is free.
    free: Vec<u32>,
    /// One bit per chunk that has a free page.
    open: Vec<u64>,
    /// Words of `open` below this one are zero.
    open_from: usize,
    /// While a snapshot is being made: what the pages were that were written since it began.
    images: Option<Box<Images<Page>>>,
}

fn split(page: u32) -> (usize, usize) {
    (page as usize / CHUNK_PAGES, page as usize % CHUNK_PAGES)
}

impl Pages {
    #[inline]
    fn page(&self, number: u32) -> Option<&Page> {
        let (chunk, page) = split(number);
        Some(&self.chunks[chunk].as_deref()?[page])
    }

    /// A page, about to be written. Nothing else gives one to write: a snapshot that is being made needs what it was.
    #[inline]
    fn page_mut(&mut self, number: u32) -> &mut Page {
        let (chunk, page) = split(number);
        let page = &mut self.chunks[chunk].get_or_insert_with(new_chunk)[page];
        if let Some(images) = &mut self.images {
            images.keep(number, page);
        }
        page
    }

    /// From here on, keeps what pages were before they are written; what was kept before is forgotten.
    pub(super) fn begin_images(&mut self) {
        self.images = Some(Box::new(Images::new((self.chunks.len() * CHUNK_PAGES) as u32)));
    }

    /// Keeps no more; gives what was kept.
    pub(super) fn end_images(&mut self) -> Option<Box<Images<Page>>> {
        self.images.take()
    }

    /// Numbers of pages there were when the snapshot began that is being made.
    pub(super) fn numbers_then(&self) -> u32 {
        self.images.as_ref().map_or(0, |images| images.numbers())
    }

    /// A page as it was when the snapshot began that is being made; none, perhaps, for one that was free.
    #[inline]
    pub(super) fn then(&self, number: u32) -> Option<&Page> {
        let image = self.images.as_ref().and_then(|images| images.get(number));
        let (chunk, page) = split(number);
        image.or_else(|| Some(&self.chunks.get(chunk)?.as_deref()?[page]))
    }

    #[inline]
    pub(super) fn hash(&self, place: Place) -> BlockHash {
        self.page(place.page()).map_or_else(BlockHash::default, |page| page.hash(place.slot()))
    }

    /// Whether this hash lies at a place.
    #[inline]
    pub(super) fn holds(&self, place: Place, hash: BlockHash) -> bool {
        self.page(place.page()).is_some_and(|page| page.holds(place.slot(), hash))
    }

    /// Whether a place has a hash's own bytes: one cache line. No two blocks of honest nodes have them in common;
    /// who believes this compares all of one hash in the end.
    #[inline]
    pub(super) fn holds_own(&self, place: Place, hash: BlockHash) -> bool {
        let [_, _, _, _, _, own @ ..] = hash.0;
        self.page(place.page()).is_some_and(|page| page.own[place.slot() as usize] == own)
    }

    /// Whether this block is listed at a place.
    #[inline]
    pub(super) fn lists(&self, place: Place, hash: BlockHash) -> bool {
        self.page(place.page()).is_some_and(|page| page.lists(place.slot(), hash))
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

    /// What the blocks of a page have in common.
    #[inline]
    pub(super) fn octet(&self, number: u32) -> u64 {
        self.page(number).map_or(0, Page::octet)
    }

    /// Whether the octet's entry in the table names this page.
    #[inline]
    pub(super) fn is_anchor(&self, number: u32) -> bool {
        self.page(number).is_some_and(Page::is_anchor)
    }

    /// Whether a page is the anchor of this octet.
    #[inline]
    pub(super) fn is_anchor_of(&self, number: u32, octet: u64) -> bool {
        self.page(number).is_some_and(|page| page.is_anchor() && page.octet() == octet)
    }

    /// How many other pages have the octet of an anchor.
    #[inline]
    pub(super) fn others(&self, anchor: u32) -> u32 {
        self.page(anchor).map_or(0, |page| page.others)
    }

    /// Another page with the octet of an anchor came.
    pub(super) fn gain_other(&mut self, anchor: u32) {
        self.page_mut(anchor).others += 1;
    }

    /// Another page with the octet of an anchor went; answers how many are left.
    pub(super) fn lose_other(&mut self, anchor: u32) -> u32 {
        let page = self.page_mut(anchor);
        page.others -= 1;
        page.others
    }

    /// Asks the memory for a hash and for whose page it is in.
    #[inline]
    pub(super) fn prefetch(&self, place: Place) {
        if let Some(page) = self.page(place.page()) {
            prefetch(page);
            prefetch(&page.own[place.slot() as usize]);
        }
    }

    /// Asks the memory for what the blocks of a page have in common.
    #[inline]
    pub(super) fn prefetch_octet(&self, place: Place) {
        if let Some(page) = self.page(place.page()) {
            prefetch(page);
        }
    }

    /// Asks the memory for all hashes of a page.
    pub(super) fn prefetch_whole(&self, number: u32) {
        if let Some(page) = self.page(number) {
            page.prefetch();
        }
    }

    /// Run and offset of the block at a place.
    #[inline]
    pub(super) fn locate(&self, place: Place) -> (u32, u32) {
        self.page(place.page()).map_or((0, 0), |page| (page.run(), page.nth() * PAGE_BLOCKS + place.slot()))
    }

    pub(super) fn is_live(&self, place: Place) -> bool {
        self.live(place.page()) & 1 << place.slot() != 0
    }

    /// Makes a page that was just taken one of this octet and of this run, with no listed block yet.
    #[inline]
    pub(super) fn begin(&mut self, number: u32, octet: u64, (run, nth): (u32, u32), is_anchor: bool) {
        let page = self.page_mut(number);
        (page.tag, page.octet) = (octet as u8, (octet >> 8) as u32);
        (page.others, page.heads, page.live) = (0, 0, 0);
        page.owner_high = if is_anchor { ANCHOR } else { 0 };
        page.own(run, nth);
    }

    /// Gives an anchor without listed blocks to a run.
    pub(super) fn adopt(&mut self, anchor: u32, (run, nth): (u32, u32)) {
        self.page_mut(anchor).own(run, nth);
    }

    /// A page that was begun as an anchor is none: its octet has one.
    pub(super) fn stand_apart(&mut self, number: u32) {
        self.page_mut(number).owner_high &= !ANCHOR;
    }

    /// Writes hashes from a place on, all of the octet of its page and one after the other, as listed blocks.
    #[inline]
    pub(super) fn write(&mut self, place: Place, hashes: &[BlockHash]) {
        let page = self.page_mut(place.page());
        let slot = place.slot() as usize;
        for (own, hash) in page.own[slot..].iter_mut().zip(hashes) {
            let [_, _, _, _, _, rest @ ..] = hash.0;
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
        slots.fold(0u128, |sum, slot| {
            let (low, high) = page.halves(slot);
            // All but the first byte, which is in the salt.
            let low = low >> 8 | high << 56;
            let product = u128::from(low ^ salt) * u128::from(high ^ 0x9E37_79B9_7F4A_7C15);
            sum.wrapping_add(product ^ u128::from(low) << 64 ^ u128::from(high))
        })
    }

    /// One bit per slot of a page: whether the block there is listed.
    #[inline]
    pub(super) fn live(&self, page: u32) -> u8 {
        self.page(page).map_or(0, |page| page.live)
    }

    /// Unlists the blocks of a page whose bits are set; their hashes stay legible. Answers whether none is left.
    pub(super) fn unlist(&mut self, number: u32, bits: u8) -> bool {
        let page = self.page_mut(number);
        page.live &= !bits;
        page.heads &= !bits;
        page.live == 0
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
        let page = self.free[chunk].trailing_zeros() as usize;
        self.own(chunk, page);
        Some((chunk * CHUNK_PAGES + page) as u32)
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
        *free &= !(1 << page);
        if *free == 0 {
            self.set_open(chunk, false);
        }
    }

    /// Gives a page back.
    pub(super) fn free(&mut self, number: u32) {
        self.page_mut(number).owner_high = 0;
        let (chunk, page) = split(number);
        self.free[chunk] |= 1 << page;
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
        if chunk >= CHUNKS_MAX {
            return false;
        }
        self.reach(chunk);
        if self.free[chunk] & 1 << page == 0 {
            return false;
        }
        self.own(chunk, page);
        true
    }
}

#[cfg(test)]
impl Pages {
    /// Pages in use.
    pub(super) fn used(&self) -> u32 {
        self.free.iter().map(|free| free.count_zeros()).sum()
    }

    /// Anchors that list nothing.
    pub(super) fn stubs(&self) -> impl Iterator<Item = u32> + '_ {
        let numbers = 0..(self.chunks.len() * CHUNK_PAGES) as u32;
        numbers.filter(|number| self.page(*number).is_some_and(Page::is_stub))
    }
}
