//! Daily write budget, so that an SSD reaches its intended lifetime. Pure: the time is an argument.
//!
//! A token bucket, refilled continuously, that holds an hour's worth: it allows a burst, but not a
//! week of bursts. Not here: handling a block that may not be written (`store`).

use kv_core::id::Timestamp;

/// Microseconds per day.
const DAY_US: u128 = 86_400_000_000;

/// Capacity of the bucket, in microseconds of refilling: long enough for any burst of requests.
const BURST_US: u64 = 3_600_000_000;

/// A budget of written bytes.
#[derive(Clone, Copy, Debug)]
pub struct WriteBudget {
    bytes_per_day: u64,
    /// Time at which the bucket will be full again, in microseconds.
    full_at: u64,
}

impl WriteBudget {
    /// A full bucket; 0 bytes per day means no limit.
    #[must_use]
    pub fn new(bytes_per_day: u64) -> WriteBudget {
        WriteBudget { bytes_per_day, full_at: 0 }
    }

    /// Takes `bytes` if they are available.
    pub fn try_take(&mut self, bytes: u64, now: Timestamp) -> bool {
        if self.bytes_per_day == 0 {
            return true;
        }
        let full_at = self.full_after(bytes, now);
        let fits = full_at <= now.0.saturating_add(BURST_US);
        if fits {
            self.full_at = full_at;
        }
        fits
    }

    /// Bytes that [`Self::try_take`] would allow now.
    #[must_use]
    pub fn remaining(&self, now: Timestamp) -> u64 {
        if self.bytes_per_day == 0 {
            return u64::MAX;
        }
        let until = now.0.saturating_add(BURST_US).saturating_sub(self.full_at.max(now.0));
        u64::try_from(u128::from(until) * u128::from(self.bytes_per_day) / DAY_US).unwrap_or(u64::MAX)
    }

    /// Charges `bytes` that were written already, available or not.
    pub fn charge(&mut self, bytes: u64, now: Timestamp) {
        if self.bytes_per_day > 0 {
            self.full_at = self.full_after(bytes, now);
        }
    }

    fn full_after(&self, bytes: u64, now: Timestamp) -> u64 {
        let cost = u128::from(bytes) * DAY_US / u128::from(self.bytes_per_day.max(1));
        self.full_at.max(now.0).saturating_add(u64::try_from(cost).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000_000;

    #[test]
    fn bucket_allows_an_hour_at_once_and_a_day_per_day() {
        let mut budget = WriteBudget::new(24_000);
        assert!(budget.try_take(1000, Timestamp(0)));
        assert!(!budget.try_take(1, Timestamp(0)), "the hour's worth is used up");
        assert_eq!((budget.remaining(Timestamp(0)), budget.remaining(Timestamp(HOUR / 2))), (0, 500));
        assert!(budget.try_take(500, Timestamp(HOUR / 2)) && !budget.try_take(10, Timestamp(HOUR / 2)));
        let mut written = 0;
        for minute in 0..10 * 24 * 60 {
            written += u64::from(budget.try_take(100, Timestamp(HOUR + minute * HOUR / 60))) * 100;
        }
        assert!((239_000..=241_100).contains(&written), "{written} in ten days");
    }

    #[test]
    fn charged_bytes_count() {
        let mut budget = WriteBudget::new(24_000);
        budget.charge(3000, Timestamp(0));
        assert!(!budget.try_take(1, Timestamp(HOUR)));
        assert!(budget.try_take(900, Timestamp(3 * HOUR)));
    }

    #[test]
    fn unlimited_budget_allows_everything() {
        let mut budget = WriteBudget::new(0);
        budget.charge(u64::MAX, Timestamp(0));
        assert!(budget.try_take(u64::MAX, Timestamp(0)));
        assert_eq!(budget.remaining(Timestamp(0)), u64::MAX);
    }
}
