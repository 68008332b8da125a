//! What observed times to first token teach about predicted ones.
//!
//! A prediction is a sum: waiting, transfer, prefill, and what those take who come later and go before. Each of the first three is as right as what it is made
//! of (how fast prompts are computed, reports that are a moment old, lanes that others use too), and is off by a factor that changes slowly. That of prefill is for prompts that were
//! read as text, of which nobody knows how many tokens are computed: of all others `computing.rs` learns how long that takes, and what comes late waited. These factors are found by
//! least squares over the requests whose first token was seen, the older counting less, drawn towards 1 as long as few were seen, and no request
//! counting as further off than most are: half of all requests are passed by nobody, and a few wait many times as long as was predicted. What those few
//! add is in the fourth factor, by which predictions are right in sum. Not here: the prediction (`cost.rs`, `passing.rs`), how fast prompts are computed (`computing.rs`), and who sees first tokens (whoever
//! serves them).

use super::decision::{Prediction, Prompt};
use super::steps::fresh;
use crate::id::Timestamp;
use crate::math::rounded;

/// Requests after which one counts half.
const HALF_LIFE: f64 = 256.0;

/// How much the belief in the profile is worth: that of so many milliseconds that came as predicted.
const PRIOR_MS: f64 = 2_000.0;

/// A part is off by no more than this factor, or something else is wrong.
pub(super) const FACTOR_MAX: f64 = 4.0;

/// One observation counts as no further off than this share of what predictions are off by on average: what is learnt is right for most requests, and the
/// few that are passed again and again do not make all others look late.
const SPREADS: f64 = 0.5;

/// Least such bound, as a share of what was predicted.
const SPREAD_MIN: f64 = 0.05;

/// Requests after which one counts half for what predictions are off by.
const SPREAD_HALF_LIFE: f64 = 64.0;

/// How much the belief is worth that those who pass take what is predicted of them: that of so many requests whose whole time came as predicted, at first and
/// when as many were seen as count. In requests and no time: where prompts take milliseconds, what is believed for seconds is never outweighed.
const PASSED_PRIOR: f64 = 16.0;
const PASSED_PRIOR_LEAST: f64 = 4.0;

/// How much the belief in predicted times between tokens is worth: that of so many requests that came as predicted.
const TBT_PRIOR: f64 = 16.0;

/// Factors of a prediction's parts, learnt from what was observed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Learnt {
    /// Sums of products of parts, in milliseconds, each over what was predicted in all.
    products: [[f64; 3]; 3],
    /// The same of parts with what was observed.
    observed: [f64; 3],
    factors: [f64; 3],
    /// Mean of what predictions are off by, as a share of them.
    spread: f64,
    /// What was predicted for those who pass, and what was observed beyond the rest, in milliseconds.
    passed: [f64; 2],
    /// How much the belief in the former is worth by now, in requests.
    passed_prior: f64,
    /// What was predicted of the rest, in milliseconds, and of how many requests.
    rest: [f64; 2],
    /// Times between tokens as predicted and as observed, in milliseconds, and of how many requests.
    tbt: [f64; 3],
    /// When the last of these ended.
    tbt_at: Option<Timestamp>,
}

impl Default for Learnt {
    fn default() -> Self {
        Learnt {
            products: [[0.0; 3]; 3],
            observed: [0.0; 3],
            factors: [1.0; 3],
            spread: 1.0,
            passed: [0.0; 2],
            passed_prior: PASSED_PRIOR,
            rest: [0.0; 2],
            tbt: [0.0; 3],
            tbt_at: None,
        }
    }
}

impl Learnt {
    /// A request's first token came after so long. `parts` is what was predicted before factors: [`Learnt::apply`] was given it.
    pub fn observe(&mut self, parts: &Prediction, ttft_us: u64) {
        let waits_us = parts.queue_us.saturating_add(parts.room_us);
        let x = [waits_us, parts.transfer_us, parts.prefill_us].map(|us| us as f64 / 1e3);
        let all: f64 = x.iter().sum();
        if all <= 0.0 || ttft_us == 0 {
            return;
        }
        // One that hung for an hour says nothing of the others.
        let observed = (ttft_us as f64 / 1e3).min(all * FACTOR_MAX * FACTOR_MAX);
        let kept = (-1.0 / HALF_LIFE).exp2();
        let factors = of_parts(self.factors, parts);
        let expected: f64 = (0..3).map(|part| x[part] * factors[part]).sum();
        let off = (observed - expected) / expected;
        let most = (SPREADS * self.spread).max(SPREAD_MIN);
        self.spread += (off.abs().min(1.0) - self.spread) * (1.0 - (-1.0 / SPREAD_HALF_LIFE).exp2());
        let usual = expected * (1.0 + off.clamp(-most, most));
        let (x, usual) = if is_text(parts) { (x, usual) } else { ([x[0], x[1], 0.0], usual - x[2]) };
        for row in 0..3 {
            for column in 0..3 {
                self.products[row][column] = self.products[row][column] * kept + x[row] * x[column] / all;
            }
            self.observed[row] = self.observed[row] * kept + x[row] * usual / all;
        }
        self.factors = self.solved();
        self.passed[0] = self.passed[0] * kept + parts.passed_us as f64 / 1e3;
        self.passed[1] = self.passed[1] * kept + observed - expected;
        self.passed_prior = (self.passed_prior * kept).max(PASSED_PRIOR_LEAST);
        self.rest = [self.rest[0] * kept + expected, self.rest[1] * kept + 1.0];
    }

