//! Admission of new blocks: space is given only if the policy considers it worthwhile.

use super::*;
use crate::id::{Category, RequestKind};
use std::sync::mpsc::{Receiver, Sender, channel};

/// A reported use: offset of the block, and whether it is resident.
type PolicyUse = (u32, bool);

/// A plain LRU that admits no block of an API request, and evicts only block 1 for one of a search
/// request.
struct AdmissionMock {
    lru: PlainLru,
    told: Sender<PolicyUse>,
    first: BlockKey,
}

impl Policy for AdmissionMock {
    fn name(&self) -> &'static str {
        "weighing"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.lru.insert(key, traits, now);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.told.send((traits.offset_blocks, true)).unwrap();
        self.lru.access(key, traits, now);
    }

    fn park(&mut self, key: BlockKey) {
        self.lru.park(key);
    }

    fn remove(&mut self, key: BlockKey) {
        self.lru.remove(key);
    }

    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey> {
        self.lru.victim(now, spared)
    }

    fn admits(&mut self, newcomer: BlockTraits, victim: BlockKey, _: Timestamp) -> bool {
        match newcomer.category.kind {
            RequestKind::Api => false,
            RequestKind::Search => victim == self.first,
            _ => true,
        }
    }

    fn note_absent(&mut self, traits: BlockTraits, _: Timestamp) {
        assert_eq!(traits.category.kind, RequestKind::Api);
        self.told.send((traits.offset_blocks, false)).unwrap();
    }

    fn len(&self) -> usize {
        self.lru.len()
    }
}

fn book_with_admission_mock(dram: u64, ssd: u64) -> (Book, Receiver<PolicyUse>) {
    with_limits(TierLimits::exact(Capacity::Blocks(dram)), TierLimits::exact(Capacity::Blocks(ssd)))
}

fn with_limits(dram: TierLimits, ssd: TierLimits) -> (Book, Receiver<PolicyUse>) {
    let limits = BookLimits { dram, ssd, lease: Duration::from_secs(10), leases_max: 64, seed: 1 };
    let (tell, told) = channel();
    let policy = AdmissionMock { lru: PlainLru::default(), told: tell, first: BlockKey(0) };
    (Book::new(&limits, Box::new(policy), Box::<PlainLru>::default()), told)
}

fn api_requester(lease: u64, tenant: u32) -> Requester {
    let category = Category { kind: RequestKind::Api, conversation_turn: 1 };
    Requester { tenant: TenantId(tenant), category, ..requester(lease) }
}

/// Reads the present blocks of an API request and saves the others, if wanted.
fn fetch_and_save(book: &mut Book, who: Requester, numbers: &[u64], now: u64) -> Vec<OfferOutcome> {
    let all = hashes(numbers);
    let hits = book.fetch(who, &all, Timestamp(now)).unwrap().len();
    let offer = SaveOffer {
        parent: hits.checked_sub(1).map(|last| all[last]),
        first_offset_blocks: hits as u32,
        hashes: &all[hits..],
        charge: CHARGE,
    };
    let answers = book.offer(who, offer, Timestamp(now)).unwrap();
    drain(book);
    for answer in &answers {
        if let OfferOutcome::Wanted(key) = answer {
            book.commit(*key, CHARGE, Timestamp(now));
        }
    }
    answers
}

const LOW_VALUE: OfferOutcome = OfferOutcome::Refused(RefusalReason::LowValue);

fn is_here(book: &Book, numbers: &[u64]) -> bool {
    numbers.iter().all(|number| book.tier_of(&hash(*number)).is_some())
}

#[test]
fn rejected_blocks_are_reported_in_order_at_release() {
    let (mut book, told) = book_with_admission_mock(4, 0);
    request(&mut book, &[1, 2, 3], 1);
    told.try_iter().for_each(drop);
    let answers = fetch_and_save(&mut book, api_requester(9, 0), &[1, 2, 10, 11, 12], 9);
    assert!(
        matches!(answers[0], OfferOutcome::Wanted(_)),
        "there is space for one, so the policy is not asked"
    );
    assert_eq!(answers[1..], [LOW_VALUE, LOW_VALUE]);
    assert_eq!(book.stats(Tier::Dram).not_admitted_blocks, 2);
    assert!(is_here(&book, &[1, 2, 3, 10]) && told.try_iter().next().is_none());
    book.release(LeaseId(9), Timestamp(9));
    let expected = [(4, false), (3, false), (2, true), (1, true), (0, true)];
    assert_eq!(told.try_iter().collect::<Vec<_>>(), expected, "from the tail to the head");
    // The same for a lease that expires; each block is reported once, however often it was offered.
    told.try_iter().for_each(drop);
    for _ in 0..3 {
        assert_eq!(fetch_and_save(&mut book, api_requester(10, 0), &[20], 10), [LOW_VALUE]);
    }
    assert_eq!(book.expire(Timestamp(11_000_000)), 1);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [(0, false)]);
    // Other requests are admitted.
    request(&mut book, &[30, 31], 12_000_000);
    assert!(is_here(&book, &[30, 31]));
}

