//! What is known of a link from the transfers that went over it: how long until the first byte, and how many
//! a second after that.
//!
//! Sums over transfers, of which the older count less: half as much after each [`HALF_LIFE`]. The rate is
//! bytes over the time in which they flowed, so that a long transfer says more than a short one. Not here:
//! which links there are (the router's view), and how a transfer is timed (whoever makes it).

use std::time::Duration;

use super::profile::Lane;
use crate::id::Timestamp;

/// After so long a transfer counts half. Links change with the load on them, within seconds; below that an
/// estimate would follow single transfers.
const HALF_LIFE: Duration = Duration::from_secs(10);

/// So long after the last transfer the estimate is worth no more than the profile's number: three half-lives.
pub const LINK_AGED_AFTER: Duration = Duration::from_secs(30);

/// Bytes that an estimate must rest on: below a mebibyte, latency and rate cannot be told apart.
const BYTES_MIN: f64 = 1_048_576.0;

/// Fastest rate that is believed, in bytes a second: eight 800 Gb/s links. More comes of a clock that stood.
const RATE_MAX: f64 = 800e9;

/// Slowest rate that is believed: what is slower is a fault of a moment, and must not keep a node from ever
/// being tried again.
pub const RATE_MIN: f64 = 1e6;

/// Longest latency that is believed, for the same reason.
const LATENCY_MAX: Duration = Duration::from_secs(10);

/// Time of one sample that counts, of streaming and of waiting each: what ten readers at once come to between two
/// reports. One that claims more counts as if it had so much, at the rate it claims: else it would outweigh all others
/// until it had aged.
const TIME_MAX_S: f64 = 2.0;

/// Fetches of one sample that count, for the same reason.
const FETCHES_MAX: f64 = 1_024.0;

/// Some transfers over one link, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSample {
    /// How many.
    pub fetches: u32,
    /// Time until the first byte, of all together.
    pub latency: Duration,
    /// Bytes moved.
    pub bytes: u64,
    /// Time from the first byte to the last, of all together.
    pub stream: Duration,
}

/// Decaying sums of what transfers over a link came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkEstimate {
    fetches: f64,
    latency_s: f64,
    bytes: f64,
    stream_s: f64,
    /// When the sums were as they are, which is when the last transfer was added.
    at: Timestamp,
}

