//! Joining, fencing, leaving: epochs only grow, and an ended epoch's announcements stop counting at
//! once.

use super::*;
use crate::index::nodes::DEPARTED_MAX;

#[test]
fn each_join_takes_the_next_epoch() {
    let mut index = Fixture::with_nodes(2);
    assert_eq!(index.join(1), Applied::Joined(Epoch(2)));
    assert_eq!(index.join(1), Applied::Joined(Epoch(3)));
    assert_eq!(index.join(2), Applied::Joined(Epoch(2)));
    assert_eq!(index.0.next_seq(NodeId(1)), Some((Epoch(3), Seq(1))));
}

#[test]
fn join_invalidates_earlier_announcements() {
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored([1, 2], Tier::Dram)]);
    index.announce_next(2, vec![stored([2], Tier::Dram)]);
    index.join(1);
    assert_eq!((index.prefix_blocks([1]), index.prefix_blocks([2])), (0, 1));
    index.announce_next(1, vec![stored([1], Tier::Ssd)]);
    assert_eq!(index.runs([1]), [(0, 1, vec![(1, Tier::Ssd)])], "no tier of the ended epoch comes back");
}

#[test]
fn a_fenced_node_is_known_but_silent() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1], Tier::Dram)]);
    assert_eq!(index.0.apply(&fence(1, 1)), Applied::Done);
    assert_eq!(index.prefix_blocks([1]), 0);
    assert_eq!(index.announce(1, 1, 2, vec![stored([1], Tier::Dram)]), AnnounceOutcome::Fenced);
    assert!(!index.0.node(NodeId(1)).unwrap().live);
    assert_eq!(index.0.stats(), IndexStats { nodes: 1, ..IndexStats::default() });
    assert_eq!(index.join(1), Applied::Joined(Epoch(2)));
    assert!(index.0.node(NodeId(1)).unwrap().live);
    assert_eq!(index.prefix_blocks([1]), 0, "the new epoch starts empty");
}

#[test]
fn a_late_fence_or_leave_is_ignored() {
    let mut index = Fixture::with_nodes(1);
    index.join(1);
    index.announce_next(1, vec![stored([1], Tier::Dram)]);
    for command in [fence(1, 1), fence(1, 3), fence(2, 1), leave(1, 1), leave(1, 3), leave(2, 1)] {
        assert_eq!(index.0.apply(&command), Applied::Ignored, "{command:?}");
    }
    assert_eq!(index.prefix_blocks([1]), 1);
    assert_eq!(index.0.apply(&fence(1, 2)), Applied::Done);
    assert_eq!(index.0.apply(&fence(1, 2)), Applied::Ignored);
}

#[test]
fn a_node_that_left_is_forgotten_but_not_its_epoch() {
    let mut index = Fixture::with_nodes(1);
    index.join(1);
    index.announce_next(1, vec![stored([1], Tier::Dram)]);
    assert_eq!(index.0.apply(&leave(1, 2)), Applied::Done);
    assert_eq!(index.0.nodes().count(), 0);
    assert_eq!(index.prefix_blocks([1]), 0);
    assert_eq!(index.announce(1, 2, 2, vec![]), AnnounceOutcome::Fenced);
    assert_eq!(index.join(1), Applied::Joined(Epoch(3)));
    assert_eq!(index.announce(1, 2, 1, vec![]), AnnounceOutcome::Fenced);
}

#[test]
fn a_fenced_node_may_leave() {
    let mut index = Fixture::with_nodes(1);
    index.0.apply(&fence(1, 1));
    assert_eq!(index.0.apply(&leave(1, 1)), Applied::Done);
    assert!(index.0.node(NodeId(1)).is_none());
}

#[test]
fn reused_slot_restores_no_blocks() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored([1], Tier::Dram)]);
    index.0.apply(&leave(1, 1));
    index.join(2);
    assert_eq!(index.prefix_blocks([1]), 0);
    assert_eq!(index.0.node(NodeId(2)).unwrap().blocks, 0);
    index.announce_next(2, vec![stored([2], Tier::Dram)]);
    assert_eq!(index.runs([2]), [(0, 1, vec![(2, Tier::Dram)])]);
}

