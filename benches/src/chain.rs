//! Block hashes drawn at random, with what the blocks of a chain and of an octet have in common.
//!
//! Not here: hashes of tokens (`kv_core::prefix`), which cost more than what these benches measure.

use kv_core::id::{BlockHash, OCTET_BLOCKS};
use rand::RngCore;

/// The hash of a block behind a chain; of the first, if that is empty.
pub fn next_hash(random: &mut impl RngCore, chain: &[BlockHash]) -> BlockHash {
    let mut bytes = [0; 16];
    random.fill_bytes(&mut bytes);
    let own = BlockHash(bytes);
    let root = chain.first().copied().unwrap_or(own);
    let before = chain.last().copied().filter(|_| !chain.len().is_multiple_of(OCTET_BLOCKS));
    own.in_chain(root.root_tag(), before.unwrap_or(own), chain.len())
}
