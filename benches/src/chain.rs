//! Random block hashes with the common bits of a chain's and an octet's blocks.
//!
//! Not here: hashes of tokens (`kv_core::prefix`), which cost more than these benches measure.

use kv_core::id::{BLOCK_GROUP_BLOCKS, BlockHash};
use rand::RngCore;

/// The hash of the next block of a chain, or of the first block if the chain is empty.
pub fn next_hash(random: &mut impl RngCore, chain: &[BlockHash]) -> BlockHash {
    let mut bytes = [0; _];
    random.fill_bytes(&mut bytes);
    let own = BlockHash(bytes);
    let root = chain.first().copied().unwrap_or(own);
    let before = chain.last().copied().filter(|_| !chain.len().is_multiple_of(BLOCK_GROUP_BLOCKS));
    own.in_chain(root.root_tag(), before.unwrap_or(own), chain.len())
}
