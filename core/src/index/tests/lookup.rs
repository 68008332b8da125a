//! The longest prefix: where it ends, how it is cut into runs, and who appears in them.

use super::*;

const D: Tier = Tier::Dram;

#[test]
fn an_empty_request_or_index_matches_nothing() {
    let index = Fixture::with_nodes(1);
    assert_eq!(index.lookup([]), PrefixMatch::default());
    assert_eq!(index.lookup([1, 2]), PrefixMatch::default());
    assert_eq!(index.lookup([]).union_blocks(), 0);
    assert_eq!(index.lookup([]).per_node(NodeId(1)), 0);
    assert_eq!(index.lookup([]).nodes().count(), 0);
}

#[test]
fn the_prefix_ends_at_the_first_block_nobody_holds() {
    let mut index = Fixture::with_nodes(2);
    index.say(1, vec![stored([1, 2, 4], D)]);
    index.say(2, vec![stored([4, 5], D)]);
    assert_eq!(index.runs([1, 2, 3, 4, 5]), [(0, 2, vec![(1, D)])]);
    assert_eq!(index.runs([3, 4]), []);
}

#[test]
fn neighbours_with_equal_holders_are_one_run() {
    let mut index = Fixture::with_nodes(3);
    index.say(1, vec![stored([1, 2, 3, 4, 5], D)]);
    index.say(2, vec![stored([1, 2], D)]);
    index.say(3, vec![stored([4, 5, 6], Tier::Ssd)]);
    let expected = vec![
        (0, 2, vec![(1, D), (2, D)]),
        (2, 1, vec![(1, D)]),
        (3, 2, vec![(1, D), (3, Tier::Ssd)]),
        (5, 1, vec![(3, Tier::Ssd)]),
    ];
    assert_eq!(index.runs(1..=9), expected);
    let found = index.lookup(1..=9);
    assert_eq!(found.union_blocks(), 6);
    assert_eq!([1, 2, 3, 9].map(|node| found.per_node(NodeId(node))), [5, 2, 0, 0]);
    assert_eq!(found.nodes().collect::<Vec<_>>(), [NodeId(1), NodeId(2)]);
}

#[test]
fn another_tier_starts_another_run() {
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored([1, 2], D), stored([3], Tier::Ssd)]);
    assert_eq!(index.runs([1, 2, 3]), [(0, 2, vec![(1, D)]), (2, 1, vec![(1, Tier::Ssd)])]);
}

#[test]
fn tiers_below_the_fastest_do_not_cut_a_run() {
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored([1, 2, 3], D), stored([2], Tier::Ssd)]);
    assert_eq!(index.runs([1, 2, 3]), [(0, 3, vec![(1, D)])]);
}

#[test]
fn holders_come_in_the_order_of_nodes_not_of_arrival() {
    let mut index = Fixture::with_nodes(0);
    for node in [5, 2, 9, 1, 7] {
        index.join(node);
        index.say(node, vec![stored([1], D)]);
    }
    let order: Vec<u32> = index.lookup([1]).runs[0].holders.iter().map(|one| one.node.0).collect();
    assert_eq!(order, [1, 2, 5, 7, 9]);
}

#[test]
fn dead_holders_do_not_cut_a_run() {
    let mut index = Fixture::with_nodes(2);
    index.say(1, vec![stored([1, 2, 3, 4], D)]);
    index.say(2, vec![stored([2, 3], D)]);
    index.0.apply(&fence(2, 1));
    assert_eq!(index.runs([1, 2, 3, 4]), [(0, 4, vec![(1, D)])]);
}

#[test]
fn holders_carry_the_epoch_of_now() {
    let mut index = Fixture::with_nodes(1);
    index.join(1);
    index.say(1, vec![stored([1], D)]);
    let found = index.lookup([1]);
    assert_eq!(found.runs[0].holders[0], Holder { node: NodeId(1), epoch: Epoch(2), tier: D });
    assert_eq!(found.runs[0].holder(NodeId(1)), Some(&found.runs[0].holders[0]));
    assert_eq!(found.runs[0].holder(NodeId(2)), None);
}

