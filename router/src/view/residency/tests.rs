//! Epochs, sequence numbers, silence and limits of GPU residency, one situation per test.
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

fn take(
    residency: &mut Residency,
    instance: InstanceId,
    epoch: u64,
    seq: u64,
    changes: &[Change],
) -> BatchOutcome {
    residency.apply_batch(instance, epoch, Batch { seq, changes: changes.to_vec() }, at(0)).unwrap()
}

const APPLIED: BatchOutcome = BatchOutcome::Applied { unlisted: 0 };

/// Leading blocks of chain 0 by instance.
fn leading(residency: &Residency, ms: u64) -> Vec<(u32, u64)> {
    let resident = residency.resident(&chain(0, 0..8), at(ms));
    resident.into_iter().map(|one| (one.instance.0, one.blocks)).collect()
}

#[test]
fn each_instance_has_its_own_longest_prefix() {
    let mut residency = plane();
    take(&mut residency, ONE, 5, 1, &[stored(0, 0..6)]);
    take(&mut residency, TWO, 5, 1, &[stored(0, 0..3), stored(0, 4..8)]);
    take(&mut residency, InstanceId(3), 5, 1, &[stored(0, 1..8)]);
    assert_eq!(leading(&residency, 0), [(1, 6), (2, 3)], "a prefix without its first block is useless");
    take(&mut residency, TWO, 5, 2, &[stored(0, 3..4)]);
    assert_eq!(leading(&residency, 0), [(1, 6), (2, 8)]);
    take(&mut residency, ONE, 5, 2, &[dropped(0, 2..3)]);
    assert_eq!(leading(&residency, 0), [(1, 2), (2, 8)]);
}

#[test]
fn a_later_epoch_invalidates_and_an_earlier_one_is_ignored() {
    let mut residency = plane();
    take(&mut residency, ONE, 5, 1, &[stored(0, 0..6)]);
    assert_eq!(take(&mut residency, ONE, 7, 1, &[stored(0, 0..2)]), APPLIED);
    assert_eq!(leading(&residency, 0), [(1, 2)]);
    assert_eq!(take(&mut residency, ONE, 5, 2, &[stored(0, 0..8)]), BatchOutcome::Outdated { epoch: 7 });
    assert_eq!(leading(&residency, 0), [(1, 2)]);
    // A load report reports a start as well.
    residency.observe_start(ONE, 7, at(0));
    assert_eq!(leading(&residency, 0), [(1, 2)]);
    residency.observe_start(ONE, 9, at(0));
    residency.observe_start(TWO, 9, at(0));
    assert_eq!((leading(&residency, 0), residency.statuses(at(0)).len()), (vec![], 1));
    assert_eq!(residency.sweep(at(0)), Invalidations { restarted: 2, ..Invalidations::default() });
}

#[test]
fn missing_batches_are_requested_and_earlier_ones_still_count() {
    let mut residency = plane();
    take(&mut residency, ONE, 5, 1, &[stored(0, 0..4)]);
    assert_eq!(take(&mut residency, ONE, 5, 3, &[stored(0, 5..6)]), BatchOutcome::Gap);
    let status = residency.finish_report(ONE, 5, 3, at(0)).unwrap().unwrap();
    assert_eq!((status.seq, status.uncertain, status.blocks), (1, true, 4));
    assert_eq!(leading(&residency, 0), [(1, 4)]);
    assert_eq!(take(&mut residency, ONE, 5, 2, &[stored(0, 4..5)]), APPLIED);
    assert_eq!(take(&mut residency, ONE, 5, 3, &[stored(0, 5..6)]), APPLIED);
    let status = residency.finish_report(ONE, 5, 3, at(0)).unwrap().unwrap();
    assert_eq!((status.seq, status.uncertain), (3, false));
    assert_eq!(leading(&residency, 0), [(1, 6)]);
}

