//! Current load of an instance: requests in flight, their tokens, and the time between generated
//! tokens.
//!
//! Not here: reports to the routers (`report.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Counters shared by all calls.
#[derive(Debug, Default)]
pub(super) struct LoadCounters {
    tokens: AtomicU64,
    in_flight: AtomicU32,
    waiting: AtomicU32,
    served: AtomicU64,
    kv_tokens: AtomicU64,
    decoding: AtomicU32,
    token_pace: Mutex<TokenPace>,
}

/// Time between tokens.
#[derive(Debug, Default)]
struct TokenPace {
    /// Tokens since `since`, and the sum of their times.
    tokens: u64,
    total: Duration,
    since: Option<Instant>,
    /// Mean time of the previous interval in microseconds; 0 without tokens.
    last_mean_us: u32,
}

/// Values of [`LoadCounters`] at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LoadSnapshot {
    /// Uncached prompt tokens of requests in flight, until their compute is accounted.
    pub(super) queue_tokens: u64,
    /// Requests in flight that are not waiting.
    pub(super) running: u32,
    /// Requests in flight that wait for the accelerator.
    pub(super) waiting: u32,
    /// Finished requests.
    pub(super) served: u64,
    /// Tokens in GPU memory for requests in flight.
    pub(super) kv_tokens: u64,
}

impl LoadCounters {
    pub(super) fn snapshot(&self) -> LoadSnapshot {
        let waiting = self.waiting.load(Ordering::Relaxed);
        LoadSnapshot {
            queue_tokens: self.tokens.load(Ordering::Relaxed),
            running: self.in_flight.load(Ordering::Relaxed).saturating_sub(waiting),
            waiting,
            served: self.served.load(Ordering::Relaxed),
            kv_tokens: self.kv_tokens.load(Ordering::Relaxed),
        }
    }

    /// Mean time between tokens of a request since the previous report, in microseconds; 0 without
    /// tokens. Reports within `within` get the same value, since there is one per router.
    pub(super) fn tbt_us(&self, now: Instant, within: Duration) -> u32 {
        let mut said = self.token_pace.lock();
        if said.since.is_none_or(|since| now.saturating_duration_since(since) >= within) {
            let mean_us = said.total.as_micros() / u128::from(said.tokens.max(1));
            let before_us = u32::try_from(mean_us).unwrap_or(u32::MAX);
            *said = TokenPace { since: Some(now), last_mean_us: before_us, ..TokenPace::default() };
        }
        said.last_mean_us
    }

    /// Requests that decode.
    pub(super) fn decoding(&self) -> u32 {
        self.decoding.load(Ordering::Relaxed)
    }
}

/// A request in flight, counted until dropped.
#[derive(Debug)]
pub(super) struct InFlightRequest {
    counters: Arc<LoadCounters>,
    tokens: u64,
    kv_tokens: u64,
    is_decoding: bool,
}

impl InFlightRequest {
    pub(super) fn start(working: &Arc<LoadCounters>, tokens: u64) -> Self {
        working.tokens.fetch_add(tokens, Ordering::Relaxed);
        working.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { counters: Arc::clone(working), tokens, kv_tokens: 0, is_decoding: false }
    }

    /// Counts `kv_tokens` in GPU memory for the request until it ends.
    pub(super) fn with_kv_tokens(mut self, kv_tokens: u64) -> Self {
        self.counters.kv_tokens.fetch_add(kv_tokens, Ordering::Relaxed);
        self.kv_tokens += kv_tokens;
        self
    }

    /// Counts a decoding request with `kv_tokens` in GPU memory.
    pub(super) fn start_decoding(working: &Arc<LoadCounters>, kv_tokens: u64) -> Self {
        working.decoding.fetch_add(1, Ordering::Relaxed);
        let mut running = InFlightRequest::start(working, 0).with_kv_tokens(kv_tokens);
        running.is_decoding = true;
        running
    }

    /// Records the time from the previous token.
    pub(super) fn record_token(&self, since: Duration) {
        let mut said = self.counters.token_pace.lock();
        said.tokens += 1;
        said.total = said.total.saturating_add(since);
    }

    /// Ends the prefill: the request still runs, but leaves the queue.
    pub(super) fn finish_prefill(&mut self) {
        self.counters.tokens.fetch_sub(std::mem::take(&mut self.tokens), Ordering::Relaxed);
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        self.finish_prefill();
        self.counters.kv_tokens.fetch_sub(self.kv_tokens, Ordering::Relaxed);
        self.counters.decoding.fetch_sub(self.is_decoding.into(), Ordering::Relaxed);
        self.counters.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.counters.served.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts the request as waiting for the accelerator until dropped.
#[derive(Debug)]
pub(super) struct WaitingGuard {
    counters: Arc<LoadCounters>,
}

impl WaitingGuard {
    pub(super) fn start(working: &Arc<LoadCounters>) -> Self {
        working.waiting.fetch_add(1, Ordering::Relaxed);
        Self { counters: Arc::clone(working) }
    }
}

impl Drop for WaitingGuard {
    fn drop(&mut self) {
        self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_a_request_until_it_ends() {
        let working = Arc::new(LoadCounters::default());
        let first = InFlightRequest::start(&working, 100);
        let mut second = InFlightRequest::start(&working, 50);
        assert_eq!(
            working.snapshot(),
            LoadSnapshot { queue_tokens: 150, running: 2, ..LoadSnapshot::default() }
        );
        let waits = WaitingGuard::start(&working);
        assert_eq!((working.snapshot().running, working.snapshot().waiting), (1, 1), "one of the two waits");
        drop(waits);
        second.finish_prefill();
        assert_eq!(working.snapshot().queue_tokens, 100);
        drop((first, second));
        assert_eq!(working.snapshot(), LoadSnapshot { served: 2, ..LoadSnapshot::default() });
    }

    #[test]
    fn counts_decoding_requests_and_their_pace() {
        let working = Arc::new(LoadCounters::default());
        let (one, other) = (
            InFlightRequest::start_decoding(&working, 100),
            InFlightRequest::start(&working, 5).with_kv_tokens(7),
        );
        assert_eq!((working.decoding(), working.snapshot().kv_tokens), (1, 107));
        let begun = Instant::now();
        let told = |ms| working.tbt_us(begun + Duration::from_millis(ms), Duration::from_millis(100));
        assert_eq!(told(0), 0, "before any token");
        (0..1_000).for_each(|_| one.record_token(Duration::from_millis(20)));
        assert_eq!((told(200), told(201), told(299)), (20_000, 20_000, 20_000), "the same for each router");
        (0..10).for_each(|_| one.record_token(Duration::from_millis(40)));
        (0..10).for_each(|_| one.record_token(Duration::from_millis(60)));
        assert_eq!(told(400), 50_000, "since the previous report");
        assert_eq!(told(600), 0, "no tokens since");
        drop((one, other));
        assert_eq!((working.decoding(), working.snapshot().kv_tokens), (0, 0));
    }
}
