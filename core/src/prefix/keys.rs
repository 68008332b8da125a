//! Keys of the block hash of one identity and one tenant.
//!
//! Not here: the operations on them (`hasher.rs`).

use super::lanes::{LaneKey, OUTPUT_BYTES, lane_key};
use super::manifest::IdentityManifest;

/// Domain of the keys derived from manifest and salt.
const KEY_DOMAIN: &str = "kvfleet 2026-11 prompt hash keys, tree";

/// All secrets of a hasher: a key for each kind of message, so that no message counts as another
/// kind (docs/reference/hash.md).
#[derive(Clone)]
pub(super) struct HashKeys {
    /// Of the tokens of a block.
    pub(super) tokens: [u8; OUTPUT_BYTES],
    /// Of the number that stands for a block in a trace.
    pub(super) ids: LaneKey,
    /// Of the blocks of a group up to one.
    pub(super) group: LaneKey,
    /// Of everything up to a block.
    pub(super) prefix: LaneKey,
}

impl HashKeys {
    pub(super) fn new(manifest: &IdentityManifest, tenant_salt: &[u8; 32]) -> Self {
        let mut deriving = blake3::Hasher::new_derive_key(KEY_DOMAIN);
        deriving.update(&manifest.full_digest()).update(tenant_salt);
        let mut stream = deriving.finalize_xof();
        let mut next = || {
            let mut bytes = [0; OUTPUT_BYTES];
            stream.fill(&mut bytes);
            bytes
        };
        let tokens = next();
        let [group, prefix, ids] = std::array::from_fn(|_| lane_key(&next()));
        Self { tokens, ids, group, prefix }
    }
}
