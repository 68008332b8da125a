//! Relative prefill speed of an instance: it may be another kind of GPU, throttled, or shared with
//! others.
//!
//! First tokens teach a common correction for all instances (`ttft_bias.rs`). An instance with
//! later first tokens than that predicts is slower, for whatever reason. The median of its slowdown
//! is tracked: each first token moves the estimate by a step, up or down, until as many are above
//! as below. A mean would not do, because a few requests that are overtaken repeatedly say nothing
//! about a GPU. The same is tracked for the fleet, and the difference counts. Random differences
//! are left out, so that instances of one kind stay equal.
//!
//! Not here: the time between tokens (`decode_step_model.rs`), and the expected speed of a GPU
//! (`profile.rs`).

use crate::id::Timestamp;
use crate::math::round_to_u64;
use crate::schedule::explain::decision::Prediction;
use crate::schedule::predict::decode_step_model::retained_share;

/// Steps per octave, a factor of two in time.
const STEPS_PER_OCTAVE: i16 = 256;

/// Size of the first step; later ones shrink with the number of observations, down to one.
const FIRST_STEP: i16 = 32;

/// First tokens after which steps are half as long as the first.
const STEP_HALVED_AFTER: u16 = 4;

/// First tokens below which an instance counts as average: with this many, random differences are
/// about a twentieth.
const SEEN_MIN: u16 = 128;

/// Difference in octaves up to which instances count as equal: a seventh. Twice that counts in
/// full, with a linear ramp in between, so that the estimate does not jump.
const EQUAL_OCTAVES: f64 = 0.2;

/// Largest believable difference, in steps; beyond it something else is wrong.
const STEPS_MAX: i16 = 2 * STEPS_PER_OCTAVE;

/// Learned slowdown of an instance, or of the fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::schedule) struct RelativeSpeed {
    steps: i16,
    seen: u16,
    at: Timestamp,
}

impl RelativeSpeed {
    /// Learns from a first token; `octaves` is the logarithm of its slowdown relative to the common
    /// prediction.
    pub(in crate::schedule) fn observe(&mut self, octaves: f64, now: Timestamp) {
        let is_above = octaves > self.octaves(now);
        let step = (FIRST_STEP / (1 + (self.seen / STEP_HALVED_AFTER).min(FIRST_STEP as u16) as i16)).max(1);
        let kept = (self.octaves(now) * f64::from(STEPS_PER_OCTAVE)).round() as i16;
        self.steps = (kept + if is_above { step } else { -step }).clamp(-STEPS_MAX, STEPS_MAX);
        self.seen = self.seen.saturating_add(1);
        self.at = self.at.max(now);
    }

    /// Slowdown of an instance relative to the fleet, as a factor beyond random differences; 1 if
    /// equal.
    pub(in crate::schedule) fn slowdown(self, all: RelativeSpeed, now: Timestamp) -> f64 {
        if self.seen < SEEN_MIN {
            return 1.0;
        }
        let off = self.octaves(now) - all.octaves(now);
        (off * ((off.abs() - EQUAL_OCTAVES) / EQUAL_OCTAVES).clamp(0.0, 1.0)).exp2()
    }

    /// The median in octaves, decayed towards 0 by the time without first tokens: a silent instance
    /// may have changed.
    fn octaves(self, now: Timestamp) -> f64 {
        if self.steps == 0 {
            0.0
        } else {
            f64::from(self.steps) / f64::from(STEPS_PER_OCTAVE) * retained_share(Some(self.at), now)
        }
    }
}

/// A common prediction of `us`, for an instance with this slowdown.
pub(in crate::schedule) fn slowed_us(us: u64, slowdown: f64) -> u64 {
    // Without a slowdown, predictions stay exact to the microsecond. The cast saturates.
    if (slowdown - 1.0).abs() < f64::EPSILON { us } else { round_to_u64(us as f64 * slowdown) }
}

