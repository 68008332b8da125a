//! Pins: who leaves last and in which order, what several pins on a block come to, and how a pin ends.

use super::*;
use proptest::prelude::*;

const SECOND: u64 = 1_000_000;

fn soft(book: &mut Book, numbers: &[u64], now: u64) {
    book.set_pins([order(1, PinKind::Soft, numbers)], Timestamp(now));
}

fn ending(number: u64, kind: PinKind, numbers: &[u64], ends_ms: u64, left_s: u64) -> PinOrder {
    let end = Some(PinEnd { ends_ms, left: Duration::from_secs(left_s) });
    PinOrder { end, ..order(number, kind, numbers) }
}

fn there(book: &Book, numbers: std::ops::RangeInclusive<u64>) -> Vec<u64> {
    numbers.filter(|number| book.tier_of(&hash(*number)).is_some()).collect()
}

fn in_dram(book: &Book, numbers: std::ops::RangeInclusive<u64>) -> Vec<u64> {
    numbers.filter(|number| book.tier_of(&hash(*number)) == Some(Tier::Dram)).collect()
}

fn wait(book: &mut Book, numbers: &[u64], now: u64) {
    let waiting = hashes(numbers);
    book.set_window([waiting.as_slice()], Timestamp(now));
}

/// Saves a block and keeps it held; whether there was room.
fn hold(book: &mut Book, number: u64, now: u64) -> bool {
    let offered = offer(book, number, &[number], now);
    let [Offered::Wanted(key)] = offered[..] else { return false };
    drain(book);
    book.commit(key, CHARGE, Timestamp(now));
    drain(book);
    true
}

#[test]
fn soft_pinned_blocks_leave_after_all_others_in_order_of_last_use_and_refuse_nobody_room() {
    let mut book = blocks(6, 0);
    (1..=6).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    soft(&mut book, &[1, 2, 3], 10);
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 0, soft: 3 });
    // A use counts: 1 is younger than 2 and 3 from here on.
    assert_eq!(request(&mut book, &[1], 11), 1);
    let mut left = vec![there(&book, 1..=6)];
    for number in 21..=26 {
        assert!(hold(&mut book, number, number), "a soft pin refuses no room");
        left.push(there(&book, 1..=6));
    }
    let expected: [&[u64]; 7] =
        [&[1, 2, 3, 4, 5, 6], &[1, 2, 3, 5, 6], &[1, 2, 3, 6], &[1, 2, 3], &[1, 3], &[1], &[]];
    assert_eq!(left, expected);
    assert!(!hold(&mut book, 27, 27), "what is held is not given");
}

#[test]
fn a_soft_pin_goes_before_what_waits_and_a_hard_one_never() {
    let mut book = blocks(5, 0);
    (1..=5).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    let pins = [order(1, PinKind::Hard, &[1]), order(2, PinKind::Soft, &[2, 3])];
    book.set_pins(pins, Timestamp(10));
    // A request waits for 3, which is pinned softly, and for 4.
    wait(&mut book, &[4, 3], 11);
    let mut left = Vec::new();
    for number in 21..=25 {
        left.push((hold(&mut book, number, 12), there(&book, 1..=5)));
    }
    let expected = [
        (true, vec![1, 2, 3, 4]),
        (true, vec![1, 3, 4]),
        (true, vec![1, 4]),
        (true, vec![1]),
        (false, vec![1]),
    ];
    assert_eq!(left, expected, "5, which nobody wants kept, then 2, then the tail of the queue");
}

#[test]
fn what_is_demoted_pushes_no_soft_pinned_block_off_the_last_tier_unless_it_is_pinned_too() {
    let mut book = blocks(2, 3);
    (1..=5).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    assert_eq!(in_dram(&book, 1..=5), [4, 5]);
    soft(&mut book, &[1, 2, 3, 5], 10);
    // 4 leaves DRAM, and SSD is full of what is pinned.
    request(&mut book, &[6], 11);
    assert_eq!(there(&book, 1..=6), [1, 2, 3, 5, 6]);
    // 6 leaves likewise, and then 5: the longest unused of those that are pinned gives way to it.
    request(&mut book, &[7], 12);
    assert_eq!(there(&book, 1..=7), [1, 2, 3, 5, 7]);
    assert!(hold(&mut book, 8, 13) && hold(&mut book, 9, 13));
    assert_eq!(there(&book, 1..=9), [2, 3, 5, 8, 9]);
}

