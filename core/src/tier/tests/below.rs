//! Two tiers with policies of their own: what each is told of uses in the other, and what is not worth being written below.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::id::{Category, RequestKind};

/// What the policy of the SSD was told, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Passed(u32),
    MovedIn,
    Inserted,
}

/// The plain LRU, which takes what programs call for unlikely to be used.
struct Below {
    lru: PlainLru,
    told: Sender<Word>,
    kinds: BTreeMap<BlockKey, RequestKind>,
}

fn chance(kind: RequestKind) -> f64 {
    if kind == RequestKind::Api { 0.01 } else { 0.5 }
}

impl Policy for Below {
    fn name(&self) -> &'static str {
        "below"
    }

    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.told.send(Word::Inserted).unwrap();
        self.lru.insert(key, traits, now);
    }

    fn moved_in(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.told.send(Word::MovedIn).unwrap();
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

    fn pass(&mut self, traits: BlockTraits, _: Timestamp) {
        self.told.send(Word::Passed(traits.offset_blocks)).unwrap();
    }

    fn prospect(&mut self, mover: BlockTraits, victim: Option<BlockKey>, _: Timestamp) -> f64 {
        let room = victim.and_then(|victim| self.kinds.get(&victim)).map_or(0.0, |kind| chance(*kind));
        let chance = chance(mover.category.kind);
        if chance < room { 0.0 } else { chance }
    }

    fn prospect_of(&mut self, resident: BlockKey, _: Timestamp) -> f64 {
        chance(self.kinds[&resident])
    }

    fn len(&self) -> usize {
        self.lru.len()
    }
}

fn two(dram: u64, ssd: u64, reuse_min: f64) -> (Book, Receiver<Word>) {
    let exact = |blocks| TierLimits::exact(Capacity::Blocks(blocks));
    let limits = Limits {
        dram: exact(dram),
        ssd: exact(ssd),
        lease: Duration::from_secs(10),
        leases_max: 64,
        seed: 1,
    };
    let (tell, told) = channel();
    let below = Below { lru: PlainLru::default(), told: tell, kinds: BTreeMap::new() };
    let book = Book::new(&limits, Box::<PlainLru>::default(), Box::new(below));
    (book.with_ssd_reuse_min(reuse_min), told)
}

/// A whole request of a kind.
fn of(book: &mut Book, kind: RequestKind, numbers: &[u64], now: u64) {
    let who = Asker { category: Category { kind, turn: 1 }, ..asker(now) };
    let all = hashes(numbers);
    let hits = book.fetch(who, &all, Timestamp(now)).unwrap().len();
    drain(book);
    let offer =
        Offer { parent: None, first_offset_blocks: hits as u32, hashes: &all[hits..], charge: CHARGE };
    let answers = book.offer(who, offer, Timestamp(now)).unwrap();
    drain(book);
    for answer in answers {
        if let Offered::Wanted(key) = answer {
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
fn the_policy_of_the_ssd_hears_of_every_use_and_of_moves_as_such() {
    let (mut book, told) = two(2, 4, 0.0);
    of(&mut book, RequestKind::Text, &[1, 2], 1);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [Word::Passed(1), Word::Passed(0)]);
    of(&mut book, RequestKind::Text, &[3], 2);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [Word::MovedIn, Word::Passed(0)]);
    // Block 2 comes up to be read, and block 1 goes down for it.
    assert_eq!(book.tier_of(&hash(2)), Some(Tier::Ssd));
    of(&mut book, RequestKind::Text, &[2], 3);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [Word::MovedIn, Word::Passed(1)]);
}

#[test]
fn what_is_unlikely_to_be_used_is_not_written() {
    let (mut book, _told) = two(1, 4, 0.02);
    of(&mut book, RequestKind::Api, &[1], 1);
    of(&mut book, RequestKind::Text, &[2], 2);
    of(&mut book, RequestKind::Text, &[3], 3);
    assert_eq!(tiers(&book, 1..4), [None, Some(Tier::Ssd), Some(Tier::Dram)]);
    assert_eq!(book.stats(Tier::Ssd).turned_away_blocks, 1);
    assert_eq!((book.stats(Tier::Dram).dropped_blocks, book.stats(Tier::Dram).demoted_blocks), (1, 1));
}

#[test]
fn what_somebody_pinned_or_waits_for_is_written_however_unlikely() {
    let (mut book, _told) = two(1, 4, 0.02);
    of(&mut book, RequestKind::Api, &[1], 1);
    book.set_pins([order(1, PinKind::Soft, &[1])], Timestamp(2));
    of(&mut book, RequestKind::Api, &[2], 2);
    assert_eq!(tiers(&book, 1..3), [Some(Tier::Ssd), Some(Tier::Dram)]);
    book.set_window([hashes(&[2]).as_slice()], Timestamp(3));
    of(&mut book, RequestKind::Text, &[3], 3);
    assert_eq!(tiers(&book, 1..4), [Some(Tier::Ssd), Some(Tier::Ssd), Some(Tier::Dram)]);
}

