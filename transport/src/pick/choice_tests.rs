//! The choice against paths whose speed is known: what it ends with, how often it changes, and what it costs.
#![allow(clippy::unwrap_used)]

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// Two paths whose fetches take a known time, give or take.
struct World {
    random: ChaCha8Rng,
    now: Instant,
    choice: Choice,
    /// Microseconds of a fetch over each.
    takes: [f64; 2],
    /// Share by which one fetch differs from another.
    noise: f64,
    usable: [bool; 2],
    /// Fetches that went over each.
    fetches: [u32; 2],
    changes: u32,
}

impl World {
    fn new(seed: u64, takes: [f64; 2], noise: f64) -> World {
        println!("seed {seed}");
        let now = Instant::now();
        World {
            random: ChaCha8Rng::seed_from_u64(seed),
            now,
            choice: Choice::new(ChoiceRules::default(), vec![PathKind::Quic, PathKind::Tcp], now),
            takes,
            noise,
            usable: [true; 2],
            fetches: [0; 2],
            changes: 0,
        }
    }

    /// So many fetches, ten milliseconds apart on average.
    fn run(&mut self, fetches: u32) {
        for _ in 0..fetches {
            self.now += Duration::from_micros(self.random.random_range(0..20_000));
            let before = self.choice.in_use();
            let at = self.choice.next_fetch(self.now, &self.usable).unwrap();
            assert!(self.usable[at]);
            self.fetches[at] += 1;
            let factor = 1.0 + self.random.random_range(-self.noise..=self.noise);
            let took = Duration::from_secs_f64(self.takes[at] * factor / 1e6);
            self.choice.fetched(self.now, at, 1 << 20, took);
            self.changes += u32::from(self.choice.in_use() != before);
        }
    }
}

#[test]
fn a_path_that_is_clearly_better_is_found_and_kept() {
    for seed in 0..100 {
        let mut world = World::new(seed, [1000.0, 550.0], 0.3);
        world.run(2_000);
        assert_eq!((world.choice.in_use(), world.changes), (1, 1), "seed {seed}");
        let Reason::Compared(last) = world.choice.reason() else { panic!("{:?}", world.choice.reason()) };
        assert_eq!((last.used.0, last.bytes), (PathKind::Tcp, 1 << 20), "the last turn was the other's");
        world.takes.reverse();
        world.run(60_000);
        assert_eq!(world.choice.in_use(), 0, "seed {seed}: the link changed, and so does the choice");
    }
}

#[test]
fn paths_that_are_about_the_same_change_nothing() {
    for seed in 0..100 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut world = World::new(seed, [1000.0, random.random_range(880.0..1500.0)], 0.3);
        world.run(20_000);
        assert_eq!((world.choice.in_use(), world.changes), (0, 0), "seed {seed}");
    }
}

/// What is tried costs little: of all fetches a ninth at most, and of a path that is always lost ever fewer.
#[test]
fn few_fetches_go_another_way() {
    for seed in 0..50 {
        let mut world = World::new(seed, [100.0, 10_000.0], 0.5);
        world.run(1_000);
        assert!(world.fetches[1] * 9 <= 1_000 + 9 * 12, "seed {seed}: {:?}", world.fetches);
        let early = world.fetches[1];
        world.run(29_000);
        // Five minutes: turns after 2, 6, 14, 30, 62, 126, 254 seconds.
        let turns = world.fetches[1] / 12;
        assert!((5..=8).contains(&turns) && early >= 12, "seed {seed}: {turns} turns, {early} fetches early");
    }
}

/// A path over which nothing comes in time any more gives no fetch to measure, and is left all the same.
#[test]
fn a_path_that_only_comes_late_is_left() {
    for seed in 0..50 {
        let mut world = World::new(seed, [1000.0, 1000.0], 0.2);
        world.run(200);
        for _ in 0..3_000 {
            world.now += Duration::from_millis(world.random.random_range(0..20));
            match world.choice.next_fetch(world.now, &world.usable).unwrap() {
                0 => world.choice.late(world.now, 0, Duration::from_millis(50)),
                at => world.choice.fetched(world.now, at, 1 << 20, Duration::from_millis(1)),
            }
        }
        assert_eq!(world.choice.in_use(), 1, "seed {seed}: {}", world.choice.reason());
    }
}

#[test]
fn a_deadline_that_is_too_short_anyway_says_nothing() {
    let mut world = World::new(1, [1000.0, 1000.0], 0.0);
    world.run(50);
    let before = world.choice.estimate(0).expects(1 << 20);
    world.choice.late(world.now, 0, Duration::from_micros(10));
    assert_eq!(world.choice.estimate(0).expects(1 << 20), before);
    world.choice.late(world.now, 0, Duration::from_millis(10));
    assert!(world.choice.estimate(0).expects(1 << 20) > before);
}

