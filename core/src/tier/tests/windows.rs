//! Windows of queued requests: prefetching, eviction order, and limits.

use super::*;
use crate::tier::queues::MoveQueue;
use crate::tier::window::{
    PREFETCH_SHARE_MAX, PREFETCHES_MAX, WINDOW_BLOCKS_MAX, WINDOW_REQUESTS_MAX, WINDOW_SPAN,
};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Sets the window to these requests' blocks.
fn set_window(book: &mut Book, waiting: &[&[u64]], now: u64) -> WindowSummary {
    let waiting: Vec<Vec<BlockHash>> = waiting.iter().map(|numbers| hashes(numbers)).collect();
    book.set_window(waiting.iter().map(Vec::as_slice), Timestamp(now))
}

/// Prefetches as a node does, after every move.
fn prefetch_all(book: &mut Book, now: u64) -> usize {
    let mut begun = 0;
    for _ in 0..=WINDOW_BLOCKS_MAX {
        let more = book.prefetch(Timestamp(now));
        drain(book);
        begun += more;
        if more == 0 {
            return begun;
        }
    }
    panic!("{begun} blocks prefetched without an end: blocks are thrashing");
}

fn tiers(book: &Book, numbers: std::ops::RangeInclusive<u64>) -> (Vec<u64>, Vec<u64>) {
    let of = |tier| numbers.clone().filter(|number| book.tier_of(&hash(*number)) == Some(tier)).collect();
    (of(Tier::Dram), of(Tier::Ssd))
}

/// Blocks 1 to `count`, each of its own request; the last ones are in DRAM.
fn filled(dram: u64, ssd: u64, count: u64) -> Book {
    let mut book = blocks(dram, ssd);
    (1..=count).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    book
}

#[test]
fn blocks_of_the_first_queued_requests_are_prefetched() {
    let mut book = filled(10, 30, 30);
    assert_eq!(tiers(&book, 1..=30).0, (21..=30).collect::<Vec<_>>());
    let taken = set_window(&mut book, &[&[5, 6], &[1], &[99]], 100);
    assert_eq!(taken, WindowSummary { requests: 3, blocks: 4, dram_blocks: 0, ssd_blocks: 3 });
    assert_eq!(prefetch_all(&mut book, 100), 3);
    assert_eq!(tiers(&book, 1..=30).0, [1, 5, 6, 24, 25, 26, 27, 28, 29, 30], "the oldest blocks made room");
    assert_eq!(book.prefetched_blocks(), 3);
    assert_eq!(book.fetch(requester(7), &[hash(5)], Timestamp(101)).unwrap()[0].tier, Tier::Dram);
}

#[test]
fn prefetching_leaves_the_reserve_and_fills_the_rest_from_the_head_of_the_queue() {
    let mut book = filled(10, 30, 30);
    let all: Vec<u64> = (1..=20).collect();
    set_window(&mut book, &[&all], 100);
    assert_eq!(prefetch_all(&mut book, 100), 9, "nine tenths of ten");
    assert_eq!(tiers(&book, 1..=30).0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 30]);
    // The queue is reversed: the nearest blocks are promoted, and the furthest evicted for them.
    let turned: Vec<u64> = all.into_iter().rev().collect();
    set_window(&mut book, &[&turned], 200);
    assert_eq!(prefetch_all(&mut book, 200), 9);
    assert_eq!(tiers(&book, 1..=30).0, [12, 13, 14, 15, 16, 17, 18, 19, 20, 30]);
    assert_eq!(prefetch_all(&mut book, 200), 0, "no block thrashes");
}

#[test]
fn prefetches_are_bounded_and_readers_come_first() {
    let mut book = filled(20, 60, 60);
    let all: Vec<u64> = (1..=15).collect();
    set_window(&mut book, &[&all], 100);
    assert_eq!(book.prefetch(Timestamp(100)), PREFETCHES_MAX);
    assert_eq!(book.prefetch(Timestamp(100)), 0);
    // Block 5 is queued behind four others; block 40 is only needed by the reader.
    assert_eq!(book.fetch(requester(1), &[hash(40)], Timestamp(101)).unwrap()[0].tier, Tier::Ssd);
    assert_eq!(book.fetch(requester(2), &[hash(5)], Timestamp(101)).unwrap()[0].tier, Tier::Ssd);
    let mut loads = Vec::new();
    while let Some(action) = book.next_action(MovePermits { ssd: false, ..ALL_PERMITS }) {
        if let Action::Promote { hash, .. } = action {
            loads.push(hash);
        }
    }
    assert_eq!(loads[..4], hashes(&[40, 5, 1, 2]));
    assert_eq!(loads.len(), 1 + PREFETCHES_MAX);
}

