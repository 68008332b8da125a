//! Storage of all block hashes: pages of one block group each, allocated one by one.
//!
//! The blocks of a group share five bytes of their hashes, which include the index in the group
//! (`id.rs`). A page stores them once, and a block's slot is its index. Hashes from another scheme
//! share no such bytes; their pages hold one block each. A [`PageSlot`] never changes while its
//! block is listed, so 28 bits in the table can name it. During a snapshot the first write to a
//! page saves its old contents (`images.rs`). Not here: the order of pages (`run.rs`), and the page
//! that finds a group (`locations.rs`).

use std::ops::Range;

use super::digest::salted_digest;
use super::images::Images;
use crate::id::{BLOCK_GROUP_BLOCKS, BlockHash, DIGEST_BYTES, HASH_BYTES, PLACE_BYTES};
use kvfleet_cpu::prefetch;

/// Blocks in a page: one block group, in two cache lines together with the owner.
pub(super) const PAGE_BLOCKS: u32 = BLOCK_GROUP_BLOCKS as u32;
/// Pages per allocation: 4 KiB, a size that allocators handle without waste. One bit per page fits
/// a word.
const CHUNK_PAGES: usize = u32::BITS as usize;
/// Maximum number of chunks: page slots have 28 bits, for 268 million blocks.
const CHUNKS_MAX: usize = (1 << 25) / CHUNK_PAGES;
/// A bit for each page of a chunk.
const ALL_FREE: u32 = u32::MAX;

/// Address of a block's hash: page, and slot in the page. Below 2^28.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageSlot(pub(super) u32);

impl PageSlot {
    pub(super) fn new(page: u32, slot: u32) -> Self {
        Self(page * PAGE_BLOCKS + slot)
    }

    /// Slot of a block in this page.
    pub(super) fn of_hash(page: u32, hash: BlockHash) -> Self {
        Self::new(page, hash.position_in_group() as u32)
    }

    pub(super) fn page(self) -> u32 {
        self.0 / PAGE_BLOCKS
    }

    pub(super) fn slot(self) -> u32 {
        self.0 % PAGE_BLOCKS
    }
}

/// The run that a page belongs to, and the page's index in it.
#[derive(Clone, Copy, Default)]
pub(super) struct PageOwner {
    pub(super) run: u32,
    pub(super) nth: u32,
}

/// Owner of a page, and its hashes. A free page lists no block and is not canonical.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Page {
    /// Run number, and in the lowest ten bits the page's index in the run. A run has at least one
    /// page, so 25 bits suffice for its number.
    owner: u32,
    /// On a canonical page: number of other pages with the same block group.
    siblings: u32,
    /// Bytes 1 to 4 of the group's shared bytes.
    group_bytes: u32,
    /// Byte 0 of the group's shared bytes.
    tag: u8,
    /// The highest three bits of the owner, and [`CANONICAL`].
    owner_high: u8,
    /// One bit per slot: whether the block is an entry point (`entry_points.rs`). Only listed
    /// blocks are.
    entry_points: u8,
    /// One bit per slot: whether the block is listed.
    listed: u8,
    /// The digest of each hash, the bytes that the group does not share.
    suffixes: [[u8; DIGEST_BYTES]; PAGE_BLOCKS as usize],
}

const _: () = assert!(size_of::<Page>() == 128, "a page is two cache lines");

/// Bits of [`Page::owner`] that hold the page's index in its run.
const PAGE_INDEX_BITS: u32 = 10;
/// Flag in [`Page::owner_high`]: the group's table entry names this page.
const CANONICAL: u8 = 0x80;

impl Page {
    fn owner(&self) -> u64 {
        u64::from(self.owner) | u64::from(self.owner_high & !CANONICAL) << 32
    }

    fn run(&self) -> u32 {
        (self.owner() >> PAGE_INDEX_BITS) as u32
    }

    fn index_in_run(&self) -> u32 {
        self.owner & ((1 << PAGE_INDEX_BITS) - 1)
    }

    /// Whether the group's table entry names this page.
    pub(super) fn is_canonical(&self) -> bool {
        self.owner_high & CANONICAL != 0
    }

    /// Whether it is a tombstone page: canonical and without listed blocks, kept because other
    /// pages depend on it.
    pub(super) fn is_tombstone(&self) -> bool {
        self.is_canonical() && self.listed == 0
    }

    /// One bit per slot: whether the block is an entry point.
    pub(super) fn entry_points(&self) -> u8 {
        self.entry_points
    }

    /// The unshared hash bytes of consecutive slots.
    pub(super) fn suffix_bytes(&self, slots: Range<u32>) -> &[u8] {
        self.suffixes[slots.start as usize..slots.end as usize].as_flattened()
    }

