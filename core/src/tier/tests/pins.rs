//! Pins: eviction order, several pins on a block, and expiry.

use super::*;
use proptest::prelude::*;

const SECOND: u64 = 1_000_000;

fn pin_softly(book: &mut Book, numbers: &[u64], now: u64) {
    book.set_pins([pin_directive(1, PinKind::Soft, numbers)], Timestamp(now));
}

fn expiring_pin(number: u64, kind: PinKind, numbers: &[u64], ends_ms: u64, left_s: u64) -> PinDirective {
    let end = Some(PinExpiry { ends_ms, remaining: Duration::from_secs(left_s) });
    PinDirective { end, ..pin_directive(number, kind, numbers) }
}

fn present(book: &Book, numbers: std::ops::RangeInclusive<u64>) -> Vec<u64> {
    numbers.filter(|number| book.tier_of(&hash(*number)).is_some()).collect()
}

fn in_dram(book: &Book, numbers: std::ops::RangeInclusive<u64>) -> Vec<u64> {
    numbers.filter(|number| book.tier_of(&hash(*number)) == Some(Tier::Dram)).collect()
}

fn set_window(book: &mut Book, numbers: &[u64], now: u64) {
    let waiting = hashes(numbers);
    book.set_window([waiting.as_slice()], Timestamp(now));
}

/// Saves a block and keeps it held. Returns whether there was space.
fn save_and_hold(book: &mut Book, number: u64, now: u64) -> bool {
    let offered = offer(book, number, &[number], now);
    let [OfferOutcome::Wanted(key)] = offered[..] else { return false };
    drain(book);
    book.commit(key, CHARGE, Timestamp(now));
    drain(book);
    true
}

#[test]
fn soft_pinned_blocks_are_evicted_last_in_order_of_use() {
    let mut book = blocks(6, 0);
    (1..=6).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    pin_softly(&mut book, &[1, 2, 3], 10);
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 0, soft: 3 });
    // A use counts: 1 is younger than 2 and 3 from here on.
    assert_eq!(request(&mut book, &[1], 11), 1);
    let mut left = vec![present(&book, 1..=6)];
    for number in 21..=26 {
        assert!(save_and_hold(&mut book, number, number), "a soft pin refuses no space");
        left.push(present(&book, 1..=6));
    }
    let expected: [&[u64]; 7] =
        [&[1, 2, 3, 4, 5, 6], &[1, 2, 3, 5, 6], &[1, 2, 3, 6], &[1, 2, 3], &[1, 3], &[1], &[]];
    assert_eq!(left, expected);
    assert!(!save_and_hold(&mut book, 27, 27), "held blocks are not evicted");
}

#[test]
fn soft_pins_yield_before_needed_blocks_and_hard_pins_never() {
    let mut book = blocks(5, 0);
    (1..=5).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    let pins = [pin_directive(1, PinKind::Hard, &[1]), pin_directive(2, PinKind::Soft, &[2, 3])];
    book.set_pins(pins, Timestamp(10));
    // A queued request needs 3, which is softly pinned, and 4.
    set_window(&mut book, &[4, 3], 11);
    let mut left = Vec::new();
    for number in 21..=25 {
        left.push((save_and_hold(&mut book, number, 12), present(&book, 1..=5)));
    }
    let expected = [
        (true, vec![1, 2, 3, 4]),
        (true, vec![1, 3, 4]),
        (true, vec![1, 4]),
        (true, vec![1]),
        (false, vec![1]),
    ];
    assert_eq!(left, expected, "first 5, which is unprotected, then 2, then the tail of the queue");
}

#[test]
fn demoted_block_evicts_soft_pinned_ones_only_if_pinned_itself() {
    let mut book = blocks(2, 3);
    (1..=5).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    assert_eq!(in_dram(&book, 1..=5), [4, 5]);
    pin_softly(&mut book, &[1, 2, 3, 5], 10);
    // 4 leaves DRAM while SSD is full of pinned blocks.
    request(&mut book, &[6], 11);
    assert_eq!(present(&book, 1..=6), [1, 2, 3, 5, 6]);
    // 6 leaves likewise, then 5: the longest unused pinned block is evicted for it.
    request(&mut book, &[7], 12);
    assert_eq!(present(&book, 1..=7), [1, 2, 3, 5, 7]);
    assert!(save_and_hold(&mut book, 8, 13) && save_and_hold(&mut book, 9, 13));
    assert_eq!(present(&book, 1..=9), [2, 3, 5, 8, 9]);
}

