//! One situation per test, written by hand.

use super::*;
use crate::index::command::Change;

fn wanted(answers: &[OfferOutcome]) -> Vec<BlockKey> {
    answers
        .iter()
        .filter_map(|answer| if let OfferOutcome::Wanted(key) = answer { Some(*key) } else { None })
        .collect()
}

#[test]
fn a_block_is_readable_only_after_its_commit() {
    let mut book = blocks(4, 0);
    let keys = wanted(&offer(&mut book, 1, &[1], 0));
    assert!(book.fetch(requester(2), &[hash(1)], Timestamp(0)).unwrap().is_empty());
    assert!(book.take_changes().is_empty());
    book.commit(keys[0], CHARGE, Timestamp(0));
    assert_eq!(book.fetch(requester(2), &[hash(1)], Timestamp(0)).unwrap().len(), 1);
    let stored = Change::Stored { parent: None, blocks: vec![hash(1)], tier: Tier::Dram };
    assert_eq!(book.take_changes(), vec![stored]);
}

#[test]
fn aborted_write_leaves_no_state() {
    let mut book = blocks(4, 0);
    let keys = wanted(&offer(&mut book, 1, &[1], 0));
    book.abort(keys[0]);
    assert_eq!(book.stats(Tier::Dram).blocks, 0);
    assert_eq!(book.tenants().count(), 0);
    assert_eq!(wanted(&offer(&mut book, 1, &[1], 0)).len(), 1);
    book.release(LeaseId(1), Timestamp(1));
}

#[test]
fn blocks_of_a_running_request_are_never_victims() {
    let mut book = blocks(2, 0);
    for key in wanted(&offer(&mut book, 1, &[1, 2], 0)) {
        book.commit(key, CHARGE, Timestamp(0));
    }
    let answers = offer(&mut book, 2, &[3], 0);
    assert_eq!(answers, vec![OfferOutcome::Refused(RefusalReason::Full)]);
    book.release(LeaseId(1), Timestamp(1));
    assert_eq!(wanted(&offer(&mut book, 2, &[3], 1)).len(), 1);
    // The tail was evicted, the head stayed.
    assert!(book.tier_of(&hash(1)).is_some());
    assert!(book.tier_of(&hash(2)).is_none());
}

#[test]
fn unreleased_lease_expires_like_a_release() {
    let mut book = blocks(1, 0);
    for key in wanted(&offer(&mut book, 1, &[1], 0)) {
        book.commit(key, CHARGE, Timestamp(0));
    }
    assert_eq!(book.expire(Timestamp(9_999_999)), 0);
    assert_eq!(book.expire(Timestamp(10_000_000)), 1);
    assert_eq!(wanted(&offer(&mut book, 2, &[2], 10_000_001)).len(), 1);
}

#[test]
fn renewed_lease_continues_and_ended_one_does_not_return() {
    let mut book = blocks(1, 0);
    for key in wanted(&offer(&mut book, 1, &[1], 0)) {
        book.commit(key, CHARGE, Timestamp(0));
    }
    book.renew(LeaseId(1), Timestamp(9_000_000));
    book.renew(LeaseId(2), Timestamp(9_000_000));
    assert_eq!(book.lease_count(), 1, "renewing an unknown lease creates none");
    assert_eq!(book.expire(Timestamp(18_999_999)), 0);
    assert_eq!(offer(&mut book, 3, &[2], 18_999_999), [OfferOutcome::Refused(RefusalReason::Full)]);
    assert_eq!(book.expire(Timestamp(19_000_000)), 1);
    book.renew(LeaseId(1), Timestamp(19_000_000));
    assert_eq!(wanted(&offer(&mut book, 3, &[2], 19_000_001)).len(), 1);
}

#[test]
fn a_pinned_block_stays_until_unpinned() {
    let mut book = blocks(1, 0);
    request(&mut book, &[1], 1);
    pin(&mut book, &[1], Timestamp(2));
    assert_eq!(book.pinned_blocks(), PinnedBlocks { hard: 1, soft: 0 });
    request(&mut book, &[2], 2);
    assert_eq!(book.tier_of(&hash(1)), Some(Tier::Dram));
    pin(&mut book, &[], Timestamp(2));
    request(&mut book, &[2], 3);
    assert_eq!(book.tier_of(&hash(1)), None);
}

