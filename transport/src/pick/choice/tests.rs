//! The choice with paths of known speed: its result, its switches, and its cost.
#![allow(clippy::unwrap_used)]

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// Two paths with known fetch times plus noise.
struct ChoiceSim {
    random: ChaCha8Rng,
    now: Instant,
    choice: PathChoice,
    /// Microseconds of a fetch over each path.
    fetch_us: [f64; 2],
    /// Relative noise of a single fetch.
    noise: f64,
    usable: [bool; 2],
    /// Fetches over each path.
    fetches: [u32; 2],
    changes: u32,
}

impl ChoiceSim {
    fn new(seed: u64, fetch_us: [f64; 2], noise: f64) -> ChoiceSim {
        println!("seed {seed}");
        let now = Instant::now();
        ChoiceSim {
            random: ChaCha8Rng::seed_from_u64(seed),
            now,
            choice: PathChoice::new(ChoiceRules::default(), vec![PathKind::Quic, PathKind::Tcp], now),
            fetch_us,
            noise,
            usable: [true; 2],
            fetches: [0; 2],
            changes: 0,
        }
    }

    /// Simulates fetches, ten milliseconds apart on average.
    fn run(&mut self, fetches: u32) {
        for _ in 0..fetches {
            self.now += Duration::from_micros(self.random.random_range(0..20_000));
            let before = self.choice.current();
            let at = self.choice.next_fetch(self.now, &self.usable).unwrap();
            assert!(self.usable[at]);
            self.fetches[at] += 1;
            let factor = 1.0 + self.random.random_range(-self.noise..=self.noise);
            let took = Duration::from_secs_f64(self.fetch_us[at] * factor / 1e6);
            self.choice.record_fetch(self.now, at, 1 << 20, took);
            self.changes += u32::from(self.choice.current() != before);
        }
    }
}

#[test]
fn a_clearly_better_path_becomes_current() {
    for seed in 0..100 {
        let mut world = ChoiceSim::new(seed, [1000.0, 550.0], 0.3);
        world.run(2_000);
        assert_eq!((world.choice.current(), world.changes), (1, 1), "seed {seed}");
        let PickReason::Compared(last) = world.choice.reason() else { panic!("{:?}", world.choice.reason()) };
        assert_eq!(
            (last.used.0, last.bytes),
            (PathKind::Tcp, 1 << 20),
            "the last trial was not the other path's"
        );
        world.fetch_us.reverse();
        world.run(60_000);
        assert_eq!(world.choice.current(), 0, "seed {seed}: the choice did not follow the link");
    }
}

#[test]
fn similar_paths_cause_no_switch() {
    for seed in 0..100 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut world = ChoiceSim::new(seed, [1000.0, random.random_range(880.0..1500.0)], 0.3);
        world.run(20_000);
        assert_eq!((world.choice.current(), world.changes), (0, 0), "seed {seed}");
    }
}

/// Trials cost little: at most a ninth of all fetches, and ever fewer for a path that always loses.
#[test]
fn trials_use_few_fetches() {
    for seed in 0..50 {
        let mut world = ChoiceSim::new(seed, [100.0, 10_000.0], 0.5);
        world.run(1_000);
        assert!(world.fetches[1] * 9 <= 1_000 + 9 * 12, "seed {seed}: {:?}", world.fetches);
        let early = world.fetches[1];
        world.run(29_000);
        // Five minutes: trials after 2, 6, 14, 30, 62, 126, 254 seconds.
        let turns = world.fetches[1] / 12;
        assert!(
            (5..=8).contains(&turns) && early >= 12,
            "seed {seed}: {turns} trials, {early} fetches early"
        );
    }
}

/// A path with only late fetches yields no measured fetch and is still replaced.
#[test]
fn a_path_with_only_late_fetches_is_replaced() {
    for seed in 0..50 {
        let mut world = ChoiceSim::new(seed, [1000.0, 1000.0], 0.2);
        world.run(200);
        for _ in 0..3_000 {
            world.now += Duration::from_millis(world.random.random_range(0..20));
            match world.choice.next_fetch(world.now, &world.usable).unwrap() {
                0 => world.choice.record_late_fetch(world.now, 0, Duration::from_millis(50)),
                at => world.choice.record_fetch(world.now, at, 1 << 20, Duration::from_millis(1)),
            }
        }
        assert_eq!(world.choice.current(), 1, "seed {seed}: {}", world.choice.reason());
    }
}

#[test]
fn a_too_short_deadline_is_not_measured() {
    let mut world = ChoiceSim::new(1, [1000.0, 1000.0], 0.0);
    world.run(50);
    let before = world.choice.estimate(0).expected_time(1 << 20);
    world.choice.record_late_fetch(world.now, 0, Duration::from_micros(10));
    assert_eq!(world.choice.estimate(0).expected_time(1 << 20), before);
    world.choice.record_late_fetch(world.now, 0, Duration::from_millis(10));
    assert!(world.choice.estimate(0).expected_time(1 << 20) > before);
}

