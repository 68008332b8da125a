//! Places that several operations share, given in turns to the classes that wait for them. Some are kept free for fetches.
//!
//! Not here: whose turn it is ([`kv_core::classes::Turns`]), how many are kept ([`places_behind`]), and what a place is for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::classes::{Turns, places_behind};
use kv_core::id::Class;
use tokio::sync::oneshot;

/// So many places at once.
pub(crate) struct Places {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// More than none only while nobody waits who may have one.
    free: usize,
    /// How many more may go to what is no fetch.
    free_behind: usize,
    turns: Turns,
    came: u64,
    /// Of each class, by when they came.
    waiting: [BTreeMap<u64, oneshot::Sender<Place>>; Class::ALL.len()],
}

impl State {
    /// A place for this class, if there is one.
    fn enter(&mut self, class: Class) -> bool {
        let is_free = self.free > 0 && (class == Class::Fetch || self.free_behind > 0);
        if is_free {
            self.free -= 1;
            self.free_behind -= usize::from(class != Class::Fetch);
        }
        is_free
    }

    fn leave(&mut self, class: Class) {
        self.free += 1;
        self.free_behind += usize::from(class != Class::Fetch);
    }

    /// Whoever is next, who waits no more and has a place.
    fn next(&mut self) -> Option<(Class, oneshot::Sender<Place>)> {
        let longest = self.waiting.each_ref().map(|waiting| waiting.keys().next().copied());
        let class = match longest[Class::Fetch.rank()] {
            // Nobody's turn is passed over: those behind wait for one of theirs to end.
            first if self.free_behind == 0 => first.map(|_| Class::Fetch)?,
            _ => self.turns.next(longest)?,
        };
        let (_, waiter) = self.waiting[class.rank()].pop_first()?;
        let has_place = self.enter(class);
        debug_assert!(has_place, "asked only where one is free");
        Some((class, waiter))
    }
}

impl Places {
    pub(crate) fn new(count: usize) -> Arc<Places> {
        let state = State { free: count, free_behind: places_behind(count), ..State::default() };
        Arc::new(Places { state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one of this class. Who is dropped while it waits is in nobody's way.
    pub(crate) async fn take(self: &Arc<Places>, class: Class) -> Place {
        let (mut waits, given) = {
            let mut state = self.state();
            if state.enter(class) {
                return Place { of: Some(Arc::clone(self)), class };
            }
            let (waiter, given) = oneshot::channel();
            let came = state.came;
            state.came += 1;
            state.waiting[class.rank()].insert(came, waiter);
            (Waits { of: self, class, came: Some(came) }, given)
        };
        let place = given.await.expect("who waits is given a place before its sender is dropped");
        waits.came = None;
        place
    }

    fn give_back(self: Arc<Places>, mut of: Class) {
        loop {
            let mut state = self.state();
            state.leave(of);
            // One at most: what else is free is for nobody who waits.
            let Some((class, next)) = state.next() else { return };
            drop(state);
            let Err(mut place) = next.send(Place { of: Some(Arc::clone(&self)), class }) else { return };
            // It left at this moment. The place goes on to the next from here.
            place.of = None;
            of = class;
        }
    }
}

/// One that waits. Where it is dropped it waits no more.
struct Waits<'a> {
    of: &'a Places,
    class: Class,
    came: Option<u64>,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        if let Some(came) = self.came {
            self.of.state().waiting[self.class.rank()].remove(&came);
        }
    }
}

/// One place, until it is dropped.
pub(crate) struct Place {
    /// Nothing where it was passed on.
    of: Option<Arc<Places>>,
    class: Class,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(of) = self.of.take() {
            of.give_back(self.class);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use kv_core::classes::TURN_EVERY;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    type Waiter = Pin<Box<dyn Future<Output = Place> + Send>>;

    fn waiter(places: &Arc<Places>, class: Class) -> Waiter {
        let places = Arc::clone(places);
        Box::pin(async move { places.take(class).await })
    }

    fn poll(waiter: &mut Waiter) -> Option<Place> {
        match waiter.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(place) => Some(place),
            Poll::Pending => None,
        }
    }

    #[test]
    fn some_places_are_kept_free_for_fetches_and_none_is_lost_by_it() {
        for (count, behind) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (32, 24)] {
            let places = Places::new(count);
            let mut waiting: Vec<_> = (0..count).map(|at| waiter(&places, Class::ALL[1 + at % 3])).collect();
            let mut lower: Vec<_> = waiting.iter_mut().filter_map(poll).collect();
            assert_eq!(lower.len(), behind, "of {count}");
            let mut fetches: Vec<_> =
                (behind..count).map(|_| poll(&mut waiter(&places, Class::Fetch)).unwrap()).collect();
            let mut fetch = waiter(&places, Class::Fetch);
            assert!(poll(&mut fetch).is_none());
            // What a fetch had is a fetch's, then nobody's; what another had goes by turns.
            if fetches.pop().is_some() {
                fetches.push(poll(&mut fetch).unwrap());
                drop(fetches);
                let mut given = waiting.split_off(behind);
                assert!(
                    given.iter_mut().all(|waiter| poll(waiter).is_none()),
                    "it would be the last one free"
                );
                drop(lower.pop());
                let one: Vec<_> = given.iter_mut().filter_map(poll).collect();
                assert_eq!(one.len(), 1);
            } else {
                lower.clear();
                assert!(poll(&mut fetch).is_some());
            }
        }
    }

