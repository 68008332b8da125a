//! One operation, with its memory.
//!
//! Not here: performing it (the parent module).

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::tiers::ssd::buffer::{Chunk, ReadBuffer};
use crate::tiers::ssd::format::PAGE_BYTES;

/// One operation on whole pages.
#[derive(Debug)]
pub(crate) enum RingOp {
    /// Fills a range of a read buffer.
    Read { landing: Arc<ReadBuffer>, range: Range<usize> },
    /// Writes pieces one after another.
    Write(GatherWrite),
    /// Makes completed writes durable.
    Sync,
}

/// Bytes that are written together: copied into a chunk, or shared in place if aligned.
#[derive(Debug)]
pub(crate) struct GatherWrite {
    chunk: Chunk,
    /// Used bytes of the chunk.
    copied: usize,
    pieces: Vec<WritePiece>,
    bytes: usize,
}

#[derive(Debug)]
enum WritePiece {
    Copied(Range<usize>),
    /// Whole aligned pages.
    Shared(Bytes),
}

impl GatherWrite {
    /// An empty write with the capacity of the chunk.
    pub(crate) fn new(chunk: Chunk) -> GatherWrite {
        GatherWrite { chunk, copied: 0, pieces: Vec::new(), bytes: 0 }
    }

    /// Bytes in it.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that still fit.
    pub(crate) fn free_bytes(&self) -> usize {
        self.chunk.len() - self.bytes
    }

    /// Appends whole pages without a copy.
    pub(crate) fn append_shared(&mut self, bytes: Bytes) {
        debug_assert!(is_page_aligned(&bytes) && bytes.len().is_multiple_of(PAGE_BYTES));
        debug_assert!(bytes.len() <= self.free_bytes());
        self.bytes += bytes.len();
        self.pieces.push(WritePiece::Shared(bytes));
    }

    /// Appends whole pages, which the caller fills in the returned slice.
    pub(crate) fn append_copy(&mut self, bytes: usize) -> &mut [u8] {
        debug_assert!(bytes <= self.free_bytes());
        let range = self.copied..self.copied + bytes;
        self.copied = range.end;
        self.bytes += bytes;
        match self.pieces.last_mut() {
            Some(WritePiece::Copied(last)) => last.end = range.end,
            _ => self.pieces.push(WritePiece::Copied(range.clone())),
        }
        &mut self.chunk[range]
    }

    /// The pieces, in their order.
    pub(super) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(|piece| match piece {
            WritePiece::Copied(range) => &self.chunk[range.clone()],
            WritePiece::Shared(bytes) => bytes,
        })
    }

    /// Whether all bytes are in the chunk.
    pub(super) fn is_copied(&self) -> bool {
        self.copied == self.bytes
    }

    /// The chunk, without another user.
    pub(super) fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// The chunk, after the write.
    pub(crate) fn into_chunk(self) -> Chunk {
        self.chunk
    }
}

/// Whether memory begins at a page, as required by direct I/O.
pub(crate) fn is_page_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(PAGE_BYTES)
}

impl RingOp {
    pub(crate) fn bytes(&self) -> usize {
        match self {
            RingOp::Read { range, .. } => range.len(),
            RingOp::Write(gather) => gather.bytes(),
            RingOp::Sync => 0,
        }
    }

    /// Marks the whole operation as done.
    pub(super) fn mark_done(&self) {
        if let RingOp::Read { landing, range } = self {
            landing.mark_filled(range.clone());
        }
    }
}