/// Otherwise an untried path would look as fast as its callers are impatient.
#[test]
fn fetches_cancelled_at_once_are_not_measured() {
    let mut world = ChoiceSim::new(1, [1000.0, 1000.0], 0.0);
    world.usable = [true, false];
    world.run(300);
    world.usable = [true; 2];
    world.choice.record_ping(1, Duration::from_millis(1));
    for _ in 0..ChoiceRules::default().trial_fetches {
        assert_eq!(world.choice.next_fetch(world.now, &world.usable), Some(1), "its trial ended early");
        world.choice.record_late_fetch(world.now, 1, Duration::from_micros(100));
    }
    assert_eq!((world.choice.estimate(1).fetches(), world.choice.reason()), (0, &PickReason::Default));
    world.choice.record_fetch(world.now, 1, 1 << 20, Duration::from_millis(3));
    let expected = world.choice.estimate(1).expected_time(1 << 20).unwrap();
    assert_eq!(expected.as_micros(), 3_000, "a delivered fetch was not measured exactly");
}

/// Otherwise the trial would be judged by older measurements.
#[test]
fn a_trial_of_cancelled_fetches_is_lost() {
    let mut world = ChoiceSim::new(1, [1000.0, 500.0], 0.0);
    while !matches!(
        world.choice.reason(),
        PickReason::Compared(Comparison { outcome: ComparisonOutcome::Leading, .. })
    ) {
        world.run(1);
    }
    world.usable = [true, false];
    world.run(300);
    world.usable = [true; 2];
    for _ in 0..ChoiceRules::default().trial_fetches {
        assert_eq!(
            world.choice.next_fetch(world.now, &world.usable),
            Some(1),
            "the second trial did not start"
        );
        world.choice.record_late_fetch(world.now, 1, Duration::from_micros(100));
    }
    assert_eq!(world.choice.current(), 0, "{}", world.choice.reason());
    let late = world.now + ChoiceRules::default().trial_max;
    assert_eq!(world.choice.next_fetch(late, &world.usable), Some(0));
    assert_eq!(*world.choice.reason(), PickReason::TooFewFetches { other: PathKind::Tcp, fetches: 0 });
}

#[test]
fn rare_fetches_cause_no_trials() {
    let mut world = ChoiceSim::new(7, [1000.0, 500.0], 0.0);
    for _ in 0..50 {
        world.now += Duration::from_secs(60);
        world.run(1);
    }
    assert_eq!(world.fetches, [50, 0], "an hour has fewer fetches than a trial needs");
}

#[test]
fn unusable_paths_are_replaced_without_a_switch() {
    let mut world = ChoiceSim::new(3, [1000.0, 500.0], 0.0);
    world.usable = [true, false];
    world.run(1_000);
    assert_eq!(world.fetches, [1_000, 0]);
    world.usable = [false, true];
    world.run(10);
    assert_eq!(
        (world.fetches, world.choice.current()),
        ([1_000, 10], 0),
        "a fallback must not become current"
    );
    assert_eq!(world.choice.next_fetch(world.now, &[false, false]), None);
}

#[test]
fn a_failing_path_loses_its_trial() {
    let mut world = ChoiceSim::new(5, [1000.0, 100.0], 0.0);
    while world.fetches[1] == 0 {
        world.run(1);
    }
    world.choice.record_failure(world.now, 1);
    assert_eq!(*world.choice.reason(), PickReason::TrialFailed { other: PathKind::Tcp });
    world.run(1);
    assert_eq!(world.fetches[1], 1, "the trial went on after the failure");
}

#[test]
fn a_trial_without_measured_fetches_times_out() {
    let mut world = ChoiceSim::new(5, [1000.0, 100.0], 0.0);
    while world.fetches[1] < 2 {
        world.run(1);
    }
    // From now on blocks come from a slow medium.
    for _ in 0..20 {
        world.choice.next_fetch(world.now, &world.usable);
    }
    let late = world.now + ChoiceRules::default().trial_max;
    assert_eq!(world.choice.next_fetch(late, &world.usable), Some(0));
    assert_eq!(*world.choice.reason(), PickReason::TooFewFetches { other: PathKind::Tcp, fetches: 2 });
    assert_eq!(
        world.choice.reason().to_string(),
        "tcp was tried with 2 fetches from memory, too few to compare"
    );
}

#[test]
fn reasons_are_readable() {
    let used = (PathKind::Quic, Duration::from_micros(1020));
    let other = (PathKind::Tcp, Duration::from_micros(530));
    let says = |outcome| PickReason::Compared(Comparison { outcome, bytes: 65_536, used, other }).to_string();
    let figures = "65536 bytes take 1.0ms over quic and 530.0µs over tcp: ";
    assert_eq!(says(ComparisonOutcome::Kept), format!("{figures}not clearly better, quic stays"));
    assert_eq!(says(ComparisonOutcome::Leading), format!("{figures}clearly better, tcp must win once more"));
    assert_eq!(
        says(ComparisonOutcome::Switched),
        format!("{figures}clearly better again, tcp is used from now on")
    );
    assert_eq!(PickReason::Default.to_string(), "the default, no comparison yet");
}
