//! Weight generations: a change of weights invalidates all blocks at once; they are dropped step by
//! step (docs/adr/0060).
//!
//! A new generation records the book's last serial number. Blocks up to that number are not found,
//! not announced, and not kept by pins. A lease may still read its blocks until it ends. Unheld
//! ones are dropped in steps, and first when space is needed. Not here: the choice of the
//! generation in force (`crate::index`).

use super::book::Book;
use super::entry::Entry;
use crate::evict::BlockKey;
use crate::id::{Generation, Timestamp};
use crate::index::command::DropCause;

/// Slots of the slab scanned in one step: about a millisecond of the task that owns the book.
pub const SWEEP_SLOTS_MAX: usize = 16_384;

/// Blocks dropped in one step: less than a millisecond of that task, once every 20 ms.
pub const SWEEP_DROPS_MAX: usize = 1024;

impl Book {
    /// Sets the generation of an empty book.
    #[must_use]
    pub fn with_generation(mut self, generation: Generation) -> Book {
        self.slab.set_generation(generation);
        self
    }

    /// Generation of the blocks that are found and offered.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.slab.generation()
    }

    /// Generation of a block; `None` if the key is unknown. The block may be invalidated.
    #[must_use]
    pub fn generation_of(&self, key: BlockKey) -> Option<Generation> {
        self.slab.get(key).map(|entry| entry.generation)
    }

    /// Changes the weights in force: invalidates every block, without a step per block. Discards
    /// pending changes; [`Self::announce_all`] lists the remaining blocks. Ends the window, because
    /// its blocks no longer exist. Returns `false` if the generation is already in force.
    pub fn set_generation(&mut self, generation: Generation, now: Timestamp) -> bool {
        if generation == self.generation() {
            return false;
        }
        // A window position belongs to one block, and those blocks are invalid from here on.
        self.set_window([], now);
        self.slab.set_generation(generation);
        self.slab.invalidate_all();
        self.changes.take();
        self.scans.start_sweep(self.slab.slot_count());
        true
    }

    /// Drops unheld invalidated blocks, at most [`SWEEP_DROPS_MAX`], and resets the budget of
    /// on-demand sweeps. Returns the number of blocks dropped.
    pub fn drop_invalidated_blocks(&mut self) -> usize {
        self.scans.reset_sweep_budget();
        let dropped = self.sweep_invalidated(|_| false);
        self.scans.reset_sweep_budget();
        dropped
    }

    /// Whether unheld invalidated blocks may remain.
    #[must_use]
    pub fn has_invalidated_blocks(&self) -> bool {
        self.scans.is_sweeping()
    }

    /// Continues the sweep until `is_enough`. One request may ask for space thousands of times, so
    /// all sweeps between two calls of [`Self::drop_invalidated_blocks`] share the budget of one
    /// step.
    pub(super) fn sweep_invalidated(&mut self, is_enough: impl Fn(&Book) -> bool) -> usize {
        let mut dropped = 0;
        while let Some(place) = self.scans.due_swept_slot() {
            if is_enough(self) {
                break;
            }
            // A held block is dropped when its hold ends.
            let goes = self.drop_if_invalidated(BlockKey(u32::try_from(place).unwrap_or(u32::MAX)));
            dropped += usize::from(goes);
            self.scans.advance_sweep(goes);
        }
        dropped
    }

    /// Drops a block if it is invalidated and neither a lease nor a write holds it. Returns whether
    /// it did.
    pub(super) fn drop_if_invalidated(&mut self, key: BlockKey) -> bool {
        let is_idle = |entry: &Entry| entry.leases == 0 && !entry.writing && entry.assigned_tier.is_some();
        let goes = self.slab.is_invalidated(key) && self.slab.get(key).is_some_and(is_idle);
        if goes {
            self.drop_invalidated(key);
        }
        goes
    }

    pub(super) fn drop_invalidated(&mut self, key: BlockKey) {
        if let Some(tier) = self.assigned_tier(key) {
            self.tier_state_mut(tier).stats.invalidated_blocks += 1;
        }
        // It is no longer announced, so the cause is not reported.
        self.drop_block(key, DropCause::Capacity);
    }
}
