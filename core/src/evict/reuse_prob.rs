//! Per category: how likely a block is used again, given the time since its last use (ATC '25 §4).
//!
//! A [`ReuseCurve`] is the fitted answer, [`Observed`] the sliding sample it is fitted from. Not here:
//! which block leaves ([`super::workload`]) and the numbers of the fit ([`crate::math::exponential`]).

use super::bands;
use super::statistics::{CategorySums, TOLD_REQUESTS};
use crate::id::RequestKind;
use crate::math::exponential::Exponential;

/// Newest samples kept of each quantity per category. 1,024 put the error of a fitted mean at about 3 %
/// (1/√n) and cost 8 KiB per category.
pub const SAMPLES_MAX: usize = 1024;
/// Fewer samples than this do not move a curve: below 32 the error of a fitted mean passes 18 %.
pub const SAMPLES_MIN: usize = 32;
/// Shortest life a curve works with, in microseconds. A millisecond, so that a category never seen reused
/// still has a finite rank, below every other.
pub const LIFE_MIN_US: f64 = 1e3;
/// What remains of the counts of uses and reuses after a fit. At 0.9 and one fit a minute they remember ten
/// minutes, the time within which most reuses come.
pub const COUNTS_KEPT: f64 = 0.9;

/// Mean reuse interval assumed of conversations before the first fit, in microseconds: the mean of the
/// exponential that puts 80 % of reuses within 10 min (ATC '25, trace A).
const CHAT_INTERVAL_US: f64 = 373e6;
/// The same for programmatic calls and tool loops: 80 % within 10 s (trace B).
const API_INTERVAL_US: f64 = 6.2e6;
/// Life assumed before the first fit, in microseconds: the P90 life of trace A.
const LIFE_US: f64 = 612e6;

/// Share of uses that are followed by another, assumed before the first fit. The same for every kind: the
/// published ideal hit rates (62 and 54 %) are close to each other.
const SHARE: f64 = 0.5;
/// Bounds of the share, so that its logarithm and that of its rest are finite.
const SHARE_BOUNDS: (f64, f64) = (1e-6, 1.0 - 1e-6);
/// Worth of what is past its life, before its age counts against it: below every worth within a life.
const PAST_LIFE: f64 = -1e9;

/// What a curve makes of the time since last use. The paper leaves room here; a replay says which serves
/// which traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// `F(t + life) − F(t)`, the paper's.
    #[default]
    Window,
    /// The same times the share of uses that are followed by another: `F` alone is the curve of the reused.
    Share,
    /// The chance that a use still follows, given that none came for `t`, within the life:
    /// `p·e^(−λt) / (1 − p + p·e^(−λt)) · F(life)`.
    Posterior,
    /// As `Window`, but what is past its life is worth less than everything else, the older the less.
    Aged,
}

/// Chance of a reuse within the remaining life of a block, as a function of the time since last use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReuseCurve {
    interval: Exponential,
    life_us: f64,
    ln_chance_of_life: f64,
    /// Chance per microsecond: a product instead of a quotient for every comparison.
    rate: f64,
    share: f64,
}

impl ReuseCurve {
    /// The curve for reuse intervals like `interval` (in microseconds) and blocks that live `life_us`.
    #[must_use]
    pub fn new(interval: Exponential, life_us: f64) -> Self {
        let life_us = life_us.max(LIFE_MIN_US);
        let ln_chance_of_life = interval.ln_chance_within(0.0, life_us);
        ReuseCurve { interval, life_us, ln_chance_of_life, rate: 1.0 / interval.mean(), share: SHARE }
    }

    /// The same curve, of a category of whose uses this share is followed by another.
    #[must_use]
    pub fn with_share(self, share: f64) -> Self {
        let (least, most) = SHARE_BOUNDS;
        ReuseCurve { share: if share.is_finite() { share.clamp(least, most) } else { SHARE }, ..self }
    }

    /// The curve assumed of a kind of request before anything was observed; nothing only if a constant
    /// above were not positive.
    fn assumed(kind: RequestKind) -> Option<Self> {
        let mean = match kind {
            RequestKind::Api | RequestKind::Agent => API_INTERVAL_US,
            _ => CHAT_INTERVAL_US,
        };
        Exponential::with_mean(mean).map(|interval| Self::new(interval, LIFE_US))
    }

    /// Natural logarithm of `F(t + life) − F(t)` for `t` microseconds since last use. The logarithm orders
    /// blocks as the chance does, costs no exponential per comparison and never rounds to zero.
    #[must_use]
    pub fn ln_reuse_prob(&self, idle_us: u64) -> f64 {
        self.ln_chance_of_life - idle_us as f64 * self.rate
    }

