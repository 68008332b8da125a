//! Estimate of a link from transfers over it: latency to the first byte, and bandwidth after that.
//!
//! It keeps sums over transfers with exponential decay: half the weight after each [`HALF_LIFE`].
//! The bandwidth is bytes over streaming time, so a long transfer counts more than a short one. Not
//! here: which links exist (the router's view), and the timing of a transfer (the client).

use std::time::Duration;

use crate::id::Timestamp;
use crate::schedule::predict::profile::PathSpeed;

/// Time after which a transfer counts half. Link speeds change with their load within seconds; a
/// shorter half-life would follow single transfers.
const HALF_LIFE: Duration = Duration::from_secs(10);

/// Time after the last transfer at which the estimate is worth no more than the profile's number:
/// three half-lives.
pub const LINK_AGED_AFTER: Duration = Duration::from_secs(30);

/// Bytes that an estimate must rest on: with less than a mebibyte, latency and bandwidth cannot be
/// separated.
const BYTES_MIN: f64 = 1_048_576.0;

/// Fastest believable bandwidth, in bytes a second: eight 800 Gb/s links. More comes from a stopped
/// clock.
const RATE_MAX: f64 = 800e9;

/// Slowest believable bandwidth: anything slower is a temporary fault, and must not keep a node
/// from being tried again.
pub const RATE_MIN: f64 = 1e6;

/// Longest latency that is believed, for the same reason.
const LATENCY_MAX: Duration = Duration::from_secs(10);

/// Streaming time and waiting time of one sample that count: about what ten concurrent readers
/// accumulate between two reports. A sample that claims more is scaled down at the same rate;
/// otherwise it would outweigh all others until it had decayed.
const TIME_MAX_S: f64 = 2.0;

/// Fetches of one sample that count, for the same reason.
const FETCHES_MAX: f64 = 1_024.0;

/// Some transfers over one link, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSample {
    /// Number of transfers.
    pub fetches: u32,
    /// Sum of their times to the first byte.
    pub latency: Duration,
    /// Bytes moved.
    pub bytes: u64,
    /// Sum of their times from the first byte to the last.
    pub stream: Duration,
}

/// Decaying sums over the transfers of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkEstimate {
    fetches: f64,
    latency_s: f64,
    bytes: f64,
    stream_s: f64,
    /// Time that the sums refer to: that of the latest transfer.
    at: Timestamp,
}

impl LinkEstimate {
    /// Adds transfers. A sample without fetches, bytes or time is ignored.
    pub fn add(&mut self, sample: &LinkSample, now: Timestamp) {
        if sample.fetches == 0 || sample.bytes == 0 || sample.stream.is_zero() {
            return;
        }
        let each_s =
            (sample.latency.as_secs_f64() / f64::from(sample.fetches)).min(LATENCY_MAX.as_secs_f64());
        let mut fetches = f64::from(sample.fetches).min(FETCHES_MAX);
        if each_s * fetches > TIME_MAX_S {
            fetches = TIME_MAX_S / each_s;
        }
        // At an unbelievable rate, the excess of bytes or time does not count.
        let stream_s = sample.stream.as_secs_f64().min(sample.bytes as f64 / RATE_MIN);
        let bytes = (sample.bytes as f64).min(stream_s * RATE_MAX);
        let share = (TIME_MAX_S / stream_s).min(1.0);
        let addition = LinkEstimate {
            fetches,
            latency_s: each_s * fetches,
            bytes: bytes * share,
            stream_s: stream_s * share,
            at: now,
        };
        *self = self.merged_with(&addition);
    }

    /// The sum of both, as of the later one.
    #[must_use]
    pub fn merged_with(&self, other: &LinkEstimate) -> LinkEstimate {
        let at = self.at.max(other.at);
        let (a, b) = (self.decayed(at), other.decayed(at));
        LinkEstimate {
            fetches: a.fetches + b.fetches,
            latency_s: a.latency_s + b.latency_s,
            bytes: a.bytes + b.bytes,
            stream_s: a.stream_s + b.stream_s,
            at,
        }
    }

    fn decayed(&self, now: Timestamp) -> LinkEstimate {
        let half_lives = now.since(self.at).as_secs_f64() / HALF_LIFE.as_secs_f64();
        let share = (-half_lives).exp2();
        LinkEstimate {
            fetches: self.fetches * share,
            latency_s: self.latency_s * share,
            bytes: self.bytes * share,
            stream_s: self.stream_s * share,
            at: now.max(self.at),
        }
    }

    /// Whether the estimate is too old to count.
    #[must_use]
    pub fn is_aged(&self, now: Timestamp) -> bool {
        now.since(self.at) >= LINK_AGED_AFTER
    }

