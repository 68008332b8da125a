//! Bytes that a server has under way in one direction, bounded.
//!
//! Not here: what is refused when there is no room (`serve.rs`).

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes under way in one direction, and how many may be.
pub(crate) struct InFlight {
    bytes: AtomicU64,
    bytes_max: u64,
}

impl InFlight {
    pub(crate) fn new(bytes_max: u64) -> InFlight {
        InFlight { bytes: AtomicU64::new(0), bytes_max }
    }

    /// Room for `bytes` more; nothing when too much is under way. What is larger than the limit passes when it is
    /// alone, or it could never be served.
    pub(crate) fn reserve(&self, bytes: u64) -> Option<Reserved<'_>> {
        let fits = |under_way: u64| {
            let after = under_way.saturating_add(bytes);
            (under_way == 0 || after <= self.bytes_max).then_some(after)
        };
        let before = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Reserved { under_way: &self.bytes, bytes: before.saturating_add(bytes) - before })
    }
}

/// Bytes counted as under way until dropped.
pub(crate) struct Reserved<'a> {
    under_way: &'a AtomicU64,
    bytes: u64,
}

impl Reserved<'_> {
    /// Gives back what is more than `bytes`.
    pub(crate) fn shrink(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.under_way.fetch_sub(less, Ordering::Relaxed);
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.under_way.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_given_back_can_be_had_again_and_one_alone_always_passes() {
        let room = InFlight::new(5);
        let mut first = room.reserve(100).unwrap();
        assert!(room.reserve(1).is_none());
        first.shrink(4);
        assert!(room.reserve(1).is_some());
        drop(first);
        assert_eq!(room.bytes.load(Ordering::Relaxed), 0);
    }
}