    /// What a block is worth `idle_us` microseconds after its last use, as a logarithm of a chance; falls with the
    /// time.
    #[must_use]
    pub fn worth(&self, form: Form, idle_us: f64) -> f64 {
        match (form, self.linear(form)) {
            (_, Some((start, rate))) => start - idle_us * rate,
            (Form::Aged, None) if idle_us > self.life_us => PAST_LIFE - idle_us * 1e-6,
            (Form::Posterior, None) => {
                let reused = self.share * (-idle_us * self.rate).exp();
                let ln_reused = self.share.ln() - idle_us * self.rate;
                self.ln_chance_of_life + ln_reused - (1.0 - self.share + reused).ln()
            }
            (_, None) => self.ln_chance_of_life - idle_us * self.rate,
        }
    }

    /// Start and fall of a worth that is a straight line over the time since last use, in logarithms and
    /// logarithms per microsecond.
    #[must_use]
    pub fn linear(&self, form: Form) -> Option<(f64, f64)> {
        match form {
            Form::Window => Some((self.ln_chance_of_life, self.rate)),
            Form::Share => Some((self.ln_chance_of_life + self.share.ln(), self.rate)),
            Form::Posterior | Form::Aged => None,
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

    /// Expected life of a block, in microseconds: bounds the window in which a reuse still counts.
    #[must_use]
    pub fn life_us(&self) -> f64 {
        self.life_us
    }
}

/// The newest [`SAMPLES_MAX`] values of one quantity.
#[derive(Clone, Debug, Default)]
struct Window {
    values: Vec<f64>,
    oldest: usize,
}

impl Window {
    fn push(&mut self, value: f64) {
        if self.values.len() < SAMPLES_MAX {
            self.values.push(value);
        } else {
            self.values[self.oldest] = value;
            self.oldest = (self.oldest + 1) % SAMPLES_MAX;
        }
    }
}

/// What was seen of one category, and the curve last fitted to it.
///
/// Life is measured from a use in the category: how long the block goes on being used, which is the time to its
/// next use, or nothing if there is none. Counting uses and reuses, and not the blocks that left, keeps this
/// right for a category whose dead blocks are never evicted.
#[derive(Clone, Debug)]
pub struct Observed {
    intervals: Window,
    uses: f64,
    reuses: f64,
    curve: ReuseCurve,
    told: Told,
}

/// What the fleet saw of the category, as so many uses as count here.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    uses: f64,
    reuses: f64,
    /// Intervals that count beside those seen here. They have a weight of their own: where few of many uses are followed
    /// by another, next to nothing is left of the reuses beside the uses, but what is known of them is of many.
    intervals: f64,
    /// Sum of these intervals.
    interval_us: f64,
    /// Whether it saw enough uses and reuses itself: it counts for few, but what it says is of many.
    knows_uses: bool,
    knows_reuses: bool,
}

impl Observed {
    /// Nothing seen yet: the curve is the one assumed of the kind.
    #[must_use]
    pub fn nothing(kind: RequestKind) -> Option<Self> {
        let curve = ReuseCurve::assumed(kind)?;
        Some(Observed { intervals: Window::default(), uses: 0.0, reuses: 0.0, curve, told: Told::default() })
    }

    /// A block was used by a request of the category.
    pub fn used(&mut self) {
        self.uses += 1.0;
    }

    /// A block of the category was used again `interval_us` after its last use. Always counted; the interval
    /// enters the sample only when `is_sampled`.
    pub fn reused(&mut self, interval_us: u64, is_sampled: bool) {
        self.reuses += 1.0;
        if is_sampled && interval_us > 0 {
            self.intervals.push(interval_us as f64);
        }
    }

    /// Fits the curve to what was seen lately; what was seen too rarely is taken from `wider`, the curve of a
    /// wider population (all categories together).
    pub fn refit(&mut self, wider: &ReuseCurve) {
        let own = &self.intervals.values;
        let (sum, count) = (own.iter().sum::<f64>(), own.len() as f64);
        let told = self.told;
        let mean = (sum + told.interval_us) / (count + told.intervals);
        let enough_intervals = told.knows_reuses || count + told.intervals >= SAMPLES_MIN as f64;
        let interval = Exponential::with_mean(mean).filter(|_| enough_intervals).unwrap_or(wider.interval);
        let uses = self.uses + told.uses;
        let enough_uses = told.knows_uses || uses >= SAMPLES_MIN as f64;
        let used_again = ((self.reuses + told.reuses) / uses).min(1.0);
        let life_us = if enough_uses { used_again * interval.mean() } else { wider.life_us };
        let share = if enough_uses { used_again } else { wider.share };
        self.curve = ReuseCurve::new(interval, life_us).with_share(share);
        self.uses *= COUNTS_KEPT;
        self.reuses *= COUNTS_KEPT;
    }

