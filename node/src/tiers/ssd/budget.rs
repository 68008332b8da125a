//! How much may be written a day, so that an SSD lives as long as it should. Pure: the time is given in.
//!
//! A bucket that is refilled all the time and holds an hour's worth: a burst passes, a week of bursts does
//! not. Not here: what becomes of a block that may not be written (`store`).

use kv_core::id::Timestamp;

/// Microseconds of a day.
const DAY_US: u128 = 86_400_000_000;

/// What the bucket holds, in microseconds of refilling: long enough that no burst of requests is cut.
const BURST_US: u64 = 3_600_000_000;

/// Bytes that may be written.
#[derive(Clone, Copy, Debug)]
pub struct WriteBudget {
    bytes_per_day: u64,
    /// When the bucket will be full again.
    full_at: u64,
}

impl WriteBudget {
    /// Full; 0 a day stands for no limit.
    #[must_use]
    pub fn new(bytes_per_day: u64) -> WriteBudget {
        WriteBudget { bytes_per_day, full_at: 0 }
    }

    /// Takes `bytes` if they are there.
    pub fn take(&mut self, bytes: u64, now: Timestamp) -> bool {
        if self.bytes_per_day == 0 {
            return true;
        }
        let full_at = self.after(bytes, now);
        let fits = full_at <= now.0.saturating_add(BURST_US);
        if fits {
            self.full_at = full_at;
        }
        fits
    }

    /// Bytes that [`Self::take`] would give now.
    #[must_use]
    pub fn left(&self, now: Timestamp) -> u64 {
        if self.bytes_per_day == 0 {
            return u64::MAX;
        }
        let until = now.0.saturating_add(BURST_US).saturating_sub(self.full_at.max(now.0));
        u64::try_from(u128::from(until) * u128::from(self.bytes_per_day) / DAY_US).unwrap_or(u64::MAX)
    }

    /// Takes `bytes` that were written already, there or not.
    pub fn spend(&mut self, bytes: u64, now: Timestamp) {
        if self.bytes_per_day > 0 {
            self.full_at = self.after(bytes, now);
        }
    }

    fn after(&self, bytes: u64, now: Timestamp) -> u64 {
        let cost = u128::from(bytes) * DAY_US / u128::from(self.bytes_per_day.max(1));
        self.full_at.max(now.0).saturating_add(u64::try_from(cost).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000_000;

    #[test]
    fn an_hour_of_it_passes_at_once_and_a_day_of_it_in_a_day() {
        let mut budget = WriteBudget::new(24_000);
        assert!(budget.take(1000, Timestamp(0)));
        assert!(!budget.take(1, Timestamp(0)), "an hour's worth is gone");
        assert_eq!((budget.left(Timestamp(0)), budget.left(Timestamp(HOUR / 2))), (0, 500));
        assert!(budget.take(500, Timestamp(HOUR / 2)) && !budget.take(10, Timestamp(HOUR / 2)));
        let mut written = 0;
        for minute in 0..10 * 24 * 60 {
            written += u64::from(budget.take(100, Timestamp(HOUR + minute * HOUR / 60))) * 100;
        }
        assert!((239_000..=241_100).contains(&written), "{written} in ten days");
    }

    #[test]
    fn what_was_written_anyway_counts() {
        let mut budget = WriteBudget::new(24_000);
        budget.spend(3000, Timestamp(0));
        assert!(!budget.take(1, Timestamp(HOUR)));
        assert!(budget.take(900, Timestamp(3 * HOUR)));
    }

    #[test]
    fn without_a_limit_everything_passes() {
        let mut budget = WriteBudget::new(0);
        budget.spend(u64::MAX, Timestamp(0));
        assert!(budget.take(u64::MAX, Timestamp(0)));
        assert_eq!(budget.left(Timestamp(0)), u64::MAX);
    }
}