#[test]
fn strongest_pin_applies_and_kind_changes_are_gapless() {
    let mut book = blocks(2, 0);
    request(&mut book, &[1], 1);
    let (hard, easy) = (pin_directive(1, PinKind::Hard, &[1]), pin_directive(2, PinKind::Soft, &[1]));
    book.set_pins([hard, easy.clone()], Timestamp(2));
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 1, soft: 0 });
    assert!(save_and_hold(&mut book, 2, 3));
    assert!(!save_and_hold(&mut book, 3, 3));
    // The hard pin ends, and the soft one stays.
    book.set_pins([easy], Timestamp(4));
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 0, soft: 1 });
    // The same pin with a stronger kind, without a gap.
    book.set_pins([pin_directive(2, PinKind::Hard, &[1])], Timestamp(5));
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 1, soft: 0 });
    assert!(!save_and_hold(&mut book, 3, 5));
    book.set_pins([pin_directive(2, PinKind::Soft, &[1])], Timestamp(6));
    assert!(save_and_hold(&mut book, 3, 6));
    assert_eq!((present(&book, 1..=3), book.pinned_blocks()), (vec![2, 3], PinnedBlocks::default()));
    // It is saved again, and the pin still applies.
    book.release(LeaseId(2), Timestamp(7));
    book.release(LeaseId(3), Timestamp(7));
    request(&mut book, &[1], 8);
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 0, soft: 1 });
}

#[test]
fn one_block_in_two_soft_pins_is_pinned_until_both_end() {
    let mut book = blocks(4, 0);
    (1..=3).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.set_pins(
        [pin_directive(1, PinKind::Soft, &[1, 1]), pin_directive(2, PinKind::Soft, &[1])],
        Timestamp(4),
    );
    book.set_pins([pin_directive(2, PinKind::Soft, &[1])], Timestamp(5));
    assert_eq!(book.pinned_blocks().soft, 1);
    book.set_pins([], Timestamp(6));
    assert_eq!(book.pinned_blocks(), PinnedBlocks::default());
    // It becomes the newest, as after any pin.
    (4..=6).for_each(|number| assert_eq!(request(&mut book, &[number], 10 + number), 0));
    assert_eq!(present(&book, 1..=6), [1, 4, 5, 6]);
}

#[test]
fn expired_pin_is_neither_revived_nor_extended() {
    let mut book = blocks(1, 0);
    request(&mut book, &[1], 1);
    let told = |left_s| expiring_pin(1, PinKind::Hard, &[1], 5_000, left_s);
    book.set_pins([told(10)], Timestamp(0));
    assert_eq!(book.next_pin_end(Timestamp(SECOND)), Some(Duration::from_secs(9)));
    // A router with a clock set back reports more remaining time, and one ahead reports less.
    book.set_pins([told(3_600)], Timestamp(SECOND));
    assert_eq!(book.next_pin_end(Timestamp(SECOND)), Some(Duration::from_secs(9)));
    book.set_pins([told(5)], Timestamp(2 * SECOND));
    assert_eq!(book.next_pin_end(Timestamp(2 * SECOND)), Some(Duration::from_secs(5)));
    book.expire_pins(Timestamp(7 * SECOND - 1));
    assert_eq!(book.pinned_blocks().hard, 1);
    book.expire_pins(Timestamp(7 * SECOND));
    assert_eq!((book.pinned_blocks().hard, book.next_pin_end(Timestamp(0))), (0, None));
    // Sent again, with or without an absence in between.
    book.set_pins([told(3_600)], Timestamp(8 * SECOND));
    assert_eq!(book.pinned_blocks().hard, 0);
    book.set_pins([], Timestamp(8 * SECOND));
    book.set_pins([told(3_600)], Timestamp(8 * SECOND));
    assert_eq!(book.pinned_blocks().hard, 0);
    // Renewed by its owner it has a later expiry, and applies.
    book.set_pins([expiring_pin(1, PinKind::Hard, &[1], 9_000, 4)], Timestamp(8 * SECOND));
    assert_eq!(book.pinned_blocks().hard, 1);
    // Another leader's clock may be behind: a different expiry is a new request.
    book.set_pins([expiring_pin(1, PinKind::Hard, &[1], 4_000, 2)], Timestamp(9 * SECOND));
    assert_eq!(book.next_pin_end(Timestamp(9 * SECOND)), Some(Duration::from_secs(2)));
    // Without expiry from here on.
    book.set_pins([pin_directive(1, PinKind::Hard, &[1])], Timestamp(9 * SECOND));
    book.expire_pins(Timestamp(100 * SECOND));
    assert_eq!(book.pinned_blocks().hard, 1);
}

#[test]
fn pin_without_remaining_time_never_starts() {
    let mut book = blocks(1, 0);
    request(&mut book, &[1], 1);
    book.set_pins([expiring_pin(1, PinKind::Hard, &[1], 5_000, 0)], Timestamp(2));
    assert_eq!(book.pinned_blocks(), PinnedBlocks::default());
    book.set_pins([expiring_pin(2, PinKind::Hard, &[1], u64::MAX, u64::MAX)], Timestamp(3));
    book.expire_pins(Timestamp(u64::MAX - 1));
    assert_eq!(book.pinned_blocks().hard, 1);
}