#[test]
fn awaited_block_keeps_its_queue_when_prefetched() {
    let mut book = filled(2, 8, 6);
    let held = hashes(&[5, 6]);
    book.fetch(requester(1), &held, Timestamp(100)).unwrap();
    // All of DRAM is held, so a block read from SSD keeps its tier.
    assert_eq!(book.fetch(requester(2), &[hash(1)], Timestamp(101)).unwrap()[0].tier, Tier::Ssd);
    set_window(&mut book, &[&[1]], 102);
    book.set_admitting(Tier::Dram, false);
    book.release(LeaseId(2), Timestamp(103));
    book.release(LeaseId(1), Timestamp(103));
    book.set_admitting(Tier::Dram, true);
    assert_eq!((book.prefetch(Timestamp(104)), book.window.in_flight), (1, 0));
    let Some(Action::Promote { hash: first, .. }) =
        book.next_action(MovePermits { prefetch: false, ..ALL_PERMITS })
    else {
        panic!("no load")
    };
    assert_eq!(first, hash(1));
}

#[test]
fn reader_of_a_cancelled_prefetch_uses_the_promotion_queue() {
    let mut book = filled(2, 8, 6);
    set_window(&mut book, &[&[1]], 100);
    assert_eq!(book.prefetch(Timestamp(100)), 1);
    // It is evicted before its load began, and then requested.
    assert!(offer(&mut book, 1, &[7, 8], 101).iter().all(|answer| matches!(answer, OfferOutcome::Wanted(_))));
    assert_eq!((book.window.in_flight, book.actions.queued(MoveQueue::Prefetches).len()), (0, 0));
    assert_eq!(book.fetch(requester(2), &[hash(1)], Timestamp(102)).unwrap()[0].tier, Tier::Ssd);
    let room = MovePermits { dram: true, ..MovePermits::default() };
    let loads = std::iter::from_fn(|| book.next_action(room));
    let loads: Vec<Action> = loads.filter(|action| matches!(action, Action::Promote { .. })).collect();
    assert!(matches!(loads[..], [Action::Promote { hash: first, .. }] if first == hash(1)), "{loads:?}");
}

#[test]
fn needed_blocks_are_demoted_last_from_the_queue_tail() {
    let mut book = filled(4, 10, 4);
    set_window(&mut book, &[&[2], &[4, 1]], 100);
    request(&mut book, &[11], 101);
    assert_eq!(tiers(&book, 1..=4).1, [3], "no queued request needs it");
    set_window(&mut book, &[&[2], &[4, 1], &[11]], 102);
    request(&mut book, &[12], 103);
    request(&mut book, &[13], 104);
    assert_eq!(
        tiers(&book, 1..=4),
        (vec![1, 2, 4], vec![3]),
        "12 left, which no queued request needs either"
    );
    for (lease, number) in [(200, 14), (201, 15), (202, 16)] {
        // Held, so that it cannot be evicted itself.
        let offered = offer(&mut book, lease, &[number], lease);
        assert!(matches!(offered[0], OfferOutcome::Wanted(_)), "a window refuses no space");
        drain(&mut book);
    }
    assert_eq!(tiers(&book, 1..=4), (vec![2], vec![1, 3, 4]), "1 is behind 4, and 2 is next");
}

#[test]
fn needed_blocks_are_dropped_last_from_the_queue_tail() {
    let mut book = filled(2, 4, 6);
    set_window(&mut book, &[&[1], &[2], &[3], &[4]], 100);
    for (number, gone) in [(11, 5), (12, 6), (13, 11)] {
        request(&mut book, &[number], 100 + number);
        assert_eq!(book.tier_of(&hash(gone)), None, "{gone} is the oldest unneeded block");
        assert_eq!((1..=4).filter(|number| book.tier_of(&hash(*number)).is_some()).count(), 4);
    }
    // All other blocks are held: needed blocks are evicted from the tail.
    let mut seen = Vec::new();
    for number in 21..=26 {
        let offered = offer(&mut book, number, &[number], 200);
        for answer in offered {
            let OfferOutcome::Wanted(key) = answer else { continue };
            book.commit(key, CHARGE, Timestamp(200));
        }
        drain(&mut book);
        seen.push((1..=4).filter(|number| book.tier_of(&hash(*number)).is_some()).collect::<Vec<_>>());
    }
    assert_eq!(seen, [vec![1, 2, 3, 4], vec![1, 2, 3, 4], vec![1, 2, 3], vec![1, 2], vec![1], vec![]]);
}

