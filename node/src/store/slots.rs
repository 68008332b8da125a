//! Moves in flight, and which may begin: demotions leave loads their place, and some more while a reader waits.
//!
//! Not here: which block moves (`kv_core::tier`), and whether there is room for it.

/// Moves in flight: enough to keep an NVMe queue full. A block on its way has room on both sides; on
/// SSD the staging records cover all of them, in DRAM a load also waits for one of the arena's free slots.
pub(crate) const MOVES_MAX: usize = 48;

/// Demotions among them: a third is left for loads, whatever is demoted.
pub(crate) const DEMOTIONS_MAX: usize = 32;

/// Demotions in flight while a reader waits for a load that DRAM has room for: those are what his read finds before it in
/// the device. Without room they are what makes it, so that the reader waits for them too.
pub(crate) const DEMOTIONS_BESIDE_READERS_MAX: usize = 8;

/// Moves in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Slots {
    loads: usize,
    demotions: usize,
}

impl Slots {
    /// Whether a load may begin.
    pub(super) fn load(&self) -> bool {
        self.loads + self.demotions < MOVES_MAX
    }

    /// Whether a demotion may begin.
    pub(super) fn demotion(&self, reader_waits: bool) -> bool {
        let most = if reader_waits { DEMOTIONS_BESIDE_READERS_MAX } else { DEMOTIONS_MAX };
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
        let mut slots = Slots::default();
        fill(&mut slots, false);
        assert_eq!(slots, Slots { loads: MOVES_MAX - DEMOTIONS_MAX, demotions: DEMOTIONS_MAX });
        let mut slots = Slots::default();
        fill(&mut slots, true);
        let expected = Slots {
            loads: MOVES_MAX - DEMOTIONS_BESIDE_READERS_MAX,
            demotions: DEMOTIONS_BESIDE_READERS_MAX,
        };
        assert_eq!(slots, expected);
        // A reader who comes finds what is in flight; nothing is added to it until it is less.
        let mut slots = Slots { loads: 0, demotions: DEMOTIONS_MAX };
        assert!(slots.load() && !slots.demotion(true));
        (0..DEMOTIONS_MAX - DEMOTIONS_BESIDE_READERS_MAX + 1).for_each(|_| slots.end(false));
        assert!(slots.demotion(true));
    }
}
