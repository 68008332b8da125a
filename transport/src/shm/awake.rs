//! Whether to wait for the other end without sleeping.
//!
//! To be woken takes longer than an answer does, so who expects one soon looks again and again for a moment. Where both ends
//! share a processor, or others need it, that only keeps the answer from coming: who waited in vain lets ever more of the next
//! waits sleep at once, and one that was worth it halves them. Not here: the looking (`link.rs`, `connection.rs`).

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Most waits that go to sleep at once after one that waited awake in vain.
const SLEEPERS_MAX: u32 = 255;

/// What the waits of one end have learned.
#[derive(Debug)]
pub(super) struct Awake {
    span: Duration,
    /// How many waits sleep at once before one waits awake again, and how many of them are left.
    sleepers: AtomicU32,
    left: AtomicU32,
}

impl Awake {
    /// Waits of at most `span`; none awake at zero.
    pub(super) fn new(span: Duration) -> Awake {
        Awake { span, sleepers: AtomicU32::new(0), left: AtomicU32::new(0) }
    }

    /// A wait begins: how long it is to look without sleeping.
    pub(super) fn begin(&self) -> Option<Duration> {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        (left == 0 && !self.span.is_zero()).then_some(self.span)
    }

    /// What was waited for came before the span was over.
    pub(super) fn came(&self) {
        self.sleepers.store(self.sleepers.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
    }

    /// It did not.
    pub(super) fn missed(&self) {
        let sleepers = (2 * self.sleepers.load(Ordering::Relaxed) + 1).min(SLEEPERS_MAX);
        self.sleepers.store(sleepers, Ordering::Relaxed);
        self.left.store(sleepers, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many waits sleep before one waits awake.
    fn sleepers(awake: &Awake) -> u32 {
        (0..).find(|_| awake.begin().is_some()).unwrap_or(u32::MAX)
    }

    #[test]
    fn who_waits_in_vain_sleeps_more_and_more_and_less_when_it_is_worth_it() {
        let awake = Awake::new(Duration::from_micros(30));
        assert_eq!(awake.begin(), Some(Duration::from_micros(30)));
        let after_a_miss = |_| {
            awake.missed();
            sleepers(&awake)
        };
        let seen: Vec<u32> = (0..10).map(after_a_miss).collect();
        assert_eq!(seen, [1, 3, 7, 15, 31, 63, 127, 255, 255, 255]);
        for _ in 0..8 {
            awake.came();
            assert_eq!(sleepers(&awake), 0, "as long as it is worth it none sleeps");
        }
        awake.missed();
        assert_eq!(sleepers(&awake), 1, "what was learned is forgotten");
        assert_eq!(Awake::new(Duration::ZERO).begin(), None);
    }
}
