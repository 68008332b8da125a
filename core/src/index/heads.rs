//! The blocks by which a lookup comes into a run: the first of each run, each that follows one in its run which
//! nobody holds any more, and each that somebody announced with no block before it.
//!
//! A prompt begins with such a block, and goes on with one wherever it leaves a run, so this small map answers
//! what a lookup asks first and last. It stays in the near caches however many blocks the index lists: a prompt
//! that nobody knows costs no wait for the memory. It is exact: which blocks are in it stands in their pages
//! (`pages.rs`), and goes when they are unlisted. Not here: every other block (`places.rs`).

use std::hash::{BuildHasherDefault, Hasher};

use hashbrown::HashMap;

use super::store::At;
use crate::id::BlockHash;

/// Parts of the map, so that no command waits while all of it grows: a million heads are moved in less than
/// a millisecond. Few in tests, which make many.
const PARTS: usize = if cfg!(test) { 2 } else { 64 };
/// A part is made smaller when it has room for so many times what is in it.
const THIN: usize = 4;
/// Heads for which a part keeps its room.
const ROOM_MIN: usize = 64;

/// Position of each head.
#[derive(Clone, Debug, Default)]
pub(super) struct Heads {
    /// None before the first head.
    parts: Vec<HashMap<BlockHash, At, BuildHasherDefault<Fold>>>,
}

impl Heads {
    /// Where a block is, if it is a head.
    #[inline]
    pub(super) fn find(&self, hash: BlockHash) -> Option<At> {
        self.parts.get(part(hash))?.get(&hash).copied()
    }

    pub(super) fn insert(&mut self, hash: BlockHash, at: At) {
        if self.parts.is_empty() {
            self.parts.resize_with(PARTS, HashMap::default);
        }
        self.parts[part(hash)].insert(hash, at);
    }

    pub(super) fn remove(&mut self, hash: BlockHash) {
        let Some(part) = self.parts.get_mut(part(hash)) else { return };
        part.remove(&hash);
        if part.capacity() > ROOM_MIN.max(part.len() * THIN) {
            part.shrink_to(part.len() * 2);
        }
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(HashMap::len).sum()
    }
}

/// By the last byte; the first is the same along a prefix and among all prefixes of a shard.
fn part(hash: BlockHash) -> usize {
    let [.., last] = hash.0;
    usize::from(last) % PARTS
}

/// Block hashes are uniform already; the multiplication guards against hashes made up by hand.
#[derive(Clone, Copy, Debug, Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        let (low, high) = match (bytes.first_chunk(), bytes.last_chunk()) {
            (Some(low), Some(high)) => (u64::from_le_bytes(*low), u64::from_le_bytes(*high)),
            _ => return,
        };
        let product = u128::from(low ^ 0x9E37_79B9_7F4A_7C15) * u128::from(high ^ 0xC2B2_AE3D_27D4_EB4F);
        self.0 ^= (product >> 64) as u64 ^ product as u64;
    }

    fn write_usize(&mut self, _: usize) {}
}
