//! The identity manifest as a section of configuration files, the same in every process.
//!
//! Not here: its meaning and its hash (`kv_core::prefix`).

use kv_core::prefix::{IdentityManifest, KeyForm};
use serde::{Deserialize, Serialize};

/// The identity manifest as written in a file; fields as in [`IdentityManifest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IdentitySection {
    /// Public name of the model.
    pub model: String,
    /// Digest of the weights, in the form that the model's publisher gives.
    pub weights_digest: String,
    /// Element type of the stored keys and values, for example `bf16`.
    pub dtype: String,
    /// Layout of one block: order of dimensions and groups, as in `layer-major/kv/token/head`.
    pub layout: String,
    /// Layers stored per block.
    pub layers: u32,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Pipeline-parallel degree.
    pub pp: u32,
    /// The rank, of `tp * pp`, that the bytes belong to; 0 if a block holds all ranks.
    pub rank: u32,
    /// Tokens per block: a power of two up to 512.
    pub block_tokens: u32,
    /// Parameters of the rotary embedding, for example `theta=500000`.
    pub rope: String,
    /// Keys are stored before the rotary embedding.
    pub raw_keys: bool,
    /// Adapter (LoRA) in use; empty for none.
    pub adapter: String,
}

impl Default for IdentitySection {
    fn default() -> Self {
        IdentitySection::from(&IdentityManifest::default())
    }
}

impl From<&IdentityManifest> for IdentitySection {
    fn from(manifest: &IdentityManifest) -> Self {
        let manifest = manifest.clone();
        IdentitySection {
            model: manifest.model,
            weights_digest: manifest.weights_digest,
            dtype: manifest.dtype,
            layout: manifest.layout,
            layers: manifest.layers,
            tp: manifest.tp,
            pp: manifest.pp,
            rank: manifest.rank,
            block_tokens: manifest.block_tokens,
            rope: manifest.rope,
            raw_keys: manifest.key_form == KeyForm::Raw,
            adapter: manifest.adapter,
        }
    }
}

impl IdentitySection {
    /// The manifest this describes.
    #[must_use]
    pub fn manifest(&self) -> IdentityManifest {
        let section = self.clone();
        IdentityManifest {
            model: section.model,
            weights_digest: section.weights_digest,
            dtype: section.dtype,
            layout: section.layout,
            layers: section.layers,
            tp: section.tp,
            pp: section.pp,
            rank: section.rank,
            block_tokens: section.block_tokens,
            rope: section.rope,
            key_form: if section.raw_keys { KeyForm::Raw } else { KeyForm::Rotated },
            adapter: section.adapter,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_section_is_the_default_manifest() {
        assert_eq!(IdentitySection::default().manifest(), IdentityManifest::default());
    }
}
