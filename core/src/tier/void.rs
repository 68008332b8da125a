//! Generations of weights: blocks that were computed with others are void at once, and go bit by bit (docs/adr/0060).
//!
//! A new generation notes the last serial number of the book. What has no higher one is found by no fetch and no offer,
//! is not announced, and no pin keeps it; who holds a lease on it reads on until that ends, and then it goes. What nothing
//! holds goes in steps, and first where room is wanted. Not here: who says which generation is in force (`crate::index`).

use super::book::Book;
use super::entry::Entry;
use crate::evict::BlockKey;
use crate::id::{Generation, Timestamp};
use crate::index::command::DropCause;

/// Places of the slab that one step looks at: about a millisecond of the task that owns the book.
pub const VOID_PLACES_MAX: usize = 16_384;

/// Blocks that one step drops: less than a millisecond of that task. A step every 20 ms drops 51,200 blocks a second.
pub const VOID_BLOCKS_MAX: usize = 1024;

/// What was looked at and dropped since the last step that nobody asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VoidLooks {
    places: usize,
    blocks: usize,
}

impl Book {
    /// The same book, whose blocks are of this generation. For one that is empty.
    #[must_use]
    pub fn of_generation(mut self, generation: Generation) -> Book {
        self.slab.set_generation(generation);
        self
    }

    /// The generation of what is found and of what is offered.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.slab.generation()
    }

    /// The generation of a block, found or not, while the book knows the key.
    #[must_use]
    pub fn generation_of(&self, key: BlockKey) -> Option<Generation> {
        self.slab.get(key).map(|entry| entry.generation)
    }

    /// Other weights are in force: everything that is here is void, without a step for each block. Changes that were not taken
    /// are void too: [`Self::announce_all`] tells what is left. Ends the window, which names blocks that are no more. The
    /// generation in force changes nothing; `true` for another one.
    pub fn set_generation(&mut self, generation: Generation, now: Timestamp) -> bool {
        if generation == self.generation() {
            return false;
        }
        // Each place in a window is one block's, and that is a new one from now on.
        self.set_window([], now);
        self.slab.set_generation(generation);
        self.slab.void_all();
        self.changes.take();
        self.voiding = Some((0, self.slab.places()));
        true
    }

    /// Drops void blocks that nothing holds, at most [`VOID_BLOCKS_MAX`] of them, and lets whoever needs room drop as many until it is called again. Returns
    /// how many it dropped.
    pub fn drop_void_blocks(&mut self) -> usize {
        self.void_looks = VoidLooks::default();
        let dropped = self.sweep_void(|_| false);
        self.void_looks = VoidLooks::default();
        dropped
    }

    /// Whether there may be void blocks that nothing holds.
    #[must_use]
    pub fn has_void_blocks(&self) -> bool {
        self.voiding.is_some()
    }

    /// One step of the search for them, until it is enough. One request may ask for room thousands of times: what is looked at and dropped for all of that
    /// between two calls of [`Self::drop_void_blocks`] is bounded as one step is.
    pub(super) fn sweep_void(&mut self, is_enough: impl Fn(&Book) -> bool) -> usize {
        let mut dropped = 0;
        while let Some((place, end)) = self.voiding {
            if place >= end {
                self.voiding = None;
                break;
            }
            let VoidLooks { places, blocks } = self.void_looks;
            if places >= VOID_PLACES_MAX || blocks >= VOID_BLOCKS_MAX || is_enough(self) {
                break;
            }
            self.voiding = Some((place + 1, end));
            // What is held goes when that ends.
            let goes = self.drop_if_void(BlockKey(u32::try_from(place).unwrap_or(u32::MAX)));
            dropped += usize::from(goes);
            self.void_looks = VoidLooks { places: places + 1, blocks: blocks + usize::from(goes) };
        }
        dropped
    }

    /// Drops a block if it is void and neither a lease nor a write holds it. `true` if it did.
    pub(super) fn drop_if_void(&mut self, key: BlockKey) -> bool {
        let is_idle = |entry: &Entry| entry.leases == 0 && !entry.writing && entry.place.is_some();
        let goes = self.slab.is_void(key) && self.slab.get(key).is_some_and(is_idle);
        if goes {
            self.drop_void(key);
        }
        goes
    }

    pub(super) fn drop_void(&mut self, key: BlockKey) {
        if let Some(tier) = self.place(key) {
            self.shelf_mut(tier).stats.void_blocks += 1;
        }
        // It is not announced any more, so nobody is told why.
        self.drop_block(key, DropCause::Room);
    }
}
