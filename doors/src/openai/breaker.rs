//! When an engine that fails is left alone, and how it is tried again.
//!
//! Closed, everything goes there; after some failures in a row it is open and nothing does; after a while it is half open, and one request at a time
//! does, until so many answers closed it or one failure opened it. Pure: time is an argument. Not here: what counts as a failure (`forward.rs`).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kv_core::id::InstanceId;
use parking_lot::Mutex;

use super::config::BreakerConfig;
use crate::endpoints::Endpoints;
use crate::metrics::Metrics;

/// Breakers of engines that left are forgotten when there are so many more than known engines.
const FORGOTTEN_ABOVE: usize = 64;

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Breaker {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
    },
    /// `first` is the number of the first request that tried it, `trial` that of the one that does now.
    HalfOpen {
        successes: u32,
        first: u64,
        trial: Option<u64>,
    },
}

impl Default for Breaker {
    fn default() -> Self {
        Breaker::Closed { failures: 0 }
    }
}

impl Breaker {
    /// Whether a request may go there.
    pub(super) fn admits(self, now: Instant) -> bool {
        match self {
            Breaker::Closed { .. } => true,
            Breaker::Open { until } => now >= until,
            Breaker::HalfOpen { trial, .. } => trial.is_none(),
        }
    }

    /// A request with this number goes there, if it may.
    pub(super) fn claim(&mut self, number: u64, now: Instant) -> bool {
        let admits = self.admits(now);
        if admits {
            self.enter(number);
        }
        admits
    }

    /// A request with this number goes there, because every other engine is left alone as well.
    pub(super) fn enter(&mut self, number: u64) {
        match self {
            Breaker::Closed { .. } => {}
            Breaker::Open { .. } => {
                *self = Breaker::HalfOpen { successes: 0, first: number, trial: Some(number) };
            }
            // Who comes beside a trial tells nothing by an answer.
            Breaker::HalfOpen { trial, .. } => *trial = Some(trial.unwrap_or(number)),
        }
    }

    /// When it opened, as far as it did: earlier is less.
    pub(super) fn opened(self) -> Option<Instant> {
        match self {
            Breaker::Open { until } => Some(until),
            Breaker::Closed { .. } | Breaker::HalfOpen { .. } => None,
        }
    }

    /// An answer to a request began.
    pub(super) fn began(&mut self, number: u64, config: &BreakerConfig) {
        let Breaker::HalfOpen { successes, trial, .. } = self else { return };
        // Of a request that went there before.
        if *trial != Some(number) {
            return;
        }
        (*successes, *trial) = (*successes + 1, None);
        if *successes >= config.successes {
            *self = Breaker::default();
        }
    }

    /// An answer ended as it should: what failed before was no row. An answer that only began says nothing against an engine that cuts
    /// all of them.
    pub(super) fn ended(&mut self) {
        if let Breaker::Closed { failures } = self {
            *failures = 0;
        }
    }

    /// A request failed there. Whether that opened it.
    pub(super) fn failed(&mut self, number: u64, config: &BreakerConfig, now: Instant) -> bool {
        let opens = match self {
            Breaker::Closed { failures } => {
                *failures += 1;
                *failures >= config.failures
            }
            // An answer that began well and broke off opens it as well; a request that went there before does not.
            Breaker::HalfOpen { first, .. } => number >= *first,
            Breaker::Open { .. } => false,
        };
        if opens {
            *self = Breaker::Open { until: now + Duration::from_millis(config.open_ms) };
        }
        opens
    }

    /// A request went away before it was known how the engine does.
    pub(super) fn abandoned(&mut self, number: u64) {
        if let Breaker::HalfOpen { trial, .. } = self
            && *trial == Some(number)
        {
            *trial = None;
        }
    }
}

/// Breakers of all engines.
#[derive(Debug)]
pub(super) struct Breakers {
    config: BreakerConfig,
    all: Mutex<HashMap<InstanceId, Breaker>>,
    /// Number of the next request.
    next: AtomicU64,
    metrics: Metrics,
    /// Whoever looks after an engine is told of what fails there.
    endpoints: Endpoints,
}

impl Breakers {
    pub(super) fn new(config: BreakerConfig, metrics: Metrics, endpoints: Endpoints) -> Breakers {
        Breakers { config, all: Mutex::default(), next: AtomicU64::new(0), metrics, endpoints }
    }

    /// Engines that may be sent nothing now.
    pub(super) fn closed_to(&self, now: Instant) -> Vec<InstanceId> {
        let all = self.all.lock();
        all.iter().filter(|(_, breaker)| !breaker.admits(now)).map(|(instance, _)| *instance).collect()
    }

