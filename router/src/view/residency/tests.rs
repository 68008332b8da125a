//! Epochs, numbers, silence and limits of the soft plane, one situation a test.
#![allow(clippy::unwrap_used)]

use kv_core::id::{Epoch, Tier};
use kv_core::index::{Holder, HolderRun};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::model_tests::{at, chain, dropped, stored};
use super::*;

const ONE: InstanceId = InstanceId(1);
const TWO: InstanceId = InstanceId(2);

fn plane() -> Residency {
    Residency::new(1_000, at(0))
}

fn take(plane: &mut Residency, instance: InstanceId, epoch: u64, seq: u64, changes: &[Change]) -> Taken {
    plane.take(instance, epoch, Batch { seq, changes: changes.to_vec() }, at(0)).unwrap()
}

const APPLIED: Taken = Taken::Applied { unlisted: 0 };

/// Leading blocks of chain 0 by instance.
fn leading(plane: &Residency, ms: u64) -> Vec<(u32, u64)> {
    let resident = plane.resident(&chain(0, 0..8), at(ms));
    resident.into_iter().map(|one| (one.instance.0, one.blocks)).collect()
}

#[test]
fn each_instance_is_told_with_its_own_longest_prefix() {
    let mut plane = plane();
    take(&mut plane, ONE, 5, 1, &[stored(0, 0..6)]);
    take(&mut plane, TWO, 5, 1, &[stored(0, 0..3), stored(0, 4..8)]);
    take(&mut plane, InstanceId(3), 5, 1, &[stored(0, 1..8)]);
    assert_eq!(leading(&plane, 0), [(1, 6), (2, 3)], "without its first block a prefix is worth nothing");
    take(&mut plane, TWO, 5, 2, &[stored(0, 3..4)]);
    assert_eq!(leading(&plane, 0), [(1, 6), (2, 8)]);
    take(&mut plane, ONE, 5, 2, &[dropped(0, 2..3)]);
    assert_eq!(leading(&plane, 0), [(1, 2), (2, 8)]);
}

#[test]
fn a_later_epoch_voids_what_was_said_and_an_earlier_one_is_not_heard() {
    let mut plane = plane();
    take(&mut plane, ONE, 5, 1, &[stored(0, 0..6)]);
    assert_eq!(take(&mut plane, ONE, 7, 1, &[stored(0, 0..2)]), APPLIED);
    assert_eq!(leading(&plane, 0), [(1, 2)]);
    assert_eq!(take(&mut plane, ONE, 5, 2, &[stored(0, 0..8)]), Taken::Outdated { epoch: 7 });
    assert_eq!(leading(&plane, 0), [(1, 2)]);
    // A load report tells of a start as well.
    plane.started(ONE, 7, at(0));
    assert_eq!(leading(&plane, 0), [(1, 2)]);
    plane.started(ONE, 9, at(0));
    plane.started(TWO, 9, at(0));
    assert_eq!((leading(&plane, 0), plane.standings(at(0)).len()), (vec![], 1));
    assert_eq!(plane.look(at(0)), Ended { restarted: 2, ..Ended::default() });
}

#[test]
fn what_is_missing_is_asked_for_and_what_was_said_counts_meanwhile() {
    let mut plane = plane();
    take(&mut plane, ONE, 5, 1, &[stored(0, 0..4)]);
    assert_eq!(take(&mut plane, ONE, 5, 3, &[stored(0, 5..6)]), Taken::Gap);
    let standing = plane.conclude(ONE, 5, 3, at(0)).unwrap().unwrap();
    assert_eq!((standing.seq, standing.uncertain, standing.blocks), (1, true, 4));
    assert_eq!(leading(&plane, 0), [(1, 4)]);
    assert_eq!(take(&mut plane, ONE, 5, 2, &[stored(0, 4..5)]), APPLIED);
    assert_eq!(take(&mut plane, ONE, 5, 3, &[stored(0, 5..6)]), APPLIED);
    let standing = plane.conclude(ONE, 5, 3, at(0)).unwrap().unwrap();
    assert_eq!((standing.seq, standing.uncertain), (3, false));
    assert_eq!(leading(&plane, 0), [(1, 6)]);
}

