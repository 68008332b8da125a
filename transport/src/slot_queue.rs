//! A fair queue for slots that several operations share. Waiting priority classes take turns, and
//! some slots stay free for fetches.
//!
//! Not here: the order of classes ([`kv_core::classes::Turns`]), the number of free slots
//! ([`places_behind`]), and the use of a slot.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::id::TrafficClass;
use kv_core::traffic_class::{ClassScheduler, lower_class_slots};
use tokio::sync::oneshot;

/// A fixed number of slots.
pub struct SlotQueue {
    state: Mutex<SlotState>,
}

#[derive(Default)]
struct SlotState {
    /// Positive only if no operation waits that may have a slot.
    free: usize,
    /// Slots still available to operations other than fetches.
    free_for_others: usize,
    class_order: ClassScheduler,
    next_arrival: u64,
    /// Waiting operations of each class, by arrival number.
    waiting: [BTreeMap<u64, oneshot::Sender<Slot>>; TrafficClass::ALL.len()],
}

impl SlotState {
    /// Takes a slot for this class, if one is available.
    fn try_acquire(&mut self, class: TrafficClass) -> bool {
        let is_free = self.free > 0 && (class == TrafficClass::Fetch || self.free_for_others > 0);
        if is_free {
            self.free -= 1;
            self.free_for_others -= usize::from(class != TrafficClass::Fetch);
        }
        is_free
    }

    fn release(&mut self, class: TrafficClass) {
        self.free += 1;
        self.free_for_others += usize::from(class != TrafficClass::Fetch);
    }

    /// The next waiting operation; it leaves the queue with a slot.
    fn next(&mut self) -> Option<(TrafficClass, oneshot::Sender<Slot>)> {
        let longest = self.waiting.each_ref().map(|waiting| waiting.keys().next().copied());
        let class = match longest[TrafficClass::Fetch.rank()] {
            // Only fetches may have a slot now, and no turn is used up: the other classes wait for
            // one of their own slots.
            first if self.free_for_others == 0 => first.map(|_| TrafficClass::Fetch)?,
            _ => self.class_order.next(longest)?,
        };
        let (_, waiter) = self.waiting[class.rank()].pop_first()?;
        let has_place = self.try_acquire(class);
        debug_assert!(has_place, "called only if a slot is free");
        Some((class, waiter))
    }
}

impl SlotQueue {
    /// A queue for this many slots.
    #[must_use]
    pub fn new(count: usize) -> Arc<SlotQueue> {
        let state =
            SlotState { free: count, free_for_others: lower_class_slots(count), ..SlotState::default() };
        Arc::new(SlotQueue { state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a slot for an operation of this class. A dropped waiter blocks no other.
    pub async fn acquire(self: &Arc<SlotQueue>, class: TrafficClass) -> Slot {
        let (mut waits, given) = {
            let mut state = self.state();
            if state.try_acquire(class) {
                return Slot { queue: Some(Arc::clone(self)), class };
            }
            let (waiter, given) = oneshot::channel();
            let came = state.next_arrival;
            state.next_arrival += 1;
            state.waiting[class.rank()].insert(came, waiter);
            (SlotWaiter { queue: self, class, arrival: Some(came) }, given)
        };
        let place = given.await.expect("the sender is dropped only after it sent a slot");
        waits.arrival = None;
        place
    }

    fn give_back(self: Arc<SlotQueue>, mut of: TrafficClass) {
        loop {
            let mut state = self.state();
            state.release(of);
            // At most one waiter gets a slot: any other free slot is not available to the waiting
            // classes.
            let Some((class, next)) = state.next() else { return };
            drop(state);
            let Err(mut place) = next.send(Slot { queue: Some(Arc::clone(&self)), class }) else { return };
            // The waiter was cancelled at this moment; pass the slot on to the next.
            place.queue = None;
            of = class;
        }
    }
}

/// A waiting operation; dropping it leaves the queue.
struct SlotWaiter<'a> {
    queue: &'a SlotQueue,
    class: TrafficClass,
    arrival: Option<u64>,
}

impl Drop for SlotWaiter<'_> {
    fn drop(&mut self) {
        if let Some(came) = self.arrival {
            self.queue.state().waiting[self.class.rank()].remove(&came);
        }
    }
}

/// One slot, held until dropped.
pub struct Slot {
    /// `None` after the slot was passed on.
    queue: Option<Arc<SlotQueue>>,
    class: TrafficClass,
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(of) = self.queue.take() {
            of.give_back(self.class);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use kv_core::traffic_class::LOWER_CLASS_TURN_EVERY;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    type Waiter = Pin<Box<dyn Future<Output = Slot> + Send>>;

    fn waiter(places: &Arc<SlotQueue>, class: TrafficClass) -> Waiter {
        let places = Arc::clone(places);
        Box::pin(async move { places.acquire(class).await })
    }

    fn poll(waiter: &mut Waiter) -> Option<Slot> {
        match waiter.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(place) => Some(place),
            Poll::Pending => None,
        }
    }

