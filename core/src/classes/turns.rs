//! Whose turn it is among waiters of several classes: the first class that waits, but for every fourth turn ([`TURN_EVERY`]), and for places that are kept
//! free for fetches.
//!
//! Not here: who waits, and what for.

use crate::id::Class;

/// One turn of so many is of whoever waited longest behind the first class.
pub const TURN_EVERY: u32 = 4;

/// How many of so many places classes behind the first have together: three quarters, and one at least, which is the only one
/// where there is one.
#[must_use]
pub const fn places_behind(places: usize) -> usize {
    let behind = places - places.div_ceil(4);
    if behind == 0 { 1 } else { behind }
}

/// Turns among waiters. Turns for which all classes wait count here: while those behind the first have as many places as they
/// may ([`places_behind`]), what comes free is a fetch's or nobody's, until one of theirs is over. Who has waited longer than all but `n` others has his within [`TURN_EVERY`] times `n + 1` turns,
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
