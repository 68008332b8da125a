//! The identity manifest as a section of configuration files, the same in every process.
//!
//! Not here: its meaning and its hash (`kv_core::prefix`).

use kv_core::prefix::{IdentityManifest, KeyForm};
use serde::{Deserialize, Serialize};

/// The identity manifest as written in a file; fields as in [`IdentityManifest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct IdentitySection {
    pub model: String,
    pub weights_digest: String,
    pub dtype: String,
    pub layout: String,
    pub layers: u32,
    pub tp: u32,
    pub pp: u32,
    pub rank: u32,
    pub block_tokens: u32,
    pub rope: String,
    /// Keys are stored before the rotary embedding.
    pub raw_keys: bool,
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
