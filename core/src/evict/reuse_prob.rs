//! Per category: the probability that a block is used again, given the time since its last use (ATC
//! '25 §4).
//!
//! A [`ReuseCurve`] is the fitted function, [`CategoryEstimator`] the sliding sample behind it. Not
//! here: the choice of victims ([`super::workload`]) and the numerics of the fit
//! ([`crate::math::exponential`]).

use super::bands;
use super::reuse_stats::{CategorySums, FLEET_REQUESTS_MAX};
use crate::id::RequestKind;
use crate::math::exponential::Exponential;

/// Newest samples kept of each quantity per category. 1,024 give a fitted mean an error of about 3
/// % (1/√n) and take 8 KiB per category.
pub const SAMPLES_MAX: usize = 1024;
/// Minimum samples to move a curve: below 32 the error of a fitted mean exceeds 18 %.
pub const SAMPLES_MIN: usize = 32;
/// Shortest life of a curve, in microseconds. A millisecond, so that a category without reuse still
/// has a finite rank, below all others.
pub const LIFE_MIN_US: f64 = 1e3;
/// Factor applied to the counts of uses and reuses after a fit. 0.9 with one fit a minute remembers
/// ten minutes, within which most reuses come.
pub const COUNTS_KEPT: f64 = 0.9;

/// Mean reuse interval assumed for conversations before the first fit, in microseconds. The
/// exponential with this mean has 80 % of reuses within 10 min (ATC '25, trace A).
const CHAT_INTERVAL_US: f64 = 373e6;
/// The same for programmatic calls and tool loops: 80 % within 10 s (trace B).
const API_INTERVAL_US: f64 = 6.2e6;
/// Life assumed before the first fit, in microseconds: the P90 life of trace A.
const LIFE_US: f64 = 612e6;

/// Share of uses that are followed by another, assumed before the first fit. Equal for every kind:
/// the published ideal hit rates (62 and 54 %) are close to each other.
const SHARE_DEFAULT: f64 = 0.5;
/// Bounds of the share, so that its logarithm and that of its complement are finite.
const SHARE_BOUNDS: (f64, f64) = (1e-6, 1.0 - 1e-6);
/// Worth of a block at the end of its life, before its age is subtracted: below every worth within
/// a life.
const PAST_LIFE_WORTH: f64 = -1e9;

/// How worth depends on the time since last use. The paper leaves this open; a replay shows which
/// fits a workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorthModel {
    /// `F(t + life) − F(t)`, as in the paper.
    #[default]
    Window,
    /// `Window` times the share of uses that are followed by another: `F` alone covers reused
    /// blocks only.
    Share,
    /// Probability of a further use within the life, given none for `t`: `p·e^(−λt) / (1 − p +
    /// p·e^(−λt)) · F(life)`.
    Posterior,
    /// Like `Window`, but a block past its life ranks below all others, older ones lowest.
    Aged,
}

/// Probability of a reuse within the remaining life of a block, as a function of the time since
/// last use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReuseCurve {
    interval: Exponential,
    life_us: f64,
    ln_life_prob: f64,
    /// Change of the log probability per microsecond: multiplied instead of divided at every
    /// comparison.
    decay_per_us: f64,
    share: f64,
}

impl ReuseCurve {
    /// The curve for reuse intervals distributed as `interval` (in microseconds) and a block life
    /// of `life_us`.
    #[must_use]
    pub fn new(interval: Exponential, life_us: f64) -> Self {
        let life_us = life_us.max(LIFE_MIN_US);
        let ln_life_prob = interval.ln_probability_within(0.0, life_us);
        ReuseCurve {
            interval,
            life_us,
            ln_life_prob,
            decay_per_us: 1.0 / interval.mean(),
            share: SHARE_DEFAULT,
        }
    }

    /// The same curve with this share of uses that are followed by another.
    #[must_use]
    pub fn with_share(self, share: f64) -> Self {
        let (least, most) = SHARE_BOUNDS;
        ReuseCurve { share: if share.is_finite() { share.clamp(least, most) } else { SHARE_DEFAULT }, ..self }
    }

