//! How fast a path to a peer is, from what came over it lately.
//!
//! A fetch of so many bytes takes the path's latency and a time for each byte. Both are averages that forget: of the last
//! dozen fetches most, of those before nearly nothing. Not here: which fetches count (`path.rs`), and what is concluded
//! (`choice.rs`).

use std::time::Duration;

/// What a new fetch leaves of the weight of those before: half of it is gone after eleven.
const KEPT: f64 = 15.0 / 16.0;

/// Weight of a new round trip.
const PING_WEIGHT: f64 = 0.25;

/// A fetch counts as at most so many times what was expected, or one that was held up for a moment would rule the
/// average of all. A path that became that slow shows it within a few fetches.
const OUTLIER_FACTOR: f64 = 4.0;

/// Fetches after which something is expected.
const EXPECTING_FROM: u64 = 4;

/// Averages of one path to one peer.
#[derive(Clone, Debug, Default)]
pub(super) struct Estimate {
    latency_s: Option<f64>,
    /// Decayed sums over fetches: their bytes, and the time they took beyond the latency of then.
    bytes: f64,
    seconds: f64,
    fetches: u64,
}

impl Estimate {
    /// A round trip of nothing took so long.
    pub(super) fn pinged(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.latency_s = Some(self.latency_s.map_or(took, |before| before + PING_WEIGHT * (took - before)));
    }

    /// A fetch of so many bytes took so long. One without bytes says nothing.
    pub(super) fn fetched(&mut self, bytes: u64, took: Duration) {
        if bytes == 0 {
            return;
        }
        let mut took = took.as_secs_f64();
        if let Some(expected) = self.expects(bytes).filter(|_| self.fetches >= EXPECTING_FROM) {
            took = took.min(expected.as_secs_f64() * OUTLIER_FACTOR);
        }
        let beyond = (took - self.latency_s.unwrap_or(0.0)).max(0.0);
        self.bytes = self.bytes * KEPT + as_f64(bytes);
        self.seconds = self.seconds * KEPT + beyond;
        self.fetches += 1;
    }

    /// How long a fetch of so many bytes would take; nothing before the first.
    pub(super) fn expects(&self, bytes: u64) -> Option<Duration> {
        if self.fetches == 0 {
            return None;
        }
        let seconds = self.latency_s.unwrap_or(0.0) + self.seconds / self.bytes.max(1.0) * as_f64(bytes);
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// A round trip, once there was one.
    pub(super) fn latency(&self) -> Option<Duration> {
        self.latency_s.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
    }

    /// Bytes a second of one fetch, its latency left out; nothing before the first.
    pub(super) fn bytes_per_second(&self) -> Option<f64> {
        (self.fetches > 0 && self.seconds > 0.0).then(|| self.bytes / self.seconds)
    }

    /// Fetches that counted.
    pub(super) fn fetches(&self) -> u64 {
        self.fetches
    }
}

/// Counts of bytes stay far below 2^52.
#[expect(clippy::cast_precision_loss)]
pub(super) fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// What a path with this latency and rate takes.
    fn takes(latency_us: f64, bytes_per_us: f64, bytes: u64) -> Duration {
        Duration::from_secs_f64((latency_us + as_f64(bytes) / bytes_per_us) / 1e6)
    }

    #[test]
    fn what_is_expected_comes_near_what_is_there_and_follows_it() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut estimate = Estimate::default();
            for _ in 0..2 {
                let (latency, rate) = (random.random_range(20.0..500.0), random.random_range(100.0..4000.0));
                for _ in 0..150 {
                    estimate.pinged(takes(latency, 1.0, 0));
                    let bytes = random.random_range(4_096..4_194_304);
                    let noise = random.random_range(0.9..1.1);
                    estimate.fetched(bytes, takes(latency, rate, bytes).mul_f64(noise));
                }
                let bytes = 1 << 20;
                let (told, real) = (estimate.expects(bytes).unwrap(), takes(latency, rate, bytes));
                let off = told.as_secs_f64() / real.as_secs_f64();
                assert!((0.9..1.1).contains(&off), "seed {seed}: {told:?}, really {real:?}");
            }
        }
    }

    #[test]
    fn one_fetch_that_was_held_up_does_not_rule() {
        let mut estimate = Estimate::default();
        (0..50).for_each(|_| estimate.fetched(1 << 20, Duration::from_millis(1)));
        estimate.fetched(1 << 20, Duration::from_secs(10));
        assert!(estimate.expects(1 << 20).unwrap() < Duration::from_micros(1300));
    }

    #[test]
    fn nothing_is_said_of_what_nobody_tried() {
        let mut estimate = Estimate::default();
        estimate.fetched(0, Duration::from_secs(1));
        assert_eq!((estimate.expects(1), estimate.latency(), estimate.fetches()), (None, None, 0));
        estimate.fetched(u64::MAX, Duration::MAX);
        estimate.pinged(Duration::MAX);
        let _ = (estimate.expects(u64::MAX), estimate.latency()); // whatever it is, it is no panic
    }
}
