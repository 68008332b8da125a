//! Whether to wait for the other end without sleeping.
//!
//! To be woken takes longer than an answer does, so who expects one soon looks again and again for a moment. Where both ends
//! share a processor, or others need it, that only keeps the answer from coming. Not here: the looking (`link.rs`,
//! `connection.rs`), and how much is learned of waits in vain (`guess.rs`).

use std::time::Duration;

use super::guess::Guess;

/// The waits of one end.
#[derive(Debug)]
pub(super) struct Awake {
    span: Duration,
    guess: Guess,
}

impl Awake {
    /// Waits of at most `span`; none awake at zero.
    pub(super) fn new(span: Duration) -> Awake {
        Awake { span, guess: Guess::default() }
    }

    /// A wait begins: how long it is to look without sleeping.
    pub(super) fn begin(&self) -> Option<Duration> {
        (!self.span.is_zero() && self.guess.tries()).then_some(self.span)
    }

    /// What was waited for came before the span was over.
    pub(super) fn came(&self) {
        self.guess.was_right();
    }

    /// It did not.
    pub(super) fn missed(&self) {
        self.guess.was_wrong();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_wait_awake_never_does() {
        assert_eq!(Awake::new(Duration::ZERO).begin(), None);
        let span = Duration::from_micros(50);
        let awake = Awake::new(span);
        assert_eq!(awake.begin(), Some(span));
        awake.missed();
        assert_eq!([awake.begin(), awake.begin()], [None, Some(span)]);
    }
}
