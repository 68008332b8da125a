//! Memory that the kernel keeps mapped, so that an operation on it does not have to find and hold its pages: the chunks
//! that are written, and the arena that is read into.
//!
//! Not here: operations (`super`).

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use io_uring::IoUring;

use crate::arena::Arena;
use crate::tiers::ssd::buffer::{PageBuffer, Pool};

/// The kernel takes no buffer longer than this.
const PART_BYTES: usize = 1 << 30;

/// What a ring knows. Lives longer than the ring.
pub(super) struct Registered {
    /// Chunks are known by their numbers.
    pub(super) has_chunks: bool,
    arena: Option<Parts>,
    _chunks: Arc<PageBuffer>,
}

/// The arena, in parts of [`PART_BYTES`].
struct Parts {
    start: usize,
    bytes: usize,
    /// Number of the first part.
    first: usize,
    _arena: Arena,
}

impl Registered {
    /// Registers the chunks of a pool and the arena; what the kernel refuses (memory that may be locked is limited)
    /// goes without.
    pub(super) fn new(ring: &IoUring, pool: &Pool, arena: Option<&Arena>) -> Registered {
        let (chunks, memory) = pool.ranges();
        if let Some((arena, (start, bytes))) = arena.and_then(|arena| Some((arena, arena.registrable()?))) {
            let parts = (0..bytes).step_by(PART_BYTES);
            let parts = parts.map(|at| (start.wrapping_add(at), PART_BYTES.min(bytes - at)));
            match register(ring, chunks.iter().copied().chain(parts)) {
                Ok(()) => {
                    let first = chunks.len();
                    let arena = Parts { start: start.addr(), bytes, first, _arena: arena.clone() };
                    return Registered { has_chunks: true, arena: Some(arena), _chunks: memory };
                }
                Err(cause) => {
                    tracing::debug!(%cause, "the kernel does not keep the arena mapped for the SSD tier");
                }
            }
        }
        let registered = register(ring, chunks.iter().copied());
        if let Err(cause) = &registered {
            tracing::debug!(%cause, "the kernel does not keep the write buffers of the SSD tier mapped");
        }
        Registered { has_chunks: registered.is_ok(), arena: None, _chunks: memory }
    }

    /// The number by which the kernel knows the memory of a read; none for what it does not know, or knows in two parts.
    pub(super) fn number(&self, start: *const u8, bytes: usize) -> Option<u16> {
        self.arena.as_ref()?.number(start, bytes)
    }
}

impl Parts {
    fn number(&self, start: *const u8, bytes: usize) -> Option<u16> {
        let first = start.addr().checked_sub(self.start)?;
        let last = first.checked_add(bytes.checked_sub(1)?).filter(|last| *last < self.bytes)?;
        let part = first / PART_BYTES;
        (part == last / PART_BYTES).then(|| u16::try_from(self.first + part).ok())?
    }
}

fn register(ring: &IoUring, ranges: impl Iterator<Item = (*mut u8, usize)>) -> io::Result<()> {
    let ranges: Vec<libc::iovec> =
        ranges.map(|(start, len)| libc::iovec { iov_base: start.cast(), iov_len: len }).collect();
    // SAFETY: the memory is that of the pool and the arena, which are kept beside the ring and dropped after it.
    unsafe { ring.submitter().register_buffers(&ranges) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::arena::ArenaShape;

    #[test]
    fn memory_has_the_number_of_the_part_that_it_lies_in() {
        let arena = Arena::new(ArenaShape::equal(4096, 4, 0)).unwrap();
        let parts = Parts { start: 1 << 40, bytes: 2 * PART_BYTES + 100, first: 32, _arena: arena };
        let number = |at: usize, bytes| parts.number(std::ptr::without_provenance(at), bytes);
        let start = 1 << 40;
        assert_eq!(number(start, 1), Some(32));
        assert_eq!(number(start + PART_BYTES - 8, 8), Some(32));
        assert_eq!(number(start + PART_BYTES - 8, 9), None, "in two parts");
        assert_eq!(number(start + PART_BYTES, 4096), Some(33));
        assert_eq!(number(start + 2 * PART_BYTES, 100), Some(34));
        assert_eq!(number(start + 2 * PART_BYTES, 101), None, "behind the end");
        assert_eq!(number(start - 1, 1), None, "before the start");
        assert_eq!(number(start, 0), None);
    }
}
