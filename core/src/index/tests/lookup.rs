//! The longest prefix: its end, its runs, and their holders.

use super::*;

const D: Tier = Tier::Dram;

#[test]
fn an_empty_request_or_index_matches_nothing() {
    let index = Fixture::with_nodes(1);
    assert_eq!(index.lookup([]), PrefixMatch::default());
    assert_eq!(index.lookup([1, 2]), PrefixMatch::default());
    assert_eq!(index.lookup([]).union_blocks(), 0);
    assert_eq!(index.lookup([]).node_prefix_blocks(NodeId(1)), 0);
    assert_eq!(index.lookup([]).nodes().count(), 0);
}

#[test]
fn prefix_ends_at_the_first_block_without_holder() {
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored([1, 2, 4], D)]);
    index.announce_next(2, vec![stored([4, 5], D)]);
    assert_eq!(index.runs([1, 2, 3, 4, 5]), [(0, 2, vec![(1, D)])]);
    assert_eq!(index.runs([3, 4]), []);
}

#[test]
fn neighbours_with_equal_holders_are_one_run() {
    let mut index = Fixture::with_nodes(3);
    index.announce_next(1, vec![stored([1, 2, 3, 4, 5], D)]);
    index.announce_next(2, vec![stored([1, 2], D)]);
    index.announce_next(3, vec![stored([4, 5, 6], Tier::Ssd)]);
    let expected = vec![
        (0, 2, vec![(1, D), (2, D)]),
        (2, 1, vec![(1, D)]),
        (3, 2, vec![(1, D), (3, Tier::Ssd)]),
        (5, 1, vec![(3, Tier::Ssd)]),
    ];
    assert_eq!(index.runs(1..=9), expected);
    let found = index.lookup(1..=9);
    assert_eq!(found.union_blocks(), 6);
    assert_eq!([1, 2, 3, 9].map(|node| found.node_prefix_blocks(NodeId(node))), [5, 2, 0, 0]);
    assert_eq!(found.nodes().collect::<Vec<_>>(), [NodeId(1), NodeId(2)]);
}

#[test]
fn another_tier_starts_another_run() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1, 2], D), stored([3], Tier::Ssd)]);
    assert_eq!(index.runs([1, 2, 3]), [(0, 2, vec![(1, D)]), (2, 1, vec![(1, Tier::Ssd)])]);
}

#[test]
fn tiers_below_the_fastest_do_not_cut_a_run() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1, 2, 3], D), stored([2], Tier::Ssd)]);
    assert_eq!(index.runs([1, 2, 3]), [(0, 3, vec![(1, D)])]);
}

#[test]
fn holders_come_in_the_order_of_nodes_not_of_arrival() {
    let mut index = Fixture::with_nodes(0);
    for node in [5, 2, 9, 1, 7] {
        index.join(node);
        index.announce_next(node, vec![stored([1], D)]);
    }
    let order: Vec<u32> = index.lookup([1]).runs[0].holders.iter().map(|one| one.node.0).collect();
    assert_eq!(order, [1, 2, 5, 7, 9]);
}

#[test]
fn fenced_holders_do_not_split_a_run() {
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored([1, 2, 3, 4], D)]);
    index.announce_next(2, vec![stored([2, 3], D)]);
    index.0.apply(&fence(2, 1));
    assert_eq!(index.runs([1, 2, 3, 4]), [(0, 4, vec![(1, D)])]);
}

#[test]
fn holders_carry_the_current_epoch() {
    let mut index = Fixture::with_nodes(1);
    index.join(1);
    index.announce_next(1, vec![stored([1], D)]);
    let found = index.lookup([1]);
    assert_eq!(found.runs[0].holders[0], Holder { node: NodeId(1), epoch: Epoch(2), tier: D });
    assert_eq!(found.runs[0].holder(NodeId(1)), Some(&found.runs[0].holders[0]));
    assert_eq!(found.runs[0].holder(NodeId(2)), None);
}

#[test]
fn a_gap_in_one_node_ends_its_own_prefix_only() {
    let mut index = Fixture::with_nodes(2);
    let third = Change::Stored { parent: Some(block(2)), blocks: blocks([3]), tier: D };
    index.announce_next(1, vec![stored([1], D), third]);
    index.announce_next(2, vec![stored([1, 2, 3], D)]);
    let found = index.lookup([1, 2, 3]);
    assert_eq!((found.node_prefix_blocks(NodeId(1)), found.node_prefix_blocks(NodeId(2))), (1, 3));
}

#[test]
fn stale_predecessor_is_not_followed() {
    let mut index = Fixture::with_nodes(3);
    let after = |parent: u64, numbers: &[u64]| Change::Stored {
        parent: Some(block(parent)),
        blocks: blocks(numbers.iter().copied()),
        tier: D,
    };
    index.announce_next(1, vec![stored([1, 2, 3, 4], D)]);
    index.announce_next(2, vec![after(3, &[13, 14])]);
    assert_eq!(index.runs([1, 2, 3, 13, 14]), [(0, 3, vec![(1, D)]), (3, 2, vec![(2, D)])]);
    // The trunk is cut below the branch and grows differently; then the block comes back elsewhere.
    index.announce_next(1, vec![dropped([4, 3], D), after(2, &[23, 24])]);
    assert_eq!(index.runs([1, 2, 3, 13, 14]), [(0, 2, vec![(1, D)])]);
    index.announce_next(3, vec![after(2, &[3])]);
    let expected = [(0, 2, vec![(1, D)]), (2, 1, vec![(3, D)]), (3, 2, vec![(2, D)])];
    assert_eq!(index.runs([1, 2, 3, 13, 14]), expected);
    // The same after the trunk and its run number are gone.
    index.announce_next(1, vec![Change::Cleared, stored([31, 32, 33, 34], D)]);
    assert_eq!(index.runs([1, 2, 3, 13, 14]), []);
    assert_eq!(index.runs([31, 32, 33, 13, 14]), [(0, 3, vec![(1, D)]), (3, 2, vec![(2, D)])]);
}

