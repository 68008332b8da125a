//! The digest over the blocks that a node holds, computed from its announcements. The node keeps
//! the same sum, so both sides can compare.
//!
//! Not here: the equal sum over runs (`store.rs`), and the digest of the whole state
//! (`snapshot.rs`).

use super::command::Change;
use super::holders::TierSet;
use super::store::TIERS_SALT;
use crate::id::{BlockHash, HashWords, Tier};

/// Contribution of one block that a node holds in exactly one tier. Contributions are added with
/// wrapping.
#[must_use]
pub fn copy_digest(block: BlockHash, tier: Tier) -> u128 {
    salted_digest(block, u64::from(TierSet::only(tier).bits()).wrapping_mul(TIERS_SALT))
}

/// A digest of a hash, different for each salt. Unkeyed: sums over keyed block hashes collide by
/// accident with a chance of about 2^-64.
#[inline]
pub(super) fn salted_digest(block: BlockHash, salt: u64) -> u128 {
    let HashWords { first, middle, last } = block.words();
    let product = u128::from(first ^ salt ^ middle << 40) * u128::from(last ^ 0x9E37_79B9_7F4A_7C15);
    product ^ u128::from(first) << 64 ^ u128::from(last)
}

/// The digest after a change, if each block is in one tier at a time.
#[must_use]
pub fn digest_after(before: u128, change: &Change) -> u128 {
    let sum = |blocks: &[BlockHash], tier| {
        blocks.iter().fold(0u128, |sum, block| sum.wrapping_add(copy_digest(*block, tier)))
    };
    match change {
        Change::Stored { blocks, tier, .. } => before.wrapping_add(sum(blocks, *tier)),
        Change::Moved { blocks, from, to } => {
            before.wrapping_add(sum(blocks, *to)).wrapping_sub(sum(blocks, *from))
        }
        Change::Dropped { blocks, tier, .. } => before.wrapping_sub(sum(blocks, *tier)),
        Change::Cleared => 0,
    }
}
