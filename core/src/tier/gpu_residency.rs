//! Counts of the blocks on the GPU, on their way to it, and leaving it.
//!
//! Not here: which blocks these are (`gpu.rs`).

use std::ops::Range;

use super::gpu::{GPU_LOSS_SLOTS_MAX, GPU_PROMOTIONS_MAX};

/// Blocks of the GPU tier by the state of their bytes.
#[derive(Debug, Default)]
pub(super) struct GpuResidency {
    /// Blocks assigned to the GPU before their bytes arrive there.
    pending: usize,
    /// Blocks with bytes on the GPU, whatever their tier, until their `DropGpu` is handed out.
    copies: usize,
    /// Cursor of the scan for blocks of a lost GPU.
    loss_cursor: Option<usize>,
}

impl GpuResidency {
    /// Counts a block that is assigned to the GPU.
    pub(super) fn on_assigned(&mut self, has_copy: bool) {
        self.pending += usize::from(!has_copy);
    }

    /// Counts a block that is no longer assigned to the GPU.
    pub(super) fn on_unassigned(&mut self, has_copy: bool) {
        self.pending -= usize::from(!has_copy);
    }

    /// Counts bytes that arrived; `is_assigned` tells whether their block still belongs there.
    pub(super) fn on_arrived(&mut self, is_assigned: bool) {
        self.copies += 1;
        self.pending -= usize::from(is_assigned);
    }

    /// Counts bytes whose drop is handed out.
    pub(super) fn on_freed(&mut self) {
        self.copies -= 1;
    }

    /// Blocks demoted from the GPU with bytes still on it; `assigned` blocks are assigned to it.
    pub(super) fn leaving(&self, assigned: u64) -> usize {
        let there = usize::try_from(assigned).unwrap_or(usize::MAX).saturating_sub(self.pending);
        self.copies.saturating_sub(there)
    }

    /// Promotions that may start. Each adds at most one to either count, because it demotes at most
    /// one victim.
    pub(super) fn promotions_left(&self, assigned: u64) -> usize {
        GPU_PROMOTIONS_MAX.saturating_sub(self.pending.max(self.leaving(assigned)))
    }

    /// The next slots to scan after a loss, of `slots` in total.
    pub(super) fn next_lost_slots(&mut self, slots: usize) -> Range<usize> {
        let from = self.loss_cursor.unwrap_or(0);
        let end = slots.min(from.saturating_add(GPU_LOSS_SLOTS_MAX));
        self.loss_cursor = (end < slots).then_some(end);
        from..end
    }

    /// Whether slots of that scan remain.
    pub(super) fn is_scanning_loss(&self) -> bool {
        self.loss_cursor.is_some()
    }

    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        self.pending
    }

    #[cfg(test)]
    pub(super) fn copies(&self) -> usize {
        self.copies
    }
}