#[test]
fn every_block_is_admitted_with_an_ssd_below() {
    let (mut book, _told) = book_with_admission_mock(2, 8);
    request(&mut book, &[1, 2], 1);
    assert!(
        fetch_and_save(&mut book, api_requester(9, 0), &[10, 11], 9)
            .iter()
            .all(|answer| matches!(answer, OfferOutcome::Wanted(_)))
    );
    book.release(LeaseId(9), Timestamp(9));
    // An SSD that admits no blocks does not count.
    book.set_admitting(Tier::Ssd, false);
    assert_eq!(fetch_and_save(&mut book, api_requester(10, 0), &[20], 10), [LOW_VALUE]);
}

#[test]
fn pinned_or_needed_blocks_skip_admission() {
    let (mut book, _told) = book_with_admission_mock(2, 0);
    request(&mut book, &[1, 2], 1);
    book.set_pins([pin_directive(1, PinKind::Soft, &[10])], Timestamp(2));
    book.set_window([hashes(&[11]).as_slice()], Timestamp(2));
    assert_eq!(fetch_and_save(&mut book, api_requester(9, 0), &[20], 9), [LOW_VALUE]);
    assert!(matches!(fetch_and_save(&mut book, api_requester(9, 0), &[10], 9)[0], OfferOutcome::Wanted(_)));
    assert!(matches!(fetch_and_save(&mut book, api_requester(9, 0), &[11], 9)[0], OfferOutcome::Wanted(_)));
    assert!(is_here(&book, &[10, 11]) && !is_here(&book, &[1]));
}

#[test]
fn eviction_from_a_larger_tenant_skips_admission() {
    let (mut book, _told) = book_with_admission_mock(4, 0);
    request(&mut book, &[1, 2, 3, 4], 1);
    let wanted = |answers: Vec<OfferOutcome>| {
        answers.iter().filter(|answer| matches!(answer, OfferOutcome::Wanted(_))).count()
    };
    assert_eq!(wanted(fetch_and_save(&mut book, api_requester(9, 7), &[10, 11], 9)), 2, "half is its share");
    book.release(LeaseId(9), Timestamp(9));
    assert_eq!(
        fetch_and_save(&mut book, api_requester(10, 7), &[12], 10),
        [LOW_VALUE],
        "now its own block would have to leave"
    );
}

#[test]
fn remembered_rejections_are_bounded_and_end_with_the_lease() {
    let (mut book, told) = book_with_admission_mock(1, 0);
    request(&mut book, &[1], 1);
    for lease in 0..40 {
        let numbers: Vec<u64> = (0..5_000).map(|number| 10 + number + lease * 5_000).collect();
        assert!(
            fetch_and_save(&mut book, api_requester(100 + lease, 0), &numbers, 9)
                .iter()
                .all(|answer| *answer == LOW_VALUE)
        );
    }
    assert_eq!(book.leases.rejected_blocks(), 131_072);
    told.try_iter().for_each(drop);
    book.release(LeaseId(100), Timestamp(10));
    assert_eq!(told.try_iter().count(), 4_096);
    (1..40).for_each(|lease| book.release(LeaseId(100 + lease), Timestamp(10)));
    assert_eq!((book.leases.rejected_blocks(), told.try_iter().count()), (0, 131_072 - 4_096));
}

#[test]
fn blocks_after_a_rejected_offer_are_rejected() {
    let (mut book, _told) = book_with_admission_mock(4, 0);
    request(&mut book, &[1, 2, 3, 4], 1);
    assert_eq!(fetch_and_save(&mut book, api_requester(9, 0), &[10, 11], 9), [LOW_VALUE, LOW_VALUE]);
    // There is space by now.
    book.set_quotas([(TenantId(0), 2 * u64::from(CHARGE.frame))]);
    drain(&mut book);
    book.set_quotas([]);
    let behind = hashes(&[12]);
    let offer = |parent| SaveOffer { parent, first_offset_blocks: 2, hashes: &behind, charge: CHARGE };
    let answers = book.offer(api_requester(9, 0), offer(Some(hash(11))), Timestamp(9)).unwrap();
    assert_eq!(answers, [LOW_VALUE]);
    let answers = book.offer(api_requester(10, 0), offer(Some(hash(11))), Timestamp(9)).unwrap();
    assert!(
        matches!(answers[..], [OfferOutcome::Wanted(_)]),
        "another request may have the preceding block from elsewhere"
    );
}

