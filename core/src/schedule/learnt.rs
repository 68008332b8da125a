//! What observed times to first token teach about predicted ones.
//!
//! A prediction is a sum: waiting, transfer, prefill. Each part is as right as what it is made of (a hardware profile, reports that are a moment old, lanes
//! that others use too), and is off by a factor that changes slowly. The three factors are found by least squares over the requests whose first token was
//! seen, the older counting less, drawn towards 1 as long as few were seen. Requests count by what was predicted for them, so that a factor is
//! right in sum, not for the longest alone. Not here: the prediction (`cost.rs`), and who sees first tokens (whoever serves them).

use super::decision::Prediction;

/// Requests after which one counts half.
const HALF_LIFE: f64 = 256.0;

/// How much the belief in the profile is worth: that of so many milliseconds that came as predicted.
const PRIOR_MS: f64 = 2_000.0;

/// A part is off by no more than this factor, or something else is wrong.
const FACTOR_MAX: f64 = 4.0;

/// Factors of a prediction's parts, learnt from what was observed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Learnt {
    /// Sums of products of parts, in milliseconds, each over what was predicted in all.
    products: [[f64; 3]; 3],
    /// The same of parts with what was observed.
    observed: [f64; 3],
    factors: [f64; 3],
}

impl Default for Learnt {
    fn default() -> Self {
        Learnt { products: [[0.0; 3]; 3], observed: [0.0; 3], factors: [1.0; 3] }
    }
}

impl Learnt {
    /// A request's first token came after so long. `parts` is what was predicted before factors: [`Learnt::apply`] was given it.
    pub fn observe(&mut self, parts: &Prediction, ttft_us: u64) {
        let [queue, transfer, prefill] =
            [parts.queue_us, parts.transfer_us, parts.prefill_us].map(|us| us as f64 / 1e3);
        let x = [queue, transfer, prefill];
        let all = queue + transfer + prefill;
        if all <= 0.0 || ttft_us == 0 {
            return;
        }
        // One that hung for an hour says nothing of the others.
        let observed = (ttft_us as f64 / 1e3).min(all * FACTOR_MAX * FACTOR_MAX);
        let kept = (-1.0 / HALF_LIFE).exp2();
        for row in 0..3 {
            for column in 0..3 {
                self.products[row][column] = self.products[row][column] * kept + x[row] * x[column] / all;
            }
            self.observed[row] = self.observed[row] * kept + x[row] * observed / all;
        }
        self.factors = self.solved();
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

    /// A prediction with the factors.
    #[must_use]
    pub fn apply(&self, parts: &Prediction) -> Prediction {
        let scaled = |us: u64, factor: f64| (us as f64 * factor).round() as u64;
        let [queue, transfer, prefill] = self.factors;
        Prediction {
            queue_us: scaled(parts.queue_us, queue),
            transfer_us: scaled(parts.transfer_us, transfer),
            prefill_us: scaled(parts.prefill_us, prefill),
        }
    }

    /// Of waiting, transfer and prefill.
    #[must_use]
    pub fn factors(&self) -> [f64; 3] {
        self.factors
    }
}
