//! Samples from the few distributions that the generators need, from one seeded stream.
//!
//! Not here: parameters (one file per kind of trace beside this one).

use rand::Rng;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// The only source of randomness of a generator.
#[derive(Debug)]
pub(super) struct Sampler(ChaCha8Rng);

impl Sampler {
    pub(super) fn new(seed: u64) -> Self {
        Sampler(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Uniform in `[0, 1)`.
    pub(super) fn chance(&mut self) -> f64 {
        self.0.random::<f64>()
    }

    /// True with this probability.
    pub(super) fn happens(&mut self, probability: f64) -> bool {
        self.chance() < probability
    }

    /// Exponential with this mean.
    pub(super) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.chance()).ln()
    }

    /// Lognormal with this median; `spread` is the standard deviation of the logarithm.
    pub(super) fn lognormal(&mut self, median: f64, spread: f64) -> f64 {
        let radius = (-2.0 * (1.0 - self.chance()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.chance()).cos();
        median * (spread * normal).exp()
    }

    /// Lognormal number of tokens within bounds.
    pub(super) fn tokens(&mut self, median: f64, spread: f64, least: u32, most: u32) -> u32 {
        (self.lognormal(median, spread).round() as u32).clamp(least, most)
    }

    /// Index of one of `weights`, drawn in proportion to them.
    pub(super) fn pick(&mut self, weights: &[f64]) -> usize {
        let mut left = self.chance() * weights.iter().sum::<f64>();
        for (position, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return position;
            }
        }
        weights.len().saturating_sub(1)
    }
}

/// Density at `value`, and probability above it, of the exponential with this mean.
pub(super) fn exponential_at(mean: f64, value: f64) -> (f64, f64) {
    let above = (-value / mean).exp();
    (above / mean, above)
}

/// The same for the lognormal with this median and this standard deviation of the logarithm.
pub(super) fn lognormal_at(median: f64, spread: f64, value: f64) -> (f64, f64) {
    if value <= 0.0 {
        return (0.0, 1.0);
    }
    let normal = (value / median).ln() / spread;
    let density = (-normal * normal / 2.0).exp() / std::f64::consts::TAU.sqrt();
    (density / (spread * value), normal_above(normal, density))
}

/// Probability of the normal distribution above `value`, given its density there. Zelen and Severo
/// (Abramowitz and Stegun 26.2.17): error below 1e-7.
fn normal_above(value: f64, density: f64) -> f64 {
    if value < 0.0 {
        return 1.0 - normal_above(-value, density);
    }
    let t = 1.0 / (1.0 + 0.231_641_9 * value);
    let series = [1.330_274_429, -1.821_255_978, 1.781_477_937, -0.356_563_782, 0.319_381_530];
    density * series.into_iter().fold(0.0, |sum, term| (sum + term) * t)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean of many samples. The seed is fixed, so the bounds below cannot fail by chance.
    fn mean(mut draw: impl FnMut(&mut Sampler) -> f64) -> f64 {
        let mut source = Sampler::new(7);
        (0..20_000).map(|_| draw(&mut source)).sum::<f64>() / 20_000.0
    }

    #[test]
    fn samples_have_the_requested_moments() {
        assert!((mean(|draw| draw.exponential(40.0)) / 40.0 - 1.0).abs() < 0.03);
        // The mean of a lognormal is its median times e^(spread²/2).
        assert!((mean(|draw| draw.lognormal(100.0, 0.5)) / 113.31 - 1.0).abs() < 0.03);
        assert!((mean(|draw| f64::from(u8::from(draw.happens(0.3)))) - 0.3).abs() < 0.02);
        assert!((mean(|draw| draw.pick(&[1.0, 0.0, 3.0]) as f64) - 1.5).abs() < 0.03);
    }

    #[test]
    fn densities_and_tails_match_the_samples() {
        for value in [0.3, 2.0, 9.0] {
            let above = mean(|draw| f64::from(u8::from(draw.lognormal(2.0, 0.8) > value)));
            assert!((lognormal_at(2.0, 0.8, value).1 - above).abs() < 0.01, "{value}: {above}");
            let above = mean(|draw| f64::from(u8::from(draw.exponential(2.0) > value)));
            assert!((exponential_at(2.0, value).1 - above).abs() < 0.01, "{value}: {above}");
            for at in [|value| lognormal_at(2.0, 0.8, value), |value| exponential_at(2.0, value)] {
                let fall = (at(value - 1e-3).1 - at(value + 1e-3).1) / 2e-3;
                assert!((at(value).0 / fall - 1.0).abs() < 1e-2, "{value}: {fall}");
            }
        }
    }

    #[test]
    fn tokens_stay_in_bounds() {
        let mut draw = Sampler::new(1);
        assert!((0..1000).all(|_| (10..=20).contains(&draw.tokens(15.0, 3.0, 10, 20))));
    }
}
