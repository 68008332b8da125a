//! What decides the bytes of a block besides tokens and tenant, and the digest that stands for it.
//!
//! Not here: how keys come from the digest (`keys.rs`). The encoding is fixed: a change of it is a
//! change of every key of every cluster, and takes a new domain string.

use std::fmt;

use crate::id::IdentityDigest;

/// Largest block in tokens. A larger one would make the unit of eviction coarser than one turn of a
/// conversation.
pub const BLOCK_TOKENS_MAX: u32 = 512;

/// Domain of the manifest digest; keeps it apart from every other use of BLAKE3.
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

/// A field in which two manifests differ, named and written as in configuration files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Which.
    pub field: &'static str,
    /// What it is in the one.
    pub own: String,
    /// What it is in the other.
    pub other: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, own, other } = self;
        write!(f, "{field} ({own} and not {other})")
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

    /// The fields in which this manifest is another one than `other`, in the order of their declaration.
    #[must_use]
    pub fn differences(&self, other: &IdentityManifest) -> Vec<Difference> {
        let pairs = self.fields().into_iter().zip(other.fields());
        let difference = |((field, own), (_, other))| Difference { field, own, other };
        pairs.filter(|(own, other)| own != other).map(difference).collect()
    }

    /// Every field as configuration files have it. The destructuring makes a forgotten one a compile error.
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

    /// The manifest in sixteen bytes, as nodes and routers compare it.
    #[must_use]
    pub fn digest(&self) -> IdentityDigest {
        let full = self.full_digest();
        IdentityDigest(std::array::from_fn(|position| full[position]))
    }

    /// The whole digest, from which keys are derived.
    pub(super) fn full_digest(&self) -> [u8; 32] {
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