#[test]
fn a_gap_in_one_node_ends_its_own_prefix_only() {
    let mut index = Fixture::with_nodes(2);
    let third = Change::Stored { parent: Some(block(2)), blocks: blocks([3]), tier: D };
    index.say(1, vec![stored([1], D), third]);
    index.say(2, vec![stored([1, 2, 3], D)]);
    let found = index.lookup([1, 2, 3]);
    assert_eq!((found.per_node(NodeId(1)), found.per_node(NodeId(2))), (1, 3));
}

#[test]
fn a_branch_is_not_believed_to_hang_where_other_blocks_have_grown() {
    let mut index = Fixture::with_nodes(3);
    let after = |parent: u64, numbers: &[u64]| Change::Stored {
        parent: Some(block(parent)),
        blocks: blocks(numbers.iter().copied()),
        tier: D,
    };
    index.say(1, vec![stored([1, 2, 3, 4], D)]);
    index.say(2, vec![after(3, &[13, 14])]);
    assert_eq!(index.runs([1, 2, 3, 13, 14]), [(0, 3, vec![(1, D)]), (3, 2, vec![(2, D)])]);
    // The trunk is cut below the branch and grows another way; then the block is back, elsewhere.
    index.say(1, vec![dropped([4, 3], D), after(2, &[23, 24])]);
    assert_eq!(index.runs([1, 2, 3, 13, 14]), [(0, 2, vec![(1, D)])]);
    index.say(3, vec![after(2, &[3])]);
    let expected = [(0, 2, vec![(1, D)]), (2, 1, vec![(3, D)]), (3, 2, vec![(2, D)])];
    assert_eq!(index.runs([1, 2, 3, 13, 14]), expected);
    // The same where the trunk is gone, and its number with it.
    index.say(1, vec![Change::Cleared, stored([31, 32, 33, 34], D)]);
    assert_eq!(index.runs([1, 2, 3, 13, 14]), []);
    assert_eq!(index.runs([31, 32, 33, 13, 14]), [(0, 3, vec![(1, D)]), (3, 2, vec![(2, D)])]);
}

#[test]
fn a_prompt_begins_where_somebody_said_that_a_prefix_does() {
    let mut index = Fixture::with_nodes(2);
    index.say(1, vec![stored([1, 2, 3, 4], D)]);
    assert_eq!(index.runs([2, 3, 4]), [], "it begins in the middle");
    let holders = |index: &Fixture, number| -> Vec<u32> {
        index.0.holders_of(block(number)).iter().map(|holder| holder.node.0).collect()
    };
    assert_eq!(holders(&index, 2), [1]);
    // What one node says is before a block does not hide it from another that says it is the first.
    index.say(2, vec![stored([2, 3], D)]);
    assert_eq!(holders(&index, 2), [1, 2]);
    assert_eq!(index.runs([2, 3, 4]), [(0, 2, vec![(1, D), (2, D)]), (2, 1, vec![(1, D)])]);
    // Nor does it matter who drops what is before it, or that what was dropped comes back elsewhere.
    index.say(1, vec![dropped([1, 2], D)]);
    assert_eq!(
        index.runs([2, 3, 4]),
        [(0, 1, vec![(2, D)]), (1, 1, vec![(1, D), (2, D)]), (2, 1, vec![(1, D)])]
    );
    index.say(2, vec![dropped([2], D)]);
    assert_eq!((index.runs([2, 3, 4]), holders(&index, 2)), (vec![], vec![]));
    index.say(2, vec![stored([2], D)]);
    assert_eq!(index.reach([2, 3, 4]), 3);
}

