//! Corrections of predicted times to first token, learned from observed ones.
//!
//! A prediction is a sum of waiting, transfer, prefill and overtaking delay. Each of the first
//! three has an error factor that changes slowly, from its inputs: prefill speeds, slightly old
//! reports, shared links. The prefill factor is for prompts hashed as text, with an unknown number
//! of computed tokens; for all others `prefill_model.rs` learns the prefill time, and a late first
//! token counts as waiting. The factors come from least squares over requests with a first token.
//! Older requests count less, and the fit is regularised towards 1 while few were seen. The error
//! of each request is clipped at a typical error: half of all requests are never overtaken, and a
//! few wait many times the prediction. The fourth factor covers the excess of those few, so that
//! predictions are right in sum. Not here: the prediction (`cost.rs`, `overtaking.rs`), prefill
//! speeds (`prefill_model.rs`), and the observation of first tokens (the serving process).

use crate::id::Timestamp;
use crate::math::round_to_u64;
use crate::schedule::explain::decision::{Prediction, PromptWork};
use crate::schedule::predict::decode_step_model::retained_share;

/// Requests after which one counts half.
const HALF_LIFE: f64 = 256.0;

/// Weight of the prior, in milliseconds of time that came as predicted.
const PRIOR_MS: f64 = 2_000.0;

/// Largest believable error factor of a part; beyond it something else is wrong.
pub(in crate::schedule) const FACTOR_MAX: f64 = 4.0;

/// The error of one observation is clipped at this multiple of the mean error: the fit follows most
/// requests, and a few that are overtaken repeatedly do not make all others look late.
const OUTLIER_SPREADS: f64 = 0.5;

/// Lower bound of that clip, as a share of the prediction.
const SPREAD_MIN: f64 = 0.05;

/// Requests after which one counts half for the mean error.
const SPREAD_HALF_LIFE: f64 = 64.0;

/// Weight of the prior for overtaking delays, in requests with a total time as predicted: at the
/// start, and at least. In requests and not in time: with prompts of milliseconds, a prior of
/// seconds would never be outweighed.
const OVERTAKING_PRIOR: f64 = 16.0;
const OVERTAKING_PRIOR_MIN: f64 = 4.0;

/// Weight of the prior for times between tokens, in requests that came as predicted.
const TBT_PRIOR: f64 = 16.0;

/// Correction factors for the parts of a prediction, learned from observations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TtftBias {
    /// Sums of products of parts, in milliseconds, each divided by the total prediction.
    products: [[f64; 3]; 3],
    /// Same for parts with observed times.
    observed: [f64; 3],
    factors: [f64; 3],
    /// Mean error of predictions, as a share of them.
    spread: f64,
    /// Predicted overtaking delay, and the observed excess over the other parts, in milliseconds.
    overtaking: [f64; 2],
    /// Current weight of the overtaking prior, in requests.
    overtaking_prior: f64,
    /// Predicted sum of the other parts, in milliseconds, and its number of requests.
    other_parts: [f64; 2],
    /// Times between tokens, predicted and observed, in milliseconds, and their number of requests.
    tbt: [f64; 3],
    /// When the last of these requests ended.
    tbt_at: Option<Timestamp>,
}

impl Default for TtftBias {
    fn default() -> Self {
        TtftBias {
            products: [[0.0; 3]; 3],
            observed: [0.0; 3],
            factors: [1.0; 3],
            spread: 1.0,
            overtaking: [0.0; 2],
            overtaking_prior: OVERTAKING_PRIOR,
            other_parts: [0.0; 2],
            tbt: [0.0; 3],
            tbt_at: None,
        }
    }
}

impl TtftBias {
    /// Learns from a first token after `ttft_us`. `parts` is the prediction before corrections, the
    /// input of [`TtftBias::apply`].
    pub fn observe(&mut self, parts: &Prediction, ttft_us: u64) {
        let waits_us = parts.queue_us.saturating_add(parts.kv_wait_us);
        let x = [waits_us, parts.transfer_us, parts.prefill_us].map(|us| us as f64 / 1e3);
        let all: f64 = x.iter().sum();
        if all <= 0.0 || ttft_us == 0 {
            return;
        }
        // A request that hung for an hour says little about others.
        let observed = (ttft_us as f64 / 1e3).min(all * FACTOR_MAX * FACTOR_MAX);
        let kept = (-1.0 / HALF_LIFE).exp2();
        let factors = part_factors(self.factors, parts);
        let expected: f64 = (0..3).map(|part| x[part] * factors[part]).sum();
        let off = (observed - expected) / expected;
        let most = (OUTLIER_SPREADS * self.spread).max(SPREAD_MIN);
        self.spread += (off.abs().min(1.0) - self.spread) * (1.0 - (-1.0 / SPREAD_HALF_LIFE).exp2());
        let usual = expected * (1.0 + off.clamp(-most, most));
        let (x, usual) = if is_untokenized(parts) { (x, usual) } else { ([x[0], x[1], 0.0], usual - x[2]) };
        for row in 0..3 {
            for column in 0..3 {
                self.products[row][column] = self.products[row][column] * kept + x[row] * x[column] / all;
            }
            self.observed[row] = self.observed[row] * kept + x[row] * usual / all;
        }
        self.factors = self.solve_factors();
        self.overtaking[0] = self.overtaking[0] * kept + parts.overtaking_us as f64 / 1e3;
        self.overtaking[1] = self.overtaking[1] * kept + observed - expected;
        self.overtaking_prior = (self.overtaking_prior * kept).max(OVERTAKING_PRIOR_MIN);
        self.other_parts = [self.other_parts[0] * kept + expected, self.other_parts[1] * kept + 1.0];
    }

