//! Safety margin below the inter-token latency limit, learned from finished answers.
//!
//! The predicted time between tokens is a mean over answers, some of them short, and over a time
//! with changing load. If it may reach the limit itself, half of the answers break it under
//! sustained load, and their computation is wasted; far below the limit, capacity stays idle under
//! light load. So the usable share of the range between a lone request's time and the limit is
//! learned. Each answer that breaks its limit lowers the share by a step, each other one raises it
//! by a small fraction of a step. It settles where [`VIOLATION_TARGET`] of the answers break their
//! limit. It is a share of that range and not of the limit, because a limit just above a lone
//! request's time leaves no margin to keep. Not here: the prediction (`decode_forecast.rs`) and
//! admission (`admission.rs`).

use std::time::Duration;

use crate::id::Timestamp;
use crate::schedule::predict::decode_step_model::retained_share;

/// Share of answers that may break their limit.
const VIOLATION_TARGET: f64 = 0.015;

/// The share drops by this step for one violation: a dozen during one answer are a burst, and one
/// alone hardly counts.
const STEP: f64 = 0.006;

/// Lower bound of the usable share, regardless of reported answers.
const USABLE_SHARE_MIN: f64 = 0.75;

/// Answers with fewer tokens count proportionally less: the times between their few tokens depend
/// on which prompts share their steps.
const FULL_WEIGHT_TOKENS: u32 = 32;

/// Time without an answer after which the learned share starts to decay. With an earlier start, an
/// answer each second would teach no more than decays meanwhile.
const DECAY_AFTER: Duration = Duration::from_secs(30);

/// The learned usable share of the range up to inter-token limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::schedule) struct SloMargin {
    usable_share: f64,
    at: Option<Timestamp>,
}

impl Default for SloMargin {
    fn default() -> Self {
        SloMargin { usable_share: 1.0, at: None }
    }
}

impl SloMargin {
    /// Learns from an answer with a limit that ended after this many tokens; 0 tokens count as a
    /// long answer.
    pub(in crate::schedule) fn observe(&mut self, is_violated: bool, output_tokens: u32, now: Timestamp) {
        let weight = match output_tokens {
            0 => 1.0,
            tokens => f64::from(tokens.min(FULL_WEIGHT_TOKENS)) / f64::from(FULL_WEIGHT_TOKENS),
        };
        let moved = if is_violated { VIOLATION_TARGET - 1.0 } else { VIOLATION_TARGET };
        self.usable_share = (self.usable_share(now) + STEP * weight * moved).clamp(USABLE_SHARE_MIN, 1.0);
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
    }

    /// The usable share, decayed towards 1 by the time without answers.
    pub(in crate::schedule) fn usable_share(&self, now: Timestamp) -> f64 {
        let silent = self.at.map(|at| at.after(DECAY_AFTER));
        1.0 + (self.usable_share - 1.0) * retained_share(silent, now)
    }

    /// The unused part of this limit, in microseconds, if a lone request takes `alone_us` between
    /// tokens.
    pub(in crate::schedule) fn margin_us(&self, limit_us: u64, alone_us: u64, now: Timestamp) -> u64 {
        let range_us = limit_us.saturating_sub(alone_us);
        (range_us as f64 * (1.0 - self.usable_share(now))).round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000);

    /// This many long answers at once.
    fn observe_answers(margin: &mut SloMargin, count: u32, is_broken: bool) {
        (0..count).for_each(|_| margin.observe(is_broken, 1_000, NOW));
    }

    #[test]
    fn whole_limit_is_used_until_answers_break_it() {
        let mut margin = SloMargin::default();
        assert_eq!(margin.margin_us(40_000, 8_000, NOW), 0);
        observe_answers(&mut margin, 1_000, false);
        assert_eq!(margin.margin_us(40_000, 8_000, NOW), 0);
        observe_answers(&mut margin, 10, true);
        assert_eq!(margin.margin_us(40_000, 8_000, NOW), 1_891, "ten steps, less the raises");
        observe_answers(&mut margin, 1_000, true);
        assert_eq!(margin.margin_us(40_000, 8_000, NOW), 8_000, "the lower bound holds");
        observe_answers(&mut margin, 10_000, false);
        assert_eq!(margin.margin_us(40_000, 8_000, NOW), 0);
    }

    #[test]
    fn limit_just_above_lone_time_stays_usable() {
        let mut margin = SloMargin::default();
        observe_answers(&mut margin, 1_000, true);
        assert_eq!(margin.margin_us(10_000, 8_000, NOW), 500);
        assert_eq!(margin.margin_us(8_000, 8_000, NOW), 0);
        assert_eq!(margin.margin_us(7_000, 8_000, NOW), 0, "a limit that no request can meet");
    }

    /// Long-run violation rate and final share for answers at this interval. In this model no
    /// answer violates up to nine tenths of the range, and one in ten does at the limit itself.
    fn long_run(apart_ms: u64) -> (f64, f64) {
        let (mut margin, mut due, mut broken) = (SloMargin::default(), 0.0, 0);
        let at = |nth: u64| Timestamp(NOW.0 + nth * apart_ms * 1_000);
        for nth in 0..40_000 {
            due += (margin.usable_share(at(nth)) - 0.9).max(0.0);
            let is_broken = due >= 1.0;
            due -= f64::from(u8::from(is_broken));
            broken += u32::from(is_broken && nth >= 20_000);
            margin.observe(is_broken, 1_000, at(nth));
        }
        (f64::from(broken) / 20_000.0, margin.usable_share(at(40_000)))
    }

    #[test]
    fn converges_to_violation_target_at_any_answer_rate() {
        for apart_ms in [0, 10, 1_000, 20_000] {
            let (broken, part) = long_run(apart_ms);
            assert!((0.014..0.016).contains(&broken), "{broken} at {apart_ms} ms");
            assert!((0.91..0.92).contains(&part), "{part} at {apart_ms} ms");
        }
    }

    #[test]
    fn short_answers_count_for_less() {
        let moved = |tokens| {
            let mut margin = SloMargin::default();
            margin.observe(true, tokens, NOW);
            1.0 - margin.usable_share(NOW)
        };
        assert!((moved(2) * 16.0 - moved(32)).abs() < 1e-12);
        assert_eq!(
            (moved(33), moved(0)),
            (moved(32), moved(32)),
            "and one of unknown length counts as a long one"
        );
    }

    #[test]
    fn learned_share_decays_without_answers() {
        let mut margin = SloMargin::default();
        observe_answers(&mut margin, 1_000, true);
        let after = |seconds: u64| margin.usable_share(Timestamp(NOW.0 + seconds * 1_000_000));
        assert_eq!(after(30), 0.75, "it does not decay at once");
        assert!((after(330) - 0.875).abs() < 1e-9, "half of it in five more minutes");
        // A late answer makes the learned share neither younger nor older.
        margin.observe(false, 1_000, Timestamp(0));
        assert!((margin.usable_share(NOW) - 0.75).abs() < 1e-3);
    }
}
