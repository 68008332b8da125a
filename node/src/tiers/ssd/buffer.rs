//! Page-aligned memory for direct I/O: buffers, a pool of chunks that the kernel can register, and
//! destinations of reads. Not here: their content.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::format::PAGE_BYTES;
use crate::arena::{SLOT_ALIGN_BYTES, SlotMut};

const _: () = assert!(SLOT_ALIGN_BYTES.is_multiple_of(PAGE_BYTES), "reads fill arena slots in whole pages");

/// A zeroed buffer of whole pages, aligned to one.
#[derive(Debug)]
pub(crate) struct PageBuffer {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory with a single owner.
unsafe impl Send for PageBuffer {}
// SAFETY: shared references only read.
unsafe impl Sync for PageBuffer {}

impl PageBuffer {
    pub(crate) fn new(bytes: usize) -> PageBuffer {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let layout = Layout::from_size_align(bytes, PAGE_BYTES)
            .expect("record sizes are far below isize::MAX and a page is a power of two");
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        PageBuffer { base, layout }
    }
}

impl Drop for PageBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `size` initialised bytes, owned by self.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.layout.size()) }
    }
}

impl AsRef<[u8]> for PageBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }
}

/// Equal chunks of one buffer, each with one holder at a time.
#[derive(Debug)]
pub(crate) struct ChunkPool {
    memory: Arc<PageBuffer>,
    chunk_bytes: usize,
    free: Vec<u16>,
}

/// A chunk of a pool, returned by [`ChunkPool::release`].
#[derive(Debug)]
pub(crate) struct Chunk {
    memory: Arc<PageBuffer>,
    number: u16,
    chunk_bytes: usize,
}

impl ChunkPool {
    pub(crate) fn new(chunks: u16, chunk_bytes: usize) -> ChunkPool {
        let memory = Arc::new(PageBuffer::new(usize::from(chunks) * chunk_bytes));
        ChunkPool { memory, chunk_bytes, free: (0..chunks).rev().collect() }
    }

    pub(crate) fn take(&mut self) -> Option<Chunk> {
        let number = self.free.pop()?;
        Some(Chunk { memory: Arc::clone(&self.memory), number, chunk_bytes: self.chunk_bytes })
    }

    #[allow(clippy::needless_pass_by_value)] // consumes the chunk, so its holder cannot use it again
    pub(crate) fn release(&mut self, chunk: Chunk) {
        self.free.push(chunk.number);
    }

    pub(crate) fn has_chunk(&self) -> bool {
        !self.free.is_empty()
    }

    /// Start and length of every chunk, for registration with a ring that does not outlive
    /// `memory`.
    pub(crate) fn ranges(&self) -> (Vec<(*mut u8, usize)>, Arc<PageBuffer>) {
        let chunks = self.memory.len() / self.chunk_bytes;
        let start = |number: usize| self.memory.base.as_ptr().wrapping_add(number * self.chunk_bytes);
        ((0..chunks).map(|number| (start(number), self.chunk_bytes)).collect(), Arc::clone(&self.memory))
    }
}

impl Chunk {
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.memory.base.as_ptr().wrapping_add(usize::from(self.number) * self.chunk_bytes)
    }
}

impl Deref for Chunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies in `memory`, and no two chunks with the same number exist at a
        // time.
        unsafe { std::slice::from_raw_parts(self.start(), self.chunk_bytes) }
    }
}

impl DerefMut for Chunk {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.chunk_bytes) }
    }
}

/// Memory that one read fills in several pieces.
#[derive(Debug)]
pub(crate) struct ReadBuffer {
    base: NonNull<u8>,
    len: usize,
    filled: Mutex<FilledRanges>,
    owner: ReadBufferOwner,
}

/// Filled bytes of a read buffer.
#[derive(Debug, Default)]
struct FilledRanges {
    /// All bytes before this one are filled.
    prefix: usize,
    /// Filled pieces behind a gap.
    detached: Vec<Range<usize>>,
}

