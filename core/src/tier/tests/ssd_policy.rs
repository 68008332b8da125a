//! Two tiers with separate policies: the uses reported to each, and blocks not worth a write to
//! SSD.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::id::{Category, RequestKind};

/// Calls of the SSD's policy, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SsdPolicyCall {
    PassedOver(u32),
    MovedIn,
    Inserted,
}

/// A plain LRU that considers API requests unlikely to be reused.
struct SsdPolicyMock {
    lru: PlainLru,
    told: Sender<SsdPolicyCall>,
    kinds: BTreeMap<BlockKey, RequestKind>,
}

fn chance(kind: RequestKind) -> f64 {
    if kind == RequestKind::Api { 0.01 } else { 0.5 }
}

impl Policy for SsdPolicyMock {
    fn name(&self) -> &'static str {
        "below"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.told.send(SsdPolicyCall::Inserted).unwrap();
        self.lru.insert(key, traits, now);
    }

    fn insert_moved(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.told.send(SsdPolicyCall::MovedIn).unwrap();
        self.kinds.insert(key, traits.category.kind);
        self.lru.insert(key, traits, now);
    }

    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
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

    fn note_absent(&mut self, traits: BlockTraits, _: Timestamp) {
        self.told.send(SsdPolicyCall::PassedOver(traits.offset_blocks)).unwrap();
    }

    fn reuse_prob_if_moved_in(&mut self, mover: BlockTraits, victim: Option<BlockKey>, _: Timestamp) -> f64 {
        let room = victim.and_then(|victim| self.kinds.get(&victim)).map_or(0.0, |kind| chance(*kind));
        let chance = chance(mover.category.kind);
        if chance < room { 0.0 } else { chance }
    }

    fn reuse_prob_if_kept(&mut self, resident: BlockKey, _: Timestamp) -> f64 {
        chance(self.kinds[&resident])
    }

    fn len(&self) -> usize {
        self.lru.len()
    }
}

fn book_with_ssd_mock(dram: u64, ssd: u64, reuse_min: f64) -> (Book, Receiver<SsdPolicyCall>) {
    let exact = |blocks| TierLimits::exact(Capacity::Blocks(blocks));
    let limits = BookLimits {
        dram: exact(dram),
        ssd: exact(ssd),
        lease: Duration::from_secs(10),
        leases_max: 64,
        seed: 1,
    };
    let (tell, told) = channel();
    let below = SsdPolicyMock { lru: PlainLru::default(), told: tell, kinds: BTreeMap::new() };
    let book = Book::new(&limits, Box::<PlainLru>::default(), Box::new(below));
    (book.with_ssd_reuse_min(reuse_min), told)
}

/// A whole request of a kind.
fn run_request(book: &mut Book, kind: RequestKind, numbers: &[u64], now: u64) {
    let who = Requester { category: Category { kind, conversation_turn: 1 }, ..requester(now) };
    let all = hashes(numbers);
    let hits = book.fetch(who, &all, Timestamp(now)).unwrap().len();
    drain(book);
    let offer =
        SaveOffer { parent: None, first_offset_blocks: hits as u32, hashes: &all[hits..], charge: CHARGE };
    let answers = book.offer(who, offer, Timestamp(now)).unwrap();
    drain(book);
    for answer in answers {
        if let OfferOutcome::Wanted(key) = answer {
            book.commit(key, CHARGE, Timestamp(now));
        }
    }
    book.release(who.lease, Timestamp(now));
    drain(book);
}

fn tiers(book: &Book, numbers: std::ops::Range<u64>) -> Vec<Option<Tier>> {
    numbers.map(|number| book.tier_of(&hash(number))).collect()
}

