//! Class quotas under random arrivals.

use super::super::{ClassMinima, ClassQuota, HELD_BACK_MAX, INACTIVE_AFTER_REQUESTS, OVERTAKEN_MAX};
use super::TestRandom;
use crate::id::TrafficClass;

const ALL: u64 = 1600;
const FETCH_MINIMA: ClassMinima = [8, 0, 2, 2];
const ALL_MINIMA: ClassMinima = [6, 4, 2, 1];

/// Most steps that an operation takes, and that pass until a refused one asks again.
const DURATION_STEPS_MAX: u64 = 12;
const RETRY_STEPS_MAX: u64 = 6;

struct RunningOperation {
    class: TrafficClass,
    amount: u64,
    until: u64,
}

#[derive(Clone, Copy)]
struct WaitingOperation {
    class: TrafficClass,
    amount: u64,
    next: u64,
}

/// Others admitted beyond their minimum, and steps, since a class was first refused.
#[derive(Clone, Copy)]
struct OvertakenCount {
    others: u32,
    since: u64,
}

struct QuotaWorld {
    seed: u64,
    random: TestRandom,
    quota: ClassQuota,
    parts: ClassMinima,
    now: u64,
    running: Vec<RunningOperation>,
    waiting: Vec<WaitingOperation>,
    overtaken: [Option<OvertakenCount>; 4],
    largest_of_first: u64,
    /// One in this many refused callers never asks again; 0 for none.
    one_in_leaves: u64,
    admitted: [u64; 4],
}

impl QuotaWorld {
    fn new(seed: u64, parts: ClassMinima, largest_of_first: u64, one_in_leaves: u64) -> QuotaWorld {
        let (random, quota) = (TestRandom::new(seed), ClassQuota::new(ALL, parts));
        let (running, waiting) = (Vec::new(), Vec::new());
        let (overtaken, admitted) = ([None; 4], [0; 4]);
        QuotaWorld {
            seed,
            random,
            quota,
            parts,
            now: 0,
            running,
            waiting,
            overtaken,
            largest_of_first,
            one_in_leaves,
            admitted,
        }
    }

    fn first(&self) -> TrafficClass {
        TrafficClass::ALL[self.parts.iter().position(|part| *part > 0).unwrap()]
    }

    fn taken(&self) -> u64 {
        TrafficClass::ALL.map(|class| self.quota.taken(class)).iter().sum()
    }

    /// Arrivals of a step: many of the first class, few of the others.
    fn add_arrivals(&mut self) {
        for (at, class) in TrafficClass::ALL.into_iter().enumerate().filter(|(at, _)| self.parts[*at] > 0) {
            let is_first = class == self.first();
            let comes =
                if is_first { 2 + self.random.below(3) } else { u64::from(self.random.below(4) == 0) };
            let mine = self.waiting.iter().filter(|waiting| waiting.class == class).count() as u64;
            let largest = if is_first {
                self.largest_of_first
            } else {
                self.quota.largest_operation(TrafficClass::ALL[at])
            };
            for _ in 0..comes.min(8u64.saturating_sub(mine)) {
                let amount = match self.random.below(3) {
                    0 => 1 + self.random.below(largest),
                    _ => 1 + self.random.below(largest.min(ALL / 8)),
                };
                self.waiting.push(WaitingOperation { class, amount, next: self.now });
            }
        }
    }

