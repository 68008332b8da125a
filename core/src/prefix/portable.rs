//! The block hash in plain Rust: runs on every machine, and is the reference for the vector code.
//!
//! Not here: the field (`field.rs`) and the order of the steps (`hasher.rs`).

use aes::Aes128;
use aes::cipher::{BlockEncrypt, KeyInit};

use kvfleet_cpu::block_hash::{BlockBatch, ImageSink, LineKeys, SEGMENT_LINES, TokenLine};

use super::field::ProductSum;

/// The AES permutation that hides states.
#[derive(Clone)]
pub(super) struct Cipher(Aes128);

impl Cipher {
    pub(super) fn new(key: &[u8; 16]) -> Self {
        Self(Aes128::new(key.into()))
    }

    /// Advances the state over the blocks and sends the image after each to `images`.
    pub(super) fn absorb(
        &self,
        keys: &LineKeys,
        blocks: BlockBatch<'_>,
        state: &mut [u8; 16],
        images: &mut impl ImageSink,
    ) {
        let mut states = [Default::default(); SEGMENT_LINES];
        let (mut now, mut count) = (u128::from_le_bytes(*state), 0);
        for ((slot, block), to) in blocks.slots().zip(&mut states) {
            now ^= sum(keys, slot, block);
            *to = now.to_le_bytes().into();
            count += 1;
        }
        // The cipher is fastest on many blocks at once.
        self.0.encrypt_blocks(&mut states[..count]);
        states[..count].iter().for_each(|image| images.receive([(*image).into()]));
        *state = now.to_le_bytes();
    }
}

/// Sum of the lines of a block; `slot` is the key index of its first line.
fn sum(keys: &LineKeys, slot: usize, block: &[TokenLine]) -> u128 {
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
