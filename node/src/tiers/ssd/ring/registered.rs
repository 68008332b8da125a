//! Memory registered with the kernel, so that an operation on it need not look up and pin its
//! pages: the write chunks, and the arena as the destination of reads.
//!
//! Not here: operations (`super`).

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use io_uring::IoUring;

use crate::arena::Arena;
use crate::tiers::ssd::buffer::{ChunkPool, PageBuffer};

/// Maximum length of a registered buffer.
const PART_BYTES: usize = 1 << 30;

/// Registered memory of a ring. It must outlive the ring.
pub(super) struct RegisteredBuffers {
    /// Whether chunks are registered, under their numbers.
    pub(super) has_chunks: bool,
    arena: Option<ArenaParts>,
    _chunks: Arc<PageBuffer>,
}

/// The arena, in parts of [`PART_BYTES`].
struct ArenaParts {
    start: usize,
    bytes: usize,
    /// Buffer index of the first part.
    first: usize,
    _arena: Arena,
}

impl RegisteredBuffers {
    /// Registers the chunks of a pool and the arena. If the kernel refuses (locked memory is
    /// limited), they are used unregistered.
    pub(super) fn new(ring: &IoUring, pool: &ChunkPool, arena: Option<&Arena>) -> RegisteredBuffers {
        let (chunks, memory) = pool.ranges();
        if let Some((arena, (start, bytes))) = arena.and_then(|arena| Some((arena, arena.registrable()?))) {
            let parts = (0..bytes).step_by(PART_BYTES);
            let parts = parts.map(|at| (start.wrapping_add(at), PART_BYTES.min(bytes - at)));
            match register(ring, chunks.iter().copied().chain(parts)) {
                Ok(()) => {
                    let first = chunks.len();
                    let arena = ArenaParts { start: start.addr(), bytes, first, _arena: arena.clone() };
                    return RegisteredBuffers { has_chunks: true, arena: Some(arena), _chunks: memory };
                }
                Err(cause) => {
                    tracing::debug!(%cause, "the kernel does not register the arena for the SSD tier");
                }
            }
        }
        let registered = register(ring, chunks.iter().copied());
        if let Err(cause) = &registered {
            tracing::debug!(%cause, "the kernel does not register the write buffers of the SSD tier");
        }
        RegisteredBuffers { has_chunks: registered.is_ok(), arena: None, _chunks: memory }
    }

    /// The kernel's buffer index for the memory of a read; `None` if it is unregistered or spans
    /// two parts.
    pub(super) fn buffer_index(&self, start: *const u8, bytes: usize) -> Option<u16> {
        self.arena.as_ref()?.buffer_index(start, bytes)
    }
}

impl ArenaParts {
    fn buffer_index(&self, start: *const u8, bytes: usize) -> Option<u16> {
        let first = start.addr().checked_sub(self.start)?;
        let last = first.checked_add(bytes.checked_sub(1)?).filter(|last| *last < self.bytes)?;
        let part = first / PART_BYTES;
        (part == last / PART_BYTES).then(|| u16::try_from(self.first + part).ok())?
    }
}

fn register(ring: &IoUring, ranges: impl Iterator<Item = (*mut u8, usize)>) -> io::Result<()> {
    let ranges: Vec<libc::iovec> =
        ranges.map(|(start, len)| libc::iovec { iov_base: start.cast(), iov_len: len }).collect();
    // SAFETY: the memory belongs to the pool and the arena, which are kept beside the ring and
    // dropped after it.
    unsafe { ring.submitter().register_buffers(&ranges) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::arena::ArenaShape;

    #[test]
    fn memory_maps_to_the_index_of_its_part() {
        let arena = Arena::new(ArenaShape::equal(4096, 4, 0)).unwrap();
        let parts = ArenaParts { start: 1 << 40, bytes: 2 * PART_BYTES + 100, first: 32, _arena: arena };
        let number = |at: usize, bytes| parts.buffer_index(std::ptr::without_provenance(at), bytes);
        let start = 1 << 40;
        assert_eq!(number(start, 1), Some(32));
        assert_eq!(number(start + PART_BYTES - 8, 8), Some(32));
        assert_eq!(number(start + PART_BYTES - 8, 9), None, "spans two parts");
        assert_eq!(number(start + PART_BYTES, 4096), Some(33));
        assert_eq!(number(start + 2 * PART_BYTES, 100), Some(34));
        assert_eq!(number(start + 2 * PART_BYTES, 101), None, "behind the end");
        assert_eq!(number(start - 1, 1), None, "before the start");
        assert_eq!(number(start, 0), None);
    }
}