#[test]
fn a_lost_last_batch_is_noticed_by_the_next_heartbeat() {
    let mut plane = plane();
    take(&mut plane, ONE, 5, 1, &[stored(0, 0..4)]);
    let standing = plane.conclude(ONE, 5, 2, at(0)).unwrap().unwrap();
    assert_eq!((standing.seq, standing.uncertain), (1, true));
}

#[test]
fn a_word_that_comes_late_does_not_make_what_is_missing_forgotten() {
    let mut plane = plane();
    take(&mut plane, ONE, 5, 1, &[stored(0, 0..4)]);
    assert!(plane.conclude(ONE, 5, 3, at(0)).unwrap().unwrap().uncertain);
    let late = plane.conclude(ONE, 5, 1, at(0)).unwrap().unwrap();
    assert_eq!((late.seq, late.uncertain), (1, true), "batches 2 and 3 are still missing");
}

/// Many instances that end at different blocks: what each has is counted in one pass, and is what it has alone.
#[test]
fn leading_blocks_are_counted_of_all_instances_together() {
    let holder = |node: u32| Holder { node: NodeId(node), epoch: Epoch(1), tier: Tier::Gpu };
    let seed = 7;
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for _ in 0..500 {
        let mut matched = PrefixMatch::default();
        let mut start_blocks = 0;
        for _ in 0..random.random_range(0..6) {
            let holders = (0..8).filter(|_| random.random_bool(0.8)).map(holder).collect();
            let len_blocks = random.random_range(1..4);
            matched.runs.push(HolderRun { start_blocks, len_blocks, holders });
            start_blocks += len_blocks;
        }
        let alone: Vec<_> = matched.nodes().map(|node| (node, matched.per_node(node))).collect();
        assert_eq!(leading_blocks(&matched), alone, "{matched:?}");
    }
}

#[test]
fn an_instance_that_begins_anew_needs_none_of_the_missing_batches() {
    let mut plane = plane();
    take(&mut plane, ONE, 5, 1, &[stored(0, 0..8)]);
    assert_eq!(take(&mut plane, ONE, 5, 40, &[Change::Cleared, stored(0, 0..3)]), APPLIED);
    assert_eq!(leading(&plane, 0), [(1, 3)]);
    assert_eq!(take(&mut plane, ONE, 5, 41, &[stored(0, 3..4)]), APPLIED);
    assert_eq!(take(&mut plane, ONE, 5, 40, &[Change::Cleared]), Taken::Duplicate);
    assert_eq!(leading(&plane, 0), [(1, 4)]);
    // So does one that this router hears for the first time, because it has just started itself.
    assert_eq!(take(&mut plane, TWO, 5, 900, &[stored(0, 0..1)]), Taken::Gap);
    assert_eq!(plane.conclude(TWO, 5, 900, at(0)).unwrap().unwrap().seq, 0, "all of it is wanted");
    assert_eq!(take(&mut plane, TWO, 5, 901, &[Change::Cleared, stored(0, 0..1)]), APPLIED);
    assert_eq!(leading(&plane, 0), [(1, 4), (2, 1)]);
}

#[test]
fn what_stays_uncertain_without_progress_is_dropped() {
    let mut plane = plane();
    take(&mut plane, ONE, 5, 1, &[stored(0, 0..8)]);
    let beat = |plane: &mut Residency, ms| plane.conclude(ONE, 5, 3, at(ms)).unwrap().unwrap();
    // Looks and heartbeats go on all the time.
    for ms in (0..2_000).step_by(250) {
        assert!(beat(&mut plane, ms).uncertain);
        assert_eq!(plane.look(at(ms)), Ended::default());
    }
    assert_eq!(leading(&plane, 1_999), [(1, 8)]);
    assert_eq!(plane.look(at(2_000)), Ended { unrepaired: 1, ..Ended::default() });
    assert_eq!(leading(&plane, 2_000), []);
    assert_eq!(beat(&mut plane, 2_000).seq, 0);
}

