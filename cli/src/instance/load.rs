//! What an instance is doing right now: requests under way, their tokens, and how far apart those come that they say.
//!
//! Not here: sending it to the routers (`report.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Counters shared by every call.
#[derive(Debug, Default)]
pub(super) struct Working {
    tokens: AtomicU64,
    under_way: AtomicU32,
    waiting: AtomicU32,
    served: AtomicU64,
    kv_tokens: AtomicU64,
    decoding: AtomicU32,
    said: Mutex<Said>,
}

/// How far apart tokens come.
#[derive(Debug, Default)]
struct Said {
    /// Tokens since then, and the times from each one before, summed up.
    tokens: u64,
    all: Duration,
    since: Option<Instant>,
    /// Mean time of those before that, in microseconds; 0 where none was said.
    before_us: u32,
}

/// A point in time of [`Working`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Snapshot {
    /// Prompt tokens to compute of requests under way, as long as they are not accounted.
    pub(super) queue_tokens: u64,
    /// Requests under way that wait for nobody.
    pub(super) running: u32,
    /// Requests under way that wait for the accelerator.
    pub(super) waiting: u32,
    /// Requests ended.
    pub(super) served: u64,
    /// Tokens whose KV is held for requests under way.
    pub(super) kv_tokens: u64,
}

impl Working {
    pub(super) fn snapshot(&self) -> Snapshot {
        let waiting = self.waiting.load(Ordering::Relaxed);
        Snapshot {
            queue_tokens: self.tokens.load(Ordering::Relaxed),
            running: self.under_way.load(Ordering::Relaxed).saturating_sub(waiting),
            waiting,
            served: self.served.load(Ordering::Relaxed),
            kv_tokens: self.kv_tokens.load(Ordering::Relaxed),
        }
    }

    /// Mean time between two tokens of a request since the report before, in microseconds; 0 where none was said. All reports within so long have the
    /// same, as each router has its own.
    pub(super) fn tbt_us(&self, now: Instant, within: Duration) -> u32 {
        let mut said = self.said.lock();
        if said.since.is_none_or(|since| now.saturating_duration_since(since) >= within) {
            let mean_us = said.all.as_micros() / u128::from(said.tokens.max(1));
            let before_us = u32::try_from(mean_us).unwrap_or(u32::MAX);
            *said = Said { since: Some(now), before_us, ..Said::default() };
        }
        said.before_us
    }

    /// Requests that say tokens.
    pub(super) fn decoding(&self) -> u32 {
        self.decoding.load(Ordering::Relaxed)
    }
}

/// A request under way; counted until dropped, however its call ends.
#[derive(Debug)]
pub(super) struct Running {
    working: Arc<Working>,
    tokens: u64,
    kv_tokens: u64,
    is_decoding: bool,
}

impl Running {
    pub(super) fn begin(working: &Arc<Working>, tokens: u64) -> Self {
        working.tokens.fetch_add(tokens, Ordering::Relaxed);
        working.under_way.fetch_add(1, Ordering::Relaxed);
        Self { working: Arc::clone(working), tokens, kv_tokens: 0, is_decoding: false }
    }

    /// The same of one that holds the KV of so many tokens as long as it is under way.
    pub(super) fn holding(mut self, kv_tokens: u64) -> Self {
        self.working.kv_tokens.fetch_add(kv_tokens, Ordering::Relaxed);
        self.kv_tokens += kv_tokens;
        self
    }

    /// One that says tokens, and holds so many.
    pub(super) fn decoding(working: &Arc<Working>, kv_tokens: u64) -> Self {
        working.decoding.fetch_add(1, Ordering::Relaxed);
        let mut running = Running::begin(working, 0).holding(kv_tokens);
        running.is_decoding = true;
        running
    }

    /// A token came so long after the one before.
    pub(super) fn said(&self, since: Duration) {
        let mut said = self.working.said.lock();
        said.tokens += 1;
        said.all = said.all.saturating_add(since);
    }

    /// Its prefill is over: it still runs, and no longer stands in the queue.
    pub(super) fn prefilled(&mut self) {
        self.working.tokens.fetch_sub(std::mem::take(&mut self.tokens), Ordering::Relaxed);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.prefilled();
        self.working.kv_tokens.fetch_sub(self.kv_tokens, Ordering::Relaxed);
        self.working.decoding.fetch_sub(self.is_decoding.into(), Ordering::Relaxed);
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
        assert_eq!(working.snapshot(), Snapshot { queue_tokens: 150, running: 2, ..Snapshot::default() });
        let waits = Waiting::begin(&working);
        assert_eq!((working.snapshot().running, working.snapshot().waiting), (1, 1), "one of the two waits");
        drop(waits);
        second.prefilled();
        assert_eq!(working.snapshot().queue_tokens, 100);
        drop((first, second));
        assert_eq!(working.snapshot(), Snapshot { served: 2, ..Snapshot::default() });
    }

    #[test]
    fn what_decodes_holds_tokens_until_it_ends_and_tells_how_far_apart_they_come() {
        let working = Arc::new(Working::default());
        let (one, other) = (Running::decoding(&working, 100), Running::begin(&working, 5).holding(7));
        assert_eq!((working.decoding(), working.snapshot().kv_tokens), (1, 107));
        let begun = Instant::now();
        let told = |ms| working.tbt_us(begun + Duration::from_millis(ms), Duration::from_millis(100));
        assert_eq!(told(0), 0, "before the first");
        (0..1_000).for_each(|_| one.said(Duration::from_millis(20)));
        assert_eq!((told(200), told(201), told(299)), (20_000, 20_000, 20_000), "to each router");
        (0..10).for_each(|_| one.said(Duration::from_millis(40)));
        (0..10).for_each(|_| one.said(Duration::from_millis(60)));
        assert_eq!(told(400), 50_000, "since the report before");
        assert_eq!(told(600), 0, "nothing was said since");
        drop((one, other));
        assert_eq!((working.decoding(), working.snapshot().kv_tokens), (0, 0));
    }
}