    fn is_waiting(places: &Places) -> usize {
        places.state().waiting.iter().map(BTreeMap::len).sum()
    }

    #[test]
    fn places_go_to_the_first_class_and_every_fourth_to_who_waited_longest_behind_it() {
        let places = Places::new(1);
        let mut held = poll(&mut waiter(&places, Class::Save));
        let order = [Class::Prefetch, Class::Fetch, Class::Fetch, Class::Save, Class::Fetch, Class::Fetch];
        let mut waiting: Vec<_> = order.map(|class| (class, waiter(&places, class))).into();
        waiting.iter_mut().for_each(|(_, waiter)| assert!(poll(waiter).is_none()));
        let mut given = Vec::new();
        while !waiting.is_empty() {
            drop(held.take());
            let at = waiting.iter_mut().position(|(_, waiter)| {
                held = poll(waiter);
                held.is_some()
            });
            given.push(waiting.remove(at.unwrap()).0);
        }
        let [fetch, save, prefetch] = [Class::Fetch, Class::Save, Class::Prefetch];
        assert_eq!(given, [fetch, fetch, fetch, prefetch, fetch, save]);
    }

    /// Whoever leaves, at whatever moment: no place is lost, none is given twice, and nobody waits beside a free one.
    #[test]
    fn no_place_is_lost_whoever_leaves_and_nobody_waits_for_ever() {
        for seed in 0..50 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let count = random.random_range(1..7);
            let places = Places::new(count);
            let mut waiting: Vec<(Waiter, u64, Class)> = Vec::new();
            let mut held: Vec<Place> = Vec::new();
            let mut given = 0u64;
            for _ in 0..2_000 {
                match random.random_range(0..5) {
                    0 | 1 if waiting.len() < 20 => {
                        let class = Class::ALL[random.random_range(0..7usize).saturating_sub(3)];
                        let bound = given + u64::from(TURN_EVERY) * (waiting.len() as u64 + 1);
                        waiting.push((waiter(&places, class), bound, class));
                    }
                    // Perhaps one that was given a place and has not seen it.
                    2 if !waiting.is_empty() => {
                        drop(waiting.swap_remove(random.random_range(0..waiting.len())));
                    }
                    _ if !held.is_empty() => {
                        drop(held.swap_remove(random.random_range(0..held.len())));
                    }
                    _ => {}
                }
                if random.random_range(0..3) == 0 {
                    continue;
                }
                waiting.retain_mut(|(waiter, bound, class)| {
                    let Some(place) = poll(waiter) else {
                        assert!(*bound + 20 > given, "seed {seed}: passed over");
                        return true;
                    };
                    held.push(place);
                    given += 1;
                    assert_eq!(held.last().unwrap().class, *class);
                    false
                });
                assert!(held.len() <= count, "seed {seed}: a place is given twice");
                assert!(behind(&held) <= places_behind(count), "seed {seed}: none is kept for fetches");
                assert!(
                    held.len() == count
                        || waiting.iter().all(|(_, _, class)| *class != Class::Fetch)
                            && (waiting.is_empty() || behind(&held) == places_behind(count)),
                    "seed {seed}: somebody waits beside a free place"
                );
                assert_eq!(is_waiting(&places), waiting.len(), "seed {seed}: who left is still there");
            }
            waiting.clear();
            held.clear();
            let state = places.state();
            let free = (state.free, state.free_behind);
            drop(state);
            assert_eq!((free, is_waiting(&places)), ((count, places_behind(count)), 0), "seed {seed}");
        }
    }

    /// Places that are no fetch's.
    fn behind(held: &[Place]) -> usize {
        held.iter().filter(|place| place.class != Class::Fetch).count()
    }

    #[test]
    fn no_place_is_lost_to_who_leaves_at_the_moment_it_is_given_one() {
        let places = Places::new(1);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let places = &places;
                scope.spawn(move || {
                    for turn in 0..100_000 {
                        let mut waiter = waiter(places, Class::ALL[(thread + turn) % 4]);
                        let place = poll(&mut waiter);
                        (0..turn % 64).for_each(|_| std::hint::spin_loop());
                        drop(place);
                    }
                });
            }
        });
        let free = places.state().free;
        assert_eq!((free, is_waiting(&places)), (1, 0));
    }
}
