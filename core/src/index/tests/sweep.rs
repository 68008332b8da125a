//! The sweep: bounded, complete in the end, and invisible.

use super::*;
use crate::index::run::RUN_BLOCKS_MAX;

/// Two nodes with a thousand blocks each, half of them shared; node 1 is fenced.
fn half_stale() -> Fixture {
    let mut index = Fixture::with_nodes(2);
    index.say(1, vec![stored(0..1_000, Tier::Dram)]);
    index.say(2, vec![stored(500..1_500, Tier::Dram)]);
    index.0.apply(&fence(1, 1));
    index
}

#[test]
fn fencing_leaves_the_work_for_later() {
    let index = half_stale();
    assert!(index.0.stale_holds() > 900, "{}", index.0.stale_holds());
    let stats = index.0.stats();
    assert_eq!((stats.blocks, stats.copies), (1_000, 1_000));
}

#[test]
fn the_sweep_ends_and_nobody_can_tell() {
    let mut index = half_stale();
    let seen = (index.0.digest(), index.0.stats(), index.lookup(500..1_500));
    let mut sweeps = 0;
    while index.0.stale_holds() > 0 {
        let before = index.0.stale_holds();
        index.0.sweep(64);
        let most = 64 + u64::from(RUN_BLOCKS_MAX);
        assert!(before - index.0.stale_holds() <= most, "no more than the blocks asked for and a run");
        assert_eq!((index.0.digest(), index.0.stats(), index.lookup(500..1_500)), seen);
        sweeps += 1;
        assert!(sweeps < 1_000, "the sweep must come round");
    }
    assert!(sweeps > 8, "it was not done at once");
    index.0.sweep(u64::MAX);
    assert_eq!(index.0.digest(), seen.0);
}

#[test]
fn commands_sweep_as_they_go() {
    let mut index = half_stale();
    for _ in 0..2_000 {
        index.say(2, vec![]);
        index.say(2, vec![stored([0], Tier::Dram)]);
    }
    assert_eq!(index.0.stale_holds(), 0);
}

#[test]
fn memory_stays_bounded_under_endless_clearing() {
    let mut index = Fixture::with_nodes(1);
    for round in 0..200u64 {
        index.say(1, vec![Change::Cleared, stored(round * 100..(round + 1) * 100, Tier::Dram)]);
        assert!(index.0.stale_holds() < 1_000, "round {round}: {}", index.0.stale_holds());
    }
}

#[test]
fn touching_a_block_frees_its_stale_holds() {
    let mut index = half_stale();
    let before = index.0.stale_holds();
    // Announcing sweeps too, so compare with an announce of the same size elsewhere.
    let mut other = index.0.clone();
    index.say(2, vec![stored(500..600, Tier::Dram)]);
    assert!(index.0.stale_holds() <= before - 100);
    other.sweep(u64::MAX);
    other.sweep(u64::MAX);
    assert_eq!(other.stale_holds(), 0);
}

#[test]
fn incarnations_may_run_out() {
    // Tests run with very few incarnations per slot; each round must start from nothing.
    let mut index = Fixture::with_nodes(2);
    index.say(2, vec![stored([1, 2, 3], Tier::Ssd)]);
    for round in 0..20 {
        index.say(1, vec![Change::Cleared]);
        assert_eq!(index.runs([1]), [(0, 1, vec![(2, Tier::Ssd)])], "round {round}");
        index.say(1, vec![stored([1], Tier::Dram), stored([10 + round], Tier::Dram)]);
        assert_eq!(index.runs([1]), [(0, 1, vec![(1, Tier::Dram), (2, Tier::Ssd)])], "round {round}");
        assert_eq!(index.0.stats().copies, 5);
    }
}