    /// A request goes there, if it may.
    pub(super) fn claim(self: &Arc<Self>, instance: InstanceId, now: Instant) -> Option<Claim> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let is_claimed = self.all.lock().entry(instance).or_default().claim(number, now);
        is_claimed.then(|| Claim { breakers: self.clone(), instance, number, is_open: true })
    }

    /// A request goes there although it is left alone.
    pub(super) fn claim_closed(self: &Arc<Self>, instance: InstanceId) -> Claim {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.all.lock().entry(instance).or_default().enter(number);
        Claim { breakers: self.clone(), instance, number, is_open: true }
    }

    /// Which of these has been left alone for longest.
    pub(super) fn first_opened(&self, among: &[InstanceId]) -> Option<InstanceId> {
        let all = self.all.lock();
        let opened = |instance: &InstanceId| all.get(instance).and_then(|breaker| breaker.opened());
        among.iter().copied().min_by_key(opened)
    }

    /// Forgets engines that are known no more, once there are many.
    pub(super) fn keep_known(&self) {
        let most = self.endpoints.count() + FORGOTTEN_ABOVE;
        if self.all.lock().len() <= most {
            return;
        }
        let known: BTreeSet<_> = self.endpoints.list().iter().map(|known| known.instance).collect();
        self.all.lock().retain(|instance, _| known.contains(instance));
    }

    fn change(&self, instance: InstanceId, change: impl FnOnce(&mut Breaker)) {
        let mut all = self.all.lock();
        change(all.entry(instance).or_default());
        let open = all.values().filter(|breaker| !matches!(breaker, Breaker::Closed { .. })).count();
        self.metrics.breakers_open(open);
    }
}

/// A request that goes to an engine. Dropped without a word, it says nothing of it.
#[derive(Debug)]
pub(super) struct Claim {
    breakers: Arc<Breakers>,
    instance: InstanceId,
    number: u64,
    is_open: bool,
}

impl Claim {
    pub(super) fn began(&self) {
        self.breakers.change(self.instance, |breaker| breaker.began(self.number, &self.breakers.config));
    }

    pub(super) fn ended(mut self) {
        self.is_open = false;
        self.breakers.change(self.instance, Breaker::ended);
    }

    pub(super) fn failed(mut self, now: Instant) {
        self.is_open = false;
        let breakers = self.breakers.clone();
        breakers.endpoints.doubt(self.instance);
        breakers.change(self.instance, |breaker| {
            if breaker.failed(self.number, &breakers.config, now) {
                tracing::warn!(instance = self.instance.0, "an engine failed too often and is left alone");
                breakers.metrics.breaker_opened();
            }
        });
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.is_open {
            self.breakers.change(self.instance, |breaker| breaker.abandoned(self.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: BreakerConfig = BreakerConfig { failures: 3, successes: 2, open_ms: 1_000 };

    #[test]
    fn it_opens_after_failures_in_a_row_and_closes_after_answers_in_a_row() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = Breaker::default();
        for number in 0..2 {
            assert!(!breaker.failed(number, &CONFIG, at(0)));
            assert!(!breaker.failed(number, &CONFIG, at(0)));
            breaker.began(number, &CONFIG);
            breaker.ended();
        }
        assert_eq!(breaker, Breaker::Closed { failures: 0 });
        let opened: Vec<_> = (0..3).map(|number| breaker.failed(number, &CONFIG, at(10))).collect();
        assert_eq!(opened, [false, false, true]);
        assert!(!breaker.claim(4, at(1_009)));
        assert!(!breaker.failed(2, &CONFIG, at(900)), "an earlier request changes nothing");
        assert!(breaker.claim(5, at(1_010)));
        assert!(!breaker.claim(6, at(1_010)), "one at a time");
        breaker.began(5, &CONFIG);
        assert!(breaker.claim(7, at(1_011)));
        breaker.abandoned(7);
        assert!(breaker.claim(8, at(1_012)), "who left said nothing");
        breaker.began(8, &CONFIG);
        assert_eq!(breaker, Breaker::Closed { failures: 0 });
    }

    #[test]
    fn one_failure_opens_it_again_while_it_is_half_open() {
        let start = Instant::now();
        let mut breaker = Breaker::Open { until: start };
        assert!(breaker.claim(0, start));
        breaker.began(0, &CONFIG);
        assert!(breaker.claim(1, start));
        assert!(breaker.failed(0, &CONFIG, start), "its answer broke off after it had begun");
        assert!(!breaker.admits(start + Duration::from_millis(999)));
        assert!(breaker.admits(start + Duration::from_millis(1_000)));
    }

    #[test]
    fn a_request_from_before_ends_no_trial() {
        let start = Instant::now();
        let mut breaker = Breaker::Open { until: start };
        assert!(breaker.claim(10, start));
        let trying = breaker;
        breaker.began(9, &CONFIG);
        breaker.abandoned(9);
        assert!(!breaker.failed(9, &CONFIG, start));
        assert_eq!(breaker, trying);
        // One that came beside the trial, because nobody else was left, neither.
        breaker.enter(11);
        breaker.began(11, &CONFIG);
        breaker.abandoned(11);
        assert_eq!(breaker, trying);
        assert!(breaker.failed(11, &CONFIG, start), "its failure counts");
    }

    #[test]
    fn an_engine_that_cuts_every_answer_opens_it() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        let opened: Vec<_> = (0..3)
            .map(|number| {
                assert!(breaker.claim(number, now));
                breaker.began(number, &CONFIG);
                breaker.failed(number, &CONFIG, now)
            })
            .collect();
        assert_eq!(opened, [false, false, true]);
    }
}