#[test]
fn a_pin_holds_a_block_that_comes_later() {
    let mut book = blocks(1, 0);
    pin(&mut book, &[1], Timestamp(2));
    request(&mut book, &[1], 1);
    request(&mut book, &[2], 2);
    assert_eq!(book.tier_of(&hash(1)), Some(Tier::Dram));
}

#[test]
fn tenant_over_quota_loses_its_own_coldest_blocks() {
    let mut book = blocks(10, 0);
    request(&mut book, &[1], 1);
    book.set_quotas([(TenantId(7), 200)]);
    for number in [11, 12, 13] {
        let mut who = requester(number);
        who.tenant = TenantId(7);
        let all = [hash(number)];
        let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
        for key in wanted(&book.offer(who, offer, Timestamp(number)).unwrap()) {
            book.commit(key, CHARGE, Timestamp(number));
        }
        book.release(LeaseId(number), Timestamp(number));
    }
    assert_eq!(book.tier_of(&hash(11)), None);
    assert!(book.tier_of(&hash(1)).is_some());
    assert_eq!(book.tenants().find(|use_| use_.0 == TenantId(7)), Some((TenantId(7), 200, Some(200))));
}

#[test]
fn save_above_a_fully_held_quota_is_refused() {
    let mut book = blocks(10, 0);
    book.set_quotas([(TenantId(0), 150)]);
    let answers = offer(&mut book, 1, &[1, 2], 0);
    assert!(
        matches!(answers[..], [OfferOutcome::Wanted(_), OfferOutcome::Refused(RefusalReason::Quota)]),
        "{answers:?}"
    );
}

#[test]
fn demotion_reverted_before_its_start_moves_no_bytes() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    let keys = wanted(&offer(&mut book, 2, &[2], 2));
    // Block 1 is assigned to SSD, but no action ran yet; block 2 is aborted and 1 is read again.
    book.abort(keys[0]);
    let reach = book.fetch(requester(3), &[hash(1)], Timestamp(3)).unwrap();
    assert_eq!(reach[0].tier, Tier::Dram);
    assert_eq!(book.next_action(ALL_PERMITS), None);
    assert_eq!(book.tier_of(&hash(1)), Some(Tier::Dram));
}

#[test]
fn a_block_read_while_it_is_demoted_is_served_from_dram_and_stays() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    let keys = wanted(&offer(&mut book, 2, &[2], 2));
    let Some(Action::Demote { key, .. }) = book.next_action(ALL_PERMITS) else { panic!("no demotion") };
    book.abort(keys[0]);
    assert_eq!(book.fetch(requester(3), &[hash(1)], Timestamp(3)).unwrap()[0].tier, Tier::Dram);
    book.on_moved(key, Tier::Ssd);
    assert_eq!(
        book.next_action(ALL_PERMITS),
        Some(Action::DropSsd { key, hash: hash(1), generation: Generation(0) })
    );
    assert_eq!(book.tier_of(&hash(1)), Some(Tier::Dram));
}

#[test]
fn a_failed_write_to_ssd_drops_the_block_when_dram_is_full() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    book.take_changes();
    for key in wanted(&offer(&mut book, 2, &[2], 2)) {
        book.commit(key, CHARGE, Timestamp(2));
    }
    let Some(Action::Demote { key, .. }) = book.next_action(ALL_PERMITS) else { panic!("no demotion") };
    book.on_move_failed(key, Tier::Ssd, Timestamp(3));
    assert_eq!(book.tier_of(&hash(1)), None);
    assert_eq!(book.next_action(ALL_PERMITS), Some(Action::DropDram { key }));
    assert_eq!(book.stats(Tier::Ssd).blocks, 0);
}

