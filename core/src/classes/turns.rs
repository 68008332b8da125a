//! Whose turn it is among waiters of several classes: the first class that waits, but for every so manieth turn.
//!
//! Not here: who waits, and what for.

use crate::id::Class;

/// Every so manieth turn is of whoever waited longest behind the first class.
pub const TURN_EVERY: u32 = 4;

/// Turns among waiters. Who has waited longer than all but `n` others has his within [`TURN_EVERY`] times `n + 1` turns,
/// whatever comes behind him.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    /// Turns of the first class since one of another, while somebody else waited.
    passed: u32,
}

impl Turns {
    /// The class whose longest waiter is next. `waiting` says for each class when that one came, in any numbers that
    /// grow.
    pub fn next(&mut self, waiting: [Option<u64>; Class::ALL.len()]) -> Option<Class> {
        let first = waiting.iter().position(Option::is_some)?;
        let behind = (first + 1..waiting.len()).filter_map(|at| waiting[at].map(|since| (since, at))).min();
        let Some((_, at)) = behind else { return Some(Class::ALL[first]) };
        self.passed += 1;
        if self.passed < TURN_EVERY {
            return Some(Class::ALL[first]);
        }
        self.passed = 0;
        Some(Class::ALL[at])
    }
}