#[test]
fn nothing_likelier_leaves_the_ssd_for_what_comes_down() {
    let (mut book, _told) = two(1, 2, 0.0);
    for (number, kind) in [(1, RequestKind::Text), (2, RequestKind::Text), (3, RequestKind::Api)] {
        of(&mut book, kind, &[number], number);
    }
    of(&mut book, RequestKind::Text, &[4], 4);
    assert_eq!(tiers(&book, 1..5), [Some(Tier::Ssd), Some(Tier::Ssd), None, Some(Tier::Dram)]);
    of(&mut book, RequestKind::Text, &[5], 5);
    assert_eq!(tiers(&book, 1..6), [None, Some(Tier::Ssd), None, Some(Tier::Ssd), Some(Tier::Dram)]);
}

#[test]
fn what_is_unlikely_to_be_used_is_not_written_again() {
    let (mut book, _told) = two(1, 4, 0.0);
    for (number, kind) in
        [(1, RequestKind::Text), (2, RequestKind::Api), (3, RequestKind::Api), (4, RequestKind::Api)]
    {
        of(&mut book, kind, &[number], number);
    }
    book.set_pins([order(1, PinKind::Soft, &[3])], Timestamp(5));
    let keys: Vec<BlockKey> = (1..4).map(|number| book.slab.find(&hash(number)).unwrap()).collect();
    keys.iter().for_each(|key| book.on_rewrite(*key, Timestamp(5)));
    assert_eq!(tiers(&book, 1..4), [Some(Tier::Ssd); 3], "as nobody said that there is a least chance");
    book.reuse_min = 0.02;
    keys.iter().for_each(|key| book.on_rewrite(*key, Timestamp(5)));
    assert_eq!(tiers(&book, 1..4), [Some(Tier::Ssd), None, Some(Tier::Ssd)], "a pin keeps it");
    assert_eq!(book.stats(Tier::Ssd).dropped_blocks, 1);
    let actions: Vec<Action> = std::iter::from_fn(|| book.next_action(ALL_ROOM)).collect();
    assert!(matches!(actions[..], [Action::DropSsd { .. }]), "{actions:?}");
    // What is on its way to a reader stays.
    book.reuse_min = 0.0;
    of(&mut book, RequestKind::Api, &[5], 6);
    book.reuse_min = 0.02;
    book.fetch(asker(7), &hashes(&[4]), Timestamp(7)).unwrap();
    let read = book.slab.find(&hash(4)).unwrap();
    book.on_rewrite(read, Timestamp(7));
    assert!(book.tier_of(&hash(4)).is_some());
    // And one that is not there yet.
    book.release(LeaseId(7), Timestamp(8));
    drain(&mut book);
    let writes =
        |book: &mut Book| std::iter::from_fn(|| book.next_action(Room { ssd: false, ..ALL_ROOM })).count();
    book.reuse_min = 0.0;
    of_without_moves(&mut book, &[6], 9);
    writes(&mut book);
    book.reuse_min = 0.02;
    let waits = book.slab.find(&hash(4)).unwrap();
    assert_eq!((book.place(waits), book.slab.get(waits).unwrap().copies.ssd), (Some(Tier::Ssd), false));
    book.on_rewrite(waits, Timestamp(9));
    assert!(book.tier_of(&hash(4)).is_some());
}

/// A request whose blocks are saved while nothing is moved to SSD.
fn of_without_moves(book: &mut Book, numbers: &[u64], now: u64) {
    let all = hashes(numbers);
    let offer = Offer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
    for answer in book.offer(asker(now), offer, Timestamp(now)).unwrap() {
        if let Offered::Wanted(key) = answer {
            book.commit(key, CHARGE, Timestamp(now));
        }
    }
    book.release(LeaseId(now), Timestamp(now));
}

#[test]
fn what_one_tenant_does_keeps_nothing_of_another_off_the_ssd() {
    let (mut book, _told) = two(1, 8, 0.02);
    let save = |book: &mut Book, tenant: u32, kind: RequestKind, number: u64| {
        let who = Asker { tenant: TenantId(tenant), category: Category { kind, turn: 1 }, ..asker(number) };
        let all = hashes(&[number]);
        let offer = Offer { parent: None, first_offset_blocks: 0, hashes: &all, charge: CHARGE };
        for answer in book.offer(who, offer, Timestamp(number)).unwrap() {
            if let Offered::Wanted(key) = answer {
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
        "who has most, and who has none"
    );
}

#[test]
fn nothing_goes_for_being_unlikely_while_pins_are_being_marked() {
    let (mut book, _told) = two(1, 4, 0.0);
    of(&mut book, RequestKind::Api, &[1], 1);
    of(&mut book, RequestKind::Api, &[2], 2);
    book.reuse_min = 0.02;
    // More than are marked in one step.
    let many: Vec<u64> = (100..100 + 2 * PIN_STEP_BLOCKS as u64).collect();
    pin(&mut book, &many, Timestamp(3));
    assert!(book.pins.is_beginning());
    book.on_rewrite(book.slab.find(&hash(1)).unwrap(), Timestamp(3));
    of(&mut book, RequestKind::Text, &[3], 4);
    assert_eq!(tiers(&book, 1..4), [Some(Tier::Ssd), Some(Tier::Ssd), Some(Tier::Dram)]);
}