#[test]
fn a_failed_read_drops_the_block_and_says_so() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    request(&mut book, &[2], 2);
    book.take_changes();
    assert_eq!(book.fetch(requester(3), &[hash(1)], Timestamp(3)).unwrap()[0].tier, Tier::Ssd);
    let promoted = std::iter::from_fn(|| book.next_action(MovePermits { ssd: false, ..ALL_PERMITS }))
        .find_map(|action| if let Action::Promote { key, .. } = action { Some(key) } else { None });
    book.on_move_failed(promoted.unwrap(), Tier::Dram, Timestamp(4));
    let dropped = Change::Dropped {
        blocks: vec![hash(1)],
        tier: Tier::Ssd,
        cause: crate::index::command::DropCause::Failed,
    };
    assert!(book.take_changes().contains(&dropped));
    assert!(book.fetch(requester(4), &[hash(1)], Timestamp(5)).unwrap().is_empty());
    book.release(LeaseId(3), Timestamp(6));
}

#[test]
fn an_ssd_block_is_read_even_when_dram_is_all_held() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    request(&mut book, &[2], 2);
    assert_eq!(book.fetch(requester(3), &[hash(2)], Timestamp(3)).unwrap().len(), 1);
    assert_eq!(book.fetch(requester(4), &[hash(1)], Timestamp(4)).unwrap()[0].tier, Tier::Ssd);
    let Some(Action::Promote { key, .. }) = book.next_action(ALL_PERMITS) else { panic!("no load") };
    book.on_moved(key, Tier::Dram);
    assert_eq!(book.next_action(ALL_PERMITS), Some(Action::DropDram { key }));
    assert_eq!(book.tier_of(&hash(1)), Some(Tier::Ssd));
}

#[test]
fn dram_drops_blocks_when_ssd_stops_admitting() {
    let mut book = blocks(1, 4);
    book.set_admitting(Tier::Ssd, false);
    request(&mut book, &[1], 1);
    request(&mut book, &[2], 2);
    assert_eq!(book.tier_of(&hash(1)), None);
    assert_eq!(book.stats(Tier::Ssd).blocks, 0);
}

#[test]
fn recovered_blocks_are_announced_and_readable() {
    let mut book = blocks(2, 2);
    for (number, parent) in [(1, None), (2, Some(hash(1))), (3, Some(hash(2)))] {
        let traits =
            BlockTraits { offset_blocks: u32::try_from(number).unwrap() - 1, ..BlockTraits::default() };
        let found =
            RecoveredBlock { hash: hash(number), parent, tenant: TenantId(0), traits, charge: CHARGE };
        assert_eq!(book.restore(found, Timestamp(0)).is_some(), number < 3);
    }
    let stored = Change::Stored { parent: None, blocks: hashes(&[1, 2]), tier: Tier::Ssd };
    assert_eq!(book.announce_all(), vec![stored]);
    assert_eq!(request(&mut book, &[1, 2], 1), 2);
    assert_eq!(book.tier_of(&hash(1)), Some(Tier::Dram));
}

#[test]
fn leases_above_the_limit_are_refused() {
    let mut book = blocks(4, 0);
    for lease in 0..64 {
        offer(&mut book, lease, &[1], 0);
    }
    let all = [hash(1)];
    let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    let full = LeasesFull { limit: 64, held: 64, own: 0 };
    assert_eq!(book.offer(requester(64), offer, Timestamp(0)), Err(full));
    assert!(book.offer(requester(3), offer, Timestamp(0)).is_ok());
}