#[test]
fn ssd_policy_sees_every_use_and_moves_as_moves() {
    let (mut book, told) = book_with_ssd_mock(2, 4, 0.0);
    run_request(&mut book, RequestKind::Text, &[1, 2], 1);
    assert_eq!(
        told.try_iter().collect::<Vec<_>>(),
        [SsdPolicyCall::PassedOver(1), SsdPolicyCall::PassedOver(0)]
    );
    run_request(&mut book, RequestKind::Text, &[3], 2);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [SsdPolicyCall::MovedIn, SsdPolicyCall::PassedOver(0)]);
    // Block 2 is promoted for the read, and block 1 is demoted for it.
    assert_eq!(book.tier_of(&hash(2)), Some(Tier::Ssd));
    run_request(&mut book, RequestKind::Text, &[2], 3);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [SsdPolicyCall::MovedIn, SsdPolicyCall::PassedOver(1)]);
}

#[test]
fn unlikely_blocks_are_not_written_to_ssd() {
    let (mut book, _told) = book_with_ssd_mock(1, 4, 0.02);
    run_request(&mut book, RequestKind::Api, &[1], 1);
    run_request(&mut book, RequestKind::Text, &[2], 2);
    run_request(&mut book, RequestKind::Text, &[3], 3);
    assert_eq!(tiers(&book, 1..4), [None, Some(Tier::Ssd), Some(Tier::Dram)]);
    assert_eq!(book.stats(Tier::Ssd).not_admitted_blocks, 1);
    assert_eq!((book.stats(Tier::Dram).dropped_blocks, book.stats(Tier::Dram).demoted_blocks), (1, 1));
}

#[test]
fn pinned_or_needed_blocks_are_always_written_to_ssd() {
    let (mut book, _told) = book_with_ssd_mock(1, 4, 0.02);
    run_request(&mut book, RequestKind::Api, &[1], 1);
    book.set_pins([pin_directive(1, PinKind::Soft, &[1])], Timestamp(2));
    run_request(&mut book, RequestKind::Api, &[2], 2);
    assert_eq!(tiers(&book, 1..3), [Some(Tier::Ssd), Some(Tier::Dram)]);
    book.set_window([hashes(&[2]).as_slice()], Timestamp(3));
    run_request(&mut book, RequestKind::Text, &[3], 3);
    assert_eq!(tiers(&book, 1..4), [Some(Tier::Ssd), Some(Tier::Ssd), Some(Tier::Dram)]);
}

#[test]
fn demoted_block_does_not_evict_a_likelier_one() {
    let (mut book, _told) = book_with_ssd_mock(1, 2, 0.0);
    for (number, kind) in [(1, RequestKind::Text), (2, RequestKind::Text), (3, RequestKind::Api)] {
        run_request(&mut book, kind, &[number], number);
    }
    run_request(&mut book, RequestKind::Text, &[4], 4);
    assert_eq!(tiers(&book, 1..5), [Some(Tier::Ssd), Some(Tier::Ssd), None, Some(Tier::Dram)]);
    run_request(&mut book, RequestKind::Text, &[5], 5);
    assert_eq!(tiers(&book, 1..6), [None, Some(Tier::Ssd), None, Some(Tier::Ssd), Some(Tier::Dram)]);
}

