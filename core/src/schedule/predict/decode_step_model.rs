//! Step times and output lengths, learned from instance reports and from finished requests.
//!
//! A step takes a base time, plus a time for each decoding request. The hardware profile estimates
//! both, and two factors correct them. The factors come from least squares over reports with
//! exponential decay, regularised towards the profile while few reports exist. An instance that
//! differs from the fleet has its own pace, which decays without reports. Not here: predictions
//! from these values (`decode_forecast.rs`).

use crate::id::{Category, RequestKind, Timestamp};
use crate::schedule::predict::profile::HardwareProfile;
use std::time::Duration;

/// Reports after which a report counts half.
const HALF_LIFE: f64 = 512.0;

/// Time without reports after which learned values count half.
const SILENT_HALF_LIFE: Duration = Duration::from_secs(300);

/// Weight of the profile as a prior, in reports of steps that match it, for each of the two parts.
const PRIOR: f64 = 2.0;

/// Largest believable error factor of a part; beyond it something else is wrong.
pub(in crate::schedule) const FACTOR_MAX: f64 = 4.0;

/// Reports with a larger share of prompt time say too little about pure decode steps.
const PROMPTS_MAX: f64 = 0.5;

/// Weight of one report in the pace of its instance.
const PACE_GAIN: f64 = 0.125;

/// Unit of a pace: this value is the profile's speed.
const PACE_ONE: u32 = 1_000;

/// Time without a step report after which an instance counts as average.
const PACE_AGED_AFTER: Duration = Duration::from_secs(60);

/// Request kinds with separate output lengths.
const KINDS: usize = RequestKind::ALL.len();

/// Requests after which one counts half for output lengths.
const LENGTH_HALF_LIFE: f64 = 512.0;

/// Prior mean output length, and its weight in requests: the mean of a chat.
const LENGTH_PRIOR: (f64, f64) = (256.0, 8.0);

/// Outlier bound on one output length: a multiple of the mean, plus a number of tokens. Otherwise
/// one extreme answer would move the mean of thousands; longer answers are learned from several.
const LENGTH_OUTLIER: (f64, f64) = (8.0, 4_096.0);

/// Longest believable output, in tokens.
const LENGTH_MAX: f64 = (1 << 20) as f64;

/// Factors on the profile's step times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::schedule) struct DecodeStepModel {
    /// Sums of products of the profile's base and per-request times, each as a share of their
    /// total.
    products: [[f64; 2]; 2],
    observed: [f64; 2],
    factors: [f64; 2],
    at: Option<Timestamp>,
}

impl Default for DecodeStepModel {
    fn default() -> Self {
        DecodeStepModel { products: [[0.0; 2]; 2], observed: [0.0; 2], factors: [1.0; 2], at: None }
    }
}

/// An instance's report of its steps since the previous report.
#[derive(Clone, Copy, Debug)]
pub(in crate::schedule) struct StepReport {
    /// Mean number of running requests.
    pub(in crate::schedule) running: f64,
    /// Mean time between two tokens, in microseconds.
    pub(in crate::schedule) tbt_us: u32,
    /// Share of the time with prefill, 0 to 1.
    pub(in crate::schedule) prefill_share: f64,
}

impl DecodeStepModel {
    /// The factors, decayed towards 1 by the time without reports.
    pub(in crate::schedule) fn factors_at(&self, now: Timestamp) -> [f64; 2] {
        let fresh = retained_share(self.at, now);
        self.factors.map(|factor| 1.0 + (factor - 1.0) * fresh)
    }

