//! Tests of prompt hashes: known answers, a slow reference, and that every relevant difference
//! changes the hash.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::id::BlockHash;

mod block_groups;
mod reference;

use reference::ReferenceHasher;

const SALT: [u8; 32] = [7; 32];

fn hasher() -> PrefixHasher {
    PrefixHasher::new(&IdentityManifest::default(), &SALT)
}

fn small_blocks(block_tokens: u32) -> IdentityManifest {
    IdentityManifest { block_tokens, ..IdentityManifest::default() }
}

fn blocks_of(block_tokens: u32) -> PrefixHasher {
    PrefixHasher::new(&small_blocks(block_tokens), &SALT)
}

/// The hasher at every level this machine has.
fn levels(hasher: &PrefixHasher) -> Vec<PrefixHasher> {
    SimdLevel::ALL.into_iter().filter_map(|level| hasher.clone().at_level(level)).collect()
}

fn texts(hashes: &[BlockHash]) -> Vec<String> {
    hashes.iter().map(ToString::to_string).collect()
}

/// Every manifest that differs from the default in exactly one field.
fn one_field_variants() -> Vec<IdentityManifest> {
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
fn differences_name_the_differing_fields() {
    let base = IdentityManifest::default();
    let all = one_field_variants();
    let fields = all.iter().map(|other| match &other.differences(&base)[..] {
        [one] => one.field,
        others => panic!("{others:?}"),
    });
    let names = [
        "model",
        "weights_digest",
        "dtype",
        "layout",
        "layers",
        "tp",
        "pp",
        "rank",
        "block_tokens",
        "rope",
        "raw_keys",
        "adapter",
    ];
    assert_eq!(fields.collect::<Vec<_>>(), names);
    let two = IdentityManifest { dtype: "fp8".to_owned(), key_form: KeyForm::Raw, ..base.clone() };
    let told: Vec<String> = two.differences(&base).iter().map(ToString::to_string).collect();
    assert_eq!(told, ["dtype (\"fp8\" and not \"bf16\")", "raw_keys (true and not false)"]);
    assert_eq!(base.differences(&base), []);
}

#[test]
fn known_answers() {
    // Pinned: if one of these changes, every key of every running cluster changes with it.
    assert_eq!(IdentityManifest::default().digest().to_string(), "159561dc877044a96a91c7fdd3cc980b");
    for hasher in levels(&hasher()) {
        assert_eq!(
            texts(&hasher.blocks(&(0..1025).collect::<Vec<u32>>())),
            [
                "11c83ff1ce95642593b225937eb0263595e921",
                "11c93ff1ce0549e3a915b47730164a2ad7b03b",
                "11ca3ff1ce38294e5fbaf35d6f91b815dc0ba6"
            ]
        );
        assert_eq!(
            texts(&hasher.chain_ids(&[0, 46, 46])),
            [
                "6948b3a3f143d7cd48218f3ae41610ef9f7008",
                "6949b3a3f16a0e836b1a5048da4f113c9a3935",
                "694ab3a3f148a5443ab69bf34daf3969f426ad"
            ]
        );
    }
    for hasher in levels(&blocks_of(16)) {
        assert_eq!(
            texts(&hasher.blocks(&[0xaabb_ccdd; 40])),
            [
                "dd308fc1a77b8edbfe6bd9c4695173f5032f26",
                "dd318fc1a7f21502f8844bdc1ba5567283323a",
                "dd328fc1a7b313d3f2cd4d9e8c441e06ae4670"
            ]
        );
        assert_eq!(
            texts(&hasher.blocks(&[0xaabb_ccdd; 160])[7..]),
            [
                "dd378fc1a71b02393b3697698bb33432b4a527",
                "ddf8d9873d4adabfe0c76400893afe5bf0b6f2",
                "ddf9d9873d72cd52f61732a33a96bc74552be9"
            ],
            "the end of a block group and the next one"
        );
    }
}

#[test]
fn every_machine_has_the_portable_level_and_takes_the_fastest() {
    let found = levels(&hasher());
    assert_eq!(found.first().map(PrefixHasher::level), Some(SimdLevel::Portable));
    assert_eq!(found.last().map(PrefixHasher::level), Some(hasher().level()));
}

/// Until ADR 0085 a block hash was a universal hash, and these two prompts, found by linear algebra
/// with the key that all clusters without a secret had, had the same one.
#[test]
fn prompts_that_once_had_the_same_hash_are_told_apart() {
    let own = [1296, 1333, 1370, 1407, 1444, 1481, 1518, 1555];
    let one = [&[1000, 1037, 1074, 1111, 1148, 1185, 1222, 1259][..], &own].concat();
    let other = [&[84_139, 67_271, 130_330, 101_491, 30_761, 77_231, 69_719, 1555][..], &own].concat();
    let hasher = PrefixHasher::new(&small_blocks(16), &[0; 32]);
    let (one, other) = (hasher.blocks(&one)[0], hasher.blocks(&other)[0]);
    assert_ne!(one.digest(), other.digest());
    assert_ne!(one.block_group(), other.block_group());
}

#[test]
fn every_field_of_the_manifest_matters() {
    let mut digests = BTreeSet::from([IdentityManifest::default().digest()]);
    let mut firsts = BTreeSet::from([hasher().blocks(&[1])]);
    let mut ids = BTreeSet::from([hasher().chain_ids(&[1])]);
    for manifest in one_field_variants() {
        let hasher = PrefixHasher::new(&manifest, &SALT);
        assert!(digests.insert(manifest.digest()), "{manifest:?}");
        assert!(firsts.insert(hasher.blocks(&[1])), "{manifest:?}");
        assert!(ids.insert(hasher.chain_ids(&[1])), "{manifest:?}");
    }
}

#[test]
fn text_cannot_shift_between_fields() {
    let split = |model: &str, weights: &str| {
        let (model, weights_digest) = (model.to_owned(), weights.to_owned());
        IdentityManifest { model, weights_digest, ..IdentityManifest::default() }.digest()
    };
    assert_ne!(split("ab", "c"), split("a", "bc"));
    assert_ne!(split("abc", ""), split("", "abc"));
}

#[test]
fn partly_filled_tail_has_its_own_hash() {
    let hasher = blocks_of(4);
    let tokens: Vec<u32> = (100..110).collect();
    let blocks = hasher.blocks(&tokens);
    assert_eq!(blocks.len(), 3);
    assert_eq!(hasher.blocks(&tokens[..8]), blocks[..2]);
    assert_eq!(hasher.blocks(&tokens[..9])[..2], blocks[..2]);
    assert_ne!(hasher.blocks(&tokens[..9])[2], blocks[2]);
    assert!(hasher.blocks(&[]).is_empty());
}

#[test]
fn only_tokens_short_of_a_block_are_a_tail() {
    let (hasher, tokens) = (blocks_of(4), [1, 2, 3, 4, 5]);
    let chain = hasher.start();
    assert_eq!(hasher.tail(&chain, &[]), None);
    assert_eq!(hasher.tail(&chain, &tokens[..4]), None);
    assert_eq!(hasher.tail(&chain, &tokens), None);
    assert_eq!(hasher.tail(&chain, &tokens[..3]), hasher.blocks(&tokens[..3]).first().copied());
}

#[test]
fn a_tail_of_zeros_is_not_a_shorter_tail() {
    let hasher = hasher();
    let lengths: BTreeSet<BlockHash> = (1..=512).map(|n| hasher.blocks(&vec![0; n])[0]).collect();
    assert_eq!(lengths.len(), 512);
}

#[test]
fn block_kinds_have_distinct_hashes() {
    // A whole block, a tail and a trace id with the same bits.
    for hasher in [blocks_of(1), blocks_of(2), blocks_of(16)] {
        let all = [hasher.blocks(&[5])[0], hasher.blocks(&[5, 0])[0], hasher.chain_ids(&[5])[0]];
        let distinct = BTreeSet::from(all).len();
        assert_eq!(distinct, if hasher.blocks(&[5, 0]).len() == 2 { 2 } else { 3 });
    }
}

#[test]
fn the_same_trace_id_after_another_prefix_is_another_block() {
    let hasher = hasher();
    let (left, right) = (hasher.chain_ids(&[1, 5, 9]), hasher.chain_ids(&[2, 5, 9]));
    assert!(left.iter().zip(&right).all(|(l, r)| l != r));
    assert_eq!(hasher.chain_ids(&[1, 5]), left[..2]);
}

#[test]
fn order_matters_across_groups() {
    // Two blocks 512 tokens apart have the same index in their groups; only the state before the
    // groups distinguishes them.
    let hasher = blocks_of(16);
    let tokens: Vec<u32> = (0..2048).collect();
    let mut swapped = tokens.clone();
    for offset in 0..16 {
        swapped.swap(offset, 512 + offset);
    }
    let (before, after) = (hasher.blocks(&tokens), hasher.blocks(&swapped));
    assert!(before.iter().zip(&after).all(|(l, r)| l != r));
}

#[test]
fn blocks_of_one_chain_carry_the_tag_of_its_first() {
    for hasher in levels(&blocks_of(16)) {
        let tokens: Vec<u32> = (0..3000).collect();
        let blocks = hasher.blocks(&tokens);
        assert!(blocks.iter().all(|block| block.root_tag() == blocks[0].root_tag()));
        let ids = hasher.chain_ids(&(0..200).collect::<Vec<_>>());
        assert!(ids.iter().all(|block| block.root_tag() == ids[0].root_tag()));
        // A longer or shorter prompt with the same first block has the same tag.
        assert_eq!(hasher.blocks(&tokens[..20])[1].root_tag(), blocks[0].root_tag());
    }
}

#[test]
fn tags_spread_evenly_over_roots() {
    let hasher = blocks_of(16);
    let mut counts = [0u32; 256];
    for root in 0..51_200 {
        counts[usize::from(hasher.blocks(&[root; 16])[0].root_tag())] += 1;
    }
    // Each expects 200 with a standard deviation of 14; allows six in either direction.
    assert!(counts.iter().all(|count| (115..285).contains(count)), "{counts:?}");
}

#[test]
fn shards_divide_the_tags() {
    let shard_of = |tag: u8, shards: u16| BlockHash([tag; _]).shard(shards);
    for shards in [1, 2, 3, 7, 16, 100, 255, 256] {
        let mut counts = vec![0; usize::from(shards)];
        (0..=255).for_each(|tag| counts[usize::from(shard_of(tag, shards)) - 1] += 1);
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= i32::from(256 % shards != 0), "{shards}: {counts:?}");
    }
    assert_eq!(shard_of(255, u16::MAX), 65_280, "more shards than tags must stay within bounds");
    assert_eq!(shard_of(255, 0), 1);
}

