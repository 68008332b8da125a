//! Decides whether to try an action that pays off only sometimes.
//!
//! Each failed try lengthens the number of occasions that are skipped, and each successful one
//! halves it. Not here: the actions (`spin_wait.rs`, `path.rs`).

use std::sync::atomic::{AtomicU32, Ordering};

/// Maximum occasions skipped after a failed try.
const SKIPS_MAX: u32 = 255;

/// Outcome of one end's earlier tries.
#[derive(Debug, Default)]
pub(super) struct AdaptiveToggle {
    /// Occasions to skip before the next try, and how many of them are left.
    skips: AtomicU32,
    skips_left: AtomicU32,
}

impl AdaptiveToggle {
    /// Whether to try at this occasion.
    pub(super) fn should_try(&self) -> bool {
        let left = self.skips_left.load(Ordering::Relaxed);
        self.skips_left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0
    }

    /// Records a try that paid off.
    pub(super) fn succeeded(&self) {
        self.skips.store(self.skips.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
    }

    /// Records a try that did not pay off.
    pub(super) fn failed(&self) {
        let passed = (2 * self.skips.load(Ordering::Relaxed) + 1).min(SKIPS_MAX);
        self.skips.store(passed, Ordering::Relaxed);
        self.skips_left.store(passed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Occasions skipped before the next try.
    fn skipped(guess: &AdaptiveToggle) -> u32 {
        (0..).find(|_| guess.should_try()).unwrap_or(u32::MAX)
    }

    #[test]
    fn failures_double_the_skips_and_successes_halve_them() {
        let guess = AdaptiveToggle::default();
        assert!(guess.should_try());
        let after_a_miss = |_| {
            guess.failed();
            skipped(&guess)
        };
        let seen: Vec<u32> = (0..10).map(after_a_miss).collect();
        assert_eq!(seen, [1, 3, 7, 15, 31, 63, 127, 255, 255, 255]);
        for _ in 0..8 {
            guess.succeeded();
            assert_eq!(skipped(&guess), 0, "no occasion is skipped while tries succeed");
        }
        guess.failed();
        assert_eq!(skipped(&guess), 1, "successes reset the skips");
    }
}