#[test]
fn the_firmest_of_several_pins_counts_and_a_change_of_kind_leaves_no_gap() {
    let mut book = blocks(2, 0);
    request(&mut book, &[1], 1);
    let (hard, easy) = (order(1, PinKind::Hard, &[1]), order(2, PinKind::Soft, &[1]));
    book.set_pins([hard, easy.clone()], Timestamp(2));
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 1, soft: 0 });
    assert!(hold(&mut book, 2, 3));
    assert!(!hold(&mut book, 3, 3));
    // The hard one ends, and the soft one stays.
    book.set_pins([easy], Timestamp(4));
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 0, soft: 1 });
    // The same pin, and firmer: nothing in between.
    book.set_pins([order(2, PinKind::Hard, &[1])], Timestamp(5));
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 1, soft: 0 });
    assert!(!hold(&mut book, 3, 5));
    book.set_pins([order(2, PinKind::Soft, &[1])], Timestamp(6));
    assert!(hold(&mut book, 3, 6));
    assert_eq!((there(&book, 1..=3), book.pinned_blocks()), (vec![2, 3], PinnedBlocks::default()));
    // It comes back, and is pinned as it was.
    book.release(LeaseId(2), Timestamp(7));
    book.release(LeaseId(3), Timestamp(7));
    request(&mut book, &[1], 8);
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 0, soft: 1 });
}

#[test]
fn one_block_in_two_soft_pins_is_pinned_until_both_end() {
    let mut book = blocks(4, 0);
    (1..=3).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.set_pins([order(1, PinKind::Soft, &[1, 1]), order(2, PinKind::Soft, &[1])], Timestamp(4));
    book.set_pins([order(2, PinKind::Soft, &[1])], Timestamp(5));
    assert_eq!(book.pinned_blocks().soft, 1);
    book.set_pins([], Timestamp(6));
    assert_eq!(book.pinned_blocks(), PinnedBlocks::default());
    // It comes back as the newest, as after any pin.
    (4..=6).for_each(|number| assert_eq!(request(&mut book, &[number], 10 + number), 0));
    assert_eq!(there(&book, 1..=6), [1, 4, 5, 6]);
}

#[test]
fn a_pin_is_over_on_this_clock_and_nothing_that_is_told_later_brings_it_back_or_puts_it_off() {
    let mut book = blocks(1, 0);
    request(&mut book, &[1], 1);
    let told = |left_s| ending(1, PinKind::Hard, &[1], 5_000, left_s);
    book.set_pins([told(10)], Timestamp(0));
    assert_eq!(book.next_pin_end(Timestamp(SECOND)), Some(Duration::from_secs(9)));
    // A router whose clock was set back says that there is more time, and one ahead that there is less.
    book.set_pins([told(3_600)], Timestamp(SECOND));
    assert_eq!(book.next_pin_end(Timestamp(SECOND)), Some(Duration::from_secs(9)));
    book.set_pins([told(5)], Timestamp(2 * SECOND));
    assert_eq!(book.next_pin_end(Timestamp(2 * SECOND)), Some(Duration::from_secs(5)));
    book.expire_pins(Timestamp(7 * SECOND - 1));
    assert_eq!(book.pinned_blocks().hard, 1);
    book.expire_pins(Timestamp(7 * SECOND));
    assert_eq!((book.pinned_blocks().hard, book.next_pin_end(Timestamp(0))), (0, None));
    // Told again, whether or not it was left out in between.
    book.set_pins([told(3_600)], Timestamp(8 * SECOND));
    assert_eq!(book.pinned_blocks().hard, 0);
    book.set_pins([], Timestamp(8 * SECOND));
    book.set_pins([told(3_600)], Timestamp(8 * SECOND));
    assert_eq!(book.pinned_blocks().hard, 0);
    // Renewed by its owner it has a later end, and counts.
    book.set_pins([ending(1, PinKind::Hard, &[1], 9_000, 4)], Timestamp(8 * SECOND));
    assert_eq!(book.pinned_blocks().hard, 1);
    // Another leader's clock may be behind: the end is another one, so it is another wish.
    book.set_pins([ending(1, PinKind::Hard, &[1], 4_000, 2)], Timestamp(9 * SECOND));
    assert_eq!(book.next_pin_end(Timestamp(9 * SECOND)), Some(Duration::from_secs(2)));
    // Endless from now on.
    book.set_pins([order(1, PinKind::Hard, &[1])], Timestamp(9 * SECOND));
    book.expire_pins(Timestamp(100 * SECOND));
    assert_eq!(book.pinned_blocks().hard, 1);
}

#[test]
fn a_pin_without_time_left_never_begins_and_the_longest_ends_at_the_end_of_time() {
    let mut book = blocks(1, 0);
    request(&mut book, &[1], 1);
    book.set_pins([ending(1, PinKind::Hard, &[1], 5_000, 0)], Timestamp(2));
    assert_eq!(book.pinned_blocks(), PinnedBlocks::default());
    book.set_pins([ending(2, PinKind::Hard, &[1], u64::MAX, u64::MAX)], Timestamp(3));
    book.expire_pins(Timestamp(u64::MAX - 1));
    assert_eq!(book.pinned_blocks().hard, 1);
}

