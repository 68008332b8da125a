//! Where the hashes of all blocks lie: pages of eight, handed out one by one.
//!
//! A block's [`Place`] never changes while the block is listed, which is why thirty-one bits are enough
//! for the table to name it. Pages stand in chunks behind `Arc`, so that a frozen index (a snapshot being
//! written) shares them with the living one until the living one writes. Not here: which page follows
//! which (`run.rs`).

use std::sync::Arc;

use crate::id::BlockHash;

/// Blocks in a page: two cache lines of hashes. Less would cost more in page numbers, more would cost
/// more in half-filled pages, because conversations of large blocks are short.
pub(super) const PAGE_BLOCKS: u32 = 8;
/// Pages that are copied together when a frozen index still needs them: just under 32 KiB with their
/// owners and counts, a size that allocators waste nothing on; copied in some microseconds.
const CHUNK_PAGES: usize = 240;
/// Numbers of pages per chunk: a power of two, so that nothing is divided; the last ones name no page.
const CHUNK_NUMBERS: usize = 256;
/// Chunks that can be named: places have 31 bits.
const CHUNKS_MAX: usize = (1 << 28) / CHUNK_NUMBERS;
/// A bit for each page of a chunk.
const ALL_FREE: [u64; CHUNK_NUMBERS / 64] = [u64::MAX, u64::MAX, u64::MAX, u64::MAX >> (CHUNK_NUMBERS - CHUNK_PAGES)];

/// Where a block's hash lies: page and slot in the page. Below 2^31.
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

/// Whose a page is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Owner {
    run: u32,
    /// Which page of its run.
    nth: u16,
    /// One bit per slot: whether the block there is listed.
    live: u8,
}

#[derive(Clone, Debug)]
struct Chunk {
    hashes: [[BlockHash; PAGE_BLOCKS as usize]; CHUNK_PAGES],
    owners: [Owner; CHUNK_PAGES],
    /// One bit per page that is free.
    free: [u64; CHUNK_NUMBERS / 64],
}

impl Chunk {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            hashes: [[BlockHash::default(); PAGE_BLOCKS as usize]; CHUNK_PAGES],
            owners: [Owner::default(); CHUNK_PAGES],
            free: ALL_FREE,
        })
    }
}

/// All pages of one index. A chunk whose pages are all free takes no memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    chunks: Vec<Option<Arc<Chunk>>>,
    /// One bit per chunk that has a free page.
    open: Vec<u64>,
    /// Words of `open` below this one are zero.
    open_from: usize,
}

fn split(page: u32) -> (usize, usize) {
    (page as usize / CHUNK_NUMBERS, page as usize % CHUNK_NUMBERS)
}

impl Pages {
    fn chunk(&self, place: Place) -> Option<(&Chunk, usize)> {
        let (chunk, page) = split(place.page());
        Some((self.chunks[chunk].as_deref()?, page))
    }

    fn chunk_mut(&mut self, number: u32) -> (&mut Chunk, usize) {
        let (chunk, page) = split(number);
        (Arc::make_mut(self.chunks[chunk].get_or_insert_with(Chunk::new)), page)
    }

    pub(super) fn hash(&self, place: Place) -> BlockHash {
        self.chunk(place).map_or_else(BlockHash::default, |(chunk, page)| {
            chunk.hashes[page][place.slot() as usize]
        })
    }

    /// Run and offset of the block at a place.
    pub(super) fn locate(&self, place: Place) -> (u32, u32) {
        let owner = self.chunk(place).map_or_else(Owner::default, |(chunk, page)| chunk.owners[page]);
        (owner.run, u32::from(owner.nth) * PAGE_BLOCKS + place.slot())
    }

    pub(super) fn is_live(&self, place: Place) -> bool {
        self.chunk(place).is_some_and(|(chunk, page)| chunk.owners[page].live & 1 << place.slot() != 0)
    }

    /// Writes hashes from a place on, all in one page, and lists them.
    pub(super) fn list(&mut self, place: Place, hashes: &[BlockHash]) {
        let (chunk, page) = self.chunk_mut(place.page());
        let slot = place.slot() as usize;
        chunk.hashes[page][slot..slot + hashes.len()].copy_from_slice(hashes);
        let bits = (1u32 << hashes.len()) - 1;
        chunk.owners[page].live |= (bits << slot) as u8;
    }

    /// Unlists a block; its hash stays legible. Answers whether the page has no listed block left.
    pub(super) fn unlist(&mut self, place: Place) -> bool {
        let (chunk, page) = self.chunk_mut(place.page());
        chunk.owners[page].live &= !(1 << place.slot());
        chunk.owners[page].live == 0
    }

    /// The lowest free page, now of this run; none when all places are taken. The lowest, so that the
    /// order in which pages were freed does not matter.
    pub(super) fn take(&mut self, run: u32, nth: u16) -> Option<u32> {
        while self.open.get(self.open_from) == Some(&0) {
            self.open_from += 1;
        }
        let chunk = match self.open.get(self.open_from) {
            Some(word) => self.open_from * 64 + word.trailing_zeros() as usize,
            None if self.chunks.len() >= CHUNKS_MAX => return None,
            None => self.chunks.len(),
        };
        self.reach(chunk);
        let free = self.chunks[chunk].as_ref().map_or(ALL_FREE, |chunk| chunk.free);
        let word = free.iter().position(|word| *word != 0)?;
        let page = word * 64 + free[word].trailing_zeros() as usize;
        let number = (chunk * CHUNK_NUMBERS + page) as u32;
        self.own(number, run, nth);
        Some(number)
    }

    /// Makes room for the names of chunks up to this one; those in between are free.
    fn reach(&mut self, chunk: usize) {
        while self.chunks.len() <= chunk {
            self.set_open(self.chunks.len(), true);
            self.chunks.push(None);
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

    fn own(&mut self, number: u32, run: u32, nth: u16) {
        let (chunk, page) = self.chunk_mut(number);
        chunk.owners[page] = Owner { run, nth, live: 0 };
        chunk.free[page / 64] &= !(1 << (page % 64));
        if chunk.free == [0; CHUNK_NUMBERS / 64] {
            self.set_open(split(number).0, false);
        }
    }

    /// Gives a page back.
    pub(super) fn free(&mut self, number: u32) {
        let (chunk, page) = self.chunk_mut(number);
        chunk.free[page / 64] |= 1 << (page % 64);
        let is_empty = chunk.free == ALL_FREE;
        let number = split(number).0;
        self.set_open(number, true);
        if is_empty {
            self.chunks[number] = None;
        }
        while matches!(self.chunks.last(), Some(None)) {
            self.chunks.pop();
            self.set_open(self.chunks.len(), false);
        }
    }

    /// Takes a page with this very number, as a snapshot names it, if it is free.
    pub(super) fn take_exactly(&mut self, number: u32, run: u32, nth: u16) -> bool {
        let (chunk, page) = split(number);
        if chunk >= CHUNKS_MAX || page >= CHUNK_PAGES {
            return false;
        }
        self.reach(chunk);
        let is_free = |chunk: &Arc<Chunk>| chunk.free[page / 64] & 1 << (page % 64) != 0;
        if !self.chunks[chunk].as_ref().is_none_or(is_free) {
            return false;
        }
        self.own(number, run, nth);
        true
    }
}
