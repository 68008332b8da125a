//! How much of the DRAM may be held by blocks that are still being computed.
//!
//! Their saves last as long as a prefill, and what they hold is nobody's to read: others shall find room beside them. Not here:
//! places and memory of the paths (`kvfleet-transport`), and the slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::arena::Arena;

/// Bytes of slots that are left for them. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Layered {
    left_bytes: Arc<AtomicUsize>,
}

impl Layered {
    pub(crate) fn half_of(arena: &Arena) -> Layered {
        let numbers = arena.numbers();
        Layered::of(numbers.slab_bytes.saturating_mul(numbers.slabs) / 2)
    }

    fn of(bytes: usize) -> Layered {
        Layered { left_bytes: Arc::new(AtomicUsize::new(bytes)) }
    }

    /// A part for slots of so many bytes, their shares of the slabs; nothing when others have it.
    pub(crate) fn take(&self, bytes: usize) -> Option<LayeredPart> {
        let less = |left: usize| left.checked_sub(bytes);
        self.left_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(LayeredPart { of: self.clone(), bytes })
    }
}

/// What one save holds, until it is dropped.
#[derive(Debug)]
pub(crate) struct LayeredPart {
    of: Layered,
    bytes: usize,
}

impl Drop for LayeredPart {
    fn drop(&mut self) {
        self.of.left_bytes.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_comes_back() {
        let layered = Layered::of(100);
        let held = layered.take(60);
        assert!(held.is_some() && layered.take(41).is_none());
        assert!(layered.take(40).is_some());
        drop(held);
        assert!(layered.take(100).is_some());
    }
}