#[test]
fn the_next_heartbeat_reveals_a_lost_last_batch() {
    let mut residency = plane();
    take(&mut residency, ONE, 5, 1, &[stored(0, 0..4)]);
    let status = residency.finish_report(ONE, 5, 2, at(0)).unwrap().unwrap();
    assert_eq!((status.seq, status.uncertain), (1, true));
}

#[test]
fn a_late_report_does_not_hide_missing_batches() {
    let mut residency = plane();
    take(&mut residency, ONE, 5, 1, &[stored(0, 0..4)]);
    assert!(residency.finish_report(ONE, 5, 3, at(0)).unwrap().unwrap().uncertain);
    let late = residency.finish_report(ONE, 5, 1, at(0)).unwrap().unwrap();
    assert_eq!((late.seq, late.uncertain), (1, true), "batches 2 and 3 are still missing");
}

/// Many instances with different ends: one pass counts for each the same as a query for it alone.
#[test]
fn leading_blocks_of_all_instances_are_counted_in_one_pass() {
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
        let alone: Vec<_> = matched.nodes().map(|node| (node, matched.node_prefix_blocks(node))).collect();
        assert_eq!(leading_blocks(&matched), alone, "{matched:?}");
    }
}

#[test]
fn a_cleared_batch_replaces_missing_batches() {
    let mut residency = plane();
    take(&mut residency, ONE, 5, 1, &[stored(0, 0..8)]);
    assert_eq!(take(&mut residency, ONE, 5, 40, &[Change::Cleared, stored(0, 0..3)]), APPLIED);
    assert_eq!(leading(&residency, 0), [(1, 3)]);
    assert_eq!(take(&mut residency, ONE, 5, 41, &[stored(0, 3..4)]), APPLIED);
    assert_eq!(take(&mut residency, ONE, 5, 40, &[Change::Cleared]), BatchOutcome::Duplicate);
    assert_eq!(leading(&residency, 0), [(1, 4)]);
    // The same for an instance that this router hears for the first time after its own restart.
    assert_eq!(take(&mut residency, TWO, 5, 900, &[stored(0, 0..1)]), BatchOutcome::Gap);
    assert_eq!(
        residency.finish_report(TWO, 5, 900, at(0)).unwrap().unwrap().seq,
        0,
        "everything is requested"
    );
    assert_eq!(take(&mut residency, TWO, 5, 901, &[Change::Cleared, stored(0, 0..1)]), APPLIED);
    assert_eq!(leading(&residency, 0), [(1, 4), (2, 1)]);
}

#[test]
fn uncertain_blocks_without_progress_are_invalidated() {
    let mut residency = plane();
    take(&mut residency, ONE, 5, 1, &[stored(0, 0..8)]);
    let beat = |residency: &mut Residency, ms| residency.finish_report(ONE, 5, 3, at(ms)).unwrap().unwrap();
    // Sweeps and heartbeats continue meanwhile.
    for ms in (0..2_000).step_by(250) {
        assert!(beat(&mut residency, ms).uncertain);
        assert_eq!(residency.sweep(at(ms)), Invalidations::default());
    }
    assert_eq!(leading(&residency, 1_999), [(1, 8)]);
    assert_eq!(residency.sweep(at(2_000)), Invalidations { unrepaired: 1, ..Invalidations::default() });
    assert_eq!(leading(&residency, 2_000), []);
    assert_eq!(beat(&mut residency, 2_000).seq, 0);
}