#[test]
fn caller_without_releases_leaves_half_of_the_remaining_leases() {
    let mut book = blocks(4, 0);
    let all = [hash(1)];
    let mut next = 0;
    // Takes all leases it gets and releases none.
    let mut taken = |book: &mut Book, caller: u64, now: u64| {
        (0..)
            .take_while(|_| {
                next += 1;
                let who = Requester { caller: CallerId(caller), ..requester(next) };
                let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
                book.offer(who, offer, Timestamp(now)).is_ok()
            })
            .count()
    };
    assert_eq!([1, 2, 3, 1, 4].map(|caller| taken(&mut book, caller, 0)), [32, 16, 8, 0, 4]);
    let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    let known = Requester { caller: CallerId(1), ..requester(1) };
    assert!(book.offer(known, offer, Timestamp(0)).is_ok(), "its existing lease continues");
    book.release(LeaseId(1), Timestamp(0));
    assert_eq!(taken(&mut book, 1, 0), 0, "it has more than remain free");
    assert_eq!(taken(&mut book, 5, 0), 3);
    let later = 11_000_000;
    book.expire(Timestamp(later));
    assert_eq!(book.lease_count(), 0);
    assert_eq!(taken(&mut book, 1, later), 32, "expired leases count for no caller");
}

#[test]
fn watermarks_evict_a_batch() {
    let dram = TierLimits { capacity: Capacity::Bytes(128 * 10), watermark_high: 0.9, watermark_low: 0.5 };
    let mut book = book(dram, TierLimits::exact(Capacity::Bytes(0)));
    for number in 1..=9 {
        request(&mut book, &[number], number);
    }
    assert_eq!(book.stats(Tier::Dram).blocks, 9);
    request(&mut book, &[10], 10);
    assert_eq!(book.stats(Tier::Dram).blocks, 5);
    assert_eq!(book.stats(Tier::Dram).used_bytes, 5 * 128);
}

#[test]
fn shorter_frame_is_charged_its_actual_size() {
    let mut book = book(TierLimits::exact(Capacity::Bytes(256)), TierLimits::exact(Capacity::Bytes(0)));
    book.set_quotas([(TenantId(0), 200)]);
    let keys = wanted(&offer(&mut book, 1, &[1], 0));
    book.commit(keys[0], Charge { frame: 40, dram: 64, ssd: 4096 }, Timestamp(0));
    assert_eq!(book.meta(keys[0]).map(|meta| (meta.traits.bytes, meta.charge.frame)), Some((40, 40)));
    assert_eq!(book.stats(Tier::Dram).used_bytes, 64);
    assert_eq!(book.tenants().next(), Some((TenantId(0), 40, Some(200))));
    assert_eq!(wanted(&offer(&mut book, 1, &[2], 0)).len(), 1, "the difference is free again");
}

#[test]
fn first_refusal_of_an_offer_applies_to_the_rest() {
    let mut book = blocks(2, 0);
    request(&mut book, &[1], 1);
    let answers = offer(&mut book, 2, &[2, 3, 4, 1, 5], 2);
    assert!(matches!(answers[0], OfferOutcome::Wanted(_)));
    let full = OfferOutcome::Refused(RefusalReason::Full);
    assert_eq!(answers[1..], [full, full, OfferOutcome::Present, full]);
}

/// A policy that counts victim searches.
#[derive(Default)]
struct VictimCountingPolicy(PlainLru, std::sync::Arc<std::sync::atomic::AtomicUsize>);

