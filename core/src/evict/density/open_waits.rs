//! Open waits: the number of blocks of each class that wait for their next use, by the start of the
//! wait.
//!
//! A waiting block counts in the time slot of its start, whether resident or a ghost; either end of
//! a wait costs one addition. A slot is at most an eighth of its age wide, so a few dozen cover
//! hours. Not here: the exposure sums ([`super::hazard`]).

use super::classes::{CLASSES, ReuseClass};
use super::hazard::Evidence;
use crate::id::Timestamp;

/// Finest time step, in bits of a microsecond: 131 ms. Starts of waits are compared in this unit.
pub(super) const STEP_BITS: u32 = 17;
/// Maximum number of slots; older ones are merged.
const SLOTS_MAX: usize = 160;

/// Waits per class. Signed, because processors vectorise the conversion of signed integers to
/// floats.
pub(super) type WaitCounts = [i32; CLASSES];

/// All waits in progress.
#[derive(Clone, Debug)]
pub(super) struct OpenWaits {
    /// Step at which each slot begins; it ends where the next begins. Apart from the counts, so
    /// that a search reads few cache lines.
    starts: Vec<u64>,
    slots: Vec<WaitCounts>,
    /// Time up to which exposure is accounted for.
    counted_until: Timestamp,
}

impl OpenWaits {
    pub(super) fn new() -> Self {
        OpenWaits { starts: vec![0], slots: vec![[0; CLASSES]], counted_until: Timestamp(0) }
    }

    /// Whether [`OpenWaits::advance`] to `now` would have an effect.
    pub(super) fn is_behind(&self, now: Timestamp) -> bool {
        self.starts.last().is_some_and(|start| *start < now.0 >> STEP_BITS)
    }

    /// Advances time, which never goes back. Call before any other change at `now`.
    pub(super) fn advance(&mut self, now: Timestamp, evidence: &mut Evidence) {
        if !self.is_behind(now) {
            return;
        }
        let step = now.0 >> STEP_BITS;
        let mut end_us = now.0;
        for (start, waiting) in self.starts.iter().zip(&self.slots).rev() {
            let start_us = start << STEP_BITS;
            // Treats all waits of a slot as begun in its middle.
            let middle_us = start_us + (end_us - start_us) / 2;
            let from_us = self.counted_until.0.max(middle_us) - middle_us;
            evidence.add_exposure_of_all(waiting, from_us, now.0 - middle_us);
            end_us = start_us;
        }
        self.counted_until = now;
        if self.slots.len() >= SLOTS_MAX {
            self.merge_slots(step);
        }
        self.starts.push(step);
        self.slots.push([0; CLASSES]);
    }

    /// Merges neighbours that together are no wider than an eighth of their age; at least one pair.
    fn merge_slots(&mut self, now: u64) {
        let mut starts: Vec<u64> = Vec::with_capacity(SLOTS_MAX);
        let mut joined: Vec<WaitCounts> = Vec::with_capacity(SLOTS_MAX);
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

    /// Begins a wait now.
    pub(super) fn begin(&mut self, class: ReuseClass) {
        if let Some(waiting) = self.slots.last_mut() {
            waiting[class.index()] += 1;
        }
    }

    /// Ends a wait that began at `start`.
    pub(super) fn end(
        &mut self,
        class: ReuseClass,
        start: Timestamp,
        now: Timestamp,
        evidence: &mut Evidence,
    ) {
        let step = start.0 >> STEP_BITS;
        let at = self.starts.partition_point(|start| *start <= step).saturating_sub(1);
        let waiting = &mut self.slots[at][class.index()];
        debug_assert!(*waiting > 0, "a wait ended that had not begun");
        *waiting = (*waiting - 1).max(0);
        let from_us = self.counted_until.0.max(start.0) - start.0;
        evidence.add_exposure(class, from_us, now.0.max(start.0) - start.0);
    }
}

fn add(sums: &mut WaitCounts, more: &WaitCounts) {
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

#[cfg(test)]
mod tests {
    use super::super::super::bands;
    use super::*;

    #[test]
    fn exposure_equals_waited_time() {
        let (mut alive, mut evidence) = (OpenWaits::new(), Evidence::new());
        let class = ReuseClass(3);
        let (mut expected, mut waits) = (0.0, Vec::new());
        for at in 0..4000_u64 {
            let now = Timestamp(at * 370_000);
            alive.advance(now, &mut evidence);
            alive.begin(class);
            waits.push(now);
            // Every third wait ends after 20 s, a few after a long time, the others never.
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
