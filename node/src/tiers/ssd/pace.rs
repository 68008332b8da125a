//! How fast records are checked that nobody asked for. Pure: the time is given in.
//!
//! Not here: which records, and that readers go first (`lane/scrub`).

use std::time::Duration;

use kv_core::id::Timestamp;

/// Time that is made up for when a tick comes late; no burst is longer.
const SLACK_US: u64 = 100_000;

/// A pass over all records takes this long, though it may be through earlier.
const PASS_US: u64 = 3_600_000_000;

/// After a medium that failed to read: it has other troubles.
pub(crate) const PAUSE: Duration = Duration::from_secs(60);

/// Bytes a second.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    bytes_per_second: u64,
    /// When the next check may begin.
    next_at: u64,
}

impl Pace {
    /// 0 bytes a second stand for never.
    #[must_use]
    pub fn new(bytes_per_second: u64) -> Pace {
        Pace { bytes_per_second, next_at: 0 }
    }

    /// Whether a check may begin now.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.bytes_per_second > 0 && self.next_at <= now.0
    }

    /// The pass that this time belongs to.
    pub(crate) fn pass(now: Timestamp) -> u64 {
        now.0 / PASS_US
    }

    /// So many bytes are being checked.
    pub(crate) fn spend(&mut self, bytes: u64, now: Timestamp) {
        let cost = u128::from(bytes) * 1_000_000 / u128::from(self.bytes_per_second.max(1));
        let from = self.next_at.max(now.0.saturating_sub(SLACK_US));
        self.next_at = from.saturating_add(u64::try_from(cost).unwrap_or(u64::MAX));
    }

    /// Nothing for a while.
    pub(crate) fn pause(&mut self, now: Timestamp) {
        let pause = u64::try_from(PAUSE.as_micros()).unwrap_or(u64::MAX);
        self.next_at = self.next_at.max(now.0.saturating_add(pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes spent in so many seconds, asked every 20 ms, with blocks of this size.
    fn spent(pace: &mut Pace, seconds: u64, block_bytes: u64) -> u64 {
        let mut spent = 0;
        for tick in 0..seconds * 50 {
            let now = Timestamp(tick * 20_000);
            while pace.is_due(now) {
                pace.spend(block_bytes, now);
                spent += block_bytes;
            }
        }
        spent
    }

    #[test]
    fn the_pace_is_kept_for_small_and_large_blocks() {
        for block_bytes in [4_096, 65_536, 1 << 20, 32 << 20] {
            let bytes = spent(&mut Pace::new(8 << 20), 60, block_bytes);
            let wanted = 60 * (8 << 20);
            let slack = block_bytes + (8 << 20) / 10 + 1;
            assert!(bytes.abs_diff(wanted) <= slack, "{bytes} of {wanted} in blocks of {block_bytes}");
        }
    }

    #[test]
    fn zero_is_never_and_a_pause_holds() {
        assert_eq!(spent(&mut Pace::new(0), 10, 1), 0);
        let mut pace = Pace::new(1 << 20);
        pace.pause(Timestamp(5));
        assert!(!pace.is_due(Timestamp(60_000_004)));
        assert!(pace.is_due(Timestamp(60_000_005)));
    }

    #[test]
    fn a_clock_that_goes_back_stops_it_only_until_it_is_back() {
        let mut pace = Pace::new(1 << 20);
        pace.spend(1 << 20, Timestamp(10_000_000));
        assert!(!pace.is_due(Timestamp(1)));
        assert!(pace.is_due(Timestamp(11_000_000)));
    }
}