#[test]
fn a_prompt_may_leave_a_run_before_where_others_did_at_it_and_behind_it() {
    let mut index = Fixture::with_nodes(2);
    index.say(1, vec![stored(1..=20, D)]);
    let branch = Change::Stored { parent: Some(block(10)), blocks: blocks(31..=35), tier: D };
    index.say(2, vec![branch]);
    for held in 1..=20 {
        for new in [0, 1, 3, 30] {
            assert_eq!(
                index.reach((1..=held).chain(100..100 + new)),
                held as u32,
                "{held} and {new} new ones"
            );
        }
    }
    for held in 31..=35 {
        assert_eq!(index.reach((1..=10).chain(31..=held).chain(100..103)), held as u32 - 20);
    }
}

/// A block that has the own bytes of one of ours, and its position, but other bits of the octet.
fn lookalike(number: u64) -> BlockHash {
    block(number).in_chain(7, loose(number + 1_000_000), number as usize)
}

fn after(parent: BlockHash, blocks: Vec<BlockHash>) -> Change {
    Change::Stored { parent: Some(parent), blocks, tier: D }
}

#[test]
fn a_block_with_the_own_bytes_of_another_is_not_taken_for_it() {
    // One node grows the prefix by a lookalike of block 8; so the true one begins a run of its own.
    let mut index = Fixture::with_nodes(3);
    index.say(1, vec![stored(0..8, D)]);
    index.say(2, vec![after(block(7), vec![lookalike(8)])]);
    index.say(3, vec![stored(0..=50, D)]);
    let whole = vec![(0, 8, vec![(1, D), (3, D)]), (8, 43, vec![(3, D)])];
    assert_eq!(index.runs((0..=50).chain(900..905)), whole);
    assert_eq!(index.runs(0..=50), whole);
    assert_eq!(index.runs((0..8).chain(900..905)), [whole[0].clone()]);
    // The lookalike itself is found behind them.
    let lie = [blocks(0..8), vec![lookalike(8), block(900)]].concat();
    assert_eq!(index.0.longest_prefix(&lie).union_blocks(), 9);
}

#[test]
fn a_fork_behind_the_own_bytes_of_another_block_hides_nothing() {
    // The same, and the lookalike goes on, and goes on otherwise: prompts are said to part behind it.
    let mut index = Fixture::with_nodes(3);
    index.say(1, vec![stored(0..8, D)]);
    let ninth = loose(1_000_009).in_chain(7, lookalike(8), 9);
    index.say(2, vec![after(block(7), vec![lookalike(8), ninth])]);
    index.say(3, vec![after(block(7), blocks(8..=50))]);
    index.say(2, vec![after(lookalike(8), vec![loose(78)])]);
    assert_eq!(index.0.store.runs.get(0).fork(), 9);
    index.say(3, vec![stored(0..8, D)]);
    let whole = vec![(0, 8, vec![(1, D), (3, D)]), (8, 43, vec![(3, D)])];
    assert_eq!(index.runs(0..=50), whole);
    assert_eq!(index.runs((0..=50).chain(900..905)), whole);
}

#[test]
fn a_request_may_repeat_a_block() {
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored([1], D)]);
    assert_eq!(index.runs([1, 1, 1]), [(0, 3, vec![(1, D)])]);
}

#[test]
fn many_blocks_and_hashes_that_differ_in_few_bits_are_all_found() {
    // Counters in either half of the hash: what a hand-made hash looks like.
    let mut index = Fixture::with_nodes(1);
    let hash = |number: u64| {
        let shift = if number.is_multiple_of(2) { 0 } else { 64 };
        BlockHash((u128::from(number) << shift).to_le_bytes())
    };
    let hashes: Vec<BlockHash> = (0..20_000).map(hash).collect();
    index.say(1, vec![Change::Stored { parent: None, blocks: hashes.clone(), tier: D }]);
    assert_eq!(index.0.longest_prefix(&hashes).union_blocks(), 20_000);
    assert_eq!(index.0.stats().blocks, 20_000);
}
