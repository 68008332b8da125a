//! Order of waiting classes: the first waiting class goes next, except for every fourth turn
//! ([`LOWER_CLASS_TURN_EVERY`]) and for slots that are reserved for fetches.
//!
//! Not here: which callers wait, and for which resource.

use crate::id::TrafficClass;

/// One of this many turns goes to the longest waiter of the other classes.
pub const LOWER_CLASS_TURN_EVERY: u32 = 4;

/// Slots that classes behind the first may use together: three quarters, and at least one, even if
/// it is the only slot.
#[must_use]
pub const fn lower_class_slots(places: usize) -> usize {
    let behind = places - places.div_ceil(4);
    if behind == 0 { 1 } else { behind }
}

/// Decides the next class. Only turns with waiters of several classes count. While lower classes
/// use all of their slots ([`lower_class_slots`]), a free slot goes to a fetch or stays idle until
/// one of theirs ends. A waiter with `n` others that waited longer is served within
/// [`LOWER_CLASS_TURN_EVERY`] · (`n` + 1) turns, whatever arrives after it.
#[derive(Clone, Debug, Default)]
pub struct ClassScheduler {
    /// Turns of the first class since one of another class that had a waiter.
    first_class_turns: u32,
}

impl ClassScheduler {
    /// The class that serves its longest waiter next. `waiting` gives for each class the arrival
    /// number of that waiter, from any growing counter.
    pub fn next(&mut self, waiting: [Option<u64>; TrafficClass::ALL.len()]) -> Option<TrafficClass> {
        let first = waiting.iter().position(Option::is_some)?;
        let behind = (first + 1..waiting.len()).filter_map(|at| waiting[at].map(|since| (since, at))).min();
        let Some((_, at)) = behind else { return Some(TrafficClass::ALL[first]) };
        self.first_class_turns += 1;
        if self.first_class_turns < LOWER_CLASS_TURN_EVERY {
            return Some(TrafficClass::ALL[first]);
        }
        self.first_class_turns = 0;
        Some(TrafficClass::ALL[at])
    }
}
