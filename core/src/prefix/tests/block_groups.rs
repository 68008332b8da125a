//! Tests of the positions in block hashes: index and block group along chains, in tails, and after
//! a chain continues.
//!
//! Not here: the bits of each; the tests in `mod.rs` compare them with a reference.

use std::collections::BTreeSet;

use super::*;
use crate::id::BLOCK_GROUP_BLOCKS;

/// Blocks of the test chains: more than a segment of any size, and no multiple of a block group.
const BLOCKS: usize = 77;

/// One token, padded blocks, three lines (ten blocks a segment), and the sizes of engines.
const SIZES: [u32; 7] = [1, 3, 8, 16, 48, 64, 512];

fn chain_of(block_tokens: u32) -> Vec<u32> {
    (0..BLOCKS as u32 * block_tokens).map(|place| place.wrapping_mul(0x9e37_79b9)).collect()
}

/// The group bits of a block without the root tag.
fn group_bits(hash: BlockHash) -> u64 {
    hash.block_group() >> 11
}

fn assert_positions(hashes: &[BlockHash]) {
    for (position, hash) in hashes.iter().enumerate() {
        let octet = hashes[position - position % BLOCK_GROUP_BLOCKS];
        assert_eq!(hash.position_in_group(), position % BLOCK_GROUP_BLOCKS, "block {position}");
        assert_eq!(hash.block_group(), octet.block_group(), "block {position}");
        assert_eq!(*hash, hash.in_chain(hashes[0].root_tag(), octet, position), "block {position}");
    }
    let octets: BTreeSet<u64> = hashes.iter().map(|hash| hash.block_group()).collect();
    assert_eq!(
        octets.len(),
        hashes.len().div_ceil(BLOCK_GROUP_BLOCKS),
        "each group of a chain must have distinct bits"
    );
}

#[test]
fn hash_encodes_its_position() {
    for size in SIZES {
        for hasher in levels(&blocks_of(size)) {
            assert_positions(&hasher.blocks(&chain_of(size)));
        }
    }
    let ids: Vec<u64> = (0..200).collect();
    levels(&hasher()).iter().for_each(|hasher| assert_positions(&hasher.chain_ids(&ids)));
}

#[test]
fn chain_continues_at_every_index_of_a_group() {
    for size in SIZES {
        let (tokens, size) = (chain_of(size), size as usize);
        for hasher in levels(&blocks_of(size as u32)) {
            let whole = hasher.blocks(&tokens);
            for cut in 0..3 * BLOCK_GROUP_BLOCKS {
                let (mut chain, mut hashes) = (hasher.start(), vec![]);
                let (before, after) = tokens.split_at(cut * size);
                assert!(hasher.extend(&mut chain, before, &mut hashes).is_empty());
                // Continuing a copy must not affect the chain.
                hasher.extend(&mut chain.clone(), &after[size..], &mut vec![]);
                assert!(hasher.extend(&mut chain, after, &mut hashes).is_empty());
                assert_eq!(hashes, whole, "{:?}, cut after {cut} blocks of {size}", hasher.level());
            }
            let (mut chain, mut one_by_one) = (hasher.start(), vec![]);
            for block in tokens.chunks(size) {
                hasher.extend(&mut chain, block, &mut one_by_one);
            }
            assert_eq!(one_by_one, whole, "{:?}, one by one", hasher.level());
        }
    }
}

#[test]
fn tail_has_a_position() {
    for size in [2, 8, 16, 48, 512] {
        let tokens = chain_of(size);
        for hasher in levels(&blocks_of(size)) {
            let whole = hasher.blocks(&tokens);
            for before in 0..3 * BLOCK_GROUP_BLOCKS {
                let hashes = hasher.blocks(&tokens[..before * size as usize + 1]);
                assert_eq!(hashes[..before], whole[..before]);
                assert_positions(&hashes);
                // The first block of a group brings its own bits; any other has those of whole
                // blocks.
                let is_shared = group_bits(hashes[before]) == group_bits(whole[before]);
                assert_eq!(
                    is_shared,
                    before % BLOCK_GROUP_BLOCKS > 0,
                    "tail after {before} blocks of {size}"
                );
            }
        }
    }
}

#[test]
fn diverging_prompts_share_no_later_group() {
    let (hasher, tokens) = (blocks_of(16), chain_of(16));
    let whole = hasher.blocks(&tokens);
    for parting in 0..3 * BLOCK_GROUP_BLOCKS {
        let mut other = tokens.clone();
        other[parting * 16] ^= 1;
        let other = hasher.blocks(&other);
        let shared = parting.next_multiple_of(BLOCK_GROUP_BLOCKS);
        for position in 0..BLOCKS {
            let is_shared = group_bits(other[position]) == group_bits(whole[position]);
            assert_eq!(is_shared, position < shared, "diverged at {parting}, block {position}");
        }
    }
}

#[test]
fn every_group_bit_is_used() {
    let hasher = blocks_of(16);
    let octets = (0..2_000).map(|root| group_bits(hasher.blocks(&[root; 16])[0]));
    let (mut counts, mut distinct) = ([0; 29], BTreeSet::new());
    for octet in octets {
        assert_eq!(octet >> counts.len(), 0);
        assert!(distinct.insert(octet));
        counts.iter_mut().enumerate().for_each(|(bit, count)| *count += octet >> bit & 1);
    }
    // Each expects 1,000 with a standard deviation of 22; allows six in either direction.
    assert!(counts.iter().all(|count| (866..1134).contains(count)), "{counts:?}");
}

proptest! {
    /// `in_chain` gives the specified place, whatever the place bytes were.
    #[test]
    fn in_chain_gives_the_specified_place(
        outputs in prop::collection::vec(any::<[u8; 32]>(), 1..40), place in any::<prop::sample::Index>(),
    ) {
        let position = place.index(outputs.len());
        let hash = |position: usize| {
            let (digest, place) = outputs[position].split_at(16);
            BlockHash::from_slice(&[&place[..5], &digest[..14]].concat()).unwrap()
        };
        let octet = hash(position - position % BLOCK_GROUP_BLOCKS);
        let got = hash(position).in_chain(hash(0).root_tag(), octet, position);
        prop_assert_eq!(got, reference::hash_with_place(&outputs, position));
        prop_assert_eq!(got.block_group() >> 11, octet.block_group() >> 11);
        prop_assert_eq!(got.position_in_group(), position % 8);
    }
}
