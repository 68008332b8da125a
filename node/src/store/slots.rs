//! Moves in flight, and which may begin: demotions leave loads their place, and some more while a reader waits.
//!
//! Not here: which block moves (`kv_core::tier`), and whether there is room for it.

use crate::tiers::ssd::Depth;

/// Moves in flight. A block on its way has room on both sides; on SSD the staging records cover all of them, in DRAM a
/// load also waits for one of the arena's free slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    depth: Depth,
    loads: usize,
    demotions: usize,
}

impl Slots {
    /// None in flight.
    pub(super) fn new(depth: Depth) -> Slots {
        Slots { depth, loads: 0, demotions: 0 }
    }

    /// The same without so many demotions and loads, for which nobody else has to wait.
    pub(super) fn without(self, (demotions, loads): (usize, usize)) -> Slots {
        Slots {
            depth: self.depth,
            loads: self.loads.saturating_sub(loads),
            demotions: self.demotions.saturating_sub(demotions),
        }
    }

    /// Whether a load may begin.
    pub(super) fn load(&self) -> bool {
        self.loads + self.demotions < self.depth.moves
    }

    /// Whether a demotion may begin.
    pub(super) fn demotion(&self, reader_waits: bool) -> bool {
        let Depth { demotions, demotions_beside_readers, .. } = self.depth;
        let most = if reader_waits { demotions_beside_readers } else { demotions };
        self.load() && self.demotions < most
    }

    pub(super) fn begin(&mut self, is_load: bool) {
        *self.of(is_load) += 1;
    }

    pub(super) fn end(&mut self, is_load: bool) {
        *self.of(is_load) -= 1;
    }

    fn of(&mut self, is_load: bool) -> &mut usize {
        if is_load { &mut self.loads } else { &mut self.demotions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begins what may begin, demotions before loads.
    fn fill(slots: &mut Slots, reader_waits: bool) {
        while slots.demotion(reader_waits) {
            slots.begin(false);
        }
        while slots.load() {
            slots.begin(true);
        }
    }

    #[test]
    fn demotions_leave_loads_their_place_and_more_while_a_reader_waits() {
        let depth = Depth { demotions: 32, demotions_beside_readers: 8, moves: 48 };
        let filled = |reader_waits| {
            let mut slots = Slots::new(depth);
            fill(&mut slots, reader_waits);
            (slots.demotions, slots.loads)
        };
        assert_eq!((filled(false), filled(true)), ((32, 16), (8, 40)));
        // A reader who comes finds what is in flight; nothing is added to it until it is less.
        let mut slots = Slots { demotions: 32, ..Slots::new(depth) };
        assert!(slots.load() && !slots.demotion(true));
        (0..24).for_each(|_| slots.end(false));
        assert!(!slots.demotion(true), "as many as may be");
        slots.end(false);
        assert!(slots.demotion(true));
        // What a slow device has stands in nobody's way.
        let full = Slots { loads: 16, demotions: 32, ..slots };
        assert!(!full.load() && !full.without((24, 0)).demotion(true));
        assert!(full.without((25, 0)).demotion(true) && full.without((0, 1)).load());
    }
}
