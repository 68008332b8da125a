//! What an instance is doing right now: requests under way and their tokens.
//!
//! Not here: sending it to the routers (`report.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Counters shared by every call.
#[derive(Debug, Default)]
pub(super) struct Working {
    tokens: AtomicU64,
    under_way: AtomicU32,
    waiting: AtomicU32,
    served: AtomicU64,
}

/// A point in time of [`Working`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Snapshot {
    /// Prompt tokens to compute of requests under way, as long as they are not accounted.
    pub(super) queue_tokens: u64,
    /// Requests under way that wait for nobody.
    pub(super) running: u32,
    /// Requests under way that wait for the accelerator.
    pub(super) waiting: u32,
    /// Requests ended.
    pub(super) served: u64,
}

impl Working {
    pub(super) fn snapshot(&self) -> Snapshot {
        let waiting = self.waiting.load(Ordering::Relaxed);
        Snapshot {
            queue_tokens: self.tokens.load(Ordering::Relaxed),
            running: self.under_way.load(Ordering::Relaxed).saturating_sub(waiting),
            waiting,
            served: self.served.load(Ordering::Relaxed),
        }
    }
}

/// A request under way; counted until dropped, however its call ends.
#[derive(Debug)]
pub(super) struct Running {
    working: Arc<Working>,
    tokens: u64,
}

impl Running {
    pub(super) fn begin(working: &Arc<Working>, tokens: u64) -> Self {
        working.tokens.fetch_add(tokens, Ordering::Relaxed);
        working.under_way.fetch_add(1, Ordering::Relaxed);
        Self { working: Arc::clone(working), tokens }
    }

    /// Its prefill is over: it still runs, and no longer stands in the queue.
    pub(super) fn prefilled(&mut self) {
        self.working.tokens.fetch_sub(std::mem::take(&mut self.tokens), Ordering::Relaxed);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.prefilled();
        self.working.under_way.fetch_sub(1, Ordering::Relaxed);
        self.working.served.fetch_add(1, Ordering::Relaxed);
    }
}

/// A request under way waits for the accelerator until this is dropped.
#[derive(Debug)]
pub(super) struct Waiting {
    working: Arc<Working>,
}

impl Waiting {
    pub(super) fn begin(working: &Arc<Working>) -> Self {
        working.waiting.fetch_add(1, Ordering::Relaxed);
        Self { working: Arc::clone(working) }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.working.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_from_its_start_to_its_end() {
        let working = Arc::new(Working::default());
        let first = Running::begin(&working, 100);
        let mut second = Running::begin(&working, 50);
        assert_eq!(working.snapshot(), Snapshot { queue_tokens: 150, running: 2, waiting: 0, served: 0 });
        let waits = Waiting::begin(&working);
        assert_eq!((working.snapshot().running, working.snapshot().waiting), (1, 1), "one of the two waits");
        drop(waits);
        second.prefilled();
        assert_eq!(working.snapshot().queue_tokens, 100);
        drop((first, second));
        assert_eq!(working.snapshot(), Snapshot { queue_tokens: 0, running: 0, waiting: 0, served: 2 });
    }
}