impl Policy for VictimCountingPolicy {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.0.insert(key, traits, now);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.0.access(key, traits, now);
    }

    fn park(&mut self, key: BlockKey) {
        self.0.park(key);
    }

    fn remove(&mut self, key: BlockKey) {
        self.0.remove(key);
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.0.victim(now, spared)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn offer_to_a_full_node_asks_the_policy_once() {
    let asked = std::sync::Arc::<std::sync::atomic::AtomicUsize>::default();
    let dram = TierLimits::exact(Capacity::Blocks(8));
    let ssd = TierLimits::exact(Capacity::Blocks(0));
    let limits = BookLimits { dram, ssd, lease: Duration::from_secs(10), leases_max: 64, seed: 1 };
    let counting = VictimCountingPolicy(PlainLru::default(), std::sync::Arc::clone(&asked));
    let mut book = Book::new(&limits, Box::new(counting), Box::<PlainLru>::default());
    let held: Vec<u64> = (1..=8).collect();
    for key in wanted(&offer(&mut book, 1, &held, 0)) {
        book.commit(key, CHARGE, Timestamp(0));
    }
    let more: Vec<u64> = (100..200).collect();
    let answers = offer(&mut book, 2, &more, 1);
    assert!(answers.iter().all(|answer| *answer == OfferOutcome::Refused(RefusalReason::Full)));
    assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn quota_enforcement_asks_no_policy() {
    let asked = std::sync::Arc::<std::sync::atomic::AtomicUsize>::default();
    let dram = TierLimits::exact(Capacity::Blocks(100));
    let ssd = TierLimits::exact(Capacity::Blocks(0));
    let limits = BookLimits { dram, ssd, lease: Duration::from_secs(10), leases_max: 64, seed: 1 };
    let counting = VictimCountingPolicy(PlainLru::default(), std::sync::Arc::clone(&asked));
    let mut book = Book::new(&limits, Box::new(counting), Box::<PlainLru>::default());
    for number in 0..50 {
        request(&mut book, &[number], number);
    }
    book.set_quotas([(TenantId(7), 300)]);
    for number in 100..110 {
        let all = [hash(number)];
        let who = Requester { tenant: TenantId(7), ..requester(number) };
        let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
        for key in wanted(&book.offer(who, offer, Timestamp(number)).unwrap()) {
            book.commit(key, CHARGE, Timestamp(number));
        }
        book.release(LeaseId(number), Timestamp(number));
    }
    let left: Vec<u64> = (100..110).filter(|number| book.tier_of(&hash(*number)).is_some()).collect();
    assert_eq!(left, [107, 108, 109], "the tenant's coldest blocks left first");
    assert!((0..50).all(|number| book.tier_of(&hash(number)).is_some()));
    assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 0, "no policy was asked");
}

#[test]
fn new_quota_drops_existing_blocks_coldest_first() {
    let mut book = blocks(10, 0);
    for number in [3, 1, 2] {
        request(&mut book, &[number], number);
    }
    request(&mut book, &[3], 9);
    book.set_quotas([(TenantId(0), 100)]);
    let left: Vec<u64> = (1..=3).filter(|number| book.tier_of(&hash(*number)).is_some()).collect();
    assert_eq!(left, [3]);
}

#[test]
fn quota_lowered_during_a_lease_applies_at_release() {
    let mut book = blocks(10, 0);
    for key in wanted(&offer(&mut book, 1, &[1, 2, 3], 0)) {
        book.commit(key, CHARGE, Timestamp(0));
    }
    book.set_quotas([(TenantId(0), 100)]);
    assert_eq!(book.tenants().next(), Some((TenantId(0), 300, Some(100))));
    book.release(LeaseId(1), Timestamp(1));
    assert_eq!(book.tenants().next(), Some((TenantId(0), 100, Some(100))));
    assert!(book.tier_of(&hash(1)).is_some(), "the head stayed");
}

#[test]
fn aborted_blocks_leave_their_lease() {
    let mut book = blocks(4, 0);
    for round in 0..50 {
        for key in wanted(&offer(&mut book, 1, &[round], 0)) {
            book.abort(key);
        }
    }
    assert_eq!(book.leases.held_by(LeaseId(1)), 0);
}

#[test]
fn last_offset_does_not_overflow() {
    let mut book = blocks(4, 0);
    let all = hashes(&[1, 2]);
    let offer = SaveOffer { parent: None, first_offset_blocks: u32::MAX, hashes: &all, charge: CHARGE };
    assert_eq!(wanted(&book.offer(requester(1), offer, Timestamp(0)).unwrap()).len(), 2);
}

#[test]
fn delayed_move_is_queued_again() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    offer(&mut book, 2, &[2], 2);
    let Some(Action::Demote { key, .. }) = book.next_action(ALL_PERMITS) else { panic!("no demotion") };
    book.on_move_delayed(key, Tier::Ssd);
    assert_eq!(book.next_action(ALL_PERMITS), Some(Action::Demote { key, hash: hash(1) }));
}

