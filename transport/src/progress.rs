//! How far a fetch is, for whoever gives it up, or judges the way that it took.
//!
//! The path that carries it takes note: a future that was dropped tells nothing any more, and this does. Not here: what follows
//! from it (`pick/peer.rs`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// How far one fetch is. Clones are of the same one.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<Step>>);

#[derive(Clone, Copy, Debug, Default)]
enum Step {
    /// It was not begun, or waits for something of its own end.
    #[default]
    Waits,
    Asked(Instant),
    Answered,
}

impl Progress {
    fn step(&self) -> MutexGuard<'_, Step> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For whoever picks a path: it goes another way from here.
    pub(crate) fn begins(&self) {
        *self.step() = Step::Waits;
    }

    /// For a path: nothing but the way and the node is waited for from here.
    pub fn asked(&self) {
        let mut step = self.step();
        if matches!(*step, Step::Waits) {
            *step = Step::Asked(Instant::now());
        }
    }

    /// For a path: the node said something, be it that nothing comes.
    pub fn answered(&self) {
        *self.step() = Step::Answered;
    }

    /// Whether the node said something.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        matches!(*self.step(), Step::Answered)
    }

    /// When the node was asked, where it said nothing since.
    #[must_use]
    pub fn unheard_since(&self) -> Option<Instant> {
        match *self.step() {
            Step::Asked(since) => Some(since),
            Step::Waits | Step::Answered => None,
        }
    }
}