/// A path that nothing came over yet would look as fast as whoever waits is impatient.
#[test]
fn what_is_given_up_at_once_in_a_first_turn_counts_for_nothing() {
    let mut world = World::new(1, [1000.0, 1000.0], 0.0);
    world.usable = [true, false];
    world.run(300);
    world.usable = [true; 2];
    world.choice.pinged(1, Duration::from_millis(1));
    for _ in 0..ChoiceRules::default().turn_fetches {
        assert_eq!(world.choice.next_fetch(world.now, &world.usable), Some(1), "its turn goes on");
        world.choice.late(world.now, 1, Duration::from_micros(100));
    }
    assert_eq!((world.choice.estimate(1).fetches(), world.choice.reason()), (0, &Reason::Default));
    world.choice.fetched(world.now, 1, 1 << 20, Duration::from_millis(3));
    let expected = world.choice.estimate(1).expects(1 << 20).unwrap();
    assert_eq!(expected.as_micros(), 3_000, "what comes is measured as it is");
}

/// Else a turn would be judged by what was known before it.
#[test]
fn a_turn_of_fetches_that_were_given_up_at_once_is_not_won() {
    let mut world = World::new(1, [1000.0, 500.0], 0.0);
    while !matches!(world.choice.reason(), Reason::Compared(Compared { outcome: Outcome::Ahead, .. })) {
        world.run(1);
    }
    world.usable = [true, false];
    world.run(300);
    world.usable = [true; 2];
    for _ in 0..ChoiceRules::default().turn_fetches {
        assert_eq!(world.choice.next_fetch(world.now, &world.usable), Some(1), "the second turn");
        world.choice.late(world.now, 1, Duration::from_micros(100));
    }
    assert_eq!(world.choice.in_use(), 0, "{}", world.choice.reason());
    let late = world.now + ChoiceRules::default().turn_max;
    assert_eq!(world.choice.next_fetch(late, &world.usable), Some(0));
    assert_eq!(*world.choice.reason(), Reason::TooFew { other: PathKind::Tcp, fetches: 0 });
}

#[test]
fn where_there_is_little_to_fetch_little_is_tried() {
    let mut world = World::new(7, [1000.0, 500.0], 0.0);
    for _ in 0..50 {
        world.now += Duration::from_secs(60);
        world.run(1);
    }
    assert_eq!(world.fetches, [50, 0], "an hour, and less than a turn's share");
}

#[test]
fn what_cannot_be_used_is_not_tried_and_what_is_in_use_is_stood_in_for() {
    let mut world = World::new(3, [1000.0, 500.0], 0.0);
    world.usable = [true, false];
    world.run(1_000);
    assert_eq!(world.fetches, [1_000, 0]);
    world.usable = [false, true];
    world.run(10);
    assert_eq!((world.fetches, world.choice.in_use()), ([1_000, 10], 0), "for now, and proving nothing");
    assert_eq!(world.choice.next_fetch(world.now, &[false, false]), None);
}

#[test]
fn a_path_that_fails_in_its_turn_loses_it() {
    let mut world = World::new(5, [1000.0, 100.0], 0.0);
    while world.fetches[1] == 0 {
        world.run(1);
    }
    world.choice.failed(world.now, 1);
    assert_eq!(*world.choice.reason(), Reason::Failed { other: PathKind::Tcp });
    world.run(1);
    assert_eq!(world.fetches[1], 1, "the rest of the turn is off");
}

#[test]
fn a_turn_that_nothing_counts_in_ends_and_says_so() {
    let mut world = World::new(5, [1000.0, 100.0], 0.0);
    while world.fetches[1] < 2 {
        world.run(1);
    }
    // What is given from now on comes from a slow medium.
    for _ in 0..20 {
        world.choice.next_fetch(world.now, &world.usable);
    }
    let late = world.now + ChoiceRules::default().turn_max;
    assert_eq!(world.choice.next_fetch(late, &world.usable), Some(0));
    assert_eq!(*world.choice.reason(), Reason::TooFew { other: PathKind::Tcp, fetches: 2 });
    assert_eq!(
        world.choice.reason().to_string(),
        "tcp was tried with 2 fetches from memory, too few to compare"
    );
}

#[test]
fn the_reason_can_be_read() {
    let used = (PathKind::Quic, Duration::from_micros(1020));
    let other = (PathKind::Tcp, Duration::from_micros(530));
    let says = |outcome| Reason::Compared(Compared { outcome, bytes: 65_536, used, other }).to_string();
    let figures = "65536 bytes take 1.0ms over quic and 530.0µs over tcp: ";
    assert_eq!(says(Outcome::Stays), format!("{figures}not clearly better, quic stays"));
    assert_eq!(says(Outcome::Ahead), format!("{figures}clearly better, tcp has to show it once more"));
    assert_eq!(says(Outcome::Changed), format!("{figures}clearly better again, tcp is used from now on"));
    assert_eq!(Reason::Default.to_string(), "the default, nothing was compared yet");
}
