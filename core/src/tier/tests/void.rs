//! Other weights, situation by situation: what is void, who may read on, and when its room is free again.

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

fn wanted(answers: &[Offered]) -> Vec<BlockKey> {
    let wanted = answers.iter().filter_map(|answer| match answer {
        Offered::Wanted(key) => Some(*key),
        _ => None,
    });
    wanted.collect()
}

#[test]
fn what_was_computed_before_is_found_by_no_fetch_and_no_offer_and_told_to_nobody() {
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
fn void_blocks_go_in_steps_and_those_of_now_stay() {
    let mut book = blocks(4, 8);
    request(&mut book, &[1, 2, 3, 4, 5, 6], 1);
    set(&mut book, 1, 2);
    request(&mut book, &[1, 2], 3);
    assert!(book.has_void_blocks());
    while book.has_void_blocks() {
        book.drop_void_blocks();
    }
    drain(&mut book);
    let blocks = Tier::ALL.map(|tier| book.stats(tier).blocks).iter().sum::<u64>();
    assert_eq!((blocks, found(&book, &[1, 2])), (2, 2));
    let void = Tier::ALL.map(|tier| book.stats(tier).void_blocks).iter().sum::<u64>();
    assert_eq!(void, 6);
    let changes = book.take_changes();
    assert!(!changes.iter().any(|change| matches!(change, Change::Dropped { .. })), "{changes:?}");
}

#[test]
fn one_step_is_bounded() {
    let count = VOID_BLOCKS_MAX as u64 + 10;
    let mut book = blocks(count, 0);
    request(&mut book, &(0..count).collect::<Vec<_>>(), 1);
    set(&mut book, 1, 2);
    assert_eq!(book.drop_void_blocks(), VOID_BLOCKS_MAX);
    assert_eq!(book.drop_void_blocks(), 10);
    assert_eq!((book.drop_void_blocks(), book.has_void_blocks()), (0, false));
}

#[test]
fn who_needs_room_a_thousand_times_sweeps_as_much_as_one_step() {
    let count = 2 * VOID_BLOCKS_MAX as u64;
    let mut book = blocks(count, 0);
    request(&mut book, &(0..count).collect::<Vec<_>>(), 1);
    set(&mut book, 1, 2);
    let dropped: usize = (0..1_000).map(|_| book.sweep_void(|_| false)).sum();
    assert_eq!(dropped, VOID_BLOCKS_MAX);
    // And what nobody asked for goes on beside it.
    assert_eq!(book.drop_void_blocks(), VOID_BLOCKS_MAX);
    assert_eq!(book.stats(Tier::Dram).blocks, 0);
}

#[test]
fn a_lease_from_before_reads_on_and_the_block_goes_with_it() {
    let mut book = blocks(2, 0);
    request(&mut book, &[1, 2], 1);
    let reached = book.fetch(asker(2), &hashes(&[1]), Timestamp(2)).unwrap();
    set(&mut book, 1, 3);
    book.drop_void_blocks();
    drain(&mut book);
    let key = reached[0].key;
    assert_eq!((book.place(key), book.generation_of(key)), (Some(Tier::Dram), Some(Generation(0))));
    assert_eq!(book.meta(key).map(|meta| meta.hash), Some(hash(1)));
    // The one of now is beside it, and the end of the lease is no end of that.
    request(&mut book, &[1], 4);
    assert_eq!((book.stats(Tier::Dram).blocks, found(&book, &[1])), (2, 1));
    book.release(lease(2), Timestamp(5));
    assert_eq!(book.next_action(Room::default()), Some(Action::DropDram { key }));
    assert_eq!((book.stats(Tier::Dram).blocks, found(&book, &[1])), (1, 1));
}

#[test]
fn a_load_that_a_lease_waits_for_comes() {
    let mut book = blocks(1, 2);
    request(&mut book, &[1, 2], 1);
    let key = book.readable_prefix(TenantId(0), &hashes(&[1, 2]))[1];
    book.set_admitting(Tier::Dram, false);
    let reached = book.fetch(asker(2), &hashes(&[1, 2]), Timestamp(2)).unwrap();
    let load = reached.iter().find(|reach| reach.tier == Tier::Ssd).unwrap().key;
    set(&mut book, 1, 3);
    let action = book.next_action(ALL_ROOM);
    assert!(matches!(action, Some(Action::Promote { key, .. }) if key == load), "{action:?} of {key:?}");
    book.drop_void_blocks();
    book.on_moved(load, Tier::Dram);
    assert!(book.meta(load).is_some());
    assert_eq!(book.take_changes(), Vec::new());
    book.release(lease(2), Timestamp(4));
    assert_eq!(book.meta(load), None);
}

#[test]
fn nothing_is_kept_of_a_write_that_was_offered_before() {
    let mut book = blocks(4, 0);
    let keys = wanted(&offer(&mut book, 1, &[1, 2], 1));
    set(&mut book, 1, 2);
    while book.has_void_blocks() {
        book.drop_void_blocks();
    }
    assert!(book.meta(keys[0]).is_some(), "its key is not given out while bytes come under it");
    book.commit(keys[0], CHARGE, Timestamp(3));
    assert_eq!(book.next_action(Room::default()), Some(Action::DropDram { key: keys[0] }));
    book.abort(keys[1]);
    assert_eq!((book.stats(Tier::Dram).blocks, found(&book, &[1, 2])), (0, 0));
    assert_eq!(book.take_changes(), Vec::new());
    book.release(lease(1), Timestamp(4));
    assert_eq!(book.tenants().count(), 0);
}

#[test]
fn void_blocks_are_the_first_to_make_room_pinned_or_not() {
    let mut book = blocks(4, 0);
    request(&mut book, &[1, 2], 1);
    pin(&mut book, &[1, 2], Timestamp(1));
    set(&mut book, 1, 2);
    assert_eq!(book.pinned_blocks(), PinnedBlocks::default());
    request(&mut book, &[7, 8], 3);
    request(&mut book, &[9, 10], 4);
    assert_eq!((found(&book, &[7, 8]), found(&book, &[9, 10])), (2, 2), "those of now stay");
    // The pin is on the hashes: it keeps what comes under them.
    request(&mut book, &[1], 5);
    assert_eq!(book.pinned_blocks().hard, 1);
    request(&mut book, &[11, 12, 13], 6);
    assert_eq!(found(&book, &[1]), 1);
}

#[test]
fn void_blocks_give_way_to_a_quota_first() {
    let mut book = blocks(8, 0);
    request(&mut book, &[1, 2], 1);
    pin(&mut book, &[1, 2], Timestamp(1));
    book.set_quotas([(TenantId(0), 2 * u64::from(CHARGE.frame))]);
    set(&mut book, 1, 2);
    request(&mut book, &[7, 8], 3);
    assert_eq!(found(&book, &[7, 8]), 2);
}

#[test]
fn what_waited_to_be_written_to_ssd_is_not() {
    let mut book = blocks(2, 4);
    request(&mut book, &[1, 2], 1);
    let keys = wanted(&offer(&mut book, 2, &[3, 4], 2));
    assert_eq!(keys.len(), 2, "two are to leave for them");
    set(&mut book, 1, 3);
    while book.has_void_blocks() {
        book.drop_void_blocks();
    }
    let mut dropped = 0;
    while let Some(action) = book.next_action(ALL_ROOM) {
        assert!(matches!(action, Action::DropDram { .. }), "{action:?}");
        dropped += 1;
    }
    assert_eq!((dropped, book.stats(Tier::Ssd).blocks), (2, 0), "both of those that were to leave");
}

#[test]
fn a_window_ends_with_its_blocks_and_one_that_comes_is_of_those_of_now() {
    let mut book = blocks(4, 4);
    request(&mut book, &[1, 2, 3], 1);
    let waiting = [hashes(&[1, 2, 3])];
    book.set_window(waiting.iter().map(Vec::as_slice), Timestamp(2));
    set(&mut book, 1, 3);
    assert_eq!(book.window_blocks(), 0);
    request(&mut book, &[1], 4);
    let taken = book.set_window(waiting.iter().map(Vec::as_slice), Timestamp(5));
    assert_eq!((taken.blocks, taken.dram_blocks, taken.ssd_blocks), (3, 1, 0));
    while book.has_void_blocks() {
        book.drop_void_blocks();
    }
    assert_eq!(found(&book, &[1]), 1);
}

#[test]
fn a_generation_that_comes_back_brings_nothing_back() {
    let mut book = blocks(4, 0);
    request(&mut book, &[1], 1);
    set(&mut book, 5, 2);
    set(&mut book, 0, 3);
    assert_eq!(found(&book, &[1]), 0, "who counts anew means other weights");
}

/// What a run against a reference does next.
#[derive(Clone, Debug)]
enum Step {
    Save { numbers: Vec<u64>, over_a_change: bool },
    Fetch { lease: u64, numbers: Vec<u64> },
    Release { lease: u64 },
    NewWeights,
    Sweep,
}

fn step() -> impl Strategy<Value = Step> {
    let numbers = || prop::collection::vec(0u64..6, 1..4);
    prop_oneof![
        4 => (numbers(), prop::bool::weighted(0.2))
            .prop_map(|(numbers, over_a_change)| Step::Save { numbers, over_a_change }),
        4 => (100u64..104, numbers()).prop_map(|(lease, numbers)| Step::Fetch { lease, numbers }),
        3 => (100u64..104).prop_map(|lease| Step::Release { lease }),
        2 => Just(Step::NewWeights),
        2 => Just(Step::Sweep),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// With room for everything, what is found is what was saved whole since the last change, and who reads has what it found.
    #[test]
    fn what_is_found_is_what_was_saved_since_and_who_reads_has_what_it_found(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut book = blocks(1000, 1000);
        let (mut saved, mut now, mut next_lease) = (BTreeMap::<u64, BlockKey>::new(), 0, 0);
        let mut reads = BTreeMap::<u64, Vec<(BlockKey, u64, Generation)>>::new();
        for step in steps {
            now += 1;
            match step {
                Step::Save { numbers, over_a_change } => {
                    next_lease += 1;
                    let answers = offer(&mut book, next_lease, &numbers, now);
                    if over_a_change {
                        saved.clear();
                        let next = book.generation().0 + 1;
                        set(&mut book, next, now);
                    }
                    for (number, answer) in numbers.iter().zip(answers) {
                        let Offered::Wanted(key) = answer else { continue };
                        book.commit(key, CHARGE, Timestamp(now));
                        if !over_a_change {
                            saved.insert(*number, key);
                        }
                    }
                    book.release(lease(next_lease), Timestamp(now));
                }
                Step::Fetch { lease: number, numbers } => {
                    let expected: Vec<BlockKey> =
                        numbers.iter().map_while(|number| saved.get(number).copied()).collect();
                    let reached = book.fetch(asker(number), &hashes(&numbers), Timestamp(now)).unwrap();
                    let keys: Vec<BlockKey> = reached.iter().map(|reach| reach.key).collect();
                    prop_assert_eq!(&keys, &expected);
                    let generation = book.generation();
                    let more = keys.into_iter().zip(numbers).map(|(key, number)| (key, number, generation));
                    reads.entry(number).or_default().extend(more);
                }
                Step::Release { lease: number } => {
                    reads.remove(&number);
                    book.release(lease(number), Timestamp(now));
                }
                Step::NewWeights => {
                    saved.clear();
                    let next = book.generation().0 + 1;
                        set(&mut book, next, now);
                }
                Step::Sweep => {
                    book.drop_void_blocks();
                }
            }
            drain(&mut book);
            for (key, number, generation) in reads.values().flatten() {
                prop_assert_eq!(book.meta(*key).map(|meta| meta.hash), Some(hash(*number)));
                prop_assert_eq!(book.generation_of(*key), Some(*generation));
                prop_assert_eq!(book.place(*key), Some(Tier::Dram));
            }
        }
    }
}
