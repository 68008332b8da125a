//! One operation, with its memory.
//!
//! Not here: how it is done (the parent module).

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::tiers::ssd::buffer::{Chunk, Landing};
use crate::tiers::ssd::format::PAGE_BYTES;

/// One operation, at whole pages.
#[derive(Debug)]
pub(crate) enum Op {
    /// Fills a range of a landing.
    Read { landing: Arc<Landing>, range: Range<usize> },
    /// Writes pieces one after another.
    Write(Gather),
    /// What ended before is on the medium.
    Sync,
}

/// Bytes that are written together: what was copied into a chunk, and what lies well where it is.
#[derive(Debug)]
pub(crate) struct Gather {
    chunk: Chunk,
    /// Bytes of the chunk that are used.
    copied: usize,
    pieces: Vec<Piece>,
    bytes: usize,
}

#[derive(Debug)]
enum Piece {
    Copied(Range<usize>),
    /// Whole pages that begin at one.
    Shared(Bytes),
}

impl Gather {
    /// Nothing yet; it may take as much as the chunk has room for.
    pub(crate) fn new(chunk: Chunk) -> Gather {
        Gather { chunk, copied: 0, pieces: Vec::new(), bytes: 0 }
    }

    /// Bytes in it.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that still fit.
    pub(crate) fn room(&self) -> usize {
        self.chunk.len() - self.bytes
    }

    /// Whole pages that follow, from where they lie.
    pub(crate) fn share(&mut self, bytes: Bytes) {
        debug_assert!(is_at_a_page(&bytes) && bytes.len().is_multiple_of(PAGE_BYTES));
        debug_assert!(bytes.len() <= self.room());
        self.bytes += bytes.len();
        self.pieces.push(Piece::Shared(bytes));
    }

    /// Room for whole pages that follow, to be filled.
    pub(crate) fn copy(&mut self, bytes: usize) -> &mut [u8] {
        debug_assert!(bytes <= self.room());
        let range = self.copied..self.copied + bytes;
        self.copied = range.end;
        self.bytes += bytes;
        match self.pieces.last_mut() {
            Some(Piece::Copied(last)) => last.end = range.end,
            _ => self.pieces.push(Piece::Copied(range.clone())),
        }
        &mut self.chunk[range]
    }

    /// The pieces, in their order.
    pub(super) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(|piece| match piece {
            Piece::Copied(range) => &self.chunk[range.clone()],
            Piece::Shared(bytes) => bytes,
        })
    }

    /// Whether all of it is in the chunk.
    pub(super) fn is_copied(&self) -> bool {
        self.copied == self.bytes
    }

    /// The chunk, of which nobody else has anything.
    pub(super) fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// The chunk, once it was written.
    pub(crate) fn into_chunk(self) -> Chunk {
        self.chunk
    }
}

/// Whether memory begins at a page, as direct I/O wants it.
pub(crate) fn is_at_a_page(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(PAGE_BYTES)
}

impl Op {
    pub(crate) fn wanted(&self) -> usize {
        match self {
            Op::Read { range, .. } => range.len(),
            Op::Write(gather) => gather.bytes(),
            Op::Sync => 0,
        }
    }

    /// All of it was done.
    pub(super) fn has_ended(&self) {
        if let Op::Read { landing, range } = self {
            landing.has_landed(range.clone());
        }
    }
}
