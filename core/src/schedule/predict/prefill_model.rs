//! Prefill time model. It learns the three coefficients of t = s + a·n + b·(c·n + n²/2), for n new
//! tokens after c cached ones, online from first tokens. A hardware profile is the prior.
//!
//! The coefficients are factors on those of the profile. A common factor is learned first, and
//! their differences as more requests are seen. The fit is least squares over requests with a first
//! token, with exponential decay. A request that waits says little about prefill, and errors in the
//! predicted wait must not be attributed to it: its weight is the prefill share of its time, to the
//! fourth power. The error of each request is clipped at the median error, so that the fit follows
//! the typical request and not a mean with a few late ones. If most requests take less than 0.7 or
//! more than 1.4 times as long, the belief itself is wrong, for example because the profile
//! describes other machines. Then, until enough requests were seen, each one counts without
//! clipping, and older ones hardly count.
//!
//! Not here: errors of waiting, transfer and whole predictions (`ttft_bias.rs`), slow instances
//! (`relative_speed.rs`), and hardware profiles (`profile.rs`).

/// Requests after which one counts half.
const HALF_LIFE: f64 = 256.0;

/// Same while the belief seems wrong; also the half-life of the mean error.
const WRONG_HALF_LIFE: f64 = 16.0;

/// Mean error in octaves above which the belief counts as wrong.
const WRONG_BELIEF_OCTAVES: f64 = 0.5;

/// Requests after the last large error until the belief counts as found again; by then three
/// quarters of the data are newer.
const WRONG_FOR_REQUESTS: f64 = 2.0 * WRONG_HALF_LIFE;

/// Error of one request, in octaves, is clipped at this value: about half of all requests must
/// agree, and a few invalid ones do not suffice.
const ERROR_OCTAVES_MAX: f64 = 2.0 * WRONG_BELIEF_OCTAVES;

/// Weight of the belief, in milliseconds of prefill that came as predicted.
const PRIOR_MS: f64 = 2_000.0;

/// Requests after which the belief is half replaced by recent data.
const BELIEF_HALF_LIFE: f64 = 1_024.0;

/// Weight of the belief that step and linear layers have the same factor, in requests: at the
/// start, and at least.
const SHARED_FACTOR_PRIOR: f64 = 20.0;
const SHARED_FACTOR_PRIOR_MIN: f64 = 4.0;

/// Same for attention, in requests that consist of attention only. Short prompts have almost none
/// and say nothing about long prompts, where it dominates.
const ATTENTION_PRIOR: f64 = 1.0;

/// Largest believable factor: from a small model on the best machines to the largest on old ones.
const FACTOR_MAX: f64 = 64.0;

/// Largest believable factor of one part relative to the common factor.
const RELATIVE_FACTOR_MAX: f64 = 16.0;

/// Error factor at which one request is clipped: one that hung for an hour says nothing about
/// others.
const OUTLIER_FACTOR: f64 = 16.0;

/// Lower bound of the median error as a share of the prediction, and the factor by which one
/// request moves it.
const MEDIAN_ERROR_MIN: f64 = 0.002;
const MEDIAN_ERROR_STEP: f64 = 1.05;

/// The parts: per-prompt step, linear layers, attention.
const PARTS: usize = 3;
const ATTENTION: usize = PARTS - 1;

/// Learned factors on the profile's time of each part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillModel {
    /// Sums of products of parts, in milliseconds, each divided by the profile's prediction scaled
    /// by the relative factors. Dividing by the current prediction instead would weight a request
    /// more if less was predicted when it came.
    products: [[f64; PARTS]; PARTS],
    /// Same for parts with observed times.
    observed: [f64; PARTS],
    /// Weighted number of requests in these sums.
    seen: f64,
    factors: [f64; PARTS],
    /// The factor that all parts share.
    common: f64,
    /// Believed value of the common factor.
    believed: f64,
    /// Weight of the belief that all parts have the same factor, in requests.
    shared_factor_prior: f64,
    /// Mean error of recent requests, in octaves; positive if they take longer than predicted.
    mean_error_octaves: f64,
    /// Requests until a wrong belief counts as found again; 0 otherwise.
    wrong_for_requests: f64,
    /// Median error, as a share of the prediction.
    median_error: f64,
}

impl Default for PrefillModel {
    fn default() -> Self {
        PrefillModel {
            products: [[0.0; PARTS]; PARTS],
            observed: [0.0; PARTS],
            seen: 0.0,
            factors: [1.0; PARTS],
            common: 1.0,
            believed: 1.0,
            shared_factor_prior: SHARED_FACTOR_PRIOR,
            mean_error_octaves: 0.0,
            wrong_for_requests: 0.0,
            median_error: 0.1,
        }
    }
}

/// Remaining weight after one more request of weight `counts`.
fn decay_factor(half_life: f64, counts: f64) -> f64 {
    (-counts / half_life).exp2()
}