#[test]
fn soft_pin_outlives_a_ttl_and_yields_last_to_a_quota() {
    let mut book = blocks(8, 0);
    (1..=3).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book.set_ttls([
        (hash(1).ttl_group(), Duration::from_secs(1)),
        (hash(2).ttl_group(), Duration::from_secs(1)),
    ]);
    pin_softly(&mut book, &[1], 4);
    assert_eq!(book.expire_blocks(Timestamp(10 * SECOND)), 1);
    assert_eq!(present(&book, 1..=3), [1, 3]);
    book.set_quotas([(TenantId(0), 100)]);
    assert_eq!(present(&book, 1..=3), [1]);
    book.set_quotas([(TenantId(0), 0)]);
    assert_eq!(present(&book, 1..=3), [0u64; 0]);
}

#[test]
fn pin_changes_are_applied_in_steps() {
    let count = 3 * PIN_STEP_BLOCKS as u64;
    let mut book = blocks(count, 0);
    let numbers: Vec<u64> = (0..count).collect();
    for (lease, some) in (1..).zip(numbers.chunks(1000)) {
        request(&mut book, some, lease);
    }
    let half = numbers.len() / 2;
    let pins = || {
        [
            pin_directive(1, PinKind::Soft, &numbers[..half]),
            expiring_pin(2, PinKind::Hard, &numbers[half..], 1, 60),
        ]
    };
    book.set_pins(pins(), Timestamp(100));
    let marked = |book: &Book| (book.pinned_blocks().soft + book.pinned_blocks().hard) as usize;
    assert_eq!((marked(&book), book.pin_backlog()), (PIN_STEP_BLOCKS, 2 * PIN_STEP_BLOCKS));
    assert_eq!(book.expire_pins(Timestamp(101)), PIN_STEP_BLOCKS);
    assert_eq!(marked(&book), 2 * PIN_STEP_BLOCKS);
    assert_eq!(book.expire_pins(Timestamp(102)), PIN_STEP_BLOCKS);
    assert_eq!((marked(&book), book.expire_pins(Timestamp(103))), (numbers.len(), 0));
    book.set_pins(pins(), Timestamp(104));
    assert_eq!((book.pin_backlog(), book.expire_pins(Timestamp(105))), (0, 0));
    // Its end is processed in steps too.
    assert_eq!(book.expire_pins(Timestamp(100 * SECOND)), PIN_STEP_BLOCKS);
    assert_eq!(book.pin_backlog(), half - PIN_STEP_BLOCKS);
}

#[test]
fn pins_expiring_together_end_in_steps_and_are_remembered() {
    let count = 2 * ENDED_PINS_MAX as u64 + 3;
    let mut book = blocks(1, 0);
    let pins = || (0..count).map(|number| expiring_pin(number, PinKind::Soft, &[number], 5_000, 1));
    book.set_pins(pins(), Timestamp(0));
    let late = Timestamp(2 * SECOND);
    let left: Vec<usize> = (0..3)
        .map(|_| {
            book.expire_pins(late);
            book.pins.active.len()
        })
        .collect();
    assert_eq!(left, [ENDED_PINS_MAX + 3, 3, 0]);
    book.set_pins(pins(), late);
    assert_eq!(book.pins.active.len(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whole requests on full tiers. No soft-pinned block leaves while an unprotected one is
    /// present, no needed one while a soft-pinned one is present, and no hard-pinned one at all.
    #[test]
    fn blocks_are_evicted_in_order_of_protection(
        dram in 2u64..8, ssd in 0u64..12,
        steps in prop::collection::vec((0u64..14, prop::collection::vec((0u64..14, 0u8..3), 0..14)), 1..60),
    ) {
        let mut book = blocks(dram, ssd);
        for (now, (number, wanted)) in (0u64..).zip(&steps) {
            let of = |class| wanted.iter().filter(move |(_, of)| *of == class).map(|(block, _)| *block);
            let [waiting, easy, hard] = [0, 1, 2].map(|class| of(class).collect::<Vec<u64>>());
            // More hard pins would refuse space.
            let hard = if hard.len() as u64 + 1 < dram { hard } else { Vec::new() };
            let pins = [pin_directive(1, PinKind::Soft, &easy), pin_directive(2, PinKind::Hard, &hard)];
            book.set_pins(pins, Timestamp(now));
            set_window(&mut book, &waiting, now);
            let before = present(&book, 0..=13);
            request(&mut book, &[*number], now);
            let after = present(&book, 0..=13);
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
