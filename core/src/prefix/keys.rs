//! Keys of the block hash of one identity and one tenant, and their assignment to tokens.
//!
//! Not here: the operations on them (`hasher.rs`, `kernel.rs`).

use kvfleet_cpu::block_hash::{LineKeys, SEGMENT_LINES};

use super::manifest::IdentityManifest;

/// Domain of the keys derived from manifest and salt.
const KEY_DOMAIN: &str = "kvfleet 2026-11 prompt hash keys, octets";

/// All secrets of a hasher except the cipher's key schedule.
#[derive(Clone)]
pub(super) struct HashKeys {
    /// Keys of the lines of a segment.
    pub(super) lines: LineKeys,
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
        Self { lines: LineKeys { first, second }, step, tail, ids, cipher }
    }
}
