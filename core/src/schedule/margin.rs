//! How near to their limit those that decode are brought by who comes besides.
//!
//! What is predicted of their tokens is a mean over answers, some of which are short, and over a time in which others come and go. Up to the very limit
//! half of them would break it where requests come without a pause, and computing those was for nothing; far below it room stands idle where few
//! come. So it is learnt which part of the room between the time of a token alone and a limit is used: each answer whose tokens came too far apart lowers it by a step, each
//! other one raises it by a small share of a step, and it stays where [`BROKEN`] of them come too far apart. It is a part of that room and not of the limit,
//! since a limit that is just above what one alone takes leaves nothing to keep. Not here: what is predicted (`decoding.rs`) and who is turned away (`admit.rs`).

use std::time::Duration;

use super::steps::fresh;
use crate::id::Timestamp;

/// Share of answers that may come too far apart.
const BROKEN: f64 = 0.015;

/// One that does lowers the part by so much: a dozen of them in the time that one answer takes are a rush, and one alone hardly counts.
const STEP: f64 = 0.006;

/// The least part, whoever says what of its answers.
const PART_MIN: f64 = 0.75;

/// Answers with fewer tokens count as much less as they are shorter: how far apart these come is up to which prompts are in the few steps of theirs.
const TOKENS_WHOLE: u32 = 32;

/// Without an answer for that long, what was learnt begins to be forgotten. Sooner it is not: where answers are a second apart, what each teaches would be lost
/// as fast as it comes.
const SILENT: Duration = Duration::from_secs(30);

/// The part of the room up to limits that is used, as learnt from answers.
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
    /// An answer of so many tokens ended for which a limit was to be kept; without a number it counts as a long one.
    pub(super) fn ended(&mut self, is_broken: bool, output_tokens: u32, now: Timestamp) {
        let weight = match output_tokens {
            0 => 1.0,
            tokens => f64::from(tokens.min(TOKENS_WHOLE)) / f64::from(TOKENS_WHOLE),
        };
        let moved = if is_broken { BROKEN - 1.0 } else { BROKEN };
        self.part = (self.part(now) + STEP * weight * moved).clamp(PART_MIN, 1.0);
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
    }

    /// The part, nearer to all of the room the longer no answer ended.
    pub(super) fn part(&self, now: Timestamp) -> f64 {
        let silent = self.at.map(|at| at.after(SILENT));
        1.0 + (self.part - 1.0) * fresh(silent, now)
    }

    /// How much of this limit is not used, where one alone takes so long: both in microseconds.
    pub(super) fn kept_us(&self, limit_us: u64, alone_us: u64, now: Timestamp) -> u64 {
        let room_us = limit_us.saturating_sub(alone_us);
        (room_us as f64 * (1.0 - self.part(now))).round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000);

    /// So many long answers at once.
    fn ended(margin: &mut Margin, count: u32, is_broken: bool) {
        (0..count).for_each(|_| margin.ended(is_broken, 1_000, NOW));
    }

    #[test]
    fn all_of_a_limit_is_used_until_answers_break_it() {
        let mut margin = Margin::default();
        assert_eq!(margin.kept_us(40_000, 8_000, NOW), 0);
        ended(&mut margin, 1_000, false);
        assert_eq!(margin.kept_us(40_000, 8_000, NOW), 0);
        ended(&mut margin, 10, true);
        assert_eq!(
            margin.kept_us(40_000, 8_000, NOW),
            1_891,
            "ten steps, less what those would have raised it"
        );
        ended(&mut margin, 1_000, true);
        assert_eq!(margin.kept_us(40_000, 8_000, NOW), 8_000, "and no more");
        ended(&mut margin, 10_000, false);
        assert_eq!(margin.kept_us(40_000, 8_000, NOW), 0);
    }

    #[test]
    fn a_limit_just_above_what_one_alone_takes_is_not_shut() {
        let mut margin = Margin::default();
        ended(&mut margin, 1_000, true);
        assert_eq!(margin.kept_us(10_000, 8_000, NOW), 500);
        assert_eq!(margin.kept_us(8_000, 8_000, NOW), 0);
        assert_eq!(margin.kept_us(7_000, 8_000, NOW), 0, "one that nothing can keep");
    }

    /// Of answers so far apart, the share that is broken in the long run where none is at nine tenths of the room, and a tenth of all at the limit itself; and the part in the end.
    fn settled(apart_ms: u64) -> (f64, f64) {
        let (mut margin, mut due, mut broken) = (Margin::default(), 0.0, 0);
        let at = |nth: u64| Timestamp(NOW.0 + nth * apart_ms * 1_000);
        for nth in 0..40_000 {
            due += (margin.part(at(nth)) - 0.9).max(0.0);
            let is_broken = due >= 1.0;
            due -= f64::from(u8::from(is_broken));
            broken += u32::from(is_broken && nth >= 20_000);
            margin.ended(is_broken, 1_000, at(nth));
        }
        (f64::from(broken) / 20_000.0, margin.part(at(40_000)))
    }

    #[test]
    fn it_stays_where_as_many_break_as_may_however_often_answers_end() {
        for apart_ms in [0, 10, 1_000, 20_000] {
            let (broken, part) = settled(apart_ms);
            assert!((0.014..0.016).contains(&broken), "{broken} at {apart_ms} ms");
            assert!((0.91..0.92).contains(&part), "{part} at {apart_ms} ms");
        }
    }

    #[test]
    fn short_answers_count_for_less() {
        let moved = |tokens| {
            let mut margin = Margin::default();
            margin.ended(true, tokens, NOW);
            1.0 - margin.part(NOW)
        };
        assert!((moved(2) * 16.0 - moved(32)).abs() < 1e-12);
        assert_eq!((moved(33), moved(0)), (moved(32), moved(32)), "and one of unknown length as a long one");
    }

    #[test]
    fn what_was_learnt_is_forgotten_with_silence() {
        let mut margin = Margin::default();
        ended(&mut margin, 1_000, true);
        let after = |seconds: u64| margin.part(Timestamp(NOW.0 + seconds * 1_000_000));
        assert_eq!(after(30), 0.75, "not at once");
        assert!((after(330) - 0.875).abs() < 1e-9, "half of it in five minutes more");
        // Word that is late makes nothing younger or older.
        margin.ended(false, 1_000, Timestamp(0));
        assert!((margin.part(NOW) - 0.75).abs() < 1e-3);
    }
}
