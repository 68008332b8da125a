//! Counts SSD moves in flight and decides which may begin: demotions leave slots for loads, more of
//! them while a reader waits.
//!
//! Not here: which block moves (`kv_core::tier`), and whether it has space.

use crate::tiers::ssd::Depth;

/// SSD moves in flight. A moving block has space on both sides: the staging records on SSD cover
/// all moves, and a load also needs a free arena slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MoveSlots {
    depth: Depth,
    loads: usize,
    demotions: usize,
}

impl MoveSlots {
    /// No move in flight.
    pub(super) fn new(depth: Depth) -> MoveSlots {
        MoveSlots { depth, loads: 0, demotions: 0 }
    }

    /// Counts without these moves: moves on a slow device must not delay the others.
    pub(super) fn excluding(self, demotions: usize, loads: usize) -> MoveSlots {
        MoveSlots {
            depth: self.depth,
            loads: self.loads.saturating_sub(loads),
            demotions: self.demotions.saturating_sub(demotions),
        }
    }

    /// Whether a load may begin.
    pub(super) fn may_load(&self) -> bool {
        self.loads + self.demotions < self.depth.moves
    }

    /// Whether a demotion may begin.
    pub(super) fn may_demote(&self, reader_waits: bool) -> bool {
        let Depth { demotions, demotions_while_readers_wait: demotions_beside_readers, .. } = self.depth;
        let most = if reader_waits { demotions_beside_readers } else { demotions };
        self.may_load() && self.demotions < most
    }

    pub(super) fn begin(&mut self, is_load: bool) {
        *self.count_mut(is_load) += 1;
    }

    pub(super) fn end(&mut self, is_load: bool) {
        *self.count_mut(is_load) -= 1;
    }

    fn count_mut(&mut self, is_load: bool) -> &mut usize {
        if is_load { &mut self.loads } else { &mut self.demotions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begins all moves allowed, demotions before loads.
    fn fill(slots: &mut MoveSlots, reader_waits: bool) {
        while slots.may_demote(reader_waits) {
            slots.begin(false);
        }
        while slots.may_load() {
            slots.begin(true);
        }
    }

    #[test]
    fn demotions_leave_slots_for_loads() {
        let depth = Depth { demotions: 32, demotions_while_readers_wait: 8, moves: 48 };
        let filled = |reader_waits| {
            let mut slots = MoveSlots::new(depth);
            fill(&mut slots, reader_waits);
            (slots.demotions, slots.loads)
        };
        assert_eq!((filled(false), filled(true)), ((32, 16), (8, 40)));
        // A reader arrives while demotions are above its limit: none is added until they fall below
        // it.
        let mut slots = MoveSlots { demotions: 32, ..MoveSlots::new(depth) };
        assert!(slots.may_load() && !slots.may_demote(true));
        (0..24).for_each(|_| slots.end(false));
        assert!(!slots.may_demote(true), "the limit is reached");
        slots.end(false);
        assert!(slots.may_demote(true));
        // Moves on a slow device do not block others.
        let full = MoveSlots { loads: 16, demotions: 32, ..slots };
        assert!(!full.may_load() && !full.excluding(24, 0).may_demote(true));
        assert!(full.excluding(25, 0).may_demote(true) && full.excluding(0, 1).may_load());
    }
}
