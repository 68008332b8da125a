//! How near to their limit those that decode are brought by who comes besides.
//!
//! What is predicted of their tokens is a mean over answers, some of which are short, and over a time in which others come and go. Up to the very limit
//! half of them would break it where requests come without a pause, and computing those was for nothing; far below it room stands idle where few
//! come. So the part of a limit that is used is learnt: each answer whose tokens came too far apart lowers it by a step, each other one raises it by a
//! small share of a step, and it stays where [`BROKEN`] of them come too far apart. Not here: what is predicted (`decoding.rs`) and who is turned away (`admit.rs`).

use super::steps::fresh;
use crate::id::Timestamp;

/// Share of answers that may come too far apart.
const BROKEN: f64 = 0.015;

/// One that does lowers the part by so much: a dozen of them in the time that one answer takes are a rush, and one alone hardly counts.
const STEP: f64 = 0.005;

/// The least part, whoever says what of its answers.
const PART_MIN: f64 = 0.8;

/// The part of limits that is used, as learnt from answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Margin {
    part: f64,
    at: Option<Timestamp>,
}

impl Default for Margin {
    fn default() -> Self {
        Margin { part: 1.0, at: None }
    }
}

impl Margin {
    /// An answer ended for which a limit was to be kept.
    pub(super) fn ended(&mut self, is_broken: bool, now: Timestamp) {
        let moved = if is_broken { BROKEN - 1.0 } else { BROKEN };
        self.part = (self.part(now) + STEP * moved).clamp(PART_MIN, 1.0);
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
    }

    /// The part, nearer to all of a limit the longer no answer ended.
    pub(super) fn part(&self, now: Timestamp) -> f64 {
        1.0 + (self.part - 1.0) * fresh(self.at, now)
    }

    /// Of this limit.
    pub(super) fn within_us(&self, limit_us: u64, now: Timestamp) -> u64 {
        (limit_us as f64 * self.part(now)).round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000);

    #[test]
    fn all_of_a_limit_is_used_until_answers_break_it() {
        let mut margin = Margin::default();
        assert_eq!(margin.within_us(40_000, NOW), 40_000);
        (0..1_000).for_each(|_| margin.ended(false, NOW));
        assert_eq!(margin.within_us(40_000, NOW), 40_000);
        (0..10).for_each(|_| margin.ended(true, NOW));
        assert_eq!(margin.within_us(40_000, NOW), 38_030, "ten steps, less what those would have raised it");
        (0..1_000).for_each(|_| margin.ended(true, NOW));
        assert_eq!(margin.within_us(40_000, NOW), 32_000, "and no further");
        (0..10_000).for_each(|_| margin.ended(false, NOW));
        assert_eq!(margin.within_us(40_000, NOW), 40_000);
    }

    #[test]
    fn it_stays_where_as_many_break_as_may() {
        // The nearer to the limit, the more: none at nine tenths, and a tenth of all at the limit itself.
        let (mut margin, mut due, mut broken) = (Margin::default(), 0.0, 0);
        for nth in 0..40_000 {
            due += (margin.part(NOW) - 0.9).max(0.0);
            let is_broken = due >= 1.0;
            due -= f64::from(u8::from(is_broken));
            broken += u32::from(is_broken && nth >= 20_000);
            margin.ended(is_broken, NOW);
        }
        assert!((0.014..0.016).contains(&(f64::from(broken) / 20_000.0)), "{broken}");
        assert!((0.91..0.92).contains(&margin.part(NOW)), "{}", margin.part(NOW));
    }

    #[test]
    fn what_was_learnt_is_forgotten_with_silence() {
        let mut margin = Margin::default();
        (0..1_000).for_each(|_| margin.ended(true, NOW));
        let later = Timestamp(NOW.0 + 300_000_000);
        assert!((margin.part(later) - 0.9).abs() < 1e-9, "half of it in five minutes");
        // Word that is late makes nothing younger or older.
        margin.ended(false, Timestamp(0));
        assert!((margin.part(NOW) - 0.8).abs() < 1e-3);
    }
}
