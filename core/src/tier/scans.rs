//! Scans of the slab that continue over several calls.
//!
//! Not here: what a scan does with a block (`order.rs`, `invalidation.rs`), and the scan after the
//! loss of a GPU (`gpu_residency.rs`).

use super::invalidation::{SWEEP_DROPS_MAX, SWEEP_SLOTS_MAX};
use super::order::LISTED_BLOCKS_MAX;

/// Cursors of the scans.
#[derive(Debug, Default)]
pub(super) struct SlabScans {
    listing: Option<Listing>,
    sweep: Option<Sweep>,
    sweep_budget: SweepBudget,
}

/// Scan for the blocks of new quotas and times to live. It goes round the slab once.
#[derive(Clone, Copy, Debug)]
struct Listing {
    next: usize,
    remaining: usize,
}

/// Scan for blocks of earlier weights.
#[derive(Clone, Copy, Debug)]
struct Sweep {
    next: usize,
    end: usize,
}

/// Slots scanned and blocks dropped on demand since the last scheduled step of the sweep.
#[derive(Clone, Copy, Debug, Default)]
struct SweepBudget {
    slots: usize,
    blocks: usize,
}

impl SlabScans {
    /// Starts a full round at the current cursor: callers that restart often still complete rounds.
    pub(super) fn restart_listing(&mut self, slots: usize) {
        let next = self.listing.map_or(0, |listing| listing.next);
        self.listing = Some(Listing { next, remaining: slots });
    }

    /// The next slots of the listing, at most [`LISTED_BLOCKS_MAX`]; `None` if there is no listing.
    pub(super) fn next_listed_slots(&mut self, slots: usize) -> Option<impl Iterator<Item = usize> + use<>> {
        let Listing { next: from, remaining } = self.listing?;
        let (slots, count) = (slots.max(1), remaining.min(LISTED_BLOCKS_MAX));
        let next = Listing { next: (from + count) % slots, remaining: remaining - count };
        self.listing = (remaining > count).then_some(next);
        Some((from..from + count).map(move |place| place % slots))
    }

    /// Whether slots of the listing remain.
    pub(super) fn is_listing(&self) -> bool {
        self.listing.is_some()
    }

    /// Starts the sweep over the first `slots` slots.
    pub(super) fn start_sweep(&mut self, slots: usize) {
        self.sweep = Some(Sweep { next: 0, end: slots });
    }

    /// Whether the sweep has not found its end.
    pub(super) fn is_sweeping(&self) -> bool {
        self.sweep.is_some()
    }

    pub(super) fn reset_sweep_budget(&mut self) {
        self.sweep_budget = SweepBudget::default();
    }

    /// The next slot of the sweep; `None` at its end, or if the budget of this step is used up.
    pub(super) fn due_swept_slot(&mut self) -> Option<usize> {
        let Sweep { next, end } = self.sweep?;
        if next >= end {
            self.sweep = None;
            return None;
        }
        let SweepBudget { slots, blocks } = self.sweep_budget;
        (slots < SWEEP_SLOTS_MAX && blocks < SWEEP_DROPS_MAX).then_some(next)
    }

    /// Counts the slot that [`Self::due_swept_slot`] returned, and whether its block was dropped.
    pub(super) fn advance_sweep(&mut self, is_dropped: bool) {
        if let Some(sweep) = &mut self.sweep {
            sweep.next += 1;
        }
        self.sweep_budget.slots += 1;
        self.sweep_budget.blocks += usize::from(is_dropped);
    }

    /// Whether the sweep has not reached this slot.
    #[cfg(test)]
    pub(super) fn will_sweep(&self, place: usize) -> bool {
        self.sweep.is_some_and(|sweep| (sweep.next..sweep.end).contains(&place))
    }
}
