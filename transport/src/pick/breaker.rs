//! A circuit breaker for a path; the caller passes the time in.
//!
//! While closed, it allows everything. After several consecutive failures it opens, and traffic
//! uses other paths. After a time it allows one trial, which closes the breaker or opens it for
//! twice as long. A path that fails again soon after its trial continues with the doubled time:
//! failures that a trial cannot see must not cost a request every second.
//!
//! Silent fetches (without any answer) are counted separately: only a fetch that delivers data
//! resets them, pings do not. RDMA rail pairs have breakers too (`kvfleet-rdma`). Not here: the
//! definition of a failure (`path.rs`), and the case that every breaker is open (`dialer.rs`).

use std::time::Duration;

use tokio::time::Instant;

/// When a breaker opens and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRules {
    /// Consecutive failures that open it; the same for consecutive silent fetches.
    pub failures_max: u32,
    /// How long it stays open at first.
    pub open_min: Duration,
    /// Longest time that it stays open, however often its trials fail.
    pub open_max: Duration,
    /// How long a trial may run. An unreported trial allows another one after that.
    pub trial_max: Duration,
}

impl Default for BreakerRules {
    fn default() -> BreakerRules {
        BreakerRules {
            // A single failure may be an accident; three in a row would cost every request a wait.
            failures_max: 3,
            open_min: Duration::from_secs(1),
            open_max: Duration::from_secs(60),
            trial_max: Duration::from_secs(5),
        }
    }
}

/// A failure within this many times the last open time counts as a relapse.
const RELAPSE_FACTOR: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BreakerState {
    /// `last_trial`: when the trial that closed it was allowed, and how long it had been open.
    Closed {
        failures: u32,
        last_trial: Option<(Instant, Duration)>,
    },
    Open {
        until: Instant,
        duration: Duration,
    },
    HalfOpen {
        since: Instant,
        duration: Duration,
    },
}

/// State of one path's breaker.
#[derive(Clone, Debug)]
pub struct Breaker {
    rules: BreakerRules,
    state: BreakerState,
    /// Silent fetches since one delivered data.
    silent_fetches: u32,
}

impl Breaker {
    /// A closed breaker.
    #[must_use]
    pub fn new(rules: BreakerRules) -> Breaker {
        Breaker { rules, state: BreakerState::Closed { failures: 0, last_trial: None }, silent_fetches: 0 }
    }

