//! Estimates the speed of a path to a peer from recent transfers.
//!
//! A fetch takes the path's latency and a time per byte. Both are exponentially decaying averages
//! over roughly the last dozen fetches. Not here: which fetches count (`path.rs`), and the
//! conclusions (`choice.rs`).

use std::time::Duration;

/// Factor on the weight of earlier fetches per new one: halved after eleven.
const DECAY: f64 = 15.0 / 16.0;

/// Weight of a new round trip.
const PING_WEIGHT: f64 = 0.25;

/// A fetch counts as at most this many times the expected time, so that a single stalled one does
/// not dominate the average. A path that became that slow shows it within a few fetches.
const OUTLIER_FACTOR: f64 = 4.0;

/// Fetches needed before outliers are capped.
const FETCHES_MIN: u64 = 4;

/// Averages of one path to one peer.
#[derive(Clone, Debug, Default)]
pub(super) struct PathEstimate {
    latency_s: Option<f64>,
    /// Decayed sums over fetches: their bytes, and their time beyond the latency.
    bytes: f64,
    seconds: f64,
    fetches: u64,
}

impl PathEstimate {
    /// Records a round trip without payload.
    pub(super) fn record_ping(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.latency_s = Some(self.latency_s.map_or(took, |before| before + PING_WEIGHT * (took - before)));
    }

    /// Records a fetch. One without bytes is ignored.
    pub(super) fn record_fetch(&mut self, bytes: u64, took: Duration) {
        if bytes == 0 {
            return;
        }
        let mut took = took.as_secs_f64();
        if let Some(expected) = self.expected_time(bytes).filter(|_| self.fetches >= FETCHES_MIN) {
            took = took.min(expected.as_secs_f64() * OUTLIER_FACTOR);
        }
        let beyond = (took - self.latency_s.unwrap_or(0.0)).max(0.0);
        self.bytes = self.bytes * DECAY + as_f64(bytes);
        self.seconds = self.seconds * DECAY + beyond;
        self.fetches += 1;
    }

    /// Expected time of a fetch of this size; `None` before the first.
    pub(super) fn expected_time(&self, bytes: u64) -> Option<Duration> {
        if self.fetches == 0 {
            return None;
        }
        let seconds = self.latency_s.unwrap_or(0.0) + self.seconds / self.bytes.max(1.0) * as_f64(bytes);
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Average round trip time; `None` before the first ping.
    pub(super) fn latency(&self) -> Option<Duration> {
        self.latency_s.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
    }

    /// Throughput of one fetch without its latency; `None` before the first.
    pub(super) fn bytes_per_second(&self) -> Option<f64> {
        (self.fetches > 0 && self.seconds > 0.0).then(|| self.bytes / self.seconds)
    }

    /// Recorded fetches.
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

    /// Time over a path with this latency and rate.
    fn transfer_time(latency_us: f64, bytes_per_us: f64, bytes: u64) -> Duration {
        Duration::from_secs_f64((latency_us + as_f64(bytes) / bytes_per_us) / 1e6)
    }

    #[test]
    fn the_estimate_tracks_the_real_speed() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut estimate = PathEstimate::default();
            for _ in 0..2 {
                let (latency, rate) = (random.random_range(20.0..500.0), random.random_range(100.0..4000.0));
                for _ in 0..150 {
                    estimate.record_ping(transfer_time(latency, 1.0, 0));
                    let bytes = random.random_range(4_096..4_194_304);
                    let noise = random.random_range(0.9..1.1);
                    estimate.record_fetch(bytes, transfer_time(latency, rate, bytes).mul_f64(noise));
                }
                let bytes = 1 << 20;
                let (told, real) =
                    (estimate.expected_time(bytes).unwrap(), transfer_time(latency, rate, bytes));
                let off = told.as_secs_f64() / real.as_secs_f64();
                assert!((0.9..1.1).contains(&off), "seed {seed}: {told:?}, really {real:?}");
            }
        }
    }

    #[test]
    fn one_outlier_has_little_effect() {
        let mut estimate = PathEstimate::default();
        (0..50).for_each(|_| estimate.record_fetch(1 << 20, Duration::from_millis(1)));
        estimate.record_fetch(1 << 20, Duration::from_secs(10));
        assert!(estimate.expected_time(1 << 20).unwrap() < Duration::from_micros(1300));
    }

    #[test]
    fn no_estimate_without_fetches() {
        let mut estimate = PathEstimate::default();
        estimate.record_fetch(0, Duration::from_secs(1));
        assert_eq!((estimate.expected_time(1), estimate.latency(), estimate.fetches()), (None, None, 0));
        estimate.record_fetch(u64::MAX, Duration::MAX);
        estimate.record_ping(Duration::MAX);
        let _ = (estimate.expected_time(u64::MAX), estimate.latency()); // extreme values must not panic
    }
}