    /// Learns from a report. Returns the ratio of reported to predicted step time, if the report
    /// allows one.
    pub(in crate::schedule) fn observe(
        &mut self,
        profile: &HardwareProfile,
        report: StepReport,
        now: Timestamp,
    ) -> Option<f64> {
        // The time between two tokens without its prefill share is the step.
        let step_ms = f64::from(report.tbt_us) / 1e3 * (1.0 - report.prefill_share);
        if report.tbt_us == 0 || report.prefill_share > PROMPTS_MAX || report.running <= 0.0 {
            return None;
        }
        let x = profile_parts_ms(profile, report.running);
        let all = x[0] + x[1];
        if all <= 0.0 {
            return None;
        }
        let step_ms = step_ms.clamp(all / FACTOR_MAX, all * FACTOR_MAX);
        let ratio =
            step_ms * 1e3 / step_us(profile, self.factors_at(now), report.running).max(f64::MIN_POSITIVE);
        let x = x.map(|part| part / all);
        let kept = (-1.0 / HALF_LIFE).exp2() * retained_share(self.at, now);
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

    /// Solves (products + prior) · factors = observed + prior by Gauss-Seidel from the previous
    /// factors, which hardly change.
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

/// Remaining weight of a learned value that was last updated at `at`: an unused fleet may have
/// changed.
pub(in crate::schedule) fn retained_share(at: Option<Timestamp>, now: Timestamp) -> f64 {
    let silent = at.map_or(Duration::ZERO, |at| now.since(at));
    (-silent.as_secs_f64() / SILENT_HALF_LIFE.as_secs_f64()).exp2()
}

/// Time of a step with this many decoding requests and no prompt, in microseconds.
pub(in crate::schedule) fn step_us(profile: &HardwareProfile, factors: [f64; 2], running: f64) -> f64 {
    let [step, per_request] = profile_parts_ms(profile, running);
    (step * factors[0] + per_request * factors[1]) * 1e3
}

/// The profile's base step time, and the time of the running requests, in milliseconds.
fn profile_parts_ms(profile: &HardwareProfile, running: f64) -> [f64; 2] {
    [profile.step_ns as f64 / 1e6, profile.step_ns_per_running as f64 * running / 1e6]
}

/// Step time of one instance relative to the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::schedule) struct StepPace {
    thousandths: u32,
    at: Timestamp,
}

impl Default for StepPace {
    fn default() -> Self {
        StepPace { thousandths: PACE_ONE, at: Timestamp(0) }
    }
}

impl StepPace {
    pub(in crate::schedule) fn observe(&mut self, ratio: f64, now: Timestamp) {
        let before = self.factor_at(now);
        let pace = before + (ratio.clamp(1.0 / FACTOR_MAX, FACTOR_MAX) - before) * PACE_GAIN;
        self.thousandths = (pace * f64::from(PACE_ONE)).round() as u32;
        self.at = now;
    }

    /// The factor, decayed towards 1 by age.
    pub(in crate::schedule) fn factor_at(self, now: Timestamp) -> f64 {
        let age = now.since(self.at);
        if self.thousandths == PACE_ONE || age >= PACE_AGED_AFTER {
            return 1.0;
        }
        let fresh = 1.0 - age.as_secs_f64() / PACE_AGED_AFTER.as_secs_f64();
        1.0 + (f64::from(self.thousandths) / f64::from(PACE_ONE) - 1.0) * fresh
    }
}

/// Output lengths by request kind, and the KV capacity that requests take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::schedule) struct LengthModel {
    /// Output tokens of a request, by kind.
    by_kind: [DecayedMean; KINDS],
    all: DecayedMean,
    /// Decayed sum of squared token counts.
    squares: f64,
    /// KV tokens of a request.
    kv_tokens: DecayedMean,
    /// Decayed sums of prefill microseconds and prefill tokens.
    prefill: (f64, f64),
}

impl LengthModel {
    /// Learns from a finished request of this category.
    pub(in crate::schedule) fn observe_output(&mut self, category: Category, output_tokens: u32) {
        let (times, besides) = LENGTH_OUTLIER;
        // For a kind with long outputs, a long output is no outlier.
        let usual = self.mean_output().max(self.mean_of_kind(category));
        let tokens = f64::from(output_tokens).min(usual * times + besides).min(LENGTH_MAX);
        self.squares = self.squares * decay() + tokens * tokens;
        for sums in [&mut self.by_kind[kind(category)], &mut self.all] {
            sums.add(tokens);
        }
    }

    /// Learns from a sent request: its KV capacity in tokens, its prefill tokens and their time.
    pub(in crate::schedule) fn observe_sent(&mut self, kv_tokens: u32, tokens: u32, prefill_us: u64) {
        self.kv_tokens.add(kv_tokens.into());
        let kept = decay();
        let (us, all) = self.prefill;
        self.prefill = (us * kept + prefill_us as f64, all * kept + f64::from(tokens));
    }