#[test]
fn bytes_to_load_are_known_before_leasing() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    request(&mut book, &[2], 2);
    let found = book.readable_prefix(TenantId(0), &hashes(&[2, 1, 9]));
    assert_eq!(book.bytes_to_load(&found), 100, "block 2 is in DRAM, 9 is absent");
    assert_eq!(book.lease_count(), 0);
}

#[test]
fn block_events_are_counted_by_tier_and_category() {
    let mut book = blocks(2, 1);
    request(&mut book, &[1, 2], 0);
    request(&mut book, &[1], 3_000_000);
    request(&mut book, &[3], 10_000_000);
    let class = |book: &Book, tier| *book.counters(tier).categories().next().unwrap().1;
    let dram = class(&book, Tier::Dram);
    assert_eq!((dram.hits, dram.reuse_gap.mean_us()), (1, Some(3_000_000)));
    assert_eq!(dram.removals, [1, 0, 0, 0, 0], "2 was demoted to SSD");
    assert_eq!(dram.age_at_eviction.mean_us(), Some(10_000_000));
    // 2 is read from SSD, which demotes 1.
    assert_eq!(request(&mut book, &[2], 11_000_000), 1);
    assert_eq!(class(&book, Tier::Ssd).hits, 1);
    request(&mut book, &[4], 12_000_000);
    assert_eq!(class(&book, Tier::Ssd).removals, [0, 1, 0, 0, 0], "1 was dropped for 3");
    book.set_quotas([(TenantId(0), 100)]);
    assert_eq!(class(&book, Tier::Ssd).removals[RemovalReason::Quota as usize], 1);
    assert_eq!(class(&book, Tier::Dram).removals[RemovalReason::Quota as usize], 1);
}

#[test]
fn repeated_requests_of_a_lease_are_one_use() {
    let mut book = blocks(4, 4);
    request(&mut book, &[1, 2, 3], 1);
    let fetch = |book: &mut Book, lease, numbers: &[u64], now| {
        let reached = book.fetch(requester(lease), &hashes(numbers), Timestamp(now)).unwrap();
        reached.iter().map(|reach| reach.is_first_use).collect::<Vec<_>>()
    };
    assert_eq!(fetch(&mut book, 7, &[1, 2], 1_000_001), [true, true]);
    assert_eq!(fetch(&mut book, 7, &[1, 2, 3], 2_000_001), [false, false, true]);
    assert_eq!(fetch(&mut book, 7, &[1, 2, 3], 3_000_001), [false; 3]);
    let dram = *book.counters(Tier::Dram).categories().next().unwrap().1;
    assert_eq!((dram.hits, dram.reuse_gap.count(), dram.reuse_gap.mean_us()), (3, 3, Some(1_333_333)));
    // Another request's use is a separate one, and so is a use by a new lease with the same number.
    assert_eq!(fetch(&mut book, 8, &[1], 4_000_000), [true]);
    book.release(LeaseId(7), Timestamp(5_000_000));
    assert_eq!(fetch(&mut book, 7, &[1], 6_000_000), [true]);
    // A request's own saved block is no hit.
    for key in wanted(&offer(&mut book, 9, &[20], 7_000_000)) {
        book.commit(key, CHARGE, Timestamp(7_000_000));
    }
    assert_eq!(fetch(&mut book, 9, &[20], 8_000_000), [false]);
    // A present block in an offer is no hit yet, but a later fetch of the same request is one.
    let hits = |book: &Book| book.counters(Tier::Dram).categories().map(|(_, class)| class.hits).sum::<u64>();
    let before = hits(&book);
    assert!(wanted(&offer(&mut book, 10, &[1, 20], 9_000_000)).is_empty());
    assert_eq!(hits(&book), before);
    assert_eq!(fetch(&mut book, 10, &[1], 9_000_001), [true]);
    assert!(wanted(&offer(&mut book, 10, &[1, 20], 9_000_002)).is_empty());
    assert_eq!(fetch(&mut book, 10, &[1], 9_000_003), [false]);
    assert_eq!(hits(&book), before + 1);
}

