//! Capacities and watermarks: when a tier must evict, and down to which level. Arithmetic only.

/// Size of a tier in one of two units. Use bytes if frame sizes are mixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// Slot bytes.
    Bytes(u64),
    /// Whole blocks, whatever their size.
    Blocks(u64),
}

impl Capacity {
    /// The amount in its own unit.
    #[must_use]
    pub fn amount(self) -> u64 {
        match self {
            Capacity::Bytes(amount) | Capacity::Blocks(amount) => amount,
        }
    }

    /// Another amount of the same unit.
    #[must_use]
    pub fn with_amount(self, amount: u64) -> Capacity {
        match self {
            Capacity::Bytes(_) => Capacity::Bytes(amount),
            Capacity::Blocks(_) => Capacity::Blocks(amount),
        }
    }

    /// Amount that a block with a slot of `slot_bytes` takes.
    #[must_use]
    pub fn cost(self, slot_bytes: u32) -> u64 {
        match self {
            Capacity::Bytes(_) => u64::from(slot_bytes),
            Capacity::Blocks(_) => 1,
        }
    }
}

/// Size and watermarks of a tier. Both watermarks at 1.0 make it exact: it evicts only when it
/// must.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierLimits {
    /// Size; zero disables the tier.
    pub capacity: Capacity,
    /// Share of the capacity above which the tier evicts, 0 to 1.
    pub watermark_high: f64,
    /// Share down to which it then evicts, at most the high watermark.
    pub watermark_low: f64,
}

impl TierLimits {
    /// Limits with both watermarks at 1.0.
    #[must_use]
    pub fn exact(capacity: Capacity) -> TierLimits {
        TierLimits { capacity, watermark_high: 1.0, watermark_low: 1.0 }
    }

    /// Level to evict down to so that `cost` more fits below the watermarks; `None` if no eviction
    /// is needed.
    #[must_use]
    pub fn goal(&self, used: u64, cost: u64) -> Option<u64> {
        let wanted = used.saturating_add(cost);
        (wanted > self.level(self.watermark_high)).then(|| self.level(self.watermark_low))
    }

    /// Whether `cost` more fits into the capacity.
    #[must_use]
    pub fn fits(&self, used: u64, cost: u64) -> bool {
        used.saturating_add(cost) <= self.capacity.amount()
    }

    /// Whether `cost` more stays at or below the low watermark.
    #[must_use]
    pub fn is_low(&self, used: u64, cost: u64) -> bool {
        used.saturating_add(cost) <= self.level(self.watermark_low)
    }

    /// This share of the capacity (0 to 1), capped at the low watermark.
    #[must_use]
    pub fn share(&self, share: f64) -> u64 {
        self.level(share.min(self.watermark_low))
    }

    fn level(&self, share: f64) -> u64 {
        let amount = self.capacity.amount();
        if share >= 1.0 {
            return amount;
        }
        // Exact below 2^53 bytes (8 PiB), far above any tier.
        (amount as f64 * share.max(0.0)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_watermarks_evict_only_when_full() {
        let limits = TierLimits::exact(Capacity::Blocks(3));
        assert_eq!(limits.goal(2, 1), None);
        assert_eq!(limits.goal(3, 1), Some(3));
        assert!(limits.fits(2, 1));
        assert!(!limits.fits(3, 1));
    }

    #[test]
    fn watermarks_free_a_range_at_once() {
        let limits = TierLimits { capacity: Capacity::Bytes(1000), watermark_high: 0.9, watermark_low: 0.5 };
        assert_eq!(limits.goal(800, 100), None);
        assert_eq!(limits.goal(801, 100), Some(500));
        assert!(limits.is_low(400, 100) && !limits.is_low(401, 100));
        assert_eq!((limits.share(0.4), limits.share(0.9)), (400, 500));
    }

    #[test]
    fn cost_is_slot_bytes_or_one_block() {
        assert_eq!(Capacity::Bytes(10).cost(4096), 4096);
        assert_eq!(Capacity::Blocks(10).cost(4096), 1);
    }

    #[test]
    fn absent_tier_accepts_no_block() {
        let limits = TierLimits::exact(Capacity::Bytes(0));
        assert!(!limits.fits(0, 1));
        assert_eq!(limits.goal(0, 1), Some(0));
    }
}
