//! Turns among random waiters.

use std::collections::BTreeMap;

use super::super::{ClassScheduler, LOWER_CLASS_TURN_EVERY, lower_class_slots};
use super::TestRandom;
use crate::id::TrafficClass;

fn waiting(waiters: &BTreeMap<u64, TrafficClass>) -> [Option<u64>; 4] {
    TrafficClass::ALL.map(|class| waiters.iter().find(|(_, of)| **of == class).map(|(since, _)| *since))
}

#[test]
fn wait_is_bounded_by_four_turns_per_longer_waiter() {
    for seed in 0..200 {
        let mut random = TestRandom::new(seed);
        let (mut turns, mut waiters, mut bounds) =
            (ClassScheduler::default(), BTreeMap::new(), BTreeMap::new());
        let mut count = 0;
        for since in 0..2_000u64 {
            // Most are of the first class, and at times no other class arrives.
            let class = TrafficClass::ALL[random.below(10).saturating_sub(6) as usize];
            if waiters.len() < 60 {
                bounds.insert(since, count + u64::from(LOWER_CLASS_TURN_EVERY) * (waiters.len() as u64 + 1));
                waiters.insert(since, class);
            }
            if random.below(3) > 0 {
                continue;
            }
            let Some(class) = turns.next(waiting(&waiters)) else { continue };
            count += 1;
            let since = *waiters.iter().find(|(_, of)| **of == class).unwrap().0;
            waiters.remove(&since);
            let bound = bounds.remove(&since).unwrap();
            assert!(count <= bound, "seed {seed}: {class:?} since {since} at turn {count}, bound {bound}");
            assert!(bounds.values().all(|bound| *bound > count), "seed {seed}: a waiter exceeds its bound");
        }
    }
}

#[test]
fn first_class_gets_three_of_four_turns() {
    let mut turns = ClassScheduler::default();
    let both = [Some(5), None, Some(4), Some(3)];
    let given: Vec<_> = (0..8).map(|_| turns.next(both).unwrap()).collect();
    let [fetch, prefetch] = [TrafficClass::Fetch, TrafficClass::Prefetch];
    assert_eq!(given, [fetch, fetch, fetch, prefetch, fetch, fetch, fetch, prefetch]);
    assert_eq!(turns.next([None; 4]), None);
    assert_eq!(
        turns.next([None, Some(1), None, None]),
        Some(TrafficClass::Save),
        "a lone class is always next"
    );
}

#[test]
fn quarter_of_the_slots_is_reserved_for_fetches() {
    let kept = [1, 2, 3, 4, 5, 8, 9, 32].map(|places| places - lower_class_slots(places));
    assert_eq!(kept, [0, 1, 1, 1, 2, 2, 3, 8]);
}
