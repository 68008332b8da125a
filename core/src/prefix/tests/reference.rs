//! The block hash as `docs/reference/hash.md` specifies it, one block and one message at a time: slow
//! and simple.
//!
//! Shares only the digest of the manifest with the product code.

use crate::id::BlockHash;
use crate::prefix::IdentityManifest;

type Key = [u8; 32];

/// The hash of one block of a chain, from the outputs of all blocks, bit by bit.
pub(crate) fn hash_with_place(outputs: &[[u8; 32]], position: usize) -> BlockHash {
    let bit = |block: usize, number: usize| outputs[block][16 + number / 8] >> (number % 8) & 1;
    let mut hash = BlockHash::default();
    for number in 0..40 {
        let bit = match number {
            0..8 => bit(0, number),
            8..11 => ((position % 8) >> (number - 8) & 1) as u8,
            _ => bit(position / 8 * 8, number),
        };
        hash.0[number / 8] |= bit << (number % 8);
    }
    hash.0[5..].copy_from_slice(&outputs[position][..14]);
    hash
}

pub(crate) struct ReferenceHasher {
    tokens: Key,
    group: Key,
    prefix: Key,
    ids: Key,
    block_tokens: usize,
}

impl ReferenceHasher {
    pub(crate) fn new(manifest: &IdentityManifest, salt: &[u8; 32]) -> Self {
        let mut deriving = blake3::Hasher::new_derive_key("kvfleet 2026-11 prompt hash keys, tree");
        deriving.update(&[&manifest.full_digest()[..], &salt[..]].concat());
        let mut stream = [[0; 32]; 4];
        deriving.finalize_xof().fill(stream.as_flattened_mut());
        let [tokens, group, prefix, ids] = stream;
        Self { tokens, group, prefix, ids, block_tokens: manifest.block_tokens as usize }
    }

    pub(crate) fn blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let bytes = |block: &[u32]| block.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>();
        let leaves = tokens.chunks(self.block_tokens).map(|block| hash(&self.tokens, &bytes(block)));
        self.hashes(&leaves.collect::<Vec<_>>())
    }

    pub(crate) fn chain_ids(&self, ids: &[u64]) -> Vec<BlockHash> {
        let padded = |id: &u64| [&id.to_le_bytes()[..], &[0; 56]].concat();
        let leaves = ids.iter().map(|id| hash(&self.ids, &padded(id)));
        self.hashes(&leaves.collect::<Vec<_>>())
    }

    fn hashes(&self, leaves: &[[u8; 32]]) -> Vec<BlockHash> {
        let pair = |left: &[u8; 32], right: &[u8; 32]| [&left[..16], &right[..16], &[0; 32]].concat();
        let mut outputs: Vec<[u8; 32]> = Vec::new();
        for last in 0..leaves.len() {
            let mut state = [0; 32];
            for group in leaves[..=last].chunks(8) {
                let (first, rest) = group.split_first().unwrap();
                let within = rest.iter().fold(*first, |before, leaf| hash(&self.group, &pair(&before, leaf)));
                state = hash(&self.prefix, &pair(&state, &within));
            }
            outputs.push(state);
        }
        (0..outputs.len()).map(|position| hash_with_place(&outputs, position)).collect()
    }
}

fn hash(key: &Key, message: &[u8]) -> [u8; 32] {
    *blake3::keyed_hash(key, message).as_bytes()
}
