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

#[derive(Clone, Debug)]
struct Slot {
    /// Step at which it begins; it ends where the next begins.
    start: u64,
    waiting: [u32; CLASSES],
}

/// The waits under way.
#[derive(Clone, Debug)]
pub(super) struct Alive {
    slots: Vec<Slot>,
    /// Up to when exposure of what waits is counted.
    counted: Timestamp,
}

impl Alive {
    pub(super) fn new() -> Self {
        Alive { slots: vec![Slot { start: 0, waiting: [0; CLASSES] }], counted: Timestamp(0) }
    }

    /// Time goes on; time never goes back here. To be called before anything else happens at `now`.
    pub(super) fn advance(&mut self, now: Timestamp, evidence: &mut Evidence) {
        let step = now.0 >> STEP_BITS;
        if self.slots.last().is_some_and(|slot| slot.start >= step) {
            return;
        }
        let mut end_us = now.0;
        for slot in self.slots.iter().rev() {
            let start_us = slot.start << STEP_BITS;
            // As if all waits of a slot began in its middle.
            let middle_us = start_us + (end_us - start_us) / 2;
            let from_us = self.counted.0.max(middle_us) - middle_us;
            evidence.exposed_all(&slot.waiting, from_us, now.0 - middle_us);
            end_us = start_us;
        }
        self.counted = now;
        if self.slots.len() >= SLOTS_MAX {
            self.join(step);
        }
        self.slots.push(Slot { start: step, waiting: [0; CLASSES] });
    }

    /// Joins neighbours that together are no wider than an eighth of their age; at least one pair.
    fn join(&mut self, now: u64) {
        let mut joined: Vec<Slot> = Vec::with_capacity(SLOTS_MAX);
        let mut ends = self.slots.iter().skip(1).map(|slot| slot.start).chain([now]);
        for slot in &self.slots {
            let end = ends.next().unwrap_or(now);
            match joined.last_mut() {
                Some(last) if (end - last.start) * 8 <= now - end => last.add(slot),
                _ => joined.push(slot.clone()),
            }
        }
        if joined.len() >= SLOTS_MAX {
            let second = joined.remove(1);
            joined[0].add(&second);
        }
        self.slots = joined;
    }

    /// A wait begins, now.
    pub(super) fn begin(&mut self, class: Class) {
        if let Some(slot) = self.slots.last_mut() {
            slot.waiting[class.at()] += 1;
        }
    }

    /// A wait that began at `start` ends.
    pub(super) fn end(&mut self, class: Class, start: Timestamp, now: Timestamp, evidence: &mut Evidence) {
        let step = start.0 >> STEP_BITS;
        let at = self.slots.partition_point(|slot| slot.start <= step).saturating_sub(1);
        let waiting = &mut self.slots[at].waiting[class.at()];
        debug_assert!(*waiting > 0, "a wait ended that did not begin");
        *waiting = waiting.saturating_sub(1);
        let from_us = self.counted.0.max(start.0) - start.0;
        evidence.exposed(class, from_us, now.0.max(start.0) - start.0);
    }
}

impl Slot {
    fn add(&mut self, other: &Slot) {
        self.waiting.iter_mut().zip(&other.waiting).for_each(|(sum, more)| *sum += more);
    }
}

#[cfg(test)]
mod tests {
    use super::super::bands;
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
