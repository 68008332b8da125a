//! Turns among random waiters.

use std::collections::BTreeMap;

use super::super::{TURN_EVERY, Turns, places_behind};
use super::Random;
use crate::id::Class;

fn waiting(waiters: &BTreeMap<u64, Class>) -> [Option<u64>; 4] {
    Class::ALL.map(|class| waiters.iter().find(|(_, of)| **of == class).map(|(since, _)| *since))
}

#[test]
fn nobody_waits_for_more_turns_than_four_for_each_that_waited_longer() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let (mut turns, mut waiters, mut bounds) = (Turns::default(), BTreeMap::new(), BTreeMap::new());
        let mut count = 0;
        for since in 0..2_000u64 {
            // Most are of the first class, and at times nothing else comes.
            let class = Class::ALL[random.below(10).saturating_sub(6) as usize];
            if waiters.len() < 60 {
                bounds.insert(since, count + u64::from(TURN_EVERY) * (waiters.len() as u64 + 1));
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
            assert!(bounds.values().all(|bound| *bound > count), "seed {seed}: somebody waits for too long");
        }
    }
}

#[test]
fn the_first_class_has_all_turns_but_every_fourth() {
    let mut turns = Turns::default();
    let both = [Some(5), None, Some(4), Some(3)];
    let given: Vec<_> = (0..8).map(|_| turns.next(both).unwrap()).collect();
    let [fetch, prefetch] = [Class::Fetch, Class::Prefetch];
    assert_eq!(given, [fetch, fetch, fetch, prefetch, fetch, fetch, fetch, prefetch]);
    assert_eq!(turns.next([None; 4]), None);
    assert_eq!(turns.next([None, Some(1), None, None]), Some(Class::Save), "alone it is always next");
}

#[test]
fn a_quarter_of_the_places_is_kept_for_fetches_and_one_alone_for_nobody() {
    let kept = [1, 2, 3, 4, 5, 8, 9, 32].map(|places| places - places_behind(places));
    assert_eq!(kept, [0, 1, 1, 1, 2, 2, 3, 8]);
}
