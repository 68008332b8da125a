//! How long a step takes, and how much is said: learnt from what instances report and from requests that ended.
//!
//! A step takes its time whatever it holds, and more for each request that decodes; how much of each the hardware profile guesses, and two factors correct,
//! by least squares over what was reported, the older counting less, drawn to the profile as long as little was seen. An instance that is
//! faster or slower than that has a pace of its own, which is forgotten while it says nothing. Not here: what is predicted of these (`decoding.rs`).

use std::time::Duration;

use super::profile::HardwareProfile;
use crate::id::{Category, RequestKind, Timestamp};

/// Reports after which one counts half.
const HALF_LIFE: f64 = 512.0;

/// Time without a report after which what was learnt counts half.
const SILENT_HALF_LIFE: Duration = Duration::from_secs(300);

/// How much the belief in the profile is worth: as many reports as this of steps that took what it says, by which alone each part could be told.
const PRIOR: f64 = 2.0;

/// A part is off by no more than this factor, or something else is wrong.
pub(super) const FACTOR_MAX: f64 = 4.0;

/// Reports in which prompts took more of the time than this say too little of steps without one.
const PROMPTS_MAX: f64 = 0.5;

/// The share by which one report moves the pace of its instance.
const PACE_GAIN: f64 = 0.125;

/// A pace in units of this is the profile's.
const PACE_ONE: u32 = 1_000;

/// After so long without a word of its steps an instance is taken for one like all others.
const PACE_AGED_AFTER: Duration = Duration::from_secs(60);

/// Kinds of requests that are told apart by how much they say.
const KINDS: usize = RequestKind::ALL.len();

/// Requests after which one counts half for how much is said.
const LENGTH_HALF_LIFE: f64 = 512.0;

/// What is believed before anything was seen, and how many requests that is worth: the mean of a chat.
const LENGTH_PRIOR: (f64, f64) = (256.0, 8.0);

/// One request counts as having said no more than so many times what others do, and so many tokens besides, or a single wild word would be in the mean of
/// thousands: long answers of a fleet that says little are believed, and what is more is learnt from several.
const LENGTH_OUTLIER: (f64, f64) = (8.0, 4_096.0);

/// No answer is believed to be longer.
const LENGTH_MAX: f64 = (1 << 20) as f64;

/// Factors of the profile's step times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Steps {
    /// Sums of products of what the profile says of the step and of those in it, as shares of both.
    products: [[f64; 2]; 2],
    observed: [f64; 2],
    factors: [f64; 2],
    at: Option<Timestamp>,
}

impl Default for Steps {
    fn default() -> Self {
        Steps { products: [[0.0; 2]; 2], observed: [0.0; 2], factors: [1.0; 2], at: None }
    }
}

/// What an instance said of its steps since the report before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    /// Requests that ran, on average.
    pub(super) running: f64,
    /// Mean time between two tokens.
    pub(super) tbt_us: u32,
    /// Share of the time in which prompts were computed, 0 to 1.
    pub(super) prompts: f64,
}

impl Steps {
    /// The factors, nearer to 1 the longer nothing was said.
    pub(super) fn at(&self, now: Timestamp) -> [f64; 2] {
        let fresh = fresh(self.at, now);
        self.factors.map(|factor| 1.0 + (factor - 1.0) * fresh)
    }

    /// Takes what an instance said; answers how many times as long as predicted its steps took, if that can be told.
    pub(super) fn observe(&mut self, profile: &HardwareProfile, told: Told, now: Timestamp) -> Option<f64> {
        // In the time between two tokens, what is not of prompts is of the step.
        let step_ms = f64::from(told.tbt_us) / 1e3 * (1.0 - told.prompts);
        if told.tbt_us == 0 || told.prompts > PROMPTS_MAX || told.running <= 0.0 {
            return None;
        }
        let x = parts(profile, told.running);
        let all = x[0] + x[1];
        if all <= 0.0 {
            return None;
        }
        let step_ms = step_ms.clamp(all / FACTOR_MAX, all * FACTOR_MAX);
        let ratio = step_ms * 1e3 / step_us(profile, self.at(now), told.running).max(f64::MIN_POSITIVE);
        let x = x.map(|part| part / all);
        let kept = (-1.0 / HALF_LIFE).exp2() * fresh(self.at, now);
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
        for row in 0..2 {
            for column in 0..2 {
                self.products[row][column] = self.products[row][column] * kept + x[row] * x[column];
            }
            self.observed[row] = self.observed[row] * kept + x[row] * step_ms / all;
        }
        self.solve();
        Some(ratio)
    }