    /// Prefill is predicted to take so many times as long by now: of the requests before, it would have been so, too.
    pub(super) fn restate(&mut self, times: f64) {
        let [.., prefill] = &mut self.products;
        prefill.iter_mut().for_each(|sum| *sum *= times);
        self.products.iter_mut().for_each(|row| row[2] *= times);
        self.observed[2] *= times;
    }

    /// What was learnt of the parts of a time to first token was learnt beside wrong ones.
    pub(super) fn forget(&mut self) {
        let Learnt { tbt, tbt_at, .. } = *self;
        *self = Learnt { tbt, tbt_at, ..Learnt::default() };
    }

    /// The tokens of a request came so far apart. `parts` is what was predicted before factors.
    pub fn observe_tbt(&mut self, parts: &Prediction, tbt_us: u64, now: Timestamp) {
        if parts.tbt_us == 0 || tbt_us == 0 {
            return;
        }
        let predicted = parts.tbt_us as f64 / 1e3;
        let observed = (tbt_us as f64 / 1e3).clamp(predicted / FACTOR_MAX, predicted * FACTOR_MAX);
        let kept = (-1.0 / HALF_LIFE).exp2() * fresh(self.tbt_at, now);
        self.tbt_at = Some(self.tbt_at.map_or(now, |at| at.max(now)));
        let [before, seen, count] = self.tbt;
        self.tbt = [before * kept + predicted, seen * kept + observed, count * kept + 1.0];
    }

    /// How many times as long as predicted tokens are apart, in sum; nearer to 1 the longer no request ended.
    #[must_use]
    pub fn tbt_factor(&self, now: Timestamp) -> f64 {
        let [predicted, observed, count] = self.tbt;
        if count <= 0.0 {
            return 1.0;
        }
        let prior = TBT_PRIOR * predicted / count;
        let factor = ((observed + prior) / (predicted + prior)).clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
        1.0 + (factor - 1.0) * fresh(self.tbt_at, now)
    }

    /// How many times as long as is predicted those take who come later and go before: what all others together make of the rest, so that predictions are
    /// right in sum.
    fn passed(&self) -> f64 {
        let [predicted, seen] = self.passed;
        let [rest_ms, requests] = self.rest;
        if rest_ms <= 0.0 {
            return 1.0;
        }
        let prior = self.passed_prior * rest_ms / requests;
        ((seen + prior) / (predicted + prior)).clamp(0.0, FACTOR_MAX)
    }

    /// (products + prior) · factors = observed + prior, by Gauss-Seidel from the factors before: they hardly move.
    fn solved(&self) -> [f64; 3] {
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

    /// The factors as they are now: worked out once for all that is predicted at a time.
    pub(super) fn at(&self, now: Timestamp) -> Factors {
        Factors { parts: self.factors, passed: self.passed(), tbt: self.tbt_factor(now) }
    }

    /// A prediction with the factors.
    #[must_use]
    pub fn apply(&self, parts: &Prediction, now: Timestamp) -> Prediction {
        self.at(now).apply(parts)
    }

    /// Of waiting, transfer and the prefill of what is read as text, and of those who come later and go before.
    #[must_use]
    pub fn factors(&self) -> [f64; 4] {
        let [queue, transfer, prefill] = self.factors;
        [queue, transfer, prefill, self.passed()]
    }
}

/// Factors of one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors {
    parts: [f64; 3],
    passed: f64,
    tbt: f64,
}

impl Factors {
    /// A prediction with them.
    pub(super) fn apply(&self, parts: &Prediction) -> Prediction {
        let scaled = |us: u64, factor: f64| rounded(us as f64 * factor);
        let [queue, transfer, prefill] = of_parts(self.parts, parts);
        Prediction {
            queue_us: scaled(parts.queue_us, queue),
            transfer_us: scaled(parts.transfer_us, transfer),
            prefill_us: scaled(parts.prefill_us, prefill),
            passed_us: scaled(parts.passed_us, self.passed),
            // It is a wait as the other one is.
            room_us: scaled(parts.room_us, queue),
            tbt_us: self.tbt_us(parts.tbt_us),
            ..*parts
        }
    }

    /// A time between tokens with its factor.
    pub(super) fn tbt_us(&self, us: u64) -> u64 {
        rounded(us as f64 * self.tbt)
    }
}

/// Those of a request's parts.
fn of_parts([queue, transfer, prefill]: [f64; 3], parts: &Prediction) -> [f64; 3] {
    [queue, transfer, if is_text(parts) { prefill } else { 1.0 }]
}

/// Whether how many tokens of the prompt are computed is a guess.
fn is_text(parts: &Prediction) -> bool {
    parts.prompt == Prompt::default()
}
