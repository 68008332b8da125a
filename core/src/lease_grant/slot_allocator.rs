//! Allocator of slots in a bounce buffer. First fit, because a buffer has few slots and these are
//! short-lived.
//!
//! Not here: the buffer's memory, and which side may write where.

use std::collections::BTreeMap;

/// Slots in one part of a bounce buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotAllocator {
    bytes: u64,
    align: u64,
    /// Start and end offset of each slot.
    slots: BTreeMap<u64, u64>,
}

impl SlotAllocator {
    /// A part of `bytes` bytes with slots that begin at multiples of `align` (at least one).
    #[must_use]
    pub fn new(bytes: u64, align: u64) -> SlotAllocator {
        SlotAllocator { bytes, align: align.max(1), slots: BTreeMap::new() }
    }

    /// Allocates the first free range of `len` bytes and returns its offset; `None` if there is
    /// none. An empty slot takes one byte.
    pub fn allocate(&mut self, len: u32) -> Option<u64> {
        self.allocate_within(len, self.bytes)
    }

    /// Same, within the first `bytes` bytes: the rest is left to other users.
    pub fn allocate_within(&mut self, len: u32, bytes: u64) -> Option<u64> {
        let len = u64::from(len).max(1);
        let mut at = 0_u64;
        for (&start, &end) in &self.slots {
            if at.checked_add(len)? <= start {
                break;
            }
            at = end.checked_next_multiple_of(self.align)?;
        }
        let end = at.checked_add(len).filter(|end| *end <= self.bytes.min(bytes))?;
        self.slots.insert(at, end);
        Some(at)
    }

    /// Frees the slot that begins at `at`; `false` if there is none.
    pub fn free(&mut self, at: u64) -> bool {
        self.slots.remove(&at).is_some()
    }

    /// Number of slots in use.
    #[must_use]
    pub fn slot_count(&self) -> usize {
        self.slots.len()
    }
}
