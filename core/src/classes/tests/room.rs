//! Rooms under random arrivals.

use super::super::{ClassRoom, FORGOTTEN_ASKS, HELD_UP_MAX, OVERTAKEN_MAX, Parts};
use super::Random;
use crate::id::Class;

const ALL: u64 = 1600;
const OF_FETCHES: Parts = [8, 0, 2, 2];
const OF_ALL: Parts = [6, 4, 2, 1];

/// Steps that an operation takes at most, and until a refused one asks again.
const LASTS: u64 = 12;
const AGAIN: u64 = 6;

struct Running {
    class: Class,
    amount: u64,
    until: u64,
}

#[derive(Clone, Copy)]
struct Waiting {
    class: Class,
    amount: u64,
    next: u64,
}

/// Others that went beyond their minimum, and steps, since a class was refused first.
#[derive(Clone, Copy)]
struct Passed {
    others: u32,
    since: u64,
}

struct World {
    seed: u64,
    random: Random,
    room: ClassRoom,
    parts: Parts,
    now: u64,
    running: Vec<Running>,
    waiting: Vec<Waiting>,
    passed: [Option<Passed>; 4],
    largest_of_first: u64,
    /// Of this many refused ones, one never asks again. None where it is 0.
    leaves: u64,
    let_in: [u64; 4],
}

impl World {
    fn new(seed: u64, parts: Parts, largest_of_first: u64, leaves: u64) -> World {
        let (random, room) = (Random::new(seed), ClassRoom::new(ALL, parts));
        let (running, waiting) = (Vec::new(), Vec::new());
        let (passed, let_in) = ([None; 4], [0; 4]);
        World {
            seed,
            random,
            room,
            parts,
            now: 0,
            running,
            waiting,
            passed,
            largest_of_first,
            leaves,
            let_in,
        }
    }

    fn first(&self) -> Class {
        Class::ALL[self.parts.iter().position(|part| *part > 0).unwrap()]
    }

    fn taken(&self) -> u64 {
        Class::ALL.map(|class| self.room.taken(class)).iter().sum()
    }

    /// Arrivals of a step: many of the first class, few of the others.
    fn arrive(&mut self) {
        for (at, class) in Class::ALL.into_iter().enumerate().filter(|(at, _)| self.parts[*at] > 0) {
            let is_first = class == self.first();
            let comes =
                if is_first { 2 + self.random.below(3) } else { u64::from(self.random.below(4) == 0) };
            let mine = self.waiting.iter().filter(|waiting| waiting.class == class).count() as u64;
            let largest = if is_first { self.largest_of_first } else { self.room.largest(Class::ALL[at]) };
            for _ in 0..comes.min(8u64.saturating_sub(mine)) {
                let amount = match self.random.below(3) {
                    0 => 1 + self.random.below(largest),
                    _ => 1 + self.random.below(largest.min(ALL / 8)),
                };
                self.waiting.push(Waiting { class, amount, next: self.now });
            }
        }
    }

    fn ask(&mut self, waiting: Waiting) {
        let Waiting { class, amount, .. } = waiting;
        let before = self.taken();
        let others: u64 = before - self.room.taken(class);
        let own = self.room.taken(class) + amount;
        let is_let_in = self.room.take(class, amount);
        let seed = self.seed;
        if class == self.first() && own <= self.room.minimum(class) {
            assert!(is_let_in, "seed {seed}: {class:?} is refused {amount} with {own} of its minimum");
        }
        if !is_let_in {
            if self.leaves > 0 && self.random.below(self.leaves) == 0 {
                // Whoever is left is bounded from here: of a class that nobody asks for nothing is promised.
                if !self.waiting.iter().any(|waiting| waiting.class == class) {
                    self.passed[class.rank()] = None;
                }
                return;
            }
            self.passed[class.rank()].get_or_insert(Passed { others: 0, since: self.now });
            let next = self.now + 1 + self.random.below(AGAIN);
            return self.waiting.push(Waiting { next, ..waiting });
        }
        let is_alone = before == 0 && class == self.first();
        assert!(is_alone || others + own <= ALL, "seed {seed}: {} of {ALL} are taken", others + own);
        self.let_in[class.rank()] += 1;
        self.passed[class.rank()] = None;
        if own > self.room.minimum(class) {
            for passed in self.passed.iter_mut().flatten() {
                passed.others += 1;
            }
        }
        let until = self.now + 1 + self.random.below(LASTS);
        self.running.push(Running { class, amount, until });
    }

    fn step(&mut self) {
        self.now += 1;
        let now = self.now;
        let (over, running) =
            std::mem::take(&mut self.running).into_iter().partition(|run: &Running| run.until <= now);
        self.running = running;
        for Running { class, amount, .. } in over {
            self.room.give_back(class, amount);
        }
        self.arrive();
        let (mut asking, waiting): (Vec<_>, _) =
            std::mem::take(&mut self.waiting).into_iter().partition(|waiting| waiting.next <= now);
        self.waiting = waiting;
        while !asking.is_empty() {
            let at = self.random.below(asking.len() as u64) as usize;
            let next = asking.swap_remove(at);
            self.ask(next);
        }
        self.check();
    }

