//! The sweep: bounded per call, complete in the end, and invisible to lookups.

use super::*;
use crate::index::run::RUN_BLOCKS_MAX;

/// Two nodes with a thousand blocks each, half of them shared; node 1 is fenced.
fn half_stale() -> Fixture {
    let mut index = Fixture::with_nodes(2);
    index.announce_next(1, vec![stored(0..1_000, Tier::Dram)]);
    index.announce_next(2, vec![stored(500..1_500, Tier::Dram)]);
    index.0.apply(&fence(1, 1));
    index
}

#[test]
fn fencing_defers_the_sweep() {
    let index = half_stale();
    assert!(index.0.stale_copies() > 900, "{}", index.0.stale_copies());
    let stats = index.0.stats();
    assert_eq!((stats.blocks, stats.copies), (1_000, 1_000));
}

#[test]
fn sweep_is_invisible_and_ends() {
    let mut index = half_stale();
    let seen = (index.0.digest(), index.0.stats(), index.lookup(500..1_500));
    let mut sweeps = 0;
    while index.0.stale_copies() > 0 {
        let before = index.0.stale_copies();
        index.0.sweep(64);
        let most = 64 + u64::from(RUN_BLOCKS_MAX);
        assert!(
            before - index.0.stale_copies() <= most,
            "a sweep visits at most the requested blocks and one run"
        );
        assert_eq!((index.0.digest(), index.0.stats(), index.lookup(500..1_500)), seen);
        sweeps += 1;
        assert!(sweeps < 1_000, "the sweep did not finish");
    }
    assert!(sweeps > 8, "one sweep freed everything at once");
    index.0.sweep(u64::MAX);
    assert_eq!(index.0.digest(), seen.0);
}

#[test]
fn commands_sweep() {
    let mut index = half_stale();
    for _ in 0..2_000 {
        index.announce_next(2, vec![]);
        index.announce_next(2, vec![stored([0], Tier::Dram)]);
    }
    assert_eq!(index.0.stale_copies(), 0);
}

#[test]
fn memory_stays_bounded_under_endless_clearing() {
    let mut index = Fixture::with_nodes(1);
    for round in 0..200u64 {
        index.announce_next(1, vec![Change::Cleared, stored(round * 100..(round + 1) * 100, Tier::Dram)]);
        assert!(index.0.stale_copies() < 1_000, "round {round}: {}", index.0.stale_copies());
    }
}

#[test]
fn change_frees_stale_extents_of_its_run() {
    let mut index = half_stale();
    let before = index.0.stale_copies();
    // Announcing sweeps too, so a clone without it serves as comparison.
    let mut other = index.0.clone();
    index.announce_next(2, vec![stored(500..600, Tier::Dram)]);
    assert!(index.0.stale_copies() <= before - 100);
    other.sweep(u64::MAX);
    other.sweep(u64::MAX);
    assert_eq!(other.stale_copies(), 0);
}

#[test]
fn incarnations_may_run_out() {
    // Tests use very few incarnations per slot; each round must start empty.
    let mut index = Fixture::with_nodes(2);
    index.announce_next(2, vec![stored([1, 2, 3], Tier::Ssd)]);
    for round in 0..20 {
        index.announce_next(1, vec![Change::Cleared]);
        assert_eq!(index.runs([1]), [(0, 1, vec![(2, Tier::Ssd)])], "round {round}");
        index.announce_next(1, vec![stored([1], Tier::Dram), stored([10 + round], Tier::Dram)]);
        assert_eq!(index.runs([1]), [(0, 1, vec![(1, Tier::Dram), (2, Tier::Ssd)])], "round {round}");
        assert_eq!(index.0.stats().copies, 5);
    }
}
