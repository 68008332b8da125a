//! State of a hash chain, and the place bytes that the next block's hash begins with.
//!
//! Not here: how the state advances (`hasher.rs`).

use super::lanes::{Node, OUTPUT_BYTES};
use crate::id::{BLOCK_GROUP_BLOCKS, BlockHash, DIGEST_BYTES, HASH_BYTES, PLACE_BYTES};

/// Bits of the place as a little-endian number: the root tag.
const TAG: u64 = 0xff;
/// The index in the block group.
const INDEX: u64 = INDEX_ONE * (BLOCK_GROUP_BLOCKS as u64 - 1);
/// One index step.
const INDEX_ONE: u64 = 1 << 8;
/// The bits taken from the group's first block.
const GROUP: u64 = ((1 << (8 * PLACE_BYTES)) - 1) & !(TAG | INDEX);

/// Set for the first block of a chain, before its tag is known.
const ROOT: u64 = 1 << 63;

/// The hash state of a prefix of whole blocks; hashing of a longer prefix continues here.
///
/// Belongs to the hasher that made it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    /// Hash of everything before the current block group.
    pub(super) state: Node,
    /// Hash of the blocks of the current group so far; of no meaning before the first of them.
    pub(super) group: Node,
    /// Position of the next block.
    pub(super) position: ChainPosition,
}

impl std::fmt::Debug for Chain {
    /// Omits the state, which reveals hashes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chain").finish_non_exhaustive()
    }
}

/// A [`Chain`] without what the last block's hash tells, for callers that keep many.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ChainNodes([Node; 2]);

impl std::fmt::Debug for ChainNodes {
    /// Omits the state, which reveals hashes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChainNodes").finish_non_exhaustive()
    }
}

impl Chain {
    /// The chain before the first block.
    pub(super) fn new() -> Self {
        let position = ChainPosition { place: ROOT };
        Self { state: Node::default(), group: Node::default(), position }
    }

    /// The part of the chain that the last block's hash does not tell.
    #[must_use]
    pub fn nodes(&self) -> ChainNodes {
        ChainNodes([self.state, self.group])
    }

    /// The chain with these nodes behind the block `last`; `None` before the first block.
    #[must_use]
    pub fn resume(nodes: ChainNodes, last: Option<BlockHash>) -> Self {
        let ChainNodes([state, group]) = nodes;
        let place = last.map_or(ROOT, |last| place_of(last.0) + INDEX_ONE);
        Self { state, group, position: ChainPosition { place } }
    }
}

/// The number that the first bytes are.
#[inline]
fn place_of<const BYTES: usize>(bytes: [u8; BYTES]) -> u64 {
    let mut place = [0; 8];
    place[..PLACE_BYTES].copy_from_slice(&bytes[..PLACE_BYTES]);
    u64::from_le_bytes(place)
}

/// Position of a block in its chain, as its hash encodes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ChainPosition {
    /// The place. For the first block of a group, the group bits are not valid yet. [`ROOT`] is
    /// above them.
    place: u64,
}

impl ChainPosition {
    /// Index of the block in its group.
    #[inline]
    pub(super) fn index_in_group(self) -> usize {
        ((self.place & INDEX) / INDEX_ONE) as usize
    }

    /// The block hash at this position, from the hash of everything up to the block: its first
    /// bytes are the digest, and those from the sixteenth on give the place of the group, so that
    /// both are independent. Advances behind it.
    #[inline]
    pub(super) fn next_hash(&mut self, output: &[u8; OUTPUT_BYTES]) -> BlockHash {
        if self.place & INDEX == 0 {
            let [_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, image @ ..] = *output;
            let own = if self.place & ROOT == 0 { GROUP } else { GROUP | TAG };
            self.place = self.place & TAG & !own | place_of(image) & own;
        }
        let mut hash = [0; HASH_BYTES];
        let (place, digest) = hash.split_at_mut(PLACE_BYTES);
        place.copy_from_slice(&self.place.to_le_bytes()[..PLACE_BYTES]);
        digest.copy_from_slice(&output[..DIGEST_BYTES]);
        // After the last block of a group the carry goes into the group bits, which are invalid
        // from then on.
        self.place += INDEX_ONE;
        BlockHash(hash)
    }
}