impl PrefillModel {
    /// Learns from a first token after `ttft_us`, with `others_us` predicted for everything but
    /// prefill. `parts_us` are the profile's times of the parts.
    ///
    /// Returns the factor between new and old predictions of all requests. `None` if the belief was
    /// far off, so that values learned beside it are invalid.
    pub(in crate::schedule) fn observe(
        &mut self,
        parts_us: [u64; PARTS],
        others_us: u64,
        ttft_us: u64,
    ) -> Option<f64> {
        let x = parts_us.map(|us| us as f64 / 1e3);
        let by_now: [f64; PARTS] = std::array::from_fn(|part| x[part] * self.factors[part]);
        let (expected, others) = (by_now.iter().sum::<f64>(), others_us as f64 / 1e3);
        if expected <= 0.0 || ttft_us == 0 {
            return Some(1.0);
        }
        let counts = (expected / (expected + others)).powi(4);
        let took =
            (ttft_us as f64 / 1e3 - others).clamp(expected / OUTLIER_FACTOR, expected * OUTLIER_FACTOR);
        let octaves = (took / expected).log2().clamp(-ERROR_OCTAVES_MAX, ERROR_OCTAVES_MAX);
        self.mean_error_octaves +=
            (octaves - self.mean_error_octaves) * (1.0 - decay_factor(WRONG_HALF_LIFE, counts));
        let is_far_off = self.mean_error_octaves.abs() > WRONG_BELIEF_OCTAVES;
        self.wrong_for_requests =
            if is_far_off { WRONG_FOR_REQUESTS } else { (self.wrong_for_requests - 1.0).max(0.0) };
        let is_wrong = self.wrong_for_requests > 0.0;
        let kept = decay_factor(if is_wrong { WRONG_HALF_LIFE } else { HALF_LIFE }, counts);
        let took = if is_wrong { took } else { self.clipped_observation(took, expected, counts) };
        // By the profile, apart from the relative factors of the parts.
        let by_profile = expected / self.common;
        for row in 0..PARTS {
            for column in 0..PARTS {
                let product = x[row] * x[column] / by_profile;
                self.products[row][column] = self.products[row][column] * kept + product * counts;
            }
            self.observed[row] = self.observed[row] * kept + x[row] * took / by_profile * counts;
        }
        self.seen = self.seen * kept + counts;
        self.shared_factor_prior = (self.shared_factor_prior * kept).max(SHARED_FACTOR_PRIOR_MIN);
        let before = self.predicted_total();
        self.common = self.solve();
        let moved = if is_wrong { counts } else { 1.0 - (-counts / BELIEF_HALF_LIFE).exp2() };
        self.believed *= (self.common / self.believed).powf(moved);
        (!is_wrong).then(|| self.predicted_total() / before)
    }

    /// Predicted time of all seen requests together.
    fn predicted_total(&self) -> f64 {
        let of = |(row, factor): (&[f64; PARTS], f64)| row.iter().sum::<f64>() * factor;
        self.products.iter().zip(self.factors).map(of).sum::<f64>().max(f64::MIN_POSITIVE)
    }

    /// The observation, clipped at the median error; also updates the median.
    fn clipped_observation(&mut self, took: f64, expected: f64, counts: f64) -> f64 {
        let (off, most) = ((took - expected) / expected, self.median_error);
        let step = MEDIAN_ERROR_STEP.powf(if off.abs() > most { counts } else { -counts });
        self.median_error = (most * step).clamp(MEDIAN_ERROR_MIN, 1.0);
        expected * (1.0 + off.clamp(-most, most))
    }

    /// Solves (products + priors) · factors = observed + priors · beliefs by Gauss-Seidel from the
    /// previous factors, which hardly change. Returns the common factor.
    fn solve(&mut self) -> f64 {
        let PrefillModel { products, observed, believed, shared_factor_prior: alike, .. } = *self;
        let (all, left) = (products.iter().flatten().sum::<f64>(), observed.iter().sum::<f64>());
        // The weight in milliseconds of prefill at the believed speed.
        let prior = PRIOR_MS / believed;
        let common = ((left + prior * believed) / (all + prior)).clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
        let seen = self.seen.max(1.0);
        for _ in 0..8 {
            for row in 0..PARTS {
                let others = (0..PARTS).filter(|column| *column != row);
                let others: f64 = others.map(|column| products[row][column] * self.factors[column]).sum();
                let worth = match row {
                    ATTENTION => ATTENTION_PRIOR * all,
                    row => alike * products[row][row],
                } / seen;
                let factor = (observed[row] - others + worth * common)
                    / (products[row][row] + worth).max(f64::MIN_POSITIVE);
                self.factors[row] = factor.clamp(common / RELATIVE_FACTOR_MAX, common * RELATIVE_FACTOR_MAX);
            }
        }
        common
    }

    /// Factors on the profile's time of a per-prompt step, of the linear layers and of attention.
    #[must_use]
    pub fn factors(&self) -> [f64; PARTS] {
        self.factors
    }
}
