//! What one call does at most, by count: everybody who fetches waits for the task that makes it.

use super::*;
use crate::id::GroupId;
use crate::tier::{
    EVICTED_BLOCKS_MAX, EXPIRED_BLOCKS_MAX, EXPIRED_LEASE_BLOCKS_MAX, LISTED_BLOCKS_MAX, QUOTA_DROPS_MAX,
};

/// Blocks 0 to `count` in DRAM, each used once at time 1.
fn many(count: u64, dram: TierLimits) -> Book {
    let mut book = book(dram, TierLimits::exact(Capacity::Blocks(0)));
    for first in (0..count).step_by(1000) {
        let numbers: Vec<u64> = (first..(first + 1000).min(count)).collect();
        request(&mut book, &numbers, 1);
    }
    assert_eq!(book.stats(Tier::Dram).blocks, count);
    book
}

fn exact(count: u64) -> TierLimits {
    TierLimits::exact(Capacity::Blocks(count))
}

#[test]
fn times_to_live_are_listed_and_enforced_in_steps() {
    let count = 2 * LISTED_BLOCKS_MAX as u64 + 10;
    let mut book = many(count, exact(count));
    book.set_ttls((0..256).map(|group| (GroupId(group), Duration::from_micros(5))));
    let listed = |book: &Book| (0..256).map(|group| book.ttls.listed(GroupId(group)).len()).sum::<usize>();
    assert_eq!(listed(&book), LISTED_BLOCKS_MAX);
    // What is used meanwhile is listed by itself, and once.
    request(&mut book, &[count - 1], 2);
    assert!(book.list_more());
    assert_eq!(listed(&book), 2 * LISTED_BLOCKS_MAX + 1);
    assert!(!book.list_more() && !book.list_more());
    assert_eq!(listed(&book) as u64, count);
    let mut left = count as usize;
    while left > 0 {
        assert_eq!(book.expire_blocks(Timestamp(100)), left.min(EXPIRED_BLOCKS_MAX));
        left = left.saturating_sub(EXPIRED_BLOCKS_MAX);
    }
    assert_eq!(book.expire_blocks(Timestamp(100)), 0);
}

#[test]
fn a_quota_that_is_lowered_takes_its_blocks_in_steps() {
    let count = 3 * QUOTA_DROPS_MAX as u64;
    let mut book = many(count, exact(count));
    book.set_quotas([(TenantId(0), 100)]);
    let left = |book: &Book| book.stats(Tier::Dram).blocks as usize;
    assert_eq!(left(&book), 2 * QUOTA_DROPS_MAX);
    // A save is refused until it is within its quota, and does no more than another step for it.
    assert!(matches!(offer(&mut book, 9, &[count], 5)[..], [Offered::Refused(RefusedBy::Quota)]));
    assert_eq!(left(&book), QUOTA_DROPS_MAX);
    assert_eq!(book.enforce_quotas(), QUOTA_DROPS_MAX - 1);
    assert_eq!((left(&book), book.enforce_quotas()), (1, 0));
}

#[test]
fn a_quota_is_enforced_also_on_what_is_listed_later() {
    let count = LISTED_BLOCKS_MAX as u64 + 2000;
    let mut book = many(count, exact(count));
    book.set_quotas([(TenantId(0), 0)]);
    while book.list_more() {}
    while book.enforce_quotas() > 0 {}
    assert_eq!(book.stats(Tier::Dram).blocks, 0);
}

#[test]
fn leases_that_nobody_released_end_in_steps() {
    let count = 2 * EXPIRED_LEASE_BLOCKS_MAX as u64;
    let mut book = many(count, exact(count));
    let each = EXPIRED_LEASE_BLOCKS_MAX as u64 / 4 + 1;
    for lease in 0..7 {
        let held: Vec<u64> = (lease * each..(lease + 1) * each).collect();
        book.fetch(asker(10 + lease), &hashes(&held), Timestamp(2)).unwrap();
    }
    let late = Timestamp(20_000_000);
    assert_eq!((book.expire(late), book.expire(late), book.expire(late), book.lease_count()), (3, 3, 1, 0));
    // One that is longer than a step ends alone.
    let all: Vec<u64> = (0..count).collect();
    book.fetch(asker(30), &hashes(&all), late).unwrap();
    book.fetch(asker(31), &hashes(&[1]), Timestamp(late.0 + 1)).unwrap();
    assert_eq!((book.expire(Timestamp(u64::MAX)), book.expire(Timestamp(u64::MAX))), (1, 1));
}

#[test]
fn a_save_evicts_a_bounded_stretch_and_what_it_needs() {
    let count = 4 * EVICTED_BLOCKS_MAX as u64;
    let marks = TierLimits { capacity: Capacity::Blocks(count), watermark_high: 1.0, watermark_low: 0.25 };
    let mut book = many(count, marks);
    assert!(matches!(offer(&mut book, 9, &[count], 5)[..], [Offered::Wanted(_)]));
    assert_eq!(book.stats(Tier::Dram).dropped_blocks, EVICTED_BLOCKS_MAX as u64);
    // A slot as large as many small ones gets them, however many.
    let bytes = TierLimits::exact(Capacity::Bytes(128 * count));
    let mut book = many(count, bytes);
    let all = [hash(count)];
    let blocks = 2 * EVICTED_BLOCKS_MAX as u32;
    let charge = Charge { frame: 100, dram: 128 * blocks, ssd: 4096 };
    let large = Offer { parent: None, first_offset_blocks: 0, hashes: &all, charge };
    assert!(matches!(book.offer(asker(9), large, Timestamp(5)).unwrap()[..], [Offered::Wanted(_)]));
    assert_eq!(book.stats(Tier::Dram).dropped_blocks, u64::from(blocks));
}

#[test]
fn what_is_held_is_named_in_steps_with_what_it_is_worth_and_nothing_else_is() {
    let mut book = blocks(8_000, 8_000);
    for number in 0..6_000 {
        request(&mut book, &[number], number + 1);
    }
    // On its way in, and not readable yet.
    offer(&mut book, 9_000, &[7_000], 9_000);
    let (mut from, mut steps, mut found) = (Some(0), 0, BTreeMap::new());
    while let Some(place) = from {
        let step = book.holdings(place, Timestamp(9_001));
        assert!(step.blocks.len() <= HOLDINGS_MAX);
        found.extend(step.blocks.iter().map(|one| (one.hash, *one)));
        (from, steps) = (step.next, steps + 1);
    }
    assert_eq!((found.len(), steps), (6_000, 2));
    assert!(found[&hash(5)].stamp < found[&hash(6)].stamp, "later uses are told apart");
    assert!(found.values().all(|one| one.worth == 1.0), "a policy that does not know takes all for certain");
    book.set_generation(Generation(1), Timestamp(9_002));
    assert!(book.holdings(0, Timestamp(9_003)).blocks.is_empty(), "what other weights made is void");
}
