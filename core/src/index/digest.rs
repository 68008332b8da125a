//! What one node's hold of one block adds to the digest over what it holds, so that the node can keep the sum
//! itself and both sides can compare.
//!
//! Not here: the sum over runs (`store.rs`), which comes to the same, and the digest of all state (`snapshot.rs`).

use super::command::Change;
use super::holders::TierSet;
use super::store::TIERS_SALT;
use crate::id::{BlockHash, Tier};

/// The share of one block that a node holds in one tier and in no other. Sums of shares wrap.
#[must_use]
pub fn of_hold(block: BlockHash, tier: Tier) -> u128 {
    let [tag, hash @ ..] = block.0;
    let salt = u64::from(TierSet::only(tier).bits()).wrapping_mul(TIERS_SALT) ^ u64::from(tag) << 56;
    let [_, high @ ..] = hash;
    let low = hash.first_chunk().map_or(0, |low| u64::from_le_bytes(*low));
    let high = high.last_chunk().map_or(0, |high| u64::from_le_bytes(*high));
    let product = u128::from(low ^ salt) * u128::from(high ^ 0x9E37_79B9_7F4A_7C15);
    product ^ u128::from(low) << 64 ^ u128::from(high)
}

/// The digest over what a node holds after a change, if each of its blocks is in one tier at a time.
#[must_use]
pub fn after(before: u128, change: &Change) -> u128 {
    let sum = |blocks: &[BlockHash], tier| {
        blocks.iter().fold(0u128, |sum, block| sum.wrapping_add(of_hold(*block, tier)))
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