#[test]
fn a_soft_pin_goes_before_a_time_to_live_and_a_quota_takes_it_last() {
    let mut book = blocks(8, 0);
    (1..=3).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.set_ttls([(hash(1).group(), Duration::from_secs(1)), (hash(2).group(), Duration::from_secs(1))]);
    soft(&mut book, &[1], 4);
    assert_eq!(book.expire_blocks(Timestamp(10 * SECOND)), 1);
    assert_eq!(there(&book, 1..=3), [1, 3]);
    book.set_quotas([(TenantId(0), 100)]);
    assert_eq!(there(&book, 1..=3), [1]);
    book.set_quotas([(TenantId(0), 0)]);
    assert_eq!(there(&book, 1..=3), [0u64; 0]);
}

#[test]
fn many_pins_are_worked_off_in_steps_and_what_did_not_change_is_no_work() {
    let count = 3 * PIN_STEP_BLOCKS as u64;
    let mut book = blocks(count, 0);
    let numbers: Vec<u64> = (0..count).collect();
    for (lease, some) in (1..).zip(numbers.chunks(1000)) {
        request(&mut book, some, lease);
    }
    let half = numbers.len() / 2;
    let pins =
        || [order(1, PinKind::Soft, &numbers[..half]), ending(2, PinKind::Hard, &numbers[half..], 1, 60)];
    book.set_pins(pins(), Timestamp(100));
    let marked = |book: &Book| (book.pinned_blocks().soft + book.pinned_blocks().hard) as usize;
    assert_eq!((marked(&book), book.pins_behind()), (PIN_STEP_BLOCKS, 2 * PIN_STEP_BLOCKS));
    assert_eq!(book.expire_pins(Timestamp(101)), PIN_STEP_BLOCKS);
    assert_eq!(marked(&book), 2 * PIN_STEP_BLOCKS);
    assert_eq!(book.expire_pins(Timestamp(102)), PIN_STEP_BLOCKS);
    assert_eq!((marked(&book), book.expire_pins(Timestamp(103))), (numbers.len(), 0));
    book.set_pins(pins(), Timestamp(104));
    assert_eq!((book.pins_behind(), book.expire_pins(Timestamp(105))), (0, 0));
    // Its end comes in steps too.
    assert_eq!(book.expire_pins(Timestamp(100 * SECOND)), PIN_STEP_BLOCKS);
    assert_eq!(book.pins_behind(), half - PIN_STEP_BLOCKS);
}

#[test]
fn of_many_pins_that_end_together_a_bounded_number_ends_at_once_and_all_are_remembered() {
    let count = 2 * ENDED_PINS_MAX as u64 + 3;
    let mut book = blocks(1, 0);
    let pins = || (0..count).map(|number| ending(number, PinKind::Soft, &[number], 5_000, 1));
    book.set_pins(pins(), Timestamp(0));
    let late = Timestamp(2 * SECOND);
    let left: Vec<usize> = (0..3)
        .map(|_| {
            book.expire_pins(late);
            book.pins.rules.len()
        })
        .collect();
    assert_eq!(left, [ENDED_PINS_MAX + 3, 3, 0]);
    book.set_pins(pins(), late);
    assert_eq!(book.pins.rules.len(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whole requests on full tiers: what leaves is never a soft-pinned block while there is one that nobody wants kept,
    /// nor a waiting one while there is a soft-pinned one; and nothing that is pinned hard.
    #[test]
    fn nothing_leaves_before_what_is_wanted_less(
        dram in 2u64..8, ssd in 0u64..12,
        steps in prop::collection::vec((0u64..14, prop::collection::vec((0u64..14, 0u8..3), 0..14)), 1..60),
    ) {
        let mut book = blocks(dram, ssd);
        for (now, (number, wanted)) in (0u64..).zip(&steps) {
            let of = |class| wanted.iter().filter(move |(_, of)| *of == class).map(|(block, _)| *block);
            let [waiting, easy, hard] = [0, 1, 2].map(|class| of(class).collect::<Vec<u64>>());
            // More would be refused room.
            let hard = if hard.len() as u64 + 1 < dram { hard } else { Vec::new() };
            book.set_pins([order(1, PinKind::Soft, &easy), order(2, PinKind::Hard, &hard)], Timestamp(now));
            wait(&mut book, &waiting, now);
            let before = there(&book, 0..=13);
            request(&mut book, &[*number], now);
            let after = there(&book, 0..=13);
            let worth = |block: &u64| match block {
                block if hard.contains(block) => 3,
                block if waiting.contains(block) => 2,
                block if easy.contains(block) => 1,
                _ => 0,
            };
            let (kept, gone): (Vec<u64>, Vec<u64>) = before.iter().partition(|block| after.contains(block));
            let least = kept.iter().filter(|kept| *kept != number).map(worth).min().unwrap_or(3);
            prop_assert!(gone.iter().all(|gone| worth(gone) <= least && worth(gone) < 3),
                "{gone:?} left at {now}: before {before:?}, hard {hard:?}, waiting {waiting:?}, soft {easy:?}");
        }
    }
}
