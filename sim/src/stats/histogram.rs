//! A histogram of times with logarithmic buckets: constant memory, quantiles within 3 %.
//!
//! Not here: the counted times ([`super`]).

use kv_core::math::exponential::Exponential;

/// Buckets per doubling: neighbouring bounds differ by 2.2 %.
const BUCKETS_PER_DOUBLING: f64 = 32.0;
/// Doublings covered: 2^52 µs are 142 years, more than any trace.
const DOUBLINGS: usize = 52;

/// Counts of times in microseconds.
#[derive(Clone, Debug)]
pub(super) struct TimeHistogram {
    /// Bucket 0 holds zero; bucket `b` holds times from `2^((b-1)/32)`.
    buckets: Vec<u64>,
    count: u64,
    sum_us: f64,
}

impl Default for TimeHistogram {
    fn default() -> Self {
        let buckets = vec![0; DOUBLINGS * BUCKETS_PER_DOUBLING as usize + 2];
        TimeHistogram { buckets, count: 0, sum_us: 0.0 }
    }
}

impl TimeHistogram {
    /// The bucket that holds a time.
    fn bucket(&self, time_us: u64) -> usize {
        let nonzero = || 1 + ((time_us as f64).log2() * BUCKETS_PER_DOUBLING) as usize;
        let bucket = if time_us == 0 { 0 } else { nonzero() };
        bucket.min(self.buckets.len() - 1)
    }

    pub(super) fn add(&mut self, time_us: u64) {
        let bucket = self.bucket(time_us);
        self.buckets[bucket] += 1;
        self.count += 1;
        self.sum_us += time_us as f64;
    }

    pub(super) fn merge(&mut self, other: &TimeHistogram) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(own, their)| *own += their);
        self.count += other.count;
        self.sum_us += other.sum_us;
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn mean_us(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum_us / self.count as f64 }
    }

    /// Upper bound of a bucket, in microseconds.
    fn bound_us(bucket: usize) -> f64 {
        if bucket == 0 { 0.0 } else { (bucket as f64 / BUCKETS_PER_DOUBLING).exp2() }
    }

    /// Smallest time with at least this share of the counts at or below it; 0 for an empty
    /// histogram.
    pub(super) fn quantile_us(&self, share: f64) -> f64 {
        let points = self.cdf();
        points.iter().find(|(_, below)| *below >= share).map_or(0.0, |(bound_us, _)| *bound_us)
    }

    /// Share of counts at or below a time, to the bucket it lies in.
    pub(super) fn share_within(&self, time_us: u64) -> f64 {
        let within: u64 = self.buckets[..=self.bucket(time_us)].iter().sum();
        if self.count == 0 { 0.0 } else { within as f64 / self.count as f64 }
    }

    /// The cumulative curve: (time in microseconds, share at or below) for every non-empty bucket.
    pub(super) fn cdf(&self) -> Vec<(f64, f64)> {
        let mut below = 0;
        let mut points = Vec::new();
        for (bucket, &count) in self.buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
            below += count;
            points.push((Self::bound_us(bucket), below as f64 / self.count as f64));
        }
        points
    }

    /// The exponential of the same mean and the largest gap between its curve and this one.
    pub(super) fn fit(&self) -> Option<(Exponential, f64)> {
        let fitted = Exponential::with_mean(self.mean_us())?;
        let gap = |(bound_us, below): (f64, f64)| (fitted.cdf(bound_us) - below).abs();
        Some((fitted, self.cdf().into_iter().map(gap).fold(0.0, f64::max)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn quantiles_are_within_three_percent() {
        let mut histogram = TimeHistogram::default();
        (1..=10_000).for_each(|at| histogram.add(at * 1000));
        for share in [0.1, 0.5, 0.9, 1.0] {
            let expected = share * 1e7;
            assert!((histogram.quantile_us(share) / expected - 1.0).abs() < 0.03, "{share}");
            assert!((histogram.share_within(expected as u64) - share).abs() < 0.03);
        }
        assert!((histogram.mean_us() - 5_000_500.0).abs() < 1.0);
    }

    #[test]
    fn extremes_have_a_bucket() {
        let mut histogram = TimeHistogram::default();
        [0, 1, u64::MAX].into_iter().for_each(|time| histogram.add(time));
        assert_eq!(histogram.count(), 3);
        assert_eq!(histogram.quantile_us(0.3), 0.0);
        assert_eq!(histogram.cdf().last().unwrap().1, 1.0);
    }

    #[test]
    fn an_empty_histogram_answers_zero() {
        let histogram = TimeHistogram::default();
        assert_eq!(
            (histogram.quantile_us(0.5), histogram.share_within(1_000_000_000), histogram.mean_us()),
            (0.0, 0.0, 0.0)
        );
        assert!(histogram.fit().is_none());
    }

    #[test]
    fn an_exponential_sample_is_close_to_its_fit_and_a_constant_is_not() {
        let (mut drawn, mut constant) = (TimeHistogram::default(), TimeHistogram::default());
        for at in 0..5000 {
            drawn.add((-1e8 * (1.0 - (f64::from(at) + 0.5) / 5000.0_f64).ln()) as u64);
            constant.add(100_000_000);
        }
        assert!(drawn.fit().unwrap().1 < 0.02);
        assert!(constant.fit().unwrap().1 > 0.3);
    }
}
