//! Staleness cost of an instance that has not reported for a while.
//!
//! Reports come a few times a second. One late report makes no difference; after several missing
//! ones, predictions for the instance are guesses. It may be gone, and a request that is sent there
//! finds out late. So a cost grows with the silence, until the instance is left out. If all
//! instances are silent alike, for example because the router itself is cut off, all have the same
//! cost. Not here: the age at which an instance is left out (`RouteLimits::report_stale_after`),
//! and the progress assumed meanwhile (`load.rs`).

use std::time::Duration;

use crate::schedule::fleet::load::EXTRAPOLATION_MAX;

/// Cost of an instance with a last report of this age, in microseconds: the probability that it is
/// gone, times the time that a request waits there in vain until that is known. The probability
/// grows from 0 at the age of a late report to 1 at the age where the instance is left out.
pub(in crate::schedule) fn staleness_cost_us(age: Duration, stale_after: Duration) -> u64 {
    let (late, most) = (age.saturating_sub(EXTRAPOLATION_MAX), stale_after.saturating_sub(EXTRAPOLATION_MAX));
    if late.is_zero() || most.is_zero() {
        return 0;
    }
    let added = stale_after.as_micros().saturating_mul(late.min(most).as_micros()) / most.as_micros().max(1);
    u64::try_from(added).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_grows_with_silence() {
        let added = |ms| staleness_cost_us(Duration::from_millis(ms), Duration::from_secs(2));
        assert_eq!(
            [0, 200, 400, 800, 1_200, 2_000, 9_000].map(added),
            [0, 0, 0, 500_000, 1_000_000, 2_000_000, 2_000_000]
        );
        assert_eq!(
            staleness_cost_us(Duration::from_secs(1), Duration::from_millis(300)),
            0,
            "it is left out before"
        );
        assert!(staleness_cost_us(Duration::MAX, Duration::MAX) > 1 << 40, "no overflow");
    }
}