#[test]
fn window_expires_also_when_the_clock_is_set_back() {
    for over in [100 + WINDOW_SPAN.as_micros() as u64, 50] {
        let mut book = filled(2, 0, 2);
        set_window(&mut book, &[&[1]], 100);
        assert!(!book.expire_window(Timestamp(over.clamp(100, 99 + WINDOW_SPAN.as_micros() as u64))));
        assert_eq!(book.window_blocks(), 1);
        assert!(book.expire_window(Timestamp(over)));
        assert!(!book.expire_window(Timestamp(over)));
        assert_eq!((book.window_blocks(), book.tiers.dram.window.len()), (0, 0));
        // A formerly needed block is the newest now, as after a pin.
        request(&mut book, &[3], over + 1);
        assert_eq!(tiers(&book, 1..=3).0, [1, 3]);
    }
}

#[test]
fn a_window_is_cut_at_its_limits() {
    let mut book = blocks(4, 0);
    let one = hashes(&[7]);
    let same = vec![one.as_slice(); WINDOW_REQUESTS_MAX + 5];
    let taken = book.set_window(same, Timestamp(0));
    assert_eq!((taken.requests, taken.blocks), (WINDOW_REQUESTS_MAX, 1));
    let numbers: Vec<u64> = (0..WINDOW_BLOCKS_MAX as u64 + 10).collect();
    let many = hashes(&numbers);
    let taken = book.set_window([one.as_slice(), many.as_slice(), one.as_slice()], Timestamp(0));
    assert!(taken.blocks <= WINDOW_BLOCKS_MAX && taken.blocks + 2 > WINDOW_BLOCKS_MAX, "{taken:?}");
    assert_eq!(book.window_blocks(), taken.blocks);
}

#[test]
fn new_block_joins_the_window_that_needs_it() {
    let mut book = blocks(2, 0);
    set_window(&mut book, &[&[1]], 0);
    request(&mut book, &[1], 1);
    request(&mut book, &[2], 2);
    request(&mut book, &[3], 3);
    assert_eq!(tiers(&book, 1..=3).0, [1, 3]);
}

/// Counts insertions and moves.
struct CountingPolicy<P> {
    inner: P,
    inserted: Arc<AtomicU64>,
    moved_in: Arc<AtomicU64>,
}

impl<P: Policy> Policy for CountingPolicy<P> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.inserted.fetch_add(1, Relaxed);
        self.inner.insert(key, traits, now);
    }

    fn insert_moved(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.moved_in.fetch_add(1, Relaxed);
        self.inner.insert_moved(key, traits, now);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.inner.access(key, traits, now);
    }

    fn park(&mut self, key: BlockKey) {
        self.inner.park(key);
    }

    fn remove(&mut self, key: BlockKey) {
        self.inner.remove(key);
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.inner.victim(now, spared)
    }

    fn len(&self) -> usize {
        self.inner.len()
    }
}

#[test]
fn prefetch_is_not_a_use_for_the_policy() {
    let (inserted, moved_in) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let dram = CountingPolicy {
        inner: PlainLru::default(),
        inserted: Arc::clone(&inserted),
        moved_in: Arc::clone(&moved_in),
    };
    let limits = |blocks| TierLimits::exact(Capacity::Blocks(blocks));
    let limits = BookLimits {
        dram: limits(4),
        ssd: limits(12),
        lease: Duration::from_secs(10),
        leases_max: 64,
        seed: 1,
    };
    let mut book = Book::new(&limits, Box::new(dram), Box::<PlainLru>::default());
    (1..=8).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    let before = inserted.load(Relaxed);
    set_window(&mut book, &[&[1, 2]], 100);
    assert_eq!(prefetch_all(&mut book, 100), 2);
    assert_eq!((inserted.load(Relaxed), moved_in.load(Relaxed)), (before, 2));
}

#[test]
fn prefetch_needing_a_demotion_waits_for_write_budget() {
    let mut book = filled(4, 12, 8);
    set_window(&mut book, &[&[1, 2]], 100);
    book.set_demotions_max(0);
    assert_eq!(prefetch_all(&mut book, 100), 0);
    assert_eq!(tiers(&book, 1..=8), ((5..=8).collect(), (1..=4).collect()), "no block moved or was dropped");
    book.set_demotions_max(1);
    assert_eq!(book.prefetch(Timestamp(100)), 1, "one block may be written, and one demotion is queued");
    assert_eq!(book.prefetch(Timestamp(100)), 0);
    // A fetch takes the space it needs.
    assert_eq!(book.fetch(requester(1), &[hash(3)], Timestamp(101)).unwrap().len(), 1);
    assert_eq!(book.tier_state(Tier::Dram).stats.promoted_blocks, 2);
    let mut roomy = filled(10, 12, 3);
    roomy.set_demotions_max(0);
    let held = hashes(&[1, 2, 3]);
    roomy.set_window([held.as_slice()], Timestamp(4));
    assert_eq!(roomy.prefetch(Timestamp(4)), 0, "all blocks are in DRAM");
}