    /// Prefill time of one token, in microseconds.
    pub(in crate::schedule) fn prompt_us_per_token(&self, profile: &HardwareProfile) -> f64 {
        let ((us, tokens), prior_us) = (self.prefill, profile.prefill_ns_per_token as f64 / 1e3);
        if tokens < 1.0 { prior_us } else { (us / tokens).max(prior_us) }
    }

    /// Expected output tokens of a request of this category: the mean of its kind, up to `at_most`
    /// if that is not 0.
    pub(in crate::schedule) fn expected_output(&self, category: Category, at_most: u32) -> u32 {
        let (known, (prior, _)) = (self.mean_of_kind(category), LENGTH_PRIOR);
        // Without any observation, the requested maximum is the best guess.
        match at_most {
            0 => known.round() as u32,
            most if self.all.count < 1.0 => most.min((prior * FACTOR_MAX) as u32),
            most => most.min(known.round() as u32),
        }
    }

    /// The mean of a kind, drawn to the overall mean while few requests of the kind were seen.
    fn mean_of_kind(&self, category: Category) -> f64 {
        let (known, (_, worth)) = (self.by_kind[kind(category)], LENGTH_PRIOR);
        (known.sum + self.mean_output() * worth) / (known.count + worth)
    }

    /// The overall mean.
    pub(in crate::schedule) fn mean_output(&self) -> f64 {
        let (prior, worth) = LENGTH_PRIOR;
        (self.all.sum + prior * worth) / (self.all.count + worth)
    }

    /// Mean output length weighted by held KV capacity. Long requests hold more capacity for
    /// longer, so capacity frees up more slowly than the plain mean suggests.
    pub(in crate::schedule) fn kv_weighted_output(&self) -> f64 {
        let (prior, worth) = LENGTH_PRIOR;
        let mean = self.mean_output();
        let square = (self.squares + prior * prior * worth) / (self.all.count + worth);
        let input = (self.mean_kv_tokens().unwrap_or(mean) - mean).max(0.0);
        (input * mean + square) / (input + mean).max(1.0)
    }

    /// Mean KV capacity of a request, in tokens; `None` before the first one.
    pub(in crate::schedule) fn mean_kv_tokens(&self) -> Option<f64> {
        (self.kv_tokens.count > 0.0).then(|| self.kv_tokens.sum / self.kv_tokens.count)
    }
}

fn kind(category: Category) -> usize {
    category.kind as usize % KINDS
}

/// What remains of the weight of an observation when the next one is added.
fn decay() -> f64 {
    (-1.0 / LENGTH_HALF_LIFE).exp2()
}

/// Sums of observations and of their number, each with the same decay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct DecayedMean {
    sum: f64,
    count: f64,
}

