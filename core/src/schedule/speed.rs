//! How fast an instance computes beside all others: it may be another kind of GPU, one that is throttled, or one that others use too.
//!
//! What first tokens teach of all instances together (`learnt.rs`) is the same for each of them. An instance from which they come later beside what is predicted of all is slower,
//! whatever the reason. Of how many times as long it takes the median is kept: each first token moves it by a step, up or down, until as many are above as below. The mean would not do, since
//! a few requests that are passed again and again say nothing of a GPU. The same is kept of all instances together, and what counts is the
//! difference. Such as chance makes is left out, so that instances of one kind are all alike.
//! Not here: how far apart tokens come (`steps.rs`), and what a GPU is expected to do (`profile.rs`).

use super::decision::Prediction;
use super::steps::fresh;
use crate::id::Timestamp;
use crate::math::rounded;

/// Steps from one time to twice that.
const OCTAVE: i16 = 256;

/// The first one moves by so many, and the later ones by as much less as there were more of them: by one in the end.
const FIRST: i16 = 32;

/// After so many first tokens the steps are half as long as the first.
const HALVED: u16 = 4;

/// Of an instance that gave fewer first tokens nothing is believed: after these, chance makes differences of a twentieth.
const SEEN_MIN: u16 = 128;

/// Differences that are no larger are left out, in octaves: a seventh. Those of twice as much count in full, and between the two more and more of them, so that nothing jumps.
const ALIKE: f64 = 0.2;

/// No instance takes more than so many octaves longer or shorter, or something else is wrong.
const MOST: i16 = 2 * OCTAVE;

/// What first tokens said of an instance, or of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Speed {
    steps: i16,
    seen: u16,
    at: Timestamp,
}

impl Speed {
    /// What was computed for a first token took so many times as long as is predicted of all instances alike, in octaves.
    pub(super) fn observe(&mut self, octaves: f64, now: Timestamp) {
        let is_above = octaves > self.octaves(now);
        let step = (FIRST / (1 + (self.seen / HALVED).min(FIRST as u16) as i16)).max(1);
        let kept = (self.octaves(now) * f64::from(OCTAVE)).round() as i16;
        self.steps = (kept + if is_above { step } else { -step }).clamp(-MOST, MOST);
        self.seen = self.seen.saturating_add(1);
        self.at = self.at.max(now);
    }

    /// How many times as long an instance takes as all of them do, where that is more than chance makes; 1 for as long.
    pub(super) fn times(self, all: Speed, now: Timestamp) -> f64 {
        if self.seen < SEEN_MIN {
            return 1.0;
        }
        let off = self.octaves(now) - all.octaves(now);
        (off * ((off.abs() - ALIKE) / ALIKE).clamp(0.0, 1.0)).exp2()
    }

    /// The median, nearer to 0 the longer no first token came: an instance that nobody hears of may have become another.
    fn octaves(self, now: Timestamp) -> f64 {
        if self.steps == 0 {
            0.0
        } else {
            f64::from(self.steps) / f64::from(OCTAVE) * fresh(Some(self.at), now)
        }
    }
}

/// What takes so long in general, at an instance that takes so many times as long.
pub(super) fn slowed(us: u64, times: f64) -> u64 {
    // Those that are all alike are predicted to the microsecond as without this. The cast saturates.
    if (times - 1.0).abs() < f64::EPSILON { us } else { rounded(us as f64 * times) }
}

/// How many times as long computing took as was predicted, in octaves, if the first token was up to that more than to other things.
pub(super) fn octaves(predicted: &Prediction, ttft_us: u64) -> Option<f64> {
    let others_us = predicted.transfer_us.saturating_add(predicted.room_us);
    let computing_us = predicted.ttft_us().saturating_sub(others_us);
    let took_us = ttft_us.saturating_sub(others_us).max(1);
    (ttft_us > 0 && computing_us > others_us).then(|| (took_us as f64 / computing_us as f64).log2())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws that are the same each time.
    struct Draws(u64);

    impl Draws {
        /// From -1 to 1, most of them near 0: the sum of three.
        fn next(&mut self) -> f64 {
            let mut one = || {
                self.0 =
                    self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (self.0 >> 11) as f64 / (1_u64 << 53) as f64 * 2.0 - 1.0
            };
            (one() + one() + one()) / 3.0
        }
    }

    /// What comes to be believed of instances that take so many times as long as is predicted, each first token off by up to twice or half besides.
    fn believed(actual: [f64; 4], rounds: u64) -> [f64; 4] {
        let (mut speeds, mut all, mut draws) = ([Speed::default(); 4], Speed::default(), Draws(7));
        let at = |nth: u64| Timestamp(1 + nth * 100_000);
        for nth in 0..rounds {
            for (speed, actual) in speeds.iter_mut().zip(actual) {
                let octaves = actual.log2() + draws.next();
                speed.observe(octaves, at(nth));
                all.observe(octaves, at(nth));
            }
        }
        speeds.map(|speed| speed.times(all, at(rounds)))
    }

    #[test]
    fn instances_of_one_kind_are_all_alike() {
        for rounds in [1, 50, 128, 200, 1_000, 10_000] {
            assert_eq!(believed([1.0; 4], rounds), [1.0; 4], "after {rounds}");
            // Whatever all of them take is learnt elsewhere.
            assert_eq!(believed([1.7; 4], rounds), [1.0; 4], "after {rounds}");
        }
    }

    #[test]
    fn one_of_another_kind_is_known_by_its_first_tokens() {
        let of = |actual: [f64; 4], rounds| {
            let times = believed(actual, rounds);
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
    fn nothing_is_believed_of_few_and_no_more_than_can_be_of_many() {
        let (mut speed, all, now) = (Speed::default(), Speed::default(), Timestamp(5));
        (1..SEEN_MIN).for_each(|_| speed.observe(9.0, now));
        assert!((speed.times(all, now) - 1.0).abs() < 1e-12);
        (0..10_000).for_each(|_| speed.observe(f64::INFINITY, now));
        let most = speed.times(all, now);
        assert!((most - 4.0).abs() < 1e-9, "{most}");
        (0..100_000).for_each(|_| speed.observe(f64::NEG_INFINITY, now));
        assert!((speed.times(all, now) - 0.25).abs() < 1e-9);
        // Half of it is forgotten in five minutes of silence.
        let later = speed.times(all, Timestamp(300_000_005));
        assert!((later - 0.5).abs() < 1e-3, "{later}");
    }

    #[test]
    fn only_computing_is_slower() {
        let parts = Prediction {
            queue_us: 10_000,
            transfer_us: 20_000,
            prefill_us: 30_000,
            passed_us: 40_000,
            room_us: 50_000,
            tbt_us: 60,
            ..Prediction::default()
        };
        let twice = Prediction { queue_us: 20_000, prefill_us: 60_000, passed_us: 80_000, ..parts };
        assert_eq!(octaves(&parts, twice.ttft_us()), Some(1.0));
        assert_eq!(octaves(&parts, 0), None, "that was not measured");
        assert_eq!(octaves(&Prediction { room_us: 60_000, ..parts }, 1_000), None, "not up to that");
        assert!(octaves(&parts, 1).is_some_and(|octaves| octaves < -10.0), "sooner than its blocks");
        let most = Prediction { queue_us: u64::MAX, transfer_us: u64::MAX, room_us: u64::MAX, ..parts };
        assert_eq!((slowed(u64::MAX, 4.0), octaves(&most, 1)), (u64::MAX, None));
    }
}