#[test]
fn needed_hard_pinned_block_is_prefetched() {
    let mut book = filled(4, 12, 8);
    pin(&mut book, &[1], Timestamp(10));
    set_window(&mut book, &[&[2, 1]], 100);
    assert_eq!(prefetch_all(&mut book, 100), 2);
    assert_eq!(tiers(&book, 1..=8).0, [1, 2, 7, 8]);
    assert_eq!(book.pinned_blocks().hard, 1);
    // It is held in DRAM from here on, as after a fetch; the window's end does not change that.
    set_window(&mut book, &[], 101);
    (21..=24).for_each(|number| assert_eq!(request(&mut book, &[number], number + 100), 0));
    assert!(tiers(&book, 1..=8).0.contains(&1));
}

#[test]
fn quota_takes_precedence_over_a_window() {
    let mut book = filled(4, 0, 3);
    set_window(&mut book, &[&[1, 2, 3]], 10);
    book.set_quotas([(TenantId(0), 200)]);
    assert_eq!(tiers(&book, 1..=3).0, [2, 3]);
}

#[test]
fn prefetching_evicts_no_block_without_ssd() {
    let mut book = filled(4, 10, 8);
    book.set_admitting(Tier::Ssd, false);
    set_window(&mut book, &[&[1, 2]], 10);
    assert_eq!(prefetch_all(&mut book, 10), 0);
    assert_eq!(tiers(&book, 1..=8), ((5..=8).collect(), (1..=4).collect()));
}

#[test]
fn prefetch_between_watermarks_replaces_one_block_without_thrashing() {
    let dram = TierLimits { capacity: Capacity::Blocks(1000), watermark_high: 0.95, watermark_low: 0.9 };
    let mut book = book(dram, TierLimits::exact(Capacity::Blocks(3000)));
    (1..=2000).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    let held: Vec<u64> = (1701..=2000).collect();
    assert_eq!(book.fetch(requester(9000), &hashes(&held), Timestamp(3000)).unwrap().len(), 300);
    drain(&mut book);
    let waiting: Vec<u64> = (1..=1500).collect();
    set_window(&mut book, &[&waiting], 3000);
    prefetch_all(&mut book, 3000);
    let before = (book.stats(Tier::Dram), book.prefetched_blocks());
    let saves = 200;
    for now in 4000..4000 + saves {
        request(&mut book, &[now], now);
        prefetch_all(&mut book, now);
    }
    // Each save evicts one block, and is then replaced by a needed one; evictions come in batches
    // of a twentieth.
    let demoted = book.stats(Tier::Dram).demoted_blocks - before.0.demoted_blocks;
    assert!(demoted <= 2 * saves + 50, "{demoted} blocks demoted by {saves} saves");
    let prefetched = book.prefetched_blocks() - before.1;
    assert!(prefetched <= saves + 50, "{prefetched} blocks prefetched after {saves} saves");
    assert!(
        (1..=550).all(|number| book.tier_of(&hash(number)) == Some(Tier::Dram)),
        "the nearest blocks are in DRAM"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whole requests on full tiers: no needed block leaves while an unneeded one is present, and
    /// the furthest needed one leaves first.
    #[test]
    fn unneeded_blocks_are_evicted_before_needed_ones(
        dram in 2u64..8, ssd in 0u64..12,
        steps in prop::collection::vec((0u64..40, prop::collection::vec(0u64..40, 0..10)), 1..60),
    ) {
        let mut book = blocks(dram, ssd);
        for (now, (number, waiting)) in (0u64..).zip(&steps) {
            set_window(&mut book, &[waiting], now);
            let (share, used) = (book.tiers.dram.limits.share(PREFETCH_SHARE_MAX), book.window.dram_used);
            prefetch_all(&mut book, now);
            prop_assert!(book.window.dram_used <= share.max(used), "the reserve is free");
            let there = |book: &Book| (0..40).filter(|n| book.tier_of(&hash(*n)).is_some()).collect::<Vec<u64>>();
            let before = there(&book);
            request(&mut book, &[*number], now);
            let after = there(&book);
            let near = |number: &u64| waiting.iter().position(|waits| waits == number).unwrap_or(usize::MAX);
            let (kept, gone): (Vec<u64>, Vec<u64>) = before.iter().partition(|number| after.contains(number));
            // The requested block was held meanwhile.
            let furthest = kept.iter().filter(|kept| *kept != number).map(near).max().unwrap_or(0);
            prop_assert!(gone.iter().all(|gone| furthest <= near(gone)),
                "{gone:?} left at {now}: before {before:?}, waiting {waiting:?}");
        }
    }
}