    /// (products + prior) · factors = observed + prior, by Gauss-Seidel from the factors before: they hardly move.
    fn solve(&mut self) {
        for _ in 0..8 {
            for row in 0..2 {
                let other = self.products[row][1 - row] * self.factors[1 - row];
                let factor = (self.observed[row] + PRIOR - other) / (self.products[row][row] + PRIOR);
                self.factors[row] = factor.clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
            }
        }
    }
}

/// What is left of something that was learnt, the last of it at that time: a fleet that is not used may have become another.
pub(super) fn fresh(at: Option<Timestamp>, now: Timestamp) -> f64 {
    let silent = at.map_or(Duration::ZERO, |at| now.since(at));
    (-silent.as_secs_f64() / SILENT_HALF_LIFE.as_secs_f64()).exp2()
}

/// A step with so many requests that decode and no prompt, in microseconds, by these factors.
pub(super) fn step_us(profile: &HardwareProfile, factors: [f64; 2], running: f64) -> f64 {
    let [step, each] = parts(profile, running);
    (step * factors[0] + each * factors[1]) * 1e3
}

/// What the profile says of a step by itself and of those in it, in milliseconds.
fn parts(profile: &HardwareProfile, running: f64) -> [f64; 2] {
    [profile.step_ns as f64 / 1e6, profile.step_ns_per_running as f64 * running / 1e6]
}

/// How many times as long as those of the fleet the steps of one instance take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pace {
    thousandths: u32,
    at: Timestamp,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { thousandths: PACE_ONE, at: Timestamp(0) }
    }
}

impl Pace {
    pub(super) fn observe(&mut self, ratio: f64, now: Timestamp) {
        let before = self.at(now);
        let pace = before + (ratio.clamp(1.0 / FACTOR_MAX, FACTOR_MAX) - before) * PACE_GAIN;
        self.thousandths = (pace * f64::from(PACE_ONE)).round() as u32;
        self.at = now;
    }

    /// Nearer to 1 the older what was said is.
    pub(super) fn at(self, now: Timestamp) -> f64 {
        let age = now.since(self.at);
        if self.thousandths == PACE_ONE || age >= PACE_AGED_AFTER {
            return 1.0;
        }
        let fresh = 1.0 - age.as_secs_f64() / PACE_AGED_AFTER.as_secs_f64();
        1.0 + (f64::from(self.thousandths) / f64::from(PACE_ONE) - 1.0) * fresh
    }
}

/// How much requests say, by kind, and how much room they take in GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Lengths {
    /// Tokens and requests, decayed.
    said: [(f64, f64); KINDS],
    all: (f64, f64),
    /// Squares of tokens, decayed alike.
    squares: f64,
    /// Tokens of room and requests, decayed.
    held: (f64, f64),
    /// Microseconds and tokens of prompts that were to be computed, decayed.
    prompts: (f64, f64),
}

impl Lengths {
    /// A request of this category said so much.
    pub(super) fn ended(&mut self, category: Category, output_tokens: u32) {
        let (times, besides) = LENGTH_OUTLIER;
        // Of a kind that says much, one that does is none.
        let usual = self.mean().max(self.of_kind(category));
        let tokens = f64::from(output_tokens).min(usual * times + besides).min(LENGTH_MAX);
        self.squares = decayed((self.squares, 0.0), tokens * tokens).0;
        for sums in [&mut self.said[kind(category)], &mut self.all] {
            *sums = decayed(*sums, tokens);
        }
    }

