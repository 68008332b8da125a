//! Decides whether to spin while waiting for the other end.
//!
//! A wake-up takes longer than an answer, so a waiter that expects one soon polls for a moment. If
//! both ends share a processor, or others need it, polling only delays the answer. Not here: the
//! polling (`link.rs`, `connection.rs`), and how failed spins are remembered
//! (`adaptive_toggle.rs`).

use std::time::Duration;

use super::adaptive_toggle::AdaptiveToggle;

/// Spin waits of one end.
#[derive(Debug)]
pub(super) struct SpinWait {
    duration: Duration,
    toggle: AdaptiveToggle,
}

impl SpinWait {
    /// Spins for at most `span`; never if it is zero.
    pub(super) fn new(duration: Duration) -> SpinWait {
        SpinWait { duration, toggle: AdaptiveToggle::default() }
    }

    /// Starts a wait: how long to spin, or `None` to sleep at once.
    pub(super) fn begin(&self) -> Option<Duration> {
        (!self.duration.is_zero() && self.toggle.should_try()).then_some(self.duration)
    }

    /// Records that the awaited event came during the spin.
    pub(super) fn succeeded(&self) {
        self.toggle.succeeded();
    }

    /// Records that it did not.
    pub(super) fn failed(&self) {
        self.toggle.failed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zero_duration_never_spins() {
        assert_eq!(SpinWait::new(Duration::ZERO).begin(), None);
        let span = Duration::from_micros(50);
        let awake = SpinWait::new(span);
        assert_eq!(awake.begin(), Some(span));
        awake.failed();
        assert_eq!([awake.begin(), awake.begin()], [None, Some(span)]);
    }
}
