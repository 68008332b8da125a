//! What the book does for a node whose SSDs are slow: loads that are not tried, and a tier that shrinks.
//!
//! Not here: which device is slow (the node).

use super::*;
use crate::index::command::Change;

/// Blocks 1 to `count`, each of a request of its own; the last are in DRAM.
fn filled(dram: u64, ssd: u64, count: u64) -> Book {
    let mut book = blocks(dram, ssd);
    (1..=count).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.take_changes();
    book
}

/// The next load from SSD; what else there is to do is done.
fn load(book: &mut Book) -> Option<BlockKey> {
    loop {
        match book.next_action(ALL_ROOM)? {
            Action::Promote { key, .. } => return Some(key),
            Action::Demote { key, .. } => book.on_moved(key, Tier::Ssd),
            Action::DropDram { .. } | Action::DropSsd { .. } => {}
            other => panic!("{other:?} in a node without a GPU"),
        }
    }
}

fn fetch(book: &mut Book, lease: u64, number: u64) -> Tier {
    book.fetch(asker(lease), &[hash(number)], Timestamp(100)).unwrap()[0].tier
}

#[test]
fn a_load_that_is_not_tried_leaves_the_block_where_it_is() {
    let mut book = filled(1, 2, 3);
    assert_eq!(fetch(&mut book, 7, 2), Tier::Ssd);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert_eq!(load(&mut book), None, "nobody waits for it any more");
    assert_eq!(book.tier_of(&hash(2)), Some(Tier::Ssd));
    let moved = Change::Moved { blocks: vec![hash(3)], from: Tier::Dram, to: Tier::Ssd };
    assert_eq!(book.take_changes(), [moved], "what made room for it, and nothing of itself");
    assert_eq!((book.stats(Tier::Dram).blocks, book.stats(Tier::Ssd).blocks), (0, 3), "nobody left for it");
    book.release(LeaseId(7), Timestamp(100));
    (4..=5).for_each(|number| assert_eq!(request(&mut book, &[number], 100 + number), 0));
    assert_eq!(book.stats(Tier::Ssd).blocks, 2, "who comes next makes room");
    // Whoever asks again has it loaded.
    assert_eq!(fetch(&mut book, 8, 4), Tier::Ssd);
    let tried = load(&mut book).unwrap();
    book.on_moved(tried, Tier::Dram);
    assert_eq!(book.tier_of(&hash(4)), Some(Tier::Dram));
}

#[test]
fn a_block_that_is_read_past_dram_and_not_tried_stays_too() {
    let mut book = filled(1, 2, 3);
    // DRAM is held: what is read from SSD keeps its place there.
    assert_eq!(fetch(&mut book, 6, 3), Tier::Dram);
    assert_eq!(fetch(&mut book, 7, 2), Tier::Ssd);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert_eq!((load(&mut book), book.tier_of(&hash(2))), (None, Some(Tier::Ssd)));
    assert!(book.take_changes().is_empty());
}

#[test]
fn a_prefetch_that_is_not_tried_is_not_asked_for_until_the_queue_is_told_again() {
    let mut book = filled(10, 30, 20);
    let waiting = hashes(&[5]);
    book.set_window([waiting.as_slice()], Timestamp(100));
    assert_eq!(book.prefetch(Timestamp(100)), 1);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert_eq!((book.prefetch(Timestamp(100)), load(&mut book)), (0, None));
    assert_eq!(book.tier_of(&hash(5)), Some(Tier::Ssd));
    // A reader is still heard.
    assert_eq!(fetch(&mut book, 7, 5), Tier::Ssd);
    assert!(load(&mut book).is_some());
}

