//! How far a fetch is, for whoever gives it up, or judges the way that it took.
//!
//! The path that carries it takes note: a future that was dropped tells nothing any more, and this does. Not here: what follows
//! from it (`pick/peer.rs`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use crate::pick::PathKind;

/// How far one fetch is, and over what. Clones are of the same one.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<State>>);

#[derive(Clone, Copy, Debug, Default)]
struct State {
    step: Step,
    kind: Option<PathKind>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Step {
    /// It was not begun, or waits for something of its own end.
    #[default]
    Waits,
    Asked(Instant),
    Answered,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For whoever picks a path: it begins, or begins anew, over this.
    pub(crate) fn begins(&self, kind: PathKind) {
        *self.state() = State { step: Step::Waits, kind: Some(kind) };
    }

    /// For a path that has another one below it: all of it goes over that.
    #[cfg(feature = "rdma")]
    pub(crate) fn goes_over(&self, kind: PathKind) {
        self.state().kind = Some(kind);
    }

    /// Over what it goes, or went last; nothing where nobody picked.
    #[must_use]
    pub fn kind(&self) -> Option<PathKind> {
        self.state().kind
    }

    /// For a path: nothing but the way and the node is waited for from here.
    pub fn asked(&self) {
        let step = &mut self.state().step;
        if matches!(*step, Step::Waits) {
            *step = Step::Asked(Instant::now());
        }
    }

    /// For a path: the node said something, be it that nothing comes.
    pub fn answered(&self) {
        self.state().step = Step::Answered;
    }

    /// Whether the node said something.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        matches!(self.state().step, Step::Answered)
    }

    /// When the node was asked, where it said nothing since.
    #[must_use]
    pub fn unheard_since(&self) -> Option<Instant> {
        match self.state().step {
            Step::Asked(since) => Some(since),
            Step::Waits | Step::Answered => None,
        }
    }
}