    /// The curve assumed for a kind of request before any observation; `None` only if a constant
    /// above were not positive.
    fn assumed(kind: RequestKind) -> Option<Self> {
        let mean = match kind {
            RequestKind::Api | RequestKind::Agent => API_INTERVAL_US,
            _ => CHAT_INTERVAL_US,
        };
        Exponential::with_mean(mean).map(|interval| Self::new(interval, LIFE_US))
    }

    /// Natural logarithm of `F(t + life) − F(t)` for `t` microseconds since last use. The logarithm
    /// keeps the order, needs no exponential per comparison and never rounds to zero.
    #[must_use]
    pub fn ln_reuse_prob(&self, idle_us: u64) -> f64 {
        self.ln_life_prob - idle_us as f64 * self.decay_per_us
    }

    /// Worth of a block `idle_us` microseconds after its last use, as a log probability; decreases
    /// over time.
    #[must_use]
    pub fn worth(&self, form: WorthModel, idle_us: f64) -> f64 {
        match (form, self.as_line(form)) {
            (_, Some((start, rate))) => start - idle_us * rate,
            (WorthModel::Aged, None) if idle_us > self.life_us => PAST_LIFE_WORTH - idle_us * 1e-6,
            (WorthModel::Posterior, None) => {
                let reused = self.share * (-idle_us * self.decay_per_us).exp();
                let ln_reused = self.share.ln() - idle_us * self.decay_per_us;
                self.ln_life_prob + ln_reused - (1.0 - self.share + reused).ln()
            }
            (_, None) => self.ln_life_prob - idle_us * self.decay_per_us,
        }
    }

    /// Start and slope of a worth that is linear in the time since last use, in logarithms and
    /// logarithms per microsecond; `None` if it is not linear.
    #[must_use]
    pub fn as_line(&self, form: WorthModel) -> Option<(f64, f64)> {
        match form {
            WorthModel::Window => Some((self.ln_life_prob, self.decay_per_us)),
            WorthModel::Share => Some((self.ln_life_prob + self.share.ln(), self.decay_per_us)),
            WorthModel::Posterior | WorthModel::Aged => None,
        }
    }

    /// Share of uses that are followed by another.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Mean reuse interval, in microseconds.
    #[must_use]
    pub fn interval_us(&self) -> f64 {
        self.interval.mean()
    }

    /// Expected life of a block, in microseconds; only reuses within it count.
    #[must_use]
    pub fn life_us(&self) -> f64 {
        self.life_us
    }
}

/// The newest [`SAMPLES_MAX`] values of one quantity.
#[derive(Clone, Debug, Default)]
struct SampleRing {
    values: Vec<f64>,
    oldest: usize,
}

impl SampleRing {
    fn push(&mut self, value: f64) {
        if self.values.len() < SAMPLES_MAX {
            self.values.push(value);
        } else {
            self.values[self.oldest] = value;
            self.oldest = (self.oldest + 1) % SAMPLES_MAX;
        }
    }
}

/// Observations of one category, and its last fitted curve.
///
/// Life is measured from a use: the time to the block's next use, or zero if there is none. It is
/// computed from uses and reuses, not from evicted blocks. So it is right for a category with dead
/// blocks that are never evicted.
#[derive(Clone, Debug)]
pub struct CategoryEstimator {
    intervals: SampleRing,
    uses: f64,
    reuses: f64,
    curve: ReuseCurve,
    fleet: FleetPrior,
}

/// The fleet's observations of the category, scaled to a limited number of uses.
#[derive(Clone, Copy, Debug, Default)]
struct FleetPrior {
    uses: f64,
    reuses: f64,
    /// Number of fleet intervals, weighted apart from uses. If few of many uses are followed by
    /// another, the scaled reuses are negligible, but the intervals rest on many observations.
    intervals: f64,
    /// Sum of these intervals, in microseconds.
    interval_us: f64,
    /// Whether the fleet saw enough uses and reuses: scaled counts are small, but rest on many
    /// observations.
    has_enough_uses: bool,
    has_enough_reuses: bool,
}