#[test]
fn silence_invalidates_an_instance() {
    let mut residency = plane();
    take(&mut residency, ONE, 5, 1, &[stored(0, 0..8)]);
    for ms in (0..2_000).step_by(250) {
        assert_eq!(residency.sweep(at(ms)), Invalidations::default());
    }
    assert_eq!(leading(&residency, 1_999), [(1, 8)]);
    assert_eq!(leading(&residency, 2_000), [], "already before the next sweep");
    assert_eq!(residency.sweep(at(2_000)), Invalidations { silent: 1, ..Invalidations::default() });
    let back = residency.finish_report(ONE, 5, 1, at(2_100)).unwrap().unwrap();
    assert_eq!((back.seq, back.uncertain, back.blocks), (0, true, 0), "it must send everything again");
    // The same for one that returns before the next sweep.
    residency.apply_batch(ONE, 5, Batch { seq: 1, changes: vec![stored(0, 0..8)] }, at(2_100)).unwrap();
    for ms in (2_250..4_100).step_by(250) {
        residency.sweep(at(ms));
    }
    assert_eq!(residency.finish_report(ONE, 5, 1, at(4_100)).unwrap().unwrap().seq, 0);
    residency.sweep(at(4_250));
    // A stalled router invalidates no instance.
    residency.apply_batch(ONE, 5, Batch { seq: 1, changes: vec![stored(0, 0..8)] }, at(4_300)).unwrap();
    assert_eq!(residency.sweep(at(60_000)), Invalidations::default());
    assert_eq!(leading(&residency, 60_000), [(1, 8)]);
}

#[test]
fn epochs_are_remembered_and_finally_forgotten() {
    let mut residency = plane();
    take(&mut residency, ONE, 7, 1, &[stored(0, 0..8)]);
    for ms in (0..=600_000).step_by(250) {
        residency.sweep(at(ms));
        if ms == 599_750 {
            assert_eq!(residency.statuses(at(ms)).len(), 1);
        }
    }
    assert_eq!((residency.statuses(at(600_000)).len(), residency.index.stats().nodes), (0, 0));
}

#[test]
fn too_many_blocks_invalidate_an_instance() {
    let mut residency = Residency::new(u64::MAX, at(0));
    // Full batches.
    let whole = INSTANCE_BLOCKS_MAX / BATCH_BLOCKS_MAX as u64;
    let batch = |seq: u64, blocks: u64| {
        let hash = |number| BlockHash::from_words(0, seq << 32 | number);
        Change::Stored { parent: None, blocks: (0..blocks).map(hash).collect(), tier: Tier::Gpu }
    };
    for seq in 1..=whole {
        assert_eq!(take(&mut residency, ONE, 5, seq, &[batch(seq, BATCH_BLOCKS_MAX as u64)]), APPLIED);
    }
    assert_eq!(residency.status(ONE, at(0)).unwrap().blocks, INSTANCE_BLOCKS_MAX);
    let more = Batch { seq: whole + 1, changes: vec![batch(whole + 1, 1)] };
    assert_eq!(
        residency.apply_batch(ONE, 5, more, at(0)),
        Err(ResidencyError::TooManyBlocks { instance: ONE })
    );
    let status = residency.status(ONE, at(0)).unwrap();
    assert_eq!((status.seq, status.blocks, status.uncertain), (0, 0, true));
    assert_eq!(take(&mut residency, ONE, 5, whole + 2, &[Change::Cleared, batch(1, 1)]), APPLIED);
    assert_eq!(residency.status(ONE, at(0)).unwrap().blocks, 1);
}

#[test]
fn blocks_above_the_limit_are_reported() {
    let mut residency = Residency::new(10, at(0));
    assert_eq!(take(&mut residency, ONE, 5, 1, &[stored(0, 0..8)]), APPLIED);
    assert_eq!(take(&mut residency, TWO, 5, 1, &[stored(0, 0..8)]), BatchOutcome::Applied { unlisted: 6 });
    assert_eq!(leading(&residency, 0), [(1, 8), (2, 2)]);
}

#[test]
fn instances_are_bounded_and_silent_ones_are_forgotten() {
    let mut residency = plane();
    let number = |number: usize| InstanceId(u32::try_from(number).unwrap());
    for instance in 0..INSTANCES_MAX {
        residency.finish_report(number(instance), 1, 0, at(0)).unwrap();
    }
    let one_more = number(INSTANCES_MAX);
    assert_eq!(residency.finish_report(one_more, 1, 0, at(1)), Err(ResidencyError::TooManyInstances));
    residency.finish_report(ONE, 1, 0, at(600_000)).unwrap();
    assert!(residency.finish_report(one_more, 1, 0, at(600_000)).is_ok());
}