    /// Prefetches both cache lines.
    pub(super) fn prefetch(&self) {
        prefetch(self);
        prefetch(&self.suffixes[PAGE_BLOCKS as usize - 1]);
    }

    /// The bytes that the hashes of the group share.
    #[inline]
    pub(super) fn block_group(&self) -> u64 {
        u64::from(self.tag) | u64::from(self.group_bytes) << 8
    }

    fn set_owner(&mut self, owner: PageOwner) {
        let owner = u64::from(owner.run) << PAGE_INDEX_BITS | u64::from(owner.nth);
        self.owner = owner as u32;
        self.owner_high = self.owner_high & CANONICAL | (owner >> 32) as u8;
    }

    #[inline]
    fn hash(&self, slot: u32) -> BlockHash {
        let mut hash = [0; HASH_BYTES];
        let (place, digest) = hash.split_at_mut(PLACE_BYTES);
        let shared = self.block_group() | u64::from(slot) << 8;
        place.copy_from_slice(&shared.to_le_bytes()[..PLACE_BYTES]);
        digest.copy_from_slice(&self.suffixes[slot as usize]);
        BlockHash(hash)
    }

    #[inline]
    fn matches(&self, slot: u32, hash: BlockHash) -> bool {
        self.suffixes[slot as usize] == hash.digest()
            && self.block_group() == hash.block_group()
            && slot as usize == hash.position_in_group()
    }

    #[inline]
    fn lists(&self, slot: u32, hash: BlockHash) -> bool {
        self.matches(slot, hash) && self.listed & 1 << slot != 0
    }
}

type Chunk = [Page; CHUNK_PAGES];

fn new_chunk() -> Box<Chunk> {
    Box::new([Page::default(); CHUNK_PAGES])
}

