//! Circuit breakers of engines.
//!
//! A closed breaker admits every request. Failures in a row open it, and an open breaker admits
//! none. After a delay it is half open and admits one trial request at a time. Enough successful
//! trials close it, and one failure opens it again.
//!
//! Pure: time is an argument. Not here: which outcomes count as failures (`forward.rs`).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kv_core::id::InstanceId;
use parking_lot::Mutex;

use super::config::BreakerConfig;
use crate::endpoints::EndpointRegistry;
use crate::metrics::OpenAiMetrics;

/// Breakers of removed engines are dropped once there are this many more breakers than known
/// engines.
const STALE_BREAKERS_MAX: usize = 64;

/// State of one breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CircuitBreaker {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
    },
    /// `first` is the number of the first trial request, `trial` the number of the current one.
    HalfOpen {
        successes: u32,
        first: u64,
        trial: Option<u64>,
    },
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        CircuitBreaker::Closed { failures: 0 }
    }
}

impl CircuitBreaker {
    /// Whether a request may be sent to the engine.
    pub(super) fn admits(self, now: Instant) -> bool {
        match self {
            CircuitBreaker::Closed { .. } => true,
            CircuitBreaker::Open { until } => now >= until,
            CircuitBreaker::HalfOpen { trial, .. } => trial.is_none(),
        }
    }

    /// Registers request `number` if the engine may take it. Returns whether it may.
    pub(super) fn try_enter(&mut self, number: u64, now: Instant) -> bool {
        let admits = self.admits(now);
        if admits {
            self.enter(number);
        }
        admits
    }

    /// Registers request `number` regardless of the state, because every other engine is blocked
    /// too.
    pub(super) fn enter(&mut self, number: u64) {
        match self {
            CircuitBreaker::Closed { .. } => {}
            CircuitBreaker::Open { .. } => {
                *self = CircuitBreaker::HalfOpen { successes: 0, first: number, trial: Some(number) };
            }
            // A request in addition to the current trial does not become one.
            CircuitBreaker::HalfOpen { trial, .. } => *trial = Some(trial.unwrap_or(number)),
        }
    }

    /// Time until which it is open; `None`, which is less than any time, unless it is open.
    pub(super) fn open_until(self) -> Option<Instant> {
        match self {
            CircuitBreaker::Open { until } => Some(until),
            CircuitBreaker::Closed { .. } | CircuitBreaker::HalfOpen { .. } => None,
        }
    }

    /// Records that the answer to request `number` began.
    pub(super) fn record_start(&mut self, number: u64, config: &BreakerConfig) {
        let CircuitBreaker::HalfOpen { successes, trial, .. } = self else { return };
        // A request from before the trial does not count.
        if *trial != Some(number) {
            return;
        }
        (*successes, *trial) = (*successes + 1, None);
        if *successes >= config.successes {
            *self = CircuitBreaker::default();
        }
    }

    /// Records that an answer ended normally, which resets the count of failures. The start of an
    /// answer does not reset it, since an engine may break off every answer.
    pub(super) fn record_success(&mut self) {
        if let CircuitBreaker::Closed { failures } = self {
            *failures = 0;
        }
    }

    /// Records a failure of request `number`. Returns whether it opened the breaker.
    pub(super) fn record_failure(&mut self, number: u64, config: &BreakerConfig, now: Instant) -> bool {
        let opens = match self {
            CircuitBreaker::Closed { failures } => {
                *failures += 1;
                *failures >= config.failures
            }
            // Any request since the first trial opens it again, even if its answer had begun;
            // earlier requests do not.
            CircuitBreaker::HalfOpen { first, .. } => number >= *first,
            CircuitBreaker::Open { .. } => false,
        };
        if opens {
            *self = CircuitBreaker::Open { until: now + Duration::from_millis(config.open_ms) };
        }
        opens
    }

    /// Records that request `number` ended without a verdict on the engine.
    pub(super) fn record_abandoned(&mut self, number: u64) {
        if let CircuitBreaker::HalfOpen { trial, .. } = self
            && *trial == Some(number)
        {
            *trial = None;
        }
    }
}

/// Breakers of all engines.
#[derive(Debug)]
pub(super) struct CircuitBreakers {
    config: BreakerConfig,
    all: Mutex<HashMap<InstanceId, CircuitBreaker>>,
    /// Number of the next request.
    next: AtomicU64,
    metrics: OpenAiMetrics,
    /// Endpoints; their probers are told of failures.
    endpoints: EndpointRegistry,
}

impl CircuitBreakers {
    pub(super) fn new(
        config: BreakerConfig,
        metrics: OpenAiMetrics,
        endpoints: EndpointRegistry,
    ) -> CircuitBreakers {
        CircuitBreakers { config, all: Mutex::default(), next: AtomicU64::new(0), metrics, endpoints }
    }

    /// Instances that may not be sent requests now.
    pub(super) fn blocked_instances(&self, now: Instant) -> Vec<InstanceId> {
        let all = self.all.lock();
        all.iter().filter(|(_, breaker)| !breaker.admits(now)).map(|(instance, _)| *instance).collect()
    }

