//! The prompt hash as ADR 0016 defines it, bit by bit and power by power: slow and simple.
//!
//! Shares only the digest of the manifest and the crate for AES with the product code.

use aes::cipher::{BlockEncrypt, KeyInit};

use crate::id::BlockHash;
use crate::prefix::IdentityManifest;

/// Schoolbook multiplication: shift, add, and subtract the modulus on overflow.
pub(crate) fn multiply(left: u128, right: u128) -> u128 {
    let mut product = 0u128;
    for bit in (0..128).rev() {
        let overflows = product >> 127 == 1;
        product <<= 1;
        if overflows {
            product ^= 0b1000_0111;
        }
        if left >> bit & 1 == 1 {
            product ^= right;
        }
    }
    product
}

fn power(base: u128, exponent: usize) -> u128 {
    (0..exponent).fold(1, |product, _| multiply(product, base))
}

/// The hash of one block of a chain, from the images of all blocks, bit by bit.
pub(crate) fn hash_with_header(images: &[u128], position: usize) -> BlockHash {
    let (octet, nth) = (position / 8 * 8, position as u128 % 8);
    let bit = |number: usize| match number {
        0..8 => images[0] >> number & 1,
        8..11 => nth >> (number - 8) & 1,
        11..40 => images[octet] >> number & 1,
        _ => images[position] >> number & 1,
    };
    BlockHash((0..128).fold(0u128, |hash, number| hash | bit(number) << number).to_le_bytes())
}

/// The keys in the order of the key stream.
pub(crate) struct ReferenceHasher {
    cipher: aes::Aes128,
    step: u128,
    tail: u128,
    ids: u128,
    words: Vec<u128>,
    block_tokens: usize,
}

impl ReferenceHasher {
    pub(crate) fn new(manifest: &IdentityManifest, salt: &[u8; 32]) -> Self {
        let mut deriving = blake3::Hasher::new_derive_key("kvfleet 2026-11 prompt hash keys, octets");
        deriving.update(&[&manifest.full_digest()[..], &salt[..]].concat());
        let mut stream = [0; 16 * 132];
        deriving.finalize_xof().fill(&mut stream);
        let (parts, _) = stream.as_chunks::<16>();
        let element = |part: &[u8; 16]| u128::from_le_bytes(*part);
        Self {
            cipher: aes::Aes128::new(&parts[0].into()),
            step: element(&parts[1]),
            tail: element(&parts[2]),
            ids: element(&parts[3]),
            words: parts[4..].iter().map(element).collect(),
            block_tokens: manifest.block_tokens as usize,
        }
    }

    pub(crate) fn blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let blocks: Vec<&[u32]> = tokens.chunks(self.block_tokens).collect();
        self.hashes(&blocks, self.block_tokens, 0)
    }

    pub(crate) fn chain_ids(&self, ids: &[u64]) -> Vec<BlockHash> {
        let blocks: Vec<[u32; 2]> = ids.iter().map(|id| [*id as u32, (id >> 32) as u32]).collect();
        let blocks: Vec<&[u32]> = blocks.iter().map(|block| &block[..]).collect();
        self.hashes(&blocks, 2, self.ids)
    }

    fn hashes(&self, blocks: &[&[u32]], whole: usize, start: u128) -> Vec<BlockHash> {
        let lines = whole.div_ceil(16);
        let per_segment = 32 / lines;
        let sum = |(number, block): (usize, &&[u32])| self.sum(block, number % per_segment * lines);
        let sums: Vec<u128> = blocks.iter().enumerate().map(sum).collect();
        let mut images: Vec<u128> = Vec::new();
        for (last, block) in blocks.iter().enumerate() {
            let segments_after = |number: usize| last / per_segment - number / per_segment;
            let mut state = multiply(start, power(self.step, segments_after(0)));
            for (number, sum) in sums[..=last].iter().enumerate() {
                state ^= multiply(*sum, power(self.step, segments_after(number)));
            }
            if block.len() < whole {
                state ^= multiply(self.tail, block.len() as u128);
            }
            let mut image = state.to_le_bytes().into();
            self.cipher.encrypt_block(&mut image);
            images.push(u128::from_le_bytes(image.into()));
        }
        (0..images.len()).map(|position| hash_with_header(&images, position)).collect()
    }

    /// Sum of the products of a block; `slot` is the key index of its first line.
    fn sum(&self, block: &[u32], slot: usize) -> u128 {
        let mut sum = 0;
        for (number, line) in block.chunks(16).enumerate() {
            let keyed = |word: usize| {
                let mut tokens = line.iter().skip(4 * word).take(4).copied().collect::<Vec<_>>();
                tokens.resize(4, 0);
                let plain = tokens.iter().rev().fold(0, |word, &token| word << 32 | u128::from(token));
                plain ^ self.words[4 * (slot + number) + word]
            };
            sum ^= multiply(keyed(0), keyed(2)) ^ multiply(keyed(1), keyed(3));
        }
        sum
    }
}