    /// What was seen, for the fleet: reuses in the ages of the sample.
    #[must_use]
    pub fn sums(&self) -> CategorySums {
        let mut sums = CategorySums { uses: self.uses, ..CategorySums::default() };
        let sampled = &self.intervals.values;
        let each = self.reuses.min(self.uses) / sampled.len().max(1) as f64;
        sampled.iter().for_each(|&interval_us| sums.reuses[bands::band(interval_us as u64)] += each);
        sums
    }

    /// What the fleet saw, in place of what was said before; nothing if it saw nothing. It counts from the next fit on.
    pub fn inform(&mut self, fleet: Option<&CategorySums>) {
        self.told = fleet.map_or_else(Told::default, |sums| {
            let weight = sums.weight();
            let intervals = (sums.reused() / sums.cluster_blocks()).min(TOLD_REQUESTS);
            Told {
                uses: sums.uses * weight,
                reuses: sums.reused() * weight,
                intervals,
                interval_us: intervals * sums.interval_us().unwrap_or(0.0),
                knows_uses: sums.uses >= SAMPLES_MIN as f64,
                knows_reuses: sums.reused() >= SAMPLES_MIN as f64,
            }
        });
    }

    /// The curve in force.
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

    fn observed() -> Observed {
        Observed::nothing(RequestKind::Text).unwrap()
    }

    /// Fits with itself as the wider population: what is seen too rarely stays.
    fn refit(seen: &mut Observed) {
        let before = *seen.curve();
        seen.refit(&before);
    }

    #[test]
    fn what_is_seen_too_rarely_is_taken_from_all_categories() {
        let (mut seen, mut all) = (observed(), observed());
        (0..100).for_each(|_| {
            all.used();
            all.reused(3 * SECOND, true);
        });
        refit(&mut all);
        seen.reused(SECOND, true);
        seen.refit(all.curve());
        assert_eq!(seen.curve(), all.curve());
    }

    /// The fleet saw 40 reuses of 100,000 uses: next to the uses that is nothing, but no single own reuse refutes it.
    #[test]
    fn what_was_told_of_intervals_counts_though_few_uses_are_followed() {
        let mut sums = CategorySums { uses: 100_000.0, ..CategorySums::default() };
        sums.reuses[bands::band(100 * SECOND)] = 40.0;
        let told = sums.interval_us().unwrap();
        let mut seen = observed();
        seen.inform(Some(&sums));
        refit(&mut seen);
        assert!((seen.curve().interval_us() / told - 1.0).abs() < 1e-9);
        seen.used();
        seen.reused(SECOND, true);
        refit(&mut seen);
        let expected = (TOLD_REQUESTS * told + 1e6) / (TOLD_REQUESTS + 1.0);
        assert!((seen.curve().interval_us() / expected - 1.0).abs() < 1e-9, "{}", seen.curve().interval_us());
        (0..SAMPLES_MAX).for_each(|_| seen.reused(SECOND, true));
        refit(&mut seen);
        assert!(seen.curve().interval_us() < 5e6, "its own prevail as they come");
    }

    #[test]
    fn every_kind_has_a_curve_before_anything_is_seen() {
        for kind in RequestKind::ALL {
            assert!(Observed::nothing(kind).is_some(), "{}", kind.name());
        }
    }

    #[test]
    fn a_chance_falls_with_idle_time_and_rises_with_life() {
        let interval = Exponential::with_mean(1e8).unwrap();
        let (short, long) = (ReuseCurve::new(interval, 1e7), ReuseCurve::new(interval, 1e9));
        for idle in [0, SECOND, 100 * SECOND] {
            assert!(short.ln_reuse_prob(idle) < long.ln_reuse_prob(idle));
            assert!(short.ln_reuse_prob(idle + SECOND) < short.ln_reuse_prob(idle));
        }
    }

    #[test]
    fn the_value_is_the_difference_of_the_curve_over_the_life() {
        let interval = Exponential::with_mean(50e6).unwrap();
        let curve = ReuseCurve::new(interval, 30e6);
        let expected = interval.cdf(40e6 + 30e6) - interval.cdf(40e6);
        assert!((curve.ln_reuse_prob(40 * SECOND).exp() - expected).abs() < 1e-12);
    }

    #[test]
    fn too_few_samples_change_nothing() {
        let mut seen = observed();
        let assumed = *seen.curve();
        (0..SAMPLES_MIN - 1).for_each(|_| seen.reused(SECOND, true));
        refit(&mut seen);
        assert_eq!(*seen.curve(), assumed);
        seen.reused(SECOND, true);
        refit(&mut seen);
        assert!((seen.curve().interval_us() - 1e6).abs() < 1.0);
    }