#[test]
fn rejected_block_saved_by_another_request_counts_as_used() {
    let (mut book, told) = book_with_admission_mock(2, 0);
    request(&mut book, &[1, 2], 1);
    assert_eq!(fetch_and_save(&mut book, api_requester(9, 0), &[1, 10, 11], 9), [LOW_VALUE, LOW_VALUE]);
    book.release(LeaseId(9), Timestamp(9));
    assert_eq!(fetch_and_save(&mut book, api_requester(10, 0), &[10, 11], 10), [LOW_VALUE, LOW_VALUE]);
    request(&mut book, &[10], 11);
    assert!(is_here(&book, &[10]));
    told.try_iter().for_each(drop);
    book.release(LeaseId(10), Timestamp(12));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, false), (0, true)]);
}

#[test]
fn foreign_save_of_a_rejected_block_does_not_count() {
    let (mut book, told) = book_with_admission_mock(4, 0);
    request(&mut book, &[1, 2, 3, 4], 1);
    assert_eq!(fetch_and_save(&mut book, api_requester(9, 0), &[10, 11], 9), [LOW_VALUE, LOW_VALUE]);
    let behind = hashes(&[12]);
    let offer = SaveOffer { parent: Some(hash(11)), first_offset_blocks: 2, hashes: &behind, charge: CHARGE };
    let answers = book.offer(api_requester(9, 7), offer, Timestamp(9)).unwrap();
    let [OfferOutcome::Wanted(key)] = answers[..] else { panic!("the other tenant has no rejected block") };
    book.abort(key);
    assert!(matches!(
        fetch_and_save(&mut book, api_requester(10, 7), &[11], 10)[..],
        [OfferOutcome::Wanted(_)]
    ));
    book.release(LeaseId(10), Timestamp(10));
    // There is space by now.
    book.set_quotas([(TenantId(0), 2 * u64::from(CHARGE.frame))]);
    drain(&mut book);
    book.set_quotas([]);
    assert_eq!(
        book.offer(api_requester(9, 0), offer, Timestamp(11)).unwrap(),
        [LOW_VALUE],
        "block 11 is absent for this tenant"
    );
    told.try_iter().for_each(drop);
    book.release(LeaseId(9), Timestamp(12));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [(2, false), (0, false)]);
}

#[test]
fn blocks_after_a_foreign_block_are_refused() {
    let (mut book, _told) = book_with_admission_mock(2, 0);
    assert_eq!(request(&mut book, &[2], 1), 0);
    assert!(matches!(fetch_and_save(&mut book, api_requester(2, 7), &[1], 2)[..], [OfferOutcome::Wanted(_)]));
    book.set_pins([pin_directive(1, PinKind::Soft, &[11, 12])], Timestamp(2));
    let full = OfferOutcome::Refused(RefusalReason::Full);
    assert_eq!(fetch_and_save(&mut book, api_requester(9, 0), &[10, 1, 11], 9), [LOW_VALUE, full, full]);
    assert_eq!(book.stats(Tier::Dram).not_admitted_blocks, 1, "only the judged block counts");
    assert!(matches!(
        fetch_and_save(&mut book, api_requester(10, 0), &[10, 12], 10)[..],
        [LOW_VALUE, OfferOutcome::Wanted(_)]
    ));
}

#[test]
fn batch_eviction_spares_better_blocks() {
    let mut marks = TierLimits::exact(Capacity::Blocks(10));
    (marks.watermark_high, marks.watermark_low) = (0.9, 0.4);
    let (mut book, _told) = with_limits(marks, TierLimits::exact(Capacity::Blocks(0)));
    // The policy gives up only the first of ten blocks.
    (1..=9).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    let gone = |book: &Book| (1..=9).filter(|number| !is_here(book, &[*number])).count();
    assert_eq!(gone(&book), 0);
    let once = Requester {
        category: Category { kind: RequestKind::Search, conversation_turn: 1 },
        ..api_requester(20, 0)
    };
    assert!(matches!(fetch_and_save(&mut book, once, &[20], 20)[..], [OfferOutcome::Wanted(_)]));
    assert_eq!(gone(&book), 1, "the rest of the batch is worth more");
}
