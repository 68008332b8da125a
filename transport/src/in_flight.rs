//! What a server has under way of one kind, bounded, with room for each class of operations.
//!
//! Not here: which class has how much ([`kv_core::classes`]), and what is refused when there is no room (`serve.rs`).

use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_core::classes::{ClassRoom, Parts};
use kv_core::id::Class;

/// Bytes or places under way, and how many may be.
pub(crate) struct InFlight {
    state: Mutex<State>,
}

struct State {
    room: ClassRoom,
    numbers: [ClassNumbers; Class::ALL.len()],
}

/// What became of the operations of one class since a room was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassNumbers {
    /// Operations that were let in.
    pub let_in: u64,
    /// Operations that were told to come again.
    pub refused: u64,
    /// Bytes that are under way now, as they are reckoned before.
    pub under_way_bytes: u64,
}

impl InFlight {
    pub(crate) fn new(all: u64, parts: Parts) -> InFlight {
        InFlight {
            state: Mutex::new(State { room: ClassRoom::new(all, parts), numbers: Default::default() }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for so many more of this class; nothing when too many are under way.
    pub(crate) fn reserve(&self, class: Class, amount: u64) -> Option<Reserved<'_>> {
        let mut state = self.state();
        let is_let_in = state.room.take(class, amount);
        let numbers = &mut state.numbers[class.rank()];
        let count = if is_let_in { &mut numbers.let_in } else { &mut numbers.refused };
        *count += 1;
        drop(state);
        // Made only where it is: what is dropped gives back.
        is_let_in.then(|| Reserved { of: self, class, amount })
    }

    /// What became of a class.
    pub(crate) fn numbers(&self, class: Class) -> ClassNumbers {
        let state = self.state();
        ClassNumbers { under_way_bytes: state.room.taken(class), ..state.numbers[class.rank()] }
    }
}

/// What is counted as under way until dropped.
pub(crate) struct Reserved<'a> {
    of: &'a InFlight,
    class: Class,
    amount: u64,
}

impl Reserved<'_> {
    /// Gives back what is more than `amount`.
    pub(crate) fn shrink(&mut self, amount: u64) {
        let less = self.amount.saturating_sub(amount);
        self.amount -= less;
        self.of.state().room.give_back(self.class, less);
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.of.state().room.give_back(self.class, self.amount);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_given_back_can_be_had_again_and_one_alone_always_passes() {
        let (room, fetch) = (InFlight::new(5, [8, 0, 2, 2]), Class::Fetch);
        let mut first = room.reserve(fetch, 100).unwrap();
        assert!(room.reserve(fetch, 1).is_none());
        assert_eq!(room.numbers(fetch), ClassNumbers { let_in: 1, refused: 1, under_way_bytes: 100 });
        first.shrink(4);
        assert!(room.reserve(fetch, 1).is_some());
        drop(first);
        assert_eq!(room.numbers(fetch), ClassNumbers { let_in: 2, refused: 1, under_way_bytes: 0 });
        assert_eq!(room.numbers(Class::Prefetch), ClassNumbers::default());
    }
}