#[test]
fn prompt_starts_at_a_block_announced_without_parent() {
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored([1, 2, 3, 4], D)]);
    assert_eq!(index.runs([2, 3, 4]), [], "it starts in the middle");
    let holders = |index: &Fixture, number| -> Vec<u32> {
        index.0.holders_of(block(number)).iter().map(|holder| holder.node.0).collect()
    };
    assert_eq!(holders(&index, 2), [1]);
    // If one node announces a block with a parent, another can still announce it as the first.
    index.announce_next(2, vec![stored([2, 3], D)]);
    assert_eq!(holders(&index, 2), [1, 2]);
    assert_eq!(index.runs([2, 3, 4]), [(0, 2, vec![(1, D), (2, D)]), (2, 1, vec![(1, D)])]);
    // Neither drops of the blocks before it nor their return elsewhere matter.
    index.announce_next(1, vec![dropped([1, 2], D)]);
    assert_eq!(
        index.runs([2, 3, 4]),
        [(0, 1, vec![(2, D)]), (1, 1, vec![(1, D), (2, D)]), (2, 1, vec![(1, D)])]
    );
    index.announce_next(2, vec![dropped([2], D)]);
    assert_eq!((index.runs([2, 3, 4]), holders(&index, 2)), (vec![], vec![]));
    index.announce_next(2, vec![stored([2], D)]);
    assert_eq!(index.prefix_blocks([2, 3, 4]), 3);
}

#[test]
fn prompts_may_leave_a_run_anywhere() {
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored(1..=20, D)]);
    let branch = Change::Stored { parent: Some(block(10)), blocks: blocks(31..=35), tier: D };
    index.announce_next(2, vec![branch]);
    for held in 1..=20 {
        for new in [0, 1, 3, 30] {
            assert_eq!(
                index.prefix_blocks((1..=held).chain(100..100 + new)),
                held as u32,
                "{held} held and {new} new blocks"
            );
        }
    }
    for held in 31..=35 {
        assert_eq!(index.prefix_blocks((1..=10).chain(31..=held).chain(100..103)), held as u32 - 20);
    }
}

/// A block with the same index and the same unshared hash bytes as one of ours, but in another
/// block group.
fn lookalike(number: u64) -> BlockHash {
    block(number).in_chain(7, raw_block(number + 1_000_000), number as usize)
}

fn after(parent: BlockHash, blocks: Vec<BlockHash>) -> Change {
    Change::Stored { parent: Some(parent), blocks, tier: D }
}

#[test]
fn block_with_equal_suffix_is_not_confused() {
    // One node extends the prefix by a lookalike of block 8, so the true block starts its own run.
    let mut index = Fixture::with_nodes(3);
    index.announce_next(1, vec![stored(0..8, D)]);
    index.announce_next(2, vec![after(block(7), vec![lookalike(8)])]);
    index.announce_next(3, vec![stored(0..=50, D)]);
    let whole = vec![(0, 8, vec![(1, D), (3, D)]), (8, 43, vec![(3, D)])];
    assert_eq!(index.runs((0..=50).chain(900..905)), whole);
    assert_eq!(index.runs(0..=50), whole);
    assert_eq!(index.runs((0..8).chain(900..905)), [whole[0].clone()]);
    // The lookalike itself is found behind them.
    let lie = [blocks(0..8), vec![lookalike(8), block(900)]].concat();
    assert_eq!(index.0.longest_prefix(&lie).union_blocks(), 9);
}

#[test]
fn fork_behind_a_lookalike_hides_no_blocks() {
    // The lookalike has two continuations, so a fork lies behind it.
    let mut index = Fixture::with_nodes(3);
    index.announce_next(1, vec![stored(0..8, D)]);
    let ninth = raw_block(1_000_009).in_chain(7, lookalike(8), 9);
    index.announce_next(2, vec![after(block(7), vec![lookalike(8), ninth])]);
    index.announce_next(3, vec![after(block(7), blocks(8..=50))]);
    index.announce_next(2, vec![after(lookalike(8), vec![raw_block(78)])]);
    assert_eq!(index.0.store.runs.get(0).fork(), 9);
    index.announce_next(3, vec![stored(0..8, D)]);
    let whole = vec![(0, 8, vec![(1, D), (3, D)]), (8, 43, vec![(3, D)])];
    assert_eq!(index.runs(0..=50), whole);
    assert_eq!(index.runs((0..=50).chain(900..905)), whole);
}

#[test]
fn a_request_may_repeat_a_block() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1], D)]);
    assert_eq!(index.runs([1, 1, 1]), [(0, 3, vec![(1, D)])]);
}

#[test]
fn similar_hashes_are_all_found() {
    // Counters in either half of the hash, as in hand-made hashes.
    let mut index = Fixture::with_nodes(1);
    let hash = |number: u64| {
        if number.is_multiple_of(2) {
            BlockHash::from_words(number, 0)
        } else {
            BlockHash::from_words(0, number)
        }
    };
    let hashes: Vec<BlockHash> = (0..20_000).map(hash).collect();
    index.announce_next(1, vec![Change::Stored { parent: None, blocks: hashes.clone(), tier: D }]);
    assert_eq!(index.0.longest_prefix(&hashes).union_blocks(), 20_000);
    assert_eq!(index.0.stats().blocks, 20_000);
}
