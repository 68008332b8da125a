//! Delay before a request is sent to another engine.
//!
//! Pure: the random number is an argument. Not here: whether to retry, and where (`forward.rs`).

use std::time::Duration;

use super::config::RetryConfig;

/// Relative jitter in both directions, so that requests that failed together do not retry together.
const JITTER: f64 = 0.2;

/// Delay before retry number `retry`, counted from 0; `chance` is a random number from 0 to 1.
pub(super) fn wait(config: &RetryConfig, retry: u32, chance: f64) -> Duration {
    let ms = config.first_ms as f64 * config.factor.powi(retry.min(1_000) as i32);
    let jitter = 1.0 + JITTER * (2.0 * chance.clamp(0.0, 1.0) - 1.0);
    let ms = (ms.min(config.max_ms as f64) * jitter).min(config.max_ms as f64);
    Duration::from_micros((ms * 1_000.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_maximum_with_jitter() {
        let config = RetryConfig { attempts: 9, first_ms: 100, factor: 2.0, max_ms: 1_000 };
        let ms = |retry, chance| wait(&config, retry, chance).as_millis();
        assert_eq!([ms(0, 0.5), ms(1, 0.5), ms(2, 0.5), ms(3, 0.5)], [100, 200, 400, 800]);
        assert_eq!([ms(0, 0.0), ms(0, 1.0)], [80, 120]);
        assert_eq!([ms(4, 1.0), ms(u32::MAX, 1.0), ms(4, 0.0)], [1_000, 1_000, 800]);
        assert_eq!(wait(&RetryConfig { first_ms: 0, ..config }, 3, 1.0), Duration::ZERO);
    }
}
