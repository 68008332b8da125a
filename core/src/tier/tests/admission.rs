//! Whether what is new comes in: room is given to it only where the policy says that it is worth it.

use super::*;
use crate::id::{Category, RequestKind};
use std::sync::mpsc::{Receiver, Sender, channel};

/// What the policy was told, in order: offset of the block, and whether it had been let in.
type Told = (u32, bool);

/// The plain LRU, which gives no block for one of a program's call, and only block 1 for one of a search.
struct Weighing {
    lru: PlainLru,
    told: Sender<Told>,
    first: BlockKey,
}

impl Policy for Weighing {
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

    fn pass(&mut self, traits: BlockTraits, _: Timestamp) {
        assert_eq!(traits.category.kind, RequestKind::Api);
        self.told.send((traits.offset_blocks, false)).unwrap();
    }

    fn len(&self) -> usize {
        self.lru.len()
    }
}

fn weighing(dram: u64, ssd: u64) -> (Book, Receiver<Told>) {
    with_limits(TierLimits::exact(Capacity::Blocks(dram)), TierLimits::exact(Capacity::Blocks(ssd)))
}

fn with_limits(dram: TierLimits, ssd: TierLimits) -> (Book, Receiver<Told>) {
    let limits = Limits { dram, ssd, lease: Duration::from_secs(10), leases_max: 64, seed: 1 };
    let (tell, told) = channel();
    let policy = Weighing { lru: PlainLru::default(), told: tell, first: BlockKey(0) };
    (Book::new(&limits, Box::new(policy), Box::<PlainLru>::default()), told)
}

fn call(lease: u64, tenant: u32) -> Asker {
    let category = Category { kind: RequestKind::Api, turn: 1 };
    Asker { tenant: TenantId(tenant), category, ..asker(lease) }
}

/// Reads what is there of a program's call and offers the rest, all of which must come if it is wanted.
fn ask(book: &mut Book, who: Asker, numbers: &[u64], now: u64) -> Vec<Offered> {
    let all = hashes(numbers);
    let hits = book.fetch(who, &all, Timestamp(now)).unwrap().len();
    let offer = Offer {
        parent: hits.checked_sub(1).map(|last| all[last]),
        first_offset_blocks: hits as u32,
        hashes: &all[hits..],
        charge: CHARGE,
    };
    let answers = book.offer(who, offer, Timestamp(now)).unwrap();
    drain(book);
    for answer in &answers {
        if let Offered::Wanted(key) = answer {
            book.commit(*key, CHARGE, Timestamp(now));
        }
    }
    answers
}

const WORTH: Offered = Offered::Refused(RefusedBy::Worth);

fn is_here(book: &Book, numbers: &[u64]) -> bool {
    numbers.iter().all(|number| book.tier_of(&hash(*number)).is_some())
}

#[test]
fn what_is_not_worth_the_room_is_turned_away_and_told_at_the_end_in_its_place() {
    let (mut book, told) = weighing(4, 0);
    request(&mut book, &[1, 2, 3], 1);
    told.try_iter().for_each(drop);
    let answers = ask(&mut book, call(9, 0), &[1, 2, 10, 11, 12], 9);
    assert!(matches!(answers[0], Offered::Wanted(_)), "there is room for one: nobody has to be asked");
    assert_eq!(answers[1..], [WORTH, WORTH]);
    assert_eq!(book.stats(Tier::Dram).turned_away_blocks, 2);
    assert!(is_here(&book, &[1, 2, 3, 10]) && told.try_iter().next().is_none());
    book.release(LeaseId(9), Timestamp(9));
    let expected = [(4, false), (3, false), (2, true), (1, true), (0, true)];
    assert_eq!(told.try_iter().collect::<Vec<_>>(), expected, "from the tail to the head");
    // Of a lease that ends by itself it is told as well, and each block once however often it was offered.
    told.try_iter().for_each(drop);
    for _ in 0..3 {
        assert_eq!(ask(&mut book, call(10, 0), &[20], 10), [WORTH]);
    }
    assert_eq!(book.expire(Timestamp(11_000_000)), 1);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [(0, false)]);
    // Anybody else may come in.
    request(&mut book, &[30, 31], 12_000_000);
    assert!(is_here(&book, &[30, 31]));
}

