//! How much an instance that has just joined is given.
//!
//! Its queue is empty, so that a burst would all go there; its cache is empty too, its kernels may be cold, and of its speed nothing was seen. For a while after it
//! joined, what a request would take there counts as that of an instance with a part of the speed: its queue stays as much shorter than those
//! of others, and nothing goes there from idle ones. Where nobody that could be chosen is there for longer, all are alike. Not here: since when an instance is there (whoever hears of it).

use std::time::Duration;

use crate::id::Timestamp;

/// For so long an instance counts as having joined.
pub const SLOW_START: Duration = Duration::from_secs(10);

/// What one that joined this moment is given, as a share of what others are.
const SHARE_MIN: f64 = 0.1;

/// Share of what others are given, above 0 to 1, of an instance that joined then; of one that is there for longer than anybody knows, 1.
pub(super) fn share(joined_at: Option<Timestamp>, now: Timestamp, slow_start: Duration) -> f64 {
    let since = joined_at.map_or(slow_start, |joined_at| now.since(joined_at));
    if since >= slow_start {
        return 1.0;
    }
    (since.as_secs_f64() / slow_start.as_secs_f64()).max(SHARE_MIN)
}

/// What is added to a time so that it is as long as at that share of the speed.
pub(super) fn added_us(us: u64, share: f64) -> u64 {
    (us as f64 * (1.0 / share - 1.0)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_joiner_is_given_more_from_moment_to_moment_and_all_of_it_in_the_end() {
        let at = |s: u64| Timestamp(s * 1_000_000);
        let share = |now| share(Some(at(100)), at(now), SLOW_START);
        assert_eq!([100, 101, 105, 109, 110, 1_000].map(share), [0.1, 0.1, 0.5, 0.9, 1.0, 1.0]);
        assert_eq!(share(50), 0.1, "its clock is behind ours");
        assert_eq!(super::share(None, at(0), SLOW_START), 1.0);
        assert_eq!(super::share(Some(at(0)), at(0), Duration::ZERO), 1.0, "no time is no ramp");
        assert_eq!([added_us(1_000, 1.0), added_us(1_000, 0.5)], [0, 1_000]);
        assert_eq!(added_us(u64::MAX, 0.1), u64::MAX);
    }
}