#[test]
fn impossible_geometry_is_refused() {
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
fn invalid_block_sizes_have_distinct_hashes() {
    let tokens: Vec<u32> = (0..1200).collect();
    let sizes = [0, 1, 3, 17, 511, 512, 513, u32::MAX];
    let firsts: BTreeSet<BlockHash> = sizes.iter().map(|&size| blocks_of(size).blocks(&tokens)[0]).collect();
    assert_eq!(firsts.len(), sizes.len());
    assert_eq!(blocks_of(0).blocks(&tokens).len(), 1200);
    assert_eq!(blocks_of(513).blocks(&tokens).len(), 3);
}

#[test]
fn debug_output_omits_secrets() {
    assert_eq!(format!("{:?}", hasher()), "PrefixHasher { block_tokens: 512, .. }");
    assert_eq!(format!("{:?}", hasher().start()), "Chain { .. }");
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(any::<u32>(), 1..200)
}

proptest! {
    /// Changing one token changes its block and every later one, but no earlier one.
    #[test]
    fn a_token_changes_everything_after_it(
        tokens in tokens(), place in any::<prop::sample::Index>(), flip in 1u32.., size in 0u32..8,
    ) {
        let hasher = blocks_of(1 << size);
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

    /// Longer prompts share exactly the hashes of full blocks with shorter ones.
    #[test]
    fn full_blocks_are_shared_with_every_extension(tokens in tokens(), more in tokens(), size in 0u32..8) {
        let hasher = blocks_of(1 << size);
        let (short, long) = (hasher.blocks(&tokens), hasher.blocks(&[tokens.clone(), more].concat()));
        let full = tokens.len() >> size;
        prop_assert_eq!(&short[..full], &long[..full]);
        if short.len() > full {
            prop_assert_ne!(short[full], long[full]);
        }
    }

    /// Every level equals the slow reference, for every block size and length.
    #[test]
    fn all_levels_equal_the_reference(
        tokens in prop::collection::vec(any::<u32>(), 0..1300), block_tokens in 1u32..=512,
    ) {
        // Few blocks: the reference takes quadratic time.
        let manifest = small_blocks(block_tokens);
        let tokens = &tokens[..tokens.len().min(100 * block_tokens as usize)];
        let expected = ReferenceHasher::new(&manifest, &SALT).blocks(tokens);
        for hasher in levels(&PrefixHasher::new(&manifest, &SALT)) {
            prop_assert_eq!(&hasher.blocks(tokens), &expected, "{:?}", hasher.level());
        }
    }

    /// Like `all_levels_equal_the_reference`, for the block sizes of engines.
    #[test]
    fn all_levels_equal_the_reference_at_powers_of_two(
        tokens in prop::collection::vec(any::<u32>(), 0..2500), size in 3u32..=9,
    ) {
        let manifest = small_blocks(1 << size);
        let expected = ReferenceHasher::new(&manifest, &SALT).blocks(&tokens);
        for hasher in levels(&PrefixHasher::new(&manifest, &SALT)) {
            prop_assert_eq!(&hasher.blocks(&tokens), &expected, "{:?}", hasher.level());
        }
    }

    /// Like `all_levels_equal_the_reference`, for trace ids.
    #[test]
    fn trace_ids_equal_the_reference(ids in prop::collection::vec(any::<u64>(), 0..150)) {
        let expected = ReferenceHasher::new(&IdentityManifest::default(), &SALT).chain_ids(&ids);
        for hasher in levels(&hasher()) {
            prop_assert_eq!(&hasher.chain_ids(&ids), &expected, "{:?}", hasher.level());
        }
    }

    /// A chain extended in pieces gives the hashes of the whole prompt.
    #[test]
    fn extending_in_pieces_gives_equal_hashes(
        tokens in prop::collection::vec(any::<u32>(), 0..2500),
        pieces in prop::collection::vec(0usize..300, 0..20),
        block_tokens in prop_oneof![1u32..=512, Just(1), Just(8), Just(16), Just(32), Just(64)],
    ) {
        for hasher in levels(&blocks_of(block_tokens)) {
            let (mut chain, mut hashes, mut open) = (hasher.start(), vec![], vec![]);
            let mut rest = &tokens[..];
            for piece in pieces.iter().copied().chain([usize::MAX]) {
                let (now, later) = rest.split_at(piece.min(rest.len()));
                rest = later;
                open.extend_from_slice(now);
                open = hasher.extend(&mut chain, &open, &mut hashes).to_vec();
            }
            hashes.extend(hasher.tail(&chain, &open));
            prop_assert_eq!(&hashes, &hasher.blocks(&tokens), "{:?}", hasher.level());
        }
    }

    #[test]
    fn chain_continues_after_each_block(
        tokens in prop::collection::vec(any::<u32>(), 0..300),
        more in prop::collection::vec(any::<u32>(), 1..40),
        size in 0u32..7,
    ) {
        for hasher in levels(&blocks_of(1 << size)) {
            let (mut hashes, mut chains) = (Vec::new(), Vec::new());
            hasher.extend_each(hasher.start(), &tokens, &mut hashes, &mut chains);
            let mut whole = Vec::new();
            hasher.extend(&mut hasher.start(), &tokens, &mut whole);
            prop_assert_eq!(&hashes, &whole);
            prop_assert_eq!(chains.len(), hashes.len());
            for (at, mut chain) in chains.into_iter().enumerate() {
                let before = &tokens[..(at + 1) << size];
                let mut behind = Vec::new();
                hasher.extend(&mut chain, &more, &mut behind);
                let mut all = Vec::new();
                hasher.extend(&mut hasher.start(), &[before, &more].concat(), &mut all);
                prop_assert_eq!(&all[at + 1..], &behind[..]);
            }
        }
    }

    /// Another salt gives other hashes.
    #[test]
    fn salt_matters(tokens in tokens(), bit in 0usize..256) {
        let mut salt = SALT;
        salt[bit / 8] ^= 1 << (bit % 8);
        let theirs = PrefixHasher::new(&IdentityManifest::default(), &salt);
        prop_assert_ne!(hasher().blocks(&tokens), theirs.blocks(&tokens));
    }

    /// Different token lists within one block have different hashes, whatever their lengths.
    #[test]
    fn different_tokens_have_different_hashes(a in tokens(), b in tokens()) {
        let hasher = hasher();
        prop_assert_eq!(hasher.blocks(&a) == hasher.blocks(&b), a == b);
    }
}
