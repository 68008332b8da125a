//! Keys of the block hash of one identity and one tenant, and their assignment to tokens.
//!
//! Not here: the operations on them (`hasher.rs`, `kernel.rs`).

use super::manifest::IdentityManifest;

/// Domain of the keys derived from manifest and salt.
const KEY_DOMAIN: &str = "kvfleet 2026-11 prompt hash keys, octets";

/// Tokens of a line: 64 bytes, one vector register or cache line.
pub(super) const LINE_TOKENS: usize = 16;

/// Lines of a segment, 512 tokens: the number of line keys, and the largest block.
pub(super) const SEGMENT_LINES: usize = 32;

/// Sixteen tokens; a partly filled last line is padded with zeros.
pub(super) type TokenLine = [u32; LINE_TOKENS];

/// All secrets of a hasher except the cipher's key schedule.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct HashKeys {
    /// For each line of a segment, keys of its first two words (a word is four tokens).
    pub(super) first: [[u128; 2]; SEGMENT_LINES],
    /// For each line of a segment, keys of its last two words.
    pub(super) second: [[u128; 2]; SEGMENT_LINES],
    /// Multiplies the state between two segments.
    pub(super) step: u128,
    /// Multiplied by the number of tokens of a partly filled block.
    pub(super) tail: u128,
    /// State before the first of a list of trace ids; the state before the first token is zero.
    pub(super) ids: u128,
    /// Key of the AES permutation that hides the state.
    pub(super) cipher: [u8; 16],
}

impl HashKeys {
    pub(super) fn new(manifest: &IdentityManifest, tenant_salt: &[u8; 32]) -> Self {
        let mut deriving = blake3::Hasher::new_derive_key(KEY_DOMAIN);
        deriving.update(&manifest.full_digest()).update(tenant_salt);
        let mut stream = deriving.finalize_xof();
        let mut next = || {
            let mut bytes = [0; 16];
            stream.fill(&mut bytes);
            bytes
        };
        let cipher = next();
        let [step, tail, ids] = std::array::from_fn(|_| u128::from_le_bytes(next()));
        let (mut first, mut second) = ([[0; 2]; SEGMENT_LINES], [[0; 2]; SEGMENT_LINES]);
        let lines = first.iter_mut().zip(&mut second);
        for key in lines.flat_map(|(first, second)| first.iter_mut().chain(second)) {
            *key = u128::from_le_bytes(next());
        }
        Self { first, second, step, tail, ids, cipher }
    }
}

/// Consecutive blocks in one segment, all with the same number of lines.
#[derive(Clone, Copy)]
pub(super) struct BlockBatch<'lines> {
    /// Index of the first line's keys.
    pub(super) slot: usize,
    /// Lines of each block, at least one.
    pub(super) lines_per_block: usize,
    /// The lines of all blocks.
    pub(super) lines: &'lines [TokenLine],
}

impl<'lines> BlockBatch<'lines> {
    /// Each block, with the key index of its first line.
    #[inline]
    pub(super) fn slots(self) -> impl Iterator<Item = (usize, &'lines [TokenLine])> {
        let Self { slot, lines_per_block: lines_each, lines } = self;
        lines
            .chunks_exact(lines_each)
            .enumerate()
            .map(move |(number, block)| (slot + number * lines_each, block))
    }

    /// The first `count` blocks, and the rest.
    pub(super) fn split_at(self, count: usize) -> (Self, Self) {
        let (lines, rest) = self.lines.split_at(count * self.lines_per_block);
        (Self { lines, ..self }, Self { lines: rest, slot: self.slot + lines.len(), ..self })
    }
}
