//! Block hashes: fixed answers, and the promise that any difference that matters changes the hash.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const SALT: [u8; 32] = [7; 32];

fn hasher() -> PrefixHasher {
    PrefixHasher::new(&IdentityManifest::default(), &SALT)
}

fn small_blocks(block_tokens: u32) -> IdentityManifest {
    IdentityManifest { block_tokens, ..IdentityManifest::default() }
}

/// Every manifest that differs from the default in exactly one field.
fn neighbours() -> Vec<IdentityManifest> {
    let base = IdentityManifest::default;
    let other = || "other".to_owned();
    vec![
        IdentityManifest { model: other(), ..base() },
        IdentityManifest { weights_digest: other(), ..base() },
        IdentityManifest { dtype: other(), ..base() },
        IdentityManifest { layout: other(), ..base() },
        IdentityManifest { layers: 33, ..base() },
        IdentityManifest { tp: 2, ..base() },
        IdentityManifest { pp: 2, ..base() },
        IdentityManifest { rank: 1, ..base() },
        IdentityManifest { block_tokens: 256, ..base() },
        IdentityManifest { rope: other(), ..base() },
        IdentityManifest { key_form: KeyForm::Raw, ..base() },
        IdentityManifest { adapter: other(), ..base() },
    ]
}

#[test]
fn known_answers() {
    // Pinned: if one of these changes, every key of every running cluster changes with it.
    assert_eq!(IdentityManifest::default().digest().to_string(), "159561dc877044a96a91c7fdd3cc980b");
    let hasher = hasher();
    assert_eq!(hasher.root().to_string(), "5cb5d1c789dedbf03abcb3d733067cca");
    assert_eq!(hasher.child(hasher.root(), &[1, 2, 3]).to_string(), "bbdf30b511b249fd9cb020a1bc5d6e5d");
    let blocks = hasher.blocks(&(0..513).collect::<Vec<u32>>());
    assert_eq!(
        blocks.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["3711b5fa8312ce66cb82ddd1e05bdc48", "616ad5439c243305db5e8ee32fb9cdcc"]
    );
    let chained = hasher.chain_ids(&[0, 46, 46]);
    assert_eq!(
        chained.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [
            "23fac2526b9dfb09f833fde33ba60865",
            "4e1e156860842016c223cd4867de2486",
            "14afea95b2b0865e77362a5b9da0049a"
        ]
    );
}

