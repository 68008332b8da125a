//! How much of the DRAM may be held by blocks that are still being computed.
//!
//! Their saves last as long as a prefill, and what they hold is nobody's to read: others shall find room beside them. Not here:
//! places and memory of the paths (`kvfleet-transport`), and the slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of slots that are left for them. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Layered {
    left_bytes: Arc<AtomicUsize>,
}

impl Layered {
    /// Half of a DRAM tier of so many bytes. What the arena has beside the tier is for what passes through it, and no part of this.
    pub(crate) fn half_of(tier_bytes: usize) -> Layered {
        Layered { left_bytes: Arc::new(AtomicUsize::new(tier_bytes / 2)) }
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
        let layered = Layered::half_of(200);
        let held = layered.take(60);
        assert!(held.is_some() && layered.take(41).is_none());
        assert!(layered.take(40).is_some());
        drop(held);
        assert!(layered.take(100).is_some());
    }
}