/// All pages of one index. A chunk of free pages takes no memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    chunks: Vec<Option<Box<Chunk>>>,
    /// Per chunk, one bit per free page.
    free: Vec<u32>,
    /// One bit per chunk with a free page.
    chunks_with_free: Vec<u64>,
    /// Words of `open` below this one are zero.
    first_open_word: usize,
    /// Copy-on-write images of changed pages, while a snapshot is being written.
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

    /// A page for writing. The only mutable access, because a running snapshot needs the old
    /// contents.
    #[inline]
    fn page_mut(&mut self, number: u32) -> &mut Page {
        let (chunk, page) = split(number);
        let page = &mut self.chunks[chunk].get_or_insert_with(new_chunk)[page];
        if let Some(images) = &mut self.images {
            images.preserve(number, page);
        }
        page
    }

    /// Starts to keep images of changed pages; discards earlier images.
    pub(super) fn begin_images(&mut self) {
        self.images = Some(Box::new(Images::new((self.chunks.len() * CHUNK_PAGES) as u32)));
    }

    /// Stops keeping images and returns them.
    pub(super) fn end_images(&mut self) -> Option<Box<Images<Page>>> {
        self.images.take()
    }

    /// Number of pages when the current snapshot began.
    pub(super) fn page_count_at_snapshot(&self) -> u32 {
        self.images.as_ref().map_or(0, |images| images.count())
    }

    /// A page as it was when the current snapshot began; may be `None` for a free page.
    #[inline]
    pub(super) fn page_at_snapshot(&self, number: u32) -> Option<&Page> {
        let image = self.images.as_ref().and_then(|images| images.get(number));
        let (chunk, page) = split(number);
        image.or_else(|| Some(&self.chunks.get(chunk)?.as_deref()?[page]))
    }

    #[inline]
    pub(super) fn hash(&self, place: PageSlot) -> BlockHash {
        self.page(place.page()).map_or_else(BlockHash::default, |page| page.hash(place.slot()))
    }

    /// Whether `hash` is stored in this slot, listed or not.
    #[inline]
    pub(super) fn matches(&self, place: PageSlot, hash: BlockHash) -> bool {
        self.page(place.page()).is_some_and(|page| page.matches(place.slot(), hash))
    }

    /// Whether the slot has the unshared bytes of `hash`; reads one cache line. Blocks of honest
    /// nodes never share them. A caller that relies on this compares one whole hash in the end.
    #[inline]
    pub(super) fn suffix_matches(&self, place: PageSlot, hash: BlockHash) -> bool {
        self.page(place.page()).is_some_and(|page| page.suffixes[place.slot() as usize] == hash.digest())
    }

    /// Whether this slot holds `hash` as a listed block.
    #[inline]
    pub(super) fn lists(&self, place: PageSlot, hash: BlockHash) -> bool {
        self.page(place.page()).is_some_and(|page| page.lists(place.slot(), hash))
    }

    /// Number of listed blocks of a page, from a slot upwards, that match these hashes.
    #[inline]
    pub(super) fn matches_forward(&self, place: PageSlot, hashes: &[BlockHash]) -> u32 {
        let Some(page) = self.page(place.page()) else { return 0 };
        let slots = place.slot()..PAGE_BLOCKS;
        slots.zip(hashes).take_while(|(slot, hash)| page.lists(*slot, **hash)).count() as u32
    }

    /// Like [`Pages::matches_forward`], from a slot downwards.
    #[inline]
    pub(super) fn matches_backward(&self, place: PageSlot, hashes: &[BlockHash]) -> u32 {
        let Some(page) = self.page(place.page()) else { return 0 };
        let slots = (0..=place.slot()).rev();
        slots.zip(hashes).take_while(|(slot, hash)| page.lists(*slot, **hash)).count() as u32
    }

    /// The bytes that the hashes of a page share.
    #[inline]
    pub(super) fn block_group(&self, number: u32) -> u64 {
        self.page(number).map_or(0, Page::block_group)
    }

    /// Whether the group's table entry names this page.
    #[inline]
    pub(super) fn is_canonical(&self, number: u32) -> bool {
        self.page(number).is_some_and(Page::is_canonical)
    }

    /// Whether a page is the canonical page of this block group.
    #[inline]
    pub(super) fn is_canonical_for(&self, number: u32, octet: u64) -> bool {
        self.page(number).is_some_and(|page| page.is_canonical() && page.block_group() == octet)
    }

    /// Number of other pages with the group of a canonical page.
    #[inline]
    pub(super) fn siblings(&self, anchor: u32) -> u32 {
        self.page(anchor).map_or(0, |page| page.siblings)
    }

    /// Counts another page with the group of a canonical page.
    pub(super) fn add_sibling(&mut self, anchor: u32) {
        self.page_mut(anchor).siblings += 1;
    }

    /// Uncounts another page with the group of a canonical page; returns the remaining number.
    pub(super) fn remove_sibling(&mut self, anchor: u32) -> u32 {
        let page = self.page_mut(anchor);
        page.siblings -= 1;
        page.siblings
    }

    /// Prefetches a hash and the owner of its page.
    #[inline]
    pub(super) fn prefetch(&self, place: PageSlot) {
        if let Some(page) = self.page(place.page()) {
            prefetch(page);
            prefetch(&page.suffixes[place.slot() as usize]);
        }
    }

    /// Prefetches the shared bytes of a page.
    #[inline]
    pub(super) fn prefetch_group(&self, place: PageSlot) {
        if let Some(page) = self.page(place.page()) {
            prefetch(page);
        }
    }

    /// Prefetches all hashes of a page.
    pub(super) fn prefetch_whole(&self, number: u32) {
        if let Some(page) = self.page(number) {
            page.prefetch();
        }
    }

    /// Run and offset of the block in a slot.
    #[inline]
    pub(super) fn locate(&self, place: PageSlot) -> (u32, u32) {
        self.page(place.page())
            .map_or((0, 0), |page| (page.run(), page.index_in_run() * PAGE_BLOCKS + place.slot()))
    }

    pub(super) fn is_listed(&self, place: PageSlot) -> bool {
        self.listed(place.page()) & 1 << place.slot() != 0
    }

    /// Initialises an allocated page for this block group and run, with no listed blocks.
    #[inline]
    pub(super) fn init_page(&mut self, number: u32, octet: u64, owner: PageOwner, is_anchor: bool) {
        let page = self.page_mut(number);
        (page.tag, page.group_bytes) = (octet as u8, (octet >> 8) as u32);
        (page.siblings, page.entry_points, page.listed) = (0, 0, 0);
        page.owner_high = if is_anchor { CANONICAL } else { 0 };
        page.set_owner(owner);
    }

    /// Assigns a tombstone page to a run.
    pub(super) fn assign_to_run(&mut self, anchor: u32, owner: PageOwner) {
        self.page_mut(anchor).set_owner(owner);
    }

    /// Clears the canonical flag of a new page, because its group has a canonical page already.
    pub(super) fn clear_canonical(&mut self, number: u32) {
        self.page_mut(number).owner_high &= !CANONICAL;
    }

    /// Writes consecutive hashes of the page's group as listed blocks, from a slot on.
    #[inline]
    pub(super) fn write(&mut self, place: PageSlot, hashes: &[BlockHash]) {
        let page = self.page_mut(place.page());
        let slot = place.slot() as usize;
        for (own, hash) in page.suffixes[slot..].iter_mut().zip(hashes) {
            *own = hash.digest();
        }
        page.listed |= (((1u32 << hashes.len()) - 1) << slot) as u8;
    }

    /// One bit per slot: whether the block is an entry point.
    pub(super) fn entry_points(&self, page: u32) -> u8 {
        self.page(page).map_or(0, |page| page.entry_points)
    }

    /// Makes a listed block an entry point; returns whether it was not one before.
    pub(super) fn make_entry_point(&mut self, place: PageSlot) -> bool {
        let bit = 1 << place.slot();
        let is_new = self.entry_points(place.page()) & bit == 0 && self.is_listed(place);
        if is_new {
            self.page_mut(place.page()).entry_points |= bit;
        }
        is_new
    }

    /// Sets the listed bits of a page.
    pub(super) fn set_listed(&mut self, number: u32, live: u8) {
        self.page_mut(number).listed = live;
    }

    /// Sum of the digests of hashes in some slots.
    pub(super) fn digest(&self, number: u32, slots: Range<u32>, salt: u64) -> u128 {
        let Some(page) = self.page(number) else { return 0 };
        slots.fold(0u128, |sum, slot| sum.wrapping_add(salted_digest(page.hash(slot), salt)))
    }

    /// One bit per slot: whether the block is listed.
    #[inline]
    pub(super) fn listed(&self, page: u32) -> u8 {
        self.page(page).map_or(0, |page| page.listed)
    }

    /// Unlists the blocks with set bits; their hashes stay readable. Returns whether the page has
    /// no listed block left.
    pub(super) fn unlist(&mut self, number: u32, bits: u8) -> bool {
        let page = self.page_mut(number);
        page.listed &= !bits;
        page.entry_points &= !bits;
        page.listed == 0
    }

    /// Allocates the lowest free page, so that the order of releases does not matter. `None` if all
    /// pages are taken.
    pub(super) fn allocate(&mut self) -> Option<u32> {
        while self.chunks_with_free.get(self.first_open_word) == Some(&0) {
            self.first_open_word += 1;
        }
        let chunk = match self.chunks_with_free.get(self.first_open_word) {
            Some(word) => self.first_open_word * 64 + word.trailing_zeros() as usize,
            None if self.chunks.len() >= CHUNKS_MAX => return None,
            None => self.chunks.len(),
        };
        self.ensure_chunk(chunk);
        let page = self.free[chunk].trailing_zeros() as usize;
        self.mark_used(chunk, page);
        Some((chunk * CHUNK_PAGES + page) as u32)
    }

    /// Extends the bookkeeping up to this chunk; new chunks are free.
    fn ensure_chunk(&mut self, chunk: usize) {
        while self.chunks.len() <= chunk {
            self.set_open(self.chunks.len(), true);
            self.chunks.push(None);
            self.free.push(ALL_FREE);
        }
    }

    fn set_open(&mut self, chunk: usize, is_open: bool) {
        let word = chunk / 64;
        if self.chunks_with_free.len() <= word {
            self.chunks_with_free.resize(word + 1, 0);
        }
        let bit = 1 << (chunk % 64);
        if is_open {
            self.chunks_with_free[word] |= bit;
            self.first_open_word = self.first_open_word.min(word);
        } else {
            self.chunks_with_free[word] &= !bit;
        }
    }

    fn mark_used(&mut self, chunk: usize, page: usize) {
        let free = &mut self.free[chunk];
        *free &= !(1 << page);
        if *free == 0 {
            self.set_open(chunk, false);
        }
    }

    /// Releases a page.
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

    /// Allocates exactly this page, named by a snapshot. Returns false if it is taken or out of
    /// range.
    pub(super) fn allocate_exact(&mut self, number: u32) -> bool {
        let (chunk, page) = split(number);
        if chunk >= CHUNKS_MAX {
            return false;
        }
        self.ensure_chunk(chunk);
        if self.free[chunk] & 1 << page == 0 {
            return false;
        }
        self.mark_used(chunk, page);
        true
    }
}

#[cfg(test)]
impl Pages {
    /// Pages in use.
    pub(super) fn used(&self) -> u32 {
        self.free.iter().map(|free| free.count_zeros()).sum()
    }

    /// Tombstone pages.
    pub(super) fn tombstones(&self) -> impl Iterator<Item = u32> + '_ {
        let numbers = 0..(self.chunks.len() * CHUNK_PAGES) as u32;
        numbers.filter(|number| self.page(*number).is_some_and(Page::is_tombstone))
    }
}
