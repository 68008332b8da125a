//! How much an instance is believed that has said nothing for a while.
//!
//! Reports come a few times a second. One that is late makes no difference; of an instance from which several did not come what is predicted is a guess, and it may be gone, which a request
//! that is sent there finds out late. So what counts against it grows with its silence, until nothing is sent there any more. Where all are silent alike, as where it is the
//! router that hears nothing, all are alike. Not here: from when on it is left out (`Limits::report_stale_after`), and how far it is taken to have gone on (`load.rs`).

use std::time::Duration;

use super::load::GOES_ON_MAX;

/// What is added to the cost of an instance whose last report is so old, in microseconds: how likely it is to be gone, from not at all at the age of a report that is late to certainly where it is left out,
/// times how long a request waits there in vain until that is known.
pub(super) fn added_us(age: Duration, stale_after: Duration) -> u64 {
    let (late, most) = (age.saturating_sub(GOES_ON_MAX), stale_after.saturating_sub(GOES_ON_MAX));
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
    fn more_counts_against_who_is_silent_for_longer() {
        let added = |ms| added_us(Duration::from_millis(ms), Duration::from_secs(2));
        assert_eq!(
            [0, 200, 400, 800, 1_200, 2_000, 9_000].map(added),
            [0, 0, 0, 500_000, 1_000_000, 2_000_000, 2_000_000]
        );
        assert_eq!(added_us(Duration::from_secs(1), Duration::from_millis(300)), 0, "it is left out before");
        assert!(added_us(Duration::MAX, Duration::MAX) > 1 << 40, "and nothing overflows");
    }
}
