//! Cuts tokens into blocks and chains their keyed hashes from an identity manifest and a tenant salt.
//!
//! A [`BlockHash`] answers for everything that decides the bytes of a block: the manifest, the tenant,
//! every earlier token and the block's own tokens. Not here: who holds a block (`crate::index`) and
//! the bytes themselves. The encodings below are fixed: a change of either is a change of every key
//! of every cluster, and takes new domain strings.

use crate::id::{BlockHash, IdentityDigest};

#[cfg(test)]
mod tests;

/// Largest block in tokens. A larger one would make the unit of eviction coarser than one turn of a
/// conversation.
pub const BLOCK_TOKENS_MAX: u32 = 512;

/// Domain of the manifest digest; keeps it apart from every other use of BLAKE3.
const MANIFEST_DOMAIN: &str = "kvfleet 2026-01 identity manifest";
/// Domain of the key derived from manifest and salt.
const KEY_DOMAIN: &str = "kvfleet 2026-01 block hash key";

/// First byte of each keyed message: what kind of thing is hashed.
const ROOT: u8 = 0;
const TOKENS: u8 = 1;
const TRACE_ID: u8 = 2;

/// Tokens turned to bytes at a time; a multiple of every block size up to 64, on the stack.
const TOKENS_PER_WRITE: usize = 64;

/// Whether keys are stored before or after the rotary position embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeyForm {
    /// Before RoPE: valid at any position.
    Raw,
    /// After RoPE: valid only at the position it was computed for.
    #[default]
    Rotated,
}

/// Everything that decides the bytes of a block besides tokens and tenant. Two deployments whose
/// manifests differ in any field never share a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityManifest {
    /// Name of the model, as people call it.
    pub model: String,
    /// Digest of the weights, in the form the model's publisher gives it.
    pub weights_digest: String,
    /// Element type of the stored keys and values, for example `bf16`.
    pub dtype: String,
    /// Layout of one block: order of dimensions and groups, for example `layer-major/kv/token/head`.
    pub layout: String,
    /// Layers stored per block.
    pub layers: u32,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Pipeline-parallel degree.
    pub pp: u32,
    /// Which of the `tp * pp` ranks the bytes belong to; 0 when a block holds all of them.
    pub rank: u32,
    /// Tokens per block: a power of two up to [`BLOCK_TOKENS_MAX`].
    pub block_tokens: u32,
    /// Parameters of the rotary embedding, for example `theta=500000`.
    pub rope: String,
    /// Form in which keys are stored.
    pub key_form: KeyForm,
    /// Adapter (LoRA) in use; empty for none.
    pub adapter: String,
}

impl Default for IdentityManifest {
    /// The emulated model that `replay` and the demo serve: 512-token blocks, 32 layers.
    fn default() -> Self {
        Self {
            model: "emulated-8b".to_owned(),
            weights_digest: "emulated".to_owned(),
            dtype: "bf16".to_owned(),
            layout: "layer-major".to_owned(),
            layers: 32,
            tp: 1,
            pp: 1,
            rank: 0,
            block_tokens: 512,
            rope: "theta=500000".to_owned(),
            key_form: KeyForm::Rotated,
            adapter: String::new(),
        }
    }
}

/// Why a manifest cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The block size is not one of 1, 2, 4 … 512.
    #[error("block_tokens is {got}: choose a power of two from 1 to {BLOCK_TOKENS_MAX}")]
    BlockTokens {
        /// What was asked.
        got: u32,
    },
    /// A count that must be at least one is zero.
    #[error("{field} is 0: it must be at least 1")]
    Zero {
        /// Name of the field.
        field: &'static str,
    },
    /// The rank does not exist in the given geometry.
    #[error("rank is {rank}, but tp {tp} x pp {pp} has ranks 0 to {last}: choose one of them", last = u64::from(*tp) * u64::from(*pp) - 1)]
    Rank {
        /// What was asked.
        rank: u32,
        /// Tensor-parallel degree.
        tp: u32,
        /// Pipeline-parallel degree.
        pp: u32,
    },
}

impl IdentityManifest {
    /// Refuses geometry that no model has.
    ///
    /// # Errors
    /// Says which field is wrong and what it may be.
    pub fn validate(&self) -> Result<(), ManifestError> {
        if !self.block_tokens.is_power_of_two() || self.block_tokens > BLOCK_TOKENS_MAX {
            return Err(ManifestError::BlockTokens { got: self.block_tokens });
        }
        for (field, count) in [("layers", self.layers), ("tp", self.tp), ("pp", self.pp)] {
            if count == 0 {
                return Err(ManifestError::Zero { field });
            }
        }
        if u64::from(self.rank) >= u64::from(self.tp) * u64::from(self.pp) {
            return Err(ManifestError::Rank { rank: self.rank, tp: self.tp, pp: self.pp });
        }
        Ok(())
    }

