//! Upper bounds of the work in one call, because all readers wait for the task that makes it.

use super::*;
use crate::id::TtlGroupId;
use crate::tier::{
    EVICTED_BLOCKS_MAX, EXPIRED_BLOCKS_MAX, EXPIRED_LEASE_BLOCKS_MAX, LISTED_BLOCKS_MAX, QUOTA_DROPS_MAX,
};

/// Blocks 0 to `count` in DRAM, each used once at time 1.
fn filled_book(count: u64, dram: TierLimits) -> Book {
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
    let mut book = filled_book(count, exact(count));
    book.set_ttls((0..256).map(|group| (TtlGroupId(group), Duration::from_micros(5))));
    let listed = |book: &Book| (0..256).map(|group| book.ttls.listed(TtlGroupId(group)).len()).sum::<usize>();
    assert_eq!(listed(&book), LISTED_BLOCKS_MAX);
    // A block used meanwhile is listed by that use, once.
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
fn lowered_quota_drops_in_steps() {
    let count = 3 * QUOTA_DROPS_MAX as u64;
    let mut book = filled_book(count, exact(count));
    book.set_quotas([(TenantId(0), 100)]);
    let left = |book: &Book| book.stats(Tier::Dram).blocks as usize;
    assert_eq!(left(&book), 2 * QUOTA_DROPS_MAX);
    // A save is refused until the tenant is within its quota, and drops at most one more step.
    assert!(matches!(offer(&mut book, 9, &[count], 5)[..], [OfferOutcome::Refused(RefusalReason::Quota)]));
    assert_eq!(left(&book), QUOTA_DROPS_MAX);
    assert_eq!(book.enforce_quotas(), QUOTA_DROPS_MAX - 1);
    assert_eq!((left(&book), book.enforce_quotas()), (1, 0));
}

#[test]
fn quota_is_enforced_on_blocks_listed_later() {
    let count = LISTED_BLOCKS_MAX as u64 + 2000;
    let mut book = filled_book(count, exact(count));
    book.set_quotas([(TenantId(0), 0)]);
    while book.list_more() {}
    while book.enforce_quotas() > 0 {}
    assert_eq!(book.stats(Tier::Dram).blocks, 0);
}

#[test]
fn unreleased_leases_expire_in_steps() {
    let count = 2 * EXPIRED_LEASE_BLOCKS_MAX as u64;
    let mut book = filled_book(count, exact(count));
    let each = EXPIRED_LEASE_BLOCKS_MAX as u64 / 4 + 1;
    for lease in 0..7 {
        let held: Vec<u64> = (lease * each..(lease + 1) * each).collect();
        book.fetch(requester(10 + lease), &hashes(&held), Timestamp(2)).unwrap();
    }
    let late = Timestamp(20_000_000);
    assert_eq!((book.expire(late), book.expire(late), book.expire(late), book.lease_count()), (3, 3, 1, 0));
    // A lease longer than a step ends alone.
    let all: Vec<u64> = (0..count).collect();
    book.fetch(requester(30), &hashes(&all), late).unwrap();
    book.fetch(requester(31), &hashes(&[1]), Timestamp(late.0 + 1)).unwrap();
    assert_eq!((book.expire(Timestamp(u64::MAX)), book.expire(Timestamp(u64::MAX))), (1, 1));
}

#[test]
fn save_evicts_a_bounded_batch_plus_its_need() {
    let count = 4 * EVICTED_BLOCKS_MAX as u64;
    let marks = TierLimits { capacity: Capacity::Blocks(count), watermark_high: 1.0, watermark_low: 0.25 };
    let mut book = filled_book(count, marks);
    assert!(matches!(offer(&mut book, 9, &[count], 5)[..], [OfferOutcome::Wanted(_)]));
    assert_eq!(book.stats(Tier::Dram).dropped_blocks, EVICTED_BLOCKS_MAX as u64);
    // A slot as large as many small ones evicts all of them.
    let bytes = TierLimits::exact(Capacity::Bytes(128 * count));
    let mut book = filled_book(count, bytes);
    let all = [hash(count)];
    let blocks = 2 * EVICTED_BLOCKS_MAX as u32;
    let charge = Charge { frame: 100, dram: 128 * blocks, ssd: 4096 };
    let large = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge };
    assert!(matches!(book.offer(requester(9), large, Timestamp(5)).unwrap()[..], [OfferOutcome::Wanted(_)]));
    assert_eq!(book.stats(Tier::Dram).dropped_blocks, u64::from(blocks));
}

#[test]
fn holdings_are_listed_in_pages_with_reuse_prob() {
    let mut book = blocks(8_000, 8_000);
    for number in 0..6_000 {
        request(&mut book, &[number], number + 1);
    }
    // A block being written is not readable yet.
    offer(&mut book, 9_000, &[7_000], 9_000);
    let (mut from, mut steps, mut found) = (Some(0), 0, BTreeMap::new());
    while let Some(place) = from {
        let step = book.holdings(place, Timestamp(9_001));
        assert!(step.blocks.len() <= HOLDINGS_MAX);
        found.extend(step.blocks.iter().map(|one| (one.hash, *one)));
        (from, steps) = (step.next, steps + 1);
    }
    assert_eq!((found.len(), steps), (6_000, 2));
    assert!(found[&hash(5)].stamp < found[&hash(6)].stamp, "later uses have larger stamps");
    assert!(
        found.values().all(|one| one.reuse_prob == 1.0),
        "a policy without estimates reports probability 1"
    );
    book.set_generation(Generation(1), Timestamp(9_002));
    assert!(book.holdings(0, Timestamp(9_003)).blocks.is_empty(), "blocks of other weights are invalidated");
}
