//! Identity manifests, to and from the wire.
//!
//! Not here: their meaning (`kv_core::prefix`), and their form in configuration files
//! (`crate::identity`).

use kv_core::prefix::IdentityManifest;

use super::ConvertError;
use crate::identity::IdentitySection;
use crate::pb;

/// Longest text of a field, in bytes.
const TEXT_BYTES_MAX: usize = 256;

/// Reads a manifest.
///
/// # Errors
/// When a text is too long, or the manifest is invalid.
pub fn manifest_from_pb(manifest: pb::Manifest) -> Result<IdentityManifest, ConvertError> {
    for (field, text) in [
        ("manifest.model", &manifest.model),
        ("manifest.weights_digest", &manifest.weights_digest),
        ("manifest.dtype", &manifest.dtype),
        ("manifest.layout", &manifest.layout),
        ("manifest.rope", &manifest.rope),
        ("manifest.adapter", &manifest.adapter),
    ] {
        if text.len() > TEXT_BYTES_MAX {
            return Err(ConvertError::TooLong { field, bytes: text.len(), limit: TEXT_BYTES_MAX });
        }
    }
    let section = IdentitySection {
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
        raw_keys: manifest.raw_keys,
        adapter: manifest.adapter,
    };
    let manifest = section.manifest();
    manifest.validate()?;
    Ok(manifest)
}

/// Writes a manifest.
#[must_use]
pub fn manifest_to_pb(manifest: &IdentityManifest) -> pb::Manifest {
    let section = IdentitySection::from(manifest);
    pb::Manifest {
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
        raw_keys: section.raw_keys,
        adapter: section.adapter,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::prefix::KeyForm;

    use super::*;

    #[test]
    fn manifests_round_trip_and_invalid_ones_are_rejected() {
        let manifest = IdentityManifest {
            model: "m".to_owned(),
            weights_digest: "w".to_owned(),
            dtype: "fp8".to_owned(),
            layout: "l".to_owned(),
            layers: 7,
            tp: 4,
            pp: 2,
            rank: 5,
            block_tokens: 16,
            rope: "r".to_owned(),
            key_form: KeyForm::Raw,
            adapter: "a".to_owned(),
        };
        let wire = manifest_to_pb(&manifest);
        assert_eq!(manifest_from_pb(wire.clone()).unwrap(), manifest);
        let refused = |wire: pb::Manifest| manifest_from_pb(wire).unwrap_err().to_string();
        let error = refused(pb::Manifest { rank: 8, ..wire.clone() });
        assert_eq!(error, "manifest: rank is 8, but tp 4 x pp 2 has ranks 0 to 7: choose one of them");
        let error = refused(pb::Manifest { rope: "r".repeat(257), ..wire });
        assert_eq!(error, "manifest.rope has 257 bytes, the limit is 256: shorten it");
    }
}
