//! Whether a path that failed is asked again: a circuit breaker, time passed in.
//!
//! Closed, it lets everything pass; after some failures in a row it opens, and everything goes another way; after a time one
//! trial passes, and what becomes of it closes the breaker or opens it for twice as long. A path that fails again soon after it
//! was let pass goes on from there: what a trial cannot see must not cost each second a request. Fetches that hear nothing are
//! counted apart: only one that brings something shows that others will, and no sign of life does. Lanes of RDMA have one each, too
//! (`rdma/lane.rs`). Not here: what counts as a failure (`path.rs`), and what is done where every path's breaker is open
//! (`dialer.rs`).

use std::time::Duration;

use tokio::time::Instant;

/// When a breaker opens and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRules {
    /// Failures in a row that open it, and fetches in a row that heard nothing.
    pub failures_max: u32,
    /// How long it is open at first.
    pub open_min: Duration,
    /// How long it is open at most, however often its trials failed.
    pub open_max: Duration,
    /// How long a trial is waited for: one that nobody brought to an end lets another pass after that.
    pub trial_max: Duration,
}

impl Default for BreakerRules {
    fn default() -> BreakerRules {
        BreakerRules {
            // One is an accident; a path that fails three times in a row costs each request a wait.
            failures_max: 3,
            open_min: Duration::from_secs(1),
            open_max: Duration::from_secs(60),
            trial_max: Duration::from_secs(5),
        }
    }
}

/// Times as long as it had been open, within which a failure is of the same trouble.
const SOON: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// `trouble`: when the trial passed that closed it, and for how long it had been open.
    Closed {
        failures: u32,
        trouble: Option<(Instant, Duration)>,
    },
    Open {
        until: Instant,
        lasts: Duration,
    },
    HalfOpen {
        since: Instant,
        lasted: Duration,
    },
}

/// What one path's failures led to.
#[derive(Clone, Debug)]
pub(crate) struct Breaker {
    rules: BreakerRules,
    state: State,
    /// Fetches that heard nothing since one brought something.
    unheard: u32,
}

impl Breaker {
    pub(crate) fn new(rules: BreakerRules) -> Breaker {
        Breaker { rules, state: State::Closed { failures: 0, trouble: None }, unheard: 0 }
    }

    /// Whether everything passes.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// When a trial may pass; nothing while everything does.
    #[cfg(feature = "rdma")]
    pub(crate) fn trial_at(&self) -> Option<Instant> {
        match self.state {
            State::Closed { .. } => None,
            State::Open { until, .. } => Some(until),
            State::HalfOpen { since, .. } => Some(since + self.rules.trial_max),
        }
    }

    /// Whether the path may be asked now. Of a breaker that is not closed only a trial passes, one at a time, and
    /// whoever is let pass says what became of it.
    pub(crate) fn passes(&mut self, now: Instant) -> bool {
        let lasted = match self.state {
            State::Closed { .. } => return true,
            State::Open { until, lasts } if now >= until => lasts,
            State::HalfOpen { since, lasted } if now >= since + self.rules.trial_max => lasted,
            State::Open { .. } | State::HalfOpen { .. } => return false,
        };
        self.state = State::HalfOpen { since: now, lasted };
        true
    }

    /// The path did what it was asked. Something that began before the breaker opened says nothing new.
    pub(crate) fn succeeded(&mut self) {
        let trouble = match self.state {
            State::Open { .. } => return,
            State::HalfOpen { since, lasted } => Some((since, lasted)),
            State::Closed { trouble, .. } => trouble,
        };
        self.state = State::Closed { failures: 0, trouble };
    }

    /// A fetch brought something.
    pub(crate) fn brought(&mut self) {
        self.unheard = 0;
        self.succeeded();
    }