#[test]
fn miss_curve_predicts_hits_of_larger_tiers() {
    let mut book = blocks(2, 1);
    for round in 0..50 {
        for number in 1..=6 {
            request(&mut book, &[number], 10 * round + number);
        }
    }
    let hits = |tier| book.counters(tier).categories().map(|(_, class)| class.hits).sum::<u64>();
    assert_eq!(hits(Tier::Dram) + hits(Tier::Ssd), 0, "a loop of six never hits a cache of three");
    assert_eq!(book.miss_curve().hit_rate(3), 0.0);
    assert!(book.miss_curve().hit_rate(8) > 0.97, "{}", book.miss_curve().hit_rate(8));
}

#[test]
fn block_with_a_lost_ssd_copy_is_withdrawn() {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    wanted(&offer(&mut book, 2, &[2], 2));
    let Some(Action::Demote { key, .. }) = book.next_action(ALL_PERMITS) else { panic!("no demotion") };
    book.on_ssd_copy_lost(key);
    assert!(book.tier_of(&hash(1)).is_some(), "a block being demoted is still in DRAM");
    book.on_moved(key, Tier::Ssd);
    while book.next_action(ALL_PERMITS).is_some() {}
    book.take_changes();
    book.on_ssd_copy_lost(key);
    assert_eq!(book.tier_of(&hash(1)), None);
    let dropped = Change::Dropped {
        blocks: vec![hash(1)],
        tier: Tier::Ssd,
        cause: crate::index::command::DropCause::Failed,
    };
    assert_eq!(book.take_changes(), vec![dropped]);
    assert_eq!(book.stats(Tier::Ssd).blocks, 0);
}

/// A book with its only DRAM slot held by block 2, while block 1 on SSD is being read.
fn reading_beside_a_held_slot() -> (Book, BlockKey) {
    let mut book = blocks(1, 4);
    request(&mut book, &[1], 1);
    request(&mut book, &[2], 2);
    book.fetch(requester(100), &hashes(&[2]), Timestamp(3)).unwrap();
    book.fetch(requester(101), &hashes(&[1]), Timestamp(4)).unwrap();
    let Some(Action::Promote { key, .. }) = book.next_action(ALL_PERMITS) else { panic!("no load") };
    book.take_changes();
    (book, key)
}

#[test]
fn copy_lost_during_its_read_is_rewritten() {
    let (mut book, key) = reading_beside_a_held_slot();
    book.on_ssd_copy_lost(key);
    book.on_moved(key, Tier::Dram);
    let Some(Action::Demote { key: written, .. }) = book.next_action(ALL_PERMITS) else {
        panic!("no demotion")
    };
    assert_eq!(written, key);
    book.on_moved(key, Tier::Ssd);
    assert_eq!(book.tier_of(&hash(1)), Some(Tier::Ssd));
}

#[test]
fn copy_lost_before_its_read_is_dropped() {
    let (mut book, key) = reading_beside_a_held_slot();
    book.on_ssd_copy_lost(key);
    book.on_move_delayed(key, Tier::Dram);
    assert_eq!(book.tier_of(&hash(1)), None);
    assert_eq!(
        book.take_changes(),
        vec![Change::Dropped {
            blocks: vec![hash(1)],
            tier: Tier::Ssd,
            cause: crate::index::command::DropCause::Failed
        }]
    );
    assert_eq!(book.next_action(ALL_PERMITS), None);
    book.release(LeaseId(101), Timestamp(5));
    assert_eq!(book.stats(Tier::Ssd).blocks, 0);
}

#[test]
fn blocks_refused_by_ssd_return_only_below_the_watermark() {
    let limits = TierLimits { capacity: Capacity::Blocks(100), watermark_high: 0.95, watermark_low: 0.9 };
    let mut book = book(limits, TierLimits::exact(Capacity::Blocks(100)));
    for number in 0..200 {
        for key in wanted(&offer(&mut book, number, &[number], number)) {
            book.commit(key, CHARGE, Timestamp(number));
        }
        book.release(LeaseId(number), Timestamp(number));
        let mut refused = 0;
        while let Some(action) = book.next_action(ALL_PERMITS) {
            if let Action::Demote { key, .. } = action {
                refused += 1;
                assert!(refused <= 100, "refused demotions loop forever");
                book.on_move_failed(key, Tier::Ssd, Timestamp(number));
            }
        }
        assert!(book.stats(Tier::Dram).blocks <= 95);
    }
    assert_eq!(book.stats(Tier::Ssd).blocks, 0);
    assert!(book.stats(Tier::Dram).blocks >= 90, "{:?}", book.stats(Tier::Dram));
}