    /// The manifest in sixteen bytes, as nodes and routers compare it.
    #[must_use]
    pub fn digest(&self) -> IdentityDigest {
        IdentityDigest(first_half(&self.full_digest()))
    }

    fn full_digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(MANIFEST_DOMAIN);
        hasher.update(&self.encode());
        *hasher.finalize().as_bytes()
    }

    /// Every field in a fixed order, each with its length before it, so that no two manifests have the
    /// same bytes. The destructuring makes a forgotten field a compile error.
    fn encode(&self) -> Vec<u8> {
        let Self {
            model,
            weights_digest,
            dtype,
            layout,
            layers,
            tp,
            pp,
            rank,
            block_tokens,
            rope,
            key_form,
            adapter,
        } = self;
        let mut bytes = Vec::with_capacity(256);
        for text in [model, weights_digest, dtype, layout, rope, adapter] {
            put_field(&mut bytes, text.as_bytes());
        }
        for number in [*layers, *tp, *pp, *rank, *block_tokens, *key_form as u32] {
            put_field(&mut bytes, &number.to_le_bytes());
        }
        bytes
    }
}

fn put_field(bytes: &mut Vec<u8>, field: &[u8]) {
    bytes.extend_from_slice(&(field.len() as u64).to_le_bytes());
    bytes.extend_from_slice(field);
}

fn first_half(full: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|position| full[position])
}

/// Makes block hashes of one identity and one tenant.
#[derive(Clone)]
pub struct PrefixHasher {
    keyed: blake3::Hasher,
    root: BlockHash,
    block_tokens: usize,
}

impl std::fmt::Debug for PrefixHasher {
    /// Leaves the key out: logs are no place for it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixHasher").field("block_tokens", &self.block_tokens).finish_non_exhaustive()
    }
}

impl PrefixHasher {
    /// Derives the key from manifest and salt. The salt is what keeps tenants from probing each other:
    /// without it nobody can compute a tenant's hashes, not even from known text.
    ///
    /// A manifest that [`IdentityManifest::validate`] refuses is hashed all the same (a block size of
    /// zero counts as one), because what must never happen here is a shared key or a panic.
    #[must_use]
    pub fn new(manifest: &IdentityManifest, tenant_salt: &[u8; 32]) -> Self {
        let mut material = [0u8; 64];
        material[..32].copy_from_slice(&manifest.full_digest());
        material[32..].copy_from_slice(tenant_salt);
        let keyed = blake3::Hasher::new_keyed(&blake3::derive_key(KEY_DOMAIN, &material));
        let root = finish(keyed.clone().update(&[ROOT]));
        Self { keyed, root, block_tokens: manifest.block_tokens.max(1) as usize }
    }

    /// Hash of the empty prefix: parent of every first block.
    #[must_use]
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// Hash of the block with these tokens after `parent`.
    #[must_use]
    pub fn child(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        let mut hasher = self.keyed.clone();
        hasher.update(&head(TOKENS, parent, tokens.len() as u64));
        let mut bytes = [0u8; 4 * TOKENS_PER_WRITE];
        for part in tokens.chunks(TOKENS_PER_WRITE) {
            for (place, token) in bytes.chunks_exact_mut(4).zip(part) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..4 * part.len()]);
        }
        finish(&hasher)
    }

    /// Hashes of all blocks of a prompt in prefix order; the last one may be partly filled.
    #[must_use]
    pub fn blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        self.chain(tokens.chunks(self.block_tokens), |parent, part| self.child(parent, part))
    }

    /// Hashes of a prefix whose blocks a trace names by number: the number stands for the content of
    /// the block, and the same number after another prefix is another block.
    #[must_use]
    pub fn chain_ids(&self, ids: &[u64]) -> Vec<BlockHash> {
        self.chain(ids.iter(), |parent, &id| finish(self.keyed.clone().update(&head(TRACE_ID, parent, id))))
    }

    fn chain<T>(
        &self,
        parts: impl ExactSizeIterator<Item = T>,
        next: impl Fn(BlockHash, T) -> BlockHash,
    ) -> Vec<BlockHash> {
        let mut hashes = Vec::with_capacity(parts.len());
        let mut parent = self.root;
        for part in parts {
            parent = next(parent, part);
            hashes.push(parent);
        }
        hashes
    }
}

/// Kind, parent and one number (token count or trace id): fixed width, so that no two messages meet.
fn head(kind: u8, parent: BlockHash, number: u64) -> [u8; 25] {
    let mut bytes = [kind; 25];
    bytes[1..17].copy_from_slice(&parent.0);
    bytes[17..].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn finish(hasher: &blake3::Hasher) -> BlockHash {
    BlockHash(first_half(hasher.finalize().as_bytes()))
}