#[test]
fn epochs_grow_even_when_more_nodes_left_than_are_remembered() {
    let mut index = Fixture::with_nodes(0);
    let departed = DEPARTED_MAX as u32 + 4;
    for node in 1..=departed {
        for _ in 0..node {
            index.join(node);
        }
        let (epoch, _) = index.0.next_seq(NodeId(node)).unwrap();
        assert_eq!(index.0.apply(&leave(node, epoch.0)), Applied::Done);
    }
    for node in 1..=departed {
        let last = u64::from(node);
        match index.join(node) {
            Applied::Joined(epoch) => assert!(epoch.0 > last, "node {node} is in {epoch} again"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn nodes_of_another_identity_are_refused() {
    let mut index = Fixture::with_nodes(1);
    let stranger = NodeRecord { identity: IdentityDigest([2; 16]), ..record(2) };
    let refusal = Refusal::Identity { ours: IdentityDigest([1; 16]), theirs: IdentityDigest([2; 16]) };
    let before = index.0.snapshot();
    assert_eq!(index.0.apply(&Command::Join(stranger.clone())), Applied::Refused(refusal));
    assert_eq!(index.0.snapshot(), before);
    let turncoat = NodeRecord { node: NodeId(1), ..stranger.clone() };
    assert!(matches!(index.0.apply(&Command::Join(turncoat)), Applied::Refused(_)));
    // A fenced node still fixes the identity; after the last node has left, any identity may join.
    index.0.apply(&fence(1, 1));
    assert!(matches!(index.0.apply(&Command::Join(stranger.clone())), Applied::Refused(_)));
    index.0.apply(&leave(1, 1));
    assert_eq!(index.0.apply(&Command::Join(stranger)), Applied::Joined(Epoch(1)));
    assert_eq!(index.0.identity(), Some(IdentityDigest([2; 16])));
}

#[test]
fn a_join_replaces_the_record() {
    let mut index = Fixture::with_nodes(1);
    let elsewhere = NodeRecord { data_address: "10.9.9.9:1".to_owned(), ..record(1) };
    index.0.apply(&Command::Join(elsewhere.clone()));
    assert_eq!(index.0.node(NodeId(1)).unwrap().record, elsewhere);
}

#[test]
fn nodes_come_in_the_order_of_their_numbers() {
    let mut index = Fixture::with_nodes(0);
    for node in [9, 3, 7, 1] {
        index.join(node);
    }
    let order: Vec<u32> = index.0.nodes().map(|state| state.record.node.0).collect();
    assert_eq!(order, [1, 3, 7, 9]);
}

fn admit(node: u32, epoch: u64) -> Command {
    Command::Admit { record: record(node), epoch: Epoch(epoch) }
}

#[test]
fn admit_accepts_only_newer_epochs() {
    let mut index = Fixture(Index::new(IndexLimits::default()));
    assert_eq!(index.0.apply(&admit(1, 3)), Applied::Done);
    assert_eq!(index.0.next_seq(NodeId(1)), Some((Epoch(3), Seq(1))));
    index.announce_next(1, vec![stored([1, 2], Tier::Dram)]);
    for late in [1, 2, 3] {
        assert_eq!(index.0.apply(&admit(1, late)), Applied::Ignored, "epoch {late}");
    }
    assert_eq!(index.prefix_blocks([1]), 1);
    assert_eq!(index.0.apply(&admit(1, 5)), Applied::Done);
    assert_eq!((index.prefix_blocks([1]), index.0.next_seq(NodeId(1))), (0, Some((Epoch(5), Seq(1)))));
    assert_eq!(index.0.apply(&fence(1, 5)), Applied::Done);
    assert_eq!(index.0.apply(&admit(1, 5)), Applied::Ignored, "a fenced epoch stays ended");
    assert_eq!(index.0.apply(&leave(1, 5)), Applied::Done);
    assert_eq!(index.0.apply(&admit(1, 5)), Applied::Ignored, "the epoch of a node that left stays ended");
    assert_eq!(index.0.apply(&admit(1, 6)), Applied::Done);
    let turncoat = NodeRecord { identity: IdentityDigest([9; 16]), ..record(2) };
    let refused = index.0.apply(&Command::Admit { record: turncoat, epoch: Epoch(1) });
    assert!(matches!(refused, Applied::Refused(Refusal::Identity { .. })), "{refused:?}");
}
