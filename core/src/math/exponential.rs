//! The exponential distribution: fit from samples, distribution function, and distance of a sample
//! from the fit.
//!
//! Not here: the sampled quantity and the refit schedule ([`crate::evict::reuse_prob`]).

/// An exponential distribution with a finite positive mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exponential {
    mean: f64,
}

impl Exponential {
    /// The distribution with this mean; `None` unless the mean is finite and positive.
    #[must_use]
    pub fn with_mean(mean: f64) -> Option<Self> {
        (mean.is_finite() && mean > 0.0).then_some(Self { mean })
    }

    /// The maximum-likelihood fit: the distribution with the mean of the samples. `None` for an
    /// empty sample or one with a mean that is not positive.
    #[must_use]
    pub fn fit(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let (mut sum, mut count) = (0.0, 0.0);
        for sample in samples {
            sum += sample;
            count += 1.0;
        }
        Self::with_mean(sum / count)
    }

    /// Expected value, in the unit of the samples.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Probability that a value is at most `t`; 0 for negative `t`.
    #[must_use]
    pub fn cdf(&self, t: f64) -> f64 {
        -(-t.max(0.0) / self.mean).exp_m1()
    }

    /// Natural logarithm of the probability that a value lies in `(t, t + window]`. Exact even
    /// where the probability itself rounds to zero, so that two long-unused blocks still compare as
    /// different.
    #[must_use]
    pub fn ln_probability_within(&self, t: f64, window: f64) -> f64 {
        -t.max(0.0) / self.mean + self.cdf(window).ln()
    }

    /// Largest distance between this curve and the empirical one of `sorted` (Kolmogorov–Smirnov), 0 to 1.
    /// `sorted` must ascend; 0 for an empty slice.
    #[must_use]
    pub fn distance(&self, sorted: &[f64]) -> f64 {
        let count = sorted.len() as f64;
        let gap = |(position, &value): (usize, &f64)| {
            let (below, above) = (position as f64 / count, (position as f64 + 1.0) / count);
            let fitted = self.cdf(value);
            (fitted - below).abs().max((above - fitted).abs())
        };
        sorted.iter().enumerate().map(gap).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    /// Values at equally spaced quantiles: the exponential sample without noise.
    fn ideal_sample(mean: f64, count: u32) -> Vec<f64> {
        (0..count).map(|at| -mean * (1.0 - (f64::from(at) + 0.5) / f64::from(count)).ln()).collect()
    }

    #[test]
    fn does_not_fit_empty_or_degenerate_samples() {
        assert_eq!(Exponential::fit([]), None);
        assert_eq!(Exponential::fit([0.0, 0.0]), None);
        assert_eq!(Exponential::fit([f64::NAN]), None);
        assert_eq!(Exponential::fit([f64::INFINITY]), None);
        assert_eq!(Exponential::with_mean(-1.0), None);
    }

    #[test]
    fn fit_recovers_the_mean() {
        for mean in [0.001, 1.0, 373.0, 1e9] {
            let sample = ideal_sample(mean, 2000);
            let fitted = Exponential::fit(sample.iter().copied()).unwrap();
            assert!((fitted.mean() / mean - 1.0).abs() < 0.01, "{mean}: {}", fitted.mean());
            assert!(fitted.distance(&sample) < 0.01);
        }
    }

    #[test]
    fn non_exponential_sample_is_far_from_its_fit() {
        let constant = [7.0; 50];
        assert!(Exponential::fit(constant).unwrap().distance(&constant) > 0.3);
        assert_eq!(Exponential::with_mean(1.0).unwrap().distance(&[]), 0.0);
    }

    #[test]
    fn cdf_at_known_points() {
        let curve = Exponential::with_mean(10.0).unwrap();
        assert_eq!(curve.cdf(-1.0), 0.0);
        assert!((curve.cdf(10.0) - 0.632_120_558_8).abs() < 1e-9);
        assert!((curve.cdf(10.0 * 5.0_f64.ln()) - 0.8).abs() < 1e-12);
    }

    #[test]
    fn long_unused_blocks_still_compare_differently() {
        let curve = Exponential::with_mean(1.0).unwrap();
        assert_eq!((-2000.0_f64).exp(), 0.0);
        assert!(curve.ln_probability_within(2001.0, 1.0) < curve.ln_probability_within(2000.0, 1.0));
    }

    proptest! {
        #[test]
        fn window_probability_is_the_cdf_difference(
            mean in 0.1..1000.0_f64, t in 0.0..1000.0_f64, window in 0.1..1000.0_f64,
        ) {
            let curve = Exponential::with_mean(mean).unwrap();
            let difference = curve.cdf(t + window) - curve.cdf(t);
            prop_assert!((curve.ln_probability_within(t, window).exp() - difference).abs() < 1e-9);
        }

        #[test]
        fn cdf_rises_from_zero_to_one(mean in 0.1..1000.0_f64, t in 0.0..1e5_f64, step in 0.0..10.0_f64) {
            let curve = Exponential::with_mean(mean).unwrap();
            prop_assert!(curve.cdf(t) <= curve.cdf(t + step));
            prop_assert!((0.0..=1.0).contains(&curve.cdf(t)));
        }
    }
}
