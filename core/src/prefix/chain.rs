//! Where a chain stands, and what the hash of its next block has from there.
//!
//! Not here: what the state is and how it goes on (`hasher.rs`, `kernel.rs`).

use crate::id::{BlockHash, OCTET_BLOCKS};

/// Bytes of an opening: what a hash begins with and its own image does not decide.
const OPENING_BYTES: usize = 5;

/// Bits of an opening as a little-endian number: the root tag.
const TAG: u64 = 0xff;
/// The position in the octet.
const NTH: u64 = NTH_ONE * (OCTET_BLOCKS as u64 - 1);
/// One position more.
const NTH_ONE: u64 = 1 << 8;
/// The bits of the octet's first block.
const OCTET: u64 = ((1 << (8 * OPENING_BYTES)) - 1) & !(TAG | NTH);

/// Set in the first block of a chain, whose tag means nothing yet.
const ROOT: u64 = 1 << 63;

/// A prefix of whole blocks, as far as hashing needs to know it: what a longer prefix continues from.
///
/// Belongs to the hasher that made it, and is as secret as its key: a hash says nothing of the state, but
/// who has states of chosen prefixes can solve for the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    pub(super) state: [u8; 16],
    /// Where the next block is.
    pub(super) place: Place,
    /// Blocks of the current segment; zero only before the first block and while a segment begins.
    pub(super) in_segment: u8,
}

impl std::fmt::Debug for Chain {
    /// Leaves the state out: logs are no place for it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chain").finish_non_exhaustive()
    }
}

impl Chain {
    /// Before the first block.
    pub(super) fn new(state: u128) -> Self {
        let place = Place { opening: ROOT };
        Self { state: state.to_le_bytes(), place, in_segment: 0 }
    }
}

/// Where in its chain a block is, as its hash says it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// What the hash begins with. If it is the first of an octet, the octet bits mean nothing yet. Above them is [`ROOT`].
    opening: u64,
}

impl Place {
    /// Which block of its octet it is.
    pub(super) fn nth(self) -> usize {
        ((self.opening & NTH) / NTH_ONE) as usize
    }

    /// Makes hashes of the images of this block and the next ones, all of one octet, and goes on behind them: each
    /// becomes what `BlockHash::in_chain` says.
    #[inline]
    pub(super) fn open<const BLOCKS: usize>(&mut self, images: &mut [BlockHash; BLOCKS]) {
        debug_assert!(self.nth() + BLOCKS <= OCTET_BLOCKS, "blocks of two octets");
        if let (0, Some(first)) = (self.opening & NTH, images.first()) {
            let [a, b, c, d, e, ..] = first.0;
            let image = u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]);
            let own = if self.opening & ROOT == 0 { OCTET } else { OCTET | TAG };
            *self = Self { opening: self.opening & TAG & !own | image & own };
        }
        for image in images {
            let opening = self.opening.to_le_bytes();
            image.0[..OPENING_BYTES].copy_from_slice(&opening[..OPENING_BYTES]);
            // After the last block of an octet the carry goes into its bits, which mean nothing from then on.
            self.opening += NTH_ONE;
        }
    }
}
