//! Changes of weights, case by case: invalidated blocks, continued reads, and freed space.

use super::*;
use crate::index::command::Change;
use proptest::prelude::*;

fn lease(number: u64) -> LeaseId {
    LeaseId(number)
}

fn set(book: &mut Book, generation: u32, now: u64) {
    assert!(book.set_generation(Generation(generation), Timestamp(now)));
}

fn found(book: &Book, numbers: &[u64]) -> usize {
    book.readable_prefix(TenantId(0), &hashes(numbers)).len()
}

fn wanted(answers: &[OfferOutcome]) -> Vec<BlockKey> {
    let wanted = answers.iter().filter_map(|answer| match answer {
        OfferOutcome::Wanted(key) => Some(*key),
        _ => None,
    });
    wanted.collect()
}

#[test]
fn invalidated_blocks_are_neither_found_nor_announced() {
    let mut book = blocks(4, 4);
    request(&mut book, &[1, 2, 3, 4, 5, 6], 1);
    let kept = book.stats(Tier::Dram).blocks + book.stats(Tier::Ssd).blocks;
    set(&mut book, 1, 2);
    assert_eq!(book.stats(Tier::Dram).blocks + book.stats(Tier::Ssd).blocks, kept, "no block was touched");
    assert_eq!(found(&book, &[1]), 0);
    assert_eq!((book.take_changes(), book.announce_all()), (Vec::new(), Vec::new()));
    assert_eq!((book.tier_of(&hash(1)), book.sample(3, 6, |_| true)), (None, Vec::new()));
    let keys = wanted(&offer(&mut book, 3, &[1, 2], 3));
    assert_eq!(keys.len(), 2, "the same hashes are other blocks now");
    drain(&mut book);
    keys.iter().for_each(|key| book.commit(*key, CHARGE, Timestamp(3)));
    assert_eq!(found(&book, &[1, 2, 3]), 2);
    assert!(keys.iter().all(|key| book.generation_of(*key) == Some(Generation(1))));
    let told = book.take_changes();
    assert_eq!(told, [Change::Stored { parent: None, blocks: hashes(&[1, 2]), tier: Tier::Dram }]);
}

#[test]
fn invalidated_blocks_are_dropped_in_steps() {
    let mut book = blocks(4, 8);
    request(&mut book, &[1, 2, 3, 4, 5, 6], 1);
    set(&mut book, 1, 2);
    request(&mut book, &[1, 2], 3);
    assert!(book.has_invalidated_blocks());
    while book.has_invalidated_blocks() {
        book.drop_invalidated_blocks();
    }
    drain(&mut book);
    let blocks = Tier::ALL.map(|tier| book.stats(tier).blocks).iter().sum::<u64>();
    assert_eq!((blocks, found(&book, &[1, 2])), (2, 2));
    let void = Tier::ALL.map(|tier| book.stats(tier).invalidated_blocks).iter().sum::<u64>();
    assert_eq!(void, 6);
    let changes = book.take_changes();
    assert!(!changes.iter().any(|change| matches!(change, Change::Dropped { .. })), "{changes:?}");
}

#[test]
fn one_sweep_is_bounded() {
    let count = SWEEP_DROPS_MAX as u64 + 10;
    let mut book = blocks(count, 0);
    request(&mut book, &(0..count).collect::<Vec<_>>(), 1);
    set(&mut book, 1, 2);
    assert_eq!(book.drop_invalidated_blocks(), SWEEP_DROPS_MAX);
    assert_eq!(book.drop_invalidated_blocks(), 10);
    assert_eq!((book.drop_invalidated_blocks(), book.has_invalidated_blocks()), (0, false));
}

#[test]
fn repeated_sweeps_share_one_budget() {
    let count = 2 * SWEEP_DROPS_MAX as u64;
    let mut book = blocks(count, 0);
    request(&mut book, &(0..count).collect::<Vec<_>>(), 1);
    set(&mut book, 1, 2);
    let dropped: usize = (0..1_000).map(|_| book.sweep_invalidated(|_| false)).sum();
    assert_eq!(dropped, SWEEP_DROPS_MAX);
    // Scheduled sweeps have their own budget.
    assert_eq!(book.drop_invalidated_blocks(), SWEEP_DROPS_MAX);
    assert_eq!(book.stats(Tier::Dram).blocks, 0);
}

