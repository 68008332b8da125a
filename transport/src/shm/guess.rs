//! Whether to try what pays only sometimes.
//!
//! Who tried in vain lets ever more of the next occasions go by, and one that was worth it halves them. Not here: what is tried
//! (`awake.rs`, `path.rs`).

use std::sync::atomic::{AtomicU32, Ordering};

/// Most occasions that go by after one in vain.
const PASSED_MAX: u32 = 255;

/// What the tries of one end have learned.
#[derive(Debug, Default)]
pub(super) struct Guess {
    /// How many occasions go by before the next try, and how many of them are left.
    passed: AtomicU32,
    left: AtomicU32,
}

impl Guess {
    /// An occasion: whether to try.
    pub(super) fn tries(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0
    }

    /// A try was worth it.
    pub(super) fn was_right(&self) {
        self.passed.store(self.passed.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
    }

    /// A try was in vain.
    pub(super) fn was_wrong(&self) {
        let passed = (2 * self.passed.load(Ordering::Relaxed) + 1).min(PASSED_MAX);
        self.passed.store(passed, Ordering::Relaxed);
        self.left.store(passed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many occasions go by before a try.
    fn passed(guess: &Guess) -> u32 {
        (0..).find(|_| guess.tries()).unwrap_or(u32::MAX)
    }

    #[test]
    fn who_tries_in_vain_tries_less_and_less_and_more_when_it_is_worth_it() {
        let guess = Guess::default();
        assert!(guess.tries());
        let after_a_miss = |_| {
            guess.was_wrong();
            passed(&guess)
        };
        let seen: Vec<u32> = (0..10).map(after_a_miss).collect();
        assert_eq!(seen, [1, 3, 7, 15, 31, 63, 127, 255, 255, 255]);
        for _ in 0..8 {
            guess.was_right();
            assert_eq!(passed(&guess), 0, "as long as it is worth it none goes by");
        }
        guess.was_wrong();
        assert_eq!(passed(&guess), 1, "what was learned is forgotten");
    }
}