    /// Latency and bandwidth of the transfers, if enough of them are recent.
    #[must_use]
    pub fn speed(&self, now: Timestamp) -> Option<PathSpeed> {
        if self.is_aged(now) || self.decayed(now).bytes < BYTES_MIN {
            return None;
        }
        let rate = (self.bytes / self.stream_s).clamp(RATE_MIN, RATE_MAX);
        let latency_ns = self.latency_s / self.fetches * 1e9;
        Some(PathSpeed { latency_ns: latency_ns.round() as u64, bytes_per_s: rate.round() as u64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEBI: u64 = 1 << 20;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(0).after(Duration::from_secs(100 + seconds))
    }

    fn sample(bytes: u64, stream_ms: u64, latency_us: u64) -> LinkSample {
        let (latency, stream) = (Duration::from_micros(latency_us), Duration::from_millis(stream_ms));
        LinkSample { fetches: 1, latency, bytes, stream }
    }

    fn of(samples: &[(LinkSample, Timestamp)]) -> LinkEstimate {
        let mut estimate = LinkEstimate::default();
        samples.iter().for_each(|(sample, now)| estimate.add(sample, *now));
        estimate
    }

    #[test]
    fn speed_is_bytes_over_streaming_time_and_mean_latency() {
        // 30 MB in 30 ms and 10 MB in 10 ms are a gigabyte a second, however they are cut.
        let estimate = of(&[(sample(30_000_000, 30, 100), at(0)), (sample(10_000_000, 10, 300), at(0))]);
        let lane = estimate.speed(at(0));
        assert_eq!(lane, Some(PathSpeed { latency_ns: 200_000, bytes_per_s: 1_000_000_000 }));
    }

    #[test]
    fn transfers_count_half_after_a_half_life() {
        let half_life = HALF_LIFE.as_secs();
        let estimate = of(&[(sample(80 * MEBI, 80, 0), at(0)), (sample(10 * MEBI, 40, 0), at(half_life))]);
        // 40 MiB in 40 ms are left of the first: 50 MiB in 80 ms.
        let rate = estimate.speed(at(half_life)).map(|lane| lane.bytes_per_s);
        assert_eq!(rate, Some(50 * MEBI * 1_000 / 80));
    }

    #[test]
    fn too_few_recent_bytes_give_no_estimate() {
        assert_eq!(LinkEstimate::default().speed(at(0)), None);
        let small = of(&[(sample(MEBI - 1, 1, 1), at(0))]);
        assert_eq!(small.speed(at(0)), None);
        let whole = of(&[(sample(MEBI, 1, 1), at(0))]);
        assert!(whole.speed(at(0)).is_some());
        assert_eq!(whole.speed(at(1)), None, "less than a mebibyte of it remains");
        let large = of(&[(sample(1 << 40, 1_000, 1), at(0))]);
        assert!(large.speed(at(29)).is_some() && large.speed(at(30)).is_none());
    }

    #[test]
    fn invalid_samples_are_ignored_or_bounded() {
        let none = [LinkSample { fetches: 0, ..sample(MEBI, 1, 1) }, sample(0, 1, 1), sample(MEBI, 0, 1)];
        assert_eq!(of(&none.map(|sample| (sample, at(0)))), LinkEstimate::default());
        let extreme =
            LinkSample { fetches: u32::MAX, latency: Duration::MAX, bytes: u64::MAX, stream: Duration::MAX };
        for sample in [extreme, LinkSample { stream: Duration::from_secs(1), ..extreme }] {
            let lane =
                of(&[(sample, at(0))]).speed(at(0)).unwrap_or(PathSpeed { latency_ns: 0, bytes_per_s: 0 });
            assert!((1_000_000..=800_000_000_000).contains(&lane.bytes_per_s), "{lane:?}");
            assert!(lane.latency_ns <= 10_000_000_001, "{lane:?}");
        }
        // A stopped clock measured no time.
        let stood = LinkSample { stream: Duration::from_nanos(1), ..extreme };
        assert_eq!(of(&[(stood, at(0))]).speed(at(0)), None);
    }

    #[test]
    fn one_invalid_sample_does_not_outweigh_others() {
        // 1 GB/s, 100 µs, five times a second for ten seconds.
        let usual = || {
            let ticks = (0..50).map(|tick| Timestamp(0).after(Duration::from_millis(100_000 + tick * 200)));
            ticks.map(|now| (LinkSample { fetches: 10, ..sample(200_000_000, 200, 1_000) }, now))
        };
        let absurd = [
            LinkSample { bytes: u64::MAX, ..sample(1, 1, 100) },
            LinkSample { bytes: u64::MAX, stream: Duration::MAX, ..sample(1, 1, 100) },
            LinkSample { stream: Duration::from_secs(86_400), ..sample(MEBI, 1, 100) },
            LinkSample { fetches: u32::MAX, latency: Duration::MAX, ..sample(MEBI, 1, 1) },
        ];
        for sample in absurd {
            let all: Vec<_> = [(sample, at(0))].into_iter().chain(usual()).collect();
            let lane = of(&all).speed(at(10)).unwrap_or(PathSpeed { latency_ns: 0, bytes_per_s: 0 });
            let (least, most) = (700_000_000, 1_500_000_000);
            assert!((least..most).contains(&lane.bytes_per_s), "{sample:?}: {lane:?}");
            assert!(lane.latency_ns < 5_000_000, "{sample:?}: {lane:?}");
        }
        // A long valid sample keeps its rate, and later samples still count.
        let long =
            of(&[(sample(60_000_000_000, 60_000, 100), at(0)), (sample(200_000_000, 100, 100), at(0))]);
        let rate = long.speed(at(0)).map(|lane| lane.bytes_per_s);
        assert_eq!(rate, Some(1_047_619_048));
    }

    #[test]
    fn merging_two_links_sums_them() {
        let (a, b) = (of(&[(sample(MEBI, 1, 10), at(0))]), of(&[(sample(3 * MEBI, 1, 30), at(0))]));
        let both = of(&[(sample(MEBI, 1, 10), at(0)), (sample(3 * MEBI, 1, 30), at(0))]);
        assert_eq!(a.merged_with(&b), both);
    }
}