#[test]
fn a_held_block_that_is_not_loaded_is_not_dropped_where_nothing_can_give_way() {
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
fn what_a_slow_ssd_cannot_take_leaves_in_the_order_of_the_policy() {
    let limits = TierLimits { capacity: Capacity::Blocks(20), watermark_high: 1.0, watermark_low: 0.5 };
    let mut book = book(limits, TierLimits::exact(Capacity::Blocks(10)));
    (1..=20).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.set_ssd_room(2);
    offer(&mut book, 30, &[30], 30);
    drain(&mut book);
    let on_ssd: Vec<u64> = (1..=20).filter(|n| book.tier_of(&hash(*n)) == Some(Tier::Ssd)).collect();
    let gone: Vec<u64> = (1..=20).filter(|n| book.tier_of(&hash(*n)).is_none()).collect();
    assert_eq!((on_ssd, gone), (vec![1, 2], (3..=11).collect()), "the longest unused, and no other");
    assert_eq!((book.stats(Tier::Dram).dropped_blocks, book.stats(Tier::Dram).unwritten_blocks), (9, 9));
    // With room again all that leaves goes there.
    book.set_ssd_room(usize::MAX);
    book.release(LeaseId(30), Timestamp(31));
    (31..=42).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    assert_eq!(book.stats(Tier::Dram).dropped_blocks, 9);
}

#[test]
fn nobody_leaves_dram_for_a_load_that_a_slow_ssd_may_refuse() {
    let mut book = filled(2, 10, 6);
    book.set_ssd_room(0);
    assert_eq!(fetch(&mut book, 7, 1), Tier::Ssd);
    let refused = load(&mut book).unwrap();
    book.on_load_refused(refused, Timestamp(100));
    assert!((1..=6).all(|number| book.tier_of(&hash(number)).is_some()), "nobody was lost");
    // One that is loaded is read and stays where it is.
    assert_eq!(fetch(&mut book, 8, 2), Tier::Ssd);
    let loaded = load(&mut book).unwrap();
    book.on_moved(loaded, Tier::Dram);
    assert_eq!((load(&mut book), book.tier_of(&hash(2))), (None, Some(Tier::Ssd)));
    // Nor for a prefetch.
    let waiting = hashes(&[3]);
    book.set_window([waiting.as_slice()], Timestamp(101));
    assert_eq!(book.prefetch(Timestamp(101)), 0);
}

#[test]
fn what_is_pinned_does_not_go_for_a_stretch_that_a_slow_ssd_does_not_take() {
    let limits = TierLimits { capacity: Capacity::Blocks(20), watermark_high: 0.9, watermark_low: 0.5 };
    let mut book = book(limits, TierLimits::exact(Capacity::Blocks(30)));
    let soft: Vec<u64> = (1..=15).collect();
    book.set_pins([order(1, PinKind::Soft, &soft)], Timestamp(0));
    (1..=18).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.set_ssd_room(0);
    assert_eq!(request(&mut book, &[30], 30), 0);
    let lost: Vec<u64> = (1..=18).filter(|number| book.tier_of(&hash(*number)).is_none()).collect();
    assert_eq!(lost, [16, 17, 18], "what nobody wants");
}

#[test]
fn a_write_that_is_refused_makes_nobody_the_newest() {
    let mut book = blocks(2, 10);
    (1..=2).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    offer(&mut book, 3, &[3], 3);
    let Some(Action::Demote { key, .. }) = book.next_action(ALL_ROOM) else { panic!("the oldest leaves") };
    book.on_write_refused(key, Timestamp(3));
    assert_eq!((book.tier_of(&hash(1)), book.stats(Tier::Ssd).blocks), (None, 0));
    assert_eq!(book.stats(Tier::Dram).unwritten_blocks, 1);
}

#[test]
fn a_tier_that_shrinks_gives_way_as_blocks_come() {
    let mut book = filled(1, 10, 11);
    assert_eq!(book.stats(Tier::Ssd).blocks, 10);
    book.set_capacity(Tier::Ssd, 4);
    assert_eq!(book.stats(Tier::Ssd).blocks, 10, "nothing goes for it alone");
    assert_eq!(request(&mut book, &[12], 200), 0);
    assert_eq!(book.stats(Tier::Ssd).blocks, 4);
    assert_eq!(book.tier_of(&hash(11)), Some(Tier::Ssd));
    book.set_capacity(Tier::Ssd, 10);
    (13..20).for_each(|number| assert_eq!(request(&mut book, &[number], 200 + number), 0));
    assert_eq!(book.stats(Tier::Ssd).blocks, 10);
}