#[test]
fn silence_ends_what_an_instance_said() {
    let mut plane = plane();
    take(&mut plane, ONE, 5, 1, &[stored(0, 0..8)]);
    for ms in (0..2_000).step_by(250) {
        assert_eq!(plane.look(at(ms)), Ended::default());
    }
    assert_eq!(leading(&plane, 1_999), [(1, 8)]);
    assert_eq!(leading(&plane, 2_000), [], "before the next look already");
    assert_eq!(plane.look(at(2_000)), Ended { silent: 1, ..Ended::default() });
    let back = plane.conclude(ONE, 5, 1, at(2_100)).unwrap().unwrap();
    assert_eq!((back.seq, back.uncertain, back.blocks), (0, true, 0), "it must say everything again");
    // So must one that is back before the next look.
    plane.take(ONE, 5, Batch { seq: 1, changes: vec![stored(0, 0..8)] }, at(2_100)).unwrap();
    for ms in (2_250..4_100).step_by(250) {
        plane.look(at(ms));
    }
    assert_eq!(plane.conclude(ONE, 5, 1, at(4_100)).unwrap().unwrap().seq, 0);
    plane.look(at(4_250));
    // Who was held up itself blames nobody.
    plane.take(ONE, 5, Batch { seq: 1, changes: vec![stored(0, 0..8)] }, at(4_300)).unwrap();
    assert_eq!(plane.look(at(60_000)), Ended::default());
    assert_eq!(leading(&plane, 60_000), [(1, 8)]);
}

#[test]
fn epochs_are_remembered_for_late_words_and_forgotten_in_the_end() {
    let mut plane = plane();
    take(&mut plane, ONE, 7, 1, &[stored(0, 0..8)]);
    for ms in (0..=600_000).step_by(250) {
        plane.look(at(ms));
        if ms == 599_750 {
            assert_eq!(plane.standings(at(ms)).len(), 1);
        }
    }
    assert_eq!((plane.standings(at(600_000)).len(), plane.index.stats().nodes), (0, 0));
}

#[test]
fn too_many_blocks_of_one_instance_void_what_it_said() {
    let mut plane = Residency::new(u64::MAX, at(0));
    // As many in each batch as one may have.
    let whole = INSTANCE_BLOCKS_MAX / BATCH_BLOCKS_MAX as u64;
    let batch = |seq: u64, blocks: u64| {
        let hash = |number| BlockHash(u128::from(seq << 32 | number).to_be_bytes());
        Change::Stored { parent: None, blocks: (0..blocks).map(hash).collect(), tier: Tier::Gpu }
    };
    for seq in 1..=whole {
        assert_eq!(take(&mut plane, ONE, 5, seq, &[batch(seq, BATCH_BLOCKS_MAX as u64)]), APPLIED);
    }
    assert_eq!(plane.standing(ONE, at(0)).unwrap().blocks, INSTANCE_BLOCKS_MAX);
    let more = Batch { seq: whole + 1, changes: vec![batch(whole + 1, 1)] };
    assert_eq!(plane.take(ONE, 5, more, at(0)), Err(Refused::Blocks { instance: ONE }));
    let standing = plane.standing(ONE, at(0)).unwrap();
    assert_eq!((standing.seq, standing.blocks, standing.uncertain), (0, 0, true));
    assert_eq!(take(&mut plane, ONE, 5, whole + 2, &[Change::Cleared, batch(1, 1)]), APPLIED);
    assert_eq!(plane.standing(ONE, at(0)).unwrap().blocks, 1);
}

#[test]
fn a_full_plane_says_how_many_blocks_it_did_not_list() {
    let mut plane = Residency::new(10, at(0));
    assert_eq!(take(&mut plane, ONE, 5, 1, &[stored(0, 0..8)]), APPLIED);
    assert_eq!(take(&mut plane, TWO, 5, 1, &[stored(0, 0..8)]), Taken::Applied { unlisted: 6 });
    assert_eq!(leading(&plane, 0), [(1, 8), (2, 2)]);
}

#[test]
fn instances_are_bounded_and_silent_ones_make_room() {
    let mut plane = plane();
    let number = |number: usize| InstanceId(u32::try_from(number).unwrap());
    for instance in 0..INSTANCES_MAX {
        plane.conclude(number(instance), 1, 0, at(0)).unwrap();
    }
    let one_more = number(INSTANCES_MAX);
    assert_eq!(plane.conclude(one_more, 1, 0, at(1)), Err(Refused::Instances));
    plane.conclude(ONE, 1, 0, at(600_000)).unwrap();
    assert!(plane.conclude(one_more, 1, 0, at(600_000)).is_ok());
}