impl CategoryEstimator {
    /// No observations; the curve assumed for the kind.
    #[must_use]
    pub fn with_assumed_curve(kind: RequestKind) -> Option<Self> {
        let curve = ReuseCurve::assumed(kind)?;
        Some(CategoryEstimator {
            intervals: SampleRing::default(),
            uses: 0.0,
            reuses: 0.0,
            curve,
            fleet: FleetPrior::default(),
        })
    }

    /// A request of the category used a block.
    pub fn record_use(&mut self) {
        self.uses += 1.0;
    }

    /// A block of the category was reused `interval_us` after its last use. Always counted; the
    /// interval enters the sample only if `is_sampled`.
    pub fn record_reuse(&mut self, interval_us: u64, is_sampled: bool) {
        self.reuses += 1.0;
        if is_sampled && interval_us > 0 {
            self.intervals.push(interval_us as f64);
        }
    }

    /// Fits the curve to recent observations. Quantities with too few samples come from `wider`,
    /// the curve of all categories together.
    pub fn refit(&mut self, wider: &ReuseCurve) {
        let own = &self.intervals.values;
        let (sum, count) = (own.iter().sum::<f64>(), own.len() as f64);
        let told = self.fleet;
        let mean = (sum + told.interval_us) / (count + told.intervals);
        let enough_intervals = told.has_enough_reuses || count + told.intervals >= SAMPLES_MIN as f64;
        let interval = Exponential::with_mean(mean).filter(|_| enough_intervals).unwrap_or(wider.interval);
        let uses = self.uses + told.uses;
        let enough_uses = told.has_enough_uses || uses >= SAMPLES_MIN as f64;
        let used_again = ((self.reuses + told.reuses) / uses).min(1.0);
        let life_us = if enough_uses { used_again * interval.mean() } else { wider.life_us };
        let share = if enough_uses { used_again } else { wider.share };
        self.curve = ReuseCurve::new(interval, life_us).with_share(share);
        self.uses *= COUNTS_KEPT;
        self.reuses *= COUNTS_KEPT;
    }

    /// Observations for the fleet: reuses, distributed over ages like the sample.
    #[must_use]
    pub fn sums(&self) -> CategorySums {
        let mut sums = CategorySums { uses: self.uses, ..CategorySums::default() };
        let sampled = &self.intervals.values;
        let each = self.reuses.min(self.uses) / sampled.len().max(1) as f64;
        sampled.iter().for_each(|&interval_us| sums.reuses[bands::band(interval_us as u64)] += each);
        sums
    }

    /// Replaces the fleet's observations; `None` removes them. Takes effect at the next fit.
    pub fn set_fleet_sums(&mut self, fleet: Option<&CategorySums>) {
        self.fleet = fleet.map_or_else(FleetPrior::default, |sums| {
            let weight = sums.weight();
            let intervals = (sums.total_reuses() / sums.cluster_blocks()).min(FLEET_REQUESTS_MAX);
            FleetPrior {
                uses: sums.uses * weight,
                reuses: sums.total_reuses() * weight,
                intervals,
                interval_us: intervals * sums.interval_us().unwrap_or(0.0),
                has_enough_uses: sums.uses >= SAMPLES_MIN as f64,
                has_enough_reuses: sums.total_reuses() >= SAMPLES_MIN as f64,
            }
        });
    }

