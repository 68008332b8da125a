//! The block hash in plain Rust: runs on every machine, and is the reference for the vector code.
//!
//! Not here: the field (`field.rs`) and the order of the steps (`hasher.rs`).

use aes::Aes128;
use aes::cipher::{BlockEncrypt, KeyInit};

use super::chain::Chain;
use super::field::ProductSum;
use super::keys::{BlockBatch, HashKeys, SEGMENT_LINES, TokenLine};
use crate::id::BlockHash;

/// The AES permutation that hides states.
#[derive(Clone)]
pub(super) struct Cipher(Aes128);

impl Cipher {
    pub(super) fn new(key: &[u8; 16]) -> Self {
        Self(Aes128::new(key.into()))
    }

    /// Adds blocks to the chain and writes their hashes.
    pub(super) fn absorb(
        &self,
        keys: &HashKeys,
        blocks: BlockBatch<'_>,
        chain: &mut Chain,
        hashes: &mut [BlockHash],
    ) {
        let mut images = [Default::default(); SEGMENT_LINES];
        let mut state = u128::from_le_bytes(chain.state);
        for ((slot, block), image) in blocks.slots().zip(&mut images) {
            state ^= sum(keys, slot, block);
            *image = state.to_le_bytes().into();
        }
        // The cipher is fastest on many blocks at once.
        self.0.encrypt_blocks(&mut images[..hashes.len()]);
        for (hash, image) in hashes.iter_mut().zip(images) {
            *hash = BlockHash(image.into());
            chain.position.apply_headers(std::array::from_mut(hash));
        }
        chain.state = state.to_le_bytes();
    }
}

/// Sum of the lines of a block; `slot` is the key index of its first line.
fn sum(keys: &HashKeys, slot: usize, block: &[TokenLine]) -> u128 {
    let keys = keys.first[slot..].iter().zip(&keys.second[slot..]);
    let mut products = ProductSum::default();
    for (line, (first, second)) in block.iter().zip(keys) {
        products.add(word(line, 0) ^ first[0], word(line, 2) ^ second[0]);
        products.add(word(line, 1) ^ first[1], word(line, 3) ^ second[1]);
    }
    products.reduce()
}

/// A word by number: four tokens, the first one lowest.
fn word(line: &TokenLine, number: usize) -> u128 {
    let tokens = line[4 * number..].iter().take(4);
    tokens.rev().fold(0, |word, &token| word << 32 | u128::from(token))
}