/// A policy that records its calls.
struct RecordingPolicy(PlainLru, std::sync::mpsc::Sender<(char, u32)>);

impl RecordingPolicy {
    fn note(&self, how: char, traits: BlockTraits) {
        self.1.send((how, traits.offset_blocks)).unwrap();
    }
}

impl Policy for RecordingPolicy {
    fn name(&self) -> &'static str {
        "told"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.note('i', traits);
        self.0.insert(key, traits, now);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.note('u', traits);
        self.0.access(key, traits, now);
    }

    fn settle(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.note('s', traits);
        self.0.access(key, traits, now);
    }

    fn park(&mut self, key: BlockKey) {
        self.0.park(key);
    }

    fn remove(&mut self, key: BlockKey) {
        self.0.remove(key);
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.0.victim(now, spared)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn ended_request_is_reported_tail_first() {
    let (notes, told) = std::sync::mpsc::channel();
    let dram = TierLimits::exact(Capacity::Blocks(3));
    let ssd = TierLimits::exact(Capacity::Blocks(3));
    let limits = BookLimits { dram, ssd, lease: Duration::from_secs(10), leases_max: 64, seed: 1 };
    let policy = RecordingPolicy(PlainLru::default(), notes);
    let mut book = Book::new(&limits, Box::new(policy), Box::<PlainLru>::default());
    let seen = || told.try_iter().collect::<Vec<_>>();
    request(&mut book, &[1, 2], 1);
    assert_eq!(seen(), [('i', 1), ('i', 0), ('s', 1), ('s', 0)]);
    request(&mut book, &[1, 2, 3], 2);
    assert_eq!(seen(), [('i', 2), ('s', 2), ('u', 1), ('u', 0)]);
    request(&mut book, &[8], 3);
    seen();
    assert_eq!(book.tier_of(&hash(3)), Some(Tier::Ssd), "the tail was evicted");
    // Blocks promoted from SSD are used, and inserted into this tier.
    assert_eq!(request(&mut book, &[1, 2, 3], 4), 3);
    assert_eq!(seen(), [('i', 2), ('s', 2), ('u', 1), ('u', 0)]);
    // So are blocks that an engine had in its own memory and offers: they are not read, but used.
    assert_eq!(offer(&mut book, 50, &[1, 2], 5), [OfferOutcome::Present; 2]);
    book.release(LeaseId(50), Timestamp(6));
    assert_eq!(seen(), [('u', 1), ('u', 0)]);
}

#[test]
fn lease_holds_each_block_once_in_any_order() {
    let mut book = blocks(16, 0);
    request(&mut book, &[1, 2, 3, 4, 5], 1);
    for number in [5, 1, 3, 3, 2, 5, 4, 1] {
        assert_eq!(book.fetch(requester(7), &[hash(number)], Timestamp(2)).unwrap().len(), 1);
    }
    assert_eq!(book.leases.held_by(LeaseId(7)), 5);
    book.release(LeaseId(7), Timestamp(3));
    let entries: Vec<_> =
        book.slab.iter().map(|(_, entry)| (entry.meta.hash, entry.leases, entry.stamp)).collect();
    assert!(entries.iter().all(|(_, leases, _)| *leases == 0), "released as often as held: {entries:?}");
    let mut by_use = entries;
    by_use.sort_by_key(|(_, _, stamp)| *stamp);
    let order: Vec<_> = by_use.into_iter().map(|(hash, ..)| hash).collect();
    assert_eq!(order, hashes(&[5, 4, 3, 2, 1]), "the head of the prefix is the youngest");
}
