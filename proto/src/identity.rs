//! The identity manifest as it is written in configuration files, the same for every process that has one.
//!
//! Not here: what it means and how it is hashed (`kv_core::prefix`).

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
        let own = self.clone();
        IdentityManifest {
            model: own.model,
            weights_digest: own.weights_digest,
            dtype: own.dtype,
            layout: own.layout,
            layers: own.layers,
            tp: own.tp,
            pp: own.pp,
            rank: own.rank,
            block_tokens: own.block_tokens,
            rope: own.rope,
            key_form: if own.raw_keys { KeyForm::Raw } else { KeyForm::Rotated },
            adapter: own.adapter,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_by_default_is_the_default() {
        assert_eq!(IdentitySection::default().manifest(), IdentityManifest::default());
    }
}