impl DecayedMean {
    fn add(&mut self, value: f64) {
        self.sum = self.sum * decay() + value;
        self.count = self.count * decay() + 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::tests::ROUND;

    fn at(s: u64) -> Timestamp {
        Timestamp(s * 1_000_000)
    }

    /// A report of an engine with twice the profile's base step time and three times its time per
    /// request.
    fn report(running: f64, prompts: f64) -> StepReport {
        let step_us = 2_000.0 + 30.0 * running;
        StepReport { running, tbt_us: (step_us / (1.0 - prompts)).round() as u32, prefill_share: prompts }
    }

    #[test]
    fn learns_step_times_with_interleaved_prompts() {
        let mut steps = DecodeStepModel::default();
        assert!(
            (step_us(&ROUND, steps.factors_at(at(0)), 10.0) - 1_100.0).abs() < 1e-6,
            "the profile, at first"
        );
        for nth in 0..4_000_u64 {
            let told = report((nth * 37 % 200 + 1) as f64, (nth % 5) as f64 / 10.0);
            steps.observe(&ROUND, told, at(nth));
        }
        for running in [1.0, 50.0, 200.0] {
            let is = step_us(&ROUND, steps.factors_at(at(4_000)), running);
            let right = 2_000.0 + 30.0 * running;
            assert!((is / right - 1.0).abs() < 0.12, "{running}: {is}, not {right}");
        }
    }

    #[test]
    fn ignores_empty_reports_and_bounds_invalid_ones() {
        let mut steps = DecodeStepModel::default();
        for (running, tbt_us, prompts) in [(1.0, 0, 0.0), (0.0, 5, 0.0), (3.0, 9_000, 0.9)] {
            assert_eq!(
                steps.observe(&ROUND, StepReport { running, tbt_us, prefill_share: prompts }, at(1)),
                None
            );
        }
        assert_eq!(steps, DecodeStepModel::default());
        for _ in 0..10_000 {
            steps.observe(&ROUND, StepReport { running: 1e9, tbt_us: u32::MAX, prefill_share: 0.0 }, at(1));
            steps.observe(&ROUND, StepReport { running: 1.0, tbt_us: 1, prefill_share: 0.0 }, at(2));
        }
        assert!(steps.factors.iter().all(|factor| (0.25..=4.0).contains(factor)), "{steps:?}");
    }

    #[test]
    fn step_factors_decay_without_reports() {
        let mut steps = DecodeStepModel::default();
        (0..1_000).for_each(|nth| assert!(steps.observe(&ROUND, report(10.0, 0.0), at(nth)).is_some()));
        let off = |s| step_us(&ROUND, steps.factors_at(at(s)), 10.0) / 1_100.0 - 1.0;
        assert!(off(999) > 1.0, "{}", off(999));
        let [soon, later, much_later] = [0, 300, 3_000].map(|s| off(999 + s) / off(999));
        assert!(soon > 0.99 && (0.49..0.51).contains(&later) && much_later < 0.01, "{later} {much_later}");
    }

    #[test]
    fn pace_is_learned_and_decays_without_reports() {
        let mut pace = StepPace::default();
        (0..50).for_each(|s| pace.observe(2.0, at(s)));
        assert!((1.85..2.0).contains(&pace.factor_at(at(49))), "{}", pace.factor_at(at(49)));
        assert!((1.4..1.6).contains(&pace.factor_at(at(79))), "halfway through its ageing");
        assert!((pace.factor_at(at(200)) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn output_length_is_learned_by_kind() {
        let of = |kind| Category { kind, conversation_turn: 1 };
        let mut lengths = LengthModel::default();
        assert_eq!(
            (
                lengths.expected_output(of(RequestKind::Text), 0),
                lengths.expected_output(of(RequestKind::Text), 40)
            ),
            (256, 40)
        );
        for _ in 0..1_000 {
            lengths.observe_output(of(RequestKind::Text), 1_000);
            lengths.observe_output(of(RequestKind::Api), 10);
        }
        let [chat, api] =
            [RequestKind::Text, RequestKind::Api].map(|kind| lengths.expected_output(of(kind), 0));
        assert!((980..=1_000).contains(&chat) && (10..=25).contains(&api), "{chat} {api}");
        assert_eq!(
            lengths.expected_output(of(RequestKind::Text), 300),
            300,
            "capped by the request's own maximum"
        );
        assert_eq!(lengths.mean_kv_tokens(), None);
        lengths.observe_sent(500, 100, 20_000);
        assert_eq!(lengths.mean_kv_tokens(), Some(500.0));
        assert!((lengths.prompt_us_per_token(&ROUND) - 200.0).abs() < 1e-6);
    }

    #[test]
    fn one_outlier_moves_little_and_long_outputs_are_learned() {
        let of = |kind| Category { kind, conversation_turn: 1 };
        let mut lengths = LengthModel::default();
        (0..500).for_each(|_| lengths.observe_output(of(RequestKind::Text), 300));
        let before = lengths.mean_output();
        lengths.observe_output(of(RequestKind::Text), u32::MAX);
        assert!(lengths.mean_output() < before * 1.1, "{before} {}", lengths.mean_output());
        let mut first = LengthModel::default();
        first.observe_output(of(RequestKind::Text), u32::MAX);
        assert!(
            first.mean_output() < 1_024.0 && first.expected_output(of(RequestKind::Text), 0) < 2_048,
            "{first:?}"
        );
        (0..2_000).for_each(|_| lengths.observe_output(of(RequestKind::Thinking), 60_000));
        let thinking = lengths.expected_output(of(RequestKind::Thinking), 0);
        assert!((55_000..=60_000).contains(&thinking), "{thinking}");
        (0..20_000).for_each(|_| lengths.observe_output(of(RequestKind::Text), u32::MAX));
        assert!(lengths.mean_output() <= LENGTH_MAX);
    }
}