    #[test]
    fn the_sample_slides_so_old_behaviour_is_forgotten() {
        let mut seen = observed();
        (0..SAMPLES_MAX).for_each(|_| seen.reused(1000 * SECOND, true));
        refit(&mut seen);
        assert!((seen.curve().interval_us() - 1e9).abs() < 1.0);
        (0..SAMPLES_MAX).for_each(|_| seen.reused(2 * SECOND, true));
        refit(&mut seen);
        assert!((seen.curve().interval_us() - 2e6).abs() < 1.0);
    }

    #[test]
    fn a_second_touch_at_the_same_instant_is_no_reuse() {
        let mut seen = observed();
        (0..100).for_each(|_| seen.reused(0, true));
        let assumed = *seen.curve();
        refit(&mut seen);
        assert_eq!(*seen.curve(), assumed);
    }

    #[test]
    fn an_interval_outside_the_sample_is_counted_but_not_fitted() {
        let mut seen = observed();
        (0..100).for_each(|_| seen.reused(SECOND, false));
        (0..200).for_each(|_| seen.used());
        let mean = seen.curve().interval_us();
        refit(&mut seen);
        assert!((seen.curve().interval_us() - mean).abs() < 1e-6);
        assert!((seen.curve().life_us() - mean / 2.0).abs() < 1.0);
    }

    #[test]
    fn blocks_used_once_end_the_life_but_leave_a_rank() {
        let mut seen = observed();
        (0..100).for_each(|_| seen.used());
        refit(&mut seen);
        assert!((seen.curve().life_us() - LIFE_MIN_US).abs() < 1e-6);
        assert!(seen.curve().ln_reuse_prob(0).is_finite());
    }

    #[test]
    fn the_share_of_reused_blocks_is_remembered_for_some_fits_only() {
        let mut seen = observed();
        (0..1000).for_each(|_| seen.used());
        refit(&mut seen);
        for _ in 0..100 {
            (0..100).for_each(|_| {
                seen.used();
                seen.reused(10 * SECOND, true);
            });
            refit(&mut seen);
        }
        assert!(seen.curve().life_us() > 0.99 * 10e6);
    }

    #[test]
    fn a_straight_worth_is_what_its_line_says() {
        let curve = ReuseCurve::new(Exponential::with_mean(50e6).unwrap(), 30e6).with_share(0.25);
        for idle in [0, SECOND, 1000 * SECOND] {
            let window = curve.worth(Form::Window, idle as f64);
            assert_eq!(window, curve.ln_reuse_prob(idle));
            assert!((curve.worth(Form::Share, idle as f64) - (window + 0.25_f64.ln())).abs() < 1e-12);
        }
    }

    #[test]
    fn the_posterior_is_what_bayes_says() {
        let curve = ReuseCurve::new(Exponential::with_mean(50e6).unwrap(), 30e6).with_share(0.3);
        for idle in [0.0, 20e6, 100e6] {
            let not_yet = (-idle / 50e6_f64).exp();
            let still = 0.3 * not_yet / (0.7 + 0.3 * not_yet);
            let expected = still * (1.0 - (-30e6 / 50e6_f64).exp());
            assert!((curve.worth(Form::Posterior, idle).exp() - expected).abs() < 1e-12);
        }
        assert!(curve.worth(Form::Posterior, 1e15).is_finite());
    }

    #[test]
    fn past_its_life_only_age_counts() {
        let interval = |seconds: f64| Exponential::with_mean(seconds * 1e6).unwrap();
        let (slow, quick) = (ReuseCurve::new(interval(1e5), 30e6), ReuseCurve::new(interval(1.0), 30e6));
        let worth = |curve: &ReuseCurve, idle_s: f64| curve.worth(Form::Aged, idle_s * 1e6);
        assert_eq!(worth(&slow, 29.0), slow.worth(Form::Window, 29e6));
        assert!(worth(&slow, 31.0) < worth(&quick, 30.0), "past its life is below every other");
        assert!(worth(&slow, 40.0) < worth(&quick, 39.0) && worth(&quick, 40.0) < worth(&slow, 39.0));
    }

    #[test]
    fn the_share_of_uses_that_are_followed_is_fitted() {
        let mut seen = observed();
        (0..1000).for_each(|_| seen.used());
        (0..100).for_each(|_| seen.reused(SECOND, true));
        refit(&mut seen);
        assert!((seen.curve().share() - 0.1).abs() < 1e-12);
        let mut rare = observed();
        rare.refit(seen.curve());
        assert_eq!(rare.curve().share(), seen.curve().share());
    }
}