    /// The path failed; whether that opened it.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        if let State::Closed { failures, trouble } = self.state
            && failures + 1 < self.rules.failures_max
        {
            self.state = State::Closed { failures: failures + 1, trouble };
            return false;
        }
        self.open(now, false)
    }

    /// A fetch heard nothing in all the time that it had; whether that opened it. Where it was open for that before, and nothing was brought
    /// since, one is enough, whenever it comes.
    pub(crate) fn unheard(&mut self, now: Instant) -> bool {
        self.unheard = self.unheard.saturating_add(1);
        let is_enough = self.unheard >= self.rules.failures_max || !self.is_closed();
        is_enough && self.open(now, self.unheard > self.rules.failures_max)
    }

    /// `is_same`: it is the trouble for which it was open before.
    fn open(&mut self, now: Instant, is_same: bool) -> bool {
        let longer = |lasted: Duration| lasted.saturating_mul(2).min(self.rules.open_max);
        let lasts = match self.state {
            State::Closed { trouble: Some((since, lasted)), .. }
                if is_same || now.saturating_duration_since(since) < lasted.saturating_mul(SOON) =>
            {
                longer(lasted)
            }
            State::Closed { .. } => self.rules.open_min,
            State::HalfOpen { lasted, .. } => longer(lasted),
            State::Open { .. } => return false,
        };
        self.state = State::Open { until: now + lasts, lasts };
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

    /// One that opened now.
    fn opened() -> (Instant, Breaker) {
        let (now, mut breaker) = (Instant::now(), Breaker::new(RULES));
        assert_eq!([breaker.failed(now), breaker.failed(now), breaker.failed(now)], [false, false, true]);
        (now, breaker)
    }

    #[test]
    fn only_failures_in_a_row_open_it() {
        let (now, mut breaker) = (Instant::now(), Breaker::new(RULES));
        for _ in 0..10 {
            assert!(!breaker.failed(now) && !breaker.failed(now));
            breaker.succeeded();
        }
        assert!(breaker.passes(now) && breaker.is_closed());
        assert_eq!([breaker.failed(now), breaker.failed(now), breaker.failed(now)], [false, false, true]);
        assert!(!breaker.passes(now + Duration::from_millis(999)) && !breaker.is_closed());
    }

    #[test]
    fn one_trial_passes_and_decides() {
        let (now, mut breaker) = opened();
        assert!(breaker.passes(now + secs(1)), "the trial");
        assert!(!breaker.passes(now + secs(1)), "and nothing beside it");
        assert!(breaker.failed(now + secs(1)));
        assert!(!breaker.passes(now + secs(2)) && breaker.passes(now + secs(3)), "twice as long");
        breaker.succeeded();
        assert!(breaker.is_closed() && breaker.passes(now + secs(3)) && breaker.passes(now + secs(3)));
        assert!(!breaker.failed(now + secs(3)), "it counts from nothing again");
    }

    #[test]
    fn what_fails_again_soon_after_its_trial_is_left_alone_for_longer_each_time() {
        let (mut now, mut breaker) = opened();
        for lasts in [1, 2, 4, 8, 8] {
            assert!(!breaker.passes(now + secs(lasts) - Duration::from_millis(1)), "open for {lasts} s");
            now += secs(lasts);
            assert!(breaker.passes(now));
            breaker.succeeded();
            now += Duration::from_millis(10);
            breaker.succeeded();
            assert_eq!([breaker.failed(now), breaker.failed(now), breaker.failed(now)], [false, false, true]);
        }
        now += secs(8);
        assert!(breaker.passes(now));
        breaker.succeeded();
        now += secs(32);
        assert_eq!([breaker.failed(now), breaker.failed(now), breaker.failed(now)], [false, false, true]);
        assert!(breaker.passes(now + secs(1)), "it was well for long: this is another trouble");
    }

    #[test]
    #[cfg(feature = "rdma")]
    fn whoever_makes_trials_knows_when() {
        let (now, mut breaker) = opened();
        assert_eq!(breaker.trial_at(), Some(now + secs(1)));
        assert!(breaker.passes(now + secs(2)));
        assert_eq!(
            breaker.trial_at(),
            Some(now + secs(7)),
            "when nobody says what became of the one under way"
        );
        breaker.succeeded();
        assert_eq!(breaker.trial_at(), None);
    }

    #[test]
    fn a_trial_that_nobody_ended_gives_way_to_another() {
        let (now, mut breaker) = opened();
        assert!(breaker.passes(now + secs(1)));
        assert!(!breaker.passes(now + secs(5)) && breaker.passes(now + secs(6)));
    }

    #[test]
    fn what_began_before_it_opened_changes_nothing() {
        let (now, mut breaker) = opened();
        breaker.succeeded();
        assert!(!breaker.failed(now + Duration::from_millis(900)) && !breaker.passes(now));
        assert!(breaker.passes(now + secs(1)), "late failures do not keep it open for longer");
    }

    #[test]
    fn signs_of_life_do_not_outweigh_fetches_that_hear_nothing() {
        let (mut now, mut breaker) = (Instant::now(), Breaker::new(RULES));
        let unheard = |breaker: &mut Breaker, now| {
            breaker.succeeded();
            breaker.unheard(now)
        };
        assert_eq!([(); 3].map(|()| unheard(&mut breaker, now)), [false, false, true]);
        // From then on one tells what no trial sees, and it is left alone for longer each time.
        for lasts in [1, 2, 4, 8, 8] {
            assert!(!breaker.passes(now + secs(lasts) - Duration::from_millis(1)));
            now += secs(lasts);
            assert!(breaker.passes(now));
            breaker.succeeded();
            now += secs(100);
            assert!(unheard(&mut breaker, now), "after {lasts} s");
        }
        now += secs(8);
        assert!(breaker.passes(now));
        breaker.brought();
        assert_eq!(
            [(); 3].map(|()| unheard(&mut breaker, now)),
            [false, false, true],
            "it counts from nothing"
        );
    }

    /// However things go, a path is left alone for the longest time at most, and what passes while it is not closed is
    /// one trial at a time.
    #[test]
    fn it_is_never_closed_to_a_path_for_good_and_never_floods_it() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let (mut now, mut breaker) = (Instant::now(), Breaker::new(RULES));
            let (mut refused_since, mut trials) = (None, Vec::<Instant>::new());
            for _ in 0..500 {
                now += Duration::from_millis(random.random_range(0..700));
                let was_closed = breaker.is_closed();
                if breaker.passes(now) {
                    refused_since = None;
                    if !was_closed {
                        trials.push(now);
                    }
                    match random.random_range(0..3) {
                        0 => breaker.succeeded(),
                        1 => {
                            breaker.failed(now);
                        }
                        _ => {} // nobody says
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