#[test]
fn with_an_ssd_below_all_come_in() {
    let (mut book, _told) = weighing(2, 8);
    request(&mut book, &[1, 2], 1);
    assert!(
        ask(&mut book, call(9, 0), &[10, 11], 9).iter().all(|answer| matches!(answer, Offered::Wanted(_)))
    );
    book.release(LeaseId(9), Timestamp(9));
    // One that takes nothing more is none.
    book.set_admitting(Tier::Ssd, false);
    assert_eq!(ask(&mut book, call(10, 0), &[20], 10), [WORTH]);
}

#[test]
fn what_is_pinned_or_waited_for_is_not_weighed() {
    let (mut book, _told) = weighing(2, 0);
    request(&mut book, &[1, 2], 1);
    book.set_pins([order(1, PinKind::Soft, &[10])], Timestamp(2));
    book.set_window([hashes(&[11]).as_slice()], Timestamp(2));
    assert_eq!(ask(&mut book, call(9, 0), &[20], 9), [WORTH]);
    assert!(matches!(ask(&mut book, call(9, 0), &[10], 9)[0], Offered::Wanted(_)));
    assert!(matches!(ask(&mut book, call(9, 0), &[11], 9)[0], Offered::Wanted(_)));
    assert!(is_here(&book, &[10, 11]) && !is_here(&book, &[1]));
}

#[test]
fn what_another_tenant_has_too_much_of_is_given_without_being_weighed() {
    let (mut book, _told) = weighing(4, 0);
    request(&mut book, &[1, 2, 3, 4], 1);
    let wanted =
        |answers: Vec<Offered>| answers.iter().filter(|answer| matches!(answer, Offered::Wanted(_))).count();
    assert_eq!(wanted(ask(&mut book, call(9, 7), &[10, 11], 9)), 2, "half is its part");
    book.release(LeaseId(9), Timestamp(9));
    assert_eq!(ask(&mut book, call(10, 7), &[12], 10), [WORTH], "now its own would have to go");
}

#[test]
fn notes_of_what_was_turned_away_have_an_end_and_go_with_the_lease() {
    let (mut book, told) = weighing(1, 0);
    request(&mut book, &[1], 1);
    for lease in 0..40 {
        let numbers: Vec<u64> = (0..5_000).map(|number| 10 + number + lease * 5_000).collect();
        assert!(ask(&mut book, call(100 + lease, 0), &numbers, 9).iter().all(|answer| *answer == WORTH));
    }
    assert_eq!(book.passed_blocks, 131_072);
    told.try_iter().for_each(drop);
    book.release(LeaseId(100), Timestamp(10));
    assert_eq!(told.try_iter().count(), 4_096);
    (1..40).for_each(|lease| book.release(LeaseId(100 + lease), Timestamp(10)));
    assert_eq!((book.passed_blocks, told.try_iter().count()), (0, 131_072 - 4_096));
}

#[test]
fn nothing_comes_in_behind_what_an_earlier_offer_of_the_lease_was_turned_away_with() {
    let (mut book, _told) = weighing(4, 0);
    request(&mut book, &[1, 2, 3, 4], 1);
    assert_eq!(ask(&mut book, call(9, 0), &[10, 11], 9), [WORTH, WORTH]);
    // There is room by now.
    book.set_quotas([(TenantId(0), 2 * u64::from(CHARGE.frame))]);
    drain(&mut book);
    book.set_quotas([]);
    let behind = hashes(&[12]);
    let offer = |parent| Offer { parent, first_offset_blocks: 2, hashes: &behind, charge: CHARGE };
    let answers = book.offer(call(9, 0), offer(Some(hash(11))), Timestamp(9)).unwrap();
    assert_eq!(answers, [WORTH]);
    let answers = book.offer(call(10, 0), offer(Some(hash(11))), Timestamp(9)).unwrap();
    assert!(matches!(answers[..], [Offered::Wanted(_)]), "another request may have it from elsewhere");
}