    fn request(&mut self, waiting: WaitingOperation) {
        let WaitingOperation { class, amount, .. } = waiting;
        let before = self.taken();
        let others: u64 = before - self.quota.taken(class);
        let own = self.quota.taken(class) + amount;
        let is_let_in = self.quota.try_take(class, amount);
        let seed = self.seed;
        if class == self.first() && own <= self.quota.minimum(class) {
            assert!(is_let_in, "seed {seed}: {class:?} is refused {amount} with {own} of its minimum");
        }
        if !is_let_in {
            if self.one_in_leaves > 0 && self.random.below(self.one_in_leaves) == 0 {
                // The bound applies to the remaining callers from here: a class without callers has
                // no guarantee.
                if !self.waiting.iter().any(|waiting| waiting.class == class) {
                    self.overtaken[class.rank()] = None;
                }
                return;
            }
            self.overtaken[class.rank()].get_or_insert(OvertakenCount { others: 0, since: self.now });
            let next = self.now + 1 + self.random.below(RETRY_STEPS_MAX);
            return self.waiting.push(WaitingOperation { next, ..waiting });
        }
        let is_alone = before == 0 && class == self.first();
        assert!(is_alone || others + own <= ALL, "seed {seed}: {} of {ALL} are taken", others + own);
        self.admitted[class.rank()] += 1;
        self.overtaken[class.rank()] = None;
        if own > self.quota.minimum(class) {
            for passed in self.overtaken.iter_mut().flatten() {
                passed.others += 1;
            }
        }
        let until = self.now + 1 + self.random.below(DURATION_STEPS_MAX);
        self.running.push(RunningOperation { class, amount, until });
    }

    fn step(&mut self) {
        self.now += 1;
        let now = self.now;
        let (over, running) = std::mem::take(&mut self.running)
            .into_iter()
            .partition(|run: &RunningOperation| run.until <= now);
        self.running = running;
        for RunningOperation { class, amount, .. } in over {
            self.quota.release(class, amount);
        }
        self.add_arrivals();
        let (mut asking, waiting): (Vec<_>, _) =
            std::mem::take(&mut self.waiting).into_iter().partition(|waiting| waiting.next <= now);
        self.waiting = waiting;
        while !asking.is_empty() {
            let at = self.random.below(asking.len() as u64) as usize;
            let next = asking.swap_remove(at);
            self.request(next);
        }
        self.check();
    }

    /// An empty resource admits an operation after a bounded number of requests, whichever callers
    /// asked before and left.
    fn check_empty(&mut self) {
        let of = self.random.below(4) as usize;
        let (class, seed) = (TrafficClass::ALL[of], self.seed);
        let mut room = self.quota.clone();
        for class in TrafficClass::ALL {
            room.release(class, room.taken(class));
        }
        let amount =
            1 + self.random.below(if self.parts[of] > 0 { room.largest_operation(class) } else { 1 });
        let refused =
            (0..=INACTIVE_AFTER_REQUESTS).take_while(|_| !room.try_take(class, amount)).count() as u64;
        let refused_max = 3 * u64::from(HELD_BACK_MAX);
        assert!(
            refused <= refused_max,
            "seed {seed}: {class:?} is refused {refused} times by an empty resource"
        );
    }

    /// No class is overtaken more often, or for longer, than guaranteed.
    fn check(&self) {
        for (at, passed) in self.overtaken.iter().enumerate() {
            let Some(passed) = passed else { continue };
            let (class, seed) = (TrafficClass::ALL[at], self.seed);
            // Behind starved classes; each comes once.
            let others_max = OVERTAKEN_MAX[at] + 3;
            let is_giant =
                class == self.first() && self.largest_of_first > self.quota.largest_operation(class);
            if is_giant {
                continue;
            }
            assert!(passed.others <= others_max, "seed {seed}: {class:?} saw {} others", passed.others);
            let steps_max = u64::from(others_max + 1) * (DURATION_STEPS_MAX + RETRY_STEPS_MAX + 1);
            let steps = self.now - passed.since;
            assert!(steps <= steps_max, "seed {seed}: {class:?} waits for {steps} of {steps_max} steps");
        }
    }
}

#[test]
fn no_class_starves_and_first_class_keeps_its_minimum() {
    for seed in 0..60 {
        for parts in [FETCH_MINIMA, ALL_MINIMA] {
            let largest = ClassQuota::new(ALL, parts).largest_operation(TrafficClass::Fetch);
            let mut world = QuotaWorld::new(seed, parts, largest, 0);
            (0..1_500).for_each(|_| world.step());
            let served = |class: TrafficClass| world.admitted[class.rank()];
            assert!(
                served(TrafficClass::Prefetch) > 20
                    && served(TrafficClass::Fetch) > served(TrafficClass::Prefetch)
            );
        }
    }
}

