//! Progress of a fetch, for the code that cancels it or rates its path.
//!
//! The path records it here, because a dropped future reports no result. Not here: the conclusions
//! (`pick/peer.rs`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use crate::pick::PathKind;

/// Progress of one fetch, and its path. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<ProgressState>>);

#[derive(Clone, Copy, Debug, Default)]
struct ProgressState {
    step: Step,
    kind: Option<PathKind>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Step {
    /// Not started, or waiting for something on the client's side.
    #[default]
    NotAsked,
    Asked(Instant),
    Answered,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, ProgressState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the path picker: the fetch starts, or restarts, over this path.
    pub(crate) fn start(&self, kind: PathKind) {
        *self.state() = ProgressState { step: Step::NotAsked, kind: Some(kind) };
    }

    /// For a path on top of another one: the whole fetch uses the lower path.
    pub fn set_kind(&self, kind: PathKind) {
        self.state().kind = Some(kind);
    }

    /// Path in use, or used last; `None` if no path was picked.
    #[must_use]
    pub fn kind(&self) -> Option<PathKind> {
        self.state().kind
    }

    /// For a path: the request is sent, and only the network and the node are waited for.
    pub fn mark_asked(&self) {
        let step = &mut self.state().step;
        if matches!(*step, Step::NotAsked) {
            *step = Step::Asked(Instant::now());
        }
    }

    /// For a path: the node answered, even if with a miss.
    pub fn mark_answered(&self) {
        self.state().step = Step::Answered;
    }

    /// Whether the node answered.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        matches!(self.state().step, Step::Answered)
    }

    /// When the node was asked, if it has not answered since.
    #[must_use]
    pub fn unanswered_since(&self) -> Option<Instant> {
        match self.state().step {
            Step::Asked(since) => Some(since),
            Step::NotAsked | Step::Answered => None,
        }
    }
}
