//! The book with slow SSDs: refused loads, and a shrinking tier.
//!
//! Not here: the detection of slow devices (the node).

use super::*;
use crate::index::command::Change;

/// Blocks 1 to `count`, each of its own request; the last ones are in DRAM.
fn filled(dram: u64, ssd: u64, count: u64) -> Book {
    let mut book = blocks(dram, ssd);
    (1..=count).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.take_changes();
    book
}

/// The next load from SSD; other actions are completed.
fn load(book: &mut Book) -> Option<BlockKey> {
    loop {
        match book.next_action(ALL_PERMITS)? {
            Action::Promote { key, .. } => return Some(key),
            Action::Demote { key, .. } => book.on_moved(key, Tier::Ssd),
            Action::DropDram { .. } | Action::DropSsd { .. } => {}
            other => panic!("{other:?} in a node without a GPU"),
        }
    }
}

fn fetch(book: &mut Book, lease: u64, number: u64) -> Tier {
    book.fetch(requester(lease), &[hash(number)], Timestamp(100)).unwrap()[0].tier
}

#[test]
fn refused_load_leaves_the_block_on_ssd() {
    let mut book = filled(1, 2, 3);
    assert_eq!(fetch(&mut book, 7, 2), Tier::Ssd);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert_eq!(load(&mut book), None, "no reader waits for it any more");
    assert_eq!(book.tier_of(&hash(2)), Some(Tier::Ssd));
    let moved = Change::Moved { blocks: vec![hash(3)], from: Tier::Dram, to: Tier::Ssd };
    assert_eq!(
        book.take_changes(),
        [moved],
        "the demotion that made room, and no change of the block itself"
    );
    assert_eq!(
        (book.stats(Tier::Dram).blocks, book.stats(Tier::Ssd).blocks),
        (0, 3),
        "no block left SSD for it"
    );
    book.release(LeaseId(7), Timestamp(100));
    (4..=5).for_each(|number| assert_eq!(request(&mut book, &[number], 100 + number), 0));
    assert_eq!(book.stats(Tier::Ssd).blocks, 2, "the next arrival makes room");
    // A later request loads it.
    assert_eq!(fetch(&mut book, 8, 4), Tier::Ssd);
    let tried = load(&mut book).unwrap();
    book.on_moved(tried, Tier::Dram);
    assert_eq!(book.tier_of(&hash(4)), Some(Tier::Dram));
}

#[test]
fn refused_load_past_dram_leaves_the_block_on_ssd() {
    let mut book = filled(1, 2, 3);
    // All of DRAM is held: a block read from SSD keeps its tier.
    assert_eq!(fetch(&mut book, 6, 3), Tier::Dram);
    assert_eq!(fetch(&mut book, 7, 2), Tier::Ssd);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert_eq!((load(&mut book), book.tier_of(&hash(2))), (None, Some(Tier::Ssd)));
    assert!(book.take_changes().is_empty());
}

#[test]
fn refused_prefetch_waits_for_the_next_window() {
    let mut book = filled(10, 30, 20);
    let waiting = hashes(&[5]);
    book.set_window([waiting.as_slice()], Timestamp(100));
    assert_eq!(book.prefetch(Timestamp(100)), 1);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert_eq!((book.prefetch(Timestamp(100)), load(&mut book)), (0, None));
    assert_eq!(book.tier_of(&hash(5)), Some(Tier::Ssd));
    // A reader's load is still possible.
    assert_eq!(fetch(&mut book, 7, 5), Tier::Ssd);
    assert!(load(&mut book).is_some());
}

#[test]
fn held_block_with_a_refused_load_is_not_dropped() {
    let mut book = filled(1, 2, 3);
    pin(&mut book, &[1, 2], Timestamp(50));
    drain(&mut book);
    assert_eq!(fetch(&mut book, 7, 2), Tier::Ssd);
    book.set_capacity(Tier::Ssd, 1);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert_eq!(book.tier_of(&hash(2)), Some(Tier::Ssd));
    assert_eq!(book.tier_of(&hash(1)), Some(Tier::Ssd));
}