/// Owner of a read buffer's memory.
#[derive(Debug)]
pub(crate) enum ReadBufferOwner {
    /// A slot of the arena.
    Slot(SlotMut),
    /// Separate pages.
    Pages(PageBuffer),
}

// SAFETY: the memory belongs to the owner, which this value holds; callers of `piece_start` keep
// pieces disjoint.
unsafe impl Send for ReadBuffer {}
// SAFETY: as above.
unsafe impl Sync for ReadBuffer {}

impl ReadBuffer {
    pub(crate) fn new(mut owner: ReadBufferOwner) -> ReadBuffer {
        let memory: &mut [u8] = match &mut owner {
            ReadBufferOwner::Slot(slot) => slot.whole_mut(),
            ReadBufferOwner::Pages(pages) => pages,
        };
        let (base, len) = (NonNull::from(&mut *memory).cast(), memory.len());
        ReadBuffer { base, len, filled: Mutex::default(), owner }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Start of a piece; panics if the range is outside.
    pub(crate) fn piece_start(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.len, "a piece outside its buffer");
        self.base.as_ptr().wrapping_add(range.start)
    }

    /// Marks a piece as filled: its writer is done with it. Only the ring, which knows this, may
    /// call it.
    pub(super) fn mark_filled(&self, range: Range<usize>) {
        let mut landed = self.filled.lock();
        landed.detached.push(range);
        let FilledRanges { prefix: front, detached: beyond } = &mut *landed;
        while let Some(next) = beyond.iter().position(|piece| piece.start == *front) {
            *front = beyond.swap_remove(next).end.min(self.len);
        }
    }

    /// The leading filled bytes.
    pub(crate) fn filled_prefix(&self) -> &[u8] {
        let bytes = self.filled.lock().prefix;
        // SAFETY: inside the owner's memory, which is borrowed with `self`. The ring reported the
        // end of all pieces up to there, and pieces are disjoint, so these bytes are not written
        // any more.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), bytes) }
    }

    /// The memory. No piece may be in flight: callers hold the last reference then.
    pub(crate) fn into_owner(self) -> ReadBufferOwner {
        self.owner
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn buffers_are_whole_aligned_zero_pages() {
        let buffer = PageBuffer::new(5000);
        assert_eq!(buffer.len(), 8192);
        assert_eq!(buffer.as_ptr() as usize % PAGE_BYTES, 0);
        assert!(buffer.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn chunks_never_overlap_and_come_back() {
        let mut pool = ChunkPool::new(3, PAGE_BYTES);
        let mut chunks: Vec<Chunk> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!((chunks.len(), pool.has_chunk()), (3, false));
        for (fill, chunk) in (1u8..).zip(&mut chunks) {
            chunk.fill(fill);
        }
        assert!((1u8..).zip(&chunks).all(|(fill, chunk)| chunk.iter().all(|byte| *byte == fill)));
        pool.release(chunks.pop().unwrap());
        assert!(pool.take().is_some());
    }

    #[test]
    fn read_buffer_is_filled_piece_by_piece() {
        let landing = ReadBuffer::new(ReadBufferOwner::Pages(PageBuffer::new(2 * PAGE_BYTES)));
        let piece = landing.piece_start(&(PAGE_BYTES..2 * PAGE_BYTES));
        // SAFETY: the second page of the buffer, without another user.
        unsafe { piece.write_bytes(7, PAGE_BYTES) };
        landing.mark_filled(PAGE_BYTES..2 * PAGE_BYTES);
        assert!(landing.filled_prefix().is_empty(), "the first page is still in flight");
        landing.mark_filled(0..PAGE_BYTES);
        assert_eq!((landing.filled_prefix().len(), landing.filled_prefix()[PAGE_BYTES]), (2 * PAGE_BYTES, 7));
        let ReadBufferOwner::Pages(pages) = landing.into_owner() else { panic!("another owner") };
        assert!(pages[..PAGE_BYTES].iter().all(|byte| *byte == 0));
        assert!(pages[PAGE_BYTES..].iter().all(|byte| *byte == 7));
    }
}