    /// An empty room lets in what asks after a number of asks, whoever asked before and left.
    fn check_empty(&mut self) {
        let of = self.random.below(4) as usize;
        let (class, seed) = (Class::ALL[of], self.seed);
        let mut room = self.room.clone();
        for class in Class::ALL {
            room.give_back(class, room.taken(class));
        }
        let amount = 1 + self.random.below(if self.parts[of] > 0 { room.largest(class) } else { 1 });
        let refused = (0..=FORGOTTEN_ASKS).take_while(|_| !room.take(class, amount)).count() as u64;
        let refused_max = 3 * u64::from(HELD_UP_MAX);
        assert!(refused <= refused_max, "seed {seed}: {class:?} is refused {refused} times in an empty room");
    }

    /// Nobody is passed over more often, nor for longer, than is promised.
    fn check(&self) {
        for (at, passed) in self.passed.iter().enumerate() {
            let Some(passed) = passed else { continue };
            let (class, seed) = (Class::ALL[at], self.seed);
            // Behind those that are due already; each comes once.
            let others_max = OVERTAKEN_MAX[at] + 3;
            let is_giant = class == self.first() && self.largest_of_first > self.room.largest(class);
            if is_giant {
                continue;
            }
            assert!(passed.others <= others_max, "seed {seed}: {class:?} saw {} others", passed.others);
            let steps_max = u64::from(others_max + 1) * (LASTS + AGAIN + 1);
            let steps = self.now - passed.since;
            assert!(steps <= steps_max, "seed {seed}: {class:?} waits for {steps} of {steps_max} steps");
        }
    }
}

#[test]
fn no_class_starves_the_bound_holds_and_the_first_has_its_minimum_whatever_others_do() {
    for seed in 0..60 {
        for parts in [OF_FETCHES, OF_ALL] {
            let largest = ClassRoom::new(ALL, parts).largest(Class::Fetch);
            let mut world = World::new(seed, parts, largest, 0);
            (0..1_500).for_each(|_| world.step());
            let served = |class: Class| world.let_in[class.rank()];
            assert!(served(Class::Prefetch) > 20 && served(Class::Fetch) > served(Class::Prefetch));
        }
    }
}

#[test]
fn who_left_is_in_the_way_of_few_and_of_nobody_who_waits() {
    for seed in 0..60 {
        for (parts, giants) in [(OF_FETCHES, false), (OF_FETCHES, true), (OF_ALL, false)] {
            let largest = if giants { 2 * ALL } else { ClassRoom::new(ALL, parts).largest(Class::Fetch) };
            let mut world = World::new(seed, parts, largest, 3);
            for _ in 0..1_500 {
                world.step();
                world.check_empty();
            }
        }
    }
}

/// How often this is refused before it is let in.
fn refused(room: &mut ClassRoom, class: Class, amount: u64) -> u32 {
    (0..1_000).take_while(|_| !room.take(class, amount)).count() as u32
}

#[test]
fn one_that_was_refused_and_left_holds_up_so_many_others_only() {
    // A fetch is due at once, whether it finds the others' minima free or needs all there is.
    for amount in [ALL / 2, 2 * ALL] {
        let mut room = ClassRoom::new(ALL, OF_FETCHES);
        assert!(room.take(Class::Fetch, ALL / 2 + 1) && !room.take(Class::Fetch, amount));
        room.give_back(Class::Fetch, ALL / 2 + 1);
        assert_eq!(refused(&mut room, Class::Prefetch, ALL * 3 / 16), HELD_UP_MAX);
        room.give_back(Class::Prefetch, ALL * 3 / 16);
        assert_eq!(refused(&mut room, Class::Prefetch, ALL * 3 / 16), 0, "it is over");
    }
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    assert!(room.take(Class::Fetch, ALL / 2 + 1) && !room.take(Class::Prefetch, ALL / 2 - ALL / 8));
    for _ in 0..OVERTAKEN_MAX[Class::Prefetch.rank()] {
        assert!(room.take(Class::Fetch, 1));
    }
    assert_eq!(refused(&mut room, Class::Fetch, 1), HELD_UP_MAX);
    // Who asks again is due again.
    assert!(!room.take(Class::Prefetch, ALL / 2 - ALL / 8) && !room.take(Class::Fetch, 1));
}

#[test]
fn what_a_class_can_never_have_changes_nothing() {
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    let never = room.largest(Class::Prefetch) + 1;
    assert!(!room.take(Class::Prefetch, never) && room.take(Class::Fetch, ALL), "nothing is kept for it");
    room.give_back(Class::Fetch, ALL);
    // One that is due stays so beside what asks too much.
    assert!(room.take(Class::Fetch, ALL / 2 + 1) && !room.take(Class::Prefetch, never - 1));
    for _ in 0..OVERTAKEN_MAX[Class::Prefetch.rank()] {
        assert!(room.take(Class::Fetch, 1));
    }
    assert!(
        !room.take(Class::Prefetch, never) && !room.take(Class::Fetch, 1),
        "it would refill what was left"
    );
}

