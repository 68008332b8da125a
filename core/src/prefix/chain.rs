//! State of a hash chain, and the header bytes that the next block's hash takes from it.
//!
//! Not here: how the state advances (`hasher.rs`, `kernel.rs`).

use kvfleet_cpu::block_hash::ImageSink;

use crate::id::{BLOCK_GROUP_BLOCKS, BlockHash};

/// Bytes of a header: the start of a hash, not determined by the block's own image.
const HEADER_BYTES: usize = 5;

/// Bits of a header as a little-endian number: the root tag.
const TAG: u64 = 0xff;
/// The index in the block group.
const INDEX: u64 = INDEX_ONE * (BLOCK_GROUP_BLOCKS as u64 - 1);
/// One index step.
const INDEX_ONE: u64 = 1 << 8;
/// The bits taken from the group's first block.
const GROUP: u64 = ((1 << (8 * HEADER_BYTES)) - 1) & !(TAG | INDEX);

/// Set for the first block of a chain, before its tag is known.
const ROOT: u64 = 1 << 63;

/// The hash state of a prefix of whole blocks; hashing of a longer prefix continues here.
///
/// Belongs to the hasher that made it, and is as secret as its key. Hashes reveal no state, but an
/// attacker with states of chosen prefixes can solve for the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    pub(super) state: [u8; 16],
    /// Position of the next block.
    pub(super) position: ChainPosition,
    /// Blocks in the current segment; zero only before the first block and while a segment begins.
    pub(super) in_segment: u8,
}

impl std::fmt::Debug for Chain {
    /// Omits the state, because logs must not contain it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chain").finish_non_exhaustive()
    }
}

impl Chain {
    /// The chain before the first block.
    pub(super) fn new(state: u128) -> Self {
        let position = ChainPosition { header: ROOT };
        Self { state: state.to_le_bytes(), position, in_segment: 0 }
    }
}

/// Position of a block in its chain, as its hash encodes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ChainPosition {
    /// Header of the hash. For the first block of a group, the group bits are not valid yet.
    /// [`ROOT`] is above them.
    header: u64,
}

impl ChainPosition {
    /// Index of the block in its group.
    pub(super) fn index_in_group(self) -> usize {
        ((self.header & INDEX) / INDEX_ONE) as usize
    }

    /// Turns the images of this and the next blocks, all of one group, into hashes as
    /// `BlockHash::in_chain` defines them. Advances behind them.
    #[inline]
    pub(super) fn apply_headers<const BLOCKS: usize>(&mut self, images: &mut [BlockHash; BLOCKS]) {
        debug_assert!(self.index_in_group() + BLOCKS <= BLOCK_GROUP_BLOCKS, "blocks of two block groups");
        if let (0, Some(first)) = (self.header & INDEX, images.first()) {
            let [a, b, c, d, e, ..] = first.0;
            let image = u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]);
            let own = if self.header & ROOT == 0 { GROUP } else { GROUP | TAG };
            *self = Self { header: self.header & TAG & !own | image & own };
        }
        for image in images {
            let opening = self.header.to_le_bytes();
            image.0[..HEADER_BYTES].copy_from_slice(&opening[..HEADER_BYTES]);
            // After the last block of a group the carry goes into the group bits, which are invalid
            // from then on.
            self.header += INDEX_ONE;
        }
    }
}

/// Writes the hashes of consecutive blocks: their images, with headers.
pub(super) struct HashWriter<'hashes> {
    /// Place of the next hashes.
    pub(super) hashes: &'hashes mut [BlockHash],
    /// Position of the next block.
    pub(super) position: ChainPosition,
}

impl ImageSink for HashWriter<'_> {
    #[inline(always)]
    fn detach(&mut self) -> Self {
        Self { hashes: std::mem::take(&mut self.hashes), position: self.position }
    }

    /// Groups of four start at a block group or at its second half.
    #[inline]
    fn blocks_before_fours(&self) -> usize {
        self.position.index_in_group().wrapping_neg() % 4
    }

    #[inline(always)]
    fn receive<const BLOCKS: usize>(&mut self, images: [[u8; 16]; BLOCKS]) {
        let hashes = std::mem::take(&mut self.hashes).split_first_chunk_mut::<BLOCKS>();
        let Some((next, rest)) = hashes else { return };
        next.iter_mut().zip(&images).for_each(|(hash, image)| hash.0 = *image);
        self.position.apply_headers(next);
        self.hashes = rest;
    }
}
