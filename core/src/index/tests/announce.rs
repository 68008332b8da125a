//! Sequence numbers, epochs, and the effect of each change.

use super::*;

#[test]
fn numbers_start_at_one_and_have_no_gaps() {
    let mut index = Fixture::with_nodes(1);
    let say =
        |index: &mut Fixture, seq, number| index.announce(1, 1, seq, vec![stored([number], Tier::Dram)]);
    assert_eq!(say(&mut index, 0, 90), AnnounceOutcome::Duplicate { next: Seq(1) });
    assert_eq!(say(&mut index, 2, 91), AnnounceOutcome::Gap { expected: Seq(1) });
    assert_eq!(say(&mut index, 1, 1), applied(2));
    assert_eq!(say(&mut index, 1, 92), AnnounceOutcome::Duplicate { next: Seq(2) });
    assert_eq!(say(&mut index, 2, 2), applied(3));
    assert_eq!(say(&mut index, 5, 93), AnnounceOutcome::Gap { expected: Seq(3) });
    assert_eq!(say(&mut index, u64::MAX, 94), AnnounceOutcome::Gap { expected: Seq(3) });
    assert_eq!(index.0.stats().copies, 2, "only applied batches leave a trace");
    assert_eq!(index.0.next_seq(NodeId(1)), Some((Epoch(1), Seq(3))));
}

#[test]
fn gap_is_closed_by_full_reannouncement() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1, 2, 3], Tier::Dram)]);
    assert_eq!(index.announce(1, 1, 3, vec![]), AnnounceOutcome::Gap { expected: Seq(2) });
    index.announce_next(1, vec![Change::Cleared, stored([1, 7], Tier::Ssd)]);
    assert_eq!(index.runs([1, 7]), [(0, 2, vec![(1, Tier::Ssd)])]);
    assert_eq!((index.prefix_blocks([2]), index.prefix_blocks([3])), (0, 0));
    assert_eq!(
        index.0.next_seq(NodeId(1)),
        Some((Epoch(1), Seq(3))),
        "clearing keeps epoch and sequence number"
    );
}

#[test]
fn other_epochs_are_fenced() {
    let mut index = Fixture::with_nodes(1);
    index.join(1);
    for epoch in [0, 1, 3, u64::MAX] {
        let outcome = index.announce(1, epoch, 1, vec![stored([1], Tier::Dram)]);
        assert_eq!(outcome, AnnounceOutcome::Fenced, "epoch {epoch}");
    }
    assert_eq!(index.announce(9, 1, 1, vec![]), AnnounceOutcome::Fenced, "unknown node");
    assert_eq!(index.prefix_blocks([1]), 0);
}

#[test]
fn batch_returns_one_outcome_per_announcement() {
    let mut index = Fixture::with_nodes(2);
    let answer = index.0.apply(&Command::Announce(vec![
        announcement(1, 1, 1, vec![stored([1], Tier::Dram)]),
        announcement(2, 7, 1, vec![stored([2], Tier::Dram)]),
        announcement(1, 1, 3, vec![stored([3], Tier::Dram)]),
        announcement(1, 1, 2, vec![stored([4], Tier::Dram)]),
        announcement(2, 1, 1, vec![]),
        announcement(1, 1, 1, vec![]),
    ]));
    assert_eq!(
        answer,
        Applied::Announced(vec![
            applied(2),
            AnnounceOutcome::Fenced,
            AnnounceOutcome::Gap { expected: Seq(2) },
            applied(3),
            applied(2),
            AnnounceOutcome::Duplicate { next: Seq(3) },
        ])
    );
    assert_eq!([1, 2, 3, 4].map(|number| index.prefix_blocks([number])), [1, 0, 0, 1]);
}

#[test]
fn a_block_may_be_in_several_tiers_and_is_served_from_the_fastest() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1], Tier::Ssd), stored([1], Tier::Gpu), stored([1], Tier::Dram)]);
    assert_eq!(index.runs([1]), [(0, 1, vec![(1, Tier::Gpu)])]);
    assert_eq!(index.0.node(NodeId(1)).unwrap().tier_blocks, [1, 1, 1]);
    assert_eq!(index.0.stats().copies, 1, "a block in several tiers counts once");
    index.announce_next(1, vec![dropped([1], Tier::Gpu)]);
    assert_eq!(index.runs([1]), [(0, 1, vec![(1, Tier::Dram)])]);
    index.announce_next(1, vec![dropped([1], Tier::Dram)]);
    assert_eq!(index.runs([1]), [(0, 1, vec![(1, Tier::Ssd)])]);
    index.announce_next(1, vec![dropped([1], Tier::Ssd)]);
    assert_eq!(index.runs([1]), []);
    assert_eq!(index.0.stats().blocks, 0);
}

#[test]
fn repeated_changes_count_once() {
    let mut once = Fixture::with_nodes(1);
    let mut twice = Fixture::with_nodes(1);
    let changes =
        [stored([1, 2, 3], Tier::Dram), moved([2, 9], Tier::Dram, Tier::Ssd), dropped([3, 8], Tier::Dram)];
    for change in changes {
        once.announce_next(1, vec![change.clone()]);
        twice.announce_next(1, vec![change.clone(), change]);
    }
    assert_eq!(once.0.snapshot(), twice.0.snapshot());
    assert_eq!(once.0.digest(), twice.0.digest());
    assert_eq!(once.0.stats().copies, 3);
}

#[test]
fn move_replaces_the_tier() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1, 2], Tier::Dram), stored([2], Tier::Ssd)]);
    index.announce_next(1, vec![moved([1, 2, 3], Tier::Dram, Tier::Ssd)]);
    assert_eq!(index.runs([1, 2, 3]), [(0, 3, vec![(1, Tier::Ssd)])]);
    assert_eq!(index.0.node(NodeId(1)).unwrap().tier_blocks, [3, 0, 0]);
    index.announce_next(1, vec![moved([1], Tier::Ssd, Tier::Ssd)]);
    assert_eq!(index.prefix_blocks([1]), 1, "a move to the same tier keeps the block");
}

#[test]
fn repeated_blocks_in_one_run_count_once() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([5, 5, 5], Tier::Dram)]);
    assert_eq!(index.0.node(NodeId(1)).unwrap().blocks, 1);
    index.announce_next(1, vec![dropped([5, 5], Tier::Dram)]);
    assert_eq!(index.0.node(NodeId(1)).unwrap().blocks, 0);
}

#[test]
fn dropping_one_nodes_copy_leaves_the_others() {
    let mut index = Fixture::with_nodes(5);
    for node in [3, 1, 5, 2, 4] {
        index.announce_next(node, vec![stored([1], Tier::Dram)]);
    }
    for (gone, left) in [(3, vec![1, 2, 4, 5]), (1, vec![2, 4, 5]), (5, vec![2, 4]), (2, vec![4])] {
        index.announce_next(gone, vec![dropped([1], Tier::Dram)]);
        let holders: Vec<u32> = index.lookup([1]).runs[0].holders.iter().map(|one| one.node.0).collect();
        assert_eq!(holders, left);
    }
}
