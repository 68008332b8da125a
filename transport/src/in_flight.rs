//! A bounded pool of work in flight at a server, with a share for each priority class.
//!
//! Not here: the share of each class ([`kv_core::classes`]), and the refusal of operations
//! (`serve.rs`).

use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_core::id::TrafficClass;
use kv_core::traffic_class::{ClassMinima, ClassQuota};

/// Bytes or slots in flight, and their limit.
pub(crate) struct InFlightPool {
    state: Mutex<PoolState>,
}

struct PoolState {
    budget: ClassQuota,
    numbers: [ClassCounts; TrafficClass::ALL.len()],
}

/// Counts of one class since the pool was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// Operations admitted.
    pub admitted: u64,
    /// Operations refused with a hint to retry.
    pub refused: u64,
    /// Bytes in flight now, as estimated in advance.
    pub in_flight_bytes: u64,
}

impl InFlightPool {
    pub(crate) fn new(all: u64, parts: ClassMinima) -> InFlightPool {
        InFlightPool {
            state: Mutex::new(PoolState { budget: ClassQuota::new(all, parts), numbers: Default::default() }),
        }
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves `amount` for this class; `None` if too much is in flight.
    pub(crate) fn reserve(&self, class: TrafficClass, amount: u64) -> Option<InFlightReservation<'_>> {
        let mut state = self.state();
        let is_let_in = state.budget.try_take(class, amount);
        let numbers = &mut state.numbers[class.rank()];
        let count = if is_let_in { &mut numbers.admitted } else { &mut numbers.refused };
        *count += 1;
        drop(state);
        // Lazy: dropping a reservation gives it back.
        is_let_in.then(|| InFlightReservation { pool: self, class, amount })
    }

    /// Counts of a class.
    pub(crate) fn counts(&self, class: TrafficClass) -> ClassCounts {
        let state = self.state();
        ClassCounts { in_flight_bytes: state.budget.taken(class), ..state.numbers[class.rank()] }
    }
}

/// An amount that counts as in flight until dropped.
pub struct InFlightReservation<'a> {
    pool: &'a InFlightPool,
    class: TrafficClass,
    amount: u64,
}

impl InFlightReservation<'_> {
    /// Gives back all but `amount`.
    pub(crate) fn shrink(&mut self, amount: u64) {
        let less = self.amount.saturating_sub(amount);
        self.amount -= less;
        self.pool.state().budget.release(self.class, less);
    }
}

impl Drop for InFlightReservation<'_> {
    fn drop(&mut self) {
        self.pool.state().budget.release(self.class, self.amount);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn released_amounts_are_reusable_and_a_lone_operation_always_passes() {
        let (room, fetch) = (InFlightPool::new(5, [8, 0, 2, 2]), TrafficClass::Fetch);
        let mut first = room.reserve(fetch, 100).unwrap();
        assert!(room.reserve(fetch, 1).is_none());
        assert_eq!(room.counts(fetch), ClassCounts { admitted: 1, refused: 1, in_flight_bytes: 100 });
        first.shrink(4);
        assert!(room.reserve(fetch, 1).is_some());
        drop(first);
        assert_eq!(room.counts(fetch), ClassCounts { admitted: 2, refused: 1, in_flight_bytes: 0 });
        assert_eq!(room.counts(TrafficClass::Prefetch), ClassCounts::default());
    }
}