    /// The current curve.
    #[must_use]
    pub fn curve(&self) -> &ReuseCurve {
        &self.curve
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn new_estimator() -> CategoryEstimator {
        CategoryEstimator::with_assumed_curve(RequestKind::Text).unwrap()
    }

    /// Fits with itself as the wider population: quantities with too few samples stay.
    fn refit(seen: &mut CategoryEstimator) {
        let before = *seen.curve();
        seen.refit(&before);
    }

    #[test]
    fn rare_categories_use_the_common_curve() {
        let (mut seen, mut all) = (new_estimator(), new_estimator());
        (0..100).for_each(|_| {
            all.record_use();
            all.record_reuse(3 * SECOND, true);
        });
        refit(&mut all);
        seen.record_reuse(SECOND, true);
        seen.refit(all.curve());
        assert_eq!(seen.curve(), all.curve());
    }

    /// The fleet saw 40 reuses of 100,000 uses: negligible beside the uses, but a single own reuse
    /// must not override it.
    #[test]
    fn fleet_intervals_count_despite_few_reuses() {
        let mut sums = CategorySums { uses: 100_000.0, ..CategorySums::default() };
        sums.reuses[bands::band(100 * SECOND)] = 40.0;
        let told = sums.interval_us().unwrap();
        let mut seen = new_estimator();
        seen.set_fleet_sums(Some(&sums));
        refit(&mut seen);
        assert!((seen.curve().interval_us() / told - 1.0).abs() < 1e-9);
        seen.record_use();
        seen.record_reuse(SECOND, true);
        refit(&mut seen);
        let expected = (FLEET_REQUESTS_MAX * told + 1e6) / (FLEET_REQUESTS_MAX + 1.0);
        assert!((seen.curve().interval_us() / expected - 1.0).abs() < 1e-9, "{}", seen.curve().interval_us());
        (0..SAMPLES_MAX).for_each(|_| seen.record_reuse(SECOND, true));
        refit(&mut seen);
        assert!(seen.curve().interval_us() < 5e6, "own observations must prevail as they accumulate");
    }

    #[test]
    fn every_kind_has_a_curve_before_anything_is_seen() {
        for kind in RequestKind::ALL {
            assert!(CategoryEstimator::with_assumed_curve(kind).is_some(), "{}", kind.name());
        }
    }

    #[test]
    fn probability_falls_with_idle_time_and_rises_with_life() {
        let interval = Exponential::with_mean(1e8).unwrap();
        let (short, long) = (ReuseCurve::new(interval, 1e7), ReuseCurve::new(interval, 1e9));
        for idle in [0, SECOND, 100 * SECOND] {
            assert!(short.ln_reuse_prob(idle) < long.ln_reuse_prob(idle));
            assert!(short.ln_reuse_prob(idle + SECOND) < short.ln_reuse_prob(idle));
        }
    }

    #[test]
    fn probability_is_the_cdf_difference_over_the_life() {
        let interval = Exponential::with_mean(50e6).unwrap();
        let curve = ReuseCurve::new(interval, 30e6);
        let expected = interval.cdf(40e6 + 30e6) - interval.cdf(40e6);
        assert!((curve.ln_reuse_prob(40 * SECOND).exp() - expected).abs() < 1e-12);
    }

    #[test]
    fn too_few_samples_keep_the_curve() {
        let mut seen = new_estimator();
        let assumed = *seen.curve();
        (0..SAMPLES_MIN - 1).for_each(|_| seen.record_reuse(SECOND, true));
        refit(&mut seen);
        assert_eq!(*seen.curve(), assumed);
        seen.record_reuse(SECOND, true);
        refit(&mut seen);
        assert!((seen.curve().interval_us() - 1e6).abs() < 1.0);
    }

    #[test]
    fn sample_slides() {
        let mut seen = new_estimator();
        (0..SAMPLES_MAX).for_each(|_| seen.record_reuse(1000 * SECOND, true));
        refit(&mut seen);
        assert!((seen.curve().interval_us() - 1e9).abs() < 1.0);
        (0..SAMPLES_MAX).for_each(|_| seen.record_reuse(2 * SECOND, true));
        refit(&mut seen);
        assert!((seen.curve().interval_us() - 2e6).abs() < 1.0);
    }

    #[test]
    fn simultaneous_use_is_no_reuse() {
        let mut seen = new_estimator();
        (0..100).for_each(|_| seen.record_reuse(0, true));
        let assumed = *seen.curve();
        refit(&mut seen);
        assert_eq!(*seen.curve(), assumed);
    }

    #[test]
    fn an_interval_outside_the_sample_is_counted_but_not_fitted() {
        let mut seen = new_estimator();
        (0..100).for_each(|_| seen.record_reuse(SECOND, false));
        (0..200).for_each(|_| seen.record_use());
        let mean = seen.curve().interval_us();
        refit(&mut seen);
        assert!((seen.curve().interval_us() - mean).abs() < 1e-6);
        assert!((seen.curve().life_us() - mean / 2.0).abs() < 1.0);
    }

    #[test]
    fn category_without_reuse_has_a_finite_rank() {
        let mut seen = new_estimator();
        (0..100).for_each(|_| seen.record_use());
        refit(&mut seen);
        assert!((seen.curve().life_us() - LIFE_MIN_US).abs() < 1e-6);
        assert!(seen.curve().ln_reuse_prob(0).is_finite());
    }

    #[test]
    fn counts_decay_over_fits() {
        let mut seen = new_estimator();
        (0..1000).for_each(|_| seen.record_use());
        refit(&mut seen);
        for _ in 0..100 {
            (0..100).for_each(|_| {
                seen.record_use();
                seen.record_reuse(10 * SECOND, true);
            });
            refit(&mut seen);
        }
        assert!(seen.curve().life_us() > 0.99 * 10e6);
    }

    #[test]
    fn linear_worth_matches_its_line() {
        let curve = ReuseCurve::new(Exponential::with_mean(50e6).unwrap(), 30e6).with_share(0.25);
        for idle in [0, SECOND, 1000 * SECOND] {
            let window = curve.worth(WorthModel::Window, idle as f64);
            assert_eq!(window, curve.ln_reuse_prob(idle));
            assert!((curve.worth(WorthModel::Share, idle as f64) - (window + 0.25_f64.ln())).abs() < 1e-12);
        }
    }

    #[test]
    fn posterior_matches_bayes() {
        let curve = ReuseCurve::new(Exponential::with_mean(50e6).unwrap(), 30e6).with_share(0.3);
        for idle in [0.0, 20e6, 100e6] {
            let not_yet = (-idle / 50e6_f64).exp();
            let still = 0.3 * not_yet / (0.7 + 0.3 * not_yet);
            let expected = still * (1.0 - (-30e6 / 50e6_f64).exp());
            assert!((curve.worth(WorthModel::Posterior, idle).exp() - expected).abs() < 1e-12);
        }
        assert!(curve.worth(WorthModel::Posterior, 1e15).is_finite());
    }

    #[test]
    fn past_life_only_age_counts() {
        let interval = |seconds: f64| Exponential::with_mean(seconds * 1e6).unwrap();
        let (slow, quick) = (ReuseCurve::new(interval(1e5), 30e6), ReuseCurve::new(interval(1.0), 30e6));
        let worth = |curve: &ReuseCurve, idle_s: f64| curve.worth(WorthModel::Aged, idle_s * 1e6);
        assert_eq!(worth(&slow, 29.0), slow.worth(WorthModel::Window, 29e6));
        assert!(worth(&slow, 31.0) < worth(&quick, 30.0), "a block past its life ranks below all others");
        assert!(worth(&slow, 40.0) < worth(&quick, 39.0) && worth(&quick, 40.0) < worth(&slow, 39.0));
    }

    #[test]
    fn share_is_fitted() {
        let mut seen = new_estimator();
        (0..1000).for_each(|_| seen.record_use());
        (0..100).for_each(|_| seen.record_reuse(SECOND, true));
        refit(&mut seen);
        assert!((seen.curve().share() - 0.1).abs() < 1e-12);
        let mut rare = new_estimator();
        rare.refit(seen.curve());
        assert_eq!(rare.curve().share(), seen.curve().share());
    }
}