#[test]
fn abandoned_requests_block_only_a_bounded_number_of_others() {
    for seed in 0..60 {
        for (parts, giants) in [(FETCH_MINIMA, false), (FETCH_MINIMA, true), (ALL_MINIMA, false)] {
            let largest = if giants {
                2 * ALL
            } else {
                ClassQuota::new(ALL, parts).largest_operation(TrafficClass::Fetch)
            };
            let mut world = QuotaWorld::new(seed, parts, largest, 3);
            for _ in 0..1_500 {
                world.step();
                world.check_empty();
            }
        }
    }
}

/// Number of refusals before this one is admitted.
fn refusals(room: &mut ClassQuota, class: TrafficClass, amount: u64) -> u32 {
    (0..1_000).take_while(|_| !room.try_take(class, amount)).count() as u32
}

#[test]
fn abandoned_refusal_holds_back_a_bounded_number() {
    // A fetch is starved at once, whether it finds the others' minima free or needs the whole
    // capacity.
    for amount in [ALL / 2, 2 * ALL] {
        let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
        assert!(
            room.try_take(TrafficClass::Fetch, ALL / 2 + 1) && !room.try_take(TrafficClass::Fetch, amount)
        );
        room.release(TrafficClass::Fetch, ALL / 2 + 1);
        assert_eq!(refusals(&mut room, TrafficClass::Prefetch, ALL * 3 / 16), HELD_BACK_MAX);
        room.release(TrafficClass::Prefetch, ALL * 3 / 16);
        assert_eq!(
            refusals(&mut room, TrafficClass::Prefetch, ALL * 3 / 16),
            0,
            "it no longer holds others back"
        );
    }
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    assert!(
        room.try_take(TrafficClass::Fetch, ALL / 2 + 1)
            && !room.try_take(TrafficClass::Prefetch, ALL / 2 - ALL / 8)
    );
    for _ in 0..OVERTAKEN_MAX[TrafficClass::Prefetch.rank()] {
        assert!(room.try_take(TrafficClass::Fetch, 1));
    }
    assert_eq!(refusals(&mut room, TrafficClass::Fetch, 1), HELD_BACK_MAX);
    // A class that asks again is starved again.
    assert!(
        !room.try_take(TrafficClass::Prefetch, ALL / 2 - ALL / 8) && !room.try_take(TrafficClass::Fetch, 1)
    );
}

#[test]
fn impossible_amount_has_no_effect() {
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    let never = room.largest_operation(TrafficClass::Prefetch) + 1;
    assert!(
        !room.try_take(TrafficClass::Prefetch, never) && room.try_take(TrafficClass::Fetch, ALL),
        "no capacity is kept for it"
    );
    room.release(TrafficClass::Fetch, ALL);
    // A starved class stays so beside a request that is too large.
    assert!(
        room.try_take(TrafficClass::Fetch, ALL / 2 + 1) && !room.try_take(TrafficClass::Prefetch, never - 1)
    );
    for _ in 0..OVERTAKEN_MAX[TrafficClass::Prefetch.rank()] {
        assert!(room.try_take(TrafficClass::Fetch, 1));
    }
    assert!(
        !room.try_take(TrafficClass::Prefetch, never) && !room.try_take(TrafficClass::Fetch, 1),
        "it would refill the remaining capacity"
    );
}

#[test]
fn oversized_fetches_starve_no_other_class() {
    for seed in 0..60 {
        let mut world = QuotaWorld::new(seed, FETCH_MINIMA, 2 * ALL, 0);
        (0..3_000).for_each(|_| world.step());
        assert!(world.admitted[TrafficClass::Prefetch.rank()] > 20, "seed {seed}: {:?}", world.admitted);
    }
}

#[test]
fn others_are_blocked_while_an_oversized_fetch_waits() {
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    assert!(room.try_take(TrafficClass::Prefetch, ALL / 16) && !room.try_take(TrafficClass::Fetch, 2 * ALL));
    assert!(!room.try_take(TrafficClass::Prefetch, 1), "it would never be admitted");
    room.release(TrafficClass::Prefetch, ALL / 16);
    assert!(room.try_take(TrafficClass::Fetch, 2 * ALL));
}