#[test]
fn lease_keeps_its_invalidated_block_until_released() {
    let mut book = blocks(2, 0);
    request(&mut book, &[1, 2], 1);
    let reached = book.fetch(requester(2), &hashes(&[1]), Timestamp(2)).unwrap();
    set(&mut book, 1, 3);
    book.drop_invalidated_blocks();
    drain(&mut book);
    let key = reached[0].key;
    assert_eq!((book.assigned_tier(key), book.generation_of(key)), (Some(Tier::Dram), Some(Generation(0))));
    assert_eq!(book.meta(key).map(|meta| meta.hash), Some(hash(1)));
    // The current block coexists with it, and the end of the lease does not affect it.
    request(&mut book, &[1], 4);
    assert_eq!((book.stats(Tier::Dram).blocks, found(&book, &[1])), (2, 1));
    book.release(lease(2), Timestamp(5));
    assert_eq!(book.next_action(MovePermits::default()), Some(Action::DropDram { key }));
    assert_eq!((book.stats(Tier::Dram).blocks, found(&book, &[1])), (1, 1));
}

#[test]
fn awaited_load_of_an_invalidated_block_completes() {
    let mut book = blocks(1, 2);
    request(&mut book, &[1, 2], 1);
    let key = book.readable_prefix(TenantId(0), &hashes(&[1, 2]))[1];
    book.set_admitting(Tier::Dram, false);
    let reached = book.fetch(requester(2), &hashes(&[1, 2]), Timestamp(2)).unwrap();
    let load = reached.iter().find(|reach| reach.tier == Tier::Ssd).unwrap().key;
    set(&mut book, 1, 3);
    let action = book.next_action(ALL_PERMITS);
    assert!(matches!(action, Some(Action::Promote { key, .. }) if key == load), "{action:?} of {key:?}");
    book.drop_invalidated_blocks();
    book.on_moved(load, Tier::Dram);
    assert!(book.meta(load).is_some());
    assert_eq!(book.take_changes(), Vec::new());
    book.release(lease(2), Timestamp(4));
    assert_eq!(book.meta(load), None);
}

#[test]
fn write_offered_under_earlier_weights_is_dropped() {
    let mut book = blocks(4, 0);
    let keys = wanted(&offer(&mut book, 1, &[1, 2], 1));
    set(&mut book, 1, 2);
    while book.has_invalidated_blocks() {
        book.drop_invalidated_blocks();
    }
    assert!(book.meta(keys[0]).is_some(), "its key is not reused while its bytes arrive");
    book.commit(keys[0], CHARGE, Timestamp(3));
    assert_eq!(book.next_action(MovePermits::default()), Some(Action::DropDram { key: keys[0] }));
    book.abort(keys[1]);
    assert_eq!((book.stats(Tier::Dram).blocks, found(&book, &[1, 2])), (0, 0));
    assert_eq!(book.take_changes(), Vec::new());
    book.release(lease(1), Timestamp(4));
    assert_eq!(book.tenants().count(), 0);
}

#[test]
fn invalidated_blocks_are_evicted_first_even_if_pinned() {
    let mut book = blocks(4, 0);
    request(&mut book, &[1, 2], 1);
    pin(&mut book, &[1, 2], Timestamp(1));
    set(&mut book, 1, 2);
    assert_eq!(book.pinned_blocks(), PinnedBlocks::default());
    request(&mut book, &[7, 8], 3);
    request(&mut book, &[9, 10], 4);
    assert_eq!((found(&book, &[7, 8]), found(&book, &[9, 10])), (2, 2), "current blocks stay");
    // The pin is on hashes: it keeps new blocks with these hashes.
    request(&mut book, &[1], 5);
    assert_eq!(book.pinned_blocks().hard, 1);
    request(&mut book, &[11, 12, 13], 6);
    assert_eq!(found(&book, &[1]), 1);
}

#[test]
fn invalidated_blocks_yield_first_to_a_quota() {
    let mut book = blocks(8, 0);
    request(&mut book, &[1, 2], 1);
    pin(&mut book, &[1, 2], Timestamp(1));
    book.set_quotas([(TenantId(0), 2 * u64::from(CHARGE.frame))]);
    set(&mut book, 1, 2);
    request(&mut book, &[7, 8], 3);
    assert_eq!(found(&book, &[7, 8]), 2);
}

#[test]
fn queued_ssd_writes_of_invalidated_blocks_are_dropped() {
    let mut book = blocks(2, 4);
    request(&mut book, &[1, 2], 1);
    let keys = wanted(&offer(&mut book, 2, &[3, 4], 2));
    assert_eq!(keys.len(), 2, "two blocks are to be demoted for them");
    set(&mut book, 1, 3);
    while book.has_invalidated_blocks() {
        book.drop_invalidated_blocks();
    }
    let mut dropped = 0;
    while let Some(action) = book.next_action(ALL_PERMITS) {
        assert!(matches!(action, Action::DropDram { .. }), "{action:?}");
        dropped += 1;
    }
    assert_eq!((dropped, book.stats(Tier::Ssd).blocks), (2, 0), "both blocks to be demoted are dropped");
}

