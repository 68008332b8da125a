//! The identity manifest: everything besides tokens and tenant that determines the bytes of a
//! block, and its digest.
//!
//! Not here: the derivation of keys from the digest (`keys.rs`). The encoding is fixed: a change of
//! it changes every key of every cluster, and needs a new domain string.

use std::fmt;

use crate::id::IdentityDigest;

/// Largest block in tokens. A larger one would make eviction coarser than one turn of a
/// conversation.
pub const BLOCK_TOKENS_MAX: u32 = 512;

/// Domain of the manifest digest; separates it from every other use of BLAKE3.
const MANIFEST_DOMAIN: &str = "kvfleet 2026-01 identity manifest";

/// Whether keys are stored before or after the rotary position embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeyForm {
    /// Before RoPE: valid at any position.
    Raw,
    /// After RoPE: valid only at the position it was computed for.
    #[default]
    Rotated,
}

/// Everything that determines the bytes of a block besides tokens and tenant. Two deployments with
/// manifests that differ in any field never share a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityManifest {
    /// Public name of the model.
    pub model: String,
    /// Digest of the weights, in the form that the model's publisher gives.
    pub weights_digest: String,
    /// Element type of the stored keys and values, for example `bf16`.
    pub dtype: String,
    /// Layout of one block: order of dimensions and groups, for example
    /// `layer-major/kv/token/head`.
    pub layout: String,
    /// Layers stored per block.
    pub layers: u32,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Pipeline-parallel degree.
    pub pp: u32,
    /// The rank, of `tp * pp`, that the bytes belong to; 0 if a block holds all ranks.
    pub rank: u32,
    /// Tokens per block: a power of two up to [`BLOCK_TOKENS_MAX`].
    pub block_tokens: u32,
    /// Parameters of the rotary embedding, for example `theta=500000`.
    pub rope: String,
    /// Whether keys are stored before or after RoPE.
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

/// A field that differs between two manifests, named and written as in configuration files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestDifference {
    /// The field's name.
    pub field: &'static str,
    /// Its value in this manifest.
    pub own: String,
    /// Its value in the other manifest.
    pub other: String,
}

impl fmt::Display for ManifestDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, own, other } = self;
        write!(f, "{field} ({own} and not {other})")
    }
}

/// Why a manifest is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The block size is not one of 1, 2, 4 … 512.
    #[error("block_tokens is {got}: choose a power of two from 1 to {BLOCK_TOKENS_MAX}")]
    BlockTokens {
        /// The configured value.
        got: u32,
    },
    /// A count that must be at least one is zero.
    #[error("{field} is 0: it must be at least 1")]
    Zero {
        /// Name of the field.
        field: &'static str,
    },
    /// The rank does not exist in the given geometry.
    #[error(
        "rank is {rank}, but tp {tp} x pp {pp} has ranks 0 to {last}: choose one of them",
        last = u64::from(*tp) * u64::from(*pp) - 1
    )]
    Rank {
        /// The configured value.
        rank: u32,
        /// Tensor-parallel degree.
        tp: u32,
        /// Pipeline-parallel degree.
        pp: u32,
    },
}

impl IdentityManifest {
    /// Refuses impossible geometry.
    ///
    /// # Errors
    /// Names the invalid field and its valid values.
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

    /// The fields that differ from `other`, in declaration order.
    #[must_use]
    pub fn differences(&self, other: &IdentityManifest) -> Vec<ManifestDifference> {
        let pairs = self.fields().into_iter().zip(other.fields());
        let difference = |((field, own), (_, other))| ManifestDifference { field, own, other };
        pairs.filter(|(own, other)| own != other).map(difference).collect()
    }

    /// Every field as configuration files write it. The destructuring makes a forgotten field a
    /// compile error.
    fn fields(&self) -> [(&'static str, String); 12] {
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
        let text = |text: &String| format!("{text:?}");
        [
            ("model", text(model)),
            ("weights_digest", text(weights_digest)),
            ("dtype", text(dtype)),
            ("layout", text(layout)),
            ("layers", layers.to_string()),
            ("tp", tp.to_string()),
            ("pp", pp.to_string()),
            ("rank", rank.to_string()),
            ("block_tokens", block_tokens.to_string()),
            ("rope", text(rope)),
            ("raw_keys", (*key_form == KeyForm::Raw).to_string()),
            ("adapter", text(adapter)),
        ]
    }

    /// The manifest as sixteen bytes, for comparison between nodes and routers.
    #[must_use]
    pub fn digest(&self) -> IdentityDigest {
        let full = self.full_digest();
        IdentityDigest(std::array::from_fn(|position| full[position]))
    }

    /// The whole digest; keys are derived from it.
    pub(super) fn full_digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(MANIFEST_DOMAIN);
        hasher.update(&self.encode());
        *hasher.finalize().as_bytes()
    }

    /// Every field in a fixed order, each after its length, so that no two manifests encode
    /// equally. The destructuring makes a forgotten field a compile error.
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
