//! Draws from the few distributions the generators need, from one seeded stream.
//!
//! Not here: which numbers they are given (one file per kind of trace beside this one).

use rand::Rng;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// The one source of chance of a generator.
#[derive(Debug)]
pub(super) struct Draw(ChaCha8Rng);

impl Draw {
    pub(super) fn new(seed: u64) -> Self {
        Draw(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Evenly in `[0, 1)`.
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

    /// Position of one of `weights`, drawn in their proportion.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean of many draws. The seed is fixed, so the bounds below cannot fail by chance.
    fn mean(mut draw: impl FnMut(&mut Draw) -> f64) -> f64 {
        let mut source = Draw::new(7);
        (0..20_000).map(|_| draw(&mut source)).sum::<f64>() / 20_000.0
    }

    #[test]
    fn draws_have_the_moments_asked_for() {
        assert!((mean(|draw| draw.exponential(40.0)) / 40.0 - 1.0).abs() < 0.03);
        // The mean of a lognormal is its median times e^(spread²/2).
        assert!((mean(|draw| draw.lognormal(100.0, 0.5)) / 113.31 - 1.0).abs() < 0.03);
        assert!((mean(|draw| f64::from(u8::from(draw.happens(0.3)))) - 0.3).abs() < 0.02);
        assert!((mean(|draw| draw.pick(&[1.0, 0.0, 3.0]) as f64) - 1.5).abs() < 0.03);
    }

    #[test]
    fn tokens_stay_in_bounds() {
        let mut draw = Draw::new(1);
        assert!((0..1000).all(|_| (10..=20).contains(&draw.tokens(15.0, 3.0, 10, 20))));
    }
}
