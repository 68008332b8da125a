//! What a hash says of the place of its block: position and octet along chains, in tails, and where a chain is
//! taken up again.
//!
//! Not here: that the layout is the one of the decision record; the reference in `mod.rs` says that.

use std::collections::BTreeSet;

use super::*;
use crate::id::OCTET_BLOCKS;

/// Blocks of the chains in these tests: more than a segment of any size, and no whole number of octets.
const BLOCKS: usize = 77;

/// One token, padded blocks, three lines (ten blocks a segment), and the sizes of engines.
const SIZES: [u32; 7] = [1, 3, 8, 16, 48, 64, 512];

fn chain_of(block_tokens: u32) -> Vec<u32> {
    (0..BLOCKS as u32 * block_tokens).map(|place| place.wrapping_mul(0x9e37_79b9)).collect()
}

/// The octet of a block without the root tag.
fn octet_bits(hash: BlockHash) -> u64 {
    hash.octet() >> 11
}

fn assert_in_place(hashes: &[BlockHash]) {
    for (position, hash) in hashes.iter().enumerate() {
        let octet = hashes[position - position % OCTET_BLOCKS];
        assert_eq!(hash.nth_of_octet(), position % OCTET_BLOCKS, "block {position}");
        assert_eq!(hash.octet(), octet.octet(), "block {position}");
        assert_eq!(*hash, hash.in_chain(hashes[0].root_tag(), octet, position), "block {position}");
    }
    let octets: BTreeSet<u64> = hashes.iter().map(|hash| hash.octet()).collect();
    assert_eq!(
        octets.len(),
        hashes.len().div_ceil(OCTET_BLOCKS),
        "octets of one chain have bits of their own"
    );
}

#[test]
fn a_hash_says_where_in_its_chain_it_is() {
    for size in SIZES {
        for hasher in levels(&blocks_of(size)) {
            assert_in_place(&hasher.blocks(&chain_of(size)));
        }
    }
    let ids: Vec<u64> = (0..200).collect();
    levels(&hasher()).iter().for_each(|hasher| assert_in_place(&hasher.chain_ids(&ids)));
}

#[test]
fn a_chain_goes_on_at_every_position_of_an_octet() {
    for size in SIZES {
        let (tokens, size) = (chain_of(size), size as usize);
        for hasher in levels(&blocks_of(size as u32)) {
            let whole = hasher.blocks(&tokens);
            for cut in 0..3 * OCTET_BLOCKS {
                let (mut chain, mut hashes) = (hasher.start(), vec![]);
                let (before, after) = tokens.split_at(cut * size);
                assert!(hasher.extend(&mut chain, before, &mut hashes).is_empty());
                // What went on from a copy before does not matter to the chain.
                hasher.extend(&mut chain.clone(), &after[size..], &mut vec![]);
                assert!(hasher.extend(&mut chain, after, &mut hashes).is_empty());
                assert_eq!(hashes, whole, "{:?}, cut behind {cut} blocks of {size}", hasher.level());
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
fn a_tail_has_a_place_like_any_other_block() {
    for size in [2, 8, 16, 48, 512] {
        let tokens = chain_of(size);
        for hasher in levels(&blocks_of(size)) {
            let whole = hasher.blocks(&tokens);
            for before in 0..3 * OCTET_BLOCKS {
                let hashes = hasher.blocks(&tokens[..before * size as usize + 1]);
                assert_eq!(hashes[..before], whole[..before]);
                assert_in_place(&hashes);
                // The first of an octet brings bits of its own; any other has those of whole blocks.
                let is_shared = octet_bits(hashes[before]) == octet_bits(whole[before]);
                assert_eq!(is_shared, before % OCTET_BLOCKS > 0, "tail behind {before} blocks of {size}");
            }
        }
    }
}

#[test]
fn prompts_that_part_in_an_octet_share_it_and_no_later_one() {
    let (hasher, tokens) = (blocks_of(16), chain_of(16));
    let whole = hasher.blocks(&tokens);
    for parting in 0..3 * OCTET_BLOCKS {
        let mut other = tokens.clone();
        other[parting * 16] ^= 1;
        let other = hasher.blocks(&other);
        let shared = parting.next_multiple_of(OCTET_BLOCKS);
        for position in 0..BLOCKS {
            let is_shared = octet_bits(other[position]) == octet_bits(whole[position]);
            assert_eq!(is_shared, position < shared, "parted at {parting}, block {position}");
        }
    }
}

#[test]
fn every_bit_of_an_octet_is_used() {
    let hasher = blocks_of(16);
    let octets = (0..2_000).map(|root| octet_bits(hasher.blocks(&[root; 16])[0]));
    let (mut counts, mut distinct) = ([0; 29], BTreeSet::new());
    for octet in octets {
        assert_eq!(octet >> counts.len(), 0);
        assert!(distinct.insert(octet));
        counts.iter_mut().enumerate().for_each(|(bit, count)| *count += octet >> bit & 1);
    }
    // Each expects 1,000 with a standard deviation of 22; six of them either way.
    assert!(counts.iter().all(|count| (866..1134).contains(count)), "{counts:?}");
}

proptest! {
    /// What `in_chain` makes of an image is what the decision record says, whatever stood there.
    #[test]
    fn in_chain_is_the_layout_of_the_record(
        images in prop::collection::vec(any::<u128>(), 1..40), place in any::<prop::sample::Index>(),
    ) {
        let position = place.index(images.len());
        let hash = |position: usize| BlockHash(images[position].to_le_bytes());
        let octet = hash(position - position % OCTET_BLOCKS);
        let got = hash(position).in_chain(hash(0).root_tag(), octet, position);
        prop_assert_eq!(got, reference::laid_out(&images, position));
        prop_assert_eq!(got.octet() >> 11, octet.octet() >> 11);
        prop_assert_eq!(got.nth_of_octet(), position % 8);
    }
}