    /// Registers a request to an instance; `None` if its breaker does not admit it.
    pub(super) fn try_enter(self: &Arc<Self>, instance: InstanceId, now: Instant) -> Option<AttemptGuard> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let is_claimed = self.all.lock().entry(instance).or_default().try_enter(number, now);
        is_claimed.then(|| AttemptGuard { breakers: self.clone(), instance, number, is_pending: true })
    }

    /// Registers a request to an instance that its breaker blocks.
    pub(super) fn enter_anyway(self: &Arc<Self>, instance: InstanceId) -> AttemptGuard {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.all.lock().entry(instance).or_default().enter(number);
        AttemptGuard { breakers: self.clone(), instance, number, is_pending: true }
    }

    /// The instance with the earliest end of its open state.
    pub(super) fn longest_open(&self, among: &[InstanceId]) -> Option<InstanceId> {
        let all = self.all.lock();
        let opened = |instance: &InstanceId| all.get(instance).and_then(|breaker| breaker.open_until());
        among.iter().copied().min_by_key(opened)
    }

    /// Drops breakers of unknown instances, once there are many.
    pub(super) fn forget_unknown(&self) {
        let most = self.endpoints.count() + STALE_BREAKERS_MAX;
        if self.all.lock().len() <= most {
            return;
        }
        let known: BTreeSet<_> = self.endpoints.list().iter().map(|known| known.instance).collect();
        self.all.lock().retain(|instance, _| known.contains(instance));
    }

    fn update(&self, instance: InstanceId, change: impl FnOnce(&mut CircuitBreaker)) {
        let mut all = self.all.lock();
        change(all.entry(instance).or_default());
        let open = all.values().filter(|breaker| !matches!(breaker, CircuitBreaker::Closed { .. })).count();
        self.metrics.breakers_open(open);
    }
}

/// Guard of one request to an engine. Dropping it without a recorded outcome counts as abandoned.
#[derive(Debug)]
pub(super) struct AttemptGuard {
    breakers: Arc<CircuitBreakers>,
    instance: InstanceId,
    number: u64,
    is_pending: bool,
}

impl AttemptGuard {
    pub(super) fn record_start(&self) {
        self.breakers
            .update(self.instance, |breaker| breaker.record_start(self.number, &self.breakers.config));
    }

    pub(super) fn record_success(mut self) {
        self.is_pending = false;
        self.breakers.update(self.instance, CircuitBreaker::record_success);
    }

    pub(super) fn record_failure(mut self, now: Instant) {
        self.is_pending = false;
        let breakers = self.breakers.clone();
        breakers.endpoints.request_probe(self.instance);
        breakers.update(self.instance, |breaker| {
            if breaker.record_failure(self.number, &breakers.config, now) {
                tracing::warn!(
                    instance = self.instance.0,
                    "the circuit breaker of an engine opened after too many failures"
                );
                breakers.metrics.breaker_opened();
            }
        });
    }
}

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        if self.is_pending {
            self.breakers.update(self.instance, |breaker| breaker.record_abandoned(self.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: BreakerConfig = BreakerConfig { failures: 3, successes: 2, open_ms: 1_000 };

    #[test]
    fn opens_after_failures_and_closes_after_successes() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = CircuitBreaker::default();
        for number in 0..2 {
            assert!(!breaker.record_failure(number, &CONFIG, at(0)));
            assert!(!breaker.record_failure(number, &CONFIG, at(0)));
            breaker.record_start(number, &CONFIG);
            breaker.record_success();
        }
        assert_eq!(breaker, CircuitBreaker::Closed { failures: 0 });
        let opened: Vec<_> = (0..3).map(|number| breaker.record_failure(number, &CONFIG, at(10))).collect();
        assert_eq!(opened, [false, false, true]);
        assert!(!breaker.try_enter(4, at(1_009)));
        assert!(!breaker.record_failure(2, &CONFIG, at(900)), "an earlier request changes nothing");
        assert!(breaker.try_enter(5, at(1_010)));
        assert!(!breaker.try_enter(6, at(1_010)), "one trial at a time");
        breaker.record_start(5, &CONFIG);
        assert!(breaker.try_enter(7, at(1_011)));
        breaker.record_abandoned(7);
        assert!(breaker.try_enter(8, at(1_012)), "an abandoned trial frees the slot");
        breaker.record_start(8, &CONFIG);
        assert_eq!(breaker, CircuitBreaker::Closed { failures: 0 });
    }

    #[test]
    fn one_failure_reopens_a_half_open_breaker() {
        let start = Instant::now();
        let mut breaker = CircuitBreaker::Open { until: start };
        assert!(breaker.try_enter(0, start));
        breaker.record_start(0, &CONFIG);
        assert!(breaker.try_enter(1, start));
        assert!(breaker.record_failure(0, &CONFIG, start), "its answer broke off after it had begun");
        assert!(!breaker.admits(start + Duration::from_millis(999)));
        assert!(breaker.admits(start + Duration::from_millis(1_000)));
    }

    #[test]
    fn other_requests_do_not_end_a_trial() {
        let start = Instant::now();
        let mut breaker = CircuitBreaker::Open { until: start };
        assert!(breaker.try_enter(10, start));
        let trying = breaker;
        breaker.record_start(9, &CONFIG);
        breaker.record_abandoned(9);
        assert!(!breaker.record_failure(9, &CONFIG, start));
        assert_eq!(breaker, trying);
        // A request in addition to the trial does not end it either.
        breaker.enter(11);
        breaker.record_start(11, &CONFIG);
        breaker.record_abandoned(11);
        assert_eq!(breaker, trying);
        assert!(breaker.record_failure(11, &CONFIG, start), "its failure counts");
    }

    #[test]
    fn broken_answers_open_the_breaker() {
        let now = Instant::now();
        let mut breaker = CircuitBreaker::default();
        let opened: Vec<_> = (0..3)
            .map(|number| {
                assert!(breaker.try_enter(number, now));
                breaker.record_start(number, &CONFIG);
                breaker.record_failure(number, &CONFIG, now)
            })
            .collect();
        assert_eq!(opened, [false, false, true]);
    }
}