#[test]
fn what_another_request_brought_meanwhile_was_used_and_not_passed() {
    let (mut book, told) = weighing(2, 0);
    request(&mut book, &[1, 2], 1);
    assert_eq!(ask(&mut book, call(9, 0), &[1, 10, 11], 9), [WORTH, WORTH]);
    book.release(LeaseId(9), Timestamp(9));
    assert_eq!(ask(&mut book, call(10, 0), &[10, 11], 10), [WORTH, WORTH]);
    request(&mut book, &[10], 11);
    assert!(is_here(&book, &[10]));
    told.try_iter().for_each(drop);
    book.release(LeaseId(10), Timestamp(12));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, false), (0, true)]);
}

#[test]
fn what_another_tenant_brought_meanwhile_is_not_here_and_was_not_used() {
    let (mut book, told) = weighing(4, 0);
    request(&mut book, &[1, 2, 3, 4], 1);
    assert_eq!(ask(&mut book, call(9, 0), &[10, 11], 9), [WORTH, WORTH]);
    let behind = hashes(&[12]);
    let offer = Offer { parent: Some(hash(11)), first_offset_blocks: 2, hashes: &behind, charge: CHARGE };
    let answers = book.offer(call(9, 7), offer, Timestamp(9)).unwrap();
    let [Offered::Wanted(key)] = answers[..] else { panic!("that tenant was turned away with nothing") };
    book.abort(key);
    assert!(matches!(ask(&mut book, call(10, 7), &[11], 10)[..], [Offered::Wanted(_)]));
    book.release(LeaseId(10), Timestamp(10));
    // There is room by now.
    book.set_quotas([(TenantId(0), 2 * u64::from(CHARGE.frame))]);
    drain(&mut book);
    book.set_quotas([]);
    assert_eq!(book.offer(call(9, 0), offer, Timestamp(11)).unwrap(), [WORTH], "11 is not here for this one");
    told.try_iter().for_each(drop);
    book.release(LeaseId(9), Timestamp(12));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [(2, false), (0, false)]);
}

#[test]
fn behind_another_tenants_block_nothing_comes_in_that_is_wanted() {
    let (mut book, _told) = weighing(2, 0);
    assert_eq!(request(&mut book, &[2], 1), 0);
    assert!(matches!(ask(&mut book, call(2, 7), &[1], 2)[..], [Offered::Wanted(_)]));
    book.set_pins([order(1, PinKind::Soft, &[11, 12])], Timestamp(2));
    let full = Offered::Refused(RefusedBy::Full);
    assert_eq!(ask(&mut book, call(9, 0), &[10, 1, 11], 9), [WORTH, full, full]);
    assert_eq!(book.stats(Tier::Dram).turned_away_blocks, 1, "only what was weighed");
    assert!(matches!(ask(&mut book, call(10, 0), &[10, 12], 10)[..], [WORTH, Offered::Wanted(_)]));
}

#[test]
fn what_is_wanted_is_weighed_nowhere_and_a_stretch_drives_out_nothing_that_is_worth_more() {
    let mut marks = TierLimits::exact(Capacity::Blocks(10));
    (marks.watermark_high, marks.watermark_low) = (0.9, 0.4);
    let (mut book, _told) = with_limits(marks, TierLimits::exact(Capacity::Blocks(0)));
    // A policy that gives up the first of ten only.
    (1..=9).for_each(|number| assert_eq!(request(&mut book, &[number], number), 0));
    let gone = |book: &Book| (1..=9).filter(|number| !is_here(book, &[*number])).count();
    assert_eq!(gone(&book), 0);
    let once = Asker { category: Category { kind: RequestKind::Search, turn: 1 }, ..call(20, 0) };
    assert!(matches!(ask(&mut book, once, &[20], 20)[..], [Offered::Wanted(_)]));
    assert_eq!(gone(&book), 1, "the rest of the stretch is worth more");
}