/// Slowdown of computation against the prediction, in octaves; `None` if the TTFT depended mostly
/// on other parts.
pub(in crate::schedule) fn slowdown_octaves(predicted: &Prediction, ttft_us: u64) -> Option<f64> {
    let others_us = predicted.transfer_us.saturating_add(predicted.kv_wait_us);
    let computing_us = predicted.ttft_us().saturating_sub(others_us);
    let took_us = ttft_us.saturating_sub(others_us).max(1);
    (ttft_us > 0 && computing_us > others_us).then(|| (took_us as f64 / computing_us as f64).log2())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic random numbers.
    struct RandomDraws(u64);

    impl RandomDraws {
        /// From -1 to 1, mostly near 0: the mean of three.
        fn next(&mut self) -> f64 {
            let mut one = || {
                self.0 =
                    self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (self.0 >> 11) as f64 / (1_u64 << 53) as f64 * 2.0 - 1.0
            };
            (one() + one() + one()) / 3.0
        }
    }

    /// Learned factors of instances with these actual slowdowns; each first token has a further
    /// random error of up to a factor of two.
    fn learned(actual: [f64; 4], rounds: u64) -> [f64; 4] {
        let (mut speeds, mut all, mut draws) =
            ([RelativeSpeed::default(); 4], RelativeSpeed::default(), RandomDraws(7));
        let at = |nth: u64| Timestamp(1 + nth * 100_000);
        for nth in 0..rounds {
            for (speed, actual) in speeds.iter_mut().zip(actual) {
                let octaves = actual.log2() + draws.next();
                speed.observe(octaves, at(nth));
                all.observe(octaves, at(nth));
            }
        }
        speeds.map(|speed| speed.slowdown(all, at(rounds)))
    }

    #[test]
    fn equal_instances_stay_equal() {
        for rounds in [1, 50, 128, 200, 1_000, 10_000] {
            assert_eq!(learned([1.0; 4], rounds), [1.0; 4], "after {rounds}");
            // A common slowdown is learned elsewhere.
            assert_eq!(learned([1.7; 4], rounds), [1.0; 4], "after {rounds}");
        }
    }

    #[test]
    fn slower_or_faster_instance_is_learned_from_first_tokens() {
        let of = |actual: [f64; 4], rounds| {
            let times = learned(actual, rounds);
            times[3] / times[0]
        };
        let slow = of([1.0, 1.0, 1.0, 2.9], 300);
        assert!((2.5..3.4).contains(&slow), "{slow}");
        let half = of([1.0, 1.0, 2.0, 2.0], 2_000);
        assert!((1.8..2.2).contains(&half), "{half}");
        let fast = of([1.0, 1.0, 1.0, 0.5], 2_000);
        assert!((0.45..0.55).contains(&fast), "{fast}");
    }

    #[test]
    fn few_samples_are_ignored_and_slowdown_is_bounded() {
        let (mut speed, all, now) = (RelativeSpeed::default(), RelativeSpeed::default(), Timestamp(5));
        (1..SEEN_MIN).for_each(|_| speed.observe(9.0, now));
        assert!((speed.slowdown(all, now) - 1.0).abs() < 1e-12);
        (0..10_000).for_each(|_| speed.observe(f64::INFINITY, now));
        let most = speed.slowdown(all, now);
        assert!((most - 4.0).abs() < 1e-9, "{most}");
        (0..100_000).for_each(|_| speed.observe(f64::NEG_INFINITY, now));
        assert!((speed.slowdown(all, now) - 0.25).abs() < 1e-9);
        // Half of it decays in five minutes of silence.
        let later = speed.slowdown(all, Timestamp(300_000_005));
        assert!((later - 0.5).abs() < 1e-3, "{later}");
    }

    #[test]
    fn slowdown_applies_to_computation_only() {
        let parts = Prediction {
            queue_us: 10_000,
            transfer_us: 20_000,
            prefill_us: 30_000,
            overtaking_us: 40_000,
            kv_wait_us: 50_000,
            tbt_us: 60,
            ..Prediction::default()
        };
        let twice = Prediction { queue_us: 20_000, prefill_us: 60_000, overtaking_us: 80_000, ..parts };
        assert_eq!(slowdown_octaves(&parts, twice.ttft_us()), Some(1.0));
        assert_eq!(slowdown_octaves(&parts, 0), None, "it was not measured");
        assert_eq!(
            slowdown_octaves(&Prediction { kv_wait_us: 60_000, ..parts }, 1_000),
            None,
            "mostly a wait for capacity"
        );
        assert!(
            slowdown_octaves(&parts, 1).is_some_and(|octaves| octaves < -10.0),
            "sooner than its transfer"
        );
        let most = Prediction { queue_us: u64::MAX, transfer_us: u64::MAX, kv_wait_us: u64::MAX, ..parts };
        assert_eq!((slowed_us(u64::MAX, 4.0), slowdown_octaves(&most, 1)), (u64::MAX, None));
    }
}