#[test]
fn consecutive_oversized_fetches_admit_others_in_between() {
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    let mut passed = 0;
    loop {
        assert!(passed <= OVERTAKEN_MAX[TrafficClass::Prefetch.rank()] + 1, "it was served before it asked");
        if !room.try_take(TrafficClass::Fetch, 2 * ALL) {
            break;
        }
        assert!(
            !room.try_take(TrafficClass::Prefetch, 1) && !room.try_take(TrafficClass::Fetch, 2 * ALL),
            "they wait in this order"
        );
        room.release(TrafficClass::Fetch, 2 * ALL);
        passed += 1;
    }
    assert!(room.try_take(TrafficClass::Prefetch, 1), "the resource is empty");
}

#[test]
fn unserved_oversized_fetch_blocks_others_for_a_bounded_time() {
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    assert!(room.try_take(TrafficClass::Fetch, 1));
    for passed in 0.. {
        assert!(
            passed <= OVERTAKEN_MAX[TrafficClass::Prefetch.rank()] + 1,
            "it is served before new requests"
        );
        // Its own class always has one more operation within its minimum.
        assert!(!room.try_take(TrafficClass::Fetch, 2 * ALL));
        if room.try_take(TrafficClass::Prefetch, 1) {
            return;
        }
        assert!(room.try_take(TrafficClass::Fetch, 1));
        room.release(TrafficClass::Fetch, 1);
    }
}

#[test]
fn unrequested_minimum_is_kept_for_first_class_only() {
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    assert!(room.try_take(TrafficClass::Fetch, ALL), "all of it");
    assert!(!room.try_take(TrafficClass::Prefetch, 1));
    room.release(TrafficClass::Fetch, ALL);
    assert!(!room.try_take(TrafficClass::Prefetch, ALL / 2), "fetches keep this part");
    assert!(room.try_take(TrafficClass::Fetch, ALL / 2));
    assert!(
        room.try_take(TrafficClass::Fetch, ALL / 4) && !room.try_take(TrafficClass::Fetch, 1),
        "it asked, and its class has a quarter"
    );
    assert!(
        room.try_take(TrafficClass::Prefetch, ALL / 8) && room.try_take(TrafficClass::Replicate, ALL / 8)
    );
}

#[test]
fn lower_minimum_is_not_taken_from_the_first_class() {
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    assert!(
        room.try_take(TrafficClass::Replicate, ALL / 2 - ALL / 8)
            && room.try_take(TrafficClass::Replicate, ALL / 8)
    );
    assert!(!room.try_take(TrafficClass::Prefetch, 1), "the rest belongs to fetches");
    assert!(room.try_take(TrafficClass::Fetch, ALL / 2), "fetches get it");
}

#[test]
fn inactive_class_keeps_no_minimum() {
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    assert!(room.try_take(TrafficClass::Fetch, ALL) && !room.try_take(TrafficClass::Prefetch, 1));
    room.release(TrafficClass::Fetch, ALL);
    assert!(room.try_take(TrafficClass::Fetch, 1));
    for ask in 1..INACTIVE_AFTER_REQUESTS {
        assert!(!room.try_take(TrafficClass::Fetch, ALL - 1), "some is kept at request {ask}");
    }
    assert!(room.try_take(TrafficClass::Fetch, ALL - 1), "no longer kept");
}

#[test]
fn huge_amounts_are_refused_without_overflow() {
    let mut room = ClassQuota::new(ALL, FETCH_MINIMA);
    assert!(room.try_take(TrafficClass::Fetch, u64::MAX), "alone");
    assert!(
        !room.try_take(TrafficClass::Fetch, u64::MAX) && !room.try_take(TrafficClass::Prefetch, u64::MAX)
    );
    room.release(TrafficClass::Fetch, u64::MAX);
    assert!(!room.try_take(TrafficClass::Prefetch, u64::MAX));
    assert_eq!(room.taken(TrafficClass::Prefetch), 0);
    assert!(room.try_take(TrafficClass::Fetch, 10) && !room.try_take(TrafficClass::Fetch, u64::MAX));
    let mut all = ClassQuota::new(u64::MAX, FETCH_MINIMA);
    assert!(all.try_take(TrafficClass::Fetch, 1 << 63) && all.try_take(TrafficClass::Fetch, 1 << 61));
}