#[test]
fn what_is_larger_than_all_starves_no_other_class() {
    for seed in 0..60 {
        let mut world = World::new(seed, OF_FETCHES, 2 * ALL, 0);
        (0..3_000).for_each(|_| world.step());
        assert!(world.let_in[Class::Prefetch.rank()] > 20, "seed {seed}: {:?}", world.let_in);
    }
}

#[test]
fn others_have_nothing_while_one_that_needs_all_waits() {
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    assert!(room.take(Class::Prefetch, ALL / 16) && !room.take(Class::Fetch, 2 * ALL));
    assert!(!room.take(Class::Prefetch, 1), "it would never come to its turn");
    room.give_back(Class::Prefetch, ALL / 16);
    assert!(room.take(Class::Fetch, 2 * ALL));
}

#[test]
fn those_that_need_all_one_after_the_other_let_others_in_between() {
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    let mut passed = 0;
    loop {
        assert!(passed <= OVERTAKEN_MAX[Class::Prefetch.rank()] + 1, "the first came before it asked");
        if !room.take(Class::Fetch, 2 * ALL) {
            break;
        }
        assert!(
            !room.take(Class::Prefetch, 1) && !room.take(Class::Fetch, 2 * ALL),
            "they wait in this order"
        );
        room.give_back(Class::Fetch, 2 * ALL);
        passed += 1;
    }
    assert!(room.take(Class::Prefetch, 1), "nothing else is there");
}

#[test]
fn one_that_needs_all_and_never_finds_it_keeps_others_out_for_so_long_only() {
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    assert!(room.take(Class::Fetch, 1));
    for passed in 0.. {
        assert!(passed <= OVERTAKEN_MAX[Class::Prefetch.rank()] + 1, "it is due before what asks anew");
        // Of its own class there is always one more, within the minimum.
        assert!(!room.take(Class::Fetch, 2 * ALL));
        if room.take(Class::Prefetch, 1) {
            return;
        }
        assert!(room.take(Class::Fetch, 1));
        room.give_back(Class::Fetch, 1);
    }
}

#[test]
fn what_nobody_asked_for_is_kept_for_nobody_but_the_first() {
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    assert!(room.take(Class::Fetch, ALL), "all of it");
    assert!(!room.take(Class::Prefetch, 1));
    room.give_back(Class::Fetch, ALL);
    assert!(!room.take(Class::Prefetch, ALL / 2), "that is what fetches find");
    assert!(room.take(Class::Fetch, ALL / 2));
    assert!(
        room.take(Class::Fetch, ALL / 4) && !room.take(Class::Fetch, 1),
        "it asked, and has a quarter with its like"
    );
    assert!(room.take(Class::Prefetch, ALL / 8) && room.take(Class::Replicate, ALL / 8));
}

#[test]
fn what_is_kept_for_the_last_is_not_taken_from_the_minimum_of_the_first() {
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    assert!(room.take(Class::Replicate, ALL / 2 - ALL / 8) && room.take(Class::Replicate, ALL / 8));
    assert!(!room.take(Class::Prefetch, 1), "what is left is of fetches");
    assert!(room.take(Class::Fetch, ALL / 2), "and they have it");
}

#[test]
fn a_class_that_asks_no_more_keeps_nothing() {
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    assert!(room.take(Class::Fetch, ALL) && !room.take(Class::Prefetch, 1));
    room.give_back(Class::Fetch, ALL);
    assert!(room.take(Class::Fetch, 1));
    for ask in 1..FORGOTTEN_ASKS {
        assert!(!room.take(Class::Fetch, ALL - 1), "some is kept at ask {ask}");
    }
    assert!(room.take(Class::Fetch, ALL - 1), "and no longer");
}

#[test]
fn amounts_that_no_room_has_are_refused_and_overflow_nothing() {
    let mut room = ClassRoom::new(ALL, OF_FETCHES);
    assert!(room.take(Class::Fetch, u64::MAX), "alone");
    assert!(!room.take(Class::Fetch, u64::MAX) && !room.take(Class::Prefetch, u64::MAX));
    room.give_back(Class::Fetch, u64::MAX);
    assert!(!room.take(Class::Prefetch, u64::MAX));
    assert_eq!(room.taken(Class::Prefetch), 0);
    assert!(room.take(Class::Fetch, 10) && !room.take(Class::Fetch, u64::MAX));
    let mut all = ClassRoom::new(u64::MAX, OF_FETCHES);
    assert!(all.take(Class::Fetch, 1 << 63) && all.take(Class::Fetch, 1 << 61));
}
