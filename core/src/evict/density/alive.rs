//! How many blocks of each class wait for their next use since when: the exposure of what has not ended yet.
//!
//! A block that waits is in the slot of time in which its wait began, whether resident or only remembered; both
//! ends of a wait are one addition. Slots are an eighth of their age wide at most, so a few dozen cover hours. Not
//! here: the sums exposure is added to ([`super::hazard`]).

use super::classes::{CLASSES, Class};
use super::hazard::Evidence;
use crate::id::Timestamp;

/// Finest step of time, in bits of a microsecond: 131 ms. Starts of waits are compared in this unit.
pub(super) const STEP_BITS: u32 = 17;
/// Most slots kept; more are joined.
const SLOTS_MAX: usize = 160;

/// Waits of each class. Signed, since a processor turns signed numbers into floating ones several at a time.
pub(super) type Waiting = [i32; CLASSES];

/// The waits under way.
#[derive(Clone, Debug)]
pub(super) struct Alive {
    /// Step at which each slot begins; it ends where the next begins. Apart from what waits, so that a slot is found
    /// in few lines of memory.
    starts: Vec<u64>,
    slots: Vec<Waiting>,
    /// Up to when exposure of what waits is counted.
    counted: Timestamp,
}

impl Alive {
    pub(super) fn new() -> Self {
        Alive { starts: vec![0], slots: vec![[0; CLASSES]], counted: Timestamp(0) }
    }

    /// Whether [`Alive::advance`] to `now` would do anything.
    pub(super) fn is_behind(&self, now: Timestamp) -> bool {
        self.starts.last().is_some_and(|start| *start < now.0 >> STEP_BITS)
    }

    /// Time goes on; time never goes back here. To be called before anything else happens at `now`.
    pub(super) fn advance(&mut self, now: Timestamp, evidence: &mut Evidence) {
        if !self.is_behind(now) {
            return;
        }
        let step = now.0 >> STEP_BITS;
        let mut end_us = now.0;
        for (start, waiting) in self.starts.iter().zip(&self.slots).rev() {
            let start_us = start << STEP_BITS;
            // As if all waits of a slot began in its middle.
            let middle_us = start_us + (end_us - start_us) / 2;
            let from_us = self.counted.0.max(middle_us) - middle_us;
            evidence.exposed_all(waiting, from_us, now.0 - middle_us);
            end_us = start_us;
        }
        self.counted = now;
        if self.slots.len() >= SLOTS_MAX {
            self.join(step);
        }
        self.starts.push(step);
        self.slots.push([0; CLASSES]);
    }

    /// Joins neighbours that together are no wider than an eighth of their age; at least one pair.
    fn join(&mut self, now: u64) {
        let mut starts: Vec<u64> = Vec::with_capacity(SLOTS_MAX);
        let mut joined: Vec<Waiting> = Vec::with_capacity(SLOTS_MAX);
        let ends = self.starts.iter().skip(1).copied().chain([now]);
        for ((&start, waiting), end) in self.starts.iter().zip(&self.slots).zip(ends) {
            match (starts.last(), joined.last_mut()) {
                (Some(first), Some(last)) if (end - first) * 8 <= now - end => add(last, waiting),
                _ => {
                    starts.push(start);
                    joined.push(*waiting);
                }
            }
        }
        if joined.len() >= SLOTS_MAX {
            starts.remove(1);
            let second = joined.remove(1);
            add(&mut joined[0], &second);
        }
        (self.starts, self.slots) = (starts, joined);
    }

    /// A wait begins, now.
    pub(super) fn begin(&mut self, class: Class) {
        if let Some(waiting) = self.slots.last_mut() {
            waiting[class.at()] += 1;
        }
    }

    /// A wait that began at `start` ends.
    pub(super) fn end(&mut self, class: Class, start: Timestamp, now: Timestamp, evidence: &mut Evidence) {
        let step = start.0 >> STEP_BITS;
        let at = self.starts.partition_point(|start| *start <= step).saturating_sub(1);
        let waiting = &mut self.slots[at][class.at()];
        debug_assert!(*waiting > 0, "a wait ended that did not begin");
        *waiting = (*waiting - 1).max(0);
        let from_us = self.counted.0.max(start.0) - start.0;
        evidence.exposed(class, from_us, now.0.max(start.0) - start.0);
    }
}

fn add(sums: &mut Waiting, more: &Waiting) {
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

#[cfg(test)]
mod tests {
    use super::super::super::bands;
    use super::*;

    #[test]
    fn exposure_of_what_waits_is_what_it_waited() {
        let (mut alive, mut evidence) = (Alive::new(), Evidence::new());
        let class = Class(3);
        let (mut expected, mut waits) = (0.0, Vec::new());
        for at in 0..4000_u64 {
            let now = Timestamp(at * 370_000);
            alive.advance(now, &mut evidence);
            alive.begin(class);
            waits.push(now);
            // Every third wait ends after 20 s, a few after a long time; the others never.
            if at % 3 == 0 && at >= 54 {
                alive.end(class, waits[at as usize - 54], now, &mut evidence);
                waits[at as usize - 54] = Timestamp(u64::MAX);
                expected += 54.0 * 0.37;
            }
        }
        let now = Timestamp(4000 * 370_000);
        alive.advance(now, &mut evidence);
        let left = waits.iter().filter(|start| start.0 < u64::MAX);
        expected += left.map(|start| (now.0 - start.0) as f64 / 1e6).sum::<f64>();
        let counted = evidence.exposure_s(class);
        assert!((counted.iter().sum::<f64>() / expected - 1.0).abs() < 0.01);
        assert!(counted[bands::band(900_000_000)] > 0.0);
        assert!(alive.slots.len() <= SLOTS_MAX);
    }
}
