//! Slow start of an instance that has just joined.
//!
//! Its queue is empty, so a burst would go there as a whole. Its cache is empty too, its kernels
//! may be cold, and its speed is unknown. For a while after it joined, the predicted time of a
//! request there counts as if the instance had a fraction of its speed. So its queue stays shorter
//! than those of others, and idle instances are preferred. If no settled instance may be chosen,
//! all count alike. Not here: the join time of an instance (the router's view).

use std::time::Duration;

use crate::id::Timestamp;

/// Duration of the slow start.
pub const SLOW_START: Duration = Duration::from_secs(10);

/// Share of its speed that an instance counts with at the moment it joins.
const SPEED_SHARE_MIN: f64 = 0.1;

/// Share of its speed, above 0 to 1, that an instance with this join time counts with; 1 if it
/// joined before the router knew of it.
pub(in crate::schedule) fn speed_share(
    joined_at: Option<Timestamp>,
    now: Timestamp,
    slow_start: Duration,
) -> f64 {
    let since = joined_at.map_or(slow_start, |joined_at| now.since(joined_at));
    if since >= slow_start {
        return 1.0;
    }
    (since.as_secs_f64() / slow_start.as_secs_f64()).max(SPEED_SHARE_MIN)
}

/// Time to add to `us` for an instance that counts with this share of its speed.
pub(in crate::schedule) fn slow_start_cost_us(us: u64, share: f64) -> u64 {
    (us as f64 * (1.0 / share - 1.0)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_share_grows_to_one() {
        let at = |s: u64| Timestamp(s * 1_000_000);
        let share = |now| speed_share(Some(at(100)), at(now), SLOW_START);
        assert_eq!([100, 101, 105, 109, 110, 1_000].map(share), [0.1, 0.1, 0.5, 0.9, 1.0, 1.0]);
        assert_eq!(share(50), 0.1, "a clock behind ours");
        assert_eq!(speed_share(None, at(0), SLOW_START), 1.0);
        assert_eq!(speed_share(Some(at(0)), at(0), Duration::ZERO), 1.0, "a slow start of zero has no ramp");
        assert_eq!([slow_start_cost_us(1_000, 1.0), slow_start_cost_us(1_000, 0.5)], [0, 1_000]);
        assert_eq!(slow_start_cost_us(u64::MAX, 0.1), u64::MAX);
    }
}