#[test]
fn window_ends_with_a_weights_change() {
    let mut book = blocks(4, 4);
    request(&mut book, &[1, 2, 3], 1);
    let waiting = [hashes(&[1, 2, 3])];
    book.set_window(waiting.iter().map(Vec::as_slice), Timestamp(2));
    set(&mut book, 1, 3);
    assert_eq!(book.window_blocks(), 0);
    request(&mut book, &[1], 4);
    let taken = book.set_window(waiting.iter().map(Vec::as_slice), Timestamp(5));
    assert_eq!((taken.blocks, taken.dram_blocks, taken.ssd_blocks), (3, 1, 0));
    while book.has_invalidated_blocks() {
        book.drop_invalidated_blocks();
    }
    assert_eq!(found(&book, &[1]), 1);
}

#[test]
fn returning_generation_revives_no_block() {
    let mut book = blocks(4, 0);
    request(&mut book, &[1], 1);
    set(&mut book, 5, 2);
    set(&mut book, 0, 3);
    assert_eq!(found(&book, &[1]), 0, "a restarted count means other weights");
}

/// A step of a run against a reference.
#[derive(Clone, Debug)]
enum WeightsStep {
    Save { numbers: Vec<u64>, over_a_change: bool },
    Fetch { lease: u64, numbers: Vec<u64> },
    Release { lease: u64 },
    NewWeights,
    Sweep,
}

fn step() -> impl Strategy<Value = WeightsStep> {
    let numbers = || prop::collection::vec(0u64..6, 1..4);
    prop_oneof![
        4 => (numbers(), prop::bool::weighted(0.2))
            .prop_map(|(numbers, over_a_change)| WeightsStep::Save { numbers, over_a_change }),
        4 => (100u64..104, numbers()).prop_map(|(lease, numbers)| WeightsStep::Fetch { lease, numbers }),
        3 => (100u64..104).prop_map(|lease| WeightsStep::Release { lease }),
        2 => Just(WeightsStep::NewWeights),
        2 => Just(WeightsStep::Sweep),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Without pressure, exactly the blocks saved since the last change are found, and leases keep
    /// their blocks.
    #[test]
    fn found_blocks_match_a_model_and_leases_keep_their_blocks(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut book = blocks(1000, 1000);
        let (mut saved, mut now, mut next_lease) = (BTreeMap::<u64, BlockKey>::new(), 0, 0);
        let mut reads = BTreeMap::<u64, Vec<(BlockKey, u64, Generation)>>::new();
        for step in steps {
            now += 1;
            match step {
                WeightsStep::Save { numbers, over_a_change } => {
                    next_lease += 1;
                    let answers = offer(&mut book, next_lease, &numbers, now);
                    if over_a_change {
                        saved.clear();
                        let next = book.generation().0 + 1;
                        set(&mut book, next, now);
                    }
                    for (number, answer) in numbers.iter().zip(answers) {
                        let OfferOutcome::Wanted(key) = answer else { continue };
                        book.commit(key, CHARGE, Timestamp(now));
                        if !over_a_change {
                            saved.insert(*number, key);
                        }
                    }
                    book.release(lease(next_lease), Timestamp(now));
                }
                WeightsStep::Fetch { lease: number, numbers } => {
                    let expected: Vec<BlockKey> =
                        numbers.iter().map_while(|number| saved.get(number).copied()).collect();
                    let reached = book.fetch(requester(number), &hashes(&numbers), Timestamp(now)).unwrap();
                    let keys: Vec<BlockKey> = reached.iter().map(|reach| reach.key).collect();
                    prop_assert_eq!(&keys, &expected);
                    let generation = book.generation();
                    let more = keys.into_iter().zip(numbers).map(|(key, number)| (key, number, generation));
                    reads.entry(number).or_default().extend(more);
                }
                WeightsStep::Release { lease: number } => {
                    reads.remove(&number);
                    book.release(lease(number), Timestamp(now));
                }
                WeightsStep::NewWeights => {
                    saved.clear();
                    let next = book.generation().0 + 1;
                        set(&mut book, next, now);
                }
                WeightsStep::Sweep => {
                    book.drop_invalidated_blocks();
                }
            }
            drain(&mut book);
            for (key, number, generation) in reads.values().flatten() {
                prop_assert_eq!(book.meta(*key).map(|meta| meta.hash), Some(hash(*number)));
                prop_assert_eq!(book.generation_of(*key), Some(*generation));
                prop_assert_eq!(book.assigned_tier(*key), Some(Tier::Dram));
            }
        }
    }
}