    #[test]
    fn some_slots_stay_free_for_fetches() {
        for (count, behind) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (32, 24)] {
            let places = SlotQueue::new(count);
            let mut waiting: Vec<_> =
                (0..count).map(|at| waiter(&places, TrafficClass::ALL[1 + at % 3])).collect();
            let mut lower: Vec<_> = waiting.iter_mut().filter_map(poll).collect();
            assert_eq!(lower.len(), behind, "of {count}");
            let mut fetches: Vec<_> =
                (behind..count).map(|_| poll(&mut waiter(&places, TrafficClass::Fetch)).unwrap()).collect();
            let mut fetch = waiter(&places, TrafficClass::Fetch);
            assert!(poll(&mut fetch).is_none());
            // A slot freed by a fetch goes to a fetch or stays free; other slots go by turns.
            if fetches.pop().is_some() {
                fetches.push(poll(&mut fetch).unwrap());
                drop(fetches);
                let mut given = waiting.split_off(behind);
                assert!(
                    given.iter_mut().all(|waiter| poll(waiter).is_none()),
                    "the last slot must stay free for fetches"
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

    fn waiting_count(places: &SlotQueue) -> usize {
        places.state().waiting.iter().map(BTreeMap::len).sum()
    }

    #[test]
    fn every_fourth_slot_goes_to_the_longest_waiting_lower_class() {
        let places = SlotQueue::new(1);
        let mut held = poll(&mut waiter(&places, TrafficClass::Save));
        let order = [
            TrafficClass::Prefetch,
            TrafficClass::Fetch,
            TrafficClass::Fetch,
            TrafficClass::Save,
            TrafficClass::Fetch,
            TrafficClass::Fetch,
        ];
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
        let [fetch, save, prefetch] = [TrafficClass::Fetch, TrafficClass::Save, TrafficClass::Prefetch];
        assert_eq!(given, [fetch, fetch, fetch, prefetch, fetch, save]);
    }

    /// Whenever operations are cancelled, no slot is lost or given twice, and no operation waits
    /// beside a free slot.
    #[test]
    fn no_slot_is_lost_and_no_operation_starves() {
        for seed in 0..50 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let count = random.random_range(1..7);
            let places = SlotQueue::new(count);
            let mut waiting: Vec<(Waiter, u64, TrafficClass)> = Vec::new();
            let mut held: Vec<Slot> = Vec::new();
            let mut given = 0u64;
            for _ in 0..2_000 {
                match random.random_range(0..5) {
                    0 | 1 if waiting.len() < 20 => {
                        let class = TrafficClass::ALL[random.random_range(0..7usize).saturating_sub(3)];
                        let bound = given + u64::from(LOWER_CLASS_TURN_EVERY) * (waiting.len() as u64 + 1);
                        waiting.push((waiter(&places, class), bound, class));
                    }
                    // Perhaps a waiter that was given a slot and was not polled since.
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
                        assert!(*bound + 20 > given, "seed {seed}: starved");
                        return true;
                    };
                    held.push(place);
                    given += 1;
                    assert_eq!(held.last().unwrap().class, *class);
                    false
                });
                assert!(held.len() <= count, "seed {seed}: a slot is given twice");
                assert!(
                    count_non_fetches(&held) <= lower_class_slots(count),
                    "seed {seed}: no slot is kept for fetches"
                );
                assert!(
                    held.len() == count
                        || waiting.iter().all(|(_, _, class)| *class != TrafficClass::Fetch)
                            && (waiting.is_empty() || count_non_fetches(&held) == lower_class_slots(count)),
                    "seed {seed}: an operation waits beside a free slot"
                );
                assert_eq!(
                    waiting_count(&places),
                    waiting.len(),
                    "seed {seed}: a cancelled waiter is still queued"
                );
            }
            waiting.clear();
            held.clear();
            let state = places.state();
            let free = (state.free, state.free_for_others);
            drop(state);
            assert_eq!((free, waiting_count(&places)), ((count, lower_class_slots(count)), 0), "seed {seed}");
        }
    }

    /// Slots not held by fetches.
    fn count_non_fetches(held: &[Slot]) -> usize {
        held.iter().filter(|place| place.class != TrafficClass::Fetch).count()
    }

    #[test]
    fn no_slot_is_lost_to_a_concurrent_cancellation() {
        let places = SlotQueue::new(1);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let places = &places;
                scope.spawn(move || {
                    for turn in 0..100_000 {
                        let mut waiter = waiter(places, TrafficClass::ALL[(thread + turn) % 4]);
                        let place = poll(&mut waiter);
                        (0..turn % 64).for_each(|_| std::hint::spin_loop());
                        drop(place);
                    }
                });
            }
        });
        let free = places.state().free;
        assert_eq!((free, waiting_count(&places)), (1, 0));
    }
}