#[test]
fn blocks_beyond_the_ssd_queue_are_dropped_in_policy_order() {
    let limits = TierLimits { capacity: Capacity::Blocks(20), watermark_high: 1.0, watermark_low: 0.5 };
    let mut book = book(limits, TierLimits::exact(Capacity::Blocks(10)));
    (1..=20).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.set_ssd_queue_max(2);
    offer(&mut book, 30, &[30], 30);
    drain(&mut book);
    let on_ssd: Vec<u64> = (1..=20).filter(|n| book.tier_of(&hash(*n)) == Some(Tier::Ssd)).collect();
    let gone: Vec<u64> = (1..=20).filter(|n| book.tier_of(&hash(*n)).is_none()).collect();
    assert_eq!((on_ssd, gone), (vec![1, 2], (3..=11).collect()), "the longest unused blocks, and no others");
    assert_eq!((book.stats(Tier::Dram).dropped_blocks, book.stats(Tier::Dram).unwritten_blocks), (9, 9));
    // With a free queue, all evicted blocks go to SSD.
    book.set_ssd_queue_max(usize::MAX);
    book.release(LeaseId(30), Timestamp(31));
    (31..=42).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    assert_eq!(book.stats(Tier::Dram).dropped_blocks, 9);
}

#[test]
fn refusable_load_evicts_no_block_from_dram() {
    let mut book = filled(2, 10, 6);
    book.set_ssd_queue_max(0);
    assert_eq!(fetch(&mut book, 7, 1), Tier::Ssd);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert!((1..=6).all(|number| book.tier_of(&hash(number)).is_some()), "no block was lost");
    // A loaded block is read and keeps its tier.
    assert_eq!(fetch(&mut book, 8, 2), Tier::Ssd);
    let loaded = load(&mut book).unwrap();
    book.on_moved(loaded, Tier::Dram);
    assert_eq!((load(&mut book), book.tier_of(&hash(2))), (None, Some(Tier::Ssd)));
    // The same for a prefetch.
    let waiting = hashes(&[3]);
    book.set_window([waiting.as_slice()], Timestamp(101));
    assert_eq!(book.prefetch(Timestamp(101)), 0);
}

#[test]
fn batch_eviction_spares_pinned_blocks_without_ssd() {
    let limits = TierLimits { capacity: Capacity::Blocks(20), watermark_high: 0.9, watermark_low: 0.5 };
    let mut book = book(limits, TierLimits::exact(Capacity::Blocks(30)));
    let soft: Vec<u64> = (1..=15).collect();
    book.set_pins([pin_directive(1, PinKind::Soft, &soft)], Timestamp(0));
    (1..=18).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.set_ssd_queue_max(0);
    assert_eq!(request(&mut book, &[30], 30), 0);
    let lost: Vec<u64> = (1..=18).filter(|number| book.tier_of(&hash(*number)).is_none()).collect();
    assert_eq!(lost, [16, 17, 18], "the unprotected blocks");
}

#[test]
fn refused_write_drops_the_block() {
    let mut book = blocks(2, 10);
    (1..=2).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    offer(&mut book, 3, &[3], 3);
    let Some(Action::Demote { key, .. }) = book.next_action(ALL_PERMITS) else { panic!("the oldest leaves") };
    book.on_write_refused(key, Timestamp(3));
    assert_eq!((book.tier_of(&hash(1)), book.stats(Tier::Ssd).blocks), (None, 0));
    assert_eq!(book.stats(Tier::Dram).unwritten_blocks, 1);
}

#[test]
fn shrunk_tier_evicts_as_blocks_arrive() {
    let mut book = filled(1, 10, 11);
    assert_eq!(book.stats(Tier::Ssd).blocks, 10);
    book.set_capacity(Tier::Ssd, 4);
    assert_eq!(book.stats(Tier::Ssd).blocks, 10, "shrinking alone evicts no block");
    assert_eq!(request(&mut book, &[12], 200), 0);
    assert_eq!(book.stats(Tier::Ssd).blocks, 4);
    assert_eq!(book.tier_of(&hash(11)), Some(Tier::Ssd));
    book.set_capacity(Tier::Ssd, 10);
    (13..20).for_each(|number| assert_eq!(request(&mut book, &[number], 200 + number), 0));
    assert_eq!(book.stats(Tier::Ssd).blocks, 10);
}
