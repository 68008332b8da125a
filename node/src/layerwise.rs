//! Limits the DRAM held by blocks that are still being computed (layer-wise saves).
//!
//! Such a save lasts as long as a prefill, and its slots are not readable meanwhile. The limit
//! leaves space for others. Not here: positions and memory of the transports (`kvfleet-transport`),
//! and the slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Remaining bytes of slots for layer-wise saves. Clones share the budget.
#[derive(Clone, Debug)]
pub(crate) struct LayerwiseBudget {
    free_bytes: Arc<AtomicUsize>,
}

impl LayerwiseBudget {
    /// Half of a DRAM tier of `tier_bytes`. The arena's slots beyond the tier are for blocks in
    /// flight and do not count.
    pub(crate) fn half_of(tier_bytes: usize) -> LayerwiseBudget {
        LayerwiseBudget { free_bytes: Arc::new(AtomicUsize::new(tier_bytes / 2)) }
    }

    /// Reserves `bytes` of slots, counted as shares of slabs. `None` if too little is free.
    pub(crate) fn take(&self, bytes: usize) -> Option<LayerwiseReservation> {
        let less = |left: usize| left.checked_sub(bytes);
        self.free_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(LayerwiseReservation { budget: self.clone(), bytes })
    }
}

/// Bytes reserved by one save, until dropped.
#[derive(Debug)]
pub(crate) struct LayerwiseReservation {
    budget: LayerwiseBudget,
    bytes: usize,
}

impl Drop for LayerwiseReservation {
    fn drop(&mut self) {
        self.budget.free_bytes.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_reservations_free_their_bytes() {
        let layered = LayerwiseBudget::half_of(200);
        let held = layered.take(60);
        assert!(held.is_some() && layered.take(41).is_none());
        assert!(layered.take(40).is_some());
        drop(held);
        assert!(layered.take(100).is_some());
    }
}
