//! Keys of the block hash of one identity and one tenant, and which of them belongs to which tokens.
//!
//! Not here: what is done with them (`hasher.rs`, `kernel.rs`).

use super::manifest::IdentityManifest;

/// Domain of the keys derived from manifest and salt.
const KEY_DOMAIN: &str = "kvfleet 2026-11 prompt hash keys, octets";

/// Tokens of a line: 64 bytes, what one vector register and one cache line hold.
pub(super) const LINE_TOKENS: usize = 16;

/// Lines of a segment, 512 tokens: as many as there are keys, and as the largest block has.
pub(super) const SEGMENT_LINES: usize = 32;

/// Sixteen tokens; the end of a block that does not fill its last line is zeros.
pub(super) type Line = [u32; LINE_TOKENS];

/// Everything secret of a hasher but the cipher's key schedule.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct Keys {
    /// For each line of a segment, keys of its first two words (a word is four tokens).
    pub(super) first: [[u128; 2]; SEGMENT_LINES],
    /// For each line of a segment, keys of its last two words.
    pub(super) second: [[u128; 2]; SEGMENT_LINES],
    /// Multiplies the state between two segments.
    pub(super) step: u128,
    /// Times the number of tokens of a partly filled block.
    pub(super) tail: u128,
    /// State before the first of a list of trace ids; the state before the first token is zero.
    pub(super) ids: u128,
    /// Key of the AES permutation that hides the state.
    pub(super) cipher: [u8; 16],
}

impl Keys {
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

/// Blocks that follow each other in one segment, all of the same number of lines.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'lines> {
    /// Line of keys of the first line.
    pub(super) slot: usize,
    /// Lines of each block, at least one.
    pub(super) lines_each: usize,
    /// The lines of all blocks.
    pub(super) lines: &'lines [Line],
}

impl<'lines> Blocks<'lines> {
    /// Each block, with the line of keys of its first line.
    #[inline]
    pub(super) fn slots(self) -> impl Iterator<Item = (usize, &'lines [Line])> {
        let Self { slot, lines_each, lines } = self;
        lines
            .chunks_exact(lines_each)
            .enumerate()
            .map(move |(number, block)| (slot + number * lines_each, block))
    }

    /// The first `count` blocks, and the others.
    pub(super) fn split_at(self, count: usize) -> (Self, Self) {
        let (lines, rest) = self.lines.split_at(count * self.lines_each);
        (Self { lines, ..self }, Self { lines: rest, slot: self.slot + lines.len(), ..self })
    }
}