    /// One was sent that takes so much room, with so many tokens to compute in this time.
    pub(super) fn sent(&mut self, kv_tokens: u32, (tokens, prefill_us): (u32, u64)) {
        self.held = decayed(self.held, kv_tokens.into());
        let kept = (-1.0 / LENGTH_HALF_LIFE).exp2();
        let (us, all) = self.prompts;
        self.prompts = (us * kept + prefill_us as f64, all * kept + f64::from(tokens));
    }

    /// Time for one token of a prompt.
    pub(super) fn prompt_us_per_token(&self, profile: &HardwareProfile) -> f64 {
        let ((us, tokens), prior_us) = (self.prompts, profile.prefill_ns_per_token as f64 / 1e3);
        if tokens < 1.0 { prior_us } else { (us / tokens).max(prior_us) }
    }

    /// How much a request of this category will say: as much as others of its kind did, and no more than it may.
    pub(super) fn expected(&self, category: Category, at_most: u32) -> u32 {
        let (known, (prior, _)) = (self.of_kind(category), LENGTH_PRIOR);
        // Where nothing was seen, what is asked for is the best guess.
        match at_most {
            0 => known.round() as u32,
            most if self.all.1 < 1.0 => most.min((prior * FACTOR_MAX) as u32),
            most => most.min(known.round() as u32),
        }
    }

    /// Of its kind: that of all as long as few of it were seen.
    fn of_kind(&self, category: Category) -> f64 {
        let ((tokens, requests), (_, worth)) = (self.said[kind(category)], LENGTH_PRIOR);
        (tokens + self.mean() * worth) / (requests + worth)
    }

    /// Of all that were seen.
    pub(super) fn mean(&self) -> f64 {
        let ((tokens, requests), (prior, worth)) = (self.all, LENGTH_PRIOR);
        (tokens + prior * worth) / (requests + worth)
    }

    /// What requests say, each weighed by the room that it holds: who says much holds more of it, and for longer, so that room comes free
    /// more slowly than by what they say on average.
    pub(super) fn by_room(&self) -> f64 {
        let (prior, worth) = LENGTH_PRIOR;
        let mean = self.mean();
        let square = (self.squares + prior * prior * worth) / (self.all.1 + worth);
        let input = (self.held().unwrap_or(mean) - mean).max(0.0);
        (input * mean + square) / (input + mean).max(1.0)
    }

    /// Room that one takes in GPU memory, in tokens, if any was sent.
    pub(super) fn held(&self) -> Option<f64> {
        (self.held.1 > 0.0).then(|| self.held.0 / self.held.1)
    }
}

fn kind(category: Category) -> usize {
    category.kind as usize % KINDS
}