#[test]
fn unlikely_blocks_are_not_rewritten() {
    let (mut book, _told) = book_with_ssd_mock(1, 4, 0.0);
    for (number, kind) in
        [(1, RequestKind::Text), (2, RequestKind::Api), (3, RequestKind::Api), (4, RequestKind::Api)]
    {
        run_request(&mut book, kind, &[number], number);
    }
    book.set_pins([pin_directive(1, PinKind::Soft, &[3])], Timestamp(5));
    let keys: Vec<BlockKey> = (1..4).map(|number| book.slab.find(&hash(number)).unwrap()).collect();
    keys.iter().for_each(|key| book.on_rewrite(*key, Timestamp(5)));
    assert_eq!(tiers(&book, 1..4), [Some(Tier::Ssd); 3], "without a minimum probability");
    book.ssd_writes.set_reuse_min(0.02);
    keys.iter().for_each(|key| book.on_rewrite(*key, Timestamp(5)));
    assert_eq!(tiers(&book, 1..4), [Some(Tier::Ssd), None, Some(Tier::Ssd)], "a pinned block is kept");
    assert_eq!(book.stats(Tier::Ssd).dropped_blocks, 1);
    let actions: Vec<Action> = std::iter::from_fn(|| book.next_action(ALL_PERMITS)).collect();
    assert!(matches!(actions[..], [Action::DropSsd { .. }]), "{actions:?}");
    // A block on its way to a reader stays.
    book.ssd_writes.set_reuse_min(0.0);
    run_request(&mut book, RequestKind::Api, &[5], 6);
    book.ssd_writes.set_reuse_min(0.02);
    book.fetch(requester(7), &hashes(&[4]), Timestamp(7)).unwrap();
    let read = book.slab.find(&hash(4)).unwrap();
    book.on_rewrite(read, Timestamp(7));
    assert!(book.tier_of(&hash(4)).is_some());
    // A block not written yet stays too.
    book.release(LeaseId(7), Timestamp(8));
    drain(&mut book);
    let writes = |book: &mut Book| {
        std::iter::from_fn(|| book.next_action(MovePermits { ssd: false, ..ALL_PERMITS })).count()
    };
    book.ssd_writes.set_reuse_min(0.0);
    save_without_moves(&mut book, &[6], 9);
    writes(&mut book);
    book.ssd_writes.set_reuse_min(0.02);
    let waits = book.slab.find(&hash(4)).unwrap();
    assert_eq!(
        (book.assigned_tier(waits), book.slab.get(waits).unwrap().copies.ssd),
        (Some(Tier::Ssd), false)
    );
    book.on_rewrite(waits, Timestamp(9));
    assert!(book.tier_of(&hash(4)).is_some());
}

/// A request that saves blocks while no move to SSD runs.
fn save_without_moves(book: &mut Book, numbers: &[u64], now: u64) {
    let all = hashes(numbers);
    let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    for answer in book.offer(requester(now), offer, Timestamp(now)).unwrap() {
        if let OfferOutcome::Wanted(key) = answer {
            book.commit(key, CHARGE, Timestamp(now));
        }
    }
    book.release(LeaseId(now), Timestamp(now));
}

#[test]
fn one_tenants_reuse_does_not_keep_another_off_the_ssd() {
    let (mut book, _told) = book_with_ssd_mock(1, 8, 0.02);
    let save = |book: &mut Book, tenant: u32, kind: RequestKind, number: u64| {
        let who = Requester {
            tenant: TenantId(tenant),
            category: Category { kind, conversation_turn: 1 },
            ..requester(number)
        };
        let all = hashes(&[number]);
        let offer = SaveOffer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
        for answer in book.offer(who, offer, Timestamp(number)).unwrap() {
            if let OfferOutcome::Wanted(key) = answer {
                drain(book);
                book.commit(key, CHARGE, Timestamp(number));
            }
        }
        book.release(who.lease, Timestamp(number));
        drain(book);
    };
    for number in 1..4 {
        save(&mut book, 1, RequestKind::Text, number);
    }
    save(&mut book, 1, RequestKind::Api, 4);
    save(&mut book, 2, RequestKind::Api, 5);
    save(&mut book, 2, RequestKind::Text, 6);
    let ssd = Some(Tier::Ssd);
    assert_eq!(
        tiers(&book, 1..7),
        [ssd, ssd, ssd, None, ssd, Some(Tier::Dram)],
        "only the largest tenant is judged"
    );
}

#[test]
fn no_unlikely_block_is_dropped_while_pins_are_applied() {
    let (mut book, _told) = book_with_ssd_mock(1, 4, 0.0);
    run_request(&mut book, RequestKind::Api, &[1], 1);
    run_request(&mut book, RequestKind::Api, &[2], 2);
    book.ssd_writes.set_reuse_min(0.02);
    // More blocks than one step applies.
    let many: Vec<u64> = (100..100 + 2 * PIN_STEP_BLOCKS as u64).collect();
    pin(&mut book, &many, Timestamp(3));
    assert!(book.pins.has_pending_begins());
    book.on_rewrite(book.slab.find(&hash(1)).unwrap(), Timestamp(3));
    run_request(&mut book, RequestKind::Text, &[3], 4);
    assert_eq!(tiers(&book, 1..4), [Some(Tier::Ssd), Some(Tier::Ssd), Some(Tier::Dram)]);
}