#[test]
fn the_encoding_is_the_one_described() {
    // The same hashes from BLAKE3 and bytes written out by hand, as another language would do it.
    let manifest = IdentityManifest::default();
    let mut bytes = Vec::new();
    for text in ["emulated-8b", "emulated", "bf16", "layer-major", "theta=500000", ""] {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
    for number in [32u32, 1, 1, 0, 512, 1] {
        bytes.extend_from_slice(&4u64.to_le_bytes());
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    let full = blake3::derive_key("kvfleet 2026-01 identity manifest", &bytes);
    assert_eq!(manifest.digest().0, full[..16]);

    let key = blake3::derive_key("kvfleet 2026-01 block hash key", &[full, SALT].concat());
    let half = |message: &[u8]| BlockHash::from_slice(&blake3::keyed_hash(&key, message).as_bytes()[..16]);
    let hasher = hasher();
    assert_eq!(Some(hasher.root()), half(&[0]));
    let mut message = vec![1];
    message.extend_from_slice(&hasher.root().0);
    message.extend_from_slice(&2u64.to_le_bytes());
    message.extend_from_slice(&[0xdd, 0xcc, 0xbb, 0xaa, 1, 0, 0, 0]);
    assert_eq!(Some(hasher.child(hasher.root(), &[0xaabb_ccdd, 1])), half(&message));
    let mut message = vec![2];
    message.extend_from_slice(&hasher.root().0);
    message.extend_from_slice(&99u64.to_le_bytes());
    assert_eq!(hasher.chain_ids(&[99]).first().copied(), half(&message));
}

#[test]
fn every_field_of_the_manifest_matters() {
    let mut digests = BTreeSet::from([IdentityManifest::default().digest()]);
    let mut roots = BTreeSet::from([hasher().root()]);
    let mut children = BTreeSet::from([hasher().child(BlockHash::default(), &[1])]);
    for manifest in neighbours() {
        let hasher = PrefixHasher::new(&manifest, &SALT);
        assert!(digests.insert(manifest.digest()), "{manifest:?}");
        assert!(roots.insert(hasher.root()), "{manifest:?}");
        assert!(children.insert(hasher.child(BlockHash::default(), &[1])), "{manifest:?}");
    }
}

#[test]
fn text_cannot_wander_between_fields() {
    let split = |model: &str, weights: &str| {
        let (model, weights_digest) = (model.to_owned(), weights.to_owned());
        IdentityManifest { model, weights_digest, ..IdentityManifest::default() }.digest()
    };
    assert_ne!(split("ab", "c"), split("a", "bc"));
    assert_ne!(split("abc", ""), split("", "abc"));
}

#[test]
fn a_partly_filled_tail_is_a_block_of_its_own() {
    let hasher = PrefixHasher::new(&small_blocks(4), &SALT);
    let tokens: Vec<u32> = (100..110).collect();
    let blocks = hasher.blocks(&tokens);
    assert_eq!(blocks.len(), 3);
    assert_eq!(blocks[2], hasher.child(blocks[1], &tokens[8..]));
    assert_eq!(hasher.blocks(&tokens[..8]), blocks[..2]);
    assert_eq!(hasher.blocks(&tokens[..9])[..2], blocks[..2]);
    assert_ne!(hasher.blocks(&tokens[..9])[2], blocks[2]);
    assert!(hasher.blocks(&[]).is_empty());
}

#[test]
fn a_tail_of_zeros_is_not_a_shorter_tail() {
    let hasher = hasher();
    let lengths: BTreeSet<BlockHash> = (0..512).map(|n| hasher.child(hasher.root(), &vec![0; n])).collect();
    assert_eq!(lengths.len(), 512);
}

#[test]
fn kinds_of_message_do_not_meet() {
    // A root, an empty block, a block and a trace id made of the same bits.
    let hasher = hasher();
    let root = hasher.root();
    let all = [root, hasher.child(root, &[]), hasher.child(root, &[0]), hasher.chain_ids(&[0])[0]];
    assert_eq!(BTreeSet::from(all).len(), all.len());
}

#[test]
fn the_same_trace_id_after_another_prefix_is_another_block() {
    let hasher = hasher();
    let (left, right) = (hasher.chain_ids(&[1, 5, 9]), hasher.chain_ids(&[2, 5, 9]));
    assert!(left.iter().zip(&right).all(|(l, r)| l != r));
    assert_eq!(hasher.chain_ids(&[1, 5]), left[..2]);
}

#[test]
fn a_geometry_that_no_model_has_is_refused() {
    let base = IdentityManifest::default;
    assert_eq!(base().validate(), Ok(()));
    for good in [1, 2, 16, 512] {
        assert_eq!(small_blocks(good).validate(), Ok(()));
    }
    for got in [0, 3, 17, 1024, u32::MAX] {
        assert_eq!(small_blocks(got).validate(), Err(ManifestError::BlockTokens { got }));
    }
    let zero = |manifest: IdentityManifest| match manifest.validate() {
        Err(ManifestError::Zero { field }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(zero(IdentityManifest { layers: 0, ..base() }), "layers");
    assert_eq!(zero(IdentityManifest { tp: 0, ..base() }), "tp");
    assert_eq!(zero(IdentityManifest { pp: 0, ..base() }), "pp");
    let wrong_rank = IdentityManifest { tp: 4, pp: 2, rank: 8, ..base() };
    let error = wrong_rank.validate().unwrap_err();
    assert_eq!(error.to_string(), "rank is 8, but tp 4 x pp 2 has ranks 0 to 7: choose one of them");
    let widest = IdentityManifest { tp: u32::MAX, pp: u32::MAX, rank: u32::MAX, ..base() };
    assert_eq!(widest.validate(), Ok(()));
}

#[test]
fn a_block_size_of_zero_does_not_panic() {
    let hasher = PrefixHasher::new(&small_blocks(0), &SALT);
    assert_eq!(hasher.blocks(&[1, 2, 3]).len(), 3);
}

#[test]
fn debug_output_keeps_the_key_to_itself() {
    assert_eq!(format!("{:?}", hasher()), "PrefixHasher { block_tokens: 512, .. }");
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(any::<u32>(), 1..200)
}

proptest! {
    /// Changing one token changes its block and every later one, and no earlier one.
    #[test]
    fn a_token_changes_everything_after_it(
        tokens in tokens(), place in any::<prop::sample::Index>(), flip in 1u32.., size in 0u32..8,
    ) {
        let hasher = PrefixHasher::new(&small_blocks(1 << size), &SALT);
        let place = place.index(tokens.len());
        let mut changed = tokens.clone();
        changed[place] ^= flip;
        let (before, after) = (hasher.blocks(&tokens), hasher.blocks(&changed));
        let block = place >> size;
        prop_assert_eq!(before.len(), after.len());
        for offset in 0..before.len() {
            prop_assert_eq!(before[offset] == after[offset], offset < block, "block {}", offset);
        }
    }

    /// Longer prompts keep the hashes of the full blocks of shorter ones, and nothing else.
    #[test]
    fn full_blocks_are_shared_with_every_extension(tokens in tokens(), more in tokens(), size in 0u32..8) {
        let hasher = PrefixHasher::new(&small_blocks(1 << size), &SALT);
        let (short, long) = (hasher.blocks(&tokens), hasher.blocks(&[tokens.clone(), more].concat()));
        let full = tokens.len() >> size;
        prop_assert_eq!(&short[..full], &long[..full]);
        if short.len() > full {
            prop_assert_ne!(short[full], long[full]);
        }
    }

    /// Another salt or another parent gives another hash.
    #[test]
    fn salt_and_parent_matter(tokens in tokens(), bit in 0usize..256, parent_bit in 0usize..128) {
        let mut salt = SALT;
        salt[bit / 8] ^= 1 << (bit % 8);
        let (ours, theirs) = (hasher(), PrefixHasher::new(&IdentityManifest::default(), &salt));
        let parent = ours.root();
        prop_assert_ne!(ours.child(parent, &tokens), theirs.child(parent, &tokens));
        let mut other = parent;
        other.0[parent_bit / 8] ^= 1 << (parent_bit % 8);
        prop_assert_ne!(ours.child(parent, &tokens), ours.child(other, &tokens));
    }

    /// Different token lists under one parent never meet, whatever their lengths.
    #[test]
    fn different_tokens_have_different_hashes(a in tokens(), b in tokens()) {
        let hasher = hasher();
        let equal = hasher.child(hasher.root(), &a) == hasher.child(hasher.root(), &b);
        prop_assert_eq!(equal, a == b);
    }
}