impl LinkEstimate {
    /// Adds transfers. A sample without fetches, bytes or time says nothing and is left out.
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
        // At a rate that nobody believes, less of what there is too much of counts.
        let stream_s = sample.stream.as_secs_f64().min(sample.bytes as f64 / RATE_MIN);
        let bytes = (sample.bytes as f64).min(stream_s * RATE_MAX);
        let share = (TIME_MAX_S / stream_s).min(1.0);
        let more = LinkEstimate {
            fetches,
            latency_s: each_s * fetches,
            bytes: bytes * share,
            stream_s: stream_s * share,
            at: now,
        };
        *self = self.with(&more);
    }

    /// Both together, as of the later one.
    #[must_use]
    pub fn with(&self, other: &LinkEstimate) -> LinkEstimate {
        let at = self.at.max(other.at);
        let (a, b) = (self.aged(at), other.aged(at));
        LinkEstimate {
            fetches: a.fetches + b.fetches,
            latency_s: a.latency_s + b.latency_s,
            bytes: a.bytes + b.bytes,
            stream_s: a.stream_s + b.stream_s,
            at,
        }
    }

    fn aged(&self, now: Timestamp) -> LinkEstimate {
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

    /// Whether it is so old that nothing of it counts.
    #[must_use]
    pub fn is_aged(&self, now: Timestamp) -> bool {
        now.since(self.at) >= LINK_AGED_AFTER
    }

    /// The lane that the transfers met, if there were enough of them lately.
    #[must_use]
    pub fn lane(&self, now: Timestamp) -> Option<Lane> {
        if self.is_aged(now) || self.aged(now).bytes < BYTES_MIN {
            return None;
        }
        let rate = (self.bytes / self.stream_s).clamp(RATE_MIN, RATE_MAX);
        let latency_ns = self.latency_s / self.fetches * 1e9;
        Some(Lane { latency_ns: latency_ns.round() as u64, bytes_per_s: rate.round() as u64 })
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
    fn a_lane_is_bytes_over_flowing_time_and_the_mean_time_to_the_first() {
        // 30 MB in 30 ms and 10 MB in 10 ms are a gigabyte a second, however they are cut.
        let estimate = of(&[(sample(30_000_000, 30, 100), at(0)), (sample(10_000_000, 10, 300), at(0))]);
        let lane = estimate.lane(at(0));
        assert_eq!(lane, Some(Lane { latency_ns: 200_000, bytes_per_s: 1_000_000_000 }));
    }

    #[test]
    fn later_transfers_count_more_and_half_after_a_half_life() {
        let half_life = HALF_LIFE.as_secs();
        let estimate = of(&[(sample(80 * MEBI, 80, 0), at(0)), (sample(10 * MEBI, 40, 0), at(half_life))]);
        // 40 MiB in 40 ms are left of the first: 50 MiB in 80 ms.
        let rate = estimate.lane(at(half_life)).map(|lane| lane.bytes_per_s);
        assert_eq!(rate, Some(50 * MEBI * 1_000 / 80));
    }

    #[test]
    fn without_enough_of_it_lately_there_is_no_estimate() {
        assert_eq!(LinkEstimate::default().lane(at(0)), None);
        let small = of(&[(sample(MEBI - 1, 1, 1), at(0))]);
        assert_eq!(small.lane(at(0)), None);
        let whole = of(&[(sample(MEBI, 1, 1), at(0))]);
        assert!(whole.lane(at(0)).is_some());
        assert_eq!(whole.lane(at(1)), None, "less than a mebibyte is left of it");
        let large = of(&[(sample(1 << 40, 1_000, 1), at(0))]);
        assert!(large.lane(at(29)).is_some() && large.lane(at(30)).is_none());
    }

    #[test]
    fn absurd_samples_are_left_out_or_bounded() {
        let none = [LinkSample { fetches: 0, ..sample(MEBI, 1, 1) }, sample(0, 1, 1), sample(MEBI, 0, 1)];
        assert_eq!(of(&none.map(|sample| (sample, at(0)))), LinkEstimate::default());
        let extreme =
            LinkSample { fetches: u32::MAX, latency: Duration::MAX, bytes: u64::MAX, stream: Duration::MAX };
        for sample in [extreme, LinkSample { stream: Duration::from_secs(1), ..extreme }] {
            let lane = of(&[(sample, at(0))]).lane(at(0)).unwrap_or(Lane { latency_ns: 0, bytes_per_s: 0 });
            assert!((1_000_000..=800_000_000_000).contains(&lane.bytes_per_s), "{lane:?}");
            assert!(lane.latency_ns <= 10_000_000_001, "{lane:?}");
        }
        // A clock that stood measured nothing.
        let stood = LinkSample { stream: Duration::from_nanos(1), ..extreme };
        assert_eq!(of(&[(stood, at(0))]).lane(at(0)), None);
    }

    #[test]
    fn one_absurd_sample_does_not_outweigh_the_others() {
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
            let lane = of(&all).lane(at(10)).unwrap_or(Lane { latency_ns: 0, bytes_per_s: 0 });
            let (least, most) = (700_000_000, 1_500_000_000);
            assert!((least..most).contains(&lane.bytes_per_s), "{sample:?}: {lane:?}");
            assert!(lane.latency_ns < 5_000_000, "{sample:?}: {lane:?}");
        }
        // A long sample that is true keeps its rate, and what comes next is heard.
        let long =
            of(&[(sample(60_000_000_000, 60_000, 100), at(0)), (sample(200_000_000, 100, 100), at(0))]);
        let rate = long.lane(at(0)).map(|lane| lane.bytes_per_s);
        assert_eq!(rate, Some(1_047_619_048));
    }

    #[test]
    fn two_links_together_are_their_sums() {
        let (a, b) = (of(&[(sample(MEBI, 1, 10), at(0))]), of(&[(sample(3 * MEBI, 1, 30), at(0))]));
        let both = of(&[(sample(MEBI, 1, 10), at(0)), (sample(3 * MEBI, 1, 30), at(0))]);
        assert_eq!(a.with(&b), both);
    }
}