    /// Rescales the history after prefill predictions changed by this factor.
    pub(in crate::schedule) fn rescale_prefill(&mut self, times: f64) {
        let [.., prefill] = &mut self.products;
        prefill.iter_mut().for_each(|sum| *sum *= times);
        self.products.iter_mut().for_each(|row| row[2] *= times);
        self.observed[2] *= times;
    }

    /// Resets the TTFT corrections, which were learned beside wrong prefill predictions.
    pub(in crate::schedule) fn reset_ttft(&mut self) {
        let TtftBias { tbt, tbt_at, .. } = *self;
        *self = TtftBias { tbt, tbt_at, ..TtftBias::default() };
    }

    /// Learns from a request with this mean time between its tokens. `parts` is the prediction
    /// before corrections.
    pub fn observe_tbt(&mut self, parts: &Prediction, tbt_us: u64, now: Timestamp) {
        if parts.tbt_us == 0 || tbt_us == 0 {
            return;
        }
        let predicted = parts.tbt_us as f64 / 1e3;
        let observed = (tbt_us as f64 / 1e3).clamp(predicted / FACTOR_MAX, predicted * FACTOR_MAX);
        let kept = (-1.0 / HALF_LIFE).exp2() * retained_share(self.tbt_at, now);
        self.tbt_at = Some(self.tbt_at.map_or(now, |at| at.max(now)));
        let [before, seen, count] = self.tbt;
        self.tbt = [before * kept + predicted, seen * kept + observed, count * kept + 1.0];
    }

    /// Factor on predicted times between tokens, in sum; decays towards 1 while no request ends.
    #[must_use]
    pub fn tbt_factor(&self, now: Timestamp) -> f64 {
        let [predicted, observed, count] = self.tbt;
        if count <= 0.0 {
            return 1.0;
        }
        let prior = TBT_PRIOR * predicted / count;
        let factor = ((observed + prior) / (predicted + prior)).clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
        1.0 + (factor - 1.0) * retained_share(self.tbt_at, now)
    }

    /// Factor on the predicted overtaking delay: the excess of all requests over their other parts,
    /// so that predictions are right in sum.
    fn overtaking_factor(&self) -> f64 {
        let [predicted, seen] = self.overtaking;
        let [rest_ms, requests] = self.other_parts;
        if rest_ms <= 0.0 {
            return 1.0;
        }
        let prior = self.overtaking_prior * rest_ms / requests;
        ((seen + prior) / (predicted + prior)).clamp(0.0, FACTOR_MAX)
    }

    /// Solves (products + prior) · factors = observed + prior by Gauss-Seidel from the previous
    /// factors, which hardly change.
    fn solve_factors(&self) -> [f64; 3] {
        let mut factors = self.factors;
        for _ in 0..8 {
            for row in 0..3 {
                let others: f64 = (0..3)
                    .filter(|column| *column != row)
                    .map(|column| self.products[row][column] * factors[column])
                    .sum();
                let factor = (self.observed[row] + PRIOR_MS - others) / (self.products[row][row] + PRIOR_MS);
                factors[row] = factor.clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
            }
        }
        factors
    }

    /// The current factors, computed once for all predictions of one moment.
    pub(in crate::schedule) fn factors_at(&self, now: Timestamp) -> BiasFactors {
        BiasFactors { parts: self.factors, overtaking: self.overtaking_factor(), tbt: self.tbt_factor(now) }
    }

    /// A prediction with corrections.
    #[must_use]
    pub fn apply(&self, parts: &Prediction, now: Timestamp) -> Prediction {
        self.factors_at(now).apply(parts)
    }

    /// Factors on waiting, transfer, prefill of text prompts, and overtaking delay.
    #[must_use]
    pub fn factors(&self) -> [f64; 4] {
        let [queue, transfer, prefill] = self.factors;
        [queue, transfer, prefill, self.overtaking_factor()]
    }
}

/// Correction factors at one moment.
#[derive(Clone, Copy, Debug)]
pub(in crate::schedule) struct BiasFactors {
    parts: [f64; 3],
    overtaking: f64,
    tbt: f64,
}

impl BiasFactors {
    /// A prediction with these factors.
    pub(in crate::schedule) fn apply(&self, parts: &Prediction) -> Prediction {
        let scaled = |us: u64, factor: f64| round_to_u64(us as f64 * factor);
        let [queue, transfer, prefill] = part_factors(self.parts, parts);
        Prediction {
            queue_us: scaled(parts.queue_us, queue),
            transfer_us: scaled(parts.transfer_us, transfer),
            prefill_us: scaled(parts.prefill_us, prefill),
            overtaking_us: scaled(parts.overtaking_us, self.overtaking),
            // Waiting for KV capacity gets the factor of waiting.
            kv_wait_us: scaled(parts.kv_wait_us, queue),
            tbt_us: self.corrected_tbt_us(parts.tbt_us),
            ..*parts
        }
    }

    /// A time between tokens with its factor.
    pub(in crate::schedule) fn corrected_tbt_us(&self, us: u64) -> u64 {
        round_to_u64(us as f64 * self.tbt)
    }
}

/// The factors for a request's parts.
fn part_factors([queue, transfer, prefill]: [f64; 3], parts: &Prediction) -> [f64; 3] {
    [queue, transfer, if is_untokenized(parts) { prefill } else { 1.0 }]
}

/// Whether the number of computed prompt tokens is a guess.
fn is_untokenized(parts: &Prediction) -> bool {
    parts.prompt == PromptWork::default()
}