fn decayed((sum, count): (f64, f64), value: f64) -> (f64, f64) {
    let kept = (-1.0 / LENGTH_HALF_LIFE).exp2();
    (sum * kept + value, count * kept + 1.0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::ROUND;
    use super::*;

    fn at(s: u64) -> Timestamp {
        Timestamp(s * 1_000_000)
    }

    /// An engine whose step takes twice what the profile says, and three times as much for each that decodes.
    fn told(running: f64, prompts: f64) -> Told {
        let step_us = 2_000.0 + 30.0 * running;
        Told { running, tbt_us: (step_us / (1.0 - prompts)).round() as u32, prompts }
    }

    #[test]
    fn step_times_are_learnt_whatever_prompts_do_beside_them() {
        let mut steps = Steps::default();
        assert!((step_us(&ROUND, steps.at(at(0)), 10.0) - 1_100.0).abs() < 1e-6, "the profile, at first");
        for nth in 0..4_000_u64 {
            let told = told((nth * 37 % 200 + 1) as f64, (nth % 5) as f64 / 10.0);
            steps.observe(&ROUND, told, at(nth));
        }
        for running in [1.0, 50.0, 200.0] {
            let is = step_us(&ROUND, steps.at(at(4_000)), running);
            let right = 2_000.0 + 30.0 * running;
            assert!((is / right - 1.0).abs() < 0.12, "{running}: {is}, not {right}");
        }
    }

    #[test]
    fn nonsense_teaches_little_and_nothing_teaches_nothing() {
        let mut steps = Steps::default();
        for (running, tbt_us, prompts) in [(1.0, 0, 0.0), (0.0, 5, 0.0), (3.0, 9_000, 0.9)] {
            assert_eq!(steps.observe(&ROUND, Told { running, tbt_us, prompts }, at(1)), None);
        }
        assert_eq!(steps, Steps::default());
        for _ in 0..10_000 {
            steps.observe(&ROUND, Told { running: 1e9, tbt_us: u32::MAX, prompts: 0.0 }, at(1));
            steps.observe(&ROUND, Told { running: 1.0, tbt_us: 1, prompts: 0.0 }, at(2));
        }
        assert!(steps.factors.iter().all(|factor| (0.25..=4.0).contains(factor)), "{steps:?}");
    }

    #[test]
    fn what_was_learnt_of_steps_is_forgotten_while_nothing_is_said() {
        let mut steps = Steps::default();
        (0..1_000).for_each(|nth| assert!(steps.observe(&ROUND, told(10.0, 0.0), at(nth)).is_some()));
        let off = |s| step_us(&ROUND, steps.at(at(s)), 10.0) / 1_100.0 - 1.0;
        assert!(off(999) > 1.0, "{}", off(999));
        let [soon, later, much_later] = [0, 300, 3_000].map(|s| off(999 + s) / off(999));
        assert!(soon > 0.99 && (0.49..0.51).contains(&later) && much_later < 0.01, "{later} {much_later}");
    }

    #[test]
    fn a_pace_is_learnt_and_forgotten_while_nothing_is_said() {
        let mut pace = Pace::default();
        (0..50).for_each(|s| pace.observe(2.0, at(s)));
        assert!((1.85..2.0).contains(&pace.at(at(49))), "{}", pace.at(at(49)));
        assert!((1.4..1.6).contains(&pace.at(at(79))), "half as old as may be");
        assert!((pace.at(at(200)) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn how_much_is_said_is_learnt_by_kind() {
        let of = |kind| Category { kind, turn: 1 };
        let mut lengths = Lengths::default();
        assert_eq!(
            (lengths.expected(of(RequestKind::Text), 0), lengths.expected(of(RequestKind::Text), 40)),
            (256, 40)
        );
        for _ in 0..1_000 {
            lengths.ended(of(RequestKind::Text), 1_000);
            lengths.ended(of(RequestKind::Api), 10);
        }
        let [chat, api] = [RequestKind::Text, RequestKind::Api].map(|kind| lengths.expected(of(kind), 0));
        assert!((980..=1_000).contains(&chat) && (10..=25).contains(&api), "{chat} {api}");
        assert_eq!(lengths.expected(of(RequestKind::Text), 300), 300, "no more than it may");
        assert_eq!(lengths.held(), None);
        lengths.sent(500, (100, 20_000));
        assert_eq!(lengths.held(), Some(500.0));
        assert!((lengths.prompt_us_per_token(&ROUND) - 200.0).abs() < 1e-6);
    }

    #[test]
    fn one_wild_word_moves_little_and_long_answers_are_learnt() {
        let of = |kind| Category { kind, turn: 1 };
        let mut lengths = Lengths::default();
        (0..500).for_each(|_| lengths.ended(of(RequestKind::Text), 300));
        let before = lengths.mean();
        lengths.ended(of(RequestKind::Text), u32::MAX);
        assert!(lengths.mean() < before * 1.1, "{before} {}", lengths.mean());
        let mut first = Lengths::default();
        first.ended(of(RequestKind::Text), u32::MAX);
        assert!(first.mean() < 1_024.0 && first.expected(of(RequestKind::Text), 0) < 2_048, "{first:?}");
        (0..2_000).for_each(|_| lengths.ended(of(RequestKind::Thinking), 60_000));
        let thinking = lengths.expected(of(RequestKind::Thinking), 0);
        assert!((55_000..=60_000).contains(&thinking), "{thinking}");
        (0..20_000).for_each(|_| lengths.ended(of(RequestKind::Text), u32::MAX));
        assert!(lengths.mean() <= LENGTH_MAX);
    }
}
