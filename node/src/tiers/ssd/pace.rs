//! Rate of background scrubbing. Pure: the time is an argument.
//!
//! Not here: choosing records, and giving readers priority (`lane/scrub`).

use std::time::Duration;

use kv_core::id::Timestamp;

/// Time that is caught up after a late tick, in microseconds; it bounds bursts.
const SLACK_US: u64 = 100_000;

/// Duration of a pass over all records, in microseconds, though it may end earlier.
const PASS_US: u64 = 3_600_000_000;

/// Pause after a read error of the medium, which has other troubles.
pub(crate) const PAUSE: Duration = Duration::from_secs(60);

/// A rate of checks in bytes per second.
#[derive(Clone, Copy, Debug)]
pub struct ScrubPace {
    bytes_per_second: u64,
    /// Time at which the next check may start, in microseconds.
    next_at: u64,
}

impl ScrubPace {
    /// 0 bytes per second disables checks.
    #[must_use]
    pub fn new(bytes_per_second: u64) -> ScrubPace {
        ScrubPace { bytes_per_second, next_at: 0 }
    }

    /// Whether a check may start now.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.bytes_per_second > 0 && self.next_at <= now.0
    }

    /// Number of the pass at this time.
    pub(crate) fn pass(now: Timestamp) -> u64 {
        now.0 / PASS_US
    }

    /// Charges the bytes of a check.
    pub(crate) fn charge(&mut self, bytes: u64, now: Timestamp) {
        let cost = u128::from(bytes) * 1_000_000 / u128::from(self.bytes_per_second.max(1));
        let from = self.next_at.max(now.0.saturating_sub(SLACK_US));
        self.next_at = from.saturating_add(u64::try_from(cost).unwrap_or(u64::MAX));
    }

    /// Pauses checks for a while.
    pub(crate) fn pause(&mut self, now: Timestamp) {
        let pause = u64::try_from(PAUSE.as_micros()).unwrap_or(u64::MAX);
        self.next_at = self.next_at.max(now.0.saturating_add(pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes checked within `seconds`, with a tick every 20 ms and blocks of this size.
    fn spent(pace: &mut ScrubPace, seconds: u64, block_bytes: u64) -> u64 {
        let mut spent = 0;
        for tick in 0..seconds * 50 {
            let now = Timestamp(tick * 20_000);
            while pace.is_due(now) {
                pace.charge(block_bytes, now);
                spent += block_bytes;
            }
        }
        spent
    }

    #[test]
    fn rate_is_kept_for_small_and_large_blocks() {
        for block_bytes in [4_096, 65_536, 1 << 20, 32 << 20] {
            let bytes = spent(&mut ScrubPace::new(8 << 20), 60, block_bytes);
            let wanted = 60 * (8 << 20);
            let slack = block_bytes + (8 << 20) / 10 + 1;
            assert!(bytes.abs_diff(wanted) <= slack, "{bytes} of {wanted} in blocks of {block_bytes}");
        }
    }

    #[test]
    fn zero_rate_never_checks_and_pause_holds() {
        assert_eq!(spent(&mut ScrubPace::new(0), 10, 1), 0);
        let mut pace = ScrubPace::new(1 << 20);
        pace.pause(Timestamp(5));
        assert!(!pace.is_due(Timestamp(60_000_004)));
        assert!(pace.is_due(Timestamp(60_000_005)));
    }

    #[test]
    fn backward_clock_only_delays_checks() {
        let mut pace = ScrubPace::new(1 << 20);
        pace.charge(1 << 20, Timestamp(10_000_000));
        assert!(!pace.is_due(Timestamp(1)));
        assert!(pace.is_due(Timestamp(11_000_000)));
    }
}