    /// Whether it allows everything.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self.state, BreakerState::Closed { .. })
    }

    /// Time of the next trial; `None` while closed.
    #[must_use]
    pub fn trial_at(&self) -> Option<Instant> {
        match self.state {
            BreakerState::Closed { .. } => None,
            BreakerState::Open { until, .. } => Some(until),
            BreakerState::HalfOpen { since, .. } => Some(since + self.rules.trial_max),
        }
    }

    /// Whether the path may be used now. If not closed, it allows one trial at a time, and the
    /// caller reports the result.
    pub fn allows(&mut self, now: Instant) -> bool {
        let lasted = match self.state {
            BreakerState::Closed { .. } => return true,
            BreakerState::Open { until, duration: lasts } if now >= until => lasts,
            BreakerState::HalfOpen { since, duration: lasted } if now >= since + self.rules.trial_max => {
                lasted
            }
            BreakerState::Open { .. } | BreakerState::HalfOpen { .. } => return false,
        };
        self.state = BreakerState::HalfOpen { since: now, duration: lasted };
        true
    }

    /// Records a success. A result of something started before the breaker opened is ignored.
    pub fn record_success(&mut self) {
        let trouble = match self.state {
            BreakerState::Open { .. } => return,
            BreakerState::HalfOpen { since, duration: lasted } => Some((since, lasted)),
            BreakerState::Closed { last_trial: trouble, .. } => trouble,
        };
        self.state = BreakerState::Closed { failures: 0, last_trial: trouble };
    }

    /// Records a fetch that delivered data.
    pub(crate) fn record_delivery(&mut self) {
        self.silent_fetches = 0;
        self.record_success();
    }

    /// Records a failure. Returns whether it opened the breaker.
    pub fn record_failure(&mut self, now: Instant) -> bool {
        if let BreakerState::Closed { failures, last_trial: trouble } = self.state
            && failures + 1 < self.rules.failures_max
        {
            self.state = BreakerState::Closed { failures: failures + 1, last_trial: trouble };
            return false;
        }
        self.open(now, false)
    }

    /// Records a silent fetch: no answer in all its time. Returns whether it opened the breaker. If
    /// the breaker was open for this before, and no fetch delivered data since, one is enough at
    /// any time.
    pub(crate) fn record_silence(&mut self, now: Instant) -> bool {
        self.silent_fetches = self.silent_fetches.saturating_add(1);
        let is_enough = self.silent_fetches >= self.rules.failures_max || !self.is_closed();
        is_enough && self.open(now, self.silent_fetches > self.rules.failures_max)
    }

    /// `is_same`: it reopens for the same reason as before.
    fn open(&mut self, now: Instant, is_relapse: bool) -> bool {
        let longer = |lasted: Duration| lasted.saturating_mul(2).min(self.rules.open_max);
        let lasts = match self.state {
            BreakerState::Closed { last_trial: Some((since, lasted)), .. }
                if is_relapse
                    || now.saturating_duration_since(since) < lasted.saturating_mul(RELAPSE_FACTOR) =>
            {
                longer(lasted)
            }
            BreakerState::Closed { .. } => self.rules.open_min,
            BreakerState::HalfOpen { duration: lasted, .. } => longer(lasted),
            BreakerState::Open { .. } => return false,
        };
        self.state = BreakerState::Open { until: now + lasts, duration: lasts };
        true
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const RULES: BreakerRules = BreakerRules {
        failures_max: 3,
        open_min: Duration::from_secs(1),
        open_max: Duration::from_secs(8),
        trial_max: Duration::from_secs(5),
    };

    const fn secs(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    /// A breaker that opened now.
    fn opened_breaker() -> (Instant, Breaker) {
        let (now, mut breaker) = (Instant::now(), Breaker::new(RULES));
        assert_eq!(
            [breaker.record_failure(now), breaker.record_failure(now), breaker.record_failure(now)],
            [false, false, true]
        );
        (now, breaker)
    }

    #[test]
    fn only_consecutive_failures_open_it() {
        let (now, mut breaker) = (Instant::now(), Breaker::new(RULES));
        for _ in 0..10 {
            assert!(!breaker.record_failure(now) && !breaker.record_failure(now));
            breaker.record_success();
        }
        assert!(breaker.allows(now) && breaker.is_closed());
        assert_eq!(
            [breaker.record_failure(now), breaker.record_failure(now), breaker.record_failure(now)],
            [false, false, true]
        );
        assert!(!breaker.allows(now + Duration::from_millis(999)) && !breaker.is_closed());
    }

    #[test]
    fn one_trial_passes_and_decides() {
        let (now, mut breaker) = opened_breaker();
        assert!(breaker.allows(now + secs(1)), "the trial is not allowed");
        assert!(!breaker.allows(now + secs(1)), "a second trial is allowed");
        assert!(breaker.record_failure(now + secs(1)));
        assert!(
            !breaker.allows(now + secs(2)) && breaker.allows(now + secs(3)),
            "it is not open for twice as long"
        );
        breaker.record_success();
        assert!(breaker.is_closed() && breaker.allows(now + secs(3)) && breaker.allows(now + secs(3)));
        assert!(!breaker.record_failure(now + secs(3)), "old failures still count");
    }

    #[test]
    fn relapses_double_the_open_time() {
        let (mut now, mut breaker) = opened_breaker();
        for lasts in [1, 2, 4, 8, 8] {
            assert!(!breaker.allows(now + secs(lasts) - Duration::from_millis(1)), "not open for {lasts} s");
            now += secs(lasts);
            assert!(breaker.allows(now));
            breaker.record_success();
            now += Duration::from_millis(10);
            breaker.record_success();
            assert_eq!(
                [breaker.record_failure(now), breaker.record_failure(now), breaker.record_failure(now)],
                [false, false, true]
            );
        }
        now += secs(8);
        assert!(breaker.allows(now));
        breaker.record_success();
        now += secs(32);
        assert_eq!(
            [breaker.record_failure(now), breaker.record_failure(now), breaker.record_failure(now)],
            [false, false, true]
        );
        assert!(breaker.allows(now + secs(1)), "a late failure counts as a relapse");
    }

    #[test]
    fn trial_time_is_known() {
        let (now, mut breaker) = opened_breaker();
        assert_eq!(breaker.trial_at(), Some(now + secs(1)));
        assert!(breaker.allows(now + secs(2)));
        assert_eq!(
            breaker.trial_at(),
            Some(now + secs(7)),
            "the time after which an unreported trial expires"
        );
        breaker.record_success();
        assert_eq!(breaker.trial_at(), None);
    }

    #[test]
    fn an_unreported_trial_expires() {
        let (now, mut breaker) = opened_breaker();
        assert!(breaker.allows(now + secs(1)));
        assert!(!breaker.allows(now + secs(5)) && breaker.allows(now + secs(6)));
    }

    #[test]
    fn results_from_before_the_opening_are_ignored() {
        let (now, mut breaker) = opened_breaker();
        breaker.record_success();
        assert!(!breaker.record_failure(now + Duration::from_millis(900)) && !breaker.allows(now));
        assert!(breaker.allows(now + secs(1)), "late failures prolong the open time");
    }

    #[test]
    fn pings_do_not_outweigh_silent_fetches() {
        let (mut now, mut breaker) = (Instant::now(), Breaker::new(RULES));
        let unheard = |breaker: &mut Breaker, now| {
            breaker.record_success();
            breaker.record_silence(now)
        };
        assert_eq!([(); 3].map(|()| unheard(&mut breaker, now)), [false, false, true]);
        // From now on one silent fetch opens it again, for longer each time.
        for lasts in [1, 2, 4, 8, 8] {
            assert!(!breaker.allows(now + secs(lasts) - Duration::from_millis(1)));
            now += secs(lasts);
            assert!(breaker.allows(now));
            breaker.record_success();
            now += secs(100);
            assert!(unheard(&mut breaker, now), "not opened after {lasts} s");
        }
        now += secs(8);
        assert!(breaker.allows(now));
        breaker.record_delivery();
        assert_eq!(
            [(); 3].map(|()| unheard(&mut breaker, now)),
            [false, false, true],
            "old silent fetches still count"
        );
    }

    /// In any sequence of events, a path is suspended for the longest time at most, and an unclosed
    /// breaker allows one trial at a time.
    #[test]
    fn it_always_allows_a_trial_and_only_one_at_a_time() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let (mut now, mut breaker) = (Instant::now(), Breaker::new(RULES));
            let (mut refused_since, mut trials) = (None, Vec::<Instant>::new());
            for _ in 0..500 {
                now += Duration::from_millis(random.random_range(0..700));
                let was_closed = breaker.is_closed();
                if breaker.allows(now) {
                    refused_since = None;
                    if !was_closed {
                        trials.push(now);
                    }
                    match random.random_range(0..3) {
                        0 => breaker.record_success(),
                        1 => {
                            breaker.record_failure(now);
                        }
                        _ => {} // unreported
                    }
                } else {
                    let since = *refused_since.get_or_insert(now);
                    assert!(now - since < RULES.open_max + RULES.trial_max, "seed {seed}");
                }
            }
            let gaps = trials.windows(2).map(|pair| pair[1] - pair[0]);
            assert!(gaps.min().is_none_or(|least| least >= RULES.open_min), "seed {seed}");
        }
    }
}
